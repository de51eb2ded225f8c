"""Recurrences, experts, outer products, triangular solves, hyper-connections: float64 references and the real ggml."""
import re

import numpy as np
import pytest
from helpers import oracle
from helpers.cases import nmse, run

import ggjit as gg
from ggjit.ops.core.record import OP
from ggjit.ops.core.spec import all_specs

MINE = [OP.SSM_CONV, OP.SSM_SCAN, OP.RWKV_WKV6, OP.GATED_LINEAR_ATTN, OP.RWKV_WKV7, OP.GATED_DELTA_NET, OP.SOLVE_TRI,
        OP.LIGHTNING_INDEXER, OP.DSV4_HC_COMB, OP.DSV4_HC_PRE, OP.DSV4_HC_POST, OP.OUT_PROD, OP.MUL_MAT_ID]
CASES = [(op, c) for op in MINE if op in all_specs() for c in all_specs()[op].cases()]


@pytest.mark.parametrize("op,case", CASES, ids=[f"{op.name} {c.name}" for op, c in CASES])
def test_against_float64(op, case, monkeypatch):
    got, want, out = run(case)
    assert got.shape == want.shape
    error = nmse(got.astype(np.float64), want.astype(np.float64))
    assert error <= case.max_nmse, f"{out!r}: NMSE {error:.3g}"
    monkeypatch.setattr("ggjit.cpu.plan.TINY_NANOSECONDS", 0.0)
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
    sources = [None if a is None else gg.from_numpy(ctx, a, type=ty) for a, ty in zip(arrays, types, strict=True)]
    params = [p.item() if isinstance(p, np.int64) else p for p in params]
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


