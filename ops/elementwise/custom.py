"""Custom ops: a function of yours as a node of the graph, run by the thread pool.

    def halve(dst, a, ith, nth):                    # arrays in NumPy order; thread ith of nth
        rows = slice(ith * len(dst) // nth, (ith + 1) * len(dst) // nth)
        dst[rows] = a[rows] / 2

    y = gg.map_custom1(x, halve)                    # shape and type of x
    z = gg.custom(gg.F32, (64,), [x, w], f)         # any shape, any sources: f(dst, x, w, ith, nth)

Three kinds of functions:

    a Python function   called with the GIL held, so threads take turns; an exception comes out of the compute
    an @njit function   compiled with the arrays' types, runs in parallel; an exception in it becomes a GgjitError
    a cfunc             int64 (node, ith, nth, sync) returning a status: a kernel as in ops/native/node.py, on addresses

Arrays: sources are read-only; quantised types come as rows of bytes, BF16 as uint16.  They are the tensors' memory
itself and keep it alive, but what they hold after the function has returned is whatever is computed there next: copy
what is needed later.  `n_tasks` limits the threads (-1: all).  Only the CPU runs custom ops; a scheduler knows.
First runs are checked: writes outside the arrays are errors, unwritten results are told (custom_trial.py).
Source: ggml_map_custom1..3, ggml_custom_4d.
"""
import ctypes
import dataclasses
import inspect
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ggjit.ops.core.builders import in_place_pair
from ggjit.ops.core.errors import GgjitError, ParamError, ShapeError, StaleHandle, TypeMismatch, shown_shortly
from ggjit.ops.core.record import MAX_SRC, OP
from ggjit.ops.core.shape import describe, require_param
from ggjit.ops.core.spec import Case, Kernel, Spec
from ggjit.ops.core.types import F16, F32, Tensor, Type
from ggjit.ops.core.weak import WeakValues
from ggjit.ops.core.whole_numbers import is_whole
from ggjit.ops.elementwise.custom_jit import CALLBACK, RAISED, entry_for
from ggjit.ops.elementwise.custom_trial import PythonTrial, error_of

MANY = 1e12                     # cost that makes a plan use all threads
IN_PYTHON = {}                  # thread ident -> start (monotonic seconds) of the user's function it runs in a walk
_keys = itertools.count(1)
_functions = WeakValues()       # key in op_params -> CustomFunction


# ---------------------------------------------------------------- builders
def _map_custom1(a: Tensor, fun: Callable[..., Any], n_tasks: int = -1, userdata: Any = None, in_place: bool = False):
    """fun(dst, a, ith, nth[, userdata]) writes dst, an array of a's type and shape; see the module's text for arrays.

    a: any type [n0, n1, n2, n3]; dst and a come as NumPy arrays, dimensions reversed.  fun: a Python function, an @njit
    function or a cfunc.  n_tasks: how many threads call it, -1 all.  userdata is passed on to a Python function.
    Errors: TypeMismatch (fun), ParamError (n_tasks); what fun raises comes out of the compute.  Source:
    ggml_map_custom1.
    """
    return _build(OP.MAP_CUSTOM1, a.type, a.ne, a.ndim, (a,), fun, n_tasks, userdata, a if in_place else None)


map_custom1, map_custom1_inplace = in_place_pair(_map_custom1)


def _map_custom2(a: Tensor, b: Tensor, fun: Callable[..., Any], n_tasks: int = -1, userdata: Any = None,
                 in_place: bool = False):
    """fun(dst, a, b, ith, nth[, userdata]) writes dst, of a's type and shape; b any tensor.

    fun, n_tasks, userdata and errors as `map_custom1`.  Source: ggml_map_custom2.
    """
    return _build(OP.MAP_CUSTOM2, a.type, a.ne, a.ndim, (a, b), fun, n_tasks, userdata, a if in_place else None)


map_custom2, map_custom2_inplace = in_place_pair(_map_custom2)


def _map_custom3(a: Tensor, b: Tensor, c: Tensor, fun: Callable[..., Any], n_tasks: int = -1, userdata: Any = None,
                 in_place: bool = False):
    """fun(dst, a, b, c, ith, nth[, userdata]) writes dst, of a's type and shape; b, c any tensors.

    fun, n_tasks, userdata and errors as `map_custom1`.  Source: ggml_map_custom3.
    """
    return _build(OP.MAP_CUSTOM3, a.type, a.ne, a.ndim, (a, b, c), fun, n_tasks, userdata, a if in_place else None)


