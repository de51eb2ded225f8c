"""The vision part of a Hugging Face folder as llama.cpp's mmproj file, under the names of networks/pictures/vision.py.

    model.vision_tower...q_proj.weight    ->  v.blk.0.attn_q.weight         names come from the gguf package
    visual.blocks.0.attn.qkv.weight       ->  attn_q, attn_k, attn_v
    visual.patch_embed.proj.weight        ->  one matrix for each of two frames

Mean and spread of colours and sizes of pictures are in preprocessor_config.json.
"""
import dataclasses
import math
from collections.abc import Callable

import numpy as np

from ggjit.models.convert.common_metadata import collected
from ggjit.models.convert.config import Config
from ggjit.models.convert.tensors import float32, paired, plus_one
from ggjit.models.convert.vocabulary import read_json
from ggjit.models.convert.whisper import entry
from ggjit.models.files.load_tensors import mapped_numbers
from ggjit.ops.core.errors import ModelError, NotSupported
from ggjit.ops.core.types import BF16, F16, F32

PARTS = ("vision_tower.", "multi_modal_projector.", "visual.", "vision_model.", "connector.")
BREAK = "[IMG_BREAK]"           # the token whose vector stands behind each row of Pixtral's
EMBEDDING = ("embed_tokens.weight",)
ROPE_BASE = 10000.0
N_NUMBERED = 4                  # matrices of a projector have numbers below it


@dataclasses.dataclass(frozen=True)
class Kind:
    """A family's own: metadata(writer, vision Config, whole Config, pictures Config) and change(name, x, vision Config)
    -> [(name, x)]."""
    projector: str
    metadata: Callable
    change: Callable = lambda name, x, v: [(name, x)]
    eps: float = 1e-6           # where the folder does not say


def is_picture_part(name):
    """Is it a tensor of what sees, not of the decoder?"""
    return name.removeprefix("model.").startswith(PARTS)


# ---------------------------------------------------------------- families
def _activation(w, v, names):
    """names: {hidden_act: the key that says it, "" for the one that goes without}."""
    act = v.get("hidden_act", default=next(iter(names)))
    if act not in names:
        raise NotSupported(f"{v.path}: hidden_act of the vision part is {act!r}, possible are {', '.join(names)}")
    if names[act]:
        w.add_bool(f"clip.{names[act]}", True)


def llava(w, v, c, seen):
    _activation(w, v, {"quick_gelu": "", "gelu_pytorch_tanh": "use_gelu", "gelu": "use_gelu"})
    if c.get("vision_feature_select_strategy", default="default") != "default":
        raise NotSupported(f"{c.path}: vision_feature_select_strategy {c['vision_feature_select_strategy']!r}; only "
                           f"\"default\", without the class embedding, has a place in GGUF")
    layer, n = c.get("vision_feature_layer", default=-2), v.n_layer
    if not isinstance(layer, int):
        raise NotSupported(f"{c.path}: vision_feature_layer {layer}; only one layer is possible")
    w.add_array("clip.vision.feature_layer", [layer if layer >= 0 else n + 1 + layer])


def llava_change(name, x, v):
    """The norm behind the last layer is not used."""
    for i, ours in ((1, 0), (2, 2)):
        name = name.replace(f"multi_modal_projector.linear_{i}.", f"mm.{ours}.")
    return [] if ".post_layernorm." in name else [(name, x)]


def pixtral(w, v, c, seen):
    _activation(w, v, {"silu": "use_silu", "gelu": "use_gelu"})
    if (base := v.rope().get("rope_theta", ROPE_BASE)) != ROPE_BASE:
        raise NotSupported(f"{v.path}: rope_theta {base} of the vision part; GGUF's is {ROPE_BASE:g}")
    if c.get("spatial_merge_size") is not None:
        w.add_uint32("clip.vision.spatial_merge_size", c["spatial_merge_size"])


def pixtral_change(name, x, v):
    turned = ".q_proj." in name or ".k_proj." in name
    return [(name, paired(x, v["num_attention_heads"]).reshape(x.shape) if turned else x)]


