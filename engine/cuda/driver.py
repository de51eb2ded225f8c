"""The CUDA driver API with Python errors.  All calls to the GPU go through this file.

    driver().cuMemAlloc(n)          the C functions under their own names; the status becomes a typed error

`cuda.bindings.driver` (the extra `gpu`) serves, or the simulated one (engine/cuda/simulated_driver.py) where
kernels are simulated (ops/cuda/compiler/choice.py): the same functions, the same arguments.
"""
import functools

from ggjit.core.backend import DeviceLost
from ggjit.ops.core.errors import GgjitError, NotSupported, OutOfMemory, extra
from ggjit.ops.cuda.compiler.choice import EXTRA, SIMULATED, missing

INSTALL = f"pip install 'ggjit[{EXTRA}]'"
MIN_DRIVER = 13000              # cuDriverGetVersion: the CUDA version the extra's toolkit pins need


class CudaError(GgjitError, RuntimeError):
    """Any other failure that the driver reports."""


_ABSENT = {"CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_STUB_LIBRARY"}
_TOO_OLD = {"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
            "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "CUDA_ERROR_INVALID_PTX", "CUDA_ERROR_NO_BINARY_FOR_GPU"}
_LOST = {"CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_LAUNCH_FAILED", "CUDA_ERROR_LAUNCH_TIMEOUT",
         "CUDA_ERROR_ECC_UNCORRECTABLE", "CUDA_ERROR_HARDWARE_STACK_ERROR", "CUDA_ERROR_ILLEGAL_INSTRUCTION",
         "CUDA_ERROR_MISALIGNED_ADDRESS", "CUDA_ERROR_INVALID_ADDRESS_SPACE", "CUDA_ERROR_INVALID_PC",
         "CUDA_ERROR_CONTEXT_IS_DESTROYED", "CUDA_ERROR_DEINITIALIZED", "CUDA_ERROR_DEVICE_UNAVAILABLE",
         "CUDA_ERROR_DEVICE_NOT_LICENSED", "CUDA_ERROR_NVLINK_UNCORRECTABLE", "CUDA_ERROR_CONTAINED",
         "CUDA_ERROR_UNKNOWN"}


def error_of(function, name):
    """The exception for status `name` of the driver's `function`, with what to do about it."""
    what = f"{function}: {name}"
    if name == "CUDA_ERROR_OUT_OF_MEMORY":
        return OutOfMemory(f"{what}: not enough GPU memory; use a smaller context, batch or weight type, or leave more "
                           f"layers on the CPU (n_gpu_layers)")
    if name in _ABSENT:
        return NotSupported(f"{what}: this machine has no NVIDIA GPU that CUDA can use; use the CPU backend")
    if name in _TOO_OLD:
        return NotSupported(f"{what}: the NVIDIA driver does not take code of this CUDA toolkit; update the driver "
                            f"(CUDA {MIN_DRIVER // 1000}.{MIN_DRIVER % 1000 // 10} or newer)")
    if name in _LOST:
        return DeviceLost(f"{what}: the GPU was lost; start a new process to use it again, the CPU backend goes on "
                          f"working in this one")
    return CudaError(f"{what} (see the CUDA driver API's list of errors)")


class Driver:
    """`api`'s functions: status checked, a single value returned as itself, several as a tuple."""

    def __init__(self, api):
        self.api = api

    def __getattr__(self, name):
        function = getattr(self.api, name)
        if not name.startswith("cu"):           # enums and structs
            return function

        def call(*args):
            status, *values = function(*args)
            if status != 0:
                raise error_of(name, getattr(status, "name", str(status)))
            return values[0] if len(values) == 1 else tuple(values) or None
        self.__dict__[name] = call
        return call


def _api():
    if missing() is not None:
        raise missing()
    if SIMULATED:
        from ggjit.cuda import simulated_driver as cuda_sim
        return cuda_sim
    return extra("cuda.bindings.driver", "gpu")


@functools.cache
def driver():
    """The driver, initialised.  Errors: MissingExtra, NotSupported (no driver, no GPU, driver too old)."""
    try:
        found = Driver(_api())
        found.cuInit(0)
        version = int(found.cuDriverGetVersion())
    except GgjitError:
        raise
    except Exception as e:                      # errors of the bindings: libcuda is absent, or lacks a function
        raise NotSupported(f"no usable NVIDIA driver on this machine ({e}); install one, or use the CPU "
                           f"backend") from None
    if version < MIN_DRIVER:
        raise NotSupported(f"the NVIDIA driver serves CUDA {version // 1000}.{version % 1000 // 10}; ggjit needs "
                           f"{MIN_DRIVER // 1000}.{MIN_DRIVER % 1000 // 10}: update the driver")
    return found
