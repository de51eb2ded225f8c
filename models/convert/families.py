"""Architectures of Hugging Face folders: metadata from config.json, and how tensors change on their way to GGUF.

Names of tensors and keys come from the gguf package; what is here is the rest, as llama.cpp's conversion has it:

    LLaMA's q and k     rows of a head in halves -> in pairs, since RoPE turns neighbours in GGUF
    Gemma's norms       w -> w + 1
    GPT-2's matrices    stored transposed
    experts             one matrix each -> one tensor of all
"""
import dataclasses
import math
import re
from collections.abc import Callable

import numpy as np

from ggjit.core.arguments import nearest
from ggjit.ops.core.errors import ModelError, NotSupported

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
NOT_WEIGHTS = (".attention.masked_bias", ".attention.bias", ".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


class Config:
    """config.json: `config["hidden_size"]` or the first of several names.  Errors: ModelError with the path."""

    def __init__(self, path, values):
        self.path, self.values = path, values | (values.get("text_config") or {})
        self.file_type = 0              # general.file_type, known when the type is

    def get(self, *names, default=None):
        return next((self.values[n] for n in names if self.values.get(n) is not None), default)

    def __getitem__(self, names):
        value = self.get(*(names if isinstance(names, tuple) else (names,)))
        if value is None:
            raise ModelError(f"{self.path}: {names!r} is missing; fetch the folder again")
        return value

    @property
    def n_layer(self):
        return self["num_hidden_layers", "n_layer"]

    @property
    def head_dim(self):
        return self.get("head_dim") or self["hidden_size"] // self["num_attention_heads"]

    def rope(self):
        """rope_parameters, or what older files say of it."""
        rope = dict(self.get("rope_parameters", "rope_scaling", default={}))
        if not {"full_attention", "sliding_attention"} & set(rope):
            mirrored = {"rope_theta": self.get("rope_theta"), "rope_type": rope.get("type"),
                        "partial_rotary_factor": self.get("partial_rotary_factor"),
                        "original_max_position_embeddings": self.get("original_max_position_embeddings")}
            rope = {k: v for k, v in mirrored.items() if v is not None} | rope
            if (local := self.get("rope_local_base_freq")) is not None:
                rope["sliding_attention"] = {"rope_theta": local}
        return rope


# ---------------------------------------------------------------- metadata
def common(w, c, gguf):
    """What most architectures state."""
    w.add_block_count(c.n_layer)
    for add, *names in ((w.add_context_length, "max_position_embeddings", "n_ctx", "n_positions"),
                        (w.add_embedding_length, "hidden_size", "n_embd"),
                        (w.add_feed_forward_length, "intermediate_size", "n_inner"),
                        (w.add_head_count, "num_attention_heads", "n_head"),
                        (w.add_head_count_kv, "num_key_value_heads")):
        if (value := c.get(*names)) is not None:
            add(value)
    rope = c.rope()
    full = rope.get("full_attention", rope)
    _rope_scaling(w, full, gguf)
    if (theta := full.get("rope_theta")) is not None:
        w.add_rope_freq_base(theta)
    if (local := rope.get("sliding_attention", {}).get("rope_theta")) is not None:
        w.add_float32(f"{w.arch}.rope.freq_base_swa", local)
    for add, *names in ((w.add_layer_norm_rms_eps, "rms_norm_eps", "norm_eps"),
                        (w.add_layer_norm_eps, "layer_norm_eps", "layer_norm_epsilon"),
                        (w.add_expert_count, "num_local_experts", "num_experts"),
                        (w.add_expert_used_count, "num_experts_per_tok")):
        if (value := c.get(*names)) is not None:
            add(value)
    if (d := c.get("head_dim")) is not None:
        w.add_key_length(d)
        w.add_value_length(d)
    w.add_file_type(c.file_type)


def _rope_scaling(w, rope, gguf):
    kind, factor = rope.get("rope_type"), rope.get("factor")
    if kind in (None, "default", "dynamic", "llama3"):
        return
    if kind in ("su", "longrope"):
        w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
    elif kind in ("linear", "yarn") and factor is not None:
        w.add_rope_scaling_type(gguf.RopeScalingType[kind.upper()])
        w.add_rope_scaling_factor(factor)
        if kind == "yarn":
            w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    else:
        raise NotSupported(f"RoPE scaling {kind!r} has no form in GGUF")


def llama(w, c, gguf):
    common(w, c, gguf)
    w.add_vocab_size(c["vocab_size"])
    w.add_rope_dimension_count(c.head_dim)


def moe(w, c, gguf):
    common(w, c, gguf)
    for add, name in ((w.add_expert_feed_forward_length, "moe_intermediate_size"),
                      (w.add_expert_shared_feed_forward_length, "shared_expert_intermediate_size")):
        if (value := c.get(name)) is not None:
            add(value)


def qwen3_moe(w, c, gguf):
    if c.get("norm_topk_prob") is False:
        raise NotSupported(f"{c.path}: norm_topk_prob is false, but GGUF's qwen3moe always norms the experts' weights")
    moe(w, c, gguf)


def olmoe(w, c, gguf):
    common(w, c, gguf)
    w.add_layer_norm_rms_eps(1e-5)


def gemma(w, c, gguf):
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    w.add_block_count(c.n_layer)
    w.add_feed_forward_length(c["intermediate_size"])
    w.add_head_count(c["num_attention_heads"])
    w.add_head_count_kv(c["num_key_value_heads", "num_attention_heads"])
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    w.add_key_length(c["head_dim"])
    w.add_value_length(c["head_dim"])
    w.add_file_type(c.file_type)


def gemma2(w, c, gguf):
    gemma(w, c, gguf)
    w.add_attn_logit_softcapping(c["attn_logit_softcapping"])
    w.add_final_logit_softcapping(c["final_logit_softcapping"])
    w.add_sliding_window(c["sliding_window"])


def gemma3(w, c, gguf):
    common(w, c, gguf)
    w.add_context_length(c.get("max_position_embeddings", default=131072))
    w.add_head_count(c.get("num_attention_heads", default=8))
    w.add_layer_norm_rms_eps(c.get("rms_norm_eps", default=1e-6))
    w.add_key_length(c.get("head_dim", default=256))
    w.add_value_length(c.get("head_dim", default=256))
    rope = c.rope()
    w.add_rope_freq_base(rope.get("full_attention", rope).get("rope_theta", 1_000_000.0))
    if cap := c.get("final_logit_softcapping"):
        w.add_final_logit_softcapping(cap)
    if c.get("sliding_window_pattern") != 1:
        w.add_sliding_window(c["sliding_window"])
    w.add_head_count_kv(c.get("num_key_value_heads", default=4))


def phi3(w, c, gguf):
    rope = c.rope()
    w.add_context_length(c["max_position_embeddings"])
    w.add_rope_scaling_orig_ctx_len(_original_ctx(c))
    w.add_embedding_length(c["hidden_size"])
    w.add_feed_forward_length(c["intermediate_size"])
    w.add_block_count(c.n_layer)
    w.add_head_count(c["num_attention_heads"])
    w.add_head_count_kv(c["num_key_value_heads"])
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    w.add_rope_dimension_count(int(rope.get("partial_rotary_factor", 1.0) * c["hidden_size"])
                               // c["num_attention_heads"])
    w.add_rope_freq_base(rope["rope_theta"])
    w.add_file_type(c.file_type)
    w.add_sliding_window(c.get("sliding_window", default=0))
    if rope.get("long_factor"):
        scale = c["max_position_embeddings"] / _original_ctx(c)
        grown = math.sqrt(1 + math.log(scale) / math.log(_original_ctx(c))) if scale > 1 else 1.0
        w.add_rope_scaling_attn_factors(grown)


def _original_ctx(c):
    return c.rope().get("original_max_position_embeddings") or c["max_position_embeddings"]


def olmo2(w, c, gguf):
    common(w, c, gguf)
    if (window := c.get("sliding_window")) is not None:
        w.add_sliding_window(window)
        kinds = c.get("layer_types", default=["sliding_attention" if (i + 1) % 4 else "full_attention"
                                              for i in range(c.n_layer)])
        w.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])


