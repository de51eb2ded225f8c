"""Execution order for less memory (opt-in, `order="memory"`): the same nodes, the same numbers, other moments.

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

from ggjit.alloc.ggml.columns import CAN_INPLACE, EXTERNAL, FLAGS, FOREIGN, ID, NONE, OUTPUT, SIZE, SRC, VIEW, base_of
from ggjit.alloc.orders.exact_order import Bytes, least_peak
from ggjit.ops.core.record import MAX_SRC, T_OP, T_SRC, T_VIEW_SRC, T_WORDS, VIEW_OPS
from ggjit.ops.native.jit import exact, i64s, native, u8s

VIEW_OP = np.zeros(256, np.uint8)
VIEW_OP[[int(op) for op in VIEW_OPS]] = 1
EDGES_PER_NODE = 4 * MAX_SRC


@exact
def _edge(edges, cnt, p, q):
    """Node q after node p."""
    if p >= 0 and p != q:
        edges[cnt[0], 0] = p
        edges[cnt[0], 1] = q
        cnt[0] += 1


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64, i64, i64)")
def dependencies(table, n_rows, ws, m, n, view_op, foreign, edges_, cap, count):
    """Edges of the order: data flow, and hazards per storage.  foreign[i]: number of the storage outside the graph
    that node i writes or reads through source j, n x 11 (column 10: what the node itself views), -1 none.

    Returns 0, or 1 when `cap` edges do not suffice.  Readers since the last write are kept as linked lists.
    """
    t, w = i64s(table, n_rows * T_WORDS), i64s(ws, (SRC + MAX_SRC) * m)
    is_view, edges, cnt = u8s(view_op, 256), i64s(edges_, 2 * cap).reshape(cap, 2), i64s(count, 1)
    out = i64s(foreign, 11 * n)
    n_store = np.int64(m)
    for k in range(11 * n):
        n_store = max(n_store, m + out[k] + 1)
    last_write, head = np.full(n_store, -1, np.int64), np.full(n_store, -1, np.int64)
    link, who = np.empty(11 * n + 1, np.int64), np.empty(11 * n + 1, np.int64)
    n_link = 0
    cnt[0] = 0
    for i in range(n):
        if cnt[0] + 3 * MAX_SRC + n_link + 2 > cap:
            return 1
        for j in range(MAX_SRC):
            p = w[SRC * m + i * MAX_SRC + j]
            if p >= 0 and p < n:
                _edge(edges, cnt, p, i)
        if is_view[t[w[ID * m + i] * T_WORDS + T_OP] & 255]:
            continue
        target = np.int64(-1)
        if w[VIEW * m + i] != NONE:
            target = base_of(w, m, i) if w[VIEW * m + i] != FOREIGN else m + out[11 * i + 10]
        for j in range(MAX_SRC):
            p = w[SRC * m + i * MAX_SRC + j]
            s = np.int64(-1)
            if p >= 0:
                s = base_of(w, m, p) if w[VIEW * m + p] != FOREIGN else m + out[11 * i + j]
            elif p == FOREIGN:
                s = m + out[11 * i + j]
            if s < 0:
                continue
            _edge(edges, cnt, last_write[s], i)
            who[n_link] = i
            link[n_link] = head[s]
            head[s] = n_link
            n_link += 1
        if target >= 0:
            _edge(edges, cnt, last_write[target], i)
            k = head[target]
            while k >= 0:
                _edge(edges, cnt, who[k], i)
                k = link[k]
            head[target] = -1
            last_write[target] = i
    return 0


@exact
def _gain(i, w, m, n, uses, own, reads, cur, peak):
    """(peak, live bytes) after computing node i now."""
    need, freed, taken = own[i], np.int64(0), False
    for j in range(MAX_SRC):
        s = reads[i, j]
        if s < 0:
            break
        if uses[s] == 1 and not w[FLAGS * m + s] & OUTPUT:
            if not taken and need > 0 and w[FLAGS * m + i] & CAN_INPLACE and own[s] == need:
                taken = True
            else:
                freed += own[s]
    if taken:
        return max(peak, cur), cur - freed
    return max(peak, cur + need), cur + need - freed


@exact
def _gain_backward(i, w, m, uses, own, reads, cur, peak):
    """(peak, live bytes) before node i, when everything behind it is done; uses[s]: readers of s behind, or output."""
    need, new, taken = own[i], np.int64(0), False
    for j in range(MAX_SRC):
        s = reads[i, j]
        if s < 0:
            break
        if uses[s] == 0:
            new += own[s]
            taken = taken or (need > 0 and w[FLAGS * m + i] & CAN_INPLACE and own[s] == need)
    held = need if uses[i] > 0 else np.int64(0)         # a result that is never read is alive for its own step only
    during = cur - held + new + (np.int64(0) if taken else need)
    return max(peak, during), cur - held + new


@exact
def _successors(edges, n_edges, n, waits):
    """CSR of what waits for node i: nxt[ptr[i]:ptr[i + 1]]; waits[i]: nodes that have to come before i."""
    ptr = np.zeros(n + 1, np.int64)
    for e in range(n_edges):
        ptr[edges[e, 0] + 1] += 1
        waits[edges[e, 1]] += 1
    for i in range(n):
        ptr[i + 1] += ptr[i]
    nxt, fill = np.empty(max(n_edges, 1), np.int64), ptr.copy()
    for e in range(n_edges):
        nxt[fill[edges[e, 0]]] = edges[e, 1]
        fill[edges[e, 0]] += 1
    return ptr, nxt


@exact
def _storage_uses(w, m, n, own, uses):
    """reads[i]: the storages node i reads, each once, -1 behind; own: bytes per storage; uses: its readers."""
    for i in range(m):
        own[i] = 0 if w[FLAGS * m + i] & EXTERNAL or w[VIEW * m + i] != NONE else w[SIZE * m + i]
    reads = np.full((n, MAX_SRC), -1, np.int64)
    for i in range(n):
        k = 0
        for j in range(MAX_SRC):
            p = w[SRC * m + i * MAX_SRC + j]
            if p < 0 or p == i:
                continue
            s, new = base_of(w, m, p), True
            for q in range(k):
                new = new and reads[i, q] != s
            if new:
                reads[i, k] = s
                uses[s] += 1
                k += 1
    return reads


@exact
def _random_words(n):
    """n words by xorshift; the XOR of the words of a set of nodes names the set."""
    zob, x = np.empty(n, np.int64), np.int64(88172645463325252)
    for i in range(n):
        x ^= x << 13
        x ^= (x >> 7) & ((np.int64(1) << 57) - 1)
        x ^= x << 17
        zob[i] = x
    return zob


@exact
def _better(pick, q, p, c, i):
    """Whether (peak, live bytes, node) comes before candidate q."""
    if p != pick[q, 0]:
        return p < pick[q, 0]
    return c < pick[q, 1] if c != pick[q, 1] else i < pick[q, 2]


@exact
def _offer(pick, k, beam, p, c, i, s, h):
    """Keep the best `beam` candidates sorted, one per executed set h; returns how many there are."""
    for q in range(k):
        if pick[q, 4] == h:
            if not _better(pick, q, p, c, i):
                return k
            for z in range(q, k - 1):
                for x in range(5):
                    pick[z, x] = pick[z + 1, x]
            k -= 1
            break
    if k == beam and not _better(pick, k - 1, p, c, i):
        return k
    q = min(k, beam - 1)
    while q > 0 and _better(pick, q - 1, p, c, i):
        for x in range(5):
            pick[q, x] = pick[q - 1, x]
        q -= 1
    pick[q, 0], pick[q, 1], pick[q, 2], pick[q, 3], pick[q, 4] = p, c, i, s, h
    return min(k + 1, beam)


@exact
def _advance(i, n, m, left, uses, ready, n_ready, new_left, new_uses, new_ready, ptr, nxt, reads, one):
    """State after executing node i, written to the new_ rows; returns its number of ready nodes.

    one: what a read adds to the count of uses, -1 forward (readers to come), 1 backward (readers seen)."""
    for r in range(n):
        new_left[r] = left[r]
    for r in range(m):
        new_uses[r] = uses[r]
    z = 0
    for r in range(n_ready):
        if ready[r] != i:
            new_ready[z] = ready[r]
            z += 1
    for e in range(ptr[i], ptr[i + 1]):
        new_left[nxt[e]] -= 1
        if new_left[nxt[e]] == 0:
            new_ready[z] = nxt[e]
            z += 1
    for j in range(MAX_SRC):
        if reads[i, j] < 0:
            break
        new_uses[reads[i, j]] += one
    return z


@exact
def _start_uses(w, m, n, backward, own, uses):
    """Live bytes before the first step taken; uses becomes the number of readers that are done."""
    live = np.int64(0)
    for i in range(m):
        if backward:
            uses[i] = 1 if w[FLAGS * m + i] & OUTPUT else 0
            live += own[i] * uses[i]
        elif i >= n:
            live += own[i]
    return live


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64, i64)")
def schedule(ws, m, n, edges_, n_edges, beam, backward, order, stats):
    """Beam search over legal orders; beam 1 is list scheduling.  order: n nodes; stats[0]: its estimated peak.

    backward: search from the last node to the first; edges are then (after, before)."""
    w, edges = i64s(ws, (SRC + MAX_SRC) * m), i64s(edges_, 2 * n_edges).reshape(n_edges, 2)
    out, st = i64s(order, n), i64s(stats, 1)
    # beam states: rows of these arrays, double buffered
    left, uses = np.zeros((2, beam, n), np.int64), np.zeros((2, beam, m), np.int64)
    ready, n_ready = np.empty((2, beam, n), np.int64), np.zeros((2, beam), np.int64)
    peak, cur, key = np.zeros((2, beam), np.int64), np.zeros((2, beam), np.int64), np.zeros((2, beam), np.int64)
    came = np.empty((n, beam, 2), np.int64)     # (node, state it came from)
    pick = np.empty((beam, 5), np.int64)        # candidates: peak, live bytes, node, state, executed set
    own, zob = np.zeros(m, np.int64), _random_words(n)
    ptr, nxt = _successors(edges, n_edges, n, left[0, 0])
    reads = _storage_uses(w, m, n, own, uses[0, 0])
    for i in range(n):
        if left[0, 0, i] == 0:
            ready[0, 0, n_ready[0, 0]] = i
            n_ready[0, 0] += 1
    cur[0, 0] = _start_uses(w, m, n, backward, own, uses[0, 0])
    peak[0, 0] = cur[0, 0]
    count, a, one = 1, 0, 1 if backward else -1
    for step in range(n):
        k = 0
        for s in range(count):
            for r in range(n_ready[a, s]):
                i = ready[a, s, r]
                if backward:
                    p, c = _gain_backward(i, w, m, uses[a, s], own, reads, cur[a, s], peak[a, s])
                else:
                    p, c = _gain(i, w, m, n, uses[a, s], own, reads, cur[a, s], peak[a, s])
                k = _offer(pick, k, beam, p, c, i, s, key[a, s] ^ zob[i])
        b = 1 - a
        for q in range(k):
            i, s = pick[q, 2], pick[q, 3]
            came[step, q, 0], came[step, q, 1] = i, s
            peak[b, q], cur[b, q], key[b, q] = pick[q, 0], pick[q, 1], pick[q, 4]
            n_ready[b, q] = _advance(i, n, m, left[a, s], uses[a, s], ready[a, s], n_ready[a, s], left[b, q],
                                     uses[b, q], ready[b, q], ptr, nxt, reads, one)
        count, a = k, b
    st[0] = peak[a, 0]
    q = np.int64(0)
    for step in range(n - 1, -1, -1):
        out[n - 1 - step if backward else step] = came[step, q, 0]
        q = came[step, q, 1]
    return 0


def _foreign(p):
    """Numbers of the storages outside the graph that nodes touch: n x 11."""
    n = p.n_nodes
    ids = p.col(ID)[:n]
    touched = np.concatenate([p.table[ids, T_SRC:T_SRC + MAX_SRC], ids[:, None]], axis=1)
    root = touched.copy()
    for _ in range(64):                         # view chains are short; ggml flattens them
        up = np.where(root >= 0, p.table[np.maximum(root, 0), T_VIEW_SRC], -1)
        if not (up >= 0).any():
            break
        root = np.where(up >= 0, up, root)
    out = np.full(root.shape, -1, np.int64)
    outside = (root >= 0) & ~np.isin(root, p.col(ID))
    out[outside] = np.unique(root[outside], return_inverse=True)[1].reshape(-1)
    return np.ascontiguousarray(out)


def legal_edges(p):
    """(k, 2) pairs (before, after) of node positions that any order of Problem p must keep."""
    n, foreign = p.n_nodes, _foreign(p)
    cap, count = EDGES_PER_NODE * n + 64, np.zeros(1, np.int64)
    while True:
        edges = np.empty((cap, 2), np.int64)
        if dependencies(p.table, p.n_rows, p.ws, p.m, n, VIEW_OP, foreign, edges, cap, count) == 0:
            return np.unique(edges[:count[0]], axis=0)
        cap *= 2


def memory_order(p, beam=8):
    """A Proof (exact_order.py) for Problem p: .order, node positions of the best order found, .peak, its live bytes,
    .bound, bytes that no order goes below.

    Never above the given order.  Beams look first, both ways; what they found is where the exact search begins.
    """
    n, nbytes = p.n_nodes, Bytes(p)
    p.col(FLAGS)[np.flatnonzero(nbytes.stays)] |= OUTPUT        # to a schedule they are what outputs are
    edges = legal_edges(p)
    orders, stats = [np.arange(n)], np.zeros(1, np.int64)
    for backward, width in itertools.product((0, 1), sorted({1, beam})):
        order, pairs = np.empty(n, np.int64), np.ascontiguousarray(edges[:, ::-1] if backward else edges)
        schedule(p.ws, p.m, n, pairs, len(pairs), width, backward, order, stats)
        orders.append(order)
    return least_peak(nbytes, edges, orders)
