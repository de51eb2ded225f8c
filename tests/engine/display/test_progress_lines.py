"""Work that takes long says so, in a notebook as on a terminal, and short work does not."""
import time

import numpy as np
import pytest

import ggjit as gg
from ggjit.core import kernels_ahead
from ggjit.display import compile_notice
from ggjit.models import load_model
from ggjit.ops.core import progress
from ggjit.ops.native.jit import CACHE


class Place:
    least = 0.0

    def __init__(self):
        self.lines = []

    def show(self, text, last=False):
        self.lines.append((text, last))

    def at_end(self, function):
        self.end = function


@pytest.fixture
def place(monkeypatch):
    """Where lines go, at once instead of after two seconds."""
    where = Place()
    monkeypatch.setattr(progress, "_place", lambda: where)
    monkeypatch.setattr(progress, "AFTER", 0.0)
    monkeypatch.setattr(progress, "EVERY", 0.0)
    return where


def test_a_line_counts_says_what_is_left_and_ends(place):
    with progress.work("looking", 3) as step:
        step()
        with progress.work("inside") as other:          # only the outermost is told of
            other()
        step(description="still\x1b looking")
    texts = [text for text, _ in place.lines]
    assert texts[0].startswith("looking: 1/3, 0:0") and "left" in texts[0]
    assert texts[1].startswith("still\\x1b looking: 2/3") and texts[2].endswith(" s") and "inside" not in str(texts)
    assert [last for _, last in place.lines] == [False, False, True]


def test_what_is_counted(place):
    one = [1]
    assert progress.counted("one", one) is one and list(progress.counted("two", [1, 2])) == [1, 2]
    assert place.lines[0][0].startswith("two: 1/2") and len(place.lines) == 3


def test_short_work_and_work_without_a_place_have_no_line(monkeypatch):
    where = Place()
    monkeypatch.setattr(progress, "_place", lambda: where)
    with progress.work("short", 2) as step, progress.busy("short too", 1.0):
        step()
    monkeypatch.setattr(progress, "_place", None)
    with progress.busy("unseen"), progress.work("unseen") as step:
        step()
    assert where.lines == []


def test_work_without_steps_moves_by_itself(place, monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.01)
    with progress.busy("searching", 5):
        time.sleep(0.1)
    assert len(place.lines) > 2 and place.lines[0] == ("searching, 0 s so far", False) and place.lines[-1][1]


@pytest.mark.parametrize("does", ["quantising", "planning memory", "predicting", "schedules", "planning"])
def test_what_takes_long_has_a_line(place, monkeypatch, does):
    ctx = gg.Context()
    x = gg.from_numpy(ctx, np.ones((4, 8), np.float32), "x")
    w = gg.from_numpy(ctx, np.ones((8, 8), np.float32), "w")
    graph = gg.Graph(gg.relu(gg.mul_mat(w, x)))
    if does == "quantising":
        monkeypatch.setattr("ggjit.ops.types.quantize.LONG", 1)
        gg.quantize("F16", np.ones(1 << 16, np.float32))
    elif does == "planning memory":
        gg.measure(graph, time_limit=9)
    elif does == "predicting":
        gg.train.predict(x, graph.outputs[0], np.ones((8, 8), np.float32))
    elif does == "schedules":
        gg.measure(gg.Graph(*gg.grad(gg.sum(gg.sqr(gg.mul_mat(gg.set_param(w), x))), [w]))).pareto(2)
    else:
        gg.explore(graph)
    assert any(text.startswith(does) for text, _ in place.lines), place.lines


def test_a_plan_says_how_many_kernels_are_to_be_compiled(monkeypatch, tmp_path):
    """The line about compiling has the number of all that the plan still needs."""
    monkeypatch.setattr(kernels_ahead, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(CACHE, "addresses", {})
    kernels_ahead.announce([("a", ("ggjit.ops.core.shape",)), ("b", ("ggjit.ops.core.shape",))] * 2)
    assert kernels_ahead.n_ahead("a") == 2 and kernels_ahead.n_ahead("z") == 0
    where = Place()
    monkeypatch.setattr(CACHE, "compiled", CACHE.compiled)
    notice = compile_notice.Notice(lambda: where)
    for name in "ab":
        notice(name)
        CACHE.compiled += 1
        CACHE.addresses[name, ("ggjit.ops.core.shape",)] = 1
    where.end()                                         # the cell has run
    texts = [text for text, _ in where.lines]
    assert texts[0] == "compiling kernel 1 of 2 (a), 0 s so far; kept for the next time"
    assert any(t.startswith("compiling kernel 2 of 2 (b)") and "left" in t for t in texts)
    assert texts[-1].startswith("compiled 2 kernels in") and where.lines[-1][1] and notice._where is None
    notice("c")
    assert where.lines[-1][0].startswith("compiling kernel 1 (c)") and "kept" not in where.lines[-1][0]


def test_what_follows_a_plan_is_counted_with_it(monkeypatch, tmp_path):
    """Asked for once something has to be compiled, and gone with its block."""
    monkeypatch.setattr(kernels_ahead, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(CACHE, "addresses", {})
    a, b, c = ((name, ("ggjit.ops.core.shape",)) for name in "abc")
    asked = []
    with kernels_ahead.followed_by(lambda: asked.append(1) or [a, c, c]):
        kernels_ahead.announce([a, b])
        assert kernels_ahead.n_ahead("a") == 3 and asked == [1]
        CACHE.addresses |= {a: 1, b: 1}
        kernels_ahead.announce([a, b])
        assert kernels_ahead.n_ahead("c") == 1 and asked == [1]
    CACHE.addresses.clear()
    kernels_ahead.announce([b])
    assert kernels_ahead.n_ahead("b") == 1 and asked == [1]


def test_a_prompt_counts_the_kernels_of_its_first_token(monkeypatch):
    asked, announce = [], kernels_ahead.announce

    def seen(kernels):
        later = getattr(kernels_ahead._after, "kernels", list)
        asked.append((set(kernels), set(later())))
        announce(asked[-1][0])
    monkeypatch.setattr("ggjit.cpu.cpu_plan.announce", seen)
    with load_model(n_ctx=64, n_threads=1) as m:
        m.decode([1, 2, 3])
        m.decode([4])
    (prompt, later), (token, _) = asked[-2:]
    assert token == later and token - prompt


def test_plans_announce_their_kernels(monkeypatch):
    seen = []
    monkeypatch.setattr("ggjit.cpu.cpu_plan.announce", lambda kernels: seen.extend(name for name, _ in kernels))
    x = gg.from_numpy(gg.Context(), np.ones((2, 8), np.float32), "x")
    gg.compute(gg.soft_max(gg.sqr(x)))
    assert any(name.startswith("soft_max") for name in seen)
