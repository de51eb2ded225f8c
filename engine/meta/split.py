"""How tensors are cut between devices, and what follows for the result of an op.

    MIRRORED            every device has the whole tensor
    axis 0..3, sizes    device j has sizes[j] elements of that axis, in order
    PARTIAL             every device has a summand of the tensor: they are added before anything reads it

    mul_mat(w cut along axis 1, x mirrored)          -> cut along axis 0: each device computes some of the rows
    mul_mat(w cut along axis 0, x cut along axis 0)  -> partial: each device sums over its part of the columns

An op without a rule for how its sources are cut gets them whole (engine/meta/device.py).
Source: ggml-backend-meta.cpp.
"""
import math
from typing import NamedTuple

from ggjit.ops.core.errors import IndexRangeError, NotSupported, ParamError, ShapeError
from ggjit.ops.core.record import OP, VIEW_OPS
from ggjit.ops.core.shape import contiguous_nb, describe, is_contiguous
from ggjit.ops.core.whole_numbers import is_whole

AXIS_MIRRORED, AXIS_PARTIAL, AXIS_NONE, AXIS_UNKNOWN = 10, 11, 98, 99        # of ggml_backend_meta_split_axis
_NAMES = {0: "0", 1: "1", 2: "2", 3: "3", AXIS_MIRRORED: "MIRRORED", AXIS_PARTIAL: "PARTIAL", AXIS_NONE: "NONE",
          AXIS_UNKNOWN: "UNKNOWN"}

ELEMENTWISE = (OP.UNARY, OP.SCALE, OP.CLAMP, OP.SQR, OP.SQRT, OP.LOG, OP.SIN, OP.COS, OP.LEAKY_RELU, OP.GLU, OP.ADD,
               OP.SUB, OP.MUL, OP.DIV)
BY_ROW = (OP.NORM, OP.RMS_NORM, OP.L2_NORM, OP.SUM_ROWS, OP.MEAN, OP.CUMSUM, OP.ARGMAX)


class SplitState(NamedTuple):
    """axis: 0..3, AXIS_MIRRORED or AXIS_PARTIAL; sizes: elements of it on each device."""
    axis: int
    sizes: tuple = ()

    @property
    def is_cut(self):
        return self.axis < 4


MIRRORED, PARTIAL = SplitState(AXIS_MIRRORED), SplitState(AXIS_PARTIAL)


def meta_split_axis_name(axis):
    """"0" to "3", "MIRRORED" or "PARTIAL", "NONE", "UNKNOWN".  Errors: IndexRangeError.  Source:
    ggml_backend_meta_split_axis_name."""
    if not is_whole(axis) or axis not in _NAMES:
        raise IndexRangeError(f"meta_split_axis_name: {axis!r} is no axis of ggml_backend_meta_split_axis")
    return _NAMES[axis]


