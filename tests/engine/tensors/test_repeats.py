"""A call like an earlier one makes the node that the checked builder makes, and fails as it does."""
import contextlib
import gc
import itertools
import re
import sys
import weakref

import numpy as np
import pytest
from helpers.builder_calls import Leaf, Result, calls
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ggjit as gg
from ggjit.core.arguments import with_type_names
from ggjit.core.table import TABLE
from ggjit.ops.core.errors import GgjitError
from ggjit.ops.core.record import T_SRC
from ggjit.ops.core.spec import builders as checked_builders
from ggjit.tensors import repeats
from ggjit.tensors.tensor import Tensor

LOOKED_AT = ("op", "src", "op_params", "param_floats", "view_src", "view_offs", "base", "flags", "name", "buffer",
             "offs")


def looked_at(name, seen):
    def get(t):
        if sys._getframe(1).f_globals["__name__"].startswith("ggjit.ops."):
            seen.append(name)
        return getattr(Tensor, name).__get__(t)
    return property(get)


def arguments(recipes):
    """Each tensor in a context of its own."""
    def made(a):
        if isinstance(a, Result):
            return checked_builders()[a.name](*arguments(a.args))
        if not isinstance(a, Leaf):
            return [made(x) for x in a] if isinstance(a, list) else a
        t = gg.Context().new_tensor(a.type, a.ne)
        return gg.permute(t, *a.axes) if a.axes else t
    return [made(a) for a in recipes]


def facts(t, args):
    """What the node of a call with these arguments is, the arguments by their places."""
    place = {id(x): i for i, x in enumerate(args)}
    row = TABLE.words[t.id].tolist()
    return (row[:3], row[4:T_SRC], row[32:34], t.op, t.type, t.ne, t.nb, t.ndim, t.view_offs, t.name, t._holds,
            [None if s is None else place[id(s)] for s in t.src], [x.ctx is t.ctx for x in tensors(args)],
            None if t.view_src is None else [x.base is t.view_src for x in tensors(args)],
            row[20:30] == [*(-1 if s is None else s.id for s in t.src), *(-1,) * (10 - len(t.src))],
            row[30] == (-1 if t.view_src is None else t.view_src.id), row[34] == t.ctx.id)


def tensors(args):
    return [x for x in args if isinstance(x, Tensor)]


def looks_further(builder):
    return getattr(builder, "looks_further", False)


def built(name, recipes):
    """(result, arguments) of the checked builder; None where it refuses them."""
    args = arguments(recipes)
    try:
        return checked_builders()[name](*args), args
    except GgjitError:
        return None


def test_every_kept_call_gives_the_builders_node():
    """Of every builder two calls that its cases make; only builders that are called anew look at more than layouts."""
    kept, lookers, n, seen = set(), set(), 0, []
    ref = type("Watched", (Tensor,), {"__slots__": (), **{x: looked_at(x, seen) for x in LOOKED_AT}})
    for name, some in calls().items():
        repeated = repeats.repeated(checked_builders()[name])
        for recipes in some[:2]:
            seen.clear()
            watched = arguments(recipes)
            for t in tensors(watched):
                object.__setattr__(gg.set_param(t), "__class__", ref)
            try:
                checked_builders()[name](*watched)
            except GgjitError:
                seen[:] = set(seen) - {"name"}          # which the message says
            if seen:
                lookers.add(name)
            made = built(name, recipes)
            if made is None or repeats._kept(*made) is None:
                continue
            first, again = arguments(recipes), arguments(recipes)
            want = facts(*made)
            assert facts(repeated(*first), first) == want == facts(repeated(*again), again), name
            kept.add(name)
            n += 1
    assert len(kept) > 150 and n > 300, (len(kept), n)
    lookers.add("mul_mat_set_prec")                     # its plain call is refused before it looks
    assert lookers == {name for name, f in checked_builders().items() if looks_further(f)}


