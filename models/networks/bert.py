"""BERT sentence encoders (MiniLM and kin): token ids in, one L2-normalised vector per text out.

    x = norm(embd[ids] + pos[0..T] + type[0])
    per layer:  x = norm(x + Wo attn(x)),  x = norm(x + W2 gelu(W1 x))          (post-norm, biases everywhere)
    e = mean over tokens of x;  e / |e|

GELU is the exact form (erf), as the model was trained; llama.cpp reads the tanh form from a float16 table.
"""
import numpy as np

import ggjit as gg
from ggjit.models.blocks.attention import attend
from ggjit.models.blocks.description import Scope
from ggjit.models.blocks.hparams import HParams
from ggjit.models.networks.network import Network
from ggjit.ops.core.errors import ModelError, TypeMismatch
from ggjit.ops.core.host_memory import empty
from ggjit.ops.core.progress import work

MEAN, CLS, LAST = 1, 2, 3       # bert.pooling_type
LINEAR = "attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down"


class Bert(Network):
    """`m.embed(["a text", ...])` -> (n, dim) float32."""
    REPACKS = True                  # many columns at a time: every layout is faster then
    CAUSAL = False
    projections = ()                # matrices that the pooled embedding passes

    def _load(self):
        hparams = HParams(self.file)
        get = hparams.positive
        self.n_embd, self.n_layer = get("embedding_length"), get("block_count")
        self.n_head = get("attention.head_count")
        self.n_ff, self.n_ctx_train = get("feed_forward_length"), get("context_length")
        self.n_ctx = self.n_ctx_train
        self.eps = hparams.eps("layer")
        self.pooling = self._pooling(hparams)
        if self.n_embd % self.n_head:
            raise ModelError(f"{self.file.path}: {self.n_head} heads do not divide embedding_length {self.n_embd}")
        hparams.same("attention.head_count_kv", self.n_head)
        for key in ("attention.key_length", "attention.value_length"):
            hparams.same(key, self.n_embd // self.n_head)
        table = self.file.tensors.get("token_embd.weight")
        self.n_vocab = table.ne[1] if table and len(table.ne) > 1 else 0
        want, d, f = self.weights.want, self.n_embd, self.n_ff
        self.embd = want("token_embd.weight", d, self.n_vocab)
        self.pos = want("position_embd.weight", d, self.n_ctx)
        types = self.file.tensors.get("token_types.weight")
        self.type = want("token_types.weight", d, types.ne[1] if types and len(types.ne) > 1 else 1)
        self.embd_norm = self._norm_weights("token_embd_norm")
        self.layers = []
        for i in range(self.n_layer):
            p = f"blk.{i}."
            shapes = zip(LINEAR, [(d, d)] * 4 + [(d, f), (f, d)], strict=True)
            linear = {n: (want(f"{p}{n}.weight", *ne), want(f"{p}{n}.bias", ne[1])) for n, ne in shapes}
            self.layers.append({**linear, "attn_norm": self._norm_weights(p + "attn_output_norm"),
                                "out_norm": self._norm_weights(p + "layer_output_norm")})

    def _pooling(self, hparams):
        kind = hparams.get("pooling_type", MEAN, int)
        if kind not in (MEAN, CLS, LAST):
            raise ModelError(f"{self.file.path}: {self.file.arch}.pooling_type {kind} is not supported; supported: "
                             f"mean (1), cls (2), last (3)")
        return kind

    def _matrices(self):
        return [layer[n][0] for layer in self.layers for n in LINEAR]

    def _norm_weights(self, name):
        return self.weights.want(name + ".weight", self.n_embd), self.weights.want(name + ".bias", self.n_embd)

    def _norm(self, x, wb):
        return gg.add(gg.mul(gg.norm(x, self.eps), wb[0]), wb[1])

    def _build(self, ctx, shape):
        n_tokens, hidden = (*shape, False)[:2]
        ids = np.zeros(n_tokens, np.int32)
        x = self._states(ctx, gg.from_numpy(ctx, ids, "tokens"), n_tokens)
        if hidden:
            return {"tokens": ids}, x
        if self.pooling in (CLS, LAST):
            e = gg.view_2d(x, self.n_embd, 1, x.nb[1], (n_tokens - 1) * x.nb[1] if self.pooling == LAST else 0)
        else:
            weights = gg.from_numpy(ctx, np.full((1, n_tokens), 1 / n_tokens, np.float32), "mean weights")
            e = gg.mul_mat(gg.cont(gg.transpose(x)), weights)
        for w in self.projections:
            e = gg.mul_mat(w, e)
        return {"tokens": ids}, gg.set_name(gg.l2_norm(e, 1e-12), "embedding")

    def _states(self, ctx, tokens, n_tokens):
        """The last layer's result for every token."""
        x = gg.get_rows(self.embd, tokens)
        # position and type rows are plain windows of their tables (F32 whatever the other weights are)
        x = gg.add(x, gg.view_2d(self.pos, self.n_embd, n_tokens, self.pos.nb[1], 0))
        x = gg.add(x, gg.view_2d(self.type, self.n_embd, 1, self.type.nb[1], 0))
        x = gg.set_name(self._norm(x, self.embd_norm), "embd")
        g = Scope({}, n_tokens, n_tokens, self.eps, self._flash, None)
        for i, layer in enumerate(self.layers):
            x = self._layer(g, x, layer, i)
        return x

    def _layer(self, g, x, w, i):
        d_head, n_tokens = self.n_embd // self.n_head, g.n_tokens

        def named(t, name):
            return gg.set_name(t, f"{name}-{i}")

        def linear(name, x, called):
            weight, bias = w[name]
            return named(gg.add(gg.mul_mat(weight, x), bias), called)

        def heads(x):                           # [n_embd, T] -> [d_head, T, n_head]
            return gg.permute(gg.reshape_3d(x, d_head, self.n_head, n_tokens), 0, 2, 1, 3)
        q, k, v = (heads(linear(f"attn_{n.lower()}", x, f"{n}cur")) for n in "QKV")
        attn = gg.reshape_2d(attend(g, q, k, v, None, d_head ** -0.5, i), self.n_embd, n_tokens)
        x = named(self._norm(gg.add(linear("attn_output", attn, "attn_out"), x), w["attn_norm"]), "attn_output_norm")
        h = named(gg.gelu_erf(linear("ffn_up", x, "ffn_up")), "ffn_gelu_erf")
        return named(self._norm(gg.add(linear("ffn_down", h, "ffn_out"), x), w["out_norm"]), "l_out")

    def largest_graph(self, all_logits=False):
        """The longest text the model takes."""
        return self.graph(self.n_ctx)

    def _common_shapes(self):
        return (8,), (64,)

    def _compared_shapes(self):
        return [(n,) for n in (1, 2) if n <= self.n_ctx]

    def embed_ids(self, ids):
        """The vector of one text given as token ids; (dim,) float32.  Errors: ParamError for weights that are NaN."""
        ids = self._checked_ids(ids, self.n_ctx)
        with self._lock:
            step = self._step((len(ids),))
            step.inputs["tokens"][:] = ids
            return self._finite(step.run().reshape(-1).copy(), "the embedding's numbers")

    def hidden(self, ids):
        """(n, dim) float32: the last layer's result for every one of `ids`, neither pooled nor normalised.

        Errors: ParamError for weights that are NaN, IndexRangeError for ids outside the vocabulary.
        """
        ids = self._checked_ids(ids, self.n_ctx)
        with self._lock:
            step = self._step((len(ids), True))
            step.inputs["tokens"][:] = ids
            return self._finite(step.run().reshape(len(ids), self.n_embd).copy(), "the hidden states")

    def embed(self, texts):
        """(n, dim) float32, rows of length 1.  Errors: ParamError for a text longer than the context."""
        if not isinstance(texts, list | tuple) or not all(isinstance(t, str) for t in texts):
            got = type(texts).__name__ if not isinstance(texts, list | tuple) else \
                next(repr(t) for t in texts if not isinstance(t, str))
            raise TypeMismatch(f"embed takes a list of strings, got {got}")
        out = empty((len(texts), self.n_embd), np.float32, "embed")
        with work("embedding", len(texts)) as step:
            for i, text in enumerate(texts):
                out[i] = self.embed_ids(self.tokenize(text))
                step()
        return out
