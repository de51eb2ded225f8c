"""The graph for the memory planner, in a private table, so that the user's graph stays unchanged.

Rows: the n tensors, then one row per copy (n_instances rows each for pipelining), then two markers per use.  A marker
is a view of the original that keeps it alive until it was copied; row numbers take the place of ids.

    order    [marker x] [copy x] node node | [marker y] [copy y] node ...      kept copies are leafs

A copied view may itself stand inside the split that reads the copy.  Then the first marker holds on to its base, and
a second one at the end of the split gives the view back.
"""
from ggjit.ops.core.record import (
    FLAG_INPUT,
    FLAG_OUTPUT,
    MAX_SRC,
    T_BUFFER,
    T_FLAGS,
    T_OP,
    T_PARAMS,
    T_SRC,
    T_VIEW_OFFS,
    T_VIEW_SRC,
    T_WORDS,
)
from ggjit.ops.native.jit import i64s, inlined, native
from ggjit.sched import records as rec
from ggjit.sched.records import base_of, opened


@inlined
def _copy_row(table, dst, t, id_):
    """Copy the words of a row that the planner reads: all but the parameters."""
    d, s = t * T_WORDS, id_ * T_WORDS
    for k in range(T_PARAMS):
        dst[d + k] = table[s + k]
    for k in range(T_SRC, T_BUFFER + 1):
        dst[d + k] = table[s + k]


@inlined
def _copied_row(d, s, row, kept):
    """Row of a copy of tensor s: the layout of its original, no op, no sources."""
    r = row * T_WORDS
    _copy_row(d, d, row, s)
    d[r + T_OP] = 0
    d[r + T_VIEW_SRC] = rec.NONE
    d[r + T_VIEW_OFFS] = 0
    d[r + T_BUFFER] = -1
    d[r + T_FLAGS] = FLAG_OUTPUT | FLAG_INPUT if kept else 0
    for j in range(MAX_SRC):
        d[r + T_SRC + j] = rec.NONE


@inlined
def _marker(g, d, row, s, src0, src1):
    """A view of tensor s without op that keeps src0 and src1 alive up to here."""
    r = row * T_WORDS
    _copy_row(d, d, row, s)
    is_view = g.rows[s].view >= 0
    d[r + T_OP] = 0
    d[r + T_FLAGS] = 0
    d[r + T_BUFFER] = -1
    d[r + T_VIEW_OFFS] = d[s * T_WORDS + T_VIEW_OFFS] if is_view else 0
    d[r + T_VIEW_SRC] = base_of(g, s)
    for j in range(MAX_SRC):
        d[r + T_SRC + j] = rec.NONE
    d[r + T_SRC] = src0
    d[r + T_SRC + 1] = src1


@inlined
def _keep_apart(g, d, i):
    """No computing in place in the memory of another backend: others count on a result being in its own backend's.

    A source that is named twice is never worked on in place.
    """
    end = g.rows[i].src_end
    for j in range(g.rows[i].src_end):
        s = g.rows[i].src[j]
        if s < 0 or g.rows[i].copy[j] >= 0 or end == MAX_SRC:
            continue
        if g.buft_ids[g.rows[base_of(g, s)].backend] != g.buft_ids[g.rows[i].backend]:
            d[i * T_WORDS + T_SRC + end] = s
            end += 1


@inlined
def _copy_tensors(g, d, lf):
    """The rows of the tensors.  Returns how many leafs there are."""
    n_lf = 0
    for i in range(g.n):
        _copy_row(g.table, d, i, g.rows[i].id)
        r = i * T_WORDS
        d[r + T_VIEW_SRC] = g.rows[i].view
        base = base_of(g, i)
        # leaves have memory of their own, or get it before anything is computed
        d[r + T_BUFFER] = 0 if g.rows[i].mem >= 0 or g.rows[base].bits & rec.IS_LEAF else -1
        for j in range(MAX_SRC):
            c = g.rows[i].copy[j]
            d[r + T_SRC + j] = g.rows[i].src[j] if c < 0 else g.n + c * g.n_instances
        if g.rows[i].bits & rec.IS_COMPUTE:
            _keep_apart(g, d, i)
        if i >= g.n_nodes:
            lf[n_lf] = i
            n_lf += 1
    return n_lf


@inlined
def _add_copies(g, d, lf, n_lf):
    """The rows of the copies; those that are kept are leafs.  Returns how many leafs there are."""
    for c in range(g.results[0].n_copies):
        kept = g.copies[c].kind == rec.KEPT or g.n_instances > 1
        for k in range(g.n_instances):
            row = g.n + c * g.n_instances + k
            _copied_row(d, g.copies[c].src, row, kept)
            if kept:
                lf[n_lf] = row
                n_lf += 1
    return n_lf


@inlined
def _put_in_order(g, d, o, first_marker):
    """Nodes, markers and transient copies as the planner visits them.  Returns how many there are."""
    n = 0
    n_uses = g.results[0].n_uses
    u = 0
    for k in range(g.results[0].n_splits):
        u0 = u
        start, end = g.splits[k].start, g.splits[k].end
        while u < n_uses and g.uses[u].split == k:
            c = g.uses[u].copy
            s = g.copies[c].src
            first = g.copies[c].split == k
            if first or g.uses[u].refresh:
                base = base_of(g, s)
                inside = start <= s < end
                row = first_marker + 2 * u
                _marker(g, d, row, s, base, rec.NONE if inside or s == base else s)
                o[n] = row
                n += 1
                if first and g.copies[c].kind == rec.TRANSIENT and g.n_instances == 1:
                    o[n] = g.n + c
                    n += 1
            u += 1
        for i in range(start, end):
            o[n] = i
            n += 1
        for v in range(u0, u):
            s = g.copies[g.uses[v].copy].src
            if start <= s < end:
                _marker(g, d, first_marker + 2 * v + 1, s, s, rec.NONE)
                o[n] = first_marker + 2 * v + 1
                n += 1
    return n


@native("i64(i64, i64, i64, i64, i64)")
def planner_graph(params, out, order, leafs, counts):
    """Fill the private table `out`.  counts returns how many entries order and leafs have."""
    g = opened(params)
    n_copies, n_uses, n_instances = g.results[0].n_copies, g.results[0].n_uses, g.n_instances
    first_marker = g.n + n_copies * n_instances
    n_rows = first_marker + 2 * n_uses
    d, o, lf, count = i64s(out, n_rows * T_WORDS), i64s(order, n_rows), i64s(leafs, n_rows), i64s(counts, 2)
    count[1] = _copy_tensors(g, d, lf)
    count[1] = _add_copies(g, d, lf, count[1])
    count[0] = _put_in_order(g, d, o, first_marker)
    return 0
