"""Checks of arguments: a TypeMismatch that names the argument, before any state changes."""
import difflib

from ggjit.ops.core.errors import ParamError, TypeMismatch
from ggjit.ops.core.whole_numbers import whole


def buffer_size(value):
    """A number of bytes, 0 or more.  Errors: TypeMismatch, ParamError."""
    size = whole(value, "buffer size")
    if size < 0:
        raise ParamError(f"buffer size must not be negative, got {size}")
    return size


def expect(value, kind, what):
    """`value`, if it is a `kind` (a class or a tuple of them)."""
    if not isinstance(value, kind):
        names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise TypeMismatch(f"{what} takes a {names}, got {type(value).__name__}")
    return value


def expect_slot(value, slot, what):
    """`value`, if it is an instance with the attribute `slot`; for interfaces without a common base class."""
    if isinstance(value, type) or not hasattr(value, slot):
        raise TypeMismatch(f"{what}, got {type(value).__name__}")
    return value


def nearest(name, known):
    """Text " (did you mean ...?)" for an error, "" when no known name is similar."""
    close = difflib.get_close_matches(name, known, 1)
    return f" (did you mean {close[0]}?)" if close else ""
