"""ggjit: ggml's tensors, graphs, kernels, memory plans and backends as a Numba-JIT engine.

    import ggjit as gg
    ctx = gg.Context()
    a = gg.from_numpy(ctx, np.random.rand(3, 4).astype("f4"))
    gg.compute(gg.soft_max(a))

Folders, lowest first; each imports only those before it:

    ggjit.ops      what is computed           tensors    handles, contexts, data in and out
    ggjit.alloc    where it lies              graphs     what is computed, in which order, placed where
    core           table, buffers, backends   cpu        plans, fusion, threads
                                              profiling, show, sched, cuda, devices, api
"""
if not __name__.startswith("ggjit"):
    raise ImportError("import ggjit, not a folder of the checkout: the repository root is on sys.path")

from ggjit.api.compute import compute
from ggjit.api.measure import measure
from ggjit.core.backend import Backend, Device
from ggjit.core.buffer import USAGE_ANY, USAGE_COMPUTE, USAGE_WEIGHTS, Buffer, BufferType, MultiBuffer, tensor_alloc
from ggjit.core.events import Event, event_free, event_new, event_record, event_synchronize, event_wait
from ggjit.core.host_buffer import HostBuffer
from ggjit.core.shown import Shown as _Shown
from ggjit.cpu.thread_pool import threadpool
from ggjit.devices.registry import init_backend, registry
from ggjit.graphs import pickling as _pickling  # registers how Graphs are pickled
from ggjit.graphs.allocator import GraphAllocator
from ggjit.graphs.copying import GraphCopy, compare_graph_backend, graph_copy
from ggjit.graphs.graph import Graph
from ggjit.ops.core import errors
from ggjit.ops.core.errors import (
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
from ggjit.ops.core.spec import builders as _builders
from ggjit.ops.core.typed_errors import typed_errors as _typed_errors
from ggjit.ops.core.types import BY_NAME as _types
from ggjit.ops.core.types import Type
from ggjit.ops.types.quantize import dequantize, quantize
from ggjit.profiling.profile import profile
from ggjit.sched.scheduler import Scheduler
from ggjit.show import draw as _draw  # registers HTML and pictures of the classes above
from ggjit.show import html as _html
from ggjit.tensors.arrays import alloc_ctx_tensors, from_dlpack, from_numpy, new_f32, new_i32
from ggjit.tensors.context import Context
from ggjit.tensors.tensor import Tensor, set_input, set_name, set_output, set_param
from ggjit.tensors.transfer import (
    same_layout,
    set_zero,
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

__version__ = "0.1.0"

for _name in ("alloc_ctx_tensors", "dequantize", "from_numpy", "init_backend", "measure", "new_f32", "new_i32",
              "quantize", "set_input", "set_name", "set_output", "set_param", "set_zero", "tensor_alloc", "tensor_set",
              "tensor_get", "tensor_memset", "tensor_set_async", "tensor_get_async", "tensor_set_2d", "tensor_get_2d",
              "tensor_set_2d_async", "tensor_get_2d_async", "tensor_copy", "tensor_copy_async", "same_layout",
              "view_init", "graph_copy"):
    globals()[_name] = _typed_errors(globals()[_name])
Type._repr_html_ = _Shown._repr_html_          # ops/ knows nothing of notebooks
globals().update(_builders())                                           # every op under ggml's name
globals().update({repr(t): t for t in _types.values()})                 # gg.F32, gg.Q4_0, ...


def __dir__():
    """What `gg.<TAB>` shows: the API without the folders it is made in; `ops`, `alloc` and `errors` belong to it."""
    internal = {"core", "tensors", "graphs", "cpu", "profiling", "show", "sched", "cuda", "devices", "api"}
    return sorted(n for n in globals() if n not in internal and (not n.startswith("_") or n.startswith("__")))
