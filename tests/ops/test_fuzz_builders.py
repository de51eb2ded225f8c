"""Every builder under wrong shapes, types, strides and parameters: a typed error or the right numbers, never a crash.

The calls that the ops' own test cases make are recorded, argument by argument, and changed at random.
"""
import collections
import functools
import inspect
import math
import sys
import warnings

import numpy as np
import pytest
from helpers.cases import expected, nmse
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import ggjit as gg
from ggjit.ops.core.errors import GgjitError
from ggjit.ops.core.record import OP, VIEW_OPS
from ggjit.ops.core.spec import Inputs, all_specs, builders

TYPES = (gg.F32, gg.F16, gg.BF16, gg.I32, gg.I64, gg.I8, gg.Q8_0, gg.Q4_K)
AXES = ((1, 0, 2, 3), (0, 2, 1, 3), (2, 0, 3, 1), (3, 2, 1, 0))
NUMBERS = (-1, 0, 1, 2, 3, 7, 64, 2 ** 31 - 1, 2 ** 31, -2 ** 31, 2 ** 63, -2 ** 70, 0.5, -1.0, math.nan, math.inf,
           -math.inf, 1e300)
OBJECTS = (None, "x", b"", [], (1, 2), {}, 1j, True, np.ones((2, 3), np.float32), gg.F32, lambda *a: None)
USERS = (OP.MAP_CUSTOM1, OP.MAP_CUSTOM2, OP.MAP_CUSTOM3, OP.CUSTOM)
IN_CI, SLOW = 25, 500                           # examples of a builder
SMALL = 1 << 15                                 # elements a computed graph may have in one tensor
LEAF = ("a", "b", "c", "q", "k", "v")           # parameters that are tensors, where no case calls the builder
PLAIN = {"type": gg.F32, "dst_type": gg.F32, "sections": (1, 1, 1, 1), "args": [], "fun": lambda *a: None}


def raw_builders():
    return {f.__name__: f for spec in all_specs().values() for f in spec.builders}


# ---------------------------------------------------------------- calls known to be right
class Leaf(collections.namedtuple("Leaf", "type ne axes")):
    """A tensor of a recorded call; axes: a permutation, or None."""


def as_recipe(value):
    if isinstance(value, list):
        return [as_recipe(v) for v in value]
    return Leaf(value.type, tuple(value.ne), None) if isinstance(value, gg.Tensor) else value


@functools.cache
def calls():
    """{builder: [[argument]]} of at most four calls each, made by the cases; elsewhere one with plain arguments."""
    of_code, found = collections.defaultdict(list), collections.defaultdict(list)
    for name, f in raw_builders().items():
        of_code[f.__code__].append(name)

    def watch(frame, event, arg):
        code = frame.f_code
        if event == "call" and code in of_code:
            args = [as_recipe(frame.f_locals[n]) for n in code.co_varnames[:code.co_argcount]]
            small = all(math.prod(a.ne) < SMALL for a in args if isinstance(a, Leaf))
            for name in of_code[code]:
                if small and len(found[name]) < 4 and args not in found[name]:
                    found[name].append(args)
    for spec in all_specs().values():
        for i, case in enumerate(spec.cases() if spec.cases else ()):
            if i < 8:
                sys.setprofile(watch)
                try:
                    case.build(Inputs(gg.Context(), np.random.default_rng(1)))
                finally:
                    sys.setprofile(None)
    for name, f in raw_builders().items():
        found[name] = found[name] or [[Leaf(gg.F32, (8, 4, 2, 1), None) if p in LEAF else PLAIN.get(p, 1)
                                       for p in inspect.signature(f).parameters]]
    return dict(found)


def leaf(ctx, rng, recipe):
    """A tensor with values: floats in [0.1, 1), ids 0 ... 2; large ones have no memory."""
    ne = recipe.ne
    if math.prod(ne) > SMALL:
        t = ctx.new_tensor(recipe.type, ne)
    elif recipe.type.dtype is not None and recipe.type.dtype.kind == "i":
        t = gg.from_numpy(ctx, rng.integers(0, 3, ne[::-1]).astype(recipe.type.dtype))
    else:
        t = ctx.new_tensor(recipe.type, ne)
        gg.alloc_ctx_tensors(ctx, gg.init_backend("CPU:n_threads=1"))
        if t.type.block > 1:
            t.set_bytes(bytes(t.nbytes))
        else:
            t.set(rng.uniform(0.1, 1.0, ne[::-1]).astype(np.float32))
    return gg.permute(t, *recipe.axes) if recipe.axes else t


def build(name, args, seed):
    """The result tensor of a call; GgjitError is the other outcome allowed."""
    ctx, rng = gg.Context(), np.random.default_rng(seed)
    def made(a):
        return leaf(ctx, rng, a) if isinstance(a, Leaf) else [made(x) for x in a] if isinstance(a, list) else a
    with ctx:
        return getattr(gg, name)(*map(made, args))


