"""Host memory: all arrays whose size depends on the user's input are allocated here.

    out = empty(shape, np.uint8, "quantize")            an array, or an OutOfMemory that says what was asked for
    with oom_guard("set", t):                              the same for all that is allocated inside
        ...

Threads are memory too: their stacks (`start`).

Tests make the k-th request fail: `with refusing(k):`.
"""
import contextlib
import ctypes
import functools
import itertools
import math
import mmap

import numpy as np

from ggjit.ops.core.errors import GgjitError, OutOfMemory
from ggjit.ops.core.shape import describe

OWN_PAGES = 4 << 20             # bytes; from there on NumPy asks for large pages, too
_refused = None                 # function: is this request refused (in tests)?  None: no request is


class oom_guard:
    """`with oom_guard(what, about):` a MemoryError inside comes out as OutOfMemory with this text.  Also a decorator.

    about: a number of bytes, or a tensor.
    """
    __slots__ = ("what", "about")

    def __init__(self, what, about=None):
        self.what, self.about = what, about

    def __enter__(self):
        if _refused is not None and _refused():
            raise self._error()

    def __exit__(self, kind, error, traceback):
        if kind is not None and issubclass(kind, MemoryError) and not issubclass(kind, GgjitError):
            raise self._error(f" ({error})" if str(error) else "") from None

    def __call__(self, f):
        @functools.wraps(f)
        def asked(*args, **kwargs):
            with self:
                return f(*args, **kwargs)
        return asked

    def _error(self, detail=""):
        about, size = self.about, ""
        if hasattr(about, "ne"):
            about, size = about.nbytes, f" {describe(about)}"
        nbytes = "" if about is None else f" {about:,} bytes of"
        return OutOfMemory(f"{self.what}{size}: cannot allocate{nbytes} host memory{detail}; use smaller tensors or "
                           f"batches, or free what is not needed")


def empty(shape, dtype, what):
    """np.empty.  Errors: OutOfMemory."""
    try:
        if _refused is None or not _refused():
            return np.empty(shape, dtype)
        detail = ""
    except MemoryError as e:
        detail = f" ({e})" if str(e) else ""
    except ValueError:                  # larger than an address can count
        detail = ""
    nbytes = math.prod(shape if isinstance(shape, tuple) else (shape,)) * np.dtype(dtype).itemsize
    raise oom_guard(what, nbytes)._error(detail)


def pages(nbytes, what):
    """uint8 array of so many bytes; large ones have pages of their own, which go back to the system with the array.

    What `np.empty` frees may stay with the process, between other things of its heap.  Errors: OutOfMemory.
    """
    if nbytes < OWN_PAGES or not hasattr(mmap, "MAP_ANONYMOUS"):
        return empty(nbytes, np.uint8, what)
    with oom_guard(what, nbytes):
        try:
            mapped = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError):
            raise MemoryError from None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):          # a kernel without large pages
                mapped.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(mapped, np.uint8)


def zeros(n, dtype, what):
    """np.zeros of n elements.  Errors: OutOfMemory."""
    with oom_guard(what, n * np.dtype(dtype).itemsize):
        return np.zeros(n, dtype)


def start(thread, what):
    """Start a threading.Thread.  Errors: OutOfMemory."""
    if _refused is not None and _refused():
        raise _no_thread(what, "refused")
    try:
        thread.start()
    except (RuntimeError, MemoryError) as e:            # "can't start new thread"
        raise _no_thread(what, e) from None


def _no_thread(what, why):
    return OutOfMemory(f"{what}: {why}; use fewer threads (n_threads=, GGJIT_THREADS), or raise the system's limit "
                       f"(ulimit -u)")


@contextlib.contextmanager
def refusing(k):
    """For tests: request number k from now on (0: the next one) is refused.  Yields a function that says how many
    there were."""
    global _refused
    numbers = itertools.count()
    seen = [0]

    def refused():
        seen[0] = next(numbers) + 1
        return seen[0] == k + 1
    _refused = refused
    try:
        yield lambda: seen[0]
    finally:
        _refused = None


@functools.cache
def _trim():
    """glibc's malloc_trim, None elsewhere."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, TypeError, AttributeError):
        return None


def give_back_memory():
    """Return freed memory to the system, which C libraries keep for later requests."""
    if _trim() is not None:
        _trim()(ctypes.c_size_t(0))
