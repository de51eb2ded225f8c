"""Convolutions, pooling, windows, sorting, padding, gradients and other rarer ops, as in test_ops_small.py."""
import pathlib
import sys

import numpy as np
import pytest

import ggjit as gg
from ggjit.ops.record import OP
from ggjit.ops.spec import all_specs

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import oracle  # noqa: E402
from test_ops_small import fits, nmse, prepare, run  # noqa: E402

MINE = [OP.WIN_PART, OP.WIN_UNPART, OP.GET_REL_POS, OP.ADD_REL_POS, OP.TRI, OP.DIAG, OP.CUMSUM, OP.ACC, OP.SET,
        OP.ADD1, OP.ADD_ID, OP.COUNT_EQUAL, OP.REPEAT_BACK, OP.GET_ROWS_BACK, OP.SILU_BACK, OP.RMS_NORM_BACK,
        OP.SOFT_MAX_BACK, OP.POOL_1D, OP.POOL_2D, OP.POOL_2D_BACK, OP.PAD, OP.PAD_REFLECT_1D, OP.ROLL, OP.ARANGE,
        OP.TIMESTEP_EMBEDDING, OP.ARGSORT, OP.TOP_K, OP.CROSS_ENTROPY_LOSS, OP.CROSS_ENTROPY_LOSS_BACK,
        OP.OPT_STEP_ADAMW, OP.OPT_STEP_SGD, OP.UPSCALE, OP.IM2COL, OP.IM2COL_BACK, OP.IM2COL_3D]
CASES = [(op, c) for op in MINE for c in all_specs()[op].cases()]


@pytest.mark.parametrize("op,case", CASES, ids=[f"{op.name} {c.name}" for op, c in CASES])
def test_against_float64(op, case, monkeypatch):
    got, want, out = run(case)
    assert got.shape == want.shape
    error = nmse(got.astype(np.float64), want.astype(np.float64))
    assert error <= case.max_nmse, f"{out!r}: NMSE {error:.3g}"
    monkeypatch.setattr("ggjit.plan.TINY_NANOSECONDS", 0.0)
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
