"""Run one case: build it, fill it, compute it between sentinels, compare it.

    leaves   | gap | leaf | gap | leaf | gap |         gaps and results start as 0xFF: NaN as a float, -1 as an id
    results  | gap | node | gap | node | gap |         afterwards every byte of every gap must still be 0xFF

Each node is compared twice: with its float64 reference on the values its sources had just before it ran, and, over the
whole graph, with the real ggml on the same leaves.  Fusion cases compare only their result with ggml.
"""
import dataclasses
import math
import time
import zlib

import numpy as np

import ggjit as gg
from ggjit.cpu.device import CPUBackend
from ggjit.graphs.allocator import Placement
from ggjit.graphs.copying import single_node
from ggjit.graphs.placed import PlacedTensor
from ggjit.ops.core.errors import GgjitError, NotSupported
from ggjit.ops.core.record import VIEW_OPS
from ggjit.ops.core.spec import all_specs
from ggjit.ops.core.traits import all_traits
from ggjit.ops.core.types import BF16, I8, I64
from ggjit.ops.types.quantize import quantize
from ggjit.tools.suite.cases.case import Maker
from ggjit.tools.suite.compare import as_array, difference, rounding, stored
from ggjit.tools.suite.flops import flops
from ggjit.tools.suite.oracle import WorkerDied, records_of

GAP, SENTINEL = 256, 0xFF
OK, FAIL, NOT_SUPPORTED, REFUSED = "ok", "FAIL", "not supported", "refused"
# larger cases are checked by the real ggml alone, where it is there
MAX_REFERENCE_FLOPS, MAX_REFERENCE_ELEMENTS = 4e8, 1.5e7
NEEDS_IMPORTANCE = ("iq2_xxs", "iq2_xs", "iq1_s")


@dataclasses.dataclass
class Outcome:
    """What became of a case.

    status   ok, FAIL, not supported (no kernel or type yet), refused (a builder raised a typed error)
    error    what is wrong, "" if nothing;  err  the largest error measured
    checked  what it was compared with: "ggml", "float64"
    peer     "" or what ggml's own CPU backend said: the op it refuses
    """
    case: object
    status: str
    error: str = ""
    err: float = 0.0
    checked: tuple = ()
    peer: str = ""
    seconds: float = 0.0

    @property
    def json(self):
        err = self.err if math.isfinite(self.err) else None
        return {"op": self.case.op, "params": self.case.params, "ok": self.status == OK, "error": self.error,
                "family": self.case.family, "index": self.case.index, "status": self.status, "err": err,
                "max_err": self.case.max_err, "checked": list(self.checked), "peer": self.peer,
                "seconds": round(self.seconds, 6)}


