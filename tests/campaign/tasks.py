"""Whole tasks at random: trainings within budgets and from checkpoints, importance matrices changed at random, files on
a disk that fills up, drivers that send large and honest or broken and replayed messages, over TLS too.
"""
import contextlib
import functools
import os
import resource
import signal
import socket
import tempfile

import numpy as np
from helpers import tiny_model

import ggjit as gg
from campaign.files import Fields, folder
from campaign.runner import Find
from ggjit.cluster import protocol as p
from ggjit.cluster import wire
from ggjit.cluster.certificates import certificates
from ggjit.cluster.encoding import Encoded
from ggjit.cluster.session import Session, WorkerDevice
from ggjit.core.host_buffer import HOST, ArrayBuffer
from ggjit.models import load_imatrix, load_model, save_gguf, save_safetensors
from ggjit.models.files.rewrite import quantize_gguf
from ggjit.ops.core.errors import GgjitError

WHOLE = 1 << 20                 # bytes of a disk that holds all that is written


# ---------------------------------------------------------------- training
class Net:
    """Two to four layers of random widths and kinds, `.x` and `.y` and `.params`; equal for equal seeds."""

    def __init__(self, seed):
        rng, self.ctx, self.params = np.random.default_rng(seed), gg.Context(), []
        self.rows = int(rng.choice([4, 8, 16]))
        widths = [int(w) for w in rng.integers(2, 40, int(rng.integers(2, 5)))]
        self.x = self.ctx.new_tensor(gg.F32, (widths[0], self.rows), name="x")
        with self.ctx:
            y = self.x
            for n, m in zip(widths, widths[1:], strict=False):
                values = rng.normal(0, 0.4, (m, n)).astype(np.float32)
                self.params.append(gg.set_param(gg.from_numpy(self.ctx, values.copy(), f"w{len(self.params)}")))
                y = gg.mul_mat(self.params[-1], gg.silu(y) if rng.random() < 0.5 else gg.norm(y, 1e-5))
        self.y = y
        n = 4 * self.rows
        data = rng.standard_normal((n, widths[0])).astype(np.float32)
        self.data = data, rng.integers(widths[-1], size=n)

    def fit(self, epochs, **options):
        return gg.train.fit(self.x, self.y, self.data, progress=False, epochs=epochs, seed=1, **options)

    def same(self, other):
        return all((a.numpy() == b.numpy()).all() for a, b in zip(self.params, other.params, strict=True))


def training(rng):
    """A budget and a break change no bit."""
    seed, epochs = int(rng.integers(1 << 30)), int(rng.integers(1, 4))
    whole, cut = Net(seed), Net(seed)
    want = whole.fit(epochs)
    options = {}
    try:
        cut.fit(epochs, budget=1)
    except gg.BudgetError as e:
        if e.minimum is not None and rng.random() < 0.8:
            options["budget"] = int(e.minimum * float(rng.choice([1.0, 1.0, 1.2, 2.0])))
    with tempfile.TemporaryDirectory() as place:
        if rng.random() < 0.6 and epochs > 1:
            path = os.path.join(place, "run")
            Net(seed).fit(int(rng.integers(1, epochs)), checkpoint=path, **options)
            options["checkpoint"] = path
            if rng.random() < 0.3:                              # a damaged checkpoint is refused
                files = [os.path.join(at, f) for at, _, names in os.walk(place) for f in names]
                victim = files[int(rng.integers(len(files)))]
                raw = bytearray(open(victim, "rb").read())
                raw[int(rng.integers(len(raw)))] ^= 1 << int(rng.integers(8))
                open(victim, "wb").write(raw[:int(rng.integers(len(raw) + 1))] if rng.random() < 0.5 else raw)
                got = cut.fit(epochs, **options)
                if not np.isfinite(got.steps).all():
                    raise Find("a damaged checkpoint was used")
                return "right"
        got = cut.fit(epochs, **options)
    if not cut.same(whole) or got.loss != want.loss:
        raise Find(f"net {seed}: other numbers with {options}")
    return "right"


