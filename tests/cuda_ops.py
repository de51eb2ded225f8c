"""Every CUDA kernel in the simulator on the Specs' own small cases, against the NumPy references.  Run by
tests/test_cuda.py; CUDA_CASES=all runs every case that is small enough, else a few of each op."""
import math
import os
import random

import gguf
import numpy as np
import pytest

import ggjit as gg
from ggjit import cuda_sim
from ggjit.ops import flash_attn
from ggjit.ops.cuda.blocks import BLOCKS
from ggjit.ops.cuda.launch import launches, makers
from ggjit.ops.cuda.quantize import QUANTIZE
from ggjit.ops.record import OP
from ggjit.ops.spec import Case, Inputs, all_specs

ALL = os.environ.get("CUDA_CASES") == "all"
MAX_WORK = 2000                 # elements, or multiplications / 16: what the simulator does in well under a second
CASES_PER_OP = 6
SLOW = {OP.MUL_MAT: 14, OP.MUL_MAT_ID: 3}       # cases of these, drawn anew in every run


def work_of(y):
    a = y.src[0] if y.src else y
    if y.op in (OP.MUL_MAT, OP.MUL_MAT_ID):
        return math.prod(y.ne) * a.ne[0] / 16
    if y.op == OP.FLASH_ATTN_EXT:
        return math.prod(a.ne) * y.src[1].ne[1] / 16
    return max(math.prod(x.ne) for x in (y, *(s for s in y.src if s is not None)))


def small_cases(op):
    """(name, case) of the cases that are small enough and have a kernel."""
    found = []
    for i, case in enumerate(all_specs()[op].cases()):
        y = case.build(Inputs(gg.Context(), np.random.default_rng(0)))
        if work_of(y) <= MAX_WORK * (3 if op is OP.MUL_MAT else 1) and launches(y) is not None:
            found.append((i, case))
    return found


def nmse(got, want):
    got, want = (np.asarray(x, np.float64).ravel() for x in (got, want))
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(invalid="ignore"):             # infinities that differ
        wrong = np.where(same, 0, got - want)
    size = np.square(np.where(np.isfinite(want), want, 0)).sum()
    return 0.0 if same.all() else float(np.square(wrong).sum() / max(size, 1e-30))


@pytest.fixture(scope="module")
def gpu():
    return gg.init_backend("CUDA0")


def check(gpu, case, seed):
    ctx = gg.Context()
    inputs = Inputs(ctx, np.random.default_rng(seed))
    y = case.build(inputs)
    gg.alloc_ctx_tensors(ctx, gpu)
    for t, values in inputs.data:
        t.set(values)
    sources = [None if s is None else s.numpy().reshape(tuple(reversed(s.ne))) for s in y.src]
    want = all_specs()[y.op].reference(y, *sources)
    got = gg.compute(y, backend=gpu)
    assert nmse(got, np.reshape(want, got.shape)) <= case.max_nmse, f"{case.name} seed {seed}"


@pytest.mark.parametrize("op", [op for op in makers() if op is not OP.TOP_K], ids=lambda op: op.name)
def test_op(gpu, op):
    cases, n = small_cases(op), SLOW.get(op, CASES_PER_OP)
    if not ALL and len(cases) > n:
        cases = random.sample(cases, n)
    assert cases, "no case is small enough"
    for i, case in cases:
        check(gpu, case, 1000 + i)


@pytest.mark.parametrize("k", [1, 2, 7])
def test_top_k(gpu, k):
    x = np.random.default_rng().permutation(40).reshape(2, 20).astype(np.float32)
    ctx = gg.Context()
    a = ctx.new_tensor(gg.F32, (20, 2))
    gg.alloc_ctx_tensors(ctx, gpu)
    a.set(x)
    got = gg.compute(gg.top_k(a, k), backend=gpu)
    np.testing.assert_array_equal(np.sort(got), np.sort(np.argsort(-x, -1)[:, :k]))


