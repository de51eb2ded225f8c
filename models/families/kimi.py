"""Kimi Linear, Kimi K3 and Ling 3 (bailingmoe3): Kimi's delta rule in most layers, latent attention in the others."""
import dataclasses
import math

from ggjit.models.blocks.delta import KimiDelta
from ggjit.models.blocks.description import Block, Description
from ggjit.models.blocks.feed_forward import Dense
from ggjit.models.blocks.hparams import ROPE_NORMAL
from ggjit.models.blocks.latent import Latent
from ggjit.models.blocks.moe import gating, groups, mixture
from ggjit.models.blocks.residual_attention import MixedBlock, MixedEnd
from ggjit.models.families.windowed_experts import limited


def _latent(hparams, q_rank, **switches):
    """Latent attention in its absorbed form; without a `rope` the part of a head that others rotate stays as it is."""
    n_head = max(hparams.per_layer("attention.head_count"))
    d_key, d_value = (hparams.positive(f"attention.{n}_length_mla") for n in ("key", "value"))
    rank = hparams.positive("attention.kv_lora_rank")
    n_rot = hparams.positive("rope.dimension_count")
    hparams.same("attention.key_length", rank + n_rot)
    hparams.ignore("attention.value_length")            # some files state another one, there are no values of their own
    return Latent(n_head, d_key, d_value, rank, q_rank, scale=1.0 / math.sqrt(d_key), absorbed=True,
                  **{"rope": None, "d_shared": n_rot, **switches})


def _delta(hparams, **switches):
    return KimiDelta(max(hparams.per_layer("attention.head_count")), hparams.positive("kda.head_dim"),
                     hparams.positive("ssm.conv_kernel"), **switches)


def lower_bound(hparams, default):
    """The least logarithm of a decay; 0: none."""
    lower = hparams.get("kda.gate_lower_bound", default, float)
    if not -1e6 < lower <= 0:
        raise hparams.wrong("kda.gate_lower_bound", lower, "a number below 0, or 0 for none")
    return lower


def _experts(hparams, **switches):
    """Picked with a bias, beside shared ones."""
    n_ff = hparams.positive("expert_feed_forward_length")
    n_shared = hparams.get("expert_shared_feed_forward_length", 0, int) or \
        n_ff * max(hparams.get("expert_shared_count", 1, int), 1)
    hparams.ignore("expert_shared_count")
    shared = Dense(n_shared, suffix="_shexp", bias=False)
    return mixture(hparams, n_ff, gating=gating(hparams, 0), pick_bias=True, **{"shared": shared, **switches},
                   **groups(hparams))


def _mixers(hparams, delta, latent):
    return [latent if n else delta for n in hparams.per_layer("attention.head_count_kv")]


def kimi_linear(hparams):
    """Attention without RoPE."""
    hparams.ignore("rope.freq_base")
    delta = _delta(hparams, decay_rank=hparams.positive("kda.head_dim"), gate_rank=hparams.positive("kda.head_dim"))
    n_dense, experts = hparams.get("leading_dense_block_count", 0, int), _experts(hparams)
    blocks = [Block(mixer, experts if i >= n_dense else Dense(hparams.n_ff, bias=False))
              for i, mixer in enumerate(_mixers(hparams, delta, _latent(hparams, 0)))]
    hparams.ignore("feed_forward_length", "attention.q_lora_rank")
    return Description(blocks, hparams.eps(), tied=False)


def kimi_k3(hparams):
    """Attention over residuals, gates behind attention, experts of a shorter vector, no RoPE."""
    hparams.ignore("rope.freq_base", "feed_forward_length")
    lower, every = lower_bound(hparams, 0.0), hparams.positive("attn_res.block_size")
    delta = _delta(hparams, decay_rank=hparams.positive("kda.head_dim"), gate="ssm_g", flat=True, lower=lower,
                   sign=-1.0)
    shape = (hparams.between("activation.situ_beta", 0.0, 1e6),
             max(hparams.between("activation.situ_linear_beta", -1e6, 1e6), 0.0))
    q_rank = hparams.get("attention.q_lora_rank", 0, int)
    n_dense = hparams.get("leading_dense_block_count", 0, int)
    shared_width = hparams.positive("expert_feed_forward_length") * max(hparams.get("expert_shared_count", 1, int), 1)
    experts = _experts(hparams, act="situ", shape=shape, normed=hparams.get("expert_weights_norm", False, bool),
                       n_latent=hparams.get("expert_latent_length", 0, int), latent="routed",
                       shared=Dense(shared_width, "situ", suffix="_shexp", bias=False, shape=shape))
    blocks = []
    for i, n_head_kv in enumerate(hparams.per_layer("attention.head_count_kv")):
        mixer = delta
        if n_head_kv:
            low = q_rank if hparams.has(f"blk.{i}.attn_q_a_norm.weight") else 0
            mixer = _latent(hparams, low, gate="sigmoid" if hparams.has(f"blk.{i}.attn_gate.weight") else "")
        f = experts if i >= n_dense else Dense(hparams.n_ff, "situ", bias=False, shape=shape)
        blocks.append(MixedBlock(mixer, f, i % every == 0))
    return Description(blocks, hparams.eps(), tied=False, frame=MixedEnd())


def bailingmoe3(hparams):
    """Decays within limits, a gate for each head of attention, SwiGLU within limits; for text its RoPE is the usual
    one."""
    hparams.leave_predicting()
    hparams.ignore("rope.dimension_sections", "feed_forward_length")
    if not hparams.get("kda.safe_gate", True, bool):
        raise hparams.wrong("kda.safe_gate", False, "true")
    lower = lower_bound(hparams, ...)
    if not lower:
        raise hparams.wrong("kda.gate_lower_bound", lower, "a number below 0")
    rope = hparams.rope(ROPE_NORMAL, hparams.positive("attention.key_length_mla"), factors="")
    latent = _latent(hparams, hparams.get("attention.q_lora_rank", 0, int), rope=rope, gate="sigmoid",
                     gate_by_head=True)
    limits, shared_limits = (hparams.numbers_per_layer(f"swiglu_clamp_{name}") for name in ("exp", "shexp"))
    n_dense, blocks = hparams.get("leading_dense_block_count", 0, int), []
    experts = _experts(hparams, normed=hparams.get("expert_weights_norm", False, bool))
    for i, mixer in enumerate(_mixers(hparams, _delta(hparams, lower=lower), latent)):
        shared = dataclasses.replace(experts.shared, **limited(shared_limits[i]))
        f = dataclasses.replace(experts, shared=shared, **limited(limits[i])) if i >= n_dense else \
            Dense(hparams.n_ff, bias=False, **limited(shared_limits[i]))
        blocks.append(Block(mixer, f))
    return Description(blocks, hparams.eps())


DECODERS = {"kimi-linear": kimi_linear, "kimi-k3": kimi_k3, "bailingmoe3": bailingmoe3}
