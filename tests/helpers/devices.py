"""Devices for tests: they compute on the CPU, but look like accelerators.

    Fake("A", ops={OP.ADD})                 supports only these ops (None: all the CPU has)
    Fake("A", host=False)                   private memory: values move only through the device's own functions
    Fake("A", delay=1e-3)                   an asynchronous stream: work is done later, by a thread, in order
    Fake("A", memory=1 << 20)               OutOfMemory beyond it
    Fake("A", fail={"graph_compute"})       these slots raise

Buffers are filled with NaN bytes when they are made and have guard bytes around them (`check_guards`).
"""
import queue
import threading
import time

import numpy as np

import ggjit as gg
from ggjit.cpu.cpu_plan import CPUPlan
from ggjit.cpu.device import CPU
from ggjit.ops.core.record import VIEW_OPS

GUARD = 256
SENTINEL = 0xA5


class DeviceFailed(RuntimeError):
    """What a broken third-party device raises."""


class FakeBuffer(gg.HostBuffer):
    def __init__(self, buft, size):
        super().__init__(buft, size + 2 * GUARD)
        self.guarded = self._arena
        self.guarded[:GUARD] = self.guarded[GUARD + size:] = SENTINEL
        self._size, self.base = size, self.base + GUARD
        self._arena = self.guarded[GUARD:GUARD + size]
        self._arena[:] = 0xFF
        buft.device.buffers.append(self)
        self.inits = 0

    def init_tensor(self, t):
        self.inits += 1

    def free(self):
        if self.alive:
            self.buft.device.used -= self.size
        super().free()

    def guards_intact(self):
        return (self.guarded[:GUARD] == SENTINEL).all() and (self.guarded[GUARD + self.size:] == SENTINEL).all()


class FakeBufferType(gg.BufferType):
    def __init__(self, device, name, host, alignment=64, max_size=None):
        self.device, self.name, self.host = device, name, host
        self._alignment, self._max_size = alignment, max_size

    def alignment(self):
        return self._alignment

    def max_size(self):
        return self._max_size or super().max_size()

    def is_host(self):
        return self.host

    def alloc_buffer(self, size):
        self.device.check("alloc_buffer")
        if self.device.memory_limit is not None and self.device.used + size > self.device.memory_limit:
            raise gg.OutOfMemory(f"{self.name}: {size} bytes do not fit {self.device.memory_limit}")
        self.device.used += size
        return FakeBuffer(self, size)


class Fake(gg.Device):
    def __init__(self, name, ops=None, host=False, delay=None, memory=None, fail=(), type="gpu", alignment=64,
                 max_size=None, reads=(), offload=None):
        self.name, self.description, self.type = name, f"test device {name}", type
        self.ops, self.delay, self.memory_limit, self.fail = ops, delay, memory, set(fail)
        self.used, self.buffers, self.reads, self.offload = 0, [], reads, offload
        self.asked = []                 # tensors supports_op was asked about
        self._buft = FakeBufferType(self, name, host, alignment, max_size)

    def check(self, slot):
        if slot in self.fail:
            raise DeviceFailed(f"{self.name}.{slot}")

    def init_backend(self, params=""):
        self.check("init_backend")
        return (AsyncBackend if self.delay is not None else FakeBackend)(self)

    def buffer_type(self):
        return self._buft

    def supports_op(self, t):
        self.check("supports_op")
        self.asked.append(t)
        if t.op in VIEW_OPS:
            return True
        return (self.ops is None or t.op in self.ops) and CPU.supports_op(t)

    def supports_buft(self, buft):
        return buft is self._buft or buft in self.reads or (self.host and buft.is_host())

    @property
    def host(self):
        return self._buft.host

    def offload_op(self, t):
        return self.offload is not None and self.offload(t)

    def event_new(self):
        return StreamEvent() if self.delay is not None else None

    def event_synchronize(self, event):
        arrive(event.reached)


class FakeBackend(gg.Backend):
    """Computes at once."""
    n_threads, abort_callback = 1, None

    def __init__(self, device):
        super().__init__(device)
        self.computed, self.copied = [], []

    def graph_compute(self, graph):
        self.device.check("graph_compute")
        kept = graph.plans.get(self, lambda plan: None, lambda: CPUPlan(self, graph, graph.placement))
        self.computed.append(len(kept.nodes))
        kept.compute()


class StreamEvent:
    def __init__(self):
        self.reached = threading.Event()
        self.reached.set()


def arrive(event):
    """Wait for a point of another stream; a wrong order must not look like a slow machine."""
    if not event.wait(25):
        raise TimeoutError("the other stream hangs")


