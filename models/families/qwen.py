"""Qwen 3 and Qwen 3 VL, and the Qwen models with experts."""
import dataclasses

from ggjit.models.blocks.attention import Attention
from ggjit.models.blocks.description import Block, Description
from ggjit.models.blocks.feed_forward import Dense
from ggjit.models.blocks.hparams import ROPE_NEOX
from ggjit.models.blocks.moe import mixture


def qwen3(hparams, feed_forward=None):
    """LLaMA with a norm of every head's query and key."""
    sizes = hparams.heads()
    attention = Attention(**sizes, rope=hparams.rope(ROPE_NEOX, sizes["d_head"], factors=""), qk_norm="rms")
    return Description([Block(attention, feed_forward or Dense(hparams.n_ff, bias=False))] * hparams.n_layer,
                       hparams.eps())


def qwen3moe(hparams):
    hparams.ignore("feed_forward_length")
    return qwen3(hparams, mixture(hparams, hparams.positive("expert_feed_forward_length")))


def qwen2moe(hparams):
    """Experts with weights as the softmax gives them, and a shared one behind a gate."""
    hparams.ignore("feed_forward_length")
    sizes = hparams.heads()
    shared = Dense(hparams.positive("expert_shared_feed_forward_length"), suffix="_shexp", bias=False)
    feed_forward = mixture(hparams, hparams.positive("expert_feed_forward_length"), normed=False, shared=shared,
                           shared_gate=True)
    attention = Attention(**sizes, rope=hparams.rope(ROPE_NEOX, sizes["d_head"], factors=""))
    return Description([Block(attention, feed_forward)] * hparams.n_layer, hparams.eps(), tied=False)


def qwen3vl(hparams, text=qwen3):
    """Qwen 3, in whose first layers a picture's vectors are added; positions of a picture have a row and a column."""
    n_deep = hparams.get("n_deepstack_layers", 0, int)
    if not 0 <= n_deep < hparams.n_layer:
        raise hparams.wrong("n_deepstack_layers", n_deep, f"fewer than the {hparams.n_layer} layers")
    about = text(hparams)
    attention = about.blocks[0].mixer
    attention = dataclasses.replace(attention, rope=hparams.sectioned(attention.rope, interleaved=True))
    return dataclasses.replace(about, n_deep=n_deep, blocks=[dataclasses.replace(b, mixer=attention)
                                                             for b in about.blocks])


def qwen3vlmoe(hparams):
    return qwen3vl(hparams, qwen3moe)


DECODERS = {"qwen3": qwen3, "qwen3moe": qwen3moe, "qwen2moe": qwen2moe, "qwen3vl": qwen3vl,
            "qwen3vlmoe": qwen3vlmoe}
