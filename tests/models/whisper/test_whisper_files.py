"""Whisper's files: quantised, damaged, of other programs, and the real model.

The real one is looked for in GGJIT_WHISPER, a folder with ggml-base.bin.
"""
import os
import pathlib
import struct

import numpy as np
import pytest
from helpers.cases import nmse
from helpers.paths import SHARED
from helpers.sounds import noise, relative
from helpers.whisper_folders import write_ct2, write_hf
from helpers.whisper_reference import (
    EOT,
    SIZES,
    Reference,
    random_tensors,
    token_bytes,
    write_bin,
)

from ggjit.models import convert_folder, load_speech, quantize_gguf
from ggjit.models.speech.tokens import LANGUAGES
from ggjit.ops.core.errors import BadFile, GgjitError, ModelError, ParamError, TypeMismatch

REAL = pathlib.Path(os.environ.get("GGJIT_WHISPER", "/nowhere")) / "ggml-base.bin"
JFK = SHARED / "data" / "silero-vad" / "jfk.wav"
real = pytest.mark.skipif(not REAL.is_file() or not JFK.is_file(), reason="no reference data: GGJIT_WHISPER "
                            "names no folder with ggml-base.bin, or there is no jfk.wav")


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
    with pytest.raises(ModelError, match="does not hear"):
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


# ---------------------------------------------------------------- folders
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
