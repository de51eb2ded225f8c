"""Experts of mul_mat_id whose weights stay on the host: only those in use move, and every value is right.

Real kernels on test devices with memory of their own.  Memory is NaN bytes before every run, so an expert that was not
copied and is read shows; byte counts show that the others did not move.
"""
import numpy as np
import pytest
from helpers import devices
from helpers.schedulers import outputs_alone, poison, weight

import ggjit as gg
from ggjit.ops.core.record import OP
from ggjit.sched.experts import MAX_PAD_NBYTES

N_EXPERT, WIDTH, ROWS, N_USED, N_TOKENS = 16, 64, 32, 2, 5
RNG = np.random.default_rng(8)


def experts_world(delay=None, **options):
    """A device that takes mul_mat_id and likes large batches, and the CPU that holds the weights."""
    fake = devices.Fake("A", ops={OP.MUL_MAT_ID, OP.UNARY, OP.MUL, OP.ADD}, delay=delay,
                        offload=lambda t: t.op == OP.MUL_MAT_ID)
    cpu = gg.init_backend("CPU:n_threads=1")
    return fake, gg.Scheduler([fake.init_backend(), cpu], **options), cpu


def expert_weight(ctx, cpu, name, type=gg.F32, ne=(WIDTH, ROWS, N_EXPERT)):
    w = ctx.new_tensor(type, ne, name)
    buf = cpu.default_buffer_type.alloc_buffer(w.nbytes)
    buf.set_usage(gg.USAGE_WEIGHTS)
    gg.tensor_alloc(buf, w, 0)
    w.set(RNG.standard_normal((ne[2], ne[1], ne[0]), dtype=np.float32))
    return w


def inputs(ctx, cpu):
    x, ids = ctx.new_tensor(gg.F32, (WIDTH, 1, N_TOKENS), "x"), ctx.new_tensor(gg.I32, (N_USED, N_TOKENS), "ids")
    gg.alloc_ctx_tensors(ctx, cpu)
    x.set(RNG.standard_normal((N_TOKENS, 1, WIDTH), dtype=np.float32))
    return x, ids


def draw_ids(ids, among=N_EXPERT):
    ids.set(np.stack([RNG.permutation(among)[:N_USED] for _ in range(N_TOKENS)]).astype(np.int32))


def moved_nbytes(w, ids):
    """Bytes of the experts in use, each run of neighbours with the padding behind it."""
    used, size, total = np.unique(ids), w.nb[2], 0
    for group in np.split(used, np.flatnonzero(np.diff(used) != 1) + 1):
        last = int(group[-1])
        total += len(group) * size + (min(size, MAX_PAD_NBYTES) if last < w.ne[2] - 1 else 0)
    return total


def run_and_compare(sched, graph, message=""):
    values = outputs_alone(graph)               # first: the graph may write to its inputs
    sched.alloc_graph(graph)
    poison(sched)
    sched.graph_compute(graph)
    for t, want in zip(graph.outputs, values, strict=True):
        np.testing.assert_array_equal(sched.numpy(t), want, err_msg=f"{message}\n{sched.explain()}")
    devices.check_guards(*(b.device for b in sched.backends[:-1]))


@pytest.mark.parametrize("options", [{}, {"delay": 1e-4}, {"parallel": True}, {"parallel": True, "delay": 1e-4},
                                     {"keep_weights": True}, {"motion": True}, {"planner": "best"}],
                         ids=lambda o: " ".join(o) or "plain")
@pytest.mark.parametrize("type", [gg.F32, gg.Q4_0], ids=repr)
def test_ids_change_from_run_to_run_B4(type, options):
    fake, sched, cpu = experts_world(**options)
    ctx = gg.Context()
    w = expert_weight(ctx, cpu, "w", type)
    x, ids = inputs(ctx, cpu)
    graph = gg.Graph(gg.silu(gg.mul_mat_id(w, x, ids)))
    for run, among in enumerate((N_EXPERT, 3, 2, N_EXPERT, N_EXPERT)):
        draw_ids(ids, among)
        run_and_compare(sched, graph, run)
        node = graph.nodes[0]
        assert sched.get_tensor_backend(node).name == "A"
        small = sched.copied_nbytes - moved_nbytes(w, ids.numpy())
        assert 0 <= small <= x.nbytes + ids.nbytes, "the experts in use and the inputs, nothing else"