# ---------------------------------------------------------------- importance matrices
@functools.cache
def _imatrix_files():
    """Right files, as fields, and the model they belong to."""
    model, made = tiny_model.write(folder() / "imatrix-model.gguf", seed=1, type="F32"), []
    for seed in range(3):
        path, rng = folder() / f"i{seed}.gguf", np.random.default_rng(seed)
        with load_model(model) as m:
            names = [n for n, t in m.file.tensors.items() if len(t.ne) == 2]
            about = {"general.type": "imatrix", "imatrix.datasets": ["a"], "imatrix.chunk_count": np.uint32(2),
                     "imatrix.chunk_size": np.uint32(32)}
            sums = {}
            for n in names:
                sums[n + ".in_sum2"] = rng.random((1, m.file.tensors[n].ne[0])).astype(np.float32)
                sums[n + ".counts"] = np.full((1, 1), 64, np.float32)
        save_gguf(path, sums, about)
        made.append(Fields(path.read_bytes()))
    return made, model


def imatrix(rng):
    """A changed file is refused, or read as numbers of the right sizes; quantising with it gives a file that loads."""
    files, model = _imatrix_files()
    path, out = folder() / "case.imatrix.gguf", folder() / "case-q.gguf"
    path.write_bytes(files[int(rng.integers(len(files)))].changed(rng))
    for name, one in load_imatrix(path).sums.items():
        if not one.importances.size:
            raise Find(f"{name}: no importances")
    if rng.random() < 0.2:
        quantize_gguf(model, out, "Q4_K" if rng.random() < 0.5 else "Q4_0", imatrix=path, requantize=True, force=True,
                      progress=False)
        with load_model(out) as m:
            if not np.isfinite(m.logits([1, 2, 3])).all():
                raise Find("a quantised model whose logits are not finite")
    return "right"


