"""Small chains of ops that backends may fuse: only the results of the whole graph are compared."""
import itertools

from ggjit.ops.core.record import UNARY
from ggjit.tools.suite.cases.case import BF16, F16, F32, I64, SuiteCase, grid, vars_of
from ggjit.tools.suite.cases.elementwise import ODD, SMALL
from ggjit.tools.suite.cases.inputs import subsets, uniform
from ggjit.tools.suite.cases.recurrent import ssm_conv_shapes
from ggjit.tools.suite.cases.rope import MROPE, NEOX, NORMAL, VISION, positions, rotated

TEN = uniform(-10.0, 10.0)


def relu_sqr_cases():
    for type, ne in itertools.product((F16, F32), (SMALL, ODD)):
        yield SuiteCase("relu_sqr", "RELU_SQR", vars_of(type=type, ne=ne),
                        lambda m, type=type, ne=ne: m.sqr(m.relu(m.new(type, ne))), whole=True)


def _gate_sources(m, type, ne, layout):
    """(source of the unary op, other factor)"""
    if layout == "halves":
        base = m.new(type, (2 * ne[0], *ne[1:]))
        return m.window(base, ne, ne[0] * base.nb[0]), m.window(base, ne)
    factors = {"pad_unary": (3, 1, 1, 1), "strided_dim1": (1, 3, 1, 1)}.get(layout)
    a = m.corner(type, ne, factors) if factors else m.new(type, ne)
    if layout == "pad_other":
        return a, m.corner(type, ne, (3, 1, 1, 1))
    return a, m.new(type, (ne[0],) if layout == "bcast" else ne)


def unary_mul(op, type, ne, swap=False, layout="packed", tail=""):
    """tail: the unary result (reuse) or the other factor (consumer) is read once more."""
    def build(m):
        a, b = _gate_sources(m, type, ne, layout)
        u = m.unary(a, int(op))
        out = m.mul(b, u) if swap and layout != "bcast" else m.mul(u, b)
        return m.add(out, u if tail == "reuse" else b) if tail else out
    return SuiteCase("unary_mul", f"{op.name}_MUL", vars_of(type=type, ne=ne, swap=swap, layout=layout, tail=tail),
                     build, 5e-5 if type is F16 else 1e-7, whole=True)


def unary_mul_cases():
    for op, type in itertools.product((UNARY.SILU, UNARY.SIGMOID, UNARY.SOFTPLUS), (F16, F32)):
        for ne, *rest in ((SMALL,), (SMALL, True), (ODD,), (SMALL, False, "pad_unary"), (SMALL, True, "pad_other"),
                          (SMALL, True, "halves"), (SMALL, False, "packed", "consumer"), (SMALL, False, "bcast"),
                          (SMALL, False, "strided_dim1"), (SMALL, False, "packed", "reuse")):
            yield unary_mul(op, type, ne, *rest)


def snake_cases():
    for type in (F32, F16, BF16):
        for ne in ((5, 7, 1, 1), (33, 32, 1, 1), (1025, 13, 1, 1), (128, 16, 1, 1), (256, 192, 1, 1), (64, 32, 2, 1),
                   (64, 32, 1, 2), (64, 32, 2, 3)):
            def build(m, type=type, ne=ne):
                x, a, b = m.new(type, ne, uniform(-3.14159, 3.14159)), m.new(F32, (1, ne[1])), m.new(F32, (1, ne[1]))
                return m.add(x, m.mul(m.sqr(m.sin(m.mul(x, a))), b))
            yield SuiteCase("snake_fuse", "SNAKE_FUSE", vars_of(type=type, ne=ne), build,
                            {F32: 1e-7, F16: 5e-5, BF16: 5e-3}[type], whole=True)


def softcap_cases():
    ne = (10, 10, 10, 10)
    yield SuiteCase("softcap", "SOFTCAP", vars_of(type=F32, ne=ne, softcap=50.0),
                    lambda m: m.scale(m.tanh(m.scale(m.new(F32, ne), 1.0 / 50.0)), 50.0), whole=True)


def norm_mul_add(n, eps, broadcast):
    ne = (n, 5, 4, 3)

    def build(m):
        a = m.new(F32, (n, *(2 * k for k in ne[1:])) if broadcast else ne)
        w, b = m.new(F32, ne), m.new(F32, ne)
        return m.add(m.mul(m.norm(m.add(m.add(a, w), b), eps), w), b)
    return SuiteCase("norm_mul_add", "NORM_MUL_ADD", vars_of(type=F32, ne=ne, eps=eps, broadcast=broadcast), build,
                     whole=True)


def _broadcast(ne, yes):
    return tuple(n * k for n, k in zip(ne, (2, 3, 3, 4), strict=True)) if yes else ne


def rms_norm_mul_add(ne, eps, broadcast, multi_add=False):
    def build(m):
        a, b, c = m.new(F32, _broadcast(ne, broadcast), TEN), m.new(F32, ne, TEN), m.new(F32, ne, TEN)
        for _ in range(2 if multi_add else 1):
            a = m.add(m.add(a, b), c)
        return m.add(m.mul(m.rms_norm(a, eps), b), c)
    return SuiteCase("rms_norm_mul_add", "RMS_NORM_MUL_ADD", vars_of(type=F32, ne=ne, eps=eps, broadcast=broadcast,
                                                                     multi_add=multi_add), build, whole=True)


