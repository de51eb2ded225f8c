"""JSON from outside that nests too deeply, or whose numbers are too long: a typed error wherever it is read."""
import pathlib

import numpy as np
import pytest
from helpers.paths import ROOT

import ggjit as gg
from ggjit.models.files.imatrix import load_imatrix
from ggjit.models.files.save import save_gguf
from ggjit.models.networks.finetune import _texts
from ggjit.ops.core.json_text import parse_json
from ggjit.tools.command.common import value
from ggjit.tools.command.texts import texts_of
from ggjit.tools.serve import forms

DEEP, LONG = "[" * 100_000, "9" * 5000
# these read what this program wrote itself, or say which value is too deep
OWN = {"ops/core/json_text.py", "alloc/torch_trace.py", "engine/cluster/dask_worker.py", "models/text/chat_template.py",
       "models/text/template_worker.py", "models/text/json_schema.py", "tools/embedded_model.py",
       "tools/command/helpers.py", "tools/arm_code.py"}


@pytest.mark.parametrize("text", [DEEP, LONG, "{", b"\xff"])
def test_all_errors_are_value_errors(text):
    with pytest.raises(ValueError):
        parse_json(text)


def test_json_is_read_in_one_place():
    files = [f for layer in ("ops", "alloc", "engine", "models", "tools") for f in (ROOT / layer).rglob("*.py")]
    found = {f.relative_to(ROOT).as_posix() for f in files if "json.loads(" in f.read_text("utf-8")}
    assert found == OWN


@pytest.mark.parametrize("text", [DEEP, LONG])
def test_lines_of_texts(tmp_path, text):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "a"}}\n{text}\n')
    for read in (lambda: _texts(pathlib.Path(path)), lambda: texts_of(path, "text")):
        with pytest.raises(gg.BadFile, match="line 2"):
            read()


@pytest.mark.parametrize("text", [DEEP, LONG])
def test_calls_of_tools(text):
    call = {"function": {"name": "f", "arguments": text}}
    assert text in forms._plain({"role": "assistant", "tool_calls": [call]})["content"]
    answer = f"{forms.CALL}{text}{forms.END_CALL}"
    assert forms.calls_of(answer, "a") == (answer, [])
    assert value(text) == text


@pytest.mark.parametrize("key", ["imatrix.chunk_count", "imatrix.chunk_size"])
@pytest.mark.parametrize("n", [-1, 1 << 40])
def test_an_importance_matrix_of_impossible_chunks(tmp_path, key, n):
    sums = {"a.in_sum2": np.ones((1, 4), np.float32), "a.counts": np.ones((1, 1), np.float32)}
    save_gguf(tmp_path / "i.gguf", sums, {"general.type": "imatrix", key: np.int64(n)})
    with pytest.raises(gg.BadFile, match=key):
        load_imatrix(tmp_path / "i.gguf")
