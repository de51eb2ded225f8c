"""How quantised blocks unpack when their rows are interleaved: a lane of a vector is a row of the matrix.

    file      row 0: | d | words |      row 1: | d | words |    ...     one row after the other
    repacked  | word 0 of L rows | word 1 of L rows | ... | d of L rows |  of block 0 | ... of block 1 | ...

L rows, 16 with AVX-512, 8 with AVX2 and 4 with NEON, take as many bytes as in the file and are one stream of memory:
with the scales of all blocks behind the codes of all blocks Q4_0 came at 32 instead of 43 GB/s (Zen 5), since the
start of each group's two streams waited.  Fields move as they are, so one routine packs every type (`Format.runs`).  A
word holds codes of four or eight neighbours in k, its fields in the file's order: shifts pick four codes a lane, for
all rows at once.
A part is what shares an integer scale: a block of 32, or 16 or 32 elements of a super-block:

    value = scale[part] (code - zero_point) - offset[part]

The integer scales of a super-block times its d are float32 on x86.  NEON multiplies by integers as fast as it converts
them: there they stay integers, and d comes last.
"""
import dataclasses
import itertools
from collections.abc import Callable

from llvmlite import ir

from ggjit.ops.core.types import BY_NAME, Type
from ggjit.ops.native import isa, neon
from ggjit.ops.native.lanes import i64, nibbles_ir, splat_const, zero
from ggjit.ops.native.mem import call_intrinsic
from ggjit.ops.native.simd import W, const_ir, load_ir, shuffle_ir, vec_ir
from ggjit.ops.types import fp4, iq4_nl

LANES = W
# codes may be any unsigned byte; AVX2 splits off signs, NEON multiplies signed bytes
UNSIGNED = isa.ISA == "avx512"
HALF, BYTE, WORD = 2, 1, 4


@dataclasses.dataclass(frozen=True, eq=False)
class Format:
    """A type's blocks with rows interleaved.  The `_ir` members build LLVM IR.

    runs        ((bytes a field, first byte in the file's block, fields[, xor of every byte of a word]), ...) in the
                order of the layout, words first
    n_parts     parts of a block
    fours_ir    (b, rows, part) -> pairs (which four of the part, vector of four codes a lane), each asked for when it
                is multiplied: those of one word one after the other, so that no word waits in a register
    scale_ir    (b, rows, part) -> <L x float>; <L x i32> where there is d_ir
    d_ir        (b, rows) -> <L x float>, what the integer scales of a super-block are multiplied with; or None
    offset_ir   (b, rows) -> <L x float>, the offset of a block of one part, or what its mins are multiplied with; None
    mins_ir     (b, rows, pair) -> <L x i32>, of parts 2 pair and 2 pair + 1, 16 bits each; NEON: all rows of the one,
                then all of the other; or None
    signed      codes are signed bytes; else unsigned, and zero_point is subtracted
    part_nbytes of L rows, where all parts lie alike and fours_ir and scale_ir of part 0 serve all; else 0
    sharing     so many parts, one after the other in `order`, are made of the same words
    paired      vectors 2 i and 2 i + 1 of fours_ir are the fours 2 i and 2 i + 1 of rows 0 and 1, and of rows 2 and 3:
                eight codes of a row lie side by side, as NEON multiplies matrices
    """
    type: Type
    runs: tuple
    n_parts: int
    fours_ir: Callable
    scale_ir: Callable
    d_ir: Callable | None = None
    offset_ir: Callable | None = None
    mins_ir: Callable | None = None
    zero_point: int = 0
    signed: bool = False
    part_nbytes: int = 0
    sharing: int = 1
    paired: bool = False

    @property
    def n_fours(self):
        """Groups of four weights in a part."""
        return self.type.block // self.n_parts // 4

    @property
    def order(self):
        """Parts as they are multiplied.  Sums of integers have no order: parts of the same words follow each other."""
        if self.d_ir and self.n_parts == 16:
            return [8 * n + 2 * q + half for n in range(2) for half in range(2) for q in (0, 2, 1, 3)]
        return range(self.n_parts)

    @property
    def packed(self):
        """Do its words hold more codes than bytes?"""
        return self.runs[0][2] < self.n_fours * self.n_parts

    @property
    def nbytes(self):
        """Bytes of a block of L rows."""
        return LANES * sum(width * n for width, _, n, *_ in self.runs)

    @property
    def starts(self):
        """Byte at which each run of L interleaved blocks begins."""
        return list(itertools.accumulate((width * LANES * n for width, _, n, *_ in self.runs[:-1]), initial=0))


