"""Makes the pictures of README and documentation from the notebooks: `python docs/pictures.py` (needs matplotlib).

PICTURES names the figure: the notebook and the number of its `plt.show()`, counted from 0.
"""
import json
import os
import pathlib

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


def main():
    os.chdir(NOTEBOOKS)
    (FOLDER / "pictures").mkdir(exist_ok=True)
    for notebook in dict.fromkeys(n for n, _ in PICTURES.values()):
        run(notebook, {k: name for name, (n, k) in PICTURES.items() if n == notebook})


if __name__ == "__main__":
    main()
