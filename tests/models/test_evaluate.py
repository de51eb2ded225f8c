"""Perplexity, KL divergence and importance matrices against NumPy, and against llama.cpp on the same file."""
import json
import math
import subprocess
import sys

import numpy as np
import pytest
from helpers import arch_files, tiny_model, tiny_moe
from helpers.requirements import shared

import ggjit as gg
from ggjit.models import edit_gguf, load_model, measure_imatrix, perplexity, save_gguf
from ggjit.models.files.gguf import GGUFFile
from ggjit.models.files.save import CannotWrite
from ggjit.models.networks.evaluate import SavedLogits

N = 32
IDS = np.random.default_rng(11).integers(0, tiny_model.VOCAB, 3 * N + 5)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    with load_model(tiny_model.write(tmp_path_factory.mktemp("evaluate") / "tiny.gguf", metadata={
            "vocab_size": tiny_model.VOCAB}), n_threads=1, kv_type="F32", n_batch=24) as m:
        yield m


@pytest.fixture(scope="module")
def rounded(tmp_path_factory):
    with load_model(tiny_model.write(tmp_path_factory.mktemp("evaluate") / "q.gguf", type="Q8_0"), n_threads=1) as m:
        yield m


def log_p(m, ids):
    z = np.float64(m.logits(ids))
    return z - np.log(np.exp(z).sum(1, keepdims=True))


