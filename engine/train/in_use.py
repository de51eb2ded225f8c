"""Memory for training and evaluation, separate for each thread.

    fit                     writes inputs and parameters, reads the other leaves
    evaluate, predict       write inputs, read the other leaves

Two threads may read the same frozen weights.  Calls inside one another, in one thread, take turns: a callback may
evaluate what is being trained.  Threads that another process left behind in a fork count for nothing.
"""
import contextlib
import os
import threading

from ggjit.graphs.visit import visit
from ggjit.ops.core.errors import GgjitError
from ggjit.ops.core.locks import ForkLock
from ggjit.ops.core.record import FLAG_PARAM, OP
from ggjit.ops.core.shape import describe
from ggjit.tensors.tensor import Tensor

_LOCK, _USERS = ForkLock(), []


class InUse(GgjitError, RuntimeError):
    """A tensor of this call is one that another thread trains or evaluates with."""


class _User:
    """`.written`, `.read`: {id of a leaf: (leaf, address of its first byte, behind its last one)} of a call."""

    def __init__(self, call, written, read):
        self.call, self.at = call, (os.getpid(), threading.get_ident())
        self.written, self.read = ({t.id: (t, *_span(t)) for t in tensors} for tensors in (written, read))

    def shares(self, other):
        """A leaf of this call that the other one writes, or that is written here and used there; None."""
        for mine, theirs in ((self.written, other.written | other.read), (self.read, other.written)):
            for i, (t, first, end) in mine.items():
                if i in theirs or any(first < e and f < end for _, f, e in theirs.values()):
                    return t
        return None


def _span(t):
    """Host addresses of a leaf; an empty range where it has none."""
    place = t._where()
    if place is None or not place[0].buft.is_host():
        return 0, 0
    first = place[0].base + place[1]
    return first, first + t.nbytes


@contextlib.contextmanager
def used(call, inputs, outputs, params=()):
    """No other thread writes what the call uses, nor uses what it writes, inside the block.

    params: what is trained beside `inputs`; None: all that is marked.  Arguments that are no tensors are ignored here:
    the call refuses them.  Errors: InUse, StaleHandle.
    """
    written = [t.base for t in (*_several(inputs), *_several(params)) if isinstance(t, Tensor)]
    tensors = [t for t in (*written, outputs) if isinstance(t, Tensor)]
    for t in tensors:
        t._check()
    leafs = {t.base.id: t.base for part in visit(tensors) for t in part if t.base.op == OP.NONE}
    if params is None:
        written += [t for t in leafs.values() if t.flags & FLAG_PARAM]
    ids = {t.id for t in written}
    user = _User(call, written, [t for i, t in leafs.items() if i not in ids])
    with _LOCK:
        for other in _USERS:
            shared = user.shares(other) if other.at[0] == user.at[0] and other.at[1] != user.at[1] else None
            if shared is not None:
                raise InUse(f"{call}: {describe(shared)} is used by {other.call} in another thread; wait until it has "
                            f"ended, or build a network of its own for each thread")
        _USERS.append(user)
    try:
        yield
    finally:
        with _LOCK:
            _USERS.remove(user)


def _several(tensors):
    if tensors is None:
        return ()
    return tuple(tensors) if isinstance(tensors, tuple | list) else (tensors,)
