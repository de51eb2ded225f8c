"""Many texts at once: rows, masks, slots; results equal to those of a text alone."""
import signal

import numpy as np
import pytest
from helpers import arch_files, tiny_model
from helpers.requirements import shared
from helpers.sample import sampled
from helpers.tiny_model import Words

import ggjit as gg
from ggjit.models import load_model
from ggjit.models.networks.parts.kv_cells import KVCells
from ggjit.models.networks.peak import model_peak

PROMPTS = [[5, 6, 7, 8, 9], list(range(40)), [1], [3, 9] * 10, [7, 7, 1], list(range(30, 2, -1)), [2, 4, 6], [11, 12]]


def loaded(path, **options):
    m = load_model(path, **{"n_threads": 1, "reserve": False, "kv_type": "F32", "n_batch": 16, **options})
    m._tokenizer = Words()
    return m


def written(name, tmp_path):
    if name == "tiny":
        return tiny_model.write(tmp_path / "m.gguf", metadata={"context_length": 256})
    arch_files.write(shared("tools"), name, tmp_path / "m.gguf")
    return tmp_path / "m.gguf"


def alone(m, prompts, n=6):
    out = []
    for prompt in prompts:
        run = m.generate(prompt, n, temp=0)
        list(run)
        out.append(run.stats["tokens"])
    return out


# ---------------------------------------------------------------- rows and masks
def seen_by_definition(cells, window, texts, columns, text, position):
    """The mask of a token: what lies in each row, looked at one by one."""
    out = np.full(columns, -np.inf, np.float32)
    mapping = text.mappings[window]
    for p in range(max(0, position - window + 1) if window else 0, position + 1):
        row = mapping.rows[p % mapping.n]
        if row < columns:
            out[row] = p - position
    return out


@pytest.mark.parametrize("n_seqs,n_batch", [(3, 4), (2, 16)])
def test_masks_show_each_token_its_own_text(n_seqs, n_batch):
    n_ctx, windows = 96, (0, 8)
    back = np.arange(1 - n_ctx, n_ctx + 1)
    values = {w: np.where((back <= 0) & (back > -(w or n_ctx)), back, -np.inf).astype(np.float32) for w in windows}
    cells, rng, wrapped, scattered = KVCells(n_ctx, windows, n_batch, n_seqs, values), np.random.default_rng(0), 0, 0
    for _ in range(60):
        text = cells.open(int(rng.integers(1, 60)))
        if text is None:
            cells.close(cells.texts[int(rng.integers(len(cells.texts)))])
            continue
        for _ in range(4):
            n = min(int(rng.integers(1, n_batch + 1)), text.mappings[0].n - len(text.ids))
            if n < 1:
                break
            past, columns = len(text.ids), cells.n_kv([(text, range(n))])
            inputs = {name: np.full((n + 2, min(columns, cells.n_rows[w])), 7, np.float32)
                      for w, name in ((0, "mask"), (8, "mask_8"))}
            inputs |= {"rows": np.zeros(n + 2, np.int64), "rows_8": np.zeros(n + 2, np.int64)}
            cells.place(inputs, 1, text, n)
            for w, rows, mask in ((0, "rows", "mask"), (8, "rows_8", "mask_8")):
                mapping = text.mappings[w]
                for i in range(n):
                    want = seen_by_definition(cells, w, cells.texts, inputs[mask].shape[1], text, past + i)
                    np.testing.assert_array_equal(inputs[mask][1 + i], want)
                    assert inputs[rows][1 + i] == mapping.rows[(past + i) % mapping.n]
                assert (inputs[mask][[0, -1]] == 7).all()
                wrapped += past + n > mapping.n
                scattered += mapping.first < 0
            text.add(np.zeros(n, np.int32), 0)
        held = [set(t.mappings[w].rows.tolist()) for w in windows for t in cells.texts]
        assert sum(map(len, held[:len(cells.texts)])) == len(set().union(*held[:len(cells.texts)]))
    assert scattered and (wrapped or n_batch == 16)


