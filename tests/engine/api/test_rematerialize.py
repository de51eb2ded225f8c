"""gg.rematerialize: the same bits within a number of bytes, and what is proved about the price."""
import heapq
import itertools
import pickle

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import ggjit as gg
from ggjit.alloc.orders.recompute import Recomputation
from ggjit.alloc.orders.schedules import AGAIN, KEEP, TAKE
from ggjit.api import rematerialize
from ggjit.api.remat_nodes import RematNodes
from ggjit.api.rematerialize import Point, _thinned, within


def leaf(ctx, *shape, name="", seed=0):
    values = np.random.default_rng([seed, *shape, len(name)]).standard_normal(shape).astype(np.float32)
    return gg.from_numpy(ctx, values, name)


def deep(n_layers=6, width=16, rows=64):
    """(graph of a loss and its gradients, loss, gradients): a residual net whose activations outweigh its weights."""
    ctx = gg.Context()
    x, ws = leaf(ctx, rows, width, name="x"), []
    with ctx:
        h = x
        for i in range(n_layers):
            ws.append(gg.set_param(leaf(ctx, width, width, name=f"w{i}", seed=i)))
            h = gg.add(h, gg.silu(gg.mul_mat(ws[-1], gg.norm(h, 1e-5))))
        loss = gg.sum(gg.sqr(h))
        grads = gg.grad(loss, ws)
    return gg.Graph(loss, *grads), loss, grads


def run(graph, outputs):
    """(values of the outputs, bytes of the arena that was allocated)."""
    cpu = gg.init_backend("CPU")
    allocator = gg.GraphAllocator(cpu)
    allocator.alloc_graph(graph)
    plan = cpu.graph_plan_create(graph)
    plan.compute()
    return [plan.numpy(t).tobytes() for t in outputs], sum(map(sum, allocator.last.chunk_sizes))


def close(got, want):
    """Whether lists of float32 bytes differ by rounding at most."""
    pairs = [[np.frombuffer(x, np.float32) for x in both] for both in zip(got, want, strict=True)]
    return all(np.abs(a - b).max() <= 1e-5 * np.abs(b).max() + 1e-30 for a, b in pairs)


# ---------------------------------------------------------------- graphs
@pytest.mark.parametrize("share", [0.9, 0.6, 0.4])
def test_the_same_bits_in_fewer_bytes(share):
    graph, loss, grads = deep()
    want, most = run(graph, graph.outputs)
    budget = int(share * most)
    small = gg.rematerialize(graph, budget)
    got, arena = run(small, small.outputs)
    assert got == want and arena == small.peak == gg.measure(small).peak <= budget
    assert small.n_again > 0 and 0 <= small.bound <= small.extra < 1
    assert small.of(loss) is small.outputs[0] and small.of(grads[1]) is small.outputs[2]
    assert len(small.nodes) > len([t for t in graph.nodes if t.id in {x.id for x in small.nodes}])


def test_gradients_larger_than_what_they_are_made_of_wait_for_the_end():
    """Wide rows first, then a layer of large weights and few rows, as in a network of pictures."""
    ctx = gg.Context()
    x, w, ws = leaf(ctx, 512, 16, name="x"), gg.set_param(leaf(ctx, 64, 2048, name="large")), []
    with ctx:
        h = x
        for i in range(4):
            ws.append(gg.set_param(leaf(ctx, 16, 16, name=f"w{i}", seed=i)))
            h = gg.add(h, gg.silu(gg.mul_mat(ws[-1], gg.norm(h, 1e-5))))
        loss = gg.sum(gg.sqr(gg.mul_mat(w, gg.reshape_2d(h, 2048, 4))))
        graph = gg.Graph(loss, *gg.grad(loss, [w, *ws]))
    units = RematNodes(graph, gg.init_backend("CPU").default_buffer_type, {})
    late = [units.tensors[k] for k in np.flatnonzero(units.apart)]
    assert [t.id for t in late] == [graph.outputs[1].id] and late[0].nbytes == w.nbytes
    least = [units.numbers.in_order(order).least().peak for order in units.sorted()]
    assert len(least) == 4 and min(least[2:]) < 0.9 * min(least[:2])
    want, _ = run(graph, graph.outputs)
    small = gg.rematerialize(graph, int(0.9 * min(least[:2])), cut=False)
    assert run(small, small.outputs)[0] == want


