"""What threads cost each other, counted by turns: no figure of benchmarks/results/core-traffic.md rises."""
import random

import numpy as np
import pytest
from helpers.sample import SEED

import ggjit as gg
from benchmarks import core_traffic
from benchmarks.recorder import record
from ggjit.cpu import sharing
from ggjit.ops.native import isa


def plan_of(n_threads, *outs):
    cpu = gg.init_backend("CPU", n_threads=n_threads)
    graph = gg.Graph(*outs)
    gg.GraphAllocator(cpu).alloc_graph(graph)
    with sharing.forced(1.0):
        return cpu.graph_plan_create(graph)


@pytest.mark.parametrize("n_threads", (2, 8, 64))
def test_a_recorded_run_computes_what_a_run_computes(n_threads):
    """Kernels of the recording are the plan's: their results are its bits, with barriers inside and between."""
    new = core_traffic.Leaves()
    a, x = new.weight(gg.F32, 64, 67), new.new(gg.F32, 64, 9)
    y = gg.soft_max(gg.mul_mat(a, x))
    z = gg.sum(gg.rms_norm(gg.mul_mat(a, x), 1e-5))
    new.filled(gg.init_backend("CPU"))
    plan = plan_of(n_threads, y, z)
    plan.compute()
    wanted = [plan.numpy(t).copy() for t in (y, z)]
    for buf in plan._written:                   # nothing of the first run is left
        buf.clear(0xA5)
    traffic = record(plan)
    assert all(np.array_equal(plan.numpy(t), w) for t, w in zip((y, z), wanted, strict=True))
    assert traffic.barriers >= len(plan.nodes) and traffic.atomics > n_threads and traffic.nbytes > 0


def test_lines_with_two_writers_are_found():
    """Two threads write the halves of one line: one line, and its bytes move to the thread that reads them."""
    x = gg.from_numpy(gg.Context(), np.ones((2, 8, 8), np.float32))
    view = gg.view_2d(x, 8, 16, 32, 0)
    traffic = record(plan_of(2, gg.norm(view, 1e-5)))
    assert traffic.lines == 0 and traffic.atomics >= 2       # chunks are whole lines
    long = gg.from_numpy(gg.Context(), np.ones((2, 1_000_000), np.float32))
    traffic = record(plan_of(2, gg.sum_rows(long)))         # long rows: worth a line with two writers
    assert traffic.lines == 1
    y = gg.scale(gg.sum_rows(long), 2.0)
    assert record(plan_of(2, y)).nbytes == 4


def some_graphs(n=1):
    """Graphs that the seed of the run draws: the kernels of each are compiled anew, which takes ten seconds."""
    return random.Random(SEED).sample(sorted(core_traffic.GRAPHS), n)


@pytest.mark.parametrize("name", some_graphs())
def test_no_figure_rises(name):
    level, published = core_traffic.published()
    if level != isa.ISA:
        pytest.skip(f"the table is of {level}, this processor's kernels are of {isa.ISA}")
    for n in core_traffic.THREADS:
        traffic = core_traffic.count(name, n)
        more = {x: (getattr(traffic, x), most) for x, most in published[name, n].items() if getattr(traffic, x) > most}
        assert not more, f"{name}, {n} threads: {more}; by kernel {traffic.by_kernel}"
