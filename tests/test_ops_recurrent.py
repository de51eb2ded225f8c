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
