"""Files with more in them than the network uses, numbers that do not fit, weights that are not numbers."""
import copy
import json
import pickle

import numpy as np
import pytest
from helpers import tiny_model, tiny_moe

import ggjit as gg
from ggjit.models import load_gguf, load_model, save_gguf
from ggjit.models.networks.base.strict import NEUTRAL
from ggjit.models.networks.peak import model_peak
from ggjit.models.networks.texts.encoder import Encoder
from ggjit.tools.command.main import main


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """(tensors, metadata) of a small llama."""
    return _contents(tiny_model.write(tmp_path_factory.mktemp("strict") / "llama.gguf"))


def _contents(path):
    tensors, metadata = load_gguf(path)
    return tensors, {**metadata}


@pytest.fixture
def changed(llama, tmp_path):
    """changed(tensors, **keys): a file with more tensors, or other values of keys ("__" for a dot; None: no key)."""
    def write(tensors=(), arch="llama", **keys):
        path = tmp_path / "changed.gguf"
        keys = {f"{arch}.{k.replace('__', '.')}": v for k, v in keys.items()}
        metadata = {k: v for k, v in {**llama[1], **keys}.items() if v is not None}
        save_gguf(path, {**llama[0], **dict.fromkeys(tensors, np.ones(16, np.float32))}, metadata)
        return path
    return write


def refused(path, words):
    with pytest.raises(gg.ModelError, match=words):
        load_model(path, n_ctx=16)


UNUSED = ("blk.0.attn_q_norm.weight", "blk.1.attn_sinks.weight", "blk.7.attn_q.weight", "output.bias",
          "blk.0.ffn_gate_inp.weight", "rope_factors_long.weight", "position_embd.weight")


@pytest.mark.parametrize("name", UNUSED)
def test_unused_tensors_are_refused_by_name(changed, name):
    refused(changed([name]), rf"does not use tensor '{name}'.*strict=False \(--no-strict\)")


def test_many_are_counted(changed):
    refused(changed([f"blk.{i}.attn_norm.weight" for i in range(2, 30)]), r"'blk\.2\.attn_norm.*and 20 more;")


def test_strict_false_computes_what_it_can(changed, llama, tmp_path):
    path, plain = changed(UNUSED, logit_scale=2.0), tmp_path / "plain.gguf"
    save_gguf(plain, *llama)
    with load_model(path, n_ctx=16, strict=False) as a, load_model(plain, n_ctx=16) as b:
        np.testing.assert_array_equal(a.logits([1, 2]), b.logits([1, 2]))
    with pytest.raises(gg.ModelError, match="attn_sinks"):
        model_peak(str(path), n_ctx=16)
    assert model_peak(str(path), n_ctx=16, strict=False).peak > 0


def test_no_strict_on_the_command_line(changed, capsys):
    path = str(changed(UNUSED))
    command = ["bench", path, "-p", "1", "-n", "0", "-r", "1", "--json"]
    assert main(command) == 1
    err = capsys.readouterr().err
    assert "attn_q_norm" in err and "--no-strict" in err
    assert main([*command, "--no-strict"]) == 0 and len(json.loads(capsys.readouterr().out)["results"]) == 1
    assert main(["peak", path, "--json"]) == 1 and main(["peak", path, "--json", "--no-strict"]) == 0


@pytest.mark.parametrize(("key", "bad", "neutral"), [
    ("logit_scale", 0.5, 1.0), ("residual_scale", 0.2, 1.0), ("embedding_scale", 12.0, 0.0),
    ("attention__scale", 0.1, 0.0),
    ("attention__causal", False, True), ("attention__sliding_window", 16, 0), ("attn_logit_softcapping", 30.0, 0.0),
    ("final_logit_softcapping", 30.0, 0.0), ("expert_weights_scale", 2.5, 1.0), ("expert_count", 8, 0),
    ("expert_gating_func", 2, 1), ("expert_weights_norm", False, True),
    ("rope__scaling__yarn_log_multiplier", 0.1, 0.0), ("rope__scaling__yarn_beta_fast", 64.0, 32.0),
    ("rope__scale_linear", 4.0, 1.0), ("use_parallel_residual", True, False),
    ("rope__freq_base_swa", 1000.0, None), ("attention__key_length_mla", 8, None), ("of_tomorrow", "yes", None),
    ("pooling_type", None, 3), ("rope__scaling__finetuned", None, True)])
def test_settings_that_are_not_read(changed, key, bad, neutral):
    if bad is not None:
        refused(changed(**{key: bad}), rf"does not use llama\.{key.replace('__', '.')} = ")
    if neutral is not None:
        load_model(changed(**{key: neutral}), n_ctx=16).free()


def test_neutral_values_are_of_keys_that_are_not_read(changed):
    """A key that the loader reads needs no entry."""
    with load_model(changed(), n_ctx=16) as m:
        read = {k.removeprefix("llama.") for k in m.file.read_keys}
    assert not read & set(NEUTRAL) and "rope.freq_base" in read


