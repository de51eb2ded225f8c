"""What the ops say of themselves: docstrings, the generated pages, `ggjit info`, and that an op is one file."""
import importlib
import importlib.util
import inspect
import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from helpers.paths import ROOT

import ggjit as gg
from ggjit.api.registry import registry
from ggjit.ops.core.errors import GgjitError, NotAllocated, ParamError, TypeMismatch
from ggjit.ops.core.record import OP
from ggjit.ops.core.spec import all_specs
from ggjit.ops.core.types import TYPE_INFO
from ggjit.tools.command import op_page, support

BUILDERS = {b.__name__: b for spec in all_specs().values() for b in spec.builders}
STALE = "docs/{} is not what the specs say: run `python docs/generate.py`"


def cpu():
    return registry.device("CPU")


@pytest.fixture(scope="module")
def generate():
    """docs/generate.py as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs"))
        yield importlib.import_module("generate")


# ---------------------------------------------------------------- docstrings
def read_with(name, seen=()):
    """The docstring of a builder and of those it names in backticks, theirs too."""
    doc = inspect.getdoc(BUILDERS[name]) or ""
    others = {r for r in re.findall(r"`(\w+)`", doc) if r in BUILDERS} - {name, *seen}
    return " ".join([doc, *(read_with(r, (name, *seen)) for r in sorted(others))])


@pytest.mark.parametrize("name", BUILDERS)
def test_docstring(name):
    """Formula, parameters, errors, source; shapes and types are sentences that no test can read."""
    own, every = inspect.getdoc(BUILDERS[name]) or "", read_with(name)
    assert re.search(r"Source:\s.*ggml_\w+", own, re.S), f"{name}: no source"
    assert re.search(r"Errors:\s", every), f"{name}: no errors"
    unnamed = [p for p in inspect.signature(BUILDERS[name]).parameters if not re.search(rf"\b{p}\b", every)]
    assert not unnamed, f"{name}: parameters {unnamed} are not described"
    assert len(own.splitlines()[0]) > 20 and not own.startswith("The same")


@pytest.mark.parametrize("name, words", [
    ("pool_1d", "average of the taps inside"), ("pool_2d", "divide by k0 k1 even at the edges"),
    ("argmax", "Among equals the last one counts"), ("permute", "scatter"), ("top_k", "first two exchanged"),
    ("clamp", "Always in place"), ("conv_2d", "to F16, whatever a is"), ("set_rows", "src order of the node: b, c, a"),
    ("rms_norm_back", "swapped"), ("cross_entropy_loss_back", "its code reads gradient"), ("solve_tri", "ggml aborts"),
    ("flash_attn_back", "NotSupported"), ("pad_ext_circular", "reads before its tensor"), ("gelu", "table of F16"),
    ("conv_1d", "only where N or OC is 1")])
def test_quirks_are_told(name, words):
    assert words in re.sub(r"\s+", " ", inspect.getdoc(BUILDERS[name]))


# ---------------------------------------------------------------- generated pages
def test_ops_page_is_generated(generate):
    page = (ROOT / "docs" / "ops.md").read_text(encoding="utf-8")
    assert page == generate.ops_page(), STALE.format("ops.md")
    assert all(f"\n## {op.name}\n" in page for op in all_specs())
    assert all(f"\n{op_page.signature(b)}\n" in page for b in BUILDERS.values())


def test_models_page_is_generated(generate):
    page = (ROOT / "docs" / "models.md").read_text("utf-8")
    assert page == generate.models_page.page(), STALE.format("models.md")


def test_api_page_is_generated(generate):
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert page == generate.api_page.page(), STALE.format("api.md")
    assert all(f"\n### {name}\n" in page for name in ("Tensor", "compute", "load_model", "save_gguf", "Decoder"))


def test_names_page_is_generated(generate, need):
    need("xllamacpp", "the names that ggml exports")
    if shutil.which("nm") is None:
        pytest.skip("nm (binutils) lists what a library exports")
    page = (ROOT / "docs" / "ggml-names.md").read_text(encoding="utf-8")
    names = generate.ggml_names
    if f"{importlib.metadata.version('xllamacpp')})" not in page:
        pytest.skip("the page was made from another version of xllamacpp")
    assert page == names.page(), STALE.format("ggml-names.md")


def test_names_page_names_what_exists(generate):
    page = (ROOT / "docs" / "ggml-names.md").read_text("utf-8")
    rows = re.findall(r"^\| `(gg\w+)` \| (.*?) \| (.*?) \|$", page, re.M)
    assert len(rows) > 900
    for function, names, note in rows:
        assert names != "-" or note, f"{function} is missing without a reason"
        for name in re.findall(r"`([\w.]+)`", names):
            generate.ggml_names.resolve(name)
    missing = {f for f, names, _ in rows if names == "-"}
    ops = {f"ggml_{b}" for b in BUILDERS}
    assert not missing & ops
    with pytest.raises(LookupError, match="no_such_thing"):
        generate.ggml_names.place("ggml_no_such_thing")
    with pytest.raises((AttributeError, ImportError)):
        generate.ggml_names.resolve("gg.Tensor.no_such_thing")


# ---------------------------------------------------------------- types, by asking
def test_types_are_those_that_compute():
    types = support.op_types(OP.MUL_MAT, cpu())
    assert {gg.F32, gg.F16, gg.Q4_0, gg.IQ1_S, gg.NVFP4} <= set(types["src0"]) and types["result"] == [gg.F32]
    assert not {gg.I32, gg.Q8_1, gg.F64} & set(types["src0"])
    assert types["src1"] == [gg.F32, gg.F16, gg.Q8_0, gg.Q8_1, gg.Q8_K, gg.BF16]        # blocks: see column_types
    assert support.op_types(OP.POOL_1D, cpu()) == {"src0": [gg.F32, gg.F16], "result": [gg.F32]}
    assert support.op_types(OP.FLASH_ATTN_BACK, cpu()) == {} and not support.supports(OP.FLASH_ATTN_BACK, cpu())
    assert gg.Q8_0 in support.op_types(OP.ADD, cpu())["src0"] and gg.Q8_0 not in support.op_types(OP.MUL, cpu())["src0"]


def test_a_device_that_refuses_is_believed():
    class Picky:
        name = "PICKY"

        def supports_op(self, t):
            return t.op == OP.ADD and t.src[0].type is gg.F16

    picky = Picky()
    assert support.op_types(OP.ADD, picky)["src0"] == [gg.F16] and support.op_types(OP.MUL, picky) == {}
    assert op_page.sources_text(OP.MUL, picky) == "not supported"
    assert op_page.sources_text(OP.VIEW, picky).startswith("any type")


def test_types_in_words():
    every = list(TYPE_INFO.values())
    assert op_page.types_text(every) == "any type" and op_page.types_text([gg.F32, gg.I32]) == "F32 I32"
    assert op_page.types_text([t for t in every if t is not gg.Q8_K]) == "any type but Q8_K"
    assert op_page.types_text([t for t in every if t.quantized] + [gg.F32]) == "F32, any quantised type"
    assert op_page.types_text([]) == "-"


def ggjit(*args):
    return subprocess.run([sys.executable, "-m", "ggjit.tools.command.main", *args], text=True, capture_output=True,
                          timeout=300)


def test_info():
    r = ggjit("info")
    assert r.returncode == 0, r.stderr
    assert re.search(r"^MUL_MAT\s+src0 .*any (quantised )?type but .* -> F32$", r.stdout, re.M)
    r = ggjit("info", "soft_max_ext", "--json")
    got = json.loads(r.stdout)
    assert got["op"] == "SOFT_MAX" and got["file"] == "ops/reductions/soft_max.py"
    assert got["types"]["CPU"]["src1"] == ["f32", "f16"]
    assert any(s.startswith("soft_max_ext(a, mask") and "ALiBi" in doc for s, doc in got["builders"].items())
    assert op_page.find("ggml_soft_max") == op_page.find("SOFT_MAX") == OP.SOFT_MAX
    assert "## SOFT_MAX" in op_page.op_page(OP.SOFT_MAX)
    with pytest.raises(ParamError, match="no op 'fly'"):
        op_page.find("fly")


# ---------------------------------------------------------------- one op, one file
def test_files_of_families():
    files = op_page.files()
    assert files[OP.ROPE] == ("ops/attention/rope.py", ["ops/attention/rope_angles.py"]) == files[OP.ROPE_BACK]
    assert len({home for home, _ in files.values()}) < len(files) / 1.5         # families share a file
    for home, helpers in files.values():
        assert all((ROOT / name).is_file() for name in (home, *helpers))


@pytest.mark.parametrize("name, builder", [("reductions.cumsum", "cumsum"), ("conv.pooling", "pool_2d")])
def test_an_op_is_one_file(name, builder, python):
    """Without its file an op is unknown and everything else works: nothing but the file has to be added."""
    r = python(f"""
