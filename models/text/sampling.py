"""Choosing the next token from logits.

    logits -> logit bias -> grammar -> the chain -> draw

    chain           penalties, dry, top_n_sigma, top_k, typ_p, top_p, min_p, xtc, temperature (llama.cpp's default)
    adaptive-p      the chain, then what is near a target probability instead of what is likely
    with Mirostat   temperature, mirostat

Every filter sees the probabilities at temperature 1, so raising the temperature never lets in tokens that the filters
have removed.  OPTIONS is the one list of settings: names, defaults and ranges, in Python and on the command line.
"""
import copy
import math
from dataclasses import dataclass

import numpy as np

from ggjit.models.core.checks import FIND_BROKEN, BrokenValues, is_encodable, known_options, number
from ggjit.models.text import samplers
from ggjit.models.text.samplers import Candidates
from ggjit.ops.core.errors import ParamError, ShapeError
from ggjit.ops.core.user_warnings import warn_once
from ggjit.ops.core.whole_numbers import is_whole

CHAIN = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
ADAPTIVE_P = "adaptive_p"       # llama.cpp's name for it in the chain; wherever it stands, it comes last
MAX_BREAKER = 40                # bytes of a DRY sequence breaker that count
LOOK_AT = 256                   # tokens that are tried one by one before a mask is made
MAX_TAIL = 20                   # ... and tokens of a breaker behind its first one


@dataclass(frozen=True)
class Option:
    """A setting.  kind: int, float, or a function that turns the value into what Sampler keeps; low to high: its range
    (`above`: low itself is outside); flags: llama.cpp's names on the command line besides --name."""
    name: str
    default: object
    help: str
    kind: object = float
    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    flags: tuple = ()
    metavar: str = "X"

    def checked(self, value):
        """`value` as the option's kind.  Errors: ParamError, TypeMismatch."""
        if self.kind not in (int, float):
            return self.kind(self.name, value)
        if self.kind is float:
            value = number(self.name, value)
        if not ((self.kind is float or is_whole(value)) and self.low <= value <= self.high
                and not (self.above and value == self.low)):
            raise ParamError(f"{self.name} is {value!r}, expected {self.expected}")
        return self.kind(value)

    @property
    def expected(self):
        what = "a whole number" if self.kind is int else "a number"
        low = f"{' above' if self.above else ' from'} {self.low:g}" if self.low > -math.inf else ""
        return what + low + (f" to {self.high:g}" if self.high < math.inf else " on" if low and not self.above else "")


def _seed(name, value):
    if value is not None and not is_whole(value, 0):
        raise ParamError(f"{name} is {value!r}, expected a whole number or None")
    return value


def _logit_bias(name, value):
    """{id: bias} as (ids, biases), ascending."""
    if not isinstance(value, dict) or not all(is_whole(i, 0, (1 << 31) - 1) for i in value):
        raise ParamError(f"{name} is {value!r}, expected a dict of token ids and what is added to their logits")
    for i, bias in value.items():
        if bias != -math.inf:
            number(f"{name} of token {i}", bias)
    ids = sorted(value)
    return np.array(ids, np.int64), np.array([value[i] for i in ids], np.float64)


def _breakers(name, value):
    texts = (None,) if isinstance(value, str) or not hasattr(value, "__iter__") else tuple(value)
    if not all(isinstance(text, str) and text and is_encodable(text) for text in texts):
        raise ParamError(f"{name} is {value!r}, expected a list of texts, none of them empty or with a lone surrogate")
    return texts


def _chain(name, value):
    given = value.split(";") if isinstance(value, str) else value
    names = tuple(given) if hasattr(given, "__iter__") else (given,)
    unknown = [n for n in names if n not in (*CHAIN, ADAPTIVE_P)]
    if unknown:
        raise ParamError(f"{name} holds {unknown[0]!r}, expected names out of {';'.join((*CHAIN, ADAPTIVE_P))}")
    return tuple(n for n in names if n != ADAPTIVE_P)


