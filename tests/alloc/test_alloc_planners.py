"""plan_offsets and its CSV front: targets on random problems, decisions, bad input."""
import csv
import threading

import numpy as np
import pytest
from helpers.requirements import benchmark
from helpers.timing import processor_time

from ggjit.alloc.csvio import read_problem, run_plan_csv
from ggjit.alloc.ggml.best_fit import ggml_best_fit
from ggjit.alloc.ggml.legacy.tensor_alloc import BestFit
from ggjit.alloc.offsets import greedy, planners, repair, tiling
from ggjit.alloc.offsets.planners import DOES_NOT_FIT, FITS, NOT_FOUND, plan_offsets
from ggjit.alloc.offsets.search import FOUND, INFEASIBLE, KEEP, RULES, TRAIL_FULL, CanonicalSearch
from ggjit.alloc.offsets.sections import Instance
from ggjit.alloc.validate import check_layout
from ggjit.ops.core.errors import BadFile, ParamError, ShapeError

instances = benchmark("alloc_instances")


@pytest.mark.parametrize("n", [1000, 10_000, 100_000])
def test_random_lifetimes_reach_the_lower_bound(n):
    lo, hi, size = instances.random_lifetimes(n)
    lay = plan_offsets(lo, hi, size, alignment=32, time_limit=10)
    assert lay.peak == lay.lower_bound
    assert check_layout(lo, hi, size, lay.offsets, 32) == lay.peak


def test_hard_instances_improve_with_time_and_stay_valid():
    lo, hi, size = instances.accelerator(200, 1, steps=60, unit=1 << 14)
    peaks = []
    for limit in (0, 0.05, 0.3):
        plan_offsets(lo, hi, size, time_limit=limit)                # compiles
        with processor_time() as spent:
            lay = plan_offsets(lo, hi, size, time_limit=limit)
        assert check_layout(lo, hi, size, lay.offsets) == lay.peak >= lay.lower_bound == 1 << 20
        assert spent.seconds < limit + 0.2 and lay.seconds < limit + 2
        peaks.append(lay.peak)
    assert peaks[0] >= peaks[1] >= peaks[2] < peaks[0]              # 0.05 s may pass without a step on a busy machine


def test_small_problems_are_searched_however_slow_the_clock_runs():
    """A busy machine may let the time pass before the first search node."""
    lower, upper, size = [0, 0, 2, 3], [2, 4, 5, 6], [100, 50, 120, 70]
    assert plan_offsets(lower, upper, size, time_limit=1e-9).peak == plan_offsets(lower, upper, size).peak
    lo, hi, size = instances.accelerator(100, 1, steps=60, unit=1 << 14)
    late, none = (plan_offsets(lo, hi, size, time_limit=t) for t in (1e-9, 0))
    assert late.peak < none.peak and 0 < late.nodes <= 2 * planners.SURE_NODES * len(lo) and none.nodes == 0


def test_capacity_stops_at_the_first_fit():
    lo, hi, size = instances.accelerator(150, 2, steps=40, unit=1 << 15)
    plan_offsets(lo, hi, size, capacity=3 << 20, time_limit=5)      # compiles
    with processor_time() as spent:
        roomy = plan_offsets(lo, hi, size, capacity=3 << 20, time_limit=5)
    assert roomy.fits == FITS and spent.seconds < 1
    tight = plan_offsets(lo, hi, size, capacity=1 << 20, time_limit=0)
    assert tight.fits == NOT_FOUND and tight.peak > 1 << 20
    no = plan_offsets(lo, hi, size, capacity=(1 << 20) - 1, time_limit=0.2)
    assert no.fits == DOES_NOT_FIT and no.peak >= 1 << 20
    check_layout(lo, hi, size, no.offsets)


# live bytes never exceed 6, yet no layout fits 6
GAP = np.array([[2, 2, 3, 0, 1, 0, 1, 4], [3, 5, 4, 3, 4, 1, 2, 5], [1, 2, 3, 2, 1, 4, 3, 4]])


