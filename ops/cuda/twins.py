"""The names of `intrinsics.py` for Numba's CUDA simulator (NUMBA_ENABLE_CUDASIM=1), in plain Python.

Addresses are real: simulated device memory is host memory that was announced with `expose`, and every load and store is
checked against it, freed memory and wrong alignment included.

The threads of a block take turns; a turn ends where the thread waits for others:

    lane 0   ....|wait                ....|wait            one runs at a time, in an order drawn anew for every
    lane 1       ....|wait       ....     |wait            phase, so that a missing barrier shows
    lane 2            ....|wait ......|done                 all that wait for one another are released together

Numba's own block manager polls its threads, has no warp operations, and lets a barrier pass that some threads never
reach; ours takes its place while this process lives, and reports such a barrier.
"""
import bisect
import ctypes
import random
import threading

import numpy as np
from numba.cuda.simulator import kernel as simulator

from ggjit.ops.errors import GgjitError

f32 = np.float32
WARP = 32


class SimulationFault(GgjitError, RuntimeError):
    """A kernel touched memory it does not own, or its threads wait for each other for ever."""


# ---------------------------------------------------------------- memory
_bases, _ends = [], []          # sorted; the ranges never overlap


def expose(base, nbytes):
    """Make [base, base + nbytes) memory that kernels may touch."""
    i = bisect.bisect(_bases, base)
    _bases.insert(i, base)
    _ends.insert(i, base + nbytes)


def withdraw(base):
    """Take back what `expose` announced."""
    i = bisect.bisect_left(_bases, base)
    del _bases[i], _ends[i]


def check(addr, nbytes, alignment=1):
    """SimulationFault unless the range lies in one exposed piece of memory."""
    i = bisect.bisect(_bases, addr) - 1
    if i < 0 or addr + nbytes > _ends[i]:
        near = "no memory before it" if i < 0 else f"{addr - _bases[i]} in a piece of {_ends[i] - _bases[i]}"
        raise SimulationFault(f"{nbytes} bytes at an address outside all memory ({near})")
    if addr % alignment:
        raise SimulationFault(f"{nbytes} bytes at {addr % alignment} past a multiple of {alignment}")


def _scalar(ctype, convert):
    nbytes = ctypes.sizeof(ctype)

    def load(addr):
        check(addr, nbytes, nbytes)
        return convert(ctype.from_address(int(addr)).value)

    def store(addr, value):
        check(addr, nbytes, nbytes)
        ctype.from_address(int(addr)).value = value
    return load, store


ld_f32, st_f32 = _scalar(ctypes.c_float, f32)
ld_i64, st_i64 = _scalar(ctypes.c_int64, int)
ld_i32, st_i32 = _scalar(ctypes.c_int32, int)
ld_i16, st_i16 = _scalar(ctypes.c_int16, int)
ld_u16, st_u16 = _scalar(ctypes.c_uint16, int)
ld_i8, st_i8 = _scalar(ctypes.c_int8, int)
ld_u8, _ = _scalar(ctypes.c_uint8, int)
ldc_i64, ldc_i32, ldc_f32 = ld_i64, ld_i32, ld_f32


def half_bits(x):
    with np.errstate(all="ignore"):
        return int(np.float16(x).view(np.uint16))


def half_value(bits):
    return f32(np.uint16(bits).view(np.float16))


def bf16_bits(x):
    bits = int(f32(x).view(np.uint32))
    if x != x:
        return bits >> 16 | 64
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 & 0xFFFF


def bf16_value(bits):
    return np.uint32(bits << 16).view(f32)


def ld_f16(addr):
    return half_value(ld_u16(addr))


def st_f16(addr, x):
    st_u16(addr, half_bits(x))


def ld_bf16(addr):
    return bf16_value(ld_u16(addr))


def st_bf16(addr, x):
    st_u16(addr, bf16_bits(x))


lds_f32, sts_f32, lds_i32, sts_i32 = ld_f32, st_f32, ld_i32, st_i32
lds_f16, sts_f16, sts_bf16, sts_i8 = ld_f16, st_f16, st_bf16, st_i8


def _signed(x):
    """The low 32 bits as an int32."""
    return (x + (1 << 31)) % (1 << 32) - (1 << 31)


def ld_i32_2(addr):
    return _signed(ld_u16(addr) | ld_u16(addr + 2) << 16)


def ld_i32x4(addr):
    check(addr, 16, 16)
    return tuple(ld_i32(addr + 4 * i) for i in range(4))


def ld_f32x4(addr):
    check(addr, 16, 16)
    return tuple(ld_f32(addr + 4 * i) for i in range(4))


def sts_i32x4(addr, v):
    check(addr, 16, 16)
    for i in range(4):
        st_i32(addr + 4 * i, v[i])


def shared(nbytes):
    key = object()
    return lambda: _me().block.shared(key, nbytes)


# ---------------------------------------------------------------- threads that take turns
class _Stopped(BaseException):
    """Another thread of the block failed."""


