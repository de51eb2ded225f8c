"""add, sub, mul, div: d = a op b, with b repeated along every dimension (b tiles a, ggml's broadcast by modulo); add1.

Types: F32, F16, BF16 in any mix of a and b; the result has a's type.  Sums are formed in float32.  `add` also takes
quantised rows.  Two kernel bodies serve all four otherwise, chosen when the plan is made:

    flat    a and b of one shape, no gaps   d[i] = a[i] op b[i] over one long row
    rows    b is one element per row        d[i] = a[i] op b[0]
            rows of equal length            d[i] = a[i] op b[i]
            anything else                   element by element with strides

That the tensors are flat is known before the kernel runs: looking at all their strides took as long as adding 64
floats (22 ns a node in all, 13 without).
"""
import numpy as np

from ggjit.ops.copying.view import view_4d
from ggjit.ops.core.builders import in_place_pair
from ggjit.ops.core.errors import TypeMismatch
from ggjit.ops.core.record import OK, OP
from ggjit.ops.core.row_axes import along
from ggjit.ops.core.shape import (
    can_repeat,
    is_contiguous,
    n_elements,
    require,
    require_type,
    rows_contiguous,
    same_shape,
)
from ggjit.ops.core.spec import Case, Kernel, Spec, touched_nbytes
from ggjit.ops.core.split import elementwise
from ggjit.ops.core.traits import all_traits, module_of, traits_of
from ggjit.ops.core.types import BF16, F16, F32, Q4_0, Q8_0, Tensor, Type
from ggjit.ops.elementwise.elementwise import FLOATS, TOLERANCE
from ggjit.ops.native.jit import inline
from ggjit.ops.native.node import (
    DST,
    SRC0,
    SRC1,
    addr,
    n_rows,
    nb,
    ne,
    row_addr,
    row_addr_mod,
    row_index,
    work,
)
from ggjit.ops.native.row_loops import PIECE, over_chunks, pieces_of_result
from ggjit.ops.native.simd import W, fadd, fdiv, fmul, fsub
from ggjit.ops.types.shared.rows import ROW, pair_row

VECTOR = {OP.ADD: fadd, OP.ADD1: fadd, OP.SUB: fsub, OP.MUL: fmul, OP.DIV: fdiv}
NUMPY = {OP.ADD: np.add, OP.ADD1: np.add, OP.SUB: np.subtract, OP.MUL: np.multiply, OP.DIV: np.divide}


def _build(op, a, b, in_place):
    name = op.name.lower()
    require(can_repeat(b, a), f"{name}: b must tile a", a, b, remedy="reshape or repeat b")
    if op == OP.ADD and a.type.quantized:
        return _add_blocks(name, a, b, a.type, a if in_place else None)
    require_type(name, a, FLOATS, "a")
    require_type(name, b, FLOATS, "b")
    return a.ctx.node(op, a.type, a.ne, (a, b), view_of=a if in_place else None)


def writable_types():
    """Types that rows of floats can be written in."""
    return tuple(t for t, (traits, _) in all_traits().items() if traits.from_float and (t.quantized or t in FLOATS))


def _add_blocks(name, a, b, type, view_of):
    require_type(name, b, (F32,), "b, next to a quantised a,")
    require(a.ne[0] == b.ne[0] and rows_contiguous(a) and rows_contiguous(b),
            f"{name}: rows of a quantised a and of b must be equally long, their elements side by side", a, b)
    if type not in writable_types():
        raise TypeMismatch(f"{name}: values cannot be written as {type!r}; cast a with gg.cast first")
    return a.ctx.node(OP.ADD, type, a.ne, (a, b), view_of=view_of)


def _add(a: Tensor, b: Tensor, in_place: bool):
    """a + b, elementwise; b is repeated along every dimension to the shape of a.

    Shapes: a [n0, n1, n2, n3], b [m0, m1, m2, m3] with every n % m == 0 -> shape of a.  NumPy: a + np.tile(b, n / m).
    Types: a and b F32, F16 or BF16 in any mix -> type of a; sums are formed in float32.  A quantised a with F32 rows of
    its length gives a's type, quantised anew.  Errors: ShapeError, TypeMismatch.  Source: ggml_add.
    """
    return _build(OP.ADD, a, b, in_place)


