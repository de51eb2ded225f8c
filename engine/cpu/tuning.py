"""Tuning: how products read the weights of a type, measured once on a machine (ops/matmul/choices.py keeps it).

    candidates   tiles of 1, 2, 4 and for floats 8 rows by one column, one row with every way of prefetching; one whose
                 results differ from those of one row in any byte is out.  And the layout of CPU_REPACK, where there is
                 one: one group of rows or four, prefetched into the second-level cache or the first
    measured     one thread, weights from memory, rows of two lengths, all taking turns; the least of the rounds
    chosen       the rule's tile unless another is faster by LEAST_GAIN; the layout where one of its tiles is faster

And, of types with tiles of AMX, whether a product of many columns is faster with them, and right.

And how much work a node must be to be shared among threads (sharing.py): chains of additions of several sizes, on one
thread and on all; the least from which on all are faster.

`ggjit warm-up` measures every candidate.  `load_model` measures the few that matter most where no rule knows the
processor.  Other products of several columns follow the rule.  On a busy machine nothing is chosen, and the
measurement is made again later (ops/native/measured.py).
"""
import math
import time

import numpy as np

from ggjit.cpu import sharing
from ggjit.cpu.device import CPU
from ggjit.cpu.repacked import kernel_of
from ggjit.graphs.allocator import GraphAllocator
from ggjit.graphs.graph import Graph
from ggjit.ops.core.progress import work
from ggjit.ops.core.traits import all_traits, traits_of
from ggjit.ops.core.types import F32
from ggjit.ops.core.user_warnings import warn
from ggjit.ops.elementwise.binary import add
from ggjit.ops.matmul import choices
from ggjit.ops.matmul.choices import (
    LEAST_GAIN,
    NEAR,
    ONE_ROW,
    PLAIN,
    Choice,
    candidates,
    layout_candidates,
    layout_name,
)
from ggjit.ops.matmul.mul_mat import mul_mat
from ggjit.ops.matmul.repack import layouts as repack
from ggjit.ops.native.measured import AGAIN_SECONDS, MachineBusy, in_turns
from ggjit.tensors.arrays import from_numpy
from ggjit.tensors.context import Context, alloc_ctx_tensors

LENGTHS = 2048, 5632            # lengths of the rows that are measured
MATRIX_ROWS = 2048
# large, so that weights do not stay in a last-level cache, where all tiles are equally fast
WEIGHTS_NBYTES = 256 << 20
DISTINCT_NBYTES = (4 << 20) - 3
ROUNDS = 9
# settings of a measurement of about 0.1 s for each type, without compiling
QUICK = {"lengths": LENGTHS[:1], "rounds": 3}
CHAIN, CHAIN_PROBE = 64, 4096   # additions of a chain, elements of the one whose cost is known
COLUMNS = 128                   # columns of the product that compares AMX
AMX_NMSE = 1e-6                 # of its results, BF16 sums in another order
LEAST_NBYTES = 16 << 20         # smaller weights stay in a cache and are not measured


def tunable(type):
    """Does the choice apply to the type?  To all of ggml's that have products."""
    return not type.is_own and traits_of(type).dot is not None


