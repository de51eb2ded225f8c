"""mul_mat: d[j][i] = sum_k a[i][k] b[j][k], for each matrix of dimensions 2 and 3.

ggml order: a [k, m, a2, a3], b [k, n, b2, b3] -> d F32 [m, n, b2, b3]; NumPy: b @ a.swapaxes(-1, -2), with a repeated
along its two leading axes.  As in ggml, b's values are first rounded as products with a's type round them (F16 through
F16, BF16 through BF16, Q8_0 and Q4_0 through Q8_0); sums are float32.

Three families of kernels, chosen by the number of columns n:

    n <= 3 ... 48    rows of a as they lie times a few columns (mul_mat_dot; F32 by stretches of k, mul_mat_stretch);
                     n = 1 has its own tile
    more             packed panels and register tiles (mul_mat_tile); a few rows of a: mul_mat_short

A product whose a is known to be a Hadamard matrix (mul_mat_set_hint) is a fast transform instead (hadamard).
"""
import dataclasses
import math

import numpy as np

from ggjit.ops.core.builders import writes_in_c
from ggjit.ops.core.errors import ParamError, TypeMismatch
from ggjit.ops.core.record import OP
from ggjit.ops.core.row_axes import last_axis
from ggjit.ops.core.shape import describe, require, require_type
from ggjit.ops.core.spec import Case, Kernel, Spec
from ggjit.ops.core.split import MIRRORED, PARTIAL, SplitState
from ggjit.ops.core.traits import all_traits, cached_for_types, module_of, traits_of
from ggjit.ops.core.types import BF16, BY_NAME, F16, F32, Q4_0, Q8_0, Tensor
from ggjit.ops.core.user_warnings import called_by_user, warn_once
from ggjit.ops.matmul import choices, hadamard, mul_mat_dot, mul_mat_short, mul_mat_stretch, mul_mat_tile
from ggjit.ops.matmul.mul_mat_dot import DotShape
from ggjit.ops.matmul.tile_codes import code_tile
from ggjit.ops.matmul.tile_float import FLOAT_UNIT
from ggjit.ops.matmul.tile_kinds import tile_of
from ggjit.ops.native import isa
from ggjit.ops.native.simd import W

Q4_1, Q5_1, Q4_K, Q8_1, Q8_K = (BY_NAME[name] for name in ("q4_1", "q5_1", "q4_K", "q8_1", "q8_K"))
COLUMN_TYPES = (F32, F16, BF16)
WITH_MINS = (Q4_1, Q5_1)                # their partner is Q8_1
MAX_DOT_COLUMNS = {"avx512": 12, "avx2": 8, "neon": 8, "generic": 16}[isa.ISA]      # of 16-bit floats
MAX_DOT_COLUMNS_IN_PLACE = {"avx512": 6, "avx2": 6, "neon": 6, "generic": 16}[isa.ISA]     # of float32
MAX_DOT_COLUMNS_UNPACKED = 12 if isa.ISA == "avx2" else 8       # of quantised types whose tile is the float one
APART_COLUMNS = 4                       # columns of a tile that gives each column the bits it gets alone
LONG_ROW = 512                          # elements; sums of lanes take a small part of a dot of so many
L1_NBYTES = 24 << 10                    # prepared columns up to this size stay in the first-level cache
CACHED_NBYTES = 128 << 10               # weights up to this size are taken to be in the second-level cache
SHARED_PANEL_NBYTES = 4 << 20
PREC_DEFAULT, PREC_F32 = 0, 10           # GGML_PREC_*, parameter 0
HINT_NONE, HINT_SRC0_IS_HADAMARD = 0, 1  # GGML_HINT_*, parameter 1
MAX_NMSE = 5e-4                         # of ggml's own suite: the activations are rounded, the reference's are not


@cached_for_types
def weight_types():
    """Types mul_mat takes as a."""
    return tuple(t for t, (traits, _) in all_traits().items() if traits.dot is not None)


