"""Reports on memory plans: numbers, texts, pictures, files, differences."""
import csv
import io
import json
import re
import xml.dom.minidom

import numpy as np
import pytest
from helpers.browser import in_browser
from helpers.requirements import benchmark

import ggjit as gg
from ggjit.alloc import plots
from ggjit.alloc.report import MeasureReport, mib
from ggjit.ops.core.record import OP, T_OP

graphs = benchmark("alloc_graphs")
plan_table = graphs.plan_table


def report(g, planner="best", title="net", **kw):
    def describe(i):
        return {"name": f"t{i}<&", "op": OP(int(g.rows[i][T_OP])).name, "type": "f32", "shape": g.ne(i)[::-1],
                "nbytes": int(g.nbytes([i])[0]), "where": "model.py:7"}
    plan = plan_table(g.table, g.nodes, g.leafs, g.sizes, planner=planner)
    return MeasureReport.from_plan(plan, g.nodes, g.leafs, describe, title=title, **kw), plan


def test_numbers_agree_with_the_plan():
    r, plan = report(graphs.SUITE["tinyllama pp128"](), "ggml", kinds={"weights": 3 << 20, "compute": 1 << 20})
    assert (r.peak, r.lower_bound, r.n_buffers) == (plan.peak, plan.lower_bound, len(plan.a_id))
    assert r.gap > 1.1 and int(r.live.max()) == r.lower_bound == int(r.live[r.peak_step])
    alive = r.at_peak
    padded = {a: int(z) for a, z in enumerate(plan.a_size)}
    assert sum(padded[x.alloc] for x in alive) == r.lower_bound
    assert [x.nbytes for x in alive] == sorted((x.nbytes for x in alive), reverse=True)
    assert sum(r.causes.values()) == sum(1 for x in r.rows if x.op not in ("NONE", "RESHAPE", "VIEW", "PERMUTE"))
    assert any("fragmentation" in line for line in r.advice())
    assert ("memory: total", "4.00 MiB") in r.summary()


def test_text_and_html_escape_and_hold_the_facts():
    r, _ = report(graphs.SUITE["stories15M pp64"]())
    text = str(r)
    assert f"({r.peak:,} bytes)" in text and "model.py:7" in text and "^ step" in text and "lower bound" in text
    page = r._repr_html_()
    assert "t0<&" not in page and "&lt;&amp;" in page
    xml.dom.minidom.parseString(page[page.index("<svg"):page.index("</svg>") + 6])
    rich = pytest.importorskip("rich.console")
    out = io.StringIO()
    rich.Console(file=out, width=200).print(r)
    assert "alive at the peak" in out.getvalue()


