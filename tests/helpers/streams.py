"""Schedulers on asynchronous test devices, and leaves that they share."""
import numpy as np

import ggjit as gg
from helpers import schedulers

N = 64


def world(*fakes, **options):
    """A scheduler on these test devices and the CPU; returns it and its backends."""
    sched, _ = schedulers.world(*fakes, **options)
    return sched, sched.backends


def leaf(backend, value, name="", ctx=None):
    ctx = ctx or gg.Context()
    t = ctx.new_tensor(gg.F32, (N,), name)
    gg.alloc_ctx_tensors(ctx, backend)
    t.set(np.full(N, value, np.float32))
    return t
