"""Assignments, splits and inputs of the three rule sets: by hand, against the rules in plain Python, against ggml."""
import collections
import json
import subprocess
import sys

import numpy as np
import pytest
from helpers import devices, sched_graphs
from helpers.paths import TESTS
from helpers.requirements import need
from helpers.schedulers import RULES, draw_places, draw_world, two_layers, weight, world

import ggjit as gg
from ggjit.core.table import TABLE
from ggjit.ops.core.record import OP, T_BUFFER
from ggjit.sched.records import IS_SHARED


def shown(sched, graph):
    """([backend names of nodes], [causes], [(backend, start, end, input names)])"""
    sched.split_graph(graph)
    cut, name = sched._assigned, lambda t: t.name or t.op.name
    return ([cut.backend_of(i).name for i in range(cut.n_nodes)], [cut.cause_of(i)[0] for i in range(cut.n_nodes)],
            [(s.backend.name, s.start, s.start + len(s.nodes), [name(t) for t in s.inputs]) for s in sched.splits])


# ---------------------------------------------------------------- by hand
def test_modern_by_hand_B4_A13_10_A13_11():
    sched, (a, c) = world(devices.Fake("A"))
    nodes, causes, splits = shown(sched, two_layers(a, c))
    assert nodes == ["A", "A", "A", "CPU", "CPU", "CPU"]
    assert causes == ["1.wgt0", "2.gdn", "2.gdn", "1.wgt0", "2.rdn", "2.rdn"]
    assert splits == [("A", 0, 3, ["x", "mask"]), ("CPU", 3, 6, ["s"])]
    assert sched.n_splits == 2 and sched.n_copies == 1


def test_2024_by_hand_A12_07_A13_05_to_A13_09():
    sched, (a, c) = world(devices.Fake("A"), rules="2024")
    graph = two_layers(a, c)
    nodes, causes, splits = shown(sched, graph)
    assert nodes == ["A", "A", "A", "CPU", "CPU", "CPU"]
    assert causes == ["1.wgt0", "2.gdn", "2.gdn", "1.wgt0", "2.rdn", "2.rdn"]
    # inputs are not flagged in these rules: they follow their first user, and the mask is copied to the other
    assert splits == [("A", 0, 3, []), ("CPU", 3, 6, ["s", "mask"])]
    x, mask = graph.leafs[1], next(t for t in graph.leafs if t.name == "mask")
    assert [sched.get_tensor_backend(t).name for t in (x, mask)] == ["A", "A"]


def test_2023_by_hand_A12_06_A13_02_to_A13_04_A13_08_A13_12():
    sched, (a, c) = world(devices.Fake("A"), rules="2023")
    nodes, causes, splits = shown(sched, two_layers(a, c))
    # a node goes where its best source lies, else went; leafs follow their first user only afterwards
    assert nodes == ["A", "A", "A", "CPU", "CPU", "CPU"]
    assert causes == ["1.src0", "2.src0", "2.src0", "1.src0", "2.src0", "2.src0"]
    assert splits == [("A", 0, 3, []), ("CPU", 3, 6, ["s", "mask"])]


def test_2023_lists_a_source_at_every_use_A13_12():
    for rules, listed in (("2023", ["v", "v"]), ("2024", ["v"]), ("modern", ["v"])):
        sched, (a, c) = world(devices.Fake("A"), rules=rules)
        ctx = gg.Context()
        w, v = weight(ctx, a, "w"), weight(ctx, c, "v", (8, 1))
        _, _, splits = shown(sched, gg.Graph(gg.add(gg.add(w, v), gg.mul(w, v))))
        cut = [("A", 0, 1, listed), ("A", 1, 3, [])] if rules == "modern" else [("A", 0, 3, listed)]
        assert splits == cut, rules                     # modern: a weight to copy opens a new split
        assert len(sched._assigned.copies) == 1, "one copy, whatever the listing"


def test_2023_takes_a_worse_source_when_it_is_larger_A12_06():
    """Priority must be better than the best so far, bytes at least equal: the result depends on the order."""
    sched, (a, c) = world(devices.Fake("A"), rules="2023")
    ctx = gg.Context()
    big, small = weight(ctx, c, "big", (8, 8)), weight(ctx, a, "small", (8, 1))
    assert shown(sched, gg.Graph(gg.add(big, small)))[0] == ["CPU"], "the accelerator's source is smaller"
    sched, (a, c) = world(devices.Fake("A"), rules="2023")
    ctx = gg.Context()
    big, small = weight(ctx, a, "big", (8, 8)), weight(ctx, c, "small", (8, 1))
    assert shown(sched, gg.Graph(gg.add(big, small)))[0] == ["A"]


