"""Splits: consecutive nodes on one backend, and the tensors that must be copied there.

    nodes     a  b  c | d  e | f           |: the backend changes
    splits    0: GPU    1: CPU  2: GPU
    inputs              c        x, e      tensors of another backend that must be copied before the split starts

Which copies are *listed* follows the chosen version: 2023 lists a source at every use, 2024 and modern when its copy
is made, once per backend.  Which copies a split *uses* is the same for all and decides what is copied at run time.
"""
from ggjit.ops.native.jit import inlined, native
from ggjit.sched import records as rec
from ggjit.sched.records import base_of, can_read, memory_of, opened, updated


@inlined
def _readable(g, s, b):
    """Can backend b read tensor s?  What is computed in place lies where its base does (the rules ask its backend)."""
    k = memory_of(g, base_of(g, s))
    return k >= 0 and can_read(g, b, k)


@inlined
def needs_copy(g, s, b):
    """Must backend b read a copy of tensor s?  snapshot[b]: inputs are copied so that the user may overwrite them."""
    if not _readable(g, s, b):
        return True
    base = base_of(g, s)
    bits = g.rows[base].bits
    if g.snapshot[b] and bits & rec.IS_LEAF and bits & rec.IS_INPUT and not bits & rec.IS_WRITTEN:
        return True
    # where two backends work on one memory, a copy would miss what the other does to the original
    return g.rule < 2 and g.rows[s].backend != b and not bits & rec.IS_SHARED


@inlined
def _wants_new_split(g, i, b):
    """A weight has to be copied: with a split of its own, the memory of earlier ones can be reused."""
    for j in range(g.rows[i].src_end):
        s = g.rows[i].src[j]
        if s >= 0 and g.rows[s].own >= 0 and g.rows[s].bits & rec.IS_WEIGHT and g.rows[s].backend != b and \
                not _readable(g, s, b):
            return True
    return False


@inlined
def _first(g):
    """The node that names the first split's backend."""
    for i in range(g.n_nodes):
        if (g.rows[i].view < 0) if g.rule == 0 else not g.rows[i].bits & rec.IS_VIEW_OP:
            return i
    return 0


@inlined
def _begin(g, k, b, i):
    """Split k begins at node i on backend b."""
    g.splits[k].backend = b
    g.splits[k].start = i
    g.splits[k].input0 = g.results[0].n_inputs


@inlined
def _end(g, k, i):
    g.splits[k].end = i
    g.splits[k].n_inputs = g.results[0].n_inputs - g.splits[k].input0


@inlined
def _copy_of(g, s, b, k, copy_of):
    """Number of the copy of tensor s on backend b, for split k; a new one is listed."""
    found, c = g.results[0], copy_of[s * g.n_backends + b]
    if c < 0 or g.rule == 0:
        g.inputs[found.n_inputs] = s
        found.n_inputs += 1
        found.listed_nbytes += g.rows[s].nbytes
    if c < 0:
        c = found.n_copies
        found.n_copies = c + 1
        copy_of[s * g.n_backends + b] = c
        g.copies[c].src = s
        g.copies[c].backend = b
        g.copies[c].split = k
        g.copies[c].kind = rec.TRANSIENT
    return c


@inlined
def _use(g, c, k):
    """Note that split k uses copy c."""
    u = g.results[0].n_uses
    g.results[0].n_uses = u + 1
    g.uses[u].split = k
    g.uses[u].copy = c
    g.uses[u].refresh = g.copies[c].split != k


@native("i64(i64)")
def split(params):
    """Part the graph into runs of nodes on one backend.

    Room: splits n_nodes + 1 records; inputs, copies and uses n_nodes * MAX_SRC + 1; scratch 2 * n * n_backends words.
    Results, 0 before: numbers of splits, inputs, copies and uses, and the bytes of the listed inputs (ggml's count).
    """
    g = opened(params)
    copy_of, n_pairs = g.scratch, g.n * g.n_backends    # [tensor, backend] -> copy
    last_used = g.scratch[n_pairs:]                     # [tensor, backend] -> the split that used it last
    for k in range(2 * n_pairs):
        copy_of[k] = -1
    k = 0
    _begin(g, k, g.rows[_first(g)].backend, 0)
    for i in range(g.n_nodes):
        if g.rows[i].bits & rec.IS_VIEW_OP:
            continue
        b = g.rows[i].backend
        if b != g.splits[k].backend or (g.rule == 2 and g.results[0].n_inputs > g.splits[k].input0
                                        and _wants_new_split(g, i, b)):
            _end(g, k, i)
            k += 1
            _begin(g, k, b, i)
        for j in range(g.rows[i].src_end):
            s = g.rows[i].src[j]
            if s >= 0 and s != i and needs_copy(g, s, b):
                c = _copy_of(g, s, b, k, copy_of)
                if last_used[s * g.n_backends + b] != k:
                    last_used[s * g.n_backends + b] = k
                    _use(g, c, k)
                g.rows[i].copy[j] = c
    _end(g, k, g.n_nodes)
    g.results[0].n_splits = k + 1
    return 0


@native("i64(i64)")
def judge_copies(params):
    """Which copies are kept between runs, and which later uses must look again because the original is written.

    A copy of a leaf with memory of its own that no node of this graph writes is kept (weights only on request: they
    are large).  The first n words of scratch return, per base, the last node that writes it, -1.
    """
    g = opened(params)
    n_copies, n_uses = g.results[0].n_copies, g.results[0].n_uses
    last = g.scratch
    for i in range(g.n):
        last[i] = -1
    for i in range(g.n_nodes):
        if g.rows[i].bits & rec.IS_COMPUTE and (g.rows[i].view >= 0 or g.rows[i].own >= 0):
            last[base_of(g, i)] = i
        if g.rows[i].bits >> rec.UPDATES:
            for j in range(g.rows[i].src_end):
                if updated(g, i, j) >= 0:
                    last[updated(g, i, j)] = i
    for c in range(n_copies):
        r = base_of(g, g.copies[c].src)
        big = g.rows[r].bits & rec.IS_WEIGHT and g.rows[r].own >= 0 and not g.keep_weights
        if g.rows[r].bits & rec.IS_LEAF and last[r] < 0 and not big:
            g.copies[c].kind = rec.KEPT
    for u in range(n_uses):
        s = g.copies[g.uses[u].copy].src
        made = g.splits[g.copies[g.uses[u].copy].split].start
        g.uses[u].refresh = g.uses[u].refresh and last[base_of(g, s)] >= made
    return 0
