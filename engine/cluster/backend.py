"""Streams of a remote device, and the graphs that run on them."""
import functools

import numpy as np

from ggjit.cluster.buffer import RemoteBuffer
from ggjit.cluster.encoding import Encoded
from ggjit.core.arguments import expect_slot
from ggjit.core.backend import Backend
from ggjit.core.table import TABLE
from ggjit.core.versions import VERSIONS, written
from ggjit.cpu.device import CPU
from ggjit.graphs.placed import place_of
from ggjit.graphs.plan_cache import without_plans
from ggjit.graphs.results import SharedResults, mark_last
from ggjit.ops.core.errors import NotSupported
from ggjit.ops.core.record import T_BUFFER, VIEW_OPS
from ggjit.ops.core.shape import describe
from ggjit.sched.scheduled_plan import ScheduledPlan
from ggjit.sched.scheduler import Scheduler


class RemoteEvent:
    """An event of a remote device: a point of its stream, reached when the answer to that message comes."""
    stream = answer = None


class RemoteRunResults(SharedResults):
    """What the runs of a graph left in memory of a remote device."""
    answer = None

    def ran(self, answer):
        self.answer = answer
        self.begin()

    def _lost(self, t):
        if self.answer.done and self.answer.error is not None:
            return f"{describe(t)} holds no result: the last run of its graph did not finish; compute it again"
        return super()._lost(t)


class RemoteGraph:
    """A graph as a device runs it: rows, up to date with where its tensors lie.

    wanted: {(GET or PUSH, arena, offset, bytes): was that range read, or copied elsewhere, after the last run?}
    """

    def __init__(self, device, graph, placement):
        self.device, self.graph = device, without_plans(graph)
        self._encoded = Encoded(graph, functools.partial(place_of, placement), self._arena_of)
        self.names, self.wanted, self.answer = self._encoded.names, {}, None
        self.left = None if graph.placed or placement is None else RemoteRunResults.of_graph(graph)
        leaves = {x.id for t in graph.nodes if not graph.placed and t.op not in VIEW_OPS for x in written(t)}
        self.written_ids = np.array([i for i in leaves if TABLE.words[i, T_BUFFER] >= 0], np.int64)
        self._places, self._version = None, None
        self.refresh()

    def compute(self):
        """Submit it."""
        self.refresh()
        if not len(self.rows):                  # a graph of views has nothing to run
            return
        try:
            answer = self.device.run(self)
        finally:
            VERSIONS[self.written_ids] += 1
        if self.left is not None:
            self.left.ran(answer)
            mark_last(self.left, self.graph.nodes)

    def _arena_of(self, t, buf):
        if not isinstance(buf, RemoteBuffer) or buf.device is not self.device:
            raise NotSupported(f"{describe(t)} lies in {buf!r}, which {self.device.name} cannot reach; use a Scheduler")
        buf._check()
        return buf.arena_id

    def refresh(self):
        """Look up places again if something moved."""
        if self._version == TABLE.placement_version:
            return
        version, places = TABLE.placement_version, self._encoded.places()
        if places != self._places:
            self._encoded.set_places(places)
            self._places, self.rows, self.key = places, self._encoded.rows, self._encoded.key
            self.wanted = {}
        self._version = version

    def seconds(self):
        """Seconds that its last run took, None if unknown."""
        answer = self.answer
        if answer is None or not answer.done or answer.error is not None or not answer.results:
            return None
        return answer.results[-1] * 1e-9 if type(answer.results[-1]) is int else None


class RemoteBackend(Backend):
    """A stream of a remote device; all streams of a device are one."""
    n_threads, abort_callback, writes_in_order, reads_placements = 1, None, True, True

    def graph_plan_create(self, graph, placement=None):
        """What runs the graph: `compute()`.

        A graph with leaves in host memory gets a Scheduler of this backend and the CPU, which copies what changed.
        Errors: NotAllocated, NotSupported (tensors in other memory), DeviceLost.
        """
        expect_slot(graph, "plans", "graph_plan_create takes a Graph; use gg.Graph(y)")
        if not graph.placed and any(_is_host(t) for t in graph.leafs):
            return ScheduledPlan(Scheduler([self, CPU.init_backend()]), graph)
        return RemoteGraph(self.device, graph, placement or graph.placement)

    def graph_compute(self, graph):
        """Submit the graph and return.  Errors: those of graph_plan_create."""
        expect_slot(graph, "plans", "graph_compute takes a Graph; use gg.Graph(y)")
        key = graph.placement, self.device.stream
        graph.plans.get(self, lambda work: key, lambda: self.graph_plan_create(graph)).compute()

    def synchronize(self):
        """Wait for everything sent.  Writes that wait for the next message have no result that could be seen."""
        self.device.finish()

    def set_tensor_async(self, t, data, offset=0):
        t.buffer.set_tensor(t, data, offset)

    def get_tensor_async(self, t, offset=0, nbytes=None):
        nbytes = t.nbytes - offset if nbytes is None else nbytes
        return self.device.read_async(*t.buffer.at(t, offset), nbytes) if nbytes else b""

    def copy_tensor_async(self, src, dst, src_backend=None):
        """Copy from workers and host memory, in the order of both streams; False for other memory."""
        a, b = src.buffer, dst.buffer
        if not isinstance(b, RemoteBuffer) or b.device is not self.device:
            return False
        if isinstance(a, RemoteBuffer):
            return b.copy_tensor(src, dst)
        if not a.buft.is_host() or src_backend is not None and type(src_backend).synchronize is not Backend.synchronize:
            return False
        b.set_tensor(dst, a.host_bytes(src.offs, src.nbytes))
        return True

    def event_record(self, event):
        device = self.device
        with device._lock:
            answer = device.flush() or (device._sent[-1] if device._sent else None)
            event.stream, event.answer = device.stream, answer

    def event_wait(self, event):
        """Wait until an event of another worker was reached.  One of the same stream needs no waiting."""
        if event.stream is not None and event.stream is not self.device.stream:
            event.stream.wait(event.answer)


def _is_host(t):
    where = t._where()
    return where is not None and where[0].buft.is_host()
