"""Regressions: each test is a way in which the engine once broke.  What may crash or hang runs in its own process."""
import os
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
from conftest import processor_time

import ggjit as gg

PRELUDE = """
import faulthandler, threading, time
import numpy as np
import ggjit as gg
faulthandler.dump_traceback_later(50, exit=True)
cpu = gg.init_backend("CPU", n_threads=2)
ctx = gg.Context()

def leaf(*shape):
    t = ctx.new_tensor(gg.F32, shape)
    gg.alloc_ctx_tensors(ctx, cpu).clear()
    return t

def planned(y):
    graph = gg.Graph(y)
    allocator = gg.GraphAllocator(cpu)
    allocator.alloc_graph(graph)
    return cpu.graph_plan_create(graph), allocator
"""


def survives(code, **env):
    """Run `code` in a fresh process; it must end with status 0."""
    done = subprocess.run([sys.executable, "-c", PRELUDE + textwrap.dedent(code)], capture_output=True, text=True,
                          timeout=120, env={**os.environ, **env})
    assert done.returncode == 0, done.stderr[-1500:]
    return done.stdout


@pytest.fixture
def ctx():
    return gg.Context()


@pytest.fixture(scope="module")
def cpu():
    return gg.init_backend("CPU", n_threads=2)


def rand(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def planned(cpu, *outputs, allocator=None, planner="ggml"):
    graph = gg.Graph(*outputs)
    allocator = allocator or gg.GraphAllocator(cpu, planner=planner)
    allocator.alloc_graph(graph)
    plan = cpu.graph_plan_create(graph)
    plan.compute()
    return plan


# ---------------------------------------------------------------- strided one-dimensional operands
def every_second(ctx, values):
    """A [n] view with a stride of two elements."""
    wide = np.stack([values, np.full_like(values, 9)], -1)
    t = gg.from_numpy(ctx, wide)
    view = gg.transpose(gg.view_2d(t, 1, len(values), t.nb[1], 0))
    assert view.ne == (len(values), 1, 1, 1) and view.nb[0] == 2 * values.itemsize
    return view


def same_or_refused(build, operand):
    """The op reads a strided operand as its contiguous copy, or refuses it with a typed error."""
    try:
        y = build(operand)
    except gg.ShapeError:
        return
    assert np.array_equal(gg.compute(y), gg.compute(build(gg.cont(operand))))


def test_strided_positions_factors_and_sinks(ctx):
    x, s = gg.from_numpy(ctx, rand(4, 1, 8)), gg.from_numpy(ctx, rand(2, 4, 3, 5))
    positions = gg.from_numpy(ctx, np.arange(4, dtype=np.int32))
    same_or_refused(lambda p: gg.rope(x, p, 8, 0), every_second(ctx, np.arange(4, dtype=np.int32)))
    same_or_refused(lambda f: gg.rope_ext(x, positions, f, 8, 0, 0, 1e4, 1.0, 0.0, 1.0, 0.0, 0.0),
                    every_second(ctx, np.arange(1, 5, dtype=np.float32)))

    def with_sinks(v):
        return gg.soft_max_add_sinks(gg.soft_max(s), v)
    same_or_refused(with_sinks, every_second(ctx, np.arange(4, dtype=np.float32)))


def test_repeated_position_reads_inside_its_tensor():
    survives("""
        n = 20_000_000
        one = gg.from_numpy(ctx, np.zeros(1, np.int32))
        x = ctx.new_tensor(gg.F16, (2, 1, n))
        gg.alloc_ctx_tensors(ctx, cpu)
        try:
            gg.compute(gg.rope(x, gg.transpose(gg.view_2d(one, 1, n, 0, 0)), 2, 0))
        except gg.GgjitError:
            pass
    """)


# ---------------------------------------------------------------- memory that goes away while it is used
def test_buffer_freed_during_compute():
    survives("""
        y = gg.mul_mat(leaf(4096, 2048), leaf(4096, 64))
        plan, _ = planned(y)
        plan.compute()
        def work():
            try:
                for _ in range(100):
                    plan.compute()
            except gg.GgjitError:
                pass
        t = threading.Thread(target=work)
        t.start()
        time.sleep(0.05)
        for buf in {id(x.buffer): x.buffer for x in plan.graph.leafs}.values():
            buf.free()
        t.join()
    """)


def test_allocator_shared_by_threads_keeps_the_heap_whole():
    survives("""
        shared = gg.GraphAllocator(cpu)
        def work(k):
            try:
                for _ in range(100):
                    c = gg.Context()
                    x = gg.from_numpy(c, np.ones((8 + k, 64), np.float32))
                    graph = gg.Graph(gg.scale(gg.add(x, x), 3.0))
                    shared.alloc_graph(graph)
                    cpu.graph_plan_create(graph).compute()
            except gg.GgjitError:
                pass
        threads = [threading.Thread(target=work, args=(50 * k,)) for k in range(4)]
        [t.start() for t in threads]
        [t.join() for t in threads]
    """)


def test_timing_a_plan_whose_memory_is_gone():
    survives("""
        x = leaf(4096, 2048)
        plan, allocator = planned(gg.scale(x, 2.0))
        plan.compute()
        allocator.free()
        x.buffer.free()
        try:
            plan.timed()
        except gg.GgjitError:
            pass
    """)


# ---------------------------------------------------------------- computing inside a compute
@pytest.mark.parametrize("inner", ["other.compute()", "plan.compute()", "plan.numpy(y)"])
def test_abort_callback_may_not_hang_the_pool(inner):
    survives(f"""
        y = gg.mul_mat(leaf(4096, 2048), leaf(4096, 512))
        plan, _ = planned(y)
        other, _ = planned(gg.scale(leaf(8, 8), 2.0))
        plan.compute(); other.compute()
        def callback():
            {inner}
            return False
        cpu.abort_callback = callback
        for _ in range(3):
            try:
                plan.compute()
            except gg.GgjitError:
                pass
        cpu.abort_callback = None
        plan.compute()
    """)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_fork_while_another_thread_computes():
    survives("""
        import os, signal
        y = gg.mul_mat(leaf(1024, 1024), leaf(1024, 256))
        plan, _ = planned(y)
        stop = []
        def work():
            while not stop:
                plan.compute()
        t = threading.Thread(target=work)
        t.start()
        for _ in range(3):
            time.sleep(0.05)
            child = os.fork()
            if child == 0:
                signal.alarm(20)                    # faulthandler's watchdog does not survive a fork
                plan.compute()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        stop.append(1)
        t.join()
    """)


# ---------------------------------------------------------------- which values a read gives
def test_result_read_after_another_graph_used_the_arena(ctx, cpu):
    allocator = gg.GraphAllocator(cpu)
    y, z = gg.add(*[gg.from_numpy(ctx, rand(8, 8))] * 2), gg.sqr(gg.from_numpy(ctx, rand(8, 8) + 5))
    first = planned(cpu, y, allocator=allocator)
    want = y.numpy()
    planned(cpu, z, allocator=allocator)
    for read in (y.numpy, lambda: first.numpy(y)):
        try:
            assert np.array_equal(read(), want)
        except (gg.Overwritten, gg.NotAllocated):
            pass


def test_plan_numpy_is_exact_under_concurrency(ctx, cpu):
    a = gg.from_numpy(ctx, np.ones((4, 4), np.float32))
    y = gg.scale(a, 2.0)
    plans = []
    for value in (1, 10):
        a.set(np.full((4, 4), value, np.float32))
        plans.append((planned(cpu, y), 2 * value))
    wrong, interval = [], sys.getswitchinterval()

    def read(plan, want):
        wrong.extend(1 for _ in range(3000) if plan.numpy(y)[0, 0] != want)
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=read, args=p) for p in plans]
    [t.start() for t in threads]
    [t.join() for t in threads]
    sys.setswitchinterval(interval)
    assert not wrong


