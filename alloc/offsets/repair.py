"""Local search for hard problems: all buffers start within a capacity, some overlap, and overlapping buffers are moved.

    cap ^   +---a---+                 a lies on b for as many bytes as the two share, at a price a byte that grows for
        |   |  +----+-b--+            the pairs that stay on one another
        |   +--+----+    |
        |      +---------+

A layout is found once nothing lies on anything; then the capacity is lowered.  Small capacities have a table of prices
and make the move that gains most of all (`repair_by_table`); others draw one that lies on something, and it goes to
its cheapest end (`repair`).  Idea: guided local search for packing (Faroe, Pisinger and Zachariasen, INFORMS Journal on
Computing, 2003).  It proves nothing and often finds what a search in depth misses, which never comes back to what it
did early.
"""
import numpy as np

from ggjit.alloc.offsets.draws import random_word
from ggjit.ops.native.jit import exact, i64s, native
from ggjit.ops.native.records import JitRecord, row

DENSE = 2048                    # bytes (in the common unit of the sizes) up to which every offset has a price
MAX_TABLE = 1 << 22             # prices of buffers at offsets
RISE = 16                       # added to the price per shared byte of a pair, which begins at 1 (with the table)
WALKS = 1                       # number of layouts repaired side by side
PATIENCE = 1_000_000            # moves of a walk without success before it starts anew, with another capacity
MAX_PAIRS = 8_000_000           # overlapping pairs of buffers; larger problems are not repaired
FAR = np.int64(1) << np.int64(62)


WALK = JitRecord(
    "WalkRecord",
    n="i64", cap="i64", n_moves="i64", stop="i64[1]", size="i64[n]", offset="i64[n]",
    # CSR lists of the buffers alive together with a buffer; place of the pair in the other's list
    ptr="i64[n + 1]", adj="i64[ptr[n]]", back="i64[ptr[n]]",
    weight="i64[ptr[n]]",                               # price of each byte that such a pair shares
    state="i64[2]",                                     # of the draws, and moves made: goes on from call to call
    # how many pairs buffer i overlaps; list of overlapping buffers; place of i in that list
    n_under="i64[n] = 0", listed="i64[n]", place="i64[n] = -1",
    n_prices="i64", price="i64[n_prices] = 0",          # of buffer i at its offset o: place i (cap + 1) + o
    least="i64[n] = -1",                                # price of its cheapest other offset; -1: not known
    count=row("listed"))
walk_at = WALK.at


@exact
def _draw(w, n):
    """A number below n."""
    return random_word(w.state) % n


@native("i64(i64, i64, i64, i64, i64)")
def link_lists(ptr_, adj_, n, sorted_, back_):
    """The lists of those that meet a buffer, sorted; back: where the other's list has this pair."""
    ptr = i64s(ptr_, n + 1)
    adj, out, back = i64s(adj_, ptr[n]), i64s(sorted_, ptr[n]), i64s(back_, ptr[n])
    fill = ptr[:n].copy()
    for i in range(n):
        for k in range(ptr[i], ptr[i + 1]):
            j = adj[k]
            out[fill[j]] = i
            fill[j] += 1
    fill[:] = ptr[:n]
    for i in range(n):
        for k in range(ptr[i], ptr[i + 1]):
            j = out[k]
            back[k] = fill[j]
            fill[j] += 1
    return 0


@exact
def _meet(w, i, o, j):
    """Whether buffer i at offset o lies on j."""
    return o < w.offset[j] + w.size[j] and w.offset[j] < o + w.size[i]


@exact
def _list(w, i, lies):
    """Bring the list of overlapping buffers up to date for buffer i."""
    if lies and w.place[i] < 0:
        w.place[i], w.listed[w.count.listed] = w.count.listed, i
        w.count.listed += 1
    elif not lies and w.place[i] >= 0:
        w.count.listed -= 1
        last = w.listed[w.count.listed]
        w.listed[w.place[i]], w.place[last], w.place[i] = last, w.place[i], -1


# ---------------------------------------------------------------- prices where they are asked for
@exact
def _price(w, i, o):
    """The price of buffer i at offset o: that of all bytes it would share with others."""
    total, top = np.int64(0), o + w.size[i]
    for k in range(w.ptr[i], w.ptr[i + 1]):
        j = w.adj[k]
        total += w.weight[k] * max(min(top, w.offset[j] + w.size[j]) - max(o, w.offset[j]), 0)
    return total


