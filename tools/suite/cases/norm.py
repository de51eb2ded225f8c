"""Ops over rows: normalisations, softmax, sums, losses, optimiser steps."""
from ggjit.tools.suite.cases.case import F16, F32, SuiteCase, grid, vars_of
from ggjit.tools.suite.cases.inputs import shuffled, uniform

EPS = (0.0, 1e-6, 1e-4, 1e-1, 10.0)
TEN, SUMMED = uniform(-10.0, 10.0), uniform(-0.9, 1.1)


def _rows(m, type, ne, v, noncontig_rows=False, init=None):
    a = m.new(type, (ne[1], ne[0], *ne[2:]) if noncontig_rows else ne, init)
    a = m.permute(a, 1, 0, 2, 3) if noncontig_rows else a
    return m.window(a, tuple(n // 2 for n in a.ne)) if v else a


def norm(n, v, eps, noncontig_rows=False):
    ne = (n, 5, 4, 3)
    return SuiteCase("norm", "NORM", vars_of(type=F32, ne=ne, v=v, eps=eps, noncontig_rows=noncontig_rows),
                     lambda m: m.norm(_rows(m, F32, ne, v, noncontig_rows), eps))


def rms_norm(n, v, eps, inplace=False):
    ne = (n, 5, 4, 3)
    return SuiteCase("rms_norm", "RMS_NORM", vars_of(type=F32, ne=ne, v=v, eps=eps, inplace=inplace),
                     lambda m: (m.rms_norm_inplace if inplace else m.rms_norm)(_rows(m, F32, ne, v, init=TEN), eps))


def rms_norm_back(n, eps):
    ne = (n, 5, 4, 3)
    return SuiteCase("rms_norm_back", "RMS_NORM_BACK", vars_of(type=F32, ne=ne, eps=eps),
                     lambda m: m.rms_norm_back(m.new(F32, ne, TEN), m.new(F32, ne, TEN), eps))


def l2_norm(n, eps, v, noncontig_rows=False):
    ne = (n, 5, 4, 3)
    return SuiteCase("l2_norm", "L2_NORM", vars_of(type=F32, ne=ne, eps=eps, v=v, noncontig_rows=noncontig_rows),
                     lambda m: m.l2_norm(_rows(m, F32, ne, v, noncontig_rows), eps))


def norm_cases():
    for eps in EPS:
        for n in (64, 1025):
            for v in (False, True):
                yield norm(n, v, eps)
                yield rms_norm(n, v, eps)
            yield norm(n, False, eps, True)
            yield rms_norm_back(n, eps)
            yield l2_norm(n, eps, False)
            yield l2_norm(n, eps, True)
            yield l2_norm(n, eps, False, True)
        for n in (33, 132, 260):
            for v in (False, True):
                yield norm(n, v, eps)
                yield rms_norm(n, v, eps)
    yield rms_norm(64, False, 1e-6, True)


def group_norm_cases():
    for ne in ((64, 64, 320, 1), (9, 9, 1280, 1)):
        yield SuiteCase("group_norm", "GROUP_NORM", vars_of(type=F32, ne=ne, num_groups=32, eps=1e-6),
                        lambda m, ne=ne: m.group_norm(m.new(F32, ne), 32, 1e-6))


def soft_max(ne, mask, sinks, m_prec, nr23, scale, max_bias, inplace=False):
    def build(m):
        a = m.new(F32, (*ne[:2], ne[2] * nr23[0], ne[3] * nr23[1]))
        added = m.new(m_prec, ne) if mask else None
        out = (m.soft_max_ext_inplace if inplace else m.soft_max_ext)(a, added, scale, max_bias)
        if sinks:
            out = m.soft_max_add_sinks(out, m.new(F32, (ne[2] * nr23[0],)))
        return out
    params = vars_of(type=F32, ne=ne, mask=mask, sinks=sinks, m_prec=m_prec, nr23=nr23, scale=scale, max_bias=max_bias,
                     inplace=inplace)
    return SuiteCase("soft_max", "SOFT_MAX", params, build, 1e-6)


LONG = (((16, 2, 32, 1), True, True, F32, 0.0), ((16, 2, 32, 1), True, False, F16, 0.0),
        ((16, 2, 32, 1), False, True, F32, 0.0), ((32, 2, 32, 1), True, True, F32, 0.0),
        ((32, 2, 32, 1), True, False, F16, 0.0), ((32, 2, 32, 1), True, True, F32, 8.0),
        ((32, 2, 32, 1), True, True, F16, 8.0), ((200001, 2, 3, 1), True, True, F32, 8.0),
        ((200001, 2, 3, 1), True, True, F16, 8.0))


def soft_max_cases():
    for mask, sinks in ((a, b) for a in (False, True) for b in (False, True)):
        for p in grid(max_bias=(0.0, 8.0) if mask else (0.0,), scale=(1.0, 0.1), ne0=(16, 1024), ne1=(16, 1024),
                      m_prec=(F32, F16) if mask else (F32,)):
            n0, n1, rest = p["ne0"], p["ne1"], (p["scale"], p["max_bias"])
            yield soft_max((n0, n1, 1, 1), mask, sinks, p["m_prec"], (1, 1), *rest)
            yield soft_max((n0 - 1, n1 - 1, 1, 1), mask, sinks, p["m_prec"], (1, 1), *rest)
            if mask and n0 <= 32 and n1 <= 32:
                yield soft_max((n0, n1, 1, 3), mask, sinks, p["m_prec"], (3, 1), *rest)
                yield soft_max((n0 - 1, n1 - 1, 1, 1), mask, sinks, p["m_prec"], (2, 3), *rest)
        for m_prec in (F32, F16):
            yield soft_max((16, 2, 32, 1), mask, sinks, m_prec, (1, 1), 0.1, 0.0, True)
    for ne, mask, sinks, m_prec, bias in LONG:
        yield soft_max(ne, mask, sinks, m_prec, (1, 1), 0.1, bias)
    for ne in ((200000, 1, 1, 1), (200000, 4, 1, 1), (643251, 3, 1, 1)):
        yield soft_max(ne, False, False, F32, (1, 1), 1.0, 0.0)


def soft_max_back_cases():
    for p in grid(max_bias=(0.0, 8.0), scale=(1.0, 0.1), ne0=(16, 1024), ne1=(16, 1024)):
        n0, n1, scale, bias = p["ne0"], p["ne1"], p["scale"], p["max_bias"]
        for ne in ((n0, n1, 1, 1), (n0 - 1, n1 - 1, 1, 1), (n0, n1, 2, 3)):
            def build(m, ne=ne, scale=scale, bias=bias):
                return m.soft_max_ext_back(m.new(F32, ne), m.new(F32, ne), scale, bias)
            yield SuiteCase("soft_max_back", "SOFT_MAX_BACK", vars_of(type=F32, ne=ne, scale=scale, max_bias=bias),
                            build, ggml_cpu=bias == 0)


def sum_cases():
    for ne, permute in (((10, 5, 4, 3), None), ((11, 5, 6, 3), (0, 2, 1, 3)), ((11, 5, 6, 3), (0, 3, 2, 1)),
                        ((11, 5, 6, 3), (0, 1, 3, 2)), ((33, 1, 1, 1), None), ((33, 1024, 1, 1), None),
                        ((33, 256, 1, 1), None), ((33, 256, 1, 1), (1, 0, 2, 3))):
        def build(m, ne=ne, permute=permute):
            a = m.new(F32, ne, SUMMED)
            return m.sum(m.permute(a, *permute) if permute else a)
        apart = permute is not None and permute[0] != 0
        yield SuiteCase("sum", "SUM", vars_of(type=F32, ne=ne, **({"permute": permute} if permute else {})), build,
                        wrong="rows are read as if their elements lay side by side" if apart else "")


def sum_rows(ne, permute=False, slice=False):
    def build(m):
        a = m.new(F32, ne)
        if slice:
            a = m.view_4d(a, ne[0], ne[1], ne[2] // 2, ne[3] - 1, a.nb[1], a.nb[2] * 2, a.nb[3], a.nb[3])
        return m.sum_rows(m.permute(a, 0, 2, 3, 1) if permute else a)
    return SuiteCase("sum_rows", "SUM_ROWS", vars_of(type=F32, ne=ne, permute=permute, slice=slice), build)


def sum_rows_cases():
    yield sum_rows((10, 5, 4, 3))
    for n in (11, 16):
        for permute, slice in ((True, False), (False, True), (True, True)):
            yield sum_rows((n, 5, 6, 3), permute, slice)
    for n in (1, 1024, 256):
        yield sum_rows((33, n, 1, 1))


def mean_cases():
    for ne in ((10, 5, 4, 3), (33, 1, 1, 1), (33, 256, 1, 1), (32769, 1, 1, 1), (32, 1, 1, 1), (32, 256, 1, 1),
               (32768, 1, 1, 1)):
        yield SuiteCase("mean", "MEAN", vars_of(type=F32, ne=ne), lambda m, ne=ne: m.mean(m.new(F32, ne, SUMMED)))


def cumsum_cases():
    for ne in (*((n, 5, 4, 3) for n in (10, 127, 128, 255, 256, 511, 512, 1023, 1024, 2047, 2048)), (128, 128, 4, 4),
               (201 * 1204, 1, 1, 1), (312 * 1205, 1, 1, 1), (20481, 4, 1, 1)):
        yield SuiteCase("cumsum", "CUMSUM", vars_of(type=F32, ne=ne), lambda m, ne=ne: m.cumsum(m.new(F32, ne)))


def argmax_cases():
    for ne in ((32, 1, 1, 1), (32, 513, 1, 1), (100, 10, 1, 1), (1024, 10, 1, 1), (1024, 12, 1, 1), (2000, 10, 1, 1),
               (5438, 3, 1, 1)):
        yield SuiteCase("argmax", "ARGMAX", vars_of(type=F32, ne=ne),
                        lambda m, ne=ne: m.argmax(m.new(F32, ne, shuffled())), 0.0)


def count_equal_cases():
    for ne in ((4, 500, 1, 1), (4, 5000, 1, 1)):
        def build(m, ne=ne):
            return m.count_equal(m.argmax(m.new(F32, ne, shuffled())), m.argmax(m.new(F32, ne, shuffled())))
        yield SuiteCase("count_equal", "COUNT_EQUAL", vars_of(type=F32, ne=ne), build, 0.0)


def loss_cases():
    logits = uniform(-100.0, 100.0)
    for ne in ((10, 5, 4, 3), (30000, 1, 1, 1)):
        yield SuiteCase("cross_entropy_loss", "CROSS_ENTROPY_LOSS", vars_of(type=F32, ne=ne), lambda m, ne=ne:
                        m.cross_entropy_loss(m.new(F32, ne, logits), m.soft_max(m.new(F32, ne, logits))))
    for ne in ((10, 5, 4, 3), (30000, 1, 1, 1)):
        yield SuiteCase("cross_entropy_loss_back", "CROSS_ENTROPY_LOSS_BACK", vars_of(type=F32, ne=ne), lambda m, ne=ne:
                        m.cross_entropy_loss_back(m.new(F32, (1,)), m.new(F32, ne), m.soft_max(m.new(F32, ne))))


def step_cases():
    ne, unit = (10, 5, 4, 3), uniform(0.0, 1.0)

    def step(m, name, n_moments, n_params):
        w = m.new(F32, ne, unit)
        m.set_param(w)
        return getattr(m, name)(w, *(m.new(F32, ne, unit) for _ in range(1 + n_moments)),
                                m.new(F32, (n_params,), unit))
    yield SuiteCase("opt_step_adamw", "OPT_STEP_ADAMW", vars_of(type=F32, ne=ne),
                    lambda m: step(m, "opt_step_adamw", 2, 7))
    yield SuiteCase("opt_step_sgd", "OPT_STEP_SGD", vars_of(type=F32, ne=ne), lambda m: step(m, "opt_step_sgd", 0, 2))


FAMILIES = (norm_cases, group_norm_cases, soft_max_cases, soft_max_back_cases, sum_cases, sum_rows_cases, mean_cases,
            cumsum_cases, argmax_cases, count_equal_cases, loss_cases, step_cases)
