"""The body of conv_2d_direct for few output pixels and many taps, as in the gradient of a kernel.

    8 pictures of a channel, padded       the kernel, packed by groups of W output channels
                                          one line per tap
        . . . . . .
        . a b c d .                       k  | w w w w |  W
        . e f g h .                       |  | w w w w |         tile [8, W] += x (outer) w, tap by tap, in registers
        . . . . . .                       v  | w w w w |

Lanes are output channels.  The 8 rows of a tile are output pixels of these pictures, each a constant distance from the
first, so nothing is unfolded.  Sums are formed in the order of conv_tile.py (channel, ky, kx), from zero, so the bits
are the same.
"""
from ggjit.ops.core.record import OK, WORD
from ggjit.ops.native.jit import inline, ir_function
from ggjit.ops.native.lanes import for_ir, i64
from ggjit.ops.native.mem import IR_F32, IR_I64, ld_f32, st_f32, st_i64, zero_bytes
from ggjit.ops.native.node import DST, SRC0, SRC1, addr, barrier, nb, ne, next_rows, work
from ggjit.ops.native.row_loops import param
from ggjit.ops.native.simd import B, W, fma_ir, ldf, load_ir, offset_ir, splat_ir, stf, store_ir, vec_ir

R = 8                                   # rows of a tile
N_PICTURES = 8                          # pictures of a unit of work
N_TAPS = 256                            # packed lines that stay in the first-level cache while tiles run over them


@ir_function
def accumulate(b, tile, x, weights, distances, nc, ny, nx, step_c, step_y, step_x):
    """tile[R][W] += sum over c, y, x of the floats at x + distances[R] + c step_c + y step_y + x step_x, each times
    weights[c, y, x][W]; steps and distances in bytes."""
    v = vec_ir("f32", W)
    away = [load_ir(b, offset_ir(b, distances, 8 * j), IR_I64) for j in range(R)]

    def tap(b, values):
        at, w, *sums = values
        lanes = load_ir(b, w, v)
        sums = [fma_ir(b, splat_ir(b, load_ir(b, b.add(at, d), IR_F32), W), lanes, s)
                for d, s in zip(away, sums, strict=True)]
        return [b.add(at, step_x), offset_ir(b, w, B), *sums]

    def loop(count, step, body):
        def run(b, values):
            out = for_ir(b, count, [(value.type, value) for value in values], body)
            return [b.add(values[0], step), *out[1:]]
        return run
    sums = [load_ir(b, offset_ir(b, tile, B * j), v) for j in range(R)]
    out = loop(nc, i64(0), loop(ny, step_c, loop(nx, step_y, tap)))(b, [x, weights, *sums])
    for j in range(R):
        store_ir(b, out[2 + j], b.add(tile, i64(B * j)))


@inline
def span(out, step, taps, dilation):
    """How many inputs lie between the first and the last that one output reads, both included."""
    return (out - 1) * step + (taps - 1) * dilation + 1


