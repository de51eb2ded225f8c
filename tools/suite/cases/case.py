"""A case: which op, with which parameters, how its graph is built, and how far off the result may be.

The families live in tools/suite/cases: each class is a function that returns a SuiteCase, each grid a generator in
`FAMILIES`. Labels and parameter strings are ggml's (`op_desc` and `vars()` of test-backend-ops), so results can be laid
side by side; labels repeat in ggml's list, so a case is known by its number. Behind that list stand the cases of ops of
which ggml's program has none, from the ops' own files.
"""
import dataclasses
import functools
import itertools
import math
import zlib
from collections.abc import Callable

import numpy as np

import ggjit as gg
from ggjit.ops.core.discovery import declared
from ggjit.ops.core.errors import NotSupported
from ggjit.ops.core.spec import Inputs, all_specs
from ggjit.ops.core.types import BY_NAME, Type
from ggjit.tools.suite.cases.inputs import uniform


def types(names):
    """Tensor types of a list of names."""
    return tuple(BY_NAME[n] for n in names.split())


F32, F16, BF16, I8, I16, I32, I64 = types("f32 f16 bf16 i8 i16 i32 i64")
ALL_TYPES = types("f32 f16 bf16 q4_0 q4_1 q5_0 q5_1 q8_0 q1_0 q2_0 mxfp4 nvfp4 q2_K q3_K q4_K q5_K q6_K tq2_0 iq2_xxs "
                  "iq2_xs iq2_s iq3_xxs iq1_s iq1_m iq4_nl iq3_s iq4_xs")
BASE_TYPES = types("f32 f16 q8_0 q1_0 q2_0 q4_0 q4_1 q4_K mxfp4 nvfp4 iq2_xxs")
OTHER_TYPES = types("q4_1 q5_0 q5_1 q8_0 q1_0 q2_0 q2_K q3_K q5_K q6_K tq2_0 iq2_xs iq2_s iq3_xxs iq1_s iq1_m iq4_nl "
                    "iq3_s iq4_xs bf16")


@dataclasses.dataclass(frozen=True)
class SuiteCase:
    """One case of the suite.

    family   the class of ggml's test program;  op  what `-o` selects;  params  ggml's vars()
    build    (Maker) -> result tensor
    max_err  limit of the error measure `error` (compare.MEASURES) against ggml and against float64
    whole    only the result of the graph is compared with ggml (fusion cases), not every node
    ggml_cpu False where ggml's own CPU backend refuses the case, and our builder does, too
    wrong    "" or what ggml's CPU backend gets wrong here: the case is compared with float64 alone
    """
    family: str
    op: str
    params: str
    build: Callable
    max_err: float = 1e-7
    error: str = "nmse"
    whole: bool = False
    ggml_cpu: bool = True
    wrong: str = ""
    index: int = -1

    def __str__(self):
        return f"{self.op}({self.params})"


def text(value):
    """A parameter as ggml prints it: std::to_string, type names, [a,b,c]."""
    if isinstance(value, Type):
        return value.name
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float):
        return f"{value:f}"
    if isinstance(value, tuple | list):
        return f"[{','.join(text(v) for v in value)}]"
    return str(int(value)) if isinstance(value, int) else str(value)


def vars_of(**values):
    """"type=f32,ne=[10,5,4,3]" in the order given."""
    return ",".join(f"{name}={text(v)}" for name, v in values.items())


class Maker:
    """What `build` works with: leaves through `new` and `corner`, ops as methods under their public names."""

    def __init__(self, ctx):
        self.ctx, self.leaves = ctx, []

    def new(self, type, ne, init=None):
        """A leaf of `ne`; init: see inputs.py (uniform in [-1, 1))."""
        ne = tuple(ne) + (1,) * (4 - len(ne))
        t = self.ctx.new_tensor(type, ne)
        self.leaves.append((t, init or uniform()))
        return t

    def corner(self, type, ne, factors, init=None):
        """A view of `ne` at the corner of a leaf that is `factors` times larger in each dimension."""
        ne = tuple(ne) + (1,) * (4 - len(ne))
        return self.window(self.new(type, tuple(n * f for n, f in zip(ne, factors, strict=True)), init), ne)

    def window(self, a, ne, offset=0):
        """A view of `ne` into a, with a's strides."""
        return self.view_4d(a, *ne, *a.nb[1:], offset)

    def __getattr__(self, name):
        """The public op builder; NotSupported where there is none yet."""
        f = getattr(gg, name, None)
        if f is None:
            raise NotSupported(f"ggjit has no {name} yet")
        return f


def grid(**axes):
    """Dicts of every combination, the last axis fastest."""
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def n_elements(ne):
    return math.prod(ne)


def padded(n, block):
    return -(-n // block) * block


def _of_spec(op, case):
    """A case of an op's own file as one of the suite."""
    def build(m):
        inputs = Inputs(m.ctx, np.random.default_rng(zlib.crc32(case.name.encode())))
        out = case.build(inputs)
        m.leaves += [(t, lambda rng, ne, values=values: values) for t, values in inputs.data]
        return out
    return SuiteCase(op.name.lower(), op.name, case.name, build, case.max_nmse, wrong=case.wrong)


def not_in_ggmls_list(known):
    """The cases of ops that ggml's program has none of, from their files.  known: labels of the ops it has."""
    for op, spec in sorted(all_specs().items()):
        names = {op.name, *(b.__name__.upper() for b in spec.builders)}
        if spec.cases and not spec.calls_python and not names & known:
            yield from (_of_spec(op, case) for case in spec.cases())


@functools.cache
def all_cases():
    """Every case of every family, numbered, then those that ops of their own bring: what is supported changes nothing
    about the order."""
    families = (family for _, family in declared("ggjit.tools.suite.cases", "FAMILIES"))
    found = [*itertools.chain.from_iterable(family() for family in families)]
    found += not_in_ggmls_list({c.op for c in found})
    return tuple(dataclasses.replace(c, index=i) for i, c in enumerate(found))
