"""Repairs assignments after the rules: every node must be able to run on its backend and to write its result there.

    the rules chose a device that lacks the op                          -> another one
    a node writes memory its device cannot reach: the base of a view,   -> a device that reaches all of it, or the
      the moments that an optimizer step updates                           writers move together; else NotSupported

ggml aborts or corrupts memory there; on graphs it can compute, `repair` changes nothing.
"""
from ggjit.ops.native.jit import inlined
from ggjit.sched import causes
from ggjit.sched import records as rec
from ggjit.sched.records import can_read, memory_of, set_backend, supports, updated


@inlined
def _can_move(g, base):
    """May this base still move?  A leaf that is not placed, pinned or written yet goes where its writer runs."""
    return g.rows[base].mem < 0 and g.rows[base].bits & (rec.IS_LEAF | rec.IS_PINNED | rec.IS_WRITTEN) == rec.IS_LEAF


@inlined
def _reaches_updated(g, i, b):
    """Can backend b write all sources that node i updates?"""
    if g.rows[i].bits >> rec.UPDATES:
        for j in range(g.rows[i].src_end):
            base = updated(g, i, j)
            if base >= 0 and not _can_move(g, base):
                k = memory_of(g, base)
                if k >= 0 and not can_read(g, b, k):
                    return False
    return True


@inlined
def _mark_written(g, i, base):
    """Note that node i writes the tensor `base`."""
    g.rows[base].bits |= rec.IS_WRITTEN if g.rows[i].backend == g.rows[base].backend else rec.IS_WRITTEN | rec.IS_SHARED


@inlined
def _writes(g, i):
    """Buffer type of the memory node i writes, when that was decided before it; -1: its own backend's."""
    base = g.rows[i].view
    return g.rows[i].mem if g.rows[i].mem >= 0 else g.buft_of[g.rows[base].backend] if base >= 0 else -1


@inlined
def _fits(g, i, b, k):
    return supports(g, i, b) and (k < 0 or can_read(g, b, k)) and _reaches_updated(g, i, b)


@inlined
def _move_family(g, base):
    """Put everything that computes or writes the unplaced tensor base on one backend that can do all of it."""
    for b in range(g.n_backends):
        ok = True
        for i in range(g.n_nodes):
            if (i == base or g.rows[i].view == base) and g.rows[i].bits & rec.IS_COMPUTE:
                ok &= supports(g, i, b)
                ok &= g.rows[i].backend == b or not g.rows[i].bits & rec.IS_PINNED
        if ok and (g.rows[base].backend == b or not g.rows[base].bits & rec.IS_PINNED):
            for i in range(g.n_nodes):
                if g.rows[i].view == base and g.rows[i].backend != b:
                    set_backend(g, i, b, causes.MEMORY, 0)
            if g.rows[base].backend != b:
                set_backend(g, base, b, causes.MEMORY, 0)
            return True
    return False


@inlined
def _move_updated(g, i):
    """Leaves that node i updates come to its backend if they can; False: one lies out of reach."""
    for j in range(g.rows[i].src_end):
        base = updated(g, i, j)
        if base < 0:
            continue
        b, k = g.rows[i].backend, memory_of(g, base)
        if k >= 0 and not can_read(g, b, k):
            if not _can_move(g, base):
                return False
            set_backend(g, base, b, causes.MEMORY, 0)
        _mark_written(g, i, base)
    return True


@inlined
def repair(g):
    """See the module's text.  `failed`: local number of the node that no device can compute."""
    for i in range(g.n):                                # bases first: a view's place is its base's
        if g.rows[i].backend < 0 and g.rows[i].view < 0 and not g.rows[i].bits & rec.IS_COMPUTE:
            set_backend(g, i, g.n_backends - 1, causes.FIRST, 0)
    for i in range(g.n_nodes):
        if not g.rows[i].bits & rec.IS_COMPUTE:
            continue
        g.results[0].failed = i
        b = g.rows[i].backend
        base = g.rows[i].view
        k = _writes(g, i)
        if b >= 0 and _fits(g, i, b, k):
            continue
        if g.rows[i].bits & rec.IS_PINNED:
            return rec.BAD_PIN
        found = -1
        if base >= 0 and g.rows[base].backend >= 0 and _fits(g, i, g.rows[base].backend, k):
            found = g.rows[base].backend
        for a in range(g.n_backends):
            if found < 0 and _fits(g, i, a, k):
                found = a
        if found >= 0:
            wrong_op = b >= 0 and not supports(g, i, b)
            set_backend(g, i, found, causes.FIRST if b < 0 else causes.UNSUPPORTED if wrong_op else causes.MEMORY, 0)
            continue
        possible = False
        for a in range(g.n_backends):
            possible |= supports(g, i, a)
        if not possible:
            return rec.NO_BACKEND
        if g.rows[i].mem >= 0 or g.rows[i].bits >> rec.UPDATES or not _move_family(g, base):
            return rec.CANNOT_WRITE
    for i in range(g.n_nodes):
        base = g.rows[i].view
        if base >= 0 and g.rows[i].bits & rec.IS_COMPUTE:
            _mark_written(g, i, base)
        if g.rows[i].bits >> rec.UPDATES and not _move_updated(g, i):
            g.results[0].failed = i
            return rec.CANNOT_WRITE
    for i in range(g.n):
        base = g.rows[i].view
        if base >= 0 and (g.rows[i].backend < 0 or (g.rows[i].bits & rec.IS_VIEW_OP and g.rows[i].mem < 0
                                                  and g.rows[i].backend != g.rows[base].backend)):
            set_backend(g, i, g.rows[base].backend, causes.BASE, 0)
    return rec.OK
