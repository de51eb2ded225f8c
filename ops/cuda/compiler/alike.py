"""Functions that numba-cuda and numba-cuda-mlir write alike: threads, warps, float32.

The compiler of this process (choice.py) brings `cuda`, `types` and `libdevice`; `intrinsics.py` and `mlir.py` go on.
"""
import weakref

from ggjit.ops.cuda.compiler.choice import NAME

if NAME == "numba-cuda-mlir":
    from numba_cuda_mlir import cuda, types
    from numba_cuda_mlir.cuda import libdevice
else:
    from numba import cuda, types
    from numba.cuda import libdevice

FULL = 0xFFFFFFFF               # mask of all lanes
made = weakref.WeakSet()        # every device function there is: compiled anew for teams (teams.py)
local = cuda.local              # local.array(n, type name): memory of one thread, n a constant


def device(f):
    """A function that kernels call."""
    found = cuda.jit(f, device=True, forceinline=True)
    made.add(found)
    return found


def table(values):
    """A function of an index that gives the values of an int32 array, which is kept in constant memory."""
    @device
    def value(i):
        return values[i]
    return value


# ---------------------------------------------------------------- who am I
@device
def thread():
    """Number of this thread in its block (blocks are one-dimensional)."""
    return types.int64(cuda.threadIdx.x)


@device
def n_threads():
    return types.int64(cuda.blockDim.x)


@device
def block():
    return types.int64(cuda.blockIdx.x)


@device
def n_blocks():
    return types.int64(cuda.gridDim.x)


@device
def block_y():
    return types.int64(cuda.blockIdx.y)


@device
def block_z():
    return types.int64(cuda.blockIdx.z)


@device
def sync():
    """All threads of the block are here; what they wrote to memory is seen by all."""
    cuda.syncthreads()


# ---------------------------------------------------------------- warps
@device
def shfl_xor(x, mask):
    """The value of x in lane `lane ^ mask` of the warp."""
    return cuda.shfl_xor_sync(FULL, x, mask)


@device
def shfl(x, lane):
    """The value of x in lane `lane` of the warp."""
    return cuda.shfl_sync(FULL, x, lane)


@device
def ballot(predicate):
    """Bit i: the predicate of lane i."""
    return types.int64(cuda.ballot_sync(FULL, predicate)) & FULL


@device
def popcount(x):
    """Ones among the bits of x."""
    return types.int64(cuda.popc(x))


@device
def warp_sum(x):
    """Sum of x over the 32 lanes of the warp, in every lane."""
    x += cuda.shfl_xor_sync(FULL, x, 16)
    x += cuda.shfl_xor_sync(FULL, x, 8)
    x += cuda.shfl_xor_sync(FULL, x, 4)
    x += cuda.shfl_xor_sync(FULL, x, 2)
    x += cuda.shfl_xor_sync(FULL, x, 1)
    return x


@device
def warp_max(x):
    """Maximum of x over the warp, in every lane."""
    x = max(x, cuda.shfl_xor_sync(FULL, x, 16))
    x = max(x, cuda.shfl_xor_sync(FULL, x, 8))
    x = max(x, cuda.shfl_xor_sync(FULL, x, 4))
    x = max(x, cuda.shfl_xor_sync(FULL, x, 2))
    return max(x, cuda.shfl_xor_sync(FULL, x, 1))


# ---------------------------------------------------------------- functions of float32
def _of_one(f):
    """A float32 function of libdevice as a device function."""
    @device
    def call(x):
        return f(x)
    return call


def _of_two(f):
    @device
    def call(x, y):
        return f(x, y)
    return call


exp, expm1, log, log1p, sqrt = (_of_one(f) for f in (
    libdevice.expf, libdevice.expm1f, libdevice.logf, libdevice.log1pf, libdevice.sqrtf))
sin, cos, tanh, erf, erfc = (_of_one(f) for f in (
    libdevice.sinf, libdevice.cosf, libdevice.tanhf, libdevice.erff, libdevice.erfcf))
fabs, floor, ceil, trunc, round_away = (_of_one(f) for f in (
    libdevice.fabsf, libdevice.floorf, libdevice.ceilf, libdevice.truncf, libdevice.roundf))
power = _of_two(libdevice.powf)
fmin, fmax = _of_two(libdevice.fminf), _of_two(libdevice.fmaxf)               # the number where the other is NaN
