"""One graph as dense, checked rows, with ggml's own plan of it: the input of every planner.

    table + ids --localize--> dense rows --alias_*--> events over allocations --replay--> ggml's offsets
                --resolve--> the place of every tensor
"""
import dataclasses

import numpy as np

from ggjit.alloc.ggml import graph_record as col
from ggjit.alloc.ggml.alias import CAUSE_TEXT, IN_PLACE, MODERN, THROUGH_VIEWS, alias_modern
from ggjit.alloc.ggml.free_list import CAP_BLOCKS, CHUNK_HEAD, HEAD, N_CHUNKS, UNBOUNDED, new_states
from ggjit.alloc.ggml.graph_record import EVENT, GRAPH
from ggjit.alloc.ggml.localize import localize
from ggjit.alloc.ggml.placement import MADE, PLACE, replay, resolve
from ggjit.ops.core.errors import IndexRangeError, OutOfMemory, ParamError, ShapeError
from ggjit.ops.core.record import T_WORDS
from ggjit.ops.core.whole_numbers import is_whole


class GraphError(ShapeError):
    """A graph that cannot be planned: a cycle, a foreign tensor, a tensor named twice."""


@dataclasses.dataclass(slots=True)
class GraphPlan:
    """Placement of a graph's tensors.  Arrays are int64; node_* in node order, leaf_* in leaf order.

    buffer  index of the buffer, -1: the tensor has memory of its own (weights, caches)
    chunk   number of the chunk inside the buffer
    offs    bytes from the chunk's start; a view's is its source's plus view_offs
    size    bytes planned for the tensor itself, padded; 0 for views and external tensors (ggml's size_max)
    root    table id of the tensor whose memory it is: itself, the reused parent, or the viewed tensor
    alloc   row of the allocation arrays, -1
    """
    planner: str
    rule: str                       # aliasing rule of the returned plan: "modern", "views", "2023"
    n_steps: int
    node_buffer: np.ndarray
    node_chunk: np.ndarray
    node_offs: np.ndarray
    node_size: np.ndarray
    node_root: np.ndarray
    node_alloc: np.ndarray
    leaf_buffer: np.ndarray
    leaf_chunk: np.ndarray
    leaf_offs: np.ndarray
    leaf_size: np.ndarray
    leaf_root: np.ndarray
    leaf_alloc: np.ndarray
    cause: np.ndarray               # per node, a number into CAUSE_TEXT
    cause_src: np.ndarray           # per node, table id of the source the cause speaks of, -1
    a_id: np.ndarray                # allocations: table id of the first tensor in it
    a_lo: np.ndarray                # first step it is live
    a_hi: np.ndarray                # first step it is dead
    a_size: np.ndarray              # bytes, padded
    a_buffer: np.ndarray
    a_chunk: np.ndarray
    a_offs: np.ndarray
    events: np.ndarray              # (n, 4): kind (0 take, 1 give back, 2 trim), allocation, bytes, step
    chunk_sizes: list               # per buffer: bytes of each chunk
    ggml_peak: int                  # what ggml's own planner needs, bytes
    how: str = "ggml"               # what found the offsets
    seconds: float = 0.0

    @property
    def lower_bounds(self):
        """Per buffer: most live bytes at any step."""
        return [_most_live(self.events, self.a_size, self.a_buffer == b) for b in range(len(self.chunk_sizes))]

    @property
    def peak(self):
        """Bytes of all chunks of all buffers."""
        return sum(map(sum, self.chunk_sizes))

    @property
    def lower_bound(self):
        """Bytes no plan of this node order and aliasing can go below."""
        return sum(self.lower_bounds)

    def why_not_in_place(self, i):
        """(text, id of the source it speaks of or -1) for node i."""
        return CAUSE_TEXT[self.cause[i]], int(self.cause_src[i])

    @property
    def n_in_place(self):
        """How many nodes write their result over a source."""
        return int((self.cause == IN_PLACE).sum())

    def live(self, buffer=None):
        """Live bytes at every step, (n_steps,)."""
        keep = slice(None) if buffer is None else self.a_buffer == buffer
        return live_bytes(self.a_lo[keep], self.a_hi[keep], self.a_size[keep], self.n_steps)


def check_ids(name, a):
    """A 1-D int64 array.  Errors: ParamError, ShapeError."""
    a = np.asarray(a)
    if a.size and a.dtype.kind not in "iu":
        raise ParamError(f"{name}: expected integers, got {a.dtype}")
    a = np.ascontiguousarray(a, np.int64)
    if a.ndim != 1:
        raise ShapeError(f"{name}: expected a 1-D array of tensor ids, got shape {a.shape}")
    return a


