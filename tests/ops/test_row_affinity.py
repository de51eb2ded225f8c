"""Moving bytes, and handing rows out to threads."""
import itertools

import numpy as np
import pytest

from ggjit.ops.matmul.repack import codes
from ggjit.ops.native.jit import native
from ggjit.ops.native.node import CHUNK, S_ABORT, S_DEADLINE
from ggjit.ops.native.row_affinity import (
    BITS,
    LIGHT_NANOSECONDS,
    affinity_chunk,
    affinity_next,
    affinity_next_but_last,
    countable,
    light_chunk,
    own_first,
)
from ggjit.ops.native.simd import B
from ggjit.ops.types.shared.moves import AHEAD, FAR, LINE, LONG, SHORT, STRING, move_bytes


@native("i64(i64, i64)")
def chunk_of(n, nth):
    return affinity_chunk(n, nth)


@native("i64(i64, i64, i64, i64, i64, i64)")
def take(node, ith, nth, sync, chunk, n):
    return affinity_next(node, ith, nth, sync, chunk, n)


@native("i64(i64, i64, i64, i64, i64, i64)")
def take_but_last(node, ith, nth, sync, chunk, n):
    return affinity_next_but_last(node, ith, nth, sync, chunk, n)


@native("i64(i64, i64, i64)")
def light_chunk_of(n, nth, nanoseconds):
    return light_chunk(n, nth, nanoseconds)


@native("i64(i64, i64, i64, i64)")
def first_of(ith, nth, chunk, n):
    return own_first(ith, nth, chunk, n)


@native("i64(i64, i64)")
def counted(chunk, n):
    return countable(chunk, n)


@native("i64(i64, i64, i64, i64)")
def move(dst, src, n, together):
    move_bytes(dst, src, n, together)
    return 0


