"""Builders take the name of a type where they take a type: gg.cast(x, "F16")."""
import functools
import inspect

from ggjit.core.arguments import type_of
from ggjit.ops.core.types import Type

_TAKES = ("type", "dst_type")
_OTHERS = ("tri",)                      # its `type` is a number that says which triangle


def with_type_names(builder):
    """The builder, or, if it takes a tensor type, one that takes the name of a type as well."""
    code = inspect.unwrap(builder).__code__         # inspect.signature takes a fiftieth of the time of importing ggjit
    parameters = code.co_varnames[:code.co_argcount]
    at = [(i, p) for i, p in enumerate(parameters) if p in _TAKES and builder.__name__ not in _OTHERS]
    if not at:
        return builder

    @functools.wraps(builder)
    def call(*args, **kwargs):
        for i, name in at:
            what = f"{builder.__name__}: {name}"
            if i < len(args):
                if args[i].__class__ is not Type:
                    args = (*args[:i], type_of(args[i], what), *args[i + 1:])
            elif name in kwargs:
                kwargs[name] = type_of(kwargs[name], what)
        return builder(*args, **kwargs)
    return call
