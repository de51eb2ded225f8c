"""The speed table of the README: whole models next to llama.cpp, and what starting up, memory and loading cost.

    python -m benchmarks.models                     # from the checkout; about five minutes, prints and writes the table
    python -m benchmarks.models --quick             # two rounds instead of five
    python -m benchmarks.models --only q4_0,startup # rows whose key contains one of these (--list shows the keys)

Speeds are llama-bench's: pp = one prompt from an empty cache, logits of its last token; tg = tokens one at a time from
an empty cache; KV cache F16.  Medians over the rounds, min and max in brackets, engines taking turns on the same file.
"""
import argparse
import datetime
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

from benchmarks import machine, synth
from benchmarks.compare import Engines, Speed, compare
from benchmarks.engine import CLOCKS
from benchmarks.report import Row, Spread, markdown
from benchmarks.worker import ROOT, EngineError, Missing
from ggjit.models.minilm import minilm_path

RESULTS = ROOT / "benchmarks" / "results" / "models.md"
SENTENCE = "The quick brown fox jumps over the lazy dog."


def synthetic(shape, type):
    return lambda: synth.model_path(shape, type)


def stories():
    """A real trained network of one megabyte, among the reference data."""
    folder = pathlib.Path(os.environ.get("GGJIT_SHARED", ROOT.parent / "shared"))
    path = folder / "data" / "stories260k" / "stories260K-F32.gguf"
    if not path.exists():
        raise Missing(f"{path.name} is not among the reference data (GGJIT_SHARED names its folder)")
    return str(path)


Q4, F16 = synthetic("tinyllama-1.1b", "Q4_0"), synthetic("tinyllama-1.1b", "F16")
SPEEDS = (
    Speed("tinyllama-q4_0-tg", "TinyLlama-1.1B shape Q4_0, decode", Q4, "tg", 32, 1.0),
    Speed("tinyllama-q4_0-pp128", "TinyLlama-1.1B shape Q4_0, prompt of 128", Q4, "pp", 128, 1.5),
    Speed("tinyllama-f16-tg", "TinyLlama-1.1B shape F16, decode", F16, "tg", 32, 0.95),
    Speed("tinyllama-f16-pp128", "TinyLlama-1.1B shape F16, prompt of 128", F16, "pp", 128, 1.5),
    Speed("stories260k-tg", "stories260K F32, decode (pure overhead)", stories, "tg", 128, 1.5),
    Speed("minilm-64", "MiniLM F32, length 64", lambda: str(minilm_path()), "embed", 64, 1.5, beside="ort"),
)


# ---------------------------------------------------------------- whole processes
def run(*args, **env):
    """(seconds, processor seconds, peak resident bytes) of one `ggjit` command."""
    script = pathlib.Path(sys.executable).with_name("ggjit")
    command = [str(script)] if script.exists() else [sys.executable, "-m", "ggjit.models.cli"]
    t0 = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        p = subprocess.Popen([*command, *args], stdout=subprocess.DEVNULL, stderr=said, env={**os.environ, **env})
        _, status, usage = os.wait4(p.pid, 0)
        p.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - t0
        if p.returncode:
            said.seek(0)
            words = said.read().decode("utf-8", "replace")[-300:].strip()
            raise EngineError(f"ggjit {' '.join(args)} ended with {p.returncode}: {words}")
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def startup_row(work, limit, runs):
    s, cpu = Spread([r[0] for r in runs], "s"), Spread([r[1] for r in runs], "s")
    return Row(work, f"under {limit} s", s, passed=s.median < limit, note=f"processor time {cpu}")


def startup_warm(engines, rounds):
    run("embed", SENTENCE)
    return startup_row("`ggjit embed`, one sentence, whole process, warm cache", 1.5,
                       [run("embed", SENTENCE) for _ in range(rounds)])


def startup_cold(engines, rounds):
    """Nothing cached: kernels are compiled and MiniLM's file is made."""
    runs = []
    for _ in range(1 if rounds < 3 else 2):
        folder = tempfile.mkdtemp(prefix="ggjit-cold-")
        try:
            runs.append(run("embed", SENTENCE, GGJIT_CACHE_DIR=folder))
        finally:
            shutil.rmtree(folder)
    return startup_row("the same, empty cache", 25, runs)


