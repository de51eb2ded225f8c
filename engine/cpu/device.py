"""The CPU device: host memory, kernels from the op specs, plans on the process-wide thread pool."""
from ggjit.core.arguments import expect_slot
from ggjit.core.backend import Backend, Device, HostMemory
from ggjit.core.config import MAX_THREADS, debug, default_threads
from ggjit.core.host_buffer import HOST, HostBufferType
from ggjit.cpu.cpu_plan import CPUPlan
from ggjit.cpu.repacked import CPURepackBufferType, kernel_of
from ggjit.ops.core import machine
from ggjit.ops.core.errors import ParamError, TypeMismatch
from ggjit.ops.core.record import VIEW_OPS
from ggjit.ops.core.whole_numbers import is_whole
from ggjit.ops.native import isa


class CPUPrivateBufferType(HostBufferType):
    """Memory only the CPU device reads, e.g. for weights in a layout of their own: other devices get copies.

    It shows that a device may have several buffer types (ggml: CPU_REPACK, CPU_HBM); tensors are reached through the
    buffer's slots.
    """
    name = "CPU_Private"

    def is_host(self):
        return False

    def alignment(self):
        return 64


class CPUDevice(HostMemory, Device):
    """This machine's processor."""
    name = "CPU"

    def __init__(self):
        self._buffer_type, HOST.device = HOST, self
        self._private = CPUPrivateBufferType(self)
        self._repack = CPURepackBufferType(self)

    @property
    def description(self):
        return f"{processor()}, {machine.available_cores()} cores, {isa.ISA}"

    def memory(self):
        return machine.available_nbytes(), machine.total_nbytes()

    def init_backend(self, params=""):
        """params: "n_threads=2,fuse=0"."""
        options = parse_params(params, {"n_threads": int, "fuse": int})
        return CPUBackend(self, **options)

    def buffer_type(self):
        return self._buffer_type

    def supports_op(self, t):
        if t.op in VIEW_OPS:
            return True
        return kernel_of(t, 1) is not None

    def supports_buft(self, buft):
        return buft.is_host() or buft in self.extra_buffer_types()

    def extra_buffer_types(self):
        return [self._private, self._repack]


class CPUBackend(Backend):
    """Computes graphs on `n_threads` threads of the one process-wide pool."""
    reads_placements = True

    def __init__(self, device, n_threads=None, fuse=1):
        super().__init__(device)
        self.fuse = fuse                    # may plans compute a run of nodes in one kernel?
        self.n_threads = default_threads() if n_threads is None else n_threads
        self.abort_callback = None

    @property
    def n_threads(self):
        return self._n_threads

    @n_threads.setter
    def n_threads(self, n):
        if not is_whole(n, 1, MAX_THREADS):
            raise ParamError(f"n_threads must be an integer from 1 to {MAX_THREADS}, got {n!r}")
        self._n_threads = int(n)

    @property
    def abort_callback(self):
        """() -> bool, asked every 10 ms or so; True cancels.  None: nothing is asked."""
        return self._abort_callback

    @abort_callback.setter
    def abort_callback(self, callback):
        if callback is not None and not callable(callback):
            raise TypeMismatch(f"abort_callback must be callable or None, got {callback!r}")
        self._abort_callback = callback

    @property
    def plan_settings(self):
        return self.n_threads, bool(self.fuse), "check" in debug

    def work_nbytes(self, node):
        kernel = None if node.op in VIEW_OPS else kernel_of(node, self.n_threads)
        return kernel.work_nbytes if kernel is not None else 0

    def graph_plan_create(self, graph, placement=None, fuse=None):
        """A Plan: kernels chosen, addresses resolved, work memory sized; `plan.compute()` replays it.

        fuse=False: a kernel for each node, so that results in between can be read; None: as `self.fuse` says.
        """
        expect_slot(graph, "plans", "graph_plan_create takes a Graph; use gg.Graph(y)")
        return CPUPlan(self, graph, placement or graph.placement, fuse)

    def graph_compute(self, graph):
        """Run the graph once.  The plan is kept with the graph, so a second call replays."""
        expect_slot(graph, "plans", "graph_compute takes a Graph; use gg.Graph(y)")
        key = graph.placement, *self.plan_settings
        graph.plans.get(self, lambda plan: key, lambda: self.graph_plan_create(graph)).compute()

    def __repr__(self):
        return f"<Backend CPU n_threads={self.n_threads}>"


def parse_params(text, known):
    """"n_threads=2,flag=1" -> {"n_threads": 2, ...}; ParamError names what is unknown."""
    options = {}
    for part in filter(None, (p.strip() for p in str(text).split(","))):
        key, eq, value = part.partition("=")
        if not eq or key not in known:
            raise ParamError(f"unknown backend parameter {part!r}; known: {', '.join(f'{k}=...' for k in known)}")
        try:
            options[key] = known[key](value)
        except ValueError:
            raise ParamError(f"backend parameter {key}={value!r}: expected {known[key].__name__}") from None
    return options


def processor():
    """This machine's processor in the system's words, else in LLVM's."""
    return machine.processor_name() or isa.PROCESSOR


CPU = CPUDevice()


def _features(registry=None):
    """{feature: value}: the instruction set the kernels use and what it rests on."""
    return {"isa": isa.ISA, "cpu": processor(), "cores": machine.available_cores()}


# extension functions by ggml's names; each takes what the C function takes
PROC_ADDRESSES = {
    "ggml_backend_set_n_threads": lambda backend, n: setattr(backend, "n_threads", n),
    "ggml_backend_set_abort_callback": lambda backend, callback: setattr(backend, "abort_callback", callback),
    "ggml_backend_dev_get_extra_bufts": lambda device: device.extra_buffer_types(),
    "ggml_backend_get_features": _features,
}
