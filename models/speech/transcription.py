"""Recordings of any length: window after window, each begun where the last sentence of the one before ended.

    seek -> mel of 30 s -> encoder -> tokens: <0.00> text <4.10><4.10> text <7.86><7.86> text
                                      segments:  ----------    ----------     begun, not ended: heard again
                                                                          ^ next seek
    <a lone time at the end>   nothing is said behind it: the next window begins after this one

A window is tried again at a higher temperature while its text repeats itself or is unlikely.  It is left out where the
model takes it for silence.  With Silero's stretches of speech, windows begin where somebody speaks, and text that lies
wholly in a silence is left out.

TokenRules and thresholds are OpenAI's and whisper.cpp's.
"""
import dataclasses

import numpy as np

from ggjit.models.speech.decoding import Texts, TokenRules, beam_search, decode
from ggjit.models.speech.mel import HOP, N_FFT, n_frames
from ggjit.models.speech.transcript import Segment
from ggjit.models.speech.words import words_of

UNIT = 100                      # frames of a second
LEAST = 10                      # frames: what is shorter is no window
SHORT_REST = 500                # before that little is left, earlier text is no help: it is easily repeated
ABOUT = 6                       # tokens around the text when its words are looked for
MAX_TOKENS = 220                # of a window
LONG_SILENCE = 200              # frames without speech that are skipped
BEFORE_SPEECH = 50              # frames that are heard before it
NEAR_SPEECH = 50                # frames from speech within which text may lie
SMALL_STEP, LARGE_STEP, MAX_SMALL = 100, 1000, 4        # frames; windows in a row that may step that little


@dataclasses.dataclass
class Options:
    """Of a transcription; `speech.Speech.transcribe` says what they mean."""
    language: str | None
    task: str
    beam: int
    timestamps: bool
    word_timestamps: bool
    previous: list
    temperatures: tuple
    best_of: int
    patience: float
    max_compression: float
    min_logp: float
    max_no_speech: float
    condition: bool
    suppressed: np.ndarray
    n_audio: int
    seed: int
    batch: int = 1


