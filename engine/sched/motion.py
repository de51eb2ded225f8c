"""Moves splits to backends where they cost less (`Scheduler(..., motion=True)`).

ggml's rules spread a backend as far as it goes; where the switch then happens may be the widest point of the graph:

    A: mul_mat(w1, x) [8 x 1000] -> silu -> norm -> | B: mul_mat(w2, .) ...        copies 8000 elements
    A: mul_mat(w1, x) | ...                                                        sometimes a narrower one is near

For every pair of neighbouring splits the switch is tried at each node up to REACH nodes away in both directions, as
long as the other backend supports the nodes in between and nothing pins them there; the place with the fewest bytes
copied in the whole graph wins.  Two numbers count, and a move may raise neither: the bytes of the first run (a tensor
once per backend that reads a copy of it, as ggml lists them), and those of every later one, when copies of inputs that
did not change are kept.  `never_worse` looks at the finished assignment again.  (Row E2 of tests/LEDGER.md.)
"""
import numpy as np

from ggjit.ops.core.record import MAX_SRC, OP, VIEW_OPS
from ggjit.ops.native.jit import i64s, inlined, native
from ggjit.sched import causes
from ggjit.sched import records as rec
from ggjit.sched.records import base_of, opened, set_backend, supports
from ggjit.sched.split import needs_copy

REACH = 16                      # nodes a switch may move
ROUNDS = 4


@inlined
def copied_nbytes(g, seen, stamp):
    """Bytes of all copies, every tensor once per backend that cannot read the original; and of those not kept."""
    total, every_run = 0, 0
    for i in range(g.n_nodes):
        if g.rows[i].bits & rec.IS_VIEW_OP:
            continue
        b = g.rows[i].backend
        for j in range(MAX_SRC):
            s = g.rows[i].src[j]
            if s >= 0 and s != i and seen[s * g.n_backends + b] != stamp and needs_copy(g, s, b):
                seen[s * g.n_backends + b] = stamp
                total += g.rows[s].nbytes
                r = base_of(g, s)
                bits = g.rows[r].bits
                big = bits & rec.IS_WEIGHT and g.rows[r].own >= 0 and not g.keep_weights
                if not bits & rec.IS_LEAF or bits & rec.IS_WRITTEN or big:
                    every_run += g.rows[s].nbytes
    return total, every_run


@inlined
def _movable(g, i, b):
    """May node i run on backend b instead?"""
    bits = g.rows[i].bits
    return bits & rec.IS_COMPUTE and not bits & (rec.IS_PINNED | rec.IS_WRITTEN) and g.rows[i].view < 0 and \
        g.rows[i].mem < 0 and supports(g, i, b)


@inlined
def _move(g, i, b):
    """Node i and the views of it go to backend b."""
    g.rows[i].backend = b
    for v in range(i + 1, g.n_nodes):
        if g.rows[v].view == i:
            g.rows[v].backend = b


@inlined
def _next(g, i, step):
    """The next computing node from i in direction `step`, -1 for none."""
    i += step
    while 0 <= i < g.n_nodes and g.rows[i].bits & rec.IS_VIEW_OP:
        i += step
    return i if 0 <= i < g.n_nodes else -1


@native("i64(i64, i64)")
def improve(params, seen):
    """Move switches while the bytes fall.  seen: n * n_backends words of -1."""
    g, sn = opened(params), i64s(seen, 1 << 40)
    stamp = 0
    best, best_run = copied_nbytes(g, sn, stamp)
    for _ in range(ROUNDS):
        start = best + best_run
        i = -1
        while True:
            i = _next(g, i, 1)
            k = _next(g, i, 1) if i >= 0 else -1
            if k < 0:
                break
            a, b = g.rows[i].backend, g.rows[k].backend
            if a == b:
                continue
            # move the switch towards earlier nodes (-1), or towards later ones (1)
            for step in (-1, 1):
                node, to = (i, b) if step < 0 else (k, a)
                back = a if step < 0 else b
                keep, moved, good = node, 0, 0
                while node >= 0 and moved < REACH and g.rows[node].backend == back and _movable(g, node, to):
                    _move(g, node, to)
                    moved += 1
                    stamp += 1
                    cost, run = copied_nbytes(g, sn, stamp)
                    if cost <= best and run <= best_run and cost + run < best + best_run:
                        best, best_run, good = cost, run, moved
                    node = _next(g, node, step)
                node = keep
                for n in range(moved):                  # undo the moves beyond the best place
                    if n >= good:
                        _move(g, node, back)
                    else:
                        set_backend(g, node, to, causes.COST, 0)
                    node = _next(g, node, step)
                if good:
                    break
        if best + best_run == start:
            break
    return 0


def move_splits(assigned):
    """Improve an Assignment in place."""
    improve(assigned.params.words, np.full(assigned.n * len(assigned.support.backends), -1, np.int64))


def never_worse(moved, plain):
    """Does the moved assignment copy no more than the plain one, in its first run and in every later one?

    Copies that are made again, because the original was written meanwhile, count as in a run.  Experts are
    copied one by one where a split starts with their op; that must not be lost.
    """
    first, later = (np.subtract(a, b) for a, b in zip(_run_nbytes(moved), _run_nbytes(plain), strict=True))
    return first <= 0 and later <= 0 and _partly_copied(plain) <= _partly_copied(moved)


def _run_nbytes(assigned):
    """(bytes of the first run, of every later run in which no input changed)"""
    copies, uses = assigned.copies, assigned.uses
    nbytes = assigned.rows["nbytes"][copies["src"]]
    made = (copies["split"][uses["copy"]] == uses["split"]) | (uses["refresh"] != 0)
    kept = copies["kind"] == rec.KEPT
    every_run = int(nbytes[uses["copy"][made & ~kept[uses["copy"]]]].sum())
    return int(nbytes[kept].sum()) + every_run, every_run


def _partly_copied(assigned):
    """Weights whose experts are copied one by one."""
    return {t.src[0].id for s in assigned.splits for t in [next((t for t in s.nodes if t.op not in VIEW_OPS), None)]
            if t is not None and t.op == OP.MUL_MAT_ID and any(x is t.src[0] for x in s.inputs)}
