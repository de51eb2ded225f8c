"""All cores: two threads beside one thread, beside two processes of one thread each, and beside llama.cpp.

    python -m benchmarks.cores --llama-bench FOLDER/llama-bench [--only 135M,Q4_0] [--rounds 3] [--minutes 12]

    one        a process of one thread, pinned to the first core
    pair       two such processes at the same time, pinned to two cores: what the cores give if they share nothing
    two        one process of two threads; share: two / pair

Tokens a second of prompts and of decoding, medians of rounds in which all take turns; ratio: ours over llama.cpp's with
as many threads.  Without --llama-bench those columns are empty.  busy: endless loops run beside, one and two of them;
then what counts is two threads over one in the same state.  No model is begun after --minutes.

A second table says how fast decoding reads the weights, beside what as many threads read at best in the same minute:
where the share is near 1, no engine can gain much.
"""
import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from benchmarks import machine, synth
from benchmarks.compare import PAUSE_SECONDS
from benchmarks.worker import EngineError, Missing, Worker
from ggjit.models import smollm2_path
from ggjit.profiling.machine_limits import read_bandwidth

WORKS = {"prompt 128": ("pp", 128), "prompt 512": ("pp", 512), "decode": ("tg", 64)}
BUSY_WORKS, LOOPS = ("prompt 128", "decode"), (1, 2)
N_CTX = 640
SETTLE_TOKENS = 512         # decoded beside the loops first: plans that run again try other numbers of threads


@dataclasses.dataclass(frozen=True)
class Network:
    name: str
    path: Callable


NETWORKS = (Network("SmolLM2-135M Q4_1", smollm2_path), *(
    Network(f"TinyLlama-1.1B shape {type}", lambda type=type: synth.model_path("tinyllama-1.1b", type))
    for type in ("Q4_0", "Q8_0", "Q4_K_M", "F16")))


# ---------------------------------------------------------------- engines
class Ours:
    """Three processes: `one` and `other` of one thread each, `two` of two threads."""

    def __init__(self):
        threads = {"one": 1, "other": 1, "two": 2}
        self.workers, self._threads = {}, threads
        with contextlib.ExitStack() as stack:
            for name in threads:
                self.workers[name] = stack.enter_context(Worker("engines.ours"))
            self._stack = stack.pop_all()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return self._stack.__exit__(*exc)

    def load(self, path):
        """Load the model in all of them; returns bytes of weights that a token reads."""
        for name, n in self._threads.items():
            sizes = self.workers[name].ask("load", path, n_threads=n, n_ctx=N_CTX)
            for measure, n_tokens in WORKS.values():
                self.workers[name].ask("warm", measure, n_tokens)
        return sizes["read_per_token"]

    def pin(self, pinned=True):
        """The processes of one thread to a core each, or free again."""
        first, second = machine.cores()[:2]
        for name, core in (("one", first), ("other", second)):
            self.workers[name].run_on([core] if pinned else machine.cores())

    def speed(self, name, work):
        """Tokens a second; name: of a process, or "pair"."""
        measure, n = WORKS[work]
        time.sleep(PAUSE_SECONDS)
        if name != "pair":
            return n / self.workers[name].ask(measure, n)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            return sum(n / t for t in pool.map(lambda w: self.workers[w].ask(measure, n), ("one", "other")))


def llama_bench(program, path, n_threads):
    """{work: tokens a second} of one run of llama.cpp's own benchmark."""
    prompts = ",".join(str(n) for measure, n in WORKS.values() if measure == "pp")
    command = [program, "-m", path, "-t", str(n_threads), "-r", "1", "-o", "json", "-p", prompts,
               "-n", str(WORKS["decode"][1])]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise EngineError(f"{program} ended with {run.returncode}: {run.stderr[-300:]}")
    found = {(r["n_prompt"], r["n_gen"]): r["avg_ts"] for r in json.loads(run.stdout)}
    return {work: found[(n, 0) if measure == "pp" else (0, n)] for work, (measure, n) in WORKS.items()}


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