def fits_by_enumeration(lo, hi, size, capacity):
    """Try every integer offset, large buffers first."""
    order, placed = sorted(range(len(size)), key=lambda i: -size[i]), {}

    def place(k):
        if k == len(order):
            return True
        i = order[k]
        for o in range(capacity - size[i] + 1):
            if all(hi[i] <= lo[j] or hi[j] <= lo[i] or o + size[i] <= p or p + size[j] <= o
                   for j, p in placed.items()):
                placed[i] = o
                if place(k + 1):
                    return True
                del placed[i]
        return False
    return place(0)


def test_a_gap_above_the_section_bound_is_proved():
    lo, hi, size = GAP
    lay = plan_offsets(lo, hi, size, time_limit=1)
    assert (lay.peak, lay.lower_bound, lay.proved_bound) == (7, 6, 7)
    assert not fits_by_enumeration(*GAP.tolist(), 6) and fits_by_enumeration(*GAP.tolist(), 7)
    plan_offsets(lo, hi, size, capacity=6, time_limit=1)            # compiles
    with processor_time() as spent:
        no = plan_offsets(lo, hi, size, capacity=6, time_limit=1)
    assert no.fits == DOES_NOT_FIT and no.lower_bound == 6 and spent.seconds < 0.5


def test_search_says_when_it_ran_out_of_nodes_or_memory():
    lo, hi, size = instances.accelerator(150, 2)
    inst = Instance(lo, hi, size)
    s, order = CanonicalSearch(inst), np.argsort(-size)
    out = s.solve(inst.lower_bound, order, 10)
    assert out.status not in (FOUND, INFEASIBLE) and out.nodes == 11 and out.offsets is None
    assert s.solve(inst.lower_bound - 1, order, 10).status == INFEASIBLE
    assert TRAIL_FULL not in (0, 1, -1)


@pytest.mark.parametrize("seed", [2, 7])
def test_a_node_limit_gives_the_same_answer_for_any_number_of_threads(seed):
    lo, hi, size = instances.accelerator(60, seed)
    one, two = (plan_offsets(lo, hi, size, node_limit=20_000, seed=seed, n_threads=k) for k in (1, 2))
    assert (one.offsets == two.offsets).all() and (one.nodes, one.planner) == (two.nodes, two.planner)
    assert one.nodes <= 20_000 + 60


@pytest.mark.parametrize("limit", [1, 30, 1000])
def test_a_node_limit_is_kept_by_every_phase(limit):
    """But for the node at which each of three searches notices it."""
    lo, hi, size = instances.uniform_lifetimes(900)
    assert plan_offsets(lo, hi, size, node_limit=limit).nodes <= limit + 5


def test_every_rule_finds_layouts_and_proves_that_there_is_none():
    lo, hi, size = GAP
    inst = Instance(lo, hi, size)
    s = CanonicalSearch(inst)
    for rule in (KEEP, *RULES.values()):
        assert s.solve(6, np.argsort(-size), 10_000, rule).status == INFEASIBLE
        assert check_layout(lo, hi, size, s.solve(7, np.argsort(-size), 10_000, rule).offsets) == 7