@pytest.mark.parametrize("name", ["randwire 60 a", "train unet small"])
def test_pictures_at_sixty_and_at_three_thousand_tensors(name, tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    r, plan = report(graphs.SUITE[name]())
    ax = r.plot(path=tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 10_000
    assert len(ax.collections[0].get_paths()) == len(plan.a_id)
    assert ax.get_ylim()[1] > 0 and len(ax.texts) < 400
    page = r._repr_html_()
    assert len(page) < 2_000_000 and ("gg.explore(graph)" in page) == (len(r.boxes) > 60)
    levels = [page.count(f"class='gz{k}'") for k in (1, 6)]         # labels that are shown from that zoom on
    assert levels == ([1 + (len(r.boxes) <= 500)] * 2 if len(r.boxes) > 60 else [0, 0])
    assert page.count("type='radio'") == 7 * levels[0] and "<script" not in page


ZOOMED = """
const found = [], box = e => e.getBoundingClientRect(), shown = e => box(e).width > 0;
const plot = document.querySelector(".gx.gy"), boxes = [...plot.querySelectorAll("rect")].map(box);
for (const radio of document.querySelectorAll("input[type=radio]")) {
  radio.checked = true;
  const area = [...plot.querySelectorAll("rect")].map(box), whole = box(plot);
  const texts = [...plot.querySelectorAll("g[class^=gz] text")].filter(shown).map(box);
  const ticks = [...document.querySelectorAll(".gx:not(.gy) text")].filter(shown).map(box);
  found.push({labels: texts.length, width: whole.width, height: whole.height, page: document.body.scrollWidth,
    strays: texts.filter(t => !area.some(b => b.left - 2 <= t.left && t.right <= b.right + 2 && b.top - 2 <= t.top &&
                                              t.bottom <= b.bottom + 2)).length,
    struck: ticks.slice(1).filter((t, k) => t.left < ticks[k].right).length, ticks: ticks.length,
    letters: Math.max(...texts.map(t => Math.min(t.width, t.height)), 0)});
}
return found;
"""


@pytest.mark.parametrize("dark", [False, True])
def test_three_thousand_tensors_enlarged_in_a_browser(dark, tmp_path):
    """Letters keep their size, every label lies in a box, ticks do not touch, the page does not grow."""
    r, _ = report(graphs.SUITE["train unet small"]())
    page = f"<!doctype html><html><head></head><body>{r._repr_html_()}</body></html>"
    found = in_browser(page, ZOOMED, tmp_path, dark)
    n_labels = [zoom["labels"] for zoom in found]
    assert n_labels == sorted(n_labels) and n_labels[-1] >= 50
    for zoom, (kx, ky) in zip(found, plots.ZOOMS, strict=True):
        assert abs(zoom["width"] - kx * found[0]["width"]) < 1 and abs(zoom["height"] - ky * 300) < 1
        assert zoom["strays"] == zoom["struck"] == 0 and zoom["letters"] < 16 and zoom["ticks"] >= 5
        assert zoom["page"] == found[0]["page"] <= 1300


def test_files_round_trip(tmp_path):
    from ggjit.alloc.csvio import run_plan_csv
    r, plan = report(graphs.SUITE["inception x8"](), "ggml")
    r.to_csv(tmp_path / "rows.csv")
    rows = list(csv.DictReader(open(tmp_path / "rows.csv")))
    assert len(rows) == len(r.rows) and rows[0]["name"] == r.rows[0].name
    r.to_minimalloc(tmp_path / "problem.csv")
    out = run_plan_csv(tmp_path / "problem.csv")
    assert out["lower_bound"] == r.lower_bound == out["peak"] < r.peak
    d = json.loads(r.to_json(tmp_path / "r.json"))
    assert d["peak"] == r.peak and len(d["live"]) == r.n_steps and json.loads((tmp_path / "r.json").read_text()) == d


def test_difference():
    a, _ = report(graphs.SUITE["stories15M pp64"](), "ggml")
    b, _ = report(graphs.SUITE["stories15M pp64"](), "best")
    d = a.diff(b)
    assert d.peak == b.peak - a.peak < 0 and not d.added and not d.resized and "best" in str(d)
    c, _ = report(graphs.SUITE["tinyllama pp128"]())
    assert a.diff(c).added and a.diff(c).resized and "resized" in str(a.diff(c))


def branches(widths):
    """Branches without names, the widest last: orders and planners differ on them."""
    ctx = gg.Context()
    x = ctx.new_tensor(gg.F32, (64, 64), "x")
    outs = [gg.mul_mat(ctx.new_tensor(gg.F32, (n, 64)), gg.silu(gg.mul_mat(ctx.new_tensor(gg.F32, (64, n)), x)))
            for n in widths]
    gg.alloc_ctx_tensors(ctx, gg.init_backend("NULL"))
    return gg.Graph(*outs)


def test_tensors_without_names_have_one_name_on_both_sides():
    """Op and number: the same for two orders, two planners, two builds and a graph in another order."""
    widths = (64, 128, 256)
    graph = branches(widths)
    reports = [gg.measure(graph), gg.measure(graph, order="memory"), gg.measure(branches(widths), planner="ggml"),
               gg.measure(gg.Graph(*graph.outputs, order="memory"))]
    names = [{r.name: r.nbytes for r in report.rows} for report in reports]
    assert all(n == names[0] for n in names) and {"mul_mat 0", "silu 1"} <= names[0].keys()
    assert not re.search(r">%\d|'%\d", reports[0].svg() + str(reports[0].table()))
    assert reports[0].svg("lifetime") != reports[0].svg() and "2 to 3 steps" in reports[0].svg("lifetime")
    with pytest.raises(gg.ParamError, match="colour 'size': expected 'op' or 'lifetime'"):
        reports[0].svg("size")


def test_a_difference_lists_what_moved():
    graph = branches((64, 128, 256))
    a, b = gg.measure(graph), gg.measure(graph, order="memory")
    d = a.diff(b)
    place = {r.name: r.offs for r in a.rows}, {r.name: r.offs for r in b.rows}
    assert d.moved == {n: (place[0][n], place[1][n]) for n in place[0] if place[0][n] != place[1][n]} != {}
    first = next(n for n in d.moved if not {r.name: r.alias_of for r in a.rows}[n])
    x, y = d.moved[first]
    assert f"moved        {first}: offset {x:,} -> {y:,}" in str(d) and a.diff(a).moved == {}
    page = d._repr_html_()
    assert f"{len(d.moved)} moved</summary>" in page and f"<li>{first}: offset {x:,} -&gt; {y:,}</li>" in page
    assert page.count("<svg") == 2 and page.index("before") < page.index("<svg") < page.index("after")
    heights = [re.findall(rf"height='([0-9.]+)'[^>]*><title>{first}: ", x) for x in (b.svg(), page)]
    assert len(heights[1]) == 2 and heights[1][0] == heights[1][1] <= heights[0][0], "one scale on both sides"
    assert d.at_peak[0] and f"peak left    {len(d.at_peak[0])}: " in str(d)


def test_nothing_to_place():
    plan = plan_table(np.zeros((1, 40), np.int64), [], [], ([], []))
    r = MeasureReport.from_plan(plan, [], [], dict)
    assert r.peak == 0 and r.gap == 1.0 and "nothing" in str(r) and r._repr_html_()
    assert mib(5) == "5 B" and mib(3 << 19) == "1.50 MiB"
