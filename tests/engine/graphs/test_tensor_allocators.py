"""Allocators that place tensors (rows A9, A11 of ggml's behaviour, the bump pointer of B3)."""
import copy
import html
import pickle
import re

import numpy as np
import pytest
from helpers import devices
from helpers.placed import CPU, array

import ggjit as gg
from ggjit.alloc.ggml import bump
from ggjit.alloc.ggml.legacy import graph_alloc_2023, tensor_alloc


def leaves(*sizes):
    ctx = gg.Context()
    return [ctx.new_tensor(gg.F32, (n,), f"t{i}") for i, n in enumerate(sizes)]


class Told(gg.HostBuffer):
    """A buffer that notes what it is told."""

    def __init__(self, buft, size):
        super().__init__(buft, size)
        self.seen = []

    def init_tensor(self, t):
        self.seen.append(("init", t.name, t.offs))

    def init_view(self, t):
        self.seen.append(("view", t.name, t.offs))

    def free_tensor(self, t):
        self.seen.append(("free", t.name, t.offs))

    def reset(self):
        self.seen.append("reset")


def test_alloc_places_and_free_tensor_gives_back_A9_10_A9_15_A9_16_A9_19():
    buf = Told(CPU.default_buffer_type, 1024)
    talloc = gg.TensorAllocator(buf)
    a, b, c, d = leaves(10, 0, 3, 8)
    for t in (a, b, c):
        talloc.alloc(t)
    assert [(t.buffer, t.offs) for t in (a, b, c)] == [(buf, 0), (buf, 64), (buf, 64)], "empty tensors take no room"
    x = array(10)
    a.set(x)
    np.testing.assert_array_equal(a.numpy(), x)
    assert talloc.is_own(a) and not talloc.is_own(d) and not talloc.is_measure and talloc.max_size == 96
    talloc.free_tensor(a)
    talloc.free_tensor(d)                               # lies elsewhere: ignored
    assert a.buffer is None and talloc.blocks == [(0, 64), (96, 928)]
    talloc.alloc(d)
    assert d.offs == 0, "the smallest block that holds it"
    assert buf.seen == [("init", "t0", 0), ("init", "t1", 64), ("init", "t2", 64), ("free", "t0", 0),
                        ("init", "t3", 0)]
    talloc.reset()
    assert buf.seen[-1] == "reset" and c.buffer is None and talloc.blocks == [(0, 1024)] and talloc.max_size == 96
    talloc.free()
    assert buf.alive, "the caller's"


def test_buffer_types_are_asked_for_sizes_and_alignment_A9_05_A9_06_A9_07_A9_10_A9_21():
    device = devices.Slots()
    device.answers["alloc_size"] = lambda t: t.nbytes + 100
    owner = gg.TensorAllocator(device.buffer_type(), 1024)
    a, b = leaves(1, 1)
    owner.alloc(a)
    owner.alloc(b)
    assert b.offs == 128 and owner.max_size == 256 and owner.alignment == 64 and owner.buffer.inits == 2
    measure = gg.TensorAllocator(device.init_backend())
    for t in leaves(1, 1):
        measure.alloc(t)
        assert t.buffer is None
    assert measure.is_measure and measure.buffer is None and measure.max_size == 256
    owner.free()
    owner.free()
    assert device.used == 0
    with pytest.raises(gg.StaleHandle, match="buffer of this allocator was freed"):
        owner.alloc(leaves(1)[0])


def test_what_cannot_be_allocated_changes_nothing_A9_09_A9_13_A9_18():
    device = devices.Slots()
    talloc = gg.TensorAllocator(device.buffer_type(), 128)
    a, b = leaves(16, 32)
    talloc.alloc(a)
    for bad, text in ((a, "has memory already"), (gg.view_1d(a, 2, 0), "is a view")):
        with pytest.raises(gg.ParamError, match=text):
            talloc.alloc(bad)
    with pytest.raises(gg.OutOfMemory, match="needs 128 bytes, the largest free block has 64"):
        talloc.alloc(b)
    device.answers["init_tensor"] = RuntimeError("driver lost")
    c, = leaves(16)
    with pytest.raises(RuntimeError, match="driver lost"):
        talloc.alloc(c)
    assert b.buffer is c.buffer is None and talloc.blocks == [(64, 64)]
    device.answers.clear()
    talloc.alloc(c)
    for make, error, text in ((lambda: gg.TensorAllocator(talloc.buffer, 10), gg.ParamError, "has a size already"),
                              (lambda: gg.TensorAllocator(CPU, alignment=16), gg.ParamError, "multiple of 32"),
                              (lambda: gg.TensorAllocator("CPU"), gg.TypeMismatch, "takes a BufferType"),
                              (lambda: talloc.alloc(3), gg.TypeMismatch, "takes a Tensor")):
        with pytest.raises(error, match=text):
            make()


