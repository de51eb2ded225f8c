"""A generated text in a notebook cell, what opens in it, gradients by what was read, caches by head, completion."""
import asyncio
import inspect
import re
import sys

import numpy as np
import pytest

import ggjit as gg
from ggjit.models import load_model, quantize_gguf
from ggjit.models.networks.load import EMBEDDED

TEXT = "Elizabeth was a very"


@pytest.fixture(scope="module")
def m():
    with load_model(n_threads=1, n_ctx=128) as m:
        yield m


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """The small model in F32, with an F32 cache: rounding does not change log-probabilities."""
    path = tmp_path_factory.mktemp("model") / "f32.gguf"
    quantize_gguf(EMBEDDED, path, "F32", requantize=True, progress=False)
    with load_model(path, n_threads=1, n_ctx=128, kv_type="F32") as m:
        yield m


# ---------------------------------------------------------------- the cell
def test_every_token_opens_and_no_scripts_are_needed(m):
    g = m.generate(TEXT, n_predict=5, logprobs=3)
    page = g._repr_html_()
    names = re.findall(r"id='(ggjit-\w+-\d+)'", page)
    assert len(names) == len(g.tokens) and "<script" not in page
    for name, token in zip(names, g.tokens, strict=True):
        assert f"label for='{name}'" in page and f"#{name}:checked~.{name}" in page
        assert repr(token.alternatives[0].text)[1:-1].replace("'", "&#x27;") in page
    assert names != re.findall(r"id='(ggjit-\w+-\d+)'", g._repr_html_())         # two cells do not share buttons
    assert "radio" not in m.generate(TEXT, n_predict=3)._repr_html_()            # without alternatives nothing opens


def test_a_cell_grows_while_it_is_generated(m, monkeypatch):
    class ZMQInteractiveShell:
        pass
    IPython = pytest.importorskip("IPython")
    shown = []

    class Page:
        def update(self, data, raw):
            shown.append(data)

    def display(data, raw, display_id):
        shown.append(data)
        return Page()
    monkeypatch.setattr(IPython, "get_ipython", ZMQInteractiveShell)
    monkeypatch.setattr(sys.modules["IPython.display"], "display", display)
    monkeypatch.setattr("ggjit.models.text.generation.REDRAW_SECONDS", 0)
    g = m.generate(TEXT, n_predict=5, logprobs=2)
    g._ipython_display_()
    assert len(shown) >= 4 and "5 of 5 generated" in shown[-1]["text/plain"]
    sizes = [len(re.findall("<label", data["text/html"])) for data in shown]
    assert sizes == sorted(sizes) and sizes[-1] == 5
    assert "".join(g) == g.text                                                  # the pieces still come out
    monkeypatch.setattr(IPython, "get_ipython", lambda: None)
    with pytest.raises(NotImplementedError):
        g._ipython_display_()


def test_tokens_of_a_text_that_was_not_begun_are_all_of_it(m):
    whole = m.generate(TEXT, n_predict=6, temp=0)
    assert "".join(t.text for t in whole.tokens) == whole.text and len(whole.tokens) == 6
    begun = m.generate(TEXT, n_predict=6, temp=0)
    assert next(begun) and len(begun.tokens) < 6
    assert list(whole) == list(m.generate(TEXT, n_predict=6, temp=0))                   # nothing is lost by looking


def test_a_text_without_blocking_the_event_loop(m):
    async def read():
        return [piece async for piece in m.generate(TEXT, n_predict=6, temp=0)]
    assert asyncio.run(read()) == list(m.generate(TEXT, n_predict=6, temp=0))


def test_what_is_written_of_a_text_by_habit(m):
    g = m.generate(TEXT, n_predict=2)
    with pytest.raises(TypeError, match=r"g.text\[0\] is of the text, g.tokens\[0\] of its tokens"):
        g[0]
    with pytest.raises(AttributeError, match="no attribute 'split'; write g.text.split"):
        g.split()
    with pytest.raises(TypeError, match=r"m.weights\['blk.0.attn_q.weight'\] is a weight"):
        m["blk.0.attn_q.weight"]


