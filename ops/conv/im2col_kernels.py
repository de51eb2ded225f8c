"""The kernels of im2col, im2col_3d and im2col_back (ops/conv/im2col.py)."""
from numba import types

from ggjit.ops.core.record import OK
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mem import ld_f32, st_f32
from ggjit.ops.native.node import DST, SRC0, SRC1, nb, ne, row_addr, row_index
from ggjit.ops.native.row_loops import over_rows, param
from ggjit.ops.native.simd import W, zerof
from ggjit.ops.types.shared.rows import ROW

f32 = types.float32


def make_unfold(dims, tb, td):
    """Kernel: row r of the result is the patch under output pixel r; `dims` of the data, tb -> td."""
    get, load, load_part = ROW[tb].get, ROW[tb].load, ROW[tb].load_part
    put, store, store_part = ROW[td].put, ROW[td].store, ROW[td].store_part
    sb, sd = tb.nbytes, td.nbytes

    @inline
    def zeros(to, n):
        for i in range(n):
            put(to + i * sd, f32(0.0))

    @inline
    def run(to, x, step, n):
        """n elements, `step` bytes apart, side by side."""
        i = 0
        if step == sb:
            while i + W <= n:
                store(to + i * sd, load(x + i * sb))
                i += W
        while i < n:
            put(to + i * sd, get(x + i * step))
            i += 1

    @inline
    def one(node, r):
        a, b, d = node + SRC0, node + SRC1, node + DST
        ox, i2, i3 = row_index(d, r)
        to, kw, w, h, depth, kh, kd = row_addr(d, ox, i2, i3), ne(a, 0), ne(b, 0), 1, 1, 1, 1
        if dims == 1:
            channels, x0, y0, z0 = ne(a, 1), ox * param(node, 0) - param(node, 2), 0, 0
            step, dy, dz = param(node, 4), 1, 1
            plane, to_c, to_y, to_z = row_addr(b, 0, i2, 0), nb(b, 1), 0, 0
        elif dims == 2:
            x0, y0, z0 = ox * param(node, 0) - param(node, 2), i2 * param(node, 1) - param(node, 3), 0
            channels, step, dy, dz, h, kh = ne(a, 2), param(node, 4), param(node, 5), 1, ne(b, 1), ne(a, 1)
            plane, to_c, to_y, to_z = row_addr(b, 0, 0, i3), nb(b, 2), nb(b, 1), 0
        else:
            channels = param(node, 9)
            n = i3 // (ne(d, 3) // (ne(b, 3) // channels))
            oz = i3 - n * (ne(d, 3) // (ne(b, 3) // channels))
            x0, y0 = ox * param(node, 0) - param(node, 3), i2 * param(node, 1) - param(node, 4)
            z0, step, dy, dz = oz * param(node, 2) - param(node, 5), param(node, 6), param(node, 7), param(node, 8)
            h, depth, kh, kd = ne(b, 1), ne(b, 2), ne(a, 1), ne(a, 2)
            plane, to_c, to_y, to_z = row_addr(b, 0, 0, n * channels), nb(b, 3), nb(b, 1), nb(b, 2)
        first = min(kw, (step - 1 - x0) // step if x0 < 0 else 0)
        end = max(first, min(kw, (w - 1 - x0) // step + 1 if x0 < w else 0))
        quick = kw <= W and step * nb(b, 0) == sb
        left = channels * kd * kh * kw
        for c in range(channels):
            for kz in range(kd):
                z = z0 + kz * dz
                for ky in range(kh):
                    y = y0 + ky * dy
                    outside = y < 0 or y >= h or z < 0 or z >= depth
                    x = plane + c * to_c + z * to_z + y * to_y + (x0 + first * step) * nb(b, 0)
                    if quick:                                   # a few taps: vectors, whose excess is overwritten
                        v = zerof() if outside else load_part(x, end - first)
                        if first:
                            store_part(to, zerof(), kw)
                        if left >= W + first:
                            store(to + first * sd, v)
                        else:
                            store_part(to + first * sd, v, kw - first)
                    elif outside:
                        zeros(to, kw)
                    else:
                        zeros(to, first)
                        run(to + first * sd, x, step * nb(b, 0), end - first)
                        zeros(to + end * sd, kw - end)
                    to += kw * sd
                    left -= kw
        return OK
    return over_rows(one)


@inline
def _planes(node):
    """Channels times pictures: dimensions 2 and 3, or 1 and 2 in 1-D."""
    d = node + DST
    return ne(d, 2) * (ne(d, 3) if param(node, 6) else ne(d, 1))


@inline
def _fold(node, r):
    """Plane r of the data: every patch that reaches into it is added, in the order of the outputs."""
    g, k, d = node + SRC0, node + SRC1, node + DST
    flat = param(node, 6) == 0
    channels = ne(d, 1) if flat else ne(d, 2)
    c, n = r % channels, r // channels
    w, h, kw, kh = ne(d, 0), 1 if flat else ne(d, 1), ne(k, 0), 1 if flat else ne(k, 1)
    to = row_addr(d, c, n, 0) if flat else row_addr(d, 0, c, n)
    for i in range(w * h):
        st_f32(to + 4 * i, f32(0.0))
    for oy in range(1 if flat else ne(g, 2)):
        y0 = 0 if flat else oy * param(node, 1) - param(node, 3)
        for ox in range(ne(g, 1)):
            x0 = ox * param(node, 0) - param(node, 2)
            patch = (row_addr(g, ox, n, 0) if flat else row_addr(g, ox, oy, n)) + c * kh * kw * nb(g, 0)
            for ky in range(kh):
                y = y0 + ky * param(node, 5)
                if y < 0 or y >= h:
                    continue
                for kx in range(kw):
                    x = x0 + kx * param(node, 4)
                    if 0 <= x < w:
                        at = to + 4 * (y * w + x)
                        st_f32(at, ld_f32(at) + ld_f32(patch + (ky * kw + kx) * nb(g, 0)))
    return OK


def make_fold():
    """Kernel of im2col_back."""
    return over_rows(_fold, _planes)
