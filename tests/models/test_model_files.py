"""Models that are not what they should be: typed errors that name the thing, nothing half-loaded."""
import gc
import types
import weakref

import numpy as np
import pytest
from helpers import tiny_model

import ggjit as gg
from ggjit.core.table import TABLE
from ggjit.models import load_model
from ggjit.models.files import gguf
from ggjit.models.text.sampling import Sampler
from ggjit.ops.core.traits import all_traits


def test_a_whole_model_computes_and_gives_everything_back(tmp_path):
    gc.collect()
    alive = TABLE.n_alive()
    with load_model(tiny_model.write(tmp_path / "m.gguf"), n_threads=1) as m:
        logits = m.logits([1, 2, 3])
        assert logits.shape == (3, tiny_model.VOCAB) and np.isfinite(logits).all()
        with pytest.raises(gg.GgjitError, match="vocab"):
            m.tokenize("text")
    del m
    gc.collect()
    assert TABLE.n_alive() == alive


@pytest.mark.parametrize("change,error,words", [
    ({"arch": "rwkv"}, gg.ModelError, "rwkv.*supported: bert"),
    ({"without": ("blk.1.ffn_up.weight",)}, gg.ModelError, "blk.1.ffn_up.weight.*missing"),
    ({"without": ("token_embd.weight",)}, gg.ModelError, "token_embd"),
    ({"shapes": {"blk.0.attn_k.weight": (64, 64)}}, gg.ModelError, r"attn_k.*\[64, 64\].*\[64, 32\]"),
    ({"shapes": {"output_norm.weight": (32,)}}, gg.ModelError, "output_norm"),
    ({"without": ("block_count",)}, gg.GgjitError, "block_count"),
    ({"metadata": {"block_count": 0}}, gg.ModelError, "block_count"),
    ({"metadata": {"attention.head_count_kv": 3}}, gg.ModelError, "heads"),
    ({"metadata": {"attention.head_count": 0}}, gg.ModelError, "head_count"),
    ({"metadata": {"rope.dimension_count": 7}}, gg.ModelError, "rope.dimension_count"),
    ({"metadata": {"block_count": 4_000_000_000}}, gg.ModelError, "block_count = 4000000000, expected at most"),
    ({"metadata": {"rope.freq_base": 0.0}}, gg.ModelError, "rope.freq_base"),
    ({"metadata": {"rope.freq_base": float("nan")}}, gg.ModelError, "rope.freq_base"),
    ({"metadata": {"rope.scaling.attn_factor": float("inf")}}, gg.ModelError, "attn_factor"),
    ({"metadata": {"rope.scaling.attn_factor": float("nan")}}, gg.ModelError, "attn_factor"),
    ({"metadata": {"rope.scaling.original_context_length": 2**32 - 1}}, gg.ModelError, "original_context_length"),
    ({"metadata": {"attention.layer_norm_rms_epsilon": -1.0}}, gg.ModelError, "epsilon"),
    ({"metadata": {"attention.layer_norm_rms_epsilon": float("nan")}}, gg.ModelError, "epsilon"),
])
def test_what_is_wrong_is_named_and_nothing_stays(tmp_path, change, error, words):
    gc.collect()
    alive = TABLE.n_alive()
    path = tiny_model.write(tmp_path / "m.gguf", **change)
    with pytest.raises(error, match=words):
        load_model(path, n_threads=1)
    gc.collect()
    assert TABLE.n_alive() == alive


@pytest.mark.parametrize("damage,options", [(lambda data: data[:-40000], {}), (bytes, {"n_ctx": -1}),
                                            (bytes, {"arena": 100})])
def test_a_file_that_is_refused_is_no_longer_mapped(tmp_path, monkeypatch, damage, options):
    """Without the garbage collector: a second try may need the addresses, and Windows keeps mapped files."""
    maps, real = [], gguf.map_file

    def noted(path):
        data, state = real(path)
        maps.append(weakref.ref(data))
        return data, state
    monkeypatch.setattr(gguf, "map_file", noted)
    path = tmp_path / "m.gguf"
    tiny_model.write(path)
    path.write_bytes(damage(path.read_bytes()))
    gc.disable()
    try:
        try:
            pytest.fail(f"{load_model(path, n_threads=1, **options)} was loaded")
        except gg.GgjitError:
            pass
        assert [m() for m in maps] == [None]
    finally:
        gc.enable()


