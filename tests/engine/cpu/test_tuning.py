"""Measured decode tiles: every candidate gives the same bytes, choices are kept per machine, bad files do no harm."""
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from helpers.commands import START

import ggjit as gg
from ggjit.cpu import tuning
from ggjit.ops.core.traits import traits_of
from ggjit.ops.matmul import tile_rows
from ggjit.ops.matmul.mul_mat import CACHED_NBYTES
from ggjit.ops.matmul.tile_rows import ROWS, Choice, candidates

TYPES = (gg.F32, gg.F16, gg.BF16, gg.Q4_0, gg.Q4_K)
CPU = gg.init_backend("CPU", n_threads=2)


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, request):
    """No choices of the machine's, and none left behind.  Tests that keep some ask for the fixture `folder`."""
    monkeypatch.setattr(tile_rows, "SETTING", "")
    tile_rows.kept.cache_clear()
    if "folder" not in request.fixturenames:
        monkeypatch.setattr(tile_rows, "kept", lambda type: None)
    yield


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(tile_rows, "cache_dir", lambda: tmp_path)
    yield tmp_path / "kernels"
    tile_rows.kept.cache_clear()


def plan_of(y):
    graph = gg.Graph(y)
    gg.GraphAllocator(CPU).alloc_graph(graph)
    return CPU.graph_plan_create(graph)


def product(ctx, type, k, m, seed):
    rng = np.random.default_rng(seed)
    a = gg.from_numpy(ctx, rng.standard_normal((m, k)).astype(np.float32), type=type)
    return gg.mul_mat(a, gg.from_numpy(ctx, rng.standard_normal((1, k)).astype(np.float32)))


