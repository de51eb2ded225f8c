"""Live transcription: text is returned once two transcriptions in a row agree on it, and is never changed later.

    buffer     |----------- sound since the last cut -----------|
    1st time   and so my fellow | amer...
    2nd time   and so my fellow   Americans ask | nod
               ----------------   stable from now on; the rest is `pending`

This is LocalAgreement of two (Macháček et al. 2023, arXiv 2307.14743).  The buffer is cut behind stable words when it
is longer than `longest`, so neither memory nor the time of a step grows.
"""
import time

import numpy as np

from ggjit.models.files.sound import RATE, with_samples
from ggjit.models.speech.words import Word
from ggjit.ops.core.errors import ParamError

# seconds: a word that begins at most so long before the end of the last stable word is new
NEAR = 0.1
MAX_OVERLAP = 5                 # words that may be heard again behind a cut of the sound
MAX_PROMPT = 200                # characters of stable text that the model is reminded of


class LiveTranscript:
    """`feed(samples)` gives the words that have become stable, `finish()` the rest.

    text: what is stable; pending: what the model hears behind it, which may change; delays: seconds between the end of
    each stable word and the end of the sound that had come in when it was given out; busy: seconds of computing.
    """

    def __init__(self, speech, step=1.0, longest=20.0, sample_rate=RATE, **options):
        """options: of Speech.transcribe.  step: seconds of new sound before it is heard again."""
        self._speech, self._options = speech, {"vad": False, "temperature": 0.0, **options}
        if not 0.1 <= step <= 10 or not 2 * step <= longest <= 29:
            raise ParamError(f"step must be 0.1 to 10 seconds and longest 2 steps to 29, got {step!r} and {longest!r}")
        self._step, self._longest, self._rate = step, longest, sample_rate
        self._buffer, self._start, self._new = np.zeros(0, np.float32), 0.0, 0      # start: seconds of its first sample
        self.words, self.pending, self.delays, self.busy = [], [], [], 0.0
        self.language, self._finished = options.get("language"), False

    @property
    def text(self):
        return "".join(w.word for w in self.words).strip()

    @property
    def seconds(self):
        """Seconds of sound that have come in."""
        return self._start + len(self._buffer) / RATE

    @property
    def delay(self):
        """Mean of `delays`: how far the stable text is behind the sound."""
        return float(np.mean(self.delays)) if self.delays else 0.0

    def feed(self, samples):
        """[Word] that are stable now.  samples: as Speech.transcribe takes arrays, of any length.

        Errors: ParamError (NaN; a stream that is finished), TypeMismatch, ShapeError; the stream goes on without them.
        """
        self._check_open()
        if not len(samples):
            return []
        new = with_samples(samples, self._rate)
        x = new.read(0, new.n_samples)
        self._buffer = np.concatenate([self._buffer, x])
        self._new += len(x)
        out = []
        if self._new >= self._step * RATE:
            out = self._heard(False)
            self._cut()
        return out

    def finish(self):
        """[Word]: all that is left; the stream takes nothing more."""
        self._check_open()
        self._finished = True
        out = self._heard(True) if self._new else self._stable(self.pending)
        self.pending, self._buffer, self._start = [], self._buffer[:0], self.seconds
        return out

    def _check_open(self):
        if self._finished:
            raise ParamError("this stream is finished; begin another with m.stream()")

    def _heard(self, last):
        self._new, t0 = 0, time.perf_counter()
        past = "".join(w.word for w in self.words if w.end <= self._start + NEAR)[-MAX_PROMPT:]
        options = self._options | {"language": self.language, "word_timestamps": True, "prompt": past or None}
        r = self._speech.transcribe(self._buffer, **options)
        heard = [Word(w.start + self._start, w.end + self._start, w.word, w.probability) for w in r.words]
        if self.language is None and r.languages.probability > 0.5:
            self.language = r.language
        self.busy += time.perf_counter() - t0
        heard = self._behind_stable(heard)
        n = len(heard) if last else _n_common(heard, self.pending)
        out, self.pending = self._stable(heard[:n]), heard[n:]
        return out

    def _behind_stable(self, heard):
        """The words that are not among the stable ones."""
        if not self.words:
            return heard
        heard = [w for w in heard if w.start > self.words[-1].end - NEAR]
        for n in range(min(MAX_OVERLAP, len(heard), len(self.words)), 0, -1):
            if [_plain(w) for w in heard[:n]] == [_plain(w) for w in self.words[-n:]] and \
                    heard[0].start < self.words[-1].end + 1.0:
                return heard[n:]
        return heard

    def _stable(self, words):
        self.words += words
        self.delays += [self.seconds - w.end for w in words]
        return words

    def _cut(self):
        """Drop what lies before the last stable word that ends a sentence, or any, of a long buffer."""
        if len(self._buffer) < self._longest * RATE:
            return
        inside = [w for w in self.words if w.end > self._start]
        ends = [w.end for w in inside if w.word.rstrip()[-1:] in ".!?。？！"] or [w.end for w in inside]
        # two transcriptions have not agreed for long: the older half is dropped
        at = ends[-1] if ends else self._start + len(self._buffer) / RATE / 2
        n = min(int((at - self._start) * RATE), len(self._buffer))
        if ends and len(self._buffer) - n >= self._longest * RATE:
            n = len(self._buffer) - int(self._longest * RATE / 2)
        self._buffer, self._start = self._buffer[n:].copy(), self._start + n / RATE


def _plain(word):
    """A word in lower case without punctuation around it."""
    return word.word.strip(" .,!?;:\"'").lower()


def _n_common(a, b):
    """How many words both lists begin with in common."""
    n = 0
    while n < min(len(a), len(b)) and _plain(a[n]) == _plain(b[n]):
        n += 1
    return n
