"""mul_mat: against float64 on every instruction set, the real ggml, and itself on two threads."""
import functools
import itertools
import json
import re
import zlib

import numpy as np
import pytest
from helpers import oracle
from helpers.cases import nmse
from helpers.interpreter import Interpreter
from helpers.machine_code import product_faults
from helpers.paths import TESTS_PATH
from helpers.sample import drawn, sampled
from numba import cfunc, njit, types

import ggjit as gg
from ggjit.ops.core.errors import ShapeError, TypeMismatch
from ggjit.ops.core.record import OP
from ggjit.ops.core.spec import Inputs
from ggjit.ops.core.traits import traits_of
from ggjit.ops.matmul import choices
from ggjit.ops.matmul.mul_mat import cases, kernel, reference
from ggjit.ops.matmul.mul_mat_tile import make_panels, panels_nbytes
from ggjit.ops.matmul.tile import MB, NL
from ggjit.ops.matmul.tile_codes import code_tile
from ggjit.ops.matmul.tile_float import float_tile
from ggjit.ops.native import isa
from ggjit.ops.native.simd import W

WEIGHTS = (gg.F32, gg.F16, gg.BF16, gg.Q8_0, gg.Q4_0)
# those after 65: a last vector of at most a quarter or half, alone, beside a whole one, after pairs of them
N_COLUMNS = (1, 2, 3, 4, 8, 12, 13, 33, 65, 7, 18, 22, 36, 40)


def random(seed, *shape):
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


def rounded(type, x):
    """What a product with weights of `type` sees of x."""
    f = traits_of(type).np_round_activations
    return f(np.ascontiguousarray(x)) if f else x


def weights(type, a):
    return gg.dequantize(type, gg.quantize(type, a), a.shape)


def product(type, a, b, b_type=None, n_threads=1):
    """Our product: a quantised to `type`, NumPy order in and out."""
    ctx = gg.Context()
    y = gg.mul_mat(gg.from_numpy(ctx, a, type=type), gg.from_numpy(ctx, b, type=b_type or gg.F32))
    shape = *b.shape[:-1], a.shape[-2]
    return np.reshape(gg.compute(y, backend=gg.init_backend(f"CPU:n_threads={n_threads}")), shape)


# ---------------------------------------------------------------- samples: kernels compile for seconds each
def lengths(type):
    """Of rows: whole blocks and parts of a tile."""
    return (32, 96, 160, 1056) if type.quantized else (8, 33, 172, 1030)


@functools.cache
def kernels(type, n, b_type=gg.F32, heads=1, k=(160,), m=19, n_threads=(1,)):
    """Names of the kernels of such products, for all k and n_threads."""
    new = gg.Context().new_tensor
    return {kernel(gg.mul_mat(new(type, (i, m, heads)), new(b_type, (i, n, heads))), t).name
            for i in k for t in n_threads}


def families(names):
    """What a sample of products has to have: each kind of kernel for each type of weights, with a panel for each thread
    or for all; each type of columns."""
    found = set()
    for name in names:
        kind, *types = re.match(r"mul_mat-(\w+)(?:-(\w+)-(\w+))?", name).groups()
        found |= {(kind, bool(re.search(r"\dx1x\d", name)), types[0]), ("private" in name,), (types[1],)}
    return found


def products(*axes, **sizes):
    """Parameters (type, n) or (type, n, heads), those that are not drawn marked slow."""
    def names(case):
        return kernels(*case[:2], heads=(*case, 1)[2], **sizes)
    return sampled(itertools.product(*axes), lambda case: families(names(case)), names)


def each(*axes):
    """Parameters: every value of every axis is drawn in some case."""
    return sampled(itertools.product(*axes), enumerate)


@pytest.mark.parametrize("type,n", sampled(
    itertools.product(WEIGHTS, N_COLUMNS), lambda c: families(kernels(*c, k=lengths(c[0]))),
    lambda c: kernels(*c, k=lengths(c[0]))))
def test_sums_are_accurate(type, n):
    """Next to float64 over the same rounded operands only float32 summation is left."""
    for k in lengths(type):
        a, b = random(k, 19, k), random(n, n, k)
        want = rounded(type, b).astype(np.float64) @ weights(type, a).T.astype(np.float64)
        assert nmse(product(type, a, b), want) < 1e-11


