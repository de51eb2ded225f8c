"""Families whose vision network gets squares: the whole picture, and in some families tiles of it.

    mlp         LLaVA 1.5: the last layer but one, W2 gelu(W1 x); LLaVA 1.6: tiles, a vector behind each row of them
    gemma3      the mean of 4 x 4 patches, RMS norm, W x
    idefics3    4 x 4 (or as the file says) patches side by side, W x
    internvl    a class embedding, layers with scales; 2 x 2 patches side by side, W2 gelu(W1 norm x)
    llama4      a class embedding, RoPE of rows and columns; 2 x 2 patches side by side, W3 gelu(W2 gelu(W1 x))

Source: the models' own code in transformers; llama.cpp's clip.cpp for what the file holds.
"""
import math

import numpy as np

import ggjit as gg
from ggjit.models.networks.pictures import tiles, vision_input
from ggjit.models.networks.pictures.projector import (
    MAX_SIDE,
    NORM_EPS,
    Projector,
    fed,
    halves_turned,
    mean_of_squares,
    side_by_side,
)
from ggjit.ops.core.errors import ModelError


class Llava(Projector):
    see = staticmethod(vision_input.padded)

    def n_layers(self, v, stored):
        return min(stored, v.n_layer - 1)

    def load(self, v):
        names = ["mm.0", "mm.2"] if "mm.2.weight" in v.file.tensors else ["mm.0"]
        self.layers = v.chain(v.n_embd, *names)

    def project(self, v, x, field):
        return fed(self.layers, x) if len(self.layers) > 1 else gg.gelu_erf(fed(self.layers, x))


class LlavaNext(Llava):
    """The whole, then the vectors of all tiles row by row as those of one picture, without its edges."""
    see = staticmethod(tiles.anyres)

    def read(self, v, hparams):
        sizes = v.file.arch_get("image_grid_pinpoints", kind=np.ndarray).reshape(-1).tolist()
        self.sizes = list(zip(sizes[::2], sizes[1::2], strict=False))
        wrong = [size for size in self.sizes if min(size) <= 0 or any(n % v.image_size for n in size) or
                 max(size) > MAX_SIDE]
        if len(sizes) % 2 or wrong or not sizes:
            raise ModelError(f"{v.file.path}: image_grid_pinpoints {sizes} are not sizes of tiles of {v.image_size}")
        self.unpads = v.file.arch_get("mm_patch_merge_type", "flat", str) == "spatial_unpad"

    def load(self, v):
        super().load(v)
        self.newline = v.numbers_of("v.image_newline")
        if self.unpads and (self.newline is None or len(self.newline) != v.n_out):
            raise ModelError(f"{v.file.path}: v.image_newline, {v.n_out} numbers, is missing; convert the model again")

    def kept(self, v, seen):
        """(rows, columns) of the vectors of all tiles, as slices without the edges."""
        (w, h), n = seen.size, v.n_side
        columns, rows = seen.grid[0] * n, seen.grid[1] * n
        if w / h > columns / rows:
            edge = (rows - int(round(h * (columns / w), 7))) // 2
            return slice(edge, rows - edge), slice(0, columns)
        edge = (columns - int(round(w * (rows / h), 7))) // 2
        return slice(0, rows), slice(edge, columns - edge)

    def packed(self, v, seen, vectors):
        if not self.unpads:
            return [np.concatenate(vectors)]
        (columns, rows), n, d = seen.grid, v.n_side, v.n_out
        whole = np.stack(vectors[1:]).reshape(rows, columns, n, n, d).swapaxes(1, 2).reshape(rows * n, columns * n, d)
        whole = whole[self.kept(v, seen)]
        ends = np.broadcast_to(self.newline, (len(whole), 1, d))
        return [np.concatenate([vectors[0], np.concatenate([whole, ends], 1).reshape(-1, d)])]

    def n_read(self, v, seen, shapes):
        if not self.unpads:
            return super().n_read(v, seen, shapes)
        rows, columns = (s.stop - s.start for s in self.kept(v, seen))
        return v.n_side ** 2 + rows * (columns + 1)


