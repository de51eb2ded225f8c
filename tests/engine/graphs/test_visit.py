"""The compiled visit of a graph finds what a walk over handles finds, in the same order; freed contexts are told."""
import numpy as np
import pytest

import ggjit as gg
from ggjit.core.table import TABLE
from ggjit.graphs import visit as visits


def network(rng, ctx):
    live = [ctx.new_tensor(gg.F32, (8, 8)) for _ in range(3)] + [gg.set_param(ctx.new_tensor(gg.F32, (8, 8)))]
    with ctx:
        for _ in range(int(rng.integers(1, 60))):
            a, b = (live[k] for k in rng.integers(0, len(live), 2))
            live.append([gg.add(a, b), gg.mul(a, b), gg.sqr(a), gg.reshape_2d(gg.cont(gg.transpose(a)), 8, 8)][
                rng.integers(4)])
    return live


def test_it_is_the_walk_over_handles():
    rng = np.random.default_rng()
    for _ in range(30):
        live = network(rng, gg.Context())
        outputs = [live[k] for k in rng.integers(0, len(live), int(rng.integers(1, 4)))]
        fast, slow = visits.visit(outputs), visits._visit_handles(outputs)
        assert all(a is b for x, y in zip(fast, slow, strict=True) for a, b in zip(x, y, strict=True))


def test_handles_on_rows_that_were_given_back():
    """Their rows may be other tensors' by then: the walk goes over handles until they are gone."""
    gone, kept = gg.Context(), gg.Context()
    a = gone.new_tensor(gg.F32, (4,))
    with kept:
        y = gg.sqr(a)
    gone.free()
    others = [kept.new_tensor(gg.F32, (4,)) for _ in range(200)]
    assert TABLE.has_strays()
    with pytest.raises(gg.StaleHandle):
        gg.Graph(y)
    assert len(gg.Graph(gg.sqr(others[0]))) == 1
    del a, y
    assert len(gg.Graph(gg.sqr(others[1]))) == 1


def test_strays_that_died_are_forgotten_though_a_younger_one_lives():
    others = [t for ref in TABLE._strays if (t := ref()) is not None]      # of other tests, which stay alive
    last = None
    for _ in range(50):
        ctx = gg.Context()
        dead, last = [ctx.new_tensor(gg.F32, (4,)) for _ in range(20)], ctx.new_tensor(gg.F32, (4,))
        ctx.free()
        assert len(gg.Graph(gg.sqr(gg.Context().new_tensor(gg.F32, (4,))))) == 1
        del dead
    assert TABLE.has_strays() and len(TABLE._strays) < 50 + len(others)
    del last
    assert TABLE.has_strays() == (len(others) > 0)
