"""Texts whose tokens are decided in any order: schedules, what is decided first, guidance, options that do not fit."""
import numpy as np
import pytest
from helpers import tiny_model

import ggjit as gg
from ggjit.models import load_gguf, load_model, save_gguf
from ggjit.models.text.diffusion import equal_parts, probabilities, shares

MASK, VOCAB = 5, tiny_model.VOCAB


def write(path, arch="llada", **metadata):
    tiny_model.write(path, arch=arch)
    tensors, found = load_gguf(path)
    save_gguf(path, tensors, {**found, "tokenizer.ggml.mask_token_id": MASK, **metadata})
    return path


@pytest.fixture
def model(tmp_path):
    with load_model(write(tmp_path / "m.gguf", **{"diffusion.shift_logits": False}), n_threads=1) as m:
        m._tokenizer = tiny_model.Words()
        yield m


def give(monkeypatch, model, logits):
    """Let the model's logits be those of a function of the ids."""
    monkeypatch.setattr(model, "logits_at", lambda ids, rows: logits(ids)[rows])


def sure_of(order):
    """Logits [n, VOCAB] by which position `order[0]` is the surest, of token 10 + its number, and so on."""
    a = np.zeros((len(order) + 2, VOCAB), np.float32)
    for rank, at in enumerate(order):
        a[at + 2, 10 + at] = 9.0 - rank
    return a


def test_shares_are_those_of_the_schedule():
    """Of llama.cpp's calculate_transfer_count: t = 1 - k / n (1 - eps), 1 - t'/t, and all at last."""
    for n, eps in ((1, 1e-3), (7, 1e-3), (16, 0.2)):
        t = [1 - k / n * (1 - eps) for k in range(n + 1)]
        np.testing.assert_allclose(shares(n, eps), [1 - t[k + 1] / t[k] if k < n - 1 else 1 for k in range(n)])
    assert equal_parts(7, 3) == [3, 2, 2] and equal_parts(2, 4) == [1, 1, 0, 0]


def test_probabilities_are_those_of_what_the_filters_leave():
    logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05], [0.05, 0.15, 0.3, 0.5]], np.float32))
    np.testing.assert_allclose(probabilities(logits, 0.0, 0, 1.0), np.exp(logits), atol=1e-6)
    np.testing.assert_allclose(probabilities(logits, 0.0, 2, 1.0)[0], [0.625, 0.375, 0, 0], atol=1e-6)
    np.testing.assert_allclose(probabilities(logits, 1.0, 0, 0.7)[1], [0, 0, 0.375, 0.625], atol=1e-6)
    np.testing.assert_allclose(probabilities(logits, 0.5, 0, 1.0)[0], np.square([0.5, 0.3, 0.15, 0.05]) / 0.365,
                               atol=1e-6)
    assert (probabilities(logits, 1.0, 0, 1e-9) > 0).sum() == 2             # the likeliest token always stays


@pytest.mark.parametrize("algorithm", ["confidence", "margin", "entropy"])
def test_the_surest_tokens_are_decided_first(algorithm, model, monkeypatch):
    order, seen = [2, 0, 3, 1], []

    def logits(ids):
        seen.append([int(i) for i in np.flatnonzero(np.array(ids)[2:] != MASK)])
        return sure_of(order)
    give(monkeypatch, model, logits)
    g = model.generate([1, 2], n_predict=4, algorithm=algorithm, block_length=4)
    pieces = list(g)
    assert seen == [[], [2], [0, 2], [0, 2, 3]] and g.stats["steps"] == 4
    assert pieces == ["10 ", "11 ", "12 ", "13 "] and g.text == "".join(pieces)
    assert g.ids.tolist() == [1, 2, 10, 11, 12, 13] and g.stats["stop_reason"] == "length"


def test_blocks_come_one_after_the_other(model, monkeypatch):
    """As many tokens at each step: 4 steps for 2 blocks of 3 and one of 1."""
    seen = []
    give(monkeypatch, model, lambda ids: seen.append([int(i) for i in np.flatnonzero(ids[2:] != MASK)])
                        or sure_of([6, 5, 4, 3, 2, 1, 0]))
    g = model.generate([1, 2], n_predict=7, steps=4, block_length=3)
    assert g.text == "10 11 12 13 14 15 16 "
    assert seen == [[], [1, 2], [0, 1, 2], [0, 1, 2, 3, 4, 5]]


def test_every_time_step_decides_its_share(model, monkeypatch):
    counts = []
    give(monkeypatch, model, lambda ids: counts.append(int((ids == MASK).sum())) or sure_of(range(30)))
    assert len(model.generate([1, 2], n_predict=30, steps=5, eps=1e-3, stop=[]).text.split()) == 30
    left = [30]
    for share in shares(5, 1e-3):
        left.append(left[-1] - int(left[-1] * share))
    assert counts == left[:-1] and left[-1] == 0


