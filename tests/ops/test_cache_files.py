"""Files of the kernel cache: another user's, writable, forged, linked or damaged ones are not used, or unpickled."""
import os
import pickle
import shutil
import stat

import pytest

from ggjit.ops.native import cache_files
from ggjit.ops.native.cache_files import Unusable, pack, read, unpack, write

# one small kernel: a cache of its own has nothing of what others compiled
CODE = ("import ggjit as gg\nfrom ggjit.ops.native.jit import CACHE\n"
        "print(gg.dequantize(gg.Q8_0, bytes(34), (32,)).tolist()[:4], CACHE.loaded > 0)")
posix = pytest.mark.skipif(os.name != "posix", reason="owners and modes are POSIX's")


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "cache" / "kernels" / "a-0123.o"
    write(path, pack(b"symbol", b"", b"code"))
    return path


def test_parts_come_back_as_they_were(path):
    assert unpack(read(path), 3) == [b"symbol", b"", b"code"]
    assert read(path.with_name("absent.o")) is None and read(path.parent.parent / "absent" / "a.o") is None


@posix
def test_files_and_folders_are_private(path):
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@posix
@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_what_others_may_write_is_not_used(path, mode):
    path.chmod(mode)
    with pytest.raises(Unusable, match="may be written by other users.*chmod"):
        read(path)
    path.chmod(0o600)
    path.parent.chmod(0o700 | mode & 0o022)
    with pytest.raises(Unusable, match="kernels may be written by other users"):
        read(path)


@posix
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="supports chown at most as root")
def test_what_belongs_to_another_user_is_not_used(path):
    os.chown(path, 12345, 12345)
    with pytest.raises(Unusable, match="belongs to another user"):
        read(path)
    os.chown(path, 0, 0)
    os.chown(path.parent, 12345, 12345)
    with pytest.raises(Unusable, match="belongs to another user"):
        read(path)


@posix
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="supports chown at most as root")
def test_a_cache_below_the_folder_of_another_user_is_not_used(path):
    """They can put another folder in its place between two looks."""
    above = path.parent.parent
    os.chown(above, 12345, 12345)
    for use in (lambda: read(path), lambda: write(path, pack(b"x"))):
        with pytest.raises((Unusable, PermissionError), match="the folder above it, belongs to another user"):
            use()
    os.chown(above, 0, 0)
    above.chmod(0o777)
    with pytest.raises(Unusable, match="the folder above it, may be written by other users.*chmod o-w"):
        read(path)
    above.chmod(0o1777)
    assert read(path)


def test_a_file_under_another_name_is_not_used(path):
    """Two kernels' objects that changed places would compute something else."""
    other = path.with_name("b-0123.o")
    path.rename(other)
    with pytest.raises(Unusable, match="damaged"):
        read(other)


@pytest.mark.parametrize("at", [0, 8, 39, 40, 44, -1])
def test_one_changed_byte_is_noticed(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(Unusable, match="damaged"):
        read(path)


@pytest.mark.parametrize("payload,n", [(b"", 1), (b"\x05\x00\x00\x00abc", 1), (b"\xff\xff\xff\xff", 1), (pack(b"a"), 2),
                                       (pack(b"a", b"b"), 1), (b"\x00\x00\x00", 1)])
def test_lengths_are_checked(payload, n):
    with pytest.raises(Unusable, match="damaged"):
        unpack(payload, n)


@posix
def test_links_and_pipes_are_not_followed(path):
    target = path.rename(path.with_name("target"))
    path.symlink_to(target)
    with pytest.raises(OSError, match="symbolic link|Too many levels"):
        read(path)
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(Unusable, match="not a plain file"):
        read(path)


def test_a_failed_write_leaves_nothing_behind(path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")
    before = path.read_bytes()
    monkeypatch.setattr(cache_files.os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write(path, b"new")
    assert [p.name for p in path.parent.iterdir()] == [path.name] and path.read_bytes() == before


class Shell:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


@pytest.fixture(scope="module")
def filled(python, tmp_path_factory):
    """A cache with the kernels of CODE."""
    cache = tmp_path_factory.mktemp("filled") / "cache"
    good = python(CODE, GGJIT_CACHE_DIR=str(cache))
    assert good.returncode == 0, good.stderr
    assert python(CODE, GGJIT_CACHE_DIR=str(cache)).stdout == "[0.0, 0.0, 0.0, 0.0] True\n"
    return cache


@posix
@pytest.mark.parametrize("attack", ["pickles", "open folder", "pipes"])
def test_a_process_survives_a_hostile_cache(attack, filled, python, tmp_path):
    """Right results, one line on stderr, and no command of the attacker's was run."""
    cache, mark = tmp_path / "cache", tmp_path / "ran"
    shutil.copytree(filled, cache)
    for f in (cache / "kernels").iterdir():
        if attack == "pickles":
            f.write_bytes(pickle.dumps(Shell(mark)))
        elif attack == "pipes":
            f.unlink()
            os.mkfifo(f, 0o600)
    if attack == "open folder":
        (cache / "kernels").chmod(0o777)
    r = python(CODE, GGJIT_CACHE_DIR=str(cache))
    assert r.returncode == 0 and r.stdout == "[0.0, 0.0, 0.0, 0.0] False\n", r.stderr
    assert r.stderr.count("kernel cache") == 1 and not mark.exists()
