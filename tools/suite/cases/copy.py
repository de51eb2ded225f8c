"""Ops that move, repeat, join and pad elements without arithmetic, and resampling."""
import itertools

from ggjit.tools.suite.cases.case import (
    ALL_TYPES,
    BF16,
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    SuiteCase,
    grid,
    n_elements,
    types,
    vars_of,
)
from ggjit.tools.suite.cases.inputs import uniform
from ggjit.tools.suite.cases.rows import STEPPED

Q4_0, Q2_0 = types("q4_0 q2_0")
NO = (0, 0, 0, 0)
KEEP = (-1, -1, -1, -1)
WIDE = uniform(-150.0, 150.0)


def times(ne, nr):
    return tuple(n * r for n, r in zip(ne, nr, strict=True))


def repeat_cases():
    for ne3 in (1, 3):
        for type, nr in ((F32, (1, 1, 1, 1)), (F32, (2, 1, 1, 1)), (F32, (1, 2, 1, 1)), (F32, (1, 1, 2, 1)),
                         (F32, (1, 1, 1, 2)), (F16, (2, 1, 1, 1)), (I32, (2, 1, 1, 1)), (I16, (1, 1, 1, 2)),
                         (BF16, (2, 1, 1, 1))):
            ne = (10, 5, 4, ne3)
            yield SuiteCase("repeat", "REPEAT", vars_of(type=type, ne=ne, nr=nr), lambda m, type=type, ne=ne, nr=nr:
                            m.repeat(m.new(type, ne), m.new(type, times(ne, nr))))


