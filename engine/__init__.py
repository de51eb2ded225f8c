"""ggjit: ggml's tensors, graphs, kernels, memory plans and backends as a Numba-JIT engine.

    import ggjit as gg
    ctx = gg.Context()
    a = gg.from_numpy(ctx, np.random.rand(3, 4).astype("f4"))
    gg.compute(gg.soft_max(a))

Read in this order: `table` (a tensor is a row), `context` and `tensor` (handles), `graph`, `plan` (kernels and
addresses), `pool` (threads), then `ggjit.ops` (what is computed) and `ggjit.alloc` (where it lies).
"""
if not __name__.startswith("ggjit"):
    raise ImportError("import ggjit, not a folder of the checkout: the repository root is on sys.path")

from ggjit.backend import Backend, Device
from ggjit.buffer import (
    USAGE_ANY,
    USAGE_COMPUTE,
    USAGE_WEIGHTS,
    Buffer,
    BufferType,
    HostBuffer,
    MultiBuffer,
    tensor_alloc,
)
from ggjit.compute import alloc_ctx_tensors, compute, from_numpy
from ggjit.context import Context
from ggjit.copies import (
    GraphCopy,
    compare_graph_backend,
    graph_copy,
    same_layout,
    tensor_copy,
    tensor_copy_async,
    tensor_get,
    tensor_get_2d,
    tensor_get_2d_async,
    tensor_get_async,
    tensor_memset,
    tensor_set,
    tensor_set_2d,
    tensor_set_2d_async,
    tensor_set_async,
    view_init,
)
from ggjit.events import Event, event_free, event_new, event_record, event_synchronize, event_wait
from ggjit.graph import Graph
from ggjit.graph_allocator import GraphAllocator
from ggjit.interop import from_dlpack
from ggjit.measure import measure
from ggjit.ops import errors
from ggjit.ops.errors import (
    BadFile,
    Cancelled,
    GgjitError,
    IndexRangeError,
    MissingExtra,
    ModelError,
    NotAllocated,
    NotSupported,
    OutOfMemory,
    Overwritten,
    ParamError,
    ShapeError,
    StaleHandle,
    TypeMismatch,
)
from ggjit.ops.front_door import front_door as _front_door
from ggjit.ops.quantize import dequantize, quantize
from ggjit.ops.spec import builders as _builders
from ggjit.ops.types.traits import BY_NAME as _types
from ggjit.ops.types.traits import Type
from ggjit.pool import threadpool
from ggjit.profile import profile
from ggjit.registry import init_backend, registry
from ggjit.scalars import new_f32, new_i32, set_zero
from ggjit.show import Shown as _Shown
from ggjit.tensor import Tensor, set_input, set_name, set_output, set_param

__version__ = "0.1.0"

for _name in ("alloc_ctx_tensors", "dequantize", "from_numpy", "init_backend", "measure", "new_f32", "new_i32",
              "quantize", "set_input", "set_name", "set_output", "set_param", "set_zero", "tensor_alloc", "tensor_set",
              "tensor_get", "tensor_memset", "tensor_set_async", "tensor_get_async", "tensor_set_2d", "tensor_get_2d",
              "tensor_set_2d_async", "tensor_get_2d_async", "tensor_copy", "tensor_copy_async", "same_layout",
              "view_init", "graph_copy"):
    globals()[_name] = _front_door(globals()[_name])
Type._repr_html_ = _Shown._repr_html_          # ops/ knows nothing of notebooks
globals().update(_builders())                                           # every op under ggml's name
globals().update({repr(t): t for t in _types.values()})                 # gg.F32, gg.Q4_0, ...


def __getattr__(name):
    """gg.Scheduler is imported when it is first asked for: one device needs none of it."""
    if name == "Scheduler":
        from ggjit.sched import Scheduler
        globals()[name] = Scheduler
        return Scheduler
    raise AttributeError(f"module 'ggjit' has no attribute {name!r}")
