"""The simulator: launches of kernels that are plain Python functions, on checked memory.  No Numba in it.

One thread of a block runs at a time, as a greenlet, until it waits at a barrier or a warp operation:

    lane 0   ....|wait                ....|wait            the order is shuffled between two waits, so that a missing
    lane 1       ....|wait       ....     |wait            barrier shows
    lane 2            ....|wait ......|done                the threads of one barrier are released together

What is a SimulationFault: an access outside all memory or at a wrong multiple; a barrier that some threads never reach;
a race, that is an access to what another thread wrote since the last barrier of both (in global memory: of a block, and
since the launch began for threads of different blocks; in shared memory also a write over what another thread read).
The blocks of a cooperative launch take turns; they wait for each other, too, and a block that writes what another one
read since then is a race.  A team (ops/cuda/native/walk.py) counts as a block of its own; a barrier of the block that
it is part of is one of all its teams.

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
written = {}                    # address in global memory -> (thread that wrote it, then as `_stamp`)
read_by = {}                    # of a cooperative launch: address -> `_stamp` of the block that read it, or MANY
watched = [False]               # is it one?
constants = []                  # dicts by type: address -> what `ldc_*` read there
_one_at_a_time = ForkLock()


def _race(what, lane, other):
    raise SimulationFault(f"race: thread {lane.number} of block {lane.block.index} {what} {other}, with no barrier in "
                          f"between")


def _wrote(thread, block):
    return f"thread {thread.number} of block {block.index} wrote"


def _stamp(block):
    """(block or team, barriers it had passed, the block that it is part of, barriers that had passed)"""
    return block, block.epoch, block.whole, block.whole.epoch


def _unordered(block, other, epoch, whole, whole_epoch):
    """Is nothing between an access stamped so and one of another thread of `block` now?"""
    if other is block:
        return epoch == block.epoch
    return whole is not block.whole or whole_epoch == whole.epoch


def wrote(addr, same):
    """The running thread writes global memory at `addr`.  same(): it holds that value already, which does no harm."""
    lane = current()
    block = lane.block
    at = written.get(addr)
    if at is not None and (at[0] is not lane or at[1] is not block) and _unordered(block, *at[1:]) and not same():
        _race("writes what", lane, _wrote(*at[:2]))
    if watched[0] and addr in read_by:
        reader = read_by[addr]
        if (reader is MANY or reader[0] is not block and _unordered(block, *reader)) and not same():
            _race("writes what", lane, "another block read")
    written[addr] = lane, *_stamp(block)


def reads(addr):
    """The running thread reads global memory at `addr`."""
    lane = current()
    block, at = lane.block, written.get(addr)
    if at is not None and (at[0] is not lane or at[1] is not block) and _unordered(block, *at[1:]):
        _race("reads what", lane, _wrote(*at[:2]))
    if watched[0]:
        before, stamp = read_by.get(addr), _stamp(block)
        if before is None or before is not MANY and before[2] is block.whole:
            others = before is not None and before[0] is not block and before[3] == stamp[3]
            read_by[addr] = (None, 0, *stamp[2:]) if others else stamp          # None: several teams of a block
        else:
            read_by[addr] = MANY


def wrote_shared(addr, same):
    """The running thread writes shared memory at `addr`."""
    lane = current()
    writer, reader = lane.block.touched.get(addr, (lane, lane))
    if writer is not lane and writer is not None and not same():
        _race("writes what", lane, _wrote(writer, lane.block))
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
        _race("reads what", lane, _wrote(writer, lane.block))
    if reader is not lane:
        lane.block.touched[addr] = writer, lane if reader is None else MANY


# ---------------------------------------------------------------- threads
class SimulatedLane(greenlet.greenlet):
    """A CUDA thread.  It runs from the scheduler's `switch` to its next `wait`.

    block, number: as the kernel sees them, of its team where it is in one; seat: its number in the block.
    """

    def __init__(self, block, number):
        super().__init__()
        self.block, self.number, self.seat, self.lane = block, number, number, number % WARP
        self.waits = self.given = self.taken = None
        self.team_threads, self.copies = 0, [[]]        # copies under way, by groups

    def run(self):
        np.seterr(all="ignore")
        self.block.launch.kernel(self.block.launch.node)

    def wait(self, what, given=None):
        """Suspend until all threads of the operation `what` wait for it; returns the values they gave."""
        self.waits, self.given = what, given
        self.parent.switch()
        return self.taken

    def enter(self, row, number, index, n_blocks):
        """Act as a thread of block `index` of a row's grid of n_blocks in x: with the others of the team."""
        whole = self.block
        team = whole.teams.get((row, index))
        if team is None:
            team = whole.teams[row, index] = SimulatedTeam(whole, index, n_blocks, self.team_threads)
            team.row, team.number = row, number
        self.block = team
        self.number = self.seat % self.team_threads

    def return_to_block(self):
        if isinstance(self.block, SimulatedTeam):
            self.block, self.number = self.block.whole, self.seat


_order = random.Random(0)


