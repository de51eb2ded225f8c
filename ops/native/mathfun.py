"""Vector math functions: exp, log, sin, cos, tanh, erf and what activations are made of.

Every function works on float vectors of any width (sigmoids on AVX-512: of 4, 8 or 16 lanes), is branch-free and total:
NaN gives NaN, infinities give the limit, and no lane can reach undefined behaviour (exponents and quadrants are taken
from integer bits, never by converting a NaN to an integer).  Polynomials are minimax fits of this project (iteratively
reweighted least squares in float64).

Largest errors found, in units in the last place of the true result:

    vexp       0.9, subnormal results kept         vsin, vcos   absolute 1e-7, 0.6 where |result| < 1e-7; |x| <= 2^20
    vexp_neg   0.9, x <= 0;                        vsin_any, vcos_any   0.5, any x (huge ones by libm)
               results below 1.2e-38 are 0         vtanh 1.4   verf 1.0
    vexpm1     1.4      vlog 0.8   vlog1p 1.3      vgelu, vgelu_erf, vgelu_quick   1.6 or absolute 1e-7
    vsigmoid   2.5, AVX-512 3.0                    vsilu   2.4, AVX-512 3.4; x >= -87 (0 follows below)
`exp1` and its kin take a scalar through the same code, so a value alone and a value in a vector give equal bytes.
Steps that must not be reassociated are written as fma, which carries no fastmath flags.
"""
import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ggjit.ops.native import isa
from ggjit.ops.native.jit import exact
from ggjit.ops.native.mem import IR_I32, call_intrinsic
from ggjit.ops.native.simd import const_ir, fma_ir, make_ir, shuffle_ir, splat_ir, vec_ir

MAGIC = 12582912.0                  # 1.5 * 2^23: adding it rounds to an integer and leaves that in the low bits
LOG2E = 1.4426950408889634
LN_TINY = -87.33                    # just above the logarithm of the smallest normal float32
STEPS = 16 if isa.ISA == "avx512" else 1        # of a sigmoid's e^x from one power of two to the next
LN2_HI, LN2_LO = 0.693145751953125, 1.428606765330187e-06      # 15 bits + rest: n * LN2_HI is exact
PIO2 = 1.5707963705062866, -4.371138828673793e-08, -1.7151245100059e-15     # float32 pieces of pi/2
FAST_TRIG = 2.0 ** 20               # largest |x| the quadrant arithmetic serves

EXP = 0.4999999403953552, 0.1666652113199234, 0.04166839271783829, 0.008368746377527714, 0.0013814537087455392
EXP_STEPS = (0.500016167, 0.166667192) if STEPS == 16 else EXP      # |r| <= ln2 / 32; the others: ln2 / 2
LOG = (0.3333331346511841, -0.25000008940696716, 0.2000211924314499, -0.1666799634695053, 0.14219550788402557,
       -0.12405591458082199, 0.11888174712657928, -0.11675640940666199, 0.06746601313352585)
SIN = -0.1666666716337204, 0.008333329111337662, -0.00019839302694890648, 2.7180260531167733e-06
COS = 0.0416666679084301, -0.0013888883404433727, 2.4799448510748334e-05, -2.720485099416692e-07
TANH = -0.33333298563957214, 0.13331924378871918, -0.053783830255270004, 0.020795974880456924, -0.005895162001252174
ERF_SMALL = (0.12837916612625122, -0.37612631916999817, 0.11283664405345917, -0.026857707649469376,
             0.005196956917643547, -0.0008097744430415332, 8.185231854440644e-05)
ERF_LARGE = (-0.12863707542419434, -0.6351980566978455, -0.10615904629230499, 0.023694565519690514,
             -0.0036103420425206423, 0.0003148581017740071, -1.0433114766783547e-05)
GELU_TAIL = (-0.7978893518447876, -0.31826692819595337, -0.0364786833524704, 0.005022149533033371,
             -0.0001885925594251603, -9.112883708439767e-05, 1.944731775438413e-05, -1.3183911278247251e-06)


