"""Decoders with RMS norms that differ from LLaMA in more than one thing: Phi 3, OLMo 2, GLM 4, gpt-oss, Mistral 3,
MiniCPM, Apertus, EXAONE 4; and those that differ in RoPE's pairs or an option only: InternLM 2, EXAONE, Seed OSS, ERNIE
4.5, Arcee, OLMoE, Hunyuan, Baichuan, ChatGLM, Qwen 1 and 2 VL, PLaMo 1 and 3, Refact, XVERSE, Pangu, Maincoder,
OpenELM, PLM, Talkie, Muse Glimmer, PaddleOCR."""
import dataclasses
import math

from ggjit.models.blocks.attention import Attention
from ggjit.models.blocks.description import BareStart, Block, Description, EmbeddingSkip
from ggjit.models.blocks.facts import LONG, ROPE_BASES, ROPE_KINDS, ROPE_NEOX, ROPE_NORMAL
from ggjit.models.blocks.feed_forward import Dense
from ggjit.models.blocks.latent import Latent
from ggjit.models.blocks.moe import SOFTMAX_OF_PICKED, mixture
from ggjit.models.families.llama import dense_or_experts

BAICHUAN_13B = 40               # layers
POSTS = {"attn_post": "post_attention_norm", "ffn_post": "post_ffw_norm"}


def _described(facts, attention, feed_forward, block=None, **switches):
    """The same block in every layer."""
    return Description([Block(attention, feed_forward, **(block or {}))] * facts.n_layer, facts.eps(), **switches)


def _rotated(facts, mode, factors="", **switches):
    """Attention whose heads all rotate alike."""
    sizes = facts.heads()
    kinds = ROPE_KINDS if factors == LONG else ROPE_KINDS[:-1]
    return Attention(**sizes, rope=facts.rope(mode, sizes["d_head"], factors, kinds), **switches)


def phi3(facts):
    """Fused matrices; RoPE has factors for contexts up to the trained one, and others beyond."""
    facts.ignore("attention.sliding_window")            # llama.cpp looks at everything, too
    attention = _rotated(facts, ROPE_NEOX, LONG, fused=facts.has("blk.0.attn_qkv.weight"), out_bias=False)
    return _described(facts, attention, Dense(facts.n_ff, fused=True, bias=False))


def olmo2(facts):
    """Norms after the blocks only, and of queries and keys over all heads; OLMo 3: windows, without scaled RoPE."""
    sizes = facts.heads()
    rope = facts.rope(ROPE_NEOX, sizes["d_head"], factors="")
    base = facts.between("rope.freq_base_swa", *ROPE_BASES, rope.freq_base)
    near = dataclasses.replace(rope, freq_base=base, freq_scale=1.0, ext_factor=0.0, attn_factor=1.0)
    attention = dict(sizes, qk_norm="rms", qk_norm_over="all", out_bias=False)
    blocks = [Block(Attention(**attention, window=w, rope=near if w else rope), Dense(facts.n_ff, bias=False),
                    attn_norm="", ffn_norm="", **POSTS)
              for w in facts.windows(4)]
    return Description(blocks, facts.eps(), tied=False)


def glm4(facts):
    """Norms before and after, half of a head rotated, gate and up in one matrix."""
    attention = _rotated(facts, ROPE_NORMAL, out_bias=False)
    return _described(facts, attention, Dense(facts.n_ff, fused=True, bias=False), POSTS)


def gpt_oss(facts):
    """Attention sinks, windows on every other layer, experts with biases and a clamped gate."""
    facts.ignore("feed_forward_length")
    sizes = facts.heads()
    rope = facts.rope(ROPE_NEOX, sizes["d_head"], factors="")
    near = dataclasses.replace(rope, freq_scale=facts.freq_scale,
                               freq_base=facts.between("rope.freq_base_swa", *ROPE_BASES, facts.freq_base))
    feed_forward = mixture(facts, facts.positive("expert_feed_forward_length"), gating=SOFTMAX_OF_PICKED,
                           biased=True, act="swiglu_oai")
    attention = dict(sizes, sinks=True, bias=True, out_bias=True)
    blocks = [Block(Attention(**attention, window=w, rope=near if w else rope), feed_forward,
                    ffn_norm="post_attention_norm") for w in facts.windows(2, default=...)]
    return Description(blocks, facts.eps(), tied=False)


