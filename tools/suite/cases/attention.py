"""Attention: flash attention over every head size, cache type and layout, and the lightning indexer."""
import itertools
import math

from ggjit.tools.suite.cases.case import F16, F32, SuiteCase, grid, padded, types, vars_of
from ggjit.tools.suite.cases.inputs import kq_mask, uniform

DEFAULT, PREC_F32 = 0, 10                               # GGML_PREC_*
PLAIN, SWAPPED = (0, 1, 2, 3), (0, 2, 1, 3)
CACHE_TYPES = types("f32 f16 bf16 q8_0 q5_1 q5_0 q4_1 q4_0 iq4_nl")
Q8_0, Q4_0, Q1_0, Q2_0 = types("q8_0 q4_0 q1_0 q2_0")


def permuted(m, type, ne, permute, is_view):
    """A tensor that has `ne` after ggml_permute; is_view: the first half of a cache twice as long."""
    stored = tuple(ne[permute.index(i)] for i in range(4))
    t = m.new(type, (stored[0], 2 * stored[1], *stored[2:])) if is_view else m.new(type, stored)
    t = m.window(t, stored) if is_view else t
    return m.permute(t, *permute) if permute != PLAIN else t


def flash_attn_ext(hsk, hsv, nh, nr23, kv, nb, mask, sinks, max_bias, logit_softcap, prec, type_K, type_V,
                   permute=PLAIN, kv_view=True, v_is_view_of_k=False):
    def build(m):
        k0, v0, n3 = padded(hsk, type_K.block), padded(hsv, type_V.block), nr23[1]
        q = permuted(m, F32, (k0, nb, nh * nr23[0], n3), permute, False)
        k = permuted(m, type_K, (k0, kv, nh, n3), permute, kv_view)
        if v_is_view_of_k:
            v = m.window(k, (v0, kv, nh, n3))
        else:
            v = permuted(m, type_V, (v0, kv, nh, n3), permute, kv_view)
        added = m.new(F16, (kv, nb, 1, n3), kq_mask) if mask else None
        out = m.flash_attn_ext(q, k, v, added, 1.0 / math.sqrt(hsk), max_bias, logit_softcap)
        if sinks:
            out = m.flash_attn_ext_add_sinks(out, m.new(F32, (q.ne[2],), uniform(-10.0, 10.0)))
        return m.flash_attn_ext_set_prec(out, prec)
    params = vars_of(hsk=hsk, hsv=hsv, nh=nh, nr23=nr23, kv=kv, nb=nb, mask=mask, sinks=sinks, max_bias=max_bias,
                     logit_softcap=logit_softcap, prec="f32" if prec else "def", type_K=type_K, type_V=type_V,
                     permute=permute, kv_view=kv_view, v_is_view_of_k=v_is_view_of_k)
    return SuiteCase("flash_attn_ext", "FLASH_ATTN_EXT", params, build, 5e-4)


def cached(hsk, hsv, nh, nr23, kv, nb, type_K, type_V=None, mask=True, sinks=False, max_bias=0.0, logit_softcap=0.0,
           **rest):
    return flash_attn_ext(hsk, hsv, nh, nr23, kv, nb, mask, sinks, max_bias, logit_softcap, PREC_F32, type_K,
                          type_V or type_K, **rest)


SIZES = ((40, 40), (64, 64), (72, 72), (80, 80), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (320, 256),
         (512, 512), (576, 512))


def _repeats(hsk, nh):
    """nr2 of a head size."""
    only = {8: hsk == 192, 12: hsk == 128, 16: hsk == 192, 20: nh == 1 and hsk == 576, 32: nh == 1 and hsk == 320}
    return [n for n in (1, 4, 8, 12, 16, 20, 32) if only.get(n, True)]


