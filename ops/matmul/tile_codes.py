"""The 8-bit tiles of quantised weights (ops/types/shared/blocks.py): groups of 32 codes, scales and offsets.

A unit is a group.  The strip of a holds its codes as unsigned bytes, then a float32 scale (and offset) for each part:
the group, or its halves where these have scales of their own.  The panel of b holds, for NL columns,

    8 quads of codes | for each part: a word | d

    word: -zero_point sum(q) as int32, the start of the integer sum; or d sum(q) as float32, the factor of the offset

    c += scale[part] d (word + sum u q)            or            c += scale d sum(u q) + offset word

AVX-512 sums quads by VNNI.  NEON does by sdot, whose second operand may be a lane: 16 codes of a row are one load, and
codes have signs; with smmla, which multiplies two rows by two columns, the panel holds eights of codes.  AVX2 sums
pairs in 16 bits, as many of them as the largest code allows, before it widens; it has no tile for codes of more than
six bits or with signs: those types use the float tile there, and all do without sdot.

AMX multiplies a part of 16 rows by one of 16 columns: the rows of the panel's codes are those of its tile, codes have
signs as on NEON.  The integer sums go through memory to the registers of float sums, which are those of AVX-512: the
same numbers, added in the same order.
"""
import functools

from llvmlite import ir

