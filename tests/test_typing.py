"""Types of the public API: the stubs say what is there, and mypy understands programs that use them."""
import ast
import importlib.util
import inspect
import os
import subprocess
import sys

import pytest
from helpers.paths import ROOT

import ggjit as gg
import ggjit.models
from ggjit.ops.core.spec import builders
from ggjit.tools import stubs

FOLDERS = {"ggjit": "engine", "ggjit/ops": "ops", "ggjit/ops/core": "ops/core", "ggjit/alloc": "alloc",
           "ggjit/models": "models", "ggjit/train": "engine/train", "ggjit/cluster": "engine/cluster"}
PROGRAM = '''
import pickle
import numpy as np
import ggjit as gg
from ggjit.models import load_model, save_gguf

ctx = gg.Context()
w = gg.from_numpy(ctx, np.ones((3, 64), np.float32), name="w", type=gg.Q8_0)
x = gg.from_numpy(ctx, np.ones((2, 64), np.float32))
y = gg.soft_max(gg.mul_mat(w, x)) * 2 + np.ones(3) - 1.5
reveal_type(y)
reveal_type(gg.compute(y))
reveal_type(gg.compute(y, x))
reveal_type((1 / y)[..., ::2].T @ y)
graph = gg.Graph(y, order="memory")
reveal_type(graph.nodes)
reveal_type(gg.Scheduler([gg.init_backend("CPU")]).get_tensor_backend(y))
with y.write() as a:
    a[0] = 1
save_gguf("m.gguf", {"w": w, "b": np.ones(3)}, {"a": 1})
'''
REVEALED = ["ggjit.Tensor", "numpy.ndarray[tuple[Any, ...], numpy.dtype[Any]]",
            "tuple[numpy.ndarray[tuple[Any, ...], numpy.dtype[Any]], ...]", "ggjit.Tensor", "list[ggjit.Tensor]",
            "ggjit.Backend | None"]
WRONG = {'gg.add(x)': "Missing positional argument", 'gg.scale(x, "2")': "incompatible type",
         'gg.measure(graph, planner="first")': "incompatible type", 'x.shapes': "has no attribute",
         'gg.no_such_op(x)': "has no attribute", 'x["a"]': "Invalid index type",
         'load_model("m.gguf", n_cxt=8)': "Unexpected keyword argument", 'load_model("m.gguf", n_ctx="8")': "n_ctx"}


@pytest.fixture(scope="module")
def mypy(tmp_path_factory):
    """mypy on a program, with the packages where an installation has them."""
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed")
    folder = tmp_path_factory.mktemp("typing")
    site = folder / "site"
    for package, source in FOLDERS.items():
        (site / package).mkdir(parents=True)
        types = list((ROOT / source).glob("*.pyi"))         # which stand for the sources beside them
        for f in [*(types or (ROOT / source).glob("*.py")), *(ROOT / source).glob("py.typed")]:
            (site / package / f.name).symlink_to(f)

    def run(*args, program=None):
        if program is not None:
            (folder / "program.py").write_text(program)
            args = (*args, str(folder / "program.py"))
        command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir",
                   str(folder / "cache"), "--no-error-summary", *args]
        # a program elsewhere imports ggjit from where it is installed; MYPYPATH stands for that
        r = subprocess.run(command, cwd=folder, text=True, capture_output=True, timeout=300,
                           env={"MYPYPATH": str(site), "PATH": ""})
        assert not r.stderr, r.stderr
        return r.stdout
    return run