def test_ids_computed_on_the_way_B4():
    """As in a model: a router on the CPU, the best k as a view of argsort, three weights with the same ids."""
    fake, sched, cpu = experts_world()
    ctx = gg.Context()
    up, gate = (expert_weight(ctx, cpu, n) for n in ("up", "gate"))
    down = expert_weight(ctx, cpu, "down", ne=(ROWS, WIDTH, N_EXPERT))
    router = weight(ctx, cpu.default_buffer_type, "router", (WIDTH, N_EXPERT))
    router.set(RNG.standard_normal((N_EXPERT, WIDTH), dtype=np.float32))
    x, _ = inputs(ctx, cpu)
    ids = gg.top_k(gg.mul_mat(router, gg.reshape_2d(x, WIDTH, N_TOKENS)), N_USED)
    h = gg.mul(gg.silu(gg.mul_mat_id(gate, x, ids)), gg.mul_mat_id(up, x, ids))
    graph = gg.Graph(gg.mul_mat_id(down, h, ids))
    for _ in range(3):
        x.set(RNG.standard_normal((N_TOKENS, 1, WIDTH), dtype=np.float32))
        run_and_compare(sched, graph)
        assert sched.copied_nbytes < up.nbytes + gate.nbytes + down.nbytes


@pytest.mark.parametrize("second", ["other ids", "same ids", "ids written between", "the whole weight"])
def test_two_readers_of_one_weight(second):
    """The copy serves all readers on the device: with the experts of the first alone, the others would read nothing."""
    fake, sched, cpu = experts_world()
    fake.ops |= {OP.SUM_ROWS}
    ctx = gg.Context()
    w = expert_weight(ctx, cpu, "w")
    x, ids = inputs(ctx, cpu)
    other = ctx.new_tensor(gg.I32, (N_USED, N_TOKENS), "other")
    gg.alloc_ctx_tensors(ctx, cpu)
    first = gg.mul_mat_id(w, x, ids)
    if second == "the whole weight":
        graph = gg.Graph(first, gg.sum_rows(w))
        sched.set_tensor_backend(graph.nodes[1], sched.backends[0])
    else:
        then = {"other ids": other, "same ids": ids}.get(second)
        then = gg.cpy(other, ids) if then is None else then
        graph = gg.Graph(gg.add(gg.silu(first), gg.mul_mat_id(w, x, then)))
    start = RNG.permutation(N_EXPERT).astype(np.int32)
    for _ in range(3):
        ids.set(np.tile(start[:2], (N_TOKENS, 1)))
        other.set(np.tile(start[2:4], (N_TOKENS, 1)))
        run_and_compare(sched, graph)
        assert (sched.copied_nbytes < w.nbytes) == (second == "same ids")
        start = np.roll(start, 3)


def test_ids_rewritten_between_two_weights():
    fake, sched, cpu = experts_world()
    ctx = gg.Context()
    one, two = (expert_weight(ctx, cpu, n) for n in ("one", "two"))
    x, ids = inputs(ctx, cpu)
    other = ctx.new_tensor(gg.I32, (N_USED, N_TOKENS), "other")
    gg.alloc_ctx_tensors(ctx, cpu)
    graph = gg.Graph(gg.mul_mat_id(one, x, ids), gg.cpy(other, ids), gg.mul_mat_id(two, x, ids))
    for k in range(3):
        ids.set(np.tile(np.array([k, k + 1], np.int32), (N_TOKENS, 1)))
        other.set(np.tile(np.array([k + 8, k + 10], np.int32), (N_TOKENS, 1)))
        run_and_compare(sched, graph)


@pytest.mark.parametrize("bad", [N_EXPERT, -1, 1 << 30, -(1 << 31)])
@pytest.mark.parametrize("where", ["leaf", "computed"])
def test_ids_out_of_range_are_named(bad, where):
    fake, sched, cpu = experts_world()
    ctx = gg.Context()
    w = expert_weight(ctx, cpu, "w")
    x, ids = inputs(ctx, cpu)
    given = gg.cont(gg.transpose(gg.cont(gg.transpose(ids)))) if where == "computed" else ids
    graph = gg.Graph(gg.silu(gg.mul_mat_id(w, x, given)))
    draw_ids(ids)
    run_and_compare(sched, graph)
    values = ids.numpy()
    broken = values.copy()
    broken[2, 1] = bad
    ids.set(broken)
    for _ in range(2):
        with pytest.raises(gg.IndexRangeError, match=f"expert id {bad} is outside 0..{N_EXPERT - 1}"):
            sched.graph_compute(graph)
        with pytest.raises(gg.Overwritten, match="did not finish"):
            sched.numpy(graph.outputs[0])
    ids.set(values)
    run_and_compare(sched, graph)


def test_no_tokens_and_one_expert():
    fake, sched, cpu = experts_world()
    ctx = gg.Context()
    w = expert_weight(ctx, cpu, "w", ne=(WIDTH, ROWS, 1))
    x, ids = ctx.new_tensor(gg.F32, (WIDTH, 1, 3), "x"), ctx.new_tensor(gg.I32, (1, 3), "ids")
    gg.alloc_ctx_tensors(ctx, cpu)
    x.set(RNG.standard_normal((3, 1, WIDTH), dtype=np.float32))
    ids.set(np.zeros((3, 1), np.int32))
    run_and_compare(sched, gg.Graph(gg.mul_mat_id(w, x, ids)))
