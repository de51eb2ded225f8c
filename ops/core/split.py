"""How tensors are split between devices: parts of the `split` rules of the specs (ops/core/spec.py).

    MIRRORED            every device has the whole tensor
    axis 0..3, sizes    device j has sizes[j] elements of that axis, in order
    PARTIAL             every device has a summand of the tensor: they are added before anything reads it

    mul_mat(w cut along axis 1, x mirrored)          -> cut along axis 0: each device computes some of the rows
    mul_mat(w cut along axis 0, x cut along axis 0)  -> partial: each device sums over its part of the columns

A rule is asked where at least one source is not mirrored; it gets the node and the SplitState of each source, None for
an absent one, and returns None where the op cannot be computed on such parts.  Source: ggml-backend-meta.cpp.
"""
import math
from typing import NamedTuple

from ggjit.ops.core.errors import NotSupported
from ggjit.ops.core.shape import contiguous_nb, describe, is_contiguous

AXIS_MIRRORED, AXIS_PARTIAL, AXIS_NONE, AXIS_UNKNOWN = 10, 11, 98, 99        # of ggml_backend_meta_split_axis


class SplitState(NamedTuple):
    """axis: 0..3, AXIS_MIRRORED or AXIS_PARTIAL; sizes: elements of it on each device."""
    axis: int
    sizes: tuple = ()

    @property
    def is_cut(self):
        return self.axis < 4


MIRRORED, PARTIAL = SplitState(AXIS_MIRRORED), SplitState(AXIS_PARTIAL)


# ---------------------------------------------------------------- bytes
def nbytes_along(t, nb, state, k):
    """Bytes of the first k elements of the axis that is cut, by strides nb."""
    return nb[0] * k // t.type.block if state.axis == 0 else nb[state.axis] * k


def period(t, nb, state):
    """Bytes after which the axis that is cut begins again."""
    return nbytes_along(t, nb, state, t.ne[state.axis])


def _repeating(t, nb, whole, units):
    """The SplitState of `t` with strides nb: its memory repeats every `whole` bytes and is cut there into `units`
    bytes.  Errors: NotSupported where no cut of one axis is that."""
    inside = [(n, d) for d, n in enumerate(nb) if n < whole and t.ne[d] > 1]
    if not inside:
        raise NotSupported(f"{describe(t)}: no axis runs along the one that is cut")
    stride, axis = max(inside)
    block = t.type.block if axis == 0 else 1
    sizes = tuple(u // stride * block for u in units)
    if any(u % stride for u in units) or sum(sizes) != t.ne[axis] or not all(sizes):
        raise NotSupported(f"{describe(t)}: the parts do not end between elements of its axis {axis}")
    return SplitState(axis, sizes)


# ---------------------------------------------------------------- rules that several ops have
def whole_along(t, i, state, axis):
    """Is source i mirrored or absent, and the same for every element of that axis?"""
    return state is None or state == MIRRORED and t.src[i].ne[axis] == 1


def elementwise(t, a, b=None, *rest):
    """The cut of the first source, if the second is cut alike or is the same for all parts."""
    if any(s is not None for s in rest) or not a.is_cut:
        return None
    alike = b is not None and b == a and t.src[1].ne[a.axis] == t.src[0].ne[a.axis]
    return a if b is None or alike or whole_along(t, 1, b, a.axis) else None


def by_row(t, a, *rest):
    """The cut of the first source, if its rows stay whole."""
    return a if a.is_cut and a.axis and all(s is None or s == MIRRORED for s in rest) else None


def viewed(t, a, *rest):
    """A view of a tensor that is cut.  Errors: NotSupported."""
    source = t.src[0]
    return _repeating(t, t.nb, period(source, source.nb, a),
                      tuple(nbytes_along(source, source.nb, a, s) for s in a.sizes))


def copied(t, a, into=None):
    """A contiguous copy, perhaps of another shape: elements keep their order.  Errors: NotSupported."""
    source = t.src[0]
    if not a.is_cut or not is_contiguous(t):
        return None
    if t.ne == source.ne:
        moved = a
    elif t.type.block > 1:
        raise NotSupported(f"{describe(t)}: a copy in another shape of what is cut, in blocks")
    else:
        before = math.prod(source.ne[:a.axis]) * t.type.nbytes
        moved = _repeating(t, contiguous_nb(t.type, t.ne), before * source.ne[a.axis],
                           tuple(before * s for s in a.sizes))
    return moved if into is None or moved == into else None
