"""The driver's end of one connection: messages go out in order, answers come back in order.

    send(ops, parts) -> Answer        returns at once
    wait(answer)                      until it is there, the worker is lost, or nothing was heard for too long

Every wait ends: a worker that computes says so every so often, and one that says nothing for `timeout` seconds is lost.
A graph that ran before has 20 times its last time, at least `timeout`.  Ctrl-C leaves a wait; the answer is dropped
when it comes.
"""
import asyncio
import collections
import os
import threading
import time

from ggjit.cluster import wire
from ggjit.cluster.loop import event_loop, run
from ggjit.cluster.protocol import BUSY, FAILED, OK, SECRET_NBYTES, WAITS, check_hello, hello
from ggjit.core.backend import DeviceLost
from ggjit.ops.core import errors
from ggjit.ops.core.errors import GgjitError

CONNECT_SECONDS = 5.0
TIMEOUT_SECONDS = 10.0
SLOWER = 20                     # times its last time that a graph may take


class Answer:
    """The answer to one message, which may not be there yet."""
    __slots__ = ("seq", "done", "into", "nbytes", "results", "payload", "error", "limit", "seen", "fills")

    def __init__(self, seq, into, nbytes, limit):
        self.seq, self.into, self.nbytes, self.limit = seq, into, nbytes, limit
        self.done = threading.Event()
        self.results = self.payload = self.error = None
        self.seen = False               # its error was raised
        self.fills = []                 # [(byte of the payload, memoryview that takes a copy from there on)]

    def fill(self):
        """Copy bytes of the payload to where they are wanted; called by who has waited for it."""
        while self.fills:
            at, array = self.fills.pop()
            if self.error is None:
                array[:] = memoryview(self.payload)[at:at + len(array)]


