"""Gradients of a case, checked: `ggjit ops grad`.

    loss = sum(r * result), r random                the result of the case as a scalar that no symmetry makes constant

    rules      the gradient's nodes evaluated in float64 (float64.py)  against  central differences of the loss, along
               random directions in each leaf of a float type; directions that meet a corner are drawn again
    kernels    the same nodes computed by the device                   against  their values in float64
    ggml       the same                                                against  ggml_build_backward_expand's gradient

ggml's own mode compares float32 gradients with float32 differences of step 0.1 to 20; in float64 the step is 1e-5 and
rounding is not what is measured.
"""
import dataclasses
import math
import time
import zlib

import numpy as np

import ggjit as gg
from ggjit.ops.core.errors import GgjitError, NotSupported
from ggjit.ops.core.types import BF16, F16, F32
from ggjit.tools.suite.cases.case import Maker
from ggjit.tools.suite.compare import as_array, nmse
from ggjit.tools.suite.float64 import Float64, numeric
from ggjit.tools.suite.flops import flops
from ggjit.tools.suite.oracle import WorkerDied, records_of
from ggjit.tools.suite.runner import FAIL, NOT_SUPPORTED, OK, as_bytes

SKIPPED = "skipped"                                     # an integer result, no float leaf, or too large
FLOAT_TYPES = (F32, F16, BF16)
MAX_ELEMENTS, MAX_FLOPS = 300_000, 1e8                   # of all tensors; larger cases have the same rules
N_DIRECTIONS, MAX_DRAWS = 3, 12
MAX_SLOPE_ERROR = 1e-4                                  # share of the gradient's size along the direction
MAX_NMSE = 1e-5                                         # of the device's values against float64
MAX_QUANTISED_NMSE = 2e-2                               # of products with 8-bit columns, gated: sums that cancel
MAX_PEER_NMSE = 1e-4                                    # ggml rounds products more
# ggml's gradient leaves the rotated part's offset out, and adds the gradient of a view with gaps at other places; the
# differences in float64 say so
GGML_DIFFERS = {"ROPE": "n_offs=32", "SILU_MUL": "layout=strided_dim1"}
HUGE = 1e30                                             # what max pooling gives for a window outside the picture


@dataclasses.dataclass
class GradOutcome:
    """status: OK, FAIL, not supported (`error` says what has no gradient), skipped.

    checked: of "rules", "kernels", "ggml".

    err: the largest share of a slope that rule and difference are apart.
    """
    case: object
    status: str
    error: str = ""
    err: float = 0.0
    checked: tuple = ()
    without: tuple = ()                                 # leaves that have no gradient
    seconds: float = 0.0

    @property
    def json(self):
        return {"op": self.case.op, "params": self.case.params, "ok": self.status == OK, "error": self.error,
                "family": self.case.family, "index": self.case.index, "status": self.status, "err": self.err,
                "checked": list(self.checked), "without": list(self.without), "seconds": round(self.seconds, 6)}


class GradRunner:
    """Checks gradients of cases.  backend None: the rules alone, nothing is compiled.  peer: an Oracle or None."""

    def __init__(self, backend=None, seed=0, peer=None):
        self.backend, self.seed, self.peer = backend, seed, peer

    def run(self, case):
        """GradOutcome of a case; it never raises on account of the case."""
        t0, outcome, scene = time.perf_counter(), GradOutcome(case, OK), None
        try:
            scene = GradCase(case, self.seed)
            if scene.too_large():
                outcome.status, outcome.error = SKIPPED, "too large"
            else:
                self._check(scene, outcome)
        except NotSupported as e:
            outcome.status, outcome.error = NOT_SUPPORTED, str(e)
        except GgjitError as e:
            refused = scene is None
            outcome.status, outcome.error = NOT_SUPPORTED if refused else FAIL, f"{type(e).__name__}: {e}"
        except Exception as e:                          # a fault in a rule is a finding
            outcome.status, outcome.error = FAIL, f"{type(e).__name__}: {e}"
        finally:
            if scene is not None:
                scene.ctx.free()
        outcome.seconds = time.perf_counter() - t0
        return outcome

    def _check(self, scene, outcome):
        if not scene.leaves or scene.out.type not in FLOAT_TYPES and not scene.out.type.quantized:
            outcome.status, outcome.error = SKIPPED, "integers"
            return
        scene.make_loss()
        found, reasons = {}, []
        for t in scene.leaves:
            try:
                found[t] = scene.gradient(t)
            except NotSupported as e:
                outcome.without += (t.name or f"{t.type!r} {list(t.ne)}",)
                reasons.append(str(e))
            except gg.ParamError as e:                  # its shape alone counts
                if "does not depend" not in str(e):
                    raise
        if not found:
            raise NotSupported(reasons[0] if reasons else "the result depends on no leaf")
        self._rules(scene, found, outcome)
        if self.backend is not None and outcome.status == OK:
            self._kernels(scene, found, outcome)
        if self.peer is not None and outcome.status == OK:
            self._ggml(scene, found, outcome)

    def _rules(self, scene, found, outcome):
        exact = scene.exact = scene.float64(scene.loss, *found.values())
        for t, d in found.items():
            slope, drawn, kept = exact.run()[d], 0, 0
            while kept < N_DIRECTIONS and drawn < MAX_DRAWS:
                drawn += 1
                direction = scene.rng.standard_normal(slope.shape)
                want = numeric(exact, scene.loss, t, direction)
                if want is None:
                    continue
                kept += 1
                along = slope * direction
                size = max(math.sqrt(np.square(along).sum()), 1e-3 * abs(want), scene.noise)
                err = abs(along.sum() - want) / size
                outcome.err = max(outcome.err, err)
                if not err <= MAX_SLOPE_ERROR:
                    outcome.status = FAIL
                    outcome.error = f"{t!r}: slope {along.sum():.6g}, by differences {want:.6g} (size {size:.3g})"
                    return
        outcome.checked += ("rules",)

    def _kernels(self, scene, found, outcome):
        scene.place(self.backend)
        values = gg.compute(*found.values(), backend=self.backend)
        for (t, d), got in zip(found.items(), values if len(found) > 1 else (values,), strict=True):
            want = scene.exact.run()[d]
            err = in_range(got.reshape(want.shape), want)
            if not err <= scene.limit(MAX_NMSE) and not scene.is_noise(got, want):
                outcome.status, outcome.error = FAIL, f"{t!r}: the device's gradient is off, error {err:.3g}"
                return
        outcome.checked += ("kernels",)

    def _ggml(self, scene, found, outcome):
        params = [t for t in found if t.type is F32]
        if not params or GGML_DIFFERS.get(outcome.case.op, "none") in outcome.case.params:
            return
        records, order = records_of([scene.loss])
        index = {t.id: k for k, t in enumerate(order)}
        leaves = {index[i]: raw for i, raw in scene.bytes.items() if i in index}
        try:
            answer = self.peer.gradients(records, leaves, index[scene.loss.id], [index[t.id] for t in params])
        except WorkerDied:
            return                                      # ggml has no gradient here: it aborts
        if isinstance(answer, str):
            return
        params = [t for t in params if index[t.id] in answer]
        for t in params:
            got, want = np.frombuffer(answer[index[t.id]], np.float32), scene.exact.run()[found[t]].reshape(-1)
            err = in_range(got, want)
            if not err <= scene.limit(MAX_PEER_NMSE) and not scene.is_noise(got, want):
                outcome.status, outcome.error = FAIL, f"{t!r}: ggml's gradient is another, error {err:.3g}"
                return
        outcome.checked += ("ggml",) if params else ()


