"""Offsets in several chunks, for devices that limit the size of a buffer: the sum of the chunks is as small as
possible.

    address   |      chunk 0      |      chunk 1      | chunk 2 ...       limit bytes each, laid end to end
              | a |   b   | c |   |    d     |  e |   |
                              ^ d would cross the border: it starts behind it

First fit over that address line, in several orders, with borders that no buffer may cross.  A buffer larger than the
limit has a chunk of its own size, as in ggml, at whose other steps smaller ones may lie.  The best of these is then
planned again, chunk by chunk, by `plan_offsets`.
"""
import numpy as np

from ggjit.alloc.ggml.free_list import MAX_CHUNKS
from ggjit.alloc.offsets import greedy
from ggjit.alloc.offsets.planners import Clock, plan_offsets
from ggjit.alloc.offsets.sections import Instance
from ggjit.ops.native.jit import i64s, native


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64)")
def _first_fit(order, lower, upper, size, n, off, border, n_chunks):
    """Place in `order` at the lowest gap that no border cuts; border: n_chunks + 1 addresses from 0.

    Returns 0, or 1 when a buffer finds no room."""
    q, a, b, z, o = i64s(order, n), i64s(lower, n), i64s(upper, n), i64s(size, n), i64s(off, n)
    edge, by = i64s(border, n_chunks + 1), np.empty(n, np.int64)
    for m in range(n):
        i = q[m]
        cur, c = np.int64(0), 0
        for k in range(m + 1):                  # those placed, by address, and the room above all of them
            j = by[k] if k < m else np.int64(-1)
            if j >= 0 and (a[j] >= b[i] or a[i] >= b[j]):
                continue
            while c < n_chunks and cur + z[i] > edge[c + 1]:
                c += 1
                cur = max(cur, edge[c])
            if c == n_chunks:
                return 1
            if j < 0 or o[j] - cur >= z[i]:
                break
            cur = max(cur, o[j] + z[j])
        o[i] = cur
        k = m
        while k > 0 and o[by[k - 1]] > cur:
            by[k] = by[k - 1]
            k -= 1
        by[k] = i
    return 0


def _large_chunks(lo, hi, size, limit):
    """[members] of the chunks that buffers above the limit need: those that never meet share one."""
    chunks = []
    for i in sorted(np.flatnonzero(size > limit).tolist(), key=lambda i: -size[i]):
        for members in chunks:
            if all(hi[i] <= lo[j] or hi[j] <= lo[i] for j in members):
                members.append(i)
                break
        else:
            chunks.append([i])
    return chunks


def _in_chunks(inst, order, large, limit):
    """(chunk, offset) per buffer by first fit in `order`, or None when MAX_CHUNKS do not suffice."""
    rooms = [int(inst.size[members[0]]) for members in large]
    rooms += [limit] * (MAX_CHUNKS - len(rooms))
    border, off = np.concatenate([[0], np.cumsum(rooms)]).astype(np.int64), np.zeros(inst.n, np.int64)
    if _first_fit(order, inst.lo, inst.hi, inst.size, inst.n, off, border, len(rooms)):
        return None
    chunk = np.searchsorted(border, off, side="right") - 1
    return chunk, off - border[chunk]


def _sizes(inst, chunk, offs):
    """Bytes of every chunk up to the last one used."""
    out = np.zeros(int(chunk.max()) + 1, np.int64)
    np.maximum.at(out, chunk, offs + inst.size)
    return out


def plan_chunks(lower, upper, size, flat, limit, alignment=1, time_limit=1.0):
    """(chunk per buffer, offset in it, [bytes of each chunk]), or None when ggml's number of chunks does not suffice.
    Empty buffers lie at the start of chunk 0.

    lower, upper: half-open steps; size: bytes; flat: offsets of a layout in one piece; limit: bytes of a chunk;
    time_limit: seconds.  Sizes are padded and the limit is rounded down to the alignment.

    >>> plan_chunks([0, 0, 1], [1, 2, 2], [8, 8, 8], [0, 8, 0], limit=8)[2]
    [8, 8]
    """
    clock = Clock(time_limit)
    lower, upper, size, flat = (np.asarray(x, np.int64) for x in (lower, upper, size, flat))
    used = np.flatnonzero(size)
    limit = max(limit & -alignment, alignment)
    inst = Instance(lower[used], upper[used], (size[used] + alignment - 1) & -alignment)
    large = _large_chunks(inst.lo, inst.hi, inst.size, limit)
    if not inst.n or len(large) > MAX_CHUNKS:
        return None
    best = None
    for order in (np.argsort(flat[used], kind="stable"), *(greedy.order(inst, name) for name in greedy.ORDERS),
                  *(greedy.rank(inst, name) for name in greedy.RANKS)):
        first = np.array([i for members in large for i in members], np.int64)
        found = _in_chunks(inst, np.concatenate([first, order[~np.isin(order, first)]]), large, limit)
        if found is not None and (best is None or _sizes(inst, *found).sum() < _sizes(inst, *best).sum()):
            best = found
        if clock.left <= 0:
            break
    if best is None:
        return None
    chunk, offs = np.zeros((2, len(size)), np.int64)
    chunk[used], offs[used], sizes = _again(inst, *best, alignment, clock)
    return chunk, offs, sizes


def _again(inst, chunk, offs, alignment, clock):
    """Every chunk planned alone, with its part of the time that is left."""
    sizes = _sizes(inst, chunk, offs).tolist()
    for c, now in enumerate(sizes):
        keep = np.flatnonzero(chunk == c)
        lay = plan_offsets(inst.lo[keep], inst.hi[keep], inst.size[keep], alignment,
                           time_limit=max(clock.left, 0.0) / (len(sizes) - c))
        if lay.peak < now:
            offs[keep], sizes[c] = lay.offsets, lay.peak
    used = np.flatnonzero(sizes)                # chunks that stayed empty are left out
    return np.searchsorted(used, chunk), offs, [sizes[c] for c in used.tolist()]
