"""The record that all passes over one graph share, made once in Python.

A graph of n_nodes nodes and n_leafs leafs has m = n_nodes + n_leafs local tensors: nodes first, in execution order,
then leafs.  Local numbers take the place of table ids, so that every pass runs over dense rows.
"""
import numpy as np

from ggjit.ops.core.record import MAX_SRC, T_WORDS
from ggjit.ops.native.jit import exact
from ggjit.ops.native.records import JitRecord, row

TENSOR = np.dtype([(field, "i8") for field in (
    "id",                       # table id
    "view", "view_offs",        # local root, NONE, FOREIGN; bytes from it
    "flags",                    # bits below
    "size",                     # bytes, not padded
    "buft",                     # buffer it wants
    "kids", "views", "own",     # ggml's hash node
    "uses",                     # children and views over the whole graph
    "alloc", "rel_offs",        # allocation, -1; bytes from its start
    "cause", "cause_src")] + [  # why not in place
    ("src", "i8", MAX_SRC)])    # local sources of a node
ALLOCATION = row(
    "first",                    # local tensor that created it
    "lo", "hi",                 # first step it is live, and first it is dead (n_steps: never freed)
    "size", "left",             # bytes, padded; bytes that remain after parts were given back
    "buft", "chunk", "offs")    # where the free list put it
EVENT = row("kind", "alloc", "nbytes", "step")
GRAPH = JitRecord(
    "GraphRecord",
    n_rows="i64", table=f"i64[n_rows * {T_WORDS}]",
    m="i64", n_nodes="i64", n_steps="i64", rule="i64",          # local tensors; of alias.py, or unused
    n_buffers="i64", alignment="i64[n_buffers]",
    n_in_place="i64", in_place="u8[n_in_place]",                # by op number
    has_own="i64", own="i64[m * has_own]",                      # tensors whose buffer is the allocator's own (2023)
    n_outputs="i64", outputs="i64[n_outputs]",                  # ids kept to the end, whether in the graph or not
    tensor=(TENSOR, "m"), allocation=(ALLOCATION, "m"), event=(EVENT, "3 * m"),
    # a, b, at: the tensors or position at which a pass failed
    count=row("allocations", "events", "a", "b", "at"))
graph_at = GRAPH.at

NONE, FOREIGN = -1, -2          # no tensor; a tensor outside the graph that has memory of its own
EXTERNAL, OUTPUT, INPUT, CAN_INPLACE, MARKER = 1, 2, 4, 8, 16      # flags
EV_ALLOC, EV_FREE, EV_TRIM = 0, 1, 2

# statuses of the passes
OK, DUPLICATE, BAD_ID, FOREIGN_SRC, UNORDERED, VIEW_CYCLE, BAD_BUFFER, NO_ROOM, NO_DATA, BAD_SEQ = range(10)


@exact
def put_event(g, kind, a, nbytes, step):
    e = g.event[g.count.events]
    e.kind, e.alloc, e.nbytes, e.step = kind, a, nbytes, step
    g.count.events += 1


@exact
def base_of(g, i):
    """Local number of the tensor whose memory i has: the root of a view, else i itself."""
    return g.tensor[i].view if g.tensor[i].view >= 0 else i


@exact
def pad(n, alignment):
    """n rounded up to a multiple of a power of two."""
    return (n + alignment - 1) & -alignment
