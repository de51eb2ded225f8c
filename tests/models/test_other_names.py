"""Options, methods and calls of other libraries: taken where they mean the same, else told what to write; what is told
is run here."""
import math

import numpy as np
import pytest

import ggjit as gg
from ggjit.models import finetune, load_model, perplexity
from ggjit.models.core.other_options import FINETUNING, GENERATION, LOADING
from ggjit.models.networks.base.other_methods import OF_MODELS
from ggjit.models.networks.load import EMBEDDED
from ggjit.ops.core.user_warnings import forget_told


@pytest.fixture(scope="module")
def m():
    with load_model(n_threads=1, n_ctx=128) as m:
        yield m


def same(m, theirs, ours, n=6):
    prompt = "Elizabeth was"
    assert m.generate(prompt, **{"n_predict": n, **theirs}).text == m.generate(prompt, **{"n_predict": n, **ours}).text


# ---------------------------------------------------------------- options
@pytest.mark.parametrize(("theirs", "ours"), [
    ({"temperature": 0.7, "random_seed": 3}, {"temp": 0.7, "seed": 3}), ({"do_sample": False}, {"temp": 0}),
    ({"repetition_penalty": 1.5}, {"repeat_penalty": 1.5, "penalty_last_n": -1}),
    ({"stop_strings": ["e"]}, {"stop": ["e"]}), ({"stop_token_ids": [5]}, {"stop": [5]}), ({"stream": True}, {}),
    ({"num_beams": 1, "n": 1}, {}), ({"repeat_last_n": 4, "repeat_penalty": 1.2},
                                     {"penalty_last_n": 4, "repeat_penalty": 1.2}),
    ({"response_format": {"type": "text"}}, {})])
def test_options_of_others_mean_the_same(m, theirs, ours):
    same(m, theirs, ours)


@pytest.mark.parametrize("name", ["max_tokens", "max_new_tokens", "num_predict", "max_completion_tokens"])
def test_lengths_of_others(m, name):
    assert len(m.generate("It was", **{name: 3}).text and m.generate("It was", **{name: 3}).stats) and \
        m.generate("It was", **{name: 3}).answer.n_predict == 3
    with pytest.raises(gg.ParamError, match=f"{name} is n_predict, which is given, too"):
        m.generate("It was", 5, **{name: 3})


def test_top_logprobs(m):
    g = m.generate("It was", max_tokens=2, top_logprobs=3)
    assert g.text and all(len(t.alternatives) == 3 for t in g.tokens)


