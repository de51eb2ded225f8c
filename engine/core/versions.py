"""Data versions of tensors: they show whether a tensor was written since it was copied.

The scheduler copies tensors between devices.  A copy of an input that was not written since is still valid, so every
write is counted: in one word of the tensor's row in the table, and per buffer for writes that name no tensor.

    t.set(...)   t.write()   set_tensor slots   a plan that computes into a leaf      ->  the tensor's version
    buf.clear()   buf.reset()                                                        ->  the buffer's version

Versions are reliable because arrays of tensor memory are read-only unless taken by `with t.write() as a:`.  Memory that
can be written without being counted (the user's own array, `buf.arena` once it was read, leaves placed on top of each
other) makes `Buffer.trusted` False, and its tensors are always copied again.
"""
import functools

from ggjit.core.table import TABLE
from ggjit.ops.core.record import T_CTX
from ggjit.ops.core.spec import ops_with

T_VERSION = T_CTX + 1           # a spare word of the TENSOR row; survives recycling, so it only ever grows
VERSIONS = TABLE.words[:, T_VERSION]    # of all tensors; indexing two axes, NumPy adds 1 in 1.7 instead of 0.7 us


def written(t):
    """The tensors whose memory the node t writes: its own base, and those of the sources it updates."""
    return (t.base, *(t.src[i].base for i in ops_with("updates").get(t.op, ())))


def count_write(t):
    """`t`, or the tensor it views, was written."""
    t._count_write()


def stamp(base_id, buf):
    """(version of the tensor, version of its buffer): as long as both are equal, so are the bytes."""
    return int(TABLE.words[base_id, T_VERSION]), buf.version, buf.id


def count_writes(cls, slots):
    """Wrap the writing slots a class defines itself, so that third-party buffers need no code for versions.

    slots: {slot name: index of the written tensor among its arguments, or None for the whole buffer}
    """
    for name, arg in slots.items():
        slot = cls.__dict__.get(name)
        if callable(slot) and not getattr(slot, "counts_versions", False):
            setattr(cls, name, _counting(slot, arg))


def _counting(slot, arg):
    @functools.wraps(slot)
    def counted(self, *args, **kwargs):
        try:
            return slot(self, *args, **kwargs)
        finally:
            if arg is None:
                self.version += 1
            else:
                count_write(args[arg] if len(args) > arg else kwargs[slot.__code__.co_varnames[arg + 1]])
    counted.counts_versions = True
    return counted
