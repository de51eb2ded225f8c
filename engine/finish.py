"""Cleaning up goes on when a step of it fails: nothing else is left behind."""


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
