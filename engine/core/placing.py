"""Allocates memory for tensors that have none, for all of them or, on an error, for none.

    buffer type A    | t0 | t1 | t2 |            one buffer, above the type's max size several
    buffer type B    | t3 |
"""
import weakref

from ggjit.core.buffer import tensor_alloc
from ggjit.core.lifetime import AtEnd, call_all
from ggjit.core.slots import alloc_buffer, checked_int
from ggjit.core.table import TABLE
from ggjit.ops.core.errors import OutOfMemory
from ggjit.ops.core.record import T_BUFFER, T_OFFS
from ggjit.ops.core.shape import describe


def place_tensors(wanted):
    """wanted: [(buffer type, tensors)].  Returns [(buffer, its tensors)].

    Errors: OutOfMemory, and whatever a buffer type or buffer raises; no tensor is placed and no buffer kept then.
    """
    layouts = [(buft, *part) for buft, tensors in wanted for part in _layout(buft, tensors)]
    made, placed = [], []
    try:
        for buft, size, _ in layouts:
            made.append(alloc_buffer(buft, size))
        for buf, (_, _, group) in zip(made, layouts, strict=True):
            for t, offs in group:
                tensor_alloc(buf, t, offs)
                placed.append((t, buf))
    except BaseException as e:
        for t, buf in placed:
            unplace(t, buf.id)
        call_all(*(buf.free for buf in made), after=e)
        raise
    return [(buf, [t for t, _ in group]) for buf, (_, _, group) in zip(made, layouts, strict=True)]


def move_tensors(wanted):
    """place_tensors for tensors that have memory, which they leave.  After an error they are where they were."""
    old = [(t, TABLE.words[t.id, [T_BUFFER, T_OFFS]].tolist(), (t._holds or {}).get("memory"))
           for _, tensors in wanted for t in tensors]
    try:
        for t, _, _ in old:
            TABLE.place(t.id, -1, 0)
        return place_tensors(wanted)
    except BaseException:
        for t, where, memory in old:
            TABLE.place(t.id, *where)
            t._hold("memory", memory)
        raise


def _layout(buft, tensors):
    """[(size, [(tensor, offset)])] of the buffers for the tensors."""
    align, limit, parts = checked_int(buft, "alignment"), checked_int(buft, "max_size"), []
    for t in tensors:
        need = -(-checked_int(buft, "alloc_size", t, least=t.nbytes) // align) * align
        if need > limit:
            raise OutOfMemory(f"{describe(t)} needs {need:,} bytes, a {buft.name} buffer holds at most {limit:,}")
        if not parts or parts[-1][0] + need > limit:
            parts.append((0, []))
        size, group = parts[-1]
        group.append((t, size))
        parts[-1] = size + need, group
    return parts


def needed_nbytes(buft, tensors):
    """Bytes of the buffers that place_tensors would make."""
    return sum(size for size, _ in _layout(buft, tensors))


def unplace(t, buf_id):
    """The tensor has no memory in that buffer any more; one that was placed elsewhere since is left alone."""
    if t.ctx.alive and int(TABLE.words[t.id, T_BUFFER]) == buf_id:
        TABLE.place(t.id, -1, 0)
        t._hold("memory", None)


class BufferOwner(AtEnd):
    """Held by the tensors in a buffer; frees it when the last of them dies, or at `now()`."""

    def __init__(self, buf):
        super().__init__(buf.free)
        self.buf = buf


def free_after(buf, tensors):
    """Free `buf` when none of the tensors is left.  Returns a weak reference to its BufferOwner."""
    owner = BufferOwner(buf)
    for t in tensors:
        t._hold("memory", owner)
    return weakref.ref(owner)
