"""Convolutions and pooling: exact patches, and parameters that would overflow 32 bits."""
import numpy as np
from helpers.cases import nmse

import ggjit as gg

R = np.random.default_rng(6)


def floats(*shape):
    return R.uniform(-1.0, 1.0, shape).astype(np.float32)


def test_conv_1d_and_2d_with_exact_patches():
    """dst_type=F32 keeps the data as they are: float64 agreement far below what ggml's F16 patches allow."""
    ctx, a, b = gg.Context(), floats(4, 3, 5), floats(1, 3, 20)
    want = np.stack([[sum(np.dot(a[o, c], np.pad(b[0, c], 2)[2 * i:2 * i + 5]) for c in range(3))
                      for i in range(10)] for o in range(4)])
    got = gg.compute(gg.conv_1d(gg.from_numpy(ctx, a), gg.from_numpy(ctx, b), 2, 2, 1, gg.F32))
    assert nmse(got.reshape(want.shape).astype(np.float64), want) < 1e-12
    a2, b2 = (gg.from_numpy(ctx, x) for x in (floats(4, 3, 3, 5), floats(2, 3, 9, 20)))
    exact = gg.compute(gg.conv_2d_direct(a2, b2, 2, 1, 1, 0, 1, 2)).astype(np.float64)
    got = gg.compute(gg.conv_2d(a2, b2, 2, 1, 1, 0, 1, 2, gg.F32))
    assert nmse(got.reshape(exact.shape).astype(np.float64), exact) < 1e-12


def test_extreme_params_that_are_valid():
    """Sizes from whole-number arithmetic that would overflow 32 bits on the way."""
    ctx = gg.Context()
    x = gg.from_numpy(ctx, floats(1, 1, 5, 7))
    k = gg.from_numpy(ctx, floats(1, 1, 1, 1))
    big = 2 ** 31 - 1
    y = gg.compute(gg.conv_2d_direct(k, x, big, big, 2 ** 30, 2 ** 30, big, big))
    assert y.size == 4 and not y.any()
    assert gg.compute(gg.pool_1d(x, 1, 1, big, 0)).shape[-1] == 1
    two = gg.from_numpy(ctx, floats(1, 1, 2)), gg.from_numpy(ctx, floats(1, 1))
    assert gg.compute(gg.conv_transpose_1d(*two, big, 0, 1)).size == 2
