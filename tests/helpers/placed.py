"""Tensors with memory on a backend."""
import numpy as np

import ggjit as gg
from ggjit.core.versions import stamp

CPU = gg.init_backend("CPU:n_threads=1")
RNG = np.random.default_rng(11)


def array(*shape):
    return RNG.standard_normal(shape, dtype=np.float32)


def placed(ne, target=CPU, type=gg.F32, name="t"):
    ctx = gg.Context()
    t = ctx.new_tensor(type, ne, name)
    gg.alloc_ctx_tensors(ctx, target)
    return t


def version(t):
    return stamp(t.base.id, t.buffer)
