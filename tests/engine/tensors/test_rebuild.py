"""Nodes made by hand are what the builders make, or they are refused; handles cannot be changed."""
import copy
import copyreg
import pickle

import numpy as np
import pytest

import ggjit as gg
from ggjit.core.table import TABLE
from ggjit.ops.core.record import OP
from ggjit.ops.core.spec import Inputs, all_specs, ops_with
from ggjit.tensors.rebuild import _recipe, check_node

CALLS_PYTHON = {OP.MAP_CUSTOM1, OP.MAP_CUSTOM2, OP.MAP_CUSTOM3, OP.CUSTOM}


def test_every_op_can_be_rebuilt_but_those_of_users():
    assert {*ops_with("calls_python")} == CALLS_PYTHON
    assert {op for op in all_specs() if _recipe(op) is None} == CALLS_PYTHON | {OP.VIEW}    # whose memory is checked


@pytest.mark.parametrize("op", sorted(set(all_specs()) - CALLS_PYTHON), ids=lambda op: op.name.lower())
def test_what_builders_make_is_taken(op):
    """One case in seven of every op, with all the nodes it is made of."""
    ctx, scratch, n = gg.Context(), gg.Context(), 0
    cases = list(all_specs()[op].cases() if all_specs()[op].cases else ())[::7]
    made = [case.build(Inputs(ctx, np.random.default_rng(0))) for case in cases]
    for t in gg.Graph(*made).nodes if made else ():
        if t.op not in CALLS_PYTHON:
            check_node(t, scratch)
            n += t.op == op
    assert n or not all_specs()[op].cases or op == OP.FLASH_ATTN_BACK       # which no builder makes


def leaves():
    ctx = gg.Context()
    a, b = ctx.new_tensor(gg.F32, (4, 3), "a"), ctx.new_tensor(gg.F32, (4, 2), "b")
    return ctx, a, b, ctx.new_tensor(gg.I32, (2,), "ids")


HAND_MADE = {
    "no source": lambda c, a, b, i: c.node(OP.MUL_MAT, gg.F32, (3, 2), ()),
    "one source": lambda c, a, b, i: c.node(OP.MUL_MAT, gg.F32, (3, 2), (a,)),
    "none": lambda c, a, b, i: c.node(OP.MUL_MAT, gg.F32, (3, 2), (a, None)),
    "one too many": lambda c, a, b, i: c.node(OP.MUL_MAT, gg.F32, (3, 2), (a, b, b)),
    "larger": lambda c, a, b, i: c.node(OP.MUL_MAT, gg.F32, (300, 200), (a, b)),
    "another type": lambda c, a, b, i: c.node(OP.ADD, gg.F16, (4, 3), (a, a)),
    "source type": lambda c, a, b, i: c.node(OP.GET_ROWS, gg.F32, (4, 2), (a, b)),
    "absent sources": lambda c, a, b, i: c.node(OP.FLASH_ATTN_EXT, gg.F32, (4, 1, 3), (a, a, a), (1.0, 0.0, 0.0, 0)),
    "foreign params": lambda c, a, b, i: c.node(OP.ADD, gg.F32, (4, 3), (a, a), (7,)),
    "axes": lambda c, a, b, i: c.node(OP.CONCAT, gg.F32, (4, 6), (a, a), (9,)),
    "not in place": lambda c, a, b, i: c.node(OP.MUL_MAT, gg.F32, (3, 2), (a, b), view_of=a),
    "strides": lambda c, a, b, i: c.node(OP.ADD, gg.F32, (4, 3), (a, a), nb=(4, 1 << 40, 48, 48)),
    "negative strides": lambda c, a, b, i: c.node(OP.VIEW, gg.F32, (4, 3), (a,), view_of=a, nb=(4, -16, 48, 48)),
    "view outside": lambda c, a, b, i: c.node(OP.VIEW, gg.F32, (4, 3), (a,), view_of=a, view_offs=4),
    "view before": lambda c, a, b, i: c.node(OP.VIEW, gg.F32, (4, 1), (a,), view_of=a, view_offs=-4),
    "view of another": lambda c, a, b, i: c.node(OP.VIEW, gg.F32, (4, 2), (a,), view_of=b),
    "view as": lambda c, a, b, i: c.node(OP.VIEW, gg.F16, (4, 2), (a,), view_of=a),
    "reshape": lambda c, a, b, i: c.node(OP.RESHAPE, gg.F32, (4, 300), (a,), view_of=a),
    "unary": lambda c, a, b, i: c.node(OP.UNARY, gg.F32, (4, 3), (a,), (99,)),
    "custom": lambda c, a, b, i: c.node(OP.MAP_CUSTOM1, gg.F32, (4, 3), (a,), (1, 0, -1)),
    "op": lambda c, a, b, i: c.node(10 ** 6, gg.F32, (4, 3), (a,)),
    "op of another kind": lambda c, a, b, i: c.node("add", gg.F32, (4, 3), (a, a)),
    "type of another kind": lambda c, a, b, i: c.node(OP.ADD, 0, (4, 3), (a, a)),
    "text params": lambda c, a, b, i: c.node(OP.NORM, gg.F32, (4, 3), (a,), ("x",)),
    "large params": lambda c, a, b, i: c.node(OP.NORM, gg.F32, (4, 3), (a,), (1 << 40,)),
    "a list": lambda c, a, b, i: c.node(OP.ADD, gg.F32, (4, 3), (a, [1])),
    "a text": lambda c, a, b, i: c.node(OP.ADD, gg.F32, (4, 3), (a, a), view_of="a"),
    "offset": lambda c, a, b, i: c.node(OP.VIEW, gg.F32, (4, 3), (a,), view_of=a, view_offs=0.5),
    "view params": lambda c, a, b, i: c.node(OP.VIEW, gg.F32, (4, 2), (a,), (99,), view_of=a),
    "offset in params": lambda c, a, b, i: c.node(OP.VIEW, gg.F32, (4, 2), (a,), view_of=a, view_offs=16),
    "leaf params": lambda c, a, b, i: c.node(OP.NONE, gg.F32, (4, 2), (), (1,)),
    "leaf view params": lambda c, a, b, i: c.node(OP.NONE, gg.F32, (4, 2), (), (1,), view_of=a),
    "nb": lambda c, a, b, i: c.node(OP.VIEW, gg.F32, (4, 3), (a,), view_of=a, nb=(4,)),
}


