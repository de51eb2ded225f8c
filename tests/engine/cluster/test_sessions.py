"""What a driver's messages can do to a worker: errors, and memory that is counted and given back."""
import socket
import threading
import time
import weakref

import numpy as np
import pytest
from helpers.clusters import step_of, workers
from helpers.device_contract import on
from helpers.timing import HANGS

import ggjit as gg
from ggjit.cluster import protocol as s
from ggjit.cluster import send_queue, wire
from ggjit.cluster.cluster import threads
from ggjit.cluster.encoding import FLAGS, NDIM, OFFS, OP_, ROW_WORDS, TYPE, Encoded
from ggjit.cluster.session import Session, WorkerDevice


# ---------------------------------------------------------------- messages that are well formed
def executed(session, ops, payload=b""):
    """(status, results) of a message."""
    header, _ = session.execute([1, ops], payload)
    return wire.unpack(header)[1:]


@pytest.fixture
def session():
    made = Session(WorkerDevice(1 << 20, 1))
    assert executed(made, [[s.ALLOC, 1, 4096], [s.FILL, 1, 0, 4096, 0]])[0] == s.OK
    yield made
    made.close()
    assert made.machine.used_nbytes == 0


@pytest.mark.parametrize("op,match", [
    ([s.ALLOC, 2, 1 << 21], "OutOfMemory"), ([s.ALLOC, 1, 64], "ParamError"), ([s.ALLOC, 3, 0], "ParamError"),
    ([s.GET, 1, 4090, 7], "IndexRangeError"), ([s.GET, 9, 0, 1], "IndexRangeError"),
    ([s.SET, 1, 4095, 2], "BadMessage"), ([s.FILL, 1, 0, 4097, 0], "IndexRangeError"),
    ([s.FILL, 1, 0, 1, 256], "ParamError"), ([s.COPY, 1, 0, 1, 4000, 97], "IndexRangeError"),
    ([s.RUN, b"k" * 16], "ParamError"), ([s.RUN, "k" * 16], "BadMessage"), ([s.GET, 1, -1, 2], "BadMessage"),
    ([s.GET, 1, 1 << 63, 2], "BadMessage"), ([s.GET, 1, True, 2], "BadMessage"), ([s.GET, 1, 0.0, 2], "BadMessage"),
    ([s.GET, 1, 0], "BadMessage"), ([99], "BadMessage"), ([], "BadMessage"), (7, "BadMessage"), (None, "BadMessage"),
    ([s.GRAPH, b"k" * 16, 1 << 60, 0], "BadMessage")], ids=str)
def test_ops_that_cannot_be_done(session, op, match):
    status, (kind, text) = executed(session, [op])
    assert status == s.FAILED and kind == match and text
    assert executed(session, [[s.GET, 1, 0, 4]])[0] == s.OK


@pytest.mark.parametrize("message", [None, [], [1], [0, []], ["1", []], [1, {}], [True, []],
                                     [1, [[s.GET, 1, 0, 4096]] * 9000]], ids=lambda m: str(m)[:20])
def test_messages_that_are_none(session, message):
    with pytest.raises(wire.BadMessage, match="malformed message|at once"):
        session.execute(message, b"")


def test_after_an_error_the_rest_is_skipped_but_both_sides_list_the_same(session):
    ops = [[s.GET, 7, 0, 1], [s.FILL, 1, 0, 4, 9], [s.FREE, 1]]
    assert executed(session, ops)[0] == s.FAILED and not session.arenas


def rows_of_a_graph():
    """(rows, names) of a graph whose tensors lie in arena 1."""
    ctx = gg.Context()
    x, w = ctx.new_tensor(gg.F32, (8, 4)), ctx.new_tensor(gg.F32, (8, 8))
    buf = gg.alloc_ctx_tensors(ctx, gg.init_backend("CPU"))
    y = gg.relu(gg.add(gg.mul_mat(w, x), gg.transpose(gg.view_2d(w, 4, 8, w.nb[1], 16))))
    graph = gg.Graph(y)
    allocator = gg.GraphAllocator(gg.init_backend("CPU"))
    allocator.alloc_graph(graph)
    offset = {id(buf): 0}

    def where(t):
        found, offs = (t.buffer, t.offs) if t.op == 0 or t.view_src is not None and t.view_src.op == 0 else \
            graph.placement.where.get(t.id) or graph.placement.where[t.base.id]
        return found, offs + (0 if found is buf else 1024)
    encoded = Encoded(graph, where, lambda t, buf: 1)
    assert offset and allocator.buffer_size()
    return encoded.rows, encoded.names


