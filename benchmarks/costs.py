"""What starting up, memory and loading cost: whole `ggjit` commands as a user runs them."""
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

from benchmarks import synth
from benchmarks.report import Row, Spread
from benchmarks.worker import EngineError
from ggjit.models.files.minilm import minilm_path

SENTENCE = "The quick brown fox jumps over the lazy dog."


def tinyllama():
    return synth.model_path("tinyllama-1.1b", "Q4_0")


def run(*args, **env):
    """(seconds, processor seconds, peak resident bytes) of one `ggjit` command."""
    script = pathlib.Path(sys.executable).with_name("ggjit")
    command = [str(script)] if script.exists() else [sys.executable, "-m", "ggjit.tools.command.main"]
    env = {**os.environ, **env}
    env.pop("PYTHONDONTWRITEBYTECODE", None)        # with it, every start compiles our modules anew
    t0 = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        p = subprocess.Popen([*command, *args], stdout=subprocess.DEVNULL, stderr=said, env=env)
        _, status, usage = os.wait4(p.pid, 0)
        p.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - t0
        if p.returncode:
            said.seek(0)
            words = said.read().decode("utf-8", "replace")[-300:].strip()
            raise EngineError(f"ggjit {' '.join(args)} ended with {p.returncode}: {words}")
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def startup(work, args, limit):
    """Row of a command with its kernels in the cache, files in the page cache."""
    def row(ours, rounds):
        run(*args())
        return _startup_row(work, limit, [run(*args()) for _ in range(rounds)])
    return row


def startup_cold(work, args, limit):
    """Nothing cached: kernels are compiled, and MiniLM's file is made."""
    def row(ours, rounds):
        runs, command = [], args()
        for _ in range(1 if rounds < 4 else 2):
            folder = tempfile.mkdtemp(prefix="ggjit-cold-")
            try:
                runs.append(run(*command, GGJIT_CACHE_DIR=folder))
            finally:
                shutil.rmtree(folder)
        return _startup_row(work, limit, runs)
    return row


def _startup_row(work, limit, runs):
    s, cpu = Spread([r[0] for r in runs], "s"), Spread([r[1] for r in runs], "s")
    return Row(work, f"under {limit} s", s, passed=s.median < limit, note=f"processor time {cpu}", n_threads="-")


def peak_memory(ours, rounds):
    path = tinyllama()
    sizes = ours.ask("load", path, n_threads=1, n_ctx=None)      # as the command loads it
    ours.ask("unload")
    parts = os.path.getsize(path), sizes["kv"], sizes["compute"]
    limit = sum(parts) + 400e6
    peak = run("bench", path, "-p", "128", "-n", "16", "-t", "1", "-r", "1")[2]
    return Row("peak memory of `ggjit bench FILE -p 128 -n 16 -t 1 -r 1`, TinyLlama-1.1B shape Q4_0",
               f"{limit / 1e6:,.0f} MB", Spread([peak / 1e6], "MB"), passed=peak <= limit,
               note="target: file {:,.0f} + KV {:,.0f} + compute {:,.0f} + 400 MB".format(*(p / 1e6 for p in parts)))


def metadata(work, path, limit_ms):
    def row(ours, rounds):
        s = Spread([1e3 * x for x in ours.ask("metadata", path(), reps=4 * rounds)], "ms")
        return Row(work, f"{limit_ms} ms", s, passed=s.median <= limit_ms)
    return row


def embed():
    return "embed", SENTENCE


def first_token():
    return "bench", tinyllama(), "-p", "0", "-n", "1", "-t", "1", "-r", "1"


def no_steps(type):
    """Throughput with one token more: 95 % of it at least, beyond four tokens."""
    def row(ours, rounds):
        speeds = dict(ours.ask("column_speeds", type, STEP_COLUMNS, 1, rounds))
        steps = {n: speeds[n] / speeds[n - 1] for n in STEP_COLUMNS[1:]}
        least, low = min(steps.values()), [n for n in steps if steps[n] < LEAST_STEP]
        return Row(f"mul_mat {type} [2048 x 2048], n = {STEP_COLUMNS[1]} ... {STEP_COLUMNS[-1]}: lowest "
                   "throughput over that with n - 1", f"{LEAST_STEP:.0%}",
                   f"{speeds[min(steps, key=steps.get)]:.0f} GFLOP/s",
                   ratio=least, passed=not low, against="n - 1", key=f"columns-{type.lower()}",
                   note="below: " + ", ".join(f"{n}: {steps[n]:.2f}" for n in low) if low else "")
    return row


STEP_COLUMNS, LEAST_STEP = list(range(4, 34)), 0.95
STEP_TYPES = "F32", "F16", "Q8_0", "Q4_0", "Q4_K", "Q6_K"
FIRST = "`ggjit bench FILE -p 0 -n 1 -t 1 -r 1`, TinyLlama-1.1B shape Q4_0, whole process"
COSTS = {
    "startup-warm": startup("`ggjit embed`, one sentence, whole process, warm cache", embed, 1.5),
    "startup-cold": startup_cold("the same, empty cache", embed, 25),
    "first-token-warm": startup(f"{FIRST}, warm cache", first_token, 1.2),
    "first-token-cold": startup_cold("the same, empty cache", first_token, 12),
    "memory": peak_memory,
    "metadata-minilm": metadata("GGUF metadata of MiniLM", minilm_path, 30),
    "metadata-150k": metadata("GGUF metadata, vocabulary of 150,000 words",
                              lambda: synth.vocabulary_path(150_000), 200),
    **{f"columns-{type.lower()}": no_steps(type) for type in STEP_TYPES},
}
