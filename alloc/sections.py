"""Live bytes over time, maximal live sets, and the lower bound every plan is measured against.

    step      0   1   2   3   4
    buffer a  [-------------)           half-open: a is live at steps 0, 1, 2
    buffer b      [---------)
    buffer c              . [---)       c is born where a and b die: they may share memory
    sections  |------0------|-1-|       a live set is maximal where a birth is directly followed by a death
"""
import numpy as np


def live_bytes(lo, hi, size, n_steps):
    """Bytes live at each of n_steps steps."""
    d = np.zeros(n_steps + 1, np.int64)
    np.add.at(d, np.minimum(lo, n_steps), size)
    np.subtract.at(d, np.minimum(hi, n_steps), size)
    return np.cumsum(d)[:n_steps]
