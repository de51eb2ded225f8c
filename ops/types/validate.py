"""Checks that the bytes of a tensor hold finite numbers, in quantised types the scales of blocks
(ggml_validate_row_data).

    q4_1  | d | m | quants ...                  d and m are float16: checked; quants can be anything
"""
import numpy as np

from ggjit.ops.core.errors import ShapeError, TypeMismatch
from ggjit.ops.core.types import Type

_HALF_INFINITE = 0x7C00         # float16 with all bits of the exponent: infinite or NaN
_E8M0_NAN = 0xFF
_BLOCKS_AT_A_TIME = 1 << 20     # bounds the memory for masks
# byte offsets in a block of the float16 numbers that scale it
SCALES = {"q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,), "q8_1": (0, 2), "q1_0": (0,),
          "q2_0": (0,), "q2_K": (80, 82), "q3_K": (108,), "q4_K": (0, 2), "q5_K": (0, 2), "q6_K": (208,),
          "iq2_xxs": (0,), "iq2_xs": (0,), "iq2_s": (0,), "iq3_xxs": (0,), "iq3_s": (0,), "iq1_s": (0,),
          "iq4_nl": (0,), "iq4_xs": (0,), "tq1_0": (52,), "tq2_0": (64,)}
_IQ1_M_SCALES = 48              # byte offset of four words whose upper 4 bits together are the float16 scale


def first_bad_block(type, data):
    """(number of the first block with a NaN or an infinity, what it holds), or None.

    A block of F32, F16, BF16 and F64 is one number.  data: bytes or an array of whole blocks, any size.
    Integers and NVFP4 (every byte is a scale) are always good.  Errors: TypeMismatch, ShapeError.
    """
    if not isinstance(type, Type):
        raise TypeMismatch(f"{type!r} is not a tensor type; use gg.Q8_0, gg.F16, ...")
    raw = np.frombuffer(data, np.uint8) if not isinstance(data, np.ndarray) else data.reshape(-1).view(np.uint8)
    if raw.size % type.nbytes:
        raise ShapeError(f"{raw.size} bytes are not whole blocks of {type!r}, which have {type.nbytes} bytes")
    blocks = raw.reshape(-1, type.nbytes)
    for start in range(0, len(blocks), _BLOCKS_AT_A_TIME):
        found = [(int(bad.argmax()), name) for name, bad in _checks(type, blocks[start:start + _BLOCKS_AT_A_TIME])
                 if bad.any()]
        if found:
            i, name = min(found)
            return start + i, f"{name} is infinite or NaN"
    return None


def validate_row_data(type, data):
    """Are all numbers in these bytes finite, scales of blocks included?

        gg.validate_row_data(gg.Q8_0, t.bytes())

    type: a tensor type; data: bytes or an array of whole blocks.  Errors: TypeMismatch, ShapeError (part of a block).
    Source: ggml_validate_row_data.
    """
    return first_bad_block(type, data) is None


def _checks(type, blocks):
    """(what, which blocks are bad) of everything that is checked in blocks [n, nbytes] of the type."""
    name = type.name
    if name == "bf16":
        yield "the value", blocks.view(np.uint16)[:, 0] & 0x7F80 == 0x7F80
    elif type.dtype is not None:
        if type.dtype.kind == "f":
            yield "the value", ~np.isfinite(blocks.view(type.dtype)[:, 0])
    elif name == "mxfp4":
        yield "the scale", blocks[:, 0] == _E8M0_NAN
    elif name == "q8_K":
        yield "the scale", ~np.isfinite(np.ascontiguousarray(blocks[:, :4]).view(np.float32)[:, 0])
    elif name == "iq1_m":
        words = np.ascontiguousarray(blocks[:, _IQ1_M_SCALES:_IQ1_M_SCALES + 8]).view(np.uint16)
        upper_byte = words[:, 3] & 0xF000 | words[:, 2] >> 4 & 0x0F00       # holds the whole exponent
        yield "the scale", upper_byte & _HALF_INFINITE == _HALF_INFINITE
    else:
        for i, at in enumerate(SCALES.get(name, ())):
            half = np.ascontiguousarray(blocks[:, at:at + 2]).view(np.uint16)[:, 0]
            yield ("the scale", "the minimum")[i], half & _HALF_INFINITE == _HALF_INFINITE
