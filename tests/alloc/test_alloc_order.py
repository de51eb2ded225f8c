"""order="memory": the same values from every node and every write, and less live at once."""
import itertools

import numpy as np
import pytest
from helpers.requirements import benchmark

from ggjit.alloc import IN_PLACE_OPS
from ggjit.alloc.ggml.alias import MODERN, THROUGH_VIEWS
from ggjit.alloc.ggml.problem import Problem, ggml_plan
from ggjit.alloc.orders.exact_order import Bytes, least_peak
from ggjit.alloc.orders.memory_order import VIEW_OP, legal_edges, memory_order
from ggjit.alloc.orders.order_bound import Reach, fewest_before, forced, members
from ggjit.alloc.orders.order_variants import variants
from ggjit.alloc.plan_request import PlanRequest
from ggjit.ops.core.record import OP, T_OP, T_SRC, T_VIEW_SRC

graphs = benchmark("alloc_graphs")
plan_table, ordered = graphs.plan_table, graphs.ordered


def values(g, order):
    """What every node computes, symbolically: a storage's content is a hash of all that was written to it so far."""
    table, content, out = g.table, {}, {}

    def storage(i):
        while table[i, T_VIEW_SRC] >= 0:
            i = int(table[i, T_VIEW_SRC])
        return i
    for i in order:
        if VIEW_OP[table[i, T_OP]]:
            continue
        srcs = [int(s) for s in table[i, T_SRC:T_SRC + 10] if s >= 0]
        seen = tuple((s, content.get(storage(s), storage(s))) for s in srcs)
        old = content.get(storage(i)) if storage(i) != i else None
        out[i] = content[storage(i)] = hash((int(table[i, T_OP]), seen, old))
    return out, content


@pytest.mark.parametrize("seed", range(60))
def test_reordered_random_graphs_compute_the_same(seed):
    g = graphs.random_graph(seed)
    new = ordered(g.table, g.nodes, g.leafs, g.sizes).tolist()
    assert sorted(new) == sorted(g.nodes)
    assert values(g, new) == values(g, g.nodes)


def test_writes_into_a_cache_keep_their_place():
    """Reads before, between and after two writes into views of one external tensor."""
    g = graphs.Net()
    cache, x = g.weight(64, 64), g.input(64, 64)
    reads = []
    for k in range(3):
        big = g.mul_mat(g.weight(64, 64), g.mul_mat(g.view(cache, (64, 64)), x))
        reads.append(g.new(OP.SUM_ROWS, (1, 64), (big,)))
        g.expand(reads[-1])
        if k < 2:
            g.expand(g.cpy(g.unary(x), g.view(cache, (64, 32), offs=4 * 64 * 32 * k)))
    y = g.new(OP.CONCAT, (1, 192), tuple(reads))
    g.output(y)
    new = ordered(g.table, g.nodes, g.leafs, g.sizes).tolist()
    assert values(g, new) == values(g, g.nodes)
    bad = [*g.nodes[3:6], *g.nodes[:3], *g.nodes[6:]]
    assert len(set(bad)) == len(bad)
    assert values(g, sorted(g.nodes, key=lambda i: i not in g.nodes[4:9])) != values(g, g.nodes)


@pytest.mark.parametrize("name, at_most", [("inception x8", 0.85), ("randwire 60 b", 0.82), ("train gpt2 6L", 0.9),
                                           ("train densenet", 0.7), ("tinyllama pp128", 1.0), ("gpt2 pp128", 1.0)])
def test_gains(name, at_most):
    g = graphs.SUITE[name]()
    size = dict(zip(g.nodes, g.sizes[0], strict=True))
    new = ordered(g.table, g.nodes, g.leafs, g.sizes)
    before = plan_table(g.table, g.nodes, g.leafs, g.sizes, planner="best")
    after = plan_table(g.table, new, g.leafs, (np.array([size[i] for i in new.tolist()]), g.sizes[1]), planner="best")
    assert after.peak <= at_most * before.peak
    assert values(g, new.tolist()) == values(g, g.nodes)


def test_widest_branch_first():
    """Only the search from the end sees that five small results need not wait for the widest branch."""
    g = graphs.Net()
    x, outputs = g.weight(64, 64), []
    for width in (64, 128, 192, 256):
        outputs.append(g.mul_mat(g.weight(width, 64), g.mul_mat(g.weight(64, width), x)))
        g.output(outputs[-1])
    size = dict(zip(g.nodes, g.sizes[0], strict=True))
    new = ordered(g.table, g.nodes, g.leafs, g.sizes)
    after = plan_table(g.table, new, g.leafs, (np.array([size[i] for i in new.tolist()]), g.sizes[1]))
    assert after.lower_bound == size[outputs[-1]] + max(size[i] for i in g.nodes)      # the widest step, alone
    assert values(g, new.tolist()) == values(g, g.nodes)


