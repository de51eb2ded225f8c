"""Decoders with several residual streams (models/blocks/hyper_connections.py): HY V4, with DeepSeek's latent attention;
GLM 5 Next, with Kimi's delta rule in most layers; DeepSeek 4, which attends to summaries of groups of old tokens."""
import dataclasses
import math

import numpy as np

from ggjit.models.blocks.compressed import CompressedAttention, Compressor, RunIndex, RunInputs
from ggjit.models.blocks.delta import KimiDelta
from ggjit.models.blocks.description import Description
from ggjit.models.blocks.feed_forward import Dense
from ggjit.models.blocks.hparams import ROPE_BASES, ROPE_NORMAL, Rope
from ggjit.models.blocks.hyper_connections import StreamBlock, StreamsEnd, StreamsMean
from ggjit.models.blocks.latent import Latent
from ggjit.models.blocks.moe import ROOT_OF_SOFTPLUS, SIGMOID, mixture
from ggjit.models.blocks.pool_indexer import PoolIndexer, PoolInputs
from ggjit.models.families.deepseek import indexer
from ggjit.models.families.experts import routed
from ggjit.models.families.kimi import lower_bound

MAX_STREAMS = 64
SINKHORN_STREAMS = 4            # of which gg.dsv4_hc_comb mixes each with the others
OVERLAPPING = 4                 # tokens of the runs that overlap
UNIT_EPS = 1e-6                 # of the norms of queries and keys of the delta rule


def clamped(limit):
    """Switches of a gated network whose factors are kept within a limit before they meet; 0: none."""
    return {"act": "swiglu_clamp", "shape": (limit,)} if limit else {}


def _streams(hparams):
    """{n_streams, eps} of the metadata."""
    n = hparams.positive("hyper_connection.count")
    if n > MAX_STREAMS:
        raise hparams.wrong("hyper_connection.count", n, f"at most {MAX_STREAMS}")
    return {"n_streams": n, "eps": hparams.between("hyper_connection.epsilon", -1e-12, 1.0)}


def hy_v4(hparams):
    """Sinks and gates of attention; layers without an indexer look at what the layer before looked at."""
    d_key, d_value = (hparams.positive(f"attention.{n}_length_mla") for n in ("key", "value"))
    kv_rank, streams = hparams.positive("attention.kv_lora_rank"), _streams(hparams)
    rope = hparams.rope(ROPE_NORMAL, d_key, factors="")
    hparams.same("attention.head_count_kv", 1)
    hparams.same("attention.key_length", kv_rank + rope.n_dims)
    hparams.same("attention.value_length", kv_rank)
    latent = Latent(hparams.positive("attention.head_count"), d_key, d_value, kv_rank,
                    hparams.positive("attention.q_lora_rank"), rope, 1.0 / math.sqrt(d_key), absorbed=True,
                    gate="sigmoid", sinks=True)
    mixers = [latent] * hparams.n_layer
    if hparams.get("attention.indexer.top_k", 0, int):
        index = dataclasses.replace(indexer(hparams, rope, ROPE_NORMAL, hparams.eps()), rope_last=True)
        own = hparams.flags_per_layer("attention.indexer.types", False)
        if not own[0]:
            raise hparams.wrong("attention.indexer.types", own, "a first layer with an indexer")
        mixers = [dataclasses.replace(latent, indexer=dataclasses.replace(index, shared=not is_own)) for is_own in own]
    limits, n_dense = hparams.numbers_per_layer("swiglu_clamp_exp"), hparams.get("leading_dense_block_count", 0, int)
    experts, blocks = routed(hparams, SIGMOID), []
    for i, mixer in enumerate(mixers):
        f = Dense(hparams.n_ff, bias=False) if i < n_dense else dataclasses.replace(
            experts, pick_bias=hparams.has(f"blk.{i}.exp_probs_b.bias"), **clamped(limits[i]))
        blocks.append(StreamBlock(mixer, f, **streams, post_eps=streams["eps"],
                                  magnitude=hparams.between("hyper_connection.magnitude", 0.0, 1e6)))
    return Description(blocks, hparams.eps(), tied=False, frame=StreamsEnd(**streams))


