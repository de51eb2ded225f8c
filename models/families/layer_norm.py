"""Decoders with layer norms: GPT-2, GPT-J, GPT-NeoX, StarCoder, Falcon, Phi 2, StableLM, Command R, BLOOM, OLMo,
Nemotron, MPT, Jais 1 and 2, CodeShell, Orion."""
import functools

from ggjit.models.blocks.attention import Attention
from ggjit.models.blocks.description import Block, Description
from ggjit.models.blocks.feed_forward import Dense
from ggjit.models.blocks.hparams import ROPE_NEOX, ROPE_NORMAL
from ggjit.models.families.common import described

_described = functools.partial(described, norm="layer")


def gpt2(hparams):
    """Learned positions, biases everywhere."""
    attention = Attention(**hparams.heads(), fused=True, bias=True, out_bias=True)
    return _described(hparams, attention, Dense(hparams.n_ff, "gelu", bias=True), positions=True)


def starcoder2(hparams):
    sizes = hparams.heads()
    attention = Attention(**sizes, rope=hparams.rope(ROPE_NEOX, sizes["d_head"], factors=""), out_bias=True)
    return _described(hparams, attention, Dense(hparams.n_ff, "gelu", bias=True))


def gptneox(hparams):
    """Attention and feed-forward in parallel, each with a norm of its own, where the file says so."""
    sizes, parallel = hparams.heads(), hparams.get("use_parallel_residual", True, bool)
    attention = Attention(**sizes, rope=hparams.rope(ROPE_NEOX, sizes["d_head"], factors=""), fused=True, bias=True,
                          out_bias=True)
    return _described(hparams, attention, Dense(hparams.n_ff, "gelu", bias=True), {"parallel": parallel}, tied=False)


def falcon(hparams):
    """Parallel; from 40B on attention has a norm of its own."""
    sizes = hparams.heads()
    attention = Attention(**sizes, rope=hparams.rope(ROPE_NEOX, sizes["d_head"], factors=""), fused=True, bias=False,
                          out_bias=False)
    norms = {"attn_norm": "attn_norm_2", "ffn_norm": "attn_norm"} if hparams.has("blk.0.attn_norm_2.weight") else \
        {"ffn_norm": ""}
    return _described(hparams, attention, Dense(hparams.n_ff, "gelu", bias=False), {"parallel": True, **norms})


def phi2(hparams):
    """Parallel with one norm; biases everywhere, of the logits too."""
    sizes = hparams.heads()
    attention = Attention(**sizes, rope=hparams.rope(ROPE_NEOX, sizes["d_head"], factors=""),
                          fused=hparams.has("blk.0.attn_qkv.weight"), bias=True, out_bias=True)
    return _described(hparams, attention, Dense(hparams.n_ff, "gelu", bias=True), {"parallel": True, "ffn_norm": ""},
                      tied=False, output_bias=True)


def stablelm(hparams):
    """Parallel with one norm, and norms of queries and keys by head, where the file has no ffn_norm (12B)."""
    sizes = hparams.heads()
    normed = hparams.has("blk.0.attn_q_norm.weight")
    attention = Attention(**sizes, rope=hparams.rope(ROPE_NEOX, sizes["d_head"], factors=""), out_bias=False,
                          qk_norm="centred" if normed else "", qk_norm_over="heads")
    parallel = not hparams.has("blk.0.ffn_norm.weight")
    return _described(hparams, attention, Dense(hparams.n_ff, bias=False),
                      {"parallel": parallel, "ffn_norm": "" if parallel else "ffn_norm"}, tied=False)


def command_r(hparams):
    """Parallel with one norm without bias; logits are scaled."""
    sizes = hparams.heads()
    normed = hparams.n_layer >= 64
    attention = Attention(**sizes, rope=hparams.rope(ROPE_NORMAL, sizes["d_head"], factors=""), bias=None,
                          out_bias=False, qk_norm="centred" if normed else "", qk_norm_over="heads")
    return _described(hparams, attention, Dense(hparams.n_ff, bias=False),
                      {"norm": "centred", "parallel": True, "ffn_norm": ""}, tied=True,
                      logit_scale=hparams.scale("logit_scale"))


def cohere2(hparams):
    """Command R with windows; full layers, every fourth, have no RoPE."""
    sizes = hparams.heads()
    rope = hparams.rope(ROPE_NORMAL, sizes["d_head"], factors="")
    blocks = [Block(Attention(**sizes, rope=rope if w else None, window=w, out_bias=False),
                    Dense(hparams.n_ff, bias=False), norm="centred", parallel=True, ffn_norm="")
              for w in hparams.windows(4, default=...)]
    return Description(blocks, hparams.eps("layer"), norm="centred", tied=True,
                       logit_scale=hparams.scale("logit_scale"))


