"""Memory: the k-th request is refused somewhere inside a piece of work; and a soak, after which nothing is left."""
import functools
import gc
import os
import threading

import numpy as np
from helpers import tiny_model

import ggjit as gg
from campaign import files
from campaign.runner import Find
from ggjit.core.table import TABLE
from ggjit.models import load_model
from ggjit.ops.core.errors import GgjitError
from ggjit.ops.core.host_memory import refusing


@functools.cache
def model_path():
    return tiny_model.write(files.folder() / "memory.gguf", type="Q8_0")


def arithmetic(rng):
    x = gg.from_numpy(gg.Context(), rng.standard_normal((3, 64), np.float32))
    return gg.compute(gg.soft_max(gg.add(x, x)))


def quantised(rng):
    ctx = gg.Context()
    w = gg.from_numpy(ctx, rng.standard_normal((8, 64), np.float32), type=gg.Q8_0)
    return gg.compute(gg.mul_mat(w, gg.from_numpy(ctx, rng.standard_normal((2, 64), np.float32))))


def scheduled(rng):
    x = gg.from_numpy(gg.Context(), rng.standard_normal((3, 64), np.float32))
    y = gg.silu(gg.add(x, x))
    return gg.Scheduler([gg.init_backend("CPU")]).compute_and_read(gg.Graph(y), y)


def measured(rng):
    x = gg.from_numpy(gg.Context(), rng.standard_normal((3, 64), np.float32))
    return np.array([gg.measure(gg.Graph(gg.relu(gg.add(x, x)))).peak])


def a_model(rng):
    return load_model(model_path()).logits([1, 2, 3, int(rng.integers(40))])


WORKS = (arithmetic, quantised, scheduled, measured, a_model)


def memory(rng):
    """Refused at request k: a typed error; the same work is right afterwards."""
    work, seed = WORKS[int(rng.integers(len(WORKS)))], int(rng.integers(1 << 30))
    want = work(np.random.default_rng(seed))
    outcome = "right"
    with refusing(int(rng.integers(40))):
        try:
            got = work(np.random.default_rng(seed))
            if not np.array_equal(got, want):
                raise Find(f"{work.__name__}: another result where memory was refused")
        except GgjitError:
            outcome = "refused"
    if not np.array_equal(work(np.random.default_rng(seed)), want):
        raise Find(f"{work.__name__}: another result after memory was refused")
    return outcome


# ---------------------------------------------------------------- soak
def held():
    """(resident bytes, descriptors, threads, tensor records) of this process."""
    gc.collect()
    with open("/proc/self/statm") as f:
        resident = int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resident, len(os.listdir("/proc/self/fd")), threading.active_count(), TABLE.n_alive()


MAX_GROWTH = 8 << 20            # bytes of memory that a soak may end with beyond its beginning


def soak(rng):
    """The same work a hundred times: memory, descriptors, threads and records stand where they stood before."""
    work = WORKS[int(rng.integers(len(WORKS)))]
    for _ in range(5):
        work(rng)
    before = held()
    for _ in range(100):
        work(rng)
    after = held()
    if after[0] > before[0] + MAX_GROWTH or after[1:] != before[1:]:
        raise Find(f"{work.__name__}: (bytes, descriptors, threads, records) grew from {before} to {after}")
    return "right"


CASES = {"memory": memory, "soak": soak}
