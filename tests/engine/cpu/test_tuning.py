"""Measured decode tiles: every candidate gives the same bytes, choices are kept per machine, bad files do no harm."""
import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from helpers.processes import START
from helpers.sample import sampled

import ggjit as gg
from ggjit.cpu import sharing, tuning
from ggjit.ops.core.settings import TILE_ROWS
from ggjit.ops.core.traits import traits_of
from ggjit.ops.matmul import choices
from ggjit.ops.matmul.choices import AHEAD, NEAR, ONE_ROW, PLAIN, Choice, RowTile, candidates
from ggjit.ops.matmul.mul_mat import CACHED_NBYTES
from ggjit.ops.matmul.repack import layouts as repack
from ggjit.ops.native import isa, measured
from ggjit.ops.types.shared.dot import NO_PREFETCH, OWN
from ggjit.tools.command.main import main

TYPES = (gg.F32, gg.F16, gg.BF16, gg.Q4_0, gg.Q4_K)
CPU = gg.init_backend("CPU", n_threads=2)


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, request):
    """No choices of the machine's, and none left behind.  Tests that keep some ask for the fixture `folder`."""
    monkeypatch.setattr(choices, "SETTING", "")
    choices.kept.cache_clear()
    choices.kept_amx.cache_clear()
    if "folder" not in request.fixturenames:
        monkeypatch.setattr(choices, "kept", lambda type: None)
    yield


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(measured, "cache_dir", lambda: tmp_path)
    yield tmp_path / "kernels"
    choices.kept.cache_clear()
    choices.kept_amx.cache_clear()


def plan_of(y):
    graph = gg.Graph(y)
    gg.GraphAllocator(CPU).alloc_graph(graph)
    return CPU.graph_plan_create(graph)


def product(ctx, type, k, m, seed):
    rng = np.random.default_rng(seed)
    a = gg.from_numpy(ctx, rng.standard_normal((m, k)).astype(np.float32), type=type)
    return gg.mul_mat(a, gg.from_numpy(ctx, rng.standard_normal((1, k)).astype(np.float32)))


# whole floats, halves, blocks: those of a kind have the same tiles
@pytest.mark.parametrize("type", sampled([(type,) for type in TYPES],
                                         lambda case: [(case[0].quantized, case[0] is gg.F32)]))
