"""Builders made from others: the in-place twin of an op, functions of a table, builders of several nodes.

    add, add_inplace = in_place_pair(_add)          # def _add(a, b, in_place): ...
"""
import functools
import inspect

from ggjit.ops.core.errors import GgjitError


def all_or_nothing(build):
    """A builder of several nodes: where a later one is refused, the earlier ones are gone when the error comes out.

    Nodes live as long as they are referred to; here that is the frames of the error's traceback.
    """
    @functools.wraps(build)
    def built(*args, **kwargs):
        try:
            return build(*args, **kwargs)
        except GgjitError as e:
            refused = e.with_traceback(None)
        raise refused
    return built


def named(f, name, doc):
    """f as the public builder `name`."""
    f.__name__ = f.__qualname__ = name
    f.__doc__ = doc
    return f


def in_place_pair(build):
    """(f, f_inplace) of build(a, ..., in_place): the same arguments without the last one.

    f is named as `build` without its underscore and has its text.
    """
    *parameters, _ = inspect.signature(build).parameters.values()
    taken, passed = ", ".join(map(str, parameters)), ", ".join(p.name for p in parameters)
    name = build.__name__.removeprefix("_")
    names = {"__name__": build.__module__, "build": build}
    # real parameters, not *args: a wrong call is reported as Python does, and costs nothing
    plain, in_place = (eval(f"lambda {taken}: build({passed}, {flag})", names) for flag in (False, True))
    return named(plain, name, build.__doc__), named(
        in_place, f"{name}_inplace",
        f"As `{name}`, written over a; returns a view of a.  Source: ggml_{name}_inplace.")
