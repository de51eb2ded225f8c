"""ggml's best fit for many buffers: the offsets that free_list.py gives with one chunk, without its scans.

    address   | a |  hole x  | b | c |  hole y  | d |   tail without end
    list      a <-> x <-> b <-> c <-> y <-> d <-> tail      in address order: a hole that is given back merges
    tree      holes by (size, the later address first): the first that is large enough is the best

A buffer that is given back leaves its entry as a hole; entries that merge are used again.  The tree is a treap (Seidel
and Aragon, 1996) whose priorities are hashes of the numbers, so equal calls build equal trees.
"""
import numpy as np

from ggjit.ops.core.errors import ParamError
from ggjit.ops.native.jit import exact, i64s, native

NONE = -1
UNSEEN, RELEASED = -1, -2       # markers in place of a buffer's entry


@exact
def _priority(x):
    """A hash of the number (the finaliser of splitmix64)."""
    h = (np.uint64(x) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


@exact
def _first(x, y, offs, size):
    """Whether hole x comes before hole y in the tree."""
    return size[x] < size[y] or size[x] == size[y] and offs[x] > offs[y]


@exact
def _insert(x, root, child, offs, size):
    """Put hole x into the tree.  child: the lower and the higher child of entry e at 2e, 2e + 1; root: where the top
    is."""
    at = root
    while child[at] != NONE and _priority(child[at]) >= _priority(x):
        at = 2 * child[at] + int(_first(child[at], x, offs, size))
    rest, child[at] = child[at], x
    low, high = 2 * x, 2 * x + 1
    while rest != NONE:                         # the subtree that stood there is divided between the two sides of x
        if _first(rest, x, offs, size):
            child[low], low = rest, 2 * rest + 1
            rest = child[low]
        else:
            child[high], high = rest, 2 * rest
            rest = child[high]
    child[low] = child[high] = NONE


@exact
def _remove(x, root, child, offs, size):
    """Take hole x out of the tree."""
    at = root
    while child[at] != x:
        at = 2 * child[at] + int(_first(child[at], x, offs, size))
    a, b = child[2 * x], child[2 * x + 1]
    while a != NONE and b != NONE:
        if _priority(a) >= _priority(b):
            child[at], at = a, 2 * a + 1
            a = child[at]
        else:
            child[at], at = b, 2 * b
            b = child[at]
    child[at] = a if a != NONE else b


@exact
def _smallest(need, root, child, size):
    """The first hole of the tree with `need` bytes, or NONE."""
    best, x = np.int64(NONE), child[root]
    while x != NONE:
        fits = size[x] >= need
        best = x if fits else best
        x = child[2 * x + int(not fits)]
    return best


@exact
def _unlink(x, before, after):
    """Take entry x out of the list of memory in order of addresses."""
    p, q = before[x], after[x]
    before[q] = p
    if p != NONE:
        after[p] = q


@exact
def _link(x, y, before, after):
    """Put entry x into that list in front of y."""
    before[x], after[x] = before[y], y
    if before[y] != NONE:
        after[before[y]] = x
    before[y] = x


@native("i64(i64, i64, i64, i64, i64)")
def best_fit(events, n_ev, size_, n, off):
    """The peak of signed events (+i+1 take, -i-1 release), offsets in off; -1 - i when buffer i is taken twice,
    released before it was taken, or twice, or never taken."""
    ev, need, out = i64s(events, n_ev), i64s(size_, n), i64s(off, n)
    tail, root = n, 2 * n + 2
    offs, size, is_hole = np.empty(n + 1, np.int64), np.empty(n + 1, np.int64), np.zeros(n + 1, np.uint8)
    before, after = np.empty(n + 1, np.int64), np.empty(n + 1, np.int64)
    child, entry = np.empty(2 * n + 3, np.int64), np.full(n, UNSEEN, np.int64)
    spare, n_spare, n_used, n_taken = np.empty(n, np.int64), 0, 0, 0    # numbers of merged entries, used again first
    before[tail], offs[tail], child[root], peak = NONE, 0, NONE, np.int64(0)
    for k in range(n_ev):
        i = abs(ev[k]) - 1
        if ev[k] > 0:
            if entry[i] != UNSEEN:
                return -1 - i
            if n_spare > 0:
                n_spare -= 1
                e = spare[n_spare]
            else:
                e = n_used
                n_used += 1
            x = _smallest(need[i], root, child, size)
            if x != NONE:
                _remove(x, root, child, offs, size)
            else:
                x = tail
            entry[i], offs[e], size[e], is_hole[e] = e, offs[x], need[i], 0
            out[i], peak, n_taken = offs[e], max(peak, offs[e] + need[i]), n_taken + 1
            _link(e, x, before, after)
            offs[x] += need[i]
            if x == tail:
                continue
            size[x] -= need[i]
            if size[x] > 0:
                _insert(x, root, child, offs, size)
            else:
                _unlink(x, before, after)
                spare[n_spare] = x
                n_spare += 1
            continue
        e = entry[i]
        if e < 0:
            return -1 - i
        entry[i] = RELEASED
        for x in (before[e], after[e]):
            if x != NONE and x != tail and is_hole[x] != 0:
                _remove(x, root, child, offs, size)
                _unlink(x, before, after)
                offs[e] = min(offs[e], offs[x])
                size[e] += size[x]
                spare[n_spare] = x
                n_spare += 1
        if after[e] == tail:
            offs[tail] = offs[e]
            _unlink(e, before, after)
            spare[n_spare] = e
            n_spare += 1
        else:
            is_hole[e] = 1
            _insert(e, root, child, offs, size)
    for i in range(n):
        if n_taken < n and entry[i] == UNSEEN:
            return -1 - i
    return peak


def ggml_best_fit(inst, events=None):
    """(peak, offsets) of ggml's online allocator on `events` (+i+1 take, -i-1 release; default: time order).

    Errors: ParamError for events that do not take every buffer once and release it at most once, later."""
    events = inst.events() if events is None else events
    off = np.zeros(inst.n, np.int64)
    peak = best_fit(events, len(events), inst.size, inst.n, off)
    if peak < 0:
        raise ParamError(f"events: buffer {-1 - peak} of those with bytes is not taken once and released at most once "
                         f"after that; list each as +(i + 1), then -(i + 1)")
    return peak, off
