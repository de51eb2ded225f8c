"""Graphs on the real ggml: out of the xllamacpp wheel, or of a folder with a build of one's own."""
import ctypes as C
import pathlib
import pickle

from benchmarks.worker import EngineError, Missing
from ggjit.tools.suite.ggml import Ggml, InitParams, libraries

FEATURES = ("avx", "avx2", "avx_vnni", "fma", "f16c", "avx512", "avx512_vnni", "avx512_bf16", "amx_int8", "neon",
            "arm_fma", "dotprod", "matmul_int8", "sve", "llamafile")


class Graphs:
    """source: a wheel's name or a folder with libggml-base and libggml-cpu.  One graph is kept ready."""

    def __init__(self, source):
        if not libraries(source):
            raise Missing(f"no ggml libraries in {source}" if pathlib.Path(source).is_dir()
                          else f"llama.cpp is not installed (pip install {source})")
        try:
            self.ggml = Ggml(source)
        except (OSError, AttributeError) as e:          # libgomp1 is not there; another release
            raise Missing(f"{source} cannot be used: {e}") from e
        self.version = self.ggml.function("ggml_version", C.c_char_p)().decode()
        self.ctx = None

    def features(self):
        """What the CPU backend was compiled for, in ggml's words."""
        return [name for name in FEATURES if self._has(name)]

    def _has(self, name):
        try:
            return bool(self.ggml.function(f"ggml_cpu_has_{name}", C.c_int)())
        except AttributeError:
            return False

    def load(self, path, n_threads):
        self.free()
        with open(path, "rb") as f:
            self.records, leaves, self.wanted = pickle.load(f)
        g = self.ggml
        self.made, self.memory = g.tensors(self.records, leaves)
        refused = self.made if self.memory is None else g.refuses(self.made, self.records)
        if refused:
            raise EngineError(f"ggml {self.version} has no {refused} for this")
        size = len(self.records) + 16
        self.ctx = g.init(InitParams(g.graph_overhead(size, False) + 4096, None, True))
        self.graph = g.new_graph(self.ctx, size, False)
        for k in self.wanted:
            g.expand(self.graph, C.byref(self.made[k]))
        g.set_n_threads(g.backend, n_threads)

    def run(self):
        status = self.ggml.compute(self.ggml.backend, self.graph)
        if status:
            raise EngineError(f"ggml_backend_graph_compute returned {status}")

    def result(self):
        """Bytes of the first wanted tensor."""
        k = self.wanted[0]
        return C.string_at(self.made[k].data, self.records[k]["nbytes"])

    def free(self):
        if self.ctx is not None:
            self.ggml.free(self.ctx)
        self.ctx = self.made = self.memory = None
