"""The loop: epochs and steps over the rows of a dataset.

Parameters change in `Training.step` alone, which Ctrl-C cannot cut: whatever stops the loop, they are those of the last
whole step.
"""
import contextlib
import math
import time
from collections.abc import Iterable

import numpy as np

from ggjit.api.measure_memory import measure as gg_measure
from ggjit.api.registry import init_backend
from ggjit.core.arguments import expect
from ggjit.core.backend import Backend
from ggjit.core.slots import as_bool
from ggjit.display.progress import bar
from ggjit.ops.core.errors import ParamError, ShapeError, TypeMismatch
from ggjit.ops.core.progress import work
from ggjit.ops.core.shape import describe
from ggjit.ops.core.whole_numbers import whole
from ggjit.sched.scheduler import Scheduler
from ggjit.tensors.tensor import Tensor
from ggjit.train import checkpoint as checkpoints
from ggjit.train import losses
from ggjit.train.dataset import Dataset, as_dataset
from ggjit.train.evaluator import Evaluator
from ggjit.train.history import History
from ggjit.train.in_use import used
from ggjit.train.optimizers import AdamW
from ggjit.train.parallel import checked_devices
from ggjit.train.training import NotFinite, Training, uninterrupted

SAVE_SECONDS = 60                       # seconds between checkpoints: a training that is killed loses no more


def fit(inputs, outputs, dataset, loss="cross_entropy", optimizer=None, epochs=1, batch=None, val_split=0.0, seed=0,
        budget=None, params=None, clip=None, early_stop=None, checkpoint=None, callback=None, backend=None,
        progress=True, devices=None):
    """Train the parameters that `outputs` depends on; returns the History.

        h = gg.train.fit(x, logits, (X, Y), epochs=5, batch=32, val_split=0.1)

    inputs: a leaf, or several; their first axis is the rows that are computed at once.  outputs: F32, one result (or
    several) a row.  dataset: (inputs, labels) as arrays, or a Dataset.  loss: "cross_entropy" (labels: class numbers or
    shares), "mse", "mean", "sum", or a function (outputs, labels tensor) -> scalar tensor, of which the mean over the
    parts of a batch is taken and, when evaluating, over the batches that are whole.
    optimizer: AdamW() or SGD(), with a learning rate or a schedule.  batch: rows of a step, a multiple of the rows of
    `inputs` (default: those); gradients of the parts are summed.  val_split: share of the rows, the last ones, that are
    held out and evaluated after every epoch.  seed: of the order of the rows; None: as they are.
    params: the leaves to train (default: all marked by set_param).  clip: largest norm of all gradients together.
    early_stop: end when the held-out loss has not fallen for so many epochs.  checkpoint: a file that is written after
    every epoch, every minute of a longer one, and on Ctrl-C, and that a later call with the same arguments goes on
    from, bit for bit.  callback: called with the History after every step; True ends the training.  backend: a backend,
    a name or a Scheduler (default: the CPU).
    devices: such as cl.devices of gg.cluster: the parts of a batch (`batch` over the rows of `inputs`) are computed
    there in turn, their gradients summed here in the order of the parts: any number of devices gives the same bits.
    budget: bytes for parameters, gradients, moments, a batch and what is computed between (scratch of kernels is not
    counted); what does not fit is computed again when it is read, or for some rows at a time (gg.rematerialize), and
    the numbers stay the same.
    Rows that do not fill a batch are left out of the epoch; another order leaves out others.
    Errors: typed ones before anything changes, InUse where another thread uses these tensors; NotFinite for a loss
    that is not a number, naming step and node.
    Source: ggml_opt_fit.
    """
    data = as_dataset(dataset)
    optimizer = AdamW() if optimizer is None else optimizer
    seed = None if seed is None else whole(seed, "fit: seed")
    if seed is not None and seed < 0:
        raise ParamError(f"fit: seed must not be negative, got {seed}")
    if callback is not None and not callable(callback):
        raise TypeMismatch(f"fit: callback is a function of the History, got {type(callback).__name__}")
    if checkpoint is not None:
        checkpoints.require_folder(checkpoint)
    period = _period(inputs, batch)
    train, held_out = data.split(val_split)
    if budget is not None and whole(budget, "fit: budget") < 1:
        raise ParamError(f"fit: budget is a number of bytes, got {budget}")
    if devices is not None:
        devices = checked_devices(devices)
        if backend is not None or budget is not None:
            raise ParamError("fit: with devices, leave backend and budget away: gradients are computed on the devices, "
                             "the step on the CPU of this process")
    params = list(params) if isinstance(params, Iterable) and not isinstance(params, Tensor) else params
    with used("fit", inputs, outputs, params):
        training = Training(inputs, outputs, loss, _target(backend), optimizer, params, period, clip, budget, devices,
                            evaluates=bool(len(held_out)))
        _check_data(training, train, held_out, early_stop, epochs)
        try:
            loop = TrainingLoop(training, train, held_out, seed, checkpoint, callback)
            loop.run(epochs, early_stop, progress)
        finally:
            if training.replicas is not None:
                training.replicas.free()
    return loop.history


