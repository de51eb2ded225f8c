"""An execution order for less memory (`order="memory"`): the same nodes and the same results in another sequence.

ggml's order is depth first from the outputs.  On chains (transformers) nothing is gained by another one; on branchy
and training graphs the most live bytes fall by up to a half.  List scheduling takes the ready node that raises the
peak least, then the live bytes least; a small beam keeps the best few orders (idea: Ahn et al., Serenity, MLSys 2020),
two that have executed the same nodes being one state.  The search runs from both ends, because each end sees what the
other does not: of branches that leave a small result behind, the widest should run first, which is seen only
from the end, where all small results are alive.

    live bytes |  __    __      forward: a node takes its own bytes and gives back those of sources read last
               | |  |__|  |     backward: a node gives back its own bytes and takes those of sources not yet seen
               +-----------> step     either way the bytes alive between two steps are the same

An order is legal when, for every *storage* (a tensor and all views of it), reads stay between the same writes: edges
for read after write, write after read and write after write.  A node whose result is a view and that is not merely a
view op writes the storage it views (CPY, SET_ROWS, ACC, optimiser steps).
"""
import itertools

import numpy as np
from numba import from_dtype

from ggjit.alloc.ggml.graph_record import CAN_INPLACE, EXTERNAL, FOREIGN, NONE, OUTPUT, base_of, graph_at
from ggjit.alloc.orders.exact_order import Bytes, least_peak
from ggjit.ops.core.record import MAX_SRC, T_OP, T_SRC, T_VIEW_SRC, T_WORDS, VIEW_OPS
from ggjit.ops.native.jit import array_maker, exact, i64s, native, u8s
from ggjit.ops.native.records import JitRecord, row

VIEW_OP = np.zeros(256, np.uint8)
VIEW_OP[[int(op) for op in VIEW_OPS]] = 1
EDGES_PER_NODE = 4 * MAX_SRC


EDGE = row("before", "after")
_edges = array_maker(from_dtype(EDGE))


@exact
def _edge(edges, n, p, q):
    """Node q after node p; the new number of edges."""
    if p < 0 or p == q:
        return n
    edges[n].before, edges[n].after = p, q
    return n + 1


@native("i64(i64, i64, i64, i64, i64)")
def dependencies(address, view_op, foreign, edges_, cap):
    """Edges of the order: data flow, and hazards per storage.  foreign[i]: number of the storage outside the graph
    that node i writes or reads through source j, n x 11 (column 10: what the node itself views), -1 none.

    Returns their number, or -1 when `cap` edges do not suffice.  Readers since the last write are kept as linked lists.
    """
    g = graph_at(address)
    n, m = g.n_nodes, g.m
    is_view, edges, out = u8s(view_op, 256), _edges(edges_, cap), i64s(foreign, 11 * n)
    n_store = np.int64(m)
    for k in range(11 * n):
        n_store = max(n_store, m + out[k] + 1)
    last_write, head = np.full(n_store, -1, np.int64), np.full(n_store, -1, np.int64)
    link, who = np.empty(11 * n + 1, np.int64), np.empty(11 * n + 1, np.int64)
    n_link, n_edges = 0, np.int64(0)
    for i in range(n):
        if n_edges + 3 * MAX_SRC + n_link + 2 > cap:
            return -1
        for j in range(MAX_SRC):
            p = g.tensor[i].src[j]
            if p >= 0 and p < n:
                n_edges = _edge(edges, n_edges, p, i)
        if is_view[g.table[g.tensor[i].id * T_WORDS + T_OP] & 255]:
            continue
        target = np.int64(-1)
        if g.tensor[i].view != NONE:
            target = base_of(g, i) if g.tensor[i].view != FOREIGN else m + out[11 * i + 10]
        for j in range(MAX_SRC):
            p = g.tensor[i].src[j]
            s = np.int64(-1)
            if p >= 0:
                s = base_of(g, p) if g.tensor[p].view != FOREIGN else m + out[11 * i + j]
            elif p == FOREIGN:
                s = m + out[11 * i + j]
            if s < 0:
                continue
            n_edges = _edge(edges, n_edges, last_write[s], i)
            who[n_link] = i
            link[n_link] = head[s]
            head[s] = n_link
            n_link += 1
        if target >= 0:
            n_edges = _edge(edges, n_edges, last_write[target], i)
            k = head[target]
            while k >= 0:
                n_edges = _edge(edges, n_edges, who[k], i)
                k = link[k]
            head[target] = -1
            last_write[target] = i
    return n_edges


# ---------------------------------------------------------------- beam search
# beam states lie twice: those of a step, then those of the next; state q has left[q * n:], uses[q * m:], ready[q * n:]
BEAM = JitRecord(
    "BeamRecord",
    n="i64", m="i64", n_edges="i64", edge=(EDGE, "n_edges"), beam="i64",
    backward="i64",             # from the last node to the first; edges are then (after, before)
    order="i64[n]",             # the result
    ptr="i64[n + 1] = 0", following="i64[n_edges]",         # CSR of what waits for node i
    own="i64[m] = 0", reads=(np.dtype([("storage", "i8", MAX_SRC)]), "n"),      # bytes; storages read, each once, -1
    word="i64[n]",              # random: the XOR of the words of a set of nodes names the set
    state=(row("peak", "live", "set", "n_ready"), "2 * beam"),
    left="i64[2 * beam * n] = 0", uses="i64[2 * beam * m] = 0", ready="i64[2 * beam * n]",
    came=(row("node", "state"), "n * beam"),                # by step and place in the beam
    # the best candidates in order, and behind them the new one
    pick=(row("peak", "live", "node", "state", "set"), "beam + 1"))
