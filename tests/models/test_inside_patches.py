"""Replaced values of a network: against NumPy and models that were changed; what is refused, and what it leaves."""
import numpy as np
import pytest
from helpers import arch_files, devices, tiny_model
from helpers.numpy_llama import IDS, forward, near, weights
from helpers.requirements import shared
from helpers.tiny_model import DIM, LAYERS

import ggjit as gg
from ggjit.models import load_model
from ggjit.models.files.adapter import new_adapter
from ggjit.models.files.gguf import GGUFFile


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


# ---------------------------------------------------------------- bad input
def fails(x):
    raise ZeroDivisionError("mine")


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
    ({"embd": lambda: 0}, gg.TypeMismatch, "takes one argument, the array"),
    ({"embd": lambda x, y: x}, gg.TypeMismatch, "takes one argument"),
    ({"embd": None}, gg.TypeMismatch, "got None"), ({"embd": [[1], [2, 3]]}, gg.TypeMismatch, "expected a function")])
def test_bad_changes(model, changes, error, match):
    with pytest.raises(error, match=match):
        model.patch(changes)


def test_a_patch_that_no_block_uses_says_so(model):
    assert "patch of blk.0.l_out: in effect inside `with m.patch(...):` alone" in repr(model.patch({"blk.0.l_out": 0}))
    with model.patch({"blk.0.l_out": np.tanh}):
        model.logits(IDS)


def test_one_patch_inside_itself_ends_with_its_outer_block(model):
    patch, before = model.patch({"blk.0.l_out": 0}), model.logits(IDS)
    with patch:
        zero = model.logits(IDS)
        with patch:
            assert np.array_equal(model.logits(IDS), zero)
        assert np.array_equal(model.logits(IDS), zero) and not np.array_equal(zero, before)
    assert np.array_equal(model.logits(IDS), before)


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
