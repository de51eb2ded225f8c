"""The op suite on a real GPU: every case of every op that has a CUDA kernel against the NumPy reference and the CPU,
and the first cases of each under compute-sanitizer.

    python -m benchmarks.gpu_suite OP FIRST LAST        these cases of one op; what was found as JSON
"""
import concurrent.futures
import json
import math
import os
import random
import shutil
import subprocess
import sys
import time

import numpy as np

import ggjit as gg
from ggjit.cuda.driver import DeviceLost
from ggjit.cuda.libraries import HOPPER, ways
from ggjit.ops.core.record import OP
from ggjit.ops.core.spec import Inputs, all_specs
from ggjit.ops.cuda.matmul import mul_mat_dense
from ggjit.ops.cuda.native.launch import launches, makers, node_ways

CASES_A_PROCESS, PROCESS_SECONDS = 40, 120
SANITIZED_CASES, SANITIZER_SECONDS, SANITIZER_ERROR = 4, 600, 99
OWN, CUBLAS = {"GGJIT_CUBLAS": "0"}, {"GGJIT_CUBLAS": "1"}         # whose dense products
PIPED = OWN | {"GGJIT_PIPED": "1"}


# ---------------------------------------------------------------- one case
def nmse(got, want):
    got, want = (np.asarray(x, np.float64).ravel() for x in (got, want))
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(invalid="ignore"):             # infinities that differ
        wrong = np.where(same, 0, got - want)
    size = np.square(np.where(np.isfinite(want), want, 0)).sum()
    return float(np.square(wrong).sum() / max(size, 1e-30))


def on(backend, case, seed):
    """(node, its sources' values, its own) of a case computed on `backend`; leaves are the same on every backend."""
    ctx = gg.Context()
    inputs = Inputs(ctx, np.random.default_rng(seed))
    y = case.build(inputs)
    gg.alloc_ctx_tensors(ctx, backend)
    for t, values in inputs.data:
        t.set(values)
    inner = [s for s in y.src if s is not None and s.base.op != OP.NONE]
    given = [None if s is None or s in inner else exact(s) for s in y.src]          # before an op writes them in place
    if not inner:
        return y, given, gg.compute(y, backend=backend)
    got, *made = gg.compute(y, *inner, backend=backend)
    made = {s.id: values for s, values in zip(inner, made, strict=True)}
    return y, [_widened(made[s.id], s) if s is not None and s.id in made else v
               for s, v in zip(y.src, given, strict=True)], got


def exact(t):
    """A tensor's values as a reference takes them: floats as float64, all four dimensions."""
    return _widened(t.numpy(), t)


def _widened(a, t):
    a = a.reshape(tuple(reversed(t.ne)))
    return a.astype(np.float64) if a.dtype.kind == "f" else a


def bound(case, y):
    """The largest NMSE that is right: the case's; ggml's for the op where a kernel rounds what the CPU's does not."""
    return max(case.max_nmse, *(launch.max_nmse for made in ways(y, HOPPER).values() for launch in made))


def differs(case, y, sources, got, seed):
    """What is wrong with a case's result, or None: it must be near the float64 reference, or near the CPU's."""
    want = np.reshape(all_specs()[y.op].reference(y, *sources), got.shape)
    most, error = bound(case, y), nmse(got, want)
    if error <= most:
        return None
    beside = nmse(got, on(gg.init_backend("CPU"), case, seed)[2])
    return None if beside <= most else f"{case.name}: NMSE {error:.1e} to float64, {beside:.1e} to the CPU"


def work_of(y):
    """Elements, or multiplications / 16, of a case: what the simulator takes its time for."""
    a = y.src[0] if y.src else y
    if y.op in (OP.MUL_MAT, OP.MUL_MAT_ID):
        return math.prod(y.ne) * a.ne[0] / 16
    if y.op == OP.FLASH_ATTN_EXT:
        return math.prod(a.ne) * y.src[1].ne[1] / 16
    return max(math.prod(x.ne) for x in (y, *(s for s in y.src if s is not None)))


def served(op):
    """(work, number, case) of the op's cases that have a kernel."""
    for i, case in enumerate(all_specs()[op].cases()):
        y = case.build(Inputs(gg.Context(), np.random.default_rng(0)))
        if launches(y) is not None:
            yield work_of(y), i, case


def smallest(op):
    """The number of the op's case that is least work, of those that have elements."""
    return min((work, i) for work, i, _ in served(op) if work > 0)[1]


