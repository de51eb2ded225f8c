"""gg.train: the numbers of a training, on one device and several, within a number of bytes."""
import threading

import numpy as np
import pytest
from helpers import devices
from helpers.small_net import BATCH, Net, X, Y, equal

import ggjit as gg


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


def test_results_of_an_evaluation_B7():
    """Uncertainties by ggml_opt_result's formulas, over four batches; parts added are the whole."""
    net = Net()
    n, batch = 4 * net.x.shape[0], net.x.shape[0]
    found = gg.train.evaluate(net.x, net.y, (X[:n], Y[:n]))
    logits = gg.train.predict(net.x, net.y, X[:n]).astype(np.float64)
    np.testing.assert_array_equal(found.predictions, logits.argmax(1))
    each = np.log(np.exp(logits).sum(1)) - logits[np.arange(n), Y[:n]]
    means = each.reshape(4, batch).mean(1)
    assert (found.loss, found.accuracy) == tuple(found) and found.n_rows == n and len(found.batch_losses) == 4
    assert found.loss_uncertainty == pytest.approx(np.sqrt(((means - means.mean()) ** 2).sum() / 4 / 3), rel=1e-3)
    a = found.accuracy
    assert found.accuracy_uncertainty == pytest.approx(np.sqrt(a * (1 - a) / (n - 1)))
    parts = [gg.train.evaluate(net.x, net.y, (X[s], Y[s])) for s in (slice(0, batch), slice(batch, n))]
    both = parts[0] + parts[1]
    assert both.loss == pytest.approx(found.loss) and both.accuracy == a and both.n_rows == n
    assert both.batch_losses == found.batch_losses and (both.predictions == found.predictions).all()
    assert np.isnan(parts[0].loss_uncertainty)
    summed = gg.train.evaluate(net.x, net.y, (X[:n], Y[:n]), loss="sum")
    assert summed.predictions is None and np.isnan(summed.accuracy_uncertainty)
    with pytest.raises(gg.TypeMismatch, match="same kind of loss"):
        summed + found


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
    assert got.steps == want.steps and equal(net.values(), plain.values())


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


def test_classes_may_be_truth_values():
    a, b = Net(), Net()
    assert a.fit((X, Y > 0)).steps == b.fit((X, (Y > 0).astype(int))).steps
