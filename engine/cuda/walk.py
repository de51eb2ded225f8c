"""A plan as one persistent kernel: a cooperative launch that walks over the plan's launches (ops/cuda/native/walk.py).

    captured graph      kernel | kernel | kernel | ...              a kernel begins when the one before has ended
    walk                |row 0|row 1|wait|row 2| ...                blocks go on without leaving the GPU

`walk_of` says why a plan cannot be walked: a library computes a part of it, a kernel takes too much of a
multiprocessor, the device or the compiler does not serve it.  Such plans are captured as before.
"""
import numpy as np

from ggjit.cuda import walk_check, walk_table
from ggjit.cuda.driver import CudaError, driver
from ggjit.cuda.functions import argument_of, walker_of
from ggjit.ops.core.errors import NotSupported, OutOfMemory
from ggjit.ops.core.record import WORD
from ggjit.ops.cuda.compiler.choice import WALKS
from ggjit.ops.cuda.native import walk
from ggjit.ops.cuda.native.launch import Launch

MOST_SPILLED = 64               # bytes of a thread: what sines of large angles take anyway, and a few


class PlanWalk:
    """`launch(stream)` submits the plan.  rows: the table; n_blocks: of the walker; function: its handle."""

    def __init__(self, rows, counter, function, n_blocks, threads):
        self.rows, self.n_blocks, self._counter, self._function = rows, n_blocks, counter, function
        self._shape = n_blocks, 1, 1, threads, 1, 1, walk_table.shared_nbytes(rows)
        self._argument = argument_of(counter.base + walk_table.COUNTER_NBYTES)

    def launch(self, stream):
        driver().cuLaunchCooperativeKernel(self._function, *self._shape, stream, self._argument[0])

    @property
    def n_waits(self):
        return walk_check.n_waits(self.rows)


def walk_of(plan, left_out):
    """The PlanWalk of a CUDAPlan, or a text that says why it has none.  left_out: launches whose work is done."""
    device = plan.backend.device
    if not WALKS:
        return "the compiler of this process makes no walkers; use GGJIT_CUDA_COMPILER=numba-cuda"
    if not device.cooperative:
        return f"{device.description} has no cooperative launches"
    by_library = next((x.name for k in plan.kernels for x in k.launches if not isinstance(x, Launch)), None)
    if by_library:
        return f"{by_library} computes a part of it"
    by_warpgroups = next((x.name for k in plan.kernels for x in k.launches if x.by_warpgroups), None)
    if by_warpgroups:
        return f"{by_warpgroups} multiplies by warpgroups"
    steps = walk_table.steps(plan, left_out)
    try:
        return _made(plan, steps, *walk.walker_of([step.launch for step in steps]))
    except (CudaError, NotSupported, OutOfMemory) as e:
        return str(e)


def _made(plan, steps, walker, numbers):
    device, backend, cuda = plan.backend.device, plan.backend, driver()
    function, pieces, spilled = walker_of(device, walker)
    if spilled > MOST_SPILLED:
        return f"its kernels together take {spilled} bytes of a thread's memory in blocks of {walker.threads} threads"
    few = next((x.name for x in walker.launches
                if walk_table.n_teams(walker.threads, x, pieces[numbers[x.name, x.block]]) == 0), None)
    if few:
        return f"{few} takes more shared memory than a block has"
    nbytes = walk_table.COUNTER_NBYTES + WORD * walk.ROW_WORDS * len(steps)
    counter = device.buffer_type().alloc_buffer(nbytes)
    rows = walk_table.table(steps, walker, numbers, pieces, counter.base)
    per_multiprocessor = int(cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, walker.threads,
                                                                              walk_table.shared_nbytes(rows)))
    if per_multiprocessor == 0:
        return f"a block of {walker.threads} threads does not fit a multiprocessor"
    n_blocks = per_multiprocessor * device.n_multiprocessors
    planned = [(x.node, x.launch, x.n_stored) for x in steps]
    walk_check.check_table(rows, planned, plan.rows, plan._row_base, walker, n_blocks)
    clear = np.zeros(walk_table.COUNTER_NBYTES // WORD, np.int64)
    backend.send(counter.base, np.concatenate([clear, rows.ravel()]).view(np.uint8))
    return PlanWalk(rows, counter, function, n_blocks, walker.threads)
