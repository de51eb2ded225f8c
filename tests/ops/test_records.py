"""Records: fields of jitted passes by name."""
import gc

import numpy as np
import pytest

from ggjit.ops.native.jit import exact, native
from ggjit.ops.native.records import JitRecord, row

STEP = np.dtype([("place", "i8"), ("near", "i8", 3)])
WALK = JitRecord("TestWalkRecord", n="i64", price="f64", size="i64[n]", bits="u8[n] = 0", gain="f64[n]",
                 seen="i64[2 * n + 1] = -1", step=(STEP, "n"), count=row("moves", "last"))
walk_at = WALK.at


@exact
def _visit(r, i):
    r.step[i].place = r.size[i] + r.seen[2 * r.n]
    for j in range(3):
        r.step[i].near[j] = 10 * i + j
    r.gain[i] = r.price * r.size[i]
    r.bits[i] += 200
    r.count.moves += 1
    r.count.last = i


@native("i64(i64)")
def walk(address):
    r = walk_at(address)
    for i in range(r.n):
        _visit(r, i)
    return r.n


def test_fields_are_read_and_written_by_name():
    rng = np.random.default_rng()
    size = rng.integers(-1000, 1000, int(rng.integers(1, 50)))
    given = WALK.of(n=len(size), price=0.25, size=size)
    assert given.seen.tolist() == [-1] * (2 * len(size) + 1) and given.count["moves"][0] == 0
    assert walk(given) == len(size)
    assert (given.step["place"] == size - 1).all() and (given.gain == 0.25 * size).all()
    assert given.step["near"].tolist() == [[10 * i, 10 * i + 1, 10 * i + 2] for i in range(len(size))]
    assert given.bits.tolist() == [200] * len(size) and given.count.tolist() == [(len(size), len(size) - 1)]
    given.price = -2.0
    walk(given)
    assert (given.gain == -2.0 * size).all() and given.bits.tolist() == [400 % 256] * len(size) and given.price == -2.0


def test_arrays_that_are_given_are_those_the_pass_writes():
    n, guard = 5, np.full(7, 9.5)
    given = WALK.of(n=n, price=1.0, size=np.arange(n), gain=guard[1:6], bits=np.zeros(n, np.uint8))
    walk(given)
    assert guard.tolist() == [9.5, 0, 1, 2, 3, 4, 9.5]


def test_a_record_lives_while_a_pass_runs_on_it():
    for _ in range(50):
        assert walk(WALK.of(n=300, price=1.0, size=np.arange(300))) == 300
        gc.collect(0)


@pytest.mark.parametrize("change", [{"price": None}, {"other": 1}, {"size": np.zeros(3)}])
def test_fields_that_are_missing_unknown_or_of_another_type_are_refused(change):
    values = {"n": 3, "price": 1.0, "size": np.zeros(3, np.int64)} | change
    if change.get("price", 0) is None:
        del values["price"]
    with pytest.raises(AssertionError, match="TestWalkRecord"):
        WALK.of(**values)


def test_a_name_is_used_once():
    with pytest.raises(AssertionError, match="TestWalkRecord"):
        JitRecord("TestWalkRecord", n="i64")
