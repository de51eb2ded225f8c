"""Chooses between several ways to compute a node, by one measurement for each class of shapes on the device.

    own         our own kernels
    cublas      dense matrices                              cublas.py       GGJIT_CUBLAS=0|1 decides without measuring
    cccl        sorts of long rows                          cccl.py         GGJIT_CCCL=0|1
    piped       our own kernels that copy while they compute: products (ops/cuda/matmul/mul_mat.py), attention
                (ops/cuda/flash_attn_piped.py)              GGJIT_PIPED=0|1|measured, 0 where nothing is said
    warpgroups  products of many columns by warpgroups, on compute capability 9.0; GGJIT_PIPED says so, too

    cuda/libraries-DEVICE-KEY.json  {"q4_0 f32 4096x4096x16": {"own": 2.1e-05, "cublas": 4.4e-05}, ...}     seconds

A class is the types and sizes, rounded up to powers of two.  It is measured when the first plan with such a node is
made, on memory of its own.  Where it cannot be measured nothing is kept: with too little memory cuBLAS multiplies
(it unpacks quantised weights first, so own kernels win where few columns meet many weights), and a sort that CCCL
does not serve is our own.  KEY is of the kernels' sources, DEVICE the card's name (ops/native/measured.py).
"""
import contextvars
import hashlib
import math
import os
import re

import numpy as np

from ggjit.core.host_buffer import HOST
from ggjit.graphs.allocator import GraphAllocator
from ggjit.graphs.graph import Graph
from ggjit.ops.core.errors import OutOfMemory, ParamError
from ggjit.ops.cuda.native.launch import Gemm, Sort, launches, node_ways
from ggjit.ops.native import measured
from ggjit.ops.native.jit import sources_digest
from ggjit.tensors.context import Context, alloc_ctx_tensors

ROUNDS, FEW_ROWS = 5, 64
MAX_NMSE = 5e-4                 # ggml's bound of products and of attention
NEVER = 1e9                     # seconds
PIPED, WARPGROUPS, HOPPER = "piped", "warpgroups", (9, 0)
NO, YES, MEASURED = "0", "1", "measured"        # GGJIT_PIPED
_forced = contextvars.ContextVar("way of a node", default=None)


# ---------------------------------------------------------------- the choice
def _random(leaf):
    """A few rows of values from 0 to 1, again and again: quantising takes longer than what is measured."""
    with Context() as ctx:
        few = ctx.new_tensor(leaf.type, (leaf.ne[0], min(FEW_ROWS, math.prod(leaf.ne[1:]))))
        alloc_ctx_tensors(ctx, HOST)
        few.set(np.random.default_rng(0).random((few.ne[1], few.ne[0]), np.float32))
        leaf.set_bytes(np.resize(np.frombuffer(few.bytes(), np.uint8), leaf.nbytes))


def _piping():
    """May nodes be piped, or are they wherever they may be?"""
    said = os.environ.get("GGJIT_PIPED", NO)
    if said not in (NO, YES, MEASURED):
        raise ParamError(f"GGJIT_PIPED={said!r}; there are {NO}, {YES} and {MEASURED}")
    return said


def ways(t, capability=None):
    """{way: launches} of node `t`, of those that may be used on a device of this compute capability; empty where none
    serves it."""
    found, choice = launches(t), node_ways().get(t.op)
    if found is None or choice is None:
        return {} if found is None else {"own": found}
    by_library = any(isinstance(x, Gemm | Sort) for x in found)
    made = {"own": launches(t, choice.own), choice.library[0]: found} if by_library else {"own": found}
    if _piping() != NO:
        made |= {way: launches(t, maker) for way, maker in (
            (PIPED, choice.piped), (WARPGROUPS, choice.by_warpgroups if capability == HOPPER else None)) if maker}
    return {way: x for way, x in made.items() if x is not None}


def chosen(backend, t):
    """The launches of node `t` on the backend's device, in the way that was measured to be the fastest."""
    made = ways(t, backend.device.compute_capability)
    return made[_way(backend, t, made)] if made else None


def _way(backend, t, made):
    if len(made) == 1:
        return next(iter(made))
    if _forced.get() in made:
        return _forced.get()
    choice = node_ways()[t.op]
    library, library_decided = choice.library
    if _piping() == YES and (best := next((way for way in (WARPGROUPS, PIPED) if way in made), None)):
        return best
    if library in made and library_decided():
        return library
    return _measured_way(backend, t, made, choice)


def _measured_way(backend, t, made, choice):
    device, name = backend.device, choice.class_of(t)
    if device.measured is None:
        device.measured = _file(device).read() or {}
    try:
        known = device.measured.get(name, {})
        if not made.keys() <= known.keys() and 0.0 not in known.values():
            device.measured[name] = measure(device, t)
            _file(device).add(device.measured)      # an unwritable place: measured in every process
        known = device.measured[name]
        way = min((way for way in known if way in made), key=known.get)
        for call in made[way]:
            if isinstance(call, Sort):
                # the library may not work in this process although an earlier one measured it
                backend.cccl.prepare(call)
        return way
    except choice.forgiven as e:
        if not isinstance(e, OutOfMemory):
            device.measured[name] = {choice.unmeasured: 0.0}        # the library is not tried again in this process
        return choice.unmeasured if choice.unmeasured in made else "own"


def measure(device, t):
    """{way: least seconds} of a node with the types and shapes of `t`.  A way of our own kernels whose result is not
    right beside `own` takes for ever.  Errors: the library's, OutOfMemory."""
    backend, ctx, choice = device.init_backend("graphs=0"), Context(), node_ways()[t.op]
    try:
        leaves = [None if s is None else ctx.new_tensor(s.type, s.ne) for s in t.src]
        alloc_ctx_tensors(ctx, backend)
        for leaf in ctx.tensors:
            _random(leaf)
        y = choice.again(t, *leaves)
        graph, seconds, results = Graph(y), {}, {}
        GraphAllocator(backend).alloc_graph(graph)
        for way in ways(t, device.compute_capability):
            with forced(way):
                plan = backend.graph_plan_create(graph)
            plan.compute()
            results[way] = plan.numpy(y).astype(np.float64)
            seconds[way] = min(sum(ns for *_, ns in plan.timed()) for _ in range(ROUNDS)) * 1e-9
        for way in seconds.keys() & {PIPED, WARPGROUPS}:
            if not _near(results[way], results["own"]):
                seconds[way] = NEVER
        return seconds
    finally:
        ctx.free()


def _near(got, want):
    return bool(np.square(got - want).sum() <= MAX_NMSE * np.square(want).sum())


def forced(way):
    """Context in which this thread makes plans whose nodes are computed by `way`."""
    return measured.forced(_forced, way)


# ---------------------------------------------------------------- files
def _file(device):
    modules = {way.__module__ for ways in node_ways().values() for way in (ways.own, ways.piped, ways.by_warpgroups)
               if way is not None}
    key = hashlib.sha256(sources_digest(tuple(sorted(modules))).encode()).hexdigest()[:20]
    return measured.MeasuredFile("cuda", f"libraries-{re.sub('[^a-zA-Z0-9]+', '-', device.description)}", key, _seconds)


def _seconds(found):
    """{class: {way: seconds}} of the file's JSON, those that are positive and finite."""
    found = {name: {str(way): float(s) for way, s in ways.items()} for name, ways in found.items()}
    return {name: ways for name, ways in found.items()
            if "own" in ways and all(0 < s < math.inf for s in ways.values())}
