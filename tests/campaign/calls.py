"""Builders with random arguments, computed between guard pages: a typed error, or NumPy's float64 result.

    | page that cannot be touched | ......tensor | page that cannot be touched |

Tensors end (or begin) at the edge: a kernel that reads or writes one byte too far ends the process.
"""
import ctypes
import functools
import math
import mmap
import time
import warnings

import numpy as np
from helpers.builder_calls import (
    AXES,
    HUGE_SIDE,
    NUMBERS,
    OBJECTS,
    SIZES,
    SMALL,
    TYPES,
    build,
    calls,
    changed,
    known_kernels,
)
from helpers.builder_calls import kernels as kernels_of
from helpers.cases import expected, nmse

import ggjit as gg
from campaign.runner import Find
from ggjit.core.host_buffer import HOST, ArrayBuffer, HostBufferType
from ggjit.ops.core.errors import GgjitError
from ggjit.ops.core.record import OP, VIEW_OPS

PAGE = mmap.PAGESIZE
USERS = (OP.MAP_CUSTOM1, OP.MAP_CUSTOM2, OP.MAP_CUSTOM3, OP.CUSTOM)
MAX_NMSE = 5e-4                         # quantised types
MAX_SECONDS = 0.5                       # of computing tensors of SMALL elements
TINY, HUGE = 1e-20, 1e4                 # results that float32 holds well, intermediate sums too


class Guarded:
    """Memory between two pages whose touch is a segmentation fault, used again for case after case."""

    def __init__(self):
        self._free, self._taken, self._libc = {}, [], ctypes.CDLL(None, use_errno=True)     # number of pages: memory

    def __call__(self, nbytes, at_end=True):
        """uint8 array of nbytes zero bytes that ends, or begins, beside a guard page."""
        n_pages = -(-max(nbytes, 1) // PAGE)
        free = self._free.setdefault(n_pages, [])
        whole = free.pop() if free else self._made(n_pages)
        self._taken.append((free, whole))
        start = n_pages * PAGE - nbytes if at_end else 0
        part = whole[start:start + nbytes]
        part[:] = 0
        return part

    def _made(self, n_pages):
        whole = np.frombuffer(mmap.mmap(-1, (n_pages + 2) * PAGE), np.uint8)
        base = whole.__array_interface__["data"][0]
        for at in (base, base + (n_pages + 1) * PAGE):
            if self._libc.mprotect(ctypes.c_void_p(at), ctypes.c_size_t(PAGE), 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        return whole[PAGE:-PAGE]

    def take_back(self):
        """All that was given out: nothing refers to it any more."""
        while self._taken:
            free, whole = self._taken.pop()
            free.append(whole)


guarded = Guarded()


class GuardedType(HostBufferType):
    """Host memory that ends at a guard page."""
    name = "guarded"

    def alignment(self):
        return 4

    def alloc_buffer(self, size):
        return ArrayBuffer(self, guarded(size))


GUARDED = GuardedType(HOST.device)


def place(at_end):
    def memory(t):
        raw = guarded(t.nbytes, at_end)
        gg.tensor_alloc(ArrayBuffer(GUARDED, raw), t, 0)
    return memory


def change(rng):
    """One random change, as helpers/builder_calls.py: changed takes it."""
    def pick(values):
        return values[int(rng.integers(len(values)))]
    what = pick(("size", "size", "size", "empty", "type", "axes", "number", "number", "object", "leaf"))
    how = {"size": lambda: (int(rng.integers(4)), pick(SIZES)), "empty": lambda: _sides(rng),
           "type": lambda: (pick(TYPES),), "axes": lambda: (pick(AXES),), "number": lambda: (pick(NUMBERS),),
           "object": lambda: (pick(OBJECTS),), "leaf": lambda: ([pick(SIZES) for _ in range(4)],)}[what]()
    return what, *how


def _sides(rng):
    """An axis without elements and a very long one."""
    return int(rng.integers(4)), int(rng.integers(4))


@functools.cache
def names():
    return sorted(calls())


@functools.cache
def cpu():
    return gg.init_backend("CPU:n_threads=1", fuse=0)


def builders(rng):
    try:
        return build_and_compute(rng)
    finally:
        guarded.take_back()


def build_and_compute(rng):
    name = names()[int(rng.integers(len(names())))]
    some = calls()[name]
    args = list(some[int(rng.integers(len(some)))])
    if rng.integers(8) == 0:                    # several sources empty along the same axis
        sides, some = _sides(rng), rng.integers(2, size=len(args))
        args = [changed(a, "empty", *sides) if one else a for a, one in zip(args, some, strict=True)]
    for _ in range(int(rng.integers(3)) if args else 0):
        i = int(rng.integers(len(args)))
        args[i] = changed(args[i], *change(rng))
    out = build(name, args, int(rng.integers(10)), place(bool(rng.integers(2))))
    if isinstance(out, gg.Tensor):
        return compute(name, args, out)


def compute(name, args, out):
    graph = gg.Graph(out)
    computed = [t for t in graph.nodes if t.op not in VIEW_OPS]
    if max(math.prod(t.ne) for t in (*graph.nodes, *graph.leafs)) > SMALL or any(t.op in USERS for t in computed) \
            or not kernels_of(graph) <= known_kernels():
        return "right"
    # acc and set with rows that overlap are undefined; what is empty may stand for huge sizes on the way
    single = min(out.ne) > 0 and all(HUGE_SIDE not in t.ne for t in graph.leafs) \
        and len(computed) == 1 and computed[0].id == out.id and out.op not in (OP.ACC, OP.SET)
    bad_index, want = False, None
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            want = expected(out) if single else None
        except IndexError:
            bad_index = min(out.ne) > 0
    allocator = gg.GraphAllocator(GUARDED)
    allocator.alloc_graph(graph)
    plan, began = cpu().graph_plan_create(graph), time.thread_time()
    try:
        plan.compute()
    except GgjitError:
        return "refused"
    if time.thread_time() - began > MAX_SECONDS:
        raise Find(f"{name}{args}: took {time.thread_time() - began:.1f} s for at most {SMALL} elements")
    if bad_index:
        raise Find(f"{name}{args}: an id out of range was accepted")
    if want is None or out.type.dtype is None or out.type.dtype.kind != "f" or not want.size:
        return "right"
    got = plan.numpy(out).reshape(-1).astype(np.float64)
    largest = np.abs(want).max()
    if np.isfinite(want).all() and (largest == 0 or TINY < largest < HUGE) and nmse(got, want.reshape(-1)) > MAX_NMSE:
        raise Find(f"{name}{args}: NMSE {nmse(got, want.reshape(-1))}")
    return "right"


CASES = {"builders": builders}
