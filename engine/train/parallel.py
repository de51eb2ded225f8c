"""Data-parallel training: `fit(..., devices=cl.devices)`.

    parts of a batch      0        1        2        3        each as many rows as the inputs have
    two devices           A        B        A        B
    gradient            ((g0   +   g1)  +   g2)  +   g3       here, in the order of the parts

Which device computed a part does not matter for the sum, so any number of devices gives the same bits.  Parameters and
inputs lie in this process: a Scheduler of each device copies them there, and gradients come back with its answer.
"""
import numpy as np

from ggjit.api.registry import init_backend
from ggjit.core.backend import TYPE_CPU, Device
from ggjit.core.lifetime import call_all
from ggjit.graphs.graph import Graph
from ggjit.ops.core.errors import ParamError, TypeMismatch
from ggjit.ops.core.record import OP
from ggjit.sched.scheduler import Scheduler
from ggjit.tensors.tensor import set_input


class Replicas:
    """The gradient graph of a training on several devices."""

    def __init__(self, devices, loss, classes, gradients, inputs):
        self._loss, self._classes, self._gradients = loss, classes, gradients
        for t in inputs:
            set_input(t)                        # copied when a part is submitted: then the next one can be fed
        self._graph, cpu = Graph(loss, classes, *gradients), init_backend("CPU")
        self._scheds = [Scheduler([device.init_backend(), cpu]) for device in devices]
        for sched in self._scheds:
            for t in self._graph.nodes:
                if t.op != OP.NONE and t.view_src is None and sched.backends[0].supports_op(t):
                    sched.set_tensor_backend(t, sched.backends[0])

    def results(self, parts, feed):
        """(loss, classes, gradients) of each part, in order; one part a device is on its way.

        parts: arguments of feed(*part), which sets inputs and labels.
        """
        n, parts = len(self._scheds), list(parts)
        try:
            for k, part in enumerate(parts):
                if k >= n:
                    yield self._read(k % n)
                feed(*part)
                self._scheds[k % n].graph_compute_async(self._graph)
            for k in range(max(len(parts) - n, 0), len(parts)):
                yield self._read(k % n)
        except BaseException as e:              # wait for all parts, so that none of this batch runs on
            call_all(*(sched.synchronize for sched in self._scheds), after=e)
            raise

    def _read(self, k):
        read = self._scheds[k].numpy
        return read(self._loss).item(), read(self._classes), [read(d) for d in self._gradients]

    def free(self):
        call_all(*(sched.free for sched in self._scheds))


def checked_devices(devices):
    """A list of devices with memory of their own.  Errors: TypeMismatch, ParamError."""
    if not isinstance(devices, list | tuple) or not all(isinstance(d, Device) for d in devices):
        raise TypeMismatch(f"fit: devices takes a list of devices, such as cl.devices of gg.cluster, got {devices!r}")
    if not devices or len({id(d) for d in devices}) < len(devices) or any(d.type == TYPE_CPU for d in devices):
        raise ParamError("fit: devices: at least one, each once; without them the CPU of this process computes")
    return list(devices)


def added(sums, gradients):
    """sums + gradients, or the gradients where there are no sums yet."""
    return gradients if sums is None else [np.add(a, b, out=a) for a, b in zip(sums, gradients, strict=True)]
