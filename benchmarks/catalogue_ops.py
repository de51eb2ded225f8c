"""Single ops at the sizes that decoding (one row), encoders and prompts have; and ten thousand tiny nodes."""
import numpy as np

import ggjit as gg
from benchmarks.work import Graph

PLAIN = {"wheel": 1.0, "native": 1.0, "llamafile": None}
REDUCTION = {"wheel": 1.0, "native": 1.2, "llamafile": None}
ACTIVATION = {"wheel": 1.0, "native": 1.0, "llamafile": None}
N_NODES = 10_000


def op(key, text, build, targets=PLAIN, **more):
    return Graph(key=f"op-{key}", text=text, build=build, targets=targets, **more)


def size(ne):
    return "x".join(map(str, ne))


# ---------------------------------------------------------------- rows: reductions, activations
def _reductions():
    for ne in ((64, 4), (2048, 1), (384, 64), (4096, 512)):
        for name in ("rms_norm", "norm"):
            yield op(f"{name}-{size(ne)}", f"{name} {list(ne)}",
                     lambda new, name=name, ne=ne: getattr(gg, name)(new(gg.F32, ne), 1e-5), REDUCTION)
    for ne in ((16, 8), (64, 64), (64, 64, 12), (32000, 1), (4096, 512)):
        yield op(f"soft_max-{size(ne)}", f"soft_max {list(ne)}", lambda new, ne=ne: gg.soft_max(new(gg.F32, ne)),
                 REDUCTION)
    for n_kv, n, heads in ((256, 1, 32), (512, 128, 8)):
        yield op(f"soft_max-masked-{n_kv}x{n}x{heads}", f"soft_max with mask [{n_kv}, {n}, {heads}]",
                 lambda new, s=(n_kv, n, heads): _masked(new, *s), REDUCTION)


def _masked(new, n_kv, n, heads):
    hidden = np.arange(n_kv)[None, :] > np.arange(n)[:, None] + n_kv - n
    mask = new(gg.F16, (n_kv, n), np.where(hidden, -np.inf, 0.0))
    return gg.soft_max_ext(new(gg.F32, (n_kv, n, heads)), mask, 0.125, 0.0)


def _activations():
    for name, targets in (("gelu", REDUCTION), ("gelu_quick", REDUCTION), ("gelu_erf", REDUCTION),
                          ("silu", ACTIVATION)):
        for ne in ((256, 1), (1536, 64), (4096, 512)):
            yield op(f"{name}-{size(ne)}", f"{name} {list(ne)}",
                     lambda new, name=name, ne=ne: getattr(gg, name)(new(gg.F32, ne)), targets)
    for name, targets in (("swiglu_split", ACTIVATION), ("geglu_split", REDUCTION), ("reglu_split", ACTIVATION)):
        for ne in ((5632, 1), (5632, 128)):
            yield op(f"{name}-{size(ne)}", f"{name} {list(ne)}",
                     lambda new, name=name, ne=ne: getattr(gg, name)(new(gg.F32, ne), new(gg.F32, ne)),
                     targets)


# ---------------------------------------------------------------- positions, copies
def _rope():
    for mode, name in ((0, "normal"), (2, "neox")):
        for d, heads, n in ((64, 32, 1), (128, 32, 1), (128, 32, 128)):
            def build(new, mode=mode, d=d, heads=heads, n=n):
                return gg.rope(new(gg.F32, (d, heads, n)), new(gg.I32, (n,), np.arange(n) + 100), d, mode)
            yield op(f"rope-{name}-{d}x{heads}x{n}", f"rope {name} [{d}, {heads}, {n}]", build)


def _copies():
    ne = (2048, 512)
    for a, b in (("F32", "F16"), ("F16", "F32"), ("F32", "F32"), ("F32", "Q8_0"), ("Q8_0", "F32"), ("F32", "Q4_0")):
        yield op(f"cpy-{a.lower()}-{b.lower()}", f"cpy {a} to {b} {list(ne)}",
                 lambda new, a=a, b=b: gg.cpy(new(getattr(gg, a), ne), new(getattr(gg, b), ne)))
    for type in ("F32", "F16"):
        for axes in ((1, 0, 2, 3), (0, 2, 1, 3), (1, 2, 0, 3), (2, 1, 0, 3)):
            name = "".join(map(str, axes))
            def build(new, type=type, axes=axes):
                return gg.cont(gg.permute(new(getattr(gg, type), (64, 32, 256)), *axes))
            yield op(f"cont-{type.lower()}-{name}", f"cont of permute {axes} {type} [64, 32, 256]", build)
    yield op("cont-small", "cont of permute (0, 2, 1, 3) F32 [64, 4, 8]",
             lambda new: gg.cont(gg.permute(new(gg.F32, (64, 4, 8)), 0, 2, 1, 3)))


