"""A token of a llama in each way: as a captured graph, with runs of nodes as one kernel (ops/cuda/fused), and as one
persistent kernel of these (engine/cuda/walk.py), by the first and by the second set of kernels.  By events: the same
bits, and what the grid's waits cost against the ends of kernels.

    n_layer x (norm, q k v, rope, cache, attention, o, add, norm, gate up, swiglu, down, add), norm, output
"""
import dataclasses
import functools

import numpy as np

import ggjit as gg
from benchmarks.gpu_piped import piping
from benchmarks.gpu_report import each
from benchmarks.gpu_suite import nmse
from benchmarks.report import Row, Spread
from ggjit.cuda import libraries
from ggjit.cuda.walk import PlanWalk


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of a llama: sizes as in its GGUF; n_kv: tokens in the cache."""
    name: str
    n_layer: int
    dim: int
    n_head: int
    n_head_kv: int
    n_ff: int
    n_vocab: int
    n_kv: int = 512

    @property
    def head(self):
        return self.dim // self.n_head


SHAPES = (Shape("TinyLlama-1.1B", 22, 2048, 32, 4, 5632, 32000), Shape("SmolLM2-135M", 30, 576, 9, 3, 1536, 49152))
TYPES = ("F16", "Q8_0", "Q4_0", "Q4_K")
WAYS = ("captured", ""), ("fused", "fuse=1"), ("fused, one kernel", "fuse=1,persistent=1")
DRY_SHAPES, DRY_TYPES = (Shape("tiny", 1, 64, 2, 1, 96, 40, 16),), ("Q8_0",)


def shapes(scale):
    return DRY_SHAPES if scale.dry else SHAPES


def types(scale):
    return DRY_TYPES if scale.dry else TYPES


def new_leaves(ctx, shape, type):
    """{name: leaf}: weights, a cache, the token's inputs."""
    s, kv = shape, shape.head * shape.n_head_kv
    type = type if s.dim % type.block == 0 and s.n_ff % type.block == 0 else gg.Q8_0
    made = {"x": ctx.new_tensor(gg.F32, (s.dim, 1)), "at": ctx.new_tensor(gg.I32, (1,)),
            "row": ctx.new_tensor(gg.I64, (1,)), "mask": ctx.new_tensor(gg.F16, (s.n_kv, 1)),
            "out": ctx.new_tensor(type, (s.dim, s.n_vocab)), "norm": ctx.new_tensor(gg.F32, (s.dim,))}
    for i in range(s.n_layer):
        made |= {f"{n}{i}": ctx.new_tensor(type, (k, m)) for n, k, m in (
            ("q", s.dim, s.dim), ("k", s.dim, kv), ("v", s.dim, kv), ("o", s.dim, s.dim), ("gate", s.dim, s.n_ff),
            ("up", s.dim, s.n_ff), ("down", s.n_ff, s.dim))}
        made |= {f"{n}{i}": ctx.new_tensor(gg.F32, (s.dim,)) for n in ("norm_a", "norm_f")}
        made |= {f"{n}{i}": ctx.new_tensor(gg.F16, (kv, s.n_kv)) for n in ("cache_k", "cache_v")}
    return made


def leaves(backend, shape, type):
    """The same in GPU memory: seeded weights, a cache of zeros."""
    ctx, rng = gg.Context(), np.random.default_rng(0)
    made = new_leaves(ctx, shape, type)
    gg.alloc_ctx_tensors(ctx, backend)
    for name, t in made.items():
        if name in ("at", "row"):
            t.set(np.array([shape.n_kv - 1]))
        elif name == "mask" or name.startswith("cache"):
            t.set(np.zeros(t.shape))
        else:
            row = rng.uniform(-1, 1, (min(8, t.ne[1]), t.ne[0])) / t.ne[0] ** 0.5
            raw = row.astype(np.float32).tobytes() if t.type is gg.F32 else bytes(gg.quantize(t.type, row))
            t.set_bytes(np.resize(np.frombuffer(raw, np.uint8), t.nbytes))
    return made