def glm5_next(hparams):
    """Kimi's delta rule in most layers; the others have latent attention without RoPE over pools of tokens."""
    hparams.leave_predicting()
    hparams.ignore("rope.freq_base", "rope.dimension_count", "attention.value_length")
    streams, n_iter = _streams(hparams), hparams.positive("hyper_connection.sinkhorn_iterations")
    if streams["n_streams"] != SINKHORN_STREAMS:
        raise hparams.wrong("hyper_connection.count", streams["n_streams"], SINKHORN_STREAMS)
    n_head, kv_rank = max(hparams.per_layer("attention.head_count")), hparams.positive("attention.kv_lora_rank")
    d_key, d_value = (hparams.positive(f"attention.{n}_length_mla") for n in ("key", "value"))
    hparams.same("attention.key_length", kv_rank)
    index, inputs = _pool_indexer(hparams)
    latent = Latent(n_head, d_key, d_value, kv_rank, index.q_rank, None, 1.0 / math.sqrt(d_key), absorbed=True)
    rank = hparams.positive("kda.head_dim")
    delta = KimiDelta(n_head, rank, hparams.positive("ssm.conv_kernel"), rank, rank, flat=True, sign=-1.0,
                      lower=lower_bound(hparams, 0.0), unit_eps=UNIT_EPS)
    own = hparams.flags_per_layer("attention.indexer.types", True)
    mixers = [dataclasses.replace(latent, indexer=dataclasses.replace(index, shared=not own[i])) if n else delta
              for i, n in enumerate(hparams.per_layer("attention.head_count_kv"))]
    first = next((m for m in mixers if m is not delta), None)
    if first is not None and first.indexer.shared:
        raise hparams.wrong("attention.indexer.types", own, "a first layer of attention with an indexer")
    limits = hparams.numbers_per_layer("swiglu_clamp_exp")
    shared = limits if hparams.get("swiglu_clamp_shexp", None) is None else \
        hparams.numbers_per_layer("swiglu_clamp_shexp")
    n_dense, experts, blocks = hparams.get("leading_dense_block_count", 0, int), routed(
        hparams, SIGMOID, pick_bias=True), []
    for i, mixer in enumerate(mixers):
        f = Dense(hparams.n_ff, bias=False, **clamped(shared[i])) if i < n_dense else dataclasses.replace(
            experts, shared=dataclasses.replace(experts.shared, **clamped(shared[i])), **clamped(limits[i]))
        blocks.append(StreamBlock(mixer, f, **streams, n_iter=n_iter))
    return Description(blocks, hparams.eps(), tied=False, frame=StreamsMean(**streams), inputs=(inputs,))


