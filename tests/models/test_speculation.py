"""Guesses change how fast a text comes, never the text."""
import types

import numpy as np
import pytest
from helpers import arch_files, tiny_model
from helpers.requirements import shared
from helpers.tiny_model import Words

import ggjit as gg
from ggjit.models import load_model
from ggjit.models.text import speculation
from ggjit.models.text.speculation import ALLOWED, DraftModel, Lookup, Speculation


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("guess") / "m.gguf", metadata={"context_length": 1024})


def loaded(path, **options):
    m = load_model(path, **{"n_threads": 1, "reserve": False, "n_ctx": 512, **options})
    m._tokenizer = Words()
    return m


class Guesser:
    """Guesses `share` of the tokens of a known text right."""

    def __init__(self, text, share, rng):
        self.text, self.share, self.rng = text, share, rng

    def guess(self, ids, n):
        right = self.text[len(ids):len(ids) + n]
        return [t if self.rng.random() < self.share else (t + 1) % 40 for t in right]


def generated(m, prompt, n, **options):
    g = m.generate(prompt, n, cache_prompt=False, **options)
    list(g)
    return g.stats["tokens"], g


def test_lookup_finds_the_latest_place():
    found = Lookup()
    assert found.guess([1, 2], 4) == [] and found.guess([1, 2, 3, 9, 8, 1, 2, 3], 2) == [9, 8]
    assert found.guess([1, 2, 3, 9, 8, 1, 2, 3, 7, 1, 2, 3], 3) == [7, 1, 2]
    assert found.guess([5] * 20, 16) == [5]             # what follows is the end of the text itself
    rng = np.random.default_rng()
    ids, found = [], Lookup()
    for id in rng.integers(0, 3, 200).tolist():
        ids.append(id)
        at = next((i for i in range(len(ids) - 1, 2, -1) if ids[i - 3:i] == ids[-3:]), None)
        assert found.guess(list(ids), 5) == ([] if at is None or len(ids) < 3 else ids[at:at + 5])


@pytest.mark.parametrize("options", [{}, {"temp": 1.0, "seed": 3}, {"temp": 0.9, "seed": 1, "repeat_penalty": 1.3},
                                     {"stop": [7]}, {"logprobs": 2}, {"n_predict": 1}, {"temp": 1.5, "seed": 9}])
@pytest.mark.parametrize("type", ["F32", "Q8_0"])
def test_the_text_is_that_of_plain_decoding(type, options, tmp_path, monkeypatch):
    rng = np.random.default_rng()
    path = tiny_model.write(tmp_path / "m.gguf", type=type, metadata={"context_length": 1024})
    with loaded(path) as m, loaded(path) as draft:
        m._tokenizer.n_vocab = m.n_vocab
        monkeypatch.setattr(Words, "encode", lambda *a, **k: [], raising=False)
        monkeypatch.setattr(Words, "piece", lambda s, id, special=False: str(id).encode(), raising=False)
        prompt = rng.integers(0, 40, 30).tolist() * 2
        n = options.get("n_predict", 100)
        options = {k: v for k, v in options.items() if k != "n_predict"}
        want, plain = generated(m, prompt, n, **options)
        monkeypatch.setattr(speculation, "ALLOWED", 1e9)
        for speculative in ("lookup", draft):
            got, g = generated(m, prompt, n, **options, speculative=speculative)
            assert got == want and g.stats["stop_reason"] == plain.stats["stop_reason"]
            assert [t.logprob for t in g.tokens] == [t.logprob for t in plain.tokens]
            assert m.n_past == len(prompt) + len(want) - 1 and m.text.ids == prompt + want[:-1]
            assert g.stats["accepted_tokens"] <= g.stats["drafted_tokens"]
        if n > 1 and not options.get("stop"):
            assert g.stats["accepted_tokens"] > 0               # the draft model is the model


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 1.0])
def test_guesses_of_any_quality(path, share, monkeypatch):
    rng = np.random.default_rng()
    monkeypatch.setattr(speculation, "ALLOWED", 1e9)
    with loaded(path) as m:
        prompt = rng.integers(0, 40, 9).tolist()
        want = generated(m, prompt, 120)[0]
        monkeypatch.setattr(speculation, "Lookup", lambda: Guesser(prompt + want, share, rng))
        got, g = generated(m, prompt, 120, speculative="lookup")
        assert got == want and g.stats["drafted_tokens"] > 0
        assert share not in (0.0, 1.0) or g.stats["accepted_tokens"] == share * g.stats["drafted_tokens"]
        # another call uses the model in between; the end of the context
        for use in (lambda: m.logits([1, 2]), lambda: list(m.generate([3, 4], 3))):
            g = m.generate(prompt, 120, speculative="lookup")
            for _ in range(20):
                next(g)
            use()
            list(g)
            assert g.stats["tokens"] == want
        full = generated(m, prompt, -1)[1]
        guessed = generated(m, prompt, -1, speculative="lookup")[1]
        assert guessed.stats["tokens"] == full.stats["tokens"] and guessed.stats["stop_reason"] == "context"


