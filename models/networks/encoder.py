"""Encoders from a Description: all tokens of a text at once, nothing is kept between calls; token ids in, one
L2-normalised vector per text out.

    x = norm(embd[ids] + pos[0..T] + type[0])           what of it the description has
    x = block(x) for every block,  x = norm(x)
    e = mean over tokens of x, the first or the last;  e / |e|

Masks, positions and buckets depend on the number of tokens only: they are constants of its graph.  With ALiBi a mask
holds -|i - j|; windows reach half their width to both sides.
"""
import numpy as np

import ggjit as gg
from ggjit.core.arguments import typed_methods
from ggjit.models.blocks.description import Loader, Scope, mask_name
from ggjit.models.blocks.hparams import HParams
from ggjit.models.families.registry import ENCODERS
from ggjit.models.networks.network import Network
from ggjit.ops.core.errors import ModelError, TypeMismatch
from ggjit.ops.core.host_memory import empty
from ggjit.ops.core.progress import work

MEAN, CLS, LAST = 1, 2, 3       # pooling_type
FARTHEST = 128                  # from this distance on all tokens share T5's last bucket


@typed_methods
class Encoder(Network):
    """`m.embed(["a text", ...])` -> (n, dim) float32, `m.hidden(ids)`."""
    REPACKS = True                  # many columns at a time: every layout is faster then
    CAUSAL = False

    def _load(self):
        hparams = HParams(self.file)
        self.n_embd, self.n_layer = hparams.n_embd, hparams.n_layer
        self.n_ctx_train = self.n_ctx = hparams.n_ctx = hparams.n_ctx_train
        self.pooling = self._pooling(hparams)
        self.description = about = ENCODERS[self.file.arch](hparams)
        self.n_head = about.blocks[0].mixer.n_head
        loader, tensors = Loader(self.weights, self.n_embd), self.file.tensors
        table, types = tensors.get("token_embd.weight"), tensors.get("token_types.weight")
        self.n_vocab = table.ne[1] if table and len(table.ne) > 1 else 0
        self.embd = loader.want("token_embd.weight", self.n_embd, self.n_vocab)
        self.pos = loader.want("position_embd.weight", self.n_embd, self.n_ctx) if about.positions else None
        self.type = None
        if about.token_types and types:
            self.type = loader.want("token_types.weight", self.n_embd, types.ne[1] if len(types.ne) > 1 else 1)
        self.embd_norm = loader.norm(about.embd_norm, about.norm) if about.embd_norm else None
        self.out_norm = loader.norm(about.out_norm, about.norm) if about.out_norm else None
        self.layers = [block.load(loader, f"{about.prefix}{i}.") for i, block in enumerate(about.blocks)]
        self.projections = [loader.want(name + ".weight", *ne) for name, *ne in about.projections]
        self._products = [*loader.matrices, *self.projections]
        loader.ignore("output.weight")              # left from the decoder that the encoder was made from

    def _pooling(self, hparams):
        kind = hparams.get("pooling_type", MEAN, int)
        if kind not in (MEAN, CLS, LAST):
            raise ModelError(f"{self.file.path}: {self.file.arch}.pooling_type {kind} is not supported; supported: "
                             f"mean (1), cls (2), last (3)")
        return kind

    def _matrices(self):
        return self._products

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
        about = self.description
        leaf = {name: gg.from_numpy(ctx, a, name) for name, a in self._constants(n_tokens).items()}
        g = Scope(leaf, n_tokens, n_tokens, about.eps, self._flash, None)
        x = gg.get_rows(self.embd, tokens)
        x = gg.scale(x, about.embd_scale) if about.embd_scale else x
        # position and type rows are plain windows of their tables (F32 whatever the other weights are)
        if self.pos is not None:
            x = gg.add(x, gg.view_2d(self.pos, self.n_embd, n_tokens, self.pos.nb[1], 0))
        if self.type is not None:
            x = gg.add(x, gg.view_2d(self.type, self.n_embd, 1, self.type.nb[1], 0))
        x = gg.set_name(x if self.embd_norm is None else g.norm(x, about.norm, self.embd_norm), "embd")
        for i, (block, w) in enumerate(zip(about.blocks, self.layers, strict=True)):
            x = block.build(g, x, w, i)
        return x if self.out_norm is None else gg.set_name(g.norm(x, about.norm, self.out_norm), "result_norm")

    def _constants(self, n):
        about, at = self.description, np.arange(n, dtype=np.int32)
        apart, out = at[None, :] - at[:, None], {}              # distance of key and query
        if about.rotates and not about.positions:
            out["positions"] = at
        for window in about.windows:
            if about.alibi():
                out[mask_name(window)] = -abs(apart).astype(np.float32)
            elif window:
                out[mask_name(window)] = np.where(abs(apart) <= window // 2, 0, -np.inf).astype(np.float16)
        buckets = max(getattr(p, "rel_buckets", 0) for p in about.pieces)
        if buckets:
            out["buckets"] = relative_buckets(apart, buckets).reshape(-1)
        return out

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
        """(n, dim) float32, rows of length 1; of one text (1, dim).  Errors: ParamError for one beyond the context."""
        texts = [texts] if isinstance(texts, str) else texts
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


def relative_buckets(apart, n_buckets, both=True):
    """T5's bucket of every distance, int32: half of them for keys after the query; near ones alone, then logarithmic.

    both: are there keys after the query?

    Source: arXiv 1910.10683; transformers' T5Attention.
    """
    half = n_buckets // 2 if both else n_buckets
    exact, distance = half // 2, abs(apart) if both else -np.minimum(apart, 0)
    far = np.log(np.maximum(distance, 1) / max(exact, 1)) / np.log(FARTHEST / max(exact, 1)) * (half - exact)
    far = np.minimum(exact + far.astype(np.float32).astype(np.int32), half - 1)
    return ((apart > 0) * half * both + np.where(distance < exact, distance, far)).astype(np.int32)
