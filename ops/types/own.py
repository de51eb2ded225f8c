"""User-defined types: quantised blocks by functions of one block, written in a notebook cell.

    def to_float(block, x):         # block: `nbytes` bytes (uint8), x: `block` values (float32), which it writes
        d = gg.load_half(block, 0)
        for i in range(32):
            x[i] = d * (int(block[2 + i]) - 128)

    def from_float(x, block): ...   # the other way
    q = gg.define_type("mine", 32, 34, to_float, from_float)

They are plain Python, compiled with Numba after a trial (own_trial.py).  From then on the type is one as all others:
gg.quantize, casts, rows, copies and products take it.  What it is made of, from slow to fast:

    to_float        products unpack a block, then multiply float32 lanes
    dot             (block, y) -> number: the products of a block with float32 y, summed; compiled to sum in any order
    lanes           the codes of a block as vectors of bytes, in LLVM IR: the products of ggml's own types

The process alone knows the type: no file holds it, kernels over it are compiled anew each time, the CPU alone has them.
"""
import dataclasses
import itertools
import re
import struct
from collections.abc import Callable

import numpy as np
from numba import njit, types
from numba.extending import overload

from ggjit.ops.core.errors import NotSupported, ParamError, TypeMismatch
from ggjit.ops.core.traits import Traits, add_traits, remove_traits
from ggjit.ops.core.types import BLOCK_SIZES, FIRST_OWN, N_NUMBERS, OWN, Type, named
from ggjit.ops.core.whole_numbers import is_whole
from ggjit.ops.native.jit import FASTMATH, array_maker, exact, u8s
from ggjit.ops.native.mem import half_bits, half_of, ld_f32, st_f32
from ggjit.ops.native.simd import B, fma, hsum, ldf, zerof
from ggjit.ops.types import own_trial
from ggjit.ops.types.quantize import dequantize, quantize
from ggjit.ops.types.shared.blocks_plain import Plain
from ggjit.ops.types.shared.dot import Dot
from ggjit.ops.types.shared.quant_search import make_stack

BLOCKS = 16, 32, 64, 128, 256           # kernels cut rows at multiples of 256
MAX_NBYTES = 4096
_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_numbers = itertools.count(FIRST_OWN)
f32s = array_maker(types.float32)


# ---------------------------------------------------------------- float16 in bytes
def load_half(block, i):
    """The float16 in bytes i and i + 1 of a block, as a number; in plain Python and in functions that are compiled.

        d = gg.load_half(block, 0)
    """
    return np.float32(struct.unpack("<e", bytes((block[i], block[i + 1])))[0])


def store_half(block, i, value):
    """Write a number as float16 into bytes i and i + 1 of a block: rounded to the nearest, infinity beyond the largest.

        gg.store_half(block, 0, np.abs(x).max() / 127)
    """
    with np.errstate(over="ignore"):
        block[i], block[i + 1] = np.float16(value).tobytes()


@overload(load_half)
def _load_half(block, i):
    def load(block, i):
        return half_of(int(block[i]) | int(block[i + 1]) << 8)
    return load


@overload(store_half)
def _store_half(block, i, value):
    def store(block, i, value):
        bits = half_bits(np.float32(value))
        block[i], block[i + 1] = bits & 255, bits >> 8 & 255
    return store


# ---------------------------------------------------------------- what kernels call
def _compiled(function, **options):
    """The function with all of Numba's means; helpers of kernels have fewer."""
    return njit(error_model="numpy", nogil=True, boundscheck=False, **options)(getattr(function, "py_func", function))


