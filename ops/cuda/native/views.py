"""How a kernel reads its node, with the names of the CPU's `ops/native/node.py`.

    def kernel(node):                       # address of its NODE row in device memory (ops/core/record.py)
        x, d = node + SRC0, node + DST      # views
        n = n_rows(d)
        r = block()
        while r < n:                        # blocks take rows in turn
            i1, i2, i3 = row_index(d, r)
            ...
            r += n_blocks()

A float literal is a float64: write f32(0.5).  Blocks are whole warps in one dimension, and all threads of a block reach
every `sync` and every reduction.

The word of the chunk counter holds the address of the plan's status here: two words, (node id + 1 or 0, value).
"""
from ggjit.ops.core.record import N_CHUNK, N_DST, N_ID, N_PARAMS, N_SRC, N_WORK, V_ADDR, V_NB, V_NE, V_WORDS, WORD
from ggjit.ops.cuda.compiler.core import (
    block,
    device,
    ldc_f32,
    ldc_i32,
    ldc_i64,
    n_blocks,
    n_threads,
    st_i64_any,
    thread,
)

DST = WORD * N_DST
SRC0, SRC1, SRC2, SRC3, SRC4, SRC5, SRC6 = (WORD * (N_SRC + V_WORDS * i) for i in range(7))
STATUS_WORDS = 2


@device
def addr(view):
    return ldc_i64(view + WORD * V_ADDR)


@device
def ne(view, i):
    return ldc_i64(view + WORD * (V_NE + i))


@device
def nb(view, i):
    return ldc_i64(view + WORD * (V_NB + i))


@device
def n_rows(view):
    """Rows along ne0: ne1 * ne2 * ne3."""
    return ne(view, 1) * ne(view, 2) * ne(view, 3)


@device
def row_index(view, r):
    """(i1, i2, i3) of flat row `r`."""
    n1, n2 = ne(view, 1), ne(view, 2)
    q = r // n1
    i3 = q // n2
    return r - q * n1, q - i3 * n2, i3


@device
def piece(n):
    """(first row, step, first element, step) of this thread where n rows are taken in pieces (`over_pieces`)."""
    per_row = max(n_blocks() // max(n, 1), 1)
    r = block() // per_row
    return r, max(n_blocks() // per_row, 1), (block() - r * per_row) * n_threads() + thread(), per_row * n_threads()


@device
def row_addr(view, i1, i2, i3):
    return addr(view) + i1 * nb(view, 1) + i2 * nb(view, 2) + i3 * nb(view, 3)


@device
def row_addr_mod(view, i1, i2, i3):
    """The same where the view is repeated along dims 1..3."""
    return row_addr(view, i1 % ne(view, 1), i2 % ne(view, 2), i3 % ne(view, 3))


@device
def element_addr(view, e, block):
    """Address of element number e in flat order, or of block number e where the type has blocks of `block`."""
    n0 = ne(view, 0) // block
    r = e // n0
    i1, i2, i3 = row_index(view, r)
    return row_addr(view, i1, i2, i3) + (e - r * n0) * nb(view, 0)


@device
def param_i32(node, i):
    return ldc_i32(node + WORD * N_PARAMS + 4 * i)


@device
def param_f32(node, i):
    return ldc_f32(node + WORD * N_PARAMS + 4 * i)


@device
def work(node):
    """Address of the node's scratch memory, 256-byte aligned."""
    return ldc_i64(node + WORD * N_WORK)


@device
def bad_index(node, value):
    """An id out of range: the run is reported as failed when the stream is synchronized."""
    status = ldc_i64(node + WORD * N_CHUNK)
    st_i64_any(status + WORD, value)
    st_i64_any(status, ldc_i64(node + WORD * N_ID) + 1)
