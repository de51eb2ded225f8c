"""Messages over a connection: whole ones, in order, however the bytes come."""
import select
import socket
import struct
import threading
import time
import types

import numpy as np
import pytest
from helpers.clusters import workers
from helpers.device_contract import floats, on
from helpers.timing import HANGS

import ggjit as gg
from ggjit.cluster import protocol, stream, wire


@pytest.fixture
def ends():
    """(a Connection that does not block, the bare socket at its other end)"""
    ours, theirs = socket.socketpair()
    conn = wire.Connection(ours)
    conn.do_not_block()
    with ours, theirs:
        yield conn, theirs


def framed(header, payload=b""):
    header = wire.pack(header)
    return wire.PREFIX.pack(wire.MAGIC, len(header), len(payload)) + header + payload


def test_messages_in_pieces_of_any_size(ends):
    conn, other = ends
    rng = np.random.default_rng(5)
    sizes = [0, 1, 9, wire.SMALL_NBYTES - 1, wire.SMALL_NBYTES, 200_000, 3, *rng.integers(0, 70_000, 12).tolist()]
    sent = [([k, "x" * int(rng.integers(0, 300))], rng.bytes(n)) for k, n in enumerate(sizes)]
    sent.insert(4, ([4, "y" * 60_000, *["z" * 60_000] * 3], b"more header than is held at first"))
    raw, got = b"".join(framed(*message) for message in sent), []
    while len(got) < len(sent):
        n = int(rng.integers(1, 40_000))
        other.sendall(raw[:n])
        raw = raw[n:]
        while (message := conn.read()) is not None:
            got.append((message[0], bytes(message[1])))
    assert got == sent and not raw


def test_a_large_payload_goes_to_its_place(ends):
    conn, other = ends
    place, payload = bytearray(300_000), np.random.default_rng(0).bytes(300_000)
    thread = threading.Thread(target=other.sendall, args=(framed([1], payload) + framed([2], b"next"),))
    thread.start()
    got = []
    while len(got) < 2:
        conn.wait(1)
        message = conn.read(lambda header, n: memoryview(place) if n == len(place) else None)
        got += [message] if message else []
    thread.join()
    assert place == payload and got[0][1].obj is place and got[1] == ([2], b"next")


@pytest.mark.parametrize("raw", [b"GET / HTTP/1.1", framed([1])[:-1] + b"\xc1",
                                 wire.PREFIX.pack(wire.MAGIC, 1 << 31, 0)])
def test_what_is_no_message(ends, raw):
    conn, other = ends
    other.sendall(raw)
    with pytest.raises(wire.BadMessage, match="does not speak|cannot be read|at most"):
        conn.read()


def test_the_other_side_closes(ends):
    conn, other = ends
    other.sendall(framed([1])[:5])
    assert conn.read() is None
    other.close()
    with pytest.raises(ConnectionError, match="has closed the connection"):
        conn.read()
    conn.close()
    with pytest.raises(ConnectionError, match="was closed"):
        conn.wait(1)


