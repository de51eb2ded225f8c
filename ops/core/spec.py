"""One Spec per op: its names, and how it is built, computed and tested.  Every table is derived from the specs.

An op (or a family over one body) is one file in this folder: builders with the shape rule and the errors, a NumPy
float64 reference, the CPU kernels, the test cases.  The file ends with `SPECS = (Spec(...), ...)`; discovery finds it.

What a builder relies on: a tensor handle has `type`, `ne` and `nb` (four entries, ne0 fastest, nb in bytes), `ndim`
(how many of them are axes of its NumPy shape), `ctx`, `name`, `src`, `op_params`; and
`a.ctx.node(op, type, ne, src, params, view_of=, view_offs=, nb=, ndim=)` makes the result; how many axes it has where
`ndim` is left out: engine/tensors/context.py.  `params` are written to consecutive 32-bit slots: a Python int as int32,
a float as float32 bits.  `Inputs` relies on `ctx.new_tensor(type, ne)` and `t._mark(flag)`, too.

Called from outside the op files, `node` checks that the op's builder would make the same (engine/tensors/rebuild.py).
The check calls the builder of the op's own name with the sources and then, for each parameter that the builder's
annotations call a number, the slot at its place.  `rebuild` is for ops of which that is not true: the name of another
builder, or a function of the node `n` that calls one:

    rebuild=lambda n: n.call("top_k", *n.src, n.ne[0])      n.i, n.f: the slots as ints, as floats

An op that ggml does not have gets its number from `own_op` (ops/core/record.py).

A gradient is a function of the op's file that builds ordinary nodes:

    def gradient(g, t, dy):             t: the node; dy: the gradient of its result, F32, contiguous, of its shape
        a, b = t.src
        return lambda: g.mul(dy, b), lambda: g.fit(g.mul(dy, a), b)

One entry a source, called only where that source leads to what is asked for: the gradient with respect to it, F32 of
its shape whatever its type.  None: the result does not change with it (ids, shapes, steps).  `g` has every op builder
by name, and helpers (engine/graphs/backward.py); so no op file imports another for its gradient.

`rows(t)` yields the ways in which t is as good a few rows at a time, as pairs (axis of the result, for each source an
axis or None): row n of the result needs row n of the sources along their axes, and the others as a whole
(ops/core/row_axes.py).  In place of the result's axis: SUM, SUM_IN_ORDER.  The node of a few rows is the same op on
them, unless there is a `chunk(t, ne, src, before, is_last)`: ne and src are its shape and its sources, before is the
node of the chunk before where t is a sum.  The last node of a SUM_IN_ORDER, or all nodes along an axis, have t's bits.

`split(t, *states)` says how the result is cut between devices, its sources being cut by `states` (a SplitState of
ops/core/split.py for each, None for an absent one).  None: the op needs its sources whole.
"""
import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np

from ggjit.ops.core.discovery import NO_OPS, declared
from ggjit.ops.core.record import FLAG_PARAM, OP
from ggjit.ops.core.typed_errors import typed_errors
from ggjit.ops.core.types import F32


@dataclasses.dataclass(frozen=True)
class Kernel:
    """CPU code for one op and type combination.

    name        names the machine code: equal names must mean equal code
    make        () -> plain function (node, ith, nth, sync) -> status; called only when the cache has no such code
    cost        rough cost of the node in nanoseconds on one thread; cheap nodes run on one thread without a barrier
    work_nbytes scratch memory, shared by all threads
    modules     modules the code depends on besides the op's own (type files)
    bits_class  kernels of one `bits_class` give an element of a result the same bits, whatever their tiles; "": see
    name
    column      of a product of one column: its parts (ops/matmul/one_column.py)
    alone       one thread does it all: no other finds work in it
    """
    name: str
    make: Callable
    cost: float
    work_nbytes: int = 0
    modules: tuple = ()
    bits_class: str = ""
    column: object = None
    alone: bool = False


@dataclasses.dataclass(frozen=True)
class Case:
    """A test case: `build(inputs)` makes leaves through `inputs` and returns the result tensor.

    wrong: "" or what ggml's CPU backend gets wrong here, with which the case is then not compared.
    """
    name: str
    build: Callable
    max_nmse: float = 1e-7
    wrong: str = ""