def _products(ctx, where, backend, type, lengths, nbytes, n_columns=1):
    """A graph of products of so many columns; weights in `where` of about nbytes, as many of every row length.

    Their bytes are random and repeat.  Bits 5 and 6 of every byte are 1 and 0: any float16, bfloat16 or power of two
    in a block is finite and normal.
    """
    rng, outs = np.random.default_rng(0), []
    noise = rng.integers(0, 256, DISTINCT_NBYTES, np.uint8) & 0xBF | 0x20
    for k in lengths:
        x = from_numpy(ctx, rng.standard_normal((n_columns, k)).astype(np.float32))
        n_rows = nbytes // len(lengths) // type.row_nbytes(k)
        whole = 1 if where is backend else repack.unit(type)[1]
        for _ in range(max(1, n_rows // MATRIX_ROWS)):
            # an odd number: the last tile is cut; a layout takes whole groups
            w = ctx.new_tensor(type, (k, min(n_rows, MATRIX_ROWS) | 1 if whole == 1 else max(whole, MATRIX_ROWS)))
            alloc_ctx_tensors(ctx, where)
            w.set_bytes(np.resize(noise, w.nbytes))
            outs.append(mul_mat(w, x))
    graph = Graph(*outs)
    GraphAllocator(backend).alloc_graph(graph)
    return graph


def _repacked_plans(ctx, backend, type, lengths, nbytes, tiles):
    """{name: plan} over repacked weights, empty where the type or a length has no layout."""
    if type not in repack.LAYOUTS or any(k % repack.unit(type)[0] for k in lengths):
        return {}
    where, plans = next(b for b in backend.device.extra_buffer_types() if b.name == "CPU_REPACK"), {}
    graph = _products(ctx, where, backend, type, lengths, nbytes)
    for tile in tiles:
        with choices.forced(tile):
            plans[layout_name(tile)] = backend.graph_plan_create(graph)
    return plans


def measure(type, tiles=None, layouts=None, lengths=LENGTHS, nbytes=WEIGHTS_NBYTES, rounds=ROUNDS,
            now=time.perf_counter, used=time.thread_time):
    """({name: least seconds of a pass over the weights}, names of the tiles with other bytes than one row's).

    tiles, layouts: the candidates, all if None.  now, used: clocks.  Errors: MachineBusy."""
    backend, ctx = CPU.init_backend("n_threads=1"), Context()
    try:
        graph, plans, answers = _products(ctx, backend, backend, type, lengths, nbytes), {}, {}
        for tile in tiles or candidates(type):
            with choices.forced(tile):
                plans[str(tile)] = plan = backend.graph_plan_create(graph)
            plan.compute()
            answers[str(tile)] = [plan.numpy(y).tobytes() for y in graph.outputs]
        repacked = _repacked_plans(ctx, backend, type, lengths, nbytes, layouts or layout_candidates(type))
        for plan in repacked.values():
            plan.compute()
        plans |= repacked
        seconds = in_turns({name: plan.compute for name, plan in plans.items()}, rounds, now, used)
    finally:
        ctx.free()
    return seconds, [name for name in answers if answers[name] != answers[str(ONE_ROW)]]


def choose(type, **how):
    """The Choice for `type`, found by measuring."""
    seconds, others = measure(type, **how)
    seconds = {name: s for name, s in seconds.items() if name not in others}
    tiles = {t: seconds[str(t)] for t in candidates(type) if str(t) in seconds}
    tile = _faster(tiles, choices.rule(type))
    layouts = {t: seconds[layout_name(t)] for t in layout_candidates(type) if layout_name(t) in seconds}
    layout = _faster(layouts, choices.layout_rule(type)) if layouts else None
    return Choice(tile, layout if layout and layouts[layout] <= tiles[tile] else None, seconds)


def _faster(seconds, rule):
    """The fastest of {tile: seconds} where it beats the rule's by LEAST_GAIN, else the rule's."""
    best = min(seconds, key=seconds.get)
    return best if seconds.get(rule, math.inf) >= LEAST_GAIN * seconds[best] else rule


def all_kept():
    """{type: Choice} of all types that were measured on this machine; empty where GGJIT_TUNE decides."""
    found = {} if choices.SETTING else {t: choices.kept(t) for t in all_traits() if tunable(t)}
    return {t: choice for t, choice in found.items() if choice}


def tune(types, again=False, **how):
    """Measure and keep the choices of those `types` that have none yet (again: of all): {type: Choice} of the measured.

    Does nothing where GGJIT_TUNE decides.  A second or so for a type, most of it compiling.
    """
    if choices.SETTING:
        return {}
    todo, made = [t for t in types if tunable(t) and (again or choices.kept(t) is None)], {}
    with work("measuring how weights are read fastest", len(todo)) as step:
        for type in todo:
            try:
                made[type] = choose(type, **how)
            except MachineBusy as e:
                choices.note_busy(type, e)
            step()
    for type, choice in made.items():
        choices.keep(type, choice)
    tune_amx(types, again)
    return made


def tune_unknown(types, limit=1.0, now=time.perf_counter):
    """Where no rule knows the processor: one row with and without prefetching and two tiles of the layout, of each type
    that has no choice yet; where it has AMX, whether that is faster; no further type after `limit` seconds."""
    made, end = {}, now() + limit
    for type in types if choices.RULE is None else ():
        if now() < end and choices.busy_seconds(type) > AGAIN_SECONDS:
            made |= tune([type], tiles=dict.fromkeys((ONE_ROW, PLAIN, choices.rule(type))),
                         layouts=dict.fromkeys((choices.layout_rule(type), ONE_ROW if type is F32 else NEAR)),
                         **QUICK)
    for type in filter(choices.has_amx, types):
        if now() < end and choices.busy_seconds(type) > AGAIN_SECONDS:
            tune_amx([type], rounds=QUICK["rounds"])
    return made


# ---------------------------------------------------------------- AMX
def measure_amx(type, rounds=ROUNDS, now=time.perf_counter, used=time.thread_time):
    """({"amx", "vectors": least seconds} of a product of COLUMNS columns, have both the same results?).

    now, used: clocks.  Errors: MachineBusy."""
    backend, ctx, plans, results = CPU.init_backend("n_threads=1"), Context(), {}, {}
    try:
        nbytes = MATRIX_ROWS * type.row_nbytes(LENGTHS[0])
        graph = _products(ctx, backend, backend, type, LENGTHS[:1], nbytes, COLUMNS)
        for name in ("amx", "vectors"):
            with choices.forced_amx(name == "amx"):
                plans[name] = backend.graph_plan_create(graph)
            plans[name].compute()
            results[name] = plans[name].numpy(graph.outputs[0]).astype(np.float64)
        error = ((results["amx"] - results["vectors"]) ** 2).sum() / (results["vectors"] ** 2).sum()
        return in_turns({name: plan.compute for name, plan in plans.items()}, rounds, now, used), error <= AMX_NMSE
    finally:
        ctx.free()


def tune_amx(types, again=False, **how):
    """Measure and keep whether products of many columns use AMX, of those `types` that have its tiles and no choice yet
    (again: of all): {type: bool} of the measured.  Where AMX gives other results, a warning says so: it is not used."""
    made = {}
    for type in types if not choices.SETTING else ():
        if choices.has_amx(type) and (again or choices.kept_amx(type) is None):
            try:
                seconds, is_right = measure_amx(type, **how)
            except MachineBusy as e:
                choices.note_busy(type, e)
                continue
            if not is_right:
                warn(f"products of {type.name} by AMX differ from those by AVX-512 on this processor and are not used; "
                     f"please report it with the output of ggjit info")
            made[type] = bool(is_right) and seconds["amx"] <= seconds["vectors"]
            choices.keep_amx(type, made[type], seconds)
    return made


# ---------------------------------------------------------------- threads
def _chain(ctx, backend, nanoseconds):
    """A graph of additions, each of about so much work."""
    def chain(n):
        y = x = from_numpy(ctx, np.ones(n, np.float32))
        for _ in range(CHAIN):
            y = add(y, x)
        return y
    probe = chain(CHAIN_PROBE)
    graph = Graph(chain(max(64, int(CHAIN_PROBE * nanoseconds / kernel_of(probe, 1).cost))))
    GraphAllocator(backend).alloc_graph(graph)
    return graph


def measure_sharing(n_threads, rounds=ROUNDS, now=time.perf_counter, used=time.thread_time):
    """{nanoseconds of a node's work: (seconds of a chain on one thread, on all)}: the least of the rounds.  Errors:
    MachineBusy."""
    backend, found = CPU.init_backend(f"n_threads={n_threads}"), {}
    for size in sharing.CANDIDATES:
        ctx, plans = Context(), []
        try:
            graph = _chain(ctx, backend, size)
            for least in (math.inf, 0.0):
                with sharing.forced(least):
                    plans.append(backend.graph_plan_create(graph))
                plans[-1].thread_choice = None          # all threads, whatever they cost
                plans[-1].compute()
            found[size] = tuple(in_turns({p.n_used: p.compute for p in plans}, rounds, now, used).values())
        finally:
            ctx.free()
    return found


def tune_sharing(n_threads, again=False, **how):
    """Measure and keep how much work a node must be to be shared: nanoseconds; None where nothing was measured, or on
    a busy machine."""
    if n_threads < 2 or choices.SETTING == "off" or n_threads in sharing.kept() and not again:
        return None
    try:
        found = measure_sharing(n_threads, **how)
    except MachineBusy as e:
        sharing.note_busy(e)
        return None
    least = 2 * sharing.CANDIDATES[-1]
    for size, (alone, shared) in sorted(found.items(), reverse=True):
        if alone < LEAST_GAIN * shared:
            break
        least = size
    sharing.keep(n_threads, least)
    return least
