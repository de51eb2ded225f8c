"""Data versions of sources that an op updates besides its result: AdamW's m and v."""
import numpy as np
import pytest
from helpers import devices
from helpers.schedulers import world

import ggjit as gg
from ggjit.core.versions import stamp
from ggjit.ops.core.errors import ParamError
from ggjit.ops.core.record import OP

SETTINGS = np.array([0.1, 0.5, 0.5, 1e-8, 0, 1, 1], np.float32)         # alpha, beta1, beta2, eps, wd, beta1h, beta2h


def optimizer(place):
    """(w, g, m, v, settings), all 1 but g = 3; `place(ctx)` gives them memory."""
    ctx = gg.Context()
    sizes = {"w": 8, "g": 8, "m": 8, "v": 8, "settings": 7}
    tensors = [ctx.new_tensor(gg.F32, (n,), name) for name, n in sizes.items()]
    gg.set_param(tensors[0])
    place(ctx)
    for t, values in zip(tensors, (np.ones(8), np.full(8, 3), np.ones(8), np.ones(8), SETTINGS), strict=True):
        t.set(values)
    return tensors


@pytest.mark.parametrize("source", ["m", "v"])
def test_a_copy_of_what_adamw_updates_is_never_stale(source):
    """Another device reads m (or v) before each step: it has to see what the step before left."""
    sched, (a, c) = world(devices.Fake("A", ops={OP.SCALE}))
    w, g, m, v, settings = optimizer(lambda ctx: gg.alloc_ctx_tensors(ctx, c))
    seen = gg.scale(m if source == "m" else v, 1.0)
    graph = gg.Graph(seen, gg.opt_step_adamw(w, g, m, v, settings))
    sched.set_tensor_backend(seen, sched.backends[0])
    for want in (1, 2, 2.5) if source == "m" else (1, 5, 7):            # m = m/2 + 3/2, v = v/2 + 9/2
        sched.graph_compute(graph)
        assert sched.splits[0].backend is sched.backends[0] and sched.numpy(seen).tolist() == [want] * 8


def test_a_plan_counts_its_updates():
    w, g, m, v, settings = optimizer(lambda ctx: gg.alloc_ctx_tensors(ctx, gg.init_backend("CPU")))
    before = [stamp(t.id, t.buffer) for t in (w, g, m, v, settings)]
    gg.compute(gg.opt_step_adamw(w, g, m, v, settings))
    changed = [stamp(t.id, t.buffer) != old for t, old in zip((w, g, m, v, settings), before, strict=True)]
    assert changed == [True, False, True, True, False]
    assert m.numpy().tolist() == [2] * 8 and v.numpy().tolist() == [5] * 8


def test_a_copy_made_during_a_run_is_stale_after_it():
    """Another thread may copy a leaf while a plan computes into it: what it copied does not count as the result."""
    x = gg.from_numpy(gg.Context(), np.ones(8, np.float32))
    leaf, seen = x.ctx.new_tensor(gg.F32, (8,)), []
    gg.alloc_ctx_tensors(x.ctx, gg.init_backend("CPU"))

    def look(dst, a, ith, nth):
        seen.append(stamp(leaf.id, leaf.buffer))
        dst[:] = a
    gg.compute(gg.cpy(gg.map_custom1(x, look, n_tasks=1), leaf))
    assert len(seen) == 1 and stamp(leaf.id, leaf.buffer) != seen[0]


def test_a_run_that_fails_counts_its_writes():
    x = gg.from_numpy(gg.Context(), np.ones((2, 8), np.float32))
    leaf = x.ctx.new_tensor(gg.F32, (8, 2))
    gg.alloc_ctx_tensors(x.ctx, gg.init_backend("CPU"))
    leaf.set(np.zeros((2, 8)))
    before = stamp(leaf.id, leaf.buffer)
    beyond = gg.from_numpy(x.ctx, np.array([2], np.int32))
    with pytest.raises(gg.IndexRangeError, match="index 2 is out of range"):
        gg.compute(gg.cpy(x, leaf), gg.get_rows(x, beyond))
    assert leaf.numpy().tolist() == x.numpy().tolist()
    assert stamp(leaf.id, leaf.buffer) != before


@pytest.mark.parametrize("name", ["w", "m", "v"])
def test_read_only_memory_is_not_updated(name):
    tensors = dict(zip(("w", "g", "m", "v", "settings"),
                       optimizer(lambda ctx: gg.alloc_ctx_tensors(ctx, gg.init_backend("CPU"))), strict=True))
    frozen = np.ones(8, np.float32)
    frozen.flags.writeable = False
    tensors[name] = gg.from_numpy(tensors["g"].ctx, frozen)
    gg.set_param(tensors["w"])
    with pytest.raises(ParamError, match="read-only"):
        gg.compute(gg.opt_step_adamw(*tensors.values()))
    assert frozen.tolist() == [1] * 8
