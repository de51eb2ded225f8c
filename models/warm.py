"""Compiling in parallel: helper processes compile a model's kernels from the other end.

    this process      alloc.alias ... pool.run   get_rows   rope   mul_mat ->
    a helper                                               <- mul_mat   swiglu   flash_attn   set_rows

A helper maps the same file, builds the same graphs and chooses the same kernels, without memory or a plan.  All
processes look into the kernel cache before they compile, so what one has made the others load; where two meet, one
kernel is compiled twice and nothing is harmed.

    python -m ggjit.models.warm '{"path": ..., "options": {...}, "share": [0, 1]}'          (what a helper runs)
"""
import atexit
import functools
import json
import subprocess
import sys

from ggjit import pool
from ggjit.config import available_cores
from ggjit.fusion import fuse_nodes, single
from ggjit.ops.jit import CACHE, cache_dir, kernel_address
from ggjit.ops.record import VIEW_OPS
from ggjit.ops.spec import all_specs

MAX_HELPERS = 3                 # a model has some 20 kernels, and each helper imports Numba first


def jobs(network):
    """{name: function that compiles it}: kernels of the network's common graphs, last nodes first; after the first
    graph the thread pool, which is when the command needs it."""
    n_threads, found = network.backend.n_threads, {}
    for shape in network._common_shapes():
        graph = network.graph(*shape)
        singles = [single(t, all_specs()[t.op], all_specs()[t.op].kernel(t, n_threads))
                   for t in graph.nodes if t.op not in VIEW_OPS]
        # runs are fused as if every node had memory of its own: mostly that is what the plan will do
        for p in reversed(fuse_nodes(singles, graph, lambda t: (t, 0), n_threads)):
            found.setdefault(p.kernel.name, functools.partial(
                kernel_address, p.kernel.name, p.kernel.make, (p.module, *p.kernel.modules)))
        for f in (pool.run, pool.worker, pool.poll, pool.clock):
            found.setdefault(f.name, lambda f=f: f.address)
    return found


def kept_kernels():
    """Names of the files in the kernel cache."""
    return {p.name for p in (cache_dir() / "kernels").glob("*.o")}


def compile_share(path, options, share):
    """Compile every n-th kernel of the model's, from the i-th on; share = (i, n)."""
    from ggjit.models.load import load_model
    i, n = share
    with load_model(path, reserve=False, **options) as network:
        for compile_one in list(jobs(network).values())[i::n]:
            compile_one()


def start_helper(path, options, share):
    """A helper process; it ends with this one at the latest."""
    job = json.dumps({"path": str(path), "options": options, "share": share})
    process = subprocess.Popen([sys.executable, "-m", "ggjit.models.warm", job], stdin=subprocess.DEVNULL,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    atexit.register(_end, process)


def _end(process):
    process.terminate()
    process.wait()


def help_when_compiling(path, options):
    """Start helpers at the first compilation, one for each further core; a warm cache starts none."""
    show, n_helpers = CACHE.on_compile, min(available_cores() - 1, MAX_HELPERS)

    def first(name):
        CACHE.on_compile = show
        for i in range(n_helpers):
            start_helper(path, options, (i, n_helpers))
        if show:
            show(name)
    CACHE.on_compile = first


if __name__ == "__main__":
    compile_share(**json.loads(sys.argv[1]))
