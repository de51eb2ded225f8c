"""Schedules of recomputation: which bytes are alive at each event, and an order of nodes with few of them.

A *schedule* is a list of node numbers: every node for the first time in the graph's order, and some once more before a
later reader.  An instance of a result lives from the event that makes it to the last event that reads it before it is
made anew:

    events      a  b  c  d  a' e         e reads a: made again as a', the first a need not outlive b
    a           |--|                     bytes alive at an event: its inputs, its output, and what is read later; an
    a'                      |--|         output that lies in place of an input counts once
"""
import numpy as np

from ggjit.ops.native.jit import exact, i64s, native
from ggjit.ops.native.records import JitRecord

# flags: may be made again; an output; may lie in place of an input; read by a node that may be made again
AGAIN, KEEP, TAKE, SOURCE = 1, 2, 4, 8


# A graph as numbers, and a schedule of it: what the passes of this folder work on
RECOMPUTE = JitRecord(
    "RecomputeRecord",
    n="i64", size="i64[n]", cost="i64[n]", flags="i64[n]",
    ptr="i64[n + 1]", idx="i64[ptr[n]]",                # the nodes that node v reads
    cptr="i64[n + 1]", cidx="i64[cptr[n]]",             # the nodes that read it, in order
    limit="i64",                                        # bytes
    max_events="i64", n_events="i64", event="i64[max_events]",
    end="i64[max_events]",                              # the first event at which what event j makes is gone
    live="i64[max_events + 1]",                         # bytes alive at event j
    maker="i64[n]")                                     # the last event so far that makes node v, -1
recompute_at = RECOMPUTE.at


# ---------------------------------------------------------------- bytes alive
@exact
def instances(s, m):
    """Fill `end` for the first m events."""
    end, at = s.end, s.maker
    for v in range(s.n):
        at[v] = -1
    for j in range(m):
        v = s.event[j]
        end[j] = j + 1
        for k in range(s.ptr[v], s.ptr[v + 1]):
            if at[s.idx[k]] >= 0:
                end[at[s.idx[k]]] = j + 1
        at[v] = j
    for v in range(s.n):
        if s.flags[v] & KEEP and at[v] >= 0:
            end[at[v]] = m
        at[v] = -1
    for j in range(m):
        v = s.event[j]
        taken = s.flags[v] & TAKE == 0
        for k in range(s.ptr[v], s.ptr[v + 1]):
            x = s.idx[k]
            i = at[x]
            if not taken and i >= 0 and end[i] == j + 1 and s.size[x] == s.size[v] and not s.flags[x] & KEEP:
                end[i], taken = j, True
        at[v] = j


@exact
def live_at(s, m):
    """Fill `live` for the first m events."""
    for j in range(m + 1):
        s.live[j] = 0
    for j in range(m):
        z = s.size[s.event[j]]
        s.live[j] += z
        s.live[s.end[j]] -= z
    for j in range(m):
        s.live[j + 1] += s.live[j]


@native("i64(i64)")
def live_bytes(address):
    """Most bytes alive at an event of the schedule of a RECOMPUTE record; fills `live`."""
    s = recompute_at(address)
    instances(s, s.n_events)
    live_at(s, s.n_events)
    most = np.int64(0)
    for j in range(s.n_events):
        most = max(most, s.live[j])
    return most


# ---------------------------------------------------------------- order
@native("i64(i64, i64, i64, i64, i64, i64, i64, i64)")
def list_order(n, size_, ptr_, idx_, flags_, rank_, after_, order_):
    """The next node is the ready one of least rank, then of the least bytes made less bytes freed, then the oldest.

    after_: pairs (i, j), node i before node j, behind a count of them; they and the reads hold.  An output makes
    nothing: its bytes are taken sooner or later, and what it reads can go.
    """
    size, ptr, flags, rank = i64s(size_, n), i64s(ptr_, n + 1), i64s(flags_, n), i64s(rank_, n)
    idx, order, n_after = i64s(idx_, ptr[n]), i64s(order_, n), i64s(after_, 1)[0]
    pairs, waits, left = i64s(after_, 1 + 2 * n_after), np.zeros(n, np.int64), np.zeros(n, np.int64)
    for v in range(n):
        for k in range(ptr[v], ptr[v + 1]):
            left[idx[k]] += 1
    n_edges = ptr[n] + n_after
    head, link, who = np.full(n, -1, np.int64), np.empty(n_edges, np.int64), np.empty(n_edges, np.int64)
    e = 0
    for v in range(n):
        for k in range(ptr[v], ptr[v + 1]):
            who[e], link[e], head[idx[k]] = v, head[idx[k]], e
            waits[v] += 1
            e += 1
    for k in range(n_after):
        i, j = pairs[1 + 2 * k], pairs[2 + 2 * k]
        who[e], link[e], head[i] = j, head[i], e
        waits[j] += 1
        e += 1
    ready, n_ready = np.empty(n, np.int64), 0
    for v in range(n):
        if waits[v] == 0:
            ready[n_ready] = v
            n_ready += 1
    for step in range(n):
        if n_ready == 0:
            return 1
        best, at, least = np.int64(-1), 0, np.int64(0)
        for r in range(n_ready):
            v = ready[r]
            change = np.int64(0) if flags[v] & KEEP else size[v]
            for k in range(ptr[v], ptr[v + 1]):
                if left[idx[k]] == 1 and not flags[idx[k]] & KEEP:
                    change -= size[idx[k]]
            if best < 0 or (rank[v], change, v) < (rank[best], least, best):
                best, at, least = v, r, change
        ready[at] = ready[n_ready - 1]
        n_ready -= 1
        order[step] = best
        for k in range(ptr[best], ptr[best + 1]):
            left[idx[k]] -= 1
        e = head[best]
        while e >= 0:
            waits[who[e]] -= 1
            if waits[who[e]] == 0:
                ready[n_ready] = who[e]
                n_ready += 1
            e = link[e]
    return 0


@native("i64(i64, i64, i64, i64, i64)")
def reaches(n, ptr_, idx_, from_, found_):
    """found[v]: whether v depends on a node of `from`, in graph order."""
    ptr, start, found = i64s(ptr_, n + 1), i64s(from_, n), i64s(found_, n)
    idx = i64s(idx_, ptr[n])
    for v in range(n):
        for k in range(ptr[v], ptr[v + 1]):
            if start[idx[k]] or found[idx[k]]:
                found[v] = 1
                break
    return 0


@native("i64(i64, i64, i64, i64, i64)")
def leads(n, ptr_, idx_, to_, found_):
    """found[v]: whether a node of `to` depends on v, in graph order."""
    ptr, end, found = i64s(ptr_, n + 1), i64s(to_, n), i64s(found_, n)
    idx = i64s(idx_, ptr[n])
    for v in range(n - 1, -1, -1):
        if end[v] or found[v]:
            for k in range(ptr[v], ptr[v + 1]):
                found[idx[k]] = 1
    return 0
