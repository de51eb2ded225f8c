"""Products of one column's norm as one kernel: q, k and v of an attention, or the logits.

    rms_norm -> mul -> q            block 0     rows 0 ... 15 of q
                    -> k            block 1     rows 16 ... 31 of q
                    -> v            ...         of k, of v; blocks go on where there are more rows

Every block computes the norm for itself (column.py), so the norm is not stored, no launch waits for it, and matrices of
a few rows keep the GPU as busy as one of many.  Matrices of several types are several such kernels.
"""

from ggjit.ops.core.fusion_pattern import FusedKernel, Fusion
from ggjit.ops.core.record import OP
from ggjit.ops.core.shape import is_contiguous
from ggjit.ops.core.types import F32
from ggjit.ops.cuda.compiler import core
from ggjit.ops.cuda.fused import column
from ggjit.ops.cuda.fused.column import VIEW_NBYTES, WARPS
from ggjit.ops.cuda.native.launch import SMALL_BLOCKS, Launch, node_kernel, of_module
from ggjit.ops.cuda.native.views import DST, SRC0, SRC2, addr, ne

ROWS = 2 * WARPS                                # a warp has two of them
MAX_BLOCKS = 3 if SMALL_BLOCKS else 528         # so many that all of a GPU's multiprocessors are full of them


def _make(type, n, most):
    """n: matrices, from source 2 on; behind them all results but the last, which is the node's."""
    prepare, dots, fetch = column.make_prepare(type, True, most), column.make_dots(type, True), column.make_fetch(ROWS)
    row_of = column.row_of

    @core.device
    def groups(a):
        return (ne(a, 1) + ROWS - 1) // ROWS

    @core.device
    def place(node, group):
        """(number of the matrix, its first row) of a group of rows; n behind the last."""
        i = 0
        while i < n and group >= groups(node + SRC2 + VIEW_NBYTES * i):
            group -= groups(node + SRC2 + VIEW_NBYTES * i)
            i += 1
        return i, ROWS * group

    @core.device
    def result(node, i):
        return addr(node + DST) if i == n - 1 else addr(node + SRC2 + VIEW_NBYTES * (n + i))

    def kernel(node):
        group, warp, lane = core.block(), core.thread() >> 5, core.thread() & 31
        i, first = place(node, group)
        if i < n:
            fetch(node + SRC2 + VIEW_NBYTES * i, first)
        x, scales = prepare(node)
        while i < n:
            a, r, d = node + SRC2 + VIEW_NBYTES * i, first + 2 * warp, result(node, i)
            s, t = dots(row_of(a, r), row_of(a, r + 1), x, scales, ne(node + SRC0, 0))
            if lane < 2 and r + lane < ne(a, 1):
                core.st_f32(d + 4 * (r + lane), s if lane == 0 else t)
            group += core.n_blocks()
            i, first = place(node, group)
    return kernel


def launch(x, matrices):
    """The Launch for these matrices, of one type."""
    type, most = matrices[0].type, column.room_for(matrices[0].type, x.ne[0], True)
    blocks = min(sum(-(-a.ne[1] // ROWS) for a in matrices), MAX_BLOCKS)
    return Launch(f"rms_norm_mul_mat_{len(matrices)}_{type.name}_{most}", lambda: _make(type, len(matrices), most),
                  (blocks, 1, 1), 32 * WARPS, registers=column.REGISTERS)


def _fused(nodes, stored, kernels, n_threads):
    """FusedKernel of the products; of the run's results only the norm is not stored."""
    norm, made, *products = nodes
    x, w = norm.src[0], next(s for s in made.src if s.id != norm.id)
    matrices = [t.src[0] for t in products]
    if [t.id for t in stored] != [t.id for t in products[:-1]] or any(t.src[1].id != made.id for t in products):
        return None
    if not all(t.type is F32 and is_contiguous(t) and t.ne[1:] == (1, 1, 1) for t in nodes) or not column.fits(
            x, w, matrices):
        return None
    kernel = node_kernel(of_module((launch(x, matrices),), __name__))
    return FusedKernel(kernel, (x, w, *matrices), (int(norm.op_params[0]),))


CUDA_FUSIONS = tuple(Fusion((OP.RMS_NORM, OP.MUL, *[OP.MUL_MAT] * n), _fused, again=2,
                            edges=((0, 1), *((1, 2 + i) for i in range(n)))) for n in (1, 2, 3))
