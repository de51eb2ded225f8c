"""DeepSeek 2 to 3.2, Mistral 4, GLM 5 and dots 3 Note: latent attention; the first layers are dense, the others have
experts, among them a shared one for every token.  From DeepSeek 3.2 on, an indexer selects the keys that a token
attends to.  MiniCPM 3: latent attention and dense layers."""
import dataclasses
import math

from ggjit.models.blocks.description import Block, Description
from ggjit.models.blocks.feed_forward import Dense
from ggjit.models.blocks.hparams import LONG, ROPE_KINDS, ROPE_NEOX, ROPE_NORMAL
from ggjit.models.blocks.indexer import Indexer
from ggjit.models.blocks.latent import Latent
from ggjit.models.blocks.moe import SIGMOID, gating, groups
from ggjit.models.families.experts import after_dense, next_token, routed

GLM_EPS = 1e-6                          # epsilon of the indexer's norm
GLM_5_2_CONTEXT = 1 << 20               # from 5.2 on some layers have no indexer


def deepseek2(hparams):
    hparams.leave_predicting()
    absorbed = hparams.get("attention.key_length_mla", 0, int) > 0
    suffix = "_mla" if absorbed else ""
    d_key, d_value = (hparams.positive(f"attention.{n}_length{suffix}") for n in ("key", "value"))
    kv_rank, n_head = hparams.positive("attention.kv_lora_rank"), hparams.positive("attention.head_count")
    rope, scale = _scaled_rope(hparams, d_key)
    hparams.same("attention.head_count_kv", 1 if absorbed else n_head)
    if absorbed:
        hparams.same("attention.key_length", kv_rank + rope.n_dims)
        hparams.same("attention.value_length", kv_rank)
    attention = Latent(n_head, d_key, d_value, kv_rank, _q_rank(hparams), rope, scale, absorbed,
                       temperature=bool(hparams.scale("attention.temperature_scale")))
    temperature = (hparams.scale("attention.temperature_scale"), hparams.positive("attention.temperature_length"), 0) \
        if attention.temperature else None
    experts = routed(hparams, **groups(hparams))
    return Description(after_dense(hparams, attention, experts), hparams.eps(), temperature=temperature,
                       next_token=None if temperature else next_token(hparams, attention, experts))


def _q_rank(hparams):
    """0 where Wq is whole: the lite model, and files without the low-rank pair."""
    rank = hparams.get("attention.q_lora_rank", 0, int)
    return 0 if hparams.has("blk.0.attn_q.weight") else rank


def _scaled_rope(hparams, d_key):
    """(Rope, scale of the scores): YaRN's growth of the scores is taken from RoPE, and squared into their scale."""
    rope = hparams.rope(ROPE_NORMAL, d_key, factors="")
    multiplier = hparams.scale("rope.scaling.yarn_log_multiplier") / 0.1   # the converter multiplies by 0.1
    grown = math.log(1.0 / rope.freq_scale)
    taken = 1.0 if hparams.file.arch == "deepseek2" else multiplier
    attn = rope.attn_factor / (1.0 + 0.1 * taken * grown) if rope.ext_factor and multiplier else rope.attn_factor
    whole = attn * (1.0 + 0.1 * grown)
    scale = (whole * (1.0 + 0.1 * multiplier * grown)) ** 2 / math.sqrt(d_key)
    return dataclasses.replace(rope, attn_factor=attn), scale


def _sparse(hparams, attentions, kind):
    """The description of a network whose layers of attention are these."""
    hparams.ignore("rope.dimension_sections")
    experts = routed(hparams, kind, normed=hparams.get("expert_weights_norm", False, bool), **groups(hparams))
    blocks = after_dense(hparams, attentions[0], experts)
    blocks = [dataclasses.replace(b, mixer=mixer) for b, mixer in zip(blocks, attentions, strict=True)]
    return Description(blocks, hparams.eps())


def _indexed(hparams, rope, scale, index_mode, eps):
    """(Latent, Indexer) of the metadata."""
    n_head, kv_rank = hparams.positive("attention.head_count"), hparams.positive("attention.kv_lora_rank")
    d_key, d_value = (hparams.positive(f"attention.{n}_length_mla") for n in ("key", "value"))
    hparams.same("attention.head_count_kv", 1)
    hparams.same("attention.key_length", kv_rank + rope.n_dims)
    hparams.same("attention.value_length", kv_rank)
    index = indexer(hparams, rope, index_mode, eps)
    return Latent(n_head, d_key, d_value, kv_rank, index.q_rank, rope, scale, absorbed=True, indexer=index), index


def indexer(hparams, rope, mode, eps):
    """The Indexer of the metadata.  Errors: ModelError."""
    q_rank = hparams.positive("attention.q_lora_rank")
    n_index, d_index, n_top = (hparams.positive(f"attention.indexer.{n}") for n in ("head_count", "key_length",
                                                                                    "top_k"))
    if rope.n_dims > d_index:
        raise hparams.wrong("attention.indexer.key_length", d_index, f"at least the {rope.n_dims} that are rotated")
    return Indexer(n_index, d_index, n_top, q_rank, dataclasses.replace(rope, mode=mode), eps)