def grid_cases():
    for (hsk, hsv), mask, sinks, max_bias, softcap in itertools.product(SIZES, (True, False), (True, False),
                                                                        (0.0, 8.0), (0.0, 10.0)):
        if (not mask and max_bias > 0) or (hsk != 128 and softcap):
            continue
        for nh, nr3 in itertools.product((1, 4) if hsk in (320, 576) else (4,), (1, 3) if hsk <= 64 else (1,)):
            for nr2, kv in itertools.product(_repeats(hsk, nh), (113, 512, 1024)):
                if nr2 != 1 and kv != 512:
                    continue
                for nb, prec, type in itertools.product((1, 3, 32, 75), (PREC_F32, DEFAULT) if hsk == 128 else
                                                        (PREC_F32,), CACHE_TYPES if hsk in (64, 72) else (F16,)):
                    rest = (hsk, hsv, nh, (nr2, nr3), kv, nb, mask, sinks, max_bias, softcap, prec, type, type)
                    yield flash_attn_ext(*rest, v_is_view_of_k=hsk == 576)
                    if mask and max_bias == 0 and softcap == 0 and kv == 512:
                        yield flash_attn_ext(*rest, permute=SWAPPED, v_is_view_of_k=hsk == 576)


def mixed_cases():
    for hsk, hsv, kv, type_K, type_V in (
            (64, 64, 128, Q8_0, Q4_0), (64, 64, 128, Q4_0, F16), (72, 72, 96, Q4_0, Q8_0), (64, 64, 96, F16, F32),
            *(p for low in (Q1_0, Q2_0) for p in ((128, 128, 96, low, low), (128, 64, 128, low, Q4_0),
                                                  (64, 128, 128, Q4_0, low), (128, 64, 64, low, F16)))):
        yield cached(hsk, hsv, 4, (1, 1), kv, 2, type_K, type_V)
    yield cached(128, 128, 4, (1, 1), 256, 1, F16, Q4_0, mask=False)


def long_cases():
    for p in grid(kv=(1024, 2048), hs=(64, 128, 256), nb=(32, 64), type=(F16, Q8_0, Q4_0)):
        yield cached(p["hs"], p["hs"], 8, (4, 1), p["kv"], p["nb"], p["type"])
    for kv, nb, rest in ((113, 1, {}), (1024, 1, {}), (1024, 1, dict(permute=SWAPPED)),
                         (1025, 64, dict(permute=SWAPPED)), (16384, 1, {})):
        yield cached(256, 256, 2, (16, 1), kv, nb, Q8_0, **rest)
    yield cached(256, 256, 2, (16, 2), 1025, 1, Q8_0, sinks=True, max_bias=8.0, logit_softcap=30.0)
    for kv, nb in ((113, 1), (1024, 1), (1024, 64)):
        yield cached(576, 512, 1, (20, 1), kv, nb, Q8_0, v_is_view_of_k=True)
    for hsk, hsv, nh, nr2, nb, type in ((320, 256, 1, 32, 1, F16), (192, 128, 4, 8, 1, F16), (128, 128, 8, 4, 8, F16),
                                        (64, 64, 4, 1, 1, Q8_0)):
        yield cached(hsk, hsv, nh, (nr2, 1), 512, nb, type, v_is_view_of_k=True)
    for kv in (4096, 16384):
        yield cached(256, 256, 4, (6, 1), kv, 512, F16)
        yield cached(128, 128, 8, (4, 1), kv, 512, F16)
    for nr2, kv, permute in ((1, 512, SWAPPED), (4, 512, SWAPPED), (1, 1024, SWAPPED), (1, 512, PLAIN)):
        yield cached(64, 64, 4, (nr2, 1), kv, 75, Q8_0, permute=permute, kv_view=False)


def lightning_indexer(hsk, nh, kv, nb, ns, nm, type_K):
    def build(m):
        return m.lightning_indexer(m.new(F32, (hsk, nh, nb, ns)), m.new(type_K, (hsk, 1, kv, ns)),
                                   m.new(F32, (nh, nb, 1, ns)), m.new(F16, (kv, nb, 1, nm), kq_mask))
    return SuiteCase("lightning_indexer", "LIGHTNING_INDEXER", vars_of(hsk=hsk, nh=nh, kv=kv, nb=nb, ns=ns, nm=nm,
                                                                       type_K=type_K), build, 1e-6)


def lightning_cases():
    for nb, nh, (ns, nm), type in itertools.product((1, 512), (32, 64), ((1, 1), (4, 4), (4, 1)), CACHE_TYPES):
        yield lightning_indexer(128, nh, 256, nb, ns, nm, type)
    for kv, type in itertools.product((1, 7, 8, 63, 64, 65), CACHE_TYPES[:-1]):
        yield lightning_indexer(128, 64, kv, 32, 4, 1, type)


FAMILIES = (grid_cases, mixed_cases, long_cases, lightning_cases)
