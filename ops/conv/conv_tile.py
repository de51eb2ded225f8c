"""The body of the direct convolutions: blocks of output pixels, unfolded into the first-level caches, times the kernel.

    block of P = 2 W output pixels        kernel, packed by groups of G output channels
    unfolded: one line per tap k          one line per tap

        k  | x x x ... x |  P             k | w w w w |  G
        |  | x x x ... x |                | | w w w w |          tile [G, P] += w (outer) x, tap by tap, in registers
        v  | x x x ... x |                v | w w w w |

Lanes are pixels, so the sums need no folding at the end and any number of taps is served well.  A thread unfolds its
block once and runs through all groups.  What differs between the ops is where things lie, and that is a record:

    for output pixel o and tap t of a dimension:  input = o * STEP + FIRST + t * TAP_STEP, zero outside 0 ... SIZE - 1

A transposed convolution of stride s is s convolutions a dimension, one per residue r of the output index: outputs
r, r + s ..., taps r, r + s ... of the kernel, TAP_STEP = -1.  These are the record's *classes*; others have one.
"""
from llvmlite import ir

from ggjit.ops.core.record import OK, WORD
from ggjit.ops.native.jit import inline, ir_function
from ggjit.ops.native.lanes import for_ir, i64
from ggjit.ops.native.mem import IR_F32, ld_f32, ld_i64, st_f32, st_i64, zero_bytes
from ggjit.ops.native.node import LINE, barrier, next_rows, work
from ggjit.ops.native.simd import (
    B,
    W,
    fma_ir,
    ldf,
    load_ir,
    offset_ir,
    splat_ir,
    stf,
    stf_part,
    store_ir,
    vec_ir,
    zerof,
)
from ggjit.ops.types.shared.rows import ROW

P = 2 * W                               # pixels of a block
G = 8 if W == 16 else 4                 # output channels of a group: G * 2 accumulators in registers
RECORD_NBYTES = 64 * 8

# words of the record; where three stand together they are x, y, z
OUT, TAPS, STEP, FIRST, TAP_STEP, SIZE = 0, 3, 6, 9, 12, 15
IN_ADDR, IN_NB, IN_NB_C, IN_NB_N = 18, 19, 22, 23
KERNEL_ADDR, KERNEL_NB, KERNEL_NB_C, KERNEL_NB_OC = 24, 25, 28, 29
OUT_ADDR, OUT_NB, OUT_NB_OC, OUT_NB_N = 30, 31, 34, 35
N_IN, N_OUT, N_BATCH = 36, 37, 38       # channels in and out, pictures


@inline
def get(g, word):
    return ld_i64(g + 8 * word)


@inline
def _put(g, word, values):
    for i in range(len(values)):
        st_i64(g + 8 * (word + i), values[i])


@inline
def write_record(g, out, taps, step, first, tap_step, size, data, kernel, result, counts):
    """The record of one class at address g.

    out ... size        (x, y, z) each, see above
    data, kernel        (address, byte strides of x, y, z, of an input channel, of a picture or output channel)
    result              (address, byte strides of x, y, z, of an output channel, of a picture)
    counts              (channels in, channels out, pictures)
    """
    _put(g, OUT, out)
    _put(g, TAPS, taps)
    if counts[0] == 0:                          # no input under any tap: nothing to add
        _put(g, TAPS, (1, 1, 1))
    _put(g, STEP, step)
    _put(g, FIRST, first)
    _put(g, TAP_STEP, tap_step)
    _put(g, SIZE, size)
    _put(g, IN_ADDR, data)
    _put(g, KERNEL_ADDR, kernel)
    _put(g, OUT_ADDR, result)
    _put(g, N_IN, counts)


@inline
def n_taps(g):
    return get(g, TAPS) * get(g, TAPS + 1) * get(g, TAPS + 2) * get(g, N_IN)


@inline
def n_pixels(g):
    return get(g, OUT) * get(g, OUT + 1) * get(g, OUT + 2)


