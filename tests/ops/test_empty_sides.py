"""Sources without elements: checked whole, and done at once however long their other axes are."""
import time

import numpy as np
import pytest
from campaign.runner import TESTS_PATH
from helpers.interpreter import Interpreter

import ggjit as gg

LONG = 1 << 31


def tensors(*shapes):
    """(context, leaves with zeros)"""
    ctx = gg.Context()
    leaves = [ctx.new_tensor(gg.F32, ne) for ne in shapes]
    gg.alloc_ctx_tensors(ctx, gg.init_backend("CPU", n_threads=1))
    return leaves


def done_at_once(y):
    """The values of y; fails where they take longer than a moment."""
    cpu, graph = gg.init_backend("CPU", n_threads=1), gg.Graph(y)
    gg.GraphAllocator(cpu).alloc_graph(graph)
    plan = cpu.graph_plan_create(graph)
    began, end = time.thread_time(), time.monotonic() + 5
    cpu.abort_callback = lambda: time.monotonic() > end
    plan.compute()
    assert time.thread_time() - began < 0.5
    return plan.numpy(y)


@pytest.mark.parametrize("ne", [(0, 2, 17, LONG), (8, 0, 4, LONG), (8, 6, 0, LONG), (LONG, 0, 4, 2)])
def test_repeat_back(ne):
    a, b = tensors(ne, (8 if ne[0] < LONG else 1, 2, 1, 2))
    assert not done_at_once(gg.repeat_back(a, b)).any()


@pytest.mark.parametrize("build", [gg.acc, gg.set])
def test_windows(build):
    a, b = tensors((256, 17), (0, 16, LONG))
    a.set(np.ones(a.shape))
    assert (done_at_once(build(a, b, *a.nb[1:], 0)) == 1).all()


def test_sum():
    assert done_at_once(gg.sum(tensors((0, 17, LONG))[0])) == 0


def test_a_convolution_of_no_channels():
    kernel, data = tensors((11, LONG, 0, 9), (40, LONG, 0, 3))
    assert not done_at_once(gg.conv_2d_direct(kernel, data, 3, 1, 2, 1, 1, 1)).any()


@pytest.mark.parametrize("ne", [(32, 0), (32, 2), (31,), (0,), (32, 1, 0)])
@pytest.mark.parametrize("name", ["rope_ext", "rope_multi"])
def test_frequency_factors_are_one_row(name, ne):
    a, factors = tensors((64, 2, 3), ne)
    pos = gg.from_numpy(a.ctx, np.zeros(3 * (1 if name == "rope_ext" else 4), np.int32))
    sections = ((8, 8, 8, 8),) if name == "rope_multi" else ()
    with pytest.raises(gg.ShapeError, match="freq_factors must be one row with a value for each of the 32 pairs"):
        getattr(gg, name)(a, pos, factors, 64, *sections, 8 if sections else 2, 0, 1e4, 1.0, 0.0, 1.0, 0.0, 0.0)


def test_every_builder_with_empty_sources_reads_nothing_beyond_them():
    """In a process of its own: memory ends at a page that cannot be touched."""
    child = Interpreter(PYTHONPATH=TESTS_PATH)
    done = child.run("""
import itertools
from campaign import calls as c
from helpers.builder_calls import Leaf, Result, build, calls, changed
from ggjit.ops.core.errors import GgjitError
import ggjit as gg
n = 0
for name, some in sorted(calls().items()):
    for args in some[::4]:
        leaves = [i for i, a in enumerate(args) if isinstance(a, (Leaf, Result))]
        for i, axis in itertools.product(leaves, range(4)):
            new = [changed(a, "empty", axis, axis) if k == i else a for k, a in enumerate(args)]
            try:
                out = build(name, new, 1, c.place(True))
                if isinstance(out, gg.Tensor):
                    c.compute(name, new, out)
                n += 1
            except GgjitError:
                pass
            c.guarded.take_back()
print(n)
""")
    child.close()
    assert not done.returncode and int(done.stdout) > 500, done.stderr


@pytest.mark.parametrize("type", [gg.BF16, gg.Q4_0, gg.IQ4_NL], ids=repr)
def test_many_rows_without_a_value_are_converted_at_once(type):
    shape = (32, LONG, 5, 0)
    raw = gg.quantize(type, np.empty(shape, np.float32))
    assert raw.shape == shape and gg.dequantize(type, raw, shape).shape == shape
    t = gg.tensor(np.empty(shape, np.float32), type=type)
    assert t.numpy().shape == shape
