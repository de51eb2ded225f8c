"""Whisper: spectrograms, the network against float64, the rules of tokens, what is inside."""

import numpy as np
import pytest
from helpers.cases import nmse
from helpers.sounds import RATE, noise, relative
from helpers.whisper_reference import (
    BEGIN,
    EOT,
    NO_SPEECH,
    SIZES,
    SOT,
    Reference,
    allowed,
    softmax,
)

from ggjit.models import load_speech
from ggjit.models.files.sound import with_samples
from ggjit.models.speech.decoding import TextBatch, TokenRules, beam_search, decode
from ggjit.models.speech.tokens import gpt2_words
from ggjit.ops.core.errors import GgjitError, ParamError

PROMPT = [SOT, SOT + 1, 50359]


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
    with pytest.raises(ParamError, match="does not know the language 'klingon'"):
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
