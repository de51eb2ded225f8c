"""Gemma 1 to 4: embeddings times sqrt(n_embd), a GELU gate; from 2 on norms before and after, windows and soft caps.

From 3n on tokens have embeddings for every layer (blocks/gemma.py), and the last layers read keys of earlier ones.
"""
import dataclasses
import math

from ggjit.models.blocks.attention import Attention
from ggjit.models.blocks.description import Block, Description
from ggjit.models.blocks.facts import ROPE_BASES, ROPE_NEOX
from ggjit.models.blocks.feed_forward import Dense
from ggjit.models.blocks.gemma import DenseAndExperts, LayerEmbeddings, LayerInput, Streams, StreamsBlock
from ggjit.models.blocks.moe import mixture

# of Gemma 3n, where the file leaves them out
N_PER_LAYER, N_STREAMS, LOW_RANK, OWN_KEYS_OF_3N = 256, 4, 64, 20
SPARSITY_OF_3N = 1.6448533535003662     # standard deviations above the mean: 5 % of a normal distribution
NO_CUTOFF = -math.inf
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
    scale = _scale(facts, facts.heads(), n_layer_of_27b=62)
    return _described(facts, _five_near(facts, scale=scale), softcap=facts.scale("final_logit_softcapping"))


def encoder_blocks(facts):
    """Gemma 3's, of EmbeddingGemma."""
    return _five_near(facts, bias=None, out_bias=False)


def _five_near(facts, **switches):
    sizes = facts.heads()
    rope = facts.rope(ROPE_NEOX, sizes["d_head"], factors="")
    near = _near(facts, rope)
    return [Block(Attention(**sizes, window=w, rope=near if w else rope, qk_norm="rms", **switches), _geglu(facts),
                  **POSTS) for w in facts.windows(6)]


def gemma3n(facts):
    """Four streams, embeddings for every layer; in the first ten layers only the largest gates are not 0."""
    windows, n = facts.windows(5, default=...), facts.get("embedding_length_per_layer_input", N_PER_LAYER, int)
    facts.same("altup.num_inputs", N_STREAMS)
    facts.same("altup.active_idx", 0)
    sizes = facts.heads()
    sources = _sources(facts, windows, [sizes] * len(windows), max(facts.n_layer - OWN_KEYS_OF_3N, 0))
    rope = facts.rope(ROPE_NEOX, sizes["d_head"], factors="")
    near, n_ff = _near(facts, rope), facts.per_layer("feed_forward_length")
    sparse = [None if cutoff == NO_CUTOFF else cutoff for cutoff in facts.floats(
        "activation_sparsity_scale", [SPARSITY_OF_3N if i < 10 else NO_CUTOFF for i in range(facts.n_layer)])]
    blocks = [StreamsBlock(Attention(**sizes, rope=near if w else rope, window=w, scale=1.0, qk_norm="rms", v_norm=True,
                                     kv_of=source, bias=False, out_bias=False),
                           Dense(n_ff[i], "geglu", bias=False, cutoff=sparse[i]), LayerInput(n), N_STREAMS, LOW_RANK)
              for i, (w, source) in enumerate(zip(windows, sources, strict=True))]
    return _described(facts, blocks, softcap=facts.scale("final_logit_softcapping", 30.0),
                      frame=Streams(n, facts.n_layer, N_STREAMS))


def gemma4(facts):
    """Unscaled scores, values divided by their RMS; layers with windows have heads and a RoPE of their own.

    Full layers may take their keys for values.  Where the file has experts, they stand beside a dense network.
    """
    facts.require("rope_freqs.weight")
    windows, n = facts.windows(..., default=...), facts.get("embedding_length_per_layer_input", kind=int)
    sizes = facts.heads_per_layer(windows)
    sources = _sources(facts, windows, sizes)
    d_head, d_near = (facts.positive("attention.key_length" + suffix) for suffix in ("", "_swa"))
    rope = facts.rope(ROPE_NEOX, d_head)
    near = _near(facts, rope, n_dims=facts.rope_dims("rope.dimension_count_swa", rope.n_dims, d_near))
    blocks = []
    for i, (w, n_ff) in enumerate(zip(windows, facts.per_layer("feed_forward_length"), strict=True)):
        fused, own_v, routed, scaled = (facts.has(f"blk.{i}.{name}.weight") for name in (
            "attn_qkv", "attn_v", "ffn_gate_inp", "layer_output_scale"))
        dense = Dense(n_ff, "geglu", bias=False)
        attention = Attention(**sizes[i], rope=near if w else rope, window=w, scale=1.0, qk_norm="rms", v_norm=True,
                              fused=fused and sources[i] is None, kv_of=sources[i], bias=False, out_bias=False,
                              v_is_k=not (own_v or fused))
        experts = DenseAndExperts(dense, _experts(facts)) if routed else None
        blocks.append(Block(attention, experts or dense, ffn_norm="" if experts else "ffn_norm", **POSTS,
                            finish=LayerInput(n, scaled)))
    return _described(facts, blocks, softcap=facts.scale("final_logit_softcapping"),
                      frame=LayerEmbeddings(n, facts.n_layer) if n else None)


def _sources(facts, windows, sizes, default=0):
    """[the layer whose keys and values each reads; None: its own]: of its kind the last that has some."""
    shared = facts.get("attention.shared_kv_layers", default, int)
    n = facts.n_layer - shared
    if shared and not 2 <= n < facts.n_layer:
        raise facts.wrong("attention.shared_kv_layers", shared, f"0 to {facts.n_layer - 2}")
    sources = [None if i < n else n - (2 if w else 1) for i, w in enumerate(windows)]
    for i, s in enumerate(sources):
        if s is not None and windows[s] != windows[i]:
            raise facts.wrong("attention.sliding_window_pattern", windows, f"a window at layer {n - 2}, not at {n - 1}")
        if s is not None and sizes[s]["n_head_kv"] != sizes[i]["n_head_kv"]:
            raise facts.wrong("attention.head_count_kv", sizes[i]["n_head_kv"], f"at layer {i} that of layer {s}")
    return sources


def _experts(facts):
    return mixture(facts, facts.positive("expert_feed_forward_length"), act="geglu")


def _near(facts, rope, **changes):
    """RoPE of layers with windows: with a base of their own, and without scaling."""
    return dataclasses.replace(rope, freq_base=facts.between("rope.freq_base_swa", *ROPE_BASES, 10000.0),
                               freq_scale=1.0, factors="", **changes)


def _geglu(facts):
    return Dense(facts.n_ff, "geglu", bias=False)


def _scale(facts, sizes, n_layer_of_27b):
    """The largest models scale scores by the width of a layer over its heads, not by the size of a head."""
    d = facts.n_embd // sizes["n_head"] if facts.n_layer == n_layer_of_27b else sizes["d_head"]
    return 1.0 / math.sqrt(d)


def _described(facts, blocks, **switches):
    return Description(blocks, facts.eps(), embd_scale=math.sqrt(facts.n_embd), **switches)


FAMILY = {"gemma": gemma, "gemma2": gemma2, "gemma3": gemma3, "gemma3n": gemma3n,
          "gemma4": gemma4}
