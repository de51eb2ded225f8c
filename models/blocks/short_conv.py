"""Convolutions over the last few tokens, which recurrent layers keep as a state.

    kept = the last d_conv - 1 inputs of every channel
    out[c, t] = sum_j [kept | x][c, t + j] kernel[j, c]
"""
import dataclasses

import ggjit as gg
from ggjit.models.blocks.description import linear
from ggjit.ops.core.types import BY_NAME

F32 = BY_NAME["f32"]


def state(sizes, k, n):
    """The entry of Piece.cache for a state of n numbers, the k-th of its layer."""
    return f"state {k}", F32, (n, sizes.n_state_rows)


def convolved(g, i, k, x, kernel):
    """x [channels, n_tokens] -> [channels, n_tokens]; the state is number k of layer i."""
    d_conv, channels = kernel.ne[:2]
    t, s = g.n_each, g.n_seqs
    x = gg.permute(gg.view_3d(x, channels, t, s, x.nb[1], t * x.nb[1], 0), 1, 0, 2, 3)
    sx = gg.concat(gg.reshape_3d(g.state(i, k), d_conv - 1, channels, s), x, 0)
    g.keep(i, k, gg.cont(gg.view_3d(sx, d_conv - 1, channels, s, *sx.nb[1:3], t * sx.nb[0])))
    return gg.set_name(gg.reshape_2d(gg.ssm_conv(sx, kernel), channels, g.n_tokens), f"conv-{i}")


@dataclasses.dataclass(frozen=True)
class ShortConv:
    """LFM2's mixer: b, c, x = Win n;  Wout (c * conv(b * x))."""
    d_conv: int

    def cache(self, sizes):
        return [state(sizes, 0, (self.d_conv - 1) * sizes.n_embd)]

    def load(self, loader, p):
        d, p = loader.n_embd, p + "shortconv."
        return {"in": loader.linear(p + "in_proj", d, 3 * d, False), "out": loader.linear(p + "out_proj", d, d, False),
                "conv": loader.want(p + "conv.weight", self.d_conv, d)}

    def build(self, g, n, w, i):
        bcx = linear(w["in"], n)
        d = bcx.ne[0] // 3
        b, c, x = (gg.view_2d(bcx, d, g.n_tokens, bcx.nb[1], j * d * bcx.nb[0]) for j in range(3))
        return linear(w["out"], gg.mul(convolved(g, i, 0, gg.mul(b, x), w["conv"]), c))
