"""gg.quantize and gg.dequantize: whole arrays between float32 and the bytes of a tensor type.

They run on the thread pool, piece by piece, and Ctrl-C ends them: a piece is a row or a part of one.
"""
import contextlib
import functools
import math

import numpy as np

from ggjit.ops.core.errors import NotSupported, ParamError, ShapeError, TypeMismatch
from ggjit.ops.core.host_memory import empty, oom_guard
from ggjit.ops.core.progress import busy
from ggjit.ops.core.record import OK
from ggjit.ops.core.traits import module_of, traits_of
from ggjit.ops.core.types import Type, named
from ggjit.ops.core.whole_numbers import is_whole
from ggjit.ops.native import jobs
from ggjit.ops.native.jit import address_of, exact, kernel_address

# with importances these look at the mean square of the whole row; everything else is done block by block
_ROW_WIDE = ("q4_0", "q4_1", "q5_0", "q5_1")
AT_ONCE = 1 << 20               # elements that one call of NumPy works on
LONG = 1 << 20                  # elements that the slowest quantiser takes some seconds for


def _type(type):
    type = named(type) or type if isinstance(type, str) else type
    if not isinstance(type, Type):
        raise TypeMismatch(f"{type!r} is not a tensor type; use gg.Q8_0, gg.F16, ... or a name such as 'q8_0'")
    return type


def _row_nbytes(type, k):
    if k % type.block:
        raise ShapeError(f"{type!r} packs {type.block} values a block: the last dimension, {k}, must be a multiple; "
                         f"pad it or choose another type")
    return type.row_nbytes(k)


