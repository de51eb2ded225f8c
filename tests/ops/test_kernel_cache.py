"""Kernels on disk: loaded by other processes; files that are damaged or cannot be written."""
from helpers.chains import PREAMBLE


def test_every_cached_kernel_loads_in_a_fresh_process(python, tmp_path):
    code = PREAMBLE + """
from ggjit.ops.native.jit import CACHE
p, y = plan(); p.compute()
print(CACHE.compiled, CACHE.loaded, (p.numpy(y) == 11).all())
"""
    first, second = (python(code, GGJIT_CACHE_DIR=str(tmp_path)) for _ in range(2))
    compiled, loaded, right = first.stdout.split()
    assert int(compiled) > 0 and right == "True", first.stderr
    assert second.stdout.split() == ["0", str(int(compiled) + int(loaded)), "True"], second.stderr


def test_a_broken_or_unwritable_cache_only_warns(python, tmp_path):
    code = """
import ctypes
from ggjit.ops.native.jit import CACHE
def times(k):
    return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(CACHE.address(
        f"times{k}", "i64(i64)", lambda: lambda n: n * k, ("ggjit.ops.native.mem",)))
print([times(k)(7) for k in range(12)] == [7 * k for k in range(12)])
"""
    assert python(code, GGJIT_CACHE_DIR=str(tmp_path)).stdout.split() == ["True"]
    files = sorted((tmp_path / "kernels").iterdir())
    assert len(files) == 12
    for i, f in enumerate(files):
        whole = bytearray(f.read_bytes())
        if i % 2:
            whole[(i * 997) % len(whole)] ^= 1                      # one bit anywhere
        else:
            whole[int((i % 10 + 0.5) / 10 * len(whole))] ^= 255     # one byte, in each tenth of a file
        f.write_bytes(b"" if i == 0 else b"\x00garbage" if i == 1 else bytes(whole))
    r = python(code, GGJIT_CACHE_DIR=str(tmp_path))
    assert r.stdout.split() == ["True"] and "compiled again" in r.stderr
    assert python(code, GGJIT_CACHE_DIR=str(tmp_path)).stderr == ""
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    r = python(code, GGJIT_CACHE_DIR=str(blocked))
    assert r.stdout.split() == ["True"] and "GGJIT_CACHE_DIR" in r.stderr


def test_symbols_of_two_processes_do_not_clash():
    from numba.core.bytecode import FunctionIdentity
    assert next(FunctionIdentity._unique_ids) > 1 << 8
