"""Products with many columns: tiles of the result, their operands in shared memory.

                     n: columns of b                  a block of 4 warps makes a tile of M x N results,
                   +--------- N --------+             STEP values of k at a time:
                   |                    |
    m: rows   M    |  warp 0  | warp 1  |                 shared a  M rows    x STEP values (+ pad)
    of a           |----------+---------|                 shared b  N columns x STEP values (+ pad)
                   |  warp 2  | warp 3  |
                   +--------------------+             rows padded so that a warp's loads have no bank conflict

    16-bit      mma m16n8k16, float32 sums; b is rounded to a's type
    int8        mma m16n8k16 of codes; sums of 16 products are scaled, (d code_a + m) d_b code_b
    float32     plain multiplications
"""
from numpy import float32 as f32

from ggjit.ops.core.types import F16, F32
from ggjit.ops.cuda.blocks import BLOCKS
from ggjit.ops.cuda.compiler import core
from ggjit.ops.cuda.matmul import mul_mat_group
from ggjit.ops.cuda.matmul.mul_mat_columns import columns, store_pair
from ggjit.ops.cuda.native.launch import Launch
from ggjit.ops.cuda.native.views import SRC0, SRC1, n_rows, nb, ne, work
from ggjit.ops.cuda.rows import ONE

ZERO = f32(0)
THREADS = 128
ONES = 0x01010101


# ---------------------------------------------------------------- 16-bit floats
HALF_M, HALF_N, HALF_STEP, HALF_STRIDE = 64, 64, 32, 80     # stride in bytes: 32 values and 16 bytes of pad
HALF_SUMS = 2 * 4 * 4           # a warp has 2 x 4 mma tiles of 4 results a lane