def test_ranking_parts_anew_needs_fewer_nodes():
    """A part that a split opens is ranked by what is left in it; the order of the whole instance leads astray."""
    lo, hi, size = instances.accelerator(100, 2, flat=0.8, unit=1 << 15, trim=0.95, steps=100)
    unit = int(np.gcd.reduce(size))
    inst = Instance(lo, hi, size // unit)
    s, order = CanonicalSearch(inst), greedy.rank(inst, "TAW")
    kept, anew = (s.solve(inst.lower_bound, order, 20_000, rule) for rule in (KEEP, RULES["TAW"]))
    assert kept.status == anew.status == FOUND and anew.nodes < kept.nodes
    assert check_layout(lo, hi, size, anew.offsets * unit) == inst.lower_bound * unit


@pytest.mark.parametrize("n, seed", [(40, 0), (80, 1), (120, 2), (154, 1000)])
def test_tiling_finds_layouts_without_holes(n, seed):
    lo, hi, size = instances.accelerator(n, seed, **instances.STYLES["tiles"])
    unit = int(np.gcd.reduce(size))
    inst = Instance(lo, hi, size // unit)
    nodes, offsets = tiling.Tiling(inst, inst.lower_bound, seed).run(3_000_000)
    assert check_layout(lo, hi, size, offsets * unit) == inst.lower_bound * unit and nodes < 3_000_000
    again, same = tiling.Tiling(inst, inst.lower_bound, seed).run(3_000_000)
    assert again == nodes and (same == offsets).all()


def near_the_gap(rng):
    """A small problem: GAP with sizes moved and buffers added, so that about every third has no layout at its bound."""
    lo, hi, size = GAP.copy()
    size = np.maximum(size * rng.integers(1, 3) + np.where(rng.random(8) < 0.2, rng.integers(-1, 2, 8), 0), 1)
    more = rng.integers(0, 5, rng.integers(0, 4))
    added = more, rng.integers(more + 1, 7), rng.integers(1, 5, len(more))
    return (np.concatenate(pair) for pair in zip((lo, hi, size), added, strict=True))


def test_tiling_misses_no_layout_and_finds_none_that_is_not_there(monkeypatch):
    """With any number of bytes to spare it decides what the canonical search decides."""
    monkeypatch.setattr(tiling, "MAX_SPARE", 1.0)
    rng, decided = np.random.default_rng(), set()
    for seed in range(150):
        lo, hi, size = near_the_gap(rng)
        inst = Instance(lo, hi, size)
        for cap in (inst.lower_bound, inst.lower_bound + 1):
            want = CanonicalSearch(inst).solve(cap, np.argsort(-size), 1_000_000).status
            tiles = tiling.Tiling(inst, cap, seed)
            _, offsets = tiles.run(1_000_000)
            assert (offsets is None) == (want == INFEASIBLE) == tiles.exhausted, (lo, hi, size, cap)
            assert offsets is None or check_layout(lo, hi, size, offsets) <= cap
            decided.add(want)
    assert decided == {FOUND, INFEASIBLE}


def test_tiling_is_left_to_full_problems():
    lo, hi, size = instances.accelerator(100, 3, **instances.STYLES["tiles"])
    full = Instance(lo, hi, size)
    assert tiling.Tiling(full, full.lower_bound).suits
    assert not tiling.Tiling(full, 2 * full.lower_bound).suits
    assert not tiling.Tiling(full, full.lower_bound - 1).suits
    lo, hi, size = instances.random_lifetimes(tiling.MAX_BUFFERS + 1)
    large = Instance(lo, hi, size)
    assert not tiling.Tiling(large, large.lower_bound).suits


def test_an_alarm_that_rings_early_leaves_the_search_whole(monkeypatch):
    """While something is compiled the clock seems to run, and stands where it stood when that is done."""
    rung = []

    class Early(planners.Alarm):
        def __enter__(self):
            super().__enter__()
            self.word[0] = not rung             # in the first phase alone
            rung.append(1)
            return self
    monkeypatch.setattr(planners, "Alarm", Early)
    lo, hi, size = instances.accelerator(200, 1, steps=60, unit=1 << 14)
    lay = plan_offsets(lo, hi, size, time_limit=1.5)
    assert len(rung) == 2 and check_layout(lo, hi, size, lay.offsets) == lay.peak


def test_a_time_limit_stops_inside_a_long_pass():
    lo, hi, size = instances.uniform_lifetimes(100_000)
    plan_offsets(lo, hi, size, time_limit=0.01)                     # compiles
    with processor_time() as spent:
        lay = plan_offsets(lo, hi, size, time_limit=0.3)
    assert spent.seconds < 0.6 and lay.peak >= lay.lower_bound


@pytest.mark.parametrize("phase", range(5))
def test_every_long_pass_ends_once_the_clock_has_run_out(phase):
    """With the word set from the start no pass does its work: first fit, the descent, lists, search, repair."""
    lo, hi, size = instances.uniform_lifetimes(4000)
    inst, over = Instance(lo, hi, size), np.ones(1, np.int64)
    order, off = greedy.rank(inst, "TAW"), np.zeros(4000, np.int64)
    if phase == 0:
        assert greedy.first_fit(inst, order, off, 1 << 40, over) == 1 << 40 and off.max() <= 0
    elif phase == 1:
        assert greedy.canonical(inst, order, off, 1 << 40, over) == 1 << 40 and off.max() <= 0
    elif phase == 2:
        assert not CanonicalSearch(inst, over).possible
    else:
        search = CanonicalSearch(inst)
        if phase == 3:
            out = search.solve(inst.lower_bound, order, 1 << 40, RULES["TAW"], over)
            assert out.status not in (FOUND, INFEASIBLE) and out.nodes == 0
        else:
            local = repair.Repair(search, off)
            assert local.batch(map, 2 * inst.lower_bound, off, inst.lower_bound, 1 << 40, over) == (0, [])


def test_no_order_is_sorted_when_less_time_is_left_than_that_takes(monkeypatch):
    lo, hi, size = instances.uniform_lifetimes(3000)
    began = []
    monkeypatch.setattr(greedy, "rank", lambda *_: began.append(1))
    p = planners.Planner(Instance(lo, hi, size), 0, 10.0)
    p.prepared = 6.0
    p.run()
    assert not began and p.short and not p.spent and p.how == "ggml"


def test_repair_finds_layouts_within_a_capacity():
    """In steps of one (every offset is looked at) and in fine ones (the ends of the others)."""
    lo, hi, size = instances.accelerator(60, 7, steps=30, unit=1 << 16)
    for unit in (1 << 16, 1 << 8):
        inst = Instance(lo, hi, size // unit)
        search, best, off = CanonicalSearch(inst), int(inst.size.sum()), np.cumsum(inst.size) - inst.size
        local, goal = repair.Repair(search, off, seed=3), int(1.2 * inst.lower_bound)
        for _ in range(100):
            _, found = local.batch(map, best, off, goal, 2000, greedy.NEVER)
            for off in found:
                best = min(best, check_layout(lo, hi, inst.size, off))
            if best <= goal:
                break
        assert inst.lower_bound <= best <= goal


@pytest.mark.parametrize("settings", [{"node_limit": -1}, {"node_limit": 1.5}, {"seed": -1}, {"n_threads": 0}])
def test_bad_search_settings(settings):
    with pytest.raises(ParamError, match=next(iter(settings))):
        plan_offsets([0], [1], [4], **settings)


def test_events_give_ggmls_own_plan():
    lo, hi, size = np.array([0, 0, 2]), np.array([2, 3, 3]), np.array([10, 20, 15])
    lay = plan_offsets(lo, hi, size, time_limit=0, events=[2, 1, -1, 3, -2, -3])
    assert lay.planner == "ggml" and lay.offsets.tolist() == [20, 0, 20] and lay.peak == 35


@pytest.mark.parametrize("events", [[1, 2, -1, -2, 3, 3], [1, 2, -1, -1, 3], [-1, 1, 2, 3], [1, 2, -1], [1, 2, 4],
                                    [1, 2, 0], [[1, 2, 3]], [1.0, 2.0, 3.0]])
def test_bad_events(events):
    with pytest.raises(ParamError, match="events"):
        plan_offsets([0, 0, 2], [2, 3, 3], [10, 20, 15], events=events)


@pytest.mark.parametrize("seed", range(40))
def test_the_tree_of_holes_places_as_the_free_list_does(seed):
    """Few sizes (many equal holes) and many, short lives and long ones."""
    rng = np.random.default_rng(seed)
    n, kinds = int(rng.integers(1, 400)), int(rng.integers(1, 60))
    lo = rng.integers(0, int(rng.integers(1, 200)), n)
    inst = Instance(lo, lo + rng.integers(1, int(rng.integers(2, 80)), n), rng.integers(1, kinds + 1, n))
    peak, off = ggml_best_fit(inst)
    plain = BestFit(None, 1, base=0)
    for e in inst.events().tolist():
        if e > 0:
            assert plain.alloc(e - 1, int(inst.size[e - 1])) == off[e - 1]
        else:
            plain.free_id(-e - 1)
    assert plain.max_size == peak


def test_the_table_of_prices_ends_with_a_layout_or_with_buffers_that_lie_on_others():
    """Also where a buffer fills the capacity, where nothing can move, and where no layout exists."""
    for (lo, hi, size), cap, whole in (
            (([0, 1, 2], [1, 2, 3], [4, 4, 4]), 4, True), (([0, 0], [1, 1], [4, 4]), 4, False),
            (([0, 0, 0, 1], [2, 1, 1, 2], [2, 1, 1, 2]), 4, True), (([0], [1], [1]), 1, True),
            (([0, 0, 0], [1, 1, 1], [2, 2, 1]), 4, False)):
        inst = Instance(*(np.array(x) for x in (lo, hi, size)))
        local = repair.Repair(CanonicalSearch(inst), np.zeros(inst.n, np.int64))
        made, done = local.walks[0].run(cap, 500, greedy.NEVER)
        off = local.walks[0].offsets
        assert done is whole and made <= 500 and off.min() >= 0 and (off + inst.size).max() <= cap
        assert not whole or check_layout(inst.lo, inst.hi, inst.size, off) <= cap


def test_zero_sizes_and_nothing_at_all():
    assert plan_offsets([], [], []).peak == 0
    lay = plan_offsets([0, 0, 1], [2, 2, 2], [0, 5, 0])
    assert lay.peak == 5 and lay.offsets.tolist() == [0, 0, 0] and lay.gap == 1.0


@pytest.mark.parametrize("seed", range(12))
def test_degenerate_problems_are_laid_out_alike_by_any_number_of_threads(seed):
    """Empty buffers, one buffer, one step, equal sizes, large units and alignments."""
    rng = np.random.default_rng(seed)
    n, steps, unit = int(rng.integers(1, 60)), int(rng.integers(1, 25)), int(rng.choice([1, 7, 1 << 20, 1 << 40]))
    lo = rng.integers(0, steps, n)
    hi, size = lo + rng.integers(1, 8, n), rng.integers(0, int(rng.choice([2, 5, 70])), n) * unit
    alignment, limit = 1 << int(rng.integers(0, 9)), int(rng.choice([0, 1, 50, 3000, 20_000]))
    one, three = (plan_offsets(lo, hi, size, alignment, node_limit=limit, n_threads=k) for k in (1, 3))
    assert check_layout(lo, hi, size, one.offsets, alignment) <= one.peak and one.lower_bound <= one.peak
    assert np.array_equal(one.offsets, three.offsets)
    assert (one.peak, one.nodes, one.proved_bound, one.planner) == (three.peak, three.nodes, three.proved_bound,
                                                                    three.planner)


def test_large_numbers_do_not_wrap():
    big = 1 << 60
    lay = plan_offsets([0, 0, big], [big, 5, big + 1], [big, big, big])
    assert lay.peak == 2 * big
    with pytest.raises(ShapeError, match="overflow"):
        plan_offsets([0] * 5, [1] * 5, [big] * 5)


@pytest.mark.parametrize("args, error, text", [
    (([0], [1], [-1]), ShapeError, "negative"), (([1], [1], [4]), ShapeError, "lower 1 >= upper 1"),
    (([0, 1], [1], [4]), ShapeError, "one per buffer"), (([0.5], [1], [4]), ParamError, "integers"),
    (([[0]], [[1]], [[4]]), ShapeError, "one dimension")])
def test_bad_problems(args, error, text):
    with pytest.raises(error, match=text):
        plan_offsets(*args)


@pytest.mark.parametrize("kw, text", [({"capacity": 3}, "below the largest buffer"), ({"alignment": 3}, "power of two"),
                                      ({"alignment": 0}, "power of two"), ({"time_limit": -1}, "time_limit"),
                                      ({"capacity": 6, "alignment": 8}, "below the largest")])
def test_bad_settings(kw, text):
    with pytest.raises(ParamError, match=text):
        plan_offsets([0], [1], [4], **kw)


def test_planning_on_several_threads_at_once():
    """The search releases the GIL and shares nothing."""
    out = {}

    def work(k):
        lo, hi, size = instances.accelerator(120, k, steps=40, unit=1 << 14)
        lay = plan_offsets(lo, hi, size, time_limit=0.1)
        out[k] = check_layout(lo, hi, size, lay.offsets) == lay.peak
    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert out == dict.fromkeys(range(4), True)


# ---------------------------------------------------------------- CSV
GOOD = "note,size,id,upper,lower\nx,10,a,2,0\n,20,b 1,3,1\n\ny,5,7,4,2\n"


def test_csv_round_trip(tmp_path):
    (tmp_path / "in.csv").write_text(GOOD)
    out = run_plan_csv(tmp_path / "in.csv", tmp_path / "out.csv")
    assert {k: out[k] for k in ("peak", "lower_bound", "fits")} == {"peak": 30, "lower_bound": 30, "fits": FITS}
    rows = list(csv.DictReader(open(tmp_path / "out.csv")))
    assert [r["id"] for r in rows] == ["a", "b 1", "7"] and list(rows[0]) == ["id", "lower", "upper", "size", "offset"]
    col = lambda k: np.array([int(r[k]) for r in rows])         # noqa: E731
    assert check_layout(col("lower"), col("upper"), col("size"), col("offset")) == 30
    over = run_plan_csv(tmp_path / "in.csv", tmp_path / "over.csv", capacity=29)
    assert over["fits"] == DOES_NOT_FIT and (tmp_path / "over.csv").exists()
    assert read_problem(open(tmp_path / "out.csv"))[0] == ["a", "b 1", "7"]


@pytest.mark.parametrize("text, line, what", [
    ("", 1, "no column"), ("id,lower,upper\na,0,1\n", 1, "size"), ("id,lower,upper,size,size\n", 1, "twice"),
    ("id,lower,upper,size\na,0,1\n", 2, "3 fields"), ("id,lower,upper,size\na,0,1,4\nb,0,x,4\n", 3, "upper 'x'"),
    ("id,lower,upper,size\n\na,2,2,4\n", 3, "lower 2 >= upper 2"), ("id,lower,upper,size\na,0,1,-4\n", 2, "negative"),
    ("id,lower,upper,size\na,0,1,4\na,0,1,4\n", 3, "again"), ("id,lower,upper,size\na,0,1,1" + "0" * 30, 2, "62 bits"),
    ("id,lower,upper,size\na,0,1,1.5\n", 2, "1.5"), ("id,lower,upper,size\na,0,1," + "9" * 5000, 2, "size")])
def test_bad_csv_names_the_line(tmp_path, text, line, what):
    (tmp_path / "bad.csv").write_text(text)
    with pytest.raises(BadFile, match=f"line {line}: .*{what}"):
        run_plan_csv(tmp_path / "bad.csv")


def test_binary_csv_is_refused(tmp_path):
    (tmp_path / "bad.csv").write_bytes(b"id,lower,upper,size\n\xff\xfe,0,1,2\n")
    with pytest.raises(BadFile, match="not text"):
        run_plan_csv(tmp_path / "bad.csv")
    (tmp_path / "nul.csv").write_bytes(b"id,lower,upper,size\na,0,1,\x002\n")
    with pytest.raises(BadFile, match="line 2"):
        run_plan_csv(tmp_path / "nul.csv")