class InterleavedRows:
    """Fields of L interleaved blocks, which begin at p; words: a second copy of p, hidden from LLVM."""

    def __init__(self, b, format, p, words):
        self.b, first = b, {}
        for (width, *_), start in zip(format.runs, format.starts, strict=True):
            first.setdefault(width, start)
        self.starts = {width: b.add(words if width == WORD else p, i64(start)) for width, start in first.items()}

    def _load(self, width, i, elem, n):
        return load_ir(self.b, self.b.add(self.starts[width], i64(width * LANES * i)), vec_ir(elem, n))

    def word(self, i):
        """<4 L x i8>"""
        return self._load(WORD, i, "i8", 4 * LANES)

    def word32(self, i):
        """<L x i32>"""
        return self._load(WORD, i, "i32", LANES)

    def floats(self, i):
        """<L x float>"""
        return self._load(WORD, i, "f32", LANES)

    def half(self, i):
        """<L x float> of float16"""
        return self.b.fpext(self._load(HALF, i, "f16", LANES), vec_ir("f32", LANES))

    def half_bits(self, i):
        """<L x i32> of 16 bits"""
        return self.b.zext(self._load(HALF, i, "i16", LANES), vec_ir("i32", LANES))

    def byte(self, i):
        """<L x i32> of a byte"""
        return self.b.zext(self._load(BYTE, i, "i8", LANES), vec_ir("i32", LANES))


# ---------------------------------------------------------------- bits
def _bits(b, v, shift, mask, to=0):
    """Bits of every lane: `mask` of them from bit `shift` on, moved to bit `to`."""
    elem, n = ("i8" if v.type.count == 4 * LANES else "i32"), v.type.count
    if shift > to:
        v = b.lshr(v, splat_const(elem, shift - to, n))
    elif shift < to:
        v = b.shl(v, splat_const(elem, to - shift, n))
    return b.and_(v, splat_const(elem, mask << to, n))


def _signed_byte(b, v, i):
    """Byte i of every 32-bit lane, with its sign."""
    v = b.shl(v, splat_const("i32", 24 - 8 * i, LANES)) if i < 3 else v
    return b.ashr(v, splat_const("i32", 24, LANES))


def _d(b, rows):
    return rows.half(0)


def _quarter_of_d(b, rows):
    return b.fmul(rows.half(0), splat_const("f32", 0.25, LANES))


def _times(b, d, x):
    """d (<L x float>) times integers"""
    return b.fmul(d, b.sitofp(x, vec_ir("f32", LANES)))


def _levels(b, levels, index):
    """levels[index] of every byte, as the byte dots want them: + 128 where codes are unsigned."""
    if isa.ISA == "neon":
        return neon.lookup_ir(b, levels, index)
    table = [x + 128 * UNSIGNED for x in levels]
    name, times = ("llvm.x86.avx512.pshuf.b.512", 4) if UNSIGNED else ("llvm.x86.avx2.pshuf.b", 2)
    return call_intrinsic(b, name, index.type, [const_ir("i8", [x & 255 for x in table] * times), index])


# ---------------------------------------------------------------- blocks of 32
def _nibbles(first):
    """Codes of four bits: byte l of 16 holds elements l and l + 16."""
    def fours(b, rows, part):
        for c in range(4):
            low, high = nibbles_ir(b, rows.word(first + 4 * part + c))
            yield from ((c, low), (c + 4, high))
    return fours


