"""Flash attention for few query rows (decode): up to 8 rows that share a K/V head, straight from K and V.

Work items are (group, set of rows, chunk of CHUNK keys).  With more than one chunk each leaves (m, l, acc) in shared
scratch and a second phase joins them in order: long contexts feed many threads even with one K/V head, and the bytes do
not depend on the number of threads, because the chunks do not.
"""
from ggjit.ops.attention import flash_attn_rows as fr
from ggjit.ops.attention.flash_attn_softmax import Scratch, SoftmaxRows, clz, make_row_stages, next_run, output_factor
from ggjit.ops.attention.flash_attn_tiles import BK, make_dots, make_look_ahead, make_weighted, padded
from ggjit.ops.core.record import BAD_INDEX, OK
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mathfun import exp1
from ggjit.ops.native.mem import ld_f32, ld_i32, st_f32
from ggjit.ops.native.node import (
    SRC0,
    SRC1,
    SRC2,
    SRC3,
    barrier,
    chunk_rows,
    fail,
    nb,
    ne,
    next_rows,
    next_rows2,
    work,
)
from ggjit.ops.native.simd import B, f32, fma, fmul, ldf, splat, stf, zerof

MAX_ROWS = 8
CHUNK = 512                     # keys that one unit of work reads


def rows_at_once(per_group, n_batch):
    """Rows of a set: equal sets of at most MAX_ROWS; powers of two where several queries come, to compile less."""
    n_sets = max(1, -(-per_group // MAX_ROWS))
    n = -(-max(per_group, 1) // n_sets)
    return n if n_batch == 1 else 1 << (n - 1).bit_length()


class DecodeScratch(Scratch):
    """A thread's scratch, and a partial result: m, l, then acc."""

    def __init__(self, variant, n_rows):
        super().__init__()
        self.rows = SoftmaxRows(self, n_rows)
        self.q_stride, self.acc_stride = 4 * padded(variant.d), 4 * padded(variant.dv)
        self.q = self.area(n_rows * self.q_stride)
        self.acc = self.area(n_rows * self.acc_stride)
        self.k = self.area(BK * self.q_stride if variant.k.quantized else 0)
        self.v = self.area(BK * self.acc_stride if variant.v.quantized else 0)
        self.acc_nbytes = -(-self.acc_stride // 64) * 64
        self.partial_nbytes = 64 + self.acc_nbytes
        self.area(64)           # whole vectors may be read beyond the last short row


def work_nbytes(variant, n_rows, n_threads, n_out_rows, n_kv):
    layout = DecodeScratch(variant, n_rows)
    n_chunks = -(-n_kv // CHUNK)
    return n_threads * layout.nbytes + (n_out_rows * n_chunks * layout.partial_nbytes if n_chunks > 1 else 0)


def _make_attend(variant, n_rows, layout, paged):
    """attend(wk, k, ks, v, vs, j0, j1, n, cap, pages): n rows against keys j0 .. j1; k and v are the heads' first rows.

    pages: address of the page table (paged), whose entries say where BK keys lie."""
    rows = layout.rows
    start, see, softmax = make_row_stages(rows)
    k_elem, v_elem = ("f32" if t.quantized else t.name for t in (variant.k, variant.v))
    dots, weighted = make_dots(k_elem, variant.d, n_rows), make_weighted(v_elem, variant.dv, n_rows)
    read_k, read_v = fr.make_row_reader(variant.k, variant.d), fr.make_row_reader(variant.v, variant.dv)
    ahead_k = make_look_ahead(variant.k.row_nbytes(variant.d) if variant.k.quantized else 0)
    ahead_v = make_look_ahead(variant.v.row_nbytes(variant.dv) if variant.v.quantized else 0)
    convert_k, convert_v = variant.k.quantized, variant.v.quantized
    k_, v_, q_, acc_ = layout.k, layout.v, layout.q, layout.acc
    k_stride, v_stride = layout.q_stride, layout.acc_stride
    c_, scores_ = rows.c, rows.scores

    @inline
    def attend(wk, k, ks, v, vs, j0, j1, n, cap, pages):
        start(wk)
        for i in range(0, n_rows * v_stride, B):
            stf(wk + acc_ + i, zerof())
        for j in range(j0, j1, BK):
            bits = see(wk, n, j, min(BK, j1 - j))
            if bits == 0:
                continue
            nj = 64 - clz(bits)
            row = BK * ld_i32(pages + 4 * (j // BK)) if paged else j
            kb, kbs, vb, vbs = k + row * ks, ks, v + row * vs, vs
            if convert_k:
                for i in range(nj):
                    ahead_k(kb + i * ks, ks)
                    read_k(kb + i * ks, wk + k_ + i * k_stride)
                kb, kbs = wk + k_, k_stride
            dots(wk + q_, kb, kbs, nj, wk + scores_)
            softmax(wk, n, nj, cap)
            first, length = next_run(bits, 0)
            while length > 0:
                if convert_v:
                    for i in range(first, first + length):
                        ahead_v(v + (row + i) * vs, vs)
                        read_v(v + (row + i) * vs, wk + v_ + i * v_stride)
                    vb, vbs = wk + v_, v_stride
                weighted(wk + scores_ + 4 * first, vb + first * vbs, vbs, length, wk + acc_, wk + c_)
                first, length = next_run(bits, first + length)
                if length > 0:
                    for i in range(0, 4 * n_rows, B):
                        stf(wk + c_ + i, splat(f32(1.0)))
    return attend


def _make_join(layout):
    """join(parts, n_chunks) -> (m, l): sums the partial results of one row into the first one."""
    stride, nbytes = layout.partial_nbytes, layout.acc_nbytes

    @inline
    def join(parts, n_chunks):
        m = ld_f32(parts)
        for c in range(1, n_chunks):
            m = max(m, ld_f32(parts + c * stride))
        l_sum = f32(0.0)
        for c in range(n_chunks):
            part = parts + c * stride
            weight = exp1(ld_f32(part) - m) if ld_f32(part + 4) != f32(0.0) else f32(0.0)
            l_sum += weight * ld_f32(part + 4)
            for i in range(64, 64 + nbytes, B):
                x = ldf(part + i)
                stf(parts + i, fmul(x, splat(weight)) if c == 0 else fma(x, splat(weight), ldf(parts + i)))
        return m, l_sum
    return join


def _make_emit(variant, layout):
    """(emit, emit_joined): a set's rows, or one row joined from its chunks, to the result or to the partial results."""
    rows = layout.rows
    finish = fr.make_finish(variant)
    join = _make_join(layout)
    m_, l_, acc_, acc_stride, acc_nbytes = rows.m, rows.l, layout.acc, layout.acc_stride, layout.acc_nbytes
    partial_nbytes = layout.partial_nbytes

    @inline
    def emit(node, wk, head0, i3, rep, r0, n, part, n_chunks):
        """part: where the first row's partial result goes, if there are several chunks."""
        for i in range(n):
            m, l_sum, acc = ld_f32(wk + m_ + 4 * i), ld_f32(wk + l_ + 4 * i), wk + acc_ + i * acc_stride
            if n_chunks == 1:
                factor = output_factor(m, l_sum, fr.sink_of(node, head0, rep, r0 + i))
                finish(node, head0, i3, rep, r0 + i, acc, factor)
                continue
            to = part + i * n_chunks * partial_nbytes
            st_f32(to, m)
            st_f32(to + 4, l_sum)
            for x in range(0, acc_nbytes, B):
                stf(to + 64 + x, ldf(acc + x))

    @inline
    def emit_joined(node, group, rep, r, parts, n_chunks):
        head0, i3 = fr.first_head(node + SRC0, group, rep)
        m, l_sum = join(parts, n_chunks)
        finish(node, head0, i3, rep, r, parts + 64, output_factor(m, l_sum, fr.sink_of(node, head0, rep, r)))
    return emit, emit_joined


def make(variant, n_rows, apart=False, paged=False):
    """The kernel for sets of up to `n_rows` rows.  (Few functions: each level of calls is optimised once more.)

    apart: a set has rows of one query, so that its bits do not depend on the others.  paged: with a page table.
    """
    layout = DecodeScratch(variant, n_rows)
    begin = fr.make_begin(variant, layout.rows, layout.q, layout.q_stride)
    attend = _make_attend(variant, n_rows, layout, paged)
    emit, emit_joined = _make_emit(variant, layout)
    scratch_nbytes, partial_nbytes = layout.nbytes, layout.partial_nbytes

    def kernel(node, ith, nth, sync):
        q, k, v = node + SRC0, node + SRC1, node + SRC2
        rep = fr.heads_per_group(q, k, v)
        n_kv = ne(node + SRC3, 0) if paged else ne(k, 1)
        if paged:
            bad = fr.bad_page(node)
            if bad >= 0:                        # every thread: all stop together, before the barrier
                return fail(node, BAD_INDEX, bad)
        per_group, n_groups = rep * ne(q, 1), ne(q, 2) // rep * ne(q, 3)
        per = rep if apart else per_group       # rows that sets are made of
        n_each = (per + n_rows - 1) // n_rows
        n_sets, n_chunks = per_group // max(per, 1) * n_each, max(1, (n_kv + CHUNK - 1) // CHUNK)
        wk, partial = work(node) + ith * scratch_nbytes, work(node) + nth * scratch_nbytes
        cap = fr.score_scale(node)[1]
        n_items = n_groups * n_sets * n_chunks
        step = 1 if n_chunks > 1 else chunk_rows(n_items, nth)
        while True:
            item0 = next_rows(node, ith, nth, sync, step, n_items)
            if item0 >= n_items:
                break
            for item in range(item0, min(n_items, item0 + step)):
                # chunks outermost: all heads of the same tokens in turn, which lie on the same pages
                chunk, rest = item // (n_sets * n_groups), item % (n_sets * n_groups)
                group, s, j0 = rest // n_sets, rest % n_sets, chunk * CHUNK
                first = s // n_each * per
                r0 = first + s % n_each * n_rows
                n = min(n_rows, first + per - r0)
                head0, i3 = fr.first_head(q, group, rep)
                begin(node, wk, head0, i3, rep, r0, n)
                ka, va = fr.kv_addr(node, head0, i3)
                pages = fr.page_table(node, r0 // rep) if paged else 0
                attend(wk, ka, nb(k, 1), va, nb(v, 1), j0, min(n_kv, j0 + CHUNK), n, cap, pages)
                part = partial + ((group * per_group + r0) * n_chunks + chunk) * partial_nbytes
                emit(node, wk, head0, i3, rep, r0, n, part, n_chunks)
        if n_chunks > 1:
            barrier(sync, nth)
            total = n_groups * per_group
            step = chunk_rows(total, nth)
            while True:
                first = next_rows2(node, ith, nth, sync, step, total)
                if first >= total:
                    break
                for x in range(first, min(total, first + step)):
                    parts = partial + x * n_chunks * partial_nbytes
                    emit_joined(node, x // per_group, rep, x % per_group, parts, n_chunks)
        return OK
    return kernel
