"""Places the most crowded stretches first: for many short buffers, of which few are live where the bound is reached.

    bytes      ___                       1  moments above a share of the goal, with every buffer that touches one: where
    goal  - - | 1 | - - -  ___  - - -       no such buffer crosses, one stretch ends and another may begin
    share -  _|   |_ - - -| 2 | - - -    2  each stretch by itself, by the canonical search
          __|       |_____|   |_____     3  the rest by first fit, into what is left around them

The search of the whole decides by offset, at all times at once: what went wrong at one moment is found again only
after all others.  A stretch has some hundred buffers and most often needs no step back.  Between the stretches there
is room, which first fit may waste.
"""
import numpy as np

from ggjit.alloc.offsets import greedy
from ggjit.alloc.offsets.search import FOUND, RULES, CanonicalSearch
from ggjit.alloc.offsets.sections import Instance

# a section is crowded from this share of the goal on; the next share is tried where a search fails
SHARES = (0.75, 0.8, 0.85, 0.9, 0.95)
MANY = 512                      # problems with fewer buffers are not searched by stretches
MOST, NODES = 1000, 4           # buffers of a stretch that is searched as one; nodes of its searches, per buffer
# the same of one that no share is left to divide; it is at most 1/PART of all buffers
MOST_AT_LAST, NODES_AT_LAST, PART = 4096, 2, 8


def stretches(inst, least):
    """[buffers of a stretch] whose sections of more than `least` bytes no buffer joins."""
    crowded = np.concatenate([[0], np.cumsum(inst.totals > least)])
    touch = np.flatnonzero(crowded[inst.shi] > crowded[inst.slo])
    # [number of buffers that live across the border before a section]
    crossed = np.zeros(inst.ns + 1, np.int64)
    np.add.at(crossed, inst.slo[touch] + 1, 1)
    np.subtract.at(crossed, inst.shi[touch], 1)
    number = np.cumsum(np.cumsum(crossed) == 0)[inst.slo[touch]]
    touch, number = (x[np.argsort(number, kind="stable")] for x in (touch, number))
    return np.split(touch, np.flatnonzero(np.diff(number)) + 1) if len(touch) else []


def _part(inst, ids):
    return Instance(inst.slo[ids], inst.shi[ids], inst.size[ids])


def _solve(inst, cap, max_nodes, stop, effort):
    """(offsets within cap or None, search nodes) of one stretch."""
    found, nodes, per_buffer = CanonicalSearch(inst, stop), 0, effort * (NODES if inst.n <= MOST else NODES_AT_LAST)
    for name, rule in RULES.items() if found.possible else ():
        if nodes >= max_nodes:
            break
        out = found.solve(cap, greedy.rank(inst, name), min(per_buffer * inst.n, max_nodes - nodes), rule, stop)
        nodes += out.nodes
        if out.status == FOUND:
            return out.offsets, nodes
    return None, nodes


def crowded_first(inst, cap, limit, stop=greedy.NEVER, max_nodes=1 << 60, effort=1):
    """(peak, offsets, search nodes) of a layout meant to end within cap bytes; (limit, None, nodes): none below limit.

    stop: a word, set when time is up; max_nodes: nodes after which no stretch is searched; effort: so many times the
    nodes of a search."""
    off, placed, nodes = np.zeros(inst.n, np.int64), np.zeros(inst.n, bool), 0
    most_at_last = max(MOST, min(inst.n // PART, MOST_AT_LAST))
    todo = [(np.arange(inst.n), 0)] if inst.n >= MANY else []
    while todo and stop[0] == 0:
        ids, k = todo.pop()
        for part in stretches(_part(inst, ids), SHARES[k] * cap):
            part, found, last = ids[part], None, k + 1 == len(SHARES)
            if len(part) <= (most_at_last if last else MOST) and nodes < max_nodes:
                found, n = _solve(_part(inst, part), cap, max_nodes - nodes, stop, effort)
                nodes += n
            if found is not None:
                off[part], placed[part] = found, True
            elif not last:
                todo.append((part, k + 1))
    if not placed.any() or stop[0] != 0:
        return limit, None, nodes
    peak = greedy.first_fit_around(inst, np.flatnonzero(placed), greedy.order(inst, "size*sqrt(width)"), off, limit,
                                   stop)
    return (peak, off, nodes) if peak < limit else (limit, None, nodes)
