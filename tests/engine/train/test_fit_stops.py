"""gg.train.fit that stops: told to, interrupted or killed; and goes on from its checkpoint."""
import json
import os
import signal
import sys
import threading

import numpy as np
import pytest
from helpers.small_net import BATCH, Net, X, Y, dense, equal

import ggjit as gg


def test_resumed_training_has_the_same_bits(tmp_path):
    """Interrupted by an error in the second epoch; the file holds the end of the first."""
    whole, parts, path = Net(), Net(), tmp_path / "run.safetensors"
    want = whole.fit(epochs=3, val_split=0.25)

    def fails(history):
        if len(history.steps) == 6:
            raise RuntimeError("power cut")
    with pytest.raises(RuntimeError, match="power cut"):
        parts.fit(epochs=3, val_split=0.25, checkpoint=path, callback=fails)
    again = Net()
    h = again.fit(epochs=3, val_split=0.25, checkpoint=path)
    assert (h.steps, h.val_loss) == (want.steps, want.val_loss)
    assert equal(whole.values(), again.values())
    other = gg.Context()
    x = other.new_tensor(gg.F32, (6, BATCH))
    y = gg.mul_mat(dense(other, 3, 6, 1, "w1"), x)
    with pytest.raises(gg.ShapeError, match="is of other parameters: it has"):
        gg.train.fit(x, y, (X, Y), checkpoint=path)
    (tmp_path / "bad").write_bytes(b"nonsense")
    with pytest.raises(gg.BadFile, match="not a training checkpoint"):
        Net().fit(checkpoint=tmp_path / "bad")


def test_a_first_epoch_that_was_interrupted_starts_again(tmp_path):
    want, net, path = Net(), Net(), tmp_path / "run.safetensors"
    want.fit(epochs=1)

    def stop(history):
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        net.fit(epochs=1, checkpoint=path, callback=stop)
    net.fit(epochs=1, checkpoint=path)
    assert equal(want.values(), net.values())


def test_a_checkpoint_goes_on_after_a_stop_but_not_as_another_training(tmp_path):
    net, path = Net(), tmp_path / "run.safetensors"
    assert net.fit(epochs=3, checkpoint=path, callback=lambda h: np.bool_(True)).stopped
    before = net.values()
    with pytest.raises(gg.ParamError, match="seed=0, now 5; use another file"):
        net.fit(epochs=3, checkpoint=path, seed=5)
    with pytest.raises(gg.ParamError, match="loss='cross_entropy', now 'mse'"):
        net.fit((X, np.eye(3, dtype=np.float32)[Y]), epochs=3, checkpoint=path, loss="mse")
    with pytest.raises(gg.ParamError, match="optimizer='AdamW', now 'SGD'"):
        net.fit(epochs=3, checkpoint=path, optimizer=gg.train.SGD())
    assert equal(before, net.values())
    h = net.fit(epochs=np.int64(3), checkpoint=path, seed=np.int64(0))
    assert len(h.loss) == 3 and not h.stopped
    assert len(net.fit(epochs=1, checkpoint=path).loss) == 3        # it has had more already


@pytest.mark.parametrize("optimizer", [gg.train.AdamW(lr=0.05), gg.train.SGD(lr=lambda step: 0.1 / step)])
def test_what_is_killed_in_an_epoch_goes_on_from_its_last_checkpoint(tmp_path, monkeypatch, optimizer):
    """Sums of gradients over parts of a batch, moments and the schedule's step are those of a training in one go."""
    path, options = tmp_path / "run.safetensors", dict(epochs=2, batch=2 * BATCH, optimizer=optimizer, val_split=0.25)
    whole = Net()
    want = whole.fit(**options)
    monkeypatch.setattr(sys.modules["ggjit.train.fit"], "SAVE_SECONDS", 0)

    def fails(history):
        if len(history.steps) == 2:
            raise RuntimeError("power cut")
    with pytest.raises(RuntimeError, match="power cut"):
        Net().fit(checkpoint=path, callback=fails, **options)
    again, seen = Net(), []
    h = again.fit(checkpoint=path, callback=lambda h: seen.append(len(h.steps)), **options)
    assert seen[0] == 2 and h.steps == want.steps and h.val_loss == want.val_loss and h.accuracy == want.accuracy
    assert equal(whole.values(), again.values())


