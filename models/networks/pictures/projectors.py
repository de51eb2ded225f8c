"""Families of vision networks: what each has of its own, from the patches to the vectors that a decoder reads.

    mlp               LLaVA: the last layer but one, W2 gelu(W1 x)
    gemma3            the mean of 4 x 4 patches, RMS norm, W x
    idefics3          4 x 4 (or as the file says) patches side by side, W x
    pixtral           RMS norms and RoPE of rows and columns; 2 x 2 patches side by side (Mistral 3), W2 gelu(W1 x), a
                      vector behind each row
    qwen2vl_merger    RoPE of rows and columns; 2 x 2 patches side by side, W2 gelu(W1 x)
    qwen2.5vl_merger  RMS norms; most layers look at a window of 112 x 112 pixels
    qwen3vl_merger    learned positions, resampled; W2 gelu(W1 norm x) of early layers, too, for the decoder's first
    internvl          a class embedding, layers with scales; 2 x 2 patches side by side, W2 gelu(W1 norm x)
    llama4            a class embedding, RoPE of rows and columns; 2 x 2 patches side by side, W3 gelu(W2 gelu(W1 x))
    resampler         MiniCPM-V: learned queries look at all patches of a tile

A projector's GELU is the exact form, as the models were trained; llama.cpp has the tanh form.

Source: the models' own code in transformers; llama.cpp's clip.cpp for what the file holds.
"""
import dataclasses
import math
from typing import Any

import numpy as np

import ggjit as gg
from ggjit.models.blocks.attention import attend
from ggjit.models.blocks.description import Scope, linear
from ggjit.models.blocks.hparams import ROPE_NORMAL
from ggjit.models.networks.pictures import vision_input
from ggjit.ops.attention.rope_angles import VISION
from ggjit.ops.core.errors import ModelError

AVG = 1                         # of pool_2d
BILINEAR_CORNERS = 0x101        # of interpolate
ROPE_BASE = 10000.0
WINDOW = 112                    # pixels a side, of Qwen 2.5
RESAMPLER_HEAD = 128
NORM_EPS = 1e-5                 # of PyTorch's norms, in InternVL's projector


@dataclasses.dataclass
class Field:
    """What is built of a field of a picture: its patches, inputs by name, and what layers gave on that are `taken`."""
    columns: int
    rows: int
    leaf: dict
    taken: dict = dataclasses.field(default_factory=dict)

    @property
    def n(self):
        return self.columns * self.rows


class Projector:
    """A family.  As written here: one square, learned positions, layer norms, a vector for each patch."""
    see = staticmethod(vision_input.fixed)      # what the network gets of a picture
    before = after = ""                         # text around the vectors of a picture
    merge = "projector.scale_factor", 1         # key and default: patches a side that become one vector
    norm = "layer"
    sees_all = False                            # do vectors see each other in the decoder, also those behind?
    has_grid = False                            # does the decoder tell rows and columns of a picture apart?
    class_last = False                          # does the class embedding stand behind the patches?
    n_deep = 0                                  # layers of the decoder behind the first that get vectors, too

    # ------------------------------------------------------------ loading
    def read(self, v, hparams):
        """Hyperparameters of the family's own."""

    def n_layers(self, v, stored):
        """Layers that are computed, of those that are stored."""
        return v.n_layer

    def load(self, v):
        """The projector's weights; `v.n_out`."""

    def load_positions(self, v):
        self.positions = v.weights.want("v.position_embd.weight", v.n_embd, v.n_side ** 2 + v.has_class)

    # ------------------------------------------------------------ graphs
    def order(self, v, columns, rows):
        """Which patch comes when, of their numbers row by row."""
        return np.arange(columns * rows, dtype=np.int32)

    def inputs(self, v, field, order):
        """{name: array} besides the patches."""
        return {}

    def placed(self, v, x, field):
        """The patches with their positions."""
        return gg.add(x, self.positions)

    def turned(self, v, x, leaf):
        """Queries or keys [d_head, n_head, n] with their positions."""
        return x

    def mask(self, leaf, i):
        """What patches see of each other in layer i; None: everything."""
        return None

    def takes(self, i):
        """Is what layer i gives on wanted beside the last?"""
        return False

    def project(self, v, x, field):
        """[n_out, vectors] of the patches' states."""

    # ------------------------------------------------------------ in the text
    def n_vectors(self, v, columns, rows):
        return columns * rows // v.n_merge ** 2

    def pieces(self, seen, vectors):
        """Texts and vectors in the order in which they are read."""
        return [piece for x in vectors for piece in (self.before, x, self.after)]


