"""Moonshine on recordings of any length: pieces of up to 30 s, split at quiet moments.

    with Silero       |-speech-|  |----speech----|            |-speech-|
                      |--------------------------|            |--------|     up to 30 s, joined over short silences
    without           |-------------|-----------------|         cut at the quietest place of a piece's last third

A piece is heard whole and written until the model ends it.  Times are those of pieces: Moonshine says no others, and
which of its heads follow the sound is not known.
"""
import os

import numpy as np

from ggjit.core.arguments import typed_call
from ggjit.models.core.checks import integer
from ggjit.models.files.sound import RATE, Sound
from ggjit.models.networks.sounds.moonshine import LEAST, MAX_SECONDS
from ggjit.models.speech.decoding import MAX_BEAM, AnyToken, TextBatch, beam_search, decode
from ggjit.models.speech.speech_model import SpeechModel
from ggjit.models.speech.transcript import Language, Segment, Transcript
from ggjit.ops.core.errors import ModelError, ParamError

TOKENS_PER_SECOND = 6.5         # at most so many, as in training; the limit ends repetitions
QUIET = RATE // 10              # samples over which loudness is compared
SILENCE = 2 * RATE              # samples of a silence that is not heard
AROUND = RATE // 5              # samples of silence that are heard before and behind speech
LONGEST, EARLIEST = MAX_SECONDS * RATE, 20 * RATE       # samples of a piece, and where it may be cut at the earliest
PADDING = RATE // 5             # samples of a piece that is too short are so many at least
CODE = "en"


class MoonshineVocabulary:
    """What decoding asks of a vocabulary: the tokens that begin and end a text, and the text of others."""
    no_speech = None

    def __init__(self, network):
        t = network.tokenizer
        self.sot, self.eot, self.text = t.bos_id, t.eos_id, t.decode
        if self.sot is None or self.eot is None or t.n_vocab != network.n_vocab:
            raise ModelError(f"{network.file.path}: {t.n_vocab} words, {network.n_vocab} rows of the embedding, "
                             f"{self.sot} and {self.eot} as tokens that begin and end texts; convert the model again")


