"""Every public name says what it is, and the example in a function's docstring runs."""
import inspect
import re
import textwrap

import numpy as np
import pytest
from helpers import tiny_model

import ggjit as gg
from ggjit import alloc, cluster, models, train
from ggjit.graphs.requests import plan_request

MODULES = gg, alloc, cluster, models, train


def public():
    """{full name: function or class of ggjit}"""
    found = {f"{m.__name__}.{name}": getattr(m, name, None) for m in MODULES
             for name in getattr(m, "__all__", None) or dir(m) if not name.startswith("_")}
    return {name: x for name, x in found.items() if (inspect.isfunction(x) or inspect.isclass(x))
            and x.__module__.startswith("ggjit")}


def test_every_name_has_a_docstring():
    """A method or property may stand in the docstring of its class, or in what the class inherits."""
    silent = []
    for full, x in public().items():
        silent += [] if inspect.getdoc(x) else [full]
        for name, member in vars(x).items() if inspect.isclass(x) else ():
            member = getattr(member, "__func__", member)
            if name.startswith("_") or not (inspect.isfunction(member) or isinstance(member, property)):
                continue
            told = any(inspect.getdoc(vars(c).get(name)) or re.search(rf"\b{name}\b", vars(c).get("__doc__") or "")
                       for c in x.__mro__ if name in vars(c) or c is x)
            silent += [] if told else [f"{full}.{name}"]
    assert not silent and len(public()) > 300


# functions whose examples need no other machine, second model or file from elsewhere
HERE = ("ggjit.tensors.", "ggjit.core.", "ggjit.graphs.", "ggjit.profiling.", "ggjit.cpu.", "ggjit.api.registry",
        "ggjit.alloc.validate", "ggjit.alloc.graph_alloc", "ggjit.models.files.save", "ggjit.models.files.load_tensors")


@pytest.fixture
def names(tmp_path, monkeypatch):
    """The names that examples use, in a folder with a model."""
    monkeypatch.chdir(tmp_path)
    tiny_model.write(tmp_path / "model.gguf")
    t, x = gg.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), gg.tensor(np.ones((2, 3), np.float32))
    models.save_safetensors(tmp_path / "model.safetensors", {"w": t})
    w, cpu, graph = gg.set_param(gg.tensor([[1.0, 2.0]])), gg.init_backend("CPU", n_threads=1), gg.Graph(gg.add(t, x))
    b = gg.tensor([[3.0, 4.0]])
    loss = gg.set_loss(gg.sum(gg.add(gg.sqr(w), b)))
    return {"gg": gg, "np": np, "ctx": gg.Context(), "cpu": cpu, "t": t, "x": x, "w": w, "b": b, "loss": loss,
            "graph": graph, "data": bytes(8), "other": gg.tensor(np.zeros((2, 3), np.float32)),
            "backward": gg.build_backward_expand(gg.Context(), gg.Graph(loss)),
            "request": plan_request(graph, [cpu.default_buffer_type]), **vars(alloc), **vars(models)}


def example(function):
    """The first indented lines of its docstring that are no picture."""
    found = re.findall(r"(?:^    .*\n?)+", inspect.getdoc(function), re.M)
    return next((textwrap.dedent(code) for code in found if "|##" not in code), None)


def test_examples_run(names):
    functions = {name: f for name, f in public().items() if inspect.isfunction(f) and f.__module__.startswith(HERE)}
    assert len(functions) > 40
    for name, f in functions.items():
        code = example(f)
        assert code, f"{name} has no example"
        exec(compile(code, f"the example of {name}", "exec"), dict(names))
    gg.threadpool().resume()
