"""Elementwise ops, norms, softmax, rope, rows, copies and reductions against their float64 references.

Outputs lie between sentinel bytes in poisoned memory; every case runs on one thread and with its work split in two.
"""
import re

import numpy as np
import pytest
from helpers import oracle
from helpers.cases import fits, nmse, prepare, run

import ggjit as gg
from ggjit.ops.core.record import OP
from ggjit.ops.core.spec import all_specs

MINE = [OP.ADD, OP.SUB, OP.MUL, OP.DIV, OP.UNARY, OP.SQR, OP.SQRT, OP.LOG, OP.SIN, OP.COS, OP.LEAKY_RELU, OP.SCALE,
        OP.CLAMP, OP.FILL, OP.GLU, OP.NORM, OP.RMS_NORM, OP.L2_NORM, OP.GROUP_NORM, OP.SOFT_MAX, OP.ROPE, OP.ROPE_BACK,
        OP.GET_ROWS, OP.SET_ROWS, OP.CPY, OP.CONT, OP.DUP, OP.SUM, OP.SUM_ROWS, OP.MEAN, OP.ARGMAX, OP.REPEAT,
        OP.CONCAT, OP.DIAG_MASK_INF, OP.DIAG_MASK_ZERO]
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


@pytest.mark.parametrize("op", [op for op in MINE if all_specs()[op].in_place], ids=lambda op: op.name)
def test_written_over_a_source(op):
    """The allocator may give a node its source's memory: the same bytes come out."""
    tried = 0
    for case in all_specs()[op].cases():
        out = prepare(case)[2]
        over = [i for i, s in enumerate(out.src) if fits(out, s)]
        for i in over[:2]:
            tried += 1
            assert run(case, over=i)[0].tobytes() == run(case)[0].tobytes(), (case.name, i)
        if tried > 12:
            break
    assert tried


# ---------------------------------------------------------------- the real ggml
R = np.random.default_rng(5)


def floats(*shape, lo=-3.0, hi=3.0):
    return R.uniform(lo, hi, shape).astype(np.float32)


HEADS, POSITIONS = floats(2, 5, 3, 64), np.arange(5, dtype=np.int32) * 37
YARN = [10000.0, 0.7, 0.6, 1.3, 32.0, 1.0]
UNARY_NAMES = ["abs", "sgn", "neg", "step", "tanh", "elu", "relu", "sigmoid", "gelu", "gelu_quick", "silu", "hardswish",
               "hardsigmoid", "exp", "gelu_erf", "sqr", "sin", "cos", "softplus", "expm1", "floor", "ceil", "round",
               "trunc"]