def _five_bits(b, rows, part):
    """Word 0 holds the fifth bits, bit l that of element l."""
    fifth, n = rows.word(0), 4 * LANES
    for c, four in _nibbles(1)(b, rows, part):
        spread = shuffle_ir(b, fifth, fifth, [i // 4 * 4 + c // 2 for i in range(n)])
        bit = b.and_(spread, const_ir("i8", [1 << (4 * (c % 2) + i % 4) for i in range(n)]))
        is_set = b.icmp_unsigned("!=", bit, splat_const("i8", 0, n))
        yield c, b.or_(four, b.select(is_set, splat_const("i8", 16, n), splat_const("i8", 0, n)))


def _level_nibbles(levels, first):
    return lambda b, rows, part: ((f, _levels(b, levels, x)) for f, x in _nibbles(first)(b, rows, part))


def _half_scale(i):
    return lambda b, rows, part: rows.half(i)


def _half_offset(i):
    return lambda b, rows: rows.half(i)


def _minus_half(i):
    return lambda b, rows: b.fneg(rows.half(i))


def _e8m0_scale(b, rows, part):
    """2^(e - 128): half of MXFP4's scale, whose levels are doubled; the two smallest are subnormals."""
    e = rows.byte(0)

    def c(x):
        return splat_const("i32", x, LANES)
    normal = b.shl(b.sub(e, c(1)), c(23))
    tiny = b.shl(c(0x00200000), b.and_(e, c(1)))
    return b.bitcast(b.select(b.icmp_unsigned("<", e, c(2)), tiny, normal), vec_ir("f32", LANES))


# ---------------------------------------------------------------- super-blocks of 256
def _pairs(min_ir):
    """The mins of two parts, from those of one."""
    def pair(b, rows, i):
        x, y = min_ir(b, rows, 2 * i), min_ir(b, rows, 2 * i + 1)
        if isa.ISA == "neon":
            halves = [b.trunc(v, vec_ir("i16", LANES)) for v in (x, y)]
            return b.bitcast(shuffle_ir(b, *halves, range(2 * LANES)), x.type)
        return b.or_(x, b.shl(y, splat_const("i32", 16, LANES)))
    return pair


def _bytes(b, v, *which):
    """Bytes of every 32-bit lane of <4 L x i8>, as one integer each of a lane; several: one after the other."""
    size = 4 // len(which)
    order = [4 * i + byte if at == 0 else v.type.count for byte in which for i in range(LANES) for at in range(size)]
    return b.bitcast(shuffle_ir(b, v, ir.Constant(v.type, None), order), vec_ir("i32", LANES))


def _k4_bytes(first):
    """The same as _k4 for NEON: the six bits of four parts and all rows at once, then a byte of each lane."""
    def four(b, rows, which, part):
        words = [rows.word(first + i) for i in (which, 2)]
        if part < 4:
            return _bits(b, words[0], 0, 63)
        return b.or_(_bits(b, words[1], 4 * which, 15), _bits(b, words[0], 6, 3, 4))

    def mins(b, rows, pair):
        at = 2 * pair % 4
        return _bytes(b, four(b, rows, 1, 2 * pair), at, at + 1)
    return lambda b, rows, j: _bytes(b, four(b, rows, 0, j), j % 4), mins


def _k4(first):
    """Scale and min of part j < 8, six bits each, from three words (k_quants.k4_scales_ir has the bytes)."""
    def pair(b, rows, j):
        scales, mins, rest = (rows.word32(first + i) for i in range(3))
        at = 8 * (j % 4)
        if j < 4:
            return _bits(b, scales, at, 63), _bits(b, mins, at, 63)
        return (b.or_(_bits(b, rest, at, 15), _bits(b, scales, at + 6, 3, 4)),
                b.or_(_bits(b, rest, at + 4, 15), _bits(b, mins, at + 6, 3, 4)))
    return lambda b, rows, j: pair(b, rows, j)[0], _pairs(lambda b, rows, j: pair(b, rows, j)[1])


def _k_nibbles(first):
    """Codes of four bits: byte l of each 32 holds elements l and l + 32 of 64."""
    return lambda b, rows, j: ((c, _bits(b, rows.word(first + 8 * (j // 2) + c), 4 * (j % 2), 15)) for c in range(8))


def _q5_fours(b, rows, j):
    """Bit j of byte l of the words 3 ... 10 is the fifth bit of element l of part j."""
    return ((c, b.or_(four, _bits(b, rows.word(3 + c), j, 1, 4))) for c, four in _k_nibbles(11)(b, rows, j))


def _two_bits(first):
    """Codes of two bits, parts of 16: byte l of each half of a super-block holds elements l, l + 32, l + 64, l + 96."""
    def fours(b, rows, part):
        group, half = part // 2, part % 2
        words = ((c, rows.word(first + 8 * (group // 4) + 4 * half + c)) for c in range(4))
        return ((c, _bits(b, w, 2 * (group % 4), 3)) for c, w in words)
    return fours


def _q2_scale(b, rows, j):
    return _bits(b, rows.word32(j // 4), 8 * (j % 4), 15)


def _q2_min(b, rows, j):
    return _bits(b, rows.word32(j // 4), 8 * (j % 4) + 4, 15)


def _q3_fours(b, rows, part):
    group, half = part // 2, part % 2
    return ((c, b.or_(low, _bits(b, rows.word(4 * half + c), group, 1, 2)))
            for c, low in _two_bits(8)(b, rows, part))


def _q3_scale(b, rows, j):
    low = _bits(b, rows.word32(24 + j % 8 // 4), 8 * (j % 4) + 4 * (j // 8), 15)
    high = _bits(b, rows.word32(26), 8 * (j % 4) + 2 * (j // 4), 3, 4)
    return b.sub(b.or_(low, high), splat_const("i32", 32, LANES))


def _q6_words(rows, part):
    """(q, vectors of nibbles, of upper bits): nibbles in the words 0 ... 31, the lower ones for q < 2; upper two bits
    in 32 ... 47, from bit 2 q on (ops/types/q6_K.py)."""
    group, half = part // 2, part % 2
    n, q = group // 4, group % 4
    return q, [(rows.word(16 * n + 8 * (q % 2) + 4 * half + c), rows.word(32 + 8 * n + 4 * half + c)) for c in range(4)]


def _q6_fours(b, rows, part):
    q, words = _q6_words(rows, part)
    for c, (nibbles, upper) in enumerate(words):
        yield c, b.or_(_bits(b, nibbles, 4 * (q // 2), 15), _bits(b, upper, 2 * q, 3, 4))


def _q6_signed_fours(b, rows, part):
    """4 (code - 32) as signed bytes, for NEON, which inserts bits where it shifts.  The upper bit of two is flipped."""
    q, words = _q6_words(rows, part)

    def shifted(v, n):
        return b.shl(v, splat_const("i8", n, 4 * LANES)) if n else v
    for c, (nibbles, upper) in enumerate(words):
        if q == 0:
            yield c, neon.insert_left_ir(b, shifted(nibbles, 2), upper, 6)
        elif q == 1:
            yield c, neon.insert_right_ir(b, shifted(upper, 4), shifted(nibbles, 4), 2)
        else:
            four = neon.insert_right_ir(b, shifted(upper, 6 - 2 * q), nibbles, 2)
            yield c, b.and_(four, splat_const("i8", -4, 4 * LANES))


def _q6_scale(b, rows, j):
    if isa.ISA == "neon":               # by a product: Q6_K's codes take all the shifts a processor has time for
        return neon.quads_ir(b, zero("i32", LANES), rows.word(48 + j // 4), neon.one_byte_ir(b, j % 4))
    return _signed_byte(b, rows.word32(48 + j // 4), j % 4)


def _xs_scale(b, rows, j):
    low, high = _bits(b, rows.word32(0), 4 * j, 15), _bits(b, rows.half_bits(1), 2 * j, 3, 4)
    return b.sub(b.or_(low, high), splat_const("i32", 32, LANES))


# ---------------------------------------------------------------- the table
def _scales(scale_ir):
    """Of a super-block: the integers and d, or their products."""
    if isa.ISA == "neon":
        return {"scale_ir": scale_ir, "d_ir": _d}
    return {"scale_ir": lambda b, rows, part: _times(b, rows.half(0), scale_ir(b, rows, part))}


def _formats():
    signed = {"zero_point": 128} if UNSIGNED else {"signed": True}
    k4 = _k4_bytes(0) if isa.ISA == "neon" else _k4(0)
    q6 = dict(_scales(_q6_scale), runs=((WORD, 0, 52), (HALF, 208, 1)), fours_ir=_q6_fours, zero_point=32)
    if isa.ISA == "neon":
        q6 = dict(scale_ir=_q6_scale, d_ir=_quarter_of_d, fours_ir=_q6_signed_fours, signed=True,
                  runs=((WORD, 0, 32), (WORD, 128, 16, 0xAA), (WORD, 192, 4), (HALF, 208, 1)))
    parts = {
        "q4_0": dict(runs=((WORD, 2, 4), (HALF, 0, 1)), fours_ir=_nibbles(0), scale_ir=_half_scale(0), zero_point=8),
        "q4_1": dict(runs=((WORD, 4, 4), (HALF, 0, 2)), fours_ir=_nibbles(0), scale_ir=_half_scale(0),
                     offset_ir=_minus_half(1)),
        "q5_0": dict(runs=((WORD, 2, 5), (HALF, 0, 1)), fours_ir=_five_bits, scale_ir=_half_scale(0), zero_point=16),
        "q5_1": dict(runs=((WORD, 4, 5), (HALF, 0, 2)), fours_ir=_five_bits, scale_ir=_half_scale(0),
                     offset_ir=_minus_half(1)),
        "q8_0": dict(runs=((WORD, 2, 8, 0x80 * UNSIGNED), (HALF, 0, 1)), scale_ir=_half_scale(0), **signed,
                     fours_ir=lambda b, rows, part: ((c, rows.word(c)) for c in range(8))),
        "iq4_nl": dict(runs=((WORD, 2, 4), (HALF, 0, 1)), scale_ir=_half_scale(0), **signed,
                       fours_ir=_level_nibbles(iq4_nl.LEVELS, 0)),
        "mxfp4": dict(runs=((WORD, 1, 4), (BYTE, 0, 1)), scale_ir=_e8m0_scale, **signed,
                      fours_ir=_level_nibbles(fp4.LEVELS, 0)),
        "q2_K": dict(runs=((WORD, 0, 20), (HALF, 80, 2)), n_parts=16, sharing=2, **_scales(_q2_scale),
                     fours_ir=_two_bits(4), offset_ir=_half_offset(1), mins_ir=_pairs(_q2_min)),
        "q3_K": dict(runs=((WORD, 0, 27), (HALF, 108, 1)), n_parts=16, sharing=2, **_scales(_q3_scale),
                     fours_ir=_q3_fours, zero_point=4),
        "q4_K": dict(runs=((WORD, 4, 35), (HALF, 0, 2)), n_parts=8, sharing=2, **_scales(k4[0]),
                     fours_ir=_k_nibbles(3), offset_ir=_half_offset(1), mins_ir=k4[1]),
        "q5_K": dict(runs=((WORD, 4, 43), (HALF, 0, 2)), n_parts=8, **_scales(k4[0]),
                     fours_ir=_q5_fours, offset_ir=_half_offset(1), mins_ir=k4[1]),
        "q6_K": dict(n_parts=16, sharing=2, **q6),
        "iq4_xs": dict(runs=((WORD, 4, 33), (HALF, 0, 2)), n_parts=8, **_scales(_xs_scale), **signed,
                       fours_ir=_level_nibbles(iq4_nl.LEVELS, 1)),
    }
    formats = {BY_NAME[name]: Format(BY_NAME[name], **{"n_parts": 1, **p}) for name, p in parts.items()}
    for type, f in formats.items():
        assert sum(width * n for width, _, n, *_ in f.runs) == type.nbytes, type
    return formats


FORMATS = _formats() if isa.X86_LEVEL or neon.HAS_SDOT else {}


# ---------------------------------------------------------------- unpacked: codes as bytes, factors of 32 bits
def unpacked(format):
    """The Format of its blocks unpacked: for each part its codes and its scale, then mins, offset and d, 32 bits each.
    NEON's products are signed: there the zero point is subtracted."""
    n, parts = format.n_fours, format.n_parts
    mins = (n + 1) * parts
    offset = mins + parts // 2 * bool(format.mins_ir)
    d = offset + bool(format.offset_ir)
    return dataclasses.replace(
        format, runs=((WORD, 0, d + bool(format.d_ir)),), part_nbytes=4 * LANES * (n + 1),
        zero_point=0 if isa.ISA == "neon" else format.zero_point, paired=neon.HAS_SMMLA,
        fours_ir=lambda b, rows, part: ((c, rows.word((n + 1) * part + c)) for c in range(n)),
        scale_ir=lambda b, rows, part: (rows.word32 if format.d_ir else rows.floats)((n + 1) * part + n),
        d_ir=format.d_ir and (lambda b, rows: rows.floats(d)),
        offset_ir=format.offset_ir and (lambda b, rows: rows.floats(offset)),
        mins_ir=format.mins_ir and (lambda b, rows, pair: rows.word32(mins + pair)))


def _paired(b, fours):
    """The order of `paired`, of vectors of the fours of four rows."""
    for x, y in zip(fours[::2], fours[1::2], strict=True):
        for row in (0, 2):
            yield shuffle_ir(b, x, y, [16 * (i // 4) + 4 * r + i % 4 for r in (row, row + 1) for i in range(8)])


def unpacked_words_ir(b, format, rows):
    """The words of a block of `unpacked(format)`, in their order."""
    to = unpacked(format)
    shift = splat_const("i8", format.zero_point - to.zero_point, 4 * LANES)
    for part in range(format.n_parts):
        fours = [b.sub(codes, shift) for _, codes in sorted(format.fours_ir(b, rows, part), key=lambda four: four[0])]
        yield from _paired(b, fours) if to.paired else fours
        yield format.scale_ir(b, rows, part)
    if format.mins_ir:
        yield from (format.mins_ir(b, rows, pair) for pair in range(format.n_parts // 2))
    if format.offset_ir:
        yield format.offset_ir(b, rows)
    if format.d_ir:
        yield format.d_ir(b, rows)
