"""gg.measure, `ggjit peak`, `ggjit plan`: measured peaks are what then happens."""
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from helpers import tiny_model
from helpers.paths import ROOT
from helpers.timing import processor_time

import ggjit as gg
from ggjit.models import load_model
from ggjit.models.networks.peak import SHAPES, model_peak, what_if


def branchy():
    """Eight wide branches, each reduced to one number per row, then added up."""
    ctx = gg.Context()
    x = gg.from_numpy(ctx, np.random.default_rng(0).standard_normal((64, 256), dtype=np.float32), "x")
    parts = [gg.sum_rows(gg.silu(gg.scale(x, float(i + 1)))) for i in range(8)]
    y = parts[0]
    for p in parts[1:]:
        y = gg.add(y, p)
    return y


@pytest.mark.parametrize("planner", ["ggml", "ggml-2023", "best"])
def test_measured_peak_is_the_buffer_that_gets_allocated(planner):
    g = gg.Graph(branchy())
    report = gg.measure(g, planner=planner)
    ga = gg.GraphAllocator(gg.init_backend("CPU"), planner=planner)
    ga.alloc_graph(g)
    assert report.peak == ga.buffer_size(0) >= report.lower_bound > 0
    assert report.peak <= gg.measure(g, planner="ggml").peak or planner == "ggml-2023"
    assert report.planner == planner and "test_measure.py" in str(report)


@pytest.mark.parametrize("planner", ["ggml", "ggml-2023", "best"])
def test_planners_do_not_change_the_numbers(planner, monkeypatch):
    monkeypatch.setattr("ggjit.core.config.debug", {"validate", "poison"})
    y = branchy()
    want = gg.compute(y)
    assert gg.compute(y, planner=planner).tobytes() == want.tobytes()


def layers(n=4, width=64, tokens=8, cache=True):
    """n layers of one weight each with memory of its own; each writes its input into a cache."""
    ctx, static = gg.Context(), gg.Context()
    weights = [static.new_tensor(gg.F32, (width, width), f"w{i}") for i in range(n)]
    kv = [static.new_tensor(gg.F32, (width, 32), f"kv{i}") for i in range(n if cache else 0)]
    gg.alloc_ctx_tensors(static, gg.init_backend("NULL"))
    x = gg.set_input(ctx.new_tensor(gg.F32, (width, tokens), "x"))
    y, outputs = x, []
    for i, w in enumerate(weights):
        if cache:
            outputs.append(gg.cpy(y, gg.view_2d(kv[i], width, tokens, kv[i].nb[1], 0)))
        y = gg.silu(gg.mul_mat(w, y))
    return gg.Graph(*outputs, y), 4 * width * width, 4 * 32 * width


def test_what_if_the_memory_were_managed_otherwise():
    graph, weight, cache = layers()
    report = gg.measure(graph, what_if="all")
    row = {w.name: w for w in report.what_if}
    assert set(row) == {"freed", "streamed", "grown", "devices", "in_place", "work"} and report.peak == 2 * 2048
    # all weights lie there at the beginning; a streamed one comes while the cache is written, one node ahead
    assert row["freed"].before == row["streamed"].before == report.peak + 4 * weight
    assert row["freed"].nbytes == 4 * weight + 2 * 2048
    assert row["streamed"].nbytes == weight + 2 * 2048
    assert row["grown"].before == report.peak + 4 * cache and row["grown"].parts == tuple(
        cache * k for k in (1, 2, 3, 4)) and row["grown"].nbytes == report.peak + cache * 10 // 4
    assert row["devices"].before == report.peak + 4 * (weight + cache)
    assert row["devices"].nbytes == max(row["devices"].parts) <= 2 * (weight + cache) + 3 * 2048     # and the input
    assert row["in_place"].before >= row["in_place"].nbytes == report.peak
    assert row["work"].before >= row["work"].nbytes >= report.peak
    assert "what if: devices=2" in str(report) and "KiB -&gt; " in report._repr_html_()
    four, = gg.measure(graph, what_if={"devices": 4}).what_if
    assert len(four.parts) == 4 and four.nbytes == weight + cache + 2 * 2048