def test_the_insides_of_a_text(m):
    g = m.generate(TEXT, n_predict=4, logprobs=2)
    inside = g.inside()
    n = len(m.tokenize(TEXT))
    assert inside.norms.shape == (m.n_layer + 1, n + 3)
    page = inside._repr_html_()
    assert page.count("looked at:") == 4 and page.count("after layer") == 4
    words = [inside.lens.words[-1][n - 1 + k][0] for k in range(4)]
    assert words == [m.tokenizer.decode([t.id]) for t in g.tokens]               # greedy: the last layer said it


# ---------------------------------------------------------------- gradients
def test_attribution_is_the_gradient(exact):
    m = exact
    a = m.attribution(TEXT)
    ids = m.tokenize(TEXT)
    assert a.scores.shape == a.saliency.shape == (len(ids),) and a.gradients.shape == (len(ids), m.n_embd)
    e = m.capture("embd", ids)["embd"]

    def log_p(values):
        with m.patch({"embd": lambda x: values}):
            z = m.logits(ids)[-1].astype(np.float64)
        return z[a.id] - z.max() - np.log(np.exp(z - z.max()).sum())
    d = np.random.default_rng(0).standard_normal(e.shape).astype(np.float32)
    d *= 0.01 * np.linalg.norm(e) / np.linalg.norm(d)
    numeric = (log_p(e + d) - log_p(e - d)) / 2
    assert abs(log_p(e) - a.logprob) < 1e-3 and a.id == m.logits(ids)[-1].argmax()
    assert abs((a.gradients * d).sum() - numeric) < 0.03 * abs(numeric) + 1e-4
    np.testing.assert_allclose(a.scores, (a.gradients * e).sum(1), rtol=1e-5)
    assert a.target in a._repr_html_() and a.target in repr(a)


def test_attribution_of_another_token(m):
    ids = m.tokenize(TEXT)
    other = int(np.argsort(m.logits(ids)[-1])[-2])
    a = m.attribution(TEXT, target=other)
    assert a.id == other and a.logprob < m.attribution(TEXT).logprob
    with pytest.raises(gg.ParamError, match="one token"):
        m.attribution(ids[:1])
    with pytest.raises(gg.ParamError, match="tokens, one is expected"):
        m.attribution(TEXT, target="several words of it")


# ---------------------------------------------------------------- caches
def test_caches_by_head(m):
    v = m.capture("blk.1.Vcur", TEXT)["blk.1.Vcur"]
    kept = m.kv(1)
    n = len(m.tokenize(TEXT))
    mixer = m.description.blocks[1].mixer
    assert kept.first == 0 and kept.keys.shape == (mixer.n_head_kv, n, mixer.d_head)
    np.testing.assert_allclose(kept.values, v.reshape(n, mixer.n_head_kv, -1).transpose(1, 0, 2), atol=2e-3)
    m.decode(m.tokenize(" good"))
    assert m.kv(1).keys.shape[1] > n
    np.testing.assert_array_equal(m.kv(1).keys[:, :n], kept.keys)
    m.reset()
    with pytest.raises(gg.ParamError, match=r"m.logits\(text\)"):
        m.kv(1)
    with pytest.raises(gg.ParamError, match="layer"):
        m.kv(99)


# ---------------------------------------------------------------- completion
def test_completion_offers_what_people_use(m):
    names = dir(m)
    assert 25 <= len(names) <= 40 and {"generate", "chat", "capture", "attribution", "kv", "weights"} <= {*names}
    assert all(hasattr(m, name) for name in names)
    offered = inspect.signature(load_model).parameters
    assert {"n_ctx", "kv_type", "rope_scaling", "devices", "repack"} <= {*offered}
    for call in (m.generate, m.chat):
        offered = inspect.signature(call).parameters
        assert {"n_predict", "temp", "top_p", "seed", "stop", "logprobs", "grammar"} <= {*offered}
