"""GPT-J, of which llama.cpp has names and no network, beside its formulas in NumPy."""
import numpy as np
from helpers import arch_files
from helpers.requirements import shared

from ggjit.models import load_gguf, load_model


def reference(w, n_layer, n_head, n_rot, eps, ids, theta=10000.0):
    """Source: transformers' GPTJModel."""
    def norm(x, name):
        x = x - x.mean(1, keepdims=True)
        return x / np.sqrt((x * x).mean(1, keepdims=True) + eps) * w[name + ".weight"] + w[name + ".bias"]

    def rotated(x):                                     # pairs of neighbours
        angle = np.arange(len(x))[:, None] * theta ** (-np.arange(0, n_rot, 2) / n_rot)
        turned = (x[..., 0:n_rot:2] + 1j * x[..., 1:n_rot:2]) * np.exp(1j * angle)[:, None]
        y = x.copy()
        y[..., 0:n_rot:2], y[..., 1:n_rot:2] = turned.real, turned.imag
        return y
    x = w["token_embd.weight"][ids]
    for i in range(n_layer):
        p = f"blk.{i}."
        n = norm(x, p + "attn_norm")
        q, k, v = ((n @ w[f"{p}attn_{c}.weight"].T).reshape(len(ids), n_head, -1) for c in "qkv")
        scores = np.einsum("qhd,khd->hqk", rotated(q), rotated(k)) / np.sqrt(q.shape[2])
        scores[:, ~np.tri(len(ids), dtype=bool)] = -np.inf
        e = np.exp(scores - scores.max(2, keepdims=True))
        o = np.einsum("hqk,khd->qhd", e / e.sum(2, keepdims=True), v).reshape(len(ids), -1)
        h = n @ w[p + "ffn_up.weight"].T + w[p + "ffn_up.bias"]
        h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h ** 3)))
        x = x + o @ w[p + "attn_output.weight"].T + h @ w[p + "ffn_down.weight"].T + w[p + "ffn_down.bias"]
    return norm(x, "output_norm") @ w["output.weight"].T + w["output.bias"]


def test_logits_are_those_of_the_formulas(tmp_path):
    sizes = arch_files.write(shared("tools"), "gptj", tmp_path / "m.gguf")
    w = {name: t.numpy().astype(np.float64) for name, t in load_gguf(tmp_path / "m.gguf")[0].items()}
    ids = np.random.default_rng(7).integers(0, sizes.vocab, 40).tolist()
    want = reference(w, sizes.layers, sizes.heads, sizes.nrot, sizes.eps, ids)
    with load_model(tmp_path / "m.gguf", n_threads=1, n_ctx=64, kv_type="F32", flash=False) as m:
        got = m.logits(ids)
        m.reset()
        single = np.stack([m.decode([i]) for i in ids])
    assert abs(got - want).max() <= 1e-4 * abs(want).max()
    assert abs(single - want).max() <= 1e-4 * abs(want).max()