_INT = (1 << 31) - 1
OPTIONS = {o.name: o for o in (
    Option("temp", 0.8, "temperature; 0: always the likeliest"),
    Option("top_k", 40, "of the K likeliest; 0: all", int, 0, metavar="K"),
    Option("top_p", 0.95, "of the likeliest that sum to P; 1: all", low=0, high=1, above=True, metavar="P"),
    Option("min_p", 0.05, "of those at least P times as likely as the best; 0: all", low=0, high=1, metavar="P"),
    Option("typical_p", 1.0, "of the most typical that sum to P; 1: all", low=0, high=1, above=True, metavar="P",
           flags=("--typical",)),
    Option("top_n_sigma", -1.0, "of logits at most N standard deviations below the largest; -1: all", metavar="N",
           flags=("--top-nsigma",)),
    Option("xtc_probability", 0.0, "how often the likeliest are left out; 0: never", low=0, high=1, metavar="P"),
    Option("xtc_threshold", 0.1, "... of those at least so likely; above 0.5: never", low=0, high=1, metavar="P"),
    Option("dynatemp_range", 0.0, "temperature by entropy: temp - X to temp + X; 0: fixed", low=0),
    Option("dynatemp_exponent", 1.0, "... by entropy to the power of X", low=0, flags=("--dynatemp-exp",)),
    Option("repeat_penalty", 1.0, "divides logits of the last tokens; 1: none", low=0, above=True),
    Option("frequency_penalty", 0.0, "subtracted for each time a token came; 0: none"),
    Option("presence_penalty", 0.0, "subtracted if a token came; 0: none"),
    Option("penalty_last_n", 64, "tokens that these three look back at; 0: none, -1: all", int, -1, _INT, metavar="N",
           flags=("--repeat-last-n",)),
    Option("dry_multiplier", 0.0, "penalty for repeated sequences (DRY); 0: none", low=0),
    Option("dry_base", 1.75, "... times X for each token more", low=1),
    Option("dry_allowed_length", 2, "... longer than N tokens", int, 0, _INT, metavar="N"),
    Option("dry_penalty_last_n", 64, "... within the last N; 0: none, -1: all", int, -1, _INT, metavar="N"),
    Option("dry_sequence_breakers", ("\n", ":", '"', "*"), "... not across this text (may be given several times)",
           _breakers, flags=("--dry-sequence-breaker",), metavar="TEXT"),
    Option("mirostat", 0, "1 or 2: that version of Mirostat instead of the filters", int, 0, 2, metavar="N"),
    Option("mirostat_tau", 5.0, "... bits of surprise aimed at", low=0, flags=("--mirostat-ent",)),
    Option("mirostat_eta", 0.1, "... rate of learning", low=0, flags=("--mirostat-lr",)),
    Option("adaptive_target", -1.0, "draws tokens near this probability (adaptive-p); -1: off", high=1),
    Option("adaptive_decay", 0.9, "... of the last 1 / (1 - X) tokens on average", low=0, high=0.99),
    Option("logit_bias", {}, "added to the logit of token ID: 42+1.5 or 42-inf (may be given several times)",
           _logit_bias, metavar="ID+X"),
    Option("samplers", CHAIN, "the filters in their order, separated by ;", _chain, metavar="NAMES"),
    Option("seed", None, "of the draws (a new one each time)", _seed, metavar="N"),
)}