def _n_pieces(type, k):
    """Into how many pieces of equal length a row of k elements is cut, so that none takes long."""
    n_blocks, most = k // type.block, max(1, jobs.CHUNK_ELEMENTS // type.block)
    if n_blocks <= most:
        return 1
    return next(n_blocks // size for size in range(most, 0, -1) if n_blocks % size == 0)


def _run(kernel, name, type, rows, k, *params):
    """Run a job over rows of k elements (ops/native/jobs.py); arrays are passed as their addresses."""
    address = kernel_address(f"{name}-{type.name}", lambda: kernel, (__name__, module_of(type)))
    jobs.run(address, rows * k, [rows, k, *(address_of(p) if isinstance(p, np.ndarray) else p for p in params)])


@functools.cache
def _reader(type):
    """Kernel of a job (rows, k, src, dst): rows of the type, one after the other -> float32."""
    convert, nbytes, block = traits_of(type).to_float, type.nbytes, type.block
    if convert is None:
        raise NotSupported(f"{type!r} has no to_float conversion")

    def kernel(node, ith, nth, sync):
        rows, k, src, dst = jobs.param(node, 0), jobs.param(node, 1), jobs.param(node, 2), jobs.param(node, 3)
        first = jobs.next_chunk(node, ith, nth, sync, k, rows)
        while first < rows:
            for r in range(first, min(first + jobs.rows_at_once(k), rows)):
                convert(src + r * (k // block * nbytes), dst + 4 * r * k, k)
            first = jobs.next_chunk(node, ith, nth, sync, k, rows)
        return OK
    return kernel


def _row_writer(type, weighted):
    """jitted (src, dst, k, weights, table) of a piece; arguments that a type does not need are ignored."""
    traits = traits_of(type)
    if traits.quantize_grid:
        return traits.quantize_grid.quantise
    with_weights, plain = traits.quantize_weighted, traits.quantize or traits.from_float
    if weighted and with_weights:
        return exact(lambda src, dst, k, weights, table: with_weights(src, dst, k, weights))
    if plain is None:
        raise NotSupported(f"{type!r} has no from_float conversion")
    return exact(lambda src, dst, k, weights, table: plain(src, dst, k))


@functools.cache
def _writer(type, weighted):
    """Kernel of a job (pieces, k, src, dst, weights, table, n): float32 pieces of k elements, n of them a row -> the
    type."""
    convert, nbytes, block = _row_writer(type, weighted), type.nbytes, type.block

    def kernel(node, ith, nth, sync):
        rows, k, src, dst = jobs.param(node, 0), jobs.param(node, 1), jobs.param(node, 2), jobs.param(node, 3)
        weights, table, n = jobs.param(node, 4), jobs.param(node, 5), jobs.param(node, 6)
        first = jobs.next_chunk(node, ith, nth, sync, k, rows)
        while first < rows:
            for r in range(first, min(first + jobs.rows_at_once(k), rows)):
                own = weights + 4 * k * (r % n) if weights != 0 else 0         # 0: there are none
                convert(src + 4 * r * k, dst + r * (k // block * nbytes), k, own, table)
            first = jobs.next_chunk(node, ith, nth, sync, k, rows)
        return OK
    return kernel


def _as_float32(values, what):
    """Real numbers as a contiguous float32 array.  Errors: TypeMismatch, OutOfMemory."""
    with oom_guard(f"quantize: {what} as float32"):
        try:
            values = np.asarray(values)
        except ValueError as e:                 # a ragged list
            raise TypeMismatch(f"quantize: {what} is not an array: {e}") from None
        if values.dtype.kind not in "fiub":
            raise TypeMismatch(f"quantize: {what} holds {values.dtype} values; convert them to real numbers first")
        if values.dtype == np.float32 and values.flags.c_contiguous and values.ndim:
            return values
        out = empty(values.shape or (1,), np.float32, f"quantize: {what}")
        with np.nditer([values.reshape(out.shape), out], ["external_loop", "buffered", "zerosize_ok"],
                       [["readonly"], ["writeonly"]], order="C", casting="unsafe", buffersize=AT_ONCE) as parts:
            for some, numbers in parts:             # Ctrl-C is noticed between two parts
                numbers[...] = some
        return out


def _importances(imatrix, k):
    """`imatrix` as float32 (k,)."""
    imatrix = _as_float32(imatrix, "imatrix")
    if imatrix.shape != (k,):
        raise ShapeError(f"quantize: imatrix has shape {imatrix.shape}, rows have {k} values; pass one weight each")
    good = (imatrix >= 0) & (imatrix < np.inf)
    if not good.all():
        i = int(good.argmin())
        raise ParamError(f"quantize: imatrix[{i}] is {imatrix[i]}; importances are finite and not below 0")
    return imatrix


def _grid_table(type, array, weighted):
    """The table the quantiser of `type` needs; what would make ggml abort is a typed error."""
    grid = traits_of(type).quantize_grid
    if grid is None:
        return 0
    if grid.needs_importances and not weighted:
        raise NotSupported(f"{type!r} cannot be written without importances: pass gg.quantize(..., imatrix=), a weight "
                           f"for each column (ones where nothing is known); a tensor takes the result by set_bytes")
    flat = array.reshape(-1)
    for first in range(0, flat.size, AT_ONCE):
        finite = np.isfinite(flat[first:first + AT_ONCE])
        if not finite.all():
            where = tuple(map(int, np.unravel_index(first + finite.argmin(), array.shape)))
            raise ParamError(f"quantize: {type!r} takes finite values, the array has {array[where]} at {where}")
    return grid.grid.table


refuses_nonfinite = False       # the default of `strict`; True under GGJIT_DEBUG=check (engine/names.py)


def quantize(type, array, imatrix=None, strict=None):
    """float array (..., k) -> uint8 array (..., row bytes) of `type`, byte-equal to ggml's reference quantiser.

    Formula: the type file's.  `imatrix` (k,) or None: importance of each column, >= 0; types without a search (Q8_0,
    MXFP4, the ternary ones, floats) do not use it, IQ1_S, IQ2_XXS and IQ2_XS need it.  Errors: ShapeError if k is not
    a multiple of the block or imatrix does not fit; TypeMismatch for values that are not real numbers; ParamError for
    importances below 0 or not finite, and for values that are not finite in IQ1, IQ2 and IQ3; NotSupported for a type
    without a quantiser, or without one that needs no imatrix.
    strict: True refuses a NaN or an infinity, which many types turn into finite numbers, as ggml's quantisers do; None:
    only under GGJIT_DEBUG=check.  Source: ggml_quantize_chunk.
    """
    type = _type(type)
    weighted = imatrix is not None
    searches = weighted and traits_of(type).quantize_weighted is not None
    kernel = _writer(type, searches)
    array = _as_float32(array, "the array")
    if array.ndim == 0:
        raise ShapeError("quantize: a scalar has no rows; pass an array of at least one dimension")
    k = array.shape[-1]
    if refuses_nonfinite if strict is None else strict:
        _check_finite(type, array)
    nbytes = _row_nbytes(type, k)
    weights = _importances(imatrix, k) if weighted else 0
    with oom_guard("quantize: a look at the values", min(array.size, AT_ONCE)):
        table = _grid_table(type, array, weighted)
    out = empty((*array.shape[:-1], nbytes), np.uint8, "quantize")
    n = 1 if searches and type.name in _ROW_WIDE else _n_pieces(type, k)
    long = busy(f"quantising {array.size:,} values to {type!r}") if array.size >= LONG else contextlib.nullcontext()
    with long:
        _run(kernel, "quantize_weighted" if searches else "quantize", type, n * math.prod(array.shape[:-1]), k // n,
             array, out, weights, table, n)
    return out


def _check_finite(type, array):
    """ParamError that names the first NaN or infinity, in pieces of AT_ONCE values; float types hold them."""
    if type.block == 1:
        return
    flat = array.reshape(-1)
    for first in range(0, flat.size, AT_ONCE):
        bad = np.flatnonzero(~np.isfinite(flat[first:first + AT_ONCE]))
        if len(bad):
            at = first + int(bad[0])
            where = [int(i) for i in np.unravel_index(at, array.shape)]
            raise ParamError(f"quantize: value {where} is {flat[at]}, which {type!r} does not hold and may drop "
                             f"without a trace; mend the values, or pass strict=False")


def dequantize(type, raw, shape):
    """Bytes of `type` -> float32 array of `shape` (NumPy order, last dimension the row).

    `raw`: uint8 array or bytes, exactly the bytes of `shape`.  Errors: ShapeError for a wrong byte count or a row
    that is not a multiple of the block.  Source: ggml's to_float.
    """
    type = _type(type)
    kernel = _reader(type)
    shape = (shape,) if is_whole(shape) else tuple(shape)
    if not shape or any(n < 0 for n in shape):
        raise ShapeError(f"dequantize: {shape} is not a shape of rows")
    raw = np.frombuffer(raw, np.uint8) if isinstance(raw, bytes | bytearray | memoryview) else np.asarray(raw)
    with oom_guard("dequantize: the bytes side by side"):
        raw = np.ascontiguousarray(raw).view(np.uint8)
    want = _row_nbytes(type, shape[-1]) * math.prod(shape[:-1])
    if raw.size != want:
        raise ShapeError(f"dequantize: shape {shape} of {type!r} takes {want} bytes, got {raw.size}")
    out = empty(shape, np.float32, "dequantize")
    n = _n_pieces(type, shape[-1])
    _run(kernel, "dequantize", type, n * math.prod(shape[:-1]), shape[-1] // n, raw, out)
    return out
