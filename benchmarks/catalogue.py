"""Everything that is compared, by section of the table: SECTIONS.  `peers` measures it, tests take works out of it.

    models      speeds as llama-bench's: pp = one prompt from an empty cache, logits of its last token; tg = tokens one
                at a time from an empty cache; KV cache F16
    products    mul_mat, types against columns.  Weights come from memory, activations are small.  onnxruntime
                (MatMulNBits) and OpenVINO have 4 and 8 bits with a scale for 32 elements: next to Q4_0 and Q8_0
    ops         single ops at the sizes that decoding (one row), encoders and prompts have; and ten thousand tiny nodes
    attention   flash attention on a KV cache in which the heads of one token lie side by side.  decode: one query, all
                keys visible; prefill: queries at the end of the context, causal mask; GQA: several query heads on a K/V
                head, MHA: one each
"""
import math

import numpy as np

import ggjit as gg
from benchmarks import synth
from benchmarks.work import Graph, Model, reference_file
from ggjit.models.files.minilm import minilm_path

# ================================================================ models
MODEL_SHAPES = {"tinyllama": ("TinyLlama-1.1B shape", "tinyllama-1.1b"), "smollm": ("SmolLM-135M shape", "smollm-135m"),
                "0.5b": ("0.5B shape", "qwen2.5-0.5b-like")}
MODEL_TYPES = "Q4_0", "Q8_0", "Q4_K_M", "Q6_K", "F16"
DECODE = {"wheel": 1.3, "ik": 1.1, "native": 1.3, "llamafile": None}
PREFILL = {"wheel": 2.0, "native": 2.0, "llamafile": None}
PREFILL_F16 = PREFILL | {"llamafile": 1.0}
N_DECODED = 16


def _models():
    for name, (text, shape) in MODEL_SHAPES.items():
        for type in MODEL_TYPES:
            def file(shape=shape, type=type):
                return synth.model_path(shape, type)
            key, text_of = f"{name}-{type.lower()}", f"{text} {type}"
            large = name == "tinyllama"
            yield Model(key=f"{key}-tg", text=f"{text_of}, decode", targets=DECODE, file=file,
                        measure="tg", n=N_DECODED, share=0.9 if large else None)
            for n in (128, 512):
                yield Model(key=f"{key}-pp{n}", text=f"{text_of}, prompt of {n}", file=file, measure="pp", n=n,
                            targets=PREFILL_F16 if type == "F16" else PREFILL,
                            share=0.75 if large and n == 512 else None, arithmetic="f32" if type == "F16" else "int8",
                            quick=(n == 128 and (name != "0.5b" or type == "Q4_0")) or key == "smollm-q4_0" or large)


def _minilm():
    for n in (16, 64, 256):
        yield Model(key=f"minilm-{n}", text=f"MiniLM F32, length {n}", file=lambda: str(minilm_path()),
                    measure="embed", n=n,
                    targets={"wheel": 2.5, "native": 2.0, "llamafile": None, "onnxruntime": 1.1})


STORIES = reference_file("data", "stories260k", "stories260K-F32.gguf")
MODELS = (*_models(), *_minilm(),
         Model(key="stories260k-tg", text="stories260K F32, decode (overhead)", file=STORIES, measure="tg", n=128,
               targets={"wheel": 3.0, "native": 2.0, "llamafile": None}))


# ================================================================ products
PRODUCT_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
                 "IQ4_NL", "IQ4_XS", "MXFP4")
