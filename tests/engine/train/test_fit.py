"""gg.train: the numbers of a training, resuming, stopping, and what is refused."""
import os
import signal
import sys
import threading

import numpy as np
import pytest
from helpers import devices

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


def in_numpy(steps, batch, optimizer, lr):
    """The same training in float64: (losses, parameters)."""
    net = Net()
    w1, w2 = (w.astype(np.float64) for w in net.values())
    state, losses = [[0.0, 0.0], [0.0, 0.0]], []
    for t in range(1, steps + 1):
        rows = slice((t - 1) * batch % len(X), (t - 1) * batch % len(X) + batch)
        x, hot = X[rows].astype(np.float64), np.eye(3)[Y[rows]]
        h = x @ w1.T
        z = np.maximum(h, 0) @ w2.T
        p = np.exp(z - z.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        losses.append(-np.log((p * hot).sum(1)).mean())
        dz = (p - hot) / batch
        grads = [((dz @ w2) * (h > 0)).T @ x, dz.T @ np.maximum(h, 0)]
        for i, (w, g) in enumerate(zip((w1, w2), grads, strict=True)):
            if optimizer == "sgd":
                w -= lr * g
                continue
            m, v = state[i]
            state[i] = m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            w -= lr * (m / (1 - 0.9 ** t)) / (np.sqrt(v / (1 - 0.999 ** t)) + 1e-8)
    return losses, [w1, w2]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("rows", [BATCH, BATCH // 2], ids=["whole batches", "summed gradients"])
def test_losses_and_parameters_are_those_of_numpy(optimizer, rows):
    net, lr = Net(rows), 0.05
    made = gg.train.SGD(lr=lr) if optimizer == "sgd" else gg.train.AdamW(lr=lr)
    h = net.fit(optimizer=made, batch=BATCH, epochs=2, seed=None)
    losses, params = in_numpy(2 * len(X) // BATCH, BATCH, optimizer, lr)
    np.testing.assert_allclose(h.steps, losses, rtol=2e-5)
    for got, want in zip(net.values(), params, strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)
    assert len(h.loss) == len(h.accuracy) == len(h.seconds) == 2
    assert h.loss[1] == pytest.approx(np.mean(losses[6:]), 1e-4)


def test_held_out_rows_are_evaluated_and_none_is_left_out():
    net = Net()
    h = net.fit(epochs=3, val_split=0.25, optimizer=gg.train.AdamW(lr=0.05))
    assert len(h.val_loss) == len(h.val_accuracy) == 3 and h.val_loss[-1] < h.val_loss[0]
    loss, accuracy = gg.train.evaluate(net.x, net.y, (X[:13], Y[:13]))
    logits = gg.train.predict(net.x, net.y, X[:13])
    assert logits.shape == (13, 3) and accuracy == (logits.argmax(1) == Y[:13]).mean()
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    assert loss == pytest.approx(-np.log(p[np.arange(13), Y[:13]]).mean(), rel=1e-5)


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
    assert all((a == b).all() for a, b in zip(whole.values(), again.values(), strict=True))
    other = gg.Context()
    x = other.new_tensor(gg.F32, (6, BATCH))
    y = gg.mul_mat(dense(other, 3, 6, 1, "w1"), x)
    with pytest.raises(gg.ShapeError, match="is of other parameters: it has"):
        gg.train.fit(x, y, (X, Y), checkpoint=path)
    (tmp_path / "bad").write_bytes(b"nonsense")
    with pytest.raises(gg.BadFile, match="no checkpoint of a training"):
        Net().fit(checkpoint=tmp_path / "bad")


def test_a_first_epoch_that_was_interrupted_starts_again(tmp_path):
    want, net, path = Net(), Net(), tmp_path / "run.safetensors"
    want.fit(epochs=1)

    def stop(history):
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        net.fit(epochs=1, checkpoint=path, callback=stop)
    net.fit(epochs=1, checkpoint=path)
    assert all((a == b).all() for a, b in zip(want.values(), net.values(), strict=True))


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
    assert all((a == b).all() for a, b in zip(before, net.values(), strict=True))
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
    assert all((a == b).all() for a, b in zip(whole.values(), again.values(), strict=True))


def test_checkpoints_are_whole_or_not_there(tmp_path, monkeypatch):
    net, path = Net(), tmp_path / "run.safetensors"
    net.fit(epochs=1, checkpoint=path)
    good = path.read_bytes()
    for cut in range(0, len(good), 61):
        path.write_bytes(good[:cut])
        with pytest.raises(gg.BadFile, match="no checkpoint of a training.*another file"):
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


def test_nothing_but_the_optimiser_writes_parameters():
    net = Net()
    before = net.values()
    with net.ctx:
        y = gg.mul_mat(net.params[1], gg.mul_mat(gg.scale_inplace(net.params[0], 0.5), net.x))
    for call in (gg.train.fit, gg.train.evaluate):
        with pytest.raises(gg.ParamError, match="writes .*w1.* in place"):
            call(net.x, y, (X, Y))
    assert all((a == b).all() for a, b in zip(before, net.values(), strict=True))


@pytest.mark.parametrize("options,match", [
    (dict(data=(X, np.zeros((48, 3), np.float32))), "each row sums to 1"),
    (dict(data=(X, np.ones((48, 1, 3, 2), np.float32)), loss="mse"), "do not fit outputs"),
    (dict(optimizer="adam"), "fit: optimizer takes"), (dict(params=[3]), "fit: params takes"),
    (dict(params=3), "params takes a list of tensors, got int"),
    (dict(backend=3), "backend takes"), (dict(seed=-1), "seed must not be negative"),
    (dict(callback=3), "is a function"),
    (dict(early_stop=0, val_split=0.25), "1 or more"), (dict(checkpoint="/no such folder/a"), "there is no folder"),
    (dict(optimizer=gg.train.SGD(lr=np.inf)), "finite"), (dict(optimizer=gg.train.SGD(lr=lambda step: None)), "number"),
    (dict(optimizer=gg.train.SGD(lr=1e39)), "finite in float32"), (dict(optimizer=gg.train.SGD(lr=True)), "number"),
    (dict(data=(X, Y.astype(float))), "class numbers are integers"), (dict(data=(X, Y - 100)), "leave such rows out"),
    (dict(data=(X[:0], Y[:0])), "there are no rows"), (dict(data=(X.tolist(), Y)), "np.array makes one of rows"),
    (dict(data=iter(X)), "arrays of numbers are needed, .* got "), (dict(data=([[1, 2], [3]],)), "arrays of numbers"),
    (dict(clip=[1]), "clip must be positive"), (dict(val_split="0.1"), r"in \[0, 1\)"),
    (dict(checkpoint=3), "named by its path, got 3"), (dict(checkpoint=b"a"), "named by its path"),
    (dict(loss=lambda y, t: None), "a loss function returns a tensor .* got NoneType"),
])
def test_mistakes_are_found_before_the_first_step(options, match):
    net = Net()
    before = net.values()
    with pytest.raises(gg.GgjitError, match=match):
        net.fit(**options)
    assert all((a == b).all() for a, b in zip(before, net.values(), strict=True))


def test_ctrl_c_leaves_whole_steps():
    net, seen = Net(), []

    def press(history):
        seen.append(net.values())
        if len(seen) == 3:
            os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        net.fit(epochs=5, callback=press)
    assert all((a == b).all() for a, b in zip(net.values(), seen[2], strict=True)) and len(seen) == 3
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
        assert all((a == b).all() for a, b in zip(net.values(), same.values(), strict=True)), n
        h = net.fit(epochs=1, checkpoint=path)
        assert len(h.steps) >= n
    assert tried


def test_trainings_inside_one_another_and_in_threads():
    want, outer, inner = Net().fit(epochs=2), Net(), Net()
    got = outer.fit(epochs=2, callback=lambda h: inner.fit() and None)
    assert got.steps == want.steps
    nets, found = [Net(), Net()], {}
    threads = [threading.Thread(target=lambda net=net: found.update({net: net.fit(epochs=2)})) for net in nets]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [found[net].steps for net in nets] == [want.steps] * 2


def test_a_model_that_is_freed_while_it_is_trained():
    net = Net()
    with pytest.raises(gg.StaleHandle, match="x belongs to a Context that was freed"):
        net.fit(callback=lambda h: net.ctx.free())
    with pytest.raises(gg.StaleHandle, match="freed"):
        net.fit()


def test_a_callback_answers_yes_or_no():
    with pytest.raises(gg.GgjitError, match="the callback of fit must answer True or False"):
        Net().fit(callback=lambda h: np.array([1, 2]))


def test_stops_early_and_when_told():
    h = Net().fit(epochs=50, val_split=0.25, early_stop=2, optimizer=gg.train.SGD(lr=0.0))
    assert len(h.loss) == 3 and "has not fallen for 2 epochs" in h.stopped
    h = Net().fit(epochs=50, callback=lambda history: len(history.steps) == 4)
    assert len(h.steps) == 4 and h.stopped == "the callback said so"


def test_clipping_limits_the_step():
    net, clip = Net(), 1e-3
    before = net.values()
    net.fit((X[:BATCH], Y[:BATCH]), clip=clip, optimizer=gg.train.SGD(lr=1.0))
    moved = np.sqrt(sum(np.square(a - b).sum() for a, b in zip(net.values(), before, strict=True)))
    assert moved == pytest.approx(clip, rel=1e-2)


def test_schedules_and_other_losses():
    seen = []
    net = Net()
    net.fit(optimizer=gg.train.AdamW(lr=lambda step: seen.append(step) or 0.01))
    assert seen == list(range(1, 7))
    target = np.random.default_rng(1).standard_normal((48, 3)).astype(np.float32)
    h = Net().fit((X, target), loss="mse", epochs=4, optimizer=gg.train.SGD(lr=0.1), val_split=0.25)
    assert h.loss[-1] < h.loss[0] and not h.accuracy and len(h.val_loss) == 4
    own = Net().fit((X, target), loss=lambda y, t: gg.mean(gg.reshape_1d(gg.sqr(gg.sub(y, t)), 24)), epochs=4,
                    optimizer=gg.train.SGD(lr=0.1))
    assert own.loss[-1] < own.loss[0]


def test_on_a_scheduler():
    plain, net = Net(), Net()
    want = plain.fit()
    got = net.fit(backend=gg.Scheduler([gg.init_backend("CPU")]))
    assert got.steps == want.steps and all((a == b).all() for a, b in zip(net.values(), plain.values(), strict=True))


def test_parameters_on_another_device():
    """Gradient sums and moments go there, too; the losses are the same bits."""
    gpu, ctx = devices.Fake("GPU0").init_backend(), gg.Context()
    x, want = ctx.new_tensor(gg.F32, (6, BATCH)), Net().fit(epochs=2)
    params = [gg.set_param(ctx.new_tensor(gg.F32, w.ne, name=w.name)) for w in Net().params]
    with ctx:
        y = gg.mul_mat(params[1], gg.relu(gg.mul_mat(params[0], x)))
    memory = gpu.alloc_buffer(1024)
    for w, at, values in zip(params, (0, 512), Net().values(), strict=True):
        gg.tensor_alloc(memory, w, at)
        w.set(values)
    sched = gg.Scheduler([gpu, gg.init_backend("CPU")])
    got = gg.train.fit(x, y, (X, Y), epochs=2, backend=sched)
    assert got.steps == want.steps and {s.backend for s in sched.splits} == {gpu}


def test_memory_is_known_before():
    net = Net()
    report, n = gg.train.measure(net.x, net.y, batch=2 * BATCH), 4 * (5 * 6 + 3 * 5)
    assert report.kinds == {"parameters": n, "gradient sums": n, "moments": 2 * n} and report.peak > 0


def test_history_shows_itself():
    h = gg.train.History(steps=[3.0, 2.0, 1.5, 1.0], loss=[2.5, 1.25], val_loss=[2.0, 1.5])
    assert h._repr_png_().startswith(b"\x89PNG") and h.plot().get_xlabel() == "step"


def test_datasets():
    data = gg.train.Dataset(np.arange(10)[:, None], np.arange(10), shard=2)
    order = data.order(7, 0)
    assert sorted(order) == list(range(10)) and (order[1::2] == order[::2] + 1).all()
    assert (order == data.order(7, 0)).all() and (order != data.order(7, 1)).any()
    train, held = data.split(0.4)
    assert len(train) == 6 and held.labels.tolist() == [6, 7, 8, 9]
    for n, cut in ((10, 6), (11, 8), (1, 1)):           # whole shards; the last one may have fewer rows
        train, held = gg.train.Dataset(np.arange(n), shard=2 if n > 1 else 1).split(0.4)
        assert (len(train), len(train) + len(held)) == (cut, n)
    with pytest.raises(gg.ShapeError, match="differ in their number of rows"):
        gg.train.Dataset(np.zeros((3, 2)), np.zeros(4))
    with pytest.raises(gg.ParamError, match="shard must be from 1"):
        gg.train.Dataset(np.zeros((3, 2)), shard=0)
    assert gg.train.Dataset(np.zeros((3, 2)), shard=np.int64(3)).shard == 3
    net = Net()
    for call, rows in ((gg.train.evaluate, (X[:0], Y[:0])), (gg.train.predict, X[:0])):
        with pytest.raises(gg.ParamError, match="there are no rows"):
            call(net.x, net.y, rows)


@pytest.mark.parametrize("n", [BATCH, BATCH + 1, 2 * BATCH - 1, 23])
def test_rows_that_fill_no_batch_are_left_out(n):
    got, want = Net(), Net()
    h = got.fit((X[:n], Y[:n]), seed=None, epochs=2)
    assert len(h.steps) == 2 * (n // BATCH)
    n -= n % BATCH
    assert h.steps == want.fit((X[:n], Y[:n]), seed=None, epochs=2).steps
    assert gg.train.predict(got.x, got.y, X[:n + 1]).shape == (n + 1, 3)


def test_optimisers_take_numbers():
    for made in (lambda: gg.train.AdamW(beta2="a"), lambda: gg.train.AdamW(eps=np.inf),
                 lambda: gg.train.SGD(weight_decay="a"), lambda: gg.train.AdamW(weight_decay=np.nan)):
        with pytest.raises(gg.ParamError, match="finite and not negative"):
            made()


def test_classes_may_be_truth_values():
    a, b = Net(), Net()
    assert a.fit((X, Y > 0)).steps == b.fit((X, (Y > 0).astype(int))).steps


# ---------------------------------------------------------------- refused
def test_losses_that_are_no_numbers_name_step_and_node():
    net, bad = Net(), X.copy()
    bad[20] = np.nan
    seen = []
    with pytest.raises(gg.train.NotFinite, match=r"step 3: the gradient of w1 .* = MUL_MAT\(w1 .* is the first node"):
        net.fit((bad, Y), seed=None, callback=lambda h: seen.append(net.values()))
    assert len(seen) == 2 and all((a == b).all() for a, b in zip(net.values(), seen[-1], strict=True))


def test_parameters_that_the_last_step_made_infinite_are_told():
    net = Net()
    with pytest.raises(gg.train.NotFinite, match="step 1 left .* smaller learning rate"):
        net.fit(100 * X[:8], optimizer=gg.train.SGD(lr=3e38), loss="sum")
    with pytest.raises(gg.train.NotFinite, match="not finite before the first step; set it anew"):
        net.fit(X[:8], loss="sum")


def test_held_out_rows_that_are_no_numbers_stop():
    target = np.ones((48, 3), np.float32)
    target[-1] = np.nan
    with pytest.raises(gg.train.NotFinite, match="epoch 1: the loss of the held-out rows is nan"):
        Net().fit((X, target), loss="mse", val_split=0.25)


def test_a_loss_function_of_ones_own_sees_whole_batches():
    net, target = Net(), np.ones((48, 3), np.float32)

    def worst(y, t):
        return gg.sum(gg.sqr(gg.sub(y, t)))

    got, _ = gg.train.evaluate(net.x, net.y, (X[:19], target[:19]), loss=worst)
    y = gg.train.predict(net.x, net.y, X[:16])
    assert got == pytest.approx(np.square(y - 1).sum() / 2, rel=1e-5)
    with pytest.raises(gg.ParamError, match="7 rows to evaluate do not fill a batch of 8"):
        gg.train.evaluate(net.x, net.y, (X[:7], target[:7]), loss=worst)
    before = net.values()
    with pytest.raises(gg.ParamError, match="5 rows to evaluate do not fill a batch of 8"):
        net.fit((X, target), loss=worst, val_split=0.1)
    assert all((a == b).all() for a, b in zip(net.values(), before, strict=True))


def test_an_input_stands_once():
    net = Net()
    with pytest.raises(gg.ParamError, match="inputs names a tensor twice: x"):
        gg.train.fit((net.x, net.x), net.y, ((X, X), Y))
    with pytest.raises(gg.TypeMismatch, match="fit: optimizer takes"):
        gg.train.measure(net.x, net.y, optimizer="adam")


def test_rows_to_predict_are_inputs_alone():
    net = Net()
    with pytest.raises(gg.ShapeError, match="1 input tensors, the dataset has 2 arrays"):
        gg.train.predict(net.x, net.y, (X, Y))


@pytest.mark.parametrize("options, error, match", [
    (dict(data=(X, np.full(48, 3))), gg.IndexRangeError, "label 3 is no class: outputs .* have classes 0 to 2"),
    (dict(data=(X[:, :5], Y)), gg.ShapeError, r"rows of the dataset have shape \(5,\)"),
    (dict(data=X), gg.ParamError, "needs labels"), (dict(batch=12), gg.ParamError, "no multiple of the 8 rows"),
    (dict(data=(X[:4], Y[:4])), gg.ParamError, "do not fill a batch of 8"),
    (dict(loss="huber"), gg.ParamError, "expected one of"), (dict(val_split=1.0), gg.ParamError, r"in \[0, 1\)"),
    (dict(early_stop=2), gg.ParamError, "needs rows that are held"),
    (dict(budget=0), gg.ParamError, "budget is a number of bytes"),
    (dict(clip=0.0), gg.ParamError, "clip must be positive"),
    (dict(epochs=-1), gg.ParamError, "whole number"),
    (dict(loss=lambda y, t: gg.sub(y, t)), gg.ShapeError, "loss must be one element"),
], ids=lambda v: "" if isinstance(v, type | str) else "-".join(v))
def test_what_is_refused_changes_nothing(options, error, match):
    net = Net()
    before = net.values()
    with pytest.raises(error, match=match):
        net.fit(**options)
    assert all((a == b).all() for a, b in zip(net.values(), before, strict=True))


def test_parameters_that_cannot_be_trained():
    ctx = gg.Context()
    x = ctx.new_tensor(gg.F32, (32, BATCH))
    w = gg.from_numpy(ctx, np.zeros((3, 32), np.float32), "w")
    q = gg.set_param(gg.from_numpy(ctx, np.zeros((3, 32), np.float32), "q", type=gg.Q8_0))
    data = (np.zeros((8, 32), np.float32), np.zeros(8, int))
    with pytest.raises(gg.ParamError, match="no parameter leads to"):
        gg.train.fit(x, gg.mul_mat(w, x), data)
    with pytest.raises(gg.TypeMismatch, match="q Q8_0 .* must be F32; a quantised or half weight stays frozen"):
        gg.train.fit(x, gg.mul_mat(q, x), data)
    with pytest.raises(gg.ParamError, match="is a view of w"):
        gg.train.fit(x, gg.mul_mat(w, x), data, params=[w[:1]])
    with pytest.raises(gg.ParamError, match="is no input of"):
        gg.train.fit(w[0], gg.mul_mat(gg.set_param(w), x), data, batch=None)
    frozen = ctx.new_tensor(gg.F32, (3,), name="frozen")
    with pytest.raises(gg.NotAllocated, match="frozen .* have no values"):
        gg.train.fit(x, gg.add(gg.mul_mat(gg.set_param(w), x), frozen), data)
    assert x.buffer is None and frozen.buffer is None
    empty = gg.set_param(ctx.new_tensor(gg.F32, (32, 3), name="empty"))
    with pytest.raises(gg.NotAllocated, match="parameter empty .* has no values"):
        gg.train.fit(x, gg.mul_mat(empty, x), data)


# ---------------------------------------------------------------- within a number of bytes
class Deep(Net):
    """A residual net whose activations outweigh its weights."""

    def __init__(self, rows=64):
        self.ctx = gg.Context()
        self.x = self.ctx.new_tensor(gg.F32, (16, rows), name="x")
        self.params = [dense(self.ctx, 16, 16, i, f"w{i}") for i in range(5)] + [dense(self.ctx, 3, 16, 9, "last")]
        with self.ctx:
            h = self.x
            for w in self.params[:-1]:
                h = gg.add(h, gg.silu(gg.mul_mat(w, gg.norm(h, 1e-5))))
            self.y = gg.mul_mat(self.params[-1], h)


def test_a_budget_changes_no_bit():
    data = (np.tile(np.pad(X, ((0, 0), (0, 10))), (3, 1))[:128], np.tile(Y, 3)[:128])
    free, tight = Deep(), Deep()
    want = free.fit(data, epochs=2, batch=128, clip=1.0)
    with pytest.raises(gg.BudgetError, match="stay in memory .* computing takes .* at least; use") as error:
        tight.fit(data, epochs=2, batch=128, clip=1.0, budget=10_000)
    got = tight.fit(data, epochs=2, batch=128, clip=1.0, budget=error.value.minimum)
    assert got.steps == want.steps
    assert all((a == b).all() for a, b in zip(free.values(), tight.values(), strict=True))
    with pytest.raises(gg.NotSupported, match="kept on one backend"):
        Deep().fit(data, budget=1 << 20, backend=gg.Scheduler([gg.init_backend("CPU")]))
