"""`plan_offsets`: buffers with lifetimes -> offsets, as low as the time limit allows.

    section bound -> ggml's best fit -> free canonical descents -> first fit in four orders
                  -> canonical search at the goal
                  -> by turns, until the goal is met or the time is up:
                         bisection between the proved bound and the best plan, with growing node limits (complete: it
                         can prove that nothing fits)
                         local search over the rank order, a short search each (finds what depth first misses)

The goal is the lower bound, or `capacity` where that is given.  ggml's plan is always among the candidates, so the
result is never above it.
"""
import dataclasses
import time

import numpy as np

from ggjit.alloc import greedy
from ggjit.alloc.free_list import UNBOUNDED, list_alloc, list_free, new_states, reset_to_block
from ggjit.alloc.problem import check_alignment, check_time_limit, check_total
from ggjit.alloc.search import FOUND, INFEASIBLE, CanonicalSearch, search
from ggjit.alloc.sections import Instance
from ggjit.ops.core.errors import ParamError, ShapeError
from ggjit.ops.core.host_memory import asking
from ggjit.ops.core.whole_numbers import is_whole
from ggjit.ops.native.jit import CACHE, i64s, native

# local search
FRESH = 0.02                    # share of steps that start from fresh keys
WIDE, NARROW = 0.5, 1.0         # disturbance of fresh and of kept keys, in units of log(key)
SHARES = (0.02, 0.1, 0.5)       # of the keys disturbed in one step
STALE = 200                     # steps without progress before another capacity is tried
REACH = 0.05                    # capacities tried lie within this share of the gap below the best

FITS, DOES_NOT_FIT, NOT_FOUND = "fits", "does not fit", "not found in time"


@dataclasses.dataclass(slots=True)
class Layout:
    """offsets: int64 bytes, in the order of the input; peak: highest end, bytes.

    lower_bound     most bytes live at once; no layout can be lower
    proved_bound    lower_bound, or more where the search proved that too low
    fits            "fits"; "does not fit": decided, no layout within the capacity exists; "not found in time"
    planner         what found it
    seconds         wall time without compiling
    """
    offsets: np.ndarray
    peak: int
    lower_bound: int
    proved_bound: int
    fits: str
    planner: str
    seconds: float

    @property
    def gap(self):
        """peak / lower_bound, 1.0 for nothing to place."""
        return self.peak / self.lower_bound if self.lower_bound else 1.0


class Clock:
    """Wall time that stands still while something is compiled."""

    def __init__(self, limit):
        self.limit = limit
        self.t0, self.c0 = time.perf_counter(), CACHE.compile_seconds

    @property
    def used(self):
        return time.perf_counter() - self.t0 - (CACHE.compile_seconds - self.c0)

    @property
    def left(self):
        return self.limit - self.used


@native("i64(i64, i64, i64, i64, i64, i64, i64)")
def _bestfit(events, n_ev, size, n, state, words, off):
    """ggml's free list over signed events; returns the peak, -1 when the list is full."""
    ev, z, st, o = i64s(events, n_ev), i64s(size, n), i64s(state, words), i64s(off, n)
    reset_to_block(st, 0, 0, UNBOUNDED)
    peak = np.int64(0)
    for k in range(n_ev):
        i = abs(ev[k]) - 1
        if ev[k] > 0:
            o[i] = list_alloc(st, 0, z[i])[1]
            peak = max(peak, o[i] + z[i])
        elif not list_free(st, 0, 0, o[i], z[i]):
            return np.int64(-1)
    return peak


def ggml_best_fit(inst, events=None):
    """(peak, offsets) of ggml's online allocator on `events` (+i+1 take, -i-1 release; default: time order)."""
    events = inst.events() if events is None else events
    state, words = new_states(1, inst.n + 2, None, 1)
    off = np.zeros(inst.n, np.int64)
    peak = _bestfit(events, len(events), inst.size, inst.n, state, words, off)
    assert peak >= 0
    return peak, off


