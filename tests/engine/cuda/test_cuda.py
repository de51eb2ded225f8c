"""The CUDA backend in Numba's simulator, which wants a process of its own: cuda_*.py run there."""
import os
import pathlib
import re
import subprocess
import sys

import pytest
from helpers.paths import ROOT

import ggjit as gg
from ggjit.ops.cuda.compiler import choice

HERE = pathlib.Path(__file__).parent
# least number of tests in each
SUITES = {"cuda_contract": 39, "cuda_errors": 11, "cuda_libraries": 18, "cuda_ops": 140, "cuda_graphs": 8,
          "cuda_walk": 31, "cuda_piped": 30, "cuda_fused": 17}


def simulated(*names, cases="", marks="not slow", blocks="small"):
    """Run test files in the simulator; how many tests passed."""
    env = {**os.environ, "GGJIT_CUDA_COMPILER": "simulator", "CUDA_CASES": cases, "GGJIT_SIMULATED_BLOCKS": blocks}
    paths = [str(HERE / f"{name}.py") for name in names]
    r = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-m", marks, *paths], cwd=ROOT,
                       env=env, text=True, capture_output=True, timeout=1500)
    assert r.returncode == 0, r.stdout[-6000:] + r.stderr[-2000:]
    return int(re.search(r"(\d+) passed", r.stdout).group(1))


@pytest.mark.parametrize("suite,n_tests", SUITES.items())
def test_in_the_simulator(suite, n_tests):
    assert simulated(suite, blocks="device" if suite == "cuda_contract" else "small") >= n_tests


@pytest.mark.slow
def test_ops_in_blocks_as_large_as_the_devices():
    assert simulated("cuda_ops", blocks="device") >= SUITES["cuda_ops"]


@pytest.mark.slow
def test_every_small_case_in_the_simulator():
    assert simulated("cuda_ops", cases="all") > 50


@pytest.mark.slow
def test_what_the_sample_leaves_out_in_the_simulator():
    assert simulated("cuda_ops", "cuda_graphs", marks="slow") > 15


def test_without_the_extra_the_remedy_is_named(python):
    code = ("import importlib.util, ggjit as gg\n"
            "find = importlib.util.find_spec\n"
            "importlib.util.find_spec = lambda n, p=None: None if n == 'numba_cuda' else find(n, p)\n"
            "assert all(d.name != 'CUDA0' for d in gg.registry.devices())\n"
            "try: gg.init_backend('CUDA0')\n"
            "except gg.ParamError as e: print(e)\n")
    r = python(code, NUMBA_ENABLE_CUDASIM="0")
    assert "pip install 'ggjit[gpu]'" in r.stdout, r.stderr


@pytest.mark.parametrize("name, match", [
    ("numba-cuda-mlir", "numba-cuda-mlir is not installed .no module numba_cuda_mlir."),
    ("nvcc", "GGJIT_CUDA_COMPILER='nvcc'; there are numba-cuda, numba-cuda-mlir, simulator")])
def test_a_compiler_that_is_not_there(monkeypatch, name, match):
    monkeypatch.setattr(choice, "NAME", name)
    monkeypatch.setattr(choice.importlib.util, "find_spec", lambda module: None)
    with pytest.raises(gg.GgjitError, match=match):
        raise choice.missing()


def test_nothing_of_cuda_is_imported_for_the_cpu(python):
    code = ("import sys, numpy as np, ggjit as gg\n"
            "gg.compute(gg.neg(gg.from_numpy(gg.Context(), np.ones(3, 'f4'))))\n"
            "print([m for m in sys.modules if m.startswith(('ggjit.ops.cuda.', 'ggjit.cuda', 'numba.cuda'))])")
    r = python(code)
    assert r.stdout.strip() == "[]", r.stdout + r.stderr
