"""Warnings that point at the user's line, not at a line of the library."""
import sys
import warnings

from ggjit.ops.core.printable import TEXT, printable

_told: set[str] = set()


class GgjitWarning(UserWarning):
    """Something may not do what the user meant; `warnings.filterwarnings("ignore",
    category=gg.GgjitWarning)` silences all of them."""


def is_of_the_library(frame):
    """Is it a frame of ggjit, or of the standard library between two of ggjit's?"""
    name = frame.f_globals.get("__name__", "")
    return name == "ggjit" or name.startswith("ggjit.") or name in ("contextlib", "functools")


def user_frame():
    """The nearest frame outside the library, or None; and how many frames are between it and the caller."""
    frame, n = sys._getframe(1), 0
    while frame is not None and is_of_the_library(frame):
        frame, n = frame.f_back, n + 1
    return frame, n


def called_by_user():
    """Was the op that is being built asked for by the user's own line, not by a network or an operator?"""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("ggjit.ops.", "ggjit.tensors.repeats")):
        frame = frame.f_back
    return frame is not None and not is_of_the_library(frame)


def warn(message, at=None):
    """A GgjitWarning at the user's line, or where the code object `at` begins, whose line the message is about."""
    text = printable(message, keep=TEXT)
    if at is not None:
        warnings.warn_explicit(text, GgjitWarning, at.co_filename, at.co_firstlineno)
        return
    frame, n = user_frame()
    warnings.warn(text, GgjitWarning, stacklevel=n + 1 if frame is not None else 1)


def warn_once(key, message):
    """As `warn`, but once for each key in this process."""
    if key not in _told:
        _told.add(key)
        warn(message)


def forget_told():
    """Forget which keys were warned of."""
    _told.clear()
