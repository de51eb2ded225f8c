"""What a worker does for one driver: arenas, graphs, and the ops of the messages in their order
(engine/cluster/protocol.py).
"""
import collections
import contextlib
import functools
import threading
import time

import numpy as np

from ggjit.cluster import protocol as p
from ggjit.cluster import wire
from ggjit.cluster.encoding import MAX_ROWS, ROW_WORDS, decode, graph_nbytes
from ggjit.cluster.peer import Peer
from ggjit.cluster.send_queue import SendQueue
from ggjit.cluster.weight_cache import WeightCache
from ggjit.core.buffer import EmptyBuffer
from ggjit.cpu.device import CPU
from ggjit.ops.core.errors import GgjitError, IndexRangeError, OutOfMemory, ParamError
from ggjit.ops.core.host_memory import give_back_memory
from ggjit.ops.core.machine import available_nbytes
from ggjit.ops.core.record import WORD
from ggjit.ops.native import isa

MAX_ARENAS = 1 << 16


class ArenaSpan:
    """A range of an arena, in the form in which a buffer's methods take a tensor."""
    __slots__ = ("buffer", "offs", "nbytes")

    def __init__(self, buffer, offs, nbytes):
        self.buffer, self.offs, self.nbytes = buffer, offs, nbytes

    def _count_write(self):
        """Do nothing: the driver keeps the versions of tensors."""


class WorkerDevice:
    """The device that a worker lends, shared by its sessions.

    memory_nbytes: at most so much for all arenas and graphs; keep_nbytes: of weights on disk
    (engine/cluster/weight_cache.py), 0: none.
    own: weights of files of its own, get(key, nbytes) -> array or None (models/files/own_weights.py).
    """

    def __init__(self, memory_nbytes=None, n_threads=None, keep_nbytes=0, tls=None, own=None):
        self.device, self.tls, self.own = CPU, tls, own
        self.backend = CPU.init_backend("fuse=0" + (f",n_threads={n_threads}" if n_threads else ""))
        self.memory_nbytes = memory_nbytes or available_nbytes() or CPU.memory()[1]
        self.used_nbytes = 0
        self.weight_cache = WeightCache(keep_nbytes) if keep_nbytes else None
        self.counters = collections.Counter()       # messages, bytes_in, bytes_out, graphs, runs, fetched
        self.send_queues = {}                       # {secret of a driver: SendQueue}
        self._lock = threading.Lock()               # sessions allocate in threads of their own

    def describe(self):
        free, total = self.memory()
        return {"device": self.device.name, "description": self.device.description, "isa": isa.ISA,
                "alignment": self.backend.alignment, "free": free, "total": total,
                "n_threads": self.backend.n_threads, "keeps": self.weight_cache is not None or self.own is not None}

    def memory(self):
        """(free, total) bytes for arenas and graphs."""
        return max(0, self.memory_nbytes - self.used_nbytes), self.memory_nbytes

    def take(self, nbytes, what):
        """Count bytes that a driver uses.  Errors: OutOfMemory."""
        with self._lock:
            free, total = self.memory()
            if nbytes > free:
                raise OutOfMemory(f"the worker lends {total:,} bytes, {free:,} are free, {nbytes:,} were asked for "
                                  f"({what}); give it fewer layers, a smaller n_ctx, or start it with a larger "
                                  f"--memory")
            self.used_nbytes += nbytes

    def give(self, nbytes):
        """Count bytes as free again."""
        with self._lock:
            self.used_nbytes -= nbytes

    def alloc(self, nbytes):
        self.take(nbytes, "tensors")
        try:
            return self.device.buffer_type().alloc_buffer(nbytes)
        except BaseException:
            self.give(nbytes)
            raise

    def free(self, buf):
        self.give(buf.size)
        buf.free()


