"""The scheduler's life: reserve, compute, copies, callbacks, errors, threads.  Rules: test_sched_rules.py."""
import gc
import threading
import time

import devices
import numpy as np
import pytest
from sched_graphs import random_graph
from test_sched_rules import draw_places, draw_world, two_layers, weight, world

import ggjit as gg
from ggjit.alloc.graph_alloc import GraphError
from ggjit.ops.record import OP
from ggjit.sched_explain import Explanation
from ggjit.table import TABLE

RNG = np.random.default_rng(5)


def array(*shape):
    return RNG.standard_normal(shape, dtype=np.float32)


def fill(graph):
    for t in graph.leafs:
        t.set(array(*reversed([n for n in t.ne if n > 1] or [1])).reshape(t.shape))


def alone(graph):
    """What one CPU computes from the same leaves."""
    cpu = gg.init_backend("CPU:n_threads=1")
    copy = gg.graph_copy(cpu, graph)
    cpu.graph_compute(copy.graph)
    values = [copy.of(t).numpy() for t in graph.outputs]
    copy.free()
    return values[0]


def llama_like(bufts, n_layers=6, n=32):
    """Layers over three devices; every layer reads the mask and the positions; inputs have memory on the last."""
    ctx = gg.Context()
    x, mask, pos = (ctx.new_tensor(gg.F32, (n, n), name) for name in ("x", "mask", "pos"))
    gg.alloc_ctx_tensors(ctx, bufts[-1])
    y = x
    for layer in range(n_layers):
        where = bufts[layer * len(bufts) // n_layers]
        w = [weight(ctx, where, f"w{layer}.{i}", (n, n)) for i in range(2)]
        h = gg.add(gg.mul_mat(w[0], gg.rms_norm(y, 1e-5)), mask)
        y = gg.add(y, gg.mul(gg.mul_mat(w[1], gg.soft_max(h)), pos))
    return gg.Graph(y), x, mask, pos


# ---------------------------------------------------------------- life
def test_reserve_compute_and_sizes_A12_02_A14_02_A14_04_A14_05_A14_12_A14_16():
    sched, (a, c) = world(devices.Fake("A"))
    graph = two_layers(a, c)
    gpu, cpu = sched.backends
    assert (sched.n_splits, sched.n_copies, sched.n_backends, sched.buffer_size(gpu)) == (0, 1, 2, 0)
    assert sched.buffer_type(gpu) is a
    sizes = sched.reserve_size(graph)
    assert sched.buffer_size(gpu) == 0 and min(sizes) > 0
    sched.reserve(graph)
    assert [sched.buffer_size(b) for b in sched.backends] == sizes and sched.n_splits == 2
    sched.alloc_graph(graph)
    fill(graph)
    sched.graph_compute(graph)
    np.testing.assert_array_equal(sched.numpy(graph.outputs[0]), alone(graph))
    np.testing.assert_array_equal(graph.outputs[0].numpy(), alone(graph))
    assert [sched.buffer_size(b) for b in sched.backends] == sizes, "nothing grew after reserve"
    sched.reset()
    sched.reset()
    assert sched.n_splits == 0 and next(t for t in graph.leafs if t.name == "x").buffer is None
    sched.graph_compute(graph)
    sched.free()
    sched.free()


def test_the_users_graph_is_never_edited_A13_14():
    sched, (a, c) = world(devices.Fake("A"))
    graph = two_layers(a, c)
    nodes = TABLE.words[graph.node_ids].copy()
    sched.alloc_graph(graph)
    fill(graph)
    for _ in range(3):
        sched.graph_compute(graph)
        np.testing.assert_array_equal(sched.numpy(graph.outputs[0]), alone(graph))
    sched.reset()
    assert (TABLE.words[graph.node_ids] == nodes).all() and graph.nodes[0].src[0].name == "w1"


def test_one_graph_on_two_schedulers_and_after_reset():
    one, (a, c) = world(devices.Fake("A"))
    two, _ = world(devices.Fake("B"))
    graph = two_layers(a, c)
    one.alloc_graph(graph)
    fill(graph)
    want = alone(graph)
    for sched in (one, two, one, two):
        sched.graph_compute(graph)
        np.testing.assert_array_equal(sched.numpy(graph.outputs[0]), want)
    values = [t.numpy() for t in graph.leafs]
    one.reset()
    assert any(t.buffer is None for t in graph.leafs), "reset takes back the leaves it placed"
    one.alloc_graph(graph)
    for t, v in zip(graph.leafs, values, strict=True):
        t.set(v)
    for sched in (two, one):
        sched.graph_compute(graph)
        np.testing.assert_array_equal(sched.numpy(graph.outputs[0]), want)


def test_two_threads_with_two_schedulers_share_a_graph():
    graph, failed = None, []
    scheds = []
    for name in "AB":
        sched, bufts = world(devices.Fake(name))
        graph = graph or two_layers(*bufts)
        scheds.append(sched)
    scheds[0].alloc_graph(graph)
    fill(graph)
    want = alone(graph)

    def work(sched):
        for _ in range(50):
            sched.graph_compute(graph)
            if sched.numpy(graph.outputs[0]).tobytes() != want.tobytes():
                failed.append(sched)
    threads = [threading.Thread(target=work, args=(s,)) for s in scheds]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed


def test_two_graphs_on_one_scheduler_take_turns():
    sched, bufts = world(devices.Fake("A"))
    graphs = [llama_like(bufts, n)[0] for n in (2, 6)]
    for g in graphs:
        fill(g)
    wants = [alone(g) for g in graphs]
    for _ in range(3):                                  # the larger one makes the buffers grow: the first must notice
        for g, want in zip(graphs, wants, strict=True):
            sched.graph_compute(g)
            np.testing.assert_array_equal(sched.numpy(g.outputs[0]), want)
    with pytest.raises(gg.Overwritten, match="another graph"):
        graphs[0].outputs[0].numpy()
    sched.free()
    with pytest.raises(gg.StaleHandle, match="was freed"):
        sched.graph_compute(graphs[0])


def test_topology_decides_whether_a_plan_is_reused():
    sched, bufts = world(devices.Fake("A"))
    graph, x, mask, _ = llama_like(bufts)
    fill(graph)
    sched.graph_compute(graph)
    run = sched._run
    sched.graph_compute(graph)
    assert sched._run is run
    with x.ctx:
        other = gg.Graph(gg.silu(graph.outputs[0]))
    sched.graph_compute(other)
    np.testing.assert_array_equal(sched.numpy(other.outputs[0]), alone(other))
    sched.set_tensor_backend(graph.nodes[3], sched.backends[1])
    sched.graph_compute(graph)
    assert sched._run is not run and sched.get_tensor_backend(graph.nodes[3]) is sched.backends[1]


def test_overwritten_results_say_so():
    sched, bufts = world(devices.Fake("A"))
    graph = llama_like(bufts)[0]
    fill(graph)
    sched.graph_compute(graph)
    with pytest.raises(gg.Overwritten, match="set_output"):
        sched.numpy(graph.nodes[0])
    with pytest.raises(gg.NotAllocated, match="not computed"):
        sched.numpy(gg.Context().new_tensor(gg.F32, (2,)))


def test_schedulers_leave_nothing_behind_A14_03():
    gc.collect()
    device = devices.Fake("A")
    alive = TABLE.n_alive()
    for _ in range(3):
        sched, bufts = world(device)
        graph = two_layers(*bufts)
        sched.graph_compute(graph)
        weights = [t.buffer for t in graph.leafs if t.name in ("w1", "w2")]
        sched.free()
        for b in weights:
            b.free()
        del graph, sched, weights
        device.asked.clear()
    gc.collect()
    assert TABLE.n_alive() <= alive + 9 and device.used == 0


def test_graphs_that_are_gone_take_their_runs_along():
    sched, bufts = world(devices.Fake("A"))
    for _ in range(10):
        graph = llama_like(bufts, 2)[0]
        fill(graph)
        sched.graph_compute(graph)
    del graph
    gc.collect()
    assert len(sched._runs) <= 1


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
    total, t0 = np.zeros((8, 8), np.float32), time.perf_counter()
    for _ in range(4):
        values = np.round(array(8, 8) * 8)
        x.set(values)
        total += values
        sched.graph_compute_async(graph)
    submitted = time.perf_counter() - t0
    sched.synchronize()
    np.testing.assert_array_equal(sums.numpy(), total)
    assert submitted < time.perf_counter() - t0
    sched.free()


def test_async_errors_come_out_once_and_the_scheduler_lives_on():
    fake = devices.Fake("A", delay=1e-4)
    sched, bufts = world(fake)
    graph = llama_like(bufts)[0]
    fill(graph)
    sched.alloc_graph(graph)
    gpu = sched.backends[0]
    gpu.submit(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
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
    with pytest.raises(gg.TypeMismatch):
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
    with pytest.raises(ZeroDivisionError):
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
    with pytest.raises(gg.Cancelled):
        sched.graph_compute(graph)
    sched.backends[1].abort_callback = None
    sched.graph_compute(graph)
    assert (sched.numpy(y) == 301).all()


# ---------------------------------------------------------------- bad input
@pytest.mark.parametrize("make,error,match", [
    (lambda c: gg.Scheduler([]), gg.ParamError, "at least one"),
    (lambda c: gg.Scheduler([c, c]), gg.ParamError, "twice"),
    (lambda c: gg.Scheduler(["CPU"]), gg.ParamError, "takes backends"),
    (lambda c: gg.Scheduler([c], rules="2025"), gg.ParamError, "2023, 2024, modern"),
    (lambda c: gg.Scheduler([c], bufts=[]), gg.ParamError, "0 buffer types"),
    (lambda c: gg.Scheduler([c], bufts=[3]), gg.ParamError, "no buffer type"),
    (lambda c: gg.Scheduler([c], bufts=[devices.Fake("A").buffer_type()]), gg.ParamError, "cannot compute in")])
def test_bad_schedulers_A1_03_B4(make, error, match):
    with pytest.raises(error, match=match):
        make(gg.init_backend("CPU"))


def test_an_op_nobody_supports_and_impossible_pins():
    gpu = devices.Fake("A", ops={OP.ADD}).init_backend()
    sched = gg.Scheduler([gpu])
    ctx = gg.Context()
    a = ctx.new_tensor(gg.F32, (8, 8), "a")
    graph = gg.Graph(gg.silu(gg.add(a, a)))
    with pytest.raises(gg.NotSupported, match=r"no backend \(A\) supports"):
        sched.graph_compute(graph)
    ok = gg.Graph(gg.add(a, a))
    sched.graph_compute(ok)
    sched, (b, c) = world(devices.Fake("A", ops={OP.ADD}))
    sched.set_tensor_backend(graph.nodes[1], sched.backends[0])
    with pytest.raises(gg.NotSupported, match="pinned to A"):
        sched.graph_compute(graph)
    sched.reset()
    sched.graph_compute(graph)


def test_memory_only_others_can_write():
    sched, (a, c) = world(devices.Fake("A", ops={OP.ADD}))
    cache = weight(gg.Context(), a, "cache")
    with pytest.raises(gg.NotSupported, match="writes into cache"):
        sched.split_graph(gg.Graph(gg.scale_inplace(cache, 2.0)))


def test_foreign_and_freed_tensors():
    sched, (a, c) = world(devices.Fake("A"))
    graph = two_layers(a, c)
    graph.leafs = graph.leafs[:-1]
    graph.leaf_ids = graph.leaf_ids[:-1]
    with pytest.raises(GraphError, match="neither in the graph nor has memory"):
        sched.graph_compute(graph)
    good = two_layers(a, c)
    sched.graph_compute(good)
    good.leafs[0].buffer.free()
    with pytest.raises(gg.StaleHandle):
        sched.graph_compute(good)


@pytest.mark.parametrize("slot", ["alloc_buffer", "supports_op", "graph_compute"])
def test_a_device_that_raises_leaves_the_scheduler_usable(slot):
    fake = devices.Fake("A")
    sched, bufts = world(fake)
    graph = llama_like(bufts)[0]
    fill(graph)
    fake.fail.add(slot)
    for _ in range(2):
        with pytest.raises(devices.DeviceFailed, match=slot):
            sched.graph_compute(graph)
    fake.fail.clear()
    sched.graph_compute(graph)
    np.testing.assert_array_equal(sched.numpy(graph.outputs[0]), alone(graph))
    devices.check_guards(fake)


def test_out_of_memory_in_the_middle_of_allocation():
    small, large = devices.Fake("A", memory=1 << 16), devices.Fake("B")
    sched, bufts = world(small, large)
    graphs = [llama_like([bufts[1], bufts[0], bufts[2]], n)[0] for n in (3, 6)]
    for g in graphs:
        fill(g)
    sched.graph_compute(graphs[0])
    used = small.used
    small.memory_limit = used
    big = llama_like([bufts[1]] * 3, 30, 64)[0]
    fill(big)
    sched.set_tensor_backend(big.nodes[5], sched.backends[0])
    held = [sched.buffer_size(b) for b in sched.backends]
    with pytest.raises(gg.OutOfMemory):
        sched.graph_compute(big)
    assert small.used == used and [sched.buffer_size(b) for b in sched.backends] == held
    sched.graph_compute(graphs[0])
    np.testing.assert_array_equal(sched.numpy(graphs[0].outputs[0]), alone(graphs[0]))


# ---------------------------------------------------------------- what devices are asked, and explanations
def test_supports_op_is_asked_once_per_signature():
    fakes = [devices.Fake("A"), devices.Fake("B")]
    sched, bufts = world(*fakes)
    graph = llama_like(bufts, 30)[0]
    sched.split_graph(graph)
    asked = len(fakes[0].asked)
    assert asked < 20 < len(graph)
    for _ in range(3):
        sched.split_graph(graph)
    sched.split_graph(llama_like(bufts, 30)[0])
    assert len(fakes[0].asked) == asked


def test_causes_and_explanations_A12_08_A12_09_A13_13_A13_15_A14_08():
    sched, (a, c) = world(devices.Fake("A"))
    graph = two_layers(a, c)
    with pytest.raises(gg.ParamError, match="no graph"):
        sched.explain()
    sched.alloc_graph(graph)
    fill(graph)
    sched.graph_compute(graph)
    sched.graph_compute(graph)
    e = sched.explain()
    assert e.totals == {"rules": "modern", "splits": 2, "copies": 3, "copy_nbytes": 768, "copied_nbytes": 256,
                        "elided_nbytes": 512, "runs": 2}
    assert [(r["name"], r["backend"], r["cause"]) for r in e.rows][:2] == [("h", "A", "1.wgt0"), ("hm", "A", "2.gdn")]
    assert e.copies[0] == {"tensor": "x", "nbytes": 256, "from": "CPU", "to": "A", "split": 0, "kept": True}
    text = str(e)
    assert "## SPLIT #1: CPU # 1 inputs: [s (0K)]" in text and "compute" in text and "1.wgt0" in text
    html, dot = e._repr_html_(), e.dot
    assert html.count("<details>") == 2 and "source 0 is a weight" in html
    assert dot.count("subgraph") == 2 and dot.count("style=dashed") == 3 and dot.endswith("}")
    assert sched._run._copy_handle(0, 0).name == "A#x#0", "copies are named as in ggml"
    assert sched._run.parts[0][0].compute_ns > 0


@pytest.mark.parametrize("rules", ["2023", "2024", "modern"])
def test_motion_never_copies_more_than_the_rules(rules):
    better = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        sched, bufts = draw_world(rng, rules, restricted=True)
        graph = random_graph(seed, draw_places(rng, bufts)).graph
        try:
            sched.split_graph(graph)
        except gg.NotSupported:
            continue
        plain = sched._cut
        sched.motion = True
        sched.split_graph(graph)
        nbytes = [sum(t["nbytes"] for t in Explanation(c, None).copies) for c in (plain, sched._cut)]
        assert nbytes[1] <= nbytes[0], seed
        better += nbytes[1] < nbytes[0]
    assert better >= 5


def test_a_switch_moves_to_the_narrow_place():
    """s is narrow, its repetition z wide; the rules spread A over z, so that z has to be copied to B."""
    found = {}
    for motion in (False, True):
        sched, (a, b, c) = world(devices.Fake("A"), devices.Fake("B"), motion=motion)
        ctx = gg.Context()
        x = weight(ctx, a, "x", (64, 64))
        s = gg.set_name(gg.sum_rows(gg.mul_mat(weight(ctx, a, "w", (64, 64)), x)), "s")
        z = gg.set_name(gg.repeat(s, x), "z")
        graph = gg.Graph(gg.mul_mat(weight(ctx, b, "v", (64, 64)), z))
        sched.alloc_graph(graph)
        fill(graph)
        sched.graph_compute(graph)
        np.testing.assert_array_equal(sched.numpy(graph.outputs[0]), alone(graph))
        found[motion] = sched.get_tensor_backend(z).name, [t.name for t in sched.splits[1].inputs], sched.copied_nbytes
    assert found == {False: ("A", ["z"], 16384), True: ("B", ["s"], 256)}
    assert sched._cut.cause_of(graph.nodes.index(z))[0] == "6.cost"


def test_null_schedules_anything():
    null, cpu = gg.init_backend("NULL"), gg.init_backend("CPU:n_threads=1")
    sched = gg.Scheduler([null, cpu])
    ctx = gg.Context()
    w = weight(ctx, null.default_buffer_type, "w", (1 << 17, 1 << 17))
    x = ctx.new_tensor(gg.F32, (1 << 17, 4), "x")
    gg.set_input(x)
    graph = gg.Graph(gg.silu(gg.mul_mat(w, x)))
    sched.graph_compute(graph)
    assert [r["what"] for r in null.report] == ["compute"] and null.report[0]["ops"] == {"MUL_MAT": 1, "UNARY": 1}
    assert sched.buffer_size(null) >= 4 << 19


# ---------------------------------------------------------------- details backends rely on
def test_buffers_are_told_about_computed_tensors_A3_05():
    fake = devices.Fake("A")
    sched, (a, c) = world(fake)
    graph = two_layers(a, c)
    sched.graph_compute(graph)
    compute, = [b for b in fake.buffers if b.usage == gg.USAGE_COMPUTE]
    assert compute.inits >= 5                           # three nodes, two copies


def test_several_cpu_backends_at_once():
    one, two = gg.init_backend("CPU", n_threads=1), gg.init_backend("CPU", n_threads=2)
    sched = gg.Scheduler([one, two])
    graph = llama_like([one.default_buffer_type, two.default_buffer_type])[0]
    fill(graph)
    for i, t in enumerate(graph.nodes):
        sched.set_tensor_backend(t, (one, two)[i // 5 % 2])
    sched.graph_compute(graph)
    np.testing.assert_array_equal(sched.numpy(graph.outputs[0]), alone(graph))
    assert sched.n_splits > 4 and sched.copied_nbytes == 0, "they share their memory: nothing to copy"
    assert sched.buffer_size(one) == sched.buffer_size(two) > 0


def test_a_private_buffer_type_of_the_cpu_in_a_scheduler():
    cpu = gg.init_backend("CPU:n_threads=1")
    private, = cpu.device.extra_buffer_types()
    fake = devices.Fake("A", host=True)
    sched = gg.Scheduler([fake.init_backend(), cpu])
    ctx = gg.Context()
    w, x = weight(ctx, private, "w"), weight(ctx, cpu.default_buffer_type, "x")
    graph = gg.Graph(gg.silu(gg.mul_mat(w, x)))
    fill(graph)
    sched.graph_compute(graph)
    assert sched.splits[0].backend is cpu, "only the CPU reads its private memory"
    np.testing.assert_array_equal(sched.numpy(graph.outputs[0]), alone(graph))


class Experts(devices.FakeBackend):
    """Computes MUL_MAT_ID with NumPy and looks at what was copied."""

    def graph_compute(self, graph):
        for t in graph.nodes:
            if t.op == OP.MUL_MAT_ID:
                w, x, ids = (s.numpy() for s in t.src)
                self.seen = w
                out = np.stack([[w[ids[i, k]] @ x[i, k] for k in range(ids.shape[1])] for i in range(ids.shape[0])])
                t.set(out)


def moe(n_expert=8, rows=4, width=256, used=((1, 2), (2, 6), (1, 6))):
    """Experts on the host, the op on a device; returns what a test needs."""
    fake = devices.Fake("A", ops=None, offload=lambda t: True)
    fake.supports_op = lambda t: t.op in (OP.NONE, OP.MUL_MAT_ID)
    cpu = gg.init_backend("CPU:n_threads=1")
    backend = Experts(fake)
    sched = gg.Scheduler([backend, cpu])
    ctx = gg.Context()
    w = weight(ctx, cpu.default_buffer_type, "w", (width, rows, n_expert))
    x, ids = ctx.new_tensor(gg.F32, (width, 2, 3), "x"), ctx.new_tensor(gg.I32, (2, 3), "ids")
    gg.alloc_ctx_tensors(ctx, cpu)
    y = ctx.node(OP.MUL_MAT_ID, gg.F32, (rows, 2, 3), (w, x, ids))
    w.set(RNG.integers(-4, 4, (n_expert, rows, width)).astype(np.float32))
    x.set(RNG.integers(-4, 4, (3, 2, width)).astype(np.float32))
    ids.set(np.array(used))
    return sched, backend, gg.Graph(y), w, x, ids


def test_only_the_experts_in_use_are_copied_B4():
    sched, backend, graph, w, x, ids = moe()
    size, pad = w.nb[2], 512
    for used in (((1, 2), (2, 6), (1, 6)), ((7, 7), (7, 7), (0, 7)), ((0, 1), (2, 3), (4, 5))):
        ids.set(np.array(used))
        sched.graph_compute(graph)
        wv, xv = w.numpy(), x.numpy()
        want = np.stack([[wv[e] @ xv[i, k] for k, e in enumerate(row)] for i, row in enumerate(used)])
        np.testing.assert_array_equal(sched.numpy(graph.outputs[0]), want)
        wanted = sorted({e for row in used for e in row})
        assert all((backend.seen[e] == wv[e]).all() for e in wanted)
    sched, backend, graph, w, x, ids = moe()
    sched.graph_compute(graph)
    # experts 1-2 in one piece, 6 in another, each with 512 bytes after it
    assert sched.copied_nbytes == 2 * size + pad + size + pad + x.nbytes + ids.nbytes
    assert np.isnan(backend.seen[4]).all(), "experts 3 (from its 513th byte), 4 and 5 never moved"


def test_expert_ids_are_checked():
    sched, backend, graph, w, x, ids = moe(used=((1, 8), (2, 6), (1, 6)))
    with pytest.raises(gg.IndexRangeError, match="expert id 8 is outside 0..7"):
        sched.graph_compute(graph)
    ids.set(np.zeros((3, 2)).astype(np.int32))
    sched.graph_compute(graph)