# ---------------------------------------------------------------- a full disk
@contextlib.contextmanager
def full_after(nbytes):
    """No file grows beyond so many bytes: writes fail as on a full disk (RLIMIT_FSIZE)."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def _writers():
    model = tiny_model.write(folder() / "disk.gguf", seed=2, type="F32")
    x = {"w": np.ones((64, 64), np.float32), "b": np.ones(7, np.float32)}
    net = Net(1)
    return {"save_gguf": lambda out: save_gguf(out, x, {"a": "b" * 500}),
            "save_safetensors": lambda out: save_safetensors(out, x),
            "quantize": lambda out: quantize_gguf(model, out, "Q8_0", force=True, progress=False),
            "checkpoint": lambda out: net.fit(1, checkpoint=out)}


_made_writers = functools.cache(_writers)


def full_disk(rng):
    """A file is there whole, or what was there before is; nothing else is left, and the next try succeeds."""
    name = sorted(_made_writers())[int(rng.integers(len(_made_writers())))]
    write, before = _made_writers()[name], rng.bytes(40)
    with tempfile.TemporaryDirectory(dir=folder()) as place:
        out = os.path.join(place, "out")
        had = name != "checkpoint" and rng.random() < 0.5
        if had:
            open(out, "wb").write(before)
        failed = False
        try:
            with full_after(int(rng.integers(1, 40_000))):
                write(out)
        except (GgjitError, OSError):
            failed = True
        left = sorted(os.listdir(place))
        if any(f.endswith(".part") for f in left):
            raise Find(f"{name}: left {left}")
        if failed and had and open(out, "rb").read() != before:
            raise Find(f"{name}: what was there is gone")
        if failed and not had and name != "checkpoint" and left:
            raise Find(f"{name}: left {left}")
        write(out)
    return "refused" if failed else "right"


# ---------------------------------------------------------------- drivers
def _graph_op(rng, key, buf):
    """GRAPH of 1 to 2,000 nodes over arena 1, and what to RUN."""
    ctx, x = gg.Context(), None
    x = ctx.new_tensor(gg.F32, (int(rng.integers(1, 64)),), "x")
    y = x
    for _ in range(int(rng.choice([1, 3, 30, 300, 2000]))):
        y = gg.scale(y, 1.0) if rng.random() < 0.5 else gg.add(y, x)
    encoded = Encoded(gg.Graph(y), lambda t: (buf, 0 if t is x else 1024), lambda t, b: 1)
    encoded.set_places(encoded.places())
    names, rows = "\0".join(encoded.names).encode(), encoded.rows
    if rng.random() < 0.3:
        rows = rows.copy()
        rows.reshape(-1)[int(rng.integers(rows.size))] = int(rng.choice([-1, 0, 1, 7, 1 << 20, 1 << 40, -(1 << 62)]))
    return [p.GRAPH, key, len(rows), len(names)], rows.tobytes() + names


def driver(rng):
    """Messages that are well formed, many and large, some replayed: the worker answers all, keeps to what it lends, and
    has all back when the driver is gone."""
    machine = WorkerDevice(1 << 22, 1)
    session, buf = Session(machine), ArrayBuffer(HOST, np.zeros(4096, np.uint8))
    keys = [bytes([k]) * 16 for k in range(3)]
    sent = []
    for _ in range(int(rng.integers(2, 30))):
        if sent and rng.random() < 0.2:
            ops, payload = sent[int(rng.integers(len(sent)))]                   # replay
        else:
            ops, payload = [], b""
            for _ in range(int(rng.integers(1, 4))):
                what = int(rng.integers(7))
                arena, offs = int(rng.integers(4)), int(rng.choice([0, 0, 64, 4000, 1 << 40]))
                n = int(rng.choice([1, 64, 4096, 1 << 20, 1 << 40]))
                key = keys[int(rng.integers(3))]
                if what == 0:
                    ops.append([p.ALLOC, arena, n])
                elif what == 1 and n <= 1 << 20:
                    ops.append([p.SET, arena, offs, n])
                    payload += rng.bytes(n)
                elif what == 2:
                    ops.append([p.GET, arena, offs, min(n, 1 << 20)])
                elif what == 3:
                    ops.append([p.FILL, arena, offs, n, int(rng.integers(300))])
                elif what == 4:
                    op, more = _graph_op(rng, key, buf)
                    ops.append(op)
                    payload += more
                elif what == 5:
                    ops.append([p.RUN, key])
                else:
                    ops.append([p.FREE, arena])
            sent.append((ops, payload))
        if not ops:
            continue
        with contextlib.suppress(wire.BadMessage):
            header, out = session.execute([1, ops], payload)
            status = wire.unpack(header)[1]
            if status not in (p.OK, p.FAILED):
                raise Find(f"status {status}")
        if machine.used_nbytes > machine.memory_nbytes:
            raise Find("more memory than is lent")
    session.close()
    if machine.used_nbytes:
        raise Find(f"{machine.used_nbytes} bytes are still lent")
    return "right"


# ---------------------------------------------------------------- TLS
@functools.cache
def _tls_worker():
    place = tempfile.mkdtemp(dir=folder())
    gg.cluster.make_certificates(place)
    from ggjit.cluster.server import Server
    server = Server(certificates(place), 1 << 24, 1)
    return server, server.start("tls://127.0.0.1:0"), certificates(place)


def tls(rng):
    """Bytes that are no TLS, a recorded greeting again, or a connection that ends in the middle; a driver with a
    certificate is served all the same."""
    server, address, tls_ = _tls_worker()
    host, port = address.removeprefix("tls://").rsplit(":", 1)
    greeting = wire.pack(p.hello())
    message = wire.PREFIX.pack(wire.MAGIC, len(greeting), 0) + greeting
    with socket.create_connection((host, int(port)), 10) as raw:
        raw.settimeout(20)
        what = int(rng.integers(4))
        if what == 0:
            raw.sendall(rng.bytes(int(rng.integers(1, 2000))))
        elif what == 1:
            raw.sendall(b"\x16\x03\x01" + rng.bytes(int(rng.integers(1, 600))))
        elif what == 2:
            raw.sendall(message * 2)
    if rng.random() < 0.5:
        conn = wire.connect(address, tls_)
        try:
            conn.read(limit_nbytes=0, seconds=20)
            conn.write(greeting)
            for _ in range(int(rng.integers(1, 4))):             # the same message again and again
                conn.write(wire.pack([1, [[p.MEMORY]]]))
                answer, _ = conn.read(seconds=20)
                if answer[1] not in (p.OK, p.BUSY):
                    raise Find(f"{answer}")
        finally:
            conn.end()
    return "right"


CASES = {"training": training, "imatrix": imatrix, "full disk": full_disk, "driver": driver, "tls": tls}
