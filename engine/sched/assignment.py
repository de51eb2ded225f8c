"""Cut: one graph, assigned and split.  Numbers only; nothing is allocated, nothing of the user's is written."""
import functools

import numpy as np

from ggjit.alloc.problem import GraphError
from ggjit.core.buffer import USAGE_WEIGHTS, buffer_by_id, freed
from ggjit.core.table import FREED, TABLE
from ggjit.core.versions import UPDATED_SOURCES, written
from ggjit.ops.core.errors import GgjitError, NotSupported
from ggjit.ops.core.record import MAX_SRC, T_BUFFER, T_OP
from ggjit.ops.core.shape import describe
from ggjit.ops.core.types import TYPE_INFO
from ggjit.sched.columns import (
    BACKEND,
    BAD_PIN,
    BITS,
    C_DST,
    C_USER,
    CANNOT_WRITE,
    CAUSE,
    CAUSE_ARG,
    FOREIGN,
    ID,
    IS_HOST,
    IS_PINNED,
    IS_WEIGHT,
    MEM,
    NO_BACKEND,
    OK,
    OWN,
    S_BACKEND,
    S_END,
    S_INPUT0,
    S_N_INPUTS,
    S_START,
    SPLIT_WORDS,
    UPDATES,
    VIEW,
    cause_text,
    column,
    new_work,
)
from ggjit.sched.explain import split_html
from ggjit.sched.gather import B_WORDS, distinct_buffers, find_signatures, gather
from ggjit.sched.motion import move_splits, never_worse
from ggjit.sched.order import reordered
from ggjit.sched.rules import RULES, assign
from ggjit.sched.split import COPY_WORDS, USE_WORDS, judge_copies, split


@functools.cache
def _blocks():
    """(bytes, elements) of a block by type number."""
    nbytes, size = np.ones(64, np.int64), np.ones(64, np.int64)
    for k, t in TYPE_INFO.items():
        nbytes[int(k)], size[int(k)] = t.nbytes, t.block
    return nbytes, size


class Split:
    """One run of nodes on one backend.  inputs: the tensors whose copies are made for it, as the rules list them."""

    def __init__(self, backend, nodes, inputs, start):
        self.backend, self.nodes, self.inputs, self.start = backend, nodes, inputs, start

    def __repr__(self):
        return f"<Split {self.backend.name}: {len(self.nodes)} nodes, {len(self.inputs)} inputs>"

    def _repr_html_(self):
        return split_html(self)


