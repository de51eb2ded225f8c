"""What ggml's allocator wrote about a graph (a build with AT_PRINTF of ggml-alloc.c) as an offset problem.

    ggml_dyn_tallocr_alloc: allocating ffn_out-3 (1179648 bytes) - block 2, offset 4718592, chunk 0
    ggml_gallocr_free_node: freeing ffn_out-3 at {chunk=0, offset=4718592} (1179648 bytes) - n_free_blocks = 3
    freeing extra 4096 bytes from parent ffn_gate-3 for ffn_up-3

Older versions write no chunk, and "at 4718592".  Steps are the lines that allocate or free.  A log holds a graph for
each time that memory was reserved; the one that took most is read.
"""
import re

from ggjit.alloc.traces import AllocationTrace, Held, Overlap
from ggjit.ops.core.errors import BadFile

_TAKEN = re.compile(r"allocating (.*) \((\d+) bytes\) - block -?\d+, offset (\d+)(?:, chunk (\d+))?")
_FREED = re.compile(r"freeing (?!extra ).* at (?:\{chunk=(\d+), offset=(\d+)\}|(\d+)) \((\d+) bytes\)")
_EXTRA = re.compile(r"freeing extra (\d+) bytes from parent (.*) for ")
MAX_NBYTES = 1 << 62


class _LoggedGraph:
    """The buffers of one graph, as they are read."""

    def __init__(self, first):
        self.trace, self.n_steps, self.ends, self.named = AllocationTrace([], [], [], []), 0, {}, {}
        self.held, self.events, self._event = Held(self.trace), [], first

    def take(self, line, name, size, at, chunk):
        k = self.trace.add(self.n_steps, None, size, f"{len(self.trace.ids)} {name}")
        self.events.append(self._event)
        self.held.take(at, k, f"line {line}", chunk)
        self.named[name] = k
        self.ends[chunk] = max(self.ends.get(chunk, 0), at + size)

    def free(self, line, at, chunk):
        k = self.held.release(at, chunk)
        if k is None:
            raise BadFile(f"line {line}: nothing that was allocated lies at offset {at} of chunk {chunk}")
        self.trace.upper[k] = self.n_steps + 1

    def give(self, line, nbytes, parent):
        """The end of a buffer is free, the rest lives on under the name of what took it over."""
        k = self.named.get(parent)
        if k is not None:
            nbytes = min(nbytes, self.trace.size[k])
            self.trace.size[k] -= nbytes
            self.trace.add(self.trace.lower[k], self.n_steps + 1, nbytes, f"{self.trace.ids[k]}, the end")
            self.events.append(self._event)

    def run(self, events):
        """The events up to one that does not fit.  Errors: BadFile, and Overlap."""
        for kind, *values in events:
            getattr(self, kind)(*values)
            self.n_steps, self._event = self.n_steps + 1, self._event + 1
        return self

    def done(self):
        n = max(self.n_steps, 1)
        self.trace.upper[:] = [n if end is None else end for end in self.trace.upper]
        self.trace.taken, self.trace.what = sum(self.ends.values()), "ggml"
        return self.trace


def read_ggml_log(path):
    """The AllocationTrace of the largest graph in a log.  Errors: BadFile, with the line."""
    with open(path, encoding="utf-8", errors="replace") as f:
        events = [event for n, line in enumerate(f, 1) if (event := _event(line, n)) is not None]
    if not any(kind == "take" for kind, *_ in events):
        raise BadFile("no line was written by ggml's allocator; it writes them to its debug log when it is built with "
                      "the AT_PRINTF of ggml-alloc.c that calls GGML_LOG_DEBUG")
    found, start = [], 0
    while start < len(events):
        end = _end_of_graph(events, start)
        found.append(_LoggedGraph(start).run(events[start:end]).done())
        start = end
    return max(found, key=lambda trace: trace.taken)


def _event(line, n):
    """What a line of the log says: ("take", line, name, bytes, offset, chunk), ("free", line, offset, chunk),
    ("give", line, bytes, parent); None also for buffers of no bytes, which lie where others begin."""
    if m := _TAKEN.search(line):
        size = _number(m[2], n)
        return ("take", n, m[1], size, _number(m[3], n), int(m[4] or 0)) if size else None
    if m := _FREED.search(line):
        return ("free", n, _number(m[2] or m[3], n), int(m[1] or 0)) if int(m[4]) else None
    if m := _EXTRA.search(line):
        return "give", n, _number(m[1], n), m[2]
    return None


def _end_of_graph(events, start):
    """Where the next graph begins.  The log does not say: an allocation at offset 0 does, if what lies under a later
    one was allocated before it."""
    graph = _LoggedGraph(start)
    try:
        graph.run(events[start:])
    except Overlap as e:
        for k in range(graph._event, graph.events[e.other], -1):
            if events[k][0] == "take" and events[k][4:] == (0, 0) and _fits(events[k:graph._event + 1]):
                return k
        raise
    return len(events)


def _fits(events):
    try:
        _LoggedGraph(0).run(events)
    except BadFile:
        return False
    return True


def _number(text, line):
    value = int(text)
    if value >= MAX_NBYTES:
        raise BadFile(f"line {line}: {text} bytes do not fit 62 bits")
    return value
