"""The examples of the builders' docstrings: every builder has one, and they run."""
import inspect
import subprocess
import sys

import numpy as np
import pytest
from helpers import sample

import ggjit as gg
from ggjit.api.examples import EXAMPLES, INSTEAD, example
from ggjit.ops.core.spec import builders

NAMES = sorted(builders())


def test_every_builder_has_an_example_and_shows_it():
    assert not {n for n in builders() if example(n) is None}
    assert set(EXAMPLES) | set(INSTEAD) <= set(builders())
    for name in NAMES:
        doc, (code, numpy) = inspect.getdoc(getattr(gg, name)), example(name)
        assert all(f"\n    {line}" in doc for line in code.splitlines()), name
        assert (f"gg.{name}(" in code or name in INSTEAD) and f"# NumPy: {numpy}" in doc, name


def test_without_docstrings_everything_is_there():
    code = "import ggjit as gg; print(gg.add.__doc__, gg.compute(gg.add(gg.tensor([1.0]), gg.tensor([2.0]))))"
    r = subprocess.run([sys.executable, "-OO", "-c", code], text=True, capture_output=True)
    assert r.stdout == "None [3.]\n", r.stderr


def run(names):
    for name in names:
        exec(compile(example(name)[0], f"the example of {name}", "exec"), {"gg": gg, "np": np})


def test_what_always_raises_shows_what_to_write_instead():
    run(INSTEAD)
    for name in INSTEAD:
        with pytest.raises(gg.NotSupported, match=name):
            getattr(gg, name)(*[None] * len(inspect.signature(getattr(gg, name)).parameters))


def test_some_examples_run():
    run(sorted(NAMES, key=sample.rank)[:30])


@pytest.mark.slow
def test_all_examples_run():
    run(NAMES)


def value(expression, **names):
    return eval(expression, {"np": np}, names)


@pytest.mark.parametrize("name", ["add", "clamp", "concat", "cont_2d", "get_rows", "mean", "mul_mat", "norm",
                                  "out_prod", "pad_ext", "rms_norm", "scale_bias", "sum_rows", "tri"])
def test_what_it_is_in_numpy(name):
    """The NumPy expression beside the call gives the same values; of a remark behind it the part before the colon."""
    first, call, numpy = EXAMPLES[name]
    scope = {"gg": gg, "np": np}
    exec(first, scope)
    got = gg.compute(eval(f"gg.{call}", scope))
    arrays = {n: t.numpy() for n, t in scope.items() if isinstance(t, gg.Tensor)}
    want = value(numpy.split(": ")[0], **arrays)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
