"""Ops that place elements elsewhere: acc, set, pad, pad_reflect_1d, roll, tri, diag, win_part, win_unpart, get_rel_pos,
add_rel_pos, repeat_back (ops of the same names in ops/copying, ops/attention, ops/training)."""
from numpy import float32 as f32

from ggjit.ops.core.record import OP
from ggjit.ops.cuda.compiler.core import device, ld_f32, st_f32
from ggjit.ops.cuda.copy import flat_copy
from ggjit.ops.cuda.each import at, each_element
from ggjit.ops.cuda.native.views import DST, SRC0, SRC1, SRC2, addr, ne, param_i32
from ggjit.ops.cuda.rows import MOVE, WORDS

ZERO = f32(0)


# ---------------------------------------------------------------- acc, set
def _window(adds):
    @device
    def body(node, i0, i1, i2, i3):
        d, b = node + DST, at(node + SRC1, i0, i1, i2, i3)
        to = addr(d) + param_i32(node, 3) + i1 * param_i32(node, 0) + i2 * param_i32(node, 1) \
            + i3 * param_i32(node, 2) + 4 * i0
        if adds:
            st_f32(to, ld_f32(to) + ld_f32(b))
        else:
            move(to, b)
    move = MOVE[4]
    return body


def _set(t):
    """Copy the whole of a, then write the window; in place, write the window alone."""
    adds = t.op == OP.ACC
    window = each_element(t, t.op.name.lower(), lambda: _window(adds), SRC1)
    return window if t.op_params[4] else (flat_copy(t), window)


# ---------------------------------------------------------------- elements from elsewhere
ZEROS, WRAP, REFLECT = range(3)


def _where(mode):
    """where(i, n): which of n elements stands at position i; negative: a zero."""
    if mode == ZEROS:
        return device(lambda i, n: i if i < n else -1)
    if mode == WRAP:
        return device(lambda i, n: i % n)
    return device(lambda i, n: -i if i < 0 else (i if i < n else 2 * (n - 1) - i))


def _elsewhere(op, mode, size):
    where, (load, store) = _where(mode), WORDS[size]
    step, dims = 2 if op == OP.PAD else 1, 1 if op == OP.PAD_REFLECT_1D else 4

    @device
    def source(node, i, k):
        return where(i - (param_i32(node, step * k) if k < dims else 0), ne(node + SRC0, k))

    @device
    def body(node, i0, i1, i2, i3):
        j0, j1, j2, j3 = source(node, i0, 0), source(node, i1, 1), source(node, i2, 2), source(node, i3, 3)
        x = 0
        if j0 >= 0 and j1 >= 0 and j2 >= 0 and j3 >= 0:
            x = load(at(node + SRC0, j0, j1, j2, j3))
        store(at(node + DST, i0, i1, i2, i3), x)
    return body


def _pad(t):
    mode = {OP.ROLL: WRAP, OP.PAD_REFLECT_1D: REFLECT}.get(t.op) or (WRAP if t.op_params[8] else ZEROS)
    return each_element(t, f"{t.op.name.lower()}{mode}", lambda: _elsewhere(t.op, mode, t.type.nbytes))


def _picked(op):
    """from(node, i0, i1, i2, i3): the address of what comes there, or 0 for a zero."""
    if op == OP.TRI:                            # upper with diagonal, upper, lower with diagonal, lower
        @device
        def source(node, i0, i1, i2, i3):
            kind = param_i32(node, 0)
            edge = i1 + (1 if kind == 1 or kind == 2 else 0)
            return at(node + SRC0, i0, i1, i2, i3) if (i0 >= edge) == (kind <= 1) else 0
    elif op == OP.DIAG:
        @device
        def source(node, i0, i1, i2, i3):
            return at(node + SRC0, i0, 0, i2, i3) if i0 == i1 else 0
    elif op == OP.WIN_PART:
        @device
        def source(node, i0, i1, i2, i3):
            a, nx, w = node + SRC0, param_i32(node, 0), param_i32(node, 2)
            x, y = i3 % nx * w + i1, i3 // nx * w + i2
            return at(a, i0, x, y, 0) if x < ne(a, 1) and y < ne(a, 2) else 0
    elif op == OP.WIN_UNPART:
        @device
        def source(node, i0, i1, i2, i3):
            w = param_i32(node, 0)
            nx = (ne(node + DST, 1) + w - 1) // w
            return at(node + SRC0, i0, i1 % w, i2 % w, i2 // w * nx + i1 // w)
    else:
        @device
        def source(node, i0, i1, i2, i3):
            return at(node + SRC0, i0, ne(node + DST, 1) - 1 - i1 + i2, 0, 0)
    return source


def _make_picked(op, size):
    source, (load, store) = _picked(op), WORDS[size]

    @device
    def body(node, i0, i1, i2, i3):
        p, x = source(node, i0, i1, i2, i3), 0
        if p != 0:
            x = load(p)
        store(at(node + DST, i0, i1, i2, i3), x)
    return body


def _pick(t):
    return each_element(t, t.op.name.lower(), lambda: _make_picked(t.op, t.type.nbytes))


# ---------------------------------------------------------------- sums
@device
def add_rel_pos(node, i0, i1, i2, i3):
    pw, ph = node + SRC1, node + SRC2
    n, q1 = ne(pw, 0), ne(pw, 1)
    y = i0 // n
    bias = ld_f32(at(ph, y, i1 % q1, i1 // q1, i2)) + ld_f32(at(pw, i0 - y * n, i1 % q1, i1 // q1, i2))
    st_f32(at(node + DST, i0, i1, i2, i3), ld_f32(at(node + SRC0, i0, i1, i2, i3)) + bias)


@device
def repeat_back(node, i0, i1, i2, i3):
    a, d, s = node + SRC0, node + DST, ZERO
    for j3 in range(i3, ne(a, 3), ne(d, 3)):
        for j2 in range(i2, ne(a, 2), ne(d, 2)):
            for j1 in range(i1, ne(a, 1), ne(d, 1)):
                for j0 in range(i0, ne(a, 0), ne(d, 0)):
                    s += ld_f32(at(a, j0, j1, j2, j3))
    st_f32(at(d, i0, i1, i2, i3), s)


def _sum(t):
    if t.op == OP.REPEAT_BACK and len(t.src) > 1:
        return None
    body = add_rel_pos if t.op == OP.ADD_REL_POS else repeat_back
    return each_element(t, t.op.name.lower(), lambda: body)


CUDA = {OP.ACC: _set, OP.SET: _set, OP.PAD: _pad, OP.PAD_REFLECT_1D: _pad, OP.ROLL: _pad, OP.TRI: _pick,
        OP.DIAG: _pick, OP.WIN_PART: _pick, OP.WIN_UNPART: _pick, OP.GET_REL_POS: _pick, OP.ADD_REL_POS: _sum,
        OP.REPEAT_BACK: _sum}
