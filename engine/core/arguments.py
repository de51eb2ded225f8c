"""Checks of arguments: a TypeMismatch that names the argument, before any state changes."""
import difflib
import functools
import inspect
import re
from typing import get_args

import numpy as np

from ggjit.ops.core.errors import GgjitError, ParamError, TypeMismatch
from ggjit.ops.core.types import Type, known_types, named
from ggjit.ops.core.whole_numbers import is_whole, whole


def buffer_size(value):
    """A number of bytes, 0 or more.  Errors: TypeMismatch, ParamError."""
    size = whole(value, "buffer size")
    if size < 0:
        raise ParamError(f"buffer size must not be negative, got {size}")
    return size


_SIZE = re.compile(r"(?=\.?\d)(\d*)\.?(\d*)(?:e\+?(\d{1,2}))?\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def nbytes_of(value, what):
    """A number of bytes: a whole number (1e9, too), or a text such as "1500000000", "8e9", "8G", "512 MB" or "8GiB"; a
    k is 1000, a Ki is 1024.  Errors: ParamError, TypeMismatch."""
    if not isinstance(value, str):
        n = whole(int(value) if isinstance(value, float) and value.is_integer() else value, what)
    else:
        found = _SIZE.fullmatch(value.strip())
        n = 0
        if found is not None and (found[4] or not found[5]):
            unit = (1024 if found[5] else 1000) ** " kmgt".index(found[4].lower() or " ")
            n = int(found[1] + found[2]) * 10 ** int(found[3] or 0) * unit // 10 ** len(found[2])
    if n < 1:
        raise ParamError(f"{what}: {value!r}: a size is a number of bytes, such as 500M, 1.5G or 800MiB")
    return n


def expect(value, kind, what):
    """`value`, if it is a `kind` (a class or a tuple of them)."""
    if not isinstance(value, kind):
        names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise TypeMismatch(f"{what} takes a {names}, got {type(value).__name__}")
    return value


def expect_flag(value, what):
    """`value`, if it is True or False (NumPy's too), 0 or 1."""
    if not isinstance(value, bool | np.bool_) and not (is_whole(value, 0) and value <= 1):
        raise TypeMismatch(f"{what} is True or False, got {value!r}")
    return value


def expect_slot(value, slot, what):
    """`value`, if it is an instance with the attribute `slot`; for interfaces without a common base class."""
    if isinstance(value, type) or not hasattr(value, slot):
        raise TypeMismatch(f"{what}, got {type(value).__name__}")
    return value


def type_of(value, what):
    """A tensor type, given as one, by its name in any case or as NumPy's: gg.F16, "F16", "f16", np.float16.

    Errors: TypeMismatch.
    """
    if isinstance(value, Type):
        return value
    if not isinstance(value, str):
        value = _dtype_name(value, what)
    found = named(OF_NUMPY.get(value, value))
    if found is None:
        types = {t.name.lower(): t for t in known_types()}
        raise TypeMismatch(f"{what}: no tensor type {value!r}{nearest(value.lower(), types)}; there are "
                           f"{', '.join(map(repr, types.values()))}")
    return found


OF_NUMPY = {"float16": "F16", "float32": "F32", "float64": "F64", "bfloat16": "BF16", "int8": "I8", "int16": "I16",
            "int32": "I32", "int64": "I64"}


def _dtype_name(value, what):
    """The name of a NumPy dtype: np.float16, np.dtype("f2")."""
    if isinstance(value, np.dtype) or isinstance(value, type) and issubclass(value, np.generic):
        return np.dtype(value).name
    raise TypeMismatch(f"{what} must be a tensor type such as gg.Q8_0 or its name, got {value!r}")


def with_type_names(builder):
    """The builder, or, if it takes a tensor type, one that takes its name as well: gg.cast(x, "F16")."""
    at = [(i, p) for i, (p, kind) in enumerate(builder.__annotations__.items()) if Type in get_args(kind)]
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


def typed_call(function):
    """Decorator: a call with missing or unknown arguments is a TypeMismatch that shows how it is called."""
    @functools.wraps(function)
    def call(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except TypeError as e:
            if isinstance(e, GgjitError):
                raise
            if wrong := _wrong_call(function, args, kwargs):
                raise wrong from None
            raise
    return call


def typed_methods(cls):
    """Decorator of a class: the same of its public methods."""
    for name, method in list(vars(cls).items()):
        if inspect.isfunction(method) and not name.startswith("_"):
            setattr(cls, name, typed_call(method))
    return cls


def lists_options(options):
    """Decorator: the signature, and so completion, lists `options`, {name: default}, which **options takes."""
    def decorate(function):
        found = inspect.signature(function)
        own = [p for p in found.parameters.values() if p.kind is not p.VAR_KEYWORD]
        more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
                for name, default in options.items() if name not in found.parameters]
        function.__signature__ = found.replace(parameters=[*own, *more])
        return function
    return decorate


def _wrong_call(function, args, kwargs):
    """The TypeMismatch of a call that does not fit the function's parameters, or None."""
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as why:
        known = [p for p in signature.parameters.values() if p.name != "self"]
        unknown = next((k for k in kwargs if k not in signature.parameters), "")
        hint = nearest(unknown, [p.name for p in known]) if unknown else ""
        name = function.__name__ if function.__name__ != "__init__" else function.__qualname__.split(".")[0]
        return TypeMismatch(f"{name}: {why}{hint}; it is called as {name}{signature.replace(parameters=known)}")
    return None


def nearest(name, known):
    """Text " (did you mean ...?)" for an error, "" when no known name is similar."""
    close = difflib.get_close_matches(name, known, 1)
    return f" (did you mean {close[0]}?)" if close else ""