@exact
def _cheapest_end(w, i):
    """(price, offset) of the cheapest of these offsets, its own left out: 0, the highest, and those next to another
    buffer."""
    best, at, n_ties = FAR, np.int64(-1), 0
    for c in range(2 * w.ptr[i] - 2, 2 * w.ptr[i + 1]):
        own, low = c < 2 * w.ptr[i], c & 1 == 0
        j = i if own else w.adj[c >> 1]
        x = (0 if low else w.cap - w.size[i]) if own else w.offset[j] - w.size[i] if low else w.offset[j] + w.size[j]
        if x < 0 or x + w.size[i] > w.cap or x == w.offset[i]:
            continue
        price = _price(w, i, x)
        if price > best:
            continue
        n_ties = n_ties + 1 if price == best else 1
        if n_ties == 1 or _draw(w, n_ties) == 0:
            best, at = price, x
    return best, at


@exact
def _move(w, i, o):
    """Move buffer i to offset o."""
    for k in range(w.ptr[i], w.ptr[i + 1]):
        j = w.adj[k]
        by = int(_meet(w, i, o, j)) - int(_meet(w, i, w.offset[i], j))
        if by != 0:
            w.n_under[i] += by
            w.n_under[j] += by
            _list(w, j, w.n_under[j] > 0)
    _list(w, i, w.n_under[i] > 0)
    w.offset[i] = o


@native("i64(i64)")
def repair(address):
    """Move buffers of a WALK record until none lies on another, at most n_moves times; returns how many still do.  An
    overlapping buffer is drawn and moved to its cheapest offset next to another; where that gains nothing, the prices
    of its overlaps rise."""
    w = walk_at(address)
    for i in range(w.n):
        w.offset[i] = min(w.offset[i], w.cap - w.size[i])
    for i in range(w.n):
        for k in range(w.ptr[i], w.ptr[i + 1]):
            w.n_under[i] += int(_meet(w, i, w.offset[i], w.adj[k]))
        _list(w, i, w.n_under[i] > 0)
    for _ in range(w.n_moves):
        if w.count.listed == 0 or w.stop[0] != 0:
            break
        i = w.listed[_draw(w, w.count.listed)]
        now = _price(w, i, w.offset[i])
        price, o = _cheapest_end(w, i)
        w.state[1] += 1
        if o >= 0 and price <= now:
            _move(w, i, o)
        if price >= now:
            for k in range(w.ptr[i], w.ptr[i + 1]):
                if _meet(w, i, w.offset[i], w.adj[k]):
                    w.weight[k] += 1
                    w.weight[w.back[k]] += 1
    return w.count.listed


# ---------------------------------------------------------------- a table of all prices
@exact
def _charge(w, i, j, y, by):
    """Add to the prices of buffer i, at each of its offsets, `by` for every byte shared with buffer j at offset y."""
    size, other, row = w.size[i], w.size[j], i * (w.cap + 1)
    least = min(size, other)
    for x in range(max(y - size + 1, 0), min(y + other - 1, w.cap - size) + 1):
        w.price[row + x] += by * min(x + size - y, y + other - x, least)


@exact
def _least(w, i):
    """The lowest price of buffer i at another offset than its own."""
    row = i * (w.cap + 1)
    here = row + w.offset[i]
    now, least = w.price[here], FAR
    w.price[here] = FAR
    for x in range(row, row + w.cap - w.size[i] + 1):
        least = min(least, w.price[x])
    w.price[here] = now
    return least


@exact
def _one_at(w, i, price):
    """An offset with that price for buffer i, other than its own."""
    n_ties, at, row = np.int64(0), np.int64(-1), i * (w.cap + 1)
    for x in range(w.cap - w.size[i] + 1):
        if w.price[row + x] == price and x != w.offset[i]:
            n_ties += 1
            if n_ties == 1 or _draw(w, n_ties) == 0:
                at = x
    return at


@exact
def _best_mover(w):
    """(buffer whose move gains most, minus that gain), (-1, 0) when none can move."""
    best, change, n_ties = np.int64(-1), FAR, 0
    for k in range(w.count.listed):
        i = w.listed[k]
        if w.least[i] < 0:
            w.least[i] = _least(w, i)
        by = w.least[i] - w.price[i * (w.cap + 1) + w.offset[i]]
        if w.least[i] < FAR and by <= change:
            n_ties = n_ties + 1 if by == change else 1
            if n_ties == 1 or _draw(w, n_ties) == 0:
                best, change = i, by
    return (best, change) if best >= 0 else (best, np.int64(0))


@exact
def _list_by_price(w, i):
    _list(w, i, w.price[i * (w.cap + 1) + w.offset[i]] > 0)


