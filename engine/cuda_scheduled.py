"""Plans for graphs whose inputs lie in host memory: a Scheduler of the GPU and the CPU behind a plan's interface.

    m = load_model("model.gguf", backend="CUDA0")       weights and cache on the GPU; token ids, masks: host arrays

What the GPU has no kernel for runs on the CPU.
"""
from ggjit.cpu import CPU


class ScheduledPlan:
    """`compute()`, `numpy(t)`, `view(t)` of a plan, done by a Scheduler of its own."""

    def __init__(self, backend, graph):
        from ggjit.sched import Scheduler
        self.backend, self.graph, self.placement = backend, graph, graph.placement
        self.sched = Scheduler([backend, CPU.init_backend()])
        self.sched.reserve(graph)
        self.runs = 0

    @property
    def resolved(self):
        """Views are copies here: each run has its own."""
        return self.runs

    def compute(self):
        self.sched.graph_compute(self.graph)
        self.runs += 1

    def numpy(self, t):
        """The values of `t` as the last run left them."""
        return self.sched.numpy(t)

    def view(self, t):
        """The same, read-only."""
        a = self.sched.numpy(t)
        a.flags.writeable = False
        return a

    def dump(self):
        """Splits, causes and copies."""
        return str(self.sched.explain())