# ---------------------------------------------------------------- bad input
@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("n,bad", [(1, 4), (1, -1), (5, 2 ** 31 - 1), (40, -2 ** 31), (90, 4)])
def test_mul_mat_id_checks_ids_first(n, bad, n_threads, monkeypatch):
    """One token, few and many columns an expert: an error that names the id, and nothing written."""
    monkeypatch.setattr("ggjit.cpu.plan.TINY_NANOSECONDS", 0.0)
    arrays, _ = experts(64, 33, 4, 2, 1, n)
    arrays[2][n // 2, 1] = bad
    ctx, backend = gg.Context(), gg.init_backend(f"CPU:n_threads={n_threads}")
    out = gg.mul_mat_id(*(gg.from_numpy(ctx, a) for a in arrays))
    graph = gg.Graph(out)
    allocator = gg.GraphAllocator(backend)
    allocator.alloc_graph(graph)
    plan = backend.graph_plan_create(graph)
    buffer, offs = allocator.placement(out)
    memory = buffer.arena[offs:offs + out.nbytes]
    memory[:] = 0x55
    for _ in range(3):                                  # a failed run leaves the pool usable
        with pytest.raises(gg.IndexRangeError, match=f"index {bad} is out of range"):
            plan.compute()
    assert (memory == 0x55).all()


@pytest.mark.parametrize("bad", [-1, 3])
def test_ssm_scan_checks_ids(bad):
    arrays, _ = scan(16, 1, 8, 1, 3, 2, 16, 1)
    arrays[-1][1] = bad
    ctx = gg.Context()
    with pytest.raises(gg.IndexRangeError, match=f"index {bad} is out of range"):
        gg.compute(gg.ssm_scan(*(gg.from_numpy(ctx, a) for a in arrays)))


def _t(type, *ne):
    return gg.Context().new_tensor(type, ne)


def _f(*ne):
    return _t(gg.F32, *ne)


def _scan(keep=1, **changed):
    t = dict(s=_f(16, 2, 4, 3), x=_f(2, 4, 5, 3), dt=_f(4, 5, 3), A=_f(1, 4), B=_f(16, 2, 5, 3), C=_f(16, 2, 5, 3),
             ids=_t(gg.I32, 3))
    return gg.ssm_scan(*{**t, **changed}.values(), keep)


def _delta(keep=1, **changed):
    t = dict(q=_f(8, 2, 5, 3), k=_f(8, 2, 5, 3), v=_f(8, 4, 5, 3), g=_f(1, 4, 5, 3), beta=_f(1, 4, 5, 3),
             state=_f(8, 8, 4, 3))
    return gg.gated_delta_net(*{**t, **changed}.values(), keep)


BAD = {
    "ssm_conv channels": lambda: gg.ssm_conv(_f(10, 4), _f(4, 5)),
    "ssm_conv short": lambda: gg.ssm_conv(_f(2, 4), _f(4, 4)),
    "ssm_conv type": lambda: gg.ssm_conv(_f(10, 4), _t(gg.F16, 4, 4)),
    "ssm_scan dt": lambda: _scan(dt=_f(4, 5, 2)),
    "ssm_scan A": lambda: _scan(A=_f(2, 4)),
    "ssm_scan groups": lambda: _scan(B=_f(16, 3, 5, 3), C=_f(16, 3, 5, 3)),
    "ssm_scan ids": lambda: _scan(ids=_t(gg.I64, 3)),
    "ssm_scan snapshots": lambda: _scan(keep=0),
    "ssm_scan mamba-1 snapshots": lambda: _scan(keep=2, A=_f(16, 4)),
    "wkv6 tokens": lambda: gg.rwkv_wkv6(*(_f(8, 2, 3) for _ in range(3)), _f(8, 2), _f(8, 2, 3), _f(128, 2)),
    "wkv6 bonus": lambda: gg.rwkv_wkv6(*(_f(8, 2, 4) for _ in range(3)), _f(8, 3), _f(8, 2, 4), _f(128, 2)),
    "wkv7 state": lambda: gg.rwkv_wkv7(*(_f(8, 2, 4) for _ in range(6)), _f(100, 2)),
    "gla type": lambda: gg.gated_linear_attn(*(_f(8, 2, 4) for _ in range(4)), _t(gg.F16, 128, 2), 1.0),
    "delta net q": lambda: _delta(q=_f(9, 2, 5, 3)),
    "delta net sequences": lambda: _delta(k=_f(8, 2, 5, 2)),
    "delta net gate": lambda: _delta(g=_f(2, 4, 5, 3)),
    "delta net snapshots": lambda: _delta(keep=-1),
    "solve_tri square": lambda: gg.solve_tri(_f(4, 5), _f(2, 5), True, True, False),
    "solve_tri rows": lambda: gg.solve_tri(_f(4, 4), _f(2, 5), True, True, False),
    "solve_tri right": lambda: gg.solve_tri(_f(4, 4), _f(2, 4), False, True, False),
    "indexer mask": lambda: gg.lightning_indexer(_f(8, 4, 3), _f(8, 1, 9), _f(4, 3), _t(gg.F16, 8, 3)),
    "indexer mask type": lambda: gg.lightning_indexer(_f(8, 4, 3), _f(8, 1, 9), _f(4, 3), _f(9, 3)),
    "hc_comb streams": lambda: gg.dsv4_hc_comb(_f(20, 3), _f(3), _f(24), 1e-6, 4),
    "hc_comb iterations": lambda: gg.dsv4_hc_comb(_f(24, 3), _f(3), _f(24), 1e-6, 0),
    "hc_pre": lambda: gg.dsv4_hc_pre(_f(8, 4, 3), _f(3, 4)),
    "hc_post": lambda: gg.dsv4_hc_post(_f(8, 3), _f(8, 4, 3), _f(4, 3), _f(4, 3, 3)),
    "out_prod": lambda: gg.out_prod(_f(8, 3), _f(8, 4)),
    "out_prod type": lambda: gg.out_prod(_f(8, 3), _t(gg.F16, 8, 3)),
    "mul_mat_id ids": lambda: gg.mul_mat_id(_f(8, 3, 4), _f(8, 1, 5), _t(gg.I32, 2, 4)),
    "mul_mat_id slots": lambda: gg.mul_mat_id(_f(8, 3, 4), _f(8, 2, 5), _t(gg.I32, 3, 5)),
    "mul_mat_id width": lambda: gg.mul_mat_id(_f(8, 3, 4), _f(9, 1, 5), _t(gg.I32, 2, 5)),
    "mul_mat_id id type": lambda: gg.mul_mat_id(_f(8, 3, 4), _f(8, 1, 5), _f(2, 5)),
    "hint number": lambda: gg.mul_mat_set_hint(gg.mul_mat(_f(8, 8), _f(8, 5)), 2),
    "hint size": lambda: gg.mul_mat_set_hint(gg.mul_mat(_f(12, 12), _f(12, 5)), 1),
    "hint op": lambda: gg.mul_mat_set_hint(_f(8, 8), 1),
    "prec": lambda: gg.mul_mat_set_prec(gg.mul_mat(_f(8, 8), _f(8, 5)), 3),
    "flash_attn_back": lambda: gg.flash_attn_back(_f(8, 4), _f(8, 4), _f(4, 8), _f(8, 4), True),
}
SAYS = {                                # words of each error
    "ssm_conv channels": "ssm_conv: sx and c differ in d_inner",
    "ssm_conv short": "ssm_conv: rows of sx must hold d_conv - 1", "ssm_conv type": "ssm_conv: c",
    "ssm_scan dt": "ssm_scan: dt must be [n_head, n_t, n_s]",
    "ssm_scan A": "ssm_scan: A must be [1 or d_state, n_head]",
    "ssm_scan groups": "ssm_scan: n_group must divide n_head", "ssm_scan ids": "ssm_scan: ids",
    "ssm_scan snapshots": "ssm_scan: K, the number of snapshots, must",
    "ssm_scan mamba-1 snapshots": "ssm_scan: K = 2 snapshots need Mamba-2's A",
    "wkv6 tokens": "rwkv_wkv6: n_tokens must be a multiple of",
    "wkv6 bonus": "rwkv_wkv6: the bonus must hold S H values",
    "wkv7 state": "rwkv_wkv7: state must be [S S H, n_seqs]", "gla type": "gated_linear_attn: source",
    "delta net q": "gated_delta_net: q and k must be [S_v, heads, n_t,",
    "delta net sequences": "gated_delta_net: q and k must be [S_v, heads, n_t,",
    "delta net gate": "gated_delta_net: g must be [1 or S_v, H, n_t, n_s]",
    "delta net snapshots": "gated_delta_net: K, the number of snapshots, must",
    "solve_tri square": "solve_tri: a must be square", "solve_tri rows": "solve_tri: b must be [k, n, ne2, ne3] for a",
    "solve_tri right": "solve_tri: only left (a X = b) is served",
    "indexer mask": "lightning_indexer: mask must be [n_kv, n_batch, 1,",
    "indexer mask type": "lightning_indexer: mask",
    "hc_comb streams": "dsv4_hc_comb: mixes must be [24, t] (4 streams)",
    "hc_comb iterations": "dsv4_hc_comb: n_iter must be a whole number",
    "hc_pre": "dsv4_hc_pre: weights must be [n_hc, t] for x", "hc_post": "dsv4_hc_post: shapes must be [n_embd, t],",
    "out_prod": "out_prod: a and b differ in the summed", "out_prod type": "out_prod: b",
    "mul_mat_id ids": "mul_mat_id: ids must have a row per token,",
    "mul_mat_id slots": "mul_mat_id: b.ne[1] must divide the slots,",
    "mul_mat_id width": "mul_mat_id: rows of as and b differ in length", "mul_mat_id id type": "mul_mat_id: ids",
    "hint number": "mul_mat_set_hint: hint must be 0 (none) or 1",
    "hint size": "mul_mat_set_hint: a Hadamard matrix is [n, n] with",
    "hint op": "mul_mat_set_hint: expected the result of mul_mat",
    "prec": "mul_mat_set_prec: prec must be 0 (default) or 10",
    "flash_attn_back": "flash_attn_back: ggml's own constructor aborts, so",
}


@pytest.mark.parametrize("what", BAD)
def test_builders_refuse(what):
    errors = gg.ShapeError, gg.TypeMismatch, gg.ParamError, gg.NotSupported
    with pytest.raises(errors, match=re.escape(SAYS[what])) as e:
        BAD[what]()
    assert len(str(e.value)) > 20


def test_good_defaults_build():
    """The tensors that BAD changes one by one fit together."""
    assert _scan().ne == (2 * 4 * 5 * 3 + 16 * 2 * 4 * 3, 1, 1, 1) and _delta(2).ne == (32, 15 + 2 * 8 * 3, 1, 1)


def test_empty():
    ctx = gg.Context()
    x = gg.from_numpy(ctx, np.zeros((1, 4, 3), np.float32))
    assert gg.compute(gg.ssm_conv(x, gg.from_numpy(ctx, np.ones((4, 4), np.float32)))).size == 0
    state = gg.from_numpy(ctx, floats(1, 4, 8, 8))
    none = [gg.from_numpy(ctx, np.zeros((1, 0, 4, n), np.float32)) for n in (8, 8, 8, 1, 1)]
    out = gg.compute(gg.gated_delta_net(*none, state, 1))
    assert (out.ravel() == state.numpy().ravel()).all(), "no tokens: the state stays"
    ids = gg.from_numpy(ctx, np.zeros((0, 2), np.int32))
    y = gg.mul_mat_id(gg.from_numpy(ctx, floats(4, 3, 8)), gg.from_numpy(ctx, np.zeros((0, 1, 8), np.float32)), ids)
    assert gg.compute(y).size == 0