@pytest.mark.parametrize("planner", ["ggml", "best"])
def test_an_output_that_is_a_view_is_kept(ctx, cpu, planner):
    x = gg.from_numpy(ctx, rand(8, 8))
    view = gg.reshape_1d(gg.scale(x, 2.0), 64)
    rest = view
    for _ in range(6):
        rest = gg.mul(gg.scale(rest, 1.5), gg.scale(rest, 0.5))
    plan = planned(cpu, view, rest, planner=planner)
    assert np.array_equal(plan.numpy(view), 2 * rand(8, 8).reshape(-1))


def test_compute_refuses_leaves_without_memory(ctx, cpu):
    a, b = ctx.new_tensor(gg.F32, (4,), name="empty"), gg.from_numpy(ctx, rand(4))
    with pytest.raises(gg.NotAllocated, match="empty"):
        gg.compute(gg.add(a, b))
    gg.alloc_ctx_tensors(ctx, cpu)
    a.set(rand(4))
    assert np.array_equal(gg.compute(gg.add(a, b)), 2 * rand(4))


def test_leaves_of_a_freed_buffer_can_be_allocated_again(ctx, cpu):
    a = ctx.new_tensor(gg.F32, (4,))
    gg.alloc_ctx_tensors(ctx, cpu).free()
    gg.alloc_ctx_tensors(ctx, cpu)
    a.set(rand(4))
    assert np.array_equal(a.numpy(), rand(4))


def test_results_live_as_long_as_their_plan_and_the_error_says_so(ctx, cpu):
    y = gg.scale(gg.from_numpy(ctx, rand(4)), 2.0)
    gg.compute(y)
    assert np.array_equal(y.numpy(), 2 * rand(4))
    z = gg.scale(gg.from_numpy(ctx, rand(4)), 3.0)
    graph = gg.Graph(z)
    gg.GraphAllocator(cpu).alloc_graph(graph)
    cpu.graph_plan_create(graph).compute()
    with pytest.raises(gg.NotAllocated, match="keep the plan"):
        z.numpy()
    cpu.graph_compute(graph)                    # kept with the graph
    assert np.array_equal(z.numpy(), np.float32(3) * rand(4))