def gemma3(w, v, c, seen):
    _activation(w, v, {"gelu_pytorch_tanh": "use_gelu"})
    side = math.isqrt(c.get("mm_tokens_per_image", default=seen.get("image_seq_length", default=256)))
    w.add_uint32("clip.vision.projector.scale_factor", v["image_size"] // v["patch_size"] // side)


def gemma3_change(name, x, v):
    """Its norm is stored as what it differs from 1; a head that only other tasks use is left out."""
    if ".head." in name:
        return []
    return [(name.replace("_weight", ".weight"), plus_one(float32(x)) if "soft_emb_norm" in name else x)]


def idefics3(w, v, c, seen):
    _activation(w, v, {"gelu_pytorch_tanh": "use_gelu"})
    w.add_uint32("clip.vision.projector.scale_factor", c.get("scale_factor", default=2))
    longest = seen.get("size", default={}).get("longest_edge", 4 * v["image_size"])
    w.add_uint32("clip.vision.preproc_image_size", longest)


def _pixels(w, seen):
    """The least and the most pixels of a field, where the folder says both; newer ones call them edges."""
    size = seen.get("size", default={})
    edges = {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge")}
    said = [seen.get(name, default=size.get(name, edge)) for name, edge in edges.items()]
    if None not in said:
        for name, n in zip(edges, said, strict=True):
            w.add_uint32(f"clip.vision.image_{name}", n)


def qwen2vl(w, v, c, seen):
    _activation(w, v, {"quick_gelu": ""})
    _pixels(w, seen)
    w.add_uint32("clip.vision.spatial_merge_size", v.get("spatial_merge_size", default=2))


def qwen25vl(w, v, c, seen):
    """Of so many layers, the last looks at everything."""
    _activation(w, v, {"silu": "use_silu"})
    _pixels(w, seen)
    w.add_uint32("clip.vision.spatial_merge_size", v.get("spatial_merge_size", default=2))
    whole = v["fullatt_block_indexes"]
    every = whole[0] + 1
    if whole != list(range(every - 1, v.n_layer, every)):
        raise NotSupported(f"{v.path}: fullatt_block_indexes {whole}; GGUF has one of so many layers")
    w.add_uint32("clip.vision.n_wa_pattern", every)
    w.add_uint32("clip.vision.window_size", v.get("window_size", default=112))


def qwen_change(name, x, v):
    if ".qkv." in name:
        return [(name.replace("qkv", c), part) for c, part in zip("qkv", np.split(x, 3), strict=True)]
    if "patch_embed.proj.weight" in name:
        if x.ndim != 4 or x.shape[1] != 6:
            raise ModelError(f"{v.path}: patches of shape {x.shape}, expected three colours of two frames")
        return [("v.patch_embd.weight", x[:, ::2]), ("v.patch_embd.weight.1", x[:, 1::2])]
    return [(name, x)]


_IDEFICS3 = Kind("idefics3", idefics3)
KINDS = {
    **dict.fromkeys(("LlavaForConditionalGeneration", "clip_vision_model"), Kind("mlp", llava, llava_change, 1e-5)),
    **dict.fromkeys(("Mistral3ForConditionalGeneration", "pixtral"), Kind("pixtral", pixtral, pixtral_change, 1e-5)),
    "Gemma3ForConditionalGeneration": Kind("gemma3", gemma3, gemma3_change),
    **dict.fromkeys(("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"), _IDEFICS3),
    "Qwen2VLForConditionalGeneration": Kind("qwen2vl_merger", qwen2vl, qwen_change),
    "Qwen2_5_VLForConditionalGeneration": Kind("qwen2.5vl_merger", qwen25vl, qwen_change)}


# ---------------------------------------------------------------- the file
def from_hf(gguf, folder, config, sources, kind):
    """(metadata, [Entry]) of the vision part.  sources: {name: leaf} of the whole folder; kind: type of matrices."""
    values = config.get("vision_config")
    name = (config.get("architectures", default=[None]) or [None])[0]
    if not isinstance(values, dict) or name not in KINDS:
        raise NotSupported(f"{config.path}: {name!r} has no vision part that can be converted; those that have: "
                           f"{', '.join(k for k in KINDS if k.startswith(k[0].upper()))}")
    family = KINDS.get(values.get("model_type"), KINDS[name])       # LLaVA's class is Pixtral's, too
    v = Config(config.path, _renamed(values))
    tensors = _tensors(gguf, folder, v, family, sources)
    if family.projector == "pixtral":
        tensors["v.token_embd.img_break"] = _break_vector(folder, sources)
    keys = _metadata(gguf, folder, config, v, family, tensors, kind)
    return keys, [entry(folder, name, x, F32 if "position_embd" in name else kind) for name, x in tensors.items()]


def _renamed(values):
    """Qwen's own names of keys."""
    if "depth" not in values:
        return values
    d = values.get("embed_dim", values["hidden_size"])
    n_ff = int(d * values["mlp_ratio"]) if "mlp_ratio" in values else values["intermediate_size"]
    sizes = {"hidden_size": d, "intermediate_size": n_ff, "num_hidden_layers": values["depth"],
             "num_attention_heads": values["num_heads"]}
    return {"image_size": 560} | values | sizes


def _tensors(gguf, folder, v, family, sources):
    """{GGUF name: array}"""
    names, out = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, max(v.n_layer, N_NUMBERED)), {}
    for name, leaf in sources.items():
        if not is_picture_part(name):
            continue
        bare = name.removeprefix("model.")
        for old, x in family.change(bare, mapped_numbers(leaf), v):
            known = old if old.startswith(("mm.", "v.")) else next(filter(None, (
                names.get_name(form, try_suffixes=(".weight", ".bias")) for form in _forms(old))), None)
            if known is None:
                raise ModelError(f"{folder}: tensor {name!r} has no place in the vision part of a GGUF; the folder "
                                 f"holds another model than config.json says")
            out[known] = x
    if not out:
        raise ModelError(f"{folder}: no tensors of a vision part; the folder holds the decoder alone")
    return out


def _forms(name):
    """A name as several versions of transformers have it."""
    return name, "model." + name, name.replace("vision_tower.", "vision_tower.vision_model.", 1)


def _break_vector(folder, sources):
    """The decoder's vector of the token behind each row of patches."""
    told = read_json(folder / "tokenizer_config.json", needed=False).get("added_tokens_decoder", {})
    added = read_json(folder / "tokenizer.json", needed=False).get("added_tokens", [])
    ids = [int(i) for i, t in told.items() if t.get("content") == BREAK] + \
        [t["id"] for t in added if t.get("content") == BREAK]
    table = next((leaf for name, leaf in sources.items() if name.endswith(EMBEDDING)), None)
    if not ids or table is None:
        raise ModelError(f"{folder}: the token {BREAK} is in neither tokenizer_config.json nor tokenizer.json, or its "
                         f"vector is missing; fetch the folder again")
    return np.array(mapped_numbers(table)[ids[0]])


def _metadata(gguf, folder, config, v, family, tensors, kind):
    w, seen = gguf.GGUFWriter(None, "clip"), {}
    for name in ("preprocessor_config.json", "processor_config.json"):
        found = read_json(folder / name, needed=False)
        seen |= found | found.get("image_processor", {})
    seen = Config(folder / "preprocessor_config.json", seen)
    w.add_type("mmproj")
    w.add_name(folder.resolve().name)
    w.add_file_type({F32: 0, F16: 1, BF16: 32}.get(kind, 7))
    w.add_bool("clip.has_vision_encoder", True)
    w.add_string("clip.projector_type", family.projector)
    for key, value in {"projection_dim": config["hidden_size"], "image_size": v["image_size"],
                       "patch_size": v["patch_size"], "embedding_length": v["hidden_size"],
                       "feed_forward_length": v["intermediate_size"], "block_count": v.n_layer,
                       "attention.head_count": v["num_attention_heads"]}.items():
        w.add_uint32(f"clip.vision.{key}", value)
    w.add_float32("clip.vision.attention.layer_norm_epsilon", v.get("layer_norm_eps", default=family.eps))
    for key in ("image_mean", "image_std"):
        w.add_array(f"clip.vision.{key}", [float(x) for x in seen[key]])
    family.metadata(w, v, config, seen)
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)
    return collected(w)
