"""Every instruction set computes the same network: AVX-512, AVX2 and the generic path, each in its own process."""
import functools
import itertools
import json

import numpy as np
import pytest
from helpers import tiny_model
from helpers.sample import sampled

from ggjit.ops.native import isa

CODE = """
import json, sys
from ggjit.models import load_model
from ggjit.ops.native import isa
with load_model(sys.argv[1], n_threads=2, kv_type="F32") as m:
    ids = [5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 3, 2, 1, 4, 6, 8, 9, 10]
    batch = m.logits(ids)
    m.reset()
    single = [m.decode([i]).tolist() for i in ids]
print(json.dumps([isa.ISA, batch.tolist(), single]))
"""
# Largest difference of a logit.  Activations are rounded to float16 or to 8-bit codes where the weights are; one that
# rounds the other way (another order of additions) moves the logits by that much.
TOLERANCE = {"F32": 5e-5, "F16": 1e-2, "Q8_0": 0.1, "Q4_0": 0.1}
TYPES = tuple(TOLERANCE)


# each instruction set, the same type on all of them
DRAWN = sampled(itertools.product(isa.NAMES, TYPES), lambda case: case[:1], lambda case: case[1:])


@pytest.fixture(scope="module")
def results(tmp_path_factory, on_isa):
    folder = tmp_path_factory.mktemp("isa")

    @functools.cache
    def run(name, type):
        r = on_isa(name, CODE, tiny_model.write(folder / f"{type}.gguf", type=type))
        assert r.returncode == 0, r.stderr
        used, batch, single = json.loads(r.stdout)
        assert used == name
        return np.array(batch), np.array(single)
    return run


@pytest.mark.parametrize("name,type", DRAWN)
def test_networks_agree_across_instruction_sets(results, name, type):
    for want, got in zip(results("generic", type), results(name, type), strict=True):
        assert abs(want - got).max() <= TOLERANCE[type]


@pytest.mark.parametrize("name,type", DRAWN)
def test_batch_and_single_tokens_agree(results, name, type):
    batch, single = results(name, type)
    assert abs(batch - single).max() <= TOLERANCE[type]
