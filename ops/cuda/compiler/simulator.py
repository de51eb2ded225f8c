"""The simulator: launches of kernels that are plain Python functions, on checked memory.  No Numba in it.

One thread of a block runs at a time, as a greenlet, until it waits at a barrier or a warp operation:

    lane 0   ....|wait                ....|wait            the order is shuffled between two waits, so that a missing
    lane 1       ....|wait       ....     |wait            barrier shows
    lane 2            ....|wait ......|done                the threads of one barrier are released together

What is a SimulationFault: an access outside all memory or at a wrong multiple; a barrier that some threads never reach;
a race, that is an access to what another thread wrote since the last barrier of both (in global memory: of a block, and
since the launch began for threads of different blocks; in shared memory also a write over what another thread read).
Addresses are real: simulated device memory is host memory registered with `expose`.
"""
import bisect
import itertools
import random

import numpy as np

from ggjit.ops.core.errors import GgjitError, extra
from ggjit.ops.core.locks import ForkLock

greenlet = extra("greenlet", "test")
WARP = 32
current = greenlet.getcurrent           # the running simulated thread


class SimulationFault(GgjitError, RuntimeError):
    """A kernel accessed memory it must not, or its threads deadlock or race."""


# ---------------------------------------------------------------- memory
_bases, _ends = [], []          # sorted; the ranges never overlap
last = [0, 0]                   # the range accessed last, where most accesses lie


def expose(base, nbytes):
    """Register [base, base + nbytes) as memory that kernels may access."""
    i = bisect.bisect(_bases, base)
    _bases.insert(i, base)
    _ends.insert(i, base + nbytes)


def withdraw(base):
    """Remove the range that begins at `base`."""
    i = bisect.bisect_left(_bases, base)
    del _bases[i], _ends[i]
    last[:] = 0, 0


def check(addr, nbytes, alignment=1):
    """SimulationFault unless the range lies in one exposed piece of memory."""
    i = bisect.bisect(_bases, addr) - 1
    if i < 0 or addr + nbytes > _ends[i]:
        near = "no memory before it" if i < 0 else f"{addr - _bases[i]} in a piece of {_ends[i] - _bases[i]}"
        raise SimulationFault(f"{nbytes} bytes at an address outside all memory ({near})")
    if addr % alignment:
        raise SimulationFault(f"{nbytes} bytes at {addr % alignment} past a multiple of {alignment}")
    last[:] = _bases[i], _ends[i]


# ---------------------------------------------------------------- races
MANY = object()                 # more than one thread read it
# of the launch that runs, one at a time: what the next one clears
written = {}                    # address in global memory -> (thread that wrote it, barriers its block had passed)
constants = []                  # dicts by type: address -> what `ldc_*` read there
_one_at_a_time = ForkLock()


def _race(what, lane, other):
    raise SimulationFault(f"race: thread {lane.number} of block {lane.block.index} {what} thread {other.number} of "
                          f"block {other.block.index} wrote, with no barrier in between")


def wrote(addr, same):
    """The running thread writes global memory at `addr`.  same(): it holds that value already, which does no harm."""
    lane = current()
    block = lane.block
    at = written.get(addr)
    if at is not None and at[0] is not lane and (at[0].block is not block or at[1] == block.epoch) and not same():
        _race("writes what", lane, at[0])
    written[addr] = lane, block.epoch


def reads(addr):
    """The running thread reads global memory at `addr`."""
    lane = current()
    at = written.get(addr)
    if at is not None and at[0] is not lane and (at[0].block is not lane.block or at[1] == lane.block.epoch):
        _race("reads what", lane, at[0])


def wrote_shared(addr, same):
    """The running thread writes shared memory at `addr`."""
    lane = current()
    writer, reader = lane.block.touched.get(addr, (lane, lane))
    if writer is not lane and writer is not None and not same():
        _race("writes what", lane, writer)
    if reader is not lane and reader is not None:
        raise SimulationFault(f"race: thread {lane.number} of block {lane.block.index} writes shared memory that "
                              f"others read, with no barrier in between")
    lane.block.touched[addr] = lane, None


