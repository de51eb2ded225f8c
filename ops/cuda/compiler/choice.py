"""Chooses the compiler of this process: GGJIT_CUDA_COMPILER, or numba-cuda.

    GGJIT_CUDA_COMPILER=numba-cuda-mlir     the successor of numba-cuda
    GGJIT_CUDA_COMPILER=simulator           kernels are plain Python functions; NUMBA_ENABLE_CUDASIM=1 says the same
    GGJIT_SIMULATED_BLOCKS=device           as many threads and blocks as on a device, instead of few of both
"""
import importlib.util
import os

from ggjit.ops.core.errors import MissingExtra, ParamError

# the extra of each, and what it imports
COMPILERS = {"numba-cuda": ("gpu", "numba_cuda", "cuda"), "numba-cuda-mlir": ("gpu-mlir", "numba_cuda_mlir", "cuda"),
             "simulator": ("test", "greenlet")}


def _asked():
    simulated = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")
    return os.environ.get("GGJIT_CUDA_COMPILER") or ("simulator" if simulated else "numba-cuda")


NAME = _asked()
SIMULATED = NAME == "simulator"
WALKS = NAME != "numba-cuda-mlir"               # has it the functions of walkers (contract.py)?
WARPGROUPS = WALKS                              # has it those of products of warpgroups?
EXTRA = COMPILERS.get(NAME, ("gpu",))[0]
# the simulator runs blocks one after the other and one thread at a time
SMALL_BLOCKS = SIMULATED and os.environ.get("GGJIT_SIMULATED_BLOCKS") != "device"


def missing():
    """The error that says why kernels cannot be compiled here, or None."""
    if NAME not in COMPILERS:
        return ParamError(f"GGJIT_CUDA_COMPILER={NAME!r}; there are {', '.join(COMPILERS)}")
    absent = [m for m in COMPILERS[NAME][1:] if importlib.util.find_spec(m) is None]
    if absent:
        return MissingExtra(f"{NAME} is not installed (no module {absent[0]})")
    return None


def library_may(variable, *modules):
    """May a library that is asked for by that variable, 0 or 1, and needs these modules be used?  In the simulator
    only where it is asked for."""
    asked = os.environ.get(variable, "0" if SIMULATED else "1") != "0"
    return asked and (SIMULATED or all(importlib.util.find_spec(m) is not None for m in modules))


def library_decided(variable):
    """Is it used wherever it may be?  Otherwise engine/cuda/libraries.py measures."""
    return SIMULATED or variable in os.environ
