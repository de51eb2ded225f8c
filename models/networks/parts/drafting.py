"""Guesses of a Drafter (models/networks/texts/drafter.py) for its target; models/blocks/drafts.py computes them."""
import numpy as np

import ggjit as gg
from ggjit.models.blocks.attention import Attention, rows_by_head
from ggjit.models.blocks.description import Scope, mask_name
from ggjit.models.blocks.drafts import DFlash, Eagle3, Gemma4Assistant
from ggjit.models.networks.parts import decoder_graph as graphs
from ggjit.models.networks.parts.guesses import NAME, Guesses
from ggjit.models.networks.parts.predictor import PairGuesses
from ggjit.ops.core.errors import ParamError

READ, GUESS = "read", "guess"           # in the shapes of DFlash's graphs


class Drafting(Guesses):
    """mixers: those with caches of their own."""

    def __init__(self, m, drafter, mixers, n_more=0):
        self.drafter, self.head, self.weights, self.eps = drafter, drafter.net, drafter.loaded, drafter.net.eps
        super().__init__(m, self._n_state(m, drafter), dict(enumerate(mixers)), n_more)
        self._ids = self.weights["d2t"].numpy() if "d2t" in self.weights else None      # of the target

    @staticmethod
    def _n_state(m, drafter):
        return drafter.n_embd

    def read(self, g, x, rows):
        features = [graphs.layer_input(self.m, g, i, rows) for i in self.head.layers]
        own = Scope(g.leaf, g.n_tokens, g.n_kv, self.head.eps, g.flash, None)
        return gg.set_output(gg.set_name(self.head.read(own, features, self.weights), "states"))


class EagleDrafting(Drafting, PairGuesses):
    """Pairs of a token and what was read of the one before; the first pair takes cache row 0."""
    FIRST = 1

    def __init__(self, m, drafter):
        super().__init__(m, drafter, [drafter.net.attention])

    def _likeliest(self, logits):
        best = super()._likeliest(logits)
        return best if self._ids is None else int(self._ids[best])


class DFlashDrafting(Drafting):
    """What was read of tokens is written to the caches; a block of masks behind them gives its guesses at once."""

    def __init__(self, m, drafter):
        super().__init__(m, drafter, drafter.net.mixers, drafter.net.block_size)

    def guess(self, ids, n):
        """At most n ids that may follow."""
        past, size = len(ids) - 1, self.head.block_size
        if not self.knows(ids[:past]):
            return []
        for start in range(self.read_of(ids[:past]), past, self.m.n_batch):
            self._keep(start, min(start + self.m.n_batch, past))
        self._read = list(ids[:past])
        n_kv, at = self.rounded(past + size), np.arange(past, past + size)
        step, keys = self.m._step((NAME, GUESS, size, n_kv)), np.arange(n_kv)
        step.inputs["tokens"][:] = [ids[-1]] + [self.head.mask_id] * (size - 1)
        if "d2t" in step.inputs:
            step.inputs["d2t"][:, 0] = self._ids
        self.place(step.inputs, at, keys <= at[:, None] if self.head.causal else np.tile(keys < past + size, (size, 1)))
        found = step.run().reshape(-1)[self.head.first:][:min(n, self.m.n_ctx - len(ids))]
        return [int(i) for i in (found if self._ids is None else self._ids[found])]

    def largest_shapes(self):
        return [(READ, min(self.m.n_batch, self.m.n_ctx), self.n_rows), (GUESS, self.head.block_size, self.n_rows)]

    def _keep(self, first, end):
        """Write keys and values of the positions first .. end - 1."""
        n, n_kv, at = end - first, self.rounded(end), np.arange(first, end)
        step = self.m._step((NAME, READ, n, n_kv))
        step.inputs["before"][:] = self._states[first:end]
        self.place(step.inputs, at, np.ones((n, n_kv), bool))
        step.run()

    def build(self, ctx, shape):
        """(inputs, results...) of the graph for (READ or GUESS, tokens, cache rows)."""
        (kind, n, n_kv), m = shape, self.m
        if kind == READ:
            inputs = self.inputs(n, n_kv, before=np.zeros((n, self._states.shape[1]), np.float32))
            return inputs, *self.head.keep(self.scope(ctx, inputs, n, n_kv), self.weights)
        more = {"d2t": np.zeros((len(self._ids), 1), np.int32)} if self._ids is not None and self.head.rank else {}
        inputs = self.inputs(n, n_kv, tokens=np.zeros(n, np.int32), **more)
        return inputs, self.head.build(self.scope(ctx, inputs, n, n_kv), m.embd, m.out, self.weights)


