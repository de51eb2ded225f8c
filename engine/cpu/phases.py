"""Phases of a plan: neighbouring nodes that threads run without meeting in between.

    q = Wq h | k = Wk h | v = Wv h          products of one source: a thread that finds no more rows of q goes on with k
    gate = Wg h | up = Wu h

A product of one column joins the phase of the nodes before it if it shares no cache line with them that one of them or
it writes, and if there is work memory for all of them: in one phase each has its own.  (With more columns a meeting is
little beside the work, and threads that go on early take other rows of the next node than of this one.)  Nodes that
thread 0 runs alone come in order, so they wait for each other in any case, and share their work memory.  Counted in
benchmarks/core_traffic.py.
"""
from ggjit.ops.core.spec import ops_with
from ggjit.ops.matmul.one_column import is_product
from ggjit.ops.native.node import LINE

MOST = 32                       # nodes of a phase that another one is compared with; with more, threads meet
LEAST_WORK_NBYTES = 256 << 10   # work memory that a phase may take, however little its nodes take one by one


class _Use:
    """What a part does: cache lines that it reads and writes, (first, end)."""

    def __init__(self, part, n_tasks, where, updating):
        self.alone, self.of_user = n_tasks == 1, hasattr(part.kernel, "code")
        self.one_column = any(map(is_product, part.nodes))
        self.work_nbytes = _whole_lines(part.kernel.work_nbytes)
        written = [*part.stored, *(part.t.src[j] for j in updating.get(part.t.op, ()))]
        self.writes = [_lines(t, where) for t in written]
        self.reads = [_lines(t, where) for t in part.reads if t is not None]

    def waits_for(self, other):
        return self.of_user or other.of_user \
            or any(_overlap(x, y) for x in self.writes for y in (*other.writes, *other.reads)) \
            or any(_overlap(x, y) for x in self.reads for y in other.writes)


class _Phase:
    """The nodes since all threads met last, and bytes of their work memory: `end` of all, (begin, end) of thread 0's
    own."""

    def __init__(self):
        self.shared, self.alone, self.end, self._own = [], [], 0, (0, 0)

    def add(self, use, most):
        """Take a node in: where its work memory begins; None: it has to wait."""
        others = self.shared if use.alone else [*self.shared, *self.alone[-MOST - 1:]]
        if others and (not use.one_column or len(others) > MOST or any(use.waits_for(other) for other in others)):
            return None
        first, last = self._own
        again = use.alone and (use.work_nbytes <= last - first or last == self.end)
        begin = first if again else self.end
        end = begin + use.work_nbytes
        if end > most:
            return None
        if use.alone:
            self._own = begin, max(end, last) if again else end
        self.end = max(self.end, end)
        (self.alone if use.alone else self.shared).append(use)
        return begin


def phases(parts, where, tasks, work_nbytes):
    """([do all threads meet after the part?], [byte of the work memory at which the part's begins]) of PlanNodes.

    where(t) -> (buffer, offset).  tasks: threads of each part.  work_nbytes: the most that a part takes.
    """
    meet, begins, phase = [True] * len(parts), [], _Phase()
    most, updating = max(_whole_lines(work_nbytes), LEAST_WORK_NBYTES), ops_with("updates")
    for i, (part, n) in enumerate(zip(parts, tasks, strict=True)):
        use = _Use(part, n, where, updating)
        begin = phase.add(use, most)
        if begin is None:
            phase = _Phase()
            begin = phase.add(use, most)
        elif i:
            meet[i - 1] = False
        begins.append(begin)
    return meet, begins


def _whole_lines(nbytes):
    return -(-nbytes // LINE) * LINE


def _lines(t, where):
    buf, offs = where(t)
    at = buf.base + offs                    # buffers over the same memory are the same lines
    return at // LINE, -(-(at + t.nbytes) // LINE)


def _overlap(x, y):
    return x[0] < y[1] and y[0] < x[1]
