"""The folders of the packages, lowest first: the tables of docs/where-is-what.md are the one list of them."""
import re

from helpers.paths import ROOT

FOLDERS = {"engine": "ggjit", "ops": "ggjit.ops", "alloc": "ggjit.alloc", "models": "ggjit.models",
           "tools": "ggjit.tools"}
ROWS = re.findall(r"^\| `([\w/]+)/` \|", (ROOT / "docs" / "where-is-what.md").read_text("utf-8"), re.M)


def package(folder):
    """"ggjit.ops.core" for "ops/core"."""
    top, *rest = folder.split("/")
    return ".".join([FOLDERS[top], *rest])


def _layers():
    """Packages in the order of the rows; the files of a top folder that has no row come after its folders."""
    found = []
    for i, row in enumerate(ROWS):
        top = row.split("/")[0]
        found.append(package(row))
        if top not in ROWS and (i + 1 == len(ROWS) or ROWS[i + 1].split("/")[0] != top):
            found.append(FOLDERS[top])
    return found


LAYERS = _layers()