def test_damaged_graphs_are_refused_or_compute_inside_their_arenas(session):
    """Numbers of rows changed at random: other shapes, strides, sources, places, parameters."""
    rng, (rows, names) = np.random.default_rng(8), rows_of_a_graph()
    seen = set()
    for k in range(400):
        damaged = rows.copy()
        for _ in range(int(rng.integers(1, 4)) if k else 0):
            word = int(rng.integers(ROW_WORDS))
            small = [-1, 0, 1, 2, 4, 8, 16, 32, 64, 4095, 4096, 1 << 31, 1 << 40, (1 << 62) + 1, -(1 << 63)]
            value = small[int(rng.integers(len(small)))]
            if word in (TYPE, OP_):                     # known ones would be other kernels to compile
                value = [-1, 9999, 3][int(rng.integers(3))] if word == TYPE else 9999
            damaged[int(rng.integers(len(rows))), word] = value
        payload = damaged.tobytes() + "\0".join(names).encode()
        key = k.to_bytes(16, "little")
        n_names = len("\0".join(names).encode())
        status, results = executed(session, [[s.GRAPH, key, len(rows), n_names], [s.RUN, key]], payload)
        seen.add("ok" if status == s.OK else results[0])
        assert executed(session, [[s.GET, 1, 0, 4096]])[0] == s.OK
    assert "ok" in seen and {"ParamError", "IndexRangeError"} <= seen and "SystemError" not in seen
    assert seen <= {"ok", *(n for n in dir(gg.errors) if isinstance(getattr(gg.errors, n), type))}
    assert (FLAGS, NDIM, OFFS) < (ROW_WORDS,) * 3


def test_names_that_are_no_text_and_too_few(session):
    rows, names = rows_of_a_graph()
    for raw in (b"\xff" * 4, b"", "\0".join(names).encode() + b"\0x"):
        status, (kind, _) = executed(session, [[s.GRAPH, b"k" * 16, len(rows), len(raw)], [s.RUN, b"k" * 16]],
                                     rows.tobytes() + raw)
        assert status == s.FAILED and kind in ("ParamError", "UnicodeDecodeError")


def test_a_driver_that_reads_nothing_does_not_fill_the_worker():
    """Answers wait in the connection; the worker reads no further than its window."""
    with workers("tcp", n=1) as cluster:
        t = on(cluster.devices[0].init_backend(), gg.I8, (1 << 20,), np.zeros(1 << 20, np.int8))
        t.bytes()
        n = cluster.servers[0].machine.counters["messages"]
        host, port = cluster.devices[0].address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port)), 5) as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)

            def send(header):
                raw.sendall(wire.PREFIX.pack(wire.MAGIC, len(header), 0) + header)
            send(wire.pack({**s.hello(), "heartbeat": 60}))
            send(wire.pack([1, [[s.ALLOC, 1, 4 << 20]]]))
            for k in range(40):
                send(wire.pack([2 + k, [[s.GET, 1, 0, 4 << 20]]]))
            time.sleep(0.5)
            assert cluster.servers[0].machine.counters["messages"] - n <= 12


def test_several_drivers_of_one_worker_and_one_that_dies_in_a_transfer():
    with workers("tcp", n=1) as cluster:
        machine, address, errors = cluster.servers[0].machine, cluster.devices[0].address, []

        def drive(k):
            try:
                with gg.cluster.connect(address) as cl:
                    b = cl.devices[0].init_backend()
                    step, values = step_of(b, seed=k), np.full((2, 16), k, np.float32)
                    want = step(values)
                    for _ in range(20):
                        buf = b.alloc_buffer(1 << 16)
                        np.testing.assert_array_equal(step(values), want)
                        buf.free()
            except Exception as e:
                errors.append(e)
        drivers = [threading.Thread(target=drive, args=(k,)) for k in (1, 2)]
        for t in drivers:
            t.start()
        for t in drivers:
            t.join()
        assert not errors
        host, port = address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port)), 5) as raw:
            for header, n in (({**s.hello(), "heartbeat": 60}, 0), ([1, [[s.ALLOC, 1, 4 << 20]]], 0),
                              ([2, [[s.SET, 1, 0, 4 << 20]]], 4 << 20)):
                header = wire.pack(header)
                raw.sendall(wire.PREFIX.pack(wire.MAGIC, len(header), n) + header)
            raw.sendall(bytes(1 << 16))
        deadline = time.monotonic() + HANGS
        while (machine.used_nbytes or cluster.servers[0].n_drivers > 1) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not machine.used_nbytes and cluster.servers[0].n_drivers == 1 and not machine.send_queues.keys() - {
            cluster.devices[0].stream.secret}


