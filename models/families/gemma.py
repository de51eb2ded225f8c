"""Gemma 1 to 3: embeddings times sqrt(n_embd), a GELU gate; from 2 on norms before and after, windows and soft caps."""
import dataclasses
import math

from ggjit.models.blocks.attention import Attention
from ggjit.models.blocks.description import Block, Description
from ggjit.models.blocks.facts import ROPE_BASES, ROPE_NEOX
from ggjit.models.blocks.feed_forward import Dense

POSTS = {"attn_post": "post_attention_norm", "ffn_post": "post_ffw_norm"}


def gemma(facts):
    sizes = facts.heads()
    attention = Attention(**sizes, rope=facts.rope(ROPE_NEOX, sizes["d_head"], factors=""))
    return _described(facts, [Block(attention, _geglu(facts))] * facts.n_layer)


def gemma2(facts):
    """Windows on every other layer, soft caps of scores and logits."""
    sizes = facts.heads()
    rope = facts.rope(ROPE_NEOX, sizes["d_head"], factors="")
    attention = dict(sizes, rope=rope, softcap=facts.scale("attn_logit_softcapping", 50.0),
                     scale=_scale(facts, sizes, n_layer_of_27b=46))
    blocks = [Block(Attention(**attention, window=w), _geglu(facts), **POSTS)
              for w in facts.windows(2, default=4096)]
    return _described(facts, blocks, softcap=facts.scale("final_logit_softcapping", 30.0))


def gemma3(facts):
    """Five layers with windows and a RoPE of their own to one without; norms of queries and keys."""
    sizes = facts.heads()
    rope = facts.rope(ROPE_NEOX, sizes["d_head"], factors="")
    near = dataclasses.replace(rope, freq_base=facts.between("rope.freq_base_swa", *ROPE_BASES, 10000.0),
                               freq_scale=1.0)
    attention = dict(sizes, qk_norm="rms", scale=_scale(facts, sizes, n_layer_of_27b=62))
    blocks = [Block(Attention(**attention, window=w, rope=near if w else rope), _geglu(facts), **POSTS)
              for w in facts.windows(6)]
    return _described(facts, blocks, softcap=facts.scale("final_logit_softcapping"))


def _geglu(facts):
    return Dense(facts.n_ff, "geglu", bias=False)


def _scale(facts, sizes, n_layer_of_27b):
    """The largest models scale scores by the width of a layer over its heads, not by the size of a head."""
    d = facts.n_embd // sizes["n_head"] if facts.n_layer == n_layer_of_27b else sizes["d_head"]
    return 1.0 / math.sqrt(d)


def _described(facts, blocks, **switches):
    return Description(blocks, facts.eps(), embd_scale=math.sqrt(facts.n_embd), **switches)


FAMILY = {"gemma": gemma, "gemma2": gemma2, "gemma3": gemma3}
