"""What a vision network gets of a picture: its size, tiles, numbers, as the model was trained.

    fixed       one square, the picture fitted into it on a plain ground            LLaVA 1.5, Gemma 3
    dynamic     one field that keeps the proportions, sides multiples of a patch    Pixtral, Mistral 3, Qwen-VL
    tiles       the picture cut into squares, then all of it in one                 SmolVLM, Idefics 3
    grids       all of it in one square, and tiles of the grid that suits it best   InternVL, Llama 4, MiniCPM-V

    numbers     (byte / 255 - mean) / std of each colour, float32 (3, height, width)

Source: llama.cpp's mtmd-image.cpp, transformers' image processors of the same models.
"""
import dataclasses
import math

import numpy as np

from ggjit.core.html_repr import PlotRepr
from ggjit.models.files.picture import fitted, resized
from ggjit.ops.core.errors import extra

GROUND = {"mlp": (122, 116, 104)}               # of projectors that fit pictures on a colour; others: black
FIXED_FILTERS = {"gemma3": "bilinear"}          # others: bicubic
MAX_SLICES = 9                                  # tiles of MiniCPM-V


@dataclasses.dataclass(repr=False)
class VisionInput(PlotRepr):
    """fields: [uint8 (h, w, 3), ...] in the order in which they are read; grid: (columns, rows) of the tiles among
    them, all but the whole picture, which is the first (whole_first) or the last; (0, 0): there are none."""
    fields: list
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

    def numbers(self, i, mean, std):
        """float32 (3, h, w) of a field."""
        x = self.fields[i].astype(np.float32) / np.float32(255)
        return np.ascontiguousarray(((x - mean) / std).transpose(2, 0, 1))


def fixed(picture, about):
    size = about.image_size
    if picture.shape[:2] == (size, size):
        return VisionInput([picture])
    return VisionInput([fitted(picture, size, size, FIXED_FILTERS.get(about.projector, "bicubic"),
                               GROUND.get(about.projector, (0, 0, 0)))])


def dynamic(picture, about):
    """As many tokens as the picture has patches, within the family's `tokens`."""
    align = about.patch_size * about.n_merge
    least, most = (n * align * align for n in about.family.tokens)
    w, h = kept_proportions(picture.shape[1], picture.shape[0], align, least, most)
    return VisionInput([picture if picture.shape[:2] == (h, w) else fitted(picture, w, h, "bicubic", (0, 0, 0))])


def kept_proportions(width, height, align, least, most):
    """(width, height), multiples of `align`, near the proportions of the picture, of `least` to `most` pixels."""
    def to(x, how):
        return int(how(np.float32(x) / np.float32(align))) * align
    w, h = (max(align, to(n, lambda x: math.floor(x + np.float32(0.5)))) for n in (width, height))
    if w * h > most:
        beta = np.sqrt(np.float32(height) * width / most)
        return max(align, to(width / beta, math.floor)), max(align, to(height / beta, math.floor))
    if w * h < least:
        beta = np.sqrt(np.float32(least) / (np.float32(height) * width))
        return to(width * beta, math.ceil), to(height * beta, math.ceil)
    return w, h


def tiles(picture, about):
    """Squares of the picture, its longer side as long as the model reads at most, and the whole."""
    size, (h, w) = about.image_size, picture.shape[:2]
    ratio = w / h
    if w >= h:
        w, h = about.longest_edge, int(about.longest_edge / ratio)
        h += h % 2
    else:
        w, h = int(about.longest_edge * ratio), about.longest_edge
        w += w % 2
    w, h = max(w, 1), max(h, 1)
    columns, rows = -(-w // size), -(-h // size)
    whole = resized(resized(picture, w, h, "lanczos"), columns * size, rows * size, "lanczos")
    fields = [np.ascontiguousarray(whole[y * size:(y + 1) * size, x * size:(x + 1) * size])
              for y in range(rows) for x in range(columns)]
    return VisionInput([*fields, resized(whole, size, size, "lanczos")], (columns, rows))


# ---------------------------------------------------------------- grids
def grids(picture, about):
    """The whole in a square; of a picture larger than that, tiles, too: of one of the family's `grids`, or, where it
    has none, of as many as the picture has squares, of its proportions."""
    size, (h, w), family = about.image_size, picture.shape[:2], about.family
    if max(h, w) <= size:
        return VisionInput([resized(picture, size, size)])
    if family.grids:
        grid = best_grid(w, h, size, family.grids)
        whole, fine = (size, size), (grid[0] * size, grid[1] * size)
    else:
        whole, grid, fine = _slices(w, h, size, about.patch_size * about.n_merge)
    large, (x, y) = fitted(picture, *fine, "bicubic", (0, 0, 0)), (fine[0] // grid[0], fine[1] // grid[1])
    parts = [np.ascontiguousarray(large[y * j:y * (j + 1), x * i:x * (i + 1)])
             for j in range(grid[1]) for i in range(grid[0])]
    all_of_it = [resized(picture, *whole)]
    return VisionInput(all_of_it + parts if family.whole_first else parts + all_of_it, grid, family.whole_first)


def best_grid(width, height, size, candidates):
    """(columns, rows): of those that show most of the picture's pixels, the one with the least empty area."""
    def worth(grid):
        scale = min(np.float32(grid[0] * size) / np.float32(width), np.float32(grid[1] * size) / np.float32(height))
        seen = min(int(np.float32(width) * scale) * int(np.float32(height) * scale), width * height)
        return seen, -(grid[0] * grid[1] * size * size - seen)
    return max(candidates, key=worth)


def _slices(width, height, size, align):
    """((width, height) of the whole, (columns, rows), (width, height) of all tiles): LLaVA-UHD's rule."""
    whole = _near_square(width, height, size, align, False)
    n = int(min(math.ceil(np.float32(width) * np.float32(height) / np.float32(size * size)), MAX_SLICES))
    candidates = [(m, k // m) for k in (n - 1, n, n + 1) if 1 < k <= MAX_SLICES for m in range(1, k + 1) if k % m == 0]
    ratio = np.float32(math.log(np.float32(width) / np.float32(height)))
    columns, rows = min(candidates, key=lambda g: abs(ratio - math.log(g[0] / g[1])), default=(1, 1))
    x, y = (_divided(side, n) // n for side, n in ((width, columns), (height, rows)))
    x, y = _near_square(x, y, size, align, True)
    return whole, (columns, rows), (x * columns, y * rows)


def _near_square(width, height, size, align, enlarges):
    """(width, height), multiples of `align`, of as many pixels as the square and the same proportions."""
    if width * height > size * size or enlarges:
        ratio = np.float32(width) / np.float32(height)
        height = int(np.float32(size) / np.sqrt(ratio))
        width = int(np.float32(height) * ratio)
    return _divided(width, align), _divided(height, align)


def _divided(length, n):
    """The nearest multiple of n, at least n."""
    return max(int(math.floor(np.float32(length) / np.float32(n) + np.float32(0.5))) * n, n)
