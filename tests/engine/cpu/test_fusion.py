"""Fusion at plan time: the same bytes as one kernel a node, never where it would change what can be read or is read."""
import json

import numpy as np
import pytest
from helpers import sample
from helpers.sample import sampled

import ggjit as gg
from ggjit.core.table import TABLE
from ggjit.ops.core.errors import Overwritten
from ggjit.ops.core.fusion_pattern import all_fusions
from ggjit.ops.core.record import OP
from ggjit.ops.matmul import choices
from ggjit.ops.native import isa

CPU = gg.init_backend("CPU", n_threads=2)
KNOWN = {f.ops for fusions in all_fusions().values() for f in fusions}

# Random graphs: each node takes one or two of the tensors made so far, so residuals, shared results, in-place chains
# and repeated rows arise by themselves.  A fixed number of graphs in a child process of each instruction set.
CODE = """
import json, sys
import numpy as np
import ggjit as gg
from ggjit.ops.native import isa

repack = next(b for b in gg.init_backend("CPU").device.extra_buffer_types() if b.name == "CPU_REPACK")

def random_graph(rng):
    ctx = gg.Context()
    n, rows = int(rng.choice([1, 7, 16, 33, 64, 260])), tuple(int(x) for x in rng.integers(1, 4, 3))
    def leaf(*shape):
        return gg.from_numpy(ctx, rng.standard_normal(shape).astype(np.float32))
    def weight():
        type = (gg.F32, gg.Q8_0)[n % 32 == 0]
        if type is gg.Q8_0 and isa.ISA != "generic" and rng.random() < 0.5:
            other = gg.Context()
            w = other.new_tensor(type, (n, n))
            gg.alloc_ctx_tensors(other, repack)
            w.set_bytes(gg.quantize(type, rng.standard_normal((n, n)).astype(np.float32)))
            return w
        return gg.from_numpy(ctx, rng.standard_normal((n, n)).astype(np.float32), type=type)
    def normed(row):
        if rng.random() < 0.5: return gg.mul(gg.rms_norm(row, 1e-5), leaf(n))
        return gg.add(gg.mul(gg.norm(row, 1e-5), leaf(n)), leaf(n))
    made = [leaf(*rows, n), leaf(*rows, n)]
    def other():
        return made[rng.integers(len(made))] if rng.random() < 0.5 else leaf(n)
    def step(x):
        k = rng.integers(10)
        if k == 0: return gg.add(x, other())
        if k == 1: return gg.mul(gg.rms_norm(x, 1e-5), leaf(n))
        if k == 2: return gg.add(gg.mul(gg.norm(x, 1e-6), leaf(n)), leaf(n))
        if k == 3: return gg.mul(gg.rms_norm(gg.add(x, other()), 1e-5), leaf(n))
        if k == 4: return gg.gelu_erf(gg.add(x, leaf(n)))
        if k == 5: return gg.soft_max(gg.add(gg.scale(x, 0.7), leaf(*rows[1:], n)))
        if k == 7:
            row = gg.view_1d(x, n, 0)
            row = normed(row) if rng.random() < 0.5 else row
            pair = [gg.mul_mat(weight(), row) for _ in "gu"]
            return gg.add(x, gg.swiglu_split(*pair[::rng.choice([1, -1])]))
        if k == 8:                              # products of one column, some with a bias or what flows past them
            row = gg.cont(gg.view_1d(x, n, 0))
            h, sums = normed(row) if rng.random() < 0.8 else row, []
            for _ in range(int(rng.integers(1, 4))):
                y = gg.mul_mat(weight(), h)
                sums.append(gg.add(y, (row, leaf(n), h)[rng.integers(3)]) if rng.random() < 0.6 else y)
            for y in sums: x = gg.add(x, y)
            return x
        if k == 6: return gg.silu(gg.add(made[rng.integers(len(made))], x))
        return gg.add(gg.mul(gg.norm(gg.add(gg.add(x, leaf(n)), other()), 1e-6), leaf(n)), leaf(n))
    for _ in range(int(rng.integers(2, 9))):
        t = step(made[-1])
        if rng.random() < 0.1: t = gg.reshape(t, made[0])
        if rng.random() < 0.15: gg.set_output(t)
        made.append(t)
    return made[-1]

def run(n_graphs, seed):
    rng, fused, wrong = np.random.default_rng(seed), 0, []
    for g in range(n_graphs):
        y = random_graph(rng)
        graph = gg.Graph(y, order=("graph", "together")[g % 3 > 0])
        for n_threads in (1, 2):
            cpu = gg.init_backend("CPU", n_threads=n_threads)
            allocator = gg.GraphAllocator(cpu, planner=("ggml", "best")[g % 2])
            allocator.alloc_graph(graph)
            outputs = [t for t in graph.nodes if t.flags & 2 or t in graph.outputs]
            answers = []
            for fuse in (True, False):
                plan = cpu.graph_plan_create(graph, fuse=fuse)
                plan.compute()
                answers.append([plan.numpy(t).tobytes() for t in outputs])
                fused += sum(len(p.nodes) > 1 for p in plan.parts)
            if answers[0] != answers[1]:
                wrong.append((g, n_threads))
    return {"isa": isa.ISA, "fused": fused, "wrong": wrong}
"""


