"""Plans on a CUDA device: launches resolved once, replayed as a flat list or as one CUDA graph.

    graph.nodes     mul_mat                     add            soft_max
                    quantise   mat-vec          add            soft_max       kernels: Launches of ops/cuda
    rows            [ NODE row              ][ NODE row ][ NODE row ][ status ]   one copy on the device

A kernel's only argument is the device address of its node's row, so one compiled kernel serves all shapes, and neither
the launches nor a captured graph change when buffers move: the rows are written again.  Kernels that find a bad index
leave it in the status, which is read with every run and looked at when the stream is synchronized.

With `persistent=1` a plan that runs again is one kernel that walks over its launches (walk.py), where that can be.
"""
import functools
import weakref

import numpy as np

from ggjit.core.buffer import EmptyBuffer
from ggjit.cpu.fusion import fuse_nodes, still_permitted
from ggjit.cuda.driver import CudaError, driver
from ggjit.cuda.functions import argument_of, function_of
from ggjit.cuda.libraries import chosen
from ggjit.cuda.walk import PlanWalk, walk_of
from ggjit.graphs.graph_plan import Plan
from ggjit.graphs.plan_node import PlanParts
from ggjit.ops.core.errors import NotSupported, OutOfMemory, ParamError
from ggjit.ops.core.record import BAD_INDEX, N_CHUNK, N_DST, N_SRC, N_WORK, V_ADDR, V_WORDS, WORD
from ggjit.ops.core.shape import describe
from ggjit.ops.cuda.matmul.with_codes import before_product
from ggjit.ops.cuda.native.launch import Gemm, Sort, cuda_fusions, node_kernel

STATUS_WORDS = 2                # words of the status block, as ops/cuda/native/views.py reads them
GRAPH_MIN_LAUNCHES = 2
ALIGNED = 16                    # bytes: the widest load; makers of launches look at strides and view offsets alone


def parts_of(singles, graph, places, fuse):
    """The PlanParts of single nodes.

    fuse: runs of nodes become one kernel (ops/cuda/fused).  What comes before a product that takes its result as 8-bit
    codes leaves these, too (with_codes.py).  places: as fuse_nodes takes them.
    """
    parts = fuse_nodes(singles, graph, places, 1, cuda_fusions) if fuse else singles
    kinds, likes, kernels, firsts = parts.kinds.copy(), dict(parts.likes), parts.kernels, [0, *parts.ends.tolist()]
    n_kinds = 1 + max(likes, default=0)
    for i, t in enumerate(parts.results[:-1]):
        product = parts.nodes[firsts[i + 1]]
        if made := before_product(t, kernels[i].launches, product, kernels[i + 1].launches):
            like = likes[int(kinds[i])]
            kinds[i] += n_kinds
            likes[int(kinds[i])] = like._replace(kernel=node_kernel(made))
    return PlanParts(parts.nodes, parts.ids, likes, kinds, parts.ends, parts.again)


