"""What threads exchange: cache lines that two of them write, bytes that move, atomic operations, barriers.

    python -m benchmarks.core_traffic [--only GRAPH;...] [--threads 2,8,64] [--kernels]     > results/core-traffic.md

Counted, not timed (recorder.py): 64 threads are counted on one core, and the figures are the same on every machine of
an instruction set.  Nodes are in the order that networks have, every one is shared, as if all were large, and products
follow Zen 5's rule.  A test compares: no figure of the table may rise.
"""
import argparse
import contextlib
import pathlib

import numpy as np

import ggjit as gg
from benchmarks.recorder import record
from ggjit.cpu import sharing
from ggjit.ops.matmul import choices
from ggjit.ops.native import isa

THREADS = 2, 8, 64
RESULTS = pathlib.Path(__file__).parent / "results" / "core-traffic.md"
WIDTH, HEADS, KV_HEADS, FF, CTX, HEAD = 256, 8, 4, 512, 640, 32
EPS, SCALE = 1e-5, HEAD ** -0.5


class Leaves:
    """Leaves of a graph: new(type, ne) holds small random values, weights of a matrix type may lie repacked."""

    def __init__(self, repacked=False):
        self.repacked, self.ctx, self.weights = repacked, gg.Context(), gg.Context()
        self.rng, self.values = np.random.default_rng(0), {}

    def new(self, type, *ne, values=None):
        t = self.ctx.new_tensor(type, ne)
        self.values[t] = self.rng.standard_normal(t.shape, np.float32) * 0.1 if values is None else np.asarray(values)
        return t

    def ints(self, type, values):
        values = np.asarray(values)
        return self.new(type, *reversed(values.shape), values=values)

    def weight(self, type, *ne):
        t = (self.weights if self.repacked else self.ctx).new_tensor(type, ne)
        self.values[t] = self.rng.standard_normal(t.shape, np.float32) * 0.1
        return t

    def filled(self, cpu):
        """Give all leaves memory and values."""
        gg.alloc_ctx_tensors(self.ctx, cpu)
        if self.repacked:
            gg.alloc_ctx_tensors(self.weights, next(
                b for b in cpu.device.extra_buffer_types() if b.name == "CPU_REPACK"))
        for t, values in self.values.items():
            t.set_bytes(gg.quantize(t.type, values) if t.type.quantized else values.astype(t.type.dtype))


def _layer(new, type, n_tokens):
    """A layer of a llama over a KV cache of CTX places, n_tokens at its end, and the logits."""
    x = new.new(gg.F32, WIDTH, n_tokens)
    pos = new.ints(gg.I32, np.arange(CTX - n_tokens, CTX))
    rows = new.ints(gg.I64, np.arange(CTX - n_tokens, CTX))
    mask = new.new(gg.F16, CTX, n_tokens, values=np.where(
        np.arange(CTX) <= np.arange(CTX - n_tokens, CTX)[:, None], 0, -np.inf)[None, None])
    caches = [new.new(gg.F16, HEAD * KV_HEADS, CTX) for _ in "kv"]

    def norm(x):
        return gg.mul(gg.rms_norm(x, EPS), new.new(gg.F32, WIDTH))

    def heads(x, n):
        return gg.rope_ext(gg.reshape_3d(x, HEAD, n, n_tokens), pos, None, HEAD, 0, 0, 1e4, 1.0, 0.0, 1.0, 0.0, 0.0)
    h = norm(x)
    q, k, v = (gg.mul_mat(new.weight(type, WIDTH, n * HEAD), h) for n in (HEADS, KV_HEADS, KV_HEADS))
    k, v = (gg.set_rows(cache, y, rows) for cache, y in
            zip(caches, (gg.reshape_2d(heads(k, KV_HEADS), HEAD * KV_HEADS, n_tokens), v), strict=True))
    k, v = (gg.permute(gg.reshape_3d(y, HEAD, KV_HEADS, CTX), 0, 2, 1, 3) for y in (k, v))
    y = gg.flash_attn_ext(gg.permute(heads(q, HEADS), 0, 2, 1, 3), k, v, mask, SCALE, 0.0, 0.0)
    x = gg.add(gg.mul_mat(new.weight(type, WIDTH, WIDTH), gg.reshape_2d(y, WIDTH, n_tokens)), x)
    h = norm(x)
    h = gg.swiglu_split(*(gg.mul_mat(new.weight(type, WIDTH, FF), h) for _ in range(2)))
    x = gg.add(gg.mul_mat(new.weight(type, FF, WIDTH), h), x)
    return gg.mul_mat(new.weight(type, WIDTH, 1024), norm(x)),


