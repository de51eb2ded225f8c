"""The placement of a network: all of it on one backend, or its last layers on a GPU and the rest on the CPU.

    4 layers, n_gpu_layers     token_embd   blk.0   blk.1   blk.2   blk.3   output
                         0         CPU       CPU     CPU     CPU     CPU     CPU
                         2         CPU       CPU     CPU     GPU     GPU     CPU
                         4         CPU       GPU     GPU     GPU     GPU     CPU
                     5, -1         CPU       GPU     GPU     GPU     GPU     GPU

A layer's cache lies with its weights, and a Scheduler runs every node where its weights are.  As in llama.cpp, the
token table stays on the CPU, since only rows of it are read; where it is the output matrix as well, the GPU has a copy.
"""
import dataclasses
import itertools
import re

from ggjit.api.registry import init_backend, registry
from ggjit.core.arguments import nearest
from ggjit.core.backend import TYPE_CPU, TYPE_GPU, TYPE_IGPU, TYPE_NULL, Backend
from ggjit.cpu.device import CPU
from ggjit.models.core.checks import integer
from ggjit.ops.core.errors import ParamError, TypeMismatch
from ggjit.ops.core.user_warnings import warn
from ggjit.sched.scheduled_plan import ScheduledPlan
from ggjit.sched.scheduler import Scheduler

LAYER = re.compile(r"(?:enc\.|dec\.)?blk\.(\d+)\.")
EXPERTS = "_exps."              # weights of all experts of a layer, by their names
MAX_LAYERS = (1 << 31) - 1


@dataclasses.dataclass(frozen=True)
class Offload:
    """What lies on `gpus`; none: nothing.

    shares: of the layers from first_layer on and the output, for each GPU in turn; experts: do those of these layers
    lie there, too?  overrides: [(pattern, backend or None for the rest's)], searched in names before anything else.
    """
    gpus: tuple = ()
    first_layer: int = 0
    n_layer: int = 0
    output: bool = False
    experts: bool = True
    shares: tuple = (1.0,)
    overrides: tuple = ()

    def backend_of(self, name):
        """The backend that the tensor of that name lies on; None: that of all the rest."""
        for pattern, backend in self.overrides:
            if pattern.search(name):
                return backend
        layer = LAYER.match(name)
        if not self.gpus or (layer is None and not (self.output and name.startswith("output"))) or (
                EXPERTS in name and not self.experts):
            return None
        return self._of_layer(int(layer[1]) if layer else self.n_layer)

    def _of_layer(self, i):
        if i < self.first_layer:
            return None
        n, ends = self.n_layer - self.first_layer + self.output, itertools.accumulate(self.shares)
        part = (i - self.first_layer) / max(n, 1) * sum(self.shares)
        return next((gpu for gpu, end in zip(self.gpus, ends, strict=True) if part < end), self.gpus[-1])

    def keeps(self, layer):
        """The backend that holds what a layer keeps of texts; None: that of all the rest."""
        return self._of_layer(layer) if self.gpus else None

    def plan(self, sched, graph):
        return ScheduledPlan(sched, graph)

    def has(self, name):
        """Does the tensor of that name lie on a GPU?"""
        return self.backend_of(name) is not None


def choose_backends(backend, n_threads, n_gpu_layers):
    """(backend of everything outside the GPU layers, backend of the GPU layers or None).

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


def offload(gpus, n_gpu_layers, n_layer, cpu_moe, overrides=(), names=()):
    """The Offload of a network of n_layer layers.  cpu_moe: the weights of experts stay on the CPU.

    overrides: {pattern: name of a device of `gpus`, or "CPU"}, as llama.cpp's --override-tensor; a warning where a
    pattern is in none of the file's `names`.  Several GPUs share the layers by their free memory, as in llama.cpp.
    Errors: ParamError.
    """
    if not gpus:
        if cpu_moe and n_gpu_layers is None:
            raise ParamError("cpu_moe keeps experts out of GPU layers; say with n_gpu_layers (-ngl) how many there are")
        if names_devices(overrides):
            raise ParamError("override_tensor (-ot) places tensors beside GPU layers; say with n_gpu_layers (-ngl) how "
                             "many there are")
        return Offload(overrides=_overrides(overrides, (), names))
    n = n_layer + 1 if n_gpu_layers < 0 else n_gpu_layers
    free = [gpu.device.memory()[0] for gpu in gpus]
    return Offload(tuple(gpus), max(n_layer - n, 0), n_layer, n > n_layer, not cpu_moe,
                   tuple(free) if all(free) else (1.0,) * len(gpus), _overrides(overrides, gpus, names))


def names_devices(overrides):
    """Does an override_tensor place tensors elsewhere than on the CPU, where they are without GPU layers?"""
    return isinstance(overrides, dict) and any(device != "CPU" for device in overrides.values())


def _overrides(given, gpus, names):
    """[(pattern, backend or None)]"""
    if not given:
        return ()
    if not isinstance(given, dict):
        raise TypeMismatch(f"override_tensor takes {{pattern: device}}, got {type(given).__name__}")
    by_name, out = {"CPU": None} | {gpu.device.name: gpu for gpu in gpus}, []
    for pattern, device in given.items():
        if device not in by_name:
            raise ParamError(f"override_tensor: no device {device!r}{nearest(str(device), by_name)}; there are "
                             f"{', '.join(by_name)}")
        try:
            out.append((re.compile(pattern), by_name[device]))
        except (re.error, TypeError) as e:
            raise ParamError(f"override_tensor: {pattern!r} is not a pattern of names: {e}") from None
        if names and not any(map(out[-1][0].search, names)):
            warn(f"override_tensor: {pattern!r} is in no tensor's name and has no effect; `ggjit info FILE` lists them")
    return tuple(out)


def scheduler_of(backend, gpus):
    """The Scheduler that runs the network's graphs, or None where `backend` does so alone.

    Inputs are host arrays, so a device that cannot read them needs one, too.
    """
    if not gpus and (backend.device.type == TYPE_NULL or backend.supports_buft(CPU.buffer_type())):
        return None
    if not gpus:
        return Scheduler([backend, CPU.init_backend()])
    # results of the CPU lie in memory that the GPU reads fast
    host = gpus[0].device.host_buffer_type() if len(gpus) == 1 else None
    return Scheduler([*gpus, backend], bufts=[*(gpu.default_buffer_type for gpu in gpus), host])