def test_2024_spreads_accelerators_before_the_cpu_A13_05_A13_06_A13_07():
    sched, (a, b, c) = world(devices.Fake("A"), devices.Fake("B"), rules="2024")
    ctx = gg.Context()
    x = weight(ctx, c, "x")
    y = gg.silu(gg.silu(gg.mul_mat(weight(ctx, b, "wb"), gg.silu(gg.silu(x)))))
    nodes, causes, _ = shown(sched, gg.Graph(y))
    # silu(x) reads a CPU weight: it starts on the CPU, the next one goes up from B, the last two down from B
    assert nodes == ["CPU", "B", "B", "B", "B"] and causes == ["1.wgt0", "2.gup", "1.wgt0", "2.gdn", "2.gdn"]


def test_modern_leaves_unsupported_ops_to_later_passes_B4():
    sched, (a, c) = world(devices.Fake("A", ops={OP.MUL_MAT, OP.ADD}))
    ctx = gg.Context()
    w = weight(ctx, a, "w")
    x = ctx.new_tensor(gg.F32, (8, 8), "x")
    y = gg.add(gg.mul_mat(w, gg.silu(gg.mul_mat(w, x))), x)
    nodes, causes, splits = shown(sched, gg.Graph(y))
    assert nodes == ["A", "CPU", "A", "A"] and causes[1] == "3.best"
    assert splits == [("A", 0, 1, []), ("CPU", 1, 2, ["MUL_MAT"]), ("A", 2, 4, ["UNARY"])]


def test_modern_upgrades_where_the_memory_is_the_same_B4():
    cpu = gg.init_backend("CPU:n_threads=1")
    blas = devices.Fake("BLAS", ops={OP.MUL_MAT}, host=True, type="accel").init_backend()
    host = cpu.default_buffer_type
    sched = gg.Scheduler([blas, cpu], bufts=[host, host])
    ctx = gg.Context()
    w = weight(ctx, host, "w")
    x = ctx.new_tensor(gg.F32, (8, 8), "x")
    nodes, causes, splits = shown(sched, gg.Graph(gg.silu(gg.mul_mat(w, gg.silu(x)))))
    assert nodes == ["CPU", "BLAS", "CPU"]
    assert [s[3] for s in splits] == [[], [], []], "nothing is copied: all share host memory"
    assert causes[0] in ("3.best", "2.rup", "2.rdn")


def test_weights_offload_large_batches_B4():
    for wants, where, cause in ((lambda t: True, "A", "1.off"), (None, "CPU", "1.wgt0")):
        sched, (a, c) = world(devices.Fake("A", offload=wants))
        ctx = gg.Context()
        y = gg.mul_mat(weight(ctx, c, "w"), ctx.new_tensor(gg.F32, (8, 8), "x"))
        nodes, causes, splits = shown(sched, gg.Graph(y))
        assert (nodes, causes) == ([where], [cause])
    sched, (a, c) = world(devices.Fake("A", offload=lambda t: True), op_offload=False)
    ctx = gg.Context()
    y = gg.mul_mat(weight(ctx, c, "w"), ctx.new_tensor(gg.F32, (8, 8), "x"))
    assert shown(sched, gg.Graph(y))[0] == ["CPU"]


def test_a_weight_to_copy_opens_a_split_of_its_own_B4():
    sched, (a, c) = world(devices.Fake("A", offload=lambda t: True))
    ctx = gg.Context()
    y = ctx.new_tensor(gg.F32, (8, 8), "x")
    gg.set_input(y)
    for i in range(3):
        y = gg.mul_mat(weight(ctx, c, f"w{i}"), y)
    _, _, splits = shown(sched, gg.Graph(y))
    assert [(s[0], s[3]) for s in splits] == [("A", ["w0", "x"]), ("A", ["w1"]), ("A", ["w2"])]