def olmoe(facts):
    """Experts with weights as the softmax gives them; norms of queries and keys over all heads."""
    attention = _rotated(facts, ROPE_NEOX, out_bias=False, qk_norm="rms", qk_norm_over="all")
    return _described(facts, attention, mixture(facts, facts.n_ff, normed=False), tied=False)


def internlm2(facts):
    return _described(facts, _rotated(facts, ROPE_NORMAL, out_bias=False), Dense(facts.n_ff, bias=False), tied=False)


def exaone(facts):
    attention = _rotated(facts, ROPE_NEOX, "rope_freqs.weight", out_bias=False)
    return _described(facts, attention, Dense(facts.n_ff, bias=False))


def seed_oss(facts):
    """The second norm stands where others have one after attention."""
    return _described(facts, _rotated(facts, ROPE_NEOX, out_bias=False), Dense(facts.n_ff, bias=False),
                      {"ffn_norm": "post_attention_norm"})


def ernie4_5(facts):
    return _described(facts, _rotated(facts, ROPE_NORMAL), Dense(facts.n_ff, bias=False))


def arcee(facts):
    """Squared ReLU instead of a gate."""
    attention = _rotated(facts, ROPE_NORMAL, "rope_freqs.weight", out_bias=False)
    return _described(facts, attention, Dense(facts.n_ff, "relu_sqr", bias=False))


def hunyuan_dense(facts, n_still=0):
    """Norms of heads after RoPE, whose base grows by `rope.scaling.alpha`."""
    sizes, alpha = facts.heads(), facts.scale("rope.scaling.alpha")
    d = sizes["d_head"]
    base = min(facts.freq_base * alpha ** (d / (d - 2)), ROPE_BASES[1]) if alpha and d > 2 else None
    rope = dataclasses.replace(facts.rope(ROPE_NEOX, d, factors="", freq_base=base), n_still=n_still)
    attention = Attention(**sizes, rope=rope, out_bias=False, qk_norm="rms", norm_after_rope=True)
    return _described(facts, attention, Dense(facts.n_ff, bias=False))


def hunyuan_vl(facts):
    """Hunyuan for text."""
    return hunyuan_dense(facts, facts.n_still(facts.heads()["d_head"]))


def mistral3(facts):
    """LLaMA with YaRN that does not grow the scores, and a temperature of queries by position."""
    sizes, scale = facts.heads(), facts.scale("attention.temperature_scale")
    rope = facts.rope(ROPE_NORMAL, sizes["d_head"])
    multiplier = facts.scale("rope.scaling.yarn_log_multiplier")
    if rope.ext_factor and multiplier:
        grown = 1.0 + 0.1 * multiplier * math.log(1.0 / rope.freq_scale)
        rope = dataclasses.replace(rope, attn_factor=rope.attn_factor / grown)
    attention = Attention(**sizes, rope=rope, scale=facts.scale("attention.scale"), temperature=bool(scale))
    return _described(facts, attention, dense_or_experts(facts),
                      temperature=(scale, rope.n_ctx_orig, 0) if scale else None)


def baichuan(facts):
    """Baichuan 7B is LLaMA; 13B, with its 40 layers, has ALiBi instead of RoPE."""
    facts.ignore("rope.dimension_count", "rope.freq_base")
    large = facts.n_layer == BAICHUAN_13B
    attention = Attention(**facts.heads(), max_alibi_bias=8.0, out_bias=False) if large else \
        _rotated(facts, ROPE_NORMAL, out_bias=False)
    return _described(facts, attention, Dense(facts.n_ff, bias=False), tied=False)