class _Lane(threading.Thread):
    """A CUDA thread; it runs while it holds the turn, and serves one block after the other."""

    def __init__(self):
        super().__init__(daemon=True)
        self.turn = threading.Lock()
        self.turn.acquire()
        self.start()

    def join_block(self, block, number, call):
        self.block, self.number, self.call = block, number, call
        self.warp, self.lane = number // WARP, number % WARP
        self.threadIdx, self.blockIdx = simulator.Dim3(number, 0, 0), block.blockIdx    # what `cuda.threadIdx` reads
        self.waits, self.given, self.taken, self.error, self.stopped = None, None, None, None, False

    def run(self):
        np.seterr(all="ignore")
        while True:
            self.turn.acquire()
            try:
                self.call()
            except _Stopped:
                pass
            except BaseException as e:          # handed to the thread that launched the kernel
                self.error = e
            self.waits = "done"
            self.block.handed_back.release()

    def wait(self, what, given=None):
        """End the turn until everybody concerned waits for the same; returns what they gave."""
        self.waits, self.given = what, given
        self.block.handed_back.release()
        self.turn.acquire()
        if self.stopped:
            raise _Stopped
        return self.taken


_lanes = []
_order = random.Random(0)


class Block:
    """Runs the threads of a block (in place of numba.cuda.simulator.kernel.BlockManager)."""

    def __init__(self, f, grid_dim, block_dim, debug):
        self.f, self.grid_dim, self.block_dim = f, grid_dim, block_dim
        self.handed_back = threading.Lock()
        self.handed_back.acquire()
        self.pieces = {}

    def shared(self, key, nbytes):
        """Address of a piece of shared memory, full of NaN at first."""
        if key not in self.pieces:
            raw = np.full(nbytes + 16, 0xFF, np.uint8)
            base = raw.__array_interface__["data"][0]
            base += -base % 16
            self.pieces[key] = raw, base
            expose(base, nbytes)
        return self.pieces[key][1]

    def run(self, grid_point, *args):
        n = self.block_dim[0]
        if n % WARP or self.block_dim[1:] != (1, 1):
            raise SimulationFault(f"a block of {self.block_dim} threads is not whole warps in one dimension")
        self.blockIdx = simulator.Dim3(*grid_point)
        while len(_lanes) < n:
            _lanes.append(_Lane())
        lanes = _lanes[:n]
        for number, lane in enumerate(lanes):
            lane.join_block(self, number, lambda: self.f(*args))
        try:
            self.take_turns(lanes)
        finally:
            for lane in lanes:
                if lane.waits != "done":
                    lane.stopped = True
                    self.let(lane)
            for _, base in self.pieces.values():
                withdraw(base)

    def let(self, lane):
        lane.turn.release()
        self.handed_back.acquire()

    def take_turns(self, lanes):
        ready = list(lanes)
        while ready:
            _order.shuffle(ready)
            for lane in ready:
                lane.waits = None
                self.let(lane)
                if lane.error is not None:
                    where = f"block {tuple(self.blockIdx)} thread {lane.number}"
                    raise SimulationFault(f"{where}: {lane.error!r}") from lane.error
            ready = self.released(lanes)
        stuck = sorted({str(lane.waits) for lane in lanes if lane.waits != "done"})
        if stuck:
            raise SimulationFault(f"threads wait for others that never come: {', '.join(stuck)}")

    def released(self, lanes):
        """The lanes whose wait is over, with what the others gave."""
        out, live = [], [lane for lane in lanes if lane.waits != "done"]
        if live and all(lane.waits == "block" for lane in live):
            return live
        for w in range(0, len(lanes), WARP):
            warp = lanes[w:w + WARP]
            what = warp[0].waits
            if what not in ("done", "block") and all(lane.waits == what for lane in warp):
                given = [lane.given for lane in warp]
                for lane in warp:
                    lane.taken = given
                out += warp
        return out


simulator.BlockManager = Block


def _me():
    return threading.current_thread()


def device(f):
    """Device functions are plain functions here."""
    return f


def thread():
    return _me().number


def n_threads():
    return _me().block.block_dim[0]


def block():
    return _me().block.blockIdx.x


def n_blocks():
    return _me().block.grid_dim[0]


def block_y():
    return _me().block.blockIdx.y


def block_z():
    return _me().block.blockIdx.z


def sync():
    _me().wait("block")


# ---------------------------------------------------------------- bits
def f32_bits(x):
    return int(f32(x).view(np.int32))


def bits_f32(x):
    return np.int32(x).view(f32)


def low_f16(x):
    return half_value(x & 0xFFFF)


def high_f16(x):
    return half_value(x >> 16 & 0xFFFF)


def low_bf16(x):
    return bf16_value(x & 0xFFFF)


def high_bf16(x):
    return bf16_value(x >> 16 & 0xFFFF)


def round_f16(x):
    return half_value(half_bits(x))


def round_bf16(x):
    return bf16_value(bf16_bits(x))


def pack_f16(low, high):
    return _signed(half_bits(low) | half_bits(high) << 16)


def pack_bf16(low, high):
    return _signed(bf16_bits(low) | bf16_bits(high) << 16)


