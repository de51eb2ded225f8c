"""A seeded sample of every kind; the whole campaign: `pytest -m campaign`, or `python -m campaign.runner`."""
import os

import pytest

from campaign import levels
from campaign.runner import KINDS, WHOLE, as_markdown, campaign, run, shared
from ggjit.ops.native import isa

SAMPLE = {"gguf": 250, "kernel cache": 60, "builders": 200, "threads": 6, "memory": 30, "soak": 1, "signals": 10,
          "fork": 2, "signals while compiling": 4, "forks while compiling": 3, "training": 3, "imatrix": 100,
          "full disk": 20, "driver": 20, "tls": 20}
CASES = int(os.environ.get("GGJIT_CAMPAIGN_CASES", WHOLE))


@pytest.mark.parametrize("kind", KINDS)
def test_sample(kind):
    counts, finds = run(kind, 0, SAMPLE[kind])
    assert not finds and sum(counts.values()) == SAMPLE[kind]


@pytest.mark.slow
@pytest.mark.skipif(isa.ISA != "avx512", reason="compares instruction sets of x86 up to AVX-512")
def test_instruction_sets():
    counts, finds = levels.compared(0, 300)
    assert not finds and min(counts.values()) > 50


@pytest.mark.campaign
def test_all():
    done = campaign(shared(CASES), jobs=os.cpu_count())
    assert not any(finds for _, finds, _ in done.values()), as_markdown(done)
