"""Convolutions: im2col and back, direct, by channel, transposed, col2im; pooling and its gradient (ops/conv).

One thread makes one element of the result; rows of the result are dealt to blocks.  A plain convolution whose sums are
long and planes small, which is what the gradient of a kernel is, shares each sum among the threads of a block:

    3 x 3 of 64 by 64 channels, 8 pictures of 64 x 64       36,864 sums of 32,768 products
    a thread a sum          4,096 blocks with 9 of 32 threads busy, 32,768 steps each
    a block a row of sums   12,288 blocks of 256 threads, 128 steps each, neighbours read neighbours
"""
import math

from numpy import float32 as f32

from ggjit.ops.core.record import OP
from ggjit.ops.cuda.compiler.core import block, device, ld_f32, local, n_blocks, n_threads, st_f32, thread
from ggjit.ops.cuda.each import at, each_element
from ggjit.ops.cuda.native.launch import MAX_BLOCKS, SMALL_BLOCKS, Launch, dense, over_pieces, over_rows, threads_for
from ggjit.ops.cuda.native.sums import block_sum
from ggjit.ops.cuda.native.views import DST, SRC0, SRC1, n_rows, nb, ne, param_i32, piece, row_addr, row_index
from ggjit.ops.cuda.rows import FLOATS, ONE

ZERO = f32(0)
LOWEST = f32(-3.4028234663852886e38)        # what ggml takes for the maximum of an empty window
MAX = 0                                     # GGML_OP_POOL_MAX; 1 is the average
MAX_FEW = 8                                 # pixels of a row whose sums one thread holds
FEW_TAPS = 2 if SMALL_BLOCKS else 32        # taps a pixel of the plane, from where threads share sums


# ---------------------------------------------------------------- im2col
def _make_im2col(get, put, size, flat):
    """Row (ox, oy, n) of the result: a patch, [KW, KH, IC] values of picture n."""
    def kernel(node):
        a, b, d = node + SRC0, node + SRC1, node + DST
        kw, w = ne(a, 0), ne(b, 0)
        kh, h = 1 if flat else ne(a, 1), 1 if flat else ne(b, 1)
        r = block()
        while r < n_rows(d):
            ox, i2, i3 = row_index(d, r)
            to = row_addr(d, ox, i2, i3)
            x0 = ox * param_i32(node, 0) - param_i32(node, 2)
            y0 = 0 if flat else i2 * param_i32(node, 1) - param_i32(node, 3)
            i = thread()
            while i < ne(d, 0):
                kx, rest = i % kw, i // kw
                ky, c = rest % kh, rest // kh
                x, y = x0 + kx * param_i32(node, 4), y0 + ky * param_i32(node, 5)
                v = ZERO
                if 0 <= x and x < w and 0 <= y and y < h:
                    from_ = row_addr(b, c, i2, 0) if flat else row_addr(b, y, c, i3)
                    v = get(from_ + x * nb(b, 0))
                put(to + i * size, v)
                i += n_threads()
            r += n_blocks()
    return kernel


def _im2col(t):
    b, flat = t.src[1], not t.op_params[6]
    if b.type not in FLOATS or t.type not in FLOATS or not dense(t):
        return None
    return over_rows(f"im2col_{1 if flat else 2}d_{b.type.name}_{t.type.name}",
                     lambda: _make_im2col(ONE[b.type].get, ONE[t.type].put, t.type.nbytes, flat),
                     t.ne[1] * t.ne[2] * t.ne[3], t.ne[0])


# ---------------------------------------------------------------- direct convolution
def _make_conv(get_a, get_b, put, size):
    """Blocks take planes (oc, n) of the result, or pieces of them; a thread makes a pixel."""
    def kernel(node):
        a, b, d = node + SRC0, node + SRC1, node + DST
        kw, kh, channels, w, h = ne(a, 0), ne(a, 1), ne(a, 2), ne(b, 0), ne(b, 1)
        n_pixels, n_planes = ne(d, 0) * ne(d, 1), ne(d, 2) * ne(d, 3)
        plane, next_plane, first, step = piece(n_planes)
        while plane < n_planes:
            n = plane // ne(d, 2)
            oc, i = plane - n * ne(d, 2), first
            while i < n_pixels:
                oy = i // ne(d, 0)
                ox = i - oy * ne(d, 0)
                x0, y0 = ox * param_i32(node, 0) - param_i32(node, 2), oy * param_i32(node, 1) - param_i32(node, 3)
                s = ZERO
                for c in range(channels):
                    for ky in range(kh):
                        y = y0 + ky * param_i32(node, 5)
                        if 0 <= y and y < h:
                            pa, pb = row_addr(a, ky, c, oc), row_addr(b, y, c, n)
                            for kx in range(kw):
                                x = x0 + kx * param_i32(node, 4)
                                if 0 <= x and x < w:
                                    s += get_a(pa + kx * nb(a, 0)) * get_b(pb + x * nb(b, 0))
                put(row_addr(d, oy, oc, n) + ox * size, s)
                i += step
            plane += next_plane
    return kernel


