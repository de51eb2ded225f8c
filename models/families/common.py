"""Code that families share: attention with the same RoPE in every head, and networks with the same block in every
layer."""
from ggjit.models.blocks.attention import Attention
from ggjit.models.blocks.description import Block, Description
from ggjit.models.blocks.hparams import LONG, ROPE_KINDS


def rotated(hparams, mode, factors="", **switches):
    """Attention whose heads all rotate alike.  factors: as HParams.rope takes them; switches: Attention's."""
    sizes = hparams.heads()
    kinds = ROPE_KINDS if factors == LONG else ROPE_KINDS[:-1]
    return Attention(**sizes, rope=hparams.rope(mode, sizes["d_head"], factors, kinds), **switches)


def described(hparams, attention, feed_forward, block=None, norm="rms", **switches):
    """The same block in every layer.  norm: kind of all norms; block: switches of Block; switches: Description's."""
    layer = Block(attention, feed_forward, **{"norm": norm, **(block or {})})
    return Description([layer] * hparams.n_layer, hparams.eps(norm), **{"norm": layer.norm, **switches})
