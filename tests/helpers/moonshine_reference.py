"""Moonshine in NumPy float64, of the tensors and the config of a Hugging Face folder."""
import json
import math

import numpy as np

from helpers.whisper_reference import GELUS, softmax

CONVS = (("conv1", 127, 64), ("conv2", 7, 3), ("conv3", 3, 2))      # kernel, stride


class Reference:
    def __init__(self, folder):
        from safetensors.numpy import load_file
        about = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        self.t = {k.removeprefix("model."): v.astype(float) for k, v in tensors.items()}
        self.n_head, self.n_layers = about["encoder_num_attention_heads"], about["encoder_num_hidden_layers"]
        self.part = about.get("rope_parameters", about)["partial_rotary_factor"]

    def linear(self, x, name):
        return x @ self.t[name + ".weight"].T + self.t.get(name + ".bias", 0.0)

    def norm(self, x, name):
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * self.t[name + ".weight"]

    def conv(self, x, name, kernel, stride):
        """(channels, frames) of x, without padding."""
        windows = np.lib.stride_tricks.sliding_window_view(x, kernel, 1)[:, ::stride]
        w, bias = self.t[f"encoder.{name}.weight"], self.t.get(f"encoder.{name}.bias", np.zeros(1))
        return np.tensordot(w, windows, ((1, 2), (0, 2))) + bias[:, None]

    def turned(self, x):
        """Pairs of neighbours (a, b) of the first numbers of each head as (a cos - b sin, b cos + a sin)."""
        n = int(x.shape[-1] * self.part) // 2 * 2
        angle = np.arange(x.shape[1])[:, None] * 10000.0 ** (-np.arange(0, n, 2) / n)
        a, b, out = x[..., 0:n:2], x[..., 1:n:2], x.copy()
        out[..., 0:n:2] = a * np.cos(angle) - b * np.sin(angle)
        out[..., 1:n:2] = b * np.cos(angle) + a * np.sin(angle)
        return out

    def attention(self, x, y, p, mask=0.0, turned=True):
        q, k, v = (self.linear(z, f"{p}.{c}_proj").reshape(len(z), self.n_head, -1).transpose(1, 0, 2)
                   for z, c in ((x, "q"), (y, "k"), (y, "v")))
        q, k = (self.turned(q), self.turned(k)) if turned else (q, k)
        o = softmax(q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1]) + mask) @ v
        return self.linear(o.transpose(1, 0, 2).reshape(len(x), -1), p + ".o_proj")

    def encode(self, samples):
        gelu, x = GELUS["exact"], np.asarray(samples, float)[None]
        x = np.tanh(self.conv(x, *CONVS[0]))
        x = (x - x.mean()) / np.sqrt(x.var() + 1e-5)
        x = x * self.t["encoder.groupnorm.weight"][:, None] + self.t["encoder.groupnorm.bias"][:, None]
        x = gelu(self.conv(gelu(self.conv(x, *CONVS[1])), *CONVS[2])).T
        for i in range(self.n_layers):
            p = f"encoder.layers.{i}"
            h = self.norm(x, p + ".input_layernorm")
            x = x + self.attention(h, h, p + ".self_attn")
            h = gelu(self.linear(self.norm(x, p + ".post_attention_layernorm"), p + ".mlp.fc1"))
            x = x + self.linear(h, p + ".mlp.fc2")
        return self.norm(x, "encoder.layer_norm")

    def decode(self, encoded, tokens):
        """Logits (n, n_vocab) of all tokens from the start."""
        x, mask = self.t["decoder.embed_tokens.weight"][tokens], np.triu(np.full((len(tokens),) * 2, -np.inf), 1)
        for i in range(self.n_layers):
            p = f"decoder.layers.{i}"
            h = self.norm(x, p + ".input_layernorm")
            x = x + self.attention(h, h, p + ".self_attn", mask)
            h = self.norm(x, p + ".post_attention_layernorm")
            x = x + self.attention(h, encoded, p + ".encoder_attn", turned=False)
            up, gate = np.split(self.linear(self.norm(x, p + ".final_layernorm"), p + ".mlp.fc1"), 2, -1)
            x = x + self.linear(gate / (1 + np.exp(-gate)) * up, p + ".mlp.fc2")
        return self.norm(x, "decoder.norm") @ self.t["decoder.embed_tokens.weight"].T
