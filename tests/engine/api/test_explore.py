"""gg.explore: the page holds the plans and the run, and a real browser shows them, light and dark."""
import json
import re

import numpy as np
import pytest
from helpers.browser import in_browser

import ggjit as gg
from ggjit.core.table import TABLE
from ggjit.core.versions import T_VERSION

RNG = np.random.default_rng(0)
PARTS = """
const $ = part => document.querySelector(`.gx [data-part="${part}"]`), press = s =>
    document.querySelector(s).dispatchEvent(new MouseEvent("click", {bubbles: true}));
const facts = () => Object.fromEntries([...$("node").querySelectorAll("table:first-child tr")].map(
    r => [r.cells[0].textContent, r.cells[1].textContent]));
const alive = () => [...$("alive").querySelectorAll("tr")].slice(1).map(r => [...r.cells].map(c => c.textContent));
const slide = (selector, value) => { const s = document.querySelector(selector); s.value = value;
    s.dispatchEvent(new Event("input", {bubbles: true})); };
const at = (type, x, y, buttons = 0) => { const r = $("picture").firstChild.getBoundingClientRect();
    $("picture").firstChild.dispatchEvent(new MouseEvent(type, {bubbles: true, buttons, clientX: r.left + x * r.width,
                                                                clientY: r.top + y * r.height})); };
"""


def network(batch=4, width=32, name="x"):
    ctx = gg.Context()
    x = gg.from_numpy(ctx, np.ones((batch, width), np.float32), name)
    w = gg.from_numpy(ctx, RNG.standard_normal((64, width), np.float32), "w")
    wide = gg.set_name(gg.mul_mat(w, x), "wide")
    return gg.Graph(gg.set_name(gg.mul_mat(gg.cont(gg.transpose(w)), gg.relu(wide)), "y"))


