"""Two threads that use one network: what one of them writes is refused to the other, before anything changes."""
import os
import threading

import numpy as np
import pytest

import ggjit as gg
from ggjit.train.in_use import used

X = np.random.default_rng(0).standard_normal((32, 4)).astype(np.float32)
Y = np.arange(32) % 3


class Net:
    def __init__(self, w=None, x=None):
        self.ctx = gg.Context()
        self.w = gg.set_param(gg.from_numpy(self.ctx, np.ones((3, 4), np.float32), "w")) if w is None else w
        self.x = self.ctx.new_tensor(gg.F32, (4, 8), name="x") if x is None else x
        with self.ctx:
            self.y = gg.mul_mat(self.w, self.x)

    def fit(self, **options):
        return gg.train.fit(self.x, self.y, (X, Y), progress=False, **options)

    def predict(self):
        return gg.train.predict(self.x, self.y, X)


class Elsewhere:
    """A training of `net` that stands still in another thread while the block runs."""

    def __init__(self, net, **options):
        self.started, self.go_on, self.found = threading.Event(), threading.Event(), []
        self.thread = threading.Thread(target=lambda: self.found.append(net.fit(callback=self._wait, **options)))

    def _wait(self, history):
        self.started.set()
        self.go_on.wait()

    def __enter__(self):
        self.thread.start()
        self.started.wait()

    def __exit__(self, *error):
        self.go_on.set()
        self.thread.join()


def test_one_network_is_trained_by_one_thread():
    net, alone = Net(), Net()
    there = Elsewhere(net)
    with there:
        for call in (net.fit, net.predict, lambda: gg.train.evaluate(net.x, net.y, (X, Y))):
            with pytest.raises(gg.train.InUse, match="is used by fit in another thread; wait until it has ended, or"):
                call()
    assert there.found[0].steps == alone.fit().steps                # the refused calls have changed nothing
    assert net.fit().steps                                          # and it is free again


def test_parameters_inputs_and_memory_are_shared_by_none():
    net = Net()
    array = np.ones((3, 4), np.float32)
    one, other = (Net(gg.set_param(gg.from_numpy(gg.Context(), array, name))) for name in ("one", "other"))
    with Elsewhere(net), pytest.raises(gg.train.InUse, match="fit: w F32"):
        Net(w=net.w).fit()
    with Elsewhere(net), pytest.raises(gg.train.InUse, match="predict: x F32"):
        Net(x=net.x).predict()
    with Elsewhere(one), pytest.raises(gg.train.InUse, match="fit: other F32"):     # the same array behind both
        other.fit()
    frozen = gg.from_numpy(gg.Context(), array, "frozen")

    def beside():
        made = Net()
        with made.ctx:
            made.y = gg.add(made.y, gg.mul_mat(frozen, made.x))
        return made
    with Elsewhere(beside()):
        assert beside().fit().steps                                 # what is only read may be shared
        with pytest.raises(gg.train.InUse, match="fit: frozen F32"):
            Net(w=gg.set_param(frozen)).fit()


def test_a_call_that_failed_leaves_nothing_in_use():
    net = Net()

    def fail(history):
        raise OSError("callback")
    errors = []

    def run():
        try:
            net.fit(callback=fail)
        except OSError as e:
            errors.append(e)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert errors and net.fit(callback=lambda h: net.predict() is None).steps


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_what_a_fork_left_behind_trains_nothing():
    """The child has no thread but its own, which may use what the parent trains."""
    net = Net()
    with Elsewhere(net):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                with used("predict", net.x, net.y):
                    code = 0
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        with pytest.raises(gg.train.InUse):
            net.predict()
