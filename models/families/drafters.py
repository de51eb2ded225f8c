"""Draft models, which propose tokens for a larger model. load_model returns a Drafter for such a file, the value of
`speculative=`."""
import numpy as np

from ggjit.models.blocks.attention import Attention
from ggjit.models.blocks.description import Block
from ggjit.models.blocks.drafts import BorrowedTables, Convolved, DFlash, Eagle3, Gemma4Assistant, Selector
from ggjit.models.blocks.feed_forward import Dense
from ggjit.models.blocks.gemma import LayerInput
from ggjit.models.blocks.hparams import ROPE_NEOX, ROPE_NORMAL
from ggjit.models.families.gemma import POSTS, gemma4_ropes
from ggjit.ops.core.errors import ModelError

BLOCK_SIZE = 16                         # of DFlash, where the file does not say
ACTS = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu"}


def eagle3(hparams):
    layers = _layers(hparams)
    if len(layers) != 3:
        raise hparams.wrong("target_layers", list(layers), "three layers")
    hparams.same("block_count", 1)
    sizes = hparams.heads()
    rope = hparams.rope(ROPE_NORMAL, sizes["d_head"])
    attention = Attention(**sizes, rope=rope, n_in=2 * hparams.n_embd, bias=False, out_bias=False)
    return Eagle3(attention, Dense(hparams.n_ff, bias=False), _tables(hparams), layers,
                  hparams.positive("target_hidden_size"), hparams.eps(),
                  *(bool(hparams.get(f"norm_before_{place}", False)) for place in ("fc", "residual")))


def dflash(hparams):
    if hparams.has("output_hc_fn.weight"):
        raise ModelError(f"{hparams.file.path}: a draft model of DeepSeek V4's blocks is not computed here; "
                         f"speculative=\"lookup\" needs none")
    sizes, has = hparams.heads(), hparams.has
    act = ACTS[hparams.one_of("hidden_activation", ACTS, "silu")]
    rope = hparams.rope(ROPE_NEOX, sizes["d_head"])
    rope = rope if has(rope.factors) else hparams.rope(ROPE_NEOX, sizes["d_head"], factors="")
    hparams.ignore("rope.dimension_sections", "has_confidence_head")
    convolved, selector = _second(hparams)
    blocks = []
    for i, w in enumerate(hparams.windows(0)):
        p, shared = f"blk.{i}.", not has(f"blk.{i}.attn_v.weight")
        attention = Attention(**sizes, rope=rope, window=w, scale=hparams.scale("attention.scale"), qk_norm="rms",
                              sinks=has(p + "attn_sinks.weight"), v_is_k=shared, v_norm=shared, scaled=True,
                              out_scale=hparams.scale("attention.value_scale"))
        posts = {name: tensor for name, tensor in POSTS.items() if has(f"{p}{tensor}.weight")}
        scaled = has(p + "layer_output_scale.weight")
        dense = Dense(hparams.n_ff, act, scaled=True)
        blocks.append(Block(convolved(attention, "attn"), convolved(dense, "ffn"), **posts,
                            output_transform=LayerInput(0, scaled) if scaled else None))
    size = hparams.positive("block_size", BLOCK_SIZE)
    if size < 2:
        raise hparams.wrong("block_size", size, "two tokens or more")
    rank = hparams.file.tensors["markov_w1.weight"].ne[0] if has("markov_w1.weight") else 0
    from_anchor = bool(hparams.get("sample_from_anchor", True)) and rank > 0
    mask_id = hparams.file.get("tokenizer.ggml.mask_token_id", kind=int)
    return DFlash(blocks, _tables(hparams), _layers(hparams), hparams.eps(), size, mask_id,
                  hparams.scale("embedding_scale"), bool(hparams.get("attention.causal", False)), rank,
                  0 if from_anchor else 1, has("conf_proj.weight"), selector, hparams.scale("logit_scale"),
                  hparams.scale("final_logit_softcapping"))


def _second(hparams):
    """(what every piece of a layer is wrapped in, the Selector or None): of DFlash 2."""
    if not hparams.has("selector_hidden.weight"):
        return lambda piece, name: piece, None
    kernel, group = (hparams.positive(f"conv_{name}_size") for name in ("kernel", "group"))
    if hparams.n_embd % group:
        raise hparams.wrong("conv_group_size", group, f"a divisor of {hparams.n_embd}")
    if hparams.has("d2t") or hparams.has("markov_w1.weight"):
        raise ModelError(f"{hparams.file.path}: a selector with d2t or Markov matrices is not computed here; "
                         f"speculative=\"lookup\" needs none")
    return (lambda piece, name: Convolved(piece, name, kernel, group),
            Selector(hparams.positive("selector_rank"), hparams.positive("selector_top_k")))


def gemma4_assistant(hparams):
    """Its layers have queries alone; keys and values are those of the target's last layers."""
    hparams.ignore("attention.shared_kv_layers", "attention.head_count_kv", "embedding_length_per_layer_input",
                   "nextn_predict_layers", "attention.value_length", "attention.value_length_swa")
    windows = hparams.windows(..., default=...)
    sizes = hparams.heads_per_layer(windows)
    rope, near = gemma4_ropes(hparams)
    blocks = [Block(Attention(**s, rope=near if w else rope, window=w, scale=1.0, qk_norm="rms", v_norm=True,
                              kv_of="near" if w else "far", bias=False, out_bias=False),
                    Dense(n_ff, "geglu", bias=False), **POSTS, output_transform=LayerInput(0, True))
              for s, w, n_ff in zip(sizes, windows, hparams.per_layer("feed_forward_length"), strict=True)]
    table = hparams.file.tensors.get("token_embd.weight")
    return Gemma4Assistant(blocks, table.ne[1] if table else 0, hparams.positive("embedding_length_out"), hparams.eps())


def _layers(hparams):
    """The layers of the target that are read."""
    layers = hparams.get("target_layers", None)
    if not isinstance(layers, np.ndarray) or not len(layers) or min(layers.tolist()) < 0:
        raise hparams.wrong("target_layers", layers, "numbers of layers")
    return tuple(layers.tolist())


def _tables(hparams):
    ids = hparams.file.tensors.get("d2t")
    return BorrowedTables(hparams.has("token_embd.weight"), hparams.has("output.weight"), ids.ne[0] if ids else 0)


DRAFTERS = {"eagle3": eagle3, "dflash": dflash, "gemma4-assistant": gemma4_assistant}
