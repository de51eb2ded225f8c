"""Batches of a decoder: the shapes of its graphs, and the values of their inputs.

Functions of `self` are methods of Decoder.

A batch is `runs`, [(text, ids)]: the next ids of each of some texts.
"""
import numpy as np

from ggjit.models.networks.base.network import MAX_KEPT_PLANS
from ggjit.models.networks.parts.guesses import STATES
from ggjit.models.networks.parts.kv_cells import KV_STEP
from ggjit.models.text.running_batch import LEAST_PIECE

APART = -1                              # in a graph's shape, in place of the number of page tables


# ---------------------------------------------------------------- shapes
def shape(self, runs, n_tables, all_rows=False, hidden=False, apart=False):
    """The shape of a batch's graph.  apart: each token of a text gets the bits it has alone."""
    n_runs = len(runs)
    n = len(runs[0][1]) if n_runs == 1 else sum([len(ids) for _, ids in runs])
    hidden = STATES if self._predicts(runs, hidden) else hidden
    sizes = n, (self.cells.n_keys if n_tables else self.cells.n_kv)(runs), n if all_rows else n_runs, hidden
    n_states = n_runs if self.recurrent else 1
    if self.pictures is not None and any((np.asarray(ids) >= self.n_vocab).any() for _, ids in runs):
        return *sizes, n_states, APART if apart else n_tables, True
    return (*sizes, n_states, APART if apart else n_tables) if apart or n_tables else (*sizes, n_states)


def n_tables(self, runs):
    """Page tables of a batch: one of a text, or one for each of several that have a token each; 0: none, since the
    rows of a text follow its positions, or since texts have several tokens."""
    if not self.cells.paged or self._hooks.wanted is not None:
        return 0
    if len(runs) == 1:
        return int(runs[0][0] is not self.text)
    return len(runs) if all(len(ids) == 1 for _, ids in runs) else 0


def largest_graph(self, all_logits=False):
    """A full batch that ends at the last cache row: what the compute arena is made for."""
    return self.graph(*self.full_batch(self._piece(all_logits), all_logits))


def full_batch(self, n, all_rows=False, hidden=False):
    """The shape of a graph of n tokens that end at the last cache row."""
    return n, self.cells.most, n if all_rows else min(n, self.n_seqs), hidden


def piece(self, all_rows=False, hidden=False):
    """Tokens that are read at once."""
    n = min(self.n_batch, self.n_ctx)
    return n if self.arena is None else min(n, self.arena.piece(all_rows, hidden))


