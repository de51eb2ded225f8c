"""Whisper: files, spectrograms, the network against float64, the rules of tokens, times of words, and the real model.

The real one is looked for in GGJIT_WHISPER, a folder with ggml-base.bin.
"""
import json
import os
import pathlib
import struct
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.paths import SHARED
from helpers.whisper_reference import (
    BEGIN,
    EOT,
    NO_SPEECH,
    SIZES,
    SOT,
    Reference,
    allowed,
    random_tensors,
    softmax,
    token_bytes,
    write_bin,
)

from ggjit.models import convert_folder, load_speech, load_vad, quantize_gguf, save_safetensors
from ggjit.models.convert import whisper as convert_whisper
from ggjit.models.core.byte_chars import CHAR_OF_BYTE
from ggjit.models.files.sound import open_sound, with_samples
from ggjit.models.networks.sounds.silero import find_silero
from ggjit.models.speech.decoding import TextBatch, TokenRules, beam_search, decode
from ggjit.models.speech.streaming import LiveTranscript
from ggjit.models.speech.tokens import LANGUAGES, gpt2_words
from ggjit.models.speech.words import Word, dtw, median_rows
from ggjit.ops.core.errors import BadFile, GgjitError, ModelError, ParamError, ShapeError, TypeMismatch
from ggjit.tools.command.main import main

RATE = 16000
REAL = pathlib.Path(os.environ.get("GGJIT_WHISPER", "/nowhere")) / "ggml-base.bin"
JFK = SHARED / "data" / "silero-vad" / "jfk.wav"
real = pytest.mark.skipif(not REAL.is_file() or not JFK.is_file(), reason="no reference data: GGJIT_WHISPER "
                            "names no folder with ggml-base.bin, or there is no jfk.wav")


@pytest.fixture(scope="module")
def tensors():
    return random_tensors()


@pytest.fixture(scope="module")
def small(tensors, tmp_path_factory):
    return write_bin(tmp_path_factory.mktemp("whisper") / "small.bin", tensors)


@pytest.fixture(scope="module")
def model(small):
    with load_speech(small, n_threads=1) as m:
        yield m


@pytest.fixture(scope="module")
def mel():
    return np.random.default_rng(5).uniform(-1, 1, (80, 2 * SIZES["n_audio_ctx"])).astype(np.float32)


@pytest.fixture(scope="module")
def encoded(tensors, mel):
    return Reference(tensors, 2).encode(mel)


def noise(seconds, seed=1, loudness=0.3):
    return (np.random.default_rng(seed).standard_normal(int(seconds * RATE)) * loudness).astype(np.float32)


