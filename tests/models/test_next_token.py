"""Layers behind the network that guess the token after the next: what they compute, and that the text stays."""
import numpy as np
import pytest
from helpers import arch_files
from helpers.requirements import shared
from helpers.speculated import text_is_that_of_plain_decoding
from helpers.tiny_model import loaded

import ggjit as gg
from ggjit.models import load_gguf, load_model, save_gguf
from ggjit.models.files.control_vector import ControlVector
from ggjit.models.networks.parts.guesses import STATES
from ggjit.models.text import speculation

NAMES = "glm4moe-nextn", "hy_v3-nextn", "deepseek2-nextn"


@pytest.fixture
def parts(tmp_path):
    """parts(name): path of a small file, its tensors as arrays, its metadata."""
    def made(name):
        path = tmp_path / "m.gguf"
        arch_files.write(shared("tools"), name, path)
        tensors, metadata = load_gguf(path)
        return path, {n: t.numpy().copy() for n, t in tensors.items()}, metadata
    return made


def rms(x, w, eps):
    return x / np.sqrt((x * x).mean(1, keepdims=True) + eps) * w


@pytest.mark.parametrize("name", NAMES)
def test_guesses_are_those_of_the_layer(name, parts, tmp_path, monkeypatch):
    """A network of that layer alone, whose embeddings are what the layer reads, is the oracle."""
    path, w, metadata = parts(name)
    arch, n = metadata["general.architecture"], metadata[f"{name.partition('-')[0]}.block_count"] - 1
    ids, eps = np.random.default_rng(3).integers(0, 90, 20).tolist(), metadata[
        f"{arch}.attention.layer_norm_rms_epsilon"]
    with loaded(path) as m:
        before = np.concatenate([np.zeros((1, m.n_embd), np.float32), m.hidden(ids)[:-1]])
        guesser = m.predicting()
        use = speculation.Speculation(guesser)              # states are kept while it guesses
        found = []
        monkeypatch.setattr(guesser, "_next", lambda *args, run=guesser._next: found.append(run(*args)) or found[-1])
        m.logits(ids)
        token = guesser.guess(ids, 1)
        assert len(found) == 1 and token == [found[0][0]] and use.is_on
    p, table = f"blk.{n}.", w.get(f"blk.{n}.nextn.embed_tokens.weight", w["token_embd.weight"])
    x = np.concatenate([rms(table[ids], w[p + "nextn.enorm.weight"], eps),
                        rms(before, w[p + "nextn.hnorm.weight"], eps)], 1) @ w[p + "nextn.eh_proj.weight"].T
    layer = {"blk.0." + t.removeprefix(p): a for t, a in w.items() if t.startswith(p) and ".nextn." not in t}
    norm = w.get(p + "nextn.shared_head_norm.weight", w["output_norm.weight"])
    out = w.get(p + "nextn.shared_head_head.weight", w.get("output.weight", w["token_embd.weight"]))
    alone = {"token_embd.weight": x, "output.weight": out[:len(ids)], "output_norm.weight": norm, **layer}
    settings = {k: v for k, v in metadata.items() if not k.endswith("feed_forward_length") or "expert" in k}
    settings |= {f"{arch}.block_count": 1, f"{arch}.leading_dense_block_count": 0, f"{arch}.nextn_predict_layers": 0,
                 f"{arch}.vocab_size": len(ids)}
    save_gguf(tmp_path / "alone.gguf", alone, settings)
    with load_model(tmp_path / "alone.gguf", n_threads=1, n_ctx=128, kv_type="F32") as m:
        state = m.hidden(list(range(len(ids))))[-1]
    np.testing.assert_allclose(found[0][1][0], state, atol=2e-4 * abs(state).max())
    assert found[0][0] == (out @ state).argmax()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [{}, {"temp": 1.0, "seed": 3}])
def test_the_text_is_that_of_plain_decoding(name, options, parts, monkeypatch):
    monkeypatch.setattr(speculation, "ALLOWED", 1e9)
    with loaded(parts(name)[0]) as m:
        text_is_that_of_plain_decoding(m, "mtp", **options)