class CUDAPlan(Plan):
    """`compute()` submits the graph to the backend's stream and returns."""

    def _choose(self, t):
        found = chosen(self.backend, t)
        if found is None:
            raise NotSupported(f"{self.backend.name} has no kernel for {t!r} with sources "
                               f"{', '.join(describe(s) for s in t.src)}; a Scheduler gives it to the CPU")
        return node_kernel(found)

    def _fused(self, places):
        return parts_of(self._singles, self.graph, places, self.fuse)

    def _still_fits(self, places):
        return still_permitted(self.parts, places)

    def _lay_out(self, places):
        super()._lay_out(places)
        backend = self.backend
        self._device_rows = backend.device.buffer_type().alloc_buffer((self.rows.size + STATUS_WORDS) * WORD)
        self._row_base = self._device_rows.base
        self._status_offs = self.rows.size * WORD
        self._status = backend.device.host_buffer_type().alloc_buffer(STATUS_WORDS * WORD)
        self.status = self._status._arena.view(np.int64)
        self.status[:] = 0
        self._launches, self._first_launch, self._arguments = [], [], []        # launches: functions of the stream
        for kernel, start in zip(self.kernels, self._starts, strict=False):
            self._first_launch.append(len(self._launches))
            argument = argument_of(self._row_base + start * WORD)
            self._arguments.append(argument)
            for launch in kernel.launches:
                if isinstance(launch, Gemm | Sort):
                    by_library = self._multiply if isinstance(launch, Gemm) else self._sort
                    self._launches.append(functools.partial(by_library, launch, start))
                else:
                    shape = function_of(backend.device, launch), *launch.grid, launch.block, 1, 1, 0
                    self._launches.append(functools.partial(_launch, shape, argument[0]))
            self.rows[start + N_CHUNK] = self._row_base + self._status_offs
        self._first_launch.append(len(self._launches))
        self._done_by = repetitions(self.parts, self._placed_work)
        self._calls_libraries = any(isinstance(x, Gemm | Sort) for k in self.kernels for x in k.launches)
        self._captures = backend.use_graphs and len(self._launches) >= GRAPH_MIN_LAUNCHES
        self._walk = None if backend.persistent else "the backend was made without persistent=1"
        self._graph = _Graph()
        weakref.finalize(self, _free_graph, backend.device, self._graph).atexit = False
        with backend.lock:
            backend.plans.add(self)

    def _check_address(self, t, buf, offs):
        if (offs - t.view_offs) % ALIGNED:
            raise ParamError(f"{describe(t)} lies at byte {offs - t.view_offs} of {buf!r}, which is not a multiple of "
                             f"{ALIGNED}; save the file with general.alignment 32, or load the model with "
                             f"n_gpu_layers=-1, which places its weights again")

    def _memory(self, buf):
        if isinstance(buf, EmptyBuffer):
            return buf, 0
        return buf.memory, buf.base

    def _work_buffer(self):
        return self.backend.work(self.work_nbytes)

    def working_buffers(self):
        """Memory of the device that the plan itself consists of."""
        walk = self._walk
        return [self._device_rows, *([walk.table] if isinstance(walk, PlanWalk) else ())]

    def _rows_written(self, memory):
        self._send_rows()
        if isinstance(self._walk, PlanWalk):
            self._walk = None                   # the bytes that launches touch are others
        if self._calls_libraries:               # a captured call holds the addresses it was captured with
            _free_graph(self.backend.device, self._graph)

    def _send_rows(self):
        """Send the NODE rows and a cleared status, after everything submitted before."""
        raw = np.concatenate([self.rows, np.zeros(STATUS_WORDS, np.int64)])
        self.backend.send(self._row_base, raw.view(np.uint8))

    # ------------------------------------------------------------ running
    def run_nodes(self, first, last):
        """Submit nodes first..last-1."""
        with self._lock, self.backend.lock:
            self._up_to_date()
            self.begin()
            self.backend.device.use()
            if first == 0 and last == len(self.nodes) and self._captures and self.runs:
                if not self._walked():
                    self._replay()
            else:
                self._submit(first, last, self.backend.stream)
            self.backend.ran(self)

    _run = run_nodes

    def _alone(self):
        return self.backend.lock

    @property
    def not_walked_because(self):
        """Why the whole plan is not one persistent kernel; None if it is, or has not run twice yet."""
        return self._walk if isinstance(self._walk, str) else None

    def _walked(self):
        """Submit the whole plan as one persistent kernel, where that can be."""
        if self._walk is None:
            self._walk = walk_of(self, {i for i, done_by in enumerate(self._done_by) if done_by >= 0})
        if isinstance(self._walk, str):
            return False
        self._walk.launch(self.backend.stream)
        self._read_status(self.backend.stream)
        return True

    def _submit(self, first, last, stream):
        begin, end = self._first_launch[first], self._first_launch[last]
        for launch, done_by in zip(self._launches[begin:end], self._done_by[begin:end], strict=True):
            if done_by < begin:
                launch(stream)
        self._read_status(stream)

    def _read_status(self, stream):
        self.backend.cuda.cuMemcpyDtoHAsync(self._status.base, self._row_base + self._status_offs,
                                            STATUS_WORDS * WORD, stream)

    def _multiply(self, gemm, start, stream):
        """A product by cuBLAS, with the addresses in the node's row."""
        work = int(self.rows[start + N_WORK])
        a, b = (int(self.rows[start + N_SRC + V_WORDS * i + V_ADDR]) if offs is None else work + offs
                for i, offs in enumerate((gemm.a_offs, gemm.b_offs)))
        self.backend.cublas.multiply(gemm, a, b, int(self.rows[start + N_DST + V_ADDR]), stream)

    def _sort(self, sort, start, stream):
        """Words sorted by CCCL in the node's scratch memory."""
        self.backend.cccl.sort(sort, int(self.rows[start + N_WORK]), stream)

    def _replay(self):
        """The whole plan as one CUDA graph, captured at its second run."""
        stream = self.backend.stream
        if self._graph.exec is None:
            try:
                self._graph.exec = self._captured()
            # the driver cannot capture, or memory is full: launch kernels one by one
            except (CudaError, OutOfMemory):
                self._captures = False
                self._submit(0, len(self.nodes), stream)
                return
        self.backend.cuda.cuGraphLaunch(self._graph.exec, stream)

    def _captured(self):
        """On a stream of its own, which other threads' copies and waits do not reach; relaxed, so that nothing this or
        another thread does meanwhile (torch frees memory, say) spoils it."""
        cuda = self.backend.cuda
        stream = cuda.cuStreamCreate(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
        try:
            cuda.cuStreamBeginCapture(stream, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
            try:
                self._submit(0, len(self.nodes), stream)
            finally:
                graph = cuda.cuStreamEndCapture(stream)
            made = cuda.cuGraphInstantiate(graph, 0)
            cuda.cuGraphDestroy(graph)
            return made
        finally:
            cuda.cuStreamDestroy(stream)

    def failure(self):
        """The error a kernel left behind, or None; the next run starts clean.  The stream was synchronized."""
        node_id, value = int(self.status[0]) - 1, int(self.status[1])
        if node_id < 0:
            return None
        self.status[:] = 0
        self._send_rows()
        return self._error(BAD_INDEX, next(i for i, t in enumerate(self.nodes) if t.id == node_id), value)

    def _fill(self, buf, offs, nbytes):
        self.backend.device.fill(buf.base + offs, 0xFF, nbytes)

    # ------------------------------------------------------------ reading
    def numpy(self, t):
        self.backend.synchronize()
        return super().numpy(t)

    def view(self, t):
        """As on the CPU, but a copy: the memory is the device's."""
        self.backend.synchronize()
        return super().view(t)

    def _bytes(self, t, buf, offs):
        raw = np.empty(t.nbytes, np.uint8)
        if raw.size:
            self.backend.device.copy_out(raw, buf.base + offs)
        return raw

    def timed(self):
        """Node by node, by events of the stream: [(tensor, kernel name, nanoseconds)]."""
        cuda, out = self.backend.cuda, []
        self.backend.device.use()
        start, end = cuda.cuEventCreate(0), cuda.cuEventCreate(0)
        for i, (t, k) in enumerate(zip(self.nodes, self.kernels, strict=True)):
            cuda.cuEventRecord(start, self.backend.stream)
            self.run_nodes(i, i + 1)
            cuda.cuEventRecord(end, self.backend.stream)
            cuda.cuEventSynchronize(end)
            out.append((t, k.name, int(cuda.cuEventElapsedTime(start, end) * 1e6)))
        cuda.cuEventDestroy(start)
        cuda.cuEventDestroy(end)
        return out


def repetitions(parts, placed):
    """For each launch the number of the one that has left the same in scratch memory already, or -1.

    It is still there when nothing else was written to scratch memory since, and nothing to the tensor it was made of.
    placed: numbers of parts that have scratch memory of their own.
    """
    done_by, left = [], None                    # left: (id of the base, of the tensor, form), the launch's number
    for i, part in enumerate(parts):
        beside = None
        for launch in part.kernel.launches:
            found = (*_names(part.nodes[0].src[1]), launch.leaves) if launch.leaves and i not in placed else None
            again = found is not None and left is not None and left[0] == found
            done_by.append(left[1] if again else -1)
            if found and not again:
                left = found, len(done_by) - 1
            elif launch.work_nbytes and not again:
                left = None
            if launch.leaves_result and i not in placed:
                beside = (*_names(parts[i + 1].nodes[0].src[1]), launch.leaves_result), len(done_by) - 1
        if left is not None and any(t.base.id == left[0][0] for t in part.stored):
            left = None
        left = beside or left
    return done_by


def _names(t):
    return t.base.id, t.id


class _Graph:
    """An instantiated CUDA graph, or none yet; outlives the plan until its finalizer has run."""
    exec = None


def _free_graph(device, graph):
    made, graph.exec = graph.exec, None
    if made is not None:
        device.release("cuGraphExecDestroy", made)


def _launch(shape, argument, stream):
    driver().cuLaunchKernel(*shape, stream, argument, 0)
