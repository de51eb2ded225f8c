"""One element by type: ONE[type].get(addr) -> float32, .put(addr, x); COPY[nbytes] moves an element as it is."""
import dataclasses
from collections.abc import Callable

from numpy import float32 as f32

from ggjit.ops.core.types import BF16, F16, F32, I32
from ggjit.ops.cuda.native.core import (
    device,
    ld_bf16,
    ld_f16,
    ld_f32,
    ld_i8,
    ld_i16,
    ld_i32,
    ld_i64,
    st_bf16,
    st_f16,
    st_f32,
    st_i8,
    st_i16,
    st_i32,
    st_i64,
    to_i32,
)


@dataclasses.dataclass(frozen=True)
class One:
    get: Callable
    put: Callable


@device
def _get_i32(addr):
    return f32(ld_i32(addr))


@device
def _put_i32(addr, x):
    st_i32(addr, to_i32(x))


ONE = {F32: One(ld_f32, st_f32), F16: One(ld_f16, st_f16), BF16: One(ld_bf16, st_bf16), I32: One(_get_i32, _put_i32)}
FLOATS = (F32, F16, BF16)


def _mover(load, store):
    @device
    def move(dst, src):
        store(dst, load(src))
    return move


MOVE = {1: _mover(ld_i8, st_i8), 2: _mover(ld_i16, st_i16), 4: _mover(ld_i32, st_i32), 8: _mover(ld_i64, st_i64)}
