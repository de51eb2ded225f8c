"""Elementwise ops: unary functions, gated units, arithmetic with broadcast."""
from ggjit.ops.core.record import GLU, UNARY
from ggjit.tools.suite.cases.case import F16, F32, I32, SuiteCase, grid, vars_of
from ggjit.tools.suite.cases.inputs import shuffled, uniform

SMALL, ODD = (128, 2, 2, 2), (5, 7, 11, 13)


def unary(op, type, ne_a, v):
    limit = 10.0 if type is F16 and op in (UNARY.EXP, UNARY.EXPM1) else 150.0
    init = uniform(-limit, limit)

    def build(m):
        return m.unary(m.corner(type, ne_a, (3, 2, 5, 4), init) if v else m.new(type, ne_a, init), int(op))
    return SuiteCase("unary", op.name, vars_of(type=type, ne_a=ne_a, v=v), build)


def unary_cases():
    for p in grid(type=(F16, F32), v=(0, 1), op=tuple(op for op in UNARY if op != UNARY.XIELU), ne_a=(SMALL, ODD)):
        yield unary(**p)


def xielu_cases():
    for p in grid(ne=((10, 5, 4, 3), (512, 16, 1, 1)), type=(F32, F16)):
        def build(m, type=p["type"], ne=p["ne"]):
            return m.xielu(m.new(type, ne), 4.0, 20.0, 0.5, 1e-7)
        yield SuiteCase("xielu", "XIELU", vars_of(type=p["type"], ne=p["ne"]), build)


def _half(m, type, ne, v):
    init = uniform(-150.0, 150.0)
    return m.corner(type, ne, (3, 1, 1, 1), init) if v else m.new(type, ne, init)


def glu(op, type, ne_a, v, swapped):
    return SuiteCase("glu", op.name, vars_of(type=type, ne_a=ne_a, v=v, swapped=swapped),
                     lambda m: m.glu(_half(m, type, ne_a, v), int(op), swapped))


def glu_split(op, type, ne_a, v):
    return SuiteCase("glu_split", op.name, vars_of(type=type, ne_a=ne_a, v=v) + ",split",
                     lambda m: m.glu_split(_half(m, type, ne_a, v), _half(m, type, ne_a, v), int(op)))


def glu_cases():
    for p in grid(type=(F16, F32), v=(0, 1), op=tuple(op for op in GLU if not op.name.startswith("SWIGLU_"))):
        for swapped in (False, True):
            for ne in (SMALL, ODD):
                yield glu(ne_a=ne, swapped=swapped, **p)
        for ne in (SMALL, ODD):
            yield glu_split(ne_a=ne, **p)


def swiglu_oai_cases():
    for p in grid(v=(0, 1), alpha=(0.5, 1.702), limit=(2.0, 7.0)):
        def build(m, v=p["v"], alpha=p["alpha"], limit=p["limit"]):
            return m.swiglu_oai(_half(m, F32, SMALL, v), _half(m, F32, SMALL, v), alpha, limit)
        yield SuiteCase("swiglu_oai", "SWIGLU_OAI", vars_of(type=F32, ne_a=SMALL, **p), build)


# name: (default shape, range)
PLAIN = {"sqr": ((10, 5, 4, 3), (-1.0, 1.0)), "sqrt": ((10, 3, 3, 2), (50.0, 100.0)),
         "log": ((10, 5, 4, 3), (0.9, 1.1)), "sin": ((10, 2, 2, 2), (-6.5, 6.5)), "cos": ((10, 2, 2, 2), (-6.5, 6.5)),
         "clamp": ((10, 5, 4, 3), (-1.0, 1.0)), "leaky_relu": ((10, 5, 4, 3), (-1.0, 1.0)),
         "floor": ((10, 2, 2, 2), (-10.0, 10.0)), "ceil": ((10, 2, 2, 2), (-10.0, 10.0)),
         "round": ((10, 2, 2, 2), (-10.0, 10.0)), "trunc": ((10, 2, 2, 2), (-10.0, 10.0))}
