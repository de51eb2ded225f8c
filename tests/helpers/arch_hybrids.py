"""Entries of arch_files.py: decoders that mix attention with states."""
from helpers.arch_notation import EXPERTS_X, GATED, HEAD_NORMS, MAMBA2, MOE, NORMS, PICKED, POSTS, QKV, SHARED, SSM

VARIANTS = ("nemotron_h_moe-latent", "falcon-h1-plain", "rwkv6-parts", "rwkv6qwen2-groups", "arwkv7-plain",
            "kimi-k3-plain", "bailingmoe3-limits", "glm5-next-shared",
            "minimax-01-listed", "t5-gated")
# (name of a tensor, rule of the tools and its numbers)
RULES = ((r"norm$", "near", 1.0, 0.2), (r"time_mix_decay\.", "between", -4.0, 1.0),
         (r"time_mix_first", "near", 0.0, 0.5), (r"^dec\.blk\.\d+\.(cross_)?attn_q\.", "lin", 0.25))
SQUARED = "ffn_up=F,D ffn_down=D,F "
SQUARED_EXPERTS = ("ffn_gate_inp=X,D exp_probs_b.bias!=X ffn_up_exps=X,FX,E ffn_down_exps=X,E,FX ffn_up_shexp=FS,D "
                   "ffn_down_shexp=D,FS ")
LATENT = "ffn_latent_down=24,D ffn_latent_up=D,24 "
SHORT_CONV = "shortconv.conv=D,CK shortconv.in_proj=3*D,D shortconv.out_proj=D,D "
MAMBA1 = ("ssm_in=2*I,D ssm_conv1d+b=I,CK ssm_x=TR+2*S,I ssm_dt=I,TR ssm_dt.bias!=I ssm_dt_norm=TR ssm_b_norm=S "
          "ssm_c_norm=S ssm_a!=I,S ssm_d!=I ssm_out=D,I ")
BY_HEAD = ("ssm_in=2*I,D ssm_conv1d=I,CK ssm_x=64+2*S,I ssm_dt=TR,64 ssm_dt.bias!=TR ssm_dt_norm!=64 ssm_b_norm!=S "
           "ssm_c_norm!=S ssm_a!=TR ssm_d!=TR ssm_out=D,I ")


TIME6 = ("time_mix_w1=5*8,D time_mix_w2=5,D,8 time_mix_lerp_x=1,1,D time_mix_decay=D time_mix_decay_w1=12,D "
         "time_mix_decay_w2=D,12 time_mix_gate=D,D time_mix_output=D,D ")
FUSED_LERP, LERPS = "time_mix_lerp_fused=5,1,1,D ", "".join(f"time_mix_lerp_{m}=1,1,D " for m in "wkvrg")
CHANNEL6 = ("time_mix_first=D//WH,WH time_mix_ln+b=D channel_mix_lerp_k=1,1,D channel_mix_lerp_r=1,1,D "
            "channel_mix_key=F,D channel_mix_value=D,F channel_mix_receptance=D,D ")
RKV = "time_mix_receptance=D,D time_mix_key=D,D time_mix_value=D,D "
RKV_B = RKV.replace("=", "+b=").replace("key+b=D", "key+b=WH").replace("value+b=D", "value+b=WH")
TIME7 = ("time_mix_lerp_fused=6,1,1,D time_mix_w0=D time_mix_w1=16,D time_mix_w2=D,16 time_mix_a0=D time_mix_a1=24,D "
         "time_mix_a2=D,24 time_mix_v0=D time_mix_v1=VR,D time_mix_v2=D,VR time_mix_g1=32,D time_mix_g2=D,32 "
         "time_mix_k_k=D time_mix_k_a=D time_mix_r_k=D time_mix_ln+b=D time_mix_output=D,D " + RKV)
RWKV = dict(eps="ln", heads=0, rot=0, must_untie=True,
            top="token_embd=V,D token_embd_norm+b=D output_norm+b=D output=V,D ")
RWKV_QWEN = dict(heads=0, rot=0, must_untie=True)
RWKV6_KV = {"wkv.head_size": "WH", "time_mix_extra_dim": 8, "time_decay_extra_dim": 12, "token_shift_count": 2}
RWKV7_KV = {"wkv.head_size": "WH", "attention.decay_lora_rank": 16, "attention.iclr_lora_rank": 24,
            "attention.value_residual_mix_lora_rank": "VR", "attention.gate_lora_rank": 32, "token_shift_count": 1}


KDA = ("attn_q=H*32,D attn_k=H*32,D attn_v=H*32,D attn_output=D,H*32 ssm_conv1d_q=H*32,1,CK ssm_conv1d_k=H*32,1,CK "
       "ssm_conv1d_v=H*32,1,CK ssm_beta=H,D ssm_dt.bias!=H*32 ssm_norm=32 ")