def deepseek32(hparams):
    hparams.leave_predicting()
    rope, scale = _scaled_rope(hparams, hparams.positive("attention.key_length_mla"))
    attention, _ = _indexed(hparams, rope, scale, ROPE_NEOX, 1e-6)
    return _sparse(hparams, [attention] * hparams.n_layer, gating(hparams, 0))


def glm_dsa(hparams):
    """Layers without an indexer of their own look at what the layer before looked at."""
    hparams.leave_predicting()
    rope, scale = _scaled_rope(hparams, hparams.positive("attention.key_length_mla"))
    attention, index = _indexed(hparams, rope, scale, ROPE_NORMAL, GLM_EPS)
    own = _own_indexers(hparams)
    shared = dataclasses.replace(attention, indexer=dataclasses.replace(index, shared=True))
    return _sparse(hparams, [attention if is_own else shared for is_own in own], SIGMOID)


def _own_indexers(hparams):
    """[has the layer an indexer of its own?]"""
    if hparams.n_ctx_train >= GLM_5_2_CONTEXT and hparams.get("attention.indexer.types", None) is None:
        own = [hparams.has(f"blk.{i}.indexer.proj.weight") for i in range(hparams.n_layer)]
    else:
        own = hparams.flags_per_layer("attention.indexer.types", True)
    if not own[0]:
        raise hparams.wrong("attention.indexer.types", own, "a first layer with an indexer")
    return own


def dots3note(hparams):
    """Layers with windows have latent sizes and a RoPE of their own, the others an indexer; gates by head, and a norm
    of the key that all heads share."""
    hparams.leave_predicting()
    hparams.same("attention.head_count_kv", 1)
    windows, n_heads = hparams.windows(..., default=...), hparams.per_layer("attention.head_count")
    sizes = {near: _latent_sizes(hparams, "_swa" * near) for near in (False, True)}
    rope = hparams.rope(ROPE_NORMAL, sizes[False]["d_key"], factors="", n_dims=hparams.rope_dims(
        "rope.dimension_count", sizes[False]["d_key"], min(s["d_key"] for s in sizes.values())))
    for near, suffix in ((False, ""), (True, "_swa")):
        hparams.same("attention.key_length" + suffix, sizes[near]["kv_rank"] + rope.n_dims)
        hparams.same("attention.value_length" + suffix, sizes[near]["kv_rank"])
    if hparams.flags_per_layer("attention.indexer.types", False) != [not w for w in windows]:
        raise hparams.wrong("attention.indexer.types", hparams.get("attention.indexer.types", None),
                            "true for the layers without windows alone")
    index, near_rope = indexer(hparams, rope, ROPE_NEOX, GLM_EPS), hparams.window_rope(rope)
    attentions = [Latent(n_head, q_rank=index.q_rank, rope=near_rope if w else rope, absorbed=True, k_norm=True,
                         scale=1.0 / math.sqrt(sizes[bool(w)]["d_key"]), indexer=None if w else index, window=w,
                         gate="sigmoid", gate_by_head=True, **sizes[bool(w)])
                  for n_head, w in zip(n_heads, windows, strict=True)]
    return _sparse(hparams, attentions, SIGMOID)


def _latent_sizes(hparams, suffix):
    d_key, d_value, kv_rank = (hparams.positive(f"attention.{name}{suffix}") for name in (
        "key_length_mla", "value_length_mla", "kv_lora_rank"))
    return {"d_key": d_key, "d_value": d_value, "kv_rank": kv_rank}


def minicpm3(hparams):
    """The scales of the first MiniCPM, and its RoPE with factors by context size."""
    sizes, kv_rank = hparams.heads(), hparams.positive("attention.kv_lora_rank")
    hparams.same("attention.head_count_kv", sizes["n_head"])
    rope = hparams.rope(ROPE_NEOX, sizes["d_head"], LONG, ROPE_KINDS)
    attention = Latent(sizes["n_head"], sizes["d_head"], sizes["d_head_v"], kv_rank,
                       hparams.positive("attention.q_lora_rank"), rope, 1.0 / math.sqrt(sizes["d_head"]),
                       absorbed=False)
    block = Block(attention, Dense(hparams.n_ff, bias=False), residual_scale=1.4 / math.sqrt(hparams.n_layer))
    return Description([block] * hparams.n_layer, hparams.eps(), embd_scale=12.0, logit_scale=256.0 / hparams.n_embd)


DECODERS = {"deepseek2": deepseek2, "mistral4": deepseek2, "minicpm3": minicpm3, "deepseek32": deepseek32,
            "glm-dsa": glm_dsa, "dots3note": dots3note}
