"""Errors tell what helps: functions, commands, options and extras they name exist, and doing what they say helps."""
import ast
import copy
import functools
import pathlib
import pickle
import re
import tomllib

import numpy as np
import pytest
from helpers.paths import ROOT

import ggjit as gg
from ggjit.models import load_gguf, load_model, save_gguf, save_safetensors
from ggjit.models.files.adapter import new_adapter
from ggjit.models.files.gguf import GGUFFile
from ggjit.models.networks.load import EMBEDDED
from ggjit.tools.command.parser import COMMANDS, Arguments

X = np.arange(24, dtype=np.float32).reshape(4, 6)
FOLDERS = ("engine", "ops", "alloc", "models", "tools")
ELSEWHERE = {"--user", "--upgrade", "--force-reinstall", "--no-deps"}          # options of pip


@functools.cache
def texts():
    """[(file and line, text)] of every error that is raised, values left out."""
    found = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Raise) and node.exc is not None:
                    parts = [c.value for c in ast.walk(node.exc) if isinstance(c, ast.Constant)]
                    found.append((f"{path.relative_to(ROOT)}:{node.lineno}",
                                  " ".join(p for p in parts if isinstance(p, str))))
    return found


def found(pattern):
    return [(where, name) for where, text in texts() for name in re.findall(pattern, text)]


def test_functions_that_errors_name_exist():
    for where, name in found(r"(?<![\w.])gg((?:\.[A-Za-z_]\w*)+)"):
        at = gg
        for part in name[1:].split("."):
            assert hasattr(at, part), f"{where} names gg{name}"
            at = getattr(at, part)


def test_commands_and_options_that_errors_name_exist():
    parser = Arguments()
    options = {o for name in COMMANDS for a in parser.command(name)._actions for o in a.option_strings} | ELSEWHERE
    assert [x for x in found(r"`ggjit ([a-z-]+)") if x[1] not in COMMANDS] == []
    named = found(r"(?<![\w-])(--[a-z][a-z-]+)")
    assert len(named) > 20 and [x for x in named if x[1] not in options] == []


def test_extras_that_errors_name_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    named = found(r"ggjit\[(\w+)\]")
    calls = [(str(path), name) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")
             for name in re.findall(r'\bextra\("[\w.]+", "(\w+)"\)', path.read_text("utf-8"))]
    assert named and calls and [x for x in named + calls if x[1] not in extras] == []


# ---------------------------------------------------------------- doing what they say
def tensor(*shape, **options):
    return gg.tensor(np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape), **options)


def mapped(folder):
    """A tensor whose memory is a file's."""
    save_gguf(folder / "w.gguf", {"w": tensor(4, 6)}, {})
    return load_gguf(folder / "w.gguf")[0]["w"]


def unallocated(folder):
    return gg.Context().new_tensor(gg.F32, (6, 4), "t")


def with_memory(t):
    gg.alloc_ctx_tensors(t.ctx, gg.init_backend("CPU"))
    t.set(X)
    return t.numpy()


def intermediate(folder):
    """A result whose memory a later node took."""
    a = gg.sqr(tensor(8))
    return a, gg.Graph(gg.sqr(gg.sqr(gg.sqr(a))))


def computed(graph):
    cpu = gg.init_backend("CPU")
    allocator = gg.GraphAllocator(cpu)
    allocator.alloc_graph(graph)
    cpu.graph_compute(graph)
    return cpu, allocator


def adapter(folder):
    """Of the model in the package."""
    made = new_adapter(GGUFFile(EMBEDDED), ["attn_q"], 2, 4)
    made.save(folder / "a.gguf")
    return folder / "a.gguf"


def kept(made):
    graph = gg.Graph(gg.sqr(gg.sqr(gg.sqr(gg.set_output(made[0])))))
    return computed(graph), made[0].numpy()


def overwritten(made):
    return computed(made[1]), made[0].numpy()


