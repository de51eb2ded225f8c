"""The functions of `cuda.bindings.driver` that ggjit uses, over host memory and the simulator of kernels.

Same names, same arguments, the same results (a status first).  Streams are queues that do their work when they
are waited for, so that a missing wait shows; a kernel is the Python function itself, handed over where the device gets
its machine code.  `fail[name] = (status name, calls before it)` makes a function fail, for tests.
"""
import collections
import ctypes
import enum
import time
import types

import numpy as np

from ggjit.ops.cuda.compiler.simulator import CooperativeLaunch, SimulatedLaunch, check, expose, withdraw

N_DEVICES = 2
MEMORY_NBYTES = 1 << 30         # memory of each simulated device
fail = {}


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900
    CUDA_ERROR_UNKNOWN = 999


CUdevice_attribute = enum.IntEnum("CUdevice_attribute", {
    "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT": 16, "CU_DEVICE_ATTRIBUTE_INTEGRATED": 18,
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": 75, "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": 76,
    "CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH": 95})
CUstream_flags = enum.IntEnum("CUstream_flags", {"CU_STREAM_NON_BLOCKING": 1})
CUevent_flags = enum.IntEnum("CUevent_flags", {"CU_EVENT_DEFAULT": 0, "CU_EVENT_DISABLE_TIMING": 2})
CUstreamCaptureMode = enum.IntEnum("CUstreamCaptureMode", {"CU_STREAM_CAPTURE_MODE_RELAXED": 2})
_ATTRIBUTES = {16: 4, 18: 0, 75: 9, 76: 0, 95: 1}

_memory = {}                    # address -> (uint8 array that holds it, size, device or None for host memory)
_current = types.SimpleNamespace(device=0)
launched = []                   # names of the kernels run, for tests


def _call(f):
    """Give `f` a status: CUDA_SUCCESS, or what `fail` holds for it."""
    def call(*args):
        if f.__name__ in fail:
            name, left = fail[f.__name__]
            if left == 0:
                return (CUresult[name],)
            fail[f.__name__] = name, left - 1
        status = f(*args)
        if isinstance(status, CUresult):
            return (status,)
        values = () if status is None else status if isinstance(status, tuple) else (status,)
        return CUresult.CUDA_SUCCESS, *values
    call.__name__, call.__wrapped__ = f.__name__, f
    return call


# ---------------------------------------------------------------- devices
@_call
def cuInit(Flags):
    """Nothing to do."""


@_call
def cuDriverGetVersion():
    return 13000


@_call
def cuDeviceGetCount():
    return N_DEVICES


@_call
def cuDeviceGet(ordinal):
    return ordinal if 0 <= ordinal < N_DEVICES else CUresult.CUDA_ERROR_INVALID_VALUE


@_call
def cuDeviceGetName(length, dev):
    return b"simulated GPU".ljust(length, b"\0")


@_call
def cuDeviceGetPCIBusId(length, dev):
    return f"0000:{dev:02x}:00.0".encode().ljust(length, b"\0")


@_call
def cuDeviceGetAttribute(attrib, dev):
    return _ATTRIBUTES[int(attrib)]


@_call
def cuDeviceCanAccessPeer(dev, peerDev):
    return 1


@_call
def cuDevicePrimaryCtxRetain(dev):
    return types.SimpleNamespace(device=dev)


@_call
def cuCtxSetCurrent(ctx):
    _current.device = ctx.device


@_call
def cuCtxEnablePeerAccess(peerContext, Flags):
    """Every simulated device reads every other."""


# ---------------------------------------------------------------- memory
def _used(device):
    return sum(n for _, n, d in _memory.values() if d == device)


def _new(nbytes, device):
    raw = np.full(nbytes + 256, 0xFF, np.uint8)             # filled with NaN bytes, so that no kernel relies on zeros
    base = raw.__array_interface__["data"][0]
    base += -base % 256
    _memory[base] = raw, nbytes, device
    return base


