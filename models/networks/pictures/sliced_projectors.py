"""MiniCPM-V: the whole picture, and slices of it with their own proportions.

    resampler       learned queries look at all patches of a slice
    minicpmv4_6     behind one layer, 2 x 2 patches look at each other and become one; at the end 2 x 2 of those, too

Source: the models' own code, in transformers (4.6) and beside their weights; llama.cpp's clip.cpp for what the file
holds.
"""
import numpy as np

import ggjit as gg
from ggjit.models.blocks.attention import attend
from ggjit.models.blocks.description import Scope, linear
from ggjit.models.networks.pictures import tiles
from ggjit.models.networks.pictures.projector import (
    Projector,
    bucket_positions,
    fed,
    side_by_side,
    square_positions,
)
from ggjit.ops.core.errors import ModelError

RESAMPLER_HEAD = 128
N_WINDOW = 4                    # patches that look at each other


class Sliced(Projector):
    """The whole, then the slices row by row."""
    see = staticmethod(tiles.slices)
    before, after = "<slice>", "</slice>"

    def load_positions(self, v):
        self.positions, self.n_buckets = square_positions(v)

    def inputs(self, v, field, order):
        return {"buckets": bucket_positions(v, field, order, self.n_buckets)}

    def placed(self, v, x, field):
        return gg.add(x, gg.get_rows(self.positions, field.leaf["buckets"]))

    def pieces(self, seen, vectors):
        columns, out = seen.grid[0], ["<image>", vectors[0], "</image>"]
        for i, x in enumerate(vectors[1:]):
            out += ["\n"] * (i > 0 and i % columns == 0) + [self.before, x, self.after]
        return out


class Resampler(Sliced):
    merge = "projector.scale_factor", 1

    def read(self, v, hparams):
        self.version = v.file.get("clip.minicpmv_version", 2, int)
        self.n_queries = v.file.get("clip.minicpmv_query_num", 96 if self.version == 2 else 64, int)

    def load(self, v):
        info, want = v.file.tensors.get("resampler.proj.weight"), v.weights.want
        v.n_out = n = info.ne[1] if info is not None and len(info.ne) == 2 else 0
        if n % RESAMPLER_HEAD or not n:
            raise ModelError(f"{v.file.path}: resampler.proj.weight makes vectors of {n} numbers, which are not heads "
                             f"of {RESAMPLER_HEAD}")
        self.query, self.out = want("resampler.query", n, self.n_queries), want("resampler.proj.weight", n, n)
        v.weights.used.add("resampler.pos_embed_k")             # of the largest picture; `_waves` makes them
        self.kv = v.linear_of("resampler.kv", v.n_embd, n, bias=False)
        self.attn = {c: v.linear_of(f"resampler.attn.{c}", n, n, bias=True) for c in ("q", "k", "v", "out")}
        self.norms = {c: v.norm_of(f"resampler.ln_{c}", n) for c in ("q", "kv", "post")}

    def inputs(self, v, field, order):
        row, column = order // field.columns, order % field.columns
        return super().inputs(v, field, order) | {"waves": self._waves(v.n_out, row, column)}

    @staticmethod
    def _waves(n_out, row, column):
        """float32 (n, n_out): sines and cosines of the column, then of the row."""
        omega = 1 / 10000.0 ** (np.arange(n_out // 4) / (n_out // 4))
        return np.concatenate([f(np.outer(at, omega)) for at in (column, row) for f in (np.sin, np.cos)],
                              1).astype(np.float32)

    def project(self, v, x, field):
        n_head, w = v.n_out // RESAMPLER_HEAD, self.attn
        q = v.normed(self.query, self.norms["q"])
        y = v.normed(linear(self.kv, x), self.norms["kv"])
        q, k, y = (gg.permute(gg.reshape_3d(linear(w[c], t), RESAMPLER_HEAD, n_head, t.ne[1]), 0, 2, 1, 3)
                   for c, t in (("q", q), ("k", gg.add(y, field.leaf["waves"])), ("v", y)))
        o = attend(Scope({}, field.n, 0, v.eps, v._flash, None), q, k, y, None, RESAMPLER_HEAD ** -0.5, None)
        o = v.normed(linear(w["out"], gg.reshape_2d(o, v.n_out, self.n_queries)), self.norms["post"])
        return gg.mul_mat(self.out, o)

    def n_vectors(self, v, columns, rows):
        return self.n_queries

    def pieces(self, seen, vectors):
        """Version 2 has all slices within one mark."""
        if self.version != 2:
            return super().pieces(seen, vectors)
        columns, out = seen.grid[0], []
        for i, x in enumerate(vectors[1:]):
            out += ["\n"] * (i > 0 and i % columns == 0) + ["<image>", x, "</image>"]
        return ["<image>", vectors[0], "</image>", *(["<slice>", *out, "</slice>"] if out else [])]


class MiniCPM46(Sliced):
    merge = "projector.scale_factor", 4

    def read(self, v, hparams):
        if v.n_merge not in (2, 4):
            raise ModelError(f"{v.file.path}: projector.scale_factor is {v.n_merge}, expected 2 or 4")
        layers = hparams.get("wa_layer_indexes", None, np.ndarray)
        self.early = int(layers[0]) if layers is not None and len(layers) else 6
        if v.n_merge == 4 and not 0 <= self.early < v.n_layer:
            raise ModelError(f"{v.file.path}: wa_layer_indexes says layer {self.early}, there are {v.n_layer}")

    def load(self, v):
        d, at = v.n_embd, "v.vit_merger."
        if v.n_merge == 4:
            self.window = {c: v.linear_of(f"{at}attn_{c}", d, d) for c in ("q", "k", "v", "out")}
            self.norms = v.norm_of(at + "ln1", d), v.norm_of(at + "ds_ln", 4 * d)
            self.down = v.chain(4 * d, at + "ds_ffn_up", at + "ds_ffn_down")
        self.input_norm, self.layers = v.norm_of("mm.input_norm", 4 * d), v.chain(4 * d, "mm.up", "mm.down")

    def behind(self, v, g, x, field, i):
        """Squares of 2 x 2 patches look at each other, and become one: their mean, and W2 gelu(W1 norm x) of all."""
        if v.n_merge == 2 or i != self.early:
            return x
        d, w = v.n_embd, self.window
        squares = side_by_side(x, 2, field.columns, field.rows)
        n = squares.ne[1]
        x = gg.reshape_2d(squares, d, N_WINDOW * n)
        h = v.normed(x, self.norms[0])
        q, k, y = (gg.permute(gg.reshape_4d(linear(w[c], h), v.d_head, v.n_head, N_WINDOW, n), 0, 2, 1, 3)
                   for c in "qkv")
        o = attend(g, q, k, y, None, v.d_head ** -0.5, None)
        x = gg.add(x, linear(w["out"], gg.reshape_2d(o, d, N_WINDOW * n)))
        squares = gg.reshape_2d(x, d * N_WINDOW, n)
        first, *others = (gg.view_2d(squares, d, n, squares.nb[1], j * d * squares.nb[0]) for j in range(N_WINDOW))
        for part in others:
            first = gg.add(first, part)
        field.columns, field.rows = field.columns // 2, field.rows // 2
        y = fed(self.down, v.normed(squares, self.norms[1]), gg.gelu)
        return gg.add(y, gg.scale(first, 1 / N_WINDOW))

    def project(self, v, x, field):
        x = side_by_side(x, 2, field.columns, field.rows)
        return fed(self.layers, v.normed(x, self.input_norm))
