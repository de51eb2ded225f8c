"""Layers over several devices: `load_model(path, devices=cl.devices)`.

    devices, fastest first      worker1             worker0             the driver
    memory for                  14 layers           20 layers           as much as the file
    32 layers                   blk.18 ... blk.31   blk.0 ... blk.17    token_embd

A token passes the layers one after the other, so a second device never makes it faster: it makes room.  The fastest
device takes what its memory holds, then the next; who would get nothing is left out.  What no device has room for stays
on the CPU of the driver.  Speed is measured: bytes of weights that a product reads in a second, and a round trip.
"""
import dataclasses
import math
import numbers
import time

import numpy as np

from ggjit.api.registry import registry
from ggjit.core.arguments import typed_call
from ggjit.core.backend import TYPE_CPU, Backend, Device
from ggjit.graphs.allocator import GraphAllocator
from ggjit.graphs.graph import Graph
from ggjit.models.networks.placement.offload import EXPERTS, LAYER
from ggjit.ops.core.errors import ParamError, TypeMismatch
from ggjit.ops.core.types import F32
from ggjit.ops.matmul.mul_mat import mul_mat
from ggjit.sched.scheduled_plan import ScheduledPlan
from ggjit.tensors.context import Context, alloc_ctx_tensors

PROBE_NE = 2048, 4096           # size of the matrix whose product is timed
PROBE_SHARE = 8                 # the matrix takes at most this part of the free memory
N_PROBES = 3
OUTPUT = "output"
ROOM = 0.85                     # share of free memory for weights and caches; the rest is for computing
GRAPH_NBYTES = 1 << 17          # bytes that the graphs of a part take in a worker's memory


@typed_call
def token_seconds(weights_nbytes, nbytes_per_second, trip_seconds, crossing_nbytes=0, link_nbytes_per_second=None):
    """What a token is expected to take on one device: weights / speed + round trip + crossing / link, in seconds.

        8 * token_seconds(0.5e9, 10e9, trip_seconds=0.5e-3)         # 0.404: 4 GB over eight workers of one room

    weights_nbytes: read for a token; nbytes_per_second: at which speed; trip_seconds: there and back; crossing_nbytes:
    of numbers that come in and go out, link_nbytes_per_second: at which speed (None: they cost the trip alone).
    `m.explain()` predicts by the same sum, of what it measured.  Errors: ParamError (no number, below 0, a speed of 0).
    """
    link = math.inf if link_nbytes_per_second is None else link_nbytes_per_second
    for name, value, low in (("weights_nbytes", weights_nbytes, 0), ("nbytes_per_second", nbytes_per_second, 1e-9),
                             ("trip_seconds", trip_seconds, 0), ("crossing_nbytes", crossing_nbytes, 0),
                             ("link_nbytes_per_second", link, 1e-9)):
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not value >= low:
            raise ParamError(f"{name}={value!r}: expected a number {'from 0 on' if low == 0 else 'above 0'}")
    return weights_nbytes / nbytes_per_second + trip_seconds + crossing_nbytes / link


@dataclasses.dataclass
class DeviceShare:
    """The layers that one device gets, and their cost."""
    backend: Backend
    free_nbytes: int
    nbytes_per_second: float = 0.0
    trip_seconds: float = 0.0
    parts: list = dataclasses.field(default_factory=list)       # numbers of layers, OUTPUT; the last one first
    nbytes: int = 0             # weights that a token reads
    held_nbytes: int = 0        # weights and caches

    @property
    def seconds(self):
        """Expected seconds of a token on this device."""
        return token_seconds(self.nbytes, self.nbytes_per_second, self.trip_seconds) if self.parts else 0.0

    def __str__(self):
        layers = [k for k in self.parts if k != OUTPUT]
        words = [f"layers {layers[-1]} to {layers[0]}"] * bool(layers)
        return " and ".join(words + ["the output"] * (OUTPUT in self.parts))


