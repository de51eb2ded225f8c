"""llama.cpp and its ggml, through their C functions: out of the `xllamacpp` wheel, or of a folder with a build of
one's own (libllama, libggml-base, libggml-cpu; without libllama it runs graphs, not models).

The wheel is one extension module that also exports llama.cpp's C interface.  Its parameter structs are passed by value
and change between releases, so they are handled as blocks of bytes: taken from llama.cpp's own defaults, with the few
fields we set found by the values around them.  If those are not found, the release is one we do not know: Missing.
"""
import ctypes as C
import importlib.metadata
import os
import pathlib
import struct

import numpy as np

from benchmarks import engine
from benchmarks.ggml import Graphs
from benchmarks.worker import EngineError, Missing
from ggjit.tools.suite.ggml import libraries

PACKAGE = "xllamacpp"
MEAN_POOLING = 1


class Params(C.Structure):
    """Larger than any parameter struct.  By value such structs travel on the stack, where a longer one does no harm."""
    _fields_ = [("raw", C.c_uint8 * 1024)]


class Batch(C.Structure):
    _fields_ = [("n_tokens", C.c_int32), ("token", C.c_void_p), ("embd", C.c_void_p), ("pos", C.c_void_p),
                ("n_seq_id", C.c_void_p), ("seq_id", C.c_void_p), ("logits", C.c_void_p)]


LOG = C.CFUNCTYPE(None, C.c_int, C.c_char_p, C.c_void_p)
_P, _I = C.c_void_p, C.c_int32
FUNCTIONS = {
    "llama_log_set": (None, LOG, _P),
    "llama_backend_init": (None,), "llama_model_default_params": (Params,), "llama_context_default_params": (Params,),
    "llama_model_load_from_file": (_P, C.c_char_p, Params), "llama_model_free": (None, _P),
    "llama_model_get_vocab": (_P, _P), "llama_vocab_n_tokens": (_I, _P), "llama_model_n_embd": (_I, _P),
    "llama_init_from_model": (_P, _P, Params), "llama_free": (None, _P), "llama_get_memory": (_P, _P),
    "llama_memory_clear": (None, _P, C.c_bool), "llama_batch_get_one": (Batch, _P, _I),
    "llama_decode": (_I, _P, Batch), "llama_encode": (_I, _P, Batch), "llama_synchronize": (None, _P),
    "llama_adapter_lora_init": (_P, _P, C.c_char_p),
    "llama_set_adapters_lora": (_I, _P, C.POINTER(_P), C.c_size_t, C.POINTER(C.c_float)),
    "llama_get_logits_ith": (C.POINTER(C.c_float), _P, _I), "llama_get_embeddings_seq": (C.POINTER(C.c_float), _P, _I),
}


def _llama(folder):
    """llama.cpp's functions; folder: None for the wheel."""
    if folder:
        paths = sorted(pathlib.Path(folder).glob("libllama.*"))
        for part in ("libggml-base.*", "libggml-cpu.*", "libggml.*"):       # what it refers to by name
            for path in sorted(pathlib.Path(folder).glob(part))[:1]:
                C.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
    else:
        paths = libraries(PACKAGE)
    if not paths:
        raise Missing(f"no libllama in {folder}")
    try:
        lib = C.CDLL(str(paths[0]), mode=os.RTLD_LOCAL | os.RTLD_NOW)
        for name, (result, *args) in FUNCTIONS.items():
            function = getattr(lib, name)
            function.restype, function.argtypes = result, args
    except (OSError, AttributeError) as e:          # another release
        raise Missing(f"{paths[0]} cannot be used: {e}") from e
    return lib


