"""The results of a decoder for a text: hidden states, logits, keys and values, a vector, scores.

Functions of `self` are methods of Decoder.
"""
from typing import NamedTuple

import numpy as np

from ggjit.models.core.checks import integer
from ggjit.models.networks.parts.pooling import RANK
from ggjit.ops.core.errors import NotSupported, ParamError


class KeysValues(NamedTuple):
    """What a layer keeps of a text: (n_head_kv, n_tokens, d_head) each, from position `first` on."""
    keys: np.ndarray
    values: np.ndarray
    first: int

    def __repr__(self):
        return f"<KeysValues of {self.keys.shape[1]} tokens from {self.first} on: .keys, .values {self.keys.shape}>"


def _by_head(leaf, rows, n_head):
    """Rows of a cache as (n_head, n_rows, d_head)."""
    a = leaf.numpy().reshape(-1, leaf.ne[0])[np.asarray(rows)]
    return a.reshape(len(a), n_head, -1).transpose(1, 0, 2).astype(np.float32)


def hidden(self, ids):
    """(n, dim) float32: the result of the last norm for every one of `ids`, or of a text's tokens, from position 0.
    The text so far is forgotten.

    Errors: ParamError for weights that are NaN, IndexRangeError for ids outside the vocabulary.
    """
    with self._lock:
        ids = self._checked_ids(ids, self.n_ctx)
        self.reset()
        return self._finite(self._fed(ids, True, hidden=True), "the hidden states")


def embed_ids(self, ids):
    """The vector of one text given as token ids; (dim,) float32, of length 1.  The text so far is forgotten.

    Errors: NotSupported for a file that says no pooling, ParamError for weights that are NaN.
    """
    kind = self.pooling.of_embedding()
    with self._lock:
        ids = self._checked_ids(ids, self.n_ctx)
        self.reset()
        rows = self._fed(ids, kind != "last", hidden=True)
        if kind == "mean":
            e = rows.sum(0, dtype=np.float64) / len(ids)
        else:
            e = rows[0 if kind == "cls" else -1]
        e = self._finite(e, "the text's numbers")
        return (e / max(np.linalg.norm(e.astype(np.float64)), 1e-12)).astype(np.float32)


def rank_ids(self, ids, n_first=None):
    """The classifier's numbers of one text given as token ids; (n_scores,) float32.  The text so far is forgotten.

    Errors: as `embed_ids`; NotSupported for a model without a classifier.
    """
    self.pooling.check_ranks()
    with self._lock:
        ids = self._checked_ids(ids, self.n_ctx)
        self.reset()
        return self._finite(self._fed(ids, False, hidden=RANK)[-1], "the text's scores")


def logits(self, ids):
    """(n, n_vocab) float32: logits after every one of `ids`, or of a text's tokens, from position 0; the text so
    far is forgotten.

    Errors: ParamError for weights that are NaN, IndexRangeError for ids outside the vocabulary.
    """
    with self._lock:
        ids = self._checked_ids(ids, self.n_ctx)
        self.reset()
        return self._finite(self.decode(ids, all_logits=True), "the logits")


def kv(self, layer):
    """KeysValues of the text so far in one layer: `.keys` (n_head_kv, n_tokens, d_head), `.values`, `.first`, the
    position of the first that the layer keeps; float32, as the cache holds them (keys after RoPE).

        m.logits("a text"); m.kv(3).keys[0]             # those of head 0

    Errors: ParamError (a number that is no layer; no text was read), NotSupported for layers without keys.
    """
    layer = integer("layer", layer, 0, self.n_layer - 1)
    mixer = self.description.blocks[layer].mixer
    kept = {t.name.rpartition(" ")[0]: t for t in self.cache[layer]}
    if "k cache" not in kept or not hasattr(mixer, "n_head_kv"):
        raise NotSupported(f"layer {layer} of this {self.file.arch} network keeps no keys and values of its own")
    with self._lock:
        if not self.n_past:
            raise ParamError("kv: no text was read yet; m.logits(text) reads one")
        first, rows = self._key_rows(layer, 0)
        return KeysValues(*(_by_head(kept[name], rows, mixer.n_head_kv) for name in ("k cache", "v cache")), first)
