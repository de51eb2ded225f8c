"""Who holds whom is a tree: reference counts free every buffer at once, without the garbage collector."""
import _thread
import collections
import functools
import gc
import operator
import signal
import time
import weakref

import numpy as np
import pytest
from helpers import devices

import ggjit as gg
from ggjit.core import lifetime
from ggjit.core.buffer import _buffers
from ggjit.core.host_buffer import HOST, HostBuffer
from ggjit.core.placing import free_after
from ggjit.core.table import TABLE
from ggjit.graphs.plan_cache import PlanCache
from ggjit.ops.core.weak import WeakKeys, WeakValues

CPU = gg.init_backend("CPU", n_threads=1)


@pytest.fixture
def no_collector():
    """counts() -> (rows in use, buffers alive), with the garbage collector off."""
    gc.collect()
    gc.disable()
    yield lambda: (TABLE.n_alive(), len(_buffers))
    gc.enable()


def leaf(n=64, ctx=None):
    return gg.from_numpy(gg.Context() if ctx is None else ctx, np.ones((2, n), np.float32))


def computed(x):
    assert (gg.compute(gg.silu(gg.add(x, x))) > 1).all()


def kept_plan(x):
    graph = gg.Graph(gg.silu(gg.add(x, x)))
    gg.GraphAllocator(CPU).alloc_graph(graph)
    CPU.graph_compute(graph)
    CPU.graph_compute(graph)


def own_plan(x):
    graph = gg.Graph(y := gg.silu(gg.mul_mat(x, x)))
    allocator = gg.GraphAllocator(CPU)
    allocator.alloc_graph(graph)
    plan = CPU.graph_plan_create(graph)
    plan.compute()
    assert (plan.numpy(y) == y.numpy()).all() and allocator.placement(y)


def leaves_placed(x):
    with x.ctx as ctx:
        graph = gg.Graph(gg.add(x, w := ctx.new_tensor(gg.F32, (64, 2))))
    gg.GraphAllocator(CPU).alloc_graph(graph)
    w.set(np.ones((2, 64)))
    CPU.graph_compute(graph)


def scheduled(x):
    sched = gg.Scheduler([devices.Fake("A").init_backend(), CPU])
    graph = gg.Graph(y := gg.silu(gg.add(x, x)))
    sched.graph_compute(graph)
    sched.backends[0].device.asked.clear()
    assert sched.numpy(y).shape == (2, 64)


def profiled(x):
    with gg.profile() as p:
        computed(x)
    assert p.rows


def custom(x):
    gg.compute(gg.map_custom1(x, lambda dst, a, ith, nth: dst.__setitem__(slice(None), a), 1))


def copied(x):
    gg.graph_copy(CPU, gg.Graph(gg.silu(x))).free()


def written(x):
    with x.write() as a:
        a[0] = 2
    assert np.asarray(x)[0, 0] == 2


@pytest.mark.parametrize("use", [computed, kept_plan, own_plan, leaves_placed, scheduled, profiled, custom, copied,
                                 written])
def test_everything_goes_with_the_last_name(use, no_collector):
    use(leaf())                         # caches of kernels, the pool, scratch memory
    before = no_collector()
    x = leaf()
    memory = weakref.ref(x.buffer)
    use(x)
    del x
    assert memory() is None and no_collector() == before


def test_results_live_as_long_as_their_tensor(no_collector):
    x = leaf()
    before = no_collector()
    y, z = gg.add(x, x), gg.scale(x, 3.0)
    gg.compute(y)
    gg.compute(z)
    assert (y.numpy() == 2).all() and (z.numpy() == 3).all()
    del y, z
    assert no_collector() == before


def test_a_name_that_is_bound_again_frees_its_tensor(no_collector):
    ctx = gg.Context()
    x = leaf(ctx=ctx)
    computed(x)
    before = no_collector()
    for _ in range(100):
        x = leaf(ctx=ctx)
        gg.compute(gg.relu(x * np.ones(64, np.float32) + 1))
        assert no_collector() == before and ctx.tensors == [x]
    assert len(ctx._refs) <= 128 and ctx.buffers == [x.buffer]


