"""The llama of helpers/tiny_model.py in NumPy and float64, with all values by name."""
import gguf
import numpy as np

from helpers.tiny_model import DIM, HEADS, KV_HEADS, LAYERS

IDS = [3, 17, 40, 31, 5, 9, 22]
D_HEAD = DIM // HEADS


def weights(path):
    return {t.name: np.array(t.data, np.float64) for t in gguf.GGUFReader(str(path)).tensors}


def rms(x, w):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w


def rotated(x):
    """x [n, heads, D_HEAD]: pairs of neighbours turned by their position."""
    angle = np.arange(len(x))[:, None] * 10000.0 ** (-np.arange(0, D_HEAD, 2) / D_HEAD)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    even, odd = x[..., ::2], x[..., 1::2]
    return np.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)


def forward(w, ids, changed=None):
    """{name: value} of all that a llama of helpers/tiny_model.py computes; changed: {name: function}."""
    found, n = {}, len(ids)

    def named(name, x):
        found[name] = changed[name](x) if changed and name in changed else x
        return found[name]
    x = named("embd", w["token_embd.weight"][ids])
    for i in range(LAYERS):
        p = f"blk.{i}."

        def product(name, x, called, p=p):
            return named(p + called, x @ w[f"{p}{name}.weight"].T)
        h = named(p + "attn_norm", rms(x, w[p + "attn_norm.weight"]))
        q = named(p + "Q_roped", rotated(product("attn_q", h, "Qcur").reshape(n, HEADS, D_HEAD)))
        k = named(p + "K_roped", rotated(product("attn_k", h, "Kcur").reshape(n, KV_HEADS, D_HEAD)))
        v = product("attn_v", h, "Vcur").reshape(n, KV_HEADS, D_HEAD)
        k, v = (np.repeat(t, HEADS // KV_HEADS, 1) for t in (k, v))
        s = named(p + "kq", np.einsum("qhd,khd->hqk", q, k)) / np.sqrt(D_HEAD)
        s = np.where(np.tri(n, dtype=bool), s, -np.inf)
        s = np.exp(s - s.max(-1, keepdims=True))
        s = named(p + "kq_soft_max", s / s.sum(-1, keepdims=True))
        o = named(p + "attn", named(p + "kqv", np.einsum("hqk,khd->hqd", s, v)).transpose(1, 0, 2))
        x = named(p + "ffn_inp", x + product("attn_output", o.reshape(n, DIM), "attn_out"))
        h = named(p + "ffn_norm", rms(x, w[p + "ffn_norm.weight"]))
        gate, up = product("ffn_gate", h, "ffn_gate"), product("ffn_up", h, "ffn_up")
        x = x + product("ffn_down", named(p + "ffn_swiglu", gate / (1 + np.exp(-gate)) * up), "ffn_out")
        x = named(p + "l_out", x)
    named("logits", named("result_norm", rms(x, w["output_norm.weight"])) @ w["output.weight"].T)
    return found


def near(a, b, bound=1e-5):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape and abs(a - b).max() <= bound * max(1, abs(b).max())
