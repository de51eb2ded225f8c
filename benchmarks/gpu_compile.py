"""The kernels that benchmarks.gpu launches, compiled for a compute capability by all processors: no GPU.

    python -m benchmarks.gpu_compile 9.0 [--only ops walk piped] [--every 4 --first 1]

Cubins lie in the cache folder (GGJIT_CACHE_DIR), named by the sources and the compilers' versions, so a run on a card
finds what was compiled here before, also on another machine.  What is there already is not compiled again: a run that
was stopped goes on where it was.  A copied folder must be its reader's own (`chown`, `chmod -R go-w`), or it is not
used.

In the end a table of the walkers (ops/cuda/native/walk.py), by what ptxas says: registers and spills of a thread,
shared memory of a block, blocks that a multiprocessor has room for.
"""
import argparse
import itertools
import math
import os
import subprocess
import sys
import time

import numpy as np

import ggjit as gg
from benchmarks import gpu_walk
from benchmarks.gpu_piped import piping, works
from ggjit.cuda import libraries, walk_table
from ggjit.cuda.cuda_plan import parts_of, repetitions
from ggjit.graphs.plan_node import nodes_to_compute, plan_nodes
from ggjit.ops.core.spec import Inputs, all_specs
from ggjit.ops.cuda.native.launch import Launch, makers, node_kernel
from ggjit.ops.cuda.native.walk import walker_of

PARTS = "walk", "piped", "ops"          # those that take longest first
# of a multiprocessor; shared memory that the driver takes of each block
REGISTERS, THREADS, SHARED_NBYTES, RESERVED_NBYTES = 1 << 16, 2048, 228 << 10, 1 << 10


def _kernels(t, cc):
    """The kernels of a node, in every way that a compute capability has."""
    with piping(libraries.YES):
        return [x for launches in libraries.ways(t, cc).values() for x in launches if isinstance(x, Launch)]


def ops_kernels(cc):
    for op in makers():
        for case in all_specs()[op].cases():
            yield from _kernels(case.build(Inputs(gg.Context(), np.random.default_rng(0))), cc)


def piped_kernels(scale, cc):
    for work in works(scale):
        yield from _kernels(work.build(*(gg.Context().new_tensor(*leaf) for leaf in work.leaves)), cc)


def tokens(scale):
    """(label, Launches, the Walker of those that are one kernel or None) of tokens in each way of gpu_walk."""
    for shape in gpu_walk.shapes(scale):
        for name in gpu_walk.types(scale):
            made = gpu_walk.new_leaves(gg.Context(), shape, getattr(gg, name))
            graph = gpu_walk.graph_of(gpu_walk.token(made, shape))
            for (said, kernels), (_, params) in itertools.product(
                    ((libraries.NO, "own"), (libraries.YES, "piped")), gpu_walk.WAYS):
                with piping(said):
                    launches, walked = planned(graph, "fuse=1" in params)
                yield f"{shape.name} {name}, {kernels}", launches, walker_of(walked)[0] if "persist" in params else None


def walkers(scale):
    """The kernels of tokens in each way of gpu_walk, and the Walkers of those that are one kernel."""
    for _, launches, walker in tokens(scale):
        yield from launches
        if walker:
            yield walker


def planned(graph, fuse):
    """(all Launches of a graph's plan, those that are not left out), each tensor in memory of its own."""
    singles = plan_nodes(*nodes_to_compute(graph), lambda t: node_kernel(_way(t)))
    parts = parts_of(singles, graph, None, fuse)
    launches = [x for kernel in parts.kernels for x in kernel.launches]
    return launches, [x for x, by in zip(launches, repetitions(parts, ()), strict=True) if by < 0]


def _way(t):
    ways = libraries.ways(t)
    return ways.get(libraries.PIPED, ways["own"])


def all_of(parts, scale, cc):
    """[Launch or Walker], each once; Walkers, which take longest, first, so that processes share them."""
    made = {"walk": lambda: walkers(scale), "piped": lambda: piped_kernels(scale, cc),
            "ops": lambda: ops_kernels(cc)}
    found = {}
    for part in (part for part in PARTS if part in parts):
        for x in made[part]():
            found.setdefault(x.name, x)
    return sorted(found.values(), key=lambda x: isinstance(x, Launch))


def walker_lines(scale, cc):
    """A table of all Walkers; those that are not in the cache folder are compiled."""
    from ggjit.ops.cuda.compiler.build import walker_binary
    yield "| token | threads | bodies | registers | spilled bytes | shared bytes of a block | blocks | cubin bytes |"
    yield "|---|---|---|---|---|---|---|---|"
    for label, _, walker in tokens(scale):
        if walker:
            b = walker_binary(walker, cc)
            shared = walk_table.WORDS_NBYTES + max(n * walk_table.n_teams(walker.threads, x, n) for x, n in zip(
                walker.launches, b.pieces, strict=True))
            yield (f"| {label} | {walker.threads} | {len(walker.launches)} | {b.registers} | {b.spill_nbytes} | "
                   f"{shared:,} | {n_blocks(walker.threads, b.registers, shared)} | {len(b.cubin):,} |")


def n_blocks(threads, registers, shared_nbytes):
    """Blocks that a multiprocessor of a capability from 9.0 on has room for."""
    of_registers = REGISTERS // (-(-registers // 8) * 8 * threads)
    return min(of_registers, SHARED_NBYTES // (shared_nbytes + RESERVED_NBYTES), THREADS // threads)


def compile_some(cc, parts, first, every):
    """Compile every so many-th of the kernels, into the cache folder."""
    from benchmarks.gpu import FULL
    from ggjit.ops.cuda.compiler.build import binary, walker_binary
    for x in all_of(parts, FULL, cc)[first::every]:
        (binary if isinstance(x, Launch) else walker_binary)(x, cc)


def compile_all(cc, parts=PARTS, until=math.inf):
    """All kernels of these parts, by as many processes as there are processors; what is not done by then is compiled
    where it is needed."""
    n = os.cpu_count() or 1
    running = [subprocess.Popen([sys.executable, "-m", "benchmarks.gpu_compile", "{}.{}".format(*cc), "--only", *parts,
                                 "--first", str(i), "--every", str(n)]) for i in range(n)]
    for process in running:
        try:
            process.wait(None if until == math.inf else max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main():
    p = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    p.add_argument("cc", help="compute capability, e.g. 9.0")
    p.add_argument("--only", nargs="*", default=PARTS, help="the parts of benchmarks.gpu")
    p.add_argument("--first", type=int, help="number of the first kernel that this process compiles")
    p.add_argument("--every", type=int, default=1, help="it compiles every so many-th from there on")
    args = p.parse_args()
    cc = tuple(map(int, args.cc.split(".")))
    if args.first is None:
        compile_all(cc, args.only)
        if "walk" in args.only:
            from benchmarks.gpu import FULL
            print(*walker_lines(FULL, cc), sep="\n")
    else:
        compile_some(cc, args.only, args.first, args.every)


if __name__ == "__main__":
    main()
