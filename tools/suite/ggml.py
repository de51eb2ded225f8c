"""The real ggml out of a wheel, by ctypes: raw tensor structs over the memory of one array, and single ops by name.

Runs as a script, too: the worker process of oracle.py.  So it imports nothing of ggjit.  Ops travel by name, because
enum numbers differ between versions; types by number, which files rely on.  What an older ggml does not have (NEEDS) is
refused before it is asked: it would abort, hang or compute something else.
"""
import ctypes as C
import functools
import glob
import importlib.util
import os
import pickle
import re
import struct
import sys
import time
from typing import NamedTuple

import numpy as np

GAP, PAGE = 64, 4096
LAST_OP, N_UNARY, N_GLU = b"GLU", 22, 6
OP_MEMORY = 1 << 28                                     # of the context of a single op, beside its sources
PARAM, LOSS = 4, 8                                      # tensor flags
TO_FLOAT = 40                                           # bytes into ggml_type_traits


class InitParams(C.Structure):
    _fields_ = [("mem_size", C.c_size_t), ("mem_buffer", C.c_void_p), ("no_alloc", C.c_bool)]


class GgmlTensor(C.Structure):
    pass


GgmlTensor._fields_ = [
    ("type", C.c_int), ("buffer", C.c_void_p), ("ne", C.c_int64 * 4), ("nb", C.c_size_t * 4), ("op", C.c_int),
    ("op_params", C.c_int32 * 16), ("flags", C.c_int32), ("src", C.POINTER(GgmlTensor) * 10),
    ("view_src", C.POINTER(GgmlTensor)), ("view_offs", C.c_size_t), ("data", C.c_void_p), ("name", C.c_char * 64),
    ("extra", C.c_void_p), ("pad", C.c_char * 8)]
TP = C.POINTER(GgmlTensor)


def libraries(wheel):
    """Paths in loading order; [] where there are none.  wheel: its name, or the folder of a ggml build."""
    if os.path.isdir(wheel):
        return [p for part in ("libggml-base*", "libggml-cpu*") for p in sorted(glob.glob(f"{wheel}/{part}"))[:1]]
    spec = importlib.util.find_spec(wheel)
    if spec is None:
        return []
    if wheel == "xllamacpp":
        return glob.glob(os.path.join(spec.submodule_search_locations[0], "xllamacpp*.so"))
    folder = os.path.join(os.path.dirname(spec.origin), "..", "pywhispercpp.libs") if spec.origin else ""
    return [p for part in ("libgomp*", "libggml-base*", "libggml-cpu*") for p in sorted(glob.glob(f"{folder}/{part}"))]


DTYPES = {0: np.dtype("f4"), 1: np.dtype("f2"), 24: np.dtype("i1"), 25: np.dtype("i2"), 26: np.dtype("i4"),
          27: np.dtype("i8")}                           # of ggml types that NumPy has
KINDS = {bool: C.c_bool, int: C.c_int, float: C.c_float, np.int64: C.c_int64}
F32, F16, BF16 = 0, 1, 30


def own_type(a):
    """The ggml type of a NumPy array."""
    return next(i for i, dtype in DTYPES.items() if dtype == a.dtype)


class Asked(NamedTuple):
    """A node of a graph, by its op (IM2COL), or a call of a constructor, by its name (im2col).

    type: of the result, None for a constructor; sources: (type, ne, nb) of each, None where there is none; of a
    constructor without nb.
    """
    name: str
    type: int | None
    params: tuple
    sources: tuple

    @property
    def kernel(self):
        """Type of the first source."""
        return self.sources[0][0]