def test_flags_and_nodes_are_looked_at_every_time():
    ctx = gg.Context()
    a, grad, one = (ctx.new_tensor(gg.F32, (2,)) for _ in range(3))
    gg.opt_step_sgd(gg.set_param(a), grad, one)
    with pytest.raises(gg.ShapeError, match="must be marked as a parameter"):
        gg.opt_step_sgd(one, grad, one)
    x, y, sinks = (ctx.new_tensor(gg.F32, (1,)) for _ in range(3))
    _ = gg.soft_max_add_sinks(gg.soft_max_ext(x, None, 1.0, 0.0), x)
    t = gg.soft_max_add_sinks(gg.soft_max_ext(y, None, 5.0, 0.0), sinks)
    assert t.src == (y, None, sinks) and t.param_floats[0] == 5


def test_what_is_shared_cannot_be_changed():
    t = gg.Context().new_tensor(gg.F32, (4, 3))
    with pytest.raises(gg.ReadOnly, match="many tensors share it"):
        t.layout.ne = (3, 4, 1, 1)


def test_calls_are_told_apart_by_the_bits_of_their_numbers():
    x = gg.Context().new_tensor(gg.F32, (4, 3))
    for numbers in ((0.0, -0.0, 0, False, 1.0, 1, True), (float("nan"), -float("nan"))):
        for factor in numbers * 2:
            want = checked_builders()["scale"](x, factor)
            assert gg.scale(x, factor).op_params.tobytes() == want.op_params.tobytes(), factor
    assert gg.add(x, x).src == (x, x)
    y = x.ctx.new_tensor(gg.F32, (4, 3))
    assert gg.add(x, y).src == (x, y) and gg.add(y, x).src == (y, x) and gg.add(y, y).src == (y, y)
    assert gg.cast(x, "F16").type is gg.cast(x, gg.F16).type is gg.cast(y, "F16").type is gg.F16


def test_views_of_views_and_the_place_in_the_program():
    x, where = gg.Context().new_tensor(gg.F32, (4, 6)), []
    for row in (1, 2, 1):
        v = gg.view_2d(x, 4, 3, 16, 16 * row)
        where.append((gg.view_1d(v, 4, 16), sys._getframe().f_lineno))
        assert gg.view_1d(v, 4, 16).view_offs == 16 * (row + 1)
    for t, line in where:
        assert t.made_at == (__file__, line) and t.view_src is x


@pytest.mark.parametrize("within", [False, True])
def test_tensors_that_are_gone_are_refused_as_before(within):
    ctx, other = gg.Context(), gg.Context()
    a, b = (c.new_tensor(gg.F32, (4,), n) for c, n in ((ctx, "a"), (other, "b")))
    for _ in range(2):
        kept = [gg.add(a, b), gg.reshape_2d(b, 2, 2)]
    assert kept[0].ctx is ctx
    other.free()
    with pytest.raises(gg.StaleHandle, match="b belongs to a Context that was freed"):
        gg.add(a, b)
    if within:
        gone = gg.Context()
        with pytest.raises(gg.StaleHandle, match="this Context was freed"), gone:
            gone.free()
            gg.add(a, a)
    assert gg.add(a, a).ctx is ctx


def test_a_view_is_gone_with_what_it_views():
    """Else it would read and write the tensor that has the row of the table now."""
    ctx, other, later = gg.Context(), gg.Context(), gg.Context()
    base = gg.from_numpy(ctx, np.arange(8, dtype=np.float32))
    with other:
        v = gg.view_1d(base, 4, 0)
        gg.neg(v), gg.view_1d(v, 2, 0)
    ctx.free()
    new = [gg.from_numpy(later, np.full(8, k, np.float32)) for k in range(3)]
    for use in (v.numpy, v.bytes, lambda: v.set(np.ones(4)), lambda: v.buffer, lambda: gg.neg(v),
                lambda: gg.view_1d(v, 2, 0), lambda: gg.view_1d(v, 2, 4)):
        with pytest.raises(gg.StaleHandle, match="is a view of a tensor, which belongs to a Context that was freed"):
            use()
    assert [t.numpy()[0] for t in new] == [0, 1, 2]


