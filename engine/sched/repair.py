"""Settling: after the rules every node is where it can run, and where it can write what it writes.

    the rules chose a device that lacks the op                          -> another one
    a node writes memory its device cannot reach: the base of a view,   -> a device that reaches all of it, or the
      the moments that an optimizer step updates                           writers move together; else NotSupported

ggml aborts or corrupts memory there; on graphs it can compute, `settle` changes nothing.
"""
from ggjit.ops.core.record import MAX_SRC
from ggjit.ops.native.jit import inlined
from ggjit.sched.columns import (
    BACKEND,
    BAD_PIN,
    BITS,
    C_BASE,
    C_FIRST,
    C_MEMORY,
    C_UNSUPPORTED,
    CANNOT_WRITE,
    CAUSE,
    CAUSE_ARG,
    IS_COMPUTE,
    IS_LEAF,
    IS_PINNED,
    IS_SHARED,
    IS_VIEW_OP,
    IS_WRITTEN,
    MEM,
    NO_BACKEND,
    OK,
    SIG,
    SRC,
    SRC_END,
    UPDATES,
    VIEW,
)


@inlined
def set_backend(w, m, i, b, cause, arg):
    w[BACKEND * m + i] = b
    w[CAUSE * m + i] = cause
    w[CAUSE_ARG * m + i] = arg


@inlined
def source(w, m, i, j):
    return w[SRC * m + i * MAX_SRC + j]


@inlined
def memory_of(w, m, bufts, i):
    """Number of the buffer type tensor i lies in, or will lie in; -1 while undecided."""
    if w[MEM * m + i] >= 0:
        return w[MEM * m + i]
    b = w[BACKEND * m + i]
    if b < 0 and w[VIEW * m + i] >= 0:
        b = w[BACKEND * m + w[VIEW * m + i]]
    return bufts[b] if b >= 0 else -1


@inlined
def updated(w, m, i, j):
    """Local number of the base of source j if node i writes that as well, -1."""
    if w[BITS * m + i] >> (UPDATES + j) & 1 == 0:
        return -1
    s = source(w, m, i, j)
    return w[VIEW * m + s] if w[VIEW * m + s] >= 0 else s


@inlined
def _can_move(w, m, r):
    """A leaf that nobody placed, pinned or writes yet lies where its writer runs."""
    return w[MEM * m + r] < 0 and w[BITS * m + r] & (IS_LEAF | IS_PINNED | IS_WRITTEN) == IS_LEAF


@inlined
def _reaches_updated(w, m, i, b, bufts, reads, n_bufts):
    """Can backend b write all sources that node i updates?"""
    if w[BITS * m + i] >> UPDATES:
        for j in range(w[SRC_END * m + i]):
            r = updated(w, m, i, j)
            if r >= 0 and not _can_move(w, m, r):
                k = memory_of(w, m, bufts, r)
                if k >= 0 and reads[b * n_bufts + k] == 0:
                    return False
    return True


@inlined
def _mark_written(w, m, i, r):
    """Node i writes the base r."""
    w[BITS * m + r] |= IS_WRITTEN if w[BACKEND * m + i] == w[BACKEND * m + r] else IS_WRITTEN | IS_SHARED


@inlined
def _writes(w, m, bufts, i):
    """Buffer type of the memory node i writes, when that was decided before it; -1: its own backend's."""
    r = w[VIEW * m + i]
    return w[MEM * m + i] if w[MEM * m + i] >= 0 else bufts[w[BACKEND * m + r]] if r >= 0 else -1


@inlined
def _fits(w, m, i, b, k, bufts, reads, n_bufts, nb, sup):
    return sup[w[SIG * m + i] * nb + b] != 0 and (k < 0 or reads[b * n_bufts + k] != 0) and \
        _reaches_updated(w, m, i, b, bufts, reads, n_bufts)


