"""Search for a layout almost without gaps, for problems whose live bytes are near the bound at nearly every step.

What is placed has a front, the lowest free address of every section.  A valley of the front is a run of sections at
one level between higher neighbours.  The first free byte at either end of a valley is covered by a buffer that begins
(or ends) exactly there and fits into the valley, or by nothing at all, for which its section must have bytes to spare:

    ____
        |         ____      c begins where the valley begins, a choice for its left end; b ends where it ends, one for
        |ccc  bbbb|         its right end.  Where an end stays free, the front is lifted there to the next level at
        ^         ^         which something can lie: a neighbour, or the top of what still fits beside it.

The end with the fewest choices is decided first; one without any ends the branch.  A border that no unplaced buffer
crosses makes two parts that are searched apart.  What is left to place fixes the front, so a part that failed is known
by its unplaced buffers and spare bytes, and is not searched again.

Tries end after few nodes, for most of their length is decided by their first choices.  The next one keeps a part of the
best try so far, the one that filled most: a random number of its first moves (iterated greedy: Ruiz, Stuetzle, 2007).
From there it goes on in another random order, in which buffers that tries left over come earlier (squeaky wheel
optimization: Joslin and Clements, 1999).  After PATIENCE tries that fill no more the best one is forgotten.

The search visits every layout in which no buffer can sink, so it misses none but for two parts with one 64-bit key.
It complements `ggjit.alloc.offsets.search`, which is at its best where the sections are not full.
"""
import numpy as np

from ggjit.alloc.offsets.greedy import NEVER
from ggjit.ops.native.jit import exact, native
from ggjit.ops.native.records import JitRecord, row

MAX_BUFFERS = 4096              # limit, since a search node looks at every section of its part
MAX_SPARE = 1 / 4               # of all bytes of all sections: with more to spare, other searches do better
TRY_NODES, GROWTH, TRIES = 4, 1.1, 64           # nodes of a try, per buffer; after TRIES tries they grow by GROWTH
EARLY = 1.7                     # exponent of the share of moves kept: above 1, few are kept more often than many
PATIENCE = 100                  # tries that fill no more than the best one, before that is forgotten
NOISE = 1.5                     # random part of a buffer's preference, in units of the logarithm of its area
BLAME, FADING = 0.2, 0.9        # preference, in the same units, that a try adds to what it left; what is kept of it
FLUSH = 2.0                     # preference, in the same units, for a top that ends level with a neighbour
N_KEYS = 1 << 16                # failed parts that are remembered, a power of two
FOUND, NODE_LIMIT, EXHAUSTED = 1, -1, 0
GO_ON = 2                       # the search is not decided yet
MANY = np.int64(1) << np.int64(40)              # more choices than any end has
LIFT, NONE = -1, -2             # moves that place no buffer: the front is lifted at an end; nothing was done yet

# one decision, about the end at `side` (0 left, 1 right) of the valley [p, q) of the part [lo, hi): its choices are
# choice[first:last], the next one at `at`; move: the one made, which takes nbytes; key: of the part; done: of the parts
# below, the last that was opened
FRAME = row("parent", "lo", "hi", "done", "p", "q", "side", "first", "last", "at", "move", "nbytes", "key")
MOVE = row("move", "end", "nbytes")             # a buffer, or LIFT at section `end`
TILING = JitRecord(
    "TilingRecord",
    n="i64", ns="i64", cap="i64", lower="i64[n]", upper="i64[n]", size="i64[n]",
    begin_ptr="i64[ns + 2]", begin="i64[n]", end_ptr="i64[ns + 2]", end="i64[n]",   # by section, equals together
    liking="f64[n]", buffer_key="i64[n]", section_key="i64[ns]",    # preferences; random words
    failed=f"i64[{N_KEYS}]",                                        # keys of parts, kept between tries
    node_limit="i64", stop="i64[1]", offset="i64[n]",
    # lowest free address of a section; bytes of it that may stay unused
    front="i64[ns] = 0", spare="i64[ns]",
    crossing="i64[ns + 1] = 0", placed="i64[n] = 0",                # unplaced buffers across a border
    key_of="i64[ns] = 0",                       # hash of a part's unplaced buffers and spare bytes
    counted="i64[2 * ns + 2] = -1", n_choices="i64[2 * ns + 2] = 0",        # by end, see _narrowest_choice
    max_frames="i64", frame=(FRAME, "max_frames"),
    max_choices="i64", choice="i64[max_choices + 2 * n]", score="f64[max_choices + 2 * n]",
    valley=row("p", "q", "side"),                                   # the end with the fewest choices
    n_kept="i64", kept=(MOVE, "n_kept"), path=(MOVE, "max_frames"), # moves made before; those that filled most
    # filled: bytes of all sections below the front; most_filled, path: the most of them, and the length of its path
    count=row("top", "nodes", "filled", "most_filled", "path"))
