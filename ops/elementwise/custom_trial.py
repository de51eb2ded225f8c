"""First runs of users' functions, checked: nothing outside the arrays is written, and all of the result is.

    @njit functions     run once on copies with guard bytes around them, with bounds checks, before the real run
    Python functions    NumPy checks their indices; their result is filled with a pattern first

The first CHECKED_RUNS runs of a function with the same shapes are checked; GGJIT_CUSTOM=unchecked switches it off.
Indices that a function computes from later values are not seen by that.
"""
import threading
import traceback
import weakref

import numpy as np

from ggjit.ops.core.errors import GgjitError
from ggjit.ops.core.settings import custom_is_checked
from ggjit.ops.core.user_warnings import warn_once

CHECKED_RUNS = 2
GUARD = 256                     # bytes before and behind an array
MAX_NBYTES = 256 << 20          # of copies: larger arrays are not checked
_PATTERN = 0x5A
# values that no function writes by chance: NaNs of an odd payload, and bytes of the pattern
_BITS = {2: np.uint16(0x7E5A), 4: np.uint32(0x7FC5A5A5), 8: np.uint64(0x7FF8A5A55A5A5A5A)}
_runs = weakref.WeakKeyDictionary()         # function -> {shapes: checked runs}


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


def tell_unwritten(name, a):
    """Warn, once for each function, if elements of the array still hold that mark."""
    bits = _BITS[a.dtype.itemsize]
    left = np.ascontiguousarray(a).view(bits.dtype) == bits
    if left.any():
        first = tuple(int(i) for i in np.argwhere(left.reshape(a.shape))[0])
        warn_once(("unwritten", name), f"{name} leaves {int(left.sum()):,} of {left.size:,} values of its result "
                                       f"unwritten, the first at {list(first)}: write all of dst")


# ---------------------------------------------------------------- @njit functions
class JitTrial:
    """Checks the first runs of an @njit function.  `flag[0]` is 1 when there is nothing more to check."""

    def __init__(self, function, views, memory, raised):
        self.function, self.views, self.memory, self.raised = function, views, memory, raised
        self.flag = np.array([runs_left(function, views) <= 0], np.int64)
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
        if arrays is None:
            self.flag[0] = 1
            return True
        name = self.function.__name__
        in_place = _is_in_place(self.memory)
        filled = not in_place and fill_unwritten(arrays[0])
        before = [a.copy() for a in arrays[1:]]
        try:
            checked = _bounds_checked(self.function)
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
        if filled:
            tell_unwritten(name, arrays[0])
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


def _bounds_checked(function):
    from numba import njit
    return njit(boundscheck=True)(function.py_func)


def _place(function):
    code = getattr(function, "py_func", function).__code__
    return f"{code.co_filename}, line {code.co_firstlineno}"


def error_of(function, error, arrays, n):
    """The GgjitError of what an @njit function raised, with the line: run as Python, on copies, it says which."""
    where, line, again = _place(function), "", None
    try:
        for ith in range(n):
            function.py_func(*arrays, ith, n)
    except Exception as e:
        again = e
        last = [f for f in traceback.extract_tb(e.__traceback__)
                if f.filename == function.py_func.__code__.co_filename]
        if last:
            where, line = f"{last[-1].filename}, line {last[-1].lineno}", f": {last[-1].line}"
    shapes = ", ".join(str(a.shape) for a in arrays)
    found = GgjitError(f"{function.__name__} raised {type(error).__name__}: {again or error} ({where}){line}; its "
                       f"arrays have the shapes {shapes}")
    found.__cause__ = again or error
    return found


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
            if self._filled and went_well:
                _count(self.function, self.views)
                tell_unwritten(getattr(self.function, "__name__", "the function"), dst)
