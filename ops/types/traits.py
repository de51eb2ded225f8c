"""Tensor types: the table of block layouts, and what a type file adds to it.

A row of a tensor is a run of blocks; a block holds `block` elements in `nbytes` bytes.  The table lists every live type
of the GGUF format (ids as in GGML_TYPE_*), so any file can be read; `Traits` (one file per type or tight family) adds
conversion and dot products, so that kernels can compute with it.
"""
import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Callable

import numpy as np

from ggjit.ops.errors import NotSupported


@dataclasses.dataclass(frozen=True, eq=False)
class Type:
    """A tensor type.  `block` elements take `nbytes` bytes; `dtype` is NumPy's where one element is one scalar."""
    name: str                   # ggml's lower-case name: "q4_0"
    id: int                     # GGML_TYPE_* number
    block: int                  # elements per block
    nbytes: int                 # bytes per block
    dtype: np.dtype | None = None

    def __repr__(self):
        return self.name.upper() if not self.name.endswith("_K") else self.name[:-1].upper() + "K"

    def __index__(self):
        return self.id

    def __reduce__(self):
        return _by_id, (self.id,)

    @property
    def quantized(self):
        return self.block > 1

    def row_nbytes(self, ne0):
        """Bytes of a row of `ne0` elements (ggml_row_size); ne0 is a multiple of the block."""
        return ne0 // self.block * self.nbytes


def _t(name, id, block, nbytes, dtype=None):
    return Type(name, id, block, nbytes, np.dtype(dtype) if dtype else None)


TYPE_INFO = {t.id: t for t in (
    _t("f32", 0, 1, 4, "f4"), _t("f16", 1, 1, 2, "f2"), _t("q4_0", 2, 32, 18), _t("q4_1", 3, 32, 20),
    _t("q5_0", 6, 32, 22), _t("q5_1", 7, 32, 24), _t("q8_0", 8, 32, 34), _t("q8_1", 9, 32, 36),
    _t("q2_K", 10, 256, 84), _t("q3_K", 11, 256, 110), _t("q4_K", 12, 256, 144), _t("q5_K", 13, 256, 176),
    _t("q6_K", 14, 256, 210), _t("q8_K", 15, 256, 292), _t("iq2_xxs", 16, 256, 66), _t("iq2_xs", 17, 256, 74),
    _t("iq3_xxs", 18, 256, 98), _t("iq1_s", 19, 256, 50), _t("iq4_nl", 20, 32, 18), _t("iq3_s", 21, 256, 110),
    _t("iq2_s", 22, 256, 82), _t("iq4_xs", 23, 256, 136), _t("i8", 24, 1, 1, "i1"), _t("i16", 25, 1, 2, "i2"),
    _t("i32", 26, 1, 4, "i4"), _t("i64", 27, 1, 8, "i8"), _t("f64", 28, 1, 8, "f8"), _t("iq1_m", 29, 256, 56),
    _t("bf16", 30, 1, 2), _t("tq1_0", 34, 256, 54), _t("tq2_0", 35, 256, 66), _t("mxfp4", 39, 32, 17),
    _t("nvfp4", 40, 64, 36), _t("q1_0", 41, 128, 18), _t("q2_0", 42, 64, 18))}
BY_NAME = {t.name: t for t in TYPE_INFO.values()}


def _by_id(i):
    return TYPE_INFO[i]


@dataclasses.dataclass(frozen=True)
class Traits:
    """What kernels can do with a type.  All row functions take addresses and k, the row's element count.

    to_float(src, dst, k)       jitted: k elements at src -> float32 at dst
    from_float(src, dst, k)     jitted: float32 at src -> blocks at dst; byte-equal to what ggml's CPU kernels write
    quantize(src, dst, k)       jitted: as from_float where whole files are written (ggml_quantize_chunk searches longer
                                there for some types and rounds differently for Q8_0); None: from_float
    quantize_weighted(src, dst, k, weights)  jitted: the same with k float32 importances; None: they are ignored
    quantize_grid               (ops/quant_grid.py's GridQuantizer) instead of these three where codes name points of a
                                grid; ggml has no from_float for such types, so no op writes them
    np_to_float(raw)            NumPy twin: uint8 (..., row_nbytes) -> float32 (..., k)
    np_from_float(x)            NumPy twin: float32 (..., k) -> uint8 (..., row_nbytes); None: ggml checks it
    round_activations(src, dst, k)  jitted: float32 row -> float32 row as a product with this type sees it (rounded
                                through F16, Q8_0...; ggml's vec_dot_type); None: unchanged
    np_round_activations(x)     NumPy twin
    dot                         products of rows (ops/dot.py)
    tile                        8-bit codes for packed integer tiles (ops/quant32.py); None: float tiles serve
    """
    type: Type
    to_float: Callable | None = None
    from_float: Callable | None = None
    np_to_float: Callable | None = None
    np_from_float: Callable | None = None
    round_activations: Callable | None = None
    np_round_activations: Callable | None = None
    dot: object | None = None
    tile: object | None = None
    quantize: Callable | None = None
    quantize_weighted: Callable | None = None
    quantize_grid: object | None = None


@functools.cache
def all_traits():
    """{Type: (Traits, module name)} of every type file in ggjit.ops.types."""
    import ggjit.ops.types as package
    found = {}
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"ggjit.ops.types.{info.name}")
        for traits in getattr(module, "TRAITS", ()):
            found[traits.type] = (traits, module.__name__)
    return found


def traits_of(type):
    """The Traits of `type`; NotSupported if no file serves it yet."""
    try:
        return all_traits()[type][0]
    except KeyError:
        raise NotSupported(f"type {type!r} can be read from files but has no kernels yet; "
                           f"types with kernels: {', '.join(repr(t) for t in all_traits())}") from None


def module_of(type):
    """The module a kernel over `type` depends on (for its cache key)."""
    return all_traits()[type][1]