def check_cases(op, first, last):
    """(n cases run, n without a kernel, [what went wrong], where to go on in a new process) of cases first..last-1."""
    n = absent = 0
    wrong, gpu = [], gg.init_backend("CUDA0")
    for seed, case in enumerate(all_specs()[OP[op]].cases()):
        if not first <= seed < last:
            continue
        try:
            y = case.build(Inputs(gg.Context(), np.random.default_rng(seed)))
            if not gpu.device.supports_op(y):
                absent += 1
                continue
            n += 1
            wrong.append(differs(case, *on(gpu, case, seed), seed))
        except DeviceLost as e:                 # nothing runs in this process any more
            return n, absent, [*filter(None, wrong), f"{case.name}: {e}"], seed + 1
        except Exception as e:                  # the rest of the suite is still worth having
            wrong.append(f"{case.name}: {type(e).__name__}: {e}")
    return n, absent, list(filter(None, wrong)), last


# ---------------------------------------------------------------- all of them
def tasks(share=1.0):
    """[(op, first case, last, environment)] in a random order, but one of each op before all others: `share` of the
    cases."""
    made = []
    for op in makers():
        n = sum(1 for _ in all_specs()[op].cases())
        choices = [OWN, *([CUBLAS] if op is OP.MUL_MAT and mul_mat_dense.available() else ()),
                   *([PIPED] if op in node_ways() and node_ways()[op].piped else ())]
        made += [(op.name, i, min(i + CASES_A_PROCESS, n), choice) for choice in choices
                 for i in range(0, n, CASES_A_PROCESS)]
    made = random.sample(made, max(1, round(share * len(made))))
    first = {task[0]: task for task in made}
    return [*first.values(), *(task for task in made if task is not first[task[0]])]


def check_smallest():
    """Yields (op, n cases, n without a kernel, [what went wrong]) of each op's case that is least work, in this
    process."""
    for op in makers():
        i = smallest(op)
        yield op.name, *check_cases(op.name, i, i + 1)[:3]


def check_ops(n_jobs, share=1.0, until=math.inf):
    """Yields (op, n cases, n without a kernel, [what went wrong], n not begun by the time `until`) of a share of all
    cases, some of an op at a time, in processes of their own."""
    with concurrent.futures.ThreadPoolExecutor(n_jobs) as pool:
        running = [pool.submit(in_a_process, task, until) for task in tasks(share)]
        for done in concurrent.futures.as_completed(running):
            op, n, absent, wrong, n_left = done.result()
            print(f"{op}: {n} cases, {absent} without a kernel, {len(wrong)} wrong", *wrong, sep="\n    ",
                  file=sys.stderr, flush=True)
            yield op, n, absent, wrong, n_left


def in_a_process(task, until=math.inf):
    """check_cases in processes of its own: another one goes on where the device was lost, or the process died."""
    op, first, last, choice = task
    n = absent = 0
    wrong = []
    while first < last and time.monotonic() < until:
        command = [sys.executable, "-m", "benchmarks.gpu_suite", op, str(first), str(last)]
        try:
            r = subprocess.run(command, text=True, capture_output=True, timeout=PROCESS_SECONDS,
                               env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "GGJIT_THREADS": "1", **choice})
        except subprocess.TimeoutExpired:
            return op, n, absent, [*wrong, f"cases {first} to {last}: not done in {PROCESS_SECONDS} s"], 0
        if r.returncode:
            return op, n, absent, [*wrong, f"cases {first} to {last}: exit status {r.returncode}: {r.stderr[-300:]}"], 0
        more, none, found, first = json.loads(r.stdout.splitlines()[-1])
        n, absent, wrong = n + more, absent + none, wrong + found
    return op, n, absent, wrong, last - first


def sanitizer():
    """Path of compute-sanitizer on PATH or in CUDA_HOME, or None."""
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=os.path.join(os.environ.get("CUDA_HOME", ""), "bin"))


def sanitize(program, n_jobs, share=1.0):
    """(number of ops, [what memcheck found]): the first cases of each op, in processes of their own."""
    def checked(op):
        command = [program, "--tool", "memcheck", "--error-exitcode", str(SANITIZER_ERROR), sys.executable, "-m",
                   "benchmarks.gpu_suite", op.name, "0", str(SANITIZED_CASES)]
        try:
            r = subprocess.run(command, text=True, capture_output=True, timeout=SANITIZER_SECONDS)
        except subprocess.TimeoutExpired:
            return f"{op.name}: not done in {SANITIZER_SECONDS} s"
        return f"{op.name}: exit status {r.returncode}: {(r.stdout + r.stderr)[-500:]}" if r.returncode else None
    ops = list(makers())
    ops = random.sample(ops, max(1, round(share * len(ops))))
    with concurrent.futures.ThreadPoolExecutor(n_jobs) as pool:
        return len(ops), list(filter(None, pool.map(checked, ops)))


if __name__ == "__main__":
    print(json.dumps(check_cases(sys.argv[1], *map(int, sys.argv[2:]))))
