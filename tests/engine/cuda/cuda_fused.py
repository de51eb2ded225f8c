"""Runs of nodes as one CUDA kernel, in the simulator: results beside those of single kernels, captured and walked.  Run
by test_cuda.py."""
import numpy as np
import pytest
from helpers.device_contract import floats, on
from helpers.sample import sampled

import ggjit as gg
from ggjit.cuda.walk import PlanWalk
from ggjit.cuda.walk_table import steps
from ggjit.ops.cuda.blocks import BLOCKS


@pytest.fixture(params=["captured", "walked"])
def fused(request):
    return gg.init_backend(f"CUDA0:fuse=1,persistent={int(request.param == 'walked')}")


def computed(backend, *outputs):
    """(the plan, the outputs' values) after two runs."""
    graph = gg.Graph(*outputs)
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
    x, w = on(gpu, gg.F32, (64, 1), floats(1, 64)), on(gpu, gg.F32, (64,), floats(64))
    q, k = (on(gpu, gg.Q8_0, (64, 8), floats(8, 64)) for _ in range(2))

    def outputs():
        h = gg.mul(gg.rms_norm(x, 1e-5), w)
        return gg.mul_mat(q, h), gg.mul_mat(k, h)
    (_, want), (plan, got) = computed(gpu, *outputs()), computed(fused, *outputs())
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
    assert names(plan) == ["rms_norm_mul_codes", *["mul_mat_vec1_q8_0"] * 2]


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
