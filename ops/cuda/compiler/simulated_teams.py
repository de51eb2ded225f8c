"""The functions of `teams.py`, for the simulator: of walkers, whose threads in teams act as blocks."""
from ggjit.ops.cuda.compiler.simulated import sync
from ggjit.ops.cuda.compiler.simulator import SimulationFault, check, current


def as_body(run, threads):
    """The body of a walker: `run` by teams of so many threads; what compilers do while they compile it."""
    def body(row):
        lane = current()
        lane.team_threads = threads
        row = run(row)
        lane.return_to_block()
        return row
    return body


def team():
    lane = current()
    return lane.seat // lane.team_threads


def enter(x, y, z, n, pieces_nbytes, row, b):
    lane = current()
    lane.return_to_block()
    lane.enter(row, b, (x, y, z), n)
    sync()


def entered_row():
    return current().block.row


def entered_block():
    return current().block.number


def whole_block():
    return current().block.whole.index[0]


def whole_blocks():
    return current().block.whole.n_blocks


def arrive(counter):
    check(counter, 4, 4)
    sync()


def await_all(counter, n):
    launch = current().block.launch
    if n != (launch.n_met + 1) * launch.grid[0]:
        raise SimulationFault(f"{n} arrivals are awaited, not the {launch.grid[0]} blocks' of {launch.n_met + 1} times")
    current().wait("grid")


def leave(counter, n):
    sync()
    launch = current().block.launch
    if n != (launch.n_met + 1) * launch.grid[0]:
        raise SimulationFault(f"the counter is left after {n} arrivals, not after the last")


def prefetch(address):
    check(address, 1)