@pytest.mark.parametrize("type,n", each(WEIGHTS, (1, 4, 40)))
def test_agrees_with_the_real_ggml(type, n):
    """The same codes: the order of float32 additions differs, and ggml rounds the codes' scales through float16."""
    a, b = random(1, 2, 37, 160), random(2, 6, n, 160)
    want = oracle.connect().op("mul_mat", [a, b], types=[repr(type)])
    assert nmse(product(type, a, b), want.reshape(6, n, 37)) < (2e-7 if type.quantized else 1e-10)


def test_permuted_operands_agree_with_the_real_ggml():
    """Attention's own strides: k and q of [d, heads, tokens] seen as [d, tokens, heads]."""
    k, q = random(3, 33, 2, 64), random(4, 20, 4, 64)
    want = oracle.connect().op("mul_mat", [k, q], permute={0: (0, 2, 1, 3), 1: (0, 2, 1, 3)})
    ctx = gg.Context()
    y = gg.mul_mat(gg.permute(gg.from_numpy(ctx, k), 0, 2, 1, 3), gg.permute(gg.from_numpy(ctx, q), 0, 2, 1, 3))
    assert nmse(gg.compute(y), want.reshape(4, 20, 33)) < 1e-12


@pytest.mark.parametrize("n_cols", [3, 7, 11])
@pytest.mark.parametrize("type", [gg.Q8_0, gg.Q4_0, gg.Q4_K, gg.Q6_K, gg.Q2_K], ids=repr)
def test_columns_that_are_not_there_are_blank(type, n_cols):
    """They are multiplied with the others: whatever work memory held may be denormal, and those are slow."""
    k = 512
    tile = code_tile(type, n_cols)
    if tile is None:
        pytest.skip(f"{isa.ISA} supports tiles of float32 at most")
    pack_y, spread = (tile.tail.pack_y, tile.tail.spread) if tile.tail else (tile.pack_y, 1)

    @cfunc(types.void(*(types.int64,) * 5))
    def pack(src, stride, k, cols, dst):
        pack_y(src, stride, k, cols, dst)
    src = random(1, n_cols, k)
    panel = np.full(tile.panel_nbytes(k) // 4, 1, np.int32)
    pack.ctypes(src.ctypes.data, 4 * k, k, n_cols, panel.ctypes.data)
    words = panel.reshape(k // 32, -1, NL)
    assert (words[:, 8:, spread * n_cols:W] == 0).all()
    assert (words[:, :, W:] == 1).all(), "the other half is another group's"
    assert (words[:, -1, :spread * n_cols].view(np.float32) > 1e-6).all(), "scales"


@pytest.mark.parametrize("type,n", each((gg.Q8_0, gg.Q4_0), (1, 2, 4, 20)))
def test_extreme_codes_are_exact(type, n):
    """-128, 127 and nibbles 0, 15 against activations of +-127: no saturation anywhere."""
    k, rng = 256, np.random.default_rng(0)
    one = np.frombuffer(np.float16(1).tobytes(), np.uint8)
    for pattern in (np.full((32, k), -128), np.full((32, k), 127), rng.choice([-128, -127, 0, 127], (32, k))):
        if type is gg.Q8_0:
            codes, exact = pattern.astype(np.int8).reshape(32, -1, 32).view(np.uint8), pattern
        else:
            q4 = ((pattern + 128) // 17).astype(np.uint8).reshape(32, -1, 32)
            codes, exact = q4[..., :16] | q4[..., 16:] << 4, q4.astype(np.int64).reshape(32, k) - 8
        raw = np.concatenate([np.broadcast_to(one, (*codes.shape[:2], 2)), codes], -1).reshape(32, -1)
        y = np.where(np.arange(n)[:, None] % 3 == 0, 127, rng.choice([-127, 127], (n, k))).astype(np.float32)
        ctx = gg.Context()
        a = ctx.new_tensor(type, (k, 32))
        b = gg.from_numpy(ctx, y)
        gg.alloc_ctx_tensors(ctx, gg.init_backend("CPU"))
        a.set_bytes(raw)
        np.testing.assert_array_equal(gg.compute(gg.mul_mat(a, b)).reshape(n, 32), y @ exact.T)


# 16: panels of W columns; 7, 20, 40: a last vector spread; 100: a block of columns for each thread, the last spread;
# 256, 400: panels of 2 and 3 W
@pytest.mark.parametrize("type,n,heads", products(WEIGHTS, (1, 4, 7, 16, 20, 40, 100, 256, 400), (1, 8), k=(320,),
                                                  m=201, n_threads=(1, 2, 3)))
def test_threads_give_the_bytes_of_one(monkeypatch, type, n, heads):
    monkeypatch.setattr("ggjit.cpu.cpu_plan.least_nanoseconds", lambda n_threads: 0.0)
    ctx = gg.Context()
    a = gg.from_numpy(ctx, random(1, heads, 201, 320), type=type)
    y = gg.mul_mat(a, gg.from_numpy(ctx, random(2, heads, n, 320)))
    one, *more = (gg.compute(y, backend=gg.init_backend(f"CPU:n_threads={t}")).tobytes() for t in (1, 2, 3))
    assert more == [one, one]


@pytest.mark.parametrize("type,n", products((gg.F32, gg.F16), (127, 128, 192, 250, 256, 433, 600)))
def test_many_columns(type, n):
    """Wide panels, the last of 1, 2 or 3 vectors; more than one strip of C; a part of k and of a tile's rows left."""
    a, b = weights(type, random(3, 101, 530)), random(4, n, 530)
    y = product(type, a, b)
    exact = rounded(type, b).astype(np.float64) @ a.astype(np.float64).T
    assert np.mean((y - exact) ** 2) <= 1e-12 * np.mean(exact ** 2)


@pytest.mark.skipif(isa.ISA != "avx512", reason="the rule is of AVX-512")
def test_long_rows_are_dots_where_the_rule_of_a_processor_says_so(monkeypatch):
    """One tile of nine columns, then several tiles; short rows, and columns that are not rounded, as elsewhere."""
    monkeypatch.setattr(choices, "RULE", choices.ZEN5)
    for k, n, tile in ((512, 9, "-dot-f16-f32-3x9x1"), (512, 23, "-dot-f16-f32-3x8x1"), (511, 23, "-tile-f16-")):
        a, b = weights(gg.F16, random(1, 19, k)), random(2, n, k)
        ctx = gg.Context()
        y = gg.mul_mat(gg.from_numpy(ctx, a, type=gg.F16), gg.from_numpy(ctx, b))
        assert tile in kernel(y, 1).name
        assert ("-exact-tile-" in kernel(gg.mul_mat_set_prec(y, 10), 1).name) == (n == 23)
        exact = rounded(gg.F16, b).astype(np.float64) @ a.astype(np.float64).T
        assert nmse(gg.compute(y), exact) < 1e-12


@pytest.mark.skipif(isa.ISA != "avx512", reason="the rule is of AVX-512")
@pytest.mark.parametrize("type,n", each((gg.F32, gg.F16), (9, 11, 17, 24)))
def test_few_columns_by_stretches(monkeypatch, type, n):
    """One tile of nine columns, narrower tiles, the most columns of the rule; several stretches, two runs of rows."""
    monkeypatch.setattr(choices, "RULE", choices.ZEN5)
    monkeypatch.setattr("ggjit.cpu.cpu_plan.least_nanoseconds", lambda n_threads: 0.0)
    a, b, ctx = random(1, 101, 1552), random(2, n, 1552), gg.Context()
    y = gg.mul_mat(gg.from_numpy(ctx, a), gg.from_numpy(ctx, b, type=type))
    assert "-stretch-" in kernel(y, 1).name
    one, two = (gg.compute(y, backend=gg.init_backend(f"CPU:n_threads={t}")) for t in (1, 2))
    assert one.tobytes() == two.tobytes()
    assert nmse(one, rounded(type, b).astype(np.float64) @ a.astype(np.float64).T) < 1e-12
    assert "-tile-" in kernel(gg.mul_mat(gg.from_numpy(ctx, a[:, 1:]), gg.from_numpy(ctx, b[:, 1:])), 1).name


@pytest.mark.parametrize("type", [gg.F32, gg.Q4_0], ids=repr)
def test_panels_cover_the_columns_once(type):
    tile = code_tile(type, 256) if type.quantized else float_tile(type, 256)
    if tile is None:
        pytest.skip(f"{isa.ISA} supports tiles of float32 at most")
    start, of = make_panels(tile)

    @njit
    def groups(n):
        return [(of(g, n), start(of(g, n), n), start(of(g, n) + 1, n)) for g in range((n + W - 1) // W)]
    for n in (*range(1, 300), 511, 528, 700):
        panels, starts, ends = np.transpose(groups(n))
        assert (starts <= np.arange(0, n, W)).all() and (np.arange(0, n, W) < ends).all()
        assert panels[-1] == -(-n // tile.columns) - 1 and (np.diff(panels) >= 0).all()
        assert (ends - starts).max() <= tile.columns


def test_one_batch_equals_column_by_column():
    """F32 sums do not depend on how many columns there are, beyond float32 rounding."""
    a, b = random(5, 96, 1030), random(6, 40, 1030)
    whole = product(gg.F32, a, b)
    single = np.concatenate([product(gg.F32, a, b[j:j + 1]) for j in range(40)])
    assert np.abs(whole - single).max() < 2e-5


@pytest.mark.parametrize("n", [pytest.param(p.values[1], marks=p.marks, id=p.id[4:])
                               for p in products((gg.F32,), (5, 7, 18, 22, 30), k=(64,))])
def test_infinity_and_nan_stay_where_they_are(n):
    a, b = random(7, 20, 64), random(8, n, 64)
    a[3, 10], b[1, 60], b[n - 2, 7] = np.inf, np.nan, np.nan
    y, bad = product(gg.F32, a, b), [1, n - 2]
    assert np.isinf(y[0, 3]) and np.isnan(y[bad]).all()
    assert np.isfinite(np.delete(np.delete(y, 3, 1), bad, 0)).all()


@pytest.mark.parametrize("type,n", products((gg.Q8_0, gg.Q4_0, gg.Q4_1, gg.Q4_K, gg.Q6_K), (7, 16, 18, 22), k=(2048,)))
def test_activations_with_a_mean_are_as_accurate(type, n):
    """Zero points and offsets make large numbers of it, which have to cancel in whole numbers or lane by lane."""
    a, b = random(1, 40, 2048), random(2, n, 2048) * 0.1 + 1
    want = rounded(type, b).astype(np.float64) @ weights(type, a).T.astype(np.float64)
    assert nmse(product(type, a, b), want) < (2e-9 if type in (gg.Q4_1, gg.Q4_K) else 1e-11)


@pytest.mark.parametrize("type,n", each((gg.F32, gg.Q4_0), (9, 18, 40)))
def test_rows_that_are_not_there_are_blank(type, n):
    """The last rows of a tile are multiplied with the others: old bytes of work memory may be slow denormals."""
    tile = float_tile(type, n) if type is gg.F32 else code_tile(type, n)
    if tile is None or isa.ISA == "generic":
        pytest.skip(f"{isa.ISA} supports tiles of float32 at most")
    m, k = 61, 97 if type is gg.F32 else 96             # 97: no rows in place
    a, b = random(1, m, k), random(2, n, k)
    ctx, cpu = gg.Context(), gg.init_backend("CPU", n_threads=1)
    y = gg.mul_mat(gg.from_numpy(ctx, a, type=type), gg.from_numpy(ctx, b))
    graph = gg.Graph(y)
    gg.GraphAllocator(cpu).alloc_graph(graph)
    plan = cpu.graph_plan_create(graph)
    plan.compute()
    memory = plan._work.host_bytes(0, plan.work_nbytes)
    memory[:] = 1
    plan.compute()
    if "tile" not in plan.kernels[0].name:
        pytest.skip("dots supports rows at most")
    tall = max(rows for rows, _ in tile.multiply.values())
    begin = m // tall * tall if n < NL else 0           # of the rows in the strip
    strip = memory[panels_nbytes(tile, k, n):][:MB * tile.ldw].reshape(MB, tile.ldw)
    strip = strip[:, :-(-k // tile.unit) * tile.w_nbytes]
    there = m - begin
    assert (strip[there - 1] != 1).any() and (strip[there:-(-there // tall) * tall] == 0).all()
    assert (strip[-(-there // tall) * tall:] == 1).all()


def test_empty_and_single():
    assert product(gg.F32, np.ones((1, 1), np.float32), np.full((1, 1), 3, np.float32)).item() == 3
    assert product(gg.F32, random(0, 4, 8), random(0, 0, 8)).shape == (0, 4)


def test_errors_name_the_shapes():
    ctx = gg.Context()
    a, b = ctx.new_tensor(gg.F32, (64, 8), "weights"), ctx.new_tensor(gg.F32, (32, 4), "x")
    with pytest.raises(ShapeError, match=r"weights F32 \[64, 8\].*x F32 \[32, 4\]"):
        gg.mul_mat(a, b)
    with pytest.raises(ShapeError, match="transposed"):
        gg.mul_mat(gg.transpose(ctx.new_tensor(gg.F32, (8, 64))), ctx.new_tensor(gg.F32, (64, 4)))
    with pytest.raises(ShapeError, match="divide"):
        gg.mul_mat(ctx.new_tensor(gg.F32, (8, 2, 3)), ctx.new_tensor(gg.F32, (8, 2, 4)))
    with pytest.raises(TypeMismatch, match="b"):
        gg.mul_mat(a, ctx.new_tensor(gg.Q8_0, (64, 4)))
    with pytest.raises(TypeMismatch, match="I32"):
        gg.mul_mat(ctx.new_tensor(gg.I32, (64, 4)), a)


# ---------------------------------------------------------------- the machine code
PRODUCTS = list(itertools.product((gg.F32, gg.F16, gg.Q8_0, gg.Q4_0), (1, 18, 64)))
PROCESSORS = "znver4", "znver5", "sapphirerapids"
READ_BACK = """
import sys
import ggjit as gg
from helpers.machine_code import product_faults
from ggjit.ops.native import isa
print(isa.PROCESSOR, product_faults(getattr(gg, sys.argv[1]), int(sys.argv[2])))
"""
needs_set = pytest.mark.skipif(isa.ISA not in ("avx512", "avx2"), reason=f"no x86 instruction promised for {isa.ISA}")


@needs_set
@pytest.mark.parametrize("type,n", sampled(PRODUCTS, enumerate))
def test_hot_loops_hold_the_expected_instructions(type, n):
    assert not product_faults(type, n)


@pytest.fixture(scope="module")
def as_processor():
    """Runs code as if on a processor that LLVM knows by name: compiled for it, never run."""
    children = {name: Interpreter(NUMBA_CPU_NAME=name, PYTHONPATH=TESTS_PATH) for name in PROCESSORS}
    yield lambda name, *args: children[name].run(*args)
    for child in children.values():
        child.close()


@needs_set
@pytest.mark.parametrize("processor,type,n", sampled(
    [(p, t, n) for p in PROCESSORS for t, n in PRODUCTS], lambda case: [case[0], case[1].name]))
def test_hot_loops_on_other_processors(as_processor, processor, type, n):
    """LLVM schedules for the processor by name; its model of a Zen 4 spills what its models of Intel's do not."""
    done = as_processor(processor, READ_BACK, repr(type), n)
    assert done.stdout.strip() == f"{processor} []", done.stdout + done.stderr


# ---------------------------------------------------------------- every case, on every instruction set
def run_case(case):
    """NMSE of a spec's case against its reference; and whether two threads give the same bytes."""
    ctx = gg.Context()
    inp = Inputs(ctx, np.random.default_rng(zlib.crc32(case.name.encode())))
    y = case.build(inp)
    gg.alloc_ctx_tensors(ctx, gg.init_backend("CPU"))
    for t, values in inp.data:
        t.set(values)

    def four(t):
        if t.op == OP.PERMUTE:
            base = four(t.src[0])
            axes = [3 - t.op_params[3 - i] for i in range(4)]
            return base.transpose(np.argsort(axes).tolist())
        return gg.dequantize(t.type, t.bytes(), tuple(reversed(t.ne)))
    want = reference(y, four(y.src[0]), four(y.src[1]))
    return nmse(np.reshape(gg.compute(y), want.shape), want)


def case_kernel(case):
    return kernel(case.build(Inputs(gg.Context(), np.random.default_rng(0))), 1).name


def sweep(part, features=lambda case: families([case_kernel(case)])):
    """NMSE and limit of "all" cases or of those "drawn"."""
    some = cases() if part == "all" else drawn(cases(), features, lambda case: [case_kernel(case)])
    return isa.ISA, {case.name: (run_case(case), case.max_nmse) for case in some}


def sweep_elsewhere(part):
    """On an instruction set that is not the machine's: drawn is each type of weights and each kind of kernel."""
    def features(case):
        return case_kernel(case).split("-")[1:2] + case.name.split()[:1]
    return sweep(part, features)


PARTS = ["drawn", pytest.param("all", marks=pytest.mark.slow)]


@pytest.mark.parametrize("part", PARTS)
def test_cases(part):
    name, errors = sweep(part)
    assert len(errors) > {"drawn": 30, "all": 100}[part]
    bad = {k: e for k, (e, limit) in errors.items() if not e <= limit}
    assert not bad, (name, bad)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", isa.NAMES[isa.NAMES.index(isa.ISA) + 1:])
def test_cases_on_other_instruction_sets(name, part, on_isa):
    done = on_isa(name, f"import json, test_mul_mat as t; print(json.dumps(t.sweep_elsewhere({part!r})))", timeout=900)
    assert done.returncode == 0, done.stderr
    used, errors = json.loads(done.stdout)
    assert used == name and len(errors) > {"drawn": 10, "all": 100}[part]
    assert {k.split()[0] for k in errors} == {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "hadamard",
                                                 "exact"}
    bad = {k: e for k, (e, limit) in errors.items() if not e <= limit}
    assert not bad, bad


@pytest.mark.parametrize("type,n", each((gg.Q4_0, gg.Q4_1, gg.Q4_K), (1, 5, 33)))
def test_columns_in_the_type_they_would_be_rounded_to(type, n):
    """Blocks are used as they are: as near to float64 as products of the same values as F32."""
    partner = {gg.Q4_0: gg.Q8_0, gg.Q4_1: gg.Q8_1, gg.Q4_K: gg.Q8_K}[type]
    a, b = random(1, 19, 512), random(2, 2, n, 512)
    values = gg.dequantize(partner, gg.quantize(partner, b), b.shape)
    want = values.astype(np.float64) @ weights(type, a).astype(np.float64).T
    got = product(type, a, b, partner, n_threads=2)
    assert nmse(got, want) < 1e-11
    np.testing.assert_array_equal(got, product(type, a, values, n_threads=2))


@pytest.mark.parametrize("type", [gg.Q4_0, gg.Q8_0], ids=repr)
def test_such_columns_agree_with_the_real_ggml(type):
    """ggml's quantiser makes no Q8_1 and Q8_K from outside a product."""
    a, b = random(1, 7, 512), random(2, 3, 512)
    want = oracle.connect().op("mul_mat", [a, b], types=[repr(type), repr(gg.Q8_0)])
    assert nmse(product(type, a, b, gg.Q8_0), want.reshape(3, 7)) < 2e-7


def test_other_types_of_columns_are_refused():
    ctx = gg.Context()
    new = ctx.new_tensor
    for a, b in ((gg.F32, gg.Q8_0), (gg.Q4_0, gg.Q8_K), (gg.Q4_K, gg.Q8_0), (gg.Q4_0, gg.Q4_0), (gg.Q4_1, gg.Q8_0)):
        with pytest.raises(TypeMismatch, match="mul_mat: b .* must be one of F32, F16, BF16"):
            gg.mul_mat(new(a, (256, 2)), new(b, (256, 3)))
        with pytest.raises(TypeMismatch, match="mul_mat_id: b .* must be one of F32, F16, BF16"):
            gg.mul_mat_id(new(a, (256, 2, 2)), new(b, (256, 1, 3)), new(gg.I32, (1, 3)))
