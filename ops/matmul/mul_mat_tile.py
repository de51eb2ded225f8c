"""mul_mat for many columns: the driver of packed panels and register tiles (ops/matmul/tile.py has the picture).

One big matrix       phase 1: threads pack panels of b into shared work memory; barrier;
                     phase 2: threads take strips of MB rows of a against all panels, or, for float32 rows and many
                     columns, against the panels they packed: these are in the core's cache, and so is the result
many small matrices  each thread takes whole matrices and packs their columns into private memory: no barrier,
                     and work memory for one matrix a thread instead of all of them (attention)

Every element of the result is summed in the same order on every thread: results do not depend on threads.
"""
import math

from ggjit.ops.core.record import OK
from ggjit.ops.core.traits import traits_of
from ggjit.ops.core.types import F32
from ggjit.ops.matmul.mul_mat_dot import make_fetch
from ggjit.ops.matmul.tile import LDC, MB, NB, NL, make_put, put_transposed
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mem import zero_bytes
from ggjit.ops.native.node import CHUNK, CHUNK2, DST, LINE, SRC0, SRC1, addr, barrier, nb, ne, next_rows2, work
from ggjit.ops.native.row_affinity import affinity_chunk, affinity_next
from ggjit.ops.native.simd import B, W

BLOCK = 32                      # from so many columns for each thread on, each thread reads all rows of a
LONG_SUM = 4096                 # from so many elements on, a sum takes longer than moving its cache line between cores