# case: (what must be there, a release or a function; is it the case?).  ggjit computes what the newest ggml computes.
NEEDS = {
    "a column matrix in F16 for an F32 kernel": ((0, 17), lambda a: a.name in ("IM2COL", "IM2COL_3D", "im2col") and (
        a.type == F16 or a.name == "im2col" and a.params[-1] == F16) and a.kernel != F16),
    "a convolution with an F32 kernel through F16": ((0, 17), lambda a: a.name in (
        "conv_1d", "conv_1d_ph", "conv_2d", "conv_3d") and a.kernel == F32),
    "a transposed convolution of several images": ((0, 26), lambda a: a.name in (
        "CONV_TRANSPOSE_2D", "conv_transpose_2d_p0") and a.sources[1][1][3] > 1),
    "a depthwise convolution with an F16 kernel": ((0, 16), lambda a: a.name in (
        "CONV_2D_DW", "conv_2d_dw_direct") and a.kernel == F16),
    "gated_delta_net whose state has one snapshot": ((0, 15), lambda a: a.name.lower() == "gated_delta_net"),
    "ssm_scan with snapshots": ((0, 20), lambda a: a.name.lower() == "ssm_scan" and a.params[0] > 1),
    "rows set from F16": ((0, 16), lambda a: a.name == "SET_ROWS" and a.kernel == F16),
    "quantised rows joined": ((0, 16), lambda a: a.name == "CONCAT" and a.kernel not in (*DTYPES, BF16)),
    "a norm of rows with gaps": ((0, 15, 3), lambda a: a.name in ("NORM", "L2_NORM") and a.sources[0][2][0] != 4),
    "rope with an offset": ("ggml_rope_set_offset", lambda a: a.name in ("ROPE", "ROPE_BACK") and a.params[15] != 0),
}
N_TYPES = {(0, 16): 43, (0, 10): 42, (0, 9, 8): 41, (0,): 40}       # by release: asking a ggml reads past its table


class GgmlLibrary:
    """The functions of a ggml.  RTLD_LOCAL: a second ggml in the process would silently call into a global first."""

    def __init__(self, wheel):
        self.libs = [C.CDLL(p, mode=C.RTLD_LOCAL) for p in libraries(wheel)]

    def function(self, name, result, *args):
        for lib in reversed(self.libs):
            if hasattr(lib, name):
                f = getattr(lib, name)
                f.restype, f.argtypes = result, list(args)
                return f
        raise AttributeError(name)

    def has(self, needed):
        """Is it this release (a tuple) or a newer one; has it this function (a name)?"""
        if isinstance(needed, str):
            return any(hasattr(lib, needed) for lib in self.libs)
        return self.release >= needed

    @functools.cached_property
    def release(self):
        """(0, 13, 1); (0,) of a ggml that does not say."""
        return tuple(map(int, re.findall(r"\d+", self.said("ggml_version", "0"))))

    def said(self, function, default):
        return self.function(function, C.c_char_p)().decode() if self.has(function) else default

    @functools.cached_property
    def n_types(self):
        return next(n for release, n in N_TYPES.items() if self.has(release))

    def lacks(self, asked):
        """"" or what this ggml does not have, of one node or call."""
        types = (asked.type, *(s[0] for s in asked.sources if s))
        missing = [f"type {t}" for t in types if t is not None and t >= self.n_types] or \
            [case for case, (needed, is_case) in NEEDS.items() if not self.has(needed) and is_case(asked)]
        return f"{missing[0]} (this is ggml {self.said('ggml_version', '?')}, {self.said('ggml_commit', '?')})" \
            if missing else ""

    def names(self, function, n, last=None):
        """{name: enum number}; reading stops after `last`, the enum's known end."""
        f, found = self.function(function, C.c_char_p, C.c_int), {}
        for i in range(n):
            name = f(i)
            found[name.decode()] = i
            if name == last:
                break
        return found

    def op_numbers(self):
        """{op name: enum number}"""
        return self.names("ggml_op_name", 128, LAST_OP)


