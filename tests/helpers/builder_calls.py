"""Calls of every builder: those of the ops' own test cases, recorded argument by argument, and random changes."""
import collections
import functools
import inspect
import itertools
import math
import sys

import numpy as np

import ggjit as gg
from ggjit.ops.core.errors import GgjitError
from ggjit.ops.core.record import VIEW_OPS
from ggjit.ops.core.spec import Inputs, all_specs
from ggjit.tools.suite.cases.case import Maker, all_cases
from helpers.timing import no_collector

TYPES = (gg.F32, gg.F16, gg.BF16, gg.I32, gg.I64, gg.I8, gg.Q8_0, gg.Q4_K)
AXES = ((1, 0, 2, 3), (0, 2, 1, 3), (2, 0, 3, 1), (3, 2, 1, 0))
NUMBERS = (-1, 0, 1, 2, 3, 7, 64, 2 ** 31 - 1, 2 ** 31, -2 ** 31, 2 ** 63, -2 ** 70, 0.5, -1.0, math.nan, math.inf,
           -math.inf, 1e300)
OBJECTS = (None, "x", b"", [], (1, 2), {}, 1j, True, np.ones((2, 3), np.float32), gg.F32, lambda *a: None)
SIZES = (*range(10), 32, 33, 256)
HUGE_SIDE = 1 << 31
SMALL = 1 << 15                                 # elements a computed graph may have in one tensor
_LEAF = ("a", "b", "c", "q", "k", "v")          # parameters that are tensors, where no case calls the builder
_PLAIN = {"type": gg.F32, "dst_type": gg.F32, "sections": (1, 1, 1, 1), "args": [], "fun": lambda *a: None}


class Leaf(collections.namedtuple("Leaf", "type ne axes")):
    """A tensor of a recorded call; axes: a permutation, or None."""


class Result(collections.namedtuple("Result", "name args")):
    """An argument that has to be the result of another builder."""


_TAKES = {"soft_max_add_sinks": "soft_max_ext", "flash_attn_ext_add_sinks": "flash_attn_ext", "rope_set_offset":
          "rope_ext", "flash_attn_ext_set_prec": "flash_attn_ext", "mul_mat_set_prec": "mul_mat", "mul_mat_set_hint":
          "mul_mat"}


def _as_recipe(value):
    if isinstance(value, list):
        return [_as_recipe(v) for v in value]
    return Leaf(value.type, tuple(value.ne), None) if isinstance(value, gg.Tensor) else value


MAX_CALLS = 4                                   # of a builder, with the same arguments given


@functools.cache
def calls():
    """{builder: [[argument]]} made by the cases of ops and suite: at most four calls for each set of tensors given.

    Elsewhere one with plain arguments.
    """
    builders = {f.__name__: f for spec in all_specs().values() for f in spec.builders}
    of_code, found = collections.defaultdict(list), collections.defaultdict(list)
    for name, f in builders.items():
        of_code[inspect.unwrap(f).__code__].append(name)

    def watch(frame, event, arg):
        code = frame.f_code
        if event == "call" and code in of_code:
            args = [_as_recipe(frame.f_locals[n]) for n in code.co_varnames[:code.co_argcount]]
            for name in of_code[code]:
                if _is_new(args, found[name]):
                    found[name].append(args)
    for build_case in _builds():
        with no_collector():                    # Python 3.11.2's crashes at frames that a profile function looked at
            sys.setprofile(watch)
            try:
                build_case()
            except GgjitError:                  # what ggml has and ggjit has not
                pass
            finally:
                sys.setprofile(None)
    for name, f in builders.items():
        found[name] = found[name] or [[Leaf(gg.F32, (8, 4, 2, 1), None) if p in _LEAF else _PLAIN.get(p, 1)
                                       for p in inspect.signature(f).parameters]]
    for name, of in _TAKES.items():
        found[name] = [[Result(of, own), *args[1:]] for own, args in zip(found[of], itertools.cycle(found[name]))]
    return dict(found)


def _builds():
    """Functions that build the ops' own cases, eight of each, and then up to 24 of the suite's for each op."""
    for spec in all_specs().values():
        for case in itertools.islice(spec.cases() if spec.cases else (), 8):
            yield lambda case=case: case.build(Inputs(gg.Context(), np.random.default_rng(1)))
    of_op = collections.defaultdict(list)
    for case in all_cases():
        of_op[case.op].append(case)
    for some in of_op.values():
        for case in some[::-(-len(some) // 24)]:
            yield lambda case=case: case.build(Maker(gg.Context()))


def _is_new(args, known):
    """Small, of arguments not seen, and one of the first with these tensors given."""
    given = [isinstance(a, Leaf) for a in args]
    return all(math.prod(a.ne) < SMALL for a in args if isinstance(a, Leaf)) and args not in known and sum(
        [isinstance(a, Leaf) for a in other] == given for other in known) < MAX_CALLS


def make_leaf(ctx, rng, recipe, memory):
    """A tensor with values: floats in [0.1, 1), ids 0 ... 2; large ones have no memory.

    memory(t): places the tensor.
    """
    ne = recipe.ne
    t = ctx.new_tensor(recipe.type, ne)
    if math.prod(ne) <= SMALL:
        memory(t)
        if recipe.type.block > 1:
            t.set_bytes(bytes(t.nbytes))
        elif recipe.type.dtype is not None and recipe.type.dtype.kind == "i":
            t.set(rng.integers(0, 3, ne[::-1]).astype(recipe.type.dtype))
        else:
            t.set(rng.uniform(0.1, 1.0, ne[::-1]).astype(np.float32))
    return gg.permute(t, *recipe.axes) if recipe.axes else t


def on_the_host(t):
    gg.alloc_ctx_tensors(t.ctx, gg.init_backend("CPU:n_threads=1"))


def build(name, args, seed, memory=on_the_host):
    """The result tensor of a call; GgjitError is the other outcome allowed."""
    ctx, rng = gg.Context(), np.random.default_rng(seed)

    def made(a):
        return make_leaf(ctx, rng, a, memory) if isinstance(a, Leaf) else \
            getattr(gg, a.name)(*map(made, a.args)) if isinstance(a, Result) else \
            [made(x) for x in a] if isinstance(a, list) else a
    with ctx:
        return getattr(gg, name)(*map(made, args))


def changed(arg, what, *how):
    """An argument after one change; those that do not apply leave it as it is."""
    if isinstance(arg, Result):
        i = next((i for i, a in enumerate(arg.args) if isinstance(a, Leaf | Result)), None)
        if i is None:
            return arg
        return Result(arg.name, [*arg.args[:i], changed(arg.args[i], what, *how), *arg.args[i + 1:]])
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
    if what == "empty":                         # axis how[0] has no elements, axis how[1] very many
        ne[how[1]], ne[how[0]] = HUGE_SIDE, 0
    type = how[0] if what == "type" else arg.type
    ne[0] = -(-ne[0] // type.block) * type.block
    return Leaf(type, tuple(ne), how[0] if what == "axes" and type.block == 1 else arg.axes)


def kernels(out):
    """Names of the kernels that compute a tensor or graph."""
    graph = gg.Graph(out) if isinstance(out, gg.Tensor) else out
    nodes = [t for t in (graph.nodes if isinstance(graph, gg.Graph) else ()) if t.op not in VIEW_OPS and min(t.ne) > 0]
    made = [all_specs()[t.op].kernel for t in nodes]
    return {getattr(make(t, 1), "name", None) if make else None for make, t in zip(made, nodes, strict=True)}


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