class AssistantDrafting(Drafting):
    """Every guess stands at the position of the last token, and looks at the target's own keys and values."""

    def __init__(self, m, drafter):
        super().__init__(m, drafter, [])
        are_alike = all(isinstance(b.mixer, Attention) for b in m.description.blocks[-2:])
        mixers = [m.description.blocks[i].mixer for i in self._sources(m)] if are_alike else []
        kinds = {bool(mixer.window): mixer for mixer in mixers}
        for mixer in drafter.net.mixers:
            source = kinds.get(bool(mixer.window))
            if source is None or (source.n_head_kv, source.d_head) != (mixer.n_head_kv, mixer.d_head) or \
                    mixer.window != source.window:
                raise ParamError(f"{drafter.file.path} reads other keys than those of {m.file.path}; take the "
                                 f"assistant of that model")

    @staticmethod
    def _n_state(m, drafter):
        return m.n_embd

    @staticmethod
    def _sources(m):
        """The layers whose keys and values are looked at: the last two, or those that these read."""
        return [i if m.description.blocks[i].mixer.kv_of is None else m.description.blocks[i].mixer.kv_of
                for i in (m.n_layer - 1, m.n_layer - 2)]

    def read(self, g, x, rows):
        return graphs.states(self.m, g, x, rows)

    def guess(self, ids, n):
        """At most n ids that may follow."""
        m, past, found = self.m, len(ids) - 1, []
        if not past or not self.knows(ids[:past]) or m.text.ids != ids[:past]:
            return []
        n_kv = m.cells.n_kv([(m.text, ids[:0])])
        step = m._step((NAME, n_kv))
        step.inputs["positions"][:] = past
        for w, mapping in m.text.mappings.items():
            mask = step.inputs[mask_name(w)]
            mask[:] = -np.inf
            mask[0, mapping.at(max(past - w + 1, 0) if w else 0, past)] = 0
        step.inputs["before"][:], token = self._states[past - 1], ids[-1]
        while len(found) < min(n, m.n_ctx - len(ids)):
            step.inputs["tokens"][:] = token
            token = int(np.argmax(step.run()))
            step.inputs["before"][:] = step.plan.view(step.more[0]).reshape(1, -1)
            found.append(token)
        return found

    def largest_shapes(self):
        return [(self.m.cells.most,)]

    def build(self, ctx, shape):
        """(inputs, logits, state) of the graph for (cache rows,)."""
        (n_kv,), m = shape, self.m
        inputs = {"tokens": np.zeros(1, np.int32), "positions": np.zeros(1, np.int32),
                  "before": np.zeros((1, m.n_embd), np.float32)}
        inputs |= {mask_name(w): np.zeros((1, min(n_kv, n)), np.float16) for w, n in m.cells.n_rows.items()}
        g = self.scope(ctx, inputs, 1, n_kv)
        for i in self._sources(m):
            mixer = m.description.blocks[i].mixer
            g.shared["keys and values", "near" if mixer.window else "far"] = [
                rows_by_head(g, kept, d, mixer.n_head_kv) for kept, d in zip(
                    m.cache[i], (mixer.d_head, mixer.d_head_v), strict=True)]
        logits, state = self.head.build(g, m.embd, m.out, self.weights)
        return inputs, logits, gg.set_output(state)


KINDS = {Eagle3: EagleDrafting, DFlash: DFlashDrafting, Gemma4Assistant: AssistantDrafting}
