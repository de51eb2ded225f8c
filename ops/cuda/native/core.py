"""The functions that CUDA kernels call: `intrinsics` on the device, `simulated` in Numba's simulator."""
from numba import config

SIMULATED = bool(config.ENABLE_CUDASIM)         # NUMBA_ENABLE_CUDASIM=1 when Numba was imported
if SIMULATED:
    from ggjit.ops.cuda.native.simulated import *  # noqa: F403
else:
    from ggjit.ops.cuda.native.intrinsics import *  # noqa: F403
