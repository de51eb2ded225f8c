"""Moving splits to cheaper places (`Scheduler(..., motion=True)`).

ggml's rules spread a backend as far as it goes; where the switch then happens may be the widest point of the graph:

    A: mul_mat(w1, x) [8 x 1000] -> silu -> norm -> | B: mul_mat(w2, .) ...        copies 8000 elements
    A: mul_mat(w1, x) | ...                                                        sometimes a narrower one is near

For every pair of neighbouring splits the switch is tried at each node up to REACH nodes away in both directions, as
long as the other backend supports the nodes in between and nothing pins them there; the place with the fewest bytes
copied in the whole graph wins.  Two numbers count, and a move may raise neither: the bytes of the first run (a tensor
once per backend that reads a copy of it, as ggml lists them), and those of every later one, when copies of inputs that
did not change are kept.  `never_worse` looks at the finished cut again.  (Row E2 of tests/LEDGER.md.)
"""
import numpy as np

from ggjit.ops.core.record import MAX_SRC, OP, VIEW_OPS
from ggjit.ops.native.jit import exact, i64s, native, u8s
from ggjit.sched.columns import (
    BACKEND,
    BITS,
    C_COST,
    CAUSE,
    CAUSE_ARG,
    COLUMNS,
    IS_COMPUTE,
    IS_LEAF,
    IS_PINNED,
    IS_VIEW_OP,
    IS_WEIGHT,
    IS_WRITTEN,
    MEM,
    NBYTES,
    OWN,
    SIG,
    SRC,
    VIEW,
)
from ggjit.sched.rules import RULES
from ggjit.sched.split import K_KIND, K_SPLIT, K_SRC, KEPT, U_COPY, U_REFRESH, U_SPLIT, needs_copy

REACH = 16                      # nodes a switch may move
ROUNDS = 4


@exact
def copied_nbytes(w, m, n_nodes, bufts, reads, n_bufts, nb, rule, snapshot, keep_weights, seen, stamp):
    """Bytes of all copies, every tensor once per backend that cannot read the original; and of those not kept."""
    total, every_run = 0, 0
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
                r = w[VIEW * m + s] if w[VIEW * m + s] >= 0 else s
                bits = w[BITS * m + r]
                big = bits & IS_WEIGHT and w[OWN * m + r] >= 0 and not keep_weights
                if not bits & IS_LEAF or bits & IS_WRITTEN or big:
                    every_run += w[NBYTES * m + s]
    return total, every_run


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


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64)")
def improve(ws, m, n_nodes, rule, bufts, reads, n_bufts, nb, support, snapshot, keep_weights, seen, info):
    """Move switches while the bytes fall.  seen: m * nb words of -1.  info returns bytes before and after."""
    w = i64s(ws, COLUMNS * m)
    bt, rd, snap = i64s(bufts, nb), i64s(reads, nb * n_bufts), i64s(snapshot, nb)
    sup, sn, out = u8s(support, 1 << 40), i64s(seen, m * nb), i64s(info, 2)
    stamp = 0
    best, best_run = copied_nbytes(w, m, n_nodes, bt, rd, n_bufts, nb, rule, snap, keep_weights, sn, stamp)
    out[0] = best
    for _ in range(ROUNDS):
        start = best + best_run
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
                    cost, run = copied_nbytes(w, m, n_nodes, bt, rd, n_bufts, nb, rule, snap, keep_weights, sn, stamp)
                    if cost <= best and run <= best_run and cost + run < best + best_run:
                        best, best_run, good = cost, run, moved
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
        if best + best_run == start:
            break
    out[1] = best
    return 0


def move_splits(cut):
    """Improve the assignments of a Cut in place; returns (bytes before, bytes after)."""
    w, info = cut.world, np.zeros(2, np.int64)
    nb = len(w.backends)
    improve(cut.ws, cut.m, cut.n_nodes, RULES[w.rules], w.buft_of, w.reads, len(w.bufts), nb, w.support, w.snapshot,
            int(w.keep_weights), np.full(cut.m * nb, -1, np.int64), info)
    return tuple(info.tolist())


def never_worse(moved, plain):
    """Does the moved cut copy no more than the plain one, in its first run and in every later one?

    Counted as a run counts: also copies that are made again because the original was written meanwhile.  Experts are
    copied one by one where a split starts with their op; that must not be lost.
    """
    first, later = (np.subtract(a, b) for a, b in zip(_run_nbytes(moved), _run_nbytes(plain), strict=True))
    return first <= 0 and later <= 0 and _partly_copied(plain) <= _partly_copied(moved)


def _run_nbytes(cut):
    """(bytes of the first run, of every later run in which no input changed)"""
    nbytes = cut.col(NBYTES)[cut.copies[:, K_SRC]]
    copy = cut.uses[:, U_COPY]
    made = (cut.copies[copy, K_SPLIT] == cut.uses[:, U_SPLIT]) | (cut.uses[:, U_REFRESH] != 0)
    kept = cut.copies[:, K_KIND] == KEPT
    every_run = int(nbytes[copy[made & ~kept[copy]]].sum())
    return int(nbytes[kept].sum()) + every_run, every_run


def _partly_copied(cut):
    """Weights whose experts are copied one by one."""
    return {t.src[0].id for s in cut.splits for t in [next((t for t in s.nodes if t.op not in VIEW_OPS), None)]
            if t is not None and t.op == OP.MUL_MAT_ID and any(x is t.src[0] for x in s.inputs)}
