"""A small net for tests of training, and rows to train it with."""
import numpy as np

import ggjit as gg

RNG = np.random.default_rng(0)
X = RNG.standard_normal((48, 6)).astype(np.float32)
Y = (X @ RNG.standard_normal((6, 3))).argmax(1)
BATCH = 8


def dense(ctx, m, k, seed, name):
    return gg.set_param(gg.from_numpy(ctx, np.random.default_rng(seed).normal(0, 0.3, (m, k)).astype(np.float32), name))


class Net:
    """x -> relu -> classes"""

    def __init__(self, rows=BATCH):
        self.ctx = gg.Context()
        self.x = self.ctx.new_tensor(gg.F32, (6, rows), name="x")
        self.params = [dense(self.ctx, 5, 6, 1, "w1"), dense(self.ctx, 3, 5, 2, "w2")]
        with self.ctx:
            self.y = gg.mul_mat(self.params[1], gg.relu(gg.mul_mat(self.params[0], self.x)))

    def values(self):
        return [w.numpy() for w in self.params]

    def fit(self, data=(X, Y), **options):
        return gg.train.fit(self.x, self.y, data, **options)


def equal(a, b):
    """Have two lists of parameters the same bits?"""
    return all((x == y).all() for x, y in zip(a, b, strict=True))