KIMI_PAIRS = "ssm_f_a=32,D ssm_f_b=H*32,32 ssm_a!=H,1 ssm_g_a=32,D ssm_g_b=H*32,32 "
MLA = ("attn_kv_a_mqa=KL+R,D attn_kv_a_norm=KL attn_k_b=H,KL,NOPE attn_v_b=H,VD,KL attn_output=D,H*VD ")
WHOLE_Q, LOW_Q = "attn_q=H*hd,D ", "attn_q_a=QL,D attn_q_a_norm=QL attn_q_b=H*hd,QL "
SITU_KV = {"attn_res.block_size": 2, "activation.situ_beta": 1.5, "activation.situ_linear_beta": 0.7,
           "attention.q_lora_rank": "QL", "kda.gate_lower_bound": -3.0, "expert_latent_length": 24}
RES = "attn_res_score=D ffn_res_score=D "
K3_EXPERTS = (EXPERTS_X.replace(",FX,D", ",FX,24").replace("X,D,FX", "X,24,FX") + SHARED + PICKED +
              "ffn_routed_down=24,D ffn_routed_up=D,24 ffn_routed_norm=24 ")


def _mixed(delta, latent, first=GATED, experts=EXPERTS_X + SHARED + PICKED):
    """Two layers of delta rule to one of latent attention."""
    return lambda c, i: NORMS + (latent if i % 3 == 2 else delta) + (experts if i else first)


KIMI = dict(layers=5, least=3, hd=64, vd=32, rot=.5, shexp=2, must_untie=True)
KIMI_KV = {**MOE, "attention.key_length_mla": "hd", "attention.value_length_mla": "VD", "attention.key_length": "KL+R",
           "attention.value_length": "KL", "attention.kv_lora_rank": "KL", "ssm.conv_kernel": "CK",
           "kda.head_dim": 32, "expert_shared_count": 2, "leading_dense_block_count": 1, "expert_gating_func": 2,
           "expert_weights_scale": 1.7,
           "attention.head_count_kv": lambda c: [int(i % 3 == 2) for i in range(c.layers)]}


MHC = "".join(f"hc_{piece}_fn=24,4*D hc_{piece}_base=24 hc_{piece}_scale=3 " for piece in ("attn", "ffn"))
GLM5 = LOW_Q + MLA.replace("KL+R", "KL").replace("NOPE", "hd")
POOL_INDEX = ("indexer.k_norm+b=64 indexer.proj=8,D indexer.attn_k=64,D indexer.attn_q_b=8*64,QL "
              "indexer_compressor_gate=64,D indexer_compressor_ape=4,64 ")
GLM5_KV = {k: v for k, v in KIMI_KV.items() if k != "attention.value_length"} | {
    "attention.key_length": "KL", "attention.value_length": "KL", "attention.q_lora_rank": "QL",
    "rope.dimension_count": 0, "attention.layer_norm_epsilon": 1e-5, "attention.indexer.head_count": 8,
    "attention.indexer.key_length": 64, "attention.indexer.top_k": 12, "attention.indexer.kpool": 4,
    "attention.indexer.kpool_select_tail": True,
    "hyper_connection.count": 4, "hyper_connection.sinkhorn_iterations": 3, "hyper_connection.epsilon": 0.01,
    "expert_weights_norm": True}
LIGHTNING = "attn_norm_2=Q attn_qkv=3*Q,D attn_gate=Q,D attn_output=D,Q "


def _every(n, of=lambda c: c.kvh):
    """A number for the last of every n layers, else 0."""
    return lambda c: [of(c) * (i % n == n - 1) for i in range(c.layers)]


def _nemotron(feed_forward):
    """Mamba 2, feed-forward, attention."""
    return lambda c, i: "attn_norm=D " + (MAMBA2, feed_forward, QKV)[i % 3]


def _nemotron_kv(**more):
    return {**SSM, "attention.head_count_kv": _every(3), **more,
            "feed_forward_length": lambda c: [c.ff * (i % 3 == 1) for i in range(c.layers)]}


NEMOTRON = dict(layers=6, hd=32, ranks=8, rot=0)
NEMOTRON_MOE = {**MOE, "expert_gating_func": 2, "expert_shared_feed_forward_length": "FS", "expert_weights_norm": True,
                "expert_weights_scale": 1.7, "attention.layer_norm_epsilon": 1e-5, "expert_group_count": 4,
                "expert_group_used_count": 2}
T5_LAYER = "attn_norm=D attn_q=Q,D attn_k=Q,D attn_v=Q,D attn_o=D,Q ffn_norm=D "
CROSS = "".join(f"cross_attn_{n} " for n in ("norm=D", "q=Q,D", "k=Q,D", "v=Q,D", "o=D,Q"))


