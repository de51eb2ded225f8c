"""mul_mat_id: the product of a mixture of experts: every (used expert, token) is multiplied with the matrix its id
names.

    d[:, u, t] = as[ids[u, t]] @ b[:, u % nb, t]

ggml order: as [k, m, E], b [k, nb, t], ids [u, t] -> d F32 [m, u, t].  Columns are gathered by expert, so each
expert's weights are read once, by the tiles of mul_mat; b is rounded as there.  Kernels: mul_mat_id_dot (one token;
few columns an expert) and mul_mat_id_tile (many).  Ids are checked before anything is written.
"""
import math

import numpy as np

from ggjit.ops.copying.view import view_2d
from ggjit.ops.core.record import OP
from ggjit.ops.core.shape import require, require_type
from ggjit.ops.core.spec import Case, Kernel, Spec
from ggjit.ops.core.traits import module_of, traits_of
from ggjit.ops.core.types import BF16, F16, F32, I32, Q4_0, Q8_0, Tensor
from ggjit.ops.matmul import choices, mul_mat_dot, mul_mat_id_dot, mul_mat_id_tile
from ggjit.ops.matmul.mul_mat import MAX_NMSE, column_types, dot_shape, max_dot_columns, weight_types
from ggjit.ops.matmul.tile_kinds import tile_of

# of experts as floats in the gradient: elements of a strip, a whole vector; bytes of a strip
STRIP, STRIP_NBYTES = 16, 32 << 20


def mul_mat_id(as_: Tensor, b: Tensor, ids: Tensor):
    """d[:, u, t] = as_[ids[u, t]] b[:, u % nb, t]: as_ [k, m, E], b [k, nb, t], ids I32 [u, t] -> F32 [m, u, t].

    NumPy: as_ (E, m, k), b (t, nb, k), ids (t, u) -> (t, u, m).  Types as mul_mat; nb divides u (1: one column for all
    slots).  Errors: ShapeError, TypeMismatch; IndexRangeError at run time for ids outside [0, E), before anything is
    written.  Source: ggml_mul_mat_id.
    """
    require_type("mul_mat_id", as_, weight_types(), "as")
    require_type("mul_mat_id", b, column_types(as_.type), "b")
    require(not b.type.quantized or b.nb[0] == b.type.nbytes, "mul_mat_id: blocks of b must lie side by side", b)
    require_type("mul_mat_id", ids, (I32,), "ids")
    require(as_.ne[3] == 1 and b.ne[3] == 1 and ids.ne[2:] == (1, 1),
            "mul_mat_id: as and b have 3 dimensions, ids has 2", as_, b, ids)
    require(as_.ne[0] == b.ne[0], "mul_mat_id: rows of as and b differ in length", as_, b)
    require(ids.ne[1] == b.ne[2], "mul_mat_id: ids must have a row per token, b.ne[2]", b, ids)
    require(b.ne[1] > 0 and ids.ne[0] % b.ne[1] == 0,
            "mul_mat_id: b.ne[1] must divide the experts of a token, ids.ne[0]", b, ids)
    require(as_.nb[0] == as_.type.nbytes and as_.nb[0] <= as_.nb[1], "mul_mat_id: as is transposed", as_,
            remedy="gg.cont it")
    return as_.ctx.node(OP.MUL_MAT_ID, F32, (as_.ne[1], ids.ne[0], b.ne[2]), (as_, b, ids))


def reference(t, experts, b, ids):
    """float64 product, b unrounded."""
    ids = ids[0, 0]
    slots = np.arange(ids.shape[1]) % b.shape[2]
    return np.einsum("tumk,tuk->tum", experts[0].astype(np.float64)[ids], b[0].astype(np.float64)[:, slots])[None]


# ---------------------------------------------------------------- choice of kernel
def _cost(t):
    """Nanoseconds on one thread, as mul_mat, with the experts in use read once."""
    a, n_pairs = t.src[0], t.ne[1] * t.ne[2]
    k, m, n_experts = a.ne[:3]
    rate = 400 if a.type.quantized else 100
    return 2.0 * k * m * n_pairs / rate + a.type.row_nbytes(k) * m * min(n_experts, n_pairs) / 20 + 2.0 * n_pairs


