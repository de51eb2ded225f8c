"""The view of a kernel: its NODE row, its share of the work, and the barrier with other threads.

    def kernel(node, ith, nth, sync):           # thread ith of nth; returns a status (record.OK ...)
        x, d = node + SRC0, node + DST          # views: byte addresses of (address, ne[4], nb[4], type)
        ...
        return OK

Rows are taken in chunks from an atomic counter in the NODE row (the loop: row_loops.py), so a descheduled thread delays
no other.  Thread 0 looks for signals between chunks; the others see the abort word.

The sync page is shared by all threads of the pool; each word that is hammered has a cache line of its own:

    byte    0         64             128                192    256    320      328  336  384 ... (engine/cpu/walk.py)
            barrier   generation     abort (status)     deadline poll  interval waits
            count
"""
from ggjit.ops.core.record import (
    N_CHUNK,
    N_DST,
    N_INFO,
    N_PARAMS,
    N_SRC,
    N_WORK,
    V_ADDR,
    V_NB,
    V_NE,
    V_TYPE,
    V_WORDS,
    WORD,
)
from ggjit.ops.native.jit import exact, inline
from ggjit.ops.native.mem import (
    atomic_add,
    call1,
    cycles,
    ld_f32,
    ld_i32,
    ld_i64,
    load_acquire,
    st_i64,
    store_release,
)
from ggjit.ops.native.waiting import pause, sched_yield

# byte offsets of the views inside a NODE row
DST = WORD * N_DST
SRC0, SRC1, SRC2, SRC3, SRC4, SRC5 = (WORD * (N_SRC + V_WORDS * i) for i in range(6))
CHUNK, CHUNK2 = WORD * N_CHUNK, WORD * (N_CHUNK + 1)

# byte offsets in the sync page
S_COUNT, S_GENERATION, S_ABORT, S_DEADLINE, S_POLL, S_INTERVAL = 0, 64, 128, 192, 256, 320
S_WAITED, S_WAITED_AT = 328, 336                # cycles that threads waited long; the barrier counted last
SPINS_BEFORE_YIELD = 2000
LINE = 64                                       # bytes of a cache line
# from so much work on the rows of a cache line on, two writers of the line do not matter
LINE_NANOSECONDS = 500


# ---------------------------------------------------------------- reading a view
@inline
def addr(view):
    return ld_i64(view + WORD * V_ADDR)


@inline
def ne(view, i):
    return ld_i64(view + WORD * (V_NE + i))


@inline
def nb(view, i):
    return ld_i64(view + WORD * (V_NB + i))


@inline
def type_id(view):
    return ld_i64(view + WORD * V_TYPE)


@inline
def n_rows(view):
    """Rows along ne0: ne1 * ne2 * ne3."""
    return ne(view, 1) * ne(view, 2) * ne(view, 3)


@inline
def row_index(view, r):
    """(i1, i2, i3) of flat row `r`."""
    n1 = ne(view, 1)
    if r < n1:                                  # the common case, without the two divisions
        return r, 0, 0
    q = r // n1
    n2 = ne(view, 2)
    i3 = q // n2
    return r - q * n1, q - i3 * n2, i3


@inline
def next_plane(i2, i3, n2):
    """(i1, i2, i3) of the first row of the plane after plane (i2, i3)."""
    return (0, i2 + 1, i3) if i2 + 1 < n2 else (0, 0, i3 + 1)


@inline
def row_addr(view, i1, i2, i3):
    """Address of row (i1, i2, i3)."""
    return addr(view) + i1 * nb(view, 1) + i2 * nb(view, 2) + i3 * nb(view, 3)


@inline
def row_addr_mod(view, i1, i2, i3):
    """The same where the view is repeated along dims 1..3 (ggml's broadcast by modulo)."""
    return row_addr(view, i1 % ne(view, 1), i2 % ne(view, 2), i3 % ne(view, 3))


@inline
def param_i32(node, i):
    return ld_i32(node + WORD * N_PARAMS + 4 * i)


@inline
def param_f32(node, i):
    return ld_f32(node + WORD * N_PARAMS + 4 * i)


@inline
def work(node):
    """Address of the node's scratch memory, 64-byte aligned; shared by all threads."""
    return ld_i64(node + WORD * N_WORK)


