"""gg.train.mean_in_chunks: the same loss and gradients, fewer bytes."""
import numpy as np
import pytest

import ggjit as gg

N, K, CLASSES = 22, 8, 40
RNG = np.random.default_rng(2)
X, W = RNG.standard_normal((N, K), np.float32), RNG.standard_normal((CLASSES, K), np.float32)
Y = np.eye(CLASSES, dtype=np.float32)[RNG.integers(0, CLASSES, N)]


def graph(chunk):
    ctx = gg.Context()
    x, w, y = gg.from_numpy(ctx, X), gg.set_param(gg.from_numpy(ctx, W)), gg.from_numpy(ctx, Y)
    with ctx:
        loss = gg.train.mean_in_chunks(lambda x, y: gg.cross_entropy_loss(gg.mul_mat(w, x), y), x, y, chunk=chunk)
        return gg.Graph(loss, gg.grad(loss, w))


def least(g):
    with pytest.raises(gg.BudgetError, match="the least peak found") as e:
        gg.rematerialize(g, 0, cut=False)
    return e.value.minimum


def test_the_numbers_are_those_of_all_rows_at_once_and_the_least_peak_falls():
    whole, parts = graph(N), graph(5)
    for a, b in zip(whole.outputs, parts.outputs, strict=True):
        np.testing.assert_allclose(gg.compute(a), gg.compute(b), rtol=2e-5, atol=1e-7)
    assert least(parts) < 0.6 * least(whole)


@pytest.mark.parametrize("rows, chunk, error, words", [
    ((), 2, gg.ParamError, "no rows are given"), ((X,), 0, gg.ParamError, "1 or more, got 0"),
    ((X, Y[:3]), 2, gg.ShapeError, "differ in the number of rows"), (("x",), 2, gg.TypeMismatch, "rows")])
def test_refused(rows, chunk, error, words):
    ctx = gg.Context()
    with ctx, pytest.raises(error, match=words):
        gg.train.mean_in_chunks(gg.sum, *(gg.from_numpy(ctx, a) if isinstance(a, np.ndarray) else a for a in rows),
                                chunk=chunk)
