"""Mixtures of experts: products chosen by id with what follows them, and the routing that chooses."""
import itertools

from ggjit.ops.core.record import GLU
from ggjit.tools.suite.cases.case import BASE_TYPES, F16, F32, SuiteCase, grid, types, vars_of
from ggjit.tools.suite.cases.mul_mat import expert_sources

Q4_0, Q4_K, NVFP4 = types("q4_0 q4_K nvfp4")
GATINGS = SOFTMAX, SIGMOID, SOFTMAX_WEIGHT, SQRT_SOFTPLUS = range(4)


def mul_mat_id_fusion(type_a, n_mats, n_used, b, m, n, k, o=1, mul=False):
    p = dict(type_a=type_a, type_b=F32, n_mats=n_mats, n_used=n_used, b=b, m=m, n=n, k=k)

    def build(maker):
        experts, x, ids = expert_sources(maker, **p)
        out = maker.mul_mat_id(experts, x, ids)
        for _ in range(1, o):
            out = maker.add(out, maker.mul_mat_id(maker.new(type_a, (k, m, n_mats)), x, ids))
        return maker.mul(out, maker.new(F32, (1, *out.ne[1:]))) if mul else out
    return SuiteCase("mul_mat_id_fusion", "MUL_MAT_ID_FUSION", vars_of(**p, o=o, mul=mul), build, 5e-4, whole=True)


def mul_mat_id_fusion_cases():
    yield mul_mat_id_fusion(F16, 16, 16, False, 32, 32, 32, 3)
    for n, type in itertools.product((1, 4, 512), (F32, F16, Q4_0, Q4_K)):
        yield mul_mat_id_fusion(type, 128, 8, False, 768, n, 2048, 1, True)


def _dense(maker, p, k, m, n):
    """Two products of one input, scaled and biased, their gated product, and a last bias."""
    channels, samples = p["batch_dims"]
    x = maker.new(F32, (k, m, channels, samples))

    def lane():
        out = maker.mul_mat(maker.new(p["type"], (k, n, channels, samples)), x)
        out = maker.mul(out, maker.new(F32, (1,))) if p["with_lane_scale"] else out
        return maker.add(out, maker.new(F32, (n, 1, channels, samples))) if p["with_bias"] else out
    up = lane()
    out = maker.glu_split(lane(), up, int(p["glu_op"])) if p["with_gate"] else up
    return maker.add(out, maker.new(F32, (out.ne[0], 1, channels, samples)))


def _routed(maker, p, k, m, n):
    """The same with experts chosen by id; the last step is a scale per expert used."""
    n_mats = p["n_mats"]
    ups, x, ids = expert_sources(maker, p["type"], F32, n_mats, p["n_used"], p["b"], n, m, k)

    def lane(weights):
        out = maker.mul_mat_id(weights, x, ids)
        if p["with_lane_scale"]:
            s = maker.repeat_4d(maker.reshape_3d(maker.new(F32, (n_mats,)), 1, n_mats, 1), 1, n_mats, m, 1)
            out = maker.mul(out, maker.get_rows(s, ids))
        return maker.add_id(out, maker.new(F32, (n, n_mats)), ids) if p["with_bias"] else out
    up = lane(ups)
    gates = maker.new(p["type"], (k, n, n_mats)) if p["with_gate"] else None
    out = maker.glu_split(lane(gates), up, int(p["glu_op"])) if p["with_gate"] else up
    return maker.mul(out, maker.new(F32, (1, *out.ne[1:])))


def mul_mat_vec_fusion(type, glu_op, m, use_id, b, with_bias, with_gate, with_lane_scale, batch_dims):
    n, k = 32, 256
    p = dict(type=type, glu_op=glu_op, m=m, n=n, k=k, use_id=use_id, n_mats=16, n_used=8, b=b, with_bias=with_bias,
             with_gate=with_gate, with_lane_scale=with_lane_scale, batch_dims=batch_dims)
    return SuiteCase("mul_mat_vec_fusion", "MUL_MAT_VEC_FUSION", vars_of(**p),
                     lambda maker: (_routed if use_id else _dense)(maker, p, k, m, n), 5e-3, whole=True)


def mul_mat_vec_fusion_cases():
    for type, gate, use_id, b, bias in itertools.product(BASE_TYPES, *((False, True),) * 4):
        if (b and not use_id) or not (gate or bias):
            continue
        for op in (GLU.SWIGLU, GLU.GEGLU) if gate else (GLU.SWIGLU,):
            for scaled in (False, True) if type is NVFP4 else (False,):
                rest = (use_id, b, bias, gate, scaled)
                yield mul_mat_vec_fusion(type, op, 1, *rest, (4, 2))
                yield mul_mat_vec_fusion(type, op, 1, *rest, (1, 1))
                for m in (2, 4, 8) if gate and not bias and not use_id else ():
                    yield mul_mat_vec_fusion(type, op, m, *rest, (1, 1))


def topk_moe(ne, n_expert_used, with_norm, bias_probs, gating_func, scale_w):
    n_expert, n_tokens, used = ne[0], ne[1], n_expert_used
    first = {SOFTMAX: lambda m, x: m.soft_max(x), SIGMOID: lambda m, x: m.sigmoid(x), SOFTMAX_WEIGHT: lambda m, x: x,
             SQRT_SOFTPLUS: lambda m, x: m.sqrt(m.softplus(x))}[gating_func]

    def build(m):
        probs = first(m, m.new(F32, ne))
        choice = m.add(probs, m.new(F32, (n_expert,))) if bias_probs else probs
        ids = m.argsort_top_k(choice, used)
        w = m.get_rows(m.reshape_3d(probs, 1, n_expert, n_tokens), ids)
        if gating_func == SOFTMAX_WEIGHT:
            w = m.reshape_3d(m.soft_max(m.reshape_2d(w, used, n_tokens)), 1, used, n_tokens)
        if with_norm:
            w = m.reshape_2d(w, used, n_tokens)
            total = m.clamp(m.sum_rows(w), 6.103515625e-5, float("inf"))
            w = m.reshape_3d(m.div(w, total), 1, used, n_tokens)
        return m.scale(w, scale_w) if scale_w else w
    params = vars_of(ne=ne, n_expert_used=used, with_norm=with_norm, bias_probs=bias_probs, gating_func=gating_func,
                     scale_w=scale_w)
    return SuiteCase("topk_moe", "TOPK_MOE", params, build, error="sorted", whole=True)


def topk_moe_cases():
    sizes = (((8, 22), 4), ((31, 22), 8), ((32, 22), 8), ((40, 22), 8), ((71, 22), 8), ((128, 1), 128), ((129, 1), 128),
             ((160, 4), 160), ((256, 22), 6), ((288, 22), 8))
    for p in grid(gating_func=GATINGS, with_norm=(False, True), bias_probs=(False, True), scale_w=(0.0, 2.0)):
        for ne, used in sizes:
            yield topk_moe((*ne, 1, 1), used, **p)


FAMILIES = (mul_mat_id_fusion_cases, mul_mat_vec_fusion_cases, topk_moe_cases)
