"""Elementwise ops, norms, softmax, rope, rows, copies and reductions against their float64 references.

Outputs lie between sentinel bytes in poisoned memory; every case runs on one thread and with its work split in two.
"""
import zlib

import numpy as np
import pytest

import ggjit as gg
from ggjit.buffer import HostBuffer
from ggjit.ops.record import OP, VIEW_OPS
from ggjit.ops.spec import Inputs, all_specs
from ggjit.plan import Placement

MINE = [OP.ADD, OP.SUB, OP.MUL, OP.DIV, OP.UNARY, OP.SQR, OP.SQRT, OP.LOG, OP.SIN, OP.COS, OP.LEAKY_RELU, OP.SCALE,
        OP.CLAMP, OP.FILL, OP.GLU, OP.NORM, OP.RMS_NORM, OP.L2_NORM, OP.GROUP_NORM, OP.SOFT_MAX, OP.ROPE, OP.ROPE_BACK,
        OP.GET_ROWS, OP.SET_ROWS, OP.CPY, OP.CONT, OP.DUP, OP.SUM, OP.SUM_ROWS, OP.MEAN, OP.ARGMAX, OP.REPEAT,
        OP.CONCAT, OP.DIAG_MASK_INF, OP.DIAG_MASK_ZERO]
CASES = [(op, c) for op in MINE if op in all_specs() for c in all_specs()[op].cases()]
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


def run(case, n_threads=1):
    """(result, reference, output tensor) with sentinels checked."""
    ctx, backend, out, leaves = prepare(case)
    with np.errstate(all="ignore"):
        want = expected(out)
    graph = gg.Graph(out)
    own = Arena(backend, [t for t in graph.nodes if t.view_src is None and t.op not in VIEW_OPS])
    backend.n_threads = n_threads
    plan = backend.graph_plan_create(graph, Placement({t.id: (own.buffer, o) for t, o in own.where}))
    plan.compute()
    leaves.check()
    own.check()
    return values(out), want, out


@pytest.mark.parametrize("op,case", CASES, ids=[f"{op.name} {c.name}" for op, c in CASES])
def test_against_float64(op, case, monkeypatch):
    got, want, out = run(case)
    assert got.shape == want.shape
    error = nmse(got.astype(np.float64), want.astype(np.float64))
    assert error <= case.max_nmse, f"{out!r}: NMSE {error:.3g}"
    monkeypatch.setattr("ggjit.plan.TINY_NANOSECONDS", 0.0)
    again, _, _ = run(case, 2)
    assert again.tobytes() == got.tobytes(), "two threads give other bytes than one"


def test_the_comparison_notices_wrong_answers():
    want = np.linspace(-1, 1, 50)
    assert nmse(want * 1.001, want) > 1e-7 and nmse(want, want) == 0
    with pytest.raises(AssertionError):
        nmse(np.where(want > 0.9, np.nan, want), want)
    with pytest.raises(AssertionError):
        nmse(want, np.where(want > 0.9, np.inf, want))
