"""Gemma 1 to 4: embeddings are multiplied by sqrt(n_embd), and the gate is GELU.  From Gemma 2 on, layers have norms
before and after each block, sliding windows and soft caps.

From Gemma 3n on, each token has an embedding for every layer (blocks/gemma.py), and the last layers read the keys of
earlier layers.
"""
import math

from ggjit.models.blocks.attention import Attention
from ggjit.models.blocks.description import Block, Description
from ggjit.models.blocks.feed_forward import Dense
from ggjit.models.blocks.gemma import DenseAndExperts, LayerEmbeddings, LayerInput, Streams, StreamsBlock
from ggjit.models.blocks.hparams import ROPE_NEOX
from ggjit.models.blocks.moe import mixture

# of Gemma 3n, where the file leaves them out
N_PER_LAYER, N_STREAMS, LOW_RANK, OWN_KEYS_OF_3N = 256, 4, 64, 20
SPARSITY_OF_3N = 1.6448533535003662     # standard deviations above the mean: 5 % of a normal distribution
NO_CUTOFF = -math.inf
POSTS = {"attn_post": "post_attention_norm", "ffn_post": "post_ffw_norm"}


def gemma(hparams):
    sizes = hparams.heads()
    attention = Attention(**sizes, rope=hparams.rope(ROPE_NEOX, sizes["d_head"], factors=""))
    return _of_blocks(hparams, [Block(attention, _geglu(hparams))] * hparams.n_layer)


def gemma2(hparams):
    """Windows on every other layer, soft caps of scores and logits."""
    sizes = hparams.heads()
    rope = hparams.rope(ROPE_NEOX, sizes["d_head"], factors="")
    attention = dict(sizes, rope=rope, softcap=hparams.scale("attn_logit_softcapping", 50.0),
                     scale=_scale(hparams, sizes, n_layer_of_27b=46))
    blocks = [Block(Attention(**attention, window=w), _geglu(hparams), **POSTS)
              for w in hparams.windows(2, default=4096)]
    return _of_blocks(hparams, blocks, softcap=hparams.scale("final_logit_softcapping", 30.0))


def gemma3(hparams):
    """Five layers with windows and a RoPE of their own to one without; norms of queries and keys."""
    scale = _scale(hparams, hparams.heads(), n_layer_of_27b=62)
    return _of_blocks(hparams, _five_near(hparams, scale=scale), softcap=hparams.scale("final_logit_softcapping"))


def encoder_blocks(hparams):
    """Gemma 3's, of EmbeddingGemma."""
    return _five_near(hparams, bias=None, out_bias=False)


def _five_near(hparams, **switches):
    sizes = hparams.heads()
    rope = hparams.rope(ROPE_NEOX, sizes["d_head"], factors="")
    near = _near(hparams, rope)
    return [Block(Attention(**sizes, window=w, rope=near if w else rope, qk_norm="rms", **switches), _geglu(hparams),
                  **POSTS) for w in hparams.windows(6)]


def gemma3n(hparams):
    """Four streams, embeddings for every layer; in the first ten layers only the largest gates are not 0."""
    windows, n = hparams.windows(5, default=...), hparams.get("embedding_length_per_layer_input", N_PER_LAYER, int)
    hparams.same("altup.num_inputs", N_STREAMS)
    hparams.same("altup.active_idx", 0)
    sizes = hparams.heads()
    sources = _sources(hparams, windows, [sizes] * len(windows), max(hparams.n_layer - OWN_KEYS_OF_3N, 0))
    rope = hparams.rope(ROPE_NEOX, sizes["d_head"], factors="")
    near, n_ff = _near(hparams, rope), hparams.per_layer("feed_forward_length")
    sparse = [None if cutoff == NO_CUTOFF else cutoff for cutoff in hparams.floats(
        "activation_sparsity_scale", [SPARSITY_OF_3N if i < 10 else NO_CUTOFF for i in range(hparams.n_layer)])]
    blocks = [StreamsBlock(Attention(**sizes, rope=near if w else rope, window=w, scale=1.0, qk_norm="rms", v_norm=True,
                                     kv_of=source, bias=False, out_bias=False),
                           Dense(n_ff[i], "geglu", bias=False, cutoff=sparse[i]), LayerInput(n), N_STREAMS, LOW_RANK)
              for i, (w, source) in enumerate(zip(windows, sources, strict=True))]
    return _of_blocks(hparams, blocks, softcap=hparams.scale("final_logit_softcapping", 30.0),
                      frame=Streams(n, hparams.n_layer, N_STREAMS))


