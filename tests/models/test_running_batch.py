"""Sequences join, leave, wait and share in a running batch."""
import itertools
import threading

import numpy as np
import pytest
from helpers import tiny_model
from helpers.sample import sampled
from helpers.tiny_model import Words

import ggjit as gg
from ggjit.models import load_model
from ggjit.models.text.running_batch import LEAST_PIECE, RunningBatch, equal_prefix, equal_tokens


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("batch") / "m.gguf", metadata={"context_length": 1024})


def loaded(path, **options):
    m = load_model(path, **{"n_threads": 1, "reserve": False, "n_ctx": 512, "n_batch": 16, "n_seqs": 3, **options})
    m._tokenizer = Words()
    return m


def alone(m, prompt, n=6, **options):
    run = m.generate(prompt, n, **options)
    list(run)
    return run.stats["tokens"]


def tokens(sequence):
    return sequence.run.stats["tokens"]


def run_out(batch):
    while batch.turn():
        pass


def prompts_of(rng, *lengths):
    return [rng.integers(0, 40, n).tolist() for n in lengths]


def test_sequences_join_a_running_batch(path):
    rng = np.random.default_rng()
    with loaded(path) as m:
        prompts = prompts_of(rng, 5, 40, 1, 17, 3, 60, 2)
        want = [alone(m, p) for p in prompts]
        batch, pieces = RunningBatch(m), {}
        sequences = []
        for i, p in enumerate(prompts):
            sequences.append(batch.submit(p, 6, on_piece=pieces.setdefault(i, []).append))
            for _ in range(int(rng.integers(0, 4))):
                batch.turn()
        run_out(batch)
        assert [tokens(s) for s in sequences] == want
        assert all(p[-1] is None and "".join(p[:-1]) == s.run.stats["text"]
                   for p, s in zip(pieces.values(), sequences, strict=True))
        assert batch.is_idle and m.cells.texts == [] and not batch.turn() and batch.n_ended == 7


def test_the_larger_priority_begins_first(path):
    with loaded(path, n_seqs=1) as m:
        batch, order = RunningBatch(m), []
        for name, priority in (("a", 0), ("b", -1), ("c", 5), ("d", 5), ("e", 0)):
            batch.submit([1, 2], 2, priority=priority, on_piece=lambda piece, name=name: order.append(name))
        run_out(batch)
        assert list(dict.fromkeys(order)) == ["c", "d", "a", "e", "b"]
        for bad in ("high", 0.5, None):
            with pytest.raises(gg.GgjitError, match="priority"):
                batch.submit([1], priority=bad)


def test_the_cancelled_leave_and_the_others_go_on(path):
    with loaded(path) as m:
        want = alone(m, [7, 8, 9], 40)
        batch = RunningBatch(m)
        first, second, third, waiting = (batch.submit([7 + (i > 0), 8, 9], 40) for i in range(4))
        for _ in range(3):
            batch.turn()
        assert waiting.state == "waiting"
        for s in (second, waiting):
            s.cancel()
            s.cancel()
        run_out(batch)
        assert tokens(first) == want and len(tokens(third)) == 40
        assert second.run.stats["stop_reason"] == waiting.run.stats["stop_reason"] == "cancelled"
        assert 0 < len(tokens(second)) < 40 and tokens(waiting) == [] and m.cells.texts == []
        first.cancel()
        assert not batch.turn() and first.run.stats["stop_reason"] == "length"


def test_a_full_queue_refuses(path):
    with loaded(path, n_seqs=1) as m:
        batch = RunningBatch(m, n_waiting=2)
        sequences = [batch.submit([1], 3) for _ in range(3)]        # one of them finds room
        with pytest.raises(gg.QueueFull, match="3 sequences wait already, and no more than 2"):
            batch.submit([1], 3)
        run_out(batch)
        assert [len(tokens(s)) for s in sequences] == [3, 3, 3]
        batch.submit([1], 3)
        batch.close()
        assert batch.is_idle


def test_what_could_never_begin_is_refused(path):
    with loaded(path, n_ctx=64) as m:
        batch = RunningBatch(m)
        for prompt, error in (([1] * 65, gg.ParamError), ([], gg.ParamError), ([999], gg.IndexRangeError),
                              (b"x", gg.TypeMismatch)):
            with pytest.raises(error):
                batch.submit(prompt, 4)
        assert batch.is_idle and not batch.turn()


