"""The driver's end of one connection: messages go out in order, answers come back in order.

    send(ops, parts) -> Answer        returns at once
    wait(answer)                      until it is there, the worker is lost, or nothing came for too long

There is no thread for it: who waits reads, and what is there for others is theirs.  Who sends while the worker takes
nothing reads meanwhile, so the two cannot wait for each other.

Every wait ends: a worker that computes says so every so often, and one that says nothing for `timeout` seconds is lost.
A graph that ran before has 20 times its last time, at least `timeout`.  Ctrl-C leaves a wait; the answer is dropped
when it comes.
"""
import collections
import os
import threading
import time
import weakref

from ggjit.cluster import wire
from ggjit.cluster.protocol import BUSY, FAILED, OK, SECRET_NBYTES, WAITS, check_hello, hello
from ggjit.core.backend import DeviceLost
from ggjit.ops.core import errors
from ggjit.ops.core.errors import GgjitError
from ggjit.ops.core.interrupts import defer_interrupts

CONNECT_SECONDS = 5.0
TIMEOUT_SECONDS = 10.0
SLOWER = 20                     # a graph may take this many times as long as its last run


class PendingReply:
    """The answer to one message, which may not be there yet."""
    __slots__ = ("seq", "done", "into", "nbytes", "results", "payload", "error", "limit", "seen", "fills")

    def __init__(self, seq, into, nbytes, limit):
        self.seq, self.into, self.nbytes, self.limit = seq, into, nbytes, limit
        self.done = False
        self.results = self.payload = self.error = None
        self.seen = False               # True once the error of this reply was raised
        self.fills = []                 # [(byte of the payload, memoryview that takes a copy from there on)]

    def fill(self):
        """Copy bytes of the payload to the readers' arrays; called by the thread that waited for the answer."""
        while self.fills:
            at, array = self.fills[-1]
            if self.error is None:
                array[:] = memoryview(self.payload)[at:at + len(array)]
            self.fills.pop()                    # after a Ctrl-C it is copied again