# fused kernels are joined of the same parts at every level: this processor's, and one of those below it
@pytest.mark.parametrize("n_graphs", [20, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", sampled([(name,) for name in isa.NAMES], lambda case: [case[0] == isa.ISA]))
def test_random_graphs_give_equal_bytes(on_isa, name, n_graphs):
    r = on_isa(name, CODE + "\nprint(json.dumps(run(int(sys.argv[1]), int(sys.argv[2]))))", n_graphs, sample.SEED)
    assert r.returncode == 0, r.stderr
    got = json.loads(r.stdout)
    assert got["isa"] == name and got["wrong"] == []
    assert got["fused"] >= n_graphs                             # of two plans a graph, or nothing was tested


class Net:
    """x + a -> rms_norm -> * w, and what is built on it."""

    def __init__(self, n=96, rows=5):
        self.ctx, rng = gg.Context(), np.random.default_rng()
        self.x, self.a = (gg.from_numpy(self.ctx, rng.standard_normal((rows, n)).astype(np.float32)) for _ in "xa")
        self.w = gg.from_numpy(self.ctx, rng.standard_normal(n).astype(np.float32))
        self.sum = gg.add(self.x, self.a)
        self.norm = gg.rms_norm(self.sum, 1e-5)
        self.y = gg.mul(self.norm, self.w)

    def plan(self, *outputs, **kw):
        graph = gg.Graph(*(outputs or (self.y,)))
        gg.GraphAllocator(CPU).alloc_graph(graph)
        return CPU.graph_plan_create(graph, **kw)


def ops(plan):
    return [tuple(t.op for t in p.nodes) for p in plan.parts]


def test_a_run_becomes_one_kernel_and_the_dump_says_so():
    net = Net()
    plan = net.plan()
    assert ops(plan) == [(OP.ADD, OP.RMS_NORM, OP.MUL)]
    dump = plan.dump()
    assert "3 nodes in 1 kernels" in dump and dump.count("fused: ") == 2 and dump.count("not stored") == 2


def test_fusion_can_be_turned_off():
    net = Net()
    assert len(net.plan(fuse=False).parts) == 3
    assert gg.init_backend("CPU:fuse=0").fuse == 0


def test_a_changed_setting_makes_a_new_plan():
    """The plan kept for a backend's next compute depends on all settings of the backend."""
    cpu, net = gg.init_backend("CPU:n_threads=1"), Net()
    graph = gg.Graph(net.y)
    gg.GraphAllocator(cpu).alloc_graph(graph)
    cpu.graph_compute(graph)
    first, = graph.plans.plans()
    cpu.graph_compute(graph)
    assert len(first.parts) == 1 and graph.plans.plans() == [first]
    for change, n_parts, n_threads in (("fuse", 3, 1), ("n_threads", 3, 2)):
        setattr(cpu, change, {"fuse": 0, "n_threads": 2}[change])
        cpu.graph_compute(graph)
        kept, = graph.plans.plans()
        assert (len(kept.parts), kept.n_threads) == (n_parts, n_threads)


def test_a_result_that_was_never_stored_is_refused_by_name():
    net = Net()
    plan = net.plan()
    plan.compute()
    with pytest.raises(Overwritten, match=r"\[96, 5\] was never stored.*= mul.*set_output.*fuse=False"):
        plan.numpy(net.norm)
    plan = net.plan(net.norm, net.y)                            # an output is stored, and the run still fused
    plan.compute()
    assert np.isfinite(plan.numpy(net.norm)).all()


def test_a_sum_that_others_read_is_stored():
    net = Net()
    plan = net.plan(gg.add(gg.gelu(net.y), net.sum))
    assert ops(plan)[0] == (OP.ADD, OP.RMS_NORM, OP.MUL) and net.sum in plan.parts[0].stored
    plan.compute()
    assert (plan.numpy(net.sum) == net.x.numpy() + net.a.numpy()).all()


def test_tensors_placed_by_hand_keep_their_values():
    net = Net()
    gg.alloc_ctx_tensors(net.ctx, CPU, all=True)
    plan = CPU.graph_plan_create(gg.Graph(net.y))
    plan.compute()
    assert len(plan.parts) == 1 and (net.sum.numpy() == net.x.numpy() + net.a.numpy()).all()
    assert np.allclose(net.norm.numpy() * net.w.numpy(), net.y.numpy())


def test_a_run_that_would_overwrite_what_it_reads_stays_single():
    """The result lies half over a source: row r of one is row r + 1 of the other."""
    net = Net(n=64, rows=4)
    raw = gg.HostBuffer(CPU.device.buffer_type(), 4096)
    gg.tensor_alloc(raw, x := net.ctx.new_tensor(gg.F32, (64, 4)), 256)
    y = gg.mul(gg.rms_norm(x, 1e-5), net.w)
    gg.tensor_alloc(raw, y, 512)
    gg.tensor_alloc(raw, y.src[0], 2048)
    x.set(np.random.default_rng().standard_normal((4, 64)))
    want = gg.mul(gg.rms_norm(gg.from_numpy(net.ctx, x.numpy().copy()), 1e-5), net.w)
    plan = CPU.graph_plan_create(gg.Graph(y))
    assert ops(plan) == [(OP.RMS_NORM,), (OP.MUL,)]
    plan.compute()
    assert plan.numpy(y).tobytes() == gg.compute(want).tobytes()


def test_a_move_onto_a_source_undoes_the_fusion():
    net = Net(n=64, rows=4)
    buffers = [gg.HostBuffer(CPU.device.buffer_type(), 4096) for _ in "ab"]
    x = net.ctx.new_tensor(gg.F32, (64, 4))
    y = gg.mul(gg.rms_norm(x, 1e-5), net.w)
    for t, buf, offs in ((x, 0, 256), (y, 1, 512), (y.src[0], 1, 2048)):
        gg.tensor_alloc(buffers[buf], t, offs)
    values = np.random.default_rng().standard_normal((4, 64)).astype(np.float32)
    x.set(values)
    plan = CPU.graph_plan_create(gg.Graph(y))
    plan.compute()
    want = plan.numpy(y).tobytes()
    assert len(plan.parts) == 1
    TABLE.place(x.id, buffers[1].id, 256)                       # the leaf moves to where the result half covers it
    x.set(values)
    plan.compute()
    assert len(plan.parts) == 2 and plan.numpy(y).tobytes() == want


@pytest.mark.parametrize("bad", ["twice", "columns", "f16", "shape"])
def test_what_the_kernels_cannot_do_stays_single(bad):
    net = Net()
    y = {"twice": lambda: gg.mul(net.norm, net.norm),
         "columns": lambda: gg.mul(net.norm, gg.from_numpy(net.ctx, np.ones((5, 1), np.float32))),
         "f16": lambda: gg.mul(net.norm, gg.from_numpy(net.ctx, np.ones(96, np.float16))),
         "shape": lambda: gg.mul(net.norm, gg.from_numpy(net.ctx, np.ones((5, 32), np.float32)))}[bad]()
    plan = net.plan(y)
    assert ops(plan) == [(OP.ADD,), (OP.RMS_NORM,), (OP.MUL,)]
    plan.compute()
    assert np.isfinite(plan.numpy(y)).all()


@pytest.mark.parametrize("mask", [np.float16, np.float32])
@pytest.mark.parametrize("scaled", [True, False])
def test_scale_mask_soft_max_is_one_kernel(mask, scaled):
    ctx, rng = gg.Context(), np.random.default_rng()
    x = gg.from_numpy(ctx, rng.standard_normal((4, 6, 50)).astype(np.float32))
    values = np.where(rng.random((6, 50)) < 0.3, -np.inf, rng.standard_normal((6, 50))).astype(mask)
    graph = gg.Graph(y := gg.soft_max(gg.add(gg.scale(x, 0.3) if scaled else x, gg.from_numpy(ctx, values))))
    gg.GraphAllocator(CPU).alloc_graph(graph)
    plans = [CPU.graph_plan_create(graph, fuse=fuse) for fuse in (True, False)]
    got = []
    for plan in plans:
        plan.compute()
        got.append(plan.numpy(y).tobytes())
    assert len(plans[0].parts) == 1 and got[0] == got[1]


def test_a_scale_with_a_bias_is_no_soft_max_scale():
    ctx, rng = gg.Context(), np.random.default_rng()
    x, mask = (gg.from_numpy(ctx, rng.standard_normal((6, 50)).astype(np.float32)) for _ in "xm")
    graph = gg.Graph(gg.soft_max(gg.add(gg.scale_bias(x, 0.3, 1.0), mask)))
    gg.GraphAllocator(CPU).alloc_graph(graph)
    assert ops(CPU.graph_plan_create(graph)) == [(OP.SCALE,), (OP.ADD, OP.SOFT_MAX)]


class Gated:
    """x -> gate, up -> swiglu, and what is built on it."""

    def __init__(self, k=64, m=40, n=1, type=gg.F32, up_type=None):
        self.ctx, rng = gg.Context(), np.random.default_rng()
        self.x = gg.from_numpy(self.ctx, rng.standard_normal((n, k)).astype(np.float32))
        gate, up = (gg.from_numpy(self.ctx, rng.standard_normal((m, k)).astype(np.float32), type=t)
                    for t in (type, up_type or type))
        self.gate, self.up = gg.mul_mat(gate, self.x), gg.mul_mat(up, self.x)
        self.y = gg.swiglu_split(self.gate, self.up)

    def plan(self, *outputs, **kw):
        return Net.plan(self, *outputs, **kw)


GATED = (OP.MUL_MAT, OP.MUL_MAT, OP.GLU)


@pytest.mark.parametrize("type,m", [(gg.F32, 1), (gg.F32, 77), (gg.Q4_0, 40), (gg.Q4_0, 301)])
@pytest.mark.parametrize("n_rows", [1, 4])
def test_a_gated_unit_is_one_kernel_with_the_same_bytes(type, m, n_rows):
    net = Gated(512, m, type=type)
    with choices.forced(n_rows):
        plans = [net.plan(fuse=fuse) for fuse in (True, False)]
    assert ops(plans[0]) == [GATED] and len(plans[1].parts) == 3 and "-swiglu" in plans[0].dump()
    got = []
    for plan in plans:
        plan.compute()
        got.append(plan.numpy(net.y))
    assert got[0].tobytes() == got[1].tobytes() and np.isfinite(got[0]).all()
    with pytest.raises(Overwritten, match="never stored"):
        plans[0].numpy(net.gate)


@pytest.mark.parametrize("bad", [{"n": 2}, {"type": gg.Q4_0, "up_type": gg.Q8_0}, {"m": 32, "stored": True}], ids=str)
def test_gated_units_that_cannot_be_one_kernel(bad):
    stored = bad.pop("stored", False)
    net = Gated(**bad)
    plan = net.plan(*([net.up, net.y] if stored else [net.y]))
    assert GATED not in ops(plan)
    plan.compute()
    assert np.isfinite(plan.numpy(net.y)).all()


@pytest.mark.parametrize("n_threads", (1, 2))
@pytest.mark.parametrize("type", (gg.Q4_0, gg.F32))
def test_a_gated_unit_may_lie_over_a_column_that_is_read_first(type, n_threads):
    """One thread prepares the column of Q4_0 before it writes anything; a plain float32 column is read all the time,
    and another thread may read any column later."""
    net = Gated(64, 64, type=type)
    want = gg.compute(net.y)
    raw = gg.HostBuffer(CPU.device.buffer_type(), 4096)
    gg.tensor_alloc(raw, x := net.ctx.new_tensor(gg.F32, (64,)), 0)
    y = gg.swiglu_split(*(gg.mul_mat(t.src[0], x) for t in (net.gate, net.up)))
    gg.tensor_alloc(raw, y, 0)
    x.set(net.x.numpy())
    graph, cpu = gg.Graph(y), gg.init_backend("CPU", n_threads=n_threads)
    gg.GraphAllocator(cpu).alloc_graph(graph)
    plan = cpu.graph_plan_create(graph)
    assert (ops(plan) == [GATED]) is (type is gg.Q4_0 and n_threads == 1)
    plan.compute()
    assert plan.numpy(y).tobytes() == want.tobytes()


class Attention:
    """x -> norm -> q, k, v, and x + W q: the products of a layer for one token."""

    def __init__(self, n=64, type=gg.Q8_0, place=None):
        self.ctx, rng = gg.Context(), np.random.default_rng()

        def leaf(*shape, **kw):
            return gg.from_numpy(self.ctx, rng.standard_normal(shape).astype(np.float32), **kw)
        self.x, self.w = place(self.ctx) if place else leaf(n), leaf(n)
        self.h = gg.mul(gg.rms_norm(self.x, 1e-5), self.w)
        self.q, self.k, self.v = (gg.mul_mat(leaf(n, n, type=type), self.h) for _ in "qkv")
        self.y = gg.add(gg.mul_mat(leaf(n, n, type=type), self.q), self.x)
        self.outs = self.q, self.k, self.v, self.y

    def plan(self, *outs, n_threads=2, **kw):
        graph, cpu = gg.Graph(*(outs or self.outs)), gg.init_backend("CPU", n_threads=n_threads)
        gg.GraphAllocator(cpu).alloc_graph(graph)
        return cpu.graph_plan_create(graph, **kw)


NORMED = (OP.RMS_NORM, OP.MUL, OP.MUL_MAT)


def test_every_product_of_a_norm_computes_it_again():
    """With several threads none then waits for the norm; one thread computes it once."""
    net = Attention()
    plans = [net.plan(), net.plan(fuse=False), net.plan(n_threads=1), net.plan(n_threads=3)]
    assert ops(plans[0]) == ops(plans[3]) == [NORMED, (OP.MUL_MAT,), (OP.MUL_MAT,), (OP.MUL_MAT, OP.ADD)]
    assert [len(p.reads) for p in plans[0].parts] == [3, 3, 3, 3]
    assert ops(plans[2]) == [(OP.RMS_NORM, OP.MUL), *[(OP.MUL_MAT,)] * 4, (OP.ADD,)]
    got = []
    for plan in plans:
        plan.compute()
        got.append([plan.numpy(t).tobytes() for t in net.outs])
    assert all(g == got[0] for g in got)
    with pytest.raises(Overwritten, match="never stored"):
        plans[0].numpy(net.h)


def test_no_product_inside_a_reader_of_a_norm_is_stored():
    net = Attention()
    plan = net.plan(*(gg.add(t, net.w) for t in (net.q, net.k, net.v)))
    plan.compute()
    assert ops(plan) == [(*NORMED, OP.ADD), *[(OP.MUL_MAT, OP.ADD)] * 2]
    for t in (net.q, net.k, net.v):
        with pytest.raises(Overwritten, match="never stored"):
            plan.numpy(t)


@pytest.mark.parametrize("who", ("output", "other op", "two columns"))
def test_a_norm_that_others_read_is_stored(who):
    net = Attention()
    extra = {"output": lambda: net.h, "other op": lambda: gg.scale(net.h, 2.0),
             "two columns": lambda: gg.mul_mat(net.q.src[0], gg.concat(net.h, net.h, 1))}[who]()
    plan = net.plan(*net.outs, extra)
    assert NORMED not in ops(plan) and (OP.RMS_NORM, OP.MUL) in ops(plan)
    plan.compute()
    want = net.plan(*net.outs, extra, fuse=False)
    want.compute()
    assert plan.numpy(extra).tobytes() == want.numpy(extra).tobytes()


def test_products_do_not_write_what_the_norm_is_computed_of_again():
    """q lies over x: k and v, which come later, would see it."""
    raw = gg.HostBuffer(CPU.device.buffer_type(), 4096)

    def place(ctx):
        gg.tensor_alloc(raw, x := ctx.new_tensor(gg.F32, (64,)), 0)
        return x
    net, values = Attention(place=place), np.random.default_rng().standard_normal(64)
    gg.tensor_alloc(raw, net.q, 0)
    results = []
    for fuse in (True, False):
        net.x.set(values)
        plan = net.plan(net.q, net.k, net.v, fuse=fuse)
        assert NORMED not in ops(plan)
        plan.compute()
        results.append([plan.numpy(t).tobytes() for t in (net.q, net.k, net.v)])
    assert results[0] == results[1]


def test_a_sum_may_not_lie_over_the_column_of_its_product():
    """x + W x over x: a thread that comes later would multiply the sum."""
    raw = gg.HostBuffer(CPU.device.buffer_type(), 4096)
    ctx, rng = gg.Context(), np.random.default_rng()
    w = gg.from_numpy(ctx, rng.standard_normal((64, 64)).astype(np.float32), type=gg.Q8_0)
    gg.tensor_alloc(raw, x := ctx.new_tensor(gg.F32, (64,)), 0)
    y = gg.add(gg.mul_mat(w, x), x)
    gg.tensor_alloc(raw, y, 0)
    x.set(rng.standard_normal(64))
    graph = gg.Graph(y)
    gg.GraphAllocator(CPU).alloc_graph(graph)
    assert ops(CPU.graph_plan_create(graph)) == [(OP.MUL_MAT,), (OP.ADD,)]


def test_every_fusion_runs_in_some_random_graph():
    """The patterns of the random graphs above cover what is declared; a new pattern needs a new step there."""
    names = {"add": OP.ADD, "mul": OP.MUL, "norm": OP.NORM, "rms_norm": OP.RMS_NORM, "soft_max": OP.SOFT_MAX,
             "scale": OP.SCALE, "gelu_erf": OP.UNARY, "silu": OP.UNARY, "mul_mat": OP.MUL_MAT, "swiglu_split": OP.GLU}
    assert {op for fusion in KNOWN for op in fusion} <= set(names.values())
    assert all(f"gg.{name}" in CODE for name in names)
