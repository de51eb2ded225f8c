"""Custom ops (rows B9): Python functions, @njit functions, cfuncs; threads, exceptions, schedulers."""
import gc
import os
import signal
import threading
import time

import numpy as np
import pytest
from helpers import devices
from helpers.cases import run as run_case
from helpers.schedulers import world
from numba import cfunc, njit

import ggjit as gg
from ggjit.ops.core.record import OP
from ggjit.ops.core.spec import all_specs
from ggjit.ops.native.mem import ld_f32, st_f32
from ggjit.ops.native.node import DST, SRC0, addr, n_rows, ne

RNG = np.random.default_rng(3)
CUSTOM = (OP.MAP_CUSTOM1, OP.MAP_CUSTOM2, OP.MAP_CUSTOM3, OP.CUSTOM)


def array(*shape):
    return RNG.standard_normal(shape, dtype=np.float32)


def compute(y, n_threads=2):
    return gg.compute(y, backend=gg.init_backend("CPU", n_threads=n_threads))


def halve(dst, a, ith, nth):
    dst[ith::nth] = a[ith::nth] / 2


@njit
def halve_jit(dst, a, ith, nth):
    for i in range(ith, dst.shape[0], nth):
        for j in range(dst.shape[1]):
            dst[i, j] = a[i, j] / 2


@cfunc("int64(int64, int64, int64, int64)")
def halve_c(node, ith, nth, sync):
    d, x = node + DST, node + SRC0
    n = n_rows(d) * ne(d, 0)
    for i in range(ith, n, nth):
        st_f32(addr(d) + 4 * i, ld_f32(addr(x) + 4 * i) / np.float32(2))
    return 0


@pytest.mark.parametrize("op,case", [(op, c) for op in CUSTOM for c in all_specs()[op].cases()],
                         ids=lambda x: getattr(x, "name", str(x)))
@pytest.mark.parametrize("n_threads", [1, 3])
def test_cases_against_their_references_B9(op, case, n_threads):
    got, want, out = run_case(case, n_threads)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n_threads", [1, 2, 3])
@pytest.mark.parametrize("n_tasks", [-1, 1, 2])
@pytest.mark.parametrize("fun", [halve, halve_jit, halve_c], ids=["python", "njit", "cfunc"])
def test_every_kind_of_function(fun, n_tasks, n_threads):
    x = array(50, 6)
    a = gg.from_numpy(gg.Context(), x)
    y = gg.map_custom1(gg.silu(a), fun, n_tasks)
    np.testing.assert_allclose(compute(gg.scale(y, 2.0), n_threads), x / (1 + np.exp(-x)), rtol=1e-5)


@pytest.mark.parametrize("n_tasks,want", [(-1, {(0, 3), (1, 3), (2, 3)}), (1, {(0, 1)}), (2, {(0, 2), (1, 2)}),
                                          (9, {(0, 3), (1, 3), (2, 3)})])
def test_ith_and_nth(n_tasks, want):
    seen = set()
    a = gg.from_numpy(gg.Context(), array(4))
    compute(gg.map_custom1(a, lambda dst, x, ith, nth: seen.add((ith, nth)), n_tasks), 3)
    assert seen == want


def test_arrays_are_the_tensors_in_numpy_order():
    seen, ctx = {}, gg.Context()
    x = array(2, 3, 4)
    a, q, b = gg.from_numpy(ctx, x), gg.from_numpy(ctx, array(2, 32), type=gg.Q8_0), \
        gg.from_numpy(ctx, array(3), type=gg.BF16)

    def look(dst, t, p, raw, bits, ith, nth, user):
        seen.update(dst=dst.shape, t=t.copy(), p=p.copy(), raw=(raw.shape, raw.dtype), bits=(bits.shape, bits.dtype),
                    user=user, frozen=not t.flags.writeable and dst.flags.writeable)
        dst[:] = 7
    y = gg.custom(gg.I32, (5, 2), [a, gg.permute(a, 1, 2, 0, 3), q, b], look, 1, "me")
    assert (compute(y) == np.full((2, 5), 7)).all()
    np.testing.assert_array_equal(seen["t"], x)
    np.testing.assert_array_equal(seen["p"], gg.permute(a, 1, 2, 0, 3).numpy())
    assert seen["dst"] == (2, 5) and seen["user"] == "me" and seen["frozen"]
    assert seen["raw"] == ((2, 34), np.uint8) and seen["bits"] == ((3,), np.uint16)


def test_jitted_functions_see_strides_and_many_sources():
    @njit
    def mix(dst, a, b, c, ith, nth):
        for i in range(ith, dst.shape[0], nth):
            for j in range(dst.shape[1]):
                dst[i, j] = a[i, j] * b[j, i] + c[0]
    x, z = array(6, 4), array(4, 6)
    ctx = gg.Context()
    a, c = gg.from_numpy(ctx, x), gg.from_numpy(ctx, np.array([5], np.int32))
    b = gg.permute(gg.permute(gg.from_numpy(ctx, z), 1, 0, 2, 3), 1, 0, 2, 3)
    y = gg.custom(gg.F32, (4, 6), [a, b, c], mix)
    np.testing.assert_allclose(compute(y), x * z.T + 5, rtol=1e-6)


