"""Graphs as integers, for a device that has memory of its own: one row a tensor, sources first.

    row   type op role ndim view view_offs flags n_src | ne[4] nb[4] | params[16] | src[10] | arena offs
    0     F32  NONE LEAF ...                                                                  3     4096
    1     F32  MUL_MAT NODE ...                                        0 5 -1 ...             3     8192

Numbers of rows take the place of tensors, numbers of arenas that of buffers.  A source that is no result of a node is a
leaf at its place, whatever it views or was copied from; one with gaps between its rows is a view of such a leaf.
What runs on the other side is a graph of the same ops on the same bytes, so the results are the same bits.

The reader trusts nothing: each row must be what the op's builder makes of its sources (engine/tensors/rebuild.py), and
every tensor must lie inside its arena.
"""
import hashlib

import numpy as np

from ggjit.core.buffer import EmptyBuffer
from ggjit.core.table import TABLE
from ggjit.graphs.allocator import Placement
from ggjit.graphs.graph import Graph
from ggjit.graphs.pickling import tensor_of_row
from ggjit.ops.core.errors import GgjitError, IndexRangeError, NotAllocated, NotSupported, ParamError
from ggjit.ops.core.record import MAX_PARAMS, MAX_SRC, OP, VIEW_OPS
from ggjit.ops.core.shape import contiguous_nb, describe
from ggjit.ops.core.spec import ops_with
from ggjit.ops.core.types import TYPE_INFO
from ggjit.tensors.context import Context

TYPE, OP_, ROLE, NDIM, VIEW, VIEW_OFFS, FLAGS, N_SRC = range(8)
NE, NB, PARAMS, SRC = 8, 12, 16, 16 + MAX_PARAMS
ARENA, OFFS = SRC + MAX_SRC, SRC + MAX_SRC + 1
ROW_WORDS = OFFS + 1
LEAF, NODE = 0, 1
NO_ARENA = -1                   # arena number of tensors without bytes
MAX_ROWS = 1 << 16
_ROW_NBYTES = 2048              # of a row's tensor, node and NODE row in a worker, rounded up: 1.4 to 1.9 KB
MAX_NAME = 200                  # longest tensor name that is sent; names are for error messages