def column_types(type):
    """Types mul_mat takes as b next to weights of `type`: floats, and for quantised weights the type that ggml rounds
    b to (vec_dot_type)."""
    if not type.quantized:
        return COLUMN_TYPES
    return (*COLUMN_TYPES, Q8_K if type.block == Q8_K.block else Q8_1 if type in WITH_MINS else Q8_0)


def mul_mat(a: Tensor, b: Tensor):
    """a^T b in ggml's sense: d[j][i] = sum_k a[i][k] b[j][k].

    Shapes: a [k, m, a2, a3], b [k, n, b2, b3] with b2 % a2 == b3 % a3 == 0 -> F32 [m, n, b2, b3].
    Types: a F32, F16, BF16 or quantised with contiguous rows (not transposed); b F32, F16 or BF16, any strides; next to
    quantised a also the type that b would be rounded to, rows contiguous: Q8_K for blocks of 256, Q8_1 for Q4_1 and
    Q5_1, else Q8_0.  Blocks as gg.quantize makes them, whose largest code is 127, are used as they are.
    Errors: ShapeError, TypeMismatch.  Source: ggml_mul_mat.
    """
    require_type("mul_mat", a, weight_types(), "a")
    require_type("mul_mat", b, column_types(a.type), "b")
    if a.ne[0] > 1 and a.ne == b.ne == (a.ne[0], a.ne[0], 1, 1) and not a.op and not b.op and called_by_user():
        warn_once("square mul_mat", "mul_mat(w, x) of square matrices is NumPy's x @ w.T, also where w @ x was meant; "
                                    "the operator w @ x has NumPy's meaning")
    require(a.ne[0] == b.ne[0], "mul_mat: rows of a and b differ in length", a, b,
            remedy="both store the summed dimension first; transpose and cont one of them")
    require(a.ne[0] > 0, "mul_mat: the summed dimension is empty", a, b, remedy="the product would be zeros: gg.fill")
    require(a.ne[2] and a.ne[3] and b.ne[2] % a.ne[2] == 0 and b.ne[3] % a.ne[3] == 0,
            "mul_mat: dimensions 2 and 3 of a must divide b's", a, b, remedy="swap a and b, or reshape")
    require(a.nb[0] == a.type.nbytes and a.nb[0] <= a.nb[1], "mul_mat: a is transposed", a, remedy="gg.cont(a)")
    require(not b.type.quantized or b.nb[0] == b.type.nbytes, "mul_mat: blocks of b must lie side by side", b)
    return a.ctx.node(OP.MUL_MAT, F32, (a.ne[1], b.ne[1], b.ne[2], b.ne[3]), (a, b), ndim=b.ndim)


def _is_product(name, t):
    if t.op != OP.MUL_MAT:
        raise TypeMismatch(f"{name}: expected the result of mul_mat, got {describe(t)}")


@writes_in_c
def mul_mat_set_prec(a: Tensor, prec: int):
    """The product `a` with precision `prec` (PREC_DEFAULT 0 or PREC_F32 10) noted in parameter 0.

    Sums are F32 anyway; with PREC_F32 b's values are not rounded beside an F16 or BF16 a (ggml's CPU rounds them).
    Returns a new tensor: built tensors never change (ggml writes into a).  Errors: TypeMismatch, ParamError.
    Source: ggml_mul_mat_set_prec.
    """
    if prec not in (PREC_DEFAULT, PREC_F32):
        raise ParamError(f"mul_mat_set_prec: prec must be {PREC_DEFAULT} (default) or {PREC_F32} (F32), got {prec!r}")
    _is_product("mul_mat_set_prec", a)
    return a.ctx.node(OP.MUL_MAT, F32, a.ne, a.src, (int(prec), int(a.op_params[1])), ndim=a.ndim)