class LocalSearch:
    """Many short canonical searches over rank orders instead of one deep one.

    A chronological depth-first search that goes wrong early never comes back to it.  Here every step runs the search
    with another rank order for only twice as many nodes as there are buffers.  The order comes from real-valued keys:
    those of the step that placed most buffers so far, some of them disturbed, or now and then fresh ones.  On fully
    packed instances of 150-450 buffers this halves the gap that depth first leaves after a second.

    State is kept between calls of `step`.  Deterministic for a seed, apart from the number of steps.
    """

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


class Planner:
    """The anytime search on one instance; `best`, `offsets`, `how`, `proved` are always valid."""

    def __init__(self, inst, goal, time_limit, events=None):
        self.inst, self.goal, self.clock = inst, max(goal, inst.lower_bound), Clock(time_limit)
        self.proved = inst.lower_bound
        self.best, self.offsets = ggml_best_fit(inst, events)
        self.ggml_peak = self.best
        self.how = "ggml"
        self.trace = [(self.clock.used, self.best, self.how)]
        self.rate = 3e8 / (inst.n + inst.ns + 100)      # search nodes per second, corrected as we go

    @property
    def done(self):
        return self.best <= self.goal or self.proved >= self.best or self.clock.left <= 0

    def _keep(self, peak, offsets, how):
        if peak < self.best:
            self.best, self.offsets, self.how = int(peak), offsets.copy(), how
            self.trace.append((self.clock.used, self.best, how))

    def run(self):
        self.ranks = greedy.ranks(self.inst)
        off = np.zeros(self.inst.n, np.int64)
        for name, order in self.ranks.items():
            if self.done:
                return
            self._keep(greedy.canonical(self.inst, order, off, self.best), off, f"canonical {name}")
        for name, order in greedy.orders(self.inst):
            if self.done:
                return
            self._keep(greedy.first_fit(self.inst, order, off, self.best), off, f"first fit by {name}")
        if not self.done:
            self._search()

    def _try(self, cap, limit):
        """FOUND, INFEASIBLE or None (not known): all rank orders with `limit` nodes each."""
        for name, order in self.ranks.items():
            nodes = min(limit, int(self.rate * self.clock.left))
            if nodes < self.inst.n:
                self.out_of_time = True
                return None
            t0 = time.perf_counter()
            status, offsets = self.search.solve(cap, order, nodes)
            if self.search.nodes > 1000:
                self.rate = self.search.nodes / (time.perf_counter() - t0 + 1e-6)
            if status == FOUND:
                self._keep(int((offsets + self.inst.size).max()), offsets, f"search {name}")
                return FOUND
            if status == INFEASIBLE:
                self.proved = max(self.proved, cap + 1)
                return INFEASIBLE
        return None

    def _bisect(self, limit):
        """Narrow [proved bound, best] with `limit` nodes per search; a limit hit counts as "not here" in this pass."""
        soft = max(self.proved, self.goal)
        while self.best - soft > max(self.best // 256, 1) and not self.done and not self.out_of_time:
            cap = (soft + self.best) // 2
            if self._try(cap, limit) != FOUND:
                soft = cap + 1
        if not self.done and not self.out_of_time:
            self._try(max(self.proved, self.goal), 4 * limit)

    def _climb(self, local, seconds):
        """Local search for so long."""
        end = self.clock.used + min(seconds, self.clock.left)
        while not self.done and self.clock.used < end:
            nodes = min(2 * self.inst.n, int(self.rate * self.clock.left))
            if nodes < self.inst.n:
                return
            status, offsets = local.step(self.best, max(self.proved, self.goal), nodes)
            if status == FOUND:
                self._keep(int((offsets + self.inst.size).max()), offsets, "local search")
            elif status == INFEASIBLE:
                self.proved = max(self.proved, local.cap + 1)

    def _search(self):
        self.search = CanonicalSearch(self.inst)
        if not self.search.possible:
            return
        if search_is_cold():
            self.search.solve(self.inst.lower_bound - 1, self.ranks["TWA"], 1)      # compile, outside the clock
        self.out_of_time = False
        limit = 2 * self.inst.n
        self._try(self.goal, limit)
        local = LocalSearch(self.inst, self.search)
        while not self.done and not self.out_of_time:
            t0 = self.clock.used
            self._bisect(limit)
            self._climb(local, 2 * (self.clock.used - t0))
            limit *= 2
        self._climb(local, self.clock.left)


def search_is_cold():
    """Whether the search kernel still has to be compiled or loaded."""
    return "_call" not in search.__dict__


def _columns(lower, upper, size):
    """Three checked int64 arrays."""
    out = []
    for name, a in (("lower", lower), ("upper", upper), ("size", size)):
        a = np.asarray(a)
        if a.size and a.dtype.kind not in "iu":
            raise ParamError(f"{name}: expected integers, got {a.dtype}")
        if a.ndim != 1:
            raise ShapeError(f"{name}: expected one dimension, got shape {a.shape}")
        if a.dtype.kind == "u" and a.size and int(a.max()) > UNBOUNDED:
            raise ShapeError(f"{name}: {int(a.max())} overflows 62 bits")
        out.append(np.ascontiguousarray(a, np.int64))
    lo, hi, z = out
    if not len(lo) == len(hi) == len(z):
        raise ShapeError(f"lower, upper, size have {len(lo)}, {len(hi)}, {len(z)} entries; they need one per buffer")
    if len(z) and int(z.min()) < 0:
        i = int(z.argmin())
        raise ShapeError(f"buffer {i}: size {int(z[i])} is negative")
    if np.any(lo >= hi):
        i = int(np.argmax(lo >= hi))
        raise ShapeError(f"buffer {i}: lower {int(lo[i])} >= upper {int(hi[i])}; lifetimes are half-open and not empty")
    return lo, hi, z


@asking("a layout of buffers")
def plan_offsets(lower, upper, size, alignment=1, capacity=None, time_limit=1.0, events=None):
    """Offsets for buffers that are live on the half-open steps [lower, upper) and take `size` bytes.

    alignment   bytes, a power of two; sizes are padded to it and offsets are multiples of it
    capacity    bytes to fit into; stops at the first layout that does.  None: as low as possible
    time_limit  seconds of searching, compiling excluded; the best plan found by then is returned
    events      order of takes (i + 1) and releases (-i - 1) for ggml's plan; default: by time, releases first
    Returns a Layout.  Errors: ShapeError (negative or overflowing sizes, lower >= upper, lengths), ParamError
    (capacity below the largest buffer, alignment, time limit).
    """
    lo, hi, z = _columns(lower, upper, size)
    alignment = check_alignment(alignment)
    check_time_limit(time_limit)
    if capacity is not None and not is_whole(capacity):
        raise ParamError(f"capacity {capacity!r}: expected bytes, or None")
    check_total(z, alignment, "buffers")
    z = (z + alignment - 1) & -alignment
    if capacity is not None and len(z) and capacity < int(z.max()):
        raise ParamError(f"capacity {capacity} is below the largest buffer (number {int(z.argmax())}, "
                         f"{int(z.max())} bytes with alignment {alignment})")
    used = np.flatnonzero(z)
    offsets = np.zeros(len(z), np.int64)
    if not len(used):
        return Layout(offsets, 0, 0, 0, FITS, "empty", 0.0)
    unit = int(np.gcd.reduce(z[used]))          # peaks are sums of sizes: search in their common unit
    if events is not None:
        number = np.zeros(len(z), np.int64)
        number[used] = np.arange(1, len(used) + 1)
        events = np.asarray(events, np.int64)
        events = np.sign(events) * number[np.abs(events) - 1]
        events = np.ascontiguousarray(events[events != 0])
    inst = Instance(lo[used], hi[used], z[used] // unit)
    p = Planner(inst, 0 if capacity is None else capacity // unit, time_limit, events)
    p.run()
    offsets[used] = p.offsets * unit
    fits = FITS
    if capacity is not None and p.best * unit > capacity:
        fits = DOES_NOT_FIT if p.proved * unit > capacity else NOT_FOUND
    return Layout(offsets, p.best * unit, inst.lower_bound * unit, p.proved * unit, fits, p.how, p.clock.used)
