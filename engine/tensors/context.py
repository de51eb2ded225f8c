"""Contexts: where tensors are made.  They hold no data: memory comes from `alloc_ctx_tensors` and GraphAllocator.

A tensor lives as long as a variable, a node that reads it or a graph refers to it.  It holds its context, its
sources and its buffer; the context knows it weakly.

`from_dlpack` and `tensor` are here because they make a Context where they are given none.
"""
import itertools
import math
import operator
import struct
import sys
import threading

import numpy as np

import ggjit.ops
import ggjit.tensors
from ggjit.core.arguments import type_of
from ggjit.core.buffer import MultiBuffer, buffers_of
from ggjit.core.html_repr import HtmlRepr, size_text
from ggjit.core.placing import needed_nbytes, place_tensors
from ggjit.core.table import NO_PARAMS, NO_SRC, TABLE
from ggjit.ops.core.errors import ParamError, ShapeError, StaleHandle, TypeMismatch
from ggjit.ops.core.locks import ForkLock
from ggjit.ops.core.record import MAX_DIMS, MAX_PARAMS, MAX_SRC, OP, T_BUFFER
from ggjit.ops.core.shape import contiguous_nb
from ggjit.ops.core.weak import NumberedRef
from ggjit.ops.core.whole_numbers import is_whole, whole
from ggjit.tensors.arrays import array_of, from_numpy, leaf_of_dlpack
from ggjit.tensors.rebuild import check_node
from ggjit.tensors.tensor import NewTensor, Tensor, layout_of

_MAX_NBYTES = 1 << 62
_NO_MORE = tuple(NO_SRC[n:] for n in range(MAX_SRC + 1))                # the ids behind n sources
_ONES = tuple((1,) * (MAX_DIMS - n) for n in range(MAX_DIMS + 1))       # the sizes behind n axes
# frames of these packages are skipped in the search for the user's line that made a tensor
_INNER = (ggjit.ops.__name__ + ".", ggjit.tensors.__name__ + ".")
_ids = itertools.count()
_forgetting = ForkLock()
_note_dead = TABLE.note_dead
_new = object.__new__
_float_bits = struct.Struct("f")
_int_bits = struct.Struct("i")


class _Active(threading.local):
    """.stack: the contexts of this thread's `with ctx:` blocks."""
    stack = ()


_active = _Active()


def innermost(default=None):
    """The context of the innermost `with ctx:` of this thread."""
    stack = _active.stack
    return stack[-1] if stack else default