def gemma4(hparams):
    """Unscaled scores, values divided by their RMS; layers with windows have heads and a RoPE of their own.

    Full layers may take their keys for values.  Where the file has experts, they stand beside a dense network.
    """
    windows, n = hparams.windows(..., default=...), hparams.get("embedding_length_per_layer_input", kind=int)
    sizes = hparams.heads_per_layer(windows)
    sources = _sources(hparams, windows, sizes)
    rope, near = gemma4_ropes(hparams)
    blocks = []
    for i, (w, n_ff) in enumerate(zip(windows, hparams.per_layer("feed_forward_length"), strict=True)):
        fused, own_v, routed, scaled = (hparams.has(f"blk.{i}.{name}.weight") for name in (
            "attn_qkv", "attn_v", "ffn_gate_inp", "layer_output_scale"))
        dense = Dense(n_ff, "geglu", bias=False)
        attention = Attention(**sizes[i], rope=near if w else rope, window=w, scale=1.0, qk_norm="rms", v_norm=True,
                              fused=fused and sources[i] is None, kv_of=sources[i], bias=False, out_bias=False,
                              v_is_k=not (own_v or fused))
        experts = DenseAndExperts(dense, _experts(hparams)) if routed else None
        blocks.append(Block(attention, experts or dense, ffn_norm="" if experts else "ffn_norm", **POSTS,
                            output_transform=LayerInput(n, scaled)))
    return _of_blocks(hparams, blocks, softcap=hparams.scale("final_logit_softcapping"),
                      frame=LayerEmbeddings(n, hparams.n_layer) if n else None)


def gemma4_ropes(hparams):
    """RoPE of full layers, and of those with windows."""
    hparams.require("rope_freqs.weight")
    d_head, d_near = (hparams.positive("attention.key_length" + suffix) for suffix in ("", "_swa"))
    rope = hparams.rope(ROPE_NEOX, d_head)
    return rope, _near(hparams, rope, n_dims=hparams.rope_dims("rope.dimension_count_swa", rope.n_dims, d_near))


def _sources(hparams, windows, sizes, default=0):
    """[the layer whose keys and values each reads; None: its own]: of its kind the last that has some."""
    shared = hparams.get("attention.shared_kv_layers", default, int)
    n = hparams.n_layer - shared
    if shared and not 2 <= n < hparams.n_layer:
        raise hparams.wrong("attention.shared_kv_layers", shared, f"0 to {hparams.n_layer - 2}")
    sources = [None if i < n else n - (2 if w else 1) for i, w in enumerate(windows)]
    for i, s in enumerate(sources):
        if s is not None and windows[s] != windows[i]:
            raise hparams.wrong("attention.sliding_window_pattern", windows,
                                f"a window at layer {n - 2}, not at {n - 1}")
        if s is not None and sizes[s]["n_head_kv"] != sizes[i]["n_head_kv"]:
            raise hparams.wrong("attention.head_count_kv", sizes[i]["n_head_kv"], f"at layer {i} that of layer {s}")
    return sources


def _experts(hparams):
    return mixture(hparams, hparams.positive("expert_feed_forward_length"), act="geglu")


def _near(hparams, rope, **changes):
    """RoPE of layers with windows: with a base of their own, and without scaling."""
    return hparams.window_rope(rope, 10000.0, freq_scale=1.0, factors="", **changes)


def _geglu(hparams):
    return Dense(hparams.n_ff, "geglu", bias=False)


def _scale(hparams, sizes, n_layer_of_27b):
    """The largest models scale scores by the width of a layer over its heads, not by the size of a head."""
    d = hparams.n_embd // sizes["n_head"] if hparams.n_layer == n_layer_of_27b else sizes["d_head"]
    return 1.0 / math.sqrt(d)


def _of_blocks(hparams, blocks, **switches):
    return Description(blocks, hparams.eps(), embd_scale=math.sqrt(hparams.n_embd), **switches)


DECODERS = {"gemma": gemma, "gemma2": gemma2, "gemma3": gemma3, "gemma3n": gemma3n,
            "gemma4": gemma4}
