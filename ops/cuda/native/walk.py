"""The walker: one kernel that does all launches of a plan, in the order of a table; its blocks stay until the end.

    table       | n_rows counter | row 0 | row 1 | ...          int64 words (W_...), made by engine/cuda/walk_table.py
    row         what a launch would be: the body, the address of its NODE row, its blocks; does it wait?

    blocks of the walker    0: |row 0|row 1 ..|wait|row 2|      a row's blocks fall to the walker's in turn
                            1: |row 0|row 1|.. wait|row 2|      a row that waits begins when all did those before

Small rows are those of the first block alone (W_ALONE): its own barrier is between them, which takes a hundredth of the
time that all blocks need to meet.

A body is a kernel as it is: teams of threads act as its blocks (`in_teams`), as many as the row's kernel has, numbered
as they are there, so the results are the same to the bit.  All blocks of a walker are on the GPU at once (a cooperative
launch), or they would wait for ever.  While a block waits it fetches what the next row reads of the weights.
"""
import dataclasses
import functools

from ggjit.ops.core.record import WORD
from ggjit.ops.cuda.compiler import core

HEADER_WORDS = 2
(W_BODY, W_NODE, W_X, W_XY, W_BLOCKS, W_TEAMS, W_PIECES, W_WAITS, W_FETCH, W_FETCH_NBYTES, W_WRITES, W_ALONE,
 ROW_WORDS) = range(13)
WRITES_RESULT, WRITES_SCRATCH = 1, 2            # bits of W_WRITES
LINE = 128                      # bytes that one prefetch brings


@core.device
def word(row, i):
    return core.ldc_i64(row + WORD * i)


def in_teams(kernel):
    """run(row, first, step): a body; the blocks of the row that are those of block `first` of `step`."""
    act = core.device(kernel)

    def run(row, first, step):
        b = first * word(row, W_TEAMS) + core.team()
        if core.team() >= word(row, W_TEAMS):
            b = word(row, W_BLOCKS)
        while b < word(row, W_BLOCKS):
            x = word(row, W_X)
            z = b // word(row, W_XY)
            in_plane = b - z * word(row, W_XY)
            y = in_plane // x
            row = core.enter(in_plane - y * x, y, z, x, word(row, W_PIECES), row)
            act(word(row, W_NODE))
            core.sync()                         # the team has read which block it was
            b += step * word(row, W_TEAMS)
    return run


def _chosen(bodies, first):
    """call(number, row, me, n): the body of that number, by halves."""
    if len(bodies) == 1:
        only = bodies[0]

        @core.device
        def call(number, row, me, n):
            only(row, me, n)
        return call
    middle = first + len(bodies) // 2
    low, high = _chosen(bodies[:len(bodies) // 2], first), _chosen(bodies[len(bodies) // 2:], middle)

    @core.device
    def call(number, row, me, n):
        if number < middle:
            low(number, row, me, n)
        else:
            high(number, row, me, n)
    return call


@core.device
def fetch(row, me, n):
    """This block's share of the lines that the row reads of its weights."""
    at, end = word(row, W_FETCH), word(row, W_FETCH) + word(row, W_FETCH_NBYTES)
    at += LINE * (me * core.n_threads() + core.thread())
    while at < end:
        core.prefetch(at)
        at += LINE * n * core.n_threads()


def make_walker(bodies):
    """The kernel whose rows name these bodies by their place in the list."""
    call = _chosen(bodies, 0)

    def walk(table):
        n_rows, counter, row = word(table, 0), word(table, 1), table + WORD * HEADER_WORDS
        me, n, waits = core.block(), core.n_blocks(), 0
        end = row + WORD * ROW_WORDS * n_rows
        while row < end:
            if word(row, W_WAITS) != 0:
                waits += 1
                core.arrive(counter)
                fetch(row, me, n)
                core.await_all(counter, waits * n)
            first, step = me, n
            if word(row, W_ALONE) != 0:
                step = 1
                if me > 0:
                    first = word(row, W_BLOCKS)         # behind the last: nothing to do
            call(word(row, W_BODY), row, first, step)
            if word(row, W_ALONE) != 0:
                core.sync()
            row += WORD * ROW_WORDS
        core.leave(counter, (waits + 1) * n)
    return walk


@dataclasses.dataclass(frozen=True)
class Walker:
    """What a walker is compiled of: the Launches whose kernels are its bodies, and the threads of its blocks."""
    launches: tuple
    threads: int

    @functools.cached_property
    def name(self):
        return f"walker_{self.threads}_" + "_".join(f"{x.name}_{x.block}" for x in self.launches)

    @property
    def modules(self):
        return __name__, *(x.module for x in self.launches)

    def bodies(self):
        """[(body, threads of a team)], where a kernel's `make` is called."""
        return [(in_teams(x.make()), x.block) for x in self.launches]

    make = staticmethod(make_walker)


def walker_of(launches):
    """The Walker whose bodies are the kernels of these launches, and {(name, block): number of a body}."""
    found = {(x.name, x.block): x for x in launches}
    kept = tuple(found[key] for key in sorted(found))
    return Walker(kept, max(x.block for x in kept)), {(x.name, x.block): i for i, x in enumerate(kept)}
