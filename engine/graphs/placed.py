"""Placed tensors: what a backend sees of a graph under a scheduler.

The user's tensors and graph are never edited.  A scheduler gives every backend its own view of its nodes instead:

    the user's node        y = add(a, b)         a lies on the GPU, b on the CPU, y runs on the CPU
    the CPU's view of it   y' = add(a', b)       a' the CPU's copy of a; each of y', a', b knows (buffer, offset)

A PlacedTensor has the id, op, shape and parameters of the original, its own sources and its own place.  Backends
use it like any tensor: `t.buffer`, `t.offs`, `t.src`.
"""
from ggjit.graphs.graph import Graph
from ggjit.graphs.plan_cache import PlanCache
from ggjit.tensors.tensor import Tensor


class PlacedTensor(Tensor):
    """`t` at (buffer, byte offset) with sources of its own.  Writing it leaves the original's data version alone."""

    __slots__ = ("_fixed_place",)
    __setattr__, __delattr__ = object.__setattr__, object.__delattr__       # the scheduler's own, made by thousands

    def __init__(self, t, src, at, name=None):
        super().__init__(t.id, t.generation, t.ctx, t.op, t.layout, src, t.view_src, t.view_offs,
                         t.name if name is None else name)
        self._fixed_place = at
        self._hold("original", t)  # `original` holds the only reference to the tensor whose table row this uses

    def _where(self):
        return self._fixed_place

    def _count_write(self):
        """The scheduler keeps the versions of what it computes and copies."""


class PlacedGraph:
    """Nodes for one backend, with the attributes of a Graph that backends read.

    device: the device whose memory was chosen; placed: its tensors are not the user's handles.
    """
    placed, output_ids = True, ()

    def __init__(self, device, nodes, key, placement=None):
        """placement: where the work memory of its kernels lies, if not beside the tensors (Placement.work)."""
        self.device, self.nodes, self.key, self.placement = device, nodes, key, placement
        seen = {id(t) for t in nodes}
        self.leafs = []
        for t in nodes:
            for s in t.src:
                if s is not None and id(s) not in seen:
                    seen.add(id(s))
                    self.leafs.append(s)
        self.outputs = tuple(nodes[-1:])
        self.plans = PlanCache()

    _for_plan = Graph._for_plan

    def __len__(self):
        return len(self.nodes)

    def __repr__(self):
        return f"<PlacedGraph of {len(self.nodes)} nodes on {self.device.name}>"