add, add_inplace = in_place_pair(_add)


def add_cast(a: Tensor, b: Tensor, type: Type | str):
    """a + b as `type`; shape of a, shapes as `add`, but rows of a and b are equally long.

    Types: a quantised with b F32 -> `type`, any that can be written; a F16 or BF16 with b F32, F16 or BF16 -> `type`
    F32, F16 or BF16.  Errors: ShapeError, TypeMismatch.  Source: ggml_add_cast.
    """
    require(can_repeat(b, a), "add_cast: b must tile a", a, b, remedy="reshape or repeat b")
    if a.type.quantized:
        return _add_blocks("add_cast", a, b, type, None)
    require_type("add_cast", a, (F16, BF16), "a")
    require_type("add_cast", b, FLOATS, "b")
    require(a.ne[0] == b.ne[0], "add_cast: rows of a and b must be equally long", a, b)
    if type not in FLOATS:
        raise TypeMismatch(f"add_cast: type must be one of {FLOATS} for {a.type!r}, got {type!r}")
    return a.ctx.node(OP.ADD, type, a.ne, (a, b))


def _add1(a: Tensor, b: Tensor, in_place: bool):
    """a + b, for b of one element [1]; otherwise as `add`.

    Source: ggml_add1 (deprecated there: `add` does the same).
    """
    require(tuple(b.ne) == (1, 1, 1, 1), "add1: b must be one element", b, remedy="use gg.add")
    return _build(OP.ADD1, a, b, in_place)


add1, add1_inplace = in_place_pair(_add1)


def _sub(a: Tensor, b: Tensor, in_place: bool):
    """a - b, elementwise; shapes, types and errors as `add`.  NumPy: a - np.tile(b, n / m).  Source: ggml_sub."""
    return _build(OP.SUB, a, b, in_place)


sub, sub_inplace = in_place_pair(_sub)


def _mul(a: Tensor, b: Tensor, in_place: bool):
    """a * b, elementwise; shapes, types and errors as `add`.  NumPy: a * np.tile(b, n / m).  Source: ggml_mul."""
    return _build(OP.MUL, a, b, in_place)


mul, mul_inplace = in_place_pair(_mul)


def _div(a: Tensor, b: Tensor, in_place: bool):
    """a / b, elementwise; shapes, types and errors as `add`.  NumPy: a / np.tile(b, n / m).  Source: ggml_div."""
    return _build(OP.DIV, a, b, in_place)


div, div_inplace = in_place_pair(_div)


