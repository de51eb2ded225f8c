"""The walker: one kernel that does all launches of a plan, in the order of a table; its blocks stay until the end.

    table       | row 0 | row 1 | ...                           int64 words (W_...), made by engine/cuda/walk_table.py
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

(W_BODY, W_NODE, W_X, W_XY, W_BLOCKS, W_TEAMS, W_PIECES, W_WAITS, W_FETCH, W_FETCH_NBYTES, W_WRITES, W_STORED,
 W_ALONE, W_COUNTER, W_ENDS, ROW_WORDS) = range(16)
WRITES_RESULT, WRITES_SCRATCH = 1, 2            # bits of W_WRITES
LINE = 128                      # bytes that one prefetch brings


@core.device
def word(row, i):
    return core.ldc_i64(row + WORD * i)


def in_teams(kernel):
    """run(row) -> row: a body; the blocks of the row that are this block's.

    Nothing is kept in registers while the kernel acts: where it was is read from the team's words.
    """
    act = core.device(kernel)

    @core.device
    def first_of(row):
        """This team's first block, behind the last where it has none."""
        if core.team() >= word(row, W_TEAMS) or word(row, W_ALONE) != 0 and core.whole_block() > 0:
            return word(row, W_BLOCKS)
        return core.whole_block() * word(row, W_TEAMS) + core.team()

    @core.device
    def step_of(row):
        return word(row, W_TEAMS) if word(row, W_ALONE) != 0 else core.whole_blocks() * word(row, W_TEAMS)

    def run(row):
        b = first_of(row)
        while b < word(row, W_BLOCKS):
            x, xy = word(row, W_X), word(row, W_XY)
            z = b // xy
            y = (b - z * xy) // x
            core.enter(b - z * xy - y * x, y, z, x, word(row, W_PIECES), row, b)
            act(word(core.entered_row(), W_NODE))
            row, b = core.entered_row(), core.entered_block()
            core.sync()                         # the team has read its words
            b += step_of(row)
        return row
    return run


def _chosen(bodies, first):
    """call(number, row) -> row: the body of that number, by halves."""
    if len(bodies) == 1:
        only = bodies[0]

        @core.device
        def call(number, row):
            return only(row)
        return call
    middle = first + len(bodies) // 2
    low, high = _chosen(bodies[:len(bodies) // 2], first), _chosen(bodies[len(bodies) // 2:], middle)

    @core.device
    def call(number, row):
        if number < middle:
            return low(number, row)
        return high(number, row)
    return call


@core.device
def fetch(row):
    """This block's share of the lines that the row reads of its weights."""
    at, end = word(row, W_FETCH), word(row, W_FETCH) + word(row, W_FETCH_NBYTES)
    at += LINE * (core.block() * core.n_threads() + core.thread())
    while at < end:
        core.prefetch(at)
        at += LINE * core.n_blocks() * core.n_threads()


def make_walker(bodies):
    """The kernel whose rows name these bodies by their place in the list."""
    call = _chosen(bodies, 0)

    def walk(row):
        waits, goes_on = 0, True
        while goes_on:
            if word(row, W_WAITS) != 0:
                waits += 1
                core.arrive(word(row, W_COUNTER))
                fetch(row)
                core.await_all(word(row, W_COUNTER), waits * core.n_blocks())
            row = call(word(row, W_BODY), row)
            if word(row, W_ALONE) != 0:
                core.sync()
            goes_on = word(row, W_ENDS) == 0
            row += WORD * ROW_WORDS
        core.leave(word(row - WORD * ROW_WORDS, W_COUNTER), (waits + 1) * core.n_blocks())
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
