"""Flash attention for many query rows (prefill): R rows at a time against blocks of BK keys.

K is transposed and V widened once per item and block; then two matrix products per block, with the weights between
them in scratch (all of it stays in the L2 cache):

          BK keys                              columns of V
        +-----------+                        +--------------+
      D |    K^T    |                     BK |   V, f32     |
        +-----------+                        +--------------+
    +---+-----------+                 +------+--------------+
  R | Q |  scores   |  -> softmax ->  | P    |   output     |    += with the older part scaled by c
    +---+-----------+                 +------+--------------+

Under a causal mask a tile of rows works only up to the last key that one of its rows sees.
"""
from ggjit.ops.attention import flash_attn_rows as fr
from ggjit.ops.attention.flash_attn_matrix import MR, NV, make_tile, make_transpose
from ggjit.ops.attention.flash_attn_softmax import Scratch, SoftmaxRows, clz, make_row_stages, next_run, output_factor
from ggjit.ops.attention.flash_attn_tiles import BK, ROW_NBYTES, lanes, padded
from ggjit.ops.core.record import BAD_INDEX, OK
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mem import ld_f32, ld_i32, ld_i64, st_i64
from ggjit.ops.native.node import SRC0, SRC1, SRC2, SRC3, fail, nb, ne, work
from ggjit.ops.native.row_affinity import BITS
from ggjit.ops.native.row_loops import ITEMS, over_chunks
from ggjit.ops.native.simd import B, W, f32, splat, stf, zerof

