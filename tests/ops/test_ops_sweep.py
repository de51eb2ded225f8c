"""Attention, recurrences and matrix products of random shapes, away from the suite's grids: float64 and the real ggml.

The suite's runner does the work: sentinels around every tensor, poisoned results, the thresholds of ggml's own tests.
A few shapes drawn by the seed of the run always run; `-m slow` draws new ones each time and names the seed.
"""
import os

import numpy as np
import pytest
from helpers import sample

import ggjit as gg
from ggjit.tools.suite import oracle
from ggjit.tools.suite.cases.case import ALL_TYPES, F16, F32, I32, SuiteCase, padded, types
from ggjit.tools.suite.cases.inputs import uniform
from ggjit.tools.suite.cases.recurrent import DECAY
from ggjit.tools.suite.runner import OK, Runner

COMMON = types("f32 f16 q8_0")
CACHES = types("f32 f16 bf16 q8_0 q5_1 q5_0 q4_1 q4_0 iq4_nl")
GGML_WINDOW = 32                                # floats ggml's wkv7 takes at a time, without a tail
IN_CI, SLOW = 6, 250                            # shapes of each op
VARIANTS = 8                                    # head sizes and types of attention in one run
FLASH, EXACT = 5e-4, 1e-7                       # NMSE limits of ggml's suite


class Draw:
    """Random choices, and a note of each for the case's name.  rare: also what no other test compiles kernels for."""

    def __init__(self, seed, i, rare, said=None):
        self.seed, self.rng, self.rare = seed, np.random.default_rng([seed, *i]), rare
        self.said = [] if said is None else said

    def number(self, name, lo, hi):
        """lo to hi, small ones more often."""
        return self._say(name, int(min(hi, lo + (hi - lo + 1) * self.rng.random() ** 2)))

    def numbers(self, **highest):
        """One number from 1 on for each name."""
        return [self.number(name, 1, hi) for name, hi in highest.items()]

    def of(self, name, values):
        return self._say(name, values[int(self.rng.integers(len(values)))])

    def variant(self, n):
        """Another Draw, one of n that the seed allows: for what a kernel is compiled for."""
        return Draw(self.seed, (0, self.number("variant", 1, n)), self.rare, self.said)

    def type(self, name, all):
        return self.of(name, all if self.rare else COMMON)

    def _say(self, name, value):
        self.said.append(f"{name}={value!r}")
        return value


def kq_mask(blind):
    """Uniform with a third at -inf; whole rows of it if `blind`."""
    def init(rng, ne):
        a = uniform()(rng, ne)
        a[rng.random(a.shape) < 0.3] = -np.inf
        if blind:
            a[rng.random(a.shape[:-1]) < 0.3] = -np.inf
        return a
    return init


def flash_attn_ext(d):
    nb, kv, heads, rep, ne3 = d.numbers(nb=40, kv=400, heads=4, rep=6, ne3=3)
    ty_k = ty_v = F16
    hsk = hsv = 64
    if d.rare:
        kernel = d.variant(VARIANTS)
        ty_k, ty_v = kernel.of("k", CACHES), kernel.of("v", CACHES)
        hsk, hsv = padded(kernel.number("hsk", 1, 260), ty_k.block), padded(kernel.number("hsv", 1, 260), ty_v.block)
    masked, sinks, softcap = d.of("mask", (True, False)), d.of("sinks", (True, False)), d.of("softcap", (0.0, 0.0, 7.5))
    bias, blind, extra = d.of("bias", (0.0, 8.0)) * masked, d.of("blind", (True, False)), d.number("extra", 0, 3)
    mask_heads, swapped = d.of("mask_heads", (1, heads * rep)), d.of("swapped", (True, False))

    def rows(m, ty, ne):
        if not swapped:
            return m.new(ty, ne)
        return m.permute(m.new(ty, (ne[0], ne[2], ne[1], ne[3])), 0, 2, 1, 3)

    def build(m):
        q = rows(m, F32, (hsk, nb, heads * rep, ne3))
        k, v = rows(m, ty_k, (hsk, kv, heads, ne3)), rows(m, ty_v, (hsv, kv, heads, ne3))
        mask = m.new(F16, (kv, nb + extra, mask_heads, ne3), kq_mask(blind)) if masked else None
        out = m.flash_attn_ext(q, k, v, mask, hsk ** -0.5, bias, softcap)
        return m.flash_attn_ext_add_sinks(out, m.new(F32, (heads * rep,), uniform(-4, 4))) if sinks else out
    return build, FLASH, ""


def ssm_conv(d):
    taps, n, inner, seqs = d.numbers(taps=12, n=70, inner=200, seqs=4)
    return lambda m: m.ssm_conv(m.new(F32, (taps - 1 + n, inner, seqs)), m.new(F32, (taps, inner))), EXACT, ""


def ssm_scan(d):
    mamba1 = d.of("mamba1", (True, False))
    d_state, dim, groups, rep, n, seqs = d.numbers(d_state=140, dim=40, groups=3, rep=5, n=20, seqs=3)
    heads, dim = groups * rep, 1 if mamba1 else dim + 1
    keep, spare = (1 if mamba1 else d.number("keep", 1, n)), d.number("spare", 0, 2)

    def build(m):
        x, dt = m.new(F32, (dim, heads, n, seqs)), m.new(F32, (heads, n, seqs), uniform(-3, 25))
        ids = m.new(I32, (seqs,), lambda rng, ne: rng.permutation(seqs + spare)[:seqs].reshape(1, 1, 1, seqs))
        return m.ssm_scan(m.new(F32, (d_state, dim, heads, seqs + spare)), x, dt,
                          m.new(F32, (d_state if mamba1 else 1, heads), DECAY),
                          *(m.new(F32, (d_state, groups, n, seqs)) for _ in "BC"), ids, keep)
    return build, 2e-7, ""


