"""Gradients: the graph of a loss walked backward, each op's own rule building ordinary nodes.

    loss = f(h(w))          dloss = 1  ->  dh = f's gradient of dloss  ->  dw = h's gradient of dh

A tensor that several nodes read gets the sum of their gradients.  Gradients are F32, contiguous, of the shape of their
tensor, whatever its type; only nodes that lead from what is asked for to the loss are visited.  The rules are beside
the ops (`gradient` of a Spec, ops/core/spec.py) and get a `Rules` for the nodes they build.

Nodes written in place are handled as long as nothing that was overwritten is needed: a gradient that would read it is
refused, naming the node that wrote.
"""
import math

from ggjit.core.arguments import expect
from ggjit.graphs.graph import Graph
from ggjit.graphs.visit import visit
from ggjit.ops.core.errors import NotSupported, ParamError, ShapeError, TypeMismatch
from ggjit.ops.core.host_memory import oom_guard
from ggjit.ops.core.record import FLAG_LOSS, FLAG_PARAM, OP, VIEW_OPS
from ggjit.ops.core.shape import describe, is_contiguous, rows_contiguous, same_shape
from ggjit.ops.core.spec import all_specs
from ggjit.ops.core.types import BF16, F16, F32, F64
from ggjit.tensors.arrays import from_numpy
from ggjit.tensors.repeats import builders
from ggjit.tensors.tensor import Tensor


