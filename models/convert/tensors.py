"""How tensors change between a Hugging Face folder and a GGUF file.  Nothing is copied here: a change is a way to look
at the mapped file (a slice, another order of axes), and the numbers are read in pieces when they are written.

    LLaMA's q and k     rows of a head in halves -> in pairs, since RoPE turns neighbours in GGUF
    q, k, v of a head   one after the other -> all of q, all of k, all of v
    gate and up in one  -> two tensors
    experts             one matrix each -> one tensor of all
    Gemma's norms       w -> w + 1;     Mamba's A_log -> -exp(A_log)

A change is a function (Config, name, array) -> [ConvertedTensor].
"""
import dataclasses
import itertools
import re
from collections.abc import Callable

import numpy as np

STACKED = re.compile(r"(.*\.experts|.*\.[qk]_layernorm\.norms)\.(\d+)((?:\.\w+)?\.weight)")


@dataclasses.dataclass(frozen=True)
class ConvertedTensor:
    """A tensor of the new file, or one of those that are stacked.

    name: as the folder or GGUF has it.  views: arrays whose numbers in order are the tensor's.  values: function of
    float32 numbers, or None.  index: its place among those of that name, None: it is alone.
    """
    name: str
    shape: tuple
    views: tuple
    values: Callable | None = None
    index: int | None = None


def same(name, x, values=None):
    """The tensor unchanged; of an expert, or the norm of one head, with its number."""
    one = STACKED.fullmatch(name)
    if one:
        return [ConvertedTensor(one[1].removesuffix(".norms") + one[3], x.shape, (x,), values, int(one[2]))]
    return [ConvertedTensor(name, x.shape, (x,), values)]


def unchanged(c, name, x):
    return same(name, x)


def chain(*changes):
    """A change made of several: the first that does not return None decides.  None: the tensor is left alone."""
    def change(c, name, x):
        return next((made for f in changes if (made := f(c, name, x)) is not None), None) or same(name, x)
    return change


# ---------------------------------------------------------------- views
def paired(x, n_heads):
    """Reorder the rows of every head: from halves that rotate together to neighbouring pairs."""
    return x.reshape(n_heads, 2, -1, *x.shape[1:]).swapaxes(1, 2)


def by_groups(x, n_groups, sizes):
    """[view of the rows of each kind]: every group has sizes[0] rows of the first, sizes[1] of the second and so on."""
    grouped = x.reshape(n_groups, sum(sizes), *x.shape[1:])
    ends = list(itertools.accumulate(sizes))
    return [grouped[:, end - n:end] for n, end in zip(sizes, ends, strict=True)]


