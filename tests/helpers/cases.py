"""Runs a test case of an op between sentinel bytes, and compares with its float64 reference."""
import zlib

import numpy as np

import ggjit as gg
from ggjit.core.host_buffer import HostBuffer
from ggjit.graphs.allocator import Placement
from ggjit.ops.core.record import VIEW_OPS
from ggjit.ops.core.spec import Inputs, all_specs

GAP, SENTINEL = 256, 0xFF                                   # 0xFF everywhere: NaN as a float, -1 as an id


class Arena:
    """Memory for tensors with GAP sentinel bytes between them."""

    def __init__(self, backend, tensors):
        offs, self.where = GAP, []
        for t in tensors:
            self.where.append((t, offs))
            offs += -(-t.nbytes // 64) * 64 + GAP
        self.buffer = HostBuffer(backend.default_buffer_type, offs)
        self.buffer.arena[:] = SENTINEL

    def check(self):
        mine = np.zeros(self.buffer.arena.size, bool)
        for t, offs in self.where:
            mine[offs:offs + t.nbytes] = True
        assert (self.buffer.arena[~mine] == SENTINEL).all(), "bytes outside the tensors were written"


def values(t):
    """Values in NumPy order, four dimensions; floats as float64."""
    shape = tuple(reversed(t.ne))
    if t.type is gg.BF16:                               # whatever its strides
        bits = np.ndarray(shape, np.uint16, t.bytes(), 0, tuple(reversed(t.nb)))
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    a = t.numpy().reshape(shape)
    return a if a.dtype.kind == "i" else a.astype(np.float64)


def expected(t):
    if t is None:
        return None
    if t.op in VIEW_OPS:
        return values(t)
    return np.asarray(all_specs()[t.op].reference(t, *(expected(s) for s in t.src)))


def nmse(got, want):
    """sum (got - want)^2 / sum want^2, floats in float64; infinities and NaN must stand in the same places."""
    got, want = (a.astype(np.float64) if a.dtype.kind == "f" else a for a in map(np.asarray, (got, want)))
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    if same.all():
        return 0.0
    assert np.isfinite(want[~same]).all() and np.isfinite(got[~same]).all(), "infinities or NaN in different places"
    finite = np.isfinite(want)
    power = np.square(want[finite]).sum()
    return np.square(got[~same] - want[~same]).sum() / (power if power > 0 else 1.0)


def prepare(case, seed=None):
    ctx, backend = gg.Context(), gg.init_backend("CPU:n_threads=1")
    inp = Inputs(ctx, np.random.default_rng(zlib.crc32(case.name.encode()) if seed is None else seed))
    out = case.build(inp)
    leaves = Arena(backend, [t for t, _ in inp.data])
    for t, offs in leaves.where:
        gg.tensor_alloc(leaves.buffer, t, offs)
    for t, array in inp.data:
        t.set(array)
    return ctx, backend, out, leaves


def run(case, n_threads=1, over=None):
    """(result, reference, output tensor) with sentinels checked; over: number of the source to be written over."""
    ctx, backend, out, leaves = prepare(case)
    with np.errstate(all="ignore"):
        want = expected(out)
    graph = gg.Graph(out)
    own = Arena(backend, [t for t in graph.nodes if t.view_src is None and t.op not in VIEW_OPS])
    backend.n_threads = n_threads
    where = {t.id: (own.buffer, o) for t, o in own.where}
    if over is not None:
        where[out.id] = out.src[over].buffer, out.src[over].offs
    plan = backend.graph_plan_create(graph, Placement(where))
    plan.compute()
    leaves.check()
    own.check()
    return values(out), want, out


def fits(out, src):
    """Could out take over the memory of src?"""
    return (src is not None and out.view_src is None and src.type is out.type and src.ne == out.ne and src.nb == out.nb)
