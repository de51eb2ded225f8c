"""What cuBLAS and CCCL compute in the place of our own kernels, and when: in the simulator, with fakes of their
bindings.  Run by test_cuda.py."""
import contextlib
import gc
import importlib.util
import inspect
import random
import sys
import types

import numpy as np
import pytest
from helpers.random_blocks import in_8_bits, random_blocks

import ggjit as gg
from benchmarks.gpu_suite import exact, nmse
from ggjit.cuda import cccl, cublas, libraries
from ggjit.cuda import simulated_driver as cuda_sim
from ggjit.ops.core.spec import all_specs
from ggjit.ops.cuda import argsort
from ggjit.ops.cuda.blocks import BLOCKS
from ggjit.ops.cuda.matmul import mul_mat_dense
from ggjit.ops.cuda.native.launch import Gemm, Sort, node_ways

RNG = np.random.default_rng()


# ---------------------------------------------------------------- dense products, codes of columns
def products(gpu, type, n, n_products, k=256, m=12):
    """(plan, outputs, what they should be) of products of one matrix of columns with several of `type`."""
    ctx = gg.Context()
    *ws, x = [*(ctx.new_tensor(type, (k, m)) for _ in range(n_products)), ctx.new_tensor(gg.F32, (k, n))]
    gg.alloc_ctx_tensors(ctx, gpu)
    x.set(RNG.standard_normal((n, k)).astype(np.float32))
    for w in ws:
        if type.quantized:
            w.set_bytes(random_blocks(RNG, type, m, k))
        else:
            w.set(RNG.standard_normal((m, k)).astype(np.float32))
    ys = [gg.mul_mat(w, x) for w in ws]
    want = [np.reshape(all_specs()[y.op].reference(y, exact(w), exact(x)), (n, m)) for y, w in zip(ys, ws, strict=True)]
    graph = gg.Graph(*ys)
    gg.GraphAllocator(gpu).alloc_graph(graph)
    return gpu.graph_plan_create(graph), ys, want


@pytest.mark.parametrize("type", random.sample([gg.F32, gg.F16, gg.BF16, *BLOCKS], 4), ids=str)
def test_products_by_cublas(gpu, monkeypatch, type):
    monkeypatch.setattr(mul_mat_dense, "available", lambda: True)
    plan, ys, want = products(gpu, type, 9, 2)
    for _ in range(3):                          # launched, captured, replayed
        before = len(cuda_sim.launched)
        plan.compute()
        assert all(nmse(plan.numpy(y), w) < (1e-12 if type is gg.F32 else 1e-4) for y, w in zip(ys, want, strict=True))
        assert cuda_sim.launched[before:].count("cublas") == 2


@pytest.mark.parametrize("faster", ["own", "cublas"])
def test_products_go_the_way_that_was_measured_to_be_faster(gpu, monkeypatch, tmp_path, faster):
    """Measured once for a class of shapes, kept for the next process; a damaged file counts as absent."""
    measured = []

    def measure(device, t):
        measured.append(node_ways()[t.op].class_of(t))
        return {way: 1e-5 if way == faster else 2e-5 for way in ("own", "cublas")}
    monkeypatch.setattr(mul_mat_dense, "available", lambda: True)
    monkeypatch.setattr(mul_mat_dense, "decided", lambda: False)
    monkeypatch.setattr(libraries, "measure", measure)
    monkeypatch.setattr("ggjit.ops.native.measured.cache_dir", lambda: tmp_path)
    for n_measured, damaged in ((1, False), (1, False), (2, True)):
        for file in (tmp_path / "cuda").glob("*") if damaged else ():
            file.write_text("{")
        monkeypatch.setattr(gpu.device, "measured", None)           # as in a new process
        with pytest.warns(UserWarning, match="measured again") if damaged else contextlib.nullcontext():
            plan, *_ = products(gpu, gg.F16, 9, 2)
        assert measured == ["f16 f32 256x16x16"] * n_measured
        assert all(("cublas" in k.name) == (faster == "cublas") for k in plan.kernels)


