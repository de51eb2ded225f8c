"""What is bound to the system, as Windows, macOS and unknown systems have it, by stand-ins for their functions."""
import ast
import asyncio
import ctypes
import mmap
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from helpers import tiny_model
from helpers.layers import FOLDERS
from helpers.paths import ROOT

import ggjit as gg
from ggjit.ops.core import machine
from ggjit.ops.core.address_space import AddressSpace
from ggjit.ops.core.whole_file import whole_files, write_whole
from ggjit.ops.native import isa, jit, waiting
from ggjit.tools.command.main import _output


# ---------------------------------------------------------------- addresses without memory
class VirtualAlloc:
    """Windows' function over a mapping nobody may touch: what is not committed ends the process, as there."""

    def __init__(self, limit=1 << 40):
        self.charged, self.limit = 0, limit
        libc = ctypes.CDLL(None, use_errno=True)
        self._map, self._protect = libc.mmap, libc.mprotect
        self._map.restype = ctypes.c_void_p
        self._map.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
        self._protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int

    def __call__(self, address, nbytes, kind, protection):
        if kind == 0x2000:
            assert address is None and protection == 1
            return self._map(None, nbytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        assert kind == 0x1000 and protection == 4
        if self.charged + nbytes > self.limit:
            return None
        self.charged += nbytes
        first = address & -mmap.PAGESIZE
        assert not self._protect(first, address + nbytes - first, mmap.PROT_READ | mmap.PROT_WRITE)
        return address


needs_mmap = pytest.mark.skipif(sys.platform == "win32", reason="no mprotect: Windows has the real function")


@needs_mmap
def test_addresses_are_reserved_and_memory_comes_in_steps():
    windows = VirtualAlloc()
    space = AddressSpace(640 << 20, windows)
    assert len(space.memory) == 640 << 20 and windows.charged == 1 << 16
    for upto in (1, 100, 1 << 20, (1 << 20) + 1, 3 << 20):
        space.commit(upto)
        space.memory[upto - 1:upto] = b"\x07"
        assert upto <= windows.charged <= upto + (1 << 21)
    assert space.memory[-1] == 0 and np.frombuffer(space.memory, np.int64)[-1] == 0
    assert bytes(space.memory[99:101]) == b"\x07\0"
    space.commit(640 << 20)
    space.memory[320 << 20] = 1


@needs_mmap
def test_no_memory_left_is_a_typed_error_and_what_was_there_stays():
    space = AddressSpace(64 << 20, VirtualAlloc(limit=3 << 20))
    space.commit(1 << 20)
    space.memory[5] = 9
    with pytest.raises(gg.OutOfMemory, match="page file"):
        space.commit(32 << 20)
    space.commit(1000)
    assert space.memory[5] == 9


def test_a_table_touches_only_rows_that_were_committed():
    """In a process of its own, whose table lies over pages that end it."""
    code = """
import test_other_systems as t
from ggjit.ops.core import address_space
address_space._virtual_alloc = lambda windows=t.VirtualAlloc(): windows
from ggjit.core.table import Table
import ggjit.core.table as table
import ggjit as gg, numpy as np
fresh = table.Table()
assert fresh.words is not table.TABLE.words
ids = [fresh.new(0, 0, 0, (1,) * 4, (1,) * 4, table.NO_PARAMS, table.NO_SRC, -1, 0, -1, 0, 1)[0] for _ in range(20_000)]
assert len(set(ids)) == 20_000 and fresh.n_alive() == 20_000 and (fresh.words[ids, 4:8] >= 0).all()
fresh.unplace_all(3)
print("done")
"""
    from helpers.paths import TESTS_PATH
    r = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": TESTS_PATH}, text=True,
                       capture_output=True)
    assert r.stdout == "done\n", (r.returncode, r.stderr)


# ---------------------------------------------------------------- files
class InUse(PermissionError):
    winerror = 1224