class MoonshineSpeech(SpeechModel):
    """`m.transcribe(sound)`; `m.encode(sound)`, `m.logits(tokens)`.  Sounds: as Speech's."""

    def __init__(self, network):
        self.network = network
        try:
            self.tokenizer = network.tokenizer
            self._rules = AnyToken(MoonshineVocabulary(network))
        except BaseException:
            network.free()
            raise

    @typed_call
    def transcribe(self, sound, language=None, task="transcribe", beam=1, timestamps=True, word_timestamps=False,
                   prompt=None, vad=True, *, sample_rate=RATE, temperature=0.0, audio_ctx=None, progress=None):
        """The Transcript of a recording: iterate over its segments as they come, or take `.text`.

            for segment in m.transcribe("talk.wav"):
                print(segment.start, segment.end, segment.text)

        vad: True: Silero finds the pieces, where its file lies beside the model's or GGJIT_VAD names it, else they are
        cut where it is quiet; False: without; or a SileroVad.  beam: texts that are followed at once; 1: the likeliest
        token each time.  language: a name for the one language of the model, "en" if not given.  sample_rate: of an
        array.  progress: called with the seconds heard so far.  The other arguments are Whisper's: Moonshine writes the
        one language it was trained with, with times of pieces.
        Errors: BadFile, ParamError (no samples, NaN, options), TypeMismatch, ShapeError, MissingExtra.
        """
        for name, value, only in (("task", task, "transcribe"), ("prompt", prompt, None),
                                  ("temperature", temperature, 0.0), ("word_timestamps", word_timestamps, False),
                                  ("audio_ctx", audio_ctx, None)):
            if value != only:
                raise ParamError(f"{name} = {value!r}: Moonshine has {only!r} only; load a Whisper model for it")
        beam, sound = integer("beam", beam, 1, MAX_BEAM), self._sound(sound, sample_rate)
        stretches = self._stretches(sound, vad)
        code = CODE if language is None else str(language)
        return Transcript(sound.name, sound.seconds, sound.notes, Language(code, 1.0, {code: 1.0}),
                          self._segments(sound, stretches, beam, progress))

    def _segments(self, sound, stretches, beam, progress):
        """The Segments, as they are written."""
        n, id = sound.n_samples, 0
        whole = [(0, n)] if stretches is None else joined(stretches, n)
        for first, end in (piece for stretch in whole for piece in cut(sound, *stretch)):
            d = self._written(sound.read(first, end - first), beam)
            if d.text.strip():
                yield Segment(id, first / RATE, end / RATE, " " + d.text.strip(), d.tokens, mean_logp=d.mean_logp,
                              compression_ratio=d.compression_ratio)
                id += 1
            if progress is not None:
                progress(end / RATE)

    def _written(self, samples, beam):
        """The Decoded of a piece."""
        n = self.network
        most = min(n.n_text - 1, max(1, int(len(samples) / RATE * TOKENS_PER_SECOND)))
        with n.lock:
            n.reserve(1, beam)
            n_audio = len(n.hear(padded(samples)))
            texts = TextBatch(n, self._rules, [self._rules.vocab.sot], 1, beam, n_audio)
            return beam_search(texts, never, most) if beam > 1 else decode(texts, never, most)[0]

    @typed_call
    def encode(self, sound, sample_rate=RATE):
        """The encoder's results, float32 (frames of 24 ms, dim), of a sound of up to 30 s.

            m.encode("talk.wav").shape
        """
        sound = self._sound(sound, sample_rate)
        with self.network.lock:
            return self.network.hear(padded(sound.read(0, sound.n_samples))).copy()

    @typed_call
    def logits(self, tokens):
        """float32 (n, n_vocab) after each of the tokens, about what `encode` heard last.

            m.encode("talk.wav"); m.logits([m.tokenizer.bos_id])
        """
        n = self.network
        return n.feed([tokens], 0, 1, list(range(len(tokens))), n.heard_frames)[0].copy()

    def capture(self, patterns, sound, tokens=None):
        """{name: float32 array} of the tensors that match, while a sound is heard and the tokens (None: the first) are
        read.

            m.capture("blk.*.enc_l_out", "talk.wav")["blk.5.enc_l_out"].shape       # (frames, dim)

        Errors: as `names` and `encode`.
        """
        n = self.network
        with n.lock, n.capturing(patterns) as found:
            self.encode(sound if isinstance(sound, str | os.PathLike | Sound) else np.asarray(sound))
            n.align([self.tokenizer.bos_id] if tokens is None else tokens, n.heard_frames)
            return {name: values[-1] if values.ndim > len(n.names(name)[0].shape) else values
                    for name, values in found.items()}


def never(window, tokens):
    """Texts end by their end token alone."""
    return False


def padded(samples):
    """The samples with silence behind them, where they are too few."""
    return samples if len(samples) >= LEAST else np.pad(samples, (0, PADDING - len(samples)))


def joined(stretches, n_samples):
    """[(first, end), ...] in samples: stretches of speech in seconds, with the short silences between them."""
    out, at = [], [min(n_samples, int(t * RATE)) for stretch in stretches for t in stretch]
    before, behind = [0, *at[1::2]], [*at[2::2], n_samples]
    for last, first, end, following in zip(before, at[::2], at[1::2], behind, strict=False):
        first -= min(AROUND, (first - last) // 2)
        end += min(AROUND, (following - end) // 2)
        if out and first - out[-1][1] < SILENCE and end - out[-1][0] <= LONGEST:
            first, _ = out.pop()
        out.append((first, end))
    return out


def cut(sound, first, end):
    """[(first, end), ...]: pieces that can be heard at once, cut where it is quietest."""
    out = []
    while end - first > LONGEST:
        x = sound.read(first + EARLIEST, LONGEST - EARLIEST)
        loud = (x[:len(x) // QUIET * QUIET].reshape(-1, QUIET).astype(np.float64) ** 2).sum(1)
        at = first + EARLIEST + int(loud.argmin()) * QUIET + QUIET // 2
        out.append((first, at))
        first = at
    return [*out, (first, end)]
