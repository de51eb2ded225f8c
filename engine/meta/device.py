"""MetaDevice: several devices as one, each with a part of every tensor (tensor parallelism).

    meta = gg.meta_device([cl.devices[0], cl.devices[1]], split)
    backend = meta.init_backend()

    the user's graph      h = mul_mat(up, x)       y = mul_mat(down, silu(h))      z = norm(y)
    device 0              rows 0..n/2 of h         its columns' sum of y     \\     z
    device 1              rows n/2..n              its columns' sum of y     / add  z

A device's graph has one node for each node of the user's, of its part of the tensor.  It runs in stretches that end
where results have to meet: summands are added, in the order of the devices, and parts that an op needs whole are
gathered; both pass through the host.  Memory of results is planned on each device by itself.

Where all devices are the same one (parts of the host's memory), they run one graph together: what is whole is there
once, sums and gathered results are nodes of it.
Source: ggml-backend-meta.cpp.
"""

from ggjit.core.arguments import expect, expect_slot
from ggjit.core.backend import Backend, Device
from ggjit.cpu.device import CPU
from ggjit.cpu.repacked import CPURepackBufferType
from ggjit.meta.parts import MetaBufferType
from ggjit.meta.run import MetaPlan, run_of
from ggjit.ops.core import machine
from ggjit.ops.core.errors import ParamError, TypeMismatch
from ggjit.ops.core.record import OP
from ggjit.sched.scheduled_plan import ScheduledPlan
from ggjit.sched.scheduler import Scheduler

TYPE_META = "meta"
MAX_DEVICES = 16


def meta_device(devices, split=None, name="META"):
    """One Device made of 2 to 16 others, tensors cut between them.

    split(t): how a leaf is cut: None, on every device whole; an axis 0 to 3, evenly; or (axis, sizes), elements for
    each device.  How a result is cut follows from that (`split` of ops/core/spec.py); where an op has no rule for parts
    it gets whole tensors on every device.  Products cut along axis 1 of their weights give the bits of one device where
    its kernels give a row the same bits in any number of rows; summands of those cut along axis 0 are added in the
    order of the devices.

        gg.meta_device(cl.devices, lambda t: {"up": 1, "down": 0}.get(t.name))

    Errors: ParamError, TypeMismatch.  Source: ggml_backend_meta_device.
    """
    devices = tuple(devices)
    for d in devices:
        expect(d, Device, "meta_device")
    if not 2 <= len(devices) <= MAX_DEVICES:
        raise ParamError(f"meta_device takes 2 to {MAX_DEVICES} devices, got {len(devices)}")
    if split is not None and not callable(split):
        raise TypeMismatch(f"meta_device: split is a function of a tensor, got {split!r}")
    return MetaDevice(devices, split or (lambda t: None), name)


class MetaDevice(Device):
    """`devices`: what it is made of; split(t): how a leaf is cut."""
    type = TYPE_META

    def __init__(self, devices, split, name):
        self.devices, self.split, self.name = devices, split, name
        self.is_async = any(d.is_async for d in devices)
        self.description = " + ".join(d.name for d in devices)
        # do they share all memory, so that one graph may compute the parts of all?
        self.is_one = all(d is devices[0] for d in devices) and devices[0].buffer_type().is_host()
        self._buffer_type = MetaBufferType(self, name, [d.buffer_type() for d in devices])
        repacks = [b for d in devices for b in d.extra_buffer_types() if isinstance(b, CPURepackBufferType)]
        self._extra = [MetaBufferType(self, f"{name}_REPACK", repacks)] * (len(repacks) == len(devices))

    def memory(self):
        """Sums of the devices'."""
        return tuple(map(sum, zip(*(d.memory() for d in self.devices), strict=True)))

    def init_backend(self, params=""):
        together = self.devices[0].init_backend(params) if self.is_one else None
        return MetaBackend(self, [d.init_backend(params) for d in self.devices], together)

    def buffer_type(self):
        return self._buffer_type

    def supports_op(self, t):
        return all(d.supports_op(t) for d in self.devices)

    def supports_buft(self, buft):
        return buft is self._buffer_type or buft in self._extra or \
            self.is_one and self.devices[0].supports_buft(buft)

    def extra_buffer_types(self):
        """Weights cut between the devices, in the layout that their products read fastest; where all have one."""
        return self._extra


class MetaBackend(Backend):
    """`backends`: one on each device; `together`: computes the parts of all, on all their threads, or None."""
    n_threads, abort_callback = 1, None
    reads_placements = True

    def __init__(self, device, backends, together):
        super().__init__(device)
        self.backends, self.together = backends, together
        if hasattr(together, "n_threads"):
            asked = [b.n_threads for b in backends]
            together.n_threads = max(*asked, min(sum(asked), machine.available_cores()))

    def graph_plan_create(self, graph, placement=None):
        """A plan: `compute()` runs the graph on every device.  A graph that reads host memory gets a Scheduler of this
        backend and the CPU, where not all devices are the CPU.  Errors: NotAllocated, NotSupported."""
        if self.together is None and not graph.placed and any(_is_host(t) for t in _leaves_and_parameters(graph)):
            return ScheduledPlan(Scheduler([self, CPU.init_backend()]), graph)
        return MetaPlan(self, graph, placement)

    def graph_compute(self, graph):
        """Run the graph.  Its plan is kept with it."""
        expect_slot(graph, "plans", "graph_compute takes a Graph; use gg.Graph(y)")
        if graph.placed:
            run_of(self, graph).compute()
        else:
            graph.plans.get(self.device, lambda plan: graph.placement, lambda: self.graph_plan_create(graph)).compute()

    def synchronize(self):
        for b in self.backends:
            b.synchronize()

    def free(self):
        for b in self.backends:
            b.free()


def _leaves_and_parameters(graph):
    return *graph.leafs, *(t for t in graph.nodes if t.op == OP.NONE)


def _is_host(t):
    where = t._where()
    return where is not None and where[0].buft.is_host()