def skips(n):
    """A network of n products, each a sum with a result of some steps before."""
    ctx = gg.Context()
    live = [ctx.new_tensor(gg.F32, (64, 8), "x")]
    for i in range(n // 2):
        t = gg.mul_mat(ctx.new_tensor(gg.F32, (64, 64)), live[-1])
        live.append(gg.add(t, live[max(0, i - 7)]))
    gg.alloc_ctx_tensors(ctx, gg.init_backend("NULL"))
    return gg.Graph(live[-1])


def page_of(explorer, folder):
    explorer.save(folder / "saved.html")
    return (folder / "saved.html").read_text("utf-8")


def test_the_run_is_shown_step_by_step(tmp_path):
    graph = network(name="</script><b>x")
    page = page_of(gg.explore(graph, run=True, title="A & B"), tmp_path)
    assert "src=" not in page and "http" not in page
    seen = in_browser(page, PARTS + """
        press('[data-do="peak"]');
        const out = {title: document.querySelector(".gx > b").textContent, steps: [], errors: []};
        slide('[data-part="step"]', 0);
        for (let k = 0; k < 5; k++) { out.steps.push([facts(), alive(),
            [...$("node").querySelectorAll(".gx-values td")].map(c => c.textContent)]); press('[data-do="on"]'); }
        press('[data-part="near"] [data-step]');
        out.source = facts().tensor;
        return out;""", tmp_path)
    assert seen["title"] == "A & B" and seen["source"].startswith("cont")
    report = gg.measure(graph)
    wide = report.rows[0].name
    values = {t.id: v for t, v in zip(graph.nodes, gg.compute(*graph.nodes), strict=True)}
    for step, ((facts, alive, numbers), t) in enumerate(zip(seen["steps"], graph.nodes, strict=False)):
        assert f"F32 {list(t.ne[:t.ndim])}, {t.nbytes:,} bytes" in facts["tensor"], wide
        got = [float(x) for x in numbers if x != "..."]
        a = values[t.id]
        rows, columns = ([*range(n)] if n <= 5 else [0, 1, n - 2, n - 1] for n in a.shape)
        np.testing.assert_allclose(got, a[np.ix_(rows, columns)].ravel(), rtol=1e-3)
        live = {r.name: f"{r.offs:,}" for r in report.alive_at(step)}
        assert {name: offs for name, _, offs, _ in alive} == live
        assert re.search(r"buffer \d+, byte [\d,]+, address 0x", facts["lay at"])
        assert "us" in facts["time"] or "ms" in facts["time"] or t.op.name == "TRANSPOSE"


def test_odd_graphs_are_shown(tmp_path):
    """Without memory of its own, without elements, of one node, with values that are none: each says so."""
    ctx = gg.Context()
    x, z = (gg.from_numpy(ctx, np.full(shape, -1, np.float32), "x") for shape in ((2, 3), (0, 3)))
    pages = [gg.explore(gg.Graph(y), run=True).html() for y in (gg.transpose(x), gg.relu(z), gg.log(x), gg.sum(x))]
    seen = in_browser(f"<!doctype html><html><head></head><body>{''.join(pages)}</body></html>", """
        return [...document.querySelectorAll(".gx")].map(g => g.querySelector('[data-part="node"]').textContent);""",
                      tmp_path)
    for text, words in zip(seen, ("no memory of its own", "no elements", "all NaN", "min -6, max -6"), strict=True):
        assert words in text, text


def test_names_that_try_to_break_out(tmp_path):
    """Markup, quotes, letters of double width and pairs of surrogates stay text, inside their boxes."""
    names = ("</script><img src=x onerror=alert(1)>", "<!--<script>", "\"'`${1}\\u003c", "\u5b57" * 24,
             "\U0001f600" * 24, "\ud800\u202eabc", "")
    ctx = gg.Context()
    y = gg.from_numpy(ctx, np.ones((64, 64), np.float32), names[0])
    for name in names:
        y = gg.set_name(gg.mul(gg.cont(gg.transpose(y)), y), name)
        y = gg.mul(y, y)
    seen = in_browser(page_of(gg.explore(gg.Graph(y), run=True, title="{x}</title><b>'\""), tmp_path), PARTS + """
        const out = {titles: [document.title, document.querySelector(".gx > b").textContent], steps: [], over: -999};
        slide('[data-part="step"]', 0);
        for (let k = 0; k < 28; k++) {
            out.steps.push(facts());
            for (const g of $("near").querySelectorAll("g")) {
                const box = g.querySelector("rect").getBoundingClientRect();
                for (const t of g.querySelectorAll("text"))
                    out.over = Math.max(out.over, t.getBoundingClientRect().width - box.width); }
            press('[data-do="on"]'); }
        out.strange = document.querySelectorAll("img, .gx script").length;
        out.lone = /[\\ud800-\\udbff](?![\\udc00-\\udfff])|\\ufffd/.test($("near").textContent);
        return out;""", tmp_path)
    assert seen["titles"] == ["{x}</title><b>'\""] * 2 and seen["strange"] == 0 and not seen["lone"]
    assert seen["over"] < 0, "texts are wider than their boxes"
    text = " ".join(step["tensor"] for step in seen["steps"])
    assert all(name in text for name in names[:5]) and "\\ud800\\u202eabc" in text
    squares = [step for step in seen["steps"] if step["op"].count("mul ") == 1 and "read by" in step]
    assert all(step["read by"].split(", ").count(r) == 1 for step in squares for r in step["read by"].split(", "))


def test_a_drag_that_ends_outside_is_over(tmp_path):
    seen = in_browser(page_of(gg.explore(network()), tmp_path), PARTS + """
        const frame = () => document.querySelector('[data-part="frame"]').getAttribute("visibility");
        at("mousedown", 0.2, 0.2);
        at("mousemove", 0.6, 0.6);              // the button is up: it was let go elsewhere
        const over = frame();
        at("mouseup", 0.9, 0.9);
        return [over, frame()];""", tmp_path)
    assert seen == ["hidden", "hidden"]


def test_settings_are_dragged_and_tell_the_peak(tmp_path):
    def build(batch, width):
        return network(batch, width), {"weights": 4 * 64 * width}
    explorer = gg.explore(build, batch=(1, 4, np.int64(16)), width=(32, 64))
    seen = in_browser(page_of(explorer, tmp_path), PARTS + """
        const out = [];
        for (let b = 0; b < 3; b++) for (let w = 0; w < 2; w++) for (const p of ["0", "1"]) {
            slide('input[data-axis="0"]', b); slide('input[data-axis="1"]', w);
            press(`button[data-axis="2"][data-i="${p}"]`);
            out.push([$("axes").textContent.replace(/\\s+/g, " "), $("numbers").textContent, $("where").textContent]); }
        press('[data-colour="lifetime"]');
        return [out, $("legend").textContent];""", tmp_path)
    seen, legend = seen
    wanted = [(b, w, p) for b in (1, 4, 16) for w in (32, 64) for p in ("best", "ggml")]
    for (axes, numbers, where), (b, w, p) in zip(seen, wanted, strict=True):
        report = gg.measure(network(b, w), planner=p)
        assert f"batch {b}" in axes and f"width {w}" in axes and f"planner {p}" in numbers
        assert numbers.startswith(f"peak {report.peak / 1024:.2f} KiB at step {report.peak_step},"), numbers
        assert f"weights {w / 4:.2f} KiB" in numbers and f"of {report.n_steps}" in where
    assert "step" in legend and "lower bound" in legend


def test_three_thousand_tensors_are_zoomed(tmp_path):
    explorer = gg.explore(skips(3000), planner="ggml")
    assert explorer.nbytes < 600_000
    seen = in_browser(page_of(explorer, tmp_path), PARTS + """
        const n = () => document.querySelectorAll(".gx rect[data-box]").length, labels = () =>
            document.querySelectorAll(".gx text[paint-order]").length, start = performance.now(), out = {all: n()};
        at("mousedown", 0.50, 0.97 - 0.2); at("mousemove", 0.51, 0.3, 1); at("mouseup", 0.51, 0.05);
        Object.assign(out, {near: n(), labels: labels()});
        const box = document.querySelector(".gx rect[data-box]"), r = box.getBoundingClientRect();
        box.dispatchEvent(new MouseEvent("mousemove", {bubbles: true, clientX: r.left, clientY: r.top}));
        out.tip = $("tip").textContent;
        press('[data-do="in"]'); out.nearer = n(); press('[data-do="out"]'); press('[data-do="whole"]');
        return Object.assign(out, {again: n(), seconds: (performance.now() - start) / 1000});""", tmp_path)
    assert seen["all"] == seen["again"] >= 1500 and seen["nearer"] <= seen["near"] < 200 and seen["labels"] > 3
    for word in ("mul_mat", "F32 [64, 8]", "2,048 bytes", "test_explore.py:", "steps", "offset"):
        assert word in seen["tip"], seen["tip"]
    assert seen["seconds"] < 10


def test_what_cannot_be_shown_says_why(monkeypatch, tmp_path):
    graph = network()
    with pytest.raises(gg.TypeMismatch, match=r"explore takes a Graph or a function .* gg.explore\(gg.Graph\(y\)\)"):
        gg.explore(3)
    with pytest.raises(gg.ParamError, match="settings batch go to a function"):
        gg.explore(graph, batch=(1, 2))
    with pytest.raises(gg.ParamError, match="run=True takes one Graph"):
        gg.explore(network, batch=(1, 2), run=True)
    with pytest.raises(gg.TypeMismatch, match="what the function returns takes a Graph"):
        gg.explore(lambda n: n, n=(1, 2))
    with pytest.raises(gg.ParamError, match="batch is a number or text, or a sequence"):
        gg.explore(network, batch=())
    for planner in (object(), {"best": 1}.items()):
        with pytest.raises(gg.ParamError, match="planner is a number or text, or a sequence"):
            gg.explore(graph, planner=planner)
    with pytest.raises(gg.TypeMismatch, match="explore: title"):
        gg.explore(graph, title=3)
    for kinds in ("weights", {"weights": "many"}):
        with pytest.raises(gg.TypeMismatch, match="returns a dict of numbers, {'weights': 1000}"):
            gg.explore(lambda n, kinds=kinds: (network(n), kinds), n=1)
    with pytest.raises(gg.ParamError, match="expected one of"):
        gg.explore(graph, planner="bst")
    ctx = gg.Context()
    with pytest.raises(gg.ParamError, match="computes nothing"):
        gg.explore(gg.Graph(gg.from_numpy(ctx, np.ones(4, np.float32), "leaf")))
    with pytest.raises(gg.NotAllocated, match="x F32 .* has no values"):
        gg.explore(gg.Graph(gg.relu(ctx.new_tensor(gg.F32, (4,), "x"))), run=True)
    with pytest.raises(gg.ParamError, match=r"'a.png' must end in \.html"):
        gg.explore(graph).save("a.png")
    monkeypatch.setattr("ggjit.api.explore.MAX_NBYTES", 1000)
    with pytest.raises(gg.ParamError, match=r"would have 0\.\d MiB.*fewer values of planner$"):
        gg.explore(graph)
    with pytest.raises(gg.ParamError, match=r"MiB.*; leave out run=True; explore a part, .*measure\(graph\).plot"):
        gg.explore(graph, planner="ggml", run=True)


def test_a_run_counts_as_a_write():
    """What a stepped run writes into a leaf makes its copies elsewhere stale, as a compute does."""
    ctx = gg.Context()
    a = gg.from_numpy(ctx, np.ones(4, np.float32), "a")
    graph = gg.Graph(gg.scale_inplace(a, 2.0))
    before = TABLE.words[a.id, T_VERSION]
    page = gg.explore(graph, run=True).html()
    assert a.numpy().tolist() == [2] * 4 and TABLE.words[a.id, T_VERSION] > before
    assert json.loads(re.search(r"const data = (.*);\n", page)[1])["run"][0]["values"] == [["2", "2", "2", "2"]]


@pytest.mark.parametrize("error", [ZeroDivisionError, TypeError, KeyError, AttributeError])
def test_what_the_function_raises_comes_out_as_it_is(error):
    raised = error("mine")

    def graph(n):
        raise raised
    with pytest.raises(error) as e:
        gg.explore(graph, n=(1, 2))
    assert e.value is raised
