"""The angles of one position for RoPE, and their cosines and sines: what rope.py's kernel writes once per token.

The angles are formed by repeated float32 multiplication in ggml's order (`exact`: not reassociated), to keep its
rounding.
"""
import math

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ggjit.ops.native import simd
from ggjit.ops.native.jit import exact, inline
from ggjit.ops.native.mathfun import vcos_any, vsin_any
from ggjit.ops.native.mem import ld_i32, st_f32
from ggjit.ops.native.node import param_f32, param_i32
from ggjit.ops.native.simd import V, W

f32 = types.float32
NORMAL, NEOX, MROPE, VISION, IMROPE = 0, 2, 8, 24, 40
MODES = (NORMAL, NEOX, MROPE, VISION, IMROPE)
FARTHEST = 1 << 24              # the positions served: float32 holds every whole number up to here


@intrinsic
def lane_numbers(typingctx, i):
    """i, i + 1, ... as float lanes."""
    def codegen(context, b, sig, args):
        first = b.sitofp(args[0], ir.FloatType())
        lanes = simd.const_ir("f32", [float(k) for k in range(W)])
        u = ir.Constant(simd.vec_ir("f32", W), ir.Undefined)
        base = b.insert_element(u, first, ir.Constant(ir.IntType(32), 0))
        return b.fadd(simd.shuffle_ir(b, base, u, [0] * W), lanes)
    return V("f32", W)(types.int64), codegen


def _half_pairs(high, alternate):
    """(c0 c0 c1 c1 ...) from W lanes of c: the lower or upper half; alternate: (-s0 s0 -s1 s1 ...)."""
    def build(b, x):
        v = simd.shuffle_ir(b, x, x, [W // 2 * high + k // 2 for k in range(W)])
        return b.fmul(v, simd.const_ir("f32", [-1.0, 1.0] * (W // 2))) if alternate else v
    return simd.make_ir(lambda t: t, build)


twice_lo, twice_hi, signed_lo, signed_hi = (_half_pairs(h, a) for a in (False, True) for h in (0, 1))


@exact
def plain_angles(out, n, pos, scale):
    """theta_i = pos * scale^i by repeated multiplication."""
    theta = f32(ld_i32(pos))
    for i in range(n):
        st_f32(out + 4 * i, theta)
        theta *= scale


@exact
def section_angles(node, out, n, pos, stride, scale, interleaved, anew):
    """Four chains of angles, one for each position id; pair i takes the one of its section."""
    s0, s1 = types.int64(param_i32(node, 11)), types.int64(param_i32(node, 12))
    s2, s3 = types.int64(param_i32(node, 13)), types.int64(param_i32(node, 14))
    total, sec_w = s0 + s1 + s2 + s3, s0 + s1
    sec_e = sec_w + s2
    p0, p1 = f32(ld_i32(pos)), f32(ld_i32(pos + stride))
    p2, p3 = f32(ld_i32(pos + 2 * stride)), f32(ld_i32(pos + 3 * stride))
    t, h, w, e = p0, p1, p2, p3
    at = 0
    for i in range(n):
        if anew:
            if at == 0:
                t = p0
            elif at == s0:
                h = p1
            elif at == sec_w:
                w = p2
            elif at == sec_e:
                e = p3
        if interleaved:
            k = at % 3
            theta = (t if k == 0 and at < 3 * s0 else h if k == 1 and at < 3 * s1 else
                     w if k == 2 and at < 3 * s2 else e)
        else:
            theta = t if at < s0 else h if at < sec_w else w if at < sec_e else e
        st_f32(out + 4 * i, theta)
        t, h, w, e = t * scale, h * scale, w * scale, e * scale
        at = at + 1 if at + 1 < total else 0


@inline
def corr_dim(n_dims, n_ctx_orig, n_rot, base):
    """The pair that turns n_rot times over the original context."""
    return f32(n_dims) * f32(math.log(f32(n_ctx_orig) / (n_rot * f32(2 * math.pi)))) / (f32(2.0) * f32(math.log(base)))


def make_cos_sin(pairs_adjacent, backward, has_factors):
    """cos_sin(node, factors, angles, out, n): cos and sin of n pairs from their angles, as the rotation reads them.

    pairs_adjacent, per W pairs     c0 c0 c1 c1 ... | -s0 s0 -s1 s1 ... | upper half of c | upper half of s
    else                            c0 c1 ... | s0 s1 ...
    """
    sign = f32(-1.0 if backward else 1.0)

    @inline
    def cos_sin(node, factors, angles, out, n):
        n_dims, n_ctx_orig = types.int64(param_i32(node, 1)), param_i32(node, 4)
        base, freq_scale, ext = param_f32(node, 5), param_f32(node, 6), param_f32(node, 7)
        magnitude, low, width = param_f32(node, 8), f32(0.0), f32(1.0)
        if ext != f32(0.0):
            low = max(f32(0.0), f32(math.floor(corr_dim(n_dims, n_ctx_orig, param_f32(node, 9), base))))
            high = min(f32(n_dims - 1), f32(math.ceil(corr_dim(n_dims, n_ctx_orig, param_f32(node, 10), base))))
            width = max(f32(0.001), high - low)
            magnitude *= f32(1.0) + f32(0.1) * f32(math.log(f32(1.0) / freq_scale))
        one = simd.splat(f32(1.0))
        for i in range(0, n, W):
            theta = simd.ldf(angles + 4 * i)
            if has_factors:
                theta = simd.fdiv(theta, simd.ldf(factors + 4 * i))
            angle = simd.fmul(theta, simd.splat(freq_scale))
            if ext != f32(0.0):
                ramp = simd.fdiv(simd.fsub(lane_numbers(i), simd.splat(low)), simd.splat(width))
                mix = simd.fmul(simd.fsub(one, simd.vmin(one, simd.vmax(simd.splat(f32(0.0)), ramp))), simd.splat(ext))
                angle = simd.fadd(simd.fmul(angle, simd.fsub(one, mix)), simd.fmul(theta, mix))
            c = simd.fmul(vcos_any(angle), simd.splat(magnitude))
            s = simd.fmul(vsin_any(angle), simd.splat(magnitude * sign))
            if pairs_adjacent:
                at = out + 16 * i
                simd.stf(at, twice_lo(c))
                simd.stf(at + 4 * W, signed_lo(s))
                simd.stf(at + 8 * W, twice_hi(c))
                simd.stf(at + 12 * W, signed_hi(s))
            else:
                simd.stf(out + 8 * i, c)
                simd.stf(out + 8 * i + 4 * W, s)
    return cos_sin
