"""Repacked weights that are kept on disk: the next load maps them with equal bits, and never those of another file."""
import os
import shutil

import numpy as np
import pytest
from helpers import tiny_model
from helpers.processes import result

import ggjit as gg
from ggjit.models import load_model
from ggjit.models.files import kept_layout
from ggjit.models.networks.peak import model_peak
from ggjit.ops.core.user_warnings import forget_told
from ggjit.ops.matmul.repack.layouts import LAYOUTS

pytestmark = [pytest.mark.skipif(not LAYOUTS, reason="no layout on this instruction set"),
              pytest.mark.skipif(os.name != "posix", reason="nothing is kept here")]
IDS = [1, 2, 3, 5, 8]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where layouts are kept, beside no kernels; small models and new files count, too."""
    monkeypatch.setattr(kept_layout, "folder", lambda: tmp_path / "cache" / "repacked")
    monkeypatch.setattr(kept_layout, "LEAST_NBYTES", 1)
    monkeypatch.setattr(kept_layout, "SETTLED_SECONDS", 0.0)
    return tmp_path / "cache" / "repacked"


@pytest.fixture
def model(tmp_path):
    return tiny_model.write(tmp_path / "tiny.gguf", type="Q8_0")


def load(path):
    """(logits, were repacked weights mapped?)"""
    with load_model(path, n_threads=2, repack=True) as m:
        kept_layout.wait()
        return m.logits(IDS), m.weights.maps_layout


def test_the_next_load_maps_them(folder, model):
    want, mapped = load(model)
    assert not mapped and len(list(folder.iterdir())) == 1
    with load_model(model, n_threads=1, repack=True) as m:
        assert m.weights.maps_layout and (m.logits(IDS) == want).all()
        row = next(row for row in m.memory().rows if row.name == "repacked weights")
        assert row.file > 0 and row.anonymous == 0 and row.nbytes == m.memory().filled().terms["repacked weights"]
        leaf = m.weights["blk.0.ffn_up.weight"]
        assert (leaf.numpy() == gg.dequantize(leaf.type, m.file.tensor_bytes(leaf.name), leaf.shape)).all()
        with pytest.raises(gg.ParamError, match="read-only"):
            leaf.set(np.zeros(leaf.shape, np.float32))
    peak = model_peak(model, repack=True)
    assert next(t for t in peak.memory.rows if t.name == "repacked weights").anonymous == 0
    with load_model(model, n_threads=1, repack=False) as m:
        np.testing.assert_allclose(m.logits(IDS), want, atol=1e-4)


def test_a_file_that_was_written_again_is_another(folder, model, tmp_path):
    """Also with the size, the times and the number of before: a program cannot set when a file was changed."""
    load(model)
    before = os.stat(model)
    other = tiny_model.write(tmp_path / "other.gguf", type="Q8_0", seed=1)
    with open(model, "r+b") as f:
        f.write(other.read_bytes())
    os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (os.stat(model).st_ino, os.stat(model).st_size) == (before.st_ino, before.st_size)
    got, mapped = load(model)
    with load_model(other, n_threads=1, repack=True) as m:
        assert not mapped and (got == m.logits(IDS)).all()


def test_of_a_file_that_may_still_be_written_nothing_is_kept(folder, model, monkeypatch):
    monkeypatch.setattr(kept_layout, "SETTLED_SECONDS", 60.0)
    load(model)
    assert not folder.exists()


@pytest.mark.parametrize("spoil", [
    lambda file: file.chmod(0o666), lambda file: os.truncate(file, file.stat().st_size - 64),
    lambda file: file.write_bytes(b"ggjit" + file.read_bytes()[5:100].ljust(file.stat().st_size, b"x")),
    lambda file: (shutil.move(file, f"{file}.2"), file.symlink_to(f"{file}.2")),
    lambda file: file.parent.chmod(0o777)])
def test_files_that_may_not_be_used_are_not(folder, model, spoil):
    want, _ = load(model)
    spoil(next(folder.glob("*.layout")))
    got, mapped = load(model)
    assert not mapped and (got == want).all()


def test_limits(folder, model, tmp_path, monkeypatch, command):
    """The least recently used go; `off` keeps none and reads none; a folder that cannot be made is told once."""
    load(model)
    nbytes = next(folder.iterdir()).stat().st_size
    first = kept_layout.entries()
    assert [(entry[0], entry[1]) for entry in first] == [(str(model), nbytes)]
    listed = result(command, "cache", "list")
    assert [(x["model"], x["nbytes"]) for x in listed["repacked"]] == [(str(model), nbytes)]
    assert "tiny.gguf" in command("cache", "list").stdout
    monkeypatch.setenv("GGJIT_REPACKED", str(2 * nbytes - 1))
    os.utime(first[0][3], (1, 1))
    load(tiny_model.write(tmp_path / "two.gguf", type="Q8_0", seed=2))
    assert [entry[0] for entry in kept_layout.entries()] == [str(tmp_path / "two.gguf")]
    monkeypatch.setenv("GGJIT_REPACKED", "off")
    assert not load(tmp_path / "two.gguf")[1]
    monkeypatch.setenv("GGJIT_REPACKED", "some")
    with pytest.raises(gg.ParamError, match="GGJIT_REPACKED: 'some'"):
        load(model)
    monkeypatch.setenv("GGJIT_REPACKED", "1G")
    monkeypatch.setattr(kept_layout, "folder", lambda: model / "cache" / "repacked")
    forget_told()
    with pytest.warns(gg.GgjitWarning, match="repacked weights are not kept"):
        load(model)
