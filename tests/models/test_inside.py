"""Names, values and pictures of what is inside a network: a llama against NumPy in float64, every family against its
own graph without fusion; replaced values against models that were changed; what is refused, and what it leaves."""
import errno
import gc
import re
import subprocess
import sys
import weakref

import gguf
import numpy as np
import pytest
from helpers import arch_files, devices, tiny_model
from helpers.paths import TESTS
from helpers.requirements import shared
from helpers.sample import sampled
from helpers.tiny_model import DIM, HEADS, KV_HEADS, LAYERS, VOCAB

import ggjit as gg
from ggjit.models import load_model
from ggjit.models.families.registry import DECODERS, ENCODERS
from ggjit.models.files.adapter import new_adapter
from ggjit.models.files.gguf import GGUFFile
from ggjit.models.networks import hooks, inside
from ggjit.models.networks.pictures import labels_of

IDS = [3, 17, 40, 31, 5, 9, 22]
D_HEAD = DIM // HEADS


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("model") / "tiny.gguf",
                            shapes={"output.weight": (VOCAB, DIM)})


@pytest.fixture(scope="module")
def model(path):
    with load_model(path, n_threads=1, kv_type="F32") as m:
        yield m


# ---------------------------------------------------------------- the oracle
def weights(path):
    return {t.name: np.array(t.data, np.float64) for t in gguf.GGUFReader(str(path)).tensors}


def rms(x, w):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w


def rotated(x):
    """x [n, heads, D_HEAD]: pairs of neighbours turned by their position."""
    angle = np.arange(len(x))[:, None] * 10000.0 ** (-np.arange(0, D_HEAD, 2) / D_HEAD)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    even, odd = x[..., ::2], x[..., 1::2]
    return np.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)


