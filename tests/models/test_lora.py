"""LoRA adapters: what they compute, their files, and what is refused."""
import json
import subprocess
import sys

import numpy as np
import pytest
from helpers import arch_files, devices, tiny_model, tiny_moe
from helpers.paths import ROOT

import ggjit as gg
from ggjit.models import edit_gguf, load_gguf, load_model, save_gguf
from ggjit.models.files.adapter import new_adapter, targets_of
from ggjit.models.files.gguf import GGUFFile

IDS = np.random.default_rng(5).integers(0, tiny_model.VOCAB, 12)
TARGETS = ("attn_q", "attn_output", "ffn_down")
KEYS = {"general.architecture": "llama", "general.type": "adapter", "adapter.type": "lora",
        "adapter.lora.alpha": np.float32(8)}
Q = "blk.0.attn_q.weight"
PAIR = {Q + ".lora_a": (4, tiny_model.DIM), Q + ".lora_b": (tiny_model.DIM, 4)}     # NumPy order


def write_adapter(model, path, seed=0, targets=TARGETS):
    adapter, rng = new_adapter(GGUFFile(model), targets, 4, 8), np.random.default_rng(seed)
    for _, up in adapter.pairs.values():
        up.set(0.3 * rng.standard_normal(up.shape, np.float32))
    adapter.save(path)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """(model, adapter, another adapter)"""
    folder = tmp_path_factory.mktemp("lora")
    model = tiny_model.write(folder / "m.gguf", metadata={"vocab_size": tiny_model.VOCAB})
    return model, write_adapter(model, folder / "a.gguf"), write_adapter(model, folder / "b.gguf", 1)


def logits(path, **options):
    with load_model(path, n_threads=1, **options) as m:
        return m.logits(IDS)


def test_as_the_weights_with_the_products_added(files, tmp_path):
    model, *adapters = files
    lora = list(zip(adapters, (0.5, -1.0), strict=True))
    weights, about = load_gguf(model)
    merged = {name: w.numpy().copy() for name, w in weights.items()}
    for path, scale in lora:
        parts, keys = load_gguf(path)
        for name in {n.rsplit(".", 1)[0] for n in parts}:
            low, up = (parts[name + end].numpy() for end in (".lora_a", ".lora_b"))
            merged[name] += scale * keys["adapter.lora.alpha"] / len(low) * (up @ low)
    save_gguf(tmp_path / "merged.gguf", merged, {k: v for k, v in about.items() if not k.startswith("GGUF")})
    expected, got = logits(tmp_path / "merged.gguf"), logits(model, lora=lora)
    assert np.abs(got - expected).max() < 2e-4 < 0.1 < np.abs(got - logits(model)).max()


def test_adapters_are_merged_into_a_file(files, tmp_path):
    """In the weights' own type, or another; what they do not name keeps its bytes."""
    model, *adapters = files
    lora = list(zip(adapters, (0.5, -1.0), strict=True))
    edit_gguf(model, tmp_path / "merged.gguf", lora=lora, progress=False)
    want = logits(model, lora=lora)
    assert np.abs(logits(tmp_path / "merged.gguf") - want).max() < 2e-4
    edit_gguf(model, tmp_path / "q.gguf", set_types={Q: "q8_0"}, lora=lora, progress=False)
    before, after = (load_gguf(path)[0] for path in (model, tmp_path / "q.gguf"))
    assert repr(after[Q].type) == "Q8_0" and np.abs(logits(tmp_path / "q.gguf") - want).max() < 0.1
    changed = {name for name in before if after[name].bytes() != before[name].bytes()}
    assert changed == {name for name in before if name.split(".")[-2] in TARGETS}
    with pytest.raises(gg.BadFile, match="is not a LoRA adapter"):
        edit_gguf(model, tmp_path / "no.gguf", lora=[model], progress=False)
    assert not (tmp_path / "no.gguf").exists()


def test_what_is_merged_into_a_matrix_with_a_scale(tmp_path, shared):
    """BitNet's: products are multiplied by it, those of adapters are not."""
    model, merged = tmp_path / "m.gguf", tmp_path / "merged.gguf"
    arch_files.write(shared("tools"), "bitnet", model)
    adapter = write_adapter(model, tmp_path / "a.gguf", targets=("attn_q", "ffn_up", "ffn_down"))
    edit_gguf(model, merged, lora=[(adapter, 0.5)], progress=False)
    want = logits(model, lora=[(adapter, 0.5)])
    assert abs(want - logits(model)).max() > 0.1 and abs(want - logits(merged)).max() < 1e-3 * abs(want).max()