def _pool_indexer(hparams):
    """(PoolIndexer, PoolInputs) of the metadata."""
    n_head, d_head, n_top, size = (hparams.positive(f"attention.indexer.{name}") for name in (
        "head_count", "key_length", "top_k", "kpool"))
    if size < 2 or n_top % size:
        raise hparams.wrong("attention.indexer.kpool", size, f"2 or more, and a divisor of the {n_top} keys picked")
    eps = hparams.get("attention.layer_norm_epsilon", 0.0, float)
    index = PoolIndexer(n_head, d_head, n_top // size, size, hparams.positive("attention.q_lora_rank"), eps)
    if not hparams.get("attention.indexer.kpool_select_tail", False, bool):
        raise hparams.wrong("attention.indexer.kpool_select_tail", False, "true: without it the first tokens look at "
                                                                          "nothing")
    return index, PoolInputs(size)


def deepseek4(hparams):
    """Windows everywhere; most layers see what is before them in runs of 4 or 128 tokens.  The first layers look their
    experts up by token."""
    if hparams.has(f"blk.{hparams.n_layer - hparams.get('nextn_predict_layers', 0, int)}.nextn.eh_proj.weight"):
        hparams.leave_predicting()
    hparams.same("attention.head_count_kv", 1)
    hparams.ignore("feed_forward_length")           # all layers have experts
    streams, limits = _streams(hparams), hparams.numbers_per_layer("swiglu_clamp_exp")
    if streams["n_streams"] != SINKHORN_STREAMS:
        raise hparams.wrong("hyper_connection.count", streams["n_streams"], SINKHORN_STREAMS)
    n_iter, n_hashed = hparams.positive("hyper_connection.sinkhorn_iterations"), hparams.get(
        "hash_layer_count", 0, int)
    shared = limits if hparams.get("swiglu_clamp_shexp", None) is None else \
        hparams.numbers_per_layer("swiglu_clamp_shexp")
    attentions, inputs = _compressed(hparams)
    experts = _experts_of_4(hparams)
    blocks = []
    for i, attention in enumerate(attentions):
        f = dataclasses.replace(experts, shared=dataclasses.replace(experts.shared, **clamped(shared[i])),
                                by_token=i < n_hashed, pick_bias=i >= n_hashed, **clamped(limits[i]))
        blocks.append(StreamBlock(attention, f, **streams, n_iter=n_iter))
    return Description(blocks, hparams.eps(), tied=False, frame=StreamsEnd(**streams), inputs=inputs,
                       for_pictures=("exp_probs_b_vl",))


def _experts_of_4(hparams):
    if hparams.get("expert_gating_func", kind=int) != ROOT_OF_SOFTPLUS:
        raise hparams.wrong("expert_gating_func", hparams.get("expert_gating_func"), f"{ROOT_OF_SOFTPLUS}")
    n_ff = hparams.positive("expert_feed_forward_length")
    shared = Dense(n_ff * hparams.positive("expert_shared_count"), suffix="_shexp", bias=False)
    return mixture(hparams, n_ff, gating=ROOT_OF_SOFTPLUS, normed=hparams.get("expert_weights_norm", kind=bool),
                   shared=shared)


def _compressed(hparams):
    """([attention of each layer], Description.inputs)"""
    d, h = hparams.positive("attention.key_length"), hparams.positive("attention.head_count")
    hparams.same("attention.value_length", d)
    window, n_groups = hparams.positive("attention.sliding_window"), hparams.positive("attention.output_group_count")
    if h % n_groups:
        raise hparams.wrong("attention.output_group_count", n_groups, f"a divisor of {h} heads")
    far = hparams.rope(ROPE_NORMAL, d, factors="", beta_fast=32.0)
    far = dataclasses.replace(far, freq_base=hparams.between("attention.compress_rope_freq_base", *ROPE_BASES),
                              attn_factor=1.0 / (1.0 + 0.1 * math.log(1.0 / far.freq_scale)) if far.ext_factor else 1.0)
    near = Rope(far.n_dims, ROPE_NORMAL, 0, hparams.freq_base, beta_fast=0.0, beta_slow=0.0)
    ratios = hparams.get("attention.compress_ratios", kind=np.ndarray)[:hparams.n_layer].tolist()
    if len(ratios) < hparams.n_layer or not set(ratios) <= {0, OVERLAPPING, 128} or 2 * OVERLAPPING > window \
            or max(ratios) > window:
        raise hparams.wrong("attention.compress_ratios", ratios, f"0, 4 or 128 of each layer, within a window of "
                                                                 f"{window} tokens")
    runs = {size: RunInputs(size, window, hparams.n_ctx // size) for size in sorted(set(ratios) - {0})}
    d_index, n_index, n_top = (hparams.positive(f"attention.indexer.{n}") for n in (
        "key_length", "head_count", "top_k"))
    common = h, d, hparams.positive("attention.q_lora_rank"), n_groups, hparams.positive("attention.output_lora_rank")
    found = []
    for size in ratios:
        pooling, index = None, None
        if size:
            pooling = Compressor(runs[size], d, far, size == OVERLAPPING, "attn_compressor")
        if size == OVERLAPPING:
            index = RunIndex(Compressor(runs[size], d_index, far, True, "indexer_compressor"), n_index, n_top)
        found.append(CompressedAttention(*common, window, far if size else near, pooling, index))
    return found, tuple(runs.values())


DECODERS = {"hy_v4": hy_v4, "glm5-next": glm5_next, "deepseek4": deepseek4}
