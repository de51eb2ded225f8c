"""Remote devices: another process or machine computes, through the same slots as every other device.

    driver                                          worker
    buf.set_tensor(x)     kept ------.
    backend.graph_compute(g)          `-> [SET x, RUN g, GET y]  ->  computes
    buf.get_tensor(y)     <-------------- y's bytes with the answer of RUN

A device is one ordered stream of messages, so copies, runs and events need no other order than that of the calls.
Small writes wait for the message of the next run.  What was read after the last run of a graph comes with the answer of
its next run: a step costs one message each way.  Buffers are numbers and sizes here; the bytes are the worker's.
"""
import collections
import os
import threading
import weakref

import numpy as np

from ggjit.cluster import protocol as p
from ggjit.cluster.backend import RemoteBackend, RemoteEvent
from ggjit.cluster.buffer import RemoteBufferType
from ggjit.cluster.stream import SLOWER, TIMEOUT_SECONDS, Stream
from ggjit.core.backend import TYPE_GPU, Device, DeviceLost
from ggjit.core.content_key import content_key
from ggjit.cpu.device import CPU, parse_params
from ggjit.ops.core.interrupts import defer_interrupts
from ggjit.ops.core.record import OP, VIEW_OPS
from ggjit.ops.core.spec import ops_with

SMALL_NBYTES = 64 << 10         # writes up to it wait for the next message
KEPT_NBYTES = 1 << 20           # queued writes of this size are sent at once
IN_FLIGHT = 3                   # large messages that may be under way before the first answer is awaited
AHEAD_NBYTES = 1 << 20          # a result up to it comes with the answer of its run


_DEVICES = weakref.WeakSet()


