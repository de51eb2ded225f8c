"""What compiling costs: every kernel of a sample of the op suite, one by one, into an empty cache; then whole models.

    python -m benchmarks.compile_budget [--cases 1500] [--kernels 450] [--models PATH ...]

Budgets: 95 of 100 kernels within 1.5 s of processor time, those of matrix products within 3 s, a language model's whole
graph (prompt and decode) within 10 s.  Kernels are compiled in one process, as for a graph: helpers that an earlier
kernel needed, too, are typed once; the first compilation, which wakes Numba up, is not counted.
"""
import argparse
import os
import sys
import tempfile
import time

import numpy as np

import ggjit as gg
from benchmarks import costs
from ggjit.models.progress import bar
from ggjit.models.suite.sample import balanced
from ggjit.ops.jit import CACHE, kernel_address

BUDGET, MATRIX_BUDGET, MODEL_BUDGET = 1.5, 3.0, 10.0            # seconds
MATRIX = ("mul_mat", "mul_mat_id", "out_prod")                  # modules of ggjit.ops


def compiled(kernels):
    """[(processor seconds, kernel name, module)] of kernels compiled one by one; longest first."""
    found, warm = [], False
    with bar("kernels", len(kernels)) as step:
        for name, (kernel, module) in sorted(kernels.items(), key=lambda item: (item[1][1] in MATRIX, item[0])):
            if not warm:
                kernel_address(f"{name}-first", kernel.make, (module, *kernel.modules))
                warm = True
            t0 = time.process_time()
            kernel_address(name, kernel.make, (module, *kernel.modules))
            found.append((time.process_time() - t0, name, module.rpartition(".")[2]))
            step()
    return sorted(found, reverse=True)


def table(title, rows, budget):
    """Lines: count, percentiles, share within the budget, the worst ten."""
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


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("--cases", type=int, default=1500)
    p.add_argument("--kernels", type=int, default=450)
    p.add_argument("--seed", type=int, default=20)
    p.add_argument("--models", nargs="*", default=None, metavar="PATH", help="GGUF files (TinyLlama-1.1B shape, Q4_0)")
    args = p.parse_args(argv)
    models = [costs.tinyllama()] if args.models is None else args.models
    backend = gg.init_backend("CPU:n_threads=1")
    _, kernels = balanced(args.cases, args.seed, backend, args.kernels)
    with tempfile.TemporaryDirectory(prefix="ggjit-cold-") as folder:
        os.environ["GGJIT_CACHE_DIR"] = folder
        rows = compiled(kernels)
    matrix = [r for r in rows if r[2] in MATRIX]
    print("\n".join(table("matrix products", matrix, MATRIX_BUDGET)))
    print("\n".join(table("all others", [r for r in rows if r[2] not in MATRIX], BUDGET)))
    print(f"compiled in this process: {CACHE.compiled}")
    for path in models:
        print(model(path), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
