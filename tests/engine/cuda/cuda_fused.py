"""Runs of nodes as one CUDA kernel, in the simulator: results beside those of single kernels, captured and walked.  Run
by test_cuda.py."""
import dataclasses

import numpy as np
import pytest
from helpers.device_contract import floats, on
from helpers.sample import sampled

import ggjit as gg
from benchmarks import gpu_walk
from ggjit.cuda import walk_table
from ggjit.cuda.walk import PlanWalk
from ggjit.cuda.walk_check import n_waits
from ggjit.cuda.walk_table import steps
from ggjit.ops.cuda.blocks import BLOCKS


@pytest.fixture(params=["captured", "walked"])
def fused(request):
    return gg.init_backend(f"CUDA0:fuse=1,persistent={int(request.param == 'walked')}")


def computed(backend, *outputs, order="graph"):
    """(the plan, the outputs' values) after two runs."""
    graph = gg.Graph(*outputs, order=order)
    gg.GraphAllocator(backend).alloc_graph(graph)
    plan = backend.graph_plan_create(graph)
    for _ in range(2):
        plan.compute()
    values = [plan.numpy(t) for t in outputs]
    assert not backend.persistent or isinstance(plan._walk, PlanWalk), plan.not_walked_because
    return plan, values


def names(plan):
    left_out = {i for i, done_by in enumerate(plan._done_by) if done_by >= 0}
    return [x.launch.name for x in steps(plan, left_out)]


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("kept", [False, True], ids=["sum left out", "sum stored"])
def test_a_sum_and_its_norm_have_the_bits_of_single_kernels(gpu, fused, rows, kept):
    a, b, w = on(gpu, gg.F32, (96, rows), floats(rows, 96)), on(gpu, gg.F32, (96, rows), floats(rows, 96)), on(
        gpu, gg.F32, (96,), floats(96))

    def outputs():
        x = gg.add(a, b)
        y = gg.mul(gg.rms_norm(x, 1e-5), w)
        return (y, gg.neg(x)) if kept else (y, gg.neg(gg.mul(gg.rms_norm(y, 1e-6), w)))
    (one, want), (plan, got) = computed(gpu, *outputs()), computed(fused, *outputs())
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)
    assert len(names(plan)) == len(names(one)) - (2 if kept else 3)
    assert f"add_{'stored_' * kept}rms_norm_mul" in names(plan)


def test_the_norm_before_products_leaves_their_codes(gpu, fused):
    """Where others read it, too."""
    x, w = on(gpu, gg.F32, (64, 1), floats(1, 64)), on(gpu, gg.F32, (64,), floats(64))
    q, k = (on(gpu, gg.Q8_0, (64, 8), floats(8, 64)) for _ in range(2))

    def outputs():
        h = gg.mul(gg.rms_norm(x, 1e-5), w)
        return gg.mul_mat(q, h), gg.mul_mat(k, h), gg.neg(h)
    (_, want), (plan, got) = computed(gpu, *outputs()), computed(fused, *outputs())
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
    assert sorted(names(plan)) == ["mul_mat_vec1_q8_0", "mul_mat_vec1_q8_0", "neg_f32_f32_flat", "rms_norm_mul_codes"]


