"""Products of one column with what comes before and after them in one kernel.

    [rms_norm -> mul ->] mul_mat                        d = W (w rms_norm(x))
    [rms_norm -> mul ->] mul_mat -> add                 d = W x + b: a bias, or what flows past the layer
    [rms_norm -> mul ->] mul_mat, mul_mat -> glu        d[r] = act(sum_k gate[r][k] x[k]) (sum_k up[r][k] x[k])

Every thread computes the norm and prepares the column for itself, so none waits for another.  Meanwhile the first of
its weights are on the way.  Then threads take rows, each its own stretch first, which is one stream of memory, and
finish them while they are in the first-level cache.  Norms, tiles and activations are those of the single kernels, with
the values in memory in between, so the bytes are the same.  What it is worth: benchmarks/results/fusion.md; how often
threads meet: benchmarks/results/core-traffic.md.

A plan of one thread has no waits to save: it computes a norm once for all products that read it, and only gated units
are one kernel.
"""
import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

from ggjit.ops.core.fusion_pattern import FusedKernel, Fusion
from ggjit.ops.core.record import GLU, OK, OP
from ggjit.ops.core.shape import is_contiguous
from ggjit.ops.core.spec import Kernel
from ggjit.ops.core.types import F32
from ggjit.ops.elementwise.binary import VECTOR
from ggjit.ops.elementwise.glu import make_row
from ggjit.ops.fused.rows import VIEW_NBYTES, chain, row_nbytes, run_of
from ggjit.ops.matmul import mul_mat
from ggjit.ops.native.jit import inline
from ggjit.ops.native.lanes import prefetch
from ggjit.ops.native.node import DST, LINE, SRC0, addr, nb, ne, param_f32, param_i32, work
from ggjit.ops.native.row_affinity import affinity_next, countable, own_first
from ggjit.ops.native.simd import splat
from ggjit.ops.types.shared.rows import pair_row

START_NBYTES = 4 << 10          # of weights, about as many as a core waits for at once


class After(NamedTuple):
    """What is done to the rows of the products.

    reads    tensors of one column, read row by row; params: words of the node it is taken from
    make     (the products' rows function, number of the first matrix among the sources) -> jitted
             after(node, k, y, start, stop, out): rows start ... stop - 1 of the result, with room for them at `out`
    """
    label: str
    make: Callable
    reads: tuple = ()
    params: tuple = ()


# ---------------------------------------------------------------- what is done to rows
def _store(rows, first):
    view = SRC0 + VIEW_NBYTES * first

    @inline
    def after(node, k, y, start, stop, out):
        rows(node + view, k, y, start, stop, addr(node + DST) + 4 * start)
    return after


def _add(rows, first):
    view, add = SRC0 + VIEW_NBYTES * first, pair_row(VECTOR[OP.ADD])

    @inline
    def after(node, k, y, start, stop, out):
        rows(node + view, k, y, start, stop, out)
        add(addr(node + DST) + 4 * start, out, addr(node + view + VIEW_NBYTES) + 4 * start, stop - start)
    return after


def _gate(unit):
    row = make_row(unit, F32)

    def make(rows, first):
        view = SRC0 + VIEW_NBYTES * first

        @inline
        def after(node, k, y, start, stop, out):
            d = addr(node + DST) + 4 * start
            rows(node + view, k, y, start, stop, d)
            rows(node + view + VIEW_NBYTES, k, y, start, stop, out)
            row(d, d, out, stop - start, splat(param_f32(node, 2)), splat(param_f32(node, 3)))
        return after
    return make


def _after(products, d):
    """The After of products of one column and the node d that reads them all, or is the only one; None: none fits."""
    if d is products[0]:
        return After("", _store)
    if d.op == OP.GLU:
        unit, (gate, up) = GLU(int(d.op_params[0])), (t.src[0] for t in products)
        both = sorted(s.id for s in d.src) == sorted(t.id for t in products)
        same = both and gate.type is up.type and gate.ne == up.ne
        return After(f"-{unit.name.lower()}", _gate(unit), params=(*map(int, d.op_params[2:4]),)) if same else None
    others = tuple(s for s in d.src if s.id != products[0].id)
    fits = len(others) == 1 and others[0].type is F32 and is_contiguous(others[0]) and others[0].ne == d.ne
    return After("-add", _add, others) if fits else None