def _make_few(get_a, get_b, put, size, n_ox):
    """Blocks take rows of n_ox pixels, (oy, oc, n) of the result; threads take taps (kx, ky, c), kx fastest."""
    def kernel(node):
        a, b, d = node + SRC0, node + SRC1, node + DST
        kw, kh, w, h = ne(a, 0), ne(a, 1), ne(b, 0), ne(b, 1)
        lines, r = n_threads() // kw, block()
        while r < n_rows(d):
            oy, oc, n = row_index(d, r)
            line = thread() // kw
            kx, ky, c = thread() - line * kw, line % kh, line // kh
            sums = local.array(n_ox, "float32")
            for i in range(n_ox):
                sums[i] = ZERO
            while c < ne(a, 2):
                y = oy * param_i32(node, 1) - param_i32(node, 3) + ky * param_i32(node, 5)
                if 0 <= y and y < h:
                    v, pb = get_a(row_addr(a, ky, c, oc) + kx * nb(a, 0)), row_addr(b, y, c, n)
                    x = kx * param_i32(node, 4) - param_i32(node, 2)
                    for i in range(n_ox):
                        if 0 <= x and x < w:
                            sums[i] += v * get_b(pb + x * nb(b, 0))
                        x += param_i32(node, 0)
                kx += n_threads() - lines * kw          # the tap n_threads further on, without divisions
                ky += lines % kh
                c += lines // kh
                if kx >= kw:
                    kx -= kw
                    ky += 1
                if ky >= kh:
                    ky -= kh
                    c += 1
            for i in range(n_ox):
                s = block_sum(sums[i])
                if thread() == 0:
                    put(row_addr(d, oy, oc, n) + i * size, s)
            r += n_blocks()
    return kernel


def _conv_2d(t):
    a, b = t.src[:2]
    if not {a.type, b.type, t.type} <= set(FLOATS) or not dense(t):
        return None
    how, types = (ONE[a.type].get, ONE[b.type].get, ONE[t.type].put, t.type.nbytes), \
        f"{a.type.name}_{b.type.name}_{t.type.name}"
    n_pixels, n_taps, n_ox = t.ne[0] * t.ne[1], math.prod(a.ne[:3]), t.ne[0]
    if n_ox <= MAX_FEW and n_taps >= FEW_TAPS * n_pixels:
        rows = max(1, min(t.ne[1] * t.ne[2] * t.ne[3], MAX_BLOCKS))
        return Launch(f"conv_2d_few_{n_ox}_{types}", lambda: _make_few(*how, n_ox), (rows, 1, 1), threads_for(n_taps))
    return over_pieces(f"conv_2d_{types}", lambda: _make_conv(*how), t.ne[2] * t.ne[3], n_pixels)


# ---------------------------------------------------------------- pooling
def _make_pool(get, put):
    def kernel(node):
        a, d = node + SRC0, node + DST
        w, h, k0, k1, mode = ne(a, 0), ne(a, 1), param_i32(node, 1), param_i32(node, 2), param_i32(node, 0)
        r = block()
        while r < n_rows(d):
            oy, i2, i3 = row_index(d, r)
            y0 = oy * param_i32(node, 4) - param_i32(node, 6)
            ox = thread()
            while ox < ne(d, 0):
                x0 = ox * param_i32(node, 3) - param_i32(node, 5)
                top, total = LOWEST, ZERO
                for ky in range(max(0, -y0), min(k1, h - y0)):
                    p = row_addr(a, y0 + ky, i2, i3)
                    for kx in range(max(0, -x0), min(k0, w - x0)):
                        v = get(p + (x0 + kx) * nb(a, 0))
                        top = top if top > v else v         # a NaN counts as the last tap
                        total += v
                if mode != MAX:
                    top = total / f32(k0 * k1)
                put(row_addr(d, oy, i2, i3) + 4 * ox, top)
                ox += n_threads()
            r += n_blocks()
    return kernel


def _pool_2d(t):
    a = t.src[0]
    if a.type not in FLOATS or not dense(t):
        return None
    return over_rows(f"pool_2d_{a.type.name}", lambda: _make_pool(ONE[a.type].get, ONE[t.type].put),
                     t.ne[1] * t.ne[2] * t.ne[3], t.ne[0])


# ---------------------------------------------------------------- one element of the result, whatever it sums
@device
def inside(x, n):
    return x >= 0 and x < n