COLUMNS, QUICK_COLUMNS = (1, 2, 4, 8, 16, 32, 128, 512), (1, 2, 4, 8, 16, 32, 128)
K, M = 2048, 2048
LONG = {4096: 4096, 11008: 4096}                # row length: rows, for one column
PRODUCT_TARGETS = {"wheel": 1.0, "native": 1.0, "llamafile": None}
NBITS = {"onnxruntime": 1.0, "openvino": 1.0}
MOST_NBITS_COLUMNS = 32
STREAMED = ("Q4_0", "Q8_0", "Q4_K", "Q6_K", "F16")      # decoding reads these as fast as memory gives them
# Between ggml's result and ours.  It rounds activations to the same codes, then the scales of blocks of 32 to float16
# (5e-8), for Q4_1 and Q5_1 a block's sum as well (9e-7); other types differ by the order of additions (1e-13).
MAX_NMSE = dict.fromkeys(("Q8_0", "Q4_0", "Q5_0", "IQ4_NL", "MXFP4"), 2e-7) | dict.fromkeys(("Q4_1", "Q5_1"), 2e-6)
SAME_NMSE = 1e-8
NBITS_NMSE = 1e-3               # they round activations in ways of their own
BLAS = {"numpy": 1.0, "torch": 1.0}


def product(type, k, m, n, targets, quick=True):
    def build(new):
        return gg.mul_mat(new.weights(getattr(gg, type), (k, m)), new(gg.F32, (k, n)))
    size = f"n{n}" if (k, m) == (K, M) else f"{k}x{m}-n{n}"
    nbits = NBITS if type in ("Q4_0", "Q8_0") and (k, m) == (K, M) and n <= MOST_NBITS_COLUMNS else {}
    return Graph(key=f"mul_mat-{type.lower()}-{size}", text=f"mul_mat {type} [{k} x {m}], n = {n}",
                 targets=targets | nbits, build=build, cold=True, quick=quick, max_nmse=MAX_NMSE.get(type, SAME_NMSE),
                 peer_nmse=dict.fromkeys(nbits, NBITS_NMSE), share=0.9 if n == 1 and type in STREAMED else None)


PRODUCTS = (*(product(t, K, M, n, PRODUCT_TARGETS | (BLAS if t == "F32" else {}), n in QUICK_COLUMNS or t == "F32")
              for t in PRODUCT_TYPES for n in COLUMNS),
            *(product(t, k, m, 1, PRODUCT_TARGETS, quick=False) for t in PRODUCT_TYPES for k, m in LONG.items()),
            *(product("F32", k, m, n, PRODUCT_TARGETS | BLAS, quick=n == 64) for k, m in ((384, 1536), (1024, 1024))
              for n in (16, 64, 256)))


# ================================================================ ops
PLAIN = {"wheel": 1.0, "native": 1.0, "llamafile": None}
REDUCTION = {"wheel": 1.0, "native": 1.2, "llamafile": None}
ACTIVATION = {"wheel": 1.0, "native": 1.0, "llamafile": None}
N_NODES = 10_000


def op(key, text, build, targets=PLAIN, **more):
    return Graph(key=f"op-{key}", text=text, build=build, targets=targets, **more)


def size(ne):
    return "x".join(map(str, ne))


# ---------------------------------------------------------------- rows: reductions, activations
def _reductions():
    for ne in ((64, 4), (2048, 1), (384, 64), (4096, 512)):
        for name in ("rms_norm", "norm"):
            yield op(f"{name}-{size(ne)}", f"{name} {list(ne)}",
                     lambda new, name=name, ne=ne: getattr(gg, name)(new(gg.F32, ne), 1e-5), REDUCTION)
    for ne in ((16, 8), (64, 64), (64, 64, 12), (32000, 1), (4096, 512)):
        yield op(f"soft_max-{size(ne)}", f"soft_max {list(ne)}", lambda new, ne=ne: gg.soft_max(new(gg.F32, ne)),
                 REDUCTION)
    for n_kv, n, heads in ((256, 1, 32), (512, 128, 8)):
        yield op(f"soft_max-masked-{n_kv}x{n}x{heads}", f"soft_max with mask [{n_kv}, {n}, {heads}]",
                 lambda new, s=(n_kv, n, heads): _masked(new, *s), REDUCTION)


