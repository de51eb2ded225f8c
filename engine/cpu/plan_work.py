"""Scratch memory of CPU plans: one buffer of the process, since plans run one at a time."""
from ggjit.core.host_buffer import HostBuffer
from ggjit.ops.core.locks import ForkLock

_work = None
_lock = ForkLock()


def shared_work(backend, nbytes):
    """The process-wide scratch buffer, grown to `nbytes`; plans keep the one they were resolved with."""
    global _work
    with _lock:
        if _work is None or _work.size < nbytes:
            _work = HostBuffer(backend.device.buffer_type(), nbytes)
        return _work
