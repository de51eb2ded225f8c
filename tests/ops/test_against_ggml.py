"""The builder of the same name, with the same arguments, means the same thing in the real ggml."""
import numpy as np
import pytest
from helpers import oracle
from helpers.cases import nmse

import ggjit as gg
from ggjit.tools.suite.oracle import WHEELS, Lacking

R = np.random.default_rng(5)


def floats(*shape, lo=-1.0, hi=1.0):
    return R.uniform(lo, hi, shape).astype(np.float32)


def wide(*shape, lo=-3.0, hi=3.0):
    return floats(*shape, lo=lo, hi=hi)


def per_token(n, *shape, lo=-1.0, hi=1.0):
    return [floats(*shape, lo=lo, hi=hi) for _ in range(n)]


def scan(d_state, dim, heads, groups, n_t, n_s, a0, keep):
    """Arguments of ssm_scan, states of one sequence more than are used."""
    s, x, dt = floats(n_s + 1, heads, dim, d_state), floats(n_s, n_t, heads, dim), floats(n_s, n_t, heads, lo=-3, hi=25)
    B, C = per_token(2, n_s, n_t, groups, d_state)
    ids = np.arange(n_s, 0, -1, dtype=np.int32)
    return [s, x, dt, floats(heads, a0, lo=-1.0, hi=-0.5), B, C, ids], [np.int64(keep)]


