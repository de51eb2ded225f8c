"""The aliasing pass: which tensors share memory, and when their memory is allocated and freed.

ggml's graph allocator is two things in one loop.  This is the first: reference counts of children and views, in-place
reuse, flags.  It never looks at the free list, so its result, a list of events (take, give back, trim) over
*allocations*, may be fed to any offset planner.  The second, the free list, is `free_list.py`.

Three rules:
    MODERN   current ggml.  A view is never "own", so ops behind a reshape never work in place.
    VIEWS    MODERN with that branch alive: a whole view at offset 0 whose root has no other user may be reused.
    2023     `legacy/alias_2023.py`: the allocator of ggml's November 2023 sources.
"""

from ggjit.alloc.ggml import graph_record as col
from ggjit.alloc.ggml.graph_record import base_of, graph_at, pad, put_event
from ggjit.ops.core import record as rec
from ggjit.ops.native.jit import exact, native

MODERN, THROUGH_VIEWS = 0, 1

# why a node was not computed in place; of several sources, the one that met most conditions decides
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


@exact
def same_layout(g, a, b):
    """Type, ne and nb of table rows a and b are equal."""
    t, a, b = g.table, a * rec.T_WORDS, b * rec.T_WORDS
    if t[a + rec.T_TYPE] != t[b + rec.T_TYPE]:
        return False
    for k in range(4):
        if t[a + rec.T_NE + k] != t[b + rec.T_NE + k] or t[a + rec.T_NB + k] != t[b + rec.T_NB + k]:
            return False
    return True


@exact
def new_allocation(g, i, buft, size, step):
    """The next allocation, for tensor i; appends its event."""
    a = g.count.allocations
    g.count.allocations += 1
    g.allocation[a].first = i
    step = max(step, 0)
    g.allocation[a].lo = step
    g.allocation[a].hi = g.n_steps
    g.allocation[a].size = size
    g.allocation[a].left = size
    g.allocation[a].buft = buft
    g.tensor[i].alloc = a
    put_event(g, col.EV_ALLOC, a, size, step)


@exact
def _take_over(g, i, root, step):
    """Node i takes over root's allocation; bytes beyond its own size are given back."""
    a = g.tensor[root].alloc
    g.tensor[i].alloc = a
    g.tensor[root].own = 0
    g.tensor[i].cause = IN_PLACE
    g.tensor[i].cause_src = root
    keep = pad(g.tensor[i].size, g.alignment[g.allocation[a].buft])
    if keep < g.allocation[a].left:
        put_event(g, col.EV_TRIM, a, keep, max(step, 0))
        g.allocation[a].left = keep


@exact
def _reuse(g, i, p, step):
    """Try to compute node i in the memory of its source p."""
    root = base_of(g, p)
    cause = SRC_IS_VIEW
    if g.tensor[p].view < col.NONE or not g.tensor[root].own:
        cause = SRC_EXTERNAL
    elif (g.tensor[p].flags | g.tensor[root].flags) & col.OUTPUT:
        cause = SRC_OUTPUT
    elif not same_layout(g, g.tensor[i].id, g.tensor[p].id):
        cause = SRC_LAYOUT
    elif g.tensor[p].kids != 1 or (step < 0 and g.tensor[p].uses != 1):
        cause = SRC_SHARED
    elif g.tensor[p].views != 0:
        cause = SRC_VIEWED
    elif root == p:
        cause = IN_PLACE
    elif g.tensor[root].views != 1 or g.tensor[root].kids != 0 or g.tensor[p].view_offs != 0:
        cause = SRC_VIEWED
    elif g.rule == THROUGH_VIEWS:
        a = g.tensor[root].alloc
        if pad(g.tensor[i].size, g.alignment[g.allocation[a].buft]) <= g.allocation[a].left:
            cause = IN_PLACE
    if cause == IN_PLACE:
        _take_over(g, i, root, step)
        return True
    if cause > g.tensor[i].cause:                # the cause of the source that met most conditions is kept
        g.tensor[i].cause = cause
        g.tensor[i].cause_src = p
    return False