def hidden():
    """{name in a stub: class} of what functions return."""
    from ggjit.alloc.report import MeasureReport
    from ggjit.api.remat_graph import Rematerialized
    from ggjit.api.rematerialize import Pareto
    from ggjit.cpu.thread_pool import Pool
    from ggjit.display.drawing import Drawing
    from ggjit.display.explorer import Explorer
    from ggjit.graphs.graph_plan import Plan
    from ggjit.models.files.control_vector import ControlVector
    from ggjit.models.files.imatrix import Imatrix, ImportanceSums
    from ggjit.models.networks.base.network import Network
    from ggjit.models.networks.inside.inside import Capturing
    from ggjit.models.networks.inside.pictures import AttentionMaps, HiddenStates, LogitLens
    from ggjit.models.networks.sounds.silero import SileroVad
    from ggjit.models.speech.speech import Speech
    from ggjit.models.speech.streaming import LiveTranscript
    from ggjit.models.speech.transcript import Language, Segment, Transcript
    from ggjit.models.speech.words import Word
    from ggjit.models.text.generation import Generation
    from ggjit.models.text.generations import Generations
    from ggjit.profiling.nodes import NodeTime
    from ggjit.profiling.profile import Profile
    found = (MeasureReport, Drawing, Explorer, Generation, Generations, Imatrix, Network, Pareto, Plan, Pool, NodeTime,
             Profile, Rematerialized, SileroVad, Speech, Language, Segment, Transcript, LiveTranscript, Word,
             ImportanceSums, Capturing, AttentionMaps, HiddenStates, LogitLens, ControlVector)
    return {f"_{c.__name__}": c for c in found}


def stub(path):
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def public(module):
    return {n for n in dir(module) if not n.startswith("_") and not inspect.ismodule(getattr(module, n))}


def arguments(f):
    """[(name, kind, has a default)] of a function that is there, without self."""
    return [(p.name, p.kind, p.default is not p.empty) for p in inspect.signature(f).parameters.values()
            if p.name != "self"]


def stub_arguments(node):
    """The same of a function in a stub."""
    a, P = node.args, inspect.Parameter
    plain = [*a.posonlyargs, *a.args]
    first = len(plain) - len(a.defaults)
    out = [(x.arg, P.POSITIONAL_OR_KEYWORD, i >= first) for i, x in enumerate(plain)]
    out += [(a.vararg.arg, P.VAR_POSITIONAL, False)] if a.vararg else []
    out += [(x.arg, P.KEYWORD_ONLY, d is not None) for x, d in zip(a.kwonlyargs, a.kw_defaults, strict=True)]
    out += [(a.kwarg.arg, P.VAR_KEYWORD, False)] if a.kwarg else []
    return [x for x in out if x[0] != "self"]


def test_the_ops_stub_is_up_to_date():
    text = (ROOT / "engine" / "all_ops.pyi").read_text(encoding="utf-8")
    assert text == stubs.text(), "run: python -m ggjit.tools.stubs"
    assert max(map(len, text.splitlines())) <= 120


def test_the_stub_knows_every_sampling_option():
    from ggjit.models.text.sampling import OPTIONS
    node = next(n for n in stub("models/__init__.pyi").body if isinstance(n, ast.ClassDef) and n.name == "_Sampling")
    assert [n.target.id for n in node.body if isinstance(n, ast.AnnAssign)] == [o for o in OPTIONS if o != "temp"]


def test_every_public_name_has_a_type():
    tree = stub("engine/__init__.pyi")
    named = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    named |= {n.target.id for n in tree.body if isinstance(n, ast.AnnAssign)}
    named |= {a.asname for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names if a.asname}
    there = public(gg) - set(builders()) - {repr(t) for t in stubs.BY_NAME.values()}
    assert there - named == set()
    assert {n for n in named if not n.startswith("_")} - there - {"Scheduler", "errors", "train", "cluster"} == set()


@pytest.mark.parametrize("module,path", [(gg, "engine/__init__.pyi"), (ggjit.models, "models/__init__.pyi"),
                                         (gg.train, "engine/train/__init__.pyi"),
                                         (gg.cluster, "engine/cluster/__init__.pyi")])
def test_functions_and_methods_take_what_their_stubs_say(module, path):
    n = 0
    for node in stub(path).body:
        if isinstance(node, ast.FunctionDef) and not node.decorator_list:
            assert arguments(getattr(module, node.name)) == stub_arguments(node), node.name
            n += 1
        elif isinstance(node, ast.ClassDef) and node.name != "Type":
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    there = inspect.getattr_static(hidden().get(node.name) or getattr(module, node.name), method.name)
                    if callable(there) and not method.name == "__exit__":
                        assert arguments(there) == stub_arguments(method), f"{node.name}.{method.name}"
                        n += 1
    assert n > 3


