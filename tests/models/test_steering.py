"""Adapters that are switched and scaled after loading, and control vectors: read, made, written, added."""
import json
import math
import subprocess
import sys

import gguf
import numpy as np
import pytest
from helpers import tiny_model
from helpers.paths import TESTS
from helpers.requirements import shared

import ggjit as gg
from ggjit.models import edit_gguf, load_control_vector, load_gguf, load_model, make_control_vector, save_gguf
from ggjit.models.files.adapter import new_adapter
from ggjit.models.files.control_vector import ControlVector
from ggjit.models.files.gguf import GGUFFile
from ggjit.models.networks.parts import steering
from ggjit.models.networks.parts.saved_state import fingerprint
from ggjit.models.networks.parts.steering import METHODS

IDS = np.random.default_rng(5).integers(0, tiny_model.VOCAB, 12).tolist()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """(model, adapter, another adapter)"""
    folder = tmp_path_factory.mktemp("steer")
    model, adapters = tiny_model.write(folder / "m.gguf", metadata={"vocab_size": tiny_model.VOCAB}), []
    for seed in (0, 1):
        adapter, rng = new_adapter(GGUFFile(model), ("attn_q", "ffn_down"), 4, 8), np.random.default_rng(seed)
        for _, up in adapter.pairs.values():
            up.set(0.3 * rng.standard_normal(up.shape, np.float32))
        adapter.save(folder / f"{seed}.gguf")
        adapters.append(folder / f"{seed}.gguf")
    return model, *adapters


@pytest.fixture
def m(files):
    with load_model(files[0], n_threads=1) as m:
        yield m


def logits(path, **options):
    with load_model(path, n_threads=1, **options) as m:
        return m.logits(IDS)


# ---------------------------------------------------------------- adapters
def test_adapters_set_later_are_those_of_loading(files, m):
    model, a, b = files
    plain = m.logits(IDS)
    for lora in ([(a, 0.5)], [(a, 2.0), (b, -1.0)], [b], str(a), [(b, 0.25), (a, 1.0)], []):
        m.set_lora(lora)
        assert m.n_past == 0
        np.testing.assert_array_equal(m.logits(IDS), logits(model, lora=lora))
    np.testing.assert_array_equal(m.logits(IDS), plain)
    assert m.weights.adapters == []


def test_a_scale_reads_no_file_again(files, m, monkeypatch):
    m.set_lora([(files[1], 1.0)])
    weights = m.weights.adapters[0]._weights
    m.set_lora([(files[1], 3.0)])
    assert m.weights.adapters[0]._weights is weights
    np.testing.assert_array_equal(m.logits(IDS), logits(files[0], lora=[(files[1], 3.0)]))


def test_what_does_not_fit_leaves_the_adapters_as_they_were(files, m, tmp_path):
    m.set_lora([(files[1], 0.5)])
    want = m.logits(IDS)
    other = tiny_model.write(tmp_path / "o.gguf", arch="qwen3")
    missing = tmp_path / "missing.gguf"
    for lora, error in (([(files[2], "much")], gg.ParamError), ([(files[1], math.nan)], gg.ParamError),
                        (5, gg.TypeMismatch), ("a.gguf", gg.BadFile), ([other], gg.BadFile),
                        ([files[2], missing], (gg.BadFile, OSError)), ([files[1], missing], (gg.BadFile, OSError))):
        with pytest.raises(error):
            m.set_lora(lora)
        np.testing.assert_array_equal(m.logits(IDS), want)
    m.free()
    with pytest.raises(gg.StaleHandle):
        m.set_lora([])


def test_memory_that_is_short_leaves_all_as_it_was(files, m, monkeypatch):
    """What is in use is given up when the new is in its place."""
    m.set_lora([(files[1], 0.5)])
    m.set_control_vectors([vector()])
    want = m.logits(IDS)

    def short(*_):
        raise gg.OutOfMemory("no room")
    with monkeypatch.context() as patch, pytest.raises(gg.OutOfMemory):
        patch.setattr(m, "_move_adapter", short)
        m.set_lora([files[2]])
    with monkeypatch.context() as patch, pytest.raises(gg.OutOfMemory):
        patch.setattr(steering, "from_numpy", short)
        m.set_control_vectors([vector(1)])
    m._steps.clear()                        # new plans read the same leaves
    m.reset()
    np.testing.assert_array_equal(m.logits(IDS), want)


def test_a_quantised_copy_has_what_was_set(files, m):
    m.set_lora([(files[1], 0.5)])
    m.set_control_vectors([vector()])
    with m.quantize("Q8_0") as q, load_model(files[0], n_threads=1, lora=[(files[1], 0.5)]).quantize("Q8_0") as other:
        assert fingerprint(q) not in (fingerprint(m), fingerprint(other))
        other.set_control_vectors([vector()])
        assert fingerprint(q) == fingerprint(other)
        got = q.logits(IDS)
        np.testing.assert_array_equal(got, other.logits(IDS))
        assert abs(got - m.logits(IDS)).max() < 0.1 < abs(got - logits(files[0])).max()