@pytest.mark.parametrize("winerror", [5, 32, 1224])
def test_a_file_that_is_mapped_is_not_replaced_and_the_error_says_why(tmp_path, monkeypatch, winerror):
    path, replace = tmp_path / "m.gguf", os.replace
    path.write_bytes(b"before")

    def refuse(a, b):
        if os.fspath(b) == str(path):
            e = InUse(13, "Access is denied")
            e.winerror = winerror
            raise e
        replace(a, b)
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(PermissionError, match=r"m\.free\(\)") as caught:
        write_whole(path, b"after")
    assert caught.value.filename == str(path)
    with pytest.raises(PermissionError, match="in use"), whole_files([tmp_path / "other", path]) as files:
        for f in files:
            f.write(b"after")
    assert path.read_bytes() == b"before" and [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_other_refusals_keep_their_own_words(tmp_path, monkeypatch):
    def refuse(a, b):
        raise PermissionError(13, "Permission denied")
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(PermissionError, match="Permission denied"):
        write_whole(tmp_path / "f", b"")


def test_models_compute_from_pages_that_cannot_be_written(tmp_path, monkeypatch):
    """As on Windows, which would charge a copy-on-write mapping whole."""
    from ggjit.models import load_model
    from ggjit.models.files.gguf import _map_private
    path = tiny_model.write(tmp_path / "tiny.gguf", type="Q8_0")
    with load_model(path, n_threads=1) as m:
        want = m.logits([1, 2, 3])
    monkeypatch.delattr(mmap, "MAP_PRIVATE")
    assert not _map_private(path).flags.writeable
    with load_model(path, n_threads=1) as m:
        assert (m.logits([1, 2, 3]) == want).all()


def test_texts_are_read_and_written_as_utf8():
    """Windows' default is the code page of the country."""
    wrong = []
    for path in (p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            named = {k.arg for k in node.keywords}
            constants = [a.value for a in node.args if isinstance(a, ast.Constant)]
            text = name in ("read_text", "write_text") and "utf-8" not in constants
            text &= isinstance(node.func, ast.Attribute)
            if name == "open" and isinstance(node.func, ast.Name):
                mode = node.args[1] if len(node.args) > 1 else ast.Constant("r")
                text = isinstance(mode, ast.Constant) and "b" not in mode.value and "devnull" not in ast.unparse(node)
            if text and "encoding" not in named and None not in named:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong


def test_output_into_a_pipe_is_utf8_on_windows():
    assert _output("linux", {}) == {"errors": "replace"}
    assert _output("win32", {}) == {"errors": "replace", "encoding": "utf-8"}
    assert _output("win32", {"PYTHONIOENCODING": "cp1252"}) == {"errors": "replace"}


# ---------------------------------------------------------------- signals, facts, levels
def test_a_worker_ends_where_the_loop_takes_no_signals(monkeypatch):
    """asyncio on Windows."""
    from ggjit.cluster.serving import _ended
    before = signal.getsignal(signal.SIGTERM)

    async def run():
        loop = asyncio.get_running_loop()

        def refused(*args):
            raise NotImplementedError
        monkeypatch.setattr(loop, "add_signal_handler", refused)
        with _ended() as ended:
            loop.call_later(0.05, signal.raise_signal, signal.SIGTERM)
            await asyncio.wait_for(ended.wait(), 20)
    asyncio.run(run())
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("system", ["darwin", "win32", "plan9"])
def test_facts_of_a_system_whose_functions_are_missing_are_unknown(system, monkeypatch):
    class Empty:
        def __getattr__(self, name):
            raise AttributeError(f"function {name!r} not found")
    monkeypatch.setattr(machine.sys, "platform", system)
    monkeypatch.setattr(ctypes, "CDLL", lambda *a, **k: Empty())
    monkeypatch.setattr(ctypes, "windll", Empty(), raising=False)
    monkeypatch.setattr(machine, "_text", lambda path: "")
    monkeypatch.delattr(os, "sysconf", raising=False)
    monkeypatch.setitem(sys.modules, "winreg", None)
    for cached in (machine.processor_name, machine.total_nbytes, machine._fast_cores):
        cached.cache_clear()
    try:
        assert isinstance(machine.processor_name(), str) and machine.performance_cores() >= 1
        assert machine.available_nbytes() == machine.total_nbytes() == machine.resident_nbytes() == 0
    finally:
        for cached in (machine.processor_name, machine.total_nbytes, machine._fast_cores):
            cached.cache_clear()


def test_resident_memory_grows_with_what_is_written():
    before = machine.resident_nbytes()
    block = np.ones(64 << 20, np.uint8)
    assert machine.resident_nbytes() - before > 32 << 20 and block[-1] == 1


@pytest.mark.skipif(not isa.X86, reason="no processor of this kind lacks the lowest level")
def test_an_unknown_processor_gets_the_generic_level_and_a_line():
    """Here one that hides all its features but those of 2003."""
    code = """
import warnings
warnings.simplefilter("error")
import ggjit as gg, numpy as np
from ggjit.ops.native import isa
assert isa.ISA == "generic"
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as caught:
    ctx = gg.Context()
    y = gg.scale(gg.from_numpy(ctx, np.ones(8, np.float32)), 3.0)
    assert (gg.compute(y) == 3).all() and (gg.compute(y) == 3).all()
print([str(w.message) for w in caught if "generic" in str(w.message)])
"""
    features = isa.features_text({"64bit", "cmov", "cx8", "fxsr", "mmx", "sse", "sse2"})
    env = {**os.environ, "NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": features}
    env.pop("GGJIT_CPU", None)
    r = subprocess.run([sys.executable, "-c", code], env=env, text=True, capture_output=True)
    assert r.returncode == 0, r.stderr
    said = ast.literal_eval(r.stdout)
    assert len(said) == 1 and "has none of avx512, avx2" in said[0] and "slower" in said[0]


@pytest.mark.parametrize("isa_name, asked, way, words", [
    ("generic", "", "futex", "kernels are the generic ones"), ("generic", "generic", "futex", ""),
    ("avx2", "", "futex", ""), ("avx2", "", "", "idle threads wait in Python")])
def test_what_a_machine_lacks_is_one_line(isa_name, asked, way, words, monkeypatch):
    monkeypatch.setattr(isa, "ISA", isa_name)
    monkeypatch.setattr(waiting, "WAY", way)
    monkeypatch.setenv("GGJIT_CPU", asked)
    said = jit.shortfall()
    assert "\n" not in said and bool(said) == bool(words) and words in said