# ---------------------------------------------------------------- generate
RECURRENT = "lfm2", "mamba", "mamba2", "rwkv7", "qwen3next", "granitehybrid", "lfm2-window"
OTHERS = "gemma3", "gpt-oss", "deepseek2", "bloom", "gpt2", "phi3"


@pytest.mark.parametrize("name", ["tiny", *sampled([(n,) for n in (*RECURRENT, *OTHERS)],
                                                   lambda case: [case[0] in RECURRENT])])
def test_each_text_is_as_if_alone(name, tmp_path):
    with loaded(written(name, tmp_path), n_ctx=128, n_seqs=3) as m:
        prompts = [[i % m.n_vocab for i in p] for p in PROMPTS]
        want = alone(m, prompts)
        runs = m.generate(prompts, 6, temp=0)
        pieces = list(runs)
        assert [run.stats["tokens"] for run in runs.runs] == want
        assert runs.texts == ["".join(piece for i, piece in pieces if i == k) for k in range(len(prompts))]
        assert runs.stats["tokens"] == sum(map(len, want)) and runs.stats["prompt_tokens"] == sum(map(len, prompts))
        assert m.cells.texts == []


def test_a_common_beginning_is_read_once(tmp_path, monkeypatch):
    """Nine prompts of three beginnings; rows are given back when the last text that has them ends."""
    rng = np.random.default_rng(0)
    begins = [rng.integers(0, 40, n).tolist() for n in (30, 50, 3)]
    prompts = [begins[i % 3] + [int(i), 1] for i in range(9)]
    with loaded(written("tiny", tmp_path), n_seqs=9) as m:
        want = alone(m, prompts)
        runs = m.generate(prompts, 6, temp=0)
        list(runs)
        assert [run.stats["tokens"] for run in runs.runs] == want and m.cells.texts == []
        assert runs.stats["shared_tokens"] == 2 * 30 + 2 * 50
        assert all((n == 0).all() for n in m.cells._n_texts.values())
        assert runs._batch.spent["prefill"][0] == sum(map(len, prompts)) - 160
        runs = m.generate(prompts, 6, temp=0, cache_prompt=False)
        assert not [*runs] == [] and runs.stats["shared_tokens"] == 0
        # nothing read under a patch, or before a weight was written to, is taken over
        runs, halves = m.generate(prompts[:1] * 6, 6, temp=0), {"blk.0.ffn_out": lambda x: x / 2}
        next(runs)
        monkeypatch.setattr(m, "_weight_versions", lambda: 10 ** 9)
        list(runs)
        assert runs.stats["shared_tokens"] == 0
        monkeypatch.undo()
        with m.patch(halves):
            runs = m.generate(prompts[:1] * 6, 6, temp=0)
            list(runs)
            assert runs.stats["shared_tokens"] == 0


def test_texts_end_and_begin_without_new_plans(tmp_path):
    with loaded(written("tiny", tmp_path), n_seqs=4) as m:
        runs = m.generate([[k] for k in range(10)], 5, temp=0)
        next(runs)
        plans = len(m._steps)
        list(runs)
        assert plans == 1 and len(m._steps) == 2            # four texts at once, in the end two
        assert [len(run.stats["tokens"]) for run in runs.runs] == [5] * 10


@pytest.mark.parametrize("name", ["tiny", "lfm2"])
def test_interrupts_and_other_texts_in_between(name, tmp_path, monkeypatch):
    with loaded(written(name, tmp_path), n_ctx=64, n_seqs=2) as m:
        prompts = PROMPTS[:5]
        want = alone(m, prompts)
        whole, calls = m._fed_batch, []

        def fails(*args):
            calls.append(args)
            if len(calls) % 4 == 3:
                raise KeyboardInterrupt("here")
            return whole(*args)
        monkeypatch.setattr(m, "_fed_batch", fails)
        runs, interrupts = m.generate(prompts, 6, temp=0), 0
        while True:
            try:
                for _ in runs:
                    pass
                break
            except KeyboardInterrupt:
                interrupts += 1
        monkeypatch.undo()
        assert interrupts > 3 and [run.stats["tokens"] for run in runs.runs] == want
        runs = m.generate(prompts, 6, temp=0)
        next(runs)
        m.logits([1, 2, 3])
        list(runs)
        assert [run.stats["tokens"] for run in runs.runs] == want


