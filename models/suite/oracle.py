"""The real ggml in a worker process, for any graph: raw tensor structs over the memory of one array.

    peer = connect()                        # xllamacpp's ggml, else pywhispercpp's; MissingExtra where neither is there
    peer.supports(records)                  # "" or the op that ggml's CPU backend refuses
    peer.run(records, leaves, wanted)       # {index: bytes} of results
    peer.seconds(records, leaves, wanted)   # time of one run

`records_of(outputs)` writes a ggjit graph down.  Ops travel by name, because enum numbers differ between versions.  The
worker asks `ggml_backend_supports_op` before it computes; where ggml still aborts, a new worker takes the next case.
The file runs as a script as well (the worker's side), so it imports nothing of ggjit at the top.
"""
import ctypes as C
import functools
import glob
import importlib.util
import os
import pickle
import struct
import subprocess
import sys
import threading
import time

import numpy as np

WHEELS = ("xllamacpp", "pywhispercpp")
PATIENCE = 300.0                                        # seconds until a worker counts as hung
GAP = 64
LAST_OP, N_UNARY, N_GLU = b"GLU", 22, 6
FLAG_PARAM = 4


class InitParams(C.Structure):
    _fields_ = [("mem_size", C.c_size_t), ("mem_buffer", C.c_void_p), ("no_alloc", C.c_bool)]


class Tensor(C.Structure):
    pass


Tensor._fields_ = [
    ("type", C.c_int), ("buffer", C.c_void_p), ("ne", C.c_int64 * 4), ("nb", C.c_size_t * 4), ("op", C.c_int),
    ("op_params", C.c_int32 * 16), ("flags", C.c_int32), ("src", C.POINTER(Tensor) * 10),
    ("view_src", C.POINTER(Tensor)), ("view_offs", C.c_size_t), ("data", C.c_void_p), ("name", C.c_char * 64),
    ("extra", C.c_void_p), ("pad", C.c_char * 8)]
TP = C.POINTER(Tensor)


def libraries(wheel):
    """Paths in loading order; [] where the wheel is absent."""
    spec = importlib.util.find_spec(wheel)
    if spec is None:
        return []
    if wheel == "xllamacpp":
        return glob.glob(os.path.join(spec.submodule_search_locations[0], "xllamacpp*.so"))
    folder = os.path.join(os.path.dirname(spec.origin), "..", "pywhispercpp.libs") if spec.origin else ""
    return [p for part in ("libgomp*", "libggml-base*", "libggml-cpu*") for p in sorted(glob.glob(f"{folder}/{part}"))]


