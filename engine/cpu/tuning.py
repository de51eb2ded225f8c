"""Tuning: how many rows a decode tile takes, measured once on a machine.  `ggjit warm-up MODEL` does it.

    candidates   tiles of 1, 2, 4 and for floats 8 rows by one column (ops/matmul/tile_rows.py);
                 one whose results differ from
                 those of one row in any byte is out
    measured     one thread, weights from memory, rows of two lengths, the tiles taking turns; medians of ROUNDS
    chosen       the rule's rows unless another number is faster by LEAST_GAIN

Products of several columns follow the rule.
"""
import math
import statistics
import time

import numpy as np

from ggjit.cpu.device import CPU
from ggjit.graphs.allocator import GraphAllocator
from ggjit.graphs.graph import Graph
from ggjit.ops.core.progress import work
from ggjit.ops.core.traits import all_traits, traits_of
from ggjit.ops.matmul import tile_rows
from ggjit.ops.matmul.mul_mat import mul_mat
from ggjit.ops.matmul.tile_rows import ROWS, Choice, candidates
from ggjit.tensors.arrays import from_numpy
from ggjit.tensors.context import Context, alloc_ctx_tensors

LENGTHS = 2048, 5632            # of rows
MATRIX_ROWS = 2048
WEIGHTS_NBYTES = 256 << 20      # half of it once stayed in a last-level cache, where all tiles were as fast
DISTINCT_NBYTES = (4 << 20) - 3
ROUNDS = 9
LEAST_GAIN = 1.02


def tunable(type):
    """Does the choice apply to the type?  To all that have products."""
    return traits_of(type).dot is not None


def _products(ctx, backend, type, lengths, nbytes):
    """A graph of products of one column; weights of about nbytes, as many of every row length.

    Their bytes are random and repeat.  Bits 5 and 6 of every byte are 1 and 0: any float16, bfloat16 or power of two
    in a block is finite and normal.
    """
    rng, outs = np.random.default_rng(0), []
    noise = rng.integers(0, 256, DISTINCT_NBYTES, np.uint8) & 0xBF | 0x20
    for k in lengths:
        x = from_numpy(ctx, rng.standard_normal((1, k)).astype(np.float32))
        n_rows = nbytes // len(lengths) // type.row_nbytes(k)
        for _ in range(max(1, n_rows // MATRIX_ROWS)):
            w = ctx.new_tensor(type, (k, min(n_rows, MATRIX_ROWS) | 1))     # an odd number: the last tile is cut
            alloc_ctx_tensors(ctx, backend)
            w.set_bytes(np.resize(noise, w.nbytes))
            outs.append(mul_mat(w, x))
    graph = Graph(*outs)
    GraphAllocator(backend).alloc_graph(graph)
    return graph


def _plan(backend, graph, n_rows):
    with tile_rows.forced(n_rows):
        return backend.graph_plan_create(graph)


def measure(type, lengths=LENGTHS, nbytes=WEIGHTS_NBYTES, rounds=ROUNDS, now=time.perf_counter):
    """({rows: median seconds of a pass over the weights}, rows of the tiles with other bytes than one row's)."""
    backend, ctx = CPU.init_backend("n_threads=1"), Context()
    try:
        graph = _products(ctx, backend, type, lengths, nbytes)
        plans, answers = {n: _plan(backend, graph, n) for n in candidates(type)}, {}
        for n, plan in plans.items():
            plan.compute()
            answers[n] = [plan.numpy(y).tobytes() for y in graph.outputs]
        seconds = {n: [] for n in plans}
        for _ in range(rounds):
            for n, plan in plans.items():
                t0 = now()
                plan.compute()
                seconds[n].append(now() - t0)
    finally:
        ctx.free()
    return {n: statistics.median(s) for n, s in seconds.items()}, [n for n in plans if answers[n] != answers[ROWS[0]]]


def choose(type, **how):
    """The Choice for `type`; measured."""
    seconds, others = measure(type, **how)
    seconds = {n: s for n, s in seconds.items() if n not in others}
    best, rule = min(seconds, key=seconds.get), tile_rows.rule(type)
    return Choice(best if seconds.get(rule, math.inf) >= LEAST_GAIN * seconds[best] else rule, seconds)


def all_kept():
    """{type: Choice} of all types that were measured on this machine; empty where GGJIT_TUNE decides."""
    choices = {} if tile_rows.SETTING else {t: tile_rows.kept(t) for t in all_traits() if tunable(t)}
    return {t: choice for t, choice in choices.items() if choice}


def tune(types, again=False):
    """Measure and keep the choices of those `types` that have none yet (again: of all): {type: Choice} of the measured.

    Does nothing where GGJIT_TUNE decides.  A second or so for a type, most of it compiling.
    """
    if tile_rows.SETTING:
        return {}
    todo, made = [t for t in types if tunable(t) and (again or tile_rows.kept(t) is None)], {}
    with work("measuring decode tiles", len(todo)) as step:
        for type in todo:
            made[type] = choose(type)
            step()
    for type, choice in made.items():
        tile_rows.keep(type, choice)
    return made
