"""im2col in 1-D and 2-D, direct convolution, pooling in 2-D (ops/conv/im2col.py, ops/conv/conv.py,
ops/conv/pooling.py).

One thread makes one element of the result; rows of the result are dealt to blocks.
"""
from numpy import float32 as f32

from ggjit.ops.core.record import OP
from ggjit.ops.cuda.compiler.core import block, n_blocks, n_threads, thread
from ggjit.ops.cuda.native.launch import dense, over_rows
from ggjit.ops.cuda.native.views import DST, SRC0, SRC1, n_rows, nb, ne, param_i32, row_addr, row_index
from ggjit.ops.cuda.rows import FLOATS, ONE

ZERO = f32(0)
LOWEST = f32(-3.4028234663852886e38)        # what ggml takes for the maximum of an empty window
MAX = 0                                     # GGML_OP_POOL_MAX; 1 is the average


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
    """Row (oy, oc, n) of the result."""
    def kernel(node):
        a, b, d = node + SRC0, node + SRC1, node + DST
        kw, kh, channels, w, h = ne(a, 0), ne(a, 1), ne(a, 2), ne(b, 0), ne(b, 1)
        r = block()
        while r < n_rows(d):
            oy, oc, n = row_index(d, r)
            y0 = oy * param_i32(node, 1) - param_i32(node, 3)
            ox = thread()
            while ox < ne(d, 0):
                x0, s = ox * param_i32(node, 0) - param_i32(node, 2), ZERO
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
                ox += n_threads()
            r += n_blocks()
    return kernel


def _conv_2d(t):
    a, b = t.src[:2]
    if not {a.type, b.type, t.type} <= set(FLOATS) or not dense(t):
        return None
    return over_rows(f"conv_2d_{a.type.name}_{b.type.name}_{t.type.name}",
                     lambda: _make_conv(ONE[a.type].get, ONE[b.type].get, ONE[t.type].put, t.type.nbytes),
                     t.ne[1] * t.ne[2] * t.ne[3], t.ne[0])


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


CUDA = {OP.IM2COL: _im2col, OP.CONV_2D: _conv_2d, OP.POOL_2D: _pool_2d}
