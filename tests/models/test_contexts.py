"""Contexts: RoPE as options say, beyond the training, shifted, saved and restored; what a shared prefix saves."""
import itertools
import struct
import tracemalloc
import types
import zlib

import numpy as np
import pytest
from helpers import arch_files, tiny_model
from helpers.requirements import shared
from helpers.sample import sampled
from helpers.tiny_model import Words

import ggjit as gg
from ggjit.models import load_model
from ggjit.models.families.registry import DECODERS
from ggjit.models.files.adapter import new_adapter
from ggjit.models.files.gguf import GGUFFile
from ggjit.models.networks.parts import decoder_graph
from ggjit.models.networks.parts.saved_state import MAGIC

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]


def loaded(path, **options):
    return load_model(path, **{"n_threads": 1, "reserve": False, "kv_type": "F32", "n_ctx": 64, "n_batch": 16,
                               **options})


# ---------------------------------------------------------------- RoPE
@pytest.mark.parametrize("stated,options", [
    ({"rope.freq_base": 500.0}, {"rope_freq_base": 500}),
    ({"rope.scaling.factor": 4.0}, {"rope_scale": 4}), ({"rope.scaling.factor": 4.0}, {"rope_freq_scale": 0.25}),
    ({"rope.scaling.factor": 4.0, "rope.scaling.type": "yarn"}, {"rope_scaling": "yarn", "rope_scale": 4}),
    ({"rope.scaling.factor": 4.0, "rope.scaling.type": "yarn", "rope.scaling.original_context_length": 8,
      "rope.scaling.attn_factor": 1.5},
     {"rope_scaling": "yarn", "rope_scale": 4, "yarn_orig_ctx": 8, "yarn_attn_factor": 1.5}),
    ({}, {"rope_scaling": "none", "rope_scale": 4})])
def test_options_are_as_if_the_file_said_so(stated, options, tmp_path):
    a = tiny_model.write(tmp_path / "a.gguf", metadata=stated)
    b = tiny_model.write(tmp_path / "b.gguf")
    with loaded(a) as x, loaded(b, **options) as y, loaded(b) as plain:
        np.testing.assert_array_equal(x.logits(IDS), y.logits(IDS))
        assert (abs(y.logits(IDS) - plain.logits(IDS)).max() > 1e-3) == bool(stated)


@pytest.mark.parametrize("options,words", [
    ({"rope_freq_base": 0}, "rope_freq_base must be from 1 to"), ({"rope_scale": -1}, "rope_scale must be from"),
    ({"rope_scaling": "long"}, "rope_scaling must be one of none, linear, yarn"),
    ({"rope_scale": 2, "rope_freq_scale": 0.5}, "give one of them"), ({"yarn_orig_ctx": 0}, "yarn_orig_ctx must be"),
    ({"yarn_ext_factor": float("nan")}, "yarn_ext_factor must be a finite number")])
def test_bad_rope_options(options, words, tmp_path):
    with pytest.raises(gg.ParamError, match=words):
        loaded(tiny_model.write(tmp_path / "m.gguf"), **options)


def test_contexts_beyond_the_training(tmp_path):
    path = tiny_model.write(tmp_path / "m.gguf")
    with loaded(path) as m:
        want = m.logits(IDS)
        with pytest.raises(gg.ParamError, match="larger n_ctx .trained for 64"):
            m.logits([1] * 65)
    with pytest.warns(UserWarning, match="trained for contexts of 64 tokens, not of 128.*rope_scale=2"), \
            loaded(path, n_ctx=128) as m:
        np.testing.assert_array_equal(m.logits(IDS), want)
        assert np.isfinite(m.logits([1] * 128)).all()
    arch_files.write(shared("tools"), "gpt2", path)
    n = load_model(path, reserve=False).n_ctx_train
    with pytest.raises(gg.ParamError, match=f"n_ctx must be an integer from 1 to {n}, which .* has positions for"):
        loaded(path, n_ctx=n + 1)
    with pytest.raises(gg.ParamError, match="has no RoPE; leave rope_freq_base out"):
        loaded(path, rope_freq_base=1e6)


# ---------------------------------------------------------------- shifts
def one_layer(path, **metadata):
    """Its keys and values know their own tokens only."""
    without = [name for name in tiny_model.SHAPES if name.startswith("blk.1.")]
    return tiny_model.write(path, without=without, metadata={"block_count": 1, **metadata})


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}


WIDE = {"attention.head_count": 2, "attention.head_count_kv": 1}       # heads of 32


