"""Vision networks, of llama.cpp's mmproj files: a picture becomes vectors that a decoder reads among its tokens.

    field (3, h, w) -> patches [3 p p, n] -> W x + positions -> blocks -> norm -> projector -> [n_out, m]

    block     x += attention(norm x)    x += feed forward(norm x)        every patch sees every other

    mlp       LLaVA: the last layer but one, W2 gelu(W1 x)
    gemma3    the mean of 4 x 4 patches, RMS norm, W x
    idefics3  4 x 4 (or as the file says) patches side by side, W x
    pixtral   RMS norms and RoPE of rows and columns; 2 x 2 patches side by side (Mistral 3), W2 gelu(W1 x), a vector
              behind each row

A projector's GELU is the exact form, as the models were trained; llama.cpp has the tanh form.

Source: the models' own code in transformers; llama.cpp's clip.cpp for what the file holds.
"""

import numpy as np

import ggjit as gg
from ggjit.models.blocks.description import linear
from ggjit.models.blocks.hparams import ROPE_NORMAL, HParams
from ggjit.models.core.checks import FIND_BROKEN, BrokenValues
from ggjit.models.files.gguf import GGUFFile
from ggjit.models.files.picture import read_picture
from ggjit.models.networks.base.load_options import LoadOptions
from ggjit.models.networks.base.network import Network
from ggjit.models.networks.texts import vision_input
from ggjit.ops.core.errors import BadFile, ModelError, NotSupported

# {projector: (its function of vision_input.py, text before and after a picture's vectors)}
PROJECTORS = {"mlp": (vision_input.fixed, "", ""),
              "gemma3": (vision_input.fixed, "<start_of_image>", "<end_of_image>"),
              "idefics3": (vision_input.tiles, "<fake_token_around_image>", "<fake_token_around_image>"),
              "pixtral": (vision_input.dynamic, "", "[IMG_END]")}
ARCH, PREFIX = "clip", "clip.vision"
# patches a side that become one vector, where the file is silent
MERGE = {"gemma3": 4, "idefics3": 4, "pixtral": 1}
SEES_ALL = ("gemma3",)
MAX_SIDE = 1 << 14
AVG = 1                         # of pool_2d
GELUS = (("use_gelu", gg.gelu), ("use_silu", gg.silu))


class VisionFile(GGUFFile):
    """A vision part: an mmproj file.  Errors: BadFile, ModelError."""

    def __init__(self, path):
        super().__init__(path)
        if super().arch != ARCH or not self.metadata.get("clip.has_vision_encoder", False):
            raise ModelError(f"{path}: no vision part (general.architecture {super().arch!r}); it is llama.cpp's "
                             f"mmproj file, load_model(model, vision=mmproj)")

    @property
    def arch(self):
        """The prefix of its keys in the file."""
        return PREFIX


def load_vision(path, decoder):
    """The Vision beside a decoder, on its backend.  Errors: ModelError where they do not belong together."""
    file, o = VisionFile(path), decoder.options
    vision = Vision(file, LoadOptions(o.backend, o.n_threads, repack=o.repack, strict=o.strict, reserve=False))
    if vision.n_out != decoder.n_embd:
        vision.free()
        raise ModelError(f"{path} makes vectors of {vision.n_out} numbers, {decoder.file.path} reads {decoder.n_embd}: "
                         f"they are not of one model")
    return vision


