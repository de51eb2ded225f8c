"""Kernel packs: compiled kernels in one file, for a wheel, a class, a container or the nodes of a cluster.

    PACK    magic | SHA-256 of the rest | parts: facts and names as JSON, then the kernels, compressed together (xz)

A pack holds machine code, which is executed: import one as you would run a program, from people you trust.  It is read
as bytes and JSON, nothing is unpickled.  All of it is checked before the first kernel is written, and each is
written as the cache writes its own: with a digest, for this user alone.

A wheel carries one pack for each level (ggjit.ops.native.isa) in the folder `kernels` of ggjit.ops, made by
`python -m ggjit.tools.ship_kernels`.  Its kernels join the cache when the first of them is needed; a pack that does
not fit this Python, Numba or processor is not used, and `ggjit info` says so.
"""
import contextlib
import functools
import hashlib
import json
import os
import pathlib
import re
import stat
import sys

import llvmlite
import numba

from ggjit.ops.core.errors import BadFile
from ggjit.ops.core.json_text import parse_json
from ggjit.ops.core.locks import ForkLock
from ggjit.ops.core.whole_file import write_whole
from ggjit.ops.native import cache_files, isa

_MAGIC = b"ggjit-kernels\x03\n"
_HEAD = len(_MAGIC) + 32
_OPS = pathlib.Path(__file__).parents[1]
NAME = re.compile(r"[A-Za-z0-9_<>+-][\w.<>+-]*-[0-9a-f]{20}\.o")
MAX_NBYTES = 1 << 30


@functools.cache
def _sources():
    """Digest of the files that kernels are made of."""
    h = hashlib.sha256()
    for path in sorted(_OPS.rglob("*.py")):
        h.update(path.relative_to(_OPS).as_posix().encode() + b"\0" + path.read_bytes())
    return h.hexdigest()[:12]


def facts():
    """What machine code depends on: packs go between machines on which this is equal."""
    return {"numba": numba.__version__, "llvmlite": llvmlite.__version__,
            "python": "{}.{}".format(*sys.version_info[:2]), "level": isa.LEVEL,
            "compiled for": hashlib.sha256(isa.code_key().encode()).hexdigest()[:12], "sources": _sources()}


def write(path, kernels):
    """Write {file name in the cache: payload} as a pack.  Errors: OSError."""
    import lzma  # a part of Python that some builds lack
    code = lzma.compress(cache_files.pack(*kernels.values()), preset=9)
    manifest = {name: hashlib.sha256(payload).hexdigest() for name, payload in kernels.items()}
    rest = cache_files.pack(json.dumps(facts()).encode(), json.dumps(manifest).encode(), code)
    write_whole(pathlib.Path(path), _MAGIC + hashlib.sha256(rest).digest() + rest)


def read(path):
    """{file name in the cache: payload} of a pack.  Errors: BadFile, OSError."""
    manifest, code = _opened(path)
    try:
        import lzma
        plain = lzma.LZMADecompressor(memlimit=1 << 28)
        payloads = cache_files.unpack(plain.decompress(code, MAX_NBYTES), len(manifest))
    except ImportError:
        raise BadFile(f"{path}: this Python was built without lzma, which unpacks it; use one that has it, or "
                      f"let the kernels be compiled") from None
    except (lzma.LZMAError, cache_files.Unusable, EOFError):
        raise _damaged(path) from None
    for (name, digest), payload in zip(manifest.items(), payloads, strict=True):
        if hashlib.sha256(payload).hexdigest() != digest:
            raise BadFile(f"{path}: kernel {name} is not the one that the pack's manifest lists; get the pack again")
    return dict(zip(manifest, payloads, strict=True))


def install(path):
    """Put the kernels of a pack into the cache: (their number, how many are new).  Errors: BadFile, OSError."""
    kernels = read(path)
    return len(kernels), _into_cache(kernels)