@inline
def fail(node, status, value):
    """Leave `value` (an index out of range...) for the error message; returns `status`."""
    st_i64(node + WORD * N_INFO, value)
    return status


# ---------------------------------------------------------------- threads
@exact
def wait_while(word, mask, value, sync, counts):
    """Wait while the bits `mask` of the word are `value`.

    A thread that waits long yields, and does not sleep: docs/measured.md, "Beside a busy process".  counts: note that
    time (engine/cpu/team.py).
    """
    generation = ld_i64(sync + S_GENERATION)
    n = since = 0
    while load_acquire(word) & mask == value:
        n += 1
        if n < SPINS_BEFORE_YIELD:
            pause()
        else:
            if n == SPINS_BEFORE_YIELD:
                since = cycles()
            sched_yield()
    # of several threads that wait one is counted; where two write at once, either will do
    if counts and since != 0 and ld_i64(sync + S_WAITED_AT) != generation + 1:
        st_i64(sync + S_WAITED_AT, generation + 1)
        st_i64(sync + S_WAITED, ld_i64(sync + S_WAITED) + cycles() - since)


@exact
def meet(sync, nth, counts):
    """Wait until all `nth` threads are here; stores before it are seen by every thread after it.  counts: as above."""
    if nth == 1:
        return
    generation = load_acquire(sync + S_GENERATION)
    if atomic_add(sync + S_COUNT, 1) == nth - 1:
        store_release(sync + S_COUNT, 0)
        store_release(sync + S_GENERATION, generation + 1)
        return
    wait_while(sync + S_GENERATION, -1, generation, sync, counts)


@inline
def barrier(sync, nth):
    """Where threads meet inside a kernel."""
    meet(sync, nth, True)


@exact
def aborted(ith, sync):
    """True once the run is cancelled.  Thread 0 polls for signals when its deadline has passed."""
    if ith == 0:
        now = cycles()
        if now > ld_i64(sync + S_DEADLINE):
            st_i64(sync + S_DEADLINE, now + ld_i64(sync + S_INTERVAL))
            poll = ld_i64(sync + S_POLL)
            if poll != 0 and call1(poll, (sync,)) != 0:
                store_release(sync + S_ABORT, 1)
    return load_acquire(sync + S_ABORT) != 0


@exact
def _next(counter, ith, nth, sync, chunk, n):
    if nth == 1:
        r = ld_i64(counter)
        st_i64(counter, r + chunk)
    else:
        r = atomic_add(counter, chunk)
    if r == 0 or r >= n:
        return r
    return n if aborted(ith, sync) else r


@exact
def next_rows(node, ith, nth, sync, chunk, n):
    """First row of this thread's next chunk; n or more when nothing is left."""
    return _next(node + CHUNK, ith, nth, sync, chunk, n)


@exact
def next_rows2(node, ith, nth, sync, chunk, n):
    """The second phase's counter, for kernels with a barrier inside."""
    return _next(node + CHUNK2, ith, nth, sync, chunk, n)


@inline
def chunk_rows(n, nth):
    """Chunk length for n equal rows: about eight chunks a thread, at least one row."""
    c = n // (nth * 8)
    return c if c > 0 else 1


# A line of memory that two cores write travels between them, about 200 ns each way: no line should have two writers.
@inline
def whole_lines(nbytes):
    """`nbytes` rounded up to whole cache lines."""
    return (nbytes + LINE - 1) // LINE * LINE


@inline
def chunk_of_lines(chunk, row_nbytes, n, nth, nanoseconds=LINE_NANOSECONDS):
    """A chunk of n rows, rounded up so that its row_nbytes a row are whole cache lines.  It is not rounded where
    threads would then get no chunk, unless rows are parts of a line and take less time than moving the line between
    cores.  nanoseconds: work on a row."""
    odd = row_nbytes & LINE - 1
    if nth == 1 or odd == 0:
        return chunk
    rows = LINE // (odd & -odd)
    few = n < rows * nth and (row_nbytes >= LINE or rows * nanoseconds >= LINE_NANOSECONDS)
    return chunk if few else (chunk + rows - 1) // rows * rows


@inline
def own_share(n, ith, nth):
    """(first, end) of the n units that are thread ith's: stretches in the order of the threads, without a counter."""
    return n * ith // nth, n * (ith + 1) // nth