def test_an_error_of_one_sequence_ends_it_alone(path, monkeypatch):
    with loaded(path) as m:
        want = alone(m, [1, 2, 3])
        batch = RunningBatch(m)
        bad, good = batch.submit([4, 5], 6), batch.submit([1, 2, 3], 6)
        monkeypatch.setattr(bad.run.answer.sampler, "sample", lambda logits: 1 / 0)
        run_out(batch)
        assert isinstance(bad.error, ZeroDivisionError) and bad.state == "ended" and tokens(good) == want


def test_after_an_error_of_the_computation_all_is_read_again(path, monkeypatch):
    with loaded(path) as m:
        prompts = [[1, 2, 3], [5] * 20]
        want = [alone(m, p) for p in prompts]
        batch = RunningBatch(m, keep=True)
        sequences = [batch.submit(p, 6) for p in prompts]
        whole, calls = m._fed_batch, []

        def fails(*args):
            calls.append(1)
            if len(calls) in (2, 5):
                raise gg.OutOfMemory("no room, once")
            return whole(*args)
        monkeypatch.setattr(m, "_fed_batch", fails)
        errors = 0
        while not batch.is_idle:
            try:
                batch.turn()
            except gg.OutOfMemory:
                errors += 1
        assert errors == 2 and [tokens(s) for s in sequences] == want


def test_prefixes_are_kept_until_their_rows_are_needed(path):
    rng = np.random.default_rng()
    with loaded(path, n_ctx=256, n_seqs=2) as m:
        system, = prompts_of(rng, 100)
        want = [alone(m, [*system, i]) for i in range(3)]
        batch = RunningBatch(m, keep=True)
        found = []
        for i in range(3):
            found.append(batch.submit([*system, i], 6))
            run_out(batch)
        assert [tokens(s) for s in found] == want and [s.n_shared for s in found] == [0, 100, 100]
        assert len(batch.kept) == 3 and m.cells.texts == []
        # others need the rows, and get them; what was shared is read again
        large = batch.submit(prompts_of(rng, 200)[0], 50)
        run_out(batch)
        assert len(tokens(large)) == 50 and len(batch.kept) == 1
        again = batch.submit([*system, 0], 6)
        run_out(batch)
        assert tokens(again) == want[0] and again.n_shared == 0
        # of equal texts one is kept; the model's own use forgets all
        batch.submit([*system, 0], 6)
        run_out(batch)
        assert len(batch.kept) == 1
        m.logits([1, 2])
        batch.submit([*system, 0], 6)
        run_out(batch)
        batch.close()
        assert all((n == 0).all() for n in m.cells._n_texts.values()) and m.cells.kept == []


def test_random_arrivals_cancels_and_sizes_lose_nothing(path):
    rng = np.random.default_rng()
    with loaded(path, n_ctx=300, n_seqs=4) as m:
        batch, live = RunningBatch(m, keep=True, exact=bool(rng.integers(2))), []
        begins = prompts_of(rng, 90, 40)
        for _ in range(120):
            if rng.random() < 0.3:
                begin, end = begins[int(rng.integers(2))], prompts_of(rng, rng.integers(1, 9))[0]
                prompt = begin[:int(rng.integers(1, 90))] + end
                live.append(batch.submit(prompt, int(rng.integers(0, 30)), priority=int(rng.integers(3))))
            if live and rng.random() < 0.1:
                live[int(rng.integers(len(live)))].cancel()
            batch.turn()
            held = [t.mappings[0].rows for t in (*m.cells.texts, *m.cells.kept)]
            counts = np.bincount(np.concatenate([np.zeros(0, np.int64), *held]), minlength=m.cells.n_rows[0])
            np.testing.assert_array_equal(counts, m.cells._n_texts[0])
            assert len(m.cells.texts) == len(batch.working) <= 4 and len(m.cells.kept) == len(batch.kept)
        run_out(batch)
        done = [s.run.stats["stop_reason"] for s in live]
        assert set(done) <= {"length", "cancelled"} and all(s.state == "ended" for s in live)
        for s in live if batch.exact else ():
            n = len(tokens(s))
            assert tokens(s) == alone(m, s.run.prompt_ids, n)


def test_other_threads_submit_while_it_runs(path):
    with loaded(path) as m:
        want = {n: alone(m, [n, 3], 5) for n in range(1, 13)}
        batch, found = RunningBatch(m), {}

        def client(n):
            found[n] = batch.submit([n, 3], 5)
        threads = [threading.Thread(target=client, args=(n,)) for n in want]
        for t in threads:
            t.start()
            batch.turn()
        for t in threads:
            t.join()
        run_out(batch)
        assert {n: tokens(s) for n, s in found.items()} == want


