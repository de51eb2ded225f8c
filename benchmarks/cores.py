"""All cores: two threads beside one thread, beside two processes of one thread each, and beside other engines.

    IK_LIB_DIR=FOLDER python -m benchmarks.cores --llama-bench FOLDER/llama-bench [--only 135M,Q4_0] [--rounds 3]

    one        a process of one thread, pinned to the first core
    pair       two such processes at the same time, pinned to two cores: what the cores give if they share nothing.  The
               second reads a copy of the model: of one file what one core fetches from memory, the other finds in the
               last-level cache
    two        one process of two threads; share: two / pair, of the same round
    GB/s       what two threads read from memory beside the row, least and most of the rounds

Tokens a second of prompts and of decoding, medians of rounds in which all take turns; ratio: ours over the other
engine's with as many threads, of the same round.  Engines: llama.cpp by its own benchmark, ik_llama.cpp out of the
folder that IK_LIB_DIR names; those that are not given have no columns.  busy: endless loops run beside, one and two of
them; then what counts is two threads over one in the same state.  No model is begun after --minutes.

A second table says how fast decoding reads the weights, beside what as many threads read at best in the same minute:
where the share is near 1, no engine can gain much.
"""
import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from benchmarks import machine, synth
from benchmarks.compare import PAUSE_SECONDS
from benchmarks.worker import EngineError, Missing, Worker
from ggjit.models import smollm2_path
from ggjit.models.files.minilm import minilm_path
from ggjit.ops.core.errors import GgjitError
from ggjit.ops.native.cache_files import cache_dir
from ggjit.profiling.machine_limits import Reader, read_bandwidth

DECODER = {"prompt 128": ("pp", 128), "prompt 512": ("pp", 512), "decode": ("tg", 64)}
ENCODER = {"text of 128": ("embed", 128)}
BUSY_WORKS, LOOPS = ("prompt 128", "decode", "text of 128"), (1, 2)
N_CTX = 640
# what is done beside the loops first, at most: plans that run again try other numbers of threads
SETTLE_RUNS, SETTLE_SECONDS = 8, 8.0


@dataclasses.dataclass(frozen=True)
class Network:
    name: str
    path: Callable
    works: dict = dataclasses.field(default_factory=lambda: DECODER)

    @property
    def embeds(self):
        return self.works is ENCODER


def _shape(name, shape, type):
    return Network(f"{name} shape {type}", lambda: synth.model_path(shape, type))


NETWORKS = (Network("SmolLM2-135M Q4_1", smollm2_path), Network("MiniLM F32", minilm_path, ENCODER),
            _shape("Qwen2.5-0.5B", "qwen2.5-0.5b-like", "Q8_0"),
            *(_shape("TinyLlama-1.1B", "tinyllama-1.1b", type) for type in ("Q4_0", "Q8_0", "Q4_K_M", "F16")))


# ---------------------------------------------------------------- engines
@contextlib.contextmanager
def copied(path):
    """A copy of the file, with pages of memory of its own."""
    with tempfile.TemporaryDirectory(dir=cache_dir()) as folder:
        yield shutil.copyfile(path, pathlib.Path(folder) / "copy.gguf")


class Ours:
    """Three processes: `one` and `other` of one thread each, which share no memory, and `two` of two threads."""

    def __init__(self):
        threads = {"one": 1, "other": 1, "two": 2}
        self.workers, self._threads, self._works = {}, threads, {}
        with contextlib.ExitStack() as stack:
            for name in threads:
                self.workers[name] = stack.enter_context(Worker("engines.ours"))
            self._stack = stack.pop_all()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return self._stack.__exit__(*exc)

    def load(self, network, path):
        """Load the model in all of them; returns bytes of weights that a token reads."""
        self._works = network.works
        with copied(path) as copy:
            for name, n in self._threads.items():
                sizes = self.workers[name].ask("load", copy if name == "other" else path, n_threads=n, n_ctx=N_CTX,
                                               embed=network.embeds)
                for measure, n_tokens in network.works.values():
                    self.workers[name].ask("warm", measure, n_tokens)
        return sizes["read_per_token"]

    def pin(self, pinned=True):
        """The processes of one thread to a core each, or free again."""
        first, second = machine.cores()[:2]
        for name, core in (("one", first), ("other", second)):
            self.workers[name].run_on([core] if pinned else machine.cores())

    def speed(self, name, work):
        """Tokens a second; name: of a process, or "pair"."""
        measure, n = self._works[work]
        time.sleep(PAUSE_SECONDS)
        if name != "pair":
            return n / self.workers[name].ask(measure, n)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            return sum(n / t for t in pool.map(lambda w: self.workers[w].ask(measure, n), ("one", "other")))

    def settle(self, name):
        """Run the last work again and again."""
        end = time.monotonic() + SETTLE_SECONDS
        for _ in range(SETTLE_RUNS):
            self.speed(name, list(self._works)[-1])
            if time.monotonic() > end:
                return