@core.device
def _load_wide(to, p, stride, first, n, k0):
    """16 bytes a thread and round; rows beyond the end are the last one again."""
    for r in range(HALF_M * HALF_STEP // 8 // THREADS):
        i = r * THREADS + core.thread()
        row, piece = i >> 2, i & 3
        core.sts_i32x4(to + row * HALF_STRIDE + 16 * piece,
                       core.ld_i32x4(p + min(first + row, n - 1) * stride + 2 * k0 + 16 * piece))


def _make_half_loads(ta, tb, source):
    """load_a, load_b: values of any layout into shared memory, as 16 bits of type ta."""
    pack = core.pack_f16 if ta is F16 else core.pack_bf16

    def packing(get):
        @core.device
        def load_two(to, q, step, at, k):
            """Two values, zeros beyond the end of k."""
            x, y = ZERO, ZERO
            if at < k:
                x = get(q + at * step)
            if at + 1 < k:
                y = get(q + (at + 1) * step)
            core.sts_i32(to, pack(x, y))
        return load_two
    two_of_a, two_of_b = packing(ONE[ta].get), packing(ONE[tb].get)

    @core.device
    def load_a(to, p, stride, step, first, n, k0, k):
        for r in range(HALF_M * HALF_STEP // 2 // THREADS):
            i = r * THREADS + core.thread()
            row, pair = i >> 4, i & 15
            two_of_a(to + row * HALF_STRIDE + 4 * pair, p + min(first + row, n - 1) * stride, step, k0 + 2 * pair, k)

    @core.device
    def load_b(to, sc, step, k0, k):
        for r in range(HALF_N * HALF_STEP // 2 // THREADS):
            i = r * THREADS + core.thread()
            column, pair = i >> 4, i & 15
            two_of_b(to + column * HALF_STRIDE + 4 * pair, source(sc, column), step, k0 + 2 * pair, k)
    return load_a, load_b


def _make_half(ta, tb, wide, grouped):
    mma = core.mma_f16 if ta is F16 else core.mma_bf16
    c = columns(grouped, False, HALF_N)
    matrix, shared_c, fill, target = c.matrix, c.shared, c.fill, c.target
    load_a, load_b = _make_half_loads(ta, tb, c.source)
    shared_a, shared_b = core.shared(HALF_M * HALF_STRIDE), core.shared(HALF_N * HALF_STRIDE)

    def kernel(node):
        a, b = node + SRC0, node + SRC1
        m, k, m0, pa = ne(a, 1), ne(a, 0), core.block() * HALF_M, matrix(node)
        if pa == 0:
            return
        sc = shared_c()
        fill(node, sc)
        sa, sb = shared_a(), shared_b()
        warp, lane = core.thread() >> 5, core.thread() & 31
        g, t = lane >> 2, lane & 3
        rows, columns_at = (warp >> 1) * 32, (warp & 1) * 32           # of this warp in the tile
        acc = core.local.array(HALF_SUMS, "float32")
        for i in range(HALF_SUMS):
            acc[i] = ZERO
        k0 = 0
        while k0 < k:
            if wide:
                _load_wide(sa, pa, nb(a, 1), m0, m, k0)
            else:
                load_a(sa, pa, nb(a, 1), nb(a, 0), m0, m, k0, k)
            load_b(sb, sc, nb(b, 0), k0, k)
            core.sync()
            for half in range(2):
                for i in range(2):
                    p = sa + (rows + 16 * i + g) * HALF_STRIDE + 32 * half + 4 * t
                    a0, a1 = core.lds_i32(p), core.lds_i32(p + 8 * HALF_STRIDE)
                    a2, a3 = core.lds_i32(p + 16), core.lds_i32(p + 8 * HALF_STRIDE + 16)
                    for j in range(4):
                        q = sb + (columns_at + 8 * j + g) * HALF_STRIDE + 32 * half + 4 * t
                        s = 16 * i + 4 * j
                        x = mma(a0, a1, a2, a3, core.lds_i32(q), core.lds_i32(q + 16), acc[s], acc[s + 1], acc[s + 2],
                                acc[s + 3])
                        acc[s], acc[s + 1], acc[s + 2], acc[s + 3] = x[0], x[1], x[2], x[3]
            core.sync()
            k0 += HALF_STEP
        for j in range(4):
            to, to_next = target(sc, columns_at + 8 * j + 2 * t), target(sc, columns_at + 8 * j + 2 * t + 1)
            for i in range(2):
                row, s = m0 + rows + 16 * i + g, 16 * i + 4 * j
                store_pair(to, to_next, row, m, acc[s], acc[s + 1])
                store_pair(to, to_next, row + 8, m, acc[s + 2], acc[s + 3])
    return kernel


# ---------------------------------------------------------------- int8 codes
CODE_M, CODE_N = 64, 32
CODE_SUMS = 4 * 4               # a warp has 1 x 4 mma tiles


def _code_step(type):
    """Values of k at a time."""
    return 256 if type.block == 256 else 128


def _make_code_loads(type, source):
    """load_a, load_b: codes into shared memory, with scales and what else a product needs for each 16 values."""
    b, step = BLOCKS[type], _code_step(type)
    words, scale, at, segments = b.words, b.scale, b.at, b.segments
    stride, groups, n_words = step + 16, step // 16, 8 // segments
    per_row, type_block, block_units, block_nbytes = step // 32, type.block, type.block // 32, type.nbytes

    @core.device
    def put_unit(codes, ds, ms, p, u, first):
        """Unit u of the block at p: codes to their places in the row, scales to those of their groups."""
        w = words(p, u)
        for s in range(segments):
            d, m = scale(p, u, s)
            to = first + at(u, s)
            for j in range(n_words):
                core.sts_i32(codes + to + 4 * j, w[s * n_words + j])
            core.sts_f32(ds + (to >> 4) * 4, d)
            core.sts_f32(ms + (to >> 4) * 4, m)

    @core.device
    def put_nothing(codes, ds, ms, first):
        for j in range(8):
            core.sts_i32(codes + first + 4 * j, 0)
        for j in range(2):
            core.sts_f32(ds + (first >> 4) * 4 + 4 * j, ZERO)
            core.sts_f32(ms + (first >> 4) * 4 + 4 * j, ZERO)

    @core.device
    def load_a(sa, sd, sm, p, stride_a, m0, m, k0, k):
        for r in range(CODE_M * per_row // THREADS):
            i = r * THREADS + core.thread()
            row, u = i // per_row, i % per_row
            codes, ds, ms = sa + row * stride, sd + row * groups * 4, sm + row * groups * 4
            unit = (k0 >> 5) + u
            if k0 + 32 * u < k:
                q = unit // block_units
                put_unit(codes, ds, ms, p + min(m0 + row, m - 1) * stride_a + q * block_nbytes,
                         unit - q * block_units, q * type_block - k0)
            else:
                put_nothing(codes, ds, ms, 32 * u)

    @core.device
    def load_b(sb, sx, ss, sc, codes, scales, k0, k):
        """Sixteen codes of a column a thread and round, their scale and the sum they stand for."""
        for r in range(CODE_N * groups // THREADS):
            i = r * THREADS + core.thread()
            column, group = i // groups, i % groups
            x, total, at_k = ZERO, 0, k0 + 16 * group
            w = (0, 0, 0, 0)
            if at_k < k:
                number = source(sc, column)
                w = core.ld_i32x4(codes + number * k + at_k)
                x = core.ld_f32(scales + (number * (k >> 5) + (at_k >> 5)) * 4)
                total = core.dp4a(ONES, w[3], core.dp4a(ONES, w[2], core.dp4a(ONES, w[1], core.dp4a(ONES, w[0], 0))))
            core.sts_i32x4(sb + column * stride + 16 * group, w)
            core.sts_f32(sx + (column * groups + group) * 4, x)
            core.sts_f32(ss + (column * groups + group) * 4, x * f32(total))
    return load_a, load_b


def _make_codes(type, grouped):
    step = _code_step(type)
    stride, groups = step + 16, step // 16
    c = columns(grouped, True, CODE_N)
    matrix, shared_c, fill, target = c.matrix, c.shared, c.fill, c.target
    load_a, load_b = _make_code_loads(type, c.source)
    shared_a, shared_b = core.shared(CODE_M * stride), core.shared(CODE_N * stride)
    shared_d, shared_m = core.shared(CODE_M * groups * 4), core.shared(CODE_M * groups * 4)
    shared_x, shared_sum = core.shared(CODE_N * groups * 4), core.shared(CODE_N * groups * 4)

    def kernel(node):
        a = node + SRC0
        m, k, m0, pa = ne(a, 1), ne(a, 0), core.block() * CODE_M, matrix(node)
        if pa == 0:
            return
        sc = shared_c()
        fill(node, sc)
        codes = work(node)
        scales = codes + n_rows(node + SRC1) * k
        sa, sb, sd, sm, sx, ss = shared_a(), shared_b(), shared_d(), shared_m(), shared_x(), shared_sum()
        warp, lane = core.thread() >> 5, core.thread() & 31
        g, t = lane >> 2, lane & 3
        row = 16 * warp + g
        acc = core.local.array(CODE_SUMS, "float32")
        for i in range(CODE_SUMS):
            acc[i] = ZERO
        k0 = 0
        while k0 < k:
            load_a(sa, sd, sm, pa, nb(a, 1), m0, m, k0, k)
            load_b(sb, sx, ss, sc, codes, scales, k0, k)
            core.sync()
            for group in range(groups):
                p = sa + row * stride + 16 * group + 4 * t
                a0, a1 = core.lds_i32(p), core.lds_i32(p + 8 * stride)
                at_s = (row * groups + group) * 4
                d0, d1 = core.lds_f32(sd + at_s), core.lds_f32(sd + at_s + 8 * groups * 4)
                l0, l1 = core.lds_f32(sm + at_s), core.lds_f32(sm + at_s + 8 * groups * 4)
                for j in range(4):
                    s = core.mma_i8(a0, a1, core.lds_i32(sb + (8 * j + g) * stride + 16 * group + 4 * t))
                    at_x = ((8 * j + 2 * t) * groups + group) * 4
                    x0, x1 = core.lds_f32(sx + at_x), core.lds_f32(sx + at_x + groups * 4)
                    s0, s1 = core.lds_f32(ss + at_x), core.lds_f32(ss + at_x + groups * 4)
                    acc[4 * j] += d0 * x0 * f32(s[0]) + l0 * s0
                    acc[4 * j + 1] += d0 * x1 * f32(s[1]) + l0 * s1
                    acc[4 * j + 2] += d1 * x0 * f32(s[2]) + l1 * s0
                    acc[4 * j + 3] += d1 * x1 * f32(s[3]) + l1 * s1
            core.sync()
            k0 += step
        for j in range(4):
            to, to_next = target(sc, 8 * j + 2 * t), target(sc, 8 * j + 2 * t + 1)
            store_pair(to, to_next, m0 + row, m, acc[4 * j], acc[4 * j + 1])
            store_pair(to, to_next, m0 + row + 8, m, acc[4 * j + 2], acc[4 * j + 3])
    return kernel


# ---------------------------------------------------------------- float32
FULL_TILE, FULL_STEP, FULL_STRIDE = 32, 16, 68      # bytes: 16 values and 4 of pad


def _make_full(tb, grouped):
    get_b = ONE[tb].get
    c = columns(grouped, False, FULL_TILE)
    matrix, shared_c, fill, source, target = c.matrix, c.shared, c.fill, c.source, c.target
    shared_a, shared_b = core.shared(FULL_TILE * FULL_STRIDE), core.shared(FULL_TILE * FULL_STRIDE)

    @core.device
    def load_a(to, p, stride, step, first, n, k0, k):
        for r in range(FULL_TILE * FULL_STEP // THREADS):
            i = r * THREADS + core.thread()
            row, at, x = i >> 4, k0 + (i & 15), ZERO
            if at < k:
                x = core.ld_f32(p + min(first + row, n - 1) * stride + at * step)
            core.sts_f32(to + row * FULL_STRIDE + 4 * (i & 15), x)

    @core.device
    def load_b(to, sc, step, k0, k):
        for r in range(FULL_TILE * FULL_STEP // THREADS):
            i = r * THREADS + core.thread()
            column, at, x = i >> 4, k0 + (i & 15), ZERO
            if at < k:
                x = get_b(source(sc, column) + at * step)
            core.sts_f32(to + column * FULL_STRIDE + 4 * (i & 15), x)

    def kernel(node):
        """A thread makes 2 x 4 results: rows tm, tm + 16; columns tn, tn + 8, tn + 16, tn + 24."""
        a, b = node + SRC0, node + SRC1
        m, k, m0, pa = ne(a, 1), ne(a, 0), core.block() * FULL_TILE, matrix(node)
        if pa == 0:
            return
        sc = shared_c()
        fill(node, sc)
        sa, sb = shared_a(), shared_b()
        tm, tn = core.thread() & 15, core.thread() >> 4
        acc = core.local.array(8, "float32")
        for i in range(8):
            acc[i] = ZERO
        k0 = 0
        while k0 < k:
            load_a(sa, pa, nb(a, 1), nb(a, 0), m0, m, k0, k)
            load_b(sb, sc, nb(b, 0), k0, k)
            core.sync()
            for i in range(FULL_STEP):
                x, y = core.lds_f32(sa + tm * FULL_STRIDE + 4 * i), core.lds_f32(sa + (tm + 16) * FULL_STRIDE + 4 * i)
                for j in range(4):
                    z = core.lds_f32(sb + (tn + 8 * j) * FULL_STRIDE + 4 * i)
                    acc[2 * j] += x * z
                    acc[2 * j + 1] += y * z
            core.sync()
            k0 += FULL_STEP
        for j in range(4):
            to = target(sc, tn + 8 * j)
            if to != 0:
                if m0 + tm < m:
                    core.st_f32(to + 4 * (m0 + tm), acc[2 * j])
                if m0 + tm + 16 < m:
                    core.st_f32(to + 4 * (m0 + tm + 16), acc[2 * j + 1])
    return kernel


# ---------------------------------------------------------------- launches
def product(t, grouped):
    """The Launches of a product with many columns.  grouped: a mul_mat_id."""
    a, b = t.src[:2]
    quantized, suffix = a.type in BLOCKS, "_id" * grouped
    if quantized:
        shape, name, make = (CODE_M, CODE_N), f"codes_{a.type.name}", lambda: _make_codes(a.type, grouped)
    elif a.type is F32:
        shape, name, make = (FULL_TILE, FULL_TILE), f"tile_f32_{b.type.name}", lambda: _make_full(b.type, grouped)
    else:
        wide = a.ne[0] % HALF_STEP == 0 and a.view_offs % 16 == 0 and all(s % 16 == 0 for s in a.nb[1:])
        shape, name = (HALF_M, HALF_N), f"tile_{a.type.name}_{b.type.name}{'_wide' * wide}"
        make = lambda: _make_half(a.type, b.type, wide, grouped)        # noqa: E731
    before, n_rows_of_blocks, n_matrices = (), -(-b.ne[1] // shape[1]), b.ne[2] * b.ne[3]
    if grouped:
        before, ids = (mul_mat_group.launch(t, quantized, shape[1]),), t.src[2]
        n_rows_of_blocks, n_matrices = mul_mat_group.n_tiles(ids.ne[0] * ids.ne[1], a.ne[2], shape[1]), 1
    if None in before or max(n_rows_of_blocks, n_matrices) > 65535:
        return None
    grid = -(-a.ne[1] // shape[0]), n_rows_of_blocks, n_matrices
    return *before, Launch(f"mul_mat{suffix}_{name}", make, grid, THREADS)
