"""Guesses by a layer of the network's own (models/blocks/next_token.py), as a guesser of models/text/speculation.py.

    saw(first, ids, states)     the network has read ids; its states are kept
    guess(ids, n)               pairs (token, state before it) that are new go through the layer, then its own guesses

The layer's keys and values lie in a cache of its own, a row for each position of the text.  States are kept while some
Speculation guesses by them, one of `users`: only then do batches compute those of all tokens.
"""
import weakref

import numpy as np

import ggjit as gg
from ggjit.core.buffer import MultiBuffer
from ggjit.core.placing import place_tensors
from ggjit.models.blocks.description import CacheSizes, Loader, Scope, mask_name, rows_name
from ggjit.ops.core.errors import NotSupported, StaleHandle
from ggjit.ops.core.host_memory import empty
from ggjit.tensors.context import Context

NAME = "next token"                     # of the graph's shape: (NAME, tokens, cache rows)
STATES = "states"                       # in the shape of a batch's graph: logits, and the states of all tokens
ROWS = 64                               # cache rows are looked at in multiples of it, so that few plans serve


class Predictor:
    def __init__(self, m):
        self.m, self.head, self.users = m, m.description.next_token, weakref.WeakSet()
        self.weights = self.head.load(Loader(m.weights, m.n_embd, m.n_vocab))
        self.window, ctx = self.head.block.mixer.window, Context()
        sizes = CacheSizes(m.n_embd, m.kv_type, m.v_type, {self.window: m.n_ctx}, 1)
        self._cache = [ctx.new_tensor(type_, ne, f"{name} next") for name, type_, ne in self.head.block.cache(sizes)]
        self._ctx = ctx
        self.buffer = MultiBuffer([b for b, _ in place_tensors([(m.backend.default_buffer_type, self._cache)])])
        self.buffer.clear()
        self._states = empty((m.n_ctx, m.n_embd), np.float32, "the states of a text's tokens")
        self._seen, self._read = [], []     # the ids whose states are kept, and those whose pairs the layer has read

    def begin_again(self):
        """Forget what was read, and take the weights as they are now: the network computes something else."""
        self.weights = self.head.load(Loader(self.m.weights, self.m.n_embd, self.m.n_vocab))
        self._seen, self._read = [], []

    @property
    def is_used(self):
        return any(s.is_on for s in self.users)

    def knows(self, ids):
        """Are the states of all these ids kept?"""
        return self._seen[:len(ids)] == ids

    @property
    def memory(self):
        """What it keeps of a text, as arrays of bytes."""
        return [b._arena for b in self.buffer.buffers] + [self._states.reshape(-1).view(np.uint8)]

    def check_arena(self):
        """Errors: BudgetError where the largest batches do not fit the network's arena."""
        m = self.m
        if m.arena is not None:
            m._piece(hidden=STATES)
            m.within_arena(m.graph(NAME, min(m.n_batch, m.n_ctx), m.n_ctx))

    def free(self):
        self._ctx.free()
        self.buffer.free()

    def saw(self, first, ids, states):
        """The network has read ids from position `first` on, with these states."""
        del self._seen[first:]
        self._seen += [None] * (first - len(self._seen)) + list(ids)
        self._states[first:first + len(ids)] = states.reshape(len(ids), -1)

    def guess(self, ids, n):
        """At most n ids that may follow."""
        end, n = len(ids), min(n, self.m.n_ctx - len(ids))
        if n < 1 or not self.knows(ids[:end - 1]):
            return []
        at = min(_n_equal(self._read, ids), end - 1)
        for start in range(at, end, self.m.n_batch):
            part = ids[start:min(start + self.m.n_batch, end)]
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
        return np.concatenate([np.zeros((1, self.m.n_embd), np.float32), self._states[:n - 1]])

    def _next(self, ids, first, before):
        """(likeliest token, state) after ids at positions from `first` on, with the states before them."""
        n = len(ids)
        n_kv = min(-(-(first + n) // ROWS) * ROWS, self.m.n_ctx)
        step = self.m._step((NAME, n, n_kv))
        at, keys = np.arange(first, first + n), np.arange(n_kv)
        sees = keys <= at[:, None]
        if self.window:
            sees &= keys > at[:, None] - self.window
        step.inputs["tokens"][:], step.inputs["before"][:] = ids, before
        step.inputs["out_rows"][:] = n - 1
        step.inputs[rows_name(self.window)][:] = at
        step.inputs[mask_name(self.window)][:] = np.where(sees, 0, -np.inf)
        if "positions" in step.inputs:
            step.inputs["positions"][:] = at
        token = int(np.argmax(step.run()))
        return token, step.plan.view(step.more[0]).reshape(1, -1).copy()

    def build(self, ctx, shape):
        """(inputs, logits, state) of the graph for (tokens, cache rows)."""
        (n, n_kv), m = shape, self.m
        inputs = {"tokens": np.zeros(n, np.int32), "before": np.zeros((n, m.n_embd), np.float32),
                  "out_rows": np.zeros(1, np.int32), rows_name(self.window): np.zeros(n, np.int64),
                  mask_name(self.window): np.zeros((n, n_kv), np.float16)}
        if getattr(self.head.block.mixer, "rope", None) is not None:
            inputs["positions"] = np.zeros(n, np.int32)
        leaf = {name: gg.from_numpy(ctx, a, name) for name, a in inputs.items()}
        g = Scope(leaf, n, n_kv, m.description.eps, m.flash, {self.head.layer: self._cache})
        logits, state = self.head.build(g, m.embd, m.out, self.weights)
        return inputs, logits, gg.set_output(state)


def _n_equal(a, b):
    """How many of the first numbers are equal."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])


# ---------------------------------------------------------------- methods of Decoder
def predicts(self, runs, hidden):
    """Are the states of this batch kept for guesses?"""
    return not hidden and len(runs) == 1 and runs[0][0] is self.text and self._hooks.wanted is None \
        and self.predictor is not None and self.predictor.is_used


def show(self, runs, step, hidden=False):
    """Keep the states of a batch for guesses, where they are asked for."""
    if self._predicts(runs, hidden):
        text, ids = runs[0]
        self.predictor.saw(len(text.ids), np.asarray(ids).tolist(), step.plan.view(step.more[0]))


def predicting(self):
    """The Predictor that guesses by the network's own layer.

    Errors: NotSupported, StaleHandle; BudgetError where its batches do not fit the arena.
    """
    with self._lock:
        if self._freed:
            raise StaleHandle(f"{self!r} was freed; load the model again")
        if self.description.next_token is None:
            raise NotSupported(f"{self.file.path} has no layer that guesses tokens further on, or none that is "
                               f"computed here; speculative=\"lookup\" needs none")
        if self.scheduler is not None:
            raise NotSupported("speculative=\"mtp\" is computed on the CPU alone; leave n_gpu_layers and devices out")
        if self.predictor is None:
            self.predictor = Predictor(self)
            try:
                self.predictor.check_arena()
            except BaseException:
                self.predictor.free()
                self.predictor = None
                raise
        if self.text is not None and not self.predictor.knows(self.text.ids):
            self.reset()                # of what was read before no states are known
        return self.predictor
