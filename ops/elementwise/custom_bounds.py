"""A bounds-checked copy of a user's @njit function, and whether every run of the function needs the checks.

`bounds_checked(f)` compiles f again with bounds checks, and with it every @njit function that f calls by name or as
`module.name`: Numba checks only what is compiled so.

`indexes_by_values(f, n)` says whether an index of f depends on values that it reads, as in `dst[i] = a[rows[i]]`.  Runs
that went well say nothing of later ones then.  It follows Numba's code before types: values read from the first n
arguments are marked, so is all that is computed from them, and what is computed where a marked value decides whether it
is, as in `if a[i] == 0: break`, until nothing new is marked.  Where a marked value is written to a list or an array, so
are all variables that may lie in its memory: other names, what it is a view of.  Shapes and lengths are not values,
but those of what is made here may depend on some: `np.zeros(int(a[0]))`, `np.nonzero(a)`, a list.  Then any index of it
counts.  Numbers from outside are marked, too: random ones, and results of functions of C and of unknown functions.
Runs of a function that catches exceptions say nothing either: it may have caught an IndexError.
"""
import types
import weakref

import numpy as np

_SHAPES = ("shape", "strides", "size", "ndim", "itemsize", "nbytes")
# functions of NumPy whose result may lie in the memory of an argument
_VIEWS = {"asarray", "ascontiguousarray", "asfortranarray", "atleast_1d", "atleast_2d", "atleast_3d", "diagonal",
          "expand_dims", "ravel", "reshape", "transpose"}
# methods and functions whose results are as long as their first array and their other arguments say; NumPy's ufuncs
# are as long as their arrays
_AS_LONG = {"argsort", "astype", "copy", "cumsum", "flatten", "sort", "empty_like", "full_like", "ones_like",
            "zeros_like"} | _VIEWS
# Numba's operations whose result may be a part of their `value`
_PARTS = {"getattr", "getitem", "static_getitem", "getiter", "iternext", "pair_first", "exhaust_iter", "cast"}
_MAKERS = "numpy", "numba", "builtins"          # modules whose functions make arrays, lists, sets, dicts
# modules whose functions give the same result for the same arguments, and parts of them whose functions do not
_PURE, _IMPURE = {*_MAKERS, "math", "cmath", "_operator"}, ("numpy.random", "numba.core.ccallback")
_NOT_KEPT = ("boundscheck", "parallel", "cache", "nopython")
_copies = weakref.WeakKeyDictionary()       # @njit function -> its checked copy
_drawing = weakref.WeakKeyDictionary()      # @njit function -> does it use numbers from outside?


def _is_jitted(x):
    return hasattr(x, "py_func") and hasattr(x, "targetoptions")


# ---------------------------------------------------------------- copies
def bounds_checked(function):
    """The @njit function compiled with bounds checks, its helpers too; the same copy for every call."""
    if function not in _copies:
        _copies[function] = _copy(function, {})
    return _copies[function]


def _copy(function, made):
    from numba import njit
    if id(function) in made:
        return made[id(function)]
    old = function.py_func
    cells = tuple(types.CellType() for _ in old.__closure__ or ())
    names = {"__builtins__": old.__globals__["__builtins__"], "__name__": old.__module__}
    new = types.FunctionType(old.__code__, names, old.__name__, old.__defaults__, cells or None)
    new.__kwdefaults__ = old.__kwdefaults__
    options = {k: v for k, v in function.targetoptions.items() if k not in _NOT_KEPT and v is not None}
    made[id(function)] = copy = njit(**options, boundscheck=True)(new)
    used = _names_in(old.__code__)              # set after `copy` is known: functions may call themselves
    names |= {k: _checked(v, used, made) for k, v in old.__globals__.items() if k in used}
    for cell, was in zip(cells, old.__closure__ or (), strict=True):
        cell.cell_contents = _checked(was.cell_contents, used, made)
    return copy


def _names_in(code):
    """Names that a code object and those in it look up: globals, and attributes of modules."""
    return set(code.co_names).union(*(_names_in(c) for c in code.co_consts if isinstance(c, types.CodeType)))


