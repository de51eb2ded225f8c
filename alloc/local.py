"""Local search over rank orders: many short canonical searches instead of one deep one.

A chronological depth-first search that goes wrong early never comes back to it.  Here every step runs the search with
another rank order for only twice as many nodes as there are buffers.  The order comes from real-valued keys: those of
the step that placed most buffers so far, with some of them disturbed, or now and then fresh ones.  On fully packed
instances of 150-450 buffers this halves the gap that depth first leaves after a second.
"""
import numpy as np

FRESH = 0.02                    # share of steps that start from fresh keys
WIDE, NARROW = 0.5, 1.0         # disturbance of fresh and of kept keys, in units of log(key)
SHARES = (0.02, 0.1, 0.5)       # of the keys disturbed in one step
STALE = 200                     # steps without progress before another capacity is tried
REACH = 0.05                    # capacities tried lie within this share of the gap below the best


class LocalSearch:
    """Keeps its place between calls of `step`.  Deterministic for a seed, apart from how long it is let run."""

    def __init__(self, inst, search, seed=0):
        self.search, self.n = search, inst.n
        self.rng = np.random.default_rng(seed)
        width = (inst.hi - inst.lo).astype(np.float64)
        self.bases = [np.log(k + 1.0) for k in (inst.breadth, width, inst.size * width)]
        self.keys, self.depth, self.stale, self.cap = None, -1, 0, None

    def _draw(self):
        rng = self.rng
        noise = rng.standard_normal(self.n)
        if self.keys is None or self.depth < 0 or rng.random() < FRESH:
            return self.bases[rng.integers(3)] + WIDE * rng.random() * noise
        return self.keys + NARROW * noise * (rng.random(self.n) < SHARES[rng.integers(3)])

    def step(self, best, goal, nodes):
        """One short search below `best` and not below `goal` (both in units of the instance): (status, offsets)."""
        if self.cap is None or self.cap >= best or self.stale > STALE:
            self.cap = max(goal, best - max(1, int((best - goal) * REACH * self.rng.random())))
            self.depth, self.stale = -1, 0
        keys = self._draw()
        status, offsets = self.search.solve(self.cap, np.argsort(-keys), nodes)
        self.stale += 1
        placed = self.search.most_placed
        if placed >= self.depth:
            self.stale = 0 if placed > self.depth else self.stale
            self.keys, self.depth = keys, placed
        return status, offsets
