"""Qwen 3, also VL, and the Qwens with experts."""
from ggjit.models.blocks.attention import Attention
from ggjit.models.blocks.description import Block, Description
from ggjit.models.blocks.facts import ROPE_NEOX
from ggjit.models.blocks.feed_forward import Dense
from ggjit.models.blocks.moe import mixture


def qwen3(facts, feed_forward=None):
    """LLaMA with a norm of every head's query and key."""
    sizes = facts.heads()
    attention = Attention(**sizes, rope=facts.rope(ROPE_NEOX, sizes["d_head"], factors=""), qk_norm="rms")
    return Description([Block(attention, feed_forward or Dense(facts.n_ff, bias=False))] * facts.n_layer, facts.eps())


def qwen3moe(facts):
    facts.ignore("feed_forward_length")
    return qwen3(facts, mixture(facts, facts.positive("expert_feed_forward_length")))


def qwen2moe(facts):
    """Experts with weights as the softmax gives them, and a shared one behind a gate."""
    facts.ignore("feed_forward_length")
    sizes = facts.heads()
    shared = Dense(facts.positive("expert_shared_feed_forward_length"), suffix="_shexp", bias=False)
    feed_forward = mixture(facts, facts.positive("expert_feed_forward_length"), normed=False, shared=shared,
                           shared_gate=True)
    attention = Attention(**sizes, rope=facts.rope(ROPE_NEOX, sizes["d_head"], factors=""))
    return Description([Block(attention, feed_forward)] * facts.n_layer, facts.eps(), tied=False)


def qwen3vl(facts):
    """Qwen 3 for text: the parts of a position are equal there, and no layer adds what an image gives it."""
    facts.ignore("rope.dimension_sections", "n_deepstack_layers")
    return qwen3(facts)


def qwen3vlmoe(facts):
    facts.ignore("rope.dimension_sections", "n_deepstack_layers")
    return qwen3moe(facts)


FAMILY = {"qwen3": qwen3, "qwen3moe": qwen3moe, "qwen2moe": qwen2moe, "qwen3vl": qwen3vl,
          "qwen3vlmoe": qwen3vlmoe}
