"""The CUDA device in the simulator: memory, streams, events, plans.  Run by test_cuda.py in a process of
its own (NUMBA_ENABLE_CUDASIM=1); streams there do their work only when a thread waits, so a missing wait shows."""
import concurrent.futures
import dataclasses
import gc
import inspect
import time
import types
import weakref

import numpy as np
import pytest
from helpers import cuda_conformance
from helpers import device_contract as contract
from helpers.device_contract import floats, on
from helpers.sample import SEED

import ggjit as gg
from benchmarks import gpu_compile, gpu_estimate, gpu_walk
from ggjit.core.table import TABLE
from ggjit.cuda import simulated_driver as cuda_sim
from ggjit.ops.cuda.compiler import contract as contract_of_the_seam
from ggjit.ops.cuda.compiler import core, simulated, simulator


# ---------------------------------------------------------------- devices
def test_devices_are_found_in_order():
    assert [d.name for d in gg.registry.devices()] == ["CUDA0", "CUDA1", "CPU", "NULL"]
    assert gg.registry.best().name == "CUDA0" and gg.registry.by_type("gpu").name == "CUDA0"
    with pytest.raises(gg.ParamError, match="CUDA9.*CUDA0, CUDA1"):
        gg.init_backend("CUDA9")
    with pytest.raises(gg.ParamError, match="graphs"):
        gg.init_backend("CUDA0:threads=2")


def test_props_and_memory(gpu):
    p = gpu.device.props
    assert p["type"] == "gpu" and p["async"] and p["events"] and p["host_buffer"] and p["device_id"] == "0000:00:00.0"
    free, total = gpu.device.memory()
    buf = gpu.alloc_buffer(1 << 20)
    assert gpu.device.memory() == (free - (1 << 20), total)
    buf.free()
    gpu.synchronize()
    assert gpu.device.memory() == (free, total)


def test_buffer_types(gpu):
    buft = gpu.default_buffer_type
    assert buft.name == "CUDA0" and not buft.is_host() and buft.alignment() >= 16
    assert gpu.supports_buft(buft) and not gg.init_backend("CUDA1").supports_buft(buft)
    assert not gpu.supports_buft(gg.init_backend("CPU").default_buffer_type)
    pinned = gpu.device.host_buffer_type()
    assert pinned.is_host() and gg.init_backend("CPU").supports_buft(pinned)


def test_pinned_memory_is_host_memory(gpu):
    ctx = gg.Context()
    a = ctx.new_tensor(gg.F32, (8, 2))
    buf = gpu.device.host_buffer_type().alloc_buffer(a.nbytes)
    gg.tensor_alloc(buf, a, 0)
    x = floats(2, 8)
    a.set(x)
    np.testing.assert_array_equal(gg.compute(gg.neg(a)), -x)
    view = buf.host_bytes(0, 64)
    del buf, a, ctx
    gc.collect()
    np.testing.assert_array_equal(view.view(np.float32), x.ravel())         # the array keeps the memory


# ---------------------------------------------------------------- bytes in and out
def test_bytes_in_and_out(gpu):
    contract.bytes_in_and_out(gpu)


def test_copies_between_all_kinds_of_memory(gpu):
    contract.copies_between_all_kinds_of_memory(gpu, gg.init_backend("CUDA1"), gg.init_backend("CPU"))


def test_asynchronous_slots_keep_the_streams_order(gpu):
    contract.asynchronous_slots_keep_the_streams_order(gpu)


@pytest.mark.parametrize("second", ["CUDA0", "CUDA1"])
def test_asynchronous_copies_order_both_streams(gpu, second):
    contract.asynchronous_copies_order_both_streams(gpu, gg.init_backend(second))


def test_events(gpu):
    contract.events(gpu, gg.init_backend("CUDA0"))


# ---------------------------------------------------------------- graphs
def planned(gpu, y):
    graph = gg.Graph(y)
    allocator = gg.GraphAllocator(gpu)
    allocator.alloc_graph(graph)
    return graph, allocator, gpu.graph_plan_create(graph)


def test_replays_see_new_inputs_and_use_one_cuda_graph(gpu):
    a = on(gpu, gg.F32, (40, 3))
    y = gg.relu(gg.mul(gg.add(a, a), a))
    _, allocator, plan = planned(gpu, y)
    for _ in range(4):
        x = floats(3, 40)
        a.set(x)
        plan.compute()
        np.testing.assert_allclose(plan.numpy(y), np.maximum(2 * x * x, 0), rtol=1e-6)
    assert plan._graph.exec is not None and plan.runs == 4
    want, single = plan.numpy(y), gg.init_backend("CUDA0", graphs=0)
    plain = single.graph_plan_create(plan.graph)
    plain.compute()
    plain.compute()
    np.testing.assert_array_equal(plain.numpy(y), want)
    assert plain._graph.exec is None