class Sampler:
    """Draws token ids; the same seed and the same logits give the same ids.  One per text: it remembers the ids.

    Options: those of OPTIONS by name.  tokenizer: turns the texts of dry_sequence_breakers into ids; without it there
    are no breakers.  grammar: a Matcher (models/text/grammar.py); what it does not allow is not drawn.

        s = Sampler(temp=0.7, min_p=0.1, seed=1)
        s.accept(prompt_ids)
        id = s.sample(logits)

    Raises ParamError for an unknown option or one out of range, ShapeError for logits that are not one row, ParamError
    for logits that hold a NaN, +inf or nothing finite.  -inf is a token that may not be chosen.
    """

    def __init__(self, tokenizer=None, grammar=None, **options):
        known_options("sampling", options, OPTIONS)
        for name, o in OPTIONS.items():
            setattr(self, name, o.checked(options.get(name, o.default)))
        if self.temp < 0:
            warn_once("negative temperature", f"temp={self.temp:g} is taken as temp=0: always the likeliest token; "
                                              f"temp=0.8 is llama.cpp's default")
        names = [n for n in (("temp_alone", "mirostat") if self.mirostat else self.samplers) if _STEPS[n][0](self)]
        self._steps = [_STEPS[n][1] for n in names]
        # takes the likeliest token at once, if no sampler can drop it or change logits
        self._greedy = self.temp <= 0 and self.dynatemp_range <= 0 and "temperature" in names and \
            not {"penalties", "dry", "typ_p", "xtc"} & {*names}
        # how many of the likeliest tokens suffice, if known; a grammar then need not check all others
        self._n_deciding = 1 if self._greedy else self.top_k if names[:1] == ["top_k"] else 0
        reads_text = tokenizer is not None and "dry" in names
        self._breakers = _heads(tokenizer, self.dry_sequence_breakers) if reads_text else {}
        looks_back = self.penalty_last_n, self.dry_penalty_last_n
        self.grammar = grammar
        self._keep = None if -1 in looks_back else max(looks_back)      # how many ids are remembered; None: all
        self.reset()

    def reset(self):
        """Forget the ids seen and start the random numbers over from the seed."""
        self._last = []                         # ids, oldest first
        self._random = np.random.default_rng(self.seed)
        self._xtc = False                       # whether this draw leaves out the likeliest
        self._mu = 2 * self.mirostat_tau        # Mirostat's bound of surprise, in bits
        n = 1 / (1 - self.adaptive_decay)       # adaptive-p starts as if all earlier draws had met the target
        self._drawn = self.adaptive_target * n, n       # (sum, number) of the probabilities drawn, older ones decayed
        if self.grammar:
            self.grammar.reset()

    def copy(self):
        """A sampler in the same state, which goes on by itself: from equal logits both draw equal ids."""
        new = object.__new__(Sampler)
        new.__dict__.update(self.__dict__, _last=list(self._last), _random=copy.deepcopy(self._random),
                            grammar=self.grammar and self.grammar.copy())
        return new

    def accept(self, ids):
        """Ids (a prompt's, say) that penalties and DRY shall count; `sample` adds its own."""
        self._last += map(int, ids)
        if self._keep is not None:
            del self._last[:max(len(self._last) - self._keep, 0)]

    def sample(self, logits):
        """One id from a row of logits, shape (n_vocab,)."""
        row, best = self._row(logits)
        if self._greedy and (not self.grammar or self.grammar.allows(best)):
            chosen = best
        else:
            c = self._candidates(row)
            chosen = int(c.ids[np.argmax(c.logits)]) if self._greedy else self._draw(c)
        if self.grammar:
            self.grammar.accept(chosen)
        self.accept((chosen,))
        return chosen

    def probabilities(self, logits):
        """(ids, probabilities) that `sample` would draw from now, most probable first; both of shape (n_kept,)."""
        c0, often = self._candidates(self._row(logits)[0]), self.xtc_probability
        found = {}
        for self._xtc, weight in ((False, 1 - often), (True, often)) if often else ((False, 1.0),):
            c = self._kept(c0)
            for id, p in zip(c.ids.tolist(), self._drawn_from(c.probabilities()).tolist(), strict=True):
                found[id] = found.get(id, 0.0) + weight * p
        ids = [i for i in sorted(found, key=lambda i: -found[i]) if found[i] > 0]
        return np.array(ids, np.int64), np.array([found[i] for i in ids])

    def _row(self, logits):
        """(the logits as an array with the biases added, the index of the first largest one)."""
        row = np.asarray(logits)
        if row.ndim != 1 or not row.size:
            raise ShapeError(f"logits have shape {row.shape}, expected one row (n_vocab,)")
        ids, biases = self.logit_bias
        if len(ids):
            if ids[-1] >= row.size:
                raise ParamError(f"logit_bias names token {ids[-1]}, the last of this vocabulary is {row.size - 1}")
            row = row.astype(np.float64)
            row[ids] += biases
        best = int(np.argmax(row))              # a NaN or +inf is what argmax finds first
        if not np.isfinite(row[best]):
            raise BrokenValues(f"logit {best} is {row[best]}: the weights or the computation are broken; {FIND_BROKEN}")
        return row, best

    def _candidates(self, row):
        """The tokens that the grammar allows; of all tokens, the others with a logit of -inf, unless the likeliest ones
        decide."""
        if not self.grammar or self.grammar.waits:
            return Candidates.of(row)
        if self.grammar.n_vocab != row.size:
            raise ShapeError(f"the grammar is for {self.grammar.n_vocab} tokens, the logits have {row.size}")
        ids = self._deciding(row) if self._n_deciding and self.grammar.is_new() else None
        if ids is None:
            mask = self.grammar.mask()
            if row[mask].max() == -np.inf:
                raise ParamError("logit_bias rules out every token that the grammar allows; give one of them another "
                                 "bias")
            if not self._n_deciding:
                return Candidates.of(np.where(mask, row, -np.inf))
            ids = np.flatnonzero(mask)
        return Candidates(ids, row[ids].astype(np.float64))

    def _deciding(self, row):
        """Ids of the n likeliest tokens that the grammar allows, if they are among the LOOK_AT likeliest; else None."""
        n = self._n_deciding
        if not n < LOOK_AT < row.size:
            return None
        top = np.sort(np.argpartition(row, row.size - LOOK_AT)[row.size - LOOK_AT:])
        top, found = top[np.argsort(-row[top], kind="stable")], []
        # without those equal to the last: others, not looked at, may equal it too
        for id in top[row[top] > row[top[-1]]].tolist():
            if self.grammar.allows(id):
                found.append(id)
                if len(found) == n:
                    return np.sort(found)
        return None

    def _kept(self, c):
        """The candidates that all samplers of the chain leave, likeliest first."""
        for step in self._steps:
            c = step(self, c)
        return c.sorted()

    def _draw(self, c):
        self._xtc = self.xtc_probability > 0 and self._random.random() < self.xtc_probability
        c = self._kept(c)
        p = c.probabilities()
        edges = np.cumsum(self._drawn_from(p))
        at = int(np.searchsorted(edges, self._random.random() * edges[-1], side="right"))
        if self.mirostat:
            self._mu -= self.mirostat_eta * (-math.log2(p[at]) - self.mirostat_tau)
        self._drawn = p[at] + self.adaptive_decay * self._drawn[0], 1 + self.adaptive_decay * self._drawn[1]
        return int(c.ids[at])

    def _drawn_from(self, p):
        """The weights that a token is drawn by, from the probabilities that come out of the chain."""
        if self.adaptive_target < 0 or self.mirostat:
            return p
        total, n = self._drawn
        return samplers.adaptive_p(p, min(max(2 * self.adaptive_target - total / n, 0.0), 1.0))

    def _seen(self, n):
        """The last n ids; -1: all."""
        return self._last if n < 0 else self._last[len(self._last) - min(n, len(self._last)):]