def _row_functions(block, nbytes, to_float, from_float):
    """to_float and from_float of Traits: jitted (src, dst, k)."""
    read, write = _compiled(to_float), _compiled(from_float)

    @exact
    def row_to_float(src, dst, k):
        for i in range(k // block):
            read(u8s(src + i * nbytes, nbytes), f32s(dst + 4 * block * i, block))

    @exact
    def row_from_float(src, dst, k):
        for i in range(k // block):
            write(f32s(src + 4 * block * i, block), u8s(dst + i * nbytes, nbytes))
    return row_to_float, row_from_float


def _tile_of_dot(block, nbytes, dot):
    """The tile of a user's dot."""
    product = _compiled(dot, fastmath=FASTMATH)

    @exact
    def tile(w, ldw, ahead, y, ldy, k, dst, ldd, rows, cols):
        for r in range(rows):
            for j in range(cols):
                total = types.float32(0)
                for i in range(k // block):
                    total += types.float32(product(u8s(w + r * ldw + i * nbytes, nbytes),
                                                   f32s(y + j * ldy + 4 * block * i, block)))
                st_f32(dst + j * ldd + 4 * r, total)
    return tile


def _tile_of_unpacking(block, nbytes, to_float):
    """A tile that unpacks each block once, for all columns."""
    read, stack = _compiled(to_float), make_stack(4 * block)

    @exact
    def tile(w, ldw, ahead, y, ldy, k, dst, ldd, rows, cols):
        x = stack()
        for r in range(rows):
            for j in range(cols):
                st_f32(dst + j * ldd + 4 * r, types.float32(0))
            for i in range(k // block):
                read(u8s(w + r * ldw + i * nbytes, nbytes), f32s(x, block))
                for j in range(cols):
                    column, at, lanes = y + j * ldy + 4 * block * i, dst + j * ldd + 4 * r, zerof()
                    for m in range(0, 4 * block, B):
                        lanes = fma(ldf(x + m), ldf(column + m), lanes)
                    st_f32(at, ld_f32(at) + hsum(lanes))
    return tile


def _float_traits(type, made):
    """Traits of a type whose products take float32 columns as they are."""
    read, write = _row_functions(type.block, type.nbytes, made.to_float, made.from_float)
    tile = _tile_of_dot(type.block, type.nbytes, made.dot) if made.dot else \
        _tile_of_unpacking(type.block, type.nbytes, made.to_float)
    dot = Dot(step=type.block, w_nbytes=type.nbytes, y_nbytes=4 * type.block, load_w_ir=None, tail_w_ir=None,
              load_y_ir=None, mac_ir=None, tile=tile)
    return Traits(type, read, write, dot=dot)


# ---------------------------------------------------------------- the types
@dataclasses.dataclass(frozen=True)
class Lanes:
    """How a block unpacks in vectors, for products as fast as those of ggml's types.  The block begins with a float16,
    its factor: value = factor (code - zero_point).

    codes       (b, address) -> [<32 x i8> for each 32 values]: LLVM IR by the llvmlite builder b
    zero_point  what is subtracted from each code
    max_code    the largest code, at most 127
    """
    codes: Callable
    zero_point: int = 0
    max_code: int = 127


def define_type(name, block, nbytes, to_float, from_float, dot=None, lanes=None):
    """A quantised type of your own: the Type, which gg.quantize, casts, copies, rows and products take from then on.

        q = gg.define_type("mine", 32, 34, to_float, from_float)
        w = gg.tensor(array, type="mine")

    name: of lower-case letters, digits and _.  block: values a block, 16, 32, 64, 128 or 256, in `nbytes` bytes.
    to_float(block, x), from_float(x, block): functions of one block (uint8, nbytes) and its values (float32), which
    write their second argument whole.  dot(block, y): the sum of the block's values times y, if that is faster than
    unpacking.  lanes: gg.Lanes.  All are plain Python that Numba compiles, of numbers alone; they may not raise.
    Before anything is registered they are run on samples, as Python and compiled, with guard bytes and bounds checks.
    A name that was defined before gets the new functions; tensors of the old type can no longer be computed with.
    Errors: ParamError (name, sizes, functions that do not fit each other), TypeMismatch (what does not compile),
    GgjitError at the line of a function that raises, writes outside its array or leaves some of it unwritten.
    """
    name = _checked_name(name)
    if block not in BLOCKS or not is_whole(nbytes, 1) or nbytes > MAX_NBYTES:
        raise ParamError(f"define_type: {name} has blocks of {block!r} values in {nbytes!r} bytes; a block has "
                         f"{', '.join(map(str, BLOCKS))} values in 1 to {MAX_NBYTES} bytes")
    if lanes is not None and not isinstance(lanes, Lanes):
        raise TypeMismatch(f"define_type: lanes is a gg.Lanes, got {lanes.__class__.__name__}")
    if lanes is not None and block % 32:
        raise ParamError(f"define_type: lanes are groups of 32 values, {name} has blocks of {block}; take 32 or more")
    made = own_trial.Functions(name, block, int(nbytes), to_float, from_float, dot)
    values = own_trial.try_functions(made)
    number = next(_numbers)
    if number >= N_NUMBERS:
        raise NotSupported(f"define_type: {N_NUMBERS - FIRST_OWN} types were defined in this process; start it again")
    type = Type(name, number, block, int(nbytes))
    BLOCK_SIZES[number] = type.nbytes, type.block
    traits = _float_traits(type, made)
    if lanes is not None:
        plain = Plain(type, lanes.codes, zero_point=lanes.zero_point, max_code=lanes.max_code)
        traits = plain.traits(traits.from_float)
    add_traits(traits)
    try:
        got = dequantize(type, quantize(type, own_trial.SAMPLES), own_trial.SAMPLES.shape)
        own_trial.check_same(made, values, got, "its kernels" if lanes is None else "its lanes")
    except BaseException:
        remove_traits(type)
        raise
    before = named(name)
    if before is not None:
        remove_type(before)
    OWN[number] = type
    return type


def _checked_name(name):
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ParamError(f"define_type: a name has lower-case letters, digits and _, and begins with a letter, got "
                         f"{name!r}")
    taken = named(name)
    if taken is not None and not taken.is_own:
        raise ParamError(f"define_type: {name!r} is a type of ggml; take another name")
    return name


def remove_type(type):
    """Ops, names and gg.quantize know a type of your own no longer; its tensors stay as they are.

        gg.remove_type("mine")

    Errors: ParamError for a type that is not your own, or not there.
    """
    found = named(type) if isinstance(type, str) else type
    if not isinstance(found, Type) or found.id not in OWN:
        raise ParamError(f"remove_type: {type!r} is not a type that this process defined; these are: "
                         f"{', '.join(t.name for t in OWN.values()) or 'none'}")
    del OWN[found.id]
    remove_traits(found)