ROWS = -(-64 // MR) * MR        # query rows R of a unit of work, or twice as many: keys are unpacked once for them
N_UNITS = 32                    # units of twice as many rows are taken where there are so many to share out
PANEL = NV * W                  # keys of a panel of the transposed block


class PrefillScratch(Scratch):
    """A thread's scratch."""

    def __init__(self, variant):
        super().__init__()
        self.n_rows = 2 * ROWS if variant.d + variant.dv <= 256 else ROWS       # all of it stays in the L2 cache
        self.rows = SoftmaxRows(self, self.n_rows)
        self.q_stride, self.acc_stride = 4 * padded(variant.d), 4 * padded(variant.dv)
        self.k_stride = 4 * -(-variant.d // W) * W
        self.q = self.area(self.n_rows * self.q_stride)
        self.acc = self.area(self.n_rows * self.acc_stride)
        self.k = self.area(BK * self.k_stride)              # the block's rows as float32
        self.kt = self.area(BK * variant.d * 4)             # panels of PANEL keys, transposed
        self.v = self.area(BK * self.acc_stride)
        self.last = self.area(8 * (self.n_rows // MR))      # per tile of rows: keys up to the last visible one


def work_nbytes(variant, n_threads):
    return n_threads * PrefillScratch(variant).nbytes


def _make_pack(variant, layout):
    """pack(wk, k, ks, v, vs, nj): the block's K transposed and V as float32, keys 0 .. nj."""
    read_k, read_v = fr.make_row_reader(variant.k, variant.d), fr.make_row_reader(variant.v, variant.dv)
    k_, kt_, v_, k_stride, v_stride = layout.k, layout.kt, layout.v, layout.k_stride, layout.acc_stride
    d, tail = variant.d, variant.d % W
    full = make_transpose(k_stride, 4 * PANEL, W)
    part = make_transpose(k_stride, 4 * PANEL, tail or W)

    @inline
    def pack(wk, k, ks, v, vs, nj):
        for j in range(nj):
            read_k(k + j * ks, wk + k_ + j * k_stride)
            read_v(v + j * vs, wk + v_ + j * v_stride)
        for j in range(0, nj, W):           # rows beyond nj are of an earlier block; the mask hides them
            src = wk + k_ + j * k_stride
            dst = wk + kt_ + j // PANEL * (4 * PANEL * d) + j % PANEL * 4
            for i in range(0, d - tail, W):
                full(src + 4 * i, dst + 4 * PANEL * i)
            if tail != 0:
                part(src + 4 * (d - tail), dst + 4 * PANEL * (d - tail))
    return pack


def _make_products(variant, layout):
    """(scores, output) of a block for n_tiles tiles of MR rows."""
    rows = layout.rows
    q_, kt_, v_, acc_, last_, scores_, c_ = (layout.q, layout.kt, layout.v, layout.acc, layout.last, rows.scores,
                                             rows.c)
    q_stride, acc_stride, d = layout.q_stride, layout.acc_stride, variant.d
    w = lanes(variant.dv)
    n_full, rest = divmod(padded(variant.dv) // w, NV)
    score_tile = make_tile(NV, W, q_stride, ROW_NBYTES, False)
    wide_tile = make_tile(NV, w, ROW_NBYTES, acc_stride, True)
    last_tile = make_tile(rest or NV, w, ROW_NBYTES, acc_stride, True)

    @inline
    def scores(wk, n_tiles, nj):
        for p in range((nj + PANEL - 1) // PANEL):
            panel = wk + kt_ + p * (4 * PANEL * d)
            for t in range(n_tiles):
                if ld_i64(wk + last_ + 8 * t) > p * PANEL:
                    score_tile(wk + q_ + t * MR * q_stride, panel, 4 * PANEL, d,
                               wk + scores_ + t * MR * ROW_NBYTES + 4 * PANEL * p, 0)

    @inline
    def output(wk, n_tiles, first, length):
        for t in range(n_tiles):
            n = min(length, ld_i64(wk + last_ + 8 * t) - first)
            if n > 0:
                a, c = wk + scores_ + t * MR * ROW_NBYTES + 4 * first, wk + c_ + 4 * MR * t
                v, acc = wk + v_ + first * acc_stride, wk + acc_ + t * MR * acc_stride
                for i in range(n_full):
                    wide_tile(a, v + i * (4 * NV * w), acc_stride, n, acc + i * (4 * NV * w), c)
                if rest != 0:
                    last_tile(a, v + n_full * (4 * NV * w), acc_stride, n, acc + n_full * (4 * NV * w), c)
    return scores, output


def _make_attend(variant, layout, paged):
    """attend(wk, k, ks, v, vs, n_kv, n, cap, pages): n rows against all keys; pages: see flash_attn_decode."""
    rows = layout.rows
    start, see, softmax = make_row_stages(rows)
    pack = _make_pack(variant, layout)
    scores, output = _make_products(variant, layout)
    n_rows, bits_, last_, acc_, c_, acc_nbytes = (
        layout.n_rows, rows.bits, layout.last, layout.acc, rows.c, layout.n_rows * layout.acc_stride)

    @inline
    def find_last(wk, n, n_tiles):
        for t in range(n_tiles):
            bits = 0
            for r in range(t * MR, min(n, t * MR + MR)):
                bits |= ld_i64(wk + bits_ + 8 * r)
            st_i64(wk + last_ + 8 * t, 64 - clz(bits))

    @inline
    def attend(wk, k, ks, v, vs, n_kv, n, cap, pages):
        n_tiles = (n + MR - 1) // MR
        start(wk)
        for i in range(0, acc_nbytes, B):
            stf(wk + acc_ + i, zerof())
        for j in range(0, n_kv, BK):
            bits = see(wk, n, j, min(BK, n_kv - j))
            if bits == 0:
                continue
            nj = 64 - clz(bits)
            find_last(wk, n, n_tiles)
            row = BK * ld_i32(pages + 4 * (j // BK)) if paged else j
            pack(wk, k + row * ks, ks, v + row * vs, vs, nj)
            scores(wk, n_tiles, nj)
            softmax(wk, n, nj, cap)
            first, length = next_run(bits, 0)
            while length > 0:
                output(wk, n_tiles, first, length)
                first, length = next_run(bits, first + length)
                if length > 0:
                    for i in range(0, 4 * n_rows, B):
                        stf(wk + c_ + i, splat(f32(1.0)))
    return attend


def make(variant, paged=False):
    """The kernel.  paged: with a page table, one for all queries."""
    layout = PrefillScratch(variant)
    rows = layout.rows
    begin = fr.make_begin(variant, rows, layout.q, layout.q_stride)
    attend = _make_attend(variant, layout, paged)
    finish = fr.make_finish(variant)
    m_, l_, acc_, acc_stride = rows.m, rows.l, layout.acc, layout.acc_stride
    n_rows, scratch_nbytes = layout.n_rows, layout.nbytes

    @inline
    def set_rows(q):
        return n_rows if ne(q, 1) * ne(q, 2) * ne(q, 3) >= N_UNITS * n_rows else ROWS

    @inline
    def count(node):
        q = node + SRC0
        per_group, size = fr.heads_per_group(q, node + SRC1, node + SRC2) * ne(q, 1), set_rows(q)
        return (per_group + size - 1) // size * (ne(q, 2) * ne(q, 1) // per_group) * ne(q, 3)

    @inline
    def items(node, ith, start, stop):
        q, k, v = node + SRC0, node + SRC1, node + SRC2
        rep = fr.heads_per_group(q, k, v)
        per_group, n_kv, pages = rep * ne(q, 1), ne(k, 1), 0
        if paged:
            bad = fr.bad_page(node)
            if bad >= 0:
                return fail(node, BAD_INDEX, bad)
            n_kv, pages = ne(node + SRC3, 0), fr.page_table(node, 0)
        size, total = set_rows(q), count(node)
        n_groups = total // ((per_group + size - 1) // size)
        wk = work(node) + ith * scratch_nbytes
        for item in range(start, stop):
            # a thread begins with its own queries; where items are many, the last rows come first, since under a causal
            # mask they are the longest
            i = item if total <= BITS else total - 1 - item
            head0, i3 = fr.first_head(q, i % n_groups, rep)
            r0 = i // n_groups * size
            n = min(size, per_group - r0)
            begin(node, wk, head0, i3, rep, r0, n)
            ka, va = fr.kv_addr(node, head0, i3)
            attend(wk, ka, nb(k, 1), va, nb(v, 1), n_kv, n, fr.score_scale(node)[1], pages)
            for i in range(n):
                m, l_sum, sink = ld_f32(wk + m_ + 4 * i), ld_f32(wk + l_ + 4 * i), fr.sink_of(node, head0, rep, r0 + i)
                finish(node, head0, i3, rep, r0 + i, wk + acc_ + i * acc_stride, output_factor(m, l_sum, sink))
        return OK
    return over_chunks(items, count, ITEMS)
