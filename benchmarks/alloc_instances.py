"""Offset problems that are hard on purpose, and random ones for scaling.

`accelerator(n, seed)` cuts a rectangle time x memory into n boxes that fill it to the last byte, with straight cuts
and with pinwheels (five boxes no straight cut separates), then shortens and thins some of them.  Hence a plan at 100 %
of the lower bound exists, and greedy orders miss it by 20-50 %.

    pinwheel   +----+------+       lifetimes are uneven as on an accelerator: most buffers are short,
               |    |      |       a few span many steps
               |    +---+--+
               +----+   |  |
               |    +---+  |
               +--------+--+
"""
import numpy as np

UNIT = 32                       # bytes; sizes are multiples of it


def _split(rng, span, lo=0.2, hi=0.8):
    return int(max(1, min(span - 1, round(span * rng.uniform(lo, hi)))))


def _cut(rng, box, flat):
    """Boxes that fill `box` = (t0, t1, m0, m1)."""
    t0, t1, m0, m1 = box
    w, h = t1 - t0, m1 - m0
    if w >= 3 and h >= 3 and rng.random() < 0.45:
        ta, tb = sorted(t0 + int(x) for x in rng.choice(np.arange(1, w), 2, replace=False))
        ma, mb = sorted(m0 + int(x) for x in rng.choice(np.arange(1, h), 2, replace=False))
        if rng.random() < 0.5:
            return [(t0, tb, m0, ma), (tb, t1, m0, mb), (ta, t1, mb, m1), (t0, ta, ma, m1), (ta, tb, ma, mb)]
        return [(ta, t1, m0, ma), (tb, t1, ma, m1), (t0, tb, mb, m1), (t0, ta, m0, mb), (ta, tb, ma, mb)]
    across = w >= 2 and (h < 2 or rng.random() < flat)
    if across:
        t = t0 + _split(rng, w)
        return [(t0, t, m0, m1), (t, t1, m0, m1)]
    if h < 2:
        return [box]
    m = m0 + _split(rng, h)
    return [(t0, t1, m0, m), (t0, t1, m, m1)]


def accelerator(n, seed, steps=None, capacity=1 << 20, flat=0.5, trim=0.35, unit=UNIT):
    """(lower, upper, size) of n buffers; a plan within `capacity` bytes exists and `capacity` is the lower bound."""
    rng = np.random.default_rng(seed)
    units = capacity // unit
    boxes = [(0, steps or 2 * n, 0, units)]
    while len(boxes) < n:
        weight = np.array([(b[1] - b[0]) * (b[3] - b[2]) - 1 for b in boxes], float) ** 0.7
        k = int(rng.choice(len(boxes), p=weight / weight.sum()))
        boxes += _cut(rng, boxes.pop(k), flat)
    full = int(rng.integers(0, steps or 2 * n))             # this step keeps every byte: it is the lower bound
    out = []
    for t0, t1, m0, m1 in boxes:
        if not t0 <= full < t1 and rng.random() < trim:
            if rng.random() < 0.5 and t1 - t0 > 1:
                t1 -= int(rng.integers(0, max(1, (t1 - t0) // 3)))
            elif m1 - m0 > 1:
                m1 -= int(rng.integers(0, max(1, (m1 - m0) // 8)))
        out.append((t0, t1, unit * (m1 - m0)))
    out = np.array(out, np.int64)[rng.permutation(len(out))]
    return out[:, 0].copy(), out[:, 1].copy(), out[:, 2].copy()


HARD = [(n, 1000 + k) for k, n in enumerate((154, 170, 203, 213, 215, 296, 308, 316, 374, 409, 450))]

# how the boxes are cut: a coarse grid with many equal sizes ("tiles"), most boxes
# trimmed so that only part of the time is full ("loose")
STYLES = {"tiles": {"steps": 60, "unit": 1 << 14}, "loose": {"steps": 120, "unit": 1 << 13, "trim": 0.95}}


def random_lifetimes(n, seed=0):
    """Pareto lifetimes (most a few steps, some for ever), sizes spread over four decades."""
    rng = np.random.default_rng(seed)
    lo = np.sort(rng.integers(0, n, n))
    width = np.minimum(1 + (rng.pareto(1.0, n) * 3).astype(np.int64), n)
    return lo, lo + width, 32 * (1 + (2 ** rng.uniform(0, 15, n)).astype(np.int64))


def uniform_lifetimes(n, seed=0, longest=100):
    """Uniform lifetimes and sizes."""
    rng = np.random.default_rng(seed)
    lo = rng.integers(0, n, n)
    return lo, lo + rng.integers(1, longest, n), 32 * rng.integers(1, 1000, n)


def wide_lifetimes(n, seed=0):
    """Heavy-tailed lifetimes from a fiftieth of the time on: thousands are live at once."""
    rng = np.random.default_rng(seed)
    lo = rng.integers(0, n, n)
    return lo, lo + 1 + np.clip(rng.pareto(0.6, n) * n / 50, 0, n).astype(np.int64), 32 * rng.integers(1, 1000, n)
