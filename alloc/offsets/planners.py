"""`plan_offsets`: buffers with lifetimes -> offsets, as low as time, or a number of search nodes, allows.

    section bound -> ggml's best fit -> free canonical descents -> first fit in four orders
                  -> where many short buffers make stretches near the goal: those first, the rest around them; if
                     that misses the goal, again at capacities between it and the best plan, one each turn
                  -> by turns, with node limits that double, until the goal is met or all is spent:
                         canonical search at the goal, its three rules by turns
                         bisection between the proved bound and the best plan (both are complete: they can prove that
                         nothing fits)
                         where sections are nearly full: tiling, at the goal and between it and the best plan
                         (ggjit.alloc.offsets.tiling)
                         local search (ggjit.alloc.offsets.repair: finds what depth first misses)

The goal is the lower bound, or `capacity` where that is given.  ggml's plan is always among the candidates, so the
result is never above it.  Searches run in batches whose results are read in a fixed order: `n_threads` changes how long
a batch takes and nothing else.
"""
import concurrent.futures
import contextlib
import dataclasses
import functools
import threading
import time

import numpy as np

from ggjit.alloc.ggml.best_fit import ggml_best_fit
from ggjit.alloc.ggml.free_list import UNBOUNDED
from ggjit.alloc.ggml.problem import check_alignment, check_time_limit, check_total
from ggjit.alloc.offsets import greedy, repair, tiling
from ggjit.alloc.offsets.crowded import crowded_first
from ggjit.alloc.offsets.search import FOUND, INFEASIBLE, RULES, CanonicalSearch
from ggjit.alloc.offsets.search import KERNELS as SEARCH_KERNELS
from ggjit.alloc.offsets.sections import Instance
from ggjit.ops.core.errors import ParamError, ShapeError
from ggjit.ops.core.host_memory import oom_guard
from ggjit.ops.core.whole_numbers import is_whole
from ggjit.ops.native.jit import CACHE

COARSE = 32                     # the bisection's node limit is the limit at the goal divided by this
LOCAL = 2                       # moves of the local search, as a multiple of the search nodes spent between its turns
LOCAL_BESIDE_TILES = 1 / 4      # the same where the tiling search runs, which is more successful
TILES = 32                      # nodes of the tiling search at a capacity, as a multiple of those of a rule's search
TILES_AHEAD = 96                # the same once the best plan is its own
FINE = 256                      # capacities are told apart by this part of the best peak
FINE_CROWDED = 32               # the same for crowded stretches, as a part of what the best peak exceeds the goal by
KEPT = 7                        # capacities at which the tiling search continues its last try
MOST_EFFORT = 1 << 12           # of the search of crowded stretches, in units of its first nodes
MOVES = 2000                    # moves of a local search between two looks at its results

# problems of so few buffers get so many search nodes for each, which take milliseconds, however busy the machine is
SMALL, SURE_NODES = 256, 8

FITS, DOES_NOT_FIT, NOT_FOUND = "fits", "does not fit", "not found in time"


@dataclasses.dataclass(frozen=True, slots=True)
class SearchOptions:
    """How long `plan_offsets` searches, and with what.

    time_limit  seconds of searching, compiling excluded; the best plan found by then is returned.  Unless it is 0, up
                to 256 buffers get 8 search nodes each in any case
    node_limit  search nodes to spend instead of time: no clock is read, and the same call gives the same layout
                everywhere, whatever n_threads
    seed        of the random choices
    n_threads   searches that run at a time

    Errors: ParamError.
    """
    time_limit: float = 1.0
    node_limit: int = None
    seed: int = 0
    n_threads: int = 1

    def __post_init__(self):
        check_time_limit(self.time_limit)
        for name, least in (("node_limit", 0), ("seed", 0), ("n_threads", 1)):
            value = getattr(self, name)
            if not is_whole(value, least) and (name != "node_limit" or value is not None):
                raise ParamError(f"{name} {value!r}: expected a whole number >= {least}")


_DEFAULTS = SearchOptions()


