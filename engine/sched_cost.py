"""Moving splits to cheaper places (`Scheduler(..., motion=True)`).

ggml's rules spread a backend as far as it goes; where the switch then happens may be the widest point of the graph:

    A: mul_mat(w1, x) [8 x 1000] -> silu -> norm -> | B: mul_mat(w2, .) ...        copies 8000 elements
    A: mul_mat(w1, x) | ...                                                        sometimes a narrower one is near

For every pair of neighbouring splits the switch is tried at each node up to REACH nodes away in both directions, as
long as the other backend supports the nodes in between and nothing pins them there; the place with the fewest bytes
copied in the whole graph wins.  A move is only made when the total falls, so the result never copies more than ggml's.
The total counts a tensor once per backend that reads a copy of it, as ggml lists them.  (The wish: seed 003, row E2.)
"""
import numpy as np

from ggjit.ops.jit import exact, i64s, native, u8s
from ggjit.ops.record import MAX_SRC
from ggjit.sched_rules import RULES
from ggjit.sched_split import needs_copy
from ggjit.sched_work import (
    BACKEND,
    BITS,
    C_COST,
    CAUSE,
    CAUSE_ARG,
    COLUMNS,
    IS_COMPUTE,
    IS_PINNED,
    IS_VIEW_OP,
    IS_WRITTEN,
    MEM,
    NBYTES,
    SIG,
    SRC,
    VIEW,
)

REACH = 16                      # nodes a switch may move
ROUNDS = 4


@exact
def copied_nbytes(w, m, n_nodes, bufts, reads, n_bufts, nb, rule, snapshot, seen, stamp):
    """Bytes of all copies: every tensor once per backend that cannot read the original."""
    total = 0
    for i in range(n_nodes):
        if w[BITS * m + i] & IS_VIEW_OP:
            continue
        b = w[BACKEND * m + i]
        for j in range(MAX_SRC):
            s = w[SRC * m + i * MAX_SRC + j]
            if s >= 0 and s != i and seen[s * nb + b] != stamp and \
                    needs_copy(w, m, bufts, reads, n_bufts, rule, snapshot, s, b):
                seen[s * nb + b] = stamp
                total += w[NBYTES * m + s]
    return total


@exact
def _movable(w, m, i, b, nb, sup):
    """May node i run on backend b instead?"""
    bits = w[BITS * m + i]
    return bits & IS_COMPUTE and not bits & (IS_PINNED | IS_WRITTEN) and w[VIEW * m + i] < 0 and \
        w[MEM * m + i] < 0 and sup[w[SIG * m + i] * nb + b]


@exact
def _move(w, m, n_nodes, i, b):
    """Node i and the views of it go to backend b."""
    w[BACKEND * m + i] = b
    for v in range(i + 1, n_nodes):
        if w[VIEW * m + v] == i:
            w[BACKEND * m + v] = b


@exact
def _next(w, m, n_nodes, i, step):
    """The next node from i in that direction that computes, -1."""
    i += step
    while 0 <= i < n_nodes and w[BITS * m + i] & IS_VIEW_OP:
        i += step
    return i if 0 <= i < n_nodes else -1


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64)")
def improve(ws, m, n_nodes, rule, bufts, reads, n_bufts, nb, support, snapshot, seen, info):
    """Move switches while the bytes fall.  seen: m * nb words of -1.  info returns bytes before and after."""
    w = i64s(ws, COLUMNS * m)
    bt, rd, snap = i64s(bufts, nb), i64s(reads, nb * n_bufts), i64s(snapshot, nb)
    sup, sn, out = u8s(support, 1 << 40), i64s(seen, m * nb), i64s(info, 2)
    stamp = 0
    best = copied_nbytes(w, m, n_nodes, bt, rd, n_bufts, nb, rule, snap, sn, stamp)
    out[0] = best
    for _ in range(ROUNDS):
        start = best
        i = -1
        while True:
            i = _next(w, m, n_nodes, i, 1)
            k = _next(w, m, n_nodes, i, 1) if i >= 0 else -1
            if k < 0:
                break
            a, b = w[BACKEND * m + i], w[BACKEND * m + k]
            if a == b:
                continue
            for step in (-1, 1):                        # the switch moves up: nodes go from a to b; or down
                node, to = (i, b) if step < 0 else (k, a)
                back = a if step < 0 else b
                keep, moved, good = node, 0, 0
                while node >= 0 and moved < REACH and w[BACKEND * m + node] == back and \
                        _movable(w, m, node, to, nb, sup):
                    _move(w, m, n_nodes, node, to)
                    moved += 1
                    stamp += 1
                    cost = copied_nbytes(w, m, n_nodes, bt, rd, n_bufts, nb, rule, snap, sn, stamp)
                    if cost < best:
                        best, good = cost, moved
                    node = _next(w, m, n_nodes, node, step)
                node = keep
                for n in range(moved):                  # take back what did not pay
                    if n >= good:
                        _move(w, m, n_nodes, node, back)
                    else:
                        w[CAUSE * m + node] = C_COST
                        w[CAUSE_ARG * m + node] = 0
                    node = _next(w, m, n_nodes, node, step)
                if good:
                    break
        if best == start:
            break
    out[1] = best
    return 0


def move_splits(cut):
    """Improve the assignments of a Cut in place; returns (bytes before, bytes after)."""
    w, info = cut.world, np.zeros(2, np.int64)
    nb = len(w.backends)
    improve(cut.ws, cut.m, cut.n_nodes, RULES[w.rules], w.buft_of, w.reads, len(w.bufts), nb, w.support, w.snapshot,
            np.full(cut.m * nb, -1, np.int64), info)
    return tuple(info.tolist())
