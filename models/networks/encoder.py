"""Encoders from a Description: all tokens of a text at once, nothing is kept between calls.

    x = norm(embd[ids] + type[0]),  x = block(x) for every block, x = norm(x);  pooled and normalised as BERT's

Masks, positions and buckets depend on the number of tokens only: they are constants of its graph.  With ALiBi a mask
holds -|i - j|; windows reach half their width to both sides.
"""
import numpy as np

import ggjit as gg
from ggjit.models.blocks.description import Loader, Scope, mask_name
from ggjit.models.blocks.hparams import HParams
from ggjit.models.families.registry import ENCODERS
from ggjit.models.networks.bert import Bert

FARTHEST = 128                  # from this distance on all tokens share T5's last bucket


class Encoder(Bert):
    """`m.embed(["a text", ...])`, `m.hidden(ids)`."""

    def _load(self):
        hparams = HParams(self.file)
        self.n_embd, self.n_layer = hparams.n_embd, hparams.n_layer
        self.n_ctx_train = self.n_ctx = hparams.n_ctx = hparams.n_ctx_train
        self.pooling = self._pooling(hparams)
        self.description = about = ENCODERS[self.file.arch](hparams)
        loader, tensors = Loader(self.weights, self.n_embd), self.file.tensors
        table, types = tensors.get("token_embd.weight"), tensors.get("token_types.weight")
        self.n_vocab = table.ne[1] if table and len(table.ne) > 1 else 0
        self.embd = loader.want("token_embd.weight", self.n_embd, self.n_vocab)
        self.type = None
        if about.token_types and types:
            self.type = loader.want("token_types.weight", self.n_embd, types.ne[1] if len(types.ne) > 1 else 1)
        self.embd_norm = loader.norm(about.embd_norm, about.norm) if about.embd_norm else None
        self.out_norm = loader.norm(about.out_norm, about.norm) if about.out_norm else None
        self.layers = [block.load(loader, f"{about.prefix}{i}.") for i, block in enumerate(about.blocks)]
        self.projections = [loader.want(name + ".weight", *ne) for name, *ne in about.projections]
        self._products = [*loader.matrices, *self.projections]
        loader.ignore("output.weight")              # of a decoder that the encoder was made of

    def _matrices(self):
        return self._products

    def _states(self, ctx, tokens, n_tokens):
        about = self.description
        leaf = {name: gg.from_numpy(ctx, a, name) for name, a in self._constants(n_tokens).items()}
        g = Scope(leaf, n_tokens, n_tokens, about.eps, self._flash, None)
        x = gg.get_rows(self.embd, tokens)
        x = gg.scale(x, about.embd_scale) if about.embd_scale else x
        if self.type is not None:
            x = gg.add(x, gg.view_2d(self.type, self.n_embd, 1, self.type.nb[1], 0))
        x = gg.set_name(x if self.embd_norm is None else g.norm(x, about.norm, self.embd_norm), "embd")
        for i, (block, w) in enumerate(zip(about.blocks, self.layers, strict=True)):
            x = block.build(g, x, w, i)
        return x if self.out_norm is None else gg.set_name(g.norm(x, about.norm, self.out_norm), "result_norm")

    def _constants(self, n):
        about, at = self.description, np.arange(n, dtype=np.int32)
        apart, out = at[None, :] - at[:, None], {}              # of key and query
        if about.rotates:
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