def reads_shared(addr):
    """The running thread reads shared memory at `addr`."""
    lane = current()
    at = lane.block.touched.get(addr)
    if at is None:
        lane.block.touched[addr] = None, lane
        return
    writer, reader = at
    if writer is not lane and writer is not None:
        _race("reads what", lane, writer)
    if reader is not lane:
        lane.block.touched[addr] = writer, lane if reader is None else MANY


# ---------------------------------------------------------------- threads
class SimulatedLane(greenlet.greenlet):
    """A CUDA thread.  It runs from the scheduler's `switch` to its next `wait`."""

    def __init__(self, block, number):
        super().__init__()
        self.block, self.number, self.warp, self.lane = block, number, number // WARP, number % WARP
        self.waits = self.given = self.taken = None

    def run(self):
        np.seterr(all="ignore")
        self.block.launch.kernel(self.block.launch.node)

    def wait(self, what, given=None):
        """Suspend until all threads of the operation `what` wait for it; returns the values they gave."""
        self.waits, self.given = what, given
        self.parent.switch()
        return self.taken


_order = random.Random(0)


class SimulatedBlock:
    """Runs the threads of one block."""

    def __init__(self, launch, index):
        self.launch, self.index = launch, index
        self.pieces = {}
        self.epoch, self.touched = 0, {}        # barriers passed; who touched shared memory since the last

    def shared(self, key, nbytes):
        """Address of a piece of shared memory, full of NaN at first."""
        if key not in self.pieces:
            raw = np.full(nbytes + 16, 0xFF, np.uint8)
            base = raw.__array_interface__["data"][0]
            base += -base % 16
            self.pieces[key] = raw, base
            expose(base, nbytes)
        return self.pieces[key][1]

    def run(self):
        lanes = [SimulatedLane(self, number) for number in range(self.launch.block[0])]
        try:
            self.schedule(lanes)
        finally:
            for lane in lanes:
                if lane:                        # begun and not finished
                    lane.throw()
            for _, base in self.pieces.values():
                withdraw(base)

    def schedule(self, lanes):
        ready = list(lanes)
        while ready:
            _order.shuffle(ready)
            for lane in ready:
                lane.waits = None
                try:
                    lane.switch()
                except Exception as e:
                    raise SimulationFault(f"block {self.index} thread {lane.number}: {e!r}") from e
            ready = self.released(lanes)
        stuck = sorted({str(lane.waits) for lane in lanes if not lane.dead})
        if stuck:
            raise SimulationFault(f"threads wait for others that never come: {', '.join(stuck)}")

    def released(self, lanes):
        """The lanes whose wait is over, with what the others gave."""
        out, live = [], [lane for lane in lanes if not lane.dead]
        if live and all(lane.waits == "block" for lane in live):
            self.epoch += 1
            self.touched.clear()
            return live
        for w in range(0, len(lanes), WARP):
            warp = lanes[w:w + WARP]
            what = warp[0].waits
            if what != "block" and not any(lane.dead or lane.waits != what for lane in warp):
                given = [lane.given for lane in warp]
                for lane in warp:
                    lane.taken = given
                out += warp
        return out


class SimulatedLaunch:
    """kernel(node) by every thread of every block, block after block."""

    def __init__(self, kernel, grid, block, node):
        if block[0] % WARP or tuple(block[1:]) != (1, 1):
            raise SimulationFault(f"a block of {block} threads is not whole warps in one dimension")
        self.kernel, self.grid, self.block, self.node = kernel, grid, block, node

    def run(self):
        with _one_at_a_time:
            for known in (written, *constants):
                known.clear()
            for z, y, x in itertools.product(*map(range, reversed(self.grid))):
                SimulatedBlock(self, (x, y, z)).run()
