"""Names, values and pictures of what is inside a network: a llama against NumPy in float64, every family against its
own graph without fusion."""
import errno
import gc
import re
import weakref

import numpy as np
import pytest
from helpers import arch_files, tiny_model
from helpers.llamacpp import computed
from helpers.numpy_llama import IDS, forward, near, rms, weights
from helpers.requirements import shared
from helpers.sample import sampled
from helpers.tiny_model import DIM, HEADS, LAYERS, VOCAB

import ggjit as gg
from ggjit.models import load_model
from ggjit.models.families.registry import DECODERS, ENCODERS
from ggjit.models.networks.inside import hooks, inside
from ggjit.models.networks.inside.pictures import labels_of


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
    monkeypatch.setattr(hooks.TokenRows, "_write", full)
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
    near(halfway, want["blk.0.l_out"], 1e-6)                # the file exists as long as the array


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
        run = arch_files.prepared(m).logits if m.CAUSAL else m.embed_ids
        plain = run(IDS)
        found = {s.name for s in m.names()}
        for i in range(m.n_layer):
            unmixed = name == "deci" and m.description.blocks[i].mixer is None
            assert {f"blk.{i}.{what}" for what in ("attn_out", "l_out")[unmixed:]} <= found
        assert "embd" in found and len(found) == len(m.names())
        kept = m.capture([s.name for s in m.names() if s.name not in m._hooks.without_flash], IDS)
        for key, want in node_by_node(m).items():
            scores = key.rpartition(".")[2] in ("kq", "kq_soft_max")        # of the text's keys, not of all cache rows
            near(kept[key], want[..., :kept[key].shape[-1]] if scores else want, 2e-4)
        for key, a in m.capture(weights_of_attention(m), IDS).items() if weights_of_attention(m) else ():
            assert (a >= 0).all() and (a.sum(-1) <= 1 + 1e-5).all(), key
        with m.patch({"*_out": lambda x: None}):
            near(run(IDS), plain, 1e-5)
        with m.patch({"blk.0.l_out": lambda x: x * np.linspace(-1, 1, x.shape[-1])}):
            assert abs(run(IDS) - plain).max() > 1e-6
        assert np.array_equal(run(IDS), plain)


OTHERWISE_IN_LLAMACPP = {       # names of products before their bias, and of values before or after RoPE or a scale
    ("nemotron_h", "l_out"), ("nemotron_h_moe", "l_out"), ("jamba", "ffn_inp"),         # theirs is before the addition
    ("arctic", "ffn_out"), ("falcon-h1", "attn_out"), ("mimo2", "attn_out"),            # ours is of all that is added
    ("spark2_5", "attn_gate"),  # theirs is after the sigmoid
    ("nanbeige", "l_out"), ("hrm_text", "l_out"),               # theirs is before the norm
    ("graniteswitch", "Kcur"),  # theirs is after RoPE
    ("chameleon", "logits"),    # theirs hide what is no text in the first row alone
    ("gemma4", "attn_out"),     # theirs is after the addition
    ("bitnet", "ffn_gate"),     # theirs is before the factor
    ("llama4", "ffn_norm"),     # theirs is what attention gave
    "embd", "kq", "wqkv", "ffn_up", "ffn_moe_gate", "ffn_moe_up", "ffn_moe_down", "Qcur", "Q_roped", "K_roped"}


@pytest.mark.peer
@pytest.mark.parametrize("name", sampled([(n,) for n in sorted(DECODERS) if n != "gptj"], kind))      # it has none
def test_values_are_those_of_llamacpp(name, tmp_path, need):
    """By name, wherever llama.cpp has a tensor of that name."""
    need("xllamacpp", "llama.cpp is the oracle")
    theirs, n_equal = computed("arch_files", name, tmp_path, "named.npz", "named"), 0
    with load_model(tmp_path / "model.gguf", n_threads=1, n_ctx=64, kv_type="F32", flash=False, reserve=False) as m:
        arch_files.prepared(m)
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
            otherwise = {what, (name, what)} & OTHERWISE_IN_LLAMACPP
            assert not away or otherwise or min(away) < 3e-3, (key, away)
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
    with pytest.raises(gg.ParamError, match=r"head 1 of which layer\?  plot\(layer=0, head=1\)"):
        maps.plot(head=1)
    pytest.importorskip("matplotlib").use("Agg")
    with pytest.raises(gg.ParamError, match="head must be an integer from 0 to 3"):
        maps.plot(layer=1, head=4)
    for picture in (maps, model.hidden_states(IDS), model.logit_lens(IDS)):
        assert picture._repr_png_().startswith(b"\x89PNG")
    assert [len(maps.plot(*at).texts) for at in ((), (1,), (1, 2))] == [LAYERS, HEADS, 0]


def test_results_are_reached_as_arrays(model):
    states, maps, why = model.hidden_states(IDS), model.attention(IDS), model.attribution(IDS)
    assert states.shape == states.values.shape and len(states) == model.n_layer + 1
    np.testing.assert_array_equal(states[-1], states.values[-1])
    np.testing.assert_array_equal(np.asarray(states, np.float64), states.values.astype(np.float64))
    np.testing.assert_array_equal(np.asarray(why), why.scores)
    np.testing.assert_array_equal(maps[-1], maps.weights[max(maps.weights)])
    assert [a.shape for a in maps] == [a.shape for a in maps.weights.values()]
    np.testing.assert_array_equal(maps[0, 1], maps.weights[0][1])
    for wrong, said in ((lambda: maps[99], "layer 99 has no attention weights; those that do: 0, 1"),
                        (lambda: maps[:2], "layer slice.* has no attention weights"),
                        (lambda: maps[0, 99], r"maps\[0, 99\]: indices behind the layer .* array of shape"),
                        (lambda: states[99], r"HiddenStates\[99\]: .* array of shape"),
                        (lambda: states["l_out"], "'l_out'")):
        with pytest.raises(gg.IndexRangeError, match=said):
            wrong()
    with pytest.raises(gg.ParamError, match=r"plot: layer \[0\] has no attention weights"):
        maps._chosen([0], 0)
    with pytest.raises(AttributeError, match="no attribute 'value'; it has .*norms, plot.*did you mean values"):
        getattr(states, "value")  # noqa: B009


def test_attention_of_sentence_encoders(tmp_path):
    arch_files.write(shared("tools"), "bert", tmp_path / "m.gguf")
    with load_model(tmp_path / "m.gguf", n_threads=1, reserve=False) as m:
        near(m.attention(IDS).weights[0].sum(-1), np.ones((m.n_head, len(IDS))))
        with pytest.raises(gg.NotSupported, match="bert models have no logits"):
            m.logit_lens(IDS)


# ---------------------------------------------------------------- bad names, blocks
@pytest.mark.parametrize("patterns,error,match", [
    ("blk.1.fn_out", gg.ParamError, "no tensor of llama is called 'blk.1.fn_out'; the nearest is 'blk.1.ffn_out'"),
    (["embd", "blk.9.l_out"], gg.ParamError, r"called 'blk.9.l_out'; the nearest is 'blk.[01].l_out'"),
    ("", gg.ParamError, "m.names.. lists all"), ([], gg.ParamError, "no tensor is named"),
    (3, gg.TypeMismatch, "a string or a list of strings.*got 3"), ([b"embd"], gg.TypeMismatch, "got .b'embd'.")])
def test_bad_names(model, patterns, error, match):
    for call in (model.names, lambda p: model.capture(p, IDS), model.capturing):
        with pytest.raises(error, match=match):
            call(patterns)


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
