"""What a kernel's status means to the user: the exception for a run that stopped at a node."""
from ggjit.ops.core.errors import GgjitError, IndexRangeError
from ggjit.ops.core.record import BAD_ARGUMENT, BAD_INDEX
from ggjit.ops.core.shape import describe
from ggjit.ops.core.spec import all_specs
from ggjit.ops.elementwise.custom import RAISED


def kernel_error(status, t, kernel, value):
    """The exception for `status` of the kernel that computes t; value: what the kernel left for the message."""
    if status == RAISED and hasattr(kernel, "error"):       # a function of the user's (ops/elementwise/custom.py)
        return kernel.error()
    if status == BAD_INDEX:
        indexed = all_specs()[t.op].indexed
        return IndexRangeError(f"{t!r}: index {value} is out of range for "
                               f"{describe(t if indexed is None else t.src[indexed])}; sources: "
                               f"{', '.join(describe(s) for s in t.src)}")
    what = "was given a combination it does not know" if status == BAD_ARGUMENT else f"failed with status {status}"
    return GgjitError(f"the kernel of {t!r} {what} (value {value})")