def test_nodes_keep_what_they_read(no_collector):
    y = gg.add(leaf(), leaf())
    view = gg.view_1d(leaf(), 4, 0)
    assert (gg.compute(y) == 2).all() and (view.numpy() == 1).all()
    assert [t.op.name for t in y.ctx.tensors] == ["NONE", "ADD"] and len(y.src[1].ctx) == 1


def test_a_long_chain_is_freed(no_collector):
    y, before = leaf(), no_collector()
    x = y
    for _ in range(30_000):
        x = gg.add(x, y)
    del x
    assert no_collector() == before


def test_tensors_of_a_freed_context_give_their_memory_back(no_collector):
    x = leaf()
    memory = weakref.ref(x.buffer)
    y = gg.silu(x)
    gg.compute(y)
    before = no_collector()
    x.ctx.free()
    assert memory() is None and x.ctx.tensors == [] and no_collector() == (before[0] - 2, before[1] - 2)
    del x, y
    assert no_collector() == (before[0] - 2, before[1] - 2), "rows are given back once"


def test_garbage_in_a_cycle_gives_its_rows_back():
    gc.collect()
    before = TABLE.n_alive()
    box = [leaf()]
    box.append(box)
    del box
    gc.collect()
    assert TABLE.n_alive() == before


def test_a_placement_is_not_that_of_a_later_tensor_in_the_same_row(no_collector):
    allocator = gg.GraphAllocator(CPU)
    x = leaf()
    graph = gg.Graph(y := gg.silu(x))
    allocator.alloc_graph(graph)
    row = y.id
    del graph, y
    TABLE.n_alive()                     # recycles now; otherwise many rows are recycled at once
    later = [gg.silu(x) for _ in range(4)]
    same = next(t for t in later if t.id == row)
    with pytest.raises(gg.NotAllocated, match="was not placed by this allocator"):
        allocator.placement(same)


# ---------------------------------------------------------------- weak references and signals
def test_weak_dictionaries(no_collector):
    class Key:
        pass
    keys, values, k, v = WeakKeys(), WeakValues(), Key(), Key()
    keys.put(k, v)
    values[3] = v
    seen = weakref.ref(v)
    assert keys.of(k) is v and keys.objects() == [k] and values.get(3) is v and len(values) == 1
    del v, k
    assert seen() is None and not keys and values.get(3) is None and not len(values) and keys.of(Key()) is None
    keys.put(k := Key())
    gone = weakref.ref(keys)
    del keys
    assert gone() is None and k is not None


def test_two_threads_forget_at_once():
    class TakenMeanwhile(collections.deque):
        def __bool__(self):
            return True
    values = WeakValues()
    values._gone = TakenMeanwhile()
    values[1] = CPU
    assert values.get(1) is CPU and len(values) == 1


class Interrupting:
    """Raises Ctrl-C in the middle of being freed."""

    def __init__(self, log):
        self.log = log

    def free(self):
        signal.raise_signal(signal.SIGINT)
        self.log.append("freed")


@pytest.mark.parametrize("now", [False, True])
def test_an_interrupt_inside_a_finalizer_comes_after_it(now, capfd):
    log = []
    end = lifetime.AtEnd(Interrupting(log).free)
    with pytest.raises(KeyboardInterrupt):
        if now:
            end.now()
        del end
        time.sleep(5)
    assert log == ["freed"] and "ignored" not in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def things():
    """Everything of ours with something to do when it dies."""
    def tensor():
        return leaf()

    def scheduler():
        return gg.Scheduler([CPU])

    def owner():
        return free_after(HostBuffer(HOST, 64), [x := leaf()])() and x

    def plan():
        graph = gg.Graph(gg.silu(leaf()))
        gg.GraphAllocator(CPU).alloc_graph(graph)
        return CPU.graph_plan_create(graph)

    def cached():
        cache = PlanCache()
        owner = Interrupting([])
        cache.get(owner, lambda plan: 0, list)
        return owner, cache
    return tensor, scheduler, owner, plan, cached


