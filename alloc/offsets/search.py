"""Canonical search: decides whether a layout within `cap` bytes exists, and finds it.

Depth first over bottom-up layouts (idea: Moffitt, MiniMalloc, ASPLOS 2023).  Every unplaced buffer has a least offset,
the top of the placed buffers it meets in time.  A layout can be read off in order of (offset, rank), each buffer at
its least offset, so one frame of the search picks the next buffer in that order:

    - it must come after the last one picked, and start below the least possible top of any other (else it leaves a
      hole that one would fill);
    - for every section:  max(current offset, least offset in it) + unplaced bytes in it <= cap;
    - a buffer with nothing above it needs no alternatives;
    - when a placement empties the border between two sections, the rest splits into independent parts (AND nodes).

            ^ address        c: least offset = top of a
      cap --|---------------------------
            |   +-- c? --+
            | +-- a --+ .       b and c do not meet a together: once a is placed and only b lives left of the
            | |       +-- b     border, both sides are searched apart
            +-------------------------> sections

Which of equals comes first is the rank.  It is the place in the part's list of members, and every part that a split
opens is ranked anew, by what is still unplaced in it: where most bytes are left is decided first.  `rule` names the
permutation of the three keys, T (largest unplaced total of a buffer's sections), W (width) and A (area); a search
that one permutation loses early another often finds at once.  A buffer that was passed over at some offset stays
out of the running for that offset when its part is ranked anew: lists hold it complemented, ~i.

Frames keep an explicit parent on one linear trail, so a failed part drops its solved siblings with one rewind.
"""
import collections

import numpy as np

from ggjit.alloc.offsets.greedy import NEVER, births_csr, members_csr
from ggjit.ops.native.jit import exact, i64s, native
from ggjit.ops.native.records import JitRecord, row

FOUND, INFEASIBLE, NODE_LIMIT, TRAIL_FULL = 1, 0, -1, -2
KEEP, TWA, WAT, TAW = range(4)  # rules: keep the given order, or rank each part anew
RULES = {"TWA": TWA, "TAW": TAW, "WAT": WAT}        # in the order in which they take turns
MAX_PAIRS = 60_000_000          # overlaps the adjacency lists may hold
MAX_TRAIL = 16_000_000          # rows of the trail of floors, and words of the lists of members
BIG = np.int64(1) << np.int64(62)
GO_ON = 2                       # the search is not decided yet

# one decision: part [lo, hi) below frame `parent`, whose members are list[first:end].  The last one picked lies at
# offset key, at place `pos` of the list; complemented members were passed over at offset `passed`.  above: whether it
# has neighbours left; next, next_end, split: parts below that are still to be opened; left: members not placed;
# list_top, n_lifts, n_floors, n_placed: lengths when it was opened
FRAME = row("parent", "lo", "hi", "first", "end", "key", "pos", "passed", "above", "next", "next_end", "split", "left",
            "list_top", "n_lifts", "n_floors", "n_placed")
KEY = np.dtype([("by", "f8", 3)])
SEARCH = JitRecord(
    "SearchRecord",
    n="i64", ns="i64", lower="i64[n]", upper="i64[n]", size="i64[n]", width="i64[n]",       # sections [lower, upper)
    adj_ptr="i64[n + 1]", adj="i64[adj_ptr[n]]",                    # buffers that are alive together with buffer i
    member_ptr="i64[ns + 1]", member="i64[member_ptr[ns]]",         # buffers that are alive in section s
    order="i64[n]", rule="i64", cap="i64", node_limit="i64", stop="i64[1]",
    offset="i64[n]",                                                # the result; -1: not placed
    # lowest possible offset, + BIG when placed; stamp of the step that raised it last
    least="i64[n] = 0", lifted_at="i64[n] = 0",
    # unplaced bytes of a section; unplaced buffers that live across the border before it
    total="i64[ns] = 0", crossing="i64[ns + 1] = 0",
    # lowest possible offset in a section, and a buffer that has it
    floor="i64[ns] = 0", floor_of="i64[ns] = -1",
    frame=(FRAME, "2 * n + 8"), n_list="i64", list="i64[n_list]", key=(KEY, "n"),
    # the trail, from which decisions are taken back: the values that lifts and placements replaced, and their counts
    lifts=(row("buffer", "least"), "adj_ptr[n] + 1"), placed="i64[n + 1]",
    n_floors="i64", floors=(row("section", "floor", "buffer"), "n_floors"),
    count=row("lifts", "floors", "placed", "list", "frames", "stamp", "nodes", "most_placed"))

