"""T5: a text is encoded once, the decoder writes another one about it."""
import numpy as np
import pytest
from helpers import arch_files
from helpers.requirements import shared
from helpers.tiny_model import Words

import ggjit as gg
from ggjit.models import finetune, load_gguf, load_model, save_gguf
from ggjit.models.networks.peak import model_peak

LONG = [9, 8, 7, 6, 5, 4, 3, 2] * 3


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("t5") / "m.gguf"
    arch_files.write(shared("tools"), "t5", path)
    return path


def loaded(path, **options):
    m = load_model(path, **{"n_threads": 1, "n_ctx": 64, "reserve": False, "kv_type": "F32", **options})
    m._tokenizer = Words()
    return m


def written_about(m, encoded, n):
    """The likeliest n tokens, one by one."""
    m.encode(encoded)
    logits, out = m.decode([m.start_id]), []
    for _ in range(n):
        out.append(int(logits.argmax()))
        logits = m.decode(out[-1:])
    return out


def test_generations_keep_to_the_text_that_was_encoded_for_them(path):
    with loaded(path) as m:
        want = [written_about(m, ids, 6) for ids in (arch_files.ENCODED, LONG)]
        assert want[0] != want[1]
        runs = [m.generate(ids, 6, temp=0) for ids in (arch_files.ENCODED, LONG)]
        for _ in range(3):                                      # in turn: each is encoded again
            for run in runs:
                next(run)
        for run in runs:
            list(run)
        assert [run.stats["tokens"] for run in runs] == want
        assert runs[0].stats["prompt_tokens"] == 1


def test_what_was_encoded_is_part_of_a_saved_state(path):
    with loaded(path) as m:
        m.encode(LONG)
        m.decode([m.start_id, 4, 9])
        state, want = m.save_state(), m.decode([17, 5])
    with loaded(path) as m:
        m.encode(arch_files.ENCODED)
        m.load_state(state)
        assert m.n_encoded == len(LONG)
        np.testing.assert_array_equal(m.decode([17, 5]), want)
    with loaded(path, n_ctx=80) as m, pytest.raises(gg.ParamError, match="n_ctx=64"):
        m.load_state(state)


def test_encoder_results(path):
    with loaded(path) as m:
        e = m.encode(LONG)
        assert e.shape == (len(LONG), m.n_embd) and np.isfinite(e).all()
        assert abs(m.encode(LONG[::-1]) - e).max() > 1e-3
        np.testing.assert_array_equal(m.encode(LONG), e)


def test_tokens_behind_dropped_ones_move_forward(tmp_path):
    """With one layer, keys and values know no other tokens: it is as if those that stay had been read alone."""
    arch_files.write(shared("tools"), "t5", tmp_path / "m.gguf", layers=1)
    with loaded(tmp_path / "m.gguf", n_batch=8) as m:
        m.encode(LONG)
        ids = [m.start_id, *range(20, 50)]
        m.decode(ids)
        m.shift_context(1, 12)
        got = m.decode([60])
        m.reset()
        m.decode(ids[:1] + ids[13:])
        np.testing.assert_allclose(got, m.decode([60]), atol=1e-4)


@pytest.mark.parametrize("n_batch", [4, 64])
def test_memory_is_set_aside_for_the_encoder_too(path, n_batch):
    with loaded(path, n_batch=n_batch, reserve=True) as m:
        held = m.compute_nbytes
        m.encode([3] * 64)
        m.decode([4] * 64)
        assert m.compute_nbytes == held
    peak = model_peak(path, n_ctx=64, n_batch=n_batch, flash=True, kv_type="F32", planner="ggml").kinds["compute"]
    assert peak <= held <= 1.3 * peak


def test_values_inside(path):
    with loaded(path) as m:
        m.encode(LONG)
        plain = m.logits([3, 4, 5])
        got = m.capture("blk.*.cross_attn_out", [3, 4, 5])
        assert [a.shape for a in got.values()] == [(3, m.n_embd)] * m.n_layer
        with m.patch({"blk.0.cross_attn_out": lambda x: 0 * x}):
            assert abs(m.logits([3, 4, 5]) - plain).max() > 1e-3
        np.testing.assert_array_equal(m.logits([3, 4, 5]), plain)


def test_what_does_not_fit_is_refused(path, tmp_path):
    with loaded(path) as m:
        with pytest.raises(gg.ParamError, match="nothing was encoded.*m.encode"):
            m.decode([3])
        with pytest.raises(gg.NotSupported, match="t5 models write about another text"):
            finetune(path, tmp_path / "text.txt", tmp_path / "out.gguf")
        with pytest.raises(gg.ParamError, match="one text at a time; call generate for each of the 2 prompts"):
            m.generate([[1, 2], [3]])
        with pytest.raises(gg.IndexRangeError, match="token id 96"):
            m.encode([96])
        with pytest.raises(gg.ParamError, match="65 tokens do not fit"):
            m.encode([1] * 65)
        for prompt in (5, None, [], [3.5]):
            with pytest.raises(gg.ParamError, match="a non-empty list of integers"):
                m.generate(prompt)
        assert m.n_encoded == 0
    with pytest.raises(gg.ParamError, match="n_seqs = 2"):
        loaded(path, n_seqs=2)
    tensors, metadata = load_gguf(path)
    save_gguf(tmp_path / "m.gguf", tensors, {**metadata, "t5.decoder_start_token_id": 96})
    with pytest.raises(gg.IndexRangeError, match="decoder_start_token_id 96"):
        loaded(tmp_path / "m.gguf")
