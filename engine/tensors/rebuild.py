"""Nodes that no builder made are checked by the builder that would have made them.

`ctx.node` called by hand and graphs read from a pickle name an op, sources and parameters.  RECIPES says which builder
takes them in which order; the node must be what that builder returns, to the last stride, or the builder's own error
comes out.  So every rule of an op stays in the op's builder.

    op, src, params            ROPE, (a, pos), (0, 64, 2, 0, ...)
      -> RECIPES[OP.ROPE]      rope_ext(a, pos, None, 64, 2, ...)  -> a node in a context of its own
      -> compared              type, ne, nb, params, sources, view
"""
import functools

from ggjit.ops.attention.rope_angles import MROPE
from ggjit.ops.copying.view import offset_params
from ggjit.ops.core.errors import GgjitError, NotSupported, ShapeError
from ggjit.ops.core.record import GLU, MAX_PARAMS, OP, UNARY
from ggjit.ops.core.shape import contiguous_nb, describe
from ggjit.ops.core.spec import builders
from ggjit.ops.core.types import F64

CALLS_PYTHON = {OP.MAP_CUSTOM1, OP.MAP_CUSTOM2, OP.MAP_CUSTOM3, OP.CUSTOM}
_builders = functools.cache(builders)


class _RecipeNode:
    """The node `t` as recipes read it: .src, .i parameters as ints, .f as floats, .ne, .type, .ctx for new leaves."""

    def __init__(self, t, ctx):
        self.src, self.ne, self.type, self.ctx = list(t.src), t.ne, t.type, ctx
        self.i, self.f = t.op_params.tolist(), t.param_floats.tolist()
        self.op, self.in_place = t.op, t.view_src is not None

    def call(self, name, *args):
        """The builder `name`, or its in-place twin where the node is a view."""
        twin = f"{name}_inplace"
        return _builders()[twin if self.in_place and twin in _builders() else name](*args)

    def up_to(self, k):
        """k sources, None for those that are absent."""
        if len(self.src) > k:
            raise IndexError(f"at most {k}")
        return (*self.src, *(None,) * (k - len(self.src)))

    def like(self):
        """A leaf of the node's shape, for builders that take a tensor for its shape alone."""
        return self.ctx.new_tensor(self.type, self.ne)


def _plain(name, ints=0, floats=0):
    """The builder takes the sources, then the first `ints` or `floats` parameters."""
    return lambda n: n.call(name, *n.src, *n.i[:ints], *n.f[:floats])


def _add(n):
    return n.call("add", *n.src) if n.type is n.src[0].type else n.call("add_cast", *n.src, n.type)


def _unary(n):
    if n.i[0] != UNARY.XIELU:
        return n.call("unary", *n.src, n.i[0])
    # the builder takes the alphas before their softplus: it is asked for its checks, the parameters are the node's
    return n.call("xielu", *n.src, 0.0, 0.0, n.f[3], n.f[4]), 5


def _glu(n):
    if n.i[0] == GLU.SWIGLU_OAI:
        return n.call("swiglu_oai", *n.src, n.f[2], n.f[3])
    if n.i[0] == GLU.SWIGLU_CLAMP:
        return n.call("swiglu_clamp", *n.src, n.f[3])
    return n.call("glu", *n.src, n.i[0], bool(n.i[1])) if len(n.src) == 1 else n.call("glu_split", *n.src, n.i[0])


def _mul_mat(n):
    out = n.call("mul_mat", *n.src)
    out = n.call("mul_mat_set_prec", out, n.i[0]) if n.i[0] else out
    return n.call("mul_mat_set_hint", out, n.i[1]) if n.i[1] else out


def _rope(n):
    a, b, c = n.up_to(3)
    name = ("rope_multi" if n.i[2] & MROPE else "rope_ext") + "_back" * (n.op == OP.ROPE_BACK)
    sections = (n.i[11:15],) if n.i[2] & MROPE else ()
    out = n.call(name, a, b, c, n.i[1], *sections, n.i[2], n.i[4], *n.f[5:11])
    return n.call("rope_set_offset", out, n.i[15]) if n.i[15] else out


def _flash_attn(n):
    q, k, v, mask, sinks = n.up_to(5)
    out = n.call("flash_attn_ext", q, k, v, mask, *n.f[:3])
    out = n.call("flash_attn_ext_set_prec", out, n.i[3]) if n.i[3] else out
    return out if sinks is None else n.call("flash_attn_ext_add_sinks", out, sinks)


def _soft_max(n):
    a, mask, sinks = n.up_to(3)
    out = n.call("soft_max_ext", a, mask, *n.f[:2])
    return out if sinks is None else n.call("soft_max_add_sinks", out, sinks)


