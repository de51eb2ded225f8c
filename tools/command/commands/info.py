"""`ggjit info`: version, processor, devices, and which types and ops each device supports; or what a GGUF holds."""
import math
import os

import numpy as np

from ggjit import __version__
from ggjit.api.registry import registry
from ggjit.cpu import sharing
from ggjit.cpu.tuning import all_kept, tunable
from ggjit.models.files.gguf import GGUFFile
from ggjit.ops.core.printable import printable
from ggjit.ops.core.traits import all_traits
from ggjit.ops.matmul import choices
from ggjit.ops.matmul.repack import layouts as repack
from ggjit.ops.native import isa
from ggjit.ops.native.kernel_pack import SHIPPED
from ggjit.ops.types.shared.dot import OWN
from ggjit.tools.command.common import console, table, text_nbytes, tiles_json, tiles_line
from ggjit.tools.command.op_page import find, op_facts, op_list, op_page
from ggjit.tools.command.support import supported

EXAMPLES = (("ggjit info soft_max", "one op: builders, types, files"),
            ("ggjit info m.gguf", "keys and tensors of a file"),
            ("ggjit info --tuning", "what was chosen for this processor"))
SHOWN = 8                       # items of an array that are printed, and
SHOWN_TEXT = 100                # characters of a text that are printed
PREFETCH = {"near": "prefetch into level 1", "ahead": "prefetch 6 KB ahead", "far": "prefetch into level 2"}


def add_arguments(c):
    c.add_file("what", nargs="?", metavar="OP|FILE", help="one op (\"soft_max\"), or a GGUF file (\"m.gguf\")")
    c.add_argument("--tuning", action="store_true", help="what was chosen for this processor, type by type, and why")


def run(args):
    if args.tuning:
        return tuning_info(args)
    if args.what and (os.path.isfile(args.what) or args.what.endswith(".gguf") or os.sep in args.what):
        return file_info(args)
    if args.what:
        op = find(args.what)
        if not args.json:
            print(op_page(op), end="")
        return op_facts(op)
    ops, types = supported()
    result = {"version": __version__, "cpu": registry.by_type("cpu").description, "devices": registry.props(),
              "kernels": kernels_facts(), "tiles": tiles_json(all_kept()), "types": types, "ops": ops}
    if not args.json:
        show(result)
    return result


def show(r):
    print(f"ggjit {r['version']} on {r['cpu']}")
    for d in r["devices"]:
        print(f"device {d['name']}: {d['description']}, {d['memory_free'] / 1e9:.1f} GB of "
              f"{d['memory_total'] / 1e9:.1f} GB free")
    print(kernels_line(r["kernels"]))
    if r["kernels"]["no_amx"]:
        print(f"AMX is not used: {r['kernels']['no_amx']}")
    tiles = tiles_line(r["tiles"]) or "the rule's; `ggjit warm-up MODEL` measures others"
    print(f"how weights are read (speed over one row's): {tiles}")
    types = [name for name, where in r["types"].items() if where]
    print(f"types: {len(types)} of {len(r['types'])}: {' '.join(types)}")
    print(f"ops: {sum(map(bool, r['ops'].values()))} of {len(r['ops'])}")
    print("\n".join(op_list()))
    print("`ggjit info OP` tells more of one op, `ggjit info FILE.gguf` what a file holds.")


def kernels_facts():
    return {"level": isa.LEVEL, "no_amx": isa.WHY_NO_TILES, "shipped": len(SHIPPED.names), "why_not": SHIPPED.why_not}


def kernels_line(facts):
    return f"kernels are for {facts['level']}; {facts['shipped'] or 'none'} came compiled" + ": " * bool(
        facts["why_not"]) + facts["why_not"]


