"""flash_attn_ext: float64 reference, promises (bytes, hidden keys, batches), bad input, the real ggml."""
import itertools
import math

import numpy as np
import pytest
from helpers import oracle
from helpers.cases import nmse, run
from helpers.sample import sampled

import ggjit as gg
from ggjit.ops.attention import flash_attn
from ggjit.ops.core.errors import GgjitError, ParamError, ShapeError, TypeMismatch
from ggjit.ops.core.record import OP
from ggjit.ops.core.spec import Case, all_specs
from ggjit.ops.core.traits import all_traits, traits_of
from ggjit.ops.native.isa import NAMES

SPEC = all_specs()[OP.FLASH_ATTN_EXT]


@pytest.fixture
def always_threads(monkeypatch):
    """Nodes of any size are shared by all threads."""
    monkeypatch.setattr("ggjit.cpu.cpu_plan.least_nanoseconds", lambda n_threads: 0.0)


@pytest.mark.parametrize("case", list(SPEC.cases()), ids=lambda c: c.name)
def test_against_float64(case, monkeypatch):
    got, want, out = run(case)
    assert nmse(got.astype(np.float64), want) <= case.max_nmse
    assert np.abs(got - want).max() < 2e-6
    monkeypatch.setattr("ggjit.cpu.cpu_plan.least_nanoseconds", lambda n_threads: 0.0)
    for n_threads in (2, 3):
        again, _, _ = run(case, n_threads)
        assert again.tobytes() == got.tobytes(), f"{n_threads} threads give other bytes than one"


def test_shapes_and_options_sweep():
    """Sizes around every boundary (vectors, blocks of 64, chunks of 512, sets of 8 and 64 rows), options at random."""
    rng = np.random.default_rng(7)
    for _ in range(60):
        options = dict(d=64, n=int(rng.choice([1, 1, 2, 5, 17, 40, 66])), rep=int(rng.choice([1, 2, 4])),
                       heads=int(rng.choice([1, 2, 3])), ne3=int(rng.choice([1, 1, 2])),
                       n_kv=int(rng.choice([1, 5, 63, 64, 65, 130, 511, 512, 513, 1025])),
                       mask=bool(rng.random() < 0.8), cap=float(rng.choice([0.0, 8.0])), sinks=bool(rng.random() < 0.4),
                       permuted=bool(rng.random() < 0.5))
        if options["mask"]:
            options["max_bias"] = float(rng.choice([0.0, 8.0]))
            options["mask_heads"] = options["heads"] if rng.random() < 0.3 else 1
        got, want, _ = run(Case(str(options), flash_attn.make_case(**options)))
        assert nmse(got.astype(np.float64), want) < 1e-11, options


# ---------------------------------------------------------------- promises
class Attention:
    """One attention over arrays (NumPy order, 4 dimensions); `compute` on any number of threads."""

    def __init__(self, q, k, v, mask=None, scale=1.0, kv_type=gg.F16, sinks=None):
        ctx = gg.Context()
        q, k, v, sinks, mask = (x if x is None else gg.from_numpy(ctx, x, type=t) for x, t in
                                ((q, gg.F32), (k, kv_type), (v, kv_type), (sinks, gg.F32), (mask, gg.F16)))
        y = gg.flash_attn_ext(q, k, v, mask, scale)
        self.y = y if sinks is None else gg.flash_attn_ext_add_sinks(y, sinks)
        self.graph = gg.Graph(self.y)
        self.allocator = gg.GraphAllocator(gg.init_backend("CPU:n_threads=1"))
        self.allocator.alloc_graph(self.graph)

    def compute(self, n_threads=1):
        plan = gg.init_backend(f"CPU:n_threads={n_threads}").graph_plan_create(self.graph, self.graph.placement)
        plan.compute()
        first = plan.numpy(self.y)
        plan.compute()
        assert plan.numpy(self.y).tobytes() == first.tobytes(), "a replay gives other bytes"
        return first


def arrays(n, n_kv, heads=4, kv_heads=1, d=64, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(s).astype(np.float32)
            for s in ((1, heads, n, d), (1, kv_heads, n_kv, d), (1, kv_heads, n_kv, d))]


@pytest.mark.parametrize("n", [1, 40])
def test_same_bytes_on_any_number_of_threads(n, always_threads):
    q, k, v = arrays(n, 1300)
    a = Attention(q, k, v, scale=0.125)
    want = a.compute(1).tobytes()
    assert all(a.compute(n_threads).tobytes() == want for n_threads in (2, 3, 5))


