"""`ggjit cache`: kernels in one file; damaged, foreign and unsafe files are refused before anything is written."""
import hashlib
import json
import lzma
import os

import pytest
from helpers.processes import result

from ggjit.ops.native import cache_files, isa, jit, kernel_pack
from ggjit.tools.command.commands import info

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


def whole(*names, facts=None, code=None):
    """A pack of kernels of these names."""
    kernels = cache_files.pack(*(b"x" for _ in names)) if code is None else code
    manifest = dict.fromkeys(names, hashlib.sha256(b"x").hexdigest())
    return signed(FACTS if facts is None else facts, json.dumps(manifest).encode(), lzma.compress(kernels))


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
    assert result(command, "cache", "export", pack, "--force") == {"kernels": 1}
    cache("none")
    r = command("cache", "export", tmp_path / "x.pack")
    assert r.returncode == 2 and "warm-up" in r.stderr and not (tmp_path / "x.pack").exists()
    assert command("cache", "import", pack, "-m", "m.gguf").returncode == 2


FACTS_HERE = kernel_pack.facts()
OTHER = FACTS_HERE | {"numba": "0.1"}
FACTS = json.dumps(FACTS_HERE).encode()
WRONG = {
    "empty": (lambda b: b"", "not a kernel pack"), "another file": (lambda b: b"GGUF" + b, "not a kernel pack"),
    "cut": (lambda b: b[:-1], "damaged"), "one bit": (lambda b: b[:HEAD + 5] + bytes([b[HEAD + 5] ^ 1]) + b[HEAD + 6:],
                                                     "damaged"),
    "long part": (lambda b: with_digest(b"\xff\xff\xff\x7f"), "damaged"),
    "no facts": (lambda b: signed(), "damaged"), "no kernels": (lambda b: signed(FACTS, b"[]"), "damaged"),
    "no JSON": (lambda b: whole(NAME, facts=b"\x80\x04."), "damaged"),
    "a list": (lambda b: whole(NAME, facts=b"[]"), "another machine"),
    "no names": (lambda b: signed(FACTS, b"1", b""), "damaged"),
    "no name": (lambda b: whole(1), "not the name of a kernel"),
    "foreign": (lambda b: whole(NAME, facts=json.dumps(OTHER).encode()), "numba 0.1 (here"),
    "other sources": (lambda b: whole(NAME, facts=json.dumps(FACTS_HERE | {"sources": "0"}).encode()), "sources 0 ("),
    "a path": (lambda b: whole("../" + NAME), "not the name of a kernel"),
    "a later path": (lambda b: whole(NAME, "/" + NAME), "not the name of a kernel"),
    "letters": (lambda b: whole("\xe9"), "not the name of a kernel"),
    "not compressed": (lambda b: signed(FACTS, json.dumps({NAME: ""}).encode(), b"x"), "damaged"),
    "compressed in part": (lambda b: signed(FACTS, b"{}", lzma.compress(b"x" * 99)[:-20]), "damaged"),
    "a list of names": (lambda b: signed(FACTS, json.dumps([NAME]).encode(), lzma.compress(b"x")), "damaged"),
    "another payload": (lambda b: whole(NAME, code=cache_files.pack(b"y")), f"kernel {NAME} is not the one"),
    "fewer payloads": (lambda b: whole(NAME, code=b""), "damaged")}


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


# ---------------------------------------------------------------- the pack of a wheel
@pytest.fixture
def shipped(cache, monkeypatch, tmp_path):
    """A kernel's file, as compiled here and shipped, and a fresh object cache over an empty folder."""
    cache("from")
    first = jit._ObjectCache()
    monkeypatch.setattr(jit, "CACHE", first)
    scaled.__dict__.pop("address", None)
    scaled.__dict__.pop("_call", None)
    assert scaled(2.5) == 7.5 and first.compiled == 1
    (file,) = (cache_files.cache_dir() / "kernels").glob("*.o")
    folder = tmp_path / "shipped"
    folder.mkdir()
    kernel_pack.write(folder / kernel_pack.shipped_name(), {file.name: cache_files.read(file)})

    def start(name):
        """As a fresh process does, with that folder for a cache."""
        cache(name)
        fresh = jit._ObjectCache()
        monkeypatch.setattr(jit, "CACHE", fresh)
        monkeypatch.setattr(jit, "SHIPPED", kernel_pack.ShippedKernels(folder))
        scaled.__dict__.pop("address", None)
        scaled.__dict__.pop("_call", None)
        return fresh
    return start, folder / kernel_pack.shipped_name(), file


@jit.native("f64(f64)")
def scaled(x):
    return 3.0 * x


def test_shipped_kernels_join_an_empty_cache(shipped):
    start, _, file = shipped
    fresh = start("to")
    assert scaled(2.5) == 7.5 and (fresh.loaded, fresh.compiled) == (1, 0)
    assert cache_files.read(cache_files.cache_dir() / "kernels" / file.name) == cache_files.read(file)


def test_shipped_kernels_serve_where_the_cache_cannot_be_written(shipped, tmp_path):
    start, _, _ = shipped
    (tmp_path / "a file").write_bytes(b"")
    fresh = start("a file")
    with pytest.warns(UserWarning, match="kernel cache"):
        assert scaled(2.5) == 7.5
    assert (fresh.loaded, fresh.compiled) == (1, 0)


@pytest.mark.parametrize("change,words", [
    (lambda b: b[:-1], "damaged"), (lambda b: whole(NAME, facts=json.dumps(OTHER).encode()), "numba 0.1 (here"),
    (None, "this installation has none for")], ids=["damaged", "foreign", "none"])
def test_a_shipped_pack_that_does_not_fit_is_not_used(change, words, shipped, monkeypatch):
    start, pack, _ = shipped
    if change:
        pack.write_bytes(change(pack.read_bytes()))
    else:
        pack.unlink()
    fresh = start("to")
    assert scaled(2.5) == 7.5 and (fresh.loaded, fresh.compiled) == (0, 1)
    monkeypatch.setattr(info, "SHIPPED", jit.SHIPPED)
    assert words in info.kernels_line(info.kernels_facts())


@pytest.mark.skipif(isa.LEVEL not in isa.LEVELS, reason="supports packs where a level fits at most")
def test_machine_code_is_the_same_for_all_processors_of_a_level(python):
    """Whatever else a processor has, and whichever it is: the key of its kernels is the level's."""
    code = "from ggjit.ops.native import isa; print(isa.PROCESSOR, isa.code_key())"
    r = python(code, NUMBA_CPU_NAME="znver4",
               NUMBA_CPU_FEATURES=isa.features_text(isa.FEATURES | {"sse4a", "clzero", "aes", "sha"}))
    assert r.stdout.strip() == f"znver4 {isa.code_key()}", r.stdout + r.stderr


def test_no_file_is_replaced_unasked(command, pack, tmp_path):
    other = tmp_path / "thesis.txt"
    other.write_text("years of work")
    r = command("cache", "export", other)
    assert r.returncode and "exists already" in r.stderr and other.read_text() == "years of work"
    assert result(command, "cache", "export", other, "--force") == {"kernels": 2}