@_call
def cuMemGetInfo():
    return MEMORY_NBYTES - _used(_current.device), MEMORY_NBYTES


@_call
def cuMemAlloc(bytesize):
    if bytesize <= 0:
        return CUresult.CUDA_ERROR_INVALID_VALUE
    if _used(_current.device) + bytesize > MEMORY_NBYTES:
        return CUresult.CUDA_ERROR_OUT_OF_MEMORY
    base = _new(bytesize, _current.device)
    expose(base, bytesize)
    return base


@_call
def cuMemFree(dptr):
    withdraw(int(dptr))
    del _memory[int(dptr)]


@_call
def cuMemHostAlloc(bytesize, Flags):
    return _new(bytesize, None)


@_call
def cuMemFreeHost(p):
    del _memory[int(p)]


def _bytes_at(address, n):
    """The bytes at a host or device address."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * n).from_address(int(address)))


def _copy(stream, dst, src, n, on_device):
    """on_device: addresses that must be device memory, also when the copy is done."""
    def copy():
        for address in on_device:
            check(int(address), n)
        np.copyto(_bytes_at(dst, n), _bytes_at(src, n))
    stream.submit(copy)


@_call
def cuMemcpyHtoDAsync(dstDevice, srcHost, ByteCount, hStream):
    _copy(hStream, dstDevice, srcHost, ByteCount, (dstDevice,))


@_call
def cuMemcpyDtoHAsync(dstHost, srcDevice, ByteCount, hStream):
    _copy(hStream, dstHost, srcDevice, ByteCount, (srcDevice,))


@_call
def cuMemcpyDtoDAsync(dstDevice, srcDevice, ByteCount, hStream):
    _copy(hStream, dstDevice, srcDevice, ByteCount, (dstDevice, srcDevice))


@_call
def cuMemcpyPeerAsync(dstDevice, dstContext, srcDevice, srcContext, ByteCount, hStream):
    _copy(hStream, dstDevice, srcDevice, ByteCount, (dstDevice, srcDevice))


@_call
def cuMemsetD8Async(dstDevice, uc, N, hStream):
    def fill():
        check(int(dstDevice), N)
        _bytes_at(dstDevice, N).fill(uc)
    hStream.submit(fill)


# ---------------------------------------------------------------- streams and events
class SimulatedStream:
    """Work that is done, in order, when it is waited for."""

    def __init__(self):
        self.jobs, self.captured = collections.deque(), None

    def submit(self, job):
        (self.jobs if self.captured is None else self.captured).append(job)

    def run(self, until=None):
        """Do the work up to and including job `until`; all of it by default."""
        while self.jobs:
            job = self.jobs.popleft()
            job()
            if job is until:
                return


class SimulatedEvent:
    """A job of a stream that notes the time; reached once it was done."""
    stream = mark = None
    seconds = 0.0


@_call
def cuStreamCreate(Flags):
    return SimulatedStream()


@_call
def cuStreamDestroy(hStream):
    hStream.run()


@_call
def cuStreamSynchronize(hStream):
    if hStream.captured is not None:
        return CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    hStream.run()


@_call
def cuEventCreate(Flags):
    return SimulatedEvent()


@_call
def cuEventDestroy(hEvent):
    """The simulator holds nothing to be freed."""


@_call
def cuEventRecord(hEvent, hStream):
    def mark():
        hEvent.seconds = time.perf_counter()
    hEvent.stream, hEvent.mark = hStream, mark
    hStream.submit(mark)


def _reach(stream, mark):
    if stream is not None and mark in stream.jobs:
        stream.run(mark)


@_call
def cuEventSynchronize(hEvent):
    _reach(hEvent.stream, hEvent.mark)


@_call
def cuStreamWaitEvent(hStream, hEvent, Flags):
    stream, mark = hEvent.stream, hEvent.mark
    hStream.submit(lambda: _reach(stream, mark))


@_call
def cuEventElapsedTime(hStart, hEnd):
    """Milliseconds."""
    return (hEnd.seconds - hStart.seconds) * 1e3


# ---------------------------------------------------------------- code
@_call
def cuModuleLoadData(image):
    return image if callable(image) else CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU


@_call
def cuModuleGetFunction(hmod, name):
    return hmod


def _launch(kind, f, grid, block, hStream, kernelParams):
    if min(grid) < 1 or max(grid[1:]) > 65535 or not 1 <= block[0] <= 1024:
        return CUresult.CUDA_ERROR_INVALID_VALUE
    first = ctypes.c_void_p.from_address(kernelParams).value
    node = ctypes.c_int64.from_address(first).value         # read when it is launched, as on the device

    def run():
        launched.append(f.__name__)
        kind(f, grid, block, node).run()
    hStream.submit(run)
    return None


@_call
def cuLaunchKernel(f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes, hStream,
                   kernelParams, extra):
    return _launch(SimulatedLaunch, f, (gridDimX, gridDimY, gridDimZ), (blockDimX, blockDimY, blockDimZ), hStream,
                   kernelParams)


@_call
def cuLaunchCooperativeKernel(f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes, hStream,
                              kernelParams):
    return _launch(CooperativeLaunch, f, (gridDimX, gridDimY, gridDimZ), (blockDimX, blockDimY, blockDimZ), hStream,
                   kernelParams)


@_call
def cuOccupancyMaxActiveBlocksPerMultiprocessor(func, blockSize, dynamicSMemSize):
    return 1


class SimulatedCublas:
    """Takes the place of engine/cuda/cublas.py's: products in float64."""

    def multiply(self, gemm, a, b, d, stream):
        def run():
            launched.append(gemm.name)
            x = _floats(a, gemm.type, gemm.m, gemm.k, gemm.lda)
            y = _floats(b, gemm.type, gemm.n, gemm.k, gemm.ldb)
            _rows_at(d, np.float32, gemm.n, gemm.m, gemm.ldc)[...] = y @ x.T
        stream.submit(run)


