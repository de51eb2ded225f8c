"""The names of `ggjit`: all of the API but `train` and `cluster`.  Imported when the first of them is used.

What has to be known to others is registered here too: how Graphs are pickled, what notebooks show.
"""
# ruff: noqa: F401
import ggjit.alloc as alloc
from ggjit.api.compute import compute
from ggjit.api.examples import with_example as _with_example
from ggjit.api.explore import explore
from ggjit.api.measure_memory import measure
from ggjit.api.registry import init_backend, registry
from ggjit.api.rematerialize import BudgetError, rematerialize
from ggjit.core.backend import Backend, Device, DeviceLost
from ggjit.core.buffer import USAGE_ANY, USAGE_COMPUTE, USAGE_WEIGHTS, Buffer, BufferType, MultiBuffer, tensor_alloc
from ggjit.core.config import debug as _debug
from ggjit.core.events import Event, event_free, event_new, event_record, event_synchronize, event_wait
from ggjit.core.host_buffer import HostBuffer
from ggjit.core.html_repr import HtmlRepr as _HtmlRepr
from ggjit.cpu.thread_pool import threadpool
from ggjit.display import drawing as _draw  # registers HTML and pictures of the classes above
from ggjit.display import html as _html
from ggjit.display.compile_notice import Notice as _Notice
from ggjit.display.progress import place as _place
from ggjit.display.tracebacks import short_traceback as _short_traceback
from ggjit.display.tracebacks import shorten_interrupts as _shorten_interrupts
from ggjit.graphs import pickling as _pickling  # registers how Graphs are pickled
from ggjit.graphs.allocator import GraphAllocator
from ggjit.graphs.backward import (
    build_backward_expand,
    grad,
    graph_get_grad,
    graph_get_grad_acc,
    graph_reset,
    set_loss,
)
from ggjit.graphs.copying import GraphCopy, compare_graph_backend, graph_copy
from ggjit.graphs.graph import Graph
from ggjit.graphs.tensor_allocators import Allocr, BumpAllocator, TensorAllocator
from ggjit.meta.device import MetaDevice, meta_device
from ggjit.meta.split import meta_split_axis_name
from ggjit.ops.core import errors
from ggjit.ops.core.progress import show_in as _show_in
from ggjit.ops.core.typed_errors import typed_errors as _typed_errors
from ggjit.ops.core.types import BY_NAME as _types
from ggjit.ops.core.types import Type
from ggjit.ops.core.user_warnings import GgjitWarning
from ggjit.ops.native.jit import CACHE as _CACHE
from ggjit.ops.types import quantize as _quantisers
from ggjit.ops.types.own import Lanes, define_type, load_half, remove_type, store_half
from ggjit.ops.types.quantize import dequantize, quantize
from ggjit.ops.types.validate import validate_row_data
from ggjit.profiling.profile import profile
from ggjit.sched.scheduler import Scheduler
from ggjit.tensors.arrays import from_numpy, new_f32, new_i32
from ggjit.tensors.context import Context, alloc_ctx_tensors, alloc_ctx_tensors_from_buft_size, from_dlpack, tensor
from ggjit.tensors.repeats import builders as _builders
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

for _name in ("alloc_ctx_tensors", "alloc_ctx_tensors_from_buft_size", "dequantize", "from_numpy",
              "init_backend", "measure", "new_f32", "new_i32", "rematerialize", "tensor",
              "quantize", "set_input", "set_name", "set_output", "set_param", "set_zero", "tensor_alloc", "tensor_set",
              "tensor_get", "tensor_memset", "tensor_set_async", "tensor_get_async", "tensor_set_2d", "tensor_get_2d",
              "tensor_set_2d_async", "tensor_get_2d_async", "tensor_copy", "tensor_copy_async", "same_layout",
              "view_init", "graph_copy", "build_backward_expand", "grad", "graph_get_grad", "graph_get_grad_acc",
              "graph_reset", "set_loss"):
    globals()[_name] = _typed_errors(globals()[_name], takes_arrays=_name in ("from_numpy", "quantize", "tensor"))
Type._repr_html_ = _HtmlRepr._repr_html_          # ops/ knows nothing of notebooks
_quantisers.refuses_nonfinite = "check" in _debug
_CACHE.on_compile = _Notice()                     # which commands replace by bars of their own
_show_in(_place)
errors.GgjitError._render_traceback_ = _short_traceback
_shorten_interrupts()
globals().update({n: x for n, x in vars(errors).items() if isinstance(x, type)})      # gg.ShapeError, ...
globals().update({n: _with_example(f) for n, f in _builders().items()})      # every op
globals().update({repr(t): t for t in _types.values()})                 # gg.F32, gg.Q4_0, ...
