"""The common part of networks that propose tokens for a Decoder (predictor.py, drafting.py); see
models/text/speculation.py.

    read(g, x, rows)            node of the decoder's graph: what is kept of every token, its state
    saw(first, ids, states)     the decoder has read ids
    guess(ids, n)               ids that may follow

A decoder has one at a time, `m.predictor`.  States are kept while some Speculation guesses by them, one of `users`:
only then do batches compute those of all tokens.  The guessing network's graphs are planned and run by the decoder; its
keys and values lie in caches of its own, a row for each position of the text.
"""
import weakref

import numpy as np

import ggjit as gg
from ggjit.core.placing import place_tensors
from ggjit.models.blocks.description import CacheSizes, Scope, mask_name, rows_name
from ggjit.ops.core.errors import NotSupported, StaleHandle
from ggjit.ops.core.host_memory import empty
from ggjit.tensors.context import Context

NAME = "next token"                     # of the graphs' shapes: (NAME, ...)
STATES = "states"                       # in the shape of a batch's graph: logits, and what is kept of all tokens
ROWS = 64                               # cache rows are looked at in multiples of it, so that few plans serve


class Guesses:
    """mixers: {layer: what attends there}; n_more: rows of the caches beyond the context.  eps: of the network's norms.
    """
    eps = 0.0

    def __init__(self, m, n_state, mixers, n_more=0):
        self.m, self.windows, self.n_rows = m, sorted({mixer.window for mixer in mixers.values()}), m.n_ctx + n_more
        sizes = CacheSizes(m.n_embd, m.kv_type, m.v_type, dict.fromkeys(self.windows, self.n_rows), 1)
        self._ctx = Context()
        self.cache = {i: [self._ctx.new_tensor(type_, ne, f"{name} next {i}") for name, type_, ne in mixer.cache(sizes)]
                      for i, mixer in mixers.items()}
        leaves = [t for kept in self.cache.values() for t in kept]
        self.buffers = [b for b, _ in place_tensors([(m.backend.default_buffer_type, leaves)])] if leaves else []
        for b in self.buffers:
            b.clear()
        self._states = empty((m.n_ctx, n_state), np.float32, "the states of a text's tokens")
        self._seen, self._read = [], []     # the ids whose states are kept, and those that were read of them
        self.users = weakref.WeakSet()

    def begin_again(self):
        """Forget what was read: the decoder computes something else from now on."""
        self._seen, self._read = [], []

    @property
    def is_used(self):
        return any(s.is_on for s in self.users)

    @property
    def memory(self):
        """What it keeps of a text, as arrays of bytes."""
        return [b._arena for b in self.buffers] + [self._states.reshape(-1).view(np.uint8)]

    def largest_shapes(self):
        """Of its graphs' shapes, behind NAME, those that take most."""
        return [(min(self.m.n_batch, self.m.n_ctx), self.n_rows)]

    def check_arena(self):
        """Errors: BudgetError where the largest batches do not fit the decoder's arena."""
        m = self.m
        if m.arena is not None:
            m._piece(hidden=STATES)
            for shape in self.largest_shapes():
                m.within_arena(m.graph(NAME, *shape))

    def free(self):
        self._ctx.free()
        for b in self.buffers:
            b.free()

    def knows(self, ids):
        """Are the states of all these ids kept?  None are once the decoder has another guesser."""
        return self.m.predictor is self and self._seen[:len(ids)] == ids

    def saw(self, first, ids, states):
        """The network has read ids from position `first` on, with these states."""
        del self._seen[first:]
        self._seen += [None] * (first - len(self._seen)) + list(ids)
        self._states[first:first + len(ids)] = states.reshape(len(ids), -1)

    def read_of(self, ids):
        """How many of the first ids were read already."""
        n = min(len(self._read), len(ids))
        if self._read[:n] == ids[:n]:
            return n
        return next(i for i in range(n) if self._read[i] != ids[i])

    def rounded(self, n):
        """Cache rows that are looked at for the first n of them."""
        return min(-(-n // ROWS) * ROWS, self.n_rows)

    # ------------------------------------------------------------ graphs
    def inputs(self, n, n_kv, **more):
        """Inputs of a graph of n tokens that looks at n_kv cache rows."""
        inputs = {"positions": np.zeros(n, np.int32), **more}
        for w in self.windows:
            inputs |= {rows_name(w): np.zeros(n, np.int64), mask_name(w): np.zeros((n, n_kv), np.float16)}
        return inputs

    def scope(self, ctx, inputs, n, n_kv):
        """The Scope of a graph of n tokens with these inputs."""
        leaf = {name: gg.from_numpy(ctx, a, name) for name, a in inputs.items()}
        return Scope(leaf, n, n_kv, self.eps, self.m.flash, self.cache)

    def place(self, inputs, at, sees):
        """The tokens at positions `at` (n,) are written there, and see the rows where sees (n, n_kv) is true, no
        further back than their window."""
        inputs["positions"][:] = at
        for w in self.windows:
            near = np.arange(sees.shape[1]) > at[:, None] - (w or len(self._states) * 2)
            inputs[rows_name(w)][:], inputs[mask_name(w)][:] = at, np.where(sees & near, 0, -np.inf)


def use(m, kind, made):
    """The guesser of that Decoder: its own if it is `kind`, or what made() gives.  Errors: NotSupported, StaleHandle;
    BudgetError where its batches do not fit the arena."""
    with m._lock:
        if m._freed:
            raise StaleHandle(f"{m!r} was freed; load the model again")
        if m.scheduler is not None:
            raise NotSupported("networks that guess are computed on the CPU alone; leave n_gpu_layers and devices out")
        if not kind(m.predictor):
            drop(m)
            m.predictor = made()
            try:
                m.predictor.check_arena()
            except BaseException:
                drop(m)
                raise
        if m.text is not None and not m.predictor.knows(m.text.ids):
            m.reset()                       # of what was read before no states are known
        return m.predictor


def drop(m):
    """The Decoder guesses no more."""
    if m.predictor is not None:
        m._steps.clear()
        m.predictor.free()
        m.predictor = None
