"""How functions are compiled: one version a type, linked once, callable from Numba's functions, loaded elsewhere."""
import os
import subprocess
import sys

import numpy as np
from numba import njit

from ggjit.ops.compiler import HelperLibrary
from ggjit.ops.jit import CACHE, exact, inline, native
from ggjit.ops.mem import ld_i64, st_i64


@inline
def word(base, i):
    return ld_i64(base + 8 * i)


@exact
def sum_of_two(base):
    return word(base, 0) + word(base, 1)


def plus(a, b):
    return sum_of_two(a) + word(b, 2)


@native("i64(i64, i64)")
def store_sum(a, b):
    st_i64(a, sum_of_two(a) + word(b, 2))
    return word(a, 0)


def test_literals_share_one_version_and_helpers_stay_bitcode():
    a, b = np.array([3, 4, 5]), np.array([30, 40, 50])
    assert store_sum(a, b) == 57 and a.tolist() == [57, 4, 5]
    assert [str(s) for s in word.overloads] == ["(int64, int64)"]
    (result,) = word.overloads.values()
    assert isinstance(result.library, HelperLibrary)
    assert result.library.get_pointer_to_function(result.fndesc.llvm_func_name) == 0


def test_numbas_own_functions_may_call_helpers():
    a, b = np.array([3, 4, 5]), np.array([30, 40, 50])
    assert njit(plus)(a.ctypes.data, b.ctypes.data) == 57


def test_an_object_of_another_process_is_loaded(tmp_path):
    program = ("import numpy as np, test_compiler as t; from ggjit.ops.jit import CACHE; a = np.array([1, 2, 3]);"
               "print(t.store_sum(a, a), CACHE.compiled, CACHE.loaded)")
    env = {**os.environ, "GGJIT_CACHE_DIR": str(tmp_path)}
    here = os.path.dirname(__file__)
    said = [subprocess.run([sys.executable, "-c", program], env=env, cwd=here, text=True, check=True,
                           capture_output=True).stdout.split() for _ in range(2)]
    assert said == [["6", "1", "0"], ["6", "0", "1"]]


def test_a_cached_object_holds_machine_code_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("GGJIT_CACHE_DIR", str(tmp_path))
    CACHE.address("only-code", "i64(i64, i64)", lambda: lambda a, b: sum_of_two(a) + word(b, 1), (__name__,))
    (path,) = (tmp_path / "kernels").iterdir()
    assert path.stat().st_size < 4096
