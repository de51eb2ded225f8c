"""One device made of several (engine/meta): the numbers of one device, over CPU devices, foreign memory, workers."""
import numpy as np
import pytest
from helpers.numpy_device import NumpyDevice

import ggjit as gg
from ggjit.meta.split import result_of
from ggjit.ops.core.split import MIRRORED, PARTIAL, SplitState
from ggjit.ops.matmul.repack.layouts import LAYOUTS

CPU = gg.registry.device("CPU")
rng = np.random.default_rng()


def cut(**axes):
    return lambda t: axes.get(t.name)


def on(where, build, values):
    """(tensors by name, result) of build(**leaves), values set."""
    ctx = gg.Context()
    with ctx:
        leaves = {n: ctx.new_tensor(type, a.shape[::-1], n) for n, (type, a) in values.items()}
        gg.alloc_ctx_tensors(ctx, where)
        for n, t in leaves.items():
            t.set(values[n][1])
        return leaves, build(**leaves)


def floats(*shape, type=gg.F32):
    return type, rng.standard_normal(shape).astype(np.float32)


def meta(split, n=2, devices=None):
    return gg.meta_device(devices or [CPU] * n, split).init_backend("" if devices else "n_threads=1")


def both(build, split, **values):
    """(result of one device, of the meta device)"""
    one, many = gg.init_backend("CPU", n_threads=1, fuse=0), meta(split)
    got = [gg.compute(on(b, build, values)[1], backend=b) for b in (one, many)]
    return got


# ---------------------------------------------------------------- numbers
def ffn(up, gate, down, x):
    return gg.rms_norm(gg.add(gg.mul_mat(down, gg.mul(gg.silu(gg.mul_mat(gate, x)), gg.mul_mat(up, x))), x), 1e-5)


@pytest.mark.parametrize("type", [gg.F32, gg.F16, gg.Q8_0, gg.Q4_0])
def test_two_halves_compute_what_one_device_does(type):
    values = dict(up=floats(96, 64, type=type), gate=floats(96, 64, type=type), down=floats(64, 96, type=type),
                  x=floats(5, 64))
    want, got = both(ffn, cut(up=(1, (32, 64)), gate=(1, (32, 64)), down=(0, (32, 64))), **values)
    np.testing.assert_allclose(got, want, atol=2e-5 if type is gg.F32 else 2e-2)


@pytest.mark.parametrize("build,axes", [
    (lambda w, x, v: gg.mul_mat(w, x), dict(w=1)),                               # rows of the result
    (lambda w, x, v: gg.mul_mat(w, x), dict(x=1)),                               # columns
    (lambda w, x, v: gg.scale(gg.silu(gg.mul_mat(w, x)), 2.0), dict(w=1)),
    (lambda w, x, v: gg.soft_max(gg.mul_mat(w, x)), dict(w=1)),                  # needs whole rows: gathered
    (lambda w, x, v: gg.norm(gg.mul_mat(w, x), 1e-5), dict(x=1)),
    (lambda w, x, v: gg.add(gg.mul_mat(w, x), v), dict(w=1)),                    # v whole beside parts: gathered
    (lambda w, x, v: gg.add(gg.mul_mat(w, x), v), dict(w=1, v=0)),
    (lambda w, x, v: gg.cont(gg.transpose(gg.mul_mat(w, x))), dict(w=1)),
    (lambda w, x, v: gg.cont(gg.permute(gg.reshape_3d(gg.mul_mat(w, x), 4, 2, 6), 0, 2, 1, 3)), dict(w=1)),
    (lambda w, x, v: gg.reshape_1d(gg.mul_mat(w, x), 48), dict(x=1)),
    (lambda w, x, v: gg.sum_rows(gg.mul_mat(w, x)), dict(w=1)),
    (lambda w, x, v: gg.get_rows(w, gg.argmax(gg.mul_mat(w, x))), {})])
def test_parts_have_the_bits_of_the_whole(build, axes):
    """Nothing is added across devices, so equal means equal."""
    want, got = both(build, cut(**axes), w=floats(8, 16), x=floats(6, 16), v=floats(8))
    np.testing.assert_array_equal(got, want)