def rwkv_wkv6(d):
    size, heads, n, seqs = d.numbers(size=80, heads=4, n=20, seqs=3)
    return lambda m: m.rwkv_wkv6(
        *(m.new(F32, (size, heads, n * seqs)) for _ in "kvr"), m.new(F32, (size, heads)),
        m.new(F32, (size, heads, n * seqs)), m.new(F32, (size * size * heads, seqs))), EXACT, ""


def rwkv_wkv7(d):
    size, heads, n, seqs = d.numbers(size=100, heads=4, n=20, seqs=3)
    size = d.of("whole", (size, padded(size, GGML_WINDOW)))

    def build(m):
        r, w, k, v, a, b = (m.new(F32, (size, heads, n * seqs)) for _ in "rwkvab")
        return m.rwkv_wkv7(r, w, k, v, m.l2_norm(a, 1e-7), m.l2_norm(b, 1e-7),
                           m.new(F32, (size * size * heads, seqs)))
    return build, EXACT, "windows without a tail" if size % GGML_WINDOW else ""


def gated_linear_attn(d):
    size, heads, n, seqs = d.numbers(size=80, heads=4, n=20, seqs=3)
    return lambda m: m.gated_linear_attn(*(m.new(F32, (size, heads, n * seqs)) for _ in "kvqg"),
                                         m.new(F32, (size * size * heads, seqs)), 0.3), EXACT, ""


def gated_delta_net(d):
    size, heads, rep, n, seqs = d.numbers(size=80, heads=3, rep=3, n=20, seqs=3)
    kda, keep = d.of("kda", (True, False)), d.number("keep", 1, n)

    def build(m):
        q, k = (m.l2_norm(m.new(F32, (size, heads, n, seqs)), 1e-6) for _ in "qk")
        per_head = (heads * rep, n, seqs)
        return m.gated_delta_net(q, k, m.new(F32, (size, *per_head), uniform(-0.3, 5.0)),
                                 m.new(F32, (size if kda else 1, *per_head), uniform(-20.0, -1e-4)),
                                 m.new(F32, (1, *per_head), uniform(0.0, 1.0)),
                                 m.new(F32, (size, size, heads * rep, seqs)), keep)
    return build, EXACT, ""


def mul_mat(d):
    ty = d.type("type", ALL_TYPES)
    rows, columns, blocks, *bs = d.numbers(m=90, n=90, blocks=700 // ty.block + 1, bs2=3, bs3=3)
    k, nr = ty.block * blocks, d.numbers(nr2=3, nr3=3)
    other = d.of("b", (F32, F16)) if ty in (F32, F16) else F32

    def build(m):
        return m.mul_mat(m.new(ty, (k, rows, *bs)), m.new(other, (k, columns, bs[0] * nr[0], bs[1] * nr[1])))
    return build, FLASH, ""


def mul_mat_id(d):
    ty = d.type("type", ALL_TYPES)
    rows, n, blocks, experts = d.numbers(m=90, n=60, blocks=500 // ty.block + 1, experts=9)
    k, used = ty.block * blocks, d.number("used", 1, experts)
    wide = d.of("b", (1, used))

    def ids(rng, ne):
        return np.stack([rng.permutation(experts)[:used] for _ in range(n)]).reshape(1, 1, n, used)
    return lambda m: m.mul_mat_id(m.new(ty, (k, rows, experts)), m.new(F32, (k, wide, n)),
                                  m.new(I32, (used, n), ids)), FLASH, ""


OPS = (flash_attn_ext, ssm_conv, ssm_scan, rwkv_wkv6, rwkv_wkv7, gated_linear_attn, gated_delta_net, mul_mat,
       mul_mat_id)


def sweep(op, seed, n, rare):
    """(cases that failed, how many the real ggml computed, too)"""
    try:
        peer = oracle.connect()
    except gg.MissingExtra:
        peer = None
    runner, failed, by_ggml = Runner(gg.init_backend("CPU:n_threads=1"), seed, peer), [], 0
    for i in range(n):
        d = Draw(seed, (i,), rare)
        build, limit, wrong = op(d)
        name = op.__name__
        o = runner.run(SuiteCase(name, name.upper(), ",".join(d.said), build, limit, wrong=wrong, index=i))
        by_ggml += "ggml" in o.checked
        if o.status != OK:
            failed.append(f"seed {seed}: {o.case}: {o.status} {o.error}")
    return failed, by_ggml


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_random_shapes(op):
    failed, _ = sweep(op, sample.SEED, IN_CI, rare=False)
    assert not failed, "\n".join(failed)


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_new_random_shapes_and_all_types(op):
    failed, by_ggml = sweep(op, int.from_bytes(os.urandom(4), "little"), SLOW, rare=True)
    print(f"{op.__name__}: {SLOW} cases, {by_ggml} by the real ggml, too")
    assert not failed, "\n".join(failed)
