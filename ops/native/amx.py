"""AMX's instructions, as LLVM IR: products of tiles.

A thread has eight tile registers.  Its configuration gives each so many rows, at most 16, of so many bytes, at most 64;
they are used between `configure_ir` and `release_ir` alone:

    c (16 x 16)  +=  x (16 rows, 4 k bytes)  times  y (k rows of 16 fours: of column j the bytes 4 j ... 4 j + 3)

    add_bytes_ir    c int32, x and y int8: fours are summed          exact
    add_pairs_ir    c float32, x and y bfloat16: pairs are summed    denormals count as zero

Between the two no thread waits, forks or calls anything: the state is never kept for another.  What Linux saves of a
thread for a signal's handler or another process includes it.  A child that is forked begins without tiles.

Tiles have numbers, which are immediates: LLVM neither allocates nor spills them.
"""
import functools
import struct

from llvmlite import ir

from ggjit.ops.native.jit import ir_function
from ggjit.ops.native.lanes import table_ir
from ggjit.ops.native.mem import call_intrinsic, pointer

ROWS, ROW_NBYTES = 16, 64               # of a whole tile
_I8 = ir.IntType(8)


def _call(b, name, *args):
    call_intrinsic(b, f"llvm.x86.{name}", ir.VoidType(), args)


def configure_ir(b, shapes):
    """shapes: of each tile (rows, bytes of a row)."""
    rows, nbytes = zip(*shapes, strict=True)
    palette = struct.pack("<16B 8H 16x 8B 8x", 1, *[0] * 15, *_eight(nbytes), *_eight(rows))
    name = "tiles." + ".".join(f"{r}x{n}" for r, n in shapes)
    _call(b, "ldtilecfg", pointer(b, table_ir(b, name, palette), _I8))


def _eight(numbers):
    return [*numbers, *[0] * (8 - len(numbers))]


def release_ir(b):
    _call(b, "tilerelease")


def zero_ir(b, tile):
    _call(b, "tilezero", _I8(tile))


def load_ir(b, tile, addr, stride):
    """The rows at addr, `stride` bytes (int64) apart."""
    _call(b, "tileloadd64", _I8(tile), pointer(b, addr, _I8), stride)


def store_ir(b, tile, addr, stride):
    _call(b, "tilestored64", _I8(tile), pointer(b, addr, _I8), stride)


def add_bytes_ir(b, c, x, y):
    _call(b, "tdpbssd", _I8(c), _I8(x), _I8(y))


def add_pairs_ir(b, c, x, y):
    _call(b, "tdpbf16ps", _I8(c), _I8(x), _I8(y))


@functools.cache                        # made once, since Numba keeps every intrinsic
def using(*shapes):
    """Jitted (enter, leave), around the use of tiles of these shapes."""
    @ir_function
    def enter(b):
        configure_ir(b, shapes)

    @ir_function
    def leave(b):
        release_ir(b)
    return enter, leave
