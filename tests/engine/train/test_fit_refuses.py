"""What gg.train refuses before the first step, and what it stops at."""
import numpy as np
import pytest
from helpers.small_net import BATCH, Net, X, Y, equal

import ggjit as gg


def test_nothing_but_the_optimiser_writes_parameters():
    net = Net()
    before = net.values()
    with net.ctx:
        y = gg.mul_mat(net.params[1], gg.mul_mat(gg.scale_inplace(net.params[0], 0.5), net.x))
    for call in (gg.train.fit, gg.train.evaluate):
        with pytest.raises(gg.ParamError, match="writes .*w1.* in place"):
            call(net.x, y, (X, Y))
    assert equal(before, net.values())


def test_a_model_that_is_freed_while_it_is_trained():
    net = Net()
    with pytest.raises(gg.StaleHandle, match="x belongs to a Context that was freed"):
        net.fit(callback=lambda h: net.ctx.free())
    with pytest.raises(gg.StaleHandle, match="freed"):
        net.fit()


def test_a_callback_answers_yes_or_no():
    with pytest.raises(gg.GgjitError, match="the callback of fit must answer True or False"):
        Net().fit(callback=lambda h: np.array([1, 2]))


def test_optimisers_take_numbers():
    for made in (lambda: gg.train.AdamW(beta2="a"), lambda: gg.train.AdamW(eps=np.inf),
                 lambda: gg.train.SGD(weight_decay="a"), lambda: gg.train.AdamW(weight_decay=np.nan)):
        with pytest.raises(gg.ParamError, match="finite and not negative"):
            made()


def test_losses_that_are_no_numbers_name_step_and_node():
    net, bad = Net(), X.copy()
    bad[20] = np.nan
    seen = []
    with pytest.raises(gg.train.NotFinite, match=r"step 3: the gradient of w1 .* = MUL_MAT\(w1 .* is the first node"):
        net.fit((bad, Y), seed=None, callback=lambda h: seen.append(net.values()))
    assert len(seen) == 2 and equal(net.values(), seen[-1])


def test_parameters_that_the_last_step_made_infinite_are_told():
    net = Net()
    with pytest.raises(gg.train.NotFinite, match="step 1 left .* smaller learning rate"):
        net.fit(100 * X[:8], optimizer=gg.train.SGD(lr=3e38), loss="sum")
    with pytest.raises(gg.train.NotFinite, match="not finite before the first step; set it again"):
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
    assert equal(net.values(), before)


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


REFUSED = {         # before the first step: [(options, what the error says)]
    gg.ParamError: [
        (dict(data=X), "needs labels"), (dict(data=(X[:4], Y[:4])), "do not fill a batch of 8"),
        (dict(data=(X[:0], Y[:0])), "there are no rows"), (dict(batch=12), "not a multiple of the 8 rows"),
        (dict(data=(X, np.zeros((48, 3), np.float32))), "each row sums to 1"),
        (dict(epochs=-1), "whole number"), (dict(seed=-1), "seed must not be negative"),
        (dict(loss="huber"), "expected one of"), (dict(budget=0), "budget is a number of bytes"),
        (dict(val_split=1.0), r"in \[0, 1\)"), (dict(val_split="0.1"), r"in \[0, 1\)"),
        (dict(early_stop=2), "needs rows that are held"), (dict(early_stop=0, val_split=0.25), "1 or more"),
        (dict(clip=0.0), "clip must be positive"), (dict(clip=[1]), "clip must be positive"),
        (dict(checkpoint="/no such folder/a"), "there is no folder"),
        (dict(optimizer=gg.train.SGD(lr=np.inf)), "finite"), (dict(optimizer=gg.train.SGD(lr=True)), "number"),
        (dict(optimizer=gg.train.SGD(lr=1e39)), "finite in float32"),
        (dict(optimizer=gg.train.SGD(lr=lambda step: None)), "number")],
    gg.TypeMismatch: [
        (dict(optimizer="adam"), "fit: optimizer takes"), (dict(backend=3), "backend takes"),
        (dict(params=[3]), "fit: params takes"), (dict(params=3), "params takes a list of tensors, got int"),
        (dict(data=iter(X)), "arrays of numbers are needed, .* got "),
        (dict(data=([[1, 2], [3]],)), "arrays of numbers"), (dict(callback=3), "is a function"),
        (dict(checkpoint=3), "named by its path, got 3"), (dict(checkpoint=b"a"), "named by its path"),
        (dict(loss=lambda y, t: None), "a loss function returns a tensor .* got NoneType")],
    gg.ShapeError: [
        (dict(data=(X[:, :5], Y)), r"rows of the dataset have shape \(5,\)"),
        (dict(data=(X.tolist(), Y)), "np.array makes one of rows"),
        (dict(data=(X, Y.astype(float))), "class numbers are integers"),
        (dict(data=(X, np.ones((48, 1, 3, 2), np.float32)), loss="mse"), "do not fit outputs"),
        (dict(loss=lambda y, t: gg.sub(y, t)), "loss must be one element")],
    gg.IndexRangeError: [
        (dict(data=(X, np.full(48, 3))), "label 3 is not a class: outputs .* have classes 0 to 2"),
        (dict(data=(X, Y - 100)), "leave such rows out")],
}


@pytest.mark.parametrize("error, options, match", [(e, *row) for e, rows in REFUSED.items() for row in rows],
                         ids=lambda v: "-".join(v) if isinstance(v, dict) else "")
def test_what_is_refused_changes_nothing(error, options, match):
    net = Net()
    before = net.values()
    with pytest.raises(error, match=match):
        net.fit(**options)
    assert equal(net.values(), before)


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
    with pytest.raises(gg.ParamError, match="is not an input of"):
        gg.train.fit(w[0], gg.mul_mat(gg.set_param(w), x), data, batch=None)
    frozen = ctx.new_tensor(gg.F32, (3,), name="frozen")
    with pytest.raises(gg.NotAllocated, match="frozen .* have no values"):
        gg.train.fit(x, gg.add(gg.mul_mat(gg.set_param(w), x), frozen), data)
    assert x.buffer is None and frozen.buffer is None
    empty = gg.set_param(ctx.new_tensor(gg.F32, (32, 3), name="empty"))
    with pytest.raises(gg.NotAllocated, match="parameter empty .* has no values"):
        gg.train.fit(x, gg.mul_mat(empty, x), data)
