"""Recurrences, experts, outer products, triangular solves, hyper-connections: float64 references and the real ggml."""
import numpy as np
import oracle
import pytest
from test_ops_small import nmse, run

import ggjit as gg
from ggjit.ops.record import OP
from ggjit.ops.spec import all_specs

MINE = [OP.SSM_CONV, OP.SSM_SCAN, OP.RWKV_WKV6, OP.GATED_LINEAR_ATTN, OP.RWKV_WKV7, OP.GATED_DELTA_NET, OP.SOLVE_TRI,
        OP.LIGHTNING_INDEXER, OP.DSV4_HC_COMB, OP.DSV4_HC_PRE, OP.DSV4_HC_POST, OP.OUT_PROD, OP.MUL_MAT_ID]
CASES = [(op, c) for op in MINE if op in all_specs() for c in all_specs()[op].cases()]


@pytest.mark.parametrize("op,case", CASES, ids=[f"{op.name} {c.name}" for op, c in CASES])
def test_against_float64(op, case, monkeypatch):
    got, want, out = run(case)
    assert got.shape == want.shape
    error = nmse(got.astype(np.float64), want.astype(np.float64))
    assert error <= case.max_nmse, f"{out!r}: NMSE {error:.3g}"
    monkeypatch.setattr("ggjit.plan.TINY_NANOSECONDS", 0.0)
    again, _, _ = run(case, 2)
    assert again.tobytes() == got.tobytes(), "two threads give other bytes than one"


# ---------------------------------------------------------------- the real ggml
R = np.random.default_rng(11)


def floats(*shape, lo=-1.0, hi=1.0):
    return R.uniform(lo, hi, shape).astype(np.float32)


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


PEER = [                                        # (name, (arrays, params), their types, NMSE)
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
    *(("out_prod", ([floats(2, 3, 17, 64), floats(2, 6, 17, 9)], []), (), 1e-10) for _ in "1"),
    ("out_prod", ([floats(2, 3, 17, 64), floats(2, 3, 17, 9)], []), ("Q8_0",), 1e-10),
    *(("mul_mat_id", experts(64, 33, 4, 2, nb, n), (ty,), 2e-7 if ty[0] == "Q" else 1e-10)
      for ty in ("F32", "F16", "Q8_0", "Q4_0") for nb, n in ((1, 1), (2, 5), (1, 40))),
    *(("lightning_indexer", ([floats(2, 3, 32, 128), floats(2, 65, 1, 128), floats(2, 1, 3, 32), floats(1, 1, 3, 65)],
                             []), (None, ty, None, "F16"), 1e-6) for ty in ("F32", "F16", "Q8_0")),
    *(("dsv4_hc_comb", ([floats(5, 24), floats(3), floats(24)], [1e-6, n]), (), 1e-9) for n in (1, 20)),
    ("dsv4_hc_pre", ([floats(5, 4, 100), floats(5, 4)], []), (), 1e-10),
    ("dsv4_hc_post", ([floats(5, 100), floats(5, 4, 100), floats(5, 4), floats(5, 4, 4)], []), (), 1e-10),
]


@pytest.mark.parametrize("name,args,kinds,limit", PEER, ids=[f"{i} {p[0]}" for i, p in enumerate(PEER)])
def test_against_ggml(name, args, kinds, limit):
    """The builder of the same name, with the same arguments, means the same thing."""
    arrays, params = args
    peer = oracle.connect("xllamacpp" if oracle.libraries("xllamacpp") else "pywhispercpp")
    if peer.wheel == "pywhispercpp" and name in ("ssm_scan", "gated_delta_net"):
        if params != [1]:
            pytest.skip(f"this wheel's ggml_{name} has no snapshots")
        want = peer.op(name, arrays, types=kinds)
    else:
        try:
            want = peer.op(name, arrays, types=kinds, params=params)
        except RuntimeError as e:
            if "AttributeError" not in str(e):
                raise
            pytest.skip(f"this wheel's ggml has no ggml_{name}")
    ctx = gg.Context()
    types = [getattr(gg, kinds[i]) if i < len(kinds) and kinds[i] else None for i in range(len(arrays))]
    sources = [gg.from_numpy(ctx, a, type=ty) for a, ty in zip(arrays, types, strict=True)]
    params = [p.item() if isinstance(p, np.int64) else p for p in params]
    got = gg.compute(getattr(gg, name)(*sources, *params))
    assert got.size == want.size
    assert nmse(got.reshape(-1).astype(np.float64), want.reshape(-1).astype(np.float64)) <= limit