def test_an_answer_of_another_length_ends_the_connection(monkeypatch):
    """Instead of numbers that were never sent."""
    with workers(n=1) as cluster:
        t = on(cluster.devices[0].init_backend(), gg.F32, (4,), np.ones(4))
        get = Session._get
        monkeypatch.setattr(Session, "_get", lambda *args: get(*args)[:-4])
        with pytest.raises(gg.DeviceLost, match="12 bytes where 16 were asked for"):
            t.numpy()


@pytest.mark.parametrize("found", [None, [], 3, [1, "x"], [1, 2, 3]])
def test_an_answer_of_another_kind_ends_the_connection(found, monkeypatch):
    with workers(n=1) as cluster:
        monkeypatch.setattr(Session, "_memory", lambda *args: found)
        for _ in range(2):
            with pytest.raises(gg.DeviceLost, match=r"it answers .* to op 8.*reopen\(\)"):
                cluster.devices[0].memory()


def test_only_who_knows_the_secret_fetches(session):
    driver, machine = session, session.machine
    assert driver.greeted({"secret": b"short"}) is None and not machine.send_queues
    driver.greeted({"secret": b"s" * 16})
    other = Session(machine)
    with pytest.raises(wire.BadMessage, match="in use by another driver"):
        other.greeted({"secret": b"s" * 16})
    assert executed(driver, [[s.SET, 1, 0, 4], [s.PUSH, 1, 0, 4, 1], [s.PUSH, 1, 0, 4, 2]], b"abcd")[0] == s.OK
    for secret, number, nbytes, error in ((b"t" * 16, 1, 4, "ParamError"), (b"s" * 16, 1, 8, "ParamError"),
                                          (b"s" * 16, 0, 4, "GgjitError")):
        status, (kind, _) = executed(other, [[s.FETCH, secret, number, nbytes]])
        assert (status, kind) == (s.FAILED, error)
    header, parts = other.execute([1, [[s.FETCH, b"s" * 16, 2, 4]]], b"")
    assert b"".join(parts) == b"abcd"
    assert executed(other, [[s.FETCH, b"s" * 16, 2, 4]])[0] == s.FAILED              # once
    assert executed(driver, [[s.GET, 7, 0, 1], [s.PUSH, 1, 0, 4, 3]])[0] == s.FAILED    # no wait without end
    assert executed(other, [[s.FETCH, b"s" * 16, 3, 4]])[0] == s.FAILED
    status, (kind, text) = executed(other, [[s.TAKE, 1, 0, 4, "tcp://10.0.0.1:80", b"s" * 16, 3]])
    assert kind == "IndexRangeError" and executed(other, [[s.ALLOC, 1, 64]])[0] == s.OK
    status, (kind, text) = executed(other, [[s.TAKE, 1, 0, 4, "tcp://10.0.0.1:80", b"s" * 16, 3]])
    assert kind == "GgjitError" and "both sides show certificates" in text
    other.close()
    driver.disconnect()
    assert not machine.send_queues


@pytest.mark.parametrize("op", [[s.FETCH, b"s" * 16, 5, 4], [s.TAKE, 1, 0, 4, None, b"s" * 16, 5],
                                [s.FETCH, None, 1 << 40, 4]])
def test_a_driver_that_leaves_while_its_worker_waits_leaves_no_memory(op):
    """For bytes that never come: its own, from there and by way of a connection, and another driver's."""
    with workers("tcp", n=1) as cluster:
        machine, device = cluster.servers[0].machine, cluster.devices[0]
        host, port = device.address.removeprefix("tcp://").split(":")
        op = [(device.stream.secret if i == 1 else device.address) if x is None else x for i, x in enumerate(op)]
        with socket.create_connection((host, int(port)), 5) as raw:
            for header in ({**s.hello(), "heartbeat": 0.02, "secret": b"s" * 16}, [1, [[s.ALLOC, 1, 4096]]], [2, [op]]):
                header = wire.pack(header)
                raw.sendall(wire.PREFIX.pack(wire.MAGIC, len(header), 0) + header)
            deadline = time.monotonic() + HANGS
            while not machine.used_nbytes and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.1)
            assert machine.used_nbytes
        while (machine.used_nbytes or cluster.servers[0].n_drivers > 1) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not machine.used_nbytes and cluster.servers[0].n_drivers == 1 and len(machine.send_queues) == 1


@pytest.mark.parametrize("value,want", [(float("nan"), 60), (float("-inf"), 0.02), (1e300, 60), (3, 3)])
def test_a_drivers_heartbeat_is_a_number(session, value, want):
    session.greeted({"heartbeat": value})
    assert session.heartbeat == want


