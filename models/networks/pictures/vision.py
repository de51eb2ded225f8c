"""Vision networks, of llama.cpp's mmproj files: a picture becomes vectors that a decoder reads among its tokens.

    field (3, h, w) -> patches [3 p p, n] -> W x, positions -> blocks -> norm -> projector -> [n_out, m]

The blocks are in tower.py, what families have of their own in projector.py and beside it.  Source: the models' own code
in transformers; llama.cpp's clip.cpp for what the file holds.
"""
import numpy as np

import ggjit as gg
from ggjit.models.blocks.description import Scope
from ggjit.models.blocks.hparams import HParams
from ggjit.models.core.checks import integer
from ggjit.models.files.picture import check_size, read_picture
from ggjit.models.networks.pictures.picture_attention import attention_of
from ggjit.models.networks.pictures.projector import MAX_SIDE, Field
from ggjit.models.networks.pictures.projectors import family_of
from ggjit.models.networks.pictures.tower import SenseFile, Tower
from ggjit.models.networks.pictures.vision_input import patches
from ggjit.ops.core.errors import BadFile, ModelError, NotSupported

GELUS = (("use_gelu", gg.gelu), ("use_silu", gg.silu))


class VisionFile(SenseFile):
    """A vision part: an mmproj file.  Errors: BadFile, ModelError."""