def test_tensors_of_contexts_that_are_gone_give_their_room_back():
    talloc = gg.TensorAllocator(CPU, 64)
    for _ in range(3):
        t, = leaves(16)
        talloc.alloc(t)
        t.ctx.free()
    measure = gg.TensorAllocator(CPU)
    kept = leaves(16, 16)
    for t in kept:
        measure.alloc(t)
    assert measure.max_size == 128


def test_bump_allocator_B3():
    buf = CPU.alloc_buffer(100)
    bump = gg.BumpAllocator(buf)
    a, b, c = leaves(10, 5, 8)
    bump.alloc(a)
    bump.alloc(b)
    assert (a.offs, b.offs, b.buffer) == (0, 64, buf) and bump.offs == 96
    with pytest.raises(gg.OutOfMemory, match="t2 .* needs 32 bytes, 4 of 100 are left"):
        bump.alloc(c)
    with pytest.raises(gg.ParamError, match="has memory already"):
        bump.alloc(a)
    assert c.buffer is None and bump.offs == 96


def chain(n=3, op=gg.soft_max):
    x = gg.Context().new_tensor(gg.F32, (16,), "x")
    y = x
    for _ in range(n):
        y = op(gg.mul(y, x)) if op is gg.soft_max else op(y, 1e-5)
    return x, gg.Graph(y)


def test_the_story_of_2023_A11_01_A11_02_A11_03_A11_04_A11_05():
    """Measure, allocate as much, place inputs and graph, compute, reset, again."""
    x, graph = chain()
    want = gg.compute(*_on_values(np.arange(16)))
    measure = gg.Allocr.new_measure_from_backend(CPU)
    measure.alloc(x)
    size = measure.alloc_graph(graph)
    assert measure.is_measure and size == measure.max_size == 128 and x.buffer is None and graph.placement is None
    allocr = gg.Allocr.new_from_backend(CPU, size)
    for _ in range(2):
        allocr.alloc(x)
        x.set(np.arange(16))
        assert allocr.alloc_graph(graph) == size and x.buffer is allocr.buffer
        CPU.graph_compute(graph)
        np.testing.assert_array_equal(graph.outputs[0].numpy(), want)
        with pytest.raises(gg.ParamError, match="given back by an earlier alloc_graph; call reset"):
            allocr.alloc_graph(graph)
        allocr.reset()
        assert x.buffer is None and graph.placement is None and not allocr.is_measure
    allocr.free()
    with pytest.raises(gg.NotAllocated, match="needed by"):
        CPU.graph_compute(graph)


def _on_values(values):
    x, graph = chain()
    gg.alloc_ctx_tensors(x.ctx, CPU)
    x.set(values)
    return graph.outputs


def test_constructors_over_memory_that_exists_A9_03_A11_02():
    x, graph = chain()
    need = gg.Allocr.new_measure(64).alloc_graph(graph)
    data = np.zeros(1024 + 8, np.uint8)[8:]             # 8 bytes off any alignment
    over = gg.Allocr.new(data, 1000, 64)
    assert over.alloc_graph(graph) <= need + 64 and (over.buffer.base + x.offs) % 64 == 0
    x.set(np.ones(16))
    assert (data[x.offs:x.offs + 64].view(np.float32) == 1).all(), "the caller's memory"
    CPU.graph_compute(graph)
    np.testing.assert_allclose(graph.outputs[0].numpy().sum(), 1, rtol=1e-6)
    for bad, size, error, text in ((data[::2], None, gg.ParamError, "not C-contiguous"),
                                   (3, None, gg.TypeMismatch, "int"),
                                   (data, 2000, gg.ParamError, "2000 bytes of a memory that has 1024"),
                                   (data, -1, gg.ParamError, "must not be negative")):
        with pytest.raises(error, match=text):
            gg.Allocr.new(bad, size)
    with pytest.raises(gg.TypeMismatch, match="buffer size must be an integer"):
        gg.TensorAllocator(CPU, "64")
    buf = CPU.alloc_buffer(256)
    owned = gg.Allocr.new_from_buffer(buf)
    x2, graph2 = chain(4, gg.norm)
    owned.set_parse_seq([*range(len(graph2.nodes))])    # no barrier: nothing is given back
    with pytest.raises(gg.OutOfMemory, match="not enough space"):
        owned.alloc_graph(graph2)
    assert x2.buffer is None and graph2.placement is None and owned.talloc.blocks == [(0, 256)]
    owned.set_parse_seq([])
    assert owned.alloc_graph(graph2) == 128 and buf.alive