# what each refusal recommends, run
REFUSED = {
    "num_beams": (4, lambda m: m.generate("It", 2, temp=0, logprobs=5)),
    "early_stopping": (True, lambda m: m.generate("It", 2, temp=0)),
    "n": (3, lambda m: m.generate(["It"] * 3, 2, temp=0.8)),
    "max_length": (9, lambda m: m.generate("It", n_predict=64)),
    "min_length": (9, lambda m: m.generate("It", 2, ignore_eos=True)),
    "no_repeat_ngram_size": (2, lambda m: m.generate("It", 2, dry_multiplier=0.8, repeat_penalty=1.1)),
    "bad_words": (["x"], lambda m: m.generate("It", 2, logit_bias={5: -math.inf})),
    "output_scores": (True, lambda m: (m.generate("It", 2, logprobs=5), m.score("It was"))),
    "output_attentions": (True, lambda m: (m.hidden_states("It"), m.attention("It"), m.capture("embd", "It"))),
    "streamer": (print, lambda m: [piece for piece in m.generate("It", 2)]),
    "logits_processor": (print, lambda m: m.generate("It", 2, grammar='root ::= "x"', logit_bias={5: 1.0})),
    "skip_special_tokens": (False, lambda m: m.detokenize([5], special=True)),
    "tfs_z": (0.5, lambda m: m.generate("It", 2, top_p=0.9, min_p=0.1, typical_p=0.5)),
    "system": ("Be short.", lambda m: m.chat([{"role": "system", "content": "x"}, {"role": "user", "content": "y"}], 2,
                                             template="chatml")),
    "response_format": ({"type": "xml"}, lambda m: m.generate("It", 2, json_schema={})),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_what_works(m, name):
    value, instead = REFUSED[name]
    with pytest.raises(gg.ParamError, match=f"generate: {name}="):
        m.generate("It", **{name: value})
    assert instead(m) is not None


def test_unknown_options_say_what_was_meant(m):
    with pytest.raises(AttributeError, match="did you mean reshape"):
        gg.tensor([1.0]).reshpe(1)
    with pytest.raises(gg.ParamError, match="did you mean temperature"):
        m.generate("Hi", temprature=0.5)
    with pytest.raises(gg.ParamError, match="did you mean n_predict"):
        m.generate("It", n_predit=3)
    with pytest.raises(gg.ParamError, match="did you mean n_batch"):
        load_model(n_bach=3)
    with pytest.raises(gg.TypeMismatch, match="did you mean lora|did you mean rank|unexpected"):
        finetune(data="a", out="x.gguf", rnk=3)
    with pytest.raises(gg.TypeMismatch, match="did you mean top"):
        m.logit_lens("It was", topp=3)


def test_every_name_is_one_of_ours_or_none(m):
    import inspect

    from ggjit.models.networks.base.load_options import ARGUMENTS, KEYWORDS
    from ggjit.models.text.sampling import OPTIONS
    own = {"n_predict", "stop", "logprobs", "grammar", "json_schema", "template", "seed", *OPTIONS}
    probes = (1, "x", [1], True, {"type": "text"})

    def names(table):
        for take in table.values():
            for value in probes:
                try:
                    yield from take(value)
                except gg.ParamError:
                    pass
    assert set(names(GENERATION)) <= own
    assert set(names(LOADING)) <= {"path", *ARGUMENTS, *KEYWORDS}
    assert set(names(FINETUNING)) <= {*inspect.signature(finetune).parameters}


def test_load_model_takes_names_of_others():
    with load_model(num_ctx=64, num_threads=1, device="cpu", verbose=False, use_mmap=True) as m:
        assert m.n_ctx == 64 and m.backend.n_threads == 1
    for name, value, what in (("load_in_4bit", True, "ggjit quantize"), ("seed", 1, "m.generate"),
                              ("temperature", 1, "m.generate"), ("use_mlock", True, "repack=True"),
                              ("device_map", "auto", "n_gpu_layers")):
        with pytest.raises(gg.ParamError, match=what):
            load_model(**{name: value})
    load_model(n_ctx=64, repack=True).free()


# ---------------------------------------------------------------- text in place of ids, a model in place of a graph
def test_text_wherever_ids_are_taken(m):
    text = "Elizabeth was"
    ids = m.tokenize(text)
    np.testing.assert_array_equal(m.logits(text), m.logits(ids))
    np.testing.assert_array_equal(m.hidden(text), m.hidden(ids))
    m.reset()
    theirs = m.decode(text)
    m.reset()
    np.testing.assert_array_equal(theirs, m.decode(ids))
    assert m.score(text).logprob == m.score([ids])[0].logprob
    assert m("Elizabeth was", max_tokens=4).text == m.generate("Elizabeth was", 4).text
    with pytest.raises(gg.TypeMismatch, match=r"m.logits\(ids\)"):
        m(ids)


def test_empty_texts(m):
    for call in (lambda: m.logits(""), lambda: m.generate("", 2), lambda: m.hidden("")):
        if m.tokenize("") or m.tokenizer.bos_id is not None:
            assert call() is not None                       # the vocabulary's begin
        else:
            with pytest.raises(gg.ParamError, match="no tokens"):
                call()
    with pytest.raises(gg.ParamError, match="no tokens"):
        m.generate([])


def test_chat_takes_a_text(m):
    said = [{"role": "user", "content": "Hi"}]
    assert m.chat_prompt("Hi", template="chatml").ids == m.chat_prompt(said, template="chatml").ids


def test_a_model_where_a_graph_is(m):
    report = gg.measure(m)
    assert report.lower_bound == gg.measure(m.largest_graph()).lower_bound
    assert report.kinds["weights"] == m.weights.nbytes
    assert gg.explore(m).nbytes > 1000
    assert len(m.graph(32).nodes) == len(m.graph(4).nodes) and len(m.graph().nodes)
    for wrong in (0, 10 ** 9, "x"):
        with pytest.raises(gg.GgjitError):
            m.graph(wrong)
    with pytest.raises(gg.TypeMismatch, match=r"m\.graph\(32\)"):
        gg.Graph(m)


def test_perplexity_and_training_take_text_and_path(m, tmp_path):
    text = "It is a truth universally acknowledged. " * 40
    path = tmp_path / "a text.txt"
    path.write_text(text)
    of_text = perplexity(m, text, n_ctx=32, progress=False)
    assert perplexity(m, text, progress=False)["n_ctx"] == m.n_ctx < 512        # chunks of 512 do not fit into it
    assert all(of_text == perplexity(m, p, n_ctx=32, progress=False) for p in (path, str(path)))
    with pytest.raises(gg.BadFile, match="No such file"):
        perplexity(m, "missing.txt", n_ctx=32)
    one, two = tmp_path / "1.gguf", tmp_path / "2.gguf"
    more = {"n_ctx": 32, "max_steps": 1, "progress": False, "n_threads": 1}
    finetune(data=text, output_path=one, learning_rate=1e-3, **more)
    finetune(data=path, out=two, lr=1e-3, **more)
    assert one.read_bytes() == two.read_bytes()


# ---------------------------------------------------------------- weights and methods by name
def test_weights_by_name(m):
    w = m.weights["blk.0.attn_q.weight"]
    assert w.numpy().shape == w.shape and len(m.weights) == len(list(m.weights)) and "blk.0.attn_q.weight" in m.weights
    with pytest.raises(KeyError, match="did you mean blk.0.attn_q.weight"):
        m.weights["blk.0.attn_q.weigt"]
    assert "blk.0.attn_q.weight" in m.weights._repr_html_() and "weights" in repr(m.weights)


def test_methods_of_others_are_told(m):
    for name, instead in OF_MODELS.items():
        if not hasattr(m, name):
            with pytest.raises(AttributeError) as e:
                getattr(m, name)
            assert instead in str(e.value)
    with pytest.raises(AttributeError, match="did you mean generate"):
        _ = m.genrate
    assert not hasattr(m, "_nothing")


def test_a_model_in_a_cell(m):
    assert m.generate("It", 2).text
    page = m._repr_html_()
    for word in ("parameters", "layers", "context", "KV cache", "tokens/s", "token_embd.weight"):
        assert word in page
    assert len(repr(m.description)) < 300


# ---------------------------------------------------------------- warnings
def test_what_was_silent_is_told_once(m):
    forget_told()
    with pytest.warns(gg.GgjitWarning, match="temp=-1") as told:
        m.generate("It", 1, temp=-1)
        m.generate("It", 1, temp=-1)
    assert len(told) == 1 and told[0].filename == __file__
    with pytest.warns(gg.GgjitWarning, match="role 'asistant' .did you mean assistant"):
        m.chat_prompt([{"role": "asistant", "content": "Hi"}], template="chatml")
    w, x = gg.tensor(np.eye(3, dtype=np.float32)), gg.tensor(np.ones((3, 3), np.float32))
    with pytest.warns(gg.GgjitWarning, match="square") as told:
        gg.mul_mat(w, x)
        gg.mul_mat(x, w)
    assert len(told) == 1 and told[0].filename == __file__


# ---------------------------------------------------------------- devices
def test_devices_by_name():
    for devices, what in ((["CPU:n_threads=1", "NULL"], "n_threads=1"), (["NULL"], r"gg.measure\(m\)"),
                          ("CPU", "leave devices out"), (["nothing"], "no device 'nothing'"), (5, "list of devices")):
        with pytest.raises(gg.GgjitError, match=what):
            load_model(EMBEDDED, devices=devices)
