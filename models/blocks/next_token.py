"""Multi-token prediction: a layer after the network that predicts the token after the next.

    x = Weh [norm(embd[t]) | norm(h)]       t: a token, h: the network's last state, normed, before it
    h' = norm(block(x))                     which is the h of the guess after that
    logits = Wout h'

Sources: arXiv 2412.19437 (DeepSeek V3); llama.cpp's graphs of draft-mtp.
"""
import dataclasses
from typing import Any

import ggjit as gg
from ggjit.models.blocks.description import linear


@dataclasses.dataclass(frozen=True)
class NextToken:
    block: Any
    layer: int                          # its number in the file

    def load(self, loader):
        d, p = loader.n_embd, f"blk.{self.layer}."
        n = p + "nextn."
        own_norm = n + "shared_head_norm" if loader.has(n + "shared_head_norm.weight") else "output_norm"
        tables = {name: loader.want(f"{n}{name}.weight", d, loader.n_vocab)
                  for name in ("embed_tokens", "shared_head_head") if loader.has(f"{n}{name}.weight")}
        return self.block.load(loader, p) | tables | {
            "eh_proj": loader.linear(n + "eh_proj", 2 * d, d, False), "enorm": loader.norm(n + "enorm", "rms"),
            "hnorm": loader.norm(n + "hnorm", "rms"), "head_norm": loader.norm(own_norm, "rms")}

    def build(self, g, embd, out, w):
        """(logits, state) after the last token.  embd, out: the network's, where the layer has none of its own."""
        e = gg.get_rows(w.get("embed_tokens", embd), g.leaf["tokens"])
        both = gg.concat(g.norm(e, "rms", w["enorm"]), g.norm(g.leaf["before"], "rms", w["hnorm"]), 0)
        x = self.block.build(g, linear(w["eh_proj"], both), w, self.layer, g.leaf["out_rows"])
        h = gg.set_name(g.norm(x, "rms", w["head_norm"]), "next_state")
        return gg.set_name(gg.mul_mat(w.get("shared_head_head", out), h), "next_logits"), h