# ---------------------------------------------------------------- IR building blocks
def _f(like, x):
    return const_ir("f32", [x] * like.type.count)


def _i(like, x):
    return const_ir("i32", [x] * like.type.count)


def _bits(b, x):
    return b.bitcast(x, vec_ir("i32", x.type.count))


def _float(b, x):
    return b.bitcast(x, vec_ir("f32", x.type.count))


def _fma(b, x, y, z):
    """x * y + z; y and z may be numbers."""
    return fma_ir(b, x, *(v if isinstance(v, ir.Value) else _f(x, v) for v in (y, z)))


def _poly(b, x, coefs):
    """coefs[0] + coefs[1] x + coefs[2] x^2 + ..."""
    p = _f(x, coefs[-1])
    for c in reversed(coefs[:-1]):
        p = _fma(b, p, x, c)
    return p


def at_most_ir(b, x, top):
    """min(x, top), NaN stays NaN."""
    return b.select(b.fcmp_ordered("<", _f(x, top), x), _f(x, top), x)


def at_least_ir(b, x, low):
    """max(x, low), NaN stays NaN."""
    return b.select(b.fcmp_ordered(">", _f(x, low), x), _f(x, low), x)


def _abs(b, x):
    return _float(b, b.and_(_bits(b, x), _i(x, 0x7FFFFFFF)))


def _with_sign_of(b, magnitude, x):
    return _float(b, b.or_(_bits(b, magnitude), b.and_(_bits(b, x), _i(x, -0x80000000))))


def _round(b, x, scale):
    """(n as integer bits, n as float) of n = round(x * scale); |n| < 2^22."""
    t = _fma(b, x, scale, MAGIC)
    return b.sub(_bits(b, t), _i(x, 0x4B400000)), _fma(b, t, 1.0, -MAGIC)


def _exp_parts(b, x):
    """n (bits, float) and r with x = n ln2 + r, |r| <= ln2 / 2."""
    n, nf = _round(b, x, LOG2E)
    return n, nf, _fma(b, nf, -LN2_LO, _fma(b, nf, -LN2_HI, x))


def _scaled(b, p, nf, wanted=None):
    """p 2^nf; 0 in the lanes that are not wanted: a subnormal result is slow on Intel, even where it is masked."""
    n = p.type.count
    bits = ir.IntType(max(8, n))
    mask = ir.Constant(bits, -1) if wanted is None else b.zext(b.bitcast(wanted, ir.IntType(n)), bits)
    args = [p, nf, p if wanted is None else _f(p, 0.0), mask] + [ir.Constant(IR_I32, 4)] * (n == 16)
    return call_intrinsic(b, f"llvm.x86.avx512.mask.scalef.ps.{32 * n}", p.type, args)


# ---------------------------------------------------------------- functions on IR values
def exp_ir(b, x, never_positive=False):
    """e^x; never_positive: for x <= 0, where what would be subnormal is 0."""
    x = at_least_ir(b, x, LN_TINY) if never_positive else at_least_ir(b, at_most_ir(b, x, 89.0), -104.0)
    n, nf, r = _exp_parts(b, x)
    p = _fma(b, r, _fma(b, r, _poly(b, r, EXP), 1.0), 1.0)
    normal = b.fcmp_unordered(">", x, _f(x, LN_TINY)) if never_positive else None
    if isa.ISA == "avx512":
        return _scaled(b, p, nf, normal)
    if never_positive:                      # one exponent addition
        y = _float(b, b.add(_bits(b, p), b.shl(n, _i(x, 23))))
        return b.select(normal, y, _f(x, 0.0))
    half = b.ashr(n, _i(x, 1))              # 2^n in two steps: n = -150 .. 128 fits no single exponent
    y = _float(b, b.add(_bits(b, p), b.shl(half, _i(x, 23))))
    return b.fmul(y, _float(b, b.shl(b.add(b.sub(n, half), _i(x, 127)), _i(x, 23))))


