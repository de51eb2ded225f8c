"""The quantised types built from block decoders: bytes, values and products against the real ggml."""
import itertools

import numpy as np
import pytest
from helpers import oracle
from helpers.cases import nmse
from helpers.sample import sampled

import ggjit as gg
from ggjit.ops.core.errors import NotSupported
from ggjit.ops.core.traits import traits_of
from ggjit.ops.native import isa

PLAIN = ("Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4")
K = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
TERNARY = ("TQ1_0", "TQ2_0")
NEW = ("NVFP4", "Q1_0", "Q2_0")                             # known to ggml 0.26, not to 0.13
GRIDS = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M")
SEARCHED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", *K)           # importances change their codes
# bytes of a block that are a float16 scale or min
HALVES = {"Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "IQ4_NL": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
          "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,), "Q1_0": (0,),
          "Q2_0": (0,), **{name: (0,) for name in GRIDS if name != "IQ1_M"}}


def ggml(name):
    return oracle.connect("xllamacpp" if name in NEW else "pywhispercpp")


def samples():
    """Values of many sizes; runs of zeros, of equal values, of one sign, ties for the largest."""
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((20, 512)) * np.exp(2 * rng.standard_normal((20, 512)))).astype(np.float32)
    x[8:] = rng.standard_normal((12, 512))
    x[0, :300], x[1], x[2] = 0, 1, -2
    x[3, :64] = np.arange(64) / 4
    x[4] *= 1e-6
    x[5], x[6] = abs(x[5]), -abs(x[6])
    x[7, 3], x[7, 7] = 500, -500
    return x


def blocks(name, rows, n, rng):
    """Random codes and scales: every byte that is no float16 may be anything."""
    t = getattr(gg, name)
    raw = rng.integers(0, 256, (rows, n, t.nbytes)).astype(np.uint8)
    for at in HALVES.get(name, ()):
        d = rng.uniform(0.25, 1, (rows, n)).astype(np.float16) * np.float16(0.01)
        raw[..., at:at + 2] = d[..., None].view(np.uint8)
    if name == "MXFP4":
        raw[..., 0] = rng.integers(0, 200, (rows, n))
    if name == "NVFP4":
        raw[..., :4] = rng.integers(0, 0x7F, (rows, n, 4))
    if name == "IQ1_M":
        raw[..., 55] = raw[..., 55] & 0x0F | 0x20           # the upper bits of its float16
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("name", PLAIN + K + TERNARY + NEW)
def test_bytes_are_ggmls(name):
    x = samples()
    np.testing.assert_array_equal(gg.quantize(name, x), ggml(name).quantize(name, x))


@pytest.mark.parametrize("name", ("q8_1", "q8_K"))
def test_activation_types_are_ggmls(name):
    x = samples()
    raw = gg.quantize(name, x)
    want = oracle.connect().quantize_row(f"quantize_row_{name}_ref", x, raw.shape[-1])
    if name == "q8_K":                                      # ggml leaves the sums of a block of zeros as they were
        zeros = (x.reshape(20, 2, 256) == 0).all(-1)
        want.reshape(20, 2, -1)[zeros, 260:] = 0
    np.testing.assert_array_equal(raw, want)
    assert np.abs(gg.dequantize(name, raw, x.shape) - x).max() <= 0.01 * np.abs(x).max()


@pytest.mark.parametrize("name", SEARCHED)
def test_bytes_are_ggmls_with_importances(name):
    x = samples()
    w = np.random.default_rng(2).uniform(0.01, 2, 512).astype(np.float32)
    got = gg.quantize(name, x, imatrix=w)
    np.testing.assert_array_equal(got, ggml(name).quantize(name, x, w))
    assert (got != gg.quantize(name, x)).any()


@pytest.mark.parametrize("name", PLAIN + K + TERNARY + NEW + GRIDS)
def test_values_are_ggmls(name):
    t = getattr(gg, name)
    n = 512 // t.block
    raw = blocks(name, 16, n, np.random.default_rng(3))
    np.testing.assert_array_equal(gg.dequantize(t, raw, (16, 512)), ggml(name).dequantize(name, raw, 512))


def test_values_are_those_of_the_gguf_package(need):
    """A second oracle for the grids, which were taken from ggml's tables."""
    need("gguf", "the gguf package as oracle")
    from gguf import GGMLQuantizationType, quants
    for name in GRIDS:
        raw = blocks(name, 8, 2, np.random.default_rng(4))
        np.testing.assert_array_equal(gg.dequantize(name, raw, (8, 512)),
                                      quants.dequantize(raw, GGMLQuantizationType[name]))


# ---------------------------------------------------------------- products
def product(name, raw, y):
    """Rows of blocks times the rows of y."""
    t, ctx, backend = getattr(gg, name), gg.Context(), gg.init_backend("CPU")
    a, b = ctx.new_tensor(t, (y.shape[1], len(raw))), gg.from_numpy(ctx, y)
    gg.alloc_ctx_tensors(ctx, backend)
    a.set_bytes(raw)
    return gg.compute(gg.mul_mat(a, b), backend=backend).reshape(len(y), len(raw))


