"""The documentation is true: its code runs, its links lead somewhere, its generated pages are fresh."""
import ast
import functools
import importlib
import os
import re
import subprocess
import sys

import pytest
from helpers.layers import FOLDERS
from helpers.paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
GENERATED = ("api.md", "ops.md", "ggml-names.md", "models.md")
TEXTS = [*PAGES, ROOT / "tests" / "LEDGER.md", *sorted((ROOT / "notebooks").glob("*.ipynb")),
         *(p for f in (*FOLDERS, "benchmarks", "docs") for p in sorted((ROOT / f).rglob("*.py*"))
           if p.suffix in (".py", ".pyi"))]
# ops/matmul/mul_mat.py, tools/suite/, ops/*/*.py; without its first folder: cpu/walk.py
FILE = re.compile(rf"(?<![\w/.<{{*~-])((?:{'|'.join(FOLDERS)}|tests|benchmarks|docs|notebooks)/[\w*./-]*\w"
                  r"|[\w*-]+(?:/[\w*-]+)+\.(?:py|pyi|md|ipynb)\b)")
NAME = re.compile(r"(?<![\w.])ggjit(?:\.[A-Za-z_]\w*)+")
# entry points, a completion script, a stub, a page that a machine with a GPU writes
NOT_THERE = {"ggjit.backends", "ggjit.fish", "ggjit.all_ops", "benchmarks/results/gpu"}
RUN_ALONE = """
import os, runpy, sys
for path in sys.argv[1:]:
    os.chdir(os.path.dirname(path))
    runpy.run_path(path, run_name="__main__")
"""
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


def blocks(path, language="python"):
    return [code for kind, code in FENCE.findall(path.read_text("utf-8")) if kind == language]


def anchors(path):
    """The anchors that headings get, as GitHub and mkdocs make them."""
    text = FENCE.sub("", path.read_text("utf-8"))
    heads = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in heads}


WITH_CODE = [p for p in PAGES if blocks(p)]
N_PROCESSES = 2                 # starting one takes as long as the blocks of a page


@pytest.mark.parametrize("pages", [WITH_CODE[i::N_PROCESSES] for i in range(N_PROCESSES)],
                         ids=lambda pages: "-".join(p.stem for p in pages))
def test_every_block_runs_alone(pages, tmp_path):
    """Each Python block of the pages in a namespace and an empty folder of its own; one process for some pages."""
    names = []
    for path in pages:
        for i, code in enumerate(blocks(path)):
            (tmp_path / f"{path.stem}{i}").mkdir()
            names.append(tmp_path / f"{path.stem}{i}" / f"{path.stem}-{i}.py")
            names[-1].write_text(code, encoding="utf-8")
    r = subprocess.run([sys.executable, "-c", RUN_ALONE, *map(str, names)], text=True, capture_output=True, timeout=600,
                       env={**os.environ, "MPLBACKEND": "Agg"})
    assert r.returncode == 0, r.stderr[-3000:]


@pytest.mark.parametrize("path", [p for p in PAGES if p.name not in GENERATED], ids=lambda p: p.stem)
def test_python_is_not_written_as_text(path):
    """What uses ggjit is a block that runs; a drawing, a formula or a command is none."""
    uses = re.compile(r"(?:^|[= (])(?:gg|m|cl)\.\w+\(|^from ggjit|^import ", re.M)
    assert [code for code in blocks(path, "text") if uses.search(code)] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_links(path):
    """Relative links name files that exist, and headings in them."""
    text = FENCE.sub("", path.read_text("utf-8"))
    for link in (a or b for a, b in LINK.findall(text)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), f"{path.name} links to {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{path.name}: no heading #{anchor} in {target.name}"


def test_every_page_is_in_the_menu():
    menu = (ROOT / "docs" / "site" / "mkdocs.yml").read_text("utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name in menu, f"docs/{page.name} is not in mkdocs.yml"


def is_file(name, page):
    """Is there such a file, from the root, from engine/ or from where the text stands?  Endings may be left out."""
    found = ([*at.glob(name), *at.glob(f"{name}.*")] for at in (ROOT, ROOT / "engine", page.parent, page.parent.parent))
    return any(found)


@functools.cache
def is_name(name):
    """Is it a module of ggjit, or something in one?"""
    module, *rest = name.split(".")
    found = importlib.import_module(module)
    for part in rest:
        inner = f"{getattr(found, '__name__', '')}.{part}"
        try:
            found = importlib.import_module(inner)
        except ModuleNotFoundError as e:
            if not inner.startswith(e.name):            # it is there, and imports a package that is not
                return True
            found = getattr(found, part, None)
    return found is not None


def test_files_and_names_exist():
    """Every path of the project and every dotted name that pages, notebooks, docstrings and comments mention."""
    missing = {}
    for path in TEXTS:
        text = path.read_text("utf-8")
        files = {f for f in FILE.findall(text) if f not in NOT_THERE and not is_file(f, path)}
        names = {n for n in NAME.findall(text) if n not in NOT_THERE and not is_name(n)}
        missing |= {str(path.relative_to(ROOT)): files | names} if files | names else {}
    assert missing == {}


def defined(path):
    """Names that a file defines at its top."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            yield from (n.id for n in ast.walk(target) if isinstance(n, ast.Name)) if target else ()


def test_the_table_of_changes_is_true():
    """CONTRIBUTING: every path is there, every `file:symbol` is defined there, and so are the tables files end with."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    rows = [row.strip("|").split(" | ") for row in re.findall(r"^\|.*\|$", text.split("## The compiler")[0], re.M)[2:]]
    assert len(rows) >= 11
    for what, goes, tested in rows:
        paths = re.findall(r"`((?:[a-z_]+/)+[\w.]*)(?::(\w+))?`", goes + tested)
        assert paths, what
        for path, symbol in paths:
            assert (ROOT / path).exists(), (what, path)
            assert not symbol or symbol in defined(ROOT / path), (what, path, symbol)
        folders = [ROOT / path for path, _ in paths if path.endswith("/") and path.split("/")[0] in FOLDERS]
        for name in re.findall(r"\b(SPECS|CUDA|TRAITS|FUSIONS|DECODERS|ENCODERS)\b", goes):
            assert any(name in defined(p) for folder in folders for p in folder.rglob("*.py")), (what, name)


def test_pages_count_the_architectures_there_are():
    counted = {str(p.relative_to(ROOT)): re.findall(r"\b(\d+) architectures", p.read_text("utf-8"))
               for p in (*PAGES, ROOT / "CHANGELOG.md")}
    n, = re.findall(r"of the (\d+) architectures", (ROOT / "docs" / "models.md").read_text("utf-8"))
    assert {page: found for page, found in counted.items() if set(found) - {n}} == {}
