"""Networks that llama.cpp has not, or has otherwise, beside their formulas in NumPy: GPT-J, and Chameleon with norms
after its blocks."""
import numpy as np
import pytest
from helpers import arch_files
from helpers.requirements import shared

from ggjit.models import load_gguf, load_model


def standard(x, eps):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def rms(x, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def rotated(x, n_rot, theta=10000.0):
    """RoPE of pairs of neighbours; x (tokens, heads, numbers)."""
    angle = np.arange(len(x))[:, None] * theta ** (-np.arange(0, n_rot, 2) / n_rot)
    turned = (x[..., 0:n_rot:2] + 1j * x[..., 1:n_rot:2]) * np.exp(1j * angle)[:, None]
    y = x.copy()
    y[..., 0:n_rot:2], y[..., 1:n_rot:2] = turned.real, turned.imag
    return y


def attention(q, k, v):
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[2])
    scores[:, ~np.tri(len(q), dtype=bool)] = -np.inf
    e = np.exp(scores - scores.max(2, keepdims=True))
    return np.einsum("hqk,khd->qhd", e / e.sum(2, keepdims=True), v).reshape(len(q), -1)


def gptj(w, c, ids):
    """Source: transformers' GPTJModel."""
    def norm(x, name):
        return standard(x, c.eps) * w[name + ".weight"] + w[name + ".bias"]
    x = w["token_embd.weight"][ids]
    for i in range(c.layers):
        p = f"blk.{i}."
        n = norm(x, p + "attn_norm")
        q, k, v = ((n @ w[f"{p}attn_{name}.weight"].T).reshape(len(ids), c.heads, -1) for name in "qkv")
        o = attention(rotated(q, c.nrot), rotated(k, c.nrot), v)
        h = n @ w[p + "ffn_up.weight"].T + w[p + "ffn_up.bias"]
        h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h ** 3)))
        x = x + o @ w[p + "attn_output.weight"].T + h @ w[p + "ffn_down.weight"].T + w[p + "ffn_down.bias"]
    return norm(x, "output_norm") @ w["output.weight"].T + w["output.bias"]


def chameleon(w, c, ids):
    """Source: transformers' ChameleonSwinDecoderLayer."""
    eps, x = 1e-5, w["token_embd.weight"][ids]
    for i in range(c.layers):
        p = f"blk.{i}."
        q, k, v = ((x @ w[f"{p}attn_{name}.weight"].T).reshape(len(ids), n, -1)
                   for name, n in (("q", c.heads), ("k", c.kvh), ("v", c.kvh)))
        q, k = (rotated(standard(y, eps) * w[f"{p}attn_{name}_norm.weight"] + w[f"{p}attn_{name}_norm.bias"], c.nrot)
                for name, y in (("q", q), ("k", k)))
        x = x + rms(attention(q, k, v) @ w[p + "attn_output.weight"].T, eps) * w[p + "attn_norm.weight"]
        gate, up = (x @ w[f"{p}ffn_{name}.weight"].T for name in ("gate", "up"))
        f = (gate / (1 + np.exp(-gate)) * up) @ w[p + "ffn_down.weight"].T
        x = x + rms(f, eps) * w[p + "ffn_norm.weight"]
    return rms(x, eps) * w["output_norm.weight"] @ w["token_embd.weight"].T


@pytest.mark.parametrize(("name", "reference"), [("gptj", gptj), ("chameleon-after", chameleon)])
def test_logits_are_those_of_the_formulas(name, reference, tmp_path):
    sizes = arch_files.write(shared("tools"), name, tmp_path / "m.gguf")
    w = {name: t.numpy().astype(np.float64) for name, t in load_gguf(tmp_path / "m.gguf")[0].items()}
    ids = np.random.default_rng(7).integers(0, sizes.vocab, 40).tolist()
    with load_model(tmp_path / "m.gguf", n_threads=1, n_ctx=64, kv_type="F32", flash=False, reserve=False) as m:
        got = m.logits(ids)
        m.reset()
        single = np.stack([m.decode([i]) for i in ids])
        first, end = m.description.no_text
    want, got, single = (np.delete(x, slice(first, end), 1) for x in (reference(w, sizes, ids), got, single))
    assert abs(got - want).max() <= 1e-4 * abs(want).max()
    assert abs(single - want).max() <= 1e-4 * abs(want).max()
