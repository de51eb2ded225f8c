"""NaN, infinities and zeros with a sign: what comes out is what the real ggml gives, unless the docs say otherwise."""
import itertools

import numpy as np
import pytest
from helpers.oracle import connect
from helpers.sample import sampled

import ggjit as gg
from ggjit.ops.core.traits import all_traits
from ggjit.ops.matmul.mul_mat import weight_types
from ggjit.ops.native import isa

NAN, INF = np.nan, np.inf


@pytest.fixture
def ctx():
    with gg.Context() as ctx:
        yield ctx


def row(ctx, *values, dtype=np.float32):
    return gg.from_numpy(ctx, np.array([values], dtype))


def with_nans(rng, shape, share):
    """Small integers, so that maxima come in several places, and NaNs."""
    a = rng.integers(-2, 3, shape).astype(np.float32)
    a[rng.random(shape) < share] = NAN
    return a


def same(got, want):
    np.testing.assert_array_equal(np.asarray(got).reshape(-1), np.asarray(want).reshape(-1))


@pytest.mark.parametrize("values, at", [((1, 2, NAN, 0), 3), ((5, NAN, 1, 2), 3), ((1, 2, NAN), 1), ((NAN, 2, 2, 1), 2),
                                        ((NAN, NAN), 0), ((-INF, NAN, -INF, NAN, NAN), 2)], ids=str)
def test_argmax_starts_anew_behind_a_nan(ctx, values, at):
    assert gg.compute(gg.argmax(row(ctx, *values))).tolist() == [at]


@pytest.mark.parametrize("share", [0.02, 0.3, 0.9])
def test_argmax_with_nans_is_ggmls(ctx, share):
    a = with_nans(np.random.default_rng(), (60, 71), share)
    a[:9, 40:] = NAN
    same(gg.compute(gg.argmax(gg.from_numpy(ctx, a))), connect().op("argmax", [a]))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_nan_counts_in_max_pooling_only_as_the_last_tap(ctx, dtype):
    a = row(ctx, 1, NAN, 2, NAN, 1, 2, 1, 2, NAN, NAN, NAN, NAN, dtype=dtype)
    for y in (gg.pool_1d(a, 0, 3, 3, 0), gg.pool_2d(a, 0, 3, 1, 3, 1, 0, 0)):
        same(gg.compute(y), [2, 2, NAN, NAN])


@pytest.mark.parametrize("step", [1, 2, 3])
def test_max_pooling_with_nans_is_ggmls(ctx, step):
    a = with_nans(np.random.default_rng(), (3, 20, 75), 0.2)
    x, o = gg.from_numpy(ctx, a), connect()
    same(gg.compute(gg.pool_1d(x, 0, 3, step, 0)), o.op("pool_1d", [a], params=[0, 3, step, 0]))
    window = [0, 3, 2, step, 2, 1.0, 1.0]
    same(gg.compute(gg.pool_2d(x, *window)), o.op("pool_2d", [a], params=window))


def test_the_gradient_of_max_pooling_goes_to_the_tap_after_a_nan(ctx):
    grad = gg.compute(gg.pool_2d_back(row(ctx, 7, 8), row(ctx, 3, NAN, 1, 2, 1, NAN), 0, 3, 1, 3, 1, 0, 0))
    same(grad, [0, 0, 7, 0, 0, 8])


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_reglu_is_zero_where_x_is_not_positive(ctx, dtype, split):
    x, g = [0, -1, -1, NAN, 2, INF] * 6, [INF, INF, NAN, 1, NAN, 3] * 6
    y = (gg.reglu_split(row(ctx, *x, dtype=dtype), row(ctx, *g, dtype=dtype)) if split else
         gg.reglu(row(ctx, *x, *g, dtype=dtype)))
    same(gg.compute(y), [0, 0, 0, 0, NAN, INF] * 6)


def test_activations_at_infinity(ctx):
    x = row(ctx, -INF, INF, NAN, -1e30, -20)
    for f in (gg.gelu, gg.gelu_erf):                        # ggml: gelu_erf(-inf) is NaN
        same(gg.compute(f(x)), [0, INF, NAN, 0, 0])
    same(gg.compute(gg.geglu_split(x, row(ctx, 2, 2, 2, 2, 2))), [0, INF, NAN, 0, 0])
    same(gg.compute(gg.hardsigmoid(x)), [0, 1, 0, 0, 0])
    assert np.isnan(gg.compute(gg.hardswish(x)).ravel()[2])


@pytest.mark.parametrize("zeros", [[-0.0] * 32, [-0.0] + [0.0] * 31, [0.0] * 31 + [-0.0]], ids=["-", "-+", "+-"])
def test_q4_0_of_zeros_with_any_signs(zeros):
    from ggjit.ops.types.q4_0 import np_from_float
    raw = gg.quantize(gg.Q4_0, np.array([zeros], np.float32))
    same(raw, [0, 0x80] + [0x88] * 16)                      # the scale is -0
    same(raw, np_from_float(np.array([zeros], np.float32)))
    same(raw, connect().quantize("q4_0", np.array([zeros], np.float32)))


def test_arange_to_beyond_float32_is_refused_without_a_warning(ctx, recwarn):
    with pytest.raises(gg.ParamError, match="arange"):
        gg.arange(ctx, 0.0, 1e300, 1.0)
    assert not recwarn.list


