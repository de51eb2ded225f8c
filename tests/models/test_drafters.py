"""Draft models that read values of their target's layers: their guesses are llama.cpp's, the text is the target's."""
import numpy as np
import pytest
from helpers import draft_files
from helpers.llamacpp import computed
from helpers.requirements import shared
from helpers.sample import sampled
from helpers.speculated import text_is_that_of_plain_decoding
from helpers.tiny_model import loaded

import ggjit as gg
from ggjit.models import load_gguf, load_model, save_gguf
from ggjit.models.text import speculation

NAMES = sorted(draft_files.FILES)
ONE_OF_A_KIND = sampled([(name,) for name in NAMES], lambda case: [case[0].partition("-")[0]])


@pytest.fixture
def pair(tmp_path):
    """pair(name): a target and its draft model, loaded."""
    opened = []

    def made(name, **options):
        target, draft = draft_files.write(shared("tools"), name, tmp_path)
        opened.extend([loaded(target, **options), load_model(draft, n_threads=1)])
        return opened[-2:]
    yield made
    for m in opened:
        m.free()


@pytest.mark.peer
@pytest.mark.parametrize("name", ONE_OF_A_KIND)
def test_guesses_are_those_of_llamacpp(name, tmp_path, need):
    """Up to a guess that was hardly likelier than the next."""
    need("xllamacpp", "llama.cpp is the oracle")
    want = computed("draft_files", name, tmp_path, "drafts.npz")
    ids, n_same = want["ids"].tolist(), 0
    with loaded(tmp_path / "target.gguf") as m, load_model(tmp_path / "draft.gguf", n_threads=1) as draft:
        guesser = draft.guesses_for(m)
        use = speculation.Speculation(guesser)                  # states are kept while it guesses
        for n, found, margins in zip(range(draft_files.FIRST, len(ids) + 1), want["found"], want["margins"],
                                     strict=True):
            m.keep_prefix(ids[:n])
            m.decode(ids[m.n_past:n - 1])
            sure = int(np.argmax([*(margins < 2e-3), True]))
            assert guesser.guess(ids[:n], draft_files.N)[:sure] == found[:sure].tolist()
            n_same += sure
    assert n_same > 40 and use.is_on


@pytest.mark.parametrize("options", [{}, {"temp": 1.0, "seed": 3}])
@pytest.mark.parametrize("name", ONE_OF_A_KIND)
def test_the_text_is_that_of_plain_decoding(name, options, pair, monkeypatch):
    monkeypatch.setattr(speculation, "ALLOWED", 1e9)
    text_is_that_of_plain_decoding(*pair(name), **options)


def test_another_target_is_refused(pair, tmp_path):
    m, draft = pair("eagle3")
    for alone in (lambda: draft.generate("text"), lambda: draft.logits([1]), lambda: gg.measure(draft)):
        with pytest.raises(gg.NotSupported, match="guesses for another model"):
            alone()
    assert draft.description.layers == (1, 2, 3)
    tensors, metadata = load_gguf(draft.file.path)
    arrays = {n: t.numpy().copy() for n, t in tensors.items()}
    for change, error, words in (
            ({"eagle3.target_layers": np.array([1, 2, 9], np.int32)}, gg.ParamError, "9 layers or more"),
            ({"eagle3.vocab_size": 95}, gg.ModelError, r"output.weight' has shape \[64, 96\]"),
            ({"eagle3.target_layers": np.array([1, 2], np.int32)}, gg.ModelError, "three layers")):
        save_gguf(tmp_path / "other.gguf", arrays, metadata | change)
        with pytest.raises(error, match=words), load_model(tmp_path / "other.gguf", n_threads=1) as other:
            m.generate([1, 2], speculative=other)
    arrays["blk.0.more.weight"] = arrays["output_norm.weight"]
    save_gguf(tmp_path / "other.gguf", arrays, metadata)
    with pytest.raises(gg.ModelError, match=r"does not use tensor 'blk.0.more.weight'"):
        load_model(tmp_path / "other.gguf", n_threads=1)


def test_drafters_come_and_go(pair, monkeypatch):
    """The next one takes over; a freed one leaves the model as it was."""
    monkeypatch.setattr(speculation, "ALLOWED", 1e9)
    m, draft = pair("eagle3")
    want = m.generate([5, 6, 7], 20, cache_prompt=False)
    list(want)
    with load_model(draft.file.path, n_threads=1) as other:
        for speculative in (draft, other, draft, "lookup"):
            g = m.generate([5, 6, 7], 20, speculative=speculative)
            list(g)
            assert g.stats["tokens"] == want.stats["tokens"]
        assert m.predictor.drafter is draft
        g = m.generate([5, 6, 7], 20, speculative=draft)
        for _ in range(8):
            next(g)
        list(m.generate([9, 8], 20, speculative=other))             # takes the place of the open text's guesser
        list(g)
        assert g.stats["tokens"] == want.stats["tokens"]
        list(m.generate([5, 6, 7], 5, speculative=draft))
        draft.free()
        assert m.predictor is None
        g = m.generate([5, 6, 7], 20, speculative=other)
        list(g)
        assert g.stats["tokens"] == want.stats["tokens"] and m.predictor.drafter is other
