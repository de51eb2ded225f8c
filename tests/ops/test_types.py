"""Types: quantisers byte-equal to ggml's, NumPy twins, round trips, errors."""
import os
import subprocess
import sys

import numpy as np
import pytest
from helpers import oracle

import ggjit as gg
from ggjit.ops.core.errors import NotSupported, ShapeError, TypeMismatch
from ggjit.ops.core.traits import all_traits, traits_of

FLOATS = (gg.F32, gg.F16, gg.BF16, gg.Q8_0, gg.Q4_0)
INTEGERS = (gg.I8, gg.I16, gg.I32, gg.I64)


def samples():
    """Values of many sizes, zeros, ties for the largest of a block, exact halves for the rounding."""
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((64, 512)) * np.exp(3 * rng.standard_normal((64, 512)))).astype(np.float32)
    x[0, :64] = 0
    x[1, 3], x[1, 7] = 50, -50
    x[2, 3], x[2, 7] = -50, 50
    x[3, :32] = np.arange(-16, 16) / 2
    x[3, 0] = 127
    x[4, :32] = np.arange(32) + 0.5
    x[5] *= 1e-6
    x[6] *= 1e4
    return x


@pytest.mark.parametrize("type", FLOATS, ids=repr)
def test_bytes_are_ggmls(type):
    x = samples()
    if type is gg.F16:
        x = x.clip(-6e4, 6e4)
    got = gg.quantize(type, x)
    np.testing.assert_array_equal(got, oracle.connect().quantize(repr(type), x))


@pytest.mark.parametrize("type", FLOATS, ids=repr)
def test_bytes_are_those_of_the_gguf_package(type, need):
    need("gguf", "the gguf package as oracle")
    from gguf import GGMLQuantizationType, quants
    x, kind = samples().clip(-6e4, 6e4), GGMLQuantizationType[repr(type)]
    raw = gg.quantize(type, x)
    np.testing.assert_array_equal(raw, quants.quantize(x, kind).view(np.uint8))
    if type.quantized or type is gg.BF16:
        np.testing.assert_array_equal(gg.dequantize(type, raw, x.shape), quants.dequantize(raw, kind))


@pytest.mark.parametrize("type", FLOATS, ids=repr)
def test_twins_agree(type):
    x, traits = samples().clip(-6e4, 6e4), traits_of(type)
    raw = gg.quantize(type, x)
    np.testing.assert_array_equal(raw, traits.np_from_float(x))
    np.testing.assert_array_equal(gg.dequantize(type, raw, x.shape), traits.np_to_float(raw))


@pytest.mark.parametrize("type", FLOATS, ids=repr)
@pytest.mark.parametrize("k", [32, 96, 160, 1])
def test_round_trip_is_stable(type, k):
    if k % type.block:
        return
    x = np.random.default_rng(k).uniform(-1, 1, (3, 2, k)).astype(np.float32)
    once = gg.dequantize(type, gg.quantize(type, x), x.shape)
    step = {gg.F32: 0, gg.F16: 2 ** -11, gg.BF16: 2 ** -8, gg.Q8_0: 1 / 254 + 1e-3, gg.Q4_0: 1 / 8 + 1e-3}[type]
    assert np.abs(once - x).max() <= step * np.abs(x).max()
    if type is not gg.Q4_0:                                    # d = m / -8 moves when -m is the largest
        np.testing.assert_allclose(gg.dequantize(type, gg.quantize(type, once), x.shape), once, rtol=1e-3, atol=1e-6)


def test_special_floats():
    x = np.array([np.inf, -np.inf, np.nan, -0.0, 65504, 1e30, 3e-8, 1e-45], np.float32)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(gg.dequantize(gg.F16, gg.quantize(gg.F16, x), 8),
                                      x.astype(np.float16).astype(np.float32))
    b = gg.dequantize(gg.BF16, gg.quantize(gg.BF16, x), 8)
    assert b[0] == np.inf and b[1] == -np.inf and np.isnan(b[2]) and np.signbit(b[3])
    quiet = np.array([0x7F800001], np.uint32).view(np.float32)         # rounding alone would make it infinite
    assert np.isnan(gg.dequantize(gg.BF16, gg.quantize(gg.BF16, quiet), 1))[0]