def test_views_stay_with_their_base_A12_10_A13_09_A13_11():
    for rules in RULES:
        sched, (a, c) = world(devices.Fake("A"), rules=rules)
        ctx = gg.Context()
        h = gg.mul_mat(weight(ctx, a, "w"), weight(ctx, a, "x"))
        v = gg.view_1d(h, 8, 32)
        y = gg.mul(weight(ctx, c, "u"), v)
        nodes, _, splits = shown(sched, gg.Graph(y))
        assert nodes[:2] == ["A", "A"], rules
        if rules == "2024":
            assert splits == [("A", 0, 2, []), ("CPU", 2, 3, ["VIEW"])], "the view stays in the earlier split"


def test_user_pins_are_never_overwritten_A13_02_A13_03_A14_14_A14_15():
    for rules in RULES:
        sched, (a, c) = world(devices.Fake("A"), rules=rules)
        graph = two_layers(a, c)
        gpu, cpu = sched.backends
        assert sched.get_tensor_backend(graph.nodes[1]) is None
        sched.set_tensor_backend(graph.nodes[1], cpu)
        assert sched.get_tensor_backend(graph.nodes[1]) is cpu
        nodes, causes, _ = shown(sched, graph)
        assert nodes[1] == "CPU" and causes[1] == "usr" and nodes[0] == "A"
        sched.reset()
        assert shown(sched, graph)[1][1] != "usr"
    with pytest.raises(gg.ParamError, match="not one of"):
        sched.set_tensor_backend(graph.nodes[0], gg.init_backend("CPU"))
    with pytest.raises(gg.TypeMismatch, match="takes a Tensor, got int"):
        sched.set_tensor_backend(3, cpu)


def test_no_limits_A1_03_A1_04_A1_05_A13_17():
    fakes = [devices.Fake(f"D{i}") for i in range(20)]
    sched, bufts = world(*fakes)
    ctx = gg.Context()
    y = weight(ctx, bufts[0], "x")
    for i in range(400):
        y = gg.mul_mat(weight(ctx, bufts[i % 20], f"w{i}"), y)
    sched.split_graph(gg.Graph(y))
    assert sched.n_splits == 400
    sched, bufts = world(devices.Fake("A"))
    ctx = gg.Context()
    y = weight(ctx, bufts[0], "x")
    xs = [ctx.new_tensor(gg.F32, (8, 8), f"i{i}") for i in range(100)]
    for x in xs:
        gg.set_input(x)
        y = gg.add(y, x)
    sched.split_graph(gg.Graph(y))
    assert [len(s.inputs) for s in sched.splits] == [100]


# ---------------------------------------------------------------- against the rules in plain Python
# graphs of the 80 that are compared, on which ggml aborts, that it would corrupt, that two backends write
EXACT = {"2023": {"compared": 38, "shared": 4, "unsafe": 38}, "2024": {"compared": 52, "shared": 3, "unsafe": 25},
         "modern": {"compared": 47, "aborts": 16, "unsafe": 17}}


@pytest.mark.parametrize("rules", RULES)
def test_random_graphs_against_the_plain_rules_A12_A13_B4(rules):
    seen = collections.Counter()
    for seed in range(80):
        rng = np.random.default_rng(seed)
        sched, bufts = draw_world(rng, rules, restricted=rules == "modern")
        drawn = sched_graphs.random_graph(seed, draw_places(rng, bufts))
        graph, backends = drawn.graph, sched.backends
        bases = {t.view_src.id for t in graph.nodes if t.view_src is not None}
        pins = {t.id: int(rng.integers(len(backends))) for t in graph.nodes
                if t.view_src is None and t.id not in bases and rng.random() < 0.1}
        pins = {i: b for i, b in pins.items()
                if backends[b].supports_op(next(t for t in graph.nodes if t.id == i))}
        for id_, b in pins.items():
            sched.set_tensor_backend(next(t for t in graph.nodes if t.id == id_), backends[b])
        try:
            want = sched_graphs.Reference(
                graph, rules, bufts, lambda b, t, x=backends: x[b].supports_op(t),
                lambda b, k, x=backends: x[b].supports_buft(k), lambda k, x=bufts: x.index(k),
                lambda b, t, x=backends: x[b].offload_op(t), pins)
        except sched_graphs.GgmlAborts:
            seen["aborts"] += 1
            continue
        sched.split_graph(graph)
        cut = sched._assigned
        if any(cut.cause_of(i)[0].startswith(("5.", "3.upg")) or want.get(t) < 0 for i, t in enumerate(graph.nodes)):
            seen["unsafe"] += 1
            continue                                    # ggml would corrupt memory, or move a pinned node
        if rules != "modern" and (cut.rows["bits"] & IS_SHARED).any():
            seen["shared"] += 1
            continue                                    # two backends write one tensor: a copy of it would be stale
        got = [backends.index(cut.backend_of(i)) for i in range(cut.n)]
        for i, t in enumerate(cut.tensors):
            assert want.get(t) in (-1, got[i]), (seed, i, t, want.get(t), got[i], cut.cause_of(i))
        assert [(backends.index(s.backend), s.start, s.start + len(s.nodes), s.inputs) for s in sched.splits] \
            == [tuple(s) for s in want.splits], seed
        seen["compared"] += 1
    assert seen == EXACT[rules]


