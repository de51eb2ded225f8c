"""The functions that CUDA kernels call, from the compiler of this process or from the simulator."""
from ggjit.ops.cuda.compiler.choice import NAME, SIMULATED

if SIMULATED:
    from ggjit.ops.cuda.compiler.simulated import *  # noqa: F403
    from ggjit.ops.cuda.compiler.simulated_teams import *  # noqa: F403
    from ggjit.ops.cuda.compiler.simulated_warpgroups import *  # noqa: F403
elif NAME == "numba-cuda-mlir":
    from ggjit.ops.cuda.compiler.mlir import *  # noqa: F403
else:
    from ggjit.ops.cuda.compiler.intrinsics import *  # noqa: F403
    from ggjit.ops.cuda.compiler.teams import *  # noqa: F403
    from ggjit.ops.cuda.compiler.warpgroups import *  # noqa: F403