def test_a_captured_graph_follows_memory_that_moved(gpu):
    ctx = gg.Context()
    a = ctx.new_tensor(gg.F32, (33,))
    old = gg.alloc_ctx_tensors(ctx, gpu)
    a.set(floats(33))
    y = gg.sqr(gg.neg(a))
    graph, _, plan = planned(gpu, y)
    for _ in range(3):
        plan.compute()
    old.free()
    with pytest.raises(gg.GgjitError, match="was freed|has no memory|lost its memory"):
        plan.compute()
    gg.alloc_ctx_tensors(ctx, gpu)
    x = floats(33)
    a.set(x)
    plan.compute()
    np.testing.assert_allclose(plan.numpy(y), x * x, rtol=1e-6)


def test_what_the_gpu_has_no_kernel_for_is_refused(gpu):
    contract.what_has_no_kernel_is_refused(gpu)


def test_inputs_in_host_memory_come_through_a_scheduler(gpu):
    contract.inputs_in_host_memory_come_through_a_scheduler(gpu)


def test_a_read_only_mapping_is_copied_to_the_device_once(gpu):
    x = floats(64)
    x.flags.writeable = False
    buf = gpu.device.buffer_from_host_ptr(x, read_only=True)
    t = gg.Context().new_tensor(gg.F32, (32,))
    gg.tensor_alloc(buf, t, 128)
    np.testing.assert_array_equal(t.numpy(), x[32:])
    with pytest.raises(gg.NotSupported, match="read_only"):
        gpu.device.buffer_from_host_ptr(np.zeros(4, np.float32))


@pytest.mark.parametrize("bad", [-1, 5])
def test_a_bad_index_is_reported_and_the_next_run_is_clean(gpu, bad):
    contract.a_bad_index_is_reported_and_the_next_run_is_clean(gpu, bad)


def test_offload_is_for_large_batches(gpu):
    a, device = on(gpu, gg.F32, (32, 8)), gpu.device
    assert device.offload_op(gg.mul_mat(a, on(gpu, gg.F32, (32, 32))))
    assert not device.offload_op(gg.mul_mat(a, on(gpu, gg.F32, (32, 31))))
    assert not device.offload_op(gg.get_rows(a, on(gpu, gg.I32, (64,))))


def test_a_capture_is_left_alone_by_other_work(gpu, monkeypatch):
    """Copies and waits of other threads reach the backend's stream while a plan is captured on a stream of its own."""
    x, a, b = floats(40), on(gpu, gg.F32, (40,)), on(gpu, gg.F32, (40,))
    y = gg.relu(gg.mul(gg.add(a, a), a))
    _, _, plan = planned(gpu, y)
    a.set(x)
    plan.compute()
    submit = plan._submit

    def amid_others(*args):
        gpu.synchronize()
        submit(*args)
        gg.tensor_set_async(gpu, b, x)
        gpu.synchronize()
    monkeypatch.setattr(plan, "_submit", amid_others)
    plan.compute()
    assert plan._graph.exec is not None and b.bytes() == x.tobytes()
    b.set(2 * x)
    plan.compute()                                  # the copy is not part of the graph
    np.testing.assert_allclose(plan.numpy(y), np.maximum(2 * x * x, 0), rtol=1e-6)
    assert b.bytes() == (2 * x).tobytes()


def test_a_graph_that_does_not_fit_is_launched_one_by_one(gpu, failing):
    x = floats(8)
    y = gg.relu(gg.neg(on(gpu, gg.F32, (8,), x)))
    _, _, plan = planned(gpu, y)
    failing["cuGraphInstantiate"] = "CUDA_ERROR_OUT_OF_MEMORY", 0
    for _ in range(3):
        plan.compute()
    np.testing.assert_array_equal(plan.numpy(y), np.maximum(-x, 0))


def test_what_is_given_up_is_freed_at_the_next_wait(gpu):
    """Not by a finalizer: copies may be under way, and the thread may have no context."""
    raw = floats(8)
    pinned = gpu.device.host_buffer_type().alloc_buffer(32)
    t, base, source = on(gpu, gg.F32, (8,)), pinned.base, pinned.host_bytes(0, 32)
    source[:] = raw.view(np.uint8)
    gg.tensor_set_async(gpu, t, source)
    del pinned, source
    gc.collect()
    assert base in cuda_sim._memory
    gpu.synchronize()
    assert base not in cuda_sim._memory and t.bytes() == raw.tobytes()


def test_work_of_a_backend_that_is_gone_is_done_before_its_memory_goes(gpu):
    """A plan has sent its rows when it and its backend go: the rows' memory goes first, the stream later."""
    device, backend = gpu.device, gg.init_backend("CUDA0")
    a = on(backend, gg.F32, (8,), floats(8))
    _, _, plan = planned(backend, gg.neg(a))
    rows = weakref.ref(plan)
    del plan, backend
    gc.collect()
    assert rows() is None and device._garbage
    device.collect()
    assert not device._garbage and all(not stream.jobs for stream in device._streams)


