"""Which implementation of the seam serves this process: GGJIT_CUDA_COMPILER, or numba-cuda.

    GGJIT_CUDA_COMPILER=simulator       kernels are plain Python functions; NUMBA_ENABLE_CUDASIM=1 says the same
"""
import importlib.util
import os

from ggjit.ops.core.errors import MissingExtra, ParamError

COMPILERS = {"numba-cuda": ("numba_cuda", "cuda"), "simulator": ("greenlet",)}      # what each imports


def _asked():
    simulated = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")
    return os.environ.get("GGJIT_CUDA_COMPILER") or ("simulator" if simulated else "numba-cuda")


NAME = _asked()
SIMULATED = NAME == "simulator"


def missing():
    """The error that says why kernels cannot be compiled here, or None."""
    if NAME not in COMPILERS:
        return ParamError(f"GGJIT_CUDA_COMPILER={NAME!r}; there are {', '.join(COMPILERS)}")
    absent = [m for m in COMPILERS[NAME] if importlib.util.find_spec(m) is None]
    if absent:
        return MissingExtra(f"{NAME} is not installed (no module {absent[0]})")
    return None
