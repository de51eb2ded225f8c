"""The measuring programs: a tiny model, one round, no peers; and the arithmetic of what they report."""
import contextlib
import dataclasses
import importlib
import pickle
import subprocess
import sys
import time
import types

import numpy as np
import pytest
from helpers import tiny_model
from helpers.paths import ROOT

import ggjit as gg
from ggjit.models import load_model
from ggjit.models.files.gguf import GGUFFile
from ggjit.models.networks.load import EMBEDDED
from ggjit.ops.native import isa


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
            assert info.shape == (rows, columns) and info.type is shape.kinds(t)[name]
            assert bytes(f.tensor_bytes(name)) == gg.quantize(info.type, exact).tobytes()
    with load_model(synth.model_path("llama-tiny", "F32"), n_threads=1) as m:
        logits = m.logits([1, 2, 3])
        assert logits.shape == (3, shape.n_vocab) and 0.1 < logits.std() < 100


def test_a_full_disk_is_a_reason_not_a_crash(bench, tmp_path):
    synth, path = bench("synth"), tmp_path / "large.gguf"
    with pytest.raises(bench("worker").Missing, match="GGJIT_CACHE_DIR"), synth.fresh_file(path, 1 << 60):
        raise AssertionError("not reached")
    with pytest.raises(ZeroDivisionError, match="ours"), synth.fresh_file(path, 1):
        raise ZeroDivisionError("ours")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def run(bench, tiny, monkeypatch, tmp_path):
    """run(peers, *arguments): the comparison of a tiny model and three graphs, one round -> peers.Run"""
    peers, compare, catalogue = (bench(n) for n in ("peers", "compare", "catalogue"))
    model = [catalogue.Model(key=f"tiny-{m}", text=f"tiny, {m}", targets={"wheel": 1.0}, file=lambda: tiny, measure=m,
                             n=8) for m in ("tg", "pp")]
    graphs = [catalogue.GRAPHS[k] for k in ("op-soft_max-16x8", "op-argsort-64x64", "mul_mat-f32-384x1536-n64")]
    monkeypatch.setattr(peers, "SECTIONS", {"models": model, "graphs": graphs})
    monkeypatch.setattr(peers, "COSTS", {"metadata": bench("costs").metadata("metadata", lambda: tiny, 1000)})

    def measure(names, *arguments):
        monkeypatch.setattr(compare, "NAMES", names)
        run = peers.Run(peers.arguments(["--quick", "--rounds", "1", "--threads", "1", *arguments]), lambda line: None)
        run.measure()
        run.write(tmp_path / "peers")
        return run
    return measure


def test_the_comparison_with_numpy_alone(run, tmp_path, monkeypatch):
    """The one command, tiny: numpy is always there; the other peers are missing, and are named."""
    for name in ("GGML_LIB_DIR", "IK_LIB_DIR"):
        monkeypatch.delenv(name, raising=False)
    done = run({"wheel": ("engines.peer", str(tmp_path)), "numpy": ("engines.arrays", "numpy")})
    rows = [r for section in done.rows.values() for r in section]
    assert [r.key for r in done.rows["models"]] == ["tiny-tg", "tiny-pp"]
    assert all(10 < r.ours.median < 1e6 and r.passed is None and r.against == "-" for r in done.rows["models"])
    products = [r for r in rows if r.key.startswith("mul_mat")]
    assert [r.against for r in products] == ["numpy"] and products[0].ratio > 0.01
    assert products[0].ratio == pytest.approx(products[0].peer.median / products[0].ours.median)
    assert done.rows["costs"][0].passed is True
    about, (part,) = dict(done.engines), done.parts
    assert part.before >= 0 and part.after >= 0 and part.limits[1] > (0, 0) and about["numpy"].startswith("numpy ")
    assert about["wheel"].startswith("missing: no ggml libraries in")
    assert about["native"].startswith("missing: GGML_LIB_DIR") and about["ik"].startswith("missing: IK_LIB_DIR")
    text = (tmp_path / "peers.md").read_text()
    assert all(r.work in text for r in rows) and (tmp_path / "peers.png").stat().st_size > 10_000