TABLES = {"gelu": 5e-7, "gelu_quick": 5e-7}      # ggml's float16 tables are off by this much
PEER = [                                        # (name, arrays, their types, params, permuted sources, NMSE)
    *((n, [floats(3, 4, 5, 35)], (), [], {}, TABLES.get(n, 1e-7)) for n in UNARY_NAMES),
    *((n, [floats(2, 4, 5, 35), floats(1, 4, 1, 35, lo=0.5)], (), [], {}, 1e-7) for n in ("add", "sub", "mul", "div")),
    ("sqrt", [floats(7, 35, lo=0.0)], (), [], {}, 1e-7), ("log", [floats(7, 35, lo=0.1)], (), [], {}, 1e-7),
    ("leaky_relu", [floats(7, 35)], (), [0.1, False], {}, 1e-7),
    ("scale", [floats(7, 35)], (), [2.5], {}, 1e-7), ("scale_bias", [floats(7, 35)], (), [2.5, -1.0], {}, 1e-7),
    ("clamp", [floats(7, 35)], (), [-0.5, 0.7], {}, 1e-7),
    ("norm", [floats(3, 4, 35)], (), [1e-5], {}, 1e-7), ("rms_norm", [floats(3, 4, 35)], (), [1e-5], {}, 1e-7),
    ("l2_norm", [floats(3, 4, 35)], (), [1e-5], {}, 1e-7),
    ("group_norm", [floats(2, 6, 4, 5)], (), [4, 1e-5], {}, 1e-7),
    *((n, [floats(7, 36)], (), [], {}, 1e-6) for n in ("reglu", "geglu", "swiglu", "geglu_erf", "geglu_quick",
                                                       "swiglu_swapped")),
    ("swiglu_split", [floats(7, 35), floats(7, 35)], (), [], {}, 1e-7),
    ("swiglu_oai", [floats(7, 35), floats(7, 35)], (), [1.7, 2.0], {}, 1e-7),
    ("soft_max", [floats(2, 3, 4, 35)], (), [], {}, 1e-6),
    *(("soft_max_ext", [floats(2, 6, 4, 35), floats(1, 1, 4, 35)], (None, ty), [0.3, bias], {}, 1e-6)
      for ty in ("F32", "F16") for bias in (0.0, 8.0)),
    *(("rope_ext", [HEADS, POSITIONS, c], (), [40, mode, 512, *f], {}, 1e-7) for mode in (0, 2)
      for c, f in ((None, [10000.0, 1.0, 0.0, 1.0, 0.0, 0.0]), (floats(20, lo=0.9, hi=1.1), YARN))),
    *(("get_rows", [floats(5, 64), np.int32([4, 0, 0, 3])], (ty,), [], {}, 1e-7)
      for ty in ("F32", "F16", "Q8_0", "Q4_0")),
    ("set_rows", [floats(5, 64), floats(2, 64), np.int64([3, 1])], ("F16",), [], {}, 1e-7),
    *((n, [floats(2, 17, 18, 35)], (), [], {0: axes}, 0.0) for n in ("cont", "dup")
      for axes in ((0, 2, 1, 3), (1, 0, 2, 3), (2, 0, 3, 1))),
    ("cpy", [floats(2, 17, 18, 35), floats(2, 17, 35, 18)], (None, "F16"), [], {0: (1, 0, 2, 3)}, 1e-7),
    *((n, [floats(3, 4, 35)], (), [], {}, 1e-7) for n in ("sum", "sum_rows", "mean")),
    ("argmax", [np.float32(R.integers(0, 9, (7, 35)))], (), [], {}, 0.0),
    ("repeat", [floats(2, 1, 5), floats(4, 3, 10)], (), [], {}, 0.0),
    ("concat", [floats(2, 3, 5), floats(2, 4, 5)], (), [1], {}, 0.0),
    ("diag_mask_inf", [floats(2, 7, 9)], (), [2], {}, 0.0), ("diag_mask_zero", [floats(2, 7, 9)], (), [2], {}, 0.0),
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
    got = gg.compute(getattr(gg, name)(*sources, *params))
    assert got.size == want.size
    assert nmse(got.reshape(-1).astype(np.float64), want.reshape(-1).astype(np.float64)) <= limit


# ---------------------------------------------------------------- bad input
@pytest.mark.parametrize("bad", [-1, 5, 2 ** 31 - 1, -2 ** 31])
def test_get_rows_checks_ids(bad):
    ctx = gg.Context()
    t = gg.get_rows(gg.from_numpy(ctx, floats(5, 8)), gg.from_numpy(ctx, np.int32([0, bad, 4])))
    with pytest.raises(gg.IndexRangeError, match=f"index {bad} is out of range"):
        gg.compute(t)


@pytest.mark.parametrize("bad", [-1, 5, 2 ** 40, -2 ** 63])
def test_set_rows_writes_nothing_out_of_range(bad):
    ctx = gg.Context()
    room = np.zeros((20, 8), np.float32)
    table = gg.view_2d(gg.from_numpy(ctx, room), 8, 5, 32, 8 * 32)
    node = gg.set_rows(table, gg.from_numpy(ctx, floats(3, 8)), gg.from_numpy(ctx, np.int64([2, bad, 4])))
    with pytest.raises(gg.IndexRangeError, match=f"index {bad} is out of range"):
        gg.compute(node)
    assert not room[:8].any() and not room[13:].any() and not room[[8, 9, 11]].any()


def _t(type, *ne):
    return gg.Context().new_tensor(type, ne)


BAD = {
    "add shapes": lambda: gg.add(_t(gg.F32, 4, 3), _t(gg.F32, 4, 2)),
    "add types": lambda: gg.add(_t(gg.F32, 32), _t(gg.Q8_0, 32)),
    "unary number": lambda: gg.unary(_t(gg.F32, 4), 99),
    "unary type": lambda: gg.gelu(_t(gg.I32, 4)),
    "glu shapes": lambda: gg.swiglu_split(_t(gg.F32, 4), _t(gg.F32, 6)),
    "scale type": lambda: gg.scale(_t(gg.F16, 4), 2.0),
    "clamp order": lambda: gg.clamp(_t(gg.F32, 4), 1.0, -1.0),
    "norm eps": lambda: gg.norm(_t(gg.F32, 4), -1.0),
    "norm nan": lambda: gg.rms_norm(_t(gg.F32, 4), float("nan")),
    "norm strides": lambda: gg.norm_inplace(gg.permute(_t(gg.F32, 4, 3), 1, 0, 2, 3), 1e-5),
    "group_norm groups": lambda: gg.group_norm(_t(gg.F32, 4, 3, 2), 3, 1e-5),
    "mask shape": lambda: gg.soft_max_ext(_t(gg.F32, 8, 4), _t(gg.F32, 8, 3), 1.0, 0.0),
    "mask type": lambda: gg.soft_max_ext(_t(gg.F32, 8, 4), _t(gg.BF16, 8, 4), 1.0, 0.0),
    "alibi without mask": lambda: gg.soft_max_ext(_t(gg.F32, 8, 4), None, 1.0, 8.0),
    "rope mode": lambda: gg.rope(_t(gg.F32, 8, 2, 3), _t(gg.I32, 3), 8, 1),
    "rope dims": lambda: gg.rope(_t(gg.F32, 8, 2, 3), _t(gg.I32, 3), 10, 0),
    "rope odd dims": lambda: gg.rope(_t(gg.F32, 8, 2, 3), _t(gg.I32, 3), 3, 0),
    "rope positions": lambda: gg.rope(_t(gg.F32, 8, 2, 3), _t(gg.I32, 4), 8, 0),
    "rope sections": lambda: gg.rope_multi(_t(gg.F32, 8, 2, 3), _t(gg.I32, 12), None, 8, (0, 0, 0, 4), 8, 0, 1e4, 1.0,
                                           0.0, 1.0, 0.0, 0.0),
    "get_rows ids": lambda: gg.get_rows(_t(gg.F32, 8, 4, 2), _t(gg.I32, 3)),
    "get_rows id type": lambda: gg.get_rows(_t(gg.F32, 8, 4), _t(gg.I64, 3)),
    "set_rows width": lambda: gg.set_rows(_t(gg.F32, 8, 4), _t(gg.F32, 9, 2), _t(gg.I64, 2)),
    "set_rows ids": lambda: gg.set_rows(_t(gg.F32, 8, 4), _t(gg.F32, 8, 2), _t(gg.I64, 3)),
    "cpy sizes": lambda: gg.cpy(_t(gg.F32, 8, 4), _t(gg.F32, 8, 5)),
    "cont sizes": lambda: gg.cont_2d(_t(gg.F32, 8, 4), 8, 5),
    "cast blocks": lambda: gg.cast(_t(gg.F32, 33), gg.Q8_0),
    "argmax dims": lambda: gg.argmax(_t(gg.F32, 8, 4, 2)),
    "repeat": lambda: gg.repeat_4d(_t(gg.F32, 8, 4), 12, 4, 1, 1),
    "concat dim": lambda: gg.concat(_t(gg.F32, 8), _t(gg.F32, 8), 4),
    "concat sizes": lambda: gg.concat(_t(gg.F32, 8, 2), _t(gg.F32, 8, 3), 0),
    "concat types": lambda: gg.concat(_t(gg.F32, 8), _t(gg.F16, 8), 0),
    "diag_mask": lambda: gg.diag_mask_inf(_t(gg.F32, 8, 2), -1),
}
SAYS = {                                # words of each error
    "add shapes": "add: b must tile a", "add types": "add: b",
    "unary number": "unary: 99 is no UNARY number (0 to 21)", "unary type": "gelu: source",
    "glu shapes": "swiglu_split: x and g must have one shape and", "scale type": "scale: source",
    "clamp order": "clamp: min 1.0 is above max -1.0", "norm eps": "norm: eps must not be negative",
    "norm nan": "rms_norm: eps must not be negative", "norm strides": "norm: elements of a row must lie side",
    "group_norm groups": "group_norm: n_groups must be from 1 to ne2 = 2",
    "mask shape": "soft_max: mask must be [ne0, >= ne1,", "mask type": "soft_max: mask",
    "alibi without mask": "soft_max: max_bias > 0 (ALiBi) needs a mask",
    "rope mode": "rope: mode must be 0 normal, 2 neox, 8", "rope dims": "rope: n_dims must be even, 2 to ne0 = 8",
    "rope odd dims": "rope: n_dims must be even, 2 to ne0 = 8",
    "rope positions": "rope: positions must be 1 * a.ne[2] ids",
    "rope sections": "rope: four sections >= 0, not all of", "get_rows ids": "get_rows: ids must be [r, a.ne2, a.ne3]",
    "get_rows id type": "get_rows: ids", "set_rows width": "set_rows: a and b may differ in ne1 only",
    "set_rows ids": "set_rows: ids must be [b.ne1, divides", "cpy sizes": "cpy: both must have the same number of",
    "cont sizes": "cont: tensor F32 [8, 4] has 32", "cast blocks": "33",
    "argmax dims": "argmax: the source must be a matrix with", "repeat": "repeat: [12, 4, 1, 1] is no multiple of",
    "concat dim": "concat: dim must be 0 to 3", "concat sizes": "concat: sizes may differ in dimension 0",
    "concat types": "concat: the types must be equal", "diag_mask": "diag_mask_inf: n_past must not be negative",
}


@pytest.mark.parametrize("what", BAD)
def test_builders_refuse(what):
    errors = gg.ShapeError, gg.TypeMismatch, gg.ParamError
    with pytest.raises(errors, match=re.escape(SAYS[what])) as e:
        BAD[what]()
    assert len(str(e.value)) > 20


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("name", ["norm", "rms_norm", "l2_norm"])
def test_rows_of_one_element_at_any_stride(name, n_threads):
    """A transposed (1, n) has rows of one element, n of them side by side: dense, though nb0 is not 4."""
    ctx = gg.Context()
    a = gg.from_numpy(ctx, np.arange(1, 5, dtype=np.float32)[None])
    for y in (getattr(gg, name)(gg.transpose(a), 0.5), getattr(gg, f"{name}_inplace")(gg.transpose(gg.dup(a)), 0.5)):
        got = gg.compute(y, backend=gg.init_backend("CPU", n_threads=n_threads))
        want = all_specs()[y.op].reference(y, np.arange(1, 5, dtype=np.float64).reshape(4, 1))
        np.testing.assert_allclose(np.ravel(got), np.ravel(want), rtol=1e-6)


def test_empty_tensors():
    ctx = gg.Context()
    a = gg.from_numpy(ctx, np.zeros((3, 0, 5), np.float32))
    assert gg.compute(gg.gelu(a)).shape == (3, 0, 5)
    assert gg.compute(gg.soft_max(gg.add(a, a))).size == 0
    assert gg.compute(gg.sum(a)) == 0


def test_the_comparison_notices_wrong_answers():
    want = np.linspace(-1, 1, 50)
    assert nmse(want * 1.001, want) > 1e-7 and nmse(want, want) == 0
    with pytest.raises(AssertionError, match="infinities or NaN in different places"):
        nmse(np.where(want > 0.9, np.nan, want), want)
    with pytest.raises(AssertionError, match="infinities or NaN in different places"):
        nmse(want, np.where(want > 0.9, np.inf, want))