def _alone(error):
    """The error without the calls it came through, whose variables hold the rows and bytes of a message."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


class Session:
    """One driver's arenas and graphs.  One thread reads messages, executes them and answers."""

    def __init__(self, machine):
        self.machine, self.backend = machine, machine.backend
        self.arenas, self.graphs = {}, p.GraphCache(self._dropped)
        self.empty = EmptyBuffer(machine.device.buffer_type())
        self.send_queue, self._secret, self.heartbeat = SendQueue(), None, 1.0
        self._peers = {}                # {address: Peer}
        self._placed = False            # was the payload of the next message read straight into the arena?
        self.waits = False              # True while this session waits for another worker
        self.left = False               # True once the driver has disconnected while a graph ran
        self._fetches = self.send_queue  # the SendQueue whose bytes this session waits for

    def greeted(self, greeting):
        """Take over what the driver's greeting says: its secret, with which workers may fetch what it pushes, and its
        heartbeat, the seconds between two signs that something runs."""
        secret = greeting.get("secret")
        self.heartbeat = max(0.02, min(60.0, float(greeting.get("heartbeat", 1.0))))       # NaN gives 60
        if isinstance(secret, bytes) and len(secret) == p.SECRET_NBYTES:
            if self.machine.send_queues.setdefault(secret, self.send_queue) is not self.send_queue:
                raise wire.BadMessage("the secret is in use by another driver")
            self._secret = secret

    def disconnect(self):
        """The driver has disconnected: end the waits of other workers for its bytes, and the connections to them."""
        self.machine.send_queues.pop(self._secret, None)
        self.send_queue.close()
        for peer in self._peers.values():
            peer.close()
        self._peers = {}

    def stop_waiting(self):
        """The driver has disconnected: end this session's waits for other workers.  May be called from any thread."""
        self.left = True
        self.send_queue.close()
        self._fetches.wake()
        for peer in list(self._peers.values()):
            peer.end()

    def close(self):
        """Give all memory back."""
        self.graphs.clear()
        for buf in self.arenas.values():
            self.machine.free(buf)
        self.arenas = {}
        give_back_memory()

    # ------------------------------------------------------------ messages
    def execute(self, message, payload):
        """(header of the answer, its payload as parts, which may be memory of arenas)."""
        seq, ops = _checked_message(message)
        payload = memoryview(payload)
        self.machine.counters.update(messages=1, bytes_in=len(payload))
        failed, results, out, at = None, [], [], 0
        for i, op in enumerate(ops):
            try:
                run, n_payload = self._prepared(op)
                if at + n_payload > len(payload):
                    raise wire.BadMessage(f"op {op[0]} needs {n_payload} bytes; {len(payload) - at} are left")
                piece = payload[at:at + n_payload]
                at += n_payload
                if failed is not None and op[0] not in _EVEN_IF_FAILED:
                    continue
                found = run(piece, failed is not None)
                if isinstance(found, int | list):
                    results.append(found)
                elif found is not None:         # later messages may write to this arena
                    out.append(found if all(later[0] in (p.GET, p.PUSH) for later in ops[i + 1:]) else bytes(found))
            except Exception as e:
                failed = failed or _alone(e)
        self._placed = False
        self.machine.counters["bytes_out"] += sum(map(len, out))
        if failed is not None:
            return wire.pack([seq, p.FAILED, [type(failed).__name__, str(failed)[:4000]]]), []
        return wire.pack([seq, p.OK, results]), out

    def _prepared(self, op):
        """(function of the payload and whether the message has failed, bytes of payload) of one op, checked."""
        if not isinstance(op, list) or not op or type(op[0]) is not int or not 0 <= op[0] < len(_OPS):
            raise wire.BadMessage(f"unknown op {op!r:.100}")
        name, kinds, n_payload = _OPS[op[0]]
        args = op[1:]
        if len(args) != len(kinds) or not all(_is(kind, a) for kind, a in zip(kinds, args, strict=True)):
            raise wire.BadMessage(f"{name}: bad arguments {args!r:.100}")
        return functools.partial(getattr(self, f"_{name}"), *args), n_payload(*args)

    def _span(self, arena, offs, nbytes):
        buf = self.arenas.get(arena)
        if buf is None:
            raise IndexRangeError(f"arena {arena} does not exist")
        if offs + nbytes > buf.size:
            raise IndexRangeError(f"bytes {offs}..{offs + nbytes} are outside arena {arena} of {buf.size:,} bytes")
        return ArenaSpan(buf, offs, nbytes)

    # ------------------------------------------------------------ ops
    def _alloc(self, arena, nbytes, payload, failed):
        if arena in self.arenas or len(self.arenas) >= MAX_ARENAS or not nbytes:
            raise ParamError(f"arena {arena} of {nbytes} bytes: expected a new number, at least 1 byte, and at most "
                             f"{MAX_ARENAS:,} arenas")
        self.arenas[arena] = self.machine.alloc(nbytes)

    def _free(self, arena, payload, failed):
        self.graphs.drop_arena(arena)
        buf = self.arenas.pop(arena, None)
        if buf is not None:                     # None: it could not be allocated
            self.machine.free(buf)

    def _set(self, arena, offs, nbytes, payload, failed):
        if self._placed:                        # the payload was read to where `sink` said
            return
        span = self._span(arena, offs, nbytes)
        span.buffer.set_tensor(span, payload, 0)

    def sink(self, message, nbytes):
        """The memory that a message's payload is read into: the tensor's own for a single large SET, else None."""
        op = message[1][0] if isinstance(message, list) and len(message) == 2 and isinstance(message[1], list) \
            and len(message[1]) == 1 else None
        if nbytes < wire.SMALL_NBYTES or not isinstance(op, list) or op[:1] != [p.SET] or op[-1] != nbytes:
            return None
        try:
            _checked_message(message)
            self._prepared(op)
            span = self._span(*op[1:])
        except GgjitError:                      # `execute` reports it
            return None
        self._placed = True
        return memoryview(span.buffer.host_bytes(span.offs, span.nbytes))

    def _fill(self, arena, offs, nbytes, value, payload, failed):
        span = self._span(arena, offs, nbytes)
        if value > 255:
            raise ParamError(f"a byte is 0 to 255, got {value}")
        span.buffer.memset_tensor(span, value, 0, nbytes)

    def _copy(self, source, source_offs, target, target_offs, nbytes, payload, failed):
        a, b = self._span(source, source_offs, nbytes), self._span(target, target_offs, nbytes)
        b.buffer.set_tensor(b, a.buffer.get_tensor(a, 0, nbytes), 0)

    def _get(self, arena, offs, nbytes, payload, failed):
        span = self._span(arena, offs, nbytes)
        return memoryview(span.buffer.host_bytes(span.offs, nbytes))

    def _graph(self, key, n_rows, names_nbytes, payload, failed):
        rows = np.frombuffer(payload, np.int64, n_rows * ROW_WORDS).reshape(n_rows, ROW_WORDS)
        arenas = {int(a) for a in np.unique(rows[:, -2])} - {-1}
        self.machine.counters["graphs"] += 1
        nbytes = graph_nbytes(n_rows, names_nbytes)
        try:
            self.machine.take(nbytes, "a graph")
        # p.RUN will report it; the graph is still listed, so that both sides' caches stay equal
        except OutOfMemory as e:
            plan, nbytes = _alone(e), 0
        else:
            try:
                names = bytes(payload[n_rows * ROW_WORDS * WORD:]).decode().split("\0", MAX_ROWS)
                graph, placement = decode(rows, names, self.arenas, self.empty)
                plan = self.backend.graph_plan_create(graph, placement)
            except Exception as e:
                plan = _alone(e)
                self.machine.give(nbytes)
                nbytes = 0
        self.graphs.put(key, (plan, nbytes), arenas)

    def _dropped(self, value):
        self.machine.give(value[1])

    def _run(self, key, payload, failed):
        found = self.graphs.use(key)
        if failed:
            return None
        if found is None:
            raise ParamError("a graph that was not sent")
        plan = found[0]
        if isinstance(plan, Exception):
            raise plan
        self.machine.counters["runs"] += 1
        t0 = time.perf_counter_ns()
        plan.compute()
        self.backend.synchronize()
        return time.perf_counter_ns() - t0

    def _memory(self, payload, failed):
        return [*self.machine.memory()]

    def _have(self, arena, offs, nbytes, key, payload, failed):
        span = self._span(arena, offs, nbytes)
        raw = next((raw for cache in (self.machine.own, self.machine.weight_cache) if cache is not None
                    and (raw := cache.get(key, nbytes)) is not None), None)
        if raw is None:
            return 0
        span.buffer.set_tensor(span, raw, 0)
        return 1

    def _keep(self, arena, offs, nbytes, key, payload, failed):
        span = self._span(arena, offs, nbytes)
        cache = self.machine.weight_cache  # another session can end the keeping
        if cache is not None:
            try:
                cache.put(key, np.frombuffer(span.buffer.get_tensor(span, 0, nbytes), np.uint8))
            except OSError:             # the disk is full or cannot be written: weights are no longer kept
                self.machine.weight_cache = None

    # ------------------------------------------------------------ copies between workers
    def _push(self, arena, offs, nbytes, number, payload, failed):
        raw = None
        try:
            if not failed:
                span = self._span(arena, offs, nbytes)
                raw = bytes(span.buffer.get_tensor(span, 0, nbytes))
        finally:
            self.send_queue.put(number, raw)

    def _drop(self, number, payload, failed):
        self.send_queue.drop(number)

    @contextlib.contextmanager
    def _waiting(self):
        self.waits = True
        try:
            yield
        finally:
            self.waits = False

    def _from_peer(self, address, secret, number, into):
        """Read what another worker pushed."""
        if self.left:
            raise GgjitError("the driver has disconnected")
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = Peer(address, self.machine.tls, 5 * self.heartbeat)
        with self._waiting():
            peer.fetch(secret, number, into)

    def _take(self, arena, offs, nbytes, address, secret, number, payload, failed):
        if failed:                      # the bytes would have been fetched by this message alone: free them
            into = memoryview(bytearray(min(nbytes, p.FRAME_NBYTES)))
        else:
            span = self._span(arena, offs, nbytes)
            into = memoryview(span.buffer.host_bytes(span.offs, nbytes))
        self._from_peer(address, secret, number, into)

    def _peer(self, address, secret, payload, failed):
        try:
            self._from_peer(address, secret, 0, memoryview(b""))
        except GgjitError:
            return 0
        return 1

    def _fetch(self, secret, number, nbytes, payload, failed):
        send_queue = self.machine.send_queues.get(secret)
        if send_queue is None:
            raise ParamError("the driver whose bytes are asked for is not connected here")
        self._fetches = send_queue
        with self._waiting():
            raw = send_queue.take(number, lambda: self.left) if nbytes else b""
        if len(raw) != nbytes:
            raise ParamError(f"copy {number} has {len(raw):,} bytes, not {nbytes:,}")
        self.machine.counters["fetched"] += nbytes
        return raw


