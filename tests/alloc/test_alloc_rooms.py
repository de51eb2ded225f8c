"""How alloc/ is built: functions of few arguments, rooms of few imports between them."""
import ast

from helpers.paths import ROOT

FOLDER = ROOT / "alloc"
MOST_ARGUMENTS, MOST_IMPORTS = 8, 30


def parsed():
    return {p.relative_to(FOLDER).with_suffix("").as_posix(): ast.parse(p.read_text(encoding="utf-8"))
            for p in FOLDER.rglob("*.py")}


def n_arguments(f, is_method):
    a = f.args
    return len(a.posonlyargs + a.args + a.kwonlyargs) + bool(a.vararg) + bool(a.kwarg) - is_method


def test_no_function_has_many_arguments():
    """What is more is a record (ops/native/records.py) or an options class."""
    many = []
    for name, tree in parsed().items():
        methods = {f for c in ast.walk(tree) if isinstance(c, ast.ClassDef) for f in c.body}
        many += [f"{name}: {f.name}" for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)
                 and n_arguments(f, f in methods) > MOST_ARGUMENTS]
    assert not many


def test_the_rooms_know_little_of_each_other():
    """Imports of one file by another of another folder, those of the package's top included."""
    trees = parsed()
    between = set()
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("ggjit.alloc") and name != "__init__":
                base = node.module.removeprefix("ggjit.alloc").replace(".", "/").strip("/")
                for a in node.names:
                    inner = f"{base}/{a.name}".strip("/")
                    between.add((name, inner if inner in trees else base))
    between = {(a, b) for a, b in between if a.rpartition("/")[0] != b.rpartition("/")[0]}
    assert 10 < len(between) <= MOST_IMPORTS


def test_only_the_top_knows_the_allocators_of_2023():
    importers = [name for name, tree in parsed().items() for node in ast.walk(tree)
                 if isinstance(node, ast.ImportFrom) and "alloc.ggml.legacy" in node.module]
    assert {n for n in importers if not n.startswith("ggml/legacy/")} == {"graph_alloc"}
