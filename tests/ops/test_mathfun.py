"""Vector math functions against float64, over the whole useful range, tails and special values included."""
import math

import numpy as np
import pytest

from ggjit.ops.native import mathfun as m
from ggjit.ops.native.jit import inline, native
from ggjit.ops.native.mem import ld_f32, st_f32
from ggjit.ops.native.simd import B, ldf, stf


def _entry(vector, scalar):
    """out[i] = f(x[i]) for whole vectors, then the same values one by one through the scalar form."""
    def make(name):
        @native("i64(i64, i64, i64, i64)")
        def run(x, y, z, n):
            for i in range(0, 4 * n, B):
                stf(y + i, vector(ldf(x + i)))
            for i in range(0, 4 * n, 4):
                st_f32(z + i, scalar(ld_f32(x + i)))
            return 0
        run.name = f"test_mathfun.{name}"
        return run
    return make


@inline
def _no_scalar(x):
    return x


def _erfc(x):
    return np.vectorize(math.erfc)(x)


def _gelu_erf(x):
    return np.maximum(x, 0) - np.abs(x) / 2 * _erfc(np.abs(x) / math.sqrt(2))


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _gelu(x):
    return x * _sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3))


# name: (vector, scalar, float64 function, [ranges], ulp, absolute error)
FUNCTIONS = {
    "exp": (m.vexp, m.exp1, np.exp, [(-87, 88.7), (-1, 1), (-103, -87)], 1.5, 1e-45),
    "exp_neg": (m.vexp_neg, m.exp_neg1, np.exp, [(-87, 0), (-1e-3, 0)], 1.5, 1.2e-38),
    "expm1": (m.vexpm1, m.expm1_1, np.expm1, [(-30, 88), (-1, 1), (-1e-4, 1e-4)], 3, 0),
    "log": (m.vlog, m.log1, np.log, [(1e-45, 1e-38), (1e-30, 1e30), (0.5, 2), (1, 1e5)], 2, 0),
    "log1p": (m.vlog1p, m.log1p_1, np.log1p, [(-0.9, 1), (0, 1e-5), (1, 1e30)], 3, 0),
    "sin": (m.vsin, m.sin1, np.sin, [(-7, 7), (-1e4, 1e4), (-1e6, 1e6)], 2, 6e-8),
    "cos": (m.vcos, m.cos1, np.cos, [(-7, 7), (-1e4, 1e4), (-1e6, 1e6)], 2, 6e-8),
    "sin_any": (m.vsin_any, _no_scalar, np.sin, [(-1e30, 1e30)], 1, 0),
    "cos_any": (m.vcos_any, _no_scalar, np.cos, [(-1e30, 1e30)], 1, 0),
    "tanh": (m.vtanh, m.tanh1, np.tanh, [(-10, 10), (-1, 1), (-1e-3, 1e-3), (-200, 200)], 3, 0),
    "erf": (m.verf, m.erf1, np.vectorize(math.erf), [(-5, 5), (-1, 1), (-1e-3, 1e-3)], 3, 0),
    "sigmoid": (m.vsigmoid, m.sigmoid1, _sigmoid, [(-87, 20), (-1, 1)], 4, 1e-44),
    "silu": (m.vsilu, m.silu1, lambda x: x * _sigmoid(x), [(-87, 150), (-1, 1)], 4, 1e-42),
    "gelu": (m.vgelu, m.gelu1, _gelu, [(-9, 9), (-1, 1), (-150, 150)], 4, 1e-7),
    "gelu_erf": (m.vgelu_erf, m.gelu_erf1, _gelu_erf, [(-8, 8), (-1, 1), (-150, 150)], 2, 1.5e-7),
    "gelu_quick": (m.vgelu_quick, m.gelu_quick1, lambda x: x * _sigmoid(1.702 * x), [(-20, 20), (-1, 1)], 4, 1e-7),
}
SPECIAL = np.float32([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3.4e38, -3.4e38, 89, -104, -150, 150, 1, -1,
                      0.5])
