"""quantize, edit, info FILE, imatrix, control-vector and perplexity on the command line."""
import json
import math

import numpy as np
import pytest
from helpers import tiny_model
from helpers.processes import result

from ggjit.models import edit_gguf, load_control_vector, quantize_gguf
from ggjit.models.files.gguf import GGUFFile
from ggjit.models.networks.load import EMBEDDED


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("files") / "tiny.gguf")


def test_quantize(tiny, tmp_path, command):
    out = tmp_path / "q.gguf"
    got = result(command, "quantize", tiny, out, "q4_0", "--tensor-type", "attn_v=q8_0", "--tensor-type", "_down=f16",
                 "--token-embedding-type", "q5_0")
    assert got["types"]["blk.0.attn_v.weight"] == "q8_0" and got["types"]["blk.1.ffn_down.weight"] == "f16"
    assert got["types"]["token_embd.weight"] == "q5_0" and got["nbytes"] < got["nbytes_before"]
    quantize_gguf(tiny, tmp_path / "p.gguf", "Q4_0", tensor_types={"attn_v": "q8_0", "_down": "f16"},
                  embedding_type="q5_0", progress=False)
    assert out.read_bytes() == (tmp_path / "p.gguf").read_bytes()
    r = command("quantize", tiny, out, "q4_0")
    assert r.returncode == 1 and "exists already" in r.stderr and "--force" in r.stderr
    r = command("quantize", tiny, out, "q8_0", "--force", "--split-max-size", "30k")
    assert r.returncode == 0 and "q-00001-of-0000" in r.stdout and "q8_0" in r.stdout


def test_edit_and_info(tiny, tmp_path, command):
    out = tmp_path / "e.gguf"
    command("edit", tiny, out, "--set-key", "general.name=a [name]", "--set-key", "numbers=[1, 2]", "--remove-key",
            "llama.rope.freq_base", "--rename", "output_norm.weight=last", "--set-tensor-type",
            "blk.0.ffn_up.weight=q8_0")
    got = result(command, "info", out)
    keys = got["metadata"]
    assert keys["general.name"] == "a [name]" and keys["numbers"] == {"length": 2, "first": [1, 2]}
    assert "llama.rope.freq_base" not in keys and got["types"]["q8_0"] == {"tensors": 1, "nbytes": 6528}
    file = GGUFFile(out)
    assert [t["name"] for t in got["tensors"]] == list(file.tensors) and "last" in file.tensors
    assert got["n_params"] == sum(int(np.prod(t.ne)) for t in file.tensors.values())
    broken = tmp_path / "nan.gguf"
    edit_gguf(out, broken, set_keys={"a": math.nan, "b": np.array([1, np.inf], np.float32)}, progress=False)
    r = command("info", broken, "--json")
    keys = json.loads(r.stdout, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))["metadata"]
    assert keys["a"] is None and keys["b"]["first"] == [1, None]
    r = command("info", out)
    assert "a [name]" in r.stdout and "64 x 96" in r.stdout and "bits each" in r.stdout
    paths = result(command, "edit", tiny, tmp_path / "p.gguf", "--split-max-size", "100k")["paths"]
    assert result(command, "info", paths[0])["files"] == paths
    command("edit", paths[0], tmp_path / "whole.gguf")
    assert (tmp_path / "whole.gguf").read_bytes() == open(tiny, "rb").read()


@pytest.mark.parametrize("argv, status, text", [
    (["quantize", "FILE", "OUT", "q4_x"], 2, "no type 'q4_x' of a file (did you mean"),
    (["quantize", "FILE", "OUT", "q4_0", "--tensor-type", "ffn"], 2, "--tensor-type takes NAME=VALUE, got 'ffn'"),
    (["quantize", "FILE", "OUT", "q4_0", "--split-max-size", "2X"], 2, "a size is a number of bytes, such as 500M"),
    (["quantize", "none.gguf", "OUT", "q4_0"], 1, "none.gguf: No such file"),
    (["edit", "FILE", "OUT", "--remove-key", "general.nme"], 2, "no key 'general.nme'"),
    (["edit", "FILE", "OUT", "--set-key", "a=1", "--set-key", "a=2"], 2, "--set-key is given twice for 'a'"),
    (["info", "none.gguf"], 1, "none.gguf: No such file"),
    (["imatrix", "FILE", "--data", "none.txt", "-o", "OUT"], 1, "none.txt: No such file"),
    (["imatrix", "FILE", "--data", "FILE", "-o", "none/im.gguf"], 2, "there is no folder"),
    (["perplexity", "FILE", "--data", "FILE", "--save-logits", "FILE"], 1, "exists already"),
    (["perplexity", "FILE", "--data", "FILE"], 1, "not UTF-8 text at byte")])