def expm1_ir(b, x):
    """e^x - 1 = 2 (2^(n-1) (e^r - 1) + (2^(n-1) - 1/2)), exact near 0."""
    x = at_least_ir(b, at_most_ir(b, x, 89.0), -25.0)
    n, _, r = _exp_parts(b, x)
    p = _fma(b, b.fmul(r, r), _poly(b, r, EXP), r)
    t = _float(b, b.shl(b.add(n, _i(x, 126)), _i(x, 23)))
    y = _fma(b, p, t, _fma(b, t, 1.0, -0.5))
    return b.fadd(y, y)


def log_ir(b, x):
    """Natural logarithm: x = 2^n (1 + f) with 1 + f in [sqrt(1/2), sqrt(2))."""
    tiny = b.fcmp_ordered("<", x, _f(x, 1.1754943508222875e-38))
    u = _bits(b, b.select(tiny, b.fmul(x, _f(x, 8388608.0)), x))
    n = b.ashr(b.sub(u, _i(x, 0x3F3504F3)), _i(x, 23))
    f = _fma(b, _float(b, b.sub(u, b.shl(n, _i(x, 23)))), 1.0, -1.0)
    nf = b.sitofp(b.sub(n, b.select(tiny, _i(x, 23), _i(x, 0))), x.type)
    f2 = b.fmul(f, f)
    tail = _fma(b, f2, -0.5, b.fmul(b.fmul(f2, f), _poly(b, f, LOG)))
    y = _fma(b, nf, LN2_HI, _fma(b, _fma(b, nf, LN2_LO, tail), 1.0, f))
    y = b.select(b.fcmp_ordered("==", x, _f(x, 0.0)), _f(x, -math.inf), y)
    y = b.select(b.fcmp_ordered("<", x, _f(x, 0.0)), _f(x, math.nan), y)
    return b.select(b.fcmp_ordered("<", x, _f(x, math.inf)), y, x)         # infinity and NaN are returned unchanged


def log1p_ir(b, x):
    """log(1 + x) with the rounding of 1 + x corrected; x > -1."""
    u = _fma(b, x, 1.0, 1.0)
    lost = b.fsub(x, _fma(b, u, 1.0, -1.0))
    lost = b.select(b.fcmp_ordered("<", u, _f(x, 1e30)), b.fdiv(lost, u), _f(x, 0.0))
    return b.select(b.fcmp_ordered("==", u, _f(x, 1.0)), x, b.fadd(log_ir(b, u), lost))


def trig_ir(b, x, is_cos):
    """sin or cos: x = n pi/2 + r, |r| <= pi/4; valid for |x| <= FAST_TRIG."""
    n, nf = _round(b, x, 2 / math.pi)
    r = x
    for part in PIO2:
        r = _fma(b, nf, -part, r)
    r2 = b.fmul(r, r)
    sin = _fma(b, b.fmul(r2, r), _poly(b, r2, SIN), r)
    cos = _fma(b, b.fmul(r2, r2), _poly(b, r2, COS), _fma(b, r2, -0.5, 1.0))
    q = b.add(n, _i(x, 1)) if is_cos else n
    odd = b.icmp_signed("!=", b.and_(q, _i(x, 1)), _i(x, 0))
    return _float(b, b.xor(_bits(b, b.select(odd, cos, sin)), b.shl(b.and_(q, _i(x, 2)), _i(x, 30))))


def tanh_ir(b, x):
    t = _abs(b, x)
    t2 = b.fmul(t, t)
    small = _fma(b, b.fmul(t2, t), _poly(b, t2, TANH), t)
    e = exp_ir(b, b.fadd(t, t))
    large = _fma(b, b.fdiv(_f(x, -2.0), b.fadd(e, _f(x, 1.0))), 1.0, 1.0)
    return _with_sign_of(b, b.select(b.fcmp_ordered("<", t, _f(x, 0.6)), small, large), x)


