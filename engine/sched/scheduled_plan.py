"""Plans that a Scheduler runs, behind the interface of a plan on one backend.

    m = load_model("model.gguf", backend="CUDA0")       weights and cache on the GPU; token ids, masks: host arrays

Their memory is the scheduler's: plans of one scheduler share it and run one after the other.
"""
from ggjit.graphs.plan_cache import without_plans


class ScheduledPlan:
    """`compute()`, `numpy(t)`, `view(t)` of a plan; `sched` splits the graph and copies what its devices need."""

    def __init__(self, sched, graph):
        self.sched, self.graph, self.placement = sched, without_plans(graph), graph.placement
        self.runs = 0
        sched.alloc_graph(self.graph)

    @property
    def resolved(self):
        """Views are copies here: each run has its own."""
        return self.runs

    def compute(self):
        self.sched.graph_compute(self.graph)
        self.runs += 1

    def submit(self, t):
        """Start a run; returns a function that waits for the values of `t`.  More runs may be started before."""
        read = self.sched.submit_and_read(self.graph, t)
        self.runs += 1
        return read

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