class LlamaCpp:
    """llama.cpp's own benchmark, a program."""
    name = "llama.cpp"

    def __init__(self, program):
        self.program = program

    def speeds(self, network, path, n_threads):
        """{work: tokens a second} of one run."""
        read = [str(n) for measure, n in network.works.values() if measure != "tg"]
        written = [str(n) for measure, n in network.works.values() if measure == "tg"] or ["0"]
        command = [self.program, "-m", path, "-t", str(n_threads), "-r", "1", "-o", "json", "-p", ",".join(read), "-n",
                   ",".join(written), "-embd", str(int(network.embeds))]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            raise EngineError(f"{self.program} ended with {run.returncode}: {run.stderr[-300:]}")
        found = {(r["n_prompt"], r["n_gen"]): r["avg_ts"] for r in json.loads(run.stdout)}
        return {work: found[(0, n) if measure == "tg" else (n, 0)] for work, (measure, n) in network.works.items()}

    def close(self):
        """Each run is a process that has ended."""


class IkLlamaCpp:
    """ik_llama.cpp in a process for each number of threads; it keeps a model loaded."""
    name = "ik_llama.cpp"

    def __init__(self, folder):
        self.folder, self._workers, self._path = folder, {}, None

    def speeds(self, network, path, n_threads):
        """{work: tokens a second}; none of encoders."""
        if network.embeds:
            return {}
        if path != self._path:
            self.close()
            self._path = path
        if n_threads not in self._workers:
            self._workers[n_threads] = worker = Worker("engines.ik", self.folder, OMP_NUM_THREADS=str(n_threads))
            worker.ask("load", path, n_threads=n_threads, n_ctx=N_CTX)
            for measure, n in network.works.values():
                worker.ask("warm", measure, n)
        found = {}
        for work, (measure, n) in network.works.items():
            time.sleep(PAUSE_SECONDS)
            found[work] = n / self._workers[n_threads].ask(measure, n)
        return found

    def close(self):
        for worker in self._workers.values():
            worker.close()
        self._workers = {}


def others(llama_bench):
    """The other engines that are given."""
    folder = os.environ.get("IK_LIB_DIR")
    return [LlamaCpp(llama_bench)] * bool(llama_bench) + [IkLlamaCpp(folder)] * bool(folder)


