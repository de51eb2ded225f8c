"""Ends of objects: handles that cannot be doubled, and cleaning up that goes on when a step of it fails."""
from ggjit.ops.core.errors import TypeMismatch


class Handle:
    """Mixin: there is no second one of it, so it is neither copied nor pickled."""
    __slots__ = ()

    def __reduce__(self):
        raise TypeMismatch(f"{self!r} stands for something of this process and cannot be copied or pickled; make "
                           f"another one, there or here (gg.init_backend, alloc_buffer, gg.Scheduler)")


def finish(*calls, after=None):
    """Make all calls, whatever some of them raise.  Then the first error comes out; `after`: it becomes a note on this
    one, which is on its way already."""
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