def minicpm(facts):
    """LLaMA with the scales of the first MiniCPM, unless the file states others.

    Where it states none, logits are divided by n_embd / 256, as the model was trained; llama.cpp multiplies.
    """
    scale = facts.scale
    return _described(facts, _rotated(facts, ROPE_NORMAL, LONG), dense_or_experts(facts),
                      {"residual_scale": scale("residual_scale", 1.4 / math.sqrt(facts.n_layer))},
                      embd_scale=scale("embedding_scale", 12.0),
                      logit_scale=1.0 / (scale("logit_scale", facts.n_embd / 256.0) or 1.0))


def apertus(facts):
    """xIELU with numbers of its own in every layer, norms of every head's query and key."""
    numbers = [facts.floats_per_layer("xielu." + name) for name in ("alpha_n", "alpha_p", "beta", "eps")]
    attention = _rotated(facts, ROPE_NEOX, "rope_freqs.weight", qk_norm="rms", out_bias=None)
    blocks = [Block(attention, Dense(facts.n_ff, "xielu", bias=False, shape=shape))
              for shape in zip(*numbers, strict=True)]
    return Description(blocks, facts.eps())


def exaone4(facts):
    """Norms after the blocks only, and of every head's query and key; with windows, full layers have no RoPE."""
    sizes = facts.heads()
    rope, windows = facts.rope(ROPE_NEOX, sizes["d_head"]), facts.windows(4)
    blocks = [Block(Attention(**sizes, rope=rope if w or not any(windows) else None, window=w, qk_norm="rms",
                              out_bias=False), Dense(facts.n_ff, bias=False), attn_norm="", ffn_norm="", **POSTS)
              for w in windows]
    return Description(blocks, facts.eps())


def chatglm(facts):
    """Fused matrices, half of a head rotated."""
    attention = _rotated(facts, ROPE_NORMAL, fused=facts.has("blk.0.attn_qkv.weight"), out_bias=False)
    return _described(facts, attention, Dense(facts.n_ff, fused=True, bias=False))


