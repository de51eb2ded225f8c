"""Which device supports which op with which types, found by building nodes.

Every op's spec brings test cases.  A case is built again with the type of a leaf changed (that leaf alone, and together
with all leaves of the same type); if the builder takes it, the device is asked `supports_op`.

    mul_mat(a F32 [172, 19], b F32 [172, 8])    a Q4_0?  blocks of 32 do not divide 172: every ne0 of 172 becomes 256
                                                -> the builder takes it, the CPU has a kernel: Q4_0 is a type of src0
"""
import contextlib
import functools
import itertools

import numpy as np

from ggjit.api.registry import registry
from ggjit.ops.core.errors import GgjitError
from ggjit.ops.core.record import OP, VIEW_OPS
from ggjit.ops.core.spec import Inputs, all_specs
from ggjit.ops.core.traits import all_traits
from ggjit.ops.core.types import TYPE_INFO
from ggjit.tensors.context import Context

WHOLE_ROW = 256                 # a multiple of every type's block


def devices():
    """Devices that compute; NULL would say yes to everything."""
    return [d for d in registry.devices() if d.name != "NULL"]


def supported():
    """({ggml op name: [device names]}, {ggml type name: [device names]}) over all ops and types of ggml."""
    ops = {op.name: [d.name for d in devices() if supports(op, d)] for op in OP}
    names = [d.name for d in devices() if d.type == "cpu"]
    return ops, {t.name: names if t in all_traits() else [] for t in TYPE_INFO.values()}


def supports(op, device):
    """Does the device compute one of the op's test cases?"""
    if op in VIEW_OPS:
        return True
    for case in _cases(op):
        with _built(case) as built:
            node = built and _find(built.result, op)
            if node is not None and device.supports_op(node):
                return True
    return False


@functools.cache
def op_types(op, device):
    """{"src0": types, ..., "result": types} that `device` supports for `op`, in order of the types' ids; {} for none.

    Sources that are no leaves in the op's test cases are left out.
    """
    found = {}                          # {source: types}
    for case in _distinct_cases(op):
        with _built(case) as built:
            plain = [(t.type, t.ne[0]) for t in built.leaves]
            source = _sources(built, _find(built.result, op))
        for changes in [{}, *_changes([t for t, _ in plain])]:
            if changes and all(t in found.get(source.get(i), ()) for i, t in changes.items()):
                continue                # the type is known to work
            with _built(case, changes, {plain[i][1]: WHOLE_ROW for i, t in changes.items() if plain[i][1] % t.block}) \
                    as built:
                node = built and _find(built.result, op)
                if node is not None and device.supports_op(node):
                    found.setdefault("result", set()).add(node.type)
                    for name in _sources(built, node).values():
                        found.setdefault(name, set()).add(node.src[int(name[3:])].type)
    return {name: sorted(found[name], key=lambda t: t.id) for name in sorted(found, key=lambda n: (n == "result", n))}


# ---------------------------------------------------------------- cases, changed
class _Leaves(Inputs):
    """Leaves of a case, without values.  changes: {number of a leaf: type instead}, rows: {ne0: ne0 instead}."""

    def __init__(self, ctx, changes, rows):
        super().__init__(ctx, np.random.default_rng(0))
        self.changes, self.rows, self.leaves, self.result = changes, rows, [], None

    def new(self, type, ne, values=None, lo=-1.0, hi=1.0):
        ne = tuple(ne) if hasattr(ne, "__iter__") else (ne,)
        type = self.changes.get(len(self.leaves), type)
        self.leaves.append(self.ctx.new_tensor(type, (self.rows.get(ne[0], ne[0]), *ne[1:])))
        return self.leaves[-1]

    def ids(self, type, ne, n):
        return self.new(type, ne)


@contextlib.contextmanager
def _built(case, changes=(), rows=()):
    """The case's leaves, and its tensor as `result`; None if a builder refuses the changes."""
    with Context() as ctx:
        built = _Leaves(ctx, dict(changes), dict(rows))
        try:
            built.result = case.build(built)
        except (GgjitError, TypeError, ValueError, AttributeError):     # what the public front door makes typed
            built = None
        yield built
    ctx.free()


def _cases(op):
    spec = all_specs().get(op)
    return spec.cases() if spec and spec.cases else ()


def _distinct_cases(op):
    """The first case of every combination of types of leaves and result."""
    first = {}
    for case in _cases(op):
        with _built(case) as built:
            first.setdefault((built.result.type, *(t.type for t in built.leaves)), case)
    return first.values()


def _changes(types):
    """{number of a leaf: another type}: of one leaf alone, and of all leaves of one type."""
    for type, (i, old) in itertools.product(TYPE_INFO.values(), enumerate(types)):
        if type is not old:
            yield {i: type}
            same = [j for j, t in enumerate(types) if t is old]
            if len(same) > 1 and i == same[0]:
                yield dict.fromkeys(same, type)


def _sources(built, node):
    """{number of a leaf: "src0", ...}: which source of the node is the leaf, or a view of it."""
    numbers = {t.id: i for i, t in enumerate(built.leaves)}
    return {numbers[s.base.id]: f"src{k}" for k, s in enumerate(node.src) if s is not None and s.base.id in numbers}


def _find(t, op):
    """The node of `op` that the tensor t rests on."""
    if t is None or t.op == op:
        return t
    return next((found for found in (_find(s, op) for s in t.src) if found is not None), None)
