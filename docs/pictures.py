"""Makes the pictures of README and documentation from the notebooks, and those of the gallery from its page:
`python docs/pictures.py [notebooks] [gallery]` (needs matplotlib).

PICTURES names the figure: the notebook and the number of its `plt.show()`, counted from 0.  The gallery's are what its
blocks of code draw, called as the page calls them.
"""
import json
import os
import pathlib
import re
import sys
import tempfile

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

FOLDER = pathlib.Path(__file__).resolve().parent
NOTEBOOKS = FOLDER.parent / "notebooks"
PICTURES = {"planners": ("30_where_the_bytes_go", 2), "order": ("30_where_the_bytes_go", 3),
            "story-plan": ("20_a_story_token_by_token", 0),
            "devices": ("40_two_devices", 0)}


def run(notebook, wanted):
    """Execute a notebook's code cells; figure number k is saved under wanted[k]."""
    shown = 0

    def show():
        nonlocal shown
        if shown in wanted:
            plt.gcf().savefig(FOLDER / "pictures" / f"{wanted[shown]}.png", dpi=110)
        plt.close("all")
        shown += 1
    cells = json.loads((NOTEBOOKS / f"{notebook}.ipynb").read_text("utf-8"))["cells"]
    plt.show, names = show, {"__name__": "__main__"}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), notebook, "exec"), names)


def gallery():
    """The picture of each block of docs/gallery.md, under the name that follows the block."""
    page = (FOLDER / "gallery.md").read_text("utf-8")
    for code, name in re.findall(r"```python\n(.*?)```\n\n!\[.*?\]\((pictures/.*?)\)", page, re.S):
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            exec(compile(code, name, "exec"), {"__name__": "__main__"})
            plt.gcf().savefig(FOLDER / name, dpi=72, bbox_inches="tight", facecolor="white")
            os.chdir(FOLDER)
        plt.close("all")


def main():
    wanted = sys.argv[1:] or ["notebooks", "gallery"]
    (FOLDER / "pictures").mkdir(exist_ok=True)
    if "gallery" in wanted:
        gallery()
    os.chdir(NOTEBOOKS)
    for notebook in dict.fromkeys(n for n, _ in PICTURES.values()) if "notebooks" in wanted else ():
        run(notebook, {k: name for name, (n, k) in PICTURES.items() if n == notebook})


if __name__ == "__main__":
    main()
