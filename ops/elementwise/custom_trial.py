"""Checks the first run of a user's function: it must write all of the result and nothing outside the arrays.

    @njit functions     run once on copies with guard bytes around them, with bounds checks, before the real run
    Python functions    NumPy checks their indices; their result is filled with a pattern first

The first CHECKED_RUNS runs of a function with the same shapes are checked, further ones while it leaves values
unwritten: those hold the pattern, which is NaN.  GGJIT_CUSTOM=unchecked switches it off.  Functions whose indices
depend on values keep their bounds checks (custom_bounds.py).
"""
import threading
import traceback
import weakref

import numpy as np

from ggjit.ops.core.errors import GgjitError
from ggjit.ops.core.printable import shown_file
from ggjit.ops.core.settings import custom_is_checked
from ggjit.ops.core.user_warnings import warn
from ggjit.ops.elementwise.custom_bounds import bounds_checked

CHECKED_RUNS = 2
GUARD = 256                     # bytes before and behind an array
MAX_NBYTES = 256 << 20          # of copies: with larger arrays the bounds are checked alone
MAX_AGAIN = 1 << 22             # elements of a run as plain Python, which finds the line of an error
_PATTERN = 0x5A
# values that no function writes by chance: NaNs of an odd payload, and bytes of the pattern
_BITS = {1: np.uint8(_PATTERN), 2: np.uint16(0x7E5A), 4: np.uint32(0x7FC5A5A5), 8: np.uint64(0x7FF8A5A55A5A5A5A)}
_runs = weakref.WeakKeyDictionary()         # function -> {shapes: checked runs}
_told = weakref.WeakKeyDictionary()         # function -> shapes of which was told what it leaves unwritten


def runs_left(function, views):
    """How many more runs of the function with these arrays are to be checked."""
    if not custom_is_checked():
        return 0
    return CHECKED_RUNS - _runs.setdefault(function, {}).get(views, 0)


def _count(function, views):
    of = _runs.setdefault(function, {})
    of[views] = of.get(views, 0) + 1


def _is_in_place(memory):
    """Does the result lie where a source lies?  memory: (arena, byte offset) of the result and the sources."""
    return any(arena is memory[0][0] and offs == memory[0][1] for arena, offs in memory[1:])


# ---------------------------------------------------------------- what is unwritten
def fill_unwritten(a):
    """Fill an array with a value that marks unwritten elements; False for types that have no such value."""
    bits = _BITS.get(a.dtype.itemsize)
    if bits is None or not a.size:
        return False
    a[...] = np.full(1, bits).view(a.dtype)[0]
    return True


def unwritten(a):
    """Which elements of the array still hold that mark; none of bytes, unless all do: a byte may be 0x5A."""
    bits = _BITS[a.dtype.itemsize]
    left = np.ascontiguousarray(a).view(bits.dtype).reshape(a.shape) == bits
    return left if a.dtype.itemsize > 1 or left.all() else np.zeros(a.shape, bool)


def wrote_all(function, views, a):
    """True if no element of the array still holds the mark; else tells it, once for a function and its shapes."""
    left = unwritten(a)
    if not left.any():
        return True
    told = _told.setdefault(function, set())
    if views not in told:
        told.add(views)
        first = [int(i) for i in np.argwhere(left)[0]]
        remedy = "write all of dst" if not left.all() else "`dst[...] = values` writes; `dst = values`, `return` do not"
        warn(f"{_name(function)} leaves {int(left.sum()):,} of {left.size:,} values of its result unwritten, the first "
             f"at {first}: {remedy}", at=_code(function))
    return False


