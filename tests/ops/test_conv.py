"""Convolutions and pooling: exact patches, and parameters that would overflow 32 bits."""
import numpy as np
import pytest
from helpers.cases import nmse

import ggjit as gg
from ggjit.cpu.repacked import kernel_of
from ggjit.ops.core.record import OP

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


def patches_times(a, b, dy, q):
    """The gradient of a kernel by way of all patches."""
    n_taps, n_out, oc, n = np.prod(a.ne[:3]), dy.ne[0] * dy.ne[1], dy.ne[2], dy.ne[3]
    rows = gg.reshape_2d(gg.cont(gg.permute(gg.reshape_3d(dy, n_out, oc, n), 1, 0, 2, 3)), oc, n_out * n)
    return gg.out_prod(gg.reshape_2d(gg.im2col(a, b, *q, True, gg.F32), n_taps, n_out * n), rows)


@pytest.mark.parametrize("kernel, data, q", [
    ((17, 9, 3, 3), (5, 9, 8, 20), (1, 1, 1, 1, 1, 1)), ((5, 3, 2, 3), (2, 3, 11, 10), (2, 3, 1, 0, 1, 2)),
    ((33, 10, 1, 1), (3, 10, 8, 7), (2, 2, 0, 0, 1, 1)), ((4, 2, 3, 3), (3, 2, 40, 70), (1, 1, 3, 2, 1, 1)),
    ((2, 2, 3, 3), (2, 2, 2, 2), (3, 3, 0, 0, 1, 1))])
def test_gradient_of_a_kernel_without_patches(kernel, data, q):
    """The bits of the product with all patches, for any number of threads; a patch is made only where the kernel hangs
    over the picture."""
    ctx = gg.Context()
    a, b = gg.from_numpy(ctx, floats(*kernel)), gg.from_numpy(ctx, floats(*data))
    with ctx:
        y = gg.conv_2d_direct(a, b, *q)
        dy = gg.from_numpy(ctx, floats(*y.shape))
        found = gg.grad(gg.sum(gg.mul(y, dy)), a)
        want = gg.compute(patches_times(a, b, dy, q)).reshape(kernel)
    nodes = gg.Graph(found).nodes
    hangs = kernel[-1] > data[-1] + 2 * q[2]
    assert any(t.op == OP.IM2COL for t in nodes) == hangs
    if not hangs:
        made = next(t for t in nodes if t.op == OP.CONV_2D and t.ne[2:] == (kernel[0], kernel[1]))
        assert kernel_of(made, 1).name == "conv_2d_few"
    for n_threads in (1, 2, 3):
        np.testing.assert_array_equal(gg.compute(found, backend=gg.init_backend("CPU", n_threads=n_threads)), want)


def test_the_gradient_of_a_kernel_lies_in_no_more_than_what_it_reads():
    ctx = gg.Context()
    a, x = gg.set_param(gg.from_numpy(ctx, floats(8, 8, 3, 3))), ctx.new_tensor(gg.F32, (32, 32, 8, 4))
    with ctx:
        loss = gg.sum(gg.sqr(gg.conv_2d_direct(a, x, 1, 1, 1, 1, 1, 1)))
        graph = gg.Graph(gg.grad(loss, a))
    assert max(t.nbytes for t in graph.nodes) == x.nbytes