def test_flags_and_parameters_of_a_tensor_that_is_gone_are_refused():
    """Else they would be those of the tensor that has the row of the table now."""
    ctx, later = gg.Context(), gg.Context()
    w, grad, settings = (ctx.new_tensor(gg.F32, (2,), name) for name in ("w", "grad", "settings"))
    gg.set_param(w)
    ctx.free()
    others = [later.new_tensor(gg.F32, (2,)) for _ in range(8)]
    assert w.id in [t.id for t in others]
    for look in (lambda: w.flags, lambda: w.op_params, lambda: w.param_floats,
                 lambda: gg.opt_step_sgd(w, grad, settings)):
        with pytest.raises(gg.StaleHandle, match="w belongs to a Context that was freed"):
            look()


def test_what_is_kept_stays_small(monkeypatch):
    monkeypatch.setattr(repeats, "_MAX_KEPT", 8)
    scale, x = repeats.repeated(checked_builders()["scale"]), gg.Context().new_tensor(gg.F32, (4,))
    known = scale.__closure__[[c for c in scale.__code__.co_freevars].index("of_kinds")].cell_contents
    for k in range(40):
        assert scale(x, float(k)).param_floats[0] == np.float32(k)
    assert [len(nodes) for _, nodes in known.values()] == [8]


def test_equal_arguments_do_not_keep_others_from_being_remembered():
    add, x = repeats.repeated(checked_builders()["add"]), gg.Context().new_tensor(gg.F32, (4,))
    y = x.ctx.new_tensor(gg.F32, (4,))
    of_kinds = add.__closure__[[c for c in add.__code__.co_freevars].index("of_kinds")].cell_contents
    assert add(x, x).src == (x, x) and not of_kinds
    assert add(x, y).src == (x, y) and add(y, y).src == (y, y)
    assert [len(nodes) for _, nodes in of_kinds.values()] == [1]


def test_refused_calls_leave_nothing():
    Mine = type("Mine", (), {})                         # noqa: N806
    gone = weakref.ref(Mine)
    with pytest.raises(gg.TypeMismatch, match="do not fit"):
        gg.add(gg.Context().new_tensor(gg.F32, (4,)), Mine())
    del Mine
    gc.collect()
    assert gone() is None


# ---------------------------------------------------------------- random graphs, built by both kinds of builders
CALLS_FUNCTIONS = {"custom", "custom_inplace", *(f"map_custom{n}{x}" for n in (1, 2, 3) for x in ("", "_inplace"))}
LAST = (None, None, None, 0, 1, 2, -1, 0.0, -0.0, 1.0, True, "F16", gg.F16, 2 ** 70)   # None: the last argument stays


