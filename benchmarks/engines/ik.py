"""ik_llama.cpp, through its C functions, out of a folder with libllama and libggml: models only.

Weights are repacked when a model is loaded, as its option `-rtr 1` does.  Its interface is an older llama.cpp's: a
batch says the position of its first token, and the cache is not a thing of its own.
"""
import ctypes as C
import pathlib

import numpy as np

from benchmarks.engines import llama
from benchmarks.worker import Missing

USE_MMAP, REPACK = 1, 4             # of the flags at the end of llama_model_params
FLAGS = bytes((0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0))      # their defaults
_P, _I = C.c_void_p, C.c_int32


class _Batch(C.Structure):
    _fields_ = [*llama.Batch._fields_, ("first", _I), ("step", _I), ("sequence", _I)]


FUNCTIONS = {
    "llama_free_model": (None, _P), "llama_n_vocab": (_I, _P), "llama_kv_cache_clear": (None, _P),
    "llama_batch_get_one": (_Batch, _P, _I, _I, _I), "llama_decode": (_I, _P, _Batch),
    "llama_print_system_info": (C.c_char_p,),
}


def _library(folder):
    """libllama of a build: in the folder, or in its src beside ggml/src."""
    root = pathlib.Path(folder)
    for place in (root / "ggml/src", root):
        llama.load_first(place, "libggml.so*")
    return llama.library([p for place in (root, root / "src") for p in sorted(place.glob("libllama.so*"))], FUNCTIONS,
                         folder)


class Engine(llama.Engine):
    name, free_model = "ik_llama.cpp", "llama_free_model"

    def __init__(self, folder):
        self.folder = folder
        self._start(_library(folder))

    def about(self):
        found = self.lib.llama_print_system_info().decode()
        features = " ".join(part.split(" = ")[0].lower() for part in found.split(" | ") if part.endswith("= 1"))
        return {"name": self.name, "version": f"in {self.folder}, weights repacked at load", "features": features}

    def load(self, path, n_threads, n_ctx=512, embed=False):
        self.unload()
        params = self.lib.llama_model_default_params()
        at = bytes(params.raw).find(FLAGS)
        if at < 0:
            raise Missing(f"the build in {self.folder} lays llama_model_params out in a way we do not know")
        C.memmove(C.byref(params, at + USE_MMAP), b"\0", 1)
        C.memmove(C.byref(params, at + REPACK), b"\1", 1)
        self._open(path, params, n_ctx, n_threads)
        self.n_vocab, self.n_past = self.lib.llama_n_vocab(self.model), 0

    def reset(self):
        self.lib.llama_kv_cache_clear(self.context)
        self.n_past = 0

    def decode(self, ids):
        ids = np.ascontiguousarray(ids, np.int32)
        batch = self.lib.llama_batch_get_one(ids.ctypes.data, len(ids), self.n_past, 0)
        self._finished(self.lib.llama_decode(self.context, batch))
        self.n_past += len(ids)
