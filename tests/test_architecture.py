"""The contract: names, layout, import direction, and what `import ggjit` costs."""
import ast
import functools
import re
import tomllib
import types

import pytest
from helpers.layers import FOLDERS, LAYERS, package
from helpers.paths import ROOT

import ggjit as gg
from ggjit.ops.core.record import OP, VIEW_OPS
from ggjit.ops.core.spec import all_specs
from ggjit.ops.cuda.compiler import contract

# imports inside functions: code that is loaded only where its device or extra is there
DEFERRED = {("ggjit.api.registry", "ggjit.cuda.device"), ("ggjit.cuda.driver", "ggjit.cuda.simulated_driver"),
            ("ggjit.cuda.functions", "ggjit.ops.cuda.compiler.build"),
            ("ggjit.cuda.functions", "ggjit.ops.cuda.compiler.simulated_teams"),
            *((f"ggjit.cluster.{name}", "ggjit.cluster.dask_worker") for name in ("cluster", "serving"))}
NAMES = """Context from_numpy init_backend alloc_ctx_tensors Graph GraphAllocator HostBuffer BufferType Buffer Device
    Backend OutOfMemory registry set_input set_output set_param set_name quantize dequantize compute Tensor
    F32 F16 BF16 Q8_0 Q4_0 Q4_K I32 I64 soft_max soft_max_ext mul_mat add mul norm rms_norm gelu_erf silu swiglu_split
    flash_attn_ext get_rows set_rows rope_ext reshape_2d view_3d permute transpose cont cpy""".split()


