"""Calls the methods of third-party devices and buffer types, and checks their results.

A result of the wrong kind is a typed error that names the device or buffer type and the slot.
"""
import numpy as np

from ggjit.core.buffer import Buffer, BufferType, EmptyBuffer
from ggjit.ops.core.errors import GgjitError, OutOfMemory
from ggjit.ops.core.whole_numbers import is_whole

MAX_SIZE = (1 << 63) - 1


def checked_int(owner, slot, *args, least=1):
    """The result of an integer slot of a buffer type ("alignment", "max_size", "alloc_size") or of a backend
    ("work_nbytes"); at most MAX_SIZE."""
    n = getattr(owner, slot)(*args)
    if not is_whole(n, least):
        kind = "buffer type" if isinstance(owner, BufferType) else "backend"
        raise GgjitError(f"{kind} {owner.name}: {slot} must be an integer of at least {least}, got {n!r}")
    return min(int(n), MAX_SIZE)


def alloc_sizes(bufts, which, tensors, nbytes):
    """Bytes of each tensor in bufts[i], i from `which`, None: all in the first.  nbytes: int64 array of the tensors'
    bytes, in which the result is written."""
    for k, buft in enumerate(bufts):
        if type(buft).alloc_size is not BufferType.alloc_size:      # the base class returns the tensor's own bytes
            for i in np.flatnonzero(which == k).tolist() if which is not None else range(0 if k else len(tensors)):
                nbytes[i] = checked_int(buft, "alloc_size", tensors[i], least=int(nbytes[i]))
    return nbytes


def checked_bool(owner, slot, *args):
    """The result of a yes-or-no slot: "supports_op", "supports_buft", "offload_op", "supports_backend"."""
    return as_bool(getattr(owner, slot)(*args), f"{owner.name}: {slot}")


def as_bool(value, source):
    """A value as True or False; source: the slot or callback it came from.  Errors: GgjitError."""
    try:
        return bool(value)
    except Exception as e:
        raise GgjitError(f"{source} must answer True or False, got {value!r}") from e


def alloc_buffer(buft, size):
    """A buffer of at least `size` bytes; for 0 bytes the buffer type is not asked.

    Errors: those of the buffer type; OutOfMemory where it returns None.  Source: ggml_backend_buft_alloc_buffer.
    """
    if size == 0:
        return EmptyBuffer(buft)
    buf = buft.alloc_buffer(size)
    if buf is None:
        raise OutOfMemory(f"{buft.name}: no buffer of {size:,} bytes")
    if not isinstance(buf, Buffer):
        raise GgjitError(f"buffer type {buft.name}: alloc_buffer must return a Buffer, got {buf!r}")
    held = buf.size if buf._arena is None else min(buf.size, buf._arena.size)
    if held < size:
        buf.free()
        raise GgjitError(f"buffer type {buft.name}: asked for {size:,} bytes, alloc_buffer made a buffer of {held:,}")
    return buf