@pytest.mark.parametrize("word,changes", [
    ("place", {"step": float("inf")}), ("place", {"epoch": -1}), ("place", {"partial": ["x"] * 4}),
    ("place", {"partial": [1]}), ("place", {"setup": 3}), ("history", {"loss": ["a"]}), ("history", {"stopped": []}),
    ("history", {"steps": {}}), ("history", {"other": 1}), ("place", "[" * 100000), ("history", "9" * 5000)])
def test_what_a_checkpoint_says_of_itself_is_checked(tmp_path, word, changes):
    safetensors, numpy = pytest.importorskip("safetensors"), pytest.importorskip("safetensors.numpy")
    path = tmp_path / "run.safetensors"
    Net().fit(epochs=1, checkpoint=path)
    with safetensors.safe_open(path, "numpy") as f:
        about, tensors = f.metadata(), {name: f.get_tensor(name) for name in f.keys()}
    about[word] = changes if isinstance(changes, str) else json.dumps(json.loads(about[word]) | changes)
    numpy.save_file(tensors, path, about)
    with pytest.raises(gg.BadFile, match="not a training checkpoint"):
        Net().fit(epochs=2, checkpoint=path)


def test_checkpoints_are_whole_or_not_there(tmp_path, monkeypatch):
    net, path = Net(), tmp_path / "run.safetensors"
    net.fit(epochs=1, checkpoint=path)
    good = path.read_bytes()
    for cut in range(0, len(good), 61):
        path.write_bytes(good[:cut])
        with pytest.raises(gg.BadFile, match="not a training checkpoint.*another file"):
            Net().fit(epochs=2, checkpoint=path)
    path.write_bytes(good)

    def full(fd):
        raise OSError(28, "No space left on device")
    with monkeypatch.context() as m:
        m.setattr(os, "fsync", full)
        with pytest.raises(gg.CannotWrite, match="No space left .* make space"):
            net.fit(epochs=2, checkpoint=path)
    assert path.read_bytes() == good and os.listdir(tmp_path) == [path.name]
    with pytest.raises(gg.train.NotFinite):             # what the last step spoilt is not kept
        Net().fit((X, Y), epochs=2, checkpoint=path, optimizer=gg.train.AdamW(lr=3e38))
    assert path.read_bytes() == good


def test_ctrl_c_leaves_whole_steps():
    net, seen = Net(), []

    def press(history):
        seen.append(net.values())
        if len(seen) == 3:
            os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        net.fit(epochs=5, callback=press)
    assert equal(net.values(), seen[2]) and len(seen) == 3
    assert net.fit(epochs=1).steps                      # and it goes on


def test_ctrl_c_at_any_moment_leaves_whole_steps(tmp_path):
    """In a kernel, between batches, while a checkpoint is written: the parameters are those of the steps counted."""
    tried = []
    for k in range(6):
        net, path, counted = Net(), tmp_path / f"{k}.safetensors", []
        timer = threading.Timer(0.02 + 0.013 * k, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            while True:
                net.fit(epochs=10 ** 6, checkpoint=path, progress=False, callback=counted.append)
        timer.join()
        if not counted:
            continue
        n = len(counted[-1].steps)
        same = Net()
        same.fit(epochs=10 ** 6, progress=False, callback=lambda h, n=n: len(h.steps) == n)
        tried.append(n)
        assert equal(net.values(), same.values()), n
        h = net.fit(epochs=1, checkpoint=path)
        assert len(h.steps) >= n
    assert tried


def test_stops_early_and_when_told():
    h = Net().fit(epochs=50, val_split=0.25, early_stop=2, optimizer=gg.train.SGD(lr=0.0))
    assert len(h.loss) == 3 and "has not fallen for 2 epochs" in h.stopped
    h = Net().fit(epochs=50, callback=lambda history: len(history.steps) == 4)
    assert len(h.steps) == 4 and h.stopped == "the callback said so"
