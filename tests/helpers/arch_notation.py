"""Groups of tensors and settings that entries of several architectures have."""
# the tools' notation: name=ROWS,COLS; +b: with a bias, !: no ".weight" added, ^: only when the output is not tied
NORMS_B = "attn_norm+b=D ffn_norm+b=D "
FUSED_B = "attn_qkv+b=Q+2*KV,D attn_output+b=D,Q ffn_up+b=F,D ffn_down+b=D,F "
NORMS, QKV = "attn_norm=D ffn_norm=D ", "attn_q=Q,D attn_k=KV,D attn_v=KV,D attn_output=D,Q "
GATED = "ffn_gate=F,D ffn_up=F,D ffn_down=D,F "
EXPERTS = "ffn_gate_inp=X,D ffn_gate_exps=X,F,D ffn_up_exps=X,F,D ffn_down_exps=X,D,F "
TOP_B = "token_embd=V,D output_norm+b=D output^=V,D "
MAMBA2 = ("ssm_in=2*I+2*G*S+TR,D ssm_conv1d=I+2*G*S,CK ssm_conv1d.bias!=I+2*G*S ssm_dt.bias!=TR "
          "ssm_a!=TR,1 ssm_d!=TR,1 ssm_norm=G,I//G ssm_out=D,I ")
SSM = {"ssm.conv_kernel": "CK", "ssm.inner_size": "I", "ssm.state_size": "S", "ssm.time_step_rank": "TR",
       "ssm.group_count": "G"}
QKV_B = "attn_q+b=Q,D attn_k+b=KV,D attn_v+b=KV,D attn_output=D,Q "
HEAD_NORMS, POSTS = "attn_q_norm=hd attn_k_norm=hd ", "post_attention_norm=D post_ffw_norm=D "
EXPERTS_X = EXPERTS.replace("F", "FX")
SHARED, PICKED = "ffn_gate_shexp=FS,D ffn_up_shexp=FS,D ffn_down_shexp=D,FS ", "exp_probs_b.bias!=X "
MOE = {"expert_count": "X", "expert_used_count": "U", "expert_feed_forward_length": "FX"}
DENSE_FIRST = {**MOE, "leading_dense_block_count": 1, "expert_shared_count": 2}
DELTA_SIZES = dict(layers=5, least=4, hd=32, rot=.5, state=32, groups=2, ranks=4)