@functools.cache
def known_kernels():
    """Names of the kernels of unchanged calls: what other tests compile anyway."""
    found = set()
    for name, some in calls().items():
        for args in some:
            try:
                found |= kernels(build(name, args, 0))
            except GgjitError:
                continue
    return found


def kernels(out):
    nodes = gg.Graph(out).nodes if isinstance(out, gg.Tensor) else []
    nodes = [t for t in nodes if t.op not in VIEW_OPS and min(t.ne) > 0]
    made = [all_specs()[t.op].kernel for t in nodes]
    return {getattr(make(t, 1), "name", None) if make else None for make, t in zip(made, nodes, strict=True)}


# ---------------------------------------------------------------- changes
SIZE = st.integers(0, 9) | st.sampled_from([32, 33, 256])
CHANGE = st.one_of(
    st.tuples(st.just("size"), st.integers(0, 3), SIZE), st.tuples(st.just("type"), st.sampled_from(TYPES)),
    st.tuples(st.just("axes"), st.sampled_from(AXES)), st.tuples(st.just("number"), st.sampled_from(NUMBERS)),
    st.tuples(st.just("object"), st.sampled_from(OBJECTS)),
    st.tuples(st.just("leaf"), st.lists(SIZE, min_size=4, max_size=4)))


def changed(arg, what, *how):
    """An argument after one change; those that do not apply leave it as it is."""
    if what == "leaf":
        return Leaf(gg.F32, tuple(how[0]), None)
    if what == "number":
        return how[0] if not isinstance(arg, Leaf) else arg
    if what == "object":
        return how[0]
    if not isinstance(arg, Leaf):
        return arg
    ne = list(arg.ne)
    if what == "size":
        ne[how[0]] = how[1]
    type = how[0] if what == "type" else arg.type
    ne[0] = -(-ne[0] // type.block) * type.block
    return Leaf(type, tuple(ne), how[0] if what == "axes" and type.block == 1 else arg.axes)


def fuzzed(examples, **how):
    """A test of every builder with so many examples each."""
    def decorate(f):
        how_many = settings(max_examples=examples, deadline=None, database=None, phases=(Phase.generate, Phase.shrink),
                            **how)
        return pytest.mark.parametrize("name", sorted(builders()))(how_many(f))
    return decorate


@fuzzed(IN_CI, derandomize=True)
@given(st.data())
def test_typed_error_or_right(name, data):
    try_one(name, data)


@pytest.mark.slow
@fuzzed(SLOW)
@given(st.data())
def test_typed_error_or_right_at_random(name, data):
    """Other examples in every run; a failure prints its own."""
    try_one(name, data)


def try_one(name, data):
    args = list(data.draw(st.sampled_from(calls()[name])))
    for _ in range(data.draw(st.integers(0, 2)) if args else 0):
        i = data.draw(st.integers(0, len(args) - 1))
        args[i] = changed(args[i], *data.draw(CHANGE))
    try:
        out = build(name, args, data.draw(st.integers(0, 9)))
    except GgjitError as e:
        assert len(str(e)) > 15
        return
    if isinstance(out, gg.Tensor):
        check(out)


def check(out):
    """Computes what is small and needs no kernel of its own; floats of single ops are compared with the reference.

    Functions of the user's own may raise what they like and are only built; windows of acc and set whose rows overlap
    are undefined, so those are not compared.
    """
    graph = gg.Graph(out)
    if max(math.prod(t.ne) for t in (*graph.nodes, *graph.leafs)) > SMALL or not kernels(out) <= known_kernels():
        return
    computed = [t for t in graph.nodes if t.op not in VIEW_OPS]
    if any(t.op in USERS for t in computed):
        return
    single = len(computed) == 1 and computed[0].id == out.id and out.op not in (OP.ACC, OP.SET)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)         # means of no values
        try:
            want = expected(out) if single else None
        except IndexError:                                      # an id that the kernel has to refuse
            if min(out.ne) > 0:                                 # nodes without elements are not computed, as in ggml
                with pytest.raises(gg.IndexRangeError, match="is out of range"):
                    gg.compute(out)
            return
    try:
        got = gg.compute(out)
    except GgjitError as e:
        assert len(str(e)) > 15
        return
    assert got.size == math.prod(out.ne)
    if want is None or out.type.dtype is None or out.type.dtype.kind != "f" or not got.size:
        return
    if np.isfinite(want).all() and np.abs(want).max() < 1e4:
        assert nmse(got.reshape(-1).astype(np.float64), np.asarray(want, np.float64).reshape(-1)) < 5e-4