LISTS = JitRecord(
    "ListsRecord", n="i64", ns="i64", n_pairs="i64", n_members="i64", lower="i64[n]", upper="i64[n]", stop="i64[1]",
    adj_ptr="i64[n + 1]", adj="i64[max(n_pairs, 1)]", member_ptr="i64[ns + 1]", member="i64[n_members]")

search_at, lists_at = SEARCH.at, LISTS.at


@native("i64(i64, i64, i64, i64)")
def count_pairs(slo, shi, n, ns):
    """Ordered pairs of buffers that meet."""
    a, b = i64s(slo, n), i64s(shi, n)
    live, born = np.zeros(ns + 1, np.int64), np.zeros(ns + 2, np.int64)
    for i in range(n):
        live[a[i]] += 1
        live[b[i]] -= 1
        born[a[i] + 1] += 1
    for s in range(ns):
        live[s + 1] += live[s]
        born[s + 1] += born[s]
    total = np.int64(0)
    for i in range(n):
        total += live[a[i]] - 1 + born[b[i]] - born[a[i] + 1]
    return total


@native("i64(i64)")
def fill_lists(address):
    """CSR lists adj and member of a LISTS record.  1 when `stop` ended it."""
    r = lists_at(address)
    a, b, stop = r.lower, r.upper, r.stop
    sp, sm = members_csr(a, b, r.n, r.ns, stop)
    bp, by = births_csr(a, r.n, r.ns)
    p, out = r.adj_ptr, r.adj
    p[0] = 0
    for i in range(r.n):
        p[i + 1] = p[i] + sp[a[i] + 1] - sp[a[i]] - 1 + bp[b[i]] - bp[a[i] + 1]
    for i in range(r.n):
        if stop[0] != 0:
            return 1
        q = p[i]
        for k in range(sp[a[i]], sp[a[i] + 1]):
            if sm[k] != i:
                out[q] = sm[k]
                q += 1
        for k in range(bp[a[i] + 1], bp[b[i]]):
            out[q] = by[k]
            q += 1
    for s in range(r.ns + 1):
        r.member_ptr[s] = sp[s]
    for k in range(sp[r.ns]):
        r.member[k] = sm[k]
    return 0


# ---------------------------------------------------------------- placing, and taking back
@exact
def _place(s, i, o):
    """Put i at offset o; returns 1 when a border between two sections became free."""
    c, z = s.count, s.size[i]
    s.offset[i] = o
    # larger than any offset, so that a placed buffer never has the least one
    s.least[i] += BIG
    s.placed[c.placed] = i
    c.placed += 1
    for x in range(s.lower[i], s.upper[i]):
        s.total[x] -= z
    split = 0
    for x in range(s.lower[i] + 1, s.upper[i]):
        s.crossing[x] -= 1
        split |= s.crossing[x] == 0
    return split


@exact
def _undo(s, f):
    """Rewind to the state in which frame f had placed nothing."""
    c, fr = s.count, s.frame
    while c.placed > fr[f].n_placed:
        c.placed -= 1
        i = s.placed[c.placed]
        z = s.size[i]
        s.offset[i] = -1
        s.least[i] -= BIG
        for x in range(s.lower[i], s.upper[i]):
            s.total[x] += z
        for x in range(s.lower[i] + 1, s.upper[i]):
            s.crossing[x] += 1
    while c.lifts > fr[f].n_lifts:
        c.lifts -= 1
        t = s.lifts[c.lifts]
        s.least[t.buffer] = t.least
    while c.floors > fr[f].n_floors:
        c.floors -= 1
        t = s.floors[c.floors]
        s.floor[t.section], s.floor_of[t.section] = t.floor, t.buffer


@exact
def _lift_neighbours(s, i, h):
    """Raise the lowest possible offset of unplaced neighbours of i to h; returns (was there one, their first section,
    end)."""
    lo, hi, above = s.lower[i], s.upper[i], 0
    n, stamp = s.count.lifts, s.count.stamp
    for k in range(s.adj_ptr[i], s.adj_ptr[i + 1]):
        j = s.adj[k]
        o = s.least[j]
        above |= o < BIG
        if o < h:
            s.lifts[n].buffer = j
            s.lifts[n].least = o
            n += 1
            s.least[j] = h
            s.lifted_at[j] = stamp
            lo = min(lo, s.lower[j])
            hi = max(hi, s.upper[j])
    s.count.lifts = n
    return above, lo, hi


