"""A file mapped into memory: the system reads its bytes at first use, and they can be released.

    data, state = map_file("model.gguf")    uint8 [bytes of the file], and what os.stat says of it
    give_back(data[first:end])              these pages are taken from the file again when they are read
"""
import ctypes
import errno
import mmap
import os
import platform
import stat
import sys

import numpy as np

from ggjit.models.files.missing import instead_of
from ggjit.ops.core.errors import BadFile, OutOfMemory

# Python's module has the word since 3.13; asm-generic/mman.h, and powerpc's own
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", {"ppc64le": 0x40}.get(platform.machine(), 0x4000)
                      if sys.platform == "linux" else 0)


def map_file(path):
    """(map_private of what can be a model file, its os.stat_result before that).  Errors: BadFile, OutOfMemory."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise BadFile(f"{path}: not a regular file; {instead_of(path)}")
        if os.path.getsize(path) < 24:
            raise BadFile(f"{path}: {os.path.getsize(path)} bytes, a GGUF header has at least 24; fetch it again")
        with open(path, "rb") as f:
            found = os.fstat(f.fileno())        # before anything is read
            return _mapped(f), found
    except FileNotFoundError as e:
        raise BadFile(f"{path}: {e.strerror}; {instead_of(path)}") from e
    except OSError as e:
        if e.errno == errno.ENOMEM:
            raise OutOfMemory(f"{path}: the system lets this process map no more memory; free models that are not in "
                              f"use, or raise the limit (ulimit -d, ulimit -v)") from e
        raise BadFile(f"{path}: {e.strerror}; check the path and the permissions") from e
    except ValueError as e:             # a null byte or a lone surrogate
        raise e if isinstance(e, BadFile) else BadFile(f"{path!r} is not a path of a file: {e}") from None


def map_private(path):
    """The file as uint8 in private copy-on-write pages; on Windows in pages that cannot be written.

    MAP_NORESERVE: without it Linux may refuse to map a file larger than its memory, because every page could be
    written.  Windows has no such word, and charges a copy-on-write mapping of 5 GB with 5 GB of its page file.
    """
    with open(path, "rb") as f:
        return _mapped(f)


def _mapped(f):
    if hasattr(mmap, "MAP_PRIVATE"):
        flags = mmap.MAP_PRIVATE | _NO_RESERVE
        return np.frombuffer(mmap.mmap(f.fileno(), 0, flags, mmap.PROT_READ | mmap.PROT_WRITE), np.uint8)
    return np.frombuffer(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


def give_back(array):
    """Drop the pages of a mapped file that lie wholly inside `array`; the next read takes them from the file.

    Where the system holds the file in pages of 2 MB, a read of what lies beside would map these whole again.
    """
    if sys.platform == "linux":
        page, first = mmap.PAGESIZE, array.__array_interface__["data"][0]
        start, end = -(-first // page) * page, (first + array.nbytes) // page * page
        if end > start:
            _advise(start, end, mmap.MADV_NOHUGEPAGE)
            _advise(start, end, mmap.MADV_DONTNEED)


def in_small_pages(array):
    """A mapped table of which some rows are read: no more than their surroundings shall come into memory."""
    if sys.platform == "linux":
        page, first = mmap.PAGESIZE, array.__array_interface__["data"][0]
        _advise(first // page * page, -(-(first + array.nbytes) // page) * page, mmap.MADV_NOHUGEPAGE)


def _advise(start, end, advice):
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)
