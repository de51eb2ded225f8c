"""Copies between devices: data versions, asynchronous streams, pipelining, experts; callbacks during a run."""
import threading

import numpy as np
import pytest
from helpers import devices
from helpers.schedulers import alone, array, fill, llama_like, two_layers, weight, world

import ggjit as gg


# ---------------------------------------------------------------- copies and data versions
def test_unchanged_inputs_are_copied_once_per_device_A14_07():
    sched, bufts = world(devices.Fake("A"), devices.Fake("B"))
    graph, x, mask, pos = llama_like(bufts, 9)
    fill(graph)
    sched.graph_compute(graph)
    computed = sum(t.nbytes for s in sched.splits for t in s.inputs if t.op)
    inputs = sum(t.nbytes for s in sched.splits for t in s.inputs if not t.op)
    assert sched.copied_nbytes == computed + inputs and inputs == 5 * x.nbytes       # x, mask, pos on A; two on B
    sched.graph_compute(graph)
    assert sched.copied_nbytes == computed, "nothing was written: no input is copied again"
    mask.set(array(32, 32))
    sched.graph_compute(graph)
    assert sched.copied_nbytes == computed + 2 * mask.nbytes
    np.testing.assert_array_equal(sched.numpy(graph.outputs[0]), alone(graph))
    for write in (lambda: pos.set_bytes(b"\0" * 8), lambda: gg.tensor_memset(pos, 0), lambda: pos.buffer.clear(0),
                  lambda: gg.view_1d(pos, 4, 0).set(np.ones(4)), lambda: gg.tensor_copy(mask, pos)):
        write()
        sched.graph_compute(graph)
        assert sched.copied_nbytes > computed
        np.testing.assert_array_equal(sched.numpy(graph.outputs[0]), alone(graph))


def test_memory_of_the_user_is_always_copied():
    sched, (a, c) = world(devices.Fake("A"))
    values = array(8, 8)
    ctx = gg.Context()
    x = gg.from_numpy(ctx, values, "x")
    graph = gg.Graph(gg.mul_mat(weight(ctx, a, "w"), x))
    graph.leafs[0].set(array(8, 8))
    for _ in range(2):
        values[:] = array(8, 8)
        sched.graph_compute(graph)
        np.testing.assert_array_equal(sched.numpy(graph.outputs[0]), alone(graph))
    y, buf = ctx.new_tensor(gg.F32, (8, 8)), c.alloc_buffer(256)
    gg.tensor_alloc(buf, y, 0)
    graph = gg.Graph(gg.mul_mat(graph.leafs[0], y))
    arena = buf.arena
    for _ in range(2):
        arena[:] = array(64).view(np.uint8)[:256]
        sched.graph_compute(graph)
        np.testing.assert_array_equal(sched.numpy(graph.outputs[0]), alone(graph))