GATED = {"swiglu_split": [(-50, 1e37), (-20, 3e37), (-100, 1e38), (-3e38, 2), (-88, 1e37)],
         "geglu_split": [(-5, 2e38), (-100, 1e38)], "geglu_quick_split": [(-60, 1e38)], "geglu_erf_split": [(-9, 1e38)]}


@pytest.mark.parametrize("name", GATED)
def test_a_gate_that_vanishes_is_stronger_than_what_it_gates(ctx, name):
    """act(x) g is finite where x g is not."""
    x, g = (np.repeat(np.float32(v), 20).reshape(1, -1) for v in zip(*GATED[name], strict=True))
    x, g = gg.from_numpy(ctx, x), gg.from_numpy(ctx, g)
    got = gg.compute(getattr(gg, name)(x, g))
    activation = getattr(gg, name.removesuffix("_split").replace("swiglu", "silu").replace("geglu", "gelu"))
    same(got, gg.compute(gg.mul(activation(x), g)))
    assert np.isfinite(got).all()


def test_the_limited_gate_vanishes_too(ctx):
    x, g = (gg.from_numpy(ctx, np.full((1, 20), v, np.float32)) for v in (-5e37, 7))
    same(gg.compute(gg.swiglu_oai(x, g, 1.702, 7.0)), np.zeros(20))


# dots and tiles of every file of ops/types, which says how activations are rounded and multiplied
@pytest.mark.parametrize("type,n", sampled(
    itertools.product((t for t in weight_types() if t.quantized), (1, 20)),
    lambda case: [(all_traits()[case[0]][1], case[1])], lambda case: [case[0].name]))
def test_a_nan_next_to_quantised_weights_comes_out(ctx, type, n):
    """Of a row of activations; ggml loses it in the search for the largest value of a block."""
    rng = np.random.default_rng(5)
    k = 2 * max(type.block, 256)
    a = ctx.new_tensor(type, (k, 4))
    gg.alloc_ctx_tensors(ctx, gg.init_backend("CPU"))
    a.set_bytes(gg.quantize(type, rng.standard_normal((4, k), np.float32), imatrix=np.ones(k, np.float32)).tobytes())
    x = rng.standard_normal((20, k), np.float32)
    x[1, 70] = NAN
    rows = x[1:2] if n == 1 else x
    y = gg.compute(gg.mul_mat(a, gg.from_numpy(ctx, rows)))
    assert np.isnan(y[np.isnan(rows).any(1)]).all() and np.isfinite(y[np.isfinite(rows).all(1)]).all()


ON_A_LEVEL = """
import itertools, sys
import numpy as np
import ggjit as gg
from ggjit.ops.matmul.mul_mat import weight_types
from ggjit.ops.matmul.repack import layouts
cpu = gg.init_backend("CPU", n_threads=1)
type = next(t for t in weight_types() if t.name == sys.argv[1])
rng, k, m = np.random.default_rng(3), 2 * max(type.block, 256), 64
repack = {b.name: b for b in cpu.device.extra_buffer_types()}["CPU_REPACK"]
for buft, experts in itertools.product((cpu.device.buffer_type(), repack), (1, 4)):
    ne = (k, m, experts)[:2 + (experts > 1)]
    if buft is repack and not layouts.takes(type, (*ne, 1, 1)[:4]):
        continue
    ctx, values = gg.Context(), rng.standard_normal((experts * m, k), np.float32)
    a = ctx.new_tensor(type, ne)
    gg.alloc_ctx_tensors(ctx, buft)
    a.set_bytes(gg.quantize(type, values, imatrix=np.ones(k, np.float32)).tobytes())
    for n, bad, at in itertools.product((1, 2, 20), (np.nan, -np.nan, np.inf), (0, 70, k - 1)):
        x = rng.standard_normal((n, k), np.float32)
        x[n // 2, at] = bad
        if experts == 1:
            y = gg.compute(gg.mul_mat(a, gg.from_numpy(gg.Context(), x)), backend=cpu)
        else:
            ids = np.stack([rng.permutation(4)[:2] for _ in range(n)]).astype(np.int32)
            ctx = gg.Context()
            y = gg.compute(gg.mul_mat_id(a, gg.from_numpy(ctx, x[:, None]), gg.from_numpy(ctx, ids)), backend=cpu)
        finite = np.isfinite(np.asarray(y).reshape(n, -1))
        assert not finite[n // 2].any() and np.delete(finite, n // 2, 0).all(), (buft.name, experts, n, bad, at)
"""


# at this processor's level, and at one of those below it
@pytest.mark.parametrize("level,type", sampled(
    itertools.product(isa.NAMES, (t.name for t in weight_types() if t.quantized)), lambda case: [case[0] == isa.ISA],
    lambda case: [f"{case[0]} {case[1]}"]))
def test_on_instruction_sets(on_isa, level, type):
    """In the file's layout and repacked, with experts and without, few columns and many: no finite number comes out of
    a row of activations with a NaN or an infinity, and the other rows are finite."""
    done = on_isa(level, ON_A_LEVEL, type)
    assert not done.returncode, done.stderr
