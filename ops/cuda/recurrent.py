"""Recurrent layers (ops/recurrent): ssm_conv, ssm_scan, rwkv_wkv6, gated_linear_attn, rwkv_wkv7, gated_delta_net and
DeepSeek V4's hyper-connections.

    state of a head     rows (or columns) that do not depend on each other: a thread takes one through all tokens
                        and keeps it in the result, where the state after the last token belongs
"""
from numpy import float32 as f32

from ggjit.ops.core.record import OP
from ggjit.ops.core.types import F32
from ggjit.ops.cuda.compiler.core import device, exp, ld_f32, ld_i32, local, log1p, sqrt, st_f32
from ggjit.ops.cuda.each import at, each_element, each_unit
from ggjit.ops.cuda.native.sums import LOWEST
from ggjit.ops.cuda.native.views import (
    DST,
    SRC0,
    SRC1,
    SRC2,
    SRC3,
    SRC4,
    SRC5,
    SRC6,
    addr,
    bad_index,
    nb,
    ne,
    param_f32,
    param_i32,
)

ZERO, ONE = f32(0), f32(1)


@device
def ssm_conv(node, i0, i1, i2, i3):
    x, c, s = node + SRC0, node + SRC1, ZERO
    for j in range(ne(c, 0)):
        s += ld_f32(at(x, i1 + j, i0, i2, 0)) * ld_f32(at(c, j, i0, 0, 0))
    st_f32(at(node + DST, i0, i1, i2, i3), s)


# ---------------------------------------------------------------- one step of a row of state
@device
def first_state(new, old, n, n_t, n_keep, stride):
    """The row before the first of n_t tokens; snapshots from before it are zero."""
    for k in range(max(1, n_t), n_keep):
        for i in range(n):
            st_f32(new + k * stride + 4 * i, ZERO)
    for i in range(n):
        st_f32(new + 4 * i, ld_f32(old + 4 * i))


@device
def keep(new, n, back, n_keep, stride):
    """Copy the row to the snapshot of `back` tokens before the last one, where it is kept."""
    if back > 0 and back < n_keep:
        for i in range(n):
            st_f32(new + back * stride + 4 * i, ld_f32(new + 4 * i))


# ---------------------------------------------------------------- ssm_scan
@device
def scan_rows(node):
    x = node + SRC1
    return ne(x, 0) * ne(x, 1) * ne(x, 3)


@device
def scan_row(node, u):
    """All tokens of row u of the state: of element i of head h of sequence i3."""
    s, x, dt, a, b, c = node + SRC0, node + SRC1, node + SRC2, node + SRC3, node + SRC4, node + SRC5
    n, dim, heads, n_t, n_s = ne(s, 0), ne(x, 0), ne(x, 1), ne(x, 2), ne(x, 3)
    i, q = u % dim, u // dim
    h, i3 = q % heads, q // heads
    id = ld_i32(addr(node + SRC6) + i3 * nb(node + SRC6, 0))
    if id < 0 or id >= ne(s, 3):
        bad_index(node, id)
        return
    group, n_keep, stride = h // (heads // ne(b, 1)), param_i32(node, 0), 4 * n * dim * heads * n_s
    each = ne(a, 0) > 1
    new = addr(node + DST) + 4 * dim * heads * n_t * n_s + 4 * n * (dim * q + i)
    first_state(new, at(s, 0, i, h, id), n, n_t, n_keep, stride)
    for t in range(n_t):
        step = ld_f32(at(dt, h, t, i3, 0))
        if step <= f32(20):
            step = log1p(exp(step))
        v, y = ld_f32(at(x, i, h, t, i3)) * step, ZERO
        decay = exp(step * ld_f32(at(a, 0, h, 0, 0)))
        for j in range(n):
            if each:
                decay = exp(step * ld_f32(at(a, j, h, 0, 0)))
            state = ld_f32(new + 4 * j) * decay + v * ld_f32(at(b, j, group, t, i3))
            st_f32(new + 4 * j, state)
            y += state * ld_f32(at(c, j, group, t, i3))
        st_f32(addr(node + DST) + 4 * (i + dim * (h + heads * (t + n_t * i3))), y)
        keep(new, n, n_t - 1 - t, n_keep, stride)