def _checked(value, used, made):
    """A jitted function's copy; a module whose used jitted functions are copies; any other value itself."""
    if _is_jitted(value):
        return _copy(value, made)
    if isinstance(value, types.ModuleType):
        jitted = {k: v for k, v in vars(value).items() if k in used and _is_jitted(v)}
        if jitted:
            module = types.ModuleType(value.__name__)
            vars(module).update(vars(value), **{k: _copy(v, made) for k, v in jitted.items()})
            return module
    return value


# ---------------------------------------------------------------- indices
def indexes_by_values(function, n):
    """Does an index of the @njit function, or of one that it calls, depend on values in its first n arguments?"""
    from numba.core.errors import NumbaError
    try:
        return _depends(function, frozenset(range(n)), frozenset(), set())
    except NumbaError:                          # the compiler says what is wrong with it
        return True


def _depends(function, marked_args, sized_args, seen):
    """sized_args: arguments whose lengths depend on values."""
    from numba.core.compiler import run_frontend
    asked = function, marked_args, sized_args
    if asked in seen:
        return False
    seen.add(asked)
    return _ReadValues(run_frontend(function.py_func), marked_args, sized_args).found(seen)


def _is_impure(called):
    """May a function that is not jitted give other results for the same arguments?"""
    module = str(getattr(called, "__module__", None))
    return not isinstance(called, type | np.ufunc) and (module.split(".")[0] not in _PURE or
                                                        module.startswith(_IMPURE))


def _draws(function):
    """Does the @njit function, or one that it calls, use numbers from outside?"""
    from numba.core.compiler import run_frontend
    if function not in _drawing:
        _drawing[function] = False              # where it calls itself
        _drawing[function] = _ReadValues(run_frontend(function.py_func), frozenset(), frozenset()).draws()
    return _drawing[function]


