"""Mixture-of-experts layers: against float64, the dense network, and llama.cpp on the same file."""

import numpy as np
import pytest
from helpers import tiny_model
from helpers.llamacpp import nmse_of_logits
from helpers.tiny_moe import EXPERTS, D, E, write

import ggjit as gg
from ggjit.models import load_model
from ggjit.models.blocks.moe import Experts, feed_forward


def expected(x, router, gate, up, down, n_used):
    """The block in float64, token by token."""
    out = np.zeros_like(x, np.float64)
    for i, m in enumerate(np.float64(x)):
        p = np.exp(router @ m)
        ids = np.argsort(-p)[:n_used]
        for e in ids:
            g = gate[e] @ m
            out[i] += p[e] / p[ids].sum() * (down[e] @ (g / (1 + np.exp(-g)) * (up[e] @ m)))
    return out


@pytest.mark.parametrize("n_used", [1, 2, 6])
@pytest.mark.parametrize("n_tokens", [1, 7, 60])
def test_block_against_float64(n_tokens, n_used):
    rng = np.random.default_rng(n_tokens)
    x, *weights = (rng.standard_normal(s).astype(np.float32) / 8 for s in ((n_tokens, D), *EXPERTS.values()))
    ctx = gg.Context()
    leaves = [gg.from_numpy(ctx, w) for w in weights]
    y = gg.compute(feed_forward(gg.from_numpy(ctx, x), Experts(*leaves, n_used, 0.0), 0))
    want = expected(x, *weights, n_used)
    assert np.square(y - want).sum() / np.square(want).sum() < 1e-10


def test_equal_experts_are_a_dense_network(tmp_path):
    """With one set of weights in all experts the router does not matter."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((9, D)).astype(np.float32)
    router, gate, up, down = (rng.standard_normal(s[-2:]).astype(np.float32) / 8 for s in EXPERTS.values())
    ctx = gg.Context()

    def leaf(a, copies):
        return gg.from_numpy(ctx, np.repeat(a[None], copies, 0) if copies else a)
    m = leaf(x, 0)
    y = feed_forward(m, Experts(leaf(router, 0), *(leaf(w, E) for w in (gate, up, down)), 3, 0.0), 0)
    dense = gg.mul_mat(leaf(down, 0), gg.swiglu_split(gg.mul_mat(leaf(gate, 0), m), gg.mul_mat(leaf(up, 0), m)))
    y, dense = gg.compute(y), gg.compute(dense)
    assert np.square(y - dense).sum() / np.square(dense).sum() < 1e-10


def test_one_token_at_a_time_equals_a_batch(tmp_path):
    ids = np.random.default_rng(1).integers(0, tiny_model.VOCAB, 20)
    with load_model(write(tmp_path / "m.gguf"), n_threads=1) as m:
        whole = m.logits(ids)
        m.reset()
        single = np.stack([m.decode([i]) for i in ids])
    assert np.square(whole - single).sum() / np.square(whole).sum() < 1e-6


@pytest.mark.peer
@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_against_llamacpp(kind, tmp_path, need):
    need("xllamacpp", "llama.cpp is the oracle")
    # rounded activations let a token whose router is nearly undecided take another expert
    assert max(nmse_of_logits(write(tmp_path / "m.gguf", kind), 48)) <= (1e-5 if kind == "F32" else 5e-3)


@pytest.mark.parametrize("metadata,match", [({"expert_used_count": 7}, "6 experts"), ({"expert_used_count": 0}, "= 0"),
                                            ({"expert_count": 5}, r"ffn_gate_inp.*\[64, 5\]")])
def test_counts_that_do_not_fit(metadata, match, tmp_path):
    with pytest.raises(gg.ModelError, match=match):
        load_model(write(tmp_path / "m.gguf", **metadata))


def test_missing_counts(tmp_path):
    shapes = {f"blk.{i}.{n}.weight": s for i in range(tiny_model.LAYERS) for n, s in EXPERTS.items()}
    with pytest.raises(gg.BadFile, match="expert_count"):
        load_model(tiny_model.write(tmp_path / "m.gguf", shapes=shapes))
