"""Cutting: runs of nodes on one backend, what each run has to copy in, and the graph the memory planner sees.

    nodes     a  b  c | d  e | f           |: the backend changes
    splits    0: GPU    1: CPU  2: GPU
    inputs              c        x, e      tensors of another backend that must be copied before the split starts

Which copies are *listed* follows the chosen version: 2023 lists a source at every use, 2024 and modern when its copy
is made, once per backend.  Which copies a split *uses* is the same for all and decides what is copied at run time.
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
from ggjit.sched.columns import (
    BACKEND,
    BITS,
    COLUMNS,
    COPY,
    ID,
    IS_COMPUTE,
    IS_INPUT,
    IS_LEAF,
    IS_SHARED,
    IS_VIEW_OP,
    IS_WEIGHT,
    IS_WRITTEN,
    MEM,
    NBYTES,
    NONE,
    OWN,
    S_BACKEND,
    S_END,
    S_INPUT0,
    S_N_INPUTS,
    S_START,
    SPLIT_WORDS,
    SRC,
    SRC_END,
    UPDATES,
    VIEW,
)
from ggjit.sched.repair import memory_of, updated

# copies: rows of 4 words; uses: rows of 3 words
K_SRC, K_BACKEND, K_SPLIT, K_KIND, COPY_WORDS = 0, 1, 2, 3, 4
U_SPLIT, U_COPY, U_REFRESH, USE_WORDS = 0, 1, 2, 3
TRANSIENT, KEPT = 0, 1          # K_KIND: memory reused after the last use, or held between runs


@inlined
def _readable(w, m, bufts, reads, n_bufts, s, b):
    """Can backend b read tensor s?  What is computed in place lies where its base does (the rules ask its backend)."""
    k = memory_of(w, m, bufts, w[VIEW * m + s] if w[VIEW * m + s] >= 0 else s)
    return k >= 0 and reads[b * n_bufts + k] != 0


@inlined
def needs_copy(w, m, bufts, reads, n_bufts, rule, snapshot, s, b):
    """Must backend b read a copy of tensor s?  snapshot[b]: inputs are copied so that the user may overwrite them."""
    if not _readable(w, m, bufts, reads, n_bufts, s, b):
        return True
    base = w[VIEW * m + s] if w[VIEW * m + s] >= 0 else s
    bits = w[BITS * m + base]
    if snapshot[b] and bits & IS_LEAF and bits & IS_INPUT and not bits & IS_WRITTEN:
        return True
    # where two backends work on one memory, a copy would miss what the other does to the original
    return rule < 2 and w[BACKEND * m + s] != b and not bits & IS_SHARED


@inlined
def _wants_new_split(w, m, bufts, reads, n_bufts, i, b):
    """A weight has to be copied: with a split of its own, the memory of earlier ones can be reused."""
    for j in range(w[SRC_END * m + i]):
        s = w[SRC * m + i * MAX_SRC + j]
        if s >= 0 and w[OWN * m + s] >= 0 and w[BITS * m + s] & IS_WEIGHT and w[BACKEND * m + s] != b and \
                not _readable(w, m, bufts, reads, n_bufts, s, b):
            return True
    return False


@inlined
def _first(w, m, n_nodes, rule):
    """The node that names the first split's backend."""
    for i in range(n_nodes):
        if (w[VIEW * m + i] < 0) if rule == 0 else not w[BITS * m + i] & IS_VIEW_OP:
            return i
    return 0


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64)")
def split(ws, m, n_nodes, rule, bufts, reads, n_bufts, nb, snapshot, splits, inputs, copies, uses, scratch, counts):
    """Cut the graph.  Room: splits n_nodes + 1 rows, inputs, copies and uses n_nodes * MAX_SRC rows;
    scratch: 2 * m * nb words.

    counts returns the numbers of splits, inputs, copies, uses, and the bytes of the listed inputs (ggml's count).
    """
    w = i64s(ws, COLUMNS * m)
    bt, rd, snap = i64s(bufts, nb), i64s(reads, nb * n_bufts), i64s(snapshot, nb)
    sp, inp = i64s(splits, SPLIT_WORDS * (n_nodes + 1)), i64s(inputs, n_nodes * MAX_SRC)
    cp, us = i64s(copies, COPY_WORDS * n_nodes * MAX_SRC), i64s(uses, USE_WORDS * n_nodes * MAX_SRC)
    n_in, n_cp, n_us, nbytes = 0, 0, 0, 0
    copy_of = i64s(scratch, 2 * m * nb)                 # [tensor, backend] -> copy; then the split that used it last
    for k in range(2 * m * nb):
        copy_of[k] = -1
    used = copy_of[m * nb:]
    k = 0
    cur = w[BACKEND * m + _first(w, m, n_nodes, rule)]
    sp[S_BACKEND] = cur
    sp[S_START] = 0
    sp[S_INPUT0] = 0
    for i in range(n_nodes):
        if w[BITS * m + i] & IS_VIEW_OP:
            continue
        b = w[BACKEND * m + i]
        if b != cur or (rule == 2 and n_in > sp[SPLIT_WORDS * k + S_INPUT0] and
                        _wants_new_split(w, m, bt, rd, n_bufts, i, b)):
            sp[SPLIT_WORDS * k + S_END] = i
            sp[SPLIT_WORDS * k + S_N_INPUTS] = n_in - sp[SPLIT_WORDS * k + S_INPUT0]
            k += 1
            sp[SPLIT_WORDS * k + S_BACKEND] = b
            sp[SPLIT_WORDS * k + S_START] = i
            sp[SPLIT_WORDS * k + S_INPUT0] = n_in
            cur = b
        for j in range(w[SRC_END * m + i]):
            s = w[SRC * m + i * MAX_SRC + j]
            if s < 0 or s == i or not needs_copy(w, m, bt, rd, n_bufts, rule, snap, s, b):
                continue
            c = copy_of[s * nb + b]
            if c < 0 or rule == 0:
                inp[n_in] = s
                n_in += 1
                nbytes += w[NBYTES * m + s]
            if c < 0:
                c = n_cp
                copy_of[s * nb + b] = c
                cp[COPY_WORDS * c + K_SRC] = s
                cp[COPY_WORDS * c + K_BACKEND] = b
                cp[COPY_WORDS * c + K_SPLIT] = k
                cp[COPY_WORDS * c + K_KIND] = TRANSIENT
                n_cp += 1
            if used[s * nb + b] != k:
                used[s * nb + b] = k
                us[USE_WORDS * n_us + U_SPLIT] = k
                us[USE_WORDS * n_us + U_COPY] = c
                us[USE_WORDS * n_us + U_REFRESH] = cp[COPY_WORDS * c + K_SPLIT] != k
                n_us += 1
            w[COPY * m + i * MAX_SRC + j] = c
    sp[SPLIT_WORDS * k + S_END] = n_nodes
    sp[SPLIT_WORDS * k + S_N_INPUTS] = n_in - sp[SPLIT_WORDS * k + S_INPUT0]
    cnt = i64s(counts, 5)
    cnt[0], cnt[1], cnt[2], cnt[3], cnt[4] = k + 1, n_in, n_cp, n_us, nbytes
    return 0


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64)")
def judge_copies(ws, m, n_nodes, splits, n_splits, copies, n_copies, uses, n_uses, scratch, keep_weights):
    """Which copies are kept between runs, and which later uses must look again because the original is written.

    A copy of a leaf with memory of its own that no node of this graph writes is kept (weights only on request: they
    are large).  scratch: m + n_splits + 1 words; its first m words return, per base, whether a node writes it.
    """
    w, sp = i64s(ws, COLUMNS * m), i64s(splits, SPLIT_WORDS * n_splits)
    cp, us = i64s(copies, COPY_WORDS * n_copies), i64s(uses, USE_WORDS * n_uses)
    last = i64s(scratch, m)                             # last node that writes the base in place, -1
    for i in range(m):
        last[i] = -1
    for i in range(n_nodes):
        r = w[VIEW * m + i]
        if w[BITS * m + i] & IS_COMPUTE and (r >= 0 or w[OWN * m + i] >= 0):
            last[r if r >= 0 else i] = i
        if w[BITS * m + i] >> UPDATES:
            for j in range(w[SRC_END * m + i]):
                if updated(w, m, i, j) >= 0:
                    last[updated(w, m, i, j)] = i
    for c in range(n_copies):
        s = cp[COPY_WORDS * c + K_SRC]
        r = w[VIEW * m + s] if w[VIEW * m + s] >= 0 else s
        big = w[BITS * m + r] & IS_WEIGHT and w[OWN * m + r] >= 0 and not keep_weights
        if w[BITS * m + r] & IS_LEAF and last[r] < 0 and not big:
            cp[COPY_WORDS * c + K_KIND] = KEPT
    for u in range(n_uses):
        s = cp[COPY_WORDS * us[USE_WORDS * u + U_COPY] + K_SRC]
        r = w[VIEW * m + s] if w[VIEW * m + s] >= 0 else s
        made = sp[SPLIT_WORDS * cp[COPY_WORDS * us[USE_WORDS * u + U_COPY] + K_SPLIT] + S_START]
        us[USE_WORDS * u + U_REFRESH] = us[USE_WORDS * u + U_REFRESH] and last[r] >= made
    return 0