def _is(kind, value):
    if kind is int:
        return type(value) is int and 0 <= value < 1 << 62
    if kind is str:
        return isinstance(value, str) and len(value) < 300
    return isinstance(value, bytes) and len(value) == 16


_none = lambda *args: 0                 # noqa: E731
_OPS = [("alloc", (int, int), _none), ("free", (int,), _none), ("set", (int, int, int), lambda a, o, n: n),
        ("fill", (int, int, int, int), _none), ("copy", (int, int, int, int, int), _none),
        ("get", (int, int, int), _none),
        ("graph", (bytes, int, int), lambda key, rows, names: rows * ROW_WORDS * WORD + names),
        ("run", (bytes,), _none), ("memory", (), _none), ("have", (int, int, int, bytes), _none),
        ("keep", (int, int, int, bytes), _none), ("peer", (str, bytes), _none), ("push", (int, int, int, int), _none),
        ("drop", (int,), _none), ("take", (int, int, int, str, bytes, int), _none), ("fetch", (bytes, int, int), _none)]
_EVEN_IF_FAILED = p.FREE, p.GRAPH, p.RUN, p.PUSH, p.DROP, p.TAKE


def _checked_message(message):
    if not isinstance(message, list) or len(message) != 2 or type(message[0]) is not int or message[0] < 1 \
            or not isinstance(message[1], list):
        raise wire.BadMessage(f"malformed message {message!r:.100}")
    n = sum(op[3] for op in message[1] if isinstance(op, list) and len(op) == 4 and op[0] == p.GET
            and type(op[3]) is int)
    if n > wire.MAX_PAYLOAD_NBYTES:
        raise wire.BadMessage(f"{n:,} bytes asked for at once; at most {wire.MAX_PAYLOAD_NBYTES:,}")
    return message