@inline
def channels_at_once(n_taps):
    """Channels whose packed lines stay in the cache together."""
    return max(1, N_TAPS // n_taps)


@inline
def _pack(a, group, c, to):
    """Channel c of W output channels of the kernel: one line of weights a tap, zeros beyond the last one."""
    tx, ty, n = ne(a, 0), ne(a, 1), min(W, ne(a, 3) - group * W)
    if n < W:
        zero_bytes(to, B * tx * ty)
    for y in range(ty):
        for j in range(n):
            w, at = addr(a) + y * nb(a, 1) + c * nb(a, 2) + (group * W + j) * nb(a, 3), to + y * tx * B + 4 * j
            for x in range(tx):
                st_f32(at + x * B, ld_f32(w + x * nb(a, 0)))


@inline
def _place(b, c, n, to, nx, ny, px, py):
    """Channel c of picture n into nx x ny zeros that begin at its (-px, -py)."""
    first, step = min(px, nx), nb(b, 0)
    end = max(first, min(nx, px + ne(b, 0)))
    for y in range(min(py, ny), max(min(py, ny), min(ny, py + ne(b, 1)))):
        line, x = to + 4 * y * nx, addr(b) + (y - py) * nb(b, 1) + c * nb(b, 2) + n * nb(b, 3) + (first - px) * step
        i = first
        if step == 4:
            while i + W <= end:
                stf(line + 4 * i, ldf(x + 4 * (i - first)))
                i += W
        while i < end:
            st_f32(line + 4 * i, ld_f32(x + (i - first) * step))
            i += 1


@inline
def _deliver(d, tiles, n_rows, first, n, group, end):
    """Tiles of groups group ... end - 1 to where they belong: pictures first ... first + n - 1."""
    pixels = ne(d, 0) * ne(d, 1)
    for m in range(n):
        for g in range(group, end):
            to = addr(d) + (first + m) * nb(d, 3) + g * W * nb(d, 2)
            for j in range(min(W, ne(d, 2) - g * W)):
                tile = tiles + ((g - group) * n_rows + m * pixels) * B + 4 * j
                for q in range(pixels):
                    st_f32(to + 4 * q, ld_f32(tile + q * B))
                to += nb(d, 2)


def make_kernel():
    """Kernel of float32 a, b and d."""
    @inline
    def distances(d, to, n_rows, nx, ny, step_x, step_y):
        """Bytes from the first output pixel's input to that of each row."""
        pixels = ne(d, 0) * ne(d, 1)
        for r in range(n_rows):
            m = r // pixels
            y = (r - m * pixels) // ne(d, 0)
            x = r - m * pixels - y * ne(d, 0)
            st_i64(to + 8 * r, 4 * ((m * ny + y * step_y) * nx + x * step_x) if m < N_PICTURES else 0)

    def kernel(node, ith, nth, sync):
        a, b, d = node + SRC0, node + SRC1, node + DST
        tx, ty, channels, pictures, pixels = ne(a, 0), ne(a, 1), ne(a, 2), ne(b, 3), ne(d, 0) * ne(d, 1)
        dx, dy = param(node, 4), param(node, 5)
        nx, ny = span(ne(d, 0), param(node, 0), tx, dx), span(ne(d, 1), param(node, 1), ty, dy)
        groups, blocks = (ne(d, 2) + W - 1) // W, (pictures + N_PICTURES - 1) // N_PICTURES
        n_rows = (N_PICTURES * pixels + R - 1) // R * R
        parts = max(1, min(groups, 2 * nth * (nth > 1) // max(1, blocks)))
        most = (groups + parts - 1) // parts
        plane, rows, at_once = 4 * nx * ny, max(1, N_TAPS // tx), channels_at_once(tx * ty)
        weights = work(node)
        away = weights + groups * channels * tx * ty * B + ith * (
            8 * n_rows + most * n_rows * B + N_PICTURES * at_once * plane)
        tiles, planes = away + 8 * n_rows, away + 8 * n_rows + most * n_rows * B
        for phase in range(2):                                  # 0: pack the kernel, 1: multiply
            units = groups * channels if phase == 0 else blocks * parts
            while True:
                u = next_rows(node + WORD * phase, ith, nth, sync, 1, units)
                if u >= units:
                    break
                if phase == 0:
                    _pack(a, u // channels, u % channels, weights + u * tx * ty * B)
                    continue
                part, first = u % parts, u // parts * N_PICTURES
                n, group, end = min(N_PICTURES, pictures - first), groups * part // parts, groups * (part + 1) // parts
                distances(d, away, n_rows, nx, ny, param(node, 0), param(node, 1))
                zero_bytes(tiles, most * n_rows * B)
                zero_bytes(planes, N_PICTURES * at_once * plane)
                for c in range(0, channels, at_once):
                    nc = min(at_once, channels - c)
                    for i in range(nc):
                        for m in range(n):
                            _place(b, c + i, first + m, planes + (i * N_PICTURES + m) * plane, nx, ny, param(node, 2),
                                   param(node, 3))
                    for y in range(0, ty, rows):
                        for g in range(group, end):
                            w = weights + ((g * channels + c) * ty + y) * tx * B
                            for r in range(0, n * pixels, R):
                                accumulate(tiles + ((g - group) * n_rows + r) * B, planes + 4 * y * dy * nx, w,
                                           away + 8 * r, nc, min(rows, ty - y), tx, N_PICTURES * plane, 4 * dy * nx,
                                           4 * dx)
                _deliver(d, tiles, n_rows, first, n, group, end)
            if phase == 0:
                barrier(sync, nth)
        return OK
    return kernel


def work_nbytes(n_threads, n_taps, channels, out, n_pixels, inputs):
    """Scratch: taps of a channel, channels in and out, output pixels and inputs they see of one picture."""
    groups, n_rows = -(-out // W), -(-N_PICTURES * n_pixels // R) * R
    planes = 4 * N_PICTURES * inputs * max(1, N_TAPS // n_taps)
    return groups * channels * n_taps * B + n_threads * (8 * n_rows + groups * n_rows * B + planes)


def cost(taps, pixels, out):
    """Nanoseconds on one thread: 100 GFLOP/s of whole groups."""
    return pixels * taps * (-(-out // W) * W / 50)