def _masked(new, n_kv, n, heads):
    hidden = np.arange(n_kv)[None, :] > np.arange(n)[:, None] + n_kv - n
    mask = new(gg.F16, (n_kv, n), np.where(hidden, -np.inf, 0.0))
    return gg.soft_max_ext(new(gg.F32, (n_kv, n, heads)), mask, 0.125, 0.0)


def _activations():
    for name, targets in (("gelu", REDUCTION), ("gelu_quick", REDUCTION), ("gelu_erf", REDUCTION),
                          ("silu", ACTIVATION)):
        for ne in ((256, 1), (1536, 64), (4096, 512)):
            yield op(f"{name}-{size(ne)}", f"{name} {list(ne)}",
                     lambda new, name=name, ne=ne: getattr(gg, name)(new(gg.F32, ne)), targets)
    for name, targets in (("swiglu_split", ACTIVATION), ("geglu_split", REDUCTION), ("reglu_split", ACTIVATION)):
        for ne in ((5632, 1), (5632, 128)):
            yield op(f"{name}-{size(ne)}", f"{name} {list(ne)}",
                     lambda new, name=name, ne=ne: getattr(gg, name)(new(gg.F32, ne), new(gg.F32, ne)),
                     targets)


# ---------------------------------------------------------------- positions, copies
def _rope():
    for mode, name in ((0, "normal"), (2, "neox")):
        for d, heads, n in ((64, 32, 1), (128, 32, 1), (128, 32, 128)):
            def build(new, mode=mode, d=d, heads=heads, n=n):
                return gg.rope(new(gg.F32, (d, heads, n)), new(gg.I32, (n,), np.arange(n) + 100), d, mode)
            yield op(f"rope-{name}-{d}x{heads}x{n}", f"rope {name} [{d}, {heads}, {n}]", build)


def _copies():
    ne = (2048, 512)
    for a, b in (("F32", "F16"), ("F16", "F32"), ("F32", "F32"), ("F32", "Q8_0"), ("Q8_0", "F32"), ("F32", "Q4_0")):
        yield op(f"cpy-{a.lower()}-{b.lower()}", f"cpy {a} to {b} {list(ne)}",
                 lambda new, a=a, b=b: gg.cpy(new(getattr(gg, a), ne), new(getattr(gg, b), ne)))
    for type in ("F32", "F16"):
        for axes in ((1, 0, 2, 3), (0, 2, 1, 3), (1, 2, 0, 3), (2, 1, 0, 3)):
            name = "".join(map(str, axes))
            def build(new, type=type, axes=axes):
                return gg.cont(gg.permute(new(getattr(gg, type), (64, 32, 256)), *axes))
            yield op(f"cont-{type.lower()}-{name}", f"cont of permute {axes} {type} [64, 32, 256]", build)
    yield op("cont-small", "cont of permute (0, 2, 1, 3) F32 [64, 4, 8]",
             lambda new: gg.cont(gg.permute(new(gg.F32, (64, 4, 8)), 0, 2, 1, 3)))


def _rows():
    for type in ("F32", "F16", "Q8_0", "Q4_0", "Q6_K"):
        for n in (1, 128):
            def build(new, type=type, n=n):
                return gg.get_rows(new(getattr(gg, type), (2048, 4096)), new(gg.I32, (n,), ids(4096, n)))
            yield op(f"get_rows-{type.lower()}-{n}", f"get_rows {type} [2048, 4096], {n} rows", build)
    for type in ("F32", "F16", "Q8_0"):
        for n in (1, 128):
            def build(new, type=type, n=n):
                return gg.set_rows(new(getattr(gg, type), (1024, 2048)), new(gg.F32, (1024, n)),
                                   new(gg.I64, (n,), ids(2048, n)))
            yield op(f"set_rows-{type.lower()}-{n}", f"set_rows {type} [1024, 2048], {n} rows", build)
    # few rows: branch predictors learn them from run to run; [64, 1024] is what sorting costs
    for ne in ((64, 64), (64, 1024), (512, 64), (32000, 1)):
        def build(new, ne=ne):                      # no two equal: one right answer
            return gg.argsort(new(gg.F32, ne, [ids(ne[0], ne[0], seed) for seed in range(ne[1])]), 1)
        yield op(f"argsort-{size(ne)}", f"argsort {list(ne)}", build)