def given(t, answer, n):
    """The SplitState of a leaf that the user's function answered with: None, an axis, or (axis, sizes)."""
    if answer is None or answer == AXIS_MIRRORED:
        return MIRRORED
    axis, sizes = answer if isinstance(answer, tuple) else (answer, None)
    if not is_whole(axis, 0, 3):
        raise ParamError(f"split of {describe(t)}: expected None, an axis 0 to 3, or (axis, sizes), got {answer!r}")
    unit = t.type.block if axis == 0 else 1
    if sizes is None:
        units = t.ne[axis] // unit
        ends = [units * k // n * unit for k in range(n)] + [t.ne[axis]]
        sizes = [b - a for a, b in zip(ends, ends[1:], strict=False)]
    sizes = tuple(sizes)
    if len(sizes) != n or not all(is_whole(s, 1) and s % unit == 0 for s in sizes) or sum(sizes) != t.ne[axis]:
        raise ShapeError(f"split of {describe(t)}: {n} devices need {n} sizes, multiples of {unit}, each at least one, "
                         f"that add up to {t.ne[axis]}; got {list(sizes)}")
    if not is_contiguous(t):
        raise ShapeError(f"split of {describe(t)}: only contiguous tensors are cut")
    return SplitState(int(axis), tuple(int(s) for s in sizes))


# ---------------------------------------------------------------- bytes
def _of_axis(t, nb, state, k):
    """Bytes of the first k elements of the axis that is cut, by strides nb."""
    return nb[0] * k // t.type.block if state.axis == 0 else nb[state.axis] * k


def period(t, nb, state):
    """Bytes after which the axis that is cut begins again."""
    return _of_axis(t, nb, state, t.ne[state.axis])


def slice_shape(t, state, j):
    """(ne, nb) of device j's part of `t`: strides beyond the axis that is cut shrink with it."""
    if not state.is_cut:
        return t.ne, t.nb
    ne = tuple(state.sizes[j] if d == state.axis else n for d, n in enumerate(t.ne))
    whole, part = period(t, t.nb, state), _of_axis(t, t.nb, state, state.sizes[j])
    return ne, tuple(n if n < whole or d <= state.axis and n == t.nb[state.axis] else _scaled(t, n, whole, part)
                     for d, n in enumerate(t.nb))


def _scaled(t, n, whole, part):
    if n % whole:
        raise NotSupported(f"{describe(t)}: its strides do not fit the way it is cut")
    return n // whole * part


def slice_offs(t, base, state, j):
    """Byte offset of device j's part of the view `t` in its part of `base`, which is cut by `state`."""
    if not state.is_cut:
        return t.view_offs
    whole, part = period(base, base.nb, state), _of_axis(base, base.nb, state, state.sizes[j])
    outer, inner = divmod(t.view_offs, whole)
    if inner >= _of_axis(base, base.nb, state, 1 if state.axis else base.type.block):
        raise NotSupported(f"{describe(t)} begins inside the axis along which {describe(base)} is cut")
    return outer * part + inner


def _carried(t, ne, nb, whole, units):
    """The SplitState of `t` (ne, nb): its memory repeats every `whole` bytes and is cut there into `units` bytes."""
    inside = [(n, d) for d, n in enumerate(nb) if n < whole and ne[d] > 1]
    if not inside:
        raise NotSupported(f"{describe(t)}: no axis runs along the one that is cut")
    stride, axis = max(inside)
    state = SplitState(axis, units)
    one = stride // t.type.block if axis == 0 and t.type.block > 1 else stride
    if axis == 0 and t.type.block > 1:
        sizes = tuple(u * t.type.block // stride for u in units)
        fits = all(u % stride == 0 for u in units)
    else:
        sizes, fits = tuple(u // one for u in units), all(u % one == 0 for u in units)
    if not fits or sum(sizes) != ne[axis] or not all(sizes):
        raise NotSupported(f"{describe(t)}: the parts do not end between elements of its axis {axis}")
    return SplitState(state.axis, sizes)


def _viewed(t, source, state):
    """Of a view of a tensor that is cut."""
    whole = period(source, source.nb, state)
    return _carried(t, t.ne, t.nb, whole, tuple(_of_axis(source, source.nb, state, s) for s in state.sizes))


def _copied(t, source, state):
    """Of a contiguous copy with perhaps another shape: elements keep their order."""
    if t.ne == source.ne:
        return state
    nb = contiguous_nb(t.type, source.ne)
    at = math.prod(source.ne[:state.axis + 1])
    if t.type.block > 1:
        raise NotSupported(f"{describe(t)}: a copy in another shape of what is cut, in blocks")
    units = tuple(math.prod(source.ne[:state.axis]) * s * t.type.nbytes for s in state.sizes)
    return _carried(t, t.ne, contiguous_nb(t.type, t.ne), at * nb[0], units)


# ---------------------------------------------------------------- rules
def result_of(t, states):
    """The SplitState of node `t`, its sources being cut by `states` (None for sources that are absent).

    Errors: NotSupported where the op cannot be computed on parts.
    """
    if all(s is None or s == MIRRORED for s in states):
        return MIRRORED
    if t.op in VIEW_OPS:
        return _viewed(t, t.src[0], states[0])
    rule = _RULES.get(t.op)
    found = rule(t, *states) if rule is not None else None
    if found is None:
        raise NotSupported(f"{describe(t)}: no rule for sources cut by "
                           f"{', '.join('-' if s is None else meta_split_axis_name(s.axis) for s in states)}")
    return found


def _whole_along(t, i, state, axis):
    """Is source i mirrored, and the same for every element of that axis?"""
    return state is None or state == MIRRORED and t.src[i].ne[axis] == 1


def _elementwise(t, a, b=None, *rest):
    if any(s is not None for s in rest) or not a.is_cut or t.op == OP.GLU and b is None and a.axis == 0:
        return None
    if b is None:
        return a
    if b == a and t.src[1].ne[a.axis] == t.src[0].ne[a.axis] or _whole_along(t, 1, b, a.axis):
        return a
    return None


def _by_row(t, a, *rest):
    return a if a.is_cut and a.axis and all(s is None or s == MIRRORED for s in rest) else None


def _soft_max(t, a, mask=None, sinks=None, *rest):
    no_slopes = float(t.param_floats[1]) == 0
    return a if a.is_cut and a.axis and sinks is None and no_slopes and _whole_along(t, 1, mask, a.axis) else None


def _rope(t, a, positions, factors=None, *rest):
    return a if a.is_cut and a.axis in (1, 3) and positions == MIRRORED and factors in (None, MIRRORED) else None


def _mul_mat(t, w, x):
    if w == MIRRORED:
        ok = x.is_cut and (x.axis == 1 or x.axis > 1 and t.src[0].ne[x.axis] == 1)
        return x if ok else None
    if w.axis == 1 and x == MIRRORED:
        return SplitState(0, w.sizes)
    if w.axis == 0 and x == w:
        return PARTIAL
    if w.axis in (2, 3) and x.axis == w.axis:
        r = t.src[1].ne[w.axis] // t.src[0].ne[w.axis]
        return x if tuple(r * s for s in w.sizes) == x.sizes else None
    return None


def _get_rows(t, a, ids):
    return a if a.axis == 0 and ids == MIRRORED else None


def _set_rows(t, values, ids, into):
    return into if into.is_cut and values == into and into.axis != 1 and ids == MIRRORED else None


def _cpy(t, a, into=None):
    moved = _copied(t, t.src[0], a) if a.is_cut and is_contiguous(t) else None
    return moved if into is None or moved == into else None


def _flash(t, q, k, v, mask=None, sinks=None, *rest):
    r = t.src[0].ne[2] // t.src[1].ne[2]
    ok = q.axis == 2 and k == v and k.axis == 2 and tuple(r * s for s in k.sizes) == q.sizes and sinks is None \
        and mask in (None, MIRRORED) and (mask is None or t.src[3].ne[2] == 1) and float(t.param_floats[1]) == 0
    return SplitState(1, q.sizes) if ok else None


_RULES = {**dict.fromkeys(ELEMENTWISE, _elementwise), **dict.fromkeys(BY_ROW, _by_row), OP.SOFT_MAX: _soft_max,
          OP.ROPE: _rope, OP.MUL_MAT: _mul_mat, OP.GET_ROWS: _get_rows, OP.SET_ROWS: _set_rows, OP.CPY: _cpy,
          OP.CONT: _cpy, OP.DUP: _cpy, OP.FLASH_ATTN_EXT: _flash}