@exact
def _least_in(s, x, enough):
    """(least offset of the unplaced buffers of section x, one that has it); stops at the first that is <= enough."""
    v, w = BIG, np.int64(-1)
    for k in range(s.member_ptr[x], s.member_ptr[x + 1]):
        j = s.member[k]
        if s.least[j] < v:
            v, w = s.least[j], j
            if v <= enough:
                break
    return (np.int64(0), w) if w < 0 else (v, w)


@exact
def _raise_floors(s, i, lo, hi):
    """Update the lowest possible offsets of sections [lo, hi) after i was placed.  1: done; 0: some section cannot hold
    its unplaced bytes; -1: the trail is full."""
    o, ok, stamp = s.offset[i], 1, s.count.stamp
    h = o + s.size[i]
    for x in range(lo, hi):
        j = s.floor_of[x]
        inside = s.lower[i] <= x < s.upper[i]
        if not inside and (j < 0 or s.lifted_at[j] != stamp):
            continue
        n = s.count.floors
        if n >= s.n_floors:
            return -1
        s.floors[n].section = x
        s.floors[n].floor = s.floor[x]
        s.floors[n].buffer = j
        s.count.floors = n + 1
        if s.total[x] == 0:
            s.floor[x], s.floor_of[x] = 0, -1
            continue
        s.floor[x], s.floor_of[x] = _least_in(s, x, h if inside else s.floor[x])
        if max(s.floor[x], o) + s.total[x] > s.cap:
            ok = 0
            break
    return ok


# ---------------------------------------------------------------- what may be placed
@exact
def _candidate(s, f):
    """The place in the list of frame f of the unplaced buffer with the least (offset, place) beyond (key, pos); -1."""
    key, pos, passed = s.frame[f].key, s.frame[f].pos, s.frame[f].passed
    best, best_o, least_top = np.int64(-1), BIG, BIG
    for k in range(s.frame[f].first, s.frame[f].end):
        i = s.list[k]
        out = i < 0
        i = ~i if out else i
        o = s.least[i]
        least_top = min(least_top, o + s.size[i])
        if key <= o < best_o and (o > key or k > pos) and not (out and o == passed):
            best, best_o = k, o
    return best if best_o < least_top else np.int64(-1)


@exact
def _sections_hold(s, lo, hi, o):
    """Whether the unplaced bytes of every section of [lo, hi) fit at or above offset o."""
    bad = 0
    for x in range(lo, hi):
        bad |= max(s.floor[x], o) + s.total[x] > s.cap
    return bad == 0


@exact
def _room_above(s, i, h):
    """Whether the unplaced bytes of all sections of buffer i fit above offset h."""
    z = s.size[i]
    for x in range(s.lower[i], s.upper[i]):
        rest = s.total[x] - z
        if rest > 0 and h + rest > s.cap:
            return False
    return True


# ---------------------------------------------------------------- parts
@exact
def _next_part(s, p):
    """Sections [lo, hi) of the next part below frame p; (0, 0) when what is next is empty."""
    fr = s.frame
    lo, hi = fr[p].next, fr[p].next_end
    if fr[p].split:
        hi = lo + 1
        while hi < fr[p].next_end and s.crossing[hi] > 0:
            hi += 1
    fr[p].next = hi
    if hi == lo + 1 and s.total[lo] == 0:
        return np.int64(0), np.int64(0)
    return lo, hi


@exact
def _before(s, i, j):
    """Whether buffer i ranks before j: larger keys first, then the smaller number."""
    for c in range(3):
        if s.key[i].by[c] != s.key[j].by[c]:
            return s.key[i].by[c] > s.key[j].by[c]
    return i < j


