"""Moving rows between types: what copies, get_rows, set_rows share (ops/types/shared/moves.py).

A piece is what one thread moves at a time: an element, or the 32 values of a quantised block's unit.

    mover(ts, td) -> Mover or None      .move(dst, src, i): piece i of a row;  .per_piece elements a piece
"""
import dataclasses
import functools
from collections.abc import Callable

from ggjit.ops.cuda.blocks import BLOCKS, unpacker
from ggjit.ops.cuda.compiler.core import device
from ggjit.ops.cuda.quantize import QUANTIZE
from ggjit.ops.cuda.rows import FLOATS, MOVE, ONE


@dataclasses.dataclass(frozen=True)
class Mover:
    move: Callable
    per_piece: int = 1


@functools.cache
def mover(ts, td):
    """From rows of type ts to rows of td whose elements lie side by side; None where there is no conversion here."""
    if ts is td:
        return Mover(*_same(ts))
    if td in QUANTIZE and ts in FLOATS:
        return Mover(_quantizing(ts, td), 32)
    if ts in BLOCKS and td in FLOATS:
        return Mover(_unpacking(ts, td), 32)
    if ts in ONE and td in ONE:
        get, put, ss, sd = ONE[ts].get, ONE[td].put, ts.nbytes, td.nbytes

        @device
        def convert(dst, src, i):
            put(dst + i * sd, get(src + i * ss))
        return Mover(convert)
    return None


def _same(ty):
    """The piece is an element or a whole block; its bytes are moved as they are."""
    width = ty.nbytes if not ty.quantized else 2 if ty.nbytes % 2 == 0 else 1
    word, size = MOVE[width], ty.nbytes

    @device
    def move(dst, src, i):
        for k in range(0, size, width):
            word(dst + i * size + k, src + i * size + k)
    return move, ty.block


def _quantizing(ts, td):
    quantize, ss, sd = QUANTIZE[td](ONE[ts].get), ts.nbytes, td.nbytes

    @device
    def move(dst, src, i):
        quantize(src + i * 32 * ss, ss, dst + i * sd)
    return move


def _unpacking(ts, td):
    unpack, units, ss, sd, block = unpacker(ts, ONE[td].put, td.nbytes), ts.block // 32, ts.nbytes, td.nbytes, ts.block

    @device
    def move(dst, src, i):
        b = i // units
        unpack(dst + b * block * sd, src + b * ss, i - b * units)
    return move
