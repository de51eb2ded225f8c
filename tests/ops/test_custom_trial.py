"""Own ops cannot kill the process: first runs are checked, and what they leave unwritten is told."""
import ctypes
import gc
import random
import types
import warnings
import weakref

import numpy as np
import pytest
from numba import njit

import ggjit as gg
from ggjit.graphs.plan_node import plan_nodes
from ggjit.ops.elementwise import custom_trial
from ggjit.ops.elementwise.custom_bounds import indexes_by_values

N = 64


CPUS = [gg.init_backend("CPU", n_threads=n) for n in (1, 2)]        # a function is compiled once for both


def tensor(n=N):
    return gg.tensor(np.random.default_rng(0).random((4, n), np.float32))


def test_a_write_past_the_array_is_an_error_with_its_line():
    @njit
    def past(dst, a, ith, nth):
        for i in range(len(a)):
            dst[i + 1] = a[i]
    x = tensor()
    for cpu in (*CPUS, *CPUS):                              # not only at first
        with pytest.raises(gg.GgjitError, match=r"past raised IndexError.*custom_trial.py, line \d+\): dst\[i \+ 1\]"):
            gg.compute(gg.map_custom1(x, past), backend=cpu)
    assert gg.compute(gg.neg(x), backend=cpu).shape == (4, N)


def test_a_write_behind_numbas_back():
    @njit
    def wide(dst, a, ith, nth):
        w = np.lib.stride_tricks.as_strided(dst, (dst.shape[0] + 1, dst.shape[1]), dst.strides)
        for i in range(w.shape[0]):
            for j in range(w.shape[1]):
                w[i, j] = 1.0
    for cpu in CPUS:
        with pytest.raises(gg.GgjitError, match=r"wide writes outside its result, an array of shape \(4, 64\)"):
            gg.compute(gg.map_custom1(tensor(), wide), backend=cpu)


def test_sources_are_not_written():
    @njit
    def spoils(dst, a, ith, nth):
        dst[:] = a
        a[0, 0] = 7
    x = tensor()
    before = x.numpy()
    for cpu in CPUS:
        with pytest.raises(gg.GgjitError, match="writes into source 0"):
            gg.compute(gg.map_custom1(x, spoils), backend=cpu)
        np.testing.assert_array_equal(x.numpy(), before)


@pytest.mark.parametrize("jitted", [True, False])
def test_what_is_left_unwritten_is_told_and_is_nan_in_every_run(jitted):
    def half(dst, a, ith, nth):
        dst[ith:2:nth] = a[ith:2:nth]
    f, x = njit(half) if jitted else half, tensor()
    with pytest.warns(gg.GgjitWarning, match=r"half leaves 128 of 256 values .* first at \[2, 0\]") as told:
        for cpu in (*CPUS, *CPUS, *CPUS):
            y = gg.compute(gg.map_custom1(x, f), backend=cpu)
            np.testing.assert_array_equal(y[:2], x.numpy()[:2])
            assert np.isnan(y[2:]).all()
    assert [(w.filename, w.lineno) for w in told] == [(__file__, half.__code__.co_firstlineno)]     # once


def test_a_function_that_returns_instead_of_writing():
    def doubled(dst, a, ith, nth):
        return 2 * a
    with pytest.warns(gg.GgjitWarning, match=r"256 of 256 .* `dst\[...\] = values` writes; .*`return` do not"):
        assert np.isnan(gg.compute(gg.map_custom1(tensor(), doubled))).all()


@pytest.mark.parametrize("jitted", [True, False])
def test_right_functions_are_left_alone(jitted):
    def double(dst, a, ith, nth):
        for i in range(ith, len(a), nth):
            dst[i] = 2 * a[i]
    x, f = tensor(), njit(double) if jitted else double
    for cpu in CPUS:
        y = gg.map_custom1(x, f)
        graph = gg.Graph(y)
        gg.GraphAllocator(cpu).alloc_graph(graph)
        plan = cpu.graph_plan_create(graph)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(5):
                plan.compute()
                np.testing.assert_array_equal(plan.numpy(y), 2 * x.numpy())
            gg.compute(gg.map_custom1_inplace(gg.dup(x), f), backend=cpu)