def idle_rows(ours, path, program, n_rounds):
    """(work, llama.cpp with one and two threads, one, two, pair) of a network; llama.cpp's None without its program."""
    rounds = []
    for _ in range(n_rounds):
        found = {(work, name): ours.speed(name, work) for work in WORKS for name in ("one", "two", "pair")}
        for n in (1, 2):
            theirs = llama_bench(program, path, n) if program else dict.fromkeys(WORKS, 0.0)
            found |= {(work, f"llama.cpp {n}"): speed for work, speed in theirs.items()}
        rounds.append(found)
    got = _medians(rounds)
    for work in WORKS:
        theirs = [got[work, f"llama.cpp {n}"] or None for n in (1, 2)]
        yield work, *theirs, *(got[work, name] for name in ("one", "two", "pair"))


def busy_rows(ours, n_rounds):
    """(work, loops beside, one thread, two threads)"""
    ours.pin(False)
    for n in LOOPS:
        with loops(n):
            for name in ("one", "two"):
                ours.workers[name].ask("tg", SETTLE_TOKENS)
            got = _medians([{(work, name): ours.speed(name, work) for work in BUSY_WORKS for name in ("one", "two")}
                            for _ in range(n_rounds)])
        for work in BUSY_WORKS:
            yield work, n, got[work, "one"], got[work, "two"]
    ours.pin()


def _cells(*values):
    return " | ".join("" if v is None else f"{v:.2f}" if v < 20 else f"{v:,.0f}" for v in values)


def bandwidth_row(network, nbytes, speeds):
    """speeds: tokens a second of decoding with one and with two threads."""
    best = [read_bandwidth(n) for n in (1, 2)]
    taken = [nbytes * speed for speed in speeds]
    cells = (x for b, t in zip(best, taken, strict=True) for x in (t / 1e9, b / 1e9, t / b))
    return f"| {network.name} | {nbytes / 1e6:,.0f} | {' | '.join(f'{x:.2f}' for x in cells)} |"


def measure(network, args, say):
    """Print a network's rows as they come; returns (row of bandwidth, those beside loops)."""
    path = str(network.path())
    with Ours() as ours:
        nbytes = ours.load(path)
        ours.pin()
        for work, theirs1, theirs2, one, two, pair in idle_rows(ours, path, args.llama_bench, args.rounds):
            ratios = [a / b if b else None for a, b in ((one, theirs1), (two, theirs2))]
            say(f"| {network.name}, {work} | {_cells(one, two, pair, two / pair, theirs1, theirs2, *ratios)} |")
        memory = bandwidth_row(network, nbytes, (one, two))         # the last work is decoding
        return memory, [f"| {network.name}, {work}, {n} | {_cells(one, two, two / one)} |"
                        for work, n, one, two in busy_rows(ours, args.rounds)]


def main(argv=None):
    p = argparse.ArgumentParser(allow_abbrev=False, prog="python -m benchmarks.cores", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--llama-bench", metavar="FILE", help="llama.cpp's program, built for this machine")
    p.add_argument("--only", type=lambda text: text.split(","), default=[""], help="networks with one of these in the "
                   "name")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--minutes", type=float, default=12.0, help="begin no network after so many (12)")
    args = p.parse_args(argv)
    end, memory, busy = time.monotonic() + 60 * args.minutes, [], []

    def say(line):
        print(line, flush=True)
    say(f"{machine.cpu_model()}; {machine.idle_check('before')}; medians of {args.rounds} rounds, tokens/s\n")
    say("| network | one | two | pair | share | llama.cpp, one | two | ratio, one | two |\n|" + " --- |" * 9)
    for network in NETWORKS:
        if not any(part in network.name for part in args.only):
            continue
        if time.monotonic() > end:
            say(f"| {network.name}: left out, the time had run out |" + " |" * 8)
            continue
        try:
            row, rows = measure(network, args, say)
            memory.append(row)
            busy += rows
        except (Missing, EngineError, OSError) as e:
            say(f"| {network.name}: {e} |" + " |" * 8)
    say("\n| decode | MB a token | one, GB/s | reading, GB/s | share | two, GB/s | reading, GB/s | share |\n|" +
        " --- |" * 8)
    say("\n".join(memory))
    say("\n| beside loops | one thread | two threads | two / one |\n| --- | --- | --- | --- |")
    say("\n".join(busy))
    say(f"\n{machine.idle_check('after')}")


if __name__ == "__main__":
    main()