def _experts(new):
    """Sixteen experts, two of them for each of 24 tokens: gate and up, a gated unit, down, the weighted sum."""
    n, used = 24, 2
    x, ids = new.new(gg.F32, WIDTH, 1, n), new.ints(gg.I32, np.argsort(new.rng.random((n, 16)), -1)[:, :used])
    gate, up = (gg.mul_mat_id(new.weight(gg.Q4_0, WIDTH, 128, 16), x, ids) for _ in range(2))
    y = gg.mul_mat_id(new.weight(gg.Q4_0, 128, WIDTH, 16), gg.swiglu_split(gate, up), ids)
    return gg.mul(y, new.new(gg.F32, 1, used, n)),


def _attention(new):
    """Flash attention of prompts over F16 and Q8_0, and of one token."""
    out = []
    for type, n in ((gg.F16, 48), (gg.Q8_0, 48), (gg.F16, 1), (gg.Q8_0, 1)):
        k, v = (new.new(type, HEAD, CTX, KV_HEADS) for _ in range(2))
        out.append(gg.flash_attn_ext(new.new(gg.F32, HEAD, n, HEADS), k, v, None, SCALE, 0.0, 0.0))
    return out


def _reductions(new):
    """Ops over whole rows: short ones (12 bytes), and those of a network."""
    x, short = new.new(gg.F32, WIDTH, 33), new.new(gg.F32, 3, 333)
    return (gg.sum_rows(x), gg.mean(x), gg.argmax(x), gg.sum(x), gg.norm(x, EPS), gg.rms_norm(x, EPS),
            gg.l2_norm(x, EPS), gg.soft_max(x), gg.cumsum(x), gg.argsort(x, 0), gg.top_k(x, 4), gg.soft_max(short),
            gg.sum_rows(short), gg.rms_norm(short, EPS), gg.group_norm(new.new(gg.F32, 16, 16, 8), 4, EPS))


def _rows(new):
    """Rows by number: written (neighbours, and spread over the table), read, and rotated."""
    ids = new.ints(gg.I64, new.rng.permutation(64)[:33])
    dst = [new.new(t, n, 64) for t, n in ((gg.F16, HEAD), (gg.F32, WIDTH), (gg.Q8_0, HEAD), (gg.Q8_0, WIDTH))]
    along = new.ints(gg.I64, np.arange(33))
    table = new.new(gg.Q4_0, HEAD, 64)
    picked = gg.get_rows(table, new.ints(gg.I32, new.rng.permutation(64)[:33]))
    pos = new.ints(gg.I32, np.arange(33))
    return (*[gg.set_rows(d, new.new(gg.F32, d.ne[0], 33), i) for d, i in
              zip(dst, (along, along, along, ids), strict=True)], picked,
            gg.rope(new.new(gg.F32, 20, 3, 33), pos, 20, 0), gg.rope(new.new(gg.F16, 20, 1, 33), pos, 20, 2))


def _copies(new):
    """Copies that convert, quantise and transpose."""
    x, q = new.new(gg.F32, WIDTH, 33), new.new(gg.Q8_0, WIDTH, 33)
    return (*[gg.cast(x, t) for t in (gg.F16, gg.Q8_0, gg.Q4_0)], gg.cast(q, gg.F32), gg.cont(gg.transpose(x)),
            gg.cast(gg.view_2d(x, 96, 33, x.nb[1], 0), gg.Q8_0), gg.cont(gg.view_2d(x, 5, 33, x.nb[1], 0)),
            gg.concat(x, x, 0), gg.repeat_4d(gg.view_2d(x, 5, 33, x.nb[1], 0), 10, 66, 1, 1))


def _training(new):
    """A step of AdamW for a classifier of two layers, with an embedding, a norm and a softmax."""
    table, w, head = (gg.set_param(new.new(gg.F32, *ne)) for ne in ((96, 40), (96, 64), (64, 10)))
    ids, wanted = new.ints(gg.I32, np.arange(37) % 40), new.new(gg.F32, 10, 37, values=np.eye(10)[np.arange(37) % 10])
    h = gg.mul_mat(w, gg.rms_norm(gg.get_rows(table, ids), EPS))
    loss = gg.cross_entropy_loss(gg.mul_mat(head, gg.silu(h)), wanted)
    settings = new.new(gg.F32, 7, values=[1e-3, 0.9, 0.999, 1e-8, 0.0, 1.1, 1.1])
    params = table, w, head
    return (loss, *[gg.opt_step_adamw(p, g, *(new.new(gg.F32, *p.ne, values=np.zeros(p.shape)) for _ in "mv"), settings)
                    for p, g in zip(params, gg.grad(loss, list(params)), strict=True)])


