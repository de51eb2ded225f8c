"""A sum, its norm and the norm's weights as one kernel (ops/fused/rows.py): a block takes a row.

    add -> rms_norm -> mul      x[i] = a[i] + b[i], sum of x[i]^2 | d[i] = x[i] factor w[i]

x is stored if others read it.  A thread has the same elements in both passes, so the result may lie where an operand
lies.  Bits are those of the three kernels.  `coded`: the 8-bit codes of the result are left, too
(ops/cuda/matmul/with_codes.py).
"""
from dataclasses import replace

from numpy import float32 as f32

from ggjit.ops.core.fusion_pattern import FusedKernel, Fusion
from ggjit.ops.core.record import OP
from ggjit.ops.core.shape import is_contiguous, same_shape
from ggjit.ops.core.types import F32
from ggjit.ops.cuda import quantize_columns
from ggjit.ops.cuda.compiler.core import block, device, ld_f32, n_blocks, n_threads, sqrt, st_f32, thread
from ggjit.ops.cuda.native.launch import node_kernel, of_module, over_rows
from ggjit.ops.cuda.native.sums import block_sum
from ggjit.ops.cuda.native.views import (
    DST,
    SRC0,
    SRC1,
    SRC2,
    SRC3,
    addr,
    n_rows,
    ne,
    param_f32,
    row_addr,
    row_index,
    work,
)

ZERO, ONE = f32(0), f32(1)


def _make(adds, stores, coded):
    weights = SRC2 if adds else SRC1

    @device
    def value(x, y, i):
        if adds:
            return ld_f32(x + 4 * i) + ld_f32(y + 4 * i)
        return ld_f32(x + 4 * i)

    def kernel(node):
        d, w = node + DST, addr(node + weights)
        n0, n, eps, codes = ne(d, 0), n_rows(d), param_f32(node, 0), work(node)
        r = block()
        while r < n:
            i1, i2, i3 = row_index(d, r)
            x, to, y, kept = row_addr(node + SRC0, i1, i2, i3), row_addr(d, i1, i2, i3), 0, 0
            if adds:
                y = row_addr(node + SRC1, i1, i2, i3)
            if stores:
                kept = row_addr(node + SRC3, i1, i2, i3)
            s, i = ZERO, thread()
            while i < n0:
                v = value(x, y, i)
                if stores:
                    st_f32(kept + 4 * i, v)
                s += v * v
                i += n_threads()
            factor, i = ONE / sqrt(block_sum(s) / f32(n0) + eps), thread()
            while i < n0:
                v = ld_f32(kept + 4 * i) if stores else value(x, y, i)      # x or y may be overwritten by now
                v = v * factor * ld_f32(w + 4 * i)
                st_f32(to + 4 * i, v)
                if coded:
                    at = r * n0 + i
                    quantize_columns.put_code(codes + at, codes + n * n0 + (at >> 5) * 4, v)
                i += n_threads()
            r += n_blocks()
    return kernel


def _launches(t, adds, stores, coded=False):
    name, n = f"{'add_' * adds}{'stored_' * stores}rms_norm_mul{'_codes' * coded}", t.ne[1] * t.ne[2] * t.ne[3]
    made = over_rows(name, lambda: _make(adds, stores, coded), n, t.ne[0])
    if coded:
        return replace(made, work_nbytes=quantize_columns.nbytes(t.ne[0], n), leaves_result=quantize_columns.CODES),
    return replace(made, coded=lambda: _launches(t, adds, stores, True)),


def _operands(nodes):
    """(operands of the sum or the norm's one, the norm's weights) of nodes that read each other; None: others."""
    *adds, norm, d = nodes
    first = adds[0].src if adds else norm.src
    weights = next(s for s in d.src if s.id != norm.id)
    return tuple(first), weights


def _fused(nodes, stored, kernels, n_threads):
    """FusedKernel of float32 rows that lie side by side; the weights are one row."""
    *adds, norm, d = nodes
    if norm in stored or d.src[0].id == d.src[1].id or adds and adds[0].src[0].id == adds[0].src[1].id:
        return None
    operands, w = _operands(nodes)
    if not all(x.type is F32 and is_contiguous(x) and same_shape(x, d) for x in (*operands, *nodes)):
        return None
    if w.type is not F32 or not is_contiguous(w) or w.ne != (d.ne[0], 1, 1, 1):
        return None
    kernel = node_kernel(of_module(_launches(d, bool(adds), bool(stored)), __name__))
    return FusedKernel(kernel, (*operands, w), (int(norm.op_params[0]),), operands)


CUDA_FUSIONS = tuple(Fusion(ops, _fused) for ops in ((OP.ADD, OP.RMS_NORM, OP.MUL), (OP.RMS_NORM, OP.MUL)))