def add_rms_norm(ne, eps, broadcast):
    return SuiteCase("add_rms_norm", "ADD_RMS_NORM", vars_of(type=F32, ne=ne, eps=eps, broadcast=broadcast), lambda m:
                     m.rms_norm(m.add(m.new(F32, _broadcast(ne, broadcast), TEN), m.new(F32, ne, TEN)), eps),
                     whole=True)


def norm_chain_cases():
    for eps, n, broadcast in itertools.product((0.0, 1e-6, 1e-4, 1e-1, 1.0), (64, 1025), (False, True)):
        yield rms_norm_mul_add((n, 5, 4, 3), eps, broadcast)
        yield norm_mul_add(n, eps, broadcast)
        yield add_rms_norm((n, 5, 4, 3), eps, broadcast)
    for n in (1, 511, 1025, 8192, 33 * 512):
        for multi_add in (False, True):
            yield rms_norm_mul_add((n, 1, 1, 1), 1e-6, False, multi_add)
        yield add_rms_norm((n, 1, 1, 1), 1e-6, False)
    for ne in ((64, 64, 320, 1), (9, 9, 1280, 1)):
        yield SuiteCase("group_norm_mul_add", "GROUP_NORM_MUL_ADD", vars_of(type=F32, ne=ne, num_groups=4, eps=1e-5),
                        lambda m, ne=ne: m.add(m.mul(m.group_norm(m.new(F32, ne), 4, 1e-5), m.new(F32, ne)),
                                               m.new(F32, ne)), whole=True)


def stored(m, rope, type, type_idx, n_rows):
    """The rotated heads of each token as one row of a cache."""
    n = rope.ne[0] * rope.ne[1]
    rows = m.view_2d(rope, n, rope.ne[2], rope.nb[2], 0)
    return m.set_rows(m.new(type, (n, n_rows)), rows, m.new(type_idx, (rope.ne[2],), subsets(n_rows)))


def rms_norm_mul_rope(ne, eps, multi_add, set_rows, broadcast, mode):
    def build(m):
        a = m.new(F32, ne)
        b = m.new(F32, (*ne[:3], 1)) if multi_add or not broadcast else None
        w = m.new(F32, (ne[0],)) if broadcast else b
        if multi_add:
            a = m.add(m.add(a, b), m.new(F32, (*ne[:3], 1)))
        a = m.mul(m.rms_norm(a, eps), w)
        a = rotated(m, a, positions(m, ne, mode), None, ne[0], mode, (1.0, 0.0, 1.0, 32.0, 1.0))
        return stored(m, a, F16, I64, 2 * ne[2]) if set_rows else a
    return SuiteCase("rms_norm_mul_rope", "RMS_NORM_MUL_ROPE", vars_of(ne=ne, eps=eps, multi_add=multi_add,
                                                                       set_rows=set_rows, broadcast=broadcast,
                                                                       mode=mode),
                     build, 5e-6 if ne[0] == 8192 else 1e-7, whole=True)


def rms_norm_mul_rope_cases():
    for p in grid(multi_add=(False, True), set_rows=(False, True), broadcast=(False, True), mode=(NORMAL, NEOX)):
        for ne in ((768, 1, 1, 1), (768, 3, 1, 1), (768, 3, 5, 1), (128, 32, 2, 1), (128, 4, 2, 1), (128, 32, 50, 1),
                   (128, 4, 50, 1), (8192, 2, 2, 1), (8192, 2, 2, 1)):
            yield rms_norm_mul_rope(ne, 1e-6, **p)


def rope_set_rows_cases():
    for mode, type, ne2, ne3 in itertools.product((NORMAL, NEOX, MROPE, VISION), (F16, F32), (1, 8, 512), (1, 3)):
        ne = (128, 32, ne2, ne3)

        def build(m, mode=mode, type=type, ne=ne):
            a = m.new(F32, (*ne[:3], 1))
            pos = positions(m, ne, mode)
            if mode & MROPE:
                rope = rotated(m, a, pos, None, 128, mode, (1.4245, 0.7465, 1.4245, 1.0, 1.0))
            else:
                rope = m.rope(a, pos, ne[0], mode)
            rows = m.view_2d(rope, ne[0] * ne[1], ne[2], rope.nb[2], 0)
            cache = m.new(type, (ne[0] * ne[1], ne[2] * ne[3]))
            return m.set_rows(cache, rows, m.new(I64, (ne[2],), subsets(ne[2])))
        yield SuiteCase("rope_set_rows", "ROPE_SET_ROWS", vars_of(type=type, type_idx=I64, ne_a=ne, mode=mode), build,
                        whole=True)


def ssm_conv_silu_cases():
    for (ne_a, ne_b), bias in itertools.product(ssm_conv_shapes(), (False, True)):
        def build(m, ne_a=ne_a, ne_b=ne_b, bias=bias):
            out = m.ssm_conv(m.new(F32, ne_a), m.new(F32, ne_b))
            return m.silu(m.add(out, m.new(F32, (out.ne[0],))) if bias else out)
        yield SuiteCase("ssm_conv_bias_silu", "SSM_CONV_BIAS_SILU", vars_of(type=F32, ne_a=ne_a, ne_b=ne_b,
                                                                            fuse_bias=bias), build, whole=True)


FAMILIES = (relu_sqr_cases, unary_mul_cases, snake_cases, softcap_cases, norm_chain_cases, rms_norm_mul_rope_cases,
            rope_set_rows_cases, ssm_conv_silu_cases)
