"""Kinds of nodes: nodes of one kind get the same kernel.  Layers repeat, so a plan of many nodes has few kinds."""
import numpy as np

from ggjit.core.table import TABLE
from ggjit.ops.core import record as r
from ggjit.ops.native.jit import i64s, inlined, native, u8s

N_PARAM_WORDS = 8               # of a TENSOR and a NODE row


@inlined
def _base(t, row):
    """The row of what the tensor views, or its own."""
    return row if t[row * r.T_WORDS + r.T_VIEW_SRC] < 0 else t[row * r.T_WORDS + r.T_VIEW_SRC]


@inlined
def _begin(t, row):
    """Where a view begins in what it views; -1 for a tensor that is no view."""
    at = row * r.T_WORDS
    return t[at + r.T_VIEW_OFFS] if t[at + r.T_VIEW_SRC] >= 0 else np.int64(-1)


@inlined
def _mixed(h, x):
    h = (h ^ np.uint64(x)) * np.uint64(0x9E3779B97F4A7C15)
    return h ^ (h >> np.uint64(32))


@inlined
def _hashed(t, row):
    """A number that is equal for nodes of one kind."""
    at, h = row * r.T_WORDS, np.uint64(0)
    h = _mixed(_mixed(h, t[at + r.T_TYPE]), t[at + r.T_OP])
    for k in range(8 + N_PARAM_WORDS):                 # ne, nb, parameters
        h = _mixed(h, t[at + r.T_NE + k])
    for j in range(r.MAX_SRC):
        s = t[at + r.T_SRC + j]
        if s >= 0:
            h = _mixed(_mixed(h, t[s * r.T_WORDS + r.T_NE]), t[s * r.T_WORDS + r.T_TYPE] * 16 + j)
    return np.int64(h >> np.uint64(1))


@inlined
def _same_shape(t, a, b):
    a, b = a * r.T_WORDS, b * r.T_WORDS
    for k in range(8):
        if t[a + r.T_NE + k] != t[b + r.T_NE + k]:
            return False
    return t[a + r.T_TYPE] == t[b + r.T_TYPE]


@inlined
def _same_kind(t, a, b, marks, n_marks):
    x, y = a * r.T_WORDS, b * r.T_WORDS
    if t[x + r.T_OP] != t[y + r.T_OP] or not _same_shape(t, a, b):
        return False
    for k in range(N_PARAM_WORDS):
        if t[x + r.T_PARAMS + k] != t[y + r.T_PARAMS + k]:
            return False
    for j in range(r.MAX_SRC):
        s, u = t[x + r.T_SRC + j], t[y + r.T_SRC + j]
        if s < 0 or u < 0:
            if s != u:
                return False
        elif not _same_shape(t, s, u) or _begin(t, s) != _begin(t, u):
            return False
        elif n_marks and marks[_base(t, s)] != marks[_base(t, u)]:
            return False
    return True


@native("i64(i64, i64, i64, i64, i64, i64, i64)")
def _number(table, ids_, n, marks_, n_marks, kinds_, places_):
    t, ids, kinds, marks = i64s(table, 1 << 40), i64s(ids_, n), i64s(kinds_, n), u8s(marks_, n_marks)
    places = i64s(places_, n)
    mask = np.int64(15)
    while mask < 2 * n:
        mask = 2 * mask + 1
    first, kind_at, n_kinds = np.full(mask + 1, -1, np.int64), np.empty(mask + 1, np.int64), np.int64(0)
    for i in range(n):
        h = _hashed(t, ids[i]) & mask
        while first[h] >= 0 and not _same_kind(t, ids[i], first[h], marks, n_marks):
            h = (h + 1) & mask
        if first[h] < 0:
            first[h], kind_at[h], places[n_kinds] = ids[i], n_kinds, i
            n_kinds += 1
        kinds[i] = kind_at[h]
    return n_kinds


def kinds_of(ids, marked=frozenset()):
    """(the number of its kind for each node (row of the table), in the order in which kinds appear; the place of the
    first node of each kind)

    Of one kind are nodes with the same op, type, sizes, strides and parameters, whose sources have the same types,
    sizes and strides, begin at the same byte of what they view, and are, or view, `marked` tensors (ids) alike.
    """
    kinds, marks = np.empty((2, len(ids)), np.int64), np.zeros(TABLE.n_rows if marked else 0, np.uint8)
    marks[list(marked)] = 1
    kinds, places = kinds
    return kinds, places[:_number(TABLE.words, ids, len(ids), marks, len(marks), kinds, places)]
