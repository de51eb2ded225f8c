"""Families whose vision network gets a picture with its own proportions.

    pixtral          RMS norms and RoPE of rows and columns; 2 x 2 patches side by side (Mistral 3), W2 gelu(W1 x), a
                     vector behind each row
    qwen2vl_merger   RoPE of rows and columns; 2 x 2 patches side by side, W2 gelu(W1 x)
    qwen2.5vl_merger RMS norms; most layers look at a window of 112 x 112 pixels
    qwen3vl_merger   learned positions, resampled; W2 gelu(W1 norm x) of early layers, too, for the decoder's first
    kimivl           learned positions, resampled, and RoPE of rows and columns; 2 x 2 patches side by side,
                     W2 gelu(W1 norm x)
    gemma4v          positions of rows and of columns, and RoPE of both; RMS norms before and behind; the mean of 3 x 3
                     patches, W rms(x)

Source: the models' own code in transformers, Kimi-VL's beside its weights; llama.cpp's clip.cpp for what the file
holds.
"""
import math

import numpy as np

import ggjit as gg
from ggjit.models.blocks.description import linear
from ggjit.models.blocks.hparams import ROPE_NEOX
from ggjit.models.networks.pictures import vision_input
from ggjit.models.networks.pictures.projector import (
    BILINEAR_CORNERS,
    NORM_EPS,
    ROPE_BASE,
    Projector,
    fed,
    halves_turned,
    mean_of_squares,
    side_by_side,
    square_positions,
    stretched_positions,
)
from ggjit.ops.attention.rope_angles import VISION
from ggjit.ops.core.errors import ModelError

BICUBIC = 2                     # of interpolate
MOST_VECTORS = 4096             # of a picture: what attention over it takes grows with the square
WINDOW = 112                    # pixels a side, of Qwen 2.5
GEMMA4_BASE = 100.0             # of RoPE
CAUSAL_WIDTHS = 1536, 2560      # decoders of Gemma 4 that read a picture as they read text