class Inputs:
    """Leaves of a test case, with values drawn from a seeded generator."""

    def __init__(self, ctx, rng):
        self.ctx, self.rng, self.data = ctx, rng, []

    def new(self, type, ne, values=None, lo=-1.0, hi=1.0):
        """A leaf of `ne` (ggml order) with `values` (NumPy order) or uniform floats in [lo, hi)."""
        t = self.ctx.new_tensor(type, ne)
        if values is None:
            values = self.rng.uniform(lo, hi, tuple(reversed(ne))).astype(np.float32)
        self.data.append((t, np.asarray(values).reshape(tuple(reversed(ne)))))
        return t

    def param(self, ne):
        """A leaf of F32 in [0, 1), marked as a trainable parameter."""
        return self.new(F32, ne, lo=0.0)._mark(FLAG_PARAM)

    def ids(self, type, ne, n):
        """Integers in [0, n)."""
        return self.new(type, ne, self.rng.integers(0, n, tuple(reversed(ne))).astype(type.dtype))


@dataclasses.dataclass(frozen=True)
class Spec:
    """Everything the project knows about one op."""
    op: OP
    builders: tuple                         # public functions, exported under their own names
    reference: Callable                     # (t, *sources as arrays in NumPy order) -> array; float64 inside
    kernel: Callable | None = None          # (t, n_threads) -> Kernel, or None where the CPU has none; None: view op
    in_place: bool = False                  # may write over its first fitting source (ggml_op_can_inplace)
    in_place_2023: bool = False             # the same in the sources of November 2023
    gradient: Callable | None = None        # (g, t, dy) -> a function or None per source; None: has no gradient
    rows: Callable | None = None            # (t) -> pairs (axis, axes of the sources); None: its rows meet
    chunk: Callable | None = None           # (t, ne, src, before, is_last) -> node of some rows; None: same op
    split: Callable | None = None           # (t, *states) -> SplitState or None; None: needs its sources whole
    cases: Callable | None = None           # () -> iterable of Case
    indexed: int | None = 0                 # source whose rows the ids name, for the message of a bad id; None: result
    rebuild: Callable | str | None = None   # how a node made by hand is made by a builder; see above
    flops: Callable | None = None           # (t) -> multiplications and additions; None: bytes are what it costs
    moved: Callable | None = None           # (t) -> bytes it reads and writes at least; None: result and sources whole
    updates: tuple = ()                     # numbers of the sources that it writes besides its result
    calls_python: bool = False              # runs a function of the user's, which may have effects of its own
    module: str = ""


@functools.cache
def all_specs():
    """{OP: Spec} of every op file."""
    found = {}
    for module, spec in declared("ggjit.ops", "SPECS", skip=NO_OPS):
        assert spec.op not in found, f"{spec.op.name} has two specs"
        found[spec.op] = dataclasses.replace(spec, module=module)
    return found


def builders():
    """{public name: function} of all ops."""
    return {f.__name__: typed_errors(f) for spec in all_specs().values() for f in spec.builders}


@functools.cache
def ops_with(fact):
    """{OP: what its spec says} of the ops whose spec says something: ops_with("updates")."""
    return {op: getattr(spec, fact) for op, spec in all_specs().items() if getattr(spec, fact)}


@functools.cache
def in_place_table(modern=True):
    """bool array indexed by OP number: may the node take over its source's memory?"""
    ops = ops_with("in_place" if modern else "in_place_2023")
    return np.isin(np.arange(len(OP)), [*ops])


def flops(t):
    """Multiplications and additions of a node; 0 where bytes are what it costs."""
    of = all_specs()[t.op].flops
    return 0 if of is None else of(t)


def elements_nbytes(t):
    """Bytes of the elements of a tensor or view, gaps not counted."""
    return math.prod(t.ne) * t.type.nbytes // t.type.block


def touched_nbytes(t):
    """Bytes a pass over the tensor and its sources moves: the usual cost of elementwise work is 0.1 ns a byte."""
    return elements_nbytes(t) + sum(elements_nbytes(s) for s in t.src if s is not None)


def moved_nbytes(t):
    """Bytes a node has to read and write at least."""
    of = all_specs()[t.op].moved
    return touched_nbytes(t) if of is None else of(t)
