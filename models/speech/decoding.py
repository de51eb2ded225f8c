"""Decoding of encoded windows: timestamp rules, greedy, sampling and beam search.

    logits -> forbidden tokens are -inf -> log probabilities -> the times' own rule -> the best, one drawn, or beams

What may follow what, each before the log softmax (`done`: the tokens of the window so far):

    first            neither a space nor the end; a time of at most 1.00 s
    <t>              a lone time: its twin, or the end, or, if it is the first token, text
    <t> <t>          a pair: text
    any              no special tokens, no times before the last one
    afterwards       where all times together are likelier than every single text token: a time
"""
import dataclasses
import math
import zlib

import numpy as np

MAX_FIRST_TIME = 50                     # steps of 0.02 s
MAX_BEAM = 64
HIDDEN = -np.inf


@dataclasses.dataclass
class Decoded:
    """One decoded text of a window.  logp: of every token, the end included; ended: did an end token come?"""
    tokens: list
    logp: list
    no_speech: float
    temperature: float
    ended: bool = True
    text: str = ""

    @property
    def mean_logp(self):
        return sum(self.logp) / max(1, len(self.logp))

    @property
    def score(self):
        """Sum of log probabilities by the number of tokens without the end; beams and samples are compared by it."""
        return sum(self.logp) / max(1, len(self.tokens))

    @property
    def compression_ratio(self):
        """How far zlib compresses the text; above 2.4 the text repeats itself."""
        raw = self.text.encode()
        return len(raw) / len(zlib.compress(raw)) if raw else 0.0


class TokenRules:
    """Which tokens may follow, as an array of log probabilities."""

    def __init__(self, vocab, timestamps=True, suppressed=()):
        self.vocab, self.timestamps = vocab, timestamps
        self._never = np.asarray(suppressed, np.int64)
        self._blank = [t for t in (vocab.eot, vocab.first_of(" ")) if t is not None]

    def __call__(self, logits, done):
        """float32 log probabilities of the next token; forbidden ones are -inf."""
        v, x = self.vocab, logits.astype(np.float32)
        begin = v.begin
        x[v.sot:begin] = HIDDEN
        x[self._never] = HIDDEN
        if not done:
            x[self._blank] = HIDDEN
            x[begin + MAX_FIRST_TIME + 1:] = HIDDEN
        if not self.timestamps:
            x[begin:] = HIDDEN
            return _log_softmax(x)
        if done and done[-1] >= begin:
            if len(done) < 2 or done[-2] >= begin:
                x[begin:] = HIDDEN
            else:
                x[:v.eot] = HIDDEN
        last = next((t for t in reversed(done) if t > begin), None)
        if last is not None:
            x[begin:last] = HIDDEN
        logp = _log_softmax(x)
        times = logp[begin:]
        top = times.max(initial=HIDDEN)
        if top > HIDDEN and top + math.log(np.exp(times - top).sum(dtype=np.float64)) > logp[:begin].max():
            logp[:begin] = HIDDEN
        return logp


def _log_softmax(x):
    top = x.max()
    return x - (top + np.float32(math.log(np.exp(x - top).sum(dtype=np.float64))))


def probability(logits, token):
    """Probability of a token, by the logits as they are."""
    x = logits.astype(np.float64)
    e = np.exp(x - x.max())
    return float(e[token] / e.sum())


class AnyToken:
    """Rules of models without times and tasks: any token may follow.  vocab: its no_speech may be None."""

    def __init__(self, vocab):
        self.vocab = vocab

    def __call__(self, logits, done):
        return _log_softmax(logits.astype(np.float32))