def square_positions(v):
    """(learned positions of a square of patches, patches a side), as many as the file has."""
    info = v.file.tensors.get("v.position_embd.weight")
    n = math.isqrt(info.ne[1]) if info is not None and len(info.ne) == 2 else 0
    return v.weights.want("v.position_embd.weight", v.n_embd, n * n), n


def fed(layers, x, act=gg.gelu_erf):
    """The matrices one after the other, act in between."""
    for i, w in enumerate(layers):
        x = linear(w, act(x) if i else x)
    return x


def side_by_side(x, m, columns, rows):
    """[d m m, n / (m m)]: squares of m x m patches in one vector, row by row."""
    d = x.ne[0]
    x = gg.permute(gg.reshape_3d(x, d * m, columns // m, rows), 0, 2, 1, 3)
    x = gg.permute(gg.reshape_3d(gg.cont(x), d * m * m, rows // m, columns // m), 0, 2, 1, 3)
    return gg.reshape_2d(gg.cont(x), d * m * m, columns * rows // (m * m))


def halves_turned(x, first, second, scale=1.0):
    """RoPE of the first half of a head by one number, of the second by another, whose angles are `scale` times."""
    half = x.ne[0] // 2
    parts = [gg.cont(gg.view_3d(x, half, x.ne[1], x.ne[2], x.nb[1], x.nb[2], at * half * x.nb[0])) for at in (0, 1)]
    return gg.concat(*(gg.rope_ext(t, by, None, half, ROPE_NORMAL, 0, ROPE_BASE, s, 0.0, 1.0, 0.0, 0.0)
                       for t, by, s in zip(parts, (first, second), (1.0, scale), strict=True)), 0)


class Llava(Projector):
    def n_layers(self, v, stored):
        return min(stored, v.n_layer - 1)

    def load(self, v):
        names = ["mm.0", "mm.2"] if "mm.2.weight" in v.file.tensors else ["mm.0"]
        self.layers = v.chain(v.n_embd, *names)
        if v.file.tensors.get("v.image_newline"):
            v.weights.used.add("v.image_newline")               # of LLaVA 1.6's tiles, which are not made here
        v.file.arch_get("image_grid_pinpoints", None)

    def project(self, v, x, field):
        return fed(self.layers, x) if len(self.layers) > 1 else gg.gelu_erf(fed(self.layers, x))


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
        m, d = v.n_merge, v.n_embd
        x = gg.reshape_4d(gg.cont(gg.transpose(x)), field.columns, field.rows, d, 1)
        x = gg.pool_2d(x, AVG, m, m, m, m, 0, 0)
        x = gg.cont(gg.transpose(gg.reshape_2d(x, x.ne[0] * x.ne[1], d)))
        x = gg.mul(gg.rms_norm(x, v.eps), self.soft_norm)
        return gg.mul_mat(gg.cont(gg.transpose(self.projection)), x)


class Idefics3(Projector):
    see = staticmethod(vision_input.tiles)
    before = after = "<fake_token_around_image>"
    merge = "projector.scale_factor", 4

    def load(self, v):
        self.layers = v.chain(v.n_embd * v.n_merge ** 2, "mm.model.fc")

    def project(self, v, x, field):
        return fed(self.layers, side_by_side(x, v.n_merge, field.columns, field.rows))

    def pieces(self, seen, vectors):
        columns, out = seen.grid[0], []
        for i, x in enumerate(vectors[:-1]):
            row, column = divmod(i, columns)
            out += ["\n"] * (column == 0 and row > 0) + [f"{self.before}<row_{row + 1}_col_{column + 1}>", x]
        return [*out, f"\n\n{self.before}<global-img>", vectors[-1], self.after]


class Pixtral(Projector):
    see = staticmethod(vision_input.dynamic)
    after = "[IMG_END]"
    merge = "spatial_merge_size", 1
    norm = "rms"
    tokens = 8, 1024                            # of one picture

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
    see = staticmethod(vision_input.dynamic)
    before, after = "<|vision_start|>", "<|vision_end|>"
    merge = "spatial_merge_size", 2
    has_grid = True
    tokens = 8, 4096

    def load_positions(self, v):
        """There are none to learn."""

    def load(self, v):
        self.layers = v.chain(v.n_embd * v.n_merge ** 2, "mm.0", "mm.2")

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
    """Squares of a window follow each other; the vectors are put back in order."""
    norm = "rms"

    def read(self, v, hparams):
        self.pattern = hparams.positive("n_wa_pattern")         # every so many layers, one looks at everything
        self.side = hparams.positive("window_size", WINDOW) // v.patch_size // v.n_merge
        if not self.side:
            raise ModelError(f"{v.file.path}: windows of {hparams.get('window_size', WINDOW)} pixels hold no square of "
                             f"{v.n_merge} x {v.n_merge} patches of {v.patch_size}")

    def windows(self, v, columns, rows):
        """[numbers of the squares of each window]"""
        n = np.arange(columns * rows // v.n_merge ** 2).reshape(rows // v.n_merge, -1)
        return [n[y:y + self.side, x:x + self.side].ravel()
                for y in range(0, n.shape[0], self.side) for x in range(0, n.shape[1], self.side)]

    def order(self, v, columns, rows):
        return self.squares(v, columns, rows)[np.concatenate(self.windows(v, columns, rows))].ravel()

    def inputs(self, v, field, order):
        windows = self.windows(v, field.columns, field.rows)
        mask, at = np.full((field.n, field.n), -np.inf, np.float16), 0
        for window in windows:
            end = at + len(window) * v.n_merge ** 2
            mask[at:end, at:end] = 0
            at = end
        back = np.argsort(np.concatenate(windows)).astype(np.int32)
        return super().inputs(v, field, order) | {"window_mask": mask, "back": back}

    def mask(self, leaf, i):
        return leaf["window_mask"] if (i + 1) % self.pattern else None

    def project(self, v, x, field):
        return gg.get_rows(super().project(v, x, field), field.leaf["back"])


class Qwen3(Qwen2):
    """Vectors of early layers are behind those of the last, in the same rows: [n_out (1 + n_deep), vectors]."""

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
        n = self.n_side
        p = gg.permute(gg.reshape_3d(self.positions, v.n_embd, n, n), 2, 0, 1, 3)
        p = gg.interpolate(gg.cont(p), field.columns, field.rows, v.n_embd, 1, BILINEAR_CORNERS)
        p = gg.reshape_2d(gg.cont(gg.permute(p, 1, 2, 0, 3)), v.n_embd, field.n)
        return gg.add(x, gg.get_rows(p, field.leaf["order"]))

    def takes(self, i):
        return i in self.deep

    def project(self, v, x, field):
        y, n = super().project(v, x, field), v.n_embd * v.n_merge ** 2
        for i, (norm, layers) in self.deep.items():
            t = gg.reshape_2d(field.taken[i], n, field.n // v.n_merge ** 2)
            y = gg.concat(y, fed(layers, v.normed(t, norm)), 0)
        return y


class InternVL(Projector):
    see = staticmethod(vision_input.grids)
    before, after = "<img>", "</img>"
    merge = "projector.scale_factor", 2
    whole_first = False

    def read(self, v, hparams):
        if (v.n_embd, v.n_layer) == (3200, 45):         # the network of the large models; the file does not say it
            self.norm = "rms"
        least, most = (hparams.positive(f"preproc_{name}_tiles", n) for name, n in (("min", 1), ("max", 12)))
        self.grids = [(a, b) for a in range(least, most + 1)
                      for b in range(max(-(-least // a), least), min(most // a, most) + 1)]

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
    see = staticmethod(vision_input.grids)
    merge = "projector.scale_factor", 2
    class_last = True
    whole_first = False
    grids = tuple((x, y) for x in range(1, 4) for y in range(1, 4) if x * y > 1)

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


class Resampler(Projector):
    see = staticmethod(vision_input.grids)
    merge = "projector.scale_factor", 1
    whole_first, grids = True, ()

    def read(self, v, hparams):
        self.version = v.file.get("clip.minicpmv_version", 2, int)
        self.n_queries = v.file.get("clip.minicpmv_query_num", 96 if self.version == 2 else 64, int)

    def load_positions(self, v):
        self.positions, self.n_buckets = square_positions(v)

    def load(self, v):
        info, want = v.file.tensors.get("resampler.proj.weight"), v.weights.want
        v.n_out = n = info.ne[1] if info is not None and len(info.ne) == 2 else 0
        if n % RESAMPLER_HEAD or not n:
            raise ModelError(f"{v.file.path}: resampler.proj.weight makes vectors of {n} numbers, which are no heads "
                             f"of {RESAMPLER_HEAD}")
        self.query, self.out = want("resampler.query", n, self.n_queries), want("resampler.proj.weight", n, n)
        v.weights.used.add("resampler.pos_embed_k")             # of the largest picture; `_waves` makes them
        self.kv = v.linear_of("resampler.kv", v.n_embd, n, bias=False)
        self.attn = {c: v.linear_of(f"resampler.attn.{c}", n, n, bias=True) for c in ("q", "k", "v", "out")}
        self.norms = {c: v.norm_of(f"resampler.ln_{c}", n) for c in ("q", "kv", "post")}

    def inputs(self, v, field, order):
        row, column, n = order // field.columns, order % field.columns, self.n_buckets
        buckets = row * n // field.rows * n + column * n // field.columns
        return {"buckets": buckets.astype(np.int32), "waves": self._waves(v.n_out, row, column)}

    @staticmethod
    def _waves(n_out, row, column):
        """float32 (n, n_out): sines and cosines of the column, then of the row."""
        omega = 1 / 10000.0 ** (np.arange(n_out // 4) / (n_out // 4))
        return np.concatenate([f(np.outer(at, omega)) for at in (column, row) for f in (np.sin, np.cos)],
                              1).astype(np.float32)

    def placed(self, v, x, field):
        return gg.add(x, gg.get_rows(self.positions, field.leaf["buckets"]))

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
        columns, old, tiles = seen.grid[0], self.version == 2, []
        before, after = ("<image>", "</image>") if old else ("<slice>", "</slice>")
        for i, x in enumerate(vectors[1:]):
            tiles += ["\n"] * (i > 0 and i % columns == 0) + [before, x, after]
        return ["<image>", vectors[0], "</image>", *(["<slice>", *tiles, "</slice>"] if old and tiles else tiles)]


PROJECTORS: dict[str, Any] = {
    "mlp": Llava, "gemma3": Gemma3, "idefics3": Idefics3, "pixtral": Pixtral, "qwen2vl_merger": Qwen2,
    "qwen2.5vl_merger": Qwen25, "qwen3vl_merger": Qwen3, "internvl": InternVL, "llama4": Llama4, "resampler": Resampler}
