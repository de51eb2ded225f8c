"""Recordings of any length, window by window: each begins where the last sentence of the previous one ended.

    seek -> mel of 30 s -> encoder -> tokens: <0.00> text <4.10><4.10> text <7.86><7.86> text
                                      segments:  ----------    ----------     begun, not ended: heard again
                                                                          ^ next seek
    <a lone time at the end>   nothing is said behind it: the next window begins after this one

A window is tried again at a higher temperature while its text repeats itself or is unlikely.  It is left out where the
model takes it for silence.  With Silero's stretches of speech, windows begin where speech begins, and text that lies
wholly in a silence is left out.

TokenRules and thresholds are OpenAI's and whisper.cpp's.
"""
import dataclasses

import numpy as np

from ggjit.models.files.mel import HOP, N_FFT, RANGE, n_frames
from ggjit.models.speech.decoding import TextBatch, TokenRules, beam_search, decode
from ggjit.models.speech.transcript import Segment
from ggjit.models.speech.words import words_of

UNIT = 100                      # frames of a second
LEAST = 10                      # frames: shorter rests of a sound are not transcribed
# frames: with less left, the earlier text is no longer given as prompt, since it would be repeated
SHORT_REST = 500
ABOUT = 6                       # tokens around the text when its words are looked for
MAX_PROMPT = 64                 # tokens of a prompt that windows side by side share
MAX_TOKENS = 220                # of a window
LONG_SILENCE = 200              # frames without speech that are skipped
BEFORE_SPEECH = 50              # frames that are heard before it
NEAR_SPEECH = 50                # frames from speech within which text may lie
SMALL_STEP, LARGE_STEP, MAX_SMALL = 100, 1000, 4        # frames; windows in a row that may step that little


