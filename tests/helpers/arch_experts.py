"""Entries of arch_files.py: decoders of experts, with and without windows; others with sizes by layer."""
from helpers.arch_notation import (
    EXPERTS,
    EXPERTS_X,
    GATED,
    HEAD_NORMS,
    MOE,
    NORMS,
    NORMS_B,
    PICKED,
    POSTS,
    QKV,
    QKV_B,
    SHARED,
    TOP_B,
)

VARIANTS = ("step35-limits", "mimo2-fused", "laguna-plain", "granite_swa-moe", "smallthinker-full", "hy_v3-fused",
            "plamo3-full", "glm-dsa-shared", "nanbeige-bare", "hy_v3-nextn", "deepseek2-nextn",
            "hy_v4-sparse", "deepseek4-limits")
# (name of a tensor, rule of the tools and its numbers)
RULES = (r"layer_output_scale", "near", 0.5, 0.2),
WINDOW = {"attention.sliding_window": "W"}
EVERY_FOURTH = {"attention.sliding_window_pattern": lambda c: [i % 4 != 0 for i in range(c.layers)]}
MOE_FIRST = {**MOE, "leading_dense_block_count": 1, "expert_shared_feed_forward_length": "FS",
             "expert_weights_scale": 1.7, "expert_weights_norm": True}
SWITCHES = 28, 69                       # the 10th and the 25th token of the texts of arch_files.py
GRANITE = {"logit_scale": 2.0, "residual_scale": 0.4, "embedding_scale": 5.0, "attention.scale": 0.28}


def _heads(c, i):
    """(heads of queries, of keys) of layers that differ."""
    return (c.heads, c.kvh) if i % 2 else (2 * c.heads, c.heads)


def _by_layer(attention, feed_forward, norms=NORMS):
    """Attention with H heads, K of keys."""
    def block(c, i):
        h, k = _heads(c, i)
        rest = feed_forward(c, i) if callable(feed_forward) else feed_forward
        return norms + attention.replace("H", str(h)).replace("K", str(k)) + rest
    return block


COUNTS = {"attention.head_count": lambda c: [_heads(c, i)[0] for i in range(c.layers)],
          "attention.head_count_kv": lambda c: [_heads(c, i)[1] for i in range(c.layers)]}
QKV_HK = "attn_q=H*hd,D attn_k=K*hd,D attn_v=K*VD,D attn_output=D,H*VD "
FUSED_HK = "attn_qkv=H*hd+K*hd+K*VD,D attn_output=D,H*VD "


def _dense_first(more):
    return lambda c, i: EXPERTS_X + more if i else GATED


STEP = (_by_layer(QKV_HK + HEAD_NORMS + "attn_gate=H,D ", _dense_first(PICKED + SHARED)), dict(
    layers=5, hd=32, must_untie=True, rope="freqs", ropes=("freqs",), kv={
        **MOE, **WINDOW, **EVERY_FOURTH, **COUNTS, "expert_shared_feed_forward_length": "FS", "expert_gating_func": 2,
        "expert_weights_scale": 1.7, "expert_weights_norm": True, "leading_dense_block_count": 1,
        "moe_every_n_layers": 1, "rope.freq_base_swa": 500.0}))
PLAMO3 = (NORMS + "attn_qkv=Q+2*KV,D attn_output=D,Q ffn_up=2*F,D ffn_down=D,F " + HEAD_NORMS +
          POSTS.replace("=", "!="))
NEXT = "nextn.eh_proj=D,2*D nextn.enorm=D nextn.hnorm=D nextn.shared_head_norm=D "
INDEXER = "indexer.k_norm+b=64 indexer.proj=8,D indexer.attn_k=64,D indexer.attn_q_b=8*64,QL "
MLA = ("attn_q_a=QL,D attn_q_a_norm=QL attn_q_b=H*hd,QL attn_k_b=H,KL,NOPE attn_v_b=H,VD,KL attn_kv_a_mqa=KL+R,D "
       "attn_kv_a_norm=KL attn_output=D,H*VD ")
