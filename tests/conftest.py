"""Shared fixtures.  Reference data (real models with golden outputs) lies outside the repository: GGJIT_SHARED, or a
folder `shared` beside the checkout; tests that need it skip with a reason where it is absent."""
import contextlib
import gc
import importlib.util
import os
import pathlib
import subprocess
import sys
import time
import types

import pytest

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
def processor_time():
    """Processor time of a block, in `.seconds` after it; `.wall_seconds` by the clock, which counts other processes and
    pauses of the machine.  The collector, which may take a second where much was compiled, is off meanwhile."""
    spent, collecting = types.SimpleNamespace(), gc.isenabled()
    gc.disable()
    start, wall = time.process_time(), time.monotonic()
    try:
        yield spent
    finally:
        spent.seconds, spent.wall_seconds = time.process_time() - start, time.monotonic() - wall
        if collecting:
            gc.enable()


@pytest.fixture(scope="session", name="shared")
def shared_fixture():
    return shared


@pytest.fixture(scope="session", name="need")
def need_fixture():
    return need


@pytest.fixture(scope="session", name="python")
def python_fixture():
    return python
