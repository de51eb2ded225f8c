"""tensor_split: how the weights and caches of a decoder are split between devices (`gg.meta_device`).

    blk.N.attn_q, attn_k, attn_v        axis 1, whole heads: those of one KV head stay together
    k cache N, v cache N                axis 0, the same heads
    blk.N.attn_output                   axis 0, their columns: summands
    blk.N.ffn_gate, ffn_up              axis 1;  ffn_down  axis 0, in whole blocks of its type: summands
    output                              axis 1: each device has the logits of some tokens

All else is whole on every device: norms, embeddings, experts, fused matrices, and attention whose KV heads do not
suffice.  Source: llama.cpp's --split-mode tensor.
"""
import math
import re

from ggjit.models.files.gguf import GGUFFile
from ggjit.ops.core.errors import ParamError
from ggjit.ops.core.whole_numbers import is_whole


def tensor_split(model, n_devices):
    """The function that `gg.meta_device` asks: tensor -> (axis, sizes) or None.

        split = tensor_split("model.gguf", 2)
        meta = gg.meta_device(cl.devices, split)
        m = load_model("model.gguf", backend=meta.init_backend(), n_gpu_layers=-1)

    model: a path or GGUFFile of a decoder.  Errors: ParamError, BadFile.
    """
    file = model if isinstance(model, GGUFFile) else GGUFFile(model)
    if not is_whole(n_devices, 2):
        raise ParamError(f"tensor_split: n_devices is 2 or more, got {n_devices!r}")
    kv, r, head = _heads(file, n_devices)
    rules = [(r"output\.weight", 1, 1)] + [(rf"blk\.\d+\.ffn_{n}\.weight", axis, None)
                                           for n, axis in (("gate", 1), ("up", 1), ("down", 0))]

    def split(t):
        name = t.name
        if kv is not None:
            for pattern, axis, unit in ((r"blk\.\d+\.attn_q\.weight", 1, r * head), (r"[kv] cache \d+", 0, head),
                                        (r"blk\.\d+\.attn_[kv]\.weight", 1, head),
                                        (r"blk\.\d+\.attn_q\.bias", 0, r * head),
                                        (r"blk\.\d+\.attn_[kv]\.bias", 0, head),
                                        (r"blk\.\d+\.attn_output\.weight", 0, r * head)):
                if re.fullmatch(pattern, name) and t.ne[axis] == sum(kv) * unit:
                    return axis, tuple(n * unit for n in kv)
        for pattern, axis, unit in rules:
            if re.fullmatch(pattern, name):
                unit = unit or _ffn_unit(file, name)
                sizes = None if unit is None else _even(t.ne[axis], unit, n_devices)
                return None if sizes is None else (axis, sizes)
        return None
    return split


def _heads(file, n):
    """(KV heads of each device, heads of Q for one of them, elements of a head); (None, 0, 0): attention is whole."""
    heads, kv = (file.metadata.get(f"{file.arch}.attention.{k}") for k in ("head_count", "head_count_kv"))
    kv = heads if kv is None else kv
    q, k, out = (file.tensors.get(f"blk.0.attn_{x}.weight") for x in ("q", "k", "output"))
    if not is_whole(heads, 1) or not is_whole(kv, n) or heads % kv or None in (q, k, out) \
            or any(f"blk.0.{x}.weight" in file.tensors for x in ("attn_sub_norm", "attn_sinks")):
        return None, 0, 0
    head, r = k.ne[1] // kv, heads // kv
    if q.ne[1] != heads * head or k.ne[1] % kv:
        return None, 0, 0
    blocks = [t.type.block for name, t in file.tensors.items() if re.fullmatch(r"blk\.\d+\.attn_output\.weight", name)]
    unit = math.lcm(*blocks, r * head) // (r * head)            # KV heads whose columns are whole blocks
    counts = _even(kv, unit, n)
    return (None, 0, 0) if counts is None else (counts, r, head)


def _ffn_unit(file, name):
    """Rows of ffn_up that one device must hold together, since they make a block of ffn_down; None without ffn_down."""
    down = file.tensors.get(re.sub(r"ffn_\w+", "ffn_down", name))
    pair = file.tensors.get(re.sub(r"ffn_\w+", "ffn_up", name))
    return None if down is None or pair is None or down.ne[0] != pair.ne[1] else down.type.block


def _even(n, unit, parts):
    """n as `parts` sizes that are multiples of unit, as even as can be; None where that is not possible."""
    units = n // unit
    if n % unit or units < parts:
        return None
    ends = [units * k // parts * unit for k in range(parts + 1)]
    return tuple(b - a for a, b in zip(ends, ends[1:], strict=False))