def context_params(lib, n_ctx, n_threads, embed=False):
    """llamacontext_params with our settings in it."""
    p = lib.llama_context_default_params()
    raw = bytes(p.raw)

    def find(start, fmt, *values):
        at = raw.find(struct.pack(fmt, *values), start)
        if at < 0:
            raise Missing(f"this release of {PACKAGE} lays llamacontext_params out in a way we do not know")
        return at
    sizes = find(0, "<4I", 512, 2048, 512, 1)                       # n_ctx, n_batch, n_ubatch, n_seq_max
    threads = find(sizes, "<2i", 4, 4)
    C.memmove(C.byref(p, sizes), struct.pack("<3I", n_ctx, n_ctx, n_ctx), 12)
    C.memmove(C.byref(p, threads), struct.pack("<2i", n_threads, n_threads), 8)
    if embed:
        find(threads, "<7i", 4, 4, 0, -1, -1, -1, -1)               # pooling is the fifth
        types = find(threads, "<QQii", 0, 0, 1, 1)                  # callback, its data, type_k, type_v
        flags = find(types + 24, "<4?", False, True, True, True)    # embeddings, ...
        C.memmove(C.byref(p, threads + 16), struct.pack("<i", MEAN_POOLING), 4)
        C.memmove(C.byref(p, flags), b"\1", 1)
    return p


class Engine(engine.Engine):
    """llama-bench's method: one llama_decode for a prompt, one a token for generation, an empty cache before each."""

    def __init__(self, folder=None):
        self.folder, self.lib, self.log = folder, None, []
        self.graphs = Graphs(folder or PACKAGE)
        self.model = self.context = None

    def about(self):
        source = f"in {self.folder}" if self.folder else f"{PACKAGE} {importlib.metadata.version(PACKAGE)}"
        return {"name": "llama.cpp", "version": f"{source}, ggml {self.graphs.version}",
                "features": " ".join(self.graphs.features())}

    def _start(self):
        self.lib = lib = _llama(self.folder)
        self._log = LOG(lambda level, text, data: self.log.append(text))       # kept: C holds the pointer
        lib.llama_log_set(self._log, None)
        lib.llama_backend_init()

    def load(self, path, n_threads, n_ctx=512, embed=False, lora=()):
        """lora: [(path, scale)]"""
        self.unload()
        if self.lib is None:
            self._start()
        self.model = self.lib.llama_model_load_from_file(os.fsencode(path), self.lib.llama_model_default_params())
        if not self.model:
            raise EngineError(f"llama.cpp does not load {path}: {self._last_words()}")
        self.context = self.lib.llama_init_from_model(
            self.model, context_params(self.lib, n_ctx, n_threads, embed))
        if not self.context:
            raise EngineError(f"llama.cpp makes no context for {path}: {self._last_words()}")
        adapters = [self.lib.llama_adapter_lora_init(self.model, os.fsencode(name)) for name, _ in lora]
        if not all(adapters) or adapters and self.lib.llama_set_adapters_lora(
                self.context, (_P * len(lora))(*adapters), len(lora), (C.c_float * len(lora))(*(s for _, s in lora))):
            raise EngineError(f"llama.cpp does not load an adapter: {self._last_words()}")
        self.n_vocab = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self.model))

    def unload(self):
        if self.context:
            self.lib.llama_free(self.context)
        if self.model:
            self.lib.llama_model_free(self.model)
        self.model = self.context = None
        self.graphs.free()

    def load_graph(self, path, n_threads):
        self.graphs.load(path, n_threads)

    def run_graph(self):
        self.graphs.run()

    def graph_result(self, path):
        pathlib.Path(path).write_bytes(self.graphs.result())

    def _last_words(self):
        return b"".join(self.log[-6:]).decode("utf-8", "replace").strip()

    def _run(self, function, ids):
        ids = np.ascontiguousarray(ids, np.int32)
        status = function(self.context, self.lib.llama_batch_get_one(ids.ctypes.data, len(ids)))
        self.lib.llama_synchronize(self.context)
        if status:
            raise EngineError(f"llama.cpp returned {status}: {self._last_words()}")

    def reset(self):
        memory = self.lib.llama_get_memory(self.context)
        if memory:                                      # encoders have none
            self.lib.llama_memory_clear(memory, True)

    def decode(self, ids):
        self._run(self.lib.llama_decode, ids)

    def encode(self, ids):
        self._run(self.lib.llama_encode, ids)
        return self.lib.llama_get_embeddings_seq(self.context, 0)

    def logits(self, ids):
        """Logits after the last of `ids`."""
        self.reset()
        self.decode(ids)
        return np.ctypeslib.as_array(self.lib.llama_get_logits_ith(self.context, -1), (self.n_vocab,)).tolist()
