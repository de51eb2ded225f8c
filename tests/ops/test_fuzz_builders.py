"""Every builder under wrong shapes, types, strides and parameters: a typed error or the right numbers, never a crash.

The calls that the ops' own test cases make are recorded, argument by argument, and changed at random.
"""
import math
import warnings

import numpy as np
import pytest
from helpers.builder_calls import AXES, NUMBERS, OBJECTS, SMALL, TYPES, build, calls, changed, kernels, known_kernels
from helpers.cases import expected, nmse
from helpers.reference_cases import left_out
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import ggjit as gg
from ggjit.ops.core.errors import GgjitError
from ggjit.ops.core.record import OP, VIEW_OPS
from ggjit.ops.core.spec import builders

USERS = (OP.MAP_CUSTOM1, OP.MAP_CUSTOM2, OP.MAP_CUSTOM3, OP.CUSTOM)
IN_CI, SLOW = 25, 500                           # examples of a builder
SIZE = st.integers(0, 9) | st.sampled_from([32, 33, 256])
CHANGE = st.one_of(
    st.tuples(st.just("size"), st.integers(0, 3), SIZE), st.tuples(st.just("type"), st.sampled_from(TYPES)),
    st.tuples(st.just("axes"), st.sampled_from(AXES)), st.tuples(st.just("number"), st.sampled_from(NUMBERS)),
    st.tuples(st.just("object"), st.sampled_from(OBJECTS)),
    st.tuples(st.just("leaf"), st.lists(SIZE, min_size=4, max_size=4)))


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
    """Kernels that a run does not draw for the ops' own cases are not compiled for this, either."""
    try_one(name, data, known_kernels() - left_out())


@pytest.mark.slow
@fuzzed(SLOW)
@given(st.data())
def test_typed_error_or_right_at_random(name, data):
    """Other examples in every run; a failure prints its own."""
    try_one(name, data, known_kernels())


def try_one(name, data, compiled):
    """compiled: names of the kernels that results are computed with."""
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
        check(out, compiled)


def far_angles(t):
    """Does RoPE turn by angles so large that float32 cannot tell one turn from the next?"""
    if t.op not in (OP.ROPE, OP.ROPE_BACK):
        return False
    base, scale = np.array(t.op_params[5:7], np.int32).view(np.float32)
    return not (abs(scale) <= 1e4 and 1e-4 <= abs(base))


def check(out, compiled):
    """Computes what is small and needs no kernel of its own; floats of single ops are compared with the reference.

    Functions of the user's own may raise what they like and are only built; windows of acc and set whose rows overlap
    are undefined, so those are not compared.
    """
    graph = gg.Graph(out)
    if max(math.prod(t.ne) for t in (*graph.nodes, *graph.leafs)) > SMALL or not kernels(out) <= compiled:
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
        if far_angles(out):                                     # sines differ, but a rotation keeps the norm
            assert np.isclose(np.linalg.norm(got.astype(np.float64)), np.linalg.norm(want), rtol=1e-3)
            return
        assert nmse(got.reshape(-1).astype(np.float64), np.asarray(want, np.float64).reshape(-1)) < 5e-4