EXTRA = {"clamp": dict(min=-0.5, max=0.5), "leaky_relu": dict(negative_slope=0.1)}


def plain(name, type, ne):
    extra = EXTRA.get(name, {})
    args = (*extra.values(), True) if name == "leaky_relu" else tuple(extra.values())

    def build(m):
        return getattr(m, name)(m.new(type, ne, uniform(*PLAIN[name][1])), *args)
    label = "ne_a" if name == "leaky_relu" else "ne"
    return SuiteCase(name, name.upper(), vars_of(**{"type": type, label: ne}, **extra), build)


def plain_cases():
    for type in (F16, F32):
        for name, (ne, _) in PLAIN.items():
            for shape in (ne, (7, 1, 5, 3), (1024, 1024, 1, 1)):
                yield plain(name, type, shape)
    yield plain("leaky_relu", F32, (10, 5, 4, 3))


def bin_bcast(op, type, ne, nr, nf=1, perm1=False, src_overlap=False):
    """nf > 1: a chain of nf ops; src_overlap: both sources are views of one tensor."""
    name = op.removesuffix("_inplace")
    init = uniform(0.9, 1.1) if name in ("mul", "div") and op == name else None

    def other(m, a):
        if perm1:
            return m.permute(m.new(type, (ne[1], ne[2], ne[0], ne[3]), init), 1, 2, 0, 3)
        if src_overlap:
            return m.window(a, (*ne[:3], 2 * (ne[3] // 3)), ne[3] // 3 * a.nb[3])
        return m.new(type, ne, init)

    def build(m):
        a = m.new(type, tuple(n * r for n, r in zip(ne, nr, strict=True)), init)
        others = [other(m, a) for _ in range(nf)]
        out = m.window(a, (*ne[:3], 2 * (ne[3] // 3))) if src_overlap else a
        for b in others:
            out = getattr(m, op)(out, b)
        return out
    params = vars_of(type=type, ne=ne, nr=nr, nf=nf, perm1=perm1, src_overlap=src_overlap)
    return SuiteCase("bin_bcast", name.upper(), params, build, whole=nf > 1)


NEAR = (((1, 1, 8, 1), (1, 1, 1, 1)), ((1, 1, 1, 1), (32, 1, 1, 1)), ((1, 1, 320, 320), (1, 1, 1, 1)),
        ((10, 5, 1, 1), (1, 1, 1, 1)), ((10, 5, 4, 1), (1, 1, 1, 1)), *(((10, 5, 4, 3), nr) for nr in (
            (1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2), (1, 1, 2, 2), (1, 2, 2, 2),
            (2, 2, 2, 2))))
DIFFUSION = (((1280, 1, 1, 1), (1, 1, 1, 1)), ((1280, 1, 1, 1), (1, 16, 16, 1)), ((1280, 16, 16, 1), (1, 1, 1, 1)),
             ((1280, 1, 1, 1), (1, 256, 1, 1)), ((1, 1, 1280, 1), (16, 16, 1, 1)), ((16, 16, 1280, 1), (1, 1, 1, 1)),
             ((1, 1, 1920, 1), (16, 16, 1, 1)), ((1, 1, 2560, 1), (16, 16, 1, 1)), ((1, 1, 1280, 1), (32, 32, 1, 1)),
             ((1, 1, 1920, 1), (32, 32, 1, 1)), ((1, 1, 640, 1), (32, 32, 1, 1)), ((5120, 1, 1, 1), (1, 256, 1, 1)),
             ((640, 1, 1, 1), (1, 1, 1, 1)), ((64, 262144, 1, 1), (1, 1, 1, 1)))
OVERLAP = ((10, 5, 4, 6), (10, 5, 4, 5), (1, 1, 120, 120), (1, 1, 4, 320))
CHAINS = (((10, 5, 4, 3), (2, 1, 1, 1), 2), ((16, 5, 4, 3), (1, 2, 1, 1), 3), ((10, 5, 4, 3), (1, 1, 2, 1), 4),
          ((16, 5, 4, 3), (1, 1, 1, 2), 5), ((10, 5, 4, 3), (1, 1, 2, 2), 6), ((10, 5, 4, 3), (1, 2, 2, 2), 7),
          ((16, 5, 4, 3), (2, 2, 2, 2), 8), ((16, 5, 4, 3), (1, 1, 1, 1), 16))


def bin_bcast_cases():
    ops = ("add", "sub", "mul", "div")
    for type in (F16, F32):
        for perm1 in (False, True):
            yield from (bin_bcast(op, type, ne, nr, perm1=perm1) for ne, nr in NEAR for op in ops)
        yield from (bin_bcast(op, type, ne, (1, 1, 1, 1), src_overlap=True) for ne in OVERLAP for op in ops)
        yield from (bin_bcast(op, type, ne, nr) for ne, nr in (((1, 1, 65536, 1), (256, 1, 1, 1)), *DIFFUSION)
                    for op in ops)
    yield from (bin_bcast(f"{op}_inplace", F32, (16, 5, 4, 3), (1, 1, 1, 1), 16) for op in ("add", "mul", "sub", "div"))
    yield from (bin_bcast("add", F32, *chain) for chain in CHAINS)


def add_id_cases():
    for p in grid(n_experts=(4, 8), n_experts_used=(1, 2, 4), n_embd=(32, 129), n_token=(1, 32, 129)):
        def build(m, n_experts=p["n_experts"], n_experts_used=p["n_experts_used"], n_embd=p["n_embd"],
                  n_token=p["n_token"]):
            a, b = m.new(F32, (n_embd, n_experts_used, n_token)), m.new(F32, (n_embd, n_experts))
            ids = m.new(I32, (n_experts, n_token), shuffled(modulus=n_experts))
            if n_experts_used != n_experts:
                ids = m.view_2d(ids, n_experts_used, n_token, ids.nb[1], 0)
            return m.add_id(a, b, ids)
        order = {k: p[k] for k in ("n_embd", "n_experts", "n_experts_used", "n_token")}
        yield SuiteCase("add_id", "ADD_ID", vars_of(type_a=F32, type_b=F32, **order), build)


def scale_cases():
    for ne, s, b, inplace in (((10, 10, 10, 10), 2.0, 0.0, False), ((10, 10, 10, 10), 2.0, 1.0, False),
                              ((10, 10, 10, 10), 2.0, 1.0, True), ((100, 10, 10, 10), 2.0, 1.0, False)):
        def build(m, ne=ne, s=s, b=b, inplace=inplace):
            return (m.scale_bias_inplace if inplace else m.scale_bias)(m.new(F32, ne), s, b)
        yield SuiteCase("scale", "SCALE", vars_of(type=F32, ne=ne, scale=s, bias=b, inplace=inplace), build)


def fill_cases():
    for c, ne in ((0.0, (10, 10, 4, 3)), (2.0, (303, 207, 11, 3)), (-152.0, (800, 600, 4, 4)),
                  (3.5, (2048, 512, 2, 2))):
        yield SuiteCase("fill", "FILL", vars_of(type=F32, ne=ne, c=c), lambda m, ne=ne, c=c: m.fill(m.new(F32, ne), c))


def silu_back_cases():
    ne = (64, 5, 4, 3)
    yield SuiteCase("silu_back", "SILU_BACK", vars_of(type=F32, ne=ne, eps=1e-6),
                    lambda m: m.silu_back(m.new(F32, ne), m.new(F32, ne)))


FAMILIES = (unary_cases, xielu_cases, glu_cases, swiglu_oai_cases, plain_cases, bin_bcast_cases, add_id_cases,
            scale_cases, fill_cases, silu_back_cases)
