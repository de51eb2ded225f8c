"""Data-parallel training: the same bits on any number of workers."""
import numpy as np
import pytest
from helpers.clusters import workers
from helpers.small_net import Net

import ggjit as gg


class Quarters(Net):
    """Four rows at once: a batch is four parts."""

    def __init__(self):
        super().__init__(4)

    def fit(self, **options):
        """(history, parameters)"""
        history = super().fit(**{"batch": 16, "epochs": 2, "progress": False, **options})
        return history, self.values()


@pytest.fixture(scope="module")
def cluster():
    with workers(n=4) as made:
        yield made


def test_one_two_and_four_workers_give_the_same_bits(cluster):
    want, local = Quarters().fit(clip=1.0, val_split=0.25)
    for n in (1, 2, 4):
        runs = [s.machine.counters["runs"] for s in cluster.servers]
        h, params = Quarters().fit(clip=1.0, val_split=0.25, devices=cluster.devices[:n])
        assert (h.steps, h.loss, h.val_loss, h.accuracy) == (want.steps, want.loss, want.val_loss, want.accuracy)
        for a, b in zip(params, local, strict=True):
            np.testing.assert_array_equal(a, b)
        done = [s.machine.counters["runs"] - r for s, r in zip(cluster.servers, runs, strict=True)]
        assert done == [4 * 2 * 2 // n] * n + [0] * (4 - n)        # parts, steps, epochs; nothing on the others


def test_a_batch_sends_one_message_a_part_and_gives_all_memory_back(cluster):
    device, machine = cluster.devices[0], cluster.servers[0].machine
    n = []
    Quarters().fit(devices=[device], epochs=3, callback=lambda h: n.append(device.stream.n_messages))
    assert np.diff(n)[2:].tolist() == [4] * (len(n) - 3)
    device.memory()
    assert not machine.used_nbytes


def test_a_lost_worker_leaves_the_parameters_of_the_last_whole_step():
    def lose(history):
        if len(history.steps) == 2:
            params.extend(w.numpy() for w in net.params)
            cluster.servers[1].drop()
    net, params = Quarters(), []
    with workers(n=2, timeout=2.0) as cluster:
        with pytest.raises(gg.DeviceLost, match="worker1.*is lost"):
            net.fit(devices=cluster.devices, callback=lose)
        for a, b in zip(params, net.params, strict=True):
            np.testing.assert_array_equal(a, b.numpy())
        cluster.devices[1].reopen()
        assert len(net.fit(devices=cluster.devices)[0].steps) == 6


def test_devices_that_are_none(cluster):
    for given, error, match in (("CPU", gg.TypeMismatch, "list of devices"), ([], gg.ParamError, "at least one"),
                                ([gg.registry.device("CPU")], gg.ParamError, "without them the CPU"),
                                (cluster.devices[:1] * 2, gg.ParamError, "each once")):
        with pytest.raises(error, match=match):
            Quarters().fit(devices=given)
    for options in ({"backend": "CPU"}, {"budget": 1 << 20}):
        with pytest.raises(gg.ParamError, match="leave backend and budget away"):
            Quarters().fit(devices=cluster.devices, **options)
