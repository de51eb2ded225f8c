"""The memory of this process, as the operating system counts it.

    anonymous   pages that belong to this process alone: arrays, Python's objects, code made here
    file        pages of files that are mapped: weights as they are in their file, libraries; others may share them

    process_memory()            -> ProcessMemory, or None where the system does not say (Linux does)
    resident(array)             -> (anonymous, file): bytes of its pages that are in memory

Pages are counted when they are first touched, so an array may take less than it has.
"""
import contextlib
import ctypes
import dataclasses
import mmap
import sys

import numpy as np

PAGE = mmap.PAGESIZE
PRESENT, OF_FILE = np.uint64(1 << 63), np.uint64(1 << 61)       # bits of an entry of /proc/PID/pagemap
ENTRY_NBYTES, CHUNK = 8, 1 << 20                                # entries read at once
ROLLUP, STATUS, STATM, PAGEMAP = (f"/proc/self/{name}" for name in ("smaps_rollup", "status", "statm", "pagemap"))


@dataclasses.dataclass(frozen=True)
class ProcessMemory:
    """Bytes.  high_water: the most that were in memory at once (VmHWM), since the process began."""
    anonymous: int
    file: int
    high_water: int

    @property
    def total(self):
        return self.anonymous + self.file


def process_memory():
    """The ProcessMemory of this process, or None where the system does not tell anonymous pages from those of files."""
    try:
        rollup, status = _fields(ROLLUP), _fields(STATUS)
    except OSError:
        return None
    return ProcessMemory(rollup["Anonymous"], rollup["Rss"] - rollup["Anonymous"], status["VmHWM"])


def _fields(path):
    """{name: bytes} of lines "Name:  123 kB"."""
    with open(path, encoding="utf-8") as f:
        parts = [line.split() for line in f]
    return {p[0].rstrip(":"): int(p[1]) << 10 for p in parts if len(p) == 3 and p[2] == "kB"}


def resident_now():
    """(anonymous, file) bytes of this process: faster than process_memory, and off by some pages of each processor.

    (0, 0) where the system does not say.
    """
    with contextlib.suppress(OSError), open(STATM, encoding="utf-8") as f:
        n_pages, n_file = map(int, f.read().split()[1:3])
        return (n_pages - n_file) * PAGE, n_file * PAGE
    return 0, 0


class _HeapUse(ctypes.Structure):
    """The C library's `struct mallinfo2`; fordblks: free bytes."""
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks",
                                                     "fsmblks", "uordblks", "fordblks", "keepcost")]


def heap_free():
    """Bytes of the C heap that are free and were not given back; 0 where the C library does not say (glibc does)."""
    info = getattr(ctypes.CDLL(None), "mallinfo2", None) if sys.platform == "linux" else None
    if info is None:
        return 0
    info.restype = _HeapUse
    return info().fordblks


def taken_now():
    """(anonymous, file, free) bytes of this process; free: of the anonymous ones, what is free on the heap."""
    return *resident_now(), heap_free()


def give_back_heap():
    """Free memory of the C heap goes back to the system, where the C library can do so."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def is_cached(array):
    """Does the system hold the page of the first byte, so that reading it takes nothing from the disk?  False where it
    does not say."""
    mincore = getattr(ctypes.CDLL(None), "mincore", None) if sys.platform == "linux" else None
    first, held = array.__array_interface__["data"][0] // PAGE * PAGE, ctypes.c_ubyte()
    return mincore is not None and not mincore(ctypes.c_void_p(first), ctypes.c_size_t(PAGE), ctypes.byref(held)) \
        and bool(held.value & 1)


def resident(array):
    """(anonymous, file) bytes of the pages of `array` that are in memory; None where the system does not say."""
    first, nbytes = array.__array_interface__["data"][0], array.nbytes
    if not nbytes:
        return 0, 0
    at, end, anonymous, of_file = first // PAGE, -(-(first + nbytes) // PAGE), 0, 0
    try:
        with open(PAGEMAP, "rb", buffering=0) as f:
            while at < end:
                f.seek(at * ENTRY_NBYTES)
                entries = np.frombuffer(f.read(min(end - at, CHUNK) * ENTRY_NBYTES), np.uint64)
                if not len(entries):
                    return None
                present = entries >= PRESENT
                n_file = int(np.count_nonzero(entries[present] & OF_FILE))
                of_file += n_file
                anonymous += int(np.count_nonzero(present)) - n_file
                at += len(entries)
    except OSError:
        return None
    return anonymous * PAGE, of_file * PAGE