class AsyncBackend(FakeBackend):
    """A stream: jobs run in order in a thread of their own, each after a real delay.  Errors come at synchronize."""

    def __init__(self, device):
        super().__init__(device)
        self.jobs, self.error = queue.SimpleQueue(), None
        self.thread = threading.Thread(target=self._live, daemon=True)
        self.thread.start()

    def _live(self):
        while (job := self.jobs.get()) is not None:
            if isinstance(job, threading.Event):        # a fence: reached after an error too
                job.set()
                continue
            time.sleep(self.device.delay)
            try:
                if self.error is None:
                    job()
            except Exception as e:
                self.error = e

    def submit(self, job):
        self.jobs.put(job)

    def free(self):
        self.jobs.put(None)
        self.thread.join(5)

    def synchronize(self):
        reached = threading.Event()
        self.jobs.put(reached)
        if not reached.wait(30):
            raise TimeoutError(f"{self.name}: the stream hangs")
        error, self.error = self.error, None
        if error is not None:
            raise error

    def graph_compute(self, graph):
        self.device.check("graph_compute")
        kept = graph.plans.get(self, lambda plan: None, lambda: CPUPlan(self, graph, graph.placement))
        self.computed.append(len(kept.nodes))
        self.submit(kept.compute)

    def set_tensor_async(self, t, data, offset=0):
        self.submit(lambda: t.buffer.set_tensor(t, data, offset))

    def copy_tensor_async(self, src, dst, src_backend=None):
        self.copied.append(src)
        if not isinstance(src_backend, AsyncBackend) or src_backend is self:
            return False
        ready, taken = threading.Event(), threading.Event()
        src_backend.jobs.put(ready)

        def job():
            arrive(ready)
            dst.buffer.host_bytes(dst.offs, dst.nbytes)[...] = src.buffer.host_bytes(src.offs, src.nbytes)
        self.submit(job)
        self.jobs.put(taken)
        src_backend.submit(lambda: arrive(taken))      # the source is not overwritten before it was read
        return True

    def event_record(self, event):
        event.reached = threading.Event()
        self.jobs.put(event.reached)

    def event_wait(self, event):
        reached = event.reached
        self.submit(lambda: arrive(reached))


class Slots(Fake):
    """A device whose slots are replaced one at a time: `device.answers[slot] = function or exception`."""

    def __init__(self, name="A", **options):
        super().__init__(name, **options)
        self.answers, self.events, self.freed_events = {}, [], []
        self._buft = SlotsBufferType(self, name, self.host)

    def answer(self, slot, otherwise, *args):
        found = self.answers.get(slot, otherwise)
        if isinstance(found, Exception):
            raise found
        return found(*args) if callable(found) else found

    def init_backend(self, params=""):
        return SlotsBackend(self)

    def supports_op(self, t):
        return self.answer("supports_op", super().supports_op, t)

    def supports_buft(self, buft):
        return self.answer("supports_buft", super().supports_buft, buft)

    def offload_op(self, t):
        return self.answer("offload_op", super().offload_op, t)

    def event_new(self):
        self.events.append(self.answer("event_new", StreamEvent))
        return self.events[-1]

    def event_free(self, event):
        self.freed_events.append(event)
        self.answer("event_free", None)


class SlotsBufferType(FakeBufferType):
    def alignment(self):
        return self.device.answer("alignment", 64)

    def max_size(self):
        return self.device.answer("max_size", 1 << 40)

    def alloc_size(self, t):
        return self.device.answer("alloc_size", lambda t: t.nbytes, t)

    def alloc_buffer(self, size):
        def make(size):
            self.device.used += size
            return SlotsBuffer(self, size)
        return self.device.answer("alloc_buffer", make, size)


class SlotsBuffer(FakeBuffer):
    def init_tensor(self, t):
        super().init_tensor(t)
        self.buft.device.answer("init_tensor", None, t)

    def set_tensor(self, t, data, offset=0):
        self.buft.device.answer("set_tensor", None)
        super().set_tensor(t, data, offset)

    def get_tensor(self, t, offset=0, nbytes=None):
        self.buft.device.answer("get_tensor", None)
        return super().get_tensor(t, offset, nbytes)

    def copy_tensor(self, src, dst):
        self.buft.device.answer("copy_tensor", None)
        return super().copy_tensor(src, dst)

    def free(self):
        super().free()
        self.buft.device.answer("free", None)


class SlotsBackend(FakeBackend):
    def graph_compute(self, graph):
        self.device.answer("graph_compute", None)
        super().graph_compute(graph)

    def copy_tensor_async(self, src, dst, src_backend=None):
        return self.device.answer("copy_tensor_async", False)

    def synchronize(self):
        self.device.answer("synchronize", None)

    def event_record(self, event):
        self.device.answer("event_record", None)

    def event_wait(self, event):
        self.device.answer("event_wait", None)

    def graph_optimize(self, nodes):
        return self.device.answer("graph_optimize", lambda ns: ns, nodes)


class Reg:
    def __init__(self, *found, name="mine", **more):
        self.name, self.found = name, found
        self.__dict__.update(more)

    def devices(self):
        return self.found


def check_guards(*devices):
    """No device wrote outside its buffers."""
    for d in devices:
        for b in d.buffers:
            assert b.guards_intact(), f"{b!r}: bytes around the buffer were written"


def poison(*devices):
    """NaN bytes into every buffer of these devices that is marked as compute memory."""
    for d in devices:
        for b in d.buffers:
            if b.alive and b.usage == gg.USAGE_COMPUTE:
                b._arena[:] = 0xFF


def values(t):
    return np.frombuffer(t.bytes(), np.uint8)
