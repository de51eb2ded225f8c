"""Checks nodes that were not made by a builder with the builder that makes such nodes.

`ctx.node` called by hand and graphs read from a pickle name an op, sources and parameters.  The op's spec says which
builder takes them in which order (`rebuild`); the node must be what that builder returns, to the last stride, or the
builder's own error comes out.  So every rule of an op stays in the op's builder.

    op, src, params            ROPE, (a, pos), (0, 64, 2, 0, ...)
      -> Spec.rebuild          rope_ext(a, pos, None, 64, 2, ...)  -> a node in a context of its own
      -> compared              type, ne, nb, params, sources, view
"""
import functools
import inspect

from ggjit.ops.copying.view import offset_params
from ggjit.ops.core.errors import GgjitError, NotSupported, ShapeError
from ggjit.ops.core.record import MAX_PARAMS, OP
from ggjit.ops.core.shape import contiguous_nb, describe
from ggjit.ops.core.spec import all_specs, builders, ops_with

_builders = functools.cache(builders)


class _RecipeNode:
    """The node `t` as a `rebuild` reads it: .src, .i parameters as ints, .f as floats, .ne, .type; .ctx for leaves."""

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


@functools.cache
def _recipe(op):
    """(n: _RecipeNode) -> the node that a builder makes, from the op's spec; None where no builder makes such nodes."""
    spec = all_specs().get(op)
    if spec is None or spec.calls_python or callable(spec.rebuild):
        return None if spec is None or spec.calls_python else spec.rebuild
    name = spec.rebuild or op.name.lower()
    if name not in _builders():
        return None
    kinds = [p.annotation for p in inspect.signature(_builders()[name]).parameters.values()]
    numbers = [kind for kind in kinds if kind in (int, float)]
    return lambda n: n.call(name, *n.src, *((n.f if kind is float else n.i)[k] for k, kind in enumerate(numbers)))


def check_node(t, ctx):
    """Is `t` what the builder of its op makes?  ctx: an empty context for what is built to compare.

    Errors: those of the builder; ShapeError for another type, shape, stride or parameter; NotSupported for ops that
    have no builder or call a function of the user's.
    """
    if t.op in (OP.NONE, OP.VIEW):
        _check_memory(t)
        return
    recipe = _recipe(t.op)
    if recipe is None:
        names = ", ".join(f"gg.{f.__name__}" for f in all_specs()[t.op].builders)
        raise NotSupported(f"{describe(t)}: a node of {t.op.name} cannot be made by hand; "
                           + (f"use {names}" if t.op in ops_with("calls_python") else "it has no builder"))
    with ctx:
        try:
            made = recipe(_RecipeNode(t, ctx))
        except GgjitError:
            raise
        except (IndexError, AttributeError) as e:       # a source is missing
            raise ShapeError(f"{t.op.name}: {len(t.src)} sources {[describe(s) for s in t.src]} do not fit ({e}); use "
                             f"the op's builder") from None
    made, n_free = made if isinstance(made, tuple) else (made, 0)       # the first n_free parameters are not compared
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