@inlined
def _copy_row(table, dst, t, id_):
    """What the planner reads of a row: no parameters."""
    d, s = t * T_WORDS, id_ * T_WORDS
    for k in range(T_PARAMS):
        dst[d + k] = table[s + k]
    for k in range(T_SRC, T_BUFFER + 1):
        dst[d + k] = table[s + k]


@inlined
def _copied_row(w, m, d, cp, c, row, kept):
    """Row of a copy: the layout of its original, no op, no sources."""
    r = row * T_WORDS
    _copy_row(d, d, row, cp[COPY_WORDS * c + K_SRC])
    d[r + T_OP] = 0
    d[r + T_VIEW_SRC] = NONE
    d[r + T_VIEW_OFFS] = 0
    d[r + T_BUFFER] = -1
    d[r + T_FLAGS] = FLAG_OUTPUT | FLAG_INPUT if kept else 0
    for j in range(MAX_SRC):
        d[r + T_SRC + j] = NONE


@inlined
def _marker(w, m, d, row, s, src0, src1):
    """A view of tensor s without op that keeps src0 and src1 alive up to here."""
    r = row * T_WORDS
    _copy_row(d, d, row, s)
    base = w[VIEW * m + s]
    d[r + T_OP] = 0
    d[r + T_FLAGS] = 0
    d[r + T_BUFFER] = -1
    d[r + T_VIEW_OFFS] = d[s * T_WORDS + T_VIEW_OFFS] if base >= 0 else 0
    d[r + T_VIEW_SRC] = base if base >= 0 else s
    for j in range(MAX_SRC):
        d[r + T_SRC + j] = NONE
    d[r + T_SRC] = src0
    d[r + T_SRC + 1] = src1


