"""CUDA devices: `CUDA0`, `CUDA1`, ...; streams of work on them; how they are found.

    gg.init_backend("CUDA0")                    needs pip install 'ggjit[gpu]' and an NVIDIA GPU
    gg.Scheduler([gpu, cpu])                    what the GPU has no kernel for runs on the CPU

A backend is one stream: what is submitted runs in order, and `synchronize` waits and raises what went wrong meanwhile.
Kernels are in ops/cuda; nothing of it is imported before a CUDA backend is made or asked what it supports.
"""
import collections
import functools
import gc
import os
import threading
import weakref

import numpy as np

from ggjit.core.backend import TYPE_GPU, TYPE_IGPU, Backend, Device
from ggjit.core.buffer import as_bytes
from ggjit.cpu.device import CPU, parse_params
from ggjit.cuda.cccl import cccl
from ggjit.cuda.cublas import cublas
from ggjit.cuda.cuda_plan import CUDAPlan
from ggjit.cuda.driver import INSTALL, CudaError, driver
from ggjit.cuda.memory import CUDABuffer, CUDABufferType, PinnedBufferType
from ggjit.ops.core.errors import GgjitError, NotSupported, OutOfMemory, ParamError, TypeMismatch
from ggjit.ops.core.record import OP, VIEW_OPS
from ggjit.ops.cuda.native.launch import launches
from ggjit.ops.native.jit import address_of
from ggjit.sched.scheduled_plan import ScheduledPlan
from ggjit.sched.scheduler import Scheduler

OFFLOAD_MIN_BATCH = 32
MIN_CAPABILITY = (8, 0)         # mma of bfloat16 and int8 tiles: Ampere and newer