map_custom3, map_custom3_inplace = in_place_pair(_map_custom3)


def custom(type: Type | str, ne: Sequence[int], args: Sequence[Tensor], fun: Callable[..., Any], n_tasks: int = -1,
           userdata: Any = None):
    """fun(dst, *args, ith, nth[, userdata]) with a result of any `type` and shape `ne` (ggml order).

    args: 1 to 10 tensors.  fun, n_tasks, userdata and errors as `map_custom1`; ShapeError for no source or too many.
    Source: ggml_custom_4d.
    """
    args = tuple(args)
    if not 1 <= len(args) <= MAX_SRC:
        raise ShapeError(f"custom takes 1 to {MAX_SRC} sources, got {len(args)}")
    ne = tuple(ne) if hasattr(ne, "__iter__") else (ne,)
    return _build(OP.CUSTOM, type, ne, len(ne), args, fun, n_tasks, userdata)


def custom_4d(type: Type | str, ne0: int, ne1: int, ne2: int, ne3: int, args: Sequence[Tensor],
              fun: Callable[..., Any], n_tasks: int = -1, userdata: Any = None):
    """As `custom`, with ggml's arguments: type, ne0, ne1, ne2, ne3, args, fun, n_tasks, userdata.

    Source: ggml_custom_4d.
    """
    return custom(type, (ne0, ne1, ne2, ne3), args, fun, n_tasks, userdata)


def custom_inplace(a: Tensor, args: Sequence[Tensor], fun: Callable[..., Any], n_tasks: int = -1,
                   userdata: Any = None):
    """fun(dst, a, *args, ith, nth[, userdata]) writes a; returns a view of a.  args: up to 9 further tensors.

    fun, n_tasks, userdata and errors as `map_custom1`.  Source: ggml_custom_inplace.
    """
    if len(args) >= MAX_SRC:
        raise ShapeError(f"custom_inplace takes at most {MAX_SRC - 1} further sources, got {len(args)}")
    return _build(OP.CUSTOM, a.type, a.ne, a.ndim, (a, *args), fun, n_tasks, userdata, a)


def _build(op, type, ne, ndim, src, fun, n_tasks, userdata, view_of=None):
    require_param(is_whole(n_tasks, -1) and n_tasks != 0,
                  f"{op.name.lower()}: n_tasks is -1 (all threads) or positive, got {n_tasks!r}")
    if None in src:
        raise TypeMismatch(f"{op.name.lower()}: source {src.index(None)} is None; the function gets every source as an "
                           f"array, so leave it out (gg.custom takes 1 to {MAX_SRC} sources) or give a tensor")
    f = CustomFunction(fun, userdata)
    f.check_arity(op.name.lower(), len(src))
    key = next(_keys)
    t = src[0].ctx.node(op, type, ne, src, (key & 0x7FFFFFFF, key >> 31, n_tasks), view_of=view_of, ndim=ndim)
    _functions[key] = f
    t._hold("function", f)
    return t


# ---------------------------------------------------------------- functions
class CustomFunction:
    """A user's function and its kind: "python", "njit", "cfunc"."""

    def __init__(self, fun, userdata):
        self.fun, self.userdata = fun, userdata
        if isinstance(fun, ctypes._CFuncPtr):
            self.kind, self.address = "cfunc", ctypes.cast(fun, ctypes.c_void_p).value
        elif hasattr(fun, "address") and hasattr(fun, "native_name"):
            if str(fun._sig) != "(int64, int64, int64, int64) -> int64":
                raise TypeMismatch(f"a cfunc for a custom op has the signature int64(int64 node, int64 ith, int64 nth, "
                                   f"int64 sync), got {fun._sig}")
            self.kind, self.address = "cfunc", fun.address
        elif hasattr(fun, "py_func"):
            self.kind = "njit"
        elif callable(fun):
            self.kind = "python"
        else:
            raise TypeMismatch(f"a custom op takes a function, an @njit function or a cfunc, got {fun!r}")
        if userdata is not None and self.kind != "python":
            raise ParamError(f"userdata goes with Python functions only; close over it in the {self.kind} function")

    def check_arity(self, op, n_src):
        """TypeMismatch, unless it takes as many arguments as it will be called with."""
        if self.kind == "cfunc":
            return
        function = self.fun.py_func if self.kind == "njit" else self.fun
        given = ["dst", *"abcdefghij"[:n_src], "ith", "nth", *["userdata"] * (self.userdata is not None)]
        try:
            inspect.signature(function).bind(*given)
        except TypeError:
            name = getattr(function, "__name__", "the function")
            own = name if name.isidentifier() else "op"
            raise TypeMismatch(f"{op}: {name}{inspect.signature(function)} is called with {len(given)} arguments: "
                               f"write def {own}({', '.join(given)}): ..., dst being the result's array") from None
        except ValueError:              # a built-in function without a signature
            return

    def call(self, arrays, ith, nth):
        extra = () if self.userdata is None else (self.userdata,)
        self.fun(*arrays, ith, nth, *extra)


