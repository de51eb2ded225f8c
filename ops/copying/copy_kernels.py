"""The kernels of copies (ops/copying/copy.py): one of five, chosen by the layouts when the plan is made.

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
from numba import types
from numba.extending import intrinsic

from ggjit.ops.core.record import OK
from ggjit.ops.core.shape import is_contiguous, rows_contiguous
from ggjit.ops.core.types import BF16, F16, F32
from ggjit.ops.native.jit import inline
from ggjit.ops.native.lanes import transpose_ir
from ggjit.ops.native.node import DST, SRC0, addr, n_rows, nb, ne, next_plane, row_addr, row_index, work
from ggjit.ops.native.row_loops import MOVED, over_chunks, pieces_of_result, rows_of_result, rows_of_source
from ggjit.ops.native.simd import W, bf16_ir, const_ir, half_ir, load_ir, store_ir, vec_ir
from ggjit.ops.types.shared.moves import PIECE, SCRATCH_NBYTES, element_mover, mover

ELEM = {F32: "f32", F16: "f16", BF16: "i16"}                # element of vectors of the type


def _make_flat(ts, td):
    move = mover(ts, td).move
    s_step, d_step = ts.row_nbytes(PIECE), td.row_nbytes(PIECE)

    @inline
    def pieces(node, ith, start, stop):
        s, d = node + SRC0, node + DST
        n = min(ne(d, 0) * n_rows(d), stop * PIECE) - start * PIECE
        move(addr(d) + start * d_step, addr(s) + start * s_step, n, work(node) + ith * SCRATCH_NBYTES, 1)
        return OK
    return over_chunks(pieces, pieces_of_result, MOVED)


def _make_by_row(ts, td, s_dense, d_dense, row):
    """row(node, d, s, n0, scratch) copies n0 elements; along dimension 1 addresses are stepped, not computed."""
    s_block, s_size, d_block, d_size = ts.block, ts.nbytes, td.block, td.nbytes

    @inline
    def rows(node, ith, r, stop):
        s, d = node + SRC0, node + DST
        shape = s if d_dense else d
        n0, n1, n2 = ne(shape, 0), ne(shape, 1), ne(shape, 2)
        s_row, d_row = n0 // s_block * s_size, n0 // d_block * d_size
        s_step, d_step = s_row if s_dense else nb(s, 1), d_row if d_dense else nb(d, 1)
        scratch = work(node) + ith * SCRATCH_NBYTES
        i1, i2, i3 = row_index(shape, r)
        while r < stop:
            ps = addr(s) + r * s_row if s_dense else row_addr(s, i1, i2, i3)
            pd = addr(d) + r * d_row if d_dense else row_addr(d, i1, i2, i3)
            run = min(stop - r, n1 - i1)
            for _ in range(run):
                row(node, pd, ps, n0, scratch)
                ps += s_step
                pd += d_step
            r += run
            i1, i2, i3 = next_plane(i2, i3, n2)
        return OK
    return over_chunks(rows, rows_of_source if d_dense else rows_of_result, MOVED)


def _make_rows(ts, td, s_dense, d_dense):
    move = mover(ts, td).move

    @inline
    def row(node, d, s, n0, scratch):
        move(d, s, n0, scratch, ne(node + (SRC0 if d_dense else DST), 1))
    return _make_by_row(ts, td, s_dense, d_dense, row)


def _make_strided(ts, td, s_dense, d_dense):
    element = element_mover(ts, td).move
    s_size, d_size = ts.nbytes, td.nbytes

    @inline
    def row(node, d, s, n0, scratch):
        s0, d0 = s_size if s_dense else nb(node + SRC0, 0), d_size if d_dense else nb(node + DST, 0)
        for i in range(n0):
            element(d + i * d0, s + i * s0, scratch)
    return _make_by_row(ts, td, s_dense, d_dense, row)


@inline
def _block_addr(view, e, block):
    """Address of block number e in flat order."""
    n0 = ne(view, 0) // block
    i1, i2, i3 = row_index(view, e // n0)
    return row_addr(view, i1, i2, i3) + e % n0 * nb(view, 0)


def _make_any(ts, td):
    """A kernel for two scalar types, or for one type of any kind."""
    element, block = element_mover(ts, td).move, ts.block

    @inline
    def count(node):
        return ne(node + DST, 0) // block * n_rows(node + DST)

    @inline
    def rows(node, ith, start, stop):
        s, d = node + SRC0, node + DST
        scratch = work(node) + ith * SCRATCH_NBYTES
        for e in range(start, stop):
            element(_block_addr(d, e, block), _block_addr(s, e, block), scratch)
        return OK
    return over_chunks(rows, count, MOVED)


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
            store_ir(b, v if td is F32 else half_ir(b, v), p)

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

    @inline
    def count(node):
        return (ne(node + SRC0, k) + W - 1) // W * ne(node + SRC0, p) * ne(node + SRC0, q)

    @inline
    def rows(node, ith, start, stop):
        s, d = node + SRC0, node + DST
        n0, nk, np_ = ne(s, 0), ne(s, k), ne(s, p)
        s0, dk, dp, dq = nb(s, 0), stride(d, s, k), stride(d, s, p), stride(d, s, q)
        scratch = work(node) + ith * SCRATCH_NBYTES
        blocks = (nk + W - 1) // W
        for r in range(start, stop):
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
        return OK
    return over_chunks(rows, count, MOVED)


def _whole_blocks(n0, *pair):
    return all(n0 % t.block == 0 for t in pair)


def choose(s, d):
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
