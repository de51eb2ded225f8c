"""Kernels for ARM processors, run by any: NEON's instructions are what they mean, as LLVM IR that every processor has.

    become("neon-v8.6")     in a process of its own, before ggjit is imported
    wrong(names, columns, repacked)         which products of weights of these types are not right

What a kernel does with a level's instructions is checked this way; that the processor has them is not.
"""
import numba
import numpy as np
from llvmlite import binding as llvm
from llvmlite import ir

FEATURES = {"neon": "+neon,+fp-armv8", "neon-v8.2": "+neon,+fp-armv8,+dotprod,+fullfp16,+lse,+rcpc"}
FEATURES["neon-v8.4"] = FEATURES["neon-v8.2"] + ",+fp16fml"
FEATURES["neon-v8.6"] = FEATURES["neon-v8.4"] + ",+i8mm,+bf16"
LIMIT = 5e-4                    # NMSE that ggml's own tests allow where columns are rounded to 8 bits


def _i(n):
    return ir.Constant(ir.IntType(32), n)


def _pick(b, v, order):
    return b.shuffle_vector(v, v, ir.Constant(ir.VectorType(ir.IntType(32), len(order)), list(order)))


def _sums(b, v, n):
    """Sums of n neighbours."""
    total = _pick(b, v, range(0, v.type.count, n))
    for first in range(1, n):
        total = b.add(total, _pick(b, v, range(first, v.type.count, n)))
    return total


def _wide(b, v, bits=32):
    return b.sext(v, ir.VectorType(ir.IntType(bits), v.type.count))


def _sdot(b, type, acc, x, y):
    return b.add(acc, _sums(b, b.mul(_wide(b, x), _wide(b, y)), 4))


def _smmla(b, type, acc, x, y):
    rows, columns = ([8 * at + t for at in order for t in range(8)] for order in ((0, 0, 1, 1), (0, 1, 0, 1)))
    return b.add(acc, _sums(b, b.mul(_wide(b, _pick(b, x, rows)), _wide(b, _pick(b, y, columns))), 8))


def _smull(b, type, x, y):
    return b.mul(b.sext(x, type), b.sext(y, type))


def _addp(b, type, x, y):
    both = ir.Constant(ir.VectorType(ir.IntType(32), 2 * x.type.count), list(range(2 * x.type.count)))
    return _sums(b, b.shuffle_vector(x, y, both), 2)


def _saddlp(b, type, x):
    return _sums(b, _wide(b, x), 2)


def _vsli(b, type, x, y, n):
    mask = 256 - (1 << n.constant)
    return b.or_(b.and_(x, ir.Constant(type, [~mask & 255] * 16)), b.shl(y, ir.Constant(type, [n.constant] * 16)))


def _vsri(b, type, x, y, n):
    kept = 255 & ~(255 >> n.constant)
    return b.or_(b.and_(x, ir.Constant(type, [kept] * 16)), b.lshr(y, ir.Constant(type, [n.constant] * 16)))


def _tbl1(b, type, table, index):
    out = ir.Constant(type, None)
    for lane in range(type.count):
        out = b.insert_element(out, b.extract_element(table, b.extract_element(index, _i(lane))), _i(lane))
    return out


def _fmlal(b, type, acc, x, y, first=0):
    x, y = (b.fpext(_pick(b, v, range(first, first + 4)), type) for v in (x, y))
    return b.fadd(acc, b.fmul(x, y))


def _fmlal2(b, type, acc, x, y):
    return _fmlal(b, type, acc, x, y, 4)


def _bfdot(b, type, acc, x, y):
    words = [b.bitcast(v, ir.VectorType(ir.IntType(16), 8)) for v in (x, y)]
    shift = ir.Constant(ir.VectorType(ir.IntType(32), 8), [16] * 8)
    x, y = (b.bitcast(b.shl(b.zext(v, shift.type), shift), ir.VectorType(ir.FloatType(), 8)) for v in words)
    products = b.fmul(x, y)
    return b.fadd(acc, b.fadd(_pick(b, products, range(0, 8, 2)), _pick(b, products, range(1, 8, 2))))


MEANINGS = {f.__name__[1:]: f for f in (_sdot, _smmla, _smull, _addp, _saddlp, _vsli, _vsri, _tbl1, _fmlal, _fmlal2,
                                       _bfdot)}


def become(level):
    asked = llvm.get_process_triple, llvm.get_host_cpu_features
    llvm.get_process_triple, llvm.get_host_cpu_features = (lambda: "aarch64-unknown-linux-gnu"), dict
    config = numba.config
    kept, config.CPU_FEATURES, config.CPU_NAME = (config.CPU_FEATURES, config.CPU_NAME), FEATURES[level], "cortex-x1"
    from ggjit.ops.native import isa
    llvm.get_process_triple, llvm.get_host_cpu_features = asked
    config.CPU_FEATURES, config.CPU_NAME = kept
    assert isa.LEVEL == level, isa.LEVEL
    isa.ARM64 = False                           # no instruction of ARM's but those below
    from ggjit.ops.native import compiler, neon
    del compiler._Codegen._get_host_cpu_name, compiler._Codegen._get_host_cpu_features        # code for this processor
    neon._call = lambda b, name, type, *args: MEANINGS[name.partition(".")[0]](b, type, *args)


def wrong(names, columns, repacked):
    """What differs of products of weights of these types with so many columns: from float64, or with its neighbours."""
    import ggjit as gg
    from ggjit.ops.core.types import BY_NAME
    cpu, rng, found = gg.init_backend("CPU", n_threads=2), np.random.default_rng(), []
    extra = {b.name: b for b in cpu.device.extra_buffer_types()}["CPU_REPACK"]
    for name in names:
        type = BY_NAME[name]
        k, m = max(96, 2 * type.block), 24
        raw = gg.quantize(type, rng.standard_normal((m, k)).astype(np.float32), imatrix=np.ones(k, np.float32))
        values = gg.dequantize(type, raw, (m, k)).astype(np.float64)
        x = rng.standard_normal((max(columns), k)).astype(np.float32)
        want, results = x.astype(np.float64) @ values.T, {}
        for n in columns:
            ctx = gg.Context()
            a = ctx.new_tensor(type, (k, m))
            gg.alloc_ctx_tensors(ctx, extra if repacked else cpu)
            a.set_bytes(raw.tobytes())
            results[n] = gg.compute(gg.mul_mat(a, gg.from_numpy(ctx, x[:n])), backend=cpu)
            error = ((results[n] - want[:n]) ** 2).sum() / (want[:n] ** 2).sum()
            if not error <= LIMIT:
                found.append(f"{name} with {n} columns: NMSE {error:.1e}")
        if repacked and any(r.tobytes() != results[max(columns)][:n].tobytes() for n, r in results.items()):
            found.append(f"{name}: a column's sums depend on its neighbours")
    return found