@pytest.mark.parametrize("kv_type,metadata,bound", [("F32", {}, 1e-4), ("F32", YARN, 1e-4), ("F16", {}, 5e-3),
                                                    ("Q8_0", WIDE, 5e-2)])
def test_a_shifted_text_is_what_was_left(kv_type, metadata, bound, tmp_path):
    ids = (IDS * 3)[:40]
    left = ids[:3] + ids[13:]
    with loaded(one_layer(tmp_path / "m.gguf", **metadata), kv_type=kv_type) as m:
        want = m.logits([*left, 7, 8])
        m.reset()
        m.decode(ids)
        m.shift_context(3, 10)
        assert m.n_past == 30
        np.testing.assert_allclose(m.decode([7]), want[-2], atol=bound)
        np.testing.assert_allclose(m.decode([8]), want[-1], atol=bound)
        m.shift_context(0, 12)
        assert abs(m.decode([9]) - m.logits([*left[12:], 7, 8, 9])[-1]).max() < bound


@pytest.mark.parametrize("name", ["lfm2", "gpt2", "deepseek2", "gemma3"])
def test_every_architecture_shifts(name, tmp_path):
    """What cannot be rotated is read again."""
    arch_files.write(shared("tools"), name, tmp_path / "m.gguf")
    with loaded(tmp_path / "m.gguf") as m:
        ids = [i % m.n_vocab for i in IDS * 3]
        left = ids[:4] + ids[20:]
        want = m.logits([*left, 7])[-1]
        m.reset()
        m.decode(ids)
        m.shift_context(4, 16)
        got = m.decode([7])
        assert m.n_past == len(left) + 1 and np.isfinite(got).all()
        if name in ("lfm2", "gpt2"):
            np.testing.assert_allclose(got, want, atol=1e-4)
        with pytest.raises(gg.ParamError, match="n_discard must be an integer from 0 to 33"):
            m.shift_context(0, 34)


def test_texts_longer_than_the_context(tmp_path):
    with loaded(tiny_model.write(tmp_path / "m.gguf"), n_ctx=24) as m:
        m._tokenizer = Words()
        run = m.generate(IDS, 40, temp=0)
        list(run)
        assert len(run.stats["tokens"]) == 24 - len(IDS) + 1        # the last one is not read
        run = m.generate(IDS, 40, temp=0, context_shift=True, n_keep=2)
        pieces = [next(run) for _ in range(30)]
        m.logits([1, 2])                                            # another text in between
        assert len(pieces + list(run)) == 40 and m.n_past <= 24
        for bad in ({"n_keep": 24}, {"n_keep": -1}):
            with pytest.raises(gg.ParamError, match="n_keep must be"):
                m.generate(IDS, 40, temp=0, context_shift=True, **bad)
        with pytest.raises(gg.ParamError, match="one prompt at a time"):
            m.generate([[1], [2]], 40, context_shift=True)


# ---------------------------------------------------------------- prefixes
@pytest.mark.parametrize("name", ["llama", "lfm2", "gemma3"])
def test_a_shared_prefix_is_read_once(name, tmp_path, monkeypatch):
    arch_files.write(shared("tools"), name, tmp_path / "m.gguf")
    with loaded(tmp_path / "m.gguf") as m:
        m._tokenizer, whole, read = Words(), m._fed_batch, []
        monkeypatch.setattr(m, "_fed_batch", lambda runs, *rest: read.append(len(runs[0][1])) or whole(runs, *rest))

        def tokens(prompt, **options):
            read.clear()
            run = m.generate(prompt, 4, temp=0, **options)
            list(run)
            return run.stats["tokens"], sum(read) - 3               # 3 tokens of the answer were read
        prompts = [IDS, [*IDS, 7, 8], IDS[:9] + [8, 8], [40]]
        want = [tokens(prompt, cache_prompt=False)[0] for prompt in prompts]
        assert [tokens(prompt)[0] for prompt in prompts] == want
        m.reset()
        m.decode(IDS)
        assert tokens([*IDS, 7, 8]) == (want[1], 2)
        assert tokens(prompts[2]) == (want[2], len(prompts[2]) - (0 if name == "lfm2" else 9))
        m.reset()
        m.decode(IDS)
        assert tokens(IDS) == (want[0], len(IDS) if name == "lfm2" else 1)


# ---------------------------------------------------------------- saved states
@pytest.mark.parametrize("name,kv_type", [("llama", "Q8_0"), ("lfm2-window", "F32"), ("rwkv7", "F32"),
                                          ("gemma3", "F16")])
