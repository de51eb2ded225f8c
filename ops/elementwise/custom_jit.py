"""The kernel around a user's @njit function: it makes the arrays of a node, asks for the trial, calls the function.

Compiling it takes a second, so an entry is used again by the next node with as many axes and the same types, once the
plan that used it is gone.  It is not kept on disk: it holds the user's code.  The function owns its entries, so they go
with it.
"""
import ctypes
import math
import weakref

import numpy as np

from ggjit.ops.core.errors import TypeMismatch
from ggjit.ops.core.record import V_WORDS, WORD
from ggjit.ops.core.settings import custom_is_checked
from ggjit.ops.elementwise.custom_bounds import bounds_checked, indexes_by_values
from ggjit.ops.elementwise.custom_trial import JitTrial
from ggjit.ops.native.jit import array_maker
from ggjit.ops.native.node import DST, SRC0, addr, nb, ne
from ggjit.ops.native.numba_report import useful

RAISED = 64                     # status: the function raised; the kernel object holds the exception
CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)
_ENTRIES = "_ggjit_entries"     # attribute of an @njit function: {(axes and types, n_tasks, checked): free entries}


def entry_for(kernel, function, views, n_tasks, memory, raised):
    """A compiled entry that `kernel` alone uses while it lives.  views: (shape, dtype, strides) of the result and the
    sources; memory, raised: as CustomKernel has them.  Errors: TypeMismatch for a function that does not compile."""
    kinds = tuple((len(shape), dtype, strides == _packed(shape, dtype)) for shape, dtype, strides in views)
    free = vars(function).setdefault(_ENTRIES, {}).setdefault((kinds, n_tasks, custom_is_checked()), [])
    entry = free.pop() if free else _JitEntry(function, kinds, n_tasks)
    entry.trial = JitTrial(function, views, memory, raised, entry.flag)
    weakref.finalize(kernel, _give_back, entry, free).atexit = False
    return entry


def _give_back(entry, free):
    entry.trial = None
    free.append(entry)


class _JitEntry:
    """address: of the compiled kernel; flag[0]: 1 when nothing is to be tried."""

    def __init__(self, function, kinds, n_tasks):
        self.flag, self.trial = np.zeros(1, np.int64), None
        owner = weakref.ref(self)
        self.ask = CALLBACK(lambda node, ith, n, sync: 0 if owner().trial(n, n) else RAISED)
        self.code = _compiled(function, kinds, n_tasks, self.ask, self.flag.ctypes.data)
        self.address = self.code.address


def _compiled(function, kinds, n_tasks, ask, flag_at):
    from numba import cfunc, from_dtype
    from numba.core.errors import NumbaError
    safe = bounds_checked(function) if custom_is_checked() else function
    fast = safe if safe is not function and indexes_by_values(function, len(kinds)) else function
    names = {f"v{k}": _array(*kind) for k, kind in enumerate(kinds)}
    names |= {"ask": ask, "flag": array_maker(from_dtype(np.dtype(np.int64))), "fast": fast, "safe": safe}
    arrays = ", ".join(f"v{k}(node + {DST if k == 0 else SRC0 + WORD * V_WORDS * (k - 1)})" for k in range(len(kinds)))
    exec(f"def kernel(node, ith, nth, sync):\n"
         f"    n = {'nth' if n_tasks < 0 else f'min(nth, {n_tasks})'}\n"
         f"    if ith >= n:\n        return 0\n"
         f"    tried = flag({flag_at}, (1,))[0] != 0\n"
         f"    if not tried and ask(0, ith, n, 0):\n        return {RAISED}\n"
         f"    try:\n"
         f"        if tried:\n            fast({arrays}, ith, n)\n"
         f"        else:\n            safe({arrays}, ith, n)\n"
         f"    except Exception:\n        return {RAISED}\n"
         f"    return 0\n", names)               # one call with as many arrays as there are
    try:
        return cfunc("int64(int64, int64, int64, int64)", nopython=True)(names["kernel"])
    except NumbaError as e:
        given = ", ".join(["dst", *(f"source {k}" for k in range(len(kinds) - 1)), "ith", "nth"])
        shapes = ", ".join(f"{ndim}-d {dtype}" for ndim, dtype, _ in kinds)
        raise TypeMismatch(f"the @njit function {function.__name__} does not compile as f({given}) with the arrays "
                           f"{shapes}: {useful(str(e))}") from None


def _packed(shape, dtype):
    """Strides of a C-contiguous array."""
    return tuple(dtype.itemsize * math.prod(shape[k + 1:]) for k in range(len(shape)))


def _array(ndim, dtype, packed):
    """Jitted function: NODE view -> array of `ndim` dimensions; packed ones are C-contiguous, so loops vectorise."""
    from numba import from_dtype, njit
    first, strided = array_maker(from_dtype(dtype)), np.lib.stride_tricks.as_strided
    shapes = (lambda v: (ne(v, 0),), lambda v: (ne(v, 1), ne(v, 0)), lambda v: (ne(v, 2), ne(v, 1), ne(v, 0)),
              lambda v: (ne(v, 3), ne(v, 2), ne(v, 1), ne(v, 0)))
    strides = (lambda v: (nb(v, 0),), lambda v: (nb(v, 1), nb(v, 0)), lambda v: (nb(v, 2), nb(v, 1), nb(v, 0)),
               lambda v: (nb(v, 3), nb(v, 2), nb(v, 1), nb(v, 0)))
    shape, stride = njit(shapes[ndim - 1]), njit(strides[ndim - 1])
    if packed:
        return njit(lambda v: first(addr(v), shape(v)))
    return njit(lambda v: strided(first(addr(v), 1), shape(v), stride(v)))
