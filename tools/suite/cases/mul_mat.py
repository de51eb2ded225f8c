"""Matrix products: plain, by expert, outer, and with a Hadamard matrix."""
import itertools

from ggjit.tools.suite.cases.case import (
    ALL_TYPES,
    BASE_TYPES,
    BF16,
    F16,
    F32,
    I32,
    OTHER_TYPES,
    SuiteCase,
    grid,
    types,
    vars_of,
)
from ggjit.tools.suite.cases.inputs import hadamard, shuffled

Q4_0, Q8_0, MXFP4 = types("q4_0 q8_0 mxfp4")
PLAIN = (0, 1, 2, 3)
SRC0_IS_HADAMARD = 1                                    # GGML_HINT_*


def sources(m, type_a, type_b, ne_a, ne_b, per, k_v, src_overlap, init=None):
    """a [k, m, ..] and b [k, n, ..]: permuted, as views of longer rows (k_v), or as views of one tensor."""
    if per != PLAIN:
        a, b = (m.new(t, tuple(ne[i] for i in per)) for t, ne in ((type_a, ne_a), (type_b, ne_b)))
        return m.permute(a, *per), m.permute(b, *per)
    if src_overlap:
        base = m.new(type_a, (2 * ne_a[0], max(ne_a[1], ne_b[1]), *ne_b[2:]))
        return m.window(base, ne_a), m.window(base, ne_b, ne_a[0] * type_a.nbytes)
    k = k_v or ne_a[0]
    a, b = m.new(type_a, (k, *ne_a[1:]), init), m.new(type_b, (k, *ne_b[1:]))
    return (m.window(a, ne_a), m.window(b, ne_b)) if k_v else (a, b)


def mul_mat(type_a, type_b, m, n, k, bs=(1, 1), nr=(1, 1), per=PLAIN, k_v=0, o=1, src_overlap=False):
    ne_a, ne_b = (k, m, *bs), (k, n, bs[0] * nr[0], bs[1] * nr[1])

    def build(m):
        a, b = sources(m, type_a, type_b, ne_a, ne_b, per, k_v, src_overlap)
        out = m.mul_mat(a, b)
        for _ in range(1, o):
            out = m.add(out, m.mul_mat(a, b))
        return out
    params = vars_of(type_a=type_a, type_b=type_b, m=m, n=n, k=k, bs=bs, nr=nr, per=per, k_v=k_v, o=o,
                     src_overlap=src_overlap)
    return SuiteCase("mul_mat", "MUL_MAT", params, build, 5e-4, whole=o > 1)


# (n, batch, repeats, permutation)
BATCHES = (*((n, bs, nr, PLAIN) for n in (1, 16) for bs, nr in (
    ((1, 1), (1, 1)), ((1, 1), (2, 1)), ((1, 1), (1, 2)), ((3, 1), (1, 1)), ((3, 1), (2, 1)), ((3, 2), (1, 1)),
    ((3, 2), (2, 1)), ((3, 2), (1, 2)), ((3, 2), (2, 2)))), (4, (3, 2), (2, 2), PLAIN),
    *((n, (2, 3), (1, 1), p) for n in (1, 8, 16) for p in ((0, 2, 1, 3), (0, 1, 3, 2), (0, 3, 2, 1))),
    (4, (2, 3), (1, 1), (0, 3, 2, 1)))
SINGLE = (
    *((F16, F32, *mnk, (8, 1), nr) for *mnk, nr in (
        (64, 2, 128, (1, 1)), (83, 2, 128, (4, 1)), (64, 2, 64, (4, 1)), (83, 2, 64, (4, 1)), (64, 45, 128, (4, 1)),
        (128, 45, 64, (4, 1)))),
    (F16, F32, 1056, 1, 193, (1, 1), (4, 1), (0, 2, 1, 3)), (F16, F32, 1056, 1, 67, (1, 1), (4, 1), (0, 2, 1, 3)),
    (F32, F32, 16, 32, 32, (1, 1), (1, 1), PLAIN, 64, 3), (F32, F32, 64, 77, 77, (12, 1)),
    (F32, F32, 32, 4, 96, (3, 2), (1, 1), PLAIN, 0, 1, True), (Q4_0, F32, 576, 512, 576), (Q4_0, F32, 1, 2048, 8192))
ODD_K = ((F16, F16, 64, 32, 65), (F16, F16, 64, 32, 80), (F16, F32, 64, 32, 80), (F32, F32, 64, 32, 80),
         (F16, F16, 64, 32, 588), (F16, F16, 64, 32, 80, (4, 1)))
ONE_ROW = (*((F32, F32, 1, n, 2048) for n in (1, 7, 8, 9, 16, 127, 128, 511, 512)), (F16, F32, 1, 512, 2048),
           (F16, F16, 1, 512, 2048), (F16, F32, 1, 509, 2051), (F16, F16, 1, 509, 2051), (F32, F32, 31, 509, 2051),
           (F32, F32, 32, 509, 2112), (Q8_0, F32, 32, 509, 2112))