def _after_fork():
    """The device stays with the parent; its lock may be held by a thread that does not exist here."""
    for device in list(_DEVICES):
        device._lock = threading.RLock()
        device.stream.leave()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class RemoteDevice(Device):
    """A worker's processor and memory.

    `address`; `facts`: what it said of itself; `epoch`: how often it was opened again.
    """
    type, is_async = TYPE_GPU, True

    def __init__(self, address, name=None, tls=None, timeout=None, find=None):
        """find: () -> the address of the worker that takes the place of one that was lost."""
        self.address, self.name, self._tls = address, name or address, tls
        self._timeout = TIMEOUT_SECONDS if timeout is None else timeout
        self._find = find or (lambda: address)
        self.epoch, self._lock, self._ending = -1, threading.RLock(), None
        self._freed = collections.deque()       # (stream, arena): buffers that died, in whatever thread
        self._buffer_type = RemoteBufferType(self)
        self._open()
        _DEVICES.add(self)

    def _open(self):
        self.stream = Stream(self.address, self._tls, self._timeout, self.name, self.epoch + 1)
        self.facts, self.epoch = self.stream.facts, self.epoch + 1
        self.alignment = _fact(self.facts, "alignment", 1, 1 << 12)
        _fact(self.facts, "total", 1, 1 << 60)
        self._n_arenas, self.graphs = 0, p.GraphCache()
        self._queued, self._queued_nbytes = [], 0       # [(op, payload or None)] of the next message
        self._sent = collections.deque()        # PendingReplies that were not checked for errors yet
        self._failed = None                     # the first error that was found there and not raised yet
        # state of the last run, valid while nothing was written since: its `wanted`; {span: (answer, at)} of results
        # that come with it; {span: number} of those it pushed
        self._last_run, self._ahead, self._pushed = None, {}, {}
        self._n_pushed = 0
        self._reached = weakref.WeakKeyDictionary()     # {stream of another device: does this worker reach it?}
        if self._ending is not None:
            self._ending.detach()
        self._ending = weakref.finalize(self, self.stream.close)
        self._ending.atexit = False

    def reopen(self):
        """Connect again to the worker, or to the one that took its place: the epoch rises, and its memory is empty.

        Buffers, schedulers and models made before stay dead: make them again; weights come from the same files, and a
        text is computed again from its tokens, so the results are the same bits.  Errors: DeviceLost.
        """
        with self._lock:
            self.stream.close()
            self.address = self._find()
            self._open()
        return self

    def close(self):
        """End the connection; the worker gives the memory back.  A second call does nothing."""
        self.stream.close()

    # ------------------------------------------------------------ slots
    @property
    def description(self):
        return f"{str(self.facts.get('description', '?')):.100} at {self.address}"

    def memory(self):
        return tuple(self._asked([p.MEMORY], lambda x: isinstance(x, list) and [*map(type, x)] == [int, int]))

    def init_backend(self, params=""):
        parse_params(params, {})
        return RemoteBackend(self)

    def buffer_type(self):
        return self._buffer_type

    def supports_op(self, t):
        """As the local CPU, which has the same kernels as the worker; a worker knows no type of a user."""
        if any(x is not None and x.type.is_own for x in (t, *t.src)):
            return False
        return t.op in VIEW_OPS or t.op not in ops_with("calls_python") and t.op != OP.NONE and CPU.supports_op(t)

    def event_new(self):
        return RemoteEvent()

    def event_synchronize(self, event):
        if event.answer is not None:
            if event.stream is self.stream:
                self.finish(event.answer)
            event.stream.wait(event.answer)

    # ------------------------------------------------------------ messages
    def queue(self, op, part=None, nbytes=0):
        """An op without an answer goes with the next message."""
        with self._lock:
            self.stream.check()
            self._wrote()
            self._queued_nbytes += nbytes if part is None else len(part)
            self._queued.append((op, part))
            if self._queued_nbytes > KEPT_NBYTES or len(self._queued) > 4096:
                self.flush()

    def _wrote(self):
        if self._last_run is not None:
            self._queued += [([p.DROP, number], None) for number in self._pushed.values()]
            self._last_run, self._ahead, self._pushed = None, {}, {}

    def flush(self, op=None, part=None, **how):
        """Send what is queued, and one op more.  Returns its PendingReply; None where there is nothing to send."""
        with self._lock, defer_interrupts():     # a message cut in two would put other bytes elsewhere
            return self._flushed([] if op is None else [(op, part)], how)

    def _flushed(self, more, how):
        self._collect()
        queued, self._queued, self._queued_nbytes = self._queued + more, [], 0
        if not queued:
            self.stream.check()
            return None
        answer = self.stream.send([op for op, _ in queued], [part for _, part in queued if part is not None], **how)
        self._sent.append(answer)
        if len(self._sent) > 64:
            self.stream.drain()
        while len(self._sent) > 64 and self._sent[0].done and self._sent[0].error is None:
            self._sent.popleft().fill()
        return answer

    def ask(self, op, **how):
        """Send an op and wait for its answer.  Errors: those of all messages up to it."""
        answer = self.flush(op, **how)
        self.finish(answer)
        return answer

    def _asked(self, op, fits):
        """The worker's answer to an op, checked by `fits`.  Errors: those of `ask`; DeviceLost where it is no such
        answer."""
        answer = self.ask(op)
        if not answer.results or not fits(answer.results[-1]):
            raise self.stream.lose(f"it answers {answer.results!r:.60} to op {op[0]}")
        return answer.results[-1]

    def finish(self, last=None):
        """Wait for all that was sent, or up to `last`.  Errors: DeviceLost, once for what was under way, and the first
        that the worker reports."""
        with self._lock:
            while self._sent and (last is None or self._sent[0].seq <= last.seq):
                answer = self._sent[0]
                try:
                    self.stream.wait(answer)
                except DeviceLost:
                    self._sent.clear()
                    self._failed = None
                    raise
                if answer.error is not None and not answer.seen:
                    self._failed = self._failed or answer.error
                    answer.seen = True
                answer.fill()
                self._sent.popleft()            # removed last, so that after a Ctrl-C the answer is looked at again
            failed, self._failed = self._failed, None
            if failed is not None:
                raise failed

    # ------------------------------------------------------------ memory
    def new_arena(self, nbytes):
        """(stream, number) of new memory of `nbytes` bytes at the worker.  Errors: OutOfMemory, DeviceLost."""
        with self._lock:
            self._n_arenas += 1
            arena, stream = self._n_arenas, self.stream
            try:
                self.ask([p.ALLOC, arena, nbytes])
            except BaseException:
                # the arena may exist: the error may belong to an earlier message
                self.release(stream, arena)
                raise
            return stream, arena

    def release(self, stream, arena):
        """Have a remote arena freed with the next message.  Finalizers call this, in any thread at any time."""
        self._freed.append((stream, arena))

    def _collect(self):
        """Arenas without references: their frees come before the rest of the message, and their graphs go.

        The caller holds the lock, so what is in the deque stays there until it is taken here; `release` only appends.
        """
        while self._freed:
            stream, arena = self._freed.popleft()
            if stream is self.stream:
                self.graphs.drop_arena(arena)
                self._queued.append(([p.FREE, arena], None))

    def write(self, arena, offs, raw):
        """Bytes of a flat array."""
        nbytes = raw.size
        if nbytes <= SMALL_NBYTES:
            self.queue([p.SET, arena, offs, nbytes], raw.tobytes())
            return
        with self._lock:
            self._wrote()
            self.flush()
            borrowed = nbytes > p.FRAME_NBYTES  # smaller payloads are copied, so that nothing waits for the send
            for at in range(0, nbytes, p.FRAME_NBYTES):
                piece = raw[at:at + p.FRAME_NBYTES]
                part = memoryview(piece) if borrowed else piece.tobytes()
                self._bounded(self.flush([p.SET, arena, offs + at, piece.size], part))
            if borrowed:
                self.finish()

    def write_weights(self, arena, offs, raw):
        """As `write`, but the bytes are not sent if the worker still has them from an earlier connection."""
        with self._lock:
            self._wrote()
            key = content_key(raw)
            if not self._asked([p.HAVE, arena, offs, raw.size, key], lambda x: x in (0, 1)):
                self.write(arena, offs, raw)
                self.queue([p.KEEP, arena, offs, raw.size, key])

    def push(self, arena, offs, nbytes):
        """Offer bytes of an arena for another worker to fetch; returns the number by which it asks for them."""
        with self._lock, defer_interrupts():
            self.stream.check()
            span = p.PUSH, arena, offs, nbytes
            number = self._pushed.pop(span, None)
            if self._last_run is not None and nbytes <= AHEAD_NBYTES:
                self._last_run[span] = True
            if number is None:
                number = self._next_push()
                self._bounded(self.flush([*span, number]))
            return number

    def _next_push(self):
        self._n_pushed += 1
        return self._n_pushed

    def copy_from(self, other, source, target, nbytes):
        """Bytes of another worker's arena, in the order of both streams.  source, target: (arena, byte).  False: this
        worker does not reach that one."""
        if not self._reaches(other):
            return False
        stream = other.stream
        for at in range(0, nbytes, p.FRAME_NBYTES):
            n = min(p.FRAME_NBYTES, nbytes - at)
            number = other.push(source[0], source[1] + at, n)
            self.queue([p.TAKE, target[0], target[1] + at, n, stream.address, stream.secret, number], nbytes=n)
            if nbytes > p.FRAME_NBYTES:
                self._bounded(self.flush())
        return True

    def _reaches(self, other):
        with self._lock:
            found = self._reached.get(other.stream)
            if found is None:
                found = self._asked([p.PEER, other.stream.address, other.stream.secret], lambda x: x in (0, 1)) == 1
                self._reached[other.stream] = found
            return found

    def _bounded(self, answer):
        """Wait until at most IN_FLIGHT large messages are unanswered; returns `answer`."""
        if len(self._sent) > IN_FLIGHT:
            self.stream.wait(self._sent[-1 - IN_FLIGHT])
        return answer

    def read(self, arena, offs, nbytes):
        """Bytes of an arena, as a bytes-like object."""
        with self._lock:
            self.stream.check()
            ahead = self._ahead.get((p.GET, arena, offs, nbytes))
            if self._last_run is not None and nbytes <= AHEAD_NBYTES:
                self._last_run[p.GET, arena, offs, nbytes] = True
            if ahead is not None:
                answer, at = ahead
                self.finish()
                if answer.error is None:
                    return bytes(memoryview(answer.payload)[at:at + nbytes])
            if nbytes <= p.FRAME_NBYTES:
                answer = self.ask([p.GET, arena, offs, nbytes], nbytes=nbytes)
                return bytes(answer.payload)
            out = np.empty(nbytes, np.uint8)
            for at in range(0, nbytes, p.FRAME_NBYTES):
                piece = out[at:at + p.FRAME_NBYTES]
                self._bounded(self.flush([p.GET, arena, offs + at, piece.size], into=memoryview(piece),
                                         nbytes=piece.size))
            self.finish()
            return out.data

    def read_async(self, arena, offs, nbytes):
        """The same, filled in once its message was answered: at `synchronize`, or an event recorded after it."""
        with self._lock:
            self.stream.check()
            span = p.GET, arena, offs, nbytes
            if nbytes > AHEAD_NBYTES:
                return self.read(arena, offs, nbytes)
            answer, at = self._ahead.get(span) or (self.flush([*span], nbytes=nbytes), 0)
            if self._last_run is not None:
                self._last_run[span] = True
            out = bytearray(nbytes)
            answer.fills.append((at, memoryview(out)))
            if answer not in self._sent:
                answer.fill()
            return out

    # ------------------------------------------------------------ graphs
    def run(self, work):
        """Submit a graph: it is sent where the worker does not have it, results that were read last time come back."""
        with self._lock, defer_interrupts():
            self.stream.check()
            self._wrote()
            self._collect()                     # first, since freed arenas remove graphs from the list
            ops = [([p.RUN, work.key], None)]
            if self.graphs.use(work.key) is None:
                names = "\0".join(n.replace("\0", " ") for n in work.names).encode()
                ops.insert(0, ([p.GRAPH, work.key, len(work.rows), len(names)], work.rows.tobytes() + names))
                self.graphs.put(work.key, True, {int(a) for a in work.rows[:, -2]} - {-1})
            work.wanted = {span: False for span, was_read in work.wanted.items() if was_read}
            places, at = {}, 0
            for span in work.wanted:
                if span[0] == p.PUSH:
                    self._pushed[span] = number = self._next_push()
                    ops.append(([*span, number], None))
                else:
                    ops.append(([*span], None))
                    places[span] = at
                    at += span[3]
            seconds = work.seconds()
            limit = None if seconds is None else max(self._timeout, SLOWER * seconds)
            answer = work.answer = self._flushed(ops, {"nbytes": at, "limit": limit})
            self._ahead = {span: (answer, at) for span, at in places.items()}
            self._last_run = work.wanted
            return answer


def _fact(facts, name, low, high):
    """A number that a worker said of itself."""
    value = facts.get(name)
    if type(value) is not int or not low <= value <= high:
        raise DeviceLost(f"the worker reports {name} = {value!r:.40}, expected an integer from {low} to {high}")
    return value
