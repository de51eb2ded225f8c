"""Runs cases of a kind in child processes and counts what became of them.

    parent  -- (first, last) -->  child: case(first), case(first + 1) ...
            <-- "seed outcome detail" a line --

A child tries case after case: to start one takes seconds, a case takes a millisecond.  One that dies or hangs is a
find of the case it was at; the next child goes on behind it.  `jobs` children run side by side, each with a part of the
cases.

    cd tests; python -m campaign.runner --results ../benchmarks/results/campaign.md
    cd tests; python -m campaign.runner --numbers gguf=20000 builders=20000
"""
import argparse
import collections
import concurrent.futures
import importlib
import os
import pathlib
import selectors
import signal
import subprocess
import sys
import time
import traceback

import numpy as np

from ggjit.tools.suite.oracle import Patience

TESTS_PATH = str(pathlib.Path(__file__).parent.parent)
HANG_SECONDS = 60               # a case takes milliseconds; first calls compile kernels.  See Patience
# kind: (module, share of a campaign's cases)
KINDS = {"gguf": ("files", 0.44), "kernel cache": ("files", 0.02), "builders": ("calls", 0.4895),
         "threads": ("sharing", 0.005), "memory": ("memory", 0.02), "soak": ("memory", 0.0005),
         "signals": ("processes", 0.004), "fork": ("processes", 0.0005),
         "signals while compiling": ("processes", 0.001), "forks while compiling": ("processes", 0.001),
         "training": ("tasks", 0.0005),
         "imatrix": ("tasks", 0.01), "full disk": ("tasks", 0.002), "driver": ("tasks", 0.005), "tls": ("tasks", 0.001)}
ALONE = ("soak", "signals", "signals while compiling")     # they measure memory and time: one child at a time
WHOLE = 1_000_000               # cases of a whole campaign
GOOD = ("right", "refused", "interrupted")


class Find(AssertionError):
    """A case that went wrong without an error of its own: a wrong result, a leak."""


def case_of(kind):
    return importlib.import_module(f"campaign.{KINDS[kind][0]}").CASES[kind]


# ---------------------------------------------------------------- child
def serve(kind, first, last):
    """Try the cases; a line before and after each."""
    from ggjit.ops.core.errors import GgjitError

    case, out = case_of(kind), os.dup(1)
    os.dup2(2, 1)                                       # what a case prints is no outcome
    signal.signal(signal.SIGINT, signal.default_int_handler)        # shells ignore it for what runs in the background
    for seed in range(first, last):
        os.write(out, f"{seed} begun\n".encode())
        try:
            outcome, detail = case(np.random.default_rng(seed)) or "right", ""
        except GgjitError:
            outcome, detail = "refused", ""
        except KeyboardInterrupt:
            outcome, detail = "interrupted", ""
        except (Find, AssertionError) as e:
            outcome, detail = "wrong", _told(e)
        except BaseException as e:
            outcome, detail = "raw error", _told(e)
        os.write(out, f"{seed} {outcome}|{detail}\n".encode())


def _told(e):
    where = traceback.extract_tb(e.__traceback__)[-1]
    return f"{type(e).__name__} in {os.path.basename(where.filename)}:{where.lineno}: {e}".replace("\n", " ")[:300]


# ---------------------------------------------------------------- parent
def run(kind, first, n, seconds=None, jobs=1):
    """(Counter of outcomes, [(seed, outcome, detail)] of what was found); seconds: stop after so many."""
    end, limits = time.monotonic() + (seconds or 1e9), [first + n * k // jobs for k in range(jobs + 1)]
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        parts = list(pool.map(lambda k: _part(kind, limits[k], limits[k + 1], end), range(jobs)))
    return sum((counts for counts, _ in parts), collections.Counter()), [f for _, finds in parts for f in finds]


def _part(kind, seed, last, end):
    """Children one after the other; the same as `run`."""
    counts, finds = collections.Counter(), []
    while seed < last and time.monotonic() < end:
        seed = _child(kind, seed, last, end, counts, finds)
    return counts, finds


def _child(kind, first, last, end, counts, finds):
    """One child, to its end; returns the seed to go on with."""
    paths = os.pathsep.join([TESTS_PATH, *filter(None, [os.environ.get("PYTHONPATH")])])
    child = subprocess.Popen([sys.executable, "-m", "campaign.runner", "--child", kind, str(first), str(last)],
                             stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}, start_new_session=True)
    at, text, hung, patience = first, b"", False, Patience(child.pid)
    with selectors.DefaultSelector() as ready:
        ready.register(child.stdout, selectors.EVENT_READ)
        while time.monotonic() < end:
            if not ready.select(HANG_SECONDS):
                hung = patience.is_over(HANG_SECONDS)
                if hung:
                    break
                continue
            more = os.read(child.stdout.fileno(), 1 << 16)
            if not more:
                break
            patience.begin()
            *lines, text = (text + more).split(b"\n")
            for line in lines:
                seed, _, told = line.decode(errors="replace").partition(" ")
                at = int(seed)
                if told != "begun":
                    outcome, _, detail = told.partition("|")
                    counts[outcome] += 1
                    at += 1
                    if outcome not in GOOD:
                        finds.append((int(seed), outcome, detail))
    stopped = time.monotonic() >= end
    if hung or stopped:
        os.killpg(child.pid, signal.SIGKILL)
    status = child.wait()
    child.stdout.close()
    if stopped or at >= last:
        return last if not stopped else at
    outcome = "hang" if hung else f"signal {-status}" if status < 0 else f"status {status}"
    counts[outcome] += 1
    finds.append((at, outcome, ""))
    return at + 1


