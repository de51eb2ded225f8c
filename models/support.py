"""Which device supports which op and type: asked from the specs and traits, not written down."""
from ggjit.ops.record import OP, VIEW_OPS
from ggjit.ops.spec import all_specs
from ggjit.ops.types.traits import TYPE_INFO, all_traits
from ggjit.registry import registry


def supported():
    """({ggml op name: [device names]}, {ggml type name: [device names]}) over all ops and types of ggml."""
    names = [d.name for d in registry.devices() if d.type == "cpu"]       # NULL would say yes to everything
    specs, traits = all_specs(), all_traits()
    ops = {op.name: names if op in VIEW_OPS or (op in specs and specs[op].kernel) else [] for op in OP}
    types = {t.name: names if t in traits else [] for t in TYPE_INFO.values()}
    return ops, types
