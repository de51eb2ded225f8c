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

MINE = [OP.WIN_PART, OP.WIN_UNPART, OP.GET_REL_POS, OP.ADD_REL_POS, OP.TRI, OP.DIAG, OP.CUMSUM]
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
