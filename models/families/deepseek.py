"""DeepSeek 2 to 3.2, Mistral 4 and GLM 5: latent attention, some dense layers, then experts with a shared one; from
DeepSeek 3.2 on an indexer picks the keys that a token looks at.  MiniCPM 3: latent attention and dense layers."""
import dataclasses
import math

from ggjit.models.blocks.description import Block, Description
from ggjit.models.blocks.facts import LONG, ROPE_KINDS, ROPE_NEOX, ROPE_NORMAL
from ggjit.models.blocks.feed_forward import Dense
from ggjit.models.blocks.indexer import Indexer
from ggjit.models.blocks.latent import Latent
from ggjit.models.blocks.moe import SIGMOID, gating, groups
from ggjit.models.families.experts import after_dense, routed

GLM_EPS = 1e-6                          # of the indexer's norm
GLM_5_2_CONTEXT = 1 << 20               # from 5.2 on some layers have no indexer


def deepseek2(facts):
    absorbed = facts.get("attention.key_length_mla", 0, int) > 0
    suffix = "_mla" if absorbed else ""
    d_key, d_value = (facts.positive(f"attention.{n}_length{suffix}") for n in ("key", "value"))
    kv_rank, n_head = facts.positive("attention.kv_lora_rank"), facts.positive("attention.head_count")
    rope, scale = _scaled_rope(facts, d_key)
    facts.same("attention.head_count_kv", 1 if absorbed else n_head)
    if absorbed:
        facts.same("attention.key_length", kv_rank + rope.n_dims)
        facts.same("attention.value_length", kv_rank)
    attention = Latent(n_head, d_key, d_value, kv_rank, _q_rank(facts), rope, scale, absorbed,
                       temperature=bool(facts.scale("attention.temperature_scale")))
    temperature = (facts.scale("attention.temperature_scale"), facts.positive("attention.temperature_length"), 0) \
        if attention.temperature else None
    blocks = after_dense(facts, attention, routed(facts, **groups(facts)))
    return Description(blocks, facts.eps(), temperature=temperature)


def _q_rank(facts):
    """0 where Wq is whole: the lite model, and files without the low-rank pair."""
    rank = facts.get("attention.q_lora_rank", 0, int)
    return 0 if facts.has("blk.0.attn_q.weight") else rank


def _scaled_rope(facts, d_key):
    """(Rope, scale of the scores): YaRN's growth of the scores is taken from RoPE, and squared into their scale."""
    rope = facts.rope(ROPE_NORMAL, d_key, factors="")
    multiplier = facts.scale("rope.scaling.yarn_log_multiplier") / 0.1     # the converter multiplies by 0.1
    grown = math.log(1.0 / rope.freq_scale)
    taken = 1.0 if facts.file.arch == "deepseek2" else multiplier
    attn = rope.attn_factor / (1.0 + 0.1 * taken * grown) if rope.ext_factor and multiplier else rope.attn_factor
    whole = attn * (1.0 + 0.1 * grown)
    scale = (whole * (1.0 + 0.1 * multiplier * grown)) ** 2 / math.sqrt(d_key)
    return dataclasses.replace(rope, attn_factor=attn), scale


def _sparse(facts, attentions, kind):
    """The network of these layers of attention."""
    facts.ignore("rope.dimension_sections")
    experts = routed(facts, kind, normed=facts.get("expert_weights_norm", False, bool), **groups(facts))
    blocks = after_dense(facts, attentions[0], experts)
    blocks = [dataclasses.replace(b, mixer=mixer) for b, mixer in zip(blocks, attentions, strict=True)]
    return Description(blocks, facts.eps())


def _indexed(facts, rope, scale, index_mode, eps):
    """(Latent, Indexer) of the metadata."""
    n_head, kv_rank = facts.positive("attention.head_count"), facts.positive("attention.kv_lora_rank")
    d_key, d_value = (facts.positive(f"attention.{n}_length_mla") for n in ("key", "value"))
    facts.same("attention.head_count_kv", 1)
    facts.same("attention.key_length", kv_rank + rope.n_dims)
    facts.same("attention.value_length", kv_rank)
    q_rank = facts.positive("attention.q_lora_rank")
    n_index, d_index, n_top = (facts.positive(f"attention.indexer.{n}") for n in ("head_count", "key_length", "top_k"))
    if rope.n_dims > d_index:
        raise facts.wrong("attention.indexer.key_length", d_index, f"at least the {rope.n_dims} that are rotated")
    index = Indexer(n_index, d_index, n_top, q_rank, dataclasses.replace(rope, mode=index_mode), eps)
    return Latent(n_head, d_key, d_value, kv_rank, q_rank, rope, scale, absorbed=True, indexer=index), index


def deepseek32(facts):
    facts.leave_predicting()
    rope, scale = _scaled_rope(facts, facts.positive("attention.key_length_mla"))
    attention, _ = _indexed(facts, rope, scale, ROPE_NEOX, 1e-6)
    return _sparse(facts, [attention] * facts.n_layer, gating(facts, 0))


def glm_dsa(facts):
    """Layers without an indexer of their own look at what the layer before looked at."""
    facts.leave_predicting()
    rope, scale = _scaled_rope(facts, facts.positive("attention.key_length_mla"))
    attention, index = _indexed(facts, rope, scale, ROPE_NORMAL, GLM_EPS)
    own = _own_indexers(facts)
    shared = dataclasses.replace(attention, indexer=dataclasses.replace(index, shared=True))
    return _sparse(facts, [attention if is_own else shared for is_own in own], SIGMOID)


def _own_indexers(facts):
    """[has the layer an indexer of its own?]"""
    if facts.n_ctx_train >= GLM_5_2_CONTEXT and facts.get("attention.indexer.types", None) is None:
        own = [facts.has(f"blk.{i}.indexer.proj.weight") for i in range(facts.n_layer)]
    else:
        own = facts.flags_per_layer("attention.indexer.types", True)
    if not own[0]:
        raise facts.wrong("attention.indexer.types", own, "a first layer with an indexer")
    return own


def minicpm3(facts):
    """The scales of the first MiniCPM, and its RoPE with factors by context size."""
    sizes, kv_rank = facts.heads(), facts.positive("attention.kv_lora_rank")
    facts.same("attention.head_count_kv", sizes["n_head"])
    rope = facts.rope(ROPE_NEOX, sizes["d_head"], LONG, ROPE_KINDS)
    attention = Latent(sizes["n_head"], sizes["d_head"], sizes["d_head_v"], kv_rank,
                       facts.positive("attention.q_lora_rank"), rope, 1.0 / math.sqrt(sizes["d_head"]), absorbed=False)
    block = Block(attention, Dense(facts.n_ff, bias=False), residual_scale=1.4 / math.sqrt(facts.n_layer))
    return Description([block] * facts.n_layer, facts.eps(), embd_scale=12.0, logit_scale=256.0 / facts.n_embd)


FAMILY = {"deepseek2": deepseek2, "mistral4": deepseek2, "minicpm3": minicpm3, "deepseek32": deepseek32,
          "glm-dsa": glm_dsa}
