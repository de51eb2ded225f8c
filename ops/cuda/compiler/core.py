"""The functions that CUDA kernels call: `intrinsics` on the device, `simulated` in the simulator."""
from ggjit.ops.cuda.compiler.choice import SIMULATED

if SIMULATED:
    from ggjit.ops.cuda.compiler.simulated import *  # noqa: F403
else:
    from ggjit.ops.cuda.compiler.intrinsics import *  # noqa: F403