def function_of(t):
    """The CustomFunction of a custom node."""
    lo, hi = (int(p) for p in t.op_params[:2])
    f = _functions.get(hi << 31 | lo)
    if f is None:
        raise StaleHandle(f"the function of {describe(t)} is gone with its context")
    return f


def _is_weakly_held(function):
    try:
        hash(function)
        return weakref.ref(function) is not None
    except TypeError:                   # a built-in, a list-like callable
        return False


# ---------------------------------------------------------------- arrays
def layout(t):
    """(shape, dtype, strides) of a tensor as its function sees it: one axis at least, so that it can be split."""
    if t.type.block > 1:
        shape = (*reversed(t.ne[1:]), t.type.row_nbytes(t.ne[0]))
        strides = (*reversed(t.nb[1:]), 1)
        dtype = np.dtype(np.uint8)
    else:
        shape, strides = tuple(reversed(t.ne)), tuple(reversed(t.nb))
        dtype = t.type.dtype if t.type.dtype is not None else np.dtype(np.uint16)
    drop = 4 - max(1, t.ndim)
    return shape[drop:], dtype, strides[drop:]


@dataclasses.dataclass(frozen=True, eq=False)
class CustomKernel(Kernel):
    """A kernel with code of its own; `code()` is its address, `raised` the exception of a Python function.

    memory: (arena, byte offset) of the result and the sources; the plan that places them keeps it up to date.
    """
    function: CustomFunction = None
    views: tuple = ()
    n_tasks: int = -1
    memory: list = dataclasses.field(default_factory=list)
    raised: list = dataclasses.field(default_factory=list)
    keep: list = dataclasses.field(default_factory=list)

    def code(self):
        if self.function.kind == "cfunc" and self.n_tasks == -1:
            return self.function.address
        make = {"python": self._python, "njit": self._njit, "cfunc": self._limited}[self.function.kind]
        entry, address = make()
        self.keep.append(entry)
        return address

    def _python(self):
        """A C callback that makes arrays and calls the function with the GIL."""
        # a copy that shares the lists but does not keep the callback, to avoid a reference cycle
        self = dataclasses.replace(self, keep=None)
        trial = PythonTrial(self.function.fun, self.views, self.memory) if _is_weakly_held(self.function.fun) else None

        def entry(node, ith, nth, sync):
            n = nth if self.n_tasks < 0 else min(nth, self.n_tasks)
            if ith >= n:
                return 0
            me, process = threading.get_ident(), os.getpid()
            IN_PYTHON[me] = time.monotonic()
            try:
                arrays = [np.ndarray(shape, dtype, arena, offs, strides)
                          for (shape, dtype, strides), (arena, offs) in zip(self.views, self.memory, strict=True)]
                for a in arrays[1:]:
                    a.flags.writeable = False
                went_well = False
                if trial is not None:
                    trial.begin(arrays[0])
                try:
                    self.function.call(arrays, ith, n)
                    went_well = True
                finally:
                    if trial is not None:
                        trial.end(arrays[0], n, went_well)
                arrays[0].flags.writeable = False           # a kept array must not write into later results
                if nth > 1 and os.getpid() != process:
                    raise GgjitError(f"{self.name} returned in a forked process, where the other {nth - 1} threads "
                                     f"of its computation do not exist; end the child with os._exit")
            except BaseException as e:          # must not cross the C frame; the plan raises it again
                self.raised.append(e)
                return RAISED
            finally:
                IN_PYTHON.pop(me, None)
            return 0
        callback = CALLBACK(entry)
        return callback, ctypes.cast(callback, ctypes.c_void_p).value

    def _njit(self):
        entry = entry_for(self, self.function.fun, self.views, self.n_tasks, self.memory, self.raised)
        return entry, entry.address

    def _limited(self):
        """A cfunc on some of the threads."""
        call, n_tasks = CALLBACK(self.function.address), self.n_tasks

        def entry(node, ith, nth, sync):
            n = min(nth, n_tasks)
            return call(node, ith, n, sync) if ith < n else 0
        callback = CALLBACK(entry)
        self.keep.append(call)
        return callback, ctypes.cast(callback, ctypes.c_void_p).value

    def error(self):
        """The exception to raise for status RAISED."""
        if self.raised:                     # several threads may have raised; an earlier run may have left an exception
            last = self.raised[-1]
            self.raised.clear()
            return shown_shortly(last)
        if self.function.kind != "njit":
            return GgjitError(f"{self.name} returned {RAISED}, the status of a function that raised an exception")
        arrays = [np.ndarray(shape, dtype, arena, offs, strides).copy()
                  for (shape, dtype, strides), (arena, offs) in zip(self.views, self.memory, strict=True)]
        return error_of(self.function.fun, None, arrays, 1)


