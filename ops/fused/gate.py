"""A gated unit of one column in one kernel: d[r] = act(sum_k gate[r][k] x[k]) (sum_k up[r][k] x[k]).

    mul_mat(gate, x)   mul_mat(up, x)   glu          x is prepared twice; two results go through memory; five barriers
    one kernel                                       x is prepared once; RUN rows of both, then their unit; two barriers

Column, tiles and act are those of the single kernels, with the values in memory in between, so the bytes are the same.
What it is worth: benchmarks/results/fusion.md.
"""
from ggjit.ops.core.fusion_pattern import FusedKernel, Fusion
from ggjit.ops.core.record import GLU, OK, OP
from ggjit.ops.core.shape import is_contiguous
from ggjit.ops.core.spec import Kernel
from ggjit.ops.core.traits import module_of
from ggjit.ops.core.types import F32
from ggjit.ops.elementwise.glu import make_row
from ggjit.ops.matmul import mul_mat_dot
from ggjit.ops.matmul.mul_mat import dot_shape
from ggjit.ops.native.node import DST, SRC0, SRC1, SRC2, addr, barrier, nb, ne, next_rows2, param_f32, work
from ggjit.ops.native.simd import splat

RUN = 32                                # rows of each matrix in one unit of work


def fused(nodes, stored, kernels, n_threads):
    """FusedKernel of two products of one column, of matrices of one type and shape, and the gated unit over them."""
    first, second, d = nodes
    if stored or [s.id for s in d.src] not in ([first.id, second.id], [second.id, first.id]):
        return None
    (gate, x), (up, other) = (t.src[:2] for t in d.src)
    same = gate.type is up.type and gate.ne == up.ne and x.id == other.id and kernels[0].name == kernels[1].name
    if not same or not kernels[0].name.startswith("mul_mat-dot-") or d.type is not F32:
        return None
    if x.ne[1:] != (1, 1, 1) or gate.ne[2:] != (1, 1) or not all(is_contiguous(t) for t in nodes):
        return None
    direct, unit, (k, m) = kernels[0].name.endswith("-direct"), GLU(int(d.op_params[0])), gate.ne[:2]
    shape, columns = dot_shape(gate.type, k, m, 1), kernels[0].work_nbytes
    name = f"mul_mat-glu-{unit.name.lower()}-{gate.type.name}-{x.type.name}-{shape}"
    # the largest, not the sum, so that work of one thread stays on one thread
    cost = max(kernel.cost for kernel in kernels)
    kernel = Kernel(name + "-direct" * direct, lambda: _make(gate.type, x.type, direct, shape, unit), cost,
                    columns + n_threads * 4 * RUN, (module_of(gate.type), module_of(x.type)))
    return FusedKernel(kernel, (gate, up, x), tuple(int(p) for p in d.op_params[:4]), ahead=() if direct else (x,))


def _make(ta, tb, direct, shape, unit):
    """direct: the column is used where it lies."""
    tile, row, n_rows_tile = mul_mat_dot.make_tile(ta, shape), make_row(unit, F32), shape.rows
    stride, prepare_columns = mul_mat_dot.make_columns(ta, tb)

    def kernel(node, ith, nth, sync):
        gate, up, x, d = node + SRC0, node + SRC1, node + SRC2, node + DST
        k, m, alpha, limit = ne(gate, 0), ne(gate, 1), splat(param_f32(node, 2)), splat(param_f32(node, 3))
        y, products = addr(x), work(node)
        if not direct:
            ldy = stride(k)
            prepare_columns(node, ith, nth, sync, x, k, ldy)
            barrier(sync, nth)
            y, products = work(node), work(node) + ldy + nth * ((4 * k + 63) // 64 * 64)
        products += ith * 4 * RUN
        ldg, ldu = nb(gate, 1), nb(up, 1)
        ahead_g = max(n_rows_tile * ldg, mul_mat_dot.AHEAD_NBYTES)
        ahead_u = max(n_rows_tile * ldu, mul_mat_dot.AHEAD_NBYTES)
        chunk = mul_mat_dot.chunk_of_rows(m, nth, ldg + ldu, n_rows_tile)
        while True:
            start = next_rows2(node, ith, nth, sync, chunk, m)
            if start >= m:
                return OK
            stop = min(m, start + chunk)
            for r in range(start, stop, RUN):
                end = min(stop, r + RUN)
                for q in range(r, end, n_rows_tile):
                    tile(addr(gate) + q * ldg, ldg, ahead_g, y, 0, k, addr(d) + 4 * q, 0, end - q, 1)
                for q in range(r, end, n_rows_tile):
                    tile(addr(up) + q * ldu, ldu, ahead_u, y, 0, k, products + 4 * (q - r), 0, end - q, 1)
                row(addr(d) + 4 * r, addr(d) + 4 * r, products, end - r, alpha, limit)
    return kernel


FUSIONS = (Fusion((OP.MUL_MAT, OP.MUL_MAT, OP.GLU), fused, edges=((0, 2), (1, 2))),)