def to_i32(x):
    return 0 if x != x else int(min(max(float(x), -2147483648.0), 2147483647.0))


# ---------------------------------------------------------------- arithmetic
def _bytes_of(words):
    """int32 words -> their signed bytes, little end first."""
    return np.array([w & 0xFFFFFFFF for w in words], np.uint32).view(np.int8).astype(np.int64)


def dp4a(a, b, c):
    return int(c) + int(_bytes_of([a]) @ _bytes_of([b]))


def _once_per_warp(name, given, compute):
    """What `compute` makes of all lanes' values, a list with an entry per lane; the first lane to go on computes it."""
    me = _me()
    values = me.wait(name, given)
    if len(values) == WARP:                     # one list for the whole warp
        values.append(compute(values))
    return values[WARP][me.lane]


def _fragments(d):
    """The four results of every lane, of a 16 x 8 matrix: (g, 2 t), (g, 2 t + 1), (g + 8, 2 t), (g + 8, 2 t + 1)."""
    return [(d[g, 2 * t], d[g, 2 * t + 1], d[g + 8, 2 * t], d[g + 8, 2 * t + 1])
            for g, t in (divmod(lane, 4) for lane in range(WARP))]


def _mma(name, value):
    """m16n8k16 of 16-bit floats, fragments as the PTX ISA has them, g = lane / 4, t = lane % 4, two values a word:

        A 16 x 16    a0 (g, t), a1 (g + 8, t), a2 (g, t + 4), a3 (g + 8, t + 4)         (row, word of the row)
        B 16 x 8     b0 (t, g), b1 (t + 4, g)                                           (word of the column, column)
    """
    def compute(words):
        a, b, c = np.zeros((16, 16), f32), np.zeros((16, 8), f32), np.zeros((16, 8), f32)
        for lane, (a0, a1, a2, a3, b0, b1, *cs) in enumerate(words):
            g, t = divmod(lane, 4)
            for row, word, bits in ((g, t, a0), (g + 8, t, a1), (g, t + 4, a2), (g + 8, t + 4, a3)):
                a[row, 2 * word:2 * word + 2] = value(bits & 0xFFFF), value(bits >> 16 & 0xFFFF)
            for word, bits in ((t, b0), (t + 4, b1)):
                b[2 * word:2 * word + 2, g] = value(bits & 0xFFFF), value(bits >> 16 & 0xFFFF)
            c[g, 2 * t:2 * t + 2], c[g + 8, 2 * t:2 * t + 2] = cs[:2], cs[2:]
        return _fragments(c + a @ b)
    return lambda *words: _once_per_warp(name, words, compute)


mma_f16, mma_bf16 = _mma("mma_f16", half_value), _mma("mma_bf16", bf16_value)


def _mma_i8(words):
    """m16n8k16 of bytes, four a word: a0 (g, t), a1 (g + 8, t), b0 (t, g)."""
    a, b = np.zeros((16, 16), np.int64), np.zeros((16, 8), np.int64)
    for lane, (a0, a1, b0) in enumerate(words):
        g, t = divmod(lane, 4)
        a[g, 4 * t:4 * t + 4], a[g + 8, 4 * t:4 * t + 4] = _bytes_of([a0]), _bytes_of([a1])
        b[4 * t:4 * t + 4, g] = _bytes_of([b0])
    return [tuple(map(int, r)) for r in _fragments(a @ b)]


def mma_i8(a0, a1, b0):
    return _once_per_warp("mma_i8", (a0, a1, b0), _mma_i8)


def shfl_xor(x, mask):
    me = _me()
    return me.wait(f"shfl_xor {mask}", x)[me.lane ^ mask]


def shfl(x, lane):
    return _me().wait("shfl", x)[lane]


def _butterfly(name, combine):
    """The same tree as on the device: lane i meets i ^ 16, i ^ 8, ..."""
    def compute(level):
        for step in (16, 8, 4, 2, 1):
            level = [combine(level[i], level[i ^ step]) for i in range(WARP)]
        return level
    return lambda x: _once_per_warp(name, x, compute)


warp_sum, warp_max = _butterfly("warp_sum", lambda x, y: x + y), _butterfly("warp_max", max)


# ---------------------------------------------------------------- functions of float32
def _function(f):
    return lambda *x: f32(f(*(f32(v) for v in x)))


exp, expm1, log, log1p = (_function(f) for f in (np.exp, np.expm1, np.log, np.log1p))
sqrt, sin, cos, tanh = (_function(f) for f in (np.sqrt, np.sin, np.cos, np.tanh))
power, atan2 = _function(np.power), _function(np.arctan2)
fabs, floor, ceil, trunc, round_even = (_function(f) for f in (np.abs, np.floor, np.ceil, np.trunc, np.rint))
fmin, fmax = _function(np.fmin), _function(np.fmax)


def _libm(name):
    import math
    return lambda x: f32(getattr(math, name)(float(x)))


erf, erfc = _libm("erf"), _libm("erfc")


def round_away(x):
    return np.trunc(f32(x) + np.copysign(f32(0.5), f32(x)))
