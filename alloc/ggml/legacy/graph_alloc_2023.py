"""The graph allocator of 2023, which continues from the state of the allocator of single tensors."""
import types

import numpy as np

from ggjit.alloc.ggml import graph_record as col
from ggjit.alloc.ggml.free_list import UNBOUNDED, new_states, reset_to_block
from ggjit.alloc.ggml.legacy.alias_2023 import alias_as_in_2023
from ggjit.alloc.ggml.legacy.tensor_alloc import stacked
from ggjit.alloc.ggml.problem import Problem, check_ids
from ggjit.ops.core.errors import ShapeError
from ggjit.ops.core.host_memory import oom_guard
from ggjit.ops.core.spec import in_place_table
from ggjit.ops.native.jit import i64s, native


@native("i64(i64, i64, i64, i64, i64)")
def _reset_all(states, words, n, offs, size):
    st = i64s(states, n * words)
    o, s = i64s(offs, n), i64s(size, n)
    for b in range(n):
        reset_to_block(st, b * words, o[b], s[b])
    return 0


def plan_2023(p, parse_seq=None):
    """Plan of a fresh Problem by allocators that measure, one of a single chunk for each buffer."""
    alias_as_in_2023(p, parse_seq)
    states, words = new_states(p.n_buffers, p.m + 2, None, 1)
    zero = np.zeros(p.n_buffers, np.int64)
    _reset_all(states, words, p.n_buffers, zero, zero + UNBOUNDED)
    return p.plan("ggml-2023", "2023", p.replay(states, words))


class GraphAllocator2023:
    """`ggml_gallocr` of 2023: plans a graph into `BestFit` allocators, going on from the state they are in.

    Memory a tensor got from one of them beforehand counts as owned: it may be reused in place and freed.
    An error leaves every allocator as it was.
    """

    def __init__(self):
        self.parse_seq = None

    def set_parse_seq(self, seq):
        """Explicit order as node positions, -1 for barriers; an empty list turns it off."""
        seq = check_ids("parse_seq", seq)
        self.parse_seq = seq if len(seq) else None

    def alloc_graph(self, talloc, table, node_ids, leaf_ids, sizes):
        """(max_size of the allocator, GraphPlan)."""
        plan = self.alloc_graph_n([talloc], table, node_ids, leaf_ids, sizes)
        return talloc.max_size, plan

    @oom_guard("a memory plan")
    def alloc_graph_n(self, tallocs, table, node_ids, leaf_ids, sizes, node_tallocs=None, leaf_tallocs=None):
        """An allocator per tensor: node_tallocs, leaf_tallocs are numbers into `tallocs`, None: all 0.

        Returns a GraphPlan whose buffers are the allocators and whose offsets count from their bases.
        """
        if not tallocs:
            raise ShapeError("no tensor allocator given")
        ids = np.concatenate([np.asarray(node_ids, np.int64), np.asarray(leaf_ids, np.int64)])
        want = np.zeros(len(ids), np.int64)
        for part, given in ((slice(0, len(node_ids)), node_tallocs), (slice(len(node_ids), None), leaf_tallocs)):
            if given is not None:
                want[part] = given
        holder = {int(i): b for b, t in enumerate(tallocs) for i in t.live}
        placed, own = [], np.zeros(len(ids), np.int64)
        for k, i in enumerate(ids.tolist()):
            b = holder.get(i)
            if b is not None:
                own[k], want[k] = 1, b
                offs, need = tallocs[b].live[i]
                placed.append((k, need, offs))
        p = Problem(types.SimpleNamespace(
            table=table, node_ids=node_ids, leaf_ids=leaf_ids, sizes=sizes, outputs=(),
            alignment=[t.alignment for t in tallocs], node_buffers=want[:len(node_ids)],
            leaf_buffers=want[len(node_ids):]), np.ascontiguousarray(in_place_table(modern=False), np.uint8), own)
        alias_as_in_2023(p, self.parse_seq, placed)
        states, words = stacked(tallocs, p.m + 2)
        plan = p.plan("ggml-2023", "2023", p.replay(states, words))
        self._commit(tallocs, states, words, p, plan, ids)
        return plan

    def _commit(self, tallocs, states, words, p, plan, ids):
        for b, t in enumerate(tallocs):
            before = t.max_size
            t._state, t._words = states[b * words:(b + 1) * words].copy(), words
            if t.on_max and t.max_size > before:
                for top, live in maxima(plan, b, before):
                    t.on_max(top, live)
        alive = p.allocations["left"] >= 0
        buffer = np.concatenate([plan.node_buffer, plan.leaf_buffer])
        offs = np.concatenate([plan.node_offs, plan.leaf_offs])
        size = np.concatenate([plan.node_size, plan.leaf_size])
        for i, b, o, s in zip(ids.tolist(), buffer.tolist(), offs.tolist(), size.tolist(), strict=True):
            if b >= 0:
                tallocs[b].own.setdefault(i, (o, s))
        planned = set(plan.a_id.tolist())
        for t in tallocs:
            t.live = {i: v for i, v in t.live.items() if i not in planned}
        for a in np.flatnonzero(alive):
            tallocs[plan.a_buffer[a]].live[int(plan.a_id[a])] = (int(plan.a_offs[a]), int(plan.a_size[a]))


def maxima(plan, buffer=0, above=0):
    """Every new maximum of one buffer's first chunk: (bytes, [(id, offs, nbytes)...] by address).

    What GGML_ALLOCATOR_DEBUG prints, from the events of a plan.
    """
    live, top, out = {}, above, []
    for kind, a, nbytes, _ in plan.events.tolist():
        if plan.a_buffer[a] != buffer or plan.a_chunk[a] != 0:
            continue
        if kind == col.EV_ALLOC:
            live[a] = nbytes
            end = int(plan.a_offs[a]) + nbytes
            if end > top:
                top = end
                out.append((top, sorted(((int(plan.a_id[x]), int(plan.a_offs[x]), s) for x, s in live.items()),
                                        key=lambda r: r[1])))
        elif kind == col.EV_FREE:
            live.pop(a, None)
        else:
            live[a] = nbytes
    return out
