"""The loss of a decoder as a graph: token ids and the ids that follow in, one number out.

    hidden = network(tokens)                                    keys and values are those of these tokens: no cache
    loss   = mean over tokens of  logsumexp(W hidden) - (W hidden)[target]

The rows of logits of a large vocabulary, and their gradient, are the largest nodes of a training.  They are computed
for CHUNK tokens at a time, each chunk with a cross-entropy of its own, so that a byte budget holds one chunk at once:

    chunk k     logits = W hidden[k],  labels = one-hot(targets[k]),  cross_entropy_loss(logits, labels)
"""
import numpy as np

import ggjit as gg
from ggjit.models.blocks.description import Scope, mask_name
from ggjit.models.networks.parts import decoder_graph
from ggjit.ops.core.errors import NotSupported, ParamError

CHUNK = 64                      # tokens whose logits are computed at once


class TokenLoss:
    """`.tokens`, `.targets` (leaves [n_tokens, 1], I32) and `.loss` (one F32) of a decoder's weights.

        part = TokenLoss(network, 256)
        gg.train.fit((part.tokens, part.targets), part.loss, gg.train.Dataset(part.rows(ids)), loss="mean")

    Errors: NotSupported for layers that keep states; ParamError for a length outside the context.
    """

    def __init__(self, network, n_tokens, chunk=CHUNK):
        if network.recurrent:
            raise NotSupported(f"training: the {network.file.arch} network keeps states between tokens, which has no "
                               f"gradient here; networks of attention layers can be trained")
        if any(getattr(piece, "cached", False) for piece in network.description.pieces):
            raise NotSupported(f"training: attention of the {network.file.arch} network works on a cache here, through "
                               f"which no gradient passes; other networks of attention layers can be trained")
        if not 2 <= n_tokens <= network.n_ctx:
            raise ParamError(f"training: rows of {n_tokens} tokens; 2 to {network.n_ctx} are possible (n_ctx of the "
                             f"model)")
        self.n_tokens, self.chunk, self.n_vocab = n_tokens, min(chunk, n_tokens), network.n_vocab
        self.ctx = gg.Context()
        with self.ctx:
            self.tokens, self.targets = (gg.set_input(self.ctx.new_tensor(gg.I32, (n_tokens, 1), name=name))
                                         for name in ("tokens", "targets"))
            self.loss = self._loss(network, self._hidden(network))

    def _hidden(self, network):
        about, n = network.description, self.n_tokens
        leaf = {name: gg.from_numpy(self.ctx, a, name) for name, a in about.constants.items()}
        leaf["tokens"] = gg.reshape_1d(self.tokens, n)
        if about.rotates:
            leaf["positions"] = gg.from_numpy(self.ctx, np.arange(n, dtype=np.int32), "positions")
        for window in network.cells.values:
            leaf[mask_name(window)] = gg.from_numpy(self.ctx, network.cells.mask(window, n), mask_name(window))
        if about.temperature:
            values = about.temperatures(0, n).astype(np.float32).reshape(n, 1, 1)
            leaf["temperature"] = gg.from_numpy(self.ctx, values, "temperature")
        g = Scope(leaf, n, n, about.eps, False, None)
        x = decoder_graph.through_blocks(network, g, self._embedded(network, g))
        return gg.set_name(g.norm(x, about.norm, network.out_norm), "result_norm")

    def _embedded(self, network, g):
        """What the first layer reads."""
        return decoder_graph.embedded(network, g)

    def _loss(self, network, x):
        def of_chunk(hidden, ids):
            return gg.cross_entropy_loss(decoder_graph.logits(network, hidden), self._one_hot(ids))
        return gg.set_name(gg.train.mean_in_chunks(of_chunk, x, gg.reshape_1d(self.targets, self.n_tokens),
                                                   chunk=self.chunk), "loss")

    def _one_hot(self, ids):
        """[n_vocab, size]: a 1 at each of `ids`, which count the elements of all rows."""
        size = ids.ne[0]
        ones = gg.from_numpy(self.ctx, np.ones((size, 1), np.float32))
        table = self.ctx.new_tensor(gg.F32, (1, self.n_vocab * size))
        return gg.reshape_2d(gg.get_rows_back(ones, ids, table), self.n_vocab, size)

    def rows(self, ids):
        """(tokens, targets): arrays [rows, n_tokens] of a text's ids, as `tokens` and `targets` take them.

        The last id of a row is the first of the next one.  Errors: ParamError for a text shorter than a row.
        """
        n = self.n_tokens
        ids = np.asarray(ids, np.int32)
        n_rows = (len(ids) - 1) // n
        if n_rows < 1:
            raise ParamError(f"training: {len(ids)} tokens are fewer than a row of {n} and the one after it; give more "
                             f"text, or a shorter context")
        tokens, after = (ids[shift:shift + n_rows * n].reshape(n_rows, n) for shift in (0, 1))
        return tokens, after + self.n_vocab * (np.arange(n, dtype=np.int32) % self.chunk)
