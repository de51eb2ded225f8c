"""The samplers, one function each: they take candidates and return candidates.

A sampler removes candidates or changes their logits.  Probabilities are softmax(logits) of those that are left; which
samplers run, in which order and with which settings is models/text/sampling.py's.  All in float64.

Source: llama.cpp's llama-sampler.cpp for what each does exactly; the papers are named at each.
"""
import math

import numpy as np

MIROSTAT_M = 100                # tokens from which Mirostat 1 estimates the exponent of Zipf's law
MAX_LOG = 88.7228391            # log of the largest float32: DRY's penalty stays below
MAX_PENALTY = 3e38              # of DRY: more than any logit, and no infinity
ALMOST_ONE = 1.000001           # a DRY base so near to 1 never overflows


ADAPTIVE_WIDTH, ADAPTIVE_PEAK, ADAPTIVE_FALL = 0.3, 5.0, 10.0      # adaptive-p's hill: how wide, how high, how steep


class Candidates:
    """Tokens that may be drawn: `ids` and `logits`, both (n,).  `ordered`: largest logit first; `whole`: the whole
    vocabulary, each token at the place of its id, its logits as they came; else they are float64 and its own."""
    __slots__ = "_ids", "logits", "ordered", "whole"

    def __init__(self, ids, logits, ordered=False, whole=False):
        self._ids, self.logits, self.ordered, self.whole = ids, logits, ordered, whole

    @classmethod
    def of(cls, logits):
        """All tokens of a row of logits."""
        return cls(None, logits, whole=True)

    @property
    def ids(self):
        return np.arange(len(self.logits)) if self._ids is None else self._ids

    def __len__(self):
        return len(self.logits)

    def take(self, which, ordered):
        """The candidates at the places `which`, or in a slice."""
        ids = which if self._ids is None and not isinstance(which, slice) else self.ids[which]
        return Candidates(ids, self.logits[which].astype(np.float64, copy=False), ordered)

    def writable(self):
        """The same with logits that may be changed; then they are in no order."""
        return Candidates(self._ids, np.array(self.logits, np.float64), whole=self.whole)

    def sorted(self):
        """Largest logit first, equal ones in order of id."""
        if self.ordered:
            return self
        x = -self.logits
        return self.take(np.argsort(x, kind="stable") if self.whole else np.lexsort((self._ids, x)), True)

    def probabilities(self):
        """softmax(logits), in the same order."""
        return softmax(np.asarray(self.logits, np.float64))

    def places(self, ids):
        """(places, which): candidates places[i] are ids[which[i]]; `ids` ascending, each once."""
        if self.whole:
            which = np.flatnonzero((ids >= 0) & (ids < len(self)))
            return ids[which], which
        which = np.searchsorted(ids, self.ids).clip(max=len(ids) - 1)
        places = np.flatnonzero(ids[which] == self.ids)
        return places, which[places]


def softmax(x):
    """exp(x_i - max x) / sum_j exp(x_j - max x)."""
    e = np.exp(x - x.max())
    return e / e.sum()


def entropy(p):
    """-sum p log p, in nats; 0 log 0 is 0."""
    p = p[p > 0]
    return float(-(p * np.log(p)).sum())


# ---------------------------------------------------------------- penalties
def penalties(c, seen, repeat, frequency, presence):
    """Of every id in `seen`: positive logits / repeat, others * repeat (Keskar et al. 2019); then - frequency * how
    often - presence."""
    if not len(seen):
        return c
    ids, counts = np.unique(np.asarray(seen, np.int64), return_counts=True)
    c, (at, which) = c.writable(), c.places(ids)
    x = c.logits[at]
    c.logits[at] = np.where(x > 0, x / repeat, x * repeat) - counts[which] * frequency - presence
    return c


def dry(c, last, multiplier, base, allowed_length, breakers):
    """"Don't repeat yourself": a token that would make the end of the text one longer copy of an earlier part, `n`
    tokens so far and n >= allowed_length, loses multiplier * base^(n - allowed_length).

    last: the ids, newest first.  breakers: {id: tails}: repetitions are not counted across an id that is followed by
    one of its tails; the empty tail makes a breaker of the id alone, which is never penalised.
    """
    longest = _continued(last, min(_until_breaker(last, breakers), len(last)), allowed_length)
    ids = np.array(sorted(i for i in longest if () not in breakers.get(i, ())), np.int64)
    if not len(ids):
        return c
    c, (at, which) = c.writable(), c.places(ids)
    largest = int(MAX_LOG / math.log(base)) if base > ALMOST_ONE else 0
    power = [longest[int(i)] - allowed_length for i in ids[which]]
    c.logits[at] -= [min(multiplier * _power(base, min(n, largest) if largest else n), MAX_PENALTY) for n in power]
    return c


def _power(base, n):
    try:
        return base ** n
    except OverflowError:
        return math.inf


def _until_breaker(last, breakers):
    """How many of the newest ids come after the newest breaker."""
    for i, id in enumerate(last):
        tails = [len(t) for t in breakers.get(id, ()) if len(t) <= i and all(
            t[k] == last[i - k - 1] for k in range(len(t)))]
        if tails:
            return i - max(tails)
    return len(last)