@exact
def _rank(s, f):
    """Sort the list of frame f by what is unplaced now, in the order of the rule's keys."""
    m0, m1 = s.frame[f].first, s.frame[f].end
    t = 2 if s.rule == WAT else 0
    w = 0 if s.rule == WAT else 1 if s.rule == TWA else 2
    for k in range(m0, m1):
        i = max(s.list[k], ~s.list[k])
        most = np.int64(0)
        for x in range(s.lower[i], s.upper[i]):
            most = max(most, s.total[x])
        by = s.key[i].by
        by[t], by[w], by[3 - t - w] = most, s.width[i], float(s.size[i]) * s.width[i]
    gap = 1
    while gap < (m1 - m0) // 3:
        gap = 3 * gap + 1
    while gap > 0:                              # Shell sort: lists come almost sorted
        for k in range(m0 + gap, m1):
            x, r = s.list[k], k
            i = max(x, ~x)
            while r >= m0 + gap and _before(s, i, max(s.list[r - gap], ~s.list[r - gap])):
                s.list[r] = s.list[r - gap]
                r -= gap
            s.list[r] = x
        gap //= 3


@exact
def _list_members(s, p, f):
    """Frame f gets the list of its parent p, or one of its own; False when the lists are full.

    A list of its own complements the members that were passed over at offset key; pos is before its first."""
    fr, c = s.frame, s.count
    first, end, at, top = fr[p].first, fr[p].end, fr[p].key, c.list
    if fr[f].lo == fr[p].lo and fr[f].hi == fr[p].hi:
        # else most members are placed, and a list of its own without them is faster
        if 2 * (fr[p].left - 1) > end - first:
            fr[f].first, fr[f].end, fr[f].left = first, end, fr[p].left - 1
            return True
    if top + end - first > s.n_list:
        return False
    fr[f].first = top
    for k in range(first, end):
        x = s.list[k]
        i = max(x, ~x)
        if s.offset[i] < 0 and s.lower[i] < fr[f].hi and fr[f].lo < s.upper[i]:
            gone = s.least[i] == at and (k <= fr[p].pos or x < 0 and fr[p].passed == at)
            s.list[top] = ~i if gone else i
            top += 1
    fr[f].end, fr[f].left = top, top - fr[f].first
    fr[f].pos, fr[f].passed = fr[f].first - 1, at
    c.list = top
    return True


@exact
def _open_part(s, p):
    """A frame for the next part below frame p, or below its nearest ancestor that has one: (its number, GO_ON), or
    (0, the status that ends the search)."""
    fr, c = s.frame, s.count
    while True:
        while p >= 0 and fr[p].next >= fr[p].next_end:
            p = fr[p].parent
        if p < 0:
            return np.int64(0), FOUND
        lo, hi = _next_part(s, p)
        if lo != hi:
            break
    c.frames += 1
    f = c.frames
    fr[f].parent, fr[f].lo, fr[f].hi = p, lo, hi
    fr[f].key, fr[f].pos, fr[f].passed = fr[p].key, fr[p].pos, fr[p].passed
    fr[f].list_top = c.list
    if not _list_members(s, p, f):
        return np.int64(0), TRAIL_FULL
    if s.rule != KEEP and (p == 0 or hi - lo < fr[p].hi - fr[p].lo):
        _rank(s, f)
    fr[f].above, fr[f].n_lifts, fr[f].n_floors, fr[f].n_placed = 1, c.lifts, c.floors, c.placed
    return f, GO_ON


@exact
def _decide(s, f):
    """Place the next candidate of frame f, or of its nearest ancestor that has one left and holds with it: (the frame
    that placed one, GO_ON), or (0, the status that ends the search)."""
    fr, c = s.frame, s.count
    while True:
        k = _candidate(s, f)
        i = max(s.list[k], ~s.list[k]) if k >= 0 else k
        ok = k >= 0 and fr[f].above == 1
        if ok and s.least[i] > fr[f].key:       # at key itself this was checked when the frame was made
            ok = _sections_hold(s, fr[f].lo, fr[f].hi, s.least[i])
        if not ok:
            f = fr[f].parent
            if f == 0:
                return np.int64(0), INFEASIBLE
            _undo(s, f)
            c.frames = f
            c.list = fr[f].end if fr[f].first >= fr[f].list_top else fr[f].list_top
            continue
        c.nodes += 1
        if c.nodes > s.node_limit or s.stop[0] != 0:
            return np.int64(0), NODE_LIMIT
        o = s.least[i]
        h = o + s.size[i]
        fr[f].key, fr[f].pos = o, k
        if h > s.cap or not _room_above(s, i, h):
            continue
        split = _place(s, i, o)
        c.most_placed = max(c.most_placed, c.placed)
        c.stamp += 1
        fr[f].above, lo, hi = _lift_neighbours(s, i, h)
        holds = _raise_floors(s, i, lo, hi)
        if holds < 0:
            return np.int64(0), TRAIL_FULL
        if holds:
            fr[f].next, fr[f].next_end, fr[f].split = fr[f].lo, fr[f].hi, split
            return f, GO_ON
        _undo(s, f)