class _ReadValues:
    """Marked variables of one function's Numba code."""

    def __init__(self, code, marked_args, sized_args):
        from numba.core.ir_utils import build_definitions
        self.code, self.args, self.sized_args = code, marked_args, sized_args
        self.definitions = build_definitions(code.blocks)
        self.statements = [(label, s) for label, block in code.blocks.items() for s in block.body]
        self.marked, self.decided = set(), set()

    def found(self, seen):
        """Is a marked variable an index, or indexed what is as long as values say, here or in a function called from
        here?"""
        from numba.core import ir
        before = ()
        while before != (len(self.marked), len(self.decided)):
            before = len(self.marked), len(self.decided)
            for _, s in self.statements:
                if isinstance(s, ir.Assign) and self._is_marked(s.value):
                    self.marked.add(s.target.name)
                    self.marked |= self._written_by(s.value)
                elif isinstance(s, ir.SetItem) and self._is_marked(s.value):
                    self.marked |= self._memory_of(s.target.name, set())
            self._mark_decided()
        return any(self._indexes(s, seen) for _, s in self.statements)

    def _is_marked(self, value):
        from numba.core import ir
        if isinstance(value, ir.Arg):
            return value.index in self.args
        if isinstance(value, ir.Var):
            return value.name in self.marked
        if not isinstance(value, ir.Expr):
            return False                        # a constant, a global
        if value.op == "getattr" and value.attr in _SHAPES:
            return self._is_sized_by_values(value.value.name)
        if value.op == "call" and self._called(value) is len:
            return any(self._is_sized_by_values(v.name) for v in value.args)
        return any(v.name in self.marked for v in value.list_vars()) or self._is_from_outside(value)

    def draws(self):
        from numba.core import ir
        return any(isinstance(s, ir.Assign) and self._is_from_outside(s.value) for _, s in self.statements)

    def _is_from_outside(self, value):
        """Is it a call whose result arguments alone do not decide?"""
        from numba.core import ir
        if not (isinstance(value, ir.Expr) and value.op == "call"):
            return False
        called = self._called(value)
        if called is None:
            return not self._owner(value)       # methods of arrays and lists compute from their values
        return _draws(called) if _is_jitted(called) else _is_impure(called)

    def _is_sized_by_values(self, name, seen=None):
        """May the length of a variable depend on marked values?"""
        seen = set() if seen is None else seen
        if name in seen or name not in self.marked:
            return False
        seen.add(name)
        names = {}
        made = self._origins(name, names)
        return len(made) > 1 and not self.decided.isdisjoint(names) or any(self._makes_size(x, seen) for x in made)

    def _origins(self, name, found):
        """What a variable was assigned, other names followed, without what `x += ...` leaves."""
        from numba.core import ir
        if name not in found:
            found[name] = []
            for made in self.definitions.get(name, ()):
                if isinstance(made, ir.Expr) and made.op == "inplace_binop":
                    made = made.lhs
                if isinstance(made, ir.Var):
                    self._origins(made.name, found)
                else:
                    found[name].append(made)
        return [x for made in found.values() for x in made]

    def _makes_size(self, made, seen):
        """May the length of what is made so depend on marked values?"""
        from numba.core import ir
        if isinstance(made, ir.Arg):
            return made.index in self.sized_args
        if not isinstance(made, ir.Expr):
            return False                        # a constant
        if made.op in _PARTS:
            return self._is_sized_by_values(made.value.name, seen)
        if made.op in ("binop", "unary", "build_tuple"):
            return any(self._is_sized_by_values(v.name, seen) for v in made.list_vars())
        if made.op != "call":
            return True                         # a list, a set: as long as what was appended
        called, given = self._called(made), [*self._owner(made), *made.args, *(v for _, v in made.kws)]
        name = getattr(called, "__name__", None) or getattr(self._defined(made.func), "attr", "")
        n = len(given) if isinstance(called, np.ufunc) else int(name in _AS_LONG and not _is_jitted(called))
        return isinstance(called, type) or any(self._is_sized_by_values(v.name, seen) for v in given[:n]) \
            or any(v.name in self.marked for v in given[n:])

    def _written_by(self, value):
        """Lists and arrays made here that `x += ...` or a call may write to: arguments, and what it is a method of."""
        from numba.core import ir
        if not isinstance(value, ir.Expr) or value.op not in ("call", "inplace_binop"):
            return set()
        written = [value.lhs] if value.op == "inplace_binop" else [*value.args, *(v for _, v in value.kws),
                                                                    *self._owner(value)]
        memory = [self._memory_of(v.name, set()) for v in written]
        return set().union(*(names for names in memory if any(map(self._is_made_here, names))))

    def _is_made_here(self, name):
        """Is it, on one way at least, a list, a tuple or an array that this function or one it calls has made?"""
        from numba.core import ir
        return any(isinstance(made, ir.Expr) and (made.op.startswith("build_") or made.op == "call" and (
            _is_jitted(self._called(made)) or str(getattr(self._called(made), "__module__", "")).startswith(_MAKERS)))
            for made in self.definitions.get(name, ()))

    def _memory_of(self, name, found):
        """`found` and the names of all variables in whose memory a variable may lie."""
        if name not in found:
            found.add(name)
            for made in self.definitions.get(name, ()):
                for v in self._viewed(made):
                    self._memory_of(v.name, found)
        return found

    def _viewed(self, made):
        """The variables of which what is assigned may be another name, a view, or an item."""
        from numba.core import ir
        if isinstance(made, ir.Var):
            return [made]
        if not isinstance(made, ir.Expr):
            return []
        if made.op == "call":
            called = self._called(made)
            views = _is_jitted(called) or getattr(called, "__name__", "") in _VIEWS
            return [*self._owner(made), *(made.args if views else ())]
        if made.op.startswith("build_"):
            return made.list_vars()
        return [made.value] if made.op in _PARTS and not (made.op == "getattr" and made.attr in _SHAPES) else []

    def _owner(self, call):
        """[the variable of which it calls a method]"""
        from numba.core import ir
        func = self._defined(call.func)
        is_method = self._called(call) is None and isinstance(func, ir.Expr) and func.op == "getattr"
        return [func.value] if is_method else []

    def _mark_decided(self):
        """Mark what is assigned or written where a marked value decides whether it is.  A name, or a tuple of names,
        for what was computed elsewhere is not marked if it is read there alone."""
        from numba.core import ir
        from numba.core.analysis import compute_cfg_from_blocks
        graph = compute_cfg_from_blocks(self.code.blocks)
        for label, s in self.statements:
            if isinstance(s, ir.Branch) and s.cond.name in self.marked:
                inside = _between(graph, label)
                assigned = [t for at, t in self.statements if at in inside and isinstance(t, ir.Assign)]
                self.decided |= {t.target.name for t in assigned}
                outside = {v.name for at, t in self.statements if at not in inside for v in t.list_vars()}
                self.marked |= {t.target.name for t in assigned} & outside
                self.marked |= {t.target.name for t in assigned if not _only_names(t.value)}
                self.marked.update(*(self._written_by(t.value) for t in assigned))
                self.marked.update(*(self._memory_of(t.target.name, set()) for at, t in self.statements
                                     if at in inside and isinstance(t, ir.SetItem)))

    def _defined(self, variable):
        """What is assigned to a variable, where that is one thing; else None."""
        found = self.definitions.get(variable.name, [])
        return found[0] if len(found) == 1 else None

    def _named(self, variable):
        """What Python object a variable is, where it is another name of a global one or of a module's attribute."""
        from numba.core import ir
        value = self._defined(variable)
        if isinstance(value, ir.Var):
            return self._named(value)
        if isinstance(value, ir.Expr) and value.op == "getattr":
            of = self._named(value.value)
            return getattr(of, value.attr, None) if isinstance(of, types.ModuleType | type) else None
        return value.value if isinstance(value, (ir.Global, ir.FreeVar)) else None

    def _called(self, call):
        """What a call calls, where that is a name or an attribute of a module; else None."""
        return self._named(call.func)

    def _is_shape(self, v):
        from numba.core import ir
        of = self._defined(v)
        return isinstance(of, ir.Expr) and of.op == "getattr" and of.attr in _SHAPES

    def _is_short_by_values(self, v):
        """Is it an array whose length may depend on marked values?  Lists check all indices themselves."""
        is_list = all(getattr(made, "op", "") == "build_list" for made in self._origins(v.name, {}))
        return self._is_sized_by_values(v.name) and not is_list

    def _indexes(self, s, seen):
        from numba.core import ir
        from numba.core.unsafe.eh import mark_try_block
        if isinstance(s, ir.SetItem):
            return s.index.name in self.marked or self._is_short_by_values(s.target)
        value = s.value if isinstance(s, ir.Assign) else None
        if not isinstance(value, ir.Expr):
            return getattr(value, "value", None) is mark_try_block or isinstance(s, ir.EnterWith)
        if value.op == "getitem":
            return not self._is_shape(value.value) and (
                value.index.name in self.marked or self._is_short_by_values(value.value))
        if value.op == "make_function":         # a function within the function: not followed
            return True
        called = self._called(value) if value.op == "call" else None
        if not _is_jitted(called):              # which function an unknown one is, is not followed
            return value.op == "call" and called is None and not self._owner(value)
        given = frozenset(k for k, v in enumerate(value.args) if v.name in self.marked)
        sized = frozenset(k for k, v in enumerate(value.args) if self._is_sized_by_values(v.name))
        by_name = any(v.name in self.marked for _, v in value.kws) or value.vararg is not None
        return by_name or _depends(called, given, sized, seen)


def _only_names(value):
    from numba.core import ir
    return isinstance(value, ir.Var) or isinstance(value, ir.Expr) and value.op == "build_tuple"


def _between(graph, label):
    """Blocks that may run after `label` and before it is past: up to those that always follow."""
    always = graph.post_dominators()[label] - {label}
    found, todo = set(), [label]
    while todo:
        for after, _ in graph.successors(todo.pop()):
            if after not in always and after not in found:
                found.add(after)
                todo.append(after)
    return found