def n_plans(self):
    """Of one text, or of the n_seqs that load_model was asked for: prompts of equal length that fill the cache, read
    together, then tokens of fewer and fewer texts, while the keys of the longest become more."""
    n, n_texts = self._piece(), self.options.n_seqs or 1
    end = self.n_ctx if n_texts == 1 else max(self.n_ctx, self.cells.most)
    plans = len({self.cells.rounded(k) for k in range(n, end + n, n)})
    if n_texts > 1:
        plans += len({padded_count(k + 1) for k in range(n_texts)}) * -(-min(end // n_texts, self.n_ctx) // KV_STEP)
    return min(plans, MAX_KEPT_PLANS)


def n_rows_held(self):
    """Rows of logits: of the texts that load_model was asked for those of a step, and those of the step before."""
    n_texts = self.options.n_seqs or 1
    return 1 if n_texts == 1 else 2 * n_texts


def least_piece(self):
    """Tokens that a batch of any length can be cut into so many of, and pieces that the same kernels compute; they
    hold a picture."""
    picture = self.vision is not None and self.vision.sees_all
    return max(2 * LEAST_PIECE, self.vision.family.most(self.vision) if picture else 0)


def shape_of(self, n_tokens):
    return n_tokens, self.cells.rounded(n_tokens), 1


def most_at_once(self):
    return self.n_batch


def common_shapes(self):
    """Decode, a short and a long prompt."""
    return [(n, self.cells.rounded(n), 1, False, 1) for n in (1, 4, 64) if n <= self.n_ctx]


def later_shapes(self):
    """Shapes of the steps that follow a prompt: single tokens."""
    return self._common_shapes()[:1]


def text_shapes(self):
    """A full batch of one text, and the tokens that follow."""
    n, n_kv, _, hidden = full_batch(self, self._piece())
    return [(n, n_kv, 1, hidden), *self._later_shapes()]


def compared_shapes(self):
    cached = bool(self.description.windows)
    return [(n, n_kv * cached, n) for n, n_kv in ((1, 1), (2, 1), (1, 2)) if max(n, n_kv) <= self.n_ctx]


# ---------------------------------------------------------------- inputs
def fill(self, inputs, runs, state_rows, n_tables=0):
    """Write tokens, positions, cache rows and masks of a batch to the inputs of its graph."""
    at, tokens, positions = 0, inputs["tokens"], inputs.get("positions")
    for i, (text, ids) in enumerate(runs):
        n, past = len(ids), len(text.ids)
        end = at + n
        tokens[at:end] = ids
        if "picture" in inputs:
            tokens[at:end][ids >= self.n_vocab] = 0
            self.pictures.fill(ids, inputs["picture"][at:end], inputs["is_text"][at:end])
        if positions is not None:
            first = past - self.pictures.saved(text) if self._has_grid else past
            if n == 1:
                positions[at] = first
            else:
                positions[at:end] = np.arange(first, first + n)
            if "parts" in inputs:
                parts, _ = self.pictures.positions(ids, past, past - first)
                inputs["parts"].reshape(4, -1)[:3, at:end] = parts
        for more in self.description.inputs:
            more.fill(inputs, at, text, ids)
        if "temperature" in inputs:
            inputs["temperature"][at:end, 0, 0] = self.description.temperatures(past, n)
        if n_tables:
            self.cells.place_pages(inputs, at, text, n, i)
        else:
            self.cells.place(inputs, at, text, n)
        if "picture" in inputs and self.vision is not None and self.vision.sees_all:
            for start, stop in self.pictures.runs(ids):
                self.cells.open_mask(inputs, at, text, start, stop, bool(n_tables))
        at = end
    if self.recurrent:
        inputs["state_row"][:], inputs["next_state_row"][:] = [text.state_row for text, _ in runs], state_rows
    if "out_rows" in inputs:
        inputs["out_rows"][:] = np.cumsum([len(ids) for _, ids in runs]) - 1


def batches(self, ids, n):
    """[ids of each batch], n or fewer; a picture whose vectors attend to each other stays in one batch.  Within an
    arena the batches that were asked for are cut into equal pieces, so that none is short unless its batch was."""
    if len(ids) <= n:
        return [ids] if len(ids) else []
    attends = self.vision is not None and self.vision.sees_all
    if self.arena is not None and not attends:
        whole = min(self.options.n_batch, self.n_ctx)
        asked = np.split(ids, range(whole, len(ids), whole))
        return [piece for batch in asked for piece in np.array_split(batch, -(-len(batch) // n))]
    ends = list(range(n, len(ids), n))
    if ends and attends:
        ends, whole = [], self.pictures.runs(ids)
        while (end := (ends[-1] if ends else 0) + n) < len(ids):
            ends.append(next((a for a, b in whole if a < end < b), end))
    return np.split(ids, ends)


def padded_count(n):
    """How many runs of one token n of them are computed as: a power of two, beyond eight a quarter of one more."""
    step = max(1 << (n - 1).bit_length() >> 2, 1) if n > 8 else 1 << (n - 1).bit_length()
    return n + -n % step


def padded(self, runs, state_rows):
    """Runs of one token, and their state_rows, up to padded_count."""
    more = padded_count(len(runs)) - len(runs) if all(len(ids) == 1 for _, ids in runs) else 0
    return runs + runs[-1:] * more, state_rows + state_rows[-1:] * more
