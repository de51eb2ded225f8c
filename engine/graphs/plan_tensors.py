"""The tensors that the nodes of a plan read and write, numbered once, so that plans are made in arrays.

    nodes     mul_mat(w, x)   add(mul_mat, b)
    uses      0  1  2         3  0  4             node 0 is tensor 0 and reads tensors 1 and 2
"""
import functools
import operator

import numpy as np

from ggjit.core.table import TABLE
from ggjit.graphs.node_kinds import N_PARAM_WORDS
from ggjit.ops.core.record import (
    MAX_SRC,
    N_ID,
    N_PARAMS,
    T_NB,
    T_NE,
    T_OP,
    T_PARAMS,
    T_SRC,
    T_TYPE,
    T_WORDS,
    V_NB,
    V_NE,
    V_TYPE,
)
from ggjit.ops.core.spec import ops_with
from ggjit.ops.native.jit import i64s, native

_WIDTH = 1 + MAX_SRC


@native("i64(i64, i64, i64, i64, i64, i64)")
def _number(table, nodes_, n, n_rows, uses_, ids_):
    """Fill uses, _WIDTH numbers for each node, and ids, the rows of the tensors; returns how many tensors there are."""
    t, nodes, uses, ids = i64s(table, 1 << 40), i64s(nodes_, n), i64s(uses_, n * _WIDTH), i64s(ids_, n * _WIDTH)
    known, m = np.zeros(n_rows, np.int64), np.int64(0)          # number + 1
    for i in range(n):
        for j in range(_WIDTH):
            row = nodes[i] if j == 0 else t[nodes[i] * T_WORDS + T_SRC + j - 1]
            uses[i * _WIDTH + j] = -1
            if row < 0:
                continue
            if known[row] == 0:
                ids[m] = row
                m += 1
                known[row] = m
            uses[i * _WIDTH + j] = known[row] - 1
    return m


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64)")
def write_rows(table, rows_, starts_, node_ids_, n, views_, view_ids_, n_views):
    """Write what the table says of nodes and of the views at words `views_` into NODE rows: ids, parameters, shapes."""
    t, starts, nodes = i64s(table, 1 << 40), i64s(starts_, n), i64s(node_ids_, n)
    rows, views, ids = i64s(rows_, 1 << 40), i64s(views_, n_views), i64s(view_ids_, n_views)
    for i in range(n):
        rows[starts[i] + N_ID] = nodes[i]
        for k in range(N_PARAM_WORDS):
            rows[starts[i] + N_PARAMS + k] = t[nodes[i] * T_WORDS + T_PARAMS + k]
    for i in range(n_views):
        for k in range(4):
            rows[views[i] + V_NE + k] = t[ids[i] * T_WORDS + T_NE + k]
            rows[views[i] + V_NB + k] = t[ids[i] * T_WORDS + T_NB + k]
        rows[views[i] + V_TYPE] = t[ids[i] * T_WORDS + T_TYPE]
    return 0


class PlanTensors:
    """singles: PlanParts of one node each.  by_handle: tensors may share a row, or a row may be another tensor's.

    ids        the row of each tensor
    uses       of each node the numbers of its result and of its sources, -1 for none
    n_sources  of each node, absent ones in between counted
    """

    def __init__(self, singles, by_handle):
        self.nodes = nodes = singles.nodes
        self.by_handle, self.key = by_handle, id if by_handle else operator.attrgetter("id")
        self.n_sources = singles.each(lambda p: len(p.reads))
        width = 1 + int(self.n_sources.max(initial=0))
        if by_handle:
            self.ids = np.array([x.id for x in self.handles], np.int64)
            uses = [[-1 if x is None else self.number(x) for x in (t, *t.src)] for t in nodes]
            self.uses = np.array([row + [-1] * (width - len(row)) for row in uses], np.int64).reshape(-1, width)
        else:
            uses, ids = np.empty((len(nodes), _WIDTH), np.int64), np.empty(len(nodes) * _WIDTH, np.int64)
            self.ids = ids[:_number(TABLE.words, singles.ids, len(nodes), TABLE.n_rows, uses, ids)].copy()
            self.uses = uses[:, :width].copy()
        self.ops = TABLE.words[singles.ids, T_OP]

    @functools.cached_property
    def handles(self):
        """The tensors, by number."""
        key = self.key
        return list({key(x): x for t in self.nodes for x in (t, *t.src) if x is not None}.values())

    @functools.cached_property
    def keys(self):
        """For each tensor what `key` says of its handle."""
        return list(map(id, self.handles)) if self.by_handle else self.ids.tolist()

    @functools.cached_property
    def _numbers(self):
        return {key: k for k, key in enumerate(self.keys)}

    def number(self, t):
        return self._numbers[self.key(t)]

    @functools.cached_property
    def updates(self):
        """(nodes that write sources, one entry for each source; the numbers of those)"""
        updating, at = ops_with("updates"), np.flatnonzero(_updates()[self.ops]).tolist()
        found = [(i, self.uses[i, 1 + j]) for i in at for j in updating[self.nodes[i].op]]
        return np.array(found, np.int64).reshape(-1, 2).T


@functools.cache
def _updates():
    """[op]: does it write sources?"""
    return np.isin(np.arange(256), list(ops_with("updates")))
