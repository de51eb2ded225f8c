"""Reads results and computes the difference of two."""
import numpy as np

from ggjit.ops.core.types import BF16
from ggjit.ops.types.quantize import dequantize, quantize


def as_array(t, raw):
    """The values of `t` from its bytes (first to last element, gaps included): 4 dimensions, NumPy order.

    Integers keep their type, everything else is float64.
    """
    shape, strides = tuple(reversed(t.ne)), tuple(reversed(t.nb))
    if t.type is BF16:
        bits = np.ndarray(shape, np.uint16, raw, 0, strides)
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if t.type.block > 1:
        rows = np.ndarray((*shape[:-1], t.type.row_nbytes(t.ne[0])), np.uint8, raw, 0, (*strides[:-1], 1))
        return dequantize(t.type, np.ascontiguousarray(rows), shape).astype(np.float64)
    a = np.ndarray(shape, t.type.dtype, raw, 0, strides)
    return a.copy() if a.dtype.kind == "i" else a.astype(np.float64)


def stored(type, values):
    """float64 values as they come back out of a tensor of `type`."""
    values = np.asarray(values)
    if type is BF16:
        return dequantize(type, quantize(type, values), values.shape).astype(np.float64)
    if type.dtype is None or values.dtype.kind == "i":
        return values
    with np.errstate(all="ignore"):
        return values.astype(type.dtype).astype(np.float64 if type.dtype.kind == "f" else type.dtype)


def rounding(type):
    """NMSE that storing values in a quantised type may cost: eight times a step's share; 0 for scalar types."""
    return 8.0 * 4.0 ** (-8.0 * type.nbytes / type.block) if type.block > 1 else 0.0


# ---------------------------------------------------------------- error measures
def nmse(got, want, source=None):
    """sum (got - want)^2 / sum want^2; infinities of the same sign in the same places do not count."""
    differ = got != want
    if not differ.any():
        return 0.0
    g, w = got[differ].astype(np.float64), want[differ].astype(np.float64)
    finite = want[np.isfinite(want)].astype(np.float64)
    power = np.square(finite).sum()
    return float(np.square(g - w).sum() / (power if power > 0 else 1.0))


def jaccard(a, b):
    """Share of elements that two multisets do not have in common: 0 equal, 1 disjoint."""
    values, where = np.unique(np.concatenate([a.reshape(-1), b.reshape(-1)]), return_inverse=True)
    count = np.bincount(where[:a.size], minlength=values.size) - np.bincount(where[a.size:], minlength=values.size)
    return float(np.abs(count).sum() / (2 * a.size))


def same_set(got, want, source=None):
    """Ids in any order, over the whole result as in ggml's test."""
    return jaccard(got, want)


def picked(got, want, source):
    """Where there are ties: the values that the ids pick, row by row, and no id twice."""
    error = 0.0
    for g, w, row in zip(*(a.reshape(-1, a.shape[-1]) for a in (got, want, source)), strict=True):
        if g.min() < 0 or g.max() >= row.size:
            return np.inf
        error += jaccard(row[g], row[w]) + (np.unique(g).size != g.size)
    return float(error)


def in_order(got, want, source=None):
    """NMSE of the sorted values."""
    return nmse(np.sort(got, axis=None), np.sort(want, axis=None))


def largest(got, want, source=None):
    """The largest absolute value: for results that should be zero."""
    return float(max(np.abs(got).max(), np.abs(want).max()))


MEASURES = {"nmse": nmse, "set": same_set, "picked": picked, "sorted": in_order, "largest": largest}


def difference(measure, got, want, source=None):
    """(error, complaint): the complaint is about NaN or infinities, which no measure forgives."""
    if got.shape != want.shape:
        return np.inf, f"shape {got.shape} instead of {want.shape}"
    if got.dtype.kind == "f":
        if np.isnan(got).any() or np.isnan(want).any():
            return np.inf, f"NaN in {'our result' if np.isnan(got).any() else 'the result compared with'}"
        ours, theirs = np.isinf(got), np.isinf(want)
        if (ours != theirs).any() or (got[ours] != want[ours]).any():
            return np.inf, "infinities in different places"
    return MEASURES[measure](got, want, source), ""
