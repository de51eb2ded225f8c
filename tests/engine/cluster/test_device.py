"""Remote devices: the contract of devices over all kinds of connections, what crosses, random work against the CPU."""
import gc

import numpy as np
import pytest
from helpers import device_contract as contract
from helpers import sched_graphs
from helpers.clusters import of_processes, scheduler, step_of, workers
from helpers.device_contract import floats, on
from helpers.schedulers import RULES, draw_places

import ggjit as gg
from ggjit.cluster.peer import Peer
from ggjit.cluster.protocol import FRAME_NBYTES, MAX_GRAPHS

IN_THIS_PROCESS = ["inproc", "tcp", "tls"]
counted = pytest.mark.parametrize("cluster", IN_THIS_PROCESS, indirect=True)       # by workers that can be looked into


@pytest.fixture(scope="module", params=[*IN_THIS_PROCESS, "processes"])
def cluster(request, tmp_path_factory):
    if request.param == "processes":
        with of_processes() as made:
            yield made
        return
    certs = tmp_path_factory.mktemp("tls") / "certs"
    if request.param == "tls":
        gg.cluster.make_certificates(certs)
    with workers(request.param, tls=certs) as made:
        yield made


@pytest.fixture(scope="module")
def inproc():
    with workers() as made:
        yield made


@pytest.fixture
def a(cluster):
    return cluster.devices[0].init_backend()


# ---------------------------------------------------------------- the contract
def test_bytes_in_and_out(a):
    contract.bytes_in_and_out(a)


def test_copies_between_all_kinds_of_memory(cluster, a):
    contract.copies_between_all_kinds_of_memory(a, cluster.devices[1].init_backend(), gg.init_backend("CPU"))


def test_asynchronous_slots(cluster, a):
    contract.asynchronous_slots_keep_the_streams_order(a)
    for second in cluster.devices:
        contract.asynchronous_copies_order_both_streams(a, second.init_backend())


def test_events(cluster, a):
    contract.events(a, cluster.devices[0].init_backend())
    b = cluster.devices[1].init_backend()
    event = gg.event_new(a.device)
    gg.event_wait(b, event)                         # never recorded: reached
    gg.event_record(event, a)
    for other in (b, gg.init_backend("CPU")):       # streams of other devices
        gg.event_wait(other, event)


@pytest.mark.parametrize("bad", [-1, 5])
def test_a_bad_index_is_reported_and_the_next_run_is_clean(a, bad):
    contract.a_bad_index_is_reported_and_the_next_run_is_clean(a, bad)


def test_graphs(a):
    contract.graphs_follow_memory_that_moved(a)
    contract.what_has_no_kernel_is_refused(a)
    contract.inputs_in_host_memory_come_through_a_scheduler(a)


def test_props_and_buffer_types(cluster, a):
    p, buft = a.device.props, a.default_buffer_type
    assert p["type"] == "gpu" and p["async"] and p["events"] and p["name"] == "worker0"
    assert not p["buffer_from_host_ptr"] and not p["mmap_support"]
    assert not buft.is_host() and buft.alignment() >= 16 and a.supports_buft(buft)
    assert not cluster.devices[1].supports_buft(buft) and not gg.init_backend("CPU").supports_buft(buft)
    gc.collect()                                    # of other tests
    free, total = a.device.memory()
    buf = a.alloc_buffer(1 << 20)
    assert a.device.memory() == (free - (1 << 20), total)
    del buf
    gc.collect()
    assert a.device.memory() == (free, total)
    assert "worker0" in repr(cluster) or a.device.address in repr(cluster)


@pytest.mark.parametrize("nbytes", [0, 1, 64 << 10, (64 << 10) + 1, FRAME_NBYTES + 4, 3 * FRAME_NBYTES + 12])
def test_writes_and_reads_of_all_sizes(a, nbytes):
    x = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    t = on(a, gg.I8, (max(nbytes, 1),))
    t.set_bytes(x)
    x_before = x.copy()
    x[:] = 0                                        # the caller's array is free again
    assert t.bytes(0, nbytes) == x_before.tobytes()


# ---------------------------------------------------------------- what crosses
@counted
def test_a_step_is_one_message_and_a_graph_is_sent_once(cluster, a):
    counters, stream = cluster.servers[0].machine.counters, a.device.stream
    step = step_of(a)
    want = [step(floats(2, 16)) for _ in range(2)]
    before, n, n_out, n_in = dict(counters), stream.n_messages, stream.n_bytes_out, stream.n_bytes_in
    for _ in range(10):
        step(floats(2, 16))
    assert stream.n_messages - n == 10 and counters["messages"] - before["messages"] == 10
    assert counters["graphs"] == before["graphs"] and counters["runs"] - before["runs"] == 10
    inputs = outputs = want[0].nbytes
    assert stream.n_bytes_out - n_out < 10 * (inputs + 1024) and stream.n_bytes_in - n_in == 10 * outputs