@writes_in_c
def mul_mat_set_hint(a: Tensor, hint: int):
    """The product `a` with a hint about its left side in parameter 1: 0 none, 1 it is a Hadamard matrix.

    With hint 1 the left side, [n, n] for n a power of two, is taken to be H[i][j] = (-1)^popcount(i & j) / sqrt(n) and
    is not read: b, F32, is transformed in n log2 n additions a row, without the rounding of the left side's type.
    Returns a new tensor: built tensors never change (ggml writes into a).
    Errors: TypeMismatch (b not F32), ParamError, ShapeError (ggml checks n alone, when it computes).
    Source: ggml_mul_mat_set_hint.
    """
    if hint not in (HINT_NONE, HINT_SRC0_IS_HADAMARD):
        raise ParamError(f"mul_mat_set_hint: hint must be {HINT_NONE} (none) or {HINT_SRC0_IS_HADAMARD} (Hadamard), "
                         f"got {hint!r}")
    _is_product("mul_mat_set_hint", a)
    if hint == HINT_SRC0_IS_HADAMARD:
        left, right = a.src
        n = left.ne[0]
        require(left.ne[1] == n and n > 0 and n & (n - 1) == 0,
                "mul_mat_set_hint: a Hadamard matrix is [n, n] with n a power of two", left)
        require_type("mul_mat_set_hint", right, (F32,), "b")
    return a.ctx.node(OP.MUL_MAT, F32, a.ne, a.src, (int(a.op_params[0]), int(hint)), ndim=a.ndim)


