"""Moonshine: transformers' and a float64 reference's results, texts of recordings, damaged files, what cannot be done.

The real one is looked for in GGJIT_MOONSHINE, Hugging Face's folder of Moonshine tiny.
"""
import json
import os
import pathlib
import struct

import numpy as np
import pytest
from helpers.cases import nmse
from helpers.hf_folders import GOLDENS, IDS, moonshine, moonshine_sound
from helpers.moonshine_reference import Reference
from helpers.paths import SHARED
from helpers.sample import SEED
from helpers.sounds import noise, relative, wav

import ggjit as gg
from ggjit.models import convert_folder, load_speech, quantize_gguf, save_safetensors
from ggjit.models.files.sound import RATE, open_sound, with_samples
from ggjit.models.networks.peak import model_peak
from ggjit.models.networks.sounds.moonshine import KERNELS, LEAST, STRIDES, n_frames
from ggjit.models.speech.moonshine import EARLIEST, LONGEST, cut, joined

WANT = json.loads(GOLDENS.read_text())["moonshine"]
REAL = pathlib.Path(os.environ.get("GGJIT_MOONSHINE", "/nowhere"))
JFK = SHARED / "data" / "silero-vad" / "jfk.wav"
JFK_TEXT = "And so my fellow Americans ask not what your country can do for you, ask what you can do for your country."
# width, width of feed forward, heads, part of a head that RoPE turns
SIZES = {"tiny": (288, 1152, 8, 0.9), "base": (416, 1664, 8, 0.62)}


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


@pytest.mark.parametrize("size", SIZES)
def test_widths_of_tiny_and_base(size, tmp_path):
    folder = moonshine(tmp_path / "hf", save_safetensors, SEED, *SIZES[size])
    convert_folder(folder, tmp_path / "m.gguf", "F32", progress=False)
    reference, sound = Reference(folder), noise(1.3, SEED)
    want = reference.encode(sound)
    with load_speech(tmp_path / "m.gguf", n_threads=1) as m:
        assert m.network.n_rot == 32
        assert relative(m.encode(sound), want) < 1e-5
        assert nmse(m.logits(IDS), reference.decode(want, IDS)) < 1e-9


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
    path, heard = wav(tmp_path / "x.wav", np.clip(moonshine_sound(), -1, 1)), []
    r = m.transcribe(path, vad=False, progress=heard.append)
    tokens, ids = r.segments[0].tokens if r.segments else [], [m.tokenizer.bos_id]
    m.encode(path)
    for t in tokens:
        assert m.logits(ids)[-1].argmax() == t
        ids.append(t)
    assert tokens and len(tokens) <= 6 and r.language == "en" and heard == [1.0]
    assert (r.segments[0].start, r.segments[0].end) == (0.0, 1.0) and r.to_srt().startswith("1\n00:00:00,000")


def test_beams_find_likelier_texts(m):
    sound, found = noise(3.0, 0), {}
    for beam in (1, 4):
        segment, = m.transcribe(sound, beam=beam, vad=False).segments
        m.encode(sound)
        x = m.logits([m.tokenizer.bos_id, *segment.tokens]).astype(float)
        logp = x - np.log(np.exp(x).sum(1, keepdims=True))
        ended = len(segment.tokens) < 19                # of 3 s; a shorter text has an end token
        follow = [*segment.tokens, *[m.tokenizer.eos_id] * ended]
        found[beam] = logp[np.arange(len(follow)), follow].sum() / len(follow)
        assert segment.mean_logp == pytest.approx(found[beam], abs=1e-4)
    assert found[4] > found[1]


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


def test_speech_is_heard_with_short_silences():
    stretches = [(0.3, 2.0), (2.1, 4.0), (7.0, 20.0), (20.5, 40.0), (40.9, 42.03)]
    found = np.array(joined(stretches, 42 * RATE)) / RATE
    np.testing.assert_allclose(found, [(0.15, 4.2), (6.8, 20.2), (20.3, 42.0)], atol=1e-4)
    assert joined([], RATE) == []


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