def peak_memory(engines, rounds):
    path = Q4()
    sizes = engines.get("ours").ask("load", path, n_threads=1, n_ctx=None)      # as the command loads it
    engines.get("ours").ask("unload")
    parts = os.path.getsize(path), sizes["kv"], sizes["compute"]
    limit = sum(parts) + 400e6
    peak = run("bench", path, "-p", "128", "-n", "16", "-t", "1", "-r", "1")[2]
    return Row("peak memory of `ggjit bench FILE -p 128 -n 16 -t 1 -r 1`, TinyLlama-1.1B shape Q4_0",
               f"{limit / 1e6:,.0f} MB", Spread([peak / 1e6], "MB"), passed=peak <= limit,
               note="target: file {:,.0f} + KV {:,.0f} + compute {:,.0f} + 400 MB".format(*(p / 1e6 for p in parts)))


def metadata(work, path, limit_ms):
    def row(engines, rounds):
        s = Spread([1e3 * x for x in engines.get("ours").ask("metadata", path(), reps=4 * rounds)], "ms")
        return Row(work, f"{limit_ms} ms", s, passed=s.median <= limit_ms)
    return row


COSTS = {
    "startup-warm": startup_warm,
    "startup-cold": startup_cold,
    "memory": peak_memory,
    "metadata-minilm": metadata("GGUF metadata of MiniLM", minilm_path, 30),
    "metadata-150k": metadata("GGUF metadata, vocabulary of 150,000 words",
                              lambda: synth.vocabulary_path(150_000), 200),
}


# ---------------------------------------------------------------- the command
def measure(only, n_threads, rounds, clock="wall", say=print):
    """(rows, lines about the machine)"""
    wanted = [k for k in (*(s.key for s in SPEEDS), *COSTS) if not only or any(o in k for o in only)]
    rows, lines = [], []

    def tell(line):
        lines.append(line)
        say(line)
    tell(machine.idle_check("before"))
    with Engines(clock) as engines:
        for name in ("ours", "peer"):
            tell(_introduce(engines, name))
        for t in n_threads:
            limits = engines.get("ours").ask("limits", t)
            tell(f"limits with {t} thread{'s' if t > 1 else ''}: memory is read at "
                 f"{limits['bandwidth'] / 1e9:.1f} GB/s, float32 peak of a core {limits['f32'] / 1e9:.0f} GFLOP/s")
            for speed in (s for s in SPEEDS if s.key in wanted):
                rows.append(_guarded(speed.work, lambda s=speed, t=t, x=limits: compare(engines, s, t, rounds, x)))
                say(markdown(rows[-1:]).rsplit("\n", 1)[1])
        engines.unload()
        for key in (k for k in COSTS if k in wanted):
            rows.append(_guarded(key, lambda k=key: COSTS[k](engines, rounds)))
            say(markdown(rows[-1:]).rsplit("\n", 1)[1])
    tell(machine.idle_check("after"))
    return rows, lines


def _introduce(engines, name):
    worker = engines.get(name)
    return "{name} {version} ({features})".format(**worker.about) if worker else engines.reasons[name]


def _guarded(work, make):
    """The row, or one that says why there is none."""
    try:
        return make()
    except Missing as e:
        return Row(work, "-", "not measured", note=str(e))
    except EngineError as e:
        return Row(work, "-", "failed", passed=False, note=" ".join(str(e).split()))


def write(path, rows, lines, rounds):
    known = ", ".join(f"{k} {v or 'not installed'}" for k, v in machine.versions().items())
    about = [f"{datetime.date.today()}, {machine.cpu_model()}", known, *lines,
             f"medians of {rounds} rounds, (min - max); engines take turns, each in a process of its own"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("# Models\n\n`python -m benchmarks.models`\n\n" + markdown(rows) + "\n\n"
                    + "\n".join(f"- {line}" for line in about) + "\n", "utf-8")


def main(argv=None):
    p = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--quick", action="store_true", help="two rounds")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--threads", default="1", help="thread counts, e.g. 1,2 (default 1)")
    p.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: processor time, where the machine is not idle")
    p.add_argument("--only", default="", help="parts of row keys, separated by commas")
    p.add_argument("--list", action="store_true", help="print the row keys")
    p.add_argument("--out", type=pathlib.Path, help="where the table goes (default: benchmarks/results/models.md; "
                   "with --only or --quick nothing is written)")
    args = p.parse_args(argv)
    if args.list:
        print("\n".join([*(s.key for s in SPEEDS), *COSTS]))
        return 0
    only = [o for o in args.only.split(",") if o]
    rounds = 2 if args.quick else max(1, args.rounds)
    rows, lines = measure(only, [int(t) for t in args.threads.split(",")], rounds, args.clock)
    print("\n" + markdown(rows))
    out = args.out or (RESULTS if not only and not args.quick else None)
    if out:
        write(out, rows, [*lines, f"clock: {args.clock}"], rounds)
        print(f"\nwritten to {out}")
    return int(any(r.passed is False for r in rows))


if __name__ == "__main__":
    sys.exit(main())
