"""Which way multiplies dense matrices on a device: cuBLAS or ggjit's own kernels, measured once for a class of shapes.

    cuda/products-DEVICE-KEY.json   {"q4_0 f32 4096x4096x16": {"own": 2.1e-05, "cublas": 4.4e-05}, ...}     seconds

A class is the types and k, m, n rounded up to powers of two.  It is measured when the first plan with such a product is
made, on memory of its own; where there is too little of it cuBLAS multiplies, and nothing is kept.  KEY is of the
kernels' sources, DEVICE the card's name (ops/native/measured.py).

    GGJIT_CUBLAS=0|1        own kernels or cuBLAS, whatever was measured; nothing is measured

cuBLAS unpacks quantised weights first, so own kernels win where few columns meet many weights.
"""
import contextlib
import contextvars
import hashlib
import math
import re

from ggjit.graphs.allocator import GraphAllocator
from ggjit.graphs.graph import Graph
from ggjit.ops.core.errors import OutOfMemory
from ggjit.ops.cuda import mul_mat, mul_mat_dense
from ggjit.ops.cuda.native.launch import Gemm, launches
from ggjit.ops.matmul.mul_mat import mul_mat as product
from ggjit.ops.native.jit import sources_digest
from ggjit.ops.native.measured import MeasuredFile
from ggjit.tensors.context import Context, alloc_ctx_tensors

WAYS = "own", "cublas"
ROUNDS = 5
_forced = contextvars.ContextVar("way of products", default=None)


def chosen(backend, t):
    """The launches of node `t` on the backend's device, as `launches` has them, products by the faster way."""
    found = launches(t)
    if found is None or not any(isinstance(x, Gemm) for x in found):
        return found
    own = launches(t, mul_mat.own)
    return found if own is None or _way(backend, t) == "cublas" else own


def _way(backend, t):
    if _forced.get() or mul_mat_dense.decided():
        return _forced.get() or "cublas"
    device, name = backend.device, class_of(t)
    if device.products is None:
        device.products = _file(device).read() or {}
    if name not in device.products:
        try:
            device.products[name] = measure(device, t)
        except OutOfMemory:
            return "cublas"
        _file(device).add(device.products)          # an unwritable place: measured in every process
    return min(WAYS, key=device.products[name].get)


def class_of(t):
    a, b = t.src[:2]
    k, m, n = (1 << (x - 1).bit_length() for x in (a.ne[0], a.ne[1], b.ne[1]))
    return f"{a.type.name} {b.type.name} {k}x{m}x{n}"


def measure(device, t):
    """{way: least seconds} of a product with the types and shapes of `t`.  Errors: OutOfMemory."""
    backend, ctx = device.init_backend("graphs=0"), Context()
    try:
        leaves = [ctx.new_tensor(s.type, s.ne) for s in t.src[:2]]
        alloc_ctx_tensors(ctx, backend)
        for leaf in leaves:
            leaf.buffer.memset_tensor(leaf, 0)
        graph = Graph(product(*leaves))
        GraphAllocator(backend).alloc_graph(graph)
        seconds = {}
        for way in WAYS:
            with forced(way):
                plan = backend.graph_plan_create(graph)
            plan.compute()
            backend.synchronize()
            seconds[way] = min(sum(ns for *_, ns in plan.timed()) for _ in range(ROUNDS)) * 1e-9
        return seconds
    finally:
        ctx.free()


@contextlib.contextmanager
def forced(way):
    """Inside the block this thread makes plans whose products go that way."""
    token = _forced.set(way)
    try:
        yield
    finally:
        _forced.reset(token)


# ---------------------------------------------------------------- files
def _file(device):
    key = hashlib.sha256(sources_digest((mul_mat.__name__,)).encode()).hexdigest()[:20]
    return MeasuredFile("cuda", f"products-{re.sub('[^a-zA-Z0-9]+', '-', device.description)}", key, _seconds)


def _seconds(found):
    """{class: {way: seconds}} of the file's JSON, those that are positive and finite."""
    found = {name: {way: float(s[way]) for way in WAYS} for name, s in found.items()}
    return {name: s for name, s in found.items() if all(0 < x < math.inf for x in s.values())}