@pytest.mark.parametrize("n", [1, 40])
def test_keys_nobody_sees_may_hold_anything(n):
    """Never-written cells of a KV cache, at the end and in holes: NaN in K and V must not come through."""
    q, k, v = arrays(n, 200)
    hidden = np.zeros(200, bool)
    hidden[3:9] = hidden[60:70] = hidden[128:192] = hidden[195:] = True
    mask = np.broadcast_to(np.where(hidden, -np.inf, 0.0).astype(np.float16), (1, 1, n, 200))
    want = Attention(q, k[:, :, ~hidden], v[:, :, ~hidden], scale=0.125).compute()
    k[:, :, hidden] = v[:, :, hidden] = np.nan
    np.testing.assert_allclose(Attention(q, k, v, mask, scale=0.125).compute(), want, atol=1e-6)


@pytest.mark.parametrize("n", [1, 40])
def test_a_query_that_sees_nothing_gives_zeros(n):
    q, k, v = arrays(n, 100)
    mask = np.zeros((1, 1, n, 100), np.float16)
    mask[:, :, n // 2] = -np.inf
    for sinks in (None, np.full(4, -2.0, np.float32)):
        y = Attention(q, k, v, mask, sinks=sinks).compute().reshape(n, 4, 64)
        assert (y[n // 2] == 0).all() and np.isfinite(y).all()
        assert n == 1 or (np.abs(np.delete(y, n // 2, 0)).max(axis=(1, 2)) > 0).all()


def test_a_token_alone_and_in_a_batch_agree():
    q, k, v = arrays(70, 300)
    mask = np.where(np.arange(300) > np.arange(70)[:, None] + 230, -np.inf, 0).astype(np.float16)[None, None]
    together = Attention(q, k, v, mask, scale=0.125).compute().reshape(70, 4, 64)
    for i in (0, 1, 33, 69):
        alone = Attention(q[:, :, i:i + 1], k, v, mask[:, :, i:i + 1], scale=0.125).compute()
        np.testing.assert_allclose(alone.reshape(4, 64), together[i], atol=5e-7)


def test_large_scores_do_not_overflow():
    q, k, v = arrays(1, 90)
    want = v[0, 0][(q[0, :, 0] @ k[0, 0].astype(np.float16).astype(np.float32).T).argmax(axis=1)]
    got = Attention(q * 1e4, k, v).compute().reshape(4, 64)
    np.testing.assert_allclose(got, want.astype(np.float16), atol=1e-5)


def test_f32_keys_agree_to_a_few_ulp():
    """The models' tolerance: stories260K and MiniLM run on F32 K and V."""
    q, k, v = arrays(1, 256, heads=8, kv_heads=4, d=8)
    got = Attention(q, k, v, scale=8 ** -0.5, kv_type=gg.F32).compute()
    s = np.einsum("hd,hjd->hj", q[0, :, 0].astype(float), np.repeat(k[0], 2, 0)) / math.sqrt(8)
    p = np.exp(s - s.max(-1, keepdims=True))
    want = np.einsum("hj,hjd->hd", p / p.sum(-1, keepdims=True), np.repeat(v[0], 2, 0))
    assert np.abs(got.reshape(8, 8) - want).max() < 3e-7


@pytest.mark.parametrize("kind,d", [("F16", 8), ("F16", 4), ("BF16", 3)])
def test_heads_shorter_than_a_vector(kind, d):
    """Several keys share a vector then: lengths around a tile's, and hidden keys that hold NaN beside seen ones."""
    for n_kv in (1, 7, 8, 15, 16, 17, 70):
        q, k, v = arrays(1, n_kv, heads=6, kv_heads=2, d=d, seed=n_kv)
        hidden = np.arange(n_kv) % 3 == 1
        k[:, :, hidden] = v[:, :, hidden] = np.nan
        mask = np.where(hidden, -np.inf, 0.0).astype(np.float16)[None, None, None]
        got = Attention(q, k, v, mask, scale=0.5, kv_type=getattr(gg, kind)).compute().reshape(6, d)
        k, v = (gg.from_numpy(gg.Context(), x[0][:, ~hidden], type=getattr(gg, kind)).numpy() for x in (k, v))
        s = 0.5 * np.einsum("hd,hjd->hj", q[0, :, 0].astype(float), np.repeat(k, 3, 0))
        p = np.exp(s - s.max(-1, keepdims=True))
        want = np.einsum("hj,hjd->hd", p / p.sum(-1, keepdims=True), np.repeat(v, 3, 0))
        assert np.abs(got - want).max() < 1e-6, n_kv


@pytest.mark.parametrize("isa,options", sampled(itertools.product(NAMES[-2:], [
    "kt=F16, d=40, dv=24, n_kv=600, n=1, rep=4, max_bias=8.0, cap=5.0, sinks=True",
    "kt=F32, d=40, dv=24, n_kv=130, n=20, rep=4, permuted=True", "kt=F16, d=4, n_kv=45, rep=2"]), enumerate))
def test_other_instruction_sets(isa, options, on_isa):
    """The same source on narrower vectors: one case per kernel, with tails."""
    r = on_isa(isa, """
import sys
from helpers.cases import nmse, run
from ggjit.ops.native import isa
from ggjit.ops.attention.flash_attn import F16, F32, make_case
from ggjit.ops.core.spec import Case
got, want, _ = run(Case(sys.argv[1], make_case(**eval(f"dict({sys.argv[1]})"))))
assert nmse(got.astype(float), want) < 1e-11
print(isa.ISA)""", options)
    assert r.returncode == 0 and r.stdout.split() == [isa], r.stderr


# ---------------------------------------------------------------- the real ggml
@pytest.mark.parametrize("kind,n", sampled(itertools.product(("F32", "F16", "Q8_0", "Q4_0"), (1, 33)), enumerate))
def test_against_ggml(kind, n):
    """ggml rounds q to K's companion type and adds an F16 V up in F16; with F32 K and V both are exact."""
    rng = np.random.default_rng(n)
    q, k, v = (rng.uniform(-1, 1, s).astype(np.float32) for s in ((2, n, 8, 64), (2, 300, 2, 64), (2, 300, 2, 64)))
    mask = np.where(np.arange(300) > np.arange(64)[:, None] + 260, -np.inf,
                    rng.uniform(-1, 1, (2, 1, 64, 300))).astype(np.float16)
    axes = (0, 2, 1, 3)
    for params in ((0.125, 0.0, 0.0), (0.5, 8.0, 10.0)):
        want = oracle.connect().op("flash_attn_ext", [q, k, v, mask], types=[None, kind, kind], params=params,
                                   permute={0: axes, 1: axes, 2: axes})
        ctx = gg.Context()
        leaf = [gg.permute(gg.from_numpy(ctx, x, type=t), *axes) for x, t in
                ((q, gg.F32), (k, getattr(gg, kind)), (v, getattr(gg, kind)))]
        got = gg.compute(gg.flash_attn_ext(*leaf, gg.from_numpy(ctx, mask), *params))
        assert got.shape == want.shape
        assert nmse(got.astype(np.float64), want.astype(np.float64)) < (1e-10 if kind == "F32" else 5e-4)


# ---------------------------------------------------------------- builders
def leaves(**change):
    """A context with valid q, k, v, mask; entries may be replaced by (type, ne)."""
    ctx = gg.Context()
    made = dict(q=(gg.F32, (64, 3, 8, 2)), k=(gg.F16, (64, 10, 4, 2)), v=(gg.F16, (32, 10, 4, 2)),
                mask=(gg.F16, (10, 8, 1, 2))) | change
    return ctx, [x and ctx.new_tensor(*x, name=n) for n, x in made.items()]


def test_result_and_parameters():
    ctx, (q, k, v, mask) = leaves()
    y = gg.flash_attn_ext(q, k, v, mask, 0.5, 8.0, 3.0)
    assert y.type is gg.F32 and y.ne == (32, 8, 3, 2) and y.src[:4] == (q, k, v, mask)
    assert list(y.param_floats[:3]) == [0.5, 8.0, 3.0] and y.op_params[3] == 0
    z = gg.flash_attn_ext_set_prec(y, 10)
    assert z.op_params[3] == 10 and list(z.param_floats[:3]) == [0.5, 8.0, 3.0] and y.op_params[3] == 0
    sinks = ctx.new_tensor(gg.F32, 8)
    s = gg.flash_attn_ext_add_sinks(z, sinks)
    assert s.src == (q, k, v, mask, sinks) and s.op_params[3] == 10 and gg.flash_attn_ext_add_sinks(s, None) is s


@pytest.mark.parametrize("change,kwargs,error", [
    (dict(k=(gg.F16, (32, 10, 4, 2))), {}, ShapeError), (dict(k=(gg.F16, (64, 10, 3, 2))), {}, ShapeError),
    (dict(v=(gg.F16, (32, 11, 4, 2))), {}, ShapeError), (dict(v=(gg.F16, (32, 10, 4, 1))), {}, ShapeError),
    (dict(v=(gg.F16, (32, 10, 0, 2))), {}, ShapeError), (dict(q=(gg.I32, (64, 3, 8, 2))), {}, TypeMismatch),
    (dict(k=(gg.I32, (64, 10, 4, 2))), {}, TypeMismatch), (dict(mask=(gg.F32, (10, 8, 1, 2))), {}, TypeMismatch),
    (dict(mask=(gg.F16, (11, 8, 1, 2))), {}, ShapeError), (dict(mask=(gg.F16, (10, 2, 1, 2))), {}, ShapeError),
    (dict(mask=(gg.F16, (10, 8, 3, 1))), {}, ShapeError), (dict(mask=None), dict(max_bias=8.0), ParamError),
    ({}, dict(scale=math.nan), ParamError), ({}, dict(logit_softcap=math.inf), ParamError)])
def test_bad_input_is_refused_before_anything_changes(change, kwargs, error):
    ctx, (q, k, v, mask) = leaves(**change)
    n = len(ctx)
    with pytest.raises(error, match="flash_attn_ext") as e:
        gg.flash_attn_ext(q, k, v, mask, **kwargs)
    assert isinstance(e.value, GgjitError) and len(ctx) == n


def test_rows_must_be_contiguous():
    ctx, (q, k, v, mask) = leaves(v=(gg.F16, (10, 32, 4, 2)))
    with pytest.raises(ShapeError, match="gg.cont"):
        gg.flash_attn_ext(q, k, gg.transpose(v), mask)


def test_sinks_and_precision_are_checked():
    ctx, (q, k, v, mask) = leaves()
    y = gg.flash_attn_ext(q, k, v, mask)
    sinks = ctx.new_tensor(gg.F32, 8)
    done = gg.flash_attn_ext_add_sinks(y, sinks)
    short, half = ctx.new_tensor(gg.F32, 4), ctx.new_tensor(gg.F16, 8)
    for error, text, f in ((ParamError, "prec must be 0", lambda: gg.flash_attn_ext_set_prec(y, 3)),
                           (TypeMismatch, "expected the result of", lambda: gg.flash_attn_ext_set_prec(q, 0)),
                           (TypeMismatch, "expected the result of", lambda: gg.flash_attn_ext_add_sinks(k, sinks)),
                           (TypeMismatch, "must be F32", lambda: gg.flash_attn_ext_add_sinks(y, half)),
                           (ShapeError, "one value per query head", lambda: gg.flash_attn_ext_add_sinks(y, short)),
                           (ParamError, "has sinks already", lambda: gg.flash_attn_ext_add_sinks(done, sinks))):
        with pytest.raises(error, match=text):
            f()


@pytest.mark.parametrize("n,n_kv", [(1, 40), (1, 1100), (3, 9), (20, 9), (40, 70)])
@pytest.mark.parametrize("where", ["q", "k", "mask"])
def test_nan_is_not_swallowed(n, n_kv, where):
    """A NaN that a row sees makes that row NaN, and no other."""
    rng, ctx = np.random.default_rng(5), gg.Context()
    q, k, v = (rng.standard_normal((1, m, 32)).astype(np.float32) for m in (n, n_kv, n_kv))
    mask = np.zeros((n, n_kv), np.float16)
    rows = np.zeros(n, bool)
    if where == "q":
        q[0, n // 2, 3] = np.nan
        rows[n // 2] = True
    elif where == "k":
        k[0, n_kv // 2, 3] = np.nan
        rows[:] = True
    else:
        mask[n // 2, n_kv // 2] = np.nan
        rows[n // 2] = True
    got = gg.compute(gg.flash_attn_ext(*(gg.from_numpy(ctx, a) for a in (q, k, v, mask)), 0.2)).reshape(n, 32)
    np.testing.assert_array_equal(np.isnan(got).all(1), rows)
    np.testing.assert_array_equal(np.isnan(got).any(1), rows)


KEPT = [t for t in all_traits() if t.quantized and traits_of(t).to_float is not None]


@pytest.mark.parametrize("n,type", sampled(itertools.product((1, 20), KEPT), lambda case: [case[1].block, case[0]]))
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_query_that_is_not_finite_beside_quantised_keys(n, type, bad):
    """Nothing finite comes out of its row, and the other rows are finite."""
    rng, ctx, d = np.random.default_rng(), gg.Context(), max(64, type.block)
    q, kv = (rng.standard_normal((1, m, d)).astype(np.float32) for m in (n, 70))
    q[0, n // 2, d - 1] = bad
    k = ctx.new_tensor(type, (d, 70, 1))
    gg.alloc_ctx_tensors(ctx, gg.init_backend("CPU"))
    k.set_bytes(gg.quantize(type, kv[0], imatrix=np.ones(d, np.float32)).tobytes())
    finite = np.isfinite(gg.compute(gg.flash_attn_ext(gg.from_numpy(ctx, q), k, k, None, 0.2))).reshape(n, d)
    assert not finite[n // 2].any() and np.delete(finite, n // 2, 0).all()