class Context(HtmlRepr):
    """Owns the tensors that are created in it; `free` ends all of them.

    `with ctx:` makes ctx the place where results of ops go; without it they go to the first source's context.
    A tensor lives as long as it is referred to, and keeps its context and the tensors it is computed from alive.
    """

    def __init__(self, *size, **params):
        if size or params:
            raise TypeMismatch("Context takes no size and no options: it grows as needed, and alloc_ctx_tensors gives "
                               "its tensors memory; write gg.Context()")
        self.id = next(_ids)
        self.alive = True
        self._refs = TABLE.refs(self)
        self._n_refs_to_sweep = 64          # at so many NumberedRefs: drop those of tensors that are gone

    @property
    def tensors(self):
        """The tensors that are alive, in order of creation."""
        return [t for t in [ref() for ref in self._refs] if t is not None]

    @property
    def buffers(self):
        """Buffers that tensors of this context lie in."""
        return buffers_of(self.tensors)

    def __enter__(self):
        self._check()
        _active.__dict__.setdefault("stack", []).append(self)
        return self

    def __exit__(self, *exc):
        stack = _active.stack               # blocks of generators need not end in the order in which they began
        del stack[len(stack) - 1 - stack[::-1].index(self)]

    def __bool__(self):
        return True                         # a context is true even without tensors

    def __repr__(self):
        if not self.alive:
            return f"<Context {self.id}, freed>"
        tensors = self.tensors
        nbytes = sum(t.nbytes for t in tensors if not t.op)
        return f"<Context {self.id}: {len(tensors)} tensors, leafs of {size_text(nbytes)}>"

    def __len__(self):
        return len(self.tensors)

    def __reduce__(self):
        raise TypeMismatch("a Context cannot be pickled; pickle a Graph, or save values with ggjit.models.save_gguf")

    def free(self):
        """Give the records back; handles to its tensors raise from now on.  A second call does nothing."""
        if self.alive:
            self.alive = False
            tensors = self.tensors
            TABLE.release(self._refs)
            for t in tensors:
                t._plan = t._holds = None

    def _check(self):
        if not self.alive:
            raise StaleHandle("this Context was freed; make a new one")

    def _target(self):
        """Where results of ops on this context's tensors go."""
        return innermost(self)

    def new_tensor(self, type, ne, name=""):
        """A leaf of `type` with `ne` elements per dimension (ggml order, ne0 fastest; 1 to 4 dimensions).

        It has no memory yet: `alloc_ctx_tensors`, a GraphAllocator or `from_numpy` gives it some.
        Errors: TypeMismatch, ShapeError (more than 4 dimensions, negative sizes, ne0 not a multiple of the type's
        block, more than 2^62 bytes).  Source: ggml_new_tensor.
        """
        return self._leaf(type, ne, name)

    def _leaf(self, type, ne, name, ndim=None):
        """A leaf with `ndim` axes; None: one for each size in `ne`."""
        self._check()
        type = type_of(type, "new_tensor: type")
        ne, n_given = check_ne(type, ne)
        return self._add(type, OP.NONE, ne, contiguous_nb(type, ne), n_given if ndim is None else ndim, NO_PARAMS, (),
                         None, 0, name)

    def node(self, op, type, ne, src=(), params=(), view_of=None, view_offs=0, nb=None, ndim=None):
        """The result tensor of an op; called by op builders.

        params: consecutive 32-bit words, int as int32 and float as float32 bits.  view_of: the tensor whose memory
        the result shares at byte `view_offs`; chains collapse to the base tensor.  nb: strides in bytes, contiguous
        if absent (for a view: those of view_of when the shape is the same).

        ndim: the axes of the result's NumPy shape.  If absent, fewer than four sizes in `ne` say how many there are;
        with four it has those of view_of, else of the source with the most.  It never has fewer than `ne` needs.

        Called by hand, it takes only what the op's builder would make (engine/tensors/rebuild.py).  Errors: those of
        the builder.
        """
        ctx = self._target()
        ctx._check()
        frame = sys._getframe(1)
        if not frame.f_globals.get("__name__", "").startswith(_INNER):
            op, type, ne, src, nb = _checked_by_hand(op, type, ne, src, params, view_of, view_offs, nb)
        ne, n_given = check_ne(type, ne)
        if nb is None:
            same = view_of is not None and view_of.type is type and tuple(view_of.ne) == ne
            nb = view_of.nb if same else contiguous_nb(type, ne)
        most = 0
        for s in src:
            if s is not None:
                s._check()
                most = s.ndim if s.ndim > most else most
        if ndim is None:
            ndim = n_given if n_given < MAX_DIMS else most if view_of is None else view_of.ndim
        if ne[ndim:] != _ONES[ndim]:
            ndim = max(i + 1 for i, n in enumerate(ne) if n != 1)
        if view_of is not None and view_of.view_src is not None:
            view_offs += view_of.view_offs
            view_of = view_of.view_src
        return ctx._add(type, op, ne, tuple(nb), ndim, _pack(params) if params else NO_PARAMS, tuple(src), view_of,
                        view_offs, "", frame)

    def _add(self, type, op, ne, nb, ndim, params, src, view_src, view_offs, name, frame=None):
        """frame: of Python, from which on the place in the user's program is looked for."""
        if len(src) > MAX_SRC:
            raise ShapeError(f"{OP(op).name}: {len(src)} sources, at most {MAX_SRC}")
        op = op if op.__class__ is OP else OP(op)
        ids = (*[-1 if s is None else s.id for s in src], *_NO_MORE[len(src)])
        row, generation = TABLE.new(type.id, op, 0, ne, nb, params, ids, -1 if view_src is None else view_src.id,
                                    view_offs, -1, 0, self.id)
        return self._handle(row, generation, op, layout_of(type, ne, nb, ndim), src, view_src, view_offs, name,
                            caller(frame or sys._getframe(2)))

    def _handle(self, row, generation, op, layout, src, view_src, view_offs, name, frame):
        """The Tensor of a row of the table, which dies with it."""
        t = _new(NewTensor)                 # half the time of a call of the class
        if frame is None:
            t.__init__(row, generation, self, op, layout, src, view_src, view_offs, name)
        else:                               # the line is computed from the code object when it is asked for
            t.__init__(row, generation, self, op, layout, src, view_src, view_offs, name, frame.f_code, frame.f_lasti)
        t.__class__ = Tensor                # from here on its attributes cannot be set
        ref, refs = NumberedRef(t, _note_dead), self._refs
        ref.number = row
        refs.append(ref)
        TABLE.handles[row] = ref
        if len(refs) > self._n_refs_to_sweep:
            self._forget()
        return t

    def _forget(self):
        """Drop the NumberedRefs of dead tensors.  Called when their number has doubled, so that it stays in proportion.
        """
        with _forgetting:
            n = len(self._refs)             # other threads append meanwhile
            self._refs[:n] = [ref for ref in self._refs[:n] if ref() is not None]
            self._n_refs_to_sweep = max(64, 2 * len(self._refs))