# {sampler: (does it do anything?, what it does)}
_STEPS = {
    "penalties": (lambda s: s.penalty_last_n and (s.repeat_penalty, s.frequency_penalty, s.presence_penalty) !=
                  (1, 0, 0),
                  lambda s, c: samplers.penalties(c, s._seen(s.penalty_last_n), s.repeat_penalty, s.frequency_penalty,
                                                  s.presence_penalty)),
    "dry": (lambda s: s.dry_multiplier and s.dry_penalty_last_n,
            lambda s, c: samplers.dry(c, s._seen(s.dry_penalty_last_n)[::-1], s.dry_multiplier, s.dry_base,
                                      s.dry_allowed_length, s._breakers)),
    "top_n_sigma": (lambda s: s.top_n_sigma > 0, lambda s, c: samplers.top_n_sigma(c, s.top_n_sigma)),
    "top_k": (lambda s: s.top_k, lambda s, c: samplers.top_k(c, s.top_k)),
    "typ_p": (lambda s: s.typical_p < 1, lambda s, c: samplers.typical_p(c, s.typical_p)),
    "top_p": (lambda s: s.top_p < 1, lambda s, c: samplers.top_p(c, s.top_p)),
    "min_p": (lambda s: s.min_p, lambda s, c: samplers.min_p(c, s.min_p)),
    "xtc": (lambda s: s.xtc_probability and s.xtc_threshold <= 0.5,
            lambda s, c: samplers.xtc(c, s.xtc_threshold) if s._xtc else c),
    "temperature": (lambda s: True,
                    lambda s, c: samplers.temperature(c, s.temp, s.dynatemp_range, s.dynatemp_exponent)),
    "temp_alone": (lambda s: True, lambda s, c: samplers.temperature(c, s.temp)),
    "mirostat": (lambda s: s.mirostat, lambda s, c: (samplers.mirostat_1 if s.mirostat == 1 else
                                                     samplers.mirostat_2)(c, s._mu)),
}


def _heads(tokenizer, texts):
    """{id: set of tails} for samplers.dry: where a text begins in token `id`, the ids of what is left of it after that
    token."""
    heads = {}
    for text in (t.encode()[:MAX_BREAKER] for t in texts):
        for id in range(tokenizer.n_vocab):
            piece = tokenizer.piece(id, special=True)
            if text in piece:
                heads.setdefault(id, set()).add(())
                continue
            for n in (n for n in range(1, len(text)) if piece.endswith(text[:n])):
                rest = text[n:].decode("utf-8", "ignore")
                heads.setdefault(id, set()).add(tuple(tokenizer.encode(rest, add_special=False)[:MAX_TAIL]))
    return heads