def reference(t, a, b):
    if not a.size:                              # an empty result; b may be empty in another dimension
        return a
    reps = [n // m for n, m in zip(a.shape, b.shape, strict=True)]
    return NUMPY[OP(t.op)](a, np.tile(b, reps))


def _make_flat(op, ta, tb, td):
    """a, b and d of one shape without gaps: one long row, cut into pieces."""
    row, sa, sb, sd = pair_row(VECTOR[op], ta, tb, td), ta.nbytes, tb.nbytes, td.nbytes

    @inline
    def pieces(node, ith, start, stop):
        i, end = start * PIECE, min(stop * PIECE, n_rows(node + DST) * ne(node + DST, 0))
        row(addr(node + DST) + i * sd, addr(node + SRC0) + i * sa, addr(node + SRC1) + i * sb, end - i)
        return OK
    return over_chunks(pieces, pieces_of_result)


def _make_rows(op, ta, tb, td):
    """b tiles a: row by row."""
    f = VECTOR[op]
    xa, xb, xd = ROW[ta], ROW[tb], ROW[td]
    lda, lda_part, std, std_part = xa.load, xa.load_part, xd.store, xd.store_part
    ldb1, lda1, std1 = xb.splat, xa.splat, xd.store_one
    sa, sb, sd = ta.nbytes, tb.nbytes, td.nbytes
    row_equal = pair_row(f, ta, tb, td)

    @inline
    def row_one(d, a, b, n):
        y = ldb1(b)
        i = 0
        while i + W <= n:
            std(d + i * sd, f(lda(a + i * sa), y))
            i += W
        if i < n:
            std_part(d + i * sd, f(lda_part(a + i * sa, n - i), y), n - i)

    @inline
    def row_any(d, d0, a, a0, b, b0, nb_, n):
        for i in range(n):
            std1(d + i * d0, f(lda1(a + i * a0), ldb1(b + (i % nb_) * b0)))

    @inline
    def rows(node, ith, start, stop):
        a, b, d = node + SRC0, node + SRC1, node + DST
        n0, m0 = ne(d, 0), ne(b, 0)
        a0, b0, d0 = nb(a, 0), nb(b, 0), nb(d, 0)
        one_row, packed = n_rows(b) == 1, a0 == sa and d0 == sd
        for r in range(start, stop):
            i1, i2, i3 = row_index(d, r)
            pd, pa = row_addr(d, i1, i2, i3), row_addr(a, i1, i2, i3)
            pb = addr(b) if one_row else row_addr_mod(b, i1, i2, i3)
            if packed and m0 == 1:
                row_one(pd, pa, pb, n0)
            elif packed and m0 == n0 and b0 == sb:
                row_equal(pd, pa, pb, n0)
            else:
                row_any(pd, d0, pa, a0, pb, b0, m0, n0)
        return OK
    return over_chunks(rows)


def _row_nbytes(k):
    """Scratch memory of a thread: one float32 row, in whole cache lines."""
    return (4 * k + 63) // 64 * 64


def _make_blocks(ta, td):
    """Blocks of a quantised a are decoded, added to in float32, and written as td."""
    to_float, from_float, add_row = traits_of(ta).to_float, traits_of(td).from_float, pair_row(fadd)

    @inline
    def rows(node, ith, start, stop):
        a, b, d = node + SRC0, node + SRC1, node + DST
        n0 = ne(d, 0)
        row = work(node) + ith * ((4 * n0 + 63) // 64 * 64)
        for r in range(start, stop):
            i1, i2, i3 = row_index(d, r)
            to_float(row_addr(a, i1, i2, i3), row, n0)
            add_row(row, row, row_addr_mod(b, i1, i2, i3), n0)
            from_float(row, row_addr(d, i1, i2, i3), n0)
        return OK
    return over_chunks(rows)


def kernel(t, n_threads):
    a, b = t.src[:2]
    if t.op == OP.ADD and a.type.quantized and b.type is F32 and t.type in writable_types():
        return Kernel(f"add-{a.type.name}-{t.type.name}", lambda: _make_blocks(a.type, t.type),
                      cost=0.3 * n_elements(t), work_nbytes=n_threads * _row_nbytes(t.ne[0]),
                      modules=(module_of(a.type), module_of(t.type)))
    if not {a.type, b.type, t.type} <= set(FLOATS):
        return None
    op = OP(t.op)
    flat = same_shape(a, b) and all(map(is_contiguous, (a, b, t)))
    make = _make_flat if flat else _make_rows
    return Kernel(f"{op.name.lower()}-{a.type.name}-{b.type.name}-{t.type.name}{'-flat' * flat}",
                  lambda: make(op, a.type, b.type, t.type), cost=0.025 * touched_nbytes(t))


def cases(op):
    def make(ta, tb, ne, ne_b, swap):
        def build(inp):
            a, b = inp.new(ta, ne), inp.new(tb, ne_b, lo=0.5, hi=1.5)
            if swap:
                a = a.ctx.node(OP.PERMUTE, a.type, (ne[1], ne[0], *ne[2:]), (a,), (1, 0, 2, 3), view_of=a,
                               nb=(a.nb[1], a.nb[0], a.nb[2], a.nb[3]))
            return _build(op, a, b, False)
        return build
    for ta, tb in ((F32, F32), (F16, F32), (F32, F16), (F16, F16), (BF16, F32)):
        for shape, shape_b in (((16, 7, 4, 3),) * 2, ((33, 5, 4, 3), (33, 1, 2, 1)), ((10, 5, 1, 1), (1, 5, 1, 1)),
                         ((12, 6, 2, 1), (4, 3, 2, 1))):
            yield Case(f"{ta!r} {tb!r} {shape} {shape_b}", make(ta, tb, shape, shape_b, False), TOLERANCE[ta])
    yield Case("transposed a", make(F32, F32, (7, 9, 2, 1), (9, 1, 1, 1), True))
    if op == OP.ADD:
        yield from _cast_cases()


def _cast_cases():
    # quantised anew: errors as of set_rows
    for ta, td, limit in ((F16, F32, 1e-7), (BF16, F32, 1e-7), (F16, BF16, TOLERANCE[BF16]), (Q8_0, F32, 1e-7),
                          (Q4_0, F16, TOLERANCE[F16]), (Q8_0, Q8_0, 1e-4), (Q4_0, Q8_0, 1e-4), (Q4_0, Q4_0, 2e-2)):
        for ne_b in ((96, 5, 4, 3), (96, 1, 2, 1)):
            def make(inp, ta=ta, td=td, ne_b=ne_b):
                a, b = inp.new(ta, (96, 5, 4, 3)), inp.new(F32, ne_b, lo=0.5, hi=1.5)
                return add(a, b) if td is ta else add_cast(a, b, td)
            yield Case(f"cast {ta!r} {td!r} {ne_b}", make, limit)


def add1_cases():
    for ta, tb in ((F32, F32), (F16, F32), (F16, F16), (BF16, F32), (BF16, BF16)):
        for build in (add1, add1_inplace):
            def make(inp, ta=ta, tb=tb, build=build):
                a = inp.new(ta, (33, 5, 4, 3))
                return build(view_4d(a, 30, 5, 2, 3, *a.nb[1:], a.nb[2]), inp.new(tb, (1,)))
            yield Case(f"{build.__name__} {ta!r} {tb!r}", make, TOLERANCE[ta])
    yield Case("flat", lambda inp: add1(inp.new(F32, (1031, 3)), inp.new(F32, (1,))))


# ---------------------------------------------------------------- gradient
def gradient(g, t, dy):
    """add: dy, dy;  sub: dy, -dy;  mul: dy b, dy a;  div: dy / b, -dy d / b; b's is summed over its tiles."""
    a, b = t.src
    if t.op == OP.MUL:
        return lambda: g.mul(dy, g.f32(b)), lambda: g.fit(g.mul(dy, g.f32(a)), b)
    if t.op == OP.DIV:
        return lambda: g.div(dy, g.f32(b)), lambda: g.fit(g.neg(g.mul(dy, g.div(g.f32(t), g.f32(b)))), b)
    return lambda: dy, lambda: g.fit(g.neg(dy) if t.op == OP.SUB else dy, b)


def _rebuild_add(n):
    return n.call("add", *n.src) if n.type is n.src[0].type else n.call("add_cast", *n.src, n.type)


SPECS = (*(
    Spec(op=op, builders=fs, reference=reference, kernel=kernel, in_place=True, in_place_2023=True,
         gradient=gradient, rows=along(0), split=elementwise, cases=lambda op=op: cases(op),
         rebuild=_rebuild_add if op is OP.ADD else None)
    for op, fs in ((OP.ADD, (add, add_inplace, add_cast)), (OP.SUB, (sub, sub_inplace)), (OP.MUL, (mul, mul_inplace)),
                   (OP.DIV, (div, div_inplace)))),
    Spec(op=OP.ADD1, builders=(add1, add1_inplace), reference=reference, kernel=kernel, in_place=True,
         in_place_2023=True, gradient=gradient, cases=add1_cases))