def test_shapes_that_change_are_checked_again():
    @njit
    def sixty_four(dst, a, ith, nth):
        for i in range(len(a)):
            for j in range(64):
                dst[i, j] = a[i, j]
    for cpu in CPUS:
        for _ in range(4):
            gg.compute(gg.map_custom1(tensor(64), sixty_four), backend=cpu)
        with pytest.raises(gg.GgjitError, match="IndexError"):
            gg.compute(gg.map_custom1(tensor(63), sixty_four), backend=cpu)


@njit
def put(d, i, value):
    d[i, 0] = value


helpers = types.ModuleType("helpers")
helpers.put = put


def test_helpers_are_bounds_checked():
    put(np.zeros((1, 1), np.float32), 0, 1.0)               # compiled already, without checks

    @njit
    def by_name(dst, a, ith, nth):
        put(dst, 10**8, a[0, 0])

    @njit
    def by_module(dst, a, ith, nth):
        helpers.put(dst, 10**8, a[0, 0])

    @njit
    def by_itself(dst, a, ith, nth):
        if ith < 10**8:
            by_itself(dst, a, 10**8, nth)
        else:
            dst[ith, 0] = 1
    for f in (by_name, by_module, by_itself):
        with pytest.raises(gg.GgjitError, match=f"{f.__name__} raised IndexError"):
            gg.compute(gg.map_custom1(tensor(), f))


def test_indices_read_from_values_stay_checked():
    @njit
    def rows(dst, a, at, ith, nth):
        for i in range(ith, len(dst), nth):
            dst[i] = a[at[i]]
    at = gg.tensor(np.array([3, 2, 1, 0], np.int32))
    x = tensor()
    y = gg.map_custom2(x, at, rows)
    for _ in range(4):
        np.testing.assert_array_equal(gg.compute(y), x.numpy()[::-1])
    at.set(np.array([0, 1, 10**8, 3], np.int32))
    with pytest.raises(gg.GgjitError, match=r"rows raised IndexError.* line \d+\): dst\[i\] = a\[at\[i\]\]"):
        gg.compute(y)


def _loops(dst, a, b, ith, nth):
    for i in range(ith, dst.shape[0], nth):
        row = a[i]
        total = 0.0
        for j in range(len(row)):
            if row[j] > 0:
                total += b[i, j]
        dst[i, a.shape[1] - 1] = total


def _read_index(dst, a, b, ith, nth):
    dst[0, 0] = b[int(a[0, 0]), 0]


def _largest(dst, a, b, ith, nth):
    best = 0
    for i in range(a.shape[0]):
        if a[i, 0] > a[best, 0]:
            best = i
    dst[best, 0] = 1


def _until_zero(dst, a, b, ith, nth):
    i = 0
    while a[i, 0] != 0:
        i += 1


def _until_zero_or_the_end(dst, a, b, ith, nth):
    for i in range(10**6):
        if a[i, 0] == 0:
            break
        dst[i, 0] = 1


def _where_large(dst, a, b, ith, nth):
    if a[0, 0] > 5:
        dst[10**6, 0] = 1


def _listed(dst, a, b, ith, nth):
    rows = [0]
    rows.append(int(a[0, 0]))
    for r in rows:
        dst[r, 0] = 1


def _through_a_view(dst, a, b, ith, nth):
    rows = np.zeros((2, 3), np.int64)
    row = rows[0]
    row[0] = int(a[0, 0])
    dst[rows[0, 0], 0] = 1


def _through_names(dst, a, b, ith, nth):
    rows = np.zeros(4).astype(np.int64)
    both = rows, dst
    put(np.reshape(both[0], (2, 2)), 0, a[0, 0])
    dst[rows[0], 0] = 1


def _in_place(dst, a, b, ith, nth):
    rows = np.zeros(4, np.int64)
    later = rows[1:]
    later += int(a[0, 0])
    dst[rows[1], 0] = 1


def _where_decided(dst, a, b, ith, nth):
    rows, far = np.zeros(1, np.int64), 10**6
    if a[0, 0] > 5:
        rows[0] = far
    dst[rows[0], 0] = 1


def _sums_in_a_view(dst, a, b, ith, nth):
    sums = np.zeros((2, a.shape[1]), np.float32)
    first = sums[0]
    for i in range(a.shape[0]):
        first += a[i]
        dst[i] = sums[0]