@pytest.mark.parametrize("make", HAND_MADE.values(), ids=HAND_MADE)
def test_what_no_builder_makes_is_refused(make):
    ctx, *tensors = leaves()
    n = TABLE.n_alive()
    with pytest.raises(gg.GgjitError, match=r"\w"):
        make(ctx, *tensors)
    assert len(ctx.tensors) == 3 and TABLE.n_alive() <= n


def test_hand_made_nodes_compute():
    ctx, a, b, ids = leaves()
    y = ctx.node(OP.GET_ROWS, gg.F32, (4, 2), (a, ids))
    z = ctx.node(OP.MUL_MAT, gg.F32, (3, 2), (a, ctx.node(OP.VIEW, gg.F32, (4, 2), (y,), view_of=y)))
    same = gg.mul_mat(a, gg.get_rows(a, ids))
    gg.alloc_ctx_tensors(ctx, gg.init_backend("CPU"))
    a.set(np.arange(12).reshape(3, 4))
    ids.set(np.array([2, 0]))
    for one, other in zip(gg.compute(z, same)[:1], gg.compute(z, same)[1:], strict=True):
        np.testing.assert_array_equal(one, other)


def test_tensors_cannot_be_changed():
    ctx, a, b, _ = leaves()
    y = gg.add(a, a)
    before = repr(y), y.src, y.ne
    for name in ("ne", "nb", "type", "op", "src", "view_src", "view_offs", "id", "generation", "ctx", "shape", "flags",
                 "op_params", "buffer", "offs", "made_at", "colour", "__class__"):
        with pytest.raises(gg.ReadOnly, match=rf"\.{name} cannot be set"):
            setattr(y, name, None)
        with pytest.raises(AttributeError, match=rf"\.{name} cannot be deleted"):
            delattr(y, name)
    y.name = "sum"
    gg.set_name(y, "total")
    assert y.name == "total" and (y.src, y.ne) == before[1:]