def erf_ir(b, x):
    """x (1 + q(x^2)) near 0, sign(x) (1 - e^p(|x|)) elsewhere; 1 from |x| = 4 on."""
    t = at_most_ir(b, _abs(b, x), 4.0)
    small = _fma(b, t, _poly(b, b.fmul(t, t), ERF_SMALL), t)
    e = exp_ir(b, _fma(b, t, _poly(b, t, ERF_LARGE), b.fneg(t)), never_positive=True)
    large = _fma(b, e, -1.0, 1.0)
    return _with_sign_of(b, b.select(b.fcmp_ordered("<", t, _f(x, 0.93)), small, large), x)


def _fraction_ir(b, t):
    """Bits of 2^(i/16) less those of 1 and less i << 19, i = the low four bits of t: one permutation of a register."""
    n = t.type.count
    i = np.arange(16)
    table = np.float32(2.0 ** (i / 16)).view(np.int32) - 0x3F800000 - (i << 19)
    t = shuffle_ir(b, t, t, [lane % n for lane in range(16)])
    y = call_intrinsic(b, "llvm.x86.avx512.permvar.si.512", t.type, [const_ir("i32", table.tolist()), t])
    return shuffle_ir(b, y, y, range(n))


def _one_plus_exp_ir(b, w):
    """1 + e^-w, w >= -88.7, e^-w = 2^(n + i/STEPS) e^-r.  The low bits of t are i and the exponent field of 2^n:

        t = MAGIC / 16 + 127 - w log2 e  =  | sign, exponent | 1 0 . . . 0 | n + 127 | i |      n: 8 bits, i: 4 or none
    """
    bits = STEPS.bit_length() - 1
    magic = MAGIC / STEPS + 127
    w = at_most_ir(b, w, -LN_TINY)
    t = _fma(b, w, -LOG2E, magic)
    nf = b.fsub(t, _f(w, magic))
    r = _fma(b, nf, LN2_LO, _fma(b, nf, LN2_HI, w))
    power = b.shl(_bits(b, t), _i(w, 23 - bits))
    if bits:
        power = b.add(power, _fraction_ir(b, _bits(b, t)))
    p = _poly(b, r, [c * (-1) ** k for k, c in enumerate(EXP_STEPS)])
    p = _fma(b, r, _fma(b, r, p, -1.0), 1.0)
    return _fma(b, p, _float(b, power), 1.0)


def times_sigmoid_ir(b, x, w):
    """x / (1 + e^-w); x 0 where the divisor is infinite (AVX-512: above 2^126)."""
    if isa.ISA != "avx512":
        return b.fdiv(x, _one_plus_exp_ir(b, at_least_ir(b, w, -88.7)))
    d = _one_plus_exp_ir(b, w)              # invalid below -88.7; a division instead would make silu 9 percent slower
    n = d.type.count
    every = ir.Constant(ir.IntType(max(8, n)), -1)
    q = call_intrinsic(b, f"llvm.x86.avx512.rcp14.ps.{32 * n}", d.type, [d, _f(d, 0.0), every])
    q = _fma(b, _fma(b, b.fneg(d), q, 1.0), q, q)           # from 14 bits to 24
    return b.fmul(x, b.select(b.fcmp_unordered(">", w, _f(w, LN_TINY)), q, _f(w, 0.0)))


def sigmoid_ir(b, x):
    """1 / (1 + e^-x)"""
    return times_sigmoid_ir(b, _f(x, 1.0), x)


def silu_ir(b, x):
    """x / (1 + e^-x)"""
    return times_sigmoid_ir(b, x, x)


def gelu_erf_ir(b, x):
    """x/2 (1 + erf(x / sqrt 2)) = max(x, 0) - |x|/2 erfc(|x| / sqrt 2), the last factor as e^p(|x|)."""
    t = _abs(b, x)
    e = exp_ir(b, b.fmul(t, _poly(b, t, GELU_TAIL)), never_positive=True)
    half = b.fmul(at_most_ir(b, t, 1e30), _f(x, -0.5))      # infinity * 0 would be NaN
    return _fma(b, half, e, at_least_ir(b, x, 0.0))


