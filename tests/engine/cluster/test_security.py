"""Who may connect, and what bytes from the wire can do: nothing that was not asked for."""
import contextlib
import os
import pickle
import socket
import ssl
import stat
import struct
import threading
import time

import msgpack
import numpy as np
import pytest
from helpers.clusters import step_of, workers
from helpers.device_contract import floats

import ggjit as gg
from ggjit.cluster import protocol as s
from ggjit.cluster import stream, wire


@pytest.fixture(scope="module")
def certs(tmp_path_factory):
    made = [tmp_path_factory.mktemp("tls") / name for name in ("ours", "theirs")]
    for directory in made:
        gg.cluster.make_certificates(directory)
    return made


# ---------------------------------------------------------------- addresses and certificates
@pytest.mark.parametrize("address",
                         ["tcp://10.0.0.2:8790", "tcp://0.0.0.0:8790", "tcp://example.com:1", "tcp://[::]:1"])
def test_off_loopback_certificates_are_required(address):
    for call in (gg.cluster.connect, gg.cluster.serve):
        with pytest.raises(gg.ParamError, match="both sides show certificates.*--make-certs"):
            call(address)
    with pytest.raises(gg.ParamError, match="--make-certs"):
        gg.cluster.connect(address.replace("tcp", "tls"))


@pytest.mark.parametrize("address", ["127.0.0.1:8790", "http://127.0.0.1:1", "tcp://127.0.0.1", "tcp://:1", "", None,
                                     8790, [], ["tcp://127.0.0.1:99999"], "tcp://127.0.0.1:-1",
                                     "tcp://127.0.0.1:²", "tcp://127.0.0.1:" + "0" * 5000, "tls://a..b:1",
                                     f"tls://{'x' * 70}:1", "tls://a\0b:1"])
def test_addresses_that_are_none(address):
    with pytest.raises(gg.ParamError, match="address"):
        gg.cluster.connect(address)


def test_options_that_are_none(tmp_path):
    for call, match in ((lambda: gg.cluster.local(0), "n_workers"), (lambda: gg.cluster.local(timeout=-1), "timeout"),
                        (lambda: gg.cluster.connect("tcp://127.0.0.1:1", tls=tmp_path), "no ca.pem.*make-certs"),
                        (lambda: gg.cluster.connect("tcp://127.0.0.1:1", tls=3), "expected the directory"),
                        (lambda: gg.cluster.serve(memory_nbytes=0), "memory of 0 bytes")):
        with pytest.raises(gg.ParamError, match=match):
            call()
    with pytest.raises(gg.TypeMismatch, match="it is called as local"):
        gg.cluster.local(workers=2)


def test_private_keys_are_private_and_certificates_are_not_replaced(certs):
    for name in ("ca-key.pem", "node-key.pem"):
        assert stat.S_IMODE(os.stat(certs[0] / name).st_mode) == 0o600
    with pytest.raises(gg.ParamError, match="choose another directory"):
        gg.cluster.make_certificates(certs[0])


def test_who_has_no_certificate_of_the_ca_is_refused(certs, monkeypatch):
    monkeypatch.setattr(stream, "CONNECT_SECONDS", 1.0)
    with workers("tls", n=1, tls=certs[0]) as cluster:
        address = cluster.devices[0].address
        host, port = address.removeprefix("tls://").split(":")
        with pytest.raises(gg.DeviceLost, match="certificates of one CA"):
            gg.cluster.connect(address, tls=certs[1])
        with pytest.raises((gg.DeviceLost, wire.BadMessage), match="no answer|certificates|protocol"):
            gg.cluster.connect(address.replace("tls", "tcp"))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with pytest.raises(OSError, match="certificate|alert|reset|EOF"):      # TLS 1.3 says so with the first read
            with socket.create_connection((host, int(port)), 5) as raw, context.wrap_socket(raw) as tls:
                assert not tls.recv(1), "answered without a certificate"
                raise ConnectionResetError("reset: nothing came")
        with gg.cluster.connect(address, tls=certs[0]) as cl:                    # who has one is served
            assert cl.devices[0].memory()[1] == 1 << 28
        assert cluster.servers[0].n_drivers <= 2


def test_connections_without_a_certificate_take_no_room_of_those_with_one(certs, monkeypatch):
    """They connect and send nothing; where they are too many, the oldest one ends, and only that one."""
    monkeypatch.setattr(wire, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(wire, "MAX_HANDSHAKES", 3)
    with workers("tls", n=1, tls=certs[0]) as cluster:
        host, port = cluster.devices[0].address.removeprefix("tls://").split(":")
        with contextlib.ExitStack() as stack:
            first, *others = [stack.enter_context(socket.create_connection((host, int(port)), 5)) for _ in range(4)]
            assert first.recv(1) == b""
            for raw in others:
                raw.settimeout(0.05)
                with pytest.raises(TimeoutError):
                    raw.recv(1)
            with gg.cluster.connect(cluster.devices[0].address, tls=certs[0]) as cl:
                assert cl.devices[0].memory()


def test_a_greeting_in_drops_has_an_end(monkeypatch):
    """On both sides, however often a byte comes."""
    greeting = wire.PREFIX.pack(wire.MAGIC, 1000, 0)
    monkeypatch.setattr(wire, "HANDSHAKE_SECONDS", 0.2)
    monkeypatch.setattr(stream, "CONNECT_SECONDS", 0.2)

    def drip(raw):
        for at in range(100):
            try:
                raw.sendall(greeting[at:at + 1] or b"x")
            except OSError:
                return at
            time.sleep(0.02)
    with workers("tcp", n=1) as cluster:
        host, port = cluster.devices[0].address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port)), 5) as raw:
            assert drip(raw) < 50

    def answer():
        with server.accept()[0] as raw:
            drip(raw)
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(gg.DeviceLost, match="no answer within 0.2 s"):
            gg.cluster.connect([f"tcp://127.0.0.1:{server.getsockname()[1]}"] * 2)
        thread.join(5)


