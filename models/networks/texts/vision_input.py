"""What a vision network gets of a picture: its size, tiles, numbers, as the model was trained.

    fixed       one square, the picture fitted into it on a plain ground            LLaVA 1.5, Gemma 3
    dynamic     one field that keeps the proportions, sides multiples of a patch    Pixtral, Mistral 3
    tiles       the picture cut into squares, then all of it in one                 SmolVLM, Idefics 3

    numbers     (byte / 255 - mean) / std of each colour, float32 (3, height, width)

Source: llama.cpp's mtmd-image.cpp, transformers' image processors of the same models.
"""
import dataclasses
import math

import numpy as np

from ggjit.models.files.picture import fitted, resized

GROUND = {"mlp": (122, 116, 104)}               # of projectors that fit pictures on a colour; others: black
FIXED_FILTERS = {"gemma3": "bilinear"}          # others: bicubic
PIXTRAL_TOKENS = 8, 1024                        # of one picture


@dataclasses.dataclass
class VisionInput:
    """fields: [uint8 (h, w, 3), ...] in the order in which they are read; grid: (columns, rows) of the tiles among
    them, which come first; (0, 0): there are none."""
    fields: list
    grid: tuple = (0, 0)

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
    """As many tokens as the picture has patches, within PIXTRAL_TOKENS."""
    align = about.patch_size * about.n_merge
    least, most = (n * align * align for n in PIXTRAL_TOKENS)
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
