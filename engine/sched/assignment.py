"""Assignment: one graph, assigned and split.  Numbers only; nothing is allocated, nothing of the user's is written."""
import functools
import threading

import numpy as np

from ggjit.alloc.ggml.problem import GraphError
from ggjit.core.buffer import USAGE_WEIGHTS, buffer_by_id, freed
from ggjit.core.table import FREED, TABLE
from ggjit.core.versions import written
from ggjit.ops.core.errors import GgjitError, NotSupported
from ggjit.ops.core.record import MAX_SRC, T_BUFFER
from ggjit.ops.core.shape import describe
from ggjit.ops.core.spec import ops_with
from ggjit.ops.core.types import BLOCK_SIZES
from ggjit.sched import causes
from ggjit.sched import records as rec
from ggjit.sched.explain import split_html
from ggjit.sched.gather import B_WORDS, distinct_buffers, gather
from ggjit.sched.motion import move_splits, never_worse
from ggjit.sched.order import reordered
from ggjit.sched.rules import assign
from ggjit.sched.split import judge_copies, split


class _Marks(threading.local):
    """A word per row of the tensor table, for one thread's `gather`: a fresh array of that size costs more than the
    rest of a small graph's run."""

    def __init__(self):
        self.words, self.stamp = np.zeros(TABLE.capacity, np.int64), 0

    def fresh(self):
        """(the words, a stamp that none of them has)"""
        self.stamp += 1
        return self.words, self.stamp


_MARKS = _Marks()


@functools.cache
def _update_bits():
    """[op]: bits of the sources that it writes."""
    updating = ops_with("updates")
    return np.array([sum(1 << rec.UPDATES + j for j in updating.get(op, ())) for op in range(256)], np.int64)


class Split:
    """One run of nodes on one backend.  inputs: the tensors whose copies are made for it, as the rules list them."""

    def __init__(self, backend, nodes, inputs, start):
        self.backend, self.nodes, self.inputs, self.start = backend, nodes, inputs, start

    def __repr__(self):
        return f"<Split {self.backend.name}: {len(self.nodes)} nodes, {len(self.inputs)} inputs>"

    def _repr_html_(self):
        return split_html(self)


