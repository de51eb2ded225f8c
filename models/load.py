"""load_model: a GGUF file -> the network its architecture names."""
import time

from ggjit.models.gguf import GGUFFile
from ggjit.ops.errors import ModelError


def architectures():
    """{general.architecture: class}"""
    from ggjit.models.bert import Bert
    from ggjit.models.llama import ROPE_MODE, Llama
    return {"bert": Bert, **dict.fromkeys(ROPE_MODE, Llama)}


def load_model(path, backend="CPU", n_threads=None, **options):
    """Load a GGUF model: `.tokenize .logits .embed .generate`.

    backend: a device name ("CPU", "CPU:n_threads=2") or a Backend.  llama options: n_ctx, n_batch, kv_type ("F16",
    "F32"), flash.  Weights are mapped, not read.  Errors: BadFile (a broken file), ModelError (an architecture, tensor
    or type we cannot run), ParamError (options); nothing stays loaded after an error.
    """
    t0 = time.perf_counter()
    file = GGUFFile(path)
    known = architectures()
    if file.arch not in known:
        raise ModelError(f"{file.path}: architecture {file.arch!r} is not supported; supported: {', '.join(known)}")
    if file.arch == "bert":
        options = {k: v for k, v in options.items() if k not in ("n_ctx", "kv_type", "n_batch", "flash")}
    return known[file.arch](file, backend, n_threads, load_start=t0, **options)
