"""Cross-attention of a decoder over the output of an encoder (T5), and the layer that contains it.

    k, v    = Wk e, Wv e of the encoder's results e, computed once for a text and kept whole
    result  = Wo softmax(q K^T + mask) V,  q = Wq n

    x += mixer(norm x),  x += cross(norm x),  x += feed_forward(norm x)
"""
import dataclasses
from typing import Any

import ggjit as gg
from ggjit.models.blocks.attention import attend
from ggjit.models.blocks.description import WHOLE, linear
from ggjit.ops.core.types import BY_NAME


@dataclasses.dataclass(frozen=True)
class CrossAttention:
    """Heads of keys and values are as many as those of queries; scores are not scaled."""
    n_head: int
    d_head: int
    cached = True                       # reads keys that another call has written

    @property
    def n(self):
        return self.n_head * self.d_head

    def cache(self, sizes):
        """Keys and values of the other text, and a mask: 0 where it has a token, -inf behind it."""
        rows = sizes.rows[0]
        return [(f"{WHOLE} k", sizes.kv_type, (self.n, rows)), (f"{WHOLE} v", sizes.v_type, (self.n, rows)),
                (f"{WHOLE} mask", BY_NAME["f16"], (1, rows))]

    def load(self, loader, p):
        d, p = loader.n_embd, p + "cross_attn_"
        loader.ignore(p + "rel_b.weight")               # in files, but unused by the network
        w = {"cross_" + c: loader.linear(p + c, d, self.n, False) for c in "qkv"}
        return w | {"cross_o": loader.linear(p + "o", self.n, d, False)}

    def written(self, cache, encoded, rows, w):
        """Nodes that write the keys and values of the encoder's results [n_embd, n] to these rows of `cache`."""
        return [gg.set_rows(kept, linear(w["cross_" + c], encoded), rows) for kept, c in zip(cache, "kv", strict=False)]

    def build(self, g, n, w, i):
        t, cache = g.n_tokens, g.cache[i][-3:]
        q = gg.reshape_3d(linear(w["cross_q"], n), self.d_head, self.n_head, t)
        rows = cache[0].ne[1]
        k, v = (gg.view_3d(kept, self.d_head, rows, self.n_head, kept.nb[1], kept.type.row_nbytes(self.d_head), 0)
                for kept in cache[:2])
        mask = gg.repeat_4d(gg.reshape_2d(cache[2], rows, 1), rows, t, 1, 1)
        o = attend(g, gg.permute(q, 0, 2, 1, 3), k, v, mask, 1.0, None)
        return linear(w["cross_o"], gg.reshape_2d(o, self.n, t))


@dataclasses.dataclass(frozen=True)
class CrossBlock:
    mixer: Any
    cross: CrossAttention
    feed_forward: Any
    norm = "rms"

    def load(self, loader, p):
        w = self.mixer.load(loader, p) | self.cross.load(loader, p) | self.feed_forward.load(loader, p)
        return w | {n: loader.norm(p + n, self.norm) for n in ("attn_norm", "cross_attn_norm", "ffn_norm")}

    def cache(self, sizes):
        return self.mixer.cache(sizes) + self.cross.cache(sizes)

    def build(self, g, x, w, i, rows=None):
        def named(t, name):
            return gg.set_name(t, f"{name}-{i}")

        def added(x, piece, name, norm):
            n = named(g.norm(x, self.norm, w[norm]), norm)
            return gg.add(x, named(piece.build(g, n, w, i), name))

        x = added(x, self.mixer, "attn_out", "attn_norm")
        x = named(added(x, self.cross, "cross_attn_out", "cross_attn_norm"), "ffn_inp")
        x = x if rows is None or g.whole else gg.get_rows(x, rows)
        x = named(added(x, self.feed_forward, "ffn_out", "ffn_norm"), "l_out")
        return gg.get_rows(x, rows) if rows is not None and g.whole else x
