"""One body for every op of the form d[i] = f(x[i]): the unary family, scale, clamp, fill.

f sees vectors of float32 lanes, whatever the types in memory, and the first five op params as vectors:

    f(x, p0, p1, p2, p3, p4) -> y

`lift` makes such an f from an LLVM IR expression: `lift(lambda b, x, p: b.fmul(x, p[0]))`.
Contiguous tensors are cut into pieces of PIECE elements regardless of their rows; others go row by row, and rows whose
elements do not lie side by side element by element.
"""
from llvmlite import ir
from numba.extending import intrinsic

from ggjit.ops.core.record import OK
from ggjit.ops.core.spec import Kernel, touched_nbytes
from ggjit.ops.core.types import BF16, F16, F32
from ggjit.ops.native.jit import inline
from ggjit.ops.native.node import DST, SRC0, addr, n_rows, nb, ne, param_f32, row_addr, row_index
from ggjit.ops.native.row_loops import LIGHT, PIECE, over_chunks, pieces_of_result
from ggjit.ops.native.simd import W, const_ir, splat
from ggjit.ops.types.shared.rows import ROW

FLOATS = (F32, F16, BF16)
TOLERANCE = {F32: 1e-7, F16: 2.0 ** -22, BF16: 2.0 ** -16}     # NMSE of test cases: the type's own rounding, squared


def lift(build):
    """An elementwise function from `build(b, x, [p0..p4]) -> y` on LLVM values."""
    @intrinsic
    def f(typingctx, x, p0, p1, p2, p3, p4):
        def codegen(context, b, sig, args):
            return build(b, args[0], args[1:])
        return x(x, p0, p1, p2, p3, p4), codegen
    return f


def number(like, x):
    """The float constant x in every lane of `like`."""
    return const_ir("f32", [x] * like.type.count)


def positive(b, x):
    """Lane mask x > 0."""
    return b.fcmp_ordered(">", x, ir.Constant(x.type, None))


@inline
def is_packed(view, size):
    """All elements of the view lie one after the other."""
    b0, b1, b2 = nb(view, 0), nb(view, 1), nb(view, 2)
    return b0 == size and b1 == size * ne(view, 0) and b2 == b1 * ne(view, 1) and nb(view, 3) == b2 * ne(view, 2)


def _make(f, ta, td):
    xa, xd = ROW[ta], ROW[td]
    lda, lda_part, lda1, std, std_part, std1 = xa.load, xa.load_part, xa.splat, xd.store, xd.store_part, xd.store_one
    sa, sd = ta.nbytes, td.nbytes

    @inline
    def row(d, d0, a, a0, n, p0, p1, p2, p3, p4):
        if a0 != sa or d0 != sd:
            for i in range(n):
                std1(d + i * d0, f(lda1(a + i * a0), p0, p1, p2, p3, p4))
            return
        i = 0
        while i + 4 * W <= n:           # loads before stores: 6 to 9 percent where the third-level cache is the limit
            x, y = a + i * sa, d + i * sd
            y0, y1 = f(lda(x), p0, p1, p2, p3, p4), f(lda(x + W * sa), p0, p1, p2, p3, p4)
            y2, y3 = f(lda(x + 2 * W * sa), p0, p1, p2, p3, p4), f(lda(x + 3 * W * sa), p0, p1, p2, p3, p4)
            std(y, y0)
            std(y + W * sd, y1)
            std(y + 2 * W * sd, y2)
            std(y + 3 * W * sd, y3)
            i += 4 * W
        while i + W <= n:
            std(d + i * sd, f(lda(a + i * sa), p0, p1, p2, p3, p4))
            i += W
        if i < n:
            std_part(d + i * sd, f(lda_part(a + i * sa, n - i), p0, p1, p2, p3, p4), n - i)

    @inline
    def count(node):
        packed = is_packed(node + SRC0, sa) and is_packed(node + DST, sd)
        return pieces_of_result(node) if packed else n_rows(node + DST)

    @inline
    def rows(node, ith, start, stop):
        a, d = node + SRC0, node + DST
        a0, d0, n0 = nb(a, 0), nb(d, 0), ne(d, 0)
        p0, p1, p2 = splat(param_f32(node, 0)), splat(param_f32(node, 1)), splat(param_f32(node, 2))
        p3, p4 = splat(param_f32(node, 3)), splat(param_f32(node, 4))
        packed, total = is_packed(a, sa) and is_packed(d, sd), n0 * n_rows(d)
        for r in range(start, stop):
            if packed:
                at = r * PIECE
                row(addr(d) + at * sd, sd, addr(a) + at * sa, sa, min(PIECE, total - at), p0, p1, p2, p3, p4)
            else:
                i1, i2, i3 = row_index(d, r)
                row(row_addr(d, i1, i2, i3), d0, row_addr(a, i1, i2, i3), a0, n0, p0, p1, p2, p3, p4)
        return OK
    return over_chunks(rows, count, LIGHT)


def map_kernel(t, label, f, cost=0.025):
    """The Kernel that applies f to t.src[0]; cost in nanoseconds a byte touched.  None for types it cannot take."""
    ta, td = t.src[0].type, t.type
    if ta not in ROW or td not in ROW:
        return None
    return Kernel(f"{label}-{ta.name}-{td.name}", lambda: _make(f, ta, td), cost=cost * touched_nbytes(t),
                  modules=(__name__,))