tiling_at = TILING.at


# ---------------------------------------------------------------- what may lie at an end
@exact
def _level_above(s, p, q, side, lo, hi, enough):
    """Bytes to the next level at which something may lie at one end of the valley [p, q) of the part [lo, hi); any
    number <= enough where there is one."""
    here = s.front[p]
    up = s.cap - here
    if p > lo:
        up = min(up, s.front[p - 1] - here)
    if q < hi:
        up = min(up, s.front[q] - here)
    first, last = (p, q - 1) if side == 1 else (p + 1, q)
    for x in range(first, last):
        if up <= enough:
            break
        for k in range(s.begin_ptr[x], s.begin_ptr[x + 1]):
            i = s.begin[k]
            if s.placed[i] == 0 and s.upper[i] <= last:
                up = min(up, s.size[i])
    return up


@exact
def _choices(s, p, q, side, n):
    """Write the buffers that fit into the valley [p, q) from its left or right end to choice[n:]; the new n.  One of
    equals."""
    first, last = (s.end_ptr[q], s.end_ptr[q + 1]) if side == 1 else (s.begin_ptr[p], s.begin_ptr[p + 1])
    before = np.int64(-1)
    for k in range(first, last):
        i = s.end[k] if side == 1 else s.begin[k]
        if s.placed[i] != 0 or s.lower[i] < p or s.upper[i] > q:
            continue
        if before >= 0 and s.lower[i] == s.lower[before] and s.upper[i] == s.upper[before] \
                and s.size[i] == s.size[before]:
            continue
        before = i
        s.choice[n] = i
        n += 1
    return n


@exact
def _narrowest_choice(s, lo, hi, n):
    """How many buffers may lie at that end of a valley in [lo, hi) where the fewest may; s.valley names the end.  Of
    equal ends, the one of the shortest valley.  0: no buffer fits at some end; -1: the part is full.  The buffers
    are written to choice[n:].

    counted, n_choices: per side and end, the other end of the valley whose choices were counted, and their number."""
    least, v = MANY, s.valley
    v.p, v.q, v.side = lo, lo, 0
    p = lo
    while p < hi:
        q, here = p + 1, s.front[p]
        while q < hi and s.front[q] == here:
            q += 1
        if here < s.cap and (p == lo or s.front[p - 1] > here) and (q == hi or s.front[q] > here):
            for side in range(2):
                at, end, spared = (s.ns + 1 + q, p, s.spare[q - 1]) if side == 1 else (p, q, s.spare[p])
                if s.counted[at] != end:
                    s.counted[at] = end
                    s.n_choices[at] = _choices(s, p, q, side, n) - n
                m = s.n_choices[at]
                if m > least or m == least and q - p >= v.q - v.p:
                    continue
                if spared > 0:
                    m += spared >= _level_above(s, p, q, side, lo, hi, spared)
                if m < least or m == least and q - p < v.q - v.p:
                    least = m
                    v.p, v.q, v.side = p, q, side
                if m == 0:
                    return np.int64(0)
        p = q
    return least if least < MANY else np.int64(-1)


@exact
def _sort_choices(s, f):
    """Sort the choices of frame f by preference, which is higher where the buffer's top is level with a neighbour's."""
    p, q = s.frame[f].p, s.frame[f].q
    here = s.front[p]
    for k in range(s.frame[f].first, s.frame[f].last):
        i = s.choice[k]
        worth = s.liking[i]
        if s.lower[i] == p and p > s.frame[f].lo and here + s.size[i] == s.front[p - 1]:
            worth += FLUSH
        if s.upper[i] == q and q < s.frame[f].hi and here + s.size[i] == s.front[q]:
            worth += FLUSH
        r = k
        while r > s.frame[f].first and s.score[r - 1] < worth:
            s.score[r], s.choice[r] = s.score[r - 1], s.choice[r - 1]
            r -= 1
        s.score[r], s.choice[r] = worth, i


# ---------------------------------------------------------------- moves
@exact
def _spare_key(s, x):
    """The contribution of section x's spare bytes to the hash of its part."""
    word = s.section_key[x] * (2 * s.spare[x] + 1)
    return word ^ ((word >> np.int64(29)) & np.int64(0x7FFFFFFFF))