def test_right_guesses_are_kept(parts, tmp_path, monkeypatch):
    """Where layers add nothing, the next token depends on the last one alone: the layer that guesses can know it."""
    monkeypatch.setattr(speculation, "ALLOWED", 1e9)
    path, w, metadata = parts("glm4moe-nextn")
    n, d = metadata["glm4moe.block_count"] - 1, w["output_norm.weight"].size
    for name in w:
        if "attn_output" in name or "ffn_down" in name:
            w[name][:] = 0
    w[f"blk.{n}.nextn.eh_proj.weight"][:] = np.eye(d, 2 * d)
    w[f"blk.{n}.nextn.enorm.weight"][:] = 1
    w[f"blk.{n}.nextn.shared_head_norm.weight"][:] = w["output_norm.weight"]
    save_gguf(tmp_path / "right.gguf", w, metadata)
    with loaded(tmp_path / "right.gguf") as m:
        want = m.generate([7, 8, 9], 60, cache_prompt=False)
        list(want)
        g = m.generate([7, 8, 9], 60, speculative="mtp")
        list(g)
        assert g.stats["tokens"] == want.stats["tokens"]
        assert g.stats["accepted_tokens"] == g.stats["drafted_tokens"] > 30
        assert m.memory().terms["KV cache"] > 0 and m.memory().terms["next token"] > 0


def test_who_asked_once_pays_once(parts, monkeypatch):
    """Without a text that is guessed batches are plain; the next one is guessed again, whatever came between."""
    monkeypatch.setattr(speculation, "ALLOWED", 1e9)
    with loaded(parts("hy_v3-nextn")[0]) as m:
        def plans():
            return sum(STATES in shape for shape in m._steps._kept)
        for n in (1, 2):
            g = m.generate([7, 8, 9], 30, speculative="mtp")
            list(g)
            assert g.stats["drafted_tokens"] > 0 and plans()
            m._steps.clear()
            list(m.generate([7, 8, 9, n], 10))
            assert not plans()


def test_a_model_that_is_steered_meanwhile(parts, monkeypatch):
    """The text goes on as the changed model writes it, guessed or not."""
    monkeypatch.setattr(speculation, "ALLOWED", 1e9)
    with loaded(parts("glm4moe-nextn")[0]) as m:
        v = ControlVector({i: np.full(m.n_embd, 0.5, np.float32) for i in range(1, m.n_layer)})
        found = []
        for options in ({}, {"speculative": "mtp"}):
            g = m.generate([7, 8, 9], 60, **options)
            for change in (lambda: m.set_control_vectors([v]), lambda: m.set_lora([]), m.set_control_vectors):
                for _ in range(12):
                    next(g)
                change()
            list(g)
            found.append(g.stats["tokens"])
        assert found[0] == found[1] and g.stats["drafted_tokens"] > 0
        m.set_control_vectors([v])
        guesser = m.predicting()
        use, ids = speculation.Speculation(guesser), list(range(20))
        m.decode(ids)
        states = guesser._states[:len(ids)].copy()
        use.is_on = False
        np.testing.assert_allclose(states, m.hidden(ids), atol=1e-4)


def test_an_arena_is_kept(parts, monkeypatch):
    """What does not fit is said before a token is read; guesses that do not fit are fewer."""
    monkeypatch.setattr(speculation, "ALLOWED", 1e9)
    path, prompt, refused = parts("hy_v3-nextn")[0], list(range(40)), 0
    with pytest.raises(gg.BudgetError) as e:
        loaded(path, n_batch=32, arena=1)
    for times in (1, 2, 16):
        with loaded(path, n_batch=32, arena=times * e.value.minimum) as m:
            want, run = m.generate(prompt, 30, cache_prompt=False), None
            list(want)
            for how in ("lookup", "mtp"):
                try:
                    run = m.generate(prompt, 30, speculative=how)
                except gg.BudgetError:
                    assert how == "mtp" and m.predictor is None
                    refused += 1
                    continue
                list(run)
                assert run.stats["tokens"] == want.stats["tokens"]
    assert refused and how == "mtp" and run.stats["drafted_tokens"] > 0


def test_files_without_such_a_layer_say_so(parts, tmp_path):
    path, w, metadata = parts("hy_v3-nextn")
    n = metadata["hy_v3.block_count"] - 1
    save_gguf(tmp_path / "none.gguf", {t: a for t, a in w.items() if not t.startswith(f"blk.{n}.nextn")}, metadata)
    with loaded(tmp_path / "none.gguf") as m, pytest.raises(gg.NotSupported, match="no layer that guesses"):
        m.generate([1, 2], speculative="mtp")
    with loaded(path) as m, pytest.raises(gg.ParamError, match="\"lookup\", \"mtp\", a loaded draft model"):
        m.generate([1, 2], speculative="eagle")
