"""The loop: batches in, gradients, a step; planned once, replayed.

    forward      outputs and loss                             evaluation
    first        the same, and gradients copied to where they are summed
    further      the same, and gradients added there          batches of the device that make up one batch of the step
    step         optimiser nodes over the summed gradients

Parameters change in `step` alone, which Ctrl-C cannot cut: whatever stops the loop, they are those of the last whole
step.  Gradient sums and moments are leaves in one buffer, on the device of their parameters.
"""
import contextlib
import math
import signal
import threading
import time

import numpy as np

from ggjit.api.measure_memory import measure as gg_measure
from ggjit.api.registry import init_backend
from ggjit.api.rematerialize import BudgetError, Rematerialized, rematerialize
from ggjit.core.arguments import expect
from ggjit.core.backend import Backend
from ggjit.core.placing import place_tensors
from ggjit.core.slots import as_bool
from ggjit.display.progress import bar
from ggjit.graphs.allocator import GraphAllocator
from ggjit.graphs.backward import gradients
from ggjit.graphs.graph import Graph, visit
from ggjit.graphs.placed import PlacedTensor
from ggjit.ops.core.errors import GgjitError, NotAllocated, NotSupported, ParamError, ShapeError, TypeMismatch
from ggjit.ops.core.progress import work
from ggjit.ops.core.record import FLAG_PARAM, OP, VIEW_OPS
from ggjit.ops.core.shape import describe
from ggjit.ops.core.spec import builders
from ggjit.ops.core.types import F32
from ggjit.ops.core.whole_numbers import whole
from ggjit.sched.scheduler import Scheduler
from ggjit.tensors.context import Context, alloc_ctx_tensors
from ggjit.tensors.tensor import Tensor, set_input
from ggjit.train import checkpoint as checkpoints
from ggjit.train import losses
from ggjit.train.dataset import Dataset, as_dataset
from ggjit.train.history import History
from ggjit.train.optimizers import SGD, AdamW
from ggjit.train.parallel import Replicas, added, checked_devices


class NotFinite(GgjitError, ArithmeticError):
    """A loss or a gradient that is infinite or not a number; the parameters are those of the step before."""


# ---------------------------------------------------------------- running graphs
class Runs:
    """Graphs on a backend that share one arena, planned once each; or on a Scheduler."""

    def __init__(self, target):
        self.target, self.backend = target, target.backends[-1] if isinstance(target, Scheduler) else target
        self.plans, self.allocator = {}, GraphAllocator(self.backend)

    def reserve(self, graphs, planner="ggml"):
        """The arena, large enough for each of the graphs."""
        if self.target is self.backend:
            self.allocator = GraphAllocator(self.backend, planner)
            self.allocator.reserve(max(graphs, key=lambda graph: self.allocator.plan(graph).peak))

    def plan(self, graph):
        """Make what computing needs; a second call does nothing."""
        if graph not in self.plans:
            if self.target is self.backend:
                self.allocator.alloc_graph(graph)
                self.plans[graph] = self.backend.graph_plan_create(graph)
            else:
                self.plans[graph] = None
        return self.plans[graph]

    def compute(self, graph):
        plan = self.plan(graph)
        if plan is None:
            self.target.graph_compute(graph)
        else:
            plan.compute()

    def numpy(self, graph, t):
        plan = self.plan(graph)
        t = graph.of(t) if isinstance(graph, Rematerialized) else t
        return self.target.numpy(t) if plan is None else plan.numpy(t)


