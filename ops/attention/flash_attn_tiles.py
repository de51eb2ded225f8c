"""Register tiles of flash attention for decode, as LLVM IR builders: dot products and weighted sums.

    scores     G rows x J keys, lanes along D, sums folded at the end          s[g][j] = q[g] . k[j]
    output     G rows x some vectors of columns                                acc[g] += p[g][j] v[j]

Every K and V element is loaded and widened once for all rows of a tile.  Loops over D and over the keys are real loops
with hidden trip counts: unrolled, LLVM hoists loads until the accumulators spill (16 registers without AVX-512).
Rows of any length are read exactly: a tail of n < lanes elements is put together from power-of-two pieces.
"""
import functools

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ggjit.ops.native import isa, simd
from ggjit.ops.native.jit import ir_function
from ggjit.ops.native.mem import IR_F32, IR_I64
from ggjit.ops.native.simd import W

BK = 64                                     # keys of a block: their visibility is one 64-bit word
ACC = 16 if isa.ISA == "avx512" else 8      # accumulators of the decode tiles
ROW_NBYTES = BK * 4                         # bytes of a row of scores
AHEAD = 32                                  # keys between a prefetch and its use
ALWAYS_AHEAD = isa.ISA != "avx512"          # see _prefetch_row_ir
ELEMENT_NBYTES = {"f32": 4, "f16": 2, "bf16": 2}


def lanes(n):
    """Vector width for rows of n elements: the native one, or the power of two that holds a short row."""
    w = 4
    while w < W and w < n:
        w *= 2
    return w


