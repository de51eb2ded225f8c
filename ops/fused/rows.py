"""Runs of row ops in one kernel, row by row, so that the next op finds its input in the first-level cache.

    add -> rms_norm -> mul            for each row r:   x    = a[r] + b[r]         x: a row of scratch memory, or x[r]
                                                        t    = rms_norm(x)            if others read the sum
                                                        d[r] = t * w               t: a row of scratch memory

Every stage does to a row what the kernel of its op does, with the values in memory in between, so the bytes are the
same.  What is saved is a pass through the second-level cache, a dispatch and a barrier for each node but one.  The
result is written last of all, so it may lie where any operand of its shape lies.
"""
import functools
import itertools
from typing import NamedTuple

from ggjit.ops.core.fusion_pattern import FusedKernel, Fusion
from ggjit.ops.core.record import OK, OP, UNARY, V_WORDS, WORD
from ggjit.ops.core.shape import rows_contiguous, same_shape
from ggjit.ops.core.spec import Kernel
from ggjit.ops.core.types import F32
from ggjit.ops.elementwise.binary import VECTOR
from ggjit.ops.elementwise.unary import FUNCTIONS
from ggjit.ops.native.jit import inline
from ggjit.ops.native.node import DST, SRC0, addr, n_rows, ne, param_f32, row_addr, row_index, work
from ggjit.ops.native.row_loops import LIGHT, over_chunks
from ggjit.ops.native.simd import W, ldf, ldf_part, splat, stf, stf_part
from ggjit.ops.reductions.norm import STRETCH
from ggjit.ops.types.shared.rows import pair_row

BINARY, NORMS = (OP.ADD, OP.MUL), (OP.NORM, OP.RMS_NORM)
VIEW_NBYTES = WORD * V_WORDS


# ---------------------------------------------------------------- stages: jitted f(d, x, y, n, eps) on one row
@functools.cache
def _binary(op):
    pair = pair_row(VECTOR[op])

    @inline
    def row(d, x, y, n, eps):
        pair(d, x, y, n)
    return row


@functools.cache
def _unary(name):
    f = FUNCTIONS[name].vector

    @inline
    def row(d, x, y, n, eps):
        p = splat(eps)                          # functions with parameters are not fused here
        i = 0
        while i + W <= n:
            stf(d + 4 * i, f(ldf(x + 4 * i), p, p, p, p, p))
            i += W
        if i < n:
            stf_part(d + 4 * i, f(ldf_part(x + 4 * i, n - i), p, p, p, p, p), n - i)
    return row


@functools.cache
def _norm(op):
    stretch = STRETCH[op]

    @inline
    def row(d, x, y, n, eps):
        stretch(d, x, n, eps)
    return row


def _stage(t):
    """(jitted row function, label) of a node, or None."""
    op = OP(t.op)
    if op in BINARY:
        return _binary(op), op.name.lower()
    if op in NORMS:
        return _norm(op), op.name.lower()
    name = UNARY(int(t.op_params[0])).name.lower()
    return None if name == "xielu" else (_unary(name), name)


# ---------------------------------------------------------------- what fits
def _operands(nodes):
    """The second operand of each node, None where it has one only; None if a node reads the one before it twice."""
    out = []
    for before, t in zip((None, *nodes), nodes, strict=False):
        x, *rest = t.src
        if before is not None and x.id != before.id:
            x, rest = rest[0], [x]                  # a + b = b + a, a b = b a: to the bit
        if before is not None and rest and rest[0].id == before.id:
            return None                             # a + a
        out.append(rest[0] if rest else None)
    return out


def _fits(t, shape):
    return t.type is F32 and rows_contiguous(t) and same_shape(t, shape)


def _is_row(t, n):
    """One row that serves every row of the other operand."""
    return t.type is F32 and rows_contiguous(t) and t.ne == (n, 1, 1, 1)


class RowRun(NamedTuple):
    """A run of row ops: the tensors it reads, the steps of `chain`, a name for them, and the norm's eps as its bits."""
    reads: tuple
    steps: list
    label: str
    eps: int


