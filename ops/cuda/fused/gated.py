"""Both products of a gated unit and the unit as one kernel: d[r] = act(gate[r] . x) (up[r] . x), x of one column or its
norm.

    block       ROWS rows of the result, of a column that it prepares for itself (column.py); a warp takes one of them,
                of both matrices, at a time

`coded`: the 8-bit codes of the result, too (ops/cuda/matmul/with_codes.py): ROWS of them are a block of codes.
"""
from dataclasses import replace

from ggjit.ops.core.fusion_pattern import FusedKernel, Fusion
from ggjit.ops.core.record import GLU, OP
from ggjit.ops.core.shape import is_contiguous
from ggjit.ops.core.types import F32
from ggjit.ops.cuda import quantize_columns
from ggjit.ops.cuda.compiler import core
from ggjit.ops.cuda.fused import column
from ggjit.ops.cuda.fused.column import VIEW_NBYTES, WARPS
from ggjit.ops.cuda.glu import GATES
from ggjit.ops.cuda.native.launch import Launch, node_kernel, of_module
from ggjit.ops.cuda.native.views import DST, SRC0, SRC1, addr, ne, param_f32, work

ROWS = 32


def _make_put(coded):
    """put(node, first, values): the block's rows of the result, by its first warp."""
    @core.device
    def put(node, first, values):
        d, lane = node + DST, core.thread() & 31
        i, codes = first + lane, work(node)
        if core.thread() < 32 and i < ne(d, 0):
            x = core.lds_f32(values + 4 * lane)
            core.st_f32(addr(d) + 4 * i, x)
            if coded:
                quantize_columns.put_code(codes + i, codes + ne(d, 0) + (i >> 5) * 4, x)
    return put


def _make(type, gate, most, normed, coded):
    """Sources: the column, the norm's weights, the gate's matrix, the other one."""
    prepare, dots, fetch = column.make_prepare(type, normed, most), column.make_dots(type, normed), column.make_fetch(
        ROWS)
    results, put, row_of, matrices = core.shared(4 * ROWS), _make_put(coded), column.row_of, SRC1 + VIEW_NBYTES * normed

    def kernel(node):
        a, b, first = node + matrices, node + matrices + VIEW_NBYTES, ROWS * core.block()
        values, lane, r = results(), core.thread() & 31, core.thread() >> 5
        fetch(a, first)
        fetch(b, first)
        x, scales = prepare(node)
        while r < ROWS:
            g, u = dots(row_of(a, first + r), row_of(b, first + r), x, scales, ne(node + SRC0, 0))
            if lane == 0:
                core.sts_f32(values + 4 * r, gate(g, u, param_f32(node, 1), param_f32(node, 2)))
            r += WARPS
        core.sync()
        put(node, first, values)
    return kernel


def _launches(d, type, k, normed, coded=False):
    which, most = GLU(int(d.op_params[0])), column.room_for(type, k, normed)
    name = f"{'rms_norm_' * normed}mul_mat_{which.name.lower()}_{type.name}{f'_{most}' * (most > 0)}{'_codes' * coded}"
    made = Launch(name, lambda: _make(type, GATES[which], most, normed, coded), (-(-d.ne[0] // ROWS), 1, 1), 32 * WARPS,
                  registers=column.REGISTERS)
    if coded:
        return replace(made, work_nbytes=quantize_columns.nbytes(d.ne[0], 1), leaves_result=quantize_columns.CODES),
    return replace(made, coded=lambda: _launches(d, type, k, normed, True)),


def _fused(nodes, stored, kernels, n_threads):
    """FusedKernel of a norm or none, products with matrices of one type and size, and the node that reads both."""
    *before, one, other, d = nodes
    gate, up = (one, other) if d.src[0].id == one.id else (other, one)
    (a, h), (b, y) = gate.src[:2], up.src[:2]
    if stored or h.id != y.id or a.ne != b.ne or d.src[0].id == d.src[1].id or before and h.id != before[-1].id:
        return None
    x, w, eps = h, None, 0
    if before:
        x, eps = before[0].src[0], int(before[0].op_params[0])
        w = next(s for s in h.src if s.id != before[0].id)
    if not all(t.type is F32 and is_contiguous(t) and t.ne[1:] == (1, 1, 1) for t in nodes) or not column.fits(
            x, w, (a, b)):
        return None
    kernel = node_kernel(of_module(_launches(d, a.type, x.ne[0], w is not None), __name__))
    return FusedKernel(kernel, (x, *([w] if before else []), a, b), (eps, *map(int, d.op_params[2:4])))


UNIT = OP.MUL_MAT, OP.MUL_MAT, OP.GLU
CUDA_FUSIONS = (Fusion(UNIT, _fused, edges=((0, 2), (1, 2))),
                Fusion((OP.RMS_NORM, OP.MUL, *UNIT), _fused, again=2, edges=((0, 1), (1, 2), (1, 3), (2, 4), (3, 4))))