def test_saved_texts_go_on(name, kv_type, tmp_path):
    arch_files.write(shared("tools"), name, tmp_path / "m.gguf")
    with loaded(tmp_path / "m.gguf", kv_type=kv_type) as m, \
            loaded(tmp_path / "m.gguf", kv_type=kv_type, n_ctx=48, n_batch=8, n_seqs=1) as other:
        m.decode(IDS * 2)
        state = m.save_state(tmp_path / "state")
        want = [m.decode([i]) for i in (5, 6, 7)]
        for network, source in ((m, state), (other, tmp_path / "state")):
            network.decode([1])
            network.load_state(source)
            assert network.n_past == 2 * len(IDS)
            for a, i in zip(want, (5, 6, 7), strict=True):
                np.testing.assert_allclose(network.decode([i]), a, atol=2e-4)
        m.reset()
        m.load_state(m.save_state())
        assert m.n_past == 0


def test_states_that_do_not_fit(tmp_path):
    a, b = tiny_model.write(tmp_path / "a.gguf"), tiny_model.write(tmp_path / "b.gguf", seed=1)
    with loaded(a) as m:
        m.decode(IDS)
        state = m.save_state()
        want = m.decode([5])
        m.load_state(state)
        for bad in (state[:-1], state[:40], b"", state[:50] + b"x" + state[51:], state + b"x", MAGIC):
            with pytest.raises(gg.BadFile, match="cut off or damaged|not a saved state"):
                m.load_state(bad)
        nested = MAGIC + struct.pack("<I", 4000) + b"[" * 4000
        with pytest.raises(gg.BadFile, match="the header cannot be read"):
            m.load_state(nested + struct.pack("<I", zlib.crc32(nested)))
        for bad in (5, None, "no such file"):
            with pytest.raises((gg.TypeMismatch, OSError), match="bytes or the path|no such file"):
                m.load_state(bad)
        for path, options, error, words in (
                (b, {}, gg.ModelError, "another model"), (a, {"rope_scale": 2}, gg.ModelError, "other options of RoPE"),
                (a, {"kv_type": "F16"}, gg.ParamError, 'load the model with kv_type=.F32'),
                (a, {"n_ctx": 8}, gg.ParamError, "n_ctx=16 or more")):
            with loaded(path, **options) as other, pytest.raises(error, match=words):
                other.load_state(state)
        np.testing.assert_array_equal(m.decode([5]), want)          # nothing of it touched the text


# ---------------------------------------------------------------- windows
@pytest.mark.parametrize("name", ["gemma3", *sampled([("gpt-oss",), ("lfm2-window",), ("gemma2",)], lambda case: [0])])
def test_caches_that_keep_the_window_are_as_good_as_whole_ones(name, tmp_path, monkeypatch):
    arch_files.write(shared("tools"), name, tmp_path / "m.gguf")
    with loaded(tmp_path / "m.gguf", n_ctx=120, n_batch=8, n_seqs=1) as near, \
            loaded(tmp_path / "m.gguf", n_ctx=120, n_batch=8, n_seqs=8) as whole:
        assert min(near.cells.n_rows.values()) < 40 and set(whole.cells.n_rows.values()) == {120}
        assert near.kv_nbytes < whole.kv_nbytes
        ids = np.random.default_rng(3).integers(0, near.n_vocab, 90).tolist()

        def same(act):
            a, b = act(near), act(whole)
            np.testing.assert_allclose(a, b, atol=2e-5 * abs(b).max())
        same(lambda m: m.logits(ids))
        same(lambda m: np.stack([m.decode([i]) for i in ids[:10]]))
        near.shift_context(0, 40)
        whole.shift_context(0, 40)
        same(lambda m: m.decode([3]))
        fed, calls = near._fed_batch, []

        def fails(*args):
            calls.append(args)
            if len(calls) == 7:                                     # its window is overwritten by then
                raise KeyboardInterrupt("here")
            return fed(*args)
        monkeypatch.setattr(near, "_fed_batch", fails)
        with pytest.raises(KeyboardInterrupt, match="here"):
            near.decode(ids[:59])
        monkeypatch.undo()
        assert near.n_past == 61 and (near.text.broken or len(near.cells.n_rows) == 1)
        assert np.isfinite(near.decode([4])).all() and near.n_past == 62


# ---------------------------------------------------------------- quantised caches
# the small deepseek2 has a latent of 24 numbers
ATTENTION = [n for n in DECODERS if n not in ("mamba", "mamba2", "deepseek2") and "rwkv" not in n]