@dataclasses.dataclass
class Options:
    """Options of a transcription; `speech.Speech.transcribe` says what they mean."""
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
    """Transcribes a sound window by window and yields Segments."""

    def __init__(self, speech, sound, options, stretches=None, progress=None):
        """stretches: [(first, end), ...] in frames with speech; None: it may be anywhere."""
        self.network, self.vocab, self.mel = speech.network, speech.vocab, speech.mel
        self.sound, self.o, self.stretches, self.progress = sound, options, stretches, progress
        self.rules = TokenRules(self.vocab, options.timestamps, options.suppressed)
        self.rng = np.random.default_rng(options.seed)
        self.end = max(0, 1 + (sound.n_samples + N_FFT // 2 - N_FFT) // HOP)
        self.n_window = 2 * options.n_audio
        self.peak = None
        self._mark, self._n_segments, self._last_end = object(), 0, 0.0

    # ------------------------------------------------------------ hearing
    def hear(self, seek, slot=0, end=None):
        """The encoder on the window at frame `seek`; the caller holds the network's lock.  end: frames from there on
        are silence."""
        n = self.network
        if n.cache_owner == (self._mark, seek, slot):
            return
        if self.peak is None:
            self.peak = self.mel.peak(self.sound)
        n.hear(self._window(seek, self.n_window, end), slot, self.o.n_audio)
        n.cache_owner = (self._mark, seek, slot)

    def _window(self, seek, n, end):
        """The mel of a window: frames behind those of the sound and 30 s of silence are 0."""
        whole = n_frames(self.sound.n_samples) + 3000
        out = np.zeros((self.mel.n_mels, n), np.float32)
        part = max(0, min(n, whole - seek))
        if part:
            out[:, :part] = self.mel.window(self.sound, seek, part, self.peak)
        if end is not None:
            out[:, max(0, end - seek):] = (self.peak - RANGE + 4.0) / 4.0
        return out

    def detect(self, seek):
        """{code: probability} of the languages in the window at `seek`."""
        v = self.vocab
        with self.network.lock:
            self.hear(seek)
            logits = self.network.feed([[v.sot]], n_audio=self.o.n_audio)[0, 0, v.sot + 1:v.sot + 1 + len(v.languages)]
        e = np.exp(logits.astype(np.float64) - logits.max())
        return dict(zip(v.languages, (e / e.sum()).tolist(), strict=True))

    # ------------------------------------------------------------ several windows at once
    def _chunks(self):
        """[(first, end), ...] in frames: runs of speech that fit a window, with the silences between them."""
        out = []
        for first, end in self.stretches:
            for start in range(first, end, self.n_window):
                stop = min(end, start + self.n_window, self.end)
                if out and stop - out[-1][0] <= self.n_window and start == first:
                    out[-1][1] = stop
                elif stop > start + LEAST:
                    out.append([start, stop])
        return out

    def _batched(self):
        """The first `batch` chunks are written side by side: the weights are read once for all of them.  The rest of a
        chunk behind its last sentence is queued again."""
        waiting, found = self._chunks(), []
        while waiting:
            some, waiting = waiting[:self.o.batch], waiting[self.o.batch:]
            with self.network.lock:
                for segments, rest in self._side_by_side(some):
                    found += segments
                    waiting += rest
            waiting.sort()
            done = waiting[0][0] / UNIT if waiting else self.end / UNIT
            found.sort(key=lambda s: s.start)
            yield from self._kept([s for s in found if s.start < done or not waiting])
            found = [s for s in found if s.start >= done and waiting]
            if self.progress is not None:
                self.progress(done)

    def _side_by_side(self, chunks):
        """([Segment], [what is left]) of each chunk."""
        o = self.o
        prompt = self.vocab.prompt(o.language, o.task, o.timestamps, o.previous[-MAX_PROMPT:])
        self.network.reserve(len(chunks), len(chunks))
        self.network.cache_owner = None
        for slot, (first, end) in enumerate(chunks):
            self.hear(first, slot, end)
        texts = TextBatch(self.network, self.rules, prompt, len(chunks), 1, o.n_audio)
        written = decode(texts, lambda w, tokens: self._at_end(*chunks[w], tokens), self._most(prompt))
        out = [self._chunk(*chunk, d, slot) for slot, (chunk, d) in enumerate(zip(chunks, written, strict=True))]
        for k, ((first, end), d) in enumerate(zip(chunks, written, strict=True)):
            if not self._good(self.end, d):             # again, alone and at higher temperatures
                self.network.cache_owner = None
                self.hear(first, 0, end)
                out[k] = self._chunk(first, end, self._decoded(first, o.previous, end), 0)
        return out

    def _chunk(self, first, end, d, slot):
        """([Segment], [what is left]) of a Decoded that writes the frames first ... end."""
        if d.no_speech > self.o.max_no_speech and d.mean_logp < self.o.min_logp:
            return [], []
        tokens, step = self._used(self.end, d)
        found = self._segments(first, tokens, min(step, end - first), d)
        if self.o.word_timestamps and found:
            self._add_words(first, found, end - first, slot)
        # a lone last time says that nothing follows: Silero is asked, since batches see no window twice
        start = first + max(step, SMALL_STEP)
        start = max(start, next((a - BEFORE_SPEECH for a, b in self.stretches if b > start + SMALL_STEP), end))
        return found, [] if start + SMALL_STEP > end else [[start, end]]

    # ------------------------------------------------------------ windows
    def __iter__(self):
        yield from self._batched() if self.o.batch > 1 else self._one_by_one()

    def _one_by_one(self):
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
        """Where the first window begins; None: there is no speech."""
        return self._speech_from(0)

    def _speech_from(self, seek):
        if self.stretches is None:
            return seek
        start = next((start for start, end in self.stretches if end > seek), None)
        if start is None:
            return None
        return seek if start <= seek + LONG_SILENCE else start - BEFORE_SPEECH

    def _at_end(self, seek, end, tokens):
        """Is the last token a time at which the sound ends?"""
        begin = self.vocab.begin
        return self.rules.timestamps and tokens[-1] > begin and seek + 2 * (tokens[-1] - begin) + LEAST >= end

    def _most(self, prompt):
        """Tokens that may follow a prompt."""
        n_text = self.network.n_text
        return min(MAX_TOKENS, n_text - len(prompt), n_text - ABOUT)

    def _decoded(self, seek, past, end=None):
        """The Decoded of the window that was heard, at the first temperature at which it is good.  end: as hear's."""
        o, d, sound_end = self.o, None, self.end if end is None else end

        def stop(_, tokens):
            return self._at_end(seek, sound_end, tokens)
        for t in o.temperatures:
            n_each = o.best_of if t else o.beam
            if n_each > self.network.n_seqs:
                self.network.reserve(1, n_each)
                self.network.cache_owner = None
                self.hear(seek, 0, end)
            prompt = self.vocab.prompt(o.language, o.task, o.timestamps, past if t < 0.5 else ())
            texts, most = TextBatch(self.network, self.rules, prompt, 1, n_each, o.n_audio), self._most(prompt)
            d = beam_search(texts, stop, most, o.patience) if n_each > 1 and not t else \
                decode(texts, stop, most, t, self.rng)[0]
            d.temperature = t
            if self._good(seek if end is None else self.end, d):
                break
        return d

    def _good(self, seek, d):
        """Is the text good enough, or is the window silent, so that no higher temperature is tried?"""
        o = self.o
        if d.no_speech > o.max_no_speech and d.mean_logp < o.min_logp:
            return True
        no_times = o.timestamps and d.tokens and not any(t > self.vocab.begin for t in d.tokens) and \
            seek + self.n_window + LEAST < self.end
        return d.compression_ratio <= o.max_compression and d.mean_logp >= o.min_logp and not no_times

    def _used(self, seek, d):
        """(tokens that are used, frames to the next window) of a Decoded."""
        begin = self.vocab.begin
        if not self.o.timestamps:
            return d.tokens, self.n_window
        last = max((i for i, t in enumerate(d.tokens) if t > begin), default=None)
        if last is not None:
            return d.tokens[:last + 1], self._frames(d.tokens[last])
        return (d.tokens if seek + self.n_window + LEAST >= self.end else []), self.n_window

    def _frames(self, token):
        """Frames of a window up to a time; 0 for other tokens."""
        return min(max(2 * (token - self.vocab.begin), 0), self.n_window)

    def _segments(self, seek, tokens, step, d):
        """[Segment] of a window's tokens: text between two times."""
        v, out = self.vocab, []
        if not tokens:
            return out
        start, first = seek + self._frames(tokens[0]), 0

        def add(end, last):
            text = v.text(tokens[first:last])
            if text:
                own = [t for t in (*tokens[max(first - 1, 0):first], *tokens[first:last + 1])]
                out.append(Segment(0, start / UNIT, end / UNIT, text, own, [], d.temperature, d.mean_logp,
                                   d.compression_ratio, d.no_speech))
        for i, t in enumerate(tokens):
            if t > v.begin:
                add(seek + self._frames(t), i)
                start, first = seek + self._frames(t), i + 1
        add(min(seek + step, self.end), len(tokens))
        return out

    def _add_words(self, seek, found, n=None, slot=0):
        """n: frames of the window that are heard."""
        n = min(self.n_window, max(2, self.end - seek)) if n is None else n
        words = words_of(self.network, self.vocab, [(s.start, s.end, s.tokens) for s in found], self.o.language,
                         self.o.task, n, seek / UNIT, self._last_end, self.o.n_audio, slot)
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