# ---------------------------------------------------------------- bits
def alone_bits(m, prompt, following):
    """Logits after a prompt, and after each of the tokens that follow it."""
    m.reset()
    return np.stack([m.decode(prompt), *(m.decode([t]) for t in following)])


@pytest.mark.parametrize("name,repack,kv_type", sampled(itertools.product(
    ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1"), (True, False), ("F16", "F32", "BF16")), enumerate))
def test_logits_of_a_batch_are_those_alone_to_the_bit(name, repack, kv_type, tmp_path):
    """Wherever the rows of the texts lie, and however many there are."""
    rng = np.random.default_rng()
    path = tiny_model.write(tmp_path / "m.gguf", type=name, metadata={"context_length": 1024})
    with loaded(path, n_batch=256, n_seqs=24, n_cells=4000, repack=repack, kv_type=kv_type) as m:
        lengths = [1, 2, 3, 17, 300, *rng.integers(1, 90, 16).tolist()]
        prompts = [rng.integers(0, m.n_vocab, n).astype(np.int32) for n in lengths]
        following = rng.integers(0, m.n_vocab, (len(prompts), 3)).astype(np.int32)
        want = [alone_bits(m, p, f) for p, f in zip(prompts, following.tolist(), strict=True)]
        m.hand_over(object())
        holes = [m.open_text(int(rng.integers(1, 200))) for _ in range(3)]
        texts = [m.open_text(len(p) + 3) for p in prompts[:12]]
        for hole in holes:
            m.cells.close(hole)
        texts += [m.open_text(len(p) + 3) for p in prompts[12:]]
        got = [[] for _ in prompts]
        for i, (text, p) in enumerate(zip(texts, prompts, strict=True)):
            for at in range(0, len(p), m.n_batch):
                row, = m.feed([(text, p[at:at + m.n_batch])])
            got[i].append(row)
        for t in range(3):
            for part in np.split(rng.permutation(len(prompts)), np.sort(rng.integers(0, 21, 3))):
                rows = m.feed([(texts[i], following[i, t:t + 1]) for i in part]) if len(part) else ()
                for i, row in zip(part, rows, strict=True):
                    got[i].append(row)
        for a, b in zip(want, got, strict=True):
            np.testing.assert_array_equal(a, np.stack(b))


def test_greedy_answers_under_load_are_those_alone(path):
    """Prefixes shared and kept, pieces between the tokens of others, short and long prompts."""
    rng = np.random.default_rng()
    with loaded(path, n_ctx=1024, n_cells=4096, n_batch=256, n_seqs=8) as m:
        system, = prompts_of(rng, 300)
        prompts = [system + p for p in prompts_of(rng, *rng.integers(1, 300, 10))] + prompts_of(rng, 1, 5, 130, 600)
        want = [alone(m, p, 12) for p in prompts]
        batch = RunningBatch(m, keep=True, exact=True)
        for _ in range(2):
            sequences = [batch.submit(p, 12) for p in prompts if not batch.turn() or True]
            run_out(batch)
            assert [tokens(s) for s in sequences] == want
        assert batch.n_shared > 3000


# ---------------------------------------------------------------- what may be shared where sums are exact
def pieces(n_prompt, n_shared, n_batch):
    """(first, end) of the pieces that are read."""
    at, out = n_shared, []
    while at < n_prompt:
        end = min(at // n_batch * n_batch + n_batch, n_prompt)
        out.append((at, end))
        at = end
    return out


def test_exact_prefixes_leave_pieces_of_the_same_kernels():
    rng = np.random.default_rng()
    for _ in range(2000):
        n_batch, n_prompt = int(rng.choice([16, 64, 128, 256, 512])), int(rng.integers(1, 1500))
        want = pieces(n_prompt, 0, n_batch)
        n = equal_prefix(int(rng.integers(0, n_prompt)), n_prompt, n_batch)
        assert 0 <= n < n_prompt
        for first, end in pieces(n_prompt, n, n_batch):
            assert (first, end) in want or end - first >= LEAST_PIECE and next(
                b - a for a, b in want if b == end) >= LEAST_PIECE
        # what is taken over was computed by long pieces, here and where it comes from
        assert n % n_batch == 0 or all(b - a >= LEAST_PIECE for a, b in want if a < n)
        whole = equal_tokens(n_prompt, n_batch)
        assert whole <= n_prompt and all(b - a in (n_batch, b - a) and (b - a >= LEAST_PIECE or b - a == n_batch)
                                         for a, b in want if a < whole)