SPARSE = dict(hd=64, vd=32, rot=.5, one_kv=True, shexp=2)
SPARSE_KV = {**MOE, "expert_shared_count": 2, "expert_weights_scale": 1.7, "leading_dense_block_count": 1,
             "expert_weights_norm": True, "attention.kv_lora_rank": "KL", "attention.q_lora_rank": "QL",
             "attention.key_length_mla": "hd", "attention.value_length_mla": "VD", "attention.key_length": "KL+R",
             "attention.value_length": "KL", "attention.indexer.head_count": 8, "attention.indexer.key_length": 64,
             "attention.indexer.top_k": 6}


def _sparse(own):
    """own(i): has layer i an indexer?"""
    return lambda c, i: NORMS + MLA + INDEXER * own(i) + (EXPERTS_X + SHARED + PICKED if i else GATED)


STREAMS_TOP = ("token_embd=V,D output_norm=D output=V,D output_hc_fn=4,4*D output_hc_base=4 "
               "output_hc_scale=1 ")
STREAMS = "".join(f"hc_{piece}_fn=8,4*D hc_{piece}_base=8 hc_{piece}_scale=2 " for piece in ("attn", "ffn"))
HY_V4 = SPARSE_KV | {"expert_gating_func": 2, "hyper_connection.count": 4, "hyper_connection.epsilon": 0.01,
                     "hyper_connection.magnitude": 1.5}


def _streams(sparse):
    return lambda c, i: NORMS + MLA + STREAMS + "attn_sinks=H attn_gate=H*VD,D " + INDEXER * (
        sparse and i % 2 == 0) + (EXPERTS_X + SHARED + PICKED if i else GATED)


RATIOS = 0, 4, 128, 4
POOLED = "{0}_kv={1}*{2},D {0}_gate={1}*{2},D {0}_ape={3},{1}*{2} {0}_norm={2} "


def _deepseek4(c, i):
    """Attention that sees old tokens in runs; the first two layers look experts up by token."""
    mixer = ("attn_sinks=H attn_q_a=QL,D attn_q_a_norm=QL attn_q_b=Q,QL attn_kv=hd,D attn_kv_a_norm=hd "
             "attn_output_a=2*16,Q//2 attn_output_b=D,2*16 ")
    if RATIOS[i]:
        mixer += POOLED.format("attn_compressor", 1 + (RATIOS[i] == 4), "hd", RATIOS[i])
    if RATIOS[i] == 4:
        mixer += POOLED.format("indexer_compressor", 2, 64, 4) + "indexer.proj=8,D indexer.attn_q_b=8*64,QL "
    return NORMS + mixer + STREAMS.replace("=8,", "=24,").replace("base=8", "base=24").replace("scale=2", "scale=3") + (
        EXPERTS_X + SHARED + (PICKED if i > 1 else "ffn_gate_tid2eid=V,U "))


DEEPSEEK4 = {**MOE, "expert_shared_count": 2, "expert_gating_func": 4, "expert_weights_norm": True,
             "expert_weights_scale": 1.7, "attention.q_lora_rank": "QL", "attention.sliding_window": 128,
             "attention.indexer.head_count": 8, "attention.indexer.key_length": 64, "attention.indexer.top_k": 4,
             "attention.output_group_count": 2, "attention.output_lora_rank": 16,
             "attention.compress_rope_freq_base": 500.0, "hyper_connection.count": 4,
             "hyper_connection.sinkhorn_iterations": 3, "hyper_connection.epsilon": 0.01, "hash_layer_count": 2,
             "attention.compress_ratios": lambda c: list(RATIOS), "swiglu_clamp_exp": lambda c: [0.0] * c.layers}


def _dots3_heads(c, i):
    return c.heads if i % 4 == 0 else 2 * c.heads


def _dots3(c, i):
    """Layers with windows have sizes of their own."""
    sizes = {"KL": "KL", "hd": "hd", "NOPE": "NOPE", "VD": "VD"} if i % 4 == 0 else {
        "KL": "64", "hd": "48", "NOPE": "(48-R)", "VD": "24"}
    tensors = MLA.replace("H", str(_dots3_heads(c, i)))
    for name, size in sizes.items():
        tensors = tensors.replace(name, size)
    gate = f"attn_k_norm=R attn_gate={_dots3_heads(c, i)},D "
    return NORMS + tensors + gate + INDEXER * (i % 4 == 0) + (EXPERTS_X + SHARED + PICKED if i else GATED)