# constructors that users do not call; all_ops is a stub alone
NOT_COMPARED = "".join(f"ggjit.{name}\n" for name in (r"(Event|GraphCopy|Tensor|Type)\.__init__", "all_ops"))


def stubtest(folder, edit=lambda text: text):
    """What mypy's stubtest says of the stubs, edited, beside the packages as they are: names, kinds, defaults."""
    pytest.importorskip("mypy")
    site = folder / "site"
    for package, source in FOLDERS.items():
        (site / package).mkdir(parents=True)
        for f in (ROOT / source).glob("*.pyi"):
            (site / package / f.name).write_text(edit(f.read_text(encoding="utf-8")), encoding="utf-8")
    for name in ("__init__.py", "core/__init__.py"):
        (site / "ggjit/ops" / name).touch()
    for name in ("core/errors.py", "core/printable.py", "core/record.py", "core/user_warnings.py"):   # what they import
        (site / "ggjit/ops" / name).symlink_to(ROOT / "ops" / name)
    (folder / "allowed").write_text(NOT_COMPARED)
    command = [sys.executable, "-m", "mypy.stubtest", "ggjit", "--concise", "--ignore-missing-stub", "--allowlist",
               str(folder / "allowed"), "--mypy-config-file", str(ROOT / "pyproject.toml")]
    r = subprocess.run(command, cwd=folder, text=True, capture_output=True, timeout=300,
                       env={**os.environ, "MYPYPATH": str(site), "NO_COLOR": "1"})
    assert not r.stderr, r.stderr
    return [line for line in r.stdout.splitlines() if line.startswith("ggjit") or line.startswith("error")]


def test_stubs_and_runtime_agree(tmp_path):
    assert stubtest(tmp_path) == []


def test_stubs_that_differ_are_found(tmp_path):
    changes = {
        "def load_vad(path: _Path": "def load_vad(file: _Path",                                 # another name
        'conv_type: Literal["F32", "F16"] = "F32"': 'conv_type: Literal["F32", "F16"] = "F16"',  # another default
        "def profile() ->": "def profile(graph: Graph) ->",                                     # one more argument
        "    def set(self, array: npt.ArrayLike) -> None": "    def put(self, array: npt.ArrayLike) -> None"}
    left = set(changes)

    def edit(text):
        for old, new in changes.items():
            if old in text:
                left.discard(old)
                text = text.replace(old, new)
        return text
    out = stubtest(tmp_path, edit)
    assert not left, f"not in the stubs any more: {left}"
    for said in ('ggjit.models.load_vad is inconsistent, stub parameter "file"',
                 'ggjit.models.load_vad is inconsistent, runtime parameter "conv_type" has a default value',
                 "ggjit.profile is inconsistent", "ggjit.Tensor.put is not present at runtime"):
        assert any(line.startswith(said) for line in out), (said, out)


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "engine" / "py.typed").exists() and (ROOT / "models" / "py.typed").exists()
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '"*" = ["py.typed", "*.pyi", "*.js", "*.html"]' in text


def test_mypy_finds_the_stubs_clean(mypy):
    assert mypy("-m", "ggjit", "-m", "ggjit.all_ops", "-m", "ggjit.models") == ""


def test_mypy_knows_the_types_of_a_program(mypy):
    out = mypy(program=PROGRAM)
    assert [line.split('"')[1] for line in out.splitlines() if "Revealed" in line] == REVEALED
    assert "error" not in out


def test_mypy_refuses_wrong_programs(mypy):
    start = PROGRAM.split("reveal_type")[0] + "graph = gg.Graph(y)\n"
    n = start.count("\n")
    out = mypy(program=start + "\n".join(WRONG)).splitlines()
    for i, (line, said) in enumerate(WRONG.items()):
        assert any(f"program.py:{n + 1 + i}:" in o and said in o for o in out), (line, out)
