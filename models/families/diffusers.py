"""Models that write all tokens of an answer at once (models/text/diffusion.py): Dream, LLaDA, RND1.

Every token sees every other, and nothing is kept between steps.
"""
from ggjit.models.blocks.feed_forward import Dense
from ggjit.models.blocks.hparams import ROPE_NEOX, ROPE_NORMAL
from ggjit.models.blocks.moe import mixture
from ggjit.models.families.common import described, rotated


def dream(hparams):
    """Qwen 2 that looks both ways."""
    return described(hparams, rotated(hparams, ROPE_NEOX, out_bias=False), Dense(hparams.n_ff, bias=False))


def llada(hparams):
    """LLaMA that looks both ways."""
    return described(hparams, rotated(hparams, ROPE_NORMAL, out_bias=False), Dense(hparams.n_ff, bias=False))


def _of_experts(hparams, **switches):
    """Norms of every head's query and key; experts in every layer."""
    n_ff = hparams.get("expert_feed_forward_length", 0, int) or hparams.n_ff // hparams.positive("expert_used_count")
    hparams.ignore("feed_forward_length")
    return described(hparams, rotated(hparams, ROPE_NEOX, bias=False, out_bias=False, qk_norm="rms"),
                     mixture(hparams, n_ff, **switches))


def llada_moe(hparams):
    """The weights of experts are those that the softmax gives them."""
    return _of_experts(hparams, normed=False)


def rnd1(hparams):
    """Qwen 3 with experts that looks both ways."""
    return _of_experts(hparams)


DIFFUSERS = {"dream": dream, "llada": llada, "llada-moe": llada_moe, "rnd1": rnd1}
