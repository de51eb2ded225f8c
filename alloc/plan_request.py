"""The input of a memory plan: a PlanRequest says what to place and where, PlanOptions how to plan it.

    request = PlanRequest(table, node_ids, leaf_ids, (node_sizes, leaf_sizes))
    plan = plan_graph(request, PlanOptions(planner="best"))
"""
import dataclasses

import numpy as np

from ggjit.alloc.ggml.problem import check_alignment, check_time_limit
from ggjit.ops.core.errors import ParamError, ShapeError
from ggjit.ops.core.record import MAX_SRC, T_SRC, T_VIEW_SRC
from ggjit.ops.core.spec import in_place_table
from ggjit.ops.core.whole_numbers import is_whole

PLANNERS = ("ggml", "ggml-2023", "best")
LINKS = [T_VIEW_SRC, *range(T_SRC, T_SRC + MAX_SRC)]            # words of a table row that are rows


@dataclasses.dataclass(slots=True)
class PlanRequest:
    """The tensors of a graph, and the buffers that take those without memory of their own.

    table        int64 matrix, one TENSOR record per row (ggjit.ops.core.record); a tensor is external when it, or the
                 tensor it views, has a buffer there
    node_ids, leaf_ids   table rows, nodes in execution order
    sizes        (node sizes, leaf sizes): bytes each tensor needs from its buffer type; padded by the plan
    outputs      table rows that are kept to the end, as those with FLAG_OUTPUT are
    alignment, max_size  bytes, one value or one per buffer; max_size None means chunks without limit
    node_buffers, leaf_buffers   buffer index per node and leaf (reserve_n's ids), None: all 0
    n_buffers    how many buffers there are

    Errors: ParamError, ShapeError.
    """
    table: np.ndarray
    node_ids: np.ndarray
    leaf_ids: np.ndarray
    sizes: tuple
    outputs: np.ndarray = ()
    alignment: int = 32
    max_size: int = None
    node_buffers: np.ndarray = None
    leaf_buffers: np.ndarray = None
    n_buffers: int = 1

    def __post_init__(self):
        given = self.max_size
        self.max_size = _per_buffer(given, self.n_buffers, "max_size")
        if not all([x is None or is_whole(x, 1) for x in self.max_size]):
            raise ParamError(f"max_size {given!r}: expected positive bytes")
        self.alignment = [check_alignment(a) for a in _per_buffer(self.alignment, self.n_buffers, "alignment")]

    def in_order(self, pick):
        """The request with its nodes in another order.  pick: for each place the number of the node."""
        buffers = self.node_buffers
        return dataclasses.replace(self, node_ids=np.asarray(self.node_ids)[pick],
                                   sizes=(np.asarray(self.sizes[0])[pick], self.sizes[1]),
                                   node_buffers=None if buffers is None else np.asarray(buffers)[pick])

    def snapshot(self):
        """(the same on a copy of the table's rows that it refers to, their numbers in the table, ascending)"""
        n, ids = len(self.node_ids), np.concatenate([self.node_ids, self.leaf_ids]).astype(np.int64)
        links = self.table[ids][:, LINKS]
        rows = np.unique(np.concatenate([ids, links[links >= 0]]))
        ids = np.searchsorted(rows, ids)
        table = self.table[rows]
        table[:, LINKS] = -1            # a source outside the graph is plain memory: its own sources do not matter
        links[links >= 0] = np.searchsorted(rows, links[links >= 0])
        table[ids[:, None], LINKS] = links
        return dataclasses.replace(self, table=table, node_ids=ids[:n], leaf_ids=ids[n:],
                                   sizes=[np.array(s, np.int64) for s in self.sizes],
                                   outputs=np.searchsorted(rows, np.intersect1d(self.outputs, rows))), rows


@dataclasses.dataclass(frozen=True, slots=True)
class PlanOptions:
    """How a plan is made.

    planner      "ggml" (current ggml, offset for offset), "ggml-2023" (its November sources), "best" (never above ggml)
    time_limit   seconds "best" may search
    capacity     bytes; "best" stops at the first plan that fits
    node_limit   search nodes of "best" in place of time: the same call gives the same plan everywhere
    in_place     the ops that may work in place, uint8 by op number; default: the set of the chosen ggml version
    parse_seq    "ggml-2023" only: node positions, -1 for barriers
    remember     "best": the plan found when the same was asked last, so that what was announced is what is taken,
                 however busy the machine was in either search

    Errors: ParamError.
    """
    planner: str = "ggml"
    time_limit: float = 1.0
    capacity: int = None
    node_limit: int = None
    in_place: np.ndarray = None
    parse_seq: tuple = None
    remember: bool = False

    def __post_init__(self):
        if self.planner not in PLANNERS:
            raise ParamError(f"planner {self.planner!r}: expected one of {', '.join(PLANNERS)}")
        check_time_limit(self.time_limit)
        if self.parse_seq is not None and self.planner != "ggml-2023":
            raise ParamError(f"parse_seq belongs to planner 'ggml-2023', not to {self.planner!r}")
        for name, unit in (("capacity", "bytes"), ("node_limit", "nodes of the search")):
            value = getattr(self, name)
            if value is not None and not is_whole(value, 0):
                raise ParamError(f"{name} {value!r}: expected {unit}, a whole number >= 0, or None")
        ops = in_place_table(self.planner != "ggml-2023") if self.in_place is None else self.in_place
        object.__setattr__(self, "in_place", np.ascontiguousarray(ops, np.uint8))


def _per_buffer(value, n, name):
    out = [value] * n if value is None or np.isscalar(value) else list(value)
    if len(out) != n:
        raise ShapeError(f"{name}: expected one value or {n}, got {len(out)}")
    return out

