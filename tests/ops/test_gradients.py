"""The gradient of every op: its rule against differences, in float64, on the cases of the op's own tests."""
import collections
import dataclasses
import json

import numpy as np
import pytest
from helpers import oracle
from helpers.slopes import agrees

import ggjit as gg
from ggjit.ops.core.record import OP
from ggjit.ops.core.spec import Inputs, all_specs
from ggjit.tools.suite.command import select
from ggjit.tools.suite.float64 import Float64
from ggjit.tools.suite.grad import FAIL, OK, GradRunner

FLOATS = (gg.F32, gg.F16, gg.BF16)
LIMITS = 3000, 100_000                      # elements of a result that is looked at here: more where no case has fewer
FAMILIES = (OP.UNARY, OP.GLU)               # of which every function is an op of its own
PER_KIND = 2
BY_GGML = "add mul sub div sqr sqrt log exp expm1 sin cos sum mean repeat rms_norm scale soft_max silu softplus".split()
WITHOUT = {"ARGMAX", "COUNT_EQUAL", "ARGSORT", "TOP_K",                                         # integers
           "ARANGE", "TIMESTEP_EMBEDDING", "MAP_CUSTOM1", "MAP_CUSTOM2", "MAP_CUSTOM3", "CUSTOM",
           "SILU_BACK", "RMS_NORM_BACK", "SOFT_MAX_BACK", "FLASH_ATTN_BACK", "POOL_2D_BACK",    # gradients themselves
           "CROSS_ENTROPY_LOSS_BACK", "OPT_STEP_ADAMW", "OPT_STEP_SGD", "LIGHTNING_INDEXER", "SOLVE_TRI", "SSM_CONV",
           "FLASH_ATTN_PAGED", "SSM_SCAN", "RWKV_WKV6", "RWKV_WKV7", "GATED_LINEAR_ATTN", "GATED_DELTA_NET",
           "DSV4_HC_COMB", "DSV4_HC_PRE", "DSV4_HC_POST"}


def test_who_has_a_gradient():
    assert {op.name for op, spec in all_specs().items() if spec.gradient is None} == WITHOUT


def as_loss(y, held, rng):
    """sum(r y), r random; None where y is not finite."""
    y = y if y.type is gg.F32 else gg.cast(y, gg.F32)
    for last in (y, gg.soft_max(gg.cont(y))):           # of -inf by a mask
        exact = Float64(last)
        for t, values in held:
            exact.hold(t, values)
        values = exact.run()[last]
        if np.isfinite(values).all():
            # max pooling gives the lowest float for a window outside the picture
            r = (rng.standard_normal(values.shape) * (abs(values) < 1e30)).astype(np.float32)
            return gg.sum(gg.mul(last, gg.from_numpy(y.ctx, r)))


def small(op, limit):
    """(result, its leaves with values) of PER_KIND cases of each kind, results up to `limit` elements."""
    seen = collections.Counter()
    for case in all_specs()[op].cases():
        ctx, rng = gg.Context(), np.random.default_rng(1)
        made = Inputs(ctx, rng)
        with ctx:
            y = case.build(made)
        kind = int(y.op_params[0]) if op in FAMILIES else len(made.data)
        written_over = y.view_src is not None and op not in (OP.CPY, OP.SET_ROWS, OP.CLAMP)
        fits = y.type in FLOATS and y.op == op and 0 < np.prod(y.ne) <= limit and not written_over
        if fits and seen[kind] < PER_KIND:
            seen[kind] += 1
            yield y, made.data