def attention(q, k, v, mask, flash):
    """Grouped heads over caches that keep heads side by side."""
    q, k, v = (gg.permute(gg.reshape_3d(t, 8, t.ne[0] // 8, t.ne[1]), 0, 2, 1, 3) for t in (q, k, v))
    if flash:
        return gg.flash_attn_ext(q, k, v, None, 0.3, 0.0, 0.0)
    p = gg.soft_max_ext(gg.mul_mat(k, q), mask, 0.3, 0.0)
    return gg.cont_2d(gg.permute(gg.mul_mat(gg.cont(gg.transpose(v)), p), 0, 2, 1, 3), q.ne[0] * q.ne[2], q.ne[1])


@pytest.mark.parametrize("flash", [False, True])
def test_attention_by_heads(flash):
    values = dict(q=floats(5, 8 * 6), k=floats(7, 8 * 3), v=floats(7, 8 * 3), mask=floats(5, 7))
    want, got = both(lambda **t: attention(flash=flash, **t), cut(q=(0, (16, 32)), k=(0, (8, 16)), v=(0, (8, 16))),
                     **values)
    np.testing.assert_array_equal(got, want)


def test_a_cache_that_is_cut_is_written_and_read():
    """set_rows into parts, in plan after plan; the user sees whole rows."""
    backend = meta(cut(cache=0, w=1))
    values = dict(cache=floats(6, 8), w=floats(8, 4), x=floats(2, 4))
    leaves, _ = on(backend, lambda **t: t["x"], values)
    with leaves["x"].ctx as ctx:
        ids = ctx.new_tensor(gg.I64, (2,), "ids")
        gg.alloc_ctx_tensors(ctx, backend)
        ids.set(np.array([4, 1]))
        graph = gg.Graph(gg.set_rows(leaves["cache"], gg.mul_mat(leaves["w"], leaves["x"]), ids))
    gg.GraphAllocator(backend).alloc_graph(graph)
    want = values["cache"][1].copy()
    for factor in (1, 3):
        leaves["x"].set(factor * values["x"][1])
        backend.graph_compute(graph)
        want[[4, 1]] = factor * values["x"][1] @ values["w"][1].T
        np.testing.assert_allclose(leaves["cache"].numpy(), want, atol=1e-5)


def test_three_devices_with_foreign_memory():
    """Asynchronous streams over bytes that ggjit cannot reach: sums and parts pass through slots."""
    devices = [NumpyDevice(f"NP{i}", is_async=i != 1) for i in range(3)]
    backend = meta(cut(up=1, down=0), devices=devices)
    values = dict(up=floats(9, 4), down=floats(4, 9), x=floats(2, 4))
    _, y = on(backend, lambda up, down, x: gg.scale(gg.mul_mat(down, gg.sqr(gg.mul_mat(up, x))), 0.5), values)
    want = 0.5 * (values["x"][1] @ values["up"][1].T) ** 2 @ values["down"][1].T
    for _ in range(2):
        np.testing.assert_allclose(gg.compute(y, backend=backend), want, rtol=1e-4, atol=1e-4)
    assert all(d.made for d in devices)


def test_over_workers():
    pytest.importorskip("distributed")
    values = dict(up=floats(96, 64), gate=floats(96, 64), down=floats(64, 96), x=floats(5, 64))
    one = gg.init_backend("CPU", n_threads=1, fuse=0)
    want = gg.compute(on(one, ffn, values)[1], backend=one)
    with gg.cluster.local(n_workers=2) as cl:
        backend = meta(cut(up=1, gate=1, down=0), devices=cl.devices)
        got = gg.compute(on(backend, ffn, values)[1], backend=backend)
        again = both(ffn, cut(up=1, gate=1, down=0), **values)[1]
        np.testing.assert_allclose(got, want, atol=2e-5)
        np.testing.assert_array_equal(got, again)


def test_beside_other_devices_in_a_scheduler():
    backend, cpu = meta(cut(up=1, down=0)), gg.init_backend("CPU", n_threads=1)
    values = dict(up=floats(9, 4), down=floats(4, 9))
    leaves, _ = on(backend, lambda up, down: up, values)
    host = gg.from_numpy(gg.Context(), floats(2, 4)[1], "host")
    y = gg.mul_mat(leaves["down"], gg.relu(gg.mul_mat(leaves["up"], host)))
    sched, graph = gg.Scheduler([backend, cpu]), gg.Graph(y)
    for _ in range(3):
        with host.write() as a:
            a[...] = rng.standard_normal(a.shape)
        sched.graph_compute(graph)
        want = np.maximum(host.numpy() @ values["up"][1].T, 0) @ values["down"][1].T
        np.testing.assert_allclose(sched.numpy(y), want, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(gg.compute(gg.scale(y, 1.0), backend=backend), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("repack", [False, True])
def test_a_decoder_over_two_devices(repack):
    from ggjit.models import load_model, tensor_split
    one = load_model(n_threads=1, n_ctx=64, repack=repack)
    many = load_model(backend=meta(tensor_split(one.file, 2)), n_gpu_layers=-1, n_ctx=64, repack=repack)
    where = many.weights["blk.0.ffn_up.weight"].buffer
    assert where.buft.name == ("META_REPACK" if repack and LAYOUTS else "META")
    ids = one.tokenize("It is a truth universally acknowledged")
    want, got = one.logits(ids), many.logits(ids)
    np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())
    texts = ["".join(m.generate("It is", n_predict=12, ignore_eos=True)) for m in (one, many)]
    assert texts[0] == texts[1]
    for m in (one, many):
        m.free()


# ---------------------------------------------------------------- memory, names, refusals
def test_parameters_in_host_memory():
    """On one device they are read where they lie; several get copies by a scheduler."""
    w = gg.set_param(gg.tensor(floats(8, 64)[1], name="w"))
    y = gg.mul_mat(w, gg.tensor(floats(4, 64)[1], name="x"))
    want = gg.compute(y)
    for where in (meta(cut(w=1)), meta(cut(w=1), devices=[NumpyDevice("A"), NumpyDevice("B")])):
        np.testing.assert_allclose(gg.compute(y, backend=where), want, atol=1e-4)


def test_bytes_go_in_and_out_as_of_one_device():
    ctx, backend = gg.Context(), meta(cut(a=(1, (1, 3)), b=0, q=(0, (32, 64))))
    a, b, q = (ctx.new_tensor(type, ne, n) for type, ne, n in ((gg.F32, (6, 4, 2), "a"), (gg.F16, (4, 3), "b"),
                                                               (gg.Q8_0, (96, 2), "q")))
    gg.alloc_ctx_tensors(ctx, backend)
    for t in (a, b, q):
        x = rng.standard_normal(t.shape).astype(np.float32)
        t.set(x)
        np.testing.assert_allclose(t.numpy(), x, atol=0.05)
        raw = rng.bytes(t.nbytes)
        t.set_bytes(raw)
        assert t.bytes() == raw and t.bytes(3, 7) == raw[3:10]
        t.set_bytes(b"\1\2\3", 5)
        assert t.bytes() == raw[:5] + b"\1\2\3" + raw[8:]
        gg.tensor_memset(t, 0, 4, 8)
        assert t.bytes(4, 8) == bytes(8)
    view = gg.view_1d(a, 6, 24)
    gg.view_init(view)
    assert view.bytes() == a.bytes(24, 24)
    copy = gg.Context().new_tensor(gg.F32, (6, 4, 2), "copy")
    gg.alloc_ctx_tensors(copy.ctx, gg.init_backend("CPU"))
    gg.tensor_copy(a, copy)
    assert copy.bytes() == a.bytes()


def test_states_of_results():
    ctx = gg.Context()
    w, x, h = (ctx.new_tensor(gg.F32, ne) for ne in ((8, 6), (8, 3), (4, 6, 3)))
    y = gg.mul_mat(w, x)
    assert result_of(y, [SplitState(1, (2, 4)), MIRRORED]) == SplitState(0, (2, 4))
    assert result_of(y, [SplitState(0, (2, 6)), SplitState(0, (2, 6))]) == PARTIAL
    assert result_of(gg.reshape_2d(h, 24, 3), [SplitState(1, (2, 4))]) == SplitState(0, (8, 16))
    assert result_of(gg.permute(h, 0, 2, 1, 3), [SplitState(1, (2, 4))]) == SplitState(2, (2, 4))
    for bad in (lambda: result_of(y, [SplitState(0, (2, 6)), SplitState(0, (4, 4))]),
                lambda: result_of(gg.view_1d(h, 4, 16), [SplitState(1, (2, 4))]),
                lambda: result_of(gg.argsort(w, 0), [SplitState(0, (2, 6))])):
        with pytest.raises(gg.NotSupported):
            bad()


def test_what_is_no_meta_device():
    with pytest.raises(gg.ParamError, match="2 to 16 devices, got 1"):
        gg.meta_device([CPU])
    with pytest.raises(gg.TypeMismatch, match="Device"):
        gg.meta_device(["CPU", "CPU"])
    with pytest.raises(gg.TypeMismatch, match="split is a function"):
        gg.meta_device([CPU, CPU], {"w": 1})
    for answer, match in ((7, "axis 0 to 3"), ((1, (4, 4)), "add up to 6"), ((1, (0, 6)), "at least one"),
                          ((0, (20, 12)), "multiples of 32"), ("x", "axis 0 to 3")):
        ctx = gg.Context()
        t = ctx.new_tensor(gg.Q8_0, (32, 6), "w")
        with pytest.raises(gg.GgjitError, match=match):
            gg.alloc_ctx_tensors(ctx, meta(lambda t, answer=answer: answer))
        assert t.buffer is None
    assert [gg.meta_split_axis_name(n) for n in (0, 3, 10, 11, 98, 99)] == ["0", "3", "MIRRORED", "PARTIAL", "NONE",
                                                                            "UNKNOWN"]
    with pytest.raises(gg.IndexRangeError, match="meta_split_axis_name"):
        gg.meta_split_axis_name(4)
    device = gg.meta_device([CPU, CPU])
    assert device.type == "meta" and device.devices == (CPU, CPU) and device.props["memory_total"] > 0
