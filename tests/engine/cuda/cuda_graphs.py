"""Whole graphs on the simulated GPU against the CPU: an encoder, a llama, splits, offload, experts.  Run by
test_cuda.py."""
import gc

import numpy as np
import pytest
from helpers import tiny_model
from helpers.sample import sampled

import ggjit as gg
from benchmarks.gpu_suite import exact, nmse
from ggjit.cuda import cuda_plan, simulated_driver
from ggjit.models import load_model
from ggjit.models.networks.peak import model_peak
from ggjit.ops.core.record import OP, WORD

RNG = np.random.default_rng(11)


@pytest.fixture
def cpu():
    return gg.init_backend("CPU", n_threads=1)


def leaves(backend, arrays, types=None):
    """{name: leaf} in one buffer of `backend`, which holds weights."""
    ctx = gg.Context()
    made = {k: ctx.new_tensor((types or {}).get(k, gg.I32 if a.dtype.kind == "i" else gg.F32), a.shape[::-1], k)
            for k, a in arrays.items()}
    gg.alloc_ctx_tensors(ctx, backend).set_usage(gg.USAGE_WEIGHTS)
    for k, a in arrays.items():
        made[k].set(a)
    return made


# ---------------------------------------------------------------- an encoder of two layers, as MiniLM's
N, DIM, HEADS, VOCAB = 5, 32, 2, 20


def encoder_arrays():
    a = {"ids": RNG.integers(0, VOCAB, N).astype(np.int32), "table": RNG.standard_normal((VOCAB, DIM))}
    for i in range(2):
        a |= {f"{n}{i}": RNG.standard_normal((m, k)) / np.sqrt(k) for n, k, m in (
            ("q", DIM, DIM), ("k", DIM, DIM), ("v", DIM, DIM), ("o", DIM, DIM), ("up", DIM, 64), ("down", 64, DIM))}
        a |= {f"g{i}": RNG.uniform(0.5, 1.5, DIM), f"b{i}": RNG.uniform(-1, 1, DIM)}
    return {k: v if v.dtype.kind == "i" else v.astype(np.float32) for k, v in a.items()}


