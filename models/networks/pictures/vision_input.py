"""The input of a vision network for a picture, as the model's own code makes it: size, padding, tiles, normalisation.

    padded          one square, the picture in the middle of the mean colour        LLaVA 1.5
    stretched       one square                                                      Gemma 3
    bounded         one field of its proportions, if need be smaller                Pixtral, Mistral 3
    near            one field of its proportions, so many pixels                    Qwen-VL
    edged           one field of its proportions, black at the right and below      Kimi-VL
    budgeted        one field of its proportions, as many patches as there may be   Gemma 4

    patches         (byte / 255 - mean) / std of each colour, the network's input

Tiles are in tiles.py.  Source: image processors of the models in transformers; Kimi-VL's and MiniCPM-V's beside their
weights.
"""
import dataclasses
import math

import numpy as np

from ggjit.core.html_repr import PlotRepr
from ggjit.models.files.resample import i64s, resized
from ggjit.ops.core.errors import extra
from ggjit.ops.native.jit import native
from ggjit.ops.native.mem import ld_f32, ld_u8, st_f32


@dataclasses.dataclass(repr=False)
class VisionInput(PlotRepr):
    """fields: [uint8 (h, w, 3), ...] in the order in which they are read; grid: (columns, rows) of the tiles among
    them, all but the whole picture, which is the first (whole_first) or the last; (0, 0): there are none.
    size: (width, height) of the picture."""
    fields: list
    size: tuple
    grid: tuple = (0, 0)
    whole_first: bool = False

    def plot(self, axes=None):
        """The fields beside each other, tiles as they lie in the picture: what the model gets.  Returns matplotlib's
        axes.  Errors: MissingExtra."""
        plt, places = extra("matplotlib.pyplot", "plots"), self._places()
        right, low = (max(place[k] + place[k + 2] for place in places) for k in (0, 1))
        axes = axes if axes is not None else plt.subplots(figsize=(min(2.4 * right / low, 12), 2.6))[1]
        for (x, y, w, h), field in zip(places, self.fields, strict=True):
            axes.imshow(field, extent=(x, x + w, y + h, y))
        axes.set(xlim=(0, right), ylim=(low, 0))
        axes.set_axis_off()
        return axes

    def _places(self):
        """[(x, y, width, height)] of each field."""
        places, x, (columns, rows) = [], 0, self.grid
        for i, field in enumerate(self.fields):
            (h, w), k = field.shape[:2], i - self.whole_first
            gap = w // 16 + 1
            if 0 <= k < columns * rows:
                places.append((x + k % columns * (w + gap), k // columns * (h + gap), w, h))
                x += (columns * (w + gap) + gap) * (k == columns * rows - 1)
            else:
                places.append((x, 0, w, h))
                x += w + 2 * gap
        return places

    def __repr__(self):
        n = len(self.fields)
        sizes = ", ".join(f"{f.shape[1]} x {f.shape[0]}" for f in self.fields[:4])
        return f"<VisionInput of {n} fields: {sizes}{', ...' * (n > 4)}; .fields, .plot()>"


@native("i64(i64, i64, i64, i64, i64, i64, i64)")
def write_patches(field, width, side, order, n, table, out):
    """float32 out[n, 3, side, side]: patch order[i] of uint8 field[height, width, 3], bytes as table[3, 256] says."""
    columns, number = width // side, i64s(order, n)
    for i in range(n):
        corner = 3 * side * (number[i] // columns * width + number[i] % columns)
        for c in range(3):
            values = table + 4 * 256 * c
            for y in range(side):
                x, at = field + corner + 3 * width * y + c, out + 4 * side * (side * (3 * i + c) + y)
                for j in range(side):
                    st_f32(at + 4 * j, ld_f32(values + 4 * ld_u8(x + 3 * j)))
    return 0


def patches(field, side, order, mean, std):
    """float32 (n, 3 side side): the patches of a field in that order, each colour's pixels row by row."""
    table = (np.arange(256, dtype=np.float32) / np.float32(255) - mean[:, None]) / std[:, None]
    out = np.empty((len(order), 3 * side * side), np.float32)
    write_patches(np.ascontiguousarray(field), field.shape[1], side, order.astype(np.int64), len(order),
                  np.ascontiguousarray(table, np.float32), out)
    return out


def size_of(picture):
    """(width, height)"""
    return picture.shape[1], picture.shape[0]


def one_field(picture, width, height, kind="bicubic"):
    """The picture in that size."""
    return VisionInput([resized(picture, width, height, kind)], size_of(picture))


def on_ground(picture, width, height, x=0, y=0, colour=(0, 0, 0)):
    """The picture on an area of one colour, its corner at column x and row y."""
    out = np.empty((height, width, 3), np.uint8)
    out[:] = colour
    out[y:y + picture.shape[0], x:x + picture.shape[1]] = picture
    return out


# ---------------------------------------------------------------- one square
def stretched(picture, about):
    return one_field(picture, about.image_size, about.image_size, "bilinear")


def padded(picture, about):
    (w, h), side, n = size_of(picture), about.image_size, max(picture.shape[:2])
    colour = (about.mean * 255).astype(np.uint8)
    square = picture if w == h else on_ground(picture, n, n, (n - w) // 2, (n - h) // 2, colour)
    return VisionInput([resized(square, side, side)], (w, h))


# ---------------------------------------------------------------- one field of the picture's proportions
def bounded(picture, about):
    """No side is longer than the model reads; sides are filled up to whole vectors."""
    align, (w, h) = about.patch_size * about.n_merge, size_of(picture)
    ratio = max(w / about.image_size, h / about.image_size)
    if ratio > 1:
        w, h = (max(math.floor(n / ratio), 1) for n in (w, h))
    return one_field(picture, *(-(-n // align) * align for n in (w, h)))


def near(picture, about):
    """Sides are multiples of a vector's, and the field has least to most of them."""
    align = about.patch_size * about.n_merge
    return one_field(picture, *kept_proportions(*size_of(picture), align, *about.family.pixels(about)))


def kept_proportions(width, height, align, least, most):
    """(width, height), multiples of `align`, near the proportions of the picture, of `least` to `most` pixels."""
    sides = width, height
    w, h = (max(round(n / align) * align, align) for n in sides)
    if w * h > most:
        beta = math.sqrt(width * height / most)
        w, h = (max(align, math.floor(n / beta / align) * align) for n in sides)
    elif w * h < least:
        beta = math.sqrt(least / (width * height))
        w, h = (math.ceil(n * beta / align) * align for n in sides)
    return w, h


def edged(picture, about):
    """At most about.family.most_patches patches; what a vector lacks is black."""
    p, align, (w, h) = about.patch_size, about.patch_size * about.n_merge, size_of(picture)
    if (n := (w // p) * (h // p)) > about.family.most_patches:
        scale = math.sqrt(about.family.most_patches / n)
        picture = resized(picture, max(int(w * scale), 1), max(int(h * scale), 1))
    # a long picture has more patches in a row than the positions reach
    most = about.family.longest_row * p // align * align
    picture = resized(picture, *(min(n, most) for n in size_of(picture)))
    wide, high = (-(-n // align) * align for n in size_of(picture))
    return VisionInput([on_ground(picture, wide, high)], (w, h))


def budgeted(picture, about):
    """The largest field of the picture's proportions that has no more vectors than about.family.most_vectors."""
    align, (w, h), most = about.patch_size * about.n_merge, size_of(picture), about.family.most_vectors
    factor = math.sqrt(most * align * align / (w * h))
    wide, high = (math.floor(factor * n / align) for n in (w, h))
    if not high:
        wide, high = min(max(w // h, 1), most), 1
    elif not wide:
        wide, high = 1, min(max(h // w, 1), most)
    return one_field(picture, wide * align, high * align)