def caller(frame):
    """The innermost frame outside the op builders and this package, from `frame` on; None if there is none."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_INNER):
        frame = frame.f_back
    return frame


def _checked_by_hand(op, type, ne, src, params, view_of, view_offs, nb):
    """(op, type, ne, src, nb) of `Context.node` called by hand.

    The node is made in a context of its own and compared there with what the builder of the op makes.
    """
    if not is_whole(op) or op not in OP.__members__.values():
        raise ParamError(f"node: {op!r} is not an op; use a member of OP (ggjit.ops.core.record)")
    type = type_of(type, "node: type")
    ne, n_given = check_ne(type, ne)
    src, view_offs = tuple(src), whole(view_offs, "node: view_offs")
    nb = None if nb is None else tuple(whole(n, "node: nb") for n in nb)
    for s in (*src, view_of):
        if s is not None and not isinstance(s, Tensor):
            raise TypeMismatch(f"node: sources and view_of are tensors, got {s!r}")
    if nb is not None and len(nb) != MAX_DIMS:
        raise ShapeError(f"node: nb holds {MAX_DIMS} strides in bytes, got {list(nb)}")
    try:
        _pack(params)
    except (TypeError, ValueError, OverflowError) as e:
        raise ParamError(f"node: params are ints and floats of 32 bits, got {params!r}: {e}") from None
    scratch = Context()
    try:
        with scratch:
            made = scratch.node(op, type, ne, src, params, view_of, view_offs, nb)
        check_node(made, scratch)
    finally:
        scratch.free()
    return OP(op), type, ne[:n_given], src, nb


def check_ne(type, ne):
    """ne as four ints, and how many of them were given; or a ShapeError."""
    if ne.__class__ is tuple and len(ne) == MAX_DIMS:           # the form that most builders pass
        n0, n1, n2, n3 = ne
        if n0.__class__ is n1.__class__ is n2.__class__ is n3.__class__ is int and n0 > 0 and n1 > 0 and n2 > 0 \
                and n3 > 0 and n0 % type.block == 0 and n0 * n1 * n2 * n3 * type.nbytes < _MAX_NBYTES:
            return ne, MAX_DIMS
    try:
        given = tuple(ne) if hasattr(ne, "__iter__") else (ne,)
        if any(isinstance(n, bool) for n in given):
            raise TypeError
        ne = tuple(map(operator.index, given))
    except TypeError:
        raise ShapeError(f"a shape is 1 to {MAX_DIMS} integers (ggml order, ne0 fastest), got {ne!r}") from None
    if not 1 <= len(ne) <= MAX_DIMS:
        raise ShapeError(f"a tensor has 1 to {MAX_DIMS} dimensions, got {list(ne)}")
    n_given = len(ne)
    ne += _ONES[n_given]
    if min(ne) < 0:
        raise ShapeError(f"dimensions must not be negative, got {list(ne)}")
    if ne[0] % type.block:
        raise ShapeError(f"{type!r} rows come in blocks of {type.block} elements, ne0 = {ne[0]} is not a multiple")
    if math.prod(filter(None, ne)) * type.nbytes >= _MAX_NBYTES:        # then no stride is too large either
        raise ShapeError(f"{list(ne)} {type!r} is more than 2^62 bytes")
    return ne, n_given


def _pack(params):
    if not params:
        return NO_PARAMS
    if len(params) > MAX_PARAMS:
        raise ShapeError(f"{len(params)} op params, at most {MAX_PARAMS}")
    words = [_int_bits.unpack(_float_bits.pack(p))[0] if isinstance(p, float | np.floating) else operator.index(p)
             for p in params]
    return (*words, *NO_PARAMS[len(words):])


def from_dlpack(x, ctx=None, name=""):
    """A leaf over the memory of `x` (anything with __dlpack__, on the CPU); as from_numpy: later writes to x are seen.

        gg.from_dlpack(np.ones((2, 3), np.float32))         # or a tensor of torch

    ctx: by default the innermost `with ctx:`, else a new Context.  x must be C-contiguous to be used in place; other
    strides are copied.  Errors: TypeMismatch (no DLPack, another device, a dtype ggjit has no type for).
    """
    return leaf_of_dlpack(_some_context(ctx), x, name)


def tensor(values, ctx=None, name="", type=None):
    """A leaf with these values: a number, a list, an array.

        t = gg.tensor([[1.0, 2.0], [3.0, 4.0]])
        gg.compute(t + 1)

    Python's floats become F32 and its integers I32 (I64 beyond 32 bits); arrays keep their dtype.  Arrays are copied:
    writes to them later are not seen; `from_numpy` uses an array in place.  type: another tensor type or its name,
    "Q8_0".  ctx: as for `from_dlpack`. Errors: TypeMismatch, ShapeError.
    """
    values = array_of(values)
    return from_numpy(_some_context(ctx), values if type is not None else np.array(values, order="C"), name, type)


def _some_context(ctx):
    ctx = innermost() if ctx is None else ctx
    return Context() if ctx is None else ctx


def alloc_ctx_tensors(ctx, target, all=False):
    """Memory for the leaves of `ctx` that have none, in one buffer (above the type's max size: in several).

        w = ctx.new_tensor(gg.F32, (64, 3))
        buffer = gg.alloc_ctx_tensors(ctx, cpu)

    target: a backend or a buffer type.  all=True as ggml: results of ops get memory of their own as well.
    Returns the buffer; None if there was nothing to do; a MultiBuffer when it had to be split.
    Errors: OutOfMemory; nothing is placed and nothing kept then.  Source: ggml_backend_alloc_ctx_tensors.
    """
    buffers = [buf for buf, _ in place_tensors([(getattr(target, "default_buffer_type", target), _missing(ctx, all))])]
    return None if not buffers else buffers[0] if len(buffers) == 1 else MultiBuffer(buffers)


def alloc_ctx_tensors_from_buft_size(ctx, target, all=False):
    """Bytes of the buffers that `alloc_ctx_tensors` with the same arguments would make; allocates nothing.

        gg.alloc_ctx_tensors_from_buft_size(ctx, cpu)

    Source: ggml_backend_alloc_ctx_tensors_from_buft_size.
    """
    return needed_nbytes(getattr(target, "default_buffer_type", target), _missing(ctx, all))


def _missing(ctx, all):
    """The tensors of `ctx` that alloc_ctx_tensors gives memory."""
    ctx._check()
    return [t for t in ctx.tensors
            if t.view_src is None and TABLE.words[t.id, T_BUFFER] < 0 and (all or t.op == OP.NONE)]
