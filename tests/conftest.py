"""Shared fixtures; what tests import is in helpers/."""
import gc
import os
import signal
import subprocess

import pytest
from helpers import sample
from helpers.interpreter import Interpreter
from helpers.paths import TESTS_PATH
from helpers.processes import python
from helpers.requirements import need, shared

from ggjit.ops.native import isa
from ggjit.ops.native.jit import CACHE

pytest_plugins = ["helpers.own_folders", "helpers.passed"]
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:       # a shell's background job: tests press Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header():
    return f"samples of the long sweeps: GGJIT_TEST_SEED={sample.SEED}"


LONG = {"test_in_the_simulator", "test_runs_as_a_script", "test_sample", "test_cases",
        "test_cases_on_other_instruction_sets", "test_networks_agree_across_instruction_sets"}


def pytest_collection_modifyitems(items):
    """Tests of a minute first: at the end of a run every process has something to do."""
    items.sort(key=lambda item: item.originalname not in LONG)


def pytest_terminal_summary(terminalreporter):
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(f"repeat the samples of this run with GGJIT_TEST_SEED={sample.SEED}")


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
            paths = [TESTS_PATH, *filter(None, [os.environ.get("PYTHONPATH")])]
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
