"""Generation of an answer: the choice of each token, the text that may be shown, and the end.

    logits -- Sampler --> id -- StreamDecoder --> whole characters -- stop strings --> a piece of text

One Answer per text, however many are computed at once: it knows nothing of the model, only its vocabulary.
"""
import time

from ggjit.models.core.checks import integer
from ggjit.models.text.logprobs import checked_count, token_of
from ggjit.ops.core.errors import ParamError, TypeMismatch
from ggjit.ops.core.whole_numbers import is_whole


class Answer:
    """`take(logits)` chooses a token and gives the text that is certain by now; `finish()` the rest.

    n_predict       tokens at most; -1: until something else ends the text
    stop            a text, an id, or a list of them: ends the text before the one that comes first
    .tokens         ids so far, the last one that ends the text included
    .text           all that was given out
    .scored         a TokenLogprob for each of .tokens; with log-probabilities where `logprobs` is a number
    .stop_reason    None, or why it ended:
                    "stop_token"    the vocabulary's end of turn or document, or an id of `stop`
                    "stop_string"   a text of `stop`
                    "length"        n_predict tokens
                    "grammar"       the grammar allows nothing more
                    "context"       no room for another token (the code that computes the logits says so)

    No piece ever holds a part of a stop string: text that may become one is held back until that is decided.
    Errors: ParamError, TypeMismatch for `stop`; those of the sampler.
    """

    def __init__(self, tokenizer, sampler, n_predict=-1, stop=(), logprobs=None):
        self.n_predict = integer("n_predict", n_predict, -1, 1 << 31, "; -1 has no limit")
        self.sampler, self._tokenizer, self._stream = sampler, tokenizer, tokenizer.stream()
        self.n_alternatives = checked_count(logprobs)
        self._stop_texts, ids = _texts_and_ids(tokenizer, stop)
        self._ends = ids.union(tokenizer.stop_ids)
        self.tokens, self.text, self.stop_reason = [], "", None if n_predict else "length"
        self._held, self._scored, self._seconds, self._began = "", [], [], time.perf_counter()

    def begin(self):
        """The prompt is about to be read: `.seconds` of the tokens count from now."""
        self._began = time.perf_counter()

    @property
    def scored(self):
        if self.n_alternatives is None:
            return [token_of(self._tokenizer, id, seconds=s)
                    for id, s in zip(self.tokens, self._seconds, strict=True)]
        return self._scored

    def take(self, logits):
        """Choose a token: the piece of text that is certain by now, perhaps "".  `stop_reason` says if it is over."""
        token = self.sampler.sample(logits)
        seconds = time.perf_counter() - self._began
        if self.n_alternatives is not None:
            self._scored.append(token_of(self._tokenizer, token, logits, self.n_alternatives, seconds))
        self.tokens.append(token)
        self._seconds.append(seconds)
        if token in self._ends:
            self.stop_reason = "stop_token"
            return ""
        piece = self._shown(self._stream.push(token))
        if self.stop_reason is None and self.sampler.grammar and self.sampler.grammar.is_over:
            self.stop_reason = "grammar"
        if self.stop_reason is None and len(self.tokens) == self.n_predict:
            self.stop_reason = "length"
        return piece

    def finish(self):
        """The rest of the text, which was held back because it could have become a stop string."""
        if self.stop_reason == "stop_string":
            return ""
        piece = self._shown(self._stream.flush())
        if self.stop_reason != "stop_string":
            self.text, piece, self._held = self.text + self._held, piece + self._held, ""
        return piece

    def _shown(self, text):
        """The part of the text held back and `text` that may be shown: before a stop string, and not the beginning of
        one."""
        text = self._held + text
        found = [at for at in (text.find(stop) for stop in self._stop_texts) if at >= 0]
        if found:
            self.stop_reason = "stop_string"
            text, self._held = text[:min(found)], ""
        else:
            n = max((_overlap(text, stop) for stop in self._stop_texts), default=0)
            text, self._held = text[:len(text) - n], text[len(text) - n:]
        self.text += text
        return text


def _overlap(text, stop):
    """How many of the last characters of `text` are the beginning of `stop`, but not all of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def _texts_and_ids(tokenizer, stop):
    """(texts, ids) of `stop`.  The text of a special token is its id: it is never written out."""
    given = [stop] if isinstance(stop, str | int) else stop
    if isinstance(stop, bytes) or not hasattr(given, "__iter__"):
        raise TypeMismatch(f"stop takes a text, an id or a list of them, got {type(stop).__name__}")
    texts, ids = [], set()
    for one in given:
        if is_whole(one, 0, tokenizer.n_vocab - 1):
            ids.add(int(one))
        elif isinstance(one, str) and one:
            special = tokenizer.encode(one, add_special=False, parse_special=True)
            if len(special) == 1 and not tokenizer.piece(special[0]) and tokenizer.piece(
                    special[0], special=True) == one.encode():
                ids.add(special[0])
            else:
                texts.append(one)
        else:
            raise ParamError(f"stop holds {one!r}, expected texts that are not empty, or ids of the vocabulary")
    return texts, frozenset(ids)
