"""The ops' own test cases, each with the names of its kernels, and those of them that a run draws."""
import functools

import numpy as np

import ggjit as gg
from ggjit.ops.core.record import OP
from ggjit.ops.core.spec import Inputs, all_specs
from helpers.builder_calls import kernels
from helpers.sample import drawn

# mul_mat, attention and custom ops have suites of their own
ELSEWHERE = {OP.MUL_MAT, OP.FLASH_ATTN_EXT, OP.MAP_CUSTOM1, OP.MAP_CUSTOM2, OP.MAP_CUSTOM3, OP.CUSTOM}
SPECS = {op: spec for op, spec in all_specs().items() if spec.cases and op not in ELSEWHERE}
CASES = [(op, c) for op, spec in SPECS.items() for c in spec.cases()]


@functools.cache
def names(case):
    """Of the kernels that compute an (op, case)."""
    return kernels(case[1].build(Inputs(gg.Context(), np.random.default_rng(0)))) - {None}


def words(case):
    """Each op with each function, type and way that names of its kernels tell, in their places: copy-flat-f32-f16."""
    return {(case[0], *word) for name in names(case) for word in enumerate(name.split("-"))} or {case[0]}


@functools.cache
def some_cases(op):
    """Those of an op that a run draws."""
    return drawn([c for c in CASES if c[0] is op], words, names)


@functools.cache
def left_out():
    """Names of the kernels that only cases need which a run does not draw."""
    return set().union(*map(names, CASES)).difference(*map(names, drawn(CASES, words, names)))