def _pool_2d(n, name, data, result):
    """The padding may have had a fraction, which only shows in the size of the result."""
    op, k, s, p = n.i[0], n.i[1:3], n.i[3:5], n.i[5:7]
    p = [max(p[d], ((result[d] - 1) * s[d] - data.ne[d] + k[d]) / 2) if p[d] >= 0 else p[d] for d in (0, 1)]
    return n.call(name, *n.src, op, *k, *s, *p)


RECIPES = {
    **{op: _plain(op.name.lower()) for op in (
        OP.ADD_ID, OP.ADD1, OP.SUB, OP.MUL, OP.DIV, OP.SQR, OP.SQRT, OP.LOG, OP.SIN, OP.COS, OP.SUM_ROWS,
        OP.CUMSUM, OP.MEAN, OP.ARGMAX, OP.COUNT_EQUAL, OP.SILU_BACK, OP.MUL_MAT_ID, OP.OUT_PROD, OP.DUP, OP.DIAG,
        OP.TRANSPOSE, OP.GET_ROWS, OP.SSM_CONV, OP.RWKV_WKV6,
        OP.RWKV_WKV7, OP.OPT_STEP_ADAMW, OP.OPT_STEP_SGD, OP.LIGHTNING_INDEXER, OP.ADD_REL_POS, OP.DSV4_HC_POST)},
    **{op: _plain(op.name.lower(), ints=n) for op, n in {
        OP.PERMUTE: 4, OP.CONCAT: 1, OP.DIAG_MASK_INF: 1, OP.DIAG_MASK_ZERO: 1, OP.TRI: 1, OP.ARGSORT: 1, OP.POOL_1D: 4,
        OP.TIMESTEP_EMBEDDING: 2, OP.COL2IM_1D: 3, OP.PAD_REFLECT_1D: 2, OP.ROLL: 4, OP.CONV_TRANSPOSE_1D: 3,
        OP.SSM_SCAN: 1, OP.GATED_DELTA_NET: 1, OP.SET: 4, OP.ACC: 4}.items()},
    **{op: _plain(op.name.lower(), floats=n) for op, n in {
        OP.NORM: 1, OP.RMS_NORM: 1, OP.L2_NORM: 1, OP.RMS_NORM_BACK: 1, OP.CLAMP: 2, OP.FILL: 1,
        OP.GATED_LINEAR_ATTN: 1}.items()},
    OP.CONV_2D: _plain("conv_2d_direct", ints=6), OP.CONV_2D_DW: _plain("conv_2d_dw_direct", ints=6),
    OP.CONV_3D: _plain("conv_3d_direct", ints=12), OP.CONV_TRANSPOSE_2D: _plain("conv_transpose_2d_p0", ints=1),
    OP.SCALE: _plain("scale_bias", floats=2), OP.SOFT_MAX_BACK: _plain("soft_max_ext_back", floats=2),
    OP.ADD: _add, OP.UNARY: _unary, OP.GLU: _glu, OP.MUL_MAT: _mul_mat, OP.ROPE: _rope, OP.ROPE_BACK: _rope,
    OP.FLASH_ATTN_EXT: _flash_attn, OP.SOFT_MAX: _soft_max,
    OP.LEAKY_RELU: lambda n: n.call("leaky_relu", *n.src, n.f[0], n.in_place),
    OP.GROUP_NORM: lambda n: n.call("group_norm", *n.src, n.i[0], n.f[1]),
    OP.ARANGE: lambda n: n.call("arange", n.ctx, *n.src, *n.f[:3]),
    OP.CPY: lambda n: n.call("cpy", *n.src) if n.in_place else n.call("cast", *n.src, n.type),
    OP.CONT: lambda n: n.call("cont_4d", *n.src, *n.ne), OP.RESHAPE: lambda n: n.call("reshape_4d", *n.src, *n.ne),
    OP.REPEAT: lambda n: n.call("repeat_4d", *n.src, *n.ne),
    OP.REPEAT_BACK: lambda n: n.call("repeat_back", n.src[0], n.like(), *n.src[1:]),
    OP.GET_ROWS_BACK: lambda n: n.call("get_rows_back", *n.src[:2], n.like(), *n.src[2:]),
    OP.SUM: lambda n: n.call("sum", *n.up_to(2), n.type is F64),
    OP.CROSS_ENTROPY_LOSS: lambda n: n.call("cross_entropy_loss", *n.up_to(3), n.i[0] if n.i[1] else None),
    OP.CROSS_ENTROPY_LOSS_BACK: lambda n: n.call("cross_entropy_loss_back", *n.src, n.i[0] or None),
    OP.SET_ROWS: lambda n: n.call("set_rows", n.src[2], n.src[0], n.src[1]),
    OP.UPSCALE: lambda n: n.call("interpolate", *n.src, *n.ne, n.i[0]),
    OP.PAD: lambda n: n.call("pad_ext_circular" if n.i[8] else "pad_ext", *n.src, *n.i[:8]),
    OP.GET_REL_POS: lambda n: n.call("get_rel_pos", *n.src, n.ne[2], n.ne[1]),
    OP.WIN_PART: lambda n: n.call("win_part", *n.src, n.i[2]),
    OP.WIN_UNPART: lambda n: n.call("win_unpart", *n.src, n.ne[1], n.ne[2], n.i[0]),
    OP.POOL_2D: lambda n: _pool_2d(n, "pool_2d", n.src[0], n.ne),
    OP.POOL_2D_BACK: lambda n: _pool_2d(n, "pool_2d_back", n.src[1], n.src[0].ne),
    OP.IM2COL: lambda n: n.call("im2col", *n.src, *n.i[:6], bool(n.i[6]), n.type),
    OP.IM2COL_BACK: lambda n: n.call("im2col_back", *n.src, n.ne, *n.i[:6], bool(n.i[6])),
    OP.IM2COL_3D: lambda n: n.call("im2col_3d", *n.src, n.i[9], *n.i[:9], n.type),
    OP.SOLVE_TRI: lambda n: n.call("solve_tri", *n.src, True, not n.i[0] & 1, bool(n.i[0] & 2)),
    OP.TOP_K: lambda n: n.call("top_k", *n.src, n.ne[0]),
    OP.DSV4_HC_COMB: lambda n: n.call("dsv4_hc_comb", *n.src, n.f[0], n.i[1]),
    OP.DSV4_HC_PRE: lambda n: n.call("dsv4_hc_pre_gated", *n.src, n.f[0]) if n.i[1] else n.call("dsv4_hc_pre", *n.src),
}