@inlined
def _move_family(w, m, n_nodes, r, bufts, reads, n_bufts, nb, sup):
    """Put everything that computes or writes the unplaced tensor r on one backend that can do all of it."""
    for b in range(nb):
        ok = True
        for i in range(n_nodes):
            if (i == r or w[VIEW * m + i] == r) and w[BITS * m + i] & IS_COMPUTE:
                ok &= sup[w[SIG * m + i] * nb + b] != 0
                ok &= w[BACKEND * m + i] == b or not w[BITS * m + i] & IS_PINNED
        if ok and (w[BACKEND * m + r] == b or not w[BITS * m + r] & IS_PINNED):
            for i in range(n_nodes):
                if w[VIEW * m + i] == r and w[BACKEND * m + i] != b:
                    set_backend(w, m, i, b, C_MEMORY, 0)
            if w[BACKEND * m + r] != b:
                set_backend(w, m, r, b, C_MEMORY, 0)
            return True
    return False


@inlined
def _settle_updated(w, m, i, bufts, reads, n_bufts):
    """Leaves that node i updates come to its backend if they can; False: one lies out of reach."""
    for j in range(w[SRC_END * m + i]):
        r = updated(w, m, i, j)
        if r < 0:
            continue
        b, k = w[BACKEND * m + i], memory_of(w, m, bufts, r)
        if k >= 0 and reads[b * n_bufts + k] == 0:
            if not _can_move(w, m, r):
                return False
            set_backend(w, m, r, b, C_MEMORY, 0)
        _mark_written(w, m, i, r)
    return True


@inlined
def settle(w, m, n_nodes, bufts, reads, n_bufts, nb, sup, bad):
    """See the module's text.  bad[0] = local number of the node that cannot be helped."""
    for i in range(m):                                  # bases first: a view's place is its base's
        if w[BACKEND * m + i] < 0 and w[VIEW * m + i] < 0 and not w[BITS * m + i] & IS_COMPUTE:
            set_backend(w, m, i, nb - 1, C_FIRST, 0)
    for i in range(n_nodes):
        if not w[BITS * m + i] & IS_COMPUTE:
            continue
        bad[0] = i
        b = w[BACKEND * m + i]
        r = w[VIEW * m + i]
        k = _writes(w, m, bufts, i)
        if b >= 0 and _fits(w, m, i, b, k, bufts, reads, n_bufts, nb, sup):
            continue
        if w[BITS * m + i] & IS_PINNED:
            return BAD_PIN
        found = -1
        if r >= 0 and w[BACKEND * m + r] >= 0 and \
                _fits(w, m, i, w[BACKEND * m + r], k, bufts, reads, n_bufts, nb, sup):
            found = w[BACKEND * m + r]
        for a in range(nb):
            if found < 0 and _fits(w, m, i, a, k, bufts, reads, n_bufts, nb, sup):
                found = a
        if found >= 0:
            wrong_op = b >= 0 and not sup[w[SIG * m + i] * nb + b]
            set_backend(w, m, i, found, C_FIRST if b < 0 else C_UNSUPPORTED if wrong_op else C_MEMORY, 0)
            continue
        anybody = False
        for a in range(nb):
            anybody |= sup[w[SIG * m + i] * nb + a] != 0
        if not anybody:
            return NO_BACKEND
        if w[MEM * m + i] >= 0 or w[BITS * m + i] >> UPDATES or \
                not _move_family(w, m, n_nodes, r, bufts, reads, n_bufts, nb, sup):
            return CANNOT_WRITE
    for i in range(n_nodes):
        r = w[VIEW * m + i]
        if r >= 0 and w[BITS * m + i] & IS_COMPUTE:
            _mark_written(w, m, i, r)
        if w[BITS * m + i] >> UPDATES and not _settle_updated(w, m, i, bufts, reads, n_bufts):
            bad[0] = i
            return CANNOT_WRITE
    for i in range(m):
        r = w[VIEW * m + i]
        if r >= 0 and (w[BACKEND * m + i] < 0 or (w[BITS * m + i] & IS_VIEW_OP and w[MEM * m + i] < 0
                                                  and w[BACKEND * m + i] != w[BACKEND * m + r])):
            set_backend(w, m, i, w[BACKEND * m + r], C_BASE, 0)
    return OK