def relative(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def nmse(a, b):
    return ((a - b) ** 2).sum() / (b ** 2).sum()


# ---------------------------------------------------------------- spectrograms
def reference_mel(x, filters):
    """(n_mels, frames): 30 s of zeros appended, mirrored by 200 samples, the last frame dropped."""
    x = np.pad(np.concatenate([np.asarray(x, float), np.zeros(30 * RATE)]), 200, mode="reflect")
    window = np.sin(np.pi * np.arange(400) / 400) ** 2
    frames = np.lib.stride_tricks.sliding_window_view(x, 400)[::160][:-1]
    energy = filters.astype(float) @ (np.abs(np.fft.rfft(frames * window)) ** 2).T
    log = np.log10(np.maximum(energy, 1e-10))
    return (np.maximum(log, log.max() - 8) + 4) / 4


@pytest.mark.parametrize("n", [1, 50, 199, 200, 201, 800, 16000, 40013])
def test_log_mel(model, n):
    x = noise(3, n)[:n]
    got, want = model.log_mel(x), reference_mel(x, model.network.mel_filters)
    assert got.dtype == np.float32 and got.shape == want.shape and np.abs(got - want).max() < 1e-6


def test_a_spectrogram_by_pieces_is_that_of_the_whole(model):
    x = noise(4)
    whole, sound = model.log_mel(x), with_samples(x)
    peak = model.mel.peak(sound)
    for first, n in ((0, 10), (3, 50), (390, 40), (400, 100)):
        assert np.array_equal(model.mel.window(sound, first, n, peak), whole[:, first:first + n])


# ---------------------------------------------------------------- the network
@pytest.mark.parametrize("n_threads", [1, 2])
def test_encoder_is_the_reference_s(small, mel, encoded, n_threads):
    with load_speech(small, n_threads=n_threads) as m:
        got = m.encode(mel)
    assert got.shape == encoded.shape and relative(got, encoded) < 1e-5


def test_encoder_of_fewer_frames(model, tensors, mel):
    want = Reference(tensors, 2).encode(mel[:, :80])
    assert relative(model.encode(mel, audio_ctx=40), want) < 1e-5
    short = np.zeros_like(mel)
    short[:, :30] = mel[:, :30]
    assert np.array_equal(model.encode(mel[:, :30]), model.encode(short))


def test_ggml_s_gelu_and_roundings(small, tensors, mel):
    want = Reference(tensors, 2, "ggml").encode(mel)
    with load_speech(small, n_threads=1, gelu="ggml") as m:
        error = relative(m.encode(mel), want)
    assert 1e-5 < error < 5e-3                              # F16 activations


PROMPT = [SOT, SOT + 1, 50359]


@pytest.mark.parametrize("kv_type, bound", [("F32", 1e-9), ("F16", 1e-5)])
def test_logits_of_forced_tokens(small, tensors, mel, encoded, kv_type, bound):
    rng = np.random.default_rng(3)
    tokens = [*PROMPT, *rng.integers(0, EOT, 30).tolist()]
    want, _ = Reference(tensors, 2).decode(encoded, tokens)
    with load_speech(small, n_threads=1, kv_type=kv_type) as m:
        m.encode(mel)
        assert nmse(m.logits(tokens), want) < bound
        one = m.network.feed([tokens[:7]], 0, 1, [2, 6])[0]
        assert nmse(one, want[[2, 6]]) < bound
        for i, t in enumerate(tokens[7:], 7):               # the caches hold what came before
            assert nmse(m.network.feed([[t]], i)[0, 0], want[i]) < bound


def test_texts_and_windows_side_by_side(small, tensors, mel):
    """Three texts of two windows each; and texts that take over what others have read."""
    ref, rng = Reference(tensors, 2), np.random.default_rng(4)
    mels = [mel, mel[:, ::-1].copy()]
    encoded = [ref.encode(x) for x in mels]
    with load_speech(small, n_threads=2) as m:
        n = m.network
        n.reserve(2, 6)
        for i, x in enumerate(mels):
            n.hear(x, i)
        texts = rng.integers(0, EOT, (6, 5))
        n.feed(texts[:, :3], 0, 2)
        got = n.feed(texts[:, 3:], 3, 2, [0, 1])
        for i in range(6):
            assert nmse(got[i], ref.decode(encoded[i // 3], texts[i])[0][3:]) < 1e-9
        sources = np.array([2, 0, 0, 3, 5, 4])
        n.take_over(sources, 5)
        more = rng.integers(0, EOT, (6, 1))
        got = n.feed(more, 5, 2)
        for i in range(6):
            want = ref.decode(encoded[i // 3], [*texts[sources[i]], *more[i]])[0][-1]
            assert nmse(got[i, 0], want) < 1e-9


def test_attention_of_alignment_heads(model, tensors, mel, encoded):
    tokens = [*PROMPT, 50363, 10, 20, 30, EOT]
    logits, cross = Reference(tensors, 2).decode(encoded, tokens)
    model.encode(mel)
    got_logits, got = model.network.align(tokens)
    assert nmse(got_logits, logits) < 1e-9
    assert model.network.alignment_heads == [(1, 0), (1, 1)]            # of an unknown model: the upper half
    assert np.abs(got - cross[1]).max() < 1e-5


def test_memory_is_planned_and_given_back(small, mel):
    from ggjit.models.networks.peak import model_peak
    report = model_peak(str(small))
    assert report.peak > 0 and report.kinds["KV cache"] > 0 and report.kinds["compute"] == report.peak
    m = load_speech(small, n_threads=1)
    m.encode(mel)
    assert m.network.compute_nbytes >= report.peak
    m.free()
    m.free()
    with pytest.raises(GgjitError):
        m.encode(mel)


# ---------------------------------------------------------------- tokens
def test_vocabulary(model):
    v = model.vocab
    assert (v.eot, v.sot, v.transcribe, v.no_speech, v.begin) == (EOT, SOT, 50359, NO_SPEECH, BEGIN)
    assert v.prompt("de", "translate", False, [7]) == [50361, 7, SOT, SOT + 3, 50358, 50363]
    assert v.text([300, 301, BEGIN, EOT]) == " ♪" and v.text([300]) == " \ufffd"
    assert v.language("German") == v.language("de") == "de" and len(v.languages) == 99
    assert v.encode("cab ab!") == [ord("c"), 302, 303, ord("!")] and v.encode(" ♪")[0] == ord(" ")
    assert v.words([300, 301, 700, ord("!")], "en") == [(" ♪", [300, 301]), (" w700", [700]), ("!", [33])]
    with pytest.raises(ParamError, match="none that"):
        v.language("klingon")


def test_words_as_gpt2_cuts_them():
    assert gpt2_words("I'll go  now, 12²x\n\n a") == ["I", "'ll", " go", " ", " now", ",", " 12²", "x", "\n\n", " a"]
    assert "".join(gpt2_words("  é日 \u3000-\t ")) == "  é日 \u3000-\t "


def test_rules_of_times(model):
    rules, rng = TokenRules(model.vocab), np.random.default_rng(6)
    plain = TokenRules(model.vocab, timestamps=False)
    for done in ([], [BEGIN], [BEGIN, 5], [BEGIN, 5, BEGIN + 9], [BEGIN, 5, BEGIN + 9, BEGIN + 9], [5, 6],
                 [BEGIN, 5, BEGIN + 9, BEGIN + 9, 7]):
        for scale in (1, 8):
            x = (rng.standard_normal(SIZES["n_vocab"]) * scale).astype(np.float32)
            x[BEGIN:] += scale * rng.uniform(-3, 1)
            for r, timestamps in ((rules, True), (plain, False)):
                got, want = r(x, done), allowed(x, done, timestamps)
                assert np.array_equal(np.isfinite(got), np.isfinite(want))
                seen = np.isfinite(want)
                assert np.abs(got[seen] - want[seen]).max() < 1e-4


def greedy(tensors, encoded, n_steps):
    """(tokens, log probabilities) by the reference."""
    ref, done, logp = Reference(tensors, 2), [], []
    for _ in range(n_steps):
        p = allowed(ref.decode(encoded, [*PROMPT, *done])[0][-1], done)
        t = int(p.argmax())
        logp.append(p[t])
        if t == EOT:
            break
        done.append(t)
    return done, logp


def test_greedy_and_beams(model, tensors, mel, encoded):
    want, logp = greedy(tensors, encoded, 12)
    with model.network.lock:
        model.encode(mel)
        rules = TokenRules(model.vocab)
        found = decode(TextBatch(model.network, rules, PROMPT), lambda w, t: False, 12)[0]
        assert found.tokens == want and np.allclose(found.logp, logp, atol=1e-3)
        assert found.no_speech == pytest.approx(
            softmax(Reference(tensors, 2).decode(encoded, PROMPT)[0][0])[NO_SPEECH], rel=1e-3)
        model.network.reserve(1, 4)
        model.encode(mel)
        best = beam_search(TextBatch(model.network, rules, PROMPT, 1, 4), lambda w, t: False, 12)
        assert best.score >= found.score - 1e-3             # it follows more texts than the likeliest token's
        total = 0.0                                         # its own log probabilities are those of its tokens
        for i in range(len(best.tokens)):
            row = Reference(tensors, 2).decode(encoded, [*PROMPT, *best.tokens[:i]])[0][-1]
            total += allowed(row, best.tokens[:i])[best.tokens[i]]
        assert total == pytest.approx(sum(best.logp[:len(best.tokens)]), abs=1e-2)


def test_draws_follow_the_seed(model):
    x = noise(1.5)
    runs = [[s.tokens for s in model.transcribe(x, vad=False, temperature=1.0, seed=s, language="en")]
            for s in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


# ---------------------------------------------------------------- recordings
def test_any_length_and_every_option(model):
    for seconds in (0.05, 0.3, 1.0, 3.7):
        for options in ({}, {"timestamps": False}, {"beam": 3}, {"word_timestamps": True}, {"task": "translate"},
                        {"prompt": "some text"}, {"audio_ctx": 32}, {"language": "French"}):
            r = model.transcribe(noise(seconds), vad=False, temperature=0.0, **options)
            assert r.text == "".join(s.text for s in r.segments).strip()
            for s in r.segments:
                assert 0 <= s.start <= s.end and s.text == model.vocab.text(s.tokens)
                words = "".join(w.word for w in s.words)
                assert not options.get("word_timestamps") or words == s.text
            assert not (seconds < 0.1 and r.segments)
    assert model.transcribe(noise(0.5), language="German", vad=False).language == "de"


def test_segments_come_one_by_one_and_stay(model):
    heard = []
    r = model.transcribe(noise(5), vad=False, temperature=0.0, progress=heard.append)
    first = next(iter(r), None)
    n = len(heard)
    assert r.segments == list(r) and (first is None or r.segments[0] is first)
    assert len(heard) > n and heard == sorted(heard) and heard[-1] == pytest.approx(5, abs=0.05)
    assert [s.id for s in r] == list(range(len(r.segments)))


def test_two_transcriptions_in_turn_do_not_disturb_each_other(model):
    def run(seed):
        return model.transcribe(noise(4, seed), vad=False, temperature=0.0, language="en")
    apart = [[s.tokens for s in run(seed)] for seed in (1, 2)]
    pairs = [iter(run(seed)) for seed in (1, 2)]
    together = [[], []]
    while pairs[0] or pairs[1]:
        for i, it in enumerate(pairs):
            s = next(it, None) if it else None
            if s is None:
                pairs[i] = None
            else:
                together[i].append(s.tokens)
    assert together == apart


class Spoken:
    """Stands for a SileroVad: speech where it is told."""

    def __init__(self, *spans):
        self.spans = spans

    def stretches(self, read, n_samples):
        return list(self.spans)


def test_windows_side_by_side_are_those_one_by_one(model):
    x, spans = noise(8), [(0.5, 1.5), (3.0, 3.9), (5.1, 6.3), (7.0, 7.9)]

    def run(batch, *spans):
        r = model.transcribe(x, language="en", vad=Spoken(*spans), batch=batch, temperature=0.0, word_timestamps=True)
        return [(s.start, s.end, s.tokens, s.words) for s in r]
    apart = [s for span in spans for s in run(2, span)]
    assert apart and run(4, *spans) == apart == run(3, *spans)
    assert all(any(a - 0.1 < start and end < a + 1.3 for a, _ in spans) for start, end, *_ in apart)
    with pytest.raises(ParamError, match="batch"):
        model.transcribe(x, batch=2, vad=False)


def test_long_silences_are_skipped(model):
    heard = []
    x = noise(20)
    list(model.transcribe(x, language="en", vad=Spoken((10.0, 11.0)), temperature=0.0, progress=heard.append))
    assert heard and min(heard) > 9.5                       # the first window begins half a second before the speech
    assert model.transcribe(x, language="en", vad=Spoken()).segments == []


def test_a_detector_is_looked_for_beside_the_model(tmp_path, monkeypatch):
    monkeypatch.delenv("GGJIT_VAD", raising=False)
    assert find_silero(tmp_path) is None
    for name in ("ggml-silero-v5.1.2.bin", "ggml-silero-v6.2.0.bin", "ggml-base.bin"):
        (tmp_path / name).touch()
    assert find_silero(tmp_path) == str(tmp_path / "ggml-silero-v6.2.0.bin")
    monkeypatch.setenv("GGJIT_VAD", "other.bin")
    assert find_silero(tmp_path) == "other.bin"


def test_without_a_detector_silence_is_heard_and_that_is_said(model, monkeypatch):
    monkeypatch.delenv("GGJIT_VAD", raising=False)
    monkeypatch.setattr(model, "_vad", None)
    x = noise(1)
    with pytest.warns(UserWarning, match="no voice detector beside .*vad=False"):
        text = model.transcribe(x, language="en", temperature=0.0).text
    assert text == model.transcribe(x, language="en", temperature=0.0, vad=False).text
    with pytest.warns(UserWarning), pytest.raises(ParamError, match="Silero file beside the model"):
        model.transcribe(x, batch=2)


def test_silence_has_no_text(model, shared, monkeypatch):
    silero = shared("data", "silero-vad", "silero-v6.2.0-ggml.bin")
    monkeypatch.setenv("GGJIT_VAD", str(silero))
    assert model.transcribe(np.zeros(3 * RATE, np.float32)).segments == []
    with load_vad(silero) as vad:
        assert model.transcribe(np.zeros(RATE, np.float32), vad=vad).text == ""


def test_bad_sound_is_a_typed_error(model, tmp_path):
    text = tmp_path / "text.wav"
    text.write_text("this is no sound")
    short = tmp_path / "short.wav"
    short.write_bytes(b"RIFF\x10\0\0\0WAVEfmt ")
    bad = noise(1)
    bad[77] = np.nan
    for sound, error, match in (
            (np.zeros(0, np.float32), ParamError, "no samples"), (bad, ParamError, "sample 77 is not a finite"),
            (noise(1).reshape(2, -1), ShapeError, "one row"), (["a"], TypeMismatch, "floats"),
            (short, BadFile, "damaged"), (tmp_path / "missing.wav", BadFile, "No such file"), (tmp_path, BadFile,
                                                                                              "not a regular")):
        with pytest.raises(error, match=match):
            model.transcribe(sound)
    with pytest.raises(GgjitError):                         # without PyAV the extra is named
        model.transcribe(text)
    x = noise(0.5)
    for options, match in (({"language": "xx"}, "language"), ({"task": "sing"}, "task"), ({"beam": 0}, "beam"),
                           ({"temperature": -1.0}, "temperature"), ({"audio_ctx": 65}, "audio_ctx"),
                           ({"vad": "yes"}, "vad"), ({"prompt": [10**6]}, "prompt"), ({"sample_rate": 10}, "Hz")):
        with pytest.raises(ParamError, match=match):
            model.transcribe(x, **options)
    for wrong in (np.zeros((3, 4), np.float32), np.zeros((80, 0), np.float32)):
        with pytest.raises(ShapeError, match="encode"):
            model.encode(wrong)


def wav(path, x, rate=RATE, channels=1, bits=16, code=1):
    amplitude = 1 if code == 3 else 1 << bits - 1
    a = np.clip(np.round(x.astype(np.float64) * amplitude), -amplitude, amplitude - 1) if code == 1 else x
    a = np.repeat(a[:, None], channels, 1).reshape(-1)
    raw = {(1, 8): lambda: (a + 128).astype("u1").tobytes(), (1, 16): lambda: a.astype("<i2").tobytes(),
           (1, 24): lambda: a.astype("<i4").view("u1").reshape(-1, 4)[:, :3].tobytes(),
           (1, 32): lambda: a.astype("<i4").tobytes(), (3, 32): lambda: a.astype("<f4").tobytes(),
           (3, 64): lambda: a.astype("<f8").tobytes()}[code, bits]()
    block = channels * bits // 8
    path.write_bytes(b"RIFF" + struct.pack("<I", 36 + len(raw)) + b"WAVEfmt " + struct.pack(
        "<IHHIIHH", 16, code, channels, rate, rate * block, block, bits) + b"data" + struct.pack("<I", len(raw)) + raw)
    return path


@pytest.mark.parametrize("code, bits, error", [(1, 8, 0.005), (1, 16, 2e-5), (1, 24, 1e-7), (1, 32, 1e-7),
                                               (3, 32, 0), (3, 64, 0)])
def test_wav_files(tmp_path, code, bits, error):
    x = noise(0.2, loudness=0.2)
    for channels in (1, 2):
        sound = open_sound(wav(tmp_path / "x.wav", x, RATE, channels, bits, code))
        got = sound.read(0, 10**9)
        assert len(got) == sound.n_samples == len(x) and np.abs(got - x).max() <= error
        assert np.array_equal(sound.read(100, 50), got[100:150]) and bool(sound.notes) == (channels > 1)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000])
def test_other_rates_are_changed_and_said(tmp_path, rate):
    t = np.arange(rate) / rate
    sound = open_sound(wav(tmp_path / "x.wav", 0.5 * np.sin(2 * np.pi * 700 * t), rate))
    got, t = sound.read(0, 10**9), np.arange(sound.n_samples) / RATE
    assert np.abs(got - 0.5 * np.sin(2 * np.pi * 700 * t))[300:-300].max() < 1e-4
    assert str(rate) in sound.notes[0] and np.allclose(sound.read(5000, 100), got[5000:5100], atol=1e-6)
    if rate > RATE:                                         # what 16 kHz cannot hold is gone
        high = with_samples(np.sin(2 * np.pi * 9500 * np.arange(rate) / rate), rate).read(0, 10**9)
        assert np.abs(high[300:-300]).max() < 1e-3


# ---------------------------------------------------------------- words
def test_the_cheapest_way():
    rng = np.random.default_rng(8)
    for n, m in ((1, 1), (3, 5), (6, 4), (1, 7), (5, 1)):
        cost = rng.standard_normal((n, m))
        path = dtw(cost)
        steps = np.diff(path, axis=0)
        assert path[0].tolist() == [0, 0] and path[-1].tolist() == [n - 1, m - 1]
        assert set(map(tuple, steps.tolist())) <= {(0, 1), (1, 0), (1, 1)}
        best = np.full((n + 1, m + 1), np.inf)
        best[0, 0] = 0
        for i in range(n):
            for j in range(m):
                best[i + 1, j + 1] = cost[i, j] + min(best[i, j], best[i, j + 1], best[i + 1, j])
        assert cost[tuple(path.T)].sum() == pytest.approx(best[n, m])


def test_medians():
    x = np.round(np.random.default_rng(9).standard_normal((4, 23)), 1)
    got = np.empty_like(x)
    median_rows(x, 4, 23, got)
    padded = np.pad(x, ((0, 0), (3, 3)), mode="reflect")
    assert np.array_equal(got, np.median(np.lib.stride_tricks.sliding_window_view(padded, 7, 1), -1))


# ---------------------------------------------------------------- files
def test_quantised_files_and_gguf(small, mel, encoded, tmp_path):
    paths = {}
    for kind in ("F32", "F16", "Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_K"):
        paths[kind] = tmp_path / f"{kind}.gguf"
        quantize_gguf(small, paths[kind], kind, requantize=True, progress=False)
    convert_folder(small, tmp_path / "as_is.gguf", progress=False)
    bounds = {"F32": 1e-5, "F16": 1e-5, "Q8_0": 0.03, "Q5_0": 0.2, "Q5_1": 0.2, "Q4_0": 0.3, "Q4_K": 0.3}
    for kind, path in paths.items():
        with load_speech(path, n_threads=1) as m:
            assert relative(m.encode(mel), encoded) < bounds[kind], kind
            assert m.vocab.text([300, 301]) == " ♪" and m.network.alignment_heads == [(1, 0), (1, 1)]
    with load_speech(tmp_path / "as_is.gguf", n_threads=1) as m, load_speech(small, n_threads=1) as n:
        assert np.array_equal(m.encode(mel), n.encode(mel))


def test_every_cut_and_many_damages_are_typed_errors(tensors, tmp_path):
    sizes = SIZES | {"n_vocab": 51864}
    few = {k: v for k, v in tensors.items() if "blocks" not in k and "token_embedding" not in k}
    raw = write_bin(tmp_path / "x.bin", few, sizes, tokens=token_bytes(256)).read_bytes()
    path, rng = tmp_path / "damaged.bin", np.random.default_rng(3)
    header = 52 + 8 + 4 * 80 * 201
    for n in [*range(4, 60, 3), *rng.integers(header, len(raw), 40)]:
        path.write_bytes(raw[:n])
        with pytest.raises((BadFile, ModelError)):
            load_speech(path)
    starts = [*range(4, 60, 4), header, header + 4, header + 4 + 5 * 256, header + 8 + 5 * 256, header + 12 + 5 * 256]
    for at in starts:
        for value in (-1, 0, 7, 2**31 - 1, -2**31, 65536):
            path.write_bytes(raw[:at] + struct.pack("<i", value) + raw[at + 4:])
            with pytest.raises(GgjitError, match="damaged.bin"):
                load_speech(path)


def test_what_is_no_whisper(tmp_path):
    from helpers import tiny_model
    path = tmp_path / "llama.gguf"
    tiny_model.write(path)
    with pytest.raises(ModelError, match="none that hears"):
        load_speech(path)
    with pytest.raises(TypeMismatch):
        load_speech(3)


# ---------------------------------------------------------------- the real model
JFK_TEXT = ("And so my fellow Americans, ask not what your country can do for you, ask what you can do for your "
            "country.")


@pytest.fixture(scope="module")
def base():
    if not REAL.is_file():
        pytest.skip("GGJIT_WHISPER names no folder with ggml-base.bin")
    with load_speech(REAL, n_threads=2) as m:
        yield m


@real
def test_a_real_recording(base):
    r = base.transcribe(JFK, word_timestamps=True)
    assert r.text == JFK_TEXT and r.language == "en" and r.languages.probability > 0.9
    assert [(s.start, s.end) for s in r.segments] == [(0.0, 11.0)]
    assert r.segments[0].no_speech == pytest.approx(0.0444, abs=2e-3)
    times = {w.text: (w.start, w.end) for w in r.words[:5]}
    assert times["Americans,"] == pytest.approx((1.56, 2.1), abs=0.041)
    assert "00:00:00,000 --> 00:00:11,000" in r.to_srt()


@real
def test_a_real_recording_by_beams_and_with_another_model(base, tmp_path):
    assert base.transcribe(JFK, beam=5, language="en").text == JFK_TEXT
    quantize_gguf(REAL, tmp_path / "q8.gguf", "Q8_0", progress=False)
    with load_speech(tmp_path / "q8.gguf", n_threads=2) as m:
        assert m.transcribe(JFK).text.replace(",", "") == JFK_TEXT.replace(",", "")


# ---------------------------------------------------------------- sound that is coming in
class Heard:
    """Stands for a Speech: hears so many words of a text, the last of them wrongly, half a second each."""
    SAYS = [f" word{i}" + "." * (i % 7 == 6) for i in range(80)]

    def __init__(self):
        self.buffers = []

    def transcribe(self, samples, **options):
        first = round(samples[0] * 1000)                    # the sound says where it begins
        n = len(samples) // (RATE // 2)
        self.buffers.append(len(samples) / RATE)
        says = [Word(i / 2, i / 2 + 0.5, self.SAYS[first + i], 1.0) for i in range(n)]
        if says:
            says[-1] = says[-1]._replace(word=f" wrong{len(self.buffers)}")
        return SimpleNamespace(words=says, language="en", languages=SimpleNamespace(probability=0.9))


def test_a_stream_gives_out_what_it_hears_twice():
    sound = np.repeat(np.arange(80) / 1000, RATE // 2).astype(np.float32)
    speech, given = Heard(), []
    stream = LiveTranscript(speech, step=1.0, longest=6.0)
    for i in range(0, len(sound), 3000):
        words = stream.feed(sound[i:i + 3000])
        given += words
        assert stream.text == "".join(w.word for w in given).strip()
        assert all(a.end <= b.start + 1e-6 for a, b in zip(stream.words, stream.words[1:], strict=False))
    stable = len(given)
    assert "".join(w.word for w in given) == "".join(Heard.SAYS[:stable]) and stable > 70
    assert max(speech.buffers) < 8 and stream.seconds == pytest.approx(40)      # the buffer is cut
    assert 0 < stream.delay < 4 and min(stream.delays) > 0
    stream.finish()
    assert stream.text.startswith("".join(Heard.SAYS[:stable]).strip()) and stream.pending == []
    with pytest.raises(ParamError, match="finished"):
        stream.feed(sound[:10])


def test_a_stream_of_a_model(model):
    stream = model.stream(language="en")
    x = noise(3)
    for i in range(0, len(x), 7777):
        stream.feed(x[i:i + 7777])
    with pytest.raises(ParamError, match="finite"):
        stream.feed(np.full(10, np.nan, np.float32))
    assert stream.seconds == pytest.approx(3) and stream.finish() is not None
    with pytest.raises(ParamError, match="step"):
        model.stream(step=0.0)


# ---------------------------------------------------------------- the command
def test_the_command(small, tmp_path, capsys):
    path = wav(tmp_path / "x.wav", noise(1.2), 8000)
    for options in (["--json", "--words"], ["--srt"], ["--vtt", "--words"], []):
        assert main(["transcribe", str(path), "-m", str(small), "--no-vad", "--temperature", "0", *options]) == 0
        out, err = capsys.readouterr()
        assert "8000 Hz" in err
        if "--json" in options:
            found = json.loads(out)
            assert {"text", "language", "segments", "audio_seconds", "seconds"} <= found.keys()
            assert found["language"] in LANGUAGES and found["audio_seconds"] == pytest.approx(2.4)
        assert not options or "--vtt" not in options or out.startswith("WEBVTT")
    assert main(["transcribe", str(tmp_path / "none.wav"), "-m", str(small)]) == 1
    assert "none.wav" in capsys.readouterr().err


# ---------------------------------------------------------------- inside
def test_named_values(model, tensors, mel, encoded):
    names = {s.name for s in model.names()}
    assert {"conv1", "enc_result", "logits", "result_norm", "blk.1.enc_l_out", "blk.0.dec_ffn_out", "blk.1.cross_attn",
            "blk.0.cross_kq_soft_max"} <= names
    tokens = [*PROMPT, 7, 8]
    logits, cross = Reference(tensors, 2).decode(encoded, tokens)
    got = model.capture(["enc_result", "logits", "blk.0.cross_kq_soft_max"], mel, tokens)
    assert relative(got["enc_result"], encoded) < 1e-5 and nmse(got["logits"][:5], logits) < 1e-9
    assert np.abs(got["blk.0.cross_kq_soft_max"].reshape(2, -1, 64)[:, :5] - cross[0]).max() < 1e-5
    with pytest.raises(ParamError, match="nearest"):
        model.capture("blk.9.nothing", mel)


def test_patched_values(model, mel):
    before = model.encode(mel)
    with model.patch({"blk.1.enc_ffn_out": 0, "blk.1.enc_attn_out": lambda x: 0 * x}):
        got = model.capture(["blk.0.enc_l_out", "blk.1.enc_l_out"], mel)
        assert np.array_equal(got["blk.0.enc_l_out"], got["blk.1.enc_l_out"])       # the layer adds nothing
        assert relative(model.encode(mel), before) > 0.01
    assert np.array_equal(model.encode(mel), before)


def test_pictures(model):
    plt = pytest.importorskip("matplotlib.pyplot")
    x = noise(1.2)
    s = model.spectrogram(x)
    assert s.values.shape == (80, 120) and s._repr_png_().startswith(b"\x89PNG")
    try:
        a = model.listening(x, "en")
    except ParamError:                                      # it heard nothing in this noise
        a = model.listening(noise(1.2, 3), "en")
    assert a.alignment.weights.shape == (len(a.alignment.pieces), 60)
    assert all(np.allclose(w.sum(1), 1, atol=1e-3) for w in a.heads.values())
    assert a._repr_png_() and a.plot_word(0).get_title()
    for axes in (s.plot(), a.plot(), a.plot_word(0)):       # readable on any page
        assert axes.figure.get_facecolor() == (1, 1, 1, 1) and axes.xaxis.label.get_color() == "#222222"
    plt.close("all")
    with pytest.raises(ParamError, match="word"):
        a.plot_word(10**6)


# ---------------------------------------------------------------- folders
def write_hf(folder, tensors):
    folder.mkdir()
    names = dict(convert_whisper.HF_NAMES)
    out = {}
    for name, a in tensors.items():
        for theirs, ours in names.items():
            name = name.replace(ours, theirs) if ours != "attn." else name.replace(".attn.", ".self_attn.")
        out["model." + name] = a.reshape(-1) if name.endswith(("conv1.bias", "conv2.bias")) else a
    save_safetensors(folder / "model.safetensors", out)
    vocab = {"".join(CHAR_OF_BYTE[b] for b in t): i for i, t in enumerate(token_bytes())}
    s = SIZES
    (folder / "vocab.json").write_text(json.dumps(vocab | {"<|endoftext|>": EOT}))
    (folder / "generation_config.json").write_text(json.dumps({"alignment_heads": [[0, 1]]}))
    (folder / "config.json").write_text(json.dumps({
        "model_type": "whisper", "d_model": s["n_text_state"], "encoder_layers": s["n_audio_layer"],
        "decoder_layers": s["n_text_layer"], "encoder_attention_heads": 2, "decoder_attention_heads": 2,
        "vocab_size": s["n_vocab"], "num_mel_bins": 80, "max_source_positions": s["n_audio_ctx"],
        "max_target_positions": s["n_text_ctx"], "activation_function": "gelu"}))
    return folder


def write_ct2(folder, tensors, int8):
    """model.bin of CTranslate2: fused projections, keys with a bias of zeros; matrices in int8 with a scale a row."""
    folder.mkdir()
    out, ln = {}, {"weight": "gamma", "bias": "beta"}

    def put(name, *parts):
        a = np.concatenate(parts)
        if int8 and a.ndim == 2 and "encodings" not in name:
            scale = 127 / np.abs(a).max(1)
            out[name], out[name + "_scale"] = np.round(a * scale[:, None]).astype(np.int8), scale.astype(np.float32)
        else:
            out[name] = a
    for side, n in (("encoder", 2), ("decoder", 2)):
        for i in range(n):
            p, q = f"{side}.blocks.{i}", f"{side}/layer_{i}"
            for kind in ("weight", "bias"):
                put(f"{q}/ffn/layer_norm/{ln[kind]}", tensors[f"{p}.mlp_ln.{kind}"])
                for j in (0, 1):
                    put(f"{q}/ffn/linear_{j}/{kind}", tensors[f"{p}.mlp.{2 * j}.{kind}"])
                for ours, theirs, groups in (("attn", "self_attention", ("query key value", "out")),
                                             ("cross_attn", "attention", ("query", "key value", "out"))):
                    if f"{p}.{ours}_ln.weight" not in tensors:
                        continue
                    put(f"{q}/{theirs}/layer_norm/{ln[kind]}", tensors[f"{p}.{ours}_ln.{kind}"])
                    for j, group in enumerate(groups):
                        put(f"{q}/{theirs}/linear_{j}/{kind}", *(
                            tensors.get(f"{p}.{ours}.{c}.{kind}", np.zeros(128, np.float32)) for c in group.split()))
        for kind in ("weight", "bias"):
            norm = {"encoder": "encoder.ln_post", "decoder": "decoder.ln"}[side]
            put(f"{side}/layer_norm/{ln[kind]}", tensors[f"{norm}.{kind}"])
        put(f"{side}/position_encodings/encodings", tensors[f"{side}.positional_embedding"])
    for i in (1, 2):
        put(f"encoder/conv{i}/weight", tensors[f"encoder.conv{i}.weight"])
        put(f"encoder/conv{i}/bias", tensors[f"encoder.conv{i}.bias"].reshape(-1))
    put("decoder/embeddings/weight", tensors["decoder.token_embedding.weight"])
    out["encoder/num_heads"] = np.array(2, np.int16)

    def text(s):
        return struct.pack("<H", len(s) + 1) + s.encode() + b"\0"
    raw = [struct.pack("<I", 6), text("WhisperSpec"), struct.pack("<II", 3, len(out))]
    for name, a in out.items():
        code = {"float32": 0, "int8": 1, "int16": 2}[a.dtype.name]
        raw += [text(name), struct.pack(f"<B{a.ndim}I", a.ndim, *a.shape), struct.pack("<BI", code, a.nbytes),
                a.tobytes()]
    raw += [struct.pack("<I", 1), text("decoder/projection/weight"), text("decoder/embeddings/weight")]
    (folder / "model.bin").write_bytes(b"".join(raw))
    words = ["".join(CHAR_OF_BYTE[b] for b in t) for t in token_bytes()]
    (folder / "vocabulary.json").write_text(json.dumps([*words, "<|endoftext|>"]))
    (folder / "config.json").write_text(json.dumps({"alignment_heads": [[0, 1]]}))
    return folder


def test_folders_of_hugging_face_and_ctranslate2(tensors, small, mel, encoded, tmp_path):
    with load_speech(small, n_threads=1) as m:
        want = m.encode(mel)
    hf, ct2 = write_hf(tmp_path / "hf", tensors), write_ct2(tmp_path / "ct2", tensors, False)
    for i, folder in enumerate((hf, ct2)):
        path = tmp_path / f"{i}.gguf"
        assert convert_folder(folder, path, "F16", progress=False)["arch"] == "whisper"
        with load_speech(path, n_threads=1) as m:
            assert np.array_equal(m.encode(mel), want) and m.network.alignment_heads == [(0, 1)]
            assert m.vocab.text([300, 301]) == " ♪" and m.vocab.encode(" ab") == [303]
    convert_folder(write_ct2(tmp_path / "int8", tensors, True), tmp_path / "int8.gguf", "F32", progress=False)
    with load_speech(tmp_path / "int8.gguf", n_threads=1) as m:
        assert 1e-4 < relative(m.encode(mel), encoded) < 0.03
    raw, rng = (ct2 / "model.bin").read_bytes(), np.random.default_rng(7)
    for n in [3, 20, 40, *rng.integers(0, len(raw), 10)]:
        (ct2 / "model.bin").write_bytes(raw[:n])
        with pytest.raises(GgjitError):
            convert_folder(ct2, tmp_path / "x.gguf", "F16", progress=False)
    for at in (0, 4, 18, 22, *rng.integers(20, 400, 20)):
        (ct2 / "model.bin").write_bytes(raw[:at] + struct.pack("<I", 2**32 - 5) + raw[at + 4:])
        try:
            convert_folder(ct2, tmp_path / "y.gguf", "F16", force=True, progress=False)
        except GgjitError:
            pass


@pytest.mark.parametrize("n_vocab, n_mels, n_text_layer", [(51864, 80, 1), (51866, 128, 1)])
def test_other_shapes(tmp_path, n_vocab, n_mels, n_text_layer):
    """English only; large-v3's bands and language, with fewer layers in the decoder as in turbo and distil."""
    sizes = SIZES | {"n_vocab": n_vocab, "n_mels": n_mels, "n_text_layer": n_text_layer}
    tensors = random_tensors(1, sizes)
    path = write_bin(tmp_path / "x.bin", tensors, sizes, tokens=token_bytes()[:EOT - (n_vocab == 51864)])
    mel = np.random.default_rng(2).uniform(-1, 1, (n_mels, 128)).astype(np.float32)
    with load_speech(path, n_threads=1) as m:
        want = Reference(tensors, 2).encode(mel)
        assert relative(m.encode(mel), want) < 1e-5 and m.log_mel(noise(1)).shape[0] == n_mels
        prompt = m.vocab.prompt("en", "transcribe", True)
        assert prompt == ([50257] if n_vocab == 51864 else [50258, 50259, 50360])
        assert nmse(m.logits(prompt), Reference(tensors, 2).decode(want, prompt)[0]) < 1e-9
        r = m.transcribe(noise(2), vad=False, temperature=0.0)
        assert r.language == "en" if n_vocab == 51864 else r.language in LANGUAGES
        if n_vocab == 51864:
            with pytest.raises(ParamError, match="English-only"):
                m.transcribe(noise(1), task="translate")
        else:
            assert m.vocab.language("yue") == "yue" and m.vocab.begin == 50365
