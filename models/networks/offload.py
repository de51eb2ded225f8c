"""Which part of a network lies where: all of it on one backend, or its last layers on a GPU and the rest on the CPU.

    4 layers, n_gpu_layers     token_embd   blk.0   blk.1   blk.2   blk.3   output
                         0         CPU       CPU     CPU     CPU     CPU     CPU
                         2         CPU       CPU     CPU     GPU     GPU     CPU
                         4         CPU       GPU     GPU     GPU     GPU     CPU
                     5, -1         CPU       GPU     GPU     GPU     GPU     GPU

A layer's cache lies with its weights, and a Scheduler runs every node where its weights are.  As in llama.cpp, the
token table stays on the CPU, since only rows of it are read; where it is the output matrix as well, the GPU has a copy.
"""
import dataclasses
import re

from ggjit.api.registry import init_backend, registry
from ggjit.core.backend import TYPE_CPU, TYPE_GPU, TYPE_IGPU, TYPE_NULL, Backend
from ggjit.cpu.device import CPU
from ggjit.models.core.checks import integer
from ggjit.ops.core.errors import ParamError
from ggjit.sched.scheduled_plan import ScheduledPlan
from ggjit.sched.scheduler import Scheduler

LAYER = re.compile(r"(?:enc\.|dec\.)?blk\.(\d+)\.")
EXPERTS = "_exps."              # weights of all experts of a layer, by their names
MAX_LAYERS = (1 << 31) - 1


@dataclasses.dataclass(frozen=True)
class Offload:
    """What lies on `gpu`; None: nothing."""
    gpu: Backend | None = None
    first_layer: int = 0
    output: bool = False
    experts: bool = True

    @property
    def gpus(self):
        """The backends that have layers."""
        return [] if self.gpu is None else [self.gpu]

    def backend_of(self, name):
        """The backend that the tensor of that name lies on; None: that of all the rest."""
        return self.gpu if self.has(name) else None

    def plan(self, sched, graph):
        return ScheduledPlan(sched, graph)

    def has(self, name):
        """Does the tensor of that name lie on the GPU?"""
        if self.gpu is None:
            return False
        layer = LAYER.match(name)
        if layer is None:
            return self.output and name.startswith("output")
        return int(layer[1]) >= self.first_layer and (self.experts or EXPERTS not in name)


def choose_backends(backend, n_threads, n_gpu_layers):
    """(backend of all that is in no GPU layer, backend of the GPU layers or None).

    backend: a device name or a Backend; n_gpu_layers None: all of the network lies there.  Otherwise it is the GPU to
    use, or the CPU backend, with the first GPU there is.  Errors: ParamError; for a GPU that is missing, what it needs.
    """
    made = isinstance(backend, Backend)
    if n_gpu_layers is None and not made:
        return init_backend(backend, **({} if n_threads is None else {"n_threads": n_threads})), None
    first = backend if made else init_backend(backend)
    cpu, gpu = first, None
    if n_gpu_layers is not None:
        n = integer("n_gpu_layers", n_gpu_layers, -1, MAX_LAYERS, " (-1: all)")
        if first.device.type != TYPE_CPU:
            cpu, gpu = CPU.init_backend(), first
        elif n:
            gpu = _first_gpu().init_backend()
    if n_threads is not None:
        cpu.n_threads = n_threads
    return cpu, gpu


def _first_gpu():
    return registry.by_type(TYPE_GPU) or registry.by_type(TYPE_IGPU) or registry.device("CUDA0")


def offload(gpu, n_gpu_layers, n_layer, cpu_moe):
    """The Offload of a network of n_layer layers.  cpu_moe: the weights of experts stay on the CPU."""
    if gpu is None:
        if cpu_moe and n_gpu_layers is None:
            raise ParamError("cpu_moe keeps experts out of GPU layers; say with n_gpu_layers how many there are")
        return Offload()
    n = n_layer + 1 if n_gpu_layers < 0 else n_gpu_layers
    return Offload(gpu, max(n_layer - n, 0), n > n_layer, not cpu_moe)


def scheduler_of(backend, gpus):
    """The Scheduler that runs the network's graphs, or None where `backend` does so alone.

    Inputs are host arrays, so a device that cannot read them needs one, too.
    """
    if not gpus and (backend.device.type == TYPE_NULL or backend.supports_buft(CPU.buffer_type())):
        return None
    if not gpus:
        return Scheduler([backend, CPU.init_backend()])
    # what the CPU computes lies where the GPU fetches it fast
    host = gpus[0].device.host_buffer_type() if len(gpus) == 1 else None
    return Scheduler([*gpus, backend], bufts=[*(gpu.default_buffer_type for gpu in gpus), host])
