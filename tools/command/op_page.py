"""The description of ops as text, made from their specs: builders, devices, files.

    ggjit info              the compact table
    ggjit info OP           one op
    docs/ops.md             all of them (`python -m docs.generate`)
"""
import ast
import functools
import importlib
import inspect
import pathlib

import ggjit
from ggjit.core.arguments import nearest
from ggjit.ops.core.builders import arguments_text
from ggjit.ops.core.errors import ParamError
from ggjit.ops.core.record import GLU, OP, UNARY, VIEW_OPS
from ggjit.ops.core.spec import all_specs
from ggjit.ops.core.types import TYPE_INFO
from ggjit.tools.command.support import devices, op_types, supports

KINDS = {"any type": lambda t: True, "any quantised type": lambda t: t.quantized}


# ---------------------------------------------------------------- pieces
def types_text(types):
    """A list of types in words: "F32 F16", "any type", "F32 F16, any quantised type but Q8_1"."""
    ways = [" ".join(map(repr, types)) or "-"]
    for name, fits in KINDS.items():
        kind = [t for t in TYPE_INFO.values() if fits(t)]
        missing, rest = [t for t in kind if t not in types], [t for t in types if t not in kind]
        if len(missing) < len(kind):
            words = name + (" but " + " ".join(map(repr, missing)) if missing else "")
            ways.append(", ".join(filter(None, [" ".join(map(repr, rest)), words])))
    return min(ways, key=len)


def signature(builder):
    return f"{builder.__name__}({', '.join(arguments_text(builder))})"


def untyped(builder):
    """"add(a, b)": keys of the JSON, which stay as they are."""
    signature = inspect.signature(builder)
    names = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return f"{builder.__name__}{signature.replace(parameters=names)}"


def file_of(module):
    """"ops/matmul/mul_mat.py" for "ggjit.ops.matmul.mul_mat"."""
    return "/".join(module.split(".")[1:]) + ".py"


@functools.cache
def _imports(module):
    """Modules of ggjit.ops that a module of ggjit.ops imports, by its source."""
    tree = ast.parse(pathlib.Path(importlib.import_module(module).__file__).read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("ggjit.ops"):
            package = hasattr(importlib.import_module(node.module), "__path__")
            found |= {f"{node.module}.{a.name}" for a in node.names} if package else {node.module}
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names if a.name.startswith("ggjit.ops.")}
    return frozenset(found)


@functools.cache
def _needed(module):
    """All modules of ggjit.ops below a module."""
    found, todo = set(), [module]
    while todo:
        new = _imports(todo.pop()) - found
        found |= new
        todo.extend(new)
    return frozenset(found)


@functools.cache
def files():
    """{OP: (its file, files that serve it or its family alone)}

    A file serves a family alone if no op of another file needs it.
    """
    specs = all_specs()
    homes = sorted({s.module for s in specs.values()})
    users = {}
    for home in homes:
        for module in _needed(home):
            users.setdefault(module, set()).add(home)
    return {op: (file_of(specs[op].module),
                 [file_of(m) for m in sorted(_needed(specs[op].module))
                  if users[m] == {specs[op].module} and m not in homes]) for op in sorted(specs)}


def number_note(op):
    """What ggml puts in parameter 0 of the two ops that are families of functions."""
    family = {OP.UNARY: UNARY, OP.GLU: GLU}.get(op)
    return "" if family is None else "Parameter 0: " + ", ".join(f"{f.value} {f.name}" for f in family) + ".\n\n"


def sources_text(op, device):
    """"src0 F32 F16; src1 I32 -> F32" of the op on a device."""
    if op in VIEW_OPS:
        return "any type (nothing is computed)"
    if not supports(op, device):
        return "not supported"
    types = dict(op_types(op, device))
    result = types.pop("result", ())
    return " -> ".join(["; ".join(f"{s} {types_text(t)}" for s, t in types.items()) or "no source", types_text(result)])


# ---------------------------------------------------------------- pages
def find(name):
    """The OP of a ggml name or of a builder's name.  ParamError for what is neither."""
    wanted = name.removeprefix("GGML_OP_").lower().removeprefix("ggml_")
    known = {b.__name__.lower(): op for op, spec in all_specs().items() for b in spec.builders}
    known |= {op.name.lower(): op for op in all_specs()}
    if wanted not in known:
        raise ParamError(f"no op {name!r}{nearest(wanted, known)}; `ggjit info` lists them")
    return known[wanted]


def op_facts(op, on=None):
    """What `ggjit info OP --json` gives."""
    spec = all_specs()[op]
    home, helpers = files()[op]
    return {"op": op.name, "number": int(op), "file": home, "helpers": helpers, "in_place": spec.in_place,
            "gradient": spec.gradient is not None,
            "types": {d.name: {s: [t.name for t in types] for s, types in op_types(op, d).items()}
                      for d in on or devices()},
            "builders": {untyped(b): doc_of(b) for b in spec.builders}}


def doc_of(builder):
    """The docstring of the public builder, with its example."""
    return inspect.getdoc(getattr(ggjit, builder.__name__))


def op_page(op, on=None):
    """Markdown of one op.  on: devices (all)."""
    spec = all_specs()[op]
    home, helpers = files()[op]
    facts = [f"op number {int(op)}", *["may be computed in place"] * spec.in_place,
             "gradient" if spec.gradient is not None else "no gradient"]
    lines = [f"## {op.name}", "", f"`{home}`" + "".join(f", `{h}`" for h in helpers) + "; " + "; ".join(facts), ""]
    lines += [f"{d.name}: {sources_text(op, d)}" for d in on or devices()]
    lines += ["", number_note(op) + "```text"]
    for i, b in enumerate(spec.builders):
        lines += [""] * (i > 0) + [signature(b), *("    " + line if line else "" for line in
                                                    (doc_of(b) or "").splitlines())]
    return "\n".join([*lines, "```", ""])


def compact_table(on=None):
    """Markdown rows: op, sources and result with their types on each device."""
    on = on or devices()
    yield f"| op | gradient | {' | '.join(d.name for d in on)} |"
    yield "|---|---|" + "---|" * len(on)
    for op in sorted(all_specs()):
        gradient = "yes" if all_specs()[op].gradient is not None else "-"
        yield f"| {op.name} | {gradient} | " + " | ".join(sources_text(op, d) for d in on) + " |"


def op_list():
    """Lines of text: op, and on each device its sources and result with their types."""
    on = devices()
    for op in sorted(all_specs()):
        for i, d in enumerate(on):
            yield f"{op.name if i == 0 else '':<24}{f'{d.name}: ' if len(on) > 1 else ''}{sources_text(op, d)}"


def file_table():
    """Markdown rows: which file a family of ops is."""
    families = {}
    for op, (home, helpers) in files().items():
        families.setdefault((home, tuple(helpers)), []).append(op.name)
    yield "| ops | file | files that serve it alone |"
    yield "|---|---|---|"
    for (home, helpers), ops in families.items():
        yield f"| {', '.join(ops)} | `{home}` | {' '.join(f'`{h}`' for h in helpers) or '-'} |"


def shared_files():
    """[(file, how many op files use it)] of those that several use, most used first."""
    homes = {s.module for s in all_specs().values()}
    users = {}
    for home in homes:
        for module in _needed(home) - {"ggjit.ops.core.spec"}:
            users.setdefault(file_of(module), set()).add(home)
    alone = {h for _, helpers in files().values() for h in helpers}
    return sorted(((f, len(u)) for f, u in users.items() if f not in alone and f not in map(file_of, homes)),
                  key=lambda item: (-item[1], item[0]))