def test_what_cannot_be_done(argv, status, text, tiny, tmp_path, command):
    names = {"FILE": tiny, "OUT": tmp_path / "out.gguf"}
    r = command(*(names.get(a, a) for a in argv))
    assert r.returncode == status and text in r.stderr and not list(tmp_path.iterdir())


def test_a_control_vector_is_made_and_added(tmp_path, command):
    def said(*more, run=result):
        return run(command, "generate", "-p", "She was", "-n", 8, "--temp", 0, "-t", 1, *more)
    sides = [tmp_path / name for name in ("happy.txt", "sad.txt")]
    for path in sides:
        path.write_text(f"Jane was {path.stem}\nEmma was {path.stem}\n")
    out, files = tmp_path / "v.gguf", ("--positive-file", sides[0], "--negative-file", sides[1])
    made = result(command, "control-vector", EMBEDDED, *files, "-o", out, "-t", 1)
    assert made["pairs"] == 2 and made["layers"] == len(load_control_vector(out).directions) > 1
    assert said("--control-vector", f"{out}=30")["text"] != said("--control-vector", f"{out}=0")["text"]
    r = command("control-vector", EMBEDDED, *files, "-o", out)
    assert r.returncode == 1 and "exists already" in r.stderr
    sides[1].write_text("Jane was sad\n\n")
    r = command("control-vector", EMBEDDED, *files, "-o", tmp_path / "w.gguf")
    assert r.returncode == 2 and "line 2 of" in r.stderr
    for more, words in ((("--control-vector-layer-range", 1, 2), "give one"),
                        (("--control-vector", out, "--control-vector-layer-range", 2, 1), "last must be an integer")):
        r = said(*more, run=lambda command, *args: command(*args))
        assert r.returncode == 2 and words in r.stderr


def test_imatrix_and_perplexity(shared, tmp_path, command):
    path, text = shared("data", "stories260k", "stories260K-F32.gguf"), tmp_path / "a.txt"
    text.write_text("Once upon a time, there was a little girl named Lily. She loved to play outside in the park. " * 8)
    out = tmp_path / "im.gguf"
    got = result(command, "imatrix", path, "--data", text, "-c", 64, "-o", out, "-t", 1)
    assert got["matrices"] == 35 and got["chunks"] >= 2 and got["partial"] == []
    assert GGUFFile(out).get("imatrix.datasets")[0] == str(text)
    r = command("imatrix", path, "--data", text, "-o", out)
    assert r.returncode == 1 and "exists already" in r.stderr
    quantised = tmp_path / "q.gguf"
    assert result(command, "quantize", path, quantised, "Q4_0", "--imatrix", out)["imatrix"] == 35
    # its rounded numbers as F32: no kernels but those of the other file
    edit_gguf(quantised, quantised, set_types=dict.fromkeys(GGUFFile(quantised).tensors, "f32"), force=True,
              progress=False)
    base = result(command, "perplexity", path, "--data", text, "-c", 64, "-t", 1, "--save-logits", tmp_path / "l.kld")
    got = result(command, "perplexity", quantised, "--data", text, "-c", 64, "-t", 1, "--kl-divergence-base", path)
    assert base["perplexity"] == pytest.approx(got["base_perplexity"], rel=1e-4) and 0 < got["kl_divergence"] < 1
    r = command("perplexity", quantised, "--data", text, "-c", 64, "-t", 1, "--kl-divergence-base", tmp_path / "l.kld")
    assert r.returncode == 0 and "KL divergence" in r.stdout and "same likeliest token" in r.stdout
    r = command("perplexity", quantised, "--data", text, "-c", 32, "--kl-divergence-base", tmp_path / "l.kld")
    assert r.returncode == 2 and "made from chunks of 64 tokens; say so with -c" in r.stderr
    assert json.loads(json.dumps(got)) == got
