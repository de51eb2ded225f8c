"""A graph of the comparison on our side: built, written down for the peers, computed, compared.

Weights lie as in a large model that was loaded without options: repacked where that pays on this processor.
"""
import pickle
import statistics
import time

import numpy as np

import ggjit as gg
from benchmarks.work import Leaves, content
from ggjit.cpu.thread_choice import ThreadChoice
from ggjit.ops.core.record import VIEW_OPS
from ggjit.ops.core.spec import flops, moved_nbytes
from ggjit.ops.matmul import choices
from ggjit.ops.matmul.repack import layouts as repack
from ggjit.profiling.machine_limits import BUFFER_NBYTES
from ggjit.tools.suite.ggml import PAGE
from ggjit.tools.suite.oracle import records_of

QUARTERS = 4


def weights_where(backend, weights):
    """The buffer type that the matrices `weights` of a large model lie in."""
    if weights and all(repack.takes(t.type, t.ne) and choices.pays_repacked(t.type) for t in weights):
        return next(b for b in backend.device.extra_buffer_types() if b.name == "CPU_REPACK")
    return backend


class Prepared:
    """A work.Graph, ready to run.  n: how many nodes (or chains) of it; nbytes, flops: of one."""

    def __init__(self, work, n_threads):
        self.work, self.backend = work, gg.init_backend(f"CPU:n_threads={n_threads}")
        self.ctx, self.weights_ctx = gg.Context(), gg.Context()
        self.leaves = Leaves(self.ctx, self.work.cold, self.weights_ctx)
        with self.ctx:
            outs = [self.work.build(self.leaves)]
            nodes = [t for t in gg.Graph(outs[0]).nodes if t.op not in VIEW_OPS]
            self.nbytes, self.flops = (sum(f(t) for t in nodes) for f in (moved_nbytes, flops))
            while len(outs) < self.work.copies(self.nbytes, self.flops):
                self.leaves.again()
                outs.append(self.work.build(self.leaves))
        self.outs, self.n = outs, len(outs) * self.work.n_nodes
        gg.alloc_ctx_tensors(self.ctx, self.backend)
        weights = [t for t, _ in self.leaves.by_id.values() if t.ctx is self.weights_ctx]
        if weights:
            gg.alloc_ctx_tensors(self.weights_ctx, weights_where(self.backend, weights))
        for t, raw in self.leaves.by_id.values():
            t.set_bytes(raw)
        self.graph = gg.Graph(*outs)
        self.allocator = gg.GraphAllocator(self.backend)
        self.allocator.alloc_graph(self.graph)
        self.plan = self.backend.graph_plan_create(self.graph)
        if choice := self.plan.thread_choice:       # plans of as much work share one, but works are not one program
            self.plan.thread_choice = ThreadChoice(choice.most, choice.unit)

    def write(self, path):
        """For `Graphs.load` of the peers: tensors, {index: bytes of leaf}, indices of the results.

        The peers' tensors start at the same places within a page as ours: copies depend on them (docs/measured.md)."""
        records, order = records_of(self.outs)
        for r, t in zip(records, order, strict=True):
            if place := self.plan.where(t):
                r["page_offs"] = (place[0].base + place[1]) % PAGE
        index = {t.id: i for i, t in enumerate(order)}
        leaves = {index[i]: raw for i, (_, raw) in self.leaves.by_id.items()}
        with open(path, "wb") as f:
            pickle.dump((records, leaves, [index[t.id] for t in self.outs]), f, protocol=5)

    def difference(self, raw):
        """NMSE of our first result, another engine's bytes of it being right."""
        t = self.outs[0]
        ours = np.float64(self.plan.numpy(t))
        if t.type.block > 1 or t.type is gg.BF16:
            theirs = gg.dequantize(t.type, raw, ours.shape)
        else:
            theirs = np.frombuffer(raw, t.type.dtype).reshape(ours.shape)
        theirs = np.float64(theirs)
        return float(np.square(ours - theirs).sum() / max(np.square(theirs).sum(), 1e-300))

    def free(self):
        self.plan = self.allocator = self.graph = None
        self.ctx.free()
        self.weights_ctx.free()


def column_speeds(type, columns, n_threads, rounds, now=time.perf_counter, k=2048, m=2048):
    """{n: GFLOP/s} of mul_mat with n columns: the median of rounds, so that one slow second is no cliff.

    All n read the same weights, more than caches hold, a quarter of them in a turn.
    """
    backend, ctx, weights_ctx = gg.init_backend(f"CPU:n_threads={n_threads}"), gg.Context(), gg.Context()
    try:
        raw = content(type, (k, m), None, np.random.default_rng(0))
        n_weights = BUFFER_NBYTES // len(raw) // QUARTERS * QUARTERS
        weights = [weights_ctx.new_tensor(type, (k, m)) for _ in range(n_weights)]
        gg.alloc_ctx_tensors(weights_ctx, weights_where(backend, weights))
        for w in weights:
            w.set_bytes(raw)
        plans = {n: [_products(ctx, backend, weights[i::QUARTERS], n) for i in range(QUARTERS)] for n in columns}
        seconds = {n: [] for n in columns}
        for some in plans.values():
            for plan in some:                   # touches the pages of its results
                plan.compute()
        for turn in range(rounds):
            for at, n in enumerate(columns):
                t0 = now()
                plans[n][(turn + at) % QUARTERS].compute()
                seconds[n].append(now() - t0)
    finally:
        ctx.free()
        weights_ctx.free()
    each = len(weights) // QUARTERS
    return {n: 2 * k * m * n * each / statistics.median(s) / 1e9 for n, s in seconds.items()}


def _products(ctx, backend, weights, n):
    """A plan of the products of some weights and n columns."""
    x = gg.from_numpy(ctx, np.random.default_rng(n).standard_normal((n, weights[0].ne[0]), np.float32))
    graph = gg.Graph(*(gg.mul_mat(w, x) for w in weights))
    gg.GraphAllocator(backend).alloc_graph(graph)
    return backend.graph_plan_create(graph)