@contextlib.contextmanager
def loops(n):
    """So many endless loops run meanwhile, each a process."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n)]
    try:
        yield
    finally:
        for p in running:
            p.kill()
            p.wait()


# ---------------------------------------------------------------- tables
def _medians(rounds):
    return {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}


def _ratio(rounds, a, b):
    """The median of a / b of each round; None where an engine does not have b."""
    return statistics.median(r[a] / r[b] for r in rounds) if b in rounds[0] else None


def _round(ours, network, path, engines):
    """{(work, who): tokens a second}, and under (work, "GB/s") what two threads read from memory beside it."""
    found = {}
    with Reader(2) as reader:
        for work in network.works:
            found |= {(work, name): ours.speed(name, work) for name in ("one", "two", "pair")}
            found[work, "GB/s"] = max(reader.once() for _ in range(3)) / 1e9
    for engine in engines:
        for n in (1, 2):
            found |= {(work, (engine, n)): speed for work, speed in engine.speeds(network, path, n).items()}
    return found


def idle_rows(ours, network, path, engines, n_rounds):
    """(work, one, two, pair, share, least and most GB/s, then for each other engine: its speed with one thread, with
    two, the ratios; None where it has none) of a network."""
    rounds = [_round(ours, network, path, engines) for _ in range(n_rounds)]
    got = _medians(rounds)
    for work in network.works:
        reads = [r[work, "GB/s"] for r in rounds]
        row = [*(got[work, who] for who in ("one", "two", "pair")), _ratio(rounds, (work, "two"), (work, "pair")),
               f"{min(reads):.0f} - {max(reads):.0f}"]
        for engine in engines:
            theirs = [(work, (engine, n)) for n in (1, 2)]
            row += [got.get(key) for key in theirs]
            row += [_ratio(rounds, (work, our), key) for our, key in zip(("one", "two"), theirs, strict=True)]
        yield work, *row


def busy_rows(ours, network, n_rounds):
    """(work, loops beside, one thread, two threads)"""
    works = [work for work in network.works if work in BUSY_WORKS]
    ours.pin(False)
    for n in LOOPS:
        with loops(n):
            for name in ("one", "two"):
                ours.settle(name)
            got = _medians([{(work, name): ours.speed(name, work) for work in works for name in ("one", "two")}
                            for _ in range(n_rounds)])
        for work in works:
            yield work, n, got[work, "one"], got[work, "two"]
    ours.pin()


def _cells(*values):
    return " | ".join("" if v is None else v if isinstance(v, str) else f"{v:.2f}" if v < 20 else f"{v:,.0f}"
                      for v in values)


def bandwidth_row(network, nbytes, speeds):
    """speeds: tokens a second of decoding with one and with two threads."""
    best = [read_bandwidth(n) for n in (1, 2)]
    taken = [nbytes * speed for speed in speeds]
    cells = (x for b, t in zip(best, taken, strict=True) for x in (t / 1e9, b / 1e9, t / b))
    return f"| {network.name} | {nbytes / 1e6:,.0f} | {' | '.join(f'{x:.2f}' for x in cells)} |"


def measure(network, engines, n_rounds, say):
    """Print a network's rows as they come; returns ([row of bandwidth], those beside loops)."""
    path, memory = str(network.path()), []
    with Ours() as ours:
        nbytes = ours.load(network, path)
        ours.pin()
        for work, *row in idle_rows(ours, network, path, engines, n_rounds):
            say(f"| {network.name}, {work} | {_cells(*row)} |")
            if work == "decode":
                memory.append(bandwidth_row(network, nbytes, row[:2]))
        return memory, [f"| {network.name}, {work}, {n} | {_cells(one, two, two / one)} |"
                        for work, n, one, two in busy_rows(ours, network, n_rounds)]


def _table(*columns):
    return f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}"


def main(argv=None):
    p = argparse.ArgumentParser(allow_abbrev=False, prog="python -m benchmarks.cores", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--llama-bench", metavar="FILE", help="llama.cpp's program, built for this machine")
    p.add_argument("--only", type=lambda text: text.split(","), default=[""], help="networks with one of these in the "
                   "name")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--minutes", type=float, default=15.0, help="begin no network after so many (15)")
    args = p.parse_args(argv)
    end, memory, busy = time.monotonic() + 60 * args.minutes, [], []
    engines = others(args.llama_bench)
    columns = ["network", "one", "two", "pair", "share", "GB/s",
               *(c for e in engines for c in (f"{e.name}, one", "two", "ratio, one", "two"))]

    def say(line):
        print(line, flush=True)
    say(f"{machine.cpu_model()}. {machine.idle_check('Before')}. Figures are medians of {args.rounds} rounds, in "
        "tokens per second.\n")
    say(_table(*columns))
    for network in NETWORKS:
        if not any(part in network.name for part in args.only):
            continue
        if time.monotonic() > end:
            say(f"| {network.name}: the time ran out |" + " |" * (len(columns) - 1))
            continue
        try:
            rows, beside = measure(network, engines, args.rounds, say)
            memory += rows
            busy += beside
        except (Missing, EngineError, OSError, GgjitError) as e:
            say(f"| {network.name}: {e} |" + " |" * (len(columns) - 1))
    for engine in engines:
        engine.close()
    say("\n" + _table("decode", "MB a token", *("one, GB/s", "reading, GB/s", "share"), *("two, GB/s", "reading, GB/s",
                                                                                     "share")))
    say("\n".join(memory))
    say("\n" + _table("beside loops", "one thread", "two threads", "two / one"))
    say("\n".join(busy))
    say(f"\n{machine.idle_check('After')}.")


if __name__ == "__main__":
    main()