class SimulatedBlock:
    """The threads of one block."""

    def __init__(self, launch, index):
        self.launch, self.index = launch, index
        self.n_threads, self.n_blocks = launch.block[0], launch.grid[0]
        self.pieces, self.teams, self.whole = {}, {}, self
        self.epoch, self.touched = 0, {}        # barriers passed; who touched shared memory since the last
        self.lanes = [SimulatedLane(self, number) for number in range(self.n_threads)]

    def shared(self, key, nbytes, aligned):
        """Address of a piece of shared memory, full of NaN at first."""
        if key not in self.pieces:
            raw = np.full(nbytes + aligned, 0xFF, np.uint8)
            base = raw.__array_interface__["data"][0]
            base += -base % aligned
            self.pieces[key] = raw, base
            expose(base, nbytes)
        return self.pieces[key][1]

    def end(self):
        for lane in self.lanes:
            if lane:                            # begun and not finished
                lane.throw()
        for pieces in (self.pieces, *(team.pieces for team in self.teams.values())):
            for _, base in pieces.values():
                withdraw(base)

    def run(self):
        """From its first thread's first to its last thread's last."""
        try:
            self.advance(self.lanes)
            self.check_that_nobody_waits(self.lanes)
        finally:
            self.end()

    def advance(self, lanes):
        """Run these threads, and those that they release, until all wait for something else, or are done."""
        ready = list(lanes)
        while ready:
            _order.shuffle(ready)
            for lane in ready:
                lane.waits = None
                try:
                    lane.switch()
                except Exception as e:
                    raise SimulationFault(f"block {lane.block.index} thread {lane.number}: {e!r}") from e
            ready = self.released(self.lanes)

    @staticmethod
    def check_that_nobody_waits(lanes):
        stuck = sorted({str(lane.waits) for lane in lanes if not lane.dead})
        if stuck:
            raise SimulationFault(f"threads wait for others that never come: {', '.join(stuck)}")

    def released(self, lanes):
        """The lanes whose wait is over, with what the others gave."""
        out = []
        for block, members in self.members():
            if members and all(lane.waits == "block" for lane in members):
                block.epoch += 1
                block.touched.clear()
                out += members
        if len(out) == len(lanes):
            return out
        for w in range(0, len(lanes), WARP):
            warp = lanes[w:w + WARP]
            what = warp[0].waits
            if what not in ("block", "grid") and not any(lane.dead or lane.waits != what for lane in warp):
                given = [lane.given for lane in warp]
                for lane in warp:
                    lane.taken = given
                out += warp
        return out

    def members(self):
        """(block or team, those of its threads that are not done; none where some have not entered it yet)"""
        live = [lane for lane in self.lanes if not lane.dead]
        if not self.teams:
            return [(self, live)]
        found = {}
        for lane in live:
            found.setdefault(id(lane.block), (lane.block, []))[1].append(lane)
        return [(block, lanes if len(lanes) == (len(live) if block is self else block.n_threads) else [])
                for block, lanes in found.values()]


class SimulatedTeam:
    """Threads of a walker's block that act as a block of the row's kernel."""

    def __init__(self, whole, index, n_blocks, n_threads):
        self.whole, self.index, self.n_blocks, self.n_threads = whole, index, n_blocks, n_threads
        self.pieces, self.epoch, self.touched = {}, 0, {}

    shared = SimulatedBlock.shared


class SimulatedLaunch:
    """kernel(node) by every thread of every block, block after block."""

    def __init__(self, kernel, grid, block, node):
        if block[0] % WARP or tuple(block[1:]) != (1, 1):
            raise SimulationFault(f"a block of {block} threads is not whole warps in one dimension")
        self.kernel, self.grid, self.block, self.node = kernel, grid, block, node

    def indices(self):
        return ((x, y, z) for z, y, x in itertools.product(*map(range, reversed(self.grid))))

    def run(self):
        with _one_at_a_time:
            forget_accesses()
            for index in self.indices():
                SimulatedBlock(self, index).run()


class CooperativeLaunch(SimulatedLaunch):
    """All blocks at once; they go on together when each of their threads that is not done waits for the grid."""

    def run(self):
        with _one_at_a_time:
            forget_accesses()
            self.n_met, watched[0] = 0, True
            blocks = [SimulatedBlock(self, index) for index in self.indices()]
            try:
                self._together(blocks)
            finally:
                watched[0] = False
                for block in blocks:
                    block.end()

    def _together(self, blocks):
        every = [lane for block in blocks for lane in block.lanes]
        ready = every
        while ready:
            _order.shuffle(blocks)
            for block in blocks:
                block.advance([lane for lane in block.lanes if not lane.dead])
            ready = [lane for lane in every if lane.waits == "grid" and not lane.dead]
            if len(ready) < len(every):
                SimulatedBlock.check_that_nobody_waits(every)
            self.n_met += 1
            forget_accesses()


def forget_accesses():
    """All threads are where they know of all that was done."""
    for known in (written, read_by, *constants):
        known.clear()
