"""Vision networks, of llama.cpp's mmproj files: a picture becomes vectors that a decoder reads among its tokens.

    field (3, h, w) -> patches [3 p p, n] -> W x, positions -> blocks -> norm -> projector -> [n_out, m]

    block     x += attention(norm x)    x += feed forward(norm x)        every patch sees every other

What families have of their own is in projectors.py.  Source: the models' own code in transformers; llama.cpp's clip.cpp
for what the file holds.
"""
import dataclasses

import numpy as np

import ggjit as gg
from ggjit.models.blocks.attention import attend
from ggjit.models.blocks.description import Scope, linear
from ggjit.models.blocks.hparams import HParams
from ggjit.models.core.checks import FIND_BROKEN, BrokenValues, integer
from ggjit.models.files.gguf import GGUFFile
from ggjit.models.files.picture import check_size, read_picture
from ggjit.models.networks.base.load_options import LoadOptions
from ggjit.models.networks.base.network import Network
from ggjit.models.networks.pictures.picture_attention import attention_of
from ggjit.models.networks.pictures.projectors import PROJECTORS, Field
from ggjit.ops.core.errors import BadFile, ModelError, NotSupported

ARCH, PREFIX = "clip", "clip.vision"
MAX_SIDE = 1 << 14
OWN_TERMS = "weights", "repacked weights", "compute", "inputs"
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
    try:
        check_pair(path, vision, decoder)
    except BaseException:
        vision.free()
        raise
    return vision


def check_pair(path, vision, decoder):
    """ModelError, where the decoder reads other vectors, or tells their positions in another way."""
    about, n, n_deep = decoder.description, vision.n_out, vision.family.n_deep
    if n_deep != about.n_deep:
        raise ModelError(f"{path} makes vectors for {n_deep} layers behind the first, {decoder.file.path} reads them "
                         f"in {about.n_deep}: they are not of one model")
    if n != decoder.n_embd * (1 + n_deep):
        raise ModelError(f"{path} makes vectors of {n // (1 + n_deep)} numbers, {decoder.file.path} reads "
                         f"{decoder.n_embd}: they are not of one model")
    if vision.family.has_grid != about.has_grid:
        one, other = ("has", "tells no") if vision.family.has_grid else ("has no", "tells")
        raise ModelError(f"{path} {one} rows and columns of vectors, {decoder.file.path} {other} such positions apart "
                         f"(rope.dimension_sections): they are not of one model")


