"""The aliasing pass: which tensors share memory, and when memory is taken and given back.

ggml's graph allocator is two things in one loop.  This is the first: reference counts of children and views, in-place
reuse, flags.  It never looks at the free list, so its result, a list of events (take, give back, trim) over
*allocations*, may be fed to any offset planner.  The second, the free list, is `free_list.py`.

Three rules:
    MODERN   current ggml.  A view is never "own", so ops behind a reshape never work in place.
    VIEWS    MODERN with that branch alive: a whole view at offset 0 whose root has no other user may be reused.
    2023     `legacy/alias_2023.py`: the allocator of ggml's November 2023 sources.
"""

from ggjit.alloc.ggml import columns as col
from ggjit.alloc.ggml.columns import base_of, pad, put_event
from ggjit.ops.core import record as rec
from ggjit.ops.native.jit import i64s, inlined, native

MODERN, THROUGH_VIEWS = 0, 1

# why a node was not computed in place: the source that came nearest decides
(IN_PLACE, NOTHING_TO_PLACE, OP_CANNOT, NO_SOURCE, SRC_EXTERNAL, SRC_OUTPUT, SRC_LAYOUT, SRC_SHARED, SRC_VIEWED,
 SRC_IS_VIEW) = range(10)
CAUSE_TEXT = (
    "computed in place",
    "a view or a tensor placed elsewhere: nothing to place",
    "this op cannot work in place",
    "no source has memory in this plan",
    "the source lives in memory of its own (weight, cache, input)",
    "the source is an output of the graph",
    "the source has another type, shape or strides",
    "the source is still needed by another node",
    "the source has other views that are still needed",
    "the source is a view (ggml never reuses through views; planner 'best' does where it is safe)",
)


@inlined
def same_layout(t, a, b):
    """Type, ne and nb of table rows a and b are equal."""
    a *= rec.T_WORDS
    b *= rec.T_WORDS
    if t[a + rec.T_TYPE] != t[b + rec.T_TYPE]:
        return False
    for k in range(4):
        if t[a + rec.T_NE + k] != t[b + rec.T_NE + k] or t[a + rec.T_NB + k] != t[b + rec.T_NB + k]:
            return False
    return True


@inlined
def new_allocation(w, m, cnt, i, buft, size, step, n_steps):
    """Allocation number cnt[0] for tensor i; appends its event."""
    a = cnt[0]
    cnt[0] += 1
    w[col.A_FIRST * m + a] = i
    step = max(step, 0)
    w[col.A_LO * m + a] = step
    w[col.A_HI * m + a] = n_steps
    w[col.A_SIZE * m + a] = size
    w[col.A_CUR * m + a] = size
    w[col.A_BUFT * m + a] = buft
    w[col.ALLOC * m + i] = a
    put_event(w, m, cnt[1], col.EV_ALLOC, a, size, step)
    cnt[1] += 1


@inlined
def _take_over(w, m, cnt, i, root, alignment, step):
    """Node i gets root's allocation; what it does not need is given back."""
    a = w[col.ALLOC * m + root]
    w[col.ALLOC * m + i] = a
    w[col.OWN * m + root] = 0
    w[col.CAUSE * m + i] = IN_PLACE
    w[col.CAUSE_SRC * m + i] = root
    keep = pad(w[col.SIZE * m + i], alignment[w[col.A_BUFT * m + a]])
    if keep < w[col.A_CUR * m + a]:
        put_event(w, m, cnt[1], col.EV_TRIM, a, keep, max(step, 0))
        cnt[1] += 1
        w[col.A_CUR * m + a] = keep


@inlined
def _reuse(t, w, m, cnt, i, p, rule, alignment, step):
    """Try to compute node i in the memory of its source p."""
    root = base_of(w, m, p)
    cause = SRC_IS_VIEW
    if w[col.VIEW * m + p] < col.NONE or not w[col.OWN * m + root]:
        cause = SRC_EXTERNAL
    elif (w[col.FLAGS * m + p] | w[col.FLAGS * m + root]) & col.OUTPUT:
        cause = SRC_OUTPUT
    elif not same_layout(t, w[col.ID * m + i], w[col.ID * m + p]):
        cause = SRC_LAYOUT
    elif w[col.KIDS * m + p] != 1 or (step < 0 and w[col.USES * m + p] != 1):
        cause = SRC_SHARED
    elif w[col.VIEWS * m + p] != 0:
        cause = SRC_VIEWED
    elif root == p:
        cause = IN_PLACE
    elif w[col.VIEWS * m + root] != 1 or w[col.KIDS * m + root] != 0 or w[col.VOFFS * m + p] != 0:
        cause = SRC_VIEWED
    elif rule == THROUGH_VIEWS:
        a = w[col.ALLOC * m + root]
        if pad(w[col.SIZE * m + i], alignment[w[col.A_BUFT * m + a]]) <= w[col.A_CUR * m + a]:
            cause = IN_PLACE
    if cause == IN_PLACE:
        _take_over(w, m, cnt, i, root, alignment, step)
        return True
    if cause > w[col.CAUSE * m + i]:                # the source that came nearest is blamed
        w[col.CAUSE * m + i] = cause
        w[col.CAUSE_SRC * m + i] = p
    return False


