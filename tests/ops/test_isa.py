"""Every instruction set computes the same network: AVX-512, AVX2 and the generic path, each in its own process."""
import json

import numpy as np
import pytest
from helpers import tiny_model

from ggjit.ops.native import isa

CODE = """
import json, sys
from ggjit.models import load_model
from ggjit.ops.native import isa
out = {"isa": isa.ISA}
for path in sys.argv[1:]:
    with load_model(path, n_threads=2, kv_type="F32") as m:
        ids = [5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 3, 2, 1, 4, 6, 8, 9, 10]
        batch = m.logits(ids)
        m.reset()
        single = [m.decode([i]).tolist() for i in ids]
        out[path] = [batch.tolist(), single]
print(json.dumps(out))
"""
# Largest difference of a logit.  Activations are rounded to float16 or to 8-bit codes where the weights are; one that
# rounds the other way (another order of additions) moves the logits by that much.
TOLERANCE = {"F32": 5e-5, "F16": 1e-2, "Q8_0": 0.1, "Q4_0": 0.1}
TYPES = tuple(TOLERANCE)


@pytest.fixture(scope="module")
def results(tmp_path_factory, on_isa):
    folder = tmp_path_factory.mktemp("isa")
    paths = [tiny_model.write(folder / f"{t}.gguf", type=t) for t in TYPES]
    known = {}

    def run(name):
        if name not in known:
            r = on_isa(name, CODE, *paths)
            assert r.returncode == 0, r.stderr
            got = json.loads(r.stdout)
            assert got.pop("isa") == name
            known[name] = [np.array(v) for v in got.values()]
        return known[name]
    return run


@pytest.mark.parametrize("name", isa.NAMES)
def test_networks_agree_across_instruction_sets(results, name):
    want, got = results("generic"), results(name)
    for kind, w, g in zip(TYPES, want, got, strict=True):
        assert abs(w - g).max() <= TOLERANCE[kind], kind


@pytest.mark.parametrize("name", isa.NAMES)
def test_batch_and_single_tokens_agree(results, name):
    for kind, (batch, single) in zip(TYPES, results(name), strict=True):
        assert abs(batch - single).max() <= TOLERANCE[kind], kind
