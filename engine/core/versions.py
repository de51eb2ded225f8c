"""Data versions: has this tensor been written since I last looked?

The scheduler copies tensors between devices.  A copy of an input that nobody wrote since is still good, so every write
counts: one word of the tensor's row in the table, and one number per buffer for writes that name no tensor.

    t.set(...)   t.write()   set_tensor slots   a plan that computes into a leaf      ->  the tensor's version
    buf.clear()   buf.reset()                                                        ->  the buffer's version

The versions stay true because memory is handed out read-only unless taken by `with t.write() as a:`.  Where somebody
can write behind our back (the user's own array, `buf.arena` once it was taken, leaves placed on top of each other)
the buffer says so (`Buffer.trusted` is False) and nothing is assumed about it.
"""
import functools

from ggjit.core.table import TABLE
from ggjit.ops.core.record import OP, T_CTX

T_VERSION = T_CTX + 1           # a spare word of the TENSOR row; survives recycling, so it only ever grows


# sources that a node of the op updates besides its result: their numbers
UPDATED_SOURCES = {OP.OPT_STEP_ADAMW: (2, 3)}          # m and v


def written(t):
    """The tensors whose memory the node t writes: its own base, and those of the sources it updates."""
    return (t.base, *(t.src[i].base for i in UPDATED_SOURCES.get(t.op, ())))


def touched(t):
    """Somebody wrote `t` (or the tensor it views)."""
    t._wrote()


def stamp(base_id, buf):
    """What has to be equal for the bytes to be equal: the tensor's version and the buffer's."""
    return int(TABLE.words[base_id, T_VERSION]), buf.version, buf.id


def counts_tensor(slot, at):
    """A slot that writes the tensor which is its argument number `at`."""
    @functools.wraps(slot)
    def counted(self, *args, **kwargs):
        try:
            return slot(self, *args, **kwargs)
        finally:
            touched(args[at] if len(args) > at else kwargs[slot.__code__.co_varnames[at + 1]])
    counted.counts_versions = True
    return counted


def counts_buffer(slot):
    """A slot that writes the whole buffer."""
    @functools.wraps(slot)
    def counted(self, *args, **kwargs):
        try:
            return slot(self, *args, **kwargs)
        finally:
            self.version += 1
    counted.counts_versions = True
    return counted


def count_writes(cls, slots):
    """Wrap the writing slots a class defines itself, so that third-party buffers need not know about versions.

    slots: {slot name: index of the written tensor among its arguments, or None for the whole buffer}
    """
    for name, at in slots.items():
        slot = cls.__dict__.get(name)
        if callable(slot) and not getattr(slot, "counts_versions", False):
            setattr(cls, name, counts_buffer(slot) if at is None else counts_tensor(slot, at))
