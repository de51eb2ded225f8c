"""Counts the memory requests of simulated warps: sectors of global memory, turns of the banks of shared memory.

    a request       what the lanes of a warp access by one instruction: the same place in the code, for the same time
    sectors         pieces of 32 bytes that it touches; at least its bytes / 32
    turns           of shared memory: 32 banks of 4 bytes, each serves one word at a time.  Lanes with 16 bytes come in
                    four groups of eight, with 8 bytes in two of sixteen; at least one turn a group

Lanes that take different paths count as one request where they come to a place equally often.
"""
import contextlib
import dataclasses
import os
import sys

from ggjit.ops.cuda.compiler.simulator import WARP, SimulatedLane, current

SECTOR, BANKS, WORD = 32, 32, 4
GLOBAL, SHARED = "global", "shared"
HERE = os.path.dirname(__file__)
_places = {}                    # of a recording: (lane's block and warp, place) -> its Accesses
watching = [False]


@dataclasses.dataclass
class Accesses:
    """Of one warp at one place: by how often a lane came there before, {lane: (first byte, bytes)}."""
    name: str
    nbytes: int
    requests: list
    times: dict


@dataclasses.dataclass(frozen=True)
class MemoryRequests:
    """Requests of all warps at one place of the code: bytes of a lane, how many they are, what they take, what they
    would take at the least."""
    space: str
    name: str
    nbytes: int
    n: int
    taken: int
    least: int


def _place():
    """(the functions between the access and the kernel, the name of the last one outside this folder)"""
    frame, found = sys._getframe(2), []
    while os.path.dirname(frame.f_code.co_filename) == HERE:
        found.append(frame.f_code)
        frame = frame.f_back
    name = frame.f_code.co_name
    while frame is not None and frame.f_code is not SimulatedLane.run.__code__:
        found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(found), name


def note(space, addr, nbytes):
    """The running lane accesses these bytes."""
    lane = current()
    place, name = _place()
    key = lane.block, lane.number // WARP, space, place
    at = _places.get(key)
    if at is None:
        at = _places[key] = Accesses(name, nbytes, [], {})
    i = at.times.get(lane.lane, 0)
    at.times[lane.lane] = i + 1
    if i == len(at.requests):
        at.requests.append({})
    at.requests[i][lane.lane] = int(addr), nbytes


def sectors(request):
    """(sectors that a request touches, the least that hold its bytes)"""
    touched = {x for addr, n in request.values() for x in range(addr // SECTOR, (addr + n - 1) // SECTOR + 1)}
    nbytes = len({x for addr, n in request.values() for x in range(addr, addr + n)})
    return len(touched), -(-nbytes // SECTOR)


def turns(request):
    """(turns of the banks that a request takes, the least)"""
    widest = max(n for _, n in request.values())
    size, taken, least = WARP * WORD // max(widest, WORD), 0, 0
    for first in range(0, WARP, size):
        words = {x for lane, (addr, n) in request.items() if first <= lane < first + size
                 for x in range(addr // WORD, (addr + n - 1) // WORD + 1)}
        banks = [0] * BANKS
        for word in words:
            banks[word % BANKS] += 1
        taken, least = taken + max(banks), least + bool(words)
    return taken, least


@contextlib.contextmanager
def recorded():
    """Inside the block launches are watched; gives a list of MemoryRequests, one a place, afterwards."""
    out = []
    _places.clear()
    watching[0] = True
    try:
        yield out
    finally:
        watching[0] = False
    totals = {}
    for (_, _, space, place), at in _places.items():
        count = turns if space == SHARED else sectors
        found = totals.setdefault((space, place), [at.name, at.nbytes, 0, 0, 0])
        for request in at.requests:
            taken, least = count(request)
            found[2:] = found[2] + 1, found[3] + taken, found[4] + least
    out += [MemoryRequests(space, *found) for (space, _), found in totals.items()]
    _places.clear()
