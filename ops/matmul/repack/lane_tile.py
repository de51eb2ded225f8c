"""The register tile of repacked weights of codes, and the activations as it reads them (codes.py has the kernel).

    a block of n prepared columns    fours 0 ... 3 of column 0, of column 1 ... | fours 4 ... 7 of column 0 ...
                                     | words of 32 bits, each of column 0, of column 1 ...
    words                            -zero_point sum(codes) of each part, i32 | d sum(codes) of the block, f32, or the
                                     sums of two parts each, i16 | d, f32

What stands before d is there for types with a zero point, with offsets.  A tile is so many columns times one or more
groups of L rows; a vector of codes serves all columns, four codes of a column, broadcast, all groups:

    blocks of one scale     c += scale d (sum(code q) - zero_point sum(q)) - offset d sum(q)
    super-blocks            c += d (sum of scale[part] sum(code q) - offset sum of min[part] sum(q))

The second line is how every tile adds super-blocks, so results do not depend on the tile.  Integer sums are exact,
whatever bytes a file holds: codes of finite activations are -127 ... 127 (values of at most amax times 127 / amax), so

    AVX2's pairs of products    2 x 128 x 127 = 32,512                  16 bits, saturating
    a part and its zero point   32 x (255 + 128) x 127 = 1,556,512      32 bits; below 2^24, so exact as float32
    sums of activations         32 x 127 = 4,064                        two in a word
    mins of a super-block       8 x 63 x 4,064 = 2,048,256              32 bits, as above
    scaled parts, NEON          256 x 128 x 127 x 128 = 532,676,608     32 bits; rounded to float32 once

On AMD's Zen 5 two units multiply, and both sums of products and scaling are theirs: 8 + 2 instructions for 32 elements
of blocks (80 % of the peak at most), 8 + 1.75 of Q4_K, 8 + 2.25 of Q6_K.  It fetches ahead by the address of the
instruction that loads: a loop over alike parts reads the second-level cache a tenth faster than the same parts one
after the other.
"""
import itertools

from llvmlite import ir

from ggjit.ops.matmul.interleaved import LANES, InterleavedRows, unpacked, unpacked_words_ir
from ggjit.ops.native import isa, neon
from ggjit.ops.native.jit import exact, inline, ir_function
from ggjit.ops.native.lanes import (
    dpbusd_ir,
    fold_ir,
    for_ir,
    i64,
    int_to_float_ir,
    madd_ir,
    madd_to_ir,
    maddubs_ir,
    prefetch_ir,
    splat_const,
    zero,
)
from ggjit.ops.native.mem import IR_F32, IR_I32, IR_I64, call_intrinsic
from ggjit.ops.native.simd import (
    after_ir,
    counted_loop_ir,
    fma_ir,
    load_ir,
    opaque_ir,
    shuffle_ir,
    splat_ir,
    store_ir,
    vec_ir,
)
from ggjit.ops.types.shared import blocks_super, quant32
from ggjit.ops.types.shared.dot import OWN

FALSE = ir.Constant(ir.IntType(1), 0)
AHEAD_NBYTES = 6144                 # between a prefetch and its use, of all groups, up to whole blocks
LONG_AHEAD_NBYTES = 8192            # of super-blocks times 2 to 8 columns in turn
LOCALITY = {OWN: 2, "near": 3}      # cache level that a prefetch goes to


