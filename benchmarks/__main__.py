"""What is measured, and by which program: python -m benchmarks > benchmarks/README.md

The programs are the files here that can be run, the sections those of the catalogue.
"""
import ast
import pathlib

from benchmarks.catalogue import SECTIONS
from benchmarks.costs import COSTS

FOLDER = pathlib.Path(__file__).parent


def programs():
    """{name: first line of what it says of itself, without its command} of the files that can be run."""
    out = {}
    for path in sorted(FOLDER.glob("[!_]*.py")):
        text = path.read_text("utf-8")
        if '__name__ == "__main__"' in text:
            said = ast.get_docstring(ast.parse(text)).partition("\n\n")[0].replace("\n", " ").replace("  ", " ")
            out[path.stem] = said.partition(": python")[0].partition(". ")[0].rstrip(".:")
    return out


def works():
    """{section: keys of its lines}"""
    return {name: [w.key for w in works] for name, works in SECTIONS.items()} | {"costs": list(COSTS)}


def readme():
    """The text of README.md in this folder."""
    told = [f"| `python -m benchmarks.{name}` | {said} |" for name, said in programs().items()]
    counted = [f"| {name} | {len(keys)} | `{keys[0]}` |" for name, keys in works().items()]
    return "\n".join([
        "# Benchmarks", "", "Written by `python -m benchmarks`. What was measured lies in `results/`, what it says is "
        "on [docs/measured.md](../docs/measured.md). `engines/` has ggjit and each peer behind one interface.", "",
        "| program | what it measures |", "| --- | --- |", *told, "",
        "Works that `benchmarks.peers` compares, from `catalogue.py` and `costs.py`; `--list` prints their keys:", "",
        "| section | lines | the first |", "| --- | --- | --- |", *counted]) + "\n"


if __name__ == "__main__":
    print(readme(), end="")
