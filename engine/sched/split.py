"""Splitting: runs of nodes on one backend, and what each run has to copy in.

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


@native("i64(i64)")
def split(params):
    """Part the graph into runs of nodes on one backend.

    Room: splits n_nodes + 1 records; inputs, copies and uses n_nodes * MAX_SRC + 1; scratch 2 * n * n_backends words.
    Results: numbers of splits, inputs, copies and uses, and the bytes of the listed inputs (ggml's count).
    """
    g = opened(params)
    nb = g.n_backends
    n_in, n_cp, n_us, nbytes = 0, 0, 0, 0
    copy_of = g.scratch                                 # [tensor, backend] -> copy; then the split that used it last
    for k in range(2 * g.n * nb):
        copy_of[k] = -1
    used = copy_of[g.n * nb:]
    k = 0
    cur = g.rows[_first(g)].backend
    g.splits[0].backend = cur
    g.splits[0].start = 0
    g.splits[0].input0 = 0
    for i in range(g.n_nodes):
        if g.rows[i].bits & rec.IS_VIEW_OP:
            continue
        b = g.rows[i].backend
        if b != cur or (g.rule == 2 and n_in > g.splits[k].input0 and _wants_new_split(g, i, b)):
            g.splits[k].end = i
            g.splits[k].n_inputs = n_in - g.splits[k].input0
            k += 1
            g.splits[k].backend = b
            g.splits[k].start = i
            g.splits[k].input0 = n_in
            cur = b
        for j in range(g.rows[i].src_end):
            s = g.rows[i].src[j]
            if s < 0 or s == i or not needs_copy(g, s, b):
                continue
            c = copy_of[s * nb + b]
            if c < 0 or g.rule == 0:
                g.inputs[n_in] = s
                n_in += 1
                nbytes += g.rows[s].nbytes
            if c < 0:
                c = n_cp
                copy_of[s * nb + b] = c
                g.copies[c].src = s
                g.copies[c].backend = b
                g.copies[c].split = k
                g.copies[c].kind = rec.TRANSIENT
                n_cp += 1
            if used[s * nb + b] != k:
                used[s * nb + b] = k
                g.uses[n_us].split = k
                g.uses[n_us].copy = c
                g.uses[n_us].refresh = g.copies[c].split != k
                n_us += 1
            g.rows[i].copy[j] = c
    g.splits[k].end = g.n_nodes
    g.splits[k].n_inputs = n_in - g.splits[k].input0
    found = g.results[0]
    found.n_splits = k + 1
    found.n_inputs = n_in
    found.n_copies = n_cp
    found.n_uses = n_us
    found.listed_nbytes = nbytes
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