def test_results_that_came_ahead_are_those_of_the_last_run(a):
    x = on(a, gg.F32, (8,))
    graph = gg.Graph(y := gg.sqr(x))
    allocator = gg.GraphAllocator(a)
    allocator.alloc_graph(graph)
    for _ in range(3):
        x.set(values := floats(8))
        a.graph_compute(graph)
        np.testing.assert_array_equal(y.numpy(), values * values)
    x.set(3 * values)                               # later writes are not passed over, and do not change a result
    np.testing.assert_array_equal(x.numpy(), 3 * values)
    np.testing.assert_array_equal(y.numpy(), values * values)
    gg.tensor_memset(x, 0)
    a.graph_compute(graph)
    assert not x.numpy().any() and not y.numpy().any() and allocator.buffer_size()


def test_the_graphs_used_last_are_kept(inproc):
    a, counters = inproc.devices[0].init_backend(), inproc.servers[0].machine.counters
    x = on(a, gg.F32, (4,), floats(4))
    graphs = [gg.Graph(gg.scale(x, float(k))) for k in range(MAX_GRAPHS + 1)]
    allocators = [gg.GraphAllocator(a) for _ in graphs]
    for graph, allocator in zip(graphs, allocators, strict=True):
        allocator.alloc_graph(graph)
    before = counters["graphs"]
    for graph in [*graphs, *graphs[2:], graphs[0], graphs[-1]]:         # the first one was dropped, and is sent again
        a.graph_compute(graph)
    a.synchronize()
    assert counters["graphs"] - before == len(graphs) + 1
    np.testing.assert_array_equal(graphs[0].outputs[0].numpy(), 0 * x.numpy())
    n = len(a.device.graphs)
    del allocators, allocator, graph, graphs
    gc.collect()
    a.device.memory()                               # arenas are gone, and their graphs
    assert len(a.device.graphs) < n


def test_memory_is_given_back(inproc):
    device, machine = inproc.devices[1], inproc.servers[1].machine
    gc.collect()                                    # of other tests
    device.memory()
    before = machine.used_nbytes
    step = step_of(device.init_backend())
    step(floats(2, 16))
    assert machine.used_nbytes > before
    del step
    gc.collect()
    device.memory()
    assert machine.used_nbytes == before


def test_a_worker_without_memory_says_so(inproc):
    a = inproc.devices[0].init_backend()
    with pytest.raises(gg.OutOfMemory, match="lends 268,435,456 bytes.*--memory.*on worker0"):
        a.alloc_buffer(1 << 29)
    assert a.alloc_buffer(64).size == 64


def test_tensors_in_other_memory_are_refused(inproc):
    a, b = (d.init_backend() for d in inproc.devices)
    y = gg.neg(on(a, gg.F32, (4,), floats(4)))
    graph = gg.Graph(y)
    gg.GraphAllocator(b).alloc_graph(graph)
    with pytest.raises(gg.NotSupported, match="worker1 cannot reach; use a Scheduler"):
        b.graph_compute(graph)
    with pytest.raises(gg.TypeMismatch, match="takes a Graph"):
        a.graph_compute(y)
    with pytest.raises(gg.ParamError, match="unknown backend parameter"):
        inproc.devices[0].init_backend("n_threads=2")


def test_results_whose_memory_another_graph_used_are_refused(inproc):
    a = inproc.devices[0].init_backend()
    x, allocator = on(a, gg.F32, (64,), floats(64)), gg.GraphAllocator(a)
    graphs = [gg.Graph(gg.neg(x)), gg.Graph(gg.sqr(x))]
    for graph in graphs:
        allocator.alloc_graph(graph)
        a.graph_compute(graph)
    np.testing.assert_array_equal(graphs[1].outputs[0].numpy(), x.numpy() ** 2)
    with pytest.raises(gg.GgjitError, match="another graph of the same GraphAllocator"):
        graphs[0].outputs[0].numpy()


