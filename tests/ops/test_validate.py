"""validate_row_data: NaN and infinities in values and in the scales of blocks (ggml_validate_row_data)."""
import numpy as np
import pytest

import ggjit as gg
from ggjit.ops.core.types import BY_NAME
from ggjit.ops.types.validate import SCALES, first_bad_block

INFINITE, NAN = 0x7C00, 0xFE01          # as float16
PLAIN = {"f32": np.float32, "f16": np.float16, "f64": np.float64}


def test_every_type_is_checked():
    unchecked = {"nvfp4", "i8", "i16", "i32", "i64"}    # every byte is a number
    assert set(SCALES) | {"mxfp4", "q8_K", "iq1_m", "bf16", *PLAIN} | unchecked == {t.name for t in BY_NAME.values()}


@pytest.mark.parametrize("name", SCALES)
def test_scales_of_blocks(name):
    """The float16 numbers that scale a block; read by dequantize where there is one."""
    type = next(t for t in BY_NAME.values() if t.name == name)
    raw = np.full((4, type.nbytes), 0x11, np.uint8)
    assert gg.validate_row_data(type, raw) and gg.validate_row_data(type, raw.tobytes()) and \
        gg.validate_row_data(type, b"")
    for at in SCALES[name]:
        for bits in (INFINITE, NAN):
            bad = raw.copy()
            bad[2, at:at + 2] = np.array([bits], np.uint16).view(np.uint8)
            assert not gg.validate_row_data(type, bad)
            assert first_bad_block(type, bad)[0] == 2
            if name != "q8_1":
                with np.errstate(all="ignore"):
                    values = gg.dequantize(type, bad.tobytes(), (4, type.block))
                assert not np.isfinite(values[2]).all() and np.isfinite(values[[0, 1, 3]]).all()
    with pytest.raises(gg.ShapeError, match="not whole blocks"):
        gg.validate_row_data(type, raw.reshape(-1)[1:])


def test_the_other_scales():
    e8m0 = np.zeros((3, 17), np.uint8)
    e8m0[1, 0] = 0xFE
    assert gg.validate_row_data(gg.MXFP4, e8m0)
    e8m0[1, 0] = 0xFF
    assert first_bad_block(gg.MXFP4, e8m0) == (1, "the scale is infinite or NaN")
    iq1_m = np.zeros((3, 56), np.uint8)
    words = np.zeros(4, np.uint16)
    for i in range(4):                                  # the scale's bits are the upper four of each word
        words[i] = (INFINITE >> 4 * i & 0xF) << 12 | 0x0123
    iq1_m[2, 48:] = words.view(np.uint8)
    assert first_bad_block(gg.IQ1_M, iq1_m)[0] == 2
    words[3] &= 0x3FFF
    iq1_m[2, 48:] = words.view(np.uint8)
    assert gg.validate_row_data(gg.IQ1_M, iq1_m)
    q8_K = next(t for t in BY_NAME.values() if t.name == "q8_K")
    block = np.zeros((2, 292), np.uint8)
    block[1, :4] = np.array([np.inf], np.float32).view(np.uint8)
    assert first_bad_block(q8_K, block)[0] == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_plain_numbers(bad):
    for name, dtype in PLAIN.items():
        type = next(t for t in BY_NAME.values() if t.name == name)
        a = np.arange(5).astype(dtype)
        assert gg.validate_row_data(type, a.tobytes())
        a[3] = bad
        assert first_bad_block(type, a) == (3, "the value is infinite or NaN")
    bits = np.array([0x3F80, 0x7F7F, 0xFF7F], np.uint16)
    assert gg.validate_row_data(gg.BF16, bits)
    bits[1] = np.array([bad], np.float32).view(np.uint32)[0] >> 16
    assert first_bad_block(gg.BF16, bits)[0] == 1
    assert gg.validate_row_data(gg.I32, np.array([-1, 1 << 30], np.int32))


def test_numbers_far_into_the_data(monkeypatch):
    monkeypatch.setattr("ggjit.ops.types.validate._BLOCKS_AT_A_TIME", 7)
    a = np.zeros(50, np.float32)
    a[[23, 40]] = np.nan
    assert first_bad_block(gg.F32, a)[0] == 23
    with pytest.raises(gg.TypeMismatch, match="is not a tensor type"):
        gg.validate_row_data("q8_0", a)