def bloom(hparams):
    """ALiBi instead of positions, and a norm of the embeddings."""
    attention = Attention(**hparams.heads(), fused=True, bias=True, out_bias=True, max_alibi_bias=8.0)
    return _described(hparams, attention, Dense(hparams.n_ff, "gelu", bias=True), embd_norm="token_embd_norm")


def olmo(hparams):
    """Norms without parameters; queries, keys and values kept within limits."""
    sizes = hparams.heads()
    attention = Attention(**sizes, rope=hparams.rope(ROPE_NORMAL, sizes["d_head"], factors=""), bias=None,
                          out_bias=False, clamp=hparams.scale("attention.clamp_kqv"))
    return _described(hparams, attention, Dense(hparams.n_ff, bias=False), {"norm": "bare"})


def nemotron(hparams):
    """Squared ReLU."""
    sizes = hparams.heads()
    attention = Attention(**sizes, rope=hparams.rope(ROPE_NEOX, sizes["d_head"], factors=""))
    return _described(hparams, attention, Dense(hparams.n_ff, "relu_sqr"), tied=False)


def mpt(hparams):
    """ALiBi, or learned positions; queries, keys and values within limits; norms of queries and keys in some."""
    positions, normed = hparams.has("position_embd.weight"), hparams.has("blk.0.attn_q_norm.weight")
    attention = Attention(**hparams.heads(), fused=True, clamp=hparams.scale("attention.clamp_kqv"),
                          max_alibi_bias=hparams.scale("attention.max_alibi_bias"), qk_norm="layer" if normed else "",
                          qk_norm_over="all" if normed else "head")
    norm = "layer" if hparams.has("output_norm.bias") else "centred"
    return _described(hparams, attention, Dense(hparams.n_ff, "gelu"), {"norm": norm}, positions=positions)


def jais(hparams):
    """ALiBi, a SiLU gate and biases everywhere; scores over the size of a head, not its root."""
    sizes = hparams.heads()
    attention = Attention(**sizes, fused=True, bias=True, out_bias=True, scale=1.0 / sizes["d_head"],
                          max_alibi_bias=hparams.scale("attention.max_alibi_bias"))
    return _described(hparams, attention, Dense(hparams.n_ff, bias=True), tied=False)


def codeshell(hparams):
    """GPT-2 with RoPE and groups of heads."""
    sizes = hparams.heads()
    attention = Attention(**sizes, rope=hparams.rope(ROPE_NEOX, sizes["d_head"], factors=""), fused=True, bias=True,
                          out_bias=True)
    return _described(hparams, attention, Dense(hparams.n_ff, "gelu", bias=True))


def orion(hparams):
    """LLaMA with layer norms."""
    sizes = hparams.heads()
    attention = Attention(**sizes, rope=hparams.rope(ROPE_NEOX, sizes["d_head"], factors=""), out_bias=False)
    return _described(hparams, attention, Dense(hparams.n_ff, bias=False), tied=False)


def jais2(hparams):
    """Squared ReLU, biases everywhere, RoPE."""
    sizes = hparams.heads()
    attention = Attention(**sizes, rope=hparams.rope(ROPE_NEOX, sizes["d_head"], factors=""), bias=True, out_bias=True)
    return _described(hparams, attention, Dense(hparams.n_ff, "relu_sqr", bias=True))


def gptj(hparams):
    """Parallel with one norm; biases of the feed-forward and of the logits alone.

    llama.cpp names the architecture and its tensors, and computes none: transformers' GPT-J is the source.
    """
    sizes = hparams.heads()
    attention = Attention(**sizes, rope=hparams.rope(ROPE_NORMAL, sizes["d_head"], factors=""),
                          fused=hparams.has("blk.0.attn_qkv.weight"), bias=False, out_bias=False)
    return _described(hparams, attention, Dense(hparams.n_ff, "gelu", bias=True), {"parallel": True, "ffn_norm": ""},
                      tied=False, output_bias=True)


DECODERS = {"gpt2": gpt2, "starcoder2": starcoder2, "gptneox": gptneox, "falcon": falcon, "phi2": phi2,
            "stablelm": stablelm, "command-r": command_r, "cohere2": cohere2, "bloom": bloom, "olmo": olmo,
            "nemotron": nemotron, "starcoder": gpt2, "mpt": mpt,
            "jais": jais, "codeshell": codeshell, "orion": orion, "jais2": jais2, "gptj": gptj}