class Vision(Network):
    """`encode(picture)`: [float32 (n, n_out), ...], one array for each field of `fields(picture)`."""
    REPACKS = True
    CAUSAL = False

    @property
    def sees_all(self):
        """Do a picture's vectors see each other in the decoder, also those behind?"""
        return self.family.sees_all

    # ------------------------------------------------------------ loading
    def _load(self):
        file, hparams = self.file, HParams(self.file)
        self.projector = file.metadata.get("clip.projector_type") or hparams.get("projector_type", "mlp", str)
        if self.projector not in PROJECTORS:
            raise NotSupported(f"{file.path}: projector {self.projector!r} is not supported; supported: "
                               f"{', '.join(PROJECTORS)}")
        self.family = PROJECTORS[self.projector]()
        self.n_embd, self.n_layer = hparams.n_embd, hparams.n_layer
        self.n_head = hparams.positive("attention.head_count")
        self.image_size, self.patch_size = hparams.positive("image_size"), hparams.positive("patch_size")
        self.eps = hparams.eps("layer")
        self.n_merge = hparams.positive(*self.family.merge)
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

    # ------------------------------------------------------------ weights, for families, too
    def linear_of(self, name, n_in, n_out, bias=None):
        """What `linear` takes.  bias: must there be one, must not, or either?"""
        w = self.weights.want(name + ".weight", n_in, n_out)
        self._products.append(w)
        return w, None if bias is False else self.weights.want(name + ".bias", n_out, optional=not bias)

    def norm_of(self, name, n):
        want = self.weights.want
        return want(name + ".weight", n), want(name + ".bias", n, optional=True)

    def chain(self, n_in, *names):
        """[what `linear` takes] of matrices one after the other; `n_out`: the rows of the last."""
        layers = []
        for name in names:
            info = self.file.tensors.get(name + ".weight")
            if info is None or len(info.ne) != 2:
                raise ModelError(f"{self.file.path}: tensor {name + '.weight'!r}, a matrix, is missing; convert the "
                                 f"model again")
            layers.append(self.linear_of(name, n_in, info.ne[1]))
            n_in = self.n_out = info.ne[1]
        return layers

    def _load_weights(self):
        want, d, tensors = self.weights.want, self.n_embd, self.file.tensors
        self._products, self.norm_kind = [], self.family.norm
        self._load_patches()
        self._class = want("v.class_embd", d, optional=True)
        self.family.load_positions(self)
        self._pre_norm = self.norm_of("v.pre_ln", d) if "v.pre_ln.weight" in tensors else None
        self._post_norm = self.norm_of("v.post_ln", d) if "v.post_ln.weight" in tensors else None
        self._blocks = [self._load_block(f"v.blk.{i}.") for i in range(self.n_layer)]
        for name in tensors:                    # layers behind the one that is taken
            if name.startswith("v.blk.") and int(name.split(".")[2]) >= self.n_layer:
                self.weights.used.add(name)
        self.family.load(self)

    def _load_patches(self):
        """One matrix, or one for each of two frames, of which a picture is both."""
        want, p, name = self.weights.want, self.patch_size, "v.patch_embd.weight"
        flat = len(getattr(self.file.tensors.get(name), "ne", ())) == 2
        ne = (3 * p * p, self.n_embd) if flat else (p, p, 3, self.n_embd)
        second = want(name + ".1", *ne, optional=True)
        self._patches = [want(name, *ne)] + ([] if second is None else [second])
        self._patch_bias = want("v.patch_embd.bias", self.n_embd, optional=True)

    def _load_block(self, at):
        d, tensors, want = self.n_embd, self.file.tensors, self.weights.want
        w = {"ln1": self.norm_of(at + "ln1", d), "ln2": self.norm_of(at + "ln2", d),
             "out": self.linear_of(at + "attn_out", d, d)}
        if at + "attn_qkv.weight" in tensors:
            w["qkv"] = self.linear_of(at + "attn_qkv", d, 3 * d)
        else:
            w |= {c: self.linear_of(f"{at}attn_{c}", d, d) for c in "qkv"}
        w |= {name: want(f"{at}{name}.weight", d, optional=True)
              for name in ("attn_q_norm", "attn_k_norm", "ls1", "ls2")}
        names, up = ("ffn_up", "ffn_down"), getattr(tensors.get(at + "ffn_up.weight"), "ne", (d, 0))
        if up[0] != d:
            names, up = names[::-1], up[::-1]           # older files have the two names exchanged
        n_ff = up[-1]
        return w | {"up": self.linear_of(at + names[0], d, n_ff), "down": self.linear_of(at + names[1], n_ff, d),
                    "gate": self.linear_of(at + "ffn_gate", d, n_ff) if at + "ffn_gate.weight" in tensors else None}

    def _matrices(self):
        return self._products

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
            x = self._block(g, x, block, i)
            if family.takes(i):
                field.taken[i] = x
        x = x if self._post_norm is None else self.normed(x, self._post_norm)
        if self._class is not None:
            x = gg.cont(gg.view_2d(x, d, n, x.nb[1], 0 if family.class_last else x.nb[1]))
        return inputs, gg.set_name(family.project(self, gg.set_name(x, "result_norm"), field), "vectors")

    def _embedded(self, field):
        """Patches, the class embedding, and their positions."""
        d, x = self.n_embd, None
        for w in self._patches:
            y = gg.mul_mat(gg.reshape_2d(w, 3 * self.patch_size ** 2, d), field.leaf["patches"])
            x = y if x is None else gg.add(x, y)
        x = x if self._patch_bias is None else gg.add(x, self._patch_bias)
        if self._class is not None:
            parts = gg.reshape_2d(self._class, d, 1), x
            x = gg.concat(*(parts[::-1] if self.family.class_last else parts), 1)
        x = self.family.placed(self, x, field)
        return x if self._pre_norm is None else self.normed(x, self._pre_norm)

    def normed(self, x, params):
        w, b = params
        x = gg.mul(gg.rms_norm(x, self.eps) if self.norm_kind == "rms" else gg.norm(x, self.eps), w)
        return x if b is None else gg.add(x, b)

    def _block(self, g, x, w, i):
        def name(t, what):
            return gg.set_name(t, f"{what}-{i}")

        def scaled(t, by):
            return t if w[by] is None else gg.mul(t, w[by])
        h = name(self.normed(x, w["ln1"]), "attn_norm")
        q, k, v = self._by_head(h, w)
        q, k = (self.family.turned(self, t, g.leaf) for t in (q, k))
        q, k, v = (gg.permute(t, 0, 2, 1, 3) for t in (q, k, v))
        o = attend(g, q, k, v, self.family.mask(g.leaf, i), self.d_head ** -0.5, i)
        x = gg.add(x, scaled(name(linear(w["out"], gg.reshape_2d(o, self.n_embd, x.ne[1])), "attn_out"), "ls1"))
        h = self.normed(x, w["ln2"])
        up = linear(w["up"], h)
        h = self._act(up) if w["gate"] is None else gg.mul(self._act(linear(w["gate"], h)), up)
        return name(gg.add(x, scaled(name(linear(w["down"], h), "ffn_out"), "ls2")), "l_out")

    def _by_head(self, h, w):
        """q, k and v as [d_head, n_head, n]."""
        d, d_head, n_head, n = self.n_embd, self.d_head, self.n_head, h.ne[1]
        if "qkv" in w:
            y = linear(w["qkv"], h)
            q, k, v = (gg.view_2d(y, d, n, y.nb[1], at * d * y.nb[0]) for at in range(3))
        else:
            q, k, v = (linear(w[c], h) for c in "qkv")
        q, k = (t if w[norm] is None else self.normed(t, (w[norm], None))
                for t, norm in ((q, "attn_q_norm"), (k, "attn_k_norm")))
        return [gg.view_3d(t, d_head, n_head, n, d_head * t.nb[0], t.nb[1], 0) for t in (q, k, v)]

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
        seen = self.fields(picture)
        return [self._encoded(seen.numbers(i, self.mean, self.std)) for i in range(len(seen.fields))]

    def patches(self, x):
        """(n, 3 p p) of a field (3, height, width), in the family's order."""
        p = self.patch_size
        rows, columns = x.shape[1] // p, x.shape[2] // p
        patches = x.reshape(3, rows, p, columns, p).transpose(1, 3, 0, 2, 4).reshape(rows * columns, 3 * p * p)
        return patches[self.family.order(self, columns, rows)]

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

    def _encoded(self, x):
        with self._lock:
            step = self._step((x.shape[2] // self.patch_size, x.shape[1] // self.patch_size))
            step.inputs["patches"][:] = self.patches(x)
            out = step.run().reshape(-1, self.n_out).copy()
        if not np.isfinite(out).all():
            raise BrokenValues(f"the picture's vectors hold NaN or infinity: {FIND_BROKEN}")
        return out

    def pieces(self, picture):
        """[text or float32 vectors, ...]: what the decoder reads of a picture, in order; vectors (n, n_out), or (rows,
        columns, n_out) where it tells these apart."""
        seen = self.fields(picture)
        vectors = [self._encoded(seen.numbers(i, self.mean, self.std)) for i in range(len(seen.fields))]
        if self.family.has_grid:
            side = self.patch_size * self.n_merge
            vectors = [v.reshape(f.shape[0] // side, f.shape[1] // side, -1)
                       for v, f in zip(vectors, seen.fields, strict=True)]
        return [piece for piece in self.family.pieces(seen, vectors) if len(piece)]

    def shapes_of(self, width, height):
        """[(columns, rows)] of patches of each field of a picture of that size.  Errors: ParamError, ShapeError."""
        check_size("the picture", width, height)
        seen = self.family.see(np.broadcast_to(np.uint8(0), (height, width, 3)), self)
        return [(f.shape[1] // self.patch_size, f.shape[0] // self.patch_size) for f in seen.fields]

    def tokens_of(self, width, height):
        """Vectors of a picture of that size."""
        return sum(self.family.n_vectors(self, *shape) for shape in self.shapes_of(width, height))

    @staticmethod
    def named_terms(terms):
        """MemoryTerms beside those of the decoder, without what is the decoder's, too."""
        return [dataclasses.replace(t, name=f"picture {t.name}") for t in terms if t.name in OWN_TERMS]

    def memory_terms(self):
        """[MemoryTerm] of what it takes now."""
        return self.named_terms(self._memory_terms())
