"""Adapters in the model's file that special tokens of the text select (Granite Switch); slot 0 changes nothing.

    y = W x + B[slot] (A[slot] x)       slot of a token: that of the adapter's token before it, or its own

Several adapters' tokens in a text give the mean of their slots, rounded, as in llama.cpp, where one head of attention
finds them.
"""
import dataclasses
import functools

import numpy as np

import ggjit as gg
from ggjit.models.blocks.attention import Attention
from ggjit.models.blocks.description import linear
from ggjit.models.blocks.feed_forward import Dense

SLOTS = "adapter"                       # input: the slot of every token


@dataclasses.dataclass(frozen=True)
class Switch:
    """One of Description.inputs.

    tokens: that of each adapter, whose slot is its place plus one; substitutes: what is read in their place; gain: an
    adapter's token counts exp(2 gain) times as much as others.
    """
    n_vocab: int
    tokens: tuple
    substitutes: tuple
    gain: float

    @functools.cached_property
    def _tables(self):
        slots, read = np.zeros(self.n_vocab, np.int32), np.arange(self.n_vocab, dtype=np.int32)
        slots[list(self.tokens)] = np.arange(1, len(self.tokens) + 1)
        read[list(self.tokens)] = self.substitutes
        return slots, read

    one_text = False

    def arrays(self, n_tokens, n_kv):
        """{name: array} for so many tokens."""
        return {SLOTS: np.zeros(n_tokens, np.int32)}

    def fill(self, inputs, at, text, ids):
        """ids follow the text, from `at` on in the batch."""
        end = at + len(ids)
        inputs[SLOTS][at:end], inputs["tokens"][at:end] = self.of(text.ids, ids)

    def of(self, past, ids):
        """(slots, tokens that are read) of ids behind the ids `past`."""
        slots, read = self._tables
        own = slots[np.array([*past, *ids], np.int64)]
        n = np.cumsum(own > 0)
        others = np.arange(1, len(own) + 1) - n
        found = np.where(n > 0, np.cumsum(own) / np.maximum(n + others * np.exp(-2 * self.gain), 1e-30), 0.0)
        return np.floor(found.astype(np.float32) + 0.5)[len(past):].astype(np.int32), read[np.asarray(ids, np.int64)]


def _load(loader, name, n_in, n_out, rank, n_slots):
    """(A, B) of all slots."""
    return (loader.want(name + ".lora_a", n_in, rank, n_slots), loader.want(name + ".lora_b", rank, n_out, n_slots))


def _delta(g, pair, x):
    """B[slot] (A[slot] x) of every token."""
    n_in, t = x.ne[0], x.ne[1]
    slots = gg.reshape_2d(g.leaf[SLOTS], 1, t)
    y = gg.mul_mat_id(pair[1], gg.mul_mat_id(pair[0], gg.reshape_3d(x, n_in, 1, t), slots), slots)
    return gg.reshape_2d(y, y.ne[0], t)


def _switched(g, weights, pair, x):
    return gg.add(linear(weights, x), _delta(g, pair, x))


@dataclasses.dataclass(frozen=True)
class SwitchedAttention(Attention):
    """With one matrix for queries, keys and values, but adapters of each."""
    rank: int = 0
    n_slots: int = 0

    def load(self, loader, p):
        d, sizes = loader.n_embd, {"attn_q": self.n_q, "attn_k": self.n_k, "attn_v": self.n_v}
        pairs = {name + " pair": _load(loader, p + name, d, n, self.rank, self.n_slots) for name, n in sizes.items()}
        out = _load(loader, p + self.out, self.n_o, d, self.rank, self.n_slots)
        return super().load(loader, p) | pairs | {"out pair": out}

    def _project(self, g, n, w, i):
        qkv = gg.set_name(linear(w["attn_qkv"], n), f"wqkv-{i}")
        parts, first = [], 0
        for name, heads, size in (("q", self.n_head, self.n_q), ("k", self.n_head_kv, self.n_k),
                                  ("v", 0, self.n_v)):
            part = gg.cont(gg.view_2d(qkv, size, g.n_tokens, qkv.nb[1], first * qkv.nb[0]))
            part = gg.set_name(gg.add(part, _delta(g, w[f"attn_{name} pair"], n)), f"{name.upper()}cur-{i}")
            parts.append(gg.reshape_3d(part, self.d_head, heads, g.n_tokens) if heads else part)
            first += size
        return *parts, None

    def _output(self, g, o, w):
        return _switched(g, w[self.out], w["out pair"], o)


@dataclasses.dataclass(frozen=True)
class SwitchedDense(Dense):
    """A gated network whose three matrices have adapters."""
    rank: int = 0
    n_slots: int = 0
    looks_back = True                   # slots are known for all tokens of a batch, not for those that are wanted

    def load(self, loader, p):
        d, f = loader.n_embd, self.n_ff
        return super().load(loader, p) | {
            name + " pair": _load(loader, p + name, *ne, self.rank, self.n_slots)
            for name, ne in (("ffn_gate", (d, f)), ("ffn_up", (d, f)), ("ffn_down", (f, d)))}

    def build(self, g, m, w, i):
        gate, up = (gg.set_name(_switched(g, w[name], w[name + " pair"], m), f"{name}-{i}")
                    for name in ("ffn_gate", "ffn_up"))
        h = gg.set_name(gg.swiglu_split(gate, up), f"ffn_swiglu-{i}")
        return gg.set_name(_switched(g, w["ffn_down"], w["ffn_down pair"], h), f"ffn_out-{i}")
