"""gg.diff: errors per tensor, the first that is off, by layer and token."""
import numpy as np
import pytest
from helpers import tiny_model

import ggjit as gg
from ggjit.models import load_gguf, load_model, quantize_gguf, save_gguf
from ggjit.models.core.byte_chars import CHAR_OF_BYTE
from ggjit.ops.core.errors import ModelError

IDS = [3, 17, 40, 31, 5, 8]


def changed(path, out, name, change):
    """A copy of the file in which one tensor has other values."""
    tensors, metadata = load_gguf(path)
    values = {k: t.numpy() for k, t in tensors.items()}
    values[name] = change(values[name])
    save_gguf(out, values, metadata)
    return str(out)


def test_equal_files_have_no_error(path):
    d = gg.diff(path, path, IDS)
    assert d.first is None and all(row.error == 0 for row in d.rows)
    assert "no error above" in str(d) and len(d.grid()) == tiny_model.LAYERS


@pytest.mark.parametrize(("tensor", "first"), [
    ("blk.1.ffn_down.weight", "blk.1.ffn_out"), ("blk.0.attn_q.weight", "blk.0.Qcur"),
    ("output_norm.weight", "result_norm"), ("token_embd.weight", "embd")])
def test_the_first_offender_is_named(path, tmp_path, tensor, first):
    other = changed(path, tmp_path / "other.gguf", tensor, lambda a: -a)
    d = gg.diff(path, other, IDS)
    assert d.first.name == first and d.first.error > 0.1
    before = [row.name for row in d.rows].index(first)
    assert all(row.error == 0 for row in d.rows[:before])


def test_errors_are_those_of_captured_values(path, tmp_path):
    small = str(tmp_path / "q8.gguf")
    quantize_gguf(path, small, "Q8_0", progress=False)
    d = gg.diff(path, small, IDS, tolerance=1.0)
    with load_model(path, n_threads=1) as a, load_model(small, n_threads=1) as b:
        x, y = (m.capture(["blk.1.l_out"], IDS)["blk.1.l_out"].astype(float) for m in (a, b))
    row = d["blk.1.l_out"]
    assert row.error == pytest.approx(((x - y) ** 2).sum() / (x ** 2).sum(), rel=1e-6) and row.error > 0
    np.testing.assert_allclose(row.tokens, ((x - y) ** 2).sum(1) / (x ** 2).sum(1), rtol=1e-6)
    assert d.first is None and row.layer == 1


def test_one_token_is_seen_in_the_picture(path, tmp_path):
    pytest.importorskip("matplotlib")

    def change(a):
        a = a.copy()
        a[IDS[2]] *= -1
        return a
    d = gg.diff(path, changed(path, tmp_path / "token.gguf", "token_embd.weight", change), IDS)
    assert d["embd"].tokens.argmax() == 2 and (np.delete(d["embd"].tokens, 2) == 0).all()
    grid = d.grid()
    assert (grid[:, :2] == 0).all() and (grid[:, 2] > 0).all(), "tokens before it do not see it"
    axes = d.plot()
    assert axes.images[0].get_array().shape == grid.shape
    assert axes.get_title().endswith(f"first above 0.01: {d.first.name}")


def test_two_settings_and_a_loaded_model(path):
    with load_model(path, n_threads=1, kv_type="F32") as m:
        d = gg.diff(m, (path, {"kv_type": "F16", "flash": False}), IDS)
        assert d.first is None and 0 < max(row.error for row in d.rows) < 1e-4
        assert m.logits(IDS).shape == (len(IDS), m.n_vocab), "the caller's model stays usable"
    named = gg.diff(path, path, IDS, names=["blk.0.kq_soft_max"])
    assert [row.name for row in named.rows] == ["blk.0.kq_soft_max"]


def test_a_folder_beside_its_file(tmp_path):
    hf_folders = pytest.importorskip("helpers.hf_folders")
    from ggjit.models import convert_folder, save_safetensors
    folder = tmp_path / "hf"
    folder.mkdir()
    hf_folders.renamed_llama(folder, "internlm2", save_safetensors)
    out = tmp_path / "converted.gguf"
    convert_folder(folder, out, "F16", vocabulary=False)
    d = gg.diff(out, folder, [i % 40 for i in IDS])
    assert d.first is None and 0 < d["logits"].error < 1e-4


def test_bad_arguments(path, tmp_path):
    with pytest.raises(gg.TypeMismatch, match="diff takes a path"):
        gg.diff(path, 3, IDS)
    with pytest.raises(gg.ParamError, match="no tensor of llama is called"):
        gg.diff(path, path, IDS, names=["nothing"])
    with pytest.raises(gg.ParamError, match="give token ids"):
        gg.diff(path, path, "a text")


def test_models_with_other_tokenizers(path, tmp_path):
    """The error names both models, also where the second one does not have the ids of the first."""
    tensors, metadata = load_gguf(path)
    words = {"model": "gpt2", "pre": "default", "tokens": CHAR_OF_BYTE[:tiny_model.VOCAB], "merges": ["q z"]}
    save_gguf(tmp_path / "other.gguf", tensors, metadata | {f"tokenizer.ggml.{k}": x for k, x in words.items()})
    with pytest.raises(ModelError, match="different ids for the text: .* in austen.gguf, .* in other.gguf"):
        gg.diff(None, tmp_path / "other.gguf", ', "')