def problem(g):
    return Problem(PlanRequest(g.table, np.array(g.nodes), g.leafs, g.sizes, alignment=1), IN_PLACE_OPS)


def test_the_exact_search_agrees_with_all_orders_there_are():
    met = 0
    for seed in range(120):
        g = graphs.random_graph(seed)
        n = len(g.nodes)
        if not 3 <= n <= 6:
            continue
        p, nbytes = problem(g), Bytes(problem(g))
        before = legal_edges(p).tolist()
        legal = [o for o in itertools.permutations(range(n)) if all(o.index(a) < o.index(b) for a, b in before)]
        least = min(nbytes.peak(o) for o in legal)
        proof = least_peak(Bytes(p), legal_edges(p), [np.array(max(legal, key=nbytes.peak))])
        assert proof.peak == proof.bound == least == nbytes.peak(proof.order) and tuple(proof.order) in legal
        met += 1
    assert met > 5


def least_of_all_orders(nbytes, n, reach, most_sets):
    """The fewest bytes at the peak of any order, from the peaks of all sets that can have run; None: too many sets."""
    layer, live, size = {0: nbytes.start}, {0: nbytes.start}, 0
    for _ in range(n):
        following = {}
        for done, peak in layer.items():
            for i in range(n):
                if done >> i & 1 or reach.above[i] & ~done:
                    continue
                top, left = nbytes.run(i, done, live[done])
                now = done | 1 << i
                live[now] = left
                following[now] = min(following.get(now, 1 << 60), max(peak, top))
        layer, size = following, size + len(following)
        if size > most_sets:
            return None
    return layer[(1 << n) - 1]


def test_the_exact_search_agrees_with_all_sets_there_are():
    """Random graphs whose sets of nodes can be counted."""
    met = 0
    for seed in range(200):
        g = graphs.random_graph(seed)
        p = problem(g)
        nbytes, edges = Bytes(p), legal_edges(p)
        least = least_of_all_orders(nbytes, p.n_nodes, Reach(p.n_nodes, edges), 3000) if p.n_nodes else None
        if least is None:
            continue
        proof = least_peak(nbytes, edges, [np.arange(p.n_nodes)])
        assert proof.peak == proof.bound == least == nbytes.peak(proof.order), seed
        met += p.n_nodes > 8
    assert met > 20


def run_before(i, n, reach):
    """Every set of nodes that can have run when node i is next."""
    free = [j for j in range(n) if j != i and not (reach.above[i] | reach.below[i]) >> j & 1]
    for k in range(1 << len(free)):
        done = reach.above[i] | sum(1 << j for b, j in enumerate(free) if k >> b & 1)
        if all(reach.above[j] & ~done == 0 for j in members(done)):
            yield done


def alive(nbytes, m, n, done):
    """Bytes of the storages that were made and are still read, or stay."""
    return sum(nbytes.own[s] for s in range(m) if (nbytes.given[s] or done >> s & 1)
               and (nbytes.stays[s] or nbytes.readers[s] & ~done))


def test_the_fewest_bytes_at_a_node_are_those_of_the_best_set_before_it():
    met = sharper = 0
    for seed in range(160):
        p = problem(graphs.random_graph(seed))
        n, nbytes, reach = p.n_nodes, Bytes(p), Reach(p.n_nodes, legal_edges(p))
        if not 3 <= n <= 12:
            continue
        least = forced(nbytes, reach)
        for i in range(n):
            during = nbytes.needs(i)
            sets = {done: alive(nbytes, p.m, n, done) + during for done in run_before(i, n, reach)}
            fewest, done = fewest_before(i, nbytes, reach)
            assert fewest == min(sets.values()) == sets[done] and least[i] <= fewest
            sharper += least[i] < fewest
            met += 1
    assert met > 50 and sharper > 3


def test_what_the_peak_says_improves_an_order():
    """The search is given no sets: the order gets better, and is proved, by what must be alive at its peak alone."""
    g = graphs.Net()
    x = g.weight(8, 64)
    small = [g.mul_mat(g.weight(8, 16), x) for _ in range(4)]
    wide = g.mul_mat(g.weight(256, 256), g.mul_mat(g.weight(8, 256), x))
    g.output(g.new(OP.CONCAT, (65, 64), (*small, g.mul_mat(g.weight(256, 1), wide))))
    p = problem(g)
    bad = np.arange(p.n_nodes)
    proof = least_peak(Bytes(p), legal_edges(p), [bad], max_states=0)
    assert proof.peak == proof.bound == Bytes(p).peak(proof.order) < Bytes(p).peak(bad) and proof.states == 0
    assert proof.peak == 2 * 4 * 256 * 64


@pytest.mark.parametrize("name", ["inception x8", "randwire 60 a", "randwire 60 b", "randwire 200", "train gpt2 6L",
                                  "unet sd1 64", "unet small 32", "train unet small"])