def test_the_parts_of_a_model_are_looked_at(files, m, tmp_path):
    """A state of a file fits the same in parts, and no other model in such parts."""
    tensors, metadata = load_gguf(files[0])
    values = {name: t.numpy() for name, t in tensors.items()}
    changed = "blk.1.ffn_down.weight"
    save_gguf(tmp_path / "other.gguf", values | {changed: 2 * values[changed]}, metadata)
    found = []
    for path, name in ((files[0], "a"), (tmp_path / "other.gguf", "b")):
        parts = edit_gguf(path, tmp_path / f"{name}.gguf", max_nbytes=100_000, progress=False)["paths"]
        with load_model(parts[0], n_threads=1) as model:
            assert len(parts) > 1 and model.file.tensors[changed].part
            found.append(fingerprint(model))
    assert fingerprint(m) == found[0] != found[1]


def test_a_state_is_of_the_vectors_it_was_made_with(m):
    m.logits(IDS)
    plain = m.save_state()
    m.set_control_vectors([vector()])
    with pytest.raises(gg.ModelError, match="another model"):
        m.load_state(plain)
    m.logits(IDS)
    state = m.save_state()
    m.set_control_vectors([2 * vector()])
    with pytest.raises(gg.ModelError, match="another model"):
        m.load_state(state)
    m.set_control_vectors([vector()])
    m.load_state(state)


# ---------------------------------------------------------------- control vectors
def vector(seed=0, layers=(1,)):
    rng = np.random.default_rng(seed)
    return ControlVector({i: rng.standard_normal(tiny_model.DIM).astype(np.float32) for i in layers}, "llama")


def test_a_vector_is_added_to_what_a_layer_gives_on(m):
    plain, v, w = m.logits(IDS), vector(), vector(1)
    m.set_control_vectors([(v, 0.5), w])
    got = m.logits(IDS)
    single = np.stack([m.decode([i]) for i in IDS[:1]]) if m.reset() is None else None
    m.set_control_vectors()
    d = 0.5 * v.directions[1] + w.directions[1]
    with m.patch({"blk.1.l_out": lambda x: x + d}):
        want = m.logits(IDS)
    np.testing.assert_allclose(got, want, atol=1e-4)
    np.testing.assert_allclose(single, got[:1], atol=1e-4)
    assert abs(got - plain).max() > 0.1
    np.testing.assert_array_equal(m.logits(IDS), plain)
    with pytest.raises(gg.ParamError, match="last must be an integer from 1 to 1 .first is 1., got 0"):
        m.set_control_vectors([(v, 0.5)], first=1, last=0)


_PEER = """
import ctypes as C, json, sys
import numpy as np
sys.path.insert(0, sys.argv[1])
from peer_llamacpp import LlamaLib
path, data, ids = sys.argv[2], np.load(sys.argv[3]), json.loads(sys.argv[4])
lib = LlamaLib()
c = lib.load(path).context(n_ctx=64, flash=0, kv=0)
c.L.llama_set_adapter_cvec.argtypes = [C.c_void_p, C.c_void_p, C.c_size_t, C.c_int32, C.c_int32, C.c_int32]
flat = np.ascontiguousarray(data, np.float32)
assert c.L.llama_set_adapter_cvec(c.h, flat.ctypes.data, flat.size, flat.shape[1], 1, len(flat)) == 0
np.save(sys.argv[5], c.decode(ids, all_logits=True))
"""


@pytest.mark.peer
def test_as_llama_cpp(tmp_path, need):
    need("xllamacpp", "llama.cpp is the oracle")
    path, v = tiny_model.write(tmp_path / "m.gguf", metadata={"vocab_size": tiny_model.VOCAB}), vector()
    np.save(tmp_path / "v.npy", np.stack([v.directions[1]]))
    r = subprocess.run([sys.executable, "-c", _PEER, shared("tools"), path, tmp_path / "v.npy", json.dumps(IDS),
                        tmp_path / "out.npy"], cwd=TESTS, text=True, capture_output=True, timeout=300)
    assert r.returncode == 0, r.stderr[-2000:]
    want = np.load(tmp_path / "out.npy")
    with load_model(path, n_threads=1, kv_type="F32", flash=False) as m:
        m.set_control_vectors([v])
        got = m.logits(IDS)
    assert abs(got - want).max() <= 3e-4 * abs(want).max()