@contextlib.contextmanager
def uninterrupted():
    """Ctrl-C inside the block takes effect at its end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught = []
    before = signal.signal(signal.SIGINT, lambda *signal_and_frame: caught.append(signal_and_frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if caught and callable(before):
        before(*caught[0])


# ---------------------------------------------------------------- the graphs of a training
class Network:
    """Inputs, outputs and loss, with what the device needs to evaluate them."""

    def __init__(self, inputs, outputs, loss, target):
        self.inputs = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
        self.outputs, self.loss_kind = outputs, loss
        for t in (*self.inputs, outputs):
            if not isinstance(t, Tensor):
                raise TypeMismatch(f"fit: inputs and outputs are tensors, got {type(t).__name__}")
            t._check()
        losses.check(loss)
        losses.needs_result_type(outputs)
        self._check_inputs()
        self.batch = self.inputs[0].shape[0]            # rows of one compute
        self.runs = Runs(target)
        self.ctx = Context()
        with self.ctx:
            self.labels = set_input(self._like(outputs, "labels")) if losses.needs_labels(loss) else None
            self.loss = losses.build(loss, outputs, self.labels)
        self._check_writes()
        self.forward = Graph(self.loss, outputs)

    def _check_inputs(self):
        leafs = {t.id for tensors in visit((self.outputs,)) for t in tensors if t.op == OP.NONE}
        for t in self.inputs:
            if t.op != OP.NONE or t.id not in leafs:
                raise ParamError(f"fit: {describe(t)} is no input of {describe(self.outputs)}: inputs are leaves that "
                                 f"the outputs are computed from")
            if t.ndim < 1 or t.shape[0] != self.inputs[0].shape[0]:
                raise ShapeError(f"fit: inputs differ in the rows of a batch, their first axis: "
                                 f"{describe(self.inputs[0])}, {describe(t)}")

    def _check_writes(self):
        """A node that writes a leaf in place would change it in every batch, also while evaluating."""
        for t in visit((self.loss, self.outputs))[0]:
            if t.op not in (OP.NONE, *VIEW_OPS) and t.view_src is not None and t.base.op == OP.NONE:
                raise ParamError(f"fit: {describe(t)} = {t.op.name} writes {describe(t.base)} in place; use the op "
                                 f"that makes a new tensor, or gg.cont of the leaf first")

    def _like(self, t, name):
        return self.ctx._leaf(F32, t.ne, name, t.ndim)

    def place(self):
        """Memory for the leaves that have none and are ours to fill.  Errors: NotAllocated for other leaves."""
        ours = {t.id for t in (*self.inputs, self.labels) if t is not None}
        missing = [describe(t) for tensors in visit((self.loss,)) for t in tensors
                   if t.op == OP.NONE and t.view_src is None and t._where() is None
                   and t.id not in ours and t.ctx is not self.ctx]
        if missing:
            raise NotAllocated(f"fit: {', '.join(missing)} have no values; give them some with from_numpy or set")
        for t in self.inputs:
            if t._where() is None:
                alloc_ctx_tensors(t.ctx, self.runs.backend)
        alloc_ctx_tensors(self.ctx, self.runs.backend)

    def targets_of(self, labels, rows):
        """What the label tensor holds for the labels of `rows` rows."""
        if self.labels is None:
            return None
        if labels is None:
            raise ParamError(f"loss {self.loss_kind!r} needs labels; pass dataset=(inputs, labels)")
        shape = self.outputs.shape
        return losses.targets(self.loss_kind, labels, (shape[0] // self.batch * rows, *shape[1:]))

    def feed(self, inputs, target):
        """Values of a batch, with fewer rows filled up by the last one."""
        if len(inputs) != len(self.inputs):
            raise ShapeError(f"fit: {len(self.inputs)} input tensors, the dataset has {len(inputs)} arrays")
        for t, a in zip(self.inputs, inputs, strict=True):
            if a.shape[1:] != t.shape[1:]:
                raise ShapeError(f"fit: rows of the dataset have shape {a.shape[1:]}, {describe(t)} has rows of "
                                 f"{t.shape[1:]}")
            t.set(_filled(a, self.batch))
        if target is not None:
            self.labels.set(_filled(target, self.outputs.shape[0]))

    def results(self, dataset, labelled=True):
        """(outputs, targets) of every batch of a dataset in its order, without the rows that fill up the last one."""
        for first in range(0, len(dataset), self.batch):
            inputs, labels = dataset.rows(slice(first, first + self.batch))
            n = len(inputs[0])
            target = self.targets_of(labels, n) if labelled else None
            self.feed(inputs, target)
            self.runs.compute(self.forward)
            y = self.runs.numpy(self.forward, self.outputs)
            yield y[:len(y) // self.batch * n], target, self.runs.numpy(self.forward, self.loss).item()

    def needs_batch(self, dataset):
        """Errors: ParamError when a loss function of one's own could not be evaluated on these rows."""
        if callable(self.loss_kind) and 0 < len(dataset) < self.batch:
            raise ParamError(f"fit: {len(dataset)} rows to evaluate do not fill a batch of {self.batch}, which a loss "
                             f"function needs; hold out more, or give the inputs fewer rows")

    def evaluate(self, dataset):
        """(loss, accuracy or None) over all rows; a loss function of your own is the mean over whole batches."""
        total = n_rows = right = seen = 0
        if callable(self.loss_kind):                    # it was built for `batch` rows and cannot leave some out
            self.needs_batch(dataset)
            dataset = dataset.first(len(dataset) // self.batch * self.batch)
        for y, target, batch_loss in self.results(dataset):
            loss = batch_loss if callable(self.loss_kind) else losses.on_host(self.loss_kind, y, target)
            total, n_rows = total + loss * (1 if self.loss_kind == "sum" else len(y)), n_rows + len(y)
            if self.loss_kind == "cross_entropy":
                hits, n = losses.n_correct(y, target)
                right, seen = right + hits, seen + n
        return total if self.loss_kind == "sum" else total / n_rows, right / seen if seen else None


class Training(Network):
    """A Network with gradients, their sums, and an optimiser."""

    def __init__(self, inputs, outputs, loss, target, optimizer, params, period, clip, budget=None, devices=None):
        super().__init__(inputs, outputs, loss, target)
        self.optimizer, self.period = optimizer, period
        self.params = self._params(params)
        found = self.gradients = gradients(self.loss, self.params)
        op = builders()
        with self.ctx:
            if period > 1 and loss != "sum":
                found = [op["scale"](d, 1 / period) for d in found]
            self.sums = [self._like(w, f"gradient of {w.name}") for w in self.params]
            self.states = [[self._like(w, f"moment {k + 1} of {w.name}") for k in range(optimizer.n_states)]
                           for w in self.params]
            self.settings = self.ctx.new_tensor(F32, (optimizer.n_settings,), name="settings")
            pairs = list(zip(found, self.sums, strict=True))
            self.first = Graph(self.loss, outputs, *(op["cpy"](d, g) for d, g in pairs))
            self.further = None if period == 1 else Graph(
                self.loss, outputs, *(op["add_inplace"](g, d) for d, g in pairs))
            factor = self._factor(clip) if clip is not None else None
            used = self.sums if factor is None else [op["mul"](g, factor) for g in self.sums]
            self.step_graph = Graph(*(optimizer.step(w, g, own, self.settings)
                                      for w, g, own in zip(self.params, used, self.states, strict=True)))
        beside = {}                                     # sums and moments go where their parameter lies
        for w, g, own in zip(self.params, self.sums, self.states, strict=True):
            beside.setdefault(w.buffer.buft, []).extend((g, *own))
        place_tensors(list(beside.items()))
        self.place()
        if budget is not None:
            self._keep_within(budget)
        self.runs.reserve([g for g in (self.first, self.further, self.forward, self.step_graph) if g is not None],
                          "ggml" if budget is None else "best")
        for own in self.states:
            for m in own:
                m.set_bytes(bytes(m.nbytes))
        self.replicas = None
        if devices is not None:
            fed = self.inputs if self.labels is None else (*self.inputs, self.labels)
            self.replicas = Replicas(devices, self.loss, outputs, found, fed)

    def _keep_within(self, budget):
        """Graphs that fit, with all that stays in memory beside them, into `budget` bytes.  Errors: BudgetError."""
        if self.runs.target is not self.runs.backend:
            raise NotSupported("fit: budget is kept on one backend; leave it away, or pass a backend, not a Scheduler")
        own = [*self.params, *self.sums, *(m for moments in self.states for m in moments), self.settings,
               *self.inputs, *([] if self.labels is None else [self.labels])]
        buft = self.runs.backend.default_buffer_type
        alignment = buft.alignment()
        stays = sum(-(-buft.alloc_size(t) // alignment) * alignment for t in own)
        try:
            for name in ("first", "further", "forward", "step_graph"):
                graph = getattr(self, name)
                if graph is not None:
                    setattr(self, name, rematerialize(graph, max(budget - stays, 0), buft, cut=False))
        except BudgetError as e:
            least = stays + e.minimum
            raise BudgetError(f"fit: budget of {budget} bytes: {stays} stay in memory (parameters, gradients, moments, "
                              f"a batch), and computing takes {e.minimum} at least; use {least} or more, or fewer rows "
                              f"at once", least) from None

    def _params(self, params):
        nodes, _ = visit((self.loss,))
        marked = [t for t in nodes if t.op == OP.NONE and t.flags & FLAG_PARAM]
        chosen = marked if params is None else [params] if isinstance(params, Tensor) else list(params)
        for w in chosen:
            expect(w, Tensor, "fit: params")
        if len({w.id for w in chosen}) < len(chosen):
            raise ParamError(f"fit: params names a parameter twice: {', '.join(map(describe, chosen))}")
        if not chosen:
            raise ParamError(f"fit: no parameter leads to {describe(self.outputs)}; mark leaves with gg.set_param")
        for w in chosen:
            if w.type is not F32:
                raise TypeMismatch(f"fit: the parameter {describe(w)} must be F32; a quantised or half weight stays "
                                   f"frozen: leave its mark away, or gg.cast an F32 one")
            if w.op in VIEW_OPS and w.view_src is not None:
                raise ParamError(f"fit: the parameter {describe(w)} is a view of {describe(w.base)}: mark that")
            if w.op != OP.NONE or not w.flags & FLAG_PARAM:
                raise ParamError(f"fit: {describe(w)} is no parameter; mark a leaf with gg.set_param")
            if w.buffer is None:
                raise NotAllocated(f"fit: the parameter {describe(w)} has no values; give it some, gg.from_numpy")
        return chosen

    def _factor(self, clip):
        """min(1, clip / norm of all gradients) as a node."""
        op = builders()
        if isinstance(clip, str) or not clip > 0:
            raise ParamError(f"fit: clip must be positive, got {clip!r}")
        squares = [op["sum"](op["sqr"](g)) for g in self.sums]
        total = squares[0]
        for s in squares[1:]:
            total = op["add"](total, s)
        norm = op["scale_bias"](op["sqrt"](total), 1.0, 1e-6)
        return op["clamp"](op["div"](op["fill"](norm, float(clip)), norm), 0.0, 1.0)

    def summed(self, parts):
        """Sum the gradients of the parts of a batch up, in their order.

        parts: [(inputs, target)].  Yields after each part (loss, function that reads the outputs).
        """
        if self.replicas is not None:
            yield from self._summed_of_replicas(parts)
            return
        for k, part in enumerate(parts):
            graph = self.first if k == 0 else self.further
            self.feed(*part)
            self.runs.compute(graph)
            yield self.runs.numpy(graph, self.loss).item(), lambda graph=graph: self.runs.numpy(graph, self.outputs)

    def _summed_of_replicas(self, parts):
        sums = None
        for loss, outputs, gradients_ in self.replicas.results(parts, self.feed):
            sums = added(sums, gradients_)
            yield loss, lambda outputs=outputs: outputs
        for g, value in zip(self.sums, sums, strict=True):
            g.set(value)

    def step(self, number):
        """Change the parameters by the summed gradients.  Errors: NotFinite, before they change."""
        for w, g in zip(self.params, self.sums, strict=True):
            values = g.numpy().reshape(-1)
            if not math.isfinite(np.dot(values, values)) and not np.isfinite(values).all():
                raise NotFinite(f"step {number}: the gradient of {describe(w)} is not finite; {self.culprit()}")
        self.settings.set(self.optimizer.settings(number))
        with uninterrupted():
            self.runs.compute(self.step_graph)

    def check_params(self, number):
        """Errors: NotFinite when step `number` left a parameter that is not finite."""
        for w in self.params:
            values = w.numpy().reshape(-1)
            if not math.isfinite(np.dot(values, values)) and not np.isfinite(values).all():
                raise NotFinite(f"step {number} left {describe(w)} with values that are not finite; use a smaller "
                                f"learning rate and start from the last checkpoint or new values")

    def culprit(self):
        """Where the first value that is not finite appeared, in words."""
        backend = init_backend("CPU", fuse=0)               # which knows every node's result
        for graph in (Graph(self.loss), Graph(self.loss, *self.gradients)):
            GraphAllocator(backend).alloc_graph(graph)
            plan = backend.graph_plan_create(graph)
            for i, t in enumerate(plan.nodes):
                plan.run_nodes(i, i + 1)
                if t.type is not F32 or t.op == OP.DIAG_MASK_INF:       # whose infinities are meant
                    continue
                values = t._elements(PlacedTensor(t, (), plan.where(t))._bytes_view())
                if not np.isfinite(values).all():
                    sources = ", ".join(describe(s) for s in t.src if s is not None)
                    return (f"{describe(t)} = {t.op.name}({sources}) is the first node with such a value; the "
                            f"parameters are those of the step before")
        return "the parameters are those of the step before"


def _filled(a, n):
    """a with its last row repeated up to n rows."""
    return a if len(a) == n else np.concatenate([a, np.repeat(a[-1:], n - len(a), 0)])


def _target(backend):
    if backend is None or isinstance(backend, str):
        return init_backend(backend or "CPU")
    return expect(backend, (Backend, Scheduler), "backend")


# ---------------------------------------------------------------- what users call
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
    every epoch, and on Ctrl-C, and that a later call with the same arguments goes on from, bit for bit.  callback:
    called with the History after every step; True ends the training.  backend: a backend, a name or a Scheduler
    (default: the CPU).
    devices: such as cl.devices of gg.cluster: the parts of a batch (`batch` over the rows of `inputs`) are computed
    there in turn, their gradients summed here in the order of the parts: any number of devices gives the same bits.
    budget: bytes for parameters, gradients, moments, a batch and what is computed between (scratch of kernels is not
    counted); what does not fit is computed again when it is read (gg.rematerialize), and the numbers stay the same.
    Rows that do not fill a batch are left out of the epoch; another order leaves out others.
    Errors: typed ones before anything changes; NotFinite for a loss that is not a number, naming step and node.
    Source: ggml_opt_fit.
    """
    data = as_dataset(dataset)
    optimizer = expect(AdamW() if optimizer is None else optimizer, (AdamW, SGD), "fit: optimizer")
    if seed is not None and whole(seed, "fit: seed") < 0:
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
    training = Training(inputs, outputs, loss, _target(backend), optimizer, params, period, clip, budget, devices)
    _check_data(training, train, held_out, early_stop, epochs)
    try:
        loop = Loop(training, train, held_out, seed, checkpoint, callback)
        loop.run(epochs, early_stop, progress)
    finally:
        if training.replicas is not None:
            training.replicas.free()
    return loop.history


def evaluate(inputs, outputs, dataset, loss="cross_entropy", backend=None):
    """(loss, accuracy) over all rows of a dataset; accuracy is None for losses without classes.

        gg.train.evaluate(x, logits, (X_test, Y_test))

    Arguments and errors as `fit`.  Source: ggml_opt_epoch.
    """
    network = Network(inputs, outputs, loss, _target(backend))
    network.place()
    return network.evaluate(as_dataset(dataset))


def predict(inputs, outputs, rows, backend=None):
    """The outputs for every row of an array (or of several, for several inputs), as one array.

        gg.train.predict(x, logits, X_test).argmax(-1)

    Errors as `fit`.
    """
    network = Network(inputs, outputs, "mean", _target(backend))
    network.place()
    rows = rows if isinstance(rows, Dataset) else Dataset(rows)
    found = []
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
        raise ParamError(f"fit: batch {batch!r} is no multiple of the {rows} rows of {describe(first)}")
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
    for part in (train, held_out):                      # labels that are none are found before the first step
        for first in range(0, len(part), training.batch):
            inputs, labels = part.rows(slice(first, first + training.batch))
            training.targets_of(labels, len(inputs[0]))


class Loop:
    """Epochs and steps, from where a checkpoint was left.

    partial: of an epoch that is not whole yet: its steps, the sum of their losses, rows that were right, rows.
    """

    def __init__(self, training, train, held_out, seed, path, callback):
        self.training, self.train, self.held_out, self.seed = training, train, held_out, seed
        self.path, self.callback = path, callback
        self.history, self.epoch, self.n_steps, self.partial = History(), 0, 0, checkpoints.WHOLE
        loss = training.loss_kind
        self.setup = {"seed": seed, "rows": len(train), "batch": training.batch * training.period,
                      "loss": "a function" if callable(loss) else loss}
        if path is not None and checkpoints.exists(path):
            self.n_steps, self.epoch, self.partial, self.history = checkpoints.load(
                path, training.params, training.states, self.setup)
            self.history.stopped = ""           # this call says anew when to stop
        elif path is not None:                  # an interrupted first epoch starts again from here
            self._save()

    def run(self, epochs, early_stop, progress, max_steps=math.inf):
        """On Ctrl-C, and after step `max_steps`, the checkpoint is one of an epoch that is not whole."""
        per_epoch = len(self.train) // (self.training.batch * self.training.period)
        n = min((epochs - self.epoch) * per_epoch - self.partial[0], max(max_steps - self.n_steps, 0))
        try:
            with bar("training", n, progress) as show:
                while self.epoch < epochs and self.n_steps < max_steps and not self.history.stopped:
                    if self._epoch(show, max_steps) and early_stop is not None and self._stalled(early_stop):
                        self.history.stopped = f"the held-out loss has not fallen for {early_stop} epochs"
                    if self.path is not None:
                        self._save()
        except KeyboardInterrupt:
            if self.path is not None:
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
            if self.callback is not None and as_bool(self.callback(self.history) or False, "the callback of fit"):
                self.history.stopped = "the callback said so"
                break
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
        """One step over `rows`, and what is known of it added to `partial`."""
        t, number, losses_, right, seen = self.training, self.n_steps + 1, [], 0, 0
        parts = []
        for k in range(t.period):
            inputs, labels = self.train.rows(rows[k * t.batch:(k + 1) * t.batch])
            parts.append((inputs, t.targets_of(labels, t.batch)))
        for (_, target), (loss, outputs) in zip(parts, t.summed(parts), strict=True):
            if not math.isfinite(loss):
                t.check_params(number - 1)
                raise NotFinite(f"step {number}: the loss is {loss}; {t.culprit()}")
            losses_.append(loss)
            if t.loss_kind == "cross_entropy":
                hits, n = losses.n_correct(outputs(), target)
                right, seen = right + hits, seen + n
        loss = sum(losses_) / (1 if t.loss_kind == "sum" else len(losses_))
        with uninterrupted():           # parameters and what is said of them belong together
            t.step(number)
            self.n_steps = number
            self.history.steps.append(loss)
            self.partial = tuple(a + b for a, b in zip(self.partial, (1, loss, right, seen), strict=True))

    def _stalled(self, patience):
        lost = self.history.val_loss
        return len(lost) > patience and min(lost[-patience:]) >= min(lost[:-patience])

    def _save(self):
        place = {"step": self.n_steps, "epoch": self.epoch, "partial": self.partial, "setup": self.setup}
        checkpoints.save(self.path, self.training.params, self.training.states, place, self.history)