class Cut:
    """Assignments, causes, splits, copies and uses of one graph under one scheduler's settings."""

    def __init__(self, world, graph, pins, owned, motion=False, decided=None):
        """decided: {tensor id: (backend number, cause, its argument)}, to cut in another order as decided before."""
        self.world, self.nodes = world, graph.nodes         # not the graph: schedulers hold runs by weak graph keys
        self.tensors = [*graph.nodes, *graph.leafs]
        self._check_alive(graph.leaf_ids, graph.leafs)
        self.n_nodes = len(graph.nodes)
        self._gather(np.concatenate([graph.node_ids, graph.leaf_ids]))
        self._support()
        self._pin({i: b for i, (b, _, _) in decided.items()} if decided else pins, owned)
        info = np.zeros(2, np.int64)
        w = world
        self._raise(assign(TABLE.words, self.ws, self.m, self.n_nodes, RULES[w.rules], w.buft_of, w.reads, w.homes,
                           len(w.bufts), len(w.backends), w.support, w.offload, int(w.op_offload), info), info)
        if decided:
            self.col(CAUSE)[:], self.col(CAUSE_ARG)[:] = np.array([decided[i][1:] for i in self.ids.tolist()]).T
        elif motion:
            move_splits(self)
        self._split()

    @staticmethod
    def _check_alive(leaf_ids, leafs):
        """A leaf whose buffer was freed is no leaf without memory: its values are gone."""
        gone = np.flatnonzero(TABLE.words[leaf_ids, T_BUFFER] == FREED)
        if gone.size:
            raise freed(leafs[gone[0]])

    @classmethod
    def in_order(cls, world, graph, pins, owned, motion):
        """A Cut whose nodes are in the order that backends want (engine/sched/order.py)."""
        cut = cls(world, graph, pins, owned)
        if motion:
            moved = cls(world, graph, pins, owned, motion)
            cut = moved if never_worse(moved, cut) else cut
        wanted = reordered(cut, graph.leafs)
        if wanted is None:
            return cut
        decided = dict(zip(cut.ids.tolist(), zip(*(cut.col(k).tolist() for k in (BACKEND, CAUSE, CAUSE_ARG)),
                                                 strict=True), strict=True))
        return cls(world, wanted, pins, owned, decided=decided)

    # ------------------------------------------------------------ passes
    def col(self, k, n=1):
        return column(self.ws, self.m, k, n)

    def _gather(self, ids):
        w = self.world
        while True:
            self.ids = ids
            self.found = self.placed()              # before anything is read: whoever places leaves compares
            self.m = m = len(ids)
            self.ws = new_work(m)
            self.col(ID)[:] = ids
            found = np.empty((m + 1, 2), np.int64)
            n = distinct_buffers(TABLE.words, ids, m, found)
            self.buffers = [buffer_by_id(b, self.tensors[i]) for b, i in found[:n].tolist()]
            bufs = np.array([(b.id, w.buft_index(b.buft), (IS_WEIGHT if b.usage == USAGE_WEIGHTS else 0)
                              | (IS_HOST if b.buft.is_host() else 0)) for b in self.buffers],
                            np.int64).reshape(-1, B_WORDS)
            info = np.zeros(2, np.int64)
            if gather(TABLE.words, self.ws, m, self.n_nodes, np.ascontiguousarray(bufs), len(bufs), *_blocks(),
                      *w.slot_words(), info) == OK:
                break
            ids = np.append(ids, self._adopt(*info.tolist()))
        ops = TABLE.words[self.ids[:self.n_nodes], T_OP]
        for op, sources in UPDATED_SOURCES.items():
            self.col(BITS)[:self.n_nodes][ops == op] |= sum(1 << UPDATES + j for j in sources)

    def _adopt(self, needs, missing):
        """A tensor outside the graph is taken in as a leaf if it has memory; a base of a view, say."""
        t = next(t for t in self.tensors if t.id == needs)
        other = next((x for x in (t.view_src, *t.src) if x is not None and x.id == missing), None)
        if other is None or TABLE.words[missing, T_BUFFER] < 0:
            raise GraphError(f"{t!r} needs {describe(other)}, which is neither in the graph nor has memory; add it to "
                             f"the graph or allocate it first")
        self.tensors.append(other)
        return missing

    def _support(self):
        """Ask devices about signatures nobody asked about before."""
        w = self.world
        w.make_room(self.n_nodes)
        new = np.empty(self.n_nodes + 1, np.int64)
        n = find_signatures(TABLE.words, self.ws, self.m, self.n_nodes, w.memo, w.memo_mask, w.n_signatures, new)
        if n:
            w.ask([self.tensors[i] for i in new[:n].tolist()])

    def _pin(self, pins, owned):
        if not pins and not owned:
            return
        backend, cause, bits = self.col(BACKEND), self.col(CAUSE), self.col(BITS)
        for i, id_ in enumerate(self.ids.tolist()):
            b = pins.get(id_)
            if b is None and id_ in owned:
                backend[i], cause[i] = owned[id_], C_DST
            elif b is not None:
                backend[i], cause[i] = b, C_USER
                bits[i] |= IS_PINNED

    def _split(self):
        w, n, m, nb = self.world, self.n_nodes, self.m, len(self.world.backends)
        room = n * MAX_SRC + 1
        splits, inputs = w.scratch("splits", n + 1, SPLIT_WORDS), w.scratch("inputs", room)
        copies, uses = w.scratch("copies", room, COPY_WORDS), w.scratch("uses", room, USE_WORDS)
        scratch, counts = w.scratch("words", 2 * m * nb + n + m + 2), np.zeros(5, np.int64)
        split(self.ws, m, n, RULES[w.rules], w.buft_of, w.reads, len(w.bufts), nb, w.snapshot, splits, inputs, copies,
              uses, scratch, counts)
        n_splits, n_inputs, n_copies, n_uses, self.listed_nbytes = counts.tolist()
        self.split_rows, self.inputs = splits[:n_splits].copy(), inputs[:n_inputs].copy()
        self.copies, self.uses = copies[:n_copies].copy(), uses[:n_uses].copy()
        judge_copies(self.ws, m, n, self.split_rows, n_splits, self.copies, n_copies, self.uses, n_uses, scratch,
                     int(w.keep_weights))
        self.written = scratch[:m].copy()               # per base: last node that writes it in place

    def _raise(self, status, info):
        if status == OK:
            return
        t = self.tensors[int(info[0])]
        names = ", ".join(b.name for b in self.world.backends)
        b = self.world.backends[self.col(BACKEND)[int(info[0])]]
        if status == NO_BACKEND:
            raise NotSupported(f"no backend ({names}) supports {t!r} with sources "
                               f"{', '.join(describe(s) for s in t.src)}; add a CPU backend as the last one")
        if status == BAD_PIN:
            raise NotSupported(f"{t!r} is pinned to {b.name}, which does not support it or cannot reach the memory it "
                               f"writes; pin it elsewhere, or reset the scheduler")
        if status == CANNOT_WRITE:
            bases = " and ".join(describe(x) for x in written(t))
            raise NotSupported(f"{t!r} writes into {bases}, and no backend ({names}) both supports the op and reaches "
                               f"that memory; allocate {bases} on a device that does")
        assert status != FOREIGN
        raise GgjitError(f"scheduler status {status}")

    # ------------------------------------------------------------ reading
    @property
    def n_splits(self):
        return len(self.split_rows)

    @functools.cached_property
    def splits(self):
        """Split objects, in order."""
        return [Split(self.world.backends[r[S_BACKEND]], self.nodes[r[S_START]:r[S_END]],
                      [self.tensors[i] for i in self.inputs[r[S_INPUT0]:r[S_INPUT0] + r[S_N_INPUTS]].tolist()],
                      r[S_START]) for r in self.split_rows.tolist()]

    @functools.cached_property
    def local(self):
        """Tensor id -> local number."""
        return {id_: i for i, id_ in enumerate(self.ids.tolist())}

    def number_of(self, t):
        """Local number of tensor `t`, or None.  A table row may belong to another tensor by now."""
        i = self.local.get(t.id)
        return i if i is not None and self.tensors[i].generation == t.generation else None

    def placed(self):
        """Which buffers the tensors lie in, to compare with later."""
        return TABLE.words[self.ids, T_BUFFER].tobytes()

    def backend_of(self, i):
        b = int(self.col(BACKEND)[i])
        return self.world.backends[b] if b >= 0 else None

    def cause_of(self, i):
        """(label, sentence)"""
        return cause_text(int(self.col(CAUSE)[i]), int(self.col(CAUSE_ARG)[i]))

    def place_leaf(self, i, buft_index):
        """Leaf i has memory now."""
        self.col(OWN)[i] = self.col(MEM)[i] = buft_index
        self.col(MEM)[self.col(VIEW) == i] = buft_index
