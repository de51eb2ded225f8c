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
from helpers import tiny_model, windows
from helpers.layers import FOLDERS
from helpers.paths import ROOT, TESTS_PATH
from helpers.processes import python
from helpers.windows import VirtualAlloc

import ggjit as gg
from ggjit.ops.core import machine
from ggjit.ops.core.address_space import AddressSpace
from ggjit.ops.core.whole_file import whole_files, write_whole
from ggjit.ops.native import isa, jit, waiting
from ggjit.tools.command.main import _output

# ---------------------------------------------------------------- addresses without memory
needs_mmap = pytest.mark.skipif(sys.platform == "win32", reason="no mprotect: Windows has the real function")


@needs_mmap
def test_addresses_are_reserved_and_memory_comes_in_steps():
    system = VirtualAlloc()
    space = AddressSpace(640 << 20, system)
    assert len(space.memory) == 640 << 20 and system.charged == 1 << 16
    for upto in (1, 100, 1 << 20, (1 << 20) + 1, 3 << 20):
        space.commit(upto)
        space.memory[upto - 1:upto] = b"\x07"
        assert upto <= system.charged <= upto + (1 << 21)
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
from helpers import windows as t
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
    r = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": TESTS_PATH}, text=True,
                       capture_output=True)
    assert r.stdout == "done\n", (r.returncode, r.stderr)


@needs_mmap
def test_a_process_that_is_windows_computes(tmp_path):
    """On two threads that sleep by WaitOnAddress, without a function of POSIX; files, facts and the command's info."""
    code = """
import asyncio, multiprocessing, pathlib, subprocess, sys, tempfile
import numba, numpy as np
from numba.core.registry import cpu_target
from helpers import windows
windows.become()
import ggjit as gg
from ggjit.core.config import default_threads
from ggjit.core.process_memory import process_memory, resident
from ggjit.ops.core.whole_file import whole_files, write_whole
from ggjit.ops.native import waiting
assert waiting.WAY == "WaitOnAddress" and default_threads() == 8, (waiting.WAY, default_threads())
ctx, cpu = gg.Context(), gg.init_backend("CPU", n_threads=2)
gg.threadpool().poll = 0
x, w = (np.random.default_rng(i).standard_normal((64, 256)).astype(np.float32) for i in range(2))
y = gg.soft_max(gg.mul_mat(gg.from_numpy(ctx, w), gg.from_numpy(ctx, x)))
want = np.exp(x.astype(np.float64) @ w.T.astype(np.float64))
for _ in range(20):
    assert abs(gg.compute(y, backend=cpu) - want / want.sum(-1, keepdims=True)).max() < 1e-5
folder = pathlib.Path(sys.argv[1])
write_whole(folder / "a", b"before")
with whole_files([folder / "a", folder / "b"]) as files:
    for f in files:
        f.write(b"after")
assert sorted(p.read_bytes() for p in folder.iterdir() if p.is_file()) == [b"after"] * 2
assert resident(x) in (None, (x.nbytes, 0)) or sum(resident(x)) >= x.nbytes
process_memory()
from ggjit.tools.command.main import main
sys.exit(main(["info"]))
"""
    r = python(code, tmp_path, PYTHONPATH=TESTS_PATH, GGJIT_CACHE_DIR=str(tmp_path / "cache"))
    assert r.returncode == 0 and windows.NAME in r.stdout, r.stdout + r.stderr


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
    from ggjit.models.files.mapped_file import map_private
    path = tiny_model.write(tmp_path / "tiny.gguf", type="Q8_0")
    with load_model(path, n_threads=1) as m:
        want = m.logits([1, 2, 3])
    monkeypatch.delattr(mmap, "MAP_PRIVATE")
    assert not map_private(path).flags.writeable
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


@pytest.fixture
def fresh_facts():
    """Facts are asked for once in a process: of the system as the test has it."""
    cached = machine.processor_name, machine.total_nbytes, machine._fast_cores
    for question in cached:
        question.cache_clear()
    yield
    for question in cached:
        question.cache_clear()


def test_facts_of_windows(monkeypatch, fresh_facts):
    windll, _, winreg = windows.functions()
    monkeypatch.setattr(machine.sys, "platform", "win32")
    monkeypatch.setattr(ctypes, "windll", windll, raising=False)
    monkeypatch.setitem(sys.modules, "winreg", winreg)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: len(windows.CLASSES))
    monkeypatch.setattr(machine, "_text", lambda path: "")
    assert machine.processor_name() == windows.NAME
    assert (machine.total_nbytes(), machine.available_nbytes()) == (windows.TOTAL, windows.FREE)
    assert machine.resident_nbytes() == windows.RESIDENT
    assert machine.available_cores() == 12 and machine.performance_cores() == 8
    assert isa.LEVELS["neon-v8.6"] - machine.arm_features() == isa.LEVELS["neon"] | {"bf16"}


class MacOS:
    """Functions of macOS's C library on a processor with 4 performance and 4 efficiency cores, and 16 GiB."""

    def sysctlbyname(self, name, value, size, *_):
        answer = {b"machdep.cpu.brand_string": b"Apple M1\0", b"hw.perflevel0.logicalcpu": b"\4\0\0\0"}.get(name)
        if answer is None:
            return -1
        if value is not None:
            value[:len(answer)] = answer
        size._obj.value = len(answer)
        return 0

    def mach_host_self(self):
        return 77

    def host_statistics64(self, host, flavour, words, n_words):
        assert (host, flavour, n_words._obj.value) == (77, 4, 38)
        words[0], words[1], words[2] = 1000, 5, 200                 # free, active, inactive
        return 0

    def proc_pidinfo(self, pid, flavour, argument, words, nbytes):
        assert (pid, flavour, nbytes) == (os.getpid(), 4, 96)
        words[0], words[1] = 1 << 40, 70 << 20
        return nbytes


def test_facts_of_macos(monkeypatch, fresh_facts):
    libc = MacOS()
    libc.host_statistics64 = lambda host, flavour, words, n: MacOS.host_statistics64(libc, host, flavour, words, n)
    monkeypatch.setattr(machine.sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda *a: libc)
    monkeypatch.setattr(ctypes, "byref", lambda x: type("Reference", (), {"_obj": x})())
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 16384, "SC_PHYS_PAGES": 1 << 20}.__getitem__)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(machine, "_text", lambda path: "")
    assert machine.processor_name() == "Apple M1"
    assert (machine.total_nbytes(), machine.available_nbytes()) == (16 << 30, 1200 * 16384)
    assert machine.resident_nbytes() == 70 << 20
    assert machine.available_cores() == 8 and machine.performance_cores() == 4


@pytest.mark.parametrize("system", ["darwin", "win32", "plan9"])
def test_facts_of_a_system_whose_functions_are_missing_are_unknown(system, monkeypatch, fresh_facts):
    class Empty:
        def __getattr__(self, name):
            raise AttributeError(f"function {name!r} not found")
    monkeypatch.setattr(machine.sys, "platform", system)
    monkeypatch.setattr(ctypes, "CDLL", lambda *a, **k: Empty())
    monkeypatch.setattr(ctypes, "windll", Empty(), raising=False)
    monkeypatch.setattr(machine, "_text", lambda path: "")
    monkeypatch.delattr(os, "sysconf", raising=False)
    monkeypatch.setitem(sys.modules, "winreg", None)
    assert isinstance(machine.processor_name(), str) and machine.performance_cores() >= 1
    assert machine.available_nbytes() == machine.total_nbytes() == machine.resident_nbytes() == 0


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
