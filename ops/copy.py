"""Copies between any strides and types: cpy, cast, cont, dup.

Elements are paired in flat order (ne0 fastest), so shapes may differ.  The layout is known when the plan is made, and
chooses one of five small kernels:

    flat       both sides without gaps: pieces of PIECE elements
    rows       elements of a row lie side by side on both sides
    tile       a transpose: the source is dense along another dimension k > 0; W x W elements through registers

                     i0 ->                            ik ->
               +---+---+---+---+               +---+---+---+---+
            ik | a | e |   |   |            i0 | a | b | c | d |       dst[i0, ik] = src[i0, ik]
             | | b | f |   |   |   <--       | | e | f |   |   |
             v | c |   |   |   |             v |   |   |   |   |
               +---+---+---+---+               +---+---+---+---+
                dst rows along i0               src rows along ik

    strided    element by element, one shape
    any        element by element, or block by block, each side with a shape of its own

A side without gaps takes the shape of the other side.  Copies within one type move bytes: types with blocks of one size
share their kernels.
"""
import math

import numpy as np
from numba import types
from numba.extending import intrinsic

from ggjit.ops.errors import ShapeError
from ggjit.ops.jit import inline
from ggjit.ops.lanes import transpose_ir
from ggjit.ops.moves import PIECE, SCRATCH_NBYTES, can_move, element_mover, mover
from ggjit.ops.node import DST, SRC0, addr, chunk_rows, n_rows, nb, ne, next_rows, row_addr, row_index, work
from ggjit.ops.record import OK, OP
from ggjit.ops.shape import describe, is_contiguous, require, rows_contiguous
from ggjit.ops.simd import W, bf16_ir, const_ir, load_ir, store_ir, vec_ir
from ggjit.ops.spec import Case, Kernel, Spec, touched_nbytes
from ggjit.ops.types import BF16, F16, F32, I32, Q4_0, Q8_0

ELEM = {F32: "f32", F16: "f16", BF16: "i16"}                # what a vector of the type holds


# ---------------------------------------------------------------- builders
def _same_count(name, a, b):
    require(math.prod(a.ne) == math.prod(b.ne), f"{name}: both must have the same number of elements", a, b)


def cpy(a, b):
    """Copy a into b in flat order, converting types; returns a view of b.  Equal numbers of elements, any strides.

    Errors: ShapeError; NotSupported when the plan is made, for a pair of types without a conversion.
    Source: ggml_cpy.
    """
    _same_count("cpy", a, b)
    return a.ctx.node(OP.CPY, b.type, b.ne, (a, b), view_of=b)


def cast(a, type):
    """a [n0, n1, n2, n3] as a new contiguous tensor of `type`, same shape; NumPy: a.astype.

    Errors: TypeMismatch, ShapeError (blocks of `type` that do not divide n0); NotSupported as `cpy`.  Source:
    ggml_cast.
    """
    return a.ctx.node(OP.CPY, type, a.ne, (a,))


def dup(a):
    """A contiguous copy of a: same type and shape, any type and strides; NumPy: a.copy().

    Errors: NotSupported as `cpy`.  Source: ggml_dup.
    """
    return a.ctx.node(OP.DUP, a.type, a.ne, (a,))


def dup_inplace(a):
    """A view of a that stands for a copy onto itself; otherwise as `dup`.  Source: ggml_dup_inplace."""
    return a.ctx.node(OP.DUP, a.type, a.ne, (a,), view_of=a)


def _cont(a, ne):
    ne = tuple(int(n) for n in ne)
    if math.prod(ne) != math.prod(a.ne):
        raise ShapeError(f"cont: {describe(a)} has {math.prod(a.ne)} elements, {list(ne)} has {math.prod(ne)}")
    return a.ctx.node(OP.CONT, a.type, ne, (a,))


def cont(a):
    """a made contiguous, same type and shape; NumPy: np.ascontiguousarray(a).

    Any type and strides; a is copied even if it is contiguous already, as in ggml.  Errors: NotSupported as `cpy`.
    Source: ggml_cont.
    """
    return _cont(a, a.ne)


