"""Columns of mul_mat_id grouped by expert, so that tiles read an expert's weights once for all its columns.

    pair = u + n_used * token           a place in ids [n_used, n_tokens]

    ids of the pairs         2 0   0 1   2 0
    order                    1 2 5   3   0 4                                pairs of expert 0, of expert 1, ...
    tiles of 2 columns       (0, 0, 3) (0, 2, 3) (1, 3, 4) (2, 4, 6)        (expert, first place in order, end)

    scratch memory of the node, int32, behind the 8-bit columns where weights are quantised
        order   n_pairs
        flat    n_pairs         the ids side by side
        tiles   3 n_tiles       enough for every way the ids may fall; expert -1: no tile

One block does it: its warps take experts in turn, count their pairs, then write them in order.
"""
from ggjit.ops.cuda import quantize_columns
from ggjit.ops.cuda.compiler import core
from ggjit.ops.cuda.native.launch import SMALL_BLOCKS, Launch
from ggjit.ops.cuda.native.views import SRC0, SRC1, SRC2, addr, bad_index, n_rows, nb, ne, work

MAX_EXPERTS = 1024
THREADS = 64 if SMALL_BLOCKS else 1024


def n_tiles(n_pairs, n_expert, width):
    """At most so many tiles of `width` columns: every expert in use may leave one unfilled."""
    return n_pairs // width + min(n_pairs, n_expert)


def nbytes(n_pairs, n_expert, width):
    return 4 * (2 * n_pairs + 3 * n_tiles(n_pairs, n_expert, width))


def scratch(quantized):
    """scratch(node): address of `order`."""
    if not quantized:
        return work

    @core.device
    def behind_columns(node):
        b = node + SRC1
        n, k = n_rows(b), ne(b, 0)
        return work(node) + n * k + n * (k >> 5) * 4
    return behind_columns


@core.device
def _flatten(node, flat, n_pairs):
    """The ids into `flat`; those that name no expert are reported."""
    ids = node + SRC2
    i = core.thread()
    while i < n_pairs:
        token = i // ne(ids, 0)
        id = core.ld_i32(addr(ids) + (i - token * ne(ids, 0)) * nb(ids, 0) + token * nb(ids, 1))
        if id < 0 or id >= ne(node + SRC0, 2):
            bad_index(node, id)
        core.st_i32(flat + 4 * i, id)
        i += core.n_threads()


@core.device
def _count(flat, expert, n_pairs):
    """Slots of an expert; in every lane of the warp."""
    n, i = 0, core.thread() & 31
    while i < n_pairs:
        if core.ld_i32(flat + 4 * i) == expert:
            n += 1
        i += 32
    return core.warp_sum(n)


@core.device
def _put_pairs(order, flat, expert, first, n_pairs):
    """The numbers of an expert's pairs, in their order, to place `first` of `order` and on."""
    lane, start = core.thread() & 31, 0
    while start < n_pairs:
        hit = start + lane < n_pairs and core.ld_i32(flat + 4 * (start + lane)) == expert
        mask = core.ballot(hit)
        if hit:
            core.st_i32(order + 4 * (first + core.popcount(mask & ((1 << lane) - 1))), start + lane)
        first += core.popcount(mask)
        start += 32


def _make(quantized, width):
    order_of, counts_at = scratch(quantized), core.shared(4 * MAX_EXPERTS)

    @core.device
    def before(counts, expert):
        """(pairs, tiles) of the experts in front of this one; in every lane of the warp."""
        pairs, tiles, e = 0, 0, core.thread() & 31
        while e < expert:
            n = core.lds_i32(counts + 4 * e)
            pairs += n
            tiles += (n + width - 1) // width
            e += 32
        return core.warp_sum(pairs), core.warp_sum(tiles)

    @core.device
    def put_tiles(tiles, expert, number, first, end):
        i = core.thread() & 31
        while first + i * width < end:
            to = tiles + 12 * (number + i)
            core.st_i32(to, expert)
            core.st_i32(to + 4, first + i * width)
            core.st_i32(to + 8, end)
            i += 32

    def kernel(node):
        n_expert, n_pairs = ne(node + SRC0, 2), ne(node + SRC2, 0) * ne(node + SRC2, 1)
        order, counts, warp = order_of(node), counts_at(), core.thread() >> 5
        flat = order + 4 * n_pairs
        tiles = flat + 4 * n_pairs
        _flatten(node, flat, n_pairs)
        core.sync()
        e = warp
        while e < n_expert:
            n = _count(flat, e, n_pairs)
            if core.thread() & 31 == 0:
                core.sts_i32(counts + 4 * e, n)
            e += core.n_threads() >> 5
        core.sync()
        e = warp
        while e < n_expert:
            first, number = before(counts, e)
            _put_pairs(order, flat, e, first, n_pairs)
            put_tiles(tiles, e, number, first, first + core.lds_i32(counts + 4 * e))
            e += core.n_threads() >> 5
        _, i = before(counts, n_expert)
        i += core.thread()
        while i < n_pairs // width + min(n_pairs, n_expert):
            core.st_i32(tiles + 12 * i, -1)
            i += core.n_threads()
    return kernel


def launch(t, quantized, width):
    """The Launch that groups the pairs of a mul_mat_id for tiles of `width` columns; None for too many experts."""
    a, b, ids = t.src[:3]
    n_pairs = ids.ne[0] * ids.ne[1]
    if a.ne[2] > MAX_EXPERTS or n_pairs >= 1 << 30:
        return None
    columns_nbytes = quantize_columns.nbytes(b.ne[0], b.ne[1] * b.ne[2] * b.ne[3]) if quantized else 0
    return Launch(f"group_pairs{'_quantized' * quantized}_{width}", lambda: _make(quantized, width), (1, 1, 1), THREADS,
                  columns_nbytes + nbytes(n_pairs, a.ne[2], width))