def reference(t, a, b):
    """float64 product of a's values with b's, b unrounded."""
    reps = (b.shape[0] // a.shape[0], b.shape[1] // a.shape[1])
    a = np.repeat(np.repeat(a.astype(np.float64), reps[0], 0), reps[1], 1)
    return b.astype(np.float64) @ a.swapaxes(-1, -2)


# ---------------------------------------------------------------- choice of kernel
def _direct(b):
    return b.type is F32 and b.nb[0] == 4


def exact_columns(t):
    """Are the columns used as they are, beside weights for whose type they would be rounded?"""
    return bool(t.op_params[0] == PREC_F32) and traits_of(t.src[0].type).dot_f32 is not None


def max_dot_columns(type, exact=False):
    """Up to how many columns mul_mat_dot is faster than packed panels for weights of `type`.

    Measured per type and number of columns: docs/measured.md, "How products read weights".
    """
    if type is BF16 and isa.BF16_DOT and not exact:
        if choices.by_amx(type, W):
            return W - 1
        return 1 << 30                      # two products a lane and instruction: twice the float tile at any n
    if not type.quantized:
        return MAX_DOT_COLUMNS_IN_PLACE if type is F32 else MAX_DOT_COLUMNS
    return MAX_DOT_COLUMNS_UNPACKED if code_tile(type) is None else traits_of(type).dot.max_columns


def _cost(t):
    """Nanoseconds on one thread: the slower of 100 GFLOP/s (400 for integer tiles) and 20 GB/s."""
    a, b = t.src[:2]
    k, m = a.ne[:2]
    n = b.ne[1] * b.ne[2] * b.ne[3]
    rate = 400 if a.type.quantized else 100
    return 2 * k * m * n / rate + a.type.row_nbytes(k) * m * a.ne[2] * a.ne[3] / 20


def dot_shape(type, k, m, n, exact=False):
    """The DotShape of a product; measured, see mul_mat_dot and, for one column, choices."""
    dot = mul_mat_dot.dot_of(type, exact)
    column_nbytes = dot.column_nbytes(k)
    if n == 1:
        if type is F32 and k >= 64 and k * m * 4 <= CACHED_NBYTES:
            return DotShape(4, 1, 1)                            # weights in the cache: rows share loads and lane sums
        rows, prefetch = choices.tile(type)
        if type.quantized:
            return DotShape(rows, 1, dot.unroll, prefetch)
        rows = max(rows, 4 if column_nbytes > L1_NBYTES else 1)
        return DotShape(rows, 1, dot.unroll if rows == 1 else 2, prefetch)
    if choices.are_apart():             # sums of one unroll are the same in tiles of any height and width
        return DotShape(1, min(n, APART_COLUMNS), dot_shape(type, k, m, 1, exact).unroll)
    if n == 2 and 2 * column_nbytes <= L1_NBYTES:
        rows = choices.rule(type).rows                              # F32 [2048 x 2048], Intel Xeon: 8 rows 1.2 x 1 row
        return DotShape(1, 2, min(4, 2 * dot.unroll)) if rows == 1 else DotShape(rows, 2, 1)
    wide = isa.ISA == "avx512"
    most = 8 if wide and not type.quantized else 4              # columns of a tile: 4 would convert rows of F16 twice
    cols = -(-n // -(-n // most))                               # of equal parts: 10 columns are 5 + 5, not 8 + 2
    if most == 8 and n == 9:
        cols = n                                                # 27 sums, three rows and a column are 31 registers
    return DotShape(min(dot.rows, min(4, 27 // cols) if wide else {2: 4, 3: 3, 4: 2}[cols]), cols, 1)


def _dot_kernel(t, n_threads):
    a, b = t.src[:2]
    exact, n = exact_columns(t), b.ne[1]
    dot = mul_mat_dot.dot_of(a.type, exact)
    direct = dot.prepare is None and _direct(b)
    shape = dot_shape(a.type, a.ne[0], a.ne[1], n, exact)
    columns = 0 if direct else mul_mat_dot.work_nbytes(dot, a.ne[0], n * b.ne[2] * b.ne[3], n_threads)
    narrower = not a.type.quantized and n % shape.columns > 0 and not choices.are_apart()       # 11: 6 + 5
    name = f"mul_mat{'-exact' * exact}-dot-{a.type.name}-{b.type.name}-{shape}" + "-direct" * direct
    name += "-narrower" * narrower
    plain = _direct(b) and b.ne[1:] == (1, 1, 1) and a.ne[2:] == (1, 1)
    column = mul_mat_dot.one_column(a.type, a.ne[0], shape, exact, name) if plain else None
    return Kernel(name, lambda: mul_mat_dot.make_kernel(a.type, b.type, direct, shape, exact, narrower), _cost(t),
                  columns, (module_of(a.type), module_of(b.type)), column=column)


def _tile_kernel(t, n_threads):
    a, b = t.src[:2]
    exact = exact_columns(t)
    tile = tile_of(a.type, b.ne[1], exact)
    tile = dataclasses.replace(tile, rounds=True) if exact else tile        # the columns were rounded already
    direct = _direct(b) and tile.rounds
    matrices = b.ne[2] * b.ne[3]
    panels = mul_mat_tile.panels_nbytes(tile, a.ne[0], b.ne[1])
    private = matrices > 1 and (matrices >= 4 * n_threads or panels * matrices > SHARED_PANEL_NBYTES)
    scratch = mul_mat_tile.private_nbytes(tile)
    work = n_threads * (panels + scratch) if private else panels * matrices + n_threads * scratch
    name = f"mul_mat{'-exact' * exact}-tile-{a.type.name}-{b.type.name}-{tile.columns}x{tile.kc}{tile.name}"
    name += "-direct" * direct + "-private" * private
    if tile.tail:
        name += f"-spread{tile.tail.spread}" + "-only" * tile.tail.only
    return Kernel(name, lambda: mul_mat_tile.make_kernel(a.type, b.type, tile, direct, private), _cost(t), work,
                  (module_of(a.type), module_of(b.type)), _sums(t, tile))


def _sums(t, tile):
    """Float tiles without a tail add up `kc` elements of k in order, then these sums."""
    if tile.tail or tile.unit != FLOAT_UNIT or code_tile(t.src[0].type, t.src[1].ne[1]):
        return ""
    return f"mul_mat{'-exact' * exact_columns(t)}-tile-{t.src[0].type.name}-{t.src[1].type.name}-" \
           f"{min(tile.kc, t.src[0].ne[0])}"


def _by_stretches(t):
    """Are dot products by stretches of k faster?"""
    a, b = t.src[:2]
    return (a.type is F32 and choices.by_stretches(b.ne[1]) and a.ne[0] >= LONG_ROW and a.ne[0] % W == 0
            and b.ne[2] * b.ne[3] == 1 and not choices.are_apart())


def _stretch_kernel(t, n_threads):
    a, b = t.src[:2]
    columns = mul_mat_stretch.tile_columns(b.ne[1])
    narrower = b.ne[1] % columns > 0
    return Kernel(f"mul_mat-stretch-{b.type.name}-{columns}" + "-narrower" * narrower,
                  lambda: mul_mat_stretch.make_kernel(b.type, columns, narrower), _cost(t),
                  mul_mat_stretch.work_nbytes(a.ne[0], b.ne[1], n_threads), (module_of(F32), module_of(b.type)))


def _short_kernel(t):
    a, b = t.src[:2]
    rows = mul_mat_short.tile_rows(a.ne[1])
    return Kernel(f"mul_mat-short-{a.type.name}-{rows}", lambda: mul_mat_short.make_kernel(a.type, rows),
                  _cost(t), modules=(module_of(a.type),))


def kernel(t, n_threads):
    a, b = t.src[:2]
    if a.type not in weight_types() or b.type not in column_types(a.type):
        return None
    if t.op_params[1] == HINT_SRC0_IS_HADAMARD:
        return Kernel("mul_mat-hadamard", hadamard.make_kernel, cost=float(np.prod(b.ne)))
    exact = exact_columns(t)
    if choices.are_apart() or b.ne[1] <= max_dot_columns(a.type, exact):
        return _dot_kernel(t, n_threads)
    if mul_mat_short.fits(a, b):
        return _short_kernel(t)
    if _by_stretches(t):
        return _stretch_kernel(t, n_threads)
    by_dots = not exact and a.ne[0] >= LONG_ROW and b.ne[1] <= choices.dot_columns(a.type)
    return (_dot_kernel if by_dots else _tile_kernel)(t, n_threads)


# ---------------------------------------------------------------- cases
def cases():
    def make(ta, tb, k, m, n, a23, b23, permuted):
        def build(inp):
            if permuted:
                a = inp.new(ta, (k, a23[0], m, a23[1]))
                a = a.ctx.node(OP.PERMUTE, ta, (k, m, *a23), (a,), (0, 2, 1, 3), view_of=a,
                               nb=(a.nb[0], a.nb[2], a.nb[1], a.nb[3]))
                b = inp.new(tb, (n, k, *b23))
                b = b.ctx.node(OP.PERMUTE, tb, (k, n, *b23), (b,), (1, 0, 2, 3), view_of=b,
                               nb=(b.nb[1], b.nb[0], b.nb[2], b.nb[3]))
            else:
                a, b = inp.new(ta, (k, m, *a23)), inp.new(tb, (k, n, *b23))
            return mul_mat(a, b)
        return build

    def case(ta, tb, k, m, n, a23=(1, 1), b23=(1, 1), permuted=False):
        name = f"{ta!r} {tb!r} k={k} m={m} n={n} {a23} {b23}" + " permuted" * permuted
        return Case(name, make(ta, tb, k, m, n, a23, b23, permuted), MAX_NMSE)
    for ta in (F32, F16, BF16, Q8_0, Q4_0):
        for n in (1, 2, 3, 4, 6, 8, 9, 16, 18, 24, 31, 32, 65):
            yield case(ta, F32, 160 if ta.quantized else 172, 19, n)
        for k in (32, 64, 96, 128) if ta.quantized else (1, 8, 15, 33):
            yield case(ta, F32, k, 14, 1)
            yield case(ta, F32, k, 16, 12)
        for n in (1, 5, 17):
            yield case(ta, F32, 64, 33, n, (2, 1), (4, 3))
            yield case(ta, F32, 64, 33, n, (2, 3), (2, 3), True)
    for ta, tb in ((Q4_0, Q8_0), (Q8_0, Q8_0), (Q4_1, Q8_1), (Q4_K, Q8_K)):
        for n in (1, 3, 20):
            yield case(ta, tb, 2 * max(ta.block, tb.block), 19, n)
        yield case(ta, tb, 1536, 3, 20)         # k longer than the part that a tile takes at once
    for tb in (F16, BF16):
        yield case(F16, tb, 64, 7, 1)
        yield case(F32, tb, 64, 7, 20, (1, 1), (2, 2), True)
    for ta in (F16, BF16):
        for k, m, n in ((172, 19, 1), (172, 19, 2), (15, 33, 5), (172, 19, 9), (96, 70, 65)):
            yield Case(f"exact {ta!r} k={k} m={m} n={n}", lambda inp, ta=ta, k=k, m=m, n=n: mul_mat_set_prec(
                mul_mat(inp.new(ta, (k, m)), inp.new(F32, (k, n))), PREC_F32), 1e-12)
    for n in (8, 32, 256, 1024):
        yield Case(f"hadamard {n}", lambda inp, n=n: mul_mat_set_hint(
            mul_mat(inp.new(F32, (n, n), _hadamard(n)), inp.new(F32, (n, 5, 2))), HINT_SRC0_IS_HADAMARD), 1e-7)


def _hadamard(n):
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return (h / np.sqrt(n)).astype(np.float32)


# ---------------------------------------------------------------- gradient
def gradient(g, t, dy):
    """da = sum over columns of b dy, db = a dy: a may be quantised, its rows are read as floats."""
    a, b = t.src
    if t.op_params[1] == HINT_SRC0_IS_HADAMARD:
        return g.missing("of a matrix that is taken to be Hadamard's"), lambda: g.mul_mat_set_hint(
            g.mul_mat(a, dy), HINT_SRC0_IS_HADAMARD)            # the matrix is its own inverse and transpose
    return (lambda: g.sum_groups(g.out_prod(g.rows(g.f32(b)), dy), a),
            lambda: g.out_prod(a, g.transpose(dy)))


# ---------------------------------------------------------------- rows
def _rows(t):
    (w, _), a = t.src[:2], last_axis(t)
    if a == 1 or a > 1 and w.ne[a] in (1, t.ne[a]):
        yield a, [None if a == 1 or w.ne[a] == 1 else a, a]


def _rebuild(n):
    out = n.call("mul_mat", *n.src)
    out = n.call("mul_mat_set_prec", out, n.i[0]) if n.i[0] else out
    return n.call("mul_mat_set_hint", out, n.i[1]) if n.i[1] else out


def _split(t, w, x):
    """Rows of either, the batch of both, or the axis that is summed over: each device then has a summand."""
    if w == MIRRORED:
        return x if x.is_cut and (x.axis == 1 or x.axis > 1 and t.src[0].ne[x.axis] == 1) else None
    if w.axis == 1 and x == MIRRORED:
        return SplitState(0, w.sizes)
    if w.axis == 0 and x == w:
        return PARTIAL
    if w.axis in (2, 3) and x.axis == w.axis:
        r = t.src[1].ne[w.axis] // t.src[0].ne[w.axis]
        return x if tuple(r * s for s in w.sizes) == x.sizes else None
    return None


SPECS = (Spec(op=OP.MUL_MAT, builders=(mul_mat, mul_mat_set_prec, mul_mat_set_hint), reference=reference,
              kernel=kernel, gradient=gradient, rows=_rows, split=_split, cases=cases,
              rebuild=_rebuild,
              flops=lambda t: 2 * math.prod(t.ne) * t.src[0].ne[0]),)
