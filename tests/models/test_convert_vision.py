"""Hugging Face folders of models that see: decoder and vision part, against transformers' logits behind pictures."""
import json
import subprocess
import sys

import numpy as np
import pytest
from helpers import hf_vision
from helpers.paths import TESTS
from helpers.sample import sampled

import ggjit as gg
from ggjit.models import convert_folder, load_model
from ggjit.models.files.gguf import GGUFFile
from ggjit.tools.command.main import main

pytestmark = pytest.mark.slow            # torch and transformers are large, and no extra brings them


@pytest.fixture
def folder(tmp_path, need):
    """Function: the folder of a model that transformers made."""
    need("gguf", "names of keys and tensors")
    need("torch", "transformers is the oracle")
    need("transformers", "transformers is the oracle")

    def made(name):
        command = [sys.executable, "-m", "helpers.hf_vision", name, str(tmp_path / name)]
        r = subprocess.run(command, cwd=TESTS, text=True, capture_output=True, timeout=300)
        assert r.returncode == 0, r.stderr[-2000:]
        return tmp_path / name
    return made


@pytest.mark.parametrize("name", sampled([(n,) for n in hf_vision.MODELS], lambda case: case[0][:4]))
def test_logits_behind_pictures_are_those_of_transformers(name, folder, tmp_path):
    source, out = folder(name), tmp_path / "text.gguf"
    want, mmproj = np.load(source / "results.npz"), tmp_path / "vision.gguf"
    convert_folder(source, out, "F32", vocabulary=False, progress=False, mmproj=mmproj)
    ids, places = want["ids"], np.flatnonzero(want["ids"] < 0)
    with load_model(out, n_threads=1, kv_type="F32", flash=False, vision=mmproj) as m:
        vectors = [piece for piece in m.vision.pieces(hf_vision.picture(name)) if not isinstance(piece, str)]
        ids[places] = np.tile(m.pictures.ids_of(vectors[-1]), 2)
        got = m.logits(ids)
    is_text, theirs = ids < m.n_vocab, want["logits"]
    np.testing.assert_allclose(got[is_text], theirs[is_text], atol=2e-3 * abs(theirs).max())


def test_what_cannot_be_expressed(folder, tmp_path):
    source = folder("qwen25vl")
    config = json.loads((source / "config.json").read_text())

    def refused(error, match, about=None, **vision):
        changed = {**config, **(about or {}), "vision_config": {**config["vision_config"], **vision}}
        (source / "config.json").write_text(json.dumps(changed))
        with pytest.raises(error, match=match):
            convert_folder(source, tmp_path / "a.gguf", vocabulary=False, progress=False, mmproj=tmp_path / "v.gguf")
        assert not (tmp_path / "a.gguf").exists() and not (tmp_path / "v.gguf").exists()
    refused(gg.NotSupported, "fullatt_block_indexes", fullatt_block_indexes=[0, 3])
    refused(gg.NotSupported, "hidden_act of the vision part is 'relu'", hidden_act="relu")
    refused(gg.ModelError, "5 heads of a width of 32", num_heads=5)
    refused(gg.NotSupported, "no vision part", {"architectures": ["Qwen3VLForConditionalGeneration"]})
    (source / "preprocessor_config.json").unlink()
    refused(gg.ModelError, "image_mean")


def test_command_writes_both_files(folder, tmp_path):
    source, paths = folder("llava"), [str(tmp_path / name) for name in ("a.gguf", "v.gguf")]
    assert main(["convert", str(source), paths[0], "--no-vocab", "--mmproj", paths[1]]) == 0
    about = GGUFFile(tmp_path / "v.gguf")
    assert about.get("general.architecture") == "clip" and about.get("clip.projector_type") == "mlp"