def test_a_file_is_read_as_it_was_written(m, tmp_path):
    v = vector(3, (1,))
    v.save(tmp_path / "v.gguf")
    got = load_control_vector(tmp_path / "v.gguf")
    assert got.arch == "llama" and got.directions.keys() == {1}
    np.testing.assert_array_equal(got.directions[1], v.directions[1])
    file = gguf.GGUFReader(tmp_path / "v.gguf")
    assert [t.name for t in file.tensors] == ["direction.1"]
    assert file.fields["controlvector.model_hint"].contents() == "llama"
    assert file.fields["controlvector.layer_count"].contents() == 2
    m.set_control_vectors([(tmp_path / "v.gguf", 2.0)])
    want = m.logits(IDS)
    m.set_control_vectors([2 * v])
    np.testing.assert_array_equal(m.logits(IDS), want)


@pytest.mark.parametrize("method", METHODS)
def test_a_made_vector_leads_from_one_side_to_the_other(method):
    with load_model(None, n_threads=1, n_ctx=64) as m:
        sides = [f"{name} was {word}" for name in ("Elizabeth", "Jane", "The house") for word in ("",)]
        positive, negative = [s + "happy and glad" for s in sides], [s + "sad and angry" for s in sides]
        before = m.logits(positive[0])
        v = make_control_vector(m, positive, negative, method)
        np.testing.assert_array_equal(m.logits(positive[0]), before)
        assert v.directions.keys() == set(range(1, m.n_layer))
        for i, d in v.directions.items():
            ends = [np.stack([m.capture([f"blk.{i}.l_out"], t)[f"blk.{i}.l_out"].reshape(-1, m.n_embd)[-1]
                              for t in side]) for side in (positive, negative)]
            apart = (ends[0] - ends[1]).astype(np.float64)
            assert abs(np.linalg.norm(d) - 1) < 1e-5 and apart.mean(0) @ d > 0
            if method == "mean":
                np.testing.assert_allclose(d, apart.mean(0) / np.linalg.norm(apart.mean(0)), atol=1e-4)
            else:                           # no other direction holds more of the differences
                assert ((apart @ d) ** 2).sum() >= ((apart @ (apart.mean(0) / np.linalg.norm(apart.mean(0)))) ** 2
                                                    ).sum() * (1 - 1e-6)
        # the text of one side becomes likelier than that of the other
        apart = []
        for strength in (-4.0, 0.0, 4.0):
            m.set_control_vectors([(v, strength)])
            happy, sad = (m.score(f"Elizabeth was {word}").logprob for word in ("happy", "sad"))
            apart.append(happy - sad)
        assert apart[0] < apart[1] < apart[2]


@pytest.mark.parametrize(("vectors", "error", "words"), [
    ([vector(0, (2,))], gg.ParamError, "takes those of layers 1 to 1"),
    ([ControlVector({1: np.zeros(7, np.float32)})], gg.ModelError, "7 numbers.*use the model it was made with"),
    ([(vector(), "strong")], gg.ParamError, "factor of a control vector"), ("v.gguf", gg.TypeMismatch, "list of"),
    (5, gg.TypeMismatch, "list of")])
def test_vectors_that_do_not_fit_are_refused(vectors, error, words, m):
    m.set_control_vectors([vector()])
    want = m.logits(IDS)
    with pytest.raises(error, match=words):
        m.set_control_vectors(vectors)
    np.testing.assert_array_equal(m.logits(IDS), want)


@pytest.mark.parametrize(("tensors", "metadata", "words"), [
    ({"direction.1": np.ones(4, np.float32)}, {"general.architecture": "llama"}, "not a control vector"),
    ({"direction.0": np.ones(4, np.float32)}, {}, "not a direction of a layer from 1 on"),
    ({"up.1": np.ones(4, np.float32)}, {}, "not a direction"), ({}, {}, "holds no directions"),
    ({"direction.1": np.float32([1, np.nan])}, {}, "finite F32"),
    ({"direction.1": np.ones((2, 2), np.float32)}, {}, "finite F32")])
def test_files_that_are_none_are_refused(tensors, metadata, words, tmp_path):
    save_gguf(tmp_path / "v.gguf", tensors, {"general.architecture": "controlvector", **metadata})
    with pytest.raises(gg.BadFile, match=words):
        load_control_vector(tmp_path / "v.gguf")


def test_sides_that_make_no_pairs_are_refused(m):
    for sides, error in ((([], []), gg.ParamError), ((["a"], []), gg.ParamError), (("a", "b"), gg.TypeMismatch)):
        with pytest.raises(error):
            make_control_vector(m, *sides)
    with pytest.raises(gg.ParamError, match="method must be one of"):
        make_control_vector(m, ["a"], ["b"], "best")
    with pytest.raises(gg.TypeMismatch, match="takes a loaded model, got str"):
        make_control_vector("m.gguf", ["a"], ["b"])


def test_an_encoder_takes_no_vectors(tmp_path):
    with load_model(tiny_model.write(tmp_path / "e.gguf", arch="llada"), n_threads=1) as m:
        with pytest.raises(gg.NotSupported, match="take no control vectors"):
            make_control_vector(m, ["a"], ["b"])