@exact
def _allocate(g, i, buft, step):
    flags = g.tensor[i].flags
    if g.tensor[i].own or flags & col.EXTERNAL or g.tensor[i].view != col.NONE:
        return
    g.tensor[i].own = 1
    if i < g.n_nodes:
        g.tensor[i].cause = NO_SOURCE if flags & col.CAN_INPLACE else OP_CANNOT
        if flags & col.CAN_INPLACE:
            for j in range(rec.MAX_SRC):
                p = g.tensor[i].src[j]
                if p >= 0 and _reuse(g, i, p, step):
                    return
    new_allocation(g, i, buft, pad(g.tensor[i].size, g.alignment[buft]), step)


@exact
def _free(g, i, step):
    """Give tensor i's memory back, unless it is an output or another node took it over."""
    if g.tensor[i].flags & col.OUTPUT or not g.tensor[i].own:
        return
    a = g.tensor[i].alloc
    g.tensor[i].own = 0
    g.allocation[a].hi = step + 1
    put_event(g, col.EV_FREE, a, g.allocation[a].left, step)


@exact
def _count(g):
    """Children with multiplicity, views of nodes; input-flagged tensors are allocated as they are met.

    At that moment (step -1) counts are partial: ggml may hand a tensor with later users to an input-flagged node that
    works in place, and corrupts it.  USES prevents exactly that.
    """
    for i in range(g.n_nodes):
        if g.tensor[i].view >= 0:
            g.tensor[g.tensor[i].view].uses += 1
        for j in range(rec.MAX_SRC):
            s = g.tensor[i].src[j]
            if s >= 0:
                g.tensor[s].uses += 1
    for i in range(g.n_nodes):
        root = g.tensor[i].view
        if root >= 0 and not g.tensor[i].flags & col.MARKER:
            g.tensor[root].views += 1
        for j in range(-1, rec.MAX_SRC):            # the node itself, then its sources
            s = g.tensor[i].src[j] if j >= 0 else i
            if s < 0:
                continue
            if j >= 0:
                g.tensor[s].kids += 1
            if g.tensor[s].flags & col.INPUT:
                _allocate(g, s, g.tensor[i].buft, -1)


@exact
def _release(g, p, step):
    """Count one use of tensor p less, and free it after the last."""
    g.tensor[p].kids -= 1
    if g.tensor[p].kids != 0 or g.tensor[p].views != 0:
        return
    root = g.tensor[p].view
    if root >= 0:
        g.tensor[root].views -= 1
        if g.tensor[root].views == 0 and g.tensor[root].kids == 0:
            _free(g, root, step)
    elif root == col.NONE:
        _free(g, p, step)


@native("i64(i64)")
def alias_modern(address):
    """Events of current ggml's graph allocator, for a GRAPH record."""
    g = graph_at(address)
    g.count.allocations = g.count.events = 0
    for i in range(g.m):
        g.tensor[i].cause = NOTHING_TO_PLACE
        g.tensor[i].cause_src = col.NONE
        g.tensor[i].uses = 0
    for i in range(g.n_nodes, g.m):                 # ggml forgets views among the leafs, and frees under them
        if g.tensor[i].view >= 0:
            g.tensor[g.tensor[i].view].views += 1
        if not g.tensor[i].flags & col.EXTERNAL and g.tensor[i].view == col.NONE:
            g.tensor[i].own = 1
            buft = g.tensor[i].buft
            new_allocation(g, i, buft, pad(g.tensor[i].size, g.alignment[buft]), 0)
    _count(g)
    for i in range(g.n_nodes):
        for j in range(rec.MAX_SRC + 1):            # sources, then the node itself
            s = g.tensor[i].src[j] if j < rec.MAX_SRC else i
            if s >= 0:
                _allocate(g, s, g.tensor[i].buft, i)
        for j in range(rec.MAX_SRC):
            s = g.tensor[i].src[j]
            if s >= 0:
                _release(g, s, i)
    return col.OK
