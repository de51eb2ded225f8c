"""pad, pad_reflect_1d, roll: rows taken from elsewhere, d[i] = a[where(i - left)].

                      i - left =   -3 -2 -1 | 0 1 2 3 4 |  5  6  7
    pad (zeros)                     .  .  . | a b c d e |  .  .  .
    pad_circular, roll              c  d  e | a b c d e |  a  b  c        roll: the size stays, left = shift
    pad_reflect_1d                  d  c  b | a b c d e |  d  c  b        the edge is not repeated

One body over dimensions 1 to 3; along a row, the middle moves as a whole and the ends one by one.  Elements move by
their width, so every type with blocks of one works (ggml's CPU takes F32 only).
"""
import numpy as np

from ggjit.ops.copying.view import permute
from ggjit.ops.core.errors import ParamError
from ggjit.ops.core.record import OK, OP
from ggjit.ops.core.shape import require, require_type
from ggjit.ops.core.spec import Case, Kernel, Spec, touched_nbytes
from ggjit.ops.core.types import BF16, F16, F32, I32, Tensor
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mem import zero_bytes
from ggjit.ops.native.node import DST, SRC0, nb, ne, row_addr, row_index
from ggjit.ops.native.row_loops import over_rows, param, whole
from ggjit.ops.types.shared.moves import ONE, move_bytes

TYPES = (F32, F16, BF16, I32)
ZEROS, WRAP, REFLECT = range(3)


# ---------------------------------------------------------------- builders
def _pad(a, sides, circular):
    name = "pad_circular" if circular else "pad"
    require_type(name, a, TYPES)
    sides = [whole(name, f"{'lr'[i % 2]}p{i // 2}", n) for i, n in enumerate(sides)]
    grown = tuple(n + lp + rp for n, lp, rp in zip(a.ne, sides[::2], sides[1::2], strict=True))
    require(not circular or 0 not in a.ne or 0 in grown, f"{name}: nothing to wrap around", a)
    return a.ctx.node(OP.PAD, a.type, grown, (a,), (*sides, int(circular)))


def pad_ext(a: Tensor, lp0: int, rp0: int, lp1: int, rp1: int, lp2: int, rp2: int, lp3: int, rp3: int):
    """a with lp0, lp1, lp2, lp3 zeros before and rp0, rp1, rp2, rp3 behind, along dimensions 0 to 3.

    NumPy: np.pad(a, ((lp3, rp3), (lp2, rp2), (lp1, rp1), (lp0, rp0))).  F32, F16, BF16, I32 (ggml's CPU: F32), any
    strides.  op params: lp0, rp0 ... lp3, rp3, circular.  Errors: ParamError for negative padding, TypeMismatch.
    Source: ggml_pad_ext.
    """
    return _pad(a, (lp0, rp0, lp1, rp1, lp2, rp2, lp3, rp3), False)


def pad(a: Tensor, p0: int, p1: int, p2: int, p3: int):
    """a with p0, p1, p2, p3 zeros behind along dimensions 0 to 3; otherwise as `pad_ext`.  Source: ggml_pad."""
    return _pad(a, (0, p0, 0, p1, 0, p2, 0, p3), False)


def pad_ext_circular(a: Tensor, lp0: int, rp0: int, lp1: int, rp1: int, lp2: int, rp2: int, lp3: int, rp3: int):
    """As `pad_ext`, continued periodically instead of by zeros; NumPy: np.pad(mode="wrap").

    lp0, rp0, lp1, rp1, lp2, rp2, lp3, rp3 as there.  Padding by more than a's own size wraps more than once (ggml reads
    before its tensor there).  Source: ggml_pad_ext_circular.
    """
    return _pad(a, (lp0, rp0, lp1, rp1, lp2, rp2, lp3, rp3), True)


def pad_circular(a: Tensor, p0: int, p1: int, p2: int, p3: int):
    """As `pad` with p0, p1, p2, p3, continued periodically instead of by zeros.  Source: ggml_pad_circular."""
    return _pad(a, (0, p0, 0, p1, 0, p2, 0, p3), True)


