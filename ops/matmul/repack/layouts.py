"""Repacked weights, which matrix products and get_rows read: which types have such a layout, and the kernels over it.

    F32                         panels of rows, a lane a row        floats
    blocks of 32, super-blocks  blocks of a vector's rows           codes, over interleaved.Format

AVX-512, AVX2 and NEON, codes there with sdot.  A layout takes as many bytes as the file's.  It is a module with ROWS (a
matrix has a multiple of them), `pack_rows`, `unpack_rows`, `make_row_of` and `product`.  The matrices of experts,
[k, m, E], are packed as one of m E rows, and mul_mat_id reads them (experts).  get_rows is in tables.
"""
from ggjit.ops.core.record import OP
from ggjit.ops.core.types import F32, I32
from ggjit.ops.matmul.interleaved import FORMATS
from ggjit.ops.matmul.repack import codes, experts, floats, tables
from ggjit.ops.native import isa

LAYOUTS = {} if isa.ISA == "generic" else {F32: floats, **dict.fromkeys(FORMATS, codes)}


def unit(type):
    """(elements of a row, rows): a matrix of the type has a layout if its sizes are multiples of these."""
    return (floats.BLOCK if type is F32 else type.block), LAYOUTS[type].ROWS


def takes(type, ne):
    """Whether a matrix, or the matrices of experts, of this type and shape (ggml order) have a layout."""
    if type not in LAYOUTS:
        return False
    (k, m, *rest), (block, rows) = ne, unit(type)
    n_experts, *rest = *rest, 1
    return k % block == 0 and m % rows == 0 and (n_experts == 1 or type is not F32) and all(n == 1 for n in rest)


def pack(type, file, repacked, k, m):
    """The file's bytes of a [k, m] matrix -> the layout at address `repacked`."""
    LAYOUTS[type].pack_rows(type, file, repacked, k, m)


def unpack(type, file, repacked, k, m):
    """The layout at address `repacked` -> the file's bytes."""
    LAYOUTS[type].unpack_rows(type, file, repacked, k, m)


def kernel(t, n_threads):
    """The Kernel of a product with repacked weights, or of get_rows; None for other ops that read them."""
    if t.op not in (OP.MUL_MAT, OP.MUL_MAT_ID, OP.GET_ROWS):
        return None
    a, b, *ids = t.src
    if t.op == OP.GET_ROWS:
        whole = takes(a.type, a.ne) and a.ne[2] == 1 and a.view_src is None
        return tables.rows_kernel(t, LAYOUTS[a.type], n_threads) if whole else None
    if b.type is not F32 or b.nb[0] != 4 or not takes(a.type, a.ne) or a.view_src is not None:
        return None
    if t.op == OP.MUL_MAT_ID:
        return experts.product(t, n_threads) if ids[0].type is I32 and a.type is not F32 else None
    if ids or t.op_params[1] or a.ne[2] * b.ne[2] * b.ne[3] != 1:
        return None
    return LAYOUTS[a.type].product(a, b, n_threads)