import pkgutil
every = pkgutil.iter_modules
pkgutil.iter_modules = lambda *a: (i for i in every(*a) if i.name != {name.rpartition(".")[2]!r})
import numpy as np, sys
import ggjit as gg
from ggjit.tools.command.support import supported
from ggjit.ops.core.spec import all_specs
from ggjit.ops.core.types import TYPE_INFO
assert "ggjit.ops.{name}" not in sys.modules
ctx = gg.Context()
x = gg.from_numpy(ctx, np.ones((2, 8), np.float32))
assert gg.compute(gg.sum_rows(gg.mul_mat(x, x))).tolist() == [[16], [16]]
ops, _ = supported()
print([op for op, where in ops.items() if not where])
print(hasattr(gg, {builder!r}), hasattr(gg, "timestep_embedding"))
""")
    assert r.returncode == 0, r.stderr
    missing, has = r.stdout.splitlines()
    gone = {op.name for op, spec in all_specs().items() if spec.module == f"ggjit.ops.{name}"}
    assert set(eval(missing)) == gone | {"FLASH_ATTN_BACK"}
    assert has == "False True"


# ---------------------------------------------------------------- names that were missing
def test_small_leaves():
    ctx = gg.Context()
    a, b = gg.new_f32(ctx, 1.5), gg.new_i32(ctx, np.int64(-3))
    assert (a.type, a.ne, a.numpy().tolist()) == (gg.F32, (1, 1, 1, 1), [1.5])
    assert (b.type, b.numpy().tolist()) == (gg.I32, [-3])
    assert gg.compute(gg.add1(gg.from_numpy(ctx, np.ones(3, np.float32)), a)).tolist() == [2.5] * 3
    for call, error in ((lambda: gg.new_i32(ctx, 2**31), ParamError), (lambda: gg.new_i32(ctx, 1.5), TypeMismatch),
                        (lambda: gg.new_f32(ctx, "x"), TypeMismatch), (lambda: gg.new_f32(3, 1.0), TypeMismatch)):
        with pytest.raises(error):
            call()


def test_set_zero():
    ctx = gg.Context()
    x = gg.from_numpy(ctx, np.arange(1, 25, dtype=np.float32).reshape(4, 6).copy())
    assert gg.set_zero(gg.view_2d(x, 2, 2, x.nb[1], x.nb[1])).ne[:2] == (2, 2)
    want = np.arange(1, 25, dtype=np.float32).reshape(4, 6)
    want.reshape(-1)[6:14] = 0                                      # gaps included, as ggml does
    assert x.numpy().tolist() == want.tolist()
    for name in ("Q4_K", "IQ2_XXS", "MXFP4"):
        q = gg.from_numpy(ctx, np.ones((2, 256), np.float32), type=gg.Q4_K) if name == "Q4_K" else \
            ctx.new_tensor(getattr(gg, name), (256, 2))
        gg.alloc_ctx_tensors(ctx, gg.init_backend("CPU"))
        assert not gg.set_zero(q).numpy().any()
    gg.set_zero(ctx.new_tensor(gg.F32, (0, 3)))
    with pytest.raises(NotAllocated):
        gg.set_zero(ctx.new_tensor(gg.F32, (3,)))
    with pytest.raises(GgjitError):
        gg.set_zero(3)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q6_K"])
def test_add_cast(kind):
    rng = np.random.default_rng(0)
    ctx, type = gg.Context(), getattr(gg, kind)
    a = gg.from_numpy(ctx, rng.uniform(-1, 1, (3, 4, 256)).astype(np.float32), type=type)
    b = gg.from_numpy(ctx, rng.uniform(-1, 1, (1, 4, 256)).astype(np.float32))
    want = a.numpy().astype(np.float32) + b.numpy()
    assert gg.compute(gg.add_cast(a, b, gg.F32)).tolist() == want.tolist()
    assert gg.compute(gg.add_cast(a, b, gg.F16)).tolist() == want.astype(np.float16).tolist()
    anew = gg.from_numpy(ctx, want, type=type)
    same = gg.compute(gg.add(a, b))
    assert np.square(same - anew.numpy()).sum() <= 1e-5 * np.square(want).sum()
    gg.compute(gg.add_inplace(a, b))
    assert a.numpy().tolist() == same.reshape(a.shape).tolist()
    for bad in ((a, gg.view_1d(b, 32, 0), gg.F32), (b, b, gg.F16), (a, b, gg.I32), (a, b, "F99")):
        with pytest.raises(GgjitError):
            gg.add_cast(*bad)
