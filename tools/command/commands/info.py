"""`ggjit info`: version, processor, devices, and which types and ops each device supports."""
from ggjit import __version__
from ggjit.api.registry import registry
from ggjit.cpu.tuning import all_kept
from ggjit.tools.command.common import tiles_json, tiles_line
from ggjit.tools.command.op_page import find, op_facts, op_list, op_page
from ggjit.tools.command.support import supported

EXAMPLES = (("ggjit info", ""), ("ggjit info soft_max", "one op: builders, types, files"))


def add_arguments(c):
    c.add_argument("op", nargs="?", metavar="OP", help="one op: its builders, types and files (\"soft_max\")")


def run(args):
    if args.op:
        op = find(args.op)
        if not args.json:
            print(op_page(op), end="")
        return op_facts(op)
    ops, types = supported()
    result = {"version": __version__, "cpu": registry.by_type("cpu").description, "devices": registry.props(),
              "tiles": tiles_json(all_kept()), "types": types, "ops": ops}
    if not args.json:
        show(result)
    return result


def show(r):
    print(f"ggjit {r['version']} on {r['cpu']}")
    for d in r["devices"]:
        print(f"device {d['name']}: {d['description']}, {d['memory_free'] / 1e9:.1f} GB of "
              f"{d['memory_total'] / 1e9:.1f} GB free")
    tiles = tiles_line(r["tiles"]) or "the rule's; `ggjit warm-up MODEL` measures others"
    print(f"rows of decode tiles (speed over the rule's): {tiles}")
    types = [name for name, where in r["types"].items() if where]
    print(f"types: {len(types)} of {len(r['types'])}: {' '.join(types)}")
    print(f"ops: {sum(map(bool, r['ops'].values()))} of {len(r['ops'])}")
    print("\n".join(op_list()))
    print("`ggjit info OP` tells more of one op.")