def test_a_buffer_that_fails_to_take_a_graph_leaves_everything_as_it_was():
    device = devices.Slots()
    allocr = gg.Allocr.new_from_backend(device.init_backend(), 1024)
    x, graph = chain()
    device.answers["init_tensor"] = RuntimeError("driver lost")
    with pytest.raises(RuntimeError, match="driver lost"):
        allocr.alloc_graph(graph)
    assert x.buffer is None and graph.placement is None and allocr.talloc.blocks == [(0, 1024)]
    device.answers.clear()
    assert allocr.alloc_graph(graph) == 128
    assert allocr.buffer.inits > len(graph.nodes)


def test_views_have_a_slot_of_their_own():
    buf = Told(CPU.default_buffer_type, 256)
    t, = leaves(8)
    gg.tensor_alloc(buf, t, 0)
    v = gg.set_name(gg.view_1d(t, 2, 8), "v")
    gg.view_init(v)
    assert buf.seen == [("init", "t0", 0), ("view", "v", 8)]


def test_a_tensor_is_bound_when_its_buffer_says_so():
    class Late(gg.HostBuffer):
        base, bound = 0, False

        def is_bound(self, t):
            return self.bound
    buf = Late(CPU.default_buffer_type, 64)
    t, = leaves(16)
    gg.tensor_alloc(buf, t, 0)
    graph = gg.Graph(gg.silu(t))
    gg.GraphAllocator(CPU).alloc_graph(graph)
    for use in (t.numpy, lambda: t.set(np.ones(16)), lambda: CPU.graph_compute(graph)):
        with pytest.raises(gg.NotAllocated, match="t0 .* has a place in .* not bound it to memory yet"):
            use()
    buf.bound = True
    t.set(np.zeros(16))
    CPU.graph_compute(graph)
    assert not graph.outputs[0].numpy().any()


@pytest.mark.parametrize("planner", ["ggml", "ggml-2023", "best"])
def test_alloc_deps_keep_memory_until_a_later_node(planner):
    """scale(scale(scale(x))) is computed in one place, unless the first result is kept until the last node ran."""
    x, = leaves(16)
    gg.alloc_ctx_tensors(x.ctx, CPU)
    a = gg.scale(x, 2.0)
    b = gg.scale(a, 2.0)
    c = gg.scale(b, 2.0)
    graph, allocator = gg.Graph(c), gg.GraphAllocator(CPU, planner=planner)
    allocator.alloc_graph(graph)
    assert len({allocator.placement(t)[1] for t in (a, b, c)}) == 1
    allocator.alloc_graph(graph, alloc_deps=[(a, c)])
    places = [allocator.placement(t)[1] for t in (a, b, c)]
    assert places[0] not in places[1:] and len(allocator.last.node_offs) == 3
    x.set(np.arange(16))
    CPU.graph_compute(graph)
    np.testing.assert_array_equal(c.numpy(), 8 * np.arange(16))
    stranger, = leaves(4)
    for bad in ([(a, stranger)], [(stranger, c)], [(c, a)]):
        with pytest.raises(gg.ParamError, match="alloc_deps: .* cannot be kept"):
            allocator.alloc_graph(graph, alloc_deps=bad)


def test_what_the_best_planner_would_save():
    """The wide result in the middle: ggml's list leaves a hole under it that the next ones do not fit."""
    a, b, c, d = leaves(64, 96, 128, 160)
    x = gg.silu(a)
    for t in (b, c, d):
        x = gg.concat(x, gg.silu(t), 0)
    graph = gg.Graph(x)
    peaks = {}
    for planner in ("ggml", "best"):
        allocator = gg.GraphAllocator(CPU, planner=planner)
        peaks[planner] = allocator.plan(graph).peak
        last = allocator.last
        saving = allocator.saving(graph)
        assert saving == (peaks["ggml"] - gg.measure(graph).peak if planner == "ggml" else 0)
        assert allocator.last is last and allocator.buffer_size() == 0
        line = r"[\d.]+ KiB instead of ggml's [\d.]+ KiB, .*B \([\d.]+%\) less; planned in [\d.]+ ms instead of [\d.]+$"
        assert re.match(line if planner == "ggml" else "in use: .* nothing more to save", repr(saving))
        report = gg.measure(graph, planner=planner)
        assert report.saving == peaks["ggml"] - gg.measure(graph).peak and re.match(line, str(report.saving))
        for text in (str(report), html.unescape(report._repr_html_())):
            assert str(report.saving) in text
    assert peaks["ggml"] > peaks["best"]
    for again in (copy.copy(report.saving), pickle.loads(pickle.dumps(report.saving))):
        assert again == report.saving and str(again) == str(report.saving)
    equal = gg.measure(gg.Graph(gg.silu(a))).saving
    assert equal == 0 and "256 B instead of ggml's 256 B, nothing less; planned in" in str(equal)
    with pytest.raises(gg.TypeMismatch, match="GraphAllocator"):
        allocator.saving(3)