def mul_mat_cases():
    for type, n in itertools.product(ALL_TYPES, range(1, 10)):
        yield mul_mat(type, F32, 16, n, 256)
    for type in (Q4_0, Q8_0, MXFP4):
        yield mul_mat(type, F32, 2880, 32, 2880)
    yield from (mul_mat(*p) for p in ONE_ROW)
    for type, type_b in itertools.product(BASE_TYPES, (F32, F16)):
        for k in (256, 4) if type.block == 1 else (256,):
            yield from (mul_mat(type, type_b, 16, n, k, bs, nr, per) for n, bs, nr, per in BATCHES)
        yield from (mul_mat(type, type_b, 16, n, 1024, (3, 2)) for n in (1, 8, 16))
        yield mul_mat(type, type_b, 16, 8, 256, (1536, 1))
    for type in OTHER_TYPES:
        if type.block != 256:
            yield mul_mat(type, F32, 16, 1, type.block)
        yield mul_mat(type, F32, 16, 1, 256)
    yield from (mul_mat(*p) for p in SINGLE)
    yield from (mul_mat(type, F32, 1, 64, 256) for type in ALL_TYPES)
    yield mul_mat(Q8_0, F32, 6, 4096, 5120)
    yield from (mul_mat(*p) for p in ODD_K)
    for p in grid(bs2=(1, 3), bs=(1, 2, 4, 8), nr=(1, 4), m=(0, 1), k=(0, 1), type=(F16, BF16, F32)):
        rest = ((p["bs"], p["bs2"]), (p["nr"], 1))
        yield mul_mat(p["type"], F32, 1056 + p["m"], 1, 128 + p["k"], *rest, (0, 2, 1, 3))
        yield mul_mat(p["type"], F32, 128 + p["m"], 1, 1056 + p["k"], *rest, PLAIN, 2 * 1056 + p["k"])


def hadamard_cases():
    for m, n, bs in ((128, 1, (1, 1)), (64, 1, (1, 1)), (256, 1, (1, 1)), (512, 1, (1, 1)), (128, 32, (1, 1)),
                     (128, 4, (2, 3)), (256, 512, (1, 1)), (32, 1, (1, 1)), (1024, 1, (1, 1))):
        def build(maker, m=m, n=n, bs=bs):
            a, b = sources(maker, F32, F32, (m, m, *bs), (m, n, *bs), PLAIN, 0, False, hadamard)
            return maker.mul_mat_set_hint(maker.mul_mat(a, b), SRC0_IS_HADAMARD)
        params = vars_of(type_a=F32, type_b=F32, m=m, n=n, k=m, bs=bs, nr=(1, 1), per=PLAIN, k_v=0, o=1,
                         src_overlap=False)
        yield SuiteCase("mul_mat_hadamard", "MUL_MAT_HADAMARD", params, build, 5e-4)


def expert_sources(maker, type_a, type_b, n_mats, n_used, b, m, n, k):
    experts = maker.new(type_a, (k, m, n_mats))
    ids = maker.new(I32, (n_mats, n), shuffled(modulus=n_mats))
    if n_used != n_mats:
        ids = maker.view_2d(ids, n_used, n, ids.nb[1], 0)
    return experts, maker.new(type_b, (k, 1 if b else n_used, n)), ids


def mul_mat_id(type_a, type_b, n_mats, n_used, b, m, n, k):
    p = dict(type_a=type_a, type_b=type_b, n_mats=n_mats, n_used=n_used, b=b, m=m, n=n, k=k)
    return SuiteCase("mul_mat_id", "MUL_MAT_ID", vars_of(**p),
                     lambda maker: maker.mul_mat_id(*expert_sources(maker, **p)), 5e-4)


def mul_mat_id_cases():
    for b in (False, True):
        for type, n_mats, m, n, k in ((F16, 16, 32, 1024, 16), (F16, 2, 32, 8192, 64), (F16, 16, 50, 200, 64),
                                      (BF16, 16, 32, 1024, 16), (BF16, 16, 50, 200, 64)):
            yield mul_mat_id(type, F32, n_mats, n_mats, b, m, n, k)
    yield mul_mat_id(F16, F32, 1, 1, False, 8, 16, 1)
    for type in (MXFP4, Q4_0):
        yield mul_mat_id(type, F32, 32, 2, False, 2880, 32, 2880)
    for type in ALL_TYPES:
        yield mul_mat_id(type, F32, 4, 2, False, 64, 16, 3 * type.block)
    for p in grid(type_a=BASE_TYPES, n_mats=(4, 8), n_used=(1, 2, 4), b=(False, True), n=(1, 4, 5, 17, 32, 129)):
        yield mul_mat_id(type_b=F32, m=512, k=256, **p)
    for type, n in itertools.product(OTHER_TYPES, (1, 32)):
        yield mul_mat_id(type, F32, 4, 2, False, 512, n, 256)


def out_prod(type_a, type_b, m, n, k, bs, nr):
    def build(maker):
        a = maker.new(type_a, (m, k, *bs))
        return maker.out_prod(a, maker.new(type_b, (n, k, bs[0] * nr[0], bs[1] * nr[1])))
    return SuiteCase("out_prod", "OUT_PROD", vars_of(type_a=type_a, type_b=type_b, m=m, n=n, k=k, bs=bs, nr=nr,
                                                     trans_b=False), build, 5e-4, ggml_cpu=type_b is F32)


def out_prod_cases():
    for p in grid(type_a=BASE_TYPES, type_b=(F32, F16), n=(1, 16), k=(1, 16), bs2=(1, 3), bs3=(1, 3), nr2=(1, 2),
                  nr3=(1, 2)):
        yield out_prod(p["type_a"], p["type_b"], 256, p["n"], p["k"], (p["bs2"], p["bs3"]), (p["nr2"], p["nr3"]))
    for n in (1, 8, 16, 32):
        yield out_prod(F32, F32, 256, 16, 16, (n, 1), (1, 1))
    for n in (8, 16, 32):
        yield out_prod(F32, F32, 256, 16, 16, (1, 1), (n, 1))


FAMILIES = (mul_mat_cases, hadamard_cases, mul_mat_id_cases, out_prod_cases)