def test_buffers_and_graphs_cannot_be_changed():
    ctx, a, b, _ = leaves()
    buf = gg.alloc_ctx_tensors(ctx, gg.init_backend("CPU"))
    for name in ("size", "id", "arena"):
        with pytest.raises(gg.ReadOnly, match=rf"\.{name} .*cannot be"):
            setattr(buf, name, np.zeros(1 << 10, np.uint8))
    graph = gg.Graph(gg.add(a, a))
    for name in ("nodes", "leafs", "outputs", "node_ids", "leaf_ids", "output_ids"):
        with pytest.raises(gg.ReadOnly, match=rf"\.{name} cannot be set; .*gg.Graph"):
            setattr(graph, name, getattr(graph, name))
        with pytest.raises(gg.ReadOnly, match="cannot be deleted"):
            delattr(graph, name)
    for ids in (graph.node_ids, graph.leaf_ids, graph.output_ids):
        with pytest.raises(ValueError, match="read-only"):
            ids[0] = 0
    for change in (lambda x: x.append(a), lambda x: x.clear(), lambda x: x.__setitem__(0, a), lambda x: x.sort(),
                   lambda x: x.__iadd__([a]), lambda x: x.pop()):
        for tensors in (graph.nodes, graph.leafs):
            with pytest.raises(gg.ReadOnly, match="change a copy"):
                change(tensors)
    assert copy.copy(graph.nodes) == list(graph.nodes) == [graph.outputs[0]] and graph.nodes + [a]


# ---------------------------------------------------------------- pickles
def pickled():
    ctx, a, b, ids = leaves()
    y = gg.soft_max(gg.mul_mat(a, gg.view_2d(gg.get_rows(a, ids), 4, 1, 16, 16)))
    return copyreg.dispatch_table[gg.Graph](gg.Graph(y))


def tampered():
    arguments = pickled()[1]
    version, rows, leafs, nodes, outputs = arguments
    row = {field: i for i, field in enumerate("type op ne nb ndim params src view offs flags name".split())}
    for field, values in {"op": (1 << 40, "x", None, OP.CUSTOM), "ne": ((1 << 50, 1, 1, 1), (4,), ("a",) * 4, None),
                          "nb": ((1 << 50,) * 4, (4, -4, 4, 4)), "ndim": (0, 7, "x"),
                          "src": ((99,), (-1,), ("x",), None, (0,) * 99),
                          "view": (0, 99, "x"), "offs": (1 << 40, -4, None), "flags": (1 << 70, None, -1),
                          "params": ((0,), ("x",) * 16, (1 << 40,) * 16, (7,) * 16), "type": (None, 0, gg.I32, gg.Q4_0),
                          "name": (3, None)}.items():
        for k in range(len(rows)):
            for value in values:
                changed = list(rows[k])
                if value == changed[row[field]] and type(value) is type(changed[row[field]]):
                    continue
                changed[row[field]] = value
                all_rows = [*rows[:k], tuple(changed), *rows[k + 1:]]
                yield f"{field} of {k}: {value!r}", (version, all_rows, leafs, nodes, outputs)
    for orders in ((leafs, nodes[::-1], outputs), (leafs, nodes * 2, outputs), ([], nodes, outputs), (leafs, nodes, []),
                   (leafs, nodes, [99]), (nodes, leafs, outputs), (leafs, [-1], outputs), (None, None, None)):
        yield f"order {orders}", (version, rows, *orders)
    yield "short rows", (version, [r[:-1] for r in rows], leafs, nodes, outputs)
    yield "no rows", (version, None, leafs, nodes, outputs)


def test_changed_pickles_give_one_error():
    load = pickled()[0]
    n = TABLE.n_alive()
    for what, arguments in tampered():
        try:
            graph = load(*arguments)
        except gg.BadFile as e:
            assert "changed or damaged" in str(e), what
        else:                                       # what is loaded all the same can be computed
            ctx = graph.nodes[0].ctx
            gg.alloc_ctx_tensors(ctx, gg.init_backend("CPU")).clear()
            gg.compute(*graph.outputs)
            ctx.free()
            del graph, ctx
    assert TABLE.n_alive() <= n
    ctx, a, *_ = leaves()
    graph = gg.Graph(gg.silu(a))
    assert [t.op for t in pickle.loads(pickle.dumps(graph)).nodes] == [OP.UNARY]
