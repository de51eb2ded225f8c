"""`ggjit cache`: kernels in one file; damaged, foreign and unsafe files are refused before anything is written."""
import hashlib
import json
import os

import pytest
from helpers.commands import result

from ggjit.ops.native import cache_files
from ggjit.tools.command import kernel_pack

NAME = "a.kernel-f32-" + "0" * 20 + ".o"
HEAD = kernel_pack._HEAD


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Moves the kernel cache to a folder of that name."""
    def use(name):
        monkeypatch.setenv("GGJIT_CACHE_DIR", str(tmp_path / name))
        return cache_files.cache_dir() / "kernels"
    return use


@pytest.fixture
def pack(tmp_path, cache, command):
    """A pack of two kernels."""
    for i in range(2):
        cache_files.write(cache("from") / NAME.replace("a.", f"{'ab'[i]}."), b"code" * (i + 1))
    assert result(command, "cache", "export", tmp_path / "k.pack") == {"kernels": 2}
    return tmp_path / "k.pack"


def signed(*parts):
    return with_digest(cache_files.pack(*parts))


def with_digest(rest):
    return kernel_pack._MAGIC + hashlib.sha256(rest).digest() + rest


def test_kernels_go_from_cache_to_cache(pack, cache, command):
    assert pack.stat().st_mode & 0o022 == 0
    there = cache("to")
    assert result(command, "cache", "import", pack) == {"kernels": 2, "new": 2}
    assert cache_files.read(there / NAME) == b"code" and (there / NAME).stat().st_mode & 0o777 == 0o600
    assert result(command, "cache", "import", pack) == {"kernels": 2, "new": 0}
    (there / NAME).write_bytes(b"damaged")
    assert result(command, "cache", "import", pack) == {"kernels": 2, "new": 1}
    assert "1 of them new" not in command("cache", "import", pack).stdout


def test_damaged_files_are_not_exported_and_an_empty_cache_is_an_error(pack, cache, command, tmp_path):
    (cache("from") / NAME).write_bytes(b"damaged")
    assert result(command, "cache", "export", pack) == {"kernels": 1}
    cache("none")
    r = command("cache", "export", tmp_path / "x.pack")
    assert r.returncode == 2 and "warm-up" in r.stderr and not (tmp_path / "x.pack").exists()
    assert command("cache", "import", pack, "-m", "m.gguf").returncode == 2


OTHER = {**kernel_pack.facts(), "numba": "0.1"}
FACTS = json.dumps(kernel_pack.facts()).encode()
WRONG = {
    "empty": (lambda b: b"", "no kernel pack"), "another file": (lambda b: b"GGUF" + b, "no kernel pack"),
    "cut": (lambda b: b[:-1], "damaged"), "one bit": (lambda b: b[:HEAD + 5] + bytes([b[HEAD + 5] ^ 1]) + b[HEAD + 6:],
                                                     "damaged"),
    "long part": (lambda b: with_digest(b"\xff\xff\xff\x7f"), "damaged"),
    "no facts": (lambda b: signed(), "damaged"), "no payload": (lambda b: signed(FACTS, NAME.encode()), "damaged"),
    "no JSON": (lambda b: signed(b"\x80\x04.", NAME.encode(), b"x"), "damaged"),
    "a list": (lambda b: signed(b"[]", NAME.encode(), b"x"), "another machine"),
    "foreign": (lambda b: signed(json.dumps(OTHER).encode(), NAME.encode(), b"x"), "numba 0.1 (here"),
    "a path": (lambda b: signed(FACTS, b"../" + NAME.encode(), b"x"), "no name of a kernel"),
    "a later path": (lambda b: signed(FACTS, NAME.encode(), b"x", b"/" + NAME.encode(), b"x"), "no name of a kernel"),
    "letters": (lambda b: signed(FACTS, "\xe9".encode(), b"x"), "damaged")}


@pytest.mark.parametrize("change,words", WRONG.values(), ids=WRONG)
def test_wrong_packs_are_refused_and_nothing_is_written(change, words, pack, cache, command):
    pack.write_bytes(change(pack.read_bytes()))
    there = cache("to")
    r = command("cache", "import", pack)
    assert r.returncode == 1 and len(r.stderr.splitlines()) == 1 and words in r.stderr, r.stderr
    assert not there.exists()


@pytest.mark.skipif(os.name != "posix", reason="supports POSIX permissions at most")
def test_a_pack_that_others_may_write_is_refused(pack, cache, command, tmp_path):
    pack.chmod(0o666)
    there = cache("to")
    r = command("cache", "import", pack)
    assert r.returncode == 1 and "chmod go-w" in r.stderr and not there.exists()
    assert command("cache", "import", tmp_path / "absent").returncode == 1
    assert command("cache", "import", tmp_path).returncode == 1
