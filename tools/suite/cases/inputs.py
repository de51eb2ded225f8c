"""What the inputs of a case hold.  An init is `init(rng, ne) -> array` in NumPy order (ne reversed).

The ranges are those of ggml's test program; the numbers come from NumPy's seeded generator, so that both sides of a
comparison, and every later run, see the same bytes.
"""
import numpy as np


def _shape(ne):
    return tuple(reversed(ne))


def uniform(lo=-1.0, hi=1.0):
    """Floats in [lo, hi)."""
    def init(rng, ne):
        a = rng.random(_shape(ne), np.float32)
        a *= np.float32(hi - lo)
        a += np.float32(lo)
        return a
    return init


def integers(n):
    """Ids in [0, n)."""
    return lambda rng, ne: rng.integers(0, n, _shape(ne))


def subsets(n):
    """Each row: different ids out of [0, n), shuffled (destinations of SET_ROWS must not collide)."""
    def init(rng, ne):
        rows = int(np.prod(ne[1:]))
        return np.stack([rng.permutation(n)[:ne[0]] for _ in range(rows)]).reshape(_shape(ne))
    return init


def shuffled(denominator=1, modulus=None):
    """Each row: 0, 1, 2 ... (divided by `denominator`: ties; modulo `modulus`: expert ids), shuffled."""
    def init(rng, ne):
        row = np.arange(ne[0]) // denominator
        row = row % modulus if modulus else row
        rows = np.tile(row, (int(np.prod(ne[1:])), 1))
        return rng.permuted(rows, axis=1).reshape(_shape(ne))
    return init


def triangle(lo, hi):
    """Lower triangle (column <= row) uniform in [lo, hi), zero above."""
    return lambda rng, ne: np.tril(uniform(lo, hi)(rng, ne))


def kq_mask(rng, ne):
    """Attention mask: uniform [-1, 1) with random blocks of 128 x 64, a fifth of the area, at -inf or 0."""
    a = uniform()(rng, ne)
    for _ in range(int(0.2 * a.size / (128 * 64))):
        i3, i2, i1, i0 = (int(rng.integers(0, n)) for n in a.shape)
        a[i3, i2, i1:i1 + 64, i0:i0 + 128] = -np.inf if rng.integers(2) else 0.0
    return a


def hadamard(rng, ne):
    """Sylvester's matrix over every two dimensions, scaled to be orthonormal: (-1)^popcount(row & column)."""
    n = ne[0]
    bits = np.arange(int(np.prod(ne[1:])))[:, None] & np.arange(n)[None, :]
    odd = np.zeros_like(bits)
    while bits.any():
        odd ^= bits & 1
        bits >>= 1
    return (np.where(odd, -1.0, 1.0) / np.sqrt(n)).astype(np.float32).reshape(_shape(ne))