class Stream:
    """A connection to a worker.  `facts`: what it said of itself.  One thread sends at a time: its device's lock."""

    def __init__(self, address, tls, timeout, name, epoch):
        self.address, self.name, self.epoch = address, name, epoch
        self.timeout = TIMEOUT_SECONDS if timeout is None else timeout
        self._pid, self.secret = os.getpid(), os.urandom(SECRET_NBYTES)         # who knows it may fetch what we push
        self.seq = self.last_seq = 0
        self.lost = None                # why it is lost
        self.n_messages = self.n_bytes_out = self.n_bytes_in = 0
        self._n_handed = self._n_taken = 0      # messages given to the loop, and those it has begun to send
        self._waiting = collections.deque()
        self.heard = time.monotonic()
        self.answered = self.heard      # when the last answer came
        self._loop = event_loop()
        try:
            self._comm, self.facts = run(self._open(tls), CONNECT_SECONDS + 1)
        except (OSError, TimeoutError) as e:
            silent = isinstance(e, TimeoutError)
            why = f"nobody answers there within {CONNECT_SECONDS:g} s" if silent else str(e) or repr(e)
            raise DeviceLost(f"{address}: {why}; is `ggjit worker --listen {address}` running, and do both sides have "
                             f"certificates of one CA (tls=)?", name, epoch, 0) from e
        self._own = wire.own_socket(self._comm)         # for sending from other threads than the loop's
        self._sending = threading.Lock()                # while `_own` is used, or closed
        self._reader = asyncio.run_coroutine_threadsafe(self._read(), self._loop)

    async def _open(self, tls):
        comm = await asyncio.wait_for(wire.connect(self.address, tls), CONNECT_SECONDS)
        try:
            facts, _ = await asyncio.wait_for(wire.read(comm), CONNECT_SECONDS)
            check_hello(hello(), facts, self.address)
            wire.write(comm, wire.pack({**hello(), "heartbeat": self.timeout / 5, "secret": self.secret}))
        except BaseException:
            comm.abort()
            raise
        return comm, facts

    # ------------------------------------------------------------ sending
    def send(self, ops, parts=(), into=None, nbytes=0, limit=None):
        """nbytes: of the answer's payload, which a writable memoryview `into` of as many takes; limit: seconds it may
        take beyond those before it."""
        self.check()
        self.seq += 1
        answer = Answer(self.seq, into, nbytes, limit)
        header = wire.pack([self.seq, ops])
        self.n_messages += 1
        self.n_bytes_out += len(header) + sum(map(len, parts))
        if not self._waiting:
            self.heard = self.answered = time.monotonic()
        self._waiting.append(answer)
        # from this thread, if the loop has nothing to send: a change of threads less
        with self._sending:
            left = wire.write_now(self._own, self._comm, header, parts) if self._n_handed == self._n_taken else None
        if left is None or left:
            self._n_handed += 1
            self._loop.call_soon_threadsafe(self._write, header, parts, left)
        return answer

    def _write(self, header, parts, left):
        if self.lost is None:
            try:
                if left is None:
                    wire.write(self._comm, header, parts)
                else:
                    self._comm.stream.write(left)
            except (OSError, AttributeError) as e:
                self._lose(f"the connection ended ({str(e) or type(e).__name__})")
        self._n_taken += 1

    def check(self):
        """DeviceLost, if the worker is gone."""
        if self._pid != os.getpid():
            raise DeviceLost(f"{self.name} was connected by the process that forked this one; connect here anew", None,
                             self.epoch, self.last_seq)
        if self.lost is not None:
            raise self.error()

    def error(self):
        return DeviceLost(f"{self.name} at {self.address} is lost: {self.lost}; what was in its memory is gone. "
                          f"device.reopen() connects again, with no buffers", self.name, self.epoch, self.last_seq)

    # ------------------------------------------------------------ waiting
    def wait(self, answer):
        """Until the answer is there.  Errors: DeviceLost; those the worker reports are left in `answer.error`."""
        patience, before = self._patience(), time.monotonic()
        while not answer.done.wait(patience):
            now, first = time.monotonic(), self._first()
            if now - before > 2 * patience + 0.5:       # it was this process that stood still: nothing could be heard
                self.heard = self.answered = now
            before = now
            if now - self.heard > self.timeout:
                self.lose(f"nothing was heard of it for {self.timeout:g} s")
            elif first is not None and first.limit is not None and now - self.answered > first.limit:
                self.lose(f"a graph that took {first.limit / SLOWER:.3g} s before has run for {first.limit:.3g} s")
        if answer.error is not None and isinstance(answer.error, DeviceLost):
            raise self.error()
        return answer

    def _patience(self):
        return max(0.01, min(self.timeout / 4, 1.0))

    def _first(self):
        try:
            return self._waiting[0]
        except IndexError:
            return None

    def idle(self):
        return not self._waiting

    # ------------------------------------------------------------ receiving, on the loop
    def _sink(self, header, nbytes):
        first = self._first()
        if isinstance(header, list) and header[:1] != [0] and first is not None and first.into is not None \
                and len(first.into) == nbytes:
            return first.into
        return None

    async def _read(self):
        try:
            while True:
                message, payload = await wire.read(self._comm, self._sink)
                self.heard = time.monotonic()
                if not isinstance(message, list) or len(message) != 3 or not isinstance(message[2], list):
                    raise wire.BadMessage(f"an answer that is none: {message!r:.100}")
                seq, status, results = message
                if seq == 0 and status in (BUSY, WAITS):
                    if status == WAITS:                 # for another worker: its own time stands still
                        self.answered = self.heard
                    continue
                answer = self._first()
                if answer is None or seq != answer.seq:
                    raise wire.BadMessage(f"an answer to message {seq!r:.20}, which was not asked")
                if len(payload) != (answer.nbytes if status == OK else 0):
                    raise wire.BadMessage(f"{len(payload):,} bytes where {answer.nbytes:,} were asked for")
                self._waiting.popleft()
                self.answered, self.last_seq = self.heard, seq
                self.n_bytes_in += len(payload)
                answer.results, answer.payload = results, payload
                if status == FAILED:
                    answer.error = _error(results, self.name)
                answer.done.set()
        except asyncio.CancelledError:
            raise
        except Exception as e:
            self._lose(f"the connection ended ({str(e) or type(e).__name__})")

    def lose(self, why):
        """The worker is given up; all who wait are told."""
        run(self._losing(why), self.timeout)

    async def _losing(self, why):
        self._lose(why)

    def _lose(self, why):
        if self.lost is None:
            self.lost = why
            self._comm.abort()
            with self._sending:
                if self._own is not None:
                    self._own.close()
                    self._own = None
        error = self.error()
        while self._waiting:
            answer = self._waiting.popleft()
            answer.error = error
            answer.done.set()

    def close(self):
        """End the connection; what was sent and not waited for may not be done."""
        if self.lost is None and self._pid == os.getpid():
            self._loop.call_soon_threadsafe(self._lose, "it was closed")


_ERRORS = {name: e for name, e in vars(errors).items() if isinstance(e, type) and issubclass(e, GgjitError)}


def _error(results, name):
    """The error a worker reports, as the same type here."""
    kind, text = results if isinstance(results, list) and len(results) == 2 else ("", repr(results))
    return _ERRORS.get(str(kind), GgjitError)(f"{text} (on {name})" if kind in _ERRORS else f"{name}: {kind}: {text}")