def test_a_shifted_context_and_windows(path, tmp_path):
    arch_files.write(shared("tools"), "gemma3", tmp_path / "g.gguf")
    for file, options in ((path, {"context_shift": True, "n_keep": 4}), (tmp_path / "g.gguf", {})):
        with loaded(file, n_ctx=64) as m:
            prompt = [5, 6, 7] * 5
            want = generated(m, prompt, 100 if options else 40, **options)[0]
            assert generated(m, prompt, 100 if options else 40, **options, speculative="lookup")[0] == want


def test_sampling_keeps_the_distribution(path, monkeypatch):
    """Second tokens of many texts, plain, and guessed right half the time: the same counts, with other seeds."""
    rng = np.random.default_rng()
    monkeypatch.setattr(speculation, "N_PLAIN", 0)
    monkeypatch.setattr(speculation, "ALLOWED", 1e9)
    monkeypatch.setattr(Speculation, "settle", lambda s: None)
    with loaded(path) as m:
        prompt, counts = [1, 2, 3], {}
        likely = generated(m, prompt, 8)[0]
        monkeypatch.setattr(speculation, "Lookup", lambda: Guesser(prompt + likely, 0.5, rng))
        for speculative in (None, "lookup"):
            found = [generated(m, prompt, 3, temp=1.0, top_k=4, speculative=speculative)[0][1] for _ in range(1500)]
            counts[speculative] = np.bincount(found, minlength=m.n_vocab)
        a, b = counts[None], counts["lookup"]
        seen = a + b > 10
        chi2 = ((a - b)[seen] ** 2 / (a + b)[seen]).sum()
        assert chi2 < seen.sum() + 6 * np.sqrt(2 * seen.sum()), (a[seen], b[seen])


# ---------------------------------------------------------------- the account
def account(seconds_of_width, share, n=200, one=1.0):
    """(seconds with guesses over plain ones, tokens until guessing ended) of a text, by figures alone."""
    rng = np.random.default_rng()
    s, ids, spent, off = Speculation(Guesser(list(range(1000)), share, rng)), [0], 0.0, None
    s.guesser.guess = lambda ids, k: [int(rng.random() < share) for _ in range(k)]
    while len(ids) < n:
        guesses, _ = s.guess(ids, n - len(ids))
        if not guesses:
            s.settle()
            s.was_plain(one)
            spent, ids = spent + one, [*ids, 0]
            off = len(ids) if off is None and not s.is_on else off
            continue
        cost = seconds_of_width(len(guesses) + 1) * one
        s.begin(len(guesses), cost)
        right = next((i for i, g in enumerate(guesses) if not g), len(guesses))
        for _ in range(right):
            s.accept()
        spent, ids = spent + cost, ids + [0] * (right + 1)
    return spent / ((len(ids) - 1) * one), off


def test_guessing_ends_where_it_does_not_pay():
    measured = {1: 1.0, 2: 1.04, 4: 1.7, 8: 2.8, 16: 5.3}               # SmolLM2-135M
    for _ in range(20):
        ratio, off = account(measured.get, 0.0)
        assert off is not None and off <= 64 and ratio < 1 / 0.97
        assert account(measured.get, 0.95)[0] < 0.65 and account(measured.get, 1.0)[0] < 0.4
        assert account(lambda w: float(w), 0.5)[1] <= 64                # as slow as one after the other
        assert all(account(measured.get, share)[0] < 1 / 0.97 for share in (0.1, 0.2, 0.3, 0.5, 0.7))
    assert ALLOWED <= 0.03 * 64


def test_bad_settings(path, tmp_path):
    other = tiny_model.write(tmp_path / "other.gguf", shapes={"token_embd.weight": (50, 64)})
    arch_files.write(shared("tools"), "mamba", tmp_path / "mamba.gguf")
    with loaded(path) as m, loaded(other, n_ctx=64) as small, loaded(tmp_path / "mamba.gguf", n_ctx=64) as mamba:
        for bad, error, words in (("look", gg.ParamError, "expected .lookup., .mtp., a loaded draft model"),
                                  (True, gg.ParamError, "speculative is True"), (7, gg.TypeMismatch, "got int"),
                                  (m, gg.ParamError, "the model itself"), (small, gg.ParamError, "another vocabulary")):
            with pytest.raises(error, match=words):
                m.generate([1, 2], 4, speculative=bad)
        with pytest.raises(gg.NotSupported, match="layers with states"):
            mamba.generate([1, 2], 4, speculative="lookup")
        with pytest.raises(gg.ParamError, match="one prompt at a time"):
            m.generate([[1], [2]], 4, speculative="lookup")
        with pytest.raises(gg.NotSupported, match="recurrent layers"):
            mamba.decode([1, 2, 3])
            mamba.cut_text(1)
        assert isinstance(speculation.guesser_of(m, types.SimpleNamespace(
            keep_prefix=None, file=m.file, n_vocab=m.n_vocab)), DraftModel)