def test_no_order_needs_fewer_live_bytes(name):
    """Branchy and training graphs: the order found is proved, or what is left is said."""
    p = problem(graphs.SUITE[name]())
    proof = memory_order(p)
    assert proof.peak == proof.bound == Bytes(p).peak(proof.order) and sorted(proof.order) == list(range(p.n_nodes))
    short = least_peak(Bytes(p), legal_edges(p), [np.arange(p.n_nodes)], max_states=4)
    assert short.bound <= proof.bound <= short.peak


@pytest.mark.parametrize("seeds", [range(150), pytest.param(range(150, 1000), marks=pytest.mark.slow)])
def test_the_live_bytes_of_an_order_are_the_lower_bound_of_its_plan(seeds):
    """Without padding: of the better of the two rules for in-place ops."""
    for seed in seeds:
        g = graphs.random_graph(seed)
        nbytes = Bytes(problem(g))
        order = memory_order(problem(g)).order if seed % 2 else np.arange(len(g.nodes))
        nodes, sizes = np.array(g.nodes)[order], (g.sizes[0][order], g.sizes[1])
        request = PlanRequest(g.table, nodes, g.leafs, sizes, alignment=1)
        bounds = [ggml_plan(Problem(request, IN_PLACE_OPS), "ggml", [None], rule=rule).lower_bound
                  for rule in (MODERN, THROUGH_VIEWS)]
        assert nbytes.peak(order) == min(bounds), seed


def placed(g, order):
    """Peak of the plan of an order."""
    plan = plan_table(g.table, np.array(g.nodes)[order], g.leafs, (g.sizes[0][order], g.sizes[1]), planner="best",
                      alignment=1, node_limit=20_000)
    return plan.peak


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 600), marks=pytest.mark.slow)])
def test_no_order_is_placed_below_the_proved_bound(seeds):
    """All orders of small graphs, each placed: order first and offsets second gives the lowest of all of them."""
    met = 0
    for seed in seeds:
        g = graphs.random_graph(seed)
        n = len(g.nodes)
        if not 3 <= n <= 9:
            continue
        proof, before = memory_order(problem(g)), legal_edges(problem(g)).tolist()
        legal = [np.array(o) for o in itertools.permutations(range(n))
                 if all(o.index(a) < o.index(b) for a, b in before)]
        for order in legal[::-(-len(legal) // 200)]:
            assert placed(g, order) >= proof.bound == proof.peak
        assert placed(g, proof.order) == proof.bound
        met += 1
    assert met > 5


def test_an_order_whose_offsets_have_a_gap_is_changed_at_equal_live_bytes():
    g = graphs.randwire(23, 1288, 6)
    p = problem(g)
    nbytes, edges, proof = Bytes(p), legal_edges(p), memory_order(problem(g))
    assert placed(g, proof.order) > proof.peak == proof.bound       # no layout of this order is at its bound
    others = list(variants(nbytes, edges, proof.order, 8, 100))
    for order in others:
        assert sorted(order) == list(range(p.n_nodes)) and nbytes.peak(order) == proof.peak
        assert all(np.argsort(order)[a] < np.argsort(order)[b] for a, b in edges.tolist())
    assert len({tuple(order) for order in others}) > 4
    size = dict(zip(g.nodes, g.sizes[0].tolist(), strict=True))
    new = ordered(g.table, g.nodes, g.leafs, g.sizes).tolist()
    assert new == ordered(g.table, g.nodes, g.leafs, g.sizes).tolist()      # no clock decides
    plan = plan_table(g.table, new, g.leafs, (np.array([size[i] for i in new]), g.sizes[1]), planner="best")
    assert plan.peak == plan.lower_bound == proof.bound and values(g, new) == values(g, g.nodes)


def test_the_moves_of_variants_keep_what_bytes_count():
    """Live bytes as the compiled count has them are those of Bytes: no order above the limit, whatever the graph."""
    for seed in range(60):
        p = problem(graphs.random_graph(seed))
        nbytes, edges, given = Bytes(p), legal_edges(p), np.arange(p.n_nodes)
        for order in variants(nbytes, edges, given, 3, 30) if p.n_nodes else ():
            assert nbytes.peak(order) <= nbytes.peak(given)
            where = np.argsort(order)
            assert all(where[a] < where[b] for a, b in edges.tolist())


def test_orders_are_never_planned_above_the_given_one():
    for seed in range(20):
        g = graphs.random_graph(seed)
        size = dict(zip(g.nodes, g.sizes[0], strict=True))
        new = ordered(g.table, g.nodes, g.leafs, g.sizes).tolist()
        sizes = [(np.array([size[i] for i in nodes]), g.sizes[1]) for nodes in (new, g.nodes)]
        peaks = [plan_table(g.table, nodes, g.leafs, z, planner="best").peak
                 for nodes, z in zip((new, g.nodes), sizes, strict=True)]
        assert peaks[0] < peaks[1] or new == g.nodes


def test_empty():
    assert len(ordered(np.zeros((1, 40), np.int64), [], [], ([], []))) == 0