class CUDADevice(Device):
    """GPU number `ordinal`."""
    is_async = True

    def __init__(self, ordinal):
        cuda = driver()
        self.ordinal, self.name = ordinal, f"CUDA{ordinal}"
        self.handle = cuda.cuDeviceGet(ordinal)
        self.description = _text(cuda.cuDeviceGetName(256, self.handle))
        attributes = cuda.CUdevice_attribute

        def attribute(name):
            return int(cuda.cuDeviceGetAttribute(getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}"), self.handle))
        self.compute_capability = attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")
        self.n_multiprocessors = attribute("MULTIPROCESSOR_COUNT")
        self.cooperative = bool(attribute("COOPERATIVE_LAUNCH"))
        self.type = TYPE_IGPU if attribute("INTEGRATED") else TYPE_GPU
        self.functions, self.modules = {}, []           # compiled kernels by name (engine/cuda/cuda_plan.py)
        self.measured = None                            # measured times of libraries (engine/cuda/libraries.py)
        self._buffer_type, self._pinned = CUDABufferType(self), PinnedBufferType(self)
        self._backends, self._met = [], weakref.WeakSet()       # backends: weak references
        self._streams = []                              # of backends, until destroyed: those of backends that are gone
        self._garbage = collections.deque()             # (function that frees, what is no longer held)
        self._lock = threading.Lock()                   # held by a thread that frees garbage or adds a backend

    @functools.cached_property
    def context(self):
        """The primary context: shared with torch, cupy and other libraries of the process."""
        return driver().cuDevicePrimaryCtxRetain(self.handle)

    @functools.cached_property
    def _stream(self):
        """The stream of the synchronous slots."""
        self.use()
        return driver().cuStreamCreate(driver().CUstream_flags.CU_STREAM_NON_BLOCKING)

    def use(self):
        """Make this device's context current in the calling thread."""
        driver().cuCtxSetCurrent(self.context)

    # ------------------------------------------------------------ slots
    @property
    def props(self):
        bus = _text(driver().cuDeviceGetPCIBusId(32, self.handle))
        return {**super().props, "device_id": bus}

    def memory(self):
        """(free bytes, all bytes); memory to which nothing refers counts as free."""
        self.collect()
        self.use()
        return tuple(int(n) for n in driver().cuMemGetInfo())

    def init_backend(self, params=""):
        """params: "graphs=0" launches kernels one by one instead of as captured CUDA graphs; "persistent=1" makes one
        kernel of a plan that runs again (engine/cuda/walk.py), "fuse=1" one kernel of runs of nodes (ops/cuda/fused);
        no GPU has run either yet."""
        if self.compute_capability < MIN_CAPABILITY:
            raise GgjitError(f"{self.name} ({self.description}) has compute capability "
                             f"{'.'.join(map(str, self.compute_capability))}; ggjit's kernels need "
                             f"{'.'.join(map(str, MIN_CAPABILITY))}; use the CPU backend")
        return CUDABackend(self, **parse_params(params, {"graphs": int, "persistent": int, "fuse": int}))

    def buffer_type(self):
        return self._buffer_type

    def host_buffer_type(self):
        return self._pinned

    def buffer_from_host_ptr(self, array, read_only=False, max_tensor_size=None):
        """A copy of host memory that is only read, such as a mapped model file.  Errors: NotSupported, OutOfMemory."""
        if not read_only:
            raise NotSupported(f"{self.name} cannot use host memory in place; pass read_only=True for a copy, or use "
                               f"alloc_buffer and set the tensors")
        raw = as_bytes(array)
        buf = CUDABuffer(self._buffer_type, raw.size)
        if raw.size:
            self.copy_in(buf.base, raw)
        buf.read_only = True
        return buf

    def supports_op(self, t):
        if t.op in VIEW_OPS or 0 in t.ne:               # views and empty tensors launch nothing
            return True
        return launches(t) is not None

    def supports_buft(self, buft):
        return buft is self._buffer_type

    def offload_op(self, t):
        """Is it worth copying weights here?  From 32 columns on (or GGML_OP_OFFLOAD_MIN_BATCH), as in ggml."""
        if t.op == OP.GET_ROWS:
            return False
        batch = t.ne[1] if t.op == OP.MUL_MAT else t.ne[2] if t.op in (OP.MUL_MAT_ID, OP.ROPE) else \
            t.ne[1] * t.ne[2] * t.ne[3]
        return batch >= _offload_min_batch()

    def event_new(self):
        self.use()
        return driver().cuEventCreate(driver().CUevent_flags.CU_EVENT_DISABLE_TIMING)

    def event_free(self, event):
        self.use()
        driver().cuEventDestroy(event)

    def event_synchronize(self, event):
        self.use()
        driver().cuEventSynchronize(event)

    # ------------------------------------------------------------ backends
    def add_backend(self, backend):
        with self._lock:
            self._backends = [ref for ref in self._backends if ref() is not None] + [weakref.ref(backend)]
            self._streams.append(backend.stream)

    def _living(self):
        return [backend for ref in self._backends if (backend := ref()) is not None]

    def finish(self):
        """Wait for all backends of this device; their errors come out here."""
        for backend in self._living():
            backend.synchronize()
        self.collect()                          # waits for what backends that are gone have submitted

    # ------------------------------------------------------------ synchronous copies
    def copy_in(self, address, raw):
        """Bytes of a flat host array to a device address."""
        self.finish()
        self.use()
        driver().cuMemcpyHtoDAsync(address, address_of(raw), raw.size, self._stream)
        driver().cuStreamSynchronize(self._stream)

    def copy_out(self, raw, address):
        """Bytes at a device address into a flat host array."""
        self.finish()
        self.use()
        driver().cuMemcpyDtoHAsync(address_of(raw), address, raw.size, self._stream)
        driver().cuStreamSynchronize(self._stream)

    def fill(self, address, value, nbytes):
        """One byte value everywhere."""
        self.finish()
        self.use()
        driver().cuMemsetD8Async(address, value, nbytes, self._stream)
        driver().cuStreamSynchronize(self._stream)

    def copy_from(self, other, address, source, nbytes):
        """Bytes at `source` on the device `other` to `address` here."""
        other.finish()
        self.finish()
        self.use()
        self.submit_copy(other, address, source, nbytes, self._stream)
        driver().cuStreamSynchronize(self._stream)

    def submit_copy(self, other, address, source, nbytes, stream):
        """The same as work of `stream`."""
        if other is self:
            driver().cuMemcpyDtoDAsync(address, source, nbytes, stream)
        else:
            self._meet(other)
            driver().cuMemcpyPeerAsync(address, self.context, source, other.context, nbytes, stream)

    def _meet(self, other):
        """Let this device reach the other's memory directly, where it can; the driver goes by the host otherwise."""
        if other not in self._met:
            self._met.add(other)
            if driver().cuDeviceCanAccessPeer(self.handle, other.handle):
                self.use()
                try:
                    driver().cuCtxEnablePeerAccess(other.context, 0)
                except CudaError:               # access is enabled already, or there are too many peers
                    return

    # ------------------------------------------------------------ memory
    def allocate(self, function, *args):
        """Address of new memory from the driver function `function`.  Errors: OutOfMemory."""
        make = getattr(driver(), function)
        self.use()
        self.collect()
        try:
            return int(make(*args))
        except OutOfMemory:
            gc.collect()                        # plans and buffers in reference cycles
            self.collect()
            return int(make(*args))

    def release(self, function, held):
        """Let `function`, the driver's of that name or any other, free what is no longer referred to: at the next
        allocation or wait, never from a finalizer, which may run in any thread, a captured graph under way."""
        self._garbage.append((function, held))

    def collect(self):
        """Free what was released before this call, when the streams are done with it.  One thread at a time: what is
        released meanwhile may be in use by work submitted meanwhile, and waits for the next call."""
        with self._lock:
            n = len(self._garbage)
            if n == 0:
                return
            self.use()
            for stream in self._streams:
                driver().cuStreamSynchronize(stream)
            for _ in range(n):
                function, held = self._garbage.popleft()
                (function if callable(function) else getattr(driver(), function))(held)

    def destroy_stream(self, of_backend):
        """Destroy a stream; `release` calls it.  of_backend: (stream, [host memory that its work may use])."""
        stream, held = of_backend
        self._streams.remove(stream)
        driver().cuStreamDestroy(stream)
        held.clear()


class CUDABackend(Backend):
    """One stream of a CUDA device."""
    reads_placements = True
    n_threads, abort_callback = 1, None

    def __init__(self, device, graphs=1, persistent=0, fuse=0):
        super().__init__(device)
        self._plan_class, self.use_graphs, self.cuda = CUDAPlan, bool(graphs), driver()
        self.persistent, self.fuse = bool(persistent), bool(fuse)
        device.use()
        self.stream = self.cuda.cuStreamCreate(self.cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self.lock = threading.RLock()           # plans share scratch memory: one submits at a time
        self._work, self._works, self.plans = None, weakref.WeakSet(), weakref.WeakSet()
        self._ran, self._held = {}, []          # plans run and host memory in use since the last synchronize
        weakref.finalize(self, device.release, device.destroy_stream, (self.stream, self._held)).atexit = False
        device.add_backend(self)

    def work(self, nbytes):
        """Scratch memory shared by the plans of this stream; plans keep what they were resolved with."""
        if self._work is None or self._work.size < nbytes:
            self._work = CUDABuffer(self.device.buffer_type(), nbytes)
            self._works.add(self._work)
        return self._work

    def working_buffers(self):
        """Scratch memory, also what older plans keep; of each plan its rows and the table of its walker."""
        with self.lock:
            works, plans = list(self._works), list(self.plans)
        return {"kernel work": works, "plans": [buf for plan in plans for buf in plan.working_buffers()]}

    @functools.cached_property
    def cublas(self):
        """The cuBLAS handle of this stream, for dense products."""
        return cublas(self.device)

    @functools.cached_property
    def cccl(self):
        """The CCCL sorter of this stream, for long rows."""
        return cccl(self.device)

    def ran(self, plan):
        """A plan was submitted: `synchronize` asks it how it went."""
        self._ran[id(plan)] = plan

    def synchronize(self):
        """Wait for everything submitted.  Errors: IndexRangeError (an id out of range), DeviceLost."""
        self.device.use()
        with self.lock:                         # work submitted by other threads from here on is left to the next call
            ran, self._ran, held = self._ran, {}, self._held[:]
            self._held.clear()
        try:
            self.cuda.cuStreamSynchronize(self.stream)
        except BaseException:                   # after a Ctrl-C the work goes on, and the next call waits for it
            with self.lock:
                self._ran = ran | self._ran
                self._held[:0] = held
            raise
        held.clear()
        failures = [e for e in (plan.failure() for plan in ran.values()) if e is not None]
        self.device.collect()
        if failures:
            raise failures[0]

    # ------------------------------------------------------------ copies in the stream's order
    def send(self, address, raw):
        """Bytes of a flat host array to a device address; the array is kept until `synchronize`."""
        self.device.use()
        with self.lock:
            self._held.append(raw)
            self.cuda.cuMemcpyHtoDAsync(address, address_of(raw), raw.size, self.stream)

    def set_tensor_async(self, t, data, offset=0):
        raw, buf = as_bytes(data), t.buffer
        if not self._mine(buf):
            return super().set_tensor_async(t, data, offset)
        if raw.size:
            self.send(buf._range(t, offset, raw.size), raw)

    def get_tensor_async(self, t, offset=0, nbytes=None):
        """A uint8 array that is filled in when the stream is synchronized."""
        buf = t.buffer
        if not self._mine(buf):
            return super().get_tensor_async(t, offset, nbytes)
        raw = np.empty(t.nbytes - offset if nbytes is None else nbytes, np.uint8)
        if raw.size:
            self.device.use()
            with self.lock:
                self._held.append(raw)
                self.cuda.cuMemcpyDtoHAsync(address_of(raw), buf._range(t, offset, raw.size), raw.size, self.stream)
        return raw

    def _mine(self, buf):
        return isinstance(buf, CUDABuffer) and buf.buft.device is self.device

    def copy_tensor_async(self, src, dst, src_backend=None):
        """Copy on the source's stream, after what this one submitted before; this stream goes on when it is done."""
        a, b = src.buffer, dst.buffer
        if not (isinstance(src_backend, CUDABackend) and src_backend._mine(a) and self._mine(b)):
            return False
        if not dst.nbytes:
            return True
        source, target = a._range(src, 0, src.nbytes), b._range(dst, 0, dst.nbytes)
        if src_backend is not self:
            src_backend._after(self)            # this stream still reads what will be overwritten
        src_backend.device.use()
        self.device.submit_copy(src_backend.device, target, source, src.nbytes, src_backend.stream)
        if src_backend is not self:
            self._after(src_backend)
        return True

    def _after(self, other):
        """Later work of this stream waits for what `other` has submitted so far."""
        event = other.device.event_new()
        other.event_record(event)
        self.event_wait(event)
        other.device.event_free(event)          # the driver keeps the event until the stream has reached it

    def event_record(self, event):
        self.device.use()
        self.cuda.cuEventRecord(event, self.stream)

    def event_wait(self, event):
        self.device.use()
        self.cuda.cuStreamWaitEvent(self.stream, event, 0)

    # ------------------------------------------------------------ graphs
    @property
    def plan_settings(self):
        return self.use_graphs, self.persistent, self.fuse

    def graph_plan_create(self, graph, placement=None):
        """A CUDAPlan: kernels compiled and loaded, launches prepared; `plan.compute()` submits them.

        A graph with leaves in host memory (inputs made with from_numpy) gets a plan that runs on a Scheduler of this
        backend and the CPU, which copies what changed.  Its memory is the scheduler's, copies included; what a
        GraphAllocator set aside for the graph lies idle.  Many such graphs share memory in one Scheduler of your own.
        """
        if not graph.placed and any(self._is_host(t) for t in graph.leafs):
            return ScheduledPlan(Scheduler([self, CPU.init_backend()]), graph)
        return self._plan_class(self, graph, placement or graph.placement)

    @staticmethod
    def _is_host(t):
        where = t._where()
        return where is not None and where[0].buft.is_host()

    def graph_compute(self, graph):
        """Submit the graph and return.  The plan is kept with the graph, so a second call replays."""
        if not hasattr(graph, "plans"):
            raise TypeMismatch(f"graph_compute takes a Graph, got {type(graph).__name__}; use gg.Graph(y)")
        key = graph.placement, *self.plan_settings
        graph.plans.get(self, lambda plan: key, lambda: self.graph_plan_create(graph)).compute()


@functools.cache
def _offload_min_batch():
    value = os.environ.get("GGML_OP_OFFLOAD_MIN_BATCH", str(OFFLOAD_MIN_BATCH))
    if not value.isdigit():
        raise ParamError(f"GGML_OP_OFFLOAD_MIN_BATCH={value!r}: expected a number of columns")
    return int(value)


def _text(raw):
    raw = raw if isinstance(raw, bytes) else bytes(raw)
    return raw.split(b"\0", 1)[0].decode()


# ---------------------------------------------------------------- discovery
@functools.cache
def found_devices():
    """All CUDA devices of this machine.  Errors: as `driver`."""
    return [CUDADevice(i) for i in range(int(driver().cuDeviceGetCount()))]


@functools.cache
def missing():
    """The error that keeps CUDA devices away, or None."""
    try:
        found_devices()
    except GgjitError as e:
        return e
    return None


def usable_devices():
    """All CUDA devices, none where they cannot be used."""
    return [] if missing() is not None else found_devices()


def no_device(name):
    """The error for a device `name` that is not there."""
    reason = missing()
    if reason is None:
        return ParamError(f"no device {name!r}; there are {', '.join(d.name for d in found_devices())}")
    error = ParamError(f"no device {name!r}: CUDA devices need an NVIDIA GPU and {INSTALL} ({reason})")
    error.__cause__ = reason
    return error