beam_at = BEAM.at


@exact
def _gain(g, b, q, i):
    """(peak, live bytes) after computing node i in state q."""
    s, need, freed, taken = b.state[q], b.own[i], np.int64(0), False
    for j in range(MAX_SRC):
        x = b.reads[i].storage[j]
        if x < 0:
            break
        if b.uses[q * b.m + x] == 1 and not g.tensor[x].flags & OUTPUT:
            if not taken and need > 0 and g.tensor[i].flags & CAN_INPLACE and b.own[x] == need:
                taken = True
            else:
                freed += b.own[x]
    if taken:
        return max(s.peak, s.live), s.live - freed
    return max(s.peak, s.live + need), s.live + need - freed


@exact
def _gain_backward(g, b, q, i):
    """(peak, live bytes) before node i, when everything behind it is done; uses: readers behind, or output."""
    s, need, new, taken = b.state[q], b.own[i], np.int64(0), False
    for j in range(MAX_SRC):
        x = b.reads[i].storage[j]
        if x < 0:
            break
        if b.uses[q * b.m + x] == 0:
            new += b.own[x]
            taken = taken or (need > 0 and g.tensor[i].flags & CAN_INPLACE and b.own[x] == need)
    held = need if b.uses[q * b.m + i] > 0 else np.int64(0)     # a result never read is alive for its own step only
    during = s.live - held + new + (np.int64(0) if taken else need)
    return max(s.peak, during), s.live - held + new


@exact
def _successors(b):
    """Fill ptr and following; left of state 0: nodes that have to come before."""
    for e in range(b.n_edges):
        b.ptr[b.edge[e].before + 1] += 1
        b.left[b.edge[e].after] += 1
    for i in range(b.n):
        b.ptr[i + 1] += b.ptr[i]
    fill = np.empty(b.n, np.int64)
    for i in range(b.n):
        fill[i] = b.ptr[i]
    for e in range(b.n_edges):
        i = b.edge[e].before
        b.following[fill[i]] = b.edge[e].after
        fill[i] += 1


@exact
def _storage_uses(g, b):
    """Fill own and reads; uses of state 0: readers of each storage."""
    for i in range(b.m):
        x = g.tensor[i]
        b.own[i] = 0 if x.flags & EXTERNAL or x.view != NONE else x.size
    for i in range(b.n):
        reads, k = b.reads[i].storage, 0
        for j in range(MAX_SRC):
            reads[j] = -1
        for j in range(MAX_SRC):
            p = g.tensor[i].src[j]
            if p < 0 or p == i:
                continue
            s, new = base_of(g, p), True
            for q in range(k):
                new = new and reads[q] != s
            if new:
                reads[k] = s
                b.uses[s] += 1
                k += 1


@exact
def _random_words(b):
    """Random words, by xorshift."""
    x = np.int64(88172645463325252)
    for i in range(b.n):
        x ^= x << 13
        x ^= (x >> 7) & ((np.int64(1) << 57) - 1)
        x ^= x << 17
        b.word[i] = x


@exact
def _better(b, x, q):
    """Whether candidate x comes before candidate q: by peak, live bytes, node."""
    x, q = b.pick[x], b.pick[q]
    if x.peak != q.peak:
        return x.peak < q.peak
    return x.live < q.live if x.live != q.live else x.node < q.node


@exact
def _copy_candidate(b, to, of):
    x, y = b.pick[to], b.pick[of]
    x.peak, x.live, x.node, x.state, x.set = y.peak, y.live, y.node, y.state, y.set


@exact
def _offer(b, k):
    """Insert the new candidate into the sorted k best, of which no two have run the same set of nodes; returns their
    number."""
    for q in range(k):
        if b.pick[q].set == b.pick[b.beam].set:
            if not _better(b, b.beam, q):
                return k
            for z in range(q, k - 1):
                _copy_candidate(b, z, z + 1)
            k -= 1
            break
    if k == b.beam and not _better(b, b.beam, k - 1):
        return k
    q = min(k, b.beam - 1)
    while q > 0 and _better(b, b.beam, q - 1):
        _copy_candidate(b, q, q - 1)
        q -= 1
    _copy_candidate(b, q, b.beam)
    return min(k + 1, b.beam)


