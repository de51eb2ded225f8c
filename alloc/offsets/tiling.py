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
from numba.cpython.unsafe.numbers import trailing_zeros

from ggjit.alloc.offsets.draws import random_word
from ggjit.alloc.offsets.greedy import NEVER
from ggjit.ops.native.jit import exact, native
from ggjit.ops.native.records import JitRecord, row

MAX_BUFFERS = 4096              # limit, since a search node looks at every section of its part
MAX_SPARE = 1 / 4               # of all bytes of all sections: with more to spare, other searches do better
TRY_NODES, GROWTH, TRIES = 4, 10, 64            # nodes of a try, per buffer; after TRIES tries, a GROWTH-th more
EARLY = 1.6                     # exponent of the share of moves kept: above 1, few are kept more often than many
PATIENCE = 30                   # tries that fill no more than the best one, before that is forgotten
CALL_NODES = 1 << 18            # nodes of one compiled call, which no signal interrupts
NOISE = 1.5                     # random part of a buffer's preference, in units of the logarithm of its area
BLAME, FADING = 0.2, 0.9        # preference, in the same units, that a try adds to what it left; what is kept of it
FLUSH = 2.0                     # preference, in the same units, for a top that ends level with a neighbour
N_KEYS = 1 << 16                # failed parts that are remembered, a power of two
FOUND, NODE_LIMIT, EXHAUSTED = 1, -1, 0
MANY = np.int64(1) << np.int64(62)              # more choices than any end has, more bytes than any buffer
LIFT, NONE = -1, -2             # moves that place no buffer: the front is lifted at an end; nothing was done yet

# one decision, about the end at `side` (0 left, 1 right) of the valley [p, q) of the part [lo, hi): its choices are
# choice[first:last], the next one at `at`; move: the one made, which takes nbytes; key: of the part; split: whether the
# move made borders free; done: of the parts below, the last that was opened
FRAME = row("parent", "lo", "hi", "split", "done", "p", "q", "side", "first", "last", "at", "move", "nbytes", "key")
MOVE = row("move", "end", "nbytes")             # a buffer, or LIFT at section `end`
# of the tries so far: their number, nodes of the next one; what the best one filled, length of its path, tries since
STATE = row("number", "nodes", "most_filled", "path", "stale")
TILING = JitRecord(
    "TilingRecord",
    n="i64", ns="i64", cap="i64", lower="i64[n]", upper="i64[n]", size="i64[n]", total="i64[ns]",
    begin_ptr="i64[ns + 2]", begin="i64[n]", end_ptr="i64[ns + 2]", end="i64[n]",   # by section, equals together
    area="f64[n]", buffer_key="i64[n]", section_key="i64[ns]",      # logarithms; random words
    node_limit="i64", stop="i64[1]", offset="i64[n]", max_frames="i64",
    # kept from try to try: keys of parts that failed; what was left over; moves of the best try
    failed=f"i64[{N_KEYS}]", blame="f64[n]", path=(MOVE, "max_frames"), random="i64[1]", tries=STATE,
    liking="f64[n]",                            # preferences of a try
    # lowest free address of a section; bytes of it that may stay unused; bit x: it differs between sections x - 1 and x
    front="i64[ns]", spare="i64[ns]", steps="i64[ns // 64 + 1]",
    crossing="i64[ns + 1]", placed="i64[n]",    # unplaced buffers across a border
    key_of="i64[ns]",                           # hash of a part's unplaced buffers and spare bytes
    # by end, see _compare_ends: the other end of the valley that is counted, number of choices, _least_inside
    counted="i64[2 * ns + 2]", n_choices="i64[2 * ns + 2]", least_inside="i64[2 * ns + 2]",
    frame=(FRAME, "max_frames"), max_choices="i64", choice="i64[max_choices + 2 * n]",
    score="f64[max_choices + 2 * n]",
    valley=row("p", "q", "side", "m"),          # the end with the fewest choices, and their number
    # filled: bytes of all sections below the front; most_filled: what a path must exceed; spent: nodes of all tries
    count=row("top", "nodes", "filled", "kept", "most_filled", "spent"))
