"""Small random-weight mmproj files of every projector, and libmtmd's vectors of a picture.

    python -m helpers.vision_files TOOLS NAME FOLDER    writes text.gguf and vision.gguf, and vectors.npz: `I.K` is the
                                                        K-th field of picture I, `logits` those after PROMPT

A process of its own, so that no two ggml libraries meet.  libmtmd is in the xllamacpp wheel.
"""
import ctypes as C
import os
import sys

import gguf
import numpy as np

from ggjit.models.networks.base.load_options import LoadOptions
from ggjit.models.networks.pictures.senses import vision_of
from helpers import arch_files
from helpers.gguf_files import written
from helpers.vocabularies import CHAR_OF_BYTE

D, FF, HEADS, LAYERS, PATCH, TEXT = 48, 64, 4, 3, 4, arch_files.SMALL["embd"]
SIDE = {"mlp": 24, "llava": 24, "llava16": 24, "gemma3": 32, "idefics3": 16, "pixtral": 96, "mistral3": 96, "qwen2": 24,
        "qwen25": 24, "qwen3": 24, "kimivl": 24, "gemma4": 24, "internvl": 24, "llama4": 24, "resampler": 24,
        "minicpm46": 32, "gemma3nv": 512}
NAMES = tuple(SIDE)
PROJECTOR = {"llava": "mlp", "llava16": "mlp", "mistral3": "pixtral", "qwen2": "qwen2vl_merger",
             "qwen25": "qwen2.5vl_merger", "qwen3": "qwen3vl_merger", "gemma4": "gemma4v", "minicpm46": "minicpmv4_6"}
ACT = {"pixtral": "silu", "mistral3": "silu", "qwen25": "silu", "qwen2": ""}        # others: gelu; "": none is stated
RMS, NO_POSITIONS = ("pixtral", "mistral3", "qwen25", "gemma4"), ("pixtral", "mistral3", "qwen2", "qwen25")
GATED = ("pixtral", "mistral3", "qwen25", "gemma4")
NO_BIAS = ("pixtral", "mistral3", "gemma4")
CLASS_FIRST = ("llava", "llava16", "internvl")      # llama.cpp has that embedding behind the patches
DECODER = {"qwen2": "qwen2vl", "qwen25": "qwen2vl", "qwen3": "qwen3vl", "gemma3nv": "gemma3n"}      # others: llama
N_DEEP, N_QUERIES, N_BUCKETS, N_ROWS = 2, 7, 70, 1024
OWN = {"idefics3": {"projector.scale_factor": 2, "preproc_image_size": 32}, "gemma3": {"projector.scale_factor": 4},
       "mistral3": {"spatial_merge_size": 2}, "qwen25": {"n_wa_pattern": 2},
       "internvl": {"projector.scale_factor": 2}, "llama4": {"projector.scale_factor": 2},
       # libmtmd takes no other width than the decoder's, and image_size / patch_size is its number of vectors
       "gemma3nv": {"embedding_length": TEXT, "patch_size": 2},
       "kimivl": {"projector.scale_factor": 2}, "gemma4": {"projector.scale_factor": 3},
       "minicpm46": {"projector.scale_factor": 4, "wa_layer_indexes": [1]},
       "llava16": {"image_grid_pinpoints": [24, 48, 48, 24, 48, 48, 72, 24, 24, 72],
                   "mm_patch_merge_type": "spatial_unpad"}}
MTMD = "<__media__>"
PROMPT = f"See {MTMD} and {MTMD}: which?"


def picture(n, height, width):
    """uint8 (height, width, 3): a smooth pattern, so that a byte more or less changes little."""
    y, x = np.mgrid[:height, :width]
    waves = [np.sin((k + 1 + n) * x / 9 + y / (5 + k)) for k in range(3)]
    return np.rint(np.stack(waves, 2) * 100 + 128).astype(np.uint8)


PICTURES = [(24, 24), (40, 61), (33, 17), (120, 136)]       # height, width; the last has several windows
# of models whose tiles llama.cpp makes only from a picture: sizes whose tiles are the same there
WHOLE = {"idefics3": PICTURES, "resampler": [(24, 24), (48, 96), (72, 24)],
         "minicpm46": [(32, 32), (64, 128), (96, 32)]}
TOLD = (1, 2)                                   # those of the prompt


def width(name):
    """Of the decoder's vectors."""
    return 128 if name == "resampler" else TEXT


