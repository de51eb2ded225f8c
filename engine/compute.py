"""The short ways: tensors from arrays, memory for a context, and `compute(y)`."""
import numpy as np

from ggjit.buffer import ArrayBuffer, MultiBuffer, tensor_alloc
from ggjit.context import Context
from ggjit.graph import Graph
from ggjit.graph_allocator import GraphAllocator
from ggjit.nesting import refuse_nesting
from ggjit.ops.errors import NotAllocated, ParamError, TypeMismatch
from ggjit.ops.record import OP, T_BUFFER
from ggjit.ops.shape import describe
from ggjit.ops.types import F16, F32, F64, I8, I16, I32, I64, Type
from ggjit.placing import place_tensors
from ggjit.registry import init_backend
from ggjit.table import TABLE
from ggjit.tensor import numbers

_TYPE_OF_DTYPE = {t.dtype: t for t in (F32, F16, F64, I8, I16, I32, I64)}
_default = None


def default_backend():
    """The CPU backend that `compute` uses when none is given."""
    global _default
    if _default is None:
        _default = init_backend("CPU", fuse=0)      # one run gains nothing, and every result can be read
    return _default


def from_numpy(ctx, array, name="", type=None):
    """A leaf with the values of `array` (NumPy order; ne is its shape reversed).

    A C-contiguous array of a dtype ggjit has is used in place: later writes to it are seen, and ops that write into
    the tensor write into it.  Others are copied.  `type` converts or quantises.  Errors: TypeMismatch, ShapeError.
    """
    if not isinstance(ctx, Context):
        raise TypeMismatch(f"from_numpy(ctx, array): the first argument is a Context, got {ctx.__class__.__name__}")
    a = numbers(array, "from_numpy")
    if type is not None and not isinstance(type, Type):
        raise TypeMismatch(f"from_numpy: type must be a tensor type such as gg.Q8_0, got {type!r}")
    if type is not None and type.dtype is not None and type.dtype.kind == "i" and a.dtype.kind == "f":
        raise TypeMismatch(f"from_numpy: {a.dtype} values do not go into {type!r}; round them first")
    cpu = default_backend().device
    if type is not None and (a.dtype not in _TYPE_OF_DTYPE or _TYPE_OF_DTYPE[a.dtype] is not type):
        t = ctx.new_tensor(type, a.shape[::-1] or (1,), name)
        tensor_alloc(cpu.buffer_type().alloc_buffer(t.nbytes), t, 0)
        t.set(a)
        return t
    if a.dtype not in _TYPE_OF_DTYPE:
        raise TypeMismatch(f"from_numpy: no tensor type for dtype {a.dtype}; convert it, or give type=gg.F32")
    t = ctx.new_tensor(_TYPE_OF_DTYPE[a.dtype], a.shape[::-1] or (1,), name)
    owned = np.ascontiguousarray(a)
    tensor_alloc(ArrayBuffer(cpu.buffer_type(), owned.reshape(-1) if owned.size else np.empty(0, np.uint8)), t, 0)
    return t


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


def compute(*outputs, backend=None, planner="ggml"):
    """Allocate, run and read: the values of the tensors, one array or a tuple.

        y = gg.soft_max(gg.mul_mat(a, b))
        gg.compute(y)                       # ndarray

    Leaves must have memory (from_numpy, alloc_ctx_tensors).  For repeated runs make a Graph and a plan instead.
    """
    if not outputs:
        raise ParamError("compute needs at least one tensor")
    refuse_nesting()
    backend = backend or default_backend()
    graph = Graph(*outputs)
    for t in graph.leafs:
        if t._where() is None:
            raise NotAllocated(f"{describe(t)} has no values; make it with from_numpy, or allocate it with "
                               f"alloc_ctx_tensors and set it")
    GraphAllocator(backend, planner=planner).alloc_graph(graph)
    plan = backend.graph_plan_create(graph)
    plan.compute()
    outputs[0].ctx.last_plan = plan             # so that y.numpy() can be asked afterwards
    values = tuple(plan.numpy(t) for t in outputs)
    return values[0] if len(values) == 1 else values


