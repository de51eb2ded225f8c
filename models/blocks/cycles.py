"""Two stacks of layers (HRM Text), a low and a high one, each of which runs several times over the same text.

    high = embeddings, low = a learned vector
    n_high times:   n_low times  low = norm(low stack(high + low))
                    high = norm(high stack(high + low))

Source: arXiv 2506.21734; transformers' HrmText.
"""
import dataclasses

import ggjit as gg

LOW, HIGH = "low state", "high state"       # in Scope.shared


@dataclasses.dataclass(frozen=True)
class TwoStacks:
    """The Description.frame: what the first pass reads."""

    def load(self, loader):
        return {"low": loader.want("hrm.z_l_init", loader.n_embd)}

    def before(self, g, x, w):
        g.shared[HIGH] = x
        return gg.add(x, w["low"])

    def after(self, g, x, w, rows):
        return x


@dataclasses.dataclass(frozen=True)
class StackEnd:
    """The Block.output_transform of a stack's last layer: its norm, and what the next pass reads."""
    is_low: bool

    def load(self, loader, p):
        return {}

    def build(self, g, y, w, i, picked):
        g.shared[LOW if self.is_low else HIGH] = gg.rms_norm(y, g.eps)
        return gg.add(g.shared[HIGH], g.shared[LOW])
