"""Repacked weights, which only matrix products read: which types have such a layout, and the kernel over it.

    F32          panels of rows, a lane a row           repack_float   AVX2, AVX-512
    Q4_0, Q8_0   blocks of sixteen rows interleaved     repack_codes   AVX-512

A layout takes as many bytes as the file's.  It is a module with TYPES, ISAS, ROWS and BLOCK (rows come in multiples of
ROWS, elements of a row in multiples of BLOCK), the natives `pack_rows` and `unpack_rows`, and `product`.
"""
from ggjit.ops.core.record import OP
from ggjit.ops.core.types import F32
from ggjit.ops.matmul import repack_codes, repack_float
from ggjit.ops.native import isa

LAYOUTS = {type: layout for layout in (repack_float, repack_codes) for type in layout.TYPES
           if isa.ISA in layout.ISAS}


def takes(type, ne):
    """Whether a matrix of this type and shape (ggml order) has a layout."""
    layout, (k, m, *rest) = LAYOUTS.get(type), ne
    return layout is not None and k % layout.BLOCK == 0 and m % layout.ROWS == 0 and all(n == 1 for n in rest)


def pack(type, file, repacked, k, m):
    """The file's bytes of a [k, m] matrix -> the layout at address `repacked`."""
    LAYOUTS[type].pack_rows(type.id, file, repacked, k, m)


def unpack(type, file, repacked, k, m):
    """The layout at address `repacked` -> the file's bytes."""
    LAYOUTS[type].unpack_rows(type.id, file, repacked, k, m)


def kernel(t, n_threads):
    """The Kernel of a product with repacked weights; None for other ops that read them."""
    if t.op != OP.MUL_MAT or len(t.src) != 2 or t.op_params[1]:
        return None
    a, b = t.src
    if b.type is not F32 or b.nb[0] != 4 or b.ne[2] * b.ne[3] != 1 or not takes(a.type, a.ne) or a.view_src is not None:
        return None
    return LAYOUTS[a.type].product(a, b)