def rows(name, x, view):
    """ConvertedTensor of a view that orders the rows of x again, or takes some of them."""
    return ConvertedTensor(name, (view.size // max(1, x[:1].size), *x.shape[1:]), (view,))


def halves(x, axis):
    """The first and the second half along an axis, counted from the end."""
    n = x.shape[axis] // 2
    whole = (slice(None),) * (x.ndim + axis)
    return x[(*whole, slice(None, n))], x[(*whole, slice(n, None))]


def plus_one(x):
    return x + np.float32(1)


def minus_exp(x):
    return -np.exp(x)


# ---------------------------------------------------------------- changes of more than one family
def pairs_change(c, name, x):
    """Queries and keys whose RoPE turns neighbours."""
    for part, names in (("q_proj", ("num_attention_heads",)), ("k_proj", ("num_key_value_heads",
                                                                          "num_attention_heads"))):
        if name.endswith((f"{part}.weight", f"{part}.bias")):
            return [ConvertedTensor(name, x.shape, (paired(x, c[names]),))]
    return None


def roberta_change(c, name, x):
    """Leave out the rows of position embeddings that no token has: RoBERTa counts positions from the padding id + 1."""
    if name != "embeddings.position_embeddings.weight":
        return None
    first = c["pad_token_id"] + 1
    return [ConvertedTensor(name, (len(x) - first, *x.shape[1:]), (x[first:],))]


def norms_change(c, name, x):
    """Norms whose weights are stored minus 1."""
    return same(name, x, plus_one) if name.endswith("norm.weight") else None


def gemma3n_change(c, name, x):
    """Matrices of the streams in one tensor; tokens without an embedding for every layer have zeros."""
    stream = re.fullmatch(r"(.*\.altup_(?:unembed_)?projections)\.(\d+)(\.weight)", name)
    if stream:
        return [ConvertedTensor(stream[1] + stream[3], x.shape, (x,), None, int(stream[2]))]
    if name.endswith("correct_output_scale"):
        return same(name + ".weight", x)
    if name.endswith("embed_tokens_per_layer.weight") and len(x) < c["vocab_size"]:
        missing = np.broadcast_to(x.dtype.type(0), (c["vocab_size"] - len(x), x.shape[1]))
        return [ConvertedTensor(name, (c["vocab_size"], x.shape[1]), (x, missing))]
    return None


def gemma4_change(c, name, x):
    """Gemma 4's names of factors: of the router's input, of the experts' results, of a layer's result."""
    for old, new in ((".router.scale", ".router.proj.scale"), (".router.per_expert_scale", ".experts.down_proj.scale")):
        if name.endswith(old):
            return same(name.removesuffix(old) + new, x)
    if name.endswith((".layer_scalar", ".experts.gate_up_proj", ".experts.down_proj")):
        return same(name + ".weight", x)
    return gemma3n_change(c, name, x)


def transposed(*suffixes):
    """Transpose matrices that are stored with a row for each input."""
    def change(c, name, x):
        return same(name, x.T) if name.endswith(suffixes) else None
    return change


def fused_qkv(c, name, x):
    """BLOOM and GPT-NeoX: query, key and value of each head follow each other."""
    if "query_key_value" not in name:
        return None
    n = c["num_attention_heads", "n_head"]
    views = by_groups(x, n, [x.shape[0] // n // 3] * 3)
    return [ConvertedTensor(name, x.shape, tuple(views))]


def falcon_heads_kv(c):
    """Heads of keys: one for all queries, but where the file says that there are more."""
    if c.get("n_head_kv") or c.get("new_decoder_architecture") or not c.get("multi_query", default=True):
        return c["num_kv_heads", "n_head_kv", "num_attention_heads"]
    return 1


def falcon_qkv(c, name, x):
    """Falcon: every group of heads has its queries, one key and one value."""
    if "query_key_value" not in name:
        return None
    n_kv = falcon_heads_kv(c)
    d = c["hidden_size"] // c["num_attention_heads", "n_head"]
    return [ConvertedTensor(name, x.shape, tuple(by_groups(x, n_kv, [x.shape[0] // n_kv - 2 * d, d, d])))]


def internlm_qkv(c, name, x):
    """InternLM 2: as Falcon, with queries and keys in halves; three tensors."""
    if ".wqkv." not in name:
        return None
    n, n_kv = c["num_attention_heads"], c["num_key_value_heads"]
    d = x.shape[0] // (n + 2 * n_kv)
    q, k, v = by_groups(x, n_kv, [n // n_kv * d, d, d])

    def halved(part, per_group):
        return part.reshape(n_kv, per_group, 2, d // 2, *x.shape[1:]).swapaxes(2, 3)
    layer = name.split(".attention.")[0] + ".self_attn."
    return [rows(layer + part + "_proj.weight", x, view) for part, view in (
        ("q", halved(q, n // n_kv)), ("k", halved(k, 1)), ("v", v))]


def ernie_fused(c, name, x):
    """ERNIE 4.5 of Paddle: q, k and v in one tensor, gate and up in one."""
    if "qkv_proj" in name:
        n, n_kv, d = c["num_attention_heads"], c["num_key_value_heads"], c.head_dim
        parts = np.split(x, [n * d, (n + n_kv) * d])
        return [ConvertedTensor(name.replace("qkv_proj", f"{p}_proj"), v.shape, (v,))
                for p, v in zip("qkv", parts, strict=True)]
    if "up_gate_proj" in name:
        return [ConvertedTensor(name.replace("up_gate_proj", f"{p}_proj"), v.shape, (v,)) for p, v in zip(
            ("gate", "up"), halves(x, -len(x.shape)), strict=True)]
    return None


def granite_experts(c, name, x):
    """Granite: gate and up in one tensor, of all experts and of the shared one."""
    for part, kind in (("block_sparse_moe.input_linear", "_exps"), ("shared_mlp.input_linear", "_shexp")):
        if name.endswith(part + ".weight"):
            suffix = kind if c.n_expert else ""
            layer = name.split(".")[2]
            return [ConvertedTensor(f"blk.{layer}.ffn_{p}{suffix}.weight", v.shape, (v,)) for p, v in zip(
                ("gate", "up"), halves(x, -2), strict=True)]
    if name.endswith("shared_mlp.output_linear.weight") and not c.n_expert:
        return same(f"blk.{name.split('.')[2]}.ffn_down.weight", x)
    return None


def fused_experts(c, name, x):
    """All experts in one tensor, gate and up too."""
    stem = name.removesuffix(".weight")
    if stem.endswith(".mlp.experts.down_proj"):
        return same(stem + ".weight", x)
    if stem.endswith(".mlp.experts.gate_up_proj"):
        return [ConvertedTensor(stem.replace("gate_up_proj", f"{p}_proj.weight"), v.shape, (v,)) for p, v in zip(
            ("gate", "up"), halves(x, -2), strict=True)]
    return None


def gpt_oss_change(c, name, x):
    """Experts: transpose their matrices, whose rows of gate and up alternate; sinks get a name without suffix."""
    if name.endswith(".sinks"):
        return same(name + ".weight", x)
    if ".mlp.experts." not in name:
        return None
    stem, bias = name.removesuffix("_bias"), name.endswith("_bias")
    suffix, x = (".bias", x) if bias else (".weight", x.swapaxes(-1, -2))
    if stem.endswith("down_proj"):
        return same(stem + suffix, x)
    return [ConvertedTensor(stem.replace("gate_up_proj", f"{p}_proj") + suffix, v.shape, (v,)) for p, v in (
        ("gate", x[:, ::2]), ("up", x[:, 1::2]))]


def latent_change(c, name, x):
    """DeepSeek: split the matrix from latent vector to keys and values; transpose each head of the keys."""
    if name.endswith("e_score_correction_bias"):
        return same(name.replace("_correction_bias", "_correction.bias"), x)
    if not name.endswith("kv_b_proj.weight"):
        return None
    k, v = by_groups(x, c["num_attention_heads"], [c["qk_nope_head_dim"], c["v_head_dim"]])
    k = k.swapaxes(1, 2)
    return [ConvertedTensor(name.replace("kv_b_proj", p), view.shape, (view,))
            for p, view in (("k_b_proj", k), ("v_b_proj", v))]


# ---------------------------------------------------------------- recurrent layers
def mamba_change(c, name, x):
    if name.endswith(".A_log"):
        return same(name, x, minus_exp)
    return same(name, x.reshape(x.shape[0], x.shape[-1])) if "conv1d.weight" in name else None


def mamba2_change(c, name, x):
    name = name.removeprefix("model.") if name.startswith(("model.backbone", "model.lm_head")) else name
    if name.endswith((".A_log", ".D")):
        return same(name, x[:, None], minus_exp if name.endswith(".A_log") else None)
    if name.endswith(".dt_bias"):
        return same(name.replace(".dt_bias", ".dt_proj.bias"), x)
    if name.endswith((".mixer.norm.weight", ".mamba.norm.weight")):
        return same(name, x.reshape(c.ssm_groups, -1))
    return same(name, x.reshape(x.shape[0], x.shape[-1])) if "conv1d.weight" in name else same(name, x)


def short_conv_change(c, name, x):
    return same(name, x.reshape(x.shape[0], x.shape[-1])) if ".conv.conv." in name else None


def qwen3next_change(c, name, x):
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return same(name, x, plus_one)
    if name.endswith(".A_log"):
        return same(name, x, minus_exp)
    if name.endswith(".dt_bias"):
        return same(name.replace(".dt_bias", ".dt_proj.bias"), x)
    if "conv1d" in name:
        return same(name, x.reshape(x.shape[0], x.shape[-1]))
    if not name.endswith("in_proj_qkvz.weight"):
        return None
    n_k, n_v = c["linear_num_key_heads"], c["linear_num_value_heads"]
    d_k, d_v = c["linear_key_head_dim"], n_v // n_k * c["linear_value_head_dim"]
    q, k, v, z = by_groups(x, n_k, [d_k, d_k, d_v, d_v])
    layer = f"blk.{name.split('.')[2]}."
    return [ConvertedTensor(layer + "attn_qkv.weight", (n_k * (2 * d_k + d_v), x.shape[1]), (q, k, v)),
            rows(layer + "attn_gate.weight", x, z)]


RWKV_NAMES = (("blocks", "layers"), ("ffn", "feed_forward"), ("self_attn", "attention"), ("attn", "attention"),
              ("time_mixer.", ""), ("_lora.lora.0.weight", "1.weight"), ("_lora.lora.2.weight", "2.weight"),
              ("_lora.lora.2.bias", "0.weight"), ("feed_forward_norm", "ln2"), ("g_norm", "ln_x"))
RWKV_MIXED = "rwkvag"


def rwkv7_change(c, name, x):
    """Six vectors of mixing in one tensor; low ranks with rows for outputs; layer 0 takes no value of another."""
    transpose = "_lora.lora" not in name
    for old, new in RWKV_NAMES:
        name = name.replace(old, new)
    layer, _, part = name.partition(".attention.")
    number = layer.rpartition(".")[2]
    if part.startswith("x_"):
        if part == "x_x":
            return [ConvertedTensor(f"blk.{number}.time_mix_lerp_fused.weight", (len(RWKV_MIXED), 1, 1, x.shape[-1]),
                                    (x.reshape(len(RWKV_MIXED), -1),))]
        return [ConvertedTensor(f"blk.{number}.time_mix_lerp_fused.weight", (1, 1, x.shape[-1]), (x.reshape(1, 1, -1),),
                                index=RWKV_MIXED.index(part[2]))]
    if part[:2] in ("v0", "v1", "v2") and number == "0":
        return []                       # the network does not use this tensor
    x = x.reshape([n for n in x.shape if n > 1] or [1])
    low = re.fullmatch(r"([wavg])([012])(\.weight)?", part)
    if low:
        x = x.T if low[2] != "0" and transpose else x
        made = same(f"blk.{number}.time_mix_{low[1]}{low[2]}.weight", x)
        return made + same(f"blk.{number}.time_mix_v{low[2]}.weight", x) if number == "0" and low[1] == "a" else made
    if part == "r_k":
        return same(f"blk.{number}.time_mix_r_k.weight", x.reshape(-1))
    return same(name if name.endswith((".weight", ".bias")) else name + ".weight", x)


# ---------------------------------------------------------------- encoders
def gated_layers(c, name, x):
    """Jina BERT: gate and up in one tensor, in either order."""
    for old, order in (("mlp.gated_layers", ("gate", "up")), ("mlp.up_gated_layer", ("up", "gate"))):
        if name.endswith(old + ".weight"):
            layer = name.split(".layer.")[1].split(".")[0]
            return [ConvertedTensor(f"blk.{layer}.ffn_{p}.weight", v.shape, (v,)) for p, v in zip(order, halves(x, -2),
                                                                                      strict=True)]
    return None


# ---------------------------------------------------------------- pieces
def pieces(view, n):
    """The array in order, as arrays of at most n numbers, or of one row."""
    if view.size <= n or view.ndim < 2:
        yield view
        return
    each = view.size // len(view)
    at_once = n // each
    for i in range(0, len(view), max(1, at_once)):
        if at_once:
            yield view[i:i + at_once]
        else:
            yield from pieces(view[i], n)


def float32(x):
    """Numbers of a mapped file as float32; bfloat16 comes as uint16."""
    if x.dtype == np.uint16:
        return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return x.astype(np.float32)