def cont_1d(a, ne0):
    """a made contiguous, as [ne0]; NumPy: a.reshape(ne0).  Errors: ShapeError; as `cont`.  Source: ggml_cont_1d."""
    return _cont(a, (ne0,))


def cont_2d(a, ne0, ne1):
    """a made contiguous, as [ne0, ne1]; NumPy: a.reshape(ne1, ne0).

    Errors: ShapeError for another number of elements; as `cont`.  Source: ggml_cont_2d.
    """
    return _cont(a, (ne0, ne1))


def cont_3d(a, ne0, ne1, ne2):
    """a made contiguous, as [ne0, ne1, ne2]; NumPy: a.reshape(ne2, ne1, ne0).

    Errors: ShapeError for another number of elements; as `cont`.  Source: ggml_cont_3d.
    """
    return _cont(a, (ne0, ne1, ne2))


def cont_4d(a, ne0, ne1, ne2, ne3):
    """a made contiguous, as [ne0, ne1, ne2, ne3]; NumPy: a.reshape(ne3, ne2, ne1, ne0).

    Errors: ShapeError for another number of elements; as `cont`.  Source: ggml_cont_4d.
    """
    return _cont(a, (ne0, ne1, ne2, ne3))


def reference(t, a, destination=None):
    shape = tuple(reversed(t.ne))
    return (np.trunc(a) if t.type.dtype is not None and t.type.dtype.kind == "i" else a).reshape(shape)


# ---------------------------------------------------------------- kernels
def _make_flat(ts, td):
    move = mover(ts, td).move
    s_step, d_step = ts.row_nbytes(PIECE), td.row_nbytes(PIECE)

    def kernel(node, ith, nth, sync):
        s, d = node + SRC0, node + DST
        total = ne(d, 0) * n_rows(d)
        pieces = (total + PIECE - 1) // PIECE
        scratch = work(node) + ith * SCRATCH_NBYTES
        chunk = chunk_rows(pieces, nth)
        while True:
            start = next_rows(node, ith, nth, sync, chunk, pieces)
            if start >= pieces:
                return OK
            n = min(total, (start + chunk) * PIECE) - start * PIECE
            move(addr(d) + start * d_step, addr(s) + start * s_step, n, scratch)
    return kernel


def _make_rows(ts, td, s_dense, d_dense):
    move = mover(ts, td).move
    s_block, s_size, d_block, d_size = ts.block, ts.nbytes, td.block, td.nbytes

    def kernel(node, ith, nth, sync):
        s, d = node + SRC0, node + DST
        shape = s if d_dense else d
        n0, n = ne(shape, 0), n_rows(shape)
        s_row, d_row = n0 // s_block * s_size, n0 // d_block * d_size
        scratch = work(node) + ith * SCRATCH_NBYTES
        chunk = chunk_rows(n, nth)
        while True:
            start = next_rows(node, ith, nth, sync, chunk, n)
            if start >= n:
                return OK
            for r in range(start, min(n, start + chunk)):
                i1, i2, i3 = row_index(shape, r)
                ps = addr(s) + r * s_row if s_dense else row_addr(s, i1, i2, i3)
                pd = addr(d) + r * d_row if d_dense else row_addr(d, i1, i2, i3)
                move(pd, ps, n0, scratch)
    return kernel


def _make_strided(ts, td, s_dense, d_dense):
    element = element_mover(ts, td).move
    s_size, d_size = ts.nbytes, td.nbytes

    def kernel(node, ith, nth, sync):
        s, d = node + SRC0, node + DST
        shape = s if d_dense else d
        n0, n = ne(shape, 0), n_rows(shape)
        s0, d0 = s_size if s_dense else nb(s, 0), d_size if d_dense else nb(d, 0)
        scratch = work(node) + ith * SCRATCH_NBYTES
        chunk = chunk_rows(n, nth)
        while True:
            start = next_rows(node, ith, nth, sync, chunk, n)
            if start >= n:
                return OK
            for r in range(start, min(n, start + chunk)):
                i1, i2, i3 = row_index(shape, r)
                ps = addr(s) + r * n0 * s_size if s_dense else row_addr(s, i1, i2, i3)
                pd = addr(d) + r * n0 * d_size if d_dense else row_addr(d, i1, i2, i3)
                for i in range(n0):
                    element(pd + i * d0, ps + i * s0, scratch)
    return kernel


