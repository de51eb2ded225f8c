"""Row ids out of range: an error that names the id and the table, and nothing written there."""
import numpy as np
import pytest

import ggjit as gg

R = np.random.default_rng(5)


def floats(*shape):
    return R.uniform(-1.0, 1.0, shape).astype(np.float32)


@pytest.mark.parametrize("bad", [-1, 5, 2 ** 31 - 1, -2 ** 31])
def test_get_rows_checks_ids(bad):
    ctx = gg.Context()
    t = gg.get_rows(gg.from_numpy(ctx, floats(5, 8)), gg.from_numpy(ctx, np.int32([0, bad, 4])))
    with pytest.raises(gg.IndexRangeError, match=f"index {bad} is out of range"):
        gg.compute(t)


@pytest.mark.parametrize("bad", [-1, 5, 2 ** 40, -2 ** 63])
def test_set_rows_writes_nothing_out_of_range(bad):
    ctx = gg.Context()
    room = np.zeros((20, 8), np.float32)
    table = gg.view_2d(gg.from_numpy(ctx, room), 8, 5, 32, 8 * 32)
    node = gg.set_rows(table, gg.from_numpy(ctx, floats(3, 8)), gg.from_numpy(ctx, np.int64([2, bad, 4])))
    with pytest.raises(gg.IndexRangeError, match=f"index {bad} is out of range"):
        gg.compute(node)
    assert not room[:8].any() and not room[13:].any() and not room[[8, 9, 11]].any()


@pytest.mark.parametrize("bad", [-1, 4, 2 ** 31 - 1, -2 ** 31])
def test_ids_are_checked(bad):
    ctx = gg.Context()
    ids = gg.from_numpy(ctx, np.int32([[0], [bad], [3]]))
    with pytest.raises(gg.IndexRangeError, match=f"index {bad} is out of range"):
        gg.compute(gg.add_id(gg.from_numpy(ctx, floats(3, 1, 8)), gg.from_numpy(ctx, floats(4, 8)), ids))
    ids = gg.from_numpy(ctx, np.int32([0, bad, 3]))
    with pytest.raises(gg.IndexRangeError, match=f"index {bad} is out of range"):
        gg.compute(gg.get_rows_back(gg.from_numpy(ctx, floats(3, 8)), ids, gg.from_numpy(ctx, floats(4, 8))))


def test_a_bad_row_id_names_the_table_it_indexes():
    ctx = gg.Context()
    table = gg.set_name(gg.from_numpy(ctx, floats(3, 4)), "table")
    rows, ids = gg.from_numpy(ctx, floats(2, 4)), gg.from_numpy(ctx, np.array([1, 3], np.int64))
    with pytest.raises(gg.IndexRangeError, match="index 3 is out of range for table"):
        gg.compute(gg.set_rows(table, rows, ids))
    ids = gg.from_numpy(ctx, np.array([[0], [3]], np.int32))
    with pytest.raises(gg.IndexRangeError, match="index 3 is out of range for table"):
        gg.compute(gg.add_id(gg.from_numpy(ctx, floats(2, 1, 4)), table, ids))
    with pytest.raises(gg.IndexRangeError, match="index 3 is out of range for sum"):
        gg.compute(gg.set_name(gg.get_rows_back(rows, gg.reshape_1d(ids, 2), table), "sum"))
