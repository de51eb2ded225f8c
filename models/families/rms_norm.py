"""Decoders with RMS norms that differ from LLaMA in more than one thing: Phi 3, OLMo 2, GLM 4, gpt-oss, Mistral 3,
MiniCPM, Apertus, EXAONE 4.  Others differ only in the pairs of RoPE or in an option: InternLM 2, EXAONE, Seed OSS,
ERNIE 4.5, Arcee, OLMoE, Hunyuan, Baichuan, ChatGLM, Qwen 1 and 2 VL, PLaMo 1 and 3, Refact, XVERSE, Pangu, Maincoder,
OpenELM, PLM, Talkie, Muse Glimmer, PaddleOCR, CogVLM, Chameleon."""
import dataclasses
import math

from ggjit.models.blocks.attention import Attention
from ggjit.models.blocks.description import Block, Description, EmbeddingNorm, EmbeddingSkip
from ggjit.models.blocks.feed_forward import Dense
from ggjit.models.blocks.hparams import LONG, ROPE_BASES, ROPE_NEOX, ROPE_NORMAL
from ggjit.models.blocks.latent import Latent
from ggjit.models.blocks.moe import SOFTMAX_OF_PICKED, mixture
from ggjit.models.families.common import described, rotated
from ggjit.models.families.llama import dense_or_experts

CHAMELEON_EPS = 1e-5            # epsilon of its norms of heads, which the file does not state
PICTURE_IDS = 4, 8196           # Chameleon's tokens of pictures, from the first up to the second
BAICHUAN_13B = 40               # number of layers by which Baichuan 13B is told from 7B
POSTS = {"attn_post": "post_attention_norm", "ffn_post": "post_ffw_norm"}


def phi3(hparams):
    """Fused matrices; RoPE has factors for contexts up to the trained one, and others beyond."""
    hparams.ignore("attention.sliding_window")          # llama.cpp ignores the window, too
    attention = rotated(hparams, ROPE_NEOX, LONG, fused=hparams.has("blk.0.attn_qkv.weight"), out_bias=False)
    return described(hparams, attention, Dense(hparams.n_ff, fused=True, bias=False))


def olmo2(hparams):
    """Norms after the blocks only, and of queries and keys over all heads; OLMo 3: windows, without scaled RoPE."""
    sizes = hparams.heads()
    rope = hparams.rope(ROPE_NEOX, sizes["d_head"], factors="")
    near = hparams.window_rope(rope, freq_scale=1.0, ext_factor=0.0, attn_factor=1.0)
    attention = dict(sizes, qk_norm="rms", qk_norm_over="all", out_bias=False)
    blocks = [Block(Attention(**attention, window=w, rope=near if w else rope), Dense(hparams.n_ff, bias=False),
                    attn_norm="", ffn_norm="", **POSTS)
              for w in hparams.windows(4)]
    return Description(blocks, hparams.eps(), tied=False)


def glm4(hparams):
    """Norms before and after, half of a head rotated, gate and up in one matrix."""
    attention = rotated(hparams, ROPE_NORMAL, out_bias=False)
    return described(hparams, attention, Dense(hparams.n_ff, fused=True, bias=False), POSTS)


def gpt_oss(hparams):
    """Attention sinks, windows on every other layer, experts with biases and a clamped gate."""
    hparams.ignore("feed_forward_length")
    sizes = hparams.heads()
    rope = hparams.rope(ROPE_NEOX, sizes["d_head"], factors="")
    near = hparams.window_rope(rope, hparams.freq_base, freq_scale=hparams.freq_scale)
    feed_forward = mixture(hparams, hparams.positive("expert_feed_forward_length"), gating=SOFTMAX_OF_PICKED,
                           biased=True, act="swiglu_oai")
    attention = dict(sizes, sinks=True, bias=True, out_bias=True)
    blocks = [Block(Attention(**attention, window=w, rope=near if w else rope), feed_forward,
                    ffn_norm="post_attention_norm") for w in hparams.windows(2, default=...)]
    return Description(blocks, hparams.eps(), tied=False)


def olmoe(hparams):
    """Experts with weights as the softmax gives them; norms of queries and keys over all heads."""
    attention = rotated(hparams, ROPE_NEOX, out_bias=False, qk_norm="rms", qk_norm_over="all")
    return described(hparams, attention, mixture(hparams, hparams.n_ff, normed=False), tied=False)


