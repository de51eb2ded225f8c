"""What every device with memory of its own keeps to, as functions of its backends."""
import numpy as np
import pytest

import ggjit as gg

RNG = np.random.default_rng(5)


def floats(*shape):
    return RNG.uniform(-1, 1, shape).astype(np.float32)


def on(backend, type, ne, values=None):
    """A tensor with memory on the backend."""
    ctx = gg.Context()
    t = ctx.new_tensor(type, ne)
    gg.alloc_ctx_tensors(ctx, backend)
    if values is not None:
        t.set(values)
    return t


def bytes_in_and_out(a):
    x = floats(3, 16)
    t = on(a, gg.F32, (16, 3), x)
    assert t.bytes() == x.tobytes() and t.bytes(4, 8) == x.tobytes()[4:12]
    t.set_bytes(b"\1\2\3\4", 8)
    gg.tensor_memset(t, 7, 12, 2)
    assert t.bytes(8, 6) == b"\1\2\3\4\7\7"
    t.buffer.clear(9)
    assert set(t.bytes()) == {9}
    gg.tensor_set_2d(t, np.arange(24, dtype=np.uint8), 4, 3, 4, 16, 6)
    want = b"".join(bytes((6 * i, 6 * i + 1, 6 * i + 2, 0)) for i in range(4))
    assert gg.tensor_get_2d(t, 4, 3, 4, 16, 4) == want[:-1]
    with pytest.raises(gg.IndexRangeError, match="are outside"):
        t.set_bytes(b"x" * 8, t.nbytes - 4)
    t.buffer.free()
    with pytest.raises(gg.StaleHandle, match="was freed"):
        t.bytes()


def copies_between_all_kinds_of_memory(*backends):
    x = floats(4, 9)
    for a in backends:
        for b in backends:
            s, d = on(a, gg.F32, (9, 4), x), on(b, gg.F32, (9, 4), 0 * x)
            gg.tensor_copy(s, d)
            np.testing.assert_array_equal(d.numpy(), x)
            gg.tensor_copy_async(a, b, s, on(b, gg.F32, (9, 4)))


def asynchronous_slots_keep_the_streams_order(a):
    t, x, y = on(a, gg.F32, (8,)), floats(8), floats(8)
    gg.tensor_set_async(a, t, x)
    first = gg.tensor_get_async(a, t)
    gg.tensor_set_async(a, t, y)
    a.synchronize()
    assert bytes(first) == x.tobytes() and t.bytes() == y.tobytes()


def asynchronous_copies_order_both_streams(a, b):
    x, y = floats(8), floats(8)
    s, d = on(a, gg.F32, (8,)), on(b, gg.F32, (8,))
    gg.tensor_set_async(a, s, x)
    gg.tensor_copy_async(a, b, s, d)
    gg.tensor_set_async(a, s, y)                    # after the copy has read it
    got = gg.tensor_get_async(b, d)
    b.synchronize()                                 # waits for the copy on the other stream
    assert bytes(got) == x.tobytes() and s.bytes() == y.tobytes()


def events(a, other):
    """other: a second stream of the same device."""
    x = floats(8)
    t = on(a, gg.F32, (8,), 0 * x)
    event = gg.event_new(a.device)
    gg.tensor_set_async(a, t, x)
    gg.event_record(event, a)
    gg.event_wait(other, event)
    got = gg.tensor_get_async(other, t)
    other.synchronize()
    assert bytes(got) == x.tobytes()
    gg.tensor_set_async(a, t, 2 * x)
    gg.event_record(event, a)
    gg.event_synchronize(event)
    np.testing.assert_array_equal(t.numpy(), 2 * x)
    gg.event_free(event)


def inputs_in_host_memory_come_through_a_scheduler(a):
    x = floats(3, 8)
    h, w = gg.from_numpy(gg.Context(), x), on(a, gg.F32, (8, 5), floats(5, 8))
    y = gg.mul_mat(w, gg.neg(h))
    np.testing.assert_allclose(gg.compute(y, backend=a), -x @ w.numpy().T, rtol=1e-4, atol=1e-6)


def a_bad_index_is_reported_and_the_next_run_is_clean(a, bad):
    table, ids = on(a, gg.F32, (8, 5), floats(5, 8)), on(a, gg.I32, (3,), np.array([0, bad, 4], np.int32))
    y = gg.get_rows(table, ids)
    graph = gg.Graph(y)
    allocator = gg.GraphAllocator(a)
    allocator.alloc_graph(graph)
    a.graph_compute(graph)                          # submitted; the error comes from `synchronize`
    with pytest.raises(gg.IndexRangeError, match=f"index {bad} is out of range"):
        a.synchronize()
    ids.set(np.array([1, 2, 3], np.int32))
    a.graph_compute(graph)
    np.testing.assert_array_equal(y.numpy(), table.numpy()[1:4])


def graphs_follow_memory_that_moved(a):
    ctx = gg.Context()
    t = ctx.new_tensor(gg.F32, (33,))
    old = gg.alloc_ctx_tensors(ctx, a)
    t.set(floats(33))
    y = gg.sqr(gg.neg(t))
    graph = gg.Graph(y)
    allocator = gg.GraphAllocator(a)
    allocator.alloc_graph(graph)
    for _ in range(3):
        a.graph_compute(graph)
    old.free()
    with pytest.raises(gg.GgjitError, match="was freed|has no memory|lost its memory"):
        a.graph_compute(graph)
    gg.alloc_ctx_tensors(ctx, a)
    x = floats(33)
    t.set(x)
    a.graph_compute(graph)
    np.testing.assert_allclose(y.numpy(), x * x, rtol=1e-6)


def what_has_no_kernel_is_refused(a):
    y = gg.map_custom1(on(a, gg.F32, (4,), floats(4)), lambda d, s, ith, nth: None)
    assert not a.supports_op(y)
    with pytest.raises(gg.NotSupported, match="Scheduler"):
        gg.compute(y, backend=a)