class Vision(Tower):
    """`encode(picture)`: [float32 (n, n_out), ...], one array for each field of `fields(picture)`."""

    @property
    def sees_all(self):
        """Do a picture's vectors see each other in the decoder, also those behind?"""
        return self.family.sees_all

    # ------------------------------------------------------------ loading
    def _load(self):
        file, hparams = self.file, HParams(self.file)
        self.projector = file.projector or "mlp"
        self.family = family_of(self.projector, file)
        self.n_embd, self.n_layer = hparams.n_embd, hparams.n_layer
        self.n_head = hparams.positive("attention.head_count")
        self.image_size, self.patch_size = hparams.positive("image_size"), hparams.positive("patch_size")
        self.eps = hparams.eps("layer")
        self.n_merge = hparams.positive(*self.family.merge)
        self.longest_edge = hparams.positive("preproc_image_size", 4 * self.image_size)
        self.mean, self.std = (self._colours(hparams, name) for name in ("image_mean", "image_std"))
        self.n_side = self.family.side(self)
        if self.n_embd % self.n_head or self.image_size % self.patch_size or self.n_side % self.n_merge or \
                max(self.image_size, self.longest_edge) > MAX_SIDE:
            raise ModelError(f"{file.path}: {self.n_head} heads of a width of {self.n_embd}, pictures of "
                             f"{self.image_size} in patches of {self.patch_size}, {self.n_merge} a side in one, do "
                             f"not make a vision network")
        self.d_head, self.n_vocab, self.n_ctx = self.n_embd // self.n_head, 0, 0
        self._act = next((act for key, act in GELUS if file.metadata.get(f"clip.{key}")), gg.gelu_quick)
        for key in ("projection_dim", "feed_forward_length"):       # of the tensors; some files state the latter wrong
            hparams.get(key, 0, int)
        self.has_class = "v.class_embd" in file.tensors
        self.n_layer = self._n_used(hparams)
        self.family.read(self, hparams)
        self._load_weights()

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
        return self.family.n_layers(self, stored)

    def _load_weights(self):
        self._products, self._limits, self.norm_kind = [], {}, self.family.norm
        self._load_patches()
        self._class = self.weights.want("v.class_embd", self.n_embd, optional=True)
        self.family.load_positions(self)
        self._load_blocks()
        self.family.load(self)

    def _load_patches(self):
        """One matrix, or one for each of two frames, of which a picture is both."""
        want, p, name = self.weights.want, self.patch_size, "v.patch_embd.weight"
        flat = len(getattr(self.file.tensors.get(name), "ne", ())) == 2
        ne = (3 * p * p, self.n_embd) if flat else (p, p, 3, self.n_embd)
        second = want(name + ".1", *ne, optional=True)
        self._patches = [want(name, *ne)] + ([] if second is None else [second])
        self._patch_bias = want("v.patch_embd.bias", self.n_embd, optional=True)

    # ------------------------------------------------------------ graphs
    def _build(self, ctx, shape):
        """shape: (columns, rows) of patches."""
        field = Field(*shape, {})
        n, d, family = field.n, self.n_embd, self.family
        order = family.order(self, *shape)
        inputs = {"patches": np.zeros((n, 3 * self.patch_size ** 2), np.float32), **family.inputs(self, field, order)}
        field.leaf = {name: gg.from_numpy(ctx, a, name) for name, a in inputs.items()}
        g = Scope(field.leaf, n + self.has_class, 0, self.eps, self._flash, None)
        x = gg.set_name(self._embedded(field), "embd")
        for i, block in enumerate(self._blocks):
            x = family.behind(self, g, self._block(g, x, block, i, family.windows(self, field, i)), field, i)
            if family.takes(i):
                field.taken[i] = x
        x = x if self._post_norm is None else self.normed(x, self._post_norm)
        if self._class is not None:
            x = gg.cont(gg.view_2d(x, d, n, x.nb[1], 0 if family.class_last else x.nb[1]))
        return inputs, gg.set_name(family.project(self, gg.set_name(x, "result_norm"), field), "vectors")

    def _embedded(self, field):
        """Patches, the class embedding, and their positions."""
        d, x, (low, high) = self.n_embd, None, self.family.value_range
        pixels = field.leaf["patches"]
        pixels = pixels if (low, high) == (0, 1) else gg.scale_bias(pixels, high - low, low)
        for w in self._patches:
            y = gg.mul_mat(gg.reshape_2d(w, 3 * self.patch_size ** 2, d), pixels)
            x = y if x is None else gg.add(x, y)
        x = x if self._patch_bias is None else gg.add(x, self._patch_bias)
        if self._class is not None:
            parts = gg.reshape_2d(self._class, d, 1), x
            x = gg.concat(*(parts[::-1] if self.family.class_last else parts), 1)
        x = self.family.placed(self, x, field)
        return x if self._pre_norm is None else self.normed(x, self._pre_norm)

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
        return self.family.see(read_picture(picture), self)

    def encode(self, picture):
        """[float32 (n, n_out), ...]: vectors of each field of a picture."""
        return [self.encode_field(field) for field in self.fields(picture).fields]

    def encode_packed(self, picture):
        """[float32 (n, n_out), ...]: vectors of a picture as the decoder reads them, with those between its tiles."""
        seen = self.fields(picture)
        return self.family.packed(self, seen, [self.encode_field(field) for field in seen.fields])

    def patches(self, field):
        """float32 (n, 3 p p) of a field uint8 (height, width, 3), in the family's order."""
        p = self.patch_size
        order = self.family.order(self, field.shape[1] // p, field.shape[0] // p)
        return patches(field, p, order, self.mean, self.std)

    def attention(self, picture, field=0):
        """PictureAttention: what the patches of a field of a picture look at, by layer and head.

            looks = m.vision.attention("cat.jpg")
            looks.plot(layer=3, patch=(5, 7))

        Errors: as encode_image; ShapeError for a field that the picture has not.
        """
        return attention_of(self, self.fields(picture), integer("field", field, 0, MAX_SIDE))

    def _built_plainly(self, shape):
        """As `_built`, with the weights of attention in memory."""
        before, self.flash = self.flash, False
        try:
            return self._built(shape)
        finally:
            self.flash = before

    def encode_field(self, field):
        """float32 (n, n_out) of one field, uint8 (height, width, 3)."""
        shape = field.shape[1] // self.patch_size, field.shape[0] // self.patch_size
        return self._vectors(shape, patches=self.patches(field))

    def pieces(self, picture):
        """[text or float32 vectors, ...]: what the decoder reads of a picture, in order; vectors (n, n_out), or (rows,
        columns, n_out) where it tells these apart."""
        seen = self.fields(picture)
        vectors = self.family.packed(self, seen, [self.encode_field(field) for field in seen.fields])
        if self.family.has_grid:
            side = self.patch_size * self.n_merge
            vectors = [v.reshape(f.shape[0] // side, f.shape[1] // side, -1)
                       for v, f in zip(vectors, seen.fields, strict=True)]
        return [piece for piece in self.family.pieces(seen, vectors) if len(piece)]

    def _seen_of(self, width, height):
        """(VisionInput, [(columns, rows) of patches of each field]) of a picture of that size."""
        check_size("the picture", width, height)
        seen = self.family.see(np.broadcast_to(np.uint8(0), (height, width, 3)), self)
        return seen, [(f.shape[1] // self.patch_size, f.shape[0] // self.patch_size) for f in seen.fields]

    def shapes_of(self, width, height):
        """[(columns, rows)] of patches of each field of a picture of that size.  Errors: ParamError, ShapeError."""
        return self._seen_of(width, height)[1]

    def tokens_of(self, width, height):
        """Vectors of a picture of that size."""
        return self.family.n_read(self, *self._seen_of(width, height))