def internlm2(hparams):
    return described(hparams, rotated(hparams, ROPE_NORMAL, out_bias=False), Dense(hparams.n_ff, bias=False),
                      tied=False)


def exaone(hparams):
    attention = rotated(hparams, ROPE_NEOX, "rope_freqs.weight", out_bias=False)
    return described(hparams, attention, Dense(hparams.n_ff, bias=False))


def seed_oss(hparams):
    """The second norm stands where others have one after attention."""
    return described(hparams, rotated(hparams, ROPE_NEOX, out_bias=False), Dense(hparams.n_ff, bias=False),
                      {"ffn_norm": "post_attention_norm"})


def ernie4_5(hparams):
    return described(hparams, rotated(hparams, ROPE_NORMAL), Dense(hparams.n_ff, bias=False))


def arcee(hparams):
    """Squared ReLU instead of a gate."""
    attention = rotated(hparams, ROPE_NORMAL, "rope_freqs.weight", out_bias=False)
    return described(hparams, attention, Dense(hparams.n_ff, "relu_sqr", bias=False))


def hunyuan_dense(hparams, n_non_rotary=0):
    """Norms of heads after RoPE, whose base grows by `rope.scaling.alpha`."""
    sizes, alpha = hparams.heads(), hparams.scale("rope.scaling.alpha")
    d = sizes["d_head"]
    base = min(hparams.freq_base * alpha ** (d / (d - 2)), ROPE_BASES[1]) if alpha and d > 2 else None
    rope = dataclasses.replace(hparams.rope(ROPE_NEOX, d, factors="", freq_base=base), n_non_rotary=n_non_rotary)
    attention = Attention(**sizes, rope=rope, out_bias=False, qk_norm="rms", norm_after_rope=True)
    return described(hparams, attention, Dense(hparams.n_ff, bias=False))


def hunyuan_vl(hparams):
    """Hunyuan for text."""
    return hunyuan_dense(hparams, hparams.n_non_rotary(hparams.heads()["d_head"]))


def mistral3(hparams):
    """LLaMA with YaRN that does not grow the scores, and a temperature of queries by position."""
    sizes, scale = hparams.heads(), hparams.scale("attention.temperature_scale")
    rope = hparams.rope(ROPE_NORMAL, sizes["d_head"])
    multiplier = hparams.scale("rope.scaling.yarn_log_multiplier")
    if rope.ext_factor and multiplier:
        grown = 1.0 + 0.1 * multiplier * math.log(1.0 / rope.freq_scale)
        rope = dataclasses.replace(rope, attn_factor=rope.attn_factor / grown)
    attention = Attention(**sizes, rope=rope, scale=hparams.scale("attention.scale"), temperature=bool(scale))
    return described(hparams, attention, dense_or_experts(hparams),
                      temperature=(scale, rope.n_ctx_orig, 0) if scale else None)


def baichuan(hparams):
    """Baichuan 7B is LLaMA; 13B, with its 40 layers, has ALiBi instead of RoPE."""
    hparams.ignore("rope.dimension_count", "rope.freq_base")
    large = hparams.n_layer == BAICHUAN_13B
    attention = Attention(**hparams.heads(), max_alibi_bias=8.0, out_bias=False) if large else \
        rotated(hparams, ROPE_NORMAL, out_bias=False)
    return described(hparams, attention, Dense(hparams.n_ff, bias=False), tied=False)


def minicpm(hparams):
    """LLaMA with the scales of the first MiniCPM, unless the file states others.

    Where it states none, logits are divided by n_embd / 256, as the model was trained; llama.cpp multiplies.
    """
    scale = hparams.scale
    return described(hparams, rotated(hparams, ROPE_NORMAL, LONG), dense_or_experts(hparams),
                      {"residual_scale": scale("residual_scale", 1.4 / math.sqrt(hparams.n_layer))},
                      embd_scale=scale("embedding_scale", 12.0),
                      logit_scale=1.0 / (scale("logit_scale", hparams.n_embd / 256.0) or 1.0))


def apertus(hparams):
    """xIELU with numbers of its own in every layer, norms of every head's query and key."""
    numbers = [hparams.floats_per_layer("xielu." + name) for name in ("alpha_n", "alpha_p", "beta", "eps")]
    attention = rotated(hparams, ROPE_NEOX, "rope_freqs.weight", qk_norm="rms", out_bias=None)
    blocks = [Block(attention, Dense(hparams.n_ff, "xielu", bias=False, shape=shape))
              for shape in zip(*numbers, strict=True)]
    return Description(blocks, hparams.eps())


