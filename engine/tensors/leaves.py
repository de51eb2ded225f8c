"""Leaves from arrays, and the context that new tensors go to."""
import threading

import numpy as np

from ggjit.core.buffer import tensor_alloc
from ggjit.core.host_buffer import HOST, ArrayBuffer
from ggjit.ops.core.errors import TypeMismatch
from ggjit.ops.core.types import F16, F32, F64, I8, I16, I32, I64, Type

ACTIVE = threading.local()      # .stack: the contexts of this thread's `with ctx:` blocks
_TYPE_OF_DTYPE = {t.dtype: t for t in (F32, F16, F64, I8, I16, I32, I64)}


def innermost(default=None):
    """The context of the innermost `with ctx:` of this thread."""
    stack = getattr(ACTIVE, "stack", None)
    return stack[-1] if stack else default


def numbers(array, what):
    """`array` as an ndarray of real numbers, or a TypeMismatch."""
    try:
        a = np.asarray(array)
    except ValueError as e:                 # a ragged list
        raise TypeMismatch(f"{what}: not an array: {e}") from None
    if a.dtype.kind not in "fiub":
        raise TypeMismatch(f"{what}: cannot store {a.dtype} values; convert them to numbers first")
    return a


def leaf_of(ctx, array, name="", type=None):
    """A leaf of `ctx` with the values of `array`: what gg.from_numpy does once its context is checked."""
    a = numbers(array, "from_numpy")
    if type is not None and not isinstance(type, Type):
        raise TypeMismatch(f"from_numpy: type must be a tensor type such as gg.Q8_0, got {type!r}")
    if type is not None and type.dtype is not None and type.dtype.kind == "i" and a.dtype.kind == "f":
        raise TypeMismatch(f"from_numpy: {a.dtype} values do not go into {type!r}; round them first")
    if type is not None and (a.dtype not in _TYPE_OF_DTYPE or _TYPE_OF_DTYPE[a.dtype] is not type):
        t = ctx.new_tensor(type, a.shape[::-1] or (1,), name)
        tensor_alloc(HOST.alloc_buffer(t.nbytes), t, 0)
        t.set(a)
        return t
    if a.dtype not in _TYPE_OF_DTYPE:
        raise TypeMismatch(f"from_numpy: no tensor type for dtype {a.dtype}; convert it, or give type=gg.F32")
    t = ctx.new_tensor(_TYPE_OF_DTYPE[a.dtype], a.shape[::-1] or (1,), name)
    owned = np.ascontiguousarray(a)
    tensor_alloc(ArrayBuffer(HOST, owned.reshape(-1) if owned.size else np.empty(0, np.uint8)), t, 0)
    return t
