"""What third parties answer, checked: nonsense is a typed error that names who said it, not a crash later."""
import numpy as np

from ggjit.core.buffer import Buffer
from ggjit.ops.core.errors import GgjitError, OutOfMemory

MOST = (1 << 63) - 1


def number(buft, slot, *args, least=1):
    """The integer a buffer type answers: "alignment", "max_size", "alloc_size"; at most MOST."""
    n = getattr(buft, slot)(*args)
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < least:
        raise GgjitError(f"buffer type {buft.name}: {slot} must be an integer of at least {least}, got {n!r}")
    return min(int(n), MOST)


def yes(owner, slot, *args):
    """What a device, backend or buffer type answers to a question: "supports_op", "supports_buft", "offload_op" ..."""
    return truth(getattr(owner, slot)(*args), f"{owner.name}: {slot}")


def truth(answer, who):
    """An answer as True or False."""
    try:
        return bool(answer)
    except Exception as e:
        raise GgjitError(f"{who} must answer True or False, got {answer!r}") from e


def allocate(buft, size):
    """A buffer of at least `size` bytes.  Errors: whatever the buffer type raises, OutOfMemory where it makes none."""
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
