"""Translates graphs into the numbers that ggjit.alloc plans.

    graph, buffer types --plan_request--> PlanRequest --plan_graph--> GraphPlan        options_for: how it is planned

Markers are views without op that stand between the nodes and read a tensor, so that its memory lives up to there:
what is kept for longer than the graph says, and the work memory of kernels.
"""
import dataclasses
import functools

import numpy as np

from ggjit.alloc.plan_request import PlanOptions, PlanRequest
from ggjit.core.arguments import expect
from ggjit.core.row_sizes import nbytes_of
from ggjit.core.slots import alloc_sizes, checked_int
from ggjit.core.table import NO_PARAMS, TABLE
from ggjit.ops.core.errors import ParamError, TypeMismatch
from ggjit.ops.core.record import OP
from ggjit.ops.core.types import I8
from ggjit.ops.core.whole_numbers import is_whole
from ggjit.tensors.context import Context
from ggjit.tensors.tensor import Tensor

WORK_ALIGNMENT = 64             # bytes: a line of the processor's cache


def buffer_numbers(bufts, ids, tensors):
    """The number of its buffer type for every tensor, of equal ones the first; None where there is only one.
    ids: numbers into bufts as the user gave them, None: all 0.  Errors: ParamError."""
    if ids is None:
        return None if len(bufts) == 1 else np.zeros(len(tensors), np.int64)
    if len(expect(ids, (list, tuple, np.ndarray), "buffer ids")) != len(tensors):
        raise ParamError(f"{len(ids)} buffer ids for {len(tensors)} tensors")
    if not all(is_whole(i, 0, len(bufts) - 1) for i in ids):
        raise ParamError(f"buffer ids must be integers in 0..{len(bufts) - 1}")
    return np.array([bufts.index(bufts[i]) for i in ids], np.int64)


def plan_request(graph, bufts, node_ids=None, leaf_ids=None):
    """The PlanRequest of a graph.  node_ids, leaf_ids: as of buffer_numbers."""
    nodes, leafs = buffer_numbers(bufts, node_ids, graph.nodes), buffer_numbers(bufts, leaf_ids, graph.leafs)
    nbytes, n = nbytes_of(np.concatenate([graph.node_ids, graph.leaf_ids])), len(graph.nodes)
    sizes = alloc_sizes(bufts, nodes, graph.nodes, nbytes[:n]), alloc_sizes(bufts, leafs, graph.leafs, nbytes[n:])
    return PlanRequest(TABLE.words, graph.node_ids, graph.leaf_ids, sizes, graph.output_ids,
                       [checked_int(b, "alignment") for b in bufts], [checked_int(b, "max_size") for b in bufts],
                       nodes, leafs, len(bufts))


def options_for(graph, planner, time_limit=1.0, remember=False):
    """The PlanOptions of a planner; with the graph's own search settings where the planner is the graph's own.  graph:
    may be None."""
    made = _options if type(planner) is str and type(time_limit) in (int, float) else _options.__wrapped__
    options = made(planner, time_limit, remember)
    own = graph is not None and planner == graph.planner and graph.search
    return dataclasses.replace(options, **graph.search) if own else options


@functools.lru_cache(64, typed=True)
def _options(planner, time_limit, remember):
    return PlanOptions(planner, time_limit, remember=remember)


def asked_for(graph, bufts, planner, time_limit, node_ids=None, leaf_ids=None, alloc_deps=()):
    """(PlanRequest, PlanOptions, markers) of a plan that is remembered.  node_ids, leaf_ids: as of buffer_numbers; the
    markers keep what alloc_deps names."""
    marks = kept_markers(graph, alloc_deps) if alloc_deps != () else []
    options = options_for(graph, planner, time_limit, remember=True)
    return plan_request(graph, bufts, node_ids, leaf_ids), options, marks


# ---------------------------------------------------------------- work memory
def work_nbytes(backend, node):
    """Bytes that the node's kernel works in and that may lie with the graph's tensors.  Errors: GgjitError."""
    return checked_int(backend, "work_nbytes", node, least=0)


def work_room(nbytes, buft):
    """Bytes to place for `nbytes` of work memory: it begins at a multiple of WORK_ALIGNMENT (`work_begin`)."""
    return nbytes + max(WORK_ALIGNMENT - checked_int(buft, "alignment"), 0)


def work_begin(offs):
    """Where the work memory in a place at `offs` begins, a byte offset as well."""
    return -(-offs // WORK_ALIGNMENT) * WORK_ALIGNMENT


# ---------------------------------------------------------------- markers
def kept_markers(graph, alloc_deps):
    """[(number of the node it stands before, marker)]: views without op that keep tensors alive (as a scheduler's)."""
    for pair in expect(alloc_deps, (list, tuple), "alloc_deps"):
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(t, Tensor) for t in pair):
            raise TypeMismatch(f"alloc_deps holds pairs of tensors (tensor, until), got {pair!r}")
    if not alloc_deps:
        return []
    at, known, ctx, marks = {t.id: i for i, t in enumerate(graph.nodes)}, set(graph.leaf_ids.tolist()), Context(), []
    for t, until in alloc_deps:
        if until.id not in at or t.id not in known and at.get(t.id, len(at)) > at[until.id]:
            raise ParamError(f"alloc_deps: {t!r} cannot be kept until {until!r}; expected a tensor of the graph and a "
                             f"node that runs after it")
        src = (t,) if t.view_src is None else (t.base, t)
        marker = ctx._add(t.type, OP.NONE, t.ne, t.nb, t.ndim, NO_PARAMS, src, t.base, t.view_offs, "")
        marks.append((at[until.id] + 1, marker))
    return marks


def work_markers(room):
    """[(number of the node it stands before, marker)]: the work memory of every node that has some, and behind the
    node a view that reads it, so that it lives for that node alone.  room: bytes of each node, 0 for none."""
    ctx, marks = Context(), []
    for i, n in enumerate(room):
        if n:
            work = ctx.new_tensor(I8, (n,))
            end = ctx._add(I8, OP.NONE, work.ne, work.nb, work.ndim, NO_PARAMS, (work,), work, 0, "")
            marks += [(i, work), (i + 1, end)]
    return marks


def with_markers(request, marks):
    """(the request with the markers among its nodes, their places there).  In buffer 0: they lie where they view."""
    marks = sorted(marks, key=lambda m: m[0])
    at = [place for place, _ in marks]
    buffers = request.node_buffers
    return dataclasses.replace(
        request, node_ids=np.insert(request.node_ids, at, [m.id for _, m in marks]),
        sizes=(np.insert(request.sizes[0], at, [m.nbytes for _, m in marks]), request.sizes[1]),
        node_buffers=None if buffers is None else np.insert(buffers, at, 0)), [k + n for n, k in enumerate(at)]


def without_markers(plan, at):
    """The plan without the nodes at these places."""
    names = [f.name for f in dataclasses.fields(plan) if f.name.startswith(("node_", "cause"))]
    return dataclasses.replace(plan, **{name: np.delete(getattr(plan, name), at) for name in names})