@pytest.mark.parametrize("rules", ["2023", "2024", "modern"])
def test_a_tensor_modified_in_place_leaves_no_stale_copy_E3(rules):
    """h lives on the CPU; A reads it before and after the CPU works on it in place.  ggml copies it once."""
    sched, (a, c) = world(devices.Fake("A"), rules=rules)
    ctx = gg.Context()
    w = weight(ctx, a, "w")
    h = weight(ctx, c, "h")
    h.buffer.set_usage(gg.USAGE_ANY)
    first = gg.mul_mat(w, h)
    second = gg.mul_mat(w, gg.scale_inplace(h, 3.0))
    third = gg.mul_mat(w, h)
    graph = gg.Graph(gg.add(gg.add(first, second), third))
    for _ in range(3):
        fill(graph)
        hv = h.numpy().copy()
        sched.graph_compute(graph)
        got = sched.numpy(graph.outputs[0])
        product = hv @ w.numpy().T
        np.testing.assert_allclose(got, product + 3 * product + 3 * product, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(h.numpy(), 3 * hv, rtol=1e-6)


def test_a_cache_written_by_the_graph_is_copied_fresh():
    sched, (a, c) = world(devices.Fake("A"))
    ctx = gg.Context()
    cache = weight(ctx, c, "cache")
    cache.buffer.set_usage(gg.USAGE_ANY)
    x = gg.from_numpy(ctx, array(8, 8), "x")
    w = weight(ctx, a, "w")
    z = gg.add(gg.mul_mat(w, gg.cpy(x, cache)), gg.mul_mat(w, cache))
    graph = gg.Graph(z)
    for t in (cache, w):
        t.set(array(8, 8))
    for _ in range(3):
        with x.write() as v:
            v[...] = array(8, 8)
        sched.graph_compute(graph)
        np.testing.assert_allclose(sched.numpy(z), 2 * x.numpy() @ w.numpy().T, rtol=1e-4, atol=1e-5)


def test_kept_weights_are_copied_once():
    for keep, copies in ((False, 2), (True, 1)):
        sched, (a, c) = world(devices.Fake("A", offload=lambda t: True), keep_weights=keep)
        ctx = gg.Context()
        w = weight(ctx, c, "w")
        x = gg.from_numpy(ctx, array(8, 8))
        graph = gg.Graph(gg.mul_mat(w, x))
        w.set(array(8, 8))
        total = 0
        for _ in range(2):
            sched.graph_compute(graph)
            total += sched.copied_nbytes - x.nbytes
        assert total == copies * w.nbytes
        np.testing.assert_array_equal(sched.numpy(graph.outputs[0]), alone(graph))


# ---------------------------------------------------------------- asynchronous streams and pipelining
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("delays", [(1e-3, None), (1e-3, 2e-3), (None, 1e-3)])
def test_asynchronous_streams_keep_the_order(parallel, delays):
    fakes = [devices.Fake(n, delay=d) for n, d in zip("AB", delays, strict=True)]
    sched, bufts = world(*fakes, parallel=parallel)
    graph, x, mask, pos = llama_like(bufts, 4)
    fill(graph)
    for _ in range(3):
        x.set(array(32, 32))
        sched.graph_compute(graph)
        np.testing.assert_array_equal(sched.numpy(graph.outputs[0]), alone(graph))
    devices.check_guards(*fakes)
    sched.free()
    for b in sched.backends:
        b.free()


def test_pipelining_lets_the_user_go_on_B4():
    """Four runs are submitted before the first ended; inputs may be overwritten as soon as a run was submitted."""
    fake = devices.Fake("A", delay=5e-3)
    sched, (a, c) = world(fake, parallel=True)
    assert sched.n_copies == 4
    ctx = gg.Context()
    w = weight(ctx, a, "w")
    x = ctx.new_tensor(gg.F32, (8, 8), "x")
    sums = weight(ctx, a, "sums")
    sums.buffer.set_usage(gg.USAGE_ANY)
    gg.set_input(x)
    graph = gg.Graph(gg.add_inplace(sums, gg.mul_mat(w, x)))
    sched.alloc_graph(graph)
    w.set(np.eye(8))
    sums.set(np.zeros((8, 8)))
    x.set(np.zeros((8, 8)))
    sched.graph_compute(graph)
    total, gate, opened = np.zeros((8, 8), np.float32), threading.Event(), []
    sched.backends[0].submit(lambda: opened.append(gate.wait(30)))      # the stream stands still meanwhile
    for _ in range(4):
        values = np.round(array(8, 8) * 8)
        x.set(values)
        total += values
        sched.graph_compute_async(graph)
    assert not opened
    gate.set()
    sched.synchronize()
    assert opened == [True]
    np.testing.assert_array_equal(sums.numpy(), total)
    sched.free()


def test_async_errors_come_out_once_and_the_scheduler_lives_on():
    fake = devices.Fake("A", delay=1e-4)
    sched, bufts = world(fake)
    graph = llama_like(bufts)[0]
    fill(graph)
    sched.alloc_graph(graph)
    gpu = sched.backends[0]
    gpu.submit(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        sched.graph_compute(graph)
    sched.graph_compute(graph)
    np.testing.assert_array_equal(sched.numpy(graph.outputs[0]), alone(graph))


# ---------------------------------------------------------------- callbacks
def test_eval_callback_order_and_data_A14_09_A14_10():
    sched, (a, c) = world(devices.Fake("A"))
    graph = two_layers(a, c)
    sched.alloc_graph(graph)
    fill(graph)
    calls = []

    def callback(t, ask):
        calls.append((t.name, ask))
        if not ask:
            values = t.numpy()
            assert np.isfinite(values).all() and sched._run.where(t) is not None
        return t.name in ("hm", "y")
    sched.set_eval_callback(callback)
    sched.graph_compute(graph)
    assert calls == [("h", True), ("hm", True), ("hm", False), ("s", True), ("y", True), ("y", False), ("ym", True),
                     ("out", True)]
    want = sched.numpy(graph.outputs[0])
    sched.set_eval_callback(None)
    sched.graph_compute(graph)
    np.testing.assert_array_equal(sched.numpy(graph.outputs[0]), want)
    with pytest.raises(gg.TypeMismatch, match="callback must be callable, got 3"):
        sched.set_eval_callback(3)


def test_false_from_the_callback_cancels_everything_E3():
    fake = devices.Fake("A")
    sched, (a, c) = world(fake)
    graph = two_layers(a, c)
    sched.alloc_graph(graph)
    fill(graph)
    seen = []
    sched.set_eval_callback(lambda t, ask: seen.append(t.name) or (ask and t.name == "hm"))
    with pytest.raises(gg.Cancelled, match="hm"):
        sched.graph_compute(graph)
    assert seen == ["h", "hm", "hm"], "ggml would go on with the next split"
    sched.set_eval_callback(lambda t, ask: 1 / 0)
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        sched.graph_compute(graph)
    sched.set_eval_callback(None)
    sched.graph_compute(graph)
    np.testing.assert_array_equal(sched.numpy(graph.outputs[0]), alone(graph))


def test_the_abort_callback_of_a_backend_cancels_a_scheduled_run():
    sched, (a, c) = world(devices.Fake("A"))
    ctx = gg.Context()
    y = x = gg.from_numpy(ctx, np.ones((1000, 1000), np.float32))
    for _ in range(300):
        y = gg.add(y, x)
    graph = gg.Graph(y)
    sched.graph_compute(graph)
    sched.backends[1].abort_callback = lambda: True
    with pytest.raises(gg.Cancelled, match="cancelled by the abort callback"):
        sched.graph_compute(graph)
    sched.backends[1].abort_callback = None
    sched.graph_compute(graph)
    assert (sched.numpy(y) == 301).all()