def test_logits_may_be_those_of_the_token_before(tmp_path, monkeypatch):
    """As of models made from decoders, where the file does not say otherwise."""
    with load_model(write(tmp_path / "m.gguf", arch="dream"), n_threads=1) as m:
        m._tokenizer = tiny_model.Words()
        give(monkeypatch, m, lambda ids: np.roll(sure_of([0, 1, 2]), -1, axis=0))
        assert m.generate([1, 2], n_predict=3).text == "10 11 12 "


def test_guidance_takes_what_the_prompt_changes(model, monkeypatch):
    """u + (s + 1) (l - u), u where masks stand for the prompt."""
    given = []

    def logits(ids):
        given.append(list(map(int, ids)))
        a = np.zeros((4, VOCAB), np.float32)
        a[:, 10] = 1.0
        a[:, 11] = 0.8 if ids[0] == MASK else 0.95
        return a
    give(monkeypatch, model, logits)
    assert model.generate([1, 2], n_predict=2, steps=1, block_length=2).text == "10 10 "
    assert model.generate([1, 2], n_predict=2, steps=1, block_length=2, cfg_scale=0.5).text == "11 11 "
    assert given[1:] == [[1, 2, MASK, MASK], [MASK] * 4]


def test_tokens_are_drawn_by_their_probabilities(model, monkeypatch):
    p = np.full(VOCAB, 1e-9)
    p[[10, 11, 12]] = 0.6, 0.3, 0.1
    give(monkeypatch, model, lambda ids: np.tile(np.log(p), (len(ids), 1)).astype(np.float32))
    for algorithm in ("origin", "random", "confidence"):
        runs = [model.generate([1, 2], n_predict=20, steps=1, eps=0.1, temp=1.0, top_k=0, top_p=1.0,
                               algorithm=algorithm, seed=seed) for seed in range(60)]
        ids = np.concatenate([run.ids[2:] for run in runs if run.text])
        counts = np.bincount(ids, minlength=VOCAB)[[10, 11, 12]] / len(ids)
        assert abs(counts - [0.6, 0.3, 0.1]).max() < 0.06, algorithm
    first, second = (model.generate([1, 2], n_predict=20, temp=1.0, seed=7).text for _ in range(2))
    assert first == second


def test_alg_temp_draws_what_is_decided(model, monkeypatch):
    """At 0 the surest alone; at a high one all alike."""
    give(monkeypatch, model, lambda ids: sure_of([2, 0, 3, 1]))

    def first(alg_temp, seed):
        g = model.generate([1, 2], n_predict=4, block_length=4, alg_temp=alg_temp, seed=seed)
        parts, g._parts = g._parts, [(0, 4, [1])]
        list(g)
        assert parts == [(0, 4, [1, 1, 1, 1])]
        return int(np.flatnonzero(g.ids[2:] != MASK)[0])
    assert {first(0.0, seed) for seed in range(5)} == {2}
    counts = np.bincount([first(1e6, seed) for seed in range(200)], minlength=4)
    assert counts.min() > 25


def test_a_text_ends_where_it_says_so(model, monkeypatch):
    """Steps that would decide what comes behind its end are not computed."""
    for name, value in (("n_vocab", VOCAB), ("encode", lambda *a, **k: []), ("piece", lambda i, **k: str(i).encode())):
        monkeypatch.setattr(model._tokenizer, name, value, raising=False)
    give(monkeypatch, model, lambda ids: sure_of([0, 1, 2, 3]))
    g = model.generate([1, 2], n_predict=4, block_length=4, stop=["12 "])
    assert g.text == "10 11 " and g.stats["stop_reason"] == "stop_string" and g.stats["steps"] == 3
    monkeypatch.setattr(model._tokenizer, "stop_ids", (11,), raising=False)
    g = model.generate([1, 2], n_predict=4, block_length=4)
    assert g.text == "10 " and g.stats["stop_reason"] == "stop_token" and [t.id for t in g.tokens] == [10, 11]
    assert "11" not in model.generate([1, 2], n_predict=4, block_length=4, ignore_eos=True).text.split()


