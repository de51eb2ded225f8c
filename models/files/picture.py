"""Pictures as arrays of uint8 (height, width, 3), and their resizing.

    read_picture("cat.jpg")        FORMATS, by Pillow (pip install 'ggjit[images]'); of animations the first frame
    read_picture(array)            (h, w), (h, w, 1), (h, w, 3) or (h, w, 4): uint8, or floats from 0 to 1

Transparent pixels lie on white; a photograph is turned as its EXIF data say; 16 bits become 8.  Other sizes of a
picture are made by resample.py.
"""
import contextlib
import io
import os
import struct

import numpy as np

from ggjit.ops.core.errors import BadFile, ParamError, ShapeError, TypeMismatch, extra

# Pillow reads more, some of it (EPS) by starting programs
FORMATS = "PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"
MAX_PIXELS = 1 << 26            # of a picture as it is given: 200 MB
MAX_SIDE = 1 << 16
WHITE, MAX_GREY = 255, 65535
ORIENTATION, UPRIGHT = 0x0112, 1        # of EXIF: which side is up


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
    except pillow.UnidentifiedImageError:
        raise BadFile(f"{name}: not a picture that can be read ({', '.join(FORMATS)}); save it again as PNG or "
                      f"JPEG") from None
    except (OSError, ValueError, SyntaxError, EOFError) as e:
        raise BadFile(f"{name}: not a picture that can be read ({e}); save it again as PNG or JPEG") from None


def _of_pillow(picture, name):
    check_size(name, *picture.size)
    if _orientation(picture) != UPRIGHT:
        picture = extra("PIL.ImageOps", "images").exif_transpose(picture)
    if picture.mode == "F":
        return _of_array(np.asarray(picture))
    if picture.mode.startswith("I"):                # Pillow's own conversion cuts at 255
        return _of_array(_eight_bits(np.asarray(picture), name))
    if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
        return _of_array(np.asarray(picture.convert("RGBA")))
    return np.array(picture.convert("RGB"))


def _orientation(picture):
    """As EXIF has it; of damaged EXIF data, upright."""
    try:
        return picture.getexif().get(ORIENTATION, UPRIGHT)
    except (SyntaxError, ValueError, OSError, struct.error):
        return UPRIGHT


def _eight_bits(x, name):
    """uint8 of grey values of 16 bits; of those of 32 bits that fit 8 or 16."""
    if x.min() < 0 or x.max() > MAX_GREY:
        raise ParamError(f"{name}: grey values from {x.min()} to {x.max()}, a picture has 0 to {MAX_GREY} at most; "
                         f"save it as PNG")
    if x.dtype.itemsize > 2 and x.max() <= WHITE:
        return x.astype(np.uint8)
    return ((x.astype(np.uint32) * WHITE + MAX_GREY // 2) // MAX_GREY).astype(np.uint8)


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