# ---------------------------------------------------------------- this processor
def tuning_info(args):
    """Prints how products read the weights of each type here; the same as JSON."""
    rule = "this processor" if choices.RULE else "Intel processors, since none exists for this one"
    facts = {}
    for type in filter(tunable, all_traits()):
        found, tile = None if choices.SETTING else choices.kept(type), choices.tile(type)
        repacked = choices.pays_repacked(type) and type in repack.LAYOUTS
        layout = choices.layout_tile(type)._asdict() if repacked else None
        facts[type.name] = {"rows": tile.rows, "prefetch": tile.prefetch, "repacked": repacked, "layout": layout,
                            "amx": choices.by_amx(type, isa.W),
                            "why": "measured" if found else "GGJIT_TUNE" if choices.SETTING else "rule",
                            "seconds": found.seconds if found else {}}
    threads = {"rule": sharing.RULE_NANOSECONDS, "measured": {} if choices.SETTING == "off" else sharing.kept()}
    result = {"target": isa.target(), "rule": rule, "types": facts, "shared_from_nanoseconds": threads}
    if not args.json:
        print(f"kernels for {isa.target()}; types that were not measured follow the rule for {rule}\n\n"
              f"{'type':8} {'in the layout of the file':36} {'layout in use':44} chosen by")
        for name, f in facts.items():
            tile, layout = _tile_text(f, "row"), f["layout"] and f"repacked, {_tile_text(f['layout'], 'group')}"
            best = min(f["seconds"].values(), default=0)
            why = ", ".join(f"{n} {s / best:.2f}" for n, s in f["seconds"].items())
            print(f"{name:8} {tile:36} {layout or 'as in the file':44} {f['why']}"
                  + (f": seconds over the fastest's, {why}" if why else "") + "; many columns by AMX" * f["amx"])
        measured = "".join(f", {x / 1000:g} us with {n} (measured)" for n, x in threads["measured"].items())
        print(f"\nthreads share a node if its work takes at least {threads['rule'] / 1000:g} us (rule){measured}")
    return result


def _tile_text(tile, what):
    n, how = tile["rows"], tile["prefetch"]
    return f"{n} {what}{'s' * (n > 1)}{'' if how == OWN else f' ({PREFETCH.get(how, how)})'}"


# ---------------------------------------------------------------- a file
def file_info(args):
    """Prints what a GGUF file holds; the same as JSON.  Errors: BadFile."""
    result = file_facts(GGUFFile(args.what))
    if not args.json:
        show_file(result)
    return result


def file_facts(file):
    """{"files", "version", "alignment", "metadata", "tensors", "types": {type: {"tensors", "nbytes"}}, "n_params",
    "nbytes", "bits_per_weight"}.  An array is {"length", "first": its first items}."""
    types = {}
    for t in file.tensors.values():
        entry = types.setdefault(t.type.name, {"tensors": 0, "nbytes": 0})
        entry["tensors"] += 1
        entry["nbytes"] += t.nbytes
    nbytes, n = sum(t.nbytes for t in file.tensors.values()), sum(math.prod(t.ne) for t in file.tensors.values())
    return {"files": [part.path for part in file.parts], "version": file.version, "alignment": file.alignment,
            "metadata": {key: plain(value) for key, value in file.metadata.items()},
            "tensors": [{"name": t.name, "type": t.type.name, "ne": list(t.ne), "nbytes": t.nbytes, "offs": t.offs,
                         "part": t.part} for t in file.tensors.values()],
            "types": types, "n_params": n, "nbytes": nbytes, "bits_per_weight": 8 * nbytes / n if n else 0.0}


def plain(value):
    if isinstance(value, str | bool | int | float):
        return value
    first = value[:SHOWN]
    return {"length": len(value), "first": first.tolist() if isinstance(first, np.ndarray) else
            [plain(i) for i in first]}


def show_file(r):
    out, text = console(), cell
    out.print(table(f"{', '.join(r['files'])}: GGUF {r['version']}, {len(r['metadata'])} keys", ("key", "value"),
                    [(key, text(value)) for key, value in r["metadata"].items()]))
    out.print(table(f"{len(r['tensors'])} tensors", ("tensor", "ne", "type", "bytes"),
                    [(t["name"], " x ".join(map(str, t["ne"])), t["type"], f"{t['nbytes']:,}") for t in r["tensors"]]))
    kinds = ", ".join(f"{t['tensors']} {name} ({text_nbytes(t['nbytes'])})" for name, t in r["types"].items())
    print(f"{r['n_params']:,} numbers in {text_nbytes(r['nbytes'])}, {r['bits_per_weight']:.2f} bits each: {kinds}")


def cell(value):
    """A value in one line."""
    if isinstance(value, dict):
        items = ", ".join(map(cell, value["first"])) + (", ..." if value["length"] > SHOWN else "")
        return f"{value['length']:,} items: {items}"
    line = printable(str(value))
    return line if len(line) <= SHOWN_TEXT else f"{line[:SHOWN_TEXT]}... ({len(line):,} characters)"
