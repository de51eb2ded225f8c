"""Architectures of Hugging Face folders: which metadata they get, and which change their tensors need.

Names of tensors and keys come from the gguf package, the changes from tensors.py, the metadata from metadata.py.
"""
import dataclasses
from collections.abc import Callable

import numpy as np

from ggjit.core.arguments import nearest
from ggjit.models.convert import metadata as meta
from ggjit.models.convert import rerank
from ggjit.models.convert.mmproj import PARTS
from ggjit.models.convert.tensors import (
    chain,
    ernie_fused,
    falcon_qkv,
    fused_experts,
    fused_qkv,
    gated_layers,
    gemma3n_change,
    gemma4_change,
    gpt_oss_change,
    granite_experts,
    internlm_qkv,
    latent_change,
    mamba2_change,
    mamba_change,
    norms_change,
    pairs_change,
    qwen3next_change,
    roberta_change,
    rwkv7_change,
    short_conv_change,
    transposed,
    unchanged,
)
from ggjit.ops.core.errors import NotSupported

NOT_WEIGHTS = (".attention.masked_bias", ".attention.bias", ".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


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


def gemma4_extra(c):
    """Factors of RoPE in layers without a window: its later pairs are not rotated."""
    d = c.full("head_dim")
    n = int(d * c.rope()["full_attention"].get("partial_rotary_factor", 1.0) / 2)
    return {"rope_freqs.weight": np.repeat(np.float32([1.0, 1e30]), [n, d // 2 - n])}


# ---------------------------------------------------------------- the table
SILU = (None, "silu", "swish")


@dataclasses.dataclass(frozen=True)
class Family:
    """arch: a name of gguf.MODEL_ARCH.  metadata(writer, Config, gguf);  change: as tensors.py has them;
    extra(Config) -> {GGUF name: array};  rename(name) -> name, or None where the tensor is left out."""
    arch: str
    metadata: Callable = meta.common
    change: Callable = unchanged
    extra: Callable = lambda c: {}
    rename: Callable = lambda name: name
    tied_head: bool = False             # lm_head.weight is a second name of the embedding
    acts: tuple = SILU                  # values of hidden_act that are what GGUF's network computes; (): any


def bert_rename(name):
    name = name.removeprefix("bert.").replace(".gamma", ".weight").replace(".beta", ".bias")
    left_out = ("embeddings.position_ids", "pooler.", "cls.")
    return None if name.startswith(left_out) else name


def bert_classifier_rename(name):
    return None if name.startswith("cls.") else bert_rename(rerank.bert_classifier(name.removeprefix("bert.")))


def roberta_rename(name):
    name = name.removeprefix("roberta.")
    return None if name.startswith("lm_head.") else bert_rename(name)


def modern_bert_rename(name):
    name = name.removeprefix("model.")
    return None if name.startswith(("head.", "decoder.")) else name


def t5_rename(name):
    """The embedding is stored under one name or two."""
    return None if name == "encoder.embed_tokens.weight" else name


def without(*prefixes):
    return lambda name: None if name.startswith(prefixes) else name


def text_part(name):
    """Of a model that also sees or hears: the name as its decoder alone would have it."""
    bare = name.removeprefix("model.")
    if bare.startswith((*PARTS, "audio_tower.", "embed_vision.", "embed_audio.")):
        return None
    for prefix in ("language_model.", "text_model.", "model."):
        bare = bare.removeprefix(prefix)
    return bare if bare.startswith("lm_head.") else "model." + bare


def replaced(old, new):
    return lambda name: name.replace(old, new)


def whole(prefix):
    """Names of tensors with the common prefix, which models that were saved without their head lack."""
    return lambda name: name if name.startswith((prefix, "lm_head.", "score.")) else prefix + name


def qwen3_family(c):
    """Qwen 3.  Its rerankers have a classifier as well."""
    if rerank.is_qwen3_reranker(c):
        return Family("QWEN3", meta.qwen3_reranker, chain(rerank.qwen3_change), **_WHOLE)
    return Family("QWEN3", **_WHOLE)


def decoder_family(c):
    """Of a model that sees, whose decoder may be one of several: text_config says it."""
    of = {"llama": _LLAMA, "mistral": _LLAMA, "qwen2": Family("QWEN2"), "qwen3": Family("QWEN3")}
    kind = c.get("model_type")
    if kind not in of:
        raise NotSupported(f"{c.path}: text_config's model_type is {kind!r}; those that can be converted with a vision "
                           f"part: {', '.join(of)}")
    return dataclasses.replace(of[kind], **_TEXT)


def granite_hybrid_family(c):
    """Granite 4: the ones without recurrent layers are plain Granites."""
    change = chain(granite_experts, lambda c, name, x: mamba2_change(c, name, x) if ".mamba." in name else None,
                   pairs_change)
    if set(meta.RECURRENT) & set(c["layer_types"]):
        return Family("GRANITE_HYBRID", meta.granite_hybrid, change)
    return Family("GRANITE_MOE" if c.n_expert else "GRANITE", meta.granite, change)


_WHOLE, _TEXT = {"rename": whole("model.")}, {"rename": text_part}
_GEMMA_TEXT = {**_TEXT, "tied_head": True, "acts": ()}
_PAIRS, _NORMS = chain(pairs_change), chain(norms_change)
_LLAMA = Family("LLAMA", meta.llama, _PAIRS, llama_extra, **_WHOLE)
_GEMMA = {"change": _NORMS, "tied_head": True, "acts": (), **_WHOLE}
_BERT = {"rename": bert_rename, "acts": ()}
_GRANITE_MOE = Family("GRANITE_MOE", meta.granite, chain(granite_experts, pairs_change))
_DEEPSEEK = Family("DEEPSEEK2", meta.deepseek2, chain(latent_change))
_EXPERTS = {"change": chain(fused_experts)}
FAMILIES = {
    **dict.fromkeys(("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "LlamaModel"), _LLAMA),
    **dict.fromkeys(("Qwen2ForCausalLM", "Qwen2Model"), Family("QWEN2", **_WHOLE)),
    **dict.fromkeys(("Qwen3ForCausalLM", "Qwen3Model", "Qwen3ForSequenceClassification"), qwen3_family),
    "Qwen2MoeForCausalLM": Family("QWEN2MOE", meta.moe, **_EXPERTS),
    "Qwen3MoeForCausalLM": Family("QWEN3MOE", meta.qwen3_moe, **_EXPERTS),
    "GraniteForCausalLM": Family("GRANITE", meta.granite, _PAIRS),
    **dict.fromkeys(("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"), _GRANITE_MOE),
    "SmolLM3ForCausalLM": Family("SMOLLM3", meta.smollm3, _PAIRS),
    "GemmaForCausalLM": Family("GEMMA", meta.gemma, **_GEMMA),
    "Gemma2ForCausalLM": Family("GEMMA2", meta.gemma2, **_GEMMA),
    "Gemma3ForCausalLM": Family("GEMMA3", meta.gemma3, **_GEMMA),
    **dict.fromkeys(("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
                    Family("GEMMA3N", meta.gemma3n, chain(gemma3n_change), **_GEMMA_TEXT)),
    **dict.fromkeys(("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
                    Family("GEMMA4", meta.gemma4, chain(gemma4_change), gemma4_extra, **_GEMMA_TEXT)),
    "Gemma3ForConditionalGeneration": Family("GEMMA3", meta.gemma3, **(_GEMMA | _TEXT)),
    **dict.fromkeys(("LlavaForConditionalGeneration", "Mistral3ForConditionalGeneration",
                     "Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"), decoder_family),
    **dict.fromkeys(("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
                    Family("QWEN2VL", meta.qwen2vl, **_TEXT)),
    "Qwen3VLForConditionalGeneration": Family("QWEN3VL", meta.qwen3vl, **_TEXT),
    "Phi3ForCausalLM": Family("PHI3", meta.phi3, extra=phi3_extra),
    **dict.fromkeys(("Olmo2ForCausalLM", "Olmo3ForCausalLM"), Family("OLMO2", meta.olmo2)),
    "OlmoeForCausalLM": Family("OLMOE", meta.olmoe, **_EXPERTS),
    "Glm4ForCausalLM": Family("GLM4", meta.rotated(0.5)), "SeedOssForCausalLM": Family("SEED_OSS"),
    "GptOssForCausalLM": Family("GPT_OSS", meta.gpt_oss, chain(gpt_oss_change)),
    "InternLM2ForCausalLM": Family("INTERNLM2", change=chain(internlm_qkv)),
    "ExaoneForCausalLM": Family("EXAONE", meta.exaone, extra=llama_extra),
    **dict.fromkeys(("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),
                    Family("ERNIE4_5", change=chain(ernie_fused), rename=replaced("ernie.", "model."))),
    "ArceeForCausalLM": Family("ARCEE", meta.llama, _PAIRS, llama_extra, acts=("relu2",)),
    "HunYuanDenseV1ForCausalLM": Family("HUNYUAN_DENSE", meta.hunyuan),
    "GPT2LMHeadModel": Family("GPT2", meta.gpt2, chain(transposed(".c_attn.weight", ".c_proj.weight", ".c_fc.weight")),
                              acts=()),
    "Starcoder2ForCausalLM": Family("STARCODER2", acts=()),
    "GPTNeoXForCausalLM": Family("GPTNEOX", meta.gptneox, chain(fused_qkv), acts=()),
    **dict.fromkeys(("FalconForCausalLM", "RWForCausalLM"), Family("FALCON", meta.falcon, chain(falcon_qkv), acts=())),
    "PhiForCausalLM": Family("PHI2", meta.phi2, acts=()),
    **dict.fromkeys(("StableLmForCausalLM", "StableLMEpochForCausalLM"), Family("STABLELM", meta.stablelm)),
    "CohereForCausalLM": Family("COMMAND_R", meta.command_r), "Cohere2ForCausalLM": Family("COHERE2", meta.cohere2),
    **dict.fromkeys(("BloomForCausalLM", "BloomModel"),
                    Family("BLOOM", meta.bloom, chain(fused_qkv), rename=replaced("transformer.", ""), acts=())),
    **dict.fromkeys(("OlmoForCausalLM", "OLMoForCausalLM"), Family("OLMO", meta.olmo, _PAIRS)),
    "NemotronForCausalLM": Family("NEMOTRON", meta.nemotron, _NORMS, acts=("relu2",)),
    **dict.fromkeys(("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"), _DEEPSEEK),
    **dict.fromkeys(("MambaForCausalLM", "MambaLMHeadModel", "FalconMambaForCausalLM"),
                    Family("MAMBA", meta.mamba, chain(mamba_change))),
    "Mamba2ForCausalLM": Family("MAMBA2", meta.mamba2, mamba2_change),
    **dict.fromkeys(("RWKV7ForCausalLM", "Rwkv7ForCausalLM"), Family("RWKV7", meta.rwkv7, rwkv7_change, acts=())),
    **dict.fromkeys(("Lfm2ForCausalLM", "LFM2ForCausalLM"), Family("LFM2", meta.lfm2, chain(short_conv_change))),
    "GraniteMoeHybridForCausalLM": granite_hybrid_family,
    "Qwen3NextForCausalLM": Family("QWEN3NEXT", meta.qwen3next, chain(qwen3next_change, fused_experts),
                                   rename=without("mtp.")),
    **dict.fromkeys(("BertModel", "BertForMaskedLM"), Family("BERT", meta.bert, **_BERT)),
    "BertForSequenceClassification": Family("BERT", meta.bert, rename=bert_classifier_rename, acts=()),
    **dict.fromkeys(("RobertaModel", "RobertaForMaskedLM", "RobertaForSequenceClassification", "XLMRobertaModel",
                     "XLMRobertaForMaskedLM", "XLMRobertaForSequenceClassification"),
                    Family("BERT", meta.roberta, chain(roberta_change), rename=roberta_rename, acts=())),
    "EuroBertModel": Family("EUROBERT", meta.bert, **_WHOLE),
    "NomicBertModel": Family("NOMIC_BERT", meta.nomic_bert, **_BERT),
    **dict.fromkeys(("JinaBertModel", "JinaBertForMaskedLM"),
                    Family("JINA_BERT_V2", meta.bert, chain(gated_layers), **_BERT)),
    **dict.fromkeys(("ModernBertModel", "ModernBertForMaskedLM"),
                    Family("MODERN_BERT", meta.modern_bert, rename=modern_bert_rename, acts=())),
    "ModernBertForSequenceClassification": Family("MODERN_BERT", meta.modern_bert, rename=lambda name: (
        rerank.modern_bert_classifier(name.removeprefix("model."))), acts=()),
    "T5EncoderModel": Family("T5ENCODER", meta.t5_encoder, rename=t5_rename, acts=())}


def family_of(config):
    """The Family of a Config.  Errors: NotSupported."""
    name = (config.get("architectures", default=[None]) or [None])[0]
    if name not in FAMILIES:
        raise NotSupported(f"{config.path}: architecture {name!r} cannot be converted{nearest(str(name), FAMILIES)}; "
                           f"those that can: {', '.join(FAMILIES)}")
    family, act = FAMILIES[name], config.get("hidden_act")
    family = family if isinstance(family, Family) else family(config)
    if config.get("quantization_config"):
        raise NotSupported(f"{config.path}: the weights are quantised already (quantization_config); take the original")
    if family.acts and act not in (None, *family.acts):
        raise NotSupported(f"{config.path}: hidden_act is {act!r}; GGUF's {family.arch.lower()} always computes "
                           f"{family.acts[-1] if family.acts is not SILU else 'silu'}")
    return family
