"""Own ops cannot kill the process: first runs are checked, and what they leave unwritten is told."""
import warnings

import numpy as np
import pytest
from numba import njit

import ggjit as gg
from ggjit.ops.core.user_warnings import forget_told

N = 64


@pytest.fixture(params=[1, 2])
def cpu(request):
    return gg.init_backend("CPU", n_threads=request.param)


def tensor(n=N):
    return gg.tensor(np.random.default_rng(0).random((4, n), np.float32))


def test_a_write_past_the_array_is_an_error_with_its_line(cpu):
    @njit
    def past(dst, a, ith, nth):
        for i in range(len(a)):
            dst[i + 1] = a[i]
    x = tensor()
    for _ in range(2):                                      # not only at first
        with pytest.raises(gg.GgjitError, match=r"past raised IndexError.*custom_trial.py, line \d+\): dst\[i \+ 1\]"):
            gg.compute(gg.map_custom1(x, past), backend=cpu)
    assert gg.compute(gg.neg(x), backend=cpu).shape == (4, N)


def test_a_write_behind_numbas_back(cpu):
    @njit
    def wide(dst, a, ith, nth):
        w = np.lib.stride_tricks.as_strided(dst, (dst.shape[0] + 1, dst.shape[1]), dst.strides)
        for i in range(w.shape[0]):
            for j in range(w.shape[1]):
                w[i, j] = 1.0
    with pytest.raises(gg.GgjitError, match=r"wide writes outside its result, an array of shape \(4, 64\)"):
        gg.compute(gg.map_custom1(tensor(), wide), backend=cpu)


def test_sources_are_not_written(cpu):
    @njit
    def spoils(dst, a, ith, nth):
        dst[:] = a
        a[0, 0] = 7
    x = tensor()
    before = x.numpy()
    with pytest.raises(gg.GgjitError, match="writes into source 0"):
        gg.compute(gg.map_custom1(x, spoils), backend=cpu)
    np.testing.assert_array_equal(x.numpy(), before)


@pytest.mark.parametrize("jitted", [True, False])
def test_what_is_left_unwritten_is_told(cpu, jitted):
    def half(dst, a, ith, nth):
        dst[ith:2:nth] = a[ith:2:nth]
    forget_told()
    with pytest.warns(gg.GgjitWarning, match=r"half leaves 128 of 256 values .* first at \[2, 0\]"):
        gg.compute(gg.map_custom1(tensor(), njit(half) if jitted else half), backend=cpu)


@pytest.mark.parametrize("jitted", [True, False])
def test_right_functions_are_left_alone(cpu, jitted):
    def double(dst, a, ith, nth):
        for i in range(ith, len(a), nth):
            dst[i] = 2 * a[i]
    x, f = tensor(), njit(double) if jitted else double
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


def test_shapes_that_change_are_checked_again(cpu):
    @njit
    def sixty_four(dst, a, ith, nth):
        for i in range(len(a)):
            for j in range(64):
                dst[i, j] = a[i, j]
    for _ in range(4):
        gg.compute(gg.map_custom1(tensor(64), sixty_four), backend=cpu)
    with pytest.raises(gg.GgjitError, match="IndexError"):
        gg.compute(gg.map_custom1(tensor(63), sixty_four), backend=cpu)


def test_a_switch(cpu, monkeypatch):
    def nothing(dst, a, ith, nth):
        pass
    monkeypatch.setenv("GGJIT_CUSTOM", "unchecked")
    forget_told()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gg.compute(gg.map_custom1(tensor(), njit(nothing)), backend=cpu)
    monkeypatch.setenv("GGJIT_CUSTOM", "perhaps")
    with pytest.raises(gg.ParamError, match="checked or unchecked"):
        gg.compute(gg.map_custom1(tensor(), njit(nothing)), backend=cpu)
