"""The real ggml as a test oracle: one op at a time, called by ctypes out of an installed wheel, in a worker process.

    o = oracle.connect()                                    # skips the test where no wheel is installed
    y = o.op("mul_mat", [w, x], types=["Q4_0"])             # NumPy order in and out (ne0 is the last axis)
    y = o.op("soft_max_ext", [x, mask], params=[0.125, 0.0])
    raw = o.quantize("Q8_0", array)                         # uint8 (..., row bytes)

A worker, because ggml aborts the process on a failed assert: the next call then raises, and a new worker is started.
Libraries are loaded RTLD_LOCAL: with one ggml global, a second one in the process silently calls into the first.
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

import numpy as np

TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12,
         "Q5_K": 13, "Q6_K": 14, "IQ4_NL": 20, "IQ4_XS": 23, "IQ2_XXS": 16, "IQ2_XS": 17, "IQ3_XXS": 18, "IQ1_S": 19,
         "IQ3_S": 21, "IQ2_S": 22, "IQ1_M": 29, "TQ1_0": 34, "TQ2_0": 35, "MXFP4": 39, "NVFP4": 40, "Q1_0": 41,
         "Q2_0": 42, "I8": 24, "I16": 25, "I32": 26, "I64": 27, "BF16": 30}
OF_DTYPE = {"float32": "F32", "float16": "F16", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64"}
DTYPE = {TYPES[name]: np.dtype(dtype) for dtype, name in OF_DTYPE.items()}
MEMORY = 1 << 28


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
    parts = ("libgomp*", "libggml-base*", "libggml-cpu*")
    return [p for part in parts for p in sorted(glob.glob(f"{folder}/{part}"))[:1]]


class Ggml:
    """The worker's side."""

    def __init__(self, wheel):
        self.libs = [C.CDLL(p, mode=C.RTLD_LOCAL) for p in libraries(wheel)]
        size, i64 = C.c_size_t, C.c_int64
        self.init = self.function("ggml_init", C.c_void_p, InitParams)
        self.free = self.function("ggml_free", None, C.c_void_p)
        self.new_tensor = self.function("ggml_new_tensor", TP, C.c_void_p, C.c_int, C.c_int, C.POINTER(i64))
        self.permute = self.function("ggml_permute", TP, C.c_void_p, TP, *(C.c_int,) * 4)
        self.new_graph = self.function("ggml_new_graph", C.c_void_p, C.c_void_p)
        self.expand = self.function("ggml_build_forward_expand", None, C.c_void_p, TP)
        self.compute = self.function("ggml_graph_compute_with_ctx", C.c_int, C.c_void_p, C.c_void_p, C.c_int)
        self.row_size = self.function("ggml_row_size", size, C.c_int, i64)
        self.quantize_chunk = self.function("ggml_quantize_chunk", size, C.c_int, C.c_void_p, C.c_void_p, i64, i64,
                                            i64, C.c_void_p)
        self.function("ggml_cpu_init", None)()

    def function(self, name, result, *args):
        for lib in reversed(self.libs):
            if hasattr(lib, name):
                f = getattr(lib, name)
                f.restype, f.argtypes = result, list(args)
                return f
        raise AttributeError(name)

    def quantize(self, type_name, a, imatrix=None):
        a = np.ascontiguousarray(a, np.float32)
        weights = None if imatrix is None else np.ascontiguousarray(imatrix, np.float32)
        k = a.shape[-1]
        out = np.empty((*a.shape[:-1], self.row_size(TYPES[type_name], k)), np.uint8)
        self.quantize_chunk(TYPES[type_name], a.ctypes.data, out.ctypes.data, 0, a.size // k, k,
                            None if weights is None else weights.ctypes.data)
        return out

    def quantize_row(self, function, a, nbytes):
        """A row quantiser by its C name: (float *, blocks *, k)."""
        a = np.ascontiguousarray(a, np.float32)
        out = np.zeros((*a.shape[:-1], nbytes), np.uint8)
        self.function(function, None, C.c_void_p, C.c_void_p, C.c_int64)(a.ctypes.data, out.ctypes.data, a.size)
        return out

    def dequantize(self, type_name, raw, k):
        """ggml_type_traits.to_float: the fifth pointer-sized field after the name."""
        raw = np.ascontiguousarray(raw)
        traits = self.function("ggml_get_type_traits", C.c_void_p, C.c_int)(TYPES[type_name])
        to_float = C.CFUNCTYPE(None, C.c_void_p, C.c_void_p, C.c_int64)(C.c_void_p.from_address(traits + 40).value)
        out = np.empty((*raw.shape[:-1], k), np.float32)
        to_float(raw.ctypes.data, out.ctypes.data, out.size)
        return out

    def leaf(self, ctx, a, type_name):
        a = np.ascontiguousarray(a)
        own = OF_DTYPE[a.dtype.name]
        type_name = type_name or own
        payload = a if type_name == own else self.quantize(type_name, a)
        t = self.new_tensor(ctx, TYPES[type_name], a.ndim, (C.c_int64 * a.ndim)(*a.shape[::-1]))
        C.memmove(t.contents.data, payload.ctypes.data, payload.nbytes)
        return t

    def op(self, name, arrays, types, params, permute, n_threads):
        ctx = self.init(InitParams(MEMORY + 2 * sum(a.nbytes for a in arrays if a is not None), None, False))
        try:
            sources = []
            for i, a in enumerate(arrays):
                t = None if a is None else self.leaf(ctx, a, types[i] if i < len(types) else None)
                sources.append(self.permute(ctx, t, *permute[i]) if i in permute else t)
            kinds = {bool: C.c_bool, int: C.c_int, float: C.c_float, np.int64: C.c_int64}
            f = self.function(f"ggml_{name}", TP, C.c_void_p, *[TP] * len(sources), *[kinds[type(p)] for p in params])
            result = f(ctx, *sources, *(p.item() if isinstance(p, np.int64) else p for p in params))
            graph = self.new_graph(ctx)
            self.expand(graph, result)
            status = self.compute(ctx, graph, n_threads)
            assert status == 0, f"ggml_{name}: status {status}"
            t = result.contents
            shape, strides = tuple(t.ne)[::-1], tuple(t.nb)[::-1]
            nbytes = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + DTYPE[t.type].itemsize
            raw = (C.c_uint8 * nbytes).from_address(t.data)
            return np.ndarray(shape, DTYPE[t.type], raw, 0, strides).copy()
        finally:
            self.free(ctx)


