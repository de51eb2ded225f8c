"""Both products of a gated unit and the unit as one kernel: d[r] = act(gate[r] . x) (up[r] . x), x of one column.

    block       ROWS rows of the result; a warp takes one of them, of both matrices, at a time
    quantised   the block first makes 8-bit codes of the column for itself, in shared memory: no launch has to leave
                them, while the first weights are on their way
    lanes       units of 32 values with dp4a, or 16 bytes of float weights (mul_mat_vec.py)

`coded`: the 8-bit codes of the result, too (ops/cuda/matmul/with_codes.py): ROWS of them are a block of codes.
"""
from dataclasses import replace

from numpy import float32 as f32

from ggjit.ops.core.fusion_pattern import FusedKernel, Fusion
from ggjit.ops.core.record import GLU, OP
from ggjit.ops.core.shape import is_contiguous
from ggjit.ops.core.types import F32
from ggjit.ops.cuda import quantize_columns
from ggjit.ops.cuda.blocks import BLOCKS
from ggjit.ops.cuda.compiler import core
from ggjit.ops.cuda.compiler.choice import WALKS
from ggjit.ops.cuda.glu import GATES
from ggjit.ops.cuda.matmul.mul_mat_vec import is_wide, make_unit, piece_of
from ggjit.ops.cuda.native.launch import SMALL_BLOCKS, Launch, node_kernel, of_module
from ggjit.ops.cuda.native.views import DST, SRC0, SRC1, SRC2, addr, nb, ne, param_f32, work
from ggjit.ops.cuda.rows import FLOATS

ROWS, WARPS, LINE = 32, 2 if SMALL_BLOCKS else 16, 128
CODES_STEP, MOST_CODES = 1024, 16384           # shared memory is set aside for a column in such steps
ONE_BLOCK, TWO_BLOCKS = 128, 64                # most registers of a thread, for so many blocks of a multiprocessor
HUNGRY = "f32 q4_1 q5_1 q6_K tq2_0 iq2_xxs iq2_s iq3_xxs iq3_s".split()         # types that would spill with few
ZERO = f32(0)


# ---------------------------------------------------------------- the column
@core.device
def code(x, d):
    return core.to_i32(core.round_away(x / d)) & 255 if d > ZERO else 0


@core.device
def quantise(x, k, codes, scales):
    """The codes of a column in shared memory, the values of quantize_columns.py: a lane has four of them."""
    lane, first = core.thread() & 31, 128 * (core.thread() >> 5)
    while first < k:
        i = first + 4 * lane
        v0, v1, v2, v3 = core.ld_f32x4(x + 4 * min(i, k - 4))
        most = max(max(core.fabs(v0), core.fabs(v1)), max(core.fabs(v2), core.fabs(v3)))
        most = max(most, core.shfl_xor(most, 1))
        most = max(most, core.shfl_xor(most, 2))
        d = max(most, core.shfl_xor(most, 4)) / quantize_columns.STEPS
        if i < k:
            core.sts_i32(codes + i, code(v0, d) | code(v1, d) << 8 | code(v2, d) << 16 | code(v3, d) << 24)
            if i & 31 == 0:
                core.sts_f32(scales + (i >> 3), d)
        first += 4 * core.n_threads()


@core.device
def fetch(view, row):
    """Ask for the weights of the block's rows."""
    at, end = addr(view) + row * nb(view, 1), addr(view) + min(row + ROWS, ne(view, 1)) * nb(view, 1)
    at += LINE * core.thread()
    while at < end:
        core.prefetch(at)
        at += LINE * core.n_threads()


def _quantized_dots(type):
    """dots(p, q, x, scales, k): this lane's parts of two rows' products with the column's codes."""
    words, units, nbytes = BLOCKS[type].words, type.block // 32, type.nbytes
    unit = make_unit(BLOCKS[type], core.lds_i32x4, core.lds_i32, core.lds_f32)

    @core.device
    def dots(p, q, x, scales, k):
        i, s, t = core.thread() & 31, ZERO, ZERO
        while i < k >> 5:
            block = i // units
            u, at, first = i - block * units, block * nbytes, block * units * 32
            w, v = words(p + at, u), words(q + at, u)
            s += unit(p + at, u, w, x, scales, first)
            t += unit(q + at, u, v, x, scales, first)
            i += 32
        return s, t
    return dots