def pad_reflect_1d(a: Tensor, p0: int, p1: int):
    """a with p0 elements mirrored before and p1 behind along ne0, both < ne0: [ne0 + p0 + p1, ne1, ne2, ne3].

    The edge is not repeated; NumPy: np.pad(mode="reflect").  Types as `pad_ext`.  op params: p0, p1.  Errors:
    ParamError, TypeMismatch.  Source: ggml_pad_reflect_1d.
    """
    require_type("pad_reflect_1d", a, TYPES)
    p0, p1 = whole("pad_reflect_1d", "p0", p0), whole("pad_reflect_1d", "p1", p1)
    if max(p0, p1) >= a.ne[0]:
        raise ParamError(f"pad_reflect_1d: p0 = {p0} and p1 = {p1} must be below ne0 = {a.ne[0]}")
    return a.ctx.node(OP.PAD_REFLECT_1D, a.type, (a.ne[0] + p0 + p1, *a.ne[1:]), (a,), (p0, p1))


def roll(a: Tensor, shift0: int, shift1: int, shift2: int, shift3: int):
    """Elements moved on by shift0 ... shift3 along dimensions 0 to 3, those that leave come in again; |shift| < ne.

    NumPy: np.roll(a, (shift3, shift2, shift1, shift0), (0, 1, 2, 3)).  Types as `pad_ext`.  op params: shift0, shift1,
    shift2, shift3.  Errors: ParamError, TypeMismatch.  Source: ggml_roll.
    """
    require_type("roll", a, TYPES)
    shifts = [whole("roll", f"shift{i}", s, 1 - n, n - 1)
              for i, (s, n) in enumerate(zip((shift0, shift1, shift2, shift3), a.ne, strict=True))]
    return a.ctx.node(OP.ROLL, a.type, a.ne, (a,), shifts)


# ---------------------------------------------------------------- reference
def reference(t, a):
    p = [int(x) for x in t.op_params]
    if t.op == OP.ROLL:
        return np.roll(a, p[3::-1], (0, 1, 2, 3))
    if t.op == OP.PAD_REFLECT_1D:
        return np.pad(a, ((0, 0), (0, 0), (0, 0), (p[0], p[1])), mode="reflect")
    return np.pad(a, [(p[2 * i], p[2 * i + 1]) for i in (3, 2, 1, 0)], mode="wrap" if p[8] else "constant")


# ---------------------------------------------------------------- kernel
def _where(mode):
    """where(i, n): which of n elements stands at position i; negative: a zero."""
    if mode == ZEROS:
        return inline(lambda i, n: i if i < n else -1)
    if mode == WRAP:
        return inline(lambda i, n: i % n)
    return inline(lambda i, n: -i if i < 0 else (i if i < n else 2 * (n - 1) - i))


def _make(op, mode, size):
    where, (load, store) = _where(mode), ONE[size]

    @inline
    def left(node, i):
        if op == OP.PAD:
            return param(node, 2 * i)
        return param(node, i) if op == OP.ROLL or i == 0 else 0

    @inline
    def ends(to, x, step, first, end, shift, n):
        """Elements first ... end - 1 of a row, one by one."""
        for i in range(first, end):
            j = where(i - shift, n)
            if j < 0:
                zero_bytes(to + i * size, size)
            else:
                store(to + i * size, load(x + j * step))

    @inline
    def mirror(to, x, n):
        """to[i] = x[-i] for i < n, elements side by side."""
        for i in range(n):
            store(to + i * size, load(x - i * size))

    @inline
    def one(node, r):
        a, d = node + SRC0, node + DST
        i1, i2, i3 = row_index(d, r)
        n, n0, step, to = ne(d, 0), ne(a, 0), nb(a, 0), row_addr(d, i1, i2, i3)
        j1, j2, j3 = where(i1 - left(node, 1), ne(a, 1)), where(i2 - left(node, 2), ne(a, 2)), where(
            i3 - left(node, 3), ne(a, 3))
        if j1 < 0 or j2 < 0 or j3 < 0:
            zero_bytes(to, n * size)
            return OK
        x, shift = row_addr(a, j1, j2, j3), left(node, 0)
        first, end = max(0, shift), min(n, shift + n0)
        if step != size:
            ends(to, x, step, 0, n, shift, n0)
            return OK
        move_bytes(to + first * size, x + (first - shift) * size, (end - first) * size)
        if mode == REFLECT:
            mirror(to, x + shift * size, shift)
            mirror(to + end * size, x + (n0 - 2) * size, n - end)
            return OK
        ends(to, x, step, 0, first, shift, n0)
        ends(to, x, step, end, n, shift, n0)
        return OK
    return over_rows(one)


def kernel(t, n_threads):
    op, size = OP(t.op), t.type.nbytes
    mode = {OP.ROLL: WRAP, OP.PAD_REFLECT_1D: REFLECT}.get(op)
    if mode is None:
        mode = WRAP if t.op_params[8] else ZEROS
    return Kernel(f"{op.name.lower()}-{mode}-{size}", lambda: _make(op, mode, size), cost=0.06 * touched_nbytes(t))