@exact
def _move_in_table(w, i):
    """Move buffer i to one of its cheapest offsets."""
    old, new = w.offset[i], _one_at(w, i, w.least[i])
    w.offset[i], w.least[i] = new, -1
    for k in range(w.ptr[i], w.ptr[i + 1]):
        j = w.adj[k]
        _charge(w, j, i, old, -w.weight[k])
        _charge(w, j, i, new, w.weight[k])
        w.least[j] = -1
        _list_by_price(w, j)
    _list_by_price(w, i)


@exact
def _raise_prices(w):
    """Raise the price of every overlapping pair."""
    for c in range(w.count.listed):
        i = w.listed[c]
        for k in range(w.ptr[i], w.ptr[i + 1]):
            j = w.adj[k]
            if w.place[j] >= 0 and _meet(w, i, w.offset[i], j):
                w.weight[k] += RISE
                w.weight[w.back[k]] += RISE
                _charge(w, i, j, w.offset[j], RISE)
                _charge(w, j, i, w.offset[i], RISE)
                w.least[i] = w.least[j] = -1


@native("i64(i64)")
def repair_by_table(address):
    """As `repair`, with a table of every buffer's price at every offset: the move that gains most is made, and when
    none gains anything every pair that lies on one another pays more (breakout: Morris, AAAI 1993)."""
    w = walk_at(address)
    for i in range(w.n):
        w.offset[i] = min(w.offset[i], w.cap - w.size[i])
    for i in range(w.n):
        for k in range(w.ptr[i], w.ptr[i + 1]):
            _charge(w, i, w.adj[k], w.offset[w.adj[k]], w.weight[k])
        _list_by_price(w, i)
    for _ in range(w.n_moves):
        if w.count.listed == 0 or w.stop[0] != 0:
            break
        w.state[1] += 1
        i, change = _best_mover(w)
        if i >= 0 and change <= 0:
            _move_in_table(w, i)
        if change >= 0:
            _raise_prices(w)
    return w.count.listed


KERNELS = (link_lists, repair, repair_by_table)


class Walk:
    """One layout under repair."""

    def __init__(self, lists, offsets, seed):
        self.lists, self.offsets, self.stale, self.tries = lists, offsets.copy(), 0, 0
        self.weight = np.ones(len(lists.adj), np.int64)
        self.state = np.array([int(np.random.default_rng(seed).integers(1, 1 << 62)), 0], np.int64)

    def restart(self, offsets):
        """Go on from other offsets, every pair at the same price."""
        self.offsets[:], self.weight[:], self.stale = offsets, 1, 0
        self.tries += 1

    def capacity(self, best, goal):
        """The capacity to try next: an eighth of the way from `best` to the goal, less after each try that failed."""
        return max(goal, best - max(1, (best - goal) // 8 >> self.tries % 4))

    def run(self, cap, n_moves, stop):
        """(moves made, whether the offsets are a layout within cap)."""
        at, x = self.state[1], self.lists
        small = cap <= DENSE and len(x.size) * (cap + 1) <= MAX_TABLE
        n = len(x.size)
        left = (repair_by_table if small else repair)(WALK.of(
            n=n, cap=cap, n_moves=n_moves, stop=stop, size=x.size, offset=self.offsets, ptr=x.ptr, adj=x.adj,
            back=x.back, weight=self.weight, state=self.state, n_prices=n * (cap + 1) if small else 0))
        made = int(self.state[1] - at)
        self.stale += made
        return made, left == 0


class Repair:
    """WALKS layouts, repaired a batch at a time; the same for a seed, whatever the number of threads."""

    def __init__(self, search, offsets, seed=0):
        self.ptr, self.size = search.adj_ptr, search.inst.size
        self.adj, self.back = np.empty_like(search.adj), np.empty_like(search.adj)
        link_lists(self.ptr, search.adj, len(self.size), self.adj, self.back)
        self.walks = [Walk(self, offsets, [seed, k]) for k in range(WALKS)]

    def batch(self, run, best, offsets, goal, n_moves, stop):
        """(moves made, [offsets of the layouts found]) after n_moves of each walk.  run: map, or a pool's."""
        def go(walk):
            if walk.stale >= PATIENCE:
                walk.restart(offsets)
            return walk.run(walk.capacity(best, goal), n_moves, stop)
        made = list(run(go, self.walks))
        found = [w.offsets.copy() for w, (_, whole) in zip(self.walks, made, strict=True) if whole]
        for walk, (_, whole) in zip(self.walks, made, strict=True):
            if whole:
                walk.stale = walk.tries = 0
        return sum(n for n, _ in made), found
