"""Engines side by side: each in a process of its own, taking turns on the same bytes, one awake at a time.

    round 1   ours ####  peer #######      round 2   ours ####  peer #######     ...
                       ^ pause: the threads of the engine that is done stop spinning and sleep
"""
import contextlib
import dataclasses
import statistics
import time

from benchmarks.machine import IDLE_CORES, Others
from benchmarks.report import Row, Spread
from benchmarks.worker import Missing, Worker

PAUSE_SECONDS = 0.1
AWAKE_SECONDS = 0.05        # the kernel counts in steps of 0.01


@dataclasses.dataclass(frozen=True)
class Speed:
    """A speed to compare.  measure: "pp" (a prompt of n tokens), "tg" (n tokens one by one), "embed" (a text of n).

    file: a function that gives the model's path; target: ours over the peer's, at least.
    beside: another engine whose figure is shown with the row.
    """
    key: str
    work: str
    file: object
    measure: str
    n: int
    target: float
    beside: str | None = None


class Engines:
    """Workers started when first asked for; `get` gives the reason instead where one is missing."""

    def __init__(self, clock="wall"):
        self.clock = clock
        self.workers, self.reasons, self._loaded = {}, {}, {}

    def get(self, name):
        if name not in self.workers and name not in self.reasons:
            try:
                self.workers[name] = worker = Worker(name)
                worker.ask("use_clock", self.clock)
            except Missing as e:
                self.reasons[name] = f"missing: {e}"
        return self.workers.get(name)

    def load(self, name, path, n_threads, embed):
        """What the engine says of the model; it keeps one loaded."""
        wanted = path, n_threads
        if self._loaded.get(name, (None, None))[0] != wanted:
            self._loaded.pop(name, None)
            self._loaded[name] = wanted, self.get(name).ask("load", path, n_threads=n_threads, embed=embed)
        return self._loaded[name][1]

    def cpu_seconds(self, but):
        return sum(w.cpu_seconds() for n, w in self.workers.items() if n != but)

    def unload(self):
        """Give memory back to the processes that are measured as a whole."""
        for name in self._loaded:
            self.workers[name].ask("unload")
        self._loaded = {}

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        for w in self.workers.values():
            with contextlib.suppress(OSError):
                w.close()


def compare(engines, speed, n_threads, rounds, limits):
    """The Row of a Speed; limits: what the machine can do at most (benchmarks/limits.py)."""
    path, embed = speed.file(), speed.measure == "embed"
    names = [n for n in ("ours", "peer", speed.beside) if n and engines.get(n)]
    sizes = {n: engines.load(n, path, n_threads, embed) for n in names}["ours"]
    spreads, disturbed = _take_turns(engines, names, speed, rounds)
    peer = spreads.get("peer")
    ratio = spreads["ours"].median / peer.median if peer else None
    work = f"{speed.work}, {n_threads} thread{'s' if n_threads > 1 else ''}"
    notes = [_share(speed, sizes, spreads, limits, n_threads), _beside(engines, speed, spreads), disturbed]
    return Row(work, f"{speed.target} x", spreads["ours"], peer or engines.reasons["peer"], ratio,
               None if ratio is None else ratio >= speed.target, "; ".join(n for n in notes if n))


def _take_turns(engines, names, speed, rounds):
    """({engine: Spread}, what disturbed the measurement)"""
    speeds, awake = {n: [] for n in names}, 0.0
    for n in names:
        _once(engines.get(n), speed, 0)                     # plans, kernels, caches: not counted
    with Others(engines.workers.values()) as others:
        for r in range(rounds):
            for n in names if r % 2 == 0 else names[::-1]:
                time.sleep(PAUSE_SECONDS)
                before = engines.cpu_seconds(but=n)
                speeds[n].append(speed.n / _once(engines.get(n), speed, r))
                awake += engines.cpu_seconds(but=n) - before
    return {n: Spread(v, "tok/s") for n, v in speeds.items()}, _disturbed(others, awake)


def _once(worker, speed, seed):
    """Seconds of one measurement."""
    if speed.measure == "embed":
        return statistics.median(worker.ask("embed", list(range(1000, 1000 + speed.n))))
    return worker.ask(speed.measure, speed.n, seed=seed)


def _share(speed, sizes, spreads, limits, n_threads):
    """How near the machine's limit: bytes for decoding, operations for prompts."""
    def percent(limit, each):
        return " / ".join(f"{100 * spreads[n].median * each / limit:.0f}" for n in spreads) + " %"
    if sizes["read_per_token"] < limits["bandwidth"] / 1000:
        return ""                                           # fits the caches, or is too small to be near any limit
    if speed.measure == "tg":
        return f"{percent(limits['bandwidth'], sizes['read_per_token'])} of the read bandwidth"
    return f"{percent(limits['f32'] * n_threads, sizes['flops_per_token'])} of the float32 peak"


def _beside(engines, speed, spreads):
    if not speed.beside:
        return ""
    shown = spreads.get(speed.beside) or engines.reasons[speed.beside]
    name = engines.workers[speed.beside].about["name"] if speed.beside in spreads else speed.beside
    return f"{name} {shown}"


def _disturbed(others, awake):
    """awake: processor seconds that engines used while another one was measured."""
    notes = [f"DISTURBED: others used {others.cores:.2f} cores"] if others.cores >= IDLE_CORES else []
    notes += [f"DISTURBED: an engine at rest used {awake:.2f} s"] if awake > AWAKE_SECONDS else []
    return "; ".join(notes)
