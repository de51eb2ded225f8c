"""Jobs: a kernel over rows that belongs to no plan, such as the quantisation of an array.

    run(address, n_elements, params)     ->  one NODE row, walked by the thread pool: Ctrl-C works meanwhile

The kernel finds its parameters, 64-bit integers, in the NODE row (`param`) and takes rows in chunks (`next_chunk`).
"""
import numpy as np

from ggjit.ops.core.record import N_KERNEL, N_NEXT, N_PARAMS, N_TASKS, WORD, node_words
from ggjit.ops.native.jit import exact
from ggjit.ops.native.mem import ld_i64
from ggjit.ops.native.node import LINE, next_rows

CHUNK_ELEMENTS = 1 << 14        # elements of a chunk: 50 ms for the slowest quantiser
LEAST_SHARED = 1 << 16          # elements; fewer are done before other threads are awake

walk = None                     # walk(row, share): by all threads or one; set by engine/cpu/thread_pool.py


def run(address, n_elements, params):
    """Call the kernel at `address`, on all threads if there is enough work, else on this one; not where there is no
    element: rows without one may be more than can be counted through.  Errors: what signal handlers raise."""
    if n_elements == 0:
        return
    n = node_words(0)
    store = np.zeros(n + 8, np.int64)
    skip = -(store.__array_interface__["data"][0] // WORD) % 8          # rows start at cache lines
    row = store[skip:skip + n]
    row[N_KERNEL], row[N_NEXT], row[N_TASKS] = address, n * WORD, 1
    row[N_PARAMS:N_PARAMS + len(params)] = params
    walk(row, n_elements >= LEAST_SHARED)


@exact
def param(node, i):
    """Parameter i of the job."""
    return ld_i64(node + WORD * (N_PARAMS + i))


@exact
def rows_at_once(k):
    """Rows of k elements a thread takes at a time: a power of two, so that many short rows are whole cache lines."""
    rows, most = 1, min(CHUNK_ELEMENTS // max(k, 1), LINE)
    while 2 * rows <= most:
        rows *= 2
    return rows if rows < LINE else CHUNK_ELEMENTS // max(k, 1) // LINE * LINE


@exact
def next_chunk(node, ith, nth, sync, k, rows):
    """First row of this thread's next chunk; `rows` or more when nothing is left."""
    return next_rows(node, ith, nth, sync, rows_at_once(k), rows)