# ---------------------------------------------------------------- against ggml itself
@pytest.mark.parametrize("wheel", ["pywhispercpp", "xllamacpp"])
def test_modern_against_ggml(wheel, tmp_path):
    need(wheel, "the real scheduler is not installed")
    jobs, kept, seen = [], [], collections.Counter()
    for seed in range(40):
        rng = np.random.default_rng(1000 + seed)
        sched, bufts = draw_world(rng, "modern", restricted=True)
        drawn = sched_graphs.random_graph(1000 + seed, draw_places(rng, bufts))
        try:
            sched_graphs.Reference(drawn.graph, "modern", bufts, lambda b, t, x=sched: x.backends[b].supports_op(t),
                                   lambda b, k, x=sched: x.backends[b].supports_buft(k), lambda k: -1,
                                   lambda b, t, x=sched: x.backends[b].offload_op(t))
        except sched_graphs.GgmlAborts:                 # it would end the worker
            seen["aborts"] += 1
            continue
        sched.split_graph(drawn.graph)
        cut = sched._assigned
        if any(cut.cause_of(i)[0].startswith("5.") for i in range(cut.n_nodes)):
            seen["unsafe"] += 1
            continue
        jobs.append(describe_job(drawn.graph, sched, bufts))
        kept.append((drawn, sched))
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps(jobs))
    r = subprocess.run([sys.executable, str(TESTS / "helpers" / "sched_oracle.py"), wheel, str(path)], text=True,
                       capture_output=True, timeout=300)
    assert r.returncode == 0, r.stderr[-2000:]
    answers = json.loads(r.stdout)
    assert len(answers) == len(kept) == 22 and seen == {"aborts": 9, "unsafe": 9}
    for answer, (_, sched) in zip(answers, kept, strict=True):
        cut, names = sched._assigned, [b.name for b in sched.backends]
        assert answer["n_splits"] == cut.n_splits
        assert answer["nodes"] == [names.index(cut.backend_of(i).name) for i in range(cut.n_nodes)]
        copied = [[bool(c >= 0) for c in cut.rows["copy"][i, :len(t.src)].tolist()]
                  for i, t in enumerate(cut.nodes)]
        assert answer["copied"] == copied


def describe_job(graph, sched, bufts):
    """Everything the worker needs to build the same graph and devices in C."""
    tensors = [*graph.leafs, *graph.nodes]
    where = {t.id: i for i, t in enumerate(tensors)}
    rows = []
    for t in tensors:
        buf = t.buffer if int(TABLE.words[t.id, T_BUFFER]) >= 0 else None
        rows.append({"op": int(t.op), "type": t.type.id, "ne": list(t.ne), "nb": list(t.nb), "flags": t.flags & 3,
                     "src": [where[s.id] for s in t.src],
                     "view": where[t.view_src.id] if t.view_src is not None else -1,
                     "offs": t.view_offs, "buft": bufts.index(buf.buft) if buf else -1,
                     "weights": bool(buf and buf.usage == gg.USAGE_WEIGHTS)})
    backends = sched.backends
    supports = [[bool(b.supports_op(t)) for b in backends] for t in tensors]
    offload = [[bool(b.offload_op(t)) for b in backends] for t in tensors]
    return {"tensors": rows, "n_leafs": len(graph.leafs), "supports": supports, "offload": offload,
            "reads": [[bool(b.supports_buft(k)) for k in bufts] for b in backends],
            "is_host": [k.is_host() for k in bufts]}