def test_a_type_without_kernels_is_named(tmp_path, monkeypatch):
    served = {t: x for t, x in all_traits().items() if t is not gg.Q8_0}
    monkeypatch.setattr("ggjit.models.files.weights.all_traits", lambda: served)
    with pytest.raises(gg.ModelError, match="token_embd.*Q8_0.*no kernels"):
        load_model(tiny_model.write(tmp_path / "m.gguf", type="Q8_0"), n_threads=1)


@pytest.mark.parametrize("path,error,text", [
    (5, gg.TypeMismatch, "the path of a GGUF file, got int"),
    ("a\0b", gg.BadFile, "not a path of a file: .*embedded null"),
    ("\ud800", gg.BadFile, "not a path of a file: 'utf-8'")])
def test_bad_paths(path, error, text):
    with pytest.raises(error, match=text):
        load_model(path)


def test_an_absurd_batch_is_out_of_memory(tmp_path):
    path = tiny_model.write(tmp_path / "m.gguf", metadata={"context_length": 2**31})
    with pytest.raises(gg.OutOfMemory, match="n_batch"):
        load_model(path, n_ctx=2**22, n_batch=2**22)


def test_truncated_files(tmp_path):
    whole = tiny_model.write(tmp_path / "m.gguf").read_bytes()
    for n in (0, 10, 100, 1000, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut.gguf").write_bytes(whole[:n])
        with pytest.raises(gg.BadFile, match="bytes"):
            load_model(tmp_path / "cut.gguf")
    with pytest.raises(gg.BadFile, match="nowhere"):
        load_model(tmp_path / "nowhere.gguf")


def test_bad_numbers_in_weights_do_not_take_the_process_down(tmp_path):
    path = tiny_model.write(tmp_path / "m.gguf")
    with load_model(path, n_threads=2) as m:
        m.weights.file.map()[m.weights.file.data_offs:] = 0xFF          # private pages: NaN everywhere
        assert np.isnan(m.decode([1, 2], all_logits=True)).any()
        with pytest.raises(gg.ParamError, match="the weights or the computation are broken"):
            m.logits([1, 2])
        with pytest.raises(gg.ParamError, match="logit 0 is nan"):
            Sampler(temp=0.0).sample(m.decode([1, 2]))
        with pytest.raises(gg.ModelError, match="no vocabulary"):
            list(m.generate([1, 2], 3))


def test_an_absurd_context_length_of_training_computes_numbers(tmp_path):
    with load_model(tiny_model.write(tmp_path / "m.gguf", metadata={"context_length": 2**32 - 1})) as m:
        assert np.isfinite(m.logits([1, 2, 3])).all()


def test_a_model_freed_while_it_computes(tmp_path, python):
    r = python("""
import faulthandler, sys, threading, time, numpy as np, ggjit as gg
from ggjit.models import load_model
from ggjit.models.files import gguf
faulthandler.dump_traceback_later(50, exit=True)
for i in range(3):
    m, ended = load_model(sys.argv[1], n_threads=2), []
    def work():
        try:
            while True:
                m.logits(np.arange(60) % 48)
        except gg.GgjitError as e:
            ended.append(e)
    t = threading.Thread(target=work)
    t.start()
    time.sleep(0.02 + 0.01 * i)
    m.free()
    t.join()
    assert len(ended) == 1
""", tiny_model.write(tmp_path / "m.gguf"))
    assert r.returncode == 0, r.stderr[-1500:]


@pytest.mark.parametrize("started", [False, True])
def test_a_dropped_model_is_freed_without_the_collector(tmp_path, started):
    """Also in the middle of a text: the model's weights, cache and plans go with the last name."""
    gc.collect()
    gc.disable()
    try:
        path = tiny_model.write(tmp_path / "m.gguf")
        before = TABLE.n_alive()
        m = load_model(path, n_ctx=64, n_threads=1)
        decoder = types.SimpleNamespace(push=lambda token: "a", flush=lambda: "")
        m._tokenizer = types.SimpleNamespace(stop_ids=(), stream=lambda: decoder)      # the file has none
        text = m.generate([1, 2, 3], n_predict=4)
        if started:
            assert next(text) == "a"
        gone = weakref.ref(m)
        del m, text
        assert gone() is None and TABLE.n_alive() == before
    finally:
        gc.enable()
