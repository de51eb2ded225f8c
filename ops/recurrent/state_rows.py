"""One step of a linear recurrence on a row of state: what ssm_scan, gated_delta_net and rwkv_wkv7 share.

    s' = s * decay + u b         decay: one number for the row, or one per element
    y  = sum s' c

Rows of a state do not depend on each other: a thread takes a few rows through all tokens while they stay in its
first-level cache, and there are no barriers.
"""
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mem import copy_bytes, zero_bytes
from ggjit.ops.native.simd import W, fadd, fma, fmul, hsum, ldf, ldf_part, splat, stf, stf_part, zerof

ROWS = 16                               # rows of a head's state that make one unit of work


@inline
def row_blocks(n):
    return (n + ROWS - 1) // ROWS


@inline
def begin_snapshots(new, old, n_t, n_keep, stride, nbytes):
    """Rows (nbytes bytes) of the snapshots from before the first of n_t tokens: zeros; without tokens the old state.

    new: the rows in the newest snapshot; the others follow it `stride` bytes apart, n_keep in all.
    """
    for i in range(max(1, n_t), n_keep):
        zero_bytes(new + i * stride, nbytes)
    if n_t == 0:
        copy_bytes(new, old, nbytes)


@inline
def keep_snapshot(new, back, n_keep, stride, nbytes):
    """Copy the rows to the snapshot of `back` tokens before the last one, where it is kept."""
    if 0 < back and back < n_keep:
        copy_bytes(new + back * stride, new, nbytes)


@inline
def dot(x, y, n):
    """sum x y over n floats."""
    a, b = zerof(), zerof()
    i = 0
    while i + 2 * W <= n:
        a = fma(ldf(x + 4 * i), ldf(y + 4 * i), a)
        b = fma(ldf(x + 4 * i + 4 * W), ldf(y + 4 * i + 4 * W), b)
        i += 2 * W
    while i < n:
        a = fma(ldf_part(x + 4 * i, n - i), ldf_part(y + 4 * i, n - i), a)
        i += W
    return hsum(fadd(a, b))


@inline
def dot3(x, y, z, n):
    """sum x y z over n floats."""
    a, b = zerof(), zerof()
    i = 0
    while i + 2 * W <= n:
        a = fma(fmul(ldf(x + 4 * i), ldf(y + 4 * i)), ldf(z + 4 * i), a)
        b = fma(fmul(ldf(x + 4 * i + 4 * W), ldf(y + 4 * i + 4 * W)), ldf(z + 4 * i + 4 * W), b)
        i += 2 * W
    while i < n:
        a = fma(fmul(ldf_part(x + 4 * i, n - i), ldf_part(y + 4 * i, n - i)), ldf_part(z + 4 * i, n - i), a)
        i += W
    return hsum(fadd(a, b))


@inline
def step(new, old, decay, u, b, c, n):
    """new = old * decay + u b over n floats at the addresses; returns sum new * c.  decay and u are numbers."""
    vd, vu, y0, y1 = splat(decay), splat(u), zerof(), zerof()
    i = 0
    while i + 2 * W <= n:
        s0 = fma(ldf(old + 4 * i), vd, fmul(vu, ldf(b + 4 * i)))
        s1 = fma(ldf(old + 4 * i + 4 * W), vd, fmul(vu, ldf(b + 4 * i + 4 * W)))
        stf(new + 4 * i, s0)
        stf(new + 4 * i + 4 * W, s1)
        y0, y1 = fma(s0, ldf(c + 4 * i), y0), fma(s1, ldf(c + 4 * i + 4 * W), y1)
        i += 2 * W
    while i < n:
        s0 = fma(ldf_part(old + 4 * i, n - i), vd, fmul(vu, ldf_part(b + 4 * i, n - i)))
        stf_part(new + 4 * i, s0, n - i)
        y0 = fma(s0, ldf_part(c + 4 * i, n - i), y0)
        i += W
    return hsum(fadd(y0, y1))


@inline
def step_each(new, old, decay, u, b, c, n):
    """The same with a decay per element, n floats at the address `decay`."""
    vu, y0, y1 = splat(u), zerof(), zerof()
    i = 0
    while i + 2 * W <= n:
        s0 = fma(ldf(old + 4 * i), ldf(decay + 4 * i), fmul(vu, ldf(b + 4 * i)))
        s1 = fma(ldf(old + 4 * i + 4 * W), ldf(decay + 4 * i + 4 * W), fmul(vu, ldf(b + 4 * i + 4 * W)))
        stf(new + 4 * i, s0)
        stf(new + 4 * i + 4 * W, s1)
        y0, y1 = fma(s0, ldf(c + 4 * i), y0), fma(s1, ldf(c + 4 * i + 4 * W), y1)
        i += 2 * W
    while i < n:
        s0 = fma(ldf_part(old + 4 * i, n - i), ldf_part(decay + 4 * i, n - i), fmul(vu, ldf_part(b + 4 * i, n - i)))
        stf_part(new + 4 * i, s0, n - i)
        y0 = fma(s0, ldf_part(c + 4 * i, n - i), y0)
        i += W
    return hsum(fadd(y0, y1))
