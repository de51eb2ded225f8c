"""The documentation is true: its code runs, its links lead somewhere, its generated pages are fresh."""
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


def blocks(path, language="python"):
    return [code for kind, code in FENCE.findall(path.read_text("utf-8")) if kind == language]


def anchors(path):
    """The anchors that headings get, as GitHub and mkdocs make them."""
    text = FENCE.sub("", path.read_text("utf-8"))
    heads = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in heads}


@pytest.mark.parametrize("path", [p for p in PAGES if blocks(p)], ids=lambda p: p.stem)
def test_code_runs(path, tmp_path):
    """All Python blocks of a page, one after the other in one process, in an empty folder."""
    r = subprocess.run([sys.executable, "-"], input="\n".join(blocks(path)), cwd=tmp_path, text=True,
                       capture_output=True, timeout=300, env={**os.environ, "MPLBACKEND": "Agg"})
    assert r.returncode == 0, r.stderr[-3000:]


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
