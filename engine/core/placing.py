"""Memory for tensors that have none: laid out, allocated, placed.  All of it or, on an error, nothing.

    buffer type A    | t0 | t1 | t2 |            one buffer, above the type's max size several
    buffer type B    | t3 |
"""
import sys
import weakref

from ggjit.core.buffer import tensor_alloc
from ggjit.core.lifetime import finish
from ggjit.core.slots import allocate, number
from ggjit.core.table import TABLE
from ggjit.ops.core.errors import OutOfMemory
from ggjit.ops.core.record import T_BUFFER
from ggjit.ops.core.shape import describe


def place_tensors(wanted):
    """wanted: [(buffer type, tensors)].  Returns [(buffer, its tensors)].

    Errors: OutOfMemory, and whatever a buffer type or buffer raises; no tensor is placed and no buffer kept then.
    """
    layouts = [(buft, *part) for buft, tensors in wanted for part in _layout(buft, tensors)]
    made, placed = [], []
    try:
        for buft, size, _ in layouts:
            made.append(allocate(buft, size))
        for buf, (_, _, group) in zip(made, layouts, strict=True):
            for t, offs in group:
                tensor_alloc(buf, t, offs)
                placed.append((t, buf))
    except BaseException as e:
        for t, buf in placed:
            unplace(t, buf.id)
        finish(*(buf.free for buf in made), after=e)
        raise
    return [(buf, [t for t, _ in group]) for buf, (_, _, group) in zip(made, layouts, strict=True)]


def _layout(buft, tensors):
    """[(size, [(tensor, offset)])] of the buffers that take the tensors; no size is 0: not every device makes those."""
    align, limit, parts = number(buft, "alignment"), number(buft, "max_size"), []
    for t in tensors:
        need = -(-number(buft, "alloc_size", t, least=t.nbytes) // align) * align
        if need > limit:
            raise OutOfMemory(f"{describe(t)} needs {need:,} bytes, a {buft.name} buffer holds at most {limit:,}")
        if not parts or parts[-1][0] + need > limit:
            parts.append((0, []))
        size, group = parts[-1]
        group.append((t, size))
        parts[-1] = size + need, group
    return [(max(size, 1), group) for size, group in parts]


def unplace(t, buf_id):
    """Take back a place in that buffer; a tensor that lies elsewhere by now is left alone."""
    if t.ctx.alive and int(TABLE.words[t.id, T_BUFFER]) == buf_id:
        TABLE.place(t.id, -1, 0)
        t.ctx.buffers = [b for b in t.ctx.buffers if b.id != buf_id]


class Lease:
    """Frees a buffer when the last context that holds the lease dies; `end` frees it earlier.

    Not a weakref.finalize: that is known to the interpreter for ever, so a buffer whose device remembers a tensor
    (device -> tensor -> context -> lease) would keep itself alive.  This is a cycle that can be collected.
    """

    def __init__(self, buf):
        self.buf = buf

    def end(self):
        buf, self.buf = self.buf, None
        if buf is not None:
            buf.free()

    def __del__(self):
        if not sys.is_finalizing():             # devices are gone by then
            self.end()


def free_with(buf, contexts):
    """Free `buf` when none of the contexts is left.  Returns a weak reference to the Lease."""
    lease = Lease(buf)
    for ctx in contexts:
        ctx._keeps.add(lease)
    return weakref.ref(lease)
