"""The switches of the engine.  Environment variables are read when ggjit is imported.

    GGJIT_CPU        avx512 | avx2 | neon | generic: instruction set of the kernels (default: the best this host has);
                     or one of its levels (settings.LEVEL_NAMES), such as avx512amx
    GGJIT_CACHE_DIR  where compiled kernels and converted models are kept
    GGJIT_THREADS    default thread count of CPU backends (default: the cores this process may use, without the
                     efficiency cores of hybrid processors)
    GGJIT_TUNE       off | 1 | 2 | 4 | 8: rows of a decode tile by the rule, or given, not measured
    GGJIT_CUSTOM     unchecked: first runs of your own ops are not checked for writes outside their arrays
    GGJIT_DEBUG      comma list: `plan` prints every plan as it is made; `poison` fills computed tensors with NaN bytes
                     before each run; `validate` checks every memory plan with the independent validator; `check`
                     compares every node of every run with its NumPy reference (slow); `sched` prints splits, causes and
                     copies of every graph a scheduler assigns; `copies` those between devices that go by way of the
                     host; `registry` every registry and device that is registered
"""
import os

from ggjit.ops.core.errors import ParamError
from ggjit.ops.core.machine import performance_cores

DEBUG_SWITCHES = {"plan", "poison", "validate", "check", "sched", "copies", "registry"}
MAX_THREADS = 512               # threads of one backend


def _debug():
    asked = {s for s in os.environ.get("GGJIT_DEBUG", "").split(",") if s}
    if asked - DEBUG_SWITCHES:
        raise ParamError(f"GGJIT_DEBUG={','.join(sorted(asked))}: known switches are "
                         f"{', '.join(sorted(DEBUG_SWITCHES))}")
    return asked


debug = _debug()


def default_threads():
    value = os.environ.get("GGJIT_THREADS")
    if not value:
        return performance_cores()
    if not value.isdigit() or not 1 <= int(value) <= MAX_THREADS:
        raise ParamError(f"GGJIT_THREADS={value!r}: expected an integer from 1 to {MAX_THREADS}")
    return int(value)