def gpt2(w, c, gguf):
    w.add_block_count(c.n_layer)
    w.add_context_length(c["n_ctx", "n_positions"])
    w.add_embedding_length(c["n_embd"])
    w.add_feed_forward_length(4 * c["n_embd"])
    w.add_head_count(c["n_head"])
    w.add_layer_norm_eps(c["layer_norm_epsilon"])
    w.add_file_type(c.file_type)


def bert(w, c, gguf):
    common(w, c, gguf)
    w.add_causal_attention(False)


# ---------------------------------------------------------------- tensors that config.json holds
def llama_extra(c):
    """Factors of Llama 3.1's RoPE: 1 for short waves, `factor` for long ones, a ramp in between."""
    rope = c.rope()
    rope = rope.get("full_attention", rope)
    if rope.get("rope_type") != "llama3":
        return {}
    freqs = np.float32(1) / np.float32(rope.get("rope_theta", 10000.0)) ** (
        np.arange(0, c.head_dim, 2, dtype=np.float32) / np.float32(c.head_dim))
    factor, low, high, n_ctx = (np.float32(rope.get(k, d)) for k, d in (
        ("factor", 8.0), ("low_freq_factor", 1.0), ("high_freq_factor", 4.0),
        ("original_max_position_embeddings", 8192)))
    wave, one = np.float32(2 * np.pi) / freqs, np.float32(1)
    smooth = (n_ctx / wave - low) / (high - low)
    ramp = one / ((one - smooth) / factor + smooth)
    return {"rope_freqs.weight": np.where(wave < n_ctx / high, one, np.where(wave > n_ctx / low, factor, ramp))}


