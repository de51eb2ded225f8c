"""What notebooks show reads on light and dark pages: the contrast of every text, in a real browser."""
import numpy as np
import pytest
from helpers.browser import in_browser

import ggjit as gg

LEAST = 3.0                     # WCAG's for large text and graphics is 3
TEXTS = """
const rgb = text => { const m = text && text.match(/[\\d.]+/g); return m && m.map(Number); };
const light = c => c.slice(0, 3).map(x => x / 255).map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
    .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
const dark = matchMedia("(prefers-color-scheme: dark)").matches, page = dark ? [18, 18, 18] : [255, 255, 255];
const behind = (e, x, y) => {
    const own = getComputedStyle(e);
    if (own.paintOrder.startsWith("stroke") && own.stroke !== "none") return rgb(own.stroke);
    for (const other of document.elementsFromPoint(x, y)) {
        if (other === e || e.contains(other)) continue;
        const s = getComputedStyle(other), drawn = ["rect", "path", "polygon"].includes(other.tagName);
        const c = rgb(drawn ? s.fill : s.backgroundColor), a = c && (c[3] === undefined ? 1 : c[3]) *
            (drawn ? +s.fillOpacity : 1);
        if (c && a > 0.1) return c.slice(0, 3).map((v, i) => a * v + (1 - a) * page[i]);
    }
    return page;
};
const found = [];
for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].filter(n => n.nodeType === 3 && n.data.trim());
    if (!own.length || ["SCRIPT", "STYLE", "title"].includes(e.tagName)) continue;
    const r = e.getBoundingClientRect();
    if (!r.width || !r.height) continue;
    const s = getComputedStyle(e), c = rgb(e instanceof SVGElement ? s.fill : s.color);
    const [a, b] = [light(c), light(behind(e, r.left + r.width / 2, r.top + r.height / 2))].sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), own[0].data.trim()]);
}
return [dark, found];
"""


@pytest.fixture(scope="module")
def page():
    rng, ctx = np.random.default_rng(0), gg.Context()
    x = gg.from_numpy(ctx, rng.standard_normal((64, 128), np.float32), "x")
    w = gg.from_numpy(ctx, rng.standard_normal((128, 128), np.float32), "blk.0.w")
    graph = gg.Graph(gg.cont(x), gg.cumsum(x), gg.pad(x, 1, 0, 0, 0), gg.roll(x, 1, 0, 0, 0), gg.argsort(x, 0),
                     gg.repeat_4d(x, 256, 64, 1, 1), gg.soft_max(gg.mul_mat(w, x)), gg.concat(x, x, 0),
                     gg.sum_rows(x))            # more ops than there are colours
    report = gg.measure(graph)
    parts = [x._repr_html_(), report._repr_html_(), report.svg("lifetime"), graph.draw(engine="own").html(),
             gg.explore(graph).html(), gg.F32._repr_html_(), ctx._repr_html_()]
    return ("<!doctype html><html><head><meta charset='utf-8'><style>:root{color-scheme:light dark}</style></head>"
            f"<body>{'<hr>'.join(parts)}</body></html>")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_text_reads(page, dark, tmp_path):
    seen, found = in_browser(page, TEXTS, tmp_path, dark)
    assert seen == dark and len(found) > 150
    for word in ("offset, KiB", "live bytes", "lower bound", "4 to 10 steps", "others"):
        assert word in {text for _, text in found}
    assert [x for x in found if x[0] < LEAST] == []
