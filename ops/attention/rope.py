"""Rotary position embedding: pairs of a head's elements are rotated by angles that depend on the position.

    pair (x0, x1) -> (x0 cos - x1 sin, x0 sin + x1 cos)       angle of pair i: theta_i = pos * base^(-2 i / n_dims)

Which elements form pair i of the n = n_dims / 2 (rotated elements start at n_offs, the others are copied):

    NORMAL 0            (2 i, 2 i + 1)
    NEOX 2              (i, i + n_dims / 2)
    MROPE 8, IMROPE 40  as NEOX; four position ids a token, a section of the pairs for each (interleaved in IMROPE)
    VISION 24           (i, i + n_dims), n_dims is half the head; the angles start anew in each section

A row of positions: pos[i2], pos[i2 + ne2], pos[i2 + 2 ne2], pos[i2 + 3 ne2] in the last three modes.
Position ids may be negative (a shift back); beyond 2^24 float32 cannot tell one from the next, so such an id stops the
graph with IndexRangeError before anything is written.

freq_factors divide the angles; YaRN (ext_factor != 0) blends interpolated and original angles by a ramp over the pairs.

Kernel: for each position the thread writes cos and sin of all pairs into its scratch once, for all heads.
"""
import math
from collections.abc import Sequence

import numpy as np
from numba import types

from ggjit.ops.attention import rope_angles as ra
from ggjit.ops.copying.view import view_4d
from ggjit.ops.core.builders import writes_in_c
from ggjit.ops.core.errors import ParamError
from ggjit.ops.core.record import BAD_INDEX, OK, OP
from ggjit.ops.core.row_axes import last_axis
from ggjit.ops.core.shape import require, require_type, rows_contiguous
from ggjit.ops.core.spec import Case, Kernel, Spec, touched_nbytes
from ggjit.ops.core.split import MIRRORED
from ggjit.ops.core.types import F16, F32, I32, Tensor
from ggjit.ops.core.whole_numbers import is_whole
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mem import copy_bytes, ld_i32
from ggjit.ops.native.node import (
    DST,
    SRC0,
    SRC1,
    SRC2,
    addr,
    chunk_of_lines,
    fail,
    nb,
    ne,
    param_f32,
    param_i32,
    row_addr,
    work,
)
from ggjit.ops.native.row_affinity import affinity_next_but_last, light_chunk
from ggjit.ops.native.row_loops import whole
from ggjit.ops.native.simd import W, fma, fma_ir, fmul, fneg, ldf, make_ir, shuffle_ir, stf, zerof
from ggjit.ops.types.shared.rows import ROW

f32 = types.float32


MAX_SCALE = 1024                # of angles


# ---------------------------------------------------------------- builders
def _node(op, a, b, c, n_dims, sections, mode, n_ctx_orig, floats, n_offs=0, in_place=False):
    name = op.name.lower()
    require_type(name, a, (F32, F16))
    require_type(name, b, (I32,), "positions")
    if mode not in ra.MODES:
        raise ParamError(f"{name}: mode must be 0 normal, 2 neox, 8 mrope, 24 vision or 40 imrope, got {mode}")
    per_token = 4 if mode & ra.MROPE else 1
    require(b.ne == (per_token * a.ne[2], 1, 1, 1), f"{name}: positions must be {per_token} * a.ne[2] ids", a, b)
    require(rows_contiguous(b), f"{name}: positions must lie side by side", b, remedy="use gg.cont first")
    require(rows_contiguous(a), f"{name}: elements of a row must lie side by side", a, remedy="use gg.cont first")
    if n_dims < 2 or n_dims % 2 or n_dims > a.ne[0] or (mode == ra.VISION and 2 * n_dims != a.ne[0]):
        raise ParamError(f"{name}: n_dims must be even, 2 to ne0 = {a.ne[0]} (vision: ne0 / 2), got {n_dims}")
    if not is_whole(n_ctx_orig, 0, (1 << 31) - 1):
        raise ParamError(f"{name}: n_ctx_orig is a number of tokens, 0 or more, got {n_ctx_orig!r}")
    for what, x in zip(("freq_scale", "ext_factor"), floats[1:3], strict=True):
        if not abs(float(x)) <= MAX_SCALE:
            raise ParamError(f"{name}: {what} lies between -{MAX_SCALE} and {MAX_SCALE}, got {x!r}; larger angles have "
                             f"no digits left in float32")
    if not 0 <= n_offs <= a.ne[0] - n_dims * (2 if mode == ra.VISION else 1):
        raise ParamError(f"{name}: n_offs {n_offs} + n_dims {n_dims} do not fit a head of {a.ne[0]}")
    sections = tuple(whole(name, "a section", n) for n in sections)
    if per_token == 4 and (len(sections) != 4 or min(sections) < 0 or not any(sections[:3])
                           or sum(sections) > a.ne[0]):
        raise ParamError(f"{name}: four sections >= 0, not all of the first three 0, at most ne0 = {a.ne[0]} in sum, "
                         f"got {list(sections)}")
    if c is not None:
        require_type(name, c, (F32,), "freq_factors")
        require(rows_contiguous(c), f"{name}: freq_factors must lie side by side", c, remedy="use gg.cont first")
        n_pairs = n_dims if mode == ra.VISION else n_dims // 2
        require(c.ne[0] >= n_pairs and c.ne[1:] == (1, 1, 1),
                f"{name}: freq_factors must be one row with a value for each of the {n_pairs} pairs", c)
    params = (0, n_dims, mode, 0, n_ctx_orig, *(float(x) for x in floats), *sections, n_offs)
    return a.ctx.node(op, a.type, a.ne, (a, b) if c is None else (a, b, c), params, view_of=a if in_place else None)