class Pixtral(Projector):
    see = staticmethod(vision_input.bounded)
    after = "[IMG_END]"
    merge = "spatial_merge_size", 1
    norm = "rms"

    def load_positions(self, v):
        """There are none to learn."""

    def load(self, v):
        d, want = v.n_embd, v.weights.want
        self.merger = None
        if "mm.patch_merger.weight" in v.file.tensors:
            self.merger = want("mm.input_norm.weight", d), v.linear_of("mm.patch_merger", d * v.n_merge ** 2, d)
        elif v.n_merge > 1:
            raise ModelError(f"{v.file.path}: patches are merged, but there is no mm.patch_merger.weight")
        self.layers = v.chain(d, "mm.1", "mm.2")
        self.row_end = want("v.token_embd.img_break", v.n_out, optional=True)

    def inputs(self, v, field, order):
        return {"row": order // field.columns, "column": order % field.columns}

    def placed(self, v, x, field):
        return x

    def turned(self, v, x, leaf):
        """Every other frequency of the head is a row's, those between are a column's."""
        return halves_turned(x, leaf["row"], leaf["column"], ROPE_BASE ** (-2 / v.d_head))

    def project(self, v, x, field):
        m, d, columns, rows = v.n_merge, v.n_embd, field.columns, field.rows
        if self.merger is not None:
            norm, merger = self.merger
            x = gg.mul(gg.rms_norm(x, v.eps), norm)
            # squares with the patch as the fastest axis, as torch's unfold gives them
            x = gg.reshape_3d(side_by_side(x, m, columns, rows), d, m * m, columns * rows // (m * m))
            x = gg.reshape_2d(gg.cont(gg.permute(x, 1, 0, 2, 3)), d * m * m, columns * rows // (m * m))
            x = linear(merger, x)
            columns, rows = columns // m, rows // m
        x = fed(self.layers, x)
        if self.row_end is None:
            return x
        end = gg.repeat_4d(gg.reshape_3d(self.row_end, v.n_out, 1, 1), v.n_out, 1, rows, 1)
        x = gg.concat(gg.reshape_3d(x, v.n_out, columns, rows), end, 1)
        return gg.cont(gg.view_2d(x, v.n_out, (columns + 1) * rows - 1, x.nb[1], 0))

    def n_vectors(self, v, columns, rows):
        n = super().n_vectors(v, columns, rows)
        return n if self.row_end is None else n + rows // v.n_merge - 1


class Qwen2(Projector):
    """Patches of a square follow each other, so that a vector's are side by side."""
    see = staticmethod(vision_input.near)
    before, after = "<|vision_start|>", "<|vision_end|>"
    merge = "spatial_merge_size", 2
    has_grid = True
    fewest = 4                                  # vectors

    def load_positions(self, v):
        """There are none to learn."""

    def load(self, v):
        self.layers = v.chain(v.n_embd * v.n_merge ** 2, "mm.0", "mm.2")

    def read(self, v, hparams):
        area = (v.patch_size * v.n_merge) ** 2
        least, most = (hparams.positive(f"image_{name}_pixels", n * area)
                       for name, n in (("min", self.fewest), ("max", MOST_VECTORS)))
        self.limits = least, min(most, MOST_VECTORS * area)

    def pixels(self, v):
        """Of a field: (fewest, most)."""
        return self.limits

    def squares(self, v, columns, rows):
        """(squares, patches of one): numbers of the patches."""
        m, n = v.n_merge, np.arange(columns * rows, dtype=np.int32)
        return n.reshape(rows // m, m, columns // m, m).transpose(0, 2, 1, 3).reshape(-1, m * m)

    def order(self, v, columns, rows):
        return self.squares(v, columns, rows).ravel()

    def inputs(self, v, field, order):
        row, column = order // field.columns, order % field.columns
        return {"positions": np.concatenate([row, column, row, column]).astype(np.int32)}

    def placed(self, v, x, field):
        return x

    def turned(self, v, x, leaf):
        quarter = v.d_head // 4
        return gg.rope_multi(x, leaf["positions"], None, 2 * quarter, [quarter] * 4, VISION, 0, ROPE_BASE, 1.0, 0.0,
                             1.0, 32.0, 1.0)

    def project(self, v, x, field):
        m = v.n_merge
        return fed(self.layers, gg.reshape_2d(x, v.n_embd * m * m, field.n // (m * m)))


class Qwen25(Qwen2):
    """Squares of a window follow each other, and windows of one size; the vectors are put back in order."""
    norm = "rms"

    def read(self, v, hparams):
        super().read(v, hparams)
        self.pattern = hparams.positive("n_wa_pattern")         # every so many layers, one looks at everything
        self.side = hparams.positive("window_size", WINDOW) // v.patch_size // v.n_merge
        if not self.side:
            raise ModelError(f"{v.file.path}: windows of {hparams.get('window_size', WINDOW)} pixels hold no square of "
                             f"{v.n_merge} x {v.n_merge} patches of {v.patch_size}")

    def by_size(self, v, columns, rows):
        """[numbers of the squares of each window], small windows first: those at the right and below may be."""
        n = np.arange(columns * rows // v.n_merge ** 2).reshape(rows // v.n_merge, -1)
        return sorted((n[y:y + self.side, x:x + self.side].ravel() for y in range(0, n.shape[0], self.side)
                       for x in range(0, n.shape[1], self.side)), key=len)

    def order(self, v, columns, rows):
        return self.squares(v, columns, rows)[np.concatenate(self.by_size(v, columns, rows))].ravel()

    def inputs(self, v, field, order):
        squares = np.concatenate(self.by_size(v, field.columns, field.rows))
        return super().inputs(v, field, order) | {"back": np.argsort(squares).astype(np.int32)}

    def windows(self, v, field, i):
        if (i + 1) % self.pattern == 0:
            return ()
        sizes = [len(w) * v.n_merge ** 2 for w in self.by_size(v, field.columns, field.rows)]
        return [(sizes.count(n), n) for n in dict.fromkeys(sizes)]

    def project(self, v, x, field):
        return gg.get_rows(super().project(v, x, field), field.leaf["back"])


class Qwen3(Qwen2):
    """Vectors of early layers are behind those of the last, in the same rows: [n_out (1 + n_deep), vectors]."""
    fewest = 64

    def load_positions(self, v):
        self.positions, self.n_side = square_positions(v)

    def load(self, v):
        super().load(v)
        n, self.deep = v.n_embd * v.n_merge ** 2, {}
        for i in range(v.n_layer):
            at = f"v.deepstack.{i}."
            if at + "fc1.weight" in v.file.tensors:
                self.deep[i] = v.norm_of(at + "norm", n), v.chain(n, at + "fc1", at + "fc2")
        self.n_deep = len(self.deep)
        wrong = [i for i, (_, layers) in self.deep.items() if layers[-1][0].ne[1] != self.layers[-1][0].ne[1]]
        if wrong:
            raise ModelError(f"{v.file.path}: v.deepstack.{wrong[0]}.fc2 makes vectors of another width than mm.2")
        v.n_out = self.layers[-1][0].ne[1] * (1 + self.n_deep)

    def inputs(self, v, field, order):
        return super().inputs(v, field, order) | {"order": order}

    def placed(self, v, x, field):
        return gg.add(x, gg.get_rows(stretched_positions(v, self, field, BILINEAR_CORNERS), field.leaf["order"]))

    def takes(self, i):
        return i in self.deep

    def project(self, v, x, field):
        y, n = super().project(v, x, field), v.n_embd * v.n_merge ** 2
        for i, (norm, layers) in self.deep.items():
            t = gg.reshape_2d(field.taken[i], n, field.n // v.n_merge ** 2)
            y = gg.concat(y, fed(layers, v.normed(t, norm)), 0)
        return y


class KimiVL(Projector):
    see = staticmethod(vision_input.edged)
    before, after = "<|media_start|>", "<|media_end|>"
    merge = "projector.scale_factor", 2
    most_patches = 4096
    longest_row = 511                           # patches

    def load_positions(self, v):
        self.positions, self.n_side = square_positions(v)

    def load(self, v):
        want, n = v.weights.want, v.n_embd
        self.input_norm = want("mm.input_norm.weight", n), want("mm.input_norm.bias", n)
        self.layers = v.chain(n * v.n_merge ** 2, "mm.1", "mm.2")

    def inputs(self, v, field, order):
        return {"row": order // field.columns, "column": order % field.columns}

    def placed(self, v, x, field):
        return gg.add(x, stretched_positions(v, self, field, BICUBIC))

    def turned(self, v, x, leaf):
        """Pairs of the head turn by column and row in turns; the same order of numbers for queries and keys."""
        d, n_head, n = x.ne[0], x.ne[1], x.ne[2]
        x = gg.reshape_4d(gg.cont(x), 2, 2, d // 4, n_head * n)
        x = gg.reshape_3d(gg.cont(gg.permute(x, 0, 2, 1, 3)), d, n_head, n)
        return halves_turned(x, leaf["column"], leaf["row"])

    def project(self, v, x, field):
        w, b = self.input_norm
        x = gg.add(gg.mul(gg.norm(x, NORM_EPS), w), b)
        return fed(self.layers, side_by_side(x, v.n_merge, field.columns, field.rows))


class Gemma4Vision(Projector):
    see = staticmethod(vision_input.budgeted)
    before, after = "<|image>", "<image|>"
    merge = "projector.scale_factor", 3
    norm = "rms"
    scale = 1.0
    v_norm = True
    value_range = -1, 1
    most_vectors = 280

    def side(self, v):
        return math.isqrt(self.most_vectors) * v.n_merge

    def most(self, v):
        return self.most_vectors

    def load_positions(self, v):
        info = v.file.tensors.get("v.position_embd.weight")
        n = info.ne[1] if info is not None and len(info.ne) == 3 else 0
        self.positions = v.weights.want("v.position_embd.weight", v.n_embd, n, 2)

    def load(self, v):
        self.layers, want = v.chain(v.n_embd, "mm.input_projection"), v.weights.want
        self.spread = [want(f"v.std_{part}", v.n_embd, optional=True) for part in ("bias", "scale")]
        self.sees_all = v.n_out not in CAUSAL_WIDTHS

    def inputs(self, v, field, order):
        longest = max(field.columns, field.rows)
        if longest > self.positions.ne[1]:
            raise ModelError(f"{v.file.path}: {longest} patches in a row, positions for {self.positions.ne[1]}")
        return {"row": order // field.columns, "column": order % field.columns}

    def placed(self, v, x, field):
        for i, at in enumerate(("column", "row")):
            p = self.positions
            x = gg.add(x, gg.get_rows(gg.view_2d(p, v.n_embd, p.ne[1], p.nb[1], i * p.nb[2]), field.leaf[at]))
        return x

    def turned(self, v, x, leaf):
        return halves_turned(x, leaf["column"], leaf["row"], base=GEMMA4_BASE, kind=ROPE_NEOX)

    def project(self, v, x, field):
        x = gg.scale(mean_of_squares(x, v.n_merge, field.columns, field.rows), math.sqrt(v.n_embd))
        bias, scale = self.spread
        x = x if bias is None or scale is None else gg.mul(gg.sub(x, bias), scale)
        return v.product(self.layers[0], gg.rms_norm(x, v.eps))
