"""Gradients against slopes by differences, in float64."""
import numpy as np

import ggjit as gg
from ggjit.tools.suite.float64 import Float64, numeric


def agrees(loss, leaves, held=(), seed=0, n=2, found=None):
    """The rules' gradients of `loss`, in float64, have the slopes that differences measure.

    held: (leaf, values) of leaves without memory.  found: the gradients, where they are made already.
    """
    found = gg.grad(loss, leaves) if found is None else found
    exact, rng = Float64(loss, *found), np.random.default_rng(seed)
    for t, values in held:
        exact.hold(t, values)
    start = exact.run()[loss].sum()
    for t, d in zip(leaves, found, strict=True):
        assert d.type is gg.F32 and d.ne == t.ne and d.ndim == t.ndim
        slope, kept = exact.run()[d], 0
        for _ in range(5 * n):
            direction = rng.standard_normal(slope.shape)
            want = numeric(exact, loss, t, direction)
            if want is None:
                continue
            along = slope * direction
            size = max(np.sqrt(np.square(along).sum()), 1e-3 * abs(want), 1e-7 * max(1, abs(start)))
            assert abs(along.sum() - want) <= 1e-4 * size, f"{t!r}: {along.sum()} is not {want}"
            kept += 1
            if kept == n:
                break
