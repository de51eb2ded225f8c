"""Lifetimes: handles that cannot be copied, and clean-up that continues after an error."""
from ggjit.ops.core.errors import TypeMismatch


class Handle:
    """Mixin: stands for a resource of this process, so it is neither copied nor pickled."""
    __slots__ = ()

    def __reduce__(self):
        raise TypeMismatch(f"{self!r} stands for something of this process and cannot be copied or pickled; make "
                           f"another one, there or here (gg.init_backend, alloc_buffer, gg.Scheduler)")


def call_all(*calls, after=None):
    """Make all calls, then raise the first error among them.  after: an error being handled; gets it as a note."""
    first = None
    for call in calls:
        try:
            call()
        except Exception as e:
            first = first or e
    if first is not None and after is not None:
        after.add_note(f"and while cleaning up: {first!r}")
    elif first is not None:
        raise first
