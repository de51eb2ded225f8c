"""IQ1, IQ2, IQ3: super-blocks whose codes name points of a grid (iq_grids.py); eight groups of 32 values.

    type      bytes after d (f16)                                            w = d / f (2 s + 1) +- grid
    IQ2_XXS   per group: 4 points | 4 x 7 signs, 4 bits s                    f = 8, s for 32 values
    IQ2_XS    32 words: 9 bits point, 7 signs | 8 bytes s, s                 f = 8, s for 16
    IQ2_S     32 points | 32 signs | 8 x 4 upper point bits | 8 bytes s, s   f = 8, s for 16
    IQ3_XXS   64 points | per group 4 x 7 signs, 4 bits s                    f = 4, s for 32
    IQ3_S     64 points | 8 upper point bits each | 32 signs | 4 bytes s, s  f = 1, s for 32
    IQ1_S     32 points | per group 4 x 3 upper bits, 3 bits s, shift        f = 8, s for 32; 8 grid +- 1 for the grid
    IQ1_M     32 points | 16 bytes: 3 upper bits and a shift, twice          the same, s for 16
              | 4 words: 4 x 3 bits s and four bits of d (d is not at the front)

Seven signs stand for eight: their number is even.  Points of IQ2 and IQ1 are 8 values, of IQ3 4.
"""
from llvmlite import ir

from ggjit.ops.core.traits import Traits
from ggjit.ops.core.types import BY_NAME
from ggjit.ops.native.lanes import concat_ir, f32, i32, i64, nibbles_ir, splat_const, table_ir
from ggjit.ops.native.mem import IR_F16, IR_F32, IR_I32, IR_I64
from ggjit.ops.native.simd import IR, const_ir, load_ir, opaque_ir, shuffle_ir, vec_ir
from ggjit.ops.types.shared import iq1_write, iq_write
from ggjit.ops.types.shared.blocks import mask_bytes_ir, twice_ir
from ggjit.ops.types.shared.blocks_super import Super
from ggjit.ops.types.shared.iq_grids import GRIDS, SIGNS

I16 = IR["i16"]


# ---------------------------------------------------------------- pieces
def _byte(b, p, offs):
    return b.zext(load_ir(b, b.add(p, i64(offs)), IR["i8"]), IR_I32)


def _word(b, p, offs, width=IR_I32):
    v = load_ir(b, b.add(p, i64(offs)), width)
    return v if width is IR_I32 else b.zext(v, IR_I32)


def _bits(b, v, shift, n):
    return b.and_(b.lshr(v, i32(shift)) if shift else v, i32((1 << n) - 1))


def _join(b, low, high, shift):
    return b.or_(low, b.shl(high, i32(shift)))