def phi3_extra(c):
    rope = c.rope()
    return {f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], np.float32)
            for kind in ("long", "short") if rope.get(f"{kind}_factor")}


# ---------------------------------------------------------------- tensors that change
def paired(n_heads):
    """Rows of every head from halves to pairs."""
    def change(x):
        return np.ascontiguousarray(x.reshape(n_heads, 2, len(x) // n_heads // 2, *x.shape[1:]).swapaxes(1, 2)
                                    .reshape(x.shape))
    return change


def llama_change(c, name):
    for part, names in (("q_proj", ("num_attention_heads",)), ("k_proj", ("num_key_value_heads",
                                                                          "num_attention_heads"))):
        if name.endswith((f"{part}.weight", f"{part}.bias")):
            return paired(c[names])
    return None


def gemma_change(c, name):
    return (lambda x: x + np.float32(1)) if name.endswith("norm.weight") else None


def gpt2_change(c, name):
    return (lambda x: np.ascontiguousarray(x.T)) if name.endswith((".c_attn.weight", ".c_proj.weight",
                                                                   ".c_fc.weight")) else None


# ---------------------------------------------------------------- the table
@dataclasses.dataclass(frozen=True)
class Family:
    """arch: a name of gguf.MODEL_ARCH.  metadata(writer, Config, gguf);  change(Config, name) -> function of an array,
    or None;  extra(Config) -> {GGUF name: array};  rename(name) -> name, or None where the tensor is left out."""
    arch: str
    metadata: Callable = common
    change: Callable = lambda c, name: None
    extra: Callable = lambda c: {}
    rename: Callable = lambda name: name
    tied_head: bool = False             # lm_head.weight is the embedding again


def bert_rename(name):
    name = name.removeprefix("bert.").replace(".gamma", ".weight").replace(".beta", ".bias")
    left_out = ("embeddings.position_ids", "pooler.", "cls.")
    return None if name.startswith(left_out) else name


def whole(prefix):
    """Names of a model without a head, saved by itself, begin with what the others begin with."""
    return lambda name: name if name.startswith((prefix, "lm_head.")) else prefix + name


_LLAMA = Family("LLAMA", llama, llama_change, llama_extra, whole("model."))
_GEMMA = {"change": gemma_change, "rename": whole("model."), "tied_head": True}
FAMILIES = {
    **dict.fromkeys(("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "LlamaModel"), _LLAMA),
    "Qwen2ForCausalLM": Family("QWEN2", rename=whole("model.")), "Qwen2Model": Family("QWEN2", rename=whole("model.")),
    "Qwen3ForCausalLM": Family("QWEN3", rename=whole("model.")), "Qwen3Model": Family("QWEN3", rename=whole("model.")),
    "Qwen2MoeForCausalLM": Family("QWEN2MOE", moe), "Qwen3MoeForCausalLM": Family("QWEN3MOE", qwen3_moe),
    "GemmaForCausalLM": Family("GEMMA", gemma, **_GEMMA), "Gemma2ForCausalLM": Family("GEMMA2", gemma2, **_GEMMA),
    "Gemma3ForCausalLM": Family("GEMMA3", gemma3, **_GEMMA),
    "Phi3ForCausalLM": Family("PHI3", phi3, extra=phi3_extra), "GPT2LMHeadModel": Family("GPT2", gpt2, gpt2_change),
    "Olmo2ForCausalLM": Family("OLMO2", olmo2), "OlmoeForCausalLM": Family("OLMOE", olmoe),
    **dict.fromkeys(("BertModel", "BertForMaskedLM"), Family("BERT", bert, rename=bert_rename))}


def family_of(config):
    """The Family of a Config.  Errors: NotSupported."""
    name = (config.get("architectures", default=[None]) or [None])[0]
    if name not in FAMILIES:
        raise NotSupported(f"{config.path}: architecture {name!r} cannot be converted{nearest(str(name), FAMILIES)}; "
                           f"those that can: {', '.join(FAMILIES)}")
    family, act = FAMILIES[name], config.get("hidden_act")
    if config.get("quantization_config"):
        raise NotSupported(f"{config.path}: the weights are quantised already (quantization_config); take the original")
    if family.arch not in ("GEMMA", "GEMMA2", "GEMMA3", "GPT2", "BERT") and act not in (None, "silu", "swish"):
        raise NotSupported(f"{config.path}: hidden_act is {act!r}; GGUF's {family.arch.lower()} always computes silu")
    return family
