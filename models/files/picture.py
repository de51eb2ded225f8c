"""Pictures as arrays of uint8 (height, width, 3), and other sizes of them.

    read_picture("cat.jpg")        FORMATS, by Pillow (pip install 'ggjit[images]'); of animations the first frame
    read_picture(array)            (h, w), (h, w, 1), (h, w, 3) or (h, w, 4): uint8, or floats from 0 to 1

Transparent pixels lie on white.  `resized` is Pillow's resampling to the bit: along the rows, then along the columns,
weights in 22 bits, bytes between the two.
"""
import contextlib
import io
import os

import numpy as np

from ggjit.ops.core.errors import BadFile, ParamError, ShapeError, TypeMismatch, extra

# Pillow reads more, some of it (EPS) by starting programs
FORMATS = "PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"
MAX_PIXELS = 1 << 26            # of a picture as it is given: 200 MB
MAX_SIDE = 1 << 16
PRECISION = 22                  # bits of a weight
WHITE = 255


def read_picture(source):
    """uint8 (height, width, 3) of a path, the bytes of a file, an array, or a picture of Pillow.

    Errors: BadFile (no picture, or a damaged one), ParamError (too large, not finite), ShapeError, TypeMismatch,
    MissingExtra.
    """
    if isinstance(source, str | os.PathLike | bytes | bytearray):
        return _of_file(source)
    if hasattr(source, "convert") and hasattr(source, "size"):
        return _of_pillow(source, "the picture")
    return _of_array(source)


def _of_file(source):
    pillow = extra("PIL.Image", "images")
    name = f"a picture of {len(source)} bytes" if isinstance(source, bytes | bytearray) else os.fspath(source)
    file = io.BytesIO(source) if isinstance(source, bytes | bytearray) else source
    try:
        with contextlib.closing(pillow.open(file, formats=FORMATS)) as picture:
            return _of_pillow(picture, name)
    except FileNotFoundError:
        raise BadFile(f"{name}: no such file; check the path") from None
    except pillow.DecompressionBombError as e:
        raise ParamError(f"{name}: {e}; make it smaller first") from None
    except (OSError, ValueError, SyntaxError, EOFError) as e:
        raise BadFile(f"{name}: no picture that can be read ({e}); save it again as PNG or JPEG") from None


def _of_pillow(picture, name):
    check_size(name, *picture.size)
    if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
        return _of_array(np.asarray(picture.convert("RGBA")))
    return np.array(picture.convert("RGB"))


def check_size(name, width, height):
    """Errors: ShapeError for a picture of nothing, ParamError for one that is too large to hold."""
    if not width or not height:
        raise ShapeError(f"{name}: {width} x {height} pixels, there is nothing to see")
    if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
        raise ParamError(f"{name}: {width} x {height} pixels, more than {MAX_PIXELS} in all or {MAX_SIDE} a side; make "
                         f"it smaller first")


def _of_array(x):
    x = np.asarray(x)
    if x.dtype.kind not in "uf" or (x.dtype.kind == "u" and x.dtype != np.uint8):
        raise TypeMismatch(f"a picture is a path or an array of uint8, or of floats from 0 to 1, got {x.dtype}")
    x = x[..., None] if x.ndim == 2 else x
    if x.ndim != 3 or x.shape[2] not in (1, 3, 4):
        raise ShapeError(f"a picture has the shape (height, width), or (height, width, 1, 3 or 4), got {x.shape}")
    check_size("the picture", x.shape[1], x.shape[0])
    if x.dtype.kind == "f":
        if not (np.isfinite(x).all() and x.min() >= 0 and x.max() <= 1):
            raise ParamError("a picture of floats holds numbers from 0 to 1; divide by 255, or give uint8")
        x = np.rint(x * 255).astype(np.uint8)
    if x.shape[2] == 4:
        alpha = x[..., 3:].astype(np.uint32)
        x = ((x[..., :3] * alpha + WHITE * (255 - alpha) + 127) // 255).astype(np.uint8)
    return np.ascontiguousarray(np.broadcast_to(x, (*x.shape[:2], 3)))


# ---------------------------------------------------------------- other sizes
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


def resized(picture, width, height, kind="bicubic"):
    """The picture in another size; kind: of FILTERS.  Source: Pillow's Resample.c."""
    for axis, n in ((1, width), (0, height)):
        if picture.shape[axis] != n:
            picture = _along(picture, axis, n, *FILTERS[kind])
    return picture


def _along(x, axis, n, support, weight):
    n_in = x.shape[axis]
    scale = n_in / n
    wide = max(scale, 1.0)
    centre = (np.arange(n) + 0.5) * scale
    first = np.maximum((centre - support * wide + 0.5).astype(np.int64), 0)
    count = np.minimum((centre + support * wide + 0.5).astype(np.int64), n_in) - first
    at = np.arange(count.max())
    w = weight((at + first[:, None] - centre[:, None] + 0.5) * (1.0 / wide)) * (at < count[:, None])
    w = w / w.cumsum(1)[:, -1:]                 # summed in order, as Pillow does
    w = np.trunc(w * (1 << PRECISION) + np.where(w < 0, -0.5, 0.5)).astype(np.int32)
    shape = [1, 1, 1]
    shape[axis] = n
    out = np.full([n if i == axis else m for i, m in enumerate(x.shape)], 1 << (PRECISION - 1), np.int32)
    for k in at:                        # one input pixel of every output pixel at a time
        out += np.take(x, np.minimum(first + k, n_in - 1), axis) * w[:, k].reshape(shape)
    return np.clip(out >> PRECISION, 0, 255).astype(np.uint8)


def fitted(picture, width, height, kind, colour):
    """The picture scaled to the largest size that fits, in the middle of an area of one colour."""
    scale = min(np.float32(width) / np.float32(picture.shape[1]), np.float32(height) / np.float32(picture.shape[0]))
    w = min(int(np.ceil(np.float32(picture.shape[1]) * scale)), width)
    h = min(int(np.ceil(np.float32(picture.shape[0]) * scale)), height)
    out = np.empty((height, width, 3), np.uint8)
    out[:] = colour
    x, y = (width - w) // 2, (height - h) // 2
    out[y:y + h, x:x + w] = resized(picture, w, h, kind)
    return out