def test_in_place_variants_write_their_source():
    ctx = gg.Context()
    a = gg.from_numpy(ctx, np.ones((4, 3), np.float32))
    y = gg.map_custom1_inplace(a, halve)
    assert y.view_src is a
    compute(y)
    assert (a.numpy() == 0.5).all()


@pytest.mark.parametrize("n_threads", [1, 3])
def test_exceptions_come_out_as_they_are(n_threads):
    class Mine(Exception):
        pass

    def fail(dst, a, ith, nth):
        if ith == nth - 1:
            raise Mine("here")
        dst[ith::nth] = a[ith::nth]
    x = array(4, 3)
    a = gg.from_numpy(gg.Context(), x)
    backend = gg.init_backend("CPU", n_threads=n_threads)
    graph = gg.Graph(gg.silu(gg.map_custom1(a, fail)))
    gg.GraphAllocator(backend).alloc_graph(graph)
    for _ in range(3):
        with pytest.raises(Mine, match="here"):
            backend.graph_compute(graph)
    np.testing.assert_allclose(compute(gg.map_custom1(a, halve)), x / 2)

    @njit
    def bad(dst, a, ith, nth):
        raise ValueError("no")
    with pytest.raises(gg.GgjitError, match="bad raised"):
        compute(gg.map_custom1(a, bad))


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_ctrl_c_inside_a_python_function():
    slept = []

    def sleepy(dst, a, ith, nth):
        for _ in range(200):
            time.sleep(0.01)
            slept.append(1)
    y = gg.map_custom1(gg.from_numpy(gg.Context(), array(4)), sleepy, 1)
    threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt, match="^$"):
        compute(y)
    assert len(slept) < 200


@pytest.mark.parametrize("make,error,text", [
    (lambda a: gg.map_custom1(a, 3), gg.TypeMismatch, "takes a function, .* got 3"),
    (lambda a: gg.map_custom1(a, halve, 0), gg.ParamError, "n_tasks is .* got 0"),
    (lambda a: gg.map_custom1(a, halve, -2), gg.ParamError, "n_tasks is .* got -2"),
    (lambda a: gg.custom(gg.F32, (2,), [], halve), gg.ShapeError, "1 to 10 sources, got 0"),
    (lambda a: gg.custom(gg.F32, (2,), [a] * 11, halve), gg.ShapeError, "1 to 10 sources, got 11"),
    (lambda a: gg.map_custom1(a, halve_jit, -1, 5), gg.ParamError, "userdata goes with Python functions"),
    (lambda a: gg.custom_inplace(a, [a] * 10, halve), gg.ShapeError, "at most 9 further sources, got 10"),
    (lambda a: gg.map_custom1(a, cfunc("float64(float64)")(lambda x: x)), gg.TypeMismatch, "signature int64")])
def test_bad_arguments(make, error, text):
    a = gg.from_numpy(gg.Context(), array(4))
    n = len(a.ctx)
    with pytest.raises(error, match=text):
        make(a)
    assert len(a.ctx) == n


def test_functions_live_as_long_as_their_tensors():
    import weakref

    class Big:
        def __call__(self, dst, a, ith, nth):
            dst[:] = a
    ctx = gg.Context()
    fun = Big()
    y = gg.map_custom1(gg.from_numpy(ctx, array(4)), fun)
    watch = weakref.ref(fun)
    del fun
    gc.collect()
    assert watch() is not None
    compute(y)
    del y, ctx
    gc.collect()
    assert watch() is None


def test_under_a_scheduler_custom_ops_run_on_the_cpu_B9():
    fake = devices.Fake("A", ops={OP.UNARY, OP.SCALE})
    sched, (a, c) = world(fake)
    ctx = gg.Context()
    t = ctx.new_tensor(gg.F32, (4, 3), "t")
    gg.tensor_alloc(a.alloc_buffer(t.nbytes), t, 0)
    y = gg.silu(gg.map_custom1(gg.scale(t, 2.0), halve))
    graph = gg.Graph(y)
    x = array(3, 4)
    t.set(x)
    sched.graph_compute(graph)
    assert [s.backend.name for s in sched.splits] == ["A", "CPU"]
    np.testing.assert_allclose(sched.numpy(y), x / (1 + np.exp(-x)), rtol=1e-5)

    def fail(dst, a, ith, nth):
        raise LookupError("custom")
    bad = gg.Graph(gg.silu(gg.map_custom1(gg.scale(t, 2.0), fail)))
    with pytest.raises(LookupError, match="custom"):
        sched.graph_compute(bad)
    sched.graph_compute(graph)
    np.testing.assert_allclose(sched.numpy(y), x / (1 + np.exp(-x)), rtol=1e-5)