@inline
def _block_addr(view, e, block):
    """Address of block number e in flat order."""
    n0 = ne(view, 0) // block
    i1, i2, i3 = row_index(view, e // n0)
    return row_addr(view, i1, i2, i3) + e % n0 * nb(view, 0)


def _make_any(ts, td):
    """Two types, each with blocks of one, or one type."""
    element, block = element_mover(ts, td).move, ts.block

    def kernel(node, ith, nth, sync):
        s, d = node + SRC0, node + DST
        total = ne(d, 0) // block * n_rows(d)
        scratch = work(node) + ith * SCRATCH_NBYTES
        chunk = chunk_rows(total, nth)
        while True:
            start = next_rows(node, ith, nth, sync, chunk, total)
            if start >= total:
                return OK
            for e in range(start, min(total, start + chunk)):
                element(_block_addr(d, e, block), _block_addr(s, e, block), scratch)
    return kernel


def _make_tile_move(ts, td):
    """tile(dst, d_stride, src, s_stride): W x W elements, transposed."""
    same, word = ts is td, f"i{8 * ts.nbytes}"

    def load(b, p):
        if same:                                            # bits: halves widened to words, so that none is rounded
            v = load_ir(b, p, vec_ir(word, W))
            return v if word == "i32" else b.zext(v, vec_ir("i32", W))
        v = load_ir(b, p, vec_ir(ELEM[ts], W))
        if ts is BF16:
            return b.bitcast(b.shl(b.zext(v, vec_ir("i32", W)), const_ir("i32", [16] * W)), vec_ir("f32", W))
        return v if ts is F32 else b.fpext(v, vec_ir("f32", W))

    def store(b, v, p):
        if same:
            store_ir(b, v if word == "i32" else b.trunc(v, vec_ir(word, W)), p)
        elif td is BF16:
            store_ir(b, bf16_ir(b, v), p)
        else:
            store_ir(b, v if td is F32 else b.fptrunc(v, vec_ir("f16", W)), p)

    @intrinsic
    def tile(typingctx, dst, d_stride, src, s_stride):
        def codegen(context, b, sig, args):
            dst, d_stride, src, s_stride = args
            rows = []
            for _ in range(W):
                rows.append(load(b, src))
                src = b.add(src, s_stride)
            for v in transpose_ir(b, rows):
                store(b, v, dst)
                dst = b.add(dst, d_stride)
            return context.get_dummy_value()
        return types.void(types.int64, types.int64, types.int64, types.int64), codegen
    return tile


def _make_tile(ts, td, k, d_dense):
    """The source is dense along dimension k; p and q are the other two."""
    tile, element = _make_tile_move(ts, td), element_mover(ts, td).move
    p, q = (i for i in (1, 2, 3) if i != k)
    s_size, d_size = ts.nbytes, td.nbytes

    @inline
    def stride(d, s, i):
        """Bytes of a step of dst along dimension i > 0."""
        if not d_dense:
            return nb(d, i)
        step = d_size * ne(s, 0)
        for j in range(1, i):
            step *= ne(s, j)
        return step

    def kernel(node, ith, nth, sync):
        s, d = node + SRC0, node + DST
        n0, nk, np_, nq = ne(s, 0), ne(s, k), ne(s, p), ne(s, q)
        s0, dk, dp, dq = nb(s, 0), stride(d, s, k), stride(d, s, p), stride(d, s, q)
        scratch = work(node) + ith * SCRATCH_NBYTES
        blocks = (nk + W - 1) // W
        total = blocks * np_ * nq
        chunk = chunk_rows(total, nth)
        while True:
            start = next_rows(node, ith, nth, sync, chunk, total)
            if start >= total:
                return OK
            for r in range(start, min(total, start + chunk)):
                k0, rest = r % blocks * W, r // blocks
                ip, iq = rest % np_, rest // np_
                ps = addr(s) + k0 * s_size + ip * nb(s, p) + iq * nb(s, q)
                pd = addr(d) + k0 * dk + ip * dp + iq * dq
                whole = n0 // W * W if nk - k0 >= W else 0
                for i in range(0, whole, W):
                    tile(pd + i * d_size, dk, ps + i * s0, s0)
                for j in range(min(W, nk - k0)):
                    for i in range(whole, n0):
                        element(pd + i * d_size + j * dk, ps + i * s0 + j * s_size, scratch)
    return kernel


def _whole_blocks(n0, *pair):
    return all(n0 % t.block == 0 for t in pair)


def _choose(s, d):
    """(name, make, nanoseconds a byte) of the kernel for this pair of layouts, or None."""
    ts, td = s.type, d.type
    s_dense, d_dense = is_contiguous(s), is_contiguous(d)
    if s_dense and d_dense:
        return "flat", lambda: _make_flat(ts, td), 0.025
    one_shape = s.ne == d.ne
    if one_shape:
        s_dense = d_dense = False
    sides = f"{'-s' * s_dense}{'-d' * d_dense}"
    n0 = (s if d_dense else d).ne[0]
    if not (one_shape or s_dense or d_dense):
        if ts is not td and (ts.quantized or td.quantized):
            return None
        return "any", lambda: _make_any(ts, td), 0.7
    if (s_dense or rows_contiguous(s)) and (d_dense or rows_contiguous(d)) and _whole_blocks(n0, ts, td):
        return f"rows{sides}", lambda: _make_rows(ts, td, s_dense, d_dense), 0.03
    if ts.quantized or td.quantized:
        return None
    tiled = {ts, td} <= set(ELEM) or (ts is td and ts.nbytes in (2, 4))
    if tiled and not s_dense and (d_dense or rows_contiguous(d)):
        for k in (1, 2, 3):
            if s.nb[k] == ts.nbytes and s.ne[k] >= W and s.ne[0] >= W:
                return f"tile{k}{sides}", lambda k=k: _make_tile(ts, td, k, d_dense), 0.065
    return f"strided{sides}", lambda: _make_strided(ts, td, s_dense, d_dense), 0.15


def kernel(t, n_threads):
    s = t.src[0]
    chosen = _choose(s, t) if can_move(s.type, t.type) else None
    if chosen is None:
        return None
    name, make, each = chosen
    if s.type is not t.type and (s.type.quantized or t.type.quantized):
        each *= 2
    pair = f"{s.type.name}-{t.type.name}" if s.type is not t.type else f"{t.type.nbytes}x{t.type.block}"
    return Kernel(f"copy-{name}-{pair}", make, cost=each * touched_nbytes(t),
                  work_nbytes=n_threads * SCRATCH_NBYTES, modules=mover(s.type, t.type).modules)


# ---------------------------------------------------------------- cases
def _limit(ts, td):
    """ggml's: 0 for one type, 1e-6 otherwise, one step off for quantised results (part C3)."""
    return 0.0 if ts is td else {Q8_0: 1e-4, Q4_0: 2e-2, BF16: 2.0 ** -16}.get(td, 1e-6)


def cases_of(op):
    from ggjit.ops.view import permute, reshape_4d, view_4d

    def leaf(inp, ty, shape):
        if ty is I32:
            return inp.ids(I32, shape, 150)
        return inp.new(ty, shape, lo=-150, hi=150)

    def make(ts, td, shape, axes=None, back=None, reshaped=None, padded=False):
        def build(inp):
            a = leaf(inp, ts, shape)
            if axes:
                a = permute(a, *axes)
            if op is OP.CONT:
                return cont_4d(a, *reshaped) if reshaped else cont(a)
            if op is OP.DUP:
                return dup(a)
            ne_b = reshaped or (tuple(a.ne[i] for i in back) if back else a.ne)
            b = leaf(inp, td, (ne_b[0] * (1 + padded), *ne_b[1:]))
            if padded:
                b = view_4d(b, *ne_b, *b.nb[1:], 0)
            return cpy(a, permute(b, *back) if back else b)
        return build
    swaps = ((0, 2, 1, 3), (1, 0, 2, 3), (1, 2, 0, 3), (3, 2, 1, 0), (2, 0, 3, 1))
    if op is not OP.CPY:
        for ty in (F32, F16, BF16, I32):
            for axes in (None, *swaps):
                yield Case(f"{ty!r} {axes}", make(ty, ty, (35, 18, 5, 2), axes), 0.0)
        yield Case("Q8_0 (0, 2, 1, 3)", make(Q8_0, Q8_0, (64, 3, 5, 2), (0, 2, 1, 3)), 0.0)
        if op is OP.CONT:
            yield Case("reshaped rows", make(F32, F32, (64, 12, 5, 1), (0, 2, 1, 3), reshaped=(320, 12, 1, 1)), 0.0)
            yield Case("reshaped tile", make(F32, F32, (64, 40, 3, 1), (1, 0, 2, 3), reshaped=(40 * 64, 3, 1, 1)), 0.0)
        return
    pairs = [(s, d) for s in (F32, F16, BF16, Q8_0, Q4_0) for d in (F32, F16, BF16, Q8_0, Q4_0)]
    for ts, td in (*pairs, (I32, I32), (I32, F32), (F32, I32)):
        limit = _limit(ts, td)
        yield Case(f"{ts!r} {td!r}", make(ts, td, (96, 2, 3, 2)), limit)
        yield Case(f"{ts!r} {td!r} rows", make(ts, td, (64, 2, 3, 4), (0, 2, 1, 3)), limit)
        yield Case(f"{ts!r} {td!r} padded", make(ts, td, (64, 2, 3, 1), padded=True), limit)
        if not (ts.quantized or td.quantized):
            yield Case(f"{ts!r} {td!r} tile", make(ts, td, (37, 33, 3, 2), (1, 0, 2, 3)), limit)
            yield Case(f"{ts!r} {td!r} strided", make(ts, td, (3, 5, 7, 2), (2, 1, 0, 3)), limit)
            yield Case(f"{ts!r} {td!r} to transposed", make(ts, td, (3, 5, 7, 2), None, (1, 0, 2, 3)), limit)
            yield Case(f"{ts!r} {td!r} any", make(ts, td, (6, 5, 4, 2), (1, 0, 2, 3), reshaped=(10, 4, 3, 2),
                                                 padded=True), limit)
    for axes in swaps:
        yield Case(f"permuted {axes}", make(F32, F16, (17, 19, 20, 2), axes), 1e-6)
    for ty in (Q8_0, Q4_0):
        yield Case(f"{ty!r} any", make(ty, ty, (64, 4, 3, 2), (0, 3, 1, 2), (0, 2, 1, 3)), 0.0)
    yield Case("cast", lambda inp: cast(permute(inp.new(F32, (24, 40, 3, 1)), 1, 0, 2, 3), F16), 1e-6)
    yield Case("reshaped", lambda inp: cpy(inp.new(F32, (24, 6)), reshape_4d(inp.new(F16, (36, 4)), 9, 4, 4, 1)), 1e-6)


SPECS = (
    Spec(op=OP.CPY, builders=(cpy, cast), reference=reference, kernel=kernel, cases=lambda: cases_of(OP.CPY)),
    Spec(op=OP.CONT, builders=(cont, cont_1d, cont_2d, cont_3d, cont_4d), reference=reference, kernel=kernel,
         cases=lambda: cases_of(OP.CONT)),
    Spec(op=OP.DUP, builders=(dup, dup_inplace), reference=reference, kernel=kernel, cases=lambda: cases_of(OP.DUP)))
