"""What a worker does for one driver: arenas, graphs, and the ops of the messages in their order
(engine/cluster/protocol.py).
"""
import asyncio
import collections
import concurrent.futures
import functools
import threading
import time

import numpy as np

from ggjit.cluster import protocol as p
from ggjit.cluster import wire
from ggjit.cluster.encoding import ROW_WORDS, decode
from ggjit.cluster.kept import KeptWeights
from ggjit.cluster.outbox import Outbox
from ggjit.cluster.peer import Peer
from ggjit.core.buffer import EmptyBuffer
from ggjit.cpu.device import CPU
from ggjit.ops.core.errors import GgjitError, IndexRangeError, OutOfMemory, ParamError
from ggjit.ops.core.record import WORD
from ggjit.ops.native import isa

MAX_ARENAS = 1 << 16
WINDOW = 4                      # messages of a driver that are read ahead
HELLO_SECONDS = 10.0
QUICK_SECONDS = 1e-3            # graphs of less run on the thread that reads: two changes of threads take a tenth of it
QUICK_OPS = 16


def available_nbytes():
    """Memory that processes can still have: what is free, and what the system keeps of files."""
    try:
        with open("/proc/meminfo", encoding="ascii") as f:
            return next(int(line.split()[1]) << 10 for line in f if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return CPU.memory()[1]


class Span:
    """Bytes of an arena, as the slots of a buffer take a tensor."""
    __slots__ = ("buffer", "offs", "nbytes")

    def __init__(self, buffer, offs, nbytes):
        self.buffer, self.offs, self.nbytes = buffer, offs, nbytes

    def _count_write(self):
        """Versions are the driver's."""


class Machine:
    """The device that a worker lends, shared by its sessions.

    memory_nbytes: at most so much for all arenas; keep_nbytes: of weights on disk (engine/cluster/kept.py), 0: none.
    own: weights of files of its own, get(key, nbytes) -> array or None (models/files/own_weights.py).
    """

    def __init__(self, memory_nbytes=None, n_threads=None, keep_nbytes=0, tls=None, own=None):
        self.device, self.tls, self.own = CPU, tls, own
        self.backend = CPU.init_backend("fuse=0" + (f",n_threads={n_threads}" if n_threads else ""))
        self.memory_nbytes = memory_nbytes or available_nbytes()
        self.used_nbytes = 0
        self.kept = KeptWeights(keep_nbytes) if keep_nbytes else None
        self.counters = collections.Counter()       # messages, bytes_in, bytes_out, graphs, runs, fetched
        self.outboxes = {}                          # {secret of a driver: Outbox}
        self._lock = threading.Lock()               # sessions allocate in threads of their own

    def describe(self):
        free, total = self.memory()
        return {"device": self.device.name, "description": self.device.description, "isa": isa.ISA,
                "alignment": self.backend.alignment, "free": free, "total": total,
                "n_threads": self.backend.n_threads, "keeps": self.kept is not None or self.own is not None}

    def memory(self):
        """(free, total) bytes for arenas."""
        return max(0, self.memory_nbytes - self.used_nbytes), self.memory_nbytes

    def alloc(self, nbytes):
        with self._lock:
            free, total = self.memory()
            if nbytes > free:
                raise OutOfMemory(f"the worker lends {total:,} bytes, {free:,} are free, {nbytes:,} were asked for; "
                                  f"give it fewer layers, a smaller n_ctx, or start it with a larger --memory")
            buf = self.device.buffer_type().alloc_buffer(nbytes)
            self.used_nbytes += nbytes
        return buf

    def free(self, buf):
        with self._lock:
            self.used_nbytes -= buf.size
        buf.free()


class Session:
    """One driver's arenas and graphs.  `execute` is called by one thread."""

    def __init__(self, machine):
        self.machine, self.backend = machine, machine.backend
        self.arenas, self.graphs = {}, p.Recent()
        self._last_seconds = {}         # {key of a graph: what its last run took}
        self.empty = EmptyBuffer(machine.device.buffer_type())
        self.outbox, self._secret, self.heartbeat = Outbox(), None, 1.0
        self._peers = {}                # {address: Peer}
        self._fetched = {}              # {arguments of a TAKE or PEER: bytes, or the error} of the message
        self._placed = False            # the payload of the next message was read to its place
        self.lends = False              # may an answer be memory of an arena? Then nothing runs until it is sent

    def lend(self, greeting):
        """Workers that name the driver's secret may fetch what it pushes; those it fetches from are given its patience.
        """
        secret = greeting.get("secret")
        self.heartbeat = min(max(float(greeting.get("heartbeat", 1.0)), 0.02), 60.0)
        if isinstance(secret, bytes) and len(secret) == p.SECRET_NBYTES:
            if self.machine.outboxes.setdefault(secret, self.outbox) is not self.outbox:
                raise wire.BadMessage("a secret that another driver uses")
            self._secret = secret

    def hang_up(self):
        """The driver has left: what other workers wait for will not come.  Called on the event loop."""
        self.machine.outboxes.pop(self._secret, None)
        self.outbox.close()
        for peer in self._peers.values():
            peer.close()
        self._peers = {}

    def close(self):
        """Give all memory back."""
        self.graphs = p.Recent()
        for buf in self.arenas.values():
            self.machine.free(buf)
        self.arenas = {}

    # ------------------------------------------------------------ messages
    def execute(self, message, payload, fetched=None):
        """(header of the answer, its payload as parts).  fetched: of `prepare`."""
        seq, ops = _checked_message(message)
        payload, self._fetched = memoryview(payload), fetched or {}
        self.machine.counters.update(messages=1, bytes_in=len(payload))
        failed, results, out, at = None, [], [], 0
        for op in ops:
            try:
                run, n_payload = self._prepared(op)
                if at + n_payload > len(payload):
                    raise wire.BadMessage(f"op {op[0]} wants {n_payload} bytes; {len(payload) - at} are left")
                piece = payload[at:at + n_payload]
                at += n_payload
                if failed is not None and op[0] not in (p.FREE, p.GRAPH, p.RUN, p.PUSH, p.DROP):
                    continue
                found = run(piece, failed is not None)
                if found is not None:
                    (results if isinstance(found, int | list) else out).append(found)
            except Exception as e:
                failed = failed or e
        self._placed, self._fetched = False, {}
        self.machine.counters["bytes_out"] += sum(map(len, out))
        if failed is not None:
            return wire.pack([seq, p.FAILED, [type(failed).__name__, str(failed)[:4000]]]), []
        return wire.pack([seq, p.OK, results]), out

    def is_quick(self, message):
        """Is it done before another thread would have begun?  Then it runs where it was read."""
        ops = message[1] if isinstance(message, list) and len(message) == 2 and isinstance(message[1], list) else ()
        seconds = 0.0
        for op in ops[:QUICK_OPS + 1]:
            if not isinstance(op, list) or not op or op[0] in _SLOW:
                return False
            if op[0] == p.PUSH and not self.outbox.has_room(p.FRAME_NBYTES):
                return False
            if op[0] == p.RUN:
                seconds += self._last_seconds.get(op[1], 1.0) if len(op) == 2 and isinstance(op[1], bytes) else 1.0
        return len(ops) <= QUICK_OPS and seconds < QUICK_SECONDS

    def _prepared(self, op):
        """(function of the payload and whether the message has failed, bytes of payload) of one op, checked."""
        if not isinstance(op, list) or not op or type(op[0]) is not int or not 0 <= op[0] < len(_OPS):
            raise wire.BadMessage(f"an op that is none: {op!r:.100}")
        name, kinds, n_payload = _OPS[op[0]]
        args = op[1:]
        if len(args) != len(kinds) or not all(_is(kind, a) for kind, a in zip(kinds, args, strict=True)):
            raise wire.BadMessage(f"{name}: arguments {args!r:.100}")
        return functools.partial(getattr(self, f"_{name}"), *args), n_payload(*args)

    def _span(self, arena, offs, nbytes):
        buf = self.arenas.get(arena)
        if buf is None:
            raise IndexRangeError(f"there is no arena {arena}")
        if offs + nbytes > buf.size:
            raise IndexRangeError(f"bytes {offs}..{offs + nbytes} are outside arena {arena} of {buf.size:,} bytes")
        return Span(buf, offs, nbytes)

    # ------------------------------------------------------------ ops
    def _alloc(self, arena, nbytes, payload, failed):
        if arena in self.arenas or len(self.arenas) >= MAX_ARENAS or not nbytes:
            raise ParamError(f"arena {arena} of {nbytes} bytes: a number twice, too many, or nothing")
        self.arenas[arena] = self.machine.alloc(nbytes)

    def _free(self, arena, payload, failed):
        self.graphs.drop_arena(arena)
        buf = self.arenas.pop(arena, None)
        if buf is not None:                     # None: it could not be allocated
            self.machine.free(buf)

    def _set(self, arena, offs, nbytes, payload, failed):
        if self._placed:                        # `sink` said where
            return
        span = self._span(arena, offs, nbytes)
        span.buffer.set_tensor(span, payload, 0)

    def sink(self, message, nbytes):
        """Where the payload of a message is read to, if nothing runs: that of a single SET, to its place."""
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
        raw = span.buffer.host_bytes(offs, nbytes)
        return memoryview(raw) if self.lends else raw.tobytes()     # a copy: what follows may write there

    def _graph(self, key, n_rows, names_nbytes, payload, failed):
        rows = np.frombuffer(payload, np.int64, n_rows * ROW_WORDS).reshape(n_rows, ROW_WORDS)
        arenas = {int(a) for a in rows[:, -2]} - {-1}
        self.machine.counters["graphs"] += 1
        try:
            names = bytes(payload[n_rows * ROW_WORDS * WORD:]).decode().split("\0")
            graph, placement = decode(rows, names, self.arenas, self.empty)
            plan = self.backend.graph_plan_create(graph, placement)
        except Exception as e:                  # p.RUN says so: both sides list it all the same
            plan = e
        self.graphs.put(key, plan, arenas)

    def _run(self, key, payload, failed):
        plan = self.graphs.use(key)
        if failed:
            return None
        if plan is None:
            raise ParamError("a graph that was not sent")
        if isinstance(plan, Exception):
            raise plan
        self.machine.counters["runs"] += 1
        t0 = time.perf_counter_ns()
        plan.compute()
        self.backend.synchronize()
        taken = time.perf_counter_ns() - t0
        if len(self._last_seconds) > 2 * p.MAX_GRAPHS:
            self._last_seconds.clear()
        self._last_seconds[key] = taken * 1e-9
        return taken

    def _memory(self, payload, failed):
        return [*self.machine.memory()]

    def _have(self, arena, offs, nbytes, key, payload, failed):
        span = self._span(arena, offs, nbytes)
        raw = next((raw for kept in (self.machine.own, self.machine.kept) if kept is not None
                    and (raw := kept.get(key, nbytes)) is not None), None)
        if raw is None:
            return 0
        span.buffer.set_tensor(span, raw, 0)
        return 1

    def _keep(self, arena, offs, nbytes, key, payload, failed):
        span = self._span(arena, offs, nbytes)
        if self.machine.kept is not None:
            try:
                self.machine.kept.put(key, np.frombuffer(span.buffer.get_tensor(span, 0, nbytes), np.uint8))
            except OSError:             # a full disk, or one that cannot be written: it goes on without keeping any
                self.machine.kept = None

    # ------------------------------------------------------------ copies between workers
    def _push(self, arena, offs, nbytes, number, payload, failed):
        raw = None
        try:
            if not failed:
                span = self._span(arena, offs, nbytes)
                raw = bytes(span.buffer.get_tensor(span, 0, nbytes))
        finally:
            self.outbox.put(number, raw)

    def _drop(self, number, payload, failed):
        self.outbox.drop(number)

    @staticmethod
    def concerns_others(message):
        """Does `prepare` have something to do?"""
        ops = message[1] if isinstance(message, list) and len(message) == 2 and isinstance(message[1], list) else ()
        return any(isinstance(op, list) and op and op[0] in (p.TAKE, p.PEER, p.FETCH) for op in ops)

    async def prepare(self, message):
        """Wait for what the message needs of other workers, or has for them; errors come out when it is executed.

        Returns {arguments of a TAKE or PEER: bytes, or the error}.
        """
        fetched = {}
        for op in message[1]:
            try:
                self._prepared(op)
            except GgjitError:
                continue
            if op[0] == p.FETCH and op[1] in self.machine.outboxes and op[3]:
                await self.machine.outboxes[op[1]].known(op[2])
            elif op[0] == p.TAKE:
                fetched[tuple(op[4:])] = await self._from_peer(*op[4:], op[3])
            elif op[0] == p.PEER:
                fetched[tuple(op[1:])] = await self._from_peer(*op[1:], 0, 0)
        return fetched

    async def _from_peer(self, address, secret, number, nbytes):
        """What another worker pushed, or the error."""
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = Peer(address, self.machine.tls, 5 * self.heartbeat)
        try:
            return await peer.fetch(secret, number, nbytes)
        except GgjitError as e:
            return e

    def _take(self, arena, offs, nbytes, address, secret, number, payload, failed):
        raw = self._fetched.get((address, secret, number), GgjitError("bytes that were not fetched"))
        if isinstance(raw, Exception):
            raise raw
        span = self._span(arena, offs, nbytes)
        span.buffer.set_tensor(span, raw, 0)

    def _peer(self, address, secret, payload, failed):
        return 0 if isinstance(self._fetched.get((address, secret), GgjitError()), Exception) else 1

    def _fetch(self, secret, number, nbytes, payload, failed):
        outbox = self.machine.outboxes.get(secret)
        if outbox is None:
            raise ParamError("a driver that is not here, or has left")
        raw = outbox.take(number) if nbytes else b""
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
_SLOW = p.ALLOC, p.GRAPH, p.MEMORY, p.HAVE, p.KEEP


def _checked_message(message):
    if not isinstance(message, list) or len(message) != 2 or type(message[0]) is not int or message[0] < 1 \
            or not isinstance(message[1], list):
        raise wire.BadMessage(f"no message: {message!r:.100}")
    n = sum(op[3] for op in message[1] if isinstance(op, list) and len(op) == 4 and op[0] == p.GET
            and type(op[3]) is int)
    if n > wire.MAX_PAYLOAD_NBYTES:
        raise wire.BadMessage(f"{n:,} bytes asked for at once; at most {wire.MAX_PAYLOAD_NBYTES:,}")
    return message


# ---------------------------------------------------------------- one connection
async def serve(comm, machine, gate=None):
    """Answer one driver until it leaves.  gate: an asyncio.Event; while it is not set, nothing is executed (tests)."""
    session, loop = Session(machine), asyncio.get_running_loop()
    thread = concurrent.futures.ThreadPoolExecutor(1, "ggjit-session")
    answers, beat = _Answers(comm), None
    try:
        wire.write(comm, wire.pack({**p.hello(), **machine.describe()}))
        theirs, _ = await asyncio.wait_for(wire.read(comm, limit_nbytes=0), HELLO_SECONDS)
        p.check_hello(p.hello(), theirs, "the driver")
        session.lend(theirs)
        beat = loop.create_task(answers.beat(session.heartbeat))
        while True:
            message, payload = await wire.read(comm, lambda m, n: None if answers.n_running else session.sink(m, n))
            if gate is not None:
                await gate.wait()
            await answers.window.acquire()
            fetched = {}
            if session.concerns_others(message):
                answers.waits = True
                fetched = await session.prepare(message)
                answers.waits = False
            if answers.n_running or not session.is_quick(message):
                answers.n_running += 1
                loop.run_in_executor(thread, session.execute, message, payload, fetched).add_done_callback(answers.ran)
            else:
                session.lends = True
                sent = answers.send(*session.execute(message, payload, fetched))
                session.lends = False
                if sent is not None:
                    await sent
    except (TimeoutError, OSError, GgjitError, TypeError, ValueError):
        return                                  # it left, or does not speak our language
    finally:
        if beat is not None:
            beat.cancel()
        comm.abort()
        session.hang_up()
        thread.submit(session.close)
        thread.shutdown(wait=False)


class _Answers:
    """What goes back over one connection, in order: one thread executes, so what ran first is told first."""

    def __init__(self, comm):
        self.comm, self.window, self.n_running = comm, asyncio.Semaphore(WINDOW), 0
        self.waits = False              # for another worker

    def ran(self, future):
        self.n_running -= 1
        if future.cancelled() or future.exception() is not None:        # no message: BadMessage
            self.comm.abort()
        else:
            self.send(*future.result())

    def send(self, header, parts):
        """Returns a future if it takes longer."""
        try:
            sent = wire.write(self.comm, header, parts)
        except OSError:
            self.comm.abort()
            return None
        sent.add_done_callback(self._written)
        return None if sent.done() else sent

    def _written(self, future):
        """The bytes are out of our hands: the driver may have another message read ahead."""
        if not future.cancelled() and future.exception() is None:
            self.window.release()

    async def beat(self, seconds):
        """While something runs, say so."""
        while True:
            await asyncio.sleep(seconds)
            if (self.n_running or self.waits) and not self.comm.closed():
                wire.write(self.comm, wire.pack([0, p.BUSY if self.n_running else p.WAITS, []]))
