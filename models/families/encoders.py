"""Encoders: every token sees every other, or those near it.  NomicBERT, Jina BERT 2, ModernBERT, T5's encoder.

BERT itself is models/networks/bert.py.
"""
import dataclasses

from ggjit.models.blocks.attention import Attention
from ggjit.models.blocks.description import Block, Description, PostNormBlock
from ggjit.models.blocks.facts import ROPE_BASES, ROPE_NEOX
from ggjit.models.blocks.feed_forward import Dense


def _post_norm(facts, attention, feed_forward, **switches):
    block = PostNormBlock(attention, feed_forward, **switches)
    return Description([block] * facts.n_layer, facts.eps("layer"), norm="layer", embd_norm="token_embd_norm",
                       out_norm="", token_types=True, tied=True)


def nomic_bert(facts):
    """BERT with RoPE and SwiGLU."""
    sizes = facts.heads()
    attention = Attention(**sizes, rope=facts.rope(ROPE_NEOX, sizes["d_head"], factors=""),
                          fused=facts.has("blk.0.attn_qkv.weight"))
    return _post_norm(facts, attention, Dense(facts.n_ff, bias=False))


def jina_bert_v2(facts):
    """BERT with ALiBi and a GELU gate; for code also norms of queries and keys, and a second attention norm."""
    normed, again = facts.has("blk.0.attn_q_norm.weight"), facts.has("blk.0.attn_norm_2.weight")
    bias = facts.get("attention.max_alibi_bias", 8.0, float)
    attention = Attention(**facts.heads(), bias=True, out_bias=True, qk_norm="layer" if normed else "",
                          qk_norm_over="all", max_alibi_bias=bias)
    up, gated = facts.file.tensors.get("blk.0.ffn_up.weight"), facts.has("blk.0.ffn_gate.weight")
    fused = not gated and up is not None and up.ne[-1] == 2 * facts.n_ff
    feed_forward = Dense(facts.n_ff, "geglu" if gated or fused else "gelu", fused=fused, out_bias=True)
    return _post_norm(facts, attention, feed_forward, again=again)


def modern_bert(facts):
    """Norms before the blocks, but none before the first; two layers of three look at a window, with their own RoPE."""
    sizes = facts.heads()
    rope = facts.rope(ROPE_NEOX, sizes["d_head"], factors="")
    near = dataclasses.replace(rope, freq_base=facts.between("rope.freq_base_swa", *ROPE_BASES, rope.freq_base))
    act = {"gelu": "geglu_erf", "silu": "swiglu"}[facts.one_of("hidden_activation", ("gelu", "silu"), "gelu")]
    blocks = [Block(Attention(**sizes, fused=True, bias=False, out_bias=False, window=w, rope=near if w else rope),
                    Dense(facts.n_ff, act, fused=True, bias=False), norm="centred",
                    attn_norm="attn_norm" if i else "")
              for i, w in enumerate(facts.windows(3, dense_first=True))]
    return Description(blocks, facts.eps("layer"), norm="centred", embd_norm="token_embd_norm", tied=True)


def t5encoder(facts):
    """Scores of relative positions instead of RoPE, unscaled; RMS norms; a GELU gate or, in the first T5, ReLU."""
    attention = Attention(**facts.heads(), scale=1.0, bias=False, out_bias=False, out="attn_o",
                          rel_buckets=facts.positive("attention.relative_buckets_count"))
    gated = facts.has("enc.blk.0.ffn_gate.weight")
    block = Block(attention, Dense(facts.n_ff, "geglu" if gated else "relu", bias=False))
    return Description([block] * facts.n_layer, facts.eps(), out_norm="enc.output_norm", prefix="enc.blk.", tied=True)


FAMILY = {"nomic-bert": nomic_bert, "jina-bert-v2": jina_bert_v2, "modern-bert": modern_bert, "t5encoder": t5encoder}
