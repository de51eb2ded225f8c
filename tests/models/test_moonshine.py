"""Moonshine: transformers' results, texts of recordings, what cannot be done."""
import json
import wave

import numpy as np
import pytest
from helpers.hf_folders import GOLDENS, IDS, moonshine, moonshine_sound

import ggjit as gg
from ggjit.models import convert_folder, load_speech, quantize_gguf, save_safetensors
from ggjit.models.files.sound import RATE, with_samples
from ggjit.models.networks.sounds.moonshine import KERNELS, LEAST, STRIDES, n_frames
from ggjit.models.speech.moonshine import EARLIEST, LONGEST, cut

WANT = json.loads(GOLDENS.read_text())["moonshine"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    pytest.importorskip("gguf", reason="names of keys and tensors")
    folder = tmp_path_factory.mktemp("moonshine")
    out = folder / "m.gguf"
    convert_folder(moonshine(folder / "hf", save_safetensors), out, "F32", progress=False)
    return out


@pytest.fixture(scope="module")
def m(path):
    with load_speech(path, n_threads=1) as m:
        yield m


def test_results_are_those_of_transformers(m):
    heard = m.encode(moonshine_sound())
    assert len(heard) == n_frames(RATE)
    np.testing.assert_allclose(heard[::3, :6], WANT["heard"], rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(m.logits(IDS)[::3, :6], WANT["logits"], rtol=2e-4, atol=2e-4)


def test_tokens_one_by_one_are_those_at_once(m):
    n_audio, want = len(m.encode(moonshine_sound())), m.logits(IDS)
    one = [m.network.feed([[t]], i, n_audio=n_audio)[0, 0].copy() for i, t in enumerate(IDS)]
    np.testing.assert_allclose(one, want, rtol=1e-4, atol=1e-4)


def test_a_sound_is_heard_as_long_as_it_is(m):
    """Another length before changes nothing; what lies in the cache behind the frames is not looked at."""
    want = [m.encode(moonshine_sound()), m.logits(IDS)]
    m.encode(np.random.default_rng(2).standard_normal(3 * RATE).astype(np.float32))
    np.testing.assert_array_equal(m.encode(moonshine_sound()), want[0])
    np.testing.assert_array_equal(m.logits(IDS), want[1])


def test_transcribe_writes_the_likeliest_tokens(m, tmp_path):
    x = np.clip(moonshine_sound(), -1, 1)
    with wave.open(str(tmp_path / "x.wav"), "wb") as f:
        f.setnchannels(1)
        f.setsampwidth(2)
        f.setframerate(RATE)
        f.writeframes((x * 32767).astype("<i2").tobytes())
    heard = []
    r = m.transcribe(tmp_path / "x.wav", vad=False, progress=heard.append)
    tokens, ids = r.segments[0].tokens if r.segments else [], [m.tokenizer.bos_id]
    m.encode(tmp_path / "x.wav")
    for t in tokens:
        assert m.logits(ids)[-1].argmax() == t
        ids.append(t)
    assert tokens and len(tokens) <= 6 and r.language == "en" and heard == [1.0]
    assert (r.segments[0].start, r.segments[0].end) == (0.0, 1.0) and r.to_srt().startswith("1\n00:00:00,000")


def test_long_recordings_are_cut_where_it_is_quiet():
    x = np.random.default_rng(3).standard_normal(75 * RATE).astype(np.float32)
    for at in (23, 48):
        x[at * RATE:at * RATE + RATE // 4] = 0
    sound = with_samples(x, RATE)
    pieces = cut(sound, 0, sound.n_samples)
    assert pieces[0][0] == 0 and pieces[-1][1] == sound.n_samples
    assert all(a[1] == b[0] for a, b in zip(pieces, pieces[1:], strict=False))
    assert all(end - first <= LONGEST for first, end in pieces) and pieces[0][1] >= EARLIEST
    assert [first / RATE for first, _ in pieces[1:]] == pytest.approx([23.1, 48.1], abs=0.15)


def test_frames_are_those_of_the_convolutions():
    assert n_frames(LEAST) == 1 and n_frames(LEAST - 1) == 0 and n_frames(0) == 0
    n = 12345
    for kernel, stride in zip(KERNELS, STRIDES, strict=True):
        n = len(range(0, n - kernel + 1, stride))
    assert n_frames(12345) == n


@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
def test_other_types(path, kind, tmp_path):
    quantize_gguf(path, tmp_path / "q.gguf", kind, progress=False)
    with load_speech(tmp_path / "q.gguf", n_threads=1) as q:
        heard = q.encode(moonshine_sound())
        np.testing.assert_allclose(heard[::3, :6], WANT["heard"], atol=0.2)


def test_what_cannot_be_done(m, path):
    for options, message in (({"word_timestamps": True}, "word_timestamps = True: Moonshine has False only"),
                             ({"task": "translate"}, "Whisper"), ({"beam": 5}, "beam = 5"),
                             ({"prompt": "x"}, "prompt")):
        with pytest.raises(gg.ParamError, match=message):
            m.transcribe(moonshine_sound(), **options)
    with pytest.raises(gg.ParamError, match="not a finite number"):
        list(m.transcribe(np.full(RATE, np.nan, np.float32), vad=False))
    with pytest.raises(gg.ParamError, match="895 to 480000 are heard at once; transcribe"):
        m.encode(np.zeros(31 * RATE, np.float32))
    assert m.encode(np.zeros(10, np.float32)).shape[0] == n_frames(RATE // 5)
    with pytest.raises(gg.ParamError, match="leave gelu out"):
        load_speech(path, gelu="ggml")
    np.testing.assert_array_equal(np.isfinite(m.encode(moonshine_sound())), True)       # as usable as before