def test_an_interrupt_while_a_token_is_chosen(tmp_path, monkeypatch):
    with loaded(written("tiny", tmp_path), n_seqs=2) as m:
        want = alone(m, PROMPTS[:3])
        runs, calls = m.generate(PROMPTS[:3], 6, temp=0), []
        sample = runs[1].answer.sampler.sample

        def interrupted(logits):
            calls.append(1)
            if len(calls) == 3:
                signal.raise_signal(signal.SIGINT)
            return sample(logits)
        monkeypatch.setattr(runs[1].answer.sampler, "sample", interrupted)
        with pytest.raises(KeyboardInterrupt, match="^$"):
            list(runs)
        list(runs)
        assert [run.stats["tokens"] for run in runs.runs] == want


def test_one_text_with_broken_logits_does_not_end_the_others(tmp_path, monkeypatch):
    with loaded(written("tiny", tmp_path), n_seqs=2) as m:
        want = alone(m, PROMPTS[:3])
        runs = m.generate(PROMPTS[:3], 6, temp=0)
        sample = runs[1].answer.sampler.sample
        monkeypatch.setattr(runs[1].answer.sampler, "sample", lambda logits: sample(logits * np.float32("nan")))
        with pytest.raises(gg.ParamError, match="the weights or the computation are broken"):
            list(runs)
        list(runs)
        assert [run.stats["tokens"] for run in runs.runs] == [want[0], [], want[2]]


def test_a_bad_bias_is_named_with_ignore_eos(tmp_path):
    with loaded(written("tiny", tmp_path)) as m, pytest.raises(gg.ParamError, match="logit_bias is .3., expected a"):
        m.generate([1], ignore_eos=True, logit_bias=[3])


def test_every_text_has_the_stops_of_an_iterator(tmp_path):
    with loaded(written("tiny", tmp_path), n_seqs=2) as m:
        m._tokenizer.n_vocab = m.n_vocab
        stops = [tokens[1] for tokens in alone(m, PROMPTS[:3])]
        both = [m.generate(PROMPTS[:3], 6, temp=0, stop=stop) for stop in (stops, iter(stops))]
        ends = [[(list(runs), run.stats["tokens"])[1] for run in runs.runs] for runs in both]
        assert ends[0] == ends[1] and max(map(len, ends[0])) == 2


def test_bad_prompts_are_refused_before_anything_changes(tmp_path):
    with loaded(written("tiny", tmp_path), n_ctx=64) as m:
        m.decode([1, 2, 3])
        want = m.decode([4])
        for bad, error, words in (([[1], [2, 999]], gg.IndexRangeError, "token id 999 at position 1"),
                                  ([[1], []], gg.ParamError, "has no tokens"), ([[1], 5], gg.TypeMismatch, "got int"),
                                  ([[1], [2] * 65], gg.ParamError, "65 tokens, the context 64"),
                                  ([[1], b"x"], gg.TypeMismatch, "got bytes")):
            with pytest.raises(error, match=words):
                m.generate(bad, 3)
        assert m.n_past == 4
        m.reset()
        m.decode([1, 2, 3])
        np.testing.assert_array_equal(m.decode([4]), want)
        for bad in (0, 257, True, 2.5):
            with pytest.raises(gg.ParamError, match="n_seqs must be an integer from 1 to 256"):
                load_model(m.file.path, n_seqs=bad)


@pytest.mark.parametrize("name", ["gemma3", "lfm2"])
def test_memory_is_what_was_measured(name, tmp_path):
    path = written(name, tmp_path)
    report = model_peak(path, n_ctx=128, n_batch=8, flash=True, kv_type="F32", planner="ggml")
    with loaded(path, n_ctx=128, n_batch=8, reserve=True) as m:
        assert report.kinds["KV cache"] == m.kv_nbytes
        held = m.compute_nbytes
        assert report.peak <= held
        list(m.generate([[i % m.n_vocab for i in p] for p in PROMPTS], 4, temp=0))
        assert m.compute_nbytes == held                             # eight rows of logits have room as well