def sources():
    return [p for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*.py"))]


def module_of(path):
    rel = path.relative_to(ROOT)
    parts = [FOLDERS[rel.parts[0]], *rel.with_suffix("").parts[1:]]
    return ".".join(p for p in parts if p != "__init__")


MODULES = {module_of(p): p for p in sources()}


@functools.cache
def imports(module):
    """{imported ggjit module: inside a function?} of the source, packages resolved to the modules named."""
    found = {}

    def visit(node, deferred):
        deferred |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{MODULES[module]}: relative import"
            whole = [f"{node.module}.{a.name}" for a in node.names]
            names = [w if w in MODULES else node.module for w in whole]
        else:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            if name.split(".")[0] == "ggjit":
                assert name in MODULES, f"{MODULES[module]} line {node.lineno} imports {name}, which is no module"
                found[name] = deferred and found.get(name, True)
        for child in ast.iter_child_nodes(node):
            visit(child, deferred)
    visit(ast.parse(MODULES[module].read_text(encoding="utf-8")), False)
    return found


def layer_of(module):
    folder = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    return LAYERS.index(folder) if folder in LAYERS else -1


def circles():
    """Groups of modules that import each other in a circle, imports inside functions counted."""
    reached = {}

    def reach(start):
        seen, todo = set(), [start]
        while todo:
            new = imports(todo.pop()).keys() - seen
            seen |= new
            todo += new
        return seen
    for m in MODULES:
        reached[m] = reach(m)
    return {frozenset(o for o in reached[m] if m in reached[o]) for m in MODULES if m in reached[m]}


def test_every_package_is_listed():
    """In the tables of docs/where-is-what.md, which are the layers, and in pyproject.toml."""
    conf = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found = sorted(package(init.parent.relative_to(ROOT).as_posix()) for folder in FOLDERS
                   for init in (ROOT / folder).rglob("__init__.py"))
    assert sorted(LAYERS) == found == sorted(conf["tool"]["setuptools"]["packages"])


def test_one_folder_knows_the_compiler_of_cuda_kernels():
    """Kernels and the engine reach a compiler by ops/cuda/compiler alone; kernels call what its contract lists."""
    promised = {*contract.functions(), *contract.functions((contract.WALKING, contract.WARPGROUPS)), *contract.MAKERS,
                *contract.WARPGROUP_MAKERS}
    for module, path in MODULES.items():
        if module.startswith("ggjit.ops.cuda.compiler"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = {f"{node.module}.{a.name}" for a in node.names} if isinstance(node, ast.ImportFrom) else \
                {a.name for a in node.names} if isinstance(node, ast.Import) else set()
            assert not [n for n in names if n.startswith(("numba.cuda", "numba_cuda"))], path
            core = {n.rpartition(".")[2] for n in names if n.startswith("ggjit.ops.cuda.compiler.core.")}
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "core" \
                    and module.startswith("ggjit.ops.cuda"):
                core = {node.attr}
            assert core <= promised, f"{path}: {core - promised}"


def test_engine_does_not_shadow_its_siblings():
    for name in ("ops", "alloc", "models", "tools"):
        assert not (ROOT / "engine" / name).exists() and not (ROOT / "engine" / f"{name}.py").exists()


def test_no_module_shadows_a_public_name():
    """`import ggjit.x` binds x in `ggjit`: a folder or file of that name would replace the function."""
    inside = {m.split(".")[1] for m in MODULES if m.count(".")}
    inside -= {"ops", "alloc", "models", "tools", "train", "cluster"}
    assert not inside & set(dir(gg))
    modules = ("ops", "alloc", "errors", "models", "tools", "train", "cluster")
    assert all(not isinstance(getattr(gg, n), types.ModuleType) or n in modules
               for n in dir(gg))


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_bare_import_is_refused(folder, python):
    r = python(f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {folder}")
    assert r.returncode != 0 and "import ggjit, not a folder" in r.stderr


def test_a_bare_import_of_a_folder_inside_is_refused_by_the_top_folder(python):
    """Python imports `ops` before `ops.core`: the five guards are enough."""
    inside = [".".join(init.parent.relative_to(ROOT).parts) for folder in FOLDERS
              for init in (ROOT / folder).rglob("__init__.py")]
    code = (f"import importlib, sys; sys.path.insert(0, {str(ROOT)!r})\n"
            f"for name in {inside!r}:\n"
            "    try: importlib.import_module(name)\n"
            "    except ImportError as e: assert 'import ggjit, not a folder' in str(e), name\n"
            "    else: raise AssertionError(name)\n")
    r = python(code)
    assert r.returncode == 0 and len(inside) > 40, r.stderr
    guarded = {p.parent.name for p in MODULES.values() if "not a folder of the checkout" in p.read_text("utf-8")}
    assert guarded == {*FOLDERS}


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module):
    for name in imports(module):
        assert layer_of(name) <= layer_of(module), f"{MODULES[module]} imports upward: {name}"


def test_no_import_circles():
    assert not circles()


def test_a_class_name_is_used_once():
    places = {}
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert not twice, f"each of these names means several classes: {twice}"
    assert len(places) > 300


def test_sources_name_no_row_of_the_ledger():
    """Tests point at code (tests/LEDGER.md), code does not point at the list."""
    rows = re.compile(r"\b[A-F]\d{1,2}\.\d{2}\b|\brows? [A-F]\d{1,2}\b|\bpart [A-F]\d\b")
    found = [f"{path.relative_to(ROOT)}:{n}" for path in sources()
             for n, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if rows.search(line)]
    assert not found, f"what a reader of the source needs is said here, without the number of a row: {found}"


def test_imports_inside_functions_are_for_what_may_be_absent():
    inside = {(m, name) for m in MODULES for name, deferred in imports(m).items() if deferred}
    assert inside == DEFERRED


def test_packages_import_nothing():
    """What an __init__ imports would not be in the keys of cached kernels by the name it is imported under."""
    api = {"ggjit", "ggjit.alloc", "ggjit.models", "ggjit.train", "ggjit.cluster"}
    for module, path in MODULES.items():
        if path.name == "__init__.py" and module not in api:
            assert not imports(module), f"{path} imports"


BY_RULE = {"ggjit.ops.cuda", "ggjit.models.families", "ggjit.tools.command.commands", "ggjit.tools.suite.cases"}


def test_every_folder_names_its_files():
    """For a reader who opens it; BY_RULE are folders of many files of one kind, whose names say what is in them."""
    missing = []
    for module, path in MODULES.items():
        folder = module.rpartition(".")[0]
        if path.name != "__init__.py" and folder not in BY_RULE:
            text = ast.get_docstring(ast.parse((path.parent / "__init__.py").read_text(encoding="utf-8")))
            missing += [] if re.search(rf"\b{path.stem}\b", text) else [module]
    assert not missing


def test_no_test_imports_a_test():
    """What two of them need is in tests/helpers."""
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module] if isinstance(node, ast.ImportFrom) else \
                [a.name for a in node.names] if isinstance(node, ast.Import) else []
            assert not [n for n in names if re.match(r"(.*\.)?(test_\w+|conftest)$", n)], f"{path} line {node.lineno}"


def test_contract_names():
    missing = [n for n in NAMES if not hasattr(gg, n)]
    assert not missing


def test_ops_and_types_have_ggml_numbers():
    assert list(OP)[100:] == [OP.GLU, OP.FLASH_ATTN_PAGED]          # the second is our own
    assert OP.MUL_MAT == 29 and OP.FLASH_ATTN_EXT == 74 and OP.GLU == 100
    assert (gg.F32.id, gg.F16.id, gg.Q4_0.id, gg.Q8_0.id, gg.I32.id, gg.BF16.id) == (0, 1, 2, 8, 26, 30)


def test_every_spec_is_whole():
    for op, spec in all_specs().items():
        assert spec.builders and callable(spec.reference), op
        assert op in VIEW_OPS or (spec.kernel and spec.cases), f"{op.name} has no kernel or no test cases"
        for f in spec.builders:
            assert f.__doc__, f"{f.__name__} has no docstring"


def test_import_compiles_nothing_and_is_light(python):
    """What an import costs beside NumPy and Numba: modules are counted, since time depends on the load."""
    code = ("import sys, numba, numpy\nbefore = {*sys.modules}\nimport ggjit; ggjit.Tensor\n"
            "from ggjit.ops.native.jit import CACHE\n"
            "top = [m.partition('.')[0] for m in {*sys.modules} - before]\n"
            "print(CACHE.compiled + CACHE.loaded, top.count('ggjit'))\n"
            "print(*sorted({*top} - {'ggjit', 'numba', 'numpy'} - sys.stdlib_module_names))")
    r = python(code)
    assert r.returncode == 0, r.stderr
    counts, others = r.stdout.splitlines()
    kernels, n_modules = map(int, counts.split())
    assert kernels == 0 and n_modules < 345 and {*others.split()} <= {"platformdirs"}, r.stdout


def test_the_first_name_brings_the_others(python):
    """`import ggjit` alone imports neither Numba nor NumPy; any name, dir() and * then give the whole API."""
    code = ("import sys, ggjit\nprint(*sorted(sys.modules.keys() & {'numba', 'llvmlite', 'numpy', 'ggjit.names'}))\n"
            "try: ggjit.no_such_name\nexcept AttributeError as e: print(e)\n"
            "before, ggjit.compute = ggjit.compute, 7\nassert not hasattr(ggjit, 'neither') and ggjit.compute == 7\n"
            "assert {*ggjit.__all__} < {*dir(ggjit)} and 'F32' in dir(ggjit)\n"
            "from ggjit import *\nassert mul_mat is ggjit.mul_mat\n"
            "print('cluster' in globals(), 'ggjit.cluster' in sys.modules)")
    r = python(code)
    assert r.returncode == 0, r.stderr
    assert r.stdout.splitlines() == ["", "module 'ggjit' has no attribute 'no_such_name'", "False False"]


@pytest.mark.parametrize("first", ["ggjit.models", "ggjit.cpu.cpu_plan", "ggjit.train", "ggjit.tools.command.main"])
def test_any_module_may_be_imported_first(first, python):
    r = python(f"import {first}; import ggjit as gg; print(gg.Graph.__name__)")
    assert (r.returncode, r.stdout) == (0, "Graph\n"), r.stderr


def test_what_the_demo_needs_needs_no_other_extra(python):
    """README's first command installs `models` alone."""
    code = ("import sys\nfor name in ('msgpack', 'distributed', 'cryptography', 'pyarrow', 'greenlet', 'matplotlib'):\n"
            "    sys.modules[name] = None\n"
            "import ggjit.models, ggjit.tools.command.commands.demo, ggjit.tools.command.commands.generate")
    r = python(code)
    assert r.returncode == 0, r.stderr


def test_no_paths_of_a_machine():
    absolute = re.compile(r"[\s\"'(=](?:/(?:home|root|usr|opt|var|srv|mnt|work)/\w|[A-Z]:\\\\Users)")
    for path in (*sources(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py"), ROOT / "README.md"):
        found = absolute.search(path.read_text(encoding="utf-8"))
        assert not found, f"{path}: {found.group(0)}"
