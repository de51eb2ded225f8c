"""Files of the cache folder.  Machine code in them is executed, so a file is used only if it is whole and this user's.

    CACHE/kernels/NAME    magic | SHA-256 of the file's name and the payload | payload

Folder and file belong to this user (or root), and no other user may write them; links are not followed.  Both are
checked on the descriptors that are read from.  Payloads are parts with their lengths in front: nothing is unpickled.
"""
import contextlib
import errno
import hashlib
import os
import pathlib
import stat
import struct

from ggjit.ops.core.whole_file import write_whole

MAX_NBYTES = 1 << 28            # limit of a cached kernel; real ones are far smaller
_MAGIC = b"ggjit\x00\x01\n"
_HEAD = len(_MAGIC) + 32
_LENGTH = struct.Struct("<I")
_AT = os.open in os.supports_dir_fd


class Unusable(Exception):
    """A file or folder that must not be used; the text says why and what mends it."""


def cache_dir():
    """Folder of everything ggjit keeps: GGJIT_CACHE_DIR, or the platform's cache folder."""
    import platformdirs  # imported here: it takes a fiftieth of the time of importing ggjit, and is seldom needed
    return pathlib.Path(os.environ.get("GGJIT_CACHE_DIR") or platformdirs.user_cache_dir("ggjit", appauthor=False))


def open_own(path):
    """A file of the cache that no other user can write, opened to be read; None where there is none.

    Errors: Unusable, OSError.
    """
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY) if _AT else None
    except FileNotFoundError:
        return None
    try:
        if folder is not None:
            _require_private(os.fstat(folder), path.parent)
            _require_own(path.parent.parent)
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        file = os.open(path.name, flags, dir_fd=folder) if _AT else os.open(path, flags)
    except FileNotFoundError:
        return None
    finally:
        if folder is not None:
            os.close(folder)
    opened = os.fdopen(file, "rb")
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise Unusable("not a plain file; remove it")
        _require_private(found, path)
    except BaseException:
        opened.close()
        raise
    return opened


def read(path):
    """The payload of a file, or None where there is none.  Errors: Unusable, OSError."""
    file = open_own(path)
    if file is None:
        return None
    with file:
        if os.fstat(file.fileno()).st_size > MAX_NBYTES:
            raise Unusable("larger than any kernel; remove it")
        content = file.read()           # with a number, Python would set that much memory aside
    payload = content[_HEAD:]
    if content[:_HEAD] != _head(path, payload):
        raise Unusable("a damaged file, compiled again")
    return payload


def make_folder(folder):
    """Make a folder of the cache, for this user alone.  Errors: OSError; PermissionError where the folder above belongs
    to another user."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    try:
        _require_own(folder.parent)
    except Unusable as e:
        raise PermissionError(errno.EPERM, str(e), str(folder)) from None


def make_room(folder, nbytes, limit_nbytes):
    """Remove the files of a folder that were not used for longest, until nbytes more are within the limit.  Errors:
    OSError."""
    found = []
    for file in folder.iterdir():
        with contextlib.suppress(OSError):      # another process has just removed it
            s = os.stat(file)
            found.append((s.st_mtime_ns, s.st_size, file))
    held = sum(size for _, size, _ in found)
    for _, size, file in sorted(found):
        if held + nbytes <= limit_nbytes:
            break
        file.unlink(missing_ok=True)
        held -= size


def write(path, payload):
    """Write a file, whole or not at all, for this user alone.  Errors: OSError; PermissionError where the folder above
    belongs to another user."""
    make_folder(path.parent)
    write_whole(path, _head(path, payload) + payload, mode=0o600, durable=False, devices=False)


def pack(*parts):
    """Several byte strings joined to one payload."""
    return b"".join(_LENGTH.pack(len(p)) + p for p in parts)


def unpack(payload, n):
    """The n byte strings of `pack`.  Errors: Unusable."""
    parts, at = [], 0
    for _ in range(n):
        if at + _LENGTH.size > len(payload):
            raise Unusable("a damaged file, compiled again")
        end = at + _LENGTH.size + _LENGTH.unpack_from(payload, at)[0]
        parts.append(payload[at + _LENGTH.size:end])
        at = end
    if at != len(payload):
        raise Unusable("a damaged file, compiled again")
    return parts


def _head(path, payload):
    return _MAGIC + hashlib.sha256(path.name.encode() + b"\0" + payload).digest()


def _require_own(folder):
    """Unusable, where another user can put another folder in the place of one in `folder`: it is theirs, or everybody
    may write it and it has no sticky bit."""
    found = os.stat(folder)
    if os.name != "posix":
        return
    if found.st_uid not in (os.geteuid(), 0):
        raise Unusable(f"{folder}, the folder above it, belongs to another user and is not used")
    if found.st_mode & 0o002 and not found.st_mode & stat.S_ISVTX:
        raise Unusable(f"{folder}, the folder above it, may be written by other users and is not used (chmod o-w mends "
                       f"it)")


def _require_private(found, path):
    if os.name != "posix":
        return
    if found.st_uid not in (os.geteuid(), 0):
        raise Unusable(f"{path} belongs to another user and is not used")
    if stat.S_IMODE(found.st_mode) & 0o022:
        raise Unusable(f"{path} may be written by other users and is not used (chmod -R go-w mends it)")