def test_products_are_measured_on_memory_of_their_own(gpu, monkeypatch, tmp_path):
    """Both ways run; where there is too little memory cuBLAS multiplies, and nothing is kept."""
    monkeypatch.setattr(mul_mat_dense, "available", lambda: True)
    monkeypatch.setattr(mul_mat_dense, "decided", lambda: False)
    monkeypatch.setattr(gpu.device, "measured", {})
    monkeypatch.setattr("ggjit.ops.native.measured.cache_dir", lambda: tmp_path)
    monkeypatch.setattr(libraries, "ROUNDS", 1)
    y = gg.mul_mat(gg.Context().new_tensor(gg.F32, (16, 8)), gg.Context().new_tensor(gg.F32, (16, 9)))
    before = len(cuda_sim.launched)
    assert set(libraries.measure(gpu.device, y)) == {"own", "cublas"}
    ran = cuda_sim.launched[before:]
    assert "cublas" in ran and any(name.startswith("mul_mat_tile") for name in ran)
    monkeypatch.setitem(cuda_sim.fail, "cuMemAlloc", ("CUDA_ERROR_OUT_OF_MEMORY", 0))
    assert any(isinstance(x, Gemm) for x in libraries.chosen(gpu, y))
    assert not gpu.device.measured and not list(tmp_path.iterdir())


class FakeBindings:
    """The functions of nvmath.bindings.cublas that ggjit calls; what they were called with."""
    called = []

    def create():
        return 7

    def destroy(handle):
        FakeBindings.called.append(("destroy", handle))

    def set_stream(handle, stream_id):
        FakeBindings.called.append(("set_stream", handle, stream_id))

    def set_workspace(handle, workspace, workspace_size_in_bytes):
        FakeBindings.called.append(("set_workspace", handle, workspace, workspace_size_in_bytes))

    def gemm_ex(handle, transa, transb, m, n, k, alpha, a, atype, lda, b, btype, ldb, beta, c, ctype, ldc, compute_type,
                algo):
        FakeBindings.called.append(("gemm_ex", handle, transa, transb, m, n, k, a, lda, b, ldb, c, ldc))


def test_what_cublas_is_called_with(gpu, monkeypatch):
    """The stream, then the workspace that it takes away, then rows of a transposed; the handle is given back."""
    monkeypatch.setattr(cublas, "extra", lambda module, name: FakeBindings)
    made = cublas.Cublas(gpu.device)
    made.multiply(Gemm(gg.F16, 12, 9, 64, 64, 72, 16, None, None), 100, 200, 300, 5)
    (_, *stream), (_, *workspace), (_, *gemm) = FakeBindings.called
    assert stream == [7, 5] and workspace == [7, made.workspace.base, cublas.WORKSPACE_NBYTES]
    assert gemm == [7, 1, 0, 12, 9, 64, 100, 64, 200, 72, 300, 16]
    del made
    gc.collect()
    gpu.device.collect()
    assert FakeBindings.called[-1] == ("destroy", 7)


def test_the_fake_takes_what_nvmath_takes():
    bindings = pytest.importorskip("nvmath.bindings.cublas", reason="pip install 'ggjit[cublas]'")
    for name, f in inspect.getmembers(FakeBindings, inspect.isfunction):
        real = getattr(bindings, name)
        assert list(inspect.signature(f).parameters) == list(inspect.signature(real).parameters), name


def test_cublas_without_its_extra_names_it(gpu):
    if importlib.util.find_spec("nvmath") is not None:
        pytest.skip("nvmath-python is installed")
    with pytest.raises(gg.MissingExtra, match="nvmath.*pip install 'ggjit.cublas.'"):
        cublas.Cublas(gpu.device)


# ---------------------------------------------------------------- sorts of long rows by CCCL
def ties_and_nans(rng, n_rows, n):
    x = rng.integers(-40, 40, (n_rows, n)).astype(np.float32)
    x[rng.uniform(size=x.shape) < 0.1] = np.nan
    x[0, :4], x[-1, 3] = (0, -0.0, np.inf, -np.inf), -np.nan
    return x


