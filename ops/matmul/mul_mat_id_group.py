"""Columns of a mixture-of-experts product sorted by expert, so that each expert's weights are read once.

A pair is a (used expert, token): number u + n_used * token.  A counting sort by the first thread leaves in work memory:

    word   0       1         2         8 ..        8 + E+1 ..   ..            ..
           status  n_active  n_panels  starts      experts      first panels  pairs
                                       [E + 1]     [E]          [E + 1]       [P], those of expert e in
                                       in pairs    in use       (tile only)   starts[e] .. starts[e+1]
"""
from ggjit.ops.core.record import BAD_INDEX, OK
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mem import ld_i32, ld_i64, st_i64, zero_bytes
from ggjit.ops.native.node import addr, barrier, fail, nb, ne, work

HEAD = 8                                # words before the lists


def group_nbytes(n_experts, n_pairs):
    """Bytes of the lists, a multiple of 64."""
    return (8 * (HEAD + 3 * n_experts + 2 + n_pairs) + 63) // 64 * 64


@inline
def lists_end(node, n_experts, n_pairs):
    """Address behind the lists: work memory the kernel lays out itself."""
    return work(node) + (8 * (HEAD + 3 * n_experts + 2 + n_pairs) + 63) // 64 * 64


@inline
def starts_of(node):
    return work(node) + 8 * HEAD


@inline
def experts_of(node, n_experts):
    return starts_of(node) + 8 * (n_experts + 1)


@inline
def panels_of(node, n_experts):
    return experts_of(node, n_experts) + 8 * n_experts


@inline
def pairs_of(node, n_experts):
    return panels_of(node, n_experts) + 8 * (n_experts + 1)


@inline
def n_active(node):
    return ld_i64(work(node) + 8)


@inline
def n_panels(node):
    return ld_i64(work(node) + 16)


@inline
def expert_id(ids, u, token):
    return ld_i32(addr(ids) + u * nb(ids, 0) + token * nb(ids, 1))


@inline
def check_experts(node, ids, n_experts):
    """OK, or BAD_INDEX where an expert of the first token is none.  Asked by every thread: all stop together."""
    for s in range(ne(ids, 0)):
        e = expert_id(ids, s, 0)
        if e < 0 or e >= n_experts:
            return fail(node, BAD_INDEX, e)
    return OK


@inline
def _sort(node, ids, n_experts, panel_columns):
    """The lists above; BAD_INDEX with the value noted in the node for an id outside [0, n_experts)."""
    n_used, tokens = ne(ids, 0), ne(ids, 1)
    starts, experts, panels = starts_of(node), experts_of(node, n_experts), panels_of(node, n_experts)
    pairs = pairs_of(node, n_experts)
    zero_bytes(starts, 8 * (n_experts + 1))
    for t in range(tokens):
        for s in range(n_used):
            e = expert_id(ids, s, t)
            if e < 0 or e >= n_experts:
                return fail(node, BAD_INDEX, e)
            st_i64(starts + 8 * e + 8, ld_i64(starts + 8 * e + 8) + 1)
    active, panel = 0, 0
    for e in range(n_experts):
        n, first = ld_i64(starts + 8 * e + 8), ld_i64(starts + 8 * e)
        st_i64(starts + 8 * e + 8, first + n)
        st_i64(panels + 8 * e, panel)
        panel += (n + panel_columns - 1) // panel_columns
        if n > 0:
            st_i64(experts + 8 * active, e)
            active += 1
    st_i64(panels + 8 * n_experts, panel)
    for t in range(tokens):                         # starts[e] walks to the end of e's pairs ...
        for s in range(n_used):
            e = expert_id(ids, s, t)
            at = ld_i64(starts + 8 * e)
            st_i64(pairs + 8 * at, s + n_used * t)
            st_i64(starts + 8 * e, at + 1)
    for i in range(n_experts):                      # ... which is the start of e + 1
        e = n_experts - i
        st_i64(starts + 8 * e, ld_i64(starts + 8 * e - 8))
    st_i64(starts, 0)
    st_i64(work(node) + 8, active)
    st_i64(work(node) + 16, panel)
    return OK


@inline
def group(node, ids, n_experts, panel_columns, ith, nth, sync):
    """Sort on the first thread while the others wait.  Every thread gets the same status, so all stop together."""
    if ith == 0:
        st_i64(work(node), _sort(node, ids, n_experts, panel_columns))
    barrier(sync, nth)
    return ld_i64(work(node))