@pytest.mark.parametrize("n", [1, 3, 20])
@pytest.mark.parametrize("where", ["q", "mask"])
def test_attention_does_not_hide_a_nan(ctx, n, where):
    q, k, mask = rand(1, 2, n, 16), rand(1, 2, 9, 16), np.zeros((1, 1, n, 9), np.float16)
    (q if where == "q" else mask)[0, 0, 0, 3] = np.nan
    y = gg.flash_attn_ext(*(gg.from_numpy(ctx, x) for x in (q, k, k, mask)), 0.25, 0.0, 0.0)
    assert np.isnan(gg.compute(y).reshape(n, 2, 16)[0, 0]).all()


def test_reading_from_a_long_graph_is_not_quadratic(ctx, cpu):
    y = gg.from_numpy(ctx, rand(4))
    for _ in range(4000):
        y = gg.scale(y, 1.0)
    plan = planned(cpu, y)
    with processor_time() as spent:
        plan.numpy(y)
    assert spent.seconds < 0.1                      # 14 ms; looking every node up in a list took 500 ms


def test_index_error_names_the_indexed_tensor(ctx):
    table, rows = gg.from_numpy(ctx, rand(3, 4), name="table"), gg.from_numpy(ctx, rand(2, 4), name="rows")
    ids = gg.from_numpy(ctx, np.array([1, 3]))
    with pytest.raises(gg.IndexRangeError, match="out of range for table"):
        gg.compute(gg.set_rows(table, rows, ids))


# ---------------------------------------------------------------- models
@pytest.fixture
def tiny(tmp_path):
    pytest.importorskip("gguf")
    import tiny_model
    return lambda name="m", **kw: str(tiny_model.write(tmp_path / f"{name}.gguf", **kw))


@pytest.mark.parametrize("options", [{"n_batch": 0}, {"n_batch": -5}, {"n_batch": "x"}, {"n_ctx": True},
                                     {"kv_type": "I32"}], ids=str)
def test_load_option_is_named(tiny, options):
    from ggjit.models import load_model
    with pytest.raises(gg.ParamError, match=next(iter(options))):
        load_model(tiny(), **options)


@pytest.mark.parametrize("key,value", [("context_length", 2**32 - 1),
                                       ("rope.scaling.original_context_length", 2**32 - 1),
                                       ("rope.freq_base", 0.0), ("rope.freq_base", float("nan")),
                                       ("rope.scaling.attn_factor", float("nan")),
                                       ("attention.layer_norm_rms_epsilon", float("nan"))])
def test_absurd_hyperparameter(tiny, key, value):
    """It loads and computes numbers, or the error is typed; never NaN in silence."""
    from ggjit.models import load_model
    try:
        with load_model(tiny(metadata={key: value})) as m:
            assert key == "context_length" and np.isfinite(m.logits([1, 2, 3])).all()
    except gg.GgjitError as e:
        assert key.split(".")[-1] in str(e)


def test_generation_survives_other_use_of_the_model():
    from conftest import shared

    from ggjit.models import load_model
    with load_model(str(shared("data", "stories260k", "stories260K-F16.gguf")), n_threads=1) as m:
        whole = "".join(m.generate("Once upon a time", n_predict=20, temp=0.0))
        for disturb in (lambda: next(m.generate("The dog", n_predict=5)), lambda: m.logits([1, 2, 3])):
            run = m.generate("Once upon a time", n_predict=20, temp=0.0)
            text = "".join(next(run) for _ in range(4))
            disturb()
            try:
                assert text + "".join(run) == whole
            except gg.GgjitError:
                pass                                # a refusal is fine, other text is not


def test_model_freed_while_it_computes(tiny):
    survives(f"""
        from ggjit.models import load_model
        for i in range(3):
            m = load_model({tiny()!r}, n_threads=2)
            def work():
                try:
                    while True:
                        m.logits(np.arange(60) % 48)
                except gg.GgjitError:
                    pass
            t = threading.Thread(target=work)
            t.start()
            time.sleep(0.02 + 0.01 * i)
            m.free()
            t.join()
    """)


# ---------------------------------------------------------------- surroundings
def run_cli(*args, **env):
    return subprocess.run([sys.executable, "-m", "ggjit.models.cli", *args], capture_output=True, text=True,
                          timeout=120, env={**os.environ, **env})


def test_cli_unwritable_output_is_one_line(tiny):
    for option in ("--csv", "--png"):
        if option == "--png":
            pytest.importorskip("matplotlib")
        done = run_cli("peak", tiny(), "--n-ctx", "64", "--n-batch", "8", option, "/no/such/folder/x")
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr


def test_cli_json_stays_one_object_with_debug_plan(tiny):
    import json
    done = run_cli("bench", tiny(), "-p", "4", "-n", "0", "-r", "1", "--json", GGJIT_DEBUG="plan")
    assert done.returncode == 0 and json.loads(done.stdout)["results"]
