"""Encoders: every token sees every other, or those near it.  NomicBERT, Jina BERT 2 and 3, ModernBERT, NeoBERT,
EuroBERT, EmbeddingGemma, LLaMA as an encoder, T5's encoder.

BERT itself is models/networks/bert.py.
"""
import dataclasses
import math

from ggjit.models.blocks.attention import Attention
from ggjit.models.blocks.description import Block, Description, PostNormBlock
from ggjit.models.blocks.facts import ROPE_BASES, ROPE_NEOX, ROPE_NORMAL
from ggjit.models.blocks.feed_forward import Dense
from ggjit.models.blocks.moe import mixture
from ggjit.models.families.gemma import encoder_blocks
from ggjit.models.families.llama import llama

MAX_BUCKETS = 255               # half of them are of single distances, which end before networks/encoder.py's FARTHEST


def _post_norm(facts, attention, *feed_forwards, **switches):
    """feed_forwards: of the layers, in turn."""
    blocks = [PostNormBlock(attention, feed_forwards[i % len(feed_forwards)], **switches)
              for i in range(facts.n_layer)]
    return Description(blocks, facts.eps("layer"), norm="layer", embd_norm="token_embd_norm", out_norm="",
                       token_types=True, tied=True)


def _rotated(facts, mode=ROPE_NEOX, **switches):
    sizes = facts.heads()
    return Attention(**sizes, rope=facts.rope(mode, sizes["d_head"], factors=""),
                     fused=facts.has("blk.0.attn_qkv.weight"), **switches)


def nomic_bert(facts):
    """BERT with RoPE and SwiGLU."""
    return _post_norm(facts, _rotated(facts), Dense(facts.n_ff, bias=False))


def nomic_bert_moe(facts):
    """BERT with RoPE; of every `moe_every_n_layers` the second has experts, without gates."""
    every, dense = facts.get("moe_every_n_layers", 0, int), Dense(facts.n_ff, "gelu")
    if every < 2:
        raise facts.wrong("moe_every_n_layers", every, "at least 2")
    experts = mixture(facts, facts.n_ff, act="gelu", normed=False)
    return _post_norm(facts, _rotated(facts), dense, experts, *[dense] * (every - 2))


def jina_bert_v3(facts):
    """BERT with RoPE."""
    return _post_norm(facts, _rotated(facts), Dense(facts.n_ff, "gelu"))


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


def neo_bert(facts):
    """RMS norms before the blocks; gate and up in one matrix."""
    block = Block(_rotated(facts, ROPE_NORMAL, bias=False, out_bias=False), Dense(facts.n_ff, fused=True, bias=False))
    return Description([block] * facts.n_layer, facts.eps(), out_norm="enc.output_norm", tied=True)


def eurobert(facts):
    """LLaMA that looks both ways."""
    block = Block(_rotated(facts, out_bias=False), Dense(facts.n_ff, bias=False))
    return Description([block] * facts.n_layer, facts.eps(), tied=True)


def gemma_embedding(facts):
    """Gemma 3 that looks both ways; two matrices may follow the mean of the tokens."""
    projections, d = [], facts.n_embd
    for name, inner in (("dense_2", "out"), ("dense_3", "in")):
        if facts.has(name + ".weight"):
            n = facts.positive(f"{name}_feat_{inner}")
            projections.append((name, d, n) if inner == "out" else (name, n, d))
        facts.same(f"{name}_feat_{'in' if inner == 'out' else 'out'}", d)
    return Description(encoder_blocks(facts), facts.eps(), embd_scale=math.sqrt(d), tied=True,
                       projections=tuple(projections))


def buckets(facts):
    """Of T5's relative positions."""
    n = facts.positive("attention.relative_buckets_count")
    if not 2 <= n <= MAX_BUCKETS:
        raise facts.wrong("attention.relative_buckets_count", n, f"2 to {MAX_BUCKETS}")
    return n


def t5encoder(facts):
    """Scores of relative positions instead of RoPE, unscaled; RMS norms; a GELU gate or, in the first T5, ReLU."""
    attention = Attention(**facts.heads(), scale=1.0, bias=False, out_bias=False, out="attn_o",
                          rel_buckets=buckets(facts))
    gated = facts.has("enc.blk.0.ffn_gate.weight")
    block = Block(attention, Dense(facts.n_ff, "geglu" if gated else "relu", bias=False))
    return Description([block] * facts.n_layer, facts.eps(), out_norm="enc.output_norm", prefix="enc.blk.", tied=True)


FAMILY = {"nomic-bert": nomic_bert, "jina-bert-v2": jina_bert_v2, "modern-bert": modern_bert, "t5encoder": t5encoder,
          "nomic-bert-moe": nomic_bert_moe, "jina-bert-v3": jina_bert_v3, "neo-bert": neo_bert, "eurobert": eurobert,
          "gemma-embedding": gemma_embedding, "llama-embed": llama}
