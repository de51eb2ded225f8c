"""gg.quantize and gg.dequantize: whole arrays between float32 and the bytes of a tensor type."""
import functools
import math

import numpy as np

from ggjit.ops.errors import NotSupported, ShapeError, TypeMismatch
from ggjit.ops.jit import Native
from ggjit.ops.types import BY_NAME, Type
from ggjit.ops.types.traits import module_of, traits_of

_LOWER = {name.lower(): t for name, t in BY_NAME.items()}


def _type(type):
    if isinstance(type, str) and type.lower() in _LOWER:
        return _LOWER[type.lower()]
    if not isinstance(type, Type):
        raise TypeMismatch(f"{type!r} is no tensor type; use gg.Q8_0, gg.F16, ... or a name such as 'q8_0'")
    return type


def _row_nbytes(type, k):
    if k % type.block:
        raise ShapeError(f"{type!r} packs {type.block} values a block: the last dimension, {k}, must be a multiple; "
                         f"pad it or choose another type")
    return type.row_nbytes(k)


@functools.cache
def _entry(type, direction):
    """Native entry (src, dst, rows, k): converts rows that lie one after the other, on both sides."""
    traits = traits_of(type)
    if direction == "to_float":
        convert, nbytes, block, width = traits.to_float, type.nbytes, type.block, 4
    else:
        convert, nbytes, block, width = traits.quantize or traits.from_float, 4, 1, type.nbytes
    if convert is None:
        raise NotSupported(f"{type!r} has no {direction} conversion" + (
            ": it needs an importance matrix (imatrix=)" if traits.quantize_weighted else ""))
    out_block = 1 if direction == "to_float" else type.block

    def entry(src, dst, rows, k):
        for r in range(rows):
            convert(src + r * (k // block * nbytes), dst + r * (k // out_block * width), k)
        return 0
    entry.__name__ = f"{direction}_{type.name}"
    native = Native(entry, "i64(i64, i64, i64, i64)", False)
    native.modules += (module_of(type),)
    return native


@functools.cache
def _weighted_entry(type):
    """Native entry (src, dst, rows, k, weights), or None where a type has no use for importances."""
    convert, nbytes, block = traits_of(type).quantize_weighted, type.nbytes, type.block
    if convert is None:
        return None

    def entry(src, dst, rows, k, weights):
        for r in range(rows):
            convert(src + r * k * 4, dst + r * (k // block * nbytes), k, weights)
        return 0
    entry.__name__ = f"quantize_weighted_{type.name}"
    native = Native(entry, "i64(i64, i64, i64, i64, i64)", False)
    native.modules += (module_of(type),)
    return native


def quantize(type, array, imatrix=None):
    """float array (..., k) -> uint8 array (..., row bytes) of `type`, byte-equal to ggml's reference quantiser.

    Formula: the type file's.  `imatrix` (k,) or None: importance of each column, >= 0; types without a search (Q8_0,
    MXFP4, the ternary ones, floats) do not use it.  Errors: ShapeError if k is no multiple of the block or imatrix does
    not fit, NotSupported for a type without a quantiser, or without one that needs no imatrix.
    Source: ggml_quantize_chunk.
    """
    type = _type(type)
    weighted = _weighted_entry(type) if imatrix is not None else None
    entry = weighted or _entry(type, "from_float")
    array = np.ascontiguousarray(array, np.float32)
    if array.ndim == 0:
        raise ShapeError("quantize: a scalar has no rows; pass an array of at least one dimension")
    k = array.shape[-1]
    nbytes = _row_nbytes(type, k)
    if imatrix is not None and np.shape(imatrix) != (k,):
        raise ShapeError(f"quantize: imatrix has shape {np.shape(imatrix)}, rows have {k} values; pass one weight each")
    out = np.empty((*array.shape[:-1], nbytes), np.uint8)
    weights = (np.ascontiguousarray(imatrix, np.float32),) if weighted else ()
    entry(array, out, math.prod(array.shape[:-1]), k, *weights)
    return out


def dequantize(type, raw, shape):
    """Bytes of `type` -> float32 array of `shape` (NumPy order, last dimension the row).

    `raw`: uint8 array or bytes, exactly the bytes of `shape`.  Errors: ShapeError for a wrong byte count or a row
    that is no multiple of the block.  Source: ggml's to_float.
    """
    type = _type(type)
    entry = _entry(type, "to_float")
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if not shape or any(n < 0 for n in shape):
        raise ShapeError(f"dequantize: {shape} is no shape of rows")
    raw = np.frombuffer(raw, np.uint8) if isinstance(raw, bytes | bytearray | memoryview) else np.asarray(raw)
    raw = np.ascontiguousarray(raw).view(np.uint8)
    want = _row_nbytes(type, shape[-1]) * math.prod(shape[:-1])
    if raw.size != want:
        raise ShapeError(f"dequantize: shape {shape} of {type!r} takes {want} bytes, got {raw.size}")
    out = np.empty(shape, np.float32)
    entry(raw, out, math.prod(shape[:-1]), shape[-1])
    return out
