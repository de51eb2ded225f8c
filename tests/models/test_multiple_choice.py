"""Endings by their mean log-probability, beside those of whole texts; files of tasks; the command."""
import json

import numpy as np
import pytest
from helpers import arch_files
from helpers.requirements import shared

import ggjit as gg
from ggjit.models import load_model
from ggjit.models.networks.load import EMBEDDED
from ggjit.models.networks.multiple_choice import ending_scores, multiple_choice, read_tasks
from ggjit.models.text.logprobs import log_softmax
from ggjit.tools.command.main import main

CONTEXT = "It is a truth universally acknowledged, that a single man"
ENDINGS = ["must be in want of a wife.", "xq zzkv wpt.", "must be in", "must be in want of a wife, and so"]


def by_score(m, context, endings):
    """The same by whole texts."""
    texts = [m.tokenize(f"{context} {e}") for e in endings]
    n = next(i for i in range(len(texts[0])) if len({tuple(t[:i + 1]) for t in texts}) > 1 or i == min(
        map(len, texts)) - 1)
    return np.array([np.mean([row[id] for row, id in zip(log_softmax(m.logits(ids))[n - 1:], ids[n:], strict=False)])
                     for ids in texts])


def test_scores_are_those_of_whole_texts():
    with load_model(n_threads=1, n_ctx=128, kv_type="F32") as m:
        for endings in (ENDINGS, ENDINGS[:2], [ENDINGS[1], ENDINGS[0]]):
            got = ending_scores(m, CONTEXT, endings)
            np.testing.assert_allclose(got, by_score(m, CONTEXT, endings), atol=0.02)     # rounded activations
        assert int(np.argmax(ending_scores(m, CONTEXT, ENDINGS[:2]))) == 0


def test_recurrent_models(tmp_path, monkeypatch):
    arch_files.write(shared("tools"), "mamba", tmp_path / "m.gguf")
    with load_model(tmp_path / "m.gguf", n_threads=1, n_ctx=64) as m:
        monkeypatch.setattr(m, "tokenize", lambda text: [ord(c) % 30 for c in text])
        endings = ["abc", "xyz", "abd"]
        np.testing.assert_allclose(ending_scores(m, "hello", endings), by_score(m, "hello", endings), atol=1e-3)


def test_files_and_the_command(tmp_path, capsys):
    right = [0, 1, 0]
    tasks = [(CONTEXT, ENDINGS[:2] + ["qqq", "zzz kk"], 0), ("She was", ["kzq xx", "very happy", "qq", "z"], 1),
             ("He had", ["qq zk", "been", "kkk", "zz z"], 0)]
    with load_model(n_threads=1, n_ctx=128) as m:
        want = multiple_choice(m, tasks, progress=False)
        assert want["n_tasks"] == 3 and want["accuracy"] == pytest.approx(2 / 3)
        assert multiple_choice(m, tasks, 2, progress=False)["accuracy"] == 1
    (tmp_path / "h.txt").write_text("".join(f"{c}\n{a}\n" + "".join(f"{e}\n" for e in es) for c, es, a in tasks))
    (tmp_path / "t.jsonl").write_text("".join(
        json.dumps({"context": c, "choices": es, "answer": a}) + "\n" for c, es, a in tasks))
    assert read_tasks(tmp_path / "h.txt") == read_tasks(tmp_path / "t.jsonl") == tasks and len(right) == 3
    path = str(EMBEDDED)
    assert main(["perplexity", path, "--hellaswag", str(tmp_path / "h.txt"), "-t", "1", "-c", "128", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == pytest.approx(2 / 3)
    assert main(["perplexity", path]) == 2 and "--hellaswag FILE" in capsys.readouterr().err


def test_bad_tasks(tmp_path):
    for name, text, words in (("a.txt", "one\n2\n", "has 2 lines; a task has 6"),
                              ("b.txt", "c\nx\n1\n2\n3\n4\n", "line 2: .x. is not a number"),
                              ("c.jsonl", "{}\n", "line 1: expected"),
                              ("d.jsonl", '{"context": "a", "choices": ["b"], "answer": 3}', "the answer is 3")):
        (tmp_path / name).write_text(text)
        with pytest.raises(gg.BadFile, match=words):
            read_tasks(tmp_path / name)
    with load_model(n_threads=1, n_ctx=64) as m:
        for context, endings in (("a", ["b"]), ("a", ["b", ""]), (3, ["a", "b"]), ("a", "bc")):
            with pytest.raises(gg.ParamError, match="two or more endings"):
                ending_scores(m, context, endings)
        with pytest.raises(gg.ParamError, match="fit the context of 64"):
            ending_scores(m, "word " * 100, ["a", "b"])
        with pytest.raises(gg.ParamError, match="no task"):
            multiple_choice(m, [])