def _float_dots(type):
    piece, per_piece = piece_of(type), 16 // type.nbytes

    @core.device
    def dots(p, q, x, scales, k):
        i, s, t = core.thread() & 31, ZERO, ZERO
        while i < k // per_piece:
            y = x + 4 * per_piece * i
            s += piece(p + 16 * i, y)
            t += piece(q + 16 * i, y)
            i += 32
        return s, t
    return dots


# ---------------------------------------------------------------- the kernel
def _make(type, gate, most_codes, coded):
    quantized, fetches = type in BLOCKS, WALKS
    dots = _quantized_dots(type) if quantized else _float_dots(type)
    results, column = core.shared(4 * ROWS), core.shared(quantize_columns.nbytes(most_codes, 1))

    @core.device
    def row_of(view, row):
        return addr(view) + min(row, ne(view, 1) - 1) * nb(view, 1)

    @core.device
    def put(node, first, values):
        """The block's rows of the result, by its first warp."""
        d, i, lane, codes = node + DST, first + (core.thread() & 31), core.thread() & 31, work(node)
        if core.thread() < 32 and i < ne(d, 0):
            x = core.lds_f32(values + 4 * lane)
            core.st_f32(addr(d) + 4 * i, x)
            if coded:
                quantize_columns.put_code(codes + i, codes + ne(d, 0) + (i >> 5) * 4, x)

    def kernel(node):
        a, b, k, first = node + SRC0, node + SRC1, ne(node + SRC0, 0), ROWS * core.block()
        x, scales, values, lane = addr(node + SRC2), 0, results(), core.thread() & 31
        if quantized:
            if fetches:
                fetch(a, first)
                fetch(b, first)
            codes = column()
            scales = codes + most_codes
            quantise(x, k, codes, scales)
            x = codes
            core.sync()
        r = core.thread() >> 5
        while r < ROWS:
            g, u = dots(row_of(a, first + r), row_of(b, first + r), x, scales, k)
            g, u = core.warp_sum(g), core.warp_sum(u)
            if lane == 0:
                core.sts_f32(values + 4 * r, gate(g, u, param_f32(node, 0), param_f32(node, 1)))
            r += WARPS
        core.sync()
        put(node, first, values)
    return kernel


def _launches(d, type, k, coded=False):
    which, most = GLU(int(d.op_params[0])), -(-k // CODES_STEP) * CODES_STEP if type in BLOCKS else 0
    name = f"mul_mat_{which.name.lower()}_{type.name}{f'_{most}' * (most > 0)}{'_codes' * coded}"
    made = Launch(name, lambda: _make(type, GATES[which], most, coded), (-(-d.ne[0] // ROWS), 1, 1), 32 * WARPS,
                  registers=ONE_BLOCK if type.name in HUNGRY else TWO_BLOCKS)
    if coded:
        return replace(made, work_nbytes=quantize_columns.nbytes(d.ne[0], 1), leaves_result=quantize_columns.CODES),
    return replace(made, coded=lambda: _launches(d, type, k, True)),


# ---------------------------------------------------------------- what fits
def _fused(nodes, stored, kernels, n_threads):
    """FusedKernel of products with matrices of one type and size, and of the node that reads both of them."""
    one, other, d = nodes
    gate, up = (one, other) if d.src[0].id == one.id else (other, one)
    (a, x), (b, y) = gate.src[:2], up.src[:2]
    if stored or x.id != y.id or a.type is not b.type or a.ne != b.ne or d.src[0].id == d.src[1].id:
        return None
    if not all(t.type is F32 and is_contiguous(t) and t.ne[1:] == (1, 1, 1) for t in (x, *nodes)):
        return None
    quantized = a.type in BLOCKS and x.ne[0] <= MOST_CODES and all(is_contiguous(w) for w in (a, b)) \
        and x.view_offs % 16 == 0
    floats = a.type in FLOATS and all(is_wide(w, x) for w in (a, b))
    if not quantized and not floats:
        return None
    kernel = node_kernel(of_module(_launches(d, a.type, x.ne[0]), __name__))
    return FusedKernel(kernel, (a, b, x), (*map(int, d.op_params[2:4]),))


CUDA_FUSIONS = (Fusion((OP.MUL_MAT, OP.MUL_MAT, OP.GLU), _fused, edges=((0, 2), (1, 2))),)
