"""Small random-weight GGUFs of every architecture, and llama.cpp's results on them, by the tools of the reference data.

    python -m helpers.arch_files TOOLS NAME FOLDER          writes model.gguf, and results.npz: ids, llama.cpp's results
    python -m helpers.arch_files TOOLS NAME FOLDER named    writes model.gguf, and named.npz: ids, and `NAME|k`, the
                                                            k-th tensor that has that name in llama.cpp's graph

A process of its own, so that no two ggml libraries meet.  results.npz holds `whole`, the text read at once, and
`again`: token by token, or, where all tokens see each other, with every weight moved by one float32 step.  `pooled`:
the embedding of an encoder.  F32 cache, no flash attention.
"""
import os
import re
import sys
from types import SimpleNamespace

import gguf
import numpy as np

from helpers import arch_experts, arch_hybrids
from helpers.arch_notation import (
    DELTA_SIZES,
    DENSE_FIRST,
    EXPERTS,
    EXPERTS_X,
    FUSED_B,
    GATED,
    HEAD_NORMS,
    MAMBA2,
    MOE,
    NORMS,
    NORMS_B,
    PICKED,
    POSTS,
    QKV,
    QKV_B,
    SHARED,
    SSM,
    TOP_B,
)

# entries of the tools besides the architectures' names
VARIANTS = ("llama-yarn", "llama-linear", "llama-freqs", "llama-longrope", "llama-moe", "deepseek2-lite",
            "deepseek2-temp", "falcon-mqa", "stablelm-parallel", "jina-bert-v2-fused", "modern-bert-swiglu",
            "mamba-rms", "lfm2-window", "qwen3next-in", "t5encoder-relu", "baichuan-13b", "exaone4-window",
            "glm4moe-nextn", "chameleon-after", "minimax-m3-sparse", "gemma3n-shared", "gemma4-moe", "grok-1",
            "cohere2moe-rms", "gemma-embedding-dense",
            *arch_hybrids.VARIANTS, *arch_experts.VARIANTS)
ENCODED = [5, 90, 41, 7, 7, 66, 2, 33, 12, 80, 1]         # the text that encoders of encoder-decoders read
SMALL = {"embd": 64, "ff": 96, "vocab": 96}
ENCODER = {"attention.causal": False, "pooling_type": 1, "tokenizer.ggml.token_type_count": 2}
LAST_NORMS = "attn_output_norm+b=D layer_output_norm+b=D "
BERT = dict(top="token_embd=V,D token_types=2,D token_embd_norm+b=D ", eps="ln", square=True, mha=True, embed=True)
# heads, heads of keys, feed-forward widths: attention, a matrix in its place, neither of both, nothing
DECI = [4, 4, 0, 4, 0, 4], [2, 0, 0, 1, 0, 2], [96, 64, 128, 64, 0, 96]
LOW_RANK_Q = "attn_q_a=QL,D attn_q_a_norm=QL attn_q_b=H*hd,QL "
LATENT = "attn_kv_a_mqa=KL+R,D attn_kv_a_norm=KL attn_output=D,H*VD "
LATENT_SIZES = {"attention.q_lora_rank": "QL", "attention.kv_lora_rank": "KL"}
UNSCALED = {"gemma3n", "gemma4"}
LONG = {"deepseek4-limits": 300}    # tokens of the text, where 40 do not show all
FLASH = {"minimax-m3-sparse"}       # llama.cpp looks at all keys where flash attention is off
BLOCK_INDEX = PICKED + "indexer.q_proj=K*32,D indexer.k_proj=32,D indexer.q_norm=32 indexer.k_norm=32 "
MINIMAX_M3 = DENSE_FIRST | {
    "expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 1.7,
    "attention.indexer.head_count": "K", "attention.indexer.key_length": 32, "attention.indexer.top_k": 8,
    "attention.indexer.block_size": 8, "attention.indexer.local_blocks": 1}
DIFFUSERS = ("dream", "llada", "rnd1")          # the beginnings of their names
HEADS_NORMED = "attn_q_norm=H,hd attn_k_norm=K,hd attn_q_norm.bias!=H,hd attn_k_norm.bias!=K,hd "
CHAMELEON_KV = {"attention.layer_norm_rms_epsilon": 1e-5}
ROUND = {"phi3", "stablelm", "stablelm-parallel", "phi2", "qwen3next", "qwen3next-in"}     # need the sizes they have

def _hybrid(c, i):
    return NORMS + (QKV if i % 2 else MAMBA2) + GATED