@pytest.mark.parametrize("options", [dict(kt=gg.Q8_0, d=32, n_kv=40, heads=1, rep=2),
                                     dict(kt=gg.Q4_0, vt=gg.Q8_0, d=32, n_kv=9, heads=2, cap=5.0, sinks=True)], ids=str)
def test_attention_over_a_quantised_cache(gpu, options):
    check(gpu, Case(str(options), flash_attn.make_case(**options), 1e-11), 3)


# ---------------------------------------------------------------- quantised types
QUANTIZED = sorted(BLOCKS, key=lambda t: t.id)


@pytest.mark.parametrize("type", QUANTIZED, ids=repr)
def test_blocks_are_unpacked_as_gguf_does(gpu, type):
    """get_rows decodes codes and scales exactly; random bytes reach bit patterns that quantisers never write."""
    rng = np.random.default_rng()
    ctx = gg.Context()
    table, ids = ctx.new_tensor(type, (256, 3)), ctx.new_tensor(gg.I32, (2,))
    gg.alloc_ctx_tensors(ctx, gpu)
    raw = rng.integers(0, 256, (3, 256 // type.block, type.nbytes), np.uint8)
    first, end = {"q2_K": (80, 84), "q3_K": (108, 110), "q6_K": (208, 210), "q8_0": (0, 2), "q4_0": (0, 2),
                  "q5_0": (0, 2)}.get(type.name, (0, 4))
    scales = rng.uniform(-2, 2, (*raw.shape[:2], (end - first) // 2)).astype(np.float16)
    raw[..., first:end] = scales.view(np.uint8)     # float16 scales stay numbers
    table.set_bytes(raw)
    ids.set(np.array([2, 0], np.int32))
    got = gg.compute(gg.get_rows(table, ids), backend=gpu)
    want = gguf.quants.dequantize(raw.reshape(3, -1), gguf.GGMLQuantizationType(type.id))[[2, 0]]
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-6 * abs(want).max())


@pytest.mark.parametrize("n", [1, 3, 9])
@pytest.mark.parametrize("type", QUANTIZED, ids=repr)
def test_products_with_quantised_weights(gpu, type, n):
    """8-bit columns: as close to the unrounded product as ggml's own suite asks for."""
    rng = np.random.default_rng()
    ctx, k = gg.Context(), 256 if type.block == 256 else 160
    w, x = ctx.new_tensor(type, (k, 5)), ctx.new_tensor(gg.F32, (k, n))
    gg.alloc_ctx_tensors(ctx, gpu)
    w.set(rng.uniform(-1, 1, (5, k)))
    x.set(rng.uniform(-1, 1, (n, k)))
    got = gg.compute(gg.mul_mat(w, x), backend=gpu)
    want = x.numpy().astype(np.float64) @ w.numpy().T
    assert nmse(got, want) <= 5e-4


@pytest.mark.parametrize("type", sorted(QUANTIZE, key=lambda t: t.id), ids=repr)
def test_quantisers_are_byte_equal_to_the_cpus(gpu, type):
    x = np.random.default_rng().uniform(-3, 3, (4, 96)).astype(np.float32)
    x[1, :32], x[2, 3] = 0, 1e-30
    ctx = gg.Context()
    a = ctx.new_tensor(gg.F32, (96, 4))
    gg.alloc_ctx_tensors(ctx, gpu)
    a.set(x)
    y = gg.cast(a, type)
    gg.compute(y, backend=gpu)
    cpu = gg.cast(gg.from_numpy(gg.Context(), x), type)
    gg.compute(cpu)
    differ = np.frombuffer(y.bytes(), np.uint8) != np.frombuffer(cpu.bytes(), np.uint8)
    assert not differ.any(), f"{int(differ.sum())} bytes differ"


def test_every_launch_of_these_tests_ran_in_the_simulator():
    assert len(set(cuda_sim.launched)) > 50
