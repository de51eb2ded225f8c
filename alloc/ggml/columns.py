"""The memory all passes over one graph share: M-word columns in one int64 block, made once in Python.

A graph of n_nodes nodes and n_leafs leafs has M = n_nodes + n_leafs local tensors: nodes first, in execution order,
then leafs.  Local numbers take the place of table ids, so that every pass runs over dense columns.

    tensor columns (row = local tensor)      allocation columns (row = allocation, at most M of them)
    ID     table id                          A_FIRST  local tensor that created it
    VIEW   local root, NONE, FOREIGN         A_LO     first step it is live
    VOFFS  bytes from the root               A_HI     first step it is dead (n_steps: never freed)
    FLAGS  bits below                        A_SIZE   bytes, padded
    SIZE   bytes, not padded                 A_CUR    bytes left after trims
    BUFT   buffer it wants                   A_BUFT   buffer it is in
    KIDS, VIEWS, OWN  ggml's hash node       A_CHUNK, A_OFFS  where the free list put it
    USES   children and views over the whole graph
    ALLOC  allocation, -1                    SRC (10 columns): local sources, row-major n x 10
    DREL   bytes from its allocation's start EV (12 columns): events, 4 words each: kind, allocation, bytes, step
    CAUSE, CAUSE_SRC  why not in place
"""
import numpy as np

from ggjit.ops.native.jit import inlined

(ID, VIEW, VOFFS, FLAGS, SIZE, BUFT, KIDS, VIEWS, OWN, ALLOC, DREL, CAUSE, CAUSE_SRC,
 A_FIRST, A_LO, A_HI, A_SIZE, A_CUR, A_BUFT, A_CHUNK, A_OFFS, USES) = range(22)
SRC = 22                        # 10 columns
EV = SRC + 10                   # 12 columns: 3 M events of 4 words
COLUMNS = EV + 12
EV_WORDS = 4

NONE, FOREIGN = -1, -2          # no tensor; a tensor outside the graph that has memory of its own
EXTERNAL, OUTPUT, INPUT, CAN_INPLACE, MARKER = 1, 2, 4, 8, 16      # FLAGS
EV_ALLOC, EV_FREE, EV_TRIM = 0, 1, 2

# statuses of the passes
OK, DUPLICATE, BAD_ID, FOREIGN_SRC, UNORDERED, VIEW_CYCLE, BAD_BUFFER, NO_ROOM, NO_DATA, BAD_SEQ = range(10)


def column(ws, m, k, n=1):
    """Columns k .. k+n-1 as a NumPy view."""
    return ws[k * m:(k + n) * m]


def new_work(m):
    return np.empty(COLUMNS * m, np.int64)


@inlined
def put_event(w, m, n_ev, kind, a, nbytes, step):
    e = EV * m + EV_WORDS * n_ev
    w[e] = kind
    w[e + 1] = a
    w[e + 2] = nbytes
    w[e + 3] = step


@inlined
def base_of(w, m, i):
    """Local number of the tensor whose memory i has: the root of a view, else i itself."""
    return w[VIEW * m + i] if w[VIEW * m + i] >= 0 else i


@inlined
def pad(n, alignment):
    """n rounded up to a multiple of a power of two."""
    return (n + alignment - 1) & -alignment
