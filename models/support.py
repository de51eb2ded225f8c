"""Which device supports which op and type: asked from the specs and traits, not written down."""
from ggjit.ops.record import OP, VIEW_OPS
from ggjit.ops.spec import all_specs
from ggjit.ops.types.traits import TYPE_INFO, all_traits
from ggjit.registry import registry


def supported():
    """({ggml op name: [device names]}, {ggml type name: [device names]}) over all ops and types of ggml."""
    names = [d.name for d in registry.devices() if d.type == "cpu"]       # NULL would say yes to everything
    specs, traits = all_specs(), all_traits()
    served = {op for op, spec in specs.items() if spec.kernel and spec.cases} | set(VIEW_OPS)
    ops = {op.name: names if op in served else [] for op in OP}
    types = {t.name: names if t in traits else [] for t in TYPE_INFO.values()}
    return ops, types