def _clipped(dst, a, b, ith, nth):
    for i in range(ith, a.shape[0], nth):
        for j in range(a.shape[1]):
            if a[i, j] > 0:
                dst[i, j] = a[i, j]
            else:
                dst[i, j] = 0


def _count_read(dst, a, b, ith, nth):
    for i in range(int(a[0, 0])):
        dst[i, 0] = 0


def _made_so_long(dst, a, b, ith, nth):
    dst[np.sqrt(np.zeros(int(a[0, 0]))).shape[0], 0] = 1


def _found_so_many(dst, a, b, ith, nth):
    dst[len(np.nonzero(a)[0]), 0] = 1


@njit
def copy(x):
    return np.zeros(int(x[0, 0]))


def _made_so_long_by_a_helper(dst, a, b, ith, nth):
    dst[len(copy(a)), 0] = 1


def _appended_so_often(dst, a, b, ith, nth):
    found = [0]
    for i in range(a.shape[0]):
        if a[i, 0] > 0:
            found.append(i)
    dst[len(found) - 1, 0] = 1


def _one_of_two(dst, a, b, ith, nth):
    x = a
    if a[0, 0] > 0:
        x = b
    dst[len(x) - 1, 0] = 1


def _as_long_as_given(dst, a, b, ith, nth):
    sums, like = np.zeros(len(a), np.float32), np.zeros_like(a)
    sums += a[:, 0]
    like[0] = a[0] + b[0]
    for i in range(len(sums)):
        for j in range((like * 2).shape[1]):
            dst[i, j] = sums[i] + like[i, j]


def _reshaped(dst, a, b, ith, nth):
    for i in range(a.reshape(b[0, 0], -1).shape[0]):
        dst[i, 0] = 1


def _too_short(dst, a, b, ith, nth):
    sums = np.zeros(int(b[0, 0]))
    for i in range(a.shape[0]):
        sums[i] = 1


@njit
def first_of(x):
    return x[0]


def _too_short_for_a_helper(dst, a, b, ith, nth):
    dst[0, 0] = first_of(np.unique(a))


def _sums_of_rows(dst, a, b, ith, nth):
    most, total = [0.0], np.zeros(len(a))
    for i in range(len(a)):
        row = a[i]
        most[0] = max(most[0], first_of(row))
        total[i] = np.sort(row)[0]
    for i in range(len(b)):
        row = b[i]
        dst[i, 0] = row[0] + total[i] + most[0]


def _mask(dst, a, b, ith, nth):
    dst[0][a[0] > 0] = 1


def _helper_index(dst, a, b, ith, nth):
    put(dst, int(a[0, 0]), 1.0)


def _helper_value(dst, a, b, ith, nth):
    put(dst, ith, a[0, 0])


def _whole_rows(dst, a, b, ith, nth):
    rows = slice(ith, len(dst), nth)
    dst[rows] = np.exp(a[rows]) / b[rows].sum()


def _at_random(dst, a, b, ith, nth):
    dst[np.random.randint(0, 5), 0] = 1


@njit
def random_place():
    return int(random.random() * 5)


def _at_random_by_a_helper(dst, a, b, ith, nth):
    dst[random_place(), 0] = 1


c_rand = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 4)


def _where_c_says(dst, a, b, ith, nth):
    dst[c_rand(), 0] = 1


def _random_values(dst, a, b, ith, nth):
    draw = np.random.random
    for i in range(ith, a.shape[0], nth):
        for j in range(a.shape[1]):
            dst[i, j] = a[i, j] / np.linalg.norm(b) if draw() < 0.5 else 0


@njit
def tried(dst, i):
    try:
        dst[i, 0] = 1
    except Exception:
        dst[0, 0] = 2


def _caught(dst, a, b, ith, nth):
    if ith == 0:
        dst[:] = 0
        for i in range(2000):
            tried(dst, 1000 * i)


