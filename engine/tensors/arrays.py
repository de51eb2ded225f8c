"""Tensors from arrays and numbers, and memory for the tensors of a context."""
import operator

import numpy as np

from ggjit.core.buffer import MultiBuffer
from ggjit.core.placing import place_tensors
from ggjit.core.table import TABLE
from ggjit.ops.core.errors import GgjitError, ParamError, TypeMismatch
from ggjit.ops.core.record import OP, T_BUFFER
from ggjit.tensors.context import Context
from ggjit.tensors.leaves import innermost, leaf_of


def from_numpy(ctx, array, name="", type=None):
    """A leaf with the values of `array` (NumPy order; ne is its shape reversed).

    A C-contiguous array of a dtype ggjit has is used in place: later writes to it are seen, and ops that write into
    the tensor write into it.  Others are copied.  `type` converts or quantises.  Errors: TypeMismatch, ShapeError.
    """
    if not isinstance(ctx, Context):
        raise TypeMismatch(f"from_numpy(ctx, array): the first argument is a Context, got {ctx.__class__.__name__}")
    return leaf_of(ctx, array, name, type)


def from_dlpack(x, ctx=None, name=""):
    """A leaf over the memory of `x` (anything with __dlpack__, on the CPU); as from_numpy: later writes to x are seen.

    ctx: by default the innermost `with ctx:`, else a new Context.  x must be C-contiguous to be used in place; other
    strides are copied.  Errors: TypeMismatch (no DLPack, another device, a dtype ggjit has no type for).
    """
    if not hasattr(x, "__dlpack__"):
        raise TypeMismatch(f"from_dlpack takes an object with __dlpack__, got {type(x).__name__}; arrays and lists: "
                           f"gg.from_numpy")
    try:
        a = np.from_dlpack(x)
    except GgjitError:
        raise
    except (BufferError, RuntimeError, TypeError, ValueError) as e:
        raise TypeMismatch(f"from_dlpack: {type(x).__name__} cannot be read as host memory: {e}; copy it to the CPU "
                           f"first") from e
    ctx = innermost() if ctx is None else ctx
    return from_numpy(Context() if ctx is None else ctx, a, name)


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


def alloc_ctx_tensors(ctx, target, all=False):
    """Memory for the leaves of `ctx` that have none, in one buffer (above the type's max size: in several).

    target: a backend or a buffer type.  all=True as ggml: results of ops get memory of their own as well.
    Returns the buffer; None if there was nothing to do; a MultiBuffer when it had to be split.
    Errors: OutOfMemory; nothing is placed and nothing kept then.  Source: ggml_backend_alloc_ctx_tensors.
    """
    todo = [t for t in ctx.tensors
            if t.view_src is None and TABLE.words[t.id, T_BUFFER] < 0 and (all or t.op == OP.NONE)]
    buffers = [buf for buf, _ in place_tensors([(getattr(target, "default_buffer_type", target), todo)])]
    return None if not buffers else buffers[0] if len(buffers) == 1 else MultiBuffer(buffers)
