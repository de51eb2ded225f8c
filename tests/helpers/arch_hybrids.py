"""Entries of arch_files.py: decoders that mix attention with states."""
from helpers.arch_notation import EXPERTS_X, GATED, HEAD_NORMS, MAMBA2, MOE, NORMS, PICKED, POSTS, QKV, SSM

VARIANTS = ("nemotron_h_moe-latent", "falcon-h1-plain")
# (name of a tensor, rule of the tools and its numbers)
RULES = (r"norm$", "near", 1.0, 0.2),
SQUARED = "ffn_up=F,D ffn_down=D,F "
SQUARED_EXPERTS = ("ffn_gate_inp=X,D exp_probs_b.bias!=X ffn_up_exps=X,FX,E ffn_down_exps=X,E,FX ffn_up_shexp=FS,D "
                   "ffn_down_shexp=D,FS ")
LATENT = "ffn_latent_down=24,D ffn_latent_up=D,24 "
SHORT_CONV = "shortconv.conv=D,CK shortconv.in_proj=3*D,D shortconv.out_proj=D,D "
MAMBA1 = ("ssm_in=2*I,D ssm_conv1d+b=I,CK ssm_x=TR+2*S,I ssm_dt=I,TR ssm_dt.bias!=I ssm_dt_norm=TR ssm_b_norm=S "
          "ssm_c_norm=S ssm_a!=I,S ssm_d!=I ssm_out=D,I ")
BY_HEAD = ("ssm_in=2*I,D ssm_conv1d=I,CK ssm_x=64+2*S,I ssm_dt=TR,64 ssm_dt.bias!=TR ssm_dt_norm!=64 ssm_b_norm!=S "
           "ssm_c_norm!=S ssm_a!=TR ssm_d!=TR ssm_out=D,I ")


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
    "plamo2": (lambda c, i: "attn_norm=D ffn_norm=D ffn_up=2*F,D ffn_down=D,F " + POSTS.replace("=", "!=") + (
        "attn_qkv=Q+2*KV,D attn_output=D,Q attn_q_norm=H,hd attn_k_norm=K,hd " if i % 2 else BY_HEAD), dict(
        hd=32, rot=.5, ranks=8, kv={**SSM, "ssm.group_count": 0, "attention.head_count_kv": _every(2)})),
}
