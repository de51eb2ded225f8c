"""Canonical search: does a layout within `cap` bytes exist, and which?

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

FOUND, INFEASIBLE, NODE_LIMIT, TRAIL_FULL = 1, 0, -1, -2
KEEP, TWA, WAT, TAW = range(4)  # rules: keep the given order, or rank each part anew
RULES = {"TWA": TWA, "TAW": TAW, "WAT": WAT}        # in the order in which they take turns
MAX_PAIRS = 60_000_000          # overlaps the adjacency lists may hold
MAX_TRAIL = 16_000_000          # words of the section trail and of the member stack
BIG = np.int64(1) << np.int64(62)

# columns of the frame table
PARENT, LO, HI, M0, M1, KEY, POS, HAT, T_MINO, T_SEC, T_OUT, MTOP, NEXT, END, SPLIT, LEFT, PASSED = range(17)
FRAME = 17


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


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64, i64)")
def fill_lists(slo, shi, n, ns, ptr, adj, sp_out, sm_out, stop_):
    """CSR lists: adj[ptr[i]:ptr[i+1]] meets i; sm[sp[s]:sp[s+1]] lives in section s.  1 when `stop` ended it."""
    a, b, stop = i64s(slo, n), i64s(shi, n), i64s(stop_, 1)
    sp, sm = members_csr(a, b, n, ns, stop)
    bp, by = births_csr(a, n, ns)
    p, q = i64s(ptr, n + 1), np.int64(0)
    p[0] = 0
    for i in range(n):
        p[i + 1] = p[i] + sp[a[i] + 1] - sp[a[i]] - 1 + bp[b[i]] - bp[a[i] + 1]
    out = i64s(adj, p[n])
    for i in range(n):
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
    o, m = i64s(sp_out, ns + 1), i64s(sm_out, sp[ns])
    for s in range(ns + 1):
        o[s] = sp[s]
    for k in range(sp[ns]):
        m[k] = sm[k]
    return 0


@exact
def _undo(fr, f, cnt, out, size, a, b, total, cuts, mino, t_mino, secmin, secarg, t_sec, t_out):
    """Rewind to the state in which frame f had placed nothing."""
    while cnt[2] > fr[f, T_OUT]:
        cnt[2] -= 1
        i = t_out[cnt[2]]
        out[i] = -1
        mino[i] -= BIG
        for s in range(a[i], b[i]):
            total[s] += size[i]
        for s in range(a[i] + 1, b[i]):
            cuts[s] += 1
    while cnt[0] > fr[f, T_MINO]:
        cnt[0] -= 1
        mino[t_mino[cnt[0], 0]] = t_mino[cnt[0], 1]
    while cnt[1] > fr[f, T_SEC]:
        cnt[1] -= 1
        s = t_sec[cnt[1], 0]
        secmin[s] = t_sec[cnt[1], 1]
        secarg[s] = t_sec[cnt[1], 2]


@exact
def _candidate(mem, m0, m1, mino, size, key, pos, passed):
    """The place in mem of the unplaced buffer with the least (mino, place) beyond (key, pos), or -1.

    passed: the offset at which complemented members were passed over."""
    best, best_o, least_top = np.int64(-1), BIG, BIG
    for k in range(m0, m1):
        i = mem[k]
        out = i < 0
        i = ~i if out else i
        o = mino[i]
        least_top = min(least_top, o + size[i])
        if key <= o < best_o and (o > key or k > pos) and not (out and o == passed):
            best, best_o = k, o
    return best if best_o < least_top else np.int64(-1)


@exact
def _sections_hold(total, secmin, lo, hi, o, cap):
    """Whether every section of [lo, hi) can take what is left of it at or above offset o."""
    bad = 0
    for s in range(lo, hi):
        bad |= max(secmin[s], o) + total[s] > cap
    return bad == 0


@exact
def _raise_neighbours(i, h, ptr, adj, mino, a, b, touched, stamp, cnt, t_mino):
    """Lift unplaced neighbours of i to h; returns (whether there is one, first section of the lifted, end)."""
    lo, hi, hat = a[i], b[i], 0
    n = cnt[0]
    for k in range(ptr[i], ptr[i + 1]):
        j = adj[k]
        o = mino[j]
        hat |= o < BIG
        if o < h:
            t_mino[n, 0] = j
            t_mino[n, 1] = o
            n += 1
            mino[j] = h
            touched[j] = stamp
            lo = min(lo, a[j])
            hi = max(hi, b[j])
    cnt[0] = n
    return hat, lo, hi


@exact
def _least_in(s, floor, sp, sm, mino):
    """(least offset of the unplaced buffers of section s, one that has it); stops at the first that is <= floor."""
    v, w = BIG, np.int64(-1)
    for k in range(sp[s], sp[s + 1]):
        j = sm[k]
        if mino[j] < v:
            v, w = mino[j], j
            if v <= floor:
                break
    return (np.int64(0), w) if w < 0 else (v, w)


@exact
def _refresh(i, o, h, lo, hi, sp, sm, mino, a, b, total, secmin, secarg, touched, stamp, cap, cnt, t_sec):
    """Bring secmin up to date after i went to o; 1 fine, 0 some section cannot hold its rest, -1 trail full."""
    ok = 1
    for s in range(lo, hi):
        j = secarg[s]
        inside = a[i] <= s < b[i]
        if not inside and (j < 0 or touched[j] != stamp):
            continue
        n = cnt[1]
        if n >= len(t_sec):
            return -1
        t_sec[n, 0] = s
        t_sec[n, 1] = secmin[s]
        t_sec[n, 2] = j
        cnt[1] = n + 1
        if total[s] == 0:
            secmin[s], secarg[s] = 0, -1
            continue
        secmin[s], secarg[s] = _least_in(s, h if inside else secmin[s], sp, sm, mino)
        if max(secmin[s], o) + total[s] > cap:
            ok = 0
            break
    return ok


@exact
def _room_above(i, h, a, b, size, total, cap):
    """Sections of i: whatever is left there has to go above h."""
    for s in range(a[i], b[i]):
        rest = total[s] - size[i]
        if rest > 0 and h + rest > cap:
            return False
    return True


@exact
def _place(i, o, a, b, size, out, mino, total, cuts, t_out, cnt):
    """Put i at offset o; returns 1 when a border between two sections became free."""
    out[i] = o
    mino[i] += BIG                              # a placed buffer is beyond every comparison
    t_out[cnt[2]] = i
    cnt[2] += 1
    for s in range(a[i], b[i]):
        total[s] -= size[i]
    split = 0
    for s in range(a[i] + 1, b[i]):
        cuts[s] -= 1
        split |= cuts[s] == 0
    return split


@exact
def _next_part(fr, p, total, cuts):
    """Sections [lo, hi) of the next part below frame p; (0, 0) when what is next is empty."""
    lo, hi = fr[p, NEXT], fr[p, END]
    if fr[p, SPLIT]:
        hi = lo + 1
        while hi < fr[p, END] and cuts[hi] > 0:
            hi += 1
    fr[p, NEXT] = hi
    if hi == lo + 1 and total[lo] == 0:
        return np.int64(0), np.int64(0)
    return lo, hi


@exact
def _fill_sections(n, a, b, size, out, total, cuts, secarg, stop):
    """Nothing placed: bytes per section, buffers across each border, one buffer of each section."""
    for i in range(n):
        if stop[0] != 0:
            return
        out[i] = -1
        for s in range(a[i], b[i]):
            total[s] += size[i]
            secarg[s] = i
        for s in range(a[i] + 1, b[i]):
            cuts[s] += 1


@exact
def _before(i, j, key):
    """Whether buffer i ranks before j: larger keys first, then the smaller number."""
    for c in range(3):
        if key[i, c] != key[j, c]:
            return key[i, c] > key[j, c]
    return i < j


@exact
def _rank(mem, m0, m1, rule, a, b, size, width, total, key):
    """Sort mem[m0:m1] by what is unplaced now, in the order of the rule's keys."""
    t = 2 if rule == WAT else 0
    w = 0 if rule == WAT else 1 if rule == TWA else 2
    for k in range(m0, m1):
        i = max(mem[k], ~mem[k])
        most = np.int64(0)
        for s in range(a[i], b[i]):
            most = max(most, total[s])
        key[i, t], key[i, w], key[i, 3 - t - w] = most, width[i], float(size[i]) * width[i]
    gap = 1
    while gap < (m1 - m0) // 3:
        gap = 3 * gap + 1
    while gap > 0:                              # Shell sort: lists come almost sorted
        for k in range(m0 + gap, m1):
            x, r = mem[k], k
            i = max(x, ~x)
            while r >= m0 + gap and _before(i, max(mem[r - gap], ~mem[r - gap]), key):
                mem[r] = mem[r - gap]
                r -= gap
            mem[r] = x
        gap //= 3


