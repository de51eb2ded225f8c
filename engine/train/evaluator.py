"""Evaluation of a network: inputs, outputs and loss as graphs that are planned once and replayed."""
import numpy as np

from ggjit.api.remat_graph import Rematerialized
from ggjit.graphs.allocator import GraphAllocator
from ggjit.graphs.graph import Graph
from ggjit.graphs.visit import visit
from ggjit.ops.core.errors import NotAllocated, ParamError, ShapeError, TypeMismatch
from ggjit.ops.core.record import OP, VIEW_OPS
from ggjit.ops.core.shape import describe
from ggjit.ops.core.types import F32
from ggjit.sched.scheduler import Scheduler
from ggjit.tensors.context import Context, alloc_ctx_tensors
from ggjit.tensors.tensor import Tensor, set_input
from ggjit.train import losses
from ggjit.train.history import Evaluation


class PlannedGraphs:
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
        """Make the graph's plan; a second call does nothing."""
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


class Evaluator:
    """Inputs, outputs and loss of a network, placed and planned to be evaluated."""

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
        self.runs = PlannedGraphs(target)
        self.ctx = Context()
        with self.ctx:
            self.labels = set_input(self._like(outputs, "labels")) if losses.needs_labels(loss) else None
            self.loss = losses.build(loss, outputs, self.labels)
        self._check_writes()
        self.forward = Graph(self.loss, outputs)

    def _check_inputs(self):
        if len({t.id for t in self.inputs}) < len(self.inputs):
            raise ParamError(f"fit: inputs names a tensor twice: {', '.join(map(describe, self.inputs))}")
        leafs = {t.id for tensors in visit((self.outputs,)) for t in tensors if t.op == OP.NONE}
        for t in self.inputs:
            if t.op != OP.NONE or t.id not in leafs:
                raise ParamError(f"fit: {describe(t)} is not an input of {describe(self.outputs)}: inputs are leaves "
                                 f"that the outputs are computed from")
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
        """Give memory to the leaves that have none and that this class fills: inputs and labels.  Errors: NotAllocated
        for other leaves."""
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
        """The values of the label tensor for the labels of `rows` rows."""
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
        """Errors: ParamError when the user's loss function could not be evaluated on these rows."""
        if callable(self.loss_kind) and 0 < len(dataset) < self.batch:
            raise ParamError(f"fit: {len(dataset)} rows to evaluate do not fill a batch of {self.batch}, which a loss "
                             f"function needs; hold out more, or give the inputs fewer rows")

    def evaluate(self, dataset):
        """The Evaluation of all rows; a loss function of your own is the mean over whole batches."""
        total = n_rows = right = 0
        batch_losses, predictions = [], []
        # a user's loss is built for `batch` rows and cannot leave some out
        if callable(self.loss_kind):
            self.needs_batch(dataset)
            dataset = dataset.first(len(dataset) // self.batch * self.batch)
        for y, target, batch_loss in self.results(dataset):
            loss = batch_loss if callable(self.loss_kind) else losses.on_host(self.loss_kind, y, target)
            total, n_rows = total + loss * (1 if self.loss_kind == "sum" else len(y)), n_rows + len(y)
            batch_losses.append(loss)
            if self.loss_kind == "cross_entropy":
                classes = losses.classes_of(y)
                right += losses.n_correct(classes, target)[0]
                predictions.append(classes.reshape(-1))
        return Evaluation(total, n_rows, batch_losses, right, np.concatenate(predictions) if predictions else None,
                          self.loss_kind == "sum")


def _filled(a, n):
    """a with its last row repeated up to n rows."""
    return a if len(a) == n else np.concatenate([a, np.repeat(a[-1:], n - len(a), 0)])