class Rules:
    """The argument `g` of gradient rules: every op builder by name, and helpers.

        g.mul(dy, b)        the builder `mul`
    """

    def __init__(self, ctx):
        self.ctx, self.sums, self._kept, self._builders = ctx, {}, {}, builders()

    def __getattr__(self, name):
        try:
            return self._builders[name]
        except KeyError:
            raise AttributeError(f"no op builder is called {name}") from None

    # ------------------------------------------------------------ tensors
    def f32(self, x):
        """x as F32."""
        return x if x.type is F32 else self.cast(x, F32)

    def rows(self, x):
        """x, or a contiguous copy where the elements of a row do not lie side by side."""
        return x if rows_contiguous(x) else self.cont(x)

    def dense(self, x):
        """x contiguous."""
        return x if is_contiguous(x) else self.cont(x)

    def zeros(self, x):
        """F32 zeros of x's shape."""
        return self.fill(self.f32(x), 0.0)

    def empty(self, ne):
        """A tensor without values, for ops that read only its shape."""
        return self.ctx.new_tensor(F32, ne)

    def constant(self, array):
        """A leaf that holds `array` (NumPy order)."""
        return from_numpy(self.ctx, array)

    # ------------------------------------------------------------ sums
    def fit(self, d, like):
        """d [k0 n0, ...] with its tiles summed to the shape of `like`, a tensor or sizes."""
        ne = tuple(getattr(like, "ne", like))
        if d.ne == ne:
            return d
        if math.prod(ne) == 1:
            return self.reshape_4d(self.sum(d), *ne)
        k = next(i for i in range(4) if i == 3 or ne[i] != 1)       # dimensions 0 .. k - 1 are summed up
        if k and math.prod(d.ne[:k]) > 1:
            d = self.sum_rows(self.reshape_4d(d, math.prod(d.ne[:k]), *(1,) * (k - 1), *d.ne[k:]))
            return d if d.ne == ne else self.fit(d, like)
        return self.repeat_back(d, like if hasattr(like, "ne") else self.empty(ne))

    def sum_groups(self, d, like):
        """d with neighbouring matrices summed to as many as `like` has in dimensions 2 and 3 (mul_mat's repeats)."""
        n0, n1, n2, n3 = d.ne
        m2, m3 = like.ne[2:]
        if (n2, n3) == (m2, m3):
            return d
        if n2 != m2:
            d = self.repeat_back(self.reshape_3d(d, n0 * n1, n2 // m2, m2 * n3), self.empty((n0 * n1, 1, m2 * n3)))
        if n3 != m3:
            d = self.repeat_back(self.reshape_3d(d, n0 * n1 * m2, n3 // m3, m3), self.empty((n0 * n1 * m2, 1, m3)))
        return self.reshape_4d(d, n0, n1, m2, m3)

    def scatter(self, d, index, ne):
        """Zeros of sizes ne with each element of d added at its flat `index` (an array in d's order; -1: nowhere)."""
        n = math.prod(ne)
        ids = index.reshape(-1).copy()
        ids[ids < 0] = n
        spread = self.get_rows_back(self.reshape_2d(d, 1, ids.size), self.constant(ids.astype("i4")),
                                    self.empty((1, n + 1)))
        return self.reshape_4d(self.view_1d(spread, n, 0), *ne)

    # ------------------------------------------------------------ bookkeeping
    def take(self, x):
        """The gradient of x summed so far, contiguous, or None; what the rule returns takes its place."""
        total = self.sums.pop(x.id, None)
        return None if total is None else self.dense(total)

    def once(self, t, name, make):
        """make(), called once for node t: nodes that the gradients of several sources share."""
        if (t.id, name) not in self._kept:
            self._kept[t.id, name] = make()
        return self._kept[t.id, name]

    def missing(self, what):
        """An entry of a rule for a source whose gradient is not implemented: it raises NotSupported."""
        def refuse():
            raise NotSupported(f"there is no gradient {what}")
        return refuse

    def add_to(self, x, d):
        """Add d to the gradient of x."""
        total = self.sums.get(x.id)
        self.sums[x.id] = d if total is None else self.add(total, d)


# ---------------------------------------------------------------- what users call
def grad(loss, wanted):
    """The gradients of `loss` with respect to the tensors `wanted`: F32 tensors of their shapes, to be computed.

        dw, db = gg.grad(loss, [w, b])
        gg.compute(dw)                      # or gg.Graph(loss, dw, db)

    loss: one F32 element.  wanted: a list, or one tensor (then one is returned); leaves or results of float types.
    They are nodes of the world the loss is in: they can be computed, differentiated and planned like all others.
    Errors: ShapeError (a loss that is no scalar), TypeMismatch (not a float type), ParamError (a view, or a tensor the
    loss does not depend on), NotSupported (an op without a gradient on the way, or memory that was overwritten).
    Source: ggml_build_backward_expand.
    """
    with oom_guard("grad", loss):
        one = isinstance(wanted, Tensor)
        found = gradients(loss, (wanted,) if one else wanted)
        return found[0] if one else found


def set_loss(t):
    """Mark a scalar result as the loss that build_backward_expand starts from.  Returns it.

        loss = gg.set_loss(gg.sum(gg.sqr(w)))

    Errors: ShapeError, TypeMismatch unless it is one F32 element.  Source: ggml_set_loss.
    """
    _check_loss(t)
    return t._mark(FLAG_LOSS)


class BackwardGraph(Graph):
    """A graph and the gradients of its parameters: `.gradients` and `.accumulators`, {tensor id: tensor}."""


def build_backward_expand(ctx, graph, grad_accs=None):
    """A graph that computes `graph` and the gradients of all its parameters; graph_get_grad(it, w) is that of w.

        backward = gg.build_backward_expand(ctx, gg.Graph(gg.set_loss(gg.sum(gg.sqr(gg.set_param(w))))))
        gg.compute(gg.graph_get_grad(backward, w))

    ctx: where the nodes go.  The parameters are the leaves marked by set_param, the losses the nodes marked by
    set_loss (several are added up).  grad_accs: None, or {parameter: F32 tensor of its shape}: gradients are added to
    those at every compute, until graph_reset.  `graph` itself stays as it is (ggml adds to it).
    Errors: ParamError (no parameter, no loss, or one that the loss does not depend on), and those of `grad`.
    Source: ggml_build_backward_expand.
    """
    accumulators = dict(grad_accs or {})
    wanted = [t for t in graph.nodes if t.op == OP.NONE and t.flags & FLAG_PARAM]
    losses = [t for t in graph.nodes if t.flags & FLAG_LOSS]
    if not wanted or not losses:
        raise ParamError(f"build_backward_expand: {graph!r} has no " + (
            "parameter; mark leaves with gg.set_param" if not wanted else "loss; mark a scalar with gg.set_loss"))
    _check_accumulators(accumulators, wanted)
    with ctx:
        loss = losses[0]
        for more in losses[1:]:
            loss = builders()["add"](loss, more)
        found = {w.id: d for w, d in zip(wanted, gradients(loss, wanted, visit((*graph.outputs, loss))), strict=True)}
        collected = {w.id: acc for w, acc in accumulators.items()}
        for i, acc in collected.items():
            found[i] = builders()["add_inplace"](acc, found[i])
    backward = BackwardGraph(*graph.outputs, *found.values())
    backward.gradients, backward.accumulators = found, collected
    return backward


def _check_accumulators(accumulators, wanted):
    """Check that each is F32, of a parameter's shape, and has memory of its own."""
    used = {}                                           # {base id: [(tensor, parameter that needs its memory)]}
    for w in wanted:
        used.setdefault(w.base.id, []).append((w, w))
    for w, acc in accumulators.items():
        expect(w, Tensor, "build_backward_expand: a key of grad_accs")
        expect(acc, Tensor, "build_backward_expand: a value of grad_accs")
        if acc.type is not F32 or not same_shape(w, acc) or w.id not in {t.id for t in wanted}:
            raise ShapeError(f"build_backward_expand: {describe(acc)} cannot collect the gradient of {describe(w)}; it "
                             f"must be F32, of the shape of a parameter of the graph")
        for t, owner in used.setdefault(acc.base.id, []):
            if acc.view_offs < t.view_offs + t.nbytes and t.view_offs < acc.view_offs + acc.nbytes:
                raise ParamError(f"build_backward_expand: {describe(acc)} cannot collect the gradient of "
                                 f"{describe(w)}: its memory is in use for {describe(owner)}; give each parameter "
                                 f"a tensor of its own")
        used[acc.base.id].append((acc, w))


def graph_get_grad(graph, t):
    """The gradient of t in a graph made by `build_backward_expand`, or None.

        gg.graph_get_grad(backward, w)

    Source: ggml_graph_get_grad.
    """
    return getattr(graph, "gradients", {}).get(t.id)


def graph_get_grad_acc(graph, t):
    """The tensor in which `build_backward_expand` adds up the gradient of t, or None.

        gg.graph_get_grad_acc(backward, w)

    Source: ggml_graph_get_grad_acc.
    """
    return getattr(graph, "accumulators", {}).get(t.id)


def graph_reset(graph):
    """Zeros in the gradient accumulators and in the moments of opt_step_adamw nodes.

        gg.graph_reset(backward)

    Errors: NotAllocated.  Source: ggml_graph_reset.
    """
    moments = [m for t in graph.nodes if t.op == OP.OPT_STEP_ADAMW for m in t.src[2:4]]
    for t in (*getattr(graph, "accumulators", {}).values(), *moments):
        t.set_bytes(bytes(t.nbytes))


# ---------------------------------------------------------------- the walk
def gradients(loss, wanted, order=None):
    """The list of gradients; order: (nodes, leafs) of the graph that is differentiated, default: what leads to it."""
    _check_loss(loss)
    wanted = _checked(wanted)
    nodes, leafs = order or visit((loss,))
    reached = _reached(nodes, leafs, wanted)
    upstream = {t.id for tensors in visit((loss,)) for t in tensors}
    missing = [describe(w) for w in wanted if w.id not in upstream]
    if missing:
        raise ParamError(f"grad: {describe(loss)} does not depend on {', '.join(missing)}; leave them out, or build "
                         f"the loss from them")
    writers = _Writers(nodes, reached)
    rules = Rules(loss.ctx._target())
    with rules.ctx:
        rules.sums[loss.id] = rules.fill(loss, 1.0)
        for t in reversed(nodes):
            if t.id in rules.sums and t.id in reached:
                _walk_back(rules, t, reached)
        found = [_shaped(rules, rules.sums[w.id], w) if w.id in rules.sums else rules.zeros(w) for w in wanted]
        for w, d in zip(wanted, found, strict=True):
            if not d.name and w.name:
                d.name = f"grad of {w.name}"
    writers.check(found)
    return found


def _shaped(rules, d, w):
    """The gradient of w contiguous, with as many axes."""
    d = rules.dense(d)
    return d if d.ndim == w.ndim else rules.reshape(d, w)


def _check_loss(loss):
    if not isinstance(loss, Tensor):
        raise TypeMismatch(f"the loss is a tensor, got {type(loss).__name__}")
    loss._check()
    if math.prod(loss.ne) != 1:
        raise ShapeError(f"the loss must be one element, got {describe(loss)}; take gg.sum or a mean of it")
    if loss.type is not F32:
        raise TypeMismatch(f"the loss must be F32, got {describe(loss)}; gg.cast it")


def _checked(wanted):
    if not hasattr(wanted, "__iter__"):
        raise TypeMismatch(f"grad: a list of tensors or one tensor, got {type(wanted).__name__}")
    wanted = list(wanted)
    if not wanted:
        raise ParamError("grad: no tensor to differentiate with respect to")
    for w in wanted:
        if not isinstance(w, Tensor):
            raise TypeMismatch(f"grad: a list of tensors, got {type(w).__name__} in it")
        w._check()
        if w.type not in (F32, F16, BF16):
            raise TypeMismatch(f"grad: {describe(w)} is not of a float type; a quantised weight stays as it is: train "
                               f"an F32 tensor beside it, or gg.cast it")
        if w.op in VIEW_OPS and w.view_src is not None:
            raise ParamError(f"grad: {describe(w)} is a view of {describe(w.base)}: ask for the gradient of that")
    return wanted


def _floats(t):
    return t.type.quantized or t.type in (F32, F16, BF16, F64)


def _reached(nodes, leafs, wanted):
    """Ids of the tensors that depend on a tensor whose gradient is wanted."""
    reached = {w.id for w in wanted}
    for t in nodes:
        if _floats(t) and any(s is not None and s.id in reached for s in t.src):
            reached.add(t.id)
    return reached


def _walk_back(rules, t, reached):
    """Hand the gradient of t on to its sources."""
    asked = [i for i, s in enumerate(t.src) if s is not None and s.id in reached]
    if not asked:
        return
    spec = all_specs().get(t.op)
    if spec is None or spec.gradient is None:
        raise NotSupported(f"grad: {describe(t)} = {t.op.name} has no gradient; keep it out of what is trained, or ask "
                           f"for gradients behind it only")
    dy = rules.sums[t.id] = rules.dense(rules.sums[t.id])
    try:
        of_sources = spec.gradient(rules, t, dy)
        for i in asked:
            if of_sources[i] is not None:
                rules.add_to(t.src[i], of_sources[i]())
    except NotSupported as e:
        raise NotSupported(f"grad: {describe(t)} = {t.op.name}: {e}") from None


class _Writers:
    """Nodes that write into memory of other tensors, to check that no later node reads what they overwrote."""

    def __init__(self, nodes, reached):
        self.at = {t.id: i for i, t in enumerate(nodes)}
        self.of = {}
        for t in nodes:
            if t.view_src is not None and t.op not in VIEW_OPS:
                self.of.setdefault(t.base.id, []).append(t)
        if self.of:
            for t in nodes:
                self._check_forward(t, reached)

    def _check_forward(self, t, reached):
        """A node that reads what a trained node wrote must read it through that node's result."""
        for s in t.src:
            if s is None or s.base.id not in self.of:
                continue
            before = [w for w in self.of[s.base.id] if self.at[w.id] < self.at[t.id] and w.id in reached]
            root = s
            while root.op in VIEW_OPS and root.src:
                root = root.src[0]
            if before and self._time(root) < self.at[before[-1].id]:
                raise NotSupported(f"grad: {describe(t)} = {t.op.name} reads {describe(s)}, whose memory "
                                   f"{describe(before[-1])} = {before[-1].op.name} has written: its gradient would be "
                                   f"lost; read the result of {before[-1].op.name} instead")

    def _time(self, s):
        """When s was computed: leaves before all nodes, new nodes after all."""
        return self.at.get(s.id, -1 if s.op == OP.NONE else len(self.at))

    def check(self, found):
        """Check that no new node reads a tensor whose memory was written after it was computed."""
        if not self.of:
            return
        seen, todo = set(), list(found)
        while todo:
            t = todo.pop()
            if t.id in seen or t.id in self.at:
                continue
            seen.add(t.id)
            for s in t.src:
                if s is None or t.op == OP.FILL:            # FILL reads only the shape of its source
                    continue
                last = self.of.get(s.base.id)
                if last and self._time(s) < self.at[last[-1].id]:
                    raise NotSupported(f"grad: the gradient needs {describe(s)}, which {describe(last[-1])} = "
                                       f"{last[-1].op.name} has overwritten; use the op that is not in place")
                todo.append(s)