@exact
def _advance(b, q, new, i):
    """State `new` becomes state q after node i has run."""
    for r in range(b.n):
        b.left[new * b.n + r] = b.left[q * b.n + r]
    for r in range(b.m):
        b.uses[new * b.m + r] = b.uses[q * b.m + r]
    z = np.int64(0)
    for r in range(b.state[q].n_ready):
        if b.ready[q * b.n + r] != i:
            b.ready[new * b.n + z] = b.ready[q * b.n + r]
            z += 1
    for e in range(b.ptr[i], b.ptr[i + 1]):
        x = b.following[e]
        b.left[new * b.n + x] -= 1
        if b.left[new * b.n + x] == 0:
            b.ready[new * b.n + z] = x
            z += 1
    one = 1 if b.backward else -1               # uses counts readers that have run (backward) or that will run
    for j in range(MAX_SRC):
        x = b.reads[i].storage[j]
        if x < 0:
            break
        b.uses[new * b.m + x] += one
    b.state[new].n_ready = z


@exact
def _start(g, b):
    """State 0: nothing has run.  Backward, uses becomes the number of readers that are done."""
    _random_words(b)
    _successors(b)
    _storage_uses(g, b)
    live, n_ready = np.int64(0), np.int64(0)
    for i in range(b.m):
        if b.backward:
            b.uses[i] = 1 if g.tensor[i].flags & OUTPUT else 0
            live += b.own[i] * b.uses[i]
        elif i >= b.n:
            live += b.own[i]
    for i in range(b.n):
        if b.left[i] == 0:
            b.ready[n_ready] = i
            n_ready += 1
    s = b.state[0]
    s.peak, s.live, s.set, s.n_ready = live, live, 0, n_ready


@exact
def _step(g, b, step, now, count):
    """The best states after one more node, of `count` states from number `now` on; how many there are."""
    k = np.int64(0)
    for q in range(now, now + count):
        for r in range(b.state[q].n_ready):
            i, x = b.ready[q * b.n + r], b.pick[b.beam]
            x.peak, x.live = _gain_backward(g, b, q, i) if b.backward else _gain(g, b, q, i)
            x.node, x.state, x.set = i, q, b.state[q].set ^ b.word[i]
            k = _offer(b, k)
    new = b.beam - now
    for q in range(k):
        x, came, s = b.pick[q], b.came[step * b.beam + q], b.state[new + q]
        came.node, came.state = x.node, x.state - now
        s.peak, s.live, s.set = x.peak, x.live, x.set
        _advance(b, x.state, new + q, x.node)
    return k


@native("i64(i64, i64)")
def schedule(graph, address):
    """Beam search over legal orders of a GRAPH record by a BEAM record; beam 1 is list scheduling.  Returns the
    estimated peak of the order found."""
    g, b = graph_at(graph), beam_at(address)
    _start(g, b)
    count, now, q = np.int64(1), np.int64(0), np.int64(0)
    for step in range(b.n):
        count = _step(g, b, step, now, count)
        now = b.beam - now
    for step in range(b.n - 1, -1, -1):
        came = b.came[step * b.beam + q]
        b.order[b.n - 1 - step if b.backward else step] = came.node
        q = came.state
    return b.state[now].peak


def _foreign(p):
    """Numbers of the storages outside the graph that nodes touch: n x 11."""
    n = p.n_nodes
    ids = p.tensors["id"][:n]
    touched = np.concatenate([p.table[ids, T_SRC:T_SRC + MAX_SRC], ids[:, None]], axis=1)
    root = touched.copy()
    for _ in range(64):                         # view chains are short; ggml flattens them
        up = np.where(root >= 0, p.table[np.maximum(root, 0), T_VIEW_SRC], -1)
        if not (up >= 0).any():
            break
        root = np.where(up >= 0, up, root)
    out = np.full(root.shape, -1, np.int64)
    outside = (root >= 0) & ~np.isin(root, p.tensors["id"])
    out[outside] = np.unique(root[outside], return_inverse=True)[1].reshape(-1)
    return np.ascontiguousarray(out)


def legal_edges(p):
    """(k, 2) pairs (before, after) of node positions that any order of Problem p must keep."""
    n, foreign = p.n_nodes, _foreign(p)
    cap = EDGES_PER_NODE * n + 64
    while True:
        edges = np.empty((cap, 2), np.int64)
        count = dependencies(p.graph, VIEW_OP, foreign, edges, cap)
        if count >= 0:
            return np.unique(edges[:count], axis=0)
        cap *= 2


def memory_order(p, beam=8):
    """A Proof (exact_order.py) for Problem p: .order, node positions of the best order found, .peak, its live bytes,
    .bound, bytes that no order goes below.

    Never above the given order.  Beams look first, both ways; what they found is where the exact search begins.
    """
    n, nbytes = p.n_nodes, Bytes(p)
    p.tensors["flags"][np.flatnonzero(nbytes.stays)] |= OUTPUT        # a schedule treats them like outputs
    edges = legal_edges(p)
    orders = [np.arange(n)]
    for backward, width in itertools.product((0, 1), sorted({1, beam})):
        pairs = np.ascontiguousarray(edges[:, ::-1] if backward else edges).view(EDGE).reshape(-1)
        found = BEAM.of(n=n, m=p.m, n_edges=len(pairs), edge=pairs, beam=width, backward=backward)
        schedule(p.graph, found)
        orders.append(found.order)
    return least_peak(nbytes, edges, orders)
