"""Checks a walker's table before a GPU gets it.  The check shares no code with the code that makes the table.

    whole       every launch of the plan is there once, with the blocks that it asks for, and they fit
    no race     between two waits no byte that one row writes is read or written by another, unless the first block does
                both alone, one after the other
    same        row after row, each reads from the same writers as in the plan's order, and the same is left at the end
    no deadlock all blocks read the same table, so all arrive equally often; the counter does not overflow

It goes by the words that the GPU gets: the table's and the NODE rows'.
"""
import numpy as np

from ggjit.core.table import TABLE
from ggjit.ops.core import record as r
from ggjit.ops.core.errors import GgjitError
from ggjit.ops.core.spec import ops_with
from ggjit.ops.core.types import TYPE_INFO
from ggjit.ops.cuda.native import walk

MAX_ARRIVALS = 1 << 31


class WalkFault(GgjitError):
    """A table whose walk could race or wait for ever; a fault of ggjit, not of its user."""


def check_table(rows, planned, node_rows, base, walker, n_blocks):
    """planned: (address of the NODE row, Launch, how many of the row's last sources it writes) in the plan's order.
    node_rows: as they are sent, to the address `base`.  n_blocks: of the walker.  Errors: WalkFault."""
    ends, counters = np.flatnonzero(rows[:, walk.W_ENDS]), np.unique(rows[:, walk.W_COUNTER])
    _require(ends.tolist() == [len(rows) - 1] and len(rows) == len(planned), "it does not end with its last row")
    _require(len(counters) == 1, "rows have different counters")
    _require(((rows[:, walk.W_WAITS] == 0) | (rows[:, walk.W_WAITS] == 1)).all(), "a row waits more than once")
    _require((1 + n_waits(rows)) * n_blocks < MAX_ARRIVALS, "too many waits to be counted")
    order = _rows_of(rows, planned, walker)
    touched = [_accesses(row, node_rows[(int(row[walk.W_NODE]) - base) // r.WORD:]) for row in rows]
    for first, end in _phases(rows):
        _check_phase(touched, first, end, rows[:, walk.W_ALONE] != 0)
    _check_same(touched, order)


def _require(holds, what):
    if not holds:
        raise WalkFault(f"the table of a walker is wrong: {what}; use \"CUDA0\" without persistent=1 and report it")


def _rows_of(rows, planned, walker):
    """The number of the row of each planned launch."""
    of_node, found = {}, []
    for i, row in enumerate(rows):
        of_node.setdefault(int(row[walk.W_NODE]), []).append(i)
    for node, launch, n_stored in planned:
        _require(of_node.get(node), f"a launch of {launch.name} is left out")
        i = of_node[node].pop(0)
        body, teams, blocks = rows[i, walk.W_BODY], rows[i, walk.W_TEAMS], rows[i, [walk.W_X, walk.W_XY, walk.W_BLOCKS]]
        _require(0 <= body < len(walker.launches), f"row {i} names no body")
        is_ = walker.launches[body]
        _require((is_.name, is_.block) == (launch.name, launch.block), f"row {i} is {is_.name}, not {launch.name}")
        says = (rows[i, walk.W_WRITES] & walk.WRITES_RESULT, rows[i, walk.W_WRITES] & walk.WRITES_SCRATCH)
        _require([bool(bit) for bit in says] == [not launch.leaves, launch.work_nbytes > 0],
                 f"row {i} does not say what {launch.name} writes")
        _require(rows[i, walk.W_STORED] == n_stored, f"row {i} stores {rows[i, walk.W_STORED]} of its sources")
        x, y, z = launch.grid
        _require((blocks == [x, x * y, x * y * z]).all(), f"row {i} has other blocks than {launch.grid}")
        _require(1 <= teams <= walker.threads // is_.block, f"row {i} has {teams} teams")
        _require(is_.block == 32 or teams < 16, f"row {i} has more teams than there are barriers")
        found.append(i)
    return found


def _phases(rows):
    """(first, end) of the rows between two waits."""
    starts = [0, *(i for i, row in enumerate(rows) if i and row[walk.W_WAITS]), len(rows)]
    return list(zip(starts[:-1], starts[1:], strict=True))


def _extent(view):
    """(first, end) of the bytes of a view's words, none where it is absent or empty."""
    type = TYPE_INFO[int(view[r.V_TYPE])]
    ne, nb = view[r.V_NE:r.V_NE + 4].astype(object), view[r.V_NB:r.V_NB + 4].astype(object)
    if view[r.V_ADDR] == 0 or min(ne) <= 0:
        return None
    steps = [ne[0] // type.block - 1, *(ne[1:] - 1)]
    return int(view[r.V_ADDR]), int(view[r.V_ADDR]) + sum(n * b for n, b in zip(steps, nb, strict=True)) + type.nbytes


def _accesses(row, node):
    """[(first byte, end, is it written?)] of a row; `node` begins with its NODE row."""
    n_src = (int(node[r.N_NEXT]) // r.WORD - r.N_SRC) // r.V_WORDS
    views = [node[k:k + r.V_WORDS] for k in (r.N_DST, *(r.N_SRC + r.V_WORDS * i for i in range(n_src)))]
    op = r.OP(int(TABLE.words[int(node[r.N_ID]), r.T_OP]))
    stored, scratch = (bool(row[walk.W_WRITES] & bit) for bit in (walk.WRITES_RESULT, walk.WRITES_SCRATCH))
    results = {0, *(1 + i for i in ops_with("updates").get(op, ())),
               *range(1 + n_src - int(row[walk.W_STORED]), 1 + n_src)} if stored else {}
    found = [(_extent(view), i in results) for i, view in enumerate(views) if stored or i > 0]
    found = [(*extent, written) for extent, written in found if extent is not None]
    if node[r.N_WORK_SIZE] > 0:
        work = int(node[r.N_WORK])
        found.append((work, work + int(node[r.N_WORK_SIZE]), scratch))
    return found


def _check_phase(touched, first, end, alone):
    """No byte is written by one row and touched by another, of which one is not the first block's alone: the ranges in
    the order of their first bytes, those behind which a later one begins are done with."""
    ranges = sorted((*piece, i) for i in range(first, end) for piece in touched[i])
    open_ = []
    for begin, stop, written, i in ranges:
        open_ = [x for x in open_ if x[1] > begin]
        for _, _, others, j in open_:
            _require(i == j or not (written or others) or alone[i] and alone[j], f"rows {min(i, j)} and {max(i, j)} "
                     f"touch byte {begin:#x} with no wait in between, and one of them writes it")
        open_.append((begin, stop, written, i))


def _check_same(touched, order):
    """Who wrote what each row reads, when the rows run one after the other: as in the table and as in the plan."""
    edges = np.unique([x for pieces in touched for begin, stop, _ in pieces for x in (begin, stop)])

    def run(numbers):
        writer, seen = np.full(len(edges), -1), {}
        for i in numbers:
            places = [(slice(*np.searchsorted(edges, (begin, stop))), written) for begin, stop, written in touched[i]]
            seen[i] = [writer[at].tobytes() for at, _ in places]
            for at, written in places:
                if written:
                    writer[at] = i
        return seen, writer.tobytes()
    (here, left), (planned, left_there) = run(range(len(touched))), run(order)
    for i, writers in planned.items():
        _require(here[i] == writers, f"row {i} reads other results than in the plan's order")
    _require(left == left_there, "other results are left at the end than in the plan's order")


def n_waits(rows):
    """How often the blocks of a walk wait for each other."""
    return int(np.count_nonzero(rows[:, walk.W_WAITS]))
