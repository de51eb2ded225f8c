"""Scheduler of simulated CUDA threads and checked memory, for Numba's CUDA simulator (NUMBA_ENABLE_CUDASIM=1).

One thread of a block runs at a time, until it waits at a barrier or a warp operation:

    lane 0   ....|wait                ....|wait            the order is shuffled between two waits, so that a missing
    lane 1       ....|wait       ....     |wait            barrier shows
    lane 2            ....|wait ......|done                the threads of one barrier are released together

Replaces Numba's block manager in this process, which polls its threads, has no warp operations, and lets a barrier pass
that some threads never reach; here that is a SimulationFault.  Addresses are real: simulated device memory is host
memory registered with `expose`.
"""
import bisect
import random
import threading

import numpy as np
from numba.cuda.simulator import kernel as simulator

from ggjit.ops.core.errors import GgjitError

WARP = 32


class SimulationFault(GgjitError, RuntimeError):
    """A kernel accessed memory outside all allocations, or its threads deadlock."""


# ---------------------------------------------------------------- memory
_bases, _ends = [], []          # sorted; the ranges never overlap


def expose(base, nbytes):
    """Register [base, base + nbytes) as memory that kernels may access."""
    i = bisect.bisect(_bases, base)
    _bases.insert(i, base)
    _ends.insert(i, base + nbytes)


def withdraw(base):
    """Remove the range that begins at `base`."""
    i = bisect.bisect_left(_bases, base)
    del _bases[i], _ends[i]


def check(addr, nbytes, alignment=1):
    """SimulationFault unless the range lies in one exposed piece of memory."""
    i = bisect.bisect(_bases, addr) - 1
    if i < 0 or addr + nbytes > _ends[i]:
        near = "no memory before it" if i < 0 else f"{addr - _bases[i]} in a piece of {_ends[i] - _bases[i]}"
        raise SimulationFault(f"{nbytes} bytes at an address outside all memory ({near})")
    if addr % alignment:
        raise SimulationFault(f"{nbytes} bytes at {addr % alignment} past a multiple of {alignment}")


# ---------------------------------------------------------------- threads
class _Stopped(BaseException):
    """Another thread of the block failed."""


class _Lane(threading.Thread):
    """A CUDA thread.  It runs from `Block.resume` to its next `wait`, and is used again for the next block."""

    def __init__(self):
        super().__init__(daemon=True)
        self.resumed = threading.Lock()
        self.resumed.acquire()
        self.start()

    def join_block(self, block, number, call):
        self.block, self.number, self.call = block, number, call
        self.warp, self.lane = number // WARP, number % WARP
        self.threadIdx, self.blockIdx = simulator.Dim3(number, 0, 0), block.blockIdx    # what `cuda.threadIdx` reads
        self.waits, self.given, self.taken, self.error, self.stopped = None, None, None, None, False

    def run(self):
        np.seterr(all="ignore")
        while True:
            self.resumed.acquire()
            try:
                self.call()
            except _Stopped:
                pass
            except BaseException as e:          # handed to the thread that launched the kernel
                self.error = e
            self.waits = "done"
            self.block.suspended.release()

    def wait(self, what, given=None):
        """Suspend until all threads of the operation `what` wait for it; returns the values they gave."""
        self.waits, self.given = what, given
        self.block.suspended.release()
        self.resumed.acquire()
        if self.stopped:
            raise _Stopped
        return self.taken


_lanes = []
_order = random.Random(0)


class Block:
    """Runs the threads of a block (in place of numba.cuda.simulator.kernel.BlockManager)."""

    def __init__(self, f, grid_dim, block_dim, debug):
        self.f, self.grid_dim, self.block_dim = f, grid_dim, block_dim
        self.suspended = threading.Lock()
        self.suspended.acquire()
        self.pieces = {}

    def shared(self, key, nbytes):
        """Address of a piece of shared memory, full of NaN at first."""
        if key not in self.pieces:
            raw = np.full(nbytes + 16, 0xFF, np.uint8)
            base = raw.__array_interface__["data"][0]
            base += -base % 16
            self.pieces[key] = raw, base
            expose(base, nbytes)
        return self.pieces[key][1]

    def run(self, grid_point, *args):
        n = self.block_dim[0]
        if n % WARP or self.block_dim[1:] != (1, 1):
            raise SimulationFault(f"a block of {self.block_dim} threads is not whole warps in one dimension")
        self.blockIdx = simulator.Dim3(*grid_point)
        while len(_lanes) < n:
            _lanes.append(_Lane())
        lanes = _lanes[:n]
        for number, lane in enumerate(lanes):
            lane.join_block(self, number, lambda: self.f(*args))
        try:
            self.schedule(lanes)
        finally:
            for lane in lanes:
                if lane.waits != "done":
                    lane.stopped = True
                    self.resume(lane)
            for _, base in self.pieces.values():
                withdraw(base)

    def resume(self, lane):
        lane.resumed.release()
        self.suspended.acquire()

    def schedule(self, lanes):
        ready = list(lanes)
        while ready:
            _order.shuffle(ready)
            for lane in ready:
                lane.waits = None
                self.resume(lane)
                if lane.error is not None:
                    where = f"block {tuple(self.blockIdx)} thread {lane.number}"
                    raise SimulationFault(f"{where}: {lane.error!r}") from lane.error
            ready = self.released(lanes)
        stuck = sorted({str(lane.waits) for lane in lanes if lane.waits != "done"})
        if stuck:
            raise SimulationFault(f"threads wait for others that never come: {', '.join(stuck)}")

    def released(self, lanes):
        """The lanes whose wait is over, with what the others gave."""
        out, live = [], [lane for lane in lanes if lane.waits != "done"]
        if live and all(lane.waits == "block" for lane in live):
            return live
        for w in range(0, len(lanes), WARP):
            warp = lanes[w:w + WARP]
            what = warp[0].waits
            if what not in ("done", "block") and all(lane.waits == what for lane in warp):
                given = [lane.given for lane in warp]
                for lane in warp:
                    lane.taken = given
                out += warp
        return out


simulator.BlockManager = Block


def current():
    """The running simulated thread."""
    return threading.current_thread()