class Encoded:
    """A graph as rows.  `bases`: (row, tensor, byte offset in it) of every row that has memory of its own."""

    def __init__(self, graph, where, arena_of):
        self._where, self._arena_of = where, arena_of
        self._rows, self.names, self._number, self.bases = [], [], {}, []
        for t in graph.nodes:
            if t.op not in VIEW_OPS:            # a view is sent as a leaf at the place of the bytes it shows
                self._node(t)
        self.rows = np.array(self._rows, np.int64).reshape(-1, ROW_WORDS)
        self._rows = None
        if len(self.rows) > MAX_ROWS:
            raise NotSupported(f"a graph of {len(self.rows):,} tensors; a remote device takes at most {MAX_ROWS:,}")

    @property
    def key(self):
        """A hash that identifies the graph: equal rows at equal places are equal work."""
        return hashlib.blake2b(self.rows.tobytes(), digest_size=16).digest()

    def places(self):
        """(arena, offset) of every row of `bases` as they are now."""
        return [self._place(t, plus) for _, t, plus in self.bases]

    def set_places(self, places):
        self.rows[[row for row, _, _ in self.bases], ARENA:OFFS + 1] = np.array(places, np.int64).reshape(-1, 2)

    # ------------------------------------------------------------ rows
    def _place(self, t, plus=0):
        where = self._where(t)
        if where is None:
            raise NotAllocated(f"{describe(t)} has no memory; allocate leaves with alloc_ctx_tensors and the graph "
                               f"with GraphAllocator(...).alloc_graph(graph)")
        buf, offs = where
        if isinstance(buf, EmptyBuffer):
            return NO_ARENA, 0
        return self._arena_of(t, buf), offs + plus

    def _add(self, t, role, op, ne, nb, ndim, params=(0,) * MAX_PARAMS, src=(), view=-1, view_offs=0, flags=0,
             place=None):
        place = (NO_ARENA, 0) if place is None else place
        self._rows.append((t.type.id, int(op), role, ndim, view, view_offs, flags, len(src), *ne, *nb, *params, *src,
                           *(-1,) * (MAX_SRC - len(src)), *place))
        self.names.append(t.name[:MAX_NAME])
        return len(self._rows) - 1

    def _source(self, s):
        """The row of a source: of the node whose result it is, else of a leaf at its place."""
        place = self._place(s)
        found = self._number.get((s.id, *place))
        return self._leaf(s, place) if found is None else found

    def _leaf(self, s, place):
        ne, nb, name = s.ne, tuple(s.nb), (s.id, *place)
        if nb == contiguous_nb(s.type, ne):
            row = self._number[name] = self._add(s, LEAF, OP.NONE, ne, nb, s.ndim, place=place)
            self.bases.append((row, s, 0))
            return row
        flat = (-(-s.nbytes // s.type.nbytes) * s.type.block, 1, 1, 1)
        base = self._add(s, LEAF, OP.NONE, flat, contiguous_nb(s.type, flat), 1, place=place)
        self.bases.append((base, s, 0))
        row = self._number[name] = self._add(s, NODE, OP.VIEW, ne, nb, s.ndim, src=(base,), view=base)
        return row

    def _node(self, t):
        if t.op in ops_with("calls_python"):
            raise NotSupported(f"{describe(t)} calls a function of yours, which a remote device does not have; a "
                               f"Scheduler runs it on the CPU")
        src = [-1 if s is None else self._source(s) for s in t.src]
        place = self._place(t)
        facts = dict(ne=t.ne, nb=t.nb, ndim=t.ndim, params=t.op_params.tolist(), src=src, flags=t.flags)
        if t.view_src is None:
            row = self._add(t, NODE, t.op, place=place, **facts)
            self.bases.append((row, t, 0))
        else:
            base = next((self._base(k) for s, k in zip(t.src, src, strict=True)
                         if s is not None and s.base.id == t.view_src.id), None)
            if base is None:
                raise NotSupported(f"{describe(t)} shares memory with {describe(t.view_src)}, which it does not read")
            arena, offs = self._rows[base][ARENA:]
            if arena != place[0]:
                raise NotSupported(f"{describe(t)} lies in another buffer than {describe(t.view_src)}, which it views")
            row = self._add(t, NODE, t.op, view=base, view_offs=place[1] - offs, **facts)
        self._number[t.id, *place] = row

    def _base(self, row):
        view = self._rows[row][VIEW]
        return row if view < 0 else view


# ---------------------------------------------------------------- the other side
def graph_nbytes(n_rows, names_nbytes):
    """Bytes that a graph takes in a worker, about."""
    return n_rows * _ROW_NBYTES + names_nbytes


def decode(rows, names, buffers, empty):
    """(Graph, Placement) of rows that came from the wire.

    buffers: {number of an arena: Buffer}; empty: the buffer of tensors without bytes.  Errors: ParamError (damaged
    rows), IndexRangeError (outside an arena), those of the builders; nothing is kept then.
    """
    ctx = Context()
    try:
        return _decoded(ctx, rows, names, buffers, empty)
    except GgjitError:
        ctx.free()
        raise
    except (ValueError, TypeError, KeyError, IndexError, OverflowError) as e:
        ctx.free()
        raise ParamError(f"a graph that was damaged on its way: {e}") from e


def _decoded(ctx, rows, names, buffers, empty):
    tensors, leafs, nodes, where = [], [], [], {}
    if len(rows) > MAX_ROWS:
        raise ValueError(f"{len(rows):,} rows; at most {MAX_ROWS:,}")
    if len(names) != len(rows):
        raise ValueError(f"{len(rows)} rows and {len(names)} names")
    for row, name in zip(rows.tolist(), names, strict=True):
        if not 0 <= row[N_SRC] <= MAX_SRC:
            raise ValueError(f"{row[N_SRC]} sources")
        src = tuple(None if i == -1 else i for i in row[SRC:SRC + row[N_SRC]])
        view = None if row[VIEW] == -1 else row[VIEW]
        if row[ROLE] not in (LEAF, NODE) or (row[ROLE] == LEAF) != (row[OP_] == OP.NONE):
            raise ValueError("a row that is neither leaf nor node")
        t = tensor_of_row(ctx, tensors, (TYPE_INFO[row[TYPE]], row[OP_], tuple(row[NE:NE + 4]), tuple(row[NB:NB + 4]),
                                         row[NDIM], tuple(row[PARAMS:PARAMS + MAX_PARAMS]), src, view, row[VIEW_OFFS],
                                         row[FLAGS], name))
        tensors.append(t)
        (leafs if row[ROLE] == LEAF else nodes).append(t)
        if view is None:
            buf, offs = _place(t, row[ARENA], row[OFFS], buffers, empty)
            if row[ROLE] == LEAF:
                TABLE.place(t.id, buf.id, offs)
            else:
                where[t.id] = buf, offs
    if not nodes:
        raise ValueError("no nodes")
    return Graph._in_order(nodes[-1:], nodes, leafs), Placement(where)


def _place(t, arena, offs, buffers, empty):
    """(buffer, offset) after checks."""
    if not t.nbytes:
        return empty, 0
    buf = buffers.get(arena)
    if buf is None:
        raise IndexRangeError(f"{describe(t)} lies in arena {arena}, which does not exist")
    element = t.type.nbytes if t.type.block == 1 else 2
    if offs < 0 or offs % element or offs + t.nbytes > buf.size:
        raise IndexRangeError(f"{describe(t)} at byte {offs} does not fit arena {arena} of {buf.size:,} bytes")
    return buf, offs