# ---------------------------------------------------------------- the search
@exact
def _begin(s):
    """Nothing placed: bytes per section, buffers across each border, one buffer of each section.  Frame 0 stands for
    that; its one part is everything."""
    for i in range(s.n):
        if s.stop[0] != 0:
            return
        s.list[i], s.offset[i] = s.order[i], -1
        for x in range(s.lower[i], s.upper[i]):
            s.total[x] += s.size[i]
            s.floor_of[x] = i
        for x in range(s.lower[i] + 1, s.upper[i]):
            s.crossing[x] += 1
    fr, c = s.frame, s.count
    fr[0].parent, fr[0].lo, fr[0].hi, fr[0].first, fr[0].end, fr[0].key, fr[0].pos = -1, 0, s.ns, 0, s.n, 0, -1
    fr[0].next, fr[0].next_end, fr[0].split, fr[0].left, fr[0].passed = 0, s.ns, 1, s.n + 1, -1
    c.lifts, c.floors, c.placed, c.list, c.frames, c.stamp = 0, 0, 0, s.n, 0, 0


@native("i64(i64)")
def search(address):
    """FOUND with the offsets of a SEARCH record, INFEASIBLE (proved), NODE_LIMIT or TRAIL_FULL.

    order: buffers, best rank first; rule: how parts are ranked anew, or KEEP; stop: a word, the search ends as at its
    limit once it is not 0; nodes: search nodes; most_placed: most buffers placed at once."""
    s = search_at(address)
    _begin(s)
    if s.stop[0] != 0:                          # the lists may be incomplete
        return NODE_LIMIT
    if not _sections_hold(s, 0, s.ns, 0):
        return INFEASIBLE
    f, status = np.int64(0), GO_ON
    while True:
        f, status = _open_part(s, f)
        if status != GO_ON:
            return status
        f, status = _decide(s, f)
        if status != GO_ON:
            return status


KERNELS = (count_pairs, fill_lists, search)
Outcome = collections.namedtuple("Outcome", "status offsets nodes placed")


class CanonicalSearch:
    """The search on one instance; the lists are built once and serve every capacity and every rank order."""

    def __init__(self, inst, stop=NEVER):
        self.inst, n, ns = inst, inst.n, inst.ns
        n_pairs = count_pairs(inst.slo, inst.shi, n, ns)
        self.possible = n_pairs <= MAX_PAIRS            # else the lists are too large, or time was up before they stood
        if not self.possible:
            return
        lists = LISTS.of(n=n, ns=ns, lower=inst.slo, upper=inst.shi, stop=stop, n_pairs=n_pairs,
                         n_members=int((inst.shi - inst.slo).sum()))
        self.possible = fill_lists(lists) == 0
        self.adj_ptr, self.adj = lists.adj_ptr, lists.adj
        self.problem = dict(n=n, ns=ns, lower=inst.slo, upper=inst.shi, size=inst.size, width=inst.hi - inst.lo,
                            adj_ptr=lists.adj_ptr, adj=lists.adj, member_ptr=lists.member_ptr, member=lists.member)

    def solve(self, cap, order, node_limit, rule=KEEP, stop=NEVER):
        """Outcome with ties broken by `order`, a permutation, or in every part anew by `rule`.

        offsets: None unless FOUND; nodes: search nodes; placed: most buffers that were placed at once."""
        n, ns = self.inst.n, self.inst.ns
        s = SEARCH.of(**self.problem, order=order, rule=rule, cap=int(cap), node_limit=int(node_limit), stop=stop,
                      n_list=min(n * (n + 3) // 2 + 64, MAX_TRAIL), n_floors=min(ns * (n + 1) + 1, MAX_TRAIL))
        status, count = search(s), s.count[0]
        return Outcome(status, s.offset if status == FOUND else None, int(count["nodes"]), int(count["most_placed"]))
