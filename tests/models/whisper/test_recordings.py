"""Whisper on recordings: any length, times of words, sound that is coming in, the command."""
import json
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.sounds import RATE, noise, wav

from ggjit.models import load_vad
from ggjit.models.files.sound import open_sound, with_samples
from ggjit.models.networks.sounds.silero import find_silero
from ggjit.models.speech.streaming import LiveTranscript
from ggjit.models.speech.tokens import LANGUAGES
from ggjit.models.speech.words import Word, dtw, median_rows
from ggjit.ops.core.errors import BadFile, GgjitError, ParamError, ShapeError, TypeMismatch
from ggjit.tools.command.main import main


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
