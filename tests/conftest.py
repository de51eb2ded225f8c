"""Shared fixtures.  Reference data (real models with golden outputs) lies outside the repository: GGJIT_SHARED, or a
folder `shared` beside the checkout; tests that need it skip with a reason where it is absent."""
import contextlib
import gc
import importlib.util
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import types

import pytest
from helpers.interpreter import Interpreter

from ggjit.ops.native import isa
from ggjit.ops.native.jit import CACHE

ROOT = pathlib.Path(__file__).resolve().parents[1]
SHARED = pathlib.Path(os.environ.get("GGJIT_SHARED", ROOT.parent / "shared"))


def shared(*parts):
    """Path inside the reference data, or skip."""
    path = SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"reference data {'/'.join(parts)} not found (GGJIT_SHARED names its folder)")
    return path


def need(module, what):
    """Skip unless a package is installed."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{what} ({module} is not installed)")


def benchmark(name):
    """benchmarks/<name>.py as a module of its own."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def python(code, *args, timeout=300, **env):
    """Run `code` in a fresh interpreter; returns CompletedProcess with text output."""
    return subprocess.run([sys.executable, "-c", code, *map(str, args)], text=True, capture_output=True,
                          timeout=timeout, env={**os.environ, **env})


@contextlib.contextmanager
def no_collector():
    """The garbage collector, which may take a second where much was compiled, is off."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextlib.contextmanager
def processor_time():
    """Processor time of a block, without the collector's, in `.seconds` after it."""
    spent = types.SimpleNamespace()
    with no_collector():
        start = time.process_time()
        try:
            yield spent
        finally:
            spent.seconds = time.process_time() - start


@contextlib.contextmanager
def interrupted(delay):
    """Ctrl-C `delay` seconds into a block that must end with it; processor and wall time from the signal to the end."""
    at = []

    def strike():
        at.extend((time.process_time(), time.monotonic()))
        os.kill(os.getpid(), signal.SIGINT)
    spent, timer = types.SimpleNamespace(), threading.Timer(delay, strike)
    with no_collector(), pytest.raises(KeyboardInterrupt):
        timer.start()
        try:
            yield spent
        finally:
            timer.cancel()
    assert at, "interrupted by somebody else"
    spent.seconds, spent.wall_seconds = time.process_time() - at[0], time.monotonic() - at[1]


@pytest.fixture(autouse=True)
def settled():
    """After a test that compiled, the objects the compiler keeps (a million in the end) leave the collector's sight:
    each full collection would look at all of them again."""
    before = CACHE.compiled
    yield
    if CACHE.compiled > before:
        gc.collect()
        gc.freeze()


@pytest.fixture
def command(capsys, monkeypatch):
    """Runs a `ggjit` command in this process; status, stdout and stderr as of a finished one of its own."""
    from ggjit.tools.command.main import main

    def run(*args):
        monkeypatch.setattr(CACHE, "on_compile", None)          # which commands leave set
        capsys.readouterr()
        try:
            status = main([*map(str, args)])
        except SystemExit as e:
            status = e.code
        out, err = capsys.readouterr()
        return subprocess.CompletedProcess(args, status, out, err)
    return run


@pytest.fixture(scope="session")
def on_isa():
    """Runs code on an instruction set by name, in one process each; skips where the processor lacks it."""
    interpreters = {}

    def run(name, code, *args, timeout=600):
        if name not in interpreters:
            paths = [str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
            interpreters[name] = Interpreter(GGJIT_CPU=name, PYTHONPATH=os.pathsep.join(paths))
        done = interpreters[name].run(code, *args, timeout=timeout)
        if done.returncode and "this processor supports" in done.stderr:
            pytest.skip(f"this processor supports {isa.ISA} at most")
        return done
    yield run
    for interpreter in interpreters.values():
        interpreter.close()


@pytest.fixture(scope="session", name="shared")
def shared_fixture():
    return shared


@pytest.fixture(scope="session", name="need")
def need_fixture():
    return need


@pytest.fixture(scope="session", name="python")
def python_fixture():
    return python