class DeviceMap:
    """Which device has which layers.  `explain()`: that, and what it is expected to cost."""

    def __init__(self, devices, network):
        self._network = network
        self._shares = [DeviceShare(b, 0) for b in _backends(devices)]
        self._placement = None      # {layer or OUTPUT: backend}, None: not settled yet
        self.seconds = None         # seconds that the last token took

    @property
    def gpus(self):
        self._settle()
        return [s.backend for s in self._shares if s.parts]

    def backend_of(self, name):
        """The backend that the tensor of that name lies on; None: the driver's."""
        self._settle()
        layer = LAYER.match(name)
        if layer is None:
            return self._placement.get(OUTPUT) if name.startswith("output") else None
        return self._placement.get(int(layer[1]))

    def keeps(self, layer):
        """The backend that holds what a layer keeps of texts; None: the driver's."""
        return self.backend_of(f"blk.{layer}.")

    def has(self, name):
        return self.backend_of(name) is not None

    def plan(self, sched, graph):
        return _TimedPlan(self, sched, graph)

    # ------------------------------------------------------------ choosing
    def _settle(self):
        """Measure the devices and divide the layers among them, once, when the sizes of the caches are known."""
        if self._placement is not None:
            return
        sizes = self._sizes()
        for share in self._shares:
            share.free_nbytes = share.backend.device.memory()[0]
            share.nbytes_per_second, share.trip_seconds = measured(share.backend, share.free_nbytes)
        self._placement, todo = {}, [k for k in (OUTPUT, *sorted(sizes.keys() - {OUTPUT}, reverse=True)) if k in sizes]
        for share in sorted(self._shares, key=lambda s: -s.nbytes_per_second):
            room = ROOM * share.free_nbytes
            if todo and todo[0] == OUTPUT and sizes[OUTPUT][0] > room:
                todo.pop(0)             # the output matrix stays with the driver
            while todo and share.held_nbytes + sizes[todo[0]][0] + GRAPH_NBYTES * (len(share.parts) + 1) <= room:
                k = todo.pop(0)
                self._placement[k] = share.backend
                share.parts.append(k)
                share.held_nbytes += sizes[k][0]
                share.nbytes += sizes[k][1]
        self._left = [k for k in todo if k != OUTPUT]

    def _sizes(self):
        """{layer or OUTPUT: (bytes of weights and of what it keeps of a text, bytes of weights that a token reads)}"""
        network, sizes = self._network, {}
        file, tensors = network.file, network.file.tensors
        of_experts = file.arch_get("expert_used_count", 0, int) / max(file.arch_get("expert_count", 0, int), 1)
        for name, info in tensors.items():
            layer = LAYER.match(name)
            key = int(layer[1]) if layer else OUTPUT if name.startswith("output") else None
            if key is not None:
                held, read = sizes.get(key) or (network._kept_nbytes(key) if layer else 0, 0.0)
                sizes[key] = held + info.nbytes, read + info.nbytes * (of_experts if EXPERTS in name else 1)
        if network.CAUSAL and "output.weight" not in tensors:       # tied: a copy of the token table
            nbytes = tensors["token_embd.weight"].nbytes
            held, read = sizes.get(OUTPUT, (0, 0))
            sizes[OUTPUT] = held + nbytes, read + nbytes
        return sizes

    # ------------------------------------------------------------ showing
    @property
    def expected_seconds(self):
        """Expected seconds of a token on all devices together."""
        self._settle()
        return sum(s.seconds for s in self._shares)

    def explain(self):
        """Text: who computes what, tokens a second as predicted and as the last token was."""
        self._settle()
        lines = []
        for s in self._shares:
            facts = f"{s.nbytes_per_second / 1e9:.2f} GB/s, round trip {s.trip_seconds * 1e3:.2f} ms"
            if s.parts:
                lines.append(f"{s.backend.name}: {s}, {s.held_nbytes / 1e6:,.1f} MB of {s.free_nbytes / 1e6:,.1f} MB "
                             f"free; {facts}; {s.seconds * 1e3:.2f} ms a token")
            else:
                lines.append(f"{s.backend.name}: left out, it would make no token faster: faster devices hold all "
                             f"layers, or it has no room for one ({s.free_nbytes / 1e6:,.1f} MB free); {facts}")
        if self._left:
            lines.append(f"the driver: layers 0 to {self._left[0]}, which no device has room for")
        if self.expected_seconds:
            lines.append(f"predicted: {1 / self.expected_seconds:,.1f} tokens a second at most")
        lines.append("measured: nothing yet" if self.seconds is None else
                     f"measured: {1 / self.seconds:,.1f} tokens a second (the last token)")
        return "\n".join(lines)


