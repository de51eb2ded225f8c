"""Kernel packs: compiled kernels in one file, for a class, a container or the nodes of a cluster.

    PACK    magic | SHA-256 of the rest | parts: facts as JSON, then name and payload of each kernel

A pack holds machine code, which is executed: import one as you would run a program, from people you trust.  It is read
as bytes and JSON, nothing is unpickled.  All of it is checked before the first kernel is written, and each is
written as the cache writes its own: with a digest, for this user alone.
"""
import hashlib
import json
import os
import pathlib
import re
import stat
import sys

import llvmlite
import numba

from ggjit import __version__
from ggjit.models.networks.load import load_model
from ggjit.ops.core.errors import BadFile, ParamError
from ggjit.ops.core.whole_file import write_whole
from ggjit.ops.native import cache_files, isa
from ggjit.ops.native.jit import CACHE, sources_key

_MAGIC = b"ggjit-kernels\x01\n"
_HEAD = len(_MAGIC) + 32
_NAME = re.compile(r"[A-Za-z0-9_<>+-][\w.<>+-]*-[0-9a-f]{20}\.o")
MAX_NBYTES = 1 << 30


def facts():
    """What machine code depends on besides its sources: packs go between machines on which this is equal."""
    return {"ggjit": __version__, "numba": numba.__version__, "llvmlite": llvmlite.__version__,
            "python": "{}.{}".format(*sys.version_info[:2]),
            "processor": isa.target(),
            "features": hashlib.sha256(isa.cpu_key().encode()).hexdigest()[:12]}


def export(path, model=None):
    """Write the kernels of the cache, or those that a model needs, into a pack: their number.

    Errors: ParamError for an empty cache, OSError.
    """
    folder = cache_files.cache_dir() / "kernels"
    files = sorted(folder.glob("*.o")) if model is None else _kernels_of(model, folder)
    parts = [json.dumps(facts()).encode()]
    for file in files:
        try:
            payload = cache_files.read(file)
        except cache_files.Unusable:        # the next process that needs it compiles it again
            continue
        if payload is not None and _NAME.fullmatch(file.name):
            parts += [file.name.encode(), payload]
    if len(parts) == 1:
        raise ParamError(f"no kernels in {folder}; `ggjit warm-up MODEL` compiles those of a model")
    rest = cache_files.pack(*parts)
    write_whole(pathlib.Path(path), _MAGIC + hashlib.sha256(rest).digest() + rest)
    return len(parts) // 2


def _kernels_of(model, folder):
    """Files of the kernels that the model's common graphs use, compiled now if they are not there."""
    with load_model(model) as network:
        network.warm_up()
    return [folder / f"{name}-{sources_key(tuple(sorted(modules)))}.o" for name, modules in sorted(CACHE.addresses)]


def install(path):
    """Put the kernels of a pack into the cache: (their number, how many are new).  Errors: BadFile, OSError."""
    parts = _parts(path, _content(path))
    try:
        made_for = json.loads(parts[0])
        names = [name.decode("ascii") for name in parts[1::2]]
    except ValueError as e:
        raise BadFile(f"{path}: a damaged kernel pack ({e}); get it again") from None
    here = facts()
    if not isinstance(made_for, dict) or made_for != here:
        made_for = made_for if isinstance(made_for, dict) else {}
        differs = ", ".join(f"{k} {made_for.get(k)} (here {v})" for k, v in here.items() if made_for.get(k) != v)
        raise BadFile(f"{path}: kernels for another machine or version: {differs or 'unknown facts'}; export a pack on "
                      f"a machine like this one")
    for name in names:
        if not _NAME.fullmatch(name):
            raise BadFile(f"{path}: {name!r} is no name of a kernel; the pack was not written by `ggjit cache export`")
    folder, n_new = cache_files.cache_dir() / "kernels", 0
    for name, payload in zip(names, parts[2::2], strict=True):
        try:
            known = cache_files.read(folder / name) is not None
        except cache_files.Unusable:
            known = False
        if not known:
            cache_files.write(folder / name, payload)
            n_new += 1
    return len(names), n_new


def _content(path):
    """The bytes of the file, which must be this user's and writable by nobody else."""
    with open(path, "rb") as f:
        found = os.fstat(f.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise BadFile(f"{path}: not a plain file; name a pack that `ggjit cache export` wrote")
        if os.name == "posix" and (found.st_uid not in (os.geteuid(), 0) or stat.S_IMODE(found.st_mode) & 0o022):
            raise BadFile(f"{path}: other users own it or may write it, and it holds code; copy it to a file of yours "
                          f"(cp, chmod go-w) and import that")
        content = f.read(MAX_NBYTES + 1)
    if len(content) > MAX_NBYTES:
        raise BadFile(f"{path}: larger than any kernel pack ({MAX_NBYTES >> 30} GiB)")
    return content


def _parts(path, content):
    """The parts behind the head, an odd number of them."""
    if not content.startswith(_MAGIC):
        raise BadFile(f"{path}: no kernel pack; `ggjit cache export FILE` writes one")
    rest, parts = content[_HEAD:], []
    if hashlib.sha256(rest).digest() != content[len(_MAGIC):_HEAD]:
        raise BadFile(f"{path}: a damaged kernel pack; get it again")
    at = 0
    while at < len(rest):
        end = at + 4 + int.from_bytes(rest[at:at + 4], "little")
        if end > len(rest):
            raise BadFile(f"{path}: a damaged kernel pack; get it again")
        parts.append(rest[at + 4:end])
        at = end
    if len(parts) % 2 == 0:
        raise BadFile(f"{path}: a damaged kernel pack; get it again")
    return parts
