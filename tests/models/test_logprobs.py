"""Log-probabilities: the float64 log-softmax of the model's logits, however the text was computed and chosen."""
import json
import math
import re

import numpy as np
import pytest

from ggjit.models import load_model, quantize_gguf
from ggjit.models.networks.load import EMBEDDED
from ggjit.models.text.logprobs import token_of, tokens_html
from ggjit.ops.core.errors import GgjitError, ParamError
from ggjit.tools.command.main import main

PROMPTS = ["Elizabeth was", "It is a truth universally", "Mr. Darcy"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """The small model in F32: reading many tokens at once rounds as reading them one by one."""
    path = tmp_path_factory.mktemp("model") / "f32.gguf"
    quantize_gguf(EMBEDDED, path, "F32", requantize=True, progress=False)
    return path


@pytest.fixture(scope="module")
def m(path):
    with load_model(path, n_ctx=256, n_threads=1, kv_type="F32", reserve=False) as model:
        yield model


def expected(m, prompt_ids, tokens):
    """log p of every id at each place of a continuation, from m.logits of the whole text."""
    z = m.logits(prompt_ids + tokens)[len(prompt_ids) - 1:-1].astype(np.float64)
    top = z.max(1, keepdims=True)
    return z - top - np.log(np.exp(z - top).sum(1, keepdims=True))


def agrees(m, prompt_ids, scored, k):
    want = expected(m, prompt_ids, [t.id for t in scored])
    for t, row in zip(scored, want, strict=True):
        assert abs(t.logprob - row[t.id]) < 1e-3
        assert len(t.alternatives) == k
        best = np.sort(row)[::-1][:k]
        np.testing.assert_allclose([a.logprob for a in t.alternatives], best, atol=1e-3)
        np.testing.assert_allclose([row[a.id] for a in t.alternatives], best, atol=2e-3)
        assert t.text == m.tokenizer.piece(t.id, special=True).decode("utf-8", "replace")


@pytest.mark.parametrize("options", [dict(), dict(temp=1.5, seed=3), dict(temp=0.9, seed=4, top_k=3,
                                     repeat_penalty=1.4), dict(logit_bias={7: 100.0}), dict(grammar='root ::= [a-z ]+'),
                                     dict(temp=1.0, seed=1, grammar='root ::= " yes" | " no"')])
def test_of_the_model_itself_before_sampling(m, options):
    g = m.generate(PROMPTS[0], 12, logprobs=4, **options)
    pieces = list(g)
    assert g.text == "".join(pieces) == g.stats["text"] and [t.id for t in g.tokens] == g.stats["tokens"]
    agrees(m, m.tokenize(PROMPTS[0]), g.tokens, 4)
    assert json.loads(json.dumps(g.stats["logprobs"])) == [t.as_dict() for t in g.tokens]


@pytest.mark.parametrize("options", [dict(), dict(temp=1.0, seed=5)])
def test_many_at_once_as_one_alone(m, options):
    runs = m.generate(PROMPTS, 10, logprobs=2, **options)
    list(runs)
    for prompt, run in zip(PROMPTS, runs.runs, strict=True):
        agrees(m, m.tokenize(prompt), run.tokens, 2)
        alone = m.generate(prompt, 10, logprobs=2, **options)
        assert alone.text == run.text
        np.testing.assert_allclose([t.logprob for t in alone.tokens], [t.logprob for t in run.tokens], atol=1e-3)


@pytest.mark.parametrize("n_batch", [3, 64])
def test_scores_of_given_texts(path, n_batch):
    with load_model(path, n_ctx=128, n_threads=1, kv_type="F32", reserve=False, n_batch=n_batch) as m:
        ids = m.tokenize(PROMPTS[1])
        first, second = m.score([PROMPTS[1], m.tokenize(PROMPTS[2])], logprobs=3)
        agrees(m, ids[:1], first.tokens[1:], 3)
        assert first.tokens[0].logprob is None and [t.id for t in first.tokens] == ids
        assert math.isclose(first.logprob, sum(t.logprob for t in first.tokens[1:]))
        assert math.isclose(first.perplexity, math.exp(-first.logprob / (len(ids) - 1)))
        assert m.score(PROMPTS[1]).logprob == pytest.approx(first.logprob)
        assert m.score(m.tokenize(PROMPTS[2])).logprob == pytest.approx(second.logprob)


def test_text_loses_no_piece_of_the_iteration(m):
    g = m.generate(PROMPTS[0], 10)
    got = [next(g)]
    whole = g.text
    assert g.stats["stop_reason"] == "length" and "".join(got + list(g)) == whole
    assert g.text == whole and all(t.logprob is None and not t.alternatives for t in g.tokens)
    assert "logprobs" not in g.stats


def test_ties_and_minus_infinity():
    class Letters:
        def piece(self, id, special=False):
            return bytes([97 + id])
    t = token_of(Letters(), 1, np.array([2.0, 2.0, -np.inf, 1.0, 2.0]), 3)
    assert [a.id for a in t.alternatives] == [0, 1, 4]
    assert t.logprob == pytest.approx(2 - math.log(3 * math.exp(2) + math.exp(1)))
    assert token_of(Letters(), 2, np.array([2.0, 2.0, -np.inf]), 9).logprob == -math.inf
    assert "p = 0.000" in tokens_html([token_of(Letters(), 2, np.array([2.0, 2.0, -np.inf]), 9)])


def test_a_cell_shows_every_token(m):
    g = m.generate("<b>", 6, logprobs=2)
    page = g._repr_html_()
    assert len(re.findall(r"<span style='background[^']*' title='", page)) == len(g.tokens) == 6
    assert "&lt;b&gt;" in page and "<b>" not in page
    for t in g.tokens:
        assert f"p = {math.exp(t.logprob):.3f}" in page and all(f"{math.exp(a.logprob):.3f}" in page
                                                                for a in t.alternatives)
    assert "color:" not in page                 # letters keep the page's colour, light or dark


@pytest.mark.parametrize("call", [lambda m: m.generate("a", logprobs=-1), lambda m: m.generate("a", logprobs="5"),
                                  lambda m: m.generate("a", logprobs=True), lambda m: m.score([]),
                                  lambda m: m.score(""), lambda m: m.score(3), lambda m: m.score([[]]),
                                  lambda m: m.score("a b " * 500), lambda m: m.score(["a", 3.5]),
                                  lambda m: m.score([[10 ** 6]]), lambda m: m.score("a", logprobs=-2)])
def test_bad_input(m, call):
    with pytest.raises(GgjitError):
        call(m)
    assert m.generate("Elizabeth", 2).text


def test_the_command(capsys):
    assert main(["generate", "-p", "Elizabeth was", "-n", "3", "--temp", "0", "--logprobs", "2", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [t["id"] for t in said["logprobs"]] == said["tokens"] and len(said["logprobs"][0]["alternatives"]) == 2
    assert main(["generate", "-p", "Elizabeth was", "--logprobs", "2"]) in (1, 2)


def test_an_error_names_the_option(m):
    with pytest.raises(ParamError, match="logprobs must be an integer from 0"):
        m.generate("a", logprobs=-1)