@pytest.mark.parametrize("function,expected", [
    (_at_random, True), (_at_random_by_a_helper, True), (_where_c_says, True), (_random_values, False),
    (_caught, True), (_loops, False), (_whole_rows, False), (_helper_value, False), (_read_index, True),
    (_largest, True),
    (_until_zero, True), (_until_zero_or_the_end, True), (_where_large, True), (_listed, True), (_clipped, False),
    (_through_a_view, True), (_through_names, True), (_in_place, True), (_where_decided, True),
    (_sums_in_a_view, False), (_count_read, True), (_mask, True), (_helper_index, True),
    (_made_so_long, True), (_made_so_long_by_a_helper, True), (_found_so_many, True), (_appended_so_often, True),
    (_one_of_two, True), (_as_long_as_given, False), (_reshaped, True), (_too_short, True),
    (_too_short_for_a_helper, True), (_sums_of_rows, False)])
def test_which_functions_index_by_values(function, expected):
    assert indexes_by_values(njit(function), 3) is expected


def test_an_index_error_that_is_caught_writes_nothing():
    f, x = njit(_caught), tensor()
    for cpu in (*CPUS, *CPUS):
        y = gg.compute(gg.map_custom2(x, x, f), backend=cpu)
        assert y[:, 0].tolist() == [2, 0, 0, 0]


def test_the_functions_own_options_hold_in_the_trial():
    @njit(error_model="numpy")
    def inverse(dst, a, ith, nth):
        for i in range(ith, len(a), nth):
            for j in range(a.shape[1]):
                dst[i, j] = 1 / (a[i, j] * np.float32(0))
    assert np.isinf(gg.compute(gg.map_custom1(tensor(), inverse))).all()


def test_large_arrays_have_their_bounds_checked(monkeypatch):
    monkeypatch.setattr(custom_trial, "MAX_NBYTES", 1000)

    @njit
    def past(dst, a, ith, nth):
        dst[len(dst) * 10**6] = a[0]
    with pytest.raises(gg.GgjitError, match="past raised IndexError"):
        gg.compute(gg.map_custom1(tensor(), past))


def test_compiled_code_is_used_again_by_later_nodes():
    @njit
    def double(dst, a, ith, nth):
        for i in range(ith, len(a), nth):
            dst[i] = 2 * a[i]
    for n in (64, 64, 32, 48):
        x = tensor(n)
        np.testing.assert_array_equal(gg.compute(gg.map_custom1(x, double)), 2 * x.numpy())
        gc.collect()
    entries, = double._ggjit_entries.values()
    assert 1 <= len(entries) <= 2
    gone = weakref.ref(double)
    del double, x, entries
    gc.collect()
    assert gone() is None


def test_what_a_python_function_raises_is_shown_as_the_users_lines():
    def fails(dst, a, ith, nth):
        raise KeyError("my key")
    with pytest.raises(KeyError, match="my key") as raised:
        gg.compute(gg.map_custom1(tensor(), fails))
    shown = "\n".join(raised.value._render_traceback_())
    assert 'raise KeyError("my key")' in shown and "cpu_plan.py" not in shown


def test_float16_is_refused_with_a_remedy():
    @njit
    def same(dst, a, ith, nth):
        dst[:] = a
    with pytest.raises(gg.TypeMismatch, match="cannot take float16.*gg.cast"):
        gg.compute(gg.map_custom1(gg.tensor(np.ones((4, 64), np.float16)), same))


def test_a_switch(monkeypatch):
    @njit
    def nothing(dst, a, ith, nth):
        pass
    monkeypatch.setenv("GGJIT_CUSTOM", "unchecked")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for cpu in CPUS:
            gg.compute(gg.map_custom1(tensor(), nothing), backend=cpu)
    monkeypatch.setenv("GGJIT_CUSTOM", "perhaps")
    for cpu in CPUS:
        with pytest.raises(gg.ParamError, match="checked or unchecked"):
            gg.compute(gg.map_custom1(tensor(), nothing), backend=cpu)


def test_a_plan_asks_once_for_the_kernel_of_each_users_node():
    x, asked = tensor(), []
    nodes = [gg.map_custom1(x, njit(_of_its_own)), gg.neg(x), gg.map_custom1(x, njit(_of_its_own)), gg.neg(x)]
    ids = np.array([t.id for t in nodes])
    parts = plan_nodes(nodes, ids, lambda t: asked.append(t.id))
    assert sorted(asked) == sorted(ids[:3]) and len(set(parts.kinds.tolist())) == 3
    assert [part.t.id for part in parts] == ids.tolist()


def _of_its_own(dst, a, ith, nth):
    dst[:] = a