PLAIN = (10000.0, 1.0, 0.0, 1.0, 0.0, 0.0)
NO_SECTIONS = (0, 0, 0, 0)


def rope(a: Tensor, b: Tensor, n_dims: int, mode: int):
    """As `rope_ext` with base 10000, no scaling and no freq_factors: a, positions b, n_dims, mode.

    Source: ggml_rope.
    """
    return _node(OP.ROPE, a, b, None, n_dims, NO_SECTIONS, mode, 0, PLAIN)


def rope_inplace(a: Tensor, b: Tensor, n_dims: int, mode: int):
    """As `rope`, written over a; returns a view of a.  Source: ggml_rope_inplace."""
    return _node(OP.ROPE, a, b, None, n_dims, NO_SECTIONS, mode, 0, PLAIN, in_place=True)


def rope_ext(a: Tensor, b: Tensor, c: Tensor, n_dims: int, mode: int, n_ctx_orig: int, freq_base: float,
             freq_scale: float, ext_factor: float, attn_factor: float, beta_fast: float, beta_slow: float):
    """Rotate a [head, heads, tokens, seqs] (F32, F16) by positions b I32 [tokens] -> shape and type of a.

    Pair i of the first n_dims elements turns by theta = b base^(-2 i / n_dims) / c[i] freq_scale, base = freq_base; cos
    and sin are multiplied by attn_factor; the elements behind n_dims are copied.  c: freq_factors F32 [n_dims / 2] or
    None.  mode: 0 adjacent pairs (2 i, 2 i + 1), 2 (NEOX) halves (i, i + n_dims / 2).  ext_factor != 0: YaRN (arXiv
    2309.00071; n_ctx_orig, beta_fast, beta_slow place its ramp), which scales cos and sin by 1 + 0.1 ln(1 / freq_scale)
    as well.  NumPy: a (seqs, tokens, heads, head).  op params: -, n_dims, mode, -, n_ctx_orig, then the six floats in
    their order.  Errors: ParamError (mode, n_dims, scales beyond 1,024), ShapeError, TypeMismatch; IndexRangeError at
    run time for positions outside [-2^24, 2^24] (ggml rounds them to float32 and goes on).  Source: ggml_rope_ext;
    arXiv 2104.09864.
    """
    floats = (freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow)
    return _node(OP.ROPE, a, b, c, n_dims, NO_SECTIONS, mode, n_ctx_orig, floats)


def rope_ext_inplace(a: Tensor, b: Tensor, c: Tensor, n_dims: int, mode: int, n_ctx_orig: int, freq_base: float,
                     freq_scale: float, ext_factor: float, attn_factor: float, beta_fast: float, beta_slow: float):
    """As `rope_ext`, written over a; returns a view of a.  Source: ggml_rope_ext_inplace."""
    floats = (freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow)
    return _node(OP.ROPE, a, b, c, n_dims, NO_SECTIONS, mode, n_ctx_orig, floats, in_place=True)