def _others():
    """Ops that models use seldom."""
    for ne, k in (((2048, 1), 40), ((576, 16), 40), ((2048, 128), 40)):
        def largest(new, ne=ne, k=k):
            return gg.top_k(new(gg.F32, ne, [ids(ne[0], ne[0], seed) for seed in range(ne[1])]), k)
        yield op(f"top_k-{size(ne)}", f"top_k {list(ne)}, k = {k}", largest)
    for name in ("acc", "set"):
        def written(new, name=name):
            a, b = new(gg.F32, (576, 32)), new(gg.F32, (576, 16))
            return getattr(gg, name)(a, b, *a.nb[1:], 0)
        yield op(f"{name}-576x16", f"{name} [576, 16] into [576, 32]", written)
    yield op("upscale-64", "upscale, nearest, [64, 64, 32] to [128, 128, 32]",
             lambda new: gg.upscale(new(gg.F32, (64, 64, 32)), 2, 0))
    yield op("repeat-2048x128", "repeat [2048, 128] to [4096, 128]",
             lambda new: gg.repeat_4d(new(gg.F32, (2048, 128)), 4096, 128, 1, 1))
    yield op("timestep-320x32", "timestep_embedding of 320, 32 steps",
             lambda new: gg.timestep_embedding(new(gg.F32, (32,)), 320, 10000))
    yield op("pad_reflect-576x16", "pad_reflect_1d by 10 and 12, [576, 16]",
             lambda new: gg.pad_reflect_1d(new(gg.F32, (576, 16)), 10, 12))
    yield op("add_id-576x4x16", "add_id [576, 4, 16]", lambda new: gg.add_id(
        new(gg.F32, (576, 4, 16)), new(gg.F32, (576, 8)), new(gg.I32, (4, 16), np.arange(64) % 8)))
    for n in (1, 64):
        def recurrent(new, n=n):                    # small factors: the state must not grow
            x = [np.random.default_rng(i).standard_normal((n, 16, 64)) / (8 if i < 4 else 64) for i in range(6)]
            return gg.rwkv_wkv7(*[new(gg.F32, (64, 16, n), v) for v in x], new(gg.F32, (64 * 64 * 16, 1)))
        yield op(f"rwkv_wkv7-{n}", f"rwkv_wkv7, 16 heads of 64, {n} tokens", recurrent)
    yield op("win_unpart-64", "win_unpart [256, 14, 14, 25] to [256, 64, 64]",
             lambda new: gg.win_unpart(new(gg.F32, (256, 14, 14, 25)), 64, 64, 14))
    yield op("get_rel_pos-14", "get_rel_pos [64, 27], 14", lambda new: gg.get_rel_pos(new(gg.F16, (64, 27)), 14, 14))


def ids(n, k, seed=1):
    return np.random.default_rng(seed).permutation(n)[:k]


