"""Types that llama.cpp gives the tensors of models when it quantises them; llama_model_quantize by ctypes.

    python quantize_goldens.py LIBRARIES > ../models/quantize_goldens.json

LIBRARIES: a folder with libllama.*.so that exports llama_model_quantize, such as bins/linux-x64 of the npm package
@node-llama-cpp/linux-x64.  A golden is a hash of "name type" of all tensors, in the order of the file, or "refused".
"""
import ctypes as C
import glob
import hashlib
import json
import os
import re
import sys
import tempfile

import numpy as np

D, FF, VOCAB = 256, 512, 64
ATTENTION = {"attn_norm": (D,), "attn_q": (D, D), "attn_k": (D, 0), "attn_v": (D, 0), "attn_output": (D, D)}
DENSE = {"ffn_norm": (D,), "ffn_gate": (D, FF), "ffn_up": (D, FF), "ffn_down": (FF, D)}
ENDS = {"token_embd": (D, VOCAB), "output_norm": (D,), "output": (D, VOCAB)}


def _experts(n):
    return {"ffn_norm": (D,), "ffn_gate_inp": (D, n), "ffn_gate_exps": (D, FF, n), "ffn_up_exps": (D, FF, n),
            "ffn_down_exps": (FF, D, n)}


def _narrow(ff):
    return {k: tuple(ff if n == FF else n for n in ne) for k, ne in DENSE.items()}