def _conv(new):
    """Convolutions of pictures, depthwise and transposed, with pooling and upscaling."""
    x = new.new(gg.F32, 20, 20, 8, 1)
    y = gg.conv_2d_direct(new.new(gg.F32, 3, 3, 8, 16), x, 1, 1, 1, 1, 1, 1)
    return (gg.pool_2d(y, 0, 2, 2, 2, 2, 0, 0), gg.conv_2d_dw(new.new(gg.F16, 3, 3, 1, 8), x, 1, 1, 1, 1, 1, 1),
            gg.conv_2d(new.new(gg.F16, 3, 3, 8, 16), x, 1, 1, 1, 1, 1, 1), gg.upscale(x, 2, 0),
            gg.conv_transpose_1d(new.new(gg.F32, 4, 8, 8), new.new(gg.F32, 20, 8), 2, 0, 1),
            gg.conv_2d_direct(new.new(gg.F32, 3, 3, 8, 3), x, 1, 1, 1, 1, 1, 1))


# {name: (are weights repacked, leaves -> the graph's results)}
GRAPHS = {"prompt, Q4_0": (True, lambda new: _layer(new, gg.Q4_0, 24)),
          "long prompt, Q4_0": (True, lambda new: _layer(new, gg.Q4_0, 96)),
          "token, Q4_0": (True, lambda new: _layer(new, gg.Q4_0, 1)),
          "prompt, F16": (False, lambda new: _layer(new, gg.F16, 24)),
          "token, F16": (False, lambda new: _layer(new, gg.F16, 1)),
          "experts": (True, _experts), "flash attention": (False, _attention), "reductions": (False, _reductions),
          "rows by number": (False, _rows), "copies": (False, _copies), "training step": (False, _training),
          "convolutions": (False, _conv)}


@contextlib.contextmanager
def _rule():
    """Products by one rule, whatever this processor's is and was measured."""
    was = choices.RULE, choices.SETTING
    choices.RULE, choices.SETTING = choices.ZEN5, "off"
    try:
        yield
    finally:
        choices.RULE, choices.SETTING = was


def count(name, n_threads):
    """The Traffic of a graph's plan."""
    repacked, build = GRAPHS[name]
    with _rule(), sharing.forced(1.0):
        cpu, new = gg.init_backend("CPU", n_threads=n_threads), Leaves(repacked)
        with new.ctx:
            graph = gg.Graph(*build(new), order="together")
        new.filled(cpu)
        gg.GraphAllocator(cpu).alloc_graph(graph)
        return record(cpu.graph_plan_create(graph))


FIGURES = "lines", "nbytes", "atomics", "barriers"


def table(counted):
    """The text of the results' file; counted: {(graph, threads): Traffic}"""
    lines = [f"# What threads cost each other: {isa.ISA}", "",
             "The table counts what the threads of a plan exchange in one run of a graph "
             "(`python -m benchmarks.core_traffic`). A test checks that no figure rises "
             "(tests/engine/cpu/test_core_traffic.py).", "",
             "- **lines**: cache lines that two threads write between two barriers.",
             "- **bytes**: bytes that one thread writes and another reads.",
             "- **atomics**, **barriers**: atomic operations, and barriers at which all threads wait.", "",
             "| graph | threads | lines | bytes | atomics | barriers |", "| --- | --- | --- | --- | --- | --- |"]
    lines += [f"| {name} | {n} | {' | '.join(f'{getattr(t, x):,}' for x in FIGURES)} |"
              for (name, n), t in counted.items()]
    return "\n".join(lines) + "\n"


def published():
    """(instruction set, {(graph, threads): {figure: value}}) of the file."""
    first, *rest = RESULTS.read_text("utf-8").splitlines()
    rows = [[x.strip() for x in line.strip("|").split("|")] for line in rest if line.startswith("|")][2:]
    return first.rpartition(" ")[2], {
        (r[0], int(r[1])): dict(zip(FIGURES, (int(x.replace(",", "")) for x in r[2:]), strict=True)) for r in rows}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="graphs, separated by ';'")
    parser.add_argument("--threads", default=",".join(map(str, THREADS)))
    parser.add_argument("--kernels", action="store_true", help="lines and bytes of each kernel, instead of the table")
    args = parser.parse_args(argv)
    names = args.only.split(";") if args.only else GRAPHS
    counted = {(name, n): count(name, n) for name in names for n in map(int, args.threads.split(","))}
    if not args.kernels:
        print(table(counted), end="")
        return
    for (name, n), traffic in counted.items():
        print(f"{name}, {n} threads: {', '.join(f'{x} {getattr(traffic, x):,}' for x in FIGURES)}")
        for kernel, (lines, nbytes) in traffic.by_kernel.items():
            print(f"    {lines:6} {nbytes:9,}  {kernel}")


if __name__ == "__main__":
    main()
