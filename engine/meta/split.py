"""Which part of a tensor each device has: the user splits leaves, the `split` rule of an op splits its result.

An op without a rule for how its sources are cut gets them whole (engine/meta/run.py).  States and rules:
ops/core/split.py.  Source: ggml-backend-meta.cpp.
"""
from ggjit.ops.core.errors import IndexRangeError, NotSupported, ParamError, ShapeError
from ggjit.ops.core.shape import describe, is_contiguous
from ggjit.ops.core.spec import all_specs
from ggjit.ops.core.split import (
    AXIS_MIRRORED,
    AXIS_NONE,
    AXIS_PARTIAL,
    AXIS_UNKNOWN,
    MIRRORED,
    SplitState,
    nbytes_along,
    period,
)
from ggjit.ops.core.whole_numbers import is_whole

_NAMES = {0: "0", 1: "1", 2: "2", 3: "3", AXIS_MIRRORED: "MIRRORED", AXIS_PARTIAL: "PARTIAL", AXIS_NONE: "NONE",
          AXIS_UNKNOWN: "UNKNOWN"}


def meta_split_axis_name(axis):
    """"0" to "3", "MIRRORED" or "PARTIAL", "NONE", "UNKNOWN".

        gg.meta_split_axis_name(1)                          # "1"

    Errors: IndexRangeError.  Source: ggml_backend_meta_split_axis_name.
    """
    if not is_whole(axis) or axis not in _NAMES:
        raise IndexRangeError(f"meta_split_axis_name: {axis!r} is not an axis of ggml_backend_meta_split_axis")
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


def slice_shape(t, state, j):
    """(ne, nb) of device j's part of `t`: strides beyond the axis that is cut shrink with it."""
    if not state.is_cut:
        return t.ne, t.nb
    ne = tuple(state.sizes[j] if d == state.axis else n for d, n in enumerate(t.ne))
    whole, part = period(t, t.nb, state), nbytes_along(t, t.nb, state, state.sizes[j])
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
    whole, part = period(base, base.nb, state), nbytes_along(base, base.nb, state, state.sizes[j])
    outer, inner = divmod(t.view_offs, whole)
    if inner >= nbytes_along(base, base.nb, state, 1 if state.axis else base.type.block):
        raise NotSupported(f"{describe(t)} begins inside the axis along which {describe(base)} is cut")
    return outer * part + inner


def result_of(t, states):
    """The SplitState of node `t`, its sources being cut by `states` (None for sources that are absent).

    Errors: NotSupported where the op cannot be computed on parts.
    """
    if all(s is None or s == MIRRORED for s in states):
        return MIRRORED
    rule = all_specs()[t.op].split
    found = rule(t, *states) if rule is not None else None
    if found is None:
        raise NotSupported(f"{describe(t)}: no rule for sources cut by "
                           f"{', '.join('-' if s is None else meta_split_axis_name(s.axis) for s in states)}")
    return found