class SimulatedCccl:
    """Takes the place of engine/cuda/cccl.py's."""

    def prepare(self, sort):
        """Needs no room."""

    def sort(self, sort, work, stream):
        def run():
            launched.append(sort.name)
            words, to = (_rows_at(work + 8 * i * sort.n * sort.n_rows, np.uint64, sort.n_rows, sort.n, sort.n)
                         for i in range(2))
            to[...] = np.take_along_axis(words, np.argsort(words >> np.uint64(32), -1, kind="stable"), -1)
        stream.submit(run)


def _floats(address, type, n_rows, length, ld):
    if type.name == "bf16":
        bits = _rows_at(address, np.uint16, n_rows, length, ld).astype(np.uint32) << 16
        return bits.view(np.float32).astype(np.float64)
    return _rows_at(address, type.dtype, n_rows, length, ld).astype(np.float64)


def _rows_at(address, dtype, n_rows, length, ld):
    """n_rows rows of `length` values, ld from start to start."""
    dtype = np.dtype(dtype)
    flat = _bytes_at(address, ((n_rows - 1) * ld + length) * dtype.itemsize).view(dtype)
    return np.lib.stride_tricks.as_strided(flat, (n_rows, length), (ld * dtype.itemsize, dtype.itemsize))


# ---------------------------------------------------------------- graphs
@_call
def cuStreamBeginCapture(hStream, mode):
    hStream.captured = []


@_call
def cuStreamEndCapture(hStream):
    jobs, hStream.captured = hStream.captured, None
    return jobs


@_call
def cuGraphInstantiate(hGraph, flags):
    return list(hGraph)


@_call
def cuGraphLaunch(hGraphExec, hStream):
    for job in hGraphExec:
        hStream.submit(job)


@_call
def cuGraphDestroy(hGraph):
    """The simulator holds nothing to be freed."""


@_call
def cuGraphExecDestroy(hGraphExec):
    """The simulator holds nothing to be freed."""