MORE = {
    "deepseek32": (_sparse(lambda i: True), dict(SPARSE, rope="yarn", kv=SPARSE_KV | {
        "expert_gating_func": 2, "rope.scaling.yarn_log_multiplier": 0.0707, "expert_group_count": 4,
        "expert_group_used_count": 2})),
    "glm-dsa": (_sparse(lambda i: True), dict(SPARSE, kv=SPARSE_KV)),
    "glm-dsa-shared": (_sparse(lambda i: i % 2 == 0), dict(SPARSE, of="glm-dsa", rope="yarn", kv=SPARSE_KV | {
        "expert_gating_func": 2, "attention.indexer.types": lambda c: [i % 2 == 0 for i in range(c.layers)]})),
    "dots3note": (_dots3, dict(SPARSE, layers=5, kv=SPARSE_KV | {
        **WINDOW, **EVERY_FOURTH, "expert_gating_func": 2, "rope.freq_base_swa": 500.0,
        "attention.head_count": lambda c: [_dots3_heads(c, i) for i in range(c.layers)],
        "attention.indexer.types": lambda c: [i % 4 == 0 for i in range(c.layers)],
        "attention.kv_lora_rank_swa": 64, "attention.key_length_mla_swa": 48, "attention.value_length_mla_swa": 24,
        "attention.key_length_swa": "64+R", "attention.value_length_swa": 64})),
    "mellum": (NORMS + QKV + HEAD_NORMS + EXPERTS_X, dict(layers=5, hd=32, must_untie=True, rope="yarn",
                                                          kv={**MOE, **WINDOW})),
    "smallthinker": (NORMS + QKV + EXPERTS_X, dict(layers=5, hd=32, tied=True, kv={
        **MOE, "expert_gating_func": 2, "attention.sliding_window": 4096, "rope.freq_base_swa": 500.0})),
    "smallthinker-full": (NORMS + QKV + EXPERTS_X, dict(of="smallthinker", layers=5, hd=32, kv={
        **MOE, "expert_gating_func": 1})),
    "mimo2": (lambda c, i: _by_layer(QKV_HK + "attn_sinks=H " * (i % 2), _dense_first(PICKED))(c, i), dict(
        layers=5, hd=64, vd=32, must_untie=True, kv={
            **MOE, **WINDOW, **EVERY_FOURTH, **COUNTS, "rope.freq_base_swa": 500.0, "attention.value_scale": 0.7,
            "attention.value_length": "VD"})),
    "mimo2-fused": (_by_layer(FUSED_HK, _dense_first(PICKED)), dict(
        of="mimo2", layers=5, hd=64, vd=32, rot=.5, must_untie=True, kv={
            **MOE, **WINDOW, **EVERY_FOURTH, **COUNTS, "attention.value_length": "VD"})),
    "step35": STEP,
    "step35-limits": (STEP[0], dict(STEP[1], of="step35", kv=STEP[1]["kv"] | {
        "swiglu_clamp_exp": lambda c: [0.4 * i for i in range(c.layers)],
        "swiglu_clamp_shexp": lambda c: [0.5 + 0.3 * i for i in range(c.layers)]})),
    "laguna": (_by_layer(QKV_HK + HEAD_NORMS + "attn_gate=H,D ", _dense_first(PICKED + SHARED)), dict(
        layers=5, hd=32, used=5, rope="yarn", rot=.5, kv={**MOE_FIRST, **WINDOW, **COUNTS, "rope.freq_base_swa": 500.0,
                                                  "rope.dimension_count_swa": "hd"})),
    "laguna-plain": (NORMS + QKV + HEAD_NORMS + "attn_gate=Q,D " + EXPERTS_X + PICKED + SHARED, dict(
        of="laguna", hd=32, tied=True, kv={**MOE_FIRST, "leading_dense_block_count": 0, "expert_gating_func": 2})),
    "granite_swa": (NORMS + QKV + "attn_sinks=H " + GATED, dict(
        layers=5, tied=True, std=2.0, kv={
            **GRANITE, **WINDOW, **EVERY_FOURTH,
            "attention.rope_pattern": lambda c: [i != 1 for i in range(c.layers)]})),
    "granite_swa-moe": (NORMS + QKV + "attn_sinks=H " + EXPERTS + "ffn_up_shexp=2*FS,D ffn_down_shexp=D,FS ", dict(
        of="granite_swa", hd=32, ff_is_ffx=True, std=2.0, kv={
            **GRANITE, **WINDOW, **EVERY_FOURTH, "expert_count": "X", "expert_used_count": "U",
            "expert_shared_feed_forward_length": "FS"})),
    "graniteswitch": (NORMS + "attn_qkv=Q+2*KV,D attn_output=D,Q " + GATED + "".join(
        f"{name}.lora_a!=3,8,{n_in} {name}.lora_b!=3,{n_out},8 " for name, n_in, n_out in (
            ("attn_q", "D", "Q"), ("attn_k", "D", "KV"), ("attn_v", "D", "KV"), ("attn_output", "Q", "D"),
            ("ffn_gate", "D", "F"), ("ffn_up", "D", "F"), ("ffn_down", "F", "D"))), dict(tied=True, std=2.0, kv={
                **GRANITE, "adapters.count": 2, "adapters.lora_rank": 8, "adapters.router_gain": 15.0,
                "adapters.token_ids_activate": [SWITCHES[0], SWITCHES[1]],
                "adapters.token_ids_substitute": [11, 12]})),
    "hy_v3": (lambda c, i: NORMS + QKV + HEAD_NORMS + (EXPERTS_X + SHARED + "exp_probs_b!=X " if i else GATED), dict(
        hd=32, kv={**MOE_FIRST, "expert_gating_func": 2})),
    "hy_v3-fused": (NORMS + QKV + HEAD_NORMS + EXPERTS_X.replace("ffn_gate_exps=X,FX,D ffn_up_exps=X,FX,D",
                                                                 "ffn_gate_up_exps=X,2*FX,D") + SHARED, dict(
        of="hy_v3", hd=32, tied=True, kv={**MOE_FIRST, "expert_weights_norm": False})),
    "hy_v3-nextn": (lambda c, i: NORMS + QKV + HEAD_NORMS + (
        EXPERTS_X + SHARED + "exp_probs_b!=X " if i else GATED) + NEXT * (i == c.layers - 1), dict(
        of="hy_v3", layers=4, hd=32, kv={**MOE_FIRST, "expert_gating_func": 2, "nextn_predict_layers": 1})),
    "deepseek2-nextn": (lambda c, i: NORMS + MLA + (EXPERTS_X + SHARED + PICKED if i else GATED) + NEXT.replace(
        "nextn.shared_head_norm=D ", "nextn.embed_tokens=V,D nextn.shared_head_head=V,D ") * (i == c.layers - 1), dict(
        SPARSE, of="deepseek2", layers=4, kv={k: v for k, v in SPARSE_KV.items() if "indexer" not in k} | {
            "expert_gating_func": 2, "nextn_predict_layers": 1})),
    "hy_v4": (_streams(False), dict(SPARSE, must_untie=True, top=STREAMS_TOP, kv={
        k: v for k, v in HY_V4.items() if "indexer" not in k})),
    "hy_v4-sparse": (_streams(True), dict(SPARSE, of="hy_v4", must_untie=True, top=STREAMS_TOP, kv=HY_V4 | {
        "attention.indexer.types": lambda c: [i % 2 == 0 for i in range(c.layers)],
        "swiglu_clamp_exp": lambda c: [0.4 * i for i in range(c.layers)]})),
    "deepseek4": (_deepseek4, dict(layers=4, hd=128, rot=.5, one_kv=True, shexp=2, must_untie=True, top=STREAMS_TOP,
                                   rope="yarn", kv=DEEPSEEK4)),
    "deepseek4-limits": (_deepseek4, dict(
        of="deepseek4", layers=4, hd=128, rot=.5, one_kv=True, shexp=2, must_untie=True, top=STREAMS_TOP,
        kv=DEEPSEEK4 | {"swiglu_clamp_exp": lambda c: [0.4 * i for i in range(c.layers)], "hash_layer_count": 2})),
    "arctic": (NORMS + "ffn_norm_exps=D " + QKV + EXPERTS + "ffn_gate=D,D ffn_up=D,D ffn_down=D,D ", dict(
        square=True, ff_is_ffx=True, tied=True, kv={"expert_count": "X", "expert_used_count": "U"})),
    "grovemoe": (NORMS + QKV + HEAD_NORMS + EXPERTS_X + "ffn_gate_chexps=X//2,24,D ffn_up_chexps=X//2,24,D "
                 "ffn_down_chexps=X//2,D,24 ", dict(hd=32, kv={
                     **MOE, "experts_per_group": 2, "expert_group_scale": 0.7,
                     "expert_chunk_feed_forward_length": 24})),
    "openelm": (lambda c, i: _by_layer(FUSED_HK + HEAD_NORMS, f"ffn_gate={64 + 16 * i},D ffn_up={64 + 16 * i},D "
                                                             f"ffn_down=D,{64 + 16 * i} ")(c, i), dict(
        hd=32, must_tie=True, tied=True, kv={**COUNTS, "feed_forward_length": lambda c: [
            64 + 16 * i for i in range(c.layers)]})),
    "plamo3": (PLAMO3, dict(layers=9, hd=32, rope="linear", kv={**WINDOW, "rope.freq_base_swa": 500.0})),
    "plamo3-full": (PLAMO3, dict(of="plamo3", hd=32, tied=True)),
    "maple": (NORMS + QKV + HEAD_NORMS + EXPERTS_X, dict(layers=5, hd=32, must_untie=True, rope="linear", kv={
        **MOE, **WINDOW, **EVERY_FOURTH, "rope.freq_base_swa": 500.0, "rope.dimension_count_swa": 16,
        "swiglu_clamp_exp": lambda c: [0.4 * i for i in range(c.layers)]})),
    "spark2_5": (_by_layer(QKV_HK + "attn_gate=H,D ", GATED), dict(layers=5, hd=32, kv={
        **WINDOW, **EVERY_FOURTH, **COUNTS, "rope.freq_base_swa": 500.0, "rope.dimension_count_swa": 16})),
    "muse-glimmer": (NORMS + QKV + HEAD_NORMS + "attn_gate=Q,D " + POSTS + GATED, dict(
        layers=5, hd=32, must_untie=True, rope="linear", kv={
            **WINDOW, "rope.freq_base_swa": 500.0, "logit_scale": 2.0, "final_logit_softcapping": 6.0})),
    "nanbeige": (NORMS + QKV + GATED, dict(layers=2, hd=32, kv={"num_loops": 3})),
    "nanbeige-bare": (NORMS + QKV + GATED, dict(of="nanbeige", layers=2, hd=32, tied=True, ropes=("freqs",),
                                                rope="freqs", kv={"num_loops": 2, "skip_loop_final_norm": True})),
    "plm": (NORMS + "attn_q=Q,D attn_kv_a_mqa=KL+R,D attn_kv_a_norm=KL attn_kv_b=H*(NOPE+VD),KL attn_output=D,H*VD "
            "ffn_up=F,D ffn_down=D,F ", dict(hd=64, vd=32, rot=.5, mha=True, must_tie=True, tied=True, kv={
                "attention.kv_lora_rank": "KL", "attention.value_length": "VD"})),
    "talkie": (QKV + "attn_q_norm=H,1 layer_output_scale=1 " + GATED, dict(
        top="token_embd=V,D output=V,D ", hd=32, must_untie=True, kv={"logit_scale": 2.0})),
    "jais2": (NORMS_B + QKV_B.replace("output=", "output+b=") +
              "ffn_up+b=F,D ffn_down+b=D,F ", dict(top=TOP_B, eps="ln", square=True)),
}