def test_what_a_backend_that_is_gone_wrote_is_read():
    backend, raw = gg.init_backend("CUDA0"), floats(8)
    device, t = backend.device, on(backend, gg.F32, (8,))
    gg.tensor_set_async(backend, t, raw.view(np.uint8).copy())
    del backend
    gc.collect()
    assert not device._living() and t.bytes() == raw.tobytes()


def test_threads_that_free_at_once_free_each_thing_once(gpu, monkeypatch):
    """What is released while one of them waits for the streams may be in use by then: it stays."""
    device, freed, wait = gpu.device, [], gpu.cuda.cuStreamSynchronize
    device.collect()

    def slowly(stream):
        if len(device._garbage) == 64:
            device.release(freed.append, "later")
        time.sleep(0.005)
        wait(stream)
    for i in range(64):
        device.release(freed.append, i)
    with monkeypatch.context() as patched, concurrent.futures.ThreadPoolExecutor(4) as pool:
        patched.setitem(gpu.cuda.__dict__, "cuStreamSynchronize", slowly)
        first = pool.submit(device.collect)
        first.result()
        assert freed == list(range(64))
        for made in [pool.submit(device.collect) for _ in range(8)]:
            made.result()
    assert freed == [*range(64), "later"] and not device._garbage


def test_what_is_submitted_while_a_thread_waits_is_the_next_waits(gpu, monkeypatch):
    """The host memory of its copies is kept, and a Ctrl-C forgets neither it nor what went wrong."""
    raw, t, wait = floats(8).view(np.uint8), on(gpu, gg.F32, (8,)), gpu.cuda.cuStreamSynchronize

    def submits(stream):
        wait(stream)
        gpu.send(t.buffer.base + t.offs, raw)
    monkeypatch.setitem(gpu.cuda.__dict__, "cuStreamSynchronize", submits)
    gpu.synchronize()
    assert any(x is raw for x in gpu._held)

    def interrupted(stream):
        raise KeyboardInterrupt
    monkeypatch.setitem(gpu.cuda.__dict__, "cuStreamSynchronize", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gpu.synchronize()
    assert any(x is raw for x in gpu._held)
    monkeypatch.undo()
    gpu.synchronize()
    assert not gpu._held and t.bytes() == raw.tobytes()


def test_leaves_at_odd_places_are_refused(gpu):
    """Vector loads take multiples of 16; a mapped file may have another alignment."""
    buf = gpu.device.buffer_from_host_ptr(floats(64), read_only=True)
    t = gg.Context().new_tensor(gg.F32, (16,))
    TABLE.place(t.id, buf.id, 8)
    with pytest.raises(gg.ParamError, match="general.alignment"):
        gg.compute(gg.neg(t), backend=gpu)


# ---------------------------------------------------------------- beside ggml's CUDA backend
def test_support_is_printed_beside_ggmls_cuda_backend(capsys):
    """Whatever ggml's CUDA backend says yes to is served; a sample, drawn by the seed of the run."""
    from ggjit.tools.command.main import main
    assert main(["ops", "-b", "CUDA0", "--sample", "150", "-s", str(SEED), "support"]) == 0
    header, *_, total = capsys.readouterr().out.splitlines()
    assert header.split() == ["op", "supported", "ggml", "CUDA", "cases", "gradient"]
    assert "of which these are missing: none" in total


# ---------------------------------------------------------------- the simulator itself
@pytest.mark.parametrize("name", cuda_conformance.KERNELS)
def test_the_simulator_serves_the_seam(name):
    kernel, want = cuda_conformance.KERNELS[name]
    x = np.concatenate([cuda_conformance.X, np.full(cuda_conformance.N, np.nan, np.float32)])
    base = x.__array_interface__["data"][0]
    simulator.expose(base, x.nbytes)
    try:
        simulator.SimulatedLaunch(kernel, (1, 1, 1), (cuda_conformance.THREADS, 1, 1), base).run()
    finally:
        simulator.withdraw(base)
    got = x[cuda_conformance.N:].view(np.int32 if want.dtype.kind == "i" else np.float32)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_the_simulator_has_every_function_of_the_seam():
    for name, (n_parameters, _) in (contract_of_the_seam.functions() | contract_of_the_seam.functions(
            (contract_of_the_seam.WALKING, contract_of_the_seam.WARPGROUPS))).items():
        inspect.signature(getattr(core, name)).bind(*range(n_parameters))
    assert all(hasattr(core, name) for name in (*contract_of_the_seam.MAKERS, *contract_of_the_seam.WARPGROUP_MAKERS))


def run(kernel, n_threads=64, n_blocks=1):
    """Blocks of a kernel(base) over 4 KiB of simulated memory."""
    base = int(cuda_sim.cuMemAlloc(4096)[1])
    try:
        simulator.SimulatedLaunch(kernel, (n_blocks, 1, 1), (n_threads, 1, 1), base).run()
    finally:
        cuda_sim.cuMemFree(base)


def test_the_simulator_sees_stray_accesses_and_stuck_barriers():
    def stray(base):
        simulated.ld_f32(base + 4096)

    def crooked(base):
        simulated.ld_f32(base + 2)

    def half_a_barrier(base):
        if simulated.thread() < 32:
            simulated.sync()
            simulated.sync()
        else:
            simulated.warp_sum(1 if simulated.thread() < 40 else 2)
            if simulated.thread() == 50:
                return
            simulated.warp_sum(1)
    for kernel, match in ((stray, "outside all memory"), (crooked, "multiple of 4"), (half_a_barrier, "never come")):
        with pytest.raises(simulator.SimulationFault, match=match):
            run(kernel)
    ok = []
    run(lambda base: ok.append(simulated.warp_sum(simulated.thread())))
    assert sorted(set(ok)) == [sum(range(32)), sum(range(32, 64))]


def test_a_piece_of_shared_memory_belongs_to_the_function_that_asks():
    """As on the device, where functions are modules of their own; the address may be handed on."""
    piece, seen = simulated.shared(256), []

    def fill():
        simulated.sts_i32(piece() + 4 * simulated.thread(), 7)

    def fill_at(at):
        simulated.sts_i32(at, 7)

    def kernel(base):
        at = piece() + 4 * simulated.thread()
        fill()
        seen.append(simulated.lds_i32(at))
        fill_at(at)
        seen.append(simulated.lds_i32(at))
    run(kernel, 32)
    assert seen[:2] == [-1, 7]


def test_the_simulator_sees_races():
    """Two threads, one place, at least one of them writes, and no barrier in between."""
    piece, i = simulated.shared(256), simulated.thread

    def passes(barrier, at):
        def kernel(base):
            p = at(base)
            put, get = (getattr(simulated, n + "s" * (at is shared) + "_i32") for n in ("st", "ld"))
            put(p + 4 * i(), i())
            if barrier:
                simulated.sync()
            assert get(p + 4 * (i() ^ 33)) == i() ^ 33 or not barrier
        return kernel

    def shared(base):
        return piece()

    def everywhere(base):
        return base
    for at in (shared, everywhere):
        run(passes(True, at))
        with pytest.raises(simulator.SimulationFault, match="race: thread .* (reads|writes) (what|shared)"):
            run(passes(False, at))

    def overwrites(base):                           # what others still read
        p = piece()
        simulated.lds_i32(p)
        simulated.warp_sum(1)
        simulated.sts_i32(p + 4 * (i() % 32), 5)
    with pytest.raises(simulator.SimulationFault, match="race.*(others read|reads what)"):
        run(overwrites)
    run(lambda base: simulated.st_i32(base, 5))     # one value by all: no harm
    with pytest.raises(simulator.SimulationFault, match="race.*writes what"):
        run(lambda base: simulated.st_i32(base, i()))
    run(lambda base: simulated.st_i64_any(base, i()))

    def over_blocks(base):
        simulated.st_i32(base, simulated.block())
    with pytest.raises(simulator.SimulationFault, match=r"race: .* of block \(1, 0, 0\) writes"):
        run(over_blocks, 32, n_blocks=2)


# ---------------------------------------------------------------- launches of a token
# of a layer of TinyLlama's shape: (launches of the captured graph, waits of the persistent kernel).  They may only fall
MOST = {("F16", 0): (20, 10), ("Q4_0", 0): (20, 10), ("F16", 1): (10, 7), ("Q4_0", 1): (10, 7), ("Q4_K", 1): (10, 7)}


@pytest.mark.parametrize("piped", "01")
@pytest.mark.parametrize("type, fuse", MOST)
def test_launches_and_waits_of_a_layer(gpu, type, fuse, piped):
    launches, waits = gpu_estimate.of_a_layer(gpu_walk.SHAPES[0], getattr(gg, type), piped, fuse)
    assert (launches, waits) <= MOST[type, fuse] and waits <= MOST[type, fuse][1], (launches, waits)


@pytest.mark.parametrize("piped", "01")
def test_what_is_compiled_before_is_what_is_walked(gpu, piped):
    """benchmarks.gpu_compile finds a token's walker without a device."""
    shape = dataclasses.replace(gpu_walk.SHAPES[1], n_layer=2, n_vocab=9000)
    walker, *_ = gpu_estimate.walked(shape, gg.Q4_0, piped)
    assert walker.name in {x.name for x in gpu_compile.walkers(types.SimpleNamespace(dry=False))}