# ---------------------------------------------------------------- activations
class _ColumnFields:
    """Where the fields of a block of n prepared columns lie (n: a number, or an int64 value of the builder's)."""

    def __init__(self, format):
        self.n_codes, parts = format.type.block, format.n_parts
        self.zero_sums = 0
        self.sums = parts * bool(format.zero_point)
        self.scale = self.sums + (parts // 2 if format.mins_ir else bool(format.offset_ir))
        self.column_nbytes = self.n_codes + 4 * (self.scale + 1)

    def four(self, n, j, f):
        """Byte offset of the group of four codes with number f, of column j."""
        return 16 * (f // 4 * n + j) + 4 * (f % 4)

    def word(self, n, j, i):
        return self.n_codes * n + 4 * (i * n + j)


def column_nbytes(format):
    """Bytes of a prepared block of one column."""
    return _ColumnFields(format).column_nbytes


def make_prepare(format):
    """jitted prepare(src, k, panel, j, n): a float32 row as column j of a panel of n."""
    at, elements = _ColumnFields(format), format.type.block
    per_part, super_block = elements // format.n_parts, elements == blocks_super.QK

    @ir_function
    def block(b, src, to, j, n):
        def store(value, i):            # in the place i(n, j) = x n + y j + z
            x, y, z = i(1, 0) - i(0, 0), i(0, 1) - i(0, 0), i(0, 0)
            store_ir(b, value, b.add(to, b.add(b.add(b.mul(n, i64(x)), b.mul(j, i64(y))), i64(z))))
        groups, d = blocks_super.activations_ir(b, src) if super_block else quant32.activation_ir(b, src)
        totals = []
        for g, q in enumerate(groups if super_block else [groups]):
            codes = b.trunc(q, vec_ir("i8", 32))
            for h in range(2):
                half = shuffle_ir(b, codes, codes, range(16 * h, 16 * h + 16))
                store(half, lambda n, j, f=8 * g + 4 * h: at.four(n, j, f))
            totals += [fold_ir(b, shuffle_ir(b, q, q, range(i, i + per_part)), b.add) for i in range(0, 32, per_part)]
        for part, total in enumerate(totals):
            if format.zero_point:
                store(b.mul(total, IR_I32(-format.zero_point)), lambda n, j, i=at.zero_sums + part: at.word(n, j, i))
            if format.mins_ir and part % 2:
                pair = b.or_(b.and_(totals[part - 1], IR_I32(0xFFFF)), b.shl(total, IR_I32(16)))
                store(pair, lambda n, j, i=at.sums + part // 2: at.word(n, j, i))
            elif format.offset_ir and not format.mins_ir:
                store(b.fmul(b.sitofp(total, IR_F32), d), lambda n, j: at.word(n, j, at.sums))
        store(d, lambda n, j: at.word(n, j, at.scale))

    @exact
    def prepare(src, k, panel, j, n):
        for i in range(k // elements):
            block(src + 4 * elements * i, panel + at_nbytes * n * i, j, n)
    at_nbytes = at.column_nbytes
    return prepare


# ---------------------------------------------------------------- the register tile
def _sum_fours_ir(b, sums, weights, four, signed):
    """sums + products of four codes a lane and four activations, the same four for all lanes."""
    if isa.ISA == "avx512":
        return dpbusd_ir(b, sums, weights, four)
    if isa.ISA == "neon":
        return neon.quads_ir(b, sums, weights, four)
    if signed:
        four = call_intrinsic(b, "llvm.x86.avx2.psign.b", four.type, [four, weights])
        weights = call_intrinsic(b, "llvm.abs.v32i8", weights.type, [weights, FALSE])
    return b.add(sums, madd_ir(b, maddubs_ir(b, weights, four), splat_const("i16", 1, 16)))


class _Block:
    """LLVM IR that adds a block of all columns, at q, times blocks of some groups to sums [group][column].

    apart: LLVM must not mix the parts; it would keep the words they share in registers that the sums need, and spill.
    together: so many parts may be mixed: those that share words, where NEON has registers for one column.
    """

    def __init__(self, b, format, n_columns, in_turn, n_lines):
        self.b, self.format, self.columns, self.n_lines = b, format, range(n_columns), n_lines
        self.at, self.in_turn = _ColumnFields(format), in_turn
        self.together = format.sharing if isa.ISA == "neon" and n_columns == 1 else 1
        self.apart = format.n_parts > 1 and (in_turn or n_columns > 2 or n_columns == 1 and bool(format.d_ir))

    def splat(self, q, offs, irty):
        return splat_ir(self.b, load_ir(self.b, self.b.add(q, i64(offs)), irty), LANES)

    def four(self, q, j, f):
        """Four f of column j, for all rows.  NEON multiplies by a lane: fours that lie side by side are one load."""
        lane = f % 4 if isa.ISA == "neon" else 0
        at = self.at.four(len(self.columns), j, f - lane)
        if isa.ISA == "neon":
            line = load_ir(self.b, self.b.add(q, i64(at)), vec_ir("i32", LANES))
            four = shuffle_ir(self.b, line, line, [lane] * LANES)
        else:
            four = self.splat(q, at, IR_I32)
        return self.b.bitcast(four, vec_ir("i8", 4 * LANES))

    def word(self, q, j, i, irty):
        """A word of column j, for all rows; NEON multiplies by a lane here, too."""
        n = len(self.columns)
        if isa.ISA == "neon" and irty is IR_F32 and n % LANES == 0:
            line = load_ir(self.b, self.b.add(q, i64(self.at.word(n, j - j % LANES, i))), vec_ir("f32", LANES))
            return shuffle_ir(self.b, line, line, [j % LANES] * LANES)
        return self.splat(q, self.at.word(n, j, i), irty)

    def pair_of_sums(self, q, j, pair):
        """The sums of two parts of column j, 16 bits each, for all rows; NEON multiplies by lanes of a line of them."""
        n = len(self.columns)
        if isa.ISA != "neon":
            return self.word(q, j, self.at.sums + pair, IR_I32)
        at = pair * n + j
        line = load_ir(self.b, self.b.add(q, i64(self.at.word(n, at - at % 4, self.at.sums))), vec_ir("i16", 8))
        return [shuffle_ir(self.b, line, line, [2 * (at % 4) + i] * 4) for i in range(2)]

    def zero_sums(self, q, part):
        return self.b.add(q, i64(self.at.word(len(self.columns), 0, self.at.zero_sums + part)))

    def rows(self, here):
        return [InterleavedRows(self.b, self.format, x, opaque_ir(self.b, x) if self.apart else x) for x in here]

    def after(self, q, totals):
        return after_ir(self.b, q, list(itertools.chain(*totals))) if self.apart else q

    def ask(self, next_w):
        """Prefetch n_lines cache lines -> the address of the next ones."""
        for i in range(self.n_lines):
            prefetch_ir(self.b, self.b.add(next_w, i64(64 * i)))
        return self.b.add(next_w, i64(64 * self.n_lines))

    def number(self, x):
        """A sum of codes as it is multiplied by a scale: float32, an integer where scales are integers."""
        return x if self.format.d_ir else int_to_float_ir(self.b, x)

    def zeros(self):
        """Where sums of parts begin."""
        return zero("i32" if self.format.d_ir else "f32", LANES)

    def code_sums(self, q, zero_sums, rows, part, first, acc):
        """Yields (group, column, sum of a part as `number` has it); its fours are `first` and the next ones."""
        b, format = self.b, self.format
        if format.paired:
            yield from self.matrix_sums(q, rows, part, first)
            return
        fours = zip(*(format.fours_ir(b, r, part) for r in rows), strict=True)
        fours = list(fours) if len(rows) == 1 or self.in_turn else fours
        for some in [[j] for j in self.columns] if self.in_turn else [self.columns]:
            # keeps LLVM from interleaving the columns, for which it would spill registers
            if some[0]:
                q = after_ir(b, q, [c[some[0] - 1] for c in acc])
            sums = {}
            for j in some:
                start = self.splat(zero_sums, 4 * j, IR_I32) if format.zero_point else zero("i32", LANES)
                sums.update({(g, j): start for g in range(len(rows))})
            for same in fours:
                for j in some:
                    four = self.four(q, j, first + same[0][0])
                    for g, (_, codes) in enumerate(same):
                        sums[g, j] = _sum_fours_ir(b, sums[g, j], codes, four, format.signed)
            for (g, j), x in sums.items():
                yield g, j, self.number(x)

    def matrix_sums(self, q, rows, part, first):
        """The same of paired codes, by products of two rows and two columns: eight elements an instruction."""
        b, n = self.b, len(self.columns)
        codes = [[four for _, four in self.format.fours_ir(b, r, part)] for r in rows]
        pairs = [(j, min(j + 1, n - 1)) for j in self.columns[::2]]
        sums = {(g, pair, half): zero("i32", LANES) for g in range(len(rows)) for pair in pairs for half in range(2)}
        for f in range(0, self.format.n_fours, 4):
            for pair in pairs:
                lines = [load_ir(b, b.add(q, i64(self.at.four(n, j, first + f))), vec_ir("i8", 16)) for j in pair]
                for h in range(2):
                    y = shuffle_ir(b, *lines, [*range(8 * h, 8 * h + 8), *range(16 + 8 * h, 24 + 8 * h)])
                    for g, half in itertools.product(range(len(rows)), range(2)):
                        sums[g, pair, half] = neon.matrix_ir(b, sums[g, pair, half], y, codes[g][f + 2 * h + half])
        for g, (pair, i) in itertools.product(range(len(rows)), ((pair, i) for pair in pairs for i in range(2))):
            if pair[i] > pair[0] or not i:              # a column without a partner is its own
                lanes = [2 * i, 2 * i + 1, 2 * i + 4, 2 * i + 5]
                yield g, pair[i], self.number(shuffle_ir(b, sums[g, pair, 0], sums[g, pair, 1], lanes))

    def add(self, q, rows, acc):
        """Blocks of one scale."""
        b, format, scales, offsets = self.b, self.format, [], []
        for g, j, x in self.code_sums(q, self.zero_sums(q, 0), rows, 0, 0, acc):
            if not scales:
                scales = [format.scale_ir(b, r, 0) for r in rows]
                offsets = [b.fneg(format.offset_ir(b, r)) for r in rows if format.offset_ir]
            acc[g][j] = fma_ir(b, b.fmul(scales[g], self.word(q, j, self.at.scale, IR_F32)), x, acc[g][j])
            if offsets:
                acc[g][j] = fma_ir(b, offsets[g], self.word(q, j, self.at.sums, IR_F32), acc[g][j])

    def add_super(self, q, here, acc, next_w, prefetch):
        """Super-blocks at the addresses `here`; prefetch(part) asks for what comes next -> next_w."""
        b, format = self.b, self.format
        totals = [[self.zeros()] * len(self.columns) for _ in here]
        if format.part_nbytes:
            next_w, totals = self._loop(q, here, totals, next_w)
        for i, part in enumerate(() if format.part_nbytes else format.order):
            prefetch(i)
            if i % self.together == 0:
                q, rows = self.after(q, totals) if i else q, self.rows(here)
            self._add_part(q, self.zero_sums(q, part), rows, part, format.n_fours * part, totals)
        if format.mins_ir:
            q = self.after(q, totals)
        rows = self.rows(here)
        if format.d_ir:
            totals = [[b.fmul(format.d_ir(b, r), int_to_float_ir(b, t)) for t in some]
                      for r, some in zip(rows, totals, strict=True)]
        if format.mins_ir:
            self._add_mins(q, rows, totals)
        for j in self.columns:
            d = self.word(q, j, self.at.scale, IR_F32)
            for c, t in zip(acc, totals, strict=True):
                c[j] = fma_ir(b, t[j], d, c[j])
        return next_w

    def _add_part(self, q, zero_sums, rows, part, first, totals):
        scales = []
        for g, j, x in self.code_sums(q, zero_sums, rows, part, first, totals):
            scales = scales or [self.format.scale_ir(self.b, r, part) for r in rows]
            if self.format.d_ir:
                totals[g][j] = self.b.add(totals[g][j], self.b.mul(scales[g], x))
            else:
                totals[g][j] = fma_ir(self.b, scales[g], x, totals[g][j])

    def _loop(self, q, here, totals, next_w):
        """A loop over parts that lie alike -> (next_w, totals)."""
        b, format, n, n_groups = self.b, self.format, len(self.columns), len(here)

        def grouped(sums):
            return [list(sums[n * g:n * (g + 1)]) for g in range(n_groups)]

        def part(b, state):
            next_w, q, zero_sums, *here = state[:3 + n_groups]
            totals = grouped(state[3 + n_groups:])
            self._add_part(q, zero_sums, [InterleavedRows(b, format, x, x) for x in here], 0, 0, totals)
            return [self.ask(next_w), b.add(q, i64(self.at.four(n, 0, format.n_fours))), b.add(zero_sums, i64(4 * n)),
                    *(b.add(x, i64(format.part_nbytes)) for x in here), *itertools.chain(*totals)]
        start = [(IR_I64, x) for x in (next_w, q, self.zero_sums(q, 0), *here)]
        start += [(x.type, x) for x in itertools.chain(*totals)]
        out = counted_loop_ir(b, opaque_ir(b, i64(format.n_parts)), start, part)
        return out[0], grouped(out[3 + n_groups:])

    def _add_mins(self, q, rows, totals):
        b, format = self.b, self.format
        sums = [[zero("i32", LANES)] * len(self.columns) for _ in rows]
        for pair in range(format.n_parts // 2):
            mins = [format.mins_ir(b, r, pair) for r in rows]
            for j in self.columns:
                of_y = self.pair_of_sums(q, j, pair)
                products = neon.pair_products_ir if isa.ISA == "neon" else madd_to_ir
                for s, m in zip(sums, mins, strict=True):
                    s[j] = products(b, s[j], m, of_y)
        for r, s, t in zip(rows, sums, totals, strict=True):
            offset = b.fneg(format.offset_ir(b, r))
            for j in self.columns:
                t[j] = fma_ir(b, offset, int_to_float_ir(b, s[j]), t[j])


def make_tile(format, n_columns, n_groups=1, prefetch=OWN, in_turn=False, n_lines=0):
    """intrinsic tile(w, y, n_blocks, dst, dst_stride, next_w): n_groups L rows x n_columns dot products.

    Each group is a stream of memory of its own; one column takes group after group, more take all groups at once.
    in_turn: one column of a part after the other, all codes in registers.  prefetch: one of LOCALITY.  n_lines: cache
    lines from next_w on that each part asks for, instead of what comes next in its own stream.
    """
    at, n_parts, nbytes = _ColumnFields(format), format.n_parts, format.nbytes
    together = [[g] for g in range(n_groups)] if n_columns == 1 else [range(n_groups)]
    distance = LONG_AHEAD_NBYTES if in_turn and n_parts > 1 and 2 <= n_columns <= 8 else AHEAD_NBYTES
    first = -(-distance // (n_groups * nbytes)) * nbytes
    ahead = [] if n_lines else range(first, first + nbytes, 64)

    @ir_function
    def tile(b, w, y, n_blocks, dst, dst_stride, next_w):
        block = _Block(b, format, n_columns, in_turn, n_lines)
        far = [b.mul(n_blocks, i64(g * nbytes)) for g in range(n_groups)]

        def body(b, state):
            p, q, next_w, *acc = state
            for some in together:
                here = [b.add(p, far[g]) if g else p for g in some]
                own = [acc[g * n_columns:(g + 1) * n_columns] for g in some]

                def ask_own(part, here=here):
                    # a few lines at a time and in order: bursts fill the load queue
                    for offs in ahead[len(ahead) * part // n_parts:len(ahead) * (part + 1) // n_parts]:
                        for x in here:
                            prefetch_ir(b, b.add(x, i64(offs)), LOCALITY[prefetch])
                if n_parts == 1:
                    ask_own(0)
                    next_w = block.ask(next_w)
                    block.add(q, block.rows(here), own)
                else:
                    next_w = block.add_super(q, here, own, next_w, ask_own)
                for g, sums in zip(some, own, strict=True):
                    acc[g * n_columns:(g + 1) * n_columns] = sums
            return [b.add(p, i64(nbytes)), b.add(q, i64(at.column_nbytes * n_columns)), next_w, *acc]
        zeros = [(vec_ir("f32", LANES), splat_const("f32", 0.0, LANES))] * (n_columns * n_groups)
        sums = for_ir(b, n_blocks, [(IR_I64, x) for x in (w, y, next_w)] + zeros, body)[3:]
        for i, v in enumerate(sums):
            g, j = divmod(i, n_columns)
            store_ir(b, v, b.add(dst, b.add(b.mul(dst_stride, i64(j)), i64(4 * LANES * g))))
    return tile


def make_unpack(format):
    """jitted unpack(a, n_blocks, dst): so many blocks of L rows as the tiles of `unpacked(format)` read them."""
    nbytes, to_nbytes = format.nbytes, unpacked(format).nbytes

    @ir_function
    def block(b, src, dst):
        for i, words in enumerate(unpacked_words_ir(b, format, InterleavedRows(b, format, src, src))):
            store_ir(b, words, b.add(dst, i64(4 * LANES * i)))

    @inline
    def unpack(a, n_blocks, dst):
        for i in range(n_blocks):
            block(a + i * nbytes, dst + i * to_nbytes)
    return unpack