RUN = {name: _entry(v, s)(name) for name, (v, s, *_) in FUNCTIONS.items()}


def evaluate(name, x):
    x = np.ascontiguousarray(x, np.float32)
    assert x.size % 16 == 0
    y, z = np.full_like(x, 7), np.full_like(x, 7)
    RUN[name](x, y, z, x.size)
    return y, z


def inputs(rng, lo, hi, n=1 << 16):
    if lo > 0 and hi / lo > 1e6:
        return np.exp(rng.uniform(math.log(lo), math.log(hi), n)).astype(np.float32)
    return rng.uniform(lo, hi, n).astype(np.float32)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_error(name):
    rng = np.random.default_rng(1)
    _, scalar, exact, ranges, ulp, absolute = FUNCTIONS[name]
    for lo, hi in ranges:
        x = inputs(rng, lo, hi)
        y, z = evaluate(name, x)
        with np.errstate(all="ignore"):
            want = exact(x.astype(np.float64))
            unit = np.spacing(np.abs(want).astype(np.float32)).astype(np.float64)
        off = np.maximum(np.abs(y - want) - absolute, 0) / unit
        assert off.max() <= ulp, (lo, hi, off.max(), x[off.argmax()], np.abs(y - want).max())
        if scalar is not _no_scalar:
            assert (y.view(np.int32) == z.view(np.int32)).all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_special_values(name):
    exact = FUNCTIONS[name][2]
    x = SPECIAL
    if name == "exp_neg":
        x = -np.abs(SPECIAL)
    if name == "log1p":
        x = np.abs(SPECIAL)
    if name in ("sin", "cos"):
        x = np.where(np.abs(SPECIAL) == np.float32(3.4e38), np.float32(0), SPECIAL)      # theirs is |x| <= 2^20
    y, _ = evaluate(name, x)
    limits = {"silu": {-np.inf: np.nan}, "gelu": {-np.inf: 0.0}, "gelu_quick": {-np.inf: np.nan},
              "gelu_erf": {-np.inf: 0.0, np.inf: np.inf}}.get(name, {})
    with np.errstate(all="ignore"):
        want = exact(x.astype(np.float64)).astype(np.float32)
    for i, v in enumerate(x):
        want[i] = limits.get(float(v), want[i])
    assert (np.isnan(y) == np.isnan(want)).all(), (x, y, want)
    good = ~np.isnan(want)
    np.testing.assert_allclose(y[good], want[good], rtol=4e-7, atol=1.2e-38 if name != "gelu_erf" else 1e-7)


@pytest.mark.parametrize("name", ["sigmoid", "silu", "gelu", "gelu_quick"])
def test_what_is_below_the_smallest_normal_sigmoid_vanishes(name):
    """Arguments whose e^-x overflows, by little and by much: 0, or what a sigmoid of 1.2e-38 leaves of x."""
    x = -inputs(np.random.default_rng(2), 87.0, 3.4e38)
    y, z = evaluate(name, x)
    assert (y.view(np.int32) == z.view(np.int32)).all()
    assert (np.abs(y) <= 90 * 1.4e-38).all() and (y == 0)[x < -89].all()


def test_gelu_erf_is_close_enough_for_embeddings():
    x = np.linspace(-10, 10, 1 << 16).astype(np.float32)
    y, _ = evaluate("gelu_erf", x)
    assert np.abs(y - _gelu_erf(x.astype(np.float64))).max() < 4e-7
    assert (evaluate("gelu_erf", -np.abs(x) * 15 - 6)[0] > -1e-7).all()


def test_a_wrong_answer_is_noticed():
    """The comparison itself: float32 cosine by a too short series fails it."""
    x = inputs(np.random.default_rng(1), -1, 1)
    want = np.cos(x.astype(np.float64))
    bad = (1 - x * x / 2 + x ** 4 / 24).astype(np.float32)
    assert (np.abs(bad - want) / np.spacing(want.astype(np.float32))).max() > 100