def _after_dense(attention, more=""):
    """The first layer is dense."""
    return lambda c, i: attention + (EXPERTS_X + SHARED + more if i else GATED)


def _predicting(c, i):
    """The last layer guesses the token after the next."""
    more = "nextn.eh_proj=D,2*D nextn.enorm=D nextn.hnorm=D nextn.shared_head_norm=D " * (i == c.layers - 1)
    return _after_dense("attn_norm=D post_attention_norm=D " + QKV_B + HEAD_NORMS, PICKED)(c, i) + more


def _delta(feed_forward):
    """Three layers of the delta rule to one of attention."""
    linear = ("attn_qkv=2*G*S+I,D attn_gate=I,D ssm_conv1d=2*G*S+I,CK ssm_dt.bias!=TR ssm_a!=TR ssm_alpha=TR,D "
              "ssm_beta=TR,D ssm_norm=S ssm_out=D,I ")
    full = "attn_q=2*Q,D attn_k=KV,D attn_v=KV,D attn_output=D,Q " + HEAD_NORMS
    return lambda c, i: "attn_norm=D post_attention_norm=D " + (full if i % 4 == 3 else linear) + feed_forward


GEMMA4_WINDOWS = [True, True, False, True, False, True, False]
GEMMA4 = {"attention.sliding_window": "W", "rope.freq_base_swa": 500.0, "final_logit_softcapping": 6.0,
          "attention.sliding_window_pattern": lambda c: GEMMA4_WINDOWS[:c.layers],
          "attention.key_length_swa": 32, "attention.value_length_swa": 32, "rope.dimension_count_swa": 16,
          "attention.head_count_kv": lambda c: [2 if near else 1 for near in GEMMA4_WINDOWS[:c.layers]]}


def _gemma4(n_shared, feed_forward):
    """Heads of 32, 2 of keys, where there is a window; else as stated, with values that are the keys."""
    def block(c, i):
        near = GEMMA4_WINDOWS[i]
        d, n_kv = (32, 2) if near else (c.hd, 1)
        kv = f"attn_k={n_kv * d},D " + f"attn_v={n_kv * d},D " * near + f"attn_k_norm={d} "
        return (f"attn_norm=D attn_q=H*{d},D attn_output=D,H*{d} attn_q_norm={d} " + POSTS + "ffn_norm=D " +
                kv * (i < c.layers - n_shared) + feed_forward(c, i) + "layer_output_scale=1 ")
    return block


PER_LAYER = "per_layer_token_embd=V,16*{n} per_layer_model_proj=16*{n},D per_layer_proj_norm=16 "
LAYER_INPUT = "inp_gate=16,D proj=D,16 post_norm=D "


def _gemma3n(layers, windows, **options):
    """llama.cpp shares keys from layer 20 on."""
    block = (NORMS + QKV + HEAD_NORMS + POSTS + GATED + "inp_gate=256,D proj=D,256 post_norm=D laurel_l=64,D "
             "laurel_r=D,64 laurel_post_norm=D altup_router=4,D altup_router_norm=D altup_predict_coef=16,4 "
             "altup_correct_coef=4,4 altup_correct_scale=D ")
    top = (f"token_embd=V,D output_norm=D altup_proj=3,D,D altup_unembd_proj=3,D,D "
           f"per_layer_token_embd=V,256*{layers} per_layer_model_proj=256*{layers},D per_layer_proj_norm=256 ")
    return block, dict(top=top, layers=layers, hd=32, tied=True, std=1.0, must_tie=True, kv={
        "attention.sliding_window": "W", "rope.freq_base_swa": 500.0, "altup.num_inputs": 4, "altup.active_idx": 0,
        "attention.shared_kv_layers": max(layers - 20, 0), "attention.sliding_window_pattern": windows,
        "embedding_length_per_layer_input": 256,
        # llama.cpp does not read it, and divides squares by n - 1
        "activation_sparsity_scale": lambda c: [1.6448533535003662 * (c.ff / (c.ff - 1)) ** .5 if i < 10 else -np.inf
                                                for i in range(layers)]}, **options)


