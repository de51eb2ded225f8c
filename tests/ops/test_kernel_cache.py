"""Kernels on disk: loaded by other processes; files that are damaged or cannot be written."""
from helpers.chains import PREAMBLE


def test_cached_kernels_of_a_plan_load_in_other_processes_and_damaged_ones_are_compiled_again(python, tmp_path):
    """Single bits anywhere in the objects, a byte in each tenth, an empty file, garbage."""
    code = PREAMBLE + """
from ggjit.ops.native.jit import CACHE
p, y = plan(); p.compute()
print(CACHE.compiled, CACHE.loaded, (p.numpy(y) == 11).all())
"""
    def run():
        r = python(code, GGJIT_CACHE_DIR=str(tmp_path))
        assert r.returncode == 0, r.stderr
        compiled, loaded, right = r.stdout.split()
        assert right == "True"
        return int(compiled), int(loaded), r.stderr
    n, loaded, _ = run()
    assert n > 10 and run() == (0, n + loaded, "")
    files = sorted((tmp_path / "kernels").iterdir())
    assert len(files) >= n                                      # one or two as the process ends
    for i, f in enumerate(files):
        whole = bytearray(f.read_bytes())
        if i % 2:
            whole[(i * 997) % len(whole)] ^= 1
        else:
            whole[int((i % 10 + 0.5) / 10 * len(whole))] ^= 255
        f.write_bytes(b"" if i == 0 else b"\x00garbage" if i == 1 else bytes(whole))
    compiled, _, said = run()
    assert compiled == n and said.count("compiled again") == 1
    assert run() == (0, n + loaded, "")


def test_an_unwritable_cache_only_warns(python, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    r = python("import ggjit as gg; print(gg.dequantize(gg.Q8_0, bytes(34), (32,)).tolist()[:2])",
               GGJIT_CACHE_DIR=str(tmp_path / "file"))
    assert r.stdout == "[0.0, 0.0]\n" and "GGJIT_CACHE_DIR" in r.stderr


def test_symbols_of_two_processes_do_not_clash():
    from numba.core.bytecode import FunctionIdentity
    assert next(FunctionIdentity._unique_ids) > 1 << 8