def _sums(t):
    a = t.src[0]
    b = t.src[1] if len(t.src) > 1 else a
    if not {a.type, b.type, t.type} <= set(FLOATS):
        return None
    flat = t.op == OP.IM2COL_BACK and not t.op_params[6]
    return each_element(t, f"{t.op.name.lower()}{'_1d' * flat}",
                        lambda: BODIES[t.op](ONE[a.type].get, ONE[b.type].get, ONE[t.type].put, t))


def _im2col_3d(get_a, get_b, put, t):
    @device
    def body(node, i0, ox, oy, i3):
        a, b, depth = node + SRC0, node + SRC1, ne(node + DST, 3) // (ne(node + SRC1, 3) // param_i32(node, 9))
        kx, rest = i0 % ne(a, 0), i0 // ne(a, 0)
        ky, rest = rest % ne(a, 1), rest // ne(a, 1)
        kz, c = rest % ne(a, 2), rest // ne(a, 2)
        n, oz = i3 // depth, i3 % depth
        x = ox * param_i32(node, 0) - param_i32(node, 3) + kx * param_i32(node, 6)
        y = oy * param_i32(node, 1) - param_i32(node, 4) + ky * param_i32(node, 7)
        z = oz * param_i32(node, 2) - param_i32(node, 5) + kz * param_i32(node, 8)
        v = ZERO
        if inside(x, ne(b, 0)) and inside(y, ne(b, 1)) and inside(z, ne(b, 2)):
            v = get_b(at(b, x, y, z, n * param_i32(node, 9) + c))
        put(at(node + DST, i0, ox, oy, i3), v)
    return body


def _im2col_back(get_a, get_b, put, t):
    flat = not t.op_params[6]

    @device
    def body(node, x, i1, i2, i3):
        g, k, s = node + SRC0, node + SRC1, ZERO
        y, c = (0, i1) if flat else (i1, i2)
        kw, kh = ne(k, 0), 1 if flat else ne(k, 1)
        for ky in range(kh):
            v, sy = (0, 1) if flat else (y + param_i32(node, 3) - ky * param_i32(node, 5), param_i32(node, 1))
            for kx in range(kw):
                u = x + param_i32(node, 2) - kx * param_i32(node, 4)
                ox, oy = u // param_i32(node, 0), v // sy
                if ox * param_i32(node, 0) == u and oy * sy == v and inside(ox, ne(g, 1)):
                    i0 = (c * kh + ky) * kw + kx
                    if flat:
                        s += get_a(at(g, i0, ox, i2, 0))
                    elif inside(oy, ne(g, 2)):
                        s += get_a(at(g, i0, ox, oy, i3))
        put(at(node + DST, x, i1, i2, i3), s)
    return body


def _conv_3d(get_a, get_b, put, t):
    @device
    def body(node, ox, oy, oz, i3):
        a, b, ic, oc, s = node + SRC0, node + SRC1, param_i32(node, 9), param_i32(node, 11), ZERO
        n, o = i3 // oc, i3 % oc
        x0, y0 = ox * param_i32(node, 0) - param_i32(node, 3), oy * param_i32(node, 1) - param_i32(node, 4)
        z0 = oz * param_i32(node, 2) - param_i32(node, 5)
        for c in range(ic):
            for kz in range(ne(a, 2)):
                z = z0 + kz * param_i32(node, 8)
                if inside(z, ne(b, 2)):
                    for ky in range(ne(a, 1)):
                        y = y0 + ky * param_i32(node, 7)
                        if inside(y, ne(b, 1)):
                            for kx in range(ne(a, 0)):
                                x = x0 + kx * param_i32(node, 6)
                                if inside(x, ne(b, 0)):
                                    s += get_a(at(a, kx, ky, kz, o * ic + c)) * get_b(at(b, x, y, z, n * ic + c))
        put(at(node + DST, ox, oy, oz, i3), s)
    return body


def _conv_2d_dw(get_a, get_b, put, t):
    @device
    def body(node, ox, oy, c, n):
        a, b, s = node + SRC0, node + SRC1, ZERO
        for ky in range(ne(a, 1)):
            y = oy * param_i32(node, 1) - param_i32(node, 3) + ky * param_i32(node, 5)
            if inside(y, ne(b, 1)):
                for kx in range(ne(a, 0)):
                    x = ox * param_i32(node, 0) - param_i32(node, 2) + kx * param_i32(node, 4)
                    if inside(x, ne(b, 0)):
                        s += get_a(at(a, kx, ky, 0, c)) * get_b(at(b, x, y, c, n))
        put(at(node + DST, ox, oy, c, n), s)
    return body