def _points_ir(b, name, indices, scale=1):
    """Grid points -> <32 x i8>"""
    grid = GRIDS[name] * scale
    table, size = table_ir(b, f"{name}.{scale}", grid.tobytes()), grid.shape[1]
    elem = {4: IR_I32, 8: IR_I64}[size]
    v = ir.Constant(ir.VectorType(elem, 32 // size), ir.Undefined)
    for i, index in enumerate(indices):
        addr = b.add(table, b.mul(b.zext(index, IR_I64), i64(size)))
        v = b.insert_element(v, load_ir(b, addr, elem), i32(i))
    return b.bitcast(v, vec_ir("i8", 32))


def _negate_ir(b, v, bits32):
    """-v where the bit is set"""
    mask = mask_bytes_ir(b, bits32, -1)
    return b.sub(b.xor(v, mask), mask)


def _seven_signs_ir(b, fields):
    """Four fields of seven signs -> 32 bits"""
    table = table_ir(b, "iq_signs", SIGNS)
    out = None
    for i, f in enumerate(fields):
        s = b.zext(load_ir(b, b.add(table, b.zext(f, IR_I64)), IR["i8"]), IR_I32)
        out = s if out is None else _join(b, out, s, 8 * i)
    return out


def _odd_ir(b, s):
    """2 s + 1"""
    return b.add(b.add(s, s), splat_const("i16", 1, s.type.count))


def _upper_words_scales_ir(b, p, offs, step):
    """The upper four bits of eight words, `step` words apart -> scales for both halves."""
    v = load_ir(b, b.add(opaque_ir(b, p), i64(offs)), vec_ir("i32", 8 * step))
    if step > 1:
        v = shuffle_ir(b, v, v, range(step - 1, 8 * step, step))
    return twice_ir(b, _odd_ir(b, b.trunc(b.lshr(v, splat_const("i32", 28, 8)), vec_ir("i16", 8))))


def _nibble_scales_ir(offs):
    """Eight bytes: lower nibble for the first half of a group, upper one for the second."""
    def scales(b, p):
        s = concat_ir(b, *nibbles_ir(b, load_ir(b, b.add(p, i64(offs)), vec_ir("i8", 8))))
        return _odd_ir(b, b.zext(s, vec_ir("i16", 16)))
    return scales


def _d_ir(divisor):
    return lambda b, p: b.fmul(b.fpext(load_ir(b, p, IR_F16), IR_F32), f32(1.0 / divisor))


# ---------------------------------------------------------------- codes
def _iq2_xxs(b, p):
    out = []
    for g in range(8):
        low, high = _word(b, p, 2 + 8 * g), _word(b, p, 6 + 8 * g)
        v = _points_ir(b, "iq2_xxs", [_bits(b, low, 8 * i, 8) for i in range(4)])
        out.append(_negate_ir(b, v, _seven_signs_ir(b, [_bits(b, high, 7 * i, 7) for i in range(4)])))
    return out


def _iq2_xs(b, p):
    out = []
    for g in range(8):
        words = [_word(b, p, 2 + 8 * g + 2 * i, I16) for i in range(4)]
        v = _points_ir(b, "iq2_xs", [_bits(b, w, 0, 9) for w in words])
        out.append(_negate_ir(b, v, _seven_signs_ir(b, [b.lshr(w, i32(9)) for w in words])))
    return out


def _iq2_s(b, p):
    out = []
    for g in range(8):
        high = _byte(b, p, 66 + g)
        v = _points_ir(b, "iq2_s", [_join(b, _byte(b, p, 2 + 4 * g + i), _bits(b, high, 2 * i, 2), 8)
                                    for i in range(4)])
        out.append(_negate_ir(b, v, _word(b, p, 34 + 4 * g)))
    return out


def _iq3_xxs(b, p):
    out = []
    for g in range(8):
        v = _points_ir(b, "iq3_xxs", [_byte(b, p, 2 + 8 * g + i) for i in range(8)])
        signs = _word(b, p, 66 + 4 * g)
        out.append(_negate_ir(b, v, _seven_signs_ir(b, [_bits(b, signs, 7 * i, 7) for i in range(4)])))
    return out


def _iq3_s(b, p):
    out = []
    for g in range(8):
        high = _byte(b, p, 66 + g)
        v = _points_ir(b, "iq3_s", [_join(b, _byte(b, p, 2 + 8 * g + i), _bits(b, high, i, 1), 8) for i in range(8)])
        out.append(_negate_ir(b, v, _word(b, p, 74 + 4 * g)))
    return out


def _iq3_s_scales(b, p):
    low, high = nibbles_ir(b, load_ir(b, b.add(p, i64(106)), vec_ir("i8", 4)))
    s = b.shuffle_vector(low, high, const_ir("i32", [0, 4, 1, 5, 2, 6, 3, 7]))
    return twice_ir(b, _odd_ir(b, b.zext(s, vec_ir("i16", 8))))


def _iq1_s(b, p):
    out = []
    for g in range(8):
        high = _word(b, p, 34 + 2 * g, I16)
        v = _points_ir(b, "iq1_s", [_join(b, _byte(b, p, 2 + 4 * g + i), _bits(b, high, 3 * i, 3), 8)
                                    for i in range(4)], 8)
        down = b.icmp_unsigned("!=", _bits(b, high, 15, 1), i32(0))
        out.append(b.add(v, b.select(down, splat_const("i8", -1, 32), splat_const("i8", 1, 32))))
    return out


def _iq1_s_scales(b, p):
    v = load_ir(b, b.add(opaque_ir(b, p), i64(34)), vec_ir("i16", 8))
    return twice_ir(b, _odd_ir(b, b.and_(b.lshr(v, splat_const("i16", 12, 8)), splat_const("i16", 7, 8))))


def _iq1_m(b, p):
    out = []
    for g in range(8):
        high = _word(b, p, 32 + 2 * g, I16)                         # four nibbles: 3 upper bits, shift
        v = _points_ir(b, "iq1_s", [_join(b, _byte(b, p, 4 * g + i), _bits(b, high, 4 * i, 3), 8)
                                    for i in range(4)], 8)
        shifts = None
        for i in range(4):
            eight = b.mul(_bits(b, high, 4 * i + 3, 1), i32(0xFF))
            shifts = eight if shifts is None else _join(b, shifts, eight, 8 * i)
        down = mask_bytes_ir(b, shifts, -2)
        out.append(b.add(v, b.add(down, splat_const("i8", 1, 32))))
    return out


def _iq1_m_words(b, p):
    return load_ir(b, b.add(opaque_ir(b, p), i64(48)), vec_ir("i16", 4))


def _iq1_m_scales(b, p):
    v = _iq1_m_words(b, p)
    v = shuffle_ir(b, v, v, [g // 2 for g in range(8)] * 2)
    shifts = [6 * (g % 2) for g in range(8)] + [6 * (g % 2) + 3 for g in range(8)]
    return _odd_ir(b, b.and_(b.lshr(v, const_ir("i16", shifts)), splat_const("i16", 7, 16)))


def _iq1_m_d(b, p):
    """The upper four bits of the four words are a float16."""
    v = b.and_(b.lshr(_iq1_m_words(b, p), const_ir("i16", [12, 8, 4, 0])),
               const_ir("i16", [0x000F, 0x00F0, 0x0F00, -0x1000]))
    parts = [b.extract_element(v, i32(i)) for i in range(4)]
    d = b.bitcast(b.or_(b.or_(parts[0], parts[1]), b.or_(parts[2], parts[3])), IR_F16)
    return b.fmul(b.fpext(d, IR_F32), f32(0.125))


def _traits(name, codes, scales, d):
    blocks = Super(BY_NAME[name], codes, scales, d, signed=True, halves=name in ("iq2_xs", "iq2_s", "iq1_m"))
    return blocks.traits(None, quantize_grid=WRITERS[name])


WRITERS = iq1_write.WRITERS | iq_write.WRITERS
TRAITS: tuple[Traits, ...] = (
    _traits("iq2_xxs", _iq2_xxs, lambda b, p: _upper_words_scales_ir(b, p, 2, 2), _d_ir(8)),
    _traits("iq2_xs", _iq2_xs, _nibble_scales_ir(66), _d_ir(8)),
    _traits("iq2_s", _iq2_s, _nibble_scales_ir(74), _d_ir(8)),
    _traits("iq3_xxs", _iq3_xxs, lambda b, p: _upper_words_scales_ir(b, p, 66, 1), _d_ir(4)),
    _traits("iq3_s", _iq3_s, _iq3_s_scales, _d_ir(1)),
    _traits("iq1_s", _iq1_s, _iq1_s_scales, _d_ir(8)),
    _traits("iq1_m", _iq1_m, _iq1_m_scales, _iq1_m_d))
