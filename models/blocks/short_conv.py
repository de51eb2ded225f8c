"""Convolutions over the last few tokens, which recurrent layers keep as a state.

    kept = the last d_conv - 1 inputs of every channel
    out[c, t] = sum_j [kept | x][c, t + j] kernel[j, c]
"""
import dataclasses

import ggjit as gg
from ggjit.models.blocks.description import N_SLOTS, linear
from ggjit.ops.core.types import BY_NAME

F32 = BY_NAME["f32"]


def state(k, n):
    """What Piece.cache tells of a state of n numbers, the k-th of its layer."""
    return f"state {k}", F32, (n, N_SLOTS)


def convolved(g, i, k, x, kernel):
    """x [channels, n_tokens] -> [channels, n_tokens]; the state is number k of layer i."""
    d_conv, channels = kernel.ne[:2]
    sx = gg.concat(gg.reshape_2d(g.state(i, k), d_conv - 1, channels), gg.transpose(x), 0)
    g.keep(i, k, gg.cont(gg.view_2d(sx, d_conv - 1, channels, sx.nb[1], g.n_tokens * sx.nb[0])))
    y = gg.ssm_conv(gg.reshape_3d(sx, sx.ne[0], channels, 1), kernel)
    return gg.set_name(gg.reshape_2d(y, channels, g.n_tokens), f"conv-{i}")


@dataclasses.dataclass(frozen=True)
class ShortConv:
    """LFM2's mixer: b, c, x = Win n;  Wout (c * conv(b * x))."""
    d_conv: int

    def cache(self, n_ctx, kv_type, n_embd):
        return [state(0, (self.d_conv - 1) * n_embd)]

    def load(self, loader, p):
        d, p = loader.n_embd, p + "shortconv."
        return {"in": loader.linear(p + "in_proj", d, 3 * d, False), "out": loader.linear(p + "out_proj", d, d, False),
                "conv": loader.want(p + "conv.weight", self.d_conv, d)}

    def build(self, g, n, w, i):
        bcx = linear(w["in"], n)
        d = bcx.ne[0] // 3
        b, c, x = (gg.view_2d(bcx, d, g.n_tokens, bcx.nb[1], j * d * bcx.nb[0]) for j in range(3))
        return linear(w["out"], gg.mul(convolved(g, i, 0, gg.mul(b, x), w["conv"]), c))