@ir_function
def multiply(b, tile, patch, weights, k):
    """tile[G][P] = sum over k of weights[k][G] (outer) patch[k][P]; addresses of float32."""
    v = vec_ir("f32", W)

    def body(b, values):
        x, w = values[:2]
        lanes = [load_ir(b, offset_ir(b, x, B * i), v) for i in range(2)]
        sums = []
        for j in range(G):
            one = splat_ir(b, load_ir(b, offset_ir(b, w, 4 * j), IR_F32), W)
            sums += [fma_ir(b, one, lanes[i], values[2 + 2 * j + i]) for i in range(2)]
        return [offset_ir(b, x, 4 * P), offset_ir(b, w, 4 * G), *sums]
    zero = ir.Constant(v, None)
    out = for_ir(b, k, [(patch.type, patch), (weights.type, weights), *[(v, zero)] * (2 * G)], body)
    for i, s in enumerate(out[2:]):
        store_ir(b, s, b.add(tile, i64(B * i)))


def _make_pack(ta):
    weight = ROW[ta].get

    @inline
    def pack(g, group, to):
        """Group `group` of the kernel: one line of G weights a tap, zeros beyond the last channel."""
        tx, ty, tz, n = get(g, TAPS), get(g, TAPS + 1), get(g, TAPS + 2), min(G, get(g, N_OUT) - group * G)
        nb_x, nb_y, nb_z, nb_c = get(g, KERNEL_NB), get(g, KERNEL_NB + 1), get(g, KERNEL_NB + 2), get(g, KERNEL_NB_C)
        if n < G:
            zero_bytes(to, 4 * G * n_taps(g))
        for j in range(n):
            at, channel = to + 4 * j, get(g, KERNEL_ADDR) + (group * G + j) * get(g, KERNEL_NB_OC)
            for c in range(get(g, N_IN)):
                for z in range(tz):
                    for y in range(ty):
                        w = channel + c * nb_c + z * nb_z + y * nb_y
                        for _ in range(tx):
                            st_f32(at, weight(w))
                            at += 4 * G
                            w += nb_x
    return pack


def _make_unfold(tb):
    load, load_part, pixel, nbytes = ROW[tb].load, ROW[tb].load_part, ROW[tb].get, tb.nbytes

    @inline
    def line(to, x, step, first, end, n):
        """n pixels of a tap: zeros, inputs `step` bytes apart, zeros."""
        if step == nbytes and n < W:
            if end - first < n:
                stf_part(to, zerof(), n)
            if end > first:
                stf_part(to + 4 * first, load_part(x, end - first), end - first)
            return
        if first > 0:
            zero_bytes(to, 4 * first)
        i = first
        if step == nbytes:
            while i + W <= end:
                stf(to + 4 * i, load(x + (i - first) * nbytes))
                i += W
        while i < end:
            st_f32(to + 4 * i, pixel(x + (i - first) * step))
            i += 1
        if end < n:
            zero_bytes(to + 4 * end, 4 * (n - end))

    @inline
    def unfold_run(g, to, ox, oy, oz, n, batch):
        """n pixels of one output row, from (ox, oy, oz)."""
        tx, ty, tz, channels = get(g, TAPS), get(g, TAPS + 1), get(g, TAPS + 2), get(g, N_IN)
        step, size, nb_x, nb_c = get(g, STEP), get(g, SIZE), get(g, IN_NB), get(g, IN_NB_C)
        source, next_c = get(g, IN_ADDR) + batch * get(g, IN_NB_N), 4 * P * tx * ty * tz
        for kx in range(tx):
            x0 = ox * step + get(g, FIRST) + kx * get(g, TAP_STEP)
            first = 0 if x0 >= 0 else -x0 if step == 1 else (step - 1 - x0) // step
            end = 0 if x0 >= size else size - x0 if step == 1 else (size - 1 - x0) // step + 1
            first = min(first, n)
            end = max(first, min(end, n))
            for kz in range(tz):
                z = oz * get(g, STEP + 2) + get(g, FIRST + 2) + kz * get(g, TAP_STEP + 2)
                for ky in range(ty):
                    y = oy * get(g, STEP + 1) + get(g, FIRST + 1) + ky * get(g, TAP_STEP + 1)
                    last = end if 0 <= y < get(g, SIZE + 1) and 0 <= z < get(g, SIZE + 2) else first
                    x = source + (x0 + first * step) * nb_x + y * get(g, IN_NB + 1) + z * get(g, IN_NB + 2)
                    at = to + 4 * P * ((kz * ty + ky) * tx + kx)
                    for _ in range(channels):
                        line(at, x, step * nb_x, first, last, n)
                        at += next_c
                        x += nb_c

    @inline
    def unfold(g, to, first, n, batch):
        """Pixels first ... first + n - 1, in runs that stay in one output row."""
        nx, ny = get(g, OUT), get(g, OUT + 1)
        done = 0
        while done < n:
            q = (first + done) // nx
            ox, oz = first + done - q * nx, q // ny
            run = min(n - done, nx - ox)
            unfold_run(g, to + 4 * done, ox, q - oz * ny, oz, run, batch)
            done += run
    return unfold


