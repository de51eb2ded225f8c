"""Float32 weights in panels of rows: a lane of a vector is a row of the matrix, and activations stay where they lie.

    file      row 0: w[0][0] w[0][1] w[0][2] ...                             one row after the other
    repacked  w[0][0] w[1][0] ... w[47][0] | w[0][1] w[1][1] ... | ...       48 rows, element by element of k

                     V x W rows of a in the lanes
                  +-----------------+
      k elements  |  w w w ...      |        a panel; the rows that remain are a panel of fewer vectors
                  |  w w w ...      |
                  +-----------------+
    column   y -->   c c c ...               up to 8 columns x 48 rows of accumulators in registers;
    of b     y -->   c c c ...               y is broadcast from b, c is stored where the result lies

Beside packed columns (mul_mat_tile) nothing is packed or transposed while multiplying, there is no barrier, and work
grows evenly with the number of columns.  Each tile prefetches its share of the next stretch of weights: n = 16
over 43 MB of weights takes 0.73 to 0.79 of the time without.  So many matrices of [384 x 384], one thread,
Sapphire Rapids, time over that with the file's rows: n = 1 0.54, 4 0.45, 8 0.55, 16 0.68, 64 0.75; one, in the cache,
n = 256 0.78.  400 MB of [2048 x 5632], which come from memory in one stream here and in eight there: n = 1 to 8 1.0 to
1.3, 17 0.8 to 1.2, 128 0.92.

A column's sums depend on how many columns share its tile (one and two take elements of k in turn, for the latency of
the multiply-add), not on threads.
"""

from ggjit.ops.core.record import OK
from ggjit.ops.core.spec import Kernel
from ggjit.ops.matmul import choices
from ggjit.ops.matmul.tile import finish_ir
from ggjit.ops.matmul.tile_float import LANE_OPERANDS
from ggjit.ops.native.jit import exact, inline, ir_function, native
from ggjit.ops.native.lanes import i64, prefetch_ir, splat_const
from ggjit.ops.native.mem import IR_F32, IR_I64, ld_f32, st_f32
from ggjit.ops.native.node import DST, SRC0, SRC1, addr, nb, ne
from ggjit.ops.native.row_affinity import affinity_chunk, affinity_next
from ggjit.ops.native.simd import B, W, counted_loop_ir, fma_ir, load_ir, opaque_ir, shuffle_ir, splat_ir, vec_ir

ROWS, BLOCK = W, 8                      # BLOCK elements of k are a step of the tile
VECTORS, MAX_COLUMNS = {16: (3, 8), 8: (2, 6), 4: (2, 8)}[W]
PANEL = VECTORS * W                     # rows of a panel
KC = 384                                # elements of k between two visits to the result; 192 and 256 are 0 - 2 % slower
LINES = BLOCK * VECTORS * B // 64       # cache lines of weights a step reads


# ---------------------------------------------------------------- the layout
def _make_move(into):
    """jitted move(file, panels, k, m): `into` the layout, or back."""
    @exact
    def move(file, panels, k, m):
        for first in range(0, m, PANEL):
            rows, panel = min(PANEL, m - first), panels + 4 * first * k
            for i in range(k):
                for r in range(rows):
                    there, here = panel + 4 * (i * rows + r), file + 4 * ((first + r) * k + i)
                    if into:
                        st_f32(there, ld_f32(here))
                    else:
                        st_f32(here, ld_f32(there))
    return move


_move_in, _move_out = _make_move(True), _make_move(False)


@native("i64(i64, i64, i64, i64, i64)")
def move_panels(file, repacked, k, m, into):
    """m rows of the file -> panels, or back (into 0)."""
    if into:
        _move_in(file, repacked, k, m)
    else:
        _move_out(file, repacked, k, m)
    return 0


def pack_rows(type, file, repacked, k, m):
    """m rows of the file -> the layout."""
    move_panels(file, repacked, k, m, 1)


def unpack_rows(type, file, repacked, k, m):
    """The layout -> m rows of the file."""
    move_panels(file, repacked, k, m, 0)


def make_row_of(type):
    """jitted (a, k, m, row, dst): one row of the file, of the [k, m] matrix whose panels lie at a."""
    @inline
    def row_of(a, k, m, row, dst):
        first = row // PANEL * PANEL
        rows = min(PANEL, m - first)
        for i in range(k):
            st_f32(dst + 4 * i, ld_f32(a + 4 * (first * k + i * rows + row - first)))
    return row_of


