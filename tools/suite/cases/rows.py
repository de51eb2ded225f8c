"""Ops that move whole rows by id, and sorting."""
from ggjit.tools.suite.cases.case import ALL_TYPES, F16, F32, I32, I64, SuiteCase, grid, n_elements, types, vars_of
from ggjit.tools.suite.cases.inputs import integers, shuffled, subsets

Q8_0, Q4_0, Q2_0 = types("q8_0 q4_0 q2_0")


def get_rows(type, n, m, r, be1, be2, v):
    rows_of = m

    def build(m):
        a = m.new(type, (n, rows_of, be1, be2), integers(rows_of) if type is I32 else None)
        ids = m.new(I32, (r + 1 if v else r, be1, be2), integers(rows_of))
        if v:
            ids = m.view_3d(ids, r // 2, be1, be2, ids.nb[1], ids.nb[2], ids.nb[0])
        return m.get_rows(a, ids)
    return SuiteCase("get_rows", "GET_ROWS", vars_of(type=type, n=n, m=m, r=r, be1=be1, be2=be2, v=v), build)


def get_rows_cases():
    for type in (F32, Q4_0):
        yield get_rows(type, 300 * 256, 5, 4, 1, 2, False)
        yield get_rows(type, 256, 80000, 70000, 2, 1, False)
        yield get_rows(type, 256, 5, 4, 700, 100, False)
    yield get_rows(F32, 1, 8, 2, 1, 1, False)
    for p in grid(type=(*ALL_TYPES, I32), be1=(1, 7), v=(False, True)):
        yield get_rows(n=256, m=5, r=4, be2=1, **p)


def get_rows_back(type, n, m, r, b, v):
    rows_of = m

    def build(m):
        forward = m.new(type, (n, rows_of, b), integers(rows_of) if type is I32 else None)
        ids = m.new(I32, (r, b), integers(rows_of))
        if v:
            ids = m.view_2d(ids, r // 2, b, ids.nb[1], 0)
        grad = m.new(type, (n, r, b), integers(rows_of) if type is I32 else None)
        return m.get_rows_back(grad, ids, forward)
    return SuiteCase("get_rows_back", "GET_ROWS_BACK", vars_of(type=type, n=n, m=m, r=r, b=b, v=v), build,
                     ggml_cpu=type in (F32, F16))


def get_rows_back_cases():
    yield get_rows_back(F32, 1, 8, 2, 1, False)
    yield get_rows_back(F32, 1, 70000, 4, 1, False)
    for p in grid(type=(*ALL_TYPES, I32), v=(False, True)):
        yield get_rows_back(n=256, m=5, r=4, b=1, **p)


def one_step_off(src, dst, n):
    """NMSE when one of n quantised values is a step off: (2 / 2^bits)^2 over the mean square of the values, n/4."""
    k = {"q5_0": 1 / 16, "q5_1": 1 / 16, "q8_0": 1 / 64}.get(dst.name, 1 / 8)
    k *= 4 if src is F16 and dst is Q2_0 else 1
    return k * k * (16 if src is F16 else 1) / (0.25 * n)


STEPPED = types("q2_0 q4_0 q4_1 iq4_nl q5_0 q5_1 q8_0")


def set_rows(type_src, type_dst, type_idx, ne, nr23, r, v):
    deep = (ne[2] * nr23[0], ne[3] * nr23[1])

    def build(m):
        dst, src = m.new(type_dst, (*ne[:2], *deep)), m.new(type_src, (ne[0], r, *deep))
        ids = m.new(type_idx, (r, ne[2], ne[3]), subsets(ne[1]))
        if v:
            src = m.window(src, (ne[0], r // 2, *deep))
            ids = m.view_3d(ids, r // 2, ne[2], ne[3], ids.nb[1], ids.nb[2], 0)
        return m.set_rows(dst, src, ids)
    limit = one_step_off(type_src, type_dst, ne[0] * r * n_elements(deep)) if type_dst in STEPPED else 1e-7
    params = vars_of(type_src=type_src, type_dst=type_dst, type_idx=type_idx, ne=ne, nr23=nr23, r=r, v=v)
    return SuiteCase("set_rows", "SET_ROWS", params, build, limit)


def set_rows_cases():
    small = ((1, 8, 1, 3), (1, 1), 2)
    yield set_rows(F32, F32, I64, *small, False)
    yield set_rows(F32, F32, I32, *small, False)
    yield set_rows(F32, Q8_0, I32, (256, 5, 1, 3), (1, 1), 1, False)
    for p in grid(type_src=(F16, F32), type_dst=ALL_TYPES, b=(1, 7), v=(False, True)):
        b, rest = p["b"], dict(type_src=p["type_src"], type_dst=p["type_dst"], type_idx=I64, v=p["v"])
        block = p["type_dst"].block
        yield set_rows(ne=(256, 5, b, 3), nr23=(1, 1), r=1, **rest)
        yield set_rows(ne=(256, 11, 1, b), nr23=(2, 3), r=7, **rest)
        yield set_rows(ne=(3 * block, 3, b, 1), nr23=(2, 3), r=2, **rest)
        if block == 1:
            yield set_rows(ne=(31, 3, b, 1), nr23=(2, 3), r=2, **rest)
            yield set_rows(ne=(33, 5, 1, b), nr23=(2, 3), r=1, **rest)
    for v in (False, True):
        yield set_rows(F16, F16, I64, *small, v)
        yield set_rows(F16, F16, I32, *small, v)


def argsort(ne, order=0):
    return SuiteCase("argsort", "ARGSORT", vars_of(type=F32, ne=ne, order=order),
                     lambda m: m.argsort(m.new(F32, ne, shuffled()), order))


def argsort_cases():
    for order in (0, 1):
        for e in range(2, 21):                          # the order is not passed here, as in ggml's list
            yield argsort((2 ** e - 1, 1, 1, 1))
            yield argsort((2 ** e, 1, 1, 1))
        for ne in ((16, 10, 10, 10), (60, 10, 10, 10), (1023, 2, 1, 3), (1024, 2, 1, 3), (1025, 2, 1, 3),
                   (1025, 256, 1, 1), (2047, 2, 1, 3), (2048, 2, 1, 3), (2049, 2, 1, 3), (2, 8, 8192, 1),
                   (2048, 512, 1, 1)):
            yield argsort(ne, order)


def top_k(ne, k, ties=False):
    init = shuffled(max(1, min(10, k // 2)) if ties else 1)
    return SuiteCase("top_k", "TOP_K", vars_of(type=F32, ne=ne, k=k, ties=ties),
                     lambda m: m.top_k(m.new(F32, ne, init), k), 0.0, "picked" if ties else "set", whole=ties)


def top_k_cases():
    for n in range(1, 5):
        for k in range(1, n + 1):
            yield top_k((n, 2, 1, 3), k, True)
    for e in range(20):
        for k in (1, 2, 3, 7, 15, 100, 500, 1023, 9999):
            if k <= 2 ** e:
                yield top_k((2 ** e, 1, 1, 1), k)
                yield top_k((2 ** e + 11, 1, 2, 1), k)
                yield top_k((2 ** e + 11, 1, 2, 1), k, True)
    for k in (1, 2, 3, 7, 15):
        for ne in ((16, 10, 10, 10), (60, 10, 10, 10), (1023, 2, 1, 3), (1024, 2, 1, 3), (1025, 2, 1, 3),
                   (16384, 1, 1, 1), (2047, 2, 1, 3), (2048, 2, 1, 3), (2049, 2, 1, 3)):
            yield top_k(ne, k)


FAMILIES = (get_rows_cases, get_rows_back_cases, set_rows_cases, argsort_cases, top_k_cases)
