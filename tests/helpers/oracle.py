"""The real ggml as a test oracle: one op or one conversion at a time, in a worker process.

    o = oracle.connect()                                    # skips the test where no wheel is installed
    y = o.op("mul_mat", [w, x], types=["Q4_0"])             # NumPy order in and out (ne0 is the last axis)
    y = o.op("soft_max_ext", [x, mask], params=[0.125, 0.0])
    raw = o.quantize("Q8_0", array)                         # uint8 (..., row bytes)

A worker, because ggml aborts the process on a failed assert: the next call then raises, and a new worker is started.
"""
import pytest

from ggjit.tools.suite.ggml import libraries
from ggjit.tools.suite.oracle import of_wheel


def connect(wheel="pywhispercpp"):
    """The oracle of a wheel; skips the running test where it is not installed."""
    if not libraries(wheel):
        pytest.skip(f"the real ggml as oracle: {wheel} is not installed")
    return of_wheel(wheel)