def qwen(facts):
    """The first Qwen: one matrix with biases for queries, keys and values; half the stated feed-forward width."""
    attention = _rotated(facts, ROPE_NEOX, fused=True, bias=True, out_bias=False)
    return _described(facts, attention, Dense(facts.n_ff // 2, bias=False), tied=False)


def qwen2vl(facts):
    """Qwen 2 for text: the three parts of a position are equal there."""
    facts.ignore("rope.dimension_sections")
    return _described(facts, _rotated(facts, ROPE_NEOX, out_bias=False), Dense(facts.n_ff, bias=False))


def paddleocr(facts):
    """The text part of PaddleOCR: ERNIE 4.5 with other pairs."""
    attention = _rotated(facts, ROPE_NEOX)
    n_still = facts.n_still(attention.rope.n_dims)
    attention = dataclasses.replace(attention, rope=dataclasses.replace(attention.rope, n_still=n_still))
    return _described(facts, attention, Dense(facts.n_ff, bias=False))


def plamo(facts):
    """Parallel with one norm."""
    facts.ignore("rope.dimension_count")
    return _described(facts, _rotated(facts, ROPE_NEOX, out_bias=False), Dense(facts.n_ff, bias=False),
                      {"parallel": True, "ffn_norm": ""}, tied=False)


def refact(facts):
    """ALiBi instead of RoPE."""
    attention = Attention(**facts.heads(), max_alibi_bias=8.0, out_bias=False)
    return _described(facts, attention, Dense(facts.n_ff, bias=False))


def xverse(facts):
    return _described(facts, _rotated(facts, ROPE_NORMAL, out_bias=False), Dense(facts.n_ff, bias=False), tied=False)


def pangu(facts):
    return _described(facts, _rotated(facts, ROPE_NEOX), Dense(facts.n_ff, bias=False))


def maincoder(facts):
    """Norms of heads after RoPE."""
    return _described(facts, _rotated(facts, ROPE_NORMAL, out_bias=False, qk_norm="rms", norm_after_rope=True),
                      Dense(facts.n_ff, bias=False))


def openelm(facts):
    """Heads and widths by layer; norms of every head's query and key."""
    blocks = []
    for sizes, n_ff in zip(facts.heads_per_layer(), facts.per_layer("feed_forward_length"), strict=True):
        attention = Attention(**sizes, rope=facts.rope(ROPE_NEOX, sizes["d_head"], factors=""), fused=True, bias=False,
                              out_bias=False, qk_norm="rms")
        blocks.append(Block(attention, Dense(n_ff, bias=False)))
    return Description(blocks, facts.eps(), tied=True)


def plamo3(facts):
    """Norms before and after; layers with windows have a RoPE of their own."""
    blocks, windows = [], facts.windows(8)
    layers = zip(windows, facts.heads_per_layer(), facts.per_layer("feed_forward_length"), strict=True)
    for w, sizes, n_ff in layers:
        rope = facts.rope(ROPE_NEOX, sizes["d_head"], factors="")
        if w:
            base = facts.between("rope.freq_base_swa", *ROPE_BASES, 10000.0)
            rope = dataclasses.replace(rope, freq_base=base, freq_scale=1.0, ext_factor=0.0)
        attention = Attention(**sizes, rope=rope, window=w, fused=True, bias=False, out_bias=False, qk_norm="rms")
        blocks.append(Block(attention, Dense(n_ff, fused=True, bias=False), **POSTS))
    return Description(blocks, facts.eps())


def plm(facts):
    """Latent attention with whole queries, squared ReLU."""
    n_head, d_key = facts.positive("attention.head_count"), facts.heads()["d_head"]
    facts.same("attention.head_count_kv", n_head)
    rope = facts.rope(ROPE_NORMAL, d_key, factors="")
    attention = Latent(n_head, d_key, facts.heads()["d_head_v"], facts.positive("attention.kv_lora_rank"), 0, rope,
                       1.0 / math.sqrt(d_key), absorbed=False)
    return _described(facts, attention, Dense(facts.n_ff, "relu_sqr", bias=False), tied=True)


def talkie(facts):
    """Norms without weights, but one for every head of queries; every layer adds the embeddings again."""
    attention = _rotated(facts, ROPE_NEOX, out_bias=False, qk_norm="rms", qk_norm_over="query", norm_after_rope=True)
    return _described(facts, attention, Dense(facts.n_ff, bias=False), {"norm": "rms bare", "finish": EmbeddingSkip()},
                      norm="rms bare", embd_norm="token_embd_norm", tied=False,
                      logit_scale=facts.between("logit_scale", 1e-6, 1e6))


def muse_glimmer(facts):
    """Norms before and after, gates behind attention, RoPE in layers with windows only."""
    sizes = facts.heads()
    rope = facts.rope(ROPE_NORMAL, sizes["d_head"], factors="")
    base = facts.between("rope.freq_base_swa", *ROPE_BASES, facts.freq_base)
    near = dataclasses.replace(rope, freq_base=base, freq_scale=1.0)
    blocks = [Block(Attention(**sizes, rope=near if w else None, window=w, qk_norm="rms", out_bias=False,
                              gate="sigmoid"), Dense(facts.n_ff, bias=False), post_eps=1e-8, **POSTS)
              for w in facts.windows(4, default=...)]
    return Description(blocks, facts.eps(), frame=BareStart(), tied=False,
                       logit_scale=facts.between("logit_scale", 1e-6, 1e6),
                       softcap=facts.scale("final_logit_softcapping"))


FAMILY = {"phi3": phi3, "olmo2": olmo2, "glm4": glm4, "gpt-oss": gpt_oss, "olmoe": olmoe, "internlm2": internlm2,
          "exaone": exaone, "seed_oss": seed_oss, "ernie4_5": ernie4_5, "arcee": arcee,
          "hunyuan-dense": hunyuan_dense, "mistral3": mistral3, "baichuan": baichuan, "minicpm": minicpm,
          "apertus": apertus, "exaone4": exaone4, "chatglm": chatglm, "qwen": qwen, "qwen2vl": qwen2vl,
          "plamo": plamo, "refact": refact, "xverse": xverse, "pangu-embedded": pangu, "maincoder": maincoder,
          "hunyuan_vl": hunyuan_vl, "paddleocr": paddleocr, "openelm": openelm, "plamo3": plamo3, "plm": plm,
          "talkie": talkie, "muse-glimmer": muse_glimmer}