@exact
def _apply(s, i, end, by):
    """Move the front up by so many bytes, or down: over buffer i, or at section `end` where i is LIFT.  The numbers of
    choices counted at the ends of the buffer become invalid."""
    if i == LIFT:
        s.key_of[end] ^= _spare_key(s, end)
        s.front[end] += by
        s.spare[end] -= by
        s.key_of[end] ^= _spare_key(s, end)
        s.count.filled += by
    elif i >= 0:
        sign = 1 if by > 0 else -1
        s.key_of[s.lower[i]] ^= s.buffer_key[i]
        s.placed[i] += sign
        s.counted[s.lower[i]] = s.counted[s.ns + 1 + s.upper[i]] = -1
        s.count.filled += by * (s.upper[i] - s.lower[i])
        for x in range(s.lower[i], s.upper[i]):
            s.front[x] += by
        for x in range(s.lower[i] + 1, s.upper[i]):
            s.crossing[x] -= sign


@exact
def _end(s, f):
    """The section at the end that frame f decides."""
    return s.frame[f].q - 1 if s.frame[f].side == 1 else s.frame[f].p


@exact
def _keep_path(s):
    """Keep the moves of all frames where they fill more than any before; the last frame may not have moved yet."""
    if s.count.filled <= s.count.most_filled:
        return
    s.count.most_filled, s.count.path = s.count.filled, 0
    for f in range(1, s.count.top + 1):
        if s.frame[f].move == NONE:
            break
        s.count.path = f
        t = s.path[f - 1]
        t.move, t.end, t.nbytes = s.frame[f].move, _end(s, f), s.frame[f].nbytes


@exact
def _next_move(s, f):
    """Take the next choice of frame f, of its parent where none is left, after all moves above it are taken back; the
    frame that moved, or 0 when there is none."""
    _keep_path(s)
    while True:
        if f == 0:
            return f
        while s.count.top > f or s.frame[f].move != NONE:
            top = s.count.top
            _apply(s, s.frame[top].move, _end(s, top), -s.frame[top].nbytes)
            s.frame[top].move = NONE
            if top > f:
                s.count.top = top - 1
        if s.frame[f].at < s.frame[f].last:
            break
        key = s.frame[f].key
        if key != 0:
            s.failed[key & (N_KEYS - 1)] = key
        f = s.frame[f].parent
    r = s.frame[f]
    i = s.choice[r.at]
    r.at += 1
    if i >= 0:
        r.nbytes, s.offset[i] = s.size[i], s.front[r.p]
    else:
        r.nbytes = _level_above(s, r.p, r.q, r.side, r.lo, r.hi, 0)
    r.move, r.done = i, 0
    _apply(s, i, _end(s, f), r.nbytes)
    return f


# ---------------------------------------------------------------- parts
@exact
def _next_part(s, f):
    """Sections [lo, hi) of the next part of frame f, the shortest first; lo == hi where there is none.  Parts that are
    full have fallen into single sections, which come before and are not taken twice."""
    best, lo, end, done = np.int64(0), s.frame[f].lo, s.frame[f].hi, s.frame[f].done
    for x in range(lo + 1, end + 1):
        if x == end or s.crossing[x] == 0:
            here = ((x - lo) << np.int64(32)) + lo
            if here > done and (best == 0 or here < best):
                best = here
            lo = x
    lo = best & 0xFFFFFFFF
    s.frame[f].done = best if best else done
    return lo, lo + (best >> np.int64(32))


@exact
def _open_part(s, parent, lo, hi, m):
    """A frame for the end in s.valley, which has m choices; its parent where the part is known to fail."""
    key, v = np.int64(0), s.valley
    if m > 1:
        for x in range(lo, hi):
            key ^= s.key_of[x]
    if m == 0 or m > 1 and s.failed[key & (N_KEYS - 1)] == key:
        return parent
    first = s.frame[s.count.top].last
    s.count.top += 1
    f = s.count.top
    r = s.frame[f]
    r.parent, r.lo, r.hi, r.p, r.q, r.side = parent, lo, hi, v.p, v.q, v.side
    r.first, r.at, r.key, r.move = first, first, key, NONE
    r.last = _choices(s, v.p, v.q, v.side, first)
    _sort_choices(s, f)
    if r.last - first < m:
        s.choice[r.last] = LIFT
        r.last += 1
    return f


@exact
def _begin(s):
    """The state before the first decision, which is frame 0, with the moves kept of another try."""
    r = s.frame[0]
    r.parent, r.lo, r.hi, r.done, r.move, r.first, r.last = -1, 0, s.ns, 0, NONE, 0, 0
    for i in range(s.n):
        s.key_of[s.lower[i]] ^= s.buffer_key[i]
        for x in range(s.lower[i] + 1, s.upper[i]):
            s.crossing[x] += 1
    for x in range(s.ns):
        s.key_of[x] ^= _spare_key(s, x)
    for k in range(s.n_kept):
        t = s.kept[k]
        if t.move >= 0:
            s.offset[t.move] = s.front[s.lower[t.move]]
        _apply(s, t.move, t.end, t.nbytes)