def rope_multi(a: Tensor, b: Tensor, c: Tensor, n_dims: int, sections: Sequence[int], mode: int, n_ctx_orig: int,
               freq_base: float, freq_scale: float, ext_factor: float, attn_factor: float, beta_fast: float,
               beta_slow: float):
    """Rotate with four position ids a token: b I32 [4 tokens] (all t, all h, all w, all e).

    sections: four numbers of pairs, for t, h, w, e.  mode: MROPE 8 (one section after the other), IMROPE 40
    (interleaved), VISION 24 (two sections, n_dims is half the head; theta starts again in each).  c: freq_factors F32
    [n_dims / 2], in VISION [n_dims] (one for each pair), or None.  a, n_ctx_orig, freq_base, freq_scale, ext_factor,
    attn_factor, beta_fast, beta_slow and errors as `rope_ext`.  Source: ggml_rope_multi; arXiv 2409.12191.
    """
    floats = (freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow)
    return _node(OP.ROPE, a, b, c, n_dims, tuple(sections), mode, n_ctx_orig, floats)


def rope_multi_inplace(a: Tensor, b: Tensor, c: Tensor, n_dims: int, sections: Sequence[int], mode: int,
                       n_ctx_orig: int, freq_base: float, freq_scale: float, ext_factor: float, attn_factor: float,
                       beta_fast: float, beta_slow: float):
    """As `rope_multi`, written over a; returns a view of a.  Source: ggml_rope_multi_inplace."""
    floats = (freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow)
    return _node(OP.ROPE, a, b, c, n_dims, tuple(sections), mode, n_ctx_orig, floats, in_place=True)


def rope_ext_back(a: Tensor, b: Tensor, c: Tensor, n_dims: int, mode: int, n_ctx_orig: int, freq_base: float,
                  freq_scale: float, ext_factor: float, attn_factor: float, beta_fast: float, beta_slow: float):
    """The inverse rotation of `rope_ext`, applied to a gradient a; everything else as there.

    Source: ggml_rope_ext_back.
    """
    floats = (freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow)
    return _node(OP.ROPE_BACK, a, b, c, n_dims, NO_SECTIONS, mode, n_ctx_orig, floats)


def rope_multi_back(a: Tensor, b: Tensor, c: Tensor, n_dims: int, sections: Sequence[int], mode: int, n_ctx_orig: int,
                    freq_base: float, freq_scale: float, ext_factor: float, attn_factor: float, beta_fast: float,
                    beta_slow: float):
    """The inverse rotation of `rope_multi`, applied to a gradient a; everything else as there.

    Source: ggml_rope_multi_back.
    """
    floats = (freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow)
    return _node(OP.ROPE_BACK, a, b, c, n_dims, tuple(sections), mode, n_ctx_orig, floats)


@writes_in_c
def rope_set_offset(a: Tensor, n_offs: int):
    """The rope node `a` with rotated elements starting at n_offs of each head; those before are copied.

    ggml changes the node; nodes are immutable here, so this makes a new one.  op params: n_offs in slot 15.  Errors:
    ParamError.  Source: ggml_rope_set_offset.
    """
    if a.op not in (OP.ROPE, OP.ROPE_BACK):
        raise ParamError(f"rope_set_offset: the argument must be the result of a rope, got {a!r}")
    p = [int(x) for x in a.op_params]
    return _node(a.op, a.src[0], a.src[1], a.src[2] if len(a.src) > 2 else None, p[1], tuple(p[11:15]), p[2], p[4],
                 a.param_floats[5:11], n_offs, a.view_src is not None)


# ---------------------------------------------------------------- reference
def _corr_dims(n_dims, n_ctx_orig, base, beta_fast, beta_slow):
    if n_ctx_orig == 0:
        return 0, -math.inf                 # the logarithm of 0

    def dim(n_rot):
        return n_dims * math.log(n_ctx_orig / (n_rot * 2 * math.pi)) / (2 * math.log(base))
    return max(0, math.floor(dim(beta_fast))), min(n_dims - 1, math.ceil(dim(beta_slow)))


def _sector_ids(mode, sections, n):
    """Which of the four position ids each of the n pairs uses, and where its angle starts anew (vision)."""
    s = np.array(sections)
    total = s.sum()
    at = np.arange(n) % total
    if mode == ra.IMROPE:
        which = np.full(n, 3)
        for k, size in enumerate(s[:3]):
            which[(at % 3 == k) & (at < 3 * size)] = k
    else:
        which = np.searchsorted(np.cumsum(s), at, side="right")
    starts = np.concatenate([[0], np.cumsum(s)])
    power = np.arange(n) if mode != ra.VISION else at - starts[which]
    return which, power