# ---------------------------------------------------------------- wkv6, gla, wkv7
def _wkv(op):
    """(body, count): columns of the state of a head in wkv6 and gla, rows in wkv7."""
    last = {OP.RWKV_WKV6: SRC5, OP.GATED_LINEAR_ATTN: SRC4, OP.RWKV_WKV7: SRC6}[op]
    step = _wkv7 if op == OP.RWKV_WKV7 else _wkv6_or_gla(op == OP.RWKV_WKV6)
    stride, unit = (4, 0) if op == OP.RWKV_WKV7 else (0, 4)         # bytes between elements; 0: a row's

    @device
    def count(node):
        return ne(node + SRC0, 0) * ne(node + SRC0, 1) * ne(node + last, 1)

    @device
    def body(node, u):
        size, heads, n_tokens = ne(node + SRC0, 0), ne(node + SRC0, 1), ne(node + SRC0, 2)
        per = n_tokens // ne(node + last, 1)
        j, hs = u % size, u // size
        seq, row = hs // heads, 4 * size * heads
        along, across = (4, 4 * size) if unit == 0 else (4 * size, 4)
        state = 4 * size * size * hs + j * across
        new, old = addr(node + DST) + n_tokens * row + state, addr(node + last) + state
        for i in range(size):
            st_f32(new + i * along, ld_f32(old + i * along))
        for t in range(seq * per, (seq + 1) * per):
            o = t * row + 4 * size * (hs - seq * heads)
            st_f32(addr(node + DST) + o + 4 * j, step(node, new, along, size, o, 4 * size * (hs - seq * heads), j))
    return body, count


def _wkv6_or_gla(is_wkv6):
    @device
    def step(node, new, along, size, o, head, j):
        k, v, r = addr(node + SRC0) + o, ld_f32(addr(node + SRC1) + o + 4 * j), addr(node + SRC2) + o
        y = ZERO
        for i in range(size):
            s, kv = ld_f32(new + i * along), ld_f32(k + 4 * i) * v
            if is_wkv6:
                y += ld_f32(r + 4 * i) * (ld_f32(addr(node + SRC3) + head + 4 * i) * kv + s)
                s = s * ld_f32(addr(node + SRC4) + o + 4 * i) + kv
            else:
                s = s * ld_f32(addr(node + SRC3) + o + 4 * i) + kv
                y += ld_f32(r + 4 * i) * param_f32(node, 0) * s
            st_f32(new + i * along, s)
        return y
    return step


@device
def _wkv7(node, new, along, size, o, head, j):
    r, w, k, v = (addr(node + SRC0) + o, addr(node + SRC1) + o, addr(node + SRC2) + o,
                  ld_f32(addr(node + SRC3) + o + 4 * j))
    a, b, sa, y = addr(node + SRC4) + o, addr(node + SRC5) + o, ZERO, ZERO
    for i in range(size):
        sa += ld_f32(a + 4 * i) * ld_f32(new + i * along)
    for i in range(size):
        s = ld_f32(new + i * along) * ld_f32(w + 4 * i) + v * ld_f32(k + 4 * i) + sa * ld_f32(b + 4 * i)
        st_f32(new + i * along, s)
        y += s * ld_f32(r + 4 * i)
    return y


# ---------------------------------------------------------------- gated_delta_net
@device
def delta_rows(node):
    v = node + SRC2
    return ne(v, 0) * ne(v, 1) * ne(v, 3)