def kernel(t, n_threads):
    a, b, ids = t.src
    if a.type not in weight_types() or b.type not in column_types(a.type) or ids.type is not I32:
        return None
    dot, (k, m, n_experts), n_pairs = traits_of(a.type).dot, a.ne[:3], t.ne[1] * t.ne[2]
    modules = (module_of(a.type), module_of(b.type))
    name = f"mul_mat_id-{{}}-{a.type.name}-{b.type.name}-{{}}"
    single = dot_shape(a.type, k, m, 1)
    if t.ne[2] == 1:
        direct = dot.prepare is None and b.type is F32 and b.nb[0] == 4
        work = 0 if direct else mul_mat_dot.work_nbytes(dot, k, b.ne[1], n_threads)
        return Kernel(name.format("one", single) + "-direct" * direct,
                      lambda: mul_mat_id_dot.make_one(a.type, b.type, direct, single), _cost(t), work, modules)
    # tiles here take whole vectors, so dot products are faster up to more columns
    few = 2 * n_pairs <= 3 * max_dot_columns(a.type) * n_experts
    if few or choices.are_apart():
        shape = dot_shape(a.type, k, m, 4)
        work = mul_mat_id_dot.many_nbytes(dot, k, n_experts, n_pairs, n_threads, shape)
        return Kernel(name.format("many", f"{shape}-{single}"),
                      lambda: mul_mat_id_dot.make_many(a.type, b.type, shape, single), _cost(t), work, modules)
    tile = tile_of(a.type)
    return Kernel(name.format("tile", "panels") + tile.name,
                  lambda: mul_mat_id_tile.make_kernel(a.type, b.type, tile), _cost(t),
                  mul_mat_id_tile.work_nbytes(tile, k, n_experts, n_pairs, n_threads), modules)


# ---------------------------------------------------------------- cases
def cases():
    def make(ta, tb, k, m, n_experts, used, broadcast, n):
        def build(inp):
            experts = inp.new(ta, (k, m, n_experts))
            order = np.stack([inp.rng.permutation(n_experts) for _ in range(n)]).astype(np.int32)
            ids = inp.new(I32, (n_experts, n), order)
            if used < n_experts:
                ids = view_2d(ids, used, n, ids.nb[1], 0)
            return mul_mat_id(experts, inp.new(tb, (k, 1 if broadcast else used, n)), ids)
        return build

    def case(ta, tb, *args):
        name = "k={} m={} experts={} used={} broadcast={} n={}".format(*args)
        return Case(f"{ta!r} {tb!r} {name}", make(ta, tb, *args), MAX_NMSE)
    for ta in (F32, F16, BF16, Q8_0, Q4_0):
        for used, broadcast, n in ((1, False, 1), (2, True, 1), (4, False, 1), (2, False, 5), (4, True, 17)):
            yield case(ta, F32, 96, 37, 4, used, broadcast, n)
        yield case(ta, F32, 64, 19, 8, 2, True, 33)
    for n in (1, 5, 33):
        yield case(Q4_0, Q8_0, 64, 19, 4, 2, True, n)
        yield case(ta, F32, 320, 101, 2, 2, False, 45)
    yield case(F16, F16, 33, 5, 4, 2, False, 3)
    yield case(F32, BF16, 33, 5, 4, 2, True, 1)
    yield case(F32, F32, 7, 3, 3, 3, True, 600)


# ---------------------------------------------------------------- gradient
def gradient(g, t, dy):
    """db: the products with the same experts, transposed; das: the sums over the columns that chose each expert.

    db needs the experts as floats, which are many bytes: it is made of strips of ne0, each from its part of them.
    """
    experts, b, ids = t.src
    k, m, n_experts = experts.ne[:3]
    n = ids.ne[0] * ids.ne[1]

    def of_experts():
        chosen = g.get_rows(g.constant(np.eye(n_experts, dtype=np.float32)), g.reshape_1d(g.dense(ids), n))
        chosen = g.reshape_3d(g.cont(g.transpose(chosen)), 1, n, n_experts)
        per_expert = g.mul(g.repeat_4d(g.reshape_3d(dy, m, n, 1), m, n, n_experts, 1), chosen)
        columns = g.repeat_4d(g.f32(b), k, *t.ne[1:])
        return g.out_prod(g.reshape_3d(columns, k, n, 1), per_expert)

    def of_b():
        strips = [g.mul_mat_id(g.cont(g.transpose(g.f32(part))), dy, ids) for part in _strips(g, experts)]
        while len(strips) > 1:                  # pairs of pairs: each is copied log2(strips) times
            strips = [g.concat(*strips[i:i + 2], 0) if i + 1 < len(strips) else strips[i]
                      for i in range(0, len(strips), 2)]
        return g.fit(strips[0], b)
    return of_experts, of_b, None


def _strips(g, experts):
    """Views of some elements of every row, whole blocks, that take at most STRIP_NBYTES as floats, if a block does."""
    k, m, n_experts = experts.ne[:3]
    step = math.lcm(experts.type.block, STRIP)
    width = max(STRIP_NBYTES // (4 * max(m * n_experts, 1)) // step * step, step)
    if width >= k:
        return [experts]
    starts = range(0, k - k % step if k > step else k, width)
    ends = [*starts[1:], k]
    return [g.view_3d(experts, end - first, m, n_experts, *experts.nb[1:3],
                      first // experts.type.block * experts.type.nbytes)
            for first, end in zip(starts, ends, strict=True)]


SPECS = (Spec(op=OP.MUL_MAT_ID, builders=(mul_mat_id,), reference=reference, kernel=kernel,
              gradient=gradient, cases=cases,
              flops=lambda t: 2 * math.prod(t.ne) * t.src[0].ne[0]),)
