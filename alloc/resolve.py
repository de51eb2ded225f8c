"""Allocations -> tensors: where each tensor of a graph lies, once its allocation has its place."""
from ggjit.alloc.alias import IN_PLACE
from ggjit.alloc.work import (
    A_BUFT,
    A_CHUNK,
    A_FIRST,
    A_OFFS,
    ALLOC,
    CAUSE,
    COLUMNS,
    DREL,
    EXTERNAL,
    FLAGS,
    ID,
    NONE,
    SIZE,
    VIEW,
    VOFFS,
    pad,
)
from ggjit.ops.core.record import T_VIEW_SRC, T_WORDS
from ggjit.ops.native.jit import i64s, native

P_BUFFER, P_CHUNK, P_OFFS, P_SIZE, P_ALLOC, P_ROOT = range(6)       # rows of what `resolve` fills; see GraphPlan
P_ROWS = 6


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64)")
def resolve(table, n_rows, ws, m, views_carry, alignments, n_buffers, out):
    """Fill P_ROWS rows of m words.  views_carry: views know allocation and offset themselves (the 2023 pass)."""
    t, w = i64s(table, n_rows * T_WORDS), i64s(ws, COLUMNS * m)
    alignment, o = i64s(alignments, n_buffers), i64s(out, P_ROWS * m)
    for i in range(m):
        view = w[VIEW * m + i]
        root = view if view >= 0 else i
        a = w[ALLOC * m + (i if views_carry else root)]
        if a < 0 or w[FLAGS * m + i] & EXTERNAL:
            viewed = t[w[ID * m + i] * T_WORDS + T_VIEW_SRC]
            o[P_BUFFER * m + i] = o[P_CHUNK * m + i] = o[P_OFFS * m + i] = o[P_ALLOC * m + i] = -1
            o[P_SIZE * m + i] = 0
            o[P_ROOT * m + i] = viewed if viewed >= 0 else w[ID * m + root]
            continue
        own = view == NONE or w[CAUSE * m + i] == IN_PLACE          # a view otherwise: takes no bytes
        o[P_BUFFER * m + i] = w[A_BUFT * m + a]
        o[P_CHUNK * m + i] = w[A_CHUNK * m + a]
        o[P_OFFS * m + i] = w[A_OFFS * m + a] + w[(DREL if views_carry else VOFFS) * m + i]
        o[P_SIZE * m + i] = pad(w[SIZE * m + i], alignment[w[A_BUFT * m + a]]) if own else 0
        o[P_ALLOC * m + i] = a
        o[P_ROOT * m + i] = w[ID * m + w[A_FIRST * m + a]]
    return 0