def test_a_block_of_nan_or_infinity_does_no_harm():
    for type in (gg.Q8_0, gg.Q4_0):
        for v in (np.nan, np.inf):
            x = np.full((1, 64), v, np.float32)
            x[0, 32:] = 1
            raw = gg.quantize(type, x)
            np.testing.assert_allclose(gg.dequantize(type, raw, x.shape)[0, 32:], np.ones(32), rtol=1e-3)


@pytest.mark.parametrize("type", INTEGERS, ids=repr)
def test_integers_truncate(type):
    x = np.array([[-2.7, -0.5, 0, 0.5, 2.7, 100]], np.float32)
    np.testing.assert_array_equal(gg.dequantize(type, gg.quantize(type, x), x.shape), np.trunc(x))


def test_layouts_that_are_not_contiguous_are_copied():
    x = samples()
    np.testing.assert_array_equal(gg.quantize(gg.Q8_0, x.T), gg.quantize(gg.Q8_0, np.ascontiguousarray(x.T)))
    raw = gg.quantize(gg.Q8_0, x)
    np.testing.assert_array_equal(gg.dequantize(gg.Q8_0, raw[::2], x[::2].shape),
                                  gg.dequantize(gg.Q8_0, raw, x.shape)[::2])
    assert gg.quantize("q4_0", x.astype(np.float64)).shape == (64, 512 // 32 * 18)
    assert gg.dequantize(gg.Q4_0, gg.quantize(gg.Q4_0, x).tobytes(), x.shape).shape == x.shape
    assert gg.quantize(gg.Q4_0, np.zeros((0, 32))).shape == (0, 18)


def test_errors_name_the_thing():
    with pytest.raises(ShapeError, match="multiple"):
        gg.quantize(gg.Q4_0, np.zeros((2, 33)))
    with pytest.raises(ShapeError, match="36 bytes, got 35"):
        gg.dequantize(gg.Q4_0, np.zeros(35, np.uint8), (2, 32))
    with pytest.raises(ShapeError, match="imatrix"):
        gg.quantize(gg.Q4_0, np.zeros((2, 32)), imatrix=np.ones(3))
    with pytest.raises(TypeMismatch, match="q9_9"):
        gg.quantize("q9_9", np.zeros(32))
    with pytest.raises(ShapeError, match="Q8_0 packs 32 values a block"):
        gg.quantize(gg.Q8_0, 1.0)
    with pytest.raises(NotSupported, match="IQ1_S|iq1_s"):
        gg.quantize("iq1_s", np.zeros(256))


def test_every_type_with_kernels_can_be_read():
    for type, (traits, module) in all_traits().items():
        assert traits.to_float and traits.type is type, (type, module)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_strict_quantisers_refuse_what_they_would_drop(bad):
    x = np.ones((3, 256), np.float32)
    x[1, 77] = bad
    for t in (gg.Q4_0, gg.Q8_0, gg.Q4_K, gg.IQ4_NL):
        with pytest.raises(gg.ParamError, match=r"value \[1, 77\] is -?(nan|inf).*strict=False"):
            gg.quantize(t, x, strict=True)
        x0 = np.nan_to_num(x, nan=1, posinf=1, neginf=1)
        np.testing.assert_array_equal(gg.quantize(t, x0, strict=True), gg.quantize(t, x0))
    assert not np.isfinite(gg.dequantize(gg.BF16, gg.quantize(gg.BF16, x, strict=True), x.shape)).all()


def test_the_check_mode_is_strict():
    code = ("import ggjit as gg, numpy as np\ntry:\n    gg.quantize('q4_0', np.full((1, 32), np.nan, np.float32))\n"
            "except gg.ParamError as e:\n    print(e)")
    r = subprocess.run([sys.executable, "-c", code], env={**os.environ, "GGJIT_DEBUG": "check"}, capture_output=True,
                       text=True, timeout=300)
    assert "value [0, 0] is nan" in r.stdout, r.stderr


def test_a_type_equals_its_name():
    assert gg.F32 == "F32" == gg.F32 and gg.Q4_K == "q4_k" and gg.F32 != "F16" and gg.F32 != "no type" and gg.F32 != 0
    assert "F32" in [gg.Q8_0, gg.F32] and {gg.F32: 1}[gg.F32] == 1
