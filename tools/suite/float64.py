"""A graph evaluated in float64 by the references of its ops: no kernel runs, nothing is compiled.

Memory is kept as it is in the real thing, an element a slot, so that views and nodes written in place mean the same:

    base tensor   | e0 | e1 | e2 | ...        one NumPy array; a view of it is that array with the view's strides

Quantised leaves hold what their blocks mean; results of F16, BF16 and quantised types are not rounded.  That makes the
values a smooth function of the leaves, whose slopes `numeric` measures.
"""
import numpy as np

from ggjit.graphs.graph import visit
from ggjit.ops.core.record import OP, VIEW_OPS
from ggjit.ops.core.spec import all_specs
from ggjit.tools.suite.compare import as_array

STEP = 1e-5                             # of central differences, times the size of the values
KINK = 1e-4                             # two steps that differ by this share of the slope: a corner lies between
BEND = 30.0                             # a corner at the point itself: slopes of its sides differ, as by curvature


class Float64:
    """The graph that leads to `outputs`; values(leaf) gives a leaf's array in NumPy order, default: what it holds."""

    def __init__(self, *outputs):
        self.nodes, self.leafs = visit(outputs)
        self.given = {}

    def hold(self, t, values):
        """Leaf t holds `values` (NumPy order) from now on."""
        self.given[t.id] = np.asarray(values)

    def run(self):
        """Evaluate every node; returns self."""
        self.memory = {}
        for t in (*self.leafs, *(t for t in self.nodes if t.op == OP.NONE)):
            if t.view_src is None:
                if t.id not in self.given:
                    self.hold(t, as_array(t, t.bytes()))
                self._write(t, self.given[t.id])
        with np.errstate(all="ignore"):
            for t in self.nodes:
                if t.op not in VIEW_OPS:
                    sources = [None if s is None else self[s] for s in t.src]
                    self._write(t, np.asarray(all_specs()[t.op].reference(t, *sources)))
        return self

    def __getitem__(self, t):
        """The values of t, NumPy order, four axes."""
        return self._window(t).copy()

    def _write(self, t, values):
        self._window(t, values.dtype)[...] = np.asarray(values).reshape(tuple(reversed(t.ne)))

    def _window(self, t, dtype=np.float64):
        base, size, block = t.base, t.type.nbytes, t.type.block
        if base.id not in self.memory:
            whole = t.type.dtype is not None and t.type.dtype.kind == "i"
            n = -(-base.nbytes // base.type.nbytes) * base.type.block
            self.memory[base.id] = np.zeros(n, np.int64 if whole else np.float64)
        flat = self.memory[base.id]
        strides = [8 * block * (b // size) for b in t.nb]
        strides[0] = 8 if block > 1 else strides[0]
        offs = 8 * block * (t.view_offs // size) if t.view_src is not None else 0
        if not min(t.ne):
            return np.empty(tuple(reversed(t.ne)), flat.dtype)
        return np.ndarray(tuple(reversed(t.ne)), flat.dtype, flat.data, offs, tuple(reversed(strides)))


def numeric(graph, loss, leaf, direction):
    """The slope of `loss` along `direction` in the leaf's values, or None where a corner lies within the step."""
    start = graph.given[leaf.id].reshape(tuple(reversed(leaf.ne))).astype(np.float64)
    h = STEP * max(1.0, float(np.abs(start[np.isfinite(start)]).max(initial=0.0)))

    def at(x):
        graph.hold(leaf, start + x * direction)
        return float(graph.run()[loss].sum())
    try:
        wide, narrow = ((at(x) - at(-x)) / (2 * x) for x in (h, h / 4))
        bend = abs(at(h / 4) + at(-h / 4) - 2 * at(0)) / (h / 4)        # what slopes of both sides differ by
    finally:
        graph.hold(leaf, start)
        graph.run()
    size = max(abs(wide), abs(narrow), 1e-30)
    off = max(abs(wide - narrow), bend / BEND)
    return None if off > KINK * size and off > 1e-7 else narrow
