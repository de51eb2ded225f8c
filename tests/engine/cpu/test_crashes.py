"""Ways in which a whole process once died or hung; each runs in a process of its own."""
import pytest

PRELUDE = """
import faulthandler, threading, time
import numpy as np
import ggjit as gg
faulthandler.dump_traceback_later({seconds}, exit=True)
cpu = gg.init_backend("CPU", n_threads=2)
ctx = gg.Context()

def leaf(*shape):
    t = ctx.new_tensor(gg.F32, shape)
    gg.alloc_ctx_tensors(ctx, cpu).clear()
    return t

def planned(y):
    graph = gg.Graph(y)
    allocator = gg.GraphAllocator(cpu)
    allocator.alloc_graph(graph)
    return cpu.graph_plan_create(graph), allocator
"""


def survives(python, code, seconds=100, **env):
    """The process ends by itself, after its last line."""
    r = python(PRELUDE.format(seconds=seconds) + code + "\nprint('survived')", **env)
    assert r.returncode == 0 and r.stdout.split()[-1:] == ["survived"], r.stderr[-1500:]
    return r


def test_a_position_repeated_twenty_million_times(python):
    """A view of stride 0 has as many elements as its shape says and four bytes: nothing behind them is read."""
    survives(python, """
n = 20_000_000
one = gg.from_numpy(ctx, np.zeros(1, np.int32))
x = ctx.new_tensor(gg.F16, (2, 1, n))
gg.alloc_ctx_tensors(ctx, cpu)
try:
    gg.compute(gg.rope(x, gg.transpose(gg.view_2d(one, 1, n, 0, 0)), 2, 0))
except gg.GgjitError as e:
    print(e)
""")


def test_weights_freed_while_a_product_reads_them(python):
    survives(python, """
y = gg.mul_mat(leaf(4096, 2048), leaf(4096, 64))
plan, _ = planned(y)
plan.compute()
def work():
    try:
        for _ in range(100):
            plan.compute()
    except gg.GgjitError as e:
        print(e)
t = threading.Thread(target=work)
t.start()
time.sleep(0.05)
for buf in {id(x.buffer): x.buffer for x in plan.graph.leafs}.values():
    buf.free()
t.join()
""")


@pytest.mark.parametrize("inner", ["other.compute()", "plan.compute()", "plan.numpy(y)"])
def test_an_abort_callback_that_computes_does_not_hang_the_pool(inner, python):
    survives(python, f"""
y = gg.mul_mat(leaf(4096, 2048), leaf(4096, 512))
plan, _ = planned(y)
other, _ = planned(gg.scale(leaf(8, 8), 2.0))
plan.compute(); other.compute()
def callback():
    {inner}
    return False
cpu.abort_callback = callback
for _ in range(3):
    try:
        plan.compute()
    except gg.GgjitError as e:
        print(e)
cpu.abort_callback = None
plan.compute()
assert not plan.numpy(y).any()
""")
