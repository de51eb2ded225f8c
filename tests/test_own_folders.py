"""A run of the tests leaves the user's home and cache as they were; if not, it fails and says where."""
import os
import pathlib
import shlex
import subprocess
import sys

import pytest
from helpers.paths import TESTS

TESTS_OF_A_PROJECT = """
import os, pathlib, subprocess, sys
from ggjit.ops.native.cache_files import cache_dir
USERS = pathlib.Path({home!r})

def test_good():
    for folder in (pathlib.Path.home(), cache_dir(), pathlib.Path(os.environ["XDG_CONFIG_HOME"])):
        assert USERS not in folder.parents and folder != USERS
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "mine").write_text("x")
    (cache_dir() / "kernels").mkdir(exist_ok=True)
    (cache_dir() / "kernels" / "reads-1.json").write_text("64000")
    code = "import os; print(os.environ['HOME'], os.environ['GGJIT_CACHE_DIR'])"
    said = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True).stdout
    assert said.split() == [str(pathlib.Path.home()), str(cache_dir())]

def test_bad():
    for path in {bad!r}:
        pathlib.Path(path).write_text("64000")
"""


@pytest.fixture
def project(tmp_path):
    """project(*bad)(*arguments): a run of two tests, one of which writes the files `bad` of the user's home."""
    home = tmp_path / "home"
    (home / ".cache" / "ggjit" / "kernels").mkdir(parents=True)
    (home / ".config").mkdir()
    (home / ".cache" / "ggjit" / "kernels" / "reads-0.json").write_text("5000")

    def make(*bad):
        (tmp_path / "tests").mkdir()
        (tmp_path / "pytest.ini").write_text(f"[pytest]\ntestpaths = tests\n"
                                                 f"pythonpath = {shlex.quote(str(TESTS))}\n", encoding="utf-8")
        (tmp_path / "tests" / "conftest.py").write_text("pytest_plugins = ['helpers.own_folders']\n")
        tests = TESTS_OF_A_PROJECT.format(home=str(home), bad=[str(home / path) for path in bad])
        (tmp_path / "tests" / "test_it.py").write_text(tests, encoding="utf-8")
        env = {k: v for k, v in os.environ.items() if k != "GGJIT_CACHE_DIR" and not k.startswith(("XDG_", "PYTEST_"))}
        return lambda *args: subprocess.run([sys.executable, "-m", "pytest", "-q", *args], cwd=tmp_path, text=True,
                                            capture_output=True, timeout=300, env={**env, "HOME": str(home)})
    return make


WRITTEN = {".cache/ggjit/kernels/reads-0.json": "written", ".config/program": "new", "note": "new",
           ".cache/ggjit/kernels/reads-1.json": "new"}


@pytest.mark.parametrize("n,bad", [(2, WRITTEN), (0, ["note"])])
def test_what_a_test_writes_into_the_users_folders_fails_the_run(project, tmp_path, n, bad):
    r = project(*bad)("-n", str(n))
    assert r.returncode == 1 and "2 passed" in r.stdout, r.stdout + r.stderr
    assert all(f"{WRITTEN[path]}: {tmp_path / 'home' / path}\n" in r.stdout for path in bad)
    assert f"\n{len(bad)} changes" in r.stdout


def test_what_stays_in_the_runs_own_folders_is_no_finding_and_measured_times_are_not_kept(project, tmp_path):
    run = project("note")
    for _ in range(2):
        r = run("-n", "0", "-k", "good", "-v")
        assert r.returncode == 0 and "folders changed" not in r.stdout, r.stdout + r.stderr
    kept, = (tmp_path / ".pytest_cache" / "d").glob("ggjit-*")
    assert (kept / "cache" / "mine").exists() and (kept / "home" / "mine").exists()
    assert (kept / "cache" / "kernels" / "reads-1.json").exists()
    r = run("-n", "0", "--collect-only")                    # the next run begins without
    assert not (kept / "cache" / "kernels" / "reads-1.json").exists() and (kept / "cache" / "mine").exists()


def test_a_place_that_cannot_be_written_or_no_cache_at_all(project, tmp_path):
    run = project("note")
    assert run("-n", "0", "-p", "no:cacheprovider", "tests/test_it.py::test_good").returncode == 0
    assert not (tmp_path / ".pytest_cache").exists() and sorted(os.listdir(tmp_path / "home")) == [".cache", ".config"]


def test_this_run_has_folders_of_its_own():
    from ggjit.ops.native.cache_files import cache_dir
    assert pathlib.Path.home().parent == cache_dir().parent and pathlib.Path.home().name == "home"