# ---------------------------------------------------------------- spec
def kernel(t, n_threads):
    f = function_of(t)
    if f.kind == "njit" and any(x.type.block > 1 for x in (t, *t.src)):
        raise TypeMismatch(f"an @njit custom op takes scalar types, got {describe(t)} of "
                           f"{', '.join(describe(s) for s in t.src)}; cast them, or use a Python function")
    if f.kind == "njit" and any(x.type is F16 for x in (t, *t.src)):
        raise TypeMismatch(f"an @njit custom op cannot take float16, which Numba lacks, got {describe(t)} of "
                           f"{', '.join(describe(s) for s in t.src)}; gg.cast(t, gg.F32), or use a Python function")
    n_tasks = int(t.op_params[2])
    return CustomKernel(name=f"custom-{getattr(f.fun, '__name__', 'c')}", make=None, cost=0.0 if n_tasks == 1 else MANY,
                        function=f, views=tuple(layout(x) for x in (t, *t.src)), n_tasks=n_tasks)


def reference(t, *sources):
    """The function itself, once, on float64 arrays (Python and @njit functions)."""
    f = function_of(t)
    out = np.zeros(layout(t)[0])
    arrays = [np.asarray(s).reshape(layout(x)[0]) for s, x in zip(sources, t.src, strict=True)]
    getattr(f.fun, "py_func", f.fun)(out, *arrays, 0, 1, *(() if f.userdata is None else (f.userdata,)))
    return out.reshape(tuple(reversed(t.ne)))


def _split(dst, ith, nth):
    n = len(dst)
    return slice(ith * n // nth, (ith + 1) * n // nth)


def _half(dst, a, ith, nth):
    dst[_split(dst, ith, nth)] = a[_split(dst, ith, nth)] / 2


def _weighted(dst, a, b, ith, nth, w):
    rows = _split(dst, ith, nth)
    dst[rows] = a[rows] + w * b[rows]


def _product(dst, a, b, c, ith, nth):
    rows = _split(dst, ith, nth)
    dst[rows] = a[rows] * b[rows] - c[rows]


def _sums(dst, a, b, ith, nth):
    if ith == 0:
        dst[:] = a.sum() + b.sum()


def cases(op):
    new = lambda inp, ne=(7, 5, 2, 1): inp.new(F32, ne)         # noqa: E731
    if op == OP.MAP_CUSTOM1:
        yield Case("half", lambda inp: map_custom1(new(inp), _half))
        yield Case("half in place, one task", lambda inp: map_custom1_inplace(new(inp), _half, 1))
    elif op == OP.MAP_CUSTOM2:
        yield Case("userdata", lambda inp: map_custom2(new(inp), new(inp), _weighted, 2, 0.5))
        yield Case("in place", lambda inp: map_custom2_inplace(new(inp), new(inp), _weighted, -1, 0.5))
    elif op == OP.MAP_CUSTOM3:
        yield Case("product", lambda inp: map_custom3(new(inp), new(inp), new(inp), _product))
        yield Case("in place", lambda inp: map_custom3_inplace(new(inp), new(inp), new(inp), _product))
    else:
        yield Case("sums", lambda inp: custom(F32, (3,), [new(inp), new(inp, (4, 4))], _sums))
        yield Case("in place", lambda inp: custom_inplace(new(inp), [new(inp), new(inp)], _product))


def _spec(op, *builders):
    return Spec(op=op, builders=builders, reference=reference, kernel=kernel, cases=lambda: cases(op),
                calls_python=True)


SPECS = (_spec(OP.MAP_CUSTOM1, map_custom1, map_custom1_inplace),
         _spec(OP.MAP_CUSTOM2, map_custom2, map_custom2_inplace),
         _spec(OP.MAP_CUSTOM3, map_custom3, map_custom3_inplace),
         _spec(OP.CUSTOM, custom, custom_4d, custom_inplace))
