"""Sounds in: libmtmd's vectors and logits, sounds as tokens, messages with sounds, what does not belong together."""
import base64

import numpy as np
import pytest
from helpers import hearing_files as files
from helpers import vision_files
from helpers.llamacpp import computed
from helpers.requirements import shared

import ggjit as gg
from ggjit.models import load_model
from ggjit.models.text.picture_prompt import Heard, ids_with_pictures, without_pictures

# transformers' VoxtralEncoder of drawn("voxtral") for sound(0), then the two matrices with a GELU between
VOXTRAL = [[-1.8235, -0.3507, -0.1986, -0.3471, -0.1256], [-1.863, -0.2805, -0.1164, -0.3036, -0.1496],
           [-1.8001, -0.214, -0.0828, -0.3576, -0.3235]]


@pytest.fixture
def load(tmp_path):
    """Function that loads a small llama with a part that hears."""
    text = vision_files.write_text(shared("tools"), tmp_path / "text.gguf")

    def loaded(name="qwen2a", **options):
        mmproj = files.write(name, tmp_path / f"{name}.gguf")
        return load_model(text, n_threads=1, n_ctx=2048, kv_type="F32", vision=mmproj, **options)
    return loaded


@pytest.mark.peer
@pytest.mark.parametrize("name", ["ultravox", "qwen2a", "gemma4a"])
def test_against_libmtmd(name, tmp_path, need):
    """Vectors of every window, and the logits behind a prompt with a sound.  There, sound is rounded to F16."""
    need("xllamacpp", "llama.cpp is the oracle")
    want = computed("hearing_files", name, tmp_path, "vectors.npz")
    with load_model(tmp_path / "text.gguf", n_threads=1, n_ctx=1024, kv_type="F32", flash=False,
                    vision=tmp_path / "hearing.gguf") as m:
        assert m.vision is None
        for n in range(len(files.SECONDS)):
            got = m.encode_audio(files.sound(n, name))
            theirs = np.concatenate([want[k] for k in want if k[:2] == f"{n}."])
            assert got.shape == theirs.shape
            assert abs(got - theirs).max() <= 2e-3 * abs(theirs).max()
        got = m.decode(ids_with_pictures(m, files.PROMPT, [Heard(files.sound(0, name))]))
        assert abs(got - want["logits"]).max() <= 2e-3 * abs(want["logits"]).max()


def test_generate_and_chat_take_sounds(load, tmp_path):
    sound = files.sound(0)
    files.write_wav(tmp_path / "x.wav", sound)
    raw = (tmp_path / "x.wav").read_bytes()
    with load() as m:
        vectors = m.encode_audio(sound)
        assert vectors.shape == (750, files.TEXT)
        np.testing.assert_allclose(m.encode_audio(tmp_path / "x.wav"), vectors, atol=2e-2)
        assert (m.encode_audio(raw) == m.encode_audio(tmp_path / "x.wav")).all()
        g = m.generate("What is it?", n_predict=3, audio=[sound])
        assert g.text == m.generate("<__media__>What is it?", n_predict=3, audio=[sound]).text
        assert sum(i >= m.n_vocab for i in g.prompt_ids) == 750
        part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(raw).decode(), "format": "wav"}}
        p = m.chat_prompt([{"role": "user", "content": [part, {"type": "text", "text": "Hm?"}]}], template="chatml")
        ids = [i for i in p.ids if i >= m.n_vocab]
        assert len(ids) == 750 and m.tokenizer.encode("<|audio_bos|>", False, True)[0] in p.ids
        taken = {row.name for row in m.memory().rows if row.name.startswith("sound")}
        assert {"sound weights", "sound compute"} <= taken
        with pytest.raises(gg.NotSupported, match="reads no pictures without a part that sees"):
            m.generate("a", images=[np.zeros((4, 4, 3), np.uint8)])


def test_places_of_a_conformer(load):
    """A vector for 40 ms; windows of 30 s are heard apart, and what is less than a frame behind them is not."""
    with load("gemma4a") as m:
        for n_samples, n in ((1, 1), (321, 1), (3200, 5), (480000, 750), (480100, 750), (480000 + 3200, 755)):
            got = m.encode_audio(np.full(n_samples, 0.1, np.float32))
            assert got.shape == (n, files.TEXT) and np.isfinite(got).all()
        sound = files.sound(0)
        assert abs(m.encode_audio(sound)[:20] - m.encode_audio(sound[:16000])[:20]).max() < 1e-4
        assert m.hearing.pieces(sound)[::2] == ["<|audio>", "<audio|>"]


def test_windows_of_a_sound(load):
    """A sound of 30 s is one window; a sample more, two.  The last is filled up with silence."""
    with load("ultravox") as m:
        quiet = m.encode_audio(np.zeros(1, np.float32))
        assert quiet.shape == (375, files.TEXT) and np.isfinite(quiet).all()
        assert len(m.encode_audio(np.zeros(480000, np.float32))) == 375
        assert len(m.encode_audio(np.zeros(480160, np.float32))) == 750


def test_voxtral_is_that_of_transformers(load):
    with load("voxtral") as m:
        got = m.encode_audio(files.sound(0))
        assert got.shape == (375, files.TEXT)
        np.testing.assert_allclose(got[::125, :5], VOXTRAL, atol=2e-4)


def test_messages_with_sounds():
    data = base64.b64encode(b"x").decode()
    messages, found = without_pictures([{"role": "user", "content": [
        {"type": "text", "text": "a"}, {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "audio", "audio": "y.wav"}]}])
    assert messages[0]["content"] == "a<__media__><__media__>" and found == [Heard(b"x"), Heard("y.wav")]
    for part, message in (({"type": "input_audio", "input_audio": {"data": "!"}}, "is damaged"),
                          ({"type": "input_audio", "audio": "/etc/passwd"}, "is damaged"),
                          ({"type": "audio", "audio": "http://a/b.wav"}, "has no sound"),
                          ({"type": "audio"}, "has no sound")):
        with pytest.raises(gg.ParamError, match=message):
            without_pictures([{"role": "user", "content": [part]}])


def test_what_is_no_sound(load, tmp_path):
    with load() as m:
        for source, error, match in (("none.wav", gg.BadFile, "none.wav"), (b"no sound", gg.GgjitError, ""),
                                     (np.zeros((2, 3)), gg.ShapeError, "one row"), ([], gg.ParamError, "no samples"),
                                     ((np.zeros(9), 5), gg.ParamError, "sample_rate")):
            with pytest.raises(error, match=match):
                m.encode_audio(source)
        with pytest.raises(gg.ParamError, match="more than 3600"):
            m.encode_audio((np.zeros(3700 * 1000, np.float32), 1000))
    text = vision_files.write_text(shared("tools"), tmp_path / "t.gguf")
    with load_model(text, n_threads=1) as m, pytest.raises(gg.NotSupported, match="hears nothing alone"):
        m.encode_audio(files.sound(0))
    with pytest.raises(gg.NotSupported, match="projector 'glma' of sounds"):
        load_model(text, n_threads=1, vision=files.write("qwen2a", tmp_path / "g.gguf", projector="glma"))
    with pytest.raises(gg.ModelError, match="conv1d.1.weight' is missing"):
        load_model(text, n_threads=1, vision=files.write("qwen2a", tmp_path / "w.gguf", without=["a.conv1d.1.weight"]))
