"""The measuring programs: a tiny model, one round, no peers; and the arithmetic of what they report."""
import importlib
import subprocess
import sys
import time

import numpy as np
import pytest
import tiny_model
from conftest import ROOT

import ggjit as gg
from ggjit.models import load_model
from ggjit.models.gguf import GGUFFile


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """bench("synth") is benchmarks/synth.py; models are written into a fresh folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        folder = tmp_path_factory.mktemp("models")
        patch.setattr(_benchmark("synth"), "cache_dir", lambda: folder)
        yield _benchmark


def _benchmark(name):
    return importlib.import_module(f"benchmarks.{name}")


@pytest.fixture(scope="module")
def tiny(bench):
    return bench("synth").model_path("llama-tiny", "Q8_0")


def test_synthetic_models_hold_the_same_weights_in_every_type(bench):
    synth = bench("synth")
    shape = synth.SHAPES["llama-tiny"]
    files = {t: GGUFFile(synth.model_path("llama-tiny", t)) for t in synth.TYPES}
    for name, rows, columns in shape.matrices():
        exact = files["F32"].tensor_bytes(name).view(np.float32).reshape(rows, columns)
        assert exact.std() == pytest.approx(1 if name == "token_embd.weight" else columns ** -0.5, rel=0.1)
        for t, f in files.items():
            info = f.tensors[name]
            assert info.shape == (rows, columns) and info.type is getattr(gg, t)
            assert bytes(f.tensor_bytes(name)) == gg.quantize(info.type, exact).tobytes()
    with load_model(synth.model_path("llama-tiny", "F32"), n_threads=1) as m:
        logits = m.logits([1, 2, 3])
        assert logits.shape == (3, shape.n_vocab) and 0.1 < logits.std() < 100


def test_a_full_disk_is_a_reason_not_a_crash(bench, tmp_path):
    synth, path = bench("synth"), tmp_path / "large.gguf"
    with pytest.raises(bench("worker").Missing, match="GGJIT_CACHE_DIR"), synth.fresh_file(path, 1 << 60):
        raise AssertionError("not reached")
    with pytest.raises(ZeroDivisionError), synth.fresh_file(path, 1):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_our_engine_is_compared_and_the_missing_peer_is_named(bench, tiny, monkeypatch):
    compare, models = bench("compare"), bench("models")
    ours = compare.Worker
    monkeypatch.setattr(compare, "Worker", lambda name: ours(name) if name == "ours" else _missing(bench, name))
    speeds = [compare.Speed(f"tiny-{m}", f"tiny, {m}", lambda: tiny, m, 8, 1.5) for m in ("tg", "pp")]
    monkeypatch.setattr(models, "SPEEDS", speeds)
    monkeypatch.setattr(models, "COSTS", {"metadata": models.metadata("metadata", lambda: tiny, 1000)})
    said = []
    rows, lines = models.measure((), (1,), 1, say=said.append)
    assert [r.work for r in rows] == ["tiny, tg, 1 thread", "tiny, pp, 1 thread", "metadata"]
    assert all(10 < r.ours.median < 1e6 for r in rows[:2]) and rows[2].passed is True
    assert all(r.peer == "missing: no peer here" and r.passed is None for r in rows[:2])
    assert "before" in lines[0] and "missing: no peer here" in lines and len(said) == 8


def _missing(bench, name):
    raise bench("worker").Missing(f"no {name} here")


def test_a_peer_that_is_not_installed_is_missing(bench, monkeypatch):
    peer = bench("peer")
    monkeypatch.setattr(peer, "PACKAGE", "no_such_package")
    with pytest.raises(bench("worker").Missing, match="pip install no_such_package"):
        peer.Engine()
    ort = bench("ort")
    monkeypatch.setattr(ort, "onnxruntime", None)
    with pytest.raises(bench("worker").Missing, match="pip install onnxruntime"):
        ort.Engine()


def test_an_engine_that_fails_says_so_and_stays(bench, tmp_path):
    worker = bench("worker")
    with worker.Worker("ours") as w:
        assert w.about["name"] == "ggjit"
        with pytest.raises(worker.EngineError, match="BadFile"):
            w.ask("load", tmp_path / "none.gguf", n_threads=1)
        broken = tiny_model.write(tmp_path / "m.gguf", without=("output_norm.weight",))
        with pytest.raises(worker.EngineError, match="output_norm"):
            w.ask("load", broken, n_threads=1)
        assert w.ask("metadata", broken, reps=1)[0] > 0
        assert w.cpu_seconds() > 0
    with pytest.raises(worker.EngineError, match="ModuleNotFoundError"):
        worker.Worker("no_such_engine")


def test_profile_accounts_for_the_whole_plan(bench, tiny):
    profile = bench("profile")
    with load_model(tiny, n_threads=1) as m:
        for n_prompt in (0, 8):
            step, work = profile.prepare(m, n_prompt)
            work()
            nodes = profile.node_times(step.plan, 2, time.perf_counter)
            assert [n[0] for n in nodes] == step.plan.nodes and all(n[2] >= 0 for n in nodes)
            lines = list(profile.table(nodes, 1e10, 1e11))
            assert sum(int(line.split()[2]) for line in lines[1:-1]) == len(nodes) == int(lines[-1].split()[1])


def test_traffic_and_operations(bench):
    profile = bench("profile")
    ctx = gg.Context()
    with ctx:
        w, x = ctx.new_tensor(gg.Q8_0, (64, 32)), ctx.new_tensor(gg.F32, (64, 3))
        y = gg.mul_mat(w, x)
        rows = gg.get_rows(w, ctx.new_tensor(gg.I32, (5,)))
    assert profile.traffic(y) == 32 * 68 + 64 * 3 * 4 + 32 * 3 * 4
    assert profile.operations(y) == 2 * 64 * 32 * 3 and profile.operations(rows) == 0
    assert profile.traffic(rows) == 5 * 64 * 4 + 5 * 68 + 5 * 4


def test_the_table_is_markdown(bench):
    report = bench("report")
    rows = [report.Row("a | b", "1.5 x", report.Spread([3.0, 1.0, 2.0], "tok/s"), "missing: x", passed=True),
            report.Row("c", "30 ms", report.Spread([1234.5], "ms"), ratio=1.234, passed=False)]
    head, rule, *lines = report.markdown(rows).splitlines()
    assert len({line.count("|") for line in (head, rule, *lines)}) == 1
    assert lines[0] == "| a / b | 1.5 x | 2.000 tok/s (1.000 - 3.000) | missing: x | - | pass |  |"
    assert lines[1] == "| c | 30 ms | 1,234 ms | - | 1.23 | **MISS** |  |"


def test_the_command_lists_its_rows():
    r = subprocess.run([sys.executable, "-m", "benchmarks.models", "--list"], cwd=ROOT, text=True, capture_output=True,
                       timeout=60)
    assert r.returncode == 0 and {"tinyllama-q4_0-tg", "minilm-64", "startup-cold", "memory"} <= set(r.stdout.split())
