"""Random choices inside jitted searches; `state` is one word that goes on from draw to draw and is not 0."""
import numpy as np

from ggjit.ops.native.jit import exact


@exact
def random_word(state):
    """53 random bits: xorshift (Marsaglia, 2003)."""
    x = np.uint64(state[0])
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    state[0] = np.int64(x)
    return np.int64(x >> np.uint64(11))