@device
def delta_row(node, u):
    """All tokens of row u of the state: of value j of head h of sequence i3."""
    q, k, v, g, beta = node + SRC0, node + SRC1, node + SRC2, node + SRC3, node + SRC4
    n, heads, n_t, n_s, n_keep = ne(v, 0), ne(v, 1), ne(v, 2), ne(v, 3), param_i32(node, 0)
    j, hs = u % n, u // n
    h, i3, stride, each = hs % heads, hs // heads, 4 * n * n * heads * n_s, ne(g, 0) > 1
    new = addr(node + DST) + 4 * n * heads * n_t * n_s + 4 * n * u
    first_state(new, addr(node + SRC5) + 4 * n * u, n, n_t, n_keep, stride)
    for t in range(n_t):
        decay, pulled = exp(ld_f32(at(g, 0, h, t, i3))), ZERO
        for i in range(n):
            if each:
                decay = exp(ld_f32(at(g, i, h, t, i3)))
            s = ld_f32(new + 4 * i) * decay
            st_f32(new + 4 * i, s)
            pulled += s * ld_f32(at(k, i, h % ne(k, 1), t, i3 // (n_s // ne(k, 3))))
        delta = ld_f32(at(beta, 0, h, t, i3)) * (ld_f32(at(v, j, h, t, i3)) - pulled)
        y = ZERO
        for i in range(n):
            s = ld_f32(new + 4 * i) + ld_f32(at(k, i, h % ne(k, 1), t, i3 // (n_s // ne(k, 3)))) * delta
            st_f32(new + 4 * i, s)
            y += s * ld_f32(at(q, i, h % ne(q, 1), t, i3 // (n_s // ne(q, 3))))
        st_f32(addr(node + DST) + 4 * (j + n * (h + heads * (t + n_t * i3))), y / sqrt(f32(n)))
        keep(new, n, n_t - 1 - t, n_keep, stride)


UNITS = {OP.SSM_SCAN: lambda: (scan_row, scan_rows), OP.GATED_DELTA_NET: lambda: (delta_row, delta_rows),
         **{op: lambda op=op: _wkv(op) for op in (OP.RWKV_WKV6, OP.GATED_LINEAR_ATTN, OP.RWKV_WKV7)}}


def _units(t):
    if any(s.type is not F32 for s in t.src if not s.type.name.startswith("i")):
        return None
    x = t.src[{OP.SSM_SCAN: 1, OP.GATED_DELTA_NET: 2}.get(t.op, 0)]
    n_s = x.ne[3] if t.op in (OP.SSM_SCAN, OP.GATED_DELTA_NET) else t.src[-1].ne[1]
    return each_unit(t, t.op.name.lower(), x.ne[0] * x.ne[1] * n_s, UNITS[t.op])


# ---------------------------------------------------------------- hyper-connections
HC, HC_SQUARED = 4, 16


@device
def tokens(node):
    return ne(node + SRC0, 1)


@device
def comb(node, t):
    """The 4 x 4 matrix of a token, made doubly stochastic."""
    mixes, base, eps = node + SRC0, node + SRC2, param_f32(node, 0)
    scale, m = ld_f32(at(node + SRC1, 2, 0, 0, 0)), local.array(HC_SQUARED, "float32")
    for s in range(HC):
        top, total = LOWEST, ZERO
        for d in range(HC):
            i = 8 + d + HC * s
            m[d + HC * s] = ld_f32(at(mixes, i, t, 0, 0)) * scale + ld_f32(at(base, i, 0, 0, 0))
            top = max(top, m[d + HC * s])
        for d in range(HC):
            m[d + HC * s] = exp(m[d + HC * s] - top)
            total += m[d + HC * s]
        for d in range(HC):
            m[d + HC * s] = m[d + HC * s] / total + eps
    divide(m, 1, HC, eps)
    for _ in range(param_i32(node, 1) - 1):
        divide(m, HC, 1, eps)
        divide(m, 1, HC, eps)
    for i in range(HC_SQUARED):
        st_f32(at(node + DST, i % HC, i // HC, t, 0), m[i])


@device
def divide(m, line, step, eps):
    """Divide each of four lines, `step` apart, by its sum."""
    for i in range(HC):
        total = eps
        for k in range(HC):
            total += m[i * line + k * step]
        for k in range(HC):
            m[i * line + k * step] = m[i * line + k * step] / total


@device
def pre(node, i0, t, i2, i3):
    """Element i0 of token t: the weighted or gated sum of its streams."""
    x, w, s, gated = node + SRC0, node + SRC1, ZERO, param_i32(node, 1) != 0
    for h in range(ne(x, 1)):
        v = ld_f32(at(x, i0, h, t, 0))
        if gated:
            s += v / (ONE + exp(-ld_f32(at(w, i0, h, t, 0))))
        else:
            s += v * ld_f32(at(w, h, t, 0, 0))
    st_f32(at(node + DST, i0, t, i2, i3), s * param_f32(node, 0))


def _post(mixed):
    @device
    def post(node, i0, h, t, i3):
        x, residual, share, mix = node + SRC0, node + SRC1, node + SRC2, node + SRC3
        s = ld_f32(at(x, i0, t, 0, 0)) * ld_f32(at(share, h, t, 0, 0))
        if mixed:
            for k in range(ne(residual, 1)):
                s += ld_f32(at(residual, i0, k, t, 0)) * ld_f32(at(mix, h, k, t, 0))
        else:
            s += ld_f32(at(residual, i0, h, t, 0))
        st_f32(at(node + DST, i0, h, t, i3), s)
    return post


ELEMENTS = {OP.SSM_CONV: lambda t: ssm_conv, OP.DSV4_HC_PRE: lambda t: pre,
            OP.DSV4_HC_POST: lambda t: _post(len(t.src) > 3 and t.src[3] is not None)}


def _elements(t):
    return each_element(t, t.op.name.lower(), lambda: ELEMENTS[t.op](t))


def _comb(t):
    return each_unit(t, "dsv4_hc_comb", t.ne[2], lambda: (comb, tokens))


CUDA = {**dict.fromkeys(ELEMENTS, _elements), **dict.fromkeys(UNITS, _units), OP.DSV4_HC_COMB: _comb}