@pytest.mark.parametrize("type", TYPES, ids=repr)
@pytest.mark.parametrize("k,m", [(1, 1), (7, 3), (33, 6), (256, 1), (512, 9), (1280, 39), (50, 700)])
def test_every_tile_gives_the_same_bytes(type, k, m):
    k = -(-k // type.block) * type.block
    ctx, got = gg.Context(), {}
    y = product(ctx, type, k, m, seed=k + m)
    a_nbytes = y.src[0].nbytes
    for n in candidates(type):
        with tile_rows.forced(n):
            plan = plan_of(y)
        small = type is gg.F32 and k >= 64 and a_nbytes <= CACHED_NBYTES        # a tile of its own
        assert ("-4x1x1" if small else f"-{n}x1x{4 if type.quantized else 2}") in plan.dump()
        plan.compute()
        got[n] = plan.numpy(y)
    assert len({v.tobytes() for v in got.values()}) == 1
    a, b = (t.numpy().astype(np.float64) for t in y.src)
    rounded = traits_of(type).np_round_activations or (lambda x: x)
    want = rounded(b.astype(np.float32)).astype(np.float64) @ a.T
    assert np.square(got[1] - want).sum() <= 1e-10 * np.square(want).sum()


def test_experts_follow_the_choice():
    """mul_mat_id's tile of one column is the same one."""
    rng, ctx, got = np.random.default_rng(3), gg.Context(), set()
    experts = gg.from_numpy(ctx, rng.standard_normal((4, 13, 96)).astype(np.float32), type=gg.Q4_0)
    x = gg.from_numpy(ctx, rng.standard_normal((1, 2, 96)).astype(np.float32))
    y = gg.mul_mat_id(experts, x, gg.from_numpy(ctx, np.array([[2, 0]], np.int32)))
    for n in candidates(gg.Q4_0):
        with tile_rows.forced(n):
            plan = plan_of(y)
        assert f"{n}x1x4" in plan.kernels[0].name
        plan.compute()
        got.add(plan.numpy(y).tobytes())
    assert len(got) == 1


def test_untuned_machines_follow_the_rule(folder):
    assert tile_rows.kept(gg.Q4_0) is None and tile_rows.rows(gg.Q4_0) == 1 and tuning.all_kept() == {}


@pytest.mark.parametrize("processor,rows", [("znver4", 1), ("sapphirerapids", candidates(gg.F16)[-1])])
def test_the_rule_for_floats_depends_on_the_processor(folder, monkeypatch, processor, rows):
    monkeypatch.setattr(tile_rows, "ONE_STREAM", processor.startswith("znver"))
    assert [tile_rows.rows(t) for t in (gg.F32, gg.F16, gg.BF16, gg.Q8_0)] == [rows, rows, rows, 1]
    with tile_rows.forced(8):                       # as many as the type's tiles have
        assert tile_rows.rows(gg.Q8_0) == 4 and tile_rows.rows(gg.F16) == candidates(gg.F16)[-1]


def test_other_widths_are_not_touched():
    ctx = gg.Context()
    x = gg.from_numpy(ctx, np.zeros((3, 256), np.float32))
    y = gg.mul_mat(gg.from_numpy(ctx, np.zeros((8, 256), np.float32), type=gg.Q4_0), x)
    names = set()
    for n in ROWS:
        with tile_rows.forced(n):
            names.add(plan_of(y).kernels[0].name)
    assert len(names) == 1


def test_a_choice_is_kept_and_followed(folder):
    assert tile_rows.keep(gg.Q4_0, Choice(4, {1: 2e-3, 2: 1.8e-3, 4: 1.6e-3}))
    assert tile_rows.rows(gg.Q4_0) == 4 and tile_rows.rows(gg.Q8_0) == 1
    assert "4x1x4" in plan_of(product(gg.Context(), gg.Q4_0, 64, 8, 0)).dump()
    assert tuning.all_kept()[gg.Q4_0].gain == pytest.approx(1.25)
    assert [p.suffix for p in folder.iterdir()] == [".json"]                    # nothing temporary stays
    with tile_rows.forced(2):
        assert tile_rows.rows(gg.Q4_0) == 2


@pytest.mark.parametrize("text", [
    "", "{", "null", "[]", "[" * 100_000, '{"rows": 4}', '{"rows": 3, "seconds": {"1": 1, "3": 1}}',
    '{"rows": 4, "seconds": {"1": 1}}', '{"rows": "x", "seconds": {"1": 1}}', '{"rows": 4, "seconds": {"4": 1}}',
    '{"rows": 4, "seconds": {"1": NaN, "4": NaN}}', '{"rows": Infinity, "seconds": {"1": 1}}',
    '{"rows": 1, "seconds": {"1": 0}}', b"\xff\xfe\x00"], ids=range(14))
def test_a_damaged_file_counts_as_absent(folder, text):
    tile_rows.keep(gg.Q4_0, Choice(4, {1: 2.0, 4: 1.0}))
    path = next(folder.iterdir())
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    tile_rows.kept.cache_clear()
    assert tile_rows.kept(gg.Q4_0) is None and tile_rows.rows(gg.Q4_0) == 1
    assert tile_rows.keep(gg.Q4_0, Choice(2, {1: 2.0, 2: 1.0})) and tile_rows.rows(gg.Q4_0) == 2


def test_a_place_that_cannot_be_written_changes_nothing(folder):
    folder.write_text("a file, where the folder should be")
    assert not tile_rows.keep(gg.Q4_0, Choice(4, {1: 2.0, 4: 1.0}))
    assert tile_rows.rows(gg.Q4_0) == 1 and tuning.all_kept() == {}


def test_measuring_chooses_the_fastest_with_the_rules_bytes(folder):
    small = {"lengths": (256, 64), "nbytes": 1 << 16, "rounds": 2}
    seconds, others = tuning.measure(gg.Q4_0, **small)
    assert set(seconds) == {1, 2, 4} and min(seconds.values()) > 0 and others == []
    clock = iter(np.cumsum([0, 4, 0, 3, 0, 1] * 2).tolist())                    # the third tile takes a second
    assert tuning.choose(gg.Q4_0, **small, now=lambda: next(clock)) == Choice(4, {1: 4, 2: 3, 4: 1})
    clock = iter(np.cumsum([0, 1.01, 0, 1.01, 0, 1.0] * 2).tolist())            # a gain below LEAST_GAIN
    assert tuning.choose(gg.Q4_0, **small, now=lambda: next(clock)).rows == 1


@pytest.mark.parametrize("seconds,others,rows", [
    ({1: 2.0, 2: 2.0, 4: 1.0, 8: 1.01}, [], 8), ({1: 2.0, 2: 2.0, 4: 1.0, 8: 1.03}, [], 4),
    ({1: 1.0, 2: 1.0, 4: 1.1, 8: 0.9}, [8], 1)], ids=["near", "slower", "other bytes"])
def test_the_rules_rows_stay_unless_others_are_faster(monkeypatch, seconds, others, rows):
    monkeypatch.setattr(tuning, "measure", lambda type: (seconds, others))
    monkeypatch.setattr(tile_rows, "rule", lambda type: 8)
    assert tuning.choose(gg.F32).rows == rows


def test_tiles_with_other_bytes_cannot_be_chosen(folder, monkeypatch):
    monkeypatch.setattr(tuning, "measure", lambda type: ({1: 3.0, 2: 2.0, 4: 1.0}, [4]))
    assert tuning.tune([gg.Q4_0, gg.I32]) == {gg.Q4_0: Choice(2, {1: 3.0, 2: 2.0})}
    assert tile_rows.rows(gg.Q4_0) == 2
    assert tuning.tune([gg.Q4_0]) == {} and list(tuning.tune([gg.Q4_0], again=True)) == [gg.Q4_0]


@pytest.mark.parametrize("setting,rows", [("off", 1), (2, 2), (4, 4)])
def test_the_variable_decides_alone(folder, monkeypatch, setting, rows):
    tile_rows.keep(gg.Q8_0, Choice(2, {1: 2.0, 2: 1.0}))
    monkeypatch.setattr(tile_rows, "SETTING", setting)
    assert tile_rows.rows(gg.Q8_0) == rows and tuning.all_kept() == {} and tuning.tune([gg.Q4_0]) == {}


def test_an_unusable_value_is_a_one_line_error():
    r = subprocess.run([sys.executable, START, "info"], text=True, capture_output=True, timeout=300,
                       env={**os.environ, "GGJIT_TUNE": "3"})
    assert r.returncode == 2 and r.stdout == "" and len(r.stderr.strip().splitlines()) == 1
    assert "GGJIT_TUNE='3'" in r.stderr and "off" in r.stderr


def test_info_shows_what_was_measured(folder, python):
    tile_rows.keep(gg.Q4_0, Choice(4, {1: 2.0, 4: 1.6}))
    code = ("import pathlib, sys\nfrom ggjit.ops.matmul import tile_rows\ntile_rows.cache_dir = "
            "lambda: pathlib.Path(sys.argv[1])\n"
            "from ggjit.tools.command.main import main\nmain(['info', '--json'])")
    r = python(code, folder.parent)
    assert r.returncode == 0, r.stderr
    assert json.loads(r.stdout)["tiles"] == {"q4_0": {"rows": 4, "gain": 1.25}}