class Rows:
    """n rows of one node, and threads that ask for them one after the other."""

    def __init__(self, n, nth):
        self.n, self.nth, self.chunk = n, nth, chunk_of(n, nth)
        self.node, self.sync = np.zeros(CHUNK // 8 + 2, np.int64), np.zeros(128, np.int64)
        self.sync[S_DEADLINE // 8] = np.iinfo(np.int64).max

    def take(self, ith, take=take):
        """The rows of the next chunk of a thread."""
        start = take(self.node, ith, self.nth, self.sync, self.chunk, self.n)
        return range(start, min(self.n, start + self.chunk))


@pytest.mark.parametrize("nth", [1, 2, 3, 5, 8, 9, 21, 33, 64, 65, 200])
def test_every_row_once(nth):
    rng = np.random.default_rng()
    for n in (0, 1, 2, nth, 8 * nth, 8 * nth + 1, 64, 65, *rng.integers(1, 3000, 5).tolist()):
        rows, taken, busy, how = Rows(n, nth), [], list(range(nth)), rng.choice([take, take_but_last])
        while busy:
            ith = int(rng.choice(busy))
            mine = rows.take(ith, how)
            taken += mine
            if not mine:
                busy.remove(ith)
        assert sorted(taken) == list(range(n)), (n, nth)


@pytest.mark.parametrize("nth", [1, 2, 3, 8, 64])
def test_a_thread_begins_where_its_own_rows_begin(nth):
    for n in (1, nth, 64, 65, 999, 5632):
        for chunk in (1, 16, 64, 1000):
            for ith in range(nth):
                rows = Rows(n, nth)
                rows.chunk = counted(chunk, n)
                assert rows.chunk % chunk == 0 and (rows.chunk == chunk or n > BITS * chunk)
                first = first_of(ith, nth, rows.chunk, n)
                assert first >= n or rows.take(ith).start == first


@pytest.mark.parametrize("nth", [2, 3, 8, 64])
def test_equally_fast_threads_keep_their_rows(nth):
    n = 16 * nth
    rows, taken = Rows(n, nth), [[] for _ in range(nth)]
    for _ in range(16):
        for ith in range(nth):
            taken[ith] += rows.take(ith)
    assert taken == [list(range(16 * ith, 16 * ith + 16)) for ith in range(nth)]


def test_who_is_done_helps_from_the_end():
    rows = Rows(160, 2)
    mine = [row for _ in range(8) for row in rows.take(0)]
    assert mine == list(range(80))
    assert rows.take(0) == range(150, 160)
    assert rows.take(1) == range(80, 90)


def test_the_last_rows_of_a_thread_are_left_to_it():
    rows = Rows(160, 2)
    mine = [rows.take(0, take_but_last) for _ in range(16)]
    assert [m.start for m in mine if m] == [*range(0, 80, 10), *range(150, 80, -10)]
    assert rows.take(1, take_but_last) == range(80, 90) and not rows.take(1, take_but_last)


def test_light_rows_are_handed_out_in_fewer_chunks():
    assert light_chunk_of(128, 2, 0) == light_chunk_of(128, 2, 4 * LIGHT_NANOSECONDS - 1) == 64
    assert light_chunk_of(128, 2, 4 * LIGHT_NANOSECONDS) == 32
    assert light_chunk_of(128, 2, 1 << 40) == chunk_of(128, 2) == 8
    assert all(light_chunk_of(128, nth, 0) == chunk_of(128, nth) for nth in (1, 9, 64, 200))


def test_a_thread_without_rows_of_its_own_takes_none():
    rows = Rows(12, 8)
    rows.chunk = 2                              # six chunks
    assert not rows.take(7) and not rows.take(6) and rows.take(5) == range(10, 12)


def test_nothing_is_handed_out_after_an_abort():
    rows = Rows(1000, 2)
    assert rows.take(0) and rows.take(1)
    rows.sync[S_ABORT // 8] = 1
    assert not rows.take(0) and not rows.take(1)


@pytest.mark.parametrize("skew", [0, 1, 7, None])           # None: both sides start at one place in a line
@pytest.mark.parametrize("together", [0, FAR])
def test_bytes_are_moved_and_no_others(skew, together):
    rng = np.random.default_rng()
    edges = [m + d for m in (0, B, 4 * B, SHORT, LONG, LONG + AHEAD, STRING, FAR) for d in (-5, -4, -1, 0, 1, 4, 5)]
    some = [*rng.integers(0, LONG + 100, 40).tolist(), *rng.integers(LONG, FAR, 9).tolist()]
    for n in sorted({k for k in edges + some if k >= 0}):
        src, dst = (rng.integers(0, 256, n + 2 * B + LINE, np.uint8) for _ in range(2))
        at, expected = B + ((src.ctypes.data + 3 - B - dst.ctypes.data) % LINE if skew is None else skew), dst.copy()
        expected[at:at + n] = src[3:3 + n]
        move(dst.ctypes.data + at, src.ctypes.data + 3, n, together)
        assert np.array_equal(dst, expected), n


def test_chunks_of_rows_are_even():
    """Threads that take them in turns have the same number of units, but for one."""
    for units, most, nth in itertools.product(range(1, 80), (1, 3, 8), (1, 2, 3, 8)):
        chunks = codes.even_chunks.py_func(units, most, nth)
        sizes = np.diff([codes.even_start.py_func(units, i, chunks) for i in range(chunks + 1)])
        assert sizes.sum() == units and 0 < sizes.min() and sizes.max() <= most
        assert np.ptp([sizes[ith::nth].sum() for ith in range(nth)]) <= 1


def test_weights_count_half_where_many_columns_hide_their_reading():
    """The matrices gate and down of a small model are cut by columns in a prompt of 128, those of a larger one by rows.
    """
    cut = codes.cut_by_columns.py_func
    assert cut(1536, 128, 768, 1536 * 360, 2) and cut(576, 128, 1920, 576 * 960, 2)
    assert not cut(1536, 32, 768, 1536 * 360, 2) and not cut(1536, 128, 768, 1536 * 360, 8)
    assert not cut(4864, 128, 1024, 4864 * 952, 2)