def _make_deliver(td):
    store_part, one, nbytes = ROW[td].store_part, ROW[td].put, td.nbytes

    @inline
    def deliver(g, tile, group, first, n, batch):
        """The tile's channels and pixels to where they belong."""
        nx, ny, nb_x = get(g, OUT), get(g, OUT + 1), get(g, OUT_NB)
        dense = nb_x == nbytes and get(g, OUT_NB + 1) == nbytes * nx and get(g, OUT_NB + 2) == nbytes * nx * ny
        for j in range(min(G, get(g, N_OUT) - group * G)):
            to = get(g, OUT_ADDR) + (group * G + j) * get(g, OUT_NB_OC) + batch * get(g, OUT_NB_N)
            if dense:
                for i in range(0, n, W):
                    store_part(to + (first + i) * nbytes, ldf(tile + 4 * (j * P + i)), min(W, n - i))
                continue
            for i in range(n):
                q = (first + i) // nx
                z = q // ny
                at = to + (first + i - q * nx) * nb_x + (q - z * ny) * get(g, OUT_NB + 1) + z * get(g, OUT_NB + 2)
                one(at, ld_f32(tile + 4 * (j * P + i)))
    return deliver


def make_kernel(describe, shape, ta, tb, td):
    """describe(node, c, g) writes the record of class c to g.

    shape(node) -> number of classes; of the largest: taps (with channels), pixels; channels out; pictures.
    """
    pack, unfold, deliver = _make_pack(ta), _make_unfold(tb), _make_deliver(td)

    def kernel(node, ith, nth, sync):
        classes, most, pixels, n_out, batches = shape(node)
        groups, blocks = (n_out + G - 1) // G, (pixels + P - 1) // P * batches
        parts = max(1, min(groups, 2 * nth * (nth > 1) // max(1, classes * blocks)))
        g = work(node) + ith * RECORD_NBYTES
        weights = work(node) + nth * RECORD_NBYTES
        tile = weights + classes * groups * most * 4 * G + ith * 4 * P * (most + G)
        patch = tile + 4 * P * G
        for phase in range(2):                                  # 0: pack the kernel, 1: multiply
            # results of neighbouring classes lie in one line: a thread takes them together
            each, together = (groups, 1) if phase == 0 else (blocks * parts, min(classes, LINE // 4))
            sets = (classes + together - 1) // together
            while True:
                s = next_rows(node + WORD * phase, ith, nth, sync, 1, sets * each)     # the phase's own counter
                if s >= sets * each:
                    break
                unit = s % each
                for c in range(s // each * together, min(classes, (s // each + 1) * together)):
                    describe(node, c, g)
                    if phase == 0:
                        pack(g, unit, weights + (c * groups + unit) * most * 4 * G)
                        continue
                    part, block, k = unit % parts, unit // parts % blocks, n_taps(g)
                    batch, first = block % get(g, N_BATCH), block // get(g, N_BATCH) * P
                    n = min(P, n_pixels(g) - first)
                    if n <= 0:
                        continue
                    unfold(g, patch, first, n, batch)
                    for group in range(groups * part // parts, groups * (part + 1) // parts):
                        multiply(tile, patch, weights + (c * groups + group) * most * 4 * G, k)
                        deliver(g, tile, group, first, n, batch)
            if phase == 0:
                barrier(sync, nth)
        return OK
    return kernel


def work_nbytes(n_threads, n_classes, taps, n_out):
    """Scratch for kernels with `taps` taps in the largest class, channels in included."""
    groups = -(-n_out // G)
    return (n_threads * (RECORD_NBYTES + 4 * P * (taps + G)) + n_classes * groups * taps * 4 * G)


def cost(taps, pixels, n_out):
    """Nanoseconds on one thread: 160 GFLOP/s, and 0.2 ns an unfolded element."""
    return pixels * taps * (n_out / 80 + 0.2)