CACHES = {"Q8_0": 0.02, "Q4_0": 0.3, "Q4_1": 0.3, "IQ4_NL": 0.3, "Q5_0": 0.15, "Q5_1": 0.15, "Q8_0/Q4_0": 0.3,
          "Q4_0/Q8_0": 0.3}                 # median difference of a logit over their deviation


def is_as_good_as_its_type(name, path, *caches):
    """One by one and in batches.  caches: (kv_type, flash)"""
    arch_files.write(shared("tools"), name, path, embd=128)

    def logits(**options):
        with loaded(path, **options) as m:
            whole = arch_files.prepared(m).logits([i % m.n_vocab for i in IDS])
            m.reset()
            return whole, np.stack([m.decode([i % m.n_vocab]) for i in IDS])
    want = logits()[0]
    for kv_type, flash in caches:
        whole, single = logits(kv_type=kv_type, flash=flash)
        # not the largest difference: a router may pick another expert
        assert np.median(abs(whole - want)) <= CACHES[kv_type] * want.std()
        assert np.median(abs(single - whole)) <= CACHES[kv_type] / 4 * want.std()


@pytest.mark.parametrize("name,flash", [("llama", True), ("llama", False), *sampled(
    itertools.product([n for n in ATTENTION if n != "llama"], (True, False)),
    lambda case: [DECODERS[case[0]].__module__, case[1]])])
def test_quantised_caches(name, flash, tmp_path):
    is_as_good_as_its_type(name, tmp_path / "m.gguf", ("Q8_0", flash))


# a network does not know the type: tests/ops/test_flash_attn.py has attention over every one
@pytest.mark.parametrize("kv_type", sampled([(kv_type,) for kv_type in CACHES if kv_type != "Q8_0"],
                                            lambda case: ["/" in case[0]]))
def test_types_of_quantised_caches(kv_type, tmp_path):
    is_as_good_as_its_type("llama", tmp_path / "m.gguf", (kv_type, True))


def test_keys_and_values_may_have_different_types(tmp_path):
    arch_files.write(shared("tools"), "llama", tmp_path / "m.gguf", embd=128)
    with loaded(tmp_path / "m.gguf", kv_type="Q8_0/IQ4_NL") as m:
        assert {leaf.name.split()[0]: leaf.type for kept in m.cache for leaf in kept} == {"k": gg.Q8_0, "v": gg.IQ4_NL}
        m.decode([1, 2, 3])
        state, want = m.save_state(), m.decode([4])
        m.load_state(state)
        np.testing.assert_array_equal(m.decode([4]), want)
    with loaded(tmp_path / "m.gguf", kv_type="Q8_0") as m, pytest.raises(gg.ParamError, match="kv_type=.Q8_0/IQ4_NL"):
        m.load_state(state)
    for bad, words in (("Q8_0/Q4_0/F16", "one of keys and one of values"), ("Q8_0/Q2_K", "kv_type"), ((), "one of")):
        with pytest.raises(gg.ParamError, match=words):
            loaded(tmp_path / "m.gguf", kv_type=bad)


# ---------------------------------------------------------------- what was read by another network
def test_prefixes_of_changed_networks_are_read_again(tmp_path):
    path = tiny_model.write(tmp_path / "m.gguf")
    with loaded(path, lora=[new_adapter(GGUFFile(path), ["attn_q"], 2, 4)]) as m:
        m._tokenizer = Words()

        def tokens(**options):
            run = m.generate(IDS, 4, temp=0, **options)
            list(run)
            return run.stats["tokens"]
        plain, state = tokens(), m.save_state()
        with m.patch({"blk.0.attn_out": lambda x: x * -20}):
            patched = tokens()
            assert patched == tokens(cache_prompt=False) != plain
        assert tokens() == plain
        for pair in m.weights.adapters[0].pairs.values():
            for t in pair:
                t.set(t.numpy() * 40 + 1)
        changed = tokens()
        assert changed == tokens(cache_prompt=False) != plain
        with pytest.raises(gg.ModelError, match="another model"):
            m.load_state(state)


@pytest.mark.parametrize("name", ["tiny", "gemma3"])
def test_prefixes_behind_dropped_tokens_are_read_again(name, tmp_path):
    """What stays after a shift still knows the tokens that were dropped: it is no prefix of another text."""
    path = tmp_path / "m.gguf"
    tiny_model.write(path) if name == "tiny" else arch_files.write(shared("tools"), name, path)
    with loaded(path) as m:
        m.decode(IDS)
        m.shift_context(3, 6)
        state, ids = m.save_state(), [*IDS[:3], *IDS[9:], 7]
        for restored in (False, True):
            if restored:
                m.load_state(state)
            assert m.keep_prefix(ids) == 3
            np.testing.assert_allclose(m.decode(ids[3:]), m.logits(ids)[-1], atol=1e-4)
        m.load_state(state)
        m.keep_prefix(ids)
        m.decode(ids[3:])
        assert m.keep_prefix(ids) == len(ids) - 1           # read again, they are


