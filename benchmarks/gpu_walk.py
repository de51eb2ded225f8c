"""A token of a llama as one persistent kernel (engine/cuda/walk.py) beside the captured graph of the same launches, by
events: the same bits, and what the grid's waits cost against the ends of kernels.

    n_layer x (norm, q k v, rope, cache, attention, o, add, norm, gate up, swiglu, down, add), norm, output
"""
import dataclasses

import numpy as np

import ggjit as gg
from benchmarks.report import Row, Spread
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
DRY_SHAPES, DRY_TYPES = (Shape("tiny", 1, 64, 2, 1, 96, 40, 16),), ("Q8_0",)


def leaves(backend, shape, type):
    """{name: leaf} in GPU memory: weights with seeded values, a cache of zeros, the token's inputs."""
    s, kv, ctx = shape, shape.head * shape.n_head_kv, gg.Context()
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
    gg.alloc_ctx_tensors(ctx, backend)
    rng = np.random.default_rng(0)
    for name, t in made.items():
        if name in ("at", "row"):
            t.set(np.array([s.n_kv - 1]))
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
    """One row a shape and type.  make_timer(backend) -> the benchmark's Timer."""
    for shape in DRY_SHAPES if scale.dry else SHAPES:
        for name in DRY_TYPES if scale.dry else TYPES:
            yield walk_row(make_timer, device, shape, getattr(gg, name))


def walk_row(make_timer, device, shape, type):
    captured, persistent = device.init_backend(), device.init_backend("persistent=1")
    w = leaves(captured, shape, type)
    nbytes = sum(t.nbytes for t in w.values())
    rates, bits, plan = [], [], None
    for backend in (captured, persistent):
        timer, y = make_timer(backend), token(w, shape)
        plan = timer.plan(y)
        rates.append(Spread([1 / s for s in timer.seconds(plan.compute)], "tok/s"))
        bits.append(plan.numpy(y).tobytes())
    if bits[0] != bits[1]:
        raise AssertionError(f"{shape.name} {type!r}: the persistent kernel leaves other bits than the captured graph")
    theirs, ours = rates
    ratio = ours.median / theirs.median
    note = f"{plan._walk.n_waits} waits, {plan._walk.n_blocks} blocks, {ours.median * nbytes / 1e9:,.0f} GB/s" \
        if isinstance(plan._walk, PlanWalk) else f"captured: {plan.not_walked_because}"
    return Row(f"token of {shape.name} {type!r}, one kernel", "1 of captured", ours, theirs, ratio, ratio >= 1,
               against="captured", note=note)
