"""Training: the four graphs of a network with gradients and an optimiser.

    forward      outputs and loss                             evaluation
    first        loss, classes, and gradients copied to where they are summed
    further      the same, but gradients are added there      batches of the device that make up one batch of the step
    step         optimiser nodes over the summed gradients

Gradient sums and moments are leaves in one buffer, on the device of their parameters.
"""
import contextlib
import math
import numbers
import signal
from collections.abc import Iterable

import numpy as np

from ggjit.api.registry import init_backend
from ggjit.api.rematerialize import BudgetError, within
from ggjit.core.arguments import expect
from ggjit.core.placing import place_tensors
from ggjit.graphs.allocator import GraphAllocator
from ggjit.graphs.backward import gradients
from ggjit.graphs.graph import Graph
from ggjit.graphs.placed import PlacedTensor
from ggjit.graphs.visit import visit
from ggjit.ops.core.errors import GgjitError, NotAllocated, NotSupported, ParamError, TypeMismatch
from ggjit.ops.core.interrupts import KeepInterrupts
from ggjit.ops.core.record import FLAG_PARAM, OP, VIEW_OPS
from ggjit.ops.core.shape import describe, is_contiguous
from ggjit.ops.core.spec import builders
from ggjit.ops.core.types import F32
from ggjit.tensors.tensor import Tensor
from ggjit.train.evaluator import Evaluator
from ggjit.train.optimizers import SGD, AdamW
from ggjit.train.parallel import Replicas, added


class NotFinite(GgjitError, ArithmeticError):
    """A loss or a gradient that is infinite or not a number; the parameters are those of the step before."""


@contextlib.contextmanager
def uninterrupted():
    """Ctrl-C inside the block takes effect at its end."""
    kept = KeepInterrupts()
    kept.start()
    try:
        yield
    finally:
        kept.stop()
    if kept.interrupts:
        signal.raise_signal(signal.SIGINT)