def test_a_system_without_threads_ends_a_connection_and_not_the_listener(monkeypatch):
    start = threading.Thread.start
    with workers("tcp", n=1) as cluster:
        def refuse(thread):
            if thread.name == "ggjit-session":
                raise RuntimeError("can't start new thread")
            start(thread)
        with monkeypatch.context() as m:
            m.setattr(threading.Thread, "start", refuse)
            with pytest.raises(gg.DeviceLost, match="has closed the connection|reset"):
                gg.cluster.connect(cluster.devices[0].address)
        gg.cluster.connect(cluster.devices[0].address).close()


def test_every_listener_is_on_the_chosen_address():
    with workers("tcp", n=2) as cluster:
        for server in cluster.servers:
            assert server._listener.sock.getsockname()[0] == "127.0.0.1"


def test_another_version_is_refused(monkeypatch):
    with workers("tcp", n=1) as cluster:
        for key in ("ggjit", "kernels", "protocol"):
            with monkeypatch.context() as m:
                mine = {**s.hello(), key: "0.0.9"}
                m.setattr(stream, "hello", lambda mine=mine: mine)
                with pytest.raises(gg.NotSupported, match="install the same version on both"):
                    gg.cluster.connect(cluster.devices[0].address)
        assert cluster.devices[0].memory()


def test_connections_that_say_nothing_lock_nobody_out(monkeypatch):
    monkeypatch.setattr(wire, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(wire, "MAX_HANDSHAKES", 8)
    with workers("tcp", n=1) as cluster, contextlib.ExitStack() as open_:
        host, port = cluster.devices[0].address.removeprefix("tcp://").split(":")
        mute = [open_.enter_context(socket.create_connection((host, int(port)), 5)) for _ in range(40)]
        with gg.cluster.connect(cluster.devices[0].address) as other:
            assert step_of(other.devices[0].init_backend())(floats(2, 16)).shape == (2, 16)
        assert step_of(cluster.devices[0].init_backend())(floats(2, 16)).shape == (2, 16)
        ended, deadline = 0, time.monotonic() + 20
        for sock in mute[:30]:                      # the oldest are told that they have no place
            sock.settimeout(max(0.1, deadline - time.monotonic()))
            with contextlib.suppress(ConnectionResetError):
                while sock.recv(1 << 16):
                    pass
            ended += 1
        assert ended == 30


# ---------------------------------------------------------------- bytes
class Exploit:
    """Unpickled, it writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def dask_message(path):
    """A message as Dask frames it, with a pickle that Dask would load."""
    header = msgpack.packb({"pickled-obj": pickle.dumps(Exploit(path)), "num-sub-frames": 0, "compression": []})
    frames = [msgpack.packb({"__Pickled__": 1}), header]
    prelude = struct.pack("Q", len(frames)) + b"".join(struct.pack("Q", len(f)) for f in frames)
    body = prelude + b"".join(frames)
    return struct.pack("Q", len(body)) + body


def test_a_pickle_is_never_loaded(tmp_path):
    path = str(tmp_path / "written")
    message = dask_message(path)
    with workers("tcp", n=1) as cluster:                # a worker that is sent one
        host, port = cluster.devices[0].address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port)), 5) as raw:
            raw.settimeout(5)
            raw.sendall(message)
            while raw.recv(1 << 16):                    # its hello, then the end
                pass
        assert cluster.devices[0].memory()
    with socket.create_server(("127.0.0.1", 0)) as server:      # a driver that is sent one

        def answer():                                   # once: the error is raised before the second one is asked
            with server.accept()[0] as raw:
                raw.sendall(message)
                raw.recv(1)
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        port = server.getsockname()[1]
        with pytest.raises(wire.BadMessage, match="does not speak ggjit's protocol"):
            gg.cluster.connect([f"tcp://127.0.0.1:{port}"] * 2)
        thread.join(5)
        assert not thread.is_alive()
    assert not os.path.exists(path)


@pytest.mark.parametrize("raw,match", [
    (wire.PREFIX.pack(b"ggj1", wire.MAX_HEADER_NBYTES + 1, 0), "at most"),
    (wire.PREFIX.pack(b"ggj1", 10, wire.MAX_PAYLOAD_NBYTES + 1), "at most"),
    (wire.PREFIX.pack(b"ggj1", 0, 0), "at most"), (b"GET / HTTP/1", "does not speak")])
def test_sizes_are_checked_before_memory_is_taken(raw, match):
    with pytest.raises(wire.BadMessage, match=match):
        wire._sizes(raw, wire.MAX_PAYLOAD_NBYTES)


@pytest.mark.parametrize("raw", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
                                 b"\x91" * 5000,
                                 b"\xc7\x01\x05\x00", b"", b"\xc1", b"\x01\x02", b"\xd9\x01\xff"], ids=repr)
def test_headers_that_are_none(raw):
    with pytest.raises(wire.BadMessage, match="cannot be read"):
        wire.unpack(raw)


def test_random_bytes_end_the_connection_and_nothing_else():
    rng = np.random.default_rng(3)
    with workers("tcp", n=1) as cluster:
        host, port = cluster.devices[0].address.removeprefix("tcp://").split(":")
        for k in range(20):
            with socket.create_connection((host, int(port)), 5) as raw:
                raw.sendall((b"ggj1" if k % 2 else b"") + rng.bytes(int(rng.integers(1, 200))))
        step = step_of(cluster.devices[0].init_backend())
        assert step(floats(2, 16)).shape == (2, 16)