def token(w, s):
    """The logits of one token."""
    def norm(x, weights):
        return gg.mul(gg.rms_norm(x, 1e-5), weights)

    def rope(x, n_head):
        return gg.rope(gg.reshape_3d(x, s.head, n_head, 1), w["at"], s.head, 0)

    def heads(cache):
        return gg.permute(gg.reshape_3d(cache, s.head, s.n_head_kv, s.n_kv), 0, 2, 1, 3)
    x = w["x"]
    for i in range(s.n_layer):
        h = norm(x, w[f"norm_a{i}"])
        q, k, v = (gg.mul_mat(w[f"{n}{i}"], h) for n in "qkv")
        q, k = rope(q, s.n_head), gg.reshape_2d(rope(k, s.n_head_kv), s.head * s.n_head_kv, 1)
        k, v = (gg.set_rows(w[f"cache_{n}{i}"], y, w["row"]) for n, y in (("k", k), ("v", v)))
        o = gg.flash_attn_ext(gg.permute(q, 0, 2, 1, 3), heads(k), heads(v), w["mask"], s.head ** -0.5, 0.0, 0.0)
        x = gg.add(x, gg.mul_mat(w[f"o{i}"], gg.reshape_2d(o, s.dim, 1)))
        h = norm(x, w[f"norm_f{i}"])
        h = gg.swiglu_split(gg.mul_mat(w[f"gate{i}"], h), gg.mul_mat(w[f"up{i}"], h))
        x = gg.add(x, gg.mul_mat(w[f"down{i}"], h))
    return gg.mul_mat(w["out"], norm(x, w["norm"]))


def walk_rows(make_timer, device, scale):
    """A row for each way, shape and type.  make_timer(backend) -> the benchmark's Timer."""
    yield from each([(f"token of {shape.name} {name}", functools.partial(
        ways_rows, make_timer, device, shape, getattr(gg, name))) for shape in shapes(scale) for name in types(scale)],
        scale.dry)


def ways_rows(make_timer, device, shape, type):
    """The captured graph, that of runs of nodes as one kernel, and the persistent kernel of these, of the first and of
    the second set of kernels.  Errors: AssertionError if a persistent kernel leaves other bits than the captured graph
    of the same kernels, or a result is not near the first one."""
    backends = [(how, device.init_backend(params)) for how, params in WAYS]
    w, first, logits = leaves(backends[0][1], shape, type), None, None
    nbytes = sum(t.nbytes for t in w.values())
    for said, kernels in ((libraries.NO, "own kernels"), (libraries.YES, "piped kernels")):
        bits = {}
        for how, backend in backends:
            with piping(said):
                rate, plan, y = timed(make_timer(backend), token(w, shape))
            got, label = plan.numpy(y), f"token of {shape.name} {type!r}, {kernels}, {how}"
            first, logits = first or rate, got if logits is None else logits
            if bits.setdefault(backend.fuse, got.tobytes()) != got.tobytes():
                raise AssertionError(f"{label}: other bits than the captured graph's")
            if not nmse(got, logits) <= libraries.MAX_NMSE:
                raise AssertionError(f"{label}: NMSE {nmse(got, logits):.1e} to the first set of kernels")
            yield Row(label, "-" if rate is first else "1 of captured", rate, "-" if rate is first else first,
                      None if rate is first else rate.median / first.median,
                      None if rate is first else rate.median >= first.median, note_of(plan, rate, nbytes),
                      against="-" if rate is first else "own kernels, captured")


def graph_of(y):
    """The graph of a token, in the order in which models plan theirs."""
    return gg.Graph(y, order="together")


def timed(timer, y):
    """(Spread of tokens a second, the plan, y)"""
    plan = timer.planned(graph_of(y))
    return Spread([1 / s for s in timer.seconds(plan.compute)], "tok/s"), plan, y


def note_of(plan, rate, nbytes):
    said = f"{sum(len(k.launches) for k in plan.kernels)} launches"
    if isinstance(plan._walk, PlanWalk):
        said = f"{plan._walk.n_waits} waits, {plan._walk.n_blocks} blocks"
    elif plan.backend.persistent:
        said = f"captured: {plan.not_walked_because}"
    return f"{said}, {rate.median * nbytes / 1e9:,.0f} GB/s"