def _sizes(name, a, n):
    a = np.ascontiguousarray(a, np.int64)
    if a.shape != (n,):
        raise ShapeError(f"{name}: expected {n} sizes, one per tensor, got shape {a.shape}")
    if n and int(a.min()) < 0:
        i = int(a.argmin())
        raise ShapeError(f"{name}[{i}] = {int(a[i])}: sizes are bytes and cannot be negative")
    return a


def check_alignment(alignment):
    """int, or ParamError unless a power of two."""
    if not is_whole(alignment, 1, 1 << 40) or alignment & (alignment - 1):
        raise ParamError(f"alignment {alignment!r}: expected a power of two")
    return int(alignment)


def check_time_limit(seconds):
    """ParamError unless a number of seconds, 0 or more."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float | np.floating) or not seconds >= 0:
        raise ParamError(f"time_limit {seconds!r}: expected seconds >= 0")


def check_total(sizes, alignment, what):
    """ShapeError when the padded sizes cannot be summed in 62 bits (ggml would wrap around)."""
    n = len(sizes)
    if n * (int(sizes.max(initial=0)) + alignment) < UNBOUNDED:
        return
    total = sum(sizes.tolist()) + n * alignment
    if total >= UNBOUNDED:
        raise ShapeError(f"{what}: {total} bytes in all overflow the 62-bit address space; check the shapes")


# status of a pass -> error and text; {a}, {b}: the ids it left, {at}: a position in parse_seq, {node}: an id
_REFUSALS = {
    col.DUPLICATE: (GraphError, "tensor {a} is in the graph twice; nodes and leafs are sets"),
    col.BAD_ID: (IndexRangeError, "tensor {a} refers to id {b}, the table has rows 0..{last_row}"),
    col.FOREIGN_SRC: (GraphError, "tensor {a} needs tensor {b}, which is neither in the graph nor placed; "
                                   "add it to the graph or allocate it first"),
    col.UNORDERED: (GraphError, "node {a} needs tensor {b}, which is computed after it: "
                                 "the graph is cyclic or not in execution order"),
    col.VIEW_CYCLE: (GraphError, "tensor {a} is a view of itself through a chain of views"),
    col.BAD_BUFFER: (IndexRangeError, "tensor {a} asks for a buffer outside 0..{last_buffer}"),
    col.BAD_SEQ: (GraphError, "parse_seq[{at}] names no node of the graph, or one a second time"),
    col.NO_DATA: (GraphError, "a view in node {node} comes before its source has memory; check parse_seq"),
}


# fields of GraphPlan
_OF_NODES = [name if name.startswith("cause") else f"node_{name}" for name in PLACE]
_OF_LEAFS = [f"leaf_{name}" for name in PLACE if not name.startswith("cause")]
_OF_ALLOCATIONS = [f"a_{name}" for name in MADE]


class Problem:
    """One graph in dense rows, checked; the passes run on `graph`, a GRAPH record.

    request: what a PlanRequest has; in_place: uint8 by op number; own: per local tensor, non-zero where a tensor with
    a buffer belongs to the allocator itself (2023).
    """

    def __init__(self, request, in_place, own=None):
        node_ids, leaf_ids = check_ids("node_ids", request.node_ids), check_ids("leaf_ids", request.leaf_ids)
        table = request.table
        if table.dtype != np.int64 or table.ndim != 2 or table.shape[1] != T_WORDS or not table.flags.c_contiguous:
            raise ShapeError(f"table: expected a C-contiguous int64 matrix of {T_WORDS} columns, got "
                             f"{table.dtype} {table.shape}")
        self.table, self.n_nodes, self.m = table, len(node_ids), len(node_ids) + len(leaf_ids)
        self.alignments, self.n_buffers = np.array(request.alignment, np.int64), len(request.alignment)
        outputs, n = check_ids("outputs", request.outputs), self.n_nodes
        self.graph = GRAPH.of(
            n_rows=len(table), table=table, m=self.m, n_nodes=n, n_steps=max(n, 1), rule=MODERN,
            n_buffers=self.n_buffers, alignment=self.alignments, n_in_place=len(in_place), in_place=in_place,
            has_own=int(own is not None), own=np.empty(0, np.int64) if own is None else own,
            n_outputs=len(outputs), outputs=outputs)
        self.tensors = x = self.graph.tensor
        x["id"][:n], x["id"][n:] = node_ids, leaf_ids
        x["size"][:n] = _sizes("node sizes", request.sizes[0], n)
        x["size"][n:] = _sizes("leaf sizes", request.sizes[1], self.m - n)
        check_total(x["size"], max(request.alignment), "graph")
        x["buft"][:n] = 0 if request.node_buffers is None else request.node_buffers
        x["buft"][n:] = 0 if request.leaf_buffers is None else request.leaf_buffers
        self.raise_for(localize(self.graph))

    @property
    def allocations(self):
        """Rows of the allocations that the aliasing pass made."""
        return self.graph.allocation[:int(self.graph.count["allocations"][0])]

    def raise_for(self, status):
        """The typed error of a pass that did not end with OK."""
        if status != col.OK:
            error, text = _REFUSALS[status]
            a, b, at = (int(self.graph.count[field][0]) for field in ("a", "b", "at"))
            node = int(self.tensors["id"][at]) if status == col.NO_DATA else None     # else `at` may be anywhere
            raise error(text.format(a=a, b=b, at=at, node=node, last_row=len(self.table) - 1,
                                    last_buffer=self.n_buffers - 1))

    def alias(self, rule):
        """Run the modern aliasing pass on fresh rows (localize left the counters at zero)."""
        self.graph.rule = rule
        self.raise_for(alias_modern(self.graph))

    def replay(self, states, words):
        """Bytes of each chunk of each allocator when ggml's free list has placed everything: their highest ends.

        states: the allocators, `words` words each.  Errors: OutOfMemory, when one is bounded and too small.
        """
        if replay(self.graph, states, words) != col.OK:
            a = self.graph.allocation[int(self.graph.count["a"][0])]
            raise OutOfMemory(f"not enough space in the buffer: tensor {int(self.tensors['id'][a['first']])} needs "
                              f"{int(a['size'])} bytes; give a larger buffer or measure first")
        chunks = []
        for first in range(0, self.n_buffers * words, words):
            ends = states[first + HEAD + 1:first + words:CHUNK_HEAD + 2 * int(states[first + CAP_BLOCKS])]
            chunks.append(ends[:states[first + N_CHUNKS]].tolist())
        return chunks

    def plan(self, planner, rule, sizes, ggml_peak=None):
        """Rows -> GraphPlan."""
        n, m, (n_made, n_events, *_) = self.n_nodes, self.m, self.graph.count[0].item()
        made_at = len(PLACE) * m
        events_at = made_at + len(MADE) * n_made
        words = np.empty(events_at + len(EVENT) * n_events, np.int64)
        resolve(self.graph, int(rule == "2023"), words)
        places = words[:made_at].reshape(len(PLACE), m)
        made = words[made_at:events_at].reshape(len(MADE), n_made)
        fields = zip((*_OF_NODES, *_OF_LEAFS, *_OF_ALLOCATIONS), (*places[:, :n], *places[:len(_OF_LEAFS), n:], *made),
                     strict=True)
        return GraphPlan(planner=planner, rule=rule, n_steps=self.graph.n_steps, **dict(fields),
                         events=words[events_at:].reshape(-1, len(EVENT)), chunk_sizes=sizes,
                         ggml_peak=sum(map(sum, sizes)) if ggml_peak is None else ggml_peak)


def live_bytes(lo, hi, size, n_steps):
    """Bytes live at each of n_steps steps."""
    d = np.zeros(n_steps + 1, np.int64)
    np.add.at(d, np.minimum(lo, n_steps), size)
    np.subtract.at(d, np.minimum(hi, n_steps), size)
    return np.cumsum(d)[:n_steps]


def _most_live(events, a_size, keep):
    """Most bytes live at once among the allocations in `keep`, trims counted."""
    ev = events[keep[events[:, 1]]]
    kind, a, nbytes = ev[:, 0], ev[:, 1], ev[:, 2]
    delta = np.where(kind == col.EV_ALLOC, nbytes, -nbytes)
    left = {}
    for k in np.flatnonzero(kind == col.EV_TRIM):          # trims are rare; their nbytes are the bytes that stay
        before = left.get(a[k], a_size[a[k]])
        delta[k], left[a[k]] = nbytes[k] - before, nbytes[k]
    return int(np.cumsum(delta).max(initial=0))


def ggml_plan(p, planner, limits, rule=MODERN):
    """Plan of a fresh Problem by ggml's own free list."""
    p.alias(rule)
    chunks = p.replay(*new_states(p.n_buffers, p.m + 2, limits))
    return p.plan(planner, "views" if rule == THROUGH_VIEWS else "modern", chunks)