class World:
    """Contexts and tensors of one kind of builders; two worlds that take the same steps hold the same."""

    def __init__(self, builders):
        self.builders, self.contexts, self.pool = builders, [gg.Context() for _ in range(3)], []

    def leaf(self, recipe, choice):
        """A tensor for an argument: of the pool, with the recipe's layout or any; else a new one, perhaps a view."""
        alike = [t for t in self.pool if (t.type, t.ne) == (recipe.type, recipe.ne)]
        some = (alike, alike, self.pool, [])[choice % 4]
        if some:
            return some[choice // 4 % len(some)]
        ctx = self.contexts[choice // 4 % 3]
        t = ctx.new_tensor(recipe.type, recipe.ne if choice % 3 else (*recipe.ne[:3], recipe.ne[3] + 1))
        with self.contexts[choice // 12 % 3]:           # not the one of what it views
            t = t if choice % 3 else gg.view_4d(t, *recipe.ne, *t.nb[1:], t.nb[3] * (choice % 2))
            return gg.permute(t, *recipe.axes) if recipe.axes else t

    def call(self, name, recipes, choices, number, within):
        """What a call gives: facts of the node, or the error."""
        choices = itertools.cycle(choices)

        def made(a):
            if isinstance(a, list):
                return [made(x) for x in a]
            if isinstance(a, gg.Context):
                return self.contexts[0]
            return self.leaf(a, next(choices)) if isinstance(a, Leaf) else a
        try:
            args = [made(a) for a in recipes]
            if number is not None and not isinstance(args[-1], Tensor):
                args[-1] = number
            with self.contexts[within] if within < 3 else contextlib.nullcontext():
                t = self.builders[name](*args)
        except GgjitError as e:
            return type(e), re.sub(r"%\d+", "%row", str(e))
        if isinstance(t, Tensor) and not any(t is x for x in self.pool):
            self.pool.append(t)
        return self.facts(t)

    def facts(self, t):
        if not isinstance(t, Tensor):
            return t
        if not t.ctx.alive:                             # below a view: the row may be another tensor's by now
            return t.op, t.type, t.ne, t.nb, "freed"
        row, inner = TABLE.words[t.id].tolist(), [self.place(s) for s in t.src]
        assert row[20:30] == [*(-1 if s is None else s.id for s in t.src), *(-1,) * (10 - len(t.src))]
        assert row[30] == (-1 if t.view_src is None else t.view_src.id) and row[34] == t.ctx.id
        return (row[:3], row[4:T_SRC], row[31:34], t.op, t.type, t.ne, t.nb, t.ndim, t.view_offs, t.name, t._holds,
                inner, self.place(t.view_src), self.contexts.index(t.ctx))

    def place(self, t):
        """Where a tensor stands in the pool; what it is, where it is not there."""
        found = next((i for i, x in enumerate(self.pool) if x is t), None)
        return self.facts(t) if found is None and t is not None else found

    def change(self, what, i):
        """Change a tensor or free a context, as a program may between two calls; its tensors stay in the pool."""
        if what == "free":
            self.contexts[i % 3].free()
            self.contexts[i % 3] = gg.Context()
        elif self.pool:
            t = self.pool[i % len(self.pool)]
            try:
                if what == "name":
                    gg.set_name(t, f"t{i}")
                elif what == "flag":
                    (gg.set_param, gg.set_output, gg.set_input)[i % 3](t)
            except GgjitError:
                return


def test_worlds_take_views_of_what_was_computed_from_freed_tensors():
    """conv_3d makes inner nodes: a view of its result shows them, and their sources, which may be gone."""
    plain, seen = {name: with_type_names(f) for name, f in checked_builders().items()}, []
    for freed in range(3):
        world = World(plain)
        world.call("conv_3d", calls()["conv_3d"][0], [3, 7], None, 2)
        world.change("free", freed)
        seen.append(repr(world.call("view_tensor", [Leaf(gg.F32, (1,), None)], [2], None, (freed + 1) % 3)))
    assert [("'freed'" in x, "StaleHandle" in x) for x in seen] == [(True, False), (True, False), (False, True)], seen


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_random_graphs_are_those_of_the_plain_builders(data):
    """Row for row, in any order of calls, with views, flags, names, equal arguments and contexts that are freed."""
    def draw(some):
        return data.draw(st.sampled_from(some))

    def number(n):
        return data.draw(st.integers(0, n))
    plain = {name: with_type_names(f) for name, f in checked_builders().items()}
    names = [draw(sorted(plain.keys() - CALLS_FUNCTIONS)) for _ in range(4)]
    ours = {x: plain[x] if looks_further(plain[x]) else repeats.repeated(plain[x]) for x in names}
    worlds = World(plain), World(ours)
    for _ in range(number(40)):
        if number(7) == 0:
            what, i = draw(("flag", "name", "flag", "free")), number(99)
            for world in worlds:
                world.change(what, i)
        else:
            name = draw(names)
            step = name, draw(calls()[name]), [number(99) for _ in range(4)], draw(LAST), number(5)
            plainly, repeated = (repr(world.call(*step)) for world in worlds)
            assert plainly == repeated, step
