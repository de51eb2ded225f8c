"""The cost of compiling: every kernel of a sample of the op suite, one by one, into an empty cache; then whole
models.

    python -m benchmarks.compile_budget [--cases 1500] [--kernels 450] [--seconds S] [--resume FILE] [--models PATH ...]
    python -m benchmarks.compile_budget --waits [--rounds 2]    # what a user waits for, against targets: 4 minutes

Budgets: 95 of 100 kernels within 1.5 s of processor time, those of matrix products within 3 s, a language model's whole
graph (prompt and decode) within 10 s.  Kernels are compiled in one process, as for a graph: helpers that an earlier
kernel needed, too, are typed once; the first compilation, which wakes Numba up, is not counted.  The order is drawn by
the seed, so what is done after --seconds, or at Ctrl-C, is a fair sample; --resume adds to an earlier run's.
"""
import argparse
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from unittest import mock

import numpy as np

import ggjit as gg
from benchmarks import costs
from ggjit.display.progress import bar
from ggjit.models.files.minilm import minilm_path
from ggjit.ops.native import cache_files, kernel_pack
from ggjit.ops.native.jit import kernel_address
from ggjit.tools.suite.sample import balanced

BUDGET, MATRIX_BUDGET, MODEL_BUDGET = 1.5, 3.0, 10.0            # seconds
MATRIX = ("mul_mat", "mul_mat_id", "out_prod")                  # modules of ggjit.ops


@contextlib.contextmanager
def empty_cache():
    with tempfile.TemporaryDirectory(prefix="ggjit-cold-") as folder, \
            mock.patch.dict(os.environ, GGJIT_CACHE_DIR=folder):
        yield


def compiled(kernels, known, seed, seconds):
    """Yields (processor seconds, kernel name, module) of the kernels that are not known, compiled one by one.

    Ends after so many seconds of processor time.
    """
    waiting = sorted(kernels.keys() - known)
    np.random.default_rng(seed).shuffle(waiting)
    with bar("kernels", len(waiting)) as step, empty_cache():
        for i, name in enumerate(waiting):
            kernel, module = kernels[name]
            if i == 0:
                kernel_address(f"{name}-first", kernel.make, (module, *kernel.modules))
            t0 = time.process_time()
            kernel_address(name, kernel.make, (module, *kernel.modules))
            t1 = time.process_time()
            yield t1 - t0, name, module.rpartition(".")[2]
            step()
            if t1 > seconds:
                return


def table(title, rows, budget):
    """Lines: count, percentiles, share within the budget, the worst ten."""
    if not rows:
        yield f"{title}: none"
        return
    rows = sorted(rows, reverse=True)
    seconds = np.array([s for s, _, _ in rows])
    p50, p95 = np.percentile(seconds, (50, 95))
    yield (f"{title}: {len(rows)} kernels, {seconds.sum():.0f} s; median {p50:.2f} s, 95 % {p95:.2f} s, worst "
           f"{seconds[0]:.2f} s; {100 * np.mean(seconds <= budget):.1f} % within {budget} s")
    yield from (f"    {s:6.2f} s  {name}" for s, name, _ in rows[:10])


def model(path):
    """Line: the cold compilation of a model's kernels by `ggjit warm-up`, in a fresh process."""
    with tempfile.TemporaryDirectory(prefix="ggjit-cold-") as folder:
        wall, cpu, _ = costs.run("warm-up", str(path), GGJIT_CACHE_DIR=folder)
        n = sum(len(files) for _, _, files in os.walk(folder))
    return (f"{os.path.basename(path)}: {n} files, {wall:.1f} s, processor {cpu:.1f} s (whole process; budget "
            f"{MODEL_BUDGET:.0f} s)")


