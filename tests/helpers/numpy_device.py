"""A device whose memory and kernels have nothing to do with ggjit's: bytes of its own, NumPy, every slot.

Its memory is a dict of bytearrays, which only its own functions reach; a stream is a list of jobs that `synchronize`
runs, so a read before that returns the poison.  `calls` counts the slots that were used.
"""
import collections

import numpy as np

import ggjit as gg
from ggjit.ops.core.record import OP, VIEW_OPS

POISON = 0xFF


class NumpyBuffer(gg.Buffer):
    def __init__(self, buft, size):
        super().__init__(buft, size)
        self.memory, self.told = bytearray([POISON]) * size, []

    def at(self, t):
        return np.frombuffer(self.memory, np.uint8)[t.offs:t.offs + t.nbytes]

    def init_tensor(self, t):
        self.told.append(t.name)

    def set_tensor(self, t, data, offset=0):
        self.buft.device.calls["set_tensor"] += 1
        raw = np.frombuffer(data, np.uint8)
        self.at(t)[offset:offset + raw.size] = raw

    def get_tensor(self, t, offset=0, nbytes=None):
        self.buft.device.calls["get_tensor"] += 1
        return self.at(t)[offset:None if nbytes is None else offset + nbytes].tobytes()

    def memset_tensor(self, t, value, offset=0, nbytes=None):
        self.at(t)[offset:None if nbytes is None else offset + nbytes] = value

    def copy_tensor(self, src, dst):
        self.buft.device.calls["copy_tensor"] += 1
        if not isinstance(src.buffer, NumpyBuffer):
            return False
        self.at(dst)[...] = src.buffer.at(src)
        return True

    def clear(self, value):
        self.memory[:] = bytes([value]) * self.size

    def reset(self):
        self.told.clear()

    def free(self):
        self.memory = bytearray()
        self.buft.device.freed += 1
        super().free()


class NumpyBufferType(gg.BufferType):
    def __init__(self, device):
        self.device, self.name = device, f"{device.name}_memory"

    def alignment(self):
        return 16

    def max_size(self):
        return self.device.max_size

    def alloc_size(self, t):
        return t.nbytes + 16                    # its kernels may read past the end

    def is_host(self):
        return False

    def alloc_buffer(self, size):
        self.device.made += 1
        return NumpyBuffer(self, size)


def strided(t):
    """The F32 tensor as an array over the device's memory, in NumPy's order."""
    raw = t.buffer.at(t)
    assert raw.size == t.nbytes, f"{t.op.name} {t.name!r} lies outside its buffer, which was freed or is another one"
    return np.lib.stride_tricks.as_strided(raw.view(np.float32), t.ne[::-1], t.nb[::-1])


def mul_mat(w, x):
    repeats = [n // m for n, m in zip(x.shape[:2], w.shape[:2], strict=True)]
    return x @ w.repeat(repeats[0], 0).repeat(repeats[1], 1).swapaxes(-1, -2)


KERNELS = {
    OP.ADD: lambda t, a, b: a + np.tile(b, [n // m for n, m in zip(a.shape, b.shape, strict=True)]),
    OP.MUL: lambda t, a, b: a * np.tile(b, [n // m for n, m in zip(a.shape, b.shape, strict=True)]),
    OP.MUL_MAT: lambda t, w, x: mul_mat(w, x),
    OP.SCALE: lambda t, a: a * np.array(t.op_params[:2], np.int32).view(np.float32)[0],
    OP.SQR: lambda t, a: a * a,
    OP.CONT: lambda t, a: a.reshape(t.ne[::-1]),
    OP.CPY: lambda t, a, b: a.reshape(b.shape),
}


class NumpyPlan:
    def __init__(self, graph):
        self.graph, self.runs = graph, 0


class NumpyBackend(gg.Backend):
    def __init__(self, device):
        super().__init__(device)
        self.jobs = []

    def submit(self, job):
        self.jobs.append(job)
        if not self.device.is_async:
            self.synchronize()

    def synchronize(self):
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            job()

    def graph_compute(self, graph):
        self.device.calls["graph_compute"] += 1
        self.submit(self._walk(graph))

    def graph_plan_create(self, graph, placement=None):
        self.device.calls["graph_plan_create"] += 1
        return NumpyPlan(graph)

    def graph_plan_update(self, plan, graph):
        plan.graph = graph
        return plan

    def graph_plan_compute(self, plan):
        plan.runs += 1
        self.submit(self._walk(plan.graph))

    def graph_plan_free(self, plan):
        self.device.calls["graph_plan_free"] += 1
        plan.graph = None

    def _walk(self, graph):
        """The job of a graph.  Where its nodes lie is known now; the job may run when they lie elsewhere."""
        steps = [(t, strided(t), [strided(s) for s in t.src]) for t in graph.nodes if t.op not in VIEW_OPS]

        def job():
            for t, out, sources in steps:
                out[...] = KERNELS[t.op](t, *sources)
        return job

    def set_tensor_async(self, t, data, offset=0):
        raw = bytes(data)
        self.submit(lambda: t.buffer.set_tensor(t, raw, offset))

    def get_tensor_async(self, t, offset=0, nbytes=None):
        self.synchronize()
        return t.buffer.get_tensor(t, offset, nbytes)

    def copy_tensor_async(self, src, dst, src_backend=None):
        self.device.calls["copy_tensor_async"] += 1
        if not isinstance(src.buffer, NumpyBuffer):
            return False
        src_backend.synchronize()
        self.submit(lambda: dst.buffer.copy_tensor(src, dst))
        return True

    def event_record(self, event):
        event.backend = self

    def event_wait(self, event):
        if event.backend not in (None, self):
            event.backend.synchronize()


class NumpyEvent:
    backend = None


class NumpyDevice(gg.Device):
    type, description = "gpu", "NumPy on bytes of its own"

    def __init__(self, name="NP", is_async=True, max_size=1 << 30):
        self.name, self.is_async, self.max_size = name, is_async, max_size
        self.made = self.freed = 0
        self.calls, self._buft = collections.Counter(), NumpyBufferType(self)

    def init_backend(self, params=""):
        return NumpyBackend(self)

    def buffer_type(self):
        return self._buft

    def supports_op(self, t):
        return t.op in VIEW_OPS or t.op in KERNELS and all(x.type is gg.F32 for x in (t, *t.src))

    def event_new(self):
        return NumpyEvent()

    def event_synchronize(self, event):
        if event.backend is not None:
            event.backend.synchronize()
