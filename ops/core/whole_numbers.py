"""Checks of whole numbers: integers of Python and NumPy are accepted; True, False, 2.0 and "2" are not."""
import operator

from ggjit.ops.core.errors import TypeMismatch


def is_whole(value, low=None, high=None):
    """Is it a whole number, and not outside low..high?"""
    if isinstance(value, bool):
        return False
    try:
        n = operator.index(value)
    except TypeError:
        return False
    return (low is None or low <= n) and (high is None or n <= high)


def whole(value, what):
    """`value` as an int.  Errors: TypeMismatch."""
    if not is_whole(value):
        raise TypeMismatch(f"{what} must be an integer, got {value!r}")
    return operator.index(value)
