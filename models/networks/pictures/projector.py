"""The common part of vision families: from the patches to the vectors that a decoder reads.

A family is a subclass of Projector, in square_projectors.py, sliced_projectors.py or free_projectors.py: by what the
network gets of a picture.  A projector's GELU is the exact form, as the models were trained; llama.cpp has the tanh
form.
"""
import dataclasses
import math

import numpy as np

import ggjit as gg
from ggjit.models.blocks.description import linear
from ggjit.models.blocks.hparams import ROPE_NORMAL
from ggjit.models.networks.pictures import vision_input

AVG = 1                         # of pool_2d
BILINEAR_CORNERS = 0x101        # of interpolate
ROPE_BASE = 10000.0
MAX_SIDE = 1 << 14              # pixels
NORM_EPS = 1e-5                 # of PyTorch's norms


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
    see = staticmethod(vision_input.stretched)  # what the network gets of a picture
    before = after = ""                         # text around the vectors of a picture
    merge = "projector.scale_factor", 1         # key and default: patches a side that become one vector
    norm = "layer"
    sees_all = False                            # do vectors see each other in the decoder, also those behind?
    has_grid = False                            # does the decoder tell rows and columns of a picture apart?
    class_last = False                          # does the class embedding stand behind the patches?
    n_deep = 0                                  # layers of the decoder behind the first that get vectors, too
    scale = None                                # factor of attention's scores; None: 1 / sqrt(d_head)
    v_norm = False                              # is every head's value divided by its RMS?
    value_range = 0, 1                          # of the colours, before mean and spread; else -1 to 1

    # ------------------------------------------------------------ loading
    def read(self, v, hparams):
        """Hyperparameters of the family's own."""

    def side(self, v):
        """Patches a side of the picture that memory is set aside for."""
        return v.image_size // v.patch_size

    def most(self, v):
        """Vectors of a field, at most."""
        return v.n_side ** 2 // v.n_merge ** 2

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

    def windows(self, v, field, i):
        """[(windows, patches of each), ...] of the patches in order, if each looks at its own window alone in layer i;
        (): every patch sees every other."""
        return ()

    def takes(self, i):
        """Is what layer i gives on wanted beside the last?"""
        return False

    def behind(self, v, g, x, field, i):
        """What the layer behind layer i gets."""
        return x

    def project(self, v, x, field):
        """[n_out, vectors] of the patches' states."""

    # ------------------------------------------------------------ in the text
    def n_vectors(self, v, columns, rows):
        return columns * rows // v.n_merge ** 2

    def packed(self, v, seen, vectors):
        """The vectors as they are read, of those of each field."""
        return vectors

    def n_read(self, v, seen, shapes):
        """How many are read; shapes: (columns, rows) of patches of each field."""
        return sum(self.n_vectors(v, *shape) for shape in shapes)

    def pieces(self, seen, vectors):
        """Texts and packed vectors in the order in which they are read."""
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


def stretched_positions(v, family, field, mode):
    """[d, patches]: a square of learned positions in the size of a field; mode: of interpolate."""
    n = family.n_side
    if (field.columns, field.rows) == (n, n):
        return family.positions
    p = gg.permute(gg.reshape_3d(family.positions, v.n_embd, n, n), 2, 0, 1, 3)
    p = gg.interpolate(gg.cont(p), field.columns, field.rows, v.n_embd, 1, mode)
    return gg.reshape_2d(gg.cont(gg.permute(p, 1, 2, 0, 3)), v.n_embd, field.n)


def mean_of_squares(x, m, columns, rows):
    """[d, n / (m m)]: the mean of squares of m x m patches, row by row."""
    d = x.ne[0]
    x = gg.pool_2d(gg.reshape_4d(gg.cont(gg.transpose(x)), columns, rows, d, 1), AVG, m, m, m, m, 0, 0)
    return gg.cont(gg.transpose(gg.reshape_2d(x, x.ne[0] * x.ne[1], d)))


def bucket_positions(v, field, order, n_buckets):
    """int32 rows of a square of learned positions, stretched over the patches of a field."""
    row, column = order // field.columns, order % field.columns
    return (row * n_buckets // field.rows * n_buckets + column * n_buckets // field.columns).astype(np.int32)


def halves_turned(x, first, second, scale=1.0, base=ROPE_BASE, kind=ROPE_NORMAL):
    """RoPE of the first half of a head by one number, of the second by another, whose angles are `scale` times."""
    half = x.ne[0] // 2
    parts = [gg.cont(gg.view_3d(x, half, x.ne[1], x.ne[2], x.nb[1], x.nb[2], at * half * x.nb[0])) for at in (0, 1)]
    return gg.concat(*(gg.rope_ext(t, by, None, half, kind, 0, base, s, 0.0, 1.0, 0.0, 0.0)
                       for t, by, s in zip(parts, (first, second), (1.0, scale), strict=True)), 0)