from ggjit.ops.core.traits import traits_of
from ggjit.ops.matmul import choices
from ggjit.ops.matmul import tile as panels
from ggjit.ops.matmul.tile import LDC, NL, Tail, Tile
from ggjit.ops.native import amx, isa, neon
from ggjit.ops.native.jit import inline, ir_function
from ggjit.ops.native.lanes import (
    bitcast_ir,
    dpbusd_ir,
    i32,
    i64,
    int_to_float_ir,
    madd_ir,
    maddubs_ir,
    splat_const,
    zero,
)
from ggjit.ops.native.mem import IR_F32, IR_I32, IR_I64
from ggjit.ops.native.simd import (
    B,
    W,
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
from ggjit.ops.types.shared.blocks_super import Super, activations_ir
from ggjit.ops.types.shared.quant32 import activation_ir

KC = 512
SIGNED = isa.ISA == "neon"              # the strip holds signed codes, their zero point subtracted
SIGNED_ZERO = 128                       # else signed codes are stored with their sign bit flipped


class UnitLayout:
    """Sizes and places (bytes) of one format's units."""

    def __init__(self, blocks, signed=SIGNED):
        self.blocks, self.signed = blocks, signed
        self.parts = 2 if blocks.halves else 1
        self.offsets = blocks.has_offsets
        self.zero_point = 0 if signed else SIGNED_ZERO if blocks.signed else blocks.zero_point
        self.words = self.parts if self.offsets or self.zero_point else 0
        self.w_nbytes = 32 + 4 * self.parts * (2 if self.offsets else 1)
        self.y_nbytes = 4 * NL * (8 + self.words + 1)
        self.y_word, self.y_d = 4 * NL * 8, 4 * NL * (8 + self.words)
        self.block, self.nbytes = blocks.type.block, blocks.type.nbytes


# ---------------------------------------------------------------- packing
def _make_pack_y(layout, spread=1):
    """Quantise `cols` float32 rows as the format's partner does, into one half of a panel."""
    big = isinstance(layout.blocks, Super)
    step = 256 if big else 32

    def put_group(b, q, d, dst, codes):
        if eights:
            quarters = bitcast_ir(b, b.trunc(q, vec_ir("i8", 32)), "i64", 4)
            for i in range(4):
                store_ir(b, b.extract_element(quarters, i32(i)), b.add(codes, i64(8 * NL * i)), 4)
        else:
            panels.put_quads_ir(b, q, codes, spread)
        ds = splat_ir(b, d, spread)
        if layout.words:
            n = 32 // layout.parts
            for i in range(layout.parts):
                s = panels.lane_sums_ir(b, q, n * i, n, spread)
                word = (b.fmul(ds, b.sitofp(s, vec_ir("f32", spread))) if layout.offsets
                        else b.mul(s, splat_const("i32", -layout.zero_point, spread)))
                store_ir(b, word, b.add(dst, i64(layout.y_word + 4 * NL * i)), 4)
        store_ir(b, ds, b.add(dst, i64(layout.y_d)), 4)

    def put_all(b, src, dst, codes):
        if big:
            groups, d = activations_ir(b, src)
        else:
            q, d = activation_ir(b, src)
            groups = [q]
        for g, q in enumerate(groups):
            at = b.add(dst, i64(layout.y_nbytes * g))
            put_group(b, q, d, at, at if codes is dst else b.add(codes, i64(layout.y_nbytes * g)))

    @ir_function
    def put(b, src, dst):
        put_all(b, src, dst, dst)

    @ir_function
    def put_eights(b, src, unit, j):
        """Half of a panel of NEON, four columns: eights of columns 0 and 1, those of the other half, 2 and 3."""
        pair, odd = b.lshr(j, i64(1)), b.and_(j, i64(1))
        codes = b.add(unit, b.add(b.mul(pair, i64(4 * NL)), b.mul(odd, i64(8))))
        put_all(b, src, b.add(unit, b.mul(j, i64(4))), codes)
    y_nbytes, dst_step = layout.y_nbytes, step // 32 * layout.y_nbytes
    eights = neon.HAS_SMMLA

    @inline
    def pack_y(src, stride, k, cols, dst):
        for j in range(cols):
            for i in range(k // step):
                if eights:
                    put_eights(src + j * stride + 4 * step * i, dst + i * dst_step, j)
                else:
                    put(src + j * stride + 4 * step * i, dst + i * dst_step + 4 * spread * j)
        panels.blank_columns(spread * cols, k // 32, y_nbytes, dst)
    return pack_y


def _make_pack_w(layout):
    blocks, parts = layout.blocks, layout.parts

    @ir_function
    def put(b, src, dst):
        scales, offsets = blocks.part_factors_ir(b, src, parts)
        for g, codes in enumerate(blocks.codes_ir(b, src)):
            at = b.add(dst, i64(layout.w_nbytes * g))
            if layout.signed and blocks.zero_point:
                codes = b.sub(codes, splat_const("i8", blocks.zero_point, 32))
            elif blocks.signed and not layout.signed:
                codes = b.xor(codes, splat_const("i8", -128, 32))
            store_ir(b, codes, at)
            for i, x in enumerate(scales[g] + (offsets[g] if layout.offsets else [])):
                store_ir(b, x, b.add(at, i64(32 + 4 * i)))
    block, nbytes, dst_step = layout.block, layout.nbytes, layout.block // 32 * layout.w_nbytes

    @inline
    def pack_w(src, k, dst):
        for i in range(k // block):
            put(src + i * nbytes, dst + i * dst_step)
    return pack_w


# ---------------------------------------------------------------- products
def _scalar_ir(b, addr, n):
    return splat_ir(b, load_ir(b, addr, IR_F32, 4), n)


def _make_add_sums(layout, n_rows, n_vectors, ldw, lanes):
    """Function that adds scale d q and, in formats with offsets, offset word to `acc`; q: integer sums of a part."""
    def add_sums(b, w, acc, q, part, dy, word):
        for r in range(n_rows):
            scale = _scalar_ir(b, b.add(w, i64(r * ldw + 32 + 4 * part)), lanes)
            offset = _scalar_ir(b, b.add(w, i64(r * ldw + 32 + 4 * (layout.parts + part))), lanes) \
                if layout.offsets else None
            for h in range(n_vectors):
                i = r * n_vectors + h
                acc[i] = fma_ir(b, b.fmul(scale, dy[h]), int_to_float_ir(b, q[i]), acc[i])
                if offset is not None:
                    acc[i] = fma_ir(b, offset, word[h], acc[i])
    return add_sums


def _make_vnni_multiply(layout, n_rows, n_vectors, ldw, spread=1, prefetching=True):
    fv, iv = vec_ir("f32", 16), vec_ir("i32", 16)
    add_sums = _make_add_sums(layout, n_rows, n_vectors, ldw, 16)
    n_acc, parts = n_rows * n_vectors, layout.parts
    each = 8 // parts

    def columns(b, y, offs, t):
        return [load_ir(b, b.add(y, i64(offs + 64 * h)), t, 64) for h in range(n_vectors)]

    def add_part(b, w, y, acc, part, dy):
        word = columns(b, y, layout.y_word + 4 * NL * part, fv if layout.offsets else iv) if layout.words else None
        start = word if layout.zero_point else [zero("i32", 16)] * n_vectors
        q = [start[i % n_vectors] for i in range(n_acc)]
        for t in range(each * part, each * part + each, spread):
            ys = [bitcast_ir(b, v, "i8", 64) for v in columns(b, y, 4 * NL * t // spread, iv)]
            for r in range(n_rows):
                u = bitcast_ir(b, panels.repeat_ir(b, b.add(w, i64(r * ldw + 4 * t)), "i32", spread), "i8", 64)
                for h in range(n_vectors):
                    q[r * n_vectors + h] = dpbusd_ir(b, q[r * n_vectors + h], u, ys[h])
        add_sums(b, w, acc, q, part, dy, word)

    @ir_function
    def multiply(b, w, _, y, units, c, first, next_w, stride):
        prefetch = panels.prefetch_rows_ir(b, next_w, stride, n_rows if prefetching else 0)
        places = [b.add(c, i64(r * LDC + 64 * h)) for r in range(n_rows) for h in range(n_vectors)]

        def body(b, state):
            w, y, o, *acc = state
            prefetch(b, o)
            dy = columns(b, y, layout.y_d, fv)
            for part in range(parts):
                add_part(b, w, y, acc, part, dy)
            return [b.add(w, i64(layout.w_nbytes)), b.add(y, i64(layout.y_nbytes)),
                    b.add(o, i64(layout.nbytes * 32 // layout.block)), *acc]
        start = [(IR_I64, w), (IR_I64, y), (IR_I64, i64(0))] + [(fv, zero("f32", 16))] * n_acc
        acc = counted_loop_ir(b, units, start, body)[3:]
        panels.finish_ir(b, acc, places, first)
    return multiply


def _make_pairs_multiply(layout, n_rows, n_vectors, ldw):
    """AVX2: registers hold the 16-bit sums only, float sums stay in the strip of C; real loops, or LLVM spills."""
    fv, iv, hv = vec_ir("f32", 8), vec_ir("i32", 8), vec_ir("i16", 16)
    n_acc, parts = n_rows * n_vectors, layout.parts
    steps = _pair_steps(layout)
    per_part = 8 // parts // steps

    @ir_function
    def multiply(b, w, _, y, units, c, first, next_w, stride):
        prefetch = panels.prefetch_rows_ir(b, next_w, stride, n_rows)
        places = [b.add(c, i64(r * LDC + B * h)) for r in range(n_rows) for h in range(n_vectors)]
        with b.if_then(b.icmp_signed("!=", first, i64(0))):
            for p in places:
                store_ir(b, zero("f32", 8), p, 32)

        def step(b, state):
            w, y, *q = state
            ys = [bitcast_ir(b, load_ir(b, b.add(y, i64(B * h)), iv, 32), "i8", 32) for h in range(n_vectors)]
            for r in range(n_rows):
                u = bitcast_ir(b, splat_ir(b, load_ir(b, b.add(w, i64(r * ldw)), IR_I32, 4), 8), "i8", 32)
                for h in range(n_vectors):
                    i = r * n_vectors + h
                    q[i] = b.add(q[i], maddubs_ir(b, u, ys[h]))
            return [b.add(w, i64(4)), b.add(y, i64(4 * NL)), *q]

        def flush(b, w, y, part, with_word, q):
            def columns(offs, t):
                return [load_ir(b, b.add(y, i64(offs + B * h)), t, 32) for h in range(n_vectors)]
            dy, word = columns(layout.y_d, fv), None
            if with_word and layout.words:
                word = columns(layout.y_word + 4 * NL * part, fv if layout.offsets else iv)
            for r in range(n_rows):
                scale = _scalar_ir(b, b.add(w, i64(r * ldw + 32 + 4 * part)), 8)
                offset = _scalar_ir(b, b.add(w, i64(r * ldw + 32 + 4 * (parts + part))), 8)
                for h in range(n_vectors):
                    i = r * n_vectors + h
                    s = madd_ir(b, q[i], splat_const("i16", 1, 16))
                    if word and not layout.offsets:
                        s = b.add(s, word[h])
                    new = fma_ir(b, b.fmul(scale, dy[h]), int_to_float_ir(b, s), load_ir(b, places[i], fv, 32))
                    if word and layout.offsets:
                        new = fma_ir(b, offset, word[h], new)
                    store_ir(b, new, places[i], 32)

        def body(b, state):
            w, y, o = state
            prefetch(b, o)
            for s in range(8 // steps):
                start = [(IR_I64, b.add(w, i64(4 * steps * s))), (IR_I64, b.add(y, i64(4 * NL * steps * s)))]
                start += [(hv, zero("i16", 16))] * n_acc
                q = counted_loop_ir(b, opaque_ir(b, i64(steps)), start, step)[2:]
                flush(b, w, y, s // per_part, s % per_part == 0, q)
            return [b.add(w, i64(layout.w_nbytes)), b.add(y, i64(layout.y_nbytes)),
                    b.add(o, i64(layout.nbytes * 32 // layout.block))]
        counted_loop_ir(b, units, [(IR_I64, w), (IR_I64, y), (IR_I64, i64(0))], body)
    return multiply


def _make_neon_multiply(layout, n_rows, n_vectors, ldw):
    fv, iv = vec_ir("f32", 4), vec_ir("i32", 4)
    n_acc, parts = n_rows * n_vectors, layout.parts
    lines = 2 // parts                  # of 16 codes, in a part
    add_sums = _make_add_sums(layout, n_rows, n_vectors, ldw, 4)

    def columns(b, y, offs, t):
        return [load_ir(b, b.add(y, i64(offs + B * h)), t, B) for h in range(n_vectors)]

    def rows_of_codes(b, w, line):
        return [load_ir(b, b.add(w, i64(r * ldw + 16 * line)), iv, 4) for r in range(n_rows)]

    def quad_sums(b, w, y, part):
        q = [zero("i32", 4)] * n_acc
        for line in range(lines * part, lines * (part + 1)):
            ws = rows_of_codes(b, w, line)
            for t in range(4):
                ys = [bitcast_ir(b, v, "i8", 16) for v in columns(b, y, 4 * NL * (4 * line + t), iv)]
                for r in range(n_rows):
                    four = bitcast_ir(b, shuffle_ir(b, ws[r], ws[r], [t] * 4), "i8", 16)
                    for h in range(n_vectors):
                        q[r * n_vectors + h] = neon.quads_ir(b, q[r * n_vectors + h], ys[h], four)
        return q

    def matrix_sums(b, w, y, part):
        """Sums by smmla, which fills a register with those of two rows and two columns; they are reordered to registers
        of one row at the end."""
        low, high = [0, 1, 4, 5], [2, 3, 6, 7]
        pairs, q = 2 * n_vectors, [zero("i32", 4)] * n_acc
        for line in range(lines * part, lines * (part + 1)):
            ws = rows_of_codes(b, w, line)
            for t, half in enumerate((low, high)):
                at = [8 * NL * (2 * line + t) + 4 * NL * (c % 2) + B * (c // 2) for c in range(pairs)]
                ys = [bitcast_ir(b, load_ir(b, b.add(y, i64(offs)), iv, B), "i8", 16) for offs in at]
                for r in range(0, n_rows, 2):
                    eights = bitcast_ir(b, shuffle_ir(b, ws[r], ws[r + 1], half), "i8", 16)
                    for c in range(pairs):
                        i = r // 2 * pairs + c
                        q[i] = neon.matrix_ir(b, q[i], eights, ys[c])
        return [shuffle_ir(b, q[r // 2 * pairs + 2 * h], q[r // 2 * pairs + 2 * h + 1], high if r % 2 else low)
                for r in range(n_rows) for h in range(n_vectors)]

    def add_part(b, w, y, acc, part, dy):
        q = matrix_sums(b, w, y, part) if neon.HAS_SMMLA else quad_sums(b, w, y, part)
        word = columns(b, y, layout.y_word + 4 * NL * part, fv) if layout.offsets else None
        add_sums(b, w, acc, q, part, dy, word)

    @ir_function
    def multiply(b, w, _, y, units, c, first, next_w, stride):
        prefetch = panels.prefetch_rows_ir(b, next_w, stride, n_rows)

        def body(b, state):
            w, y, o, *acc = state
            prefetch(b, o)
            dy = columns(b, y, layout.y_d, fv)
            for part in range(parts):
                add_part(b, w, y, acc, part, dy)
            return [b.add(w, i64(layout.w_nbytes)), b.add(y, i64(layout.y_nbytes)),
                    b.add(o, i64(layout.nbytes * 32 // layout.block)), *acc]
        start = [(IR_I64, w), (IR_I64, y), (IR_I64, i64(0))] + [(fv, zero("f32", 4))] * n_acc
        acc = counted_loop_ir(b, units, start, body)[3:]
        panels.finish_ir(b, acc, [b.add(c, i64(r * LDC + B * h)) for r in range(n_rows) for h in range(n_vectors)],
                         first)
    return multiply


def _make_amx_multiply(layout, n_vectors, ldw):
    fv, parts, some = vec_ir("f32", W), layout.parts, amx.ROWS // 2
    add_sums = _make_add_sums(layout, some, 1, ldw, W)
    sums, rows, columns = range(3)                      # tile registers, as in _amx_tile

    @ir_function
    def multiply(b, w, _, y, units, c, first, next_w, stride):
        share = amx.ROWS // n_vectors                   # of the next rows, which each vector's loop prefetches
        with b.goto_entry_block():
            memory = b.alloca(ir.ArrayType(IR_I32, amx.ROWS * W))
        memory.align = amx.ROW_NBYTES
        memory = b.ptrtoint(memory, IR_I64)

        def add_part(b, w, scales, y, words, dy, acc):
            amx.zero_ir(b, sums)
            amx.load_ir(b, rows, w, i64(ldw))
            amx.load_ir(b, columns, y, i64(4 * NL))
            amx.add_bytes_ir(b, sums, rows, columns)
            amx.store_ir(b, sums, memory, i64(4 * W))
            word, at = [load_ir(b, words, fv, B)] if layout.offsets else None, memory
            for r in range(0, amx.ROWS, some):
                q = [load_ir(b, b.add(at, i64(4 * W * (r + i))), vec_ir("i32", W), 4 * W) for i in range(some)]
                own = acc[r:r + some]
                add_sums(b, b.add(scales, i64(r * ldw)), own, q, 0, [dy], word)
                acc[r:r + some] = own
                at = after_ir(b, at, own)           # converting all rows at once, LLVM would spill sums

        def add_unit(b, w, y, acc):
            dy, words = load_ir(b, b.add(y, i64(layout.y_d)), fv, B), b.add(y, i64(layout.y_word))
            if parts == 1:
                add_part(b, w, w, y, words, dy, acc)
                return acc

            def part(b, state):
                *at, acc = *state[:4], list(state[4:])
                add_part(b, *at, dy, acc)
                steps = 32 // parts, 4, 4 * NL * 8 // parts, 4 * NL
                return [b.add(x, i64(n)) for x, n in zip(at, steps, strict=True)] + acc
            start = [(x.type, x) for x in (w, w, y, words, *acc)]
            return counted_loop_ir(b, opaque_ir(b, i64(parts)), start, part)[4:]

        for h in range(n_vectors):                      # 16 rows x 16 columns
            ask = b.add(next_w, b.mul(stride, i64(share * h)))
            prefetch = panels.prefetch_rows_ir(b, ask, stride, share)

            def body(b, state, prefetch=prefetch):
                w, y, o, *acc = state
                prefetch(b, o)
                return [b.add(w, i64(layout.w_nbytes)), b.add(y, i64(layout.y_nbytes)),
                        b.add(o, i64(layout.nbytes * 32 // layout.block)), *add_unit(b, w, y, acc)]
            start = [(IR_I64, w), (IR_I64, b.add(y, i64(B * h))), (IR_I64, i64(0))]
            acc = counted_loop_ir(b, units, start + [(fv, zero("f32", W))] * amx.ROWS, body)[3:]
            panels.finish_ir(b, acc, [b.add(c, i64(r * LDC + B * h)) for r in range(amx.ROWS)], first)
    return multiply


def _pair_steps(layout):
    """How many pair sums of a part fit into 16 bits: 1, 2, 4 or 8."""
    steps = 8 // layout.parts
    while 2 * steps * layout.blocks.max_code * 127 > 32767:
        steps //= 2
    return steps


def code_tile(type, n=NL):
    """The integer tile of a type for products of n columns, or None where the instruction set has none for it."""
    blocks, spread = traits_of(type).tile, panels.spread_of(n) if isa.ISA == "avx512" else 1
    if blocks is None or not (isa.X86_LEVEL or neon.HAS_SDOT):
        return None
    if isa.ISA == "avx2" and (blocks.signed or blocks.max_code > 63):
        return None
    if choices.by_amx(type, n):
        return _amx_tile(blocks)
    spread = min(spread, 4 if blocks.halves else 8)
    return _code_tile(blocks, spread, spread > 1 and n < W)


@functools.cache
def _amx_tile(blocks):
    layout = UnitLayout(blocks, signed=True)
    ldw = KC // 32 * layout.w_nbytes + 64
    quads = 8 // layout.parts
    enter, leave = amx.using((amx.ROWS, 4 * W), (amx.ROWS, 4 * quads), (quads, 4 * W))
    return Tile(unit=32, y_nbytes=layout.y_nbytes, w_nbytes=layout.w_nbytes, kc=KC, pack_y=_make_pack_y(layout),
                pack_w=_make_pack_w(layout), rounds=True, pad=32, enter=enter, leave=leave, name="-amx",
                multiply={h: (amx.ROWS, _make_amx_multiply(layout, h, ldw)) for h in (1, 2)})


@functools.cache
def _code_tile(blocks, spread, only):
    """spread, only: of the last vector and whether it is the only one (Tail)."""
    layout = UnitLayout(blocks)
    ldw = KC // 32 * layout.w_nbytes + 64
    make, shapes = {"avx512": (_make_vnni_multiply, {1: 12, 2: 6}), "avx2": (_make_pairs_multiply, {1: 6, 2: 6}),
                    "neon": (_make_neon_multiply, {1: 8, 2: 4})}[isa.ISA]
    tail = None if spread == 1 else Tail(
        spread, only, 12, _make_pack_y(layout, spread), make(layout, 12, 1, ldw, spread, only))
    return Tile(unit=32, y_nbytes=layout.y_nbytes, w_nbytes=layout.w_nbytes, kc=KC, pack_y=_make_pack_y(layout),
                pack_w=_make_pack_w(layout), rounds=True, pad=32,
                multiply={h: (r, make(layout, r, h, ldw)) for h, r in shapes.items()}, tail=tail)
