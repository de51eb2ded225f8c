"""Splits a picture into tiles as the models' own code does; the vision network gets the tiles and the whole picture.

    enlarged        the longer side as long as the model reads, cut into squares    SmolVLM, Idefics 3
    anyres          fitted into the size that shows most of it                      LLaVA 1.6
    closest_grid    stretched to the grid of its proportions                        InternVL
    canvas          fitted into the smallest canvas that holds it                   Llama 4
    slices          as many slices of its proportions as it has squares             MiniCPM-V

Source: as vision_input.py; LLaVA-UHD, arXiv 2403.11703.
"""
import math

import numpy as np

from ggjit.models.files.resample import resized
from ggjit.models.networks.pictures.vision_input import VisionInput, on_ground, one_field, size_of

MAX_SLICES = 9                  # of MiniCPM-V
MAX_CANVAS = 16                 # tiles of Llama 4


def cut(picture, columns, rows):
    """[tiles of a picture, row by row]"""
    w, h = picture.shape[1] // columns, picture.shape[0] // rows
    return [np.ascontiguousarray(picture[y * h:(y + 1) * h, x * w:(x + 1) * w])
            for y in range(rows) for x in range(columns)]


def enlarged(picture, about):
    side, (w, h) = about.image_size, size_of(picture)
    ratio, longest = w / h, about.longest_edge
    if w >= h:
        w, h = longest, int(longest / ratio)
        h += h % 2
    else:
        w, h = int(longest * ratio), longest
        w += w % 2
    w, h = max(w, 1), max(h, 1)
    columns, rows = -(-w // side), -(-h // side)
    large = resized(resized(picture, w, h, "lanczos"), columns * side, rows * side, "lanczos")
    if columns * rows == 1:
        return VisionInput([large], size_of(picture))
    return VisionInput([*cut(large, columns, rows), resized(large, side, side, "lanczos")], size_of(picture),
                       (columns, rows))


# ---------------------------------------------------------------- LLaVA 1.6
def anyres(picture, about):
    """The whole in a square first."""
    side, (w, h) = about.image_size, size_of(picture)
    wide, high = best_size(w, h, about.family.sizes)
    if wide / w < high / h:
        w, h = wide, min(math.ceil(h * (wide / w)), high)
    else:
        w, h = min(math.ceil(w * (high / h)), wide), high
    large = on_ground(resized(picture, w, h), wide, high, (wide - w) // 2, (high - h) // 2)
    grid = wide // side, high // side
    return VisionInput([resized(picture, side, side), *cut(large, *grid)], size_of(picture), grid, True)


def best_size(width, height, sizes):
    """(width, height) of those that show most of the picture's pixels, with the least empty area."""
    def worth(size):
        scale = min(size[0] / width, size[1] / height)
        seen = min(int(width * scale) * int(height * scale), width * height)
        return seen, seen - size[0] * size[1]
    return max(sizes, key=worth)


# ---------------------------------------------------------------- InternVL
def closest_grid(picture, about):
    """The whole, if there are tiles, last."""
    side, (w, h) = about.image_size, size_of(picture)
    best, least = (1, 1), math.inf
    for columns, rows in about.family.grids:
        differs = abs(w / h - columns / rows)
        if differs < least or (differs == least and w * h > side * side * columns * rows / 2):
            best, least = (columns, rows), differs
    if best == (1, 1):
        return one_field(picture, side, side)
    large = resized(picture, side * best[0], side * best[1])
    return VisionInput([*cut(large, *best), resized(picture, side, side)], (w, h), best)


# ---------------------------------------------------------------- Llama 4
def canvas(picture, about):
    """In the upper left corner of the canvas; enlarged only up to a tile.  The whole, if there are tiles, last."""
    side, (w, h) = about.image_size, size_of(picture)
    columns, rows = best_canvas(w, h, side)
    wide, high = (min(max(n, side), m * side) for n, m in ((w, columns), (h, rows)))
    if wide / w < high / h:
        new = wide, min(math.floor(h * (wide / w)), high)
    else:
        new = min(math.floor(w * (high / h)), wide), high
    large = resized(picture, *(max(n, 1) for n in new), "bilinear")
    large = on_ground(large, side * columns, side * rows)
    if columns * rows == 1:
        return VisionInput([large], (w, h))
    return VisionInput([*cut(large, columns, rows), resized(picture, side, side, "bilinear")], (w, h), (columns, rows))


def best_canvas(width, height, side):
    """(columns, rows): the smallest canvas that the picture fits into as large as it is; if it fits into none, the one
    in which it is least made smaller."""
    grids = np.array([(x, n // x) for n in range(MAX_CANVAS, 0, -1) for x in range(n, 0, -1) if n % x == 0])
    scales = ((side * grids).astype(np.float32) / np.array((width, height), np.float32)).min(1)
    fits = scales >= 1
    scale = scales[fits].min() if fits.any() else scales.max()
    chosen = grids[scales == scale]
    return tuple(chosen[chosen.prod(1).argmin()].tolist())


# ---------------------------------------------------------------- MiniCPM-V
def slices(picture, about):
    """The whole first."""
    side, align, (w, h) = about.image_size, about.patch_size * about.n_merge, size_of(picture)
    columns, rows = slice_grid(w, h, side)
    whole = resized(picture, *near_square(w, h, side, align, not columns))
    if not columns:
        return VisionInput([whole], (w, h))
    fine = near_square(_divided(w, columns) / columns, _divided(h, rows) / rows, side, align, True)
    large = resized(picture, fine[0] * columns, fine[1] * rows)
    return VisionInput([whole, *cut(large, columns, rows)], (w, h), (columns, rows), True)


def slice_grid(width, height, side):
    """(columns, rows), or (0, 0) for a picture that has no more pixels than a square."""
    n = min(math.ceil(width * height / (side * side)), MAX_SLICES)
    if n <= 1:
        return 0, 0
    grids = [(x, k // x) for k in (n - 1, n, n + 1) if 1 < k <= MAX_SLICES for x in range(1, k + 1) if k % x == 0]
    ratio = math.log(width / height)
    return min(grids, key=lambda g: abs(ratio - math.log(g[0] / g[1])))


def near_square(width, height, side, align, enlarges):
    """(width, height), multiples of `align`, of as many pixels as the square and the same proportions."""
    if width * height > side * side or enlarges:
        ratio = width / height
        height = int(side / math.sqrt(ratio))
        width = int(height * ratio)
    return _divided(width, align), _divided(height, align)


def _divided(length, n):
    """The nearest multiple of n, at least n."""
    return max(round(length / n) * n, n)
