"""Small mixture-of-experts llama GGUFs."""
from helpers import tiny_model

E, USED, D, F = 6, 2, tiny_model.DIM, tiny_model.FF
EXPERTS = {"ffn_gate_inp": (E, D), "ffn_gate_exps": (E, F, D), "ffn_up_exps": (E, F, D), "ffn_down_exps": (E, D, F)}
COUNTS = {"expert_count": E, "expert_used_count": USED, "vocab_size": tiny_model.VOCAB}


def write(path, type="F32", more=None, **metadata):
    """more: {name: shape} of further tensors."""
    dense = tuple(f"blk.{i}.ffn_{n}.weight" for i in range(tiny_model.LAYERS) for n in ("gate", "up", "down"))
    shapes = {f"blk.{i}.{n}.weight": s for i in range(tiny_model.LAYERS) for n, s in EXPERTS.items()}
    shapes |= more or {}
    return tiny_model.write(path, type=type, without=dense, shapes=shapes, metadata={**COUNTS, **metadata})
