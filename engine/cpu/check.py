"""Compares every node of a plan with its NumPy float64 reference, to find the first wrong node.

Runs the plan node by node.  Before each node its sources are read (they may be overwritten by it), afterwards its
result is compared with `Spec.reference` on those values, so an error is reported where it arises and not downstream.
`GGJIT_DEBUG=check` does this in every compute; `check(plan)` gives the rows.
"""
import dataclasses

import numpy as np

from ggjit.ops.core.errors import GgjitError
from ggjit.ops.core.spec import all_specs
from ggjit.ops.core.types import BF16

MAX_NMSE = 1e-3             # largest error of a single node; quantised products are near 1e-5


@dataclasses.dataclass(frozen=True)
class NodeCheck:
    """One node: its normalised mean squared error against float64, and whether NaN or infinity stand elsewhere."""
    tensor: object
    nmse: float
    same_specials: bool

    @property
    def ok(self):
        return self.same_specials and self.nmse <= MAX_NMSE


def values(plan, t):
    """The values of `t` where the plan keeps it, as a four-dimensional array in NumPy order."""
    buf, offs = plan.where(t)
    raw = buf.host_bytes(offs, t.nbytes)
    a = t._dequantized(raw) if t.type.block > 1 or t.type is BF16 else t._elements(raw)
    a = np.array(a).reshape(tuple(reversed(t.ne)))
    return a.astype(np.float64) if a.dtype.kind == "f" else a


def compare(got, want):
    """(normalised mean squared error over finite values, NaN and infinities in the same places)"""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    finite = np.isfinite(want)
    same = bool((finite == np.isfinite(got)).all() and (np.isnan(want) == np.isnan(got)).all()
                and (want[np.isinf(want)] == got[np.isinf(want)]).all())
    both = finite & np.isfinite(got)
    power = np.square(want[both]).sum()
    error = np.square(got[both] - want[both]).sum()
    return (float(error / power) if power else float(error)), same


def check(plan):
    """[NodeCheck] of every node, in order of execution."""
    if plan.fuse:
        plan = type(plan)(plan.backend, plan.graph, plan.placement, fuse=False)
    rows = []
    for i, t in enumerate(plan.nodes):
        sources = [None if s is None else values(plan, s) for s in t.src]
        plan.run_nodes(i, i + 1)                # first: an id out of range is the kernel's error, with names
        with np.errstate(all="ignore"):
            want = all_specs()[t.op].reference(t, *sources)
        rows.append(NodeCheck(t, *compare(values(plan, t), want)))
    return rows


def require_right(plan):
    """GgjitError naming the first node that differs from its reference."""
    for row in check(plan):
        if not row.ok:
            raise GgjitError(f"{row.tensor!r} differs from its reference: NMSE {row.nmse:.3g}"
                             + ("" if row.same_specials else ", NaN or infinity in different places"))