class Gemma3(Projector):
    before, after = "<start_of_image>", "<end_of_image>"
    merge = "projector.scale_factor", 4
    sees_all = True

    def load(self, v):
        info = v.file.tensors.get("mm.input_projection.weight")
        v.n_out = info.ne[0] if info is not None and len(info.ne) == 2 else 0
        self.soft_norm = v.weights.want("mm.soft_emb_norm.weight", v.n_embd)
        self.projection = v.weights.want("mm.input_projection.weight", v.n_out, v.n_embd)

    def project(self, v, x, field):
        x = mean_of_squares(x, v.n_merge, field.columns, field.rows)
        x = gg.mul(gg.rms_norm(x, v.eps), self.soft_norm)
        return gg.mul_mat(gg.cont(gg.transpose(self.projection)), x)


class Idefics3(Projector):
    see = staticmethod(tiles.enlarged)
    before = after = "<fake_token_around_image>"
    merge = "projector.scale_factor", 4

    def load(self, v):
        self.layers = v.chain(v.n_embd * v.n_merge ** 2, "mm.model.fc")

    def project(self, v, x, field):
        return fed(self.layers, side_by_side(x, v.n_merge, field.columns, field.rows))

    def pieces(self, seen, vectors):
        columns, out = seen.grid[0], []
        if not columns:
            return [f"{self.before}<global-img>", *vectors, self.after]
        for i, x in enumerate(vectors[:-1]):
            row, column = divmod(i, columns)
            out += ["\n"] * (column == 0 and row > 0) + [f"{self.before}<row_{row + 1}_col_{column + 1}>", x]
        return [*out, f"\n\n{self.before}<global-img>", vectors[-1], self.after]


class InternVL(Projector):
    see = staticmethod(tiles.closest_grid)
    before, after = "<img>", "</img>"
    merge = "projector.scale_factor", 2

    def read(self, v, hparams):
        if (v.n_embd, v.n_layer) == (3200, 45):         # the network of the large models; the file does not say it
            self.norm = "rms"
        least, most = (hparams.positive(f"preproc_{name}_tiles", n) for name, n in (("min", 1), ("max", 12)))
        self.grids = sorted(((a, b) for a in range(1, most + 1) for b in range(1, most + 1) if least <= a * b <= most),
                            key=math.prod)

    def load(self, v):
        n = v.n_embd * v.n_merge ** 2
        self.input_norm = tuple(v.weights.want(f"mm.model.mlp.0.{part}", n) for part in ("weight", "bias"))
        self.layers = v.chain(n, "mm.model.mlp.1", "mm.model.mlp.3")

    def project(self, v, x, field):
        w, b = self.input_norm
        x = gg.norm(side_by_side(x, v.n_merge, field.columns, field.rows), NORM_EPS)
        return fed(self.layers, gg.add(gg.mul(x, w), b))

    def pieces(self, seen, vectors):
        return [self.before, *vectors, self.after]


class Llama4(Projector):
    see = staticmethod(tiles.canvas)
    merge = "projector.scale_factor", 2
    class_last = True

    def load(self, v):
        self.layers = v.chain(v.n_embd * v.n_merge ** 2, "mm.model.mlp.1", "mm.model.mlp.2", "mm.model.fc")

    def inputs(self, v, field, order):
        return {name: np.append(n + 1, 0).astype(np.int32)
                for name, n in (("row", order // field.columns), ("column", order % field.columns))}

    def turned(self, v, x, leaf):
        return halves_turned(x, leaf["column"], leaf["row"])

    def project(self, v, x, field):
        return fed(self.layers, side_by_side(x, v.n_merge, field.columns, field.rows))

    def pieces(self, seen, vectors):
        columns, out = seen.grid[0], ["<|image_start|>"]
        for i, x in enumerate(vectors[:-1]):
            out += [x, "<|tile_x_separator|>" if (i + 1) % columns else "<|tile_y_separator|>"]
        return [*out, "<|image|>", vectors[-1], "<|image_end|>"]