def test_equal_buffer_types_count_once_B3():
    buft, x = CPU.default_buffer_type, leaves(16)[0]
    allocator = gg.GraphAllocator([buft, buft])
    allocator.alloc_graph(gg.Graph(gg.silu(x)), node_ids=[1], leaf_ids=[0])
    assert allocator.buffer_size(0) == 64 and allocator.buffer_size(1) == 0


def test_size_of_what_would_be_allocated():
    device = devices.Fake("A", max_size=256)
    ctx = gg.Context()
    x, *others = [ctx.new_tensor(gg.F32, (n,)) for n in (10, 60, 3, 0)]
    y = gg.silu(x)
    assert gg.alloc_ctx_tensors_from_buft_size(ctx, device.buffer_type()) == 64 + 256 + 64
    assert gg.alloc_ctx_tensors_from_buft_size(ctx, device.buffer_type(), all=True) == 64 + 256 + 64 + 64
    assert device.used == 0 and y.buffer is None
    assert gg.alloc_ctx_tensors(ctx, device.buffer_type()).size == 64 + 256 + 64
    assert gg.alloc_ctx_tensors_from_buft_size(ctx, CPU) == 0 and len(others) == 3


def test_there_is_one_of_each():
    """The allocators of the contract's names are the package's own, and numbers have classes of other names."""
    assert gg.alloc.Allocr is gg.Allocr and gg.alloc.TensorAllocator is gg.TensorAllocator
    assert {"Allocr", "TensorAllocator", "plan_offsets"} <= set(dir(gg.alloc))
    assert not {"Allocr", "TensorAllocator"} & set(vars(gg.alloc)), "no name is set from outside"
    for module in (bump, tensor_alloc, graph_alloc_2023):
        assert not [n for n in vars(module) if n in ("Allocr", "TensorAllocator") or n.startswith("from_")]
    with pytest.raises(AttributeError, match="has no attribute 'allocr'"):
        gg.alloc.allocr()


@pytest.mark.parametrize("how", ["Allocr", "usage"])
def test_results_are_lost_when_another_graph_computes_in_their_memory(how):
    """Whatever the buffer says it is used for."""
    ctx = gg.Context()
    x, z = (gg.from_numpy(ctx, np.full(64, v, np.float32)) for v in (1, 2))
    y, other = gg.add(x, x), gg.add(z, z)
    graphs = gg.Graph(y), gg.Graph(other)
    allocator = gg.Allocr.new_from_backend(CPU, 4096) if how == "Allocr" else gg.GraphAllocator(CPU)
    plans = []
    for graph in graphs:
        allocator.alloc_graph(graph)
        if how == "usage":
            y.buffer and y.buffer.set_usage(gg.USAGE_WEIGHTS)
            graph.placement.where[graph.outputs[0].id][0].set_usage(gg.USAGE_WEIGHTS)
        plans.append(CPU.graph_plan_create(graph))
        if how == "Allocr":
            allocator.reset()
    plans[0].compute()
    assert (y.numpy() == 2).all()
    plans[1].compute()
    assert (other.numpy() == 4).all()
    for read in (y.numpy, lambda: plans[0].numpy(y), lambda: gg.tensor_get(y, 0, y.nbytes), y.bytes):
        with pytest.raises(gg.Overwritten, match="was used by another graph"):
            read()
    plans[0].compute()
    assert (plans[0].numpy(y) == 2).all()
    with pytest.raises(gg.Overwritten, match="was used by another graph"):
        plans[1].numpy(other)


def test_a_second_free_tensor_is_an_error_A9_18():
    cpu, ctx = gg.init_backend("CPU"), gg.Context()
    a, b = (ctx.new_tensor(gg.F32, (16,), n) for n in "ab")
    for talloc in (gg.TensorAllocator(cpu, 1 << 12), gg.TensorAllocator(cpu)):
        talloc.free_tensor(b)                           # never its own: left alone
        talloc.alloc(a)
        talloc.free_tensor(a)
        with pytest.raises(gg.IndexRangeError, match="a F32 .* was given back already"):
            talloc.free_tensor(a)
        talloc.alloc(a)
        talloc.free_tensor(a)
    buf = gg.alloc_ctx_tensors(ctx, cpu)
    talloc.free_tensor(a)                               # it lies elsewhere now
    assert buf is not None and a.buffer is not None