def test_what_is_not_fetched_fills_no_memory(monkeypatch):
    monkeypatch.setattr(send_queue, "LIMIT_NBYTES", 100)
    monkeypatch.setattr(send_queue, "ROOM_SECONDS", 0.01)
    box = send_queue.SendQueue()
    for k in range(5):
        box.put(k, bytes([k]) * 40)
    assert list(box._held) == [3, 4] and box.take(4) == b"\4" * 40
    for k in (0, 4):
        with pytest.raises(gg.GgjitError, match="was dropped"):
            box.take(k)
    threading.Timer(0.05, box.put, [9, b"9"]).start()
    assert box.take(9) == b"9"
    threading.Timer(0.05, box.close).start()
    with pytest.raises(gg.GgjitError, match="was dropped"):
        box.take(10)


def test_workers_of_addresses_in_use_and_twice():
    with workers("tcp", n=1) as cluster:
        with pytest.raises(OSError, match="in use"):
            threads([cluster.devices[0].address])
        cluster.close()
        cluster.close()


# ---------------------------------------------------------------- what a driver can take
def graph_op(session, n, key=b"k" * 16):
    """(GRAPH, its payload) of n nodes in arena 1, that scale one another."""
    ctx = gg.Context()
    x = ctx.new_tensor(gg.F32, (4,), "x")
    y = x
    for _ in range(n):
        y = gg.scale(y, 0.5)
    graph = gg.Graph(y)
    arena = session.arenas[1]
    encoded = Encoded(graph, lambda t: (arena, 0 if t is x else 64), lambda t, buf: 1)
    encoded.set_places(encoded.places())
    names = "\0".join(encoded.names).encode()
    return [s.GRAPH, key, len(encoded.rows), len(names)], encoded.rows.tobytes() + names


def test_graphs_count_as_memory_that_is_lent(session):
    machine = session.machine
    used = machine.used_nbytes
    op, payload = graph_op(session, 20)
    assert executed(session, [op, [s.RUN, op[1]]], payload)[0] == s.OK
    assert machine.used_nbytes > used + 20 * 1000, "a node takes more than a kilobyte"
    op, payload = graph_op(session, 1000, b"l" * 16)
    status, (kind, text) = executed(session, [op, [s.RUN, op[1]]], payload)
    assert (status, kind) == (s.FAILED, "OutOfMemory") and "a larger --memory" in text
    session._free(1, b"", False)                    # graphs go with their arena
    assert machine.used_nbytes == 0


@pytest.mark.parametrize("n, spoilt", [(20, True), (1000, False)])
def test_a_refused_graph_keeps_nothing_of_its_message(session, n, spoilt):
    """Rows that are no graph, and a graph beyond what is lent; both are listed, and asked for again."""
    op, payload = graph_op(session, n)
    payload = np.frombuffer(payload, np.uint8).copy()
    payload[:spoilt * 2000] = 77
    kept = weakref.ref(payload)
    for sent in ([op, [s.RUN, op[1]]], payload), ([[s.RUN, op[1]]], b""):
        assert executed(session, *sent)[0] == s.FAILED
    del payload, sent
    assert kept() is None and len(session.graphs) == 1


def test_the_worker_counts_rows_too(session, monkeypatch):
    monkeypatch.setattr("ggjit.cluster.encoding.MAX_ROWS", 30)
    session.machine.memory_nbytes = 1 << 24
    before = session.machine.used_nbytes
    monkeypatch.setattr("ggjit.cluster.encoding.MAX_ROWS", 1 << 16)
    op, payload = graph_op(session, 40)
    monkeypatch.setattr("ggjit.cluster.encoding.MAX_ROWS", 30)
    status, (kind, text) = executed(session, [op, [s.RUN, op[1]]], payload)
    assert (status, kind) == (s.FAILED, "ParamError") and "at most 30" in text
    assert session.machine.used_nbytes == before


def test_graphs_that_are_kept_no_longer_are_free_again(session, monkeypatch):
    monkeypatch.setattr(s, "MAX_GRAPHS", 2)
    used = []
    for k in range(5):
        op, payload = graph_op(session, 3 + k, bytes([k]) * 16)
        assert executed(session, [op, [s.RUN, op[1]]], payload)[0] == s.OK
        used.append(session.machine.used_nbytes)
    assert len(session.graphs) == 2 and used[-1] - used[1] < used[1] - 4096
    session.graphs.clear()
    assert session.machine.used_nbytes == 4096
