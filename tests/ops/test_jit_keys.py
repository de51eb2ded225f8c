"""The key of a cached kernel changes with every source that its machine code comes from."""
import ast
import importlib
import os
import sys

import pytest
from helpers.paths import ROOT

import ggjit as gg
from ggjit.ops.core.discovery import modules_below
from ggjit.ops.core.spec import all_specs
from ggjit.ops.core.traits import all_traits, module_of
from ggjit.ops.native import jit

PACKAGE = "ggjit_sample"                        # not part of ggjit; found by the same rules
FILES = {
    "__init__.py": "",
    "op.py": """
from ggjit_sample.by_name import helper
from ggjit_sample.folder import as_name
import ggjit_sample.plain
import ggjit_sample.renamed as other
from ggjit_sample.folder.several import (
    first,      # a comment (with brackets)
    second,
)
from ggjit_sample.folder import (
    in_brackets as short,
)
from ggjit_sample.exporting import reexported

def kernel():
    from ggjit_sample.deferred import late
""",
    "by_name.py": "from ggjit_sample.second_hand import x\nhelper = 1\n",
    "second_hand.py": "x = 1\n",
    "plain.py": "x = 1\n",
    "renamed.py": "x = 1\n",
    "deferred.py": "late = 1\n",
    "unrelated.py": "x = 1\n",
    "type_file.py": "x = 1\n",
    "folder/__init__.py": "",
    "folder/as_name.py": "x = 1\n",
    "folder/several.py": "first = second = 1\n",
    "folder/in_brackets.py": "x = 1\n",
    "exporting/__init__.py": "reexported = 1\n",
}
BEFORE = 1_000_000_000                          # a time of change long before this process: see jit._STARTED


def forget():
    for cached in (jit._source, jit._imports, jit._digest, jit.sources_digest, jit.sources_key):
        cached.cache_clear()


def write(path, text, time=BEFORE):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (time, time))


def key(*modules):
    forget()
    return jit.sources_key(tuple(f"{PACKAGE}.{m}" for m in modules))


@pytest.fixture
def sample(tmp_path, monkeypatch):
    root = tmp_path / PACKAGE
    for name, text in FILES.items():
        write(root / name, text)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield root
    for name in [m for m in sys.modules if m.split(".")[0] == PACKAGE]:
        del sys.modules[name]
    forget()


@pytest.mark.parametrize("name", ["op.py", "by_name.py", "second_hand.py", "plain.py", "renamed.py", "deferred.py",
                                  "folder/__init__.py", "folder/as_name.py", "folder/several.py",
                                  "folder/in_brackets.py", "exporting/__init__.py"])
def test_an_edited_source_changes_the_key(sample, name):
    before = key("op")
    write(sample / name, FILES[name] + "# edited\n")
    edited = key("op")
    write(sample / name, FILES[name])
    assert edited != before == key("op")


def test_other_sources_leave_the_key_alone(sample):
    before = key("op")
    write(sample / "unrelated.py", "x = 2\n")
    write(sample / "type_file.py", "x = 2\n")
    assert key("op") == before


def test_a_type_file_changes_the_keys_of_kernels_that_name_it(sample):
    before = key("op", "type_file")
    write(sample / "type_file.py", "x = 2\n")
    assert key("op", "type_file") != before


def test_a_source_edited_while_the_process_runs_is_never_found_in_the_cache(sample):
    write(sample / "plain.py", "x = 2\n", jit._STARTED + 1)
    assert key("op") != key("op")


def test_an_unknown_module_is_an_error(sample):
    for unknown in ("no_such_module", "op.kernel", "folder.no_such_module"):
        with pytest.raises(LookupError, match="not a module of ggjit"):
            key(unknown)


# ---------------------------------------------------------------- ggjit's own sources
def reached(module):
    seen, todo = set(), [module]
    while todo:
        m = todo.pop()
        if m not in seen:
            seen.add(m)
            todo += jit._imports(m)
    return seen


def test_every_op_reaches_the_records_and_types():
    for spec in all_specs().values():
        assert {"ggjit.ops.core.types", "ggjit.ops.core.record"} <= reached(spec.module), spec.op
    binary = reached("ggjit.ops.elementwise.binary")
    assert {f"ggjit.ops.native.{m}" for m in ("node", "mem", "jit", "isa", "row_loops", "simd")} <= binary
    assert {"ggjit.ops.native", "ggjit.ops.core.errors", "ggjit.ops.types.shared.rows"} <= binary


def test_ops_have_keys_of_their_own():
    keys = {m: jit.sources_key((m,)) for m in ("ggjit.ops.elementwise.binary", "ggjit.ops.native.node")}
    assert len(set(keys.values())) == 2 and all(jit.sources_key((m,)) == k for m, k in keys.items())


def test_kernels_over_a_type_name_its_file():
    ctx = gg.Context()
    ids = ctx.new_tensor(gg.I32, (2,))
    for type in all_traits():
        module = module_of(type)
        t = gg.get_rows(ctx.new_tensor(type, (type.block, 3)), ids)
        kernel = all_specs()[t.op].kernel(t, 1)
        assert t.type is type or kernel is None or module in kernel.modules, type       # rows of one type move as bytes
    ctx.free()


def imports_of(module):
    """What `jit._imports` should find, from the syntax tree."""
    found = set()
    for node in ast.walk(ast.parse(jit._source(module)[1])):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "ggjit":
            found.update([node.module, *(f"{node.module}.{a.name}" for a in node.names)])
        elif isinstance(node, ast.Import):
            found.update(a.name for a in node.names if a.name.split(".")[0] == "ggjit")
    return found


def modules_of_the_checkout():
    for folder, package in (("engine", "ggjit"), ("ops", "ggjit.ops"), ("alloc", "ggjit.alloc"),
                            ("models", "ggjit.models"), ("tools", "ggjit.tools")):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            yield ".".join([package, *(p for p in parts if p != "__init__")])


MODULES = sorted(modules_of_the_checkout())


def test_the_imports_found_are_those_of_the_syntax_tree():
    wrong = {}
    for module in MODULES:
        found, right = ({m for m in names if m in MODULES and m != module}
                        for names in (jit._imports(module), imports_of(module)))
        if found != right:
            wrong[module] = found ^ right
    assert not wrong


def test_discovery_sees_the_modules_of_the_checkout():
    assert {m.__name__ for m in modules_below("ggjit.ops", skip=("cuda",))} <= set(MODULES)