def error(name, n, seed=5):
    """NMSE of a product of random blocks next to float64 over the same rounded activations."""
    t, rng = getattr(gg, name), np.random.default_rng(seed)
    k = 5 * 32 if t.block == 32 else 3 * t.block
    raw = blocks(name, 9, k // t.block, rng)
    y = rng.uniform(-1, 1, (n, k)).astype(np.float32)
    y[0, ::5] = 0
    want = traits_of(t).np_round_activations(y).astype(np.float64) @ gg.dequantize(t, raw, (9, k)).T.astype(np.float64)
    return nmse(product(name, raw, y), want)


@pytest.mark.parametrize("name", PLAIN + K + TERNARY + NEW + GRIDS)
def test_products_are_accurate(name):
    assert error(name, 1) < 1e-11


def group(name):
    return next(g for g in (PLAIN, K, TERNARY, NEW, GRIDS) if name in g)


@pytest.mark.parametrize("name,n", sampled(itertools.product(PLAIN + K + TERNARY + NEW + GRIDS, (3, 4, 33)),
                                           lambda case: (group(case[0]), case[1], (case[0] in K, case[1]))))
def test_products_with_several_columns_are_accurate(name, n):
    assert error(name, n) < 1e-11


@pytest.mark.parametrize("name", ("Q4_1", "Q5_0", "Q2_K", "Q4_K", "Q6_K", "IQ4_XS"))
def test_products_agree_with_the_real_ggml(name):
    """The same codes on both sides; ggml rounds the scale of 32 activations through float16."""
    rng = np.random.default_rng(6)
    a, y = rng.standard_normal((13, 512)).astype(np.float32), rng.standard_normal((1, 512)).astype(np.float32)
    want = ggml(name).op("mul_mat", [a, y], types=[name]).reshape(1, 13)
    assert nmse(product(name, gg.quantize(name, a), y), want) < (1e-11 if name in K else 2e-6)


@pytest.mark.parametrize("name", ("Q5_1", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4"))
def test_largest_codes_do_not_overflow(name):
    """All bits set in codes and scales, activations of +-127: 16-bit sums on the way must not wrap."""
    t = getattr(gg, name)
    k = 4 * t.block
    for byte in (0xFF, 0x00, 0x7F, 0x80):
        raw = np.full((2, 4, t.nbytes), byte, np.uint8)
        for at in HALVES.get(name, ()):
            raw[..., at:at + 2] = np.frombuffer(np.float16(1).tobytes(), np.uint8)
        if name == "MXFP4":
            raw[..., 0] = 127
        raw, y = raw.reshape(2, -1), np.full((1, k), 127, np.float32)
        want = y.astype(np.float64) @ gg.dequantize(t, raw, (2, k)).T.astype(np.float64)
        np.testing.assert_allclose(product(name, raw, y), want, rtol=1e-5)


@pytest.mark.parametrize("name", isa.NAMES[isa.NAMES.index(isa.ISA) + 1:])
def test_products_on_other_instruction_sets(name, on_isa):
    runs = [("IQ4_NL", 1), ("Q3_K", 1), ("IQ2_XXS", 1)] + [("Q5_1", 20), ("Q6_K", 20)] * (name == "avx2")
    done = on_isa(name, f"import test_types_more as t; print(t.isa.ISA, max(t.error(*x) for x in {runs!r}) < 1e-11)")
    assert done.stdout.split() == [name, "True"], done.stdout + done.stderr


# ---------------------------------------------------------------- through tensors and ops
def test_tensors_and_rows():
    """set, numpy, get_rows, set_rows and cpy take these types as they take Q8_0."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal((6, 512)).astype(np.float32)
    for name in ("Q4_1", "Q4_K"):
        t, ctx, backend = getattr(gg, name), gg.Context(), gg.init_backend("CPU")
        values = gg.dequantize(name, gg.quantize(name, x), x.shape)
        table, other = ctx.new_tensor(t, (512, 6)), ctx.new_tensor(t, (512, 6))
        rows, ids = gg.from_numpy(ctx, x[:2].copy()), gg.from_numpy(ctx, np.array([4, 1], np.int32))
        gg.alloc_ctx_tensors(ctx, backend)
        table.set(x)
        other.set(np.zeros_like(x))
        np.testing.assert_array_equal(table.numpy(), values)
        np.testing.assert_array_equal(gg.compute(gg.get_rows(table, ids), backend=backend).reshape(2, 512),
                                      values[[4, 1]])
        gg.compute(gg.set_rows(other, rows, ids), backend=backend)
        np.testing.assert_array_equal(other.numpy()[[4, 1]], values[:2])
        np.testing.assert_array_equal(gg.compute(gg.cast(table, gg.F32), backend=backend).reshape(6, 512), values)


def test_types_that_cannot_be_written_say_so():
    with pytest.raises(NotSupported, match="IQ2_XXS"):
        gg.quantize(gg.IQ2_XXS, np.zeros((1, 256)))


def test_importances_do_not_change_types_without_a_search():
    x, w = samples(), np.ones(512, np.float32)
    for name in ("MXFP4", "TQ2_0"):
        np.testing.assert_array_equal(gg.quantize(name, x, imatrix=w), gg.quantize(name, x))