# ---------------------------------------------------------------- the register tile
def _make_tile(n_columns, n_vectors, n_lines):
    """intrinsic tile(w, y, ldy, steps, d, ldd, first, next_w): d[n_columns][n_vectors W] (+)= a panel's BLOCK steps
    elements of k x columns of b; n_lines cache lines at `next_w` are prefetched each step."""
    v, turns = vec_ir("f32", W), {1: 4, 2: 2}.get(n_columns, 1)
    threes = (n_columns + 2) // 3

    @ir_function
    def tile(b, w, y, ldy, steps, d, ldd, first, next_w):
        # three columns share a base register; LLVM must not see how the addresses hang together (tile_float.py)
        apart = [i64(0), opaque_ir(b, ldy), opaque_ir(b, b.mul(ldy, i64(2)))]

        def body(b, state):
            w, next_w = state[:2]
            bases, acc = state[2:2 + threes], list(state[2 + threes:])
            for u in range(BLOCK):
                for line in range(n_lines * u // BLOCK, n_lines * (u + 1) // BLOCK):
                    prefetch_ir(b, b.add(next_w, i64(64 * line)))
                rows = [load_ir(b, b.add(w, i64(B * (n_vectors * u + h))), v, 4) for h in range(n_vectors)]
                for j in range(n_columns):
                    at = b.add(bases[j // 3], apart[j % 3])
                    if LANE_OPERANDS:
                        line = load_ir(b, b.add(at, i64(4 * (u - u % W))), v)
                        s = shuffle_ir(b, line, line, [u % W] * W)
                    else:
                        s = splat_ir(b, load_ir(b, b.add(at, i64(4 * u)), IR_F32), W)
                    for h in range(n_vectors):
                        i = (u % turns * n_columns + j) * n_vectors + h
                        acc[i] = fma_ir(b, s, rows[h], acc[i])
            return [opaque_ir(b, b.add(w, i64(B * n_vectors * BLOCK))), b.add(next_w, i64(64 * n_lines)),
                    *(opaque_ir(b, b.add(p, i64(4 * BLOCK))) for p in bases), *acc]
        starts = [opaque_ir(b, b.add(y, b.mul(ldy, i64(3 * i)))) for i in range(threes)]
        n_sums = n_columns * n_vectors
        state = [(IR_I64, x) for x in (w, next_w, *starts)] + [(v, splat_const("f32", 0.0, W))] * (turns * n_sums)
        acc = counted_loop_ir(b, steps, state, body)[2 + threes:]
        while len(acc) > n_sums:
            half = len(acc) // 2
            acc = [b.fadd(x, y) for x, y in zip(acc[:half], acc[half:], strict=True)]
        finish_ir(b, acc, [b.add(b.add(d, b.mul(ldd, i64(j))), i64(B * h))
                           for j in range(n_columns) for h in range(n_vectors)], first, 4)
    return tile


# ---------------------------------------------------------------- kernel
def _make(n_columns, n_vectors, n_lines):
    """n_columns: of a tile, or one fewer; n_vectors: of the last panel."""
    fewer = max(1, n_columns - 1)
    tiles = {(c, h): _make_tile(c, h, n_lines) for c in (n_columns, fewer) for h in (VECTORS, n_vectors)}
    whole, whole1 = tiles[n_columns, VECTORS], tiles[fewer, VECTORS]
    last, last1 = tiles[n_columns, n_vectors], tiles[fewer, n_vectors]

    @inline
    def tile(rows, cols, w, y, ldy, steps, d, ldd, first, next_w):
        if n_vectors < VECTORS and rows < PANEL:
            if cols == n_columns:
                last(w, y, ldy, steps, d, ldd, first, next_w)
            else:
                last1(w, y, ldy, steps, d, ldd, first, next_w)
        elif cols == n_columns:
            whole(w, y, ldy, steps, d, ldd, first, next_w)
        else:
            whole1(w, y, ldy, steps, d, ldd, first, next_w)

    @inline
    def panel(w, rows, k, b, ldb, n, d, ldd, t0, t1, n_tiles):
        """A panel of `rows` rows against tiles t0 ... t1 - 1 of n columns, by stretches of k."""
        parts = (k + KC - 1) // KC
        step = ((k + parts - 1) // parts + BLOCK - 1) // BLOCK * BLOCK
        for k0 in range(0, k, step):
            steps = min(step, k - k0) // BLOCK
            here = w + 4 * rows * k0
            next_w = here + 4 * rows * BLOCK * steps
            for t in range(t0, t1):
                j, end = n * t // n_tiles, n * (t + 1) // n_tiles
                tile(rows, end - j, here, b + j * ldb + 4 * k0, ldb, steps, d + j * ldd, ldd, 1 if k0 == 0 else 0,
                     next_w)
                next_w += 64 * n_lines * steps

    def kernel(node, ith, nth, sync):
        a, b, d = node + SRC0, node + SRC1, node + DST
        k, m, n = ne(a, 0), ne(a, 1), ne(b, 1)
        panels, n_tiles = (m + PANEL - 1) // PANEL, (n + n_columns - 1) // n_columns
        parts = 1 if nth == 1 else min(n_tiles, (8 * nth + panels - 1) // panels)
        total = panels * parts
        chunk = affinity_chunk(total, nth)
        while True:
            start = affinity_next(node, ith, nth, sync, chunk, total)
            if start >= total:
                return OK
            for item in range(start, min(total, start + chunk)):
                i = item // parts
                part, first = item - i * parts, i * PANEL
                panel(addr(a) + 4 * first * k, min(PANEL, m - first), k, addr(b), nb(b, 1), n, addr(d) + 4 * first,
                      nb(d, 1), n_tiles * part // parts, n_tiles * (part + 1) // parts, n_tiles)
    return kernel


def lines_per_step(n_tiles):
    """Cache lines that a step of a tile prefetches: those of all n_tiles tiles together prefetch the next stretch
    of weights.  One of a few values, each of which is code of its own."""
    return next(LINES // s for s in (1, 2, 4, 8) if n_tiles <= s or s == 8)


def product(a, b, n_threads):
    """The Kernel of repacked weights a times float32 columns b."""
    k, m, n = a.ne[0], a.ne[1], b.ne[1]
    n_tiles = max(1, n if choices.are_apart() else -(-n // MAX_COLUMNS))
    columns, vectors = max(1, -(-n // n_tiles)), m % PANEL // W or VECTORS
    name = f"mul_mat-repacked-f32-{columns}x{vectors}-prefetch{lines_per_step(n_tiles)}"
    return Kernel(name, lambda: _make(columns, vectors, lines_per_step(n_tiles)), 2 * k * m * n / 100 + 4 * k * m / 20,
                  modules=(__name__,))