def _continued(last, limit, allowed_length):
    """{id: how many of the newest ids, at most `limit`, stood before an earlier occurrence of id}."""
    longest = {}
    if limit >= allowed_length < len(last):
        for k, n in enumerate(_repeats(last), 1):
            n = min(n, limit)
            if n >= allowed_length:
                longest[last[k - 1]] = max(n, longest.get(last[k - 1], 0))
    return longest


def _repeats(last):
    """For k = 1, 2, ...: how many of the newest ids are repeated k places earlier (the Z function)."""
    n, z, left, right = len(last), [0] * len(last), 0, 0
    for k in range(1, n):
        same = min(right - k, z[k - left]) if k < right else 0
        while k + same < n and last[same] == last[k + same]:
            same += 1
        z[k] = same
        if k + same > right:
            left, right = k, k + same
    return z[1:]


# ---------------------------------------------------------------- filters
def top_n_sigma(c, n):
    """Logits below max - n * (their standard deviation) become -inf (Tang et al. 2024)."""
    c = c.writable()
    finite = c.logits[c.logits > -np.inf]
    if len(c) > 1 and len(finite):
        c.logits[c.logits < finite.max() - n * finite.std()] = -np.inf
    return c


def top_k(c, k):
    """The k largest logits."""
    n = len(c)
    if not c.ordered and 0 < k < n:
        c = c.take(np.flatnonzero(c.logits >= np.partition(c.logits, n - k)[n - k]), False)
    return c.sorted().take(slice(k), True)


def typical_p(c, p):
    """Keep the tokens whose surprise is nearest to the entropy, as few as sum to more than p (Meister et al. 2022)."""
    c = c.sorted()
    q = c.probabilities()
    with np.errstate(divide="ignore"):
        order = np.argsort(np.abs(-np.log(q) - entropy(q)), kind="stable")
    n = int(np.searchsorted(np.cumsum(q[order]), p, side="right")) + 1
    return c.take(order[:n], False)


def top_p(c, p):
    """The fewest most probable whose probabilities sum to at least p (Holtzman et al. 2020)."""
    c = c.sorted()
    return c.take(slice(int(np.searchsorted(np.cumsum(c.probabilities()), p)) + 1), True)


def min_p(c, p):
    """Keep the tokens at least p times as probable as the best (Nguyen et al. 2024)."""
    return c.take(np.flatnonzero(c.logits >= np.float64(c.logits.max()) + math.log(p)), c.ordered)


def xtc(c, threshold):
    """"Exclude top choices": of those at least as probable as the threshold, only the least probable stays."""
    c = c.sorted()
    n = int(np.count_nonzero(c.probabilities() >= threshold))
    return c.take(slice(max(n - 1, 0), None), True)


# ---------------------------------------------------------------- temperature, Mirostat
def temperature(c, temp, range_=0.0, exponent=1.0):
    """logits / temp; temp <= 0 leaves the largest.  With a range, temp is from max(temp - range, 0) to temp + range, by
    (entropy / largest possible entropy)^exponent."""
    if range_ > 0 and len(c) > 1:
        low, high = max(0.0, temp - range_), temp + range_
        temp = low + (high - low) * (entropy(c.probabilities()) / math.log(len(c))) ** exponent
    c = c.sorted()
    return c.take(slice(1), True) if temp <= 0 else Candidates(c.ids, c.logits / temp, True)


def mirostat_1(c, mu):
    """The k most probable, k such that their surprise is about mu, if words follow Zipf's law (Basu et al. 2021)."""
    c = c.sorted()
    p = c.probabilities()[:MIROSTAT_M]
    p = p[p > 0]
    if len(p) < 2:
        return c.take(slice(1), True)
    i = np.arange(1, len(p))
    t = np.log((i + 1) / i)
    s = float((t * np.log(p[:-1] / p[1:])).sum() / (t * t).sum())
    return c.take(slice(_zipf_k(s, mu, len(c))), True)


def _zipf_k(s, mu, n):
    """k = (e 2^mu / (1 - n^-e))^(1/s), e = s - 1; from 1 to n."""
    e = s - 1
    if s <= 0:                                      # all alike: no k is better than another
        return n
    scale = 1 / math.log(n) if abs(e) < 1e-12 else e / -math.expm1(-e * math.log(n))
    log_k = (math.log(scale) + mu * math.log(2)) / s
    return n if log_k > math.log(n + 1) else max(int(math.exp(log_k)), 1)


def mirostat_2(c, mu):
    """Keep the tokens whose surprise -log2 p is at most mu, and at least the first (Basu et al. 2021)."""
    c = c.sorted()
    with np.errstate(divide="ignore"):
        n = int(np.count_nonzero(-np.log2(c.probabilities()) <= mu))
    return c.take(slice(max(n, 1)), True)


# ---------------------------------------------------------------- adaptive-p
def adaptive_p(p, target):
    """Of probabilities p: softmax(PEAK - FALL d^2 / (1 + d)), d = |p - target| / WIDTH; 0 stays 0.

    Source: llama.cpp's adaptive-p (pull request 17927).
    """
    d = np.abs(p - target) / ADAPTIVE_WIDTH
    return softmax(np.where(p > 0, ADAPTIVE_PEAK - ADAPTIVE_FALL * d * d / (1 + d), -np.inf))