class Stream:
    """A connection to a worker.  `facts`: what it said of itself.  One thread sends at a time: its device's lock."""

    def __init__(self, address, tls, timeout, name, epoch):
        self.address, self.name, self.epoch = address, name, epoch
        self.timeout = TIMEOUT_SECONDS if timeout is None else timeout
        # workers that show this secret may fetch what we push
        self._pid, self.secret = os.getpid(), os.urandom(SECRET_NBYTES)
        self.seq = self.last_seq = 0
        self.lost = None                # the error that ended the connection
        self.n_messages = self.n_bytes_out = self.n_bytes_in = 0
        self._waiting = collections.deque()     # Answers, in the order of their messages
        self._reading, self._n_waits = threading.Lock(), 0
        try:
            self._conn, self.facts = self._open(tls)
            self._n_received = self._conn.n_received
        except OSError as e:
            silent = isinstance(e, TimeoutError)
            why = f"no answer within {CONNECT_SECONDS:g} s" if silent else str(e) or repr(e)
            raise DeviceLost(f"{address}: {why}; is `ggjit worker --listen {address}` running, and do both sides have "
                             f"certificates of one CA (tls=)?", name, epoch, 0) from e
        self.received_at = self.answered_at = time.monotonic()      # times of the last bytes and of the last answer
        weakref.finalize(self, self._conn.sock.close).atexit = False

    def _open(self, tls):
        conn = wire.connect(self.address, tls, CONNECT_SECONDS)
        try:
            facts, _ = conn.read(limit_nbytes=0, seconds=CONNECT_SECONDS)
            check_hello(hello(), facts, self.address)
            conn.write(wire.pack({**hello(), "heartbeat": self.timeout / 5, "secret": self.secret}))
            conn.do_not_block()
        except BaseException:
            conn.close()
            raise
        return conn, facts

    # ------------------------------------------------------------ sending
    def send(self, ops, parts=(), into=None, nbytes=0, limit=None):
        """nbytes: of the answer's payload, which a writable memoryview `into` of as many takes; limit: seconds it may
        take beyond those before it."""
        self.check()
        self.seq += 1
        answer = PendingReply(self.seq, into, nbytes, limit)
        header = wire.pack([self.seq, ops])
        self.n_messages += 1
        self.n_bytes_out += len(header) + sum(map(len, parts))
        if not self._waiting:
            self.received_at = self.answered_at = time.monotonic()
        self._waiting.append(answer)
        try:
            self._conn.write(header, parts, self._blocked)
        except OSError as e:
            self._lose(f"the connection ended ({str(e) or type(e).__name__})")
        return answer

    def _blocked(self):
        """The worker takes nothing now: it may wait until its answers are read."""
        began = time.monotonic()
        self._conn.wait(self._poll_seconds(), writing=True)
        self.drain()
        self._check_deadlines(began, time.monotonic())

    def check(self):
        """DeviceLost, if the worker is known to be gone."""
        self._check_process()
        if self.lost is not None:
            raise self.error()

    def _check_process(self):
        """Errors: DeviceLost in a forked process, since answers are for the process that made the connection."""
        if self._pid != os.getpid():
            raise DeviceLost(f"{self.name} was connected by the process that forked this one; connect here again", None,
                             self.epoch, self.last_seq)

    def error(self):
        return DeviceLost(f"{self.name} at {self.address} is lost: {self.lost}; what was in its memory is gone. "
                          f"device.reopen() connects again, with no buffers", self.name, self.epoch, self.last_seq)

    # ------------------------------------------------------------ waiting
    def wait(self, answer):
        """Wait until the answer is there.  Errors: DeviceLost; those the worker reports are left in `answer.error`."""
        if not answer.done:
            self._check_process()
            self._n_waits += 1
            try:
                self._until(answer)
            finally:
                self._n_waits -= 1
        if not answer.done or isinstance(answer.error, DeviceLost):
            raise self.error()
        return answer

    def _until(self, answer):
        self.received_at = time.monotonic()           # silence counts from here: no thread has read before
        while not answer.done and self.lost is None:
            began = time.monotonic()
            with self._reading:
                if answer.done:
                    return
                self._wait_and_read()
            self._check_deadlines(began, time.monotonic())
            if self._n_waits > 1:
                time.sleep(1e-4)                # gives other threads a turn at the lock

    def _wait_and_read(self):
        try:
            self._conn.wait(self._poll_seconds())
        except OSError as e:
            self._lose(f"the connection ended ({e})")
        with defer_interrupts():                # bytes that a Ctrl-C came between would be missed
            self._read()

    def _check_deadlines(self, began, now):
        """Errors: DeviceLost where nothing has come for too long."""
        if now - began > 2 * self._poll_seconds() + 0.5:        # this process itself was stopped
            self.received_at = self.answered_at = now
        if self._n_received != self._conn.n_received:       # a large answer, over a slow connection
            self._n_received, self.received_at = self._conn.n_received, now
        first = self._first()
        if now - self.received_at > self.timeout:
            self._lose(f"it sent nothing for {self.timeout:g} s")
        elif first is not None and first.limit is not None and now - self.answered_at > first.limit:
            self._lose(f"a graph that took {first.limit / SLOWER:.3g} s before has run for {first.limit:.3g} s")

    def _poll_seconds(self):
        return max(0.01, min(self.timeout / 4, 1.0))

    def _first(self):
        try:
            return self._waiting[0]
        except IndexError:
            return None

    # ------------------------------------------------------------ receiving
    def drain(self):
        """Take the answers that are here, without waiting; nothing, while another thread does."""
        if self._reading.acquire(blocking=False):
            try:
                with defer_interrupts():
                    self._read()
            finally:
                self._reading.release()

    def _read(self):
        try:
            while self._waiting and self.lost is None:
                message = self._conn.read(self._sink)
                if message is None:
                    return
                self._take_answer(*message)
        except Exception as e:
            self._lose(f"the connection ended ({str(e) or type(e).__name__})")

    def _sink(self, header, nbytes):
        first = self._first()
        if isinstance(header, list) and header[:1] != [0] and first is not None and first.into is not None \
                and len(first.into) == nbytes:
            return first.into
        return None

    def _take_answer(self, message, payload):
        self.received_at = time.monotonic()
        if not isinstance(message, list) or len(message) != 3 or not isinstance(message[2], list):
            raise wire.BadMessage(f"malformed answer {message!r:.100}")
        seq, status, results = message
        if seq == 0 and status in (BUSY, WAITS):
            if status == WAITS:                 # the worker waits for another one: this time does not count as its own
                self.answered_at = self.received_at
            return
        answer = self._first()
        if answer is None or seq != answer.seq:
            raise wire.BadMessage(f"an answer to message {seq!r:.20}, which does not wait for one")
        if len(payload) != (answer.nbytes if status == OK else 0):
            raise wire.BadMessage(f"{len(payload):,} bytes where {answer.nbytes:,} were asked for")
        self._waiting.popleft()
        self.answered_at, self.last_seq = self.received_at, seq
        self.n_bytes_in += len(payload)
        answer.results, answer.payload = results, payload
        if status == FAILED:
            answer.error = _error(results, self.name)
        answer.done = True

    # ------------------------------------------------------------ the end
    def _lose(self, why):
        """Count the worker as lost; every PendingReply that is not there yet gets the error."""
        if self.lost is None:
            self.lost = why
            self._conn.end()
        error = self.error()
        while (answer := self._first()) is not None:
            answer.error, answer.done = error, True
            try:
                self._waiting.remove(answer)
            except ValueError:                  # another thread has removed it
                continue

    def lose(self, why):
        """Count the worker as lost; returns the error to raise."""
        self._lose(why)
        return self.error()

    def leave(self):
        """In a child process: the connection ends when its parent does."""
        self._conn.sock.close()

    def close(self):
        """End the connection; what was sent and not waited for may not be done.  From a finalizer too."""
        if self._pid == os.getpid():
            self._lose("it was closed")


_ERRORS = {name: e for name, e in vars(errors).items() if isinstance(e, type) and issubclass(e, GgjitError)}


def _error(results, name):
    """The error a worker reports, as the same type here."""
    kind, text = results if isinstance(results, list) and len(results) == 2 else ("", repr(results))
    return _ERRORS.get(str(kind), GgjitError)(f"{text} (on {name})" if kind in _ERRORS else f"{name}: {kind}: {text}")