@device
def first_reached(o, k, s):
    """The first input i >= 0 with o - i s < k."""
    return max(0, (o - k) // s + 1)


def _conv_transpose_1d(get_a, get_b, put, t):
    @device
    def body(node, o, oc, i2, i3):
        a, b, stride, s = node + SRC0, node + SRC1, param_i32(node, 0), ZERO
        for i in range(first_reached(o, ne(a, 0), stride), min(ne(b, 0), o // stride + 1)):
            for c in range(ne(a, 2)):
                s += get_a(at(a, o - i * stride, oc, c, 0)) * get_b(at(b, i, c, 0, 0))
        put(at(node + DST, o, oc, i2, i3), s)
    return body


def _conv_transpose_2d(get_a, get_b, put, t):
    @device
    def body(node, ox, oy, oc, n):
        a, b, stride, s = node + SRC0, node + SRC1, param_i32(node, 0), ZERO
        for y in range(first_reached(oy, ne(a, 1), stride), min(ne(b, 1), oy // stride + 1)):
            for x in range(first_reached(ox, ne(a, 0), stride), min(ne(b, 0), ox // stride + 1)):
                for c in range(ne(a, 3)):
                    s += get_a(at(a, ox - x * stride, oy - y * stride, oc, c)) * get_b(at(b, x, y, c, n))
        put(at(node + DST, ox, oy, oc, n), s)
    return body


def _col2im_1d(get_a, get_b, put, t):
    @device
    def body(node, i, oc, i2, i3):
        a, stride, s = node + SRC0, param_i32(node, 0), ZERO
        k, o = ne(a, 0) // ne(node + DST, 1), i + param_i32(node, 2)
        for c in range(first_reached(o, k, stride), min(ne(a, 1), o // stride + 1)):
            s += get_a(at(a, oc * k + o - c * stride, c, 0, 0))
        put(at(node + DST, i, oc, i2, i3), s)
    return body


def _pool_1d(get_a, get_b, put, t):
    @device
    def body(node, o, i1, i2, i3):
        a, x0, k = node + SRC0, o * param_i32(node, 2) - param_i32(node, 3), param_i32(node, 1)
        first, end = max(0, x0), min(ne(a, 0), x0 + k)
        top, total = LOWEST, ZERO
        for x in range(first, end):
            v = get_a(at(a, x, i1, i2, i3))
            top = top if top > v else v
            total += v
        if param_i32(node, 0) != MAX:
            top = total / f32(end - first) if end > first else ZERO
        put(at(node + DST, o, i1, i2, i3), top)
    return body


def _pool_2d_back(get_a, get_b, put, t):
    """Each input adds up the gradients of the windows it is in, of maxima those whose first largest tap it is."""
    @device
    def is_first(a, x, y, x0, x1, y0, y1, i2, i3):
        best, u, v = LOWEST, -1, -1
        for j in range(y0, y1):
            for i in range(x0, x1):
                value = get_b(at(a, i, j, i2, i3))
                if not value <= best:           # True for a NaN too: the next tap replaces it
                    best, u, v = value, i, j
        return u == x and v == y

    @device
    def body(node, x, y, i2, i3):
        g, a, s = node + SRC0, node + SRC1, ZERO
        k0, k1, s0, s1 = param_i32(node, 1), param_i32(node, 2), param_i32(node, 3), param_i32(node, 4)
        p0, p1, is_max = param_i32(node, 5), param_i32(node, 6), param_i32(node, 0) == MAX
        for oy in range(first_reached(y + p1, k1, s1), min(ne(g, 1), (y + p1) // s1 + 1)):
            for ox in range(first_reached(x + p0, k0, s0), min(ne(g, 0), (x + p0) // s0 + 1)):
                v, x0, y0 = ld_f32(at(g, ox, oy, i2, i3)), ox * s0 - p0, oy * s1 - p1
                if not is_max:
                    s += v / f32(k0 * k1)
                elif is_first(a, x, y, max(0, x0), min(ne(a, 0), x0 + k0), max(0, y0), min(ne(a, 1), y0 + k1), i2, i3):
                    s += v
        st_f32(at(node + DST, x, y, i2, i3), s)
    return body


BODIES = {OP.IM2COL_3D: _im2col_3d, OP.IM2COL_BACK: _im2col_back, OP.CONV_3D: _conv_3d, OP.CONV_2D_DW: _conv_2d_dw,
          OP.CONV_TRANSPOSE_1D: _conv_transpose_1d, OP.CONV_TRANSPOSE_2D: _conv_transpose_2d,
          OP.COL2IM_1D: _col2im_1d, OP.POOL_1D: _pool_1d, OP.POOL_2D_BACK: _pool_2d_back}
CUDA = {OP.IM2COL: _im2col, OP.CONV_2D: _conv_2d, OP.POOL_2D: _pool_2d, **dict.fromkeys(BODIES, _sums)}