def _tensors(name):
    """{name: shape}"""
    if name == "gemma3nv":
        return _mobilenet()
    gated, biased = name in GATED, name not in NO_BIAS
    bias, norm = ("weight", "bias") if biased else ("weight",), ("weight",) if name in RMS else ("weight", "bias")
    block = {f"attn_{c}": (D, D) for c in ("q", "k", "v", "out")} | {"ffn_up": (FF, D), "ffn_down": (D, FF)}
    if name == "qwen3":
        block = {"attn_qkv": (3 * D, D), **{part: block[part] for part in ("attn_out", "ffn_up", "ffn_down")}}
    block |= {"ffn_gate": (FF, D)} if gated else {}
    out = {f"v.blk.{i}.{part}.{what}": shape[:len(shape) if what == "weight" else 1]
           for i in range(LAYERS) for part, shape in block.items() for what in bias}
    out |= {f"v.blk.{i}.{part}.{what}": (D,) for i in range(LAYERS) for part in ("ln1", "ln2") for what in norm}
    out |= {f"v.blk.{i}.{part}.weight": (D,) for i in range(LAYERS) for part in ("ls1", "ls2") if name == "internvl"}
    out |= {f"v.blk.{i}.{part}.weight": shape for i in range(LAYERS) if name == "gemma4" for part, shape in (
        ("attn_q_norm", (D // HEADS,)), ("attn_k_norm", (D // HEADS,)), ("attn_post_norm", (D,)),
        ("ffn_post_norm", (D,)), ("out_scale", (1,)))}
    out["v.patch_embd.weight"] = (D, 3 * PATCH * PATCH) if name == "llama4" else (D, 3, PATCH, PATCH)
    n_class = int(name in (*CLASS_FIRST, "llama4"))
    n = N_BUCKETS if name in ("resampler", "minicpm46") else SIDE[name] // PATCH
    out |= {"v.patch_embd.weight.1": (D, 3, PATCH, PATCH)} if name.startswith("qwen") else {}
    positions = (2, N_ROWS, D) if name == "gemma4" else (n * n + n_class, D)
    out |= {} if name in NO_POSITIONS else {"v.position_embd.weight": positions}
    out |= {} if name in (*NO_POSITIONS, "llama4", "gemma4") else {"v.patch_embd.bias": (D,)}
    out |= {"v.class_embd": (D,)} if n_class else {}
    before = name in ("pixtral", "mistral3", "llava", "llava16", "llama4")
    after = name not in ("pixtral", "mistral3", "internvl", "gemma4")
    return out | {f"v.{part}.{what}": (D,) for part, has in (("pre_ln", before), ("post_ln", after)) if has
                  for what in norm} | _projector(name)


def _mobilenet():
    """Of every kind of block, one or two."""
    out = {"v.conv_stem.conv.weight": (8, 3, 3, 3), "v.conv_stem.conv.bias": (1, 8, 1, 1),
           "v.conv_stem.bn.weight": (8,)}

    def inverted(at, n_in, n, wide, start=0, mid=0):
        dw = {f"{name}.conv": (c, 1, k, k) for name, c, k in (("dw_start", n_in, start), ("dw_mid", wide, mid)) if k}
        shapes = dw | {"pw_exp.conv": (wide, n_in, 1, 1), "pw_proj.conv": (n, wide, 1, 1)}
        return {f"{at}.{part}.weight": shape for part, shape in shapes.items()} | {
            f"{at}.{part.replace('conv', 'bn')}.weight": shape[:1] for part, shape in shapes.items()}

    def attention(at, n, halved):
        parts = {"query": (16, n, 1, 1), "key": (8, n, 1, 1), "value": (8, n, 1, 1), "output": (n, 16, 1, 1)}
        out = {f"{at}.attn.{part}.proj.weight": shape for part, shape in parts.items()} | {f"{at}.norm.weight": (n,)}
        for part in ("key", "value") if halved else ():
            out |= {f"{at}.attn.{part}.down_conv.weight": (n, 1, 3, 3), f"{at}.attn.{part}.norm.weight": (n,)}
        return out
    for i, n_in in ((0, 8), (1, 12)):
        at = f"v.blk.0.{i}."
        out |= {at + "conv_exp.weight": (16, n_in, 3, 3), at + "bn1.weight": (16,), at + "bn2.weight": (12,),
                at + "conv_pwl.weight": (12, 16, 1, 1)}
    out |= inverted("v.blk.1.0", 12, 16, 24, 3, 5) | inverted("v.blk.1.1", 16, 16, 24, 5)
    out |= inverted("v.blk.2.0", 16, 20, 24, 5, 5) | inverted("v.blk.2.2", 20, 20, 24)
    out |= attention("v.blk.2.1", 20, True)
    out |= inverted("v.blk.3.0", 20, 24, 32, 5, 5) | attention("v.blk.3.1", 24, False)
    out |= {f"v.blk.{at}.layer_scale.gamma": (1, n, 1, 1)
            for at, n in (("1.1", 16), ("2.1", 20), ("2.2", 20), ("3.1", 24))}
    out |= {f"v.msfa.ffn.{part}": shape for part, shape in (
        ("pw_exp.conv.weight", (56, 44, 1, 1)), ("pw_exp.bn.weight", (56,)), ("pw_proj.conv.weight", (TEXT, 56, 1, 1)),
        ("pw_proj.bn.weight", (TEXT,)))}
    return out | {"v.msfa.norm.weight": (TEXT,), "mm.soft_emb_norm.weight": (TEXT,),
                  "mm.input_projection.weight": (TEXT, TEXT)}


def _with_bias(**shapes):
    """Dots of names are written as __."""
    return {f"{name.replace('__', '.')}.{what}": shape[:len(shape) if what == "weight" else 1]
            for name, shape in shapes.items() for what in ("weight", "bias")}


def _projector(name):
    n = {"gemma3": 4}.get(name, 2) ** 2 * D
    if name in ("mlp", "llava", "llava16"):
        return _with_bias(mm__0=(96, D), mm__2=(TEXT, 96)) | ({"v.image_newline": (TEXT,)} if name == "llava16" else {})
    if name == "minicpm46":
        window = {f"v__vit_merger__attn_{c}": (D, D) for c in ("q", "k", "v", "out")}
        return _with_bias(**window, v__vit_merger__ln1=(D,), v__vit_merger__ds_ln=(n,), mm__input_norm=(n,),
                          v__vit_merger__ds_ffn_up=(80, n), v__vit_merger__ds_ffn_down=(D, 80), mm__up=(96, n),
                          mm__down=(TEXT, 96))
    if name.startswith("qwen"):
        deep = {f"v__deepstack__{i}__{part}": shape for i in range(N_DEEP)
                for part, shape in (("norm", (n,)), ("fc1", (n, n)), ("fc2", (TEXT, n)))} if name == "qwen3" else {}
        return _with_bias(mm__0=(n, n), mm__2=(TEXT, n), **deep)
    if name == "resampler":
        w, parts = width(name), ("q", "k", "v", "out")
        return {"resampler.query": (N_QUERIES, w), "resampler.proj.weight": (w, w), "resampler.kv.weight": (w, D),
                "resampler.pos_embed_k": (4, w), **_with_bias(**{f"resampler__attn__{c}": (w, w) for c in parts}),
                **_with_bias(**{f"resampler__ln_{c}": (w,) for c in ("q", "kv", "post")})}
    return {
        "gemma3": {"mm.soft_emb_norm.weight": (D,), "mm.input_projection.weight": (D, TEXT)},
        "idefics3": {"mm.model.fc.weight": (TEXT, n)},
        "pixtral": {"mm.1.weight": (96, D), "mm.1.bias": (96,), "mm.2.weight": (TEXT, 96), "mm.2.bias": (TEXT,),
                    "v.token_embd.img_break": (TEXT,)},
        "mistral3": {"mm.1.weight": (96, D), "mm.2.weight": (TEXT, 96), "mm.input_norm.weight": (D,),
                     "mm.patch_merger.weight": (D, n), "v.token_embd.img_break": (TEXT,)},
        "kimivl": _with_bias(mm__input_norm=(D,), mm__1=(n, n), mm__2=(TEXT, n)),
        "gemma4": {"mm.input_projection.weight": (TEXT, D), "v.std_bias": (D,), "v.std_scale": (D,)},
        "internvl": _with_bias(mm__model__mlp__0=(n,), mm__model__mlp__1=(96, n), mm__model__mlp__3=(TEXT, 96)),
        "llama4": {"mm.model.mlp.1.weight": (96, n), "mm.model.mlp.2.weight": (80, 96),
                   "mm.model.fc.weight": (TEXT, 80)}}[name]


def clip_tensors():
    """{name: array}: LLaVA's with a class embedding, as transformers' CLIP has it; test_vision.py has its results."""
    rng, out, side = np.random.default_rng(9), {}, SIDE["mlp"]

    def put(name, *shape):
        one = len(shape) == 1
        x = rng.standard_normal(shape) * (0.1 if one else 1 / np.prod(shape[1:]) ** 0.5)
        out[name] = (x + (one and "ln" in name and name.endswith("weight"))).astype(np.float32)

    def both(name, *shape):
        put(name + ".weight", *shape)
        put(name + ".bias", shape[0])
    put("v.patch_embd.weight", D, 3, PATCH, PATCH)
    put("v.class_embd", D)
    put("v.position_embd.weight", (side // PATCH) ** 2 + 1, D)
    both("v.pre_ln", D)
    both("v.post_ln", D)
    for i in range(LAYERS):
        for part, *shape in (("attn_q", D, D), ("attn_k", D, D), ("attn_v", D, D), ("attn_out", D, D),
                             ("ffn_up", FF, D), ("ffn_down", D, FF), ("ln1", D), ("ln2", D)):
            both(f"v.blk.{i}.{part}", *shape)
    both("mm.0", 96, D)
    both("mm.2", TEXT, 96)
    return {name: x for name, x in out.items() if not name.startswith("v.post_ln")}


def _for_llamacpp(name, tensor, x):
    """The position of the class embedding comes last; pairs of Kimi-VL's heads that columns turn are before those of
    rows."""
    if name in CLASS_FIRST and "position" in tensor:
        return np.roll(x, -1, 0)
    if name == "kimivl" and (".attn_q." in tensor or ".attn_k." in tensor):
        by_pair = x.reshape(HEADS, D // HEADS // 4, 2, 2, *x.shape[1:])
        return np.ascontiguousarray(by_pair.swapaxes(1, 2)).reshape(x.shape)
    return x


def write(name, path, seed=0, without=(), n_out=None, tensors=None, theirs=False, **keys):
    """The mmproj file; tensors: {name: array} instead of drawn ones, of an activation that the file does not name.
    theirs: as llama.cpp computes it, where it departs from the model."""
    rng, w, n_out = np.random.default_rng(seed), gguf.GGUFWriter(str(path), "clip"), n_out or width(name)
    w.add_bool("clip.has_vision_encoder", True)
    w.add_string("clip.projector_type", PROJECTOR.get(name, name))
    if tensors is None and ACT.get(name, "gelu"):
        w.add_bool(f"clip.use_{ACT.get(name, 'gelu')}", True)
    if name == "resampler":
        w.add_int32("clip.minicpmv_version", 3)
        w.add_uint32("clip.minicpmv_query_num", N_QUERIES)
    values = {"image_size": SIDE[name], "patch_size": PATCH, "embedding_length": D, "feed_forward_length": FF,
              "block_count": LAYERS, "attention.head_count": HEADS, "projection_dim": n_out,
              "attention.layer_norm_epsilon": 1e-5}
    values |= OWN.get(name, {}) | keys
    add = {float: w.add_float32, int: w.add_uint32, list: w.add_array, str: w.add_string}
    for key, value in values.items():
        add[type(value)](f"clip.vision.{key}", value)
    w.add_array("clip.vision.image_mean", [0.5, 0.45, 0.4])
    w.add_array("clip.vision.image_std", [0.3, 0.25, 0.28])
    for tensor, x in (_drawn(rng, name, n_out) if tensors is None else tensors).items():
        if tensor not in without:
            w.add_tensor(tensor, _for_llamacpp(name, tensor, x) if theirs else x)
    return written(w, path)


def _drawn(rng, name, n_out):
    """{name: array}"""
    out = {}
    for tensor, shape in _tensors(name).items():
        shape = tuple(n_out if n == TEXT and not tensor.startswith("v.blk") else n for n in shape)
        one = len(shape) == 1
        x = rng.standard_normal(shape) * (0.1 if one else 1 / np.prod(shape[1:]) ** 0.5)
        named = any(part in tensor for part in ("ln", "norm", "mlp.0", "scale", "bn"))
        is_norm = one and named and tensor.endswith("weight")
        by_channel = ".dw_" in tensor or ".down_conv." in tensor            # libmtmd takes no others
        out[tensor] = (x + is_norm).astype(np.float16 if by_channel and not one else np.float32)
    if name == "kimivl":                # llama.cpp resamples positions in another way; these are the same everywhere
        out["v.position_embd.weight"][:] = out["v.position_embd.weight"][:1]
    if name == "gemma4":                # what goes into and comes out of some matrices is kept within limits
        out |= {f"v.blk.{i}.{part}.{what}": np.full(1, limit, np.float32) for i in range(LAYERS) for part, what, limit
                in (("attn_q", "input_min", -1.5), ("attn_q", "input_max", 1.25), ("ffn_down", "output_max", 0.75))}
    return out


# ---------------------------------------------------------------- libmtmd
class Text(C.Structure):
    _fields_ = [("text", C.c_char_p), ("n", C.c_size_t), ("add_special", C.c_bool), ("parse_special", C.c_bool)]


class Params(C.Structure):
    _fields_ = [("use_gpu", C.c_bool), ("device", C.c_void_p), ("print_timings", C.c_bool), ("n_threads", C.c_int),
                ("image_marker", C.c_char_p), ("media_marker", C.c_char_p), ("flash", C.c_int), ("warmup", C.c_bool),
                ("image_min_tokens", C.c_int), ("image_max_tokens", C.c_int), ("cb_eval", C.c_void_p),
                ("cb_eval_data", C.c_void_p), ("batch_max_tokens", C.c_int32), ("progress", C.c_void_p),
                ("progress_data", C.c_void_p)]


def library(L):
    P = C.c_void_p
    for name, result, args in (
            ("mtmd_context_params_default", Params, ()), ("mtmd_init_from_file", P, (C.c_char_p, P, Params)),
            ("mtmd_bitmap_init", P, (C.c_uint32, C.c_uint32, C.c_char_p)), ("mtmd_input_chunks_init", P, ()),
            ("mtmd_bitmap_init_from_audio", P, (C.c_size_t, C.c_char_p)),
            ("mtmd_tokenize", C.c_int32, (P, P, C.POINTER(Text), C.POINTER(P), C.c_size_t)),
            ("mtmd_input_chunks_size", C.c_size_t, (P,)), ("mtmd_input_chunks_get", P, (P, C.c_size_t)),
            ("mtmd_input_chunk_get_type", C.c_int, (P,)), ("mtmd_input_chunk_get_n_tokens", C.c_size_t, (P,)),
            ("mtmd_helper_eval_chunks", C.c_int32, (P, P, P, C.c_int32, C.c_int32, C.c_int32, C.c_bool, P)),
            ("mtmd_encode_chunk", C.c_int32, (P, P)), ("mtmd_get_output_embd", C.POINTER(C.c_float), (P,))):
        f = getattr(L, name)
        f.restype, f.argtypes = result, args
    return L


def bitmap(L, x):
    """Of a picture, or of float32 samples of a sound."""
    if x.ndim == 1:
        return L.mtmd_bitmap_init_from_audio(len(x), x.tobytes())
    return L.mtmd_bitmap_init(x.shape[1], x.shape[0], x.tobytes())


def chunks_of(L, context, prompt, images):
    """Tokens of a prompt and its pictures and sounds."""
    bitmaps = (C.c_void_p * len(images))(*(bitmap(L, x) for x in images))
    chunks = L.mtmd_input_chunks_init()
    text = Text(prompt.encode(), len(prompt), prompt != MTMD, True)
    assert L.mtmd_tokenize(context, chunks, C.byref(text), bitmaps, len(images)) == 0
    return chunks


def logits(L, context, model, prompt, images):
    """float32 (n_vocab,) after a prompt with pictures or sounds."""
    c, n = model.context(n_ctx=1024, flash=0, kv=0), C.c_int32()
    chunks = chunks_of(L, context, prompt, images)
    assert L.mtmd_helper_eval_chunks(context, c.h, chunks, 0, 0, 512, True, C.byref(n)) == 0
    L.llama_get_logits_ith.restype, L.llama_get_logits_ith.argtypes = C.POINTER(C.c_float), (C.c_void_p, C.c_int32)
    return np.ctypeslib.as_array(L.llama_get_logits_ith(c.h, -1), (model.n_vocab,)).copy()


def vectors(L, context, image, n_out):
    """[float32 (n, n_out)] of each chunk that libmtmd makes of a picture or a sound."""
    chunks, out = chunks_of(L, context, MTMD, [image]), []
    for i in range(L.mtmd_input_chunks_size(chunks)):
        chunk = L.mtmd_input_chunks_get(chunks, i)
        if L.mtmd_input_chunk_get_type(chunk) in (1, 2):
            assert L.mtmd_encode_chunk(context, chunk) == 0
            n = L.mtmd_input_chunk_get_n_tokens(chunk)
            out.append(np.ctypeslib.as_array(L.mtmd_get_output_embd(context), (n, n_out)).copy())
    return out


SPECIAL = ["<s>", "</s>", "<start_of_image>", "<end_of_image>", "<fake_token_around_image>", "<global-img>",
           "[IMG_END]", *(f"<row_{i}_col_{j}>" for i in range(1, 4) for j in range(1, 4)), "<|vision_start|>",
           "<|vision_end|>", "<img>", "</img>", "<image>", "</image>", "<slice>", "</slice>", "<|image_start|>",
           "<|image_end|>", "<|image|>", "<|tile_x_separator|>", "<|tile_y_separator|>", "<|media_start|>",
           "<|media_end|>", "<|image>", "<image|>", "<|audio>", "<audio|>", "<|audio_bos|>", "<|audio_eos|>",
           "[BEGIN_AUDIO]"]


def write_text(tools, path, name="mlp", vocab=300):
    """The small decoder of a vision part, with a vocabulary of bytes and the pictures' tokens."""
    base, arch = f"{path}.base", DECODER.get(name, "llama")
    arch_files.write(tools, arch, base, vocab=vocab, embd=width(name))
    old, w = gguf.GGUFReader(base), gguf.GGUFWriter(str(path), arch)
    for f in old.fields.values():
        if f.name.endswith("n_deepstack_layers"):
            w.add_uint32(f.name, N_DEEP)
            continue
        if not f.name.startswith(("GGUF.", "tokenizer.")) and f.name != "general.architecture":
            w.add_key_value(f.name, f.contents(), f.types[0],
                            f.types[-1] if f.types[0] == gguf.GGUFValueType.ARRAY else None)
    tokens = [CHAR_OF_BYTE[b] for b in range(256)] + SPECIAL
    tokens += [f"<unused{i}>" for i in range(vocab - 1 - len(tokens))] + [2 * CHAR_OF_BYTE[10]]
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("default")
    w.add_token_list(tokens)
    w.add_token_types([1] * 256 + [3] * (vocab - 257) + [1])
    w.add_token_merges([" ".join(2 * CHAR_OF_BYTE[10])])
    w.add_bos_token_id(256)
    w.add_eos_token_id(257)
    for t in old.tensors:
        w.add_tensor(t.name, t.data, raw_dtype=t.tensor_type)
    written(w, path)
    os.remove(base)
    return path


def opened(text, mmproj, n_threads=1, flash=0):
    """(library's owner, model, libmtmd, its context)"""
    from peer_llamacpp import LlamaLib
    lib = LlamaLib()                        # owns the log callback, so it has to live as long as the library is used
    model, L = lib.load(text), library(lib.L)
    params = L.mtmd_context_params_default()
    params.use_gpu, params.warmup, params.n_threads, params.flash = False, False, n_threads, flash
    context = L.mtmd_init_from_file(mmproj.encode(), model.h, params)
    assert context, lib.log[-2000:]
    return lib, model, L, context


def given(name, path):
    """[[pictures that libmtmd gets for one]]: the fields of each, or the picture where llama.cpp makes them."""
    if name in WHOLE:
        return [[picture(n, h, w)] for n, (h, w) in enumerate(WHOLE[name])]
    with vision_of(path, LoadOptions(n_threads=1, reserve=False)) as v:
        return [v.fields(picture(n, h, w)).fields for n, (h, w) in enumerate(PICTURES)]


def main(tools, name, folder):
    text, path, theirs = (os.path.join(folder, f) for f in ("text.gguf", "vision.gguf", "theirs.gguf"))
    write_text(tools, text, name)
    write(name, path)
    write(name, theirs, theirs=True)
    pictures = given(name, path)
    _, model, L, context = opened(text, theirs)
    found, n_out = {}, width(name) * (1 + N_DEEP * (name == "qwen3"))
    for n, fields in enumerate(pictures):
        rows = [v for field in fields for v in vectors(L, context, field, n_out)]
        found |= {f"{n}.{k}": v for k, v in enumerate(rows)}
    told = [pictures[n][0] for n in TOLD]
    found |= {f"told.{k}": x for k, x in enumerate(told)}
    found["logits"] = logits(L, context, model, PROMPT, told)
    np.savez(os.path.join(folder, "vectors.npz"), **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
