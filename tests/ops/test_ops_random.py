"""Random shapes and parameters, empty and impossible ones among them: a typed error or the reference's result."""

import numpy as np
import pytest
from helpers.cases import nmse, run

import ggjit as gg
from ggjit.ops.core.spec import Case

SAMPLES = 25


class Draw:
    """Random leaves and numbers for one case."""

    def __init__(self, inp, rng):
        self.inp, self.rng = inp, rng

    def __call__(self, low, high):
        return int(self.rng.integers(low, high + 1))

    def ints(self, n, low, high):
        return [self(low, high) for _ in range(n)]

    def new(self, *ne):
        return self.inp.new(gg.F32, ne)

    def any(self, high, n=4):
        """A tensor of up to `high` elements a dimension, now and then an empty one."""
        return self.new(*(self(0 if self(0, 9) == 0 else 1, high) for _ in range(n)))

    def steps(self, n):
        """Strides, paddings and dilations."""
        return self.ints(n, 1, 4) + self.ints(n, 0, 4) + self.ints(n, 1, 3)


def conv_2d(r):
    ic = r(0, 5)
    return gg.conv_2d_direct(r.new(r(1, 4), r(1, 4), ic, r(0, 20)), r.new(r(0, 40), r(0, 9), ic, r(0, 3)), *r.steps(2))


def conv_3d(r):
    ic, n, oc = r(1, 3), r(1, 2), r(1, 9)
    return gg.conv_3d_direct(r.new(*r.ints(3, 1, 3), ic * oc), r.new(r(0, 20), r(0, 7), r(0, 6), ic * n), *r.steps(3),
                             ic, n, oc)


def conv_2d_dw(r):
    c = r(0, 40)
    return gg.conv_2d_dw_direct(r.new(r(1, 4), r(1, 4), 1, c), r.new(r(0, 40), r(0, 9), c, r(0, 2)), *r.steps(2))


def conv_transpose_1d(r):
    ic = r(0, 4)
    return gg.conv_transpose_1d(r.new(r(0, 9), r(0, 19), ic), r.new(r(0, 40), ic), r(1, 9), 0, 1)


def conv_transpose_2d(r):
    ic = r(0, 4)
    return gg.conv_transpose_2d_p0(r.new(r(1, 5), r(1, 5), r(0, 9), ic), r.new(r(0, 20), r(0, 9), ic, r(0, 2)), r(1, 6))


def col2im_1d(r):
    oc = r(1, 4)
    return gg.col2im_1d(r.new(oc * r(0, 9), r(0, 9)), r(1, 12), oc, r(0, 4))


def im2col(r):
    ic = r(0, 4)
    return gg.im2col(r.new(r(1, 20), r(1, 4), ic, 2), r.new(r(0, 40), r(0, 9), ic, r(0, 2)), *r.steps(2), True, gg.F32)


def im2col_1d(r):
    ic, (s, p, d) = r(0, 4), r.steps(1)
    return gg.im2col(r.new(r(1, 20), ic, 2), r.new(r(0, 40), ic, r(0, 2)), s, 0, p, 0, d, 0, False, gg.F32)


def im2col_3d(r):
    ic = r(1, 3)
    return gg.im2col_3d(r.new(r(1, 4), r(1, 3), r(1, 3), ic), r.new(r(0, 20), r(0, 7), r(0, 6), ic * r(0, 2)), ic,
                        *r.steps(3), gg.F32)


def im2col_back(r):
    k, ne, q = r.new(r(1, 4), r(1, 4), 3, 2), (r(1, 20), r(1, 9), 3, r(1, 2)), r.steps(2)
    made = gg.im2col(k, gg.Context().new_tensor(gg.F32, ne), *q, True, gg.F32)
    return gg.im2col_back(r.new(*made.ne), k, ne, *q, True)


def pool_1d(r):
    return gg.pool_1d(r.any(30), r(0, 1), r(1, 6), r(1, 6), r(0, 7))


def pool_2d(r):
    return gg.pool_2d(r.any(12), r(0, 1), *r.ints(4, 1, 6), r(0, 7), r(0, 9) / 2)


def pool_2d_back(r):
    a, q = r.any(12), (r(0, 1), *r.ints(4, 1, 6), r(0, 7), r(0, 7))
    return gg.pool_2d_back(r.new(*gg.pool_2d(a, *q).ne), a, *q)


def pad(r):
    return (gg.pad_ext, gg.pad_ext_circular)[r(0, 1)](r.any(7), *r.ints(8, -1 if r(0, 9) == 0 else 0, 9))


def pad_reflect_1d(r):
    return gg.pad_reflect_1d(r.any(20), r(0, 20), r(0, 20))


def roll(r):
    return gg.roll(r.any(40), *r.ints(4, -3, 3))


def interpolate(r):
    mode = (0, 1, 2, 0x100, 0x101, 0x102, 0x201, 0x301)[r(0, 7)]
    return gg.interpolate(r.any(30), *r.ints(2, 0, 40), *r.ints(2, 1, 5), mode)


def top_k(r):
    return gg.top_k(r.any(200, 2), r(0, 200))


def argsort(r):
    return gg.argsort(r.any(300, 2), r(0, 2))


def cross_entropy_loss(r):
    a = r.any(40)
    return gg.cross_entropy_loss(a, r.new(*a.ne))


def win_part(r):
    return gg.win_part(r.any(20, 3), r(0, 7))


def timestep_embedding(r):
    return gg.timestep_embedding(r.new(r(0, 5)), r(0, 70), r(0, 10000))


def repeat_back(r):
    b = r.any(5)
    return gg.repeat_back(r.new(*(n * r(0, 3) for n in b.ne)), b)


def cumsum(r):
    return gg.cumsum(r.any(40))


ALL = [conv_2d, conv_3d, conv_2d_dw, conv_transpose_1d, conv_transpose_2d, col2im_1d, im2col, im2col_1d, im2col_3d,
       im2col_back, pool_1d, pool_2d, pool_2d_back, pad, pad_reflect_1d, roll, interpolate, top_k, argsort,
       cross_entropy_loss, win_part, timestep_embedding, repeat_back, cumsum]


@pytest.mark.parametrize("build", ALL, ids=lambda f: f.__name__)
def test_error_or_the_right_result(build):
    rng, right = np.random.default_rng(11), 0
    for i in range(SAMPLES):
        try:
            got, want, out = run(Case(f"{build.__name__} {i}", lambda inp: build(Draw(inp, rng))), 1 + i % 2)
        except (gg.ShapeError, gg.ParamError, gg.TypeMismatch, gg.IndexRangeError):
            continue
        right += 1
        assert got.shape == want.shape
        if got.size:
            error = nmse(got.astype(np.float64), want.astype(np.float64))
            assert error < 1e-7, (out, [s.ne for s in out.src], out.op_params)
    assert right > 2