def test_states_know_values_of_adapters(tmp_path):
    """Every number of them, since they can be written to."""
    path = tiny_model.write(tmp_path / "m.gguf")
    with loaded(path, lora=[new_adapter(GGUFFile(path), ["attn_q"], 2, 4)]) as m:
        m.decode(IDS[:5])
        state = m.save_state()
        low = next(iter(m.weights.adapters[0].pairs.values()))[0]
        a = low.numpy()
        a.flat[-1] += 1
        low.set(a)
        with pytest.raises(gg.ModelError, match="was saved from another model"):
            m.load_state(state)
        a.flat[-1] -= 1
        low.set(a)
        m.load_state(state)
        assert m.n_past == 5


def test_states_while_several_texts_go_on(tmp_path):
    with loaded(tiny_model.write(tmp_path / "m.gguf"), n_seqs=2) as m:
        m._tokenizer = tiny_model.Words()
        runs = m.generate([[1, 2], [3]], n_predict=3, temp=0)
        next(runs)
        with pytest.raises(gg.NotSupported, match="caches hold 2 texts of a generation that goes on"):
            m.save_state()
        list(runs)
        m.decode(IDS)
        m.load_state(m.save_state())
        assert m.n_past == len(IDS)


def test_what_is_read_again_is_read_as_it_was(tmp_path, monkeypatch):
    """A text that was read before a patch, and has to be read again inside it."""
    with loaded(tiny_model.write(tmp_path / "m.gguf")) as m:
        patch = {"blk.0.l_out": lambda x: -7 * x}
        m.decode(IDS[:6])
        with m.patch(patch):
            m.decode(IDS[6:9])
            want = m.decode(IDS[9:])
        m.reset()
        m.decode(IDS[:6])
        with m.patch(patch), m.capturing("embd") as c:
            m.decode(IDS[6:9])
            m.text.broken = True                # as an interrupted call leaves it
            np.testing.assert_allclose(m.decode(IDS[9:]), want, atol=1e-4)
            assert m.text.hooked == m.text.exact == 6
        assert c.tokens.tolist() == IDS[6:9] + IDS[6:]


def test_states_remember_what_they_were_read_with(tmp_path):
    path = tiny_model.write(tmp_path / "m.gguf")
    with loaded(path, lora=[new_adapter(GGUFFile(path), ["attn_q"], 2, 4)]) as m:
        m.decode(IDS[:5])
        with m.patch({"blk.0.l_out": lambda x: -7 * x}):
            m.decode(IDS[5:9])
            want = m.decode(IDS[9:])
        state = m.save_state()
        m.load_state(state)
        assert m.keep_prefix([*IDS, 7]) == 5
        np.testing.assert_allclose(m.decode(IDS[5:]), m.logits(IDS)[-1], atol=1e-4)
        assert abs(m.decode([7]) - want).max() > 1e-3
        m.reset()
        m.decode(IDS)
        for pair in m.weights.adapters[0].pairs.values():
            for t in pair:
                t.set(t.numpy() * 40 + 1)
        m.load_state(m.save_state())
        assert m.n_past == len(IDS) and m.keep_prefix([*IDS, 7]) == 0


def test_masks_of_a_long_context_take_no_more_than_they_are():
    m = load_model(n_ctx=64, reserve=False)
    m.n_ctx = 1 << 20
    tracemalloc.start()
    values = decoder_graph.mask_values(m)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.1 * sum(a.nbytes for a in values.values())


@pytest.mark.parametrize("n_ctx,window,bias", [(1, 1, False), (7, 3, False), (7, 7, True), (5, 9, True), (6, 2, True)])
def test_what_a_mask_holds_by_distance(n_ctx, window, bias):
    m = types.SimpleNamespace(n_ctx=n_ctx, description=types.SimpleNamespace(alibi=lambda: True))
    want = [back if bias and 0 >= back > -window else 0 if 0 >= back > -window else -np.inf
            for back in range(1 - n_ctx, n_ctx + 1)]
    np.testing.assert_array_equal(decoder_graph.seen(m, window, bias), want)
