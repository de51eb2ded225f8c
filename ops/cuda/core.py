"""What kernels are written in: the intrinsics of the device, or their twins where the simulator serves."""
from numba import config

SIMULATED = bool(config.ENABLE_CUDASIM)         # NUMBA_ENABLE_CUDASIM=1 when Numba was imported
if SIMULATED:
    from ggjit.ops.cuda.twins import *  # noqa: F403
else:
    from ggjit.ops.cuda.intrinsics import *  # noqa: F403