def encoder(w):
    x = gg.get_rows(w["table"], w["ids"])
    for i in range(2):
        q, k, v = (gg.permute(gg.reshape_3d(gg.mul_mat(w[f"{n}{i}"], x), DIM // HEADS, HEADS, N), 0, 2, 1, 3)
                   for n in "qkv")
        p = gg.soft_max_ext(gg.mul_mat(k, q), None, (DIM // HEADS) ** -0.5, 0.0)
        o = gg.mul_mat(gg.cont(gg.transpose(v)), p)
        o = gg.reshape_2d(gg.cont(gg.permute(o, 0, 2, 1, 3)), DIM, N)
        x = gg.norm(gg.add(x, gg.mul_mat(w[f"o{i}"], o)), 1e-12)
        x = gg.add(gg.mul(x, w[f"g{i}"]), w[f"b{i}"])
        x = gg.add(x, gg.mul_mat(w[f"down{i}"], gg.gelu_erf(gg.mul_mat(w[f"up{i}"], x))))
    return gg.l2_norm(gg.mean(gg.cont(gg.transpose(x))), 1e-12)


@pytest.mark.parametrize("type", sampled([("F32",), ("F16",), ("Q8_0",)], lambda case: ["one"]))
def test_an_encoder_on_the_gpu_alone(gpu, cpu, type):
    arrays = encoder_arrays()
    types = {k: getattr(gg, type) for k in arrays if k[:-1] in ("q", "k", "v", "o", "up", "down")}
    got, want = (gg.compute(encoder(leaves(b, arrays, types)), backend=b) for b in (gpu, cpu))
    assert nmse(got, want) < (1e-10 if type == "F32" else 1e-5)


def test_an_encoder_as_one_kernel_has_the_bits_of_the_captured_graph(gpu):
    arrays, got = encoder_arrays(), []
    for backend in (gpu, gg.init_backend("CUDA0:persistent=1")):
        y = encoder(leaves(backend, arrays))
        graph = gg.Graph(y)
        gg.GraphAllocator(backend).alloc_graph(graph)
        plan = backend.graph_plan_create(graph)
        for _ in range(2):
            plan.compute()
        got.append(plan.numpy(y))
    np.testing.assert_array_equal(*got)
    assert plan.not_walked_because is None and 0 < plan._walk.n_waits < len(plan._walk.rows) - 4


# ---------------------------------------------------------------- a llama
@pytest.mark.parametrize("type,n_gpu_layers", sampled([("F32", 2), ("Q8_0", 1)], lambda case: ["one"]))
def test_a_llama_with_some_layers_on_the_gpu(tmp_path, gpu, cpu, type, n_gpu_layers):
    path, ids, more = tiny_model.write(tmp_path / "tiny.gguf", type=type), [3, 17], [31]
    with load_model(path, backend=cpu) as m, load_model(path, gpu, n_gpu_layers=n_gpu_layers) as g:
        for got, want in ((g.logits(ids), m.logits(ids)), (g.decode(more), m.decode(more))):
            assert nmse(got, want) < 1e-5
        on_gpu = [k.buffer.buft is gpu.default_buffer_type for k, _ in g.cache]
        assert on_gpu == [False] * (g.n_layer - n_gpu_layers) + [True] * n_gpu_layers
        ran = {s.backend.name for s in g.scheduler.splits if any(t.op == OP.MUL_MAT for t in s.nodes)}
        assert ran == {"CUDA0", "CPU"}


def test_a_model_loaded_onto_the_gpu(tmp_path):
    path, ids = tiny_model.write(tmp_path / "tiny.gguf", type="F16"), [3, 17]
    with load_model(path, n_threads=1) as m, load_model(path, backend="CUDA0", reserve=False) as g:
        want, got = m.logits(ids), g.logits(ids)
        assert nmse(got, want) < 1e-5
        assert nmse(g.decode([5]), m.decode([5])) < 1e-5
        with m.patch({"blk.0.ffn_out": 0.5}), g.patch({"blk.0.ffn_out": 0.5}):
            got, want = (x.capture("blk.1.l_out", [5])["blk.1.l_out"] for x in (g, m))
            assert nmse(got, want) < 1e-5
        assert [b.buft.name for b in (*g.weights.buffers, g.kv_buffer)] == ["CUDA0"] * 2


def taken(device):
    """[bytes] of the driver's pieces of device memory, the address of each."""
    device.collect()
    return {base: nbytes for base, (_, nbytes, owner) in simulated_driver._memory.items() if owner is not None}


@pytest.mark.parametrize("params", ["", "persistent=1,fuse=1"])
def test_a_graph_takes_the_memory_that_is_announced(params):
    """To the byte: the arena, rows and scratch memory of the plan, the table of a walker."""
    backend, arrays = gg.init_backend(f"CUDA0:{params}"), encoder_arrays()
    graph = gg.Graph(encoder(leaves(backend, arrays, {k: gg.Q8_0 for k in arrays if k[:-1] in ("up", "down")})))
    found = [taken(backend.device)]
    says = gg.measure(graph, planner="ggml", target=backend).peak
    allocator = gg.GraphAllocator(backend)
    allocator.alloc_graph(graph)
    found.append(taken(backend.device))
    plan = backend.graph_plan_create(graph)
    for _ in range(2):
        plan.compute()
    found.append(taken(backend.device))
    arena, own = (sum(found[i + 1][x] for x in found[i + 1].keys() - found[i].keys()) for i in range(2))
    table = plan._walk._counter.size if params else 0
    assert arena == says and plan.work_nbytes > 0
    assert own == plan.work_nbytes + WORD * (plan.rows.size + cuda_plan.STATUS_WORDS) + table


def test_a_model_takes_the_memory_that_is_announced(tmp_path, gpu):
    """Weights, cache and arena as `ggjit peak` says without a GPU, but for places at multiples of 256 bytes."""
    path, options = tiny_model.write(tmp_path / "tiny.gguf", type="Q8_0"), dict(n_ctx=64, n_batch=8, n_gpu_layers=-1)
    announced = model_peak(path, devices={"GPU0": "1G"}, **options).memory.devices["GPU0"]
    before = taken(gpu.device)
    with load_model(path, backend=gpu, **options) as m:
        here, found = m.memory().devices["CUDA0"], taken(gpu.device)
    pieces = [found[x] for x in found.keys() - before.keys()]
    assert sum(pieces) >= sum(here.values()) and here["KV cache"] == announced["KV cache"]
    assert all(abs(here[x] - announced[x]) < 1 << 12 for x in announced), (here, announced)


@pytest.mark.parametrize("n_before", sampled([(n,) for n in range(5)], lambda case: ["one"]))
def test_out_of_device_memory_while_a_model_loads(tmp_path, n_before):
    """A typed error that names a remedy; what was taken is given back, and the next model loads."""
    path = tiny_model.write(tmp_path / "tiny.gguf", type="F32")
    device = gg.init_backend("CUDA0").device
    device.collect()
    free = device.memory()[0]
    simulated_driver.fail["cuMemAlloc"] = "CUDA_ERROR_OUT_OF_MEMORY", n_before
    try:
        with pytest.raises(gg.OutOfMemory, match="n_gpu_layers"), load_model(path, backend="CUDA0", reserve=False) as m:
            m.logits([3])
    finally:
        simulated_driver.fail.clear()
    gc.collect()
    device.collect()
    assert device.memory()[0] == free
    with load_model(path, n_threads=1) as m:
        assert np.isfinite(m.logits([3])).all()


def test_a_large_batch_is_offloaded_and_a_small_one_is_not(gpu, cpu):
    w = leaves(cpu, {"w": RNG.standard_normal((9, 32)).astype(np.float32)})["w"]
    for n, offloaded in ((32, True), (31, False)):
        x = gg.from_numpy(gg.Context(), RNG.standard_normal((n, 32)).astype(np.float32))
        y = gg.mul_mat(w, x)
        sched = gg.Scheduler([gpu, cpu])
        graph = gg.Graph(y)
        sched.graph_compute(graph)
        assert (sched.get_tensor_backend(y) is gpu) == offloaded
        assert nmse(sched.numpy(y), gg.compute(y)) < 1e-5


def test_experts_stay_on_the_host_and_only_those_used_are_copied(gpu, cpu):
    experts = RNG.standard_normal((8, 6, 64)).astype(np.float32)
    w = leaves(cpu, {"w": experts})["w"]
    x = leaves(gpu, {"x": RNG.standard_normal((40, 1, 64)).astype(np.float32)})["x"]
    ids = gg.from_numpy(gg.Context(), np.repeat([[2, 5]], 40, 0).astype(np.int32))
    y = gg.mul_mat_id(w, x, ids)
    sched = gg.Scheduler([gpu, cpu])
    sched.graph_compute(gg.Graph(y))
    assert sched.get_tensor_backend(y) is gpu
    want = np.einsum("emk,tuk->tem", experts[[2, 5]], x.numpy().reshape(40, 1, 64))
    assert nmse(sched.numpy(y), want) < 1e-5


def test_ops_without_a_kernel_run_on_the_cpu_in_between(gpu, cpu):
    x = RNG.standard_normal((3, 16)).astype(np.float32)
    a = leaves(gpu, {"a": x})["a"]
    y = gg.neg(gg.map_custom1(gg.sqr(a), lambda d, s, ith, nth: np.cumsum(s, -1, out=d)))
    assert not gpu.supports_op(y.src[0])
    sched = gg.Scheduler([gpu, cpu])
    sched.graph_compute(gg.Graph(y))
    np.testing.assert_allclose(sched.numpy(y), -np.cumsum(x * x, -1), rtol=1e-5)


# ---------------------------------------------------------------- columns as 8-bit codes
def random_leaf(gpu, type, *ne):
    ctx = gg.Context()
    t = ctx.new_tensor(type, ne)
    gg.alloc_ctx_tensors(ctx, gpu)
    t.set(RNG.standard_normal(ne[::-1]).astype(np.float32))
    return t


def computed(gpu, *outputs):
    graph = gg.Graph(*outputs)
    gg.GraphAllocator(gpu).alloc_graph(graph)
    plan = gpu.graph_plan_create(graph)
    plan.compute()
    return plan, [plan.numpy(t) for t in outputs]


def leaves_the_codes(gpu, monkeypatch, w, make):
    """A product of w with make() takes a launch less than with a kernel that quantises, and has the same bits."""
    got, n_launches = [], []
    for found in (cuda_plan.before_product, lambda *args: None):
        monkeypatch.setattr(cuda_plan, "before_product", found)
        h = make()
        plan, values = computed(gpu, gg.mul_mat(w, h), gg.neg(h))
        got.append(values)
        n_launches.append(sum(done_by < 0 for done_by in plan._done_by))
    assert n_launches[1] == n_launches[0] + 1
    for a, b in zip(*got, strict=True):
        np.testing.assert_array_equal(a, b)


def test_products_of_one_kind_with_columns_of_their_own(gpu):
    """The codes of one column are not taken for those of another one of its shape."""
    x, z = (random_leaf(gpu, gg.F32, 64, 1) for _ in range(2))
    pairs = [(random_leaf(gpu, gg.Q8_0, 64, 8), c) for c in (x, z, z, x)]
    plan, got = computed(gpu, *(gg.mul_mat(w, c) for w, c in pairs))
    for y, (w, c) in zip(got, pairs, strict=True):
        assert nmse(y, np.reshape(exact(c), (1, 64)) @ np.reshape(exact(w), (8, 64)).T) <= 1e-3
    assert sum(done_by >= 0 for done_by in plan._done_by) == 1         # of the second product with z


@pytest.mark.parametrize("make", [gg.mul, gg.swiglu_split, gg.geglu_split, lambda x, z: gg.swiglu(gg.concat(x, z, 0))],
                         ids=["mul", "swiglu", "geglu", "halves"])
def test_the_node_before_a_product_leaves_the_codes(gpu, monkeypatch, make):
    """The bits of a kernel of its own that quantises, by a launch less; the node's result is there, too."""
    x, z, w = (random_leaf(gpu, *leaf) for leaf in ((gg.F32, 96, 2), (gg.F32, 96, 2), (gg.Q8_0, 96, 8)))
    leaves_the_codes(gpu, monkeypatch, w, lambda: make(x, z))


def test_a_result_that_is_written_again_is_quantised_again(gpu):
    """What overwrites the column comes between two products with it."""
    x, z, w = (random_leaf(gpu, *leaf) for leaf in ((gg.F32, 64, 1), (gg.F32, 64, 1), (gg.Q8_0, 64, 8)))
    h = gg.mul(x, z)
    first = gg.mul_mat(w, h)
    again = gg.mul_mat(w, gg.scale_inplace(h, 3.0))
    _, (a, b) = computed(gpu, first, again)
    assert nmse(b, 3 * a) <= 1e-6


@pytest.mark.parametrize("n, n_kv, piped", [(2, 9, "0"), (2, 20, "0"), (1, 70, "1")],
                         ids=["one block", "shared keys", "piped"])
def test_an_attention_leaves_the_codes_of_all_its_heads(gpu, monkeypatch, n, n_kv, piped):
    """The bits of a kernel of its own that quantises."""
    monkeypatch.setenv("GGJIT_PIPED", piped)
    q, k, w = (random_leaf(gpu, *leaf) for leaf in ((gg.F32, 32, n, 4), (gg.F16, 32, n_kv, 2), (gg.Q8_0, 128, 8)))
    leaves_the_codes(gpu, monkeypatch, w, lambda: gg.reshape_2d(
        gg.flash_attn_ext(q, k, k, None, 0.2, 0.0, 0.0), 128, n))