def shared(n_cases):
    """{kind: number of cases} of so many in all."""
    return {kind: max(1, round(share * n_cases)) for kind, (_, share) in KINDS.items()}


def campaign(numbers, first=0, seconds=None, log=print, jobs=1):
    """{kind: (counts, finds, seconds)} of {kind: number of cases}."""
    done = {}
    for kind, n in numbers.items():
        t0 = time.monotonic()
        counts, finds = run(kind, first, n, seconds and seconds * _time_share(kind),
                            1 if kind in ALONE else jobs)
        done[kind] = counts, finds, time.monotonic() - t0
        log(f"{kind}: {dict(counts)}, {done[kind][2]:.0f} s")
        for find in finds[:20]:
            log("   ", *find)
    return done


def _time_share(kind):
    return 0.35 if kind in ("gguf", "builders") else 0.05


def as_markdown(done):
    rows = ["| kind | cases | right | refused | interrupted | found | seconds | cases a second |",
            "|---|---|---|---|---|---|---|---|"]
    for kind, (counts, finds, seconds) in done.items():
        n = sum(counts.values())
        rows.append(f"| {kind} | {n:,} | {counts['right']:,} | {counts['refused']:,} | {counts['interrupted']:,} | "
                    f"{len(finds)} | {seconds:.0f} | {n / seconds:,.0f} |")
    total = sum(sum(counts.values()) for counts, _, _ in done.values())
    rows.append(f"| all | {total:,} | | | | {sum(len(f) for _, f, _ in done.values())} | "
                f"{sum(s for _, _, s in done.values()):.0f} | |")
    return "\n".join(rows)


def report(done, first, jobs):
    """The table as a page that says how much of a campaign it is."""
    total = sum(sum(counts.values()) for counts, _, _ in done.values())
    part = "the whole campaign" if total >= WHOLE else f"a part of it: the whole campaign has {WHOLE:,} cases"
    lines = [f"- {kind} {seed}: {outcome} {detail}" for kind, (_, finds, _) in done.items()
             for seed, outcome, detail in finds]
    return (f"# Campaign\n\nRandom cases, tried in child processes (tests/campaign).  This run had {total:,}, from "
            f"number {first:,} on of every kind, with {jobs} children side by side; it is {part}."
            f"\n\n{as_markdown(done)}\n\n"
            + ("Found:\n\n" + "\n".join(lines) if lines else "Nothing was found.") + "\n")


def _numbers(words):
    """{kind: number} of ["kind=number", ...]; kinds are written with - for a space."""
    return {kind.replace("-", " "): int(n) for kind, _, n in (w.partition("=") for w in words)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--child", nargs=3, metavar=("KIND", "FIRST", "LAST"))
    parser.add_argument("--cases", type=int, default=WHOLE, help="in all, shared among the kinds")
    parser.add_argument("--numbers", nargs="+", metavar="KIND=N", help="of these kinds alone, so many of each")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="children side by side (default: all cores)")
    parser.add_argument("--seconds", type=float, help="stop after about so many")
    parser.add_argument("--results", type=pathlib.Path)
    args = parser.parse_args()
    if args.child:
        serve(args.child[0], int(args.child[1]), int(args.child[2]))
        return
    if args.kind:
        print(*run(args.kind, args.first, args.cases, args.seconds, args.jobs), sep="\n")
        return
    numbers = _numbers(args.numbers) if args.numbers else shared(args.cases)
    done = campaign(numbers, args.first, args.seconds, jobs=args.jobs)
    print(as_markdown(done))
    if args.results:
        args.results.write_text(report(done, args.first, args.jobs))


if __name__ == "__main__":
    main()
