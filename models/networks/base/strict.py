"""Checks that a network uses all of its file; if it ignored tensors or settings, it would be another model.

    file.tensors       less those handed out by Weights.want         -> unused tensors
    file.metadata      less the keys that were read (GGUFFile.get)   -> unread keys of the architecture, of which those
                                                                        in NEUTRAL pass with values that change nothing
"""
from ggjit.ops.core.errors import ModelError

ANY = None
OFF, NONE_OR_ONE, NO, YES = (0,), (0, 1), (False, 0), (True, 1)
# keys of an architecture that are not read, and the values with which they change nothing
NEUTRAL = {
    "tensor_data_layout": ANY, "rope.scaling.finetuned": ANY,
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale", "expert_weights_scale", "rope.scale_linear",
                     "expert_group_count", "expert_group_used_count", "interleave_moe_layer_step"), NONE_OR_ONE),
    **dict.fromkeys(("attention.scale", "attention.clamp_kqv", "attention.max_alibi_bias", "attention.sliding_window",
                     "attn_logit_softcapping", "final_logit_softcapping", "expert_count", "expert_used_count",
                     "expert_shared_count", "leading_dense_block_count", "nextn_predict_layers",
                     "rope.scaling.yarn_log_multiplier"), OFF),
    "expert_gating_func": NONE_OR_ONE,              # 1: softmax
    "expert_weights_norm": YES, "use_parallel_residual": NO,
    "rope.scaling.yarn_beta_fast": (32,), "rope.scaling.yarn_beta_slow": (1,)}
EPSILONS = "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"       # converters write both, one is read
MAX_NAMED = 8


def refuse_unused(file, used, causal):
    """ModelError with the names of tensors and keys that the loaded network does not use.

    used: names of the tensors it does; causal: does its attention look back only?
    """
    tensors = [f"tensor {name!r}" for name in file.tensors if name not in used]
    neutral = NEUTRAL | {"attention.causal": YES if causal else NO}
    prefix, keys = f"{file.arch}.", []
    if any(prefix + key in file.read_keys for key in EPSILONS):
        neutral |= dict.fromkeys(EPSILONS, ANY)
    for key, value in file.metadata.items():
        if key.startswith(prefix) and key not in file.read_keys:
            fits = neutral.get(key.removeprefix(prefix), ())
            if fits is not ANY and not (isinstance(value, int | float) and value in fits):
                keys.append(f"{key} = {value!r}")
    unused = keys + tensors
    if unused:
        more = f" and {len(unused) - MAX_NAMED} more" if len(unused) > MAX_NAMED else ""
        raise ModelError(f"{file.path}: this would be another model, the {file.arch} network does not use "
                         f"{', '.join(unused[:MAX_NAMED])}{more}; convert the model again, or load it all the same "
                         f"with strict=False (--no-strict)")
