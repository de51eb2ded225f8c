"""AMX's tiles as NumPy means them, so that kernels of the level run on any processor with AVX-512.

    become()        in a process of its own, before ggjit is imported
    THREADS         what each thread that used tiles has: its configuration, its tiles, how many products it made
    FAULTS          what a processor would have refused

What a kernel does with the instructions is checked this way; that a processor has them, and means the same, is not.
"""
import ctypes
import threading

import numba
import numpy as np
from llvmlite import binding as llvm
from llvmlite import ir

FAULTS, THREADS = [], []
_own = threading.local()
_kept = []                      # callbacks, which must outlive the kernels


class _Thread:
    def __init__(self):
        self.shapes, self.tiles, self.products = [(0, 0)] * 8, np.zeros((8, 16, 64), np.uint8), 0
        THREADS.append(self)

    def of(self, tile):
        """The used part of a tile."""
        rows, nbytes = self.shapes[tile]
        if not rows or not nbytes:
            raise ValueError(f"tile {tile} is not configured")
        return self.tiles[tile, :rows, :nbytes]

    def product(self, c, x, y):
        """The three tiles, checked as a processor does."""
        (m, n), (rows, k), (fours, nbytes) = (self.of(tile).shape for tile in (c, x, y))
        if len({c, x, y}) < 3 or m != rows or n != nbytes or k != 4 * fours or n % 4:
            raise ValueError(f"tiles of {(m, n)}, {(rows, k)} and {(fours, nbytes)} are multiplied")
        self.products += 1
        return self.of(c), self.of(x), self.of(y)


def _ldtilecfg(own, addr):
    words = ctypes.string_at(addr, 64)
    shapes = list(zip(words[48:56], np.frombuffer(words[16:32], np.uint16).tolist(), strict=True))
    if words[0] != 1 or any(words[1:16] + words[32:48] + words[56:]):
        raise ValueError("not a configuration of palette 1")
    if any(rows > 16 or nbytes > 64 or (rows == 0) != (nbytes == 0) for rows, nbytes in shapes):
        raise ValueError(f"no tile has such a shape: {shapes}")
    own.shapes = shapes
    own.tiles[:] = 0


def _tilerelease(own):
    own.shapes = [(0, 0)] * 8
    own.tiles[:] = 0


def _tilezero(own, tile):
    own.of(tile)
    own.tiles[tile] = 0


def _tileloadd64(own, tile, addr, stride):
    part = own.of(tile)
    rows = [ctypes.string_at(addr + stride * r, part.shape[1]) for r in range(len(part))]
    own.tiles[tile] = 0
    part[:] = np.frombuffer(b"".join(rows), np.uint8).reshape(part.shape)


def _tilestored64(own, tile, addr, stride):
    for r, row in enumerate(own.of(tile)):
        ctypes.memmove(addr + stride * r, row.tobytes(), len(row))


def _tdpbssd(own, c, x, y):
    c, x, y = own.product(c, x, y)
    fours = y.view(np.int8).reshape(len(y), -1, 4).astype(np.int32)             # [k / 4, column, 4]
    columns = fours.transpose(0, 2, 1).reshape(x.shape[1], -1)
    c.view(np.int32)[:] += x.view(np.int8).astype(np.int32) @ columns


def _flushed(x):
    """float32, denormals as zero."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.float32(0), x).astype(np.float32)


def _widened(x):
    return _flushed((x.view(np.uint16).astype(np.uint32) << 16).view(np.float32))


def _tdpbf16ps(own, c, x, y):
    c, x, y = own.product(c, x, y)
    x, y = _widened(x), _widened(y).reshape(len(y), -1, 2)                      # [row, k], [k / 2, column, 2]
    total = np.zeros((len(x), y.shape[1], 2), np.float32)
    for k, pairs in enumerate(y):
        products = x[:, None, 2 * k:2 * k + 2].astype(np.float64) * pairs       # rounded once, with the sum
        total = _flushed((total + products).astype(np.float32))
    sums = c.view(np.float32)
    sums[:] = _flushed(_flushed(sums) + _flushed(total[..., 0] + total[..., 1]))


MEANINGS = {f.__name__[1:]: f for f in (_ldtilecfg, _tilerelease, _tilezero, _tileloadd64, _tilestored64, _tdpbssd,
                                       _tdpbf16ps)}


def run(name, *args):
    """One instruction of this thread; tiles are numbers, memory addresses."""
    if not hasattr(_own, "state"):
        _own.state = _Thread()
    try:
        MEANINGS[name](_own.state, *args)
    except Exception as e:      # of any type: a callback of machine code cannot raise
        FAULTS.append(f"{name}{args}: {e}")


def _call(b, name, *args):
    words = [b.ptrtoint(x, ir.IntType(64)) if isinstance(x.type, ir.PointerType) else
             b.zext(x, ir.IntType(64)) if x.type.width < 64 else x for x in args]
    symbol = f"numpy_{name}"
    if llvm.address_of_symbol(symbol) is None:
        function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(args))(lambda *args: run(name, *args))
        _kept.append(function)
        llvm.add_symbol(symbol, ctypes.cast(function, ctypes.c_void_p).value)
    from ggjit.ops.native.mem import call_intrinsic
    call_intrinsic(b, symbol, ir.VoidType(), words)


def become():
    host = [f for f, on in llvm.get_host_cpu_features().items() if on and not f.startswith("amx")]
    config, kept = numba.config, numba.config.CPU_FEATURES
    config.CPU_FEATURES = ",".join(f"+{f}" for f in [*host, "amx-tile", "amx-int8", "amx-bf16"])
    from ggjit.ops.core import machine
    machine.tiles_refused = lambda: ""                  # none of the processor's is used
    from ggjit.ops.native import amx, isa
    config.CPU_FEATURES = kept
    assert isa.AMX, isa.LEVEL
    isa.AMX_ASKED = True
    amx._call = _call