def evaluate(inputs, outputs, dataset, loss="cross_entropy", backend=None):
    """(loss, accuracy) over all rows of a dataset, an Evaluation: with uncertainties and predictions; accuracy is None
    for losses without classes.

        loss, accuracy = gg.train.evaluate(x, logits, (X_test, Y_test))

    Arguments and errors as `fit`.  Source: ggml_opt_epoch.
    """
    with used("evaluate", inputs, outputs):
        network = Evaluator(inputs, outputs, loss, _target(backend))
        network.place()
        return network.evaluate(as_dataset(dataset))


def predict(inputs, outputs, rows, backend=None):
    """The outputs for every row of an array (or of several, for several inputs), as one array.

        gg.train.predict(x, logits, X_test).argmax(-1)

    Errors as `fit`.
    """
    found = []
    with used("predict", inputs, outputs):
        network = Evaluator(inputs, outputs, "mean", _target(backend))
        network.place()
        rows = rows if isinstance(rows, Dataset) else Dataset(rows)
        with work("predicting", -(-len(rows) // network.batch)) as step:
            for y, *_ in network.results(rows, labelled=False):
                found.append(y)
                step()
    return np.concatenate(found)


def measure(inputs, outputs, loss="cross_entropy", optimizer=None, batch=None, params=None, clip=None, planner="best"):
    """The memory of a training before it runs: a MeasureReport of the graph that computes gradients.

        gg.train.measure(x, logits).kinds       # bytes of parameters, gradient sums, moments, beside .peak

    Arguments as `fit`.  Source: ggml_opt_alloc.
    """
    optimizer = AdamW() if optimizer is None else optimizer
    training = Training(inputs, outputs, loss, _target(None), optimizer, params, _period(inputs, batch), clip)
    kinds = {"parameters": training.params, "gradient sums": training.sums,
             "moments": [m for own in training.states for m in own]}
    return gg_measure(training.further or training.first, planner,
                      kinds={name: sum(t.nbytes for t in tensors) for name, tensors in kinds.items()},
                      title="gradients of a training")


def _target(backend):
    if backend is None or isinstance(backend, str):
        return init_backend(backend or "CPU")
    return expect(backend, (Backend, Scheduler), "backend")


def _period(inputs, batch):
    first = inputs[0] if isinstance(inputs, tuple | list) and inputs else inputs
    if not isinstance(first, Tensor):
        raise TypeMismatch(f"fit: inputs are tensors, got {type(first).__name__}")
    rows = first.shape[0] if first.ndim else 0
    if rows < 1:
        raise ShapeError(f"fit: {describe(first)} has no rows")
    if batch is None:
        return 1
    batch = whole(batch, "fit: batch")
    if batch < 1 or batch % rows:
        raise ParamError(f"fit: batch {batch!r} is not a multiple of the {rows} rows of {describe(first)}")
    return batch // rows


def _check_data(training, train, held_out, early_stop, epochs):
    need = training.batch * training.period
    if len(train) < need:
        raise ParamError(f"fit: {len(train)} rows to learn from do not fill a batch of {need}; use a smaller batch")
    if early_stop is not None and not len(held_out):
        raise ParamError("fit: early_stop needs rows that are held out; pass val_split")
    training.needs_batch(held_out)
    if whole(epochs, "fit: epochs") < 0:
        raise ParamError(f"fit: epochs must be a whole number, 0 or more, got {epochs!r}")
    if early_stop is not None and whole(early_stop, "fit: early_stop") < 1:
        raise ParamError(f"fit: early_stop is a number of epochs, 1 or more, got {early_stop!r}")
    for part in (train, held_out):                      # wrong labels are found before the first step
        for first in range(0, len(part), training.batch):
            inputs, labels = part.rows(slice(first, first + training.batch))
            training.targets_of(labels, len(inputs[0]))


class TrainingLoop:
    """Epochs and steps, from where a checkpoint was left.

    about: {word: value} of the setup, beside what is known here, which a checkpoint to go on from must agree with.
    partial: of an epoch that is not whole yet: its steps, the sum of their losses, rows that were right, rows.
    """

    def __init__(self, training, train, held_out, seed, path, callback, about=None):
        self.training, self.train, self.held_out, self.seed = training, train, held_out, seed
        self.path, self.callback = path, callback
        self.history, self.epoch, self.n_steps, self.partial = History(), 0, 0, checkpoints.WHOLE
        loss = training.loss_kind
        self.setup = {"seed": seed, "rows": len(train), "batch": training.batch * training.period,
                      "loss": "a function" if callable(loss) else loss,
                      "optimizer": type(training.optimizer).__name__} | (about or {})
        self.saved_at = time.perf_counter()
        if path is not None and checkpoints.exists(path):
            self.n_steps, self.epoch, self.partial, self.history = checkpoints.load(
                path, training.params, training.states, self.setup)
            self.history.stopped = ""           # forget the reason for which an earlier call stopped
        elif path is not None:                  # an interrupted first epoch starts again from here
            self._save()

    def run(self, epochs, early_stop, progress, max_steps=math.inf):
        """On Ctrl-C, and after step `max_steps`, the checkpoint is one of an epoch that is not whole."""
        per_epoch = len(self.train) // (self.training.batch * self.training.period)
        n = max(min((epochs - self.epoch) * per_epoch - self.partial[0], max_steps - self.n_steps), 0)
        try:
            with bar("training", n, progress) as show:
                while self.epoch < epochs and self.n_steps < max_steps and not self.history.stopped:
                    if self._epoch(show, max_steps) and early_stop is not None and self._stalled(early_stop):
                        self.history.stopped = f"the held-out loss has not fallen for {early_stop} epochs"
                    if self.path is not None:
                        self._save()
        except KeyboardInterrupt:
            if self.path is not None:
                with contextlib.suppress(NotFinite):            # the existing checkpoint, of a finite step, is kept
                    self._save()
            raise

    def _epoch(self, show, max_steps):
        """One epoch, or what is left of it; False where `max_steps` ended it."""
        t0, h = time.perf_counter(), self.history
        order, rows = self.train.order(self.seed, self.epoch), self.training.batch * self.training.period
        n = len(order) // rows
        for i in range(self.partial[0], n):
            if self.n_steps == max_steps:
                return False
            self._step(order[i * rows:(i + 1) * rows])
            held = f", held out {h.val_loss[-1]:.4f}" if h.val_loss else ""
            show(description=f"epoch {self.epoch + 1}, loss {self.partial[1] / (i + 1):.4f}{held}")
            answer = None if self.callback is None else self.callback(self.history)
            if answer is not None and as_bool(answer, "the callback of fit"):
                self.history.stopped = "the callback said so"
                break
            if self.path is not None and time.perf_counter() - self.saved_at > SAVE_SECONDS:
                self._save()
        self.training.check_params(self.n_steps)
        held = self.training.evaluate(self.held_out) if len(self.held_out) else None
        with uninterrupted():
            (n_done, total, right, seen), self.partial = self.partial, checkpoints.WHOLE
            self.epoch += 1
            h.loss.append(total / n_done)
            h.seconds.append(time.perf_counter() - t0)
            if seen:
                h.accuracy.append(right / seen)
            if held is not None:
                h.val_loss.append(held[0])
                h.val_accuracy.extend([] if held[1] is None else held[1:])
        if held is not None and not math.isfinite(held[0]):
            raise NotFinite(f"epoch {self.epoch}: the loss of the held-out rows is {held[0]}, that of the others is "
                            f"not; look for such values among them")
        return True

    def _step(self, rows):
        """One step over `rows`, whose loss and counts are added to `partial`."""
        t, number, losses_, right, seen = self.training, self.n_steps + 1, [], 0, 0
        parts = []
        for k in range(t.period):
            inputs, labels = self.train.rows(rows[k * t.batch:(k + 1) * t.batch])
            parts.append((inputs, t.targets_of(labels, t.batch)))
        for (_, target), (loss, classes) in zip(parts, t.summed(parts), strict=True):
            if not math.isfinite(loss):
                t.check_params(number - 1)
                raise NotFinite(f"step {number}: the loss is {loss}; {t.culprit()}")
            losses_.append(loss)
            if t.loss_kind == "cross_entropy":
                hits, n = losses.n_correct(classes(), target)
                right, seen = right + hits, seen + n
        loss = sum(losses_) / (1 if t.loss_kind == "sum" else len(losses_))
        with uninterrupted():           # parameters and history change together, or not at all
            t.step(number)
            self.n_steps = number
            self.history.steps.append(loss)
            self.partial = tuple(a + b for a, b in zip(self.partial, (1, loss, right, seen), strict=True))

    def _stalled(self, patience):
        lost = self.history.val_loss
        return len(lost) > patience and min(lost[-patience:]) >= min(lost[:-patience])

    def _save(self):
        """Errors: NotFinite, CannotWrite; a file that is there already stays."""
        self.training.check_params(self.n_steps)
        place = {"step": self.n_steps, "epoch": self.epoch, "partial": self.partial, "setup": self.setup}
        with uninterrupted():
            checkpoints.save(self.path, self.training.params, self.training.states, place, self.history)
        self.saved_at = time.perf_counter()
