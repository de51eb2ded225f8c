"""Speculative decoding: several tokens are proposed, and one batch checks how many of them the model would generate.

    text ... t     guesses d1 d2 d3       one batch of t d1 d2 d3 gives the logits after each
                   taken while the sampler draws what was guessed; then the text is cut back to that

Every token is drawn from the model's own logits, which have the bits that they have one token at a time
(Decoder.decode_apart): the text is that of plain decoding, token for token, with a seed also where it is drawn at
random.

    lookup          what followed where the text had its last ORDER tokens before (Saxena 2023, prompt lookup)
    mtp             a layer of the model's own that was trained to guess (networks/parts/predictor.py)
    a Drafter       a network that was trained on the model's own values (networks/texts/drafter.py)
    a draft model   a smaller model of the same vocabulary, its likeliest tokens (Leviathan et al. 2023)

A batch of several tokens takes longer than one token.  `Speculation` keeps the account, in seconds of plain tokens, and
ends guessing where it has cost more than ALLOWED of them.  Source of the widths: SmolLM2-135M (Q4_1, one thread), where
2 columns cost 1.05 tokens, 4 cost 1.2, 8 cost 1.9 and 16 cost 3.5 of processor time.
"""
import time

import numpy as np

from ggjit.ops.core.errors import NotSupported, ParamError, TypeMismatch

ORDER = 3                       # the last so many tokens are looked up earlier in the text
WIDTHS = 2, 4, 8, 16            # sizes of batches with guesses: few sizes need few plans
FIRST_WIDTH = 4
N_PLAIN = 3                     # tokens decoded before the first guess, to measure the time of one
ALLOWED = 1.5                   # guessing stops when it has cost the time of so many tokens


class Lookup:
    """Guesses from the text itself.

        Lookup().guess([5, 6, 7, 8, 9, 5, 6, 7], 2)         # [8, 9]
    """

    def __init__(self):
        self._after, self._n = {}, 0            # {ORDER ids: where the text went on after them}

    def guess(self, ids, n):
        """At most n ids that may follow."""
        for i in range(max(self._n, ORDER), len(ids)):
            self._after[tuple(ids[i - ORDER:i])] = i
        self._n = len(ids)
        at = self._after.get(tuple(ids[-ORDER:]))
        return [] if at is None or len(ids) < ORDER else ids[at:at + n]


class DraftModel:
    """Guesses of another Decoder: its likeliest tokens, one after the other."""

    def __init__(self, model):
        self.model = model

    def guess(self, ids, n):
        m, found = self.model, []
        with m._lock:
            n = min(n, m.n_ctx - len(ids))
            following = ids[m.keep_prefix(ids):] if n > 0 else []
            while len(found) < n:
                found.append(int(np.argmax(m.decode(following))))
                following = found[-1:]
        return found


def guesser_of(model, speculative):
    """The Lookup, Predictor or DraftModel that `speculative` asks for, None for None.  Errors: ParamError,
    TypeMismatch, NotSupported."""
    if speculative is None:
        return None
    if isinstance(speculative, str) and speculative not in ("lookup", "mtp") or isinstance(speculative, bool):
        raise ParamError(f"speculative is {speculative!r}, expected \"lookup\", \"mtp\", a loaded draft model "
                         f"(load_model(path)), or None")
    if model.recurrent:
        raise NotSupported(f"{model.file.path} has layers with states, which cannot go back to before a wrong guess; "
                           f"leave speculative out")
    if speculative == "lookup":
        return Lookup()
    if speculative == "mtp":
        return model.predicting()
    if hasattr(speculative, "guesses_for"):
        return speculative.guesses_for(model)
    if not hasattr(speculative, "keep_prefix"):
        raise TypeMismatch(f"speculative takes \"lookup\", \"mtp\", a loaded draft model, or None, got "
                           f"{type(speculative).__name__}")
    if speculative is model:
        raise ParamError("speculative is the model itself; take a smaller one with the same vocabulary")
    words = [m.file.metadata.get("tokenizer.ggml.tokens") for m in (model, speculative)]
    same = words[0] is None or words[1] is None or len(words[0]) == len(words[1]) and all(
        a == b for a, b in zip(*words, strict=True))
    if speculative.n_vocab != model.n_vocab or not same:
        raise ParamError(f"the draft model {speculative.file.path} has another vocabulary than {model.file.path}; take "
                         f"one of the same family")
    return DraftModel(speculative)


class Speculation:
    """Guesses for one text, and whether they save time.

    n_drafted, n_accepted: tokens guessed, and those of them that were right; is_on: are tokens still guessed?
    """

    def __init__(self, guesser):
        self.guesser, self.width, self.widest = guesser, FIRST_WIDTH, WIDTHS[-1]
        self.n_drafted = self.n_accepted = 0
        self.is_on, self._plain, self._balance, self._open = True, [], 0.0, None
        if hasattr(guesser, "users"):           # the decoder keeps states for it only while a Speculation is on
            guesser.users.add(self)

    def narrowed(self, guesses):
        """Fewer of them, since a batch with so many does not fit the arena: none will be so wide again."""
        self.widest = max((w for w in WIDTHS if w <= len(guesses)), default=1)
        self.width = min(self.width, self.widest)
        self.is_on = self.widest > 1
        return guesses[:self.widest - 1]

    def guess(self, ids, most):
        """(guesses, seconds) for the text `ids`; `most` of them fit.  No guesses: decode the last token alone."""
        if not self.is_on or len(self._plain) < N_PLAIN or most < 1:
            return [], 0.0
        t0 = time.perf_counter()
        found = self.guesser.guess(ids, min(self.width - 1, most))
        width = max((w for w in WIDTHS if w <= len(found) + 1), default=1)
        return found[:width - 1], time.perf_counter() - t0

    def was_plain(self, seconds):
        """One token was decoded alone."""
        self._plain = [*self._plain, seconds][-8:]

    def begin(self, n, seconds):
        """Note that a batch with n guesses took `seconds`, guessing included."""
        self.settle()
        self.n_drafted += n
        self._open = [n, 0, seconds]

    def accept(self):
        """The next guess came true."""
        self._open[1] += 1
        self.n_accepted += 1

    def settle(self):
        """Add up the time that the last guesses saved or cost, since no more of them will be used."""
        if self._open is None:
            return
        (n, accepted, seconds), self._open = self._open, None
        one = float(np.median(self._plain))
        self._balance += accepted + 1 - seconds / one
        at = WIDTHS.index(self.width)
        if accepted == n:
            self.width = min(WIDTHS[min(at + 1, len(WIDTHS) - 1)], self.widest)
        elif 2 * accepted < n:
            self.width = WIDTHS[max(at - 1, 0)]
        self.is_on = self._balance > -ALLOWED
