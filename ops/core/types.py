"""Tensor types: the table of block layouts.

A row of a tensor is a run of blocks; a block holds `block` elements in `nbytes` bytes.  The table lists every live type
of the GGUF format (ids as in GGML_TYPE_*), so any file can be read.  What kernels can do with a type: traits.py.
Types that users define (ops/types/own.py) live in this process alone: `OWN`, with numbers that no file has.
"""
import dataclasses
from typing import TYPE_CHECKING, NewType

import numpy as np

from ggjit.ops.core.errors import NoSuchAttribute, NotSupported, TypeMismatch

FIRST_OWN, N_NUMBERS = 256, 1024        # numbers of types that users define, which are never used twice
_ELSEWHERE = {                          # attributes of types in NumPy, PyTorch and gguf
    **dict.fromkeys(("itemsize", "size", "type_size"), "type.nbytes, the bytes of a block of type.block elements"),
    **dict.fromkeys(("bits", "bpw"), "8 * type.nbytes / type.block"), "value": "type.id",
    **dict.fromkeys(("block_size", "blck_size"), "type.block"), "is_quantized": "type.quantized"}


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

    def __eq__(self, other):
        """Equal to itself and, as a NumPy dtype, to its name: gg.F32 == "F32"."""
        return named(other) is self if isinstance(other, str) else self is other

    __hash__ = object.__hash__

    def __index__(self):
        return self.id

    def __call__(self, *values):
        raise TypeMismatch(f"a type is not a function: gg.tensor(values, type=gg.{self!r}) makes a tensor of numbers, "
                           f"gg.cast(t, gg.{self!r}) converts one")

    if not TYPE_CHECKING:               # checkers would take every attribute for granted
        def __getattr__(self, name):
            """An AttributeError that says what NumPy's, PyTorch's and gguf's names are here."""
            hint = f"; write {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
            raise NoSuchAttribute(f"a type has no attribute {name!r}{hint}", name=name, obj=self)

    def __reduce__(self):
        return _by_id, (self.id,)

    @property
    def quantized(self):
        """Does the type store blocks of several elements with common scales (ggml_is_quantized)?"""
        return self.block > 1

    @property
    def is_own(self):
        """Was it defined by a user, in this process alone?"""
        return self.id >= FIRST_OWN

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
OWN: dict[int, Type] = {}               # number -> type, of those that users define
BLOCK_SIZES = np.ones((N_NUMBERS, 2), np.int64)                 # (bytes, elements) of a block by type number
for _type in TYPE_INFO.values():
    BLOCK_SIZES[_type.id] = _type.nbytes, _type.block
_LOWER = {name.lower(): t for name, t in BY_NAME.items()}


def named(name):
    """The type of that name in any case, ggml's or a user's; None where there is none."""
    name = name.lower()
    return _LOWER.get(name) or next((t for t in OWN.values() if t.name == name), None)


def known_types():
    """Every type: ggml's, then those that users defined."""
    return (*BY_NAME.values(), *OWN.values())


def _by_id(i):
    found = TYPE_INFO.get(i) or OWN.get(i)
    if found is None:
        raise NotSupported(f"type number {i} is a type that a user defined, in another process or before it was "
                           f"removed; define it here with gg.define_type")
    return found


F32, F16, BF16, F64 = (BY_NAME[n] for n in ("f32", "f16", "bf16", "f64"))
I8, I16, I32, I64 = (BY_NAME[n] for n in ("i8", "i16", "i32", "i64"))
Q8_0, Q4_0 = BY_NAME["q8_0"], BY_NAME["q4_0"]

# the engine's classes by the names under which the signatures of builders show them
Tensor, Context = NewType("Tensor", object), NewType("Context", object)
Tensor.__module__ = Context.__module__ = "ggjit"
