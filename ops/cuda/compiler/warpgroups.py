"""Products of warpgroups: four warps that together multiply 64 rows, from registers, by columns in shared memory.

Hopper's alone (compute capability 9.0; build.py links for sm_90a).  The columns lie as `wgmma` reads them with swizzled
lines of 128 bytes (PTX ISA, "Strides", "Swizzling modes"):

    line of column c    1024 (c / 8) + 128 (c % 8)          64 values of k, in 8 pieces of 16 bytes
    piece p of it       at place p ^ (c % 8): lanes that read one piece of 8 columns meet no bank twice

`simulated_warpgroups.py` has the same names.
"""
from llvmlite import ir
from numba import types
from numba.cuda.extending import intrinsic

from ggjit.ops.cuda.compiler.intrinsics import F32, I32, I64, _acting

K, K_OF_ONE = 64, 16                            # of a line, of one instruction
LEADING, EIGHT_LINES, SWIZZLED_128 = 1, 1024, 1         # of the descriptor: bytes / 16 in bits 16, 32; mode in bit 62
DESCRIPTOR = LEADING << 16 | EIGHT_LINES >> 4 << 32 | SWIZZLED_128 << 62
ADDRESS_BITS = 0x3FFFF


@intrinsic
def fence_shared(typingctx):
    """What this thread wrote to shared memory is seen by `wgmma` of those that meet it at the next barrier."""
    return _acting("fence.proxy.async.shared::cta;", "~{memory}")


def _text(n, letters):
    """The instructions of one step: operands 0 ... n / 2 - 1 results, then the same again, 16 words, the descriptor."""
    results, first = ", ".join(f"${i}" for i in range(n // 2)), n
    lines = ["{ .reg .b64 at;", "wgmma.fence.sync.aligned;"]
    for i in range(K // K_OF_ONE):
        words = ", ".join(f"${first + 4 * i + j}" for j in range(4))
        lines += [f"add.s64 at, ${first + 16}, {2 * K_OF_ONE * i >> 4};",
                  f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{letters}.{letters} {{{results}}}, {{{words}}}, at, "
                  f"1, 1, 1, 0;"]
    return "\n".join([*lines, "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0; }"])


def wgmma(n, bf16=False):
    """multiply(acc, a, at): acc += 64 rows of 64 values by n columns at the address `at`, a multiple of 1024.

    acc     n / 2 float32: of columns 8 j ... 8 j + 7 four, as mma_f16 has them
    a       16 words: for each 16 values of k four, as mma_f16 has them; warp w of the four has rows 16 w ... 16 w + 15
    """
    n_acc, text = n // 2, _text(n, "bf16" if bf16 else "f16")
    constraints = ",".join(["=f"] * n_acc + [str(i) for i in range(n_acc)] + ["r"] * 16 + ["l", "~{memory}"])

    @intrinsic
    def multiply(typingctx, acc, a, at):
        def codegen(context, b, sig, args):
            def elements(i, type, count):
                data = context.make_array(sig.args[i])(context, b, args[i]).data
                return [b.gep(b.bitcast(data, type.as_pointer(data.type.addrspace)), [ir.Constant(I32, j)])
                        for j in range(count)]
            results, words = elements(0, F32, n_acc), elements(1, I32, 16)
            at = b.lshr(b.and_(args[2], ir.Constant(I64, ADDRESS_BITS)), ir.Constant(I64, 4))
            given = [*map(b.load, results), *map(b.load, words), b.or_(at, ir.Constant(I64, DESCRIPTOR))]
            asm = ir.InlineAsm(ir.FunctionType(ir.LiteralStructType([F32] * n_acc), [x.type for x in given]), text,
                               constraints, side_effect=True)
            made = b.call(asm, given, attrs=("convergent",))
            for i, place in enumerate(results):
                b.store(b.extract_value(made, i), place)
            return context.get_dummy_value()
        return types.void(acc, a, types.int64), codegen
    return multiply