class Arena:
    """Memory for tensors with GAP sentinel bytes between them, on any device."""

    def __init__(self, backend, tensors):
        buft = backend.default_buffer_type
        step, offs, self.where = max(64, buft.alignment()), 0, []
        for t in tensors:
            offs = -(-(offs + GAP) // step) * step
            self.where.append((t, offs))
            offs += buft.alloc_size(t)
        self.buffer = backend.alloc_buffer(offs + GAP)
        self.buffer.clear(SENTINEL)

    def place(self):
        """Give the tensors their memory."""
        for t, offs in self.where:
            gg.tensor_alloc(self.buffer, t, offs)

    def intact(self):
        """Is every byte outside the tensors as it was?"""
        whole = PlacedTensor(gg.Context().new_tensor(I8, (self.buffer.size,)), (), (self.buffer, 0))
        bytes_, end = whole._bytes_view(), 0
        for t, offs in self.where:
            if (bytes_[end:offs] != SENTINEL).any():
                return False
            end = offs + t.nbytes
        return not (bytes_[end:] != SENTINEL).any()


def as_bytes(t, values, peer=None):
    """The bytes of `values` in tensor t; floats in integer tensors go in bit by bit, as in ggml's tests."""
    a = np.asarray(values)
    if t.type.block > 1 or t.type is BF16:
        a = np.ascontiguousarray(a, np.float32)
        try:
            ones = np.ones(a.shape[-1], np.float32) if t.type.name in NEEDS_IMPORTANCE else None
            return quantize(t.type, a, ones).tobytes()
        except NotSupported:
            if peer is None:
                raise
            return peer.quantize(t.type.name, a, np.ones(a.shape[-1], np.float32)).tobytes()
    if t.type.dtype.kind == "i" and a.dtype.kind == "f":
        raw = a.astype(np.float32).tobytes()
        return raw * 2 if t.type is I64 else raw[:t.nbytes]
    return a.astype(t.type.dtype).tobytes()


class Built:
    """A case's graph, checked for support, with its inputs in memory."""

    def __init__(self, case, backend, seed, peer):
        self.case, self.backend = case, backend
        self.ctx = gg.Context()
        maker = Maker(self.ctx)
        with self.ctx:
            self.out = case.build(maker)
        self.maker, self.peer = maker, peer
        self.graph = gg.Graph(self.out)
        self.nodes = [t for t in self.graph.nodes if t.op not in VIEW_OPS and min(t.ne) > 0]
        self.result = self.out              # whose values the result shows
        while self.result.op in VIEW_OPS and self.result.src:
            self.result = self.result.src[0]
        self.rng = np.random.default_rng([seed, case.index + 1, zlib.crc32(str(case).encode())])

    def require_support(self):
        """NotSupported naming the type or op that is missing."""
        known = all_traits()
        for t in self.ctx.tensors:
            if t.type not in known:
                raise NotSupported(f"type {t.type!r} has no kernels yet")
        for t in self.nodes:
            if not self.backend.device.supports_op(t):
                raise NotSupported(f"no kernel for {t!r} with {', '.join(repr(s) for s in t.src if s is not None)}")

    def fill(self):
        self.leaves = Arena(self.backend, [t for t, _ in self.maker.leaves])
        self.leaves.place()
        self.bytes = {}
        for t, init in self.maker.leaves:
            raw = as_bytes(t, init(self.rng, t.ne), self.peer)
            t.set_bytes(raw)
            self.bytes[t.id] = raw

    def plan(self):
        self.own = Arena(self.backend, [t for t in self.nodes if t.view_src is None])
        if not isinstance(self.backend, CPUBackend):
            self.own.place()
            return DevicePlan(self.backend, self.graph, self.nodes)
        return self.backend.graph_plan_create(self.graph, Placement({t.id: (self.own.buffer, o)
                                                                      for t, o in self.own.where}))

    def close(self):
        for arena in (getattr(self, "leaves", None), getattr(self, "own", None)):
            if arena is not None:
                arena.buffer.free()
        self.ctx.free()


class DevicePlan:
    """What a runner needs of a plan, by the slots every backend has; the results have memory of their own."""

    def __init__(self, backend, graph, nodes):
        self.backend, self.graph, self.nodes = backend, graph, nodes

    def compute(self):
        self._run(self.graph)

    def run_nodes(self, first, last):
        for t in self.nodes[first:last]:
            self._run(single_node(t))

    def _run(self, graph):
        self.backend.graph_compute(graph)
        self.backend.synchronize()

    def where(self, t):
        return t._where()


class Runner:
    """Runs cases on one backend.  peer: an Oracle, or None: float64 alone."""

    def __init__(self, backend, seed=0, peer=None):
        self.backend, self.seed, self.peer = backend, seed, peer
        if isinstance(backend, CPUBackend):
            backend.fuse = False            # the result of every node is compared

    def run(self, case):
        """Outcome of a case; it never raises on account of the case."""
        t0 = time.perf_counter()
        built = None
        try:
            built = Built(case, self.backend, self.seed, self.peer)
            built.require_support()
            built.fill()
            outcome = self._compared(built)
        except NotImplementedError as e:            # NotSupported is one
            outcome = Outcome(case, NOT_SUPPORTED, str(e), peer=self.peer_refuses(built))
        except GgjitError as e:
            status = FAIL if built is not None else REFUSED if case.ggml_cpu else NOT_SUPPORTED
            outcome = Outcome(case, status, f"{type(e).__name__}: {e}", peer="" if case.ggml_cpu else case.op)
        except Exception as e:                          # a fault in an op's builder, reference or kernel is a finding
            outcome = Outcome(case, FAIL, f"{type(e).__name__}: {e}")
        finally:
            if built is not None:
                built.close()
        outcome.seconds = time.perf_counter() - t0
        return outcome

    def peer_refuses(self, built):
        if built is None:
            return ""
        if self.peer is None:
            return "no ggml to ask"
        try:
            return self.peer.supports(records_of([built.out])[0])
        except WorkerDied as e:
            return str(e)

    def _compared(self, built):
        outcome = Outcome(built.case, OK)
        theirs = self._ggml_values(built, outcome)
        plan = built.plan()
        if theirs is not None and not affordable(built.nodes):
            plan.compute()
        else:
            self._against_float64(built, plan, outcome)
        results = {t.id: read(plan, t) for t in built.nodes} if theirs is not None else {}
        if not (built.leaves.intact() and built.own.intact()):
            self._note(outcome, built.out, "sentinels", np.inf, 0.0, "bytes outside the tensors were written")
        for t in (built.result,) if built.case.whole else built.nodes:
            if theirs is not None and t.id in theirs:
                first = t.src[0] if t.src else None
                source = None if first is None else results.get(first.id)
                source = read(plan, first) if source is None and first is not None else source
                measure = built.case.error if t.id == built.result.id else "nmse"
                err, complaint = difference(measure, results[t.id], as_array(t, theirs[t.id]), source)
                self._note(outcome, t, "ggml", err, built.case.max_err, complaint)
        return outcome

    def _ggml_values(self, built, outcome):
        """{tensor id: bytes} from the real ggml, or None."""
        if self.peer is None or built.case.wrong:
            return None
        records, order = records_of([built.out])
        index = {t.id: k for k, t in enumerate(order)}
        leaves = {index[i]: raw for i, raw in built.bytes.items() if i in index}
        # a node that a later one writes over can only be read at the end: leave it out
        written = {t.base.id for t in built.nodes if t.view_src is not None}
        wanted = {t.id: index[t.id] for t in built.nodes if t.id == built.result.id or t.base.id not in written}
        try:
            answer = self.peer.run(records, leaves, list(wanted.values()), threads_of(self.backend))
        except WorkerDied as e:
            outcome.peer = str(e)
            return None
        if isinstance(answer, str):
            outcome.peer = answer
            return None
        return {i: answer[k] for i, k in wanted.items()}

    def _against_float64(self, built, plan, outcome):
        case = built.case
        for i, t in enumerate(plan.nodes):
            sources = [None if s is None else read(plan, s) for s in t.src]
            with np.errstate(all="ignore"):
                want = np.asarray(all_specs()[t.op].reference(t, *sources))
            plan.run_nodes(i, i + 1)
            got = read(plan, t)
            measure = case.error if t.id == built.result.id and case.error not in ("largest", "sorted") else "nmse"
            want = stored(t.type, want.reshape(got.shape)) if want.size == got.size else want
            err, complaint = difference(measure, got, want, sources[0] if sources else None)
            self._note(outcome, t, "float64", err, max(case.max_err, rounding(t.type)), complaint)

    @staticmethod
    def _note(outcome, t, against, err, limit, complaint):
        """Note one comparison; the first that fails is the outcome's error."""
        if against not in outcome.checked:
            outcome.checked += (against,)
        if against == "ggml" or not rounding(t.type):
            outcome.err = max(outcome.err, err)
        if not err <= limit and outcome.status == OK:
            outcome.status = FAIL
            outcome.error = f"{t!r} against {against}: {complaint or f'error {err:.3g} > {limit:.3g}'}"


def affordable(nodes):
    """Is the float64 reference of every node a matter of a second?"""
    tensors = [t for n in nodes for t in (n, *n.src) if t is not None]
    return (sum(flops(t) for t in nodes) <= MAX_REFERENCE_FLOPS
            and sum(math.prod(t.ne) for t in tensors) <= MAX_REFERENCE_ELEMENTS)


def threads_of(backend):
    """How many threads the real ggml gets beside this backend."""
    return getattr(backend, "n_threads", 1)


def read(plan, t):
    """Values of t where the plan keeps it."""
    return as_array(t, PlacedTensor(t, (), plan.where(t))._bytes_view().data)