def test_what_if_without_weights_or_with_bad_names():
    graph, *_ = layers(1, cache=False)
    assert [w.nbytes for w in gg.measure(graph, what_if=("grown", "devices")).what_if][0] == 2 * 2048
    leaf = gg.Context().new_tensor(gg.F32, (64,))               # it lies in the arena already
    for w in gg.measure(gg.Graph(gg.neg(gg.sqr(leaf))), what_if="all").what_if:
        assert w.nbytes <= w.before
    assert gg.measure(graph, what_if=()).what_if == []
    for bad, error, match in (("stream", gg.ParamError, "did you mean streamed.*in_place"),
                              ({"devices": 0}, gg.ParamError, "devices=0: expected a whole number from 1"),
                              ({"streamed": 1.5}, gg.ParamError, "streamed=1.5"), (3, gg.TypeMismatch, "takes names")):
        with pytest.raises(error, match=match):
            gg.measure(graph, what_if=bad)


def test_memory_order_lowers_the_peak_of_branches_and_keeps_the_result():
    y = branchy()
    g = gg.Graph(*y.src, y)
    assert gg.measure(g, order="memory").peak <= gg.measure(g).peak
    given, better = gg.Graph(y), gg.Graph(y, order="memory")
    assert sorted(given.node_ids) == sorted(better.node_ids)
    assert gg.measure(better).peak <= gg.measure(given).peak
    results = []
    for graph in (given, better):
        cpu = gg.init_backend("CPU:n_threads=2")
        gg.GraphAllocator(cpu).alloc_graph(graph)
        cpu.graph_compute(graph)
        results.append(y.numpy().tobytes())
    assert results[0] == results[1]
    with pytest.raises(gg.ParamError, match="order"):
        gg.Graph(y, order="random")
    with pytest.raises(gg.ParamError, match="order"):
        gg.measure(g, order="random")
    with pytest.raises(gg.ParamError, match="planner"):
        gg.measure(g, planner="worst")
    with pytest.raises(gg.TypeMismatch, match="Graph"):
        gg.measure(3)
    assert gg.measure(y).peak == gg.measure(gg.Graph(y)).peak


def test_a_models_measured_memory_is_what_it_takes(tmp_path):
    path = tiny_model.write(tmp_path / "m.gguf", type="Q8_0")
    report = model_peak(path, n_ctx=64, n_batch=32, flash=True, planner="ggml")
    with load_model(path, n_threads=1, n_ctx=64, n_batch=32) as m:
        m.logits(list(range(32)))
        m.reset()
        m.decode(list(range(32)))
        assert report.kinds["KV cache"] == m.kv_nbytes and report.kinds["weights"] == m.weights.nbytes
        assert report.peak <= m.compute_nbytes
    report = model_peak(path, n_ctx=64, n_batch=32, n_threads=2, what_if={"work": 2})
    assert report.what_if[0].before == report.peak + report.kinds["kernel work"], "repacked where the model is"
    assert model_peak(path, n_ctx=64, n_batch=32, flash=False).peak >= report.lower_bound


