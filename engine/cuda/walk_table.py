"""The table of a walker (ops/cuda/native/walk.py): a plan's launches as rows, and which of them wait.

    launches    quantise x | q = Wq x | rope q | v = Wv x | ...
    levels            0          1        2          1              1 + the highest level of what it waits for
    rows        quantise x | q = Wq x   v = Wv x | rope q | ...     in the order of levels: a wait at every |

A launch waits for an earlier one if it reads or writes what that writes, or writes what that reads.  So there are as
many waits as the longest chain has, and no table has fewer.  Small launches are the first block's alone; from one of
them to the next in the plan no other block has to wait, so they may have one level.  engine/cuda/walk_check.py looks at
every table before it is used.
"""
import dataclasses
import math

import numpy as np

from ggjit.ops.core.record import N_WORK, OP, WORD
from ggjit.ops.core.spec import ops_with
from ggjit.ops.cuda.matmul.mul_mat import reads_all_weights, reads_weights
from ggjit.ops.cuda.native import walk

COUNTER_NBYTES = 128            # of the arrivals of blocks: a line of its own, in front of the table
MAX_SHARED_NBYTES = 48 << 10    # of a block, without asking for more
WORDS_NBYTES = 32 * 64          # words of the teams, in front of their pieces (ops/cuda/compiler/teams.py)
MAX_TEAMS, MAX_NAMED_BARRIERS = 32, 15
MAX_FETCH_NBYTES = 4 << 20      # of weights, while a block waits
ALONE_ROUNDS = 8                # times all threads of a block, of a launch that one block does alone


@dataclasses.dataclass(frozen=True)
class WalkStep:
    """A launch on a NODE row.

    node            address of the row
    reads, writes   bytes that it reads and writes, (first, end) each
    weights         of these, what is fetched in advance
    n_stored        so many of the NODE row's last sources are results, too
    wants_all       it reads weights, or keys and values, for which all of the GPU's bandwidth is wanted
    """
    launch: object
    node: int
    reads: tuple
    writes: tuple
    weights: tuple = (0, 0)
    n_stored: int = 0
    wants_all: bool = False


def steps(plan, left_out):
    """The WalkSteps of a CUDAPlan.  left_out: numbers of launches whose work is done already."""
    found, number, updating = [], 0, ops_with("updates")

    def bytes_of(t):
        buf, offs = plan.where(t)
        first = plan._memory(buf)[1] + offs
        return first, first + t.nbytes
    for part, start in zip(plan.parts, plan._starts, strict=False):
        t, kernel, first = part.t, part.kernel, int(plan.rows[start + N_WORK])
        scratch = ((first, first + kernel.work_nbytes),) if kernel.work_nbytes else ()
        stored = part.stored
        reads = tuple(bytes_of(s) for s in part.reads if s is not None and not any(s is x for x in stored))
        results = tuple(bytes_of(x) for x in (*stored, *(t.src[i] for i in updating.get(t.op, ()))))
        weights = next((bytes_of(x.src[0]) for x in part.nodes if reads_all_weights(x)), (0, 0))
        wants_all = any(map(reads_weights, part.nodes))
        for launch in kernel.launches:
            if number not in left_out:
                writes = (() if launch.leaves else results) + (scratch if launch.work_nbytes else ())
                reads_keys = t.op is OP.FLASH_ATTN_EXT and launch is kernel.launches[0]
                found.append(WalkStep(launch, plan._row_base + start * WORD, reads + scratch, writes,
                                  (0, 0) if launch.leaves else weights, 0 if launch.leaves else len(stored) - 1,
                                  not launch.leaves and wants_all or reads_keys))
            number += 1
    return found


def alone(step, threads):
    """Is it small enough for one block of so many threads?"""
    n_threads = math.prod(step.launch.grid) * step.launch.block
    return n_threads <= ALONE_ROUNDS * threads and not step.wants_all


def levels(steps, alone):
    """The level of each WalkStep, an array.  alone: for each, is it one block's?"""
    edges = np.unique([x for step in steps for piece in (*step.reads, *step.writes) for x in piece])
    # highest levels of what wrote and what read the bytes from edge to edge: of launches on all blocks, of one block's
    wrote, read = (np.full((2, len(edges)), -1, np.int64) for _ in range(2))

    def between(pieces):
        return [slice(*np.searchsorted(edges, piece)) for piece in pieces if piece[0] < piece[1]]
    found = np.empty(len(steps), np.int64)
    for i, step in enumerate(steps):
        reads, writes = between(step.reads), between(step.writes)
        own, after = int(alone[i]), np.array([1, 0 if alone[i] else 1])
        level = max((int((x[:, at].max(1) + after).max()) for x, places in ((wrote, reads), (wrote, writes), (
            read, writes)) for at in places), default=0)
        level = max(level, 0)
        for x, places in ((read, reads), (wrote, writes)):
            for at in places:
                x[own, at] = np.maximum(x[own, at], level)
        found[i] = level
    return found


def n_teams(threads, launch, piece_nbytes):
    """Teams of a launch's kernel in a block of `threads` threads, 0: not even one fits."""
    most = MAX_TEAMS if launch.block == 32 else MAX_NAMED_BARRIERS
    if piece_nbytes:
        most = min(most, (MAX_SHARED_NBYTES - WORDS_NBYTES) // piece_nbytes)
    return min(threads // launch.block, most)


def table(steps, walker, numbers, pieces, counter):
    """The rows.  numbers, pieces: of the walker's bodies by (name, block), and bytes of shared memory of a team of
    each; counter: its address."""
    rows, small = np.zeros((len(steps), walk.ROW_WORDS), np.int64), [alone(x, walker.threads) for x in steps]
    level = levels(steps, small)
    order = np.argsort(level, kind="stable")
    rows[1:, walk.W_WAITS] = np.diff(level[order]) > 0
    rows[:, walk.W_ALONE], rows[:, walk.W_COUNTER], rows[-1, walk.W_ENDS] = np.array(small)[order], counter, 1
    for row, step in zip(rows, (steps[i] for i in order), strict=True):
        x, y, z = step.launch.grid
        body = numbers[step.launch.name, step.launch.block]
        row[walk.W_BODY], row[walk.W_NODE] = body, step.node
        row[walk.W_X], row[walk.W_XY], row[walk.W_BLOCKS] = x, x * y, x * y * z
        row[walk.W_TEAMS] = n_teams(walker.threads, step.launch, pieces[body])
        row[walk.W_PIECES] = pieces[body]
        first, end = step.weights
        row[walk.W_FETCH], row[walk.W_FETCH_NBYTES] = first, min(end - first, MAX_FETCH_NBYTES)
        row[walk.W_STORED] = step.n_stored
        row[walk.W_WRITES] = (0 if step.launch.leaves else walk.WRITES_RESULT) | \
            (walk.WRITES_SCRATCH if step.launch.work_nbytes else 0)
    return rows


def shared_nbytes(rows):
    """Dynamic shared memory of a block for a table."""
    return WORDS_NBYTES + int((rows[:, walk.W_TEAMS] * rows[:, walk.W_PIECES]).max(initial=0))