tiling_at = TILING.at


# ---------------------------------------------------------------- what may lie at an end
@exact
def _least_inside(s, p, q, side):
    """The least size of the unplaced buffers that fit into the valley [p, q) without the section at one end."""
    first, last, least = (p, q - 1, MANY) if side == 1 else (p + 1, q, MANY)
    for x in range(first, last):
        for k in range(s.begin_ptr[x], s.begin_ptr[x + 1]):
            i = s.begin[k]
            if s.placed[i] == 0 and s.upper[i] <= last:
                least = min(least, s.size[i])
    return least


@exact
def _room(s, p, q, lo, hi):
    """Bytes from the valley [p, q) of the part [lo, hi) to its lower neighbour, or to the top."""
    top = s.cap
    if p > lo:
        top = min(top, s.front[p - 1])
    if q < hi:
        top = min(top, s.front[q])
    return top - s.front[p]


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
def _compare_ends(s, p, q, lo, hi, n):
    """Put an end of the valley [p, q) into s.valley where fewer buffers may lie than at the end there; of equal ends,
    the one of the shorter valley."""
    v, room = s.valley, _room(s, p, q, lo, hi)
    for side in range(2):
        at, end, spared = (s.ns + 1 + q, p, s.spare[q - 1]) if side == 1 else (p, q, s.spare[p])
        if s.counted[at] != end:
            s.counted[at], s.least_inside[at] = end, -1
            s.n_choices[at] = _choices(s, p, q, side, n) - n
        m = s.n_choices[at]
        if m > v.m or m == v.m and q - p >= v.q - v.p:
            continue
        if spared > 0:
            if spared < room and s.least_inside[at] < 0:
                s.least_inside[at] = _least_inside(s, p, q, side)
            m += spared >= room or spared >= s.least_inside[at]
        if m < v.m or m == v.m and q - p < v.q - v.p:
            v.p, v.q, v.side, v.m = p, q, side, m


@exact
def _narrowest_choice(s, lo, hi, n):
    """How many buffers may lie at that end of a valley in [lo, hi) where the fewest may; s.valley names the end.
    0: no buffer fits at some end; -1: the part is full.  The buffers are written to choice[n:]."""
    v = s.valley
    v.p, v.q, v.side, v.m = lo, lo, 0, MANY
    p, falls = lo, True
    for w in range(lo >> 6, (hi >> 6) + 1):
        steps = s.steps[w]
        if w == lo >> 6:
            steps &= np.int64(-2) << (lo & 63)          # borders behind lo
        if w == hi >> 6:
            steps |= np.int64(1) << (hi & 63)
        while steps != 0:
            x = 64 * w + trailing_zeros(steps)
            steps &= steps - 1
            rises = x == hi or s.front[x] > s.front[x - 1]
            if rises and falls and s.front[p] < s.cap:
                _compare_ends(s, p, x, lo, hi, n)
                if v.m == 0:
                    return np.int64(0)
            if x == hi:
                break
            p, falls = x, not rises
    return v.m if v.m < MANY else np.int64(-1)


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
def _mark_step(s, x):
    """Note whether the front differs between sections x - 1 and x."""
    if 0 < x < s.ns:
        bit = np.int64(1) << (x & 63)
        s.steps[x >> 6] &= ~bit
        if s.front[x] != s.front[x - 1]:
            s.steps[x >> 6] |= bit


@exact
def _apply(s, i, end, by):
    """Move the front up by so many bytes, or down: over buffer i, or at section `end` where i is LIFT.  Whether no
    unplaced buffer crosses a border any longer.  The numbers counted at the ends of the buffer become invalid."""
    split = 0
    if i == LIFT:
        s.key_of[end] ^= _spare_key(s, end)
        s.front[end] += by
        s.spare[end] -= by
        s.key_of[end] ^= _spare_key(s, end)
        s.count.filled += by
        _mark_step(s, end)
        _mark_step(s, end + 1)
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
            split |= s.crossing[x] == 0
        _mark_step(s, s.lower[i])
        _mark_step(s, s.upper[i])
    return split


@exact
def _end(s, f):
    """The section at the end that frame f decides."""
    return s.frame[f].q - 1 if s.frame[f].side == 1 else s.frame[f].p


@exact
def _move(s, f, by):
    """Make the move of frame f, or take it back where by < 0; as _apply.  What was counted in its valley becomes
    invalid."""
    s.counted[s.frame[f].p] = s.counted[s.ns + 1 + s.frame[f].q] = -1
    return _apply(s, s.frame[f].move, _end(s, f), by)


@exact
def _keep_path(s):
    """Keep the moves of all frames where they fill more than any before; the last frame may not have moved yet."""
    if s.count.filled <= s.count.most_filled:
        return
    s.count.most_filled, n = s.count.filled, s.count.kept
    for f in range(1, s.count.top + 1):
        if s.frame[f].move == NONE:
            break
        t = s.path[n]
        t.move, t.end, t.nbytes = s.frame[f].move, _end(s, f), s.frame[f].nbytes
        n += 1
    s.tries.path = n


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
            if s.frame[top].move != NONE:
                _move(s, top, -s.frame[top].nbytes)
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
        r.nbytes = min(_room(s, r.p, r.q, r.lo, r.hi), _least_inside(s, r.p, r.q, r.side))
    r.move, r.done = i, 0
    r.split = _move(s, f, r.nbytes)
    return f


# ---------------------------------------------------------------- parts
@exact
def _next_part(s, f):
    """Sections [lo, hi) of the next part of frame f, the shortest first; lo == hi where there is none.  Parts that are
    full have fallen into single sections, which come before and are not taken twice."""
    best, lo, end, done = np.int64(0), s.frame[f].lo, s.frame[f].hi, s.frame[f].done
    if s.frame[f].split == 0:
        s.frame[f].done = 1
        return lo, lo if done else end
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
def _random(s):
    """A number from 0 to 1."""
    return random_word(s.random) / 2.0 ** 53


@exact
def _begin(s):
    """The state before the first decision of a try, which is frame 0, with the first moves of the best try."""
    r, c, t = s.frame[0], s.count, s.tries
    r.parent, r.lo, r.hi, r.split, r.done, r.move, r.first, r.last = -1, 0, s.ns, 1, 0, NONE, 0, 0
    c.top, c.nodes, c.filled, c.most_filled = 0, 0, 0, t.most_filled - 1
    for x in range(s.ns):
        s.front[x], s.crossing[x], s.spare[x] = 0, 0, s.cap - s.total[x]
        s.key_of[x] = _spare_key(s, x)
    for x in range(s.ns // 64 + 1):
        s.steps[x] = 0
    for x in range(2 * s.ns + 2):
        s.counted[x] = -1
    for i in range(s.n):
        s.placed[i], s.liking[i] = 0, s.area[i] + s.blame[i] + NOISE * _random(s)
        s.key_of[s.lower[i]] ^= s.buffer_key[i]
        for x in range(s.lower[i] + 1, s.upper[i]):
            s.crossing[x] += 1
    c.kept = int(t.path * _random(s) ** EARLY)
    for k in range(c.kept):
        m = s.path[k]
        if m.move >= 0:
            s.offset[m.move] = s.front[s.lower[m.move]]
        _apply(s, m.move, m.end, m.nbytes)


@exact
def _try(s, node_limit):
    """One try: FOUND, NODE_LIMIT, or EXHAUSTED: there is no layout with the moves kept."""
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
        if s.count.nodes > node_limit or s.stop[0] != 0 or s.count.kept + s.count.top + 1 == s.max_frames \
                or first >= s.max_choices:
            _keep_path(s)
            return NODE_LIMIT
        m = _narrowest_choice(s, lo, hi, first)
        if m < 0:
            continue
        parent = _next_move(s, _open_part(s, parent, lo, hi, m))
        if parent == 0:
            return EXHAUSTED


@exact
def _learn(s):
    """What a try that failed leaves to the next ones."""
    t = s.tries
    for i in range(s.n):
        s.blame[i] *= FADING
        if s.placed[i] == 0:
            s.blame[i] += BLAME
    t.stale += 1
    if s.count.most_filled > t.most_filled:
        t.most_filled, t.stale = s.count.most_filled, 0
    if t.stale > PATIENCE:
        t.most_filled, t.path, t.stale = -1, 0, 0
    t.number += 1
    if t.number % TRIES == 0:
        t.nodes += t.nodes // GROWTH


@native("i64(i64)")
def tile(address):
    """Tries over a TILING record until node_limit nodes are spent: FOUND, with its offsets, NODE_LIMIT, or EXHAUSTED:
    there is no layout."""
    s = tiling_at(address)
    while s.count.spent < s.node_limit and s.stop[0] == 0:
        status = _try(s, min(s.tries.nodes, s.node_limit - s.count.spent))
        s.count.spent += s.count.nodes
        if status == FOUND or status == EXHAUSTED and s.count.kept == 0:
            return status
        _learn(s)
    return NODE_LIMIT


KERNELS = (tile,)


def _lists(at, order, ns):
    """(ptr, ids): the buffers of `order` by their section `at`."""
    ids = order[np.argsort(at[order], kind="stable")]
    return np.searchsorted(at[ids], np.arange(ns + 2)).astype(np.int64), ids.astype(np.int64)


class Tiling:
    """The tries at one capacity: same instance, capacity and seed, same layout after as many nodes."""

    def __init__(self, inst, cap, seed=0):
        spare = cap - inst.totals
        self.exhausted = False                  # whether there is no layout
        self.suits = inst.n <= MAX_BUFFERS and int(spare.min(initial=0)) >= 0 \
            and spare.astype(float).sum() <= MAX_SPARE * cap * inst.ns
        if not self.suits:
            return
        n, ns = inst.n, inst.ns
        order, rng = np.lexsort((inst.size, inst.shi, inst.slo)), np.random.default_rng([seed, 1])
        begins, ends = (_lists(at, order, ns) for at in (inst.slo, inst.shi))
        keys = rng.integers(-1 << 63, 1 << 63, n + ns + 1, dtype=np.int64)
        max_frames = 4 * n + 64
        self.given = dict(
            n=n, ns=ns, cap=int(cap), lower=inst.slo, upper=inst.shi, size=inst.size, total=inst.totals,
            begin_ptr=begins[0], begin=begins[1], end_ptr=ends[0], end=ends[1],
            area=np.log1p(inst.size * (inst.hi - inst.lo).astype(float)), buffer_key=keys[:n], section_key=keys[n:-1],
            random=keys[-1:] | 1, max_frames=max_frames, max_choices=16 * n + 256,
            failed=np.zeros(N_KEYS, np.int64), blame=np.zeros(n), path=np.zeros(max_frames, MOVE),
            tries=np.array([(0, TRY_NODES * n, -1, 0, 0)], STATE))

    def run(self, n_nodes, stop=NEVER):
        """(nodes taken, offsets or None): tries until so many nodes are spent or one fits."""
        spent = 0
        while self.suits and not self.exhausted and spent < n_nodes and not stop[0]:
            r = TILING.of(**self.given, node_limit=min(int(n_nodes) - spent, CALL_NODES), stop=stop)
            status = tile(r)
            spent += int(r.count["spent"][0])
            if status == FOUND:
                return spent, r.offset
            self.exhausted = status == EXHAUSTED
        return spent, None