class Windows:
    """Hears a sound window by window and yields Segments."""

    def __init__(self, speech, sound, options, stretches=None, progress=None):
        """stretches: [(first, end), ...] in frames where somebody speaks; None: anywhere."""
        self.network, self.vocab, self.mel = speech.network, speech.vocab, speech.mel
        self.sound, self.o, self.stretches, self.progress = sound, options, stretches, progress
        self.rules = TokenRules(self.vocab, options.timestamps, options.suppressed)
        self.rng = np.random.default_rng(options.seed)
        self.end = max(0, 1 + (sound.n_samples + N_FFT // 2 - N_FFT) // HOP)
        self.n_window = 2 * options.n_audio
        self.peak = None
        self._mark, self._n_segments, self._last_end = object(), 0, 0.0

    # ------------------------------------------------------------ hearing
    def hear(self, seek, slot=0):
        """The encoder on the window at frame `seek`; the caller holds the network's lock."""
        n, speech = self.network, self.n_window
        if n.cache_owner == (self._mark, seek, slot):
            return
        if self.peak is None:
            self.peak = self.mel.peak(self.sound)
        n.hear(self._window(seek, speech), slot, self.o.n_audio)
        n.cache_owner = (self._mark, seek, slot)

    def _window(self, seek, n):
        """The mel of a window: frames behind those of the sound and 30 s of silence are 0."""
        whole = n_frames(self.sound.n_samples) + 3000
        out = np.zeros((self.mel.n_mels, n), np.float32)
        part = max(0, min(n, whole - seek))
        if part:
            out[:, :part] = self.mel.window(self.sound, seek, part, self.peak)
        return out

    def detect(self, seek):
        """{code: probability} of the languages in the window at `seek`."""
        v = self.vocab
        with self.network.lock:
            self.hear(seek)
            logits = self.network.feed([[v.sot]], n_audio=self.o.n_audio)[0, 0, v.sot + 1:v.sot + 1 + len(v.languages)]
        e = np.exp(logits.astype(np.float64) - logits.max())
        return dict(zip(v.languages, (e / e.sum()).tolist(), strict=True))

    # ------------------------------------------------------------ windows
    def __iter__(self):
        seek, past, small = self.first(), list(self.o.previous), 0
        max_past = self.network.n_text // 2 - 1
        while seek is not None and seek + LEAST < self.end:
            if seek and seek + SHORT_REST >= self.end:
                past = []
            with self.network.lock:
                self.hear(seek)
                d = self._decoded(seek, past[-max_past:])
                silent = d.no_speech > self.o.max_no_speech and d.mean_logp < self.o.min_logp
                tokens, step = ([], self.n_window) if silent else self._used(seek, d)
                found = self._segments(seek, tokens, step, d)
                if self.o.word_timestamps and found:
                    self._add_words(seek, found)
            yield from self._kept(found)
            past = (past[-max_past:] + tokens) if self.o.condition and d.temperature <= 0.5 else []
            if len(tokens) > 1 and self.rules.timestamps and tokens[-2] < self.vocab.begin < tokens[-1]:
                step = min(self.end - seek, self.n_window)
            small = small + 1 if step < SMALL_STEP else 0
            seek = self._speech_from(seek + (max(step, 1) if small < MAX_SMALL else LARGE_STEP))
            if self.progress is not None:
                self.progress(min(self.end if seek is None else seek, self.end) / UNIT)

    def first(self):
        """Where the first window begins; None: nobody speaks."""
        return self._speech_from(0)

    def _speech_from(self, seek):
        if self.stretches is None:
            return seek
        start = next((start for start, end in self.stretches if end > seek), None)
        if start is None:
            return None
        return seek if start <= seek + LONG_SILENCE else start - BEFORE_SPEECH

    def _stop(self, seek):
        """stop(window, tokens) for a decoder: a time that is the recording's end."""
        v = self.vocab

        def stop(_, tokens):
            return self.rules.timestamps and tokens[-1] > v.begin and \
                seek + 2 * (tokens[-1] - v.begin) + LEAST >= self.end
        return stop

    def _decoded(self, seek, past):
        """The Decoded of the window that was heard, at the first temperature at which it is good."""
        o, d = self.o, None
        for t in o.temperatures:
            n_each = o.best_of if t else o.beam
            if n_each > self.network.n_seqs:
                self.network.reserve(1, n_each)
                self.network.cache_owner = None
                self.hear(seek)
            prompt = self.vocab.prompt(o.language, o.task, o.timestamps, past if t < 0.5 else ())
            texts = Texts(self.network, self.rules, prompt, 1, n_each, o.n_audio)
            n_text = self.network.n_text
            most = min(MAX_TOKENS, n_text - len(prompt), n_text - ABOUT)
            d = beam_search(texts, self._stop(seek), most, o.patience) if n_each > 1 and not t else \
                decode(texts, self._stop(seek), most, t, self.rng)[0]
            d.temperature = t
            if self._good(seek, d):
                break
        return d

    def _good(self, seek, d):
        """Or silence, for which no other text is needed."""
        o = self.o
        if d.no_speech > o.max_no_speech and d.mean_logp < o.min_logp:
            return True
        no_times = o.timestamps and d.tokens and not any(t > self.vocab.begin for t in d.tokens) and \
            seek + self.n_window + LEAST < self.end
        return d.compression_ratio <= o.max_compression and d.mean_logp >= o.min_logp and not no_times

    def _used(self, seek, d):
        """(tokens that count, frames to the next window) of a Decoded."""
        begin = self.vocab.begin
        if not self.o.timestamps:
            return d.tokens, self.n_window
        last = max((i for i, t in enumerate(d.tokens) if t > begin), default=None)
        if last is not None:
            return d.tokens[:last + 1], 2 * (d.tokens[last] - begin)
        return (d.tokens if seek + self.n_window + LEAST >= self.end else []), self.n_window

    def _segments(self, seek, tokens, step, d):
        """[Segment] of a window's tokens: text between two times."""
        v, out = self.vocab, []
        if not tokens:
            return out
        start, first = seek + 2 * max(tokens[0] - v.begin, 0), 0

        def add(end, last):
            text = v.text(tokens[first:last])
            if text:
                own = [t for t in (*tokens[max(first - 1, 0):first], *tokens[first:last + 1])]
                out.append(Segment(0, start / UNIT, end / UNIT, text, own, [], d.temperature, d.mean_logp,
                                   d.compression_ratio, d.no_speech))
        for i, t in enumerate(tokens):
            if t > v.begin:
                add(seek + 2 * (t - v.begin), i)
                start, first = seek + 2 * (t - v.begin), i + 1
        add(min(seek + step, self.end), len(tokens))
        return out

    def _add_words(self, seek, found):
        n = min(self.n_window, max(2, self.end - seek))
        words = words_of(self.network, self.vocab, [(s.start, s.end, s.tokens) for s in found], self.o.language,
                         self.o.task, n, seek / UNIT, self._last_end, self.o.n_audio)
        for segment, own in zip(found, words, strict=True):
            segment.words = own
            self._last_end = own[-1].end if own else self._last_end

    def _kept(self, found):
        """The segments that do not lie in a silence, numbered."""
        for s in found:
            first, end = s.start * UNIT - NEAR_SPEECH, s.end * UNIT + NEAR_SPEECH
            if self.stretches is None or any(a < end and first < b for a, b in self.stretches):
                s.id, self._n_segments = self._n_segments, self._n_segments + 1
                yield s
