"""Builders made from others: the in-place twin of an op, functions of a table, builders of several nodes.

    add, add_inplace = in_place_pair(_add)          # def _add(a: Tensor, b: Tensor, in_place: bool): ...

The annotations of a builder's parameters are what stubs, pages and `help` show, and how a node of its op is checked
(engine/tensors/rebuild.py): Tensor, Tensor | None where a source may be absent, int, float, bool, Type.
"""
import functools
import inspect
import opcode
import re
import sys
import types
import typing
import warnings

from ggjit.ops.core.errors import GgjitError

_WRAP_BUILDERS = "ggjit.ops.core.", "ggjit.core.", "ggjit.tensors."        # modules between a builder and its caller


def all_or_nothing(build):
    """Decorator of a builder of several nodes: if a later node is refused, the earlier ones are freed before the error
    comes out.

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


def looks_further(build):
    """Decorator of a builder whose node depends not only on the layouts of its tensors but also on their flags or
    sources.

    Calls of others with equal layouts are not checked again (engine/tensors/repeats.py).
    """
    build.looks_further = True
    return build


def writes_in_c(build):
    """Decorator of a builder that makes a new node, where ggml's C function changes the node it is given.  A call whose
    result is dropped does nothing, and warns."""
    @functools.wraps(build)
    def call(*args, **kwargs):
        made = build(*args, **kwargs)
        if _is_dropped(sys._getframe(1)):
            warnings.warn(f"gg.{build.__name__} returns a new tensor, which is dropped here: nothing has changed (ggml "
                          f"writes into its argument); write y = gg.{build.__name__}(y, ...)", stacklevel=3)
        return made
    call.looks_further = True
    return call


def _is_dropped(frame):
    """Does the frame's next instruction throw away the result of the call that it is making?"""
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_WRAP_BUILDERS):
        frame = frame.f_back
    if frame is None:
        return False
    code, at = frame.f_code.co_code, frame.f_lasti + 2
    while at < len(code) and not code[at]:              # skip inline caches of the bytecode
        at += 2
    return at < len(code) and code[at] == opcode.opmap["POP_TOP"]


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
    taken = ", ".join(str(p.replace(annotation=p.empty)) for p in parameters)
    passed = ", ".join(p.name for p in parameters)
    name = build.__name__.removeprefix("_")
    names = {"__name__": build.__module__, "build": build}
    # real parameters, not *args: a wrong call is reported as Python does, and costs nothing
    plain, in_place = (eval(f"lambda {taken}: build({passed}, {flag})", names) for flag in (False, True))
    plain.__annotations__ = in_place.__annotations__ = {p.name: p.annotation for p in parameters}
    return named(plain, name, build.__doc__), named(
        in_place, f"{name}_inplace",
        f"As `{name}`, written over a; returns a view of a.  Source: ggml_{name}_inplace.")


# ---------------------------------------------------------------- signatures as text
def annotation_text(kind):
    """An annotation as a stub says it: "Tensor | None", "Sequence[int]"."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " | ".join(map(annotation_text, typing.get_args(kind)))
    if kind is type(None):
        return "None"
    return re.sub(r"\b(?:\w+\.)+", "", getattr(kind, "__name__", "") if typing.get_origin(kind) is None else repr(kind))


def arguments_text(builder, default=repr):
    """["a: Tensor", "eps: float = 1e-05"]"""
    def one(p):
        text = f"{p.name}: {annotation_text(p.annotation)}"
        return text if p.default is p.empty else f"{text} = {default(p.default)}"
    return list(map(one, inspect.signature(builder).parameters.values()))