def forward(w, ids, changed=None):
    """{name: value} of all that a llama of helpers/tiny_model.py computes; changed: {name: function}."""
    found, n = {}, len(ids)

    def named(name, x):
        found[name] = changed[name](x) if changed and name in changed else x
        return found[name]
    x = named("embd", w["token_embd.weight"][ids])
    for i in range(LAYERS):
        p = f"blk.{i}."

        def product(name, x, called, p=p):
            return named(p + called, x @ w[f"{p}{name}.weight"].T)
        h = named(p + "attn_norm", rms(x, w[p + "attn_norm.weight"]))
        q = named(p + "Q_roped", rotated(product("attn_q", h, "Qcur").reshape(n, HEADS, D_HEAD)))
        k = named(p + "K_roped", rotated(product("attn_k", h, "Kcur").reshape(n, KV_HEADS, D_HEAD)))
        v = product("attn_v", h, "Vcur").reshape(n, KV_HEADS, D_HEAD)
        k, v = (np.repeat(t, HEADS // KV_HEADS, 1) for t in (k, v))
        s = named(p + "kq", np.einsum("qhd,khd->hqk", q, k)) / np.sqrt(D_HEAD)
        s = np.where(np.tri(n, dtype=bool), s, -np.inf)
        s = np.exp(s - s.max(-1, keepdims=True))
        s = named(p + "kq_soft_max", s / s.sum(-1, keepdims=True))
        o = named(p + "attn", named(p + "kqv", np.einsum("hqk,khd->hqd", s, v)).transpose(1, 0, 2))
        x = named(p + "ffn_inp", x + product("attn_output", o.reshape(n, DIM), "attn_out"))
        h = named(p + "ffn_norm", rms(x, w[p + "ffn_norm.weight"]))
        gate, up = product("ffn_gate", h, "ffn_gate"), product("ffn_up", h, "ffn_up")
        x = x + product("ffn_down", named(p + "ffn_swiglu", gate / (1 + np.exp(-gate)) * up), "ffn_out")
        x = named(p + "l_out", x)
    named("logits", named("result_norm", rms(x, w["output_norm.weight"])) @ w["output.weight"].T)
    return found


def near(a, b, bound=1e-5):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape and abs(a - b).max() <= bound * max(1, abs(b).max())


# ---------------------------------------------------------------- names
def test_names_and_shapes(model):
    names = model.names()
    assert {s.name for s in names} == forward_names()
    shapes = {s.name: s.shape for s in names}
    assert shapes["blk.1.ffn_out"] == ("n_tokens", DIM) and shapes["logits"] == ("n_tokens", VOCAB)
    assert shapes["blk.0.kq_soft_max"] == (HEADS, "n_tokens", "n_kv")
    assert {(s.op, s.where) for s in model.names("*.ffn_out")} == {("mul_mat", "CPU")}
    text = repr(model.names("blk.1.ffn_*")).splitlines()
    assert text[0].split() == ["name", "op", "shape", "where"] and re.search(r"blk.1.ffn_inp +add +\(n_tokens, 64\)",
                                                                             "\n".join(text))
    assert model.names("blk.1.l_out")._repr_html_().count("<tr>") == 2


def forward_names():
    w = {f"blk.{i}.{n}.weight": np.zeros(shape) for i in range(LAYERS) for n, shape in (
        ("attn_norm", DIM), ("ffn_norm", DIM), ("attn_q", (DIM, DIM)), ("attn_k", (DIM // 2, DIM)),
        ("attn_v", (DIM // 2, DIM)), ("attn_output", (DIM, DIM)), ("ffn_gate", (96, DIM)), ("ffn_up", (96, DIM)),
        ("ffn_down", (DIM, 96)))}
    return forward(w | {"token_embd.weight": np.zeros((VOCAB, DIM)), "output_norm.weight": np.zeros(DIM),
                        "output.weight": np.zeros((VOCAB, DIM))}, [0]).keys()


def test_names_that_llamacpp_writes(model):
    assert [s.name for s in model.names("l_out-*")] == ["blk.0.l_out", "blk.1.l_out"]
    assert [s.name for s in model.names("l_out-1")] == ["blk.1.l_out"]


def test_a_context_of_one_token(path):
    with load_model(path, n_threads=1, n_ctx=1, reserve=False) as m:
        assert m.names("blk.0.l_out")[0].shape == (1, DIM)
        assert m.capture("blk.0.l_out", [3])["blk.0.l_out"].shape == (1, DIM)


# ---------------------------------------------------------------- values
@pytest.mark.parametrize("n_batch", [512, 3])
def test_captured_values_are_those_of_numpy(path, n_batch):
    want = forward(weights(path), IDS)
    with load_model(path, n_threads=1, kv_type="F32", n_batch=n_batch, reserve=False) as m:
        got = m.capture("*", IDS)
        assert got.keys() == want.keys()
        for name, a in got.items():
            assert a.dtype == np.float32
            b = want[name]
            if name.endswith("kq"):                 # later tokens have scores too, so far as they are in the batch
                a, b = np.tril(a), np.tril(b)
            near(a, b)
        assert np.array_equal(m.capture("logits", IDS)["logits"], m.logits(IDS))


def test_the_flash_graph_gives_the_same(model, path):
    """Without names of attention's inside, the fused kernel stays."""
    want = forward(weights(path), IDS)
    got = model.capture(["*attn", "*.l_out"], IDS)
    assert not [t for t in last_plan(model).graph.nodes if t.name == "kq-0"]
    for name, a in got.items():
        near(a, want[name])


def last_plan(m):
    return m._steps.plans()[-1].plan._plan._plan


def test_generated_text_is_captured_too(model, path):
    model.reset()
    with model.capturing(["blk.*.l_out", "blk.1.kq_soft_max", "logits"]) as c:
        model.decode(IDS[:4])
        assert c["blk.0.l_out"].shape == (4, DIM)
        for i in IDS[4:]:
            model.decode([i])
    want = forward(weights(path), IDS)
    assert c.tokens.tolist() == IDS and c.tokens.dtype == np.int32 and len(c) == 4
    near(c["blk.1.l_out"], want["blk.1.l_out"])
    near(c["blk.1.kq_soft_max"], want["blk.1.kq_soft_max"])
    near(c["logits"], want["logits"][3:])                           # of each call's last token
    model.decode([1])
    assert c["blk.0.l_out"].shape == (len(IDS), DIM) and "7 tokens" in repr(c)


@pytest.mark.parametrize("name", ["gemma2"])
def test_keys_of_windows_stand_in_the_order_of_the_text(name, tmp_path):
    """Layers with a window use few cache rows in turn; columns of their weights are positions all the same."""
    arch_files.write(shared("tools"), name, tmp_path / "m.gguf")
    ids, options = (IDS * 6)[:40], dict(n_threads=1, n_ctx=64, n_seqs=1, kv_type="F32", reserve=False)
    path = tmp_path / "m.gguf"
    with load_model(path, **options) as whole, load_model(path, n_batch=3, **options) as m:
        assert min(m.cells.n_rows.values()) < len(ids)
        names = "blk.*.kq_soft_max"
        want, got = whole.capture(names, ids), m.capture(names, ids)
        assert {a.shape[1:] for a in got.values()} == {(40, 40)}
        for key, a in got.items():
            near(a, want[key], 1e-4)
        odd = {names: lambda x: x * (np.arange(x.shape[-1]) % 2)}
        with m.patch(odd), whole.patch(odd):
            a, b = m.decode(ids[:3]), whole.decode(ids[:3])
        near(a, b, 1e-4)
        assert abs(b - whole.logits(ids + ids[:3])[-1]).max() > 1e-3


def test_texts_side_by_side(path):
    """A batch of several texts is filled up with copies of its last token: those are not kept."""
    with load_model(path, n_threads=1, kv_type="F32", reserve=False) as m:
        m._tokenizer = tiny_model.Words()
        prompts = [[5, 6, 7], [8], [9, 10]]
        with m.capturing(["blk.0.l_out", "blk.1.kq_soft_max"]) as c:
            runs = m.generate(prompts, n_predict=4, temp=0)
            list(runs)
        read = [(prompt + run.stats["tokens"])[:-1] for prompt, run in zip(prompts, runs.runs, strict=True)]
        assert sorted(c.tokens.tolist()) == sorted(sum(read, []))
        rows = [row for ids in read for row in m.capture("blk.0.l_out", ids)["blk.0.l_out"]]
        near(np.sort(c["blk.0.l_out"], 0), np.sort(rows, 0), 1e-4)


@pytest.mark.parametrize("name", ["mamba2"])
def test_states_of_texts_side_by_side(name, tmp_path):
    """Steps have a state for each text; what is read from it comes token by token."""
    arch_files.write(shared("tools"), name, tmp_path / "m.gguf")
    with load_model(tmp_path / "m.gguf", n_threads=1, reserve=False, n_ctx=64) as m:
        m._tokenizer, prompts, names = tiny_model.Words(), [[5], [8], [9]], ["blk.0.scan", "blk.1.state_0"]
        with m.capturing(names) as c, m.capturing("blk.1.state_0", out=tmp_path / "states") as written:
            runs = m.generate(prompts, n_predict=4, temp=0)
            list(runs)
        read = [prompt + run.stats["tokens"][:-1] for prompt, run in zip(prompts, runs.runs, strict=True)]
        alone = [m.capture(names, ids) for ids in read]
        near(c["blk.1.state_0"], np.concatenate([a["blk.1.state_0"] for a in alone]), 1e-4)
        near(written["blk.1.state_0"], c["blk.1.state_0"], 0)
        scans = np.stack([a["blk.0.scan"] for a in alone], 1)               # turn by turn
        near(c["blk.0.scan"], scans.reshape(-1, *scans.shape[2:]), 1e-4)


def test_text_read_under_a_patch_is_no_prefix_of_others(path):
    """`generate` does not read again what a prompt shares with the text before: but for values that were changed."""
    with load_model(path, n_threads=1, kv_type="F32", reserve=False) as m:
        m._tokenizer = tiny_model.Words()

        def written():
            run = m.generate(IDS, n_predict=4, temp=0)
            list(run)
            return run.stats["tokens"]
        plain = written()
        with m.patch({"blk.0.ffn_out": lambda x: x * 9}):
            patched = written()
        with m.capturing("embd") as c:
            assert written() == plain != patched
        assert c.tokens.tolist() == (IDS + plain)[:-1]              # all of it was read


def test_files(path, tmp_path):
    with load_model(path, n_threads=1, kv_type="F32", n_batch=3, reserve=False) as m:
        names = ["blk.0.l_out", "blk.1.kq_soft_max"]
        want = m.capture(names, IDS)
        got = m.capture(names, IDS, out=tmp_path / "a" / "b")
        m.reset()
        with m.capturing(names, out=tmp_path / "c") as c:
            m.decode(IDS)
            assert np.array_equal(c["blk.0.l_out"], want["blk.0.l_out"])
        for name in names:
            for a in (got[name], c[name][..., :want[name].shape[-1]]):
                assert isinstance(a, np.memmap) and np.array_equal(a, want[name])
        assert np.array_equal(np.load(tmp_path / "a" / "b" / "blk.0.l_out.npy"), want["blk.0.l_out"])
        with pytest.raises(gg.ParamError, match=r"blk.0.l_out.npy exists; delete it"):
            m.capture("blk.0.l_out", IDS, out=tmp_path / "c")
        with pytest.raises(gg.ParamError, match="is a file; give a folder"):
            m.capture("blk.0.l_out", IDS, out=path)
        with pytest.raises(gg.TypeMismatch, match="path of a folder, got int"):
            m.capture("blk.0.l_out", IDS, out=3)


def test_a_full_disk_leaves_nothing(model, tmp_path, monkeypatch):
    def full(self, a):
        raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(hooks.Rows, "_write", full)
    with pytest.raises(OSError, match="No space left"):
        model.capture("blk.*.l_out", IDS, out=tmp_path)
    assert not list(tmp_path.iterdir()) and not model._hooks.sessions
    assert model.capture("embd", IDS)["embd"].shape == (len(IDS), DIM)


def test_more_than_memory_holds(model, monkeypatch):
    """Values go to a temporary file by themselves: from the start, or once they have grown too large."""
    names = ["blk.0.l_out", "blk.1.kq_soft_max"]
    want = model.capture(names, IDS)
    model.reset()
    with model.capturing(names) as kept:
        model.decode(IDS)
    for module in (hooks, inside):
        monkeypatch.setattr(module, "available_nbytes", lambda: 600)
    got = model.capture(names, IDS)
    model.reset()
    with model.capturing(names) as c:
        model.decode(IDS[:2])
        assert not isinstance(c["blk.0.l_out"].base, np.memmap)
        model.decode(IDS[2:])
        halfway = c["blk.0.l_out"]
        near(halfway, want["blk.0.l_out"], 1e-6)
    for name in names:
        assert isinstance(got[name], np.memmap) and np.array_equal(got[name], want[name])
        assert isinstance(c[name], np.memmap)
        near(c[name][..., :len(IDS)], kept[name][..., :len(IDS)], 1e-6)
    del c
    near(halfway, want["blk.0.l_out"], 1e-6)                # its file is there as long as the array


def test_more_than_memory_and_disk_hold(model, monkeypatch):
    for module in (hooks, inside):
        monkeypatch.setattr(module, "available_nbytes", lambda: 1000)
        monkeypatch.setattr(module, "free_nbytes", lambda: 1000)
    with pytest.raises(gg.OutOfMemory, match=r"of 2 tensors \(blk.0.l_out, ...\) are 3,584 bytes.*out=FOLDER"):
        model.capture("blk.*.l_out", IDS)
    monkeypatch.setattr(hooks, "empty", lambda *a: (_ for _ in ()).throw(gg.OutOfMemory("none left")))
    monkeypatch.setattr(hooks, "free_nbytes", lambda: 10)
    model.reset()
    with model.capturing("blk.0.l_out"), pytest.raises(gg.OutOfMemory, match="out=FOLDER"):
        model.decode([1])
    assert model.n_past == 0


def test_steps_take_fewer_tokens_where_kept_values_are_large(model, monkeypatch):
    monkeypatch.setattr(inside, "KEPT_NBYTES", 2 * DIM * 4)
    n_batch = model.n_batch
    with model.capturing("blk.0.l_out") as c:
        assert model.n_batch == 2
        model.logits(IDS)
    assert model.n_batch == n_batch and len(c["blk.0.l_out"]) == len(IDS)


# ---------------------------------------------------------------- other values
def test_nothing_patched_is_the_same_plan(model):
    before = model.logits(IDS)
    steps = dict(model._steps._kept)
    with model.patch({"blk.*.ffn_out": 0}):
        assert not np.array_equal(model.logits(IDS), before)
    assert np.array_equal(model.logits(IDS), before)
    assert all(model._steps._kept[shape] is step for shape, step in steps.items())


def test_what_a_function_leaves_alone_changes_no_bit(path):
    unfused = gg.init_backend("CPU", n_threads=1)
    unfused.fuse = 0
    for backend, bound in ((unfused, 0), ("CPU", 1e-6)):
        with load_model(path, backend=backend, reserve=False) as m:
            want = m.logits(IDS), m.decode([1])
            for f in (lambda x: None, lambda x: x, lambda x: x.copy()):
                with m.patch({"embd": f, "*_out": f, "*cur": f, "*norm": f}):
                    for a, b in zip((m.logits(IDS), m.decode([1])), want, strict=True):
                        assert abs(a - b).max() <= bound * abs(b).max()


@pytest.mark.parametrize("name,change", [
    ("blk.0.ffn_out", 0), ("blk.1.attn_out", lambda x: 0 * x), ("blk.0.l_out", lambda x: x + np.arange(DIM)),
    ("blk.0.kq_soft_max", lambda x: np.tril(np.ones_like(x)) / np.arange(1, len(IDS) + 1)[:, None]),
    ("blk.1.Vcur", lambda x: x[::-1]), ("embd", lambda x: np.float64(2) * x), ("logits", lambda x: -x)],
    ids=lambda x: x if isinstance(x, str) else "")
def test_patches_against_numpy(model, path, name, change):
    f = change if callable(change) else lambda x: np.broadcast_to(change, x.shape)
    want = forward(weights(path), IDS, {name: f})
    with model.patch({name: change}):
        near(model.logits(IDS), want["logits"], 2e-5)
        near(model.capture(name, IDS)[name], want[name])            # what is kept is what goes on


def test_patches_token_by_token(model, path):
    want = forward(weights(path), IDS, {"blk.0.ffn_out": lambda x: x + 1})["logits"]
    model.reset()
    shapes = []

    def steered(x):
        shapes.append(x.shape)
        x += 1                                                      # in place: nothing is returned
    with model.patch({"blk.0.ffn_out": steered}):
        got = [model.decode(IDS[:3]), *(model.decode([i]) for i in IDS[3:])]
    near(got, want[2:], 2e-5)
    assert shapes == [(3, DIM)] + [(1, DIM)] * 4


def test_blocks_inside_blocks(model, path):
    w = weights(path)
    with model.patch({"blk.*.ffn_out": 2.0}):
        with model.patch({"blk.1.ffn_out": lambda x: x * 3, "blk.0.ffn_out": 1}):
            both = model.logits(IDS)
        outer = model.logits(IDS)
    near(both, forward(w, IDS, {"blk.0.ffn_out": np.ones_like, "blk.1.ffn_out": lambda x: 0 * x + 6})["logits"])
    near(outer, forward(w, IDS, {f"blk.{i}.ffn_out": lambda x: 0 * x + 2 for i in range(2)})["logits"])
    assert model._hooks.wanted is None


def test_layers_are_read_in_order_and_generation_is_patched(model):
    seen = []
    with model.patch({f"blk.{i}.l_out": lambda x, i=i: seen.append((i, len(x))) for i in range(LAYERS)}):
        model.reset()
        model.decode(IDS)
        model.decode([4])
    assert seen == [(0, 7), (1, 7), (0, 1), (1, 1)]


def test_quantised_weights(tmp_path):
    path = tiny_model.write(tmp_path / "q.gguf", type="Q8_0")
    with load_model(path, n_threads=1, reserve=False) as m:
        c = m.capture(["blk.*", "logits"], IDS)
        near(c["blk.1.l_out"], c["blk.1.ffn_inp"] + c["blk.1.ffn_out"], 1e-6)
        with m.patch({"blk.*.ffn_out": 0, "blk.*.attn_out": 0}):
            embd = m.capture(["embd", "blk.1.l_out"], IDS)
        assert np.array_equal(embd["embd"], embd["blk.1.l_out"])


def test_with_an_adapter(path, tmp_path):
    """What a product adds stands in its name."""
    adapter, rng = new_adapter(GGUFFile(path), ("ffn_down",), 4, 8), np.random.default_rng(1)
    for _, up in adapter.pairs.values():
        up.set(rng.standard_normal(up.shape, np.float32))
    adapter.save(tmp_path / "a.gguf")
    low, up = (t.numpy().astype(np.float64) for t in adapter.pairs["blk.1.ffn_down.weight"])
    with load_model(path, n_threads=1, kv_type="F32", reserve=False, lora=[tmp_path / "a.gguf"]) as m:
        c = m.capture(["blk.1.ffn_swiglu", "blk.1.ffn_out"], IDS)
        merged = weights(path)["blk.1.ffn_down.weight"] + 8 / 4 * up @ low
        near(c["blk.1.ffn_out"], c["blk.1.ffn_swiglu"] @ merged.T)


@pytest.mark.parametrize("options", [{}, {"delay": 1e-4}], ids=["plain", "asynchronous"])
def test_under_a_scheduler(path, model, options):
    device = devices.Fake("A", **options)
    patch = {"blk.*.ffn_out": lambda x: x * 0.5, "blk.1.Q_roped": lambda x: x + 1}
    names = ["*.l_out", "blk.1.kq_soft_max", "logits"]
    want = model.capture(names, IDS)
    with model.patch(patch):
        patched = model.capture(names, IDS)
    with load_model(path, backend=device.init_backend(), n_threads=1, kv_type="F32", n_gpu_layers=1) as m:
        assert [s.where for s in m.names("*.l_out")] == ["CPU", "A"]
        plain, shown = m.logits(IDS), []
        m.scheduler.set_eval_callback(lambda t, ask: t.name == "l_out-1" if ask else shown.append(t.name))
        for name, a in m.capture(names, IDS).items():
            near(a, want[name], 1e-6)
        with m.patch(patch):
            for name, a in m.capture(names, IDS).items():
                near(a, patched[name], 1e-6)
        assert shown == ["l_out-1"] * 2                             # the user's own callback sees its node as ever
        m.scheduler.set_eval_callback(None)
        with m.patch({"blk.0.l_out": fails}), pytest.raises(ZeroDivisionError, match="mine"):
            m.logits(IDS)
        assert np.array_equal(m.logits(IDS), plain)
    devices.check_guards(device)


# ---------------------------------------------------------------- every family
FAMILIES = DECODERS | ENCODERS
KINDS = {"recurrent": "recurrent", "encoders": "encoder", "layer_norm": "layer norm"}


def kind(case):
    """What is drawn from; BERT has code of its own."""
    file = FAMILIES[case[0]].__module__.rpartition(".")[2] if case[0] in FAMILIES else "encoders"
    return [KINDS.get(file, "rms norm")]


@pytest.mark.parametrize("name", sampled([(n,) for n in sorted({*FAMILIES, "bert"})], kind))
def test_families(name, tmp_path):
    """What is kept is what the same graph computes node by node; patches reach what follows."""
    arch_files.write(shared("tools"), name, tmp_path / "m.gguf")
    options = {"n_ctx": 64} if name in DECODERS else {}
    with load_model(tmp_path / "m.gguf", n_threads=1, reserve=False, **options) as m:
        run = m.logits if m.CAUSAL else m.embed_ids
        plain = run(IDS)
        found = {s.name for s in m.names()}
        for i in range(m.n_layer):
            assert {f"blk.{i}.{what}" for what in ("attn_out", "l_out")} <= found
        assert "embd" in found and len(found) == len(m.names())
        kept = m.capture([s.name for s in m.names() if s.name not in m._hooks.without_flash], IDS)
        for key, want in node_by_node(m).items():
            near(kept[key], want, 2e-4)
        for key, a in m.capture(weights_of_attention(m), IDS).items() if weights_of_attention(m) else ():
            assert (a >= 0).all() and (a.sum(-1) <= 1 + 1e-5).all(), key
        with m.patch({"*_out": lambda x: None}):
            near(run(IDS), plain, 1e-5)
        with m.patch({"blk.0.l_out": lambda x: x * np.linspace(-1, 1, x.shape[-1])}):
            assert abs(run(IDS) - plain).max() > 1e-6
        assert np.array_equal(run(IDS), plain)


OTHERWISE_IN_LLAMACPP = {       # names of products before their bias, and of values before or after RoPE or a scale
    "embd", "kq", "wqkv", "ffn_up", "ffn_moe_gate", "ffn_moe_up", "ffn_moe_down", "Qcur", "Q_roped", "K_roped"}


@pytest.mark.peer
@pytest.mark.parametrize("name", sampled([(n,) for n in sorted(DECODERS)], kind))
def test_values_are_those_of_llamacpp(name, tmp_path, need):
    """By name, wherever llama.cpp has a tensor of that name."""
    need("xllamacpp", "llama.cpp is the oracle")
    command = [sys.executable, str(TESTS / "helpers" / "arch_files.py"), str(shared("tools")), name, str(tmp_path)]
    r = subprocess.run([*command, "named"], text=True, capture_output=True, timeout=300)
    assert r.returncode == 0, r.stderr[-2000:]
    theirs, n_equal = np.load(tmp_path / "named.npz"), 0
    with load_model(tmp_path / "model.gguf", n_threads=1, n_ctx=64, kv_type="F32", flash=False, reserve=False) as m:
        for key, a in m.capture("*", theirs["ids"]).items():
            blk, _, what = key.rpartition(".")
            called = f"{what.removesuffix('_roped') + 'cur' * what.endswith('_roped')}-{blk[4:]}" if blk else \
                {"logits": "result_output"}.get(key, key)
            found = [theirs[k] for k in theirs.files if k.startswith(called + "|")]
            if what.startswith("kq"):                               # theirs look at more cache rows, which are masked
                found = [b[..., :a.shape[-1]] for b in found]
            if what == "kq":
                a, found = np.tril(a), [np.tril(b) for b in found]
            away = [abs(a.ravel() - b.ravel()).max() / max(1, abs(b).max()) for b in found if b.size == a.size]
            assert not away or what in OTHERWISE_IN_LLAMACPP or min(away) < 3e-3, (key, away)
            n_equal += any(x < 3e-3 for x in away)
    assert n_equal >= 2 * m.n_layer


def weights_of_attention(m):
    return [s.name for s in m.names() if s.name.endswith(".kq_soft_max")]


def node_by_node(m):
    """{name: values} of the step that ran last, in another graph with all names as outputs and no fusion."""
    step = m._steps.plans()[-1]
    backend = gg.init_backend("CPU:n_threads=1,fuse=0")
    m._hooks.wanted = hooks.Wanted()
    try:
        shape = next(owner[0] for owner, (_, kept) in m._steps._kept.items() if kept is step)
        ctx, inputs, results = m._built(shape)
    finally:
        m._hooks.wanted = None
    for name, a in inputs.items():
        a[...] = step.inputs[name]
    named = hooks.named_nodes(results)
    graph = gg.Graph(*results, *named.values())
    gg.GraphAllocator(backend).alloc_graph(graph)
    plan = backend.graph_plan_create(graph)
    plan.compute()
    return {name: plan.numpy(t).astype(np.float32) for name, t in named.items() if "state" not in name}


# ---------------------------------------------------------------- pictures
def test_the_logit_lens(model, path):
    want, w = forward(weights(path), IDS), weights(path)
    lens = model.logit_lens(IDS, top=2)
    states = model.hidden_states(IDS)
    near(states.values, [want["embd"], want["blk.0.l_out"], want["blk.1.l_out"]])
    near(states.norms, np.linalg.norm(states.values, axis=2))
    for i, x in enumerate(states.values.astype(np.float64)):
        logits = rms(x, w["output_norm.weight"]) @ w["output.weight"].T
        p = np.exp(logits - logits.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        near(lens.probabilities[i, :, 0], p.max(-1), 1e-4)
        assert (lens.ids[i, :, 0] == p.argmax(-1)).all()
    assert lens.words[1][2] == labels_of(model, lens.ids[1, 2]) and lens.tokens == [str(i) for i in IDS]
    assert repr(lens).startswith("after '22':\n embd  ") and len(repr(lens).splitlines()) == LAYERS + 2
    assert lens._repr_html_().count("<tr>") == LAYERS + 2


def test_attention_and_its_pictures(model, path):
    maps = model.attention(IDS)
    near(maps.weights[1], forward(weights(path), IDS)["blk.1.kq_soft_max"])
    with pytest.raises(gg.ParamError, match="layer 7 has no attention weights; those that do: 0, 1"):
        maps.plot(layer=7)
    with pytest.raises(gg.ParamError, match="layer None has no attention"):
        maps.plot(head=1)
    pytest.importorskip("matplotlib").use("Agg")
    with pytest.raises(gg.ParamError, match="head must be an integer from 0 to 3"):
        maps.plot(layer=1, head=4)
    for picture in (maps, model.hidden_states(IDS), model.logit_lens(IDS)):
        assert picture._repr_png_().startswith(b"\x89PNG")
    assert [len(maps.plot(*at).texts) for at in ((), (1,), (1, 2))] == [LAYERS, HEADS, 0]


def test_attention_of_sentence_encoders(tmp_path):
    arch_files.write(shared("tools"), "bert", tmp_path / "m.gguf")
    with load_model(tmp_path / "m.gguf", n_threads=1, reserve=False) as m:
        near(m.attention(IDS).weights[0].sum(-1), np.ones((m.n_head, len(IDS))))
        with pytest.raises(gg.NotSupported, match="bert models have no logits"):
            m.logit_lens(IDS)


# ---------------------------------------------------------------- bad input
def fails(x):
    raise ZeroDivisionError("mine")


@pytest.mark.parametrize("patterns,error,match", [
    ("blk.1.fn_out", gg.ParamError, "no tensor of llama is called 'blk.1.fn_out'; the nearest is 'blk.1.ffn_out'"),
    (["embd", "blk.9.l_out"], gg.ParamError, r"called 'blk.9.l_out'; the nearest is 'blk.[01].l_out'"),
    ("", gg.ParamError, "m.names.. lists all"), ([], gg.ParamError, "no tensor is named"),
    (3, gg.TypeMismatch, "a string or a list of strings.*got 3"), ([b"embd"], gg.TypeMismatch, "got .b'embd'.")])
def test_bad_names(model, patterns, error, match):
    for call in (model.names, lambda p: model.capture(p, IDS), model.capturing):
        with pytest.raises(error, match=match):
            call(patterns)


@pytest.mark.parametrize("given,error,match", [
    (lambda x: x[:, :3], gg.ShapeError, r"gave an array \(7, 3\), expected \(7, 64\)"),
    (lambda x: x[None], gg.ShapeError, r"gave an array \(1, 7, 64\)"),
    (lambda x: x + 1j, gg.TypeMismatch, r"gave complex64, expected float32 \(7, 64\)"),
    (lambda x: "zero", gg.TypeMismatch, "gave 'zero', expected float32"),
    (lambda x: x > 0, gg.TypeMismatch, "gave bool"), (lambda x: [[1], [2, 3]], gg.TypeMismatch, "gave list"),
    (lambda x: x * np.nan, gg.ParamError, "'blk.0.ffn_out' gave NaN"), (fails, ZeroDivisionError, "mine"),
    (np.ones(3), gg.ShapeError, r"gave an array \(3,\)")], ids=lambda x: "")
def test_bad_patches_leave_the_text_as_it_was(model, given, error, match):
    model.reset()
    model.decode(IDS[:3])
    with model.patch({"blk.0.ffn_out": given}), pytest.raises(error, match=match):
        model.decode(IDS)
    assert model.n_past == 3 and model._hooks.wanted is None
    near(model.decode(IDS[3:]), model.logits(IDS)[-1])


@pytest.mark.parametrize("changes,error,match", [
    ({"blk.0.fn_out": 0}, gg.ParamError, "nearest is 'blk.0.ffn_out'"), ({}, gg.ParamError, "nothing to change"),
    ([("embd", 0)], gg.TypeMismatch, "a dict .*got list"), ({3: 0}, gg.TypeMismatch, "got 3"),
    ({"embd": "zero"}, gg.TypeMismatch, "patch of 'embd': expected a function, a number or an array"),
    ({"embd": None}, gg.TypeMismatch, "got None"), ({"embd": [[1], [2, 3]]}, gg.TypeMismatch, "expected a function")])
def test_bad_changes(model, changes, error, match):
    with pytest.raises(error, match=match):
        model.patch(changes)


def test_integers_stay_integers(tmp_path):
    arch_files.write(shared("tools"), "qwen3moe", tmp_path / "m.gguf")
    with load_model(tmp_path / "m.gguf", n_threads=1, n_ctx=64, reserve=False) as m:
        name = m.names("blk.0.ffn_moe_topk")[0].name
        assert m.capture(name, IDS)[name].dtype == np.int32
        plain = m.logits(IDS)
        with m.patch({name: 0.5}), pytest.raises(gg.TypeMismatch, match="expected int32"):
            m.logits(IDS)
        with m.patch({name: lambda x: x[:, ::-1]}):                 # the same experts in another order
            near(m.logits(IDS), plain, 1e-4)


@pytest.mark.parametrize("call", ["logits", "hidden", "decode", "capture", "free"])
def test_a_patch_must_not_run_its_model(model, call):
    arguments = {"free": (), "capture": ("embd", IDS)}.get(call, (IDS,))
    model.reset()
    model.decode(IDS[:2])
    with model.patch({"blk.0.l_out": lambda x: getattr(model, call)(*arguments)}), \
            pytest.raises(gg.GgjitError, match="neither run nor free the model"):
        model.decode(IDS)
    assert model.n_past == 2
    near(model.decode(IDS[2:]), model.logits(IDS)[-1])


def test_what_was_kept_does_not_keep_the_model(path):
    m = load_model(path, n_threads=1, reserve=False)
    maps, lens, there = m.attention(IDS), m.logit_lens(IDS), weakref.ref(m)
    with m.patch({"blk.0.ffn_out": 0}), m.capturing("blk.1.kq_soft_max") as c:
        m.logits(IDS)
    gc.disable()
    try:
        del m
        assert there() is None
    finally:
        gc.enable()
    assert len(c["blk.1.kq_soft_max"]) == HEADS and maps.tokens == lens.tokens


def test_blocks_are_used_as_blocks(model):
    c = model.capturing("embd")
    with pytest.raises(gg.ParamError, match="use it as `with"):
        c["embd"]
    with c:
        model.logits(IDS)
    with pytest.raises(gg.ParamError, match="used before"):
        c.__enter__()
    assert len(c["embd"]) == len(IDS) and "blk.0.l_out" not in c
