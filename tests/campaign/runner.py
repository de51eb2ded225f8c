"""Runs cases of a kind in child processes and counts what became of them.

    parent  -- (first, last) -->  child: case(first), case(first + 1) ...
            <-- "seed outcome detail" a line --

A child that dies or hangs is a find of the case it was at; the next child goes on behind it.

    cd tests; python -m campaign.runner --cases 1000000 --results ../benchmarks/results/campaign.md
"""
import argparse
import collections
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

TESTS_PATH = str(pathlib.Path(__file__).parent.parent)
HANG_SECONDS = 60               # a case takes milliseconds; first calls compile kernels
# kind: (module, share of a campaign's cases)
KINDS = {"gguf": ("files", 0.45), "kernel cache": ("files", 0.02), "builders": ("calls", 0.5),
         "threads": ("sharing", 0.005), "memory": ("memory", 0.02), "soak": ("memory", 0.0005),
         "signals": ("processes", 0.004), "fork": ("processes", 0.0005)}
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
def run(kind, first, n, seconds=None):
    """(Counter of outcomes, [(seed, outcome, detail)] of what was found); seconds: stop after so many."""
    counts, finds, end, seed = collections.Counter(), [], time.monotonic() + (seconds or 1e9), first
    while seed < first + n and time.monotonic() < end:
        seed = _child(kind, seed, first + n, end, counts, finds)
    return counts, finds


def _child(kind, first, last, end, counts, finds):
    """One child, to its end; returns the seed to go on with."""
    paths = os.pathsep.join([TESTS_PATH, *filter(None, [os.environ.get("PYTHONPATH")])])
    child = subprocess.Popen([sys.executable, "-m", "campaign.runner", "--child", kind, str(first), str(last)],
                             stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}, start_new_session=True)
    at, text, hung = first, b"", False
    with selectors.DefaultSelector() as ready:
        ready.register(child.stdout, selectors.EVENT_READ)
        while time.monotonic() < end:
            if not ready.select(HANG_SECONDS):
                hung = True
                break
            more = os.read(child.stdout.fileno(), 1 << 16)
            if not more:
                break
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


def campaign(n_cases, first=0, seconds=None, log=print):
    """{kind: (counts, finds, seconds)} of `n_cases` shared among the kinds."""
    done = {}
    for kind, (_, share) in KINDS.items():
        t0 = time.monotonic()
        counts, finds = run(kind, first, max(1, round(share * n_cases)), seconds and seconds * _time_share(kind))
        done[kind] = counts, finds, time.monotonic() - t0
        log(f"{kind}: {dict(counts)}, {done[kind][2]:.0f} s")
        for find in finds[:20]:
            log("   ", *find)
    return done


def _time_share(kind):
    return 0.35 if kind in ("gguf", "builders") else 0.05


def as_markdown(done):
    rows = ["| kind | cases | right | refused | interrupted | found | seconds |", "|---|---|---|---|---|---|---|"]
    for kind, (counts, finds, seconds) in done.items():
        rows.append(f"| {kind} | {sum(counts.values()):,} | {counts['right']:,} | {counts['refused']:,} | "
                    f"{counts['interrupted']:,} | {len(finds)} | {seconds:.0f} |")
    total = sum(sum(counts.values()) for counts, _, _ in done.values())
    rows.append(f"| all | {total:,} | | | | {sum(len(f) for _, f, _ in done.values())} | |")
    return "\n".join(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--child", nargs=3, metavar=("KIND", "FIRST", "LAST"))
    parser.add_argument("--cases", type=int, default=10000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--seconds", type=float, help="stop after about so many")
    parser.add_argument("--results", type=pathlib.Path)
    args = parser.parse_args()
    if args.child:
        serve(args.child[0], int(args.child[1]), int(args.child[2]))
        return
    if args.kind:
        print(*run(args.kind, args.first, args.cases, args.seconds), sep="\n")
        return
    done = campaign(args.cases, args.first, args.seconds)
    print(as_markdown(done))
    if args.results:
        args.results.write_text(f"# Campaign\n\nRandom cases, each in a child process (tests/campaign).  Cases "
                                f"{args.first:,} and on of every kind.\n\n{as_markdown(done)}\n")


if __name__ == "__main__":
    main()
