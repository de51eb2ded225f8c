"""ik_llama.cpp, through its C functions, out of a folder with libllama and libggml: models only.

Weights are repacked when a model is loaded, as its option `-rtr 1` does.  Its interface is an older llama.cpp's: a
batch says the position of its first token, and the cache is not a thing of its own.
"""
import ctypes as C
import os
import pathlib

import numpy as np

from benchmarks import engine, peer
from benchmarks.peer import Params
from benchmarks.worker import EngineError, Missing

USE_MMAP, REPACK = 1, 4             # of the flags at the end of llama_model_params
FLAGS = bytes((0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0))      # their defaults
_P, _I = C.c_void_p, C.c_int32


class _Batch(C.Structure):
    _fields_ = [*peer.Batch._fields_, ("first", _I), ("step", _I), ("sequence", _I)]


FUNCTIONS = {
    "llama_log_set": (None, peer.LOG, _P), "llama_backend_init": (None,), "llama_model_default_params": (Params,),
    "llama_context_default_params": (Params,), "llama_model_load_from_file": (_P, C.c_char_p, Params),
    "llama_free_model": (None, _P), "llama_n_vocab": (_I, _P), "llama_init_from_model": (_P, _P, Params),
    "llama_free": (None, _P), "llama_kv_cache_clear": (None, _P), "llama_batch_get_one": (_Batch, _P, _I, _I, _I),
    "llama_decode": (_I, _P, _Batch), "llama_synchronize": (None, _P),
    "llama_get_logits_ith": (C.POINTER(C.c_float), _P, _I), "llama_print_system_info": (C.c_char_p,),
}


def _library(folder):
    """libllama of a build: in the folder, or in its src beside ggml/src."""
    root = pathlib.Path(folder)
    for place in (root / "ggml/src", root):
        for path in sorted(place.glob("libggml.so*"))[:1]:
            C.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
    paths = [p for place in (root, root / "src") for p in sorted(place.glob("libllama.so*"))]
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


class Engine(engine.Engine):
    def __init__(self, folder):
        self.folder, self.log, self.model, self.context = folder, [], None, None
        self.lib = lib = _library(folder)
        self._log = peer.LOG(lambda level, text, data: self.log.append(text))       # kept: C holds the pointer
        lib.llama_log_set(self._log, None)
        lib.llama_backend_init()

    def about(self):
        found = self.lib.llama_print_system_info().decode()
        features = " ".join(part.split(" = ")[0].lower() for part in found.split(" | ") if part.endswith("= 1"))
        return {"name": "ik_llama.cpp", "version": f"in {self.folder}, weights repacked at load", "features": features}

    def load(self, path, n_threads, n_ctx=512, embed=False):
        self.unload()
        lib, params = self.lib, self.lib.llama_model_default_params()
        at = bytes(params.raw).find(FLAGS)
        if at < 0:
            raise Missing(f"the build in {self.folder} lays llama_model_params out in a way we do not know")
        C.memmove(C.byref(params, at + USE_MMAP), b"\0", 1)
        C.memmove(C.byref(params, at + REPACK), b"\1", 1)
        self.model = lib.llama_model_load_from_file(os.fsencode(path), params)
        if not self.model:
            raise EngineError(f"ik_llama.cpp does not load {path}: {self._last_words()}")
        self.context = lib.llama_init_from_model(self.model, peer.context_params(lib, n_ctx, n_threads))
        if not self.context:
            raise EngineError(f"ik_llama.cpp makes no context for {path}: {self._last_words()}")
        self.n_vocab, self.n_past = lib.llama_n_vocab(self.model), 0

    def unload(self):
        if self.context:
            self.lib.llama_free(self.context)
        if self.model:
            self.lib.llama_free_model(self.model)
        self.model = self.context = None

    def _last_words(self):
        return b"".join(self.log[-6:]).decode("utf-8", "replace").strip()

    def reset(self):
        self.lib.llama_kv_cache_clear(self.context)
        self.n_past = 0

    def decode(self, ids):
        ids = np.ascontiguousarray(ids, np.int32)
        batch = self.lib.llama_batch_get_one(ids.ctypes.data, len(ids), self.n_past, 0)
        status = self.lib.llama_decode(self.context, batch)
        self.lib.llama_synchronize(self.context)
        if status:
            raise EngineError(f"ik_llama.cpp returned {status}: {self._last_words()}")
        self.n_past += len(ids)

    def logits(self, ids):
        """Logits after the last of `ids`."""
        self.reset()
        self.decode(ids)
        return np.ctypeslib.as_array(self.lib.llama_get_logits_ith(self.context, -1), (self.n_vocab,)).tolist()