def repeat_back_cases():
    ne = (8, 6, 4, 2)
    for v in (False, True):
        for nr in ((1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)):
            def build(m, v=v, nr=nr):
                a = m.new(F32, times(ne, nr))
                if v:
                    a = m.window(a, tuple(n if r == 1 else n // 2 for n, r in zip(a.ne, nr, strict=True)))
                return m.repeat_back(a, m.new(F32, ne))
            yield SuiteCase("repeat_back", "REPEAT_BACK", vars_of(type=F32, ne=ne, nr=nr, v=v), build)


def dup_cases():
    wide, tall = (10, 10, 20, 1), (10, 10, 5, 1)
    for type, ne, permute in (*((t, wide, None) for t in (F32, F16, I32, I16)),
                              *((t, tall, p) for p in ((0, 2, 1, 3), (1, 0, 2, 3)) for t in (F32, F16)),
                              (I16, (10, 8, 3, 1), (0, 2, 1, 3)), (I16, (10, 8, 3, 1), (1, 2, 0, 3))):
        def build(m, type=type, ne=ne, permute=permute):
            a = m.new(type, ne)
            return m.dup(m.permute(a, *permute) if permute else a)
        yield SuiteCase("dup", "DUP", vars_of(type=type, ne=ne, **({"permute": permute} if permute else {})), build)


def set_cases():
    ne = (6, 5, 4, 3)
    for type, dim, inplace in itertools.product((F32, I32), (1, 2, 3), (False, True)):
        def build(m, type=type, dim=dim, inplace=inplace):
            ne_dst = tuple(2 * n if i < dim else n for i, n in enumerate(ne))
            src, dst = m.new(type, ne), m.new(type, ne_dst)
            offset = sum((ne_dst[i] - ne[i]) // 2 * dst.nb[i] for i in range(dim))
            return (m.set_inplace if inplace else m.set)(dst, src, *src.nb[1:], offset)
        yield SuiteCase("set", "SET", vars_of(type_src=type, type_dst=type, ne=ne, dim=dim, inplace=inplace), build)


def cpy_limit(src, dst, n):
    if src is dst:
        return 0.0
    if dst in STEPPED and dst is not Q2_0:
        k = {"iq4_nl": 1 / 4, "q5_0": 1 / 16, "q5_1": 1 / 16, "q8_0": 1 / 64}.get(dst.name, 1 / 8)
        return k * k / (0.25 * n)
    return 1e-6


def cpy(src_type, dst_type, ne_src, ne_dst=KEEP, permute_src=NO, permute_dst=NO, transpose=False, dst_alloc=NO):
    """permute NO: none; ne_dst KEEP: the source's; dst_alloc: the destination is a window of a tensor of that shape."""
    def build(m):
        src = m.new(src_type, ne_src, WIDE)
        src = m.permute(src, *permute_src) if any(permute_src) else src
        src = m.transpose(src) if transpose else src
        ne = src.ne if ne_dst == KEEP else ne_dst
        if any(dst_alloc):
            dst = m.window(m.new(dst_type, dst_alloc, WIDE), ne)
        else:
            dst = m.new(dst_type, ne, WIDE)
            dst = m.permute(dst, *permute_dst) if any(permute_dst) else dst
        return m.cpy(src, dst)
    shown = dict(type_src=src_type, type_dst=dst_type, ne_src=ne_src)
    shown |= {} if ne_dst == KEEP else dict(ne_dst=ne_dst)
    shown |= dict(permute_src=permute_src, permute_dst=permute_dst, _src_transpose=transpose)
    shown |= dict(dst_alloc=dst_alloc) if any(dst_alloc) else {}
    return SuiteCase("cpy", "CPY", vars_of(**shown), build, cpy_limit(src_type, dst_type, n_elements(ne_src)))


def cpy_cases():
    for type, k in itertools.product(ALL_TYPES, (1, 2, 3)):
        ne = (k * type.block, 2, 3, 4)
        yield cpy(type, type, ne)
        yield cpy(type, type, ne, permute_src=(0, 2, 1, 3))
        yield cpy(type, type, ne, permute_src=(0, 3, 1, 2), permute_dst=(0, 2, 1, 3))
    for src, dst in (*itertools.product((F16, BF16, F32), ALL_TYPES), *((t, F32) for t in ALL_TYPES)):
        yield cpy(src, dst, (256, 4, 4, 4))
        yield cpy(src, dst, (256, 2, 3, 4), permute_src=(0, 2, 1, 3))
    for src, dst in itertools.product((F16, F32), (F16, F32)):
        yield cpy(src, dst, (256, 2, 3, 4), permute_src=(1, 0, 2, 3))
    yield cpy(F32, Q4_0, (96, 1, 1, 1))
    yield cpy(Q4_0, F32, (96, 1, 1, 1))
    for src, dst in ((F32, I32), (I32, F32)):
        yield cpy(src, dst, (256, 2, 3, 4))
        yield cpy(src, dst, (256, 2, 3, 4), permute_src=(1, 0, 2, 3))
    for type, ne in ((F16, (256, 4, 3, 1)), (F32, (256, 4, 3, 1)), (F32, (256, 4, 3, 3)), (BF16, (256, 4, 3, 1)),
                     *((t, (256, 4, 1, 1)) for t in (F16, F32, BF16, I32))):
        yield cpy(type, type, ne, transpose=True)
    for type in (I32, F32):
        yield cpy(type, type, (256, 1, 4, 1), permute_src=(1, 2, 0, 3))
    for ne in ((2, 2097121, 1, 1), (2, 2, 524281, 1)):
        yield cpy(F32, F32, ne, permute_src=(1, 0, 2, 3))
    for type in (F32, F16):
        yield cpy(type, type, (128, 2, 3, 1), (128, 2, 3, 1), dst_alloc=(128, 4, 3, 1))
    yield from reshaping_cpy_cases()


def reshaping_cpy_cases():
    ascending, descending = (3, 5, 7, 32), (32, 7, 5, 3)
    for type in (F32, F16):
        for ne in itertools.permutations(ascending):
            for target in (ascending, descending):
                if ne != target:
                    yield cpy(type, type, ne, target)
            if ne[0] == 32 and type is F32:
                yield cpy(Q4_0, Q4_0, ne, descending)


def cont_cases():
    for type, slice in itertools.product((F32, I32, F16, BF16), (True, False)):
        for ne in ((2, 1, 1, 1), (2, 1, 3, 5), (2, 3, 5, 7), (1, 4, 4, 1), (1, 8, 17, 1), (10, 10, 10, 1)):
            if slice and type in (F16, BF16):
                continue

            def build(m, type=type, ne=ne, slice=slice):
                a = m.new(type, ne)
                return m.cont(m.window(a, (ne[0], 1, *ne[2:]), a.nb[0] * (ne[1] - 1)) if slice else m.transpose(a))
            yield SuiteCase("cont", "CONT", vars_of(type=type, ne=ne, use_view_slice=slice, permute=NO), build)
    for type in (F32, F16):
        for ne in ((10, 10, 10, 1), (33, 5, 7, 1), (64, 3, 65, 1), (2, 3, 5, 7), (1024, 64, 64, 1), (2304, 64, 64, 1),
                   (1000, 33, 65, 1)):
            for p in ((2, 1, 0, 3), (1, 2, 0, 3), (0, 2, 1, 3)):
                yield SuiteCase("cont", "CONT", vars_of(type=type, ne=ne, use_view_slice=False, permute=p),
                                lambda m, type=type, ne=ne, p=p: m.cont(m.permute(m.new(type, ne), *p)))


def concat(type, ne_a, ne_b_d, dim, v):
    """v: bits 0 and 2 make a a window of a larger tensor (first three, last two dimensions), bits 1 and 3 b."""
    def source(m, ne, near, far, bits):
        factors = near if v & bits[0] else far if v & bits[1] else None
        return m.corner(type, ne, factors) if factors else m.new(type, ne)

    def build(m):
        ne_b = tuple(ne_b_d if i == dim else n for i, n in enumerate(ne_a))
        return m.concat(source(m, ne_a, (2, 4, 3, 1), (1, 1, 2, 4), (1, 4)),
                        source(m, ne_b, (3, 2, 4, 1), (1, 1, 3, 2), (2, 8)), dim)
    return SuiteCase("concat", "CONCAT", vars_of(type=type, ne_a=ne_a, ne_b_d=ne_b_d, dim=dim, v=v), build)


def concat_cases():
    for p in grid(v=(0, 1, 2, 3), dim=(0, 1, 2, 3), type=(F32, F16, BF16, I8, I16, I32, I64)):
        yield concat(ne_a=(11, 12, 13, 14), ne_b_d=7, **p)
    for p in grid(type=types("q4_0 q4_1 q5_0 q5_1 q8_0"), v=(0, 4, 8, 12), dim=(0, 1, 2, 3)):
        yield concat(ne_a=(128, 12, 13, 14), ne_b_d=256 if p["dim"] == 0 else 7, **p)


def acc_cases():
    for ne_a, ne_b, d in (((256, 17, 1, 1), (256, 16, 1, 1), -1), *(((256, 17, 2, 3), (n, 16, 2, 3), d) for n, d in (
            (256, -1), (128, -1), (256, 1), (128, 2), (64, 3)))):
        def build(m, ne_a=ne_a, ne_b=ne_b, d=d):
            a = m.new(F32, ne_a)
            b = m.new(F32, tuple(n + (i == d) for i, n in enumerate(ne_b)))
            b = m.window(b, ne_b, b.nb[1]) if d > 0 else b
            return m.acc(a, b, *a.nb[1:], 0)
        yield SuiteCase("acc", "ACC", vars_of(type=F32, ne_a=ne_a, ne_b=ne_b, stride_dim=d), build)


FAMILIES = (repeat_cases, repeat_back_cases, dup_cases, set_cases, cpy_cases, cont_cases, concat_cases, acc_cases)
