"""Which nodes of a device libraries compute and which our own kernels, measured once for a class of shapes.

    Gemm    cuBLAS multiplies dense matrices        cublas.py       GGJIT_CUBLAS=0|1 decides without measuring
    Sort    CCCL sorts long rows                    cccl.py         GGJIT_CCCL=0|1

    cuda/libraries-DEVICE-KEY.json  {"q4_0 f32 4096x4096x16": {"own": 2.1e-05, "cublas": 4.4e-05}, ...}     seconds

A class is the types and sizes, rounded up to powers of two.  It is measured when the first plan with such a node is
made, on memory of its own.  Where it cannot be measured nothing is kept: with too little memory cuBLAS multiplies
(it unpacks quantised weights first, so own kernels win where few columns meet many weights), and a sort that CCCL
does not serve is our own.  KEY is of the kernels' sources, DEVICE the card's name (ops/native/measured.py).
"""
import contextvars
import dataclasses
import hashlib
import math
import re
from collections.abc import Callable

import numpy as np

from ggjit.graphs.allocator import GraphAllocator
from ggjit.graphs.graph import Graph
from ggjit.ops.core.errors import MissingExtra, NotSupported, OutOfMemory
from ggjit.ops.core.record import OP
from ggjit.ops.cuda import argsort
from ggjit.ops.cuda.matmul import mul_mat, mul_mat_dense
from ggjit.ops.cuda.native.launch import Gemm, Sort, launches
from ggjit.ops.matmul.mul_mat import mul_mat as product
from ggjit.ops.native import measured
from ggjit.ops.native.jit import sources_digest
from ggjit.ops.reductions.argsort import argsort as sort
from ggjit.ops.reductions.argsort import top_k
from ggjit.tensors.context import Context, alloc_ctx_tensors

ROUNDS = 5
_forced = contextvars.ContextVar("way of a node", default=None)


# ---------------------------------------------------------------- libraries
def class_of_product(t):
    a, b = t.src[:2]
    k, m, n = map(_rounded, (a.ne[0], a.ne[1], b.ne[1]))
    return f"{a.type.name} {b.type.name} {k}x{m}x{n}"


def class_of_sort(t):
    return f"{t.op.name.lower()} {_rounded(t.src[0].ne[0])}x{_rounded(math.prod(t.ne[1:]))}"


def _rounded(n):
    return 1 << (n - 1).bit_length()


def _zeros(leaf):
    leaf.buffer.memset_tensor(leaf, 0)


def _random(leaf):
    leaf.set(np.random.default_rng(0).random(tuple(reversed(leaf.ne)), np.float32))


@dataclasses.dataclass(frozen=True)
class CudaLibrary:
    """A library that may take the place of our own kernels.

    own(t)          the launches without it
    decided()       is it used wherever it may be?
    class_of(t)     name of the class of shapes
    again(t, *leaves), fill(leaf)       the node made anew of leaves like its sources, and their values
    unmeasured      the way where one of `forgiven` kept it from being measured
    """
    name: str
    own: Callable
    decided: Callable
    class_of: Callable
    again: Callable
    fill: Callable
    unmeasured: str
    forgiven: tuple = (OutOfMemory,)


LIBRARIES = {
    Gemm: CudaLibrary("cublas", mul_mat.own, lambda: mul_mat_dense.decided(), class_of_product,
                      lambda t, a, b: product(a, b), _zeros, "cublas"),
    Sort: CudaLibrary("cccl", argsort.own, lambda: argsort.decided(), class_of_sort,
                      lambda t, a: top_k(a, t.ne[0]) if t.op is OP.TOP_K
                      else sort(a, int(t.op_params[0])), _random, "own", (OutOfMemory, MissingExtra, NotSupported))}


# ---------------------------------------------------------------- the choice
def chosen(backend, t):
    """The launches of node `t` on the backend's device, as `launches` has them, by a library where that is faster."""
    found = launches(t)
    call = next((x for x in found or () if type(x) in LIBRARIES), None)
    if call is None:
        return found
    library = LIBRARIES[type(call)]
    own = launches(t, library.own)
    return own if own is not None and _way(backend, t, library, call) == "own" else found


def _way(backend, t, library, call):
    if _forced.get() or library.decided():
        return _forced.get() or library.name
    device, name = backend.device, library.class_of(t)
    if device.measured is None:
        device.measured = _file(device).read() or {}
    try:
        if name not in device.measured:
            device.measured[name] = measure(device, t, library)
            _file(device).add(device.measured)      # an unwritable place: measured in every process
        way = min(device.measured[name], key=device.measured[name].get)
        if way == library.name and isinstance(call, Sort):
            # the library may not work in this process although an earlier one measured it
            backend.cccl.prepare(call)
        return way
    except library.forgiven as e:
        if not isinstance(e, OutOfMemory):
            device.measured[name] = {library.unmeasured: 0.0}       # the library is not tried again in this process
        return library.unmeasured


def measure(device, t, library):
    """{way: least seconds} of a node with the types and shapes of `t`.  Errors: the library's, OutOfMemory."""
    backend, ctx = device.init_backend("graphs=0"), Context()
    try:
        leaves = [ctx.new_tensor(s.type, s.ne) for s in t.src]
        alloc_ctx_tensors(ctx, backend)
        for leaf in leaves:
            library.fill(leaf)
        graph = Graph(library.again(t, *leaves))
        GraphAllocator(backend).alloc_graph(graph)
        seconds = {}
        for way in (library.name, "own"):
            with forced(way):
                plan = backend.graph_plan_create(graph)
            plan.compute()
            backend.synchronize()
            seconds[way] = min(sum(ns for *_, ns in plan.timed()) for _ in range(ROUNDS)) * 1e-9
        return seconds
    finally:
        ctx.free()


def forced(way):
    """Context in which this thread makes plans whose nodes are computed by `way`."""
    return measured.forced(_forced, way)


# ---------------------------------------------------------------- files
def _file(device):
    key = hashlib.sha256(sources_digest((mul_mat.__name__, argsort.__name__)).encode()).hexdigest()[:20]
    return measured.MeasuredFile("cuda", f"libraries-{re.sub('[^a-zA-Z0-9]+', '-', device.description)}", key, _seconds)


def _seconds(found):
    """{class: {way: seconds}} of the file's JSON, those that are positive and finite."""
    found = {name: {str(way): float(s) for way, s in ways.items()} for name, ways in found.items()}
    return {name: ways for name, ways in found.items()
            if "own" in ways and all(0 < s < math.inf for s in ways.values())}