def _rows():
    for type in ("F32", "F16", "Q8_0", "Q4_0", "Q6_K"):
        for n in (1, 128):
            def build(new, type=type, n=n):
                return gg.get_rows(new(getattr(gg, type), (2048, 4096)), new(gg.I32, (n,), ids(4096, n)))
            yield op(f"get_rows-{type.lower()}-{n}", f"get_rows {type} [2048, 4096], {n} rows", build)
    for type in ("F32", "F16", "Q8_0"):
        for n in (1, 128):
            def build(new, type=type, n=n):
                return gg.set_rows(new(getattr(gg, type), (1024, 2048)), new(gg.F32, (1024, n)),
                                   new(gg.I64, (n,), ids(2048, n)))
            yield op(f"set_rows-{type.lower()}-{n}", f"set_rows {type} [1024, 2048], {n} rows", build)
    # few rows: branch predictors learn them from run to run; [64, 1024] is what sorting costs
    for ne in ((64, 64), (64, 1024), (512, 64), (32000, 1)):
        def build(new, ne=ne):                      # no two equal: one right answer
            return gg.argsort(new(gg.F32, ne, [ids(ne[0], ne[0], seed) for seed in range(ne[1])]), 1)
        yield op(f"argsort-{size(ne)}", f"argsort {list(ne)}", build)


def ids(n, k, seed=1):
    return np.random.default_rng(seed).permutation(n)[:k]


# ---------------------------------------------------------------- images
def _images():
    shapes = ((3, 32, 112), (64, 64, 28), (256, 256, 14))           # channels in, out, side
    for ic, oc, side in shapes:
        def patches(new, ic=ic, oc=oc, side=side):
            return gg.im2col(new(gg.F16, (3, 3, ic, oc)), new(gg.F32, (side, side, ic)), 1, 1, 1, 1, 1, 1, True, gg.F16)

        def conv(new, ic=ic, oc=oc, side=side):
            return gg.conv_2d(new(gg.F16, (3, 3, ic, oc)), new(gg.F32, (side, side, ic)), 1, 1, 1, 1, 1, 1)

        def direct(new, ic=ic, oc=oc, side=side):
            return gg.conv_2d_direct(new(gg.F16, (3, 3, ic, oc)), new(gg.F32, (side, side, ic)), 1, 1, 1, 1, 1, 1)
        for name, build in (("im2col", patches), ("conv_2d", conv), ("conv_2d_direct", direct)):
            yield op(f"{name}-{ic}-{oc}-{side}", f"{name} 3x3, {ic} to {oc} channels, {side}x{side}", build,
                     max_nmse=1e-5)
    for kind, name in ((0, "max"), (1, "average")):
        for k, s, side in ((2, 2, 56), (3, 1, 28)):
            yield op(f"pool-{name}-{k}-{side}", f"pool_2d {name} {k}x{k}, {side}x{side}, 64 channels",
                     lambda new, kind=kind, k=k, s=s, side=side: gg.pool_2d(
                         new(gg.F32, (side, side, 64)), kind, k, k, s, s, 0, 0))


def tiny_nodes(new):
    """A chain: x <- x + b, so that no node can start before the one ahead of it."""
    x, b = new(gg.F32, (64,)), new(gg.F32, (64,))
    for _ in range(N_NODES):
        x = gg.add(x, b)
    return x


WORKS = (*_reductions(), *_activations(), *_rope(), *_copies(), *_rows(), *_images(),
         Graph(key="nodes-10000", text=f"{N_NODES:,} adds of 64 floats, each", build=tiny_nodes, n_nodes=N_NODES,
               targets={"wheel": 3.0, "native": 2.0, "llamafile": None}))