class Vision(Network):
    """`encode(picture)`: [float32 (n, n_out), ...], one array for each field of `fields(picture)`."""
    REPACKS = True
    CAUSAL = False

    @property
    def sees_all(self):
        """Do a picture's vectors see each other in the decoder, also those behind?"""
        return self.projector in SEES_ALL

    # ------------------------------------------------------------ loading
    def _load(self):
        file, hparams = self.file, HParams(self.file)
        self.projector = file.metadata.get("clip.projector_type") or hparams.get("projector_type", "mlp", str)
        if self.projector not in PROJECTORS:
            raise NotSupported(f"{file.path}: projector {self.projector!r} is not supported; supported: "
                               f"{', '.join(PROJECTORS)}")
        self.n_embd, self.n_layer = hparams.n_embd, hparams.n_layer
        self.n_head, n_ff = hparams.positive("attention.head_count"), hparams.positive("feed_forward_length")
        self.image_size, self.patch_size = hparams.positive("image_size"), hparams.positive("patch_size")
        self.eps = hparams.eps("layer")
        key = "spatial_merge_size" if self.projector == "pixtral" else "projector.scale_factor"
        self.n_merge = hparams.positive(key, MERGE.get(self.projector, 1))
        self.longest_edge = hparams.positive("preproc_image_size", 4 * self.image_size)
        self.mean, self.std = (self._colours(hparams, name) for name in ("image_mean", "image_std"))
        self.n_side = self.image_size // self.patch_size
        if self.n_embd % self.n_head or self.image_size % self.patch_size or self.n_side % self.n_merge or \
                max(self.image_size, self.longest_edge) > MAX_SIDE:
            raise ModelError(f"{file.path}: {self.n_head} heads of a width of {self.n_embd}, pictures of "
                             f"{self.image_size} in patches of {self.patch_size}, {self.n_merge} a side in one, are no "
                             f"vision network")
        self.d_head, self.n_vocab, self.n_ctx = self.n_embd // self.n_head, 0, 0
        self._act = next((act for key, act in GELUS if file.metadata.get(f"clip.{key}")), gg.gelu_quick)
        hparams.get("projection_dim", 0, int)
        self.has_class = "v.class_embd" in file.tensors
        self.n_layer = self._n_used(hparams)
        self._load_weights(n_ff)

    def _colours(self, hparams, name):
        x = np.asarray(hparams.get(name, kind=np.ndarray), np.float32).reshape(-1)[:3]
        if x.shape != (3,) or not np.isfinite(x).all() or (name == "image_std" and x.min() <= 0):
            raise BadFile(f"{self.file.path}: {name} holds {x.tolist()}, expected three numbers")
        return x

    def _n_used(self, hparams):
        """How many layers are computed: LLaVA uses the result of the last but one."""
        layers = hparams.get("feature_layer", None, np.ndarray)
        if layers is not None and len(layers) > 1:
            raise NotSupported(f"{self.file.path}: several feature layers, {layers.tolist()}, are not supported")
        if layers is not None and len(layers):
            return int(layers[0])
        stored = len([i for i in range(self.n_layer) if f"v.blk.{i}.ln1.weight" in self.file.tensors])
        return min(stored, self.n_layer - 1) if self.projector == "mlp" else self.n_layer

    def _load_weights(self, n_ff):
        want, d, tensors, p = self.weights.want, self.n_embd, self.file.tensors, self.patch_size
        self._products = []
        self.norm_kind = "rms" if self.projector == "pixtral" else "layer"

        def linear_of(name, n_in, n_out, bias=None):
            w = want(name + ".weight", n_in, n_out)
            self._products.append(w)
            return w, want(name + ".bias", n_out, optional=not bias)

        def norm(name, n=d):
            return want(name + ".weight", n), want(name + ".bias", n, optional=True)

        def block(i):
            at = f"v.blk.{i}."
            w = {"ln1": norm(at + "ln1"), "ln2": norm(at + "ln2"), "out": linear_of(at + "attn_out", d, d),
                 **{c: linear_of(f"{at}attn_{c}", d, d) for c in "qkv"}}
            names = ("ffn_up", "ffn_down")
            up = tensors.get(at + "ffn_up.weight")
            if up is not None and n_ff != d and list(up.ne[:2]) == [n_ff, d]:
                names = names[::-1]             # older files have the two names exchanged
            w |= {"up": linear_of(at + names[0], d, n_ff), "down": linear_of(at + names[1], n_ff, d), "gate": None}
            if at + "ffn_gate.weight" in tensors:
                w["gate"] = linear_of(at + "ffn_gate", d, n_ff)
            return w
        self._patches = want("v.patch_embd.weight", p, p, 3, d)
        self._patch_bias = want("v.patch_embd.bias", d, optional=True)
        self._class = want("v.class_embd", d, optional=True)
        self._positions = None
        if self.projector != "pixtral":
            self._positions = want("v.position_embd.weight", d, self.n_side ** 2 + self.has_class)
        self._pre_norm = norm("v.pre_ln") if "v.pre_ln.weight" in tensors else None
        self._post_norm = norm("v.post_ln") if "v.post_ln.weight" in tensors else None
        self._blocks = [block(i) for i in range(self.n_layer)]
        for name in tensors:                    # layers behind the last one that is computed
            if name.startswith("v.blk.") and int(name.split(".")[2]) >= self.n_layer:
                self.weights.used.add(name)
        getattr(self, f"_load_{self.projector}")(linear_of)

    def _outputs(self, name):
        """Rows of a matrix of the projector."""
        info = self.file.tensors.get(name + ".weight")
        if info is None or len(info.ne) != 2:
            raise ModelError(f"{self.file.path}: tensor {name + '.weight'!r}, a matrix, is missing; convert the model "
                             f"again")
        return info.ne[1]

    def _load_mlp(self, linear_of):
        n = self._outputs("mm.0")
        self._mlp = [linear_of("mm.0", self.n_embd, n)]
        if "mm.2.weight" in self.file.tensors:
            self._mlp.append(linear_of("mm.2", n, self._outputs("mm.2")))
        self.n_out = self._mlp[-1][0].ne[1]
        if self.file.tensors.get("v.image_newline"):
            self.weights.used.add("v.image_newline")            # of LLaVA 1.6's tiles, which are not made here
        self.file.arch_get("image_grid_pinpoints", None)

    def _load_gemma3(self, linear_of):
        info = self.file.tensors.get("mm.input_projection.weight")
        self.n_out = info.ne[0] if info is not None and len(info.ne) == 2 else 0
        self._soft_norm = self.weights.want("mm.soft_emb_norm.weight", self.n_embd)
        self._projection = self.weights.want("mm.input_projection.weight", self.n_out, self.n_embd)

    def _load_idefics3(self, linear_of):
        self.n_out = self._outputs("mm.model.fc")
        self._mlp = [linear_of("mm.model.fc", self.n_embd * self.n_merge ** 2, self.n_out)]

    def _load_pixtral(self, linear_of):
        d, want = self.n_embd, self.weights.want
        self._merger = None
        if "mm.patch_merger.weight" in self.file.tensors:
            self._merger = want("mm.input_norm.weight", d), linear_of("mm.patch_merger", d * self.n_merge ** 2, d)
        elif self.n_merge > 1:
            raise ModelError(f"{self.file.path}: patches are merged, but there is no mm.patch_merger.weight")
        n = self._outputs("mm.1")
        self._mlp = [linear_of("mm.1", d, n), linear_of("mm.2", n, self._outputs("mm.2"))]
        self.n_out = self._mlp[-1][0].ne[1]
        self._row_end = want("v.token_embd.img_break", self.n_out, optional=True)

    def _matrices(self):
        return self._products

    # ------------------------------------------------------------ graphs
    def _build(self, ctx, shape):
        """shape: (columns, rows) of patches."""
        columns, rows = shape
        n, d = columns * rows, self.n_embd
        inputs = {"patches": np.zeros((n, 3 * self.patch_size ** 2), np.float32)}
        if self.projector == "pixtral":
            inputs |= {"row": np.repeat(np.arange(rows), columns).astype(np.int32),
                       "column": np.tile(np.arange(columns), rows).astype(np.int32)}
        leaf = {name: gg.from_numpy(ctx, a, name) for name, a in inputs.items()}
        w = gg.reshape_2d(self._patches, 3 * self.patch_size ** 2, d)
        x = linear((w, self._patch_bias), leaf["patches"])
        if self._class is not None:
            x = gg.concat(gg.reshape_2d(self._class, d, 1), x, 1)
        x = x if self._positions is None else gg.add(x, self._positions)
        x = gg.set_name(x if self._pre_norm is None else self._norm(x, self._pre_norm), "embd")
        for i, block in enumerate(self._blocks):
            x = self._block(x, block, leaf, i)
        x = x if self._post_norm is None else self._norm(x, self._post_norm)
        if self._class is not None:
            x = gg.cont(gg.view_2d(x, d, n, x.nb[1], x.nb[1]))
        y = getattr(self, f"_project_{self.projector}")(gg.set_name(x, "result_norm"), columns, rows)
        return inputs, gg.set_name(y, "vectors")

    def _norm(self, x, params):
        w, b = params
        x = gg.mul(gg.rms_norm(x, self.eps) if self.norm_kind == "rms" else gg.norm(x, self.eps), w)
        return x if b is None else gg.add(x, b)

    def _block(self, x, w, leaf, i):
        def name(t, what):
            return gg.set_name(t, f"{what}-{i}")
        n = x.ne[1]
        h = name(self._norm(x, w["ln1"]), "attn_norm")
        q, k, v = (gg.reshape_3d(linear(w[c], h), self.d_head, self.n_head, n) for c in "qkv")
        q, k, v = (gg.permute(t, 0, 2, 1, 3) for t in (self._turned(q, leaf), self._turned(k, leaf), v))
        p = name(gg.soft_max_ext(gg.mul_mat(k, q), None, self.d_head ** -0.5, 0.0), "kq_soft_max")
        o = gg.mul_mat(gg.cont(gg.transpose(v)), p)
        o = gg.reshape_2d(gg.cont(gg.permute(o, 0, 2, 1, 3)), self.n_embd, n)
        x = gg.add(x, name(linear(w["out"], o), "attn_out"))
        h = self._norm(x, w["ln2"])
        up = linear(w["up"], h)
        h = self._act(up) if w["gate"] is None else gg.mul(self._act(linear(w["gate"], h)), up)
        return name(gg.add(x, name(linear(w["down"], h), "ffn_out")), "l_out")

    def _turned(self, x, leaf):
        """Pixtral's RoPE: the first half of a head by the row, with every other frequency, the second by the column."""
        if self.projector != "pixtral":
            return x
        half = self.d_head // 2
        parts = [gg.cont(gg.view_3d(x, half, x.ne[1], x.ne[2], x.nb[1], x.nb[2], at * half * x.nb[0])) for at in (0, 1)]
        scale = 10000.0 ** (-2 / self.d_head)
        turned = [gg.rope_ext(t, leaf[by], None, half, ROPE_NORMAL, 0, 10000.0, s, 0.0, 1.0, 0.0, 0.0)
                  for t, by, s in zip(parts, ("row", "column"), (1.0, scale), strict=True)]
        return gg.concat(*turned, 0)

    # ------------------------------------------------------------ projectors
    def _feed(self, x):
        for i, w in enumerate(self._mlp):
            x = linear(w, gg.gelu_erf(x) if i else x)
        return x

    def _project_mlp(self, x, columns, rows):
        return self._feed(x) if len(self._mlp) > 1 else gg.gelu_erf(self._feed(x))

    def _project_gemma3(self, x, columns, rows):
        m, d = self.n_merge, self.n_embd
        x = gg.reshape_4d(gg.cont(gg.transpose(x)), columns, rows, d, 1)
        x = gg.pool_2d(x, AVG, m, m, m, m, 0, 0)
        x = gg.cont(gg.transpose(gg.reshape_2d(x, x.ne[0] * x.ne[1], d)))
        x = gg.mul(gg.rms_norm(x, self.eps), self._soft_norm)
        return gg.mul_mat(gg.cont(gg.transpose(self._projection)), x)

    def _merged(self, x, columns, rows):
        """[d m m, n / (m m)]: squares of m x m patches side by side, row by row."""
        m, d = self.n_merge, self.n_embd
        x = gg.permute(gg.reshape_3d(x, d * m, columns // m, rows), 0, 2, 1, 3)
        x = gg.permute(gg.reshape_3d(gg.cont(x), d * m * m, rows // m, columns // m), 0, 2, 1, 3)
        return gg.reshape_2d(gg.cont(x), d * m * m, columns * rows // (m * m))

    def _project_idefics3(self, x, columns, rows):
        return self._feed(self._merged(x, columns, rows))

    def _project_pixtral(self, x, columns, rows):
        m, d = self.n_merge, self.n_embd
        if self._merger is not None:
            norm, merger = self._merger
            x = gg.mul(gg.rms_norm(x, self.eps), norm)
            # squares with the patch as the fastest axis, as torch's unfold gives them
            x = gg.reshape_3d(self._merged(x, columns, rows), d, m * m, columns * rows // (m * m))
            x = gg.reshape_2d(gg.cont(gg.permute(x, 1, 0, 2, 3)), d * m * m, columns * rows // (m * m))
            x = linear(merger, x)
            columns, rows = columns // m, rows // m
        x = self._feed(x)
        if self._row_end is None:
            return x
        n = self.n_out
        end = gg.repeat_4d(gg.reshape_3d(self._row_end, n, 1, 1), n, 1, rows, 1)
        x = gg.concat(gg.reshape_3d(x, n, columns, rows), end, 1)
        return gg.cont(gg.view_2d(x, n, (columns + 1) * rows - 1, x.nb[1], 0))

    def largest_graph(self, all_logits=False):
        """The graph of a square picture."""
        return self.graph(self.n_side, self.n_side)

    def _common_shapes(self):
        return ((self.n_side, self.n_side),)

    def _compared_shapes(self):
        return [(self.n_side, self.n_side)]

    # ------------------------------------------------------------ running
    def fields(self, picture):
        """The VisionInput of a picture, as read_picture takes it: what the network sees."""
        return PROJECTORS[self.projector][0](read_picture(picture), self)

    def encode(self, picture):
        """[float32 (n, n_out), ...]: vectors of each field of a picture."""
        seen = self.fields(picture)
        return [self._encoded(seen.numbers(i, self.mean, self.std)) for i in range(len(seen.fields))]

    def _encoded(self, x):
        p = self.patch_size
        rows, columns = x.shape[1] // p, x.shape[2] // p
        patches = x.reshape(3, rows, p, columns, p).transpose(1, 3, 0, 2, 4).reshape(rows * columns, 3 * p * p)
        with self._lock:
            step = self._step((columns, rows))
            step.inputs["patches"][:] = patches
            out = step.run().reshape(-1, self.n_out).copy()
        if not np.isfinite(out).all():
            raise BrokenValues(f"the picture's vectors hold NaN or infinity: {FIND_BROKEN}")
        return out

    def pieces(self, picture):
        """[text or float32 (n, n_out), ...]: what the decoder reads of a picture, in order."""
        seen, (_, before, after) = self.fields(picture), PROJECTORS[self.projector]
        vectors = [self._encoded(seen.numbers(i, self.mean, self.std)) for i in range(len(seen.fields))]
        if self.projector != "idefics3":
            return [piece for v in vectors for piece in (before, v, after) if len(piece)]
        columns, out = seen.grid[0], []
        for i, v in enumerate(vectors[:-1]):
            row, column = divmod(i, columns)
            out += ["\n"] * (column == 0 and row > 0) + [f"{before}<row_{row + 1}_col_{column + 1}>", v]
        return [*out, f"\n\n{before}<global-img>", vectors[-1], after]

    def tokens_of(self, width, height):
        """Vectors of a picture of that size."""
        seen = PROJECTORS[self.projector][0](np.zeros((height, width, 3), np.uint8), self)
        return sum(self._n_vectors(f.shape[1] // self.patch_size, f.shape[0] // self.patch_size) for f in seen.fields)

    def _n_vectors(self, columns, rows):
        m = self.n_merge
        n = columns * rows // (m * m)
        return n + rows // m - 1 if self.projector == "pixtral" and self._row_end is not None else n
