"""Local search for hard problems: all buffers lie within a capacity, some on others, and one by one they move away.

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

from ggjit.ops.native.jit import exact, i64s, native

DENSE = 2048                    # bytes (in the common unit of the sizes) up to which every offset has a price
MAX_TABLE = 1 << 22             # prices of buffers at offsets
RISE = 16                       # of a pair's price a byte, which is 1 at first, in the table
WALKS = 1                       # layouts that are repaired at a time
PATIENCE = 1_000_000            # moves of a walk without success before it starts anew, with another capacity
MAX_PAIRS = 8_000_000           # overlapping pairs of buffers; larger problems are not repaired
FAR = np.int64(1) << np.int64(62)


@exact
def _draw(state, n):
    """A number below n: xorshift (Marsaglia, 2003)."""
    x = np.uint64(state[0])
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    state[0] = np.int64(x)
    return np.int64((x >> np.uint64(11)) % np.uint64(n))


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
def _price(i, o, size, off, ptr, adj, weight):
    """What buffer i pays at offset o."""
    total, top = np.int64(0), o + size[i]
    for k in range(ptr[i], ptr[i + 1]):
        j = adj[k]
        total += weight[k] * max(min(top, off[j] + size[j]) - max(o, off[j]), 0)
    return total


@exact
def _cheapest_end(i, cap, size, off, ptr, adj, weight, state):
    """(price, offset) of the cheapest of 0, the highest and those at an end of another, but where it is."""
    best, at, n_ties = FAR, np.int64(-1), 0
    for c in range(2 * ptr[i] - 2, 2 * ptr[i + 1]):
        j = adj[c >> 1] if c >= 2 * ptr[i] else i
        low = c & 1 == 0
        x = (0 if low else cap - size[i]) if j == i else off[j] - size[i] if low else off[j] + size[j]
        if x < 0 or x + size[i] > cap or x == off[i]:
            continue
        price = _price(i, x, size, off, ptr, adj, weight)
        if price > best:
            continue
        n_ties = n_ties + 1 if price == best else 1
        if n_ties == 1 or _draw(state, n_ties) == 0:
            best, at = price, x
    return best, at


@exact
def _meet(i, o, j, size, off):
    """Whether buffer i at offset o lies on j."""
    return o < off[j] + size[j] and off[j] < o + size[i]


@exact
def _list(i, lies, list_, place, m):
    """Bring the list of those that lie on something up to date for buffer i; its new length."""
    if lies and place[i] < 0:
        place[i], list_[m] = m, i
        return m + 1
    if not lies and place[i] >= 0:
        last = list_[m - 1]
        list_[place[i]], place[last], place[i] = last, place[i], -1
        return m - 1
    return m


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64)")
def repair(ptr_, adj_, back_, size_, n, cap, n_moves, off_, weight_, state_, stop_):
    """Move buffers until none lies on another, at most n_moves times; returns how many still do.  One that lies on
    something is drawn, goes to its cheapest end, and pays more for what it lies on when that gains nothing.

    off, weight, state: go on from call to call; state: of the draws, moves made."""
    ptr, size, off, state, stop = i64s(ptr_, n + 1), i64s(size_, n), i64s(off_, n), i64s(state_, 2), i64s(stop_, 1)
    adj, back, weight = i64s(adj_, ptr[n]), i64s(back_, ptr[n]), i64s(weight_, ptr[n])
    n_under, list_, place, m = np.zeros(n, np.int64), np.empty(n, np.int64), np.full(n, -1, np.int64), 0
    for i in range(n):
        off[i] = min(off[i], cap - size[i])
    for i in range(n):
        for k in range(ptr[i], ptr[i + 1]):
            n_under[i] += int(_meet(i, off[i], adj[k], size, off))
        m = _list(i, n_under[i] > 0, list_, place, m)
    for _ in range(n_moves):
        if m == 0 or stop[0] != 0:
            break
        i = list_[_draw(state, m)]
        now = _price(i, off[i], size, off, ptr, adj, weight)
        price, o = _cheapest_end(i, cap, size, off, ptr, adj, weight, state)
        state[1] += 1
        if o >= 0 and price <= now:
            for k in range(ptr[i], ptr[i + 1]):
                j = adj[k]
                by = int(_meet(i, o, j, size, off)) - int(_meet(i, off[i], j, size, off))
                if by != 0:
                    n_under[i] += by
                    n_under[j] += by
                    m = _list(j, n_under[j] > 0, list_, place, m)
            m = _list(i, n_under[i] > 0, list_, place, m)
            off[i] = o
        if price >= now:
            for k in range(ptr[i], ptr[i + 1]):
                if _meet(i, off[i], adj[k], size, off):
                    weight[k] += 1
                    weight[back[k]] += 1
    return m


@exact
def _charge(prices, row, top, y, size_j, size_i, by):
    """Add to the row of buffer i, at each of its offsets 0..top, `by` for every byte shared with one at y."""
    least = min(size_i, size_j)
    for x in range(max(y - size_i + 1, 0), min(y + size_j - 1, top) + 1):
        prices[row + x] += by * min(x + size_i - y, y + size_j - x, least)


@exact
def _least(prices, row, top, here):
    """The lowest price of a row at another offset than `here`."""
    now, least = prices[row + here], FAR
    prices[row + here] = FAR
    for x in range(top + 1):
        least = min(least, prices[row + x])
    prices[row + here] = now
    return least


@exact
def _one_at(prices, row, top, here, price, state):
    """One of the offsets of a row, but `here`, with that price."""
    n_ties, at = np.int64(0), np.int64(-1)
    for x in range(top + 1):
        if prices[row + x] == price and x != here:
            n_ties += 1
            if n_ties == 1 or _draw(state, n_ties) == 0:
                at = x
    return at


@exact
def _best_mover(list_, m, cap, size, off, prices, least, state):
    """(buffer whose move gains most, minus that gain), (-1, 0) when none can move.  least: -1 where it is not known."""
    width, best, change, n_ties = cap + 1, np.int64(-1), FAR, 0
    for k in range(m):
        i = list_[k]
        if least[i] < 0:
            least[i] = _least(prices, i * width, cap - size[i], off[i])
        by = least[i] - prices[i * width + off[i]]
        if least[i] < FAR and by <= change:
            n_ties = n_ties + 1 if by == change else 1
            if n_ties == 1 or _draw(state, n_ties) == 0:
                best, change = i, by
    return (best, change) if best >= 0 else (best, np.int64(0))


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64)")
def repair_by_table(ptr_, adj_, back_, size_, n, cap, n_moves, off_, weight_, state_, stop_):
    """As `repair`, with a table of every buffer's price at every offset: the move that gains most is made, and when
    none gains anything every pair that lies on one another pays more (breakout: Morris, AAAI 1993)."""
    ptr, size, off, state, stop = i64s(ptr_, n + 1), i64s(size_, n), i64s(off_, n), i64s(state_, 2), i64s(stop_, 1)
    adj, back, weight = i64s(adj_, ptr[n]), i64s(back_, ptr[n]), i64s(weight_, ptr[n])
    width, prices, least = cap + 1, np.zeros(n * (cap + 1), np.int64), np.full(n, -1, np.int64)
    list_, place, m = np.empty(n, np.int64), np.full(n, -1, np.int64), 0
    for i in range(n):
        off[i] = min(off[i], cap - size[i])
    for i in range(n):
        for k in range(ptr[i], ptr[i + 1]):
            _charge(prices, i * width, cap - size[i], off[adj[k]], size[adj[k]], size[i], weight[k])
        m = _list(i, prices[i * width + off[i]] > 0, list_, place, m)
    for _ in range(n_moves):
        if m == 0 or stop[0] != 0:
            break
        state[1] += 1
        i, change = _best_mover(list_, m, cap, size, off, prices, least, state)
        if i >= 0 and change <= 0:
            old, new = off[i], _one_at(prices, i * width, cap - size[i], off[i], least[i], state)
            off[i], least[i] = new, -1
            for k in range(ptr[i], ptr[i + 1]):
                j = adj[k]
                _charge(prices, j * width, cap - size[j], old, size[i], size[j], -weight[k])
                _charge(prices, j * width, cap - size[j], new, size[i], size[j], weight[k])
                least[j] = -1
                m = _list(j, prices[j * width + off[j]] > 0, list_, place, m)
            m = _list(i, prices[i * width + new] > 0, list_, place, m)
        if change >= 0:
            for c in range(m):
                i = list_[c]
                for k in range(ptr[i], ptr[i + 1]):
                    if place[adj[k]] >= 0 and _meet(i, off[i], adj[k], size, off):
                        weight[k] += RISE
                        weight[back[k]] += RISE
                        for one, other in ((i, adj[k]), (adj[k], i)):
                            _charge(prices, one * width, cap - size[one], off[other], size[other], size[one], RISE)
                            least[one] = -1
    return m


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
        """What is tried next below `best`: an eighth of the way to the goal, less after each vain try."""
        return max(goal, best - max(1, (best - goal) // 8 >> self.tries % 4))

    def run(self, cap, n_moves, stop):
        """(moves made, whether the offsets are a layout within cap)."""
        at, x = self.state[1], self.lists
        small = cap <= DENSE and len(x.size) * (cap + 1) <= MAX_TABLE
        left = (repair_by_table if small else repair)(x.ptr, x.adj, x.back, x.size, len(x.size), cap, n_moves,
                                                      self.offsets, self.weight, self.state, stop)
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