@pytest.mark.parametrize("build", [lambda a: gg.argsort(a, 0), lambda a: gg.argsort(a, 1), lambda a: gg.top_k(a, 7)])
def test_sorts_by_cccl_are_those_of_our_own_kernels(gpu, monkeypatch, build):
    """Launched, captured, replayed; equal values stand as they stood."""
    rng = np.random.default_rng()
    ctx, n = gg.Context(), rng.integers(65, 300)
    a = ctx.new_tensor(gg.F32, (n, 3))
    gg.alloc_ctx_tensors(ctx, gpu)
    a.set(ties_and_nans(rng, 3, n))
    want = gg.compute(build(a), backend=gpu)
    monkeypatch.setattr(argsort, "available", lambda: True)
    graph = gg.Graph(y := build(a))
    gg.GraphAllocator(gpu).alloc_graph(graph)
    plan = gpu.graph_plan_create(graph)
    for _ in range(3):
        before = len(cuda_sim.launched)
        plan.compute()
        np.testing.assert_array_equal(plan.numpy(y), want)
        assert cuda_sim.launched[before:].count("cccl") == 1
    assert plan._graph.exec is not None


@pytest.mark.parametrize("faster", ["own", "cccl", "it is absent"])
def test_sorts_go_the_way_that_was_measured_to_be_faster(gpu, monkeypatch, tmp_path, faster):
    """Our own where CCCL does not serve; it is asked once."""
    asked = []

    def measure(device, t):
        asked.append(node_ways()[t.op].class_of(t))
        if faster == "it is absent":
            raise gg.MissingExtra("cuda.compute is not installed")
        return {way: 1e-5 if way == faster else 2e-5 for way in ("own", "cccl")}
    monkeypatch.setattr(argsort, "available", lambda: True)
    monkeypatch.setattr(argsort, "decided", lambda: False)
    monkeypatch.setattr(libraries, "measure", measure)
    monkeypatch.setattr("ggjit.ops.native.measured.cache_dir", lambda: tmp_path)
    monkeypatch.setattr(gpu.device, "measured", None)
    y = gg.argsort(gg.Context().new_tensor(gg.F32, (300, 3)), 1)
    for _ in range(2):
        assert any(isinstance(x, Sort) for x in libraries.chosen(gpu, y)) == (faster == "cccl")
    assert asked == ["argsort 512x4"] and bool(list(tmp_path.glob("cuda/*"))) == (faster != "it is absent")


def test_a_sort_that_was_chosen_and_fails_is_our_own(gpu, monkeypatch):
    class Absent:
        def prepare(self, sort):
            raise gg.NotSupported("CCCL does not sort; GGJIT_CCCL=0 does without it")
    monkeypatch.setattr(argsort, "available", lambda: True)
    monkeypatch.setattr(argsort, "decided", lambda: False)
    monkeypatch.setattr(gpu.device, "measured", {"top_k 512x1": {"own": 2.0, "cccl": 1.0}})
    y = gg.top_k(gg.Context().new_tensor(gg.F32, (300,)), 2)
    assert any(isinstance(x, Sort) for x in libraries.chosen(gpu, y))
    monkeypatch.setattr(gpu, "cccl", Absent())
    assert not any(isinstance(x, Sort) for x in libraries.chosen(gpu, y))


def test_sorts_are_measured_on_memory_of_their_own(gpu, monkeypatch):
    monkeypatch.setattr(argsort, "available", lambda: True)
    monkeypatch.setattr(libraries, "ROUNDS", 1)
    y = gg.top_k(gg.Context().new_tensor(gg.F32, (300,)), 2)
    before = len(cuda_sim.launched)
    assert set(libraries.measure(gpu.device, y)) == {"own", "cccl"}
    assert {"cccl", "top_k_long"} <= set(cuda_sim.launched[before:])