class Ggml(GgmlLibrary):
    """Graphs, conversions and single ops on its CPU backend."""

    def __init__(self, wheel):
        super().__init__(wheel)
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
        self.ops = self.op_numbers()
        newer = self.has("ggml_swiglu_clamp")                   # a name past the end aborts
        self.unary, self.glu = self.names("ggml_unary_op_name", N_UNARY), self.names("ggml_glu_op_name", N_GLU + newer)

    @staticmethod
    def node(r, records):
        sources = tuple(None if s < 0 else (records[s]["type"], records[s]["ne"], records[s]["nb"]) for s in r["src"])
        return Asked(r["op"], r["type"], r["params"], sources)

    def tensors(self, records, leaves):
        """(structs, their memory), or (what this ggml does not have, None).

        A record's `page_offs`, where it has one, is the place within a page where the tensor starts."""
        made = (GgmlTensor * len(records))()
        places, size = [], GAP
        for r in records:
            if r["view_src"] >= 0:
                places.append(None)
                continue
            places.append(size + (r.get("page_offs", size) - size) % PAGE)
            size = places[-1] + -(-r["nbytes"] // GAP) * GAP + GAP
        memory = np.empty(size + PAGE, np.uint8)
        base = -(-memory.ctypes.data // PAGE) * PAGE
        for t, r, at in zip(made, records, places, strict=True):
            table = {"UNARY": self.unary, "GLU": self.glu}.get(r["op"])
            if r["op"] not in self.ops or (table is not None and r["kind"] not in table):
                return r["kind"] or r["op"], None
            if lacking := self.lacks(self.node(r, records)):
                return lacking, None
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
        """"" or the name of an op that is unknown or refused, or what else this ggml lacks."""
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

    def gradients(self, records, leaves, loss, params):
        """{index: bytes} of the gradients of tensor `loss` with respect to `params`; it aborts where it has none."""
        made, memory = self.tensors(records, leaves)
        refused = made if memory is None else self.refuses(made, records)
        if refused:
            return refused
        made[loss].flags |= LOSS
        for k in params:
            made[k].flags |= PARAM
        size = 64 * (len(records) + 16)
        ctx = self.init(InitParams(self.graph_overhead(size, True) + OP_MEMORY, None, False))
        try:
            graph = self.new_graph(ctx, size, True)
            self.expand(graph, C.byref(made[loss]))
            self.function("ggml_build_backward_expand", None, *[C.c_void_p] * 3)(ctx, graph, None)
            self.function("ggml_graph_reset", None, C.c_void_p)(graph)
            status = self.compute(self.backend, graph)
            assert status == 0, f"ggml_backend_graph_compute: status {status}"
            grad = self.function("ggml_graph_get_grad", TP, C.c_void_p, TP)
            found = {k: grad(graph, C.byref(made[k])) for k in params}
            return {k: self.floats(d.contents) for k, d in found.items() if d}
        finally:
            self.free(ctx)

    @staticmethod
    def floats(t):
        """The values of an F32 tensor, which may be a view, as contiguous bytes."""
        nbytes = sum((n - 1) * b for n, b in zip(t.ne, t.nb, strict=True)) + 4
        raw = (C.c_uint8 * nbytes).from_address(t.data)
        return np.ndarray(tuple(t.ne)[::-1], np.float32, raw, 0, tuple(t.nb)[::-1]).tobytes()

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

    def quantize(self, type_id, a, imatrix=None):
        """float32 (..., k) -> uint8 (..., row bytes) by ggml_quantize_chunk."""
        a, k = np.ascontiguousarray(a, np.float32), a.shape[-1]
        weights = None if imatrix is None else np.ascontiguousarray(imatrix, np.float32)
        out = np.empty((*a.shape[:-1], self.row_size(type_id, k)), np.uint8)
        self.quantize_chunk(type_id, a.ctypes.data, out.ctypes.data, 0, a.size // k, k,
                            None if weights is None else weights.ctypes.data)
        return out

    def quantize_row(self, function, a, nbytes):
        """float32 (..., k) -> uint8 (..., nbytes) by a row quantiser's C name, such as "quantize_row_q8_K_ref"."""
        a = np.ascontiguousarray(a, np.float32)
        out = np.zeros((*a.shape[:-1], nbytes), np.uint8)
        self.function(function, None, C.c_void_p, C.c_void_p, C.c_int64)(a.ctypes.data, out.ctypes.data, a.size)
        return out

    def dequantize(self, type_id, raw, k):
        """uint8 (..., row bytes) -> float32 (..., k) by the type's to_float."""
        raw = np.ascontiguousarray(raw)
        traits = self.function("ggml_get_type_traits", C.c_void_p, C.c_int)(type_id)
        to_float = C.CFUNCTYPE(None, C.c_void_p, C.c_void_p, C.c_int64)(
            C.c_void_p.from_address(traits + TO_FLOAT).value)
        out = np.empty((*raw.shape[:-1], k), np.float32)
        to_float(raw.ctypes.data, out.ctypes.data, out.size)
        return out

    # ---------------------------------------------------------------- one op by its constructor
    def _leaf(self, ctx, a, type_id):
        a = np.ascontiguousarray(a)
        payload = a if type_id == own_type(a) else self.quantize(type_id, a)
        t = self.function("ggml_new_tensor", TP, C.c_void_p, C.c_int, C.c_int, C.POINTER(C.c_int64))(
            ctx, type_id, a.ndim, (C.c_int64 * a.ndim)(*a.shape[::-1]))
        C.memmove(t.contents.data, payload.ctypes.data, payload.nbytes)
        return t

    def op(self, name, arrays, types=(), params=(), permute=None, n_threads=1):
        """ggml_<name>(ctx, *arrays, *params), computed; NumPy order, four dimensions out.

        arrays: NumPy arrays or None (NULL); types: ggml type numbers to convert or quantise them to (None: as is);
        params: int, np.int64, float or bool; permute {index: axes}: ggml_permute applied to a source first.
        A text is what this ggml lacks.
        """
        if not self.has(f"ggml_{name}"):
            return f"ggml_{name}"
        kinds = [types[i] if i < len(types) and types[i] is not None else None if a is None else own_type(a)
                 for i, a in enumerate(arrays)]
        sources = tuple(None if a is None else (kind, (*a.shape[::-1], 1, 1, 1)[:4])
                        for a, kind in zip(arrays, kinds, strict=True))
        if lacking := self.lacks(Asked(name, None, params, sources)):
            return lacking
        ctx = self.init(InitParams(OP_MEMORY + 2 * sum(a.nbytes for a in arrays if a is not None), None, False))
        try:
            sources = []
            turn = self.function("ggml_permute", TP, C.c_void_p, TP, *(C.c_int,) * 4)
            for i, a in enumerate(arrays):
                t = None if a is None else self._leaf(ctx, a, kinds[i])
                sources.append(turn(ctx, t, *permute[i]) if permute and i in permute else t)
            f = self.function(f"ggml_{name}", TP, C.c_void_p, *[TP] * len(sources), *[KINDS[type(p)] for p in params])
            result = f(ctx, *sources, *(p.item() if isinstance(p, np.int64) else p for p in params))
            graph = self.function("ggml_new_graph", C.c_void_p, C.c_void_p)(ctx)
            self.expand(graph, result)
            status = self.function("ggml_graph_compute_with_ctx", C.c_int, C.c_void_p, C.c_void_p, C.c_int)(
                ctx, graph, n_threads)
            assert status == 0, f"ggml_{name}: status {status}"
            t = result.contents
            dtype, shape, strides = DTYPES[t.type], tuple(t.ne)[::-1], tuple(t.nb)[::-1]
            nbytes = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + dtype.itemsize
            return np.ndarray(shape, dtype, (C.c_uint8 * nbytes).from_address(t.data), 0, strides).copy()
        finally:
            self.free(ctx)


# ---------------------------------------------------------------- the worker
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
