"""How functions are compiled: one version a type, linked once, callable from Numba's functions, loaded elsewhere."""
import gc
import os
import subprocess
import sys

import numpy as np
import pytest
from helpers.paths import TESTS_PATH
from numba import njit

from ggjit.ops.native import jit
from ggjit.ops.native.compiler import HelperLibrary
from ggjit.ops.native.jit import CACHE, exact, inline, native
from ggjit.ops.native.mem import ld_i64, st_i64


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


@inline
def choose(p, v, w):
    """Holds on to one of two arrays, so it counts references."""
    x = v
    for i in range(word(p, 0)):
        if word(p, 1) == i:
            x = w
        else:
            x = v
    return x


@native("i64(i64)")
def chosen(p):
    u, v = np.empty(3, np.int64), np.empty(3, np.int64)
    u[:] = 1
    v[:] = 2
    return choose(p, u, v)[0]


@inline
def even(n):
    return 1 if n == 0 else odd(n - 1)


@inline
def odd(n):
    return 0 if n == 0 else even(n - 1)


@inline
def talk(n):
    print("n is", n)
    return n


def factory(scale):
    @inline
    def scaled(n):
        for _ in range(n):                      # long enough to stay a function of its own
            n = n * scale + n // 3
        return n
    return scaled


times2, times3 = factory(2), factory(3)


@native("i64(i64)")
def with_times2(n):
    return times2(n) - times2(n + 1)


@native("i64(i64)")
def with_times3(n):
    return times3(n) - times3(n + 1)