@pytest.mark.parametrize("arch", ["llada", "dream"])
def test_a_small_model_writes(arch, tmp_path):
    """Every token is the likeliest where it was decided; the text so far is what the steps see."""
    with load_model(write(tmp_path / "m.gguf", arch=arch), n_threads=1) as m:
        m._tokenizer = tiny_model.Words()
        g = m.generate([3, 4, 6], n_predict=6)
        ids, at = np.array([3, 4, 6] + [MASK] * 6), None
        while MASK in ids:
            masks = np.flatnonzero(ids == MASK)
            if arch == "dream" and at is None:
                at = 1                                  # 6 (1 - t'/t) is below 1 at the first step
            logits = m.logits(ids)[masks - 1].astype(np.float64)
            logits[:, MASK] = -np.inf
            p = np.exp(logits - logits.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            sure = int(p.max(1).argmax())
            if arch == "dream":
                n = int(len(masks) * shares(6, 1e-3)[at]) if at < 6 else 0
                at += 1
                kept = np.argsort(-p.max(1), kind="stable")[:n]
            else:
                kept = [sure]
            ids[masks[kept]] = p.argmax(1)[kept]
        assert g.text and g.ids.tolist() == ids.tolist()
        assert m.hidden([3, 4]).shape == (2, tiny_model.DIM) and m.logits([3, 4]).shape == (2, VOCAB)


def test_logits_of_some_tokens_are_those_of_all(tmp_path):
    """Rows are padded up to a power of two; a step computes those of its masks alone."""
    with load_model(write(tmp_path / "m.gguf"), n_threads=1) as m:
        m._tokenizer, ids = tiny_model.Words(), np.arange(9)
        want = m.logits(ids)
        for rows in ([7], [1, 8, 0], [5, 6, 2, 2, 8, 0], range(9)):
            np.testing.assert_allclose(m.logits_at(ids, rows), want[list(rows)], atol=1e-4)
        list(m.generate([3, 4, 6], n_predict=6, block_length=2))
        assert {shape[2] for shape in m._steps._kept if shape[1:2] == ("logits",)} == {1, 2, 4, 8, 9}


def test_a_prompt_without_room_for_an_answer(model):
    with pytest.raises(gg.ParamError, match="64 tokens, as many as the context.*shorten it$"):
        model.generate([1] * 64)
    with pytest.raises(gg.ParamError, match="65 tokens do not fit the context of 64; shorten the text$"):
        model.generate([1] * 65)


@pytest.mark.parametrize(("options", "error", "words"), [
    ({"grammar": "root ::= [a-z]"}, gg.NotSupported, "write all tokens at once.*grammar"),
    ({"speculative": "lookup"}, gg.NotSupported, "speculative"), ({"logprobs": 3}, gg.NotSupported, "logprobs"),
    ({"logprobs": 0}, gg.NotSupported, "logprobs"), ({"repeat_penalty": 1.1}, gg.NotSupported, "repeat_penalty"),
    ({"images": np.zeros((4, 4, 3), np.uint8)}, gg.NotSupported, "images"), ({"min_p": 0.1}, gg.NotSupported, "min_p"),
    ({"context_shift": True}, gg.NotSupported, "context_shift"),
    ({"stepz": 3}, gg.ParamError, "stepz"), ({"n_predict": 0}, gg.ParamError, "n_predict must be .* from 1 to 62"),
    ({"n_predict": 63}, gg.ParamError, "from 1 to 62.*all tokens are written at once"),
    ({"steps": 0}, gg.ParamError, "steps must be"), ({"algorithm": "best"}, gg.ParamError, "algorithm must be one of"),
    ({"eps": 0.1, "block_length": 4}, gg.ParamError, "two schedules"), ({"eps": 1.0}, gg.ParamError, "below 1"),
    ({"block_length": 2, "n_predict": 9, "steps": 4}, gg.ParamError, "one for each of the 5 blocks"),
    ({"alg_temp": -1.0}, gg.ParamError, "alg_temp"), ({"cfg_scale": float("nan")}, gg.ParamError, "cfg_scale"),
    ({"top_p": 2.0}, gg.ParamError, "top_p")])
def test_options_that_do_not_fit_are_refused(options, error, words, model):
    with pytest.raises(error, match=words):
        model.generate([1, 2], **{"n_predict": 8, **options})


def test_options_of_decoders_that_ask_for_nothing_are_taken(model, monkeypatch):
    give(monkeypatch, model, lambda ids: sure_of(range(len(ids) - 2)) if len(ids) < 35 else sure_of(
        [*range(30), *[29] * 32]))
    g = model.generate([1, 2], -1, context_shift=False, n_keep=0, logprobs=None, speculative=None, images=[],
                       cache_prompt=True, steps=2, repetition_penalty=1.0, min_p=0, presence_penalty=0.0, typical_p=1,
                       logit_bias={}, mirostat=0, mirostat_tau=3.0)
    assert len(g.text.split()) == 62


def test_what_such_a_model_cannot_do_is_said(model, tmp_path):
    with pytest.raises(gg.NotSupported, match="do not predict the next token"):
        model.score("a")
    with pytest.raises(gg.NotSupported, match="pooling"):
        model.embed_ids([1, 2])
    with pytest.raises(gg.TypeMismatch, match="bytes"):
        model.generate(b"a")
    tiny_model.write(tmp_path / "n.gguf", arch="llada")
    with load_model(tmp_path / "n.gguf", n_threads=1) as m, pytest.raises(gg.ModelError, match="mask_token_id is None"):
        m.generate([1, 2], n_predict=8)
