"""Time per run of a case, beside the real ggml's on the same bytes and as many threads."""
import dataclasses
import time

from ggjit.ops.core.errors import GgjitError
from ggjit.tools.suite.flops import counted, flops, touched
from ggjit.tools.suite.oracle import WorkerDied, records_of
from ggjit.tools.suite.runner import Built, threads_of

AT_LEAST = 0.2                                          # seconds a side is measured


@dataclasses.dataclass
class Speed:
    """seconds and peer_seconds of one run; amount: operations or bytes of a run, in `unit` (GFLOP, GB) per second."""
    case: object
    seconds: float | None = None
    peer_seconds: float | None = None
    amount: float = 0.0
    unit: str = "GB/s"
    error: str = ""

    def rate(self, seconds):
        return None if not seconds else self.amount / seconds / 1e9

    @property
    def json(self):
        return {"op": self.case.op, "params": self.case.params, "ok": not self.error, "error": self.error,
                "family": self.case.family, "index": self.case.index, "seconds": self.seconds, "unit": self.unit,
                "rate": self.rate(self.seconds), "peer_seconds": self.peer_seconds,
                "peer_rate": self.rate(self.peer_seconds)}


def measure(case, backend, seed=0, peer=None):
    """Speed of a case; `error` says why there is none."""
    speed, built = Speed(case), None
    try:
        built = Built(case, backend, seed, peer)
        built.require_support()
        built.fill()
        plan = built.plan()
        by_flops = any(counted(t) for t in built.nodes)
        speed.unit = "GFLOPS" if by_flops else "GB/s"
        speed.amount = float(sum((flops if by_flops else touched)(t) for t in built.nodes))
        speed.seconds = _median(plan.compute)
        if peer is not None:
            records, order = records_of([built.out])
            index = {t.id: k for k, t in enumerate(order)}
            leaves = {index[i]: raw for i, raw in built.bytes.items() if i in index}
            answer = peer.seconds(records, leaves, [index[built.out.id]], threads_of(backend), AT_LEAST)
            speed.peer_seconds = None if isinstance(answer, str) else answer
    except WorkerDied:
        speed.peer_seconds = None
    except GgjitError as e:
        speed.error = str(e)
    finally:
        if built is not None:
            built.close()
    return speed


def _median(run):
    """Median of at least three runs after a first one, over AT_LEAST seconds."""
    run()
    times, end = [], time.perf_counter() + AT_LEAST
    while len(times) < 3 or time.perf_counter() < end:
        t0 = time.perf_counter()
        run()
        times.append(time.perf_counter() - t0)
    return sorted(times)[len(times) // 2]