TYPES = [(gg.F32, 64), (gg.F16, 72), (gg.BF16, 64), *((t, max(t.block, 160 // t.block * t.block)) for t in BLOCKS)]


@pytest.mark.parametrize("type, k", sampled(TYPES, lambda case: [case[0].quantized]), ids=str)
def test_a_gated_unit_is_near_its_single_kernels(gpu, fused, type, k):
    """Of 40 rows: a block of them, and a part of one; the unit's matrix may come second."""
    gate, up = (on(gpu, type, (k, 40), floats(40, k)) for _ in range(2))
    x = on(gpu, gg.F32, (k, 1), floats(1, k))

    def outputs():
        return (gg.swiglu_split(gg.mul_mat(gate, x), gg.mul_mat(up, x)),
                gg.geglu_split(*(gg.mul_mat(w, x) for w in (up, gate))))
    (one, want), (plan, got) = computed(gpu, *outputs()), computed(fused, *outputs())
    for a, b in zip(got, want, strict=True):
        assert np.square(a - b).sum() <= 1e-10 * np.square(b).sum()
    assert len(names(plan)) == 2 and len(names(one)) >= 6


@pytest.mark.parametrize("type, k", sampled(TYPES, lambda case: [case[0].quantized]), ids=str)
def test_products_compute_their_norm(gpu, fused, type, k):
    """Of several rows of blocks and of parts of one; a matrix of another type is a kernel of its own."""
    x, w = on(gpu, gg.F32, (k, 1), floats(1, k)), on(gpu, gg.F32, (k,), floats(k))
    matrices = [on(gpu, type, (k, m), floats(m, k)) for m in (5, 17, 1, 40, 4)]
    other = on(gpu, gg.BF16 if type is gg.F16 else gg.F16, (k, 8), floats(8, k))

    def outputs():
        h, g = (gg.mul(gg.rms_norm(x, eps), w) for eps in (1e-5, 1e-2))
        q, k, v = (gg.mul_mat(a, h) for a in matrices[:3])
        return gg.neg(q), k, v, *(gg.mul_mat(a, g) for a in (*matrices[3:], other))
    (_, want), (plan, got) = computed(gpu, *outputs()), computed(fused, *outputs(), order="together")
    for a, b in zip(got, want, strict=True):
        assert np.square(a - b).sum() <= 1e-10 * np.square(b).sum()
    made = [name for name in names(plan) if name.startswith("rms_norm_mul_mat")]
    assert len(made) == 3 and len(names(plan)) == 4, names(plan)


@pytest.mark.parametrize("piped", "01")
@pytest.mark.parametrize("type", sampled([(t,) for t in (gg.F16, gg.Q4_0, gg.Q6_K, gg.F32)], lambda case: ["one"]),
                         ids=str)
def test_a_product_and_a_sum_have_the_bits_of_single_kernels(gpu, fused, monkeypatch, type, piped):
    monkeypatch.setenv("GGJIT_PIPED", piped)
    a, b = (on(gpu, type, (256, m), floats(m, 256)) for m in (256, 23))
    x, y, bias = (on(gpu, gg.F32, (n, 1), floats(1, n)) for n in (256, 256, 23))

    def outputs():
        z = gg.add(y, gg.mul_mat(a, x))
        return z, gg.add(gg.mul_mat(b, z), bias)
    (_, want), (plan, got) = computed(gpu, *outputs()), computed(fused, *outputs())
    for u, v in zip(got, want, strict=True):
        np.testing.assert_array_equal(u, v)
    assert sum("_add_" in name for name in names(plan)) == 2, names(plan)


def test_how_often_a_layer_of_a_token_waits(monkeypatch):
    """Six times: q k v | rope q, k, cache k, v | attention | o | gate up | down; once more where blocks share keys."""
    monkeypatch.setattr(walk_table, "ALONE_ROUNDS", 1 << 20)
    shape, rows, got = gpu_walk.DRY_SHAPES[0], [], []
    made = [gg.init_backend(f"CUDA0:{params}") for params in ("", "fuse=1", "fuse=1,persistent=1")]
    for n_layer in (1, 2):
        one = dataclasses.replace(shape, n_layer=n_layer)
        w = gpu_walk.leaves(made[0], one, gg.Q8_0)
        for backend in made:
            graph = gpu_walk.graph_of(gpu_walk.token(w, one))
            gg.GraphAllocator(backend).alloc_graph(graph)
            plan = backend.graph_plan_create(graph)
            for _ in range(2):
                plan.compute()
            got.append(plan.numpy(graph.nodes[-1]))
        assert isinstance(plan._walk, PlanWalk), plan.not_walked_because
        rows.append(plan._walk.rows)
    assert (len(rows[1]) - len(rows[0]), n_waits(rows[1]) - n_waits(rows[0])) == (9, 6)
    for single, captured, walked in (got[:3], got[3:]):
        np.testing.assert_array_equal(captured, walked)
        assert np.square(captured - single).sum() <= 1e-3 * np.square(single).sum()


def test_a_gated_unit_leaves_the_codes_for_the_product_behind_it(gpu, fused):
    gate, up = (on(gpu, gg.Q8_0, (64, 64), floats(64, 64)) for _ in range(2))
    down, x = on(gpu, gg.Q8_0, (64, 8), floats(8, 64)), on(gpu, gg.F32, (64, 1), floats(1, 64))

    def output():
        return gg.mul_mat(down, gg.swiglu_split(gg.mul_mat(gate, x), gg.mul_mat(up, x)))
    (_, (want,)), (plan, (got,)) = computed(gpu, output()), computed(fused, output())
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert names(plan) == ["mul_mat_swiglu_q8_0_1024_codes", "mul_mat_vec1_q8_0"]


def test_what_others_read_or_what_does_not_fit_is_not_fused(gpu, fused):
    """A norm that is read elsewhere, one with weights for each row; a column that begins at no multiple of 16 bytes."""
    x, w = on(gpu, gg.F32, (64, 2), floats(2, 64)), on(gpu, gg.F32, (64, 2), floats(2, 64))
    row, matrix = on(gpu, gg.F32, (64,), floats(64)), on(gpu, gg.Q8_0, (32, 8), floats(8, 32))
    norm = gg.rms_norm(x, 1e-5)
    y = gg.view_1d(row, 32, 4)
    unit = gg.swiglu_split(gg.mul_mat(matrix, y), gg.mul_mat(matrix, y))
    plan, _ = computed(fused, gg.mul(norm, row), gg.neg(norm), gg.mul(gg.rms_norm(x, 1e-6), w), unit)
    assert not any("rms_norm_mul" in name or "mul_mat_swiglu" in name for name in names(plan))
