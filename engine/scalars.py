"""Small leaves with a value, and zeroing: new_f32, new_i32, set_zero."""
import operator

import numpy as np

from ggjit.compute import from_numpy
from ggjit.copies import tensor_memset
from ggjit.ops.errors import ParamError


def new_f32(ctx, value):
    """A leaf of one F32 element [1] that holds `value`, with memory of its own; NumPy: np.float32(value).

    Errors: TypeMismatch.  Source: ggml_new_f32.
    """
    return from_numpy(ctx, np.array([value], np.float32))


def new_i32(ctx, value):
    """A leaf of one I32 element [1] that holds `value`, with memory of its own; NumPy: np.int32(value).

    Errors: TypeMismatch, ParamError for a value outside 32 bits.  Source: ggml_new_i32.
    """
    n = operator.index(value)
    if not -2 ** 31 <= n < 2 ** 31:
        raise ParamError(f"new_i32: {n} does not fit an I32")
    return from_numpy(ctx, np.array([n], np.int32))


def set_zero(t):
    """All bytes of t from its first element to its last become 0; returns t.  NumPy: t[...] = 0.

    As in ggml this includes what lies in the gaps of a strided view.  Zero bytes are zeros in every type.
    Errors: NotAllocated, StaleHandle, ParamError (read-only memory).  Source: ggml_set_zero.
    """
    if min(t.ne) > 0:
        tensor_memset(t, 0)
    return t