def test_experts_use_what_dense_layers_do_not(tmp_path):
    with load_model(tiny_moe.write(tmp_path / "moe.gguf", expert_weights_scale=2.5), n_ctx=16) as m:
        assert np.isfinite(m.logits([1])).all()
    refused(tiny_moe.write(tmp_path / "bad.gguf", expert_weights_scale=float("nan")), "expert_weights_scale = nan")


@pytest.mark.parametrize(("key", "value"), [
    ("rope__freq_base", 1e-30), ("rope__freq_base", 0.5), ("rope__freq_base", 1e30), ("rope__freq_base", float("nan")),
    ("attention__layer_norm_rms_epsilon", 1e30), ("attention__layer_norm_rms_epsilon", float("inf")),
    ("rope__scaling__factor", 1e-30), ("rope__scaling__attn_factor", 1e30), ("vocab_size", 47), ("vocab_size", 10 ** 6),
    ("attention__head_count", 3), ("attention__head_count", 10 ** 9), ("attention__head_count_kv", 8),
    ("attention__key_length", 17), ("attention__value_length", 8), ("embedding_length", 32),
    ("feed_forward_length", 95),
    ("rope__dimension_count", 7), ("rope__dimension_count", 10 ** 6), ("block_count", 10 ** 9)])
def test_numbers_are_checked_against_what_is_there(changed, key, value):
    refused(changed(**{key: value}), r"changed\.gguf: ")


@pytest.fixture(scope="module")
def bert():
    """(tensors, metadata) of a small encoder without vocabulary."""
    d, f = 16, 32
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (24, d), "position_embd": (8, d), "token_types": (2, d), "token_embd_norm": (d,),
              **{f"blk.0.{n}": (d, d) for n in ("attn_q", "attn_k", "attn_v", "attn_output")},
              "blk.0.ffn_up": (f, d), "blk.0.ffn_down": (d, f), "blk.0.attn_output_norm": (d,),
              "blk.0.layer_output_norm": (d,)}
    tensors = {f"{n}.weight": rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    tensors |= {f"{n}.bias": np.zeros(s[0], np.float32) for n, s in shapes.items() if n.startswith("blk")
                or n == "token_embd_norm"}
    metadata = {"context_length": 8, "embedding_length": d, "block_count": 1, "feed_forward_length": f,
                "attention.head_count": 2, "attention.layer_norm_epsilon": 1e-5, "attention.causal": False}
    return tensors, {"general.architecture": "bert", **{f"bert.{k}": v for k, v in metadata.items()}}


def test_an_encoder_reads_its_own_keys(bert, tmp_path):
    tensors, metadata = bert
    for key, value in {"attention.causal": True, "attention.head_count_kv": 3, "attention.key_length": 16,
                       "rope.freq_base": 1e4, "attention.layer_norm_epsilon": 2.0, "vocab_size": 7}.items():
        save_gguf(tmp_path / "b.gguf", tensors, {**metadata, f"bert.{key}": value})
        refused_encoder(tmp_path / "b.gguf", rf"bert\.{key}")
    save_gguf(tmp_path / "b.gguf", {**tensors, "classifier.weight": np.ones(4, np.float32)}, metadata)
    refused_encoder(tmp_path / "b.gguf", "tensor 'classifier.weight'")


def refused_encoder(path, words):
    with pytest.raises(gg.ModelError, match=words):
        load_model(path, reserve=False)


def test_weights_that_are_no_numbers(llama, bert, tmp_path):
    norm = np.full(tiny_model.DIM, np.nan, np.float32)
    save_gguf(tmp_path / "nan.gguf", {**llama[0], "output_norm.weight": norm}, llama[1])
    with load_model(tmp_path / "nan.gguf", n_ctx=16) as m, pytest.raises(gg.ParamError, match="weights or the comput"):
        m.logits([1])
    tensors, metadata = bert
    save_gguf(tmp_path / "b.gguf", tensors, metadata)
    save_gguf(tmp_path / "nan.gguf", {**tensors, "token_embd_norm.bias": np.full(16, np.nan, np.float32)}, metadata)
    with load_model(tmp_path / "b.gguf") as good, load_model(tmp_path / "nan.gguf") as m:
        assert abs(np.linalg.norm(good.embed_ids([1, 2])) - 1) < 1e-6
        with pytest.raises(gg.ParamError, match="the weights or the computation are broken"):
            m.embed_ids([1, 2])


def test_a_model_is_not_pickled_and_says_what_to_do(tmp_path):
    with load_model(tiny_model.write(tmp_path / "tiny.gguf")) as m:
        for act in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(gg.TypeMismatch, match="Decoder of .*tiny.gguf cannot be .*pickled.*load_model it"):
                act(m)


def test_a_generation_says_how_far_it_is():
    with load_model() as m:
        g = m.generate([1, 2, 3], n_predict=2)
        assert repr(g) == "<Generation: 3 prompt tokens, 0 of 2 generated; iterate over it for the text>"


@pytest.mark.parametrize("texts,got", [(None, "NoneType"), (5, "int"), (["a", 5], "5"), ({"a": 1}, "dict")])
def test_embed_says_what_it_got(texts, got):
    with pytest.raises(gg.TypeMismatch, match=f"embed takes a list of strings, got {got}"):
        Encoder.embed(None, texts)
