"""Helpers that compile in parallel know, without memory or a plan, which kernels the plans will want."""
import pytest
from helpers import tiny_model

from ggjit.models import load_model
from ggjit.tools.command.helpers import jobs


@pytest.mark.parametrize("type", ["F32", "Q4_0"])
@pytest.mark.parametrize("n_threads", [1, 2])
def test_helpers_compile_what_the_plans_hold(tmp_path, type, n_threads):
    path = tiny_model.write(tmp_path / "m.gguf", type=type)
    with load_model(path, n_threads=n_threads, reserve=False) as unplanned:
        known = set(jobs(unplanned))
    with load_model(path, n_threads=n_threads) as m:
        wanted = {k.name for shape in m._common_shapes() for k in m._step(shape).plan.kernels}
    # memory may forbid a fusion the helper took for granted: then single kernels are compiled here, nothing is wrong
    assert len(wanted - known) <= 2 and len(wanted & known) >= 8
