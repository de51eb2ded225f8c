"""A decorator of public functions that turns errors about unsuitable arguments into one typed error.

Builders check what they know (types, shapes, parameters) and say it best.  What reaches Python's own machinery first,
such as a string where a tensor is expected or a number too large for float32, would come out as a raw AttributeError or
OverflowError from somewhere inside; here it becomes a TypeMismatch that shows the call.

Builders compute with Python's numbers, which do not wrap around: NumPy's scalars become such here.
"""
import functools
from inspect import signature

from numpy import generic

from ggjit.ops.core.call_hints import is_number, other_call
from ggjit.ops.core.errors import GgjitError, NoSuchAttribute, TypeMismatch
from ggjit.ops.core.shape import describe


def _shown(x):
    if hasattr(x, "ne") and hasattr(x, "nb"):
        return describe(x)
    text = repr(x) if isinstance(x, str | bytes | int | float | type(None) | list | tuple) else f"<{type(x).__name__}>"
    return text if len(text) <= 60 else text[:57] + "..."


def typed_errors(function, takes_arrays=False):
    """Typed errors pass through, raw ones are translated and kept as the cause; NumPy's scalars become Python's.

    takes_arrays: NumPy's scalars are arrays without axes to this function and keep their type.
    """
    @functools.wraps(function)
    def call(*args, **kwargs):
        if not takes_arrays:
            args = [x.item() if isinstance(x, generic) else x for x in args]
            if kwargs:
                kwargs = {k: x.item() if isinstance(x, generic) else x for k, x in kwargs.items()}
        try:
            return function(*args, **kwargs)
        except _RAW as e:
            raw = _raw(e)
        other = other_call(function, args, kwargs)
        if other is None:
            raise _typed(function, args, kwargs, raw) from raw
        try:
            return function(*other[0], **other[1])
        except _RAW as e:
            raise _typed(function, *other, _raw(e)) from e
    return call


def _raw(error):
    """The error, unless it is a typed one, which is raised; an attribute that an argument lacks is not typed yet."""
    if isinstance(error, GgjitError) and not isinstance(error, NoSuchAttribute):
        raise error
    return error


_RAW = (TypeError, AttributeError, ValueError, OverflowError, LookupError, ArithmeticError)


def _typed(function, args, kwargs, error):
    shown = ", ".join([*map(_shown, args), *(f"{k}={_shown(v)}" for k, v in kwargs.items())])
    name = function.__name__
    why = _not_a_tensor(error, [*args, *kwargs.values()]) or f"the arguments do not fit ({error})"
    usual = ", ".join(signature(function).parameters)
    return TypeMismatch(f"{name}({shown}): {why}; it is called as gg.{name}({usual}); see help(gg.{name})")


def _not_a_tensor(error, given):
    """The text of the error for an array, a list or a number where a tensor is expected, or None."""
    if not isinstance(error, AttributeError) or not any(error.obj is x for x in given):
        return None
    x = error.obj
    if is_number(x):
        return f"a tensor is expected, not {type(x).__name__}: t + {x} and t * {x} take numbers"
    if hasattr(x, "__len__") and not isinstance(x, str | bytes | dict):
        return f"a tensor is expected, not {type(x).__name__}: gg.tensor(values) makes one"
    return None