@pytest.fixture(scope="module")
def of_experts(tmp_path_factory):
    """(a model of experts with an output of its own, an adapter of them, of routers, the embedding and the output)"""
    folder, rng = tmp_path_factory.mktemp("experts"), np.random.default_rng(3)
    model = tiny_moe.write(folder / "m.gguf", more={"output.weight": (tiny_model.VOCAB, tiny_model.DIM)})
    tensors = {}
    for name, info in GGUFFile(model).tensors.items():
        n_in, n_out, *n_experts = info.ne if len(info.ne) > 1 else (0, 0)
        if name == "token_embd.weight":
            shapes = (n_out, 4), (n_in, 4)
        elif "_exps" in name or ".attn_q." in name or "gate_inp" in name or name == "output.weight":
            shapes = (*n_experts, 4, n_in), (*n_experts, n_out, 4)
        else:
            continue
        for end, shape in zip((".lora_a", ".lora_b"), shapes, strict=True):
            tensors[name + end] = 0.3 * rng.standard_normal(shape, np.float32)
    save_gguf(folder / "a.gguf", tensors, KEYS)
    return model, folder / "a.gguf"


def test_experts_and_the_embedding_have_adapters(of_experts, tmp_path):
    model, adapter = of_experts
    edit_gguf(model, tmp_path / "merged.gguf", lora=[(adapter, 0.5)], progress=False)
    expected, got = logits(tmp_path / "merged.gguf"), logits(model, lora=[(adapter, 0.5)])
    assert np.abs(got - expected).max() < 2e-4 < 0.1 < np.abs(got - logits(model)).max()


def test_scale_0_changes_nothing_and_a_path_alone_has_scale_1(files):
    model, a, _ = files
    assert (logits(model, lora=[(a, 0)]) == logits(model)).all()
    assert (logits(model, lora=[a]) == logits(model, lora=((a, 1.0),))).all()


def test_adapters_lie_where_their_weights_do(files):
    """Of a layer on a GPU; all of it is given back."""
    device = devices.Fake("A")
    with load_model(files[0], backend=device.init_backend(), n_threads=1, n_gpu_layers=1, lora=[files[1]]) as m:
        got, (first, last) = m.logits(IDS), (layer["attn_q"][2][0] for layer in m.layers)
        assert first.buffer.buft.is_host() and not last.buffer.buft.is_host()
    assert (got == logits(files[0], lora=[files[1]])).all() and device.used == 0


CODE = """
import json, sys
import numpy as np
from benchmarks.worker import Worker
from ggjit.models import load_model
model, adapter, *ids = sys.argv[1:]
ids, lora = list(map(int, ids)), [[adapter, 0.5]]
with Worker("engines.peer") as peer, load_model(model, n_threads=1, lora=lora) as m:
    peer.ask("load", model, n_threads=1, n_ctx=64, lora=lora)
    theirs, ours = np.array(peer.ask("logits", ids)), m.logits(ids)[-1].astype(float)
print(json.dumps(((ours - theirs) ** 2).sum() / (theirs ** 2).sum()))
"""


def nmse_to_llama_cpp(*pair):
    r = subprocess.run([sys.executable, "-c", CODE, *map(str, (*pair, *IDS))], cwd=ROOT, text=True,
                       capture_output=True, timeout=300)
    assert r.returncode == 0, r.stderr
    return json.loads(r.stdout.splitlines()[-1])


@pytest.mark.peer
@pytest.mark.parametrize("kind", ["files", "of_experts"])
def test_as_llama_cpp(kind, request, need):
    need("xllamacpp", "llama.cpp is the oracle")
    assert nmse_to_llama_cpp(*request.getfixturevalue(kind)[:2]) < 1e-5


@pytest.mark.peer
@pytest.mark.parametrize("arch", ["qwen2", "qwen3moe", "gemma", "gemma3", "gpt2", "gpt-oss", "grovemoe"])
def test_every_matrix_of_an_architecture_as_llama_cpp(arch, tmp_path, shared, need):
    need("xllamacpp", "llama.cpp is the oracle")
    model = tmp_path / "m.gguf"
    arch_files.write(shared("tools"), arch, model)
    adapter = write_adapter(model, tmp_path / "a.gguf", targets=list(targets_of(GGUFFile(model))))
    assert np.abs(logits(model, lora=[adapter]) - logits(model)).max() > 0.1
    assert nmse_to_llama_cpp(model, adapter) < 1e-5


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "F16"])
def test_beside_weights_in_a_layout_of_their_own_and_in_the_mapped_file(kind, tmp_path):
    model = tiny_model.write(tmp_path / "m.gguf", type=kind, metadata={"vocab_size": tiny_model.VOCAB})
    before, lora = model.read_bytes(), [write_adapter(model, tmp_path / "a.gguf"), (tmp_path / "a.gguf", 0.25)]
    packed, plain = (logits(model, lora=lora, repack=repack) for repack in (True, False))
    once = logits(model, lora=[(tmp_path / "a.gguf", 1.25)], repack=False)      # two at once are their sum
    for other in (packed, once):
        assert np.square(other - plain).sum() < 1e-5 * np.square(plain).sum()
    assert np.abs(plain - logits(model, repack=False)).max() > 0.1
    assert model.read_bytes() == before


