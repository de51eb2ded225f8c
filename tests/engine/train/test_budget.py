"""Trainings within a number of bytes: the same bits, announced bytes that are the measured ones, also in row chunks."""
import os
import signal

import numpy as np
import pytest

import ggjit as gg
from ggjit.train.optimizers import AdamW
from ggjit.train.training import Training

RNG = np.random.default_rng(0)
X = RNG.standard_normal((1024, 16)).astype(np.float32)
Y = (X @ RNG.standard_normal((16, 10))).argmax(1)


class Net:
    """`.x`, `.y`, `.params` of a network of `rows` rows; build(net, x) -> outputs."""

    def __init__(self, build, rows):
        self.ctx, self.params = gg.Context(), []
        self.x = self.ctx.new_tensor(gg.F32, (16, rows), name="x")
        with self.ctx:
            self.y = build(self, self.x)

    def dense(self, m, k):
        values = np.random.default_rng([m, k, len(self.params)]).normal(0, 0.3, (m, k)).astype(np.float32)
        self.params.append(gg.set_param(gg.from_numpy(self.ctx, values, f"w{len(self.params)}")))
        return self.params[-1]

    def values(self):
        return [w.numpy() for w in self.params]

    def fit(self, n=1024, **options):
        return gg.train.fit(self.x, self.y, (X[:n], Y[:n]), progress=False, **options)

    def least(self, **options):
        with pytest.raises(gg.BudgetError, match="stay in memory .* computing takes .* at least; use") as error:
            self.fit(budget=1, **options)
        return error.value.minimum


def deep(net, x):
    """A residual net whose activations outweigh its weights."""
    for _ in range(5):
        x = gg.add(x, gg.silu(gg.mul_mat(net.dense(16, 16), gg.norm(x, 1e-5))))
    return gg.mul_mat(net.dense(10, 16), x)


def wide(net, x):
    """A layer that is the largest by far, so only parts of its rows fit."""
    return gg.mul_mat(net.dense(10, 96), gg.relu(gg.mul_mat(net.dense(96, 16), x)))


def tied(net, x):
    """One weight, read three times, once through a view."""
    w = net.dense(16, 16)
    h = gg.silu(gg.mul_mat(w, gg.silu(gg.mul_mat(w, x))))
    return gg.mul_mat(gg.view_2d(w, 16, 10, w.nb[1], 0), h)


def same(a, b):
    return all((x == y).all() for x, y in zip(a.values(), b.values(), strict=True))


@pytest.mark.parametrize("build, options", [(deep, dict(batch=256, clip=1.0)), (wide, dict(batch=256, val_split=0.25)),
                                            (tied, dict(batch=512)), (wide, dict(batch=512, clip=1.0))],
                         ids=["deep", "wide-evaluated", "tied-parts", "wide-parts"])
def test_a_budget_changes_no_bit(build, options):
    free, tight = Net(build, 256), Net(build, 256)
    want, least = free.fit(epochs=2, **options), tight.least(**options)
    got = tight.fit(epochs=2, budget=least, **options)
    assert got.steps == want.steps and got.val_loss == want.val_loss and got.accuracy == want.accuracy
    assert same(free, tight)


@pytest.mark.parametrize("build", [deep, wide])
def test_announced_bytes_are_those_of_the_arena(build):
    net = Net(build, 256)
    least = net.least()
    training = Training(net.x, net.y, "cross_entropy", gg.init_backend("CPU"), AdamW(), None, 1, None, least,
                        evaluates=False)
    stays = sum(t.nbytes for t in (*net.params, *training.sums, *sum(training.states, []), training.settings, net.x,
                                   training.labels))
    peaks = [graph.peak for _, graph in training._graphs()]
    assert training.runs.allocator.buffer_size() == max(peaks) and 0 <= least - stays - max(peaks) < 32 * 20


def test_rows_are_cut_where_whole_nodes_do_not_fit(monkeypatch):
    """The least budget falls, and the outputs need not lie in memory at once where nothing is evaluated."""
    from ggjit.train import training
    net = Net(wide, 1024)
    cut = net.least()
    whole = training.within
    monkeypatch.setattr(training, "within", lambda *args, **options: whole(*args, cut=False, **options))
    assert cut < 0.5 * net.least()


def test_an_interrupted_training_within_a_budget_goes_on_with_the_same_bits(tmp_path):
    whole, stopped = Net(wide, 256), Net(wide, 256)
    budget, path = stopped.least(), tmp_path / "run.safetensors"
    whole.fit(epochs=3)

    def press(history):
        if len(history.steps) == 3:
            os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        stopped.fit(epochs=3, budget=budget, checkpoint=path, callback=press)
    fresh = Net(wide, 256)
    fresh.fit(epochs=3, budget=budget, checkpoint=path)
    assert same(whole, fresh)


def test_budgets_that_are_none_and_more_than_enough():
    net = Net(deep, 128)
    before = net.values()
    for budget in (0, -1, 2.5, "1G"):
        with pytest.raises(gg.GgjitError, match="budget"):
            net.fit(budget=budget)
    assert all((a == b).all() for a, b in zip(before, net.values(), strict=True))
    assert len(net.fit(budget=1 << 40).steps) == 8
    with pytest.raises(gg.NotSupported, match="kept on one backend"):
        net.fit(budget=1 << 20, backend=gg.Scheduler([gg.init_backend("CPU")]))
