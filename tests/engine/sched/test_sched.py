"""The life of a scheduler: reserve, compute, reset, bad input.  Rules: test_sched_rules.py."""
import ast
import gc
import pathlib
import threading

import numpy as np
import pytest
from helpers import devices
from helpers.schedulers import alone, fill, llama_like, two_layers, weight, world

import ggjit as gg
from ggjit.alloc.ggml.problem import GraphError
from ggjit.core.table import TABLE
from ggjit.ops.core.record import OP
from ggjit.sched import scheduler


# ---------------------------------------------------------------- life
def test_reserve_compute_and_sizes_A12_02_A14_02_A14_04_A14_05_A14_12_A14_16():
    sched, (a, c) = world(devices.Fake("A"))
    graph = two_layers(a, c)
    gpu, cpu = sched.backends
    assert (sched.n_splits, sched.n_copies, sched.n_backends, sched.buffer_size(gpu)) == (0, 1, 2, 0)
    assert sched.buffer_type(gpu) is a
    sizes = sched.reserve_size(graph)
    assert sum(sched.reserve_size(graph, "best")) <= sum(sizes)
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
    sched.graph_compute(other := llama_like(bufts)[0])
    with pytest.raises(gg.Overwritten, match="another graph of the same Scheduler"):
        sched.numpy(graph.outputs[0])
    leaf = graph.leafs[0]
    np.testing.assert_array_equal(sched.numpy(leaf), leaf.numpy())
    assert sched.numpy(other.outputs[0]).shape == other.outputs[0].shape


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


# ---------------------------------------------------------------- bad input
@pytest.mark.parametrize("make,error,match", [
    (lambda c: gg.Scheduler([]), gg.ParamError, "at least one"),
    (lambda c: gg.Scheduler([c, c]), gg.ParamError, "twice"),
    (lambda c: gg.Scheduler(["CPU"]), gg.ParamError, "takes backends"),
    (lambda c: gg.Scheduler([c], rules="2025"), gg.ParamError, "2023, 2024, modern"),
    (lambda c: gg.Scheduler([c], planner="ggml-2023"), gg.ParamError, "ggml or best"),
    (lambda c: gg.Scheduler([c], time_limit=-1), gg.ParamError, "time_limit"),
    (lambda c: gg.Scheduler([c], work="yes"), gg.TypeMismatch, "work is True or False, got 'yes'"),
    (lambda c: gg.Scheduler([c], parallel=2), gg.TypeMismatch, "parallel is True or False, got 2"),
    (lambda c: gg.Scheduler([c], motion=None), gg.TypeMismatch, "motion is True or False"),
    (lambda c: gg.Scheduler([c], op_offload="no"), gg.TypeMismatch, "op_offload is True or False"),
    (lambda c: gg.Scheduler([c], keep_weights=1.0), gg.TypeMismatch, "keep_weights is True or False"),
    (lambda c: setattr(gg.Scheduler([c]), "work", "yes"), gg.TypeMismatch, "work is True or False"),
    (lambda c: setattr(gg.Scheduler([c]), "planner", "worst"), gg.ParamError, "ggml or best"),
    (lambda c: gg.GraphAllocator(c, work="yes"), gg.TypeMismatch, "work is True or False"),
    (lambda c: gg.Scheduler([c]).reserve_size(None, "ggml-2023"), gg.ParamError, "ggml or best"),
    (lambda c: gg.Scheduler([c], bufts=[]), gg.ParamError, "0 buffer types"),
    (lambda c: gg.Scheduler([c], bufts=[3]), gg.ParamError, "not a buffer type"),
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
    vars(graph).update(leafs=graph.leafs[:-1], leaf_ids=graph.leaf_ids[:-1])        # no caller can
    with pytest.raises(GraphError, match="neither in the graph nor has memory"):
        sched.graph_compute(graph)
    good = two_layers(a, c)
    sched.graph_compute(good)
    good.leafs[0].buffer.free()
    with pytest.raises(gg.StaleHandle, match="the buffer of w2 .* was freed"):
        sched.graph_compute(good)
    other = two_layers(a, c)
    sched.graph_compute(other)
    other.nodes[0].ctx.free()
    for call in (sched.graph_compute, sched.split_graph, sched.reserve):
        with pytest.raises(gg.StaleHandle, match="Context was freed"):
            call(other)
    with pytest.raises(gg.TypeMismatch, match="got list"):
        sched.graph_compute(list(other.nodes))


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
    with pytest.raises(gg.OutOfMemory, match="65536 bytes do not fit"):
        sched.graph_compute(big)
    assert small.used == used and [sched.buffer_size(b) for b in sched.backends] == held
    sched.graph_compute(graphs[0])
    np.testing.assert_array_equal(sched.numpy(graphs[0].outputs[0]), alone(graphs[0]))


def test_the_trip_goes_one_way():
    """No file beside the Scheduler's calls what is private to it: values are handed on."""
    folder = pathlib.Path(scheduler.__file__).parent
    private = {n.name for c in ast.parse((folder / "scheduler.py").read_text(encoding="utf-8")).body
               if isinstance(c, ast.ClassDef) and c.name == "Scheduler" for n in c.body
               if isinstance(n, ast.FunctionDef) and n.name.startswith("_") and not n.name.endswith("__")}
    assert len(private) > 5
    for path in folder.glob("*.py"):
        if path.name == "scheduler.py":
            continue
        for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            own = isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id in ("self", "cls")
            if isinstance(n, ast.Attribute) and n.attr in private:
                assert own, f"{path.name} line {n.lineno}: {ast.unparse(n)}"
            assert not (isinstance(n, ast.ImportFrom) and n.module == "ggjit.sched.scheduler"), path.name