def padded(n):
    """n rounded up to whole vectors."""
    return -(-n // lanes(n)) * lanes(n)


# ---------------------------------------------------------------- rows of any element type and length
def _widen_ir(b, addr, elem, n):
    """n elements at addr as <n x float>."""
    if elem == "f32":
        return simd.load_ir(b, addr, simd.vec_ir("f32", n))
    if elem == "f16":
        return b.fpext(simd.load_ir(b, addr, simd.vec_ir("f16", n)), simd.vec_ir("f32", n))
    half = b.zext(simd.load_ir(b, addr, simd.vec_ir("i16", n)), simd.vec_ir("i32", n))
    return b.bitcast(b.shl(half, simd.const_ir("i32", [16] * n)), simd.vec_ir("f32", n))


def _lanes_ir(b, addr, elem, n, w):
    """The first n <= w elements at addr as <w x float>, zeros above; no byte beyond them is read."""
    if n == w:
        return _widen_ir(b, addr, elem, w)
    v, at = ir.Constant(simd.vec_ir("f32", w), None), 0
    for piece in (p for p in (8, 4, 2, 1) if n & p):
        x = _widen_ir(b, simd.offset_ir(b, addr, at * ELEMENT_NBYTES[elem]), elem, piece)
        x = simd.shuffle_ir(b, x, x, [max(0, min(i - at, piece - 1)) for i in range(w)])
        v = simd.shuffle_ir(b, v, x, [w + i if at <= i < at + piece else i for i in range(w)])
        at += piece
    return v


def _row_vectors(n):
    """(first element, elements in it) of each vector of a row of n elements."""
    w = lanes(n)
    return [(i, min(w, n - i)) for i in range(0, n, w)]


@functools.cache
def make_copy_row(elem, n):
    """copy_row(src, dst, scale): n elements times scale -> float32, zero padded to whole vectors."""
    w = lanes(n)

    @intrinsic
    def copy_row(typingctx, src, dst, scale):
        def codegen(context, b, sig, args):
            src, dst, scale = args
            s = simd.splat_ir(b, scale, w)
            for i, m in _row_vectors(n):
                v = _lanes_ir(b, simd.offset_ir(b, src, i * ELEMENT_NBYTES[elem]), elem, m, w)
                simd.store_ir(b, b.fmul(v, s), simd.offset_ir(b, dst, 4 * i))
            return context.get_dummy_value()
        return types.void(types.int64, types.int64, types.float32), codegen
    return copy_row


@functools.cache
def make_store_row(n):
    """store_row(src, dst, scale): n float32 of padded scratch times scale; exactly n elements are written."""
    w = lanes(n)

    @intrinsic
    def store_row(typingctx, src, dst, scale):
        def codegen(context, b, sig, args):
            src, dst, scale = args
            s = simd.splat_ir(b, scale, w)
            for i, m in _row_vectors(n):
                v = b.fmul(simd.load_ir(b, simd.offset_ir(b, src, 4 * i), simd.vec_ir("f32", w)), s)
                at = 0
                for piece in [w] if m == w else [p for p in (8, 4, 2, 1) if m & p]:
                    part = simd.shuffle_ir(b, v, v, range(at, at + piece))
                    simd.store_ir(b, part, simd.offset_ir(b, dst, 4 * (i + at)))
                    at += piece
            return context.get_dummy_value()
        return types.void(types.int64, types.int64, types.float32), codegen
    return store_row


def _prefetch_row_ir(b, addr, nbytes):
    """Prefetch the cache lines of a row: those of one head lie apart, which hardware prefetchers follow badly
    (docs/measured.md, "Choices in the kernels")."""
    i32, p8 = ir.IntType(32), ir.IntType(8).as_pointer()
    fnty = ir.FunctionType(ir.VoidType(), [p8, i32, i32, i32])
    f = cgutils.get_or_insert_function(b.module, fnty, "llvm.prefetch.p0")
    for i in range(0, nbytes, 64):
        p = b.inttoptr(simd.offset_ir(b, addr, i), p8)
        b.call(f, [p, ir.Constant(i32, 0), ir.Constant(i32, 3), ir.Constant(i32, 1)])


@functools.cache
def make_look_ahead(nbytes):
    """look_ahead(row, stride): prefetch the row of `nbytes` that is AHEAD rows later."""
    @ir_function
    def look_ahead(b, row, stride):
        _prefetch_row_ir(b, b.add(row, b.mul(stride, ir.Constant(IR_I64, AHEAD))), nbytes)
    return look_ahead


# ---------------------------------------------------------------- few rows: dot products
def _sums_ir(b, vs, n):
    """Up to n vectors of groups of n lanes -> one vector: lane i of a group = sum of that group of vector i."""
    w, s = vs[0].type.count, 1
    while s < n:
        if len(vs) > 1:
            vs = vs + vs[-1:] * (len(vs) % 2)
            even = [(i & ~s) + (w if i & s else 0) for i in range(w)]
            odd = [i + s for i in even]
            vs = [b.fadd(simd.shuffle_ir(b, x, y, even), simd.shuffle_ir(b, x, y, odd))
                  for x, y in zip(vs[::2], vs[1::2], strict=True)]
        else:
            vs = [b.fadd(vs[0], simd.shuffle_ir(b, vs[0], vs[0], [i ^ s for i in range(w)]))]
        s *= 2
    return vs[0]


def _keys_at_once(w, n_rows):
    """(J, U): keys of a tile, accumulators per (row, key); w: lanes of a row."""
    if w < W:
        return W, 1
    if n_rows == 1:
        return (4, 2) if ACC == 16 else (2, 4)
    j = 1
    while 2 * j * n_rows <= min(w, ACC):
        j *= 2
    return j, 1


def _dot_products_ir(b, q, keys, elem, d, n_rows, u):
    """{(row, key): <w x float> whose lanes sum to q[row] . key}; q rows are float32 scratch, padded."""
    w, size, stride = lanes(d), ELEMENT_NBYTES[elem], 4 * padded(d)
    step = max(u, 2)

    def accumulate(acc, vectors, at):
        """vectors: [(first element, count)] relative to element `at` (an IR value, or None for 0)."""
        for x, (i, m) in enumerate(vectors):
            kq = [simd.offset_ir(b, k if at is None else b.add(k, b.mul(at, ir.Constant(IR_I64, size))), i * size)
                  for k in keys]
            qa = simd.offset_ir(b, q if at is None else b.add(q, b.mul(at, ir.Constant(IR_I64, 4))), 4 * i)
            for j, ka in enumerate(kq):
                kv = _lanes_ir(b, ka, elem, m, w)
                for g in range(n_rows):
                    n = (x % u) * n_rows * len(keys) + g * len(keys) + j
                    qv = simd.load_ir(b, simd.offset_ir(b, qa, g * stride), simd.vec_ir("f32", w))
                    acc[n] = simd.fma_ir(b, kv, qv, acc[n])
        return acc

    vectors, n_full = _row_vectors(d), d // w
    acc = [ir.Constant(simd.vec_ir("f32", w), None)] * (n_rows * len(keys) * u)
    n_steps = n_full // step if n_full > step else 0
    if n_steps:
        def body(b, state):
            return [b.add(state[0], ir.Constant(IR_I64, step * w))] + accumulate(list(state[1:]), vectors[:step],
                                                                                state[0])
        count = simd.opaque_ir(b, ir.Constant(IR_I64, n_steps))
        acc = simd.counted_loop_ir(b, count, [(IR_I64, ir.Constant(IR_I64, 0))] + [(a.type, a) for a in acc], body)[1:]
    acc = accumulate(list(acc), vectors[n_steps * step:], None)
    while len(acc) > n_rows * len(keys):
        half = len(acc) // 2
        acc = [b.fadd(x, y) for x, y in zip(acc[:half], acc[half:], strict=True)]
    return acc


def _store_sums_ir(b, acc, n_keys, out):
    """acc: the vectors of all keys of row 0, then of row 1..; their sums go to out, whose rows are BK floats apart."""
    w = acc[0].type.count
    for at in range(0, len(acc), w):
        sums = _sums_ir(b, acc[at:at + w], w)
        for x in range(at, min(at + w, len(acc)), n_keys):
            part = simd.shuffle_ir(b, sums, sums, range(x - at, x - at + n_keys))
            simd.store_ir(b, part, simd.offset_ir(b, out, x // n_keys * BK * 4))


def _store_short_dots_ir(b, q, keys, elem, d, n_rows, out):
    """q[row] . key of W keys that have w = lanes(d) < W lanes each; a vector holds several of them:

        vector i  | key i | key i + w | ..          so that the sums over w lanes come in the keys' order
    """
    w = lanes(d)
    vectors = [_joined_ir(b, [_lanes_ir(b, key, elem, d, w) for key in keys[i::w]]) for i in range(w)]
    for g in range(n_rows):
        row = simd.load_ir(b, simd.offset_ir(b, q, 4 * g * padded(d)), simd.vec_ir("f32", w))
        row = _joined_ir(b, [row] * (W // w))
        simd.store_ir(b, _sums_ir(b, [b.fmul(v, row) for v in vectors], w), simd.offset_ir(b, out, g * BK * 4))


def _joined_ir(b, vs):
    """A power of two of vectors, end to end."""
    while len(vs) > 1:
        vs = [simd.shuffle_ir(b, x, y, range(2 * x.type.count)) for x, y in zip(vs[::2], vs[1::2], strict=True)]
    return vs[0]


@functools.cache
def make_dots(elem, d, n_rows):
    """dots(q, k, stride, n, out): out[g][j] = q[g] . k[j] for j < n; n >= 1, k[j] at k + j * stride.

    out rows are BK floats apart; up to J - 1 floats beyond n are written in each.
    """
    n_keys, u = _keys_at_once(lanes(d), n_rows)

    @ir_function
    def dots(b, q, k, stride, n, out):
        zero = ir.Constant(IR_I64, 0)
        strides = [b.mul(stride, ir.Constant(IR_I64, j)) for j in range(n_keys + 1)]
        ahead = b.mul(stride, ir.Constant(IR_I64, AHEAD))

        def body(b, state):
            k, o, left = state
            keys = [k] + [b.add(k, b.select(b.icmp_signed(">", left, ir.Constant(IR_I64, j)), strides[j], zero))
                          for j in range(1, n_keys)]            # keys beyond the last: the first one again
            for key in keys if ALWAYS_AHEAD or n_rows > 1 else ():
                _prefetch_row_ir(b, b.add(key, ahead), d * ELEMENT_NBYTES[elem])
            if lanes(d) < W:
                _store_short_dots_ir(b, q, keys, elem, d, n_rows, o)
            else:
                _store_sums_ir(b, _dot_products_ir(b, q, keys, elem, d, n_rows, u), n_keys, o)
            left = b.sub(left, ir.Constant(IR_I64, n_keys))
            return [b.add(k, strides[n_keys]), simd.offset_ir(b, o, 4 * n_keys), left]
        groups = b.sdiv(b.add(n, ir.Constant(IR_I64, n_keys - 1)), ir.Constant(IR_I64, n_keys))
        simd.counted_loop_ir(b, groups, [(IR_I64, k), (IR_I64, out), (IR_I64, n)], body)
    return dots


# ---------------------------------------------------------------- few rows: weighted sums
def _loop_ir(b, count, carried, body):
    """counted_loop_ir for count >= 0."""
    entry = b.basic_block
    head, inside, done = (b.append_basic_block(n) for n in ("keys", "keys.body", "keys.end"))
    b.branch(head)
    b.position_at_end(head)
    left = b.phi(IR_I64)
    left.add_incoming(count, entry)
    phis = [b.phi(t) for t, _ in carried]
    for p, (_, start) in zip(phis, carried, strict=True):
        p.add_incoming(start, entry)
    b.cbranch(b.icmp_signed(">", left, ir.Constant(IR_I64, 0)), inside, done)
    b.position_at_end(inside)
    new = body(b, phis)
    for p, v in zip([left, *phis], [b.sub(left, ir.Constant(IR_I64, 1)), *new], strict=True):
        p.add_incoming(v, b.basic_block)
    b.branch(head)
    b.position_at_end(done)
    return phis


def _weighted_part_ir(b, p, v, stride, n, acc, factor, part, elem, stride_acc, ahead):
    """The columns `part` (first element, count) of all rows; ahead: (bytes to look ahead, row bytes) or None.

    A sum is a chain of FMAs, four cycles each: narrow parts take several keys at a time, each with its sums.
    """
    w, n_rows = factor[0].type.count, len(factor)
    where = [(g, simd.offset_ir(b, acc, g * stride_acc + 4 * i)) for g in range(n_rows) for i, _ in part]
    sums = [b.fmul(factor[g], simd.load_ir(b, a, simd.vec_ir("f32", w))) for g, a in where]
    n_keys = 4 if len(sums) <= 2 else 2 if len(sums) <= 4 else 1

    def keys_at_once(n_keys):
        def body(b, state):
            p, v, sums = state[0], state[1], list(state[2:])
            for j in range(n_keys):
                if ahead is not None:
                    _prefetch_row_ir(b, b.add(v, ahead[0]), ahead[1])
                x = [_lanes_ir(b, simd.offset_ir(b, v, i * ELEMENT_NBYTES[elem]), elem, m, w) for i, m in part]
                for g in range(n_rows):
                    pg = simd.splat_ir(b, simd.load_ir(b, simd.offset_ir(b, p, g * BK * 4 + 4 * j), IR_F32), w)
                    for i in range(len(part)):
                        at = j * len(where) + g * len(part) + i
                        sums[at] = simd.fma_ir(b, x[i], pg, sums[at])
                v = b.add(v, stride)
            return [simd.offset_ir(b, p, 4 * n_keys), v] + sums
        return body

    sums = sums + [ir.Constant(simd.vec_ir("f32", w), None)] * (len(sums) * (n_keys - 1))
    carried = [(IR_I64, p), (IR_I64, v)] + [(s.type, s) for s in sums]
    if n_keys > 1:
        p, v, *sums = _loop_ir(b, b.sdiv(n, ir.Constant(IR_I64, n_keys)), carried, keys_at_once(n_keys))
        while len(sums) > len(where):
            half = len(sums) // 2
            sums = [b.fadd(x, y) for x, y in zip(sums[:half], sums[half:], strict=True)]
        carried = [(IR_I64, p), (IR_I64, v)] + [(s.type, s) for s in sums]
        sums = _loop_ir(b, b.srem(n, ir.Constant(IR_I64, n_keys)), carried, keys_at_once(1))[2:]
    else:
        sums = simd.counted_loop_ir(b, n, carried, keys_at_once(1))[2:]
    for (_, a), s in zip(where, sums, strict=True):
        simd.store_ir(b, s, a)


@functools.cache
def make_weighted(elem, d, n_rows):
    """weighted(p, v, stride, n, acc, scale): acc[g] = scale[g] acc[g] + sum over j < n of p[g][j] v[j]; n >= 1.

    The columns go in parts of as many vectors as there are registers for: the first one looks ahead, equal ones in
    the middle are one loop (code for 576 columns would take seconds to compile), the rest comes last.
    """
    w, size, stride_acc = lanes(d), ELEMENT_NBYTES[elem], 4 * padded(d)
    vectors = _row_vectors(d)
    at_once = max(1, ACC // n_rows)
    first, rest = vectors[:at_once], vectors[at_once:]
    n_middle = d // w // at_once - 1 if len(first) == at_once else 0
    last = rest[max(0, n_middle) * at_once:]

    @ir_function
    def weighted(b, p, v, stride, n, acc, scale):
        factor = [simd.splat_ir(b, simd.load_ir(b, simd.offset_ir(b, scale, 4 * g), IR_F32), w) for g in range(n_rows)]
        ahead = (b.mul(stride, ir.Constant(IR_I64, AHEAD)), d * size) if ALWAYS_AHEAD or n_rows > 1 else None
        _weighted_part_ir(b, p, v, stride, n, acc, factor, first, elem, stride_acc, ahead)
        if n_middle > 0:
            def body(b, state):
                v, acc = state
                _weighted_part_ir(b, p, v, stride, n, acc, factor, first, elem, stride_acc, None)
                return [simd.offset_ir(b, v, at_once * w * size), simd.offset_ir(b, acc, at_once * w * 4)]
            start = [(IR_I64, simd.offset_ir(b, v, at_once * w * size)),
                     (IR_I64, simd.offset_ir(b, acc, at_once * w * 4))]
            simd.counted_loop_ir(b, simd.opaque_ir(b, ir.Constant(IR_I64, n_middle)), start, body)
        if last:
            _weighted_part_ir(b, p, v, stride, n, acc, factor, last, elem, stride_acc, None)
    return weighted
