"""A node of a plan: one kernel, which computes one node of the graph or, fused, several."""
import collections
import functools
import itertools
import typing

import numpy as np

from ggjit.core.table import TABLE
from ggjit.graphs.node_kinds import kinds_of
from ggjit.ops.core.record import T_NE, T_OP, VIEW_OPS
from ggjit.ops.core.spec import all_specs, ops_with

_NOTHING = frozenset()
_COMPUTES = np.array([op not in VIEW_OPS for op in range(256)])         # by op


class Spots(typing.NamedTuple):
    """Where the tensors of a fused PlanNode stand among its nodes: (node, 0 for its result, 1 + j for its source j).

    left_out   numbers of nodes
    apart      int64 rows (node, place, other node, its place, unless): tensors that may not overlap; unless: they may
               where they begin at the same byte
    """
    left_out: tuple
    reads: tuple
    by_row: tuple
    ahead: tuple
    apart: np.ndarray


_Fields = collections.namedtuple("_Fields", "t kernel module reads nodes params left_out by_row ahead spots",
                                 defaults=(None, _NOTHING, (), (), None))


class PlanNode(_Fields):
    """One NODE row: the tensor it computes, or the last of those it computes in one kernel.

    t        tensor
    kernel   a Kernel of ops/core/spec.py, or a device's own with name, work_nbytes and cost
    module   of the kernel
    reads    tensors of the source views, in order
    nodes    all nodes it computes, in order; the last one is t
    params   the NODE's parameter words; None: those of t
    left_out ids of those that are never stored
    by_row, ahead   sources that are read as fusion_pattern.py says
    spots    where all these stand; None: it is one node of the graph
    """
    __slots__ = ()
    __eq__, __hash__ = object.__eq__, object.__hash__

    @property
    def stored(self):
        """The tensors it writes to memory."""
        return [t for t in self.nodes if t.id not in self.left_out] if self.left_out else self.nodes

    def of(self, nodes, n_own):
        """One of the same kind that computes other nodes, of which the last n_own are its own."""
        if self.spots is None:
            return self._replace(t=nodes[0], reads=nodes[0].src, nodes=nodes)
        left_out, *some, _ = self.spots
        reads, by_row, ahead = (tuple([nodes[k].src[j - 1] if j else nodes[k] for k, j in x]) for x in some)
        first = len(nodes) - n_own
        return self._replace(t=nodes[-1], reads=reads, nodes=nodes[first:], by_row=by_row, ahead=ahead,
                             left_out=frozenset([nodes[k].id for k in left_out if k >= first]))


class PlanParts(collections.abc.Sequence):
    """The PlanNodes of a plan, by kind: those of a kind differ in their tensors alone, and one is made when it is
    looked at.

    nodes   the nodes of the graph that are computed;  ids: their rows of the table
    likes   {number of a kind: a PlanNode of it}
    kinds   of each part, the number of its kind
    ends    of each part, how many nodes there are up to its last
    again   {number of a part: the numbers of the nodes it computes}, where some are computed by earlier parts as well
    """

    def __init__(self, nodes, ids, likes, kinds, ends, again):
        self.nodes, self.ids, self.likes, self.kinds, self.ends, self.again = nodes, ids, likes, kinds, ends, again

    def __len__(self):
        return len(self.kinds)

    def __getitem__(self, index):
        return self._all[index]

    def __repr__(self):
        return f"<PlanParts of {len(self.nodes)} nodes in {len(self)} kernels>"

    @functools.cached_property
    def _all(self):
        ends, kinds, nodes = self.ends.tolist(), self.kinds.tolist(), self.nodes
        return [self.likes[kind].of(tuple(nodes[begin:end]) if (run := self.again.get(i)) is None else
                                    tuple([nodes[k] for k in run]), end - begin)
                for i, (kind, begin, end) in enumerate(zip(kinds, [0, *ends], ends, strict=False))]

    @functools.cached_property
    def results(self):
        """The last node of each part."""
        return [self.nodes[end - 1] for end in self.ends.tolist()]

    @functools.cached_property
    def kernels(self):
        """The kernel of each part."""
        return [self.likes[kind].kernel for kind in self.kinds.tolist()]

    @functools.cached_property
    def used(self):
        """(the PlanNodes of the kinds there are, of each part its place among them)"""
        is_used = np.bincount(self.kinds) > 0
        return [self.likes[k] for k in np.flatnonzero(is_used).tolist()], (np.cumsum(is_used) - 1)[self.kinds]

    def each(self, fact):
        """An array of fact(part) for every part, asked once for each kind."""
        likes, places = self.used
        return np.array([fact(like) for like in likes] or [0])[places]

    @functools.cached_property
    def fused(self):
        """[(PlanNode, the parts that are like it, the nodes of each of them: int64 [part, node])] of fused kinds."""
        likes, places = self.used
        found, many = [], self.again
        for k, like in enumerate(likes):
            if like.spots is not None:
                parts = np.flatnonzero(places == k)
                n = len(like.nodes)
                runs = self.ends[parts, None] + np.arange(-n, 0)
                for row, i in enumerate(parts.tolist() if many else ()):
                    if i in many:
                        runs[row] = many[i]
                found.append((like, parts, runs))
        return found

    @functools.cached_property
    def is_stored(self):
        """Of each node: is its result stored?"""
        stored = np.ones(len(self.nodes), bool)
        for like, _, runs in self.fused:
            stored[runs[:, list(like.spots.left_out)]] = False
        return stored


def nodes_to_compute(graph):
    """(those nodes of a graph that have elements and are no views, their rows of the table)"""
    ids = getattr(graph, "node_ids", None)
    ids = np.array([t.id for t in graph.nodes], np.int64) if ids is None else ids
    rows = TABLE.words[ids]
    chosen = _COMPUTES[rows[:, T_OP]] & (rows[:, T_NE:T_NE + 4] > 0).all(1)
    return list(itertools.compress(graph.nodes, chosen.tolist())), ids[chosen]


@functools.cache
def _calls_python():
    """[op]: does it call a function of the user's?"""
    return np.isin(np.arange(256), list(ops_with("calls_python")))


def plan_nodes(nodes, ids, choose, marked=frozenset()):
    """The PlanParts of the nodes, each one by itself.  ids: their rows.  choose(t) -> its kernel: asked once for all
    nodes of a kind, layers repeat."""
    (kinds, first), specs = kinds_of(ids, marked), all_specs()
    calls = _calls_python()[TABLE.words[ids, T_OP]]         # a user's function gets a kernel for each node
    own = np.flatnonzero(calls)
    kinds[own] = len(first) + np.arange(len(own))
    first = np.concatenate([first[~calls[first]], own])
    likes = {kind: PlanNode(t, choose(t), specs[t.op].module, t.src, (t,))
             for kind, t in zip(kinds[first].tolist(), [nodes[i] for i in first.tolist()], strict=True)}
    return PlanParts(nodes, ids, likes, kinds, np.arange(1, 1 + len(nodes)), {})