# ---------------------------------------------------------------- from worker to worker
@counted
@pytest.mark.parametrize("n", [1, 1000, 2 * FRAME_NBYTES // 4 + 3])
def test_copies_go_from_worker_to_worker(cluster, a, n):
    b, x = cluster.devices[1].init_backend(), floats(n)
    s, d = on(a, gg.F32, (n,), x), on(b, gg.F32, (n,), 0 * x)
    gg.tensor_copy(s, d)                            # the first one looks whether they reach each other
    d.numpy()
    crossed = [dev.stream.n_bytes_in + dev.stream.n_bytes_out for dev in cluster.devices]
    fetched = cluster.servers[0].machine.counters["fetched"]
    for shift in range(2):
        gg.tensor_copy(s, d)
        gg.tensor_memset(s, shift)                  # after the copy has read it
        cluster.devices[1].flush()
        b.synchronize()
    assert cluster.servers[0].machine.counters["fetched"] - fetched == 2 * x.nbytes
    after = [dev.stream.n_bytes_in + dev.stream.n_bytes_out for dev in cluster.devices]
    assert sum(after) - sum(crossed) < 400 * (2 + 2 * (x.nbytes // FRAME_NBYTES))
    np.testing.assert_array_equal(d.numpy(), 0 * x)
    s.set(x)
    gg.tensor_copy(s, d)
    np.testing.assert_array_equal(d.numpy(), x)
    assert not cluster.servers[0].machine.send_queues[a.device.stream.secret]._held


def test_two_stages_send_one_message_each_and_nothing_by_way_of_the_driver(cluster, a):
    b = cluster.devices[1].init_backend()
    sched = gg.Scheduler([a, b, gg.init_backend("CPU:n_threads=1")])
    shift, factor, streams = floats(512), floats(512), [d.stream for d in cluster.devices]
    x, u, v = on(a, gg.F32, (512,)), on(a, gg.F32, (512,), shift), on(b, gg.F32, (512,), factor)
    graph = gg.Graph(y := gg.mul(gg.add(x, u), v))
    for t in (u, v):
        t.buffer.set_usage(gg.USAGE_WEIGHTS)
    for k in range(8):
        if k == 3:
            before = [(s.n_messages, s.n_bytes_out, s.n_bytes_in) for s in streams]
        x.set(values := floats(512))
        sched.graph_compute(graph)
        np.testing.assert_array_equal(sched.numpy(y), (values + shift) * factor)
    now = [(s.n_messages, s.n_bytes_out, s.n_bytes_in) for s in streams]
    (n_a, out_a, in_a), (n_b, out_b, in_b) = np.subtract(now, before).tolist()
    assert (n_a, n_b) == (5, 5) and in_a == 0 and in_b == 5 * values.nbytes
    assert out_a < 5 * (values.nbytes + 400) and out_b < 5 * 400


def test_workers_that_do_not_reach_each_other_copy_by_way_of_the_driver(inproc, monkeypatch):
    a, b = (d.init_backend() for d in inproc.devices)

    def unreachable(*args):
        raise OSError("no answer")
    monkeypatch.setattr(Peer, "_open", unreachable)
    for device in inproc.devices:
        device.reopen()
    s, d = on(a, gg.F32, (8,), x := floats(8)), on(b, gg.F32, (8,))
    gg.tensor_copy(s, d)
    np.testing.assert_array_equal(d.numpy(), x)


# ---------------------------------------------------------------- random work
def test_random_operations_against_an_oracle(inproc):
    """Two buffers on each of two workers, and what an array would hold."""
    rng = np.random.default_rng(9)
    n, leaves, arrays = 4096, [], []
    for device in inproc.devices:
        for _ in range(2):
            leaves.append(on(device.init_backend(), gg.I8, (n,), np.zeros(n, np.int8)))
            arrays.append(np.zeros(n, np.uint8))
    for k in range(10_000):
        i, j = rng.integers(len(leaves), size=2)
        lo, hi = sorted(rng.integers(0, n + 1, size=2).tolist())
        kind = int(rng.integers(100))
        if kind < 55:
            data = rng.integers(0, 256, hi - lo, np.uint8)
            leaves[i].set_bytes(data, lo)
            arrays[i][lo:hi] = data
        elif kind < 80:
            gg.tensor_memset(leaves[i], kind, lo, hi - lo)
            arrays[i][lo:hi] = kind
        elif kind < 98:
            if i // 2 == j // 2 or kind == 97:      # on one worker; across, by way of the driver
                gg.tensor_copy(leaves[i], leaves[j])
                arrays[j][:] = arrays[i]
        else:
            assert leaves[i].bytes(lo, hi - lo) == arrays[i][lo:hi].tobytes(), k
    for t, want in zip(leaves, arrays, strict=True):
        assert t.bytes() == want.tobytes()


@pytest.mark.parametrize("seed", range(0, 40, 8))
def test_random_graphs_on_two_workers_and_the_cpu(inproc, seed):
    """The same bits as on one CPU; leaves anywhere, views, work in place, caches."""
    rng, cpu = np.random.default_rng(seed), gg.init_backend("CPU:n_threads=1")
    alone = sched_graphs.random_graph(seed, lambda ctx, *kinds: gg.alloc_ctx_tensors(ctx, cpu))
    gg.GraphAllocator(cpu).alloc_graph(alone.graph)
    plan = cpu.graph_plan_create(alone.graph)
    sched = scheduler(inproc, rules=RULES[int(rng.integers(3))], parallel=bool(rng.random() < 0.3),
                      motion=bool(rng.random() < 0.3), keep_weights=bool(rng.random() < 0.3))
    drawn = sched_graphs.random_graph(seed, draw_places(rng, sched.support.own_bufts))
    sched.alloc_graph(drawn.graph)
    for run in range(3):
        changed = None if run == 0 else [i for i in range(len(drawn.leaves)) if rng.random() < 0.4]
        for d in (alone, drawn):
            d.fill(100 * seed + run, only=None if changed is None else [d.leaves[i] for i in changed])
        plan.compute()
        sched.graph_compute(drawn.graph)
        want = [plan.numpy(t).tobytes() for t in alone.graph.outputs] + [t.bytes() for t in alone.caches]
        got = [sched.numpy(t).tobytes() for t in drawn.graph.outputs] + [t.bytes() for t in drawn.caches]
        assert got == want, f"run {run}\n{sched.explain()}"
    sched.free()
