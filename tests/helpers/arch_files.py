"""Small random-weight GGUFs of every architecture, and llama.cpp's results on them, by the tools of the reference data.

    python -m helpers.arch_files TOOLS NAME FOLDER          writes model.gguf, and results.npz: ids, llama.cpp's results
    python -m helpers.arch_files TOOLS NAME FOLDER named    writes model.gguf, and named.npz: ids, and `NAME|k`, the
                                                            k-th tensor that has that name in llama.cpp's graph

A process of its own, so that no two ggml libraries meet.  results.npz holds `whole`, the text read at once, and
`again`: token by token, or, of an encoder, with every weight moved by one float32 step.  F32 cache, no flash attention.
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
            "glm4moe-nextn", *arch_hybrids.VARIANTS, *arch_experts.VARIANTS)
ENCODED = [5, 90, 41, 7, 7, 66, 2, 33, 12, 80, 1]         # the text that encoders of encoder-decoders read
SMALL = {"embd": 64, "ff": 96, "vocab": 96}
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
        "rope.dimension_sections": [2, 3, 3, 0], "attention.layer_norm_rms_epsilon": 1e-8})),
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
    **arch_hybrids.MORE,
    **arch_experts.MORE,
    "qwen35": (_delta(GATED), dict(DELTA_SIZES, kv={**SSM, "rope.dimension_sections": [3, 3, 2, 0]})),
    "qwen35moe": (_delta(EXPERTS_X + "ffn_gate_inp_shexp=D " + SHARED), dict(DELTA_SIZES, kv={
        **SSM, **MOE, "expert_shared_feed_forward_length": "FS", "rope.dimension_sections": [3, 3, 2, 0]})),
}


def write(tools, name, path, **sizes):
    """The file; its sizes (vocab, embed, ...).  sizes: those of the tools, instead of SMALL ones; kind: of matrices."""
    if str(tools) not in sys.path:
        sys.path.insert(0, str(tools))
    import make_arch_gguf
    for more, (block, options) in MORE.items():
        if more not in make_arch_gguf.ARCHS:
            make_arch_gguf.arch(more, "", block, **options)
    make_arch_gguf.RULES[:0] = [(re.compile(name), getattr(make_arch_gguf, rule)(*numbers))
                                for name, rule, *numbers in arch_hybrids.RULES + arch_experts.RULES]
    make_arch_gguf.gguf = SimpleNamespace(**{**vars(gguf), "GGUFWriter": Writer})
    sizes = sizes if name in ROUND else SMALL | sizes
    if name.startswith("qwen35"):               # the tools make its inner size twice that of the model
        sizes = {"ranks": 2 * sizes["embd"] // DELTA_SIZES["state"]} | sizes
    return make_arch_gguf.write(name, str(path), **sizes)


class Writer(gguf.GGUFWriter):
    """Keys that go without the architecture's name."""

    def add_array(self, key, values):
        super().add_array(key.replace("apertus.xielu", "xielu"), values)


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
    ids = np.random.default_rng(7).integers(0, sizes.vocab, 40).tolist()
    if sizes.embed:
        move(path, other)
        whole, again = encoded(lib, path, ids), encoded(lib, other, ids)
    else:
        c = lib.load(path).context(n_ctx=256, flash=0, kv=0)
        encode(c, name)
        whole = c.decode(ids, all_logits=True)
        c.reset()
        again = np.concatenate([c.decode([i]) for i in ids])
    np.savez(os.path.join(folder, "results.npz"), ids=ids, whole=whole, again=again)


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


def move(path, other):
    """The file with every weight moved by one float32 step."""
    raw, first = np.fromfile(path, np.uint8), int(gguf.GGUFReader(path).data_offset)
    weights = raw[first:].view(np.float32)
    weights[:] = np.nextafter(weights, np.float32(np.inf))
    raw.tofile(other)


if __name__ == "__main__":
    main(*sys.argv[1:])
