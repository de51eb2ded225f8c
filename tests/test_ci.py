"""What CI does: README's own command, and no test twice."""
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import textwrap

import pytest
from helpers.paths import ROOT, TESTS

TWO_RUNS = """
import os, pytest
MORE = os.environ.get("MORE")

@pytest.mark.parametrize("text", ["plain", "a b[c]", "Größe", "new\\nline", "::"])
def test_passes(text):
    assert not MORE, "ran again"

def test_needs_more():
    if not MORE:
        pytest.skip("more")

def test_fails_at_first():
    assert MORE

@pytest.fixture
def teardown():
    yield
    assert MORE

def test_fails_at_its_end(teardown):
    pass
"""


@pytest.mark.parametrize("n", [0, 2])
def test_a_second_run_runs_what_did_not_pass(tmp_path, n):
    (tmp_path / "pytest.ini").write_text(f"[pytest]\ntestpaths = .\n"
                                             f"pythonpath = {shlex.quote(str(TESTS))}\n", encoding="utf-8")
    (tmp_path / "conftest.py").write_text("pytest_plugins = ['helpers.passed']\n")
    (tmp_path / "test_it.py").write_text(TWO_RUNS, encoding="utf-8")
    (tmp_path / "test_more.py").write_text("import os, pytest\nif not os.environ.get('MORE'):\n"
                                           "    pytest.skip('more', allow_module_level=True)\ndef test(): pass\n")
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}

    def run(**more):
        r = subprocess.run([sys.executable, "-m", "pytest", "-q", "-n", str(n)], cwd=tmp_path, text=True, timeout=300,
                           capture_output=True, env={**env, "GGJIT_TESTS_PASSED": str(tmp_path / "passed"), **more})
        return r.stdout.splitlines()[-1]
    # test_fails_at_its_end passes, and fails once more while it is torn down
    assert run().startswith("1 failed, 6 passed, 2 skipped, 1 error in")
    assert re.match(r"4 passed(, 5 deselected)? in", run(MORE="1"))
    assert re.match(r"(9 deselected|no tests ran)", run(MORE="1"))


def test_ci_runs_readmes_command():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    extract = re.search(r"^command=\$\((.*)\)$", script, re.M)[1]
    said = subprocess.run(["bash", "-c", extract], cwd=ROOT, text=True, capture_output=True, check=True).stdout.strip()
    assert said.startswith("python3 -m venv .venv && ") and said.endswith(" -m pytest") and "\n" not in said
    assert f"```\n{said}\n```" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_ci_emulates_arm_and_fails_with_it():
    """And goes on where it cannot: exit status 3, with a line that says why."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    step = script[script.index("emulated=0\n"):]
    assert ".ci/aarch64 sample" in step

    def status_of(emulator):
        return subprocess.run(["bash", "-euc", step.replace(".ci/aarch64 sample", f"(exit {emulator})")]).returncode
    assert [status_of(n) for n in (0, 1, 3)] == [0, 1, 0]


def test_hosted_runners_take_readmes_two_commands(tmp_path):
    text = (ROOT / ".github" / "workflows" / "machines.yml").read_text(encoding="utf-8")
    program = textwrap.dedent(re.search(r"<< 'PROGRAM'\n(.*?)\n *PROGRAM\n", text, re.S)[1])
    (tmp_path / "README.md").write_bytes((ROOT / "README.md").read_bytes())
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    demo, tests = ((tmp_path / name).read_text(encoding="utf-8") for name in ("demo.sh", "tests.sh"))
    assert demo.endswith(" demo\n") and tests.endswith(" -m pytest\n")
    for command in (demo, tests):
        assert command.startswith("set -e\n")
        assert command.removeprefix("set -e\n") in (ROOT / "README.md").read_text(encoding="utf-8")
    machines = {*re.search(r"os: \[(.*)\]", text)[1].split(", ")}
    assert {"macos-14", "macos-15", "windows-2022", "ubuntu-24.04-arm"} <= machines
    named = {ROOT / name for name in re.findall(r"\$python (\S+)$", text, re.M) if not name.startswith("-")}
    assert named and all(path.exists() for path in named)


@pytest.mark.skipif(platform.machine() == "aarch64", reason="nothing is emulated on the processor itself")
def test_a_machine_without_an_emulator_is_told_so(tmp_path):
    for name in ("bash", "dirname", "uname"):
        (tmp_path / name).symlink_to(shutil.which(name))
    r = subprocess.run([ROOT / ".ci" / "aarch64", "sample"], env={"PATH": str(tmp_path), "HOME": str(tmp_path)},
                       text=True, capture_output=True)
    assert (r.returncode, r.stdout) == (3, "") and r.stderr == "aarch64: no qemu-user (Debian: qemu-user-static)\n"


def test_kernels_compile_and_link_for_macos():
    """Products, attention, norms and the walk; without llvm-rtdyld they are compiled alone, and the line says so."""
    links = shutil.which("llvm-rtdyld")
    r = subprocess.run([sys.executable, ROOT / ".ci" / "macos"], text=True, capture_output=True)
    assert r.returncode == 0, r.stdout + r.stderr
    n, said = re.fullmatch(r"(\d+) kernels for arm64-apple-macosx14.0.0, neon apple-m1, [\d,]+ bytes; (.*)\n",
                           r.stdout).groups()
    assert int(n) >= 20 and (said == "linked" or not links and "no llvm-rtdyld" in said)
