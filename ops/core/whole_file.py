"""Files that are written whole or not at all.

    with whole_file("report.csv", text=True) as f:
        f.write("...")

A file of another name is written beside it and renamed when it is complete.  Its name cannot be guessed and it must be
new, so no link put there beforehand leads elsewhere; a link of the wanted name is replaced, not followed.  After an
error (a full disk, Ctrl-C) the partial file is gone and what had the name before is as it was.  What a killed process
left is removed when the same file is written next: its lock is free.

Devices, pipes and the open files under /dev and /proc have nothing to replace: they are written as they are.
"""
import contextlib
import errno
import os
import re
import stat
import time

try:
    import fcntl
except ImportError:                             # Windows
    fcntl = None

NEW_SECONDS = 1.0               # between making a file and locking it, at most

_IN_USE = 5, 32, 33, 1224       # Windows: access denied, open elsewhere, locked, mapped


@contextlib.contextmanager
def whole_file(path, text=False, mode=0o666, durable=True, devices=True):
    """A file to write, `.name` its path until then; it is `path` when the block ends without an error.

    text: UTF-8, line ends as they are written; else bytes.  mode: permissions, less the umask; those of a file that is
    replaced stay, but for those that are not in mode.  durable: the bytes are on the disk before the name is.
    devices: False in folders of our own, where a pipe or device has no business and is replaced.
    Errors: OSError with `path` as its filename.
    """
    path = os.path.abspath(os.fspath(path))
    try:
        before = _plain(path)
        if before is None and devices:
            with _open(path, "w", text) as f:
                yield f
            return
        with _partial(path, text, before & mode if before else mode) as f:
            yield f
            f.flush()
            if durable:
                os.fsync(f.fileno())
            if before and hasattr(os, "fchmod"):
                os.fchmod(f.fileno(), before & mode)
            f.close()                           # closing may report a full disk, and Windows does not rename open files
            _replace(f.name, path)
    except OSError as e:
        if e.filename is not None and e.filename != path and os.path.dirname(str(e.filename)) != os.path.dirname(path):
            raise                               # the error belongs to another file that the block used
        raise OSError(e.errno, e.strerror or str(e), path) from e


@contextlib.contextmanager
def whole_files(paths):
    """Files to write, one for each path: at the end of the block all get their names, after an error none, and what had
    a name before has it again.  Errors: OSError."""
    paths = [os.path.abspath(os.fspath(path)) for path in paths]
    with contextlib.ExitStack() as stack:
        before = [_plain(path) or 0 for path in paths]
        files = [stack.enter_context(_partial(path, False, mode or 0o666))
                 for path, mode in zip(paths, before, strict=True)]
        yield files
        for f, mode in zip(files, before, strict=True):
            f.flush()
            os.fsync(f.fileno())
            if mode and hasattr(os, "fchmod"):
                os.fchmod(f.fileno(), mode)
            f.close()
        _rename_all([(f.name, path) for f, path in zip(files, paths, strict=True)])


def _replace(new, path):
    """os.replace; Windows refuses it for a file that a program has open, mapped ones included."""
    try:
        os.replace(new, path)
    except OSError as e:
        if getattr(e, "winerror", None) not in _IN_USE:
            raise
        raise PermissionError(errno.EACCES, "it is in use, and Windows does not replace a file in use; free the model "
                              "that was loaded from it (m.free()), close other programs that read it, or choose "
                              "another name", path) from e


def _rename_all(pairs):
    """Rename each file to its path, or none."""
    done, aside = [], {}
    try:
        for new, path in pairs:
            if os.path.lexists(path):
                old = f"{new}.before"
                try:
                    os.link(path, old, follow_symlinks=False)
                except OSError:                 # a file system without links
                    _replace(path, old)
                aside[path] = old
            _replace(new, path)
            done.append(path)
    except BaseException:
        for path in {*done, *aside}:
            if path not in aside:
                os.unlink(path)
                continue
            try:
                os.replace(aside[path], path)
            except PermissionError:
                if path in done:
                    raise               # else in use, on Windows, and as it was
        raise
    finally:
        for old in aside.values():              # also after an error: two links to one file are not renamed
            with contextlib.suppress(OSError):
                os.unlink(old)


def write_whole(path, content, **options):
    """Write bytes or a text as the file `path`; options and errors as whole_file."""
    with whole_file(path, text=isinstance(content, str), **options) as f:
        f.write(content)


def _open(name, mode, text, **options):
    return open(name, mode, encoding="utf-8", newline="", **options) if text else open(name, mode + "b", **options)


def _plain(path):
    """Permissions of the plain file of that name, 0 where there is none; None for devices and the like, which are not
    replaced."""
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        raise FileNotFoundError(errno.ENOENT, "no such folder", folder)
    if os.path.isdir(path) and not os.path.islink(path):
        raise IsADirectoryError(errno.EISDIR, "a folder, not a file", path)
    if folder in ("/dev", "/dev/fd") or folder.startswith("/proc/"):
        return None
    with contextlib.suppress(FileNotFoundError):
        found = os.lstat(path).st_mode
        if stat.S_ISREG(found):
            return stat.S_IMODE(found)
        return 0 if stat.S_ISLNK(found) else None
    return 0


def _lock(f):
    """Lock a file, so that no other process removes it while this one lives.  Returns whether it was free; True on
    systems without locks (Windows does not remove open files)."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(f.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:                             # another process writes it, or a file system without locks
        return False
    return True


def _remove_abandoned(folder, name):
    """Remove what processes that were killed left of a file of that name."""
    ours = re.compile(rf"\.{re.escape(name[:40])}\.[0-9a-f]{{16}}\.part")
    with contextlib.suppress(OSError):          # a folder that cannot be listed; one of another user
        for entry in [e for e in os.scandir(folder) if ours.fullmatch(e.name) and e.is_file(follow_symlinks=False)]:
            with contextlib.suppress(OSError), open(entry.path, "r+b") as f:
                if _lock(f) and time.time() - os.fstat(f.fileno()).st_mtime > NEW_SECONDS:
                    os.unlink(entry.path)


@contextlib.contextmanager
def _partial(path, text, mode):
    """A new file beside `path`, removed after an error."""
    folder, name = os.path.split(path)
    _remove_abandoned(folder, name)
    partial = os.path.join(folder, f".{name[:40]}.{os.urandom(8).hex()}.part")

    def exclusive(name, flags):
        return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0), mode)
    with _open(partial, "x", text, opener=exclusive) as f:
        _lock(f)
        try:
            yield f
        except BaseException:
            with contextlib.suppress(OSError):
                f.close()
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise
