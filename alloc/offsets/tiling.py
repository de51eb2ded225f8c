"""Search for a layout that wastes next to nothing: where nearly every section is full, buffers tile the memory.

What is placed has a front, the lowest free address of every section.  A valley of the front is a run of sections at
one level between higher neighbours.  The first free byte at either end of a valley is covered by a buffer that begins
(or ends) exactly there and fits into the valley, or by nothing at all, for which its section must have bytes to spare:

    ____
        |         ____      c begins where the valley begins, a choice for its left end; b ends where it ends, one for
        |ccc  bbbb|         its right end.  Where an end stays free, the front is lifted there to the next level at
        ^         ^         which something can lie: a neighbour, or the top of what still fits beside it.

The end with the fewest choices is decided first; one without any ends the branch.  A border that no unplaced buffer
crosses makes two parts that are searched apart.  What is left to place fixes the front, so a part that failed is known
by its unplaced buffers and spare bytes, and is not searched again.  Tries end after few nodes and begin anew in another
random order, for most of their length is decided by their first choices.

The search visits every layout in which no buffer can sink, so it misses none but for two parts with one 64-bit key.
It complements `ggjit.alloc.offsets.search`, which is at its best where the sections are not full.
"""
import numpy as np
from numba import types

from ggjit.alloc.offsets.greedy import NEVER
from ggjit.ops.native.jit import array_maker, i64s, inlined, native

f64s = array_maker(types.float64)

MAX_BUFFERS = 4096              # a node looks at every section of its part
MAX_SPARE = 1 / 4               # of all bytes of all sections: with more to spare, other searches do better
TRY_NODES, GROWTH, TRIES = 2000, 1.5, 64        # nodes of a try, that grow so after so many tries
NOISE = 1.5                     # of a buffer's preference, in units of the logarithm of its area
FLUSH = 2.0                     # preference, in the same units, for a top that ends level with a neighbour
N_KEYS = 1 << 16                # failed parts that are remembered, a power of two
FOUND, NODE_LIMIT, EXHAUSTED = 1, -1, 0
MANY = np.int64(1) << np.int64(40)              # more choices than any end has
LIFT, NONE = -1, -2             # moves that place no buffer: the front is lifted at an end; nothing was done yet
# columns of the frame table: a frame is one decision about the end at SIDE (0 left, 1 right) of the valley [P, Q)
PARENT, LO, HI, DONE, P, Q, SIDE, FIRST, LAST, AT, MOVE, BYTES, KEY = range(13)


@inlined
def _level_above(p, q, side, lo, hi, cap, front, begins, b, size, placed, enough):
    """Bytes to the next level at which something may lie at one end of the valley [p, q) of the part [lo, hi); any
    number <= enough where there is one."""
    here = front[p]
    up = cap - here
    if p > lo:
        up = min(up, front[p - 1] - here)
    if q < hi:
        up = min(up, front[q] - here)
    first, last = (p, q - 1) if side == 1 else (p + 1, q)
    for s in range(first, last):
        if up <= enough:
            break
        for k in range(begins[0][s], begins[0][s + 1]):
            i = begins[1][k]
            if placed[i] == 0 and b[i] <= last:
                up = min(up, size[i])
    return up


@inlined
def _choices(p, q, side, begins, ends, a, b, size, placed, out, n):
    """Write the buffers that fit into the valley [p, q) from its left or right end to out[n:]; the new n.  One of
    equals."""
    at, ptr, ids = (q, ends[0], ends[1]) if side == 1 else (p, begins[0], begins[1])
    before = np.int64(-1)
    for k in range(ptr[at], ptr[at + 1]):
        i = ids[k]
        if placed[i] != 0 or a[i] < p or b[i] > q:
            continue
        if before >= 0 and a[i] == a[before] and b[i] == b[before] and size[i] == size[before]:
            continue
        before = i
        out[n] = i
        n += 1
    return n


@inlined
def _narrowest_choice(lo, hi, cap, front, spare, begins, ends, a, b, size, placed, counted, n_choices, out, n):
    """(choices, p, q, side) of the end with the fewest choices in the part [lo, hi), short valleys first among equals;
    0 choices: nothing can lie at one end; -1: the part is full.

    counted, n_choices: per side and end, the other end of the valley whose choices were counted, and their number."""
    least, best_p, best_q, best_side = MANY, lo, lo, 0
    p = lo
    while p < hi:
        q = p + 1
        while q < hi and front[q] == front[p]:
            q += 1
        if front[p] < cap and (p == lo or front[p - 1] > front[p]) and (q == hi or front[q] > front[p]):
            for side in range(2):
                at, end, spared = (len(front) + 1 + q, p, spare[q - 1]) if side == 1 else (p, q, spare[p])
                if counted[at] != end:
                    counted[at] = end
                    n_choices[at] = _choices(p, q, side, begins, ends, a, b, size, placed, out, n) - n
                m = n_choices[at]
                if m <= least and spared > 0:
                    m += spared >= _level_above(p, q, side, lo, hi, cap, front, begins, b, size, placed, spared)
                if m == 0:
                    return np.int64(0), p, q, side
                if m < least or (m == least and q - p < best_q - best_p):
                    least, best_p, best_q, best_side = m, p, q, side
        p = q
    return least if least < MANY else np.int64(-1), best_p, best_q, best_side


@inlined
def _spare_key(s, spare, section_keys):
    """What a section's spare bytes add to the key of its part."""
    x = section_keys[s] * (2 * spare[s] + 1)
    return x ^ ((x >> np.int64(29)) & np.int64(0x7FFFFFFFF))


@inlined
def _sort_choices(fr, f, front, size, a, b, like, out, score):
    """The choices of frame f, the likeliest first: by preference, more for a top that is level with a neighbour."""
    p, q, here = fr[f, P], fr[f, Q], front[fr[f, P]]
    for k in range(fr[f, FIRST], fr[f, LAST]):
        i = out[k]
        worth = like[i]
        if a[i] == p and p > fr[f, LO] and here + size[i] == front[p - 1]:
            worth += FLUSH
        if b[i] == q and q < fr[f, HI] and here + size[i] == front[q]:
            worth += FLUSH
        r = k
        while r > fr[f, FIRST] and score[r - 1] < worth:
            score[r], out[r] = score[r - 1], out[r - 1]
            r -= 1
        score[r], out[r] = worth, i


@inlined
def _apply(fr, f, sign, front, spare, crossing, a, b, placed, counted, key_of, buffer_keys, section_keys):
    """Make (sign 1) or take back (-1) the move of frame f; what was counted at the ends of its buffer holds no more."""
    i, amount = fr[f, MOVE], fr[f, BYTES]
    if i == LIFT:
        end = fr[f, Q] - 1 if fr[f, SIDE] == 1 else fr[f, P]
        key_of[end] ^= _spare_key(end, spare, section_keys)
        front[end] += sign * amount
        spare[end] -= sign * amount
        key_of[end] ^= _spare_key(end, spare, section_keys)
    elif i >= 0:
        key_of[a[i]] ^= buffer_keys[i]
        placed[i] += sign
        counted[a[i]] = counted[len(front) + 1 + b[i]] = -1
        for s in range(a[i], b[i]):
            front[s] += sign * amount
        for s in range(a[i] + 1, b[i]):
            crossing[s] -= sign


@inlined
def _next_part(fr, f, crossing):
    """Sections [lo, hi) of the next part of frame f, the shortest first; lo == hi where there is none.  Parts that are
    full have fallen into single sections, which come before and are not taken twice."""
    best, lo = np.int64(0), fr[f, LO]
    for s in range(fr[f, LO] + 1, fr[f, HI] + 1):
        if s == fr[f, HI] or crossing[s] == 0:
            here = ((s - lo) << np.int64(32)) + lo
            if here > fr[f, DONE] and (best == 0 or here < best):
                best = here
            lo = s
    lo = best & 0xFFFFFFFF
    fr[f, DONE] = best if best else fr[f, DONE]
    return lo, lo + (best >> np.int64(32))


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64)")
def tile(slo, shi, size_, n, ns, spare_, cap, by_begin, by_end, like_, keys_, failed_, node_limit, stop_, out_):
    """One try.  FOUND with offsets in out, NODE_LIMIT, or EXHAUSTED: there is no layout.

    spare: bytes of every section that stay unused; by_begin, by_end: sections + 1 places, then buffers, equals side by
    side; like: preferences; keys: random, of buffers and then of sections; failed: N_KEYS keys of parts, kept between
    tries; out[n]: nodes."""
    stop, a, b, size, out = i64s(stop_, 1), i64s(slo, n), i64s(shi, n), i64s(size_, n), i64s(out_, n + 1)
    begins = i64s(by_begin, ns + 2), i64s(by_begin + 8 * (ns + 2), n)
    ends = i64s(by_end, ns + 2), i64s(by_end + 8 * (ns + 2), n)
    like, buffer_keys, section_keys = f64s(like_, n), i64s(keys_, n), i64s(keys_ + 8 * n, ns)
    failed, spare = i64s(failed_, N_KEYS), i64s(spare_, ns).copy()
    front, crossing, placed = np.zeros(ns, np.int64), np.zeros(ns + 1, np.int64), np.zeros(n, np.int64)
    counted, n_choices = np.full(2 * ns + 2, -1, np.int64), np.zeros(2 * ns + 2, np.int64)
    key_of = np.zeros(ns, np.int64)             # what a part is known by: its unplaced buffers and its spare bytes
    for i in range(n):
        key_of[a[i]] ^= buffer_keys[i]
        for s in range(a[i] + 1, b[i]):
            crossing[s] += 1
    for s in range(ns):
        key_of[s] ^= _spare_key(s, spare, section_keys)
    max_frames, max_choices = 4 * n + 64, 16 * n + 256
    fr = np.zeros((max_frames, 13), np.int64)
    choice, score = np.zeros(max_choices + 2 * n, np.int64), np.zeros(max_choices + 2 * n, np.float64)
    fr[0, PARENT], fr[0, HI], fr[0, MOVE] = -1, ns, NONE
    parent, top, nodes = np.int64(0), np.int64(0), np.int64(0)
    while True:
        # ---- the next part below `parent`, or of the nearest ancestor that has one
        lo, hi = _next_part(fr, parent, crossing)
        while lo == hi and parent > 0:
            parent = fr[parent, PARENT]
            lo, hi = _next_part(fr, parent, crossing)
        if lo == hi:
            out[n] = nodes
            return FOUND
        nodes += 1
        first = fr[top, LAST]
        if nodes > node_limit or stop[0] != 0 or top + 1 == max_frames or first >= max_choices:
            out[n] = nodes
            return NODE_LIMIT
        m, p, q, side = _narrowest_choice(lo, hi, cap, front, spare, begins, ends, a, b, size, placed, counted,
                                          n_choices, choice, first)
        if m < 0:
            continue
        f, key = parent, np.int64(0)
        if m > 0:
            if m > 1:
                for s in range(lo, hi):
                    key ^= key_of[s]
            if m == 1 or failed[key & (N_KEYS - 1)] != key:
                top += 1
                f = top
                fr[f, PARENT], fr[f, LO], fr[f, HI], fr[f, P], fr[f, Q], fr[f, SIDE] = parent, lo, hi, p, q, side
                fr[f, FIRST], fr[f, AT], fr[f, KEY], fr[f, MOVE] = first, first, key, NONE
                fr[f, LAST] = _choices(p, q, side, begins, ends, a, b, size, placed, choice, first)
                _sort_choices(fr, f, front, size, a, b, like, choice, score)
                if fr[f, LAST] - first < m:
                    choice[fr[f, LAST]] = LIFT
                    fr[f, LAST] += 1
        # ---- the next choice of frame f, of its parent where none is left
        while True:
            if f == 0:
                out[n] = nodes
                return EXHAUSTED
            while top > f or fr[f, MOVE] != NONE:
                _apply(fr, top, -1, front, spare, crossing, a, b, placed, counted, key_of, buffer_keys,
                       section_keys)
                fr[top, MOVE] = NONE
                if top > f:
                    top -= 1
            if fr[f, AT] < fr[f, LAST]:
                break
            if fr[f, KEY] != 0:
                failed[fr[f, KEY] & (N_KEYS - 1)] = fr[f, KEY]
            f = fr[f, PARENT]
        i = choice[fr[f, AT]]
        fr[f, AT] += 1
        if i >= 0:
            fr[f, BYTES], out[i] = size[i], front[fr[f, P]]
        else:
            fr[f, BYTES] = _level_above(fr[f, P], fr[f, Q], fr[f, SIDE], fr[f, LO], fr[f, HI], cap, front, begins, b,
                                        size, placed, 0)
        fr[f, MOVE], fr[f, DONE] = i, 0
        _apply(fr, f, 1, front, spare, crossing, a, b, placed, counted, key_of, buffer_keys, section_keys)
        parent = f


KERNELS = (tile,)


def _lists(at, order, ns):
    """Sections + 2 places into, then the buffers of `order` by their section `at`."""
    ids = order[np.argsort(at[order], kind="stable")]
    return np.concatenate([np.searchsorted(at[ids], np.arange(ns + 2)), ids]).astype(np.int64)


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
        self.failed, self.n_tries, self.try_nodes = np.zeros(N_KEYS, np.int64), 0, float(TRY_NODES)

    def run(self, n_nodes, stop=NEVER):
        """(nodes taken, offsets or None): tries until so many nodes are spent or one fits."""
        i, out, spent = self.inst, np.empty(self.inst.n + 1, np.int64), 0
        while self.suits and not self.exhausted and spent < n_nodes and not stop[0]:
            like = self.area + NOISE * self.rng.random(i.n)
            status = tile(i.slo, i.shi, i.size, i.n, i.ns, self.spare, self.cap, self.begins, self.ends, like,
                          self.keys, self.failed, min(int(self.try_nodes), n_nodes - spent), stop, out)
            spent += int(out[-1])
            if status == FOUND:
                return spent, out[:-1].copy()
            self.exhausted = status == EXHAUSTED
            self.n_tries += 1
            if self.n_tries % TRIES == 0:
                self.try_nodes *= GROWTH
        return spent, None