def gelu_ir(b, x):
    """x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) = x sigmoid(2 sqrt(2/pi) (...)); 0 at -infinity."""
    x = at_least_ir(b, x, -100.0)                           # -infinity * 0 would be NaN
    inner = b.fmul(b.fmul(x, _f(x, 2 * math.sqrt(2 / math.pi))), _fma(b, b.fmul(x, x), 0.044715, 1.0))
    return times_sigmoid_ir(b, x, inner)


def gelu_quick_ir(b, x):
    """x sigmoid(1.702 x)"""
    return times_sigmoid_ir(b, x, b.fmul(x, _f(x, 1.702)))


# ---------------------------------------------------------------- the vocabulary
def _both(build):
    """(vector intrinsic, scalar intrinsic) of an IR function."""
    def same(t):
        return t

    @intrinsic
    def scalar(typingctx, x):
        def codegen(context, b, sig, args):
            return b.extract_element(build(b, splat_ir(b, args[0], 4)), ir.Constant(IR_I32, 0))
        return types.float32(types.float32), codegen
    return make_ir(same, lambda b, x: build(b, x)), scalar


vexp, exp1 = _both(exp_ir)
vexp_neg, exp_neg1 = _both(lambda b, x: exp_ir(b, x, never_positive=True))
vexpm1, expm1_1 = _both(expm1_ir)
vlog, log1 = _both(log_ir)
vlog1p, log1p_1 = _both(log1p_ir)
vsin, sin1 = _both(lambda b, x: trig_ir(b, x, False))
vcos, cos1 = _both(lambda b, x: trig_ir(b, x, True))
vtanh, tanh1 = _both(tanh_ir)
verf, erf1 = _both(erf_ir)
vsigmoid, sigmoid1 = _both(sigmoid_ir)
vsilu, silu1 = _both(silu_ir)
vgelu, gelu1 = _both(gelu_ir)
vgelu_erf, gelu_erf1 = _both(gelu_erf_ir)
vgelu_quick, gelu_quick1 = _both(gelu_quick_ir)


# ---------------------------------------------------------------- sin and cos of anything
@intrinsic
def any_over(typingctx, v, limit):
    """True if |lane| > limit somewhere."""
    def codegen(context, b, sig, args):
        v, limit = args
        over = b.fcmp_ordered(">", _abs(b, v), splat_ir(b, limit, v.type.count))
        mask = ir.IntType(v.type.count)
        return b.icmp_unsigned("!=", b.bitcast(over, mask), ir.Constant(mask, 0))
    return types.boolean(v, types.float32), codegen


def _lanes_by_libm(name):
    @intrinsic
    def f(typingctx, v):
        def codegen(context, b, sig, args):
            double = ir.DoubleType()
            y = args[0]
            for i in range(args[0].type.count):
                lane = ir.Constant(IR_I32, i)
                d = call_intrinsic(b, f"llvm.{name}.f64", double, [b.fpext(b.extract_element(args[0], lane), double)])
                y = b.insert_element(y, b.fptrunc(d, ir.FloatType()), lane)
            return y
        return v(v), codegen

    @exact
    def cold(v):                            # a function of its own: kept out of the loops that use it
        return f(v)
    return cold


_slow_sin, _slow_cos = _lanes_by_libm("sin"), _lanes_by_libm("cos")


@exact
def vsin_any(x):
    """sin for every float: lanes beyond FAST_TRIG go through libm, all together."""
    return _slow_sin(x) if any_over(x, types.float32(FAST_TRIG)) else vsin(x)


@exact
def vcos_any(x):
    """cos, as `vsin_any`."""
    return _slow_cos(x) if any_over(x, types.float32(FAST_TRIG)) else vcos(x)