@exact
def _open_part(fr, p, f, lo, hi, mem, mtop, out, mino, a, b):
    """Frame f for part [lo, hi) below p; returns the new top of the member stack, -1 when it is full.

    A list of its own complements the members that were passed over at offset KEY; POS is before its first."""
    fr[f, PARENT], fr[f, LO], fr[f, HI] = p, lo, hi
    fr[f, KEY], fr[f, POS], fr[f, PASSED] = fr[p, KEY], fr[p, POS], fr[p, PASSED]
    fr[f, MTOP] = mtop
    m0, m1, at = fr[p, M0], fr[p, M1], fr[p, KEY]
    whole = lo == fr[p, LO] and hi == fr[p, HI]
    if whole:
        if 2 * (fr[p, LEFT] - 1) > m1 - m0:     # else worth a list without the placed ones
            fr[f, M0], fr[f, M1], fr[f, LEFT] = m0, m1, fr[p, LEFT] - 1
            return mtop
    top = mtop
    if top + m1 - m0 > len(mem):
        return np.int64(-1)
    for k in range(m0, m1):
        x = mem[k]
        i = max(x, ~x)
        if out[i] < 0 and a[i] < hi and lo < b[i]:
            gone = mino[i] == at and (k <= fr[p, POS] or x < 0 and fr[p, PASSED] == at)
            mem[top] = ~i if gone else i
            top += 1
    fr[f, M0], fr[f, M1], fr[f, LEFT] = mtop, top, top - mtop
    fr[f, POS], fr[f, PASSED] = mtop - 1, at
    return top


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64)")
def search(slo, shi, size_, width_, n, ns, ptr_, adj_, sp_, sm_, order, rule, cap, node_limit, stop_, out_, stats):
    """FOUND with offsets in out, INFEASIBLE (proved), NODE_LIMIT or TRAIL_FULL.  order: buffers, best rank first;
    rule: how parts are ranked anew, or KEEP; stop: a word, the search ends as at its limit once it is not 0;
    stats: nodes, most buffers placed at once."""
    stop = i64s(stop_, 1)
    a, b, size, out = i64s(slo, n), i64s(shi, n), i64s(size_, n), i64s(out_, n)
    ptr, sp, st, width = i64s(ptr_, n + 1), i64s(sp_, ns + 1), i64s(stats, 2), i64s(width_, n)
    adj, sm = i64s(adj_, ptr[n]), i64s(sm_, sp[ns])
    mino, touched = np.zeros(n, np.int64), np.zeros(n, np.int64)
    total, cuts = np.zeros(ns, np.int64), np.zeros(ns + 1, np.int64)
    secmin, secarg = np.zeros(ns, np.int64), np.full(ns, -1, np.int64)
    _fill_sections(n, a, b, size, out, total, cuts, secarg, stop)
    cnt = np.zeros(3, np.int64)                 # lengths of the three trails
    t_mino, t_out = np.empty((ptr[n] + 1, 2), np.int64), np.empty(n + 1, np.int64)
    t_sec = np.empty((min(ns * (n + 1) + 1, MAX_TRAIL), 3), np.int64)
    mem = np.empty(min(n * (n + 3) // 2 + 64, MAX_TRAIL), np.int64)
    fr, key = np.empty((2 * n + 8, FRAME), np.int64), np.empty((n, 3), np.float64)
    q = i64s(order, n)
    for k in range(n):
        mem[k] = q[k]
    mtop = np.int64(n)
    st[0] = st[1] = 0
    if stop[0] != 0:                            # whatever is above may not be whole
        return NODE_LIMIT
    if not _sections_hold(total, secmin, 0, ns, 0, cap):
        return INFEASIBLE
    # frame 0 stands for "nothing placed yet"; its one part is everything
    fr[0, PARENT], fr[0, LO], fr[0, HI], fr[0, M0], fr[0, M1], fr[0, KEY], fr[0, POS] = -1, 0, ns, 0, n, 0, -1
    fr[0, NEXT], fr[0, END], fr[0, SPLIT], fr[0, LEFT], fr[0, PASSED] = 0, ns, 1, n + 1, -1
    p, top, stamp, nodes = 0, 0, 0, 0
    while True:
        # ---- the next part below p, or of the nearest ancestor that has one
        while p >= 0 and fr[p, NEXT] >= fr[p, END]:
            p = fr[p, PARENT]
        if p < 0:
            st[0] = nodes
            return FOUND
        lo, hi = _next_part(fr, p, total, cuts)
        if lo == hi:
            continue
        top += 1
        f = top
        mtop = _open_part(fr, p, f, lo, hi, mem, mtop, out, mino, a, b)
        if mtop < 0:
            return TRAIL_FULL
        if rule != KEEP and (p == 0 or hi - lo < fr[p, HI] - fr[p, LO]):
            _rank(mem, fr[f, M0], fr[f, M1], rule, a, b, size, width, total, key)
        fr[f, HAT], fr[f, T_MINO], fr[f, T_SEC], fr[f, T_OUT] = 1, cnt[0], cnt[1], cnt[2]
        # ---- try candidates of frame f; fall back to ancestors when there is none left
        while True:
            k = _candidate(mem, fr[f, M0], fr[f, M1], mino, size, fr[f, KEY], fr[f, POS], fr[f, PASSED])
            i = max(mem[k], ~mem[k])
            ok = k >= 0 and fr[f, HAT] == 1
            if ok and mino[i] > fr[f, KEY]:     # else checked when the frame was made
                ok = _sections_hold(total, secmin, fr[f, LO], fr[f, HI], mino[i], cap)
            if not ok:
                f = fr[f, PARENT]
                if f == 0:
                    st[0] = nodes
                    return INFEASIBLE
                _undo(fr, f, cnt, out, size, a, b, total, cuts, mino, t_mino, secmin, secarg, t_sec, t_out)
                top = f
                mtop = fr[f, M1] if fr[f, M0] >= fr[f, MTOP] else fr[f, MTOP]
                continue
            nodes += 1
            if nodes > node_limit or stop[0] != 0:
                st[0] = nodes
                return NODE_LIMIT
            o = mino[i]
            h = o + size[i]
            fr[f, KEY], fr[f, POS] = o, k
            if h > cap or not _room_above(i, h, a, b, size, total, cap):
                continue
            split = _place(i, o, a, b, size, out, mino, total, cuts, t_out, cnt)
            st[1] = max(st[1], cnt[2])
            stamp += 1
            fr[f, HAT], s0, s1 = _raise_neighbours(i, h, ptr, adj, mino, a, b, touched, stamp, cnt, t_mino)
            ok = _refresh(i, o, h, s0, s1, sp, sm, mino, a, b, total, secmin, secarg, touched, stamp, cap, cnt,
                          t_sec)
            if ok < 0:
                return TRAIL_FULL
            if ok:
                fr[f, NEXT], fr[f, END], fr[f, SPLIT] = fr[f, LO], fr[f, HI], split
                p = f
                break
            _undo(fr, f, cnt, out, size, a, b, total, cuts, mino, t_mino, secmin, secarg, t_sec, t_out)


KERNELS = (count_pairs, fill_lists, search)
Outcome = collections.namedtuple("Outcome", "status offsets nodes placed")


class CanonicalSearch:
    """The search on one instance; the lists are built once and serve every capacity and every rank order."""

    def __init__(self, inst, stop=NEVER):
        self.inst, n, ns = inst, inst.n, inst.ns
        self.width = inst.hi - inst.lo
        n_pairs = count_pairs(inst.slo, inst.shi, n, ns)
        self.possible = n_pairs <= MAX_PAIRS            # else the lists are too large, or time was up before they stood
        if not self.possible:
            return
        self.ptr, self.adj = np.empty(n + 1, np.int64), np.empty(max(n_pairs, 1), np.int64)
        self.sp, self.sm = np.empty(ns + 1, np.int64), np.empty(int((inst.shi - inst.slo).sum()), np.int64)
        self.possible = fill_lists(inst.slo, inst.shi, n, ns, self.ptr, self.adj, self.sp, self.sm, stop) == 0

    def solve(self, cap, order, node_limit, rule=KEEP, stop=NEVER):
        """Outcome with ties broken by `order`, a permutation, or in every part anew by `rule`.

        offsets: None unless FOUND; nodes: search nodes; placed: most buffers that were placed at once."""
        i, offs, stats = self.inst, np.empty(self.inst.n, np.int64), np.zeros(2, np.int64)
        status = search(i.slo, i.shi, i.size, self.width, i.n, i.ns, self.ptr, self.adj, self.sp, self.sm, order, rule,
                        int(cap), int(node_limit), stop, offs, stats)
        return Outcome(status, offs if status == FOUND else None, *stats.tolist())
