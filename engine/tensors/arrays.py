"""Leaves from arrays and numbers."""
import numpy as np

from ggjit.core.arguments import expect_slot, type_of
from ggjit.core.buffer import tensor_alloc
from ggjit.core.host_buffer import HOST, ArrayBuffer
from ggjit.ops.core.errors import GgjitError, ParamError, TypeMismatch
from ggjit.ops.core.host_memory import oom_guard
from ggjit.ops.core.types import BF16, F16, F32, F64, I8, I16, I32, I64
from ggjit.ops.core.whole_numbers import whole
from ggjit.tensors.interop import read_dlpack

_TYPE_OF_DTYPE = {t.dtype: t for t in (F32, F16, F64, I8, I16, I32, I64)}


def numbers(array, what):
    """`array` as an ndarray of real numbers, or a TypeMismatch."""
    try:
        a = np.asarray(array)
    except GgjitError:
        raise
    except (ValueError, TypeError, RuntimeError) as e:      # a ragged list; another library's array that refuses
        remedy = "; gg.from_dlpack takes bfloat16" if "bfloat16" in str(getattr(array, "dtype", "")) else ""
        raise TypeMismatch(f"{what}: not an array: {type(array).__name__}: {e}{remedy}") from None
    if a.dtype.kind not in "fiub":
        raise TypeMismatch(f"{what}: cannot store {a.dtype} values; convert them to numbers first")
    return a


def from_numpy(ctx, array, name="", type=None):
    """A leaf with the values and the shape of `array` (NumPy order; ne is the shape reversed, filled up with ones).

        w = gg.from_numpy(ctx, np.ones((3, 64), np.float32), "w", type=gg.Q8_0)

    A C-contiguous array of a dtype ggjit has is used in place: later writes to it are seen, and ops that write into
    the tensor write into it.  Others are copied, and gg.tensor(array) copies always.  `type` converts or quantises:
    gg.Q8_0 or its name, "Q8_0". Errors: TypeMismatch, ShapeError.
    """
    expect_slot(ctx, "new_tensor", "from_numpy(ctx, array): the first argument is a Context")
    type = None if type is None else type_of(type, "from_numpy: type")
    with oom_guard("from_numpy"):
        return _from_numpy(ctx, array, name, type)


def _from_numpy(ctx, array, name, type):
    a = numbers(array, "from_numpy")
    if type is not None and type.dtype is not None and type.dtype.kind == "i" and a.dtype.kind == "f":
        raise TypeMismatch(f"from_numpy: {a.dtype} values do not go into {type!r}; round them first")
    native = _TYPE_OF_DTYPE.get(a.dtype)
    if type is None and native is None:
        raise TypeMismatch(f"from_numpy: no tensor type for dtype {a.dtype}; convert it, or give type=gg.F32")
    t = ctx._leaf(native if type is None else type, a.shape[::-1] or (1,), name, a.ndim)
    if t.type is native:
        _in_place(t, a)
    else:
        tensor_alloc(HOST.alloc_buffer(t.nbytes), t, 0)
        t.set(a)
    return t


def _in_place(t, a):
    """Gives the leaf t the memory of `a`, or of a C-contiguous copy."""
    owned = np.ascontiguousarray(a)
    tensor_alloc(ArrayBuffer(HOST, owned.reshape(-1) if owned.size else np.empty(0, np.uint8)), t, 0)


def copied_leaf(t):
    """A leaf of t's context with t's type, shape, name and a copy of its values, bit for bit.  Errors: NotAllocated,
    Overwritten."""
    if t.type.dtype is not None:
        return from_numpy(t.ctx._target(), np.array(t.numpy(), order="C"), t.name)
    raw = t.bytes()                                 # blocks: rows without gaps, or a row each
    size, n_rows = t.type.row_nbytes(t.ne[0]), t.ne[1] * t.ne[2] * t.ne[3]
    if len(raw) != size * n_rows:
        raw = b"".join(raw[i * t.nb[1] + j * t.nb[2] + k * t.nb[3]:][:size]
                       for k in range(t.ne[3]) for j in range(t.ne[2]) for i in range(t.ne[1]))
    leaf = t.ctx._target()._leaf(t.type, t.ne[:t.ndim] or (1,), t.name, t.ndim)
    tensor_alloc(HOST.alloc_buffer(leaf.nbytes), leaf, 0)
    leaf.set_bytes(raw)
    return leaf


def leaf_of_dlpack(ctx, x, name=""):
    """A leaf of `ctx` over the memory of x, an array of any library with DLPack.  Errors: TypeMismatch."""
    if not hasattr(x, "__dlpack__"):
        raise TypeMismatch(f"from_dlpack takes an object with __dlpack__, got {type(x).__name__}; arrays and "
                           f"lists: gg.from_numpy")
    try:
        a, is_bf16 = read_dlpack(x)
    except GgjitError:
        raise
    except (BufferError, RuntimeError, TypeError, ValueError, AttributeError) as e:
        raise TypeMismatch(f"from_dlpack: {type(x).__name__} cannot be read as host memory: {e}; copy it to "
                           f"the CPU first, without its gradient (torch: x.detach().cpu())") from e
    if not is_bf16:
        return from_numpy(ctx, a, name)
    t = ctx._leaf(BF16, a.shape[::-1] or (1,), name, a.ndim)
    _in_place(t, a)
    return t


def array_of(values):
    """Values as an array of a type ggml computes with: Python's floats become float32, its integers int32.

    Integers beyond 32 bits stay int64.  Arrays and tensors keep their dtype.
    """
    a = numbers(values, "tensor")
    if hasattr(values, "dtype") or a.size == 0 and a.dtype.kind != "f":
        return a
    if a.dtype.kind == "f":
        return a.astype(np.float32)
    return a.astype(np.int32) if -2**31 <= int(a.min()) and int(a.max()) < 2**31 else a


def new_f32(ctx, value):
    """A leaf of one F32 element [1] that holds `value`, with memory of its own; NumPy: np.float32(value).

        gg.new_f32(ctx, 0.5)

    Errors: TypeMismatch.  Source: ggml_new_f32.
    """
    return from_numpy(ctx, np.array([value], np.float32))


def new_i32(ctx, value):
    """A leaf of one I32 element [1] that holds `value`, with memory of its own; NumPy: np.int32(value).

        gg.new_i32(ctx, 7)

    Errors: TypeMismatch, ParamError for a value outside 32 bits.  Source: ggml_new_i32.
    """
    n = whole(value, "new_i32: the value")
    if not -2 ** 31 <= n < 2 ** 31:
        raise ParamError(f"new_i32: {n} does not fit an I32")
    return from_numpy(ctx, np.array([n], np.int32))