@dataclasses.dataclass(slots=True)
class Layout:
    """offsets: int64 bytes, in the order of the input; peak: highest end, bytes.

    lower_bound     most bytes live at once; no layout can be lower
    proved_bound    lower_bound, or more where the search proved that too low
    fits            "fits"; "does not fit": decided, no layout within the capacity exists; "not found in time"
    planner         what found it
    seconds         wall time without compiling
    nodes           search nodes spent
    """
    offsets: np.ndarray
    peak: int
    lower_bound: int
    proved_bound: int
    fits: str
    planner: str
    seconds: float
    nodes: int = 0

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


class Alarm:
    """A word that compiled loops look at: 0, and 1 once the clock has run out.  A context; one thread that sleeps."""

    def __init__(self, clock):
        self.word, self.clock, self.over = np.zeros(1, np.int64), clock, threading.Event()
        self.thread = threading.Thread(target=self._wait, name="plan_offsets alarm", daemon=True)

    def _wait(self):
        while not self.over.wait(min(max(self.clock.left, 0.0), threading.TIMEOUT_MAX)):
            if self.clock.left <= 0:
                self.word[0] = 1
                return

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()


class Planner:
    """The anytime search on one instance; `best`, `offsets`, `how`, `proved`, `nodes` are always valid.

    options: SearchOptions; time is the clock's.
    """

    def __init__(self, inst, goal, clock, events=None, options=_DEFAULTS):
        self.inst, self.goal = inst, max(goal, inst.lower_bound)
        self.clock = Clock(clock) if isinstance(clock, int | float) else clock
        self.node_limit, self.nodes, self.seed, self.n_threads = options.node_limit, 0, options.seed, options.n_threads
        self.proved = inst.lower_bound
        self.ranks, self.effort, self.crowded_least = {}, 1, self.goal
        self.best, self.offsets = ggml_best_fit(inst, events)
        self.prepared = self.clock.used         # sorting the buffers takes less time than everything up to here
        self.ggml_peak = self.best
        self.how = "ggml"
        self.trace = [(self.clock.used, self.best, self.how)]

    @property
    def spent(self):
        """Whether the time, or the number of nodes, is used up."""
        return self.nodes >= self.node_limit if self.node_limit is not None else self.clock.left <= 0

    @property
    def short(self):
        """Whether too little time is left to begin another phase: its preparation does not look at the clock."""
        return self.spent or self.node_limit is None and self.clock.left < 2 * self.prepared

    def rank(self, name):
        """The tie-breaking order of that name, sorted once."""
        if name not in self.ranks:
            self.ranks[name] = greedy.rank(self.inst, name)
        return self.ranks[name]

    @property
    def done(self):
        return self.best <= self.goal or self.proved >= self.best

    def _keep(self, peak, offsets, how):
        if peak < self.best:
            self.best, self.offsets, self.how = int(peak), offsets.copy(), how
            self.trace.append((self.clock.used, self.best, how))

    def run(self):
        searching = SEARCH_KERNELS + tiling.KERNELS + repair.KERNELS
        for kernels, phase in ((greedy.KERNELS, self._greedy), (searching, self._search)):
            if self.done or self.node_limit is None and self.short:
                return
            for kernel in kernels:
                _ = kernel.address              # compiled here, where the clock stands still and no alarm is set
            with self._alarm() as self.stop:
                phase()

    @contextlib.contextmanager
    def _alarm(self):
        if self.node_limit is not None:
            yield greedy.NEVER
        else:
            with Alarm(self.clock) as alarm:
                yield alarm.word

    def _greedy(self):
        """Plans without search, the cheapest first."""
        off = np.zeros(self.inst.n, np.int64)
        tries = [(f"canonical {name}", greedy.canonical, functools.partial(self.rank, name)) for name in greedy.RANKS]
        tries += [(f"first fit by {name}", greedy.first_fit, functools.partial(greedy.order, self.inst, name))
                  for name in greedy.ORDERS]
        for how, place, order in tries:
            if self.done or self.stop[0] or self.node_limit is None and self.short:
                return
            self._keep(place(self.inst, order(), off, self.best, self.stop), off, how)

    def _batch(self, tasks, cap, limit):
        """[Outcome] of searches (order, rule) at one capacity, up to the first that decides it."""
        if self.node_limit is not None:
            limit = min(limit, max(1, (self.node_limit - self.nodes) // len(tasks)))
        run = lambda task: self.search.solve(cap, task[0], limit, task[1], self.stop)       # noqa: E731
        out = []
        for outcome in (map if self.pool is None else self.pool.map)(run, tasks):
            out.append(outcome)
            self.nodes += outcome.nodes
            if outcome.status in (FOUND, INFEASIBLE):
                break
        return out

    def _record(self, outcome, cap, how):
        if outcome.status == FOUND:
            self._keep(int((outcome.offsets + self.inst.size).max()), outcome.offsets, how)
        elif outcome.status == INFEASIBLE:
            self.proved = max(self.proved, cap + 1)
        return outcome.status

    def _try(self, cap, limit):
        """Search by every rule with `limit` nodes.  Returns FOUND, INFEASIBLE, or another status: not known."""
        out = self._batch([(self.rank(name), rule) for name, rule in RULES.items()], cap, limit)
        return self._record(out[-1], cap, f"search {list(RULES)[len(out) - 1]}")

    def _bisect(self, limit):
        """Narrow [proved bound, best] with `limit` nodes per search; a limit hit counts as "not here" in this pass."""
        soft = max(self.proved, self.goal)
        while self.best - soft > max(self.best // FINE, 1) and not self.done and not self.spent:
            cap = (soft + self.best) // 2
            if self._try(cap, limit) != FOUND:
                soft = cap + 1

    def _tile(self, limit):
        """The tiling search at the goal, then between it and the best plan, with up to `limit` nodes at each capacity:
        half as many for each doubling of the distance to the best plan.  Returns whether the problem suits it."""
        soft = cap = max(self.proved, self.goal)
        while not self.done and not self.spent:
            if cap not in self.tiles:
                kept = sorted(c for c in self.tiles if c < self.best)[:KEPT]       # each state takes half a megabyte
                self.tiles = {c: self.tiles[c] for c in kept} | {cap: tiling.Tiling(self.inst, cap, self.seed)}
            if not self.tiles[cap].suits and cap == max(self.proved, self.goal):
                return False
            doublings = max((self.best - cap) // max(self.best // FINE, 1), 1).bit_length() - 1
            nodes = max(limit >> doublings, 1)
            if self.node_limit is not None:
                nodes = min(nodes, self.node_limit - self.nodes)
            made, offsets = self.tiles[cap].run(nodes, self.stop)
            self.nodes += made
            if offsets is None:
                soft = cap + 1
            else:
                self._keep(int((offsets + self.inst.size).max()), offsets, "tiling")
            if self.best - soft <= self.best // FINE:
                break
            cap = (soft + self.best) // 2
        return True

    def _climb(self, local, nodes):
        """Local search with so many nodes."""
        end = self.nodes + nodes
        while not self.done and not self.spent and self.nodes < end:
            moves = MOVES if self.node_limit is None else min(MOVES, -(-(self.node_limit - self.nodes) // repair.WALKS))
            made, found = local.batch(self.pool.map if self.pool else map, self.best, self.offsets,
                                      max(self.proved, self.goal), moves, self.stop)
            self.nodes += max(made, 1)
            for offsets in found:
                self._keep(int((offsets + self.inst.size).max()), offsets, "local search")

    def _crowded(self, cap):
        """The crowded stretches first, within cap.  Returns the search nodes taken: 0 where no stretch is searched."""
        left = greedy.BIG if self.node_limit is None else self.node_limit - self.nodes
        peak, offsets, nodes = crowded_first(self.inst, cap, self.best, self.stop, left, self.effort)
        self.nodes += nodes
        self._keep(peak, offsets, "crowded first")
        if self.best > cap:
            self.crowded_least = cap + 1
        return nodes

    def _narrow_crowded(self):
        """Crowded stretches first at one capacity, halfway between the least that did not fail and the best plan; once
        the two are near each other, from the goal on with twice the effort.  Returns whether to go on."""
        goal = max(self.proved, self.goal)
        if self.best - self.crowded_least <= (self.best - goal) // FINE_CROWDED:
            self.effort, self.crowded_least = 2 * self.effort, goal
        if self.done or self.spent or self.effort > MOST_EFFORT:
            return False
        return self._crowded((max(self.crowded_least, goal) + self.best) // 2) > 0

    def _search(self):
        if not self.spent:
            self._crowded(max(self.proved, self.goal))
        if self.done or self.spent:
            return
        self.search = CanonicalSearch(self.inst, self.stop)
        if not self.search.possible:
            while self._narrow_crowded():
                pass
            return
        with contextlib.ExitStack() as held:
            self.pool = held.enter_context(concurrent.futures.ThreadPoolExecutor(self.n_threads)) \
                if self.n_threads > 1 else None
            limit, local, self.tiles = 2 * self.inst.n, None, {}
            while not self.done and not self.spent:
                self._narrow_crowded()
                if self.done:
                    return
                before = self.nodes
                self._try(max(self.proved, self.goal), limit)
                self._bisect(max(limit // COARSE, 2 * self.inst.n))
                spent = self.nodes - before
                full = self._tile((TILES_AHEAD if self.how == "tiling" else TILES) * limit)
                if not self.done and not self.spent and len(self.search.adj) <= repair.MAX_PAIRS:
                    local = local or repair.Repair(self.search, self.offsets, self.seed)
                    self._climb(local, int((LOCAL_BESIDE_TILES if full else LOCAL) * spent))
                limit *= 2


def _searched(inst, goal, clock, events, options):
    """The Planner that has searched: small problems so many nodes by count first, then by the clock."""
    p = Planner(inst, goal, clock, events, options)
    if options.node_limit is None and options.time_limit > 0 and inst.n <= SMALL:
        p.node_limit = SURE_NODES * inst.n
        p.run()
        p.node_limit = None
    p.run()
    return p


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


def _signed(events, n):
    """Checked events of n buffers."""
    events = np.asarray(events)
    whole = events.ndim == 1 and (events.dtype.kind in "iu" or not events.size)
    if not whole or np.any((np.abs(events) < 1) | (np.abs(events) > n)):
        raise ParamError(f"events: expected whole numbers, i + 1 to take buffer i and -i - 1 to release it, i < {n}")
    return events.astype(np.int64)


@oom_guard("a layout of buffers")
def plan_offsets(lower, upper, size, alignment=1, capacity=None, events=None, options=_DEFAULTS, **fields):
    """Offsets for buffers that are live on the half-open steps [lower, upper) and take `size` bytes.

    alignment   bytes, a power of two; sizes are padded to it and offsets are multiples of it
    capacity    bytes to fit into; stops at the first layout that does.  None: as low as possible
    events      order of takes (i + 1) and releases (-i - 1) for ggml's plan; default: by time, releases first
    options     SearchOptions: how long it searches, and with what
    fields      fields of SearchOptions (time_limit, node_limit, seed, n_threads) in place of those in `options`
    Returns a Layout.  Errors: ShapeError (negative or overflowing sizes, lower >= upper, lengths), ParamError
    (capacity below the largest buffer, events, alignment, limits, seed, threads).

    >>> plan_offsets([0, 0, 2], [2, 3, 3], [10, 20, 15], node_limit=1000).peak
    35
    """
    options = dataclasses.replace(options, **fields) if fields else options
    clock = Clock(options.time_limit)
    lo, hi, z = _columns(lower, upper, size)
    alignment = check_alignment(alignment)
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
        events = _signed(events, len(z))
        number = np.zeros(len(z), np.int64)
        number[used] = np.arange(1, len(used) + 1)
        events = np.sign(events) * number[np.abs(events) - 1]
        events = np.ascontiguousarray(events[events != 0])
    inst = Instance(lo[used], hi[used], z[used] // unit)
    p = _searched(inst, 0 if capacity is None else capacity // unit, clock, events, options)
    offsets[used] = p.offsets * unit
    fits = FITS
    if capacity is not None and p.best * unit > capacity:
        fits = DOES_NOT_FIT if p.proved * unit > capacity else NOT_FOUND
    return Layout(offsets, p.best * unit, inst.lower_bound * unit, p.proved * unit, fits, p.how, clock.used, p.nodes)
