"""The real ggml in a worker process, for any graph and for single ops.

    peer = connect()                        # xllamacpp's ggml, else pywhispercpp's; MissingExtra where neither is there
    peer.supports(records)                  # "" or the op that ggml's CPU backend refuses, or what an older ggml lacks
    peer.run(records, leaves, wanted)       # {index: bytes} of results
    peer.seconds(records, leaves, wanted)   # time of one run
    peer.op("mul_mat", [w, x], types=["q4_0"])          # one op by its constructor: arrays in, array out

`records_of(outputs)` writes a ggjit graph down.  The worker asks `ggml_backend_supports_op` before it computes; where
ggml still aborts, a new worker takes the next case.
"""
import functools
import os
import subprocess
import sys
import threading
import time

from ggjit.ops.core.errors import MissingExtra
from ggjit.ops.core.record import GLU, OP, UNARY
from ggjit.ops.core.types import BY_NAME
from ggjit.tools.suite import ggml
from ggjit.tools.suite.ggml import libraries, receive, send

WHEELS = ("xllamacpp", "pywhispercpp")
PATIENCE = 20.0             # seconds: a worker is hung that waits as long, or computes as long on every core
FLAG_PARAM = 4


def records_of(outputs):
    """(records, tensors): what the worker needs of every tensor that `outputs` rest on, sources first."""
    order, index = [], {}
    pending = list(reversed(outputs))
    while pending:
        t = pending[-1]
        first = [s for s in (*t.src, t.view_src) if s is not None and s.id not in index]
        if first:
            pending += reversed(first)
            continue
        pending.pop()
        if t.id not in index:
            index[t.id] = len(order)
            order.append(t)
    return [_record(t, index) for t in order], order


def _record(t, index):
    params = [int(p) for p in t.op_params]
    kinds = {OP.UNARY: UNARY, OP.GLU: GLU}.get(t.op)
    return {"type": t.type.id, "op": t.op.name, "kind": kinds(params[0]).name if kinds else "", "ne": tuple(t.ne),
            "nb": tuple(t.nb), "params": params, "flags": t.flags & FLAG_PARAM, "nbytes": t.nbytes,
            "src": [-1 if s is None else index[s.id] for s in t.src],
            "view_src": -1 if t.view_src is None else index[t.view_src.id], "view_offs": t.view_offs}


_NUMBERS = {name.lower(): t.id for name, t in BY_NAME.items()}


def _number(type_name):
    return _NUMBERS[type_name.lower()]


class WorkerDied(RuntimeError):
    """The worker died (ggml aborted) or did not answer."""


class Patience:
    """Tells a process that is hung from one that is slow on a busy machine, by its processor time; where the system
    does not say that of another process, by the time that has passed."""

    def __init__(self, pid):
        known = sys.platform.startswith("linux")
        self.clock = functools.partial(time.clock_gettime, ~pid << 3 | 2) if known else time.monotonic
        self.begin()                                    # the number: clock_getcpuclockid(3)

    def begin(self):
        """Something new was begun."""
        self.first = self.before = self.clock()

    def is_over(self, seconds):
        """After another `seconds` without an answer: it waited all the time, or has computed as long on every core."""
        before, self.before = self.before, self.clock()
        return self.before - before < seconds / 100 or self.before - self.first > seconds * (os.cpu_count() or 1)


def _watch(worker, answered):
    """Kill a worker that is hung."""
    try:
        patience = Patience(worker.pid)
        while not answered.wait(PATIENCE):
            if patience.is_over(PATIENCE):
                worker.kill()
                return
    except OSError:                                     # it has ended
        return


class Lacking(RuntimeError):
    """This ggml does not have what was asked for."""


class Oracle:
    """Talks to a worker and starts a new one when it is gone."""

    def __init__(self, wheel):
        self.wheel, self.worker, self.lock, self.lost = wheel, None, threading.Lock(), 0

    def _call(self, *request):
        with self.lock:
            if self.worker is None or self.worker.poll() is not None:
                # an abort shall end the process: ggml would start a debugger first, to print where it was
                self.worker = subprocess.Popen([sys.executable, "-P", ggml.__file__, self.wheel],
                                               env=os.environ | {"GGML_NO_BACKTRACE": "1"}, stdin=subprocess.PIPE,
                                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            answered = threading.Event()
            threading.Thread(target=_watch, args=(self.worker, answered), daemon=True).start()
            try:
                send(self.worker.stdin, request)
                ok, value = receive(self.worker.stdout)
            except (EOFError, BrokenPipeError):
                self.lost += 1
                raise WorkerDied(f"ggml gave up: exit status {self.worker.wait()}") from None
            finally:
                answered.set()
        if not ok:
            raise WorkerDied(value)
        return value

    def supports(self, records):
        return self._call("supports", records)

    def run(self, records, leaves, wanted, n_threads=1):
        """{index: bytes}, or the name of the op that ggml refuses."""
        return self._call("run", records, leaves, wanted, n_threads)

    def gradients(self, records, leaves, loss, params):
        """{index: bytes} of the gradients of record `loss` with respect to the records `params`, or the refused op.

        WorkerDied where ggml has no gradient: it aborts.
        """
        return self._call("gradients", records, leaves, loss, params)

    def seconds(self, records, leaves, wanted, n_threads=1, at_least=0.2):
        """Seconds of one run, or the name of the op that ggml refuses."""
        return self._call("seconds", records, leaves, wanted, n_threads, at_least)

    def op(self, name, arrays, types=(), params=(), permute=None, n_threads=1):
        """The result of ggml_<name>; types by name, None: the array's own.  See ggml.Ggml.op.  Lacking."""
        types = [t and _number(t) for t in types]
        result = self._call("op", name, list(arrays), types, list(params), permute, n_threads)
        if isinstance(result, str):
            raise Lacking(f"{self.wheel} lacks {result}")
        return result

    def quantize(self, type_name, array, imatrix=None):
        """float32 (..., k) -> uint8 (..., row bytes) by ggml_quantize_chunk."""
        return self._call("quantize", _number(type_name), array, imatrix)

    def quantize_row(self, function, array, nbytes):
        """float32 (..., k) -> uint8 (..., nbytes) by a row quantiser such as "quantize_row_q8_K_ref"."""
        return self._call("quantize_row", function, array, nbytes)

    def dequantize(self, type_name, raw, k):
        """uint8 (..., row bytes) -> float32 (..., k) by the type's to_float."""
        return self._call("dequantize", _number(type_name), raw, k)

    def close(self):
        if self.worker is not None:
            self.worker.stdin.close()
            self.worker.wait()
            self.worker = None


@functools.cache
def of_wheel(wheel):
    """The process's one Oracle of a wheel."""
    return Oracle(wheel)


def connect(*wheels):
    """The oracle of the first of `wheels` (the best) that is installed; MissingExtra where there is none."""
    for wheel in wheels or WHEELS:
        if libraries(wheel):
            return of_wheel(wheel)
    raise MissingExtra("no wheel with the real ggml is installed; pip install xllamacpp (the newer ggml) or "
                       "'ggjit[test]' (pywhispercpp); until then results are checked against float64 alone")