GROWTH = """
import gc, mmap, sys
from ggjit.models import load_model
rss = lambda: int(open("/proc/self/statm").read().split()[1]) * mmap.PAGESIZE
m = load_model(sys.argv[1], n_threads=1, n_ctx=512)
m.decode(list(range(512)))          # code, threads and libraries are there already when it counts
m.free()
del m
gc.collect()
before = rss()
m = load_model(sys.argv[1], n_threads=1, n_ctx=512)
m.decode(list(range(512)))
print(rss() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="no /proc on this system")
def test_total_is_within_five_percent_of_the_growth_of_the_process():
    made = subprocess.run([sys.executable, "-m", "benchmarks.synth", "tinyllama-1.1b", "Q4_0"], cwd=ROOT, text=True,
                          capture_output=True, timeout=600)
    path = made.stdout.split()[-1]
    r = subprocess.run([sys.executable, "-c", GROWTH, path], text=True, capture_output=True, timeout=600)
    assert r.returncode == 0, r.stderr
    total = sum(model_peak(path, n_ctx=512, flash=True, planner="ggml").kinds.values())
    assert abs(int(r.stdout) / total - 1) <= 0.05, (int(r.stdout), total)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_measured_without_a_file(name):
    with processor_time() as spent:
        r = model_peak(name, n_ctx=2048, n_batch=512, flash=True)
    assert r.peak == r.lower_bound and 0 < r.total_seconds and spent.seconds < 10
    assert r.kinds["KV cache"] == SHAPES[name][1] * 2 * 2048 * SHAPES[name][0] // SHAPES[name][2] * SHAPES[name][3] * 2


def test_what_if_shows_what_helps():
    rows = what_if("tinyllama-1.1b", n_ctx=(2048,), n_batch=(64, 256))
    assert len(rows) == 8
    by = {(r["n_batch"], r["flash"], r["planner"]): r["peak"] for r in rows}
    assert by[256, True, "best"] < by[256, False, "best"] <= by[256, False, "ggml"]
    assert by[64, True, "best"] < by[256, True, "best"]


# ---------------------------------------------------------------- command line
def test_peak_command(tmp_path, command):
    path = tiny_model.write(tmp_path / "m.gguf")
    png, csv = tmp_path / "p.png", tmp_path / "p.csv"
    r = command("peak", path, "--n-ctx", 64, "--n-batch", 16, "--flash", "--png", png, "--csv", csv, "--json")
    got = json.loads(r.stdout)
    assert got["peak"] == got["lower_bound"] > 0 and got["planner"] == "best" and got["n_buffers"] > 5
    assert png.read_bytes().startswith(b"\x89PNG") and len(csv.read_text().splitlines()) > 5
    assert "alive at the peak" in command("peak", path, "--what-if").stdout
    assert command("peak", "llama-9b").returncode == 1


def test_plan_command(tmp_path, command):
    problem, out = tmp_path / "in.csv", tmp_path / "out.csv"
    problem.write_text("id,lower,upper,size\na,0,3,4\nb,1,4,4\nc,3,6,4\n")
    got = json.loads(command("plan", problem, "-o", out, "--json").stdout)
    assert got["peak"] == got["lower_bound"] == 8 and got["fits"] is True and got["seconds"] >= 0
    assert out.read_text().splitlines()[0].endswith("offset")
    r = command("plan", problem, "--capacity", 7, "-o", out, "--json")
    assert r.returncode == 1 and json.loads(r.stdout)["fits"] is False and len(out.read_text().splitlines()) == 4
    problem.write_text("id,lower,upper,size\na,0,3,4\nb,4,1,4\n")
    r = command("plan", problem)
    assert r.returncode == 1 and "3" in r.stderr and len(r.stderr.strip().splitlines()) == 1
    assert command("plan", tmp_path / "none.csv").returncode == 1


def test_a_report_is_made_when_it_is_looked_at_and_says_what_was_measured():
    """Lines of the program are looked up late; what happened to the tensors meanwhile does not show."""
    ctx = gg.Context()
    x = ctx.new_tensor(gg.F32, (64, 8), "x")
    graph = gg.Graph(gg.soft_max(gg.silu(gg.mul(x, x))))
    report, same = gg.measure(graph), gg.measure(graph)
    shown = [(r.name, r.op, r.where, r.offs) for r in same.rows]
    assert [s[0] for s in shown] == ["x", "mul 0", "silu 1", "soft_max 2"] and "rows" not in vars(report)
    gg.GraphAllocator(gg.init_backend("CPU")).alloc_graph(graph)        # the leaf has memory of its own now
    ctx.free()
    other = gg.Context()
    for _ in range(10):                                                 # rows of the table that were given back
        gg.add(y := other.new_tensor(gg.F32, (7,)), y)
    assert [(r.name, r.op, r.where, r.offs) for r in report.rows] == shown
    assert report.saving.peaks == {"ggml": report.ggml_peak, "best": report.peak}
    assert "silu 1" in report._repr_html_()
