"""load_model(..., arena=): whatever is read takes no more, with the same bits; too little says how much is enough."""
import importlib.util
import warnings

import numpy as np
import pytest
from helpers import small_bert, tiny_model

import ggjit as gg
from ggjit.models import load_model
from ggjit.models.files import minilm
from ggjit.models.networks.peak import model_peak

N_CTX = 1024
IDS = np.random.default_rng(5).integers(0, tiny_model.VOCAB, 900)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("arena") / "tiny.gguf", metadata={"context_length": N_CTX})


@pytest.fixture(scope="module")
def whole(path):
    """(bytes of the arena, logits of all tokens, logits of a token behind them) without a limit."""
    with load_model(path, n_threads=1) as m:
        last = m.decode(IDS)
        after = m.decode([7])
        return m.compute_nbytes, m.logits(IDS), last, after


@pytest.mark.parametrize("share", [1.0, 0.6])
def test_a_long_prompt_in_a_small_arena(path, whole, share):
    peak, logits, last, after = whole
    with load_model(path, n_threads=1, arena=int(share * peak)) as m:
        assert (m.decode(IDS) == last).all() and (m.decode([7]) == after).all()
        assert (m.logits(IDS) == logits).all()
        m._tokenizer = tiny_model.Words()
        texts = m.generate([IDS[:30].tolist(), IDS[5:200].tolist()], 4)
        list(texts)
        assert 0 < m.compute_nbytes <= share * peak and m.arena.nbytes == int(share * peak)
        assert m.n_batch == (512 if share == 1 else 256)
        announced = model_peak(path, flash=True, planner="ggml", arena=int(share * peak)).memory.terms["compute"]
        assert announced <= share * peak


def test_too_little_says_how_much_is_enough(path, whole):
    with pytest.raises(gg.BudgetError, match="are too few for 256 tokens") as e:
        load_model(path, n_threads=1, arena="2K")
    least = e.value.minimum
    with load_model(path, n_threads=1, arena=least) as m:
        assert (m.decode(IDS) == whole[2]).all() and m.compute_nbytes <= least < 0.6 * whole[0]
    with pytest.raises(gg.ParamError, match="a size is a number of bytes"):
        load_model(path, arena="much")
    with pytest.raises(gg.ParamError, match="arena is of one device"):
        model_peak(path, arena="1M", devices={"GPU0": "1G"})


def test_an_encoder_computes_rows_of_all_layers_at_a_time(tmp_path):
    """Its tokens are read at once, and every layer is as large as the others."""
    small_bert.package(tmp_path / "package", intermediate_size=512, num_hidden_layers=4, max_position_embeddings=256)
    path = tmp_path / "bert.gguf"
    minilm.convert(tmp_path / "package", path)
    with load_model(path, n_threads=1) as m:
        ids = np.random.default_rng(1).integers(0, m.n_vocab, m.n_ctx)
        want, peak = m.embed_ids(ids), m.compute_nbytes
    with load_model(path, n_threads=1, arena=int(0.6 * peak)) as m:
        small = m.within_arena(m.largest_graph())
        assert small.n_chunks > 1 and small.same_bits
        assert (m.embed_ids(ids) == want).all() and m.compute_nbytes <= 0.6 * peak
        assert (m.embed_ids(ids[:3]) == m.embed_ids(ids[:3])).all()


def test_bytes_against_time_in_one_call(path, whole):
    found = gg.pareto(path, IDS, shares=(0.6, 0.001), repeats=1, n_threads=1)
    free, small, least = found
    assert free.nbytes > whole[0] and free.share is None and "ggml's plan" in free.how
    assert small.nbytes <= 0.6 * free.nbytes and small.same_bits and small.seconds > 0
    assert least.seconds is None and load_model(path, n_ctx=N_CTX, n_batch=len(IDS), arena=least.nbytes).free() is None
    assert f"{len(IDS)} tokens" in str(found) and "too small" in str(found)
    if importlib.util.find_spec("matplotlib"):
        assert len(found.plot().lines[0].get_xdata()) == 2
    for bad in ({"text": []}, {"text": 0}, {"shares": (0,)}, {"shares": 2}, {"repeats": 0}, {"arena": "1G"}):
        with pytest.raises(gg.ParamError):
            gg.pareto(path, **{"text": 8, **bad})
    with pytest.raises(gg.TypeMismatch, match="clock is a function"):
        gg.pareto(path, 8, clock=1)
    assert gg.pareto(path, 8, shares=(x for x in [1e-12]), repeats=1)[1].how == "too small"
    with pytest.raises(gg.TypeMismatch, match=r"gg.measure\(graph\).pareto\(\)"):
        gg.pareto(gg.Graph(gg.sqr(gg.tensor([1.0]))))


def test_what_a_model_warns_of_is_told_once_though_it_is_loaded_for_every_arena(path):
    before = list(warnings.filters)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        filters = list(warnings.filters)
        found = gg.pareto(path, N_CTX + 8, shares=(0.9, 1e-12), repeats=1, n_threads=1, override_tensor={"expz": "CPU"})
        assert warnings.filters == filters
        warnings.warn("of the user", gg.GgjitWarning, stacklevel=1)
    assert len(found) == 3 and warnings.filters == before
    texts = [str(w.message) for w in told]
    assert [sum(words in text for text in texts) for words in ("expz", "trained", "of the user")] == [1, 1, 1]
    assert all(w.filename == __file__ for w in told) and len(told) == 3
