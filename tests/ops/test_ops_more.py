"""Convolutions, pooling, windows, sorting, padding, gradients and other rarer ops, as in test_ops_small.py."""
import re

import numpy as np
import pytest
from helpers import oracle
from helpers.cases import fits, nmse, prepare, run

import ggjit as gg
from ggjit.ops.core.record import OP
from ggjit.ops.core.spec import all_specs

MINE = [OP.WIN_PART, OP.WIN_UNPART, OP.GET_REL_POS, OP.ADD_REL_POS, OP.TRI, OP.DIAG, OP.CUMSUM, OP.ACC, OP.SET,
        OP.ADD1, OP.ADD_ID, OP.COUNT_EQUAL, OP.REPEAT_BACK, OP.GET_ROWS_BACK, OP.SILU_BACK, OP.RMS_NORM_BACK,
        OP.SOFT_MAX_BACK, OP.POOL_1D, OP.POOL_2D, OP.POOL_2D_BACK, OP.PAD, OP.PAD_REFLECT_1D, OP.ROLL, OP.ARANGE,
        OP.TIMESTEP_EMBEDDING, OP.ARGSORT, OP.TOP_K, OP.CROSS_ENTROPY_LOSS, OP.CROSS_ENTROPY_LOSS_BACK,
        OP.OPT_STEP_ADAMW, OP.OPT_STEP_SGD, OP.UPSCALE, OP.IM2COL, OP.IM2COL_BACK, OP.IM2COL_3D, OP.CONV_2D, OP.CONV_3D,
        OP.CONV_TRANSPOSE_1D, OP.CONV_TRANSPOSE_2D, OP.CONV_2D_DW, OP.COL2IM_1D]
CASES = [(op, c) for op in MINE for c in all_specs()[op].cases()]


@pytest.mark.parametrize("op,case", CASES, ids=[f"{op.name} {c.name}" for op, c in CASES])
def test_against_float64(op, case, monkeypatch):
    got, want, out = run(case)
    assert got.shape == want.shape
    error = nmse(got.astype(np.float64), want.astype(np.float64))
    assert error <= case.max_nmse, f"{out!r}: NMSE {error:.3g}"
    monkeypatch.setattr("ggjit.cpu.plan.TINY_NANOSECONDS", 0.0)
    again, _, _ = run(case, 2)
    assert again.tobytes() == got.tobytes(), "two threads give other bytes than one"


@pytest.mark.parametrize("op", [op for op in MINE if all_specs()[op].in_place], ids=lambda op: op.name)
def test_written_over_a_source(op):
    """The allocator may give a node its source's memory: the same bytes come out."""
    tried = 0
    for case in all_specs()[op].cases():
        out = prepare(case)[2]
        for i in [i for i, s in enumerate(out.src) if fits(out, s)][:2]:
            tried += 1
            assert run(case, over=i)[0].tobytes() == run(case)[0].tobytes(), (case.name, i)
        if tried > 8:
            break
    assert tried


# ---------------------------------------------------------------- the real ggml
R = np.random.default_rng(6)


def floats(*shape, lo=-1.0, hi=1.0):
    return R.uniform(lo, hi, shape).astype(np.float32)


