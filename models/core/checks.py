"""Checks of users' arguments, with errors that name the argument and the values it may have."""
import math
import operator
import os

from ggjit.core.arguments import nearest
from ggjit.ops.core.errors import BadFile, ModelError, ParamError
from ggjit.ops.core.whole_numbers import is_whole

FIND_BROKEN = "load_model(path, validate=True) finds a broken weight, GGJIT_DEBUG=check a node that is wrong"


class BrokenValues(ModelError, ParamError):
    """Results that are NaN or infinite: the file is broken, or values that were written to its weights are."""


def integer(name, value, low, high, why=""):
    """`value` as an int from low to high; NumPy integers are welcome, bools are not."""
    if not is_whole(value, low, high):
        raise ParamError(f"{name} must be an integer from {low} to {high}{why}, got {value!r}")
    return operator.index(value)


def number(name, value):
    """`value` as a finite float."""
    try:
        x = float(value)
    except (TypeError, ValueError):
        x = math.nan
    if isinstance(value, str | bytes | bool) or not math.isfinite(x):
        raise ParamError(f"{name} must be a finite number, got {value!r}")
    return x


def read_text(path):
    """The text in a file of UTF-8.  Errors: BadFile."""
    try:
        with open(path, encoding="utf-8") as f:
            return f.read()
    except OSError as e:
        raise BadFile(f"{path}: {e.strerror}; check the path and the permissions") from e
    except UnicodeDecodeError as e:
        raise BadFile(f"{path}: not UTF-8 text at byte {e.start}; text in UTF-8 is expected, iconv -t UTF-8 makes "
                      f"it") from e


def is_path(data):
    """Is it the path of a file, not a text?  A text of several words or lines is none, unless a file is called so."""
    if not isinstance(data, str):
        return isinstance(data, os.PathLike)
    try:
        return os.path.exists(data) or not any(c.isspace() for c in data) and bool(os.path.splitext(data)[1])
    except (OSError, ValueError):               # too long for a name, or a NUL
        return False


def one_of(name, value, known):
    """`value`, if it is one of `known`."""
    if not isinstance(value, str) or value not in known:
        raise ParamError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    return value


def known_options(what, given, known, elsewhere=()):
    """ParamError for unknown options, with the nearest known name.  elsewhere: other libraries' names, which may be
    meant, too."""
    unknown = sorted(set(given) - set(known))
    if unknown:
        hint = nearest(unknown[0], known) or nearest(unknown[0], elsewhere)
        raise ParamError(f"{what}: unknown option {', '.join(map(repr, unknown))}{hint}; known: {', '.join(known)}")


def is_encodable(text):
    """Can a text be written as UTF-8?  One with lone surrogates cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