def in_a_process(program, folder, **env):
    """What it prints, as words."""
    env = {**os.environ, "GGJIT_CACHE_DIR": str(folder), "PYTHONPATH": TESTS_PATH, **env}
    done = subprocess.run([sys.executable, "-c", program], env=env, text=True,
                          capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_literals_share_one_version_and_helpers_stay_bitcode(tmp_path, monkeypatch):
    monkeypatch.setenv("GGJIT_CACHE_DIR", str(tmp_path))        # an empty cache: compiled in this process
    CACHE.address("literals", "i64(i64, i64)", lambda: lambda a, b: sum_of_two(a) + word(b, 2), (__name__,))
    a, b = np.array([3, 4, 5]), np.array([30, 40, 50])
    assert store_sum(a, b) == 57 and a.tolist() == [57, 4, 5]
    assert [str(s) for s in word.overloads] == ["(int64, int64)"]
    (result,) = word.overloads.values()
    assert isinstance(result.library, HelperLibrary)
    assert result.library.get_pointer_to_function(result.fndesc.llvm_func_name) == 0


def test_numbas_own_functions_may_call_helpers():
    a, b = np.array([3, 4, 5]), np.array([30, 40, 50])
    assert njit(plus)(a.ctypes.data, b.ctypes.data) == 57


@pytest.mark.parametrize("call,answer", [("store_sum(a, a)", "6"), ("chosen(a)", "2")])
def test_an_object_of_another_process_is_loaded(tmp_path, call, answer):
    program = (f"import numpy as np, test_compiler as t; from ggjit.ops.native.jit import CACHE\n"
               f"a = np.array([3, 2, 1])\n"
               f"print(t.{call}, CACHE.compiled, CACHE.loaded)")
    assert [in_a_process(program, tmp_path) for _ in range(2)] == [[answer, "1", "0"], [answer, "0", "1"]]


@pytest.mark.parametrize("func,words", [(lambda n: even(n), "each other in turn"), (lambda n: talk(n), "print")],
                         ids=["mutual recursion", "print"])
def test_what_a_cached_object_could_not_do_is_refused(tmp_path, monkeypatch, func, words):
    monkeypatch.setenv("GGJIT_CACHE_DIR", str(tmp_path))
    with pytest.raises(Exception, match=words):
        CACHE.address("refused", "i64(i64)", lambda: func, (__name__,))
    assert not list(tmp_path.rglob("*.o"))
    a = np.array([3, 4, 5])
    assert store_sum(a, a) == 12                # the next one compiles


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_forked_processes_may_fill_one_cache(tmp_path):
    fill = ("import os, test_compiler as t\n"
            "for f in (t.with_times2, t.with_times3):\n"
            "    pid = os.fork()\n"
            "    if not pid:\n"
            "        f(5); os._exit(0)\n"
            "    os.waitpid(pid, 0)")
    in_a_process(fill, tmp_path)
    program = "import test_compiler as t; print(t.with_times2(5), t.with_times3(5), t.CACHE.loaded)"
    want = [str(f.func.__globals__[name].py_func(5) - f.func.__globals__[name].py_func(6))
            for f, name in ((with_times2, "times2"), (with_times3, "times3"))]
    assert in_a_process(program, tmp_path) == [*want, "2"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_child_forked_while_a_thread_compiles_compiles_too(tmp_path):
    """The fork waits for the thread that compiles: the child has that kernel, and compiles its own."""
    program = ("import os, signal, threading, test_compiler as t\n"
               "from numba.core.compiler_lock import global_compiler_lock\n"
               "lock = global_compiler_lock._lock\n"
               "thread = threading.Thread(target=t.with_times2, args=(5,))\n"
               "thread.start()\n"
               "while lock.acquire(False):\n"
               "    lock.release()\n"
               "pid = os.fork()\n"
               "if not pid:\n"
               "    signal.alarm(60)\n"
               "    print(t.with_times3(5), t.CACHE.compiled, flush=True)\n"
               "    os._exit(0)\n"
               "status = os.waitpid(pid, 0)[1]\n"
               "thread.join()\n"
               "print(status, t.with_times2(5), t.CACHE.compiled)")
    two, three = (str(f.func.__globals__[name].py_func(5) - f.func.__globals__[name].py_func(6))
                  for f, name in ((with_times2, "times2"), (with_times3, "times3")))
    assert in_a_process(program, tmp_path) == [three, "2", "0", two, "1"]


def test_numbas_settings_are_part_of_the_key(tmp_path):
    program = "import test_compiler as t, numpy as np; a = np.array([3, 2, 1]); print(t.chosen(a), t.CACHE.loaded)"
    assert [in_a_process(program, tmp_path, **env) for env in ({}, {"NUMBA_OPT": "0"}, {"NUMBA_OPT": "0"})] == [
        ["2", "0"], ["2", "0"], ["2", "1"]]


def test_without_jit_everything_can_be_imported(tmp_path):
    assert in_a_process("import ggjit; print(ggjit.F32)", tmp_path, NUMBA_DISABLE_JIT="1")


def test_a_cached_object_holds_machine_code_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("GGJIT_CACHE_DIR", str(tmp_path))
    CACHE.address("only-code", "i64(i64, i64)", lambda: lambda a, b: sum_of_two(a) + word(b, 1), (__name__,))
    (path,) = (tmp_path / "kernels").iterdir()
    assert path.stat().st_size < 4096


def test_the_collector_rests_while_a_kernel_is_compiled(monkeypatch, tmp_path):
    resting = []

    def compiler(*args, **kwargs):
        resting.append(not gc.isenabled())
        raise ZeroDivisionError("no compiler")
    monkeypatch.setattr(jit, "cfunc", compiler)
    monkeypatch.setenv("GGJIT_CACHE_DIR", str(tmp_path))
    for was_on in (True, False):
        (gc.enable if was_on else gc.disable)()
        try:
            with pytest.raises(ZeroDivisionError, match="no compiler"):
                jit.kernel_address("rests", lambda: lambda node, ith, nth, sync: 0, ("ggjit.ops.native.jit",))
            assert gc.isenabled() == was_on
        finally:
            gc.enable()
    assert resting == [True, True]


def test_other_jitted_code_is_compiled_as_without_ggjit(python):
    """Numba's target and the key of its caches stay as they are, whether ggjit is imported first or last."""
    target = "from numba.core.registry import cpu_target\nprint(cpu_target.target_context.codegen().magic_tuple())\n"
    used = "import ggjit as gg, numpy as np\ngg.compute(gg.silu(gg.from_numpy(gg.Context(), np.ones(5, np.float32))))\n"
    alone, last, first = (python(code) for code in (target, target + used, used + target))
    assert alone.returncode == last.returncode == first.returncode == 0, last.stderr + first.stderr
    assert alone.stdout == last.stdout == first.stdout
