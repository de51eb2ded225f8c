"""Cases of every op against its float64 reference, on one thread and with the work split in two, and over its source.

Outputs lie between sentinel bytes in poisoned memory.
"""
import numpy as np
import pytest
from helpers.cases import fits, nmse, prepare, run
from helpers.reference_cases import CASES, SPECS, names, some_cases, words
from helpers.sample import sampled

import ggjit as gg
from ggjit.ops.core.spec import all_specs


@pytest.mark.parametrize("op,case", sampled(CASES, words, names, lambda case: f"{case[0].name} {case[1].name}"))
def test_against_float64(op, case, monkeypatch):
    got, want, out = run(case)
    assert got.shape == want.shape
    error = nmse(got.astype(np.float64), want.astype(np.float64))
    assert error <= case.max_nmse, f"{out!r}: NMSE {error:.3g}"
    monkeypatch.setattr("ggjit.cpu.cpu_plan.least_nanoseconds", lambda n_threads: 0.0)
    again, _, _ = run(case, 2)
    assert again.tobytes() == got.tobytes(), "two threads give other bytes than one"


@pytest.mark.parametrize("op", [op for op, spec in SPECS.items() if spec.in_place], ids=lambda op: op.name)
def test_written_over_a_source(op):
    """The allocator may give a node its source's memory: the same bytes come out."""
    tried, some = 0, some_cases(op)
    for _, case in some + [c for c in CASES if c[0] is op and c not in some]:
        out = prepare(case)[2]
        over = [i for i, s in enumerate(out.src) if fits(out, s)]
        for i in over[:2]:
            tried += 1
            assert run(case, over=i)[0].tobytes() == run(case)[0].tobytes(), (case.name, i)
        if tried > 12 or tried and case is some[-1][1]:
            break
    assert tried


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("name", ["norm", "rms_norm", "l2_norm"])
def test_rows_of_one_element_at_any_stride(name, n_threads):
    """A transposed (1, n) has rows of one element, n of them side by side: dense, though nb0 is not 4."""
    ctx = gg.Context()
    a = gg.from_numpy(ctx, np.arange(1, 5, dtype=np.float32)[None])
    for y in (getattr(gg, name)(gg.transpose(a), 0.5), getattr(gg, f"{name}_inplace")(gg.transpose(gg.dup(a)), 0.5)):
        got = gg.compute(y, backend=gg.init_backend("CPU", n_threads=n_threads))
        want = all_specs()[y.op].reference(y, np.arange(1, 5, dtype=np.float64).reshape(4, 1))
        np.testing.assert_allclose(np.ravel(got), np.ravel(want), rtol=1e-6)


def test_empty_tensors():
    ctx = gg.Context()
    a = gg.from_numpy(ctx, np.zeros((3, 0, 5), np.float32))
    assert gg.compute(gg.gelu(a)).shape == (3, 0, 5)
    assert gg.compute(gg.soft_max(gg.add(a, a))).size == 0
    assert gg.compute(gg.sum(a)) == 0


def test_the_comparison_notices_wrong_answers():
    want = np.linspace(-1, 1, 50)
    assert nmse(want * 1.001, want) > 1e-7 and nmse(want, want) == 0
    with pytest.raises(AssertionError, match="infinities or NaN in different places"):
        nmse(np.where(want > 0.9, np.nan, want), want)
    with pytest.raises(AssertionError, match="infinities or NaN in different places"):
        nmse(want, np.where(want > 0.9, np.inf, want))