def reference(t, a, pos, factors=None):
    p = t.op_params
    n_dims, mode, n_ctx_orig, sections, n_offs = int(p[1]), int(p[2]), int(p[4]), p[11:15], int(p[15])
    base, freq_scale, ext, attn, fast, slow = (float(x) for x in t.param_floats[5:11])
    a = a.astype(np.float64)
    n = n_dims if mode == ra.VISION else n_dims // 2
    n_tokens = a.shape[1]
    i = np.arange(n)
    if mode & ra.MROPE:
        which, power = _sector_ids(mode, sections, n)
        start = pos.reshape(4, n_tokens).astype(np.float64)[which].T
    else:
        start, power = pos.reshape(n_tokens, 1).astype(np.float64), i
    theta = start * base ** (-2.0 * power / n_dims)
    if factors is not None:
        theta = theta / factors.reshape(-1)[:n].astype(np.float64)
    angle, magnitude = theta * freq_scale, attn
    if ext:
        low, high = _corr_dims(n_dims, n_ctx_orig, base, fast, slow)
        mix = (1 - np.clip((i - low) / max(0.001, high - low), 0, 1)) * ext
        angle = angle * (1 - mix) + theta * mix
        with np.errstate(divide="ignore", invalid="ignore"):         # NaN below zero, as in C
            magnitude *= 1 - 0.1 * np.log(np.float64(freq_scale))
    c, s = (f(angle)[None, :, None, :] * magnitude for f in (np.cos, np.sin))
    s = -s if t.op == OP.ROPE_BACK else s
    first = n_offs + (2 * i if mode == ra.NORMAL else i)
    second = first + (1 if mode == ra.NORMAL else n_dims if mode == ra.VISION else n_dims // 2)
    out = a.copy()
    out[..., first] = a[..., first] * c - a[..., second] * s
    out[..., second] = a[..., first] * s + a[..., second] * c
    return out


# ---------------------------------------------------------------- kernel
def _rotate_pairs_ir(b, x, c, s):
    swapped = shuffle_ir(b, x, x, [k ^ 1 for k in range(x.type.count)])
    return fma_ir(b, swapped, s, b.fmul(x, c))


rotate_pairs = make_ir(lambda x, c, s: x, _rotate_pairs_ir)


def _scratch_nbytes(n0):
    """A thread's scratch: angles, factors, cos and sin; each padded by a vector."""
    return (16 * (n0 + 2 * W) + 63) // 64 * 64


scratch_nbytes = inline(_scratch_nbytes)


@inline
def too_far(positions):
    """The first position id that is beyond float32's whole numbers, or 0."""
    for i in range(ne(positions, 0)):
        id = ld_i32(addr(positions) + 4 * i)
        if id < -ra.FARTHEST or id > ra.FARTHEST:
            return id
    return types.int64(0)


def _make_rotations(ty):
    """Rotations of n pairs of type ty, side by side or `apart`, by cosines and sines at cs."""
    access, size = ROW[ty], ty.nbytes
    ld, ld_part, st, st_part = access.load, access.load_part, access.store, access.store_part

    @inline
    def rotate_adjacent(d, x, cs, n):
        i, end = 0, 2 * n
        while i + W <= end:
            st(d + i * size, rotate_pairs(ld(x + i * size), ldf(cs + 8 * i), ldf(cs + 8 * i + 4 * W)))
            i += W
        if i < end:
            y = rotate_pairs(ld_part(x + i * size, end - i), ldf(cs + 8 * i), ldf(cs + 8 * i + 4 * W))
            st_part(d + i * size, y, end - i)

    @inline
    def rotate_apart(d, x, cs, n, apart):
        i = 0
        while i + W <= n:
            c, s = ldf(cs + 8 * i), ldf(cs + 8 * i + 4 * W)
            u, v = ld(x + i * size), ld(x + (i + apart) * size)
            st(d + i * size, fma(u, c, fneg(fmul(v, s))))
            st(d + (i + apart) * size, fma(u, s, fmul(v, c)))
            i += W
        if i < n:
            c, s = ldf(cs + 8 * i), ldf(cs + 8 * i + 4 * W)
            u, v = ld_part(x + i * size, n - i), ld_part(x + (i + apart) * size, n - i)
            st_part(d + i * size, fma(u, c, fneg(fmul(v, s))), n - i)
            st_part(d + (i + apart) * size, fma(u, s, fmul(v, c)), n - i)
    return rotate_adjacent, rotate_apart


def _make(mode, ty, backward, has_factors):
    size, (rotate_adjacent, rotate_apart) = ty.nbytes, _make_rotations(ty)
    pairs_adjacent, sections = mode == ra.NORMAL, bool(mode & ra.MROPE)
    interleaved, anew = mode == ra.IMROPE, mode == ra.VISION
    cos_sin = ra.make_cos_sin(pairs_adjacent, backward, has_factors)

    def kernel(node, ith, nth, sync):
        x, positions, d = node + SRC0, node + SRC1, node + DST
        # every thread checks all positions, so that none writes if one is bad
        bad = too_far(positions)
        if bad != 0:
            return fail(node, BAD_INDEX, bad)
        n0, n_heads, n_tokens, n_seqs = ne(d, 0), ne(d, 1), ne(d, 2), ne(d, 3)
        n_dims, n_offs = types.int64(param_i32(node, 1)), types.int64(param_i32(node, 15))
        n = n_dims if anew else n_dims // 2
        scale = f32(math.pow(param_f32(node, 5), f32(-2.0) / f32(n_dims)))
        scratch = work(node) + ith * scratch_nbytes(n0)
        angles, factors = scratch, scratch + 4 * (n0 + W)
        cs = factors + 4 * (n0 + W)
        if has_factors:
            copy_bytes(factors, addr(node + SRC2), 4 * n)
        total, last = n_tokens * n_seqs, -1
        chunk = light_chunk(total, nth, total * n_heads * n0 // 8)
        chunk = chunk_of_lines(chunk, nb(d, 2), total, nth, n_heads * n0)
        while True:
            start = affinity_next_but_last(node, ith, nth, sync, chunk, total)
            if start >= total:
                return OK
            for r in range(start, min(total, start + chunk)):
                token, seq = r // n_seqs, r % n_seqs
                if token != last:
                    pos = addr(positions) + 4 * token
                    if sections:
                        ra.section_angles(node, angles, n, pos, 4 * n_tokens, scale, interleaved, anew)
                    else:
                        ra.plain_angles(angles, n, pos, scale)
                    stf(angles + 4 * n, zerof())            # lanes beyond the last pair
                    cos_sin(node, factors, angles, cs, n)
                    last = token
                for head in range(n_heads):
                    pd, px = row_addr(d, head, token, seq), row_addr(x, head, token, seq)
                    at = n_offs * size
                    if pairs_adjacent:
                        rotate_adjacent(pd + at, px + at, cs, n)
                    else:
                        rotate_apart(pd + at, px + at, cs, n, n if anew else n_dims // 2)
                    if pd != px and 2 * n < n0:
                        after = at + 2 * n * size
                        copy_bytes(pd, px, at)
                        copy_bytes(pd + after, px + after, n0 * size - after)
    return kernel


def kernel(t, n_threads):
    mode, ty = int(t.op_params[2]), t.type
    if t.src[0].type is not ty or ty not in (F32, F16):
        return None
    back, factors = t.op == OP.ROPE_BACK, len(t.src) > 2
    per_token = 0.7 * t.ne[0] * t.ne[2]                     # angles, sines and cosines
    label = f"rope-{mode}-{ty.name}{'-back' * back}{'-factors' * factors}"
    return Kernel(label, lambda: _make(mode, ty, back, factors), cost=0.02 * touched_nbytes(t) + per_token,
                  work_nbytes=n_threads * _scratch_nbytes(t.ne[0]), alone=t.ne[2:] == (1, 1))


# ---------------------------------------------------------------- cases
def cases(op):
    yarn = (10000.0, 1.4245, 0.7465, 1.4245, 32.0, 1.0)

    def make(ty, shape, n_dims, mode, floats=PLAIN, factors=False, view=False, n_offs=0, in_place=False):
        def build(inp):
            a = inp.new(ty, (shape[0] * (1 + view), *shape[1:]))
            if view:
                a = view_4d(a, *shape, *a.nb[1:], a.nb[0] * shape[0] // 2)
            per_token = 4 if mode & ra.MROPE else 1
            pos = inp.ids(I32, (per_token * shape[2],), 512)
            c = inp.new(F32, (n_dims // (1 if mode == ra.VISION else 2),), lo=0.9, hi=1.1) if factors else None
            third = n_dims // 2 // 3
            sections = NO_SECTIONS
            if mode & ra.MROPE:
                sections = (third, third, third, 0) if mode == ra.IMROPE else (n_dims // 2, n_dims // 2, 0, 0) \
                    if mode == ra.VISION else (third + 1, third, third - 1, n_dims // 2 - 3 * third)
            return _node(op, a, pos, c, n_dims, sections, mode, 512, floats, n_offs, in_place)
        return build
    for ty, limit in ((F32, 1e-7), (F16, 2.0 ** -22)):
        for mode, shape, n_dims in ((0, (128, 5, 7, 1), 128), (0, (64, 3, 4, 2), 40), (2, (64, 3, 4, 2), 64),
                                    (2, (80, 4, 3, 1), 36), (0, (8, 8, 1, 1), 8), (8, (128, 11, 2, 1), 128),
                                    (8, (128, 3, 5, 1), 20), (24, (80, 4, 2, 1), 40), (40, (128, 4, 3, 1), 128),
                                    (40, (36, 2, 3, 2), 36)):
            name = f"{ty!r} mode {mode} {shape} {n_dims}"
            yield Case(name, make(ty, shape, n_dims, mode), limit)
            yield Case(f"{name} yarn", make(ty, shape, n_dims, mode, yarn, factors=True, view=True), limit)
        yield Case(f"{ty!r} inplace", make(ty, (64, 3, 4, 1), 32, 0, in_place=True), limit)
        yield Case(f"{ty!r} offset", make(ty, (64, 3, 4, 1), 20, 2, n_offs=30), limit)
        yield Case(f"{ty!r} offset 0", make(ty, (64, 3, 4, 1), 20, 0, n_offs=32), limit)


# ---------------------------------------------------------------- gradient
def gradient(g, t, dy):
    """The opposite rotation."""
    b, c = (*t.src[1:], None)[:2]
    p, floats = [int(x) for x in t.op_params], [float(x) for x in t.param_floats[5:11]]

    def turned_back():
        name = ("rope_multi" if p[2] & ra.MROPE else "rope_ext") + "_back" * (t.op == OP.ROPE)
        sections = (p[11:15],) if p[2] & ra.MROPE else ()
        d = getattr(g, name)(dy, b, c, p[1], *sections, p[2], p[4], *floats)
        return g.rope_set_offset(d, p[15]) if p[15] else d
    return turned_back, None, g.missing("of frequency factors") if c is not None else None


# ---------------------------------------------------------------- rows
def _rows(t):
    """Along the axis of tokens, with their positions; or along the axis of texts, which have the same positions."""
    a = last_axis(t)
    if a >= 2:
        yield a, [a, 0 if a == 2 else None, *(None for _ in t.src[2:])]


def _rebuild(n):
    a, b, c = n.up_to(3)
    name = ("rope_multi" if n.i[2] & ra.MROPE else "rope_ext") + "_back" * (n.op == OP.ROPE_BACK)
    sections = (n.i[11:15],) if n.i[2] & ra.MROPE else ()
    out = n.call(name, a, b, c, n.i[1], *sections, n.i[2], n.i[4], *n.f[5:11])
    return n.call("rope_set_offset", out, n.i[15]) if n.i[15] else out


def _split(t, a, positions, factors=None):
    """Heads or sequences: positions run along the axis between them."""
    return a if a.is_cut and a.axis in (1, 3) and positions == MIRRORED and factors in (None, MIRRORED) else None


SPECS = (
    Spec(op=OP.ROPE, builders=(rope, rope_inplace, rope_ext, rope_ext_inplace, rope_multi, rope_multi_inplace,
                               rope_set_offset),
         reference=reference, kernel=kernel, in_place=True, in_place_2023=True, gradient=gradient,
         rows=_rows, split=_split, cases=lambda: cases(OP.ROPE), indexed=1,
         rebuild=_rebuild),
    Spec(op=OP.ROPE_BACK, builders=(rope_ext_back, rope_multi_back), reference=reference, kernel=kernel, in_place=True,
         gradient=gradient, rows=_rows, cases=lambda: cases(OP.ROPE_BACK), indexed=1,
         rebuild=_rebuild))