def test_nothing_is_made_again_where_there_is_room():
    graph, loss, _ = deep()
    small = gg.rematerialize(graph, gg.measure(graph).peak)
    assert small.n_again == small.extra == small.bound == 0 and small.of(loss) is loss


def test_the_least_budget_is_told_and_works():
    graph, *_ = deep()
    with pytest.raises(gg.BudgetError, match="1.00 KiB are too few for .* nodes: the least peak found is") as error:
        gg.rematerialize(graph, 1024)
    least = error.value.minimum
    assert gg.rematerialize(graph, least).peak <= least
    with pytest.raises(gg.BudgetError, match="at .* more operations"):
        gg.rematerialize(graph, least // 2)


@pytest.mark.parametrize("cut", [True, False])
def test_quickly_every_smaller_budget_is_refused_and_every_larger_one_met(cut):
    graph, *_ = deep()
    buft = gg.init_backend("CPU").default_buffer_type
    least = within(graph, 0, buft, cut, quick=True)[1]
    for budget in (0, least // 2, least - 1):
        assert within(graph, budget, buft, cut, quick=True) == (None, least)
    most = gg.measure(graph).peak
    for budget in (least, least + 1, least + 4096, *range(least, most + 1, (most - least) // 7), most):
        small, peak = within(graph, budget, buft, cut, quick=True)
        assert small is not None and gg.measure(small).peak == peak <= budget


def test_the_quick_least_is_about_the_least_and_graphs_too_large_to_cut_try_no_cut(monkeypatch):
    graph, *_ = deep()
    buft = gg.init_backend("CPU").default_buffer_type
    least, quick = within(graph, 0, buft, cut=False)[1], within(graph, 0, buft, cut=False, quick=True)[1]
    assert least <= quick <= 1.2 * least
    monkeypatch.setattr(rematerialize, "MAX_UNITS", 10)
    monkeypatch.setattr(rematerialize, "region_of", None)
    assert within(graph, 0, buft, quick=True) == (None, quick)


def test_what_is_written_in_place_is_written_once():
    ctx = gg.Context()
    x, w = leaf(ctx, 64, 16, name="x"), gg.set_param(leaf(ctx, 16, 16, name="w"))
    total, log = leaf(ctx, 16, 16, name="total"), gg.from_numpy(ctx, np.zeros((64, 16), np.float32))
    with ctx:
        a = gg.silu(gg.mul_mat(w, x))
        b = gg.silu(gg.mul_mat(w, gg.scale_inplace(gg.scale(a, 2.0), 3.0)))
        c = gg.mul(gg.cpy(b, log), a)
        loss = gg.sum(c)
        d = gg.add_inplace(total, gg.grad(loss, w))
    graph, before = gg.Graph(loss, d), total.numpy()
    want, _ = run(graph, (loss,))
    added = total.numpy() - before
    small = gg.rematerialize(graph, int(0.85 * gg.measure(graph).peak))
    total.set(before)
    got, _ = run(small, (small.of(loss),))
    assert got == want and small.n_again and (total.numpy() - before == added).all()
    writers = [t for t in small.nodes if t.op.name in ("CPY",) or t.view_src is not None and t.view_src.id == total.id]
    assert len(writers) == 2


def test_outputs_that_are_views_or_written_in_place_stay_alive_to_the_end():
    """What is planned as alive is what the offsets need."""
    ctx = gg.Context()
    x, w = leaf(ctx, 64, 16, name="x"), gg.set_param(leaf(ctx, 16, 16, name="w"))
    with ctx:
        a = gg.silu(gg.mul_mat(w, x))
        b = gg.scale_inplace(gg.mul(a, x), 3.0)
        c = gg.transpose(gg.tanh(a))
        loss = gg.sum(gg.sqr(gg.mul_mat(w, gg.gelu(gg.mul_mat(w, a)))))
        graph = gg.Graph(b, c, loss, gg.grad(loss, w))
    units = RematNodes(graph, gg.init_backend("CPU").default_buffer_type, {})
    kept = {t.op.name for t, flag in zip(units.tensors, units.numbers.flags, strict=True) if flag & KEEP}
    assert {"MUL", "SCALE", "UNARY", "SUM"} < kept
    want, _ = run(graph, graph.outputs)
    small = gg.rematerialize(graph, int(0.8 * gg.measure(graph).peak))
    got, arena = run(small, small.outputs)
    assert got == want and arena == small.peak == gg.measure(small).peak


@st.composite
def networks(draw):
    """A random training graph: products, norms, views, residuals, gates."""
    ctx = gg.Context()
    width, rows = draw(st.sampled_from([8, 12])), draw(st.sampled_from([16, 24]))
    ws, with_ids = [], draw(st.integers(0, 999))
    with ctx:
        layers = [leaf(ctx, rows, width, name="x", seed=with_ids)]
        for i in range(draw(st.integers(2, 7))):
            h, kind = layers[-1], draw(st.integers(0, 5))
            other = layers[draw(st.integers(0, len(layers) - 1))]
            if kind < 2:
                ws.append(gg.set_param(leaf(ctx, width, width, name=f"w{i}")))
                h = gg.mul_mat(ws[-1], h)
            elif kind == 2:
                h = gg.add(gg.silu(h), other)
            elif kind == 3:
                h = gg.mul(gg.norm(h, 1e-5), other)
            elif kind == 4:
                h = gg.cont(gg.transpose(gg.cont(gg.transpose(gg.gelu(h)))))
            else:
                h = gg.concat(gg.tanh(gg.cont(gg.view_2d(h, width // 2, rows, h.nb[1], 0))),
                              gg.cont(gg.view_2d(h, width // 2, rows, h.nb[1], width * 2)), 0)
            layers.append(h)
        ws.append(gg.set_param(leaf(ctx, width, width, name="last")))
        loss = gg.sum(gg.sqr(gg.mul_mat(ws[-1], layers[-1])))
        return gg.Graph(loss, *gg.grad(loss, [w for w in ws if w.id in _upstream(loss)]))


def _upstream(t):
    graph = gg.Graph(t)
    return {x.id for x in (*graph.nodes, *graph.leafs)}


@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(networks(), st.floats(0.3, 0.95))
def test_random_networks(graph, share):
    want, most = run(graph, graph.outputs)
    try:
        small = gg.rematerialize(graph, int(share * most))
    except gg.BudgetError as e:
        assert e.minimum > share * most
        small = gg.rematerialize(graph, e.minimum)
    got, arena = run(small, small.outputs)
    assert arena == gg.measure(small).peak <= small.peak
    assert close(got, want) and (got == want or not small.same_bits)
    assert small.bound <= small.extra + 1e-9


def test_measured_times_are_costs():
    graph, *_ = deep()
    run(graph, ())
    cpu = gg.init_backend("CPU", fuse=0)
    with gg.profile() as p:
        cpu.graph_compute(graph)
    small = gg.rematerialize(graph, gg.measure(graph).peak * 2 // 3, profile=p)
    assert small.n_again and run(small, small.outputs)[0] == run(graph, graph.outputs)[0]
    with pytest.raises(gg.ParamError, match="profile is a gg.profile"):
        gg.rematerialize(graph, 10_000, profile=3)


def test_pareto():
    graph, *_ = deep()
    points = gg.measure(graph).pareto(6)
    peaks, extra = zip(*points, strict=True)
    assert len(points) > 2 and extra[0] == 0 and list(peaks) == sorted(peaks, reverse=True)
    assert list(extra) == sorted(extra) and points[0].peak <= gg.measure(graph).peak
    assert points._repr_png_().startswith(b"\x89PNG") and points.plot().get_xlabel() == "peak, MiB"
    with pytest.raises(gg.ParamError, match="n is a number of points"):
        gg.measure(graph).pareto(1)


def test_points_of_nearly_one_peak_are_thinned():
    """The ends stay, or what is cheaper beside them; no point costs more than a larger one."""
    graph, *_ = deep()
    n = 12
    points = gg.measure(graph).pareto(n)
    gaps = -np.diff([p.peak for p in points])
    assert gaps.min() >= (points[0].peak - points[-1].peak) / (4 * n)
    least = pytest.raises(gg.BudgetError, gg.rematerialize, graph, 0, cut=False).value.minimum
    assert points[-1].peak <= least + points[0].peak / n
    thin = _thinned([Point(*p) for p in ((100, 0.5), (120, 0.2), (500, 0.2), (900, 0.0),
                                                                     (910, 0.01), (868, 0.1))], 10)
    assert [tuple(p) for p in thin] == [(900, 0.0), (868, 0.1), (120, 0.2)]
    assert _thinned([Point(7, 0.0)] * 2, 2) == [(7, 0.0)]


def test_mistakes():
    graph, *_ = deep(2)
    with pytest.raises(gg.TypeMismatch, match="rematerialize takes a Graph"):
        gg.rematerialize(graph.outputs[0], 1000)
    with pytest.raises(gg.TypeMismatch, match="budget must be an integer"):
        gg.rematerialize(graph, "1M")
    with pytest.raises(gg.ParamError, match="0 or more"):
        gg.rematerialize(graph, -1)
    with pytest.raises(gg.TypeMismatch, match="target"):
        gg.rematerialize(graph, 1000, target="CPU")
    with pytest.raises(gg.ParamError, match="not a result of the graph that was rematerialized"):
        gg.rematerialize(graph, 1 << 30).of(gg.Context().new_tensor(gg.F32, 3))


def test_parameters_without_memory_and_graphs_without_nodes():
    ctx = gg.Context()
    w, x = gg.set_param(ctx.new_tensor(gg.F32, (16, 16), name="w")), leaf(ctx, 64, 16, name="x")
    y = gg.sum(gg.sqr(gg.silu(gg.mul_mat(w, x))))
    small = gg.rematerialize(gg.Graph(y), gg.measure(gg.Graph(y)).peak)
    assert w.id in {t.id for t in small.nodes} and gg.measure(small).peak == gg.measure(gg.Graph(y)).peak
    for t in (x, gg.transpose(x)):
        assert gg.rematerialize(gg.Graph(t), 0).bound == 0


def test_pickles():
    graph, *_ = deep()
    small = gg.rematerialize(graph, gg.measure(graph).peak // 2)
    again = pickle.loads(pickle.dumps(small))
    assert [t.op for t in again.nodes] == [t.op for t in small.nodes]
    with pytest.raises(gg.BudgetError, match="are too few") as error:
        gg.rematerialize(graph, 0)
    assert pickle.loads(pickle.dumps(error.value)).minimum == error.value.minimum


# ---------------------------------------------------------------- numbers
def chain(n):
    """n forward nodes of 10 bytes and n backward ones, each of which reads its forward node and the one before."""
    reads = [[i - 1] if i else [] for i in range(n)]
    reads += [[n - 1 - i] + ([n + i - 1] if i else []) for i in range(n)]
    return Recomputation([10] * 2 * n, [1] * 2 * n, reads, [AGAIN] * n + [0] * (n - 1) + [KEEP])


def peak_by_hand(problem, events):
    """Most bytes alive, event by event."""
    most = 0
    for j in range(len(events)):
        alive = 0
        for i in range(j + 1):
            v, until = events[i], i
            for k in range(i + 1, len(events)):
                until = k if v in problem.idx[problem.ptr[events[k]]:problem.ptr[events[k] + 1]] else until
                if events[k] == v:
                    break
            else:
                until = len(events) if problem.flags[v] & KEEP else until
            alive += problem.size[v] * (until >= j)
        most = max(most, alive)
    return most


@pytest.mark.parametrize("limit", [100, 80, 60, 50])
def test_schedules_of_a_chain(limit):
    problem = chain(12)
    assert problem.plain.peak == 130
    found = problem.fit(limit)
    events = found.events.tolist()
    assert found.peak == peak_by_hand(problem, events) <= limit
    assert set(events) == set(range(24)) and problem.bound(limit) <= found.extra
    made = set()
    for v in events:
        assert made.issuperset(problem.idx[problem.ptr[v]:problem.ptr[v + 1]].tolist())
        made.add(v)
    assert sum(v >= 12 for v in events) == 12            # gradients are made once


def test_the_least_is_between_the_largest_node_and_the_plain_peak():
    problem = chain(12)
    assert problem.fit(problem.least_node - 1) is None
    assert problem.least_node == 30 <= problem.least().peak <= 50


def test_an_output_in_place_of_an_input_counts_once():
    plain, in_place = (Recomputation([8, 8, 8], [1] * 3, [[], [0], [1]], [0, flag, flag | KEEP]) for flag in (0, TAKE))
    assert (plain.plain.peak, in_place.plain.peak) == (16, 8)


def cheapest_by_hand(p, limit):
    """The least extra cost of any schedule within `limit` bytes, in any order: all states are visited."""
    reads = [p.idx[p.ptr[v]:p.ptr[v + 1]].tolist() for v in range(p.n)]
    leaves = [v for v in range(p.n) if not reads[v] and not p.flags[v] & AGAIN]
    kept = {v for v in range(p.n) if p.flags[v] & KEEP}
    start = frozenset(leaves), frozenset(leaves)                    # made, alive
    queue, done, number = [(0, 0, start)], set(), itertools.count(1)
    while queue:
        cost, _, (made, alive) = heapq.heappop(queue)
        if (made, alive) in done:
            continue
        done.add((made, alive))
        if len(made) == p.n and kept <= alive:
            return cost
        for drop in alive:
            heapq.heappush(queue, (cost, next(number), (made, alive - {drop})))
        for v in range(p.n):
            takes = p.flags[v] & TAKE and any(p.size[x] == p.size[v] for x in reads[v])
            room = sum(p.size[x] for x in alive) + (0 if takes else p.size[v])
            may = v not in alive and (v not in made or p.flags[v] & AGAIN)
            if may and alive.issuperset(reads[v]) and room <= limit:
                again = int(p.cost[v]) if v in made else 0
                heapq.heappush(queue, (cost + again, next(number), (made | {v}, alive | {v})))
    return None


@pytest.mark.parametrize("seed", range(25))
def test_no_schedule_in_any_order_is_cheaper_than_the_bound(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(4, 9))
    reads = [sorted(rng.choice(v, min(v, rng.integers(1, 3)), replace=False).tolist()) for v in range(n)]
    flags = [AGAIN * int(v < n // 2 and rng.random() < 0.9) | TAKE * int(rng.random() < 0.2) for v in range(n)]
    flags[-1] = KEEP
    p = Recomputation(rng.integers(1, 6, n), rng.integers(1, 9, n), reads, flags)
    for limit in range(p.least_node, p.plain.peak):
        least = cheapest_by_hand(p, limit)
        assert least is None or p.bound(limit) <= least / p.total + 1e-9
