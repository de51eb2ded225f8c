"""The suite in worker processes: if a process dies or hangs, its case fails and the run continues.

    cases in order      | 0 -> .............. | 1 -> .............. |       each worker runs a part of its own from the
                                         <- 1                               front, because neighbours share kernels, and
                                                                            then takes from the end of the longest part
"""
import collections
import dataclasses
import multiprocessing
import multiprocessing.connection
import signal
import time

from ggjit.api.registry import init_backend
from ggjit.ops.core.errors import GgjitError, MissingExtra
from ggjit.tools.suite import oracle
from ggjit.tools.suite.cases.case import all_cases
from ggjit.tools.suite.runner import FAIL, Outcome, Runner

PATIENCE = 600.0                                        # seconds until a case counts as hung
READY = "ready"


def serve(pipe, backend, n_threads, seed, wheels):
    """The worker's side: READY; then numbers of cases in, outcomes out, without the case (it holds functions)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)        # Ctrl-C reaches the whole group; the parent ends this process
    made = init_backend(backend)
    made.n_threads = n_threads
    try:
        peer = oracle.connect(*wheels)
    except MissingExtra:
        peer = None
    runner = Runner(made, seed, peer)
    pipe.send(READY)
    while True:
        try:
            i = pipe.recv()
        except EOFError:                                # the parent is gone or has no more
            return
        pipe.send(dataclasses.replace(runner.run(all_cases()[i]), case=None))


class Worker:
    """One process, its part of the cases, and the case it is at."""

    def __init__(self, part, target, settings):
        self.part, self.target, self.settings, self.case = collections.deque(part), target, settings, None
        self.start()

    def start(self):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=self.target, args=(theirs, *self.settings), daemon=True)
        self.process.start()
        self.ready = False
        theirs.close()

    def take(self, parts):
        """Start the next case, if any is left.  GgjitError if the process did not come up."""
        longest = max(parts, key=len)
        self.case = self.part.popleft() if self.part else longest.pop() if longest else None
        if self.case is None:
            return
        try:
            self.ready = self.ready or self.pipe.recv() == READY
        except (EOFError, ConnectionError):
            self.process.join()
            raise GgjitError(f"a process of the suite did not start: {self._status()}") from None
        self.since = time.monotonic()
        self.pipe.send(self.case.index)

    @property
    def late(self):
        return time.monotonic() - self.since > PATIENCE

    def outcome(self):
        """The outcome of a case that is finished, or whose process died or is late."""
        try:
            if self.pipe.poll():
                return dataclasses.replace(self.pipe.recv(), case=self.case)
            error = f"no answer within {PATIENCE:.0f} s"
            self.process.kill()
        except (EOFError, ConnectionError):
            self.process.join()
            error = f"the process died: {self._status()}"
        seconds = time.monotonic() - self.since
        self.start()
        return Outcome(self.case, FAIL, error, seconds=seconds)

    def _status(self):
        code = self.process.exitcode
        return signal.Signals(-code).name if code is not None and code < 0 else f"exit status {code}"

    def stop(self):
        self.pipe.close()
        self.process.kill()
        self.process.join()


def spread(cases, backend, seed, n_jobs, target=serve, wheels=oracle.WHEELS):
    """Outcomes of the cases, as they come, computed by at most `n_jobs` processes that run `target`.

    wheels: the first that is installed has the real ggml they ask.
    """
    size = max(1, -(-len(cases) // n_jobs))
    workers = [Worker(cases[i:i + size], target, (backend.device.name, backend.n_threads, seed, wheels))
               for i in range(0, len(cases), size)]
    try:
        for w in workers:
            w.take([v.part for v in workers])
        while any(w.case is not None for w in workers):
            busy = [w for w in workers if w.case is not None]
            ready = multiprocessing.connection.wait([w.pipe for w in busy], timeout=1.0)
            for w in busy:
                if w.pipe in ready or w.late:
                    yield w.outcome()
                    w.take([v.part for v in workers])
    finally:
        for w in workers:
            w.stop()
