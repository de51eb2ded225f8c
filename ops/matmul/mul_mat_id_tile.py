"""mul_mat_id for many columns an expert: packed panels and register tiles, as mul_mat_tile, sorted by expert.

    phase 1   columns are gathered by expert and packed into panels of NL; an expert's last panel may be part empty
    phase 2   threads take strips of rows of the experts in use against all of that expert's panels; sums land in a
              strip of the thread and are scattered to their tokens

    scratch of a thread     | strip of weights | strip of C | W float32 rows of b | columns of d, 4 MB bytes each |
                            | MB rows of weights as they are in a file, where they lie otherwise |
"""
import math

from ggjit.ops.core.record import OK
from ggjit.ops.matmul import mul_mat_id_group as lists
from ggjit.ops.matmul.mul_mat_tile import make_multiply_strip, make_read_row, private_nbytes
from ggjit.ops.matmul.tile import LDC, MB, NB, NL
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mem import ld_i64
from ggjit.ops.native.node import DST, LINE, SRC0, SRC1, SRC2, addr, barrier, nb, ne, next_rows2, own_share
from ggjit.ops.native.simd import W
from ggjit.ops.types.shared.moves import move_bytes


def scratch_nbytes(tile):
    return private_nbytes(tile) + NB * 4 * MB


def work_nbytes(tile, k, n_experts, n_pairs, n_threads, row_nbytes=0):
    """row_nbytes: of a row of weights, where strips of them are brought into the file's order (rows_of)."""
    panels = n_pairs // NL + min(n_experts, n_pairs)
    own = scratch_nbytes(tile) + MB * row_nbytes
    return lists.group_nbytes(n_experts, n_pairs) + panels * tile.panel_nbytes(k) + n_threads * own


def make_kernel(ta, tb, tile, rows_of=None):
    """rows_of: jitted (a, k, first, rows, dst), as in mul_mat_tile: the experts lie in another layout."""
    read_row = make_read_row(ta, tb, tile)
    pack_y, multiply_strip = tile.pack_y, make_multiply_strip(ta, tile)
    kc, unit, pad, y_nbytes, half, block = tile.kc, tile.unit, tile.pad, tile.y_nbytes, 4 * W, tb.block
    at_once = 1 if half % LINE == 0 else 2              # halves of a panel that fill cache lines
    tall = max(rows for rows, _ in tile.multiply.values())
    c_offs, t_offs, d_offs = MB * tile.ldw, MB * tile.ldw + MB * LDC, private_nbytes(tile)
    scratch_size, w_block, w_nbytes = scratch_nbytes(tile), ta.block, ta.nbytes
    granule, unpacked = math.lcm(tall, W) if rows_of else tall, rows_of is not None

    @inline
    def pack_half(b, k, n_used, pairs, cols, dst, tmp):
        """The columns of `cols` <= W pairs to their half of a panel."""
        n_b, nb0 = ne(b, 1), nb(b, 0)
        for k0 in range(0, k, kc):
            kn = min(kc, k - k0)
            for j in range(cols):
                pair = ld_i64(pairs + 8 * j)
                src = addr(b) + pair % n_used % n_b * nb(b, 1) + pair // n_used * nb(b, 2)
                read_row(src + k0 // block * nb0, nb0, kn, tmp + j * 4 * kc)
            pack_y(tmp, 4 * kc, kn, cols, dst + k0 // unit * y_nbytes)

    @inline
    def expert_of_panel(panels, n_experts, i):
        """The last expert whose first panel is not after i."""
        low, high = 0, n_experts
        while high - low > 1:
            mid = (low + high) // 2
            if ld_i64(panels + 8 * mid) <= i:
                low = mid
            else:
                high = mid
        return low

    @inline
    def scatter(d, n_used, pairs, n, columns, r, rows):
        for j in range(n):
            pair = ld_i64(pairs + 8 * j)
            to = addr(d) + pair % n_used * nb(d, 1) + pair // n_used * nb(d, 2)
            move_bytes(to + 4 * r, columns + j * 4 * MB, 4 * rows)

    def kernel(node, ith, nth, sync):
        a, b, ids, d = node + SRC0, node + SRC1, node + SRC2, node + DST
        k, m, n_experts, n_used = ne(a, 0), ne(a, 1), ne(a, 2), ne(d, 1)
        n_pairs = n_used * ne(d, 2)
        status = lists.group(node, ids, n_experts, NL, ith, nth, sync)
        if status != OK:
            return status
        starts, experts = lists.starts_of(node), lists.experts_of(node, n_experts)
        firsts, pairs = lists.panels_of(node, n_experts), lists.pairs_of(node, n_experts)
        panel_nbytes = (k + pad - 1) // pad * pad // unit * y_nbytes
        panels = lists.lists_end(node, n_experts, n_pairs)
        row_nbytes = k // w_block * w_nbytes
        own_nbytes = scratch_size + (MB * row_nbytes if unpacked else 0)
        scratch = panels + (n_pairs // NL + min(n_experts, n_pairs)) * panel_nbytes + ith * own_nbytes
        own_first, own_end = own_share(2 * lists.n_panels(node) // at_once, ith, nth)
        for h in range(own_first * at_once, own_end * at_once):
            i = h // 2
            e = expert_of_panel(firsts, n_experts, i)
            p = ld_i64(starts + 8 * e) + (i - ld_i64(firsts + 8 * e)) * NL + h % 2 * W
            cols = min(W, ld_i64(starts + 8 * e + 8) - p)
            if cols > 0:
                pack_half(b, k, n_used, pairs + 8 * p, cols, panels + i * panel_nbytes + h % 2 * half, scratch + t_offs)
        barrier(sync, nth)
        active = lists.n_active(node)
        mb, strips = MB, (m + MB - 1) // MB
        if nth > 1 and strips * active < 4 * nth:
            mb = min(MB, ((m * active + 4 * nth - 1) // (4 * nth) + granule - 1) // granule * granule)
            strips = (m + mb - 1) // mb
        total = strips * active
        while True:
            s = next_rows2(node, ith, nth, sync, 1, total)
            if s >= total:
                return OK
            i = s // strips
            r = (s - i * strips) * mb
            rows = min(mb, m - r)
            e = ld_i64(experts + 8 * i)
            first = ld_i64(starts + 8 * e)
            n = ld_i64(starts + 8 * e + 8) - first
            y, w, ldw = panels + ld_i64(firsts + 8 * e) * panel_nbytes, addr(a) + e * nb(a, 2) + r * nb(a, 1), nb(a, 1)
            if unpacked:
                w, ldw = scratch + scratch_size, row_nbytes
                rows_of(addr(a) + e * m * row_nbytes, k, r, rows, w)
            for n0 in range(0, n, NB):
                cols = min(NB, n - n0)
                together = tall if cols < NL else rows          # rows multiplied together, chosen as in mul_mat_tile
                for q in range(0, rows, together):
                    multiply_strip(w + q * ldw, ldw, min(together, rows - q), k, cols, 0,
                                   (cols + NL - 1) // NL, y + n0 // NL * panel_nbytes, panel_nbytes,
                                   scratch + d_offs + 4 * q, 4 * MB, scratch, scratch + c_offs, together)
                scatter(d, n_used, pairs + 8 * (first + n0), cols, scratch + d_offs, r, rows)
    return kernel