# ---------------------------------------------------------------- cases
def _leaf(inp, ty, shape):
    return inp.ids(ty, shape, 1000) if ty is I32 else inp.new(ty, shape)


def pad_cases():
    for ty in TYPES:
        for shape, sides in (((33, 5, 4, 3), (1, 2, 0, 1, 3, 0, 1, 1)), ((64, 3, 1, 1), (0, 5, 0, 1, 0, 0, 0, 0)),
                             ((5, 2, 1, 1), (12, 13, 5, 0, 2, 0, 0, 0))):
            for f in (pad_ext, pad_ext_circular):
                yield Case(f"{f.__name__} {ty!r} {shape} {sides}", lambda inp, f=f, ty=ty, shape=shape, sides=sides:
                           f(_leaf(inp, ty, shape), *sides), 0.0)
    for f in (pad, pad_circular):
        yield Case(f"{f.__name__} behind", lambda inp, f=f: f(inp.new(F32, (512, 12, 2, 1)), 3, 4, 1, 0), 0.0)
        yield Case(f"{f.__name__} transposed", lambda inp, f=f: f(
            permute(inp.new(F32, (6, 40, 2, 2)), 1, 0, 2, 3), 3, 4, 1, 2), 0.0)


def reflect_cases():
    for shape, p in (((512, 34, 2, 1), (10, 9)), ((3, 5, 4, 3), (2, 2)), ((1, 4, 1, 1), (0, 0)),
                     ((70, 2, 1, 1), (0, 69))):
        yield Case(f"{shape} {p}", lambda inp, s=shape, p=p: pad_reflect_1d(inp.new(F32, s), *p), 0.0)
    yield Case("F16 transposed", lambda inp: pad_reflect_1d(
        permute(inp.new(F16, (6, 40, 2, 2)), 1, 0, 2, 3), 5, 4), 2.0 ** -22)


def roll_cases():
    for shape, s in (((12, 5, 4, 3), (3, -2, 0, 1)), ((40, 7, 1, 1), (-39, 6, 0, 0)), ((33, 1, 1, 1), (1, 0, 0, 0))):
        for ty in (F32, I32):
            yield Case(f"{ty!r} {shape} {s}", lambda inp, ty=ty, n=shape, s=s: roll(_leaf(inp, ty, n), *s), 0.0)
    yield Case("permuted", lambda inp: roll(permute(inp.new(F32, (6, 40, 2, 2)), 1, 2, 0, 3), 1, 5, -3, 0), 0.0)


# ---------------------------------------------------------------- gradient
def gradient_pad(g, t, dy):
    """The window of dy without the padding; for circular padding, the sum over all copies of an element."""
    a, sides = t.src[0], [int(p) for p in t.op_params[:8]]

    def inside():
        return g.cont(g.view_4d(dy, *a.ne, *dy.nb[1:], sum(n * b for n, b in zip(sides[::2], dy.nb, strict=True))))

    def folded():
        grown = []                          # zeros that make dy whole copies of a
        for n, before, behind in zip(a.ne, sides[::2], sides[1::2], strict=True):
            grown += [-before % n, -behind % n]
        return g.fit(g.pad_ext(dy, *grown) if any(grown) else dy, a)
    return (folded if t.op_params[8] else inside,)


def gradient_reflect(g, t, dy):
    a, before, behind = t.src[0], *(int(p) for p in t.op_params[:2])
    source = np.pad(np.arange(a.ne[0]), (before, behind), mode="reflect")
    rows = np.arange(a.ne[1] * a.ne[2] * a.ne[3])[:, None] * a.ne[0]
    return (lambda: g.scatter(dy, rows + source, a.ne),)


def gradient_roll(g, t, dy):
    return (lambda: g.roll(dy, *(-int(p) for p in t.op_params[:4])),)


SPECS = (Spec(op=OP.PAD, builders=(pad, pad_ext, pad_circular, pad_ext_circular), reference=reference, kernel=kernel,
              gradient=gradient_pad, cases=pad_cases,
              rebuild=lambda n: n.call("pad_ext_circular" if n.i[8] else "pad_ext", *n.src, *n.i[:8])),
         Spec(op=OP.PAD_REFLECT_1D, builders=(pad_reflect_1d,), reference=reference, kernel=kernel,
              gradient=gradient_reflect, cases=reflect_cases),
         Spec(op=OP.ROLL, builders=(roll,), reference=reference, kernel=kernel, gradient=gradient_roll,
              cases=roll_cases))