def run_of(nodes, stored=()):
    """The RowRun of nodes that read each other, or None."""
    first, d = nodes[0].src[0], nodes[-1]
    operands = _operands(nodes)
    if operands is None or not all(_fits(t, d) for t in (first, *nodes)):
        return None
    if not all(y is None or _fits(y, d) or _is_row(y, d.ne[0]) for y in operands):
        return None
    stages = [_stage(t) for t in nodes]
    if not all(stages):
        return None
    reads = (first, *(y for y in operands if y is not None))
    steps, sources, own = [], itertools.count(1), itertools.count(len(reads))
    for t, y, (function, label) in zip(nodes, operands, stages, strict=True):
        steps.append((function, label, -1 if y is None else next(sources), next(own) if t in stored else -1))
    label = "-".join(label + "-stored" * (place >= 0) for _, label, _, place in steps)
    eps = next((t.op_params[0] for t in nodes if OP(t.op) in NORMS), 0)
    return RowRun(reads, steps, label, int(eps))


def fused(nodes, stored, kernels, n_threads):
    """FusedKernel of a run of row ops over F32 tensors of one shape; second operands have that shape or are one row."""
    run, d = run_of(nodes, stored), nodes[-1]
    if run is None:
        return None
    kernel = Kernel(f"rows-{run.label}", lambda: _make(run.steps), sum(k.cost for k in kernels),
                    n_threads * row_nbytes.py_func(d.ne[0]), alone=d.ne[1:] == (1, 1, 1))
    return FusedKernel(kernel, run.reads, (run.eps,), tuple(x for x in run.reads if same_shape(x, d)))


# ---------------------------------------------------------------- kernel
def chain(steps):
    """jitted run(node, d, x, i1, i2, i3, n, eps, scratch): the steps on the row at x, the last into d.

    A step: (jitted row function, label, number of the source that is its second operand, of its stored result; -1).
    """
    (function, _, source, place), rest = steps[0], steps[1:]
    y_view, own_view = SRC0 + VIEW_NBYTES * source, SRC0 + VIEW_NBYTES * place
    has_operand, is_stored, is_last = source >= 0, place >= 0, not rest
    after = chain(rest) if rest else None

    @inline
    def run(node, d, x, i1, i2, i3, n, eps, scratch):
        y = 0
        if has_operand:
            view = node + y_view
            y = addr(view) if n_rows(view) == 1 else row_addr(view, i1, i2, i3)
        if is_last:
            function(d, x, y, n, eps)
        else:
            out = row_addr(node + own_view, i1, i2, i3) if is_stored else scratch
            function(out, x, y, n, eps)
            after(node, d, out, i1, i2, i3, n, eps, scratch)
    return run


@inline
def row_nbytes(n):
    """A thread's row of n floats, whole cache lines."""
    return (4 * n + 63) // 64 * 64


def _make(steps):
    run = chain(steps)

    @inline
    def rows(node, ith, start, stop):
        x, d = node + SRC0, node + DST
        n, eps = ne(d, 0), param_f32(node, 0)
        scratch = work(node) + ith * row_nbytes(n)
        for r in range(start, stop):
            i1, i2, i3 = row_index(d, r)
            run(node, row_addr(d, i1, i2, i3), row_addr(x, i1, i2, i3), i1, i2, i3, n, eps, scratch)
        return OK
    return over_chunks(rows, chunking=LIGHT)


FUSIONS = tuple(Fusion(ops, fused) for ops in (
    (OP.ADD, OP.ADD, OP.NORM, OP.MUL, OP.ADD),      # bias, residual, norm with weight and bias (bert)
    (OP.ADD, OP.NORM, OP.MUL, OP.ADD),
    (OP.NORM, OP.MUL, OP.ADD),
    (OP.ADD, OP.RMS_NORM, OP.MUL),                  # residual, norm with weight (llama)
    (OP.RMS_NORM, OP.MUL),
    (OP.ADD, OP.UNARY),                             # bias, activation
))
