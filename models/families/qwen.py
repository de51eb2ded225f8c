"""Qwen 3, also VL, and the Qwens with experts."""
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


def qwen3vl(hparams):
    """Qwen 3 for text: the parts of a position are equal there, and no layer adds what an image gives it."""
    hparams.ignore("rope.dimension_sections", "n_deepstack_layers")
    return qwen3(hparams)


def qwen3vlmoe(hparams):
    hparams.ignore("rope.dimension_sections", "n_deepstack_layers")
    return qwen3moe(hparams)


DECODERS = {"qwen3": qwen3, "qwen3moe": qwen3moe, "qwen2moe": qwen2moe, "qwen3vl": qwen3vl,
            "qwen3vlmoe": qwen3vlmoe}