def test_products_of_blocks_are_read_as_other_engines_take_them(bench, tmp_path):
    """Codes, zero point and scales give the weights; copies are the same rows, turned."""
    blocks, x = bench("engines.blocks"), np.arange(128, dtype=np.float32).reshape(2, 64)
    for type, bits in ((gg.Q4_0, 4), (gg.Q8_0, 8)):
        weights = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
        raw = gg.quantize(type, weights)
        records = [{"op": "NONE", "type": type.id, "ne": (64, 3, 1, 1)}, {"op": "NONE", "type": 0, "ne": (64, 2, 1, 1)},
                   {"op": "MUL_MAT", "src": [0, 1]}]
        (tmp_path / "graph").write_bytes(pickle.dumps((records, {0: raw.tobytes(), 1: x.tobytes()}, [2, 2])))
        first, second = blocks.products(tmp_path / "graph", "x")
        values = (first.codes.astype(np.float32) - first.zero_point) * np.repeat(first.scales.astype(np.float32), 32, 1)
        assert (values == gg.dequantize(type, raw.view(np.uint8), (3, 64))).all() and (first.x == x).all()
        assert (second.codes == np.roll(first.codes, 1, 0)).all() and first.packed().shape == (3, 64 * bits // 8)
    records[0]["type"] = 0
    (tmp_path / "graph").write_bytes(pickle.dumps((records, {}, [2])))
    with pytest.raises(bench("worker").EngineError, match="Q4_0 and Q8_0 weights only"):
        blocks.products(tmp_path / "graph", "x")


def test_the_table_of_a_processor_is_its_runs_in_one(bench, monkeypatch, tmp_path):
    """Rows of all runs by threads, what was reached against whom; no line is begun after the time has run out."""
    peers, row = bench("peers"), bench("report").Row
    made = {1: row("a", "1.00 x", "1 us", "2 us", 2.0, True, against="wheel"),
            2: row("b", "1.00 x", "1 us", "1 us", 0.5, False, against="wheel", n_threads=2)}
    seen = []
    monkeypatch.setattr(peers.Run, "measure", lambda run: (seen.append(run.args), run.rows.update(
        ops=[made[len(seen)]] if len(seen) in made else [])))
    monkeypatch.setattr(peers, "RESULTS", tmp_path)
    assert peers.main(["--table"]) == 1 and [a.isa for a in seen].count("avx2") == ("avx2" in isa.NAMES)
    name, = (p for p in tmp_path.iterdir() if p.suffix == ".md")
    text = name.read_text()
    assert name.stem == f"peers-{bench('machine').slug()}" and text.index("## 1 thread") < text.index("## 2 threads")
    assert "| wheel | 1 of 1 | 2.00 |" in text and "| wheel | 0 of 1 | 0.50 |" in text
    late = peers.Run(peers.arguments(["--table"]), lambda line: None, end=time.monotonic())
    assert late.late("a line") and late.stopped and late.lines == ["the time ran out before: a line"]


def test_a_run_that_was_stopped_replaces_no_results(bench, monkeypatch, tmp_path, capsys):
    peers = bench("peers")
    row = bench("report").Row("work", "1.00 x", "1 us", "2 us", 2.0, True, against="wheel")

    def stop(run, rows=None):
        run.rows.update(rows or {})
        raise KeyboardInterrupt
    monkeypatch.setattr(peers, "RESULTS", tmp_path)
    for rows, given, written in (({"ops": [row]}, [], []), (None, ["--out", str(tmp_path / "x")], []),
                                 ({"ops": [row]}, ["--out", str(tmp_path / "x")], ["x.md", "x.png"])):
        monkeypatch.setattr(peers.Run, "_measure", lambda run, rows=rows: stop(run, rows))
        assert peers.main(given) == 130
        assert sorted(p.name for p in tmp_path.iterdir()) == written
    assert "1 of 1 targets reached, stopped before the end." in (tmp_path / "x.md").read_text()


def test_a_peer_that_dies_is_missing_from_then_on(bench, monkeypatch):
    monkeypatch.setattr(bench("compare"), "NAMES", {"numpy": ("engines.arrays", "numpy")})
    run = bench("peers").Run(bench("peers").arguments(["--quick", "--rounds", "1"]), lambda line: None)
    work = bench("catalogue").GRAPHS["mul_mat-f32-384x1536-n64"]
    with bench("compare").Engines(1, only=["numpy"]) as engines:
        engines.workers["numpy"]._process.kill()
        first, second = run._rows(engines, work)
        assert (first.against, first.peer, first.passed) == ("numpy", "its process ended with status -9", None)
        assert (second.against, second.ratio) == ("-", None) and second.ours.median > 0
        assert set(engines.workers) == {"ours"} and [r.against for r in run._rows(engines, work)] == ["-"]


@pytest.mark.peer
def test_the_comparison_with_the_real_ggml(run, need):
    need("xllamacpp", "llama.cpp is the peer")
    done = run({"wheel": ("engines.peer",)}, "--peers", "wheel")
    rows = [r for section in ("models", "graphs") for r in done.rows[section] if r.key != "mul_mat-f32-384x1536-n64"]
    assert [r.against for r in rows] == ["wheel"] * 4 and all(r.passed is (r.ratio >= 1.0) for r in rows)


@pytest.mark.peer
def test_a_folder_with_ggml_is_a_native_peer(bench, need, monkeypatch):
    need("pywhispercpp", "it brings ggml as libraries in a folder")
    from ggjit.tools.suite.ggml import libraries
    folder = libraries("pywhispercpp")[-1].rpartition("/")[0]
    monkeypatch.setenv("GGML_LIB_DIR", folder)
    monkeypatch.setattr(bench("compare"), "NAMES", {})
    with bench("compare").Engines(1) as engines:
        name, = set(engines.workers) & {"native", "llamafile"}
        work = dataclasses.replace(bench("catalogue").GRAPHS["op-rms_norm-64x4"], targets={name: 1e-6})
        row, = bench("compare").compare(engines, work, 1, 0.01)
        assert row.against == name and row.passed is True
        with pytest.raises(bench("worker").Missing, match="no libllama"):
            engines.workers[name].ask("load", "x.gguf", n_threads=1)


def test_a_wrong_result_is_no_row(bench):
    """A peer that computes something else is not a peer."""
    compare, work = bench("compare"), bench("catalogue").GRAPHS["op-soft_max-16x8"]
    with compare.Engines(1, only=()) as engines:
        engines.workers["wheel"] = wrong = Wrong()
        with pytest.raises(bench("worker").EngineError, match="wheel's result differs from ours by NMSE 0.8"):
            list(compare.compare(engines, work, 1, 0.01))
        assert wrong.asked == ["unload", "load_graph", "run_graph", "graph_result"]


def test_engines_of_one_thread_take_turns_on_the_same_core(bench, monkeypatch):
    compare, seen = bench("compare"), []
    monkeypatch.setattr(compare.machine, "cores", lambda: [3, 5])
    workers = {"ours": Wrong(), "wheel": Wrong()}
    engines = types.SimpleNamespace(workers=workers, n_threads=1, cpu_seconds=lambda but=None: 0)
    compare.Turns(engines, list(workers), lambda w, r: seen.append((r, w.asked[-1])) or 1.0).take(3)
    assert seen == [(0, {3}), (0, {3}), (1, {5}), (1, {5}), (2, {3}), (2, {3})]


class Wrong:
    """An engine whose softmax is one."""

    def __init__(self):
        self.asked = []

    def ask(self, method, *args, **kw):
        self.asked.append(method)
        if method == "graph_result":
            np.full(16 * 8, 1.0, np.float32).tofile(args[0])

    def run_on(self, cores):
        self.asked.append(cores)

    def cpu_seconds(self):
        return 0.0

    def close(self):
        pass


def test_near_the_bandwidth_97_percent_pass_after_seven_rounds(bench):
    compare = bench("compare")
    engines = types.SimpleNamespace(workers={"ours": Wrong(), "wheel": Wrong()}, n_threads=1, cpu_seconds=lambda but: 0)
    times = {id(engines.workers["ours"]): 1.02, id(engines.workers["wheel"]): 1.0}
    work = bench("work").Work(key="k", text="t", targets={"wheel": 1.3})

    def judged(share, rounds=3):
        turns = compare.Turns(engines, ["ours", "wheel"], lambda w, r: times[id(w)]).take(rounds)
        row, = compare.rows(engines, work, turns, lambda s: s, "s", lambda s: share / s)
        return turns.rounds, row.passed, row.target
    assert judged(0.95) == (7, True, "0.97 x")
    assert judged(0.91) == (7, False, "1.30 x")         # ours moves 89 % only
    assert judged(0.5) == (3, False, "1.30 x")
    assert judged(0.95, rounds=2) == (2, True, "0.97 x")            # a run that has no time for more


def test_a_peer_that_is_not_installed_is_missing(bench, monkeypatch):
    peer = bench("engines.peer")
    monkeypatch.setattr(peer, "PACKAGE", "no_such_package")
    with pytest.raises(bench("worker").Missing, match="pip install no_such_package"):
        peer.Engine()
    ort = bench("engines.ort")
    monkeypatch.setattr(ort, "onnxruntime", None)
    with pytest.raises(bench("worker").Missing, match="pip install onnxruntime"):
        ort.Engine()


def test_an_engine_that_fails_says_so_and_stays(bench, tmp_path):
    worker = bench("worker")
    with worker.Worker("engines.ours") as w:
        assert w.about["name"] == "ggjit"
        with pytest.raises(worker.EngineError, match="BadFile"):
            w.ask("load", tmp_path / "none.gguf", n_threads=1)
        broken = tiny_model.write(tmp_path / "m.gguf", without=("output_norm.weight",))
        with pytest.raises(worker.EngineError, match="output_norm"):
            w.ask("load", broken, n_threads=1)
        assert w.ask("metadata", broken, reps=1)[0] > 0
        assert w.cpu_seconds() > 0
    with pytest.raises(worker.EngineError, match="ModuleNotFoundError"):
        worker.Worker("engines.no_such_engine")


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


def test_what_looking_inside_costs(bench, tiny):
    rows = bench("inside").measure(tiny, 1)
    assert [what for what, *_ in rows] == ["never looked into", "nothing captured"] + 3 * ["captured"]
    (_, none, _, _), _, (_, one, nbytes, _), *_, (_, most, all_nbytes, _) = rows
    assert (none, one) == (0, 1) and most > 4 and 0 < nbytes < all_nbytes
    assert all(0 < seconds < float("inf") for *_, seconds in rows)


def test_traffic_and_operations(bench):
    profile = bench("profile")
    ctx = gg.Context()
    with ctx:
        w, x = ctx.new_tensor(gg.Q8_0, (64, 32)), ctx.new_tensor(gg.F32, (64, 3))
        y = gg.mul_mat(w, x)
        rows = gg.get_rows(w, ctx.new_tensor(gg.I32, (5,)))
    assert profile.moved_nbytes(y) == 32 * 68 + 64 * 3 * 4 + 32 * 3 * 4
    assert profile.flops(y) == 2 * 64 * 32 * 3 and profile.flops(rows) == 0
    assert profile.moved_nbytes(rows) == 5 * 64 * 4 + 5 * 68 + 5 * 4


def test_the_table_is_markdown(bench):
    report = bench("report")
    rows = [report.Row("a | b", "1.5 x", report.Spread([3.0, 1.0, 2.0], "tok/s"), "missing: x", passed=True),
            report.Row("c", "30 ms", report.Spread([1234.5], "ms"), ratio=1.234, passed=False, n_threads=2,
                       against="wheel")]
    head, rule, *lines = report.markdown(rows).splitlines()
    assert len({line.count("|") for line in (head, rule, *lines)}) == 1
    assert lines[0] == "| a / b | 1 | - | 1.5 x | 2.000 tok/s (1.000 - 3.000) | missing: x | - | pass |  |"
    assert lines[1] == "| c | 2 | wheel | 30 ms | 1,234 ms | - | 1.23 | **MISS** |  |"


def test_q4_k_m_mixes_types_as_llama_cpp_does(bench):
    shapes = bench("synth").SHAPES
    kinds = shapes["tinyllama-1.1b"].kinds("Q4_K_M")
    assert kinds["output.weight"] is gg.Q6_K and kinds["token_embd.weight"] is gg.Q4_K
    better = [i for i in range(22) if kinds[f"blk.{i}.ffn_down.weight"] is gg.Q6_K]
    assert better == [0, 1, 4, 7, 10, 13, 16, 19, 20, 21]
    kinds = shapes["smollm-135m"].kinds("Q4_K_M")           # rows of 576: no multiple of 256
    assert kinds["blk.9.attn_q.weight"] is gg.Q5_0 and kinds["token_embd.weight"] is gg.Q8_0
    assert kinds["blk.5.ffn_down.weight"] in (gg.Q4_K, gg.Q6_K)


def test_a_cliff_is_a_loss_of_throughput(bench):
    growth = bench("growth")
    assert growth.cliffs(growth.Curve("x", {1: 10.0, 2: 20.0, 3: 18.9, 4: 18.0})) == [(2, 3, pytest.approx(0.945))]
    assert growth.Curve("x", {1: 5.0, 10: 1.0, 1000: 10.0}).exponent == pytest.approx(0.5)


def test_growth_is_measured_and_shown(bench, tmp_path, monkeypatch):
    growth = bench("growth")
    curve = growth.Curve("a", {1: 0.1, 2: 0.2})
    monkeypatch.setitem(growth.PARTS, "batch", (lambda n_threads: [curve], "n", "ms", 1e3))
    growth.main(["--only", "batch", "--out", str(tmp_path / "growth")])
    assert "| a, ms | 100.0 | 200.0 | 1.00 |" in (tmp_path / "growth.md").read_text()
    assert (tmp_path / "growth.png").stat().st_size > 5_000


def test_fusion_patterns_are_compared_with_the_plan_without_any(bench, tiny):
    fusion = bench("fusion")
    lines = list(fusion.measure(fusion.Net("tiny", lambda: tiny, (1, 256, 1)), 1, 0.02))
    kernels = {pattern: n for _, _, pattern, n, *_ in lines}
    assert {"none", "all", "mul_mat+mul_mat+glu", "rms_norm+mul"} < kernels.keys()
    assert kernels["none"] - kernels["mul_mat+mul_mat+glu"] == 2 * 2 and min(kernels.values()) < kernels["all"]
    assert lines[0][4:] == (1.0, 1.0) and all(0.01 < r < 100 for line in lines for r in line[4:])


def test_all_cores_are_compared_with_one_and_with_two_processes(bench, tmp_path, monkeypatch, capsys):
    """Speeds are invented; the program beside is a script that answers as llama-bench does."""
    cores, pinned = bench("cores"), []

    class IkWorker:
        closed = []

        def __init__(self, engine, folder, OMP_NUM_THREADS):
            assert (engine, folder) == ("engines.ik", "some folder")
            self.n_threads = int(OMP_NUM_THREADS)

        def ask(self, method, *args, **kw):
            assert method != "load" or kw["n_threads"] == self.n_threads
            return 1 / self.n_threads

        def close(self):
            self.closed.append(self.n_threads)

    class Ours(contextlib.nullcontext):
        def __enter__(self):
            return self

        def load(self, network, path):
            assert network.name in path
            return 1e6

        def settle(self, name):
            assert name in ("one", "two")

        def pin(self, pinned_=True):
            pinned.append(pinned_)

        def speed(self, name, work):
            return {"one": 100.0, "pair": 200.0, "two": 180.0}[name]
    program = tmp_path / "llama-bench"
    program.write_text(f"#!{sys.executable}\n" + "import json, sys\n"
                       "said = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
                       "sizes = [(int(p), 0) for p in said['-p'].split(',')] + [(0, int(n)) for n in [said['-n']]]\n"
                       "print(json.dumps([dict(n_prompt=p, n_gen=g, avg_ts=50.0 * int(said['-t']) + int(said['-embd']))"
                       " for p, g in sizes if p or g]))\n")
    program.chmod(0o755)
    monkeypatch.setattr(cores, "Ours", Ours)
    monkeypatch.setattr(cores, "read_bandwidth", lambda n_threads: 1e9 * n_threads)
    monkeypatch.setattr(cores, "Reader", lambda n_threads: contextlib.nullcontext(
        types.SimpleNamespace(once=lambda: 1e9 * n_threads)))
    monkeypatch.setattr(cores, "NETWORKS", (cores.Network("tiny", lambda: "tiny.gguf"),
                                            cores.Network("text", lambda: "text.gguf", cores.ENCODER)))
    monkeypatch.setattr(cores, "Worker", IkWorker)
    monkeypatch.setenv("IK_LIB_DIR", "some folder")
    cores.main(["--llama-bench", str(program), "--rounds", "1"])
    said = capsys.readouterr().out
    assert "| tiny, decode | 100 | 180 | 200 | 0.90 | 2 - 2 | 50 | 100 | 2.00 | 1.80 | 64 | 128 | 1.56 | 1.41 |" in said
    assert said.count("| tiny, prompt") == 4 and "| tiny, decode, 2 | 100 | 180 | 1.80 |" in said
    assert "| text, text of 128 | 100 | 180 | 200 | 0.90 | 2 - 2 | 51 | 101 | 1.96 | 1.78 |  |  |  |  |" in said
    assert "| tiny | 1 | 0.10 | 1.00 | 0.10 | 0.18 | 2.00 | 0.09 |" in said and "| text | " not in said
    assert pinned == [True, False, True] * 2 and IkWorker.closed == [1, 2]


def test_a_copied_model_is_another_file(bench, tmp_path, monkeypatch):
    monkeypatch.setenv("GGJIT_CACHE_DIR", str(tmp_path))
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    with bench("cores").copied(path) as copy:
        assert copy.read_bytes() == b"weights" and not copy.samefile(path)
    assert list(tmp_path.iterdir()) == [path]


def test_tiles_with_other_bytes_are_marked(bench):
    tuning = bench("tuning")
    line = tuning.row(gg.Q4_0, 64, {"1": 3e-6, "1 no prefetch": 4e-6, "2": 2e-6, "4": 1e-6}, ["4"])
    assert tuning.NAMES[:7] == ("1", "1 ahead", "1 far", "1 near", "1 no prefetch", "2", "4")
    more = " - |" * len(tuning.NAMES[7:])           # no eight rows for blocks; far is Q4_0's own; layouts
    assert line == f"| Q4_0 | 64 | 3 | - | - | - | 4 | 2 | 1 (other bytes) |{more} 2 | 1.500 |"


def test_the_readme_names_every_program_and_section(bench):
    main = bench("__main__")
    text, programs = (ROOT / "benchmarks" / "README.md").read_text("utf-8"), main.programs()
    assert text == main.readme(), "python -m benchmarks > benchmarks/README.md"
    assert {"peers", "overheads", "sched_bench"} < programs.keys() and all(len(said) > 15 for said in programs.values())


def test_the_command_lists_its_rows(bench):
    r = subprocess.run([sys.executable, "-m", "benchmarks.peers", "--list"], cwd=ROOT, text=True, capture_output=True,
                       timeout=300)
    keys = [key for of_section in bench("__main__").works().values() for key in of_section]
    assert r.stdout.split() == keys and len(set(keys)) == len(keys)
    assert r.returncode == 0 and {"tinyllama-q4_0-tg", "minilm-64", "startup-cold", "memory", "mul_mat-mxfp4-n512",
                                  "nodes-10000"} <= set(r.stdout.split())


@pytest.mark.parametrize("fields, name, slug", [
    ({"vendor_id": "GenuineIntel", "cpu family": "6", "model": "207"}, "Xeon", "genuineintel-6-207"),
    ({"CPU implementer": "0x41", "CPU part": "0xd0c", "CPU variant": "0x3"}, "", "aarch64-0x41-0xd0c-0x3"),
    ({}, "Apple M1", "aarch64-apple-m1")])
def test_every_processor_has_a_table_of_its_own(bench, fields, name, slug):
    assert bench("machine")._slug(fields, "aarch64", name) == slug


def test_servers_are_asked_in_turns(bench, monkeypatch, capsys):
    """Two servers of the same kind, so that the table has a peer."""
    for extra in ("uvicorn", "starlette"):
        pytest.importorskip(extra)
    serve = bench("serve")
    monkeypatch.setattr(serve, "N_TOKENS", 8)
    monkeypatch.setattr(serve, "llama_server", lambda program: serve.ours)
    serve.main([str(EMBEDDED), "--clients", "1,3", "--rounds", "1", "--llama-server", "another"])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line[2:3].isdigit()]
    assert [row[:2] for row in rows] == [[f"| {n}", name] for n in (1, 3) for name in ("ggjit", "llama-server")]
    assert all(float(row[2].replace(",", "")) > 0 for row in rows)
    assert rows[0][4] == "- |" and float(rows[1][4][:-2]) > 0
