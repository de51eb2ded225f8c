"""Other sizes of pictures: Pillow's resampling to the bit, as jitted kernels.

    out[i] = sum over k of w[i, k] in[first[i] + k]     along the rows, then along the columns, bytes between the two

A kernel spans `support` pixels of the output, and never less than `support` pixels of the input, so that a smaller
picture has no aliasing.  Weights of an output pixel sum up to 1, and are integers of 22 bits.

    bilinear    1 - |x|                                      support 1
    bicubic     Keys' cubic with a = -1/2                    support 2
    lanczos     sinc(x) sinc(x / 3)                          support 3

Source: Pillow's Resample.c; Keys, "Cubic convolution interpolation", 1981.
"""
import numpy as np
from numba import types

from ggjit.ops.native.jit import array_maker, native

PRECISION = 22                  # bits of a weight
u8s, i32s, i64s = (array_maker(t) for t in (types.uint8, types.int32, types.int64))


def _bilinear(x):
    return np.maximum(1 - abs(x), 0)


def _bicubic(x):
    x = abs(x)
    near = (1.5 * x - 2.5) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * -0.5
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def _lanczos(x):
    return np.where((x >= -3) & (x < 3), np.sinc(x) * np.sinc(x / 3), 0)


FILTERS = {"bilinear": (1, _bilinear), "bicubic": (2, _bicubic), "lanczos": (3, _lanczos)}      # support, function


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64)")
def resample_rows(source, n_rows, n_in, n_out, first, weights, n_taps, out):
    """uint8 out[n_rows, n_out, 3] of source[n_rows, n_in, 3]; first: int64 [n_out], weights: int32 [n_out, n_taps]."""
    start = i64s(first, n_out)
    for row in range(n_rows):
        x, y = u8s(source + 3 * n_in * row, 3 * n_in), u8s(out + 3 * n_out * row, 3 * n_out)
        for i in range(n_out):
            w, at = i32s(weights + 4 * n_taps * i, n_taps), 3 * start[i]
            red = green = blue = 1 << 21
            for k in range(min(n_taps, n_in - start[i])):
                red += x[at + 3 * k] * w[k]
                green += x[at + 3 * k + 1] * w[k]
                blue += x[at + 3 * k + 2] * w[k]
            y[3 * i] = min(max(red >> 22, 0), 255)
            y[3 * i + 1] = min(max(green >> 22, 0), 255)
            y[3 * i + 2] = min(max(blue >> 22, 0), 255)
    return 0


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64, i64)")
def resample_columns(source, width, n_in, n_out, first, weights, n_taps, sums, out):
    """uint8 out[n_out, width] of source[n_in, width]; sums: int32 [width] to work in."""
    start, total = i64s(first, n_out), i32s(sums, width)
    for i in range(n_out):
        w, y = i32s(weights + 4 * n_taps * i, n_taps), u8s(out + width * i, width)
        for j in range(width):
            total[j] = 1 << 21
        for k in range(min(n_taps, n_in - start[i])):
            x, factor = u8s(source + width * (start[i] + k), width), w[k]
            for j in range(width):
                total[j] += np.int32(x[j]) * factor
        for j in range(width):
            y[j] = min(max(total[j] >> 22, 0), 255)
    return 0


def resized(picture, width, height, kind="bicubic"):
    """uint8 (height, width, 3) of a picture uint8 (h, w, 3); kind: of FILTERS.

        resized(read_picture("cat.jpg"), 224, 224, "bilinear")
    """
    h, w = picture.shape[:2]
    if w != width:
        first, weights = taps(w, width, kind)
        out = np.empty((h, width, 3), np.uint8)
        resample_rows(np.ascontiguousarray(picture), h, w, width, first, weights, weights.shape[1], out)
        picture = out
    if h != height:
        first, weights = taps(h, height, kind)
        out = np.empty((height, width, 3), np.uint8)
        resample_columns(np.ascontiguousarray(picture), 3 * width, h, height, first, weights, weights.shape[1],
                         np.empty(3 * width, np.int32), out)
        picture = out
    return picture


def taps(n_in, n_out, kind):
    """(int64 [n_out] first input pixels, int32 [n_out, n] weights, zeros behind those that count)."""
    support, weight = FILTERS[kind]
    scale = n_in / n_out
    wide = max(scale, 1.0)
    centre = (np.arange(n_out) + 0.5) * scale
    first = np.maximum((centre - support * wide + 0.5).astype(np.int64), 0)
    count = np.minimum((centre + support * wide + 0.5).astype(np.int64), n_in) - first
    at = np.arange(count.max())
    w = weight((at + first[:, None] - centre[:, None] + 0.5) * (1.0 / wide)) * (at < count[:, None])
    w = w / w.cumsum(1)[:, -1:]                 # summed in order, as Pillow does
    return first, np.trunc(w * (1 << PRECISION) + np.where(w < 0, -0.5, 0.5)).astype(np.int32)