def test_an_adapter_cut_off_anywhere_is_refused(files, tmp_path):
    whole, bad = files[1].read_bytes(), tmp_path / "a.gguf"
    for cut in (*range(0, len(whole) - 1, 997), len(whole) - 1):
        bad.write_bytes(whole[:cut])
        with pytest.raises(gg.BadFile):
            load_model(files[0], lora=[bad])


BAD = {
    "no adapter": (dict(PAIR), {"general.type": "model"}, gg.BadFile, "not a LoRA adapter: general.type is 'model'"),
    "another kind": (dict(PAIR), {"adapter.type": "control_vector"}, gg.BadFile, "adapter.type 'control_vector'"),
    "another architecture": (dict(PAIR), {"general.architecture": "gemma"}, gg.ModelError, "architecture 'gemma'"),
    "on words": (dict(PAIR), {"adapter.alora.invocation_tokens": [1, 2]}, gg.NotSupported, "switched on by words"),
    "a tensor the model lacks": ({n.replace("blk.0", "blk.9"): s for n, s in PAIR.items()}, {}, gg.ModelError,
                                 "'blk.9.attn_q.weight', which .* does not have"),
    "another width": (PAIR | {Q + ".lora_a": (4, 32)}, {}, gg.ModelError, r"\[32, 4\] .* do not fit \[64, 64\]"),
    "two ranks": (PAIR | {Q + ".lora_b": (tiny_model.DIM, 8)}, {}, gg.BadFile, "different rank"),
    "one of two": ({Q + ".lora_a": (4, 64)}, {}, gg.BadFile, "one matrix of two"),
    "nothing": ({}, {}, gg.BadFile, "no matrices"),
    "a norm": (PAIR | {"output_norm.weight": (64,)}, {}, gg.BadFile, "'output_norm.weight' are not matrices"),
    "an embedding that makes logits": ({"token_embd.weight.lora_a": (48, 4), "token_embd.weight.lora_b": (64, 4)}, {},
                                       gg.NotSupported, "also makes its logits from"),
    "alpha": (dict(PAIR), {"adapter.lora.alpha": np.float32("nan")}, gg.BadFile, "adapter.lora.alpha is nan"),
}


@pytest.mark.parametrize("case", BAD)
def test_refused(files, tmp_path, case):
    tensors, keys, error, words = BAD[case]
    save_gguf(tmp_path / "bad.gguf", {n: np.ones(s, np.float32) for n, s in tensors.items()}, KEYS | keys)
    with pytest.raises(error, match=words):
        load_model(files[0], lora=[(files[1], 1.0), (tmp_path / "bad.gguf", 1.0)])


@pytest.mark.parametrize("lora, error, words", [
    ("none.gguf", gg.BadFile, "none.gguf: No such file"), (7, gg.TypeMismatch, "lora is"),
    ([None], gg.TypeMismatch, "got None in it"), ([("a.gguf", 1, 2)], gg.TypeMismatch, "paths and of .path, scale."),
    ([("no such file", 1.0)], gg.BadFile, "check the path"),
    ([("a.gguf", float("nan"))], gg.ParamError, "scale must be a finite number, got nan"),
    ([("a.gguf", "much")], gg.ParamError, "lora: scale must be a finite number")])
def test_refused_arguments(files, lora, error, words):
    with pytest.raises(error, match=words):
        load_model(files[0], lora=lora)


@pytest.mark.parametrize("dtype", [np.int32, np.float64])
def test_numbers_of_a_type_that_is_not_multiplied(files, tmp_path, dtype):
    save_gguf(tmp_path / "bad.gguf", {n: np.ones(s, dtype) for n, s in PAIR.items()}, KEYS)
    with pytest.raises(gg.BadFile, match="lora_a and .lora_b are .*, floats or a quantised type are expected"):
        load_model(files[0], lora=[tmp_path / "bad.gguf"])


def test_matrices_that_take_no_adapter_are_named(files, tmp_path):
    """Of a bert, whose products are its own."""
    model = GGUFFile(files[0])
    adapter = new_adapter(model, ["attn_q"], 2, 2)
    with pytest.raises(gg.NotSupported, match="'blk.0.attn_q.weight', .* take no adapter"):
        adapter.refuse_unused()
    with pytest.raises(gg.ParamError, match="beside 'attn_z'; in .* beside attn_q, attn_k"):
        new_adapter(model, ["attn_z"], 2, 2)
    with pytest.raises(gg.ParamError, match="rank 65 is more than"):
        new_adapter(model, ["attn_q"], 65, 2)
