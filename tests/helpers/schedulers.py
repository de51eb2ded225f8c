"""Schedulers on test devices, graphs for them, and what one CPU computes from the same leaves."""
import numpy as np

import ggjit as gg
from ggjit.ops.core.record import OP
from ggjit.sched.records import KEPT
from helpers import devices

RULES = ("2023", "2024", "modern")
RNG = np.random.default_rng(5)


def weight(ctx, buft, name, ne=(8, 8)):
    t = ctx.new_tensor(gg.F32, ne, name)
    buf = buft.alloc_buffer(t.nbytes)
    buf.set_usage(gg.USAGE_WEIGHTS)
    gg.tensor_alloc(buf, t, 0)
    return t


def world(*fakes, **kwargs):
    """Scheduler on test devices and the CPU; returns it and the buffer types."""
    cpu = gg.init_backend("CPU:n_threads=1")
    sched = gg.Scheduler([*(f.init_backend() for f in fakes), cpu], **kwargs)
    return sched, sched.support.own_bufts


def two_layers(gpu, cpu):
    """Weights of layer 1 on A, of layer 2 on the CPU; an input without memory, a mask both layers read."""
    ctx = gg.Context()
    w1, w2 = weight(ctx, gpu, "w1"), weight(ctx, cpu, "w2")
    x, mask = ctx.new_tensor(gg.F32, (8, 8), "x"), ctx.new_tensor(gg.F32, (8, 8), "mask")
    gg.set_input(x)
    gg.set_input(mask)
    h = gg.set_name(gg.mul_mat(w1, x), "h")                 # 0
    h = gg.set_name(gg.add(h, mask), "hm")                  # 1
    h = gg.set_name(gg.silu(h), "s")                        # 2
    y = gg.set_name(gg.mul_mat(w2, h), "y")                 # 3
    y = gg.set_name(gg.add(y, mask), "ym")                  # 4
    return gg.Graph(gg.set_name(gg.silu(y), "out"))         # 5


def draw_world(rng, rules, restricted):
    fakes = []
    for name in "ABC"[:int(rng.integers(1, 4))]:
        ops = None
        if restricted:
            pool = [OP.MUL_MAT, OP.ADD, OP.MUL, OP.UNARY, OP.SCALE, OP.RMS_NORM, OP.CONT, OP.SOFT_MAX, OP.SUB, OP.CPY,
                    OP.CONCAT]
            ops = {op for op in pool if rng.random() < 0.6}
        wants = (lambda t: t.op == OP.MUL_MAT) if rng.random() < 0.5 else None
        fakes.append(devices.Fake(name, ops=ops, host=bool(rng.random() < 0.2), offload=wants))
    return world(*fakes, rules=rules)


def draw_places(rng, bufts):
    """place(ctx, ...) for random_graph: weights anywhere, inputs flagged or placed, caches anywhere."""
    def place(ctx, weights, inputs, caches):
        for t in weights:
            buf = bufts[int(rng.integers(len(bufts)))].alloc_buffer(t.nbytes)
            buf.set_usage(gg.USAGE_WEIGHTS if rng.random() < 0.8 else gg.USAGE_ANY)
            gg.tensor_alloc(buf, t, 0)
        for t in caches:
            gg.tensor_alloc(bufts[int(rng.integers(len(bufts)))].alloc_buffer(t.nbytes), t, 0)
        for t in inputs:
            if rng.random() < 0.6:
                gg.set_input(t)
            elif rng.random() < 0.5:
                gg.tensor_alloc(bufts[-1].alloc_buffer(t.nbytes), t, 0)
    return place


def array(*shape):
    return RNG.standard_normal(shape, dtype=np.float32)


def fill(graph):
    for t in graph.leafs:
        t.set(array(*reversed([n for n in t.ne if n > 1] or [1])).reshape(t.shape))


def outputs_alone(graph):
    """What one CPU computes from the same leaves."""
    cpu = gg.init_backend("CPU:n_threads=1")
    copy = gg.graph_copy(cpu, graph)
    cpu.graph_compute(copy.graph)
    values = [copy.of(t).numpy() for t in graph.outputs]
    copy.free()
    return values


def alone(graph):
    """The first of them."""
    return outputs_alone(graph)[0]


def llama_like(bufts, n_layers=6, n=32):
    """Layers over three devices; every layer reads the mask and the positions; inputs have memory on the last."""
    ctx = gg.Context()
    x, mask, pos = (ctx.new_tensor(gg.F32, (n, n), name) for name in ("x", "mask", "pos"))
    gg.alloc_ctx_tensors(ctx, bufts[-1])
    y = x
    for layer in range(n_layers):
        where = bufts[layer * len(bufts) // n_layers]
        w = [weight(ctx, where, f"w{layer}.{i}", (n, n)) for i in range(2)]
        h = gg.add(gg.mul_mat(w[0], gg.rms_norm(y, 1e-5)), mask)
        y = gg.add(y, gg.mul(gg.mul_mat(w[1], gg.soft_max(h)), pos))
    return gg.Graph(y), x, mask, pos


def poison(sched):
    """NaN bytes into all compute memory but kept copies."""
    run, memory = sched._run, sched.memory
    spared = {}
    for c in np.flatnonzero(run.assigned.copies["kind"] == KEPT).tolist():
        for k in range(run.n_instances):
            row = run.assigned.n + c * run.n_instances + k
            buf, offs = run.place(row)
            spared.setdefault(buf.id, []).append((offs, offs + int(run.layout.sizes[row])))
    for chunks in memory.chunks:
        for buf in chunks:
            saved = [(lo, hi, buf._arena[lo:hi].copy()) for lo, hi in spared.get(buf.id, ())]
            buf._arena[:] = 0xFF
            for lo, hi, values in saved:
                buf._arena[lo:hi] = values