def panels_nbytes(tile, k, n):
    """Packed columns of one matrix."""
    return -(-n // tile.columns) * tile.panel_nbytes(k)


def private_nbytes(tile):
    """Scratch of a thread: strips of a and C, and W float32 rows of b before they are packed."""
    return MB * tile.ldw + MB * LDC + W * 4 * tile.kc


def make_panels(tile):
    """jitted (panel_start(i, n), panel_of(g, n)): the first of n columns in panel i; the panel of columns W g ...

    Panels of 3 W are evened: 256 columns are 2 3 3 2 3 3 vectors of 16, not 3 3 3 3 3 1, and halves for two threads.
    """
    columns = tile.columns

    @inline
    def full_start(i, n):
        return i * columns

    @inline
    def full_of(g, n):
        return g * W // columns

    @inline
    def even_start(i, n):
        groups, panels = (n + W - 1) // W, (n + columns - 1) // columns
        return groups * i // panels * W

    @inline
    def even_of(g, n):
        groups, panels = (n + W - 1) // W, (n + columns - 1) // columns
        return ((g + 1) * panels - 1) // groups
    return (even_start, even_of) if columns > NL else (full_start, full_of)


def _make_rows(n_rows, multiply):
    """jitted: the tile of n_rows rows, again and again down a strip of `rows`, of which `whole` are read in place."""
    @inline
    def down(here, nb1, whole, strip, ldw, rows, y, units, sums, first, next_w):
        for r in range(0, rows, n_rows):
            p, s = (here + r * nb1, nb1) if r < whole else (strip + r * ldw, ldw)
            multiply(p, s, y, units, sums + r * LDC, first, next_w + r * nb1, nb1)
    return down


def _make_panel(tile):
    """jitted: a strip against the `left` columns of a panel, by the narrowest tile that holds them."""
    down1, columns = _make_rows(*tile.multiply[1]), tile.columns
    down2, down3 = (_make_rows(*tile.multiply.get(h, tile.multiply[1])) for h in (2, 3))

    @inline
    def panel(here, nb1, whole, strip, ldw, rows, y, units, sums, first, next_w, left):
        if columns > 2 * W and left > 2 * W:
            down3(here, nb1, whole, strip, ldw, rows, y, units, sums, first, next_w)
        elif columns > W and left > W:
            down2(here, nb1, whole, strip, ldw, rows, y, units, sums, first, next_w)
        else:
            down1(here, nb1, whole, strip, ldw, rows, y, units, sums, first, next_w)
    return panel


def _make_panel_with_tail(tile):
    """The same where the last vector has another tile: each group of rows is multiplied by both tiles in turn."""
    tail, (n_rows, multiply) = tile.tail, tile.multiply[1]
    beside, alone = tail.multiply, _make_rows(tail.rows, tail.multiply)
    down2, whole_columns = _make_rows(*tile.multiply.get(2, tile.multiply[1])), 2 * W
    assert tail.rows == n_rows and tile.columns <= whole_columns

    @inline
    def both(here, nb1, whole, strip, ldw, rows, y, units, sums, first, next_w):
        for r in range(0, rows, n_rows):
            p, s = (here + r * nb1, nb1) if r < whole else (strip + r * ldw, ldw)
            multiply(p, s, y, units, sums + r * LDC, first, next_w + r * nb1, nb1)
            beside(p, s, y + B, units, sums + r * LDC + B, first, next_w, nb1)

    @inline
    def only(here, nb1, whole, strip, ldw, rows, y, units, sums, first, next_w, left):
        alone(here, nb1, whole, strip, ldw, rows, y, units, sums, first, next_w)

    @inline
    def panel(here, nb1, whole, strip, ldw, rows, y, units, sums, first, next_w, left):
        if left < W:
            alone(here, nb1, whole, strip, ldw, rows, y, units, sums, first, next_w)
        elif left < whole_columns:
            both(here, nb1, whole, strip, ldw, rows, y, units, sums, first, next_w)
        else:
            down2(here, nb1, whole, strip, ldw, rows, y, units, sums, first, next_w)
    return only if tail.only else panel


def _make_pack(tile):
    """jitted pack_y of a Tile, for the last columns too."""
    whole, last = tile.pack_y, tile.tail and tile.tail.pack_y
    if tile.tail is None or tile.tail.only:
        return last or whole

    @inline
    def pack(src, stride, k, cols, dst):
        if cols < W:
            last(src, stride, k, cols, dst)
        else:
            whole(src, stride, k, cols, dst)
    return pack


def _make_put(tile):
    """jitted put_transposed, for the last columns too."""
    last = make_put(tile.tail.spread if tile.tail else 1)
    if tile.tail is None or tile.tail.only:
        return last

    @inline
    def put(c, dst, ldd, rows, cols, ahead):
        if cols < W:
            last(c, dst, ldd, rows, cols, ahead)
        else:
            put_transposed(c, dst, ldd, rows, cols, ahead)
    return put


def make_read_row(ta, tb, tile):
    """jitted read(src, nb0, k, tmp): k values of type tb -> float32 at tmp, rounded unless the tile does it."""
    fetch, traits = make_fetch(tb), traits_of(ta)
    rounding = traits.round_activations is not None and not tile.rounds
    copy = traits.round_activations if rounding else traits_of(F32).to_float

    @inline
    def read(src, nb0, k, tmp):
        row = fetch(src, nb0, k, tmp)
        if rounding or row != tmp:
            copy(row, tmp, k)
    return read


def make_multiply_strip(ta, tile):
    """jitted (w, nb1, rows, k, n, p0, p1, panels, panel_nbytes, d, ldd, strip, c, ahead): at most MB rows of a against
    panels p0 ... p1 - 1 of n packed columns.

    ahead: the caller's next rows begin that many rows further.
    """
    pack_w = tile.pack_w
    rows1 = tile.multiply[1][0]
    panel = _make_panel_with_tail(tile) if tile.tail else _make_panel(tile)
    put, (panel_start, _) = _make_put(tile), make_panels(tile)
    kc, ldw, unit, y_nbytes, unit_nbytes = tile.kc, tile.ldw, tile.unit, tile.y_nbytes, tile.w_nbytes
    w_nbytes, block, enter, leave = ta.nbytes, ta.block, tile.enter, tile.leave
    in_place, whole_block, columns = tile.in_place, max(32, ta.block), tile.columns
    n_together = NB // columns              # panels whose sums the strip of C holds
    assert not in_place or {rows for rows, _ in tile.multiply.values()} == {rows1}

    @inline
    def stretch(k):
        """Elements of k a strip's row holds: at most kc, equal parts, so that prefetching one covers the next."""
        parts = (k + kc - 1) // kc
        return ((k + parts - 1) // parts + whole_block - 1) // whole_block * whole_block

    @inline
    def multiply_strip(w, nb1, rows, k, n, p0, p1, panels, panel_nbytes, d, ldd, strip, c, ahead):
        step, stop = stretch(k), panel_start(p1, n)
        enter()
        for p in range(p0, p1, n_together):
            j0 = panel_start(p, n)
            for k0 in range(0, k, step):
                kn = min(step, k - k0)
                units = (kn + unit - 1) // unit
                here = w + k0 // block * w_nbytes
                # whole tiles of float32 rows are read where they lie; others are unpacked first
                whole = rows // rows1 * rows1 if in_place and k % unit == 0 else 0
                for r in range(whole, rows):
                    pack_w(here + r * nb1, kn, strip + r * ldw)
                # rows that do not exist are cleared: old bytes may be denormals, which are slow
                for r in range(rows, (rows + rows1 - 1) // rows1 * rows1):
                    zero_bytes(strip + r * ldw, units * unit_nbytes)
                first = 1 if k0 == 0 else 0
                last = k0 + step >= k
                next_w = w + (k0 + step) // block * w_nbytes if k0 + step < k else w + ahead * nb1
                for q in range(p, min(p1, p + n_together)):
                    j, end = panel_start(q, n), min(n, panel_start(q + 1, n))
                    y = panels + q * panel_nbytes + k0 // unit * y_nbytes
                    sums = c + 4 * (j - j0) if k > step else c      # k in one stretch: sums stay in L1
                    panel(here, nb1, whole, strip, ldw, rows, y, units, sums, first, next_w, end - j)
                    for i in range(j, end if last else j, W):
                        after = columns * ldd if stop - i > columns else B      # the next panel's, or its next rows'
                        for r in range(0, rows, W):
                            put(sums + r * LDC + 4 * (i - j), d + i * ldd + 4 * r, ldd, rows - r, n - i, after)
        leave()
    return multiply_strip


def make_kernel(ta, tb, tile, direct, private, rows_of=None):
    """direct: columns of b are plain float32 and are packed from where they lie.

    rows_of: jitted (a, k, first, rows, dst), writes rows of one matrix in another layout (repack.py) to dst as they are
    in a file; `first` is a multiple of W.  Work memory holds MB of them for each thread.  Not `private`.
    """
    read_row = make_read_row(ta, tb, tile)
    pack, multiply_strip, (panel_start, panel_of) = _make_pack(tile), make_multiply_strip(ta, tile), make_panels(tile)
    kc, unit, pad, y_nbytes, columns = tile.kc, tile.unit, tile.pad, tile.y_nbytes, tile.columns
    tall = max(rows for rows, _ in tile.multiply.values())
    granule, unpacked = math.lcm(tall, W) if rows_of else tall, rows_of is not None
    lines = math.lcm(granule, LINE // 4)
    blocks = tile.in_place                  # other types would unpack rows of a once for each block
    block, w_block, w_nbytes = tb.block, ta.block, ta.nbytes
    scratch_nbytes, c_offs, t_offs = private_nbytes(tile), MB * tile.ldw, MB * tile.ldw + MB * LDC

    @inline
    def pack_group(b, src, n, g, first, end, panel_nbytes, panels, tmp):
        """Elements `first` (a multiple of kc) to `end` of columns W g ... of the matrix at src into their panel."""
        nb0, nb1 = nb(b, 0), nb(b, 1)
        j0 = g * W
        cols = min(W, n - j0)
        p = panel_of(g, n)
        dst = panels + p * panel_nbytes + 4 * (j0 - panel_start(p, n))
        src += j0 * nb1
        if direct:
            pack(src + 4 * first, nb1, end - first, cols, dst + first // unit * y_nbytes)
            return
        for k0 in range(first, end, kc):
            kn = min(kc, end - k0)
            for j in range(cols):
                read_row(src + j * nb1 + k0 // block * nb0, nb0, kn, tmp + j * 4 * kc)
            pack(tmp, 4 * kc, kn, cols, dst + k0 // unit * y_nbytes)

    @inline
    def multiply_blocks(node, ith, nth, sync, panels, panel_nbytes, scratch):
        """One matrix by blocks of columns: each thread first takes the columns it packed, against all rows of a."""
        a, b, d = node + SRC0, node + SRC1, node + DST
        k, m, n = ne(a, 0), ne(a, 1), ne(b, 1)
        n_panels, strips = (n + columns - 1) // columns, (m + MB - 1) // MB
        total = nth * strips
        chunk = affinity_chunk(total, nth)
        while True:
            start = affinity_next(node + CHUNK2 - CHUNK, ith, nth, sync, chunk, total)      # counts in the second word
            if start >= total:
                return
            for item in range(start, min(total, start + chunk)):
                block = item // strips
                r = (item - block * strips) * MB
                first, end = n_panels * block // nth, n_panels * (block + 1) // nth
                rows = min(MB, m - r)
                multiply_strip(addr(a) + r * nb(a, 1), nb(a, 1), rows, k, n, first, end, panels, panel_nbytes,
                               addr(d) + 4 * r, nb(d, 1), scratch, scratch + c_offs, rows)

    def kernel(node, ith, nth, sync):
        a, b, d = node + SRC0, node + SRC1, node + DST
        k, m, n = ne(a, 0), ne(a, 1), ne(b, 1)
        n2, n_matrices = ne(b, 2), ne(b, 2) * ne(b, 3)
        ratio2, ratio3 = n2 // ne(a, 2), ne(b, 3) // ne(a, 3)
        panel_nbytes = (k + pad - 1) // pad * pad // unit * y_nbytes
        n_panels = (n + columns - 1) // columns
        matrix_nbytes = n_panels * panel_nbytes
        groups, row_nbytes = (n + W - 1) // W, k // w_block * w_nbytes
        if private:
            panels = work(node) + ith * (matrix_nbytes + scratch_nbytes)
            scratch = panels + matrix_nbytes
        else:
            panels = work(node)
            own_nbytes = scratch_nbytes + (MB * row_nbytes if unpacked else 0)
            scratch = panels + n_matrices * matrix_nbytes + ith * own_nbytes
            # few columns: threads share the elements of a column
            length = kc if groups * n_matrices < 4 * nth else k
            parts = (k + length - 1) // length
            total = parts * groups * n_matrices
            chunk = affinity_chunk(total, nth)
            while True:
                start = affinity_next(node, ith, nth, sync, chunk, total)
                if start >= total:
                    break
                for item in range(start, min(total, start + chunk)):
                    g = item // parts
                    first = (item - g * parts) * length
                    matrix = g // groups
                    i3 = matrix // n2
                    src = addr(b) + (matrix - i3 * n2) * nb(b, 2) + i3 * nb(b, 3)
                    pack_group(b, src, n, g - matrix * groups, first, min(k, first + length), panel_nbytes,
                               panels + matrix * matrix_nbytes, scratch + t_offs)
            barrier(sync, nth)
            if blocks and nth > 1 and n_matrices == 1 and n >= BLOCK * nth:
                multiply_blocks(node, ith, nth, sync, panels, panel_nbytes, scratch)
                return OK
        strips = (m + MB - 1) // MB
        mb = MB
        if not private and strips * n_matrices < 4 * nth and nth > 1:
            # whole lines of results, unless that leaves threads without work that pays for lines with two writers
            least = lines if m * n_matrices >= lines * nth or k < LONG_SUM else granule
            mb = min(MB, ((m * n_matrices + 4 * nth - 1) // (4 * nth) + least - 1) // least * least)
            strips = (m + mb - 1) // mb
        total = strips * n_matrices
        chunk = strips if private else 1
        together = granule if n < NL else mb        # few columns: rows are multiplied before they leave the first cache
        while True:
            start = next_rows2(node, ith, nth, sync, chunk, total)
            if start >= total:
                return OK
            matrix = start // strips
            i3 = matrix // n2
            i2 = matrix - i3 * n2
            if private:
                src = addr(b) + i2 * nb(b, 2) + i3 * nb(b, 3)
                for g in range(groups):
                    pack_group(b, src, n, g, 0, k, panel_nbytes, panels, scratch + t_offs)
                y = panels
            else:
                y = panels + matrix * matrix_nbytes
            w = addr(a) + i2 // ratio2 * nb(a, 2) + i3 // ratio3 * nb(a, 3)
            c = addr(d) + i2 * nb(d, 2) + i3 * nb(d, 3)
            for s in range(start, start + chunk):
                begin = (s - matrix * strips) * mb
                end = min(m, begin + mb)
                for r in range(begin, end, together):
                    rows = min(together, end - r)
                    # each thread takes every nth strip
                    ahead = rows if r + rows < end or private else rows + (nth - 1) * mb
                    if unpacked:
                        rows_of(w, k, r, rows, scratch + scratch_nbytes)
                        multiply_strip(scratch + scratch_nbytes, row_nbytes, rows, k, n, 0, n_panels, y, panel_nbytes,
                                       c + 4 * r, nb(d, 1), scratch, scratch + c_offs, 0)
                        continue
                    multiply_strip(w + r * nb(a, 1), nb(a, 1), rows, k, n, 0, n_panels, y, panel_nbytes,
                                   c + 4 * r, nb(d, 1), scratch, scratch + c_offs, ahead)
    return kernel
