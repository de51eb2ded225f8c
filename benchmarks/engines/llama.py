"""What llama.cpp and its fork ik_llama.cpp have in common as engines: C functions, parameters, models, tokens.

Parameter structs are passed by value and change between releases, so they are handled as blocks of bytes: taken from
the library's own defaults, with the few fields we set found by the values around them.  If those are not found, the
release is one we do not know: Missing.
"""
import ctypes as C
import os
import re
import struct

import numpy as np

from benchmarks.engines import engine
from benchmarks.worker import EngineError, Missing

MEAN_POOLING = 1
LOG = C.CFUNCTYPE(None, C.c_int, C.c_char_p, C.c_void_p)


class Params(C.Structure):
    """Larger than any parameter struct.  By value such structs travel on the stack, where a longer one does no harm."""
    _fields_ = [("raw", C.c_uint8 * 1024)]


class Batch(C.Structure):
    _fields_ = [("n_tokens", C.c_int32), ("token", C.c_void_p), ("embd", C.c_void_p), ("pos", C.c_void_p),
                ("n_seq_id", C.c_void_p), ("seq_id", C.c_void_p), ("logits", C.c_void_p)]


_P, _I = C.c_void_p, C.c_int32
FUNCTIONS = {                                       # of both
    "llama_log_set": (None, LOG, _P), "llama_backend_init": (None,), "llama_model_default_params": (Params,),
    "llama_context_default_params": (Params,), "llama_model_load_from_file": (_P, C.c_char_p, Params),
    "llama_init_from_model": (_P, _P, Params), "llama_free": (None, _P), "llama_synchronize": (None, _P),
    "llama_get_logits_ith": (C.POINTER(C.c_float), _P, _I),
}


def library(paths, functions, folder):
    """The first of these libraries with FUNCTIONS and `functions` declared.  Errors: Missing."""
    if not paths:
        raise Missing(f"no libllama in {folder}")
    try:
        lib = C.CDLL(str(paths[0]), mode=os.RTLD_LOCAL | os.RTLD_NOW)
        for name, (result, *args) in (FUNCTIONS | functions).items():
            function = getattr(lib, name)
            function.restype, function.argtypes = result, args
    except (OSError, AttributeError) as e:          # another release
        raise Missing(f"{paths[0]} cannot be used: {e}") from e
    return lib


def load_first(folder, pattern):
    """Load what libllama refers to by name."""
    for path in sorted(folder.glob(pattern))[:1]:
        C.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)


def context_params(lib, n_ctx, n_threads, embed=False):
    """llama_context_params with our settings in it."""
    p = lib.llama_context_default_params()
    raw = bytes(p.raw)

    def find(start, fmt, *values):
        at = raw.find(struct.pack(fmt, *values), start)
        if at < 0:
            raise Missing("this release lays llama_context_params out in a way we do not know")
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
    """A subclass has `name`, `free_model`, `lib`, reset() and decode(ids)."""
    lib = model = context = None

    def _start(self, lib):
        self.lib, self.log = lib, []
        self._log = LOG(lambda level, text, data: self.log.append(text))        # kept: C holds the pointer
        lib.llama_log_set(self._log, None)
        lib.llama_backend_init()

    def _open(self, path, model_params, n_ctx, n_threads, embed=False):
        """Load a model and make its context."""
        del self.log[:]
        self.model = self.lib.llama_model_load_from_file(os.fsencode(path), model_params)
        if not self.model:
            raise EngineError(f"{self.name} does not load {path}: {self._last_words()}")
        self.context = self.lib.llama_init_from_model(self.model, context_params(self.lib, n_ctx, n_threads, embed))
        if not self.context:
            raise EngineError(f"{self.name} makes no context for {path}: {self._last_words()}")

    def buffers(self):
        """MiB that the log says of the model and its context: "weights", "kept" (cache and states), "compute"."""
        text = b"".join(self.log).decode("utf-8", "replace")
        return {kind: sum(float(x) for x in re.findall(rf"{words} buffer size\s*=\s*([\d.]+) MiB", text))
                for kind, words in (("weights", "model"), ("kept", "(?:KV|RS)"), ("compute", "compute"))}

    def unload(self):
        if self.context:
            self.lib.llama_free(self.context)
        if self.model:
            getattr(self.lib, self.free_model)(self.model)
        self.model = self.context = None

    def _finished(self, status):
        """Wait for what was asked; status: what the function returned."""
        self.lib.llama_synchronize(self.context)
        if status:
            raise EngineError(f"{self.name} returned {status}: {self._last_words()}")

    def _last_words(self):
        return b"".join(self.log[-6:]).decode("utf-8", "replace").strip()

    def logits(self, ids):
        """Logits after the last of `ids`."""
        self.reset()
        self.decode(ids)
        return np.ctypeslib.as_array(self.lib.llama_get_logits_ith(self.context, -1), (self.n_vocab,)).tolist()
