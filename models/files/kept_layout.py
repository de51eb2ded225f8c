"""Repacked weights on disk, beside the cached kernels: the next load maps them, and processes share their pages.

    CACHE/repacked/NAME     magic | bytes of the facts | the facts, JSON | zeros up to FIRST | the weights in the layout

The facts are what the layout follows from: each file's number, size and times, a few bytes of every matrix, where the
matrices lie, the processor's level and the sources of the layout.  NAME is their hash.  No system lets a program set
the time at which a file was changed last (ctime), so a file that was written again has other facts.  Writes that the
clock cannot tell from an earlier one are waited for: nothing is kept of a file that was changed less than
SETTLED_SECONDS ago.

Kept are weights of LEAST_NBYTES and more, up to the limit of GGJIT_REPACKED ("8G"; "off" keeps none) for all models and
a quarter of the free disk for one; those not used for longest are removed.  A thread writes them after the load.  Files
that other users may write are not used (ops/native/cache_files.py).  On Windows, which has no such time, none are kept.
"""
import contextlib
import hashlib
import json
import mmap
import os
import random
import shutil
import struct
import threading
import time
from typing import NamedTuple

import numpy as np

from ggjit.core.arguments import nbytes_of
from ggjit.models.files.mapped_file import give_back
from ggjit.ops.core.errors import OutOfMemory
from ggjit.ops.core.host_memory import start
from ggjit.ops.core.json_text import parse_json
from ggjit.ops.core.user_warnings import warn_once
from ggjit.ops.core.whole_file import whole_file
from ggjit.ops.native import cache_files, isa
from ggjit.ops.native.jit import sources_digest

FIRST = 2 << 20                 # byte of the file at which the weights begin: large pages begin there, too
LIMIT_NBYTES = 16 << 30
LEAST_NBYTES = 32 << 20         # less is repacked in a moment
SETTLED_SECONDS = 60.0          # by then a system has written the pages of a map that was written to
SAMPLE_NBYTES = 64
AT_ONCE = 16 << 20              # bytes that are written at once, whole large pages
LAYOUT = ("ggjit.ops.matmul.repack.layouts",)
_MAGIC = b"ggjit\x00\x02\n"
_LENGTH = struct.Struct("<I")
_writing = []                   # threads


class Matrix(NamedTuple):
    """A leaf as it lies in a part of the file (offs), and in the layout (at)."""
    type: object
    ne: tuple
    nbytes: int
    part: int
    offs: int
    at: int


class KeptLayout:
    """The layout of some matrices of a file, as it is kept or may be."""

    def __init__(self, path, facts, nbytes):
        self.nbytes = nbytes
        self._head = json.dumps({"model": os.path.abspath(path), **facts}).encode()
        self._facts = facts
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        self.path = folder() / f"{digest[:40]}.layout"

    def open(self):
        """The layout, a uint8 array over mapped pages that cannot be written; None where it is not kept."""
        with contextlib.suppress(cache_files.Unusable, OSError):         # it is made again
            file = cache_files.open_own(self.path)
            if file is None:
                return None
            with file:
                found = _facts_in(file)
                if found is None or os.fstat(file.fileno()).st_size != FIRST + self.nbytes:
                    return None
                del found["model"]
                if found != self._facts:
                    return None
                with contextlib.suppress(OSError):          # root's file
                    os.utime(file.fileno())                 # used now
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                if hasattr(mmap, "MADV_HUGEPAGE"):
                    with contextlib.suppress(OSError):      # a system without large pages
                        mapped.madvise(mmap.MADV_HUGEPAGE)
                return np.frombuffer(mapped, np.uint8)[FIRST:]
        return None

    def keep(self, array):
        """Write the layout in a thread of its own, which the process waits for at its end."""
        thread = threading.Thread(target=self._write, args=(array,), name="ggjit-keeps-repacked-weights")
        _writing[:] = [*(t for t in _writing if t.is_alive()), thread]
        with contextlib.suppress(OutOfMemory):              # no thread to be had: not kept this time
            start(thread, "a thread that keeps repacked weights")

    def _write(self, array):
        try:
            cache_files.make_folder(self.path.parent)
            if self.nbytes > shutil.disk_usage(self.path.parent).free // 4:
                return
            cache_files.make_room(self.path.parent, FIRST + self.nbytes, limit_nbytes())
            with whole_file(self.path, mode=0o600, devices=False) as f:
                f.write((_MAGIC + _LENGTH.pack(len(self._head)) + self._head).ljust(FIRST, b"\0"))
                for at in range(0, self.nbytes, AT_ONCE):
                    f.write(array[at:at + AT_ONCE])
        except OSError as e:
            warn_once("kept_layout", f"repacked weights are not kept in {self.path.parent} ({e.strerror or e}), each "
                                     f"load repacks them; GGJIT_REPACKED=off does not try")


def kept_layout(file, matrices, nbytes):
    """The KeptLayout of these [Matrix] of a file, nbytes together; None where they are not kept.  Errors: ParamError
    (GGJIT_REPACKED)."""
    states = [part.state for part in file.parts]
    if os.name != "posix" or None in states or not LEAST_NBYTES <= nbytes < limit_nbytes():
        return None
    if not all(0 <= s.st_ctime + SETTLED_SECONDS <= time.time() for s in states):
        return None
    where = hashlib.sha256(repr([(repr(m.type), *m[1:]) for m in matrices]).encode())
    for i, m in enumerate(matrices):
        raw = file.parts[m.part].map()[m.offs:m.offs + m.nbytes]
        at = random.Random(i).randrange(max(m.nbytes - SAMPLE_NBYTES, 1))
        where.update(raw[at:at + SAMPLE_NBYTES])
        give_back(raw)
    return KeptLayout(file.path, {
        "files": [[s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns] for s in states],
        "matrices": where.hexdigest(), "level": [isa.ISA, isa.LEVEL, isa.W], "code": sources_digest(LAYOUT)}, nbytes)


def folder():
    return cache_files.cache_dir() / "repacked"


def limit_nbytes():
    """Bytes that all files together may have: GGJIT_REPACKED, 0 where it is off.  Errors: ParamError."""
    asked = os.environ.get("GGJIT_REPACKED", "")
    return 0 if asked == "off" else nbytes_of(asked, "GGJIT_REPACKED") if asked else LIMIT_NBYTES


def wait():
    """Wait for what is being written."""
    for thread in list(_writing):
        if thread.ident is not None:
            thread.join()


def entries():
    """[(path of the model, bytes, seconds since the epoch of the last use, file)], the last used first."""
    found = []
    for path in folder().glob("*.layout"):
        with contextlib.suppress(cache_files.Unusable, OSError):
            with cache_files.open_own(path) or open(os.devnull, "rb") as file:          # removed since
                s, facts = os.fstat(file.fileno()), _facts_in(file)
            if facts is not None:
                found.append((facts["model"], s.st_size, s.st_mtime, path))
    return sorted(found, key=lambda entry: -entry[2])


def _facts_in(file):
    """The facts of a file; None if ggjit did not write it."""
    head = file.read(FIRST)
    if not head.startswith(_MAGIC) or len(head) < FIRST:
        return None
    begin = len(_MAGIC) + _LENGTH.size
    try:
        facts = parse_json(head[begin:begin + _LENGTH.unpack_from(head, len(_MAGIC))[0]])
    except ValueError:
        return None
    return facts if isinstance(facts, dict) and isinstance(facts.get("model"), str) else None