@pytest.mark.parametrize("op", [op for op, s in all_specs().items() if s.gradient and s.cases], ids=lambda op: op.name)
def test_rule(op):
    checked = 0
    for y, held in next(filter(None, (list(small(op, limit)) for limit in LIMITS))):
        with y.ctx:
            loss = as_loss(y, held, np.random.default_rng(1))
        for t in [t for t, _ in held if t.type in FLOATS and loss is not None]:
            try:
                found = gg.grad(loss, [t])
            except gg.NotSupported as e:
                assert "there is no gradient of" in str(e)      # labels, frequency factors, Hadamard's matrix
                continue
            except gg.ParamError as e:
                assert "does not depend" in str(e)              # its shape alone counts
                continue
            agrees(loss, [t], held, found=found)
            checked += 1
    assert checked


# ---------------------------------------------------------------- experts
@pytest.mark.parametrize("type", [gg.F32, gg.F16, gg.Q4_0, gg.Q4_K], ids=repr)
@pytest.mark.parametrize("n", [2, 40])
def test_frozen_experts_are_converted_a_strip_at_a_time(type, n, monkeypatch):
    """The gradient of what they are multiplied with: float64's, the bits of one strip, in fewer bytes."""
    from ggjit.ops.matmul import mul_mat_id
    rng = np.random.default_rng(n)
    k, m, n_experts, used = 512 + 256 * (type.block == 256) + 7 * (type.block == 1), 37, 5, 3
    ids = np.stack([rng.permutation(n_experts)[:used] for _ in range(n)]).astype(np.int32)
    w, x, dy = (rng.standard_normal(s).astype(np.float32) for s in ((n_experts, m, k), (n, used, k), (n, used, m)))
    found = []
    for nbytes in (1 << 40, 1 << 16, 1):
        monkeypatch.setattr(mul_mat_id, "STRIP_NBYTES", nbytes)
        ctx = gg.Context()
        experts = gg.from_numpy(ctx, w, type=type)
        b, chosen, pull = (gg.from_numpy(ctx, a) for a in (x, ids, dy))
        with ctx:
            d = gg.grad(gg.sum(gg.mul(gg.mul_mat_id(experts, b, chosen), pull)), b)
        found.append((gg.compute(d).copy(), gg.measure(gg.Graph(d)).peak))
    want = np.einsum("tumk,tum->tuk", experts.numpy().astype(np.float64)[ids], dy)
    assert np.abs(found[0][0] - want).max() < 1e-5 * np.abs(want).max()
    assert all((got == found[0][0]).all() for got, _ in found)
    assert found[1][1] < 0.8 * found[0][1]


# ---------------------------------------------------------------- the suite
def test_a_sample_of_the_suite_agrees_with_ggml():
    """Rules against differences, and ggml's own gradients (ggml_build_backward_expand) against them."""
    runner = GradRunner(None, 0, oracle.connect())
    for name in BY_GGML:
        outcome = runner.run(next(c for c in select(name) if "type=f32" in c.params or "type_input=f32" in c.params))
        assert (outcome.status, outcome.checked) == (OK, ("rules", "ggml")), (name, outcome.error)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(16))
def test_the_whole_suite(part):
    runner = GradRunner(gg.init_backend("CPU"), part)
    outcomes = [runner.run(c) for c in select()[part::16]]
    assert not [(str(o.case), o.error) for o in outcomes if o.status == FAIL]
    assert sum(o.status == OK for o in outcomes) > 100


def test_a_wrong_rule_is_found(monkeypatch):
    op = OP.SCALE
    wrong = dataclasses.replace(all_specs()[op], gradient=lambda g, t, dy: (lambda: g.scale(dy, 1.001),))
    monkeypatch.setitem(all_specs(), op, wrong)
    outcome = GradRunner().run(select("scale")[0])
    assert outcome.status == FAIL and "by differences" in outcome.error


def test_command(command):
    r = command("ops", "grad", "-o", "scale", "-p", r"ne=\[10,10,10,10\]", "--sample", 2, "--json")
    assert r.returncode == 0, r.stderr
    cases = json.loads(r.stdout)["cases"]
    assert [c["status"] for c in cases] == [OK, OK] and all({"rules", "kernels"} <= set(c["checked"]) for c in cases)