@inlined
def _stay_at_home(w, m, d, slots, i):
    """No computing in place in the memory of another backend: others count on a result being in its own backend's.

    A source that is named twice is never worked on in place.
    """
    end = w[SRC_END * m + i]
    for j in range(w[SRC_END * m + i]):
        s = w[SRC * m + i * MAX_SRC + j]
        if s < 0 or w[COPY * m + i * MAX_SRC + j] >= 0 or end == MAX_SRC:
            continue
        base = w[VIEW * m + s] if w[VIEW * m + s] >= 0 else s
        if slots[w[BACKEND * m + base]] != slots[w[BACKEND * m + i]]:
            d[i * T_WORDS + T_SRC + end] = s
            end += 1


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64)")
def planner_graph(table, ws, m, n_nodes, slots, splits, n_splits, copies, n_copies, uses, n_uses, n_instances, out,
                  order, leafs, counts):
    """A private table for the memory planner, so that the user's own stays as it is.

    Rows: the m tensors, then one row per copy (n_instances rows each for pipelining), then two markers per use.  A
    marker is a view of the original that keeps it alive until it was copied; row numbers take the place of ids.

        order    [marker x] [copy x] node node | [marker y] [copy y] node ...      kept copies are leafs

    slots[b]: number of the memory that backend b computes in.

    A copied view may itself stand inside the split that reads the copy.  Then the first marker holds on to its base,
    and a second one at the end of the split gives the view back.

    counts returns how many entries order and leafs have.
    """
    t, w = i64s(table, 1 << 40), i64s(ws, COLUMNS * m)
    sp, cp = i64s(splits, SPLIT_WORDS * n_splits), i64s(copies, COPY_WORDS * n_copies)
    us = i64s(uses, USE_WORDS * n_uses)
    first_marker = m + n_copies * n_instances
    n_rows = first_marker + 2 * n_uses
    d, o, lf = i64s(out, n_rows * T_WORDS), i64s(order, n_rows), i64s(leafs, n_rows)
    home = i64s(slots, 1 << 20)
    n, n_lf = 0, 0
    for i in range(m):
        _copy_row(t, d, i, w[ID * m + i])
        r = i * T_WORDS
        d[r + T_VIEW_SRC] = w[VIEW * m + i]
        base = w[VIEW * m + i] if w[VIEW * m + i] >= 0 else i
        # leaves have memory of their own, or get it before anything is computed
        d[r + T_BUFFER] = 0 if w[MEM * m + i] >= 0 or w[BITS * m + base] & IS_LEAF else -1
        for j in range(MAX_SRC):
            c = w[COPY * m + i * MAX_SRC + j]
            d[r + T_SRC + j] = w[SRC * m + i * MAX_SRC + j] if c < 0 else m + c * n_instances
        if w[BITS * m + i] & IS_COMPUTE:
            _stay_at_home(w, m, d, home, i)
        if i >= n_nodes:
            lf[n_lf] = i
            n_lf += 1
    for c in range(n_copies):
        kept = cp[COPY_WORDS * c + K_KIND] == KEPT or n_instances > 1
        for k in range(n_instances):
            row = m + c * n_instances + k
            _copied_row(w, m, d, cp, c, row, kept)
            if kept:
                lf[n_lf] = row
                n_lf += 1
    u = 0
    for k in range(n_splits):
        u0 = u
        start, end = sp[SPLIT_WORDS * k + S_START], sp[SPLIT_WORDS * k + S_END]
        while u < n_uses and us[USE_WORDS * u + U_SPLIT] == k:
            c = us[USE_WORDS * u + U_COPY]
            s = cp[COPY_WORDS * c + K_SRC]
            first = cp[COPY_WORDS * c + K_SPLIT] == k
            if first or us[USE_WORDS * u + U_REFRESH]:
                base = w[VIEW * m + s] if w[VIEW * m + s] >= 0 else s
                inside = start <= s < end
                row = first_marker + 2 * u
                _marker(w, m, d, row, s, base, NONE if inside or s == base else s)
                o[n] = row
                n += 1
                if first and cp[COPY_WORDS * c + K_KIND] == TRANSIENT and n_instances == 1:
                    o[n] = m + c
                    n += 1
            u += 1
        for i in range(start, end):
            o[n] = i
            n += 1
        for v in range(u0, u):
            s = cp[COPY_WORDS * us[USE_WORDS * v + U_COPY] + K_SRC]
            if start <= s < end:
                _marker(w, m, d, first_marker + 2 * v + 1, s, s, NONE)
                o[n] = first_marker + 2 * v + 1
                n += 1
    cnt = i64s(counts, 2)
    cnt[0], cnt[1] = n, n_lf
    return 0