def test_memory_is_planned_without_weights(path):
    """The encoder's graph of 30 s, of which the first convolution's rows and patches are most."""
    report = model_peak(path, planner="best")
    n = (30 * RATE - KERNELS[0]) // STRIDES[0] + 1
    assert 4 * 72 * n < report.lower_bound <= report.peak < 3 * 4 * 72 * n * KERNELS[1] / STRIDES[1]


# ---------------------------------------------------------------- files
def number_at(raw, key):
    """Where the 32-bit number of a key lies in a GGUF file."""
    at = raw.index(struct.pack("<Q", len(key)) + key.encode()) + 8 + len(key)
    assert struct.unpack_from("<I", raw, at)[0] in (4, 5, 6), key
    return at + 4


def test_damaged_files_are_typed_errors_or_other_models(path, tmp_path):
    raw, bad = path.read_bytes(), tmp_path / "bad.gguf"
    keys = ["moonshine." + k for k in (
        "block_count", "decoder_block_count", "embedding_length", "feed_forward_length", "attention.head_count",
        "context_length", "vocab_size", "rope.dimension_count", "rope.freq_base")]
    keys += [f"tokenizer.ggml.{k}_token_id" for k in ("bos", "eos")]
    refused = set()
    for key in keys:
        at = number_at(raw, key)
        for value in (0, 3, 299, 2**31 - 1, 2**32 - 1):
            bad.write_bytes(raw[:at] + struct.pack("<I", value) + raw[at + 4:])
            try:
                with load_speech(bad, n_threads=1) as m:
                    assert np.isfinite(m.encode(noise(0.3))).all()
                    list(m.transcribe(noise(0.3), vad=False))
            except gg.GgjitError as e:
                assert "bad.gguf" in str(e)
                refused.add(key)
    assert refused == set(keys)
    for n in np.random.default_rng(SEED).integers(0, len(raw), 20):
        bad.write_bytes(raw[:n])
        with pytest.raises(gg.GgjitError, match="bad.gguf"):
            load_speech(bad)


@pytest.mark.parametrize("change", [{"attention_bias": True}, {"tie_word_embeddings": False},
                                    {"encoder_hidden_act": "relu"}, {"decoder_num_key_value_heads": 1}])
def test_folders_of_other_networks(change, tmp_path):
    folder = moonshine(tmp_path / "hf", save_safetensors)
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | change))
    with pytest.raises(gg.ModelError, match="config.json"):
        convert_folder(folder, tmp_path / "x.gguf", "F32", progress=False)
    assert not (tmp_path / "x.gguf").exists()


@pytest.mark.skipif(not (REAL / "config.json").is_file() or not JFK.is_file(), reason="no reference data: "
                    "GGJIT_MOONSHINE names no folder of Moonshine tiny, or there is no jfk.wav")
def test_a_real_recording(tmp_path):
    convert_folder(REAL, tmp_path / "f32.gguf", "F32", progress=False)
    quantize_gguf(tmp_path / "f32.gguf", tmp_path / "q8.gguf", "Q8_0", progress=False)
    sound, reference = open_sound(JFK), Reference(REAL)
    want = reference.encode(sound.read(0, sound.n_samples))
    with load_speech(tmp_path / "f32.gguf") as m:
        r = m.transcribe(JFK, vad=False)
        assert r.text == m.transcribe(JFK, beam=5, vad=False).text == JFK_TEXT
        assert relative(m.encode(JFK), want) < 1e-5
        tokens = [m.tokenizer.bos_id, *r.segments[0].tokens]
        assert nmse(m.logits(tokens), reference.decode(want, tokens)) < 1e-9
    with load_speech(tmp_path / "q8.gguf") as m:
        assert m.transcribe(JFK, vad=False).text == JFK_TEXT


def test_what_cannot_be_done(m, path):
    for options, message in (({"word_timestamps": True}, "word_timestamps = True: Moonshine has False only"),
                             ({"task": "translate"}, "Whisper"), ({"beam": 0}, "beam"),
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
