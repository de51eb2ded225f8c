"""Choosing the next token from logits.

    logits -> repeat penalty -> top-k -> top-p -> min-p -> temperature -> draw

The order is llama.cpp's default chain: every filter sees the probabilities at temperature 1, so raising the temperature
never lets in tokens that the filters have removed.  Temperature 0 is the largest logit (the first among equals) and
needs no random numbers.
"""
import math
from collections import deque

import numpy as np

from ggjit.models.core.checks import BrokenValues, number
from ggjit.ops.core.errors import ParamError, ShapeError
from ggjit.ops.core.whole_numbers import is_whole


class Sampler:
    """Draws token ids; the same seed and the same logits give the same ids.

    temp            <= 0: greedy; otherwise p ~ exp(logit / temp)
    top_k           keep the k largest logits; 0 keeps all
    top_p           keep the fewest most probable tokens whose probabilities sum to at least p (Holtzman et al. 2020)
    min_p           keep tokens at least min_p times as probable as the best
    repeat_penalty  divide positive (multiply negative) logits of the last `penalty_last_n` ids (Keskar et al. 2019)
    seed            None: a different run each time

    Raises ParamError for a parameter out of range, ShapeError for logits that are not one row, ParamError for logits
    that hold a NaN, +inf or nothing finite.  -inf is a token that may not be chosen.
    """

    def __init__(self, temp=0.0, top_k=40, top_p=0.95, min_p=0.0, repeat_penalty=1.0, penalty_last_n=64, seed=None):
        temp, top_p, min_p, repeat_penalty = (number(k, v) for k, v in (
            ("temp", temp), ("top_p", top_p), ("min_p", min_p), ("repeat_penalty", repeat_penalty)))
        _check("top_k", top_k, _is_count(top_k), "a whole number, 0 to keep all")
        _check("top_p", top_p, 0 < top_p <= 1, "above 0 and at most 1")
        _check("min_p", min_p, 0 <= min_p <= 1, "from 0 to 1")
        _check("repeat_penalty", repeat_penalty, 0 < repeat_penalty < math.inf, "above 0, 1 for none")
        _check("penalty_last_n", penalty_last_n, _is_count(penalty_last_n) and penalty_last_n < 1 << 31,
               "a whole number")
        _check("seed", seed, seed is None or _is_count(seed), "a whole number or None")
        self.temp, self.top_k, self.top_p, self.min_p = float(temp), int(top_k), float(top_p), float(min_p)
        self.repeat_penalty, self.seed = float(repeat_penalty), seed
        self._last = deque(maxlen=int(penalty_last_n))
        self.reset()

    def reset(self):
        """Forget the ids seen and start the random numbers over from the seed."""
        self._last.clear()
        self._random = np.random.default_rng(self.seed)

    def accept(self, ids):
        """Ids (a prompt's, say) that the repeat penalty shall count; `sample` adds its own."""
        self._last.extend(int(i) for i in ids)

    def sample(self, logits):
        """One id from a row of logits, shape (n_vocab,)."""
        logits = np.asarray(logits)
        if logits.ndim != 1 or not logits.size:
            raise ShapeError(f"logits have shape {logits.shape}, expected one row (n_vocab,)")
        if self.repeat_penalty != 1 and self._last:
            logits = self._penalised(logits)
        best = int(np.argmax(logits))           # a NaN or +inf is what argmax finds first
        if not np.isfinite(logits[best]):
            raise BrokenValues(f"logit {best} is {logits[best]}: the weights or the computation are broken")
        chosen = best if self.temp <= 0 else self._draw(logits)
        self._last.append(chosen)
        return chosen

    def probabilities(self, logits):
        """(ids, probabilities) that `sample` would draw from, most probable first; both of shape (n_kept,)."""
        logits = np.asarray(logits, np.float64)
        ids = _largest(logits, self.top_k)
        p = _softmax(logits[ids])
        n_top = int(np.searchsorted(np.cumsum(p), self.top_p)) + 1 if self.top_p < 1 else len(p)
        ids = ids[:min(n_top, int(np.count_nonzero(p >= self.min_p * p[0])))]
        return (ids, _softmax(logits[ids] / self.temp)) if self.temp > 0 else (ids[:1], np.ones(1))

    def _draw(self, logits):
        ids, p = self.probabilities(logits)
        edges = np.cumsum(p)
        return int(ids[np.searchsorted(edges, self._random.random() * edges[-1], side="right")])

    def _penalised(self, logits):
        out = np.array(logits, np.float64)
        seen = np.unique(np.array([i for i in self._last if 0 <= i < out.size], np.int64))
        value = out[seen]
        out[seen] = np.where(value > 0, value / self.repeat_penalty, value * self.repeat_penalty)
        return out


def _largest(logits, k):
    """Ids of the k largest logits, largest first, equal ones in order of id."""
    n = logits.size
    ids = np.arange(n) if not 0 < k < n else np.flatnonzero(logits >= np.partition(logits, n - k)[n - k])
    return ids[np.argsort(-logits[ids], kind="stable")][:k or n]


def _softmax(x):
    """exp(x_i - max x) / sum_j exp(x_j - max x), float64."""
    e = np.exp(x - x.max())
    return e / e.sum()


def _is_count(x):
    return is_whole(x, 0)


def _check(name, value, good, expected):
    if not good:
        raise ParamError(f"{name} is {value!r}, expected {expected}")
