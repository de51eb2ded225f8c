"""Decoders with sliding windows in some layers, most of them with experts: Mellum 2, SmallThinker, MiMo 2, Step 3.5,
Laguna, Granite, Maple, Spark 2.5."""
import dataclasses

from ggjit.models.blocks.attention import Attention
from ggjit.models.blocks.description import Block, Description
from ggjit.models.blocks.feed_forward import Dense
from ggjit.models.blocks.hparams import ROPE_KINDS, ROPE_NEOX, ROPE_NORMAL
from ggjit.models.blocks.moe import SIGMOID, RoutedByInput, gating, groups, mixture
from ggjit.models.families.llama import dense_or_experts

SMALLTHINKER_WINDOW = 4096


UNSCALED = {"freq_scale": 1.0, "ext_factor": 0.0}       # RoPE of layers with windows


def mellum(hparams):
    """Qwen 3's experts; layers with windows have RoPE without scaling.

    Where a file states a base for these, it is taken; llama.cpp takes that of the others.
    """
    hparams.ignore("feed_forward_length")
    sizes = hparams.heads()
    rope = hparams.rope(ROPE_NEOX, sizes["d_head"], factors="")
    near = hparams.window_rope(rope, **UNSCALED, attn_factor=1.0)
    feed_forward = mixture(hparams, hparams.positive("expert_feed_forward_length"))
    blocks = [Block(Attention(**sizes, rope=near if w else rope, window=w, qk_norm="rms"), feed_forward)
              for w in hparams.windows(4)]
    return Description(blocks, hparams.eps(), tied=False)


def smallthinker(hparams):
    """The router reads what the layer began with; with windows, full layers, the first of four, have no RoPE."""
    hparams.ignore("feed_forward_length")
    sizes, windows = hparams.heads(), hparams.windows(4, dense_first=True)
    if set(windows) - {0, SMALLTHINKER_WINDOW}:
        raise hparams.wrong("attention.sliding_window", max(windows), f"{SMALLTHINKER_WINDOW}, or 0 for none")
    rope = hparams.rope(ROPE_NEOX, sizes["d_head"], factors="")
    near = hparams.window_rope(rope, hparams.freq_base, freq_scale=hparams.freq_scale)
    feed_forward = RoutedByInput(mixture(hparams, hparams.positive("expert_feed_forward_length"), act="reglu",
                                         gating=gating(hparams, 0), **groups(hparams)))
    rotates = [not any(windows) or hparams.n_layer == 4 or i % 4 for i in range(hparams.n_layer)]
    blocks = [Block(Attention(**sizes, rope=(near if w else rope) if rotated else None, window=w), feed_forward)
              for w, rotated in zip(windows, rotates, strict=True)]
    return Description(blocks, hparams.eps())


def _routed_layers(hparams, experts):
    """[the feed-forward of every layer]: experts where the file has a router, picked with a bias where it has one."""
    return [dataclasses.replace(experts(i),
                                pick_bias=any(hparams.has(f"blk.{i}.exp_probs_b{s}") for s in ("", ".bias")))
            if hparams.has(f"blk.{i}.ffn_gate_inp.weight") else Dense(hparams.n_ff) for i in range(hparams.n_layer)]


def limited(limit):
    """The switches of a feed-forward with such a limit; 0: none."""
    return {"act": "swiglu_limited", "shape": (limit,)} if limit else {}


def mimo2(hparams):
    """Heads by layer, sinks where the file has them, results of attention are scaled."""
    hparams.leave_predicting()
    hparams.same("expert_gating_func", SIGMOID)
    windows = hparams.windows(..., default=...)
    n_ff, scale = hparams.positive("expert_feed_forward_length"), hparams.scale("attention.value_scale")
    layers = _routed_layers(hparams, lambda i: mixture(hparams, n_ff, gating=SIGMOID, **groups(hparams)))
    blocks = []
    for i, (w, sizes, f) in enumerate(zip(windows, hparams.heads_per_layer(), layers, strict=True)):
        rope = hparams.rope(ROPE_NEOX, sizes["d_head"], factors="")
        blocks.append(Block(Attention(
            **sizes, rope=hparams.window_rope(rope, 10000.0, **UNSCALED) if w else rope, window=w, out_bias=False,
            sinks=hparams.has(f"blk.{i}.attn_sinks.weight"), fused=hparams.has(f"blk.{i}.attn_qkv.weight"),
            out_scale=0.0 if scale == 1.0 else scale), f))
    return Description(blocks, hparams.eps(), tied=False)


def step35(hparams):
    """Heads by layer, a gate for each head of attention; full layers rotate half as much as those with windows."""
    hparams.leave_predicting()
    hparams.ignore("leading_dense_block_count", "moe_every_n_layers")       # layers with a router have experts
    windows, n_ff = hparams.windows(..., default=...), hparams.positive("expert_feed_forward_length")
    limits, shared_limits = (hparams.numbers_per_layer(f"swiglu_clamp_{name}") for name in ("exp", "shexp"))
    n_shared, kind = hparams.positive("expert_shared_feed_forward_length"), gating(hparams, SIGMOID)

    def experts(i):
        shared = Dense(n_shared, suffix="_shexp", bias=False, **limited(shared_limits[i]))
        return mixture(hparams, n_ff, gating=kind, normed=hparams.get("expert_weights_norm", False, bool),
                       shared=shared, **limited(limits[i]), **groups(hparams))
    blocks = []
    layers = [dataclasses.replace(f, **limited(limit)) if isinstance(f, Dense) else f for f, limit in
              zip(_routed_layers(hparams, experts), shared_limits, strict=True)]
    for i, (w, sizes, f) in enumerate(zip(windows, hparams.heads_per_layer(), layers, strict=True)):
        normed = "rms" if hparams.has(f"blk.{i}.attn_q_norm.weight") else ""
        gate = "sigmoid" if hparams.has(f"blk.{i}.attn_gate.weight") else ""
        blocks.append(Block(Attention(**sizes, rope=_step_rope(hparams, sizes["d_head"], w), window=w, out_bias=False,
                                      qk_norm=normed, gate=gate, gate_by_head=True), f))
    return Description(blocks, hparams.eps(), tied=False)


