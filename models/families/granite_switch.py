"""Granite Switch: Granite whose file includes adapters; special tokens in the text switch them on."""
import math

import numpy as np

from ggjit.models.blocks.description import Block, Description
from ggjit.models.blocks.hparams import ROPE_KINDS, ROPE_NORMAL
from ggjit.models.blocks.switched import Switch, SwitchedAttention, SwitchedDense

GAIN = 15.0                             # where the file states none
MAX_ADAPTERS = MAX_RANK = 4096


def granite_switch(hparams):
    sizes, switch = hparams.heads(), _switch(hparams)
    rank = hparams.positive("adapters.lora_rank")
    if rank > MAX_RANK:
        raise hparams.wrong("adapters.lora_rank", rank, f"at most {MAX_RANK}")
    slots = {"rank": rank, "n_slots": len(switch.tokens) + 1}
    rope = hparams.rope(ROPE_NORMAL, sizes["d_head"], kinds=ROPE_KINDS)
    rope = rope if hparams.get("rope.scaling.finetuned", True, bool) else None
    hparams.ignore("expert_shared_feed_forward_length")
    attention = SwitchedAttention(**sizes, rope=rope, scale=hparams.scale("attention.scale"), fused=True, bias=False,
                                  out_bias=False, **slots)
    block = Block(attention, SwitchedDense(hparams.n_ff, bias=False, **slots),
                  residual_scale=hparams.scale("residual_scale"))
    return Description([block] * hparams.n_layer, hparams.eps(), embd_scale=hparams.scale("embedding_scale"),
                       logit_scale=1.0 / hparams.between("logit_scale", 1e-6, 1e6), inputs=(switch,))


def _switch(hparams):
    """The Switch of the metadata.  Errors: ModelError."""
    n, n_vocab = hparams.positive("adapters.count"), hparams.get("vocab_size", None, int)
    if n > MAX_ADAPTERS:
        raise hparams.wrong("adapters.count", n, f"at most {MAX_ADAPTERS}")
    if n_vocab is None:
        hparams.require("token_embd.weight")
        n_vocab = hparams.file.tensors["token_embd.weight"].ne[-1]
    ids = []
    for key in ("activate", "substitute"):
        found = hparams.get(f"adapters.token_ids_{key}", None)
        found = found.tolist() if isinstance(found, np.ndarray) else found
        if not isinstance(found, list) or len(found) != n or not all(type(i) is int and 0 <= i < n_vocab
                                                                     for i in found):
            raise hparams.wrong(f"adapters.token_ids_{key}", found, f"{n} ids of the vocabulary")
        ids.append(tuple(found))
    gain = hparams.get("adapters.router_gain", GAIN, float)
    if not (math.isfinite(gain) and gain > 0):
        raise hparams.wrong("adapters.router_gain", gain, "a number above 0")
    return Switch(n_vocab, *ids, gain)


DECODERS = {"graniteswitch": granite_switch}
