"""Encoders: every token attends to all tokens, or to those near it.  BERT (also MiniLM), NomicBERT, Jina BERT 2 and 3,
ModernBERT, NeoBERT, EuroBERT, EmbeddingGemma, LLaMA as an encoder, T5's encoder."""
import math

from ggjit.models.blocks.attention import Attention
from ggjit.models.blocks.description import Block, Description, PostNormBlock
from ggjit.models.blocks.feed_forward import Dense
from ggjit.models.blocks.hparams import ROPE_NEOX, ROPE_NORMAL
from ggjit.models.blocks.moe import mixture
from ggjit.models.families.common import rotated
from ggjit.models.families.gemma import encoder_blocks
from ggjit.models.families.llama import llama
from ggjit.ops.core.errors import ModelError

MAX_BUCKETS = 255               # half of them are of single distances, below FARTHEST of networks/texts/encoder.py


def _post_norm(hparams, attention, *feed_forwards, positions=False, **switches):
    """feed_forwards: of the layers, in turn.  positions: as Description's; switches: of PostNormBlock."""
    blocks = [PostNormBlock(attention, feed_forwards[i % len(feed_forwards)], **switches)
              for i in range(hparams.n_layer)]
    return Description(blocks, hparams.eps("layer"), norm="layer", embd_norm="token_embd_norm", out_norm="",
                       token_types=True, positions=positions, tied=True)


def _rotated(hparams, mode=ROPE_NEOX, **switches):
    return rotated(hparams, mode, fused=hparams.has("blk.0.attn_qkv.weight"), **switches)


def bert(hparams):
    """BERT itself: learned positions, biases everywhere.

    GELU is the exact form (erf), as the model was trained; llama.cpp reads the tanh form from a float16 table.
    """
    n_head, d = hparams.positive("attention.head_count"), hparams.n_embd
    if d % n_head:
        raise ModelError(f"{hparams.file.path}: {n_head} heads do not divide embedding_length {d}")
    hparams.same("attention.head_count_kv", n_head)
    for key in ("attention.key_length", "attention.value_length"):
        hparams.same(key, d // n_head)
    hparams.require("token_types.weight")
    return _post_norm(hparams, Attention(**hparams.heads(), bias=True, out_bias=True),
                      Dense(hparams.n_ff, "gelu_erf", bias=True), positions=True)


def nomic_bert(hparams):
    """BERT with RoPE and SwiGLU."""
    return _post_norm(hparams, _rotated(hparams), Dense(hparams.n_ff, bias=False))


def nomic_bert_moe(hparams):
    """BERT with RoPE; of every `moe_every_n_layers` the second has experts, without gates."""
    every, dense = hparams.get("moe_every_n_layers", 0, int), Dense(hparams.n_ff, "gelu")
    if every < 2:
        raise hparams.wrong("moe_every_n_layers", every, "at least 2")
    experts = mixture(hparams, hparams.n_ff, act="gelu", normed=False)
    return _post_norm(hparams, _rotated(hparams), dense, experts, *[dense] * (every - 2))


def jina_bert_v3(hparams):
    """BERT with RoPE."""
    return _post_norm(hparams, _rotated(hparams), Dense(hparams.n_ff, "gelu"))


def jina_bert_v2(hparams):
    """BERT with ALiBi and a GELU gate; for code also norms of queries and keys, and a second attention norm."""
    normed, twice = hparams.has("blk.0.attn_q_norm.weight"), hparams.has("blk.0.attn_norm_2.weight")
    bias = hparams.get("attention.max_alibi_bias", 8.0, float)
    attention = Attention(**hparams.heads(), bias=True, out_bias=True, qk_norm="layer" if normed else "",
                          qk_norm_over="all", max_alibi_bias=bias)
    up, gated = hparams.file.tensors.get("blk.0.ffn_up.weight"), hparams.has("blk.0.ffn_gate.weight")
    fused = not gated and up is not None and up.ne[-1] == 2 * hparams.n_ff
    feed_forward = Dense(hparams.n_ff, "geglu" if gated or fused else "gelu", fused=fused, out_bias=True)
    return _post_norm(hparams, attention, feed_forward, double_residual=twice)


def modern_bert(hparams):
    """Norms before the blocks, but none before the first; two layers of three look at a window, with their own RoPE."""
    sizes = hparams.heads()
    rope = hparams.rope(ROPE_NEOX, sizes["d_head"], factors="")
    near = hparams.window_rope(rope)
    act = {"gelu": "geglu_erf", "silu": "swiglu"}[hparams.one_of("hidden_activation", ("gelu", "silu"), "gelu")]
    blocks = [Block(Attention(**sizes, fused=True, bias=False, out_bias=False, window=w, rope=near if w else rope),
                    Dense(hparams.n_ff, act, fused=True, bias=False), norm="centred",
                    attn_norm="attn_norm" if i else "")
              for i, w in enumerate(hparams.windows(3, dense_first=True))]
    return Description(blocks, hparams.eps("layer"), norm="centred", embd_norm="token_embd_norm", tied=True)


def neo_bert(hparams):
    """RMS norms before the blocks; gate and up in one matrix."""
    block = Block(_rotated(hparams, ROPE_NORMAL, bias=False, out_bias=False),
                  Dense(hparams.n_ff, fused=True, bias=False))
    return Description([block] * hparams.n_layer, hparams.eps(), out_norm="enc.output_norm", tied=True)


def eurobert(hparams):
    """LLaMA that looks both ways."""
    block = Block(_rotated(hparams, out_bias=False), Dense(hparams.n_ff, bias=False))
    return Description([block] * hparams.n_layer, hparams.eps(), tied=True)


def gemma_embedding(hparams):
    """Gemma 3 that looks both ways; two matrices may follow the mean of the tokens."""
    projections, d = [], hparams.n_embd
    for name, inner in (("dense_2", "out"), ("dense_3", "in")):
        if hparams.has(name + ".weight"):
            n = hparams.positive(f"{name}_feat_{inner}")
            projections.append((name, d, n) if inner == "out" else (name, n, d))
        hparams.same(f"{name}_feat_{'in' if inner == 'out' else 'out'}", d)
    return Description(encoder_blocks(hparams), hparams.eps(), embd_scale=math.sqrt(d), tied=True,
                       projections=tuple(projections))


def buckets(hparams):
    """The buckets of T5's relative positions."""
    n = hparams.positive("attention.relative_buckets_count")
    if not 2 <= n <= MAX_BUCKETS:
        raise hparams.wrong("attention.relative_buckets_count", n, f"2 to {MAX_BUCKETS}")
    return n


def t5encoder(hparams):
    """Scores of relative positions instead of RoPE, unscaled; RMS norms; a GELU gate or, in the first T5, ReLU."""
    attention = Attention(**hparams.heads(), scale=1.0, bias=False, out_bias=False, out="attn_o",
                          rel_buckets=buckets(hparams))
    gated = hparams.has("enc.blk.0.ffn_gate.weight")
    block = Block(attention, Dense(hparams.n_ff, "geglu" if gated else "relu", bias=False))
    return Description([block] * hparams.n_layer, hparams.eps(), out_norm="enc.output_norm", prefix="enc.blk.",
                       tied=True)


ENCODERS = {"bert": bert,
            "nomic-bert": nomic_bert, "jina-bert-v2": jina_bert_v2, "modern-bert": modern_bert, "t5encoder": t5encoder,
            "nomic-bert-moe": nomic_bert_moe, "jina-bert-v3": jina_bert_v3, "neo-bert": neo_bert, "eurobert": eurobert,
            "gemma-embedding": gemma_embedding, "llama-embed": llama}