@pytest.mark.parametrize("make", things(), ids=lambda f: f.__name__)
def test_an_interrupt_is_not_lost_when_something_dies(make, capfd):
    """It comes in just before: the first Python function that is called raises it, and in a callback of a weak
    reference it would be lost."""
    box = [make()]
    with pytest.raises(KeyboardInterrupt):
        # by C code alone: the signal has come, was not looked at yet, and the last reference goes
        list(map(operator.call, [functools.partial(_thread.interrupt_main, signal.SIGINT), box.clear]))
        time.sleep(5)
    assert not box and "ignored" not in capfd.readouterr().err


# ---------------------------------------------------------------- buffers of third parties
class Freed(gg.HostBuffer):
    """Notes that it was freed, and does not call super().free()."""

    def free(self):
        self.buft.freed.append(self.size)


class FreedType(gg.BufferType):
    """Buffers in host memory; `freed`: sizes of those whose `free` was called."""
    name, device = "Freed", CPU.device

    def __init__(self):
        self.freed = []

    def is_host(self):
        return True

    def alloc_buffer(self, size):
        return Freed(self, size)


def by_a_graph_allocator(buft, ctx):
    graph = gg.Graph(gg.silu(ctx.new_tensor(gg.F32, (16,))))
    allocator = gg.GraphAllocator(buft)
    allocator.alloc_graph(graph)
    return allocator, graph


def by_a_tensor_allocator(buft, ctx):
    talloc = gg.TensorAllocator(buft, 64)
    talloc.alloc(t := ctx.new_tensor(gg.F32, (16,)))
    return talloc, t


def by_an_allocr(buft, ctx):
    allocr = gg.Allocr(gg.TensorAllocator(buft, 256))
    allocr.alloc_graph(graph := gg.Graph(gg.silu(ctx.new_tensor(gg.F32, (16,)))))
    return allocr, graph


def by_alloc_ctx_tensors(buft, ctx):
    t = ctx.new_tensor(gg.F32, (16,))
    return gg.alloc_ctx_tensors(ctx, buft), t


def by_the_buffer_type(buft, ctx):
    return buft.alloc_buffer(64), None


@pytest.mark.parametrize("make", [by_a_graph_allocator, by_a_tensor_allocator, by_an_allocr, by_alloc_ctx_tensors,
                                  by_the_buffer_type])
@pytest.mark.parametrize("end", ["dropped", "freed", "context freed"])
def test_buffers_of_third_parties_are_freed_once(make, end, no_collector):
    buft, ctx = FreedType(), gg.Context()
    owner, user = make(buft, ctx)
    assert not buft.freed
    if end == "freed":
        owner.free()
        assert len(buft.freed) == 1
    elif end == "context freed":
        ctx.free()
        assert not buft.freed, "it has an owner"
    del owner, user
    assert len(buft.freed) == 1 and no_collector()[1] == len(_buffers)


def test_a_buffer_is_freed_when_its_last_tensor_goes(no_collector):
    buft, ctx = FreedType(), gg.Context()
    t, u = ctx.new_tensor(gg.F32, (16,)), ctx.new_tensor(gg.F32, (16,))
    gg.alloc_ctx_tensors(ctx, buft)
    del t
    assert not buft.freed
    del u
    assert buft.freed == [128]


def test_a_buffer_that_could_not_be_made_is_not_freed(no_collector, capfd):
    class Broken(Freed):
        def __init__(self, buft, size):
            super().__init__(buft, size)
            raise gg.OutOfMemory("none left")
    buft = FreedType()
    buft.alloc_buffer = lambda size: Broken(buft, size)
    with pytest.raises(gg.OutOfMemory, match="none left"):
        gg.TensorAllocator(buft, 64)
    assert not buft.freed and not capfd.readouterr().err
