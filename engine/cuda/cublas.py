"""Dense products by cuBLAS, through nvmath-python's bindings (the extra `cublas`); NumPy in the simulator.

    Cublas(device).multiply(gemm, a, b, d, stream)      addresses on the device; work of the stream, also while captured

These bindings take addresses; nvmath-python's Matmul takes arrays of CuPy, torch or NumPy alone, which ggjit's memory
is not.  gemm_ex has cuBLASLt's kernels and its choice among them.  libraries.py measures whether it is worth it.
"""
import weakref

import numpy as np

from ggjit.cuda.driver import driver
from ggjit.cuda.memory import CUDABuffer
from ggjit.ops.core.errors import NotSupported, extra
from ggjit.ops.core.types import BF16, F16, F32
from ggjit.ops.cuda.compiler.choice import SIMULATED

WORKSPACE_NBYTES = 32 << 20     # NVIDIA's advice for Hopper
TYPES = {F32: 0, F16: 2, BF16: 14}              # values of cudaDataType
COMPUTE_32F, TRANSPOSED, PLAIN, DEFAULT_ALGORITHM = 68, 1, 0, -1


class Cublas:
    """A handle, its workspace and the products of one backend.  Errors: MissingExtra, NotSupported."""

    def __init__(self, device):
        self.api = extra("nvmath.bindings.cublas", "cublas")
        device.use()
        try:
            self.handle = self.api.create()
        except Exception as e:                  # errors of the bindings: no libcublas, or one that does not fit
            raise NotSupported(f"cuBLAS does not start ({e}); GGJIT_CUBLAS=0 does without it") from None
        weakref.finalize(self, device.release, self.api.destroy, self.handle).atexit = False
        self.workspace = CUDABuffer(device.buffer_type(), WORKSPACE_NBYTES)
        self.one, self.zero = np.ones(1, np.float32), np.zeros(1, np.float32)

    def multiply(self, gemm, a, b, d, stream):
        kind = TYPES[gemm.type]
        self.api.set_stream(self.handle, int(stream))
        # setting the stream resets the workspace
        self.api.set_workspace(self.handle, self.workspace.base, WORKSPACE_NBYTES)
        self.api.gemm_ex(self.handle, TRANSPOSED, PLAIN, gemm.m, gemm.n, gemm.k, self.one.ctypes.data, a, kind,
                         gemm.lda, b, kind, gemm.ldb, self.zero.ctypes.data, d, TYPES[F32], gemm.ldc, COMPUTE_32F,
                         DEFAULT_ALGORITHM)


def cublas(device):
    """The cuBLAS handle of one backend of `device`."""
    return driver().api.SimulatedCublas() if SIMULATED else Cublas(device)