# ---------------------------------------------------------------- what fits
def fused(n_before, nodes, stored, kernels, n_threads):
    """FusedKernel of n_before nodes that make a column, of products that read it, and of a node that reads these."""
    before, d, products = nodes[:n_before], nodes[-1], [t for t in nodes if t.op == OP.MUL_MAT]
    columns = [kernels[n_before + i].column for i in range(len(products))]
    if stored or None in columns or len({c.label for c in columns}) > 1 or n_threads == 1 and \
            (before or len(products) == 1):
        return None
    if not all(t.type is F32 and is_contiguous(t) and t.ne[1:] == (1, 1, 1) for t in nodes):
        return None
    x, run = before[-1] if before else products[0].src[1], run_of(before) if before else None
    after = _after(products, d)
    if after is None or before and run is None or any(t.src[1].id != x.id for t in products):
        return None
    if len(products) == 2:                      # the matrix of the activation comes first
        products.sort(key=lambda t: t.id != d.src[0].id)
    column, made = columns[0], run.reads if run else (x,)
    reads = (*made, *(t.src[0] for t in products), *after.reads)
    if {t.id for t in nodes} & {t.id for t in reads}:
        return None
    own_nbytes = 4 * column.run + (row_nbytes.py_func(x.ne[0]) if run else 0) + column.panel_nbytes
    # the largest, not the sum, so that work of one thread stays on one thread
    kernel = Kernel(f"{run.label + '-' if run else ''}{column.label}{after.label}",
                    lambda: _make(run.steps if run else [], column, after, len(made), len(products)),
                    max(kernel.cost for kernel in kernels), n_threads * own_nbytes,
                    (mul_mat.__name__, *kernels[n_before].modules))
    # every thread reads the whole column: the result may not lie over it, even where `after` reads that tensor by row
    by_row = tuple(t for t in after.reads if t.id not in {x.id for x in made})
    ahead = made if n_threads == 1 and column.panel_nbytes else ()
    return FusedKernel(kernel, reads, (run.eps if run else 0, own_nbytes, *after.params), by_row, ahead)


# ---------------------------------------------------------------- kernel
def _make(steps, column, after, first, n_matrices):
    """steps: of the run before the products; first: number of the first matrix among the sources.  Parameters of the
    node: the norm's eps, bytes of a thread's work memory, what `after` has."""
    prepare, rows, chunk_of = column.make()
    finish, normed = after.make(rows, first), chain(steps) if steps else None
    has_steps, prepares, run, matrix = bool(steps), prepare is not None, column.run, SRC0 + VIEW_NBYTES * first

    @inline
    def ask(a, row):
        """Ask for the first weights of matrices, from a row on."""
        for i in range(n_matrices):
            view = a + VIEW_NBYTES * i
            at = addr(view) + row * nb(view, 1)
            for line in range(at, at + START_NBYTES, LINE):
                prefetch(line)

    def kernel(node, ith, nth, sync):
        a, y, out = node + matrix, addr(node + SRC0), work(node) + ith * param_i32(node, 1)
        k, m, own = ne(a, 0), ne(a, 1), out + 4 * run
        chunk = countable(chunk_of(a, nth, n_matrices), m)
        ask(a, own_first(ith, nth, chunk, m))
        if has_steps:
            normed(node, own, y, 0, 0, 0, k, param_f32(node, 0), own)
            y = own
            own += row_nbytes(k)
        if prepares:
            prepare(y, own, k)
            y = own
        while True:
            start = affinity_next(node, ith, nth, sync, chunk, m)
            if start >= m:
                return OK
            stop = min(m, start + chunk)
            for r in range(start, stop, run):
                finish(node, k, y, r, min(stop, r + run), out)
    return kernel


def _fusion(before, products, edges):
    """The Fusion of a run of row ops that products of one column read."""
    n = len(before)
    if before:
        edges = (*itertools.pairwise(range(n)), *((n - 1, n + i) for i in range(products.count(OP.MUL_MAT))),
                 *((n + i, n + j) for i, j in edges))
    return Fusion((*before, *products), functools.partial(fused, n), edges=edges, again=n)


FUSIONS = tuple(_fusion(before, products, edges)
                for before in ((), (OP.RMS_NORM, OP.MUL), (OP.NORM, OP.MUL, OP.ADD))
                for products, edges in (((OP.MUL_MAT, OP.MUL_MAT, OP.GLU), ((0, 2), (1, 2))),
                                        ((OP.MUL_MAT, OP.ADD), ((0, 1),)), ((OP.MUL_MAT,), ()))
                if before or len(products) > 1)