# name: (what is at hand, what fails, what the error says, what it says to do)
REMEDIES = {
    "rows backwards": (lambda f: tensor(4, 6), lambda t: t[::-1], r"use gg.get_rows\(t, ids\)",
                       lambda t: gg.compute(gg.get_rows(t, gg.tensor([3, 2, 1, 0])))),
    "columns backwards": (lambda f: tensor(4, 6), lambda t: t[:, ::-1], r"gg.get_rows\(gg.cont\(t.T\), ids\).T",
                          lambda t: gg.compute(gg.cont(gg.get_rows(gg.cont(t.T), gg.tensor([5, 0])).T))),
    "a power": (lambda f: tensor(4), lambda t: t ** 3, r"gg.exp\(gg.log\(x\) \* 3\)",
                lambda t: gg.compute(gg.exp(gg.log(t) * 3))),
    "no type": (lambda f: np.ones(3, np.uint8), gg.tensor, "give type=gg.F32", lambda a: gg.tensor(a, type=gg.F32)),
    "a list for DLPack": (lambda f: [1, 2], gg.from_dlpack, "gg.from_numpy",
                          lambda a: gg.from_numpy(gg.Context(), a)),
    "a mapped weight": (mapped, lambda t: t.set(X), r"read-only .*; copy it: gg.tensor\(t.numpy\(\), type=t.type\)",
                        lambda t: gg.tensor(t.numpy(), type=t.type).set(X)),
    "no memory": (unallocated, lambda t: t.numpy(), "use alloc_ctx_tensors and set it", with_memory),
    "a quantised safetensor": (lambda f: (f / "x.gguf", {"t": tensor(4, 32, type="Q8_0")}),
                               lambda x: save_safetensors(f"{x[0]}.safetensors", x[1]), "use save_gguf",
                               lambda x: save_gguf(x[0], x[1], {})),
    "a loss of many": (lambda f: gg.set_param(tensor(4)), lambda w: gg.grad(gg.sqr(w), [w]), "take gg.sum",
                       lambda w: gg.grad(gg.sum(gg.sqr(w)), [w])),
    "rows of other lengths": (lambda f: (tensor(4, 6), tensor(6, 3)), lambda x: gg.mul_mat(*x),
                              "transpose and cont one of them",
                              lambda x: gg.compute(gg.mul_mat(x[0], gg.cont(gg.transpose(x[1]))))),
    "a truth value": (lambda f: tensor(1), bool, r"neither true nor false", lambda t: bool(gg.compute(t))),
    "a list of results": (lambda f: [gg.relu(tensor(4)), gg.tanh(tensor(4))], gg.compute, r"write \*list",
                          lambda ys: gg.compute(*ys)),
    "a pickle": (lambda f: tensor(4), pickle.dumps, r"copy.copy\(t\) is a leaf; pickle its Graph",
                 lambda t: pickle.dumps(gg.Graph(gg.dup(copy.copy(t))))),
    "an array": (lambda f: X, gg.relu, r"gg.tensor\(values\) makes one", lambda a: gg.compute(gg.relu(gg.tensor(a)))),
    "written in place": (lambda f: gg.sqr(tensor(4)), lambda t: gg.compute(t, gg.scale_inplace(t, 2.0)),
                         "without _inplace", lambda t: gg.compute(t, gg.scale(t, 2.0))),
    "an adapter": (adapter, load_model, r"load the model with lora=\[\(path, 1.0\)\]",
                   lambda path: load_model(lora=[(path, 1.0)]).free()),
    "overwritten": (intermediate, overwritten, "gg.set_output", kept),
    "no template": (lambda f: load_model(n_ctx=64), lambda m: m.chat([{"role": "user", "content": "x"}]),
                    "give one: template='chatml'",
                    lambda m: m.chat_prompt([{"role": "user", "content": "x"}], template="chatml")),
    "no such name": (lambda f: load_model(n_ctx=64), lambda m: m.capture("blk.1.foo", "Emma"), r"m.names\(\) lists all",
                     lambda m: str(m.names())),
    "a bias for no mask": (lambda f: [tensor(1, 4, 32)] * 3, lambda t: gg.flash_attn_ext(*t, None, 1.0, 8.0, 0.0),
                           "pass mask=", lambda t: gg.flash_attn_ext(*t, gg.tensor(np.zeros((4, 4)), type="F16"), 1.0,
                                                                     8.0, 0.0)),
}


@pytest.mark.parametrize("name", REMEDIES)
def test_what_the_error_says_helps(name, tmp_path):
    made, fails, says, helps = REMEDIES[name]
    thing = made(pathlib.Path(tmp_path))
    with pytest.raises(gg.GgjitError, match=says):
        fails(thing)
    helps(thing)