def _step_rope(hparams, d_head, window):
    rope = hparams.rope(ROPE_NEOX, d_head)
    n_near = hparams.rope_dims("rope.dimension_count_swa", rope.n_dims, d_head)
    if window:
        return hparams.window_rope(rope, 10000.0, **UNSCALED, n_dims=n_near, factors="")
    return dataclasses.replace(rope, n_dims=rope.n_dims // 2, n_factors=max(rope.n_dims // 2, n_near) // 2)


def laguna(hparams):
    """Heads by layer, a Softplus gate for each head or each number of attention, experts behind dense layers."""
    n_dense = hparams.get("leading_dense_block_count", 0, int)
    windows = hparams.windows(4, dense_first=True)
    n_each = hparams.positive("expert_feed_forward_length")
    n_shared = hparams.get("expert_shared_feed_forward_length", 0, int) or \
        n_each * hparams.positive("expert_shared_count", 1)
    hparams.ignore("expert_shared_count", "feed_forward_length")
    experts = mixture(hparams, n_each, gating=gating(hparams, SIGMOID), pick_bias=True,
                      normed=hparams.get("expert_weights_norm", False, bool),
                      shared=Dense(n_shared, suffix="_shexp", bias=False), **groups(hparams))
    blocks = []
    for i, (w, sizes) in enumerate(zip(windows, hparams.heads_per_layer(), strict=True)):
        rope = hparams.rope(ROPE_NEOX, sizes["d_head"], factors="")
        if w:
            n_dims = hparams.rope_dims("rope.dimension_count_swa", rope.n_dims, sizes["d_head"])
            rope = hparams.window_rope(rope, hparams.freq_base, **UNSCALED, attn_factor=1.0, n_dims=n_dims)
        gate = hparams.file.tensors.get(f"blk.{i}.attn_gate.weight")
        blocks.append(Block(
            Attention(**sizes, rope=rope, window=w, qk_norm="rms", out_bias=False, gate="softplus",
                      gate_by_head=gate is not None and gate.ne[-1] == sizes["n_head"]),
            experts if i >= n_dense else Dense(hparams.n_ff, bias=False)))
    return Description(blocks, hparams.eps())


def granite_swa(hparams):
    """Granite with windows and attention sinks; RoPE may be left out in some layers."""
    sizes, shared = hparams.heads(), hparams.get("expert_shared_feed_forward_length", 0, int)
    rope = hparams.rope(ROPE_NORMAL, sizes["d_head"], kinds=ROPE_KINDS)
    windows = hparams.windows(..., default=...)
    rotates = hparams.flags_per_layer("attention.rope_pattern", True)
    feed_forward = dense_or_experts(hparams, **({"shared": Dense(shared, fused=True, suffix="_shexp", bias=False)}
                                                if shared else {}))
    blocks = [Block(Attention(**sizes, rope=rope if rotated else None, window=w, sinks=True,
                              scale=hparams.scale("attention.scale")), feed_forward,
                    residual_scale=hparams.scale("residual_scale"))
              for w, rotated in zip(windows, rotates, strict=True)]
    return Description(blocks, hparams.eps(), embd_scale=hparams.scale("embedding_scale"),
                       logit_scale=1.0 / hparams.between("logit_scale", 1e-6, 1e6))


def maple(hparams):
    """Norms of heads; RoPE in layers with windows only; SwiGLU within limits."""
    hparams.ignore("feed_forward_length")
    sizes, n_ff = hparams.heads(), hparams.positive("expert_feed_forward_length")
    rope = hparams.rope(ROPE_NEOX, sizes["d_head"], factors="")
    near = hparams.window_rope(rope, hparams.freq_base, freq_scale=hparams.freq_scale,
                               n_dims=hparams.rope_dims("rope.dimension_count_swa", rope.n_dims, sizes["d_head"]))
    blocks = []
    for w, limit in zip(hparams.windows(..., default=...), hparams.numbers_per_layer("swiglu_clamp_exp"), strict=True):
        act = {"act": "swiglu_clamp", "shape": (limit,)} if limit else {}
        blocks.append(Block(Attention(**sizes, rope=near if w else None, window=w, qk_norm="rms", out_bias=False),
                            mixture(hparams, n_ff, **act)))
    return Description(blocks, hparams.eps(), tied=False)


def spark2_5(hparams):
    """Numbers of heads differ by layer, each head has a gate, GELU gates the feed-forward; there are no experts."""
    blocks = []
    for w, sizes in zip(hparams.windows(..., default=...), hparams.heads_per_layer(), strict=True):
        rope = hparams.rope(ROPE_NEOX, sizes["d_head"], factors="")
        if w:
            rope = hparams.window_rope(
                rope, hparams.freq_base, freq_scale=hparams.freq_scale,
                n_dims=hparams.rope_dims("rope.dimension_count_swa", rope.n_dims, sizes["d_head"]))
        blocks.append(Block(Attention(**sizes, rope=rope, window=w, out_bias=False, gate="sigmoid", gate_by_head=True),
                            Dense(hparams.n_ff, "geglu", bias=False)))
    return Description(blocks, hparams.eps())


DECODERS = {"mellum": mellum, "smallthinker": smallthinker, "mimo2": mimo2, "step35": step35, "laguna": laguna,
            "granite_swa": granite_swa, "maple": maple, "spark2_5": spark2_5}