class Assignment:
    """Assignments, causes, splits, copies and uses of one graph under one scheduler's settings."""

    def __init__(self, support, graph, pins, owned, motion=False, decided=None):
        """decided: {tensor id: (backend number, cause, its argument)}, for another order of the nodes."""
        self.alloc_deps = ()        # AllocDep of backends (engine/sched/order.py)
        # the nodes, not the graph: schedulers keep runs by weak references to graphs
        self.support, self.nodes = support, graph.nodes
        self.output_ids = graph.output_ids
        self.tensors = [*graph.nodes, *graph.leafs]
        self._check_alive(graph.leaf_ids, graph.leafs)
        self.n_nodes = len(graph.nodes)
        marks = self._gather(np.concatenate([graph.node_ids, graph.leaf_ids]))
        support.answer(self.params, self.nodes)
        self._pin({i: b for i, (b, _, _) in decided.items()} if decided else pins, owned, *marks)
        self._raise(assign(self.params.words))
        if decided:
            self.rows["cause"], self.rows["cause_arg"] = np.array([decided[i][1:] for i in self.ids.tolist()]).T
        elif motion:
            move_splits(self)
        self._split()

    @staticmethod
    def _check_alive(leaf_ids, leafs):
        """Errors: StaleHandle for a leaf whose buffer was freed; it must not be taken for one that has no memory
        yet."""
        gone = np.flatnonzero(TABLE.words[leaf_ids, T_BUFFER] == FREED)
        if gone.size:
            raise freed(leafs[gone[0]])

    @classmethod
    def in_order(cls, support, graph, pins, owned, motion):
        """An Assignment whose nodes are in the order that backends want (engine/sched/order.py)."""
        found = cls(support, graph, pins, owned)
        if motion:
            moved = cls(support, graph, pins, owned, motion)
            found = moved if never_worse(moved, found) else found
        wanted, deps = reordered(found, graph.leafs)
        if wanted is not None:
            decided = {row[0]: row[1:] for row in found.rows[["id", "backend", "cause", "cause_arg"]].tolist()}
            found = cls(support, wanted, pins, owned, decided=decided)
        found.alloc_deps = deps
        return found

    # ------------------------------------------------------------ passes
    def _gather(self, ids):
        """Fill the rows.  Returns the words, one per row of the table, and the stamp that they have above the local
        numbers of the graph's tensors; valid until the thread gathers again."""
        s = self.support
        while True:
            self.ids = ids
            # looked up first, since `place_leaves` compares with it
            self.version, self.found = TABLE.placement_version, self.placed()
            self.n = n = len(ids)
            self.rows = np.empty(n, rec.ROW)
            self.rows["id"] = ids
            found = np.empty((n + 1, 2), np.int64)
            n_buffers = distinct_buffers(TABLE.words, ids, n, found)
            self.buffers = [buffer_by_id(b, self.tensors[i]) for b, i in found[:n_buffers].tolist()]
            bufs = np.array([(b.id, s.buft_index(b.buft), (rec.IS_WEIGHT if b.usage == USAGE_WEIGHTS else 0)
                              | (rec.IS_HOST if b.buft.is_host() else 0)) for b in self.buffers],
                            np.int64).reshape(-1, B_WORDS)
            self.params = rec.Params(table=TABLE.words, rows=self.rows, n=n, n_nodes=self.n_nodes)
            marks = _MARKS.fresh()
            if gather(self.params.words, bufs, len(bufs), BLOCK_SIZES, _update_bits(), *marks) == rec.OK:
                return marks
            ids = np.append(ids, self._adopt(self.params["failed"], self.params["missing"]))

    def _adopt(self, i, missing):
        """Add a tensor from outside the graph that tensor i needs, such as the base of a view, as a leaf, if it has
        memory."""
        t = self.tensors[i]
        other = next((x for x in (t.view_src, *t.src) if x is not None and x.id == missing), None)
        if other is None or TABLE.words[missing, T_BUFFER] < 0:
            raise GraphError(f"{t!r} needs {describe(other)}, which is neither in the graph nor has memory; add it to "
                             f"the graph or allocate it first")
        self.tensors.append(other)
        return missing

    def _pin(self, pins, owned, words, stamp):
        backend, cause, bits = (self.rows[name] for name in ("backend", "cause", "bits"))
        for numbers, why, bit in ((owned, causes.DST, 0), (pins, causes.USER, rec.IS_PINNED)):
            if not numbers:
                continue
            ids = list(numbers)
            marks = words[ids]
            for k in np.flatnonzero(marks >> 32 == stamp).tolist():
                i = marks[k] & 0xFFFFFFFF
                backend[i], cause[i] = numbers[ids[k]], why
                bits[i] |= bit

    def _split(self):
        s, n = self.support, self.n_nodes
        room = n * MAX_SRC + 1
        arrays = dict(splits=s.scratch("splits", n + 1, dtype=rec.SPLIT), inputs=s.scratch("inputs", room),
                      copies=s.scratch("copies", room, dtype=rec.COPY), uses=s.scratch("uses", room, dtype=rec.USE),
                      scratch=s.scratch("words", 2 * self.n * len(s.backends) + 2))
        self.params.set(**arrays)
        split(self.params.words)
        judge_copies(self.params.words)
        self.split_rows, self.inputs, self.copies, self.uses = (
            arrays[name][:self.params["n_" + name]].copy() for name in ("splits", "inputs", "copies", "uses"))
        self.listed_nbytes = self.params["listed_nbytes"]
        self.written = arrays["scratch"][:self.n].copy()        # per base: last node that writes it in place
        self.params.set(splits=self.split_rows, copies=self.copies, uses=self.uses)

    def _raise(self, status):
        if status == rec.OK:
            return
        i = self.params["failed"]
        t = self.tensors[i]
        names = ", ".join(b.name for b in self.support.backends)
        b = self.support.backends[self.rows["backend"][i]]
        if status == rec.NO_BACKEND:
            raise NotSupported(f"no backend ({names}) supports {t!r} with sources "
                               f"{', '.join(describe(s) for s in t.src)}; add a CPU backend as the last one")
        if status == rec.BAD_PIN:
            raise NotSupported(f"{t!r} is pinned to {b.name}, which does not support it or cannot reach the memory it "
                               f"writes; pin it elsewhere, or reset the scheduler")
        if status == rec.CANNOT_WRITE:
            bases = " and ".join(describe(x) for x in written(t))
            raise NotSupported(f"{t!r} writes into {bases}, and no backend ({names}) both supports the op and reaches "
                               f"that memory; allocate {bases} on a device that does")
        assert status != rec.FOREIGN
        raise GgjitError(f"scheduler status {status}")

    # ------------------------------------------------------------ reading
    @property
    def n_splits(self):
        return len(self.split_rows)

    @functools.cached_property
    def splits(self):
        """Split objects, in order."""
        return [Split(self.support.backends[backend], self.nodes[start:end],
                      [self.tensors[i] for i in self.inputs[first:first + n_inputs].tolist()], start)
                for backend, start, end, first, n_inputs in self.split_rows.tolist()]

    @functools.cached_property
    def local(self):
        """Tensor id -> local number."""
        return dict(zip(self.ids.tolist(), range(len(self.ids)), strict=True))

    def number_of(self, t):
        """Local number of tensor `t`, or None.  A table row may belong to another tensor by now."""
        i = self.local.get(t.id)
        return i if i is not None and self.tensors[i].generation == t.generation else None

    def placed(self):
        """Which buffers the tensors lie in, to compare with later."""
        return TABLE.words[self.ids, T_BUFFER].tobytes()

    def base_of(self, i):
        """Local number of the tensor that i is a view of, or i."""
        base = int(self.rows["view"][i])
        return i if base < 0 else base

    def backend_of(self, i):
        b = int(self.rows["backend"][i])
        return self.support.backends[b] if b >= 0 else None

    def cause_of(self, i):
        """(label, sentence)"""
        return causes.text(int(self.rows["cause"][i]), int(self.rows["cause_arg"][i]))

    def place_leaf(self, i, buft_index):
        """Note that leaf i has memory now."""
        self.rows["own"][i] = self.rows["mem"][i] = buft_index
        self.rows["mem"][self.rows["view"] == i] = buft_index