def check_node(t, ctx):
    """Is `t` what the builder of its op makes?  ctx: an empty context for what is built to compare.

    Errors: those of the builder; ShapeError for another type, shape, stride or parameter; NotSupported for ops that
    have no builder or call a function of the user's.
    """
    if t.op in (OP.NONE, OP.VIEW):
        _check_memory(t)
        return
    if t.op in CALLS_PYTHON or t.op not in RECIPES:
        raise NotSupported(f"{describe(t)}: a node of {t.op.name} cannot be made by hand; "
                           + ("use gg.map_custom1 to 3 or gg.custom" if t.op in CALLS_PYTHON else "it has no builder"))
    with ctx:
        try:
            made = RECIPES[t.op](_RecipeNode(t, ctx))
        except GgjitError:
            raise
        except (IndexError, AttributeError) as e:       # a source is missing
            raise ShapeError(f"{t.op.name}: {len(t.src)} sources {[describe(s) for s in t.src]} do not fit ({e}); use "
                             f"the op's builder") from None
    made, n_free = made if isinstance(made, tuple) else (made, 0)       # parameters that may be any
    found = _facts(t, n_free)
    for key, value in _facts(made, n_free).items():
        if found[key] != value:
            raise ShapeError(f"{t.op.name} of {', '.join(map(describe, t.src))}: {key} {found[key]}, the builder makes "
                             f"{value}; use the builder of the op")


def _facts(t, n_free):
    """What must be equal, by name; the first n_free parameters need not.  Sources that are absent count: kernels look
    for them in the row of the node."""
    src = [None if s is None else s.id for s in t.src]
    return {"op": t.op, "type": t.type, "ne": t.ne, "nb": t.nb, "params": t.op_params.tolist()[n_free:], "src": src,
            "base": None if t.view_src is None else t.view_src.id, "view_offs": t.view_offs}


def _check_memory(t):
    """A leaf is contiguous; a view lies inside what it views."""
    whole = t.view_src if t.op == OP.NONE else t.src[0] if len(t.src) == 1 else None
    if t.op == OP.NONE and whole is None:
        if t.src or t.view_offs or t.nb != contiguous_nb(t.type, t.ne) or t.op_params.any():
            raise ShapeError(f"{describe(t)}: a leaf has no sources, offset or params, and contiguous strides, got nb "
                             f"{list(t.nb)}, params {t.op_params.tolist()}")
        return
    first = None if whole is None or t.view_src is None else t.view_offs - whole.view_offs
    if first is None or whole.base.id != t.view_src.id or whole.type is not t.type:
        raise ShapeError(f"{describe(t)}: a view has one source, of its type, whose memory it shares; use gg.view_4d")
    if first < 0 or min(t.nb) < 0 or first + t.nbytes > whole.nbytes or (t.type.block > 1 and t.nb[0] != t.type.nbytes):
        raise ShapeError(f"{describe(t)}: bytes {first}..{first + t.nbytes}, strides {list(t.nb)}, are not inside "
                         f"{describe(whole)} ({whole.nbytes} bytes)")
    params = offset_params(first) if t.op == OP.VIEW else ()
    if t.op_params.tolist() != [*params, *(0,) * (MAX_PARAMS - len(params))]:
        raise ShapeError(f"{describe(t)}: params {t.op_params.tolist()}, the builder makes {list(params)}, the "
                         f"offset of {first} bytes; use gg.view_4d")