@inlined
def _allocate(t, w, m, cnt, i, buft, rule, alignment, step, n_nodes, n_steps):
    flags = w[col.FLAGS * m + i]
    if w[col.OWN * m + i] or flags & col.EXTERNAL or w[col.VIEW * m + i] != col.NONE:
        return
    w[col.OWN * m + i] = 1
    if i < n_nodes:
        w[col.CAUSE * m + i] = NO_SOURCE if flags & col.CAN_INPLACE else OP_CANNOT
        if flags & col.CAN_INPLACE:
            for j in range(rec.MAX_SRC):
                p = w[col.SRC * m + i * rec.MAX_SRC + j]
                if p >= 0 and _reuse(t, w, m, cnt, i, p, rule, alignment, step):
                    return
    new_allocation(w, m, cnt, i, buft, pad(w[col.SIZE * m + i], alignment[buft]), step, n_steps)


@inlined
def _free(w, m, cnt, i, step):
    """Give tensor i's memory back, unless it is an output (or was handed on)."""
    if w[col.FLAGS * m + i] & col.OUTPUT or not w[col.OWN * m + i]:
        return
    a = w[col.ALLOC * m + i]
    w[col.OWN * m + i] = 0
    w[col.A_HI * m + a] = step + 1
    put_event(w, m, cnt[1], col.EV_FREE, a, w[col.A_CUR * m + a], step)
    cnt[1] += 1


@inlined
def _count(t, w, m, cnt, n_nodes, rule, alignment, n_steps):
    """Children with multiplicity, views of nodes; input-flagged tensors are allocated as they are met.

    At that moment (step -1) counts are partial: ggml may hand a tensor with later users to an input-flagged node that
    works in place, and corrupts it.  USES prevents exactly that.
    """
    for i in range(n_nodes):
        if w[col.VIEW * m + i] >= 0:
            w[col.USES * m + w[col.VIEW * m + i]] += 1
        for j in range(rec.MAX_SRC):
            s = w[col.SRC * m + i * rec.MAX_SRC + j]
            if s >= 0:
                w[col.USES * m + s] += 1
    for i in range(n_nodes):
        root = w[col.VIEW * m + i]
        if root >= 0 and not w[col.FLAGS * m + i] & col.MARKER:
            w[col.VIEWS * m + root] += 1
        for j in range(-1, rec.MAX_SRC):            # the node itself, then its sources
            s = w[col.SRC * m + i * rec.MAX_SRC + j] if j >= 0 else i
            if s < 0:
                continue
            if j >= 0:
                w[col.KIDS * m + s] += 1
            if w[col.FLAGS * m + s] & col.INPUT:
                _allocate(t, w, m, cnt, s, w[col.BUFT * m + i], rule, alignment, -1, n_nodes, n_steps)


@inlined
def _release(w, m, cnt, p, step):
    """One use of p is over."""
    w[col.KIDS * m + p] -= 1
    if w[col.KIDS * m + p] != 0 or w[col.VIEWS * m + p] != 0:
        return
    root = w[col.VIEW * m + p]
    if root >= 0:
        w[col.VIEWS * m + root] -= 1
        if w[col.VIEWS * m + root] == 0 and w[col.KIDS * m + root] == 0:
            _free(w, m, cnt, root, step)
    elif root == col.NONE:
        _free(w, m, cnt, p, step)


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64, i64)")
def alias_modern(table, n_rows, ws, m, n_nodes, rule, alignments, n_buffers, counts):
    """Events of current ggml's graph allocator.  counts[0..1] return the numbers of allocations and of events."""
    t = i64s(table, n_rows * rec.T_WORDS)
    w = i64s(ws, col.COLUMNS * m)
    alignment = i64s(alignments, n_buffers)
    cnt = i64s(counts, 2)
    cnt[0] = 0
    cnt[1] = 0
    n_steps = max(n_nodes, 1)
    for i in range(m):
        w[col.CAUSE * m + i] = NOTHING_TO_PLACE
        w[col.CAUSE_SRC * m + i] = col.NONE
        w[col.USES * m + i] = 0
    for i in range(n_nodes, m):                 # ggml forgets views among the leafs, and frees under them
        if w[col.VIEW * m + i] >= 0:
            w[col.VIEWS * m + w[col.VIEW * m + i]] += 1
        if not w[col.FLAGS * m + i] & col.EXTERNAL and w[col.VIEW * m + i] == col.NONE:
            w[col.OWN * m + i] = 1
            buft = w[col.BUFT * m + i]
            new_allocation(w, m, cnt, i, buft, pad(w[col.SIZE * m + i], alignment[buft]), 0, n_steps)
    _count(t, w, m, cnt, n_nodes, rule, alignment, n_steps)
    for i in range(n_nodes):
        for j in range(rec.MAX_SRC + 1):            # sources, then the node itself
            s = w[col.SRC * m + i * rec.MAX_SRC + j] if j < rec.MAX_SRC else i
            if s >= 0:
                _allocate(t, w, m, cnt, s, w[col.BUFT * m + i], rule, alignment, i, n_nodes, n_steps)
        for j in range(rec.MAX_SRC):
            s = w[col.SRC * m + i * rec.MAX_SRC + j]
            if s >= 0:
                _release(w, m, cnt, s, i)
    return col.OK