class Training(Evaluator):
    """An Evaluator with gradients, their sums, and an optimiser.

    `.classes`: numbers of the largest outputs, where the loss is of classes; else the loss.
    evaluates: whether there are rows to evaluate, which needs all outputs at once.  quick: a budget that is too small
    is refused sooner, with a number of bytes that is enough, not the least.
    """

    def __init__(self, inputs, outputs, loss, target, optimizer, params, period, clip, budget=None, devices=None,
                 evaluates=True, quick=False):
        super().__init__(inputs, outputs, loss, target)
        self.evaluates = evaluates
        self.optimizer, self.period = expect(optimizer, (AdamW, SGD), "fit: optimizer"), period
        self.params = self._params(params)
        found = self.gradients = gradients(self.loss, self.params)
        op = builders()
        with self.ctx:
            self.classes = self.loss
            if loss == "cross_entropy":
                rows = outputs if is_contiguous(outputs) else op["cont"](outputs)
                self.classes = op["argmax"](op["reshape_2d"](rows, outputs.ne[0], math.prod(outputs.ne[1:])))
            if period > 1 and loss != "sum":
                found = [op["scale"](d, 1 / period) for d in found]
            self.sums = [self._like(w, f"gradient of {w.name}") for w in self.params]
            self.states = [[self._like(w, f"moment {k + 1} of {w.name}") for k in range(optimizer.n_states)]
                           for w in self.params]
            self.settings = self.ctx.new_tensor(F32, (optimizer.n_settings,), name="settings")
            pairs = list(zip(found, self.sums, strict=True))
            self.first = Graph(self.loss, self.classes, *(op["cpy"](d, g) for d, g in pairs))
            self.further = None if period == 1 else Graph(
                self.loss, self.classes, *(op["add_inplace"](g, d) for d, g in pairs))
            factor = self._factor(clip) if clip is not None else None
            used = self.sums if factor is None else [op["mul"](g, factor) for g in self.sums]
            self.step_graph = Graph(*(optimizer.step(w, g, own, self.settings)
                                      for w, g, own in zip(self.params, used, self.states, strict=True)))
        beside = {}                                     # sums and moments lie on the device of their parameter
        for w, g, own in zip(self.params, self.sums, self.states, strict=True):
            beside.setdefault(w.buffer.buft, []).extend((g, *own))
        place_tensors(list(beside.items()))
        self.place()
        if budget is not None:
            self._keep_within(budget, quick)
        self.runs.reserve([graph for _, graph in self._graphs()], "ggml" if budget is None else "best")
        for own in self.states:
            for m in own:
                m.set_bytes(bytes(m.nbytes))
        self.replicas = None
        if devices is not None:
            fed = self.inputs if self.labels is None else (*self.inputs, self.labels)
            self.replicas = Replicas(devices, self.loss, self.classes, found, fed)

    def _graphs(self):
        """(name, graph) of those that will run."""
        names = ("first", "further", "step_graph") + ("forward",) * self.evaluates
        return [(name, getattr(self, name)) for name in names if getattr(self, name) is not None]

    @property
    def kept_nbytes(self):
        """Bytes that stay in memory beside what is computed."""
        own = [*self.params, *self.sums, *(m for moments in self.states for m in moments), self.settings,
               *self.inputs, *([] if self.labels is None else [self.labels])]
        buft = self.runs.backend.default_buffer_type
        alignment = buft.alignment()
        return sum(-(-buft.alloc_size(t) // alignment) * alignment for t in own)

    def _keep_within(self, budget, quick):
        """Graphs that fit, with all that stays in memory beside them, into `budget` bytes.  Errors: BudgetError."""
        if self.runs.target is not self.runs.backend:
            raise NotSupported("fit: budget is kept on one backend; leave it away, or pass a backend, not a Scheduler")
        stays, least, buft = self.kept_nbytes, 0, self.runs.backend.default_buffer_type
        for name, graph in self._graphs():
            # what one graph needs at least the others may have, too: whether they fit into less is not asked
            new, peak = within(graph, max(budget - stays, least), buft, quick=quick)
            if new is None:
                least = max(least, peak)
            else:
                setattr(self, name, new)
        if least:
            raise BudgetError(f"fit: budget of {budget} bytes: {stays} stay in memory (parameters, gradients, moments, "
                              f"a batch), and computing takes {least} at least; use {stays + least} or more, or fewer "
                              f"rows at once", stays + least)

    def _params(self, params):
        nodes, _ = visit((self.loss,))
        marked = [t for t in nodes if t.op == OP.NONE and t.flags & FLAG_PARAM]
        if isinstance(params, Tensor):
            params = [params]
        elif not isinstance(params, Iterable | None):
            raise TypeMismatch(f"fit: params takes a list of tensors, got {type(params).__name__}")
        chosen = marked if params is None else list(params)
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
                raise ParamError(f"fit: {describe(w)} is not a parameter; mark a leaf with gg.set_param")
            if w.buffer is None:
                raise NotAllocated(f"fit: the parameter {describe(w)} has no values; give it some, gg.from_numpy")
        return chosen

    def _factor(self, clip):
        """min(1, clip / norm of all gradients) as a node."""
        op = builders()
        if not isinstance(clip, numbers.Real) or not clip > 0:
            raise ParamError(f"fit: clip must be positive, got {clip!r}")
        squares = [op["sum"](op["sqr"](g)) for g in self.sums]
        total = squares[0]
        for s in squares[1:]:
            total = op["add"](total, s)
        norm = op["scale_bias"](op["sqrt"](total), 1.0, 1e-6)
        return op["clamp"](op["div"](op["fill"](norm, float(clip)), norm), 0.0, 1.0)

    def summed(self, parts):
        """Sum the gradients of the parts of a batch up, in their order.

        parts: [(inputs, target)].  Yields after each part (loss, function that reads the classes).
        """
        if self.replicas is not None:
            yield from self._summed_of_replicas(parts)
            return
        for k, part in enumerate(parts):
            graph = self.first if k == 0 else self.further
            self.feed(*part)
            self.runs.compute(graph)
            yield self.runs.numpy(graph, self.loss).item(), lambda graph=graph: self.runs.numpy(graph, self.classes)

    def _summed_of_replicas(self, parts):
        sums = None
        for loss, classes, gradients_ in self.replicas.results(parts, self.feed):
            sums = added(sums, gradients_)
            yield loss, lambda classes=classes: classes
        for g, value in zip(self.sums, sums, strict=True):
            g.set(value)

    def step(self, number):
        """Change the parameters by the summed gradients.  Errors: NotFinite, before they change."""
        for w, g in zip(self.params, self.sums, strict=True):
            if not _is_finite(g):
                raise NotFinite(f"step {number}: the gradient of {describe(w)} is not finite; {self.culprit()}")
        self.settings.set(self.optimizer.settings(number))
        with uninterrupted():
            self.runs.compute(self.step_graph)

    def check_params(self, number):
        """Errors: NotFinite when step `number` left a parameter that is not finite."""
        for w in self.params:
            if not _is_finite(w):
                raise NotFinite(f"step {number} left {describe(w)} with values that are not finite; use a smaller "
                                f"learning rate and start from the last checkpoint or new values" if number else
                                f"{describe(w)} holds values that are not finite before the first step; set it again")

    def culprit(self):
        """Text that says where the first value that is not finite appeared."""
        backend = init_backend("CPU", fuse=0)               # without fusion every node's result exists
        for graph in (Graph(self.loss), Graph(self.loss, *self.gradients)):
            GraphAllocator(backend).alloc_graph(graph)
            plan = backend.graph_plan_create(graph)
            for i, t in enumerate(plan.nodes):
                plan.run_nodes(i, i + 1)
                if t.type is not F32 or t.op == OP.DIAG_MASK_INF:       # DIAG_MASK_INF writes infinities on purpose
                    continue
                values = t._elements(PlacedTensor(t, (), plan.where(t))._bytes_view())
                if not np.isfinite(values).all():
                    sources = ", ".join(describe(s) for s in t.src if s is not None)
                    return (f"{describe(t)} = {t.op.name}({sources}) is the first node with such a value; the "
                            f"parameters are those of the step before")
        return "the parameters are those of the step before"


def _is_finite(t):
    """Are all values of a tensor finite?  If their squares' sum is, they are: one pass."""
    values = t.numpy().reshape(-1)
    with np.errstate(all="ignore"):
        return math.isfinite(np.dot(values, values)) or bool(np.isfinite(values).all())
