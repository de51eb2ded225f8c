"""The least time of a token and of single kernels on an H100: an estimate from sizes and counts, without a card.

    GGJIT_CUDA_COMPILER=simulator GGJIT_SIMULATED_BLOCKS=device python -m benchmarks.gpu_estimate

    launches, waits     of a layer of a llama's token: kernels of the captured graph, meetings of all blocks of the
                        persistent kernel (engine/cuda/walk_table.py)
    at least            the longer of: bytes / bandwidth, multiplications / rate of the units that make them
    tokens a second     of bytes at 85 % of the bandwidth and launches, or waits, one after the other: at most

A kernel that is measured far above the largest figure waits for something that these do not count: latency.
"""
import dataclasses
import itertools
import sys

import ggjit as gg
from benchmarks import gpu_walk
from benchmarks.gpu_piped import piping, works
from ggjit.cuda import libraries, walk_table
from ggjit.ops.core.record import OP
from ggjit.ops.cuda.blocks import BLOCKS
from ggjit.ops.cuda.native import walk


@dataclasses.dataclass(frozen=True)
class Card:
    """Multiprocessors; cycles, bytes of memory a second; of a multiprocessor in a cycle: multiplications of float16 by
    warpgroups and by single warps, of bytes by dp4a; seconds of a tiny launch of a captured graph, measured; seconds of
    a meeting of all blocks, assumed; the part of the bandwidth that kernels reach, assumed."""
    n: int = 132
    clock: float = 1.755e9
    bandwidth: float = 3.35e12
    wgmma: int = 2048
    mma: int = 1024
    dp4a: int = 256
    launch: float = 1.5e-6
    wait: float = 1.5e-6
    reached: float = 0.85


H100 = Card()


# ---------------------------------------------------------------- tokens
def walked(shape, type, said, fuse=1):
    """(Walker, launches, waits) of a token's plan, by the kernels that GGJIT_PIPED=`said` chooses; fuse: runs of nodes
    as one kernel."""
    backend = gg.init_backend(f"CUDA0:persistent=1,fuse={fuse}")
    graph = gpu_walk.graph_of(gpu_token(backend, shape, type))
    gg.GraphAllocator(backend).alloc_graph(graph)
    with piping(said):
        plan = backend.graph_plan_create(graph)
    steps = walk_table.steps(plan, {i for i, done_by in enumerate(plan._done_by) if done_by >= 0})
    walker, numbers = walk.walker_of([x.launch for x in steps])
    rows = walk_table.table(steps, walker, numbers, (0,) * len(walker.launches), 0)
    return walker, len(steps), int(rows[:, walk.W_WAITS].sum())


def gpu_token(backend, shape, type):
    ctx = gg.Context()
    made = gpu_walk.new_leaves(ctx, shape, type)
    gg.alloc_ctx_tensors(ctx, backend)
    return gpu_walk.token(made, shape)


def of_a_layer(shape, type, said, fuse=1):
    """(launches, waits) of a layer."""
    (_, *one), (_, *two) = (walked(dataclasses.replace(shape, n_layer=n, n_vocab=256), type, said, fuse)
                            for n in (1, 2))
    return tuple(b - a for a, b in zip(one, two, strict=True))


def token_lines(card):
    yield "| token of | kernels | launches a layer | waits a layer | weights | captured | one kernel, at most |"
    yield "|---|---|---|---|---|---|---|"
    for shape, name in itertools.product(gpu_walk.SHAPES, gpu_walk.TYPES):
        leaves = gpu_walk.new_leaves(gg.Context(), shape, getattr(gg, name)).values()
        seconds = sum(t.nbytes for t in leaves) / card.bandwidth
        for (said, kernels), fuse in itertools.product(((libraries.NO, "own"), (libraries.YES, "piped")), (0, 1)):
            launches, waits = of_a_layer(shape, getattr(gg, name), said, fuse)
            rates = (1 / (seconds / card.reached + n * shape.n_layer * each) for n, each in (
                (launches, card.launch), (waits, card.wait)))
            yield f"| {shape.name} {name} | {kernels}{', fused' * fuse} | {launches} | {waits} | " + \
                f"{seconds * 1e6:,.0f} us | " + " | ".join(f"{x:,.0f} tok/s" for x in rates) + " |"


# ---------------------------------------------------------------- kernels
def least_seconds(work, way, card):
    """{what: seconds} of a node by a way."""
    y = work.build(*(gg.Context().new_tensor(*leaf) for leaf in work.leaves))
    nbytes = y.nbytes + sum(s.nbytes for s in y.src if s is not None)
    if y.op is OP.MUL_MAT:
        a, n = y.src[0], y.src[1].ne[1]
        multiplications = a.ne[0] * a.ne[1] * n
        rate = card.wgmma if way == libraries.WARPGROUPS else card.dp4a if n == 1 and a.type in BLOCKS else card.mma
    else:
        q, k = y.src[:2]
        multiplications, rate = 2 * q.ne[0] * q.ne[1] * q.ne[2] * k.ne[1], card.mma
    return {"memory": nbytes / card.bandwidth, "multiplications": multiplications / (rate * card.n * card.clock)}


def kernel_lines(card, scale):
    yield "| work | way | memory | multiplications | bound by, at most |"
    yield "|---|---|---|---|---|"
    for work in works(scale):
        y = work.build(*(gg.Context().new_tensor(*leaf) for leaf in work.leaves))
        with piping(libraries.YES):
            ways = libraries.ways(y, libraries.HOPPER)
        for way in (way for way in (libraries.PIPED, libraries.WARPGROUPS) if way in ways):
            seconds = least_seconds(work, way, card)
            most = max(seconds, key=seconds.get)
            rate = work.amount / seconds[most] / (1e9 if work.unit == "GB/s" else 1e12)
            cells = (f"{seconds[x] * 1e6:,.1f} us" for x in ("memory", "multiplications"))
            yield f"| {work.label} | {way} | {' | '.join(cells)} | {most}: {rate:,.0f} {work.unit} |"


def main():
    from benchmarks.gpu import FULL
    print("Estimates for an H100: no card was asked, nothing here is measured but the 1.5 us of a tiny launch.")
    print(f"Assumed: {H100.wait * 1e6} us for a wait, {H100.reached:.0%} of the bandwidth.\n")
    for lines in (token_lines(H100), kernel_lines(H100, FULL)):
        print(*lines, "", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
