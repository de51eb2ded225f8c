"""What a test needs from outside, or it is skipped: reference data, packages; and the benchmarks as modules."""
import importlib.util

import pytest

from helpers.paths import ROOT, SHARED


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