# ---------------------------------------------------------------- the caller's side
class Oracle:
    """Talks to a worker; `op` and `quantize` as in the module's text."""

    def __init__(self, wheel):
        self.wheel, self.worker, self.lock = wheel, None, threading.Lock()

    def _call(self, *request):
        with self.lock:
            if self.worker is None or self.worker.poll() is not None:
                self.worker = subprocess.Popen([sys.executable, os.path.abspath(__file__), self.wheel],
                                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            try:
                send(self.worker.stdin, request)
                ok, value = receive(self.worker.stdout)
            except (EOFError, BrokenPipeError):
                raise RuntimeError(f"ggml gave up on {request[:2]}: exit status {self.worker.wait()}") from None
        if not ok:
            raise RuntimeError(value)
        return value

    def op(self, name, arrays, types=(), params=(), permute=None, n_threads=1):
        """ggml_<name>(ctx, *arrays, *params), computed; four dimensions, NumPy order.

        arrays: NumPy arrays or None (NULL); types: ggml type names to convert or quantise them to (None: as is);
        params: int, np.int64, float or bool; permute {index: axes}: ggml_permute applied to a source first.
        """
        return self._call("op", name, list(arrays), list(types), list(params), permute or {}, n_threads)

    def quantize(self, type_name, array, imatrix=None):
        """float32 (..., k) -> uint8 (..., row bytes) by ggml_quantize_chunk."""
        return self._call("quantize", type_name, array, imatrix)

    def quantize_row(self, function, array, nbytes):
        """float32 (..., k) -> uint8 (..., nbytes) by a row quantiser such as "quantize_row_q8_K_ref"."""
        return self._call("quantize_row", function, array, nbytes)

    def dequantize(self, type_name, raw, k):
        """uint8 (..., row bytes) -> float32 (..., k) by the type's to_float."""
        return self._call("dequantize", type_name, raw, k)


@functools.cache
def _oracle(wheel):
    return Oracle(wheel)


def connect(wheel="pywhispercpp"):
    """The oracle of a wheel; skips the running test where it is not installed."""
    if not libraries(wheel):
        import pytest
        pytest.skip(f"the real ggml as oracle: {wheel} is not installed")
    return _oracle(wheel)


def send(stream, value):
    data = pickle.dumps(value, protocol=5)
    stream.write(struct.pack("<Q", len(data)) + data)
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