@native("i64(i64)")
def tile(address):
    """One try over a TILING record.  FOUND, with its offsets, NODE_LIMIT, or EXHAUSTED: none has the moves kept."""
    s = tiling_at(address)
    _begin(s)
    parent = np.int64(0)
    while True:
        lo, hi = _next_part(s, parent)
        while lo == hi and parent > 0:          # take the valley of the nearest ancestor that has one
            parent = s.frame[parent].parent
            lo, hi = _next_part(s, parent)
        if lo == hi:
            return FOUND
        s.count.nodes += 1
        first = s.frame[s.count.top].last
        if s.count.nodes > s.node_limit or s.stop[0] != 0 or s.count.top + 1 == s.max_frames or first >= s.max_choices:
            _keep_path(s)
            return NODE_LIMIT
        m = _narrowest_choice(s, lo, hi, first)
        if m < 0:
            continue
        parent = _next_move(s, _open_part(s, parent, lo, hi, m))
        if parent == 0:
            return EXHAUSTED


KERNELS = (tile,)


def _lists(at, order, ns):
    """(ptr, ids): the buffers of `order` by their section `at`."""
    ids = order[np.argsort(at[order], kind="stable")]
    return np.searchsorted(at[ids], np.arange(ns + 2)).astype(np.int64), ids.astype(np.int64)


class Tiling:
    """The tries at one capacity: same instance, capacity and seed, same layout after as many nodes."""

    def __init__(self, inst, cap, seed=0):
        self.inst, self.cap = inst, int(cap)
        self.spare = self.cap - inst.totals
        self.exhausted = False                  # whether there is no layout
        self.suits = inst.n <= MAX_BUFFERS and int(self.spare.min(initial=0)) >= 0 \
            and self.spare.astype(float).sum() <= MAX_SPARE * self.cap * inst.ns
        if not self.suits:
            return
        order = np.lexsort((inst.size, inst.shi, inst.slo))
        self.begins, self.ends = (_lists(at, order, inst.ns) for at in (inst.slo, inst.shi))
        self.rng = np.random.default_rng([seed, 1])
        self.area = np.log1p(inst.size * (inst.hi - inst.lo).astype(float))
        self.keys = self.rng.integers(-1 << 63, 1 << 63, inst.n + inst.ns, dtype=np.int64)
        self.failed, self.n_tries, self.try_nodes = np.zeros(N_KEYS, np.int64), 0, float(TRY_NODES * inst.n)
        self.blame = np.zeros(inst.n)
        self._forget()

    def _forget(self):
        """Begin without moves of another try."""
        self.path, self.most_filled, self.stale = np.zeros(0, MOVE), -1, 0

    def run(self, n_nodes, stop=NEVER):
        """(nodes taken, offsets or None): tries until so many nodes are spent or one fits."""
        spent = 0
        while self.suits and not self.exhausted and spent < n_nodes and not stop[0]:
            kept = self.path[:int(len(self.path) * self.rng.random() ** EARLY)]
            r = self._record(kept, min(int(self.try_nodes), n_nodes - spent), stop)
            status = tile(r)
            spent += int(r.count["nodes"][0])
            if status == FOUND:
                return spent, r.offset
            self._learn(r, kept, status)
        return spent, None

    def _record(self, kept, node_limit, stop):
        i = self.inst
        return TILING.of(
            n=i.n, ns=i.ns, cap=self.cap, lower=i.slo, upper=i.shi, size=i.size, spare=self.spare.copy(), stop=stop,
            begin_ptr=self.begins[0], begin=self.begins[1], end_ptr=self.ends[0], end=self.ends[1],
            liking=self.area + self.blame + NOISE * self.rng.random(i.n), failed=self.failed,
            buffer_key=self.keys[:i.n], section_key=self.keys[i.n:], max_frames=4 * i.n + 64,
            max_choices=16 * i.n + 256, node_limit=node_limit, n_kept=len(kept), kept=kept)

    def _learn(self, r, kept, status):
        """What a try that failed leaves to the next ones."""
        count = r.count[0]
        self.blame *= FADING
        self.blame[r.placed == 0] += BLAME
        self.exhausted = status == EXHAUSTED and not len(kept)
        if count["most_filled"] >= self.most_filled:
            self.stale = 0 if count["most_filled"] > self.most_filled else self.stale + 1
            self.path = np.concatenate([kept, r.path[:count["path"]]])
            self.most_filled = int(count["most_filled"])
        else:
            self.stale += 1
        if self.stale > PATIENCE:
            self._forget()
        self.n_tries += 1
        if self.n_tries % TRIES == 0:
            self.try_nodes *= GROWTH