# ---------------------------------------------------------------- images
def _images():
    shapes = ((3, 32, 112), (64, 64, 28), (256, 256, 14))           # channels in, out, side
    for ic, oc, side in shapes:
        def patches(new, ic=ic, oc=oc, side=side):
            return gg.im2col(new(gg.F16, (3, 3, ic, oc)), new(gg.F32, (side, side, ic)), 1, 1, 1, 1, 1, 1, True, gg.F16)

        def conv(new, ic=ic, oc=oc, side=side):
            return gg.conv_2d(new(gg.F16, (3, 3, ic, oc)), new(gg.F32, (side, side, ic)), 1, 1, 1, 1, 1, 1)

        def direct(new, ic=ic, oc=oc, side=side):
            return gg.conv_2d_direct(new(gg.F16, (3, 3, ic, oc)), new(gg.F32, (side, side, ic)), 1, 1, 1, 1, 1, 1)
        for name, build in (("im2col", patches), ("conv_2d", conv), ("conv_2d_direct", direct)):
            yield op(f"{name}-{ic}-{oc}-{side}", f"{name} 3x3, {ic} to {oc} channels, {side}x{side}", build,
                     max_nmse=1e-5)
    for kind, name in ((0, "max"), (1, "average")):
        for k, s, side in ((2, 2, 56), (3, 1, 28)):
            yield op(f"pool-{name}-{k}-{side}", f"pool_2d {name} {k}x{k}, {side}x{side}, 64 channels",
                     lambda new, kind=kind, k=k, s=s, side=side: gg.pool_2d(
                         new(gg.F32, (side, side, 64)), kind, k, k, s, s, 0, 0))


def tiny_nodes(new):
    """A chain: x <- x + b, so that no node can start before the one ahead of it."""
    x, b = new(gg.F32, (64,)), new(gg.F32, (64,))
    for _ in range(N_NODES):
        x = gg.add(x, b)
    return x


OPS = (*_reductions(), *_activations(), *_rope(), *_copies(), *_rows(), *_others(), *_images(),
       Graph(key="nodes-10000", text=f"{N_NODES:,} adds of 64 floats, each", build=tiny_nodes, n_nodes=N_NODES,
             targets={"wheel": 3.0, "native": 2.0, "llamafile": None}))


# ================================================================ attention
ATTENTION_TARGETS = {"wheel": 1.3, "native": 1.1, "llamafile": None}
CONTEXTS, QUICK_CONTEXTS = (512, 2048, 8192, 16384), (512, 4096)
PREFILL_BATCH = 128


def attention(what, kind, d, heads, kv_heads, n, n_kv, quick):
    def build(new):
        hidden = np.arange(n_kv)[None, :] > np.arange(n)[:, None] + n_kv - n
        mask = np.where(hidden, -np.inf, 0.0).astype(np.float16)
        type = getattr(gg, kind)
        q, k, v = (gg.permute(new(t, (d, h, rows)), 0, 2, 1, 3) for t, h, rows in (
            (gg.F32, heads, n), (type, kv_heads, n_kv), (type, kv_heads, n_kv)))
        return gg.flash_attn_ext(q, k, v, new(gg.F16, (n_kv, n), mask), 1 / math.sqrt(d))
    return Graph(key=f"flash-{what}-{kind.lower()}-{heads}on{kv_heads}x{d}-kv{n_kv}", build=build, cold=True,
                 text=f"flash attention {what}, {kind}, {heads} heads on {kv_heads} of {d}, kv {n_kv}, n = {n}",
                 targets=ATTENTION_TARGETS, quick=quick, max_nmse=5e-4)


def _grid():
    for kind in ("F16", "Q8_0"):
        for n_kv in sorted({*CONTEXTS, *QUICK_CONTEXTS}):
            quick = n_kv in QUICK_CONTEXTS if kind == "F16" else n_kv == max(QUICK_CONTEXTS)
            for d, heads, kv_heads in ((128, 32, 8), (128, 32, 32), (64, 32, 4)):
                yield attention("decode", kind, d, heads, kv_heads, 1, n_kv, quick)
            for d, heads, kv_heads in ((128, 8, 2), (128, 8, 8), (64, 32, 4)):
                yield attention("prefill", kind, d, heads, kv_heads, PREFILL_BATCH, n_kv, quick)


ATTENTION = tuple(_grid())


SECTIONS = {"models": MODELS, "products": PRODUCTS, "ops": OPS, "attention": ATTENTION}
GRAPHS = {w.key: w for works in SECTIONS.values() for w in works if isinstance(w, Graph)}
