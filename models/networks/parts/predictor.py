"""Tokens proposed by a layer of the network itself (models/blocks/next_token.py).

    saw(first, ids, states)     the network has read ids; its states are kept
    guess(ids, n)               pairs (token, state before it) that are new go through the layer, then its own guesses
"""
import numpy as np

import ggjit as gg
from ggjit.models.blocks.description import Loader
from ggjit.models.networks.parts import decoder_graph as graphs
from ggjit.models.networks.parts.guesses import NAME, Guesses, use
from ggjit.ops.core.errors import NotSupported


class PairGuesses(Guesses):
    """Guesses of a network (`self.head`) of one layer that reads a token and the state before it.

    head.build(g, embd, out, weights) -> (logits, state) after the last token.
    """
    FIRST = 0                           # of the tokens, the first that makes a pair; it takes cache row 0

    def guess(self, ids, n):
        """At most n ids that may follow."""
        end, n = len(ids), min(n, self.m.n_ctx - len(ids))
        if n < 1 or end <= self.FIRST or not self.knows(ids[:end - 1]):
            return []
        for start in range(max(min(self.read_of(ids), end - 1), self.FIRST), end, self.m.n_batch):
            part = ids[start:min(start + self.m.n_batch, end)]
            if max(part) >= self.m.n_vocab:         # a picture, which has no embedding
                return []
            token, state = self._next(part, start, self._before(start, len(part)))
        self._read, found = list(ids), [token]
        while len(found) < n:
            token, state = self._next(found[-1:], end + len(found) - 1, state)
            found.append(token)
        return found

    def _before(self, first, n):
        """The states before n positions; nothing is before the text."""
        if first:
            return self._states[first - 1:first - 1 + n]
        return np.concatenate([np.zeros((1, self._states.shape[1]), np.float32), self._states[:n - 1]])

    def _next(self, ids, first, before):
        """(likeliest token, state) after ids at positions from `first` on, with the states before them."""
        n, first = len(ids), first - self.FIRST
        n_kv, at = self.rounded(first + n), np.arange(first, first + n)
        step = self.m._step((NAME, n, n_kv))
        step.inputs["tokens"][:], step.inputs["before"][:] = ids, before
        step.inputs["out_rows"][:] = n - 1
        self.place(step.inputs, at, np.arange(n_kv) <= at[:, None])
        token = self._likeliest(step.run())
        return token, step.plan.view(step.more[0]).reshape(1, -1).copy()

    def _likeliest(self, logits):
        return int(np.argmax(logits))

    def build(self, ctx, shape):
        """(inputs, logits, state) of the graph for (tokens, cache rows)."""
        (n, n_kv), m = shape, self.m
        inputs = self.inputs(n, n_kv, tokens=np.zeros(n, np.int32), out_rows=np.zeros(1, np.int32),
                             before=np.zeros((n, self._states.shape[1]), np.float32))
        logits, state = self.head.build(self.scope(ctx, inputs, n, n_kv), m.embd, m.out, self.weights)
        return inputs, logits, gg.set_output(state)


class Predictor(PairGuesses):
    """Those of the network's own layer."""

    def __init__(self, m):
        self.head, self.eps = m.description.next_token, m.description.eps
        self.weights = self.head.load(Loader(m.weights, m.n_embd, m.n_vocab))
        super().__init__(m, m.n_embd, {self.head.layer: self.head.block.mixer})

    def begin_again(self):
        super().begin_again()
        self.weights = self.head.load(Loader(self.m.weights, self.m.n_embd, self.m.n_vocab))

    def read(self, g, x, rows):
        return graphs.states(self.m, g, x, rows)


# ---------------------------------------------------------------- methods of Decoder
def predicts(self, runs, hidden):
    """Are the states of this batch kept for guesses?"""
    return self.predictor is not None and self.predictor.is_used and not hidden and len(runs) == 1 \
        and runs[0][0] is self.text and self._hooks.wanted is None


def show(self, runs, step, hidden=False):
    """Keep the states of a batch for guesses, where they are asked for."""
    if self._predicts(runs, hidden):
        text, ids = runs[0]
        self.predictor.saw(len(text.ids), np.asarray(ids).tolist(), step.plan.view(step.more[0]))


def predicting(self):
    """The Predictor that guesses by the network's own layer.

    Errors: NotSupported, StaleHandle; BudgetError where its batches do not fit the arena.
    """
    if self.description.next_token is None:
        raise NotSupported(f"{self.file.path} has no layer that guesses tokens further on, or none that is "
                           f"computed here; speculative=\"lookup\" needs none")
    return use(self, lambda known: type(known) is Predictor, lambda: Predictor(self))
