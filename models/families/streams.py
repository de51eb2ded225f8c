"""Decoders with several residual streams (blocks/hyper_connections.py): HY V4, with DeepSeek's latent attention."""
import dataclasses
import math

from ggjit.models.blocks.description import Description
from ggjit.models.blocks.feed_forward import Dense
from ggjit.models.blocks.hparams import ROPE_NORMAL
from ggjit.models.blocks.hyper_connections import StreamBlock, StreamsEnd
from ggjit.models.blocks.latent import Latent
from ggjit.models.blocks.moe import SIGMOID
from ggjit.models.families.deepseek import indexer
from ggjit.models.families.experts import routed
from ggjit.models.families.windowed_experts import limited

MAX_STREAMS = 64


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
            experts, pick_bias=hparams.has(f"blk.{i}.exp_probs_b.bias"), **limited(limits[i]))
        blocks.append(StreamBlock(mixer, f, **streams, post_eps=streams["eps"],
                                  magnitude=hparams.between("hyper_connection.magnitude", 0.0, 1e6)))
    return Description(blocks, hparams.eps(), tied=False, frame=StreamsEnd(**streams))


DECODERS = {"hy_v4": hy_v4}