def test_a_program_that_reads_nothing_is_not_silent(monkeypatch):
    """Its machine acknowledges for it; one that is gone acknowledges nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock, \
            server.accept()[0]:
        conn = wire.Connection(wire._tuned(sock, None))
        conn.do_not_block()
        monkeypatch.setattr(wire, "SILENT_SECONDS", 0.1)
        with pytest.raises(BlockingIOError):
            while True:
                sock.send(bytes(1 << 20))
        time.sleep(0.4)
        assert not conn.is_silent()
        assert not sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)     # which would end it all the same
        for n_retransmits, n_probes, ms, want in ((3, 0, 101, True), (0, 3, 101, True), (3, 3, 99, False),
                                                  (1, 1, 10**6, False)):
            info = struct.pack("=2x2B52xI", n_retransmits, n_probes, ms)
            conn.sock = types.SimpleNamespace(family=sock.family, getsockopt=lambda *args, info=info: info)
            assert conn.is_silent() is want


@pytest.mark.slow
def test_an_answer_is_read_much_later(monkeypatch):
    """More of it than a connection holds: no side waits for it meanwhile."""
    monkeypatch.setattr(wire, "SILENT_SECONDS", 4)
    with workers("tcp", n=1) as cluster:
        backend, n = cluster.devices[0].init_backend(), 1 << 18
        x = on(backend, gg.F32, (n,), values := floats(n))
        read = [backend.get_tensor_async(x) for _ in range(8)]
        time.sleep(9)
        backend.synchronize()
        assert all(bytes(raw) == values.tobytes() for raw in read)


def test_a_slow_connection_is_no_lost_worker(monkeypatch):
    """A frame that takes longer than the silence that is endured."""
    receive, send = wire.Connection._receive, wire.Connection._send

    def slow_receive(conn, where):
        if conn is not ours and conn._large is not None:
            time.sleep(0.01)
            where = where[:1 << 16]
        return receive(conn, where)

    def slow_send(conn, piece, blocked):
        left = memoryview(piece)
        while len(left) > 1 << 16 and conn is not ours:
            time.sleep(0.01)
            send(conn, left[:1 << 16], blocked)
            left = left[1 << 16:]
        send(conn, left, blocked)
    with workers("tcp", n=1, timeout=0.15) as cluster:
        ours, n = cluster.devices[0].stream._conn, 3 << 18
        x = on(cluster.devices[0].init_backend(), gg.F32, (n,))
        monkeypatch.setattr(wire.Connection, "_receive", slow_receive)
        monkeypatch.setattr(wire.Connection, "_send", slow_send)
        x.set(values := floats(n))
        np.testing.assert_array_equal(x.numpy(), values)


def test_who_sends_while_answers_wait_reads_them(monkeypatch):
    """Both sides would else wait for the other to read: messages and answers are more than a connection holds."""
    blocked, seen = stream.Stream._blocked, []
    monkeypatch.setattr(stream.Stream, "_blocked", lambda self: (seen.append(self), blocked(self)))
    with workers("inproc", n=1, timeout=5.0) as cluster:
        backend, n = cluster.devices[0].init_backend(), 1 << 18
        x = on(backend, gg.F32, (n,))
        graph = gg.Graph(y := gg.neg(x))
        allocator = gg.GraphAllocator(backend)
        allocator.alloc_graph(graph)
        for k in range(16):
            values = np.full(n, k, np.float32)
            for at in range(0, n, 1 << 14):     # so small that they go with the run
                x.set_bytes(values[at:at + (1 << 14)], 4 * at)
            backend.graph_compute(graph)
            if k < 2:                           # from now on the result comes with each run
                y.numpy()
            else:
                backend.get_tensor_async(y)
        np.testing.assert_array_equal(y.numpy(), -values)
        assert seen and allocator.buffer_size()


def test_several_threads_wait_for_one_worker():
    with workers("tcp", n=1) as cluster:
        device, errors = cluster.devices[0], []
        t = on(device.init_backend(), gg.F32, (8,), x := floats(8))
        answers = [device.flush([5, *t.buffer.at(t, 0), 32], nbytes=32) for _ in range(40)]      # GET

        def wait(mine):
            for answer in mine:
                if bytes(device.stream.wait(answer).payload) != x.tobytes():
                    errors.append(answer.seq)
        threads = [threading.Thread(target=wait, args=(answers[k::4][::-1],)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANGS)
        assert not errors and not any(thread.is_alive() for thread in threads)


def test_who_waits_for_a_lost_worker_is_told_whatever_became_of_the_answer():
    with workers(n=1) as cluster:
        s = cluster.devices[0].stream
        s.close()
        with pytest.raises(gg.DeviceLost, match="it was closed"):
            s.wait(stream.PendingReply(99, None, 0, None))


def test_too_many_connections_are_ended_and_others_served(monkeypatch):
    monkeypatch.setattr(wire, "MAX_CONNECTIONS", 2)
    with workers("tcp", n=1) as cluster:
        host, port = cluster.devices[0].address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port)), 5) as second, \
                socket.create_connection((host, int(port)), 5) as third:
            greeting = wire.pack(protocol.hello())
            for sock in (second, third):                # who has not greeted takes no room
                sock.sendall(wire.PREFIX.pack(wire.MAGIC, len(greeting), 0) + greeting)
                assert sock.recv(4) == wire.MAGIC
            left = {second, third}              # each is counted by a thread of its own: either may come too late
            while len(left) == 2:
                ready = select.select(left, (), (), HANGS)[0]
                assert ready
                left -= {sock for sock in ready if not sock.recv(1 << 16)}
            assert len(left) == 1
        assert cluster.devices[0].memory()
        deadline = time.monotonic() + HANGS        # the second one has left, and there is room
        while True:
            try:
                gg.cluster.connect(cluster.devices[0].address).close()
                break
            except gg.DeviceLost:
                assert time.monotonic() < deadline
