"""Phases of a plan: consecutive nodes between which threads need no barrier.

    q = Wq h | k = Wk h | v = Wv h          products of one source: a thread that finds no more rows of q goes on with k
    gate = Wg h | up = Wu h

A product of one column joins the phase of the nodes before it if it shares no cache line with them that one of them or
it writes, and if there is work memory for all of them: in one phase each has its own.  (With more columns a meeting is
little beside the work, and threads that go on early take other rows of the next node than of this one.)  Nodes that
thread 0 runs alone come in order, so they wait for each other in any case, and share their work memory.  Counted in
benchmarks/core_traffic.py.
"""
import numpy as np

from ggjit.ops.matmul.one_column import is_product
from ggjit.ops.native.jit import i64s, inlined, native
from ggjit.ops.native.node import LINE

MOST = 32                       # nodes of a phase that another one is compared with; with more, threads meet
LEAST_WORK_NBYTES = 256 << 10   # work memory that a phase may take, however little its nodes take one by one
# words of a part: does thread 0 run it alone?  Is it a product of one column, or a function of the user's?  Bytes of
# its work memory, whole lines; the first of what it writes in a list, and the end
_ALONE, _ONE_COLUMN, _OF_USER, _WORK, _WRITES, _WRITES_TO, _WORDS = range(7)


@inlined
def _meets(a, writes, b, parts, views, width, first, last):
    """Does what part a writes share a cache line with what part b reads or writes?"""
    for w in range(parts[a * _WORDS + _WRITES], parts[a * _WORDS + _WRITES_TO]):
        x = writes[w]
        for v in range(b * width, (b + 1) * width):
            y = views[v]
            if y >= 0 and first[x] < last[y] and first[y] < last[x]:
                return True
    return False


@inlined
def _waits_for(i, others, n, parts, writes, views, width, first, last):
    """Has part i to wait for one of the last n of the others?"""
    for k in range(len(others) - n, len(others)):
        other = others[k]
        if parts[i * _WORDS + _OF_USER] or parts[other * _WORDS + _OF_USER] \
                or _meets(i, writes, other, parts, views, width, first, last) \
                or _meets(other, writes, i, parts, views, width, first, last):
            return True
    return False


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64, i64, i64)")
def _phases(parts_, n, writes_, views_, width, first_, last_, most, meet_, begins_):
    """A phase has parts of all threads and parts of thread 0 alone, whose work memory is [own, own_end) of `end` bytes.
    """
    parts, writes, views = i64s(parts_, n * _WORDS), i64s(writes_, 1 << 40), i64s(views_, n * width)
    first, last, meet, begins = i64s(first_, 1 << 40), i64s(last_, 1 << 40), i64s(meet_, n), i64s(begins_, n)
    shared, alone = np.empty(n, np.int64), np.empty(n, np.int64)
    n_shared, n_alone, end, own, own_end = 0, 0, 0, 0, 0
    for i in range(n):
        at, meet[i] = i * _WORDS, 1
        n_others = 0 if parts[at + _ALONE] else min(n_alone, MOST + 1)
        waits = n_shared + n_others > MOST or n_shared + n_others > 0 and (
            not parts[at + _ONE_COLUMN]
            or _waits_for(i, shared[:n_shared], n_shared, parts, writes, views, width, first, last)
            or _waits_for(i, alone[:n_alone], n_others, parts, writes, views, width, first, last))
        again = parts[at + _ALONE] and (parts[at + _WORK] <= own_end - own or own_end == end)
        begin = own if again else end
        if waits or begin + parts[at + _WORK] > most:
            n_shared, n_alone, end, own, own_end, begin, again = 0, 0, 0, 0, 0, 0, parts[at + _ALONE] != 0
        elif i > 0:
            meet[i - 1] = 0
        begins[i] = begin
        if parts[at + _ALONE]:
            own, own_end = begin, max(begin + parts[at + _WORK], own_end if again else 0)
            alone[n_alone] = i
            n_alone += 1
        else:
            shared[n_shared] = i
            n_shared += 1
        end = max(end, begin + parts[at + _WORK])
    return 0


def phases(parts, views, tensors, places, tasks, work_nbytes):
    """([do all threads meet after the part?], the byte of the work memory at which each part's begins) of PlanParts.

    views: for each part the numbers of the tensors that it reads and writes, -1 for none.  places: the PlanPlaces.
    tasks: threads of each part.  work_nbytes: the most that a part takes.
    """
    n, stored = len(parts), np.flatnonzero(parts.is_stored)
    nodes = np.concatenate([stored, tensors.updates[0]])
    order = np.argsort(nodes, kind="stable")
    writes = np.concatenate([tensors.uses[stored, 0], tensors.updates[1]])[order]
    ends = np.searchsorted(nodes[order], parts.ends)
    facts = np.empty((n, _WORDS), np.int64)
    facts[:, _ALONE] = np.asarray(tasks) == 1
    facts[:, _ONE_COLUMN] = parts.each(lambda p: any(map(is_product, p.nodes)))
    facts[:, _OF_USER] = parts.each(lambda p: hasattr(p.kernel, "code"))
    facts[:, _WORK] = _whole_lines(parts.each(lambda p: p.kernel.work_nbytes))
    facts[1:, _WRITES], facts[:1, _WRITES], facts[:, _WRITES_TO] = ends[:-1], 0, ends
    meet, begins = np.empty((2, n), np.int64)
    _phases(facts, n, writes, views, views.shape[1], *places.lines(LINE),
            max(_whole_lines(work_nbytes), LEAST_WORK_NBYTES), meet, begins)
    return (meet != 0).tolist(), begins


def _whole_lines(nbytes):
    return -(-nbytes // LINE) * LINE