def delta_net(size, heads, n_t, n_s, repeat, kda, keep):
    q, k = per_token(2, n_s, n_t, heads // repeat, size, lo=-0.3, hi=0.3)
    g = floats(n_s, n_t, heads, size if kda else 1, lo=-20.0, hi=-1e-4)
    return [q, k, floats(n_s, n_t, heads, size, lo=-0.3, hi=5.0), g, floats(n_s, n_t, heads, 1, lo=0.0, hi=1.0),
            floats(n_s, heads, size, size)], [np.int64(keep)]


def experts(k, m, n_experts, used, nb, n):
    ids = np.stack([R.permutation(n_experts)[:used] for _ in range(n)]).astype(np.int32)
    return [floats(n_experts, m, k), floats(n, nb, k), ids], []


HEADS, POSITIONS = wide(2, 5, 3, 64), np.arange(5, dtype=np.int32) * 37
YARN = [10000.0, 0.7, 0.6, 1.3, 32.0, 1.0]
UNARY_NAMES = ["abs", "sgn", "neg", "step", "tanh", "elu", "relu", "sigmoid", "gelu", "gelu_quick", "silu", "hardswish",
               "hardsigmoid", "exp", "gelu_erf", "sqr", "sin", "cos", "softplus", "expm1", "floor", "ceil", "round",
               "trunc"]
TABLES = {"gelu": 5e-7, "gelu_quick": 5e-7}      # ggml's float16 tables are off by this much
PEER = [                                        # (name, arrays, their types, params, permuted sources, NMSE)
    *((n, [wide(3, 4, 5, 35)], (), [], {}, TABLES.get(n, 1e-7)) for n in UNARY_NAMES),
    *((n, [wide(2, 4, 5, 35), wide(1, 4, 1, 35, lo=0.5)], (), [], {}, 1e-7) for n in ("add", "sub", "mul", "div")),
    ("sqrt", [wide(7, 35, lo=0.0)], (), [], {}, 1e-7), ("log", [wide(7, 35, lo=0.1)], (), [], {}, 1e-7),
    ("leaky_relu", [wide(7, 35)], (), [0.1, False], {}, 1e-7),
    ("scale", [wide(7, 35)], (), [2.5], {}, 1e-7), ("scale_bias", [wide(7, 35)], (), [2.5, -1.0], {}, 1e-7),
    ("clamp", [wide(7, 35)], (), [-0.5, 0.7], {}, 1e-7),
    ("norm", [wide(3, 4, 35)], (), [1e-5], {}, 1e-7), ("rms_norm", [wide(3, 4, 35)], (), [1e-5], {}, 1e-7),
    ("l2_norm", [wide(3, 4, 35)], (), [1e-5], {}, 1e-7),
    ("group_norm", [wide(2, 6, 4, 5)], (), [4, 1e-5], {}, 1e-7),
    *((n, [wide(7, 36)], (), [], {}, 1e-6) for n in ("reglu", "geglu", "swiglu", "geglu_erf", "geglu_quick",
                                                       "swiglu_swapped")),
    ("swiglu_split", [wide(7, 35), wide(7, 35)], (), [], {}, 1e-7),
    ("swiglu_oai", [wide(7, 35), wide(7, 35)], (), [1.7, 2.0], {}, 1e-7),
    ("soft_max", [wide(2, 3, 4, 35)], (), [], {}, 1e-6),
    *(("soft_max_ext", [wide(2, 6, 4, 35), wide(1, 1, 4, 35)], (None, ty), [0.3, bias], {}, 1e-6)
      for ty in ("F32", "F16") for bias in (0.0, 8.0)),
    *(("rope_ext", [HEADS, POSITIONS, c], (), [40, mode, 512, *f], {}, 1e-7) for mode in (0, 2)
      for c, f in ((None, [10000.0, 1.0, 0.0, 1.0, 0.0, 0.0]), (wide(20, lo=0.9, hi=1.1), YARN))),
    *(("get_rows", [wide(5, 64), np.int32([4, 0, 0, 3])], (ty,), [], {}, 1e-7)
      for ty in ("F32", "F16", "Q8_0", "Q4_0")),
    ("set_rows", [wide(5, 64), wide(2, 64), np.int64([3, 1])], ("F16",), [], {}, 1e-7),
    *((n, [wide(2, 17, 18, 35)], (), [], {0: axes}, 0.0) for n in ("cont", "dup")
      for axes in ((0, 2, 1, 3), (1, 0, 2, 3), (2, 0, 3, 1))),
    ("cpy", [wide(2, 17, 18, 35), wide(2, 17, 35, 18)], (None, "F16"), [], {0: (1, 0, 2, 3)}, 1e-7),
    *((n, [wide(3, 4, 35)], (), [], {}, 1e-7) for n in ("sum", "sum_rows", "mean")),
    ("argmax", [np.float32(R.integers(0, 9, (7, 35)))], (), [], {}, 0.0),
    ("repeat", [wide(2, 1, 5), wide(4, 3, 10)], (), [], {}, 0.0),
    ("concat", [wide(2, 3, 5), wide(2, 4, 5)], (), [1], {}, 0.0),
    ("diag_mask_inf", [wide(2, 7, 9)], (), [2], {}, 0.0), ("diag_mask_zero", [wide(2, 7, 9)], (), [2], {}, 0.0),
    ("win_part", [floats(5, 7, 24)], (), [4], {}, 0.0),
    ("win_unpart", [floats(4, 4, 4, 24)], (), [7, 5, 4], {}, 0.0),
    ("get_rel_pos", [floats(11, 7).astype(np.float16)], (), [6, 6], {}, 0.0),
    ("add_rel_pos", [floats(2, 6, 9), floats(2, 2, 3, 3), floats(2, 2, 3, 3)], (), [], {}, 1e-12),
    *(("tri", [floats(2, 9, 9)], (), [kind], {}, 0.0) for kind in range(4)),
    ("diag", [floats(3, 2, 1, 9)], (), [], {}, 0.0),
    ("cumsum", [floats(3, 2, 100)], (), [], {}, 1e-12),
    *((n, [floats(5, 9), floats(3, 7)], (), [36, 180, 180, np.int64(44)], {}, 0.0)
      for n in ("acc", "acc_inplace", "set")),
    ("set_1d", [floats(5, 9), floats(7)], (), [40], {}, 0.0),
    ("set_2d", [floats(5, 9), floats(2, 7)], (), [72, 36], {}, 0.0),
    ("add1", [floats(3, 35), floats(1)], (), [], {}, 0.0),
    ("add_id", [floats(5, 2, 35), floats(4, 35), R.integers(0, 4, (5, 2), np.int32)], (), [], {}, 0.0),
    ("count_equal", [R.integers(0, 3, (7, 35), np.int32), R.integers(0, 3, (7, 35), np.int32)], (), [], {}, 0.0),
    ("repeat_back", [floats(4, 6, 10), floats(2, 3, 5)], (), [], {}, 1e-12),
    ("get_rows_back", [floats(9, 35), R.integers(0, 4, 9, np.int32), floats(4, 35)], (), [], {}, 1e-12),
    ("silu_back", [floats(3, 35), floats(3, 35, lo=-9, hi=9)], (), [], {}, 1e-12),
    ("rms_norm_back", [floats(3, 35), floats(3, 35)], (), [1e-5], {}, 1e-11),
    ("soft_max_ext_back", [floats(3, 35), floats(3, 35, lo=0)], (), [0.7, 0.0], {}, 1e-11),
    *(("pool_1d", [floats(3, 35)], (ty,), [op, *q], {}, 1e-12) for ty in ("F32", "F16") for op in (0, 1)
      for q in ((3, 2, 0), (3, 1, 2))),
    *(("pool_2d", [floats(2, 3, 9, 35)], (ty,), [op, *q], {}, 1e-12) for ty in ("F32", "F16") for op in (0, 1)
      for q in ((3, 2, 2, 1, 0.0, 1.0), (3, 3, 1, 1, 1.5, 0.5))),
    *(("pool_2d_back", [floats(2, 3, 10, 17), floats(2, 3, 9, 35)], (), [op, 3, 2, 2, 1, 0.0, 1.0], {}, 1e-12)
      for op in (0, 1)),
    *((n, [floats(2, 3, 4, 35)], (), [3, 2, 1, 1], {}, 0.0) for n in ("pad", "pad_circular")),
    *((n, [floats(2, 3, 4, 35)], (), [3, 2, 1, 1, 0, 2, 1, 0], {}, 0.0) for n in ("pad_ext", "pad_ext_circular")),
    ("pad_reflect_1d", [floats(2, 35)], (), [10, 9], {}, 0.0),
    ("roll", [floats(2, 3, 4, 35)], (), [3, -2, 1, 1], {}, 0.0),
    ("timestep_embedding", [floats(5, lo=0, hi=1000)], (), [33, 10000], {}, 1e-8),
    *(("argsort", [floats(5, n)], (), [order], {}, 0.0) for n in (7, 1000) for order in (0, 1)),
    ("argsort_top_k", [floats(5, 100)], (), [9], {}, 0.0),
    *(("top_k", [floats(5, n)], (), [2], {}, 0.0) for n in (7, 1000)),
    ("cross_entropy_loss", [floats(4, 35, lo=-9, hi=9), floats(4, 35, lo=0)], (), [], {}, 1e-12),
    ("cross_entropy_loss_back", [floats(1), floats(4, 35, lo=-9, hi=9), floats(4, 35, lo=0)], (), [], {}, 1e-12),
    *(("upscale", [floats(2, 3, 5, 7)], (), [3, mode], {}, 1e-12) for mode in (0, 1, 2)),
    *(("interpolate", [floats(2, 3, 9, 7)], (), [*(np.int64(n) for n in ne), mode], {}, 1e-12)
      for mode in (0, 1, 2, 0x100, 0x101, 0x102, 0x201) for ne in ((11, 13, 3, 4), (5, 4, 3, 2), (1, 20, 6, 2))),
    *(("im2col", [floats(2, 3, 3, 3), floats(2, 3, 9, 20)], (), [2, 1, 1, 2, 1, 2, True, ty], {}, 1e-12)
      for ty in (0, 1)),
    ("im2col", [floats(2, 3, 5), floats(2, 3, 20)], (), [2, 0, 1, 0, 3, 0, False, 0], {}, 0.0),
    *((n, [floats(4, 3, 5), floats(1, 3, 20)], (ty,), q, {}, 1e-6) for ty in ("F32", "F16")
      for n, q in (("conv_1d", [2, 2, 1]), ("conv_1d_ph", [1, 1]))),
    ("conv_1d", [floats(4, 3, 5), floats(2, 3, 20)], (), [1, 0, 1], {}, 1e-6),
    ("conv_1d_dw", [floats(3, 1, 5), floats(3, 20)], ("F16",), [1, 2, 1], {}, 1e-6),
    ("conv_1d_dw_ph", [floats(3, 1, 5), floats(3, 20)], ("F16",), [1, 1], {}, 1e-6),
    *(("conv_2d", [floats(4, 3, 3, 5), floats(2, 3, 9, 20)], (ty,), [2, 1, 1, 0, 1, 2], {}, limit)
      for ty, limit in (("F32", 1e-11), ("F16", 1e-6))),
    *((n, [floats(4, 3, 3, 5), floats(2, 3, 9, 20)], ("F16",), [], {}, 1e-6)
      for n in ("conv_2d_sk_p0", "conv_2d_s1_ph")),
    ("conv_2d_dw", [floats(3, 1, 3, 5), floats(2, 3, 9, 20)], ("F16",), [2, 1, 1, 0, 1, 2], {}, 1e-6),
    ("im2col_3d", [floats(6, 2, 3, 3), floats(6, 5, 6, 9)], (), [np.int64(3), 1, 2, *(np.int64(1),) * 7, 0], {}, 0.0),
    ("conv_3d", [floats(6, 2, 3, 3), floats(6, 5, 6, 9)], (), [np.int64(3), 1, 2, *(np.int64(1),) * 7], {}, 1e-11),
    *(("conv_2d_direct", [floats(17, 3, 3, 5), floats(2, 3, 9, 40)], (ty,), [2, 1, 1, 0, 1, 2], {}, 1e-6)
      for ty in ("F32", "F16")),
    ("conv_3d_direct", [floats(6, 2, 3, 3), floats(6, 5, 6, 9)], (), [1, 2, 1, 1, 1, 1, 1, 1, 1, 3, 2, 2], {}, 1e-11),
    *(("conv_transpose_1d", [floats(3, 5, 4), floats(3, 20)], (ty,), [3, 0, 1], {}, 1e-6) for ty in ("F32", "F16")),
    ("conv_transpose_2d_p0", [floats(3, 5, 3, 4), floats(2, 3, 6, 20)], ("F16",), [2], {}, 1e-6),
    ("conv_2d_dw_direct", [floats(5, 1, 3, 3), floats(2, 5, 9, 20)], (), [2, 1, 1, 0, 1, 2], {}, 1e-12),
    ("conv_2d_dw_direct", [floats(3, 3, 1, 40), floats(2, 9, 20, 40)], (), [2, 1, 1, 0, 1, 2],
     {0: (3, 2, 0, 1), 1: (2, 0, 1, 3)}, 1e-12),
    ("col2im_1d", [floats(20, 15)], (), [2, 5, 1], {}, 1e-12),
]
RECURRENT = [                                   # (name, (arrays, params), their types, NMSE)
    *(("ssm_conv", ([floats(2, 40, d - 1 + n), floats(40, d)], []), (), 1e-10) for d, n in ((4, 1), (3, 21), (9, 33))),
    ("ssm_scan", scan(16, 1, 24, 1, 7, 2, 16, 1), (), 1e-10), ("ssm_scan", scan(128, 16, 4, 2, 5, 2, 1, 1), (), 1e-10),
    ("ssm_scan", scan(32, 16, 4, 1, 6, 2, 1, 3), (), 1e-10),
    *(("rwkv_wkv6", ([*per_token(3, t, 3, 64), floats(3, 64), floats(t, 3, 64), floats(s, 64 * 64 * 3)], []), (), 1e-10)
      for t, s in ((1, 1), (6, 2))),
    ("gated_linear_attn", ([*per_token(4, 6, 3, 64), floats(2, 64 * 64 * 3)], [0.125]), (), 1e-10),
    ("rwkv_wkv7", ([*per_token(4, 6, 3, 64), *per_token(2, 6, 3, 64, lo=-0.02, hi=0.02), floats(2, 64 * 64 * 3)], []),
     (), 1e-10),
    *(("gated_delta_net", delta_net(*args), (), 1e-9) for args in (
        (64, 4, 5, 2, 2, False, 1), (32, 2, 3, 1, 1, True, 1), (32, 2, 6, 2, 1, False, 4))),
    ("solve_tri", ([floats(2, 3, 11, 11, lo=0.1), floats(2, 3, 11, 13)], [True, True, False]), (), 1e-9),
    ("out_prod", ([floats(2, 3, 17, 64), floats(2, 6, 17, 9)], []), (), 1e-10),
    ("out_prod", ([floats(2, 3, 17, 64), floats(2, 3, 17, 9)], []), ("Q8_0",), 1e-10),
    *(("mul_mat_id", experts(64, 33, 4, 2, nb, n), (ty,), 2e-7 if ty[0] == "Q" else 1e-10)
      for ty in ("F32", "F16", "Q8_0", "Q4_0") for nb, n in ((1, 1), (2, 5), (1, 40))),
    *(("lightning_indexer", ([floats(2, 3, 32, 128), floats(2, 65, 1, 128), floats(2, 1, 3, 32), floats(1, 1, 3, 65)],
                             []), (None, ty, None, "F16"), 1e-6) for ty in ("F32", "F16", "Q8_0")),
    *(("dsv4_hc_comb", ([floats(5, 24), floats(3), floats(24)], [1e-6, n]), (), 1e-9) for n in (1, 20)),
    ("dsv4_hc_pre", ([floats(5, 4, 100), floats(5, 4)], []), (), 1e-10),
    ("dsv4_hc_pre_gated", (per_token(2, 5, 4, 100, lo=-4, hi=4), [0.25]), (), 1e-10),
    ("dsv4_hc_post", ([floats(5, 100), floats(5, 4, 100), floats(5, 4), None], []), (), 1e-10),
    ("dsv4_hc_post", ([floats(5, 100), floats(5, 4, 100), floats(5, 4), floats(5, 4, 4)], []), (), 1e-10),
]
PEER += [(name, arrays, kinds, params, {}, limit) for name, (arrays, params), kinds, limit in RECURRENT]


@pytest.mark.parametrize("wheel", WHEELS)
@pytest.mark.parametrize("name,arrays,kinds,params,permuted,limit", PEER,
                         ids=[f"{i} {p[0]}" for i, p in enumerate(PEER)])
def test_against_ggml(name, arrays, kinds, params, permuted, limit, wheel):
    """The builder of the same name, with the same arguments, means the same thing, in each ggml that has it."""
    try:
        want = oracle.connect(wheel).op(name, arrays, types=kinds, params=params, permute=permuted)
    except Lacking as e:
        pytest.skip(str(e))
    ctx, sources = gg.Context(), []
    for i, a in enumerate(arrays):
        ty = getattr(gg, kinds[i]) if i < len(kinds) and kinds[i] else None
        t = None if a is None else gg.from_numpy(ctx, a, type=ty)
        sources.append(gg.permute(t, *permuted[i]) if i in permuted else t)
    if name.startswith("im2col"):
        params = [*params[:-1], (gg.F32, gg.F16)[params[-1]]]
    got = gg.compute(getattr(gg, name)(*sources, *params))
    assert got.size == want.size
    assert nmse(got.reshape(-1).astype(np.float64), want.reshape(-1).astype(np.float64)) <= limit


def test_hadamard_hint_agrees_with_the_real_product():
    """ggml computes the product with the matrix itself; the hint computes the transform."""
    n = 128
    h = np.ones((1, 1), np.float32)
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    h, x = np.float32(h / np.sqrt(n)), floats(3, 2, 5, n)
    want = oracle.connect().op("mul_mat", [np.broadcast_to(h, (3, 2, n, n)).copy(), x])
    ctx = gg.Context()
    y = gg.mul_mat(gg.from_numpy(ctx, h), gg.from_numpy(ctx, x))
    hinted = gg.mul_mat_set_prec(gg.mul_mat_set_hint(y, 1), 10)
    assert list(hinted.op_params[:2]) == [10, 1] and list(y.op_params[:2]) == [0, 0]
    assert nmse(gg.compute(hinted).astype(np.float64), want.astype(np.float64)) < 1e-10
