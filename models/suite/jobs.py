"""The suite in several processes: each runs stretches of neighbouring cases, which share kernels, with its own ggml."""
import concurrent.futures
import dataclasses
import multiprocessing

from ggjit.models.suite import oracle
from ggjit.models.suite.case import all_cases
from ggjit.models.suite.runner import Runner
from ggjit.ops.errors import MissingExtra
from ggjit.registry import init_backend

STRETCH = 16                                            # cases a process takes at a time
_runner = None


def _start(backend, n_threads, seed):
    global _runner
    made = init_backend(backend)
    made.n_threads = n_threads
    try:
        peer = oracle.connect()
    except MissingExtra:
        peer = None
    _runner = Runner(made, seed, peer)


def _run(indices):
    """Outcomes of cases by number; the case itself (it holds functions) stays behind."""
    return [dataclasses.replace(_runner.run(all_cases()[i]), case=None) for i in indices]


def spread(cases, backend, seed, n_jobs):
    """Outcomes of the cases in order, computed by `n_jobs` processes."""
    stretches = [cases[i:i + STRETCH] for i in range(0, len(cases), STRETCH)]
    with concurrent.futures.ProcessPoolExecutor(
            n_jobs, multiprocessing.get_context("spawn"), _start,
            (backend.device.name, backend.n_threads, seed)) as pool:
        for stretch, outcomes in zip(stretches, pool.map(_run, [[c.index for c in s] for s in stretches]),
                                     strict=True):
            yield from (dataclasses.replace(o, case=c) for c, o in zip(stretch, outcomes, strict=True))