class TextBatch:
    """The texts of one or several windows that are written side by side in the network's caches.

    n_each texts of each of n_windows windows; all begin with the same prompt.  no_speech: of each window, 0 where the
    vocabulary has no token for silence.
    """

    def __init__(self, network, rules, prompt, n_windows=1, n_each=1, n_audio=None):
        self.network, self.rules, self.n_audio = network, rules, n_audio
        self.n_windows, self.n_each, self.n_past = n_windows, n_each, len(prompt)
        self.done = [[] for _ in range(n_windows * n_each)]
        silence = rules.vocab.no_speech
        sot = [] if silence is None else [prompt.index(rules.vocab.sot)]
        logits = network.feed([prompt] * n_windows, 0, n_windows, [*sot, len(prompt) - 1], n_audio)
        self.no_speech = [probability(row[0], silence) if sot else 0.0 for row in logits]
        self._logits = np.repeat(logits[:, -1], n_each, axis=0)
        if n_each > 1:                      # text i of the prompt's pass belongs to window i
            network.take_over(np.repeat(np.arange(n_windows), n_each), self.n_past)

    def next(self, i):
        """Log probabilities of the next token of text i."""
        return self.rules(self._logits[i], self.done[i])

    def append(self, tokens, sources=None):
        """Each text goes on with its token; sources: texts they go on from, of their own window."""
        if sources is not None:
            self.network.take_over(sources, self.n_past)
            self.done = [list(self.done[s]) for s in sources]
        for text, token in zip(self.done, tokens, strict=True):
            text.append(int(token))

    def feed(self):
        """Read the tokens that were appended last."""
        tokens = [[text[-1]] for text in self.done]
        self._logits = self.network.feed(tokens, self.n_past, self.n_windows, None, self.n_audio)[:, 0]
        self.n_past += 1

    @property
    def full(self):
        return self.n_past >= self.network.n_text


def decode(texts, stop, max_tokens, temperature=0.0, rng=None):
    """[Decoded] of the windows: the likeliest tokens, or at a temperature the best of n_each draws.

    stop(window, tokens): does the text end here, besides the end token?
    """
    n, eot = len(texts.done), texts.rules.vocab.eot
    open_, out = [True] * n, [Decoded([], [], texts.no_speech[i // texts.n_each], temperature, False) for i in range(n)]
    for step in range(max_tokens):
        tokens = []
        for i in range(n):
            if not open_[i]:
                tokens.append(eot)
                continue
            logp = texts.next(i)
            token = int(logp.argmax()) if not temperature else _drawn(logp, temperature, rng)
            out[i].logp.append(float(logp[token]))
            tokens.append(token)
            if token == eot:
                open_[i], out[i].ended = False, True
                continue
            out[i].tokens.append(token)
            if stop(i // texts.n_each, out[i].tokens):
                open_[i], out[i].ended = False, True
        texts.append(tokens)
        if not any(open_) or texts.full or step + 1 == max_tokens:
            break
        texts.feed()
    for d in out:
        d.text = texts.rules.vocab.text(d.tokens)
    return [max(out[w * texts.n_each:(w + 1) * texts.n_each], key=lambda d: d.score) for w in range(texts.n_windows)]


def _drawn(logp, temperature, rng):
    x = logp.astype(np.float64) / temperature
    p = np.cumsum(np.exp(x - x.max()))
    return int(min(np.searchsorted(p, rng.random() * p[-1], "right"), len(p) - 1))


def beam_search(texts, stop, max_tokens, patience=1.0):
    """The Decoded of one window: n_each texts are kept, the best by log probability; ended ones are compared by
    log probability per token."""
    k, eot = texts.n_each, texts.rules.vocab.eot
    sums, logps, ended = [0.0] * k, [[] for _ in range(k)], []
    for step in range(max_tokens):
        candidates = []
        for i in range(1 if step == 0 else k):      # at first all texts are the same
            logp = texts.next(i)
            best = np.argpartition(logp, -k - 1)[-k - 1:]
            candidates += [(sums[i] + float(logp[t]), i, int(t), float(logp[t])) for t in best if logp[t] > HIDDEN]
        candidates.sort(key=lambda c: -c[0])
        kept = []
        for total, i, token, logp in candidates:
            tokens = texts.done[i] + ([] if token == eot else [token])
            if token == eot or stop(0, tokens):
                if len(ended) < max(1, round(k * patience)):
                    ended.append(Decoded(tokens, logps[i] + [logp], texts.no_speech[0], 0.0))
            elif len(kept) < k:
                kept.append((total, i, token, logp))
            if len(kept) == k:
                break
        if len(ended) >= max(1, round(k * patience)) or not kept:
            break
        kept += [kept[-1]] * (k - len(kept))
        logps = [logps[i] + [logp] for _, i, _, logp in kept]
        sums = [total for total, *_ in kept]
        texts.append([token for _, _, token, _ in kept], [i for _, i, _, _ in kept])
        if texts.full or step + 1 == max_tokens:
            break
        texts.feed()
    if not ended:
        ended = [Decoded(list(texts.done[i]), logps[i], texts.no_speech[0], 0.0, False) for i in range(k)]
    best = max(ended, key=lambda d: d.score)
    best.text = texts.rules.vocab.text(best.tokens)
    return best