# ---------------------------------------------------------------- @njit functions
class JitTrial:
    """Checks the first runs of an @njit function.  `flag[0]` becomes 1 when there is nothing more to check."""

    def __init__(self, function, views, memory, raised, flag):
        self.function, self.views, self.memory, self.raised, self.flag = function, views, memory, raised, flag
        flag[0] = runs_left(function, views) <= 0
        self._lock, self._done, self._checked = threading.Lock(), 0, None

    def __call__(self, n, n_calls):
        """Before each of `n_calls` threads' calls: True if the function may run.  The first one checks, others wait."""
        with self._lock:
            if self._done == 0:
                try:
                    self._checked = self._check(n)
                except BaseException as e:          # must not cross the C frame; the plan raises it again
                    self.raised.append(e)
                    self._checked = False
            self._done = (self._done + 1) % n_calls
            if self._done == 0 and (runs_left(self.function, self.views) <= 0):
                self.flag[0] = self._checked
            return self._checked

    def _check(self, n):
        arrays, whole = self._copies()
        if arrays is None:                  # the real run checks the bounds
            _count(self.function, self.views)
            return True
        name = self.function.__name__
        in_place = _is_in_place(self.memory)
        filled = not in_place and fill_unwritten(arrays[0])
        before = [a.copy() for a in arrays[1:]]
        try:
            checked = bounds_checked(self.function)
            for ith in range(n):
                checked(*arrays, ith, n)
        except Exception as e:
            self.raised.append(error_of(self.function, e, self._copies()[0], n))
            return False
        for k, (a, raw) in enumerate(zip(arrays, whole, strict=True)):
            if (raw[:GUARD] != _PATTERN).any() or (raw[GUARD + a.nbytes:] != _PATTERN).any():
                what = f"source {k - 1}" if k else "its result"
                self.raised.append(GgjitError(f"{name} writes outside {what}, an array of shape {a.shape} "
                                              f"({_place(self.function)}); it has not run on real memory"))
                return False
        for k, (a, old) in enumerate(zip(arrays[1:], before, strict=True)):
            if not in_place and a.tobytes() != old.tobytes():
                self.raised.append(GgjitError(f"{name} writes into source {k}, which other nodes may read; write dst "
                                              f"alone ({_place(self.function)})"))
                return False
        if filled and not wrote_all(self.function, self.views, arrays[0]):
            (shape, dtype, strides), (arena, offs) = self.views[0], self.memory[0]
            fill_unwritten(np.ndarray(shape, dtype, arena, offs, strides))
            return True                     # checked again next time
        _count(self.function, self.views)
        return True

    def _copies(self):
        """(arrays, the memory with guards around each), or (None, None) if they are too large."""
        sizes = [int(np.prod(shape)) * dtype.itemsize for shape, dtype, _ in self.views]
        if sum(sizes) > MAX_NBYTES:
            return None, None
        arrays, whole, seen = [], [], {}
        for (shape, dtype, strides), (arena, offs), nbytes in zip(self.views, self.memory, sizes, strict=True):
            key = id(arena), offs, shape
            if key not in seen:
                raw = np.full(nbytes + 2 * GUARD, _PATTERN, np.uint8)
                a = raw[GUARD:GUARD + nbytes].view(dtype).reshape(shape)
                a[...] = np.ndarray(shape, dtype, arena, offs, strides)
                seen[key] = a, raw
            arrays.append(seen[key][0])
            whole.append(seen[key][1])
        return arrays, whole


def _code(function):
    """The code object of a function, of what a partial calls, of a class's `__call__`; None for built-in ones."""
    function = getattr(function, "py_func", getattr(function, "func", function))
    return getattr(function, "__code__", getattr(type(function).__call__, "__code__", None))


def _name(function):
    return getattr(function, "__name__", getattr(_code(function), "co_name", "the function"))


def _place(function):
    code = _code(function)
    return f"{shown_file(code.co_filename)}, line {code.co_firstlineno}"


def error_of(function, error, arrays, n):
    """The GgjitError of what an @njit function raised; error: None if not known.  Run again as Python on `arrays`,
    which are copies, it says in which line."""
    where, line, again = _place(function), "", None
    if sum(a.size for a in arrays) <= MAX_AGAIN:
        again = _raised_by_python(function, arrays, n)
    if again is not None:
        file = _code(function).co_filename
        own = [f for f in traceback.extract_tb(again.__traceback__) if f.filename == file]
        if own:
            where, line = f"{shown_file(file)}, line {own[-1].lineno}", f": {own[-1].line}"
    shapes = ", ".join(str(a.shape) for a in arrays)
    what = f"{type(error or again).__name__}: {again or error}" if error or again else "an exception"
    found = GgjitError(f"{function.__name__} raised {what} ({where}){line}; its arrays have the shapes {shapes}")
    found.__cause__ = again or error
    return found


def _raised_by_python(function, arrays, n):
    """What an @njit function raises as plain Python, one thread after the other; None for nothing."""
    in_python = bounds_checked(function).py_func            # the helpers that it calls are compiled
    try:
        with np.errstate(all="ignore"):
            for ith in range(n):
                in_python(*arrays, ith, n)
    except Exception as e:
        return e
    return None


# ---------------------------------------------------------------- Python functions
class PythonTrial:
    """The same for the results of Python functions: filled when the first thread comes, looked at after the last."""

    def __init__(self, function, views, memory):
        self.function, self.views, self.memory = function, views, memory
        self._lock, self._begun, self._ended, self._filled = threading.Lock(), 0, 0, False

    def begin(self, dst):
        with self._lock:
            if self._begun == 0:
                in_place = _is_in_place(self.memory)
                self._filled = runs_left(self.function, self.views) > 0 and not in_place and fill_unwritten(dst)
            self._begun += 1

    def end(self, dst, n, went_well):
        with self._lock:
            self._ended += 1
            if self._ended < n:
                return
            self._begun = self._ended = 0
            if went_well and (not self._filled or wrote_all(self.function, self.views, dst)):
                _count(self.function, self.views)