# ---------------------------------------------------------------- the worker's side
class Ggml:
    """One loaded ggml.  Loaded RTLD_LOCAL: a second ggml in the process would silently call into a global first."""

    def __init__(self, wheel):
        self.libs = [C.CDLL(p, mode=C.RTLD_LOCAL) for p in libraries(wheel)]
        p, i, z, i64 = C.c_void_p, C.c_int, C.c_size_t, C.c_int64
        self.init = self.function("ggml_init", p, InitParams)
        self.free = self.function("ggml_free", None, p)
        self.new_graph = self.function("ggml_new_graph_custom", p, p, z, C.c_bool)
        self.graph_overhead = self.function("ggml_graph_overhead_custom", z, z, C.c_bool)
        self.expand = self.function("ggml_build_forward_expand", None, p, TP)
        self.supports_op = self.function("ggml_backend_supports_op", C.c_bool, p, TP)
        self.compute = self.function("ggml_backend_graph_compute", i, p, p)
        self.set_n_threads = self.function("ggml_backend_cpu_set_n_threads", None, p, i)
        self.row_size = self.function("ggml_row_size", z, i, i64)
        self.quantize_chunk = self.function("ggml_quantize_chunk", z, i, p, p, i64, i64, i64, p)
        self.backend = self.function("ggml_backend_cpu_init", p)()
        self.ops = self.names("ggml_op_name", 128, LAST_OP)
        self.unary, self.glu = self.names("ggml_unary_op_name", N_UNARY), self.names("ggml_glu_op_name", N_GLU)

    def function(self, name, result, *args):
        for lib in reversed(self.libs):
            if hasattr(lib, name):
                f = getattr(lib, name)
                f.restype, f.argtypes = result, list(args)
                return f
        raise AttributeError(name)

    def names(self, function, n, last=None):
        """{name: enum number}; reading stops after `last`, the enum's known end."""
        f, found = self.function(function, C.c_char_p, C.c_int), {}
        for i in range(n):
            name = f(i)
            found[name.decode()] = i
            if name == last:
                break
        return found

    def tensors(self, records, leaves):
        """(structs, their memory), or the name of an op this ggml does not have."""
        made = (Tensor * len(records))()
        places, size = [], GAP
        for r in records:
            places.append(None if r["view_src"] >= 0 else size)
            size += 0 if r["view_src"] >= 0 else -(-r["nbytes"] // GAP) * GAP + GAP
        memory = np.empty(size + GAP, np.uint8)
        base = -(-memory.ctypes.data // GAP) * GAP
        for t, r, at in zip(made, records, places, strict=True):
            table = {"UNARY": self.unary, "GLU": self.glu}.get(r["op"])
            if r["op"] not in self.ops or (table is not None and r["kind"] not in table):
                return r["kind"] or r["op"], None
            t.type, t.op, t.flags, t.view_offs = r["type"], self.ops[r["op"]], r["flags"], r["view_offs"]
            t.ne[:], t.nb[:], t.op_params[:] = r["ne"], r["nb"], r["params"]
            if table is not None:
                t.op_params[0] = table[r["kind"]]
            for k, s in enumerate(r["src"]):
                if s >= 0:
                    t.src[k] = C.pointer(made[s])
            if r["view_src"] >= 0:
                t.view_src = C.pointer(made[r["view_src"]])
                t.data = made[r["view_src"]].data + r["view_offs"]
            else:
                t.data = base + at
        for k, raw in leaves.items():
            C.memmove(made[k].data, raw, len(raw))
        return made, memory

    def refuses(self, made, records):
        for t, r in zip(made, records, strict=True):
            if r["op"] != "NONE" and not self.supports_op(self.backend, C.byref(t)):
                return r["kind"] or r["op"]
        return ""

    def supports(self, records):
        """"" or the name of an op that is unknown or refused."""
        made, memory = self.tensors(records, {})
        return made if memory is None else self.refuses(made, records)

    def _prepared(self, records, leaves, wanted, n_threads, use):
        made, memory = self.tensors(records, leaves)
        refused = made if memory is None else self.refuses(made, records)
        if refused:
            return refused
        self.set_n_threads(self.backend, n_threads)
        size = len(records) + 16
        ctx = self.init(InitParams(self.graph_overhead(size, False) + 4096, None, True))
        try:
            graph = self.new_graph(ctx, size, False)
            for k in wanted:
                self.expand(graph, C.byref(made[k]))
            return use(graph, made)
        finally:
            self.free(ctx)

    def run(self, records, leaves, wanted, n_threads):
        def use(graph, made):
            status = self.compute(self.backend, graph)
            assert status == 0, f"ggml_backend_graph_compute: status {status}"
            return {k: C.string_at(made[k].data, records[k]["nbytes"]) for k in wanted}
        return self._prepared(records, leaves, wanted, n_threads, use)

    def seconds(self, records, leaves, wanted, n_threads, at_least):
        """Median time of a run over at least `at_least` seconds and three runs."""
        def use(graph, made):
            times, end = [], time.perf_counter() + at_least
            self.compute(self.backend, graph)
            while len(times) < 3 or time.perf_counter() < end:
                t0 = time.perf_counter()
                self.compute(self.backend, graph)
                times.append(time.perf_counter() - t0)
            return sorted(times)[len(times) // 2]
        return self._prepared(records, leaves, wanted, n_threads, use)

    def quantize(self, type_id, a):
        """float32 (..., k) -> uint8 (..., row bytes), with an importance of one everywhere."""
        k = a.shape[-1]
        out = np.empty((*a.shape[:-1], self.row_size(type_id, k)), np.uint8)
        ones = np.ones(k, np.float32)
        self.quantize_chunk(type_id, a.ctypes.data, out.ctypes.data, 0, a.size // k, k, ones.ctypes.data)
        return out


# ---------------------------------------------------------------- the caller's side
def records_of(outputs):
    """(records, tensors): what the worker needs of every tensor that `outputs` rest on, sources first."""
    order, index = [], {}

    def visit(t):
        if t is None or t.id in index:
            return
        for s in (*t.src, t.view_src):
            visit(s)
        index[t.id] = len(order)
        order.append(t)
    for t in outputs:
        visit(t)
    return [_record(t, index) for t in order], order


def _record(t, index):
    from ggjit.ops.record import GLU, OP, UNARY
    params = [int(p) for p in t.op_params]
    kinds = {OP.UNARY: UNARY, OP.GLU: GLU}.get(t.op)
    return {"type": t.type.id, "op": t.op.name, "kind": kinds(params[0]).name if kinds else "", "ne": tuple(t.ne),
            "nb": tuple(t.nb), "params": params, "flags": t.flags & FLAG_PARAM, "nbytes": t.nbytes,
            "src": [-1 if s is None else index[s.id] for s in t.src],
            "view_src": -1 if t.view_src is None else index[t.view_src.id], "view_offs": t.view_offs}


class Gone(RuntimeError):
    """The worker died (ggml aborted) or did not answer."""


class Oracle:
    """Talks to a worker and starts a new one when it is gone."""

    def __init__(self, wheel):
        self.wheel, self.worker, self.lock, self.lost = wheel, None, threading.Lock(), 0

    def _call(self, *request):
        with self.lock:
            if self.worker is None or self.worker.poll() is not None:
                self.worker = subprocess.Popen([sys.executable, "-P", os.path.abspath(__file__), self.wheel],
                                               stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                               stderr=subprocess.DEVNULL)
            watchdog = threading.Timer(PATIENCE, self.worker.kill)
            watchdog.start()
            try:
                send(self.worker.stdin, request)
                ok, value = receive(self.worker.stdout)
            except (EOFError, BrokenPipeError):
                self.lost += 1
                raise Gone(f"ggml gave up: exit status {self.worker.wait()}") from None
            finally:
                watchdog.cancel()
        if not ok:
            raise Gone(value)
        return value

    def supports(self, records):
        return self._call("supports", records)

    def run(self, records, leaves, wanted, n_threads=1):
        """{index: bytes}, or the name of the op that ggml refuses."""
        return self._call("run", records, leaves, wanted, n_threads)

    def seconds(self, records, leaves, wanted, n_threads=1, at_least=0.2):
        """Seconds of one run, or the name of the op that ggml refuses."""
        return self._call("seconds", records, leaves, wanted, n_threads, at_least)

    def quantize(self, type_id, array):
        return self._call("quantize", type_id, np.ascontiguousarray(array, np.float32))

    def close(self):
        if self.worker is not None:
            self.worker.stdin.close()
            self.worker.wait()
            self.worker = None


@functools.cache
def _oracle(wheel):
    return Oracle(wheel)


def connect():
    """The oracle of the best wheel installed; MissingExtra where there is none."""
    from ggjit.ops.errors import MissingExtra
    for wheel in WHEELS:
        if libraries(wheel):
            return _oracle(wheel)
    raise MissingExtra("no wheel with the real ggml is installed; pip install xllamacpp (the newer ggml) or "
                       "'ggjit[test]' (pywhispercpp); until then results are checked against float64 alone")


def send(stream, value):
    data = pickle.dumps(value, protocol=5)
    stream.write(struct.pack("<Q", len(data)))
    stream.write(data)
    stream.flush()


def receive(stream):
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError
    return pickle.loads(stream.read(struct.unpack("<Q", head)[0]))


def serve(wheel):
    # ggml prints to stdout now and then: keep a private copy of the pipe, send the rest to stderr
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    ggml = Ggml(wheel)
    while True:
        try:
            method, *args = receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            send(out, (True, getattr(ggml, method)(*args)))
        except Exception as e:                          # the caller raises it
            send(out, (False, f"{type(e).__name__}: {e}"))


if __name__ == "__main__":
    serve(sys.argv[1])