def _into_cache(kernels):
    """How many of the kernels were not there."""
    folder, n_new = cache_files.cache_dir() / "kernels", 0
    for name, payload in kernels.items():
        try:
            known = cache_files.read(folder / name) is not None
        except cache_files.Unusable:
            known = False
        if not known:
            cache_files.write(folder / name, payload)
            n_new += 1
    return n_new


def _damaged(path):
    return BadFile(f"{path}: a damaged kernel pack; get it again")


def _opened(path):
    """({name: SHA-256 of its payload}, compressed kernels) of a pack for this machine and version.

    Errors: BadFile, OSError.
    """
    content = _content(path)
    if not content.startswith(_MAGIC):
        raise BadFile(f"{path}: not a kernel pack of this version; `ggjit cache export FILE` writes one")
    if hashlib.sha256(content[_HEAD:]).digest() != content[len(_MAGIC):_HEAD]:
        raise _damaged(path)
    try:
        made_for, manifest, code = cache_files.unpack(content[_HEAD:], 3)
        made_for, manifest = parse_json(made_for), parse_json(manifest)
    except (ValueError, cache_files.Unusable):
        raise _damaged(path) from None
    here = facts()
    if made_for != here:
        made_for = made_for if isinstance(made_for, dict) else {}
        differs = ", ".join(f"{k} {made_for.get(k)} (here {v})" for k, v in here.items() if made_for.get(k) != v)
        raise BadFile(f"{path}: kernels for another machine or version: {differs or 'unknown facts'}; export a pack on "
                      f"a machine like this one, with the same versions")
    if not isinstance(manifest, dict):
        raise _damaged(path)
    for name in manifest:
        if not NAME.fullmatch(name):
            raise BadFile(f"{path}: {name!r} is not the name of a kernel; the pack was not written by `ggjit cache "
                          f"export`")
    return manifest, code


def _content(path):
    """The bytes of the file, which must be this user's and writable by no other user."""
    with open(path, "rb") as f:
        found = os.fstat(f.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise BadFile(f"{path}: not a plain file; name a pack that `ggjit cache export` wrote")
        if os.name == "posix" and (found.st_uid not in (os.geteuid(), 0) or stat.S_IMODE(found.st_mode) & 0o022):
            raise BadFile(f"{path}: other users own it or may write it, and it holds code; copy it to a file of yours "
                          f"(cp, chmod go-w) and import that")
        if found.st_size > MAX_NBYTES:
            raise BadFile(f"{path}: larger than any kernel pack ({MAX_NBYTES >> 30} GiB)")
        return f.read()


# ---------------------------------------------------------------- the pack of the installation
class ShippedKernels:
    """The pack that came with ggjit, where there is one for this level and Python.

    names: of its kernels' files; why_not: why there are none, in words.
    """

    def __init__(self, folder):
        self.path = folder / shipped_name()
        self._lock, self._kernels = ForkLock(), None

    @functools.cached_property
    def _found(self):
        try:
            return frozenset(_opened(self.path)[0]), ""
        except FileNotFoundError:
            return frozenset(), f"this installation has none for {isa.LEVEL} and Python {facts()['python']}"
        except (BadFile, OSError) as e:
            return frozenset(), str(e)

    names = property(lambda self: self._found[0])
    why_not = property(lambda self: self._found[1])

    def payload(self, name):
        """The bytes of one kernel, or None.  The first call writes all kernels of the pack into the cache."""
        if name not in self.names:
            return None
        with self._lock:
            if self._kernels is None:
                try:
                    self._kernels = read(self.path)
                except (BadFile, OSError) as e:             # deleted or changed since its names were read
                    self._found, self._kernels = (frozenset(), str(e)), {}
                # the cache cannot be written: each process unpacks the kernels, in a tenth of a second
                with contextlib.suppress(OSError):
                    _into_cache(self._kernels)
            return self._kernels.get(name)


def shipped_name():
    """File name of the pack for this level and Python."""
    return "{}-py{}.{}.pack".format(isa.LEVEL.partition(",")[0], *sys.version_info[:2])


SHIPPED = ShippedKernels(_OPS / "kernels")