def test_perplexity_is_its_formula(tiny):
    """Chunks of N; the second half of each is predicted.  The model reads a chunk in two batches."""
    nll = [-log_p(tiny, c)[i, c[i + 1]] for c in IDS[:3 * N].reshape(3, N) for i in range(N // 2, N - 1)]
    got = perplexity(tiny, IDS, n_ctx=N, progress=False)
    assert got["n_tokens"] == len(nll) == 45 and got["n_chunks"] == 3
    assert got["perplexity"] == pytest.approx(math.exp(np.mean(nll)), rel=1e-6)
    assert got["error"] == pytest.approx(math.exp(np.mean(nll)) * np.std(nll) / math.sqrt(44), rel=1e-5)
    assert perplexity(tiny, IDS, n_ctx=N, n_chunks=2, progress=False)["n_chunks"] == 2


def test_divergence_from_a_better_model(tiny, rounded, tmp_path):
    p, q = (np.concatenate([log_p(m, c)[N // 2:N - 1] for c in IDS[:3 * N].reshape(3, N)]) for m in (tiny, rounded))
    kl = (np.exp(p) * (p - q)).sum(1)
    got = perplexity(rounded, IDS, n_ctx=N, base=tiny, progress=False)
    assert got["kl_divergence"] == pytest.approx(kl.mean(), rel=1e-3)
    assert got["kl_max"] == pytest.approx(kl.max(), rel=1e-3)
    assert got["same_top"] == (p.argmax(1) == q.argmax(1)).mean()
    saved = tmp_path / "base.kld"
    base = perplexity(tiny, IDS, n_ctx=N, save_logits=saved, progress=False)
    assert got["base_perplexity"] == pytest.approx(base["perplexity"], rel=1e-6)
    with pytest.raises(CannotWrite, match="base.kld exists already"):
        perplexity(tiny, IDS, n_ctx=N, save_logits=saved)
    assert tiny.n_past == 0
    f = SavedLogits(saved)
    np.testing.assert_allclose(np.concatenate([f.chunk(i) for i in range(3)]), np.maximum(p, p.max() - 16.5), atol=3e-4)
    again = perplexity(rounded, IDS, n_ctx=N, base=saved, progress=False)
    assert again["kl_divergence"] == pytest.approx(kl.mean(), abs=1e-5)
    assert perplexity(tiny, IDS, n_ctx=N, base=tiny, progress=False)["kl_divergence"] == 0
    raw = saved.read_bytes()
    saved.write_bytes(raw[:-2])
    with pytest.raises(gg.BadFile, match="do not hold 3 chunks; the file is truncated"):
        perplexity(rounded, IDS, n_ctx=N, base=saved)
    saved.write_bytes(raw[:20] + b"\x01" + raw[21:])
    with pytest.raises(gg.ModelError, match="made from another text"):
        perplexity(rounded, IDS, n_ctx=N, base=saved)
    with pytest.raises(CannotWrite, match="none/x"):
        perplexity(tiny, IDS, n_ctx=N, save_logits=tmp_path / "none" / "x", progress=False)


def test_sums_are_those_of_the_first_layer(tiny):
    """What attn_q reads is the normed embedding; all experts together see every token as often as it is routed."""
    file = GGUFFile(tiny.file.path)
    table = file.tensor_bytes("token_embd.weight").view(np.float32).reshape(tiny_model.VOCAB, -1)[IDS[:3 * N]]
    x = np.float64(table)
    x /= np.sqrt((x * x).mean(1, keepdims=True) + 1e-5)
    before = tiny.logits(IDS[:5])
    got = measure_imatrix(tiny, IDS, n_ctx=N, dataset="ids", progress=False)
    np.testing.assert_allclose(got.sums["blk.0.attn_q.weight"].values[0], (x * x).sum(0), rtol=1e-4)
    assert len(got.sums) == 14 and (got.n_chunks, got.chunk_size, got.datasets) == (3, N, ("ids",))
    assert all(s.counts.tolist() == [3 * N] and np.isfinite(s.values).all() for s in got.sums.values())
    np.testing.assert_array_equal(tiny.logits(IDS[:5]), before)          # the model is as it was
    assert tiny.scheduler is None


def test_sums_of_experts(tmp_path):
    with load_model(tiny_moe.write(tmp_path / "moe.gguf"), n_threads=1) as m:
        got = measure_imatrix(m, IDS, n_ctx=N, output=True, progress=False)
    for layer in range(tiny_model.LAYERS):
        up, gate = (got.sums[f"blk.{layer}.ffn_{k}_exps.weight"] for k in ("up", "gate"))
        assert up.counts.sum() == 3 * N * tiny_moe.USED and up.values.shape == (tiny_moe.E, tiny_model.DIM)
        np.testing.assert_array_equal(up.values, gate.values)
        shared = got.sums[f"blk.{layer}.ffn_gate_inp.weight"].values[0]
        np.testing.assert_allclose(up.values.sum(0), tiny_moe.USED * shared, rtol=1e-4)


@pytest.mark.parametrize("call, error, message", [
    (dict(data=IDS[:N + 3]), gg.ParamError, "the text has 35 tokens, chunks of 32 need at least 64"),
    (dict(data=IDS, n_ctx=8), gg.ParamError, "n_ctx must be an integer from 32 to 64"),
    (dict(data=IDS, n_ctx=65), gg.ParamError, "from 32 to 64 .the context of this model"),
    (dict(data=IDS * 1.5), gg.ParamError, "need at least"),
    (dict(data=IDS, base=3), gg.TypeMismatch, "base is a model"),
    (dict(data=IDS, base="none.kld"), gg.BadFile, "none.kld: No such file")])
def test_refusals(call, error, message, tiny):
    with pytest.raises(error, match=message):
        perplexity(tiny, **{"n_ctx": N, "progress": False, **call})


def test_models_that_cannot_be_compared(tiny, tmp_path):
    other = tiny_model.write(tmp_path / "other.gguf", shapes={"token_embd.weight": (40, tiny_model.DIM)})
    with load_model(other, n_threads=1) as m, pytest.raises(gg.ModelError, match="48 tokens, .* has 40; distributions"):
        perplexity(m, IDS % 40, n_ctx=N, base=tiny)
    with pytest.raises(gg.TypeMismatch, match="a model is expected, .* got str"):
        perplexity("m.gguf", IDS)
    save_gguf(tmp_path / "a.gguf", {"a": np.ones(2, np.float32)})
    with pytest.raises(gg.BadFile, match="not a file of log-probabilities"):
        perplexity(tiny, IDS, n_ctx=N, base=tmp_path / "a.gguf")


PEER = """
import json, math, sys
import numpy as np
sys.path.insert(0, sys.argv[1])
from peer_llamacpp import LlamaLib
lib, found = LlamaLib(), []
chunks = np.array(json.loads(sys.argv[2])).reshape(-1, 32)
for path in sys.argv[3:]:
    c, log_p = lib.load(path, repack=False).context(n_ctx=256, flash=0, kv=0), []
    for chunk in chunks:
        c.reset()
        z = c.decode(chunk.tolist(), all_logits=True).astype(float)[16:31]
        log_p.append(z - np.log(np.exp(z).sum(1, keepdims=True)))
    found.append(np.concatenate(log_p))
next_ids, rows = chunks[:, 17:].reshape(-1), np.arange(chunks[:, 17:].size)
p, q = found
kl = (np.exp(p) * (p - q)).sum(1)
same = float((p.argmax(1) == q.argmax(1)).mean())
print(json.dumps({"base_perplexity": math.exp(-p[rows, next_ids].mean()), "perplexity": math.exp(
    -q[rows, next_ids].mean()), "kl_divergence": kl.mean(), "kl_max": kl.max(), "kl_median": np.median(kl),
    "kl_99": np.quantile(kl, 0.99), "kl_error": kl.std() / math.sqrt(len(kl) - 1), "same_top": same}))
"""


@pytest.mark.peer
def test_llamacpp_finds_the_same(tiny, tmp_path, need):
    """Perplexity and KL divergence of two models, in float64 from llama.cpp's logits as llama-perplexity does it."""
    need("xllamacpp", "llama.cpp is the oracle")
    ids = IDS[:3 * N].tolist()
    worse = tiny_model.write(tmp_path / "worse.gguf", metadata={"vocab_size": tiny_model.VOCAB}, type="F16")
    edit_gguf(worse, worse, set_types={"blk.0.ffn_up.weight": "q4_0", "blk.1.attn_v.weight": "q4_0"}, force=True,
              progress=False)
    edit_gguf(worse, worse, set_types=dict.fromkeys(GGUFFile(worse).tensors, "f32"), force=True, progress=False)
    r = subprocess.run([sys.executable, "-c", PEER, str(shared("tools")), json.dumps(ids), tiny.file.path, str(worse)],
                       text=True, capture_output=True, timeout=300)
    assert r.returncode == 0, r.stderr
    want = json.loads(r.stdout)
    with load_model(worse, n_threads=1, kv_type="F32") as m:
        got = perplexity(m, ids, n_ctx=N, base=tiny, progress=False)
    assert 1e-4 < want["kl_divergence"] < want["kl_max"]
    assert {k: got[k] for k in want} == pytest.approx(want, rel=1e-4)


def test_encoders_are_refused(tmp_path):
    arch_files.write(shared("tools"), "bert", tmp_path / "bert.gguf")
    with load_model(tmp_path / "bert.gguf", n_threads=1) as m:
        for call in (perplexity, measure_imatrix):
            with pytest.raises(gg.NotSupported, match="bert predicts no tokens; take a model that generates text"):
                call(m, IDS, n_ctx=N)