# ---------------------------------------------------------------- one connection
def serve(conn, machine, gate=None):
    """Answer one driver until it disconnects.  gate: a threading.Event; nothing is executed until it is set (tests)."""
    session, answers = Session(machine), None
    try:
        conn.write(wire.pack({**p.hello(), **machine.describe()}))
        theirs, _ = conn.read(limit_nbytes=0, seconds=wire.HANDSHAKE_SECONDS)
        p.check_hello(p.hello(), theirs, "the driver")
        session.greeted(theirs)
        conn.admit()
        conn.sock.settimeout(None)
        answers = _Answers(conn, session)
        while True:
            message, payload = conn.read(session.sink, moved=answers.moved)
            if gate is not None:
                gate.wait()
            answers.running = True
            answers.send(*session.execute(message, payload))
    except (OSError, GgjitError, TypeError, ValueError):
        return                                  # it has disconnected, or is no ggjit of this version
    finally:
        if answers is not None:
            answers.ended.set()
        conn.end()
        session.disconnect()
        session.close()


class _Answers:
    """What goes back over one connection; while something runs, another thread sends a heartbeat.

    While a message is read only `moved` writes, in the thread that reads: TLS takes one thread at a time.
    """

    def __init__(self, conn, session):
        self.conn, self.session, self.running = conn, session, False
        self.ended, self._sending = threading.Event(), threading.Lock()
        self._moved = time.monotonic()
        threading.Thread(target=self._beat, daemon=True, name="ggjit-beat").start()

    def send(self, header, parts):
        with self._sending:
            self.running = False
            self.conn.write(header, parts)

    def moved(self):
        """A piece of a large message came: over a slow connection that is a heartbeat, too."""
        now = time.monotonic()
        if now - self._moved > self.session.heartbeat:
            self._moved = now
            self._send_status(p.BUSY)

    def _send_status(self, status):
        self.conn.write(wire.pack([0, status, []]))

    def _beat(self):
        try:
            while not self.ended.wait(self.session.heartbeat):
                if self.conn.is_silent():
                    self.conn.end()
                if self._sending.acquire(blocking=False):       # not while an answer is being sent
                    try:
                        if self.running:
                            self._send_status(p.WAITS if self.session.waits else p.BUSY)
                    finally:
                        self._sending.release()
        except OSError:
            self.session.stop_waiting()              # the thread that serves notices when it reads or sends