# ---------------------------------------------------------------- what a user waits for
def waits(rounds):
    """Lines of a table: processor seconds of whole process trees, the least of a few rounds, and the targets.

    "pack": the cache is empty and a pack of these kernels came with ggjit; the first process unpacks it.
    """
    first = {"MiniLM, first result": (("embed", costs.SENTENCE), 4.0),
             "TinyLlama Q4_0, first token": (costs.first_token(), 5.0), "warm-up of MiniLM": (("warm-up",), 10.0)}
    yield f"{'processor seconds':32}{'target':>8}{'compiled':>10}{'pack':>8}{'warm':>8}{'kernels':>9}"
    with tempfile.TemporaryDirectory(prefix="ggjit-cold-") as folder:
        model = minilm_path()
        cache = pathlib.Path(folder) / "all"
        for what, (command, target) in first.items():
            compiled, n = _least(rounds, command, model, None, cache)
            with _shipped(cache):
                pack, _ = _least(rounds, command, model, None)
            warm, _ = _least(rounds, command, model, cache)
            yield f"{what:32}{target:8.2f}{compiled:10.2f}{pack:8.2f}{warm:8.2f}{n:9}"
        yield f"a warm process of one token: target 0.80, {_least(3, costs.first_token(), model, cache)[0]:.2f}"
    ggjit, used, numba = (min(_processor(["-c", f"import {code}"]) for _ in range(5))
                          for code in ("ggjit", "ggjit; ggjit.Tensor", "numba"))
    yield f"import ggjit: target 0.25, {ggjit:.2f}; with its first name {used:.2f}, of this numba {numba:.2f}"


def _processor(args):
    """Processor seconds of a Python process."""
    p = subprocess.Popen([sys.executable, *args])
    _, status, usage = os.wait4(p.pid, 0)
    p.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_utime + usage.ru_stime


def _least(rounds, command, model, cache, into=None):
    """(least processor seconds, kernels in the cache) of a command; with no `cache` each round has an empty one, whose
    kernels join `into`."""
    seconds, n = [], 0
    for _ in range(rounds):
        with contextlib.ExitStack() as stack:
            folder = cache or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ggjit-cold-")))
            (folder / "models").mkdir(parents=True, exist_ok=True)
            if not (folder / "models" / os.path.basename(model)).exists():
                shutil.copy(model, folder / "models")
            seconds.append(costs.run(*command, GGJIT_CACHE_DIR=str(folder))[1])
            n = len(list((folder / "kernels").glob("*.o")))
            if into:
                shutil.copytree(folder / "kernels", into / "kernels", dirs_exist_ok=True)
    return min(seconds), n


@contextlib.contextmanager
def _shipped(cache):
    """In the block ggjit comes with a pack: the one that is there, or one of the kernels of that cache."""
    path = kernel_pack.SHIPPED.path
    if path.exists():
        yield
        return
    path.parent.mkdir(exist_ok=True)
    try:
        kernel_pack.write(path, {f.name: cache_files.read(f) for f in (cache / "kernels").glob("*.o")})
        yield
    finally:
        path.unlink(missing_ok=True)


def main(argv=None):
    p = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.partition("\n")[0])
    p.add_argument("--cases", type=int, default=1500)
    p.add_argument("--kernels", type=int, default=450)
    p.add_argument("--seed", type=int, default=20)
    p.add_argument("--seconds", type=float, default=np.inf, help="of processor time, for the kernels")
    p.add_argument("--resume", default=os.devnull, metavar="FILE", help="lines of JSON, one a kernel")
    p.add_argument("--models", nargs="*", default=None, metavar="PATH", help="GGUF files (TinyLlama-1.1B shape, Q4_0)")
    p.add_argument("--waits", action="store_true", help="only what a user waits for, against targets")
    p.add_argument("--rounds", type=int, default=2)
    args = p.parse_args(argv)
    if args.waits:
        for line in waits(args.rounds):
            print(line, flush=True)
        return 0
    _, kernels = balanced(args.cases, args.seed, gg.init_backend("CPU:n_threads=1"), args.kernels)
    with open(args.resume, "a+", encoding="utf-8") as file, contextlib.suppress(KeyboardInterrupt):
        file.seek(0)
        rows = [tuple(json.loads(line)) for line in file]
        for row in compiled(kernels, {name for _, name, _ in rows}, args.seed, args.seconds):
            rows.append(row)
            print(json.dumps(row), file=file, flush=True)
    rows = [r for r in rows if r[1] in kernels]
    print(f"{len(rows)} of {len(kernels)} kernels of {args.cases} cases")
    print("\n".join(table("matrix products", [r for r in rows if r[2] in MATRIX], MATRIX_BUDGET)))
    print("\n".join(table("all others", [r for r in rows if r[2] not in MATRIX], BUDGET)), flush=True)
    for path in [costs.tinyllama()] if args.models is None else args.models:
        print(model(path), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