class FakeCompute:
    """The functions of cuda.compute that ggjit calls; what they were called with."""
    called = []
    SortOrder = types.SimpleNamespace(ASCENDING="up")

    def ProxyArray(dtype):
        return dtype

    def make_radix_sort(*, d_in_keys, d_out_keys, d_in_values, d_out_values, order, compute_capability=None):
        FakeCompute.called.append((d_in_keys, order, compute_capability))
        return FakeCompute.sorter

    def serialize(algorithm):
        return b"a sorter"

    def deserialize(blob):
        assert blob == b"a sorter"
        return FakeCompute.sorter

    def sorter(*, temp_storage, d_in_keys, d_out_keys, d_in_values, d_out_values, num_items, begin_bit=None,
               end_bit=None, stream=None):
        FakeCompute.called.append((temp_storage, d_in_keys.__cuda_array_interface__["data"][0],
                                   d_out_keys.__cuda_array_interface__["data"][0], num_items, begin_bit, end_bit,
                                   stream and stream.__cuda_stream__()))
        return 1000


def test_what_cccl_is_called_with(gpu, monkeypatch, tmp_path):
    """Compiled once and kept; keys are the upper halves of words; memory of its own for each length."""
    monkeypatch.setattr(cccl, "extra", lambda module, name: FakeCompute)
    monkeypatch.setattr(cccl.importlib.metadata, "version", lambda name: "1.2")
    monkeypatch.setenv("GGJIT_CACHE_DIR", str(tmp_path))
    FakeCompute.called.clear()
    for _ in range(2):
        made = cccl.Cccl(gpu.device)
    assert FakeCompute.called == [(np.uint64, "up", (9, 0))]
    made.sort(Sort(100, 2), 1 << 20, 5)
    (buffer, words), = made.temporary.values()
    at, to = (1 << 20, (1 << 20) + 800), ((1 << 20) + 1600, (1 << 20) + 2400)
    assert FakeCompute.called[1:] == [(None, 0, 0, 100, 32, 64, None),
                                      *((words, at[r], to[r], 100, 32, 64, (0, 5)) for r in range(2))]
    assert words.nbytes == 1000 <= buffer.size and words.__cuda_array_interface__["data"][0] == buffer.base


def test_a_cccl_that_does_not_serve_is_named(gpu, monkeypatch, tmp_path):
    def absent(**_):
        raise RuntimeError("no part for CUDA 13")
    monkeypatch.setattr(cccl, "extra", lambda module, name: FakeCompute)
    monkeypatch.setattr(cccl.importlib.metadata, "version", lambda name: "1.2")
    monkeypatch.setattr(FakeCompute, "make_radix_sort", absent)
    monkeypatch.setenv("GGJIT_CACHE_DIR", str(tmp_path))
    with pytest.raises(gg.NotSupported, match="no part for CUDA 13.*GGJIT_CCCL=0"):
        cccl.Cccl(gpu.device)


def test_the_fake_takes_what_cccl_takes():
    """Needs libcuda, without which cuda.compute has no functions."""
    compute = pytest.importorskip("cuda.compute", reason="pip install 'ggjit[cccl]'")
    if not hasattr(compute, "make_radix_sort"):
        pytest.skip("cuda.compute found no driver")
    sorter = sys.modules[compute.make_radix_sort.__module__]._RadixSort.__call__
    for fake, real in ((FakeCompute.sorter, sorter), *((getattr(FakeCompute, n), getattr(compute, n)) for n in (
            "ProxyArray", "make_radix_sort", "serialize", "deserialize"))):
        names = [n for n in inspect.signature(real).parameters if n != "self"]
        assert list(inspect.signature(fake).parameters) == names, real


def test_columns_are_made_once_for_products_that_follow_each_other(gpu):
    plan, ys, _ = products(gpu, gg.Q8_0, 1, 3)
    want = [in_8_bits(x.numpy()) @ exact(w)[0, 0].T for w, x in (y.src[:2] for y in ys)]
    for _ in range(3):
        before = len(cuda_sim.launched)
        plan.compute()
        assert all(nmse(plan.numpy(y), w) < 1e-11 for y, w in zip(ys, want, strict=True))
        assert cuda_sim.launched[before:].count("quantize_columns_f32") == 1
    before = len(cuda_sim.launched)
    plan.run_nodes(1, 2)                        # alone: another plan may have used the scratch memory since
    gpu.synchronize()
    assert "quantize_columns_f32" in cuda_sim.launched[before:]
