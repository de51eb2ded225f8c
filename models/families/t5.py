"""T5, an encoder with a decoder (models/networks/texts/t5.py): biases by relative position, no RoPE, unscaled
attention."""
from ggjit.models.blocks.attention import Attention
from ggjit.models.blocks.cross import CrossAttention, CrossBlock
from ggjit.models.blocks.description import Description
from ggjit.models.blocks.feed_forward import Dense
from ggjit.models.blocks.hparams import MAX_LAYERS
from ggjit.models.families.encoders import buckets, t5encoder


def encoder(hparams):
    """The encoder's blocks, under "enc.blk."."""
    return t5encoder(hparams)


def t5(hparams):
    """The decoder's blocks.  Where the file has no output matrix, logits are divided by the root of n_embd, as the
    model was trained; llama.cpp leaves that out."""
    sizes = hparams.heads()
    if sizes["n_head"] != sizes["n_head_kv"] or sizes["d_head"] != sizes["d_head_v"]:
        raise hparams.wrong("attention.head_count_kv", sizes["n_head_kv"], f"{sizes['n_head']} heads of one size")
    attention = Attention(**sizes, scale=1.0, bias=False, out_bias=False, out="attn_o",
                          rel_buckets=buckets(hparams))
    gated = hparams.has("dec.blk.0.ffn_gate.weight")
    block = CrossBlock(attention, CrossAttention(sizes["n_head"], sizes["d_head"]),
                       Dense(hparams.n_ff, "geglu" if gated else "relu", bias=False))
    n_layer = hparams.positive("decoder_block_count", hparams.n_layer)
    if n_layer > MAX_LAYERS:
        raise hparams.wrong("decoder_block_count", n_layer, f"at most {MAX_LAYERS}")
    return Description([block] * n_layer, hparams.eps(), out_norm="dec.output_norm", prefix="dec.blk.",
                       logit_scale=0.0 if hparams.has("output.weight") else hparams.n_embd ** -0.5)


DECODERS = {"t5": t5}