PEER = [                                        # (name, arrays, their types, params, permuted sources, NMSE)
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


@pytest.mark.parametrize("name,arrays,kinds,params,permuted,limit", PEER,
                         ids=[f"{i} {p[0]}" for i, p in enumerate(PEER)])
def test_against_ggml(name, arrays, kinds, params, permuted, limit):
    """The builder of the same name, with the same arguments, means the same thing."""
    peer = oracle.connect("xllamacpp" if oracle.libraries("xllamacpp") else "pywhispercpp")
    try:
        want = peer.op(name, arrays, types=kinds, params=params, permute=permuted)
    except RuntimeError as e:
        if "AttributeError" not in str(e):
            raise
        pytest.skip(f"this wheel's ggml has no ggml_{name}")
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


# ---------------------------------------------------------------- composites
def test_conv_1d_and_2d_with_exact_patches():
    """dst_type=F32 keeps the data as they are: float64 agreement far below what ggml's F16 patches allow."""
    ctx, a, b = gg.Context(), floats(4, 3, 5), floats(1, 3, 20)
    want = np.stack([[sum(np.dot(a[o, c], np.pad(b[0, c], 2)[2 * i:2 * i + 5]) for c in range(3))
                      for i in range(10)] for o in range(4)])
    got = gg.compute(gg.conv_1d(gg.from_numpy(ctx, a), gg.from_numpy(ctx, b), 2, 2, 1, gg.F32))
    assert nmse(got.reshape(want.shape).astype(np.float64), want) < 1e-12
    a2, b2 = (gg.from_numpy(ctx, x) for x in (floats(4, 3, 3, 5), floats(2, 3, 9, 20)))
    exact = gg.compute(gg.conv_2d_direct(a2, b2, 2, 1, 1, 0, 1, 2)).astype(np.float64)
    got = gg.compute(gg.conv_2d(a2, b2, 2, 1, 1, 0, 1, 2, gg.F32))
    assert nmse(got.reshape(exact.shape).astype(np.float64), exact) < 1e-12


# ---------------------------------------------------------------- bad input
@pytest.mark.parametrize("bad", [-1, 4, 2 ** 31 - 1, -2 ** 31])
def test_ids_are_checked(bad):
    ctx = gg.Context()
    ids = gg.from_numpy(ctx, np.int32([[0], [bad], [3]]))
    with pytest.raises(gg.IndexRangeError, match=f"index {bad} is out of range"):
        gg.compute(gg.add_id(gg.from_numpy(ctx, floats(3, 1, 8)), gg.from_numpy(ctx, floats(4, 8)), ids))
    ids = gg.from_numpy(ctx, np.int32([0, bad, 3]))
    with pytest.raises(gg.IndexRangeError, match=f"index {bad} is out of range"):
        gg.compute(gg.get_rows_back(gg.from_numpy(ctx, floats(3, 8)), ids, gg.from_numpy(ctx, floats(4, 8))))


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("mode,in_place", [(0, False), (2, True), (8, False), (40, True)])
def test_rope_refuses_positions_beyond_float32(mode, in_place, n_threads, monkeypatch):
    """Named with node and value, nothing written, and the plan goes on with good ids; 2^24 and negatives are."""
    monkeypatch.setattr("ggjit.cpu.plan.TINY_NANOSECONDS", 0.0)
    ctx, backend = gg.Context(), gg.init_backend(f"CPU:n_threads={n_threads}")
    x, ids = floats(9, 3, 16), np.arange(9 * (4 if mode & 8 else 1), dtype=np.int32)
    a, pos = gg.from_numpy(ctx, x.copy(), "a"), gg.from_numpy(ctx, ids, "positions")
    rest = (0, 10000.0, 1.0, 0.0, 1.0, 0.0, 0.0)
    name = ("rope_multi" if mode & 8 else "rope_ext") + "_inplace" * in_place
    turned = getattr(gg, name)(a, pos, None, 16, *[(3, 3, 2, 0)] * (mode & 8 > 0), mode, *rest)
    y = gg.set_name(turned, "turned")
    graph = gg.Graph(y)
    gg.GraphAllocator(backend).alloc_graph(graph)
    plan = backend.graph_plan_create(graph)
    buffer, offs = plan.where(y)
    memory = buffer.arena[offs:offs + y.nbytes]
    before = memory.copy()
    for bad in (2 ** 24 + 1, -2 ** 24 - 1, 2 ** 31 - 1, -2 ** 31):
        ids[-2] = bad
        with pytest.raises(gg.IndexRangeError, match=f"turned.*index {bad} is out of range for.*positions"):
            plan.compute()
        assert memory.tobytes() == before.tobytes()
    ids[-2], ids[1] = 2 ** 24, -5
    plan.compute()
    want, near = all_specs()[OP.ROPE].reference(y, x[None], ids), np.arange(9) != 7     # float32 angles are off at 2^24
    assert nmse(plan.numpy(y)[near].astype(np.float64), want[0, near]) < 1e-7


def _t(*ne, type=gg.F32):
    return gg.Context().new_tensor(type, ne)


HUGE = 2 ** 31
BAD = {
    "win_part": lambda: gg.win_part(_t(4, 5, 5), 0), "win_unpart": lambda: gg.win_unpart(_t(4, 2, 2, 3), 5, 5, 2),
    "get_rel_pos": lambda: gg.get_rel_pos(_t(4, 6, type=gg.F16), 3, 3), "add_rel_pos": lambda: gg.add_rel_pos(
        _t(9, 4, 2), _t(3, 2, 2, 1), _t(3, 2, 2, 1)),
    "tri": lambda: gg.tri(_t(4, 5), 0), "tri type": lambda: gg.tri(_t(4, 4), 4), "diag": lambda: gg.diag(_t(4, 2)),
    "acc": lambda: gg.acc(_t(4, 4), _t(4), 16, 64, 64, 64), "set": lambda: gg.set_1d(_t(8), _t(8), 4),
    "set negative": lambda: gg.set_1d(_t(8), _t(2), -4), "set types": lambda: gg.set_1d(_t(8), _t(2, type=gg.I32), 0),
    "set huge": lambda: gg.set(_t(8, 8), _t(2, 2), HUGE, 0, 0, 0),
    "add1": lambda: gg.add1(_t(8), _t(2)), "add_id": lambda: gg.add_id(_t(8, 2, 3), _t(8, 4), _t(2, 2, type=gg.I32)),
    "count_equal": lambda: gg.count_equal(_t(8, type=gg.I32), _t(9, type=gg.I32)),
    "repeat_back": lambda: gg.repeat_back(_t(8), _t(3)), "get_rows_back": lambda: gg.get_rows_back(
        _t(8, 3), _t(4, type=gg.I32), _t(8, 4)),
    "silu_back": lambda: gg.silu_back(_t(8), _t(9)), "rms_norm_back": lambda: gg.rms_norm_back(_t(8), _t(8), -1.0),
    "soft_max_back": lambda: gg.soft_max_ext_back(_t(8), _t(8), 1.0, 8.0),
    "pool k": lambda: gg.pool_1d(_t(8), 0, 9, 1, 0), "pool op": lambda: gg.pool_1d(_t(8), 2, 1, 1, 0),
    "pool s": lambda: gg.pool_2d(_t(8, 8), 0, 2, 2, 0, 1, 0, 0), "pool p": lambda: gg.pool_2d(
        _t(8, 8), 0, 2, 2, 1, 1, float("nan"), 0),
    "pool back": lambda: gg.pool_2d_back(_t(8, 8), _t(8, 8), 0, 2, 2, 1, 1, 0, 0),
    "pad": lambda: gg.pad(_t(8), -1, 0, 0, 0), "pad huge": lambda: gg.pad(_t(8), HUGE, 0, 0, 0),
    "pad reflect": lambda: gg.pad_reflect_1d(_t(8), 8, 0), "roll": lambda: gg.roll(_t(8), 8, 0, 0, 0),
    "arange": lambda: gg.arange(gg.Context(), 3, 3, 1), "arange step": lambda: gg.arange(gg.Context(), 0, 3, 0),
    "arange nan": lambda: gg.arange(gg.Context(), 0, float("nan"), 1),
    "timestep": lambda: gg.timestep_embedding(_t(3), 0, 100), "argsort": lambda: gg.argsort(_t(3), 2),
    "top_k": lambda: gg.top_k(_t(3), 4), "argsort_top_k": lambda: gg.argsort_top_k(_t(3), 4),
    "upscale mode": lambda: gg.upscale(_t(3, 3), 2, 3), "upscale antialias": lambda: gg.interpolate(
        _t(3, 3), 2, 2, 1, 1, 0x202),
    "cross_entropy": lambda: gg.cross_entropy_loss(_t(3), _t(4)), "adamw": lambda: gg.opt_step_adamw(
        _t(3), _t(3), _t(3), _t(3), _t(7)),
    "im2col channels": lambda: gg.im2col(_t(3, 3, 2), _t(9, 9, 3), 1, 1, 0, 0, 1, 1, True, gg.F32),
    "im2col type": lambda: gg.im2col(_t(3, 3, 2), _t(9, 9, 2), 1, 1, 0, 0, 1, 1, True, gg.I32),
    "conv stride": lambda: gg.conv_1d(_t(3, 2, 4), _t(9, 2), 0, 0, 1), "conv padding": lambda: gg.conv_2d_direct(
        _t(3, 3, 2, 1), _t(9, 9, 2), 1, 1, -1, 0, 1, 1),
    "conv dilation": lambda: gg.conv_2d_direct(_t(3, 3, 2, 1), _t(9, 9, 2), 1, 1, 0, 0, 5, 1),
    "conv huge": lambda: gg.conv_2d_direct(_t(3, 3, 2, 1), _t(9, 9, 2), 1, 1, HUGE, 0, 1, 1),
    "conv 3d": lambda: gg.conv_3d_direct(_t(3, 3, 3, 5), _t(9, 9, 9, 2), 1, 1, 1, 0, 0, 0, 1, 1, 1, 2, 1, 2),
    "conv transpose": lambda: gg.conv_transpose_1d(_t(3, 2, 4), _t(9, 4), 1, 1, 1),
    "conv dw": lambda: gg.conv_2d_dw_direct(_t(3, 3, 1, 4), _t(9, 9, 3), 1, 1, 0, 0, 1, 1),
    "col2im": lambda: gg.col2im_1d(_t(9, 4), 1, 2, 0), "col2im p": lambda: gg.col2im_1d(_t(8, 4), 1, 2, 4),
}
SAYS = {                                # words of each error
    "win_part": "win_part: window must be a whole number",
    "win_unpart": "win_unpart: a picture of 5 x 5 has 9 windows",
    "get_rel_pos": "get_rel_pos: the table must be [C, 2 * 3 - 1]",
    "add_rel_pos": "add_rel_pos: a must be [pw.ne0 ^ 2, pw.ne1 *", "tri": "tri: the matrices must be square",
    "tri type": "tri: type must be a whole number from", "diag": "diag: the source must have ne1 == 1",
    "acc": "acc: the window ends at byte 80,", "set": "set: the window ends at byte 36,",
    "set negative": "set: offset must be a whole number", "set types": "set: a and b must have one type",
    "set huge": "set: nb1 must be a whole number from 0", "add1": "add1: b must be one element",
    "add_id": "add_id: ids must be [a.ne1, a.ne2]", "count_equal": "count_equal: a and b must have one shape",
    "repeat_back": "repeat_back: b must tile a", "get_rows_back": "get_rows_back: ids must be a row of at most a.ne1",
    "silu_back": "silu_back: both sources must have one shape",
    "rms_norm_back": "rms_norm_back: eps must not be negative",
    "soft_max_back": "soft_max_ext_back: max_bias must be 0 (as on ggml's",
    "pool k": "pool_1d: a window of 9 does not fit into 8", "pool op": "pool_1d: op must be a whole number from 0",
    "pool s": "pool_2d: s0 must be a whole number from 1", "pool p": "pool_2d: padding must be from 0 to 2^24",
    "pool back": "pool_2d_back: the gradient must be [7, 7, 1, 1]", "pad": "pad: rp0 must be a whole number from 0",
    "pad huge": "pad: rp0 must be a whole number from 0",
    "pad reflect": "pad_reflect_1d: p0 = 8 and p1 = 0 must be below", "roll": "roll: shift0 must be a whole number",
    "arange": "arange: from 3.0 to 3.0 by 1.0 is no", "arange step": "arange: from 0.0 to 3.0 by 0.0 is no",
    "arange nan": "arange: from 0.0 to nan by 1.0 is no", "timestep": "dim must be a whole number from 1",
    "argsort": "argsort: order must be a whole number from", "top_k": "top_k: k must be a whole number from 1",
    "argsort_top_k": "argsort_top_k: k must be a whole number from 0",
    "upscale mode": "interpolate: mode 0x3 is none of 0, 1, 2, +",
    "upscale antialias": "interpolate: mode 0x202 is none of 0, 1, 2, +",
    "cross_entropy": "logits and labels must have one", "adamw": "opt_step_adamw: the weights must be marked as a",
    "im2col channels": "im2col: kernel and data [9, 9, 3, 1]", "im2col type": "im2col: dst_type must be one of (F32,",
    "conv stride": "im2col: s0 must be a whole number from 1",
    "conv padding": "conv_2d_direct: p0 must be a whole number from 0",
    "conv dilation": "conv_2d_direct: a kernel of 3 with dilation 5",
    "conv huge": "conv_2d_direct: p0 must be a whole number from 0",
    "conv 3d": "conv_3d_direct: ne3 of the kernel must be 2 * 2,",
    "conv transpose": "conv_transpose_1d: p0 must be 0 and d0 must be 1",
    "conv dw": "conv_2d_dw_direct: the kernel must be [KW, KH, 1, C]",
    "col2im": "col2im_1d: the source must be a matrix [K *", "col2im p": "col2im_1d: padding of 4 leaves nothing of 7",
}


@pytest.mark.parametrize("what", BAD)
def test_builders_refuse(what):
    errors = gg.ShapeError, gg.TypeMismatch, gg.ParamError, gg.IndexRangeError
    with pytest.raises(errors, match=re.escape(SAYS[what])) as e:
        BAD[what]()
    assert len(str(e.value)) > 20


def test_extreme_params_that_are_valid():
    """Sizes from whole-number arithmetic that would overflow 32 bits on the way."""
    ctx = gg.Context()
    x = gg.from_numpy(ctx, floats(1, 1, 5, 7))
    k = gg.from_numpy(ctx, floats(1, 1, 1, 1))
    big = 2 ** 31 - 1
    y = gg.compute(gg.conv_2d_direct(k, x, big, big, 2 ** 30, 2 ** 30, big, big))
    assert y.size == 4 and not y.any()
    assert gg.compute(gg.pool_1d(x, 1, 1, big, 0)).shape[-1] == 1
    two = gg.from_numpy(ctx, floats(1, 1, 2)), gg.from_numpy(ctx, floats(1, 1))
    assert gg.compute(gg.conv_transpose_1d(*two, big, 0, 1)).size == 2
