"""The site as a browser shows it: no code is cut, pictures are there, nothing is fetched from elsewhere."""
import subprocess
import sys

import pytest
from helpers.browser import BROWSER, in_browser
from helpers.paths import ROOT

WIDTH = 1300                    # pixels of a small laptop's window
LOOK = """
const out = {}, wait = ms => new Promise(r => setTimeout(r, ms));
for (const name of %s) {
    const frame = document.createElement("iframe");
    frame.style = "width:1300px;height:900px;border:0";
    frame.sandbox = "allow-same-origin";                // without its scripts: they search and scroll
    document.body.append(frame);
    await new Promise(r => { frame.onload = r; frame.src = name; });
    const d = frame.contentDocument, code = [...d.querySelectorAll("pre > code")];
    const one = code.length ? parseFloat(getComputedStyle(code[0]).fontSize) * 0.61 : 1;        // width of a letter
    out[name] = {blocks: code.length,
        columns: code.length ? Math.floor((code[0].clientWidth - 32) / one) : 118,
        cut: code.filter(c => c.scrollWidth > c.clientWidth + 1).map(c => c.textContent.split("\\n").sort(
            (a, b) => b.length - a.length)[0].slice(0, 140)),
        missing: [...d.images].filter(i => !i.naturalWidth).map(i => i.src),
        elsewhere: [...d.querySelectorAll("script[src],link[rel=stylesheet],img")].map(e => e.src || e.href).filter(
            u => u.startsWith("http"))};
    frame.remove();
}
return out;
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs")
    if BROWSER is None:
        pytest.skip("no browser: chromium is not installed")
    folder = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "-q", "-f", ROOT / "docs" / "site" / "mkdocs.yml", "-d",
                    folder], check=True, capture_output=True, timeout=300)
    return folder


def test_pages_in_a_window_of_a_laptop(site):
    names = sorted(str(p.relative_to(site)) for p in site.rglob("index.html"))
    found = in_browser("<!doctype html><html><head></head><body></body></html>", LOOK % names, site, width=WIDTH)
    assert len(found) == len(names) > 15 and sum(page["blocks"] for page in found.values()) > 60
    assert min(page["columns"] for page in found.values()) >= 115           # of drawings: longer lines of code go on
    faults = {name: page for name, page in found.items() if page["cut"] or page["missing"] or page["elsewhere"]}
    assert faults == {}
