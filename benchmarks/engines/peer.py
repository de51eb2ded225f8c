"""llama.cpp and its ggml, through their C functions: out of the `xllamacpp` wheel, or of a folder with a build of
one's own (libllama, libggml-base, libggml-cpu; without libllama it runs graphs, not models).

The wheel is one extension module that also exports llama.cpp's C interface.
"""
import ctypes as C
import importlib.metadata
import os
import pathlib

import numpy as np

from benchmarks.engines import llama
from benchmarks.engines.ggml import Graphs
from benchmarks.engines.llama import Batch
from benchmarks.worker import EngineError
from ggjit.tools.suite.ggml import libraries

PACKAGE = "xllamacpp"
_P, _I = C.c_void_p, C.c_int32
FUNCTIONS = {
    "llama_model_free": (None, _P), "llama_model_get_vocab": (_P, _P), "llama_vocab_n_tokens": (_I, _P),
    "llama_model_n_embd": (_I, _P), "llama_get_memory": (_P, _P), "llama_memory_clear": (None, _P, C.c_bool),
    "llama_batch_get_one": (Batch, _P, _I), "llama_decode": (_I, _P, Batch), "llama_encode": (_I, _P, Batch),
    "llama_adapter_lora_init": (_P, _P, C.c_char_p),
    "llama_set_adapters_lora": (_I, _P, C.POINTER(_P), C.c_size_t, C.POINTER(C.c_float)),
    "llama_get_embeddings_seq": (C.POINTER(C.c_float), _P, _I),
}


def llama_library(folder):
    """llama.cpp's functions; folder: None for the wheel."""
    if not folder:
        return llama.library(libraries(PACKAGE), FUNCTIONS, PACKAGE)
    root = pathlib.Path(folder)
    for part in ("libggml-base.*", "libggml-cpu.*", "libggml.*"):
        llama.load_first(root, part)
    return llama.library(sorted(root.glob("libllama.*")), FUNCTIONS, folder)


class Engine(llama.Engine):
    """llama-bench's method: one llama_decode for a prompt, one a token for generation, an empty cache before each."""
    name, free_model = "llama.cpp", "llama_model_free"

    def __init__(self, folder=None):
        self.folder, self.graphs = folder, Graphs(folder or PACKAGE)

    def about(self):
        source = f"in {self.folder}" if self.folder else f"{PACKAGE} {importlib.metadata.version(PACKAGE)}"
        return {"name": self.name, "version": f"{source}, ggml {self.graphs.version}",
                "features": " ".join(self.graphs.features())}

    def load(self, path, n_threads, n_ctx=512, embed=False, lora=()):
        """lora: [(path, scale)]"""
        self.unload()
        if self.lib is None:
            self._start(llama_library(self.folder))
        self._open(path, self.lib.llama_model_default_params(), n_ctx, n_threads, embed)
        adapters = [self.lib.llama_adapter_lora_init(self.model, os.fsencode(name)) for name, _ in lora]
        if not all(adapters) or adapters and self.lib.llama_set_adapters_lora(
                self.context, (_P * len(lora))(*adapters), len(lora), (C.c_float * len(lora))(*(s for _, s in lora))):
            raise EngineError(f"llama.cpp does not load an adapter: {self._last_words()}")
        self.n_vocab = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self.model))

    def unload(self):
        super().unload()
        self.graphs.free()

    def load_graph(self, path, n_threads):
        self.graphs.load(path, n_threads)

    def run_graph(self):
        self.graphs.run()

    def graph_result(self, path):
        pathlib.Path(path).write_bytes(self.graphs.result())

    def _run(self, function, ids):
        ids = np.ascontiguousarray(ids, np.int32)
        self._finished(function(self.context, self.lib.llama_batch_get_one(ids.ctypes.data, len(ids))))

    def reset(self):
        memory = self.lib.llama_get_memory(self.context)
        if memory:                                      # encoders have none
            self.lib.llama_memory_clear(memory, True)

    def decode(self, ids):
        self._run(self.lib.llama_decode, ids)

    def encode(self, ids):
        self._run(self.lib.llama_encode, ids)
        return self.lib.llama_get_embeddings_seq(self.context, 0)
