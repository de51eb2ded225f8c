"""One element by type: ONE[type].get(addr) -> float32, .put(addr, x); WIDE[type](addr) -> eight of 16 bits as float32;
MOVE[nbytes] moves an element as it is."""
import dataclasses
from collections.abc import Callable

from numpy import float32 as f32

from ggjit.ops.core.types import BF16, F16, F32, I32
from ggjit.ops.cuda.compiler import core


@dataclasses.dataclass(frozen=True)
class One:
    """How an element of a type is read and written; see above."""
    get: Callable
    put: Callable


@core.device
def _get_i32(addr):
    return f32(core.ld_i32(addr))


@core.device
def _put_i32(addr, x):
    core.st_i32(addr, core.to_i32(x))


ONE = {F32: One(core.ld_f32, core.st_f32), F16: One(core.ld_f16, core.st_f16), BF16: One(core.ld_bf16, core.st_bf16),
       I32: One(_get_i32, _put_i32)}
FLOATS = (F32, F16, BF16)


def _eight(low, high):
    @core.device
    def eight(p):
        w0, w1, w2, w3 = core.ld_i32x4(p)
        return low(w0), high(w0), low(w1), high(w1), low(w2), high(w2), low(w3), high(w3)
    return eight


WIDE = {F16: _eight(core.low_f16, core.high_f16), BF16: _eight(core.low_bf16, core.high_bf16)}


# elements as they are, by their size: (load, store), of integers
WORDS = {1: (core.ld_i8, core.st_i8), 2: (core.ld_i16, core.st_i16), 4: (core.ld_i32, core.st_i32),
         8: (core.ld_i64, core.st_i64)}


def _mover(load, store):
    @core.device
    def move(dst, src):
        store(dst, load(src))
    return move


MOVE = {size: _mover(load, store) for size, (load, store) in WORDS.items()}
