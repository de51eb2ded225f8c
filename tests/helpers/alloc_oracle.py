"""Worker process: the real ggml graph allocator, called by ctypes out of an installed wheel.

    python alloc_oracle.py WHEEL < graphs.pickle > plans.pickle

In: a list of dicts {table, roots, alignment, max_size, node_buffers, leaf_buffers}; out: per graph {nodes, leafs
(table ids), sizes, place: {table id: (buffer, offs)}}.  ggml aborts the process on a failed assert, hence the worker.
"""
import ctypes as C
import pickle
import sys

import numpy as np

from ggjit.ops.core.record import OP, T_BUFFER, T_FLAGS, T_NB, T_NE, T_OP, T_SRC, T_TYPE, T_VIEW_OFFS, T_VIEW_SRC
from ggjit.tools.suite.ggml import TP, GgmlLibrary, InitParams


class Graph(C.Structure):
    _fields_ = [("size", C.c_int), ("n_nodes", C.c_int), ("n_leafs", C.c_int), ("nodes", C.POINTER(TP)),
                ("grads", C.c_void_p), ("grad_accs", C.c_void_p), ("leafs", C.POINTER(TP))]


class BufferType(C.Structure):
    """name, alloc, [one slot more in 0.26, NULL on the CPU,] alignment, max_size, ...; then device, context."""
    _fields_ = [("iface", C.c_void_p * 10)]


SIZE_FN = C.CFUNCTYPE(C.c_size_t, C.c_void_p)


class Oracle:
    def __init__(self, wheel):
        library = GgmlLibrary(wheel)
        f = library.function
        p, z = C.c_void_p, C.c_size_t
        self.init, self.free = f("ggml_init", p, InitParams), f("ggml_free", None, p)
        self.new_tensor = f("ggml_new_tensor", TP, p, C.c_int, C.c_int, C.POINTER(C.c_int64))
        self.new_graph = f("ggml_new_graph_custom", C.POINTER(Graph), p, z, C.c_bool)
        self.overhead = f("ggml_graph_overhead_custom", z, z, C.c_bool)
        self.expand = f("ggml_build_forward_expand", None, C.POINTER(Graph), TP)
        self.cpu_buft = f("ggml_backend_cpu_buffer_type", C.POINTER(BufferType))()
        self.new_n = f("ggml_gallocr_new_n", p, C.POINTER(C.POINTER(BufferType)), C.c_int)
        self.gfree = f("ggml_gallocr_free", None, p)
        ints = C.POINTER(C.c_int)
        self.reserve = f("ggml_gallocr_reserve_n", C.c_bool, p, C.POINTER(Graph), ints, ints)
        self.alloc_graph = f("ggml_gallocr_alloc_graph", C.c_bool, p, C.POINTER(Graph))
        self.size = f("ggml_gallocr_get_buffer_size", z, p, C.c_int)
        self.base = f("ggml_backend_buffer_get_base", p, p)
        numbers = library.op_numbers()
        self.op = [numbers.get(op.name, numbers["CONT"]) for op in OP]      # ops are renumbered between versions
        self.far = np.zeros(64, np.uint8)               # address of external tensors; never touched
        self.keep = []

    def bufts(self, alignment, max_size):
        """Copies of the CPU buffer type with their own alignment and maximum size."""
        out = (C.POINTER(BufferType) * len(alignment))()
        for i, (a, m) in enumerate(zip(alignment, max_size, strict=True)):
            b = BufferType.from_buffer_copy(self.cpu_buft.contents)
            fns = SIZE_FN(lambda _, a=a: a), SIZE_FN(lambda _, m=m: m or (1 << 64) - 1)
            at = 2 if b.iface[2] else 3
            b.iface[at], b.iface[at + 1] = (C.cast(x, C.c_void_p).value for x in fns)
            self.keep += [b, *fns]
            out[i] = C.pointer(b)
        return out

    def tensors(self, ctx, table):
        ts = []
        for r in table:
            t = self.new_tensor(ctx, int(r[T_TYPE]), 4, (C.c_int64 * 4)(*map(int, r[T_NE:T_NE + 4])))
            ts.append(t)
        for t, r in zip(ts, table, strict=True):
            x = t.contents
            x.op, x.flags, x.view_offs = self.op[r[T_OP]], int(r[T_FLAGS]), int(r[T_VIEW_OFFS])
            for k in range(4):
                x.nb[k] = int(r[T_NB + k])
            for k in range(10):
                if r[T_SRC + k] >= 0:
                    x.src[k] = ts[r[T_SRC + k]]
            v = int(r[T_VIEW_SRC])
            if v >= 0:
                x.view_src = ts[v]
            if r[T_BUFFER] >= 0 or (v >= 0 and table[v, T_BUFFER] >= 0):
                x.data = self.far.ctypes.data
        return ts

    def plan(self, table, roots, alignment=(32,), max_size=(None,), node_buffers=None, leaf_buffers=None):
        n = len(table)
        ctx = self.init(InitParams(400 * n + self.overhead(4 * n + 16, False) + (1 << 16), None, True))
        ts = self.tensors(ctx, table)
        graph = self.new_graph(ctx, 4 * n + 16, False)
        for r in roots:
            self.expand(graph, ts[r])
        g = graph.contents
        number = {C.addressof(t.contents): i for i, t in enumerate(ts)}
        nodes = [number[C.addressof(g.nodes[i].contents)] for i in range(g.n_nodes)]
        leafs = [number[C.addressof(g.leafs[i].contents)] for i in range(g.n_leafs)]
        bufts = self.bufts(alignment, max_size)
        galloc = self.new_n(bufts, len(alignment))
        ints = lambda a, ids: (C.c_int * len(ids))(*(a[i] for i in ids)) if a is not None else None     # noqa: E731
        assert self.reserve(galloc, graph, ints(node_buffers, nodes), ints(leaf_buffers, leafs))
        assert self.alloc_graph(galloc, graph)
        place = {}
        for i in nodes + leafs:
            x = ts[i].contents
            if x.buffer:
                place[i] = (x.buffer, x.data - self.base(x.buffer))
        sizes = [self.size(galloc, b) for b in range(len(alignment))]
        self.gfree(galloc)
        self.free(ctx)
        return {"nodes": nodes, "leafs": leafs, "sizes": sizes, "place": place}


if __name__ == "__main__":
    oracle = Oracle(sys.argv[1])
    graphs = pickle.load(sys.stdin.buffer)
    sys.stdout.buffer.write(pickle.dumps([oracle.plan(**g) for g in graphs]))