# name: architecture, layers, heads, kv heads, experts, tensors of a layer, tensors beside the layers
MODELS = {
    "plain": ("llama", 16, 8, 8, 0, ATTENTION | DENSE, ENDS),
    "grouped tied": ("llama", 9, 8, 2, 0, ATTENTION | DENSE, {k: v for k, v in ENDS.items() if k != "output"}),
    "rows of 288": ("llama", 9, 8, 4, 0, ATTENTION | _narrow(288), ENDS),
    "rows of 200": ("llama", 4, 8, 4, 0, ATTENTION | _narrow(200), ENDS),
    "8 experts": ("llama", 17, 8, 8, 8, ATTENTION | _experts(8), ENDS),
    "4 experts": ("llama", 9, 8, 2, 4, ATTENTION | _experts(4), ENDS),
    "70B": ("llama", 80, 8, 1, 0, ATTENTION | DENSE, ENDS),
    "falcon": ("falcon", 33, 8, 1, 0, {"attn_norm": (D,), "attn_qkv": (D, D + 2 * D // 8), "attn_output": (D, D),
                                       "ffn_up": (D, FF), "ffn_down": (FF, D)}, ENDS),
    "bert": ("bert", 6, 8, 8, 0, ATTENTION | {"ffn_up": (D, FF), "ffn_down": (FF, D), "layer_output_norm": (D,)},
             {"token_embd": (D, VOCAB), "position_embd": (D, 32), "token_types": (D, 2), "token_embd_norm": (D,)}),
    "mamba": ("mamba", 4, 0, 0, 0, {"attn_norm": (D,), "ssm_in": (D, FF), "ssm_conv1d": (4, D), "ssm_x": (D, 64),
                                    "ssm_dt": (32, D), "ssm_out": (D, D)}, ENDS)}


def tensors(name):
    """{tensor: ne} of a model, as llama.cpp orders them."""
    arch, layers, heads, kv, _, layer, ends = MODELS[name]
    out = {f"{n}.weight": ne for n, ne in sorted(ends.items())}
    for i in range(layers):
        out |= {f"blk.{i}.{n}.weight": tuple(k or D // heads * kv for k in ne)
                for n, ne in sorted(layer.items(), key=lambda kv: kv[0] + ".weight")}
    return out


def metadata(name):
    arch, layers, heads, kv, experts, _, _ = MODELS[name]
    keys = {"context_length": 32, "embedding_length": D, "block_count": layers, "feed_forward_length": FF,
            "vocab_size": VOCAB, "attention.head_count": heads, "attention.head_count_kv": kv,
            "attention.layer_norm_rms_epsilon": 1e-5, "attention.layer_norm_epsilon": 1e-5, "ssm.conv_kernel": 4,
            "ssm.inner_size": D, "ssm.state_size": 16, "ssm.time_step_rank": 32}
    if experts:
        keys |= {"expert_count": experts, "expert_used_count": 2}
    return {"general.architecture": arch, **{f"{arch}.{k}": v for k, v in keys.items()}}


def digest(types):
    return hashlib.sha256("\n".join(f"{name} {t}" for name, t in types.items()).encode()).hexdigest()[:12]


# ---------------------------------------------------------------- llama.cpp
class _Imatrix(C.Structure):
    _fields_ = [("name", C.c_char_p), ("data", C.POINTER(C.c_float)), ("size", C.c_size_t)]


class _Params(C.Structure):
    _fields_ = [*((n, C.c_int32) for n in ("nthread", "ftype", "output_type", "embedding_type")),
                *((n, C.c_bool) for n in ("requantize", "quantize_output", "only_copy", "pure", "keep_split",
                                          "dry_run")),
                ("imatrix", C.POINTER(_Imatrix)), *((n, C.c_void_p) for n in ("kv", "tensor_types", "prune")),
                ("more", C.c_uint8 * 64)]


class Quantizer:
    """llama_model_quantize of the libraries in a folder."""

    def __init__(self, folder):
        def load(pattern):
            return C.CDLL(glob.glob(os.path.join(folder, pattern))[0], C.RTLD_GLOBAL)
        load("libggml-base*.so")
        ggml = load("libggml.*so")
        ggml.ggml_backend_load.argtypes = [C.c_char_p]
        self.lines = []
        log = C.CFUNCTYPE(None, C.c_int, C.c_char_p, C.c_void_p)
        self._log = log(lambda level, text, data: self.lines.append(text.decode("utf-8", "replace")))
        self._lib = load("libllama.*so")
        self._lib.llama_log_set(self._log, None)
        ggml.ggml_backend_load(glob.glob(os.path.join(folder, "libggml-cpu-*haswell*.so"))[0].encode())
        self._lib.llama_model_quantize_default_params.restype = _Params
        self._lib.llama_model_quantize.argtypes = [C.c_char_p, C.c_char_p, C.POINTER(_Params)]

    def __call__(self, source, out, ftype, importances=None, **options):
        """Status; what was said is in `lines`.  importances: {name: float32 array}."""
        p = self._lib.llama_model_quantize_default_params()
        p.nthread, p.ftype = 1, ftype
        for name, value in options.items():
            setattr(p, name, value)
        if importances:
            kept = [np.ascontiguousarray(a, np.float32) for a in importances.values()]
            rows = [_Imatrix(n.encode(), a.ctypes.data_as(C.POINTER(C.c_float)), a.size)
                    for n, a in zip(importances, kept, strict=True)]
            p.imatrix = (_Imatrix * (len(rows) + 1))(*rows)
        self.lines.clear()
        return self._lib.llama_model_quantize(os.fsencode(source), os.fsencode(out), C.byref(p))


TYPE = re.compile(r"\] (\S+) +- \[[^\]]*\], type = +(\w+), size = [^(\n]*(?:\((\w+)\))?")


def types_by_llamacpp(quantize, source, names, ftype, importances):
    """{tensor: type}, or None where llama.cpp refuses."""
    status = quantize(source, os.devnull, ftype, importances, dry_run=True)
    log = "".join(quantize.lines)
    if status or (not importances and "will require an imatrix" in log):
        return None
    found = {name: new or old for name, old, new in TYPE.findall(log)}
    return {name: found[name] for name in names}


def main(folder):
    from ggjit.models import save_gguf
    from ggjit.models.files.mixtures import FILE_TYPES
    quantize, out = Quantizer(folder), {}
    for name in MODELS:
        shapes = tensors(name)
        with tempfile.TemporaryDirectory() as tmp:
            path = os.path.join(tmp, "m.gguf")
            save_gguf(path, {n: np.broadcast_to(np.float32(0), ne[::-1]) for n, ne in shapes.items()}, metadata(name))
            ones = {n: np.ones(ne[0] * (ne[2] if len(ne) > 2 else 1)) for n, ne in shapes.items()
                    if n.startswith("blk.")}
            for mixture, (ftype, _) in FILE_TYPES.items():
                for importances in (None, ones):
                    types = types_by_llamacpp(quantize, path, shapes, ftype, importances)
                    key = f"{name}/{mixture}{'+imatrix' if importances else ''}"
                    out[key] = "refused" if types is None else digest(types)
        print(name, file=sys.stderr)
    print(json.dumps(out, indent=0))


if __name__ == "__main__":
    main(*sys.argv[1:])
