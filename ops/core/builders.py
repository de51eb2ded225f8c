"""Builders made from others: the in-place twin of an op, and functions of a table.

    add, add_inplace = in_place_pair(_add)          # def _add(a, b, in_place): ...
"""
import inspect


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
