"""Encoders from a Description: all tokens of a text at once, nothing is kept between calls; token ids in, one
L2-normalised vector per text out.

    x = norm(embd[ids] + pos[0..T] + type[0])           what of it the description has
    x = block(x) for every block,  x = norm(x)
    e = mean over tokens of x, the first or the last;  e / |e|;  of a reranker its classifier's scores (pooling.py)

Masks, positions and buckets depend on the number of tokens only: they are constants of its graph.  With ALiBi a mask
holds -|i - j|; windows reach half their width to both sides.
"""
import numpy as np

import ggjit as gg
from ggjit.core.arguments import typed_methods
from ggjit.models.blocks.description import Loader, Scope, mask_name
from ggjit.models.blocks.hparams import HParams
from ggjit.models.families.registry import ENCODERS
from ggjit.models.networks.base.network import Network
from ggjit.models.networks.parts.pooling import RANK, Pooling

VECTOR, HIDDEN, PAIR = "vector", "hidden", "pair"       # results of a graph
FARTHEST = 128                  # from this distance on all tokens share T5's last bucket


@typed_methods
class Encoder(Network):
    """`m.embed(["a text", ...])` -> (n, dim) float32, `m.hidden(ids)`; of rerankers `m.rerank(query, texts)`."""
    REPACKS = True                  # products have many columns at a time, for which every repacked layout is faster
    CAUSAL = False
    FAMILIES, POOLING = ENCODERS, "mean"            # {architecture: description}, and how tokens become one vector

    def _load(self):
        hparams = HParams(self.file)
        self.n_embd, self.n_layer = hparams.n_embd, hparams.n_layer
        self.n_ctx_train = self.n_ctx = hparams.n_ctx = hparams.n_ctx_train
        self.description = about = self.FAMILIES[self.file.arch](hparams)
        self.n_head = about.blocks[0].mixer.n_head
        loader, tensors = Loader(self.weights, self.n_embd), self.file.tensors
        table, types = tensors.get("token_embd.weight"), tensors.get("token_types.weight")
        self.n_vocab = table.ne[1] if table and len(table.ne) > 1 else 0
        self.embd = loader.want("token_embd.weight", self.n_embd, self.n_vocab)
        self.weights.read_by_rows(self.embd)
        self.pos = loader.want("position_embd.weight", self.n_embd, self.n_ctx) if about.positions else None
        self.type = None
        if about.token_types and types:
            self.type = loader.want("token_types.weight", self.n_embd, types.ne[1] if len(types.ne) > 1 else 1)
        self.embd_norm = loader.norm(about.embd_norm, about.norm) if about.embd_norm else None
        self.out_norm = loader.norm(about.out_norm, about.norm) if about.out_norm else None
        self.layers = [block.load(loader, f"{about.prefix}{i}.") for i, block in enumerate(about.blocks)]
        self.pooling = Pooling(hparams, loader, self.POOLING, False, self.options.pooling)
        self.projections = [loader.want(name + ".weight", *ne) for name, *ne in about.projections]
        self._products = [*loader.matrices, *self.projections]
        self._load_output(loader)

    def _load_output(self, loader):
        """Load what follows the states of tokens."""
        loader.ignore("output.weight")              # some encoders were made from decoders and kept their output matrix

    def _matrices(self):
        return self._products

    def _build(self, ctx, shape):
        """shape: (tokens, what is wanted): VECTOR, HIDDEN, or PAIR, whose tokens have the types of an input."""
        n_tokens, wanted = (*shape, VECTOR)[:2]
        inputs = {"tokens": np.zeros(n_tokens, np.int32)}
        if wanted == PAIR:
            inputs["types"] = np.zeros(n_tokens, np.int32)
        leaf = {name: gg.from_numpy(ctx, a, name) for name, a in {**inputs, **self._constants(n_tokens)}.items()}
        g = Scope(leaf, n_tokens, n_tokens, self.description.eps, self._flash, None)
        x = self._states(g, n_tokens)
        if wanted == HIDDEN or self.pooling.kind == "none":
            return inputs, x
        e = self.pooling.row(ctx, x, n_tokens)
        if self.pooling.kind == RANK:
            return inputs, self.pooling.scores(g, e)
        for w in self.projections:
            e = gg.mul_mat(w, e)
        return inputs, gg.set_name(gg.l2_norm(e, 1e-12), "embedding")

    def _states(self, g, n_tokens):
        """The last layer's result for every token."""
        about = self.description
        x = gg.get_rows(self.embd, g.leaf["tokens"])
        x = gg.scale(x, about.embd_scale) if about.embd_scale else x
        # position and type rows are plain windows of their tables (F32 whatever the other weights are)
        if self.pos is not None:
            x = gg.add(x, gg.view_2d(self.pos, self.n_embd, n_tokens, self.pos.nb[1], 0))
        if "types" in g.leaf:
            x = gg.add(x, gg.get_rows(self.type, g.leaf["types"]))
        elif self.type is not None:
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
        """The vector of one text given as token ids; (dim,) float32, of length 1.

        Errors: ParamError for weights that are NaN, NotSupported for a reranker.
        """
        self.pooling.of_embedding()
        return self._pooled(ids)

    def rank_ids(self, ids, n_first=None):
        """The classifier's numbers of one text given as token ids; (n_scores,) float32.

        n_first: of two texts in one, the tokens of the first: the others have the second token type, in models that
        were trained with types.  Errors: as `embed_ids`, NotSupported for a model without a classifier.
        """
        self.pooling.check_ranks()
        return self._pooled(ids, n_first)

    def _pooled(self, ids, n_first=None):
        ids = self._checked_ids(ids, self.n_ctx)
        typed = n_first is not None and self.type is not None and self.type.ne[1] > 1
        with self._lock:
            step = self._step((len(ids), PAIR) if typed else (len(ids),))
            step.inputs["tokens"][:] = ids
            if typed:
                step.inputs["types"][:] = np.arange(len(ids)) >= n_first
            return self._finite(step.run().reshape(-1).copy(), "the text's numbers")

    def hidden(self, ids):
        """(n, dim) float32: the last layer's result for every one of `ids`, neither pooled nor normalised.

        Errors: ParamError for weights that are NaN, IndexRangeError for ids outside the vocabulary.
        """
        ids = self._checked_ids(ids, self.n_ctx)
        with self._lock:
            step = self._step((len(ids), HIDDEN))
            step.inputs["tokens"][:] = ids
            return self._finite(step.run().reshape(len(ids), self.n_embd).copy(), "the hidden states")


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