class _TimedPlan(ScheduledPlan):
    """Tells the DeviceMap how long a token took."""

    def __init__(self, device_map, sched, graph):
        super().__init__(sched, graph)
        tokens = next((t for t in graph.leafs if t.name == "tokens"), None)
        self._device_map = device_map if tokens is not None and tokens.ne[0] == 1 else None

    def compute(self):
        t0 = time.perf_counter()
        super().compute()
        if self._device_map is not None:
            self._device_map.seconds = time.perf_counter() - t0


def named_devices(devices):
    """Devices that may be given by name, "CUDA0", as devices.  The CPU of this process takes what the others leave, so
    that it is left out.  Errors: TypeMismatch, ParamError with what serves instead."""
    if isinstance(devices, str):
        devices = [devices]
    if not isinstance(devices, list | tuple):
        return devices
    found = []
    for d in devices:
        if isinstance(d, Backend):
            d = d.device
        if isinstance(d, str):
            name = d.partition(":")[0]
            if name.upper() == "NULL":
                raise ParamError("devices: NULL computes nothing, so no model runs on it; gg.measure(m) and "
                                 "`ggjit peak` tell what one would take")
            if name.upper() == "CPU":
                if name != d:
                    raise ParamError(f"devices: {d!r} is this process itself; leave it out, and say n_threads=1 beside "
                                     f"devices for its threads")
                continue
            d = registry.device(name)
        if not isinstance(d, Device) or d.type != TYPE_CPU:
            found.append(d)
    if devices and not found:
        raise ParamError("devices: the CPU of this process has all layers anyway; leave devices out, and say "
                         "n_threads=1 for its threads.  Two devices of one machine are "
                         "gg.cluster.local(n_workers=2).devices, or n_gpu_layers=20 with a GPU")
    return found


def _backends(devices):
    """One backend a device.  Errors: TypeMismatch, ParamError."""
    devices = named_devices(devices)
    if not isinstance(devices, list | tuple) or not all(isinstance(d, Device) for d in devices):
        raise TypeMismatch(f"devices takes a list of devices, such as cl.devices of gg.cluster or ['CUDA0'], got "
                           f"{devices!r}")
    if not devices or len({id(d) for d in devices}) < len(devices) or any(d.type == TYPE_CPU for d in devices):
        raise ParamError("devices: at least one, each once; the CPU of this process is there anyway")
    return [d.init_backend() for d in devices]


def measured(backend, free_nbytes):
    """(bytes of weights a second, seconds of a round trip) of a backend, measured by products of a matrix and a
    vector."""
    n = min(PROBE_NE[1], int(free_nbytes / PROBE_SHARE / 4 / PROBE_NE[0]))
    big, small = (_probe(backend, ne) for ne in ((PROBE_NE[0], max(n, 1)), (32, 1)))
    trip = small[1]
    return big[0] / max(big[1] - trip, 1e-6), trip


def _probe(backend, ne):
    """(bytes of the matrix, least seconds of a product that is read)"""
    with Context() as ctx:
        w, x = ctx.new_tensor(F32, ne), ctx.new_tensor(F32, (ne[0], 1))
        leaves, graph, best = alloc_ctx_tensors(ctx, backend), Graph(y := mul_mat(w, x)), float("inf")
        allocator = GraphAllocator(backend)
        try:
            allocator.alloc_graph(graph)
            leaves.clear(0)
            for _ in range(N_PROBES + 1):
                t0 = time.perf_counter()
                x.set(np.zeros((1, ne[0]), np.float32))
                backend.graph_compute(graph)
                backend.synchronize()
                y.numpy()
                best = min(best, time.perf_counter() - t0)
        finally:
            allocator.free()
            leaves.free()
    return w.nbytes, best
