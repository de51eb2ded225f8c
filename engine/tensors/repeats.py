"""Repeated builder calls: a call with the layouts and arguments of an earlier one skips the checks.

Layers repeat.  What a builder makes is decided by the layouts of its tensors (type, sizes, strides, axes) and by its
other arguments, by nothing else; so a call with equal ones gives a node that differs in its sources alone:

    gg.mul_mat(w, x)        checked and built; kept: op, layout, parameters, "sources: arguments 0 and 1"
    gg.mul_mat(v, y)        layouts as before: the row is written from what was kept

Only single nodes are kept whose sources are the call's own arguments.  Errors are raised by the builder: a call that
is refused leaves nothing behind, and one whose tensors are gone is handed on to it.  Builders that look further
(ops/core/builders.py) are called every time.
"""
import functools
import operator
import struct
import sys

from ggjit.core.arguments import with_type_names
from ggjit.core.table import TABLE
from ggjit.ops.core.record import T_FLAGS
from ggjit.ops.core.spec import builders as checked_builders
from ggjit.ops.core.types import Type
from ggjit.tensors.context import caller, innermost
from ggjit.tensors.tensor import Tensor

_NUMBERS = {int: "q", float: "d", bool: "?"}           # by their bits: 0.0 is not -0.0
_NAMES = (str, Type)
_KINDS = frozenset((Tensor, type(None), *_NUMBERS, *_NAMES))
_MAX_KEPT = 1024                # calls of one builder that are kept; then all are dropped


class _CachedNode:
    """The node that calls with equal layouts make.

    pick        args -> the sources
    first       place of the first tensor among the arguments: its context gets the node
    view        place of the argument that the node is a view of, or None; offs: bytes from where that begins
    """
    __slots__ = ("pick", "first", "view", "offs", "op", "layout", "template")

    def __init__(self, t, places, first, view, args):
        pick = operator.itemgetter(*places if len(places) > 1 else [slice(places[0], places[0] + 1)])
        self.pick = pick if max(places) < len(args) else lambda args: pick((*args, None))
        self.first, self.view = first, view
        self.offs = 0 if view is None else t.view_offs - args[view].view_offs
        self.op, self.layout = t.op, t.layout
        self.template = TABLE.template(t.id, len(places), view is not None)

    def again(self, args, frame):
        """The node for these arguments; None where the builder has to be called, which raises the error."""
        src, ids = self.pick(args), []
        for s in src:
            if s is None:
                ids.append(-1)
            else:
                if not s.ctx.alive or s.view_src is not None and not s.view_src.ctx.alive:
                    return None
                ids.append(s.id)
        ctx = innermost(args[self.first].ctx)
        if not ctx.alive:
            return None
        if self.view is None:
            row, generation = TABLE.like(self.template, ids, ctx.id)
            return ctx._handle(row, generation, self.op, self.layout, src, None, 0, "", caller(frame))
        of = args[self.view]
        offs = self.offs + of.view_offs
        if of.view_src is not None:
            of = of.view_src
        row, generation = TABLE.like(self.template, ids, ctx.id, of.id, offs)
        return ctx._handle(row, generation, self.op, self.layout, src, of, offs, "", caller(frame))


def _kept(t, args):
    """The _CachedNode of the result of a call, or None where the call cannot be repeated."""
    if t.__class__ is not Tensor or not t.src or TABLE.words[t.id, T_FLAGS] or t._holds is not None or t.name:
        return None
    tensors = [i for i, x in enumerate(args) if x.__class__ is Tensor]
    if t.type.is_own or any(args[i].type.is_own for i in tensors):      # a name may mean another type later
        return None
    by_id = {id(args[i]): i for i in tensors}
    # with equal arguments it is unknown which of them became which source
    if len(by_id) < len(tensors) or id(t) in by_id:
        return None
    places = [len(args) if s is None else by_id.get(id(s)) for s in t.src]
    if None in places:
        return None
    views = [None] if t.view_src is None else [i for i in tensors if args[i].base is t.view_src]
    return _CachedNode(t, places, tensors[0], views[0], args) if len(views) == 1 else None


def _key(kinds):
    """Function: args of these classes -> key that decides the node; None where there is no such key."""
    if Tensor not in kinds or not all(kind in _KINDS for kind in kinds):
        return None                     # not cached either, so that classes of the user's can be freed
    return _key_of(kinds)


@functools.lru_cache(256)
def _key_of(kinds):
    names = [f"x{i}" for i in range(len(kinds))]
    numbers = [(x, _NUMBERS[kind]) for x, kind in zip(names, kinds, strict=True) if kind in _NUMBERS]
    parts = [f"{x}.layout" for x, kind in zip(names, kinds, strict=True) if kind is Tensor]
    parts += [x for x, kind in zip(names, kinds, strict=True) if kind in _NAMES]
    if numbers:
        parts.append(f"pack({', '.join(x for x, _ in numbers)})")
    pack = struct.Struct("".join(code for _, code in numbers)).pack
    return eval(f"lambda {', '.join(names)}: ({', '.join(parts)},)", {"pack": pack})


def repeated(builder):
    """Decorator: the builder, which keeps the nodes of earlier calls and repeats them."""
    of_kinds = {}               # {classes of the arguments: (args -> key, {key: _CachedNode})}

    @functools.wraps(builder)
    def call(*args, **kwargs):
        if kwargs:
            return builder(*args, **kwargs)
        kinds = tuple(map(type, args))
        key_of, known = of_kinds.get(kinds) or (_key(kinds), {})
        try:
            key = key_of(*args)
        except (struct.error, TypeError):               # beyond 64 bits; None: arguments of other classes
            return builder(*args)
        node = known.get(key)
        if node is not None:
            t = node.again(args, sys._getframe(1))
            if t is not None:
                return t
        t = builder(*args)
        made = _kept(t, args) if node is None else None     # nothing is kept for add(x, x), but for a later add(x, y)
        if made is not None:
            if len(known) >= _MAX_KEPT:
                known.clear()
            known[key] = made
            of_kinds.setdefault(kinds, (key_of, known))
        return t
    return call


@functools.cache
def builders():
    """{public name: function} of all ops, as `gg.` has them."""
    plain = {name: with_type_names(f) for name, f in checked_builders().items()}
    return {name: f if getattr(f, "looks_further", False) else repeated(f) for name, f in plain.items()}
