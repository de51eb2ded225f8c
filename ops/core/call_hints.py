"""Calls in the style of NumPy and PyTorch: accepted if they have one meaning, else an error that says what to write.

    gg.soft_max(t, axis=-1)             gg.soft_max(t): ops work along rows, which are the last axis
    gg.concat(a, b, axis=0)             gg.concat(a, b, dim=a.ndim - 1)
    gg.conv_2d(w, x, stride=1, ...)     s0=1, s1=1

Only calls that a builder refuses come here.
"""
import difflib
import inspect

from ggjit.ops.core.errors import ParamError, TypeMismatch
from ggjit.ops.core.whole_numbers import is_whole

AXES = ("axis", "dim")
ALONG_ROWS = frozenset(("soft_max", "norm", "rms_norm", "l2_norm", "argmax", "argsort", "cumsum", "top_k", "sum_rows",
                        "mean", "silu", "geglu", "swiglu"))
SIZES = {"stride": "s", "strides": "s", "padding": "p", "dilation": "d", "kernel_size": "k"}
NAMES = {"epsilon": "eps", "diagonal": "n_past", "descending": "order"}


def other_call(builder, args, kwargs):
    """(args, kwargs) of the same meaning that the builder accepts, or None.  Errors: TypeMismatch, ParamError with what
    to write."""
    name, names = builder.__name__, tuple(inspect.signature(builder).parameters)
    if args and isinstance(args[0], list | tuple) and name == "concat":
        return _list_of_concat(args, kwargs)
    if name == "arange" and args and is_number(args[0]):
        numbers = ", ".join(map(str, args))
        raise TypeMismatch(f"arange takes a context first: gg.arange(gg.Context(), start, stop, step); "
                           f"gg.tensor(np.arange({numbers}, dtype=np.float32)) is a leaf of them")
    if name == "from_numpy" and len(args) == 1 and not kwargs.keys() - {"name", "type"}:
        raise TypeMismatch("from_numpy takes a context first: gg.from_numpy(gg.Context(), array); gg.tensor(array) is "
                           "a leaf without one")
    if name == "repeat" and len(args) > 1 and not hasattr(args[1], "ne"):
        raise TypeMismatch("repeat(a, b) repeats a to the shape of the tensor b; gg.repeat_4d(a, ne0, ne1, ne2, ne3) "
                           "takes the sizes of the result in ggml's order: np.tile(x, 2) is "
                           "gg.repeat_4d(t, 2 * t.ne[0], *t.ne[1:])")
    if name == "permute" and 2 <= len(args) <= 4:
        axes = ", ".join(map(str, args[1:]))
        raise TypeMismatch(f"permute takes ggml's four dimensions; NumPy's and PyTorch's is t.transpose({axes})")
    given = {k: v for k, v in kwargs.items() if k not in names}
    if not given:
        return None
    taken = {k: v for k, v in kwargs.items() if k in names}
    for k, value in given.items():
        taken |= _taken(name, names, k, value, args)
    return args, taken


def is_number(x):
    return isinstance(x, int | float) and not isinstance(x, bool)


def _list_of_concat(args, kwargs):
    several = args[0]
    if len(several) != 2:
        raise TypeMismatch(f"concat joins two tensors, got {len(several)}: gg.concat(gg.concat(a, b, dim), c, dim)")
    if len(args) > 1 or "dim" in kwargs:
        raise TypeMismatch("concat(a, b, dim): two tensors, and ggml's dimension, 0 being the last axis; "
                           "np.concatenate([a, b], axis=0) is gg.concat(a, b, axis=0)")
    a, b = several
    return (a, b), {"dim": _dimension(a, kwargs.get("axis", 0))}


def _taken(op, names, k, value, args):
    """{name here: value} of the argument k.  Errors: TypeMismatch, ParamError."""
    if k in NAMES and NAMES[k] in names:
        return {NAMES[k]: value}
    if k in AXES and args and hasattr(args[0], "ndim"):
        return _of_axis(op, names, value, args[0])
    if k in SIZES:
        own = [n for n in names if n[:1] == SIZES[k] and n[1:].isdigit()]
        values = list(value) if isinstance(value, list | tuple) else [value] * len(own)
        if own and len(values) == len(own):
            return dict(zip(own, reversed(values), strict=True))        # PyTorch's last axis is dimension 0
        if own:
            raise ParamError(f"{op}: {k}={value!r}: {len(own)} numbers, {', '.join(own)}, or one for all")
    close = difflib.get_close_matches(k, names, 1)
    raise TypeMismatch(f"{op} has no argument {k!r}{f' (did you mean {close[0]}?)' if close else ''}; it is called as "
                       f"gg.{op}({', '.join(names)}); see help(gg.{op})")


def _dimension(t, axis):
    """ggml's dimension of a NumPy axis."""
    if not is_whole(axis, -t.ndim, t.ndim - 1):
        raise ParamError(f"axis {axis!r}: expected a whole number from {-t.ndim} to {t.ndim - 1}")
    return t.ndim - 1 - axis % t.ndim


def _of_axis(op, names, axis, t):
    if "dim" in names:
        return {"dim": _dimension(t, axis)}
    if op == "sum":
        if axis is None:
            return {}
        raise TypeMismatch("sum is of all values; gg.sum_rows(t) sums along the last axis, which stays with length 1, "
                           "gg.sum_rows(gg.cont(t.T)) along the first of two")
    if op not in ALONG_ROWS:
        raise TypeMismatch(f"{op} has no axis; help(gg.{op}) says what it computes")
    if axis is None or _dimension(t, axis):
        raise TypeMismatch(f"{op} works along rows, the last axis; of another one, bring it there: "
                           f"gg.{op}(gg.cont(t.transpose(...)))" + (f", here gg.{op}(gg.cont(t.T)).T"
                                                                    if t.ndim == 2 else ""))
    return {}