@pytest.mark.parametrize("k,m", [(1, 1), (7, 3), (33, 6), (256, 1), (512, 9), (1280, 39), (50, 700)])
def test_every_tile_gives_the_same_bytes(type, k, m):
    k = -(-k // type.block) * type.block
    ctx, got = gg.Context(), {}
    y = product(ctx, type, k, m, seed=k + m)
    a_nbytes = y.src[0].nbytes
    for n in candidates(type):
        with choices.forced(n):
            plan = plan_of(y)
        small = type is gg.F32 and k >= 64 and a_nbytes <= CACHED_NBYTES        # a tile of its own
        assert ("-4x1x1" if small else f"-{n.rows}x1x{4 if type.quantized else 2}") in plan.dump()
        assert ("-no_prefetch" in plan.dump()) == (not small and n.prefetch == NO_PREFETCH)
        plan.compute()
        got[n] = plan.numpy(y)
    assert len({v.tobytes() for v in got.values()}) == 1
    a, b = (t.numpy().astype(np.float64) for t in y.src)
    rounded = traits_of(type).np_round_activations or (lambda x: x)
    want = rounded(b.astype(np.float32)).astype(np.float64) @ a.T
    assert np.square(got[ONE_ROW] - want).sum() <= 1e-10 * np.square(want).sum()


def test_experts_follow_the_choice():
    """mul_mat_id's tile of one column is the same one."""
    rng, ctx, got = np.random.default_rng(3), gg.Context(), set()
    experts = gg.from_numpy(ctx, rng.standard_normal((4, 13, 96)).astype(np.float32), type=gg.Q4_0)
    x = gg.from_numpy(ctx, rng.standard_normal((1, 2, 96)).astype(np.float32))
    y = gg.mul_mat_id(experts, x, gg.from_numpy(ctx, np.array([[2, 0]], np.int32)))
    for n in candidates(gg.Q4_0):
        with choices.forced(n):
            plan = plan_of(y)
        assert f"{n.rows}x1x4" in plan.kernels[0].name and ("no_prefetch" in plan.kernels[0].name) == (
            n.prefetch == NO_PREFETCH)
        plan.compute()
        got.add(plan.numpy(y).tobytes())
    assert len(got) == 1


def test_untuned_machines_follow_the_rule(folder):
    assert choices.kept(gg.Q4_0) is None and choices.tile(gg.Q4_0) == choices.rule(gg.Q4_0) and tuning.all_kept() == {}


@pytest.mark.parametrize("processor,blocks,halves,floats,repacked", [
    ("znver5", ONE_ROW, AHEAD, PLAIN, True), ("znver4", PLAIN, PLAIN, ONE_ROW, True),
    ("sapphirerapids", ONE_ROW, candidates(gg.F16)[-1], candidates(gg.F32)[-1], False)],
    ids=["znver5", "znver4", "sapphirerapids"])
def test_rules_differ_between_processors(folder, monkeypatch, processor, blocks, halves, floats, repacked):
    monkeypatch.setattr(choices, "RULE", choices._rule_of(processor))
    types = gg.Q8_0, gg.Q4_0, gg.F16, gg.F32
    assert [choices.tile(t) for t in types] == [blocks, blocks, halves, floats]
    layouts = (NEAR, NEAR) if processor == "znver5" else (RowTile(4), ONE_ROW)
    assert [choices.layout_tile(t) for t in (gg.Q4_0, gg.Q6_K)] == list(layouts) or gg.Q4_0 not in repack.LAYOUTS
    assert choices.layout_tile(gg.F32) == ONE_ROW
    assert choices.pays_repacked(gg.Q4_0) == (gg.Q4_0 in repack.LAYOUTS)
    assert choices.pays_repacked(gg.Q6_K) == (repacked and gg.Q6_K in repack.LAYOUTS)
    with choices.forced(8):                         # as many as the type's tiles have
        assert choices.tile(gg.Q8_0) == RowTile(4) and choices.tile(gg.F16) == candidates(gg.F16)[-1]


def test_other_widths_are_not_touched():
    ctx = gg.Context()
    x = gg.from_numpy(ctx, np.zeros((3, 256), np.float32))
    y = gg.mul_mat(gg.from_numpy(ctx, np.zeros((8, 256), np.float32), type=gg.Q4_0), x)
    names = set()
    for n in (*TILE_ROWS, PLAIN):
        with choices.forced(n):
            names.add(plan_of(y).kernels[0].name)
    assert len(names) == 1


def chosen(tile, layout=None, **seconds):
    """A Choice; seconds: one=, plain=, two=, four=, repacked= (four groups), near= (one group)."""
    names = {"one": "1", "plain": "1 no prefetch", "two": "2", "four": "4", "repacked": "repacked 4",
             "near": "repacked 1 near"}
    return Choice(tile, layout, {names[n]: s for n, s in seconds.items()})


def test_a_choice_is_kept_and_followed(folder):
    assert choices.keep(gg.Q4_0, chosen(RowTile(4), RowTile(4), one=2e-3, two=1.8e-3, four=1.6e-3, repacked=0.8e-3))
    assert choices.tile(gg.Q4_0) == RowTile(4) and choices.pays_repacked(gg.Q4_0)
    assert choices.tile(gg.Q8_0) == choices.rule(gg.Q8_0)
    assert "4x1x4" in plan_of(product(gg.Context(), gg.Q4_0, 64, 8, 0)).dump()
    found = tuning.all_kept()[gg.Q4_0]
    assert (found.gain, found.layout_gain) == (pytest.approx(1.25), pytest.approx(2))
    assert [p.suffix for p in folder.iterdir()] == [".json"]                    # nothing temporary stays
    with choices.forced(2):
        assert choices.tile(gg.Q4_0) == RowTile(2)
    assert choices.keep(gg.Q4_0, chosen(PLAIN, one=2e-3, plain=1e-3, repacked=1.5e-3))
    assert choices.tile(gg.Q4_0) == PLAIN and not choices.pays_repacked(gg.Q4_0)
    assert choices.layout_tile(gg.Q4_0) == choices.layout_rule(gg.Q4_0)
    assert choices.keep(gg.Q4_0, chosen(PLAIN, NEAR, one=2e-3, plain=1e-3, repacked=1.5e-3, near=0.5e-3))
    assert choices.layout_tile(gg.Q4_0) == NEAR and choices.kept(gg.Q4_0).layout_gain == pytest.approx(2)


@pytest.mark.parametrize("text", [
    "", "{", "null", "[]", "[" * 100_000, '{"tile": "4"}', '{"tile": "3", "seconds": {"1": 1, "3": 1}}',
    '{"tile": "4", "layout": null, "seconds": {"1": 1}}', '{"tile": "1", "layout": "4", "seconds": {"1": 1}}',
    '{"tile": "4", "layout": null, "seconds": {"4": 1}}', '{"tile": ["1"], "layout": null, "seconds": {"1": 1}}',
    '{"tile": "4", "layout": null, "seconds": {"1": NaN, "4": NaN}}',
    '{"tile": "1", "layout": null, "seconds": {"1": Infinity}}', '{"tile": "1", "seconds": {"1": 1}}',
    '{"tile": "1", "layout": "3", "seconds": {"1": 1, "repacked 3": 1}}',
    '{"tile": "1", "layout": null, "seconds": {"1": 0}}', b"\xff\xfe\x00"], ids=range(17))
def test_a_damaged_file_counts_as_absent(folder, text):
    choices.keep(gg.Q4_0, chosen(RowTile(4), one=2.0, four=1.0))
    path = next(folder.iterdir())
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    choices.kept.cache_clear()
    with pytest.warns(UserWarning, match=path.name):
        assert choices.kept(gg.Q4_0) is None
    assert choices.tile(gg.Q4_0) == choices.rule(gg.Q4_0)
    assert choices.keep(gg.Q4_0, chosen(RowTile(2), one=2.0, two=1.0)) and choices.tile(gg.Q4_0) == RowTile(2)


def test_a_place_that_cannot_be_written_changes_nothing(folder):
    folder.write_text("a file, where the folder should be")
    assert not choices.keep(gg.Q4_0, chosen(RowTile(4), one=2.0, four=1.0))
    assert choices.tile(gg.Q4_0) == choices.rule(gg.Q4_0) and tuning.all_kept() == {}


SMALL = {"lengths": (256, 64), "nbytes": 1 << 16, "rounds": 1, "used": itertools.count(0.0, 1e9).__next__}


def clock(*seconds):
    """A clock on which each of the candidates, in turn, takes so long."""
    times = iter(np.cumsum([t for s in seconds for t in (0, s)] * SMALL["rounds"]).tolist())
    return lambda: next(times)


@pytest.mark.skipif(gg.Q4_0 not in repack.LAYOUTS, reason=f"no layout of codes for {isa.LEVEL}")
def test_measuring_chooses_the_fastest_with_the_rules_bytes(folder, monkeypatch):
    """Every candidate and the layout: a processor that likes this, and one that likes the opposite."""
    seconds, others = tuning.measure(gg.Q4_0, **SMALL)
    assert list(seconds) == ["1", "1 no prefetch", "1 near", "1 ahead", "2", "4", "repacked 1", "repacked 1 near",
                             "repacked 4", "repacked 4 near"]
    assert min(seconds.values()) > 0 and others == []
    monkeypatch.setattr(choices, "RULE", choices.INTEL)
    four = tuning.choose(gg.Q4_0, **SMALL, now=clock(4, 5, 6, 6, 3, 1, 2, 2, 2, 2))
    assert (four.tile, four.layout) == (RowTile(4), None) and four.gain == 4
    plain = tuning.choose(gg.Q4_0, **SMALL, now=clock(4, 2, 3, 3, 3, 5, 1.5, 1, 1.5, 1.5))
    assert (plain.tile, plain.layout) == (PLAIN, NEAR) and plain.layout_gain == 2
    near = tuning.choose(gg.Q4_0, **SMALL, now=clock(4, 3, 2, 3, 5, 5, 6, 6, 6, 6))
    assert (near.tile, str(near.tile), near.layout) == (RowTile(1, "near"), "1 near", None)
    rule = tuning.choose(gg.Q4_0, **SMALL, now=clock(4, 3, 2, 3, 5, 5, 1, 1, 1.01, 1))
    assert rule.layout == RowTile(4)
    below_least_gain = clock(1.01, 1.01, 1.01, 1.01, 1.01, 1, 9, 9, 9, 9)
    assert tuning.choose(gg.Q4_0, **SMALL, now=below_least_gain).tile == ONE_ROW


@pytest.mark.parametrize("seconds,others,rows", [
    ({"1": 2.0, "2": 2.0, "4": 1.0, "8": 1.01}, [], 8), ({"1": 2.0, "2": 2.0, "4": 1.0, "8": 1.03}, [], 4),
    ({"1": 1.0, "2": 1.0, "4": 1.1, "8": 0.9}, ["8"], 1)], ids=["near", "slower", "other bytes"])
@pytest.mark.skipif(isa.ISA != "avx512", reason=f"{isa.ISA} supports tiles of four rows at most")
def test_the_rules_rows_stay_unless_others_are_faster(monkeypatch, seconds, others, rows):
    monkeypatch.setattr(tuning, "measure", lambda type: (seconds, others))
    monkeypatch.setattr(choices, "rule", lambda type: RowTile(8))
    assert tuning.choose(gg.F32).tile == RowTile(rows)


def test_tiles_with_other_bytes_cannot_be_chosen(folder, monkeypatch):
    monkeypatch.setattr(tuning, "measure", lambda type: ({"1": 3.0, "2": 2.0, "4": 1.0}, ["4"]))
    monkeypatch.setattr(choices, "RULE", choices.INTEL)
    assert tuning.tune([gg.Q4_0, gg.I32]) == {gg.Q4_0: chosen(RowTile(2), one=3.0, two=2.0)}
    assert choices.tile(gg.Q4_0) == RowTile(2)
    assert tuning.tune([gg.Q4_0]) == {} and list(tuning.tune([gg.Q4_0], again=True)) == [gg.Q4_0]


def test_an_unknown_processor_is_measured_when_a_model_is_loaded(folder, monkeypatch):
    """Types in turn while there is time; where a rule is known nothing is measured."""
    asked, now = [], iter((0, 0.1, 0.2, 1.1)).__next__

    def measure(type, tiles, layouts, **how):
        asked.append((type, list(tiles), list(layouts), how))
        return {"1": 2.0, "1 no prefetch": 1.0, "repacked 4": 0.6, "repacked 1 near": 0.5}, []
    monkeypatch.setattr(tuning, "measure", measure)
    monkeypatch.setattr(choices, "RULE", choices.ZEN)
    assert tuning.tune_unknown([gg.Q4_0]) == {} and asked == []
    monkeypatch.setattr(choices, "RULE", None)
    made = tuning.tune_unknown([gg.Q4_0, gg.Q8_0, gg.Q4_K], now=now)
    layouts = [RowTile(4), NEAR]
    assert [a[:3] for a in asked] == [(t, [ONE_ROW, PLAIN], layouts) for t in (gg.Q4_0, gg.Q8_0)]
    assert asked[0][3] == tuning.QUICK
    assert choices.tile(gg.Q4_0) == PLAIN and choices.pays_repacked(gg.Q8_0) and list(made) == [gg.Q4_0, gg.Q8_0]


@pytest.mark.parametrize("setting", ["off", 2, 4])
def test_the_variable_decides_alone(folder, monkeypatch, setting):
    choices.keep(gg.Q8_0, chosen(RowTile(2), RowTile(4), one=2.0, two=1.0, repacked=0.5))
    monkeypatch.setattr(choices, "SETTING", setting)
    assert choices.tile(gg.Q8_0) == (choices.rule(gg.Q8_0) if setting == "off" else RowTile(setting))
    assert tuning.all_kept() == {} and tuning.tune([gg.Q4_0]) == {}
    assert choices.pays_repacked(gg.Q8_0) == (gg.Q8_0 in (choices.RULE or choices.INTEL).repacked)


def test_an_unusable_value_is_a_one_line_error():
    r = subprocess.run([sys.executable, START, "info"], text=True, capture_output=True, timeout=300,
                       env={**os.environ, "GGJIT_TUNE": "3"})
    assert r.returncode == 2 and r.stdout == "" and len(r.stderr.strip().splitlines()) == 1
    assert "GGJIT_TUNE='3'" in r.stderr and "off" in r.stderr


def test_info_shows_what_was_measured(folder, capsys):
    choices.keep(gg.Q4_0, chosen(RowTile(4), RowTile(4), one=2.0, four=1.6, repacked=0.8))
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tiles"] == {
        "q4_0": {"rows": 4, "prefetch": OWN, "gain": 1.25, "repacked": True, "layout_gain": 2.0}}
    assert main(["info", "--tuning", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["target"] == isa.target() and facts["types"]["q4_0"]["why"] == "measured"
    assert facts["types"]["f32"]["why"] == "rule" and facts["types"]["q4_0"]["seconds"] == {
        "1": 2.0, "4": 1.6, "repacked 4": 0.8}
    assert main(["info", "--tuning"]) == 0
    assert "1 2.50, 4 2.00, repacked 4 1.00" in capsys.readouterr().out


# ---------------------------------------------------------------- threads
def shared_chain(n_elements):
    ctx = gg.Context()
    y = x = gg.from_numpy(ctx, np.ones(n_elements, np.float32))
    for _ in range(20):
        y = gg.add(y, x)
    return y


def test_how_much_work_is_shared_is_kept_and_followed(folder, monkeypatch):
    sharing.kept.cache_clear()
    y = shared_chain(1 << 17)
    least = plan_of(y).kernels[0].cost
    assert sharing.least_nanoseconds(2) == sharing.RULE_NANOSECONDS < least and plan_of(y).n_used == 2
    assert sharing.keep(2, 1.5 * least) and sharing.keep(4, 9.0)
    assert sharing.kept() == {2: 1.5 * least, 4: 9.0} and plan_of(y).n_used == 1
    monkeypatch.setattr(choices, "SETTING", "off")
    assert plan_of(y).n_used == 2
    monkeypatch.setattr(choices, "SETTING", "")
    next(folder.glob("threads-*.json")).write_text('{"2": -1}')
    sharing.kept.cache_clear()
    with pytest.warns(UserWarning, match="nanoseconds must be positive"):
        assert sharing.kept() == {}
    assert plan_of(y).n_used == 2
    sharing.kept.cache_clear()


@pytest.mark.parametrize("alone,shared,least", [
    ((1, 2, 4, 8, 16, 32), (3, 3, 3, 5, 9, 17), 4000.0),            # cores that share nothing but memory
    ((1, 2, 4, 8, 16, 32), (3, 4, 8, 12, 16, 24), 32000.0),         # two threads of one core
    ((1, 2, 4, 8, 16, 32), (3, 4, 8, 16, 32, 64), 64000.0),         # sharing never pays
    ((1, 2, 4, 8, 16, 32), (3, 1, 8, 4, 8, 16), 8000.0)])           # one that was lucky
def test_sharing_begins_where_it_pays_from_there_on(monkeypatch, alone, shared, least):
    kept = {}
    monkeypatch.setattr(sharing, "keep", kept.__setitem__)
    monkeypatch.setattr(sharing, "kept", lambda: kept)
    monkeypatch.setattr(tuning, "measure_sharing",
                        lambda n_threads: dict(zip(sharing.CANDIDATES, zip(alone, shared, strict=True), strict=True)))
    assert tuning.tune_sharing(1) is None and tuning.tune_sharing(2) == least and kept == {2: least}
    assert tuning.tune_sharing(2) is None and tuning.tune_sharing(2, again=True) == least
    monkeypatch.setattr(choices, "SETTING", "off")
    assert tuning.tune_sharing(2, again=True) is None


def test_sharing_is_measured_with_chains_of_the_asked_work():
    found = tuning.measure_sharing(2, rounds=1, used=itertools.count(0.0, 1e9).__next__)
    assert list(found) == list(sharing.CANDIDATES) and all(min(pair) > 0 for pair in found.values())


# ---------------------------------------------------------------- busy machines
class Machine:
    """Clocks of a machine on which work takes its seconds, times what others take of it."""

    def __init__(self, slower=lambda i: 1.0, share=1.0):
        self.passed = self.used = 0.0
        self.slower, self.share, self.n = slower, share, 0

    def work(self, seconds):
        def run():
            self.passed += seconds * self.slower(self.n)
            self.used += seconds * self.slower(self.n) * self.share
            self.n += 1
        return run

    def clocks(self):
        return {"now": lambda: self.passed, "used": lambda: self.used}


def test_the_least_of_rounds_in_turns():
    """Now and then a run takes long: the least counts, and every function has its turn in each round."""
    machine = Machine(slower=lambda i: 5.0 if i % 7 == 0 else 1.0 + i % 3 * 0.01)
    works = {"a": machine.work(2.0), "b": machine.work(3.0)}
    found = measured.in_turns(works, 9, **machine.clocks())
    assert found == pytest.approx({"a": 2.0, "b": 3.0}, rel=0.011) and machine.n == 18


@pytest.mark.parametrize("machine", [lambda: Machine(share=0.6), lambda: Machine(slower=lambda i: (1, 3, 3)[i % 3])],
                         ids=["others have the core", "others have cores at times"])
def test_a_busy_machine_is_noticed(machine):
    m = machine()
    with pytest.raises(measured.MachineBusy):
        measured.in_turns({"a": m.work(1e-3), "b": m.work(2e-3)}, 9, **m.clocks())


def test_what_a_busy_machine_spoilt_is_measured_again_later(folder, monkeypatch):
    """Nothing is kept, a file says why, the rule holds; later it is measured again, and the file goes."""
    busy, asked = [True], []

    def measure(type, **how):
        asked.append(type)
        if busy[0]:
            raise measured.MachineBusy("others")
        return {"1": 2.0, "1 no prefetch": 1.0}, []
    monkeypatch.setattr(tuning, "measure", measure)
    monkeypatch.setattr(choices, "RULE", None)
    assert tuning.tune_unknown([gg.Q4_0]) == {} and choices.kept(gg.Q4_0) is None
    assert choices.tile(gg.Q4_0) == choices.rule(gg.Q4_0)
    mark, = folder.glob("reads-q4_0-*.json.busy")
    assert mark.read_text() == "taken busy: others\n"
    assert tuning.tune_unknown([gg.Q4_0]) == {} and len(asked) == 1         # not at every load
    os.utime(mark, (0, 0))
    busy[0] = False
    assert list(tuning.tune_unknown([gg.Q4_0])) == [gg.Q4_0] and len(asked) == 2
    assert choices.tile(gg.Q4_0) == PLAIN and not mark.exists()


def test_sharing_is_not_chosen_on_a_busy_machine(folder, monkeypatch):
    def measure(n_threads):
        raise measured.MachineBusy("others")
    monkeypatch.setattr(tuning, "measure_sharing", measure)
    monkeypatch.setattr(sharing, "kept", lambda: {})
    assert tuning.tune_sharing(2) is None and sharing.least_nanoseconds(2) == sharing.RULE_NANOSECONDS
    assert len(list(folder.glob("threads-*.json.busy"))) == 1


def test_amx_is_used_where_it_is_asked_for_or_was_measured_to_be_faster(folder, monkeypatch):
    monkeypatch.setattr(choices, "has_amx", lambda type: type is gg.Q4_0)
    seconds = {"amx": 2.0, "vectors": 1.0}
    monkeypatch.setattr(tuning, "measure_amx", lambda type, **how: (seconds, True))
    assert not choices.by_amx(gg.Q4_0, 16)
    monkeypatch.setattr(isa, "AMX_ASKED", True)
    assert choices.by_amx(gg.Q4_0, 16) and not choices.by_amx(gg.Q4_0, 15) and not choices.by_amx(gg.Q8_0, 16)
    assert tuning.tune_amx([gg.Q4_0, gg.Q8_0]) == {gg.Q4_0: False} and not choices.by_amx(gg.Q4_0, 128)
    with choices.forced_amx(True):
        assert choices.by_amx(gg.Q4_0, 128)
    assert tuning.tune_amx([gg.Q4_0]) == {}
    seconds["amx"] = 0.5
    assert tuning.tune_amx([gg.Q4_0], again=True) == {gg.Q4_0: True} and choices.by_amx(gg.Q4_0, 128)
    choices.keep_amx(gg.Q4_0, False, seconds)
    monkeypatch.setattr(choices, "SETTING", "off")
    assert choices.by_amx(gg.Q4_0, 128) and tuning.tune_amx([gg.Q4_0], again=True) == {}


def test_amx_that_gives_other_results_is_not_used(folder, monkeypatch):
    monkeypatch.setattr(choices, "has_amx", lambda type: type is gg.Q4_0)
    monkeypatch.setattr(tuning, "measure_amx", lambda type, **how: ({"amx": 1.0, "vectors": 2.0}, False))
    with pytest.warns(UserWarning, match="q4_0 by AMX differ"):
        assert tuning.tune_amx([gg.Q4_0]) == {gg.Q4_0: False}
    assert not choices.by_amx(gg.Q4_0, 128)


def test_a_busy_machine_measures_amx_later(folder, monkeypatch):
    monkeypatch.setattr(choices, "has_amx", lambda type: True)

    def busy(type, **how):
        raise measured.MachineBusy("busy")
    monkeypatch.setattr(tuning, "measure_amx", busy)
    assert tuning.tune_amx([gg.Q4_0]) == {} and not choices.by_amx(gg.Q4_0, 128)
    assert choices.busy_seconds(gg.Q4_0) < measured.AGAIN_SECONDS


def test_a_damaged_choice_of_amx_counts_as_none(folder, monkeypatch):
    monkeypatch.setattr(choices, "has_amx", lambda type: True)
    assert choices.keep_amx(gg.Q4_0, False, {"amx": 2.0, "vectors": 1.0})
    path, = folder.glob("amx-q4_0-*.json")
    path.write_text('{"amx": 3, "seconds": {}}')
    choices.kept_amx.cache_clear()
    monkeypatch.setattr(isa, "AMX_ASKED", True)
    with pytest.warns(UserWarning, match="is not used"):
        assert choices.by_amx(gg.Q4_0, 128)
