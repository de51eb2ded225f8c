"""ggml's best-fit free list, in chunks, on flat int64 memory.

One allocator is a run of words; several allocators (one per buffer type) lie one behind the other.

    word   0         1               2           3           4           5..7     8...
           n_chunks  max_chunk_size  cap_chunks  cap_blocks  max_blocks  (spare)  chunk 0, chunk 1, ...
    chunk  n_blocks  max_size  offs[cap_blocks]  size[cap_blocks]

    address   0        offs[0]     offs[1]                offs[n-1]
              |  used  |  free 0   |  ..used..  | free 1 |  used  |  free n-1: the untouched tail ...

Free blocks are sorted by address, but for empty ones, and never touch.  ggml's limits of 256 blocks and of 1024
logged tensors do not exist here: the caller sizes `cap_blocks` for the number of allocations alive, which always
suffices.
"""
import numpy as np

from ggjit.ops.native.jit import exact

HEAD = 8                        # words before the first chunk
CHUNK_HEAD = 2                  # words before a chunk's blocks
MAX_CHUNKS = 16                 # GGML_VBUFFER_MAX_CHUNKS; the last one takes whatever is left
UNBOUNDED = (1 << 62) - 1       # bytes; stands for ggml's SIZE_MAX/2
N_CHUNKS, MAX_CHUNK, CAP_CHUNKS, CAP_BLOCKS, MAX_BLOCKS = range(5)
FULL = -1                       # returned in place of an address where nothing fits


def state_words(cap_chunks, cap_blocks):
    """Number of words that the state of one allocator takes."""
    return HEAD + cap_chunks * (CHUNK_HEAD + 2 * cap_blocks)


def new_states(n, cap_blocks, max_size=None, cap_chunks=None):
    """Memory of `n` allocators without any chunk.  max_size: bytes of a chunk per allocator, None without limit."""
    limits = [UNBOUNDED if m is None else min(int(m), UNBOUNDED) for m in (max_size or [None] * n)]
    cap_chunks = cap_chunks or (1 if min(limits, default=UNBOUNDED) == UNBOUNDED else MAX_CHUNKS)
    words = state_words(cap_chunks, cap_blocks)
    st = np.empty(max(n, 1) * words, np.int64)
    for i, limit in enumerate(limits):
        st[i * words:i * words + HEAD] = 0, limit, cap_chunks, cap_blocks, 0, 0, 0, 0
    return st, words


@exact
def chunk_at(st, a, c):
    """First word of chunk c of the allocator at word a."""
    return a + HEAD + c * (CHUNK_HEAD + 2 * st[a + CAP_BLOCKS])


@exact
def reset_to_block(st, a, offs, size):
    """One chunk holding one free block, as the 2023 tensor allocator starts; keeps max_size."""
    k = chunk_at(st, a, 0)
    if st[a + N_CHUNKS] == 0:
        st[k + 1] = 0
    st[a + N_CHUNKS] = 1
    st[k] = 1
    st[k + CHUNK_HEAD] = offs
    st[k + CHUNK_HEAD + st[a + CAP_BLOCKS]] = size


@exact
def _new_chunk(st, a, size):
    c = st[a + N_CHUNKS]
    if c >= st[a + CAP_CHUNKS]:
        return FULL
    k = chunk_at(st, a, c)
    st[k] = 1
    st[k + 1] = 0
    st[k + CHUNK_HEAD] = 0
    # one tensor above the limit gets a chunk of its own size; the last possible chunk is unbounded
    room = max(size, st[a + MAX_CHUNK])
    if c == MAX_CHUNKS - 1:
        room = UNBOUNDED
    st[k + CHUNK_HEAD + st[a + CAP_BLOCKS]] = room
    st[a + N_CHUNKS] = c + 1
    return c


@exact
def _remove(st, k, cap, i):
    o = k + CHUNK_HEAD
    for j in range(i, st[k] - 1):
        st[o + j] = st[o + j + 1]
        st[o + cap + j] = st[o + cap + j + 1]
    st[k] -= 1


@exact
def _hole(st, a, size):
    """(chunk, block) of the best hole that is not a chunk's last block.

    Within a chunk the smallest that fits, on ties the later address; among chunks the last one that has any: ggml
    starts the best size anew in every chunk.
    """
    cap = st[a + CAP_BLOCKS]
    chunk, block = -1, -1
    for c in range(st[a + N_CHUNKS]):
        k = chunk_at(st, a, c)
        s = k + CHUNK_HEAD + cap
        best = np.int64(UNBOUNDED)
        for i in range(st[k] - 1):
            if size <= st[s + i] <= best:
                chunk, block, best = c, i, st[s + i]
    return chunk, block


@exact
def _tail(st, a, size):
    """(chunk, block) of the last block to grow into: least growth first, then exact, then least waste."""
    cap = st[a + CAP_BLOCKS]
    chunk, block = -1, -1
    best = -np.int64(UNBOUNDED)
    for c in range(st[a + N_CHUNKS]):
        k = chunk_at(st, a, c)
        i = st[k] - 1
        if i < 0:
            continue
        reuse = st[k + 1] - st[k + CHUNK_HEAD + i] - size       # < 0: bytes the chunk grows by
        better = (best < 0 and reuse > best) or (0 <= reuse < best)
        if st[k + CHUNK_HEAD + cap + i] >= size and better:
            chunk, block, best = c, i, reuse
    return chunk, block


@exact
def list_alloc(st, a, size):
    """Take `size` bytes; returns (chunk, offs), offs FULL when no block, tail or new chunk can hold them."""
    chunk, block = _hole(st, a, size)
    if block < 0:
        chunk, block = _tail(st, a, size)
    if block < 0:
        chunk, block = _new_chunk(st, a, size), 0
        if chunk < 0:
            return np.int64(-1), np.int64(FULL)
    k = chunk_at(st, a, chunk)
    cap = st[a + CAP_BLOCKS]
    o = k + CHUNK_HEAD + block
    offs = st[o]
    st[o] += size
    st[o + cap] -= size
    if st[o + cap] == 0:
        _remove(st, k, cap, block)
    if offs + size > st[k + 1]:
        st[k + 1] = offs + size
    return np.int64(chunk), offs


@exact
def list_free(st, a, chunk, offs, size):
    """Give [offs, offs + size) of a chunk back: merge with the first neighbour in address order, else insert.

    Returns False when the list has no room for another block (cannot happen with cap_blocks >= live + 1).
    """
    k = chunk_at(st, a, chunk)
    cap = st[a + CAP_BLOCKS]
    o = k + CHUNK_HEAD
    s = o + cap
    n = st[k]
    for i in range(n):
        if st[o + i] + st[s + i] == offs:
            st[s + i] += size
            if i < n - 1 and st[o + i] + st[s + i] == st[o + i + 1]:
                st[s + i] += st[s + i + 1]
                _remove(st, k, cap, i + 1)
            return True
        if offs + size == st[o + i]:
            st[o + i] = offs
            st[s + i] += size
            if i > 0 and st[o + i - 1] + st[s + i - 1] == offs:
                st[s + i - 1] += st[s + i]
                _remove(st, k, cap, i)
            return True
    if n >= cap:
        return False
    p = 0                       # from the front: empty blocks may lie behind larger addresses
    while p < n and st[o + p] < offs:
        p += 1
    for i in range(n, p, -1):
        st[o + i] = st[o + i - 1]
        st[s + i] = st[s + i - 1]
    st[o + p] = offs
    st[s + p] = size
    st[k] = n + 1
    if n + 1 > st[a + MAX_BLOCKS]:
        st[a + MAX_BLOCKS] = n + 1
    return True