def exaone4(hparams):
    """Norms after the blocks only, and of every head's query and key; with windows, full layers have no RoPE."""
    sizes = hparams.heads()
    rope, windows = hparams.rope(ROPE_NEOX, sizes["d_head"]), hparams.windows(4)
    blocks = [Block(Attention(**sizes, rope=rope if w or not any(windows) else None, window=w, qk_norm="rms",
                              out_bias=False), Dense(hparams.n_ff, bias=False), attn_norm="", ffn_norm="", **POSTS)
              for w in windows]
    return Description(blocks, hparams.eps())


def chatglm(hparams):
    """Fused matrices, half of a head rotated."""
    attention = rotated(hparams, ROPE_NORMAL, fused=hparams.has("blk.0.attn_qkv.weight"), out_bias=False)
    return described(hparams, attention, Dense(hparams.n_ff, fused=True, bias=False))


def qwen(hparams):
    """The first Qwen: one matrix with biases for queries, keys and values; half the stated feed-forward width."""
    attention = rotated(hparams, ROPE_NEOX, fused=True, bias=True, out_bias=False)
    return described(hparams, attention, Dense(hparams.n_ff // 2, bias=False), tied=False)


def qwen2vl(hparams):
    """Qwen 2; positions of a picture have a row and a column."""
    attention = rotated(hparams, ROPE_NEOX, out_bias=False)
    attention = dataclasses.replace(attention, rope=hparams.sectioned(attention.rope))
    return described(hparams, attention, Dense(hparams.n_ff, bias=False))


def paddleocr(hparams):
    """The text part of PaddleOCR: ERNIE 4.5 whose RoPE rotates other pairs of dimensions."""
    attention = rotated(hparams, ROPE_NEOX)
    n_non_rotary = hparams.n_non_rotary(attention.rope.n_dims)
    attention = dataclasses.replace(attention, rope=dataclasses.replace(attention.rope, n_non_rotary=n_non_rotary))
    return described(hparams, attention, Dense(hparams.n_ff, bias=False))


def plamo(hparams):
    """Parallel with one norm."""
    hparams.ignore("rope.dimension_count")
    return described(hparams, rotated(hparams, ROPE_NEOX, out_bias=False), Dense(hparams.n_ff, bias=False),
                      {"parallel": True, "ffn_norm": ""}, tied=False)


def refact(hparams):
    """ALiBi instead of RoPE."""
    attention = Attention(**hparams.heads(), max_alibi_bias=8.0, out_bias=False)
    return described(hparams, attention, Dense(hparams.n_ff, bias=False))


def xverse(hparams):
    return described(hparams, rotated(hparams, ROPE_NORMAL, out_bias=False), Dense(hparams.n_ff, bias=False),
                      tied=False)


def pangu(hparams):
    return described(hparams, rotated(hparams, ROPE_NEOX), Dense(hparams.n_ff, bias=False))


def maincoder(hparams):
    """Norms of heads after RoPE."""
    return described(hparams, rotated(hparams, ROPE_NORMAL, out_bias=False, qk_norm="rms", norm_after_rope=True),
                      Dense(hparams.n_ff, bias=False))


def openelm(hparams):
    """Heads and widths by layer; norms of every head's query and key."""
    blocks = []
    for sizes, n_ff in zip(hparams.heads_per_layer(), hparams.per_layer("feed_forward_length"), strict=True):
        attention = Attention(**sizes, rope=hparams.rope(ROPE_NEOX, sizes["d_head"], factors=""), fused=True,
                              bias=False, out_bias=False, qk_norm="rms")
        blocks.append(Block(attention, Dense(n_ff, bias=False)))
    return Description(blocks, hparams.eps(), tied=True)


def plamo3(hparams):
    """Norms before and after; layers with windows have a RoPE of their own."""
    blocks, windows = [], hparams.windows(8)
    layers = zip(windows, hparams.heads_per_layer(), hparams.per_layer("feed_forward_length"), strict=True)
    for w, sizes, n_ff in layers:
        rope = hparams.rope(ROPE_NEOX, sizes["d_head"], factors="")
        if w:
            rope = hparams.window_rope(rope, 10000.0, freq_scale=1.0, ext_factor=0.0)
        attention = Attention(**sizes, rope=rope, window=w, fused=True, bias=False, out_bias=False, qk_norm="rms")
        blocks.append(Block(attention, Dense(n_ff, fused=True, bias=False), **POSTS))
    return Description(blocks, hparams.eps())


def plm(hparams):
    """Latent attention with whole queries, squared ReLU."""
    n_head, d_key = hparams.positive("attention.head_count"), hparams.heads()["d_head"]
    hparams.same("attention.head_count_kv", n_head)
    rope = hparams.rope(ROPE_NORMAL, d_key, factors="")
    attention = Latent(n_head, d_key, hparams.heads()["d_head_v"], hparams.positive("attention.kv_lora_rank"), 0, rope,
                       1.0 / math.sqrt(d_key), absorbed=False)
    return described(hparams, attention, Dense(hparams.n_ff, "relu_sqr", bias=False), tied=True)


def talkie(hparams):
    """Norms without weights, but one for every head of queries; every layer adds the embeddings again."""
    attention = rotated(hparams, ROPE_NEOX, out_bias=False, qk_norm="rms", qk_norm_over="query", norm_after_rope=True)
    return described(hparams, attention, Dense(hparams.n_ff, bias=False),
                      {"norm": "rms bare", "output_transform": EmbeddingSkip()},
                      embd_norm="token_embd_norm", tied=False,
                      logit_scale=hparams.between("logit_scale", 1e-6, 1e6))


def muse_glimmer(hparams):
    """Norms before and after, gates behind attention, RoPE in layers with windows only."""
    sizes = hparams.heads()
    rope = hparams.rope(ROPE_NORMAL, sizes["d_head"], factors="")
    near = hparams.window_rope(rope, hparams.freq_base, freq_scale=1.0)
    blocks = [Block(Attention(**sizes, rope=near if w else None, window=w, qk_norm="rms", out_bias=False,
                              gate="sigmoid"), Dense(hparams.n_ff, bias=False), post_eps=1e-8, **POSTS)
              for w in hparams.windows(4, default=...)]
    return Description(blocks, hparams.eps(), frame=EmbeddingNorm(), tied=False,
                       logit_scale=hparams.between("logit_scale", 1e-6, 1e6),
                       softcap=hparams.scale("final_logit_softcapping"))


def cogvlm(hparams):
    """The text part of CogVLM: LLaMA with one matrix for queries, keys and values; pictures pass matrices of their
    own."""
    hparams.same("attention.head_count_kv", hparams.positive("attention.head_count"))
    attention = rotated(hparams, ROPE_NEOX, fused=True, bias=False, out_bias=False)
    return described(hparams, attention, Dense(hparams.n_ff, bias=False), for_pictures=tuple(
        f"vis_{name}" for name in ("attn_qkv", "attn_output", "gate", "up", "down")))


def chameleon(hparams):
    """Layer norms of every head's query and key; norms after the blocks in place of before them in the larger one.

    Tokens of pictures are never written."""
    if not math.isclose(hparams.eps(), CHAMELEON_EPS, rel_tol=1e-6):
        raise hparams.wrong("attention.layer_norm_rms_epsilon", hparams.eps(), f"{CHAMELEON_EPS}, as norms of heads")
    attention = rotated(hparams, ROPE_NORMAL, out_bias=False, qk_norm="layer", qk_norm_over="heads")
    after = {"attn_norm": "", "attn_post": "attn_norm", "ffn_norm": "", "ffn_post": "ffn_norm"}
    return described(hparams, attention, Dense(hparams.n_ff, bias=False),
                     after if hparams.get("swin_norm", False, bool) else {}, no_text=PICTURE_IDS)


DECODERS = {"phi3": phi3, "olmo2": olmo2, "glm4": glm4, "gpt-oss": gpt_oss, "olmoe": olmoe, "internlm2": internlm2,
            "exaone": exaone, "seed_oss": seed_oss, "ernie4_5": ernie4_5, "arcee": arcee,
            "hunyuan-dense": hunyuan_dense, "mistral3": mistral3, "baichuan": baichuan, "minicpm": minicpm,
            "apertus": apertus, "exaone4": exaone4, "chatglm": chatglm, "qwen": qwen, "qwen2vl": qwen2vl,
            "plamo": plamo, "refact": refact, "xverse": xverse, "pangu-embedded": pangu, "maincoder": maincoder,
            "hunyuan_vl": hunyuan_vl, "paddleocr": paddleocr, "openelm": openelm, "plamo3": plamo3, "plm": plm,
            "talkie": talkie, "muse-glimmer": muse_glimmer, "cogvlm": cogvlm, "chameleon": chameleon}