# name: (tensors of a block, options of the tools' arch())
MORE = {
    "gptneox": (NORMS_B + FUSED_B, dict(top=TOP_B, eps="ln", square=True, mha=True, rot=.5, must_untie=True,
                                        kv={"use_parallel_residual": True})),
    "bloom": (NORMS_B + FUSED_B, dict(top=TOP_B.replace("output_norm", "token_embd_norm+b=D output_norm"), eps="ln",
                                      square=True, mha=True, rot=0)),
    "cohere2": ("attn_norm=D " + QKV + GATED, dict(eps="ln", square=True, must_tie=True, layers=5, kv={
        "logit_scale": 0.5, "attention.sliding_window": "W"})),
    "olmo": (QKV + GATED, dict(top="token_embd=V,D output^=V,D ", eps="ln", square=True, tied=True,
                               kv={"attention.clamp_kqv": 1.2})),
    "nemotron": (NORMS_B + QKV + "ffn_up=F,D ffn_down=D,F ", dict(top=TOP_B, eps="ln", square=True, rot=.5,
                                                                  must_untie=True)),
    "olmoe": (NORMS + QKV + "attn_q_norm=Q attn_k_norm=KV " + EXPERTS, dict(
        square=True, mha=True, must_untie=True, ff_is_ffx=True, kv={"expert_count": "X", "expert_used_count": "U"})),
    "internlm2": (NORMS + QKV + GATED, dict(square=True, must_untie=True)),
    "exaone": (NORMS + QKV + GATED, dict(square=True, ropes=("freqs",), rope="freqs")),
    "seed_oss": ("attn_norm=D post_attention_norm=D " + QKV.replace("=Q,D", "+b=Q,D", 1) + GATED, dict(hd=32)),
    "ernie4_5": (NORMS + QKV + GATED, dict(hd=32, tied=True)),
    "arcee": (NORMS + QKV + "ffn_up=F,D ffn_down=D,F ", dict(square=True)),
    "hunyuan-dense": (NORMS + QKV + "attn_q_norm=hd attn_k_norm=hd " + GATED, dict(hd=32, tied=True)),
    "granitehybrid": (_hybrid, dict(
        square=True, groups=2, ranks=8, rot=0, tied=True, std=2.0, kv={
            **SSM, "logit_scale": 2.0, "residual_scale": 0.4, "embedding_scale": 5.0, "attention.scale": 0.28,
            "rope.scaling.finetuned": False, "rope.dimension_count": "hd",
            "attention.head_count_kv": lambda c: [c.kvh * (i % 2) for i in range(c.layers)]})),
    "deepseek": (_after_dense(NORMS + QKV), dict(square=True, must_untie=True, shexp=2, kv=DENSE_FIRST)),
    "dots1": (_after_dense(NORMS + QKV + HEAD_NORMS, PICKED), dict(hd=32, mha=True, must_untie=True, shexp=2, kv={
        **DENSE_FIRST, "expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 1.7})),
    "glm4moe": (_after_dense("attn_norm=D post_attention_norm=D " + QKV_B + HEAD_NORMS, PICKED), dict(
        hd=32, rot=.5, shexp=2, kv=DENSE_FIRST)),
    "glm4moe-nextn": (_predicting, dict(of="glm4moe", hd=32, rot=.5, shexp=2, layers=5, kv={
        **DENSE_FIRST, "nextn_predict_layers": 1})),
    "bailingmoe": (NORMS + QKV + EXPERTS_X + SHARED, dict(square=True, must_untie=True, shexp=2, kv={
        **MOE, "expert_shared_count": 2, "expert_weights_norm": True})),
    "bailingmoe2": (_after_dense(NORMS + HEAD_NORMS + "attn_qkv=Q+2*KV,D attn_output=D,Q ", PICKED), dict(
        square=True, must_untie=True, kv={**DENSE_FIRST, "expert_shared_count": 1, "expert_gating_func": 2,
                                          "expert_shared_feed_forward_length": "FS", "expert_weights_norm": True,
                                          "expert_group_count": 4, "expert_group_used_count": 2})),
    "ernie4_5-moe": (_after_dense(NORMS + QKV, PICKED), dict(square=True, kv={
        **DENSE_FIRST, "expert_shared_count": 1, "expert_shared_feed_forward_length": "FS",
        "interleave_moe_layer_step": 1})),
    "minimax-m2": (NORMS + QKV + "attn_q_norm=Q attn_k_norm=KV " + EXPERTS_X + PICKED, dict(
        hd=32, rot=.5, must_untie=True, ff_is_ffx=True, kv={**MOE, "expert_gating_func": 2})),
    "minimax-m3": (_after_dense(NORMS + QKV + HEAD_NORMS, BLOCK_INDEX), dict(
        hd=32, rot=.5, must_untie=True, shexp=2, kv=MINIMAX_M3)),
    "minimax-m3-sparse": (_after_dense(NORMS + QKV + HEAD_NORMS, BLOCK_INDEX), dict(
        of="minimax-m3", hd=32, rot=.5, must_untie=True, shexp=2, kv=MINIMAX_M3 | {
            "attention.indexer.top_k": 3, "attention.indexer.block_size": 4})),
    "hunyuan-moe": (NORMS + QKV + HEAD_NORMS + EXPERTS + SHARED, dict(hd=32, kv={
        **MOE, "expert_shared_feed_forward_length": "FS", "expert_shared_count": 1})),
    "phimoe": (NORMS_B + QKV_B.replace("output=", "output+b=") + EXPERTS, dict(
        top="token_embd=V,D output_norm+b=D output+b=V,D ", square=True, must_untie=True, ff_is_ffx=True,
        ropes=("longrope",), kv={"expert_count": "X", "expert_used_count": "U"})),
    "dbrx": ("attn_norm=D attn_output_norm=D attn_qkv=Q+2*KV,D attn_output=D,Q " + EXPERTS, dict(
        eps="ln", square=True, must_untie=True, ff_is_ffx=True, kv={
            "expert_count": "X", "expert_used_count": "U", "attention.clamp_kqv": 1.2})),
    "mistral3": (NORMS + QKV + GATED, dict(hd=32, rope="yarn", must_untie=True, kv={
        "attention.temperature_scale": 0.3, "rope.scaling.yarn_log_multiplier": 1.0})),
    "baichuan": (NORMS + QKV + GATED, dict(square=True, mha=True, must_untie=True, layers=32)),
    "baichuan-13b": (NORMS + QKV + GATED, dict(of="baichuan", square=True, mha=True, must_untie=True, layers=40)),
    "minicpm": (NORMS + QKV + GATED, dict(square=True, tied=True, ropes=("longrope",), kv={"logit_scale": 2.5})),
    "apertus": (NORMS + QKV + HEAD_NORMS + "ffn_up=F,D ffn_down=D,F ", dict(
        hd=32, ropes=("freqs",), rope="freqs", kv={
            "xielu.alpha_n": [.5, .7, .6, .4], "xielu.alpha_p": [.8, .6, .7, .5], "xielu.beta": [.5, .4, .6, .5],
            "xielu.eps": [-1e-6] * 4})),
    "exaone4": (QKV + HEAD_NORMS + POSTS + GATED, dict(square=True, layers=5)),
    "exaone4-window": (QKV + HEAD_NORMS + POSTS + GATED, dict(of="exaone4", square=True, layers=64, kv={
        "attention.sliding_window": "W", "attention.sliding_window_pattern": 4})),
    "chatglm": (NORMS + "attn_qkv+b=Q+2*KV,D attn_output=D,Q ffn_up=2*F,D ffn_down=D,F ", dict(
        square=True, rot=.5, must_untie=True)),
    "qwen": (NORMS + "attn_qkv+b=Q+2*KV,D attn_output=D,Q " + GATED.replace("F", "F//2"), dict(
        square=True, mha=True, must_untie=True)),
    "qwen2vl": (NORMS + QKV_B + GATED, dict(square=True, kv={      # llama.cpp leaves the epsilon out
        "rope.dimension_sections": lambda c: [c.hd // 8, 3 * c.hd // 16, 3 * c.hd // 16, 0],
        "attention.layer_norm_rms_epsilon": 1e-8})),
    "plamo": ("attn_norm=D " + QKV + GATED, dict(square=True, must_untie=True)),
    "refact": (NORMS + QKV + GATED, dict(square=True, rot=0, tied=True)),
    "xverse": (NORMS + QKV + GATED, dict(square=True, must_untie=True)),
    "pangu-embedded": (NORMS + QKV_B.replace("output=", "output+b=") + GATED, dict(square=True)),
    "maincoder": (NORMS + QKV + HEAD_NORMS + GATED, dict(hd=32, tied=True)),
    "mpt": (NORMS_B + FUSED_B, dict(top=TOP_B, eps="ln", square=True, mha=True, rot=0, kv={
        "attention.max_alibi_bias": 8.0, "attention.clamp_kqv": 1.2})),
    "jais": (NORMS_B + FUSED_B.replace("ffn_up", "ffn_gate+b=F,D ffn_up"), dict(
        top=TOP_B, eps="ln", square=True, mha=True, rot=0, must_untie=True, kv={"attention.max_alibi_bias": 8.0})),
    "codeshell": (NORMS_B + FUSED_B, dict(top=TOP_B, eps="ln", square=True)),
    "orion": (NORMS_B + QKV + GATED, dict(top=TOP_B, eps="ln", square=True, must_untie=True)),
    "starcoder": (NORMS_B + FUSED_B, dict(top=TOP_B + "position_embd=C,D ", eps="ln", square=True, kvh=1, rot=0)),
    "dream": (NORMS + QKV_B + GATED, dict(square=True)),
    "llada": (NORMS + QKV + GATED, dict(hd=32)),
    "llada-moe": (NORMS + QKV + HEAD_NORMS + EXPERTS_X, dict(square=True, must_untie=True, kv=MOE)),
    "rnd1": (NORMS + QKV + HEAD_NORMS + EXPERTS_X, dict(hd=32, tied=True, kv=MOE)),
    "gptj": (NORMS_B.partition("ffn")[0] + QKV + "ffn_up+b=F,D ffn_down+b=D,F ", dict(
        top="token_embd=V,D output_norm+b=D output+b=V,D ", eps="ln", square=True, mha=True, rot=.5,
        must_untie=True)),
    "cogvlm": (NORMS + GATED + "attn_qkv=3*Q,D attn_output=D,Q vis_attn_qkv=3*Q,D vis_attn_output=D,Q vis_gate=F,D "
               "vis_up=F,D vis_down=D,F ", dict(square=True, mha=True)),
    "chameleon": (NORMS + QKV + HEADS_NORMED + GATED, dict(square=True, kv=CHAMELEON_KV)),
    "chameleon-after": (NORMS + QKV + HEADS_NORMED + GATED, dict(of="chameleon", square=True, tied=True,
                                                                 kv=CHAMELEON_KV | {"swin_norm": True})),
    "hrm_text": (QKV + GATED + "attn_gate=Q,D ", dict(
        top="token_embd=V,D output^=V,D hrm.z_l_init!=D ", layers=4, hd=32, std=2.0, kv={
            "block_count": 12, "embedding_scale": 3.0, "hrm.layers_per_stack": 2, "hrm.h_cycles": 2,
            "hrm.l_cycles": 2})),
    **arch_hybrids.MORE,
    **arch_experts.MORE,
    "gemma4": (_gemma4(2, lambda c, i: GATED.replace("F", "2*F" if i > 4 else "F") + LAYER_INPUT), dict(
        top="token_embd=V,D output_norm=D " + PER_LAYER.format(n=7), layers=7, hd=64, tied=True, std=1.0,
        must_tie=True, ropes=("freqs",), rope="freqs", kv={
            **GEMMA4, "attention.shared_kv_layers": 2, "embedding_length_per_layer_input": 16,
            "feed_forward_length": lambda c: [c.ff * (2 if i > 4 else 1) for i in range(c.layers)]})),
    "gemma4-moe": (_gemma4(0, lambda c, i: GATED + "post_ffw_norm_1=D pre_ffw_norm_2=D post_ffw_norm_2=D "
                           "ffn_gate_inp=X,D ffn_gate_inp.scale!=D ffn_down_exps=X,D,FX ffn_down_exps.scale!=X " + (
                               "ffn_gate_up_exps=X,2*FX,D " if i % 2 else "ffn_gate_exps=X,FX,D ffn_up_exps=X,FX,D ")),
                   dict(of="gemma4", layers=5, hd=64, tied=True, std=1.0, must_tie=True, ropes=("freqs",),
                        rope="freqs", kv={**GEMMA4, **MOE, "embedding_length_per_layer_input": 0})),
    "gemma3n": _gemma3n(3, [True, False, True]),
    "gemma3n-shared": _gemma3n(22, [i not in (4, 9, 14, 19, 20) for i in range(22)], of="gemma3n"),
    "qwen3vl": (NORMS + QKV + HEAD_NORMS + GATED, dict(hd=32, tied=True, kv={
        "rope.dimension_sections": [6, 5, 5, 0], "n_deepstack_layers": 0})),
    "qwen3vlmoe": (NORMS + QKV + HEAD_NORMS + EXPERTS_X, dict(hd=32, kv={
        **MOE, "rope.dimension_sections": [6, 5, 5, 0]})),
    "mistral4": (_after_dense(NORMS + LOW_RANK_Q + LATENT + "attn_k_b=H,KL,NOPE attn_v_b=H,VD,KL "), dict(
        hd=64, rot=.5, vd=32, rope="yarn", one_kv=True, shexp=2, kv={
            **DENSE_FIRST, **LATENT_SIZES, "expert_gating_func": 1, "attention.key_length": "KL+R",
            "attention.value_length": "KL", "attention.key_length_mla": "hd", "attention.value_length_mla": "VD",
            "rope.scaling.yarn_log_multiplier": 0.0707, "attention.temperature_scale": 0.3,
            "attention.temperature_length": 16})),
    "minicpm3": (NORMS + LOW_RANK_Q + LATENT + "attn_kv_b=H*(NOPE+VD),KL " + GATED, dict(
        hd=64, rot=.5, vd=32, mha=True, tied=True, std=.2, rope="longrope", ropes=("longrope",), kv={
            **LATENT_SIZES, "attention.value_length": "VD"})),
    "deepseek2-ocr": (_after_dense(NORMS + QKV), dict(square=True, mha=True, shexp=2, kv=DENSE_FIRST)),
    "exaone-moe": (_after_dense(NORMS + QKV + HEAD_NORMS, PICKED), dict(
        hd=32, must_untie=True, layers=5, ropes=("freqs",), rope="freqs", kv={
            **DENSE_FIRST, "expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 1.7,
            "expert_shared_feed_forward_length": "FS", "attention.sliding_window": "W"})),
    "afmoe": (_after_dense(NORMS + QKV + HEAD_NORMS + POSTS + "attn_gate=Q,D ", PICKED), dict(
        hd=32, layers=5, shexp=2, std=1.0, kv={
            **DENSE_FIRST, "expert_weights_norm": True, "expert_weights_scale": 1.7, "attention.sliding_window": "W",
            "rope.freq_base_swa": 500.0})),
    "grok": (NORMS + QKV + "attn_output_norm=D post_ffw_norm=D " + GATED + EXPERTS_X, dict(
        square=True, rope="yarn", kv={
            **MOE, "embedding_scale": 5.0, "logit_scale": 0.7, "attention.output_scale": 0.2,
            "attn_logit_softcapping": 3.0, "final_logit_softcapping": 6.0, "router_logit_softcapping": 30.0,
            "attention.temperature_length": 1024, "rope.scaling.yarn_ext_factor": 0.5,
            "rope.scaling.yarn_attn_factor": 1.0, "rope.scaling.yarn_beta_fast": 10.0,
            "rope.scaling.yarn_beta_slow": 0.5})),
    "grok-1": (NORMS + QKV + "attn_output_norm=D layer_output_norm=D " + EXPERTS, dict(
        of="grok", square=True, kv={"expert_count": "X", "expert_used_count": "U"})),
    "cohere2moe": (_after_dense("attn_norm=D " + QKV), dict(eps="ln", square=True, layers=6, shexp=2, kv={
        **DENSE_FIRST, "logit_scale": 0.5, "attention.sliding_window": "W",
        "expert_weights_norm": True})),
    "cohere2moe-rms": (_after_dense("attn_norm=D " + QKV), dict(of="cohere2moe", square=True, layers=5, kv={
        **DENSE_FIRST, "logit_scale": 0.5, "attention.sliding_window": "W", "expert_shared_count": 1,
        "expert_shared_feed_forward_length": "FS", "expert_gating_func": 1})),
    "bitnet": ("attn_norm=D ffn_norm=D attn_sub_norm=D ffn_sub_norm=F " + QKV + GATED + " ".join(
        f"{n}.scale!=1" for n in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")),
        dict(square=True, tied=True, must_tie=True)),
    "deci": (lambda c, i: (
        ("attn_norm=D " + (QKV.replace("KV", f"{DECI[1][i]}*hd") if DECI[1][i] else "attn_output=D,D ")) * (
            DECI[0][i] > 0) + ("ffn_norm=D " + GATED.replace("F", str(DECI[2][i]))) * (DECI[2][i] > 0)), dict(
        square=True, layers=6, ropes=("freqs",), rope="freqs", kv={
            "attention.head_count": lambda c: DECI[0], "attention.head_count_kv": lambda c: DECI[1],
            "feed_forward_length": lambda c: DECI[2]})),
    "nomic-bert-moe": (lambda c, i: FUSED_B.partition("ffn")[0] + LAST_NORMS + (
        "ffn_gate_inp=X,D ffn_up_exps=X,F,D ffn_down_exps=X,D,F " if i % 2 else "ffn_up+b=F,D ffn_down+b=D,F "), dict(
        BERT, kv={**ENCODER, "expert_count": "X", "expert_used_count": "U", "moe_every_n_layers": 2})),
    "jina-bert-v3": (FUSED_B + LAST_NORMS, dict(BERT, kv=ENCODER)),
    "neo-bert": (NORMS + "attn_qkv=Q+2*KV,D attn_output=D,Q ffn_up=2*F,D ffn_down=D,F ", dict(
        top="token_embd=V,D enc.output_norm=D ", square=True, mha=True, embed=True, kv=ENCODER)),
    "eurobert": (NORMS + QKV + GATED, dict(square=True, embed=True, tied=True, kv={**ENCODER, "pooling_type": 3})),
    "llama-embed": (NORMS + QKV + GATED, dict(hd=32, embed=True, ropes=("freqs",), rope="freqs", kv=ENCODER)),
    "gemma-embedding": (NORMS + QKV + HEAD_NORMS + POSTS + GATED, dict(
        top="token_embd=V,D output_norm=D ", layers=6, hd=32, std=1.0, embed=True, kv={
            **ENCODER, "attention.sliding_window": "W", "rope.freq_base_swa": 1000.0})),
    "gemma-embedding-dense": (NORMS + QKV + HEAD_NORMS + POSTS + GATED, dict(
        of="gemma-embedding", top="token_embd=V,D output_norm=D dense_2=96,D dense_3=D,96 ", layers=6, hd=32, std=1.0,
        embed=True, kv={
            **ENCODER, "attention.sliding_window": "W", "dense_2_feat_in": "D", "dense_2_feat_out": 96,
            "dense_3_feat_in": 96, "dense_3_feat_out": "D"})),
    "hunyuan_vl": (NORMS + QKV + HEAD_NORMS + GATED, dict(hd=32, tied=True, kv={
        "rope.dimension_sections": [4, 4, 4, 4], "rope.scaling.alpha": 20.0, "rope.scaling.type": lambda c: "none",
        "rope.scaling.factor": 1.0})),
    "paddleocr": (NORMS + QKV_B + GATED, dict(hd=32, kv={"rope.dimension_sections": [4, 6, 6, 0]})),
    "llama4": (lambda c, i: NORMS + QKV + (EXPERTS_X + SHARED if i % 2 else GATED), dict(
        hd=32, layers=5, ffs=64, ropes=("freqs",), rope="freqs", kv={**MOE, "interleave_moe_layer_step": 2})),
    "qwen35": (_delta(GATED), dict(DELTA_SIZES, kv={**SSM, "rope.dimension_sections": [3, 3, 2, 0]})),
    "qwen35moe": (_delta(EXPERTS_X + "ffn_gate_inp_shexp=D " + SHARED), dict(DELTA_SIZES, kv={
        **SSM, **MOE, "expert_shared_feed_forward_length": "FS", "rope.dimension_sections": [3, 3, 2, 0]})),
}


def write(tools, name, path, **sizes):
    """The file; its sizes (vocab, embed, ...).  sizes: those of the tools, instead of SMALL ones; kind: of matrices."""
    if str(tools) not in sys.path:
        sys.path.insert(0, str(tools))
    import make_arch_gguf
    if not MORE.keys() <= make_arch_gguf.ARCHS.keys():
        for more, (block, options) in MORE.items():
            make_arch_gguf.arch(more, "", block, **options)
        near = make_arch_gguf.near(1.2, 0.2)
        rules = [(re.compile(name), getattr(make_arch_gguf, rule)(*numbers))
                 for name, rule, *numbers in arch_hybrids.RULES + arch_experts.RULES]
        make_arch_gguf.RULES[:0] = [(re.compile(r"attn_q_norm\.weight$"), _query_norm(near)), *rules]
    make_arch_gguf.gguf = SimpleNamespace(**{**vars(gguf), "GGUFWriter": Writer})
    sizes = sizes if name in ROUND else SMALL | sizes
    if name.startswith("chameleon"):            # llama.cpp hides 8192 ids of pictures
        sizes = sizes | {"vocab": 8320}
    if name.startswith("qwen35"):               # the tools make its inner size twice that of the model
        sizes = {"ranks": 2 * sizes["embd"] // DELTA_SIZES["state"]} | sizes
    return make_arch_gguf.write(name, str(path), **sizes)


def _query_norm(near):
    """Where scores are not scaled, the norms of queries keep them small."""
    return lambda rng, shape, c: near(rng, shape, c) * np.float32(shape[-1] ** -.5 if c.a.arch in UNSCALED else 1)


class Writer(gguf.GGUFWriter):
    """Keys that go without the architecture's name."""

    def add_array(self, key, values):
        super().add_array(key.replace("apertus.xielu", "xielu"), values)

    def add_tensor(self, name, values, **options):
        if "tid2eid" in name:               # a token's experts, in any order
            rng = np.random.default_rng(values.shape[1])
            values = np.argsort(rng.random((values.shape[0], 6)), 1)[:, :values.shape[1]].astype(np.int32)
        super().add_tensor(name, values, **options)


def main(tools, name, folder, named=None):
    sizes = write(tools, name, os.path.join(folder, "model.gguf"))
    from peer_llamacpp import LlamaLib
    if named:
        ids = np.random.default_rng(7).integers(0, sizes.vocab, 7).tolist()
        path, out = (os.path.join(folder, name) for name in ("model.gguf", "named.npz"))
        np.savez(out, ids=ids, **named_values(LlamaLib(), path, ids, name))
        return
    lib = LlamaLib()                        # owns the log callback, so it has to live as long as the library is used
    path, other = (os.path.join(folder, name) for name in ("model.gguf", "moved.gguf"))
    ids = np.random.default_rng(7).integers(0, sizes.vocab, LONG.get(name, 40)).tolist()
    if sizes.embed:
        move(path, other)
        whole, again, pooled = encoded(lib, path, ids), encoded(lib, other, ids), embedding(lib, path, ids)
    elif name.startswith(DIFFUSERS):
        move(path, other)
        whole, again = (lib.load(p).context(n_ctx=256, flash=0, kv=0).decode(ids, all_logits=True)
                        for p in (path, other))
        pooled = ()
    else:
        c = lib.load(path).context(n_ctx=512 if name in LONG else 256, flash=int(name in FLASH), kv=0)
        encode(c, name)
        whole = c.decode(ids, all_logits=True)
        c.reset()
        again = np.concatenate([c.decode([i]) for i in ids])
        pooled = ()
    np.savez(os.path.join(folder, "results.npz"), ids=ids, whole=whole, again=again, pooled=pooled)


def prepared(m):
    """A network, with a text encoded where it looks at one."""
    if hasattr(m, "encode"):
        m.encode(ENCODED)
    return m


def encode(c, name):
    """What the decoder of an encoder-decoder looks at."""
    if name.startswith("t5") and not name.startswith("t5encoder"):
        c.decode_embed(ENCODED)


def named_values(lib, path, ids, name):
    """{"NAME|k": the F32 values}"""
    import ctypes
    c, found = lib.load(path).context(n_ctx=256, flash=0, kv=0, trace=True), {}

    def seen(t):
        x = t.contents
        ne, nb = list(x.ne), list(x.nb)
        if x.type == 0 and x.data and min(ne) > 0:
            raw = ctypes.string_at(x.data, 4 + sum((n - 1) * b for n, b in zip(ne, nb, strict=True)))
            a = np.ndarray(ne[::-1], np.float32, raw, 0, nb[::-1]).copy()
            found.setdefault(x.name.decode(), []).append(a)
    encode(c, name)
    c.on_tensor = seen
    c.decode(ids, all_logits=True)
    return {f"{name}|{k}": a for name, values in found.items() for k, a in enumerate(values)}


def encoded(lib, path, ids):
    m = lib.load(path)
    c = m.context(n_ctx=256, flash=0, kv=0, embeddings=True, pooling=0)
    c.decode_embed(ids)
    return np.ctypeslib.as_array(c.L.llama_get_embeddings(c.h), (len(ids), m.n_embd)).copy()


def embedding(lib, path, ids):
    """Of the whole text, pooled as the file says."""
    m = lib.load(path)
    c = m.context(n_ctx=256, flash=0, kv=0, embeddings=True)
    c.decode_embed(ids)
    return np.ctypeslib.as_array(c.L.llama_get_embeddings_seq(c.h, 0), (m.n_embd,)).copy()


def move(path, other):
    """The file with every weight moved by one float32 step."""
    raw, first = np.fromfile(path, np.uint8), int(gguf.GGUFReader(path).data_offset)
    weights = raw[first:].view(np.float32)
    weights[:] = np.nextafter(weights, np.float32(np.inf))
    raw.tofile(other)


if __name__ == "__main__":
    main(*sys.argv[1:])