def _t5_top(n_layer, feed_forward):
    """The encoder and what belongs to no layer."""
    layers = ((i, T5_LAYER + feed_forward + "attn_rel_b=32,H " * (i == 0)) for i in range(n_layer))
    encoder = "".join(f"enc.blk.{i}.{t} " for i, tensors in layers for t in tensors.split())
    return "token_embd=V,D output^=V,D enc.output_norm=D dec.output_norm=D " + encoder


def _t5(feed_forward):
    return lambda c, i: T5_LAYER + CROSS + feed_forward + "attn_rel_b=32,H " * (i == 0)


T5 = dict(hd=32, mha=True, rot=0, must_untie=True, pre="dec.blk.")
T5_KV = {"attention.relative_buckets_count": 32, "decoder_start_token_id": 3}
MORE = {
    "nemotron_h": (_nemotron("ffn_up+b=F,D ffn_down+b=D,F "), dict(NEMOTRON, eps="ln", kv=_nemotron_kv())),
    "nemotron_h_moe": (_nemotron(SQUARED_EXPERTS.replace("E", "D")), dict(NEMOTRON, kv=_nemotron_kv(**NEMOTRON_MOE))),
    "nemotron_h_moe-latent": (_nemotron(SQUARED_EXPERTS.replace("E", "24") + LATENT), dict(
        NEMOTRON, of="nemotron_h_moe", kv=_nemotron_kv(**NEMOTRON_MOE | {
            "moe_latent_size": 24, "expert_weights_norm": False,
            "expert_used_count": lambda c: [i % 3 == 1 and 1 + i // 3 or 0 for i in range(c.layers)]}))),
    "falcon-h1": ("attn_norm=D ffn_norm!=D " + QKV + MAMBA2 + GATED, dict(hd=32, ranks=8, kv=SSM)),
    "falcon-h1-plain": ("attn_norm=D ffn_norm!=D " + QKV.replace("=Q,D", "+b=Q,D", 1) + MAMBA2.replace(
        "ssm_norm=G,I//G ", "") + GATED, dict(of="falcon-h1", square=True, ranks=4, tied=True, kv=SSM)),
    "lfm2moe": (lambda c, i: NORMS + (QKV + HEAD_NORMS if i % 3 == 2 else SHORT_CONV) +
                (EXPERTS_X + PICKED if i else GATED), dict(
        top="token_embd=V,D token_embd_norm=D output^=V,D ", layers=6, least=3, square=True, tied=True, conv=3, kv={
            **MOE, "shortconv.l_cache": "CK", "attention.head_count_kv": _every(3), "expert_gating_func": 2,
            "leading_dense_block_count": 1})),
    "jamba": (lambda c, i: NORMS + (MAMBA1 if i % 3 else QKV) + (EXPERTS_X.replace("FX", "F") if i % 2 else GATED),
              dict(layers=5, square=True, rot=0, ranks=8, kv={
                  **{k: v for k, v in SSM.items() if "group" not in k}, "expert_count": "X", "expert_used_count": "U",
                  "attention.head_count_kv": lambda c: [c.kvh * (i % 3 == 0) for i in range(c.layers)]})),
    "rwkv6": ("attn_norm+b=D attn_norm_2+b=D " + RKV + TIME6 + FUSED_LERP + CHANNEL6, dict(
        RWKV, kv=RWKV6_KV | {"rescale_every_n_layers": 2})),
    "rwkv6-parts": ("attn_norm+b=D attn_norm_2+b=D " + RKV + TIME6 + LERPS + CHANNEL6, dict(
        RWKV, of="rwkv6", kv=RWKV6_KV)),
    "rwkv6qwen2": (NORMS + RKV + TIME6 + FUSED_LERP + GATED, dict(RWKV_QWEN, kv=RWKV6_KV | {"token_shift_count": 1})),
    "rwkv6qwen2-groups": (NORMS + RKV_B + TIME6 + FUSED_LERP + GATED, dict(
        RWKV_QWEN, of="rwkv6qwen2", top="token_embd=V,D output_norm+b=D output=V,D ",
        kv=RWKV6_KV | {"token_shift_count": 1, "attention.head_count_kv": 1})),
    "arwkv7": (lambda c, i: NORMS + TIME7.replace("VR", "VR" if i else "24") + GATED, dict(RWKV_QWEN, kv=RWKV7_KV)),
    "arwkv7-plain": (lambda c, i: NORMS + GATED + TIME7.replace("VR", "VR" if i else "24").replace(
        "time_mix_g1=32,D time_mix_g2=D,32 ", "").replace("time_mix_ln+b=D ", "").replace("fused=6", "fused=5"), dict(
        RWKV_QWEN, of="arwkv7", kv=RWKV7_KV | {"attention.gate_lora_rank": 0})),
    "kimi-linear": (_mixed(KDA + KIMI_PAIRS, WHOLE_Q + MLA), dict(KIMI, kv=KIMI_KV | {"attention.value_length": 72})),
    "kimi-k3": (_mixed(KDA + "ssm_f_a=32,D ssm_f_b=H*32,32 ssm_a!=H ssm_g=H*32,D " + RES,
                       LOW_Q + MLA + "attn_gate=H*VD,D " + RES, experts=K3_EXPERTS), dict(
        KIMI, top="token_embd=V,D output_norm=D output=V,D output_res_score=D ",
        kv=KIMI_KV | SITU_KV | {"expert_weights_norm": True})),
    "kimi-k3-plain": (_mixed(KDA + "ssm_f_a=32,D ssm_f_b=H*32,32 ssm_a!=H ssm_g=H*32,D " + RES, WHOLE_Q + MLA + RES),
                      dict(KIMI, of="kimi-k3", top="token_embd=V,D output_norm=D output=V,D output_res_score=D ", kv={
                          k: v for k, v in (KIMI_KV | SITU_KV).items() if "latent" not in k and "lower" not in k})),
    "bailingmoe3": (_mixed(KDA + "ssm_f_a=H*32,D ssm_a!=H,1 ssm_g_a=H*32,D ", LOW_Q + MLA + "attn_gate=H,D "), dict(
        KIMI, kv=KIMI_KV | {"attention.q_lora_rank": "QL", "kda.gate_lower_bound": -3.0, "expert_weights_norm": True})),
    "bailingmoe3-limits": (_mixed(KDA + "ssm_f_a=H*32,D ssm_a!=H,1 ssm_g_a=H*32,D ", WHOLE_Q + MLA + "attn_gate=H,D "),
                           dict(KIMI, of="bailingmoe3", kv=KIMI_KV | {
                               "kda.gate_lower_bound": -3.0, "kda.safe_gate": True,
                               "swiglu_clamp_exp": lambda c: [0.4 * i for i in range(c.layers)],
                               "swiglu_clamp_shexp": lambda c: [0.5 + 0.3 * i for i in range(c.layers)]})),
    "glm5-next": (_mixed(KDA + KIMI_PAIRS.replace("ssm_a!=H,1", "ssm_a!=H") + MHC, GLM5 + POOL_INDEX + MHC), dict(
        KIMI, shexp=2, kv=GLM5_KV)),
    "glm5-next-shared": (lambda c, i: NORMS + (GLM5 + POOL_INDEX * (i != 3) if i % 2 else KDA + KIMI_PAIRS.replace(
        "ssm_a!=H,1", "ssm_a!=H")) + MHC + (EXPERTS_X + SHARED + PICKED if i else GATED), dict(
        KIMI, of="glm5-next", layers=6, kv=GLM5_KV | {
            "attention.head_count_kv": lambda c: [i % 2 for i in range(c.layers)], "kda.gate_lower_bound": -3.0,
            "attention.indexer.types": lambda c: [i != 3 for i in range(c.layers)], "attention.indexer.top_k": 8,
            "swiglu_clamp_exp": lambda c: [0.4 * i for i in range(c.layers)]})),
    "minimax-01": (lambda c, i: NORMS + EXPERTS_X.replace("FX", "F") + (QKV if i % 3 == 2 else LIGHTNING), dict(
        layers=5, hd=32, rot=.5, kv={"expert_count": "X", "expert_used_count": "U", "residual_scale": 1.4,
                                     "full_attention_interval": 3})),
    "minimax-01-listed": (lambda c, i: NORMS + EXPERTS_X.replace("FX", "F") + (LIGHTNING if i % 2 else QKV), dict(
        of="minimax-01", layers=4, hd=32, tied=True, kv={
            "expert_count": "X", "expert_used_count": "U", "residual_scale": 0.7,
            "attention.recurrent_layers": lambda c: [i % 2 == 1 for i in range(c.layers)]})),
    "t5": (_t5(SQUARED + "cross_attn_rel_b=32,H "), dict(T5, layers=3, top=_t5_top(4, SQUARED), kv=T5_KV | {
        "block_count": 4, "decoder_block_count": lambda c: c.layers})),
    "t5-gated": (_t5(GATED), dict(T5, of="t5", top=_t5_top(4, GATED), kv=T5_KV)),
    "plamo2": (lambda c, i: "attn_norm=D ffn_norm=D ffn_up=2*F,D ffn_down=D,F " + POSTS.replace("=", "!=") + (
        "attn_qkv=Q+2*KV,D attn_output=D,Q attn_q_norm=H,hd attn_k_norm=K,hd " if i % 2 else BY_HEAD), dict(
        hd=32, rot=.5, ranks=8, kv={**SSM, "ssm.group_count": 0, "attention.head_count_kv": _every(2)})),
}
