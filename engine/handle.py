"""Handles on memory, hardware and work of this process."""
from ggjit.ops.errors import TypeMismatch


class Handle:
    """Mixin: there is no second one of it, so it is neither copied nor pickled."""
    __slots__ = ()

    def __reduce__(self):
        raise TypeMismatch(f"{self!r} stands for something of this process and cannot be copied or pickled; make "
                           f"another one, there or here (gg.init_backend, alloc_buffer, gg.Scheduler)")