def in_range(got, want):
    """The error where float32 can hold what is wanted."""
    with np.errstate(over="ignore"):
        held = np.isfinite(want.astype(np.float32))
    return nmse(got[held].astype(np.float64), want[held])


class GradCase:
    """A case's graph with a loss on top, and its inputs."""

    def __init__(self, case, seed):
        self.case, self.ctx = case, gg.Context()
        self.rng = np.random.default_rng([seed, case.index + 1, zlib.crc32(str(case).encode())])
        self.maker = Maker(self.ctx)
        with self.ctx:
            self.out = case.build(self.maker)
        self.leaves = [t for t, _ in self.maker.leaves if t.type in FLOAT_TYPES]
        self.quantised = any(t.type.quantized for t, _ in self.maker.leaves)

    def limit(self, least):
        """The largest error of a gradient: `least`, or what products of quantised weights need."""
        return max(least, self.case.max_err, MAX_QUANTISED_NMSE if self.quantised else 0)

    def is_noise(self, got, want):
        """Whether a gradient is lost in the rounding of a loss of this size: it cancels, as a norm's of one element."""
        return np.abs(got.reshape(-1) - want.reshape(-1)).max(initial=0) <= self.noise

    def too_large(self):
        tensors = self.ctx.tensors
        return (sum(math.prod(t.ne) for t in tensors) > MAX_ELEMENTS
                or sum(flops(t) for t in tensors if t.op) > MAX_FLOPS)

    def draw(self, out):
        """`out` in float64 of inputs that are drawn; smaller ones where it is beyond float32, as exp often is."""
        for size in (1, 0.1):
            self.bytes = {t.id: as_bytes(t, init(self.rng, t.ne) * (size if t in self.leaves else 1))
                          for t, init in self.maker.leaves}
            values = self.float64(out).run()[out]
            if not (np.abs(values) > np.finfo(np.float32).max).any():
                break
        return values

    def make_loss(self):
        with self.ctx:
            out = self.out if self.out.type is F32 else gg.cast(self.out, F32)
            values = self.draw(out)
            if not np.isfinite(values).all():           # a mask of -inf
                out = gg.soft_max(gg.cont(out))
                values = self.float64(out).run()[out]
            r = self.rng.standard_normal(values.shape).astype(np.float32) * (np.abs(values) < HUGE)
            weights = self.ctx.new_tensor(F32, out.ne)
            self.bytes[weights.id] = r.tobytes()
            self.maker.leaves.append((weights, None))
            self.loss = gg.sum(gg.mul(out, weights))
        # what float64 differences can resolve of a loss of this size
        self.noise = 1e-6 * max(1.0, float(np.abs(values * r).sum()))

    def gradient(self, t):
        with self.ctx:
            return gg.grad(self.loss, t)

    def float64(self, *outputs):
        exact = Float64(*outputs)
        for t, _ in self.maker.leaves:
            if t.id in self.bytes:
                exact.hold(t, as_array(t, np.frombuffer(self.bytes[t.id], np.uint8).data))
        return exact

    def place(self, backend):
        """The leaves with their values in memory."""
        gg.alloc_ctx_tensors(self.ctx, backend)
        for t, _ in self.maker.leaves:
            t.set_bytes(self.bytes[t.id])
